"""Run cases on a tier and say what is right: the numbers, the memory around them, and what must not have been touched.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import copy
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from mla.accuracy import Comparison, Reference, compare, reference
from mla.cache import PagedLatentCache
from mla.conformance.cases import Case, sample_rows
from mla.conformance.guards import (
    Wrong,
    check_form,
    check_guards,
    check_same,
    filled_cache,
    guarded_buffers,
    uninitialised_memory_is_nan,
)
from mla.conformance.inputs import Inputs, make_inputs
from mla.need import Need, normal_device
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier

STATUSES = ("ok", "refused", "mismatch", "not_finite", "wrong_shape", "wrong_dtype", "raised")


@dataclass(frozen=True)
class Where:
    """The worst place of a result: `metric` "out" or "lse", the row of the batch, its request (-1: padding), the head.

    `token` counts the request's new tokens from 0.
    """

    metric: str
    row: int
    request: int
    token: int
    head: int

    def __str__(self) -> str:
        return f"{self.metric} of request {self.request}, token {self.token} (row {self.row}), head {self.head}"


@dataclass(frozen=True)
class Result:
    """One case on one tier: `used_out`, `used_lse` are error / budget, right up to 1; `seconds` is one attend's time.

    `status` is one of `STATUSES`; `detail` says in a sentence what is wrong, or why the tier refuses.
    """

    case: Case
    tier: str
    status: str
    used_out: float = 0.0
    used_lse: float = 0.0
    where: Where | None = None
    seconds: float = 0.0
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True where the tier ran and everything was right; a refusal is not ok."""
        return self.status == "ok"

    def record(self) -> dict[str, Any]:
        """Return the result as plain values, the case by its id."""
        return {**asdict(self), "case": self.case.id}


@lru_cache(maxsize=1024)
def truth(case: Case, device: str = "cpu") -> tuple[Reference, tuple[int, ...] | None]:
    """Return the oracle's rows and budget of a case, out (n, N, V), and the heads they cover (None: all).

    Made once per case and shared by all tiers, from `layout.round_trip` of the case's own inputs; nothing of a tier is
    read. Raises ValueError where the budget is not finite: a fault of the case.
    """
    inputs, (rows, heads) = _inputs(case, device), sample_rows(case)
    pick = (lambda x: x) if heads is None else (lambda x: x[:, heads])
    q, up = Query(*map(pick, inputs.q)), UpProjection(*map(pick, inputs.up))
    keys = [case.cache_layout.round_trip(*pair) for pair in inputs.keys]
    made = reference(
        q, keys, up, inputs.batch, case.dims.softmax_scale, dtype=case.torch_dtype, seed=case.random_seed, rows=rows
    )
    return made, None if heads is None else tuple(heads)


def check(tier: Tier, cases: Iterable[Case], *, device: str = "cpu") -> Iterator[Result]:
    """Yield one result for each case, as it is done. A tier that raises or refuses gets a row, and the run goes on."""
    for case in cases:
        yield run_case(tier, case, device=device)


def run_case(tier: Tier, case: Case, *, device: str = "cpu") -> Result:
    """Run one case on a tier: write, attend twice, compare both results, look at all that must be unchanged.

    Raises only for a fault of the case itself; whatever the tier raises becomes a result.
    """
    device, need = normal_device(device), case.need(device)
    try:
        reasons = tier.why_not(need)
        if reasons:
            return Result(case, tier.name, "refused", detail=" ".join(reasons))
        with uninitialised_memory_is_nan(device):
            seconds, states = _run(tier, case, need)
    except Wrong as wrong:
        return Result(case, tier.name, wrong.status, math.inf, math.inf, detail=wrong.detail)
    except (Exception, SystemExit) as error:  # whatever a stranger's tier raises, an exit too, is a row
        return Result(case, tier.name, "raised", math.inf, math.inf, detail=f"{type(error).__name__}: {error}")
    made, heads = truth(case, device)
    comparisons = [_compare(state, made, heads) for state in states]
    worst = max(comparisons, key=lambda c: (not c.ok, max(c.used_out, c.used_lse)))
    used_out, used_lse = (max(getattr(c, name) for c in comparisons) for name in ("used_out", "used_lse"))
    return Result(case, tier.name, worst.status, used_out, used_lse, _where(worst, case), seconds, worst.detail)


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """Return counts by status, the worst error / budget of out and LSE with their cases, and a verdict.

    The verdict is "ok" only where at least one case ran and none failed; "refused" where none ran; else "failed".
    """
    results = list(results)
    counts = Counter(r.status for r in results)
    failed = [r.case.id for r in results if r.status not in ("ok", "refused")]
    worst: dict[str, Any] = {}
    for metric in ("used_out", "used_lse"):
        top = max((r for r in results if r.status != "refused"), key=lambda r: getattr(r, metric), default=None)
        worst[metric] = (
            None if top is None else {"used": getattr(top, metric), "case": top.case.id, "where": str(top.where or "")}
        )
    verdict = "failed" if failed else "ok" if counts["ok"] else "refused"
    seconds = sum(r.seconds for r in results)
    return {
        "verdict": verdict,
        "cases": len(results),
        **{s: counts[s] for s in STATUSES},
        **worst,
        "seconds": seconds,
        "failed": failed,
    }


def _run(tier: Tier, case: Case, need: Need) -> tuple[float, tuple[AttentionState, AttentionState]]:
    """Return the seconds of an attend and two results, of memory of the tier's and of the caller's; raises Wrong."""
    master = _inputs(case, need.device)
    given = copy.deepcopy(master)  # views stay views of one tensor
    T = given.batch.num_tokens
    cache = filled_cache(tier, case, given, need.device)
    prepared, plan = tier.prepare(given.up, need), tier.plan(need, given.batch)
    before = cache.data.clone()
    seconds, first = _attend(tier, given.q, cache, prepared, plan, None)
    check_form(first, need, T)
    kept = copy.deepcopy(first)
    buffers, guards = guarded_buffers(need, T)
    _, second = _attend(tier, given.q, cache, prepared, plan, buffers)
    if second is not buffers:
        raise Wrong("mismatch", "attend(out=...) did not return the caller's own state")
    check_guards(guards)
    for name, now, was in zip(("out", "lse"), first, kept, strict=True):
        check_same(f"{name} of the first attend, which the second one reused as scratch,", now, was)
    check_same("the cache", cache.data, before)
    for (name, now), (_, was) in zip(given.tensors(), master.tensors(), strict=True):
        check_same(name, now, was)
    return seconds, (first, second)


@lru_cache(maxsize=2)
def _inputs(case: Case, device: str) -> Inputs:
    return make_inputs(case, device)


def _attend(
    tier: Tier, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None
) -> tuple[float, AttentionState]:
    """Return the seconds of one attend, waited for, and its result."""
    wait = torch.cuda.synchronize if cache.data.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    state = tier.attend(q, cache, prepared, plan, out)
    wait()
    return time.perf_counter() - start, state


def _compare(state: AttentionState, made: Reference, heads: tuple[int, ...] | None) -> Comparison:
    """Compare the reference's heads with their budget, all for finite values; places name the tier's own heads."""
    if heads is None:
        return compare(state, made)
    at = list(heads)
    within = compare(AttentionState(state.out[:, at], None if state.lse is None else state.lse[:, at]), made)
    there = lambda place: None if place is None else (place[0], heads[place[1]])
    within = dataclasses.replace(within, out_at=there(within.out_at), lse_at=there(within.lse_at))
    N, V = state.out.shape[1:]
    rows, pairs = state.out.new_zeros(0), state.out.new_zeros(0, N)
    finite = compare(state, Reference(rows.long(), pairs.new_zeros(0, N, V), pairs, pairs, pairs, rows.bool()))
    return within if finite.ok else finite


def _where(c: Comparison, case: Case) -> Where | None:
    metric, at = ("out", c.out_at) if c.used_out >= c.used_lse else ("lse", c.lse_at)
    if at is None:
        return None
    starts = [0, *accumulate(case.batch.query_lens)]
    request = next((b for b in range(len(starts) - 1) if starts[b] <= at[0] < starts[b + 1]), -1)
    return Where(metric, at[0], request, at[0] - starts[request], at[1])
