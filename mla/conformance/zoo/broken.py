"""A correct tier with one step that a fault gets hold of.

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import CacheSpec, PagedLatentCache
from mla.conformance.zoo.fault import Fault
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier

Write = Callable[[PagedLatentCache, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, eq=False)
class Call:
    """What one attend was given, and what this tier keeps between its calls."""

    q: Query
    cache: PagedLatentCache
    up: UpProjection
    plan: Plan
    out: AttentionState | None
    kept: dict[Any, Any]


@dataclass(frozen=True)
class Broken(Tier):
    """The tier `base` with one of its steps replaced.

    `need`, `query` and `up` change what the base is given, `write` gets the base's own write, `numbers` changes
    out (T, N, V) and lse (T, N) and leaves their form, `result` changes or replaces the whole answer, `rows` says
    which cache is read.
    """

    name: str
    base: Tier
    need: Callable[[Need], Need] | None = None
    query: Callable[[Query, AttentionBatch], Query] | None = None
    up: Callable[[UpProjection], UpProjection] | None = None
    write_rows: Callable[[Write, PagedLatentCache, Tensor, Tensor, Tensor], None] | None = None
    numbers: Callable[[Tensor, Tensor, AttentionBatch], tuple[Tensor, Tensor]] | None = None
    result: Callable[[AttentionState, Call], Any] | None = None
    rows: Callable[[PagedLatentCache, Plan, dict[Any, Any]], PagedLatentCache] | None = None
    replan: Callable[[Plan | None, Need, AttentionBatch], Plan | None] | None = None
    kept: dict[Any, Any] = field(default_factory=dict)

    def why_not(self, need: Need) -> list[str]:
        """Return the base's own reasons."""
        return self.base.why_not(need)

    def new_cache(self, spec: CacheSpec) -> PagedLatentCache:
        """Return the base's own cache, data (pages, page_size, storage_width)."""
        return self.base.new_cache(spec)

    def write(self, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Write kv_c (T, L) and k_pe (T, R) at slot_mapping (T,) in the broken way."""
        if self.write_rows is None:
            self.base.write(cache, kv_c, k_pe, slot_mapping)
        else:
            self.write_rows(self.base.write, cache, kv_c, k_pe, slot_mapping)

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Prepare the base from changed weights, W_UK (L, N, P) and W_UV (L, N, V), or a changed Need."""
        prepared = self.base.prepare(self.up(up) if self.up else up, self.need(need) if self.need else need)
        self.kept["up"] = up
        return prepared

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Plan the base for a changed Need; a fault may hand back the old plan."""
        old = self.replan(into, need, batch) if self.replan else None
        return old or self.base.plan(self.need(need) if self.need else need, batch, into)

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Attend the base, out (T, N, V) and lse (T, N), with the fault before or behind it."""
        asked = self.query(q, plan.batch) if self.query else q
        state = self.base.attend(asked, self.rows(cache, plan, self.kept) if self.rows else cache, prepared, plan, out)
        if self.numbers is not None:
            lse = state.out[..., 0] if state.lse is None else state.lse
            changed = self.numbers(state.out.clone(), lse.clone(), plan.batch)
            for now, new in zip(state, changed, strict=True):
                if now is not None:
                    now.copy_(new)
        if self.result is None:
            return state
        return self.result(state, Call(q, cache, self.kept["up"], plan, out, self.kept))


def around(name: str, kind: str, source: str, about: str, suite: str = "smoke", **step: Any) -> Fault:
    """Return the fault of a tier that is right but for one step, such as `numbers=` or `write_rows=` of `Broken`."""
    return Fault(name, kind, about, source, suite, wrap=lambda base: Broken(name, base, **step))
