"""Make a tier from less than a tier: from one function, from an absorbed kernel, or from two tiers.

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import CacheSpec, PagedLatentCache
from mla.checks import check_equal, check_int
from mla.errors import bad
from mla.need import Need, refuse_features
from mla.projections import Query, UpProjection, absorb_query, project_values
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier, check_attend, deliver, plan, prepare

Attend = Callable[[Query, PagedLatentCache, AttentionBatch, UpProjection, Need], AttentionState]
LatentKernel = Callable[[Tensor, Tensor, PagedLatentCache, AttentionBatch, Need], AttentionState]


@dataclass(frozen=True)
class FunctionTier(Tier):
    """A tier around one function; make it with `from_attend` or, around `latent`, with `from_latent`."""

    name: str
    function: Attend
    reasons: Callable[[Need], list[str]] | None = None
    latent: LatentKernel | None = None

    def why_not(self, need: Need) -> list[str]:
        """Return the sentences for features that no plain function computes, and the function's own."""
        sentences = refuse_features(self.name, need)
        for flag in ("batch_invariant", "graph_capture"):
            if getattr(need, flag):
                sentences.append(f"{flag} = True is not promised by {self.name}, a plain function; unset it.")
        return sentences + (self.reasons(need) if self.reasons else [])

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Call the function, check its shapes, out (T, N, V) and lse (T, N), and cast to what the Need promises."""
        check_attend(q, cache, prepared, plan, out)
        return deliver(self.function(q, cache, plan.batch, prepared.up, plan.need), plan, out)


def from_attend(name: str, attend: Attend, why_not: Callable[[Need], list[str]] | None = None) -> FunctionTier:
    """Wrap `attend(q, cache, batch, up, need) -> AttentionState` as a tier.

    q.nope (T, N, P), q.pe (T, N, R), rotated and not absorbed. The function returns out (T, N, V) and natural-log lse
    (T, N) in float32 or the query's dtype, in tensors of their own; a row that sees no key has 0 and -inf. The wrapper
    casts, drops an LSE that was not asked for, and fills the caller's buffers. `why_not(need)` adds reasons to refuse.
    Raises TypeError where one of the two cannot be called; the tier raises ValueError for results of another shape.
    """
    if not isinstance(name, str) or not name:
        fix = "from_attend('mine', attend)"
        raise bad("name", expected="a name for reports", got=repr(name), fix=fix, kind=TypeError)
    for argument, function in (("attend", attend), ("why_not", why_not)):
        if not callable(function) and not (argument == "why_not" and function is None):
            raise bad(argument, expected="a function", got=repr(function), fix="see tiers/template.py", kind=TypeError)
    return FunctionTier(name, attend, why_not)


def from_latent(name: str, kernel: LatentKernel, why_not: Callable[[Need], list[str]] | None = None) -> Tier:
    """Wrap a raw kernel `kernel(q_latent, q_pe, cache, batch, need) -> AttentionState` as a tier.

    The kernel gets the absorbed query q_latent (T, N, L), rounded to the query's dtype, and q_pe (T, N, R); it returns
    the latent output (T, N, L) and natural-log lse (T, N), a row that sees no key as 0 and -inf. The wrapper absorbs
    W_UK before and multiplies with W_UV after, both in promote(dtype, float32). In float16 an absorbed query overflows
    past 65504. Raises TypeError as `from_attend` does. Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2.
    """
    if not callable(kernel):
        raise bad("kernel", expected="a function", got=repr(kernel), fix="from_latent('mine', kernel)", kind=TypeError)

    def attend(
        q: Query, cache: PagedLatentCache, batch: AttentionBatch, up: UpProjection, need: Need
    ) -> AttentionState:
        q_latent = absorb_query(q.nope, up.W_UK).to(q.nope.dtype)
        latent = kernel(q_latent, q.pe, cache, batch, need)
        return AttentionState(project_values(latent.out, up.W_UV), latent.lse)

    return dataclasses.replace(from_attend(name, attend, why_not), latent=kernel)


@dataclass(frozen=True)
class ComposedTier(Tier):
    """Two tiers over one cache: requests of at most `decode_query_len` new tokens go to `decode`, others to `prefill`.

    Cache allocation and writes are the decode half's; the prefill half's why_not judges the same layout. A half's
    `fused_input` (see `MLALayer`) is not handed on: the layer norms, rotates and writes in separate steps.
    """

    decode: Tier
    prefill: Tier
    decode_query_len: int = 8
    name: str = field(init=False)

    def __post_init__(self) -> None:
        for half, tier in self._halves():
            if not hasattr(tier, "attend"):
                raise bad(half, expected="a tier", got=repr(tier), fix="tiers.get('paged') makes one", kind=TypeError)
        check_int("decode_query_len", self.decode_query_len, 1, "the longest query that counts as decode")
        object.__setattr__(self, "name", f"decode={self.decode.name}+prefill={self.prefill.name}")

    def _halves(self) -> tuple[tuple[str, Tier], ...]:
        return (("decode", self.decode), ("prefill", self.prefill))

    def _need(self, need: Need, half: str) -> Need:
        if need.capacity is None or half == "prefill":
            return need
        short = min(need.capacity.max_query_len, self.decode_query_len)
        return dataclasses.replace(need, capacity=dataclasses.replace(need.capacity, max_query_len=short))

    def why_not(self, need: Need) -> list[str]:
        """Return both halves' sentences, each asked with its own Need, behind the half's name."""
        reasons = [f"{half}: {s}" for half, tier in self._halves() for s in tier.why_not(self._need(need, half))]
        if need.graph_capture:
            found = "graph_capture = True is not possible in two tiers at once, whose shares of a batch change in size"
            reasons.append(f"{found}; use one tier for both.")
        return reasons

    def new_cache(self, spec: CacheSpec) -> PagedLatentCache:
        """Allocate the decode half's cache; data is (pages, page_size, storage_width)."""
        return self.decode.new_cache(spec)

    def write(self, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Write kv_c (T, L) and k_pe (T, R) at slot_mapping (T,) the decode half's way."""
        self.decode.write(cache, kv_c, k_pe, slot_mapping)

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Prepare both halves from W_UK (L, N, P) and W_UV (L, N, V)."""
        parts = {half: tier.prepare(up, self._need(need, half)) for half, tier in self._halves()}
        return prepare(self, up, need, **parts)

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Split the requests by query length and plan each half."""
        old, before = (into.steps, into.batch) if into is not None else (None, None)
        result = plan(self, need, batch, into)
        try:
            self._plan_halves(need, batch, result, old)
        except Exception:
            if into is not None and before is not None:
                into.batch = before
                self._plan_halves(need, before, into, old)  # one of them may have been refilled already
            raise
        return result

    def _plan_halves(self, need: Need, batch: AttentionBatch, result: Plan, old: Any) -> None:
        short = [b for b, q in enumerate(batch.query_lens_host) if q <= self.decode_query_len]
        long = [b for b, q in enumerate(batch.query_lens_host) if q > self.decode_query_len]
        steps = {}
        for (half, tier), chosen in zip(self._halves(), (short, long), strict=True):
            part, rows = batch.select(chosen)
            steps[half] = (tier.plan(self._need(need, half), part, old[half][0] if old else None), rows)
        result.steps = steps
        result.report = {half: p.report for half, (p, _) in steps.items()}
        result.parts = tuple(p for p, _ in steps.values())

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Attend each half and put its rows, out (T, N, V) and lse (T, N), where they belong in the batch."""
        check_attend(q, cache, prepared, plan, out)
        check_equal("plan.tier", plan.tier, self.name, "plan with the tier that attends")
        T, N, V = plan.batch.num_tokens, plan.need.N, plan.need.V
        whole = AttentionState.empty(T, N, V, dtype=plan.need.compute_dtype, device=plan.need.device)
        for half, tier in self._halves():
            part_plan, rows = plan.steps[half]
            if rows.numel():
                part = tier.attend(Query(q.nope[rows], q.pe[rows]), cache, prepared.data[half], part_plan)
                whole.out[rows] = part.out.to(whole.out.dtype)
                if part.lse is not None and whole.lse is not None:
                    whole.lse[rows] = part.lse
        return deliver(whole, plan, out)


def compose(decode: Tier, prefill: Tier, decode_query_len: int = 8) -> Tier:
    """Return one tier that sends short requests to `decode` and long ones to `prefill`, over one cache."""
    return ComposedTier(decode, prefill, decode_query_len)
