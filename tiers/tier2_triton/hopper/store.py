"""How a tile of 64 rows leaves `seesaw`: divided, to the result, or as a state of float32 for `combine`.

A warpgroup has half of the columns. A state is written in the order in which registers hold it, so that a warp's store
is one stretch of 512 bytes: 8 rows lie together, of them 16 columns at a time, of those row after row, and of a row the
four numbers that one thread has, which are columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. `combine` reads that order.

Axes: 64 rows (token, head) of a tile, 256 columns of a warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tiers.tier2_triton.hopper.device import LN2


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
        # 16 bytes a thread, moved within four threads only: 128 bytes a row were no faster and take 4 KB more
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
        HELD: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 128], [0, 256], [0, 512], [0, 1024], [1, 0]],
            lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
            warp_bases=[[2, 0], [4, 0]],
            block_bases=[],
            shape=[8, 2048],
        )
        state = o.reshape([8, 8, 16, 2, 4, 2]).permute((0, 2, 1, 4, 3, 5)).reshape([8, 2048])  # moves nothing
        eights = gl.arange(0, 8, layout=gl.SliceLayout(1, HELD))
        inner = gl.arange(0, 2048, layout=gl.SliceLayout(0, HELD))
        to_part = part_out + slot_row.to(gl.int64) * 512 + COLUMN * 8
        gl.store(to_part + eights[:, None] * 4096 + inner[None, :], gl.convert_layout(state, HELD))
        if COLUMN == 0:
            gl.store(part_lse + slot_row + offr, log2_sum)
