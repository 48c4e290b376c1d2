"""Solutions of notebook 08: each section takes the place of the exercise cell of its name."""

import triton
import triton.language as tl


# %% ex1
@triton.jit
def scores_kernel(q, rows, scores, scale, S, L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """Write scores (S,) of one query (L + R,) over rows (S, L + R)."""
    k, c, r = tl.arange(0, BLOCK), tl.arange(0, L), tl.arange(0, R)
    live = k < S
    at = rows + k[:, None] * (L + R)
    k_c = tl.load(at + c[None, :], mask=live[:, None], other=0.0)  # (BLOCK, L)
    k_r = tl.load(at + L + r[None, :], mask=live[:, None], other=0.0)  # (BLOCK, R)
    q_c, q_r = tl.load(q + c), tl.load(q + L + r)
    score = tl.sum(k_c * q_c[None, :], 1) + tl.sum(k_r * q_r[None, :], 1)
    tl.store(scores + k, score * scale, mask=live)


# %% ex2
@triton.jit
def heads_kernel(
    q, rows, scores, scale, S, N, L: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write scores (N, S) of queries (N, L + R) over rows (S, L + R); N <= HEADS, S <= BLOCK."""
    h, k, c, r = tl.arange(0, HEADS), tl.arange(0, BLOCK), tl.arange(0, L), tl.arange(0, R)
    heads, live = h < N, k < S
    q_at, k_at = q + h[:, None] * (L + R), rows + k[:, None] * (L + R)
    q_c = tl.load(q_at + c[None, :], mask=heads[:, None], other=0.0)  # (HEADS, L)
    q_r = tl.load(q_at + L + r[None, :], mask=heads[:, None], other=0.0)
    k_c = tl.load(k_at + c[None, :], mask=live[:, None], other=0.0)  # (BLOCK, L)
    k_r = tl.load(k_at + L + r[None, :], mask=live[:, None], other=0.0)
    score = tl.dot(q_c, tl.trans(k_c), input_precision="ieee") + tl.dot(q_r, tl.trans(k_r), input_precision="ieee")
    tl.store(scores + h[:, None] * S + k[None, :], score * scale, mask=heads[:, None] & live[None, :])


# %% ex3
@triton.jit
def attend_kernel(
    q, rows, out, lse, scale, S, N, L: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write out (N, L) and natural lse (N,) of queries (N, L + R) over rows (S, L + R), BLOCK keys at a time."""
    h, k, c, r = tl.arange(0, HEADS), tl.arange(0, BLOCK), tl.arange(0, L), tl.arange(0, R)
    heads = h < N
    q_at = q + h[:, None] * (L + R)
    q_c = tl.load(q_at + c[None, :], mask=heads[:, None], other=0.0)
    q_r = tl.load(q_at + L + r[None, :], mask=heads[:, None], other=0.0)
    peak = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, L], tl.float32)
    for start in range(0, S, BLOCK):
        live = start + k < S
        k_at = rows + (start + k)[:, None] * (L + R)
        k_c = tl.load(k_at + c[None, :], mask=live[:, None], other=0.0)
        k_r = tl.load(k_at + L + r[None, :], mask=live[:, None], other=0.0)
        score = tl.dot(q_c, tl.trans(k_c), input_precision="ieee") + tl.dot(q_r, tl.trans(k_r), input_precision="ieee")
        score = tl.where(live[None, :], score * scale, float("-inf"))
        new = tl.maximum(peak, tl.max(score, 1))
        decay, weights = tl.exp(peak - new), tl.exp(score - new[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights, k_c, input_precision="ieee")
        peak = new
    tl.store(out + h[:, None] * L + c[None, :], acc / total[:, None], mask=heads[:, None])
    tl.store(lse + h, peak + tl.log(total), mask=heads)


# %% ex4
@triton.jit
def paged_kernel(
    q, cache, block_table, seq_lens, out, lse, scale, table_width, N,
    PAGE: tl.constexpr, L: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out (B, N, L) and natural lse (B, N) of queries (B, N, L + R) over cache (pages, PAGE, L + R)."""
    b = tl.program_id(0)
    S = tl.load(seq_lens + b)
    h, k, c, r = tl.arange(0, HEADS), tl.arange(0, BLOCK), tl.arange(0, L), tl.arange(0, R)
    heads = h < N
    q_at = q + (b * N + h)[:, None] * (L + R)
    q_c = tl.load(q_at + c[None, :], mask=heads[:, None], other=0.0)
    q_r = tl.load(q_at + L + r[None, :], mask=heads[:, None], other=0.0)
    peak = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, L], tl.float32)
    for start in range(0, S, BLOCK):
        key = start + k
        live = key < S
        page = tl.load(block_table + b * table_width + key // PAGE, mask=live, other=0)
        k_at = cache + (page * PAGE + key % PAGE)[:, None] * (L + R)
        k_c = tl.load(k_at + c[None, :], mask=live[:, None], other=0.0)
        k_r = tl.load(k_at + L + r[None, :], mask=live[:, None], other=0.0)
        score = tl.dot(q_c, tl.trans(k_c), input_precision="ieee") + tl.dot(q_r, tl.trans(k_r), input_precision="ieee")
        score = tl.where(live[None, :], score * scale, float("-inf"))
        new = tl.maximum(peak, tl.max(score, 1))
        decay, weights = tl.exp(peak - new), tl.exp(score - new[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights, k_c, input_precision="ieee")
        peak = new
    tl.store(out + (b * N + h)[:, None] * L + c[None, :], acc / total[:, None], mask=heads[:, None])
    tl.store(lse + b * N + h, peak + tl.log(total), mask=heads)


# %% ex5
@triton.jit
def combine_kernel(part, part_lse, out, lse, N, L: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr):
    """Write out (N, L) and natural lse (N,) from part (SPLITS, N, L) and base-2 part_lse (SPLITS, N)."""
    h, c = tl.arange(0, HEADS), tl.arange(0, L)
    heads = h < N
    peak = tl.full([HEADS], -1e30, tl.float32)
    for s in tl.static_range(SPLITS):
        peak = tl.maximum(peak, tl.load(part_lse + s * N + h, mask=heads, other=float("-inf")))
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, L], tl.float32)
    for s in tl.static_range(SPLITS):
        weight = tl.exp2(tl.load(part_lse + s * N + h, mask=heads, other=float("-inf")) - peak)
        rows = tl.load(part + (s * N + h)[:, None] * L + c[None, :], mask=heads[:, None], other=0.0)
        total += weight
        acc += weight[:, None] * rows
    some = total > 0
    total = tl.where(some, total, 1.0)
    tl.store(out + h[:, None] * L + c[None, :], acc / total[:, None], mask=heads[:, None])
    natural = (peak + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + h, tl.where(some, natural, float("-inf")), mask=heads)
