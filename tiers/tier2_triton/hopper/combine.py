"""Merge the states of units that several parts worked on, and write the rows that see no key.

Motivation. `seesaw` and `swap` write a unit that one part did to the result at once; only what was cut lies in slots,
float32 with base-2 LSEs. The launch is made early and waits on the device for the decode to end, so that its start
costs nothing. The schedule lists the units that were cut, since programs that find nothing to do are not free: 8192 of
them took 11.6 us on an H200.

Axes: U units, M rows of a slot, N heads, T tokens, L = 512.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from tiers.tier2_triton.kernels.problem import Problem

# Parts merged at once -> rows of a program: one row and many parts where few units are cut into many.
SHAPES = {2: 2, 16: 1}
MOST_PROGRAMS = 2048


@triton.jit
def _listed(units, place, i, M, U, R: tl.constexpr):
    """The i-th R rows of the list, if it is so long: first row of the unit, rows before, rows, first and last part."""
    groups = M // R
    u = tl.load(place + 4 * (i // groups), mask=i < U * groups, other=-1)
    there = u >= 0
    skipped = i % groups * R
    row = tl.load(units + 4 * u + 1, mask=there, other=0)
    rows = tl.load(units + 4 * u + 2, mask=there, other=0)
    blocks = tl.load(place + 4 * u + 1, mask=there, other=0)
    first = tl.load(place + 4 * u + 2, mask=there, other=0)
    last = tl.load(place + 4 * u + 3, mask=there, other=0)
    return there, row, skipped, rows, first, tl.where(blocks > 0, last, first - 1)


@triton.jit(do_not_specialize=["M", "U"])
def _combine_kernel(part_out, part_lse, units, place, out, lse, M, U, R: tl.constexpr, AT_ONCE: tl.constexpr):
    """Go through the list of units that need it, R rows at a time, in strides of all programs."""
    i = tl.program_id(0)
    there, row, skipped, rows, first, last = _listed(units, place, i, M, U, R)
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
        there, row, skipped, rows, first, last = _listed(units, place, i, M, U, R)


def combine(
    part_out: Tensor, part_lse: Tensor, units: Tensor, place: Tensor, out: Tensor, lse: Tensor, M: int, at_once: int
) -> None:
    """Merge part_out (slots, M, 512) and part_lse (slots, M), float32, base 2, into out (T, N, 512) and lse (T, N).

    `units` (U, 4) and `place` (U, 4) int32 are those of `schedule`: a unit spread over parts first .. last has its
    states in slots 2 first + 1 and 2 p for the others. Rows of a unit without keys get 0 and -inf; a unit that is not
    listed, since one part did it, is left alone. lse is float32, natural. `at_once` states are merged at once, 2 or 16.
    Source: FlashAttention-2 (arXiv 2307.08691) section 3.1.
    """
    R, U = SHAPES[at_once], units.shape[0]
    _combine_kernel[(min(M // R * U, MOST_PROGRAMS),)](
        part_out, part_lse, units, place, out, lse, M, U, R, at_once, num_warps=4, launch_pdl=True
    )


def combine_reference(
    part_out: Tensor, part_lse: Tensor, units: Tensor, place: Tensor, out: Tensor, lse: Tensor, M: int, at_once: int
) -> None:
    """What `combine` computes, out (T, N, 512) and lse (T, N), in part_out's dtype."""
    rows_out, rows_lse = out.view(-1, out.shape[-1]), lse.view(-1)
    for u in (u for u in place[:, 0].tolist() if u >= 0):
        (_, row, rows, _), (_, blocks, first, last) = units[u].tolist(), place[u].tolist()
        mine = slice(row, row + rows)
        if blocks == 0:
            rows_out[mine], rows_lse[mine] = 0, float("-inf")
        else:
            slots = [2 * first + 1, *(2 * p for p in range(first + 1, last + 1))]
            states = part_lse[slots, :rows] * 0.6931471805599453
            z = torch.logsumexp(states, 0)
            weights = torch.where(z.isinf(), 0, torch.exp(states - torch.where(z.isinf(), 0, z)))
            rows_out[mine], rows_lse[mine] = (weights[..., None] * part_out[slots, :rows]).sum(0).to(out.dtype), z


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """A unit cut in three, one whole, one without keys, one without rows ("toy"); 64 cut in three ("real")."""
    toy = size == "toy"
    N, M = (3, 16) if toy else (128, 128)
    listed = [0, 2, 3, -1, -1] if toy else list(range(64))
    parts = [(9, 0, 2), (4, 2, 2), (0, 0, 0), (40, 3, 20), (0, 0, 0)] if toy else [(128, i, i + 2) for i in range(64)]
    places = [(u, *one) for u, one in zip(listed, parts, strict=True)]
    units = [(u, u * N, N if u < 4 or not toy else 0, 0) for u in range(len(places))]
    slots = 2 * (max(last for *_, last in places) + 1)
    random = torch.Generator(device).manual_seed(seed)
    part_lse = torch.randn(slots, M, generator=random, device=device) * 3
    part_lse[:, 1] = float("-inf")
    part_out = torch.randn(slots, M, 512, generator=random, device=device)
    ints = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
    T = len(units)
    arguments: dict[str, Any] = {
        "part_out": part_out,
        "part_lse": part_lse,
        "units": ints(units),
        "place": ints(places),
        "out": torch.full((T, N, 512), float("nan"), dtype=dtype, device=device),
        "lse": torch.full((T, N), float("nan"), device=device),
        "M": M,
        "at_once": 16 if toy else 2,
    }
    cut = sum(last - first + 1 for _, blocks, first, last in places if blocks and last > first)
    return Problem(arguments, ("out", "lse"), cut * N * 513 * 4 + T * N * 512 * dtype.itemsize)


def aot() -> list[Compile]:
    """Both shapes, per dtype."""
    entries = []
    for kind in ("bf16", "fp16"):
        for at_once, R in SHAPES.items():
            signature = {"part_out": "*fp32", "part_lse": "*fp32", "units": "*i32", "place": "*i32"}
            signature |= {"out": f"*{kind}", "lse": "*fp32", "M": "i32", "U": "i32"}
            constants = {"R": R, "AT_ONCE": at_once}
            name = f"combine {kind}, {at_once} at once"
            entries.append(Compile(_combine_kernel, signature, constants, 4, targets=("sm_90",), name=name))
    return entries
