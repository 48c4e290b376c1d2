"""The four metadata calls: sizes of the six work buffers, and what the planners write into them.

Signatures and sizes as in `ROCm/aiter` e4048607 (aiter/ops/attention.py). Every buffer is filled with -777 first, so
that a cell nobody defines cannot pass for a plan.
"""

from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

from . import kernels, planner
from .checks import Machine, poison, runtime_unless

Sizes = tuple[tuple[int | tuple[int, int], torch.dtype], ...]


def sizes(works: int, workers: int, tiles: int, partials: int) -> Sizes:
    """Shapes and dtypes of work_meta_data, work_indptr, work_info_set, reduce_indptr, final and partial map."""
    int32 = torch.int32
    shapes = (workers + 1, (works, 8), tiles + 1, (tiles, 2), partials)
    return ((2, torch.uint64), *((shape, int32) for shape in shapes))


def tiles_per_batch(arch: str, q: str, kv: str, heads: int, qlen: int) -> int:
    """Upper bound of query tiles per request that the buffers are sized for (aiter.md 1.5, rules a to d)."""
    rows, both16, both8 = heads * qlen, q == kv == "bf16", q == kv == "fp8"
    if arch == "gfx950":
        small = both16 and rows >= 64 and heads <= 64 and (rows < 128 or heads == 48)
        if small or (both8 and heads == 32 and qlen == 3):
            return qlen if 2 * heads > 64 else planner.ceil_div(rows, 64)
    wide = (arch == "gfx942" and heads == 128) or (
        arch == "gfx950" and ((heads == 32 and qlen == 4) or heads in (64, 128))
    )
    if heads == 16 or (both8 and (wide or (heads == 64 and qlen == 1))):
        return planner.ceil_div(rows, 128)
    if arch == "gfx950" and both16 and (rows >= 128 or heads > 64) and heads != 48:
        return qlen if 2 * heads > 128 else planner.ceil_div(rows, 128)
    return planner.ceil_div(rows, 16)


def get_mla_metadata_info_v1(
    machine: Machine,
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: int,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
) -> Sizes:
    """Sizes of the six decode buffers for at most batch_size requests."""
    assert num_head_qo % 8 == 0, f"num_head_qo must be a multiple of 8, got {num_head_qo}"
    only_fast(is_sparse=is_sparse, fast=fast_mode, intra=intra_batch_mode, cap=max_split_per_batch)
    each = tiles_per_batch(machine.arch, kernels.kind(q_dtype), kernels.kind(kv_dtype), num_head_qo, max_seqlen_qo)
    busy = batch_size + machine.cu_num - 1
    partials = min(busy, 2 * (machine.cu_num - 1)) * each
    return sizes(busy * each, machine.cu_num, batch_size * each, partials)


def get_mla_metadata_v1(
    machine: Machine,
    seqlens_qo_indptr: Tensor,
    seqlens_kv_indptr: Tensor,
    kv_last_page_lens: Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: Tensor,
    work_info_set: Tensor,
    work_indptr: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    is_cp_round_robin: bool = False,
    mla_version: object = None,
    dtype_q_nope: torch.dtype | None = None,
    dtype_q_rope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None,
    dtype_kv_rope: torch.dtype | None = None,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    """Plan one decode step into the six buffers; a dtype that is not given counts as bf16."""
    only_fast(is_sparse=topk >= 0, fast=fast_mode, intra=intra_batch_mode, cap=max_split_per_batch)
    lists = {
        "seqlens_qo_indptr": seqlens_qo_indptr,
        "seqlens_kv_indptr": seqlens_kv_indptr,
        "kv_last_page_lens": kv_last_page_lens,
    }
    for name, tensor in lists.items():
        runtime_unless(tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}")
        runtime_unless(tensor.dim() == 1 and tensor.is_contiguous(), f"{name} must have stride 1")
    runtime_unless(num_heads_k == 1, f"one KV head, got {num_heads_k}")
    for name, value in (("page_size", page_size), ("kv_granularity", kv_granularity)):
        runtime_unless(value > 0 and value & (value - 1) == 0, f"{name} must be a power of two, got {value}")
    batch = seqlens_qo_indptr.numel() - 1
    runtime_unless(seqlens_kv_indptr.numel() == batch + 1, "seqlens_kv_indptr and seqlens_qo_indptr differ in length")
    runtime_unless(kv_last_page_lens.numel() >= batch, f"kv_last_page_lens must hold {batch} values")

    q, kv = kernels.kind(dtype_q or torch.bfloat16), kernels.kind(dtype_kv or torch.bfloat16)
    qo = seqlens_qo_indptr.tolist()
    qlen = max_seqlen_qo if max_seqlen_qo > 0 else max(b - a for a, b in pairwise(qo))
    heads = num_heads_per_head_k
    ratio = planner.fold_ratio(machine.arch, q, kv, heads, qlen)
    last = kv_last_page_lens.tolist()
    case = planner.DecodeCase(
        qo_indptr=qo,
        kv_indptr=seqlens_kv_indptr.tolist(),
        last_page=[last[b] if b < len(last) else 0 for b in range(batch * ratio)],
        heads=16 if ratio > 1 else heads,
        workers=machine.cu_num,
        max_qlen=qlen,
        uni_qlen=uni_seqlen_qo,
        ratio=ratio,
        pack=planner.pack_rows(machine.arch, q, kv, 16 if ratio > 1 else heads, qlen),
        page_size=page_size,
        granularity=max(1, kv_granularity // page_size),
        causal=bool(is_causal),
    )
    plan = planner.plan_decode(case)
    fill(plan, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map)
    machine.planned[work_info_set.data_ptr()] = ("decode", heads, q, kv)


def get_ps_metadata_info_v1(
    machine: Machine, batch_size: int, num_head_k: int, max_qlen: int, qlen_granularity: int = 256
) -> Sizes:
    """Sizes of the six prefill buffers."""
    workers = machine.cu_num // gcd(num_head_k, machine.cu_num)
    tiles = planner.ceil_div(max_qlen, qlen_granularity)
    works = (batch_size + workers - 1) * tiles * num_head_k
    partials = min(batch_size + workers - 1, 2 * (workers - 1)) * tiles
    return sizes(works, machine.cu_num, batch_size * tiles, partials)


def get_ps_metadata_v1(
    machine: Machine,
    seqlens_qo_indptr: Tensor,
    pages_kv_indptr: Tensor,
    context_lens: Tensor,
    gqa_ratio: int,
    num_heads_k: int,
    work_metadata_ptrs: Tensor,
    work_indptr: Tensor,
    work_info: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    qhead_granularity: int = 1,
    qlen_granularity: int = 256,
    kvlen_granularity: int = 16,
    block_size: int = 16,
    is_causal: bool = True,
) -> None:
    """Plan one prefill step into the six buffers. NB work_indptr comes before work_info here."""
    lists = {"seqlens_qo_indptr": seqlens_qo_indptr, "pages_kv_indptr": pages_kv_indptr, "context_lens": context_lens}
    for name, tensor in lists.items():
        runtime_unless(tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}")
        runtime_unless(tensor.device.type == "cpu", f"{name} must be on the host, got {tensor.device}")
    if (gqa_ratio, qhead_granularity, block_size) != (1, 1, 1):
        raise NotImplementedError("simulated only with gqa_ratio 1, qhead_granularity 1 and block_size 1")
    qo, kv, lens = seqlens_qo_indptr.tolist(), pages_kv_indptr.tolist(), context_lens.tolist()
    case = planner.PrefillCase(
        qo, kv, lens, num_heads_k, machine.cu_num, qlen_granularity, kvlen_granularity, bool(is_causal)
    )
    plan = planner.plan_prefill(case)
    fill(plan, work_metadata_ptrs, work_info, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map)
    machine.planned[work_info.data_ptr()] = ("prefill", qo, kv, lens, bool(is_causal))


def fill(
    plan: planner.WorkPlan,
    pointers: Tensor,
    work_info: Tensor,
    work_indptr: Tensor,
    reduce_indptr: Tensor,
    final_map: Tensor,
    partial_map: Tensor,
) -> None:
    """Write a plan; raises RuntimeError where a buffer has the wrong form or is too small. The rest stays -777."""
    runtime_unless(pointers.dtype == torch.uint64 and pointers.numel() >= 2, "work_meta_data must be 2 uint64")
    runtime_unless(work_info.dim() == 2 and work_info.shape[1] == 8, f"work_info must be (n, 8): {work_info.shape}")
    runtime_unless(work_indptr.dim() == 1, f"work_indptr must have one axis, got {tuple(work_indptr.shape)}")
    runtime_unless(final_map.dim() == 2 and final_map.shape[1] == 2, "reduce_final_map must be (n, 2)")
    buffers = (work_info, work_indptr, reduce_indptr, final_map, partial_map)
    runtime_unless(all(b.dtype == torch.int32 and b.is_contiguous() for b in buffers), "buffers must be dense int32")
    needed = {
        "work_info_set": (work_info.shape[0], len(plan.work)),
        "work_indptr": (work_indptr.numel(), len(plan.work_indptr)),
        "reduce_indptr": (reduce_indptr.numel(), len(plan.reduce_indptr)),
        "reduce_final_map": (final_map.shape[0], max(plan.final_map, default=-1) + 1),
        "reduce_partial_map": (partial_map.numel(), len(plan.partial_map)),
    }
    for name, (have, want) in needed.items():
        runtime_unless(have >= want, f"{name}: the plan writes {want} rows, the buffer holds {have}")
    for buffer in buffers:
        poison(buffer)
    pointers[:2] = torch.tensor([work_indptr.data_ptr(), work_info.data_ptr()], dtype=torch.uint64)
    put(work_info.view(-1), [value for row in plan.work for value in row])
    put(work_indptr, plan.work_indptr)
    put(partial_map, plan.partial_map)
    reduce_indptr.fill_(plan.reduce_indptr[-1])
    put(reduce_indptr, plan.reduce_indptr)
    for group, rows in plan.final_map.items():
        put(final_map[group], list(rows))


def put(buffer: Tensor, values: list[int]) -> None:
    """Write the first cells of a buffer."""
    buffer[: len(values)] = torch.tensor(values, dtype=buffer.dtype)


def only_fast(*, is_sparse: object, fast: bool, intra: bool, cap: int) -> None:
    """Raise NotImplementedError for the planner's other modes."""
    if is_sparse or not fast or intra or cap != -1:
        raise NotImplementedError("simulated only in fast mode: not sparse, not intra-batch, no cap on splits")
