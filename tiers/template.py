"""A tier to copy: one function, whole in a screenful. Change `attend`, then run `mla check tiers/template.py`.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import torch

from mla.adapters import from_attend
from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState


def attend(q: Query, cache: PagedLatentCache, batch: AttentionBatch, up: UpProjection, need: Need) -> AttentionState:
    """Attend q.nope (T, N, P) and q.pe (T, N, R) over the paged rows: out (T, N, V), lse (T, N) in natural log."""
    wide = need.compute_dtype
    out = torch.zeros(batch.num_tokens, need.N, need.V, dtype=wide, device=need.device)
    lse = torch.full(out.shape[:2], float("-inf"), dtype=wide, device=need.device)
    q_latent = torch.einsum("tnp,lnp->tnl", q.nope.to(wide), up.W_UK.to(wide))
    query = torch.cat([q_latent, q.pe.to(wide)], dim=-1) * need.softmax_scale  # (T, N, L+R)
    for b, rows in batch.row_blocks(need.N):
        at = torch.arange(batch.seq_lens_host[b], device=need.device)
        pages = batch.block_table[b, at // batch.page_size].long()
        kv_c, k_pe = (x.to(wide) for x in cache.layout.read(cache.data[pages, at % batch.page_size]))  # (S, L), (S, R)
        scores = query[rows] @ torch.cat([kv_c, k_pe], dim=-1).T  # (rows, N, S)
        scores = scores.masked_fill(at >= batch.row_kv_lens[rows, None, None], float("-inf"))
        found = torch.logsumexp(scores, dim=-1)  # (rows, N)
        weights = torch.exp(scores - found.clamp(min=-1e30)[..., None])  # 0, not NaN, without keys
        lse[rows] = found
        out[rows] = torch.einsum("tnl,lnv->tnv", weights @ kv_c, up.W_UV.to(wide))
    return AttentionState(out, lse)


def why_not(need: Need) -> list[str]:
    """Return [] for what `attend` above computes right, else whole sentences."""
    return []


tier = from_attend("template", attend, why_not)
