"""The kernel of prefill on Hopper: a warp that loads, two warpgroups that compute; `prefill` says how and launches it.

Scores have a layout MS of BN keys, outputs a layout MO of V columns; rows lie in both in the same way, so that a number
a row goes from one to the other as it is.

Axes: T new tokens (packed over requests), n keys in the workspace, BN keys of a block, N heads, P nope (64 times
BOXES - 1), R = 64 rope, V value.
"""

# ruff: noqa: RUF059  barriers and tiles are unpacked in one order everywhere

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tiers.tier2_triton.hopper.device import LN2, new_barrier, thread_barrier

UNSEEN = gl.constexpr(-3.0e38)  # finite, so that m - m is 0 where nothing was seen
STAGES = gl.constexpr(2)  # blocks of keys and of values that there is room for


def stored(V: int) -> gl.constexpr:
    """Return the layout of 64 rows of V columns for the result: 16 bytes a thread, moved within four threads only."""
    columns, lanes = [[0, 2**i] for i in range(5, V.bit_length() - 1)], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    registers = [[0, 1], [0, 2], [0, 4], *columns, [8, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, V]))


STORED_128, STORED_256 = stored(128), stored(256)


@gluon.jit
def locate(index, tiles, num_tiles, N, together):
    """Entry and head of the index-th piece of work: `together` heads side by side, their tiles in the list's order."""
    first = index // (num_tiles * together) * together
    rest = index - first * num_tiles
    heads = gl.minimum(together, N - first)
    return tiles + rest // heads * 7, first + rest % heads


@gluon.jit
def bounds_of(bounds, span, offset, other, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """How many keys of the span each of ROWS rows from `offset` on sees; `other` past the tile's rows."""
    row, rows, first_key, keys = span
    local = offset + gl.arange(0, ROWS, layout=LAYOUT)
    seen = gl.load(bounds + row + local, mask=local < rows, other=0) - first_key
    return gl.where(local < rows, gl.minimum(gl.maximum(seen, 0), keys), other)


@gluon.jit
def keys_of_tile(bounds, span, WARPS: gl.constexpr):
    """The largest bound of the tile: every warp looks at all rows, so no two have to talk."""
    return gl.max(bounds_of(bounds, span, 0, 0, 128, gl.BlockedLayout([4], [32], [WARPS], [0])), 0)


@gluon.jit
def load_boxes(desc, pe_desc, full, boxes, first, row, column, pe_column, BOXES: gl.constexpr):
    """Rows of P + 64 columns as so many boxes, on one barrier."""
    mbarrier.expect(full, BOXES * boxes.shape[1] * 64 * 2)
    for c in gl.static_range(BOXES - 1):
        tma.async_copy_global_to_shared(desc, [row, column + 64 * c], full, boxes.index(first + c))
    tma.async_copy_global_to_shared(pe_desc, [row, pe_column], full, boxes.index(first + BOXES - 1))


@gluon.jit
def producer(descs, bars, bufs, lists):
    """One warp that keeps copies under way: keys a block ahead of values, and of the next tile at once."""
    q_desc, q_pe_desc, k_desc, k_pe_desc, v_desc = descs
    q0_full, q0_empty, q1_full, q1_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = bars
    q, k, v, slot = bufs
    bounds, tiles, counter, num_tiles, N, together, head_q, head_pe, head_k, head_v = lists
    BOXES: gl.constexpr = q.shape[0] // 2
    BN: gl.constexpr = k.shape[1]
    index = gl.program_id(0)
    turn = 0
    count = 0
    while index < num_tiles * N:
        item, head = locate(index, tiles, num_tiles, N, together)
        row = gl.load(item)
        at = gl.load(item + 2)
        span = (row, gl.load(item + 1), gl.load(item + 4), gl.load(item + 3))
        index = gl.num_programs(0) + gl.atomic_add(counter, 1)
        blocks = gl.maximum((keys_of_tile(bounds, span, 1) + BN - 1) // BN, 1)
        stage = turn % STAGES
        mbarrier.wait(k_empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        load_boxes(k_desc, k_pe_desc, k_full.index(stage), k, stage * BOXES, at, head * head_k, 0, BOXES)
        mbarrier.wait(q0_empty, (count & 1) ^ 1)
        load_boxes(q_desc, q_pe_desc, q0_full, q, 0, row, head * head_q, head * head_pe, BOXES)
        mbarrier.wait(q1_empty, (count & 1) ^ 1)
        load_boxes(q_desc, q_pe_desc, q1_full, q, BOXES, row + 64, head * head_q, head * head_pe, BOXES)
        for _ in range(blocks - 1):
            before = stage
            before_phase = ((turn // STAGES) & 1) ^ 1
            turn += 1
            stage = turn % STAGES
            mbarrier.wait(k_empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            load_boxes(k_desc, k_pe_desc, k_full.index(stage), k, stage * BOXES, at + BN, head * head_k, 0, BOXES)
            mbarrier.wait(v_empty.index(before), before_phase)
            mbarrier.expect(v_full.index(before), BN * v.shape[2] * 2)
            tma.async_copy_global_to_shared(v_desc, [at, head * head_v], v_full.index(before), v.index(before))
            at += BN
        mbarrier.wait(v_empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(stage), BN * v.shape[2] * 2)
        tma.async_copy_global_to_shared(v_desc, [at, head * head_v], v_full.index(stage), v.index(stage))
        turn += 1
        mbarrier.wait(next_empty, (count & 1) ^ 1)
        slot.store(gl.full([1], index, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(next_full, count=1)
        count += 1


@gluon.jit
def scores(q, k, stage, SECOND: gl.constexpr, MS: gl.constexpr):
    """Start q k^T over P + 64 columns, box by box in a loop: unrolled, descriptors are spilled."""
    BOXES: gl.constexpr = q.shape[0] // 2
    BN: gl.constexpr = k.shape[1]
    s = hopper.warpgroup_mma_init(gl.zeros([64, BN], gl.float32, layout=MS))
    for c in range(BOXES):
        keys = k.index(stage * BOXES + c).permute((1, 0))
        s = hopper.warpgroup_mma(q.index(SECOND * BOXES + c), keys, s, is_async=True)
    return s


@gluon.jit
def weigh(s, m, bound, base, scale, EDGE: gl.constexpr):
    """Weights of a block, the factor of what was summed before, and the maximum.

    The mask is a minimum with plus or minus infinity, which is right for keys that are NaN, too; `where` on 64
    comparisons a thread becomes a mask of bits, at twice the instructions.
    """
    if EDGE:
        inside = (bound - base)[:, None] - gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
        s = gl.minimum(s, (inside.to(gl.float32) - 0.5) * float("inf"))
    new = gl.maximum(m, gl.max(s, 1) * scale)
    return gl.exp2(s * scale - new[:, None]), gl.exp2(m - new), new


@gluon.jit
def step(
    o, p, m, total, turn, base, bound, scale, bars, bufs,
    MS: gl.constexpr, MO: gl.constexpr, SECOND: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of block `turn`, and the product of the weights p of the block before with its values.

    Weights go from step to step in float32: as 16-bit numbers each would take a register of its own. The second wait
    for the same values returns at once; without a branch there, ptxas moves the wait for their product before the
    exponentials, and nothing overlaps.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = bars
    q, k, v, slot = bufs
    stage = turn % STAGES
    before = (turn - 1) % STAGES
    before_phase = ((turn - 1) // STAGES) & 1
    mbarrier.wait(k_full.index(stage), (turn // STAGES) & 1)
    s = scores(q, k, stage, SECOND, MS)
    mbarrier.wait(v_full.index(before), before_phase)
    weights = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, MO, 2))
    o = hopper.warpgroup_mma(weights, v.index(before), hopper.warpgroup_mma_init(o), is_async=True)
    s = hopper.warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    p, a, m = weigh(s, m, bound, base, scale, EDGE)
    total = total * a + gl.sum(p, 1)
    mbarrier.wait(v_full.index(before), before_phase)
    o = hopper.warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_empty.index(before), count=1)
    o = o * gl.convert_layout(a, gl.SliceLayout(1, MO))[:, None]
    return o, p, m, total


@gluon.jit
def zero_values(v, first):
    """Zero a block's values from row `first` on, as 0 * NaN is NaN. Both warpgroups do, and write the same."""
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BN: gl.constexpr = v.shape[0]
    rows = gl.arange(0, BN, layout=gl.SliceLayout(1, BL))
    zeros = gl.zeros([BN, 64], v.dtype, layout=BL)
    for c in gl.static_range(v.shape[1] // 64):
        box = v.slice(c * 64, 64, dim=1)
        box.store(gl.where((rows < first)[:, None], box.load(BL), zeros))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def in_acc(item, head, local, results, V: gl.constexpr, MO: gl.constexpr):
    """Where the rows of the tile lie in the accumulator."""
    acc, out, lse, acc_t, acc_n, out_t, out_n, lse_t, lse_n = results
    columns = gl.arange(0, V, layout=gl.SliceLayout(0, MO))
    start = acc + (gl.load(item + 5).to(gl.int64) * acc_t + head.to(gl.int64) * acc_n)
    return start + local.to(gl.int64)[:, None] * acc_t + columns[None, :]


@gluon.jit
def store_rows(o, item, head, local, results, OFFSET: gl.constexpr):
    """Write 64 rows: in float32 to go on from, or to the result."""
    acc, out, lse, acc_t, acc_n, out_t, out_n, lse_t, lse_n = results
    row = gl.load(item)
    rows = gl.load(item + 1)
    V: gl.constexpr = o.shape[1]
    MO: gl.constexpr = o.type.layout
    if (gl.load(item + 6) & 2) != 0:
        gl.store(in_acc(item, head, local, results, V, MO), o, mask=(local < rows)[:, None])
    else:
        VL: gl.constexpr = STORED_128 if V == 128 else STORED_256
        values = gl.convert_layout(o.to(out.dtype.element_ty), VL)
        r = OFFSET + gl.arange(0, 64, layout=gl.SliceLayout(1, VL))
        columns = gl.arange(0, V, layout=gl.SliceLayout(0, VL))
        start = out + (row.to(gl.int64) * out_t + head.to(gl.int64) * out_n)
        gl.store(start + r.to(gl.int64)[:, None] * out_t + columns[None, :], values, mask=(r < rows)[:, None])


@gluon.jit
def begin(
    item, head, bounds, results, OFFSET: gl.constexpr, BN: gl.constexpr, V: gl.constexpr, MS: gl.constexpr,
    MO: gl.constexpr,
):  # fmt: skip
    """What 64 rows of a tile see, how many blocks need no mask, and the state that they go on from."""
    acc, out, lse, acc_t, acc_n, out_t, out_n, lse_t, lse_n = results
    row = gl.load(item)
    rows = gl.load(item + 1)
    keys = gl.load(item + 3)
    span = (row, rows, gl.load(item + 4), keys)
    goes_on = (gl.load(item + 6) & 1) != 0
    most = keys_of_tile(bounds, span, 4)
    seen = bounds_of(bounds, span, OFFSET, keys, 64, gl.BlockedLayout([2], [32], [4], [0]))
    # a row that has seen earlier keys but none of these is masked everywhere; one without any is zeroed at the end
    lowest = gl.min(gl.where((seen > 0) | goes_on, seen, keys), 0)
    plain = gl.minimum(gl.maximum(lowest // BN, 1), gl.maximum((most + BN - 1) // BN, 1))
    bound = bounds_of(bounds, span, OFFSET, keys, 64, gl.SliceLayout(1, MS))
    local = OFFSET + gl.arange(0, 64, layout=gl.SliceLayout(1, MS))
    at_lse = lse + row.to(gl.int64) * lse_t + head.to(gl.int64) * lse_n + local * lse_t
    earlier = gl.load(at_lse, mask=(local < rows) & goes_on, other=float("-inf"))
    has = earlier > float("-inf")
    m = gl.where(has, earlier / LN2, UNSEEN)
    o = gl.zeros([64, V], gl.float32, layout=MO)
    if goes_on:
        there = gl.convert_layout(has, gl.SliceLayout(1, MO))
        at = in_acc(item, head, gl.convert_layout(local, gl.SliceLayout(1, MO)), results, V, MO)
        o = gl.load(at, mask=there[:, None], other=0.0)
    return bound, local, has, most, plain, at_lse, m, o


@gluon.jit
def consumer(
    bars, bufs, lists, scale, results,
    MS: gl.constexpr, MO: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Four warps that compute the first or the second 64 rows of tile after tile."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = bars
    q, k, v, slot = bufs
    bounds, tiles, counter, num_tiles, N, together, head_q, head_pe, head_k, head_v = lists
    OFFSET: gl.constexpr = 64 * SECOND
    BN: gl.constexpr = k.shape[1]
    V: gl.constexpr = v.shape[2]
    RO: gl.constexpr = gl.SliceLayout(1, MO)
    index = gl.program_id(0)
    turn, count = 0, 0
    while index < num_tiles * N:
        item, head = locate(index, tiles, num_tiles, N, together)
        bound, local, has, most, plain, at_lse, m, o = begin(item, head, bounds, results, OFFSET, BN, V, MS, MO)
        blocks = gl.maximum((most + BN - 1) // BN, 1)
        stage = turn % STAGES
        mbarrier.wait(q_full, count & 1)
        mbarrier.wait(k_full.index(stage), (turn // STAGES) & 1)
        s = hopper.warpgroup_mma_wait(0, deps=[scores(q, k, stage, SECOND, MS)])
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, a, m = weigh(s, m, bound, 0, scale, True)
        total = gl.where(has, a, 0.0) + gl.sum(p, 1)
        o = o * gl.convert_layout(a, RO)[:, None]
        turn += 1
        base = BN
        for _ in range(plain - 1):
            o, p, m, total = step(o, p, m, total, turn, base, bound, scale, bars, bufs, MS, MO, SECOND, False)
            turn, base = turn + 1, base + BN
        for _ in range(blocks - plain):
            o, p, m, total = step(o, p, m, total, turn, base, bound, scale, bars, bufs, MS, MO, SECOND, True)
            turn, base = turn + 1, base + BN
        mbarrier.arrive(q_empty, count=1)
        stage = (turn - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((turn - 1) // STAGES) & 1)
        if base > most:
            zero_values(v.index(stage), most - (base - BN))
        weights = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, MO, 2))
        o = hopper.warpgroup_mma(weights, v.index(stage), hopper.warpgroup_mma_init(o), is_async=True)
        mbarrier.wait(next_full, count & 1)
        index = gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(next_empty, count=1)
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(stage), count=1)
        count += 1
        some = (bound > 0) | has
        total = gl.where(some, total, 1.0)
        o = gl.where(gl.convert_layout(some, RO)[:, None], o * gl.convert_layout(1.0 / total, RO)[:, None], 0.0)
        gl.store(at_lse, gl.where(some, (m + gl.log2(total)) * LN2, float("-inf")), mask=local < gl.load(item + 1))
        store_rows(o, item, head, gl.convert_layout(local, RO), results, OFFSET)


@gluon.jit
def new_stages(COUNT: gl.constexpr):
    """A barrier for each stage, complete after COUNT arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(found.index(i), count=COUNT)
    return found


@gluon.jit(
    do_not_specialize=["num_tiles", "N", "together", "head_q", "head_pe", "head_k", "head_v", "lse_t", "lse_n"],
    do_not_specialize_on_alignment=["bounds", "tiles"],
)
def _prefill_kernel(
    q_desc, q_pe_desc, k_desc, k_pe_desc, v_desc, bounds, tiles, counter, acc, out, lse, num_tiles, N, together,
    head_q, head_pe, head_k, head_v, acc_t, acc_n, out_t, out_n, lse_t, lse_n, scale,
    BOXES: gl.constexpr, BN: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    MS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    MO: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V, 16])
    DT: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(DT, [2 * BOXES, 64, 64], q_desc.layout)
    k = gl.allocate_shared_memory(DT, [STAGES * BOXES, BN, 64], k_desc.layout)
    v = gl.allocate_shared_memory(DT, [STAGES, BN, V], v_desc.layout)
    slot = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    next_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(next_empty, count=2)
    query0, query1 = (new_barrier(), new_barrier()), (new_barrier(), new_barrier())
    blocks = (new_stages(1), new_stages(2), new_stages(1), new_stages(2))
    following = (new_barrier(), next_empty)
    bufs, descs = (q, k, v, slot), (q_desc, q_pe_desc, k_desc, k_pe_desc, v_desc)
    lists = (bounds, tiles, counter, num_tiles, N, together, head_q, head_pe, head_k, head_v)
    results = (acc, out, lse, acc_t, acc_n, out_t, out_n, lse_t, lse_n)
    gl.warp_specialize(
        [
            (consumer, (query0 + blocks + following, bufs, lists, scale, results, MS, MO, False)),
            (consumer, (query1 + blocks + following, bufs, lists, scale, results, MS, MO, True)),
            (producer, (descs, query0 + query1 + blocks + following, bufs, lists)),
        ],
        [4, 1],
        [240, 24],
    )
