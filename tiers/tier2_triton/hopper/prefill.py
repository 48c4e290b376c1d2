"""Attention of the expanded form on Hopper: one warp that loads, two warpgroups that compute 64 rows each.

Motivation. With whole keys and values at hand the tensor cores are the bound, and exponentials come next: 128 x 128
scores cost 2,560 cycles of products and 1,024 of exponentials, so the two have to overlap. The portable kernel
(`kernels.prefill`) takes the same work list; this one is for P, R, V = 128, 64, 128.

Idea. A warpgroup starts the scores of the next block of keys and then the product of this one's weights and values,
waits for the scores only, and does their softmax while the second product runs. Two warpgroups share the blocks and
fill each other's gaps. Keys are three boxes of 64 columns, two of k_nope and one of k_pe, which all heads share, so
nothing is concatenated. A program takes tile after tile, as a counter says, and loads the next one while it writes the
last. Heads that run side by side are so few that their keys and values stay in L2. The barriers are

    q0_full, q0_empty, q1_full, q1_empty    the query rows of either warpgroup, one phase a tile
    k_full, k_empty, v_full, v_empty        of each stage; empty when both warpgroups have said so
    next_full, next_empty                   the number of the next tile
    own_turn, other_turn                    if TURNS, who may start products: the other, as soon as one has started its

Masks are in the first block and in those past the lowest bound. Source: FlashAttention-3 (arXiv 2407.08608), algorithm
2 and section 3.1; DeepSeek-V2 (arXiv 2405.04434), eqs. 9 to 18.

Axes: T new tokens (packed over requests), n keys in the workspace, N heads, P = 128 nope, R = 64 rope, V = 128 value.
"""

# ruff: noqa: RUF059  barriers and tiles are unpacked in one order everywhere

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mla.aot import Compile
from mla.errors import bad
from tiers.tier2_triton.hopper.decode import tile as descriptor
from tiers.tier2_triton.hopper.device import LN2, new_barrier, thread_barrier
from tiers.tier2_triton.kernels.prefill import PrefillTile, spans_problem
from tiers.tier2_triton.kernels.prefill import prefill_reference as portable_reference
from tiers.tier2_triton.kernels.problem import Problem
from tiers.tier2_triton.launch import processors

UNSEEN = gl.constexpr(-3.0e38)  # finite, so that m - m is 0 where nothing was seen
BN, STAGES = gl.constexpr(128), gl.constexpr(2)  # keys of a block, and how many blocks there is room for
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
ROWS_LAYOUT = gl.constexpr(gl.SliceLayout(1, LAYOUT.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, LAYOUT.value, 2))
L2_BYTES = 32 << 20  # what keys and values of the heads side by side may take


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
def load_boxes(desc, pe_desc, full, boxes, FIRST, row, column, pe_column, ROWS: gl.constexpr):
    """ROWS rows of 128 + 64 columns as three boxes, on one barrier."""
    mbarrier.expect(full, ROWS * 192 * 2)
    tma.async_copy_global_to_shared(desc, [row, column], full, boxes.index(FIRST))
    tma.async_copy_global_to_shared(desc, [row, column + 64], full, boxes.index(FIRST + 1))
    tma.async_copy_global_to_shared(pe_desc, [row, pe_column], full, boxes.index(FIRST + 2))


@gluon.jit
def producer(descs, bars, bufs, lists, STAYS: gl.constexpr):
    """One warp that keeps copies under way: keys a block ahead of values, and of the next tile at once."""
    q_desc, q_pe_desc, k_desc, k_pe_desc, v_desc = descs
    q0_full, q0_empty, q1_full, q1_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = bars
    q, k, v, slot = bufs
    bounds, tiles, counter, num_tiles, N, together, head_q, head_pe, head_k, head_v = lists
    index = gl.program_id(0)
    turn = 0
    count = 0
    while index < num_tiles * N:
        item, head = locate(index, tiles, num_tiles, N, together)
        row = gl.load(item)
        at = gl.load(item + 2)
        span = (row, gl.load(item + 1), gl.load(item + 4), gl.load(item + 3))
        if STAYS:
            index = gl.num_programs(0) + gl.atomic_add(counter, 1)
        else:
            index = num_tiles * N
        blocks = gl.maximum((keys_of_tile(bounds, span, 1) + BN - 1) // BN, 1)
        stage = turn % STAGES
        mbarrier.wait(k_empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        load_boxes(k_desc, k_pe_desc, k_full.index(stage), k, stage * 3, at, head * head_k, 0, BN)
        mbarrier.wait(q0_empty, (count & 1) ^ 1)
        load_boxes(q_desc, q_pe_desc, q0_full, q, 0, row, head * head_q, head * head_pe, 64)
        mbarrier.wait(q1_empty, (count & 1) ^ 1)
        load_boxes(q_desc, q_pe_desc, q1_full, q, 3, row + 64, head * head_q, head * head_pe, 64)
        for _ in range(blocks - 1):
            before = stage
            before_phase = ((turn // STAGES) & 1) ^ 1
            turn += 1
            stage = turn % STAGES
            mbarrier.wait(k_empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            load_boxes(k_desc, k_pe_desc, k_full.index(stage), k, stage * 3, at + BN, head * head_k, 0, BN)
            mbarrier.wait(v_empty.index(before), before_phase)
            mbarrier.expect(v_full.index(before), BN * 128 * 2)
            tma.async_copy_global_to_shared(v_desc, [at, head * head_v], v_full.index(before), v.index(before))
            at += BN
        mbarrier.wait(v_empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(stage), BN * 128 * 2)
        tma.async_copy_global_to_shared(v_desc, [at, head * head_v], v_full.index(stage), v.index(stage))
        turn += 1
        if STAYS:
            mbarrier.wait(next_empty, (count & 1) ^ 1)
            slot.store(gl.full([1], index, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
            mbarrier.arrive(next_full, count=1)
        count += 1


@gluon.jit
def scores(q, k, stage, FIRST: gl.constexpr):
    """Start q k^T over 192 columns, box by box in a loop: unrolled, descriptors are spilled."""
    s = hopper.warpgroup_mma_init(gl.zeros([64, BN], gl.float32, layout=LAYOUT))
    for c in range(3):
        s = hopper.warpgroup_mma(q.index(FIRST + c), k.index(stage * 3 + c).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def weigh(s, m, bound, base, scale, EDGE: gl.constexpr):
    """Weights of a block, the factor of what was summed before, and the maximum.

    The mask is a minimum with plus or minus infinity, which is right for keys that are NaN, too; `where` on 64
    comparisons a thread becomes a mask of bits, at twice the instructions.
    """
    if EDGE:
        inside = (bound - base)[:, None] - gl.arange(0, BN, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        s = gl.minimum(s, (inside.to(gl.float32) - 0.5) * float("inf"))
    new = gl.maximum(m, gl.max(s, 1) * scale)
    return gl.exp2(s * scale - new[:, None]), gl.exp2(m - new), new


@gluon.jit
def step(
    o, p, m, total, turn, steps, base, bound, scale, bars, bufs, TURNS: gl.constexpr, SECOND: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of block `turn`, and the product of the weights p of the block before with its values.

    Weights go from step to step in float32: as 16-bit numbers each would take a register of its own. The second wait
    for the same values returns at once; without a branch there, ptxas moves the wait for their product before the
    exponentials, and nothing overlaps.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty, own_turn, other_turn = bars
    q, k, v, slot = bufs
    stage = turn % STAGES
    before = (turn - 1) % STAGES
    before_phase = ((turn - 1) // STAGES) & 1
    mbarrier.wait(k_full.index(stage), (turn // STAGES) & 1)
    if TURNS:
        mbarrier.wait(own_turn, (steps & 1) ^ (1 - SECOND))
    s = scores(q, k, stage, 3 * SECOND)
    mbarrier.wait(v_full.index(before), before_phase)
    weights = gl.convert_layout(p.to(v.dtype), WEIGHTS)
    o = hopper.warpgroup_mma(weights, v.index(before), hopper.warpgroup_mma_init(o), is_async=True)
    if TURNS:
        mbarrier.arrive(other_turn, count=1)
    s = hopper.warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    p, a, m = weigh(s, m, bound, base, scale, EDGE)
    total = total * a + gl.sum(p, 1)
    mbarrier.wait(v_full.index(before), before_phase)
    o = hopper.warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_empty.index(before), count=1)
    o = o * a[:, None]
    return o, p, m, total


@gluon.jit
def zero_values(v, first):
    """Zero a block's values from row `first` on, as 0 * NaN is NaN. Both warpgroups do, and write the same."""
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, BN, layout=gl.SliceLayout(1, BL))
    zeros = gl.zeros([BN, 64], v.dtype, layout=BL)
    for c in gl.static_range(2):
        box = v.slice(c * 64, 64, dim=1)
        box.store(gl.where((rows < first)[:, None], box.load(BL), zeros))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def in_acc(item, head, local, results):
    """Where the rows of the tile lie in the accumulator."""
    acc, out, lse, acc_t, acc_n, out_t, out_n, lse_t, lse_n = results
    columns = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    start = acc + (gl.load(item + 5).to(gl.int64) * acc_t + head.to(gl.int64) * acc_n)
    return start + local.to(gl.int64)[:, None] * acc_t + columns[None, :]


@gluon.jit
def store_rows(o, item, head, local, results, OFFSET: gl.constexpr):
    """Write 64 rows: in float32 to go on from, or to the result, 16 bytes a thread, moved within four threads only."""
    acc, out, lse, acc_t, acc_n, out_t, out_n, lse_t, lse_n = results
    row = gl.load(item)
    rows = gl.load(item + 1)
    if (gl.load(item + 6) & 2) != 0:
        gl.store(in_acc(item, head, local, results), o, mask=(local < rows)[:, None])
    else:
        VL: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]], [], [64, 128],
        )  # fmt: skip
        values = gl.convert_layout(o.to(out.dtype.element_ty), VL)
        r = OFFSET + gl.arange(0, 64, layout=gl.SliceLayout(1, VL))
        columns = gl.arange(0, 128, layout=gl.SliceLayout(0, VL))
        start = out + (row.to(gl.int64) * out_t + head.to(gl.int64) * out_n)
        gl.store(start + r.to(gl.int64)[:, None] * out_t + columns[None, :], values, mask=(r < rows)[:, None])


@gluon.jit
def begin(item, head, bounds, results, OFFSET: gl.constexpr):
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
    bound = bounds_of(bounds, span, OFFSET, keys, 64, ROWS_LAYOUT)
    local = OFFSET + gl.arange(0, 64, layout=ROWS_LAYOUT)
    at_lse = lse + row.to(gl.int64) * lse_t + head.to(gl.int64) * lse_n + local * lse_t
    earlier = gl.load(at_lse, mask=(local < rows) & goes_on, other=float("-inf"))
    has = earlier > float("-inf")
    m = gl.where(has, earlier / LN2, UNSEEN)
    o = gl.zeros([64, 128], gl.float32, layout=LAYOUT)
    if goes_on:
        o = gl.load(in_acc(item, head, local, results), mask=has[:, None], other=0.0)
    return bound, local, has, most, plain, at_lse, m, o


@gluon.jit
def consumer(
    bars, bufs, lists, scale, results, STAYS: gl.constexpr, TURNS: gl.constexpr, SECOND: gl.constexpr
):  # fmt: skip
    """Four warps that compute the first or the second 64 rows of tile after tile."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty, own_turn, other_turn = bars
    q, k, v, slot = bufs
    bounds, tiles, counter, num_tiles, N, together, head_q, head_pe, head_k, head_v = lists
    OFFSET: gl.constexpr = 64 * SECOND
    index = gl.program_id(0)
    turn, steps, count = 0, 0, 0
    while index < num_tiles * N:
        item, head = locate(index, tiles, num_tiles, N, together)
        bound, local, has, most, plain, at_lse, m, o = begin(item, head, bounds, results, OFFSET)
        blocks = gl.maximum((most + BN - 1) // BN, 1)
        stage = turn % STAGES
        mbarrier.wait(q_full, count & 1)
        mbarrier.wait(k_full.index(stage), (turn // STAGES) & 1)
        s = hopper.warpgroup_mma_wait(0, deps=[scores(q, k, stage, 3 * SECOND)])
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, a, m = weigh(s, m, bound, 0, scale, True)
        total = gl.where(has, a, 0.0) + gl.sum(p, 1)
        o = o * a[:, None]
        turn += 1
        base = BN
        for _ in range(plain - 1):
            o, p, m, total = step(o, p, m, total, turn, steps, base, bound, scale, bars, bufs, TURNS, SECOND, False)
            turn, steps, base = turn + 1, steps + 1, base + BN
        for _ in range(blocks - plain):
            o, p, m, total = step(o, p, m, total, turn, steps, base, bound, scale, bars, bufs, TURNS, SECOND, True)
            turn, steps, base = turn + 1, steps + 1, base + BN
        mbarrier.arrive(q_empty, count=1)
        stage = (turn - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((turn - 1) // STAGES) & 1)
        if base > most:
            zero_values(v.index(stage), most - (base - BN))
        weights = gl.convert_layout(p.to(v.dtype), WEIGHTS)
        o = hopper.warpgroup_mma(weights, v.index(stage), hopper.warpgroup_mma_init(o), is_async=True)
        if STAYS:
            mbarrier.wait(next_full, count & 1)
            index = gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            mbarrier.arrive(next_empty, count=1)
        else:
            index = num_tiles * N
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(stage), count=1)
        count += 1
        some = (bound > 0) | has
        total = gl.where(some, total, 1.0)
        o = gl.where(some[:, None], o * (1.0 / total)[:, None], 0.0)
        gl.store(at_lse, gl.where(some, (m + gl.log2(total)) * LN2, float("-inf")), mask=local < gl.load(item + 1))
        store_rows(o, item, head, local, results, OFFSET)


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
    STAYS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    DT: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(DT, [6, 64, 64], q_desc.layout)
    k = gl.allocate_shared_memory(DT, [3 * STAGES, BN, 64], k_desc.layout)
    v = gl.allocate_shared_memory(DT, [STAGES, BN, 128], v_desc.layout)
    slot = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    next_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(next_empty, count=2)
    query0, query1 = (new_barrier(), new_barrier()), (new_barrier(), new_barrier())
    blocks = (new_stages(1), new_stages(2), new_stages(1), new_stages(2))
    following, turn0, turn1 = (new_barrier(), next_empty), new_barrier(), new_barrier()
    bars0 = query0 + blocks + following + (turn0, turn1)
    bars1 = query1 + blocks + following + (turn1, turn0)
    bufs, descs = (q, k, v, slot), (q_desc, q_pe_desc, k_desc, k_pe_desc, v_desc)
    lists = (bounds, tiles, counter, num_tiles, N, together, head_q, head_pe, head_k, head_v)
    results = (acc, out, lse, acc_t, acc_n, out_t, out_n, lse_t, lse_n)
    gl.warp_specialize(
        [
            (consumer, (bars0, bufs, lists, scale, results, STAYS, TURNS, False)),
            (consumer, (bars1, bufs, lists, scale, results, STAYS, TURNS, True)),
            (producer, (descs, query0 + query1 + blocks + following, bufs, lists, STAYS)),
        ],
        [4, 1],
        [240, 24],
    )


class HopperTile(NamedTuple):
    """Rows (128); `stays`: a program takes tile after tile; `turns`: warpgroups start their products in turns."""

    block_m: int = 128
    stays: bool = True
    turns: bool = False


TILE = HopperTile()
TOY = ((0, 221, 0, 337, 0, 0, 0), (221, 65, 337, 129, 16, 221, 1), (286, 190, 466, 200, 0, 286, 2), (476, 3) + (0,) * 5)
TILES = (TILE, HopperTile(turns=True), HopperTile(stays=False), HopperTile(stays=False, turns=True))


def prefill(
    q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, row_kv_lens: Tensor, tiles: Tensor,
    acc: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, tile: tuple[int, bool, bool] = TILE,
    together: int | None = None,
) -> None:  # fmt: skip
    """Attend as `kernels.prefill.prefill` does, with the same work list: `softmax(scale q k^T) v` over every tile.

    q_nope (T, N, 128), q_pe (T, N, 64), k_nope (n, N, 128), k_pe (n, 64) and v (n, N, 128), all bfloat16 or all
    float16; row_kv_lens (T,) and tiles (num_tiles, 7) int32, tiles of at most 128 rows; acc (A, N, 128) float32, out
    (T, N, 128) of any float dtype, lse (T, N) float32, natural log. `together` is how many heads run side by side.
    Queries that a descriptor cannot describe are copied; raises ValueError for keys and values that it cannot.
    """
    if tiles.shape[0] == 0:
        return
    _, stays, turns = tile
    N, n = q_nope.shape[1], max(1, k_nope.shape[0])
    if not k_nope.shape[0]:  # a descriptor of nothing is refused; what it describes instead is masked
        k_nope, k_pe, v = (x.new_zeros(1, *x.shape[1:]) for x in (k_nope, k_pe, v))
    q, pe = (x if isinstance(matrix_of(x, x.shape[2]), Tensor) else x.contiguous().clone() for x in (q_nope, q_pe))
    given = (("q_nope", q, 128, 64), ("q_pe", pe, 64, 64), ("k_nope", k_nope, 128, 128), ("k_pe", k_pe, 64, 128))
    descriptors = []
    for name, x, width, rows in (*given, ("v", v, 128, 128)):
        if not isinstance(found := matrix_of(x if x.dim() == 3 else x.unsqueeze(1), width), Tensor):
            raise bad(name, expected=f"aligned rows of {width} columns a head", got=found, fix="use route 'triton'")
        descriptors.append(descriptor(found, rows, width if name == "v" else 64))
    together = max(1, min(N, together or L2_BYTES // (n * 2 * (128 + 128))))
    grid = min(tiles.shape[0] * N, processors(str(q.device)) if stays else 2**31 - 1)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    _prefill_kernel[(grid,)](
        *descriptors, row_kv_lens, tiles, counter, acc, out, lse, tiles.shape[0], N, together,
        q.stride(1), pe.stride(1), k_nope.stride(1), v.stride(1), *acc.stride()[:2], *out.stride()[:2], *lse.stride(),
        softmax_scale / LN2.value, stays, turns, num_warps=4,
    )  # fmt: skip


def matrix_of(x: Tensor, width: int) -> Tensor | str:
    """View x (rows, N, C) as a matrix (rows, N heads side by side), or say why a descriptor cannot describe it."""
    size, columns = x.element_size(), (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    apart = x.stride(0) if x.shape[0] > 1 else -(-columns // 8) * 8
    if x.shape[2] != width or x.dtype not in (torch.bfloat16, torch.float16):
        return f"{tuple(x.shape)} of {x.dtype}"
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) < width) or apart < columns:
        return f"strides {x.stride()}, where heads do not lie side by side in a row"
    if x.data_ptr() % 16 or apart * size % 16 or (x.shape[1] > 1 and x.stride(1) * size % 16):
        return f"strides {x.stride()}, {x.data_ptr() % 16} bytes past a multiple of 16"
    return x.as_strided((x.shape[0], columns), (apart, 1))


def prefill_reference(**arguments: Any) -> None:
    """Define `prefill` as the portable kernel is defined, for q_nope (T, N, P) and so on."""
    portable_reference(**arguments)


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """One call: "toy", odd sizes and all flags, or "real", 16384 causal rows; tensors such as q_nope (T, N, 128)."""
    spans, N = (TOY, 3) if size == "toy" else (((0, 16384, 0, 16384, 0, 0, 0),), 128)
    found = spans_problem(spans, (N, 128, 64, 128), PrefillTile(128, 128, 4, 2, 1), dtype, device, seed)
    found.arguments["tile"] = TILE
    return found


def aot() -> list[Compile]:
    """What is launched by default, per dtype; heads, lengths and most strides are numbers."""
    return [compile_entry(kind, TILE) for kind in ("bf16", "fp16")]


def compile_entry(kind: str, tile: HopperTile, out: str = "") -> Compile:
    """What `prefill` launches for tensors of `kind` with this tile, and results of type `out` (of the same)."""
    dtype = {"bf16": gl.bfloat16, "fp16": gl.float16}[kind]
    layout = lambda *shape: gl.NVMMASharedLayout.get_default_for(list(shape), dtype)
    matrix = lambda *shape: f"tensordesc<{kind}[{shape[0]}, {shape[1]}],{layout(*shape)!r}>"
    found = dict.fromkeys(("q_desc", "q_pe_desc"), matrix(64, 64)) | {"v_desc": matrix(128, 128), "scale": "fp32"}
    found |= dict.fromkeys(("k_desc", "k_pe_desc"), matrix(128, 64)) | {"out": f"*{out or kind}"}
    found |= dict.fromkeys(("bounds", "tiles", "counter"), "*i32") | dict.fromkeys(("acc", "lse"), "*fp32")
    found |= dict.fromkeys(("num_tiles", "N", "together", "head_q", "head_pe", "head_k", "head_v"), "i32")
    found |= dict.fromkeys(("lse_t", "lse_n"), "i32") | dict.fromkeys(("acc_t", "acc_n", "out_t", "out_n"), "i32:16")
    constants = {"STAYS": tile.stays, "TURNS": tile.turns}
    name = f"prefill {kind}{' to ' + out if out else ''}{', stays' * tile.stays}{', in turns' * tile.turns}"
    return Compile(_prefill_kernel, found, constants, 4, targets=("sm_90",), name=name)
