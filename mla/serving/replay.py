"""Replay a request trace through several tiers over the same steps, with the oracle watching.

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import CacheLayout, CacheSpec, PagedLatentCache
from mla.config import MLAConfig
from mla.memory import LiveStorages
from mla.need import Capacity, Need
from mla.projections import Query, UpProjection
from mla.serving.audit import Audit, Verdict
from mla.serving.hidden import HiddenSource
from mla.serving.pool import PagePool
from mla.serving.scheduler import Scheduler
from mla.serving.source import TokenSource
from mla.serving.step import Stats, Step
from mla.serving.traces import Request
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier
from mla.weights import MLAWeights

AUDIT_ROUNDINGS = 2e8  # above this much work for all rows, rows are sampled


@dataclass(frozen=True)
class ReplaySpec:
    """What to replay and how: the model, the cache rows, and the limits of pool and scheduler."""

    config: MLAConfig
    layout: CacheLayout
    dtype: torch.dtype = torch.float32
    page_size: int = 64
    num_pages: int | None = None
    token_budget: int = 2048
    max_running: int = 32
    max_model_len: int | None = None
    rows_per_step: int | None = None
    device: str = "cpu"
    seed: int = 0


@dataclass
class TierRun:
    """One tier in a replay: verdict, reasons to refuse, and what it took (attention alone: write, plan, attend)."""

    name: str
    status: str = "ok"
    reasons: list[str] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    peak_workspace: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0


@dataclass
class ReplayReport:
    """The outcome of a replay: the totals of the scheduler and one TierRun for each tier, in the order given."""

    stats: Stats
    runs: list[TierRun]
    requests: int
    rows_per_step: int | None


@dataclass
class _Lane:
    """One tier at work: its cache, its prepared weights and the plan that it refills."""

    tier: Tier
    run: TierRun
    cache: PagedLatentCache
    prepared: Prepared
    plan: Plan | None = None


def replay(
    spec: ReplaySpec,
    requests: Sequence[Request],
    tiers: Sequence[Tier],
    progress: Callable[[int, int], None] | None = None,
) -> ReplayReport:
    """Run `requests` through every tier over the same steps and judge sampled rows of each step against the oracle.

    New rows are written first, then attended, for each tier in its own cache. `progress(done, total)` is called with
    tokens. Tiers that refuse are reported with their sentences and the others run; one that raises is reported as such.
    Raises ValueError for requests or limits that the scheduler cannot serve.
    """
    dry = _dry_run(spec, requests)
    need = _need(spec, dry)
    weights = MLAWeights.random(spec.config, seed=spec.seed, dtype=spec.dtype)
    source = TokenSource(spec.config, weights, HiddenSource(spec.config.H, spec.seed, spec.dtype))
    rows = spec.rows_per_step if spec.rows_per_step is not None else _rows_per_step(spec, dry)
    audit = Audit(source, spec.layout, spec.dtype, rows, spec.seed)
    runs = [TierRun(tier.name) for tier in tiers]
    lanes = [
        lane for tier, run in zip(tiers, runs, strict=True) if (lane := _open(tier, run, need, weights, dry, spec))
    ]
    by_id, scheduler, done = {r.id: r for r in requests}, _scheduler(spec, requests), 0
    if progress is not None:
        progress(0, dry.tokens)
    for step in scheduler:
        batch, q, kv_c, k_pe = _inputs(step, by_id, source, spec, dry.pages)
        results: dict[str, AttentionState] = {}
        for lane in lanes:
            if lane.run.status == "ok":
                given = _own(batch), Query(*(x.clone() for x in q)), kv_c.clone(), k_pe.clone()
                state = _attend(lane, step, *given, measure=step.index in dry.measured)
                results |= {} if state is None else {lane.run.name: state}
        caches = {lane.run.name: lane.cache for lane in lanes if lane.run.name in results}
        audit.take(step, by_id, batch, q, results, caches)
        done += batch.num_tokens
        if progress is not None:
            progress(done, dry.tokens)
    verdicts = audit.finish(by_id)
    for lane in lanes:
        lane.run.verdict = verdicts[lane.run.name]
        if lane.run.status == "ok" and not lane.run.verdict.ok:
            lane.run.status = "mismatch"
    return ReplayReport(scheduler.stats, runs, len(requests), rows)


@dataclass
class _DryRun:
    """What pool and scheduler alone tell beforehand: pages, tokens, the longest of all, and the heaviest steps."""

    pages: int = 0
    tokens: int = 0
    steps: int = 0
    max_seq_len: int = 1
    max_tokens: int = 1
    roundings: float = 0.0
    measured: set[int] = field(default_factory=set)


def _dry_run(spec: ReplaySpec, requests: Sequence[Request]) -> _DryRun:
    scheduler, dry = _scheduler(spec, requests), _DryRun()
    heaviest: dict[str, tuple[int, int]] = {}
    N, width = spec.config.N, spec.config.P + spec.config.V
    for step in scheduler:
        dry.steps += 1
        dry.tokens += sum(step.query_lens)
        dry.max_tokens = max(dry.max_tokens, sum(step.query_lens))
        dry.max_seq_len = max(dry.max_seq_len, *step.seq_lens)
        dry.roundings += sum(
            16 * N * s * (q * width / 64 + 2 * q) for q, s in zip(step.query_lens, step.seq_lens, strict=True)
        )
        pairs = sum(q * s for q, s in zip(step.query_lens, step.seq_lens, strict=True))
        kind = "decode" if step.num_decodes == len(step.query_lens) else "prefill"
        if pairs > heaviest.get(kind, (0, 0))[0]:
            heaviest[kind] = (pairs, step.index)
    dry.pages, dry.measured = scheduler.stats.pages_created, {index for _, index in heaviest.values()}
    return dry


def _scheduler(spec: ReplaySpec, requests: Sequence[Request]) -> Scheduler:
    return Scheduler(requests, PagePool(spec.num_pages, spec.page_size), spec.token_budget, spec.max_running)


def _need(spec: ReplaySpec, dry: _DryRun) -> Need:
    c, longest = spec.config, max(dry.max_seq_len, spec.max_model_len or 0)
    capacity = Capacity(spec.max_running, dry.max_tokens, dry.max_tokens, longest)
    return Need(
        N=c.N, L=c.L, P=c.P, R=c.R, V=c.V, softmax_scale=c.softmax_scale, layout=spec.layout, page_size=spec.page_size,
        dtype=spec.dtype, device=spec.device, lse=True, capacity=capacity,
    )  # fmt: skip


def _rows_per_step(spec: ReplaySpec, dry: _DryRun) -> int | None:
    """None (all rows) where the audit of all of them is cheap; else as many as the same work allows, at least one."""
    if dry.roundings <= AUDIT_ROUNDINGS:
        return None
    return max(1, int(AUDIT_ROUNDINGS / dry.roundings * dry.tokens / dry.steps))


def _open(tier: Tier, run: TierRun, need: Need, weights: MLAWeights, dry: _DryRun, spec: ReplaySpec) -> _Lane | None:
    run.reasons = tier.why_not(need)
    if run.reasons:
        run.status = "refused"
        return None
    cache = tier.new_cache(CacheSpec(dry.pages, spec.page_size, spec.layout, spec.device))
    own = UpProjection(*(W.to(spec.device, copy=True) for W in weights.up))
    return _Lane(tier, run, cache, tier.prepare(own, need))


def _own(batch: AttentionBatch) -> AttentionBatch:
    """A copy for one tier alone: what it writes into its inputs must not reach the others, or the audit."""
    copies: dict[str, Any] = {name: x.clone() for name, x in vars(batch).items() if isinstance(x, Tensor)}
    return dataclasses.replace(batch, **copies)


def _inputs(step: Step, by_id: dict[int, Request], source: TokenSource, spec: ReplaySpec, pages: int):
    parts = [
        source.tokens(by_id[id], stop - count, stop)
        for id, count, stop in zip(step.request_ids, step.query_lens, step.seq_lens, strict=True)
    ]
    q = Query(torch.cat([p[0].nope for p in parts]), torch.cat([p[0].pe for p in parts]))
    kv_c, k_pe = torch.cat([p[1] for p in parts]), torch.cat([p[2] for p in parts])
    batch = AttentionBatch.bottom_right(
        step.query_lens, step.seq_lens, torch.from_numpy(step.padded_tables(-1)),
        page_size=spec.page_size, num_pages=pages, slots=torch.from_numpy(step.slots), device=spec.device,
    )  # fmt: skip
    move = lambda x: x.to(spec.device)
    return batch, Query(move(q.nope), move(q.pe)), move(kv_c), move(k_pe)


def _attend(lane: _Lane, step: Step, batch: AttentionBatch, q: Query, kv_c, k_pe, measure: bool):
    """Write, plan and attend one step, timed; the heaviest steps again, untimed, with every allocation counted."""
    tier, run = lane.tier, lane.run
    try:
        start = _now(batch)
        for page, target in step.copies:
            lane.cache.copy_page(page, target)
        tier.write(lane.cache, kv_c, k_pe, batch.slot_mapping)
        lane.plan = tier.plan(lane.prepared.need, batch, lane.plan)
        state = tier.attend(q, lane.cache, lane.prepared, lane.plan)
        seconds = _now(batch) - start
        if measure:
            with LiveStorages() as storages:
                fresh = tier.plan(lane.prepared.need, batch)
                tier.attend(q, lane.cache, lane.prepared, fresh)
            run.peak_workspace = max(run.peak_workspace, storages.peak)
    except (Exception, SystemExit) as error:  # a stranger's tier must not end the run, least of all with exit code 0
        run.status, run.reasons = "raised", [f"step {step.index}: {type(error).__name__}: {error}"]
        return None
    if step.num_decodes == len(step.query_lens):
        run.decode_steps, run.decode_seconds = run.decode_steps + 1, run.decode_seconds + seconds
    else:
        run.prefill_tokens, run.prefill_seconds = run.prefill_tokens + batch.num_tokens, run.prefill_seconds + seconds
    return state


def _now(batch: AttentionBatch) -> float:
    if batch.seq_lens.device.type == "cuda":
        torch.cuda.synchronize(batch.seq_lens.device)
    return time.perf_counter()
