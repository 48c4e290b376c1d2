"""Run cases on a tier and say what is right: the numbers, the memory around them, and what must not have been touched.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import copy
import dataclasses
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla.accuracy import Comparison, Reference, compare, reference
from mla.cache import CacheSpec, PagedLatentCache, slots_of
from mla.conformance.cases import Case, sample_rows
from mla.conformance.inputs import Inputs, make_inputs, poison
from mla.need import Need, normal_device
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier

STATUSES = ("ok", "refused", "mismatch", "not_finite", "wrong_shape", "wrong_dtype", "raised")
GUARD_ROWS = 3
GUARD = float("nan")


@dataclass(frozen=True)
class Where:
    """The worst place of a result: `metric` "out" or "lse", the row of the batch, its request and token in it, the head."""

    metric: str
    row: int
    request: int
    token: int
    head: int

    def __str__(self) -> str:
        return f"{self.metric} of request {self.request}, token {self.token} (row {self.row}), head {self.head}"


@dataclass(frozen=True)
class Result:
    """One case on one tier. `used_out` and `used_lse` are error / budget, right up to 1; `seconds` the time of one attend.

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


class Wrong(Exception):
    """A finding of the runner: the status and the sentence of a `Result`."""

    def __init__(self, status: str, detail: str) -> None:
        """Hold both for the result."""
        super().__init__(detail)
        self.status, self.detail = status, detail


@lru_cache(maxsize=1024)
def truth(case: Case, device: str = "cpu") -> tuple[Reference, tuple[int, ...] | None]:
    """Return the oracle's rows and budget of a case, out (n, N, V), and the heads they cover (None: all); made once per case.

    The rows come from `layout.round_trip` of the case's own inputs; nothing of a tier is read.
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
    """Run one case on a tier: write, attend twice, compare both results, and look at everything that must be unchanged."""
    found: dict[str, Any] = {}
    try:
        need = case.need(device)
        reasons = tier.why_not(need)
        if reasons:
            return Result(case, tier.name, "refused", detail=" ".join(reasons))
        with _uninitialised_memory_is_nan(need.device):
            found = _run(tier, case, need)
    except Wrong as wrong:
        return Result(case, tier.name, wrong.status, math.inf, math.inf, detail=wrong.detail)
    except Exception as error:  # whatever a stranger's tier raises is a row of the report
        return Result(case, tier.name, "raised", math.inf, math.inf, detail=f"{type(error).__name__}: {error}")
    return Result(case, tier.name, **found)


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


def _run(tier: Tier, case: Case, need: Need) -> dict[str, Any]:
    """Return the fields of a Result; raises Wrong for a finding that has no numbers."""
    master = _inputs(case, need.device)
    given = copy.deepcopy(master)  # views stay views of one tensor
    cache = _filled(tier, case, given, need.device)
    prepared = tier.prepare(given.up, need)
    plan = tier.plan(need, given.batch)
    before = cache.data.clone()
    seconds, first = _attend(tier, given.q, cache, prepared, plan, None)
    _check_form(first, need, given.batch.num_tokens)
    kept = AttentionState(first.out.clone(), None if first.lse is None else first.lse.clone())
    buffers, guards = _guarded(need, given.batch.num_tokens)
    _, second = _attend(tier, given.q, cache, prepared, plan, buffers)
    if second is not buffers:
        raise Wrong("mismatch", "attend(out=...) did not return the caller's own state")
    if any(not _same(g, torch.full_like(g, GUARD)) for g in guards):
        raise Wrong("mismatch", "rows before or after the caller's out buffers were written")
    if not _same(first.out, kept.out) or (
        first.lse is not None and kept.lse is not None and not _same(first.lse, kept.lse)
    ):
        raise Wrong("mismatch", "the result of the first attend changed during the second: it is scratch")
    if not _same(cache.data, before):
        raise Wrong("mismatch", "attend wrote into the cache")
    for (name, now), (_, was) in zip(given.tensors(), master.tensors(), strict=True):
        if not _same(now, was):
            raise Wrong("mismatch", f"{name} was changed")
    made, heads = truth(case, need.device)
    comparisons = [_compare(state, made, heads) for state in (first, second)]
    worst = max(comparisons, key=lambda c: (not c.ok, max(c.used_out, c.used_lse)))
    return {
        "status": worst.status,
        "used_out": max(c.used_out for c in comparisons),
        "used_lse": max(c.used_lse for c in comparisons),
        "where": _where(worst, case),
        "seconds": seconds,
        "detail": worst.detail,
    }


@lru_cache(maxsize=2)
def _inputs(case: Case, device: str) -> Inputs:
    return make_inputs(case, device)


def _filled(tier: Tier, case: Case, given: Inputs, device: str) -> PagedLatentCache:
    """Poison the tier's own cache, write old rows and then new ones the tier's way, and read all of it back.

    Owned slots must hold what the plain layout gives back, every other slot the poison it held.
    """
    page, layout = case.page_size, case.cache_layout
    cache = tier.new_cache(CacheSpec(given.num_pages, page, layout, device))
    expected = (given.num_pages, page, layout.storage_width)
    if tuple(cache.data.shape) != expected or cache.layout != layout:
        raise Wrong(
            "wrong_shape", f"new_cache gave {cache.layout} {tuple(cache.data.shape)}, expected {layout} {expected}"
        )
    poison(cache)
    before = cache.data.clone()
    for b, (old, (kv_c, k_pe)) in enumerate(zip(given.history, given.keys, strict=True)):
        slots = slots_of(given.batch.block_table[b], 0, kv_c.shape[0], page)[old]
        tier.write(cache, kv_c[old], k_pe[old], slots)
    tier.write(cache, given.new_kv_c, given.new_k_pe, given.batch.slot_mapping)
    owned = given.owned_slots()
    got = layout.read(cache.data[owned // page, owned % page])
    packed = [torch.cat(parts) for parts in zip(*given.keys, strict=True)] or [
        x[:0] for x in (given.new_kv_c, given.new_k_pe)
    ]
    for name, stored, right in zip(("kv_c", "k_pe"), got, layout.round_trip(*packed), strict=True):
        wrong = (stored != right).any(-1) if right.shape[-1] else torch.zeros_like(owned, dtype=torch.bool)
        if bool(wrong.any()):
            slot = int(owned[wrong][0])
            raise Wrong(
                "mismatch",
                f"{name} read back from slot {slot} (page {slot // page}, row {slot % page}) is not what was written",
            )
    spared = torch.ones(given.num_pages * page, dtype=torch.bool, device=device)
    spared[owned] = False
    changed = (_bytes(cache.data) != _bytes(before)).any(-1).flatten() & spared
    if bool(changed.any()):
        raise Wrong("mismatch", f"write changed slot {int(changed.nonzero()[0])}, which no request owns")
    return cache


def _attend(
    tier: Tier, q: Query, cache, prepared: Prepared, plan: Plan, out: AttentionState | None
) -> tuple[float, AttentionState]:
    """Return the seconds of one attend, waited for, and its result."""
    wait = torch.cuda.synchronize if cache.data.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    state = tier.attend(q, cache, prepared, plan, out)
    wait()
    return time.perf_counter() - start, state


def _check_form(state: AttentionState, need: Need, T: int) -> None:
    """Raise Wrong unless the state is two plain tensors, out (T, N, V) and lse (T, N) or None, as the Need promises."""
    if (state.lse is not None) != need.lse:
        raise Wrong("wrong_shape", f"lse is {'None' if state.lse is None else 'a tensor'}, but Need.lse is {need.lse}")
    expected = {"out": ((T, need.N, need.V), need.out_dtype), "lse": ((T, need.N), need.compute_dtype)}
    for name, (shape, dtype) in expected.items():
        x = getattr(state, name)
        if x is None:
            continue
        if type(x) is not Tensor or tuple(x.shape) != shape:
            raise Wrong("wrong_shape", f"{name} is a {type(x).__name__} {tuple(x.shape)}, expected a Tensor {shape}")
        if x.dtype != dtype or normal_device(x.device) != need.device:
            raise Wrong("wrong_dtype", f"{name} is {x.dtype} on {x.device}, expected {dtype} on {need.device}")


def _guarded(need: Need, T: int) -> tuple[AttentionState, list[Tensor]]:
    """Return out buffers that lie between guard rows, all NaN, and the guards, (GUARD_ROWS, N, V) and (GUARD_ROWS, N)."""
    wholes = [torch.full((T + 2 * GUARD_ROWS, need.N, need.V), GUARD, dtype=need.out_dtype, device=need.device)]
    if need.lse:
        wholes.append(torch.full((T + 2 * GUARD_ROWS, need.N), GUARD, dtype=need.compute_dtype, device=need.device))
    inner = [x[GUARD_ROWS : GUARD_ROWS + T] for x in wholes]
    guards = [g for x in wholes for g in (x[:GUARD_ROWS], x[GUARD_ROWS + T :])]
    return AttentionState(inner[0], inner[1] if need.lse else None), guards


def _compare(state: AttentionState, made: Reference, heads: tuple[int, ...] | None) -> Comparison:
    """Compare all heads for finite values and the reference's heads with their budget; places name the tier's own heads."""
    if heads is None:
        return compare(state, made)
    rows = torch.zeros(0, dtype=torch.int64)
    nothing = Reference(
        rows,
        state.out.new_zeros(0, *state.out.shape[1:]),
        *(state.out.new_zeros(0, state.out.shape[1]) for _ in range(3)),
        rows.bool(),
    )
    finite = compare(state, nothing)
    if not finite.ok:
        return finite
    at = list(heads)
    c = compare(AttentionState(state.out[:, at], None if state.lse is None else state.lse[:, at]), made)
    there = lambda place: None if place is None else (place[0], heads[place[1]])
    return dataclasses.replace(c, out_at=there(c.out_at), lse_at=there(c.lse_at))


def _where(c: Comparison, case: Case) -> Where | None:
    metric, at = ("out", c.out_at) if c.used_out >= c.used_lse else ("lse", c.lse_at)
    if at is None:
        return None
    starts = [0, *accumulate(case.batch.query_lens)]
    request = next((b for b in range(len(starts) - 1) if starts[b] <= at[0] < starts[b + 1]), -1)
    return Where(metric, at[0], request, at[0] - starts[request], at[1])


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x[None].view(torch.uint8)


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((_bytes(a) == _bytes(b)).all())


@contextmanager
def _uninitialised_memory_is_nan(device: str) -> Iterator[None]:
    """Make torch.empty give NaN, so that memory which a tier forgets to write shows; on the CPU, where it costs nothing."""
    if device != "cpu":
        yield
        return
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
