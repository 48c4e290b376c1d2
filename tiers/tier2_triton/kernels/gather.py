"""Gather context rows from pages into a contiguous workspace, the spans of many requests in one launch.

Motivation. The expanded form multiplies cached latents by W_UK and W_UV: matrix products that want rows side by side,
where pages scatter them. A chunk of n rows of DeepSeek-V3 in 16 bits is 1.1 KB n read and as much written, a small part
of the 33 MFLOP that each row's expansion takes.

Idea. The host cuts each span of keys into blocks of at most `ROWS` rows, so that one program has one block: programs
are equal however unequal the spans, the grid is the length of the list, and a span may start anywhere in a page. Each
row looks its page up by itself; rows past the block's last are masked before the block table is read, since what
follows a request's last page there is no page id.

Axes: B requests, n rows of the workspace, L KV rank, R rope; width is L + R, or what a layout stores.
"""

from collections.abc import Iterable

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mla.aot import Compile
from mla.chunks import Span
from tiers.tier2_triton.kernels.problem import Problem

ROWS = 32  # most rows of a block
COLUMNS = 128  # columns that a program moves at once


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_table"])
def _gather_kernel(
    data, block_table, blocks, out, page_size, stride_page, stride_row, stride_table, stride_out,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block = blocks + tl.program_id(0).to(tl.int64) * 4
    request, first, rows, at = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    own = tl.arange(0, ROWS)
    keep = own < rows
    key = first + own
    page = tl.load(block_table + request.to(tl.int64) * stride_table + key // page_size, mask=keep, other=0)
    source = data + (page.to(tl.int64) * stride_page + (key % page_size).to(tl.int64) * stride_row)[:, None]
    target = out + ((at + own).to(tl.int64) * stride_out)[:, None]
    for start in tl.static_range(0, WIDTH, COLUMNS):
        cols = start + tl.arange(0, COLUMNS)[None, :]
        mask = keep[:, None] & (cols < WIDTH)
        tl.store(target + cols, tl.load(source + cols, mask=mask), mask=mask)


def gather_blocks(spans: Iterable[Span]) -> NDArray[np.int32]:
    """Cut spans into blocks (request, first key, rows, row of the workspace) of at most ROWS rows, in order: (n, 4)."""
    fields = [(span.request, span.start, span.stop - span.start, span.at) for span in spans]
    request, start, length, at = np.array(fields, np.int64).reshape(-1, 4).T
    owner, offset, rows = cut(length, ROWS)
    return np.stack([request[owner], start[owner] + offset, rows, at[owner] + offset], 1).astype(np.int32)


def cut(lengths: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut lengths (k,) into pieces of at most `size`, in order: of each (n,), its owner, offset therein and length."""
    counts = -(-lengths // size)
    owner = np.repeat(np.arange(len(lengths)), counts)
    offset = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * size
    return owner, offset, np.minimum(lengths[owner] - offset, size)


def gather_rows(data: Tensor, block_table: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Copy the rows that `blocks` (n, 4) int32 names, as `gather_blocks` makes them, from pages to `out` bit for bit.

    data (pages, page_size, width) of any dtype and page and row strides; block_table (B, max_pages) int32 and out
    (rows, width), of data's dtype, of any row stride. A block (request, first key, rows, at) fills out[at : at + rows]
    with keys first key .. first key + rows - 1 of the request, and nothing where rows is 0; other rows of `out` stay.
    All is trusted: pages, keys and rows lie inside.
    """
    if blocks.shape[0] == 0:
        return
    _gather_kernel[(blocks.shape[0],)](
        data, block_table, blocks, out, data.shape[1], data.stride(0), data.stride(1), block_table.stride(0),
        out.stride(0), WIDTH=data.shape[2], COLUMNS=COLUMNS, ROWS=ROWS,
    )  # fmt: skip


def gather_rows_reference(data: Tensor, block_table: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Do what `gather_rows` does in PyTorch, one block of (n, 4) after the other: rows of `out` (rows, width)."""
    page_size = data.shape[1]
    for request, first, rows, at in blocks.tolist():
        key = torch.arange(first, first + rows, device=data.device)
        out[at : at + rows] = data[block_table[request, key // page_size].long(), key % page_size]


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """Make the arguments of `gather_rows`, data (pages, page_size, L + R), table (B, max_pages) and blocks (n, 4).

    "toy" starts and ends spans inside pages, with NaN and absurd page ids where nobody may look; "real" is a chunk of
    65536 rows of DeepSeek-V3 from four requests.
    """
    if size == "toy":
        width, page_size = 24 + 10, 3
        spans = [Span(0, 4, 14, 1), Span(2, 0, 37, 11), Span(1, 5, 6, 48)]
    else:
        width, page_size = 512 + 64, 64
        spans = [Span(b, 0, 16384, b * 16384) for b in range(4)]
    counts = {span.request: -(-span.stop // page_size) for span in spans}
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(counts.values()) + 2, generator=random).tolist()  # two pages belong to nobody
    table = torch.full((len(spans), max(counts.values()) + 1), 2**31 - 1, dtype=torch.int32)
    data = torch.full((len(order), page_size, width), float("nan"), dtype=dtype)
    for span in spans:
        pages, order = order[: counts[span.request]], order[counts[span.request] :]
        table[span.request, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        keys = torch.arange(span.start, span.stop)
        rows = torch.randn(len(keys), width, generator=random).to(dtype)
        data[torch.tensor(pages)[keys // page_size], keys % page_size] = rows
    blocks = torch.from_numpy(gather_blocks(spans))
    n = spans[-1].at + spans[-1].stop - spans[-1].start
    out = torch.full((n + 2, width), float("nan"), dtype=dtype, device=device)
    arguments = {"data": data.to(device), "block_table": table.to(device), "blocks": blocks.to(device), "out": out}
    moved = sum(span.stop - span.start for span in spans)
    return Problem(arguments, ("out",), 2 * moved * width * dtype.itemsize + blocks.nbytes)


def aot() -> list[Compile]:
    """Compile for rows of 576 numbers of 16 and 32 bits; other widths differ in the number of equal steps."""
    return [
        Compile(
            _gather_kernel,
            {"data": kind, "block_table": "*i32", "blocks": "*i32", "out": kind, "page_size": "i32:16"}
            | {"stride_page": "i32:16", "stride_row": "i32:16", "stride_table": "i32", "stride_out": "i32:16"},
            {"WIDTH": 576, "COLUMNS": COLUMNS, "ROWS": ROWS},
            name=f"gather {kind[1:]}",
        )
        for kind in ("*bf16", "*fp16", "*fp32")
    ]
