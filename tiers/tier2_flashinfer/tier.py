"""Tier 2 by FlashInfer: its paged MLA kernels and its varlen prefill behind this repository's contract.

Short queries are absorbed and go through `BatchMLAPagedAttentionWrapper`, long ones are expanded a workspace at a time
(`mla.ragged`) and go through `BatchPrefillWithRaggedKVCacheWrapper`. The library plans on the host and waits for what
it copies from a device, so it is given host lists, in `plan`; a wrapper belongs to one plan at a time. The forms for
Blackwell have an entry point of their own (`blackwell`).

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.checks import check_equal, check_int
from mla.chunks import refuse_workspace, workspace_rows
from mla.errors import bad
from mla.need import Need, refuse_features
from mla.projections import Query, UpProjection
from mla.ragged import RaggedCall, RaggedSteps, Sizes, attend_ragged, plan_ragged, prepare_ragged, refuse_ragged
from mla.state import AttentionState, merge
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
from tiers.tier2_flashinfer.absorbed import Round, absorbed_sizes, attend_round, plan_rounds, why_not_graph
from tiers.tier2_flashinfer.blackwell import (
    ENTRY,
    Entry,
    attend_entry,
    entry_sizes,
    plan_entry,
    why_not_arch,
    why_not_blackwell,
)
from tiers.tier2_flashinfer.library import (
    WORKSPACE_BYTES,
    WRAPPER_BYTES,
    Wrapper,
    append_rows,
    borrow,
    check_readable,
    find_library,
    library_version,
    running_sums,
    why_not_installed,
    why_not_rows,
)

FORMS = ("auto", "fa2", "fa3", "mqa", "mha", "trtllm-gen", "cute-dsl", "cutlass", "xqa")
ELSEWHERE = {"cute-dsl": "sm_100 or sm_103", "cutlass": "sm_100 or sm_110"}
ROWS, HEADS = ((512, 64), (512, 0)), ((192, 128),)  # (L, R) of the absorbed kernels, (P + R, V) of the prefill kernel
EXPAND_FROM = 64  # new tokens from which the expanded form takes less time
INF = float("inf")


@dataclass(eq=False)
class Steps:
    """A plan's work: rounds of the absorbed form or one `entry`, and calls of the expanded form with their wrappers."""

    rounds: list[Round] = field(default_factory=list)
    entry: Entry | None = None
    ragged: RaggedSteps | None = None
    wrappers: dict[RaggedCall, Wrapper] = field(default_factory=dict)


@dataclass(frozen=True)
class FlashInferTier(Tier):
    """FlashInfer's kernels; `form` is "auto", "fa2", "fa3" (that kernel), "mqa" (all absorbed) or "mha" (all expanded).

    "trtllm-gen" (sm_100, sm_103) and "xqa" (sm_120, sm_121) absorb through the library's entry point for Blackwell:
    checked against the stand-in only; never run on such a GPU. "cute-dsl" and "cutlass" are refused everywhere.
    `merge` says who merges chunks, "ours" in float32 or "flashinfer" in the query's dtype; `append` who writes the
    cache, "ours" or "flashinfer", which does not wait for the device. `max_workspace_tokens` bounds the rows (tokens)
    expanded at once, None as in `paged`. `library` is a module with the library's names, None for the installed one.
    """

    form: str = "auto"
    max_workspace_tokens: int | None = None
    merge: str = "ours"
    append: str = "ours"
    library: Any = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        for key, known in (("form", FORMS), ("merge", ("ours", "flashinfer")), ("append", ("ours", "flashinfer"))):
            if getattr(self, key) not in known:
                fix = f"tiers.get('flashinfer', {key}={known[0]!r})"
                raise bad(key, expected=f"one of {', '.join(known)}", got=repr(getattr(self, key)), fix=fix)
        if self.max_workspace_tokens is not None:
            check_int("max_workspace_tokens", self.max_workspace_tokens, 1, "None, or 65536 as usual")
        name = "flashinfer" if self.form == "auto" else f"flashinfer:{self.form}"
        object.__setattr__(self, "name", name if self.library is None else f"{name} (stand-in)")

    def why_not(self, need: Need) -> list[str]:
        """Return the sentences for what the library, its version or this device cannot do; nothing is launched."""
        reasons = why_not_installed(self.library) + self._why_not_device(need)
        reasons += refuse_features("flashinfer", need) + why_not_rows(need)
        if self.form == "mha":
            reasons += self._why_not_expanded(need)
        elif self.form in ENTRY:
            reasons += why_not_blackwell(self.form, need, self.library, self._any_size)
        elif (need.L, need.R) not in ROWS and not self._any_size:
            found = f"rows of L = {need.L}, R = {need.R} have no absorbed kernel in flashinfer"
            reasons.append(f"{found}, which has L = 512 with R = 64 or 0; use triton or paged.")
        if need.mask == "rows" and self.form != "mha":
            reasons.append("mask 'rows' is not computed by flashinfer, which takes 'causal' and 'full'; use triton.")
        if need.batch_invariant:
            found = "batch_invariant = True is not promised by flashinfer, whose splits follow the batch"
            reasons.append(f"{found}; use triton.")
        if need.graph_capture and self.form == "mha":
            reasons.append("graph_capture = True takes the absorbed form; form = 'mha' expands: use form = 'mqa'.")
        elif need.graph_capture and self.form not in ENTRY:
            reasons += why_not_graph(need)
        if self.append == "flashinfer" and (need.L, need.R) not in ROWS[:1] and not self._any_size:
            found = f"append = 'flashinfer' writes rows of L = 512, R = 64 only, not {need.L} and {need.R}"
            reasons.append(f"{found}; use append = 'ours'.")
        if self.merge == "flashinfer" and need.N * -(-need.V // max(8, need.V // 32)) > 1024:
            found = f"merge = 'flashinfer' gives one block all heads of a token, too many with N = {need.N}"
            reasons.append(f"{found}; use merge = 'ours'.")
        return reasons + (refuse_workspace(need, self.cap(need)) if self._expands(need) else [])

    def _why_not_device(self, need: Need) -> list[str]:
        if self.form in ELSEWHERE:
            found = f"form {self.form!r} is for {ELSEWHERE[self.form]} and has no path here on any device"
            why = "its call is not modelled and was never run by this project"
            return [f"{found}: {why}; arch is {need.arch!r}; use form = 'auto', or triton."]
        if self.form in ENTRY:
            return why_not_arch(self.form, need)
        if self.library is not None:
            return []
        generation = int(need.arch[3:]) if need.arch[:3] == "sm_" and need.arch[3:].isdecimal() else 0
        if generation < 80:
            found = f"arch {need.arch!r} of device {need.device!r} is not served by flashinfer"
            return [f"{found}, which needs an NVIDIA GPU of sm_80 or later; use triton or paged."]
        if self.form == "fa3" and need.arch != "sm_90":
            return [f"form 'fa3' runs on sm_90 only, and arch is {need.arch!r}; use form = 'fa2'."]
        return []

    def _why_not_expanded(self, need: Need) -> list[str]:
        """Sentences for Needs whose long queries cannot be expanded; all but form "mha" absorb them then."""
        reasons = refuse_ragged("flashinfer", need)
        if need.dtype == torch.float16:
            found = "dtype torch.float16 is not expanded by flashinfer (expanded keys can pass 65504)"
            reasons.append(f"{found}, which takes torch.bfloat16; use form = 'mqa'.")
        if (need.P + need.R, need.V) not in HEADS and not self._any_size:
            found = f"heads of P + R = {need.P + need.R}, V = {need.V} are not expanded by flashinfer"
            reasons.append(f"{found}, which takes 192 and 128; use form = 'mqa', triton or paged.")
        return reasons

    @property
    def _any_size(self) -> bool:
        return getattr(self.library, "TAKES_ANY_SIZE", False)

    def _expands(self, need: Need) -> bool:
        if self.form == "mqa" or self.form in ENTRY or need.graph_capture:
            return False
        return self.form == "mha" or not self._why_not_expanded(need)

    def cap(self, need: Need) -> int:
        """Rows of the workspace for `need`."""
        return workspace_rows(need, self.max_workspace_tokens)

    def write(self, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store kv_c (T, L) and k_pe (T, R) at slot_mapping (T,) int64; -1 is skipped.

        With append = "flashinfer" slots are trusted and the device is not waited for. Raises ValueError or TypeError
        for shapes, dtypes or devices that do not fit.
        """
        refuse_gradients("flashinfer", kv_c, k_pe)
        if self.append == "ours":
            cache.write(kv_c, k_pe, slot_mapping)
        else:
            append_rows(find_library(self.library), cache, kv_c, k_pe, slot_mapping)

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Put heads first for the absorbed form, W_UK (N, P, L) and W_UV (N, L, V); flatten for the expanded one.

        Weights wider than the query stay so in the absorbed form, and are rounded to its dtype in the expanded one.
        """
        result = prepare(self, up, need)
        W_UK, W_UV = (W.detach().to(torch.promote_types(W.dtype, need.dtype)) for W in up)
        result.data.update(W_UK=W_UK.permute(1, 2, 0).contiguous(), W_UV=W_UV.permute(1, 0, 2).contiguous())
        if self._expands(need):
            result.data.update(prepare_ragged(up, need))
        return result

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Choose each request's form and plan a wrapper for every run; the host waits for its own copies at most."""
        held = into.steps if isinstance(into, Plan) else None
        with kept_on_failure(into):
            result = plan(self, need, batch, into)
            old = held.rounds[0] if need.graph_capture and isinstance(held, Steps) else None
            if old is not None and old.tokens not in (0, batch.num_tokens):
                expected, got = f"{old.tokens} tokens, as captured", str(batch.num_tokens)
                raise bad("batch", expected=expected, got=got, fix="pad it with pad_tokens to the captured size")
            result.steps, result.sizes, result.report = self._steps(need, batch, old)
        return result.reserve() if need.graph_capture else result  # before a capture, which has a pool of its own

    def _steps(self, need: Need, batch: AttentionBatch, old: Round | None) -> tuple[Steps, Sizes, dict[str, object]]:
        """The work of a step, the scratch it takes, and a report of both."""
        if self.form in ENTRY:
            return self._entry_steps(need, batch)
        expands, least = self._expands(need), 1 if self.form == "mha" else EXPAND_FROM
        chosen = {b for b, n in enumerate(batch.query_lens_host) if expands and n >= least}
        absorbed = [b for b in range(batch.num_requests) if b not in chosen]
        backend = self.form if self.form in ("fa2", "fa3") else "fa3" if need.arch == "sm_90" else "fa2"
        library, steps = find_library(self.library), Steps()
        steps.rounds = plan_rounds(library, backend, need, batch, absorbed, steps, old)
        sizes = absorbed_sizes(need, steps.rounds)
        if expands:
            steps.ragged = plan_ragged(need, batch, sorted(chosen), self.cap(need))
            sizes |= steps.ragged.sizes
            steps.wrappers = _plan_calls(library, backend, need, steps)
        held = len(steps.rounds) + len(set(steps.wrappers.values()))
        report: dict[str, object] = {"forms": [("mqa", "mha")[b in chosen] for b in range(batch.num_requests)]}
        report |= {"kernel": backend, "rounds": len(steps.rounds), "calls": len(steps.wrappers)}
        report |= {"library": library_version(self.library), "library_bytes": WORKSPACE_BYTES + held * WRAPPER_BYTES}
        return steps, sizes, report

    def _entry_steps(self, need: Need, batch: AttentionBatch) -> tuple[Steps, Sizes, dict[str, object]]:
        """The same where all requests go through the entry point for Blackwell."""
        entry = plan_entry(find_library(self.library), self.form, need, batch)
        report: dict[str, object] = {"forms": ["mqa"] * batch.num_requests, "kernel": self.form}
        report |= {"rounds": len(entry.calls), "calls": 0}
        report |= {"library": library_version(self.library), "library_bytes": WORKSPACE_BYTES}
        return Steps(entry=entry), entry_sizes(self.form, need, entry), report

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Attend q.nope (T, N, P) and q.pe (T, N, R) over the pages: out (T, N, V) and lse (T, N).

        Raises ValueError where the cache's rows are not aligned to 16 bytes. Source: DeepSeek-V2 (arXiv 2405.04434)
        section 2.1.2; FlashAttention-2 (arXiv 2307.08691) section 3.1.
        """
        check_attend(q, cache, prepared, plan, out)
        check_equal("plan.tier", plan.tier, self.name, "plan with the tier that attends")
        check_readable(cache)
        refuse_gradients("flashinfer", q.nope, q.pe)
        need, steps, T = plan.need, plan.steps, plan.batch.num_tokens
        whole = q.nope.new_empty(T, need.N, need.V, dtype=need.out_dtype)
        lse = q.nope.new_empty(T, need.N, dtype=torch.float32)
        for step in steps.rounds:
            if step.tokens:
                attend_round(step, q, cache, prepared.data, plan, AttentionState(whole, lse))
        if steps.entry is not None:
            into = AttentionState(whole, lse)
            attend_entry(self.form, find_library(self.library), steps.entry, q, cache, prepared.data, plan, into)
        if steps.ragged is not None:
            kernel, join = _kernel(steps), merge if self.merge == "ours" else _join(find_library(self.library), need)
            attend_ragged(steps.ragged, q, cache, prepared.data, plan, kernel, whole, lse, join)
        return deliver(AttentionState(whole, lse), plan, out)


def _plan_calls(library: Any, backend: str, need: Need, steps: Steps) -> dict[RaggedCall, Wrapper]:
    """A planned wrapper for each call; calls of the same lengths share one."""
    found: dict[tuple, Wrapper] = {}
    wrappers = {}
    assert steps.ragged is not None
    for call in steps.ragged.calls():
        lengths = (call.causal, call.query_lens, call.key_lens)
        if lengths not in found:
            found[lengths] = borrow(library, "ragged", backend, need.device, steps)
            found[lengths].plan(
                qo_indptr=running_sums(call.query_lens, need.device), num_qo_heads=need.N, num_kv_heads=need.N,
                kv_indptr=running_sums(call.key_lens, need.device), head_dim_qk=need.P + need.R, head_dim_vo=need.V,
                causal=call.causal, sm_scale=need.softmax_scale, q_data_type=need.dtype, kv_data_type=need.dtype,
            )  # fmt: skip
        wrappers[call] = found[lengths]
    return wrappers


def _kernel(steps: Steps) -> Any:
    """The prefill kernel for `attend_ragged`: the library's LSE is in base 2."""

    def kernel(call: RaggedCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = steps.wrappers[call].library.run(q=q, k=k, v=v, return_lse=True)
        return out, lse * math.log(2)

    return kernel


def _join(library: Any, need: Need) -> Any:
    """The library's merge: outputs of 16 bits, LSEs in base 2, and NaN where both states are empty."""

    def join(a: AttentionState, b: AttentionState) -> AttentionState:
        v_a, v_b = (x.out.to(need.dtype).contiguous() for x in (a, b))
        s_a, s_b = ((x.parts()[1] / math.log(2)).contiguous() for x in (a, b))
        out, lse = library.merge_state(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
        none = torch.maximum(s_a, s_b) == -INF
        return AttentionState(out.masked_fill(none[..., None], 0), (lse * math.log(2)).masked_fill(none, -INF))

    return join
