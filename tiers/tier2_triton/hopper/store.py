"""How a tile of 64 rows leaves `seesaw`: divided, to the result, or as a state of float32 for `combine`.

A warpgroup has half of the columns. A state is written as the registers lie, 32 bytes a row at once. In an order of its
own, 512 bytes a warp at once, the kernel ended 3 us earlier and the merge, which must read that order, 3 us later.

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
        slots = slot_row.to(gl.int64) + gl.arange(0, 64, layout=RO)
        at_column = COLUMN + gl.arange(0, 256, layout=gl.SliceLayout(0, MO))
        gl.store(part_out + slots[:, None] * 512 + at_column[None, :], o)
        if COLUMN == 0:
            gl.store(part_lse + slot_row + offr, log2_sum)
