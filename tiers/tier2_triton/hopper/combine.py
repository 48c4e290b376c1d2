"""Merge the states of units that several parts worked on, and write the rows that see no key.

Motivation. `seesaw` and `swap` write a unit that one part did to the result at once; only what was cut lies in slots,
float32 with base-2 LSEs. The launch is made early and waits on the device for the decode to end, which hides a part of
its start: 3 us are left where nothing is cut. The schedule lists the units that were cut, since programs that find
nothing to do are not free: 8192 of them took 11.6 us on an H200.

Axes: U units, M rows of a slot, 8 rows of a program, WIDTH = A B of its columns, N heads, T tokens, L = 512.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from tiers.tier2_triton.kernels.problem import Problem

# Parts merged at once -> columns of a program, which takes 8 rows: fewer where few units are cut into many.
SHAPES = {2: 256, 4: 256, 16: 64, 64: 16}
MOST_PROGRAMS = 528  # about what an H200 runs at once; more wait for their turn, which cost 1 us


@triton.jit
def _listed(merges, i, M, U, WIDTH: tl.constexpr):
    """What program i does of the list: the unit's first row, rows, first and last part, rows and columns to skip."""
    bands = 512 // WIDTH
    programs = M // 8 * bands
    at, there = merges + 4 * (i // programs), i < U * programs
    row = tl.load(at, mask=there, other=0)
    rows = tl.load(at + 1, mask=there, other=0)
    first = tl.load(at + 2, mask=there, other=0)
    last = tl.load(at + 3, mask=there, other=0)
    return rows > 0, row, rows, first, last, i % programs // bands * 8, i % bands * WIDTH


@triton.jit(do_not_specialize=["M", "U"])
def _combine_kernel(
    part_out, part_lse, merges, out, lse, M, U, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, AS_HELD: tl.constexpr
):
    """Go through the list of units that need it, 8 rows and WIDTH columns at a time, in strides of all programs."""
    i = tl.program_id(0)
    there, row, rows, first, last, skipped, column = _listed(merges, i, M, U, WIDTH)
    A: tl.constexpr = WIDTH // 16 if AS_HELD else 1
    B: tl.constexpr = WIDTH // A
    eight = tl.arange(0, 8)
    e = tl.arange(0, 8 * WIDTH)
    place = e if AS_HELD else e // WIDTH * 512 + e % WIDTH
    within = e // B % 8
    # The first program waits in any case: the stream takes this launch's end for that of the decode.
    if there | (i == 0):
        tl.extra.cuda.gdc_wait()
    while there:
        inside = skipped + eight < rows
        peak = tl.full([8], float("-inf"), tl.float32)
        total = tl.zeros([8], tl.float32)
        acc = tl.zeros([8 * WIDTH], tl.float32)
        start = place + skipped * 512 + column * (8 if AS_HELD else 1)
        for p in range(first, last + 1, AT_ONCE):  # no part where there is no key
            parts = p + tl.arange(0, AT_ONCE)
            slots = (2 * parts + (parts == first)).to(tl.int64) * M
            live = (parts <= last)[:, None]
            seen = live & inside[None, :]
            state = tl.load(part_lse + (slots + skipped)[:, None] + eight[None, :], mask=seen, other=float("-inf"))
            held = live & (skipped + within < rows)[None, :]
            values = tl.load(part_out + slots[:, None] * 512 + start[None, :], mask=held, other=0.0)
            new_peak = tl.maximum(peak, tl.max(state, 0))
            finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(state - finite[None, :])
            decay = tl.exp2(peak - finite)
            spread = tl.broadcast_to(weights[:, None, :, None], (AT_ONCE, A, 8, B))
            kept = tl.reshape(tl.broadcast_to(decay[None, :, None], (A, 8, B)), (8 * WIDTH,))
            acc = acc * kept + tl.sum(tl.reshape(spread, (AT_ONCE, 8 * WIDTH)) * values, 0)
            total = total * decay + tl.sum(weights, 0)
            peak = new_peak
        some = total > 0
        share = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
        acc = acc * tl.reshape(tl.broadcast_to(share[None, :, None], (A, 8, B)), (8 * WIDTH,))
        if AS_HELD:
            acc = tl.permute(tl.reshape(acc, (A, 8, 4, 2, 2)), (1, 0, 3, 2, 4))
        at = (row.to(tl.int64) + skipped + eight)[:, None] * 512 + column + tl.arange(0, WIDTH)[None, :]
        tl.store(out + at, tl.reshape(acc, (8, WIDTH)).to(out.dtype.element_ty), mask=inside[:, None])
        natural = tl.where(some, (peak + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
        tl.store(lse + row + skipped + eight, natural, mask=inside & (column == 0))
        i += tl.num_programs(0)
        there, row, rows, first, last, skipped, column = _listed(merges, i, M, U, WIDTH)


def combine(
    part_out: Tensor, part_lse: Tensor, merges: Tensor, out: Tensor, lse: Tensor, M: int, at_once: int, as_held: bool
) -> None:
    """Merge part_out (slots, M, 512) and part_lse (slots, M), float32, base 2, into out (T, N, 512) and lse (T, N).

    `merges` (U, 4) int32 is that of `schedule`, a list of units: first row, rows, first and last part; it ends where a
    unit has no rows. The states of a unit lie in slots 2 first + 1 and 2 p for the other parts. Rows of a unit without
    keys, whose last part is before its first, get 0 and -inf; a unit that is not listed, since one part did it, is left
    alone. lse is float32, natural. `at_once` states are merged at once, 2, 4, 16 or 64. A slot of part_out lies row by
    row, or in the order of `store` with `as_held`.
    Source: FlashAttention-2 (arXiv 2307.08691) section 3.1.
    """
    WIDTH, U = SHAPES[at_once], merges.shape[0]
    _combine_kernel[(min(M // 8 * (512 // WIDTH) * U, MOST_PROGRAMS),)](
        part_out, part_lse, merges, out, lse, M, U, WIDTH, at_once, as_held, num_warps=4, launch_pdl=True
    )


def combine_reference(
    part_out: Tensor, part_lse: Tensor, merges: Tensor, out: Tensor, lse: Tensor, M: int, at_once: int, as_held: bool
) -> None:
    """What `combine` computes, out (T, N, 512) and lse (T, N), in part_out's dtype."""
    if as_held:
        part_out = part_out.view(-1, M // 8, 32, 8, 4, 2, 2).permute(0, 1, 3, 2, 5, 4, 6).reshape(part_out.shape)
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
        "as_held": not toy,
    }
    cut = sum(last - first + 1 for _, rows, first, last in listed if rows)
    return Problem(arguments, ("out", "lse"), cut * N * 513 * 4 + T * N * 512 * dtype.itemsize)


def aot() -> list[Compile]:
    """All shapes, for both orders, per dtype."""
    entries = []
    for kind, (at_once, WIDTH), as_held in itertools.product(("bf16", "fp16"), SHAPES.items(), (False, True)):
        signature = {"part_out": "*fp32", "part_lse": "*fp32", "merges": "*i32"}
        signature |= {"out": f"*{kind}", "lse": "*fp32", "M": "i32", "U": "i32"}
        constants = {"WIDTH": WIDTH, "AT_ONCE": at_once, "AS_HELD": as_held}
        name = f"combine {kind}, {at_once} at once" + ", as held" * as_held
        entries.append(Compile(_combine_kernel, signature, constants, 4, targets=("sm_90",), name=name))
    return entries
