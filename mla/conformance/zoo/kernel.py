"""A latent kernel built as GPU kernels are, in plain torch: the text that the fault zoo edits, one line a fault.

Axes: T new tokens (packed over requests), N heads, L KV rank, R rope; inside one request M = new tokens x padded heads
(rows of a matrix product) and K keys of one tile.

The keys of a request are cut into SPLITS ranges. Each range is walked in tiles of TILE keys, looked up in the block
table, with a running softmax; the partial results are combined by their LSE. TILE divides no page and no range, so that
tiles cross pages and ranges end inside both.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.need import Need
from mla.state import AttentionState

TILE, SPLITS, HEAD_BLOCK = 24, 4, 8
INF = float("inf")


def attend(
    q_latent: Tensor, q_pe: Tensor, cache: PagedLatentCache, batch: AttentionBatch, need: Need
) -> AttentionState:
    """Attend absorbed queries q_latent (T, N, L) and q_pe (T, N, R) over the paged rows: out (T, N, L), lse (T, N).

    Both results are in need.compute_dtype; rows that see no key have 0 and -inf.
    """
    T, N, L = q_latent.shape
    wide = need.compute_dtype
    out = torch.zeros(T, N, L, dtype=wide, device=q_latent.device)
    lse = torch.full((T, N), -INF, dtype=wide, device=q_latent.device)
    heads = -(-N // HEAD_BLOCK) * HEAD_BLOCK
    query = pad(torch.cat([q_latent, q_pe], dim=-1).to(wide), (0, 0, 0, heads - N))  # (T, heads, L+R)
    for b in range(batch.num_requests):
        first, last = batch.query_start_loc[b : b + 2].tolist()
        S = int(batch.seq_lens[b])
        table = batch.block_table[b].long()
        rows = query[first:last].flatten(0, 1)  # (M, L+R)
        bound = batch.row_kv_lens[first:last].repeat_interleave(heads)  # (M,)
        part_out = torch.zeros(SPLITS, len(rows), L, dtype=wide, device=rows.device)
        part_lse = torch.full((SPLITS, len(rows)), -INF, dtype=wide, device=rows.device)
        length = -(-S // SPLITS)
        for split in range(SPLITS):
            start = split * length
            stop = min(start + length, S)
            if start < stop:
                part_out[split], part_lse[split] = attend_range(rows, bound, cache, table, start, stop, S, L, need)
        merged_out, merged_lse = combine(part_out, part_lse)
        out[first:last] = merged_out.view(-1, heads, L)[:, :N]
        lse[first:last] = merged_lse.view(-1, heads)[:, :N]
    return AttentionState(out, lse)


def attend_range(
    query: Tensor,
    bound: Tensor,
    cache: PagedLatentCache,
    table: Tensor,
    start: int,
    stop: int,
    S: int,
    L: int,
    need: Need,
) -> tuple[Tensor, Tensor]:
    """Attend rows (M, L+R) that see `bound` (M,) keys over keys start .. stop - 1: out (M, L) and lse (M,)."""
    top = query.new_full((len(query),), -INF)
    total = torch.zeros_like(top)
    acc = query.new_zeros(len(query), L)
    for tile in range(start, stop, TILE):
        at = torch.arange(tile, tile + TILE, device=query.device)  # (K,)
        inside = at < stop
        page = table[(at // cache.page_size).clamp(max=(S - 1) // cache.page_size)]
        offset = at % cache.page_size
        keys = torch.cat(cache.layout.read(cache.data[page, offset]), dim=-1).to(query.dtype)  # (K, L+R)
        keys = torch.where(inside[:, None], keys, 0)  # 0 * NaN is NaN: a weight of 0 does not hide what lies there
        scores = query @ keys.T * need.softmax_scale  # (M, K)
        visible = inside & (at < bound[:, None])
        scores = scores.masked_fill(~visible, -INF)
        peak = torch.maximum(top, scores.amax(dim=-1))
        base = peak.masked_fill(peak == -INF, 0.0)
        shrink = torch.exp(top - base)
        weights = torch.exp(scores - base[:, None])
        total = total * shrink + weights.sum(dim=-1)
        acc = acc * shrink[:, None] + weights @ keys[:, :L]
        top = peak
    out = torch.where(total[:, None] > 0, acc / total[:, None], 0)
    return out, top + total.log()


def combine(part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine partial results out (SPLITS, M, L) and lse (SPLITS, M) of disjoint keys into out (M, L) and lse (M,)."""
    top = part_lse.amax(dim=0)
    base = top.masked_fill(top == -INF, 0.0)
    share = torch.exp(part_lse - base)  # (SPLITS, M)
    total = share.sum(dim=0)
    out = torch.where(total[:, None] > 0, (share[..., None] * part_out).sum(dim=0) / total[:, None], 0)
    return out, base + total.log()
