"""Put the content and the position part of queries or keys side by side.

Motivation. Kernels that know one query and one key tensor (cuDNN's and flash attention behind PyTorch) want heads of
width P + R, while k_pe is one row for all heads. `torch.cat` needs the row expanded to every head first: that writes
N R numbers a key that nobody wants and reads them again.

Idea. A program writes a block of (row, head) pairs, the first P columns from one place and the R others from another,
whose head stride is 0 where all heads share the row: each number is written once, 2 (P + R) bytes a head in 16 bits.
Bits are moved as they are.

Axes: n rows (new tokens or keys), N heads, P nope, R rope.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from tiers.tier2_triton.kernels.problem import Problem

BLOCK_ROWS, NUM_WARPS = 16, 4


@triton.jit(do_not_specialize=["rows"])
def _concat_kernel(
    nope, pe, out, rows, heads,
    stride_nope_s, stride_nope_n, stride_pe_s, stride_pe_n, stride_out_s, stride_out_n,
    P: tl.constexpr, R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # of n * N
    own, s, n = row < rows, row // heads, row % heads
    cols = tl.arange(0, BLOCK_W)
    own, first, inside = own[:, None], (cols < P)[None, :], (cols < P + R)[None, :]
    left = tl.load((nope + s * stride_nope_s + n * stride_nope_n)[:, None] + cols[None, :], mask=own & first)
    right = tl.load((pe + s * stride_pe_s + n * stride_pe_n)[:, None] + (cols - P)[None, :], mask=own & inside & ~first)
    at = (out + s * stride_out_s + n * stride_out_n)[:, None] + cols[None, :]
    tl.store(at, tl.where(first, left, right), mask=own & inside)


def concat(nope: Tensor, pe: Tensor, out: Tensor) -> None:
    """Write `out[s, n] = [nope[s, n], pe[s, n]]`, bit for bit.

    nope (n, N, P); pe (n, N, R), or (n, R) for a row that all heads share; out (n, N, P + R); one dtype, any strides of
    all but the last axis.
    """
    n, N, P = nope.shape
    if n * N == 0:
        return
    R = pe.shape[-1]
    stride_pe = (pe.stride(0), pe.stride(1) if pe.dim() == 3 else 0)
    _concat_kernel[(triton.cdiv(n * N, BLOCK_ROWS),)](
        nope, pe, out, n * N, N, *nope.stride()[:2], *stride_pe, *out.stride()[:2],
        P=P, R=R, BLOCK_W=triton.next_power_of_2(P + R), BLOCK_ROWS=BLOCK_ROWS, num_warps=NUM_WARPS,
    )  # fmt: skip


def concat_reference(nope: Tensor, pe: Tensor, out: Tensor) -> None:
    """Define `concat` in plain PyTorch; nope (n, N, P), pe (n, N, R) or (n, R), out (n, N, P + R)."""
    shared = pe[:, None].expand(*nope.shape[:2], pe.shape[-1]) if pe.dim() == 2 else pe
    out.copy_(torch.cat([nope, shared], -1))


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """One call: "toy", 11 rows of odd sizes; "real", 16384 keys of DeepSeek-V3. nope (n, N, P), pe a slice (n, R)."""
    n, N, P, R, L = (11, 3, 12, 6, 20) if size == "toy" else (16384, 128, 128, 64, 512)
    random = torch.Generator(device).manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=device, dtype=torch.float32).to(dtype)
    nope, pe = draw(n, N, P), draw(n, L + R)[:, L:]
    out = torch.empty(n, N, P + R, dtype=dtype, device=device)
    nbytes = (nope.numel() + pe.numel() + out.numel()) * dtype.itemsize
    return Problem({"nope": nope, "pe": pe, "out": out}, ("out",), nbytes)


def aot() -> list[Compile]:
    """The variants of P, R = 128, 64 by dtype; those of keys and queries are one."""
    entries = []
    for kind in ("bf16", "fp16", "fp32"):
        kinds = dict.fromkeys(("nope", "pe", "out"), f"*{kind}") | {"rows": "i32", "heads": "i32:16"}
        constants = {"P": 128, "R": 64, "BLOCK_W": 256, "BLOCK_ROWS": BLOCK_ROWS}
        strides = {n: "i32:16" for n in _concat_kernel.arg_names if n.startswith("stride_")}
        entries.append(Compile(_concat_kernel, kinds | strides, constants, NUM_WARPS, name=f"concat {kind}"))
    return entries
