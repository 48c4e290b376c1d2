"""The contract between a model and a way to compute attention: Prepared, Plan and the Tier protocol.

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import FLOAT_DTYPES, CacheSpec, PagedLatentCache
from mla.checks import check_equal, check_type
from mla.errors import bad
from mla.need import Need, normal_device
from mla.projections import Query, UpProjection
from mla.state import AttentionState


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a tier derives from the weights once per layer: `up` as given, `need`, and its own `data` by name."""

    up: UpProjection
    need: Need
    data: dict[str, Any] = field(default_factory=dict)
    q_scale: float = 1.0


@dataclass(eq=False)
class Plan:
    """One step's decisions, shared by all layers: `need`, `batch`, a `report` for people, and scratch buffers.

    `sizes` names every buffer, (shape, dtype), known from Need and Capacity alone; `nbytes` is their sum, with that of
    `parts`, the plans that this one is made of. Tensors that a tier returns are never scratch.
    """

    need: Need
    batch: AttentionBatch
    report: dict[str, object] = field(default_factory=dict)
    steps: Any = None
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    parts: tuple["Plan", ...] = ()
    tier: str = ""
    _buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all scratch buffers of this plan and its parts once they are allocated."""
        own = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.sizes.values())
        return own + sum(part.nbytes for part in self.parts)

    def reserve(self) -> "Plan":
        """Allocate every planned buffer now instead of on first use, those of the parts too, and return this plan."""
        for name in self.sizes:
            self._buffer(name)
        for part in self.parts:
            part.reserve()
        return self

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised view of `shape` on buffer `name`, allocated at its planned size on first use.

        Raises ValueError where the view does not fit the planned buffer.
        """
        if name not in self.sizes or math.prod(shape) > math.prod(self.sizes[name][0]) or dtype != self.sizes[name][1]:
            expected, got = f"within {self.sizes.get(name)}", f"{shape} of {dtype}"
            raise bad(f"scratch {name!r}", expected=expected, got=got, fix="name it in Plan.sizes, large enough")
        return self._buffer(name)[: math.prod(shape)].view(shape)

    def _buffer(self, name: str) -> Tensor:
        """The flat buffer at its planned size; a refilled plan without capacity may have outgrown the one it holds."""
        shape, dtype = self.sizes[name]
        held = self._buffers.get(name)
        if held is None or held.numel() < math.prod(shape) or held.dtype != dtype:
            self._buffers[name] = torch.empty(math.prod(shape), dtype=dtype, device=self.need.device)
        return self._buffers[name]


class Tier(Protocol):
    """A way to compute attention over the latent cache. Subclass it for the defaults; a tier is always a leaf."""

    name: str

    def why_not(self, need: Need) -> list[str]:
        """Return [] where this tier serves `need`, else whole sentences: value found, values allowed, the fix."""
        ...

    def new_cache(self, spec: CacheSpec) -> PagedLatentCache:
        """Allocate one layer's cache; data is (pages, page_size, storage_width)."""
        return PagedLatentCache.new(spec)

    def write(self, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store kv_c (T, L) and k_pe (T, R) at slot_mapping (T,) int64; -1 is skipped."""
        cache.write(kv_c, k_pe, slot_mapping)

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Derive what attend needs from W_UK (L, N, P) and W_UV (L, N, V), once per layer."""
        return prepare(self, up, need)

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Decide how to compute one step, once for all layers; `into` refills an earlier plan in place."""
        return plan(self, need, batch, into)

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Attend q, nope (T, N, P) and pe (T, N, R), over the cache: out (T, N, V) and lse (T, N) or None.

        `out` is in need.out_dtype and lse in need.compute_dtype; with `out=` both go there and that object is returned.
        """
        ...


def refuse(tier: Tier, need: Need) -> None:
    """Raise ValueError with every reason why `tier` cannot serve `need`; return where it can."""
    reasons = tier.why_not(need)
    if reasons:
        raise ValueError(f"tier {tier.name!r} refuses: " + " ".join(reasons))


def refuse_gradients(tier: str, *tensors: Tensor) -> None:
    """Raise ValueError where autograd would record a tier that works in place; tensors such as kv_c (T, L)."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        fix = "call it under torch.no_grad(), detach hidden states and weights, or take gradients through naive"
        raise bad("requires_grad", expected=f"no gradients through {tier}, forward only", got="True", fix=fix)


def prepare(tier: Tier, up: UpProjection, need: Need, **data: Any) -> Prepared:
    """Check the up-projections against `need`, W_UK (L, N, P) and W_UV (L, N, V), and wrap them with a tier's own data.

    Raises ValueError or TypeError naming the matrix where a shape, dtype or device differs, or with the refusal.
    """
    refuse(tier, need)
    for name, W, width in (("W_UK", up.W_UK, need.P), ("W_UV", up.W_UV, need.V)):
        shape, fix = (need.L, need.N, width), "split kv_b_proj per head, P rows then V rows"
        check_equal(f"{name}.shape", tuple(W.shape), shape, fix)
        if W.dtype not in FLOAT_DTYPES:
            expected, fix = f"one of {FLOAT_DTYPES}", "dequantise kv_b_proj first"
            raise bad(f"{name}.dtype", expected=expected, got=str(W.dtype), fix=fix, kind=TypeError)
        check_equal(f"{name}.device", normal_device(W.device), need.device, "move the weights to the layer's device")
    return Prepared(up, need, data)


def plan(tier: Tier, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
    """Check a batch against `need` and its capacity and wrap both; with `into`, refill that plan and return it.

    Raises ValueError that names the field: another mask, page size or device, a broken promise of capacity, or a plan
    made for another Need or by another tier; `into` is unchanged then.
    """
    for name, value, kind in (("need", need, Need), ("batch", batch, AttentionBatch), ("into", into, Plan)):
        if not isinstance(value, kind) and not (name == "into" and value is None):
            expected, fix = f"a {kind.__name__}", "plan(need, batch, into=None)"
            raise bad(name, expected=expected, got=type(value).__name__, fix=fix, kind=TypeError)
    if into is None or into.need is not need:  # else it was accepted when that plan was made
        refuse(tier, need)
    check_equal("batch.mask", batch.mask, need.mask, "build batch and Need with one mask")
    check_equal("batch.page_size", batch.page_size, need.page_size, "use the cache's page size")
    device = normal_device(batch.seq_lens.device)
    check_equal("batch.seq_lens.device", device, need.device, "pass device= to the builder")
    if need.uniform_queries and len({q for q in batch.query_lens_host if q}) > 1:
        got, fix = str(sorted(set(batch.query_lens_host))), "plan with uniform_queries=False"
        raise bad("batch.query_lens", expected="one length (Need.uniform_queries)", got=got, fix=fix)
    if need.capacity is not None:
        need.capacity.check(batch)
    if into is None:
        return Plan(need, batch, tier=tier.name)
    if into.need != need:
        raise bad("into", expected="a plan of the same Need", got="a plan of another", fix="make a new plan")
    check_equal("into.tier", into.tier, tier.name, "make a new plan for each tier")
    into.batch, into.steps = batch, None  # whoever forgets to fill the steps shall not get those of an earlier batch
    return into


@contextmanager
def kept_on_failure(into: Plan | None) -> Iterator[None]:
    """Give a plan that is being refilled its batch, steps, sizes and report back where the body raises."""
    before = (into.batch, into.steps, into.sizes, into.report) if isinstance(into, Plan) else None
    try:
        yield
    except Exception:
        if into is not None and before is not None:
            into.batch, into.steps, into.sizes, into.report = before
        raise


def check_attend(q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None) -> None:
    """Raise ValueError or TypeError naming the argument of `attend` that does not belong to the plan; no host sync.

    q.nope must be (T, N, P) and q.pe (T, N, R) in need.dtype, out.out (T, N, V) in need.out_dtype, out.lse (T, N).
    """
    check_type("q", q, Query, "pass Query(nope, pe)")
    check_type("cache", cache, PagedLatentCache, "pass tier.new_cache(...)")
    check_type("prepared", prepared, Prepared, "pass tier.prepare(up, need)")
    check_type("plan", plan, Plan, "pass tier.plan(need, batch)")
    if out is not None:
        check_type("out", out, AttentionState, "pass AttentionState(out, lse), or None")
    need, T = plan.need, plan.batch.num_tokens
    if prepared.need is not need and prepared.need != need:
        expected, fix = "the Need that the layer was prepared for", "plan with prepared.need"
        raise bad("plan.need", expected=expected, got="another", fix=fix)
    _check_tensor("q.nope", q.nope, (T, need.N, need.P), need.dtype, need)
    _check_tensor("q.pe", q.pe, (T, need.N, need.R), need.dtype, need)
    if out is not None:
        _check_tensor("out.out", out.out, (T, need.N, need.V), need.out_dtype, need)
        check_equal(
            "out.lse", "None" if out.lse is None else "a tensor", "a tensor" if need.lse else "None", "see Need.lse"
        )
        if out.lse is not None:
            _check_tensor("out.lse", out.lse, (T, need.N), need.compute_dtype, need)
    check_equal("cache.layout", cache.layout, need.layout, "plan with the cache's layout")
    check_equal("cache.page_size", cache.page_size, need.page_size, "plan with the cache's page size")
    check_equal("cache.data.device", normal_device(cache.data.device), need.device, "allocate it where the layer is")
    pages = plan.batch.num_pages
    if pages is not None and pages > cache.num_pages:
        expected, fix = f"at least {pages} pages, as the batch was told", "build the batch with the cache's num_pages"
        raise bad("cache.num_pages", expected=expected, got=str(cache.num_pages), fix=fix)


def _check_tensor(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, need: Need) -> None:
    check_equal(f"{name}.shape", tuple(x.shape), shape, "one row per token of the batch")
    check_equal(f"{name}.dtype", x.dtype, dtype, "match the dtype in Need", TypeError)
    check_equal(f"{name}.device", normal_device(x.device), need.device, "move it to the layer's device")


def latent_state(q_latent: Tensor, q_pe: Tensor, plan: Plan, out: AttentionState | None) -> AttentionState:
    """Return what an inner kernel writes to, out (T, N, L) and lse (T, N): `out`, with an LSE, or new tensors.

    Raises ValueError or TypeError where q_latent is not (T, N, L), q_pe not (T, N, R), or `out` of another shape.
    """
    need, T = plan.need, plan.batch.num_tokens
    _check_tensor("q_latent", q_latent, (T, need.N, need.L), q_latent.dtype, need)
    _check_tensor("q_pe", q_pe, (T, need.N, need.R), q_latent.dtype, need)
    lse = None if out is None else out.lse
    if out is not None:
        _check_tensor("out.out", out.out, (T, need.N, need.L), out.out.dtype, need)
    if lse is not None:
        _check_tensor("out.lse", lse, (T, need.N), torch.float32, need)
    values = q_latent.new_empty(T, need.N, need.L) if out is None else out.out
    return AttentionState(values, q_latent.new_empty(T, need.N, dtype=torch.float32) if lse is None else lse)


def deliver(state: AttentionState, plan: Plan, out: AttentionState | None) -> AttentionState:
    """Check a computed state, out (T, N, V) and lse (T, N), and cast it to what the Need promises, into `out` if given.

    Raises ValueError where the computed shapes are not those, or an LSE that was asked for is missing; `out` is
    unchanged then.
    """
    need, T = plan.need, plan.batch.num_tokens
    if not isinstance(state, AttentionState):
        fix = "return AttentionState(out, lse)"
        raise bad("attend's result", expected="an AttentionState", got=type(state).__name__, fix=fix, kind=TypeError)
    check_equal("attend's out.shape", tuple(state.out.shape), (T, need.N, need.V), "return out (T, N, V)")
    if need.lse:
        got = None if state.lse is None else tuple(state.lse.shape)
        check_equal("attend's lse.shape", got, (T, need.N), "return the LSE, or refuse lse = True in why_not")
    lse = state.lse.to(need.compute_dtype) if need.lse and state.lse is not None else None
    if out is None:
        return AttentionState(state.out.to(need.out_dtype), lse)
    out.out.copy_(state.out)
    if out.lse is not None and lse is not None:
        out.lse.copy_(lse)
    return out
