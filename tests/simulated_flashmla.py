"""FlashMLA's dense decode in plain PyTorch, with its conventions, and the tier over it: `mla check` takes this file.

q (G, q, N, 576) bf16, cache (pages, 64, 1, 576), block_table (G, width) int32 and lens (G,) int32, all dense but the
cache's pages; bottom-right causal; out (G, q, N, 512), lse (G, N, q) in natural log with +inf where nothing is seen.
A schedule belongs to the lengths of its first call.
"""

import types

import torch
from torch import Tensor

from tiers.tier2_flashmla import FlashMLATier


class Schedule:
    """Empty until the first call, as the package hands it out."""

    lens: Tensor | None = None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, *, use_legacy=False,
):  # fmt: skip
    G, tokens, N, width = q.shape
    assert use_legacy
    assert indices is None
    assert num_splits is None
    assert q.dtype == k_cache.dtype == torch.bfloat16
    assert width == 576
    assert head_dim_v == 512
    assert k_cache.shape[1:] == (64, 1, 576)
    assert k_cache.stride(-1) == 1
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert block_table.is_contiguous()
    assert block_table.shape[0] == cache_seqlens.shape[0] == G
    assert q.is_contiguous()
    schedule = tile_scheduler_metadata
    schedule.lens = cache_seqlens.clone() if schedule.lens is None else schedule.lens
    assert torch.equal(schedule.lens, cache_seqlens), "a schedule of other lengths"
    out = q.new_full((G, tokens, N, 512), float("nan"))
    lse = q.new_full((G, N, tokens), float("inf"), dtype=torch.float32)
    for g, S in enumerate(cache_seqlens.tolist()):
        rows = k_cache[block_table[g, : -(-S // 64)].long()].reshape(-1, 576)[:S].float()
        scores = torch.einsum("tnd,sd->tns", q[g].float(), rows) * softmax_scale
        if causal:
            hidden = torch.ones(tokens, S, dtype=torch.bool).tril(S - tokens).logical_not()
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
        if S:
            out[g] = (scores.softmax(-1) @ rows[:, :512]).to(q.dtype)
            lse[g] = scores.logsumexp(-1).T
    return out, lse


library = types.SimpleNamespace(
    flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda *args, **kwargs: (Schedule(), None)
)
tier = FlashMLATier(library)
