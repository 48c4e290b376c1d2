"""Time a tier on a case that it gets right: medians with spread, plan and write and attend apart.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mla.cache import CacheSpec, PagedLatentCache, slots_of
from mla.conformance.cases import Case
from mla.conformance.inputs import Inputs, make_inputs
from mla.conformance.runner import Result, run_case
from mla.errors import bad
from mla.memory import LiveStorages
from mla.need import Need
from mla.tier import Plan, Prepared, Tier

MOST_TURNS = 100


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over `repeats` calls: the median, and the 10th and 90th percentile as the spread."""

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int


@dataclass(frozen=True)
class BenchResult:
    """One tier on one case: the gate it passed (or not: then there are no times), and its times.

    `plan` is once per step for all layers, `write` and `attend` once per layer; `peak_bytes` are the
    live storages of one plan and attend, `bound_bytes` what the plan says they can be at most, if it says so.
    """

    gate: Result
    plan: Timing | None = None
    write: Timing | None = None
    attend: Timing | None = None
    peak_bytes: int = 0
    bound_bytes: int | None = None


def timed(call: Callable[[], object], repeats: int, device: str = "cpu", warmup: int = 2) -> Timing:
    """Return the timing of `call`, which is run `warmup` times before; on a GPU each call is waited for."""
    if repeats < 1:
        raise bad("repeats", expected="at least 1", got=str(repeats), fix="pass --repeats 10")
    return timed_together([call], repeats, device, warmup)[0]


def timed_together(
    calls: list[Callable[[], object]], repeats: int, device: str = "cpu", warmup: int = 2, seconds: float = 0.0
) -> list[Timing]:
    """Return the timings of several calls that take turns, so that a slow moment of the machine hits them all alike.

    Short calls take more turns than `repeats`: as many as `seconds` hold, at most MOST_TURNS.
    """
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    samples: list[list[float]] = [[] for _ in calls]
    began, i = time.perf_counter(), -1
    while (i := i + 1) < warmup + repeats or (i < MOST_TURNS and time.perf_counter() - began < seconds):
        for call, kept in zip(calls, samples, strict=True):
            wait()
            start = time.perf_counter()
            call()
            wait()
            if i >= warmup:
                kept.append((time.perf_counter() - start) * 1e3)
    return [_timing(sorted(kept)) for kept in samples]


def bench_case(tier: Tier, case: Case, repeats: int = 10, device: str = "cpu") -> BenchResult:
    """Check the tier on the case against the oracle's budget and time it only where it is right."""
    gate = run_case(tier, case, device=device)
    if gate.status != "ok":
        return BenchResult(gate)
    need, inputs = case.need(device), make_inputs(case, device)
    cache, prepared, plan, attend = _ready(tier, need, inputs)
    write = lambda: tier.write(cache, inputs.new_kv_c, inputs.new_k_pe, inputs.batch.slot_mapping)
    bound: Any = plan.report.get("workspace_bound")
    with LiveStorages() as storages:
        tier.attend(inputs.q, cache, prepared, tier.plan(need, inputs.batch))
    return BenchResult(
        gate,
        plan=timed(lambda: tier.plan(need, inputs.batch, plan), repeats, device),
        write=timed(write, repeats, device),
        attend=timed(attend, repeats, device),
        peak_bytes=storages.peak,
        bound_bytes=None if bound is None else int(bound),
    )


def attend_calls(tiers: list[Tier], case: Case, device: str = "cpu") -> list[Callable[[], object]]:
    """Return, for each tier, a call that attends the case once, with everything before it done."""
    inputs = make_inputs(case, device)
    return [_ready(tier, case.need(device), inputs)[3] for tier in tiers]


def _ready(tier: Tier, need: Need, inputs: Inputs) -> tuple[PagedLatentCache, Prepared, Plan, Callable[[], object]]:
    cache = tier.new_cache(CacheSpec(inputs.num_pages, need.page_size, need.layout, need.device))
    for b, (kv_c, k_pe) in enumerate(inputs.keys):
        tier.write(cache, kv_c, k_pe, slots_of(inputs.batch.block_table[b], 0, kv_c.shape[0], need.page_size))
    prepared, plan = tier.prepare(inputs.up, need), tier.plan(need, inputs.batch)
    return cache, prepared, plan, lambda: tier.attend(inputs.q, cache, prepared, plan)


def _timing(sorted_ms: list[float]) -> Timing:
    n = len(sorted_ms)
    at = lambda share: sorted_ms[min(n - 1, int(share * n))]
    return Timing(statistics.median(sorted_ms), at(0.1), at(0.9), n)
