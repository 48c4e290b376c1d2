"""How long attention must take: two ceilings of a machine over the FLOPs and bytes of `mla.cost`.

A roofline time is a lower bound. It assumes that all moves overlap all arithmetic and that both run at full rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mla.config import MLAConfig
from mla.cost import BatchCounts, Cost, absorbed_cost, expanded_cost, grouped_cost, projection_cost
from mla.errors import bad


@dataclass(frozen=True)
class Gpu:
    """The ceilings of a machine: `flops` in FLOP/s on elements of `itemsize` bytes, `bandwidth` in byte/s."""

    name: str
    flops: float
    bandwidth: float
    source: str
    itemsize: int = 2

    @classmethod
    def measured(cls, name: str, flops: float, bandwidth: float, *, itemsize: int = 2) -> "Gpu":
        """Return ceilings that were timed, in FLOP/s and byte/s; raises ValueError unless both are finite and > 0."""
        for what, value in (("flops", flops), ("bandwidth", bandwidth)):
            if not (math.isfinite(value) and value > 0):
                raise bad(what, expected="a finite rate above 0", got=repr(value), fix="give it in units per second")
        return cls(name, flops, bandwidth, "measured", itemsize)

    @property
    def ridge(self) -> float:
        """Intensity in FLOP per byte where the ceilings meet: below it memory sets the pace, above it arithmetic."""
        return self.flops / self.bandwidth

    def seconds(self, cost: Cost) -> float:
        """Roofline time max(FLOPs / flops, bytes / bandwidth); ValueError if the peak is for another itemsize."""
        if cost.itemsize != self.itemsize:
            got = f"a peak for {self.itemsize}-byte elements ({self.name})"
            fix = f"use Gpu.measured(..., itemsize={cost.itemsize})"
            raise bad("gpu", expected=f"a peak for {cost.itemsize}-byte elements", got=got, fix=fix)
        return max(cost.flops / self.flops, cost.bytes / self.bandwidth)

    def bound(self, cost: Cost) -> str:
        """Return the ceiling that sets the time, "compute" or "memory"."""
        return "compute" if cost.intensity > self.ridge else "memory"


# Datasheet peaks: one GPU, dense bf16 (fp16 is the same). Where a datasheet gives only the figure with structured
# sparsity, half of it.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80g", 312e12, 2.039e12, "NVIDIA A100 80GB SXM datasheet"),
        Gpu("h100-sxm", 989.4e12, 3.35e12, "NVIDIA H100 SXM5 datasheet, halved"),
        Gpu("h200", 989.4e12, 4.8e12, "NVIDIA H200 SXM datasheet, halved"),
        Gpu("b200", 2250e12, 8.0e12, "NVIDIA HGX B200 datasheet (1000 W), halved"),
        Gpu("l40s", 362.05e12, 0.864e12, "NVIDIA L40S datasheet"),
        Gpu("mi300x", 1307.4e12, 5.3e12, "AMD Instinct MI300X datasheet"),
        Gpu("mi355x", 2516.6e12, 8.0e12, "AMD Instinct MI355X datasheet"),
        # bf16 matmul of 8192^3 reached 690-790 TFLOP/s over runs; bandwidth is a device copy, bytes read + written.
        Gpu("h200-measured", 790e12, 4.27e12, "measured on one H200, torch 2.11, CUDA 13.0"),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return the entry of GPUS with this name, in any case; raises ValueError that lists the known names."""
    if name.lower() not in GPUS:
        raise bad("gpu", expected=f"one of {', '.join(GPUS)}", got=repr(name), fix="or build one with Gpu.measured")
    return GPUS[name.lower()]


def break_even_roofline(
    config: MLAConfig,
    gpu: Gpu,
    context: int,
    batch: int = 1,
    *,
    itemsize: int = 2,
    row_bytes: int | None = None,
    limit: int = 4096,
) -> int | None:
    """Smallest query_len at which the expanded form is not slower on `gpu`; None if there is none up to `limit`.

    Each of `batch` requests has `context` cached tokens before its query_len new ones. Decode reads a key for one
    query: absorbed, that is L + R numbers at about 2 N FLOP per byte, while expanding it would write and read N (P + V)
    numbers and multiply L N (P + V) times. Prefill shares the key among its queries, so the expansion is paid once and
    each (query, key, head) then costs 2 (P + R + V) FLOPs in place of 2 (2 L + R).

    `break_even_flops` counts only FLOPs, in the limit of a long context. Here bytes count too, so a machine with much
    arithmetic per byte moves the answer up (writing k_nope and v is not free), and a short context moves it down: a
    fresh prompt (context 0) expands as many rows as it would absorb, and the answer is 1. With few keys reading the
    weights bounds both forms, and the two may cross once more beyond the answer. Raises ValueError for a negative
    context, a batch below 1, or a peak for another itemsize.
    """
    for name, value, low in (("context", context, 0), ("batch", batch, 1)):
        if value < low:
            raise bad(name, expected=f"at least {low}", got=str(value), fix="give counts of cached tokens and requests")
    for q in range(1, limit + 1):
        counts = BatchCounts(batch * q, batch * (context + q), batch * (q * context + q * (q + 1) // 2))
        expanded = expanded_cost(config, counts, itemsize=itemsize, row_bytes=row_bytes)
        absorbed = absorbed_cost(config, counts, itemsize=itemsize, row_bytes=row_bytes)
        if gpu.seconds(expanded) <= gpu.seconds(absorbed):
            return q
    return None


@dataclass(frozen=True)
class CostRow:
    """One line of the cost table: FLOPs, bytes, FLOP per byte, microseconds, and "compute" or "memory" bound."""

    form: str
    gpu: str
    flops: int
    bytes: int
    intensity: float
    time_us: float
    bound: str


@dataclass(frozen=True)
class CostReport:
    """What `mla cost` prints: `rows`, and `winner`, by GPU the faster of expanded and absorbed (equal: expanded)."""

    counts: BatchCounts
    rows: tuple[CostRow, ...]
    winner: dict[str, str]


def cost_report(
    config: MLAConfig,
    counts: BatchCounts,
    gpus: Sequence[Gpu],
    *,
    itemsize: int = 2,
    row_bytes: int | None = None,
    kv_heads: Sequence[int] = (),
) -> CostReport:
    """Cost one layer on each GPU: both forms, the projections around them, and a baseline for each of `kv_heads`.

    Raises ValueError for a GPU whose peak is for another itemsize, or KV heads that do not divide N.
    """
    make = (expanded_cost, absorbed_cost, projection_cost)
    costs = [cost(config, counts, itemsize=itemsize, row_bytes=row_bytes) for cost in make]
    costs += [grouped_cost(config, counts, heads, itemsize=itemsize) for heads in kv_heads]
    rows = tuple(
        CostRow(c.form, gpu.name, c.flops, c.bytes, c.intensity, gpu.seconds(c) * 1e6, gpu.bound(c))
        for gpu in gpus
        for c in costs
    )
    return CostReport(counts, rows, {gpu.name: min(costs[:2], key=gpu.seconds).form for gpu in gpus})
