"""FlashMLA's kernel alone, as `mla bench` takes it: the peer that the Hopper kernels are timed beside.

    mla bench triton:hopper docs/tools/flashmla_kernel.py --level latent --batch 128q1s8k --device cuda --repeats 30

The adapter `flashmla` joins the query's parts, gathers rows and normalises empty ones in each attend, and its schedule
is made in the first. Here the query is joined once, and a step of the same lengths is captured as a graph: what is
timed is the kernel and its merge, which is the fairest figure for it. It promises nothing for other lengths.

Axes: T new tokens (packed over requests), G requests, q tokens of each, N heads, L KV rank, R rope.
"""

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.errors import bad
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier, plan, prepare
from tiers.tier2_flashmla import FlashMLATier


@dataclass(frozen=True)
class FlashMLAKernel(Tier):
    """One call of FlashMLA's decode for requests that have the same number of new tokens; inner kernel only."""

    name: str = field(default="flashmla kernel", init=False)

    def why_not(self, need: Need) -> list[str]:
        """Return what the adapter `flashmla` refuses, but for graph capture."""
        return FlashMLATier().why_not(dataclasses.replace(need, graph_capture=False, capacity=None))

    def write(self, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store kv_c (T, L) and k_pe (T, R) at slot_mapping (T,)."""
        cache.write(kv_c, k_pe, slot_mapping)

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Nothing: queries come absorbed."""
        return prepare(self, up, need)

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Hold the schedule, which the kernel fills in its first call; ValueError for query lengths that differ."""
        from flash_mla import get_mla_metadata

        if len(set(batch.query_lens_host)) != 1 or batch.num_tokens != sum(batch.query_lens_host):
            fix = "bench such a batch with the adapter: flashmla"
            raise bad("batch", expected="requests of one query length", got=str(batch.query_lens_host[:8]), fix=fix)
        result = plan(self, need, batch, into)
        result.steps = {"schedule": get_mla_metadata()[0]}
        return result

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Refuse q.nope (T, N, P) and q.pe (T, N, R): there is the inner kernel only."""
        raise bad("--level", expected="latent", got="attend", fix="bench the adapter: flashmla")

    def attend_latent(
        self,
        q_latent: Tensor,
        q_pe: Tensor,
        cache: PagedLatentCache,
        prepared: Prepared | None,
        plan: Plan,
        out: AttentionState | None = None,
    ) -> AttentionState:
        """Attend q_latent (T, N, L) and q_pe (T, N, R), joined in the first call: out (T, N, L) and lse (T, N)."""
        from flash_mla import flash_mla_with_kvcache

        batch, (T, N, L) = plan.batch, q_latent.shape
        steps = plan.steps
        if "q" not in steps:
            steps["q"] = torch.cat([q_latent, q_pe], -1).view(batch.num_requests, -1, N, L + q_pe.shape[-1])
        found, lse = flash_mla_with_kvcache(
            steps["q"], cache.data.unsqueeze(2), batch.block_table, batch.seq_lens, L, steps["schedule"],
            softmax_scale=plan.need.softmax_scale, causal=batch.max_query_len > 1, use_legacy=True,
        )  # fmt: skip
        return AttentionState(found.view(T, N, L), lse.transpose(1, 2).reshape(T, N))


tier = FlashMLAKernel()
