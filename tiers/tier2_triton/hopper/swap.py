"""Decode on Hopper for up to 32 rows: keys on the long axis of the products, queries on the short one.

Motivation. With 16 heads a latent row is used 16 times, and memory is the bound: what counts is that copies never wait.
A tile of 64 rows would be three quarters padding, so the operands change places, scores^T = K q^T and
output^T = V^T weights^T, and the queries sit on the short axis of the tensor cores' product. One warp does nothing but
start copies, blocks of 64 keys through two stages, and four warps compute. Maximum and sum of a query run over the
long axis, across warps; the sum is kept for each key row of a block and added up at the end of a piece.

    left_full, right_full, left_empty, right_empty      of each stage, the left half with the rope part
    q_full, q_empty                                     the query of a piece

`seesaw` is for more rows. Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2.

Axes: M = 16 or 32 rows (token, head) of a tile, 64 keys of a block, N heads, p parts.
"""

# ruff: noqa: RUF059  barriers and tiles are unpacked in one order everywhere

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from mla.aot import Compile
from tiers.tier2_triton.hopper.device import (
    BLOCKS,
    COUNT,
    ENTRY,
    EVEN_PAGE,
    FIELDS,
    FIRST,
    KEYS,
    LAST,
    LEAST,
    LN2,
    MASKED,
    ODD_PAGE,
    REQUEST,
    ROW,
    ROWS,
    START,
    STRETCH,
    VARIANTS,
    boxes,
    by_row,
    find_spot,
    last_page,
    launch_next,
    load_keys,
    load_query,
    new_barrier,
    scale_of,
    signature,
    spot_of,
    thread_barrier,
    zero_rows,
)
from tiers.tier2_triton.hopper.schedule import cut


@gluon.jit
def producer(descs, bars, bufs, lists, M: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):
    """One warp that keeps copies under way: the next query, then block after block."""
    table, table_stride, page_rows, bounds, row_scale, work, part = lists
    q_full, q_empty, left_full, right_full, left_empty, right_empty = bars
    ql, qr, qt, left, right, rope, weights = bufs
    q_desc, q_pe_desc, rows_desc, box_desc = descs
    pool = (rows_desc, box_desc, table, page_rows)
    at = part + FIELDS * gl.program_id(0)
    pages = gl.load(at + REQUEST).to(gl.int64) * table_stride
    keys = gl.load(at + KEYS)
    row = gl.load(at + ROW)
    stretch = gl.load(at + STRETCH)
    entry = work + FIELDS * gl.load(at + ENTRY)
    count = gl.load(at + COUNT)
    block = gl.load(at + FIRST)
    last = gl.load(at + LAST)
    here = spot_of(gl.load(at + EVEN_PAGE), pages, block, page_rows, PAGE)
    coming = spot_of(gl.load(at + ODD_PAGE), pages, gl.minimum(block + 1, last - 1), page_rows, PAGE)
    turn = 0
    for item in range(count):
        top = last_page(pages, keys, PAGE)
        mbarrier.wait(q_empty, (item & 1) ^ 1)
        load_query(q_desc, q_pe_desc, row, q_full, ql, qr, qt, True, M)
        for b in range(gl.where(item > 0, 0, block), last):
            stage = turn % STAGES
            phase = ((turn // STAGES) & 1) ^ 1
            mbarrier.wait(left_empty.index(stage), phase)
            mbarrier.expect(left_full.index(stage), 64 * 320 * 2)
            load_keys(pool, here, top, 0, left_full.index(stage), left.index(stage), True, 256, PAGE)
            load_keys(pool, here, top, 512, left_full.index(stage), rope.index(stage), True, 64, PAGE)
            mbarrier.wait(right_empty.index(stage), phase)
            mbarrier.expect(right_full.index(stage), 64 * 256 * 2)
            load_keys(pool, here, top, 256, right_full.index(stage), right.index(stage), True, 256, PAGE)
            here = coming
            coming = find_spot(table, pages, gl.minimum(b + 2, last - 1), page_rows, PAGE)
            turn += 1
        entry += FIELDS
        next_pages = gl.load(entry + REQUEST).to(gl.int64) * table_stride
        next_row = gl.load(entry + ROW)
        next_blocks = gl.load(entry + BLOCKS)
        next_start = gl.load(entry + START)
        keys = gl.load(entry + KEYS)
        here = spot_of(gl.load(entry + EVEN_PAGE), next_pages, block * 0, page_rows, PAGE)
        coming = spot_of(gl.load(entry + ODD_PAGE), next_pages, gl.minimum(1, next_blocks - 1), page_rows, PAGE)
        pages = next_pages
        row = next_row
        last = cut(stretch - next_start, next_blocks)


@gluon.jit
def scores_of_few(k, q, s, M: gl.constexpr):
    """Add k q^T of 256 columns to s, box by box."""
    k4, q4 = boxes(k, 64), boxes(q, M)
    for c in range(4):
        s = warpgroup_mma(k4.index(c), q4.index(c).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def block_step(
    o0, o1, sums, m, turn, base, edge, bound, end, scale, bars, bufs,
    M: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores^T = K q^T, weights, and both halves of the output^T = V^T weights^T over one block of 64 keys."""
    q_full, q_empty, left_full, right_full, left_empty, right_empty = bars
    ql, qr, qt, left, right, rope, weights = bufs
    stage = turn % STAGES
    phase = (turn // STAGES) & 1
    k_left = left.index(stage)
    k_right = right.index(stage)
    mbarrier.wait(left_full.index(stage), phase)
    s = warpgroup_mma_init(gl.zeros([64, M], gl.float32, layout=LAYOUT))
    s = warpgroup_mma(rope.index(stage), qt.permute((1, 0)), s, is_async=True)
    s = scores_of_few(k_left, ql, s, M)
    mbarrier.wait(right_full.index(stage), phase)
    s = scores_of_few(k_right, qr, s, M)
    s = warpgroup_mma_wait(0, deps=[s])
    if edge:
        keys = base + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        s = gl.where(keys[:, None] < bound[None, :], s, MASKED)
    top = gl.maximum(m, gl.max(s, 0) * scale)
    a = gl.exp2(m - top)
    p = gl.exp2(by_row(s, scale, False) - top[None, :])
    weights.store(p.to(weights.dtype))
    fence_async_shared()
    thread_barrier()
    if end - base < 64:
        zero_rows(k_left, end - base)
        zero_rows(k_right, end - base)
    o0 = o0 * a[None, :]
    o0 = warpgroup_mma(k_left.permute((1, 0)), weights, o0, is_async=True)
    o1 = o1 * a[None, :]
    o1 = warpgroup_mma(k_right.permute((1, 0)), weights, o1, is_async=True)
    sums = sums * a[None, :] + p
    o0 = warpgroup_mma_wait(1, deps=[o0])
    mbarrier.arrive(left_empty.index(stage), count=1)
    o1 = warpgroup_mma_wait(0, deps=[o1])
    mbarrier.arrive(right_empty.index(stage), count=1)
    return o0, o1, sums, top


@gluon.jit
def consumer(
    bars, bufs, lists, scale, results, N, M: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Four warps that compute all pieces of a part of the work, one after the other."""
    table, table_stride, page_rows, bounds, row_scale, work, part = lists
    out, lse, part_out, part_lse = results
    q_full, q_empty, left_full, right_full, left_empty, right_empty = bars
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    index = gl.program_id(0)
    at = part + FIELDS * index
    row = gl.load(at + ROW)
    rows = gl.load(at + ROWS)
    blocks = gl.load(at + BLOCKS)
    stretch = gl.load(at + STRETCH)
    keys = gl.load(at + KEYS)
    entry = work + FIELDS * gl.load(at + ENTRY)
    count = gl.load(at + COUNT)
    block = gl.load(at + FIRST)
    last = gl.load(at + LAST)
    turn = 0
    offr = gl.arange(0, M, layout=COLUMNS)
    for item in range(count):
        least = gl.load(entry + LEAST)  # not carried over: see `device`
        entry += FIELDS
        next_row = gl.load(entry + ROW)
        next_rows = gl.load(entry + ROWS)
        next_blocks = gl.load(entry + BLOCKS)
        next_start = gl.load(entry + START)
        next_keys = gl.load(entry + KEYS)
        bound = gl.load(bounds + (row + offr) // N, mask=offr < rows, other=keys)
        times = scale_of(scale, row_scale, row, offr, rows)
        o0 = gl.zeros([256, M], gl.float32, layout=LAYOUT)
        o1 = gl.zeros([256, M], gl.float32, layout=LAYOUT)
        sums = gl.zeros([64, M], gl.float32, layout=LAYOUT)
        m = gl.full([M], MASKED, gl.float32, layout=COLUMNS)
        first = block
        mbarrier.wait(q_full, item & 1)
        for _ in range(last - block):
            edge = block * 64 + 64 > least
            o0, o1, sums, m = block_step(
                o0, o1, sums, m, turn, block * 64, edge, bound, keys, times, bars, bufs, M, STAGES, LAYOUT
            )
            turn += 1
            block += 1
        mbarrier.arrive(q_empty, count=1)
        seen = bound > first * 64
        total = gl.sum(sums, 0)
        share = gl.where(seen, 1.0 / total, 0.0)[None, :]
        o0 = gl.where(seen[None, :], o0 * share, 0.0)
        o1 = gl.where(seen[None, :], o1 * share, 0.0)
        log2_sum = gl.where(seen, m + gl.log2(total), float("-inf"))
        d = gl.arange(0, 256, layout=gl.SliceLayout(1, LAYOUT))
        inside = offr < rows
        if (first == 0) & (last == blocks):
            to = out + (row.to(gl.int64) + offr)[None, :] * 512 + d[:, None]
            gl.store(to, o0.to(out.dtype.element_ty), mask=inside[None, :])
            gl.store(to + 256, o1.to(out.dtype.element_ty), mask=inside[None, :])
            gl.store(lse + row + offr, log2_sum * LN2, mask=inside)
        else:
            slot = (2 * index + gl.where(first > 0, 0, 1)) * M + offr
            to_part = part_out + slot.to(gl.int64)[None, :] * 512 + d[:, None]
            gl.store(to_part, o0)
            gl.store(to_part + 256, o1)
            gl.store(part_lse + slot, log2_sum)
        row = next_row
        rows = next_rows
        block = 0 * block
        blocks = next_blocks
        last = cut(stretch - next_start, next_blocks)
        keys = next_keys


@gluon.jit(do_not_specialize=["table_stride", "page_rows", "N"])
def _swap_kernel(
    q_desc, q_pe_desc, rows_desc, box_desc, table, table_stride, page_rows, bounds, row_scale, work, part, scale,
    out, lse, part_out, part_lse, N, M: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    DT: gl.constexpr = out.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    KEYS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], DT)
    ql = gl.allocate_shared_memory(DT, [M, 256], q_desc.layout)
    qr = gl.allocate_shared_memory(DT, [M, 256], q_desc.layout)
    qt = gl.allocate_shared_memory(DT, [M, 64], q_pe_desc.layout)
    left = gl.allocate_shared_memory(DT, [STAGES, 64, 256], KEYS_LAYOUT)
    right = gl.allocate_shared_memory(DT, [STAGES, 64, 256], KEYS_LAYOUT)
    rope = gl.allocate_shared_memory(DT, [STAGES, 64, 64], KEYS_LAYOUT)
    weights = gl.allocate_shared_memory(DT, [64, M], gl.NVMMASharedLayout.get_default_for([64, M], DT))
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(left_full.index(i), count=1)
        mbarrier.init(right_full.index(i), count=1)
        mbarrier.init(left_empty.index(i), count=1)
        mbarrier.init(right_empty.index(i), count=1)
    bars = (new_barrier(), new_barrier(), left_full, right_full, left_empty, right_empty)
    bufs = (ql, qr, qt, left, right, rope, weights)
    descs = (q_desc, q_pe_desc, rows_desc, box_desc)
    lists = (table, table_stride, page_rows, bounds, row_scale, work, part)
    results = (out, lse, part_out, part_lse)
    launch_next()
    gl.warp_specialize(
        [
            (consumer, (bars, bufs, lists, scale, results, N, M, STAGES, LAYOUT)),
            (producer, (descs, bars, bufs, lists, M, STAGES, PAGE)),
        ],
        [1],
        [24],
    )


def aot() -> list[Compile]:
    """Tiles of 16 and of 32 rows, per dtype and page size; heads, lengths and strides are numbers."""
    entries = []
    for kind, PAGE, scaled in VARIANTS:
        for M in (16, 32):
            constants = {"M": M, "STAGES": 2, "PAGE": PAGE} | ({} if scaled else {"row_scale": None})
            name = f"swap {kind} {M} rows, pages of {PAGE}" + ", scaled" * scaled
            types = signature(kind, M, PAGE, scaled)
            entries.append(Compile(_swap_kernel, types, constants, 4, targets=("sm_90",), name=name))
    return entries
