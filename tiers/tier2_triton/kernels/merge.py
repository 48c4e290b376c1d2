"""Merge two partial attention states of the same rows over disjoint keys.

Motivation. Where one kernel cannot see all keys at once (context and new tokens apart, several chunks), each part
leaves a normalised output and the log of its softmax denominator. Their merge is exact algebra and bound by memory:
12 V bytes for each row and head in float32, once, where plain PyTorch would pass over them a dozen times.

Idea. With m = max(lse_a, lse_b) and w = exp(lse - m), out = (w_a out_a + w_b out_b) / (w_a + w_b) and
lse = m + ln(w_a + w_b). Each program reads what it overwrites, so the result may lie where a lies. Products are not
fused with the sum: swapped arguments give the same bits.

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.

Axes: T new tokens (packed over requests), N heads, V value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from mla.state import AttentionState
from mla.state import merge as merge_states
from tiers.tier2_triton.kernels.problem import Problem

BLOCK_ROWS, NUM_WARPS = 16, 4
LSE_STRIDES = [f"stride_lse_{part}" for part in ("a_t", "a_n", "b_t", "b_n", "t", "n")]


@triton.jit(do_not_specialize=["rows", "heads", *LSE_STRIDES])
def _merge_kernel(
    out_a, lse_a, out_b, lse_b, out, lse, rows, heads,
    stride_out_a_t, stride_out_a_n, stride_lse_a_t, stride_lse_a_n,
    stride_out_b_t, stride_out_b_n, stride_lse_b_t, stride_lse_b_n,
    stride_out_t, stride_out_n, stride_lse_t, stride_lse_n,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # of T * N
    own, t, n = row < rows, row // heads, row % heads
    cols = tl.arange(0, BLOCK_V)
    mask = own[:, None] & (cols < V)[None, :]
    a = tl.load(lse_a + t * stride_lse_a_t + n * stride_lse_a_n, mask=own, other=float("-inf"))
    b = tl.load(lse_b + t * stride_lse_b_t + n * stride_lse_b_n, mask=own, other=float("-inf"))
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - base), tl.exp(b - base)
    total = weight_a + weight_b
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    # 0 * NaN is NaN: what an empty side holds is not read
    at_a = (out_a + t * stride_out_a_t + n * stride_out_a_n)[:, None] + cols[None, :]
    at_b = (out_b + t * stride_out_b_t + n * stride_out_b_n)[:, None] + cols[None, :]
    part_a = tl.load(at_a, mask=mask & (a != float("-inf"))[:, None], other=0.0).to(tl.float32)
    part_b = tl.load(at_b, mask=mask & (b != float("-inf"))[:, None], other=0.0).to(tl.float32)
    result = part_a * (weight_a / total)[:, None] + part_b * (weight_b / total)[:, None]
    at_out = (out + t * stride_out_t + n * stride_out_n)[:, None] + cols[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=mask)
    merged = tl.where(empty, float("-inf"), base + tl.log(total))
    tl.store(lse + t * stride_lse_t + n * stride_lse_n, merged, mask=own)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write the state over both key sets: `lse = ln(e^lse_a + e^lse_b)`, out the mean of both weighted by e^lse.

    out_a, out_b and out (T, N, V), each of any float dtype, and lse_a, lse_b, lse (T, N) float32 in natural log, of any
    strides but a contiguous last axis of the outs. `out` may be out_a and `lse` lse_a, or b's. (0, -inf) is the
    identity, exactly, whatever an empty side's out holds. An lse of +inf is not read as empty: adapters mend that.
    """
    T, N, V = out_a.shape
    if T * N == 0:
        return
    _merge_kernel[(triton.cdiv(T * N, BLOCK_ROWS),)](
        out_a, lse_a, out_b, lse_b, out, lse, T * N, N,
        *out_a.stride()[:2], *lse_a.stride(), *out_b.stride()[:2], *lse_b.stride(), *out.stride()[:2], *lse.stride(),
        V=V, BLOCK_V=triton.next_power_of_2(V), BLOCK_ROWS=BLOCK_ROWS, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def merge_reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Define `merge` in plain PyTorch; out_a (T, N, V) and lse_a (T, N) as there."""
    state = merge_states(AttentionState(out_a, lse_a), AttentionState(out_b, lse_b))
    out.copy_(state.out)
    lse.copy_(state.parts()[1])


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """One call: "toy", odd sizes, every pairing of empty sides; "real", 4096 rows of DeepSeek-V3; b in `dtype`.

    out_a (T, N, V) is float32 and the result goes there, as in chunked prefill. A toy's empty sides hold NaN.
    """
    T, N, V = (13, 3, 10) if size == "toy" else (4096, 128, 128)
    random = torch.Generator(device).manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=device, dtype=torch.float32).to(wide)
    out_a, lse_a, out_b, lse_b = draw(T, N, V), draw(T, N) * 3, draw(N, T, V).to(dtype).transpose(0, 1), draw(N, T).T
    if size == "toy":
        for out, lse, empty in ((out_a, lse_a, slice(0, 4)), (out_b, lse_b, slice(2, 6))):
            out[empty], lse[empty] = float("nan"), float("-inf")
    arguments = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "out": out_a, "lse": lse_a}
    nbytes = T * N * (V * (2 * wide.itemsize + dtype.itemsize) + 3 * wide.itemsize)
    return Problem(arguments, ("out", "lse"), nbytes, 4 * T * N * V)


def aot() -> list[Compile]:
    """The variants of V = 128: chunks of every dtype into float32, in place, and into an output of that dtype."""
    entries = []
    for part, result in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp16", "fp16")):
        kinds = {"out_a": "*fp32", "out_b": f"*{part}", "out": f"*{result}", "rows": "i32", "heads": "i32:16"}
        kinds |= dict.fromkeys(("lse_a", "lse_b", "lse"), "*fp32")
        constants = {"V": 128, "BLOCK_V": 128, "BLOCK_ROWS": BLOCK_ROWS, "stride_lse_a_n": 1, "stride_lse_n": 1}
        strides = {n: "i32:16" for n in _merge_kernel.arg_names if n.startswith("stride_") and n not in constants}
        name, options = f"merge fp32 and {part} into {result}", {"enable_fp_fusion": False}
        entries.append(Compile(_merge_kernel, kinds | strides, constants, NUM_WARPS, name=name, options=options))
    return entries
