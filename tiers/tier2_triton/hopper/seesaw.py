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

Masks are in the last pairs of a piece only. `swap` is for fewer rows. Source: DeepSeek-V2 (arXiv 2405.04434) section
2.1.2, FlashAttention-3 (arXiv 2407.08608) for turns of two warpgroups.

Axes: M = 64 rows (token, head) of a tile, 64 keys of a block, N heads, p parts.
"""

# ruff: noqa: RUF059  barriers and tiles are unpacked in one order everywhere

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
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
    boxes,
    cache_row,
    cut,
    load_query,
    new_barrier,
    pool_row,
    signature,
    zero_rows,
)


@gluon.jit
def scores(q, k, s):
    """Add q k^T of 256 columns to s; box by box in a loop, else descriptors are spilled."""
    q4, k4 = boxes(q, 64), boxes(k, 64)
    for c in range(4):
        s = warpgroup_mma(q4.index(c), k4.index(c).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def load_left(rows_desc, row, full, buffer, wanted):
    """Columns 0 .. 255 of a block."""
    mbarrier.expect(full, 64 * 256 * 2, pred=wanted)
    tma.async_copy_global_to_shared(rows_desc, [row, 0], full, buffer, pred=wanted)


@gluon.jit
def load_right(rows_desc, row, full, buffer, wanted):
    """Columns 256 .. 511 of a block."""
    mbarrier.expect(full, 64 * 256 * 2, pred=wanted)
    tma.async_copy_global_to_shared(rows_desc, [row, 256], full, buffer, pred=wanted)


@gluon.jit
def load_left_and_rope(rows_desc, box_desc, row, full, left, rope, wanted):
    """Columns 0 .. 255 of a block and its rope part, on one barrier."""
    mbarrier.expect(full, 64 * 320 * 2, pred=wanted)
    tma.async_copy_global_to_shared(box_desc, [row, 512], full, rope, pred=wanted)
    tma.async_copy_global_to_shared(rows_desc, [row, 0], full, left, pred=wanted)


@gluon.jit
def load_right_by_boxes_and_rope(box_desc, row, box_full, rope_full, right, rope, wanted):
    """One barrier a box: scores of the first can begin while the last is under way."""
    r4 = boxes(right, 64)
    for c in range(4):
        mbarrier.expect(box_full.index(c), 64 * 64 * 2, pred=wanted)
        tma.async_copy_global_to_shared(box_desc, [row, 256 + 64 * c], box_full.index(c), r4.index(c), pred=wanted)
    mbarrier.expect(rope_full, 64 * 64 * 2, pred=wanted)
    tma.async_copy_global_to_shared(box_desc, [row, 512], rope_full, rope, pred=wanted)


@gluon.jit
def even_step(
    o, total, m, unit, turn, following, descs, bars, bufs, MS: gl.constexpr, MO: gl.constexpr, EDGE: gl.constexpr
):  # fmt: skip
    """The left half of the output over a pair of blocks: scores and weights of the even one, values of both."""
    bound, end, scale = unit
    pair, base = turn
    even_row, odd_row, query_row, more, more_query = following
    q_full, left0_full, right0_full, rope0_full, right1_full, left1_full, max0, max1, p0, p1, sum0, sum1 = bars
    ql, qr, qt, left0, left1, right0, right1, rope0, rope1, m0_s, m1_s, a0_s, a1_s, l0_s, l1_s = bufs
    q_desc, q_pe_desc, rows_desc, box_desc = descs
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
    s = warpgroup_mma_wait(0, deps=[s])
    if EDGE:
        keys = base + gl.arange(0, 64, layout=gl.SliceLayout(0, MS))
        s = gl.where(keys[None, :] < bound[:, None], s, MASKED)
    m0 = gl.maximum(m, gl.max(s, 1) * scale)
    a0 = gl.exp2(m - m0)
    m0_s.store(m0)
    a0_s.store(a0)
    mbarrier.arrive(max0, count=1)
    p = gl.exp2(s * scale - m0[:, None])
    o = o * gl.convert_layout(a0, RO)[:, None]
    if EDGE:
        if end - base < 64:
            zero_rows(left0, end - base)
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
    load_left(rows_desc, even_row, left0_full, left0, more)
    o = o * gl.convert_layout(a1, RO)[:, None]
    mbarrier.wait(p1, phase)
    mbarrier.wait(left1_full, phase)
    if EDGE:
        if end - base < 128:
            zero_rows(left1, end - base - 64)
    o = warpgroup_mma(rope1, left1, o, is_async=True)
    if EDGE:
        load_query(q_desc, q_pe_desc, query_row, q_full, ql, qr, qt, more_query, 64)
    o = warpgroup_mma_wait(0, deps=[o])
    load_left_and_rope(rows_desc, box_desc, odd_row, left1_full, left1, rope1, more)
    return o, total, m


@gluon.jit
def odd_step(
    o, total, m, unit, turn, following, descs, bars, bufs, MS: gl.constexpr, MO: gl.constexpr, EDGE: gl.constexpr
):  # fmt: skip
    """The right half of the output over a pair of blocks: scores and weights of the odd one, values of both."""
    bound, end, scale = unit
    pair, base = turn
    even_row, odd_row, query_row, more, more_query = following
    q_full, left0_full, right0_full, rope0_full, right1_full, left1_full, max0, max1, p0, p1, sum0, sum1 = bars
    ql, qr, qt, left0, left1, right0, right1, rope0, rope1, m0_s, m1_s, a0_s, a1_s, l0_s, l1_s = bufs
    q_desc, q_pe_desc, rows_desc, box_desc = descs
    PD: gl.constexpr = gl.DotOperandLayout(0, MO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, MS)
    RO: gl.constexpr = gl.SliceLayout(1, MO)
    phase = pair & 1
    mbarrier.wait(right1_full, phase)
    s = scores(qr, right1, warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout=MS)))
    mbarrier.wait(left1_full, phase)
    s = scores(ql, left1, s)
    s = warpgroup_mma(qt, rope1.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if EDGE:
        keys = base + 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, MS))
        s = gl.where(keys[None, :] < bound[:, None], s, MASKED)
    top = gl.max(s, 1) * scale
    mbarrier.wait(max0, phase)
    m0 = m0_s.load(RS)
    a0 = a0_s.load(RS)
    m1 = gl.maximum(m0, top)
    a1 = gl.exp2(m0 - m1)
    m1_s.store(m1)
    a1_s.store(a1)
    mbarrier.arrive(max1, count=1)
    p = gl.exp2(s * scale - m1[:, None])
    weights = p.to(left0.dtype)
    rope1.store(weights)
    fence_async_shared()
    mbarrier.arrive(p1, count=1)
    a = a0 * a1
    o = o * gl.convert_layout(a, RO)[:, None]
    if EDGE:
        if end - base < 128:
            zero_rows(right1, end - base - 64)
    o = warpgroup_mma(gl.convert_layout(weights, PD), right1, o, is_async=True)
    total = total * a + gl.sum(p, 1)
    mbarrier.wait(p0, phase)
    mbarrier.wait(rope0_full, phase)
    for c in range(4):
        mbarrier.wait(right0_full.index(c), phase)
    if EDGE:
        if end - base < 64:
            zero_rows(right0, end - base)
    o = warpgroup_mma(rope0, right0, o, is_async=True)
    o = warpgroup_mma_wait(1, deps=[o])
    load_right(rows_desc, odd_row, right1_full, right1, more)
    o = warpgroup_mma_wait(0, deps=[o])
    load_right_by_boxes_and_rope(box_desc, even_row, right0_full, rope0_full, right0, rope0, more)
    return o, total, m1


@gluon.jit
def store_state(
    o, total, m, own_full, other_full, own, other, to, COLUMN: gl.constexpr, MS: gl.constexpr, MO: gl.constexpr,
):  # fmt: skip
    """Add the warpgroups' sums, divide, and write the tile's half: to the result, or to a slot for `combine`."""
    item, seen, inside, row, slot_row, whole, results = to
    out, lse, part_out, part_lse = results
    RS: gl.constexpr = gl.SliceLayout(1, MS)
    RO: gl.constexpr = gl.SliceLayout(1, MO)
    own.store(total)
    mbarrier.arrive(own_full, count=1)
    mbarrier.wait(other_full, item & 1)
    total = total + other.load(RS)
    o = gl.where(
        gl.convert_layout(seen.to(gl.int32), RO)[:, None] > 0, o * gl.convert_layout(1.0 / total, RO)[:, None], 0.0
    )
    log2_sum = gl.where(seen, m + gl.log2(total), float("-inf"))
    offr = gl.arange(0, 64, layout=RS)
    if whole:
        # 16 bytes a thread, moved within four threads only
        VL: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
            lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, 256],
        )
        values = gl.convert_layout(o.to(out.dtype.element_ty), VL)
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, VL))
        columns = gl.arange(0, 256, layout=gl.SliceLayout(0, VL))
        at = (row.to(gl.int64) + rows)[:, None] * 512 + (COLUMN + columns)[None, :]
        gl.store(out + at, values, mask=(rows < inside)[:, None])
        if COLUMN == 0:
            gl.store(lse + row + offr, log2_sum * LN2, mask=offr < inside)
    else:
        slots = slot_row.to(gl.int64) + gl.arange(0, 64, layout=RO)
        at_column = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, MO))
        gl.store(part_out + slots[:, None] * 512 + at_column[None, :], o)
        if COLUMN == 0:
            gl.store(part_lse + slot_row + offr, log2_sum)


@gluon.jit
def step(
    o, total, m, unit, turn, following, descs, bars, bufs,
    MS: gl.constexpr, MO: gl.constexpr, EDGE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """A pair of blocks, by the one warpgroup or the other."""
    if EVEN:
        o, total, m = even_step(o, total, m, unit, turn, following, descs, bars, bufs, MS, MO, EDGE)
    else:
        o, total, m = odd_step(o, total, m, unit, turn, following, descs, bars, bufs, MS, MO, EDGE)
    return o, total, m


@gluon.jit
def load_first(descs, bars, bufs, row, even_row, odd_row, has, EVEN: gl.constexpr):
    """Start the copies of the first query and of the first pair, each by whoever reloads it later."""
    q_full, left0_full, right0_full, rope0_full, right1_full, left1_full, max0, max1, p0, p1, sum0, sum1 = bars
    ql, qr, qt, left0, left1, right0, right1, rope0, rope1, m0_s, m1_s, a0_s, a1_s, l0_s, l1_s = bufs
    q_desc, q_pe_desc, rows_desc, box_desc = descs
    if EVEN:
        load_query(q_desc, q_pe_desc, row, q_full, ql, qr, qt, has, 64)
        load_left(rows_desc, even_row, left0_full, left0, has)
        load_left_and_rope(rows_desc, box_desc, odd_row, left1_full, left1, rope1, has)
    else:
        load_right(rows_desc, odd_row, right1_full, right1, has)
        load_right_by_boxes_and_rope(box_desc, even_row, right0_full, rope0_full, right0, rope0, has)


@gluon.jit
def first_unit(work, at, tile, page_rows, PAGE: gl.constexpr):
    """What a part starts with: loads that do not wait for each other."""
    request = gl.load(at + REQUEST)
    row = gl.load(at + ROW) + tile * 64
    rows = gl.load(at + ROWS) - tile * 64
    blocks = gl.load(at + BLOCKS)
    keys = gl.load(at + KEYS)
    least = gl.load(at + LEAST)
    entry = work + FIELDS * gl.load(at + ENTRY)
    count = gl.load(at + COUNT)
    block = gl.load(at + FIRST)
    last = gl.load(at + LAST)
    stretch = gl.load(at + STRETCH)
    even_row = pool_row(gl.load(at + EVEN_PAGE), block, page_rows, PAGE)
    odd_row = pool_row(gl.load(at + ODD_PAGE), gl.minimum(block + 1, last - 1), page_rows, PAGE)
    return request, row, rows, blocks, keys, least, entry, count, block, last, stretch, even_row, odd_row


@gluon.jit
def warpgroup(
    descs, bars, bufs, lists, scale, results, N, TILES,
    PAGE: gl.constexpr, MS: gl.constexpr, MO: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """One of the two: all pieces of a part of the work, one after the other."""
    table, table_stride, page_rows, bounds, work, part = lists
    q_full, left0_full, right0_full, rope0_full, right1_full, left1_full, max0, max1, p0, p1, sum0, sum1 = bars
    ql, qr, qt, left0, left1, right0, right1, rope0, rope1, m0_s, m1_s, a0_s, a1_s, l0_s, l1_s = bufs
    RS: gl.constexpr = gl.SliceLayout(1, MS)
    p = gl.program_id(0) // TILES
    tile = gl.program_id(0) % TILES
    mine = first_unit(work, part + FIELDS * p, tile, page_rows, PAGE)
    request, row, rows, blocks, keys, least, entry, count, block, last, stretch, even_row, odd_row = mine
    load_first(descs, bars, bufs, row, even_row, odd_row, count > 0, EVEN)
    pair = 0
    for item in range(count):
        entry += FIELDS
        has = item + 1 < count
        pages = table + request.to(gl.int64) * table_stride
        inside = gl.minimum(rows, 64)
        offr = gl.arange(0, 64, layout=RS)
        bound = gl.load(bounds + (row + offr) // N, mask=offr < inside, other=keys)
        o = gl.zeros([64, 256], gl.float32, layout=MO)
        total = gl.zeros([64], gl.float32, layout=RS)
        m = gl.full([64], MASKED, gl.float32, layout=RS)
        first = block
        mbarrier.wait(q_full, item & 1)
        pairs = (last - block + 1) // 2
        plain = gl.minimum(gl.maximum(least // 64 - block, 0) // 2, pairs - 1)  # the last pair is an edge in any case
        for _ in range(plain):
            even_row = cache_row(pages, block + 2, page_rows, PAGE)
            odd_row = cache_row(pages, gl.minimum(block + 3, last - 1), page_rows, PAGE)
            following = (even_row, odd_row, 0, True, False)
            o, total, m = step(
                o, total, m, (bound, keys, scale), (pair, block * 64), following, descs, bars, bufs, MS, MO, False, EVEN
            )
            pair += 1
            block += 2
        next_request = gl.load(entry + REQUEST)
        next_row = gl.load(entry + ROW) + tile * 64
        next_rows = gl.load(entry + ROWS) - tile * 64
        next_blocks = gl.load(entry + BLOCKS)
        next_start = gl.load(entry + START)
        next_keys = gl.load(entry + KEYS)
        next_least = gl.load(entry + LEAST)
        next_even = gl.load(entry + EVEN_PAGE) * page_rows
        next_odd = pool_row(gl.load(entry + ODD_PAGE), gl.minimum(1, next_blocks - 1), page_rows, PAGE)
        for _ in range(pairs - plain):
            ends = block + 2 >= last
            even_row = gl.where(ends, next_even, cache_row(pages, gl.minimum(block + 2, last - 1), page_rows, PAGE))
            odd_row = gl.where(ends, next_odd, cache_row(pages, gl.minimum(block + 3, last - 1), page_rows, PAGE))
            more = has | (block + 2 < last)
            following = (even_row, odd_row, next_row, more, has & ends)
            o, total, m = step(
                o, total, m, (bound, keys, scale), (pair, block * 64), following, descs, bars, bufs, MS, MO, True, EVEN
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
        request = next_request
        row = next_row
        rows = next_rows
        block = 0 * block
        blocks = next_blocks
        last = cut(stretch - next_start, next_blocks)
        keys = next_keys
        least = next_least


@gluon.jit(do_not_specialize=["table_stride", "page_rows", "N", "TILES"])
def _seesaw_kernel(
    q_desc, q_pe_desc, rows_desc, box_desc, table, table_stride, page_rows, bounds, work, part, scale,
    out, lse, part_out, part_lse, N, TILES, PAGE: gl.constexpr,
):  # fmt: skip
    DT: gl.constexpr = out.dtype.element_ty
    MS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    MO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ql = gl.allocate_shared_memory(DT, [64, 256], q_desc.layout)
    qr = gl.allocate_shared_memory(DT, [64, 256], q_desc.layout)
    qt = gl.allocate_shared_memory(DT, [64, 64], q_pe_desc.layout)
    left0 = gl.allocate_shared_memory(DT, [64, 256], rows_desc.layout)
    left1 = gl.allocate_shared_memory(DT, [64, 256], rows_desc.layout)
    right0 = gl.allocate_shared_memory(DT, [64, 256], rows_desc.layout)
    right1 = gl.allocate_shared_memory(DT, [64, 256], rows_desc.layout)
    rope0 = gl.allocate_shared_memory(DT, [64, 64], box_desc.layout)
    rope1 = gl.allocate_shared_memory(DT, [64, 64], box_desc.layout)
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
    descs = (q_desc, q_pe_desc, rows_desc, box_desc)
    lists = (table, table_stride, page_rows, bounds, work, part)
    results = (out, lse, part_out, part_lse)
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
        Compile(_seesaw_kernel, signature(kind, 64), {"PAGE": 64}, 4, targets=("sm_90",), name=f"seesaw {kind}")
        for kind in ("bf16", "fp16")
    ]
