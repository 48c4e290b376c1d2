"""Launch absorbed decode on Hopper: which shapes it takes, descriptors of its tensors, and one call for all of it.

The kernels read tiles by descriptors, which say once where rows begin and how far apart they lie. So queries must be
rows of equal distance, and so must be the pool; both are made so where they are not, the query by a copy, the pool by
counting how many rows of its own a page takes.

Axes: T new tokens (packed over requests), N heads, L = 512, R = 64, U units, p parts.
"""

from typing import Any

import torch
from torch import Tensor

from mla.errors import bad
from tiers.tier2_triton.hopper.combine import combine
from tiers.tier2_triton.hopper.seesaw import _seesaw_kernel
from tiers.tier2_triton.hopper.swap import _swap_kernel
from tiers.tier2_triton.hopper_rounds import FEW_ROWS, TILE


def decode(
    q_latent: Tensor,
    q_pe: Tensor,
    data: Tensor,
    block_table: Tensor,
    row_kv_lens: Tensor,
    units: Tensor,
    work: Tensor,
    merges: Tensor,
    part: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    M: int,
    at_once: int,
    row_scale: Tensor | None = None,
) -> None:
    """Attend absorbed queries, q_latent (T, N, 512) and q_pe (T, N, 64), over the pages of data (pages, page, 576).

    Writes out (T, N, 512), dense, in the query's dtype and lse (T, N) float32, natural. block_table (B, max_pages), of
    one entry at least, and row_kv_lens (T,) are int32; units (U, 4), work (U + 1, 16), merges (U, 4), part (p, 16)
    int32 are those of `schedule`, for units of M rows: 16 or 32, or whole tiles of 64. part_out (2 p, M, 512) and
    part_lse (2 p, M), float32, take the states of units that are cut, those of 64 rows in the order of `store`. Scores
    of a row are multiplied by row_scale (T, N) float32, dense, where it is given. Waits for the device nowhere.
    Raises ValueError for a cache whose rows cannot be described.
    """
    if not (q_latent.shape[0] and data.shape[0]):  # nothing to describe: no queries, or no keys for any
        out.zero_()
        lse.fill_(float("-inf"))
        return
    N, page = q_latent.shape[1], data.shape[1]
    few, width = M <= FEW_ROWS, min(M, TILE)
    rows, page_rows = pool(data)
    q_rows, pe_rows = as_rows(q_latent), as_rows(q_pe)
    box = tile(rows, min(page, 64), 64)
    descriptors = (tile(q_rows, width, 256), tile(pe_rows, width, 64), tile(rows, 64, 256) if page >= 64 else box, box)
    lists = (block_table, block_table.stride(0), page_rows, row_kv_lens, row_scale, work, part)
    results = (softmax_scale * 1.4426950408889634, out, lse, part_out, part_lse)
    if few:
        _swap_kernel[(part.shape[0],)](*descriptors, *lists, *results, N, M, 2, page, num_warps=4)
    else:
        tiles = M // TILE
        given = (*descriptors, *lists, *results, data, rows_ahead(data, tiles))
        _seesaw_kernel[(part.shape[0] * tiles,)](*given, N, tiles, page, num_warps=4)
    combine(part_out, part_lse, merges, out, lse, M, at_once, not few)


def rows_ahead(data: Tensor, tiles: int) -> int:
    """Return how many rows of a block of data (pages, page, 576) each tile asks L2 for before they are needed, or 0.

    They are asked for as one stretch of memory, so rows must lie one behind the other. Where one tile has the keys for
    itself the memory is the bound, and to ask early only changes the order: it cost 9 % at 64 heads, 64 x 16384.
    """
    dense = data.stride(1) == data.shape[2] and data.shape[1] >= TILE
    return TILE // tiles if dense and tiles > 1 else 0


def pool(data: Tensor) -> tuple[Tensor, int]:
    """Return data (pages, page, 576) as rows (n, 576) that overlap nothing, and how many of them a page takes.

    Raises ValueError where pages are no whole number of rows apart, or rows no multiple of 16 bytes.
    """
    between = data.stride(1)
    apart = data.stride(0) if len(data) > 1 else data.shape[1] * between  # the stride of an axis of one says nothing
    size = data.element_size()
    if data.stride(2) != 1 or between * size % 16 or apart % between or data.data_ptr() % 16:
        got = f"strides {tuple(data.stride())} of {data.dtype} at {data.data_ptr() % 16} bytes past a multiple of 16"
        fix = "let rows begin at multiples of 16 bytes, and pages whole rows apart, or use tiers.get('triton:mqa')"
        raise bad("cache.data", expected="rows that a descriptor can describe", got=got, fix=fix)
    page_rows = apart // between
    rows = (data.shape[0] - 1) * page_rows + data.shape[1]
    return data.as_strided((rows, data.shape[2]), (between, 1)), page_rows


def as_rows(x: Tensor) -> Tensor:
    """Return x (T, N, C) as rows (T*N, C) of equal distance, without a copy where it is such; 16-byte aligned."""
    T, N, C = x.shape
    apart = x.stride(1) if N > 1 else x.stride(0) if T > 1 else C  # the stride of an axis of one says nothing
    even = x.stride(2) == 1 and (T <= 1 or x.stride(0) == N * apart) and apart * x.element_size() % 16 == 0
    if not even or x.data_ptr() % 16 or apart < C:
        x, apart = x.clone(memory_format=torch.contiguous_format), C
    return x.as_strided((T * N, C), (apart, 1))


def tile(rows: Tensor, height: int, width: int) -> Any:
    """Return the descriptor of rows (n, C) in tiles of height x width."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[rows.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([height, width], kind)
    return TensorDescriptor.from_tensor(rows, [height, width], layout)
