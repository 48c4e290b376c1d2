"""Checks of notebook 02, latents. Axes: S tokens, N heads, H hidden, Lq query rank, L KV rank, P, R, V widths."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from check.verdict import checker, judge
from mla.projections import rms_norm

Answer = Callable[..., Any]


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@checker
def largest_rank(answer: Answer) -> tuple[bool, str]:
    """Judge `largest_rank(S, N, P, V, L)`: min(S, L, N (P + V))."""
    for S, N, P, V, L in ((random.randint(200, 300), 8, 10, 9, 24), (17, 8, 10, 9, 24), (300, 1, 5, 4, 24)):
        right = min(S, L, N * (P + V))
        wrong = {
            "keys and values share one latent: L, not 2 L": min(S, 2 * L, N * (P + V)),
            "all heads share one latent: L, not N L": min(S, N * L, N * (P + V)),
            "the latent's L does not limit it here, fewer tokens or columns do": L,
            "that is plain attention: the latent limits it": min(S, N * (P + V)),
            "of one head: the heads stand side by side": min(S, L, P + V),
            "of the keys alone": min(S, L, N * P),
        }
        wrong = {why: value for why, value in wrong.items() if value != right}
        ok, why = judge(answer(S, N, P, V, L), right, wrong)
        if not ok:
            return False, f"S={S}, N={N}, P={P}, V={V}, L={L}: {why}"
    return True, "with many tokens it is L"


@checker
def values_of(answer: Answer) -> tuple[bool, str]:
    """Judge `values_of(rows, W_UV)`: (S, L + R) to (S, N, V)."""
    S, N, L, R, V = 5, 3, 8, 4, 6
    rows, W_UV = _randn(S, L + R), _randn(L, N, V)
    of = lambda latent: torch.einsum("sl,lnv->snv", latent, W_UV)
    wrong = {
        "the latent is the first L columns of the row, not the last": of(rows[:, R:]),
        "the heads were summed: every head has its own value": of(rows[:, :L]).sum(1),
        "axes (N, S, V): tokens come first": of(rows[:, :L]).transpose(0, 1),
    }
    return judge(answer(rows, W_UV), of(rows[:, :L]), wrong, "R columns of the row have no part in it")


@checker
def fold_gain(answer: Answer) -> tuple[bool, str]:
    """Judge `fold_gain(W_UK, W_UV, kv_norm)` by the keys and values that come out."""
    S, N, L, P, V = 4, 3, 6, 5, 7
    W_UK, W_UV, gain, raw = _randn(L, N, P), _randn(L, N, V), torch.rand(L).double() + 0.5, _randn(S, L)
    got = answer(W_UK, W_UV, gain)
    if not (isinstance(got, tuple) and len(got) == 2):
        return False, "return two tensors: W_UK, W_UV"
    bare, normed = rms_norm(raw, torch.ones_like(gain), 1e-6), rms_norm(raw, gain, 1e-6)
    for name, W, new in (("W_UK", W_UK, got[0]), ("W_UV", W_UV, got[1])):
        if not isinstance(new, Tensor) or new.shape != W.shape:
            return False, f"{name} keeps its shape {tuple(W.shape)}"
        through = lambda latent, matrix: torch.einsum("sl,lnp->snp", latent, matrix)
        wrong = {
            "nothing is folded in": through(bare, W),
            "divided: the gain multiplies": through(bare, W / gain[:, None, None]),
            "the gain is folded in twice": through(bare, W * gain.square()[:, None, None]),
            "one factor for all: the gain differs along L": through(bare, W * gain.mean()),
        }
        ok, why = judge(through(bare, new), through(normed, W), wrong)
        if not ok:
            return False, f"what {name} gives: {why}"
    return True, "diag(kv_norm) is a matrix, the division by the length is not"


@checker
def largest_useful_rank(answer: Answer) -> tuple[bool, str]:
    """Judge `largest_useful_rank(H, N, P, R)`: the largest Lq with Lq (H + W) < H W, W = N (P + R)."""
    for H, N, P, R in (
        (7168, 128, 128, 64),
        (random.choice([1000, 2000]), random.choice([7, 10]), 60, 20),
        (6, 1, 4, 2),
    ):
        width = N * (P + R)
        right = (H * width - 1) // (H + width)
        wrong = {
            "one too many: there the two have as many parameters as the one": right + 1,
            "min(H, N (P + R)): at that rank the product can be any matrix, and has far more parameters": min(H, width),
            "half of it": right // 2,
            "the rope part of the queries is missing": (H * N * P - 1) // (H + N * P),
            "the heads are missing": (H * (P + R) - 1) // (H + P + R),
        }
        wrong = {why: value for why, value in wrong.items() if value != right}
        got = answer(H, N, P, R)
        got = int(got) if isinstance(got, float) and got.is_integer() else got
        ok, why = judge(got, right, wrong)
        if not ok:
            return False, f"H={H}, N={N}, P={P}, R={R}: {why}"
    return True, f"V3 uses 1,536 of {(7168 * 24576 - 1) // (7168 + 24576):,}"
