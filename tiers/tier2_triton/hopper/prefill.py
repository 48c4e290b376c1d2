"""Attention of the expanded form on Hopper: one warp that loads, two warpgroups that compute 64 rows each.

Motivation. With whole keys and values at hand the tensor cores are the bound, and exponentials come next: 128 x 128
scores cost 2,560 cycles of products and 1,024 of exponentials, so the two have to overlap. The portable kernel
(`kernels.prefill`) takes the same work list; this one is for P, R, V = 128, 64, 128 and 192, 64, 256. `prefill_kernel`
is what runs on the device.

Idea. A warpgroup starts the scores of the next block of keys and then the product of this one's weights and values,
waits for the scores only, and does their softmax while the second product runs. Two warpgroups share the blocks and
fill each other's gaps. Keys are boxes of 64 columns, two or three of k_nope and one of k_pe, which all heads share, so
nothing is concatenated. A block has 128 keys; with values of 256 columns, whose output takes half of a warpgroup's
registers, 64. A program takes tile after tile, as a counter says, and loads the next one while it writes the
last. Heads that run side by side are so few that their keys and values stay in L2. The barriers are

    q0_full, q0_empty, q1_full, q1_empty    the query rows of either warpgroup, one phase a tile
    k_full, k_empty, v_full, v_empty        of each stage; empty when both warpgroups have said so
    next_full, next_empty                   the number of the next tile

Masks are in the first block and in those past the lowest bound. Source: FlashAttention-3 (arXiv 2407.08608), algorithm
2 and section 3.1; DeepSeek-V2 (arXiv 2405.04434), eqs. 9 to 18.

Axes: T new tokens (packed over requests), n keys in the workspace, N heads, P nope, R = 64 rope, V value.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from mla.aot import Compile
from mla.errors import bad
from tiers.tier2_triton.hopper.decode import tile as descriptor
from tiers.tier2_triton.hopper.device import LN2
from tiers.tier2_triton.hopper.prefill_kernel import _prefill_kernel
from tiers.tier2_triton.kernels.prefill import PrefillTile, spans_problem
from tiers.tier2_triton.kernels.prefill import prefill_reference as portable_reference
from tiers.tier2_triton.kernels.problem import Problem
from tiers.tier2_triton.launch import processors

SIZES = {128: (128, 128), 192: (256, 64)}  # of P: V, and keys of a block
L2_BYTES = 32 << 20  # what keys and values of the heads side by side may take
TILE = (128,)  # rows
TOY = ((0, 221, 0, 337, 0, 0, 0), (221, 65, 337, 129, 16, 221, 1), (286, 190, 466, 200, 0, 286, 2), (476, 3) + (0,) * 5)


def prefill(
    q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, row_kv_lens: Tensor, tiles: Tensor,
    acc: Tensor, out: Tensor, lse: Tensor, softmax_scale: float, tile: tuple[int, ...] = TILE,
    together: int | None = None,
) -> None:  # fmt: skip
    """Attend as `kernels.prefill.prefill` does, with the same work list: `softmax(scale q k^T) v` over every tile.

    q_nope (T, N, P), q_pe (T, N, 64), k_nope (n, N, P), k_pe (n, 64) and v (n, N, V), all bfloat16 or all float16, P
    and V 128 and 128 or 192 and 256; row_kv_lens (T,) and tiles (num_tiles, 7) int32, tiles of at most 128 rows; acc
    (A, N, V) float32, out (T, N, V) of any float dtype, lse (T, N) float32, natural log. `together` is how many heads
    run side by side. Queries that a descriptor cannot describe are copied; raises ValueError for keys and values that
    it cannot, and for other sizes and tiles.
    """
    if tuple(tile) != TILE:
        raise bad("tile", expected=f"{TILE}, its rows", got=str(tile), fix="leave it out")
    if tiles.shape[0] == 0:
        return
    P = q_nope.shape[2] if q_nope.shape[2] in SIZES else 128
    V, BN = SIZES[P]
    N, n = q_nope.shape[1], max(1, k_nope.shape[0])
    if not k_nope.shape[0]:  # a descriptor of nothing is refused; what it describes instead is masked
        k_nope, k_pe, v = (x.new_zeros(1, *x.shape[1:]) for x in (k_nope, k_pe, v))
    q, pe = (x if isinstance(matrix_of(x, x.shape[2]), Tensor) else x.contiguous().clone() for x in (q_nope, q_pe))
    given = (("q_nope", q, P, 64), ("q_pe", pe, 64, 64), ("k_nope", k_nope, P, BN), ("k_pe", k_pe, 64, BN))
    descriptors = []
    for name, x, width, rows in (*given, ("v", v, V, BN)):
        if not isinstance(found := matrix_of(x if x.dim() == 3 else x.unsqueeze(1), width), Tensor):
            raise bad(name, expected=f"aligned rows of {width} columns a head", got=found, fix="use route 'triton'")
        descriptors.append(descriptor(found, rows, width if name == "v" else 64))
    together = max(1, min(N, together or L2_BYTES // (n * 2 * (P + V))))
    grid = min(tiles.shape[0] * N, processors(str(q.device)))
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    _prefill_kernel[(grid,)](
        *descriptors, row_kv_lens, tiles, counter, acc, out, lse, tiles.shape[0], N, together,
        q.stride(1), pe.stride(1), k_nope.stride(1), v.stride(1), *acc.stride()[:2], *out.stride()[:2], *lse.stride(),
        softmax_scale / LN2.value, P // 64 + 1, BN, V, num_warps=4,
    )  # fmt: skip


def matrix_of(x: Tensor, width: int) -> Tensor | str:
    """View x (rows, N, C) as a matrix (rows, N heads side by side), or say why a descriptor cannot describe it."""
    size, columns = x.element_size(), (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    apart = x.stride(0) if x.shape[0] > 1 else -(-columns // 8) * 8
    if x.shape[2] != width or x.dtype not in (torch.bfloat16, torch.float16):
        return f"{tuple(x.shape)} of {x.dtype}"
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) < width) or apart < columns:
        return f"strides {x.stride()}, where heads do not lie side by side in a row"
    if x.data_ptr() % 16 or apart * size % 16 or (x.shape[1] > 1 and x.stride(1) * size % 16):
        return f"strides {x.stride()}, {x.data_ptr() % 16} bytes past a multiple of 16"
    return x.as_strided((x.shape[0], columns), (apart, 1))


def prefill_reference(**arguments: Any) -> None:
    """Define `prefill` as the portable kernel is defined, for q_nope (T, N, P) and so on."""
    portable_reference(**arguments)


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """One call: "toy", odd sizes and all flags, "wide", that for P, R, V = 192, 64, 256, or "real", 16384 causal rows.

    Tensors are as in `prefill`, such as q_nope (T, N, P).
    """
    spans, N = (((0, 16384, 0, 16384, 0, 0, 0),), 128) if size == "real" else (TOY, 3)
    P = 192 if size == "wide" else 128
    sizes = (N, P, 64, SIZES[P][0])
    found = spans_problem(spans, sizes, PrefillTile(128, 128, 4, 2, 1), dtype, device, seed)
    found.arguments["tile"] = TILE
    return found


def aot() -> list[Compile]:
    """What is launched, per dtype and size; heads, lengths and most strides are numbers."""
    return [compile_entry(kind, P=P) for P in SIZES for kind in ("bf16", "fp16")]


def compile_entry(kind: str, out: str = "", P: int = 128) -> Compile:
    """What `prefill` launches for tensors of `kind` and P, and results of type `out` (of the same)."""
    dtype, (V, BN) = {"bf16": gl.bfloat16, "fp16": gl.float16}[kind], SIZES[P]
    layout = lambda *shape: gl.NVMMASharedLayout.get_default_for(list(shape), dtype)
    matrix = lambda *shape: f"tensordesc<{kind}[{shape[0]}, {shape[1]}],{layout(*shape)!r}>"
    found = dict.fromkeys(("q_desc", "q_pe_desc"), matrix(64, 64)) | {"v_desc": matrix(BN, V), "scale": "fp32"}
    found |= dict.fromkeys(("k_desc", "k_pe_desc"), matrix(BN, 64)) | {"out": f"*{out or kind}"}
    found |= dict.fromkeys(("bounds", "tiles", "counter"), "*i32") | dict.fromkeys(("acc", "lse"), "*fp32")
    found |= dict.fromkeys(("num_tiles", "N", "together", "head_q", "head_pe", "head_k", "head_v"), "i32")
    found |= dict.fromkeys(("lse_t", "lse_n"), "i32") | dict.fromkeys(("acc_t", "acc_n", "out_t", "out_n"), "i32:16")
    constants = {"BOXES": P // 64 + 1, "BN": BN, "V": V}
    name = f"prefill {kind}{' to ' + out if out else ''}{f', {P + 64}/{V}' * (P != 128)}"
    return Compile(_prefill_kernel, found, constants, 4, targets=("sm_90",), name=name)
