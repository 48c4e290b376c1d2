"""What the Hopper kernels share on the device: names of Gluon that moved, lists of work, barriers, tiles in boxes.

A number that is carried from one turn of a loop to the next, and used for nothing but the bounds of a loop within, is
taken for unused by Triton 3.6 and 3.7 and keeps its first value. So bounds are made of what is loaded in the same turn,
or of numbers that are used for something else too.

Axes: n keys of a tile (64), M rows of queries.
"""

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
def launch_next():
    """Let the merge be launched from now on; it waits by itself for the end of this kernel."""
    asm: gl.constexpr = "griddepcontrol.launch_dependents; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ask_for(ahead, spot, wanted, PAGE: gl.constexpr):
    """Ask L2 for this tile's share of the block at `spot`, rows that lie one behind the other; one thread asks."""
    if PAGE >= 64:
        data, rows = ahead
        thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        at = data + (spot + 0 * thread).to(gl.int64) * 576
        size = gl.where((thread == 0) & wanted, rows * 1152, 0)
        asm: gl.constexpr = (
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
        )
        gl.inline_asm_elementwise(asm, "=r,l,r", [at, size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def spot_of(page, pages, block, page_rows, PAGE: gl.constexpr):
    """Where a block of 64 keys lies: its row of the pool, or where in the table its pages of less than 64 rows begin.

    `page` is the page it lies in, `pages` where in the table those of its request begin; pages are `page_rows` apart.
    """
    if PAGE >= 64:
        return page * page_rows + block % (PAGE // 64) * 64
    else:
        return pages + block * (64 // PAGE)


@gluon.jit
def find_spot(table, pages, block, page_rows, PAGE: gl.constexpr):
    """The same where the page is not known yet."""
    page = 0
    if PAGE >= 64:
        page = gl.load(table + pages + block // (PAGE // 64))
    return spot_of(page, pages, block, page_rows, PAGE)


@gluon.jit
def last_page(pages, keys, PAGE: gl.constexpr):
    """Where in the table the page of a request's last key stands; what stands behind it may be anything."""
    return pages + gl.maximum(keys - 1, 0) // PAGE


@gluon.jit
def load_keys(pool, spot, top, column, full, buffer, wanted, COLUMNS: gl.constexpr, PAGE: gl.constexpr):
    """Copy 64 keys, COLUMNS = 256 or 64 columns of them from `column` on; by boxes of a page where pages are small."""
    rows_desc, box_desc, table, page_rows = pool
    if PAGE >= 64:
        desc = rows_desc if COLUMNS == 256 else box_desc
        tma.async_copy_global_to_shared(desc, [spot, column], full, buffer, pred=wanted)
    else:
        K: gl.constexpr = 64 // PAGE
        B: gl.constexpr = COLUMNS // 64
        pieces = buffer._reinterpret(buffer.dtype, [B * K, PAGE, 64], gl.NVMMASharedLayout(128, 16, rank=2))
        for j in range(K):
            row = gl.load(table + gl.minimum(spot + j, top), mask=wanted, other=0) * page_rows
            for c in range(B):
                at = [row, column + 64 * c]
                tma.async_copy_global_to_shared(box_desc, at, full, pieces.index(c * K + j), pred=wanted)


@gluon.jit
def load_left(pool, spot, top, full, buffer, wanted, PAGE: gl.constexpr):
    """Columns 0 .. 255 of a block."""
    mbarrier.expect(full, 64 * 256 * 2, pred=wanted)
    load_keys(pool, spot, top, 0, full, buffer, wanted, 256, PAGE)


@gluon.jit
def load_right(pool, spot, top, full, buffer, wanted, PAGE: gl.constexpr):
    """Columns 256 .. 511 of a block."""
    mbarrier.expect(full, 64 * 256 * 2, pred=wanted)
    load_keys(pool, spot, top, 256, full, buffer, wanted, 256, PAGE)


@gluon.jit
def load_left_and_rope(pool, spot, top, full, left, rope, wanted, PAGE: gl.constexpr):
    """Columns 0 .. 255 of a block and its rope part, on one barrier."""
    mbarrier.expect(full, 64 * 320 * 2, pred=wanted)
    load_keys(pool, spot, top, 512, full, rope, wanted, 64, PAGE)
    load_keys(pool, spot, top, 0, full, left, wanted, 256, PAGE)


@gluon.jit
def load_right_by_boxes_and_rope(pool, spot, top, box_full, rope_full, right, rope, wanted, PAGE: gl.constexpr):
    """One barrier a box: scores of the first can begin while the last is under way."""
    r4 = boxes(right, 64)
    for c in range(4):
        mbarrier.expect(box_full.index(c), 64 * 64 * 2, pred=wanted)
        load_keys(pool, spot, top, 256 + 64 * c, box_full.index(c), r4.index(c), wanted, 64, PAGE)
    mbarrier.expect(rope_full, 64 * 64 * 2, pred=wanted)
    load_keys(pool, spot, top, 512, rope_full, rope, wanted, 64, PAGE)


@gluon.jit
def by_row(x, times, ROWS_FIRST: gl.constexpr):
    """x times the scale of its rows, which is one number or one for each row."""
    if len(times.shape) == 0:
        return x * times
    elif ROWS_FIRST:
        return x * times[:, None]
    else:
        return x * times[None, :]


@gluon.jit
def scale_of(scale, row_scale, row, offset, inside):
    """The softmax scale, times that of each row where its float16 query was divided to stay finite."""
    if row_scale is None:
        return scale
    else:
        return scale * gl.load(row_scale + row + offset, mask=offset < inside, other=1.0)


@gluon.jit
def load_query(q_desc, q_pe_desc, row, full, left, right, rope, wanted, M: gl.constexpr):
    """M rows of absorbed queries and their rope part, on one barrier."""
    mbarrier.expect(full, M * 576 * 2, pred=wanted)
    tma.async_copy_global_to_shared(q_desc, [row, 0], full, left, pred=wanted)
    tma.async_copy_global_to_shared(q_desc, [row, 256], full, right, pred=wanted)
    tma.async_copy_global_to_shared(q_pe_desc, [row, 0], full, rope, pred=wanted)


def signature(kind: str, M: int, PAGE: int, scaled: bool) -> dict[str, str]:
    """Return the types of the arguments that both decode kernels have, for rows of `kind` and tiles of M rows."""
    kinds = {"bf16": gl.bfloat16, "fp16": gl.float16}
    tile = lambda rows, columns: (
        f"tensordesc<{kind}[{rows}, {columns}],{gl.NVMMASharedLayout.get_default_for([rows, columns], kinds[kind])!r}>"
    )
    keys = min(PAGE, 64)
    found = {"q_desc": tile(M, 256), "q_pe_desc": tile(M, 64), "box_desc": tile(keys, 64)}
    found["rows_desc"] = tile(64, 256) if PAGE >= 64 else found["box_desc"]
    found |= dict.fromkeys(("table", "bounds", "work", "part"), "*i32") | {"out": f"*{kind}", "scale": "fp32"}
    found |= dict.fromkeys(("lse", "part_out", "part_lse"), "*fp32") | ({"row_scale": "*fp32"} if scaled else {})
    return found | dict.fromkeys(("table_stride", "page_rows", "N"), "i32") | ({"TILES": "i32"} if M == 64 else {})


# Kinds of rows, page sizes and whether rows have a scale of their own, as they are compiled ahead of time.
VARIANTS = (("bf16", 64, False), ("fp16", 64, False), ("fp16", 64, True), ("bf16", 32, False), ("bf16", 16, False))
