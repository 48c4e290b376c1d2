"""Merge the states of units that several parts worked on, and write the rows that see no key.

Motivation. `seesaw` and `swap` write a unit that one part did to the result at once; only what was cut lies in slots,
float32 with base-2 LSEs. The launch is made early and waits on the device for the decode to end, so that its start
costs nothing. The schedule lists the units that were cut, since programs that find nothing to do are not free: 8192 of
them took 11.6 us on an H200.

Axes: U units, M rows of a slot, N heads, T tokens, L = 512.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from tiers.tier2_triton.kernels.problem import Problem

# Parts merged at once -> rows of a program: one row and many parts where few units are cut into many.
SHAPES = {2: 4, 4: 2, 16: 1}
MOST_PROGRAMS = 2048


@triton.jit
def _listed(merges, i, M, U, R: tl.constexpr):
    """The i-th R rows of the list, if it is so long: first row of the unit, rows before, rows, first and last part."""
    groups = M // R
    at, there = merges + 4 * (i // groups), i < U * groups
    row = tl.load(at, mask=there, other=0)
    rows = tl.load(at + 1, mask=there, other=0)
    first = tl.load(at + 2, mask=there, other=0)
    last = tl.load(at + 3, mask=there, other=0)
    return rows > 0, row, i % groups * R, rows, first, last


@triton.jit(do_not_specialize=["M", "U"])
def _combine_kernel(part_out, part_lse, merges, out, lse, M, U, R: tl.constexpr, AT_ONCE: tl.constexpr):
    """Go through the list of units that need it, R rows at a time, in strides of all programs."""
    i = tl.program_id(0)
    there, row, skipped, rows, first, last = _listed(merges, i, M, U, R)
    # Every program waits, also one that has nothing to do: the stream takes this launch's end for that of the decode.
    tl.extra.cuda.gdc_wait()
    d = tl.arange(0, 512)
    while there:
        r = skipped + tl.arange(0, R)
        inside = r < rows
        peak = tl.full([R], float("-inf"), tl.float32)
        total = tl.zeros([R], tl.float32)
        acc = tl.zeros([R, 512], tl.float32)
        for p in range(first, last + 1, AT_ONCE):  # no part where there is no key
            parts = p + tl.arange(0, AT_ONCE)
            slots = ((2 * parts + (parts == first)).to(tl.int64) * M)[:, None] + r[None, :]
            live = (parts <= last)[:, None] & inside[None, :]
            state = tl.load(part_lse + slots, mask=live, other=float("-inf"))
            values = tl.load(part_out + slots[:, :, None] * 512 + d[None, None, :], mask=live[:, :, None], other=0.0)
            new_peak = tl.maximum(peak, tl.max(state, 0))
            finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(state - finite[None, :])
            decay = tl.exp2(peak - finite)
            acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * values, 0)
            total = total * decay + tl.sum(weights, 0)
            peak = new_peak
        some = total > 0
        acc = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
        at = (row.to(tl.int64) + r)[:, None] * 512 + d[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None])
        natural = tl.where(some, (peak + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
        tl.store(lse + row + r, natural, mask=inside)
        i += tl.num_programs(0)
        there, row, skipped, rows, first, last = _listed(merges, i, M, U, R)


def combine(part_out: Tensor, part_lse: Tensor, merges: Tensor, out: Tensor, lse: Tensor, M: int, at_once: int) -> None:
    """Merge part_out (slots, M, 512) and part_lse (slots, M), float32, base 2, into out (T, N, 512) and lse (T, N).

    `merges` (U, 4) int32 is that of `schedule`, a list of units: first row, rows, first and last part; it ends where a
    unit has no rows. The states of a unit lie in slots 2 first + 1 and 2 p for the other parts. Rows of a unit without
    keys, whose last part is before its first, get 0 and -inf; a unit that is not listed, since one part did it, is left
    alone. lse is float32, natural. `at_once` states are merged at once, 2, 4 or 16.
    Source: FlashAttention-2 (arXiv 2307.08691) section 3.1.
    """
    R, U = SHAPES[at_once], merges.shape[0]
    _combine_kernel[(min(M // R * U, MOST_PROGRAMS),)](
        part_out, part_lse, merges, out, lse, M, U, R, at_once, num_warps=4, launch_pdl=True
    )


def combine_reference(
    part_out: Tensor, part_lse: Tensor, merges: Tensor, out: Tensor, lse: Tensor, M: int, at_once: int
) -> None:
    """What `combine` computes, out (T, N, 512) and lse (T, N), in part_out's dtype."""
    rows_out, rows_lse = out.view(-1, out.shape[-1]), lse.view(-1)
    for row, rows, first, last in itertools.takewhile(lambda one: one[1], merges.tolist()):
        mine = slice(row, row + rows)
        if last < first:
            rows_out[mine], rows_lse[mine] = 0, float("-inf")
        else:
            slots = [2 * first + 1, *(2 * p for p in range(first + 1, last + 1))]
            states = part_lse[slots, :rows] * 0.6931471805599453
            z = torch.logsumexp(states, 0)
            weights = torch.where(z.isinf(), 0, torch.exp(states - torch.where(z.isinf(), 0, z)))
            rows_out[mine], rows_lse[mine] = (weights[..., None] * part_out[slots, :rows]).sum(0).to(out.dtype), z


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """Units cut in 3 and in 18, one without keys ("toy"); 64 of 128 rows cut in 3 ("real")."""
    toy = size == "toy"
    N, M = (3, 16) if toy else (128, 128)
    listed = [(0, N, 0, 2), (2 * N, N, 0, -1), (3 * N, N, 3, 20), (0, 0, 0, 0), (0, 0, 0, 0)]
    if not toy:
        listed = [(u * N, N, u, u + 2) for u in range(64)]
    slots = 2 * (max(last for *_, last in listed) + 1)
    random = torch.Generator(device).manual_seed(seed)
    part_lse = torch.randn(slots, M, generator=random, device=device) * 3
    part_lse[:, 1] = float("-inf")
    part_out = torch.randn(slots, M, 512, generator=random, device=device)
    ints = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
    T = len(listed)
    arguments: dict[str, Any] = {
        "part_out": part_out,
        "part_lse": part_lse,
        "merges": ints(listed),
        "out": torch.full((T, N, 512), float("nan"), dtype=dtype, device=device),
        "lse": torch.full((T, N), float("nan"), device=device),
        "M": M,
        "at_once": 16 if toy else 2,
    }
    cut = sum(last - first + 1 for _, rows, first, last in listed if rows)
    return Problem(arguments, ("out", "lse"), cut * N * 513 * 4 + T * N * 512 * dtype.itemsize)


def aot() -> list[Compile]:
    """Both shapes, per dtype."""
    entries = []
    for kind in ("bf16", "fp16"):
        for at_once, R in SHAPES.items():
            signature = {"part_out": "*fp32", "part_lse": "*fp32", "merges": "*i32"}
            signature |= {"out": f"*{kind}", "lse": "*fp32", "M": "i32", "U": "i32"}
            constants = {"R": R, "AT_ONCE": at_once}
            name = f"combine {kind}, {at_once} at once"
            entries.append(Compile(_combine_kernel, signature, constants, 4, targets=("sm_90",), name=name))
    return entries
