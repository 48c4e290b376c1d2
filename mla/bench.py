"""Time tiers on a case that they get right: medians with spread, plan and write and attend apart, turn by turn.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla.bench_scene import Scene, scene_of
from mla.cache import CacheSpec, PagedLatentCache, slots_of
from mla.conformance.cases import Case
from mla.conformance.inputs import Inputs, make_inputs, poison
from mla.conformance.runner import Result
from mla.conformance.trial import line_of, said_by
from mla.memory import LiveStorages
from mla.need import Capacity, Need, normal_device
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier
from mla.timing import HostLap, Lap, Timing, lap_of, timed, timed_together, turns

__all__ = ["BenchResult", "Timing", "attend_calls", "bench_case", "bench_together", "timed", "timed_together"]

LEVELS = ("attend", "latent")
MOST_CAPTURED = 16  # new tokens of a request: a longer step is no decode, and its launches do not count
WAVES, MOST_SPLITS, FEWEST_SPLITS = 4, 256, 8
PAGES_AT_ONCE = 1024  # looked at when caches are compared


@dataclass(frozen=True)
class BenchResult:
    """One tier on one case: the gate it passed (or not: then there are no times), and its times.

    `plan` is once per step for all layers, by the host's clock, `write` and `attend` once per layer; `attend` is that
    of the inner kernel where gate.level is "latent", and there is no plan then unless the kernel takes one. `first_ms`
    is what prepare, plan, write and attend took together on this case the first time, compilation included;
    `peak_bytes` are the live storages of one plan and attend, `bound_bytes` what the plan says they can be at most.
    """

    gate: Result
    plan: Timing | None = None
    write: Timing | None = None
    attend: Timing | None = None
    first_ms: float | None = None
    peak_bytes: int = 0
    bound_bytes: int | None = None


@dataclass(eq=False)
class Ready:
    """A tier with all that comes before attend done, out (T, N, V) or (T, N, L) of the last call in `state`.

    `graph` says that its Need promises to be captured. An inner kernel is the tier's `attend_latent(q_latent, q_pe,
    cache, prepared, plan, out)` where it has one, planned and captured as attend is, else its `latent`.
    """

    tier: Tier
    need: Need
    cache: PagedLatentCache
    prepared: Prepared
    plan: Plan
    scene: Scene
    graph: bool = False
    state: AttentionState | None = None
    first_ms: float = 0.0

    def attend(self) -> AttentionState:
        """Attend once at the scene's level, into the same buffers each time: out (T, N, V) or (T, N, L)."""
        scene, given = self.scene, self.scene.inputs
        if scene.level == "attend":
            self.state = self.tier.attend(given.q, self.cache, self.prepared, self.plan, self.state)
        elif hasattr(self.tier, "attend_latent"):
            both = scene.q_latent, scene.q_pe
            self.state = self.tier.attend_latent(*both, self.cache, self.prepared, self.plan, self.state)
        else:
            kernel: Any = self.tier
            self.state = kernel.latent(scene.q_latent, scene.q_pe, self.cache, given.batch, self.need)
        return self.state

    def write(self) -> None:
        """Write the step's new rows, kv_c (T, L) and k_pe (T, R), where they are already."""
        given = self.scene.inputs
        self.tier.write(self.cache, given.new_kv_c, given.new_k_pe, given.batch.slot_mapping)

    def forget(self) -> None:
        """Fill the last state, out (T, N, V), with NaN, so that it cannot pass for that of a later call."""
        for part in self.state or ():
            if part is not None:
                part.fill_(float("nan"))


def bench_case(tier: Tier, case: Case, repeats: int = 10, device: str = "cpu", level: str = "attend") -> BenchResult:
    """Check the tier on the case against the oracle's budget and time it only where it is right."""
    return bench_together([tier], case, repeats, device, level)[0]


def bench_together(
    tiers: Sequence[Tier], case: Case, repeats: int = 10, device: str = "cpu", level: str = "attend", graph: bool = True
) -> list[BenchResult]:
    """Check tiers on a case and time those that are right there, turn by turn on the same tensors.

    Tiers whose caches hold the same bytes read one cache, so that no address is in anyone's favour.
    `level` "latent" times inner kernels: absorbed query (T, N, L) in, latent output (T, N, L) out. On a GPU a tier
    whose Need may be captured is timed as a CUDA graph, unless `graph` is False. What the last timed call returned is
    held against the truth once more.
    """
    device = normal_device(device)
    scene = scene_of(case, device, level)
    found = [_gated(tier, scene, graph) for tier in tiers]
    gates, ready, laps = [gate for gate, _ in found], [one for _, one in found], dict[int, Lap]()
    shared = _share_caches([one for one, gate in zip(ready, gates, strict=True) if one is not None and gate.ok])
    for i, one in enumerate(ready):
        if one is not None and gates[i].ok:
            try:
                laps[i] = lap_of(one.attend, device, one.graph)
            except Exception as error:  # a promise of Need.graph_capture that is not kept is a fault of the tier
                gates[i] = _raised(one.tier, scene, error, "its attend cannot be captured as a graph: ")
                continue
            one.forget()
    attended = dict(zip(laps, turns(list(laps.values()), repeats), strict=True))
    for sharing, given_up in shared:
        if not _same_bytes(sharing[0].cache, given_up):
            names = ", ".join(one.tier.name for one in sharing)
            detail = f"the cache that {names} share was changed while they were timed"
            for i in (ready.index(one) for one in sharing):
                gates[i] = dataclasses.replace(gates[i], status="mismatch", detail=detail)
                attended.pop(i, None)
    return [
        _result(one, gate, attended.get(i), repeats) for i, (one, gate) in enumerate(zip(ready, gates, strict=True))
    ]


def attend_calls(tiers: list[Tier], case: Case, device: str = "cpu") -> list[Callable[[], object]]:
    """Return, for each tier, a call that attends the case once, with everything before it done."""
    need, inputs = case.need(device), make_inputs(case, device)

    def call_of(tier: Tier) -> Callable[[], object]:
        cache = tier.new_cache(CacheSpec(inputs.num_pages, need.page_size, need.layout, need.device))
        _fill(tier, cache, inputs)
        prepared, plan = tier.prepare(inputs.up, need), tier.plan(need, inputs.batch)
        return lambda: tier.attend(inputs.q, cache, prepared, plan)

    return [call_of(tier) for tier in tiers]


def captured_need(case: Case, device: str) -> Need:
    """Return a case's Need with the promises that a step which is captured as a CUDA graph makes.

    Capacity is the batch's own; as many splits as fill the GPU WAVES times over, FEWEST_SPLITS .. MOST_SPLITS.
    """
    b = case.batch
    requests, units = len(b.query_lens), torch.cuda.get_device_properties(device).multi_processor_count
    splits = max(FEWEST_SPLITS, min(MOST_SPLITS, -(-WAVES * units // max(1, requests))))
    capacity = Capacity(requests, b.num_tokens, max(b.query_lens), max(b.seq_lens), splits)
    return dataclasses.replace(case.need(device), graph_capture=True, capacity=capacity)


def _gated(tier: Tier, scene: Scene, graph: bool) -> tuple[Result, Ready | None]:
    """Return the gate of a tier, and the tier ready to be timed where its first call returned."""
    case, device = scene.case, scene.device
    refused = Result(case, tier.name, "refused", level=scene.level)
    need, planned, promised = case.need(device), _planned(tier, scene), False
    try:
        reasons = tier.why_not(need)
        if not reasons and not planned and getattr(tier, "latent", None) is None:
            reasons = [f"{tier.name} has no inner kernel."]
        if reasons:
            return dataclasses.replace(refused, detail=" ".join(reasons)), None
        if graph and planned and device.startswith("cuda") and max(case.batch.query_lens) <= MOST_CAPTURED:
            wish = captured_need(case, device)
            promised = not tier.why_not(wish)
            need = wish if promised else need
        one = _first(tier, need, scene)
        one.graph, state = promised, one.attend()
    except (Exception, SystemExit) as error:  # a stranger's code: what it raises is a row
        return _raised(tier, scene, error), None
    return scene.gate(tier, state), one


def _planned(tier: Tier, scene: Scene) -> bool:
    """Whether what is timed takes a plan: attend, or an inner kernel `attend_latent`."""
    return scene.level == "attend" or hasattr(tier, "attend_latent")


def _first(tier: Tier, need: Need, scene: Scene) -> Ready:
    """Run every step once by the clock; filling the rest of the cache in between does not count."""
    given, wait = scene.inputs, torch.cuda.synchronize if scene.device.startswith("cuda") else lambda: None
    cache = tier.new_cache(CacheSpec(given.num_pages, need.page_size, need.layout, need.device))
    poison(cache)
    took, clock = [], time.perf_counter
    wait()
    start = clock()
    tier.write(cache, given.new_kv_c, given.new_k_pe, given.batch.slot_mapping)
    wait()
    took.append(clock() - start)
    _fill(tier, cache, given)
    wait()
    start = clock()
    one = Ready(tier, need, cache, tier.prepare(given.up, need), tier.plan(need, given.batch), scene)
    one.attend()
    wait()
    took.append(clock() - start)
    one.first_ms = 1e3 * sum(took)
    return one


def _share_caches(ready: Sequence[Ready]) -> list[tuple[list[Ready], PagedLatentCache]]:
    """Let tiers whose caches hold the same bytes in the same order read the first of these; return who shares one.

    With each such group comes one of the caches that were given up, to see afterwards that nobody wrote.
    """
    groups: list[list[Ready]] = []
    for one in ready:
        group = next((group for group in groups if _same_bytes(group[0].cache, one.cache)), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    shared = [(group, group[-1].cache) for group in groups if len(group) > 1]
    for sharing, _ in shared:
        for one in sharing:
            one.cache = sharing[0].cache
    return shared


def _same_bytes(a: PagedLatentCache, b: PagedLatentCache) -> bool:
    """Whether two caches lie alike and hold the same bytes; NaN equals itself. Looked at by pages, for the memory."""
    lie = [(type(x), x.data.dtype, x.data.shape, x.data.stride()) for x in (a, b)]
    pages = (x.data.split(PAGES_AT_ONCE) for x in (a, b))
    return lie[0] == lie[1] and all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(*pages, strict=True)
    )


def _result(one: Ready | None, gate: Result, attended: Timing | None, repeats: int) -> BenchResult:
    """Judge what the last timed attend returned; time plan and write beside it, and count the memory."""
    if one is None or attended is None or one.state is None:
        return BenchResult(gate)
    after = one.scene.judged(one.tier, one.state)
    if not after.ok:
        detail = f"right before it was timed and wrong after: {after.detail or after.status}"
        return BenchResult(dataclasses.replace(after, detail=detail))
    tier, need, given, device = one.tier, one.need, one.scene.inputs, one.scene.device
    planned = _planned(tier, one.scene)
    graph = one.graph and type(tier).write is not Tier.write  # the default looks at its slots on the host
    bound: Any = one.plan.report.get("workspace_bound")
    try:
        lap = lap_of(one.write, device, graph)
    except RuntimeError:  # only attend is promised to be captured; the timing says how it was taken
        lap = lap_of(one.write, device)
    write = turns([lap], repeats)[0]
    one.state = None
    with LiveStorages() as storages:
        one.plan = tier.plan(need, given.batch) if planned else one.plan
        one.attend()
    plan = turns([HostLap(lambda: tier.plan(need, given.batch, one.plan))], repeats)[0] if planned else None
    bound_bytes = None if bound is None or not planned else int(bound)
    return BenchResult(gate, plan, write, attended, one.first_ms, storages.peak, bound_bytes)


def _fill(tier: Tier, cache: PagedLatentCache, inputs: Inputs) -> None:
    """Write the keys of every request the tier's way."""
    for b, (kv_c, k_pe) in enumerate(inputs.keys):
        tier.write(cache, kv_c, k_pe, slots_of(inputs.batch.block_table[b], 0, kv_c.shape[0], cache.page_size))


def _raised(tier: Tier, scene: Scene, error: BaseException, before: str = "") -> Result:
    detail, at = before + said_by(error), line_of(error.__traceback__)
    return Result(scene.case, tier.name, "raised", detail=detail, at=at, level=scene.level)
