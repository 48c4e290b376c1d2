"""Attention of the expanded form, for rows of many requests in one launch (prefill).

Motivation. New tokens of a prompt meet hundreds of keys each or more, so it pays to expand latents to every head's keys
and values once and attend in (P + R) + V multiplications a key instead of 2 L + R: 2 (P + R + V) = 640 FLOPs for each
query, key and head at DeepSeek-V3's sizes, where the absorbed form takes 2,176. Nothing here reads pages: a chunk of
latent rows has been gathered and expanded into a workspace.

Idea. A work item is a tile of rows of one request and the span of its keys that the workspace holds. A row sees keys
[0, row_kv_lens[row] - first_key) of the span, clipped to it. This one rule gives the causal mask, the full mask,
explicit bounds and a context chunk that all rows see whole. Up to the smallest bound of the tile nothing is masked;
after it, up to the largest, everything is. k_pe is one row for all heads: a second product adds its scores, so that
keys are never concatenated. Where a request's keys do not fit into one workspace, the tile goes on from the state that
the last launch left (out in float32, lse): m = lse, total = 1, acc = out is an online softmax after those keys.

Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1; DeepSeek-V2 (arXiv 2405.04434), eqs. 9 to 18.

Axes: T new tokens (packed over requests), n keys in the workspace, N heads, P nope, R rope, V value.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mla.aot import SHARED_LIMIT, TARGETS, Compile
from mla.errors import bad
from mla.state import AttentionState, merge
from tiers.tier2_triton.kernels.problem import Problem

COLUMNS = 7  # of a work list
CONTINUES, LEAVES = 1, 2  # flags: goes on from the state in acc and lse; leaves its output in acc, not in out
LN2 = 0.6931471805599453


@triton.jit
def _block(
    base, desc, stride, at, column, start, last, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Keys start .. start + BLOCK_N - 1 of the span, BLOCK columns, zero past WIDTH; MASKED, zero from key `last` on.

    `base` points at the span. By descriptor, that is row `at` and column `column` of the workspace, keys from `last`
    on are whatever lies there.
    """
    if TMA:
        return desc.load([at + start, column])
    else:
        rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)
        where = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + cols[None, :]  # a block: < 2^31
        if MASKED:
            return tl.load(where, mask=(start + rows < last)[:, None] & (cols < WIDTH)[None, :], other=0.0)
        elif WIDTH != BLOCK:
            return tl.load(where, mask=(cols < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(where)


@triton.jit
def _short_scores(
    q_rest, q_pe, k_nope, k_pe, rest_desc, pe_desc, stride_k, stride_pe, at, column, start, last, scores,
    P: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the products of the rope and of the columns past BLOCK_P to `scores` of keys start .. start + BLOCK_N - 1."""
    if R > 0:
        k = _block(k_pe, pe_desc, stride_pe, at, 0, start, last, R, BLOCK_R, BLOCK_N, MASKED, TMA)
        scores = tl.dot(q_pe, tl.trans(k), scores, input_precision="ieee")
    if BLOCK_REST > 0:
        k = _block(
            k_nope + BLOCK_P, rest_desc, stride_k, at, column + BLOCK_P, start, last,
            P - BLOCK_P, BLOCK_REST, BLOCK_N, MASKED, TMA,
        )  # fmt: skip
        scores = tl.dot(q_rest, tl.trans(k), scores, input_precision="ieee")
    return scores


@triton.jit
def _long_scores(
    q_nope, k_nope, k_desc, stride_k, at, column, start, last, scores,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Add the product of the first BLOCK_P columns."""
    WIDTH: tl.constexpr = P if BLOCK_REST == 0 else BLOCK_P
    k = _block(k_nope, k_desc, stride_k, at, column, start, last, WIDTH, BLOCK_P, BLOCK_N, MASKED, TMA)
    return tl.dot(q_nope, tl.trans(k), scores, input_precision="ieee")


@triton.jit
def _fold_keys(
    acc, m, total, short, long, q_nope, q_rest, q_pe, visible, first, stop, last, k_nope, k_pe, v, k_desc, rest_desc,
    pe_desc, v_desc, stride_k, stride_pe, stride_v, at, head, scale,
    P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Online softmax over the blocks of keys from `first` to `stop`.

    AHEAD, short + long are the scores of this block, whose products were started a block earlier: the short one, which
    the compiler waits for, is a sum of its own, so that the long one runs while exponentials are taken. In one sum its
    registers would be copied while it runs, and ptxas serialises every product of such a kernel (warning C7514).
    """
    none = tl.zeros(short.shape, tl.float32)
    for start in tl.range(first, stop, BLOCK_N):
        following = start + BLOCK_N if AHEAD else start
        next_short = _short_scores(
            q_rest, q_pe, k_nope, k_pe, rest_desc, pe_desc, stride_k, stride_pe, at, head * P, following, last, none,
            P, R, BLOCK_P, BLOCK_REST, BLOCK_R, BLOCK_N, MASKED, TMA,
        )  # fmt: skip
        scores = short + long if AHEAD else next_short
        long = _long_scores(
            q_nope, k_nope, k_desc, stride_k, at, head * P, following, last, none if AHEAD else scores,
            P, BLOCK_P, BLOCK_REST, BLOCK_N, MASKED, TMA,
        )  # fmt: skip
        short = next_short
        if not AHEAD:
            scores = long
        if MASKED:
            seen = (start + tl.arange(0, BLOCK_N))[None, :] < visible[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(m, tl.max(scores, 1) * scale)
        weights = tl.math.exp2(scores * scale - new[:, None])
        shrink = tl.math.exp2(m - new)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        values = _block(v, v_desc, stride_v, at, head * V, start, last, V, BLOCK_V, BLOCK_N, MASKED, TMA)
        if MASKED and TMA:  # 0 * NaN is NaN: a weight of 0 does not drop what lies past the span
            values = tl.where((start + tl.arange(0, BLOCK_N) < last)[:, None], values, 0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        m = new
    return acc, m, total, short, long


@triton.jit(do_not_specialize_on_alignment=["row_kv_lens", "tiles"])
def _prefill_kernel(
    q_nope, q_pe, k_nope, k_pe, v, k_desc, rest_desc, pe_desc, v_desc, row_kv_lens, tiles, acc_out, out, lse,
    stride_q_t, stride_q_n, stride_qpe_t, stride_qpe_n, stride_k_s, stride_k_n, stride_kpe_s, stride_v_s, stride_v_n,
    stride_acc_t, stride_acc_n, stride_out_t, stride_out_n, stride_lse_t, stride_lse_n, scale,
    P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # tiles run fastest, so the programs at work together share the keys and values of one head in L2
    item, head = tiles + tl.program_id(0) * 7, tl.program_id(1)
    row, rows, at = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2)
    keys, first_key, acc_row, flags = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    local, far_head = tl.arange(0, BLOCK_M), head.to(tl.int64)
    cols_p, cols_v = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    own = local < rows
    visible = tl.load(row_kv_lens + row + local, mask=own, other=0) - first_key
    visible = tl.minimum(tl.maximum(visible, 0), keys)
    sees = visible > 0  # the query of a row that sees nothing may be NaN

    q_nope += row * stride_q_t + far_head * stride_q_n
    at_q = q_nope + local[:, None] * stride_q_t + cols_p[None, :]
    nope = tl.load(at_q, mask=sees[:, None] & (cols_p < P)[None, :], other=0.0)
    rest, pe = nope, nope
    if BLOCK_REST > 0:
        cols = BLOCK_P + tl.arange(0, BLOCK_REST)
        at_q = q_nope + local[:, None] * stride_q_t + cols[None, :]
        rest = tl.load(at_q, mask=sees[:, None] & (cols < P)[None, :], other=0.0)
    if R > 0:
        cols = tl.arange(0, BLOCK_R)
        at_q = q_pe + row * stride_qpe_t + far_head * stride_qpe_n + local[:, None] * stride_qpe_t + cols[None, :]
        pe = tl.load(at_q, mask=sees[:, None] & (cols < R)[None, :], other=0.0)

    at_lse = lse + row * stride_lse_t + far_head * stride_lse_n + local * stride_lse_t
    at_acc = acc_out + (acc_row.to(tl.int64) * stride_acc_t + far_head * stride_acc_n)
    at_acc += local[:, None] * stride_acc_t + cols_v[None, :]
    mask_v = own[:, None] & (cols_v < V)[None, :]
    before = tl.load(at_lse, mask=own & ((flags & 1) != 0), other=float("-inf"))
    has = before > float("-inf")
    m = tl.where(has, before * 1.4426950408889634, -3.0e38)  # finite, so that m - m is 0 where nothing was seen
    total = tl.where(has, 1.0, 0.0)
    acc = tl.load(at_acc, mask=mask_v & has[:, None], other=0.0)
    # a row that has seen earlier keys but none of these must be masked everywhere; one without any is zeroed at the end
    highest = tl.max(visible)
    lowest = tl.min(tl.where(sees | has, visible, highest))

    k_nope += at.to(tl.int64) * stride_k_s + far_head * stride_k_n
    k_pe += at.to(tl.int64) * stride_kpe_s
    v += at.to(tl.int64) * stride_v_s + far_head * stride_v_n
    whole = lowest // BLOCK_N * BLOCK_N
    none = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    short, long = none, none
    if AHEAD:
        whole = tl.maximum(whole - BLOCK_N, 0)
        short = _short_scores(
            rest, pe, k_nope, k_pe, rest_desc, pe_desc, stride_k_s, stride_kpe_s, at, head * P, 0, highest, none,
            P, R, BLOCK_P, BLOCK_REST, BLOCK_R, BLOCK_N, True, TMA,
        )  # fmt: skip
        long = _long_scores(
            nope, k_nope, k_desc, stride_k_s, at, head * P, 0, highest, none,
            P, BLOCK_P, BLOCK_REST, BLOCK_N, True, TMA,
        )  # fmt: skip
    acc, m, total, short, long = _fold_keys(
        acc, m, total, short, long, nope, rest, pe, visible, 0, whole, highest, k_nope, k_pe, v, k_desc, rest_desc,
        pe_desc, v_desc, stride_k_s, stride_kpe_s, stride_v_s, at, head, scale,
        P, R, V, BLOCK_P, BLOCK_REST, BLOCK_R, BLOCK_V, BLOCK_N, AHEAD, False, TMA,
    )  # fmt: skip
    acc, m, total, short, long = _fold_keys(
        acc, m, total, short, long, nope, rest, pe, visible, whole, highest, highest, k_nope, k_pe, v, k_desc,
        rest_desc, pe_desc, v_desc, stride_k_s, stride_kpe_s, stride_v_s, at, head, scale,
        P, R, V, BLOCK_P, BLOCK_REST, BLOCK_R, BLOCK_V, BLOCK_N, AHEAD, True, TMA,
    )  # fmt: skip

    some = sees | has
    total = tl.where(some, total, 1.0)
    result = tl.where(some[:, None], acc / total[:, None], 0.0)
    tl.store(at_lse, tl.where(some, (m + tl.math.log2(total)) * 0.6931471805599453, float("-inf")), mask=own)
    tl.store(at_acc, result, mask=mask_v & ((flags & 2) != 0))
    at_out = out + (row * stride_out_t + far_head * stride_out_n) + local[:, None] * stride_out_t + cols_v[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=mask_v & (flags < 2))


class PrefillTile(NamedTuple):
    """How a program is cut: rows and keys of a tile, warps, stages of the pipeline.

    `ahead` is 1 where scores run a block ahead of their softmax, `tma` 1 where keys and values come by descriptor.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ahead: int
    tma: int


def prefill_tile(dtype: torch.dtype, P: int, R: int, V: int, shared_limit: int, tma: bool = False) -> PrefillTile:
    """Choose the tile for head sizes P, R, V in `dtype` on a GPU that gives a program `shared_limit` bytes.

    `tma` says that the GPU loads by descriptor, which is used where blocks are exactly as wide as heads. Raises
    ValueError where not even the smallest tile fits, with the bytes.
    """
    candidates = FLOAT32_TILES if dtype == torch.float32 else WIDE_TILES if V > 128 else TILES
    exact = sum(blocks_of(P)) == P and block_of(V) == V and (not R or block_of(R) == R)
    for tile in candidates:
        if ((exact and tma) or not tile.tma) and shared_bytes(tile, dtype, P, R, V) <= shared_limit:
            return tile
    least = f"{shared_bytes(candidates[-1], dtype, P, R, V):,} bytes for a tile of {candidates[-1]}"
    fix = "use the absorbed form, or smaller heads"
    raise bad("shared memory", expected=f"at most {shared_limit:,} bytes", got=least, fix=fix)


def shared_bytes(tile: PrefillTile, dtype: torch.dtype, P: int, R: int, V: int) -> int:
    """Bytes of shared memory of a tile: its query once, keys and values once a stage, first keys if ahead, barriers."""
    width_qk, width_v = sum(blocks_of(P)) + (block_of(R) if R else 0), block_of(V)
    keys = tile.block_n * ((tile.num_stages + tile.ahead) * width_qk + tile.num_stages * width_v)
    return (tile.block_m * width_qk + keys) * dtype.itemsize + 1024 * tile.tma


def block_of(width: int) -> int:
    """The block that holds `width` columns: a power of two, at least 16 for a matrix product."""
    return max(16, triton.next_power_of_2(width))


def blocks_of(width: int) -> tuple[int, int]:
    """The two blocks that hold `width` columns with little to spare, such as (128, 64) for 192; the second may be 0."""
    first = max(16, 1 << (width.bit_length() - 1))
    return first, block_of(width - first) if width > first else 0


# Best first; the first that fits is taken. Registers bound them: a thread holds V / 2 numbers of the output at 128 rows
# and 8 warps, so wide values leave no room for scores that run ahead.
TILES = tuple(
    PrefillTile(*tile)
    for tile in (
        (128, 64, 8, 3, 1, 1), (64, 64, 4, 2, 0, 1),
        (128, 64, 8, 2, 0, 0), (64, 64, 4, 2, 0, 0), (64, 32, 4, 1, 0, 0),
    )
)  # fmt: skip
WIDE_TILES = tuple(PrefillTile(*tile) for tile in ((128, 64, 8, 2, 0, 1), (64, 64, 8, 2, 0, 0), (64, 32, 4, 1, 0, 0)))
FLOAT32_TILES = tuple(PrefillTile(*tile) for tile in ((32, 32, 8, 1, 0, 0), (16, 16, 8, 1, 0, 0)))


def prefill(
    q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, row_kv_lens: Tensor, tiles: Tensor,
    acc: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, tile: tuple[int, int, int, int, int, int],
) -> None:  # fmt: skip
    """Attend the rows of every tile over its span: `out = softmax(scale (q_nope k_nope^T + q_pe k_pe^T)) v`.

    q_nope (T, N, P), q_pe (T, N, R), k_nope (n, N, P), k_pe (n, R), v (n, N, V) of one dtype; row_kv_lens (T,) int32
    bounds the keys of its request that a row sees. tiles (num_tiles, 7) int32 holds, for each tile: first row, number
    of rows (at most tile[0]), workspace row of the span, keys in the span, absolute index of its first key, first row
    in `acc`, flags. Flags: 1, the rows go on from the state in `acc` and `lse`; 2, their output goes to `acc` (A, N, V)
    float32, to be gone on from, and not to `out` (T, N, V) of any float dtype. lse (T, N) float32, natural log, is
    written either way. A row that has seen no key gets 0 and -inf. No row may be in two tiles of one call.
    """
    if tiles.shape[0] == 0:
        return
    N, P, R, V = q_nope.shape[1], q_nope.shape[2], q_pe.shape[2], v.shape[2]
    block_m, block_n, num_warps, num_stages, ahead, tma = tile
    block_p, block_rest = blocks_of(P)
    block_r, block_v = block_of(R), block_of(V)
    k_desc = rest_desc = pe_desc = v_desc = None
    if tma:
        k_desc, v_desc = _rows_of(k_nope, block_n, block_p), _rows_of(v, block_n, block_v)
        rest_desc = _rows_of(k_nope, block_n, block_rest) if block_rest else None
        pe_desc = _rows_of(k_pe[:, None], block_n, block_r) if R else None
    _prefill_kernel[(tiles.shape[0], N)](
        q_nope, q_pe, k_nope, k_pe, v, k_desc, rest_desc, pe_desc, v_desc, row_kv_lens, tiles, acc, out, lse,
        *q_nope.stride()[:2], *q_pe.stride()[:2], *k_nope.stride()[:2], k_pe.stride(0), *v.stride()[:2],
        *acc.stride()[:2], *out.stride()[:2], *lse.stride(), softmax_scale / LN2,
        P=P, R=R, V=V, BLOCK_P=block_p, BLOCK_REST=block_rest, BLOCK_R=block_r, BLOCK_V=block_v,
        BLOCK_M=block_m, BLOCK_N=block_n, AHEAD=bool(ahead), TMA=bool(tma), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def _rows_of(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of blocks of x (n, heads, width), seen as (n, heads * width): heads must lie side by side."""
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, columns])


def prefill_reference(
    q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, row_kv_lens: Tensor, tiles: Tensor,
    acc: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, tile: tuple[int, int, int, int, int, int],
) -> None:  # fmt: skip
    """Define `prefill` in plain PyTorch, tile by tile; shapes as there, such as q_nope (T, N, P)."""
    wide = torch.promote_types(q_nope.dtype, torch.float32)
    for row, rows, at, keys, first_key, acc_row, flags in tiles.tolist():
        part, held = slice(row, row + rows), slice(acc_row, acc_row + rows)
        visible = (row_kv_lens[part] - first_key).clamp(0, keys)
        most = int(visible.max())
        nope, pe = (torch.where((visible > 0)[:, None, None], x[part].to(wide), 0) for x in (q_nope, q_pe))
        k, shared, values = (x[at : at + most].to(wide) for x in (k_nope, k_pe, v))
        scores = torch.einsum("tnp,snp->tns", nope, k) + torch.einsum("tnr,sr->tns", pe, shared)
        hidden = torch.arange(most, device=tiles.device) >= visible[:, None]
        scores = (scores * softmax_scale).masked_fill(hidden[:, None], float("-inf"))
        total = torch.logsumexp(scores, -1) if most else scores.new_full(scores.shape[:2], float("-inf"))
        weights = torch.exp(scores - torch.where(total == float("-inf"), 0, total)[..., None])
        state = AttentionState(torch.einsum("tns,snv->tnv", weights, values), total)
        if flags & CONTINUES:
            state = merge(AttentionState(acc[held], lse[part]), state)
        (acc[held] if flags & LEAVES else out[part]).copy_(state.out)
        lse[part] = state.parts()[1].to(lse.dtype)


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """One call: "toy", four requests, odd sizes; "real", 16384 causal rows of DeepSeek-V3.

    Tensors as in `prefill`, such as q_nope (T, N, P). A toy has NaN in workspace rows of nobody and in empty queries.
    """
    if size == "toy":
        return spans_problem(TOY, (3, 24, 8, 10), PrefillTile(16, 16, 4, 1, 1, 0), dtype, device, seed)
    tile = prefill_tile(dtype, *SHAPES[0], SHARED_LIMIT["sm_90"], torch.device(device).type == "cuda")
    return spans_problem(((0, 16384, 0, 16384, 0, 0, 0),), (128, *SHAPES[0]), tile, dtype, device, seed)


def spans_problem(
    spans: Sequence[tuple[int, int, int, int, int, int, int]],
    sizes: tuple[int, int, int, int],
    tile: PrefillTile,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Problem:
    """Make a call over spans, one item of a work list each before it is cut into tiles, for sizes N, P, R, V.

    Rows are causal, the last of a span sees all its keys; q_nope (T, N, P) and q_pe are views of one tensor, and so are
    k_nope (n, N, P), v and k_pe; three workspace rows belong to nobody.
    """
    N, P, R, V = sizes
    T, n = max(s[0] + s[1] for s in spans), max(s[2] + s[3] for s in spans)
    random = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=device, dtype=torch.float32).to(dtype)
    q, rows = draw(T, N, P + R), draw(n + 3, N * (P + V) + R)
    rows[n:] = float("nan")
    k_nope, v, k_pe = rows.split([N * P, N * V, R], -1)
    visible, items = torch.zeros(T, dtype=torch.int32), []
    for row, count, at, keys, first_key, acc_row, flags in spans:
        visible[row : row + count] = (first_key + keys - count + 1 + torch.arange(count)).clamp(min=0)
        for cut in range(0, count, tile.block_m):
            size = min(tile.block_m, count - cut)
            items.append([row + cut, size, at, keys, first_key, acc_row + cut, flags])
    items.sort(key=lambda item: -int(visible[item[0] + item[1] - 1]))
    q[visible.to(device) == 0] = float("nan")
    arguments = {
        "q_nope": q[..., :P], "q_pe": q[..., P:], "k_nope": k_nope.view(-1, N, P), "k_pe": k_pe, "v": v.view(-1, N, V),
        "row_kv_lens": visible.to(device), "tiles": torch.tensor(items, dtype=torch.int32, device=device),
        "acc": draw(T, N, V).float(), "out": torch.empty(T, N, V, dtype=dtype, device=device),
        "lse": draw(T, N).float(), "softmax_scale": (P + R) ** -0.5, "tile": tile,
    }  # fmt: skip
    moved = (q.numel() + n * rows.shape[1] + T * N * V) * dtype.itemsize + T * N * 4
    return Problem(arguments, ("acc", "out", "lse"), moved, 2 * int(visible.sum()) * N * (P + R + V))


# Rows, first row, and so on of the toy's spans: whole, gone on from, left to go on from, without keys.
TOY = ((0, 21, 0, 37, 0, 0, 0), (21, 5, 37, 9, 16, 21, 1), (26, 19, 46, 20, 0, 26, 2), (45, 3, 0, 0, 0, 45, 0))
SHAPES = ((128, 64, 128), (128, 0, 128), (64, 32, 64), (192, 64, 256))  # P, R, V of released models
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def aot() -> list[Compile]:
    """Every variant of the real sizes: DeepSeek's in all three dtypes, the others in bfloat16."""
    variants = [(dtype, SHAPES[0]) for dtype in TYPES] + [(torch.bfloat16, shape) for shape in SHAPES[1:]]
    entries = []
    for dtype, shape in variants:
        by_tile: dict[PrefillTile, list[str]] = {}
        for target in TARGETS:
            tile = prefill_tile(dtype, *shape, SHARED_LIMIT[target], has_tma(target))
            by_tile.setdefault(tile, []).append(target)
        entries += [compile_entry(dtype, *shape, tile, tuple(targets)) for tile, targets in by_tile.items()]
    return entries


def compile_entry(
    dtype: torch.dtype, P: int, R: int, V: int, tile: PrefillTile, targets: tuple[str, ...] = ()
) -> Compile:
    """What `prefill` launches for these sizes with this tile."""
    kind, (block_p, block_rest), block_r, block_v = TYPES[dtype], blocks_of(P), block_of(R), block_of(V)
    kinds = dict.fromkeys(("q_nope", "q_pe", "k_nope", "k_pe", "v", "out"), f"*{kind}")
    kinds |= {"row_kv_lens": "*i32", "tiles": "*i32", "acc_out": "*fp32", "lse": "*fp32", "scale": "fp32"}
    constants: dict[str, object] = {
        "P": P,
        "R": R,
        "V": V,
        "BLOCK_P": block_p,
        "BLOCK_REST": block_rest,
        "BLOCK_R": block_r,
    }
    constants |= {"BLOCK_V": block_v, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    constants |= {"AHEAD": bool(tile.ahead), "TMA": bool(tile.tma)}
    constants["stride_lse_n"] = 1  # the runtime takes an argument that is 1 as a constant
    widths = {"k_desc": block_p, "rest_desc": block_rest, "pe_desc": R and block_r, "v_desc": block_v}
    for name, width in widths.items():
        if tile.tma and width:
            kinds[name] = f"tensordesc<{kind}[{tile.block_n},{width}]>"
        else:
            constants[name] = None
    strides = {n: "i32:16" for n in _prefill_kernel.arg_names if n.startswith("stride_") and n not in constants}
    name = f"prefill {kind} {P}/{R}/{V} {'x'.join(map(str, tile))}"
    return Compile(_prefill_kernel, kinds | strides, constants, tile.num_warps, tile.num_stages, targets, name)


def has_tma(arch: str) -> bool:
    """True for GPUs that load by descriptor: Nvidia's from sm_90 on."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90
