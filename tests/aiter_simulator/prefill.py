"""Prefill: `mla_prefill_fwd` (absorbed), `flash_attn_varlen_func` (expanded) and the fp8 persistent pair.

Written from aiter.md 1.7 (`ROCm/aiter` e4048607: aiter/mla.py, aiter/ops/mha.py).
Axes: T query rows, S keys, H heads, W = rank + rope, D query width, V value width.
"""

import torch
from torch import Tensor

from .attention import attend, bottom_right
from .call import NAN, Call, store
from .checks import Machine, abort_unless, check_indptr, check_int32, fresh, runtime_unless
from .decode import check_tensors, scale_of
from .reduce import mla_reduce_v1


def mla_prefill_fwd(
    machine: Machine,
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed causal prefill on the cache, bf16, H 16 or 128: writes o (T, H, rank), returns (o, lse (T, 1, H, 1))."""
    assert logit_cap <= 0, f"logit_cap={logit_cap} is not supported"
    check_tensors(machine, q, kv_buffer, o, 1, kv_buffer.shape[1], None, None)
    abort_unless(q.dtype == kv_buffer.dtype == torch.bfloat16, "mla_prefill_fwd: bf16 wanted")
    abort_unless(q.shape[1] in (16, 128), f"mla_prefill_fwd: only supports nheads 16 or 128, got {q.shape[1]}")
    scale = sm_scale if sm_scale is not None else q.shape[-1] ** -0.5
    lists = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    call = Call.checked(machine, q, kv_buffer, o, *lists, max_seqlen_q, scale=scale)
    qo, kv = call.qo, call.kv_indptr
    lse = fresh((len(q), 1, q.shape[1], 1))
    for b in range(len(qo) - 1):
        rows = slice(qo[b], min(qo[b + 1], qo[b] + max_seqlen_q))
        out, out_lse = call.attend(q[rows], b, kv[b], kv[b + 1], kv[b + 1] - kv[b] - (qo[b + 1] - qo[b]))
        store(o, rows, out)
        lse[rows, 0, :, 0] = out_lse
    machine.calls.append("mla_prefill_fwd")
    return o, lse


def flash_attn_varlen_func(
    machine: Machine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1, 0),
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    how_v3_bf16_cvt: int = 1,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    sink_ptr: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed q (T, H, D) over k (S, Hk, D), v (S, Hk, V), bottom-right causal.

    Returns out (T, H, V), with return_lse also the natural-log lse: (H, T) from CK, (T, H) from Triton. A row that sees
    no key gives 0 and an unspecified lse; rows from max_seqlen_q on are not written.
    """
    extras = (bias, alibi_slopes, block_table, cu_seqlens_q_padded, cu_seqlens_k_padded, sink_ptr)
    plain = tuple(window_size)[:2] == (-1, -1) and dropout_p == 0 and logits_soft_cap == 0
    if not plain or return_attn_probs or any(x is not None for x in extras):
        raise NotImplementedError("simulated only without window, dropout, cap, bias, slopes, pages, padding and sinks")
    check_packed(machine, q, k, v, cu_seqlens_q, cu_seqlens_k)
    qo, kv = check_indptr("cu_seqlens_q", cu_seqlens_q, len(q)), check_indptr("cu_seqlens_k", cu_seqlens_k, len(k))
    (tokens, heads, width), value = q.shape, v.shape[-1]
    result = fresh((tokens, heads, value), q.dtype) if out is None else out
    runtime_unless(result.shape == (tokens, heads, value) and result.dtype == q.dtype, "out has another form")
    lse = fresh((tokens, heads))
    scale = softmax_scale if softmax_scale is not None else width**-0.5
    # fp16 rows of one token are badly wrong on gfx942 (aiter #2229); keys past max_seqlen_k are not visited.
    wrong = machine.arch == "gfx942" and machine.ck and q.dtype == torch.float16 and max_seqlen_q == 1
    groups = heads // k.shape[1]
    for b in range(len(qo) - 1):
        rows, n, s = slice(qo[b], min(qo[b + 1], qo[b] + max_seqlen_q)), qo[b + 1] - qo[b], kv[b + 1] - kv[b]
        own = slice(kv[b], kv[b + 1])
        seen = bottom_right(n, s, s - n)[: rows.stop - rows.start] if causal else None
        mine, values = (x[own].repeat_interleave(groups, 1) for x in (k, v))
        part, part_lse = attend(q[rows], mine, values, scale, seen)
        blind = part_lse == float("-inf")
        result[rows] = torch.where(blind[..., None], 0.0, NAN if wrong or s > max_seqlen_k else part).to(q.dtype)
        lse[rows] = torch.where(blind, NAN, part_lse)
    machine.calls.append("flash_attn_varlen_func")
    if not return_lse:
        return result
    return result, lse.T.contiguous() if machine.ck else lse


def check_packed(machine: Machine, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """The checks of the varlen flash attention's binding."""
    dtypes = (torch.bfloat16, torch.float16) if machine.ck else (torch.bfloat16, torch.float16, torch.float32)
    runtime_unless(q.dtype in dtypes and q.dtype == k.dtype == v.dtype, f"fp16 or bf16 wanted, got {q.dtype}")
    runtime_unless(all(x.dim() == 3 and x.stride(-1) == 1 for x in (q, k, v)), "last axis must have stride 1")
    heads, width, value = q.shape[1], q.shape[2], v.shape[2]
    runtime_unless(width == k.shape[-1] and k.shape[:2] == v.shape[:2], "q, k and v do not fit together")
    runtime_unless(heads % k.shape[1] == 0, f"{heads} query heads are no multiple of {k.shape[1]} KV heads")
    runtime_unless(width % 8 == value % 8 == 0 and max(width, value) <= 256, f"head widths {width}, {value}")
    runtime_unless(cu_seqlens_q.numel() == cu_seqlens_k.numel(), "cu_seqlens differ in length")
    runtime_unless(cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32, "cu_seqlens must be int32")


def mla_prefill_ps_asm_fwd(
    machine: Machine,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    work_indptr: Tensor,
    work_info_set: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    is_causal: bool,
    splitData: Tensor,
    splitLse: Tensor,
    output: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """8-bit prefill from a work list, gfx950: Q (T, H, 192), K (pages, H, 192), V (pages, H, 128): output (T, H, 128).

    Unsplit tiles go to output; pieces of split ones to splitData (rows, H, 128) and splitLse (rows, H), float32.
    """
    abort_unless(machine.arch == "gfx950", f"mla_prefill_ps_asm_fwd: no kernel for {machine.arch}")
    tokens, heads, width = Q.shape
    fp8 = all(x.dtype == machine.fp8 and x.is_contiguous() for x in (Q, K, V))
    abort_unless(fp8, f"Q, K, V: contiguous {machine.fp8} wanted")
    abort_unless(
        (width, V.shape[-1]) == machine.expanded == (K.shape[-1], output.shape[-1]), "widths 192 and 128 wanted"
    )
    abort_unless(K.shape[-2] == V.shape[-2] == heads, "K and V need as many heads as Q")
    good = output.dtype == torch.bfloat16 and splitData.dtype == splitLse.dtype == torch.float32
    abort_unless(good, "output must be bf16, splitData and splitLse float32")
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        one = scale is not None and scale.dtype == torch.float32 and scale.numel() == 1
        abort_unless(one, f"{name}: one float32 wanted")
    check_int32("kv_page_indices", kv_page_indices)
    qo, kv = check_indptr("qo_indptr", qo_indptr, tokens), check_indptr("kv_indptr", kv_indptr, kv_page_indices.numel())
    items = check_indptr("work_indptr", work_indptr[: machine.cu_num + 1], work_info_set.shape[0])[-1]
    factor = softmax_scale * scale_of(q_scale) * scale_of(k_scale)
    for b, row, q0, q1, k0, k1, _, packed in work_info_set[:items].tolist():
        own = slice(packed & 0xFFFF, packed >> 16)
        inside = 0 <= b < len(qo) - 1 and qo[b] <= q0 < q1 <= qo[b + 1] and kv[b] <= k0 < k1 <= kv[b + 1]
        abort_unless(inside and own.stop <= heads, f"work item out of range: {b} {q0}:{q1} {k0}:{k1}")
        pages = kv_page_indices[k0:k1].long()
        abort_unless(pages.min() >= 0 and pages.max() < len(K), "kv_page_indices: memory fault")
        diagonal = (q0 - qo[b]) - (k0 - kv[b]) + (kv[b + 1] - kv[b]) - (qo[b + 1] - qo[b])
        seen = bottom_right(q1 - q0, k1 - k0, diagonal) if is_causal else None
        k, v = K[pages].view(-1, heads, width)[:, own], V[pages].view(-1, heads, V.shape[-1])[:, own]
        out, lse = attend(Q[q0:q1, own].float(), k.float(), v.float(), factor, seen, machine.fp8)
        out = out * scale_of(v_scale)
        if row < 0:
            output[q0:q1, own] = out.to(output.dtype)
        else:
            abort_unless(row + len(out) <= len(splitData), f"partial row {row} is outside of {len(splitData)}")
            splitData[row : row + len(out), own] = out
            splitLse[row : row + len(out), own] = lse
    machine.calls.append("mla_prefill_ps_asm_fwd")


def mla_prefill_ps_fwd(
    machine: Machine,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    output: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_page_indices: Tensor,
    work_indptr: Tensor,
    work_info_set: Tensor,
    max_seqlen_q: int,
    is_causal: bool,
    reduce_indptr: Tensor | None = None,
    reduce_final_map: Tensor | None = None,
    reduce_partial_map: Tensor | None = None,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both phases of the 8-bit prefill; the second value is the *partial* lse and of no use to a caller.

    The default softmax_scale is that of the value width, which is not the query's.
    """
    scale = softmax_scale if softmax_scale is not None else output.shape[-1] ** -0.5
    assert reduce_indptr is not None
    assert reduce_final_map is not None
    assert reduce_partial_map is not None
    rows, (_, heads, value) = reduce_partial_map.numel() * 256, output.shape
    partial, partial_lse = fresh((rows, heads, value)), fresh((rows, heads))
    work = (qo_indptr, kv_indptr, kv_page_indices, work_indptr, work_info_set, max_seqlen_q)
    scales = (q_scale, k_scale, v_scale)
    mla_prefill_ps_asm_fwd(machine, Q, K, V, *work, scale, is_causal, partial, partial_lse, output, *scales)
    reduced = (reduce_indptr, reduce_final_map, reduce_partial_map)
    mla_reduce_v1(machine, partial, partial_lse, *reduced, 256, 0, output, None)
    return output, partial_lse
