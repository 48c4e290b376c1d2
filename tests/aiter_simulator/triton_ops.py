"""AITER's Triton routes: split decode with lse, MLA decode and prefill on block tables, Gluon decode; and cache writes.

Written from aiter.md 1.8 and 1.9 (`ROCm/aiter` e4048607: aiter/ops/triton/attention, aiter/ops/triton/gluon). They take
any head count; widths are those of the arguments. Of finding 8.1 (masked tiles underflow in the MLA decode) and 8.7
(products in the input dtype) nothing is simulated.
Axes: T query rows, B requests, H heads, L rank, R rope, D = L + R, V value width.
"""

from itertools import pairwise

import torch
from torch import Tensor

from .attention import attend, bottom_right
from .call import NAN
from .checks import Machine, abort_unless, check_indptr, check_int32


def rows_of(table: Tensor, length: int, page_size: int, pages: int) -> Tensor:
    """Cache rows of the first `length` tokens of one block table row; aborts on a page outside of memory."""
    abort_unless(length <= table.numel() * page_size, f"{length} tokens do not fit into {table.numel()} table entries")
    position = torch.arange(length)
    page = table.long()[position // page_size]
    abort_unless(not length or (page.min() >= 0 and page.max() < pages), "block table: memory fault")
    return page * page_size + position % page_size


def decode_attention_fwd(
    machine: Machine,
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    lse: Tensor,
    req_to_token: Tensor,
    b_seq_len: Tensor,
    attn_logits: Tensor,
    num_kv_splits: int,
    sm_scale: float,
    page_size: int = 1,
    logit_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """One query row per request: q (B, H, D), k_buffer (rows, 1, D), v_buffer (rows, 1, V): o (B, H, V), lse (B, H).

    req_to_token (B, pages) int32; attn_logits (B, H, splits, V + 1) float32 is scratch. An empty request gives NaN.
    """
    assert num_kv_splits == attn_logits.shape[2], f"attn_logits has {attn_logits.shape[2]} splits"
    if logit_cap > 0:
        raise NotImplementedError("not simulated: logit_cap")
    (batch, heads, _), value = q.shape, v_buffer.shape[-1]
    abort_unless(k_buffer.dim() == v_buffer.dim() == 3, "k_buffer, v_buffer: the flattened (rows, 1, D) view wanted")
    abort_unless(k_buffer.shape[-1] == q.shape[-1] and k_buffer.shape[1] == v_buffer.shape[1] == 1, "cache width")
    abort_unless(o.shape == (batch, heads, value) and lse.shape == (batch, heads), "o (B, H, V) and lse (B, H) wanted")
    abort_unless(lse.dtype == attn_logits.dtype == torch.float32, "lse and attn_logits: float32 wanted")
    abort_unless(attn_logits.shape == (batch, heads, num_kv_splits, value + 1), "attn_logits: (B, H, splits, V + 1)")
    abort_unless(req_to_token.dtype == torch.int32 and len(req_to_token) == batch, "req_to_token: (B, pages) int32")
    abort_unless(len(b_seq_len) == batch, "b_seq_len: (B,) wanted")
    one = torch.ones(1)
    k_scale, v_scale = (one if s is None else s for s in (k_scale, v_scale))
    for b, length in enumerate(b_seq_len.tolist()):
        rows = rows_of(req_to_token[b], length, page_size, len(k_buffer) // page_size)
        keys, values = k_buffer[rows].float() * k_scale, v_buffer[rows].float() * v_scale
        out, out_lse = attend(q[b : b + 1].float(), keys, values, sm_scale)
        o[b] = out[0].to(o.dtype)
        lse[b] = out_lse[0] if length else NAN
    machine.calls.append("triton decode_attention_fwd")


def paged(
    q: Tensor,
    kv_buffer: Tensor,
    out: Tensor,
    starts: list[int],
    lengths: list[int],
    block_tables: Tensor,
    scale: float,
    rank: int,
) -> None:
    """Causal attention of packed q (T, H, D) on kv_buffer (blocks, block_size, 1, D); writes out (T, H, L)."""
    blocks, block_size, _, width = kv_buffer.shape
    flat = kv_buffer.reshape(blocks * block_size, 1, width)
    for b, length in enumerate(lengths):
        own = slice(starts[b], starts[b + 1])
        keys = flat[rows_of(block_tables[b], length, block_size, blocks)].float()
        n = own.stop - own.start
        part, _ = attend(q[own].float(), keys, keys[..., :rank], scale, bottom_right(n, length, length - n))
        out[own] = part.to(out.dtype)


def check_paged(q: Tensor, kv_buffer: Tensor, block_tables: Tensor, rank: int, rope: int, causal: bool) -> None:
    """The assertions of both block-table kernels."""
    size = kv_buffer.shape[1]
    assert causal, "Only causal attention is supported"
    assert rank + rope == q.shape[-1] == kv_buffer.shape[-1], "query width must be kv_lora_rank + qk_rope_head_dim"
    assert size in (16, 32, 64, 128, 256), f"block size {size}: a power of two from 16 on wanted"
    abort_unless(block_tables.dtype == torch.int32, "block_tables: int32 wanted")


def mla_decode_fwd(
    machine: Machine,
    q: Tensor,
    kv_buffer: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_kv: int,
    block_tables: Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    causal: bool,
    q_descale: Tensor | None,
    kv_descale: Tensor | None,
    q_scales: Tensor | None = None,
    out_scale: Tensor | None = None,
    shuffled_kv_cache: bool = False,
    skip_reduce: bool = False,
) -> Tensor:
    """Decode of the same number of rows for every request; an empty request gives NaN. No lse."""
    if shuffled_kv_cache or skip_reduce or any(x is not None for x in (q_descale, kv_descale, q_scales, out_scale)):
        raise NotImplementedError("simulated without scales, shuffled caches and skip_reduce")
    check_paged(q, kv_buffer, block_tables, kv_lora_rank, qk_rope_head_dim, causal)
    lengths = seqused_k.tolist()
    assert max(lengths) <= max_seqlen_kv, f"max_seqlen_kv {max_seqlen_kv} is too small for {lengths}"
    each = len(q) // len(lengths)  # the kernel divides and believes
    starts = [b * each for b in range(len(lengths) + 1)]
    paged(q, kv_buffer, out, starts, lengths, block_tables, softmax_scale, kv_lora_rank)
    machine.calls.append("triton mla_decode_fwd")
    return out


def mla_prefill_fwd(
    machine: Machine,
    q: Tensor,
    kv_buffer: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_kv: int,
    block_tables: Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    causal: bool,
    q_descale: Tensor | None,
    kv_descale: Tensor | None,
    out_scale: Tensor | None = None,
    shuffled_kv_cache: bool = False,
) -> Tensor:
    """Ragged causal prefill, any context; no lse."""
    if shuffled_kv_cache or any(x is not None for x in (q_descale, kv_descale, out_scale)):
        raise NotImplementedError("simulated without scales and shuffled caches")
    check_paged(q, kv_buffer, block_tables, kv_lora_rank, qk_rope_head_dim, causal)
    starts = check_indptr("cu_seqlens_q", cu_seqlens_q, len(q))
    paged(q, kv_buffer, out, starts, seqused_k.tolist(), block_tables, softmax_scale, kv_lora_rank)
    machine.calls.append("triton mla_prefill_fwd")
    return out


def mla_gluon(
    machine: Machine,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    o: Tensor,
    page_table: Tensor,
    seq_info: Tensor,
    sm_scale: float,
    k_pe: Tensor | None = None,
    kv_pe_offset: int = 512,
    use_2d_view: bool = True,
    kv_scale: float = 1.0,
    min_kv_seq_len: int = 1,
    return_lse: bool = False,
    has_pe: bool = True,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gluon decode of gfx950: q_nope (B, (n,) H, L), q_pe (B, (n,) H, R), kv_c (rows, D); writes o like q_nope.

    lse (B, n, H) float32. 8-bit caches abort here: from three iterations per split on they fault (aiter #5119).
    """
    assert machine.arch == "gfx950", f"mla_gluon needs gfx950, got {machine.arch}"
    assert q_nope.dtype == q_pe.dtype == torch.bfloat16, f"q must be bf16, got {q_nope.dtype}"
    if not has_pe or attn_sink is not None or k_pe is not None or kv_scale != 1.0:
        raise NotImplementedError("simulated with one cache tensor, without scale and sinks")
    abort_unless(kv_c.dtype == torch.bfloat16, "an 8-bit cache faults with three iterations per split (aiter #5119)")
    q = torch.cat((q_nope, q_pe), -1)
    q = q if q.dim() == 4 else q[:, None]
    batch, rows, heads, width = q.shape
    splits = max(1, 256 // (batch * rows * -(-heads // 16)))
    if heads in (64, 128):
        assert batch % 64 == 0, f"{heads} heads: B a multiple of 64 wanted, got {batch}"
        assert min_kv_seq_len > splits * (192 + splits), f"min_kv_seq_len {min_kv_seq_len} is too small"
    assert heads <= 96 or heads == 128, f"{heads} heads are not supported"
    abort_unless(kv_c.dim() == 2 and kv_c.shape[1] == width == machine.width, f"kv_c: (rows, {machine.width}) wanted")
    abort_unless(kv_pe_offset == machine.rank and o.shape == q_nope.shape, "kv_pe_offset or o do not fit")
    if use_2d_view:
        lists = [page_table[b, :n].long() for b, n in enumerate(seq_info.tolist())]
    else:
        check_int32("page_table", page_table)
        ends = check_indptr("seq_info", seq_info, page_table.numel())
        lists = [page_table[a:b].long() for a, b in pairwise(ends)]
    out, lse = o.view(batch, rows, heads, machine.rank), torch.full((batch, rows, heads), NAN)
    for b, own in enumerate(lists):
        abort_unless(not own.numel() or (own.min() >= 0 and own.max() < len(kv_c)), "page_table: memory fault")
        if not own.numel():
            if splits > 1:
                out[b], lse[b] = 0, float("-inf")
            continue
        keys = kv_c[own].float()[:, None]
        seen = bottom_right(rows, len(own), len(own) - rows)
        part, lse[b] = attend(q[b].float(), keys, keys[..., : machine.rank], sm_scale, seen)
        out[b] = part.to(o.dtype)
    machine.calls.append("mla_gluon")
    return o, lse if return_lse else None


def concat_and_cache_mla(
    machine: Machine,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
) -> None:
    """Store kv_c (T, L) and k_pe (T, R) in rows slot_mapping (T,) int64 of kv_cache (blocks, block_size, D); -1 skips.

    "auto" copies, "fp8" stores the value divided by `scale`.
    """
    abort_unless(slot_mapping.dtype == torch.int64, f"slot_mapping: int64 wanted, got {slot_mapping.dtype}")
    abort_unless(kv_cache.shape[-1] == kv_c.shape[-1] + k_pe.shape[-1], "kv_cache: width is not L + R")
    abort_unless(kv_cache.is_contiguous(), "kv_cache must be contiguous")
    kept = slot_mapping >= 0
    rows, slots = torch.cat((kv_c, k_pe), -1)[: len(slot_mapping)][kept], slot_mapping[kept]
    flat = kv_cache.view(-1, kv_cache.shape[-1])
    abort_unless(not slots.numel() or slots.max() < len(flat), "slot_mapping: memory fault")
    if kv_cache_dtype != "auto":
        abort_unless(kv_cache.dtype == machine.fp8, f"{machine.fp8} wanted, got {kv_cache.dtype}")
        rows = rows.float() / scale
    else:
        abort_unless(kv_cache.dtype == rows.dtype, f"kv_cache is {kv_cache.dtype}, rows are {rows.dtype}")
    flat[slots] = rows.to(kv_cache.dtype)
    machine.calls.append("concat_and_cache_mla")
