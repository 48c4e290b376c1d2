"""Checks of notebook 00, one layer end to end.

Axes: T new tokens, S keys, N heads, H hidden, L KV rank, P nope, R rope, V value; all different.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

import tiers
from check.verdict import checker, judge
from mla.cache import FloatRows
from mla.need import Need
from mla.projections import rms_norm
from mla.rope import apply_rope

Answer = Callable[..., Any]
T, S, N, H, L, P, R, V = 3, 7, 2, 9, 11, 5, 4, 6


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@checker
def latent_row(answer: Answer) -> tuple[bool, str]:
    """Judge `latent_row(h, W_DKV, W_KR, kv_norm, eps, cos, sin)`: (T, H) to (T, L + R)."""
    h, W_DKV, W_KR, kv_norm, eps = _randn(T, H), _randn(H, L), _randn(H, R), torch.rand(L).double() + 0.5, 0.03
    angles = torch.rand(T, R // 2, dtype=torch.float64) * 3 + 0.2
    cos, sin = angles.cos(), angles.sin()
    raw, bare = h @ W_DKV, h @ W_KR
    kv_c, k_pe = rms_norm(raw, kv_norm, eps), apply_rope(bare, cos, sin, True)
    both = torch.cat([raw, k_pe], -1)
    wrong = {
        "the latent is not normed": both,
        "the position key is not rotated": torch.cat([kv_c, bare], -1),
        "nothing is normed or rotated": torch.cat([raw, bare], -1),
        "the whole row is normed; the norm is over the latent alone": rms_norm(
            both, torch.cat([kv_norm, torch.ones(R, dtype=torch.float64)]), eps
        ),
        "latent first, then the position key; this is the other way round": torch.cat([k_pe, kv_c], -1),
        "pairs are adjacent here, this rotates halves: apply_rope(..., True)": torch.cat(
            [kv_c, apply_rope(bare, cos, sin, False)], -1
        ),
        "the norm's weight is missing": torch.cat([rms_norm(raw, torch.ones_like(kv_norm), eps), k_pe], -1),
        "eps is not used: take the model's, not a default": torch.cat([rms_norm(raw, kv_norm, 1e-6), k_pe], -1),
        "the position key is normed too; only the latent is": torch.cat(
            [kv_c, apply_rope(rms_norm(bare, torch.ones(R), eps), cos, sin, True)], -1
        ),
    }
    return judge(answer(h, W_DKV, W_KR, kv_norm, eps, cos, sin), torch.cat([kv_c, k_pe], -1), wrong)


@checker
def attend_one(answer: Answer) -> tuple[bool, str]:
    """Judge `attend_one(q_nope, q_pe, kv_c, k_pe, W_UK, W_UV, scale)`: (N, P), (N, R) over S rows to (N, V)."""
    q_nope, q_pe, kv_c, k_pe = _randn(N, P), _randn(N, R), _randn(S, L), _randn(S, R)
    W_UK, W_UV, scale = _randn(L, N, P) / 3, _randn(L, N, V), 0.31
    keys, v = torch.einsum("sl,lnp->nsp", kv_c, W_UK), torch.einsum("sl,lnv->nsv", kv_c, W_UV)
    content, position = torch.einsum("np,nsp->ns", q_nope, keys), torch.einsum("nr,sr->ns", q_pe, k_pe)
    weigh = lambda scores, axis=-1: torch.einsum("ns,nsv->nv", scores.softmax(axis), v)
    wrong = {
        "the scale is missing": weigh(content + position),
        "the scale of a query of width L + R: it comes from P + R, and here from the argument": weigh(
            (content + position) * (L + R) ** -0.5
        ),
        "the scale is (P + R)^-0.5, and not the argument": weigh((content + position) * (P + R) ** -0.5),
        "the scale is P^-0.5, and not the argument": weigh((content + position) * P**-0.5),
        "divided by the scale: it multiplies": weigh((content + position) / scale),
        "the position part of the score is missing": weigh(scale * content),
        "the content part of the score is missing": weigh(scale * position),
        "softmax runs over the heads instead of the keys": weigh(scale * (content + position), 0),
        "content is scaled and position is not": weigh(scale * content + position),
        "there is no softmax": torch.einsum("ns,nsv->nv", scale * (content + position), v),
    }
    want = weigh(scale * (content + position))
    return judge(answer(q_nope, q_pe, kv_c, k_pe, W_UK, W_UV, scale), want, wrong)


@checker
def visible_keys(answer: Answer) -> tuple[bool, str]:
    """Judge `visible_keys(query_len, seq_len)` -> list of counts."""
    for q, s in ((1, random.randint(2, 9)), (random.randint(2, 5), random.randint(6, 12)), (4, 4)):
        got = answer(q, s)
        got = got.tolist() if isinstance(got, torch.Tensor) else list(got)
        want = [s - q + i + 1 for i in range(q)]
        wrong = {
            "lined up with the start of the cache, so the context is not seen": [i + 1 for i in range(q)],
            "one too few: a token sees itself": [n - 1 for n in want],
            "every row sees all keys, later tokens included": [s] * q,
            "the context only: new tokens see each other too": [s - q] * q,
            "seq_len counts the new tokens already": [s + i + 1 for i in range(q)],
        }
        known = next((why for why, value in wrong.items() if got == value), f"{got}")
        if got != want:
            return False, f"{q} new of {s} tokens: {known}"
    return True, "the last new token sees everything"


@checker
def first_that_serves(answer: Answer) -> tuple[bool, str]:
    """Judge `first_that_serves(need, names)` -> a name or "none"."""
    plain = dict(N=N, L=L, P=P, R=R, V=V, softmax_scale=0.3, layout=FloatRows(L, R, torch.float32), page_size=4)
    needs = {
        "plain MLA": Need(**plain, dtype=torch.float32),
        "a fixed summation order": Need(**plain, dtype=torch.float32, batch_invariant=True),
        "a window": Need(**plain, dtype=torch.float32, window=3),
    }
    names = ["naive:mha", "template", "paged", "naive:mqa"]
    for what, need in needs.items():
        order = random.sample(names, len(names))
        able = [name for name in order if not tiers.get(name).why_not(need)]
        want, got = (able[0] if able else "none"), answer(need, order)
        if got == want:
            continue
        if got in order and got not in able:
            return False, f"{what}: {got} refuses. An empty list of reasons means yes"
        if got in able:
            return False, f"{what}: {got} serves it, but {want} comes first in {order}"
        return False, f"{what}: {got!r} instead of {want!r}"
    return True, "the refusals are sentences: print one"
