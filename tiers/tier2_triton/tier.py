"""Tier 2 in Triton: our own kernels for every part of attention, on any GPU that Triton serves.

Short queries take the absorbed form over pages (`absorbed`), by kernels of their own on Hopper (`hopper_rounds`), long
ones are expanded a workspace at a time (`expanded`).
With `batch_invariant` every row takes the absorbed form through fixed tiles, and its bits depend on nothing but its
query, its keys and their positions. With `graph_capture` a step runs on buffers of fixed size, so that it can be
captured once and replayed after `plan(into=)`.

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from mla.aot import SHARED_LIMIT
from mla.batch import AttentionBatch
from mla.cache import FloatRows, PagedLatentCache
from mla.checks import check_equal, check_int
from mla.chunks import refuse_workspace, workspace_rows
from mla.errors import bad
from mla.layer import InputSide
from mla.need import Need, refuse_features, refuse_package
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import (
    Plan,
    Prepared,
    Tier,
    check_attend,
    deliver,
    kept_on_failure,
    latent_state,
    plan,
    prepare,
    refuse,
    refuse_gradients,
)
from tiers.tier2_triton import ops
from tiers.tier2_triton.absorbed import (
    Round,
    absorbed_sizes,
    attend_latent_rounds,
    attend_round,
    deliver_rounds,
    dot_dtype,
    plan_absorbed,
    prepare_absorbed,
)
from tiers.tier2_triton.expanded import (
    CUDNN_FROM,
    ExpandedSteps,
    attend_expanded,
    expanded_sizes,
    plan_expanded,
    prepare_expanded,
    why_not_route,
)
from tiers.tier2_triton.hopper_rounds import HopperRound, why_not_hopper
from tiers.tier2_triton.launch import FLOATS, HALVES, decode_tile, expand_from, shared_bytes

FORMS = ("auto", "mqa", "hopper", "mha", "hopper-mha", "cudnn", "padded", "invariant")
ROUTES = {"mha": "triton", "hopper-mha": "hopper", "cudnn": "cudnn", "padded": "padded"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Steps:
    """A plan's work: rounds of the absorbed form, and the expanded requests if there are any."""

    rounds: list[Round | HopperRound]
    expanded: ExpandedSteps | None = None


@dataclass(frozen=True)
class TritonTier(Tier):
    """Our Triton kernels; `form` is "auto", "mqa" (absorbed), or how all are expanded: "mha", "cudnn" or "padded".

    "mha" is our own kernel, "hopper-mha" the one for sm_90, "cudnn" and "padded" are those behind PyTorch. "auto"
    absorbs short queries and expands long ones by the kernel for sm_90, else short of 1024 tokens by our portable one
    and from there by cuDNN, each by the next where one does not serve the Need, or absorbs all where none does. What it
    absorbs goes to the Hopper kernels where they serve the Need, else `Plan.report` says why not; "hopper" absorbs all
    by them, "mqa" all by the portable kernel. "invariant" keeps the promise of Need.batch_invariant whether the Need
    asks for it or not. `max_workspace_tokens` bounds the rows (tokens) expanded at once, None as in `paged`.
    """

    form: str = "auto"
    max_workspace_tokens: int | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            fix = "tiers.get('triton', form='auto')"
            raise bad("form", expected=f"one of {', '.join(FORMS)}", got=repr(self.form), fix=fix)
        if self.max_workspace_tokens is not None:
            check_int("max_workspace_tokens", self.max_workspace_tokens, 1, "None, or 65536 as usual")
        object.__setattr__(self, "name", "triton" if self.form == "auto" else f"triton:{self.form}")

    def why_not(self, need: Need) -> list[str]:
        """Return the sentences for what these kernels, this device or its memory cannot do; nothing is launched."""
        reasons = _why_not_device(need) + refuse_package("triton", "triton", "3.6", "triton")
        reasons += refuse_features("triton", need) + _why_not_dtypes(need)
        if need.graph_capture and need.capacity is None:
            reasons.append("graph_capture = True needs Need.capacity, from which buffers get their fixed size; set it.")
        for flag in ("graph_capture", "batch_invariant"):
            if getattr(need, flag) and self.form in ROUTES:
                reasons.append(
                    f"{flag} = True takes the absorbed form; form = {self.form!r} expands: use form = 'mqa'."
                )
        if self.form in ROUTES and not reasons:
            reasons += why_not_route(need, ROUTES[self.form])
        if self.form == "hopper":
            reasons += why_not_hopper(need)
        return reasons + refuse_workspace(need, self.cap(need))

    def cap(self, need: Need) -> int:
        """Rows of the workspace for `need`."""
        return workspace_rows(need, self.max_workspace_tokens)

    def route(self, need: Need, query_len: int = CUDNN_FROM) -> str | None:
        """Return how requests of up to `query_len` new tokens are expanded, one of the routes of `expanded`.

        None where all are absorbed. "auto" takes our kernel for sm_90 there, the fastest of all; else our portable
        one, one launch for all, for short queries, and cuDNN, one call a request, for long ones.
        """
        if self.form in ("mqa", "hopper", "invariant") or need.graph_capture or need.batch_invariant:
            return None
        if self.form in ROUTES:
            return ROUTES[self.form]
        best = ("triton", "cudnn") if query_len < CUDNN_FROM else ("cudnn", "triton")
        return next((route for route in ("hopper", *best) if not why_not_route(need, route)), None)

    def on_hopper(self, need: Need) -> bool:
        """Whether what is absorbed goes to the Hopper kernels."""
        return self.form in ("auto", "hopper") and not why_not_hopper(need)

    def write(self, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store kv_c (T, L) and k_pe (T, R) at slot_mapping (T,) int64 without waiting for the device; -1 is skipped.

        Slots are trusted, as the batch's builder has checked them; `cache.write` is the plain way that looks at them.
        Raises ValueError or TypeError for shapes, dtypes or devices that do not fit.
        """
        refuse_gradients("triton", kv_c, k_pe)
        _check_rows(cache, kv_c, k_pe, slot_mapping)
        ops.write(cache.data, kv_c[: slot_mapping.shape[0]], k_pe[: slot_mapping.shape[0]], slot_mapping)

    def fused_input(
        self, q: Query, kv_c: Tensor, k_pe: Tensor, side: InputSide, cache: PagedLatentCache, batch: AttentionBatch
    ) -> Query:
        """Norm, rotate and write in one launch: kv_c (T, L), k_pe (T, R) and q.pe (T, N, R) as projected.

        Returns q with pe rotated; the rows are in the cache then. See `MLALayer`.
        """
        refuse_gradients("triton", kv_c, k_pe, q.pe)
        _check_rows(cache, kv_c, k_pe, batch.slot_mapping)
        T, L, R = batch.num_tokens, cache.layout.L, cache.layout.R
        check_equal("q.pe.shape", tuple(q.pe.shape), (T, q.nope.shape[1], R), "one row per token of the batch")
        check_equal("kv_norm.shape", tuple(side.kv_norm.shape), (L,), "one weight per number of the latent")
        check_equal("turns.shape", tuple(side.turns.shape), (R // 2,), "one frequency per pair")
        where = (batch.slot_mapping, batch.positions, side.kv_norm, side.turns)
        numbers = (side.eps, side.multiplier, side.amplitude, side.interleaved)
        return Query(q.nope, ops.fused_input(cache.data, kv_c, k_pe, q.pe, *where, *numbers))

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Put heads first for the absorbed form, W_UK (N, P, L) and W_UV (N, L, V); flatten for the expanded one."""
        result = prepare(self, up, need)
        data: dict[str, Any] = prepare_absorbed(up, need)
        if (route := self.route(need)) is not None:
            data |= prepare_expanded(up, need, route)
        result.data.update(data)
        return result

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Choose each request's form, cut the work, and upload it; waits for the device nowhere."""
        mine = into is not None and into.tier == self.name and into.steps is not None
        old = into.steps.rounds if into is not None and mine else None
        if need.graph_capture and old and old[0].tokens not in (0, batch.num_tokens):
            expected, got = f"{old[0].tokens} tokens, as captured", str(batch.num_tokens)
            raise bad("batch", expected=expected, got=got, fix="pad it with pad_tokens to the captured size")
        with kept_on_failure(into):
            result = plan(self, need, batch, into)
            result.steps, result.sizes, result.report = self._steps(need, batch, old)
        return result.reserve() if need.graph_capture else result  # before a capture, which has a pool of its own

    def _steps(
        self, need: Need, batch: AttentionBatch, old: list[Round | HopperRound] | None
    ) -> tuple[Steps, Any, dict[str, object]]:
        """The work of a step, the scratch it takes, and a report of both."""
        least = 1 if self.form in ROUTES else expand_from(need)
        expands = self.route(need) is not None
        expanded = [b for b, n in enumerate(batch.query_lens_host) if expands and n >= least]
        absorbed = [b for b in range(batch.num_requests) if b not in set(expanded)]
        inner = replace(need, batch_invariant=True) if self.form == "invariant" else need
        hopper = self.on_hopper(inner)
        steps = Steps(plan_absorbed(inner, batch, absorbed, old, hopper))
        sizes = absorbed_sizes(inner, steps.rounds, hopper)
        route = self.route(need, max((batch.query_lens_host[b] for b in expanded), default=CUDNN_FROM))
        if route is not None:
            steps.expanded = plan_expanded(need, batch, expanded, self.cap(need), route)
            sizes |= steps.expanded.sizes
        if need.capacity is not None:  # of every route that a later batch may take, whatever this one does
            for way in {self.route(need, n) for n in (1, CUDNN_FROM)} - {None}:
                found = expanded_sizes(need, self.cap(need), str(way))
                sizes |= {k: v for k, v in found.items() if k not in sizes or prod(v[0]) > prod(sizes[k][0])}
        chosen, forms = set(expanded), ("mqa", "mha")
        report: dict[str, Any] = {"forms": [forms[b in chosen] for b in range(batch.num_requests)]}
        report |= {"route": route or "none", "rounds": len(steps.rounds)}
        items = [r.units if isinstance(r, HopperRound) else r.items for r in steps.rounds]
        report |= {"hopper": hopper, "items": sum(x.shape[0] for x in items)}
        if self.form == "auto" and not hopper:
            report["why_not_hopper"] = why_not_hopper(inner)
        return steps, sizes, report

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Attend q.nope (T, N, P) and q.pe (T, N, R) over the pages: out (T, N, V) and lse (T, N).

        Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2; FlashAttention-2 (arXiv 2307.08691) section 3.1.
        """
        check_attend(q, cache, prepared, plan, out)
        check_equal("plan.tier", plan.tier, self.name, "plan with the tier that attends")
        refuse_gradients("triton", q.nope, q.pe)
        need, steps = plan.need, plan.steps
        wanted = {"W_UK"} if steps.expanded is None else {"W_UK", "expanded_W_UK"}
        if wanted - set(prepared.data):
            expected, got = f"what {self.name} prepares", f"{sorted(prepared.data)} of another tier"
            raise bad("prepared", expected=expected, got=got, fix="prepare with the tier that attends")
        chunks = steps.expanded is not None and bool(steps.expanded.sizes)
        if len(steps.rounds) == 1 and not chunks:
            return deliver(AttentionState(*attend_round(steps.rounds[0], q, cache, prepared.data, plan)), plan, out)
        T, N, V = plan.batch.num_tokens, need.N, need.V
        whole = AttentionState(
            q.nope.new_empty(T, N, V, dtype=need.out_dtype), q.nope.new_empty(T, N, dtype=torch.float32)
        )
        deliver_rounds(steps.rounds, q, cache, prepared.data, plan, whole)
        if chunks:
            with torch.cuda.device_of(cache.data):
                dense_q = Query(ops.dense(q.nope), ops.dense(q.pe))
                attend_expanded(steps.expanded, dense_q, cache, prepared.data, plan, whole.out, whole.lse)
        return deliver(whole, plan, out)

    def attend_latent(
        self,
        q_latent: Tensor,
        q_pe: Tensor,
        cache: PagedLatentCache,
        prepared: Prepared | None,
        plan: Plan,
        out: AttentionState | None = None,
    ) -> AttentionState:
        """Attend absorbed queries alone: q_latent (T, N, L) and q_pe (T, N, R) to out (T, N, L) and lse (T, N).

        `plan` is one whose requests are all absorbed, as form = "mqa" makes them. Raises ValueError for another.
        """
        steps = plan.steps
        if steps.expanded is not None and steps.expanded.sizes:
            raise bad("plan", expected="all requests absorbed", got="expanded ones", fix="tiers.get('triton:mqa')")
        state = latent_state(q_latent, q_pe, plan, out)
        with torch.cuda.device_of(cache.data):
            attend_latent_rounds(steps.rounds, q_latent, q_pe, cache, plan, *state.parts())
        return state if out is None else out

    def latent(
        self, q_latent: Tensor, q_pe: Tensor, cache: PagedLatentCache, batch: AttentionBatch, need: Need
    ) -> AttentionState:
        """Plan and attend absorbed queries, q_latent (T, N, L) and q_pe (T, N, R), as the suite calls a raw kernel."""
        tier = self if self.route(need) is None else TritonTier("mqa")
        return self.attend_latent(q_latent, q_pe, cache, None, tier.plan(need, batch))

    def warmup(self, need: Need, side: InputSide | None = None, tick: Callable[[int, int], None] | None = None) -> int:
        """Compile every kernel that this tier can launch for `need`, on dummy tensors; return the number of steps.

        `side`, of a layer, adds its fused input; `tick(done, total)` is told of progress. Nothing compiles afterwards.
        """
        from tiers.tier2_triton.warmup import steps

        refuse(self, need)
        todo = steps(self, need, side)
        for i, step in enumerate(todo):
            if tick is not None:
                tick(i, len(todo))
            step()
        if tick is not None:
            tick(len(todo), len(todo))
        return len(todo)


def interpreted() -> bool:
    """Whether this process runs Triton kernels in the interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_not_device(need: Need) -> list[str]:
    if need.device == "cpu":
        if interpreted():
            return []
        fix = "use a GPU, or start the process with TRITON_INTERPRET=1 to interpret the kernels (slow, for tests)"
        return [f"device 'cpu' is not served by triton, which compiles for GPUs; {fix}."]
    if need.arch not in HALVES or need.arch == "cpu":
        known = ", ".join(a for a in HALVES if a != "cpu")
        return [f"arch {need.arch!r} has no tiles in triton, which knows {known}; use paged there."]
    tile = HALVES[need.arch][16] if need.dtype.itemsize == 2 else FLOATS[need.arch]
    if dot_dtype(need) in DTYPES and decode_tile(need.arch, dot_dtype(need), need.L, need.R, need.N) is None:
        least = shared_bytes(need.arch, (16, 16, *tile[2:]), dot_dtype(need).itemsize, need.L, need.R)
        found = f"rows of L + R = {need.L} + {need.R} need {least:,} bytes of shared memory"
        return [f"{found}, and {need.arch} gives a program {SHARED_LIMIT[need.arch]:,}; use paged for such rows."]
    return []


def _why_not_dtypes(need: Need) -> list[str]:
    rows = need.layout.storage_dtype
    if not isinstance(need.layout, FloatRows):
        return [f"layout {need.layout.name!r} is not read by triton, which reads rows of plain floats; use FloatRows."]
    reasons = [
        f"{what} {dtype} is not served by triton, which takes {', '.join(map(str, DTYPES))}; use one of these."
        for what, dtype in (("dtype", need.dtype), ("a cache of", rows))
        if dtype not in DTYPES
    ]
    if need.device == "cpu" and interpreted() and torch.bfloat16 in (need.dtype, need.out_dtype, rows):
        reasons.append("bfloat16 is silently wrong in Triton's interpreter; use float32 or float16 there, or a GPU.")
    return reasons


def _check_rows(cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> None:
    check_equal("slot_mapping.dtype", slots.dtype, torch.int64, "slot_mapping.long()", TypeError)
    check_equal("slot_mapping.dim()", slots.dim(), 1, "flatten it to (T,)")
    for name, x, width in (("kv_c", kv_c, cache.layout.L), ("k_pe", k_pe, cache.layout.R)):
        if x.dim() != 2 or x.shape[0] < slots.shape[0] or x.shape[1] != width:
            expected, fix = f"(>= {slots.shape[0]}, {width})", "one row per slot, the layout's width"
            raise bad(name, expected=expected, got=str(tuple(x.shape)), fix=fix)
        if x.dtype not in DTYPES:
            expected = f"one of {DTYPES}"
            raise bad(name, expected=expected, got=str(x.dtype), fix="pass unquantised rows", kind=TypeError)
        check_equal(f"{name}.device", x.device, cache.data.device, "move it to the cache's device")
    check_equal("slot_mapping.device", slots.device, cache.data.device, "move it to the cache's device")
