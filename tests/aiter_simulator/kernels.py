"""Which decode kernels exist, as data (`ROCm/aiter` e4048607, hsa/<arch>/mla/mla_asm.csv and its dispatch).

H query heads as the caller passes them, qlen query tokens per request. Each entry maps heads to the qlens that run
natively or by way of the fold into groups of 16 heads; what is missing aborts.
"""

from dataclasses import dataclass

import torch

BF16, FP8_ANY = "bf16", "fp8"
ALL = tuple(range(1, 9))
Q4 = (1, 2, 3, 4)
Table = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Kernels:
    """Query lengths per head count: `native` ones, and those served by the `fold`."""

    native: Table
    fold: Table


def each(heads: tuple[int, ...], qlens: tuple[int, ...]) -> Table:
    """The same query lengths for several head counts."""
    return dict.fromkeys(heads, qlens)


GROUPS = (32, 48, 64, 80, 96, 112, 128)
NONE = Kernels({}, {})

# (arch, q, kv, mode): mode is ps (persistent), ps+lse, nps (one launch per split count)
TABLE: dict[tuple[str, str, str, str], Kernels] = {
    ("gfx942", "bf16", "bf16", "ps"): Kernels({8: (2,), 16: Q4}, each(GROUPS, Q4)),
    ("gfx942", "bf16", "fp8", "ps"): Kernels({16: Q4}, each(GROUPS, Q4)),
    ("gfx942", "fp8", "fp8", "ps"): Kernels(
        {16: Q4, 64: (1,), 128: ALL}, each((32, 48, 80, 96, 112), Q4) | {64: (2, 3, 4)}
    ),
    ("gfx942", "fp8", "fp8", "ps+lse"): Kernels({64: (1,)}, {}),
    ("gfx942", "bf16", "bf16", "nps"): Kernels({8: (1,), 64: ALL[1:]} | each((16, 32, 128), ALL), {}),
    ("gfx942", "fp8", "fp8", "nps"): Kernels({8: (1,), 16: Q4, 128: Q4}, {}),
    ("gfx950", "bf16", "bf16", "ps"): Kernels({8: (8,)} | each((16, 24, *GROUPS), ALL), {}),
    ("gfx950", "bf16", "bf16", "ps+lse"): Kernels({8: (8,)} | each((16, 24, *GROUPS), ALL), {}),
    ("gfx950", "bf16", "fp8", "ps"): Kernels({16: Q4}, each(GROUPS, Q4)),
    ("gfx950", "fp8", "fp8", "ps"): Kernels({8: (4,)} | each((16, 32, 64, 128), ALL), each((48, 80, 96, 112), ALL)),
    ("gfx950", "fp8", "fp8", "ps+lse"): Kernels(
        {8: (4,), 16: (1, *ALL[2:])} | each((32, 64, 128), ALL), each((48, 80, 96, 112), (1, *ALL[2:]))
    ),
    ("gfx950", "bf16", "bf16", "nps"): Kernels({8: (1, 2)} | each((16, 32, 64, 128), ALL), {}),
    ("gfx950", "fp8", "fp8", "nps"): Kernels({8: (1,), 16: Q4, 128: Q4}, {}),
}

# heads that mla_reduce_v1 was instantiated for, by value width
REDUCE_HEADS = {
    512: (8, 16, 24, 32, 48, 64, 80, 96, 112, 128),
    128: (1, 2, 4, 8, 10, 16, 32, 40, 48, 64, 96, 128),
    64: (64,),
}


def kind(dtype: torch.dtype) -> str:
    """The table's word for a dtype: bf16, fp8, or the dtype's own name for what no kernel takes."""
    return {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8"}.get(dtype, str(dtype))


def lookup(arch: str, q: str, kv: str, mode: str, heads: int, qlen: int) -> str | None:
    """Return "native", "fold" or None for one decode call."""
    kernels = TABLE.get((arch, q, kv, mode), NONE)
    if qlen in kernels.native.get(heads, ()):
        return "native"
    return "fold" if qlen in kernels.fold.get(heads, ()) else None


def is_native(arch: str, q: str, kv: str, heads: int, qlen: int) -> bool:
    """The planner's and the wrapper's shared rule for head counts that are not folded into groups of 16.

    H 8 counts as native in the wrapper only; the planner has nothing to fold it into.
    """
    both8 = q == kv == "fp8"
    if heads in (8, 16) or (both8 and heads == 64 and qlen == 1):
        return True
    if arch == "gfx942":
        return both8 and heads == 128
    return "fp8" not in (q, kv) or (both8 and heads in (32, 64, 128))
