"""One small matrix product a head: absorbing W_UK into the query, and bringing the latent output to W_UV's width.

Motivation. Absorption costs 2 T N P L operations before the attention and 2 T N L V after it; a library's batched
product does both well, and is used by default. Two things it does not give. Its tile, and with it the order of a row's
sum, changes with T, so a row's bits depend on its batch mates: here a tile has 16 tokens and all of the row. And a
float16 product can pass 65504 (case P9): here each row may be divided by a power of two, which is exact, and the factor
is handed on.

Axes: T new tokens (packed over requests), N heads, K width of a row, J width of the result.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from tiers.tier2_triton.kernels.problem import Problem
from tiers.tier2_triton.launch import TARGETS, power

BT, STAGES = 16, 2
SIZES = ["T", "N", "x_stride_t", "x_stride_n", "out_stride_t", "out_stride_n"]


@triton.jit(do_not_specialize=SIZES)
def _per_head_kernel(x, W, out, row_scale, T, N, x_stride_t, x_stride_n, out_stride_t, out_stride_n,
                     UNIT: tl.constexpr, K: tl.constexpr, J: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                     BO: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """BT rows of one head: out = x W[n], divided by a power of two where `row_scale` takes it."""
    n = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    k, o = tl.arange(0, BK), tl.arange(0, BO)
    acc = tl.zeros([BT, BO], tl.float32)
    for first in range(0, K, BK):
        inside = first + k < K
        rows = x + (t * x_stride_t * UNIT + n * x_stride_n * UNIT)[:, None] + (first + k)[None, :]
        a = tl.load(rows, mask=(t < T)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            W + n * K * J + (first + k)[:, None] * J + o[None, :], mask=inside[:, None] & (o < J)[None, :], other=0.0
        )
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if row_scale is not None:
        largest = tl.max(tl.where(acc == acc, tl.abs(acc), 0.0), 1)  # an empty row may be NaN
        exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        excess = tl.minimum(tl.maximum(exponent - 13, 0), 126)  # below 2^14 nothing is divided; 255 marks inf and NaN
        factor = ((excess + 127) << 23).to(tl.float32, bitcast=True)
        acc = acc / factor[:, None]
        tl.store(row_scale + t * N + n, factor, mask=t < T)
    where = out + (t * out_stride_t * UNIT + n * out_stride_n * UNIT)[:, None] + o[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(t < T)[:, None] & (o < J)[None, :])


def per_head(x: Tensor, W: Tensor, out: Tensor, row_scale: Tensor | None = None) -> None:
    """Compute `out[t,n,:] = x[t,n,:] W[n]`, each row in the same order of additions whatever T is.

    x (T, N, K), W (N, K, J) contiguous, out (T, N, J), all float, sums in float32. With `row_scale` (T, N) float32 the
    row is divided by the power of two written there, 1 unless a number passes 2^14: `out * row_scale` is the product.
    Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2, W^UK absorbed into W^UQ and W^UV.
    """
    T, N, K = x.shape
    J = W.shape[2]
    strides = (*x.stride()[:2], *out.stride()[:2])
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    wide = x.dtype == torch.float32 or x.dtype != W.dtype
    _per_head_kernel[(triton.cdiv(T, BT), N)](
        x, W, out, row_scale, T, N, *(stride // unit for stride in strides),
        UNIT=unit, K=K, J=J, BT=BT, BK=16 if wide else 32, BO=power(J), WIDE=wide, num_warps=4, num_stages=STAGES,
    )  # fmt: skip


def per_head_reference(x: Tensor, W: Tensor, out: Tensor, row_scale: Tensor | None = None) -> None:
    """What `per_head` computes for x (T, N, K), in x's dtype."""
    product = torch.einsum("tnk,nko->tno", x, W.to(x.dtype))
    if row_scale is not None:
        largest = product.abs().amax(-1).clamp(min=2.0**13)
        row_scale.copy_(torch.exp2(torch.floor(torch.log2(largest)) - 13))
        product = product / row_scale[..., None]
    out.copy_(product)


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """Odd widths with strided rows ("toy"), or the absorption of 128 tokens of DeepSeek-V3 ("real")."""
    T, N, K, J = (19, 3, 40, 24) if size == "toy" else (128, 128, 128, 512)
    random = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=device)
    x = (draw(T, N, K + 8) * 30).to(dtype)[..., :K]
    W = draw(N, K, J).to(dtype) / K**0.5 * 30
    x[0] *= 40  # a row whose product passes float16
    scale = torch.full((T, N), float("nan"), device=device) if dtype == torch.float16 else None
    out = torch.full((T, N, J), float("nan"), dtype=dtype, device=device)
    arguments: dict[str, Any] = {"x": x, "W": W, "out": out, "row_scale": scale}
    nbytes = (T * N * (K + J) + N * K * J) * dtype.itemsize
    return Problem(arguments, ("out",) if scale is None else ("out", "row_scale"), nbytes, 2 * T * N * K * J)


def aot() -> list[Compile]:
    """Absorption (128 to 512, with and without the row's power of two) and values (512 to 128), per dtype.

    Values of float16 also in float32, where the output is to be that.
    """
    entries = []
    for kind in ("bf16", "fp16", "fp32"):
        for K, J in ((128, 512), (512, 128)):
            signature = {"x": f"*{kind}", "W": f"*{kind}", "out": f"*{kind}"}
            signature |= dict.fromkeys(SIZES, "i32")
            constants: dict[str, Any] = {"UNIT": 8, "K": K, "J": J, "BT": BT, "BO": J}
            constants |= {"BK": 16, "WIDE": True} if kind == "fp32" else {"BK": 32, "WIDE": False}
            scaled = kind == "fp16" and J == 512
            if scaled:
                signature["row_scale"] = "*fp32"
            else:
                constants["row_scale"] = None
            name = f"per_head {kind} {K} to {J}{' scaled' if scaled else ''}"
            entries.append(Compile(_per_head_kernel, signature, constants, 4, STAGES, TARGETS, name))
            if kind == "fp16" and not scaled:
                wide = signature | {"out": "*fp32"}
                entries.append(Compile(_per_head_kernel, wide, constants, 4, STAGES, TARGETS, f"{name} in fp32"))
    return entries
