"""Store the latent rows of new tokens in the paged cache, each at its own slot.

Motivation. Every layer writes its new rows before it attends to them. In plain PyTorch that is a concatenation, a cast,
two selections by mask and an indexed store: eight launches or so, and the selection waits for the GPU, since the host
must learn how many slots are not -1; a CUDA graph cannot hold it.

Idea. Token i's row goes to page slot // page_size, row slot % page_size: one pass over T (L + R) numbers, 1.1 KB read
and written for a token of DeepSeek-V3 in 16 bits. kv_c and k_pe are read where they lie, two column ranges of one fused
projection, and rounded once. A token without a slot is masked, not selected, so nobody counts.

Axes: T new tokens (packed over requests), L KV rank, R rope.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from tiers.tier2_triton.kernels.problem import Problem

ROWS = 4  # tokens of a program: one for each warp


@triton.jit(do_not_specialize=["tokens", "pages"], do_not_specialize_on_alignment=["slot_mapping"])
def _write_kernel(
    data, kv_c, k_pe, slot_mapping, tokens, pages, page_size, stride_page, stride_row, stride_kv, stride_pe,
    L: tl.constexpr, R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1)
    page, offset = slot // page_size, slot % page_size
    keep = ((slot >= 0) & (page < pages))[:, None]
    target = data + (page * stride_page + offset * stride_row)[:, None]
    cols = tl.arange(0, BLOCK_L)[None, :]
    latent = tl.load(kv_c + token[:, None] * stride_kv + cols, mask=keep & (cols < L), other=0.0)
    tl.store(target + cols, latent.to(data.dtype.element_ty), mask=keep & (cols < L))
    if R > 0:
        cols = tl.arange(0, BLOCK_R)[None, :]
        rope = tl.load(k_pe + token[:, None] * stride_pe + cols, mask=keep & (cols < R), other=0.0)
        tl.store(target + L + cols, rope.to(data.dtype.element_ty), mask=keep & (cols < R))


def write_rows(data: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
    """Store row i of kv_c (>= T, L) and k_pe (>= T, R) at slot_mapping[i] of (T,) int64, rounded to data's dtype.

    data (pages, page_size, L + R) is written; pages and rows may lie apart in it, as rows may in kv_c and k_pe; float32
    and 16-bit floats, in any pair. A negative slot is skipped, and so is one past the pool: slots are trusted to be
    right and nothing is raised here, where looking would make the host wait. `mla.cache.PagedLatentCache.write` is the
    path that checks them.
    """
    T, (pages, page_size, _), L, R = slot_mapping.shape[0], data.shape, kv_c.shape[1], k_pe.shape[1]
    if T == 0:
        return
    _write_kernel[(triton.cdiv(T, ROWS),)](
        data, kv_c, k_pe, slot_mapping, T, pages, page_size, data.stride(0), data.stride(1), kv_c.stride(0),
        k_pe.stride(0), L=L, R=R, **_blocks(L, R),
    )  # fmt: skip


def write_rows_reference(data: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
    """Do what `write_rows` does in PyTorch, for any float dtype: data (pages, page_size, L + R) is written."""
    page = slot_mapping.div(data.shape[1], rounding_mode="floor")
    keep = (slot_mapping >= 0) & (page < data.shape[0])
    rows = torch.cat([x[: slot_mapping.shape[0]][keep].to(data.dtype) for x in (kv_c, k_pe)], -1)
    data[page[keep], slot_mapping[keep] % data.shape[1]] = rows


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """Make the arguments of `write_rows`, data (pages, page_size, L + R) and views of one projection (T + 2, L + R).

    "toy" has odd sizes, skipped slots and rows that nobody may read; "real" is a step of 8192 tokens of DeepSeek-V3.
    """
    T, L, R, page_size, pages = (11, 24, 10, 3, 7) if size == "toy" else (8192, 512, 64, 64, 1024)
    random = torch.Generator().manual_seed(seed)
    fused = torch.randn(T + 2, L + R, generator=random).to(dtype).to(device)
    data = torch.full((pages, page_size, L + R), float("nan"), dtype=dtype, device=device)
    slots = torch.randperm(pages * page_size, generator=random)[:T]
    if size == "toy":
        slots[[2, 7]] = -1
        fused[T:] = fused[[2, 7]] = float("nan")
    written = int((slots >= 0).sum())
    arguments = {"data": data, "kv_c": fused[:, :L], "k_pe": fused[:, L:], "slot_mapping": slots.to(device)}
    return Problem(arguments, ("data",), 2 * written * (L + R) * dtype.itemsize + T * 8)


def aot() -> list[Compile]:
    """Compile for rows (L, R) = (512, 64) and (512, 0), and for every pair of input and cache dtype."""
    floats = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
    sizes = [(source, target, 64) for source in floats for target in floats] + [(name, name, 0) for name in floats]
    return [
        Compile(
            _write_kernel,
            {"data": floats[target], "kv_c": floats[source], "k_pe": floats[source], "slot_mapping": "*i64"}
            | {"tokens": "i32", "pages": "i32", "page_size": "i32:16"}
            | dict.fromkeys(("stride_page", "stride_row", "stride_kv", "stride_pe"), "i32:16"),
            {"L": 512, "R": R, **_blocks(512, R)},
            name=f"write {source} to {target}" + ("" if R else " R=0"),
        )
        for source, target, R in sizes
    ]


def _blocks(L: int, R: int) -> dict[str, int]:
    return {"BLOCK_L": triton.next_power_of_2(L), "BLOCK_R": triton.next_power_of_2(max(R, 1)), "ROWS": ROWS}
