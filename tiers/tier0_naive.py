"""Tier 0: plain PyTorch that reads like the paper. One request after the other, in either form.

Axes: T new tokens (packed over requests), S cached tokens, N heads, P nope, R rope, V value.
"""

from dataclasses import dataclass, field

import torch

from mla.attention import mha_form, mqa_form
from mla.cache import PagedLatentCache, slots_of
from mla.errors import bad
from mla.need import Need, refuse_features
from mla.projections import Query
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier, check_attend, deliver

FORMS = {"mha": mha_form, "mqa": mqa_form}


@dataclass(frozen=True)
class NaiveTier(Tier):
    """The reference tier: `form` is "mha" (expanded, compute-friendly) or "mqa" (absorbed, data-movement-friendly)."""

    form: str = "mha"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise bad("form", expected="'mha' or 'mqa'", got=repr(self.form), fix="tiers.get('naive', form='mqa')")
        object.__setattr__(self, "name", f"naive:{self.form}")

    def why_not(self, need: Need) -> list[str]:
        """Return the sentences for features beyond plain MLA, and for promises that a loop in Python cannot keep."""
        reasons = refuse_features("naive", need)
        if need.batch_invariant:
            found = "batch_invariant = True is not promised by naive, whose products follow the step's shapes"
            reasons.append(f"{found}; set it to False.")
        if need.graph_capture:
            found = "graph_capture = True is not possible in naive, which loops over requests on the host"
            reasons.append(f"{found}; set it to False.")
        return reasons

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Attend q.nope (T, N, P), q.pe (T, N, R) over the cached rows of each request: out (T, N, V) and lse (T, N).

        Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; the two forms are in `mla.attention`.
        """
        check_attend(q, cache, prepared, plan, out)
        need, batch, start = plan.need, plan.batch, 0
        states = []
        for b, (query_len, seq_len) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
            rows = slice(start, start + query_len)
            kv_c, k_pe = cache.read(slots_of(batch.block_table[b], 0, seq_len, batch.page_size))  # (S, L), (S, R)
            request, visible = Query(q.nope[rows], q.pe[rows]), batch.row_kv_lens[rows]
            states.append(FORMS[self.form](request, kv_c, k_pe, prepared.up, visible, need.softmax_scale))
            start += query_len
        padding = batch.num_tokens - start
        states.append(AttentionState.empty(padding, need.N, need.V, dtype=need.compute_dtype, device=need.device))
        outs, lses = [s.out for s in states], [s.lse for s in states if s.lse is not None]
        return deliver(AttentionState(torch.cat(outs), torch.cat(lses)), plan, out)
