"""Tier 2 by AITER: AMD's assembly decode and flash attention behind the same contract. Not run on AMD hardware.

Short queries take the absorbed form over pages (`decode`), long ones are expanded a workspace at a time (`prefill`).
`route` knows which kernel exists for what; nothing is called that it has no entry for, because AITER ends the process
where it lacks a kernel. `library` is the installed package, or in tests a simulator of its contract.

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import FloatRows, PagedLatentCache
from mla.checks import check_equal, check_int
from mla.chunks import refuse_workspace, workspace_rows
from mla.errors import bad
from mla.need import Need, refuse_features
from mla.projections import Query, UpProjection
from mla.ragged import RaggedSteps, attend_ragged, plan_ragged, prepare_ragged, ragged_sizes
from mla.state import AttentionState
from mla.tier import (
    Plan,
    Prepared,
    Tier,
    check_attend,
    deliver,
    kept_on_failure,
    plan,
    prepare,
    refuse_gradients,
)
from tiers.tier2_aiter.decode import (
    DecodeCall,
    attend_decode,
    choose,
    functions_of,
    plan_decode,
    prepare_absorbed,
    route_of,
    sizes_of,
)
from tiers.tier2_aiter.library import FLASH, InstalledAiter, Library, required, why_not_functions
from tiers.tier2_aiter.prefill import flash_kernel, heads_first, prefill_route
from tiers.tier2_aiter.route import AiterUnsupported

FORMS = ("auto", "mqa", "mha")
EXPAND_FROM = 9  # new tokens; verification has kernels up to 8. Not measured on AMD hardware
LONGEST = 1 << 31


@dataclass
class Steps:
    """A plan's work: one absorbed call, if there is any, and the expanded requests, if there are any."""

    decode: DecodeCall | None = None
    expanded: RaggedSteps | None = None
    tokens: int = 0


@dataclass(frozen=True)
class AiterTier(Tier):
    """AITER's kernels; `form` is "auto", "mqa" (all absorbed) or "mha" (all expanded).

    "auto" absorbs queries of up to 8 tokens and expands longer ones; where flash attention does not serve the sizes,
    and for float16, whose expanded keys may pass 65504, it absorbs all. `max_workspace_tokens` bounds the rows (tokens)
    expanded at once, None as in `paged`. `library` is where AITER is.
    """

    form: str = "auto"
    max_workspace_tokens: int | None = None
    library: Library = field(default_factory=InstalledAiter)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            fix = "tiers.get('aiter', form='auto')"
            raise bad("form", expected=f"one of {', '.join(FORMS)}", got=repr(self.form), fix=fix)
        if self.max_workspace_tokens is not None:
            check_int("max_workspace_tokens", self.max_workspace_tokens, 1, "None, or 65536 as usual")
        label = self.library.label
        object.__setattr__(self, "name", label if self.form == "auto" else f"{label}:{self.form}")

    def why_not(self, need: Need) -> list[str]:
        """Return the sentences for what AITER, this device or this build of it cannot do; nothing is launched."""
        reasons = self.library.why_not(need) + refuse_features(self.name, need) + self._why_not_contract(need)
        if not isinstance(need.layout, FloatRows):
            found = f"layout {need.layout.name!r} is not read by {self.name}, fp8 rows included"
            reasons.append(f"{found}: it reads rows of plain floats until quantised layouts exist; use FloatRows.")
            return reasons + refuse_workspace(need, self.cap(need))
        functions: tuple[str, ...] = ()
        try:
            if self.form != "mha":
                functions += functions_of(route_of(self.library, need, (1,)))
            if self.form == "mha" or self.expands(need):
                prefill_route(self.library, need)
                functions += (FLASH,)
        except AiterUnsupported as refusal:
            reasons.append(refusal.reason)
        if not reasons:
            reasons += why_not_functions(self.library, need, functions)
        return reasons + refuse_workspace(need, self.cap(need))

    def _why_not_contract(self, need: Need) -> list[str]:
        """Sentences for what the contract allows and this tier does not do with any AITER."""
        reasons = []
        if need.mask == "rows":
            found = f"mask 'rows' is not computed by {self.name}, which cuts keys by the host's lengths"
            reasons.append(f"{found} and takes 'causal' and 'full'; use paged or triton.")
        if need.batch_invariant:
            found = f"batch_invariant = True is not promised by {self.name}, whose splits follow the batch"
            reasons.append(f"{found}; set it to False, or use triton.")
        if need.dtype == torch.float16 and self.form == "mha":
            found = "float16 keys, expanded to heads, may pass 65504"
            reasons.append(f"{found}; use form = 'auto', which absorbs them in {self.name}, or bfloat16.")
        if need.graph_capture:
            for wrong, found, fix in (
                (need.capacity is None, "needs Need.capacity, from which buffers get their fixed size", "set it"),
                (self.form == "mha", "takes the absorbed form, and form = 'mha' expands", "use form = 'mqa'"),
                (need.dtype == torch.float16, "is not served for float16", "use bfloat16"),
            ):
                reasons += [f"graph_capture = True {found} in {self.name}; {fix}."] * wrong
        return reasons

    def cap(self, need: Need) -> int:
        """Rows of the workspace for `need`."""
        return workspace_rows(need, self.max_workspace_tokens)

    def expands(self, need: Need) -> bool:
        """Whether any request of `need` is expanded: not for graphs, not in float16, not where flash refuses."""
        if self.form == "mqa" or need.graph_capture or need.dtype == torch.float16:
            return False
        try:
            prefill_route(self.library, need)
        except AiterUnsupported:
            return False
        return True

    def write(self, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store kv_c (T, L) and k_pe (T, R) at slot_mapping (T,); raises ValueError where they carry gradients."""
        refuse_gradients(self.name, kv_c, k_pe)
        cache.write(kv_c, k_pe, slot_mapping)

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Put heads first for the absorbed form, W_UK (N, P, L) and W_UV (N, L, V); flatten for the expanded one."""
        result = prepare(self, up, need)
        if self.form != "mha":
            result.data.update(prepare_absorbed(up, need))
            for name in functions_of(route_of(self.library, need, (1,))):
                result.data[name] = required(self.library, need, name)
        if self.expands(need):
            flash = required(self.library, need, FLASH)
            result.data.update(prepare_ragged(up, need))
            result.data[FLASH] = flash_kernel(flash, need, heads_first(flash, need))
        return result

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Choose each request's form and one absorbed call, and upload their work; waits for the device nowhere."""
        old = into.steps if isinstance(into, Plan) else None
        with kept_on_failure(into):
            result = plan(self, need, batch, into)
            if need.graph_capture and isinstance(old, Steps) and old.tokens != batch.num_tokens:
                expected, got = f"{old.tokens} tokens, as captured", str(batch.num_tokens)
                raise bad("batch", expected=expected, got=got, fix="pad it with pad_tokens to the captured size")
            self._fill(result)
        return result.reserve() if need.graph_capture else result  # before a capture, which has a pool of its own

    def _fill(self, result: Plan) -> None:
        """Put a step's work, the scratch it takes and a report of both into a plan."""
        need, batch, expands = result.need, result.batch, self.expands(result.need)
        least = 1 if self.form == "mha" else EXPAND_FROM if expands else LONGEST
        lens = batch.query_lens_host
        expanded = [b for b, n in enumerate(lens) if n >= least]
        absorbed = [b for b, n in enumerate(lens) if n < least]
        chosen = None if self.form == "mha" else choose(self.library, need, batch, absorbed)
        steps = Steps(tokens=batch.num_tokens)
        if expanded:
            steps.expanded = plan_ragged(need, batch, expanded, self.cap(need))
        if need.capacity is None or not result.sizes:  # by a capacity they are the same for every batch
            result.sizes = {} if self.form == "mha" else sizes_of(self.library, need, chosen, least - 1)
            if need.capacity is not None and need.capacity.max_query_len >= least:
                result.sizes |= ragged_sizes(need, self.cap(need), need.capacity.max_tokens)
            elif steps.expanded is not None:
                result.sizes |= steps.expanded.sizes
        if chosen is not None:
            steps.decode = plan_decode(self.library, result, chosen)
        result.steps = steps
        report: dict[str, Any] = {"forms": ["mha" if n >= least else "mqa" for n in lens]}
        report["chunks"] = 0 if steps.expanded is None else len(steps.expanded.chunks)
        report["decode"] = "none"
        if chosen is not None:
            route, sequences = chosen
            report["decode"] = f"{route.kernel}, {len(sequences.owners)} sequences, {route.heads} heads"
            report |= {"query_len": route.query_len, "splits": route.splits or "planned"}
        result.report = report

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Attend q.nope (T, N, P) and q.pe (T, N, R) over the pages: out (T, N, V) and lse (T, N).

        Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2 for the forms; FlashAttention-2 (arXiv 2307.08691) for
        the merge.
        """
        check_attend(q, cache, prepared, plan, out)
        check_equal("plan.tier", plan.tier, self.name, "plan with the tier that attends")
        refuse_gradients(self.name, *q)
        need, steps, T, data = plan.need, plan.steps, plan.batch.num_tokens, prepared.data
        state = None
        if steps.decode is not None:
            state = AttentionState(*attend_decode(steps.decode, q, cache, data, plan, self.library.window))
            if steps.decode.rows == slice(0, T):
                return deliver(state, plan, out)
        whole = q.nope.new_zeros(T, need.N, need.V, dtype=need.out_dtype)
        lse = q.nope.new_full((T, need.N), float("-inf"), dtype=torch.float32)
        if state is not None:
            whole[steps.decode.rows] = state.out.to(whole.dtype)
            if state.lse is not None:
                lse[steps.decode.rows] = state.lse
        if steps.expanded is not None:
            attend_ragged(steps.expanded, q, cache, data, plan, data[FLASH], whole, lse)
        return deliver(AttentionState(whole, lse), plan, out)
