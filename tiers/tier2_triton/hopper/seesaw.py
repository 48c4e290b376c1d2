"""Decode on Hopper for tiles of 64 rows: two warpgroups that take turns on the tensor cores.

Motivation. With 128 heads a latent row is used 128 times, and the tensor cores are the bound. An output of 64 x 512 in
float32 is half of an SM's registers, so there is one tile an SM, and each of two warpgroups holds half of its columns.
Keys come in pairs of blocks.
The first warpgroup ("even") does scores and softmax of the even block, the second ("odd") those of the odd one; each
multiplies its own weights with its half of the values, hands them over through shared memory, where the rope part of
the keys is no longer needed, and multiplies the other's. While one computes exponentials the other feeds the tensor
cores. The latent row is loaded once: what were keys are values a moment later.

Every quarter of a pair has one last reader, which reloads it for the next pair at once: there is no warp that loads,
and no barrier that says "empty". The barriers, each with a phase of its own, are

    left0, right0 (by boxes), rope0, right1, left1      filled by copies, waited for by whoever multiplies with them
    max0, max1                                          the even maximum is known to odd, then the common one to even
    p0, p1                                              the weights of a block lie in its rope tile
    sum0, sum1                                          at the end of a piece, the sums of both

Masks stand behind a branch, right after a wait for scores. A second program for pairs without them would run no faster,
and instructions come from memory when they are met first: it cost 4 us of 70. `swap` is for fewer rows.
Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2, FlashAttention-3 (arXiv 2407.08608) for turns of two warpgroups.

Axes: M = 64 rows (token, head) of a tile, 64 keys of a block, N heads, p parts.
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
    MASKED,
    ODD_PAGE,
    REQUEST,
    ROW,
    ROWS,
    START,
    STRETCH,
    VARIANTS,
    ask_for,
    boxes,
    by_row,
    find_spot,
    last_page,
    launch_next,
    load_left,
    load_left_and_rope,
    load_query,
    load_right,
    load_right_by_boxes_and_rope,
    new_barrier,
    scale_of,
    signature,
    spot_of,
    zero_rows,
)
from tiers.tier2_triton.hopper.schedule import cut
from tiers.tier2_triton.hopper.store import store_state


@gluon.jit
def scores(q, k, s):
    """Add q k^T of 256 columns to s; box by box in a loop, else descriptors are spilled."""
    q4, k4 = boxes(q, 64), boxes(k, 64)
    for c in range(4):
        s = warpgroup_mma(q4.index(c), k4.index(c).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def even_step(
    o, total, m, unit, turn, following, descs, bars, bufs,
    MS: gl.constexpr, MO: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The left half of the output over a pair of blocks: scores and weights of the even one, values of both."""
    bound, end, scale = unit
    pair, base, edge = turn
    even, odd, top, query_row, more, more_query = following
    q_full, left0_full, right0_full, rope0_full, right1_full, left1_full, max0, max1, p0, p1, sum0, sum1 = bars
    ql, qr, qt, left0, left1, right0, right1, rope0, rope1, m0_s, m1_s, a0_s, a1_s, l0_s, l1_s = bufs
    q_desc, q_pe_desc, pool, ahead = descs
    PD: gl.constexpr = gl.DotOperandLayout(0, MO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, MS)
    RO: gl.constexpr = gl.SliceLayout(1, MO)
    phase = pair & 1
    mbarrier.wait(left0_full, phase)
    s = scores(ql, left0, warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout=MS)))
    q4, k4 = boxes(qr, 64), boxes(right0, 64)
    for c in range(4):
        mbarrier.wait(right0_full.index(c), phase)
        s = warpgroup_mma(q4.index(c), k4.index(c).permute((1, 0)), s, is_async=True)
    mbarrier.wait(rope0_full, phase)
    s = warpgroup_mma(qt, rope0.permute((1, 0)), s, is_async=True)
    ask_for(ahead, even, more, PAGE)
    s = warpgroup_mma_wait(0, deps=[s])
    if edge:
        keys = base + gl.arange(0, 64, layout=gl.SliceLayout(0, MS))
        s = gl.where(keys[None, :] < bound[:, None], s, MASKED)
        if end - base < 64:
            zero_rows(left0, end - base)
    m0 = gl.maximum(m, gl.max(s, 1) * scale)
    a0 = gl.exp2(m - m0)
    m0_s.store(m0)
    a0_s.store(a0)
    mbarrier.arrive(max0, count=1)
    p = gl.exp2(by_row(s, scale, True) - m0[:, None])
    o = o * gl.convert_layout(a0, RO)[:, None]
    o = warpgroup_mma(gl.convert_layout(p.to(left0.dtype), PD), left0, o, is_async=True)
    total = total * a0 + gl.sum(p, 1)
    mbarrier.wait(max1, phase)
    a1 = a1_s.load(RS)
    m = m1_s.load(RS)
    p = p * a1[:, None]
    rope0.store(p.to(left0.dtype))
    fence_async_shared()
    mbarrier.arrive(p0, count=1)
    total = total * a1
    o = warpgroup_mma_wait(0, deps=[o])
    if more:
        load_left(pool, even, top, left0_full, left0, True, PAGE)
    o = o * gl.convert_layout(a1, RO)[:, None]
    mbarrier.wait(p1, phase)
    mbarrier.wait(left1_full, phase)
    if end - base < 128:
        zero_rows(left1, end - base - 64)
    o = warpgroup_mma(rope1, left1, o, is_async=True)
    if more_query:
        load_query(q_desc, q_pe_desc, query_row, q_full, ql, qr, qt, True, 64)
    o = warpgroup_mma_wait(0, deps=[o])
    if more:
        load_left_and_rope(pool, odd, top, left1_full, left1, rope1, True, PAGE)
    return o, total, m


@gluon.jit
def odd_step(
    o, total, m, unit, turn, following, descs, bars, bufs,
    MS: gl.constexpr, MO: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The right half of the output over a pair of blocks: scores and weights of the odd one, values of both."""
    bound, end, scale = unit
    pair, base, edge = turn
    even, odd, top, query_row, more, more_query = following
    q_full, left0_full, right0_full, rope0_full, right1_full, left1_full, max0, max1, p0, p1, sum0, sum1 = bars
    ql, qr, qt, left0, left1, right0, right1, rope0, rope1, m0_s, m1_s, a0_s, a1_s, l0_s, l1_s = bufs
    q_desc, q_pe_desc, pool, ahead = descs
    PD: gl.constexpr = gl.DotOperandLayout(0, MO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, MS)
    RO: gl.constexpr = gl.SliceLayout(1, MO)
    phase = pair & 1
    mbarrier.wait(right1_full, phase)
    s = scores(qr, right1, warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout=MS)))
    mbarrier.wait(left1_full, phase)
    s = scores(ql, left1, s)
    s = warpgroup_mma(qt, rope1.permute((1, 0)), s, is_async=True)
    ask_for(ahead, odd, more, PAGE)
    s = warpgroup_mma_wait(0, deps=[s])
    if edge:
        keys = base + 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, MS))
        s = gl.where(keys[None, :] < bound[:, None], s, MASKED)
        if end - base < 128:
            zero_rows(right1, end - base - 64)
    most = gl.max(s, 1) * scale
    mbarrier.wait(max0, phase)
    m0 = m0_s.load(RS)
    a0 = a0_s.load(RS)
    m1 = gl.maximum(m0, most)
    a1 = gl.exp2(m0 - m1)
    m1_s.store(m1)
    a1_s.store(a1)
    mbarrier.arrive(max1, count=1)
    p = gl.exp2(by_row(s, scale, True) - m1[:, None])
    weights = p.to(left0.dtype)
    rope1.store(weights)
    fence_async_shared()
    mbarrier.arrive(p1, count=1)
    a = a0 * a1
    o = o * gl.convert_layout(a, RO)[:, None]
    o = warpgroup_mma(gl.convert_layout(weights, PD), right1, o, is_async=True)
    total = total * a + gl.sum(p, 1)
    mbarrier.wait(p0, phase)
    mbarrier.wait(rope0_full, phase)
    for c in range(4):
        mbarrier.wait(right0_full.index(c), phase)
    if end - base < 64:
        zero_rows(right0, end - base)
    o = warpgroup_mma(rope0, right0, o, is_async=True)
    o = warpgroup_mma_wait(1, deps=[o])
    if more:
        load_right(pool, odd, top, right1_full, right1, True, PAGE)
    o = warpgroup_mma_wait(0, deps=[o])
    if more:
        load_right_by_boxes_and_rope(pool, even, top, right0_full, rope0_full, right0, rope0, True, PAGE)
    return o, total, m1


@gluon.jit
def step(
    o, total, m, unit, turn, following, descs, bars, bufs,
    MS: gl.constexpr, MO: gl.constexpr, EVEN: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """A pair of blocks, by the one warpgroup or the other."""
    if EVEN:
        o, total, m = even_step(o, total, m, unit, turn, following, descs, bars, bufs, MS, MO, PAGE)
    else:
        o, total, m = odd_step(o, total, m, unit, turn, following, descs, bars, bufs, MS, MO, PAGE)
    return o, total, m


@gluon.jit
def load_first(
    descs, bars, bufs, row, even, odd, then, top, has, EVEN: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Start the copies of the first query and of the first pair, each by whoever reloads it later; ask for the next."""
    q_full, left0_full, right0_full, rope0_full, right1_full, left1_full, max0, max1, p0, p1, sum0, sum1 = bars
    ql, qr, qt, left0, left1, right0, right1, rope0, rope1, m0_s, m1_s, a0_s, a1_s, l0_s, l1_s = bufs
    q_desc, q_pe_desc, pool, ahead = descs
    if EVEN:
        load_query(q_desc, q_pe_desc, row, q_full, ql, qr, qt, has, 64)
        load_left(pool, even, top, left0_full, left0, has, PAGE)
        load_left_and_rope(pool, odd, top, left1_full, left1, rope1, has, PAGE)
    else:
        load_right_by_boxes_and_rope(pool, even, top, right0_full, rope0_full, right0, rope0, has, PAGE)
        load_right(pool, odd, top, right1_full, right1, has, PAGE)
    ask_for(ahead, then, has, PAGE)


@gluon.jit
def first_unit(work, at, tile, table, table_stride, page_rows, EVEN: gl.constexpr, PAGE: gl.constexpr):
    """What a part starts with: loads that do not wait for each other."""
    pages = gl.load(at + REQUEST).to(gl.int64) * table_stride
    row = gl.load(at + ROW) + tile * 64
    rows = gl.load(at + ROWS) - tile * 64
    blocks = gl.load(at + BLOCKS)
    keys = gl.load(at + KEYS)
    entry = work + FIELDS * gl.load(at + ENTRY)
    count = gl.load(at + COUNT)
    block = gl.load(at + FIRST)
    last = gl.load(at + LAST)
    stretch = gl.load(at + STRETCH)
    even = spot_of(gl.load(at + EVEN_PAGE), pages, block, page_rows, PAGE)
    odd = spot_of(gl.load(at + ODD_PAGE), pages, gl.minimum(block + 1, last - 1), page_rows, PAGE)
    then = gl.maximum(gl.minimum(block + (2 if EVEN else 3), last - 1), 0)  # a part may have nothing to do
    then = find_spot(table, pages, then, page_rows, PAGE)
    return pages, row, rows, blocks, keys, entry, count, block, last, stretch, even, odd, then


@gluon.jit
def warpgroup(
    descs, bars, bufs, lists, scale, results, N, TILES,
    PAGE: gl.constexpr, MS: gl.constexpr, MO: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """One of the two: all pieces of a part of the work, one after the other."""
    table, table_stride, page_rows, bounds, row_scale, work, part = lists
    q_full, left0_full, right0_full, rope0_full, right1_full, left1_full, max0, max1, p0, p1, sum0, sum1 = bars
    ql, qr, qt, left0, left1, right0, right1, rope0, rope1, m0_s, m1_s, a0_s, a1_s, l0_s, l1_s = bufs
    RS: gl.constexpr = gl.SliceLayout(1, MS)
    p = gl.program_id(0) // TILES
    tile = gl.program_id(0) % TILES
    mine = first_unit(work, part + FIELDS * p, tile, table, table_stride, page_rows, EVEN, PAGE)
    pages, row, rows, blocks, keys, entry, count, block, last, stretch, even, odd, then = mine
    load_first(descs, bars, bufs, row, even, odd, then, last_page(pages, keys, PAGE), count > 0, EVEN, PAGE)
    pair = 0
    for item in range(count):
        least = gl.load(entry + LEAST)  # not carried over: see `device`
        entry += FIELDS
        has = item + 1 < count
        inside = gl.minimum(rows, 64)
        offr = gl.arange(0, 64, layout=RS)
        bound = gl.load(bounds + (row + offr) // N, mask=offr < inside, other=keys)
        times = scale_of(scale, row_scale, row, offr, inside)
        o = gl.zeros([64, 256], gl.float32, layout=MO)
        total = gl.zeros([64], gl.float32, layout=RS)
        m = gl.full([64], MASKED, gl.float32, layout=RS)
        first = block
        mbarrier.wait(q_full, item & 1)
        top = last_page(pages, keys, PAGE)
        pairs = (last - block + 1) // 2
        next_pages = gl.load(entry + REQUEST).to(gl.int64) * table_stride
        next_row = gl.load(entry + ROW) + tile * 64
        next_rows = gl.load(entry + ROWS) - tile * 64
        next_blocks = gl.load(entry + BLOCKS)
        next_start = gl.load(entry + START)
        next_keys = gl.load(entry + KEYS)
        next_top = last_page(next_pages, next_keys, PAGE)
        next_even = spot_of(gl.load(entry + EVEN_PAGE), next_pages, block * 0, page_rows, PAGE)
        next_odd = spot_of(gl.load(entry + ODD_PAGE), next_pages, gl.minimum(1, next_blocks - 1), page_rows, PAGE)
        for _ in range(pairs):
            ends = block + 2 >= last
            even = find_spot(table, pages, gl.minimum(block + 2, last - 1), page_rows, PAGE)
            odd = find_spot(table, pages, gl.minimum(block + 3, last - 1), page_rows, PAGE)
            even = gl.where(ends, next_even, even)
            odd = gl.where(ends, next_odd, odd)
            following = (even, odd, gl.where(ends, next_top, top), next_row, has | (block + 2 < last), has & ends)
            turn = (pair, block * 64, block * 64 + 128 > least)
            o, total, m = step(
                o, total, m, (bound, keys, times), turn, following, descs, bars, bufs, MS, MO, EVEN, PAGE
            )
            pair += 1
            block += 2
        whole = (first == 0) & (last == blocks)
        slot_row = ((2 * p + gl.where(first > 0, 0, 1)) * TILES + tile) * 64
        to = (item, bound > first * 64, inside, row, slot_row, whole, results)
        if EVEN:
            store_state(o, total, m, sum0, sum1, l0_s, l1_s, to, 0, MS, MO)
        else:
            store_state(o, total, m, sum1, sum0, l1_s, l0_s, to, 256, MS, MO)
        pages = next_pages
        row = next_row
        rows = next_rows
        block = 0 * block
        blocks = next_blocks
        last = cut(stretch - next_start, next_blocks)
        keys = next_keys


@gluon.jit(do_not_specialize=["table_stride", "page_rows", "AHEAD", "N", "TILES"])
def _seesaw_kernel(
    q_desc, q_pe_desc, rows_desc, box_desc, table, table_stride, page_rows, bounds, row_scale, work, part, scale,
    out, lse, part_out, part_lse, data, AHEAD, N, TILES, PAGE: gl.constexpr,
):  # fmt: skip
    DT: gl.constexpr = out.dtype.element_ty
    MS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    MO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    KEYS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], DT)
    ql = gl.allocate_shared_memory(DT, [64, 256], q_desc.layout)
    qr = gl.allocate_shared_memory(DT, [64, 256], q_desc.layout)
    qt = gl.allocate_shared_memory(DT, [64, 64], q_pe_desc.layout)
    left0 = gl.allocate_shared_memory(DT, [64, 256], KEYS_LAYOUT)
    left1 = gl.allocate_shared_memory(DT, [64, 256], KEYS_LAYOUT)
    right0 = gl.allocate_shared_memory(DT, [64, 256], KEYS_LAYOUT)
    right1 = gl.allocate_shared_memory(DT, [64, 256], KEYS_LAYOUT)
    rope0 = gl.allocate_shared_memory(DT, [64, 64], KEYS_LAYOUT)
    rope1 = gl.allocate_shared_memory(DT, [64, 64], KEYS_LAYOUT)
    m0_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    m1_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    a0_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    a1_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    l0_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    l1_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    right0_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(4):
        mbarrier.init(right0_full.index(c), count=1)
    bars = (
        new_barrier(), new_barrier(), right0_full, new_barrier(), new_barrier(), new_barrier(), new_barrier(),
        new_barrier(), new_barrier(), new_barrier(), new_barrier(), new_barrier(),
    )  # fmt: skip
    bufs = (ql, qr, qt, left0, left1, right0, right1, rope0, rope1, m0_s, m1_s, a0_s, a1_s, l0_s, l1_s)
    ahead = (data + gl.program_id(0) % TILES * AHEAD * 576, AHEAD)
    descs = (q_desc, q_pe_desc, (rows_desc, box_desc, table, page_rows), ahead)
    lists = (table, table_stride, page_rows, bounds, row_scale, work, part)
    results = (out, lse, part_out, part_lse)
    launch_next()
    gl.warp_specialize(
        [
            (warpgroup, (descs, bars, bufs, lists, scale, results, N, TILES, PAGE, MS, MO, True)),
            (warpgroup, (descs, bars, bufs, lists, scale, results, N, TILES, PAGE, MS, MO, False)),
        ],
        [4],
        [240],
    )


def aot() -> list[Compile]:
    """One variant per dtype and page size: heads, tiles, lengths and strides are numbers."""
    return [
        Compile(
            _seesaw_kernel,
            signature(kind, 64, PAGE, scaled) | {"data": f"*{kind}", "AHEAD": "i32"},
            {"PAGE": PAGE} | ({} if scaled else {"row_scale": None}),
            4,
            targets=("sm_90",),
            name=f"seesaw {kind}, pages of {PAGE}" + ", scaled" * scaled,
        )
        for kind, PAGE, scaled in VARIANTS
    ]
