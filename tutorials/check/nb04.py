"""Checkers of notebook 04, two orders of multiplication.

Axes: T new tokens, S keys, N heads, L KV rank, P nope, R rope, V value; all different in every problem drawn here.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from check.known import by_name, pair
from check.verdict import checker, judge
from mla.cost import BatchCounts, absorbed_cost, count_batch, expanded_cost, merged_sizes
from mla.oracle import oracle
from mla.presets import preset

SHAPES = [(3, 4, 13, 6, 4, 5), (2, 5, 11, 7, 2, 4), (4, 3, 17, 5, 6, 8)]  # T, N, L, P, R, V
Answer = Callable[..., Any]


@checker
def absorb(fn: Answer) -> tuple[bool, str]:
    """Judge `absorb(q_nope, W_UK)`: (T, N, P) and (L, N, P) to (T, N, L)."""
    T, N, L, P, _, _ = random.choice(SHAPES)
    q_nope, W_UK = _randn(T, N, P), _randn(L, N, P)
    answer = fn(q_nope, W_UK)
    right = torch.einsum("tnp,lnp->tnl", q_nope, W_UK)
    wrong = {
        "the axes are (N, T, L): put the tokens first": right.transpose(0, 1),
        "the axes are (T, L, N): heads come before the latent": right.transpose(1, 2),
        "you summed over the heads: every head has its own W_UK": right.sum(1),
        "every head was multiplied with the sum of all heads' W_UK": torch.einsum("tnp,lp->tnl", q_nope, W_UK.sum(1)),
    }
    known = by_name(answer, wrong)
    return (False, known) if known else judge(answer, right, right="q_latent is q_nope times W_UK, head by head")


@checker
def absorbed_attention(fn: Answer) -> tuple[bool, str]:
    """Judge `absorbed_attention(q_nope, q_pe, kv_c, k_pe, W_UK, W_UV, softmax_scale)` against the float64 oracle."""
    T, N, L, P, R, V = random.choice(SHAPES)
    S, scale = random.randint(9, 14), 0.3 + random.random() / 5
    q_nope, q_pe, kv_c, k_pe = _randn(T, N, P), _randn(T, N, R), _randn(S, L), _randn(S, R)
    W_UK, W_UV = _randn(L, N, P) / L**0.5, _randn(L, N, V) / L**0.5
    answer = fn(q_nope, q_pe, kv_c, k_pe, W_UK, W_UV, scale)
    if pair(answer, "out and lse"):
        return False, pair(answer, "out and lse")
    out, lse = answer
    truth = lambda q_pe, scale: oracle(q_nope, q_pe, kv_c, k_pe, W_UK, W_UV, torch.full((T,), S), scale)
    right_out, right_lse = truth(q_pe, scale)
    content = torch.einsum("tnp,lnp,sl->tns", q_nope, W_UK, kv_c)
    scores = content + torch.einsum("tnr,sr->tns", q_pe, k_pe)
    weights = torch.softmax(scores * scale, -1)
    outs = {
        "the scores are not scaled: use the softmax_scale that you were given": truth(q_pe, 1.0)[0],
        "you scale by (L + R)^-0.5. Moving a bracket leaves the scores as they were, and their scale": truth(
            q_pe, (L + R) ** -0.5
        )[0],
        "you scale by (P + R)^-0.5, which lacks YaRN's part: use the softmax_scale that you were given": truth(
            q_pe, (P + R) ** -0.5
        )[0],
        "the position part of the score is missing: add q_pe . k_pe": truth(q_pe * 0, scale)[0],
        "this is still the latent output (T, N, L): multiply it with W_UV, head by head": weights @ kv_c,
    }
    lses = {
        "your lse is 1.443 x too large: base 2? Use the natural logarithm": right_lse / math.log(2),
        "your lse is 0.693 x too small: base 2, or multiplied by ln 2 once too often?": right_lse * math.log(2),
        "your lse is that of scores without the softmax scale: scale them first": torch.logsumexp(scores, -1),
        "your lse lacks the largest score that you subtracted": -weights.amax(-1).log(),
        "your lse is the sum of the exponentials: take its logarithm": right_lse.exp(),
        "your lse is the largest score, not the log of the sum of exponentials": right_lse + weights.amax(-1).log(),
    }
    known = by_name(out, outs)
    if known:
        return False, known
    ok, why = judge(out, right_out)
    if not ok:
        return False, f"out: {why}"
    ok, why = judge(lse, right_lse, lses, f"equal to the oracle: {S} keys, {N} heads, scale {scale:.3f}")
    return ok, why if ok else f"out is right, lse is not: {why}"


@checker
def pair_flops(fn: Answer) -> tuple[bool, str]:
    """Judge `pair_flops(L, P, R, V)` -> FLOPs per (query, key, head), expanded and absorbed."""
    L, P, R, V = (random.choice(x) for x in ((256, 448, 512), (64, 96, 160), (32, 40, 72), (80, 128, 224)))
    answer = fn(L, P, R, V)
    if pair(answer, "expanded and absorbed"):
        return False, pair(answer, "expanded and absorbed")
    config = preset("deepseek-v3").replace(
        num_attention_heads=1, kv_lora_rank=L, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V
    )
    one = BatchCounts(tokens=0, keys=0, pairs=1)
    right = (expanded_cost(config, one).flops, absorbed_cost(config, one).flops)
    hints = {
        right: "",
        (right[0] // 2, right[1] // 2): "half of it: a multiply and an add are 2 FLOPs",
        (2 * (P + R + V), 2 * (L + R)): "the absorbed form also multiplies probabilities with values, L wide",
        (2 * (P + R), 2 * (L + R)): "those are the scores: probabilities times values cost as well",
        (2 * (P + V), 2 * 2 * L): "the rope part of every score is missing, in both forms",
        (2 * (P + R + V), 2 * 2 * L): "the rope part is missing in the absorbed form: not absorbed, but still there",
        (2 * (P + R + V), 2 * (2 * L + 2 * R)): "values are the first L columns of a row: R counts once, in the score",
        (right[1], right[0]): "the other way round: expanded first",
        (2 * (P + R + V), 2 * (L + R + V)): "absorbed values are L wide; W_UV comes once, at the end",
    }
    why = hints.get(tuple(answer), f"L={L}, P={P}, R={R}, V={V} give {answer}; count score and value separately")
    return not why, why or f"{right[0]} and {right[1]} FLOPs for L={L}, P={P}, R={R}, V={V}"


@checker
def break_even(fn: Answer) -> tuple[bool, str]:
    """Judge `break_even(L, P, V, context)`: the smallest query_len at which expanding needs no more FLOPs."""
    sizes = [(512, 128, 128, 1024), (512, 128, 128, random.randint(40, 400))]
    sizes += [(512, 192, 256, random.randint(900, 9000)), (384, 64, 80, random.randint(100, 3000))]
    for L, P, V, context in sizes:
        answer = fn(L, P, V, context)
        right, limit = _first_expanded(L, P, V, context), L * (P + V) / (2 * L - P - V)
        if answer == right:
            continue
        at = f"L={L}, P={P}, V={V}, {context} cached tokens"
        if isinstance(answer, int | float) and abs(answer - limit) < 1.01:
            why = f"{at}: {answer} is the limit of long contexts. New tokens see each other too: {right}"
        elif isinstance(answer, int | float) and answer == right - 1:
            why = f"{at}: one too low, at {answer} the absorbed form still needs fewer FLOPs"
        elif isinstance(answer, int | float) and answer == right + 1:
            why = f"{at}: one too high, expanding already pays at {right}"
        else:
            why = f"{at}: you say {answer}. Count both forms with count_batch([q], [context + q]) for growing q"
        return False, why
    return True, "equal to counting every query length, at four contexts"


@checker
def merged_ratio(fn: Answer) -> tuple[bool, str]:
    """Judge `merged_ratio(Lq, L, P)`: numbers in W_UQ W_UK over numbers in the two matrices, head by head."""
    for Lq, L, P in ((1536, 512, 128), (random.choice((768, 1024)), 256, 64), (random.choice((192, 288)), 96, 160)):
        answer = fn(Lq, L, P)
        config = preset("deepseek-v3").replace(q_lora_rank=Lq, kv_lora_rank=L, qk_nope_head_dim=P)
        merged, apart = merged_sizes(config)["W_UQ W_UK"]
        right = merged / apart
        hints = {
            "upside down: the product goes on top": apart / merged,
            "the two matrices are counted as one P x P square": merged / (config.N * P * P),
            "you counted the heads on one side only": right * config.N,
            "two matrices: P Lq and P L are added, not multiplied": 1 / (P * P),
            "only W_UK stands below: W_UQ has to be counted too": Lq / P,
            "only W_UQ stands below: W_UK has to be counted too": L / P,
        }
        ok, why = judge(answer, right, hints)
        if not ok:
            return False, f"Lq={Lq}, L={L}, P={P}: {why}"
    return True, "equal to mla.cost.merged_sizes, for three sets of sizes"


def _first_expanded(L: int, P: int, V: int, context: int) -> int:
    """The smallest query_len whose expanded form needs no more FLOPs, by counting."""
    config = preset("deepseek-v3").replace(kv_lora_rank=L, qk_nope_head_dim=P, v_head_dim=V)
    for q in range(1, 10_000):
        counts = count_batch([q], [context + q])
        if expanded_cost(config, counts).flops <= absorbed_cost(config, counts).flops:
            return q
    raise AssertionError("these sizes have no break-even")


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)
