"""Merge the partial states of a split request: the second half of split-KV decoding.

Motivation. `decode` leaves one normalised state per segment of keys, in float32 with a base-2 LSE. They merge by
weights 2^(lse_k - max): L * 4 bytes a segment are read for each row, which is little beside the cache as long as a
segment has many keys; at one request over 256 segments it is a tenth, so the work is spread over columns too.

The merge goes through the segments in order, `at_once` of them in a step. With 1 it is strictly left to right, and a
segment without keys for a row changes no bit of it: its weight is 0, and the factor of what came before is 1.

Axes: T new tokens (packed over requests), N heads, L KV rank, M rows of a tile, K slots.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from tiers.tier2_triton.kernels.problem import Problem
from tiers.tier2_triton.launch import TARGETS, power

LN2 = tl.constexpr(0.6931471805599453)
# Segments merged at once -> rows and columns of a program: few rows and columns where many segments are to be read.
SHAPES = {1: (4, 512), 4: (4, 512), 16: (2, 128)}


@triton.jit(do_not_specialize=["out_stride_t", "out_stride_n", "N"], do_not_specialize_on_alignment=["items", "count"])
def _combine_kernel(part, part_lse, items, count, out, lse, out_stride_t, out_stride_n, N,
                    UNIT: tl.constexpr, L: tl.constexpr, M: tl.constexpr, RB: tl.constexpr, SB: tl.constexpr,
                    CB: tl.constexpr):  # fmt: skip
    """RB rows and CB columns of one tile: fold its segments, SB at a time."""
    item = tl.program_id(0)
    work = items + item * 8  # read at once with the count: one wait on memory less
    t0, m0, rows = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    slot, segments = tl.load(work + 3), tl.load(work + 4)
    if item < tl.load(count):
        i, k = tl.program_id(1) * RB + tl.arange(0, RB), tl.arange(0, SB)
        cols = tl.program_id(2) * CB + tl.arange(0, CB)
        m = m0 + i
        inside = (m < rows) & (i < M)
        peak = tl.full([RB], float("-inf"), tl.float32)
        total = tl.zeros([RB], tl.float32)
        acc = tl.zeros([RB, CB], tl.float32)
        for first in range(0, segments, SB):
            live = inside[:, None] & (first + k < segments)[None, :]
            at = (slot + first + k).to(tl.int64)[None, :] * M + i[:, None]
            state = tl.load(part_lse + at, mask=live, other=float("-inf"))
            new_peak = tl.maximum(peak, tl.max(state, 1))
            finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(state - finite[:, None])
            values = part + at[:, :, None] * L + cols[None, None, :]
            rows_of = tl.load(values, mask=live[:, :, None] & (cols < L)[None, None, :], other=0.0)
            decay = tl.exp2(peak - finite)
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * rows_of, 1)
            peak = new_peak
        some = total > 0
        total = tl.where(some, total, 1.0)
        acc = tl.where(some[:, None], acc / total[:, None], 0.0)
        token, head = (t0 + m // N).to(tl.int64), m % N
        first_of_row = token * out_stride_t * UNIT + head.to(tl.int64) * out_stride_n * UNIT
        where = out + first_of_row[:, None] + cols[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=inside[:, None] & (cols < L)[None, :])
        if tl.program_id(2) == 0:
            natural = tl.where(some, (peak + tl.log2(total)) * LN2, float("-inf"))
            tl.store(lse + token * N + head, natural, mask=inside)


def combine(
    part: Tensor, part_lse: Tensor, items: Tensor, count: Tensor, out: Tensor, lse: Tensor, at_once: int
) -> None:
    """Merge the segments of each of the first `count` (1,) items (n, 8) int32 into out (T, N, L) and lse (T, N).

    part (K, M, L) and part_lse (K, M) are float32 with base-2 LSEs, lse is float32 and natural. An item is (first
    token, first row, rows, first slot, segments, -, -, -). An item without segments, and a row whose segments are all
    empty, gets 0 and -inf. `at_once` segments are merged in one step: 1, which is strictly left to right, 4, or 16
    where there are many. Source: FlashAttention-2 (arXiv 2307.08691) section 3.1, applied to FlashDecoding's splits.
    """
    M, L = part.shape[1], part.shape[2]
    RB, CB = SHAPES[at_once]
    RB, CB = min(RB, M), min(CB, power(L))
    if part.device.type == "cpu":  # the interpreter takes a millisecond a program, however large
        RB, CB = M, power(L)
    unit = 8 if out.stride(0) % 8 == out.stride(1) % 8 == 0 else 1
    _combine_kernel[(items.shape[0], triton.cdiv(M, RB), triton.cdiv(L, CB))](
        part, part_lse, items, count, out, lse, out.stride(0) // unit, out.stride(1) // unit, out.shape[1],
        UNIT=unit, L=L, M=M, RB=RB, SB=at_once, CB=CB, num_warps=4,
    )  # fmt: skip


def combine_reference(
    part: Tensor, part_lse: Tensor, items: Tensor, count: Tensor, out: Tensor, lse: Tensor, at_once: int
) -> None:
    """What `combine` computes: out (T, N, L) as the mean of part's rows weighted by 2^lse, in part's dtype."""
    N, M = out.shape[1], part.shape[1]
    for t0, m0, rows, slot, segments, *_ in items[: int(count)].tolist():
        for i in range(min(M, rows - m0)):
            states = part_lse[slot : slot + segments, i] / 1.4426950408889634
            z = torch.logsumexp(states, 0) if segments else torch.tensor(float("-inf"))
            weights = torch.exp(states - z) if bool(torch.isfinite(z)) else torch.zeros_like(states)
            t, n = t0 + (m0 + i) // N, (m0 + i) % N
            out[t, n], lse[t, n] = weights @ part[slot : slot + segments, i], z


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """Ragged segments, some rows and one item empty ("toy"), or 256 segments of one request of 16 heads ("real")."""
    toy = size == "toy"
    N, L, M, segments = (5, 24, 16, [3, 0, 1, 18]) if toy else (16, 512, 16, [256])
    random = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=device)
    K = sum(segments)
    part, part_lse = draw(K, M, L), draw(K, M) * 3
    part_lse[:: 3 if toy else K, 2] = float("-inf")
    part[part_lse == float("-inf")] = 0
    part[:, N:] = part[:, N:] * (float("nan") if toy else 1)  # rows past the request's
    slots = [sum(segments[:i]) for i in range(len(segments))]
    items = [(t, 0, N, slots[t], n, 0, 0, 0) for t, n in enumerate(segments)]
    T = len(items)
    arguments: dict[str, Any] = {
        "part": part,
        "part_lse": part_lse,
        "items": torch.tensor(items, dtype=torch.int32, device=device),
        "count": torch.tensor([T], dtype=torch.int32, device=device),
        "out": torch.full((T, N, L), float("nan"), dtype=dtype, device=device),
        "lse": torch.full((T, N), float("nan"), device=device),
        "at_once": 16,
    }
    return Problem(arguments, ("out", "lse"), K * min(M, N) * (L + 1) * 4 + T * N * L * dtype.itemsize)


def aot() -> list[Compile]:
    """Both shapes of a program for 16 and 64 rows, per output dtype."""
    entries = []
    for kind in ("bf16", "fp16", "fp32"):
        for M in (16, 64):
            for SB, (RB, CB) in SHAPES.items():
                signature = {"part": "*fp32", "part_lse": "*fp32", "items": "*i32", "count": "*i32", "out": f"*{kind}"}
                signature |= {"lse": "*fp32", "out_stride_t": "i32", "out_stride_n": "i32", "N": "i32"}
                constants = {"UNIT": 8, "L": 512, "M": M, "RB": RB, "SB": SB, "CB": CB}
                name = f"combine {kind} {M} rows {SB} at once"
                entries.append(Compile(_combine_kernel, signature, constants, 4, 3, TARGETS, name))
    return entries
