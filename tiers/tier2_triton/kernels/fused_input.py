"""Finish the input of a layer in one launch: norm of the latent, both rotations, and the write to the cache.

Motivation. Between the projections and attention stand four small steps: RMSNorm of kv_c, rotation of k_pe, rotation of
q_pe, and the store of the row at its slot. Each touches little, 2 (N R + L + R) numbers a token, 35 KB for DeepSeek-V3
in 16 bits; but in plain PyTorch they are some fifty launches, which in decode take longer than attention, a copy of the
frequencies to the GPU, and a wait for it.

Idea. One program has the latent row of a token, the others a block of its heads; each element is read once and rounded
once, from float32. Angles cannot be float32: at position 150,000 their unit in the last place is 1/64 radian. But turns
can be counted in integers: with a frequency in units of 2^-64 turns, the product with the position wraps around where
whole turns do, and its 64 bits are the fraction, exact whatever the position. Its top two bits, rounded, are the
quarter; the rest is at most an eighth of a turn, where short polynomials give sine and cosine in float32 to within one
unit in the last place. No table is read, and no float64 unit is needed.

Source: DeepSeek-V2 (arXiv 2405.04434) eqs. 9, 14 and 15; RoFormer (arXiv 2104.09864) eq. 34.

Axes: T new tokens (packed over requests), N heads, L KV rank, R rope.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from mla.projections import rms_norm
from mla.rope import apply_rope
from tiers.tier2_triton.kernels.problem import Problem
from tiers.tier2_triton.kernels.write import write_rows_reference

MOST_HEADS = 64  # of a program


@triton.jit
def _cos_sin(position, turns, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, AMPLITUDE: tl.constexpr):
    """AMPLITUDE times cos and sin (1, BLOCK_P) of position * turns, float32."""
    pair = tl.arange(0, BLOCK_P)[None, :]
    angle = position * tl.load(turns + pair, mask=pair < PAIRS, other=0)
    quarter = ((angle + (1 << 61)) >> 62) & 3
    rest = angle - (quarter << 62)
    t = rest.to(tl.float32)
    low = (rest - t.to(tl.int64)).to(tl.float32) * (1 / 2**64)
    t = t * (1 / 2**64)  # a turn is 1; t + low is exact
    square = t * t
    cos = tl.full((1, BLOCK_P), 1.0, tl.float32)
    curve = tl.full((1, BLOCK_P), 1.0, tl.float32)
    for k in tl.static_range(5, 0, -1):  # Taylor; what is left out is below 2^-28
        cos = 1.0 - square * cos * (39.47841760435743 / (2 * k * (2 * k - 1)))
        if k > 1:
            curve = 1.0 - square * curve * (39.47841760435743 / (2 * k * (2 * k + 1)))
    curve = -(6.579736267392905 * 6.283185307179586) * square * curve  # sin(2 pi t) / t - 2 pi
    sin = t * 6.283185482025146 + (low * 6.283185307179586 - t * 1.7484555e-07 + t * curve)
    swap = (quarter & 1) == 1
    turned_cos = tl.where(swap, sin, cos) * tl.where((quarter == 1) | (quarter == 2), -AMPLITUDE, AMPLITUDE)
    turned_sin = tl.where(swap, cos, sin) * tl.where(quarter >= 2, -AMPLITUDE, AMPLITUDE)
    return turned_cos, turned_sin


@triton.jit
def _rotate_rows(source, target, keep, cos, sin, R: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate rows (ROWS, R) from pointers `source` (ROWS, 1) to `target`; keep (ROWS, 1)."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_P)[None, :]
        mask = keep & (cols < R)
        x = tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], BLOCK_P, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (x.shape[0], 2 * BLOCK_P))
        tl.store(target + cols, turned.to(target.dtype.element_ty), mask=mask)
    else:
        cols = tl.arange(0, BLOCK_P)[None, :]
        mask = keep & (cols < R // 2)
        a = tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + R // 2 + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + cols, (a * cos - b * sin).to(target.dtype.element_ty), mask=mask)
        tl.store(target + R // 2 + cols, (a * sin + b * cos).to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pages"], do_not_specialize_on_alignment=["slot_mapping", "positions"])
def _fused_input_kernel(
    data, q_out, kv_c, k_pe, q_pe, slot_mapping, positions, kv_norm, turns, pages, page_size, eps, multiplier,
    stride_page, stride_row, stride_kv, stride_pe, stride_q_t, stride_q_n, stride_out_t, stride_out_n,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, AMPLITUDE: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if R > 0:
        cos, sin = _cos_sin(tl.load(positions + token), turns, R // 2, BLOCK_P, AMPLITUDE)
    if part == 0:
        slot = tl.load(slot_mapping + token)
        page = slot // page_size
        keep = (slot >= 0) & (page < pages)
        target = data + page * stride_page + slot % page_size * stride_row
        cols = tl.arange(0, BLOCK_L)
        mask = keep & (cols < L)
        x = tl.load(kv_c + token * stride_kv + cols, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(kv_norm + cols, mask=mask, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x) / L + eps) * weight * multiplier
        tl.store(target + cols, normed.to(data.dtype.element_ty), mask=mask)
        if R > 0:
            row = tl.zeros((1, 1), tl.int64)  # a tile of one
            rope = k_pe + token * stride_pe + row
            _rotate_rows(rope, target + L + row, keep & (row == 0), cos, sin, R, BLOCK_P, INTERLEAVED)
    elif R > 0:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        source, turned = q_pe + token * stride_q_t, q_out + token * stride_out_t
        _rotate_rows(
            source + head * stride_q_n, turned + head * stride_out_n, head < N, cos, sin, R, BLOCK_P, INTERLEAVED
        )


def fused_input(
    data: Tensor,
    q_out: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    q_pe: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    kv_norm: Tensor,
    turns: Tensor,
    eps: float,
    multiplier: float,
    amplitude: float,
    interleaved: bool,
) -> None:
    """Write `[norm(kv_c) multiplier, rope(k_pe)]` to data at slot_mapping and `rope(q_pe)` to q_out.

    data (pages, page_size, L + R) with any page and row strides; q_out and q_pe (T, N, R), kv_c (T, L), k_pe (T, R),
    any strides but 1 of the last axis; slot_mapping and positions (T,) int64, kv_norm (L,), turns (R/2,) int64 in
    2^-64 turns per token. `amplitude` is on cos and sin, `eps` in the norm, and pairs are (2i, 2i+1) if `interleaved`,
    else (i, i + R/2). float32 and 16-bit floats; what is written is rounded once, from float32. Slots are as in
    `write_rows`: negative ones, and those past the pool, are skipped.
    """
    T, N, R = q_pe.shape
    if T == 0:
        return
    tiles = _tiles(N, kv_c.shape[1], R)
    _fused_input_kernel[(T, 1 + (triton.cdiv(N, tiles["HEADS"]) if R else 0))](
        data, q_out, kv_c, k_pe, q_pe, slot_mapping, positions, kv_norm, turns, data.shape[0], data.shape[1],
        eps, multiplier, data.stride(0), data.stride(1), kv_c.stride(0), k_pe.stride(0), q_pe.stride(0),
        q_pe.stride(1), q_out.stride(0), q_out.stride(1), AMPLITUDE=amplitude, INTERLEAVED=interleaved, **tiles,
    )  # fmt: skip


def fused_input_reference(
    data: Tensor,
    q_out: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    q_pe: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    kv_norm: Tensor,
    turns: Tensor,
    eps: float,
    multiplier: float,
    amplitude: float,
    interleaved: bool,
) -> None:
    """Do what `fused_input` does by the functions of `mla`, rounding after each: data (pages, page_size, L + R)."""
    angles = (positions[:, None] * turns).to(torch.float64) * (2 * math.pi / 2**64)
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    kv_c = rms_norm(kv_c, kv_norm, eps) * multiplier
    write_rows_reference(data, kv_c, apply_rope(k_pe, cos, sin, interleaved), slot_mapping)
    q_out.copy_(apply_rope(q_pe, cos, sin, interleaved))


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """Make the arguments of `fused_input`, views of two projections, (T, N, P + R) and (T, L + R).

    "toy" has odd sizes, skipped slots, positions up to 150,000 and NaN where nobody may read; "real" is a step of 8192
    tokens of DeepSeek-V3.
    """
    toy = size == "toy"
    T, N, L, P, R, page_size, pages = (7, 5, 24, 12, 10, 3, 5) if toy else (8192, 128, 512, 128, 64, 64, 256)
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=random).to(dtype).to(device)
    queries, rows = draw(T, N, P + R), draw(T, L + R)
    data = torch.full((pages, page_size, L + R), float("nan"), dtype=dtype, device=device)
    slots, positions = torch.randperm(pages * page_size, generator=random)[:T], torch.arange(T)
    turns = 10000.0 ** (-2.0 * torch.arange(R // 2, dtype=torch.float64) / R) * (2.0**63 / math.pi)
    queries[..., :P] = float("nan")
    if toy:
        slots[[1, 4]] = -1
        rows[[1, 4]] = float("nan")
        positions = torch.tensor([0, 3, 1, 149_999, 4095, 2**20 + 7, 77])
    arguments = {
        "data": data,
        "q_out": torch.full((T, N, R), float("nan"), dtype=dtype, device=device),
        "kv_c": rows[:, :L],
        "k_pe": rows[:, L:],
        "q_pe": queries[..., P:],
        "slot_mapping": slots.to(device),
        "positions": positions.to(device),
        "kv_norm": (torch.rand(L, generator=random) + 0.5).to(dtype).to(device),
        "turns": turns.round().to(torch.int64).to(device),
        "eps": 1e-6,
        "multiplier": 0.7 if toy else 1.0,
        "amplitude": 1.2 if toy else 1.0,
        "interleaved": True,
    }
    written = int((slots >= 0).sum())
    numbers = 2 * (T * N * R + written * (L + R)) + L
    return Problem(arguments, ("data", "q_out"), numbers * dtype.itemsize + 16 * T)


def aot() -> list[Compile]:
    """Compile for DeepSeek-V3's sizes: both kinds of pairs, every dtype, 16 heads, and rows without rope."""
    kinds = [(dtype, interleaved, 128, 64) for dtype in ("bf16", "fp16", "fp32") for interleaved in (True, False)]
    kinds += [("bf16", True, 16, 64), ("bf16", True, 128, 0)]
    strides = ("page", "row", "kv", "pe", "q_t", "q_n", "out_t", "out_n")
    return [
        Compile(
            _fused_input_kernel,
            dict.fromkeys(("data", "q_out", "kv_c", "k_pe", "q_pe", "kv_norm"), "*" + dtype)
            | {"slot_mapping": "*i64", "positions": "*i64", "turns": "*i64", "pages": "i32"}
            | {"page_size": "i32:16", "eps": "fp32", "multiplier": "fp32"}
            | {f"stride_{name}": "i32:16" for name in strides},
            {"AMPLITUDE": 1.0, "INTERLEAVED": interleaved, **_tiles(N, 512, R)},
            name=f"fused_input {dtype} {'pairs' if interleaved else 'halves'} N={N} R={R}",
        )
        for dtype, interleaved, N, R in kinds
    ]


def _tiles(N: int, L: int, R: int) -> dict[str, int]:
    blocks = {"BLOCK_L": triton.next_power_of_2(L), "BLOCK_P": triton.next_power_of_2(max(R // 2, 1))}
    return {"N": N, "L": L, "R": R, "HEADS": min(MOST_HEADS, triton.next_power_of_2(N)), **blocks}
