"""What MLA is measured against: MHA, GQA and MQA over their own paged caches, and attention without a cache.

Axes: T new tokens (packed over requests), S keys of one request, N query heads, G key-value heads (N: MHA, 1: MQA,
between: GQA), M = N / G query heads that share one, D query and key width, V value width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import slots_of
from mla.config import MLAConfig
from mla.cost import cache_bytes_per_token, grouped_name, kv_bytes_per_token
from mla.errors import bad
from mla.state import AttentionState


def _attend_one(q: Tensor, k: Tensor, v: Tensor, row_kv_lens: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    # One request: q (T, N, D), k (S, G, D), v (S, G, V); head n reads key-value head n // M. Returns (out, lse).
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    grouped = q.unflatten(1, (k.shape[1], -1)).to(dtype)  # (T, G, M, D)
    scores = torch.einsum("tgmd,sgd->tgms", grouped, k.to(dtype)) * softmax_scale
    hidden = torch.arange(k.shape[0], device=q.device) >= row_kv_lens[:, None]  # (T, S)
    scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # (T, G, M)
    # -inf - (-inf) is NaN: an empty row subtracts 0, so that its weights are exp(-inf) = 0
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    out = torch.einsum("tgms,sgv->tgmv", weights, v.to(dtype))
    return out.flatten(1, 2), lse.flatten(1, 2)


def _nothing_seen(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    return q.new_zeros(*q.shape[:2], v.shape[-1]), lse


def _check_heads(q: Tensor, k: Tensor) -> None:
    if q.dim() != 3 or q.shape[2] != k.shape[-1] or q.shape[1] % k.shape[-2]:
        expected = f"(T, N, {k.shape[-1]}), N a multiple of {k.shape[-2]} key-value heads"
        raise bad("q", expected=expected, got=str(tuple(q.shape)), fix="project queries to the width of the keys")


@dataclass(frozen=True, eq=False)
class GroupedCache:
    """One layer's paged cache of G key-value heads: `k` (pages, page_size, G, D) and `v` (pages, page_size, G, V).

    Query head n reads key-value head n // M. Written by slot and read by block table like the latent cache, so the same
    AttentionBatch drives both. Memory is uninitialised where nothing was written, and is not read there. Sources: MQA
    (arXiv 1911.02150), GQA (arXiv 2305.13245) section 2.2.
    """

    k: Tensor
    v: Tensor

    @classmethod
    def new(
        cls,
        pages: int,
        page_size: int,
        kv_heads: int,
        key_width: int,
        value_width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "GroupedCache":
        """Allocate k (pages, page_size, G, D) and v (pages, page_size, G, V); raises ValueError for a size below 1."""
        sizes = {"page_size": page_size, "kv_heads": kv_heads, "key_width": key_width, "value_width": value_width}
        for name, size in sizes.items():
            if size < 1:
                raise bad(name, expected="at least 1", got=str(size), fix="take the sizes from the model and the pool")
        shape = (pages, page_size, kv_heads)
        k = torch.empty(*shape, key_width, dtype=dtype, device=device)
        return cls(k, torch.empty(*shape, value_width, dtype=dtype, device=device))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one cached token: G (D + V) itemsize."""
        return self.k.shape[2] * (self.k.shape[3] + self.v.shape[3]) * self.k.element_size()

    def write(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store row i of k (>= T, G, D) and v (>= T, G, V), rounded to the cache's dtype, at slot_mapping[i] of (T,).

        -1 is skipped. Raises ValueError for shapes or slots that do not fit; then nothing is written.
        """
        rows = slot_mapping.shape[0]
        for name, x, pages in (("k", k, self.k), ("v", v, self.v)):
            if x.dim() != 3 or x.shape[0] < rows or x.shape[1:] != pages.shape[2:]:
                expected = f"(>= {rows}, {pages.shape[2]}, {pages.shape[3]})"
                raise bad(name, expected=expected, got=str(tuple(x.shape)), fix="one row per slot, the cache's widths")
        pool, top = self.k.shape[0] * self.k.shape[1], int(slot_mapping.max()) if rows else -1
        if top >= pool:
            raise bad("slot_mapping", expected=f"slots below {pool}", got=str(top), fix="write inside the pool")
        keep = slot_mapping >= 0
        page, offset = slot_mapping[keep] // self.k.shape[1], slot_mapping[keep] % self.k.shape[1]
        self.k[page, offset] = k[:rows][keep].to(self.k.dtype)
        self.v[page, offset] = v[:rows][keep].to(self.v.dtype)

    def attend(self, q: Tensor, batch: AttentionBatch, softmax_scale: float) -> AttentionState:
        """Attend q (T, N, D), request by request, over the cached rows that batch.row_kv_lens (T,) lets each row see.

        Returns out (T, N, V) in q's dtype and lse (T, N), natural log; empty rows are 0 and -inf. Raises ValueError
        when q or the batch does not fit this cache.
        """
        _check_heads(q, self.k)
        page_size = self.k.shape[1]
        if q.shape[0] != batch.num_tokens:
            expected = f"{batch.num_tokens} rows, one per token of the batch"
            raise bad(
                "q", expected=expected, got=str(q.shape[0]), fix="pass the queries of this step, padding included"
            )
        if batch.page_size != page_size:
            raise bad("batch.page_size", expected=str(page_size), got=str(batch.page_size), fix="use the cache's own")
        (out, lse), start = _nothing_seen(q, self.k, self.v), 0
        for i, query_len in enumerate(batch.query_lens_host):
            rows = slice(start, start := start + query_len)
            visible = batch.row_kv_lens[rows]
            keys = int(visible.max()) if query_len else 0
            slots = slots_of(batch.block_table[i], 0, keys, page_size)
            page, offset = slots // page_size, slots % page_size
            seen = self.k[page, offset], self.v[page, offset]
            out[rows], lse[rows] = _attend_one(q[rows], *seen, visible, softmax_scale)
        return AttentionState(out, lse)


def encoder_attention(
    q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], softmax_scale: float
) -> AttentionState:
    """Attention without a cache or a mask: every token sees all tokens of its own request.

    q (T, N, D), k (T, G, D), v (T, G, V), query_lens host lengths that sum to T. Returns out (T, N, V) in q's dtype and
    lse (T, N), natural log. Raises ValueError for shapes or lengths that do not fit. Source: Attention Is All You Need
    (arXiv 1706.03762), section 3.2.3.
    """
    if sum(query_lens) != q.shape[0] or k.shape[0] != q.shape[0] or min(query_lens, default=0) < 0:
        got = f"{list(query_lens)} for {q.shape[0]} queries and {k.shape[0]} keys"
        raise bad("query_lens", expected="lengths that sum to T, of q and of k", got=got, fix="count each token once")
    if k.dim() != 3 or v.shape[:2] != k.shape[:2]:
        got = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise bad("k, v", expected="(T, G, D) and (T, G, V)", got=got, fix="give each token its keys and values")
    _check_heads(q, k)
    (out, lse), start = _nothing_seen(q, k, v), 0
    for length in query_lens:
        rows = slice(start, start := start + length)
        everything = torch.full((length,), length, device=q.device)
        out[rows], lse[rows] = _attend_one(q[rows], k[rows], v[rows], everything, softmax_scale)
    return AttentionState(out, lse)


def bytes_per_token(
    config: MLAConfig, *, itemsize: int = 2, row_bytes: int | None = None, layers: int = 1, groups: int | None = None
) -> dict[str, int]:
    """Bytes of cache per token side by side, widest first: "mha", "gqa-<groups>", "mqa" and "mla".

    `groups` None takes the largest divisor of N up to 8 (the name tells); the widths are the model's P + R and V.
    `row_bytes` is the latent row of a packed layout. Raises ValueError for groups that do not divide N.
    """
    if groups is None:
        groups = max(n for n in range(1, 9) if config.N % n == 0)
    table = {
        grouped_name(config.N, heads): kv_bytes_per_token(config, heads, itemsize=itemsize, layers=layers)
        for heads in (config.N, groups, 1)
    }
    return {**table, "mla": cache_bytes_per_token(config, itemsize=itemsize, row_bytes=row_bytes, layers=layers)}
