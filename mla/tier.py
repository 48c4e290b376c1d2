"""The contract between a model and a way to compute attention: Prepared, Plan and the Tier protocol.

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import CacheSpec, PagedLatentCache
from mla.errors import bad
from mla.need import Need, normal_device
from mla.projections import Query, UpProjection
from mla.state import AttentionState


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a tier derives from the weights once per layer: `up` as given, `need`, `q_scale`, and its own `data` by name."""

    up: UpProjection
    need: Need
    data: dict[str, Any] = field(default_factory=dict)
    q_scale: float = 1.0


@dataclass(eq=False)
class Plan:
    """One step's decisions, shared by all layers: `need`, `batch`, a `report` for people, and the buffers that grow with the cap.

    `sizes` names every buffer, (shape, dtype), known from Need and Capacity alone; `nbytes` is their sum. Tensors that a
    tier returns are never scratch.
    """

    need: Need
    batch: AttentionBatch
    report: dict[str, object] = field(default_factory=dict)
    steps: Any = None
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    _buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all scratch buffers of this plan once they are allocated."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.sizes.values())

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised view of `shape` on buffer `name`, allocated at its planned size on first use.

        Raises ValueError where the view does not fit the planned buffer.
        """
        if name not in self.sizes or math.prod(shape) > math.prod(self.sizes[name][0]) or dtype != self.sizes[name][1]:
            raise bad(f"scratch {name!r}", expected=f"within {self.sizes.get(name)}", got=f"{shape} of {dtype}", fix="plan for it")
        if name not in self._buffers:
            self._buffers[name] = torch.empty(math.prod(self.sizes[name][0]), dtype=dtype, device=self.need.device)
        return self._buffers[name][: math.prod(shape)].view(shape)


class Tier(Protocol):
    """A way to compute attention over the latent cache. Subclass it for the defaults; a tier is always a leaf."""

    name: str

    def why_not(self, need: Need) -> list[str]:
        """Return [] where this tier serves `need`, else whole sentences: the value found, the values allowed, the fix."""
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
        """Attend q, nope (T, N, P) and pe (T, N, R), over the cache: out (T, N, V) in need.out_dtype and lse (T, N) or None."""
        ...


def refuse(tier: Tier, need: Need) -> None:
    """Raise ValueError with every reason why `tier` cannot serve `need`; return where it can."""
    reasons = tier.why_not(need)
    if reasons:
        raise ValueError(f"tier {tier.name!r} refuses: " + " ".join(reasons))


def prepare(tier: Tier, up: UpProjection, need: Need, **data: Any) -> Prepared:
    """Check the up-projections against `need`, W_UK (L, N, P) and W_UV (L, N, V), and wrap them with a tier's own data.

    Raises ValueError or TypeError naming the matrix where a shape, dtype or device differs, or with the refusal.
    """
    refuse(tier, need)
    for name, width in (("W_UK", need.P), ("W_UV", need.V)):
        W = getattr(up, name)
        if tuple(W.shape) != (need.L, need.N, width):
            expected = f"(L, N, {name[-1] == 'K' and 'P' or 'V'}) = {(need.L, need.N, width)}"
            raise bad(name, expected=expected, got=str(tuple(W.shape)), fix="split kv_b_proj per head, P rows then V rows")
        if not W.is_floating_point():
            raise bad(name, expected="a float dtype", got=str(W.dtype), fix="dequantise kv_b_proj first", kind=TypeError)
        if normal_device(W.device) != need.device:
            raise bad(name, expected=f"device {need.device}", got=str(W.device), fix="move the weights to the layer's device")
    return Prepared(up, need, data)


def plan(tier: Tier, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
    """Check a batch against `need` and its capacity and wrap both; with `into`, refill that plan and return it.

    Raises ValueError that names the field: another mask, page size or device, a broken promise of capacity, or a plan
    made for another Need; `into` is unchanged then.
    """
    refuse(tier, need)
    if batch.mask != need.mask:
        raise bad("batch.mask", expected=repr(need.mask), got=repr(batch.mask), fix="build batch and Need with one mask")
    if batch.page_size != need.page_size:
        raise bad("batch.page_size", expected=str(need.page_size), got=str(batch.page_size), fix="use the cache's page size")
    if normal_device(batch.seq_lens.device) != need.device:
        raise bad("batch", expected=f"device {need.device}", got=str(batch.seq_lens.device), fix="pass device= to the builder")
    if need.uniform_queries and len({q for q in batch.query_lens_host if q}) > 1:
        got = str(sorted(set(batch.query_lens_host)))
        raise bad("batch.query_lens", expected="one length (Need.uniform_queries)", got=got, fix="plan with uniform_queries=False")
    if need.capacity is not None:
        need.capacity.check(batch)
    if into is None:
        return Plan(need, batch)
    if into.need != need:
        raise bad("into", expected="a plan of the same Need", got="a plan of another", fix="make a new plan")
    into.batch = batch
    return into


def check_attend(q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None) -> None:
    """Raise ValueError or TypeError that names the argument of `attend` which does not belong to the plan; no host sync.

    q.nope must be (T, N, P) and q.pe (T, N, R) in need.dtype, out.out (T, N, V) in need.out_dtype, out.lse (T, N).
    """
    need, T = plan.need, plan.batch.num_tokens
    if prepared.need is not need and prepared.need != need:
        raise bad("plan", expected="the Need that the layer was prepared for", got="another", fix="plan with prepared.need")
    tensors = [("q.nope", q.nope, (T, need.N, need.P), need.dtype), ("q.pe", q.pe, (T, need.N, need.R), need.dtype)]
    if out is not None:
        tensors.append(("out.out", out.out, (T, need.N, need.V), need.out_dtype))
        if (out.lse is not None) != need.lse:
            raise bad("out.lse", expected="a tensor" if need.lse else "None", got=type(out.lse).__name__, fix="match Need.lse")
        if out.lse is not None:
            tensors.append(("out.lse", out.lse, (T, need.N), need.compute_dtype))
    for name, x, shape, dtype in tensors:
        if tuple(x.shape) != shape:
            raise bad(name, expected=f"shape {shape}", got=str(tuple(x.shape)), fix="one row per token of the batch")
        if x.dtype != dtype:
            raise bad(name, expected=str(dtype), got=str(x.dtype), fix="match the dtype in Need", kind=TypeError)
        if normal_device(x.device) != need.device:
            raise bad(name, expected=f"device {need.device}", got=str(x.device), fix="move it")
    if cache.layout != need.layout or cache.page_size != need.page_size:
        got = f"{cache.layout} with page_size {cache.page_size}"
        raise bad("cache", expected=f"{need.layout} with page_size {need.page_size}", got=got, fix="plan with the cache's layout")
    if normal_device(cache.data.device) != need.device:
        raise bad("cache", expected=f"device {need.device}", got=str(cache.data.device), fix="allocate it on the layer's device")


def deliver(state: AttentionState, plan: Plan, out: AttentionState | None) -> AttentionState:
    """Check a computed state, out (T, N, V) and lse (T, N), and cast it to what the Need promises, into `out` if given.

    Raises ValueError where the computed shapes are not those, or an LSE that was asked for is missing; `out` is
    unchanged then.
    """
    need, T = plan.need, plan.batch.num_tokens
    if tuple(state.out.shape) != (T, need.N, need.V):
        raise bad("attend's out", expected=f"{(T, need.N, need.V)}", got=str(tuple(state.out.shape)), fix="return (T, N, V)")
    if need.lse and (state.lse is None or tuple(state.lse.shape) != (T, need.N)):
        got = "None" if state.lse is None else str(tuple(state.lse.shape))
        raise bad("attend's lse", expected=f"{(T, need.N)}", got=got, fix="return the LSE, or refuse lse=True in why_not")
    lse = state.lse.to(need.compute_dtype) if need.lse and state.lse is not None else None
    if out is None:
        return AttentionState(state.out.to(need.out_dtype), lse)
    out.out.copy_(state.out)
    if out.lse is not None and lse is not None:
        out.lse.copy_(lse)
    return out
