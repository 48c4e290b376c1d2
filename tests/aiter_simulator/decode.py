"""`aiter.mla.mla_decode_fwd`: argument checks, choice of path, and the persistent kernels.

Written from aiter.md 1.1-1.5 and 4 (`ROCm/aiter` e4048607: aiter/mla.py and its launchers).
Axes: T query rows, H heads, B requests, n query rows of one work item, s keys; W = rank + rope columns of a cache row.
"""

from typing import Any

import torch
from torch import Tensor

from . import kernels
from .call import Call, store
from .checks import Machine, abort_unless, check_indptr, fresh
from .reduce import mla_reduce_v1
from .splits import split_decode


def mla_decode_fwd(
    machine: Machine,
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: Tensor | None = None,
    work_meta_data: Tensor | None = None,
    work_indptr: Tensor | None = None,
    work_info_set: Tensor | None = None,
    reduce_indptr: Tensor | None = None,
    reduce_final_map: Tensor | None = None,
    reduce_partial_map: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    intra_batch_mode: bool = False,
    return_logits: bool = False,
    return_lse: bool = False,
    g_kv_indptr: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    causal: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Absorbed MLA decode: q (T, H, W), kv_buffer (pages, page_size, 1, W), o (T, H, rank) bf16, written in place.

    Returns (split partials or a view of o, lse (T, H) float32, natural log, or None). Raises what the library raises.
    """
    assert logit_cap <= 0, f"logit_cap={logit_cap} is not supported"
    if intra_batch_mode or return_logits or cp_world_size != 1 or g_kv_indptr is not None:
        raise NotImplementedError("not simulated: intra_batch_mode, return_logits, context parallel")
    check_tensors(machine, q, kv_buffer, o, nhead_kv, page_size, q_scale, kv_scale)
    abort_unless(causal or max_seqlen_q == 1, "causal=False with qlen > 1 has no kernel")
    scale = sm_scale if sm_scale is not None else q.shape[-1] ** -0.5
    call = Call.checked(
        *(machine, q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q),
        scale=scale * scale_of(q_scale if q.itemsize == 1 else None),
        kv_scale=scale_of(kv_scale if kv_buffer.itemsize == 1 else None),
        causal=causal,
    )
    batch = len(call.qo) - 1
    formats = kernels.kind(q.dtype), kernels.kind(kv_buffer.dtype)
    gated = machine.arch == "gfx950" and formats == ("bf16", "bf16") and q.shape[1] == 16 and max_seqlen_q == 1
    gated = gated and 0 < machine.persistent_max_batch <= batch and num_kv_splits is None
    if work_meta_data is None or gated:
        return split_decode(call, formats, num_kv_splits, num_kv_splits_indptr, return_lse)
    work = (work_meta_data, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map)
    return persistent_decode(call, formats, work, num_kv_splits or 0, return_lse)


def check_tensors(
    machine: Machine,
    q: Tensor,
    kv: Tensor,
    o: Tensor,
    nhead_kv: int,
    page_size: int,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
) -> None:
    """Abort where the kernel launcher would, and where a kernel would leave its memory."""
    heads = q.shape[1]
    abort_unless(
        q.dim() == 3 and kv.dim() == 4 and o.dim() == 3, "q (T, H, W), kv (pages, page, 1, W), o (T, H, V) wanted"
    )
    abort_unless(q.dtype in (torch.bfloat16, machine.fp8), f"unsupport Q dtype: {q.dtype} on {machine.arch}")
    abort_unless(kv.dtype in (torch.bfloat16, machine.fp8), f"unsupport KV dtype: {kv.dtype} on {machine.arch}")
    abort_unless(nhead_kv == 1 and kv.shape[2] == 1, f"one KV head wanted, got {nhead_kv} and {tuple(kv.shape)}")
    abort_unless(kv.shape[3] == q.shape[2], f"kv width {kv.shape[3]} is not q width {q.shape[2]}")
    abort_unless(kv.shape[1] == page_size, f"page_size {page_size} is not that of the cache, {kv.shape[1]}")
    abort_unless(o.shape == (q.shape[0], heads, machine.rank), f"o: {(q.shape[0], heads, machine.rank)} wanted")
    abort_unless(all(x.is_contiguous() for x in (q, kv, o)), "q, kv_buffer and o must be contiguous")
    abort_unless(len({x.device for x in (q, kv, o)}) == 1, "q, kv_buffer and o must share a device")
    for name, scale, tensor in (("q_scale", q_scale, q), ("kv_scale", kv_scale, kv)):
        needed = tensor.itemsize == 1 or q.itemsize == 1
        abort_unless(not needed or scale is not None, f"{name} is mandatory for {tensor.dtype}")
        if scale is not None:
            good = isinstance(scale, Tensor) and scale.dtype == torch.float32 and scale.numel() == 1
            abort_unless(good, f"{name}: one float32 in a tensor wanted, got {scale}")


def scale_of(scale: Tensor | None) -> float:
    """The value of an optional scale tensor."""
    return 1.0 if scale is None else float(scale)


def persistent_decode(
    call: Call, formats: tuple[str, str], work: tuple[Any, ...], num_kv_splits: int, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Fold the heads where there is no native kernel, run the work list, merge, and unfold."""
    machine, q, o = call.machine, call.q, call.o
    (tokens, heads, width), qlen = q.shape, call.qlen
    native = kernels.is_native(machine.arch, *formats, heads, qlen)
    assert native or (heads % 16 == 0 and 32 <= heads <= 128), f"{heads} heads are not supported"
    mode = "ps+lse" if return_lse else "ps"
    found = kernels.lookup(machine.arch, *formats, mode, heads, qlen)
    abort_unless(found, f"cannot get heuristic kernel: {machine.arch} {formats} {mode} H{heads} qlen {qlen}")
    check_work(machine, work, heads, formats)

    groups = 1 if native else heads // 16
    reorder = groups > 1 and qlen > 1
    if groups > 1:
        call.ratio = groups
        if qlen == 1:
            call.q, call.o = q.view(-1, 16, width), o.view(-1, 16, o.shape[2])
        else:
            call.q, call.o = fold(q, qlen, groups), fold(o, qlen, groups)
    machine.calls.append(f"decode {mode} {found}")
    lse = fresh(call.q.shape[:2]) if return_lse else None
    partial, partial_lse = run_work_list(call, work, lse)
    mla_reduce_v1(machine, partial, partial_lse, *work[3:6], qlen, num_kv_splits, call.o, lse)
    if reorder:
        # Re-points the caller's tensor; a bigger buffer that it was a view of never hears of it.
        o.set_(unfold(call.o, qlen, groups))
        lse = lse if lse is None else unfold(lse, qlen, groups)
    return partial, lse if lse is None else lse.view(tokens, heads)


def fold(x: Tensor, qlen: int, groups: int) -> Tensor:
    """(B * qlen, groups * 16, W) to (B * groups * qlen, 16, W): every group of heads becomes a request of its own."""
    return x.view(-1, qlen, groups, 16, x.shape[-1]).permute(0, 2, 1, 3, 4).reshape(-1, 16, x.shape[-1])


def unfold(x: Tensor, qlen: int, groups: int) -> Tensor:
    """The inverse of fold, for (..., 16, V) and (..., 16)."""
    rest = x.shape[2:]
    return x.view(-1, groups, qlen, 16, *rest).transpose(1, 2).reshape(-1, groups * 16, *rest)


def check_work(machine: Machine, work: tuple[Any, ...], heads: int, formats: tuple[str, str]) -> None:
    """Abort on missing, misplaced or stale metadata.

    The hardware follows the two pointers in work_meta_data; what the plan was made for it cannot know, and computes
    garbage (vLLM #38615, #46997): an abort shows the same mistake sooner.
    """
    abort_unless(all(x is not None for x in work), "work and reduce metadata must be passed together")
    pointers, indptr, info, reduce_indptr, final_map, _ = work
    abort_unless(info.dim() == 2 and info.shape[1] == 8, f"work_info_set: (n, 8) wanted, got {tuple(info.shape)}")
    abort_unless(indptr.dim() == 1 and indptr.numel() > machine.cu_num, "work_indptr: one entry per CU and one more")
    abort_unless(final_map.dim() == 2 and final_map.shape[1] == 2, "reduce_final_map: (n, 2) wanted")
    abort_unless(final_map.shape[0] >= reduce_indptr.numel() - 1, "reduce_final_map is shorter than reduce_indptr")
    planned = (indptr.data_ptr(), info.data_ptr())
    abort_unless(tuple(pointers.tolist()[:2]) == planned, "work_meta_data does not point at these work lists")
    made_for = machine.planned.get(info.data_ptr())
    abort_unless(made_for == ("decode", heads, *formats), f"metadata made for {made_for}, call is {heads}, {formats}")


def run_work_list(call: Call, work: tuple[Any, ...], lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Stage 1: every work item writes its rows, to o (unsplit) or to the partial buffers; nothing else is written.

    The hardware's partial buffers hold all rows that reduce_partial_map has room for; here only those in use.
    """
    _, indptr, info, _, _, partial_map = work
    machine, heads = call.machine, call.q.shape[1]
    count = check_indptr("work_indptr", indptr[: machine.cu_num + 1], info.shape[0])[-1]
    items = info[:count].tolist()
    used = max((row + q1 - q0 for _, row, q0, q1, *_ in items if row >= 0), default=0)
    abort_unless(used <= partial_map.numel() * call.qlen, f"{used} partial rows, room for {partial_map.numel()} tiles")
    partial, partial_lse = fresh((used, 1, heads, machine.rank)), fresh((used, 1, heads))
    requests = len(call.qo) - 1
    for batch, row, q0, q1, kv0, kv1, behind, _ in items:
        request = batch // call.ratio
        abort_unless(request < requests and 0 <= q0 <= q1 <= len(call.q), f"work item out of range: {batch} {q0} {q1}")
        first, stop = call.kv_indptr[request : request + 2]
        abort_unless(first <= kv0 and kv1 <= stop, f"work item reads keys {kv0}:{kv1} of {first}:{stop}")
        if call.ratio > 1:
            start, length = batch * call.qlen, call.qlen
        else:
            start, length = call.qo[request], call.qo[request + 1] - call.qo[request]
        diagonal = (q0 - start) - (kv0 - first) + (stop - first) - length
        out, out_lse = call.attend(call.q[q0:q1], request, kv0, stop - behind, diagonal)
        if row < 0:
            store(call.o, slice(q0, q1), out)
            if lse is not None:
                lse[q0:q1] = out_lse
        else:
            partial[row : row + len(out), 0] = out
            partial_lse[row : row + len(out), 0] = out_lse
    return partial, partial_lse
