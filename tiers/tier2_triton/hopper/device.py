"""What the Hopper kernels share on the device: names of Gluon that moved, lists of work, barriers, tiles in boxes.

Axes: n keys of a tile (64), M rows of queries.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

LN2 = gl.constexpr(0.6931471805599453)
MASKED = gl.constexpr(-1e30)  # a score that no key has; -inf would make NaN of rows that see nothing
# Fields of an entry of work, and of a part: `schedule` fills them.
FIELDS = gl.constexpr(16)
REQUEST, ROW, ROWS, BLOCKS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
START, KEYS, LEAST, EVEN_PAGE, ODD_PAGE = (gl.constexpr(i) for i in (4, 5, 6, 7, 8))
ENTRY, COUNT, FIRST, LAST, STRETCH = (gl.constexpr(i) for i in (9, 10, 11, 12, 13))

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # 3.6 and 3.7 call it differently


@triton.jit
def cut(x, blocks):
    """The block at which a unit is cut, `x` blocks after its first: an even one, or its end."""
    return gl.where(x >= blocks, blocks, gl.maximum(x, 0) // 2 * 2)


@gluon.jit
def new_barrier():
    """A barrier of its own; one out of an array costs a wait of all warps."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    return bar


@gluon.jit
def boxes(buffer, M: gl.constexpr):
    """A tile of M x 256 as its four boxes of M x 64, which is how it lies in shared memory."""
    return buffer._reinterpret(buffer.dtype, [4, M, 64], gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def zero_rows(buffer, first):
    """Zero the rows of a tile of 64 x 256 from `first` on: 0 * NaN is NaN, so a weight of 0 is not enough."""
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, BL))
    zeros = gl.zeros([64, 64], buffer.dtype, layout=BL)
    for c in gl.static_range(4):
        box = buffer.slice(c * 64, 64, dim=1)
        box.store(gl.where((rows < first)[:, None], box.load(BL), zeros))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def pool_row(page, block, page_rows, PAGE: gl.constexpr):
    """Row of the pool at which a block of 64 keys begins; pages lie `page_rows` rows apart."""
    return page * page_rows + block % (PAGE // 64) * 64


@gluon.jit
def cache_row(table, block, page_rows, PAGE: gl.constexpr):
    """The same for a block of the request whose pages `table` lists."""
    return pool_row(gl.load(table + block // (PAGE // 64)), block, page_rows, PAGE)


@gluon.jit
def load_query(q_desc, q_pe_desc, row, full, left, right, rope, wanted, M: gl.constexpr):
    """M rows of absorbed queries and their rope part, on one barrier."""
    mbarrier.expect(full, M * 576 * 2, pred=wanted)
    tma.async_copy_global_to_shared(q_desc, [row, 0], full, left, pred=wanted)
    tma.async_copy_global_to_shared(q_desc, [row, 256], full, right, pred=wanted)
    tma.async_copy_global_to_shared(q_pe_desc, [row, 0], full, rope, pred=wanted)


def signature(kind: str, M: int) -> dict[str, str]:
    """Return the types of the arguments that both decode kernels have, for rows of `kind` and tiles of M rows."""
    kinds = {"bf16": gl.bfloat16, "fp16": gl.float16}
    tile = lambda rows, columns: (
        f"tensordesc<{kind}[{rows}, {columns}],{gl.NVMMASharedLayout.get_default_for([rows, columns], kinds[kind])!r}>"
    )
    found = {"q_desc": tile(M, 256), "q_pe_desc": tile(M, 64), "rows_desc": tile(64, 256), "box_desc": tile(64, 64)}
    found |= dict.fromkeys(("table", "bounds", "work", "part"), "*i32") | {"out": f"*{kind}", "scale": "fp32"}
    found |= dict.fromkeys(("lse", "part_out", "part_lse"), "*fp32")
    return found | dict.fromkeys(("table_stride", "page_rows", "N"), "i32") | ({"TILES": "i32"} if M == 64 else {})
