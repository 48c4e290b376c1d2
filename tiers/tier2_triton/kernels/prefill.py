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
the last launch left (out in float32, lse): m = lse, total = 1, acc = out is an online softmax after those keys. Loads
by descriptor were tried: no faster on an H200 (437 to 494 against 507 TFLOP/s at 16384), and gone.

Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1; DeepSeek-V2 (arXiv 2405.04434), eqs. 9 to 18.

Axes: T new tokens (packed over requests), n keys in the workspace, N heads, P nope, R rope, V value.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import SHARED_LIMIT, TARGETS, Compile
from mla.errors import bad
from mla.state import AttentionState, merge
from tiers.tier2_triton.kernels.problem import Problem

COLUMNS = 7  # of a work list
CONTINUES, LEAVES = 1, 2  # flags: goes on from the state in acc and lse; leaves its output in acc, not in out
LN2 = 0.6931471805599453


@triton.jit
def _load(
    base, stride, start, keep, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """ROWS rows from row `start` on, BLOCK columns; zero past WIDTH and, if MASKED, in rows that are not in `keep`."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    where = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + cols[None, :]  # a block: < 2^31
    if MASKED:
        return tl.load(where, mask=keep[:, None] & (cols < WIDTH)[None, :], other=0.0)
    elif WIDTH != BLOCK:
        return tl.load(where, mask=(cols < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def _scores(
    q, base, stride, start, keep, scores, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add q times a block of keys to `scores`; nothing where there are no columns."""
    if WIDTH > 0:
        k = _load(base, stride, start, keep, WIDTH, BLOCK, ROWS, MASKED)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    return scores


@triton.jit
def _fold_keys(
    acc, m, total, short, long, q_nope, q_rest, q_pe, visible, first, stop, last, k_nope, k_pe, v,
    stride_k, stride_pe, stride_v, scale, P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the blocks of keys from `first` to `stop`.

    AHEAD, short + long are the scores of this block, whose products were started a block earlier: the short one, which
    the compiler waits for, is a sum of its own, so that the long one runs while exponentials are taken. In one sum its
    registers would be copied while it runs, and ptxas serialises every product of such a kernel (warning C7514).
    """
    WIDE: tl.constexpr = P if P < BLOCK_P else BLOCK_P
    k_rest = k_nope + BLOCK_P
    none, keys = tl.zeros(short.shape, tl.float32), tl.arange(0, BLOCK_N)
    for start in tl.range(first, stop, BLOCK_N):
        at = start + BLOCK_N if AHEAD else start
        keep = at + keys < last
        fresh = _scores(q_pe, k_pe, stride_pe, at, keep, none, R, BLOCK_R, BLOCK_N, MASKED)
        fresh = _scores(q_rest, k_rest, stride_k, at, keep, fresh, P - BLOCK_P, BLOCK_REST, BLOCK_N, MASKED)
        scores, before = (short + long, none) if AHEAD else (fresh, fresh)
        long = _scores(q_nope, k_nope, stride_k, at, keep, before, WIDE, BLOCK_P, BLOCK_N, MASKED)
        short = fresh
        if not AHEAD:
            scores = long
        if MASKED:
            seen = (start + keys)[None, :] < visible[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(m, tl.max(scores, 1) * scale)
        weights = tl.math.exp2(scores * scale - new[:, None])
        shrink = tl.math.exp2(m - new)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        values = _load(v, stride_v, start, start + keys < last, V, BLOCK_V, BLOCK_N, MASKED)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        m = new
    return acc, m, total, short, long


@triton.jit(do_not_specialize_on_alignment=["row_kv_lens", "tiles"])
def _prefill_kernel(
    q_nope, q_pe, k_nope, k_pe, v, row_kv_lens, tiles, acc_out, out, lse,
    stride_q_t, stride_q_n, stride_qpe_t, stride_qpe_n, stride_k_s, stride_k_n, stride_kpe_s, stride_v_s, stride_v_n,
    stride_acc_t, stride_acc_n, stride_out_t, stride_out_n, stride_lse_t, stride_lse_n, scale,
    P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # tiles run fastest, so the programs at work together share the keys and values of one head in L2
    item, head = tiles + tl.program_id(0) * 7, tl.program_id(1).to(tl.int64)
    row, rows, at = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2).to(tl.int64)
    keys, first_key, acc_row, flags = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    local, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_V)
    own = local < rows
    visible = tl.load(row_kv_lens + row + local, mask=own, other=0) - first_key
    visible = tl.minimum(tl.maximum(visible, 0), keys)
    sees = visible > 0  # the query of a row that sees nothing may be NaN

    q_nope += row * stride_q_t + head * stride_q_n
    nope = _load(q_nope, stride_q_t, 0, sees, P, BLOCK_P, BLOCK_M, True)
    rest, pe = nope, nope
    if BLOCK_REST > 0:
        rest = _load(q_nope + BLOCK_P, stride_q_t, 0, sees, P - BLOCK_P, BLOCK_REST, BLOCK_M, True)
    if R > 0:
        q_pe += row * stride_qpe_t + head * stride_qpe_n
        pe = _load(q_pe, stride_qpe_t, 0, sees, R, BLOCK_R, BLOCK_M, True)

    at_lse = lse + row * stride_lse_t + head * stride_lse_n + local * stride_lse_t
    at_acc = acc_out + (acc_row.to(tl.int64) * stride_acc_t + head * stride_acc_n)
    at_acc += local[:, None] * stride_acc_t + cols[None, :]
    mask = own[:, None] & (cols < V)[None, :]
    before = tl.load(at_lse, mask=own & ((flags & 1) != 0), other=float("-inf"))
    has = before > float("-inf")
    m = tl.where(has, before * 1.4426950408889634, -3.0e38)  # finite, so that m - m is 0 where nothing was seen
    total = tl.where(has, 1.0, 0.0)
    acc = tl.load(at_acc, mask=mask & has[:, None], other=0.0)
    # a row that has seen earlier keys but none of these must be masked everywhere; one without any is zeroed at the end
    highest = tl.max(visible)
    lowest = tl.min(tl.where(sees | has, visible, highest))

    k_nope += at * stride_k_s + head * stride_k_n
    k_pe += at * stride_kpe_s
    v += at * stride_v_s + head * stride_v_n
    whole = lowest // BLOCK_N * BLOCK_N
    none = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    short, long = none, none
    if AHEAD:
        WIDE: tl.constexpr = P if P < BLOCK_P else BLOCK_P
        whole = tl.maximum(whole - BLOCK_N, 0)
        keep, k_rest = tl.arange(0, BLOCK_N) < highest, k_nope + BLOCK_P
        short = _scores(pe, k_pe, stride_kpe_s, 0, keep, none, R, BLOCK_R, BLOCK_N, True)
        short = _scores(rest, k_rest, stride_k_s, 0, keep, short, P - BLOCK_P, BLOCK_REST, BLOCK_N, True)
        long = _scores(nope, k_nope, stride_k_s, 0, keep, none, WIDE, BLOCK_P, BLOCK_N, True)
    acc, m, total, short, long = _fold_keys(
        acc, m, total, short, long, nope, rest, pe, visible, 0, whole, highest, k_nope, k_pe, v, stride_k_s,
        stride_kpe_s, stride_v_s, scale, P, R, V, BLOCK_P, BLOCK_REST, BLOCK_R, BLOCK_V, BLOCK_N, AHEAD, False,
    )  # fmt: skip
    acc, m, total, short, long = _fold_keys(
        acc, m, total, short, long, nope, rest, pe, visible, whole, highest, highest, k_nope, k_pe, v, stride_k_s,
        stride_kpe_s, stride_v_s, scale, P, R, V, BLOCK_P, BLOCK_REST, BLOCK_R, BLOCK_V, BLOCK_N, AHEAD, True,
    )  # fmt: skip

    some = sees | has
    total = tl.where(some, total, 1.0)
    result = tl.where(some[:, None], acc / total[:, None], 0.0)
    tl.store(at_lse, tl.where(some, (m + tl.math.log2(total)) * 0.6931471805599453, float("-inf")), mask=own)
    tl.store(at_acc, result, mask=mask & ((flags & 2) != 0))
    at_out = out + (row * stride_out_t + head * stride_out_n) + local[:, None] * stride_out_t + cols[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=mask & (flags < 2))


class PrefillTile(NamedTuple):
    """Rows and keys of a tile, warps, stages of the pipeline; ahead is 1 where scores run a block ahead."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ahead: int


def prefill_tile(dtype: torch.dtype, P: int, R: int, V: int, shared_limit: int) -> PrefillTile:
    """Choose the tile for head sizes P, R, V in `dtype` on a GPU that gives a program `shared_limit` bytes.

    Raises ValueError where not even the smallest tile fits, with the bytes.
    """
    candidates = FLOAT32_TILES if dtype == torch.float32 else WIDE_TILES if V > 128 else TILES
    for tile in candidates:
        if shared_bytes(tile, dtype, P, R, V) <= shared_limit:
            return tile
    least = f"{shared_bytes(candidates[-1], dtype, P, R, V):,} bytes for a tile of {candidates[-1]}"
    fix = "use the absorbed form, or smaller heads"
    raise bad("shared memory", expected=f"at most {shared_limit:,} bytes", got=least, fix=fix)


def shared_bytes(tile: PrefillTile, dtype: torch.dtype, P: int, R: int, V: int) -> int:
    """Bytes of shared memory of a tile: its query once, keys and values once a stage, the first keys if ahead."""
    width_qk, width_v = sum(blocks_of(P)) + (block_of(R) if R else 0), block_of(V)
    keys = tile.block_n * ((tile.num_stages + tile.ahead) * width_qk + tile.num_stages * width_v)
    return (tile.block_m * width_qk + keys) * dtype.itemsize


def block_of(width: int) -> int:
    """The block that holds `width` columns: a power of two, at least 16 for a matrix product."""
    return max(16, triton.next_power_of_2(width))


def blocks_of(width: int) -> tuple[int, int]:
    """The two blocks that hold `width` columns with little to spare, such as (128, 64) for 192; the second may be 0."""
    first = max(16, 1 << (width.bit_length() - 1))
    return first, block_of(width - first) if width > first else 0


# Best first; the first that fits is taken. Registers bound them: a thread holds V / 2 numbers of the output at 128 rows
# and 8 warps, so wide values leave no room for scores that run ahead.
TILES = (
    PrefillTile(128, 64, 8, 3, 1), PrefillTile(128, 64, 8, 2, 0), PrefillTile(64, 64, 4, 2, 0),
    PrefillTile(64, 32, 4, 1, 0),
)  # fmt: skip
WIDE_TILES = (PrefillTile(64, 64, 8, 2, 0), PrefillTile(64, 32, 4, 1, 0))
FLOAT32_TILES = (PrefillTile(32, 32, 8, 1, 0), PrefillTile(16, 16, 8, 1, 0))


def prefill(
    q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, row_kv_lens: Tensor, tiles: Tensor,
    acc: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, tile: tuple[int, int, int, int, int],
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
    block_m, block_n, num_warps, num_stages, ahead = tile
    block_p, block_rest = blocks_of(P)
    _prefill_kernel[(tiles.shape[0], N)](
        q_nope, q_pe, k_nope, k_pe, v, row_kv_lens, tiles, acc, out, lse,
        *q_nope.stride()[:2], *q_pe.stride()[:2], *k_nope.stride()[:2], k_pe.stride(0), *v.stride()[:2],
        *acc.stride()[:2], *out.stride()[:2], *lse.stride(), softmax_scale / LN2,
        P=P, R=R, V=V, BLOCK_P=block_p, BLOCK_REST=block_rest, BLOCK_R=block_of(R), BLOCK_V=block_of(V),
        BLOCK_M=block_m, BLOCK_N=block_n, AHEAD=bool(ahead), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def prefill_reference(
    q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, row_kv_lens: Tensor, tiles: Tensor,
    acc: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, tile: tuple[int, int, int, int, int],
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
        return spans_problem(TOY, (3, 24, 8, 10), PrefillTile(16, 16, 4, 1, 1), dtype, device, seed)
    tile = prefill_tile(dtype, *SHAPES[0], SHARED_LIMIT["sm_90"])
    return spans_problem(((0, 16384, 0, 16384, 0, 0, 0),), (128, *SHAPES[0]), tile, dtype, device, seed)


def spans_problem(
    spans: Sequence[tuple[int, ...]], sizes: tuple[int, ...], tile: PrefillTile, dtype: torch.dtype, device: str,
    seed: int = 0,
) -> Problem:  # fmt: skip
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
        tiles = {target: prefill_tile(dtype, *shape, SHARED_LIMIT[target]) for target in TARGETS}
        for tile in dict.fromkeys(tiles.values()):
            entries.append(compile_entry(dtype, *shape, tile, tuple(t for t in TARGETS if tiles[t] == tile)))
    return entries


def compile_entry(
    dtype: torch.dtype, P: int, R: int, V: int, tile: PrefillTile, targets: tuple[str, ...] = ()
) -> Compile:
    """What `prefill` launches for these sizes with this tile."""
    kind, (block_p, block_rest) = TYPES[dtype], blocks_of(P)
    kinds = dict.fromkeys(("q_nope", "q_pe", "k_nope", "k_pe", "v", "out"), f"*{kind}")
    kinds |= {"row_kv_lens": "*i32", "tiles": "*i32", "acc_out": "*fp32", "lse": "*fp32", "scale": "fp32"}
    constants = {"P": P, "R": R, "V": V, "BLOCK_P": block_p, "BLOCK_REST": block_rest, "BLOCK_R": block_of(R)}
    constants |= {"BLOCK_V": block_of(V), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "AHEAD": bool(tile.ahead)}
    constants["stride_lse_n"] = 1  # the runtime takes an argument that is 1 as a constant
    strides = {n: "i32:16" for n in _prefill_kernel.arg_names if n.startswith("stride_") and n not in constants}
    name = f"prefill {kind} {P}/{R}/{V} {'x'.join(map(str, tile))}"
    return Compile(_prefill_kernel, kinds | strides, constants, tile.num_warps, tile.num_stages, targets, name)
