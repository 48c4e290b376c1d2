"""One attention layer of a model: projections, cache write, a tier's attention, W_O.

Axes: T new tokens (packed over requests), N heads, H hidden, Lq query rank, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from mla.batch import AttentionBatch
from mla.cache import CacheLayout, CacheSpec, FloatRows, PagedLatentCache
from mla.checks import check_type
from mla.config import MLAConfig
from mla.errors import bad
from mla.need import Need
from mla.projections import Query, project_latent, project_output, project_query
from mla.rope import amplitude, inverse_frequencies
from mla.tier import Plan, Tier, check_attend, refuse
from mla.weights import MLAWeights, hf_shapes

# What a layer takes from config and weights; every other field of Need is the caller's choice.
DERIVED = ("N", "L", "P", "R", "V", "softmax_scale", "layout", "page_size", "dtype", "device")


@dataclass(frozen=True, eq=False)
class InputSide:
    """What `fused_input` needs of a layer: the steps between the projections and attention, made once per layer.

    RMSNorm of kv_c: `kv_norm` (L,) in the weights' dtype, `eps`, and `multiplier` after it. Rotation of k_pe and q_pe:
    `turns` (R/2,) int64, how far a pair turns per token in units of 2^-64 turns, 0 where nothing is rotated: the int64
    product with a position wraps around where whole turns do, so that the angle is exact at any position. `amplitude`
    is a factor on cos and sin, and pairs are (2i, 2i+1) if `interleaved`, else (i, i + R/2).
    Source: DeepSeek-V2 (arXiv 2405.04434) eqs. 9, 14 and 15.
    """

    kv_norm: Tensor
    eps: float
    multiplier: float
    turns: Tensor
    amplitude: float
    interleaved: bool

    @classmethod
    def of(cls, weights: MLAWeights, config: MLAConfig) -> Self:
        """Take it from weights, kv_norm (L,) and their device, and config; raises ValueError for "longrope"."""
        rope = config.rope
        turns = (inverse_frequencies(rope, config.R) * (2.0**63 / math.pi)).round().to(torch.int64)
        norm = weights.kv_norm, config.rms_norm_eps, config.kv_lora_multiplier
        return cls(*norm, turns.to(weights.kv_norm.device), amplitude(rope), rope.interleaved)


class MLALayer(nn.Module):
    """Multi-head Latent Attention of one layer: everything but the attention itself, which is a tier's.

    q, row = project(hidden);  cache[slot] = row;  out = attend(q, cache);  u[t] = sum_nv out[t,n,v] W_O[n,v]

    The row is rotated first, then written, then attended to: new tokens see their own row as the cache holds it.
    `weights` give dtype and device, W_UK (L, N, P) and so on; with `weights.shard(rank, world)` the layer returns one
    rank's summand of u. `layout` is how latent rows are cached, plain rows of the weights' dtype by default. `options`
    are the other fields of `Need`: mask, lse, capacity, window and so on. The Need is made once and the tier prepares
    once, so what a tier cannot do is refused here. Raises ValueError or TypeError naming the argument, or with the
    tier's sentences.

    The weights are frozen: no parameters and no buffers, because a tier may keep its own form of them. `.to` and the
    like, and `load_state_dict`, prepare again from the new weights, or change nothing when refused; older plans, and
    caches of another layout, are then refused by name. `state_dict` has the Hugging Face names. A weight that is
    written to in place is not noticed. Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1, eqs. 9 to 19.

    A tier may have a method `fused_input(q, kv_c, k_pe, side, cache, batch) -> Query` beside the contract. Then it is
    called in place of norm, rotation and `write`: q.pe (T, N, R) and k_pe (T, R) not yet rotated, kv_c (T, L) not yet
    normed, of any row strides, and `side`, an `InputSide`. It returns nope as it came beside the rotated pe (T, N, R),
    in their dtype, and has written the finished rows to `cache` at `batch.slot_mapping`, -1 skipped. What is right is
    what `project` and `write` do, but for fewer roundings. Checks come first, so nothing is written by a wrong call.
    """

    def __init__(
        self,
        config: MLAConfig,
        weights: MLAWeights,
        tier: Tier,
        *,
        page_size: int = 64,
        layout: CacheLayout | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_type("config", config, MLAConfig, "mla.presets.preset or MLAConfig.from_hf makes one")
        config.require_supported()
        if not hasattr(tier, "attend"):
            raise bad("tier", expected="a tier", got=repr(tier), fix="tiers.get('paged') makes one", kind=TypeError)
        _check_options(options)
        self.config, self.tier = config, tier
        self._unrotated = config.replace(rope=dataclasses.replace(config.rope, type="none"))
        self._layout, self._options = layout, {"page_size": page_size, **options}
        self._adopt(weights)

    def _adopt(self, weights: MLAWeights) -> None:
        """Build the Need and prepare; nothing has changed where that raises."""
        check_type("weights", weights, MLAWeights, "MLAWeights.load or .random makes them")
        config, W_UK = self.config, weights.W_UK
        _check_weights(weights, config)
        layout = FloatRows(config.L, config.R, W_UK.dtype) if self._layout is None else self._layout
        dims: dict[str, Any] = {"N": W_UK.shape[1], "L": config.L, "P": config.P, "R": config.R, "V": config.V}
        scale, device = config.softmax_scale, str(W_UK.device)
        need = Need(**dims, softmax_scale=scale, layout=layout, dtype=W_UK.dtype, device=device, **self._options)
        refuse(self.tier, need)
        prepared = self.tier.prepare(weights.up, need)
        self._side = InputSide.of(weights, config) if hasattr(self.tier, "fused_input") else None
        self.weights, self.need, self.prepared = weights, need, prepared

    def new_cache(self, pages: int) -> PagedLatentCache:
        """Allocate this layer's cache the tier's way: data is (pages, page_size, storage_width)."""
        need = self.need
        return self.tier.new_cache(CacheSpec(pages, need.page_size, need.layout, need.device))

    def plan(self, batch: AttentionBatch | None = None, into: Plan | None = None) -> Plan:
        """Plan one step for all layers of this Need, refilling `into` if given.

        Without a batch the plan is for no token but holds the worst case that `capacity` allows: its `nbytes` is known
        before any request, and `reserve` takes the memory. Raises ValueError where the tier does, or without capacity.
        """
        if batch is None:
            if self.need.capacity is None:
                expected = "a Capacity, from which the worst case is known"
                raise bad("capacity", expected=expected, got="None", fix="MLALayer(..., capacity=Capacity(...))")
            page_size, mask, device = self.need.page_size, self.need.mask, self.need.device
            batch = AttentionBatch.rows([], [], [], [], page_size=page_size, num_pages=0, mask=mask, device=device)
        return self.tier.plan(self.need, batch, into)

    def project(self, hidden: Tensor, positions: Tensor) -> tuple[Query, Tensor, Tensor]:
        """Return the rotated query and the latent rows of new tokens, which do not depend on the tier.

        hidden (T, H), positions (T,) int64; nope (T, N, P) and pe (T, N, R), kv_c (T, L) and k_pe (T, R), all in
        hidden's dtype. Raises ValueError or TypeError naming the argument.
        """
        check_type("hidden", hidden, Tensor, "pass hidden states (T, H)")
        q = project_query(hidden, positions, self.weights, self.config)
        return q, *project_latent(hidden, positions, self.weights, self.config)

    def _project_raw(self, hidden: Tensor, positions: Tensor) -> tuple[Query, Tensor, Tensor]:
        """`project` up to what `fused_input` does: nothing is rotated, kv_c is not normed."""
        w = self.weights
        q = project_query(hidden, positions, w, self._unrotated)
        kv_c, k_pe = hidden @ w.W_DKV, hidden @ w.W_KR
        if w.b_DKV is not None and w.b_KR is not None:
            kv_c, k_pe = kv_c + w.b_DKV, k_pe + w.b_KR
        return q, kv_c, k_pe

    def forward(
        self,
        hidden: Tensor,
        cache: PagedLatentCache | None = None,
        batch: AttentionBatch | None = None,
        plan: Plan | None = None,
    ) -> Tensor:
        """Write the new tokens' rows to the cache and return their attention output (T, H) in hidden's dtype.

        hidden (T, H) in the weights' dtype, one row per row of the batch. Padding rows may hold anything; they come out
        as the output bias, or 0. `plan` is `plan(batch)`, shared by layers, and made here when it is None. Without a
        batch this is the profiling call: it returns zeros (T, H), and takes the memory of the projections and of all
        scratch that `capacity` allows, which stays with `plan` if one is given. Raises ValueError or TypeError naming
        the argument; then nothing is written.
        """
        check_type("hidden", hidden, Tensor, "pass hidden states (T, H)")
        if batch is None:
            self.project(hidden, torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device))
            self.plan(into=plan).reserve()
            return torch.zeros_like(hidden)
        if cache is None:
            raise bad("cache", expected="one beside a batch", got="None", fix="layer.new_cache(pages)", kind=TypeError)
        plan = self.plan(batch) if plan is None else plan
        if plan.batch is not batch:
            raise bad("plan", expected="this batch's plan", got="another batch's", fix="layer.plan(batch, into=plan)")
        side = self._side
        q, kv_c, k_pe = (self.project if side is None else self._project_raw)(hidden, batch.positions)
        check_attend(q, cache, self.prepared, plan, None)
        if side is None:
            self.tier.write(cache, kv_c, k_pe, batch.slot_mapping)
        else:
            q = self.tier.fused_input(q, kv_c, k_pe, side, cache, batch)  # type: ignore[attr-defined]
        state = self.tier.attend(q, cache, self.prepared, plan)
        return project_output(state.out.to(hidden.dtype), self.weights)

    def extra_repr(self) -> str:
        """Model, tier, heads and cache, as `print(layer)` shows them."""
        need = self.need
        cache = f"cache {need.layout.name} in pages of {need.page_size}"
        return f"{self.config.name}, tier={self.tier.name}, {need.N} of {self.config.N} heads, {need.dtype}, {cache}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to`, `.half`, `.cuda` and the like call: move the weights, then prepare again."""
        held = {field.name: getattr(self.weights, field.name) for field in dataclasses.fields(self.weights)}
        self._adopt(dataclasses.replace(self.weights, **{k: fn(v) for k, v in held.items() if v is not None}))
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.weights.to_hf(self.config, prefix).items():
            destination[name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """All tensors of the layer or none: a part of them would leave the tier with a mixture."""
        if not any(name.startswith(prefix) for name in state_dict):
            missing_keys += [prefix + name for name in hf_shapes(self.config)]
        elif self.need.N != self.config.N:
            error_msgs.append(f"{prefix}: a shard of {self.need.N} heads; load the whole weights and shard those.")
        else:
            try:
                weights = MLAWeights.from_hf(state_dict, self.config, prefix, dtype=self.need.dtype)
                self._adopt(weights.to(self.need.device))
            except (ValueError, TypeError) as error:
                error_msgs.append(str(error))


def _check_options(options: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(Need) if field.name not in DERIVED]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, ["layout", "page_size", *known], 1, cutoff=0.0)[0]
            fix = "config and weights give it" if name in DERIVED else f"did you mean {near!r}"
            raise bad(name, expected=f"an option among {', '.join(known)}", got=name, fix=fix, kind=TypeError)


def _check_weights(weights: MLAWeights, config: MLAConfig) -> None:
    (L, N, P), (H, R) = weights.W_UK.shape, weights.W_KR.shape
    found = {"H": H, "Lq": None if weights.W_DQ is None else weights.W_DQ.shape[1], "L": L, "P": P, "R": R}
    found |= {"V": weights.W_UV.shape[2], "attention_bias": weights.b_DKV is not None}
    for name, value in found.items():
        wanted = getattr(config, name)
        if value != wanted:
            expected = f"{name} = {wanted} of config {config.name!r}"
            raise bad("weights", expected=expected, got=str(value), fix="load the weights with this config")
    if config.N % N:
        expected = f"the {config.N} heads of config {config.name!r}, or an equal share"
        raise bad("weights", expected=expected, got=f"{N} heads", fix="use weights.shard(rank, world)")
