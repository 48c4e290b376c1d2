"""Absorbed attention over pages, split along the keys: decode, and the verification of several drafted tokens.

Motivation. A decode step reads every cached row once and uses it for all heads: S (L + R) numbers against
2 N S (2 L + R) operations, so up to about 90 (row, head) pairs the memory is the limit. Three ideas follow. The
latent part of a tile is loaded once and serves as keys and as values. Rows of a request, q_len * N of them, share a
tile of keys, so drafted tokens cost little. And one request alone must fill the GPU: a work list cuts its keys into
segments, each program writes one partial state, and `combine` merges them.

A row sees the keys below its own bound, the only mask there is. Keys past the largest bound of a tile are never read:
what lies there may be NaN, and 0 * NaN is not 0.

A tile of 64 rows and 64 keys leaves room for one program on a processor of Hopper, so nothing hides its waits but the
program itself. Its arithmetic stands in an `if` that is always true. Triton moves such a region behind the loads of the
next tile, which so travel while this one is worked on (else they start when it is done); LLVM then drops the branch.
Each product of scores in a further region is no longer seen as the first of a chain, so that the two warpgroups halve
the keys instead of both taking all of them; the running sum has a column for each, added after the last tile. Together:
249 to 342 TFLOP/s on an H200 (N = 128, 128 requests of 8192 keys).

Axes: T new tokens (packed over requests), B requests, N heads, L KV rank, R rope, M rows of a tile, K slots.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from tiers.tier2_triton.kernels.problem import Problem
from tiers.tier2_triton.launch import TARGET_DTYPES, Tile, decode_tiles, power

LOG2E = 1.4426950408889634
STRIDES = ["q_stride_t", "q_stride_n", "pe_stride_t", "pe_stride_n", "page_stride", "row_stride"]
SIZES = ["table_stride", "N", "PAGE"]  # like the strides they do not make another variant
INDICES = ["block_table", "row_kv_lens", "items", "count"]


@triton.jit
def _load_keys(cache, base, table, start, top, n, cols, colr, page_stride, row_stride, PAGE,
               L: tl.constexpr, R: tl.constexpr, ONE_PAGE: tl.constexpr,
               FULL_L: tl.constexpr, FULL_R: tl.constexpr):  # fmt: skip
    """One tile of rows, (BN, L) and (BN, R), zero past `top`; on one page, or key by key through the table."""
    live = start + n < top
    if ONE_PAGE:
        rows = base + n[:, None] * row_stride
    else:
        key = start + n
        pages = tl.load(table + key // PAGE, mask=live, other=0).to(tl.int64)
        rows = cache + (pages * page_stride + (key % PAGE) * row_stride)[:, None]
    in_c = live[:, None] if FULL_L else live[:, None] & (cols < L)[None, :]
    k_c = tl.load(rows + cols[None, :], mask=in_c, other=0.0)
    k_r = k_c
    if R > 0:
        in_r = live[:, None] if FULL_R else live[:, None] & (colr < R)[None, :]
        k_r = tl.load(rows + L + colr[None, :], mask=in_r, other=0.0)
    return k_c, k_r


@triton.jit
def _fold(q_c, q_r, k_c, k_ct, k_rt, times, start, top, n, cols, bound, peak, total, acc,
          R: tl.constexpr, AHEAD: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """One step of the online softmax; AHEAD, `total` is (BM, 2) and the regions keep the products apart."""
    if AHEAD:
        scores = tl.zeros([q_c.shape[0], k_c.shape[0]], tl.float32)
        if R > 0:
            if top > start:  # true, as is the next one: not the same words, else they would become one region
                scores = tl.dot(q_r, k_rt, input_precision="ieee")
        if start != top:
            scores = tl.dot(q_c, k_ct, scores, input_precision="ieee")
        scores *= times
    elif WIDE and q_c.shape[1] > 256:
        # float32 products are added one by one: 256 in a row lose a third of what 512 do (0.4 against 1.0 of the budget
        # in the worst case of the suite). Scaled before they are added, or the compiler would make one row of them.
        scores = tl.dot(tl.where(cols[None, :] < 256, q_c, 0.0), k_ct, input_precision="ieee") * times
        for first in tl.static_range(256, q_c.shape[1], 256):
            here = (cols >= first) & (cols < first + 256)
            scores += tl.dot(tl.where(here[None, :], q_c, 0.0), k_ct, input_precision="ieee") * times
        if R > 0:
            scores += tl.dot(q_r, k_rt, input_precision="ieee") * times
    else:
        scores = tl.dot(q_c, k_ct, input_precision="ieee")
        if R > 0:
            scores += tl.dot(q_r, k_rt, input_precision="ieee")
        scores *= times
    scores = tl.where(start + n[None, :] < bound[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    decay = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    if AHEAD:
        halves = tl.reshape(weights, [weights.shape[0], 2, weights.shape[1] // 2])
        total = total * decay[:, None] + tl.sum(halves, 2)
    else:
        total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(k_c.dtype), k_c, acc * decay[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit(do_not_specialize=STRIDES + SIZES, do_not_specialize_on_alignment=INDICES)
def _decode_kernel(q_latent, q_pe, row_scale, cache, block_table, row_kv_lens, items, count, out, lse,
                   scale, q_stride_t, q_stride_n, pe_stride_t, pe_stride_n, page_stride, row_stride, table_stride,
                   N, PAGE, UNIT: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
                   ONE_PAGE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, FAR: tl.constexpr):  # fmt: skip
    """One work item: M rows of a request over a range of its keys, to one partial state."""
    item = tl.program_id(0)
    work = items + item * 8  # read at once with the count: one wait on memory less
    request, t0, m0, rows = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    begin, end, slot = tl.load(work + 4), tl.load(work + 5), tl.load(work + 6)
    if item < tl.load(count):
        # strides come in units of 16 bytes where they are such, so that the compiler can load as much at once
        by_page = page_stride.to(tl.int64) * UNIT
        by_row = row_stride.to(tl.int64) * UNIT if FAR else row_stride * UNIT
        m, n = m0 + tl.arange(0, BM), tl.arange(0, BN)
        cols, colr = tl.arange(0, BL), tl.arange(0, BR)
        FULL_L: tl.constexpr = L == BL
        FULL_R: tl.constexpr = R == BR
        AHEAD: tl.constexpr = BM >= 64 and BN >= 64  # see above; smaller tiles share a processor
        token, head = (t0 + m // N).to(tl.int64), m % N
        bound = tl.load(row_kv_lens + token, mask=m < rows, other=0)
        sees = bound > 0  # an empty row's query may be NaN
        q_at = q_latent + ((token * q_stride_t + head.to(tl.int64) * q_stride_n) * UNIT)[:, None] + cols[None, :]
        q_c = tl.load(q_at, mask=sees[:, None] if FULL_L else sees[:, None] & (cols < L)[None, :], other=0.0)
        q_r = q_c
        if R > 0:
            pe_at = q_pe + ((token * pe_stride_t + head.to(tl.int64) * pe_stride_n) * UNIT)[:, None] + colr[None, :]
            q_r = tl.load(pe_at, mask=sees[:, None] & (colr < R)[None, :], other=0.0)
        times = scale
        if row_scale is not None:  # float16: the latent query was divided by a power of two that keeps it finite
            factor = tl.load(row_scale + token * N + head, mask=sees, other=1.0)
            times = (factor * scale)[:, None]
            if R > 0:
                q_r = (q_r / factor[:, None]).to(q_pe.dtype.element_ty)
        if WIDE:
            q_c, q_r = q_c.to(tl.float32), q_r.to(tl.float32)
        top = tl.minimum(tl.max(bound, 0), end)
        peak = tl.full([BM], -1e30, tl.float32)  # finite, so that a row without keys in a tile makes no NaN
        total = tl.zeros([BM, 2] if AHEAD else [BM], tl.float32)
        acc = tl.zeros([BM, BL], tl.float32)
        table = block_table + request.to(tl.int64) * table_stride
        entry, at = begin // PAGE, begin % PAGE
        page = tl.load(table + entry, mask=begin < top, other=0)
        for start in tl.range(begin, top, BN, num_stages=STAGES if AHEAD else None):
            base = cache + page.to(tl.int64) * by_page + at * by_row
            if ONE_PAGE:  # read a turn ahead: a row's address waits for its page
                at += BN
                entry += (at == PAGE).to(tl.int32)
                at = tl.where(at == PAGE, 0, at)
                page = tl.load(table + entry, mask=start + BN < top, other=0)
            k_c, k_r = _load_keys(cache, base, table, start, top, n, cols, colr, by_page, by_row, PAGE,
                                  L, R, ONE_PAGE, FULL_L, FULL_R)  # fmt: skip
            if WIDE:
                k_c, k_r = k_c.to(tl.float32), k_r.to(tl.float32)
            k_ct, k_rt = tl.trans(k_c), tl.trans(k_r)  # in the region they would cost a buffer more
            if AHEAD:
                if start < top:
                    peak, total, acc = _fold(q_c, q_r, k_c, k_ct, k_rt, times, start, top, n, cols, bound, peak, total,
                                             acc, R, AHEAD, WIDE)  # fmt: skip
            else:
                peak, total, acc = _fold(q_c, q_r, k_c, k_ct, k_rt, times, start, top, n, cols, bound, peak, total,
                                         acc, R, AHEAD, WIDE)  # fmt: skip
        if AHEAD:
            total = tl.sum(total, 1)
        some = total > 0
        total = tl.where(some, total, 1.0)
        state = tl.where(some, peak + tl.log2(total), float("-inf"))
        acc = tl.where(some[:, None], acc / total[:, None], 0.0)
        first = slot.to(tl.int64) * BM
        i = tl.arange(0, BM)
        mine = i < rows - m0
        rows_at = out + first * L + (i[:, None] * L + cols[None, :])
        tl.store(rows_at, acc, mask=mine[:, None] if FULL_L else mine[:, None] & (cols < L)[None, :])
        tl.store(lse + first + i, state, mask=mine)


def decode(
    q_latent: Tensor,
    q_pe: Tensor,
    row_scale: Tensor | None,
    cache: Tensor,
    block_table: Tensor,
    row_kv_lens: Tensor,
    items: Tensor,
    count: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    tile: Tile,
) -> None:
    """Attend the work `items` (n, 8) int32, of which the first `count` (1,) int32 are real.

    q_latent (T, N, L) and q_pe (T, N, R) in one dtype, row_scale (T, N) float32 or None (q_latent is divided by it),
    cache (pages, page_size, L + R), block_table (B, max_pages) and row_kv_lens (T,) int32. Contiguous out (K, M, L) and
    lse (K, M) float32 get normalised states, the LSE with base 2; a row that sees nothing has 0 and -inf. `tile` is
    (M, keys, warps, stages). An item is (request, first token, first row, rows, first key, end of keys, slot, -): its
    row m is token first token + m // N and head m % N, and goes to row m - first row of the slot, if m < rows.
    Source: FlashAttention-2 (arXiv 2307.08691) section 3.1.
    """
    N, L, R, page = q_latent.shape[1], q_latent.shape[2], q_pe.shape[2], cache.shape[1]
    BM, BN, warps, stages = tile
    wide = q_latent.dtype != cache.dtype or cache.dtype == torch.float32
    strides = (*q_latent.stride()[:2], *q_pe.stride()[:2], *cache.stride()[:2])
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    _decode_kernel[(items.shape[0],)](
        q_latent, q_pe, row_scale, cache, block_table, row_kv_lens, items, count, out, lse, softmax_scale * LOG2E,
        *(stride // unit for stride in strides), block_table.stride(0), N, page,
        UNIT=unit, L=L, R=R, BM=BM, BN=BN, BL=power(L), BR=power(R), ONE_PAGE=page % BN == 0, WIDE=wide,
        STAGES=stages, FAR=cache.stride(1) * page >= 2**31, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def decode_reference(
    q_latent: Tensor,
    q_pe: Tensor,
    row_scale: Tensor | None,
    cache: Tensor,
    block_table: Tensor,
    row_kv_lens: Tensor,
    items: Tensor,
    count: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    tile: Tile,
) -> None:
    """What `decode` computes, item by item and row by row, in q_latent's dtype (T, N, L); arguments as there."""
    N, L, page = q_latent.shape[1], q_latent.shape[2], cache.shape[1]
    for request, t0, m0, rows, begin, end, slot, _ in items[: int(count)].tolist():
        for i in range(min(tile[0], rows - m0)):
            t, n = t0 + (m0 + i) // N, (m0 + i) % N
            keys = torch.arange(begin, max(begin, min(end, int(row_kv_lens[t]))), device=cache.device)
            found = cache[block_table[request][keys // page].long(), keys % page].to(q_latent.dtype)
            kv_c, k_pe = found[:, :L], found[:, L:]
            factor = 1.0 if row_scale is None else float(row_scale[t, n])
            scores = (kv_c @ q_latent[t, n] * factor + k_pe @ q_pe[t, n]) * softmax_scale
            if not len(keys):  # its query may be NaN
                value, z = torch.zeros_like(q_latent[t, n]), torch.tensor(float("-inf"))
            else:
                value, z = torch.softmax(scores, 0) @ kv_c, torch.logsumexp(scores, 0)
            out[slot, i], lse[slot, i] = value, z * LOG2E


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """A verification over odd sizes with poison ("toy"), or a full H200 of requests ("real")."""
    toy = size == "toy"
    B, q, S, N, L, R, page = (3, 2, 41, 5, 48, 8, 16) if toy else (264, 1, 4096, 16, 512, 64, 64)
    tile = (16, 16, 4, 2) if toy else (16, 32, 4, 3)
    random = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=device).to(dtype)
    pages = B * -(-S // page)
    cache = draw(pages + 1, page, L + R)
    table = torch.randperm(pages, generator=random, device=device).to(torch.int32).view(B, -1)
    if S % page:
        cache[table[:, -1].long(), S % page :] = float("nan")
    heads = [(b, m) for b in range(B) for m in range(0, q * N, tile[0])]
    tiles = [(b, b * q, m, q * N, 0, S, slot, 0) for slot, (b, m) in enumerate(heads)]
    bounds = torch.tensor([S - q + 1 + i for _ in range(B) for i in range(q)], dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {
        "q_latent": draw(B * q, N, L),
        "q_pe": draw(B * q, N, R),
        "row_scale": None,
        "cache": cache,
        "block_table": table,
        "row_kv_lens": bounds,
        "items": torch.tensor(tiles, dtype=torch.int32, device=device),
        "count": torch.tensor([len(tiles)], dtype=torch.int32, device=device),
        "out": torch.full((len(tiles), tile[0], L), float("nan"), device=device),
        "lse": torch.full((len(tiles), tile[0]), float("nan"), device=device),
        "softmax_scale": 0.1,
        "tile": tile,
    }
    nbytes = (B * S * (L + R) + B * q * N * (2 * L + R)) * dtype.itemsize
    return Problem(arguments, ("out", "lse"), nbytes, 2 * B * q * N * S * (2 * L + R))


def aot() -> list[Compile]:
    """Every variant that the tier can launch at the size of DeepSeek-V3, per target, dtype and tile."""
    kinds = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    entries = []
    for target, dtype in TARGET_DTYPES:
        for tile in decode_tiles(target, dtype, 512, 64):
            for one_page in (True, False):
                kind, (BM, BN, warps, stages) = f"*{kinds[dtype]}", tile
                signature = dict.fromkeys(("q_latent", "q_pe", "cache"), kind) | dict.fromkeys(INDICES, "*i32")
                signature |= {"out": "*fp32", "lse": "*fp32", "scale": "fp32"}
                signature |= dict.fromkeys((*STRIDES, *SIZES), "i32")
                constants = {"row_scale": None, "UNIT": 8, "L": 512, "R": 64}
                constants |= {"ONE_PAGE": one_page, "WIDE": dtype == torch.float32, "STAGES": stages, "FAR": False}
                constants |= {"BM": BM, "BN": BN, "BL": 512, "BR": 64}
                if dtype == torch.float16:
                    signature["row_scale"] = "*fp32"
                    del constants["row_scale"]
                name = f"decode {kinds[dtype]} {BM}x{BN} {'one page' if one_page else 'by table'}"
                entries.append(Compile(_decode_kernel, signature, constants, warps, stages, (target,), name))
    return entries
