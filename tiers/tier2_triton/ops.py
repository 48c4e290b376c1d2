"""The tier's device work as operators of torch: flat tensors and numbers, so that torch.compile sees through a layer.

An operator says which arguments it writes and, by a fake twin, which shapes it returns; the compiler takes its word for
both. Triton is imported when an operator runs.

Axes: T new tokens (packed over requests), B requests, N heads, L KV rank, P nope, R rope, V value, n work items,
K slots, M rows of a tile.
"""

from typing import Any

import torch
from torch import Tensor


def dense(x: Tensor) -> Tensor:
    """Return x, of any shape, with its last axis contiguous, as every kernel takes it; a copy only where it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


@torch.library.custom_op("mla_triton::write", mutates_args=("data",))
def write(data: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
    """Store kv_c (T, L) and k_pe (T, R) in data (pages, page_size, L + R) at slot_mapping (T,) int64; -1 is skipped."""
    from tiers.tier2_triton.kernels.write import write_rows

    with torch.cuda.device_of(data):
        write_rows(data, dense(kv_c), dense(k_pe), dense(slot_mapping))


@torch.library.custom_op("mla_triton::fused_input", mutates_args=("data",))
def fused_input(
    data: Tensor,
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
) -> Tensor:
    """Norm, rotate and write the rows of data (pages, page_size, L + R); return the rotated q_pe (T, N, R)."""
    from tiers.tier2_triton.kernels import fused_input as story

    q_out = torch.empty(q_pe.shape, dtype=q_pe.dtype, device=q_pe.device)
    rest = (
        dense(slot_mapping),
        dense(positions),
        dense(kv_norm),
        dense(turns),
        eps,
        multiplier,
        amplitude,
        interleaved,
    )
    with torch.cuda.device_of(data):
        story.fused_input(data, q_out, dense(kv_c), dense(k_pe), dense(q_pe), *rest)
    return q_out


@fused_input.register_fake
def _(data: Tensor, kv_c: Tensor, k_pe: Tensor, q_pe: Tensor, *_: Any) -> Tensor:
    return q_pe.new_empty(q_pe.shape)


@torch.library.custom_op(
    "mla_triton::attend_absorbed", mutates_args=("part", "part_lse", "q_latent", "latent", "row_scale")
)
def attend_absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    data: Tensor,
    block_table: Tensor,
    row_kv_lens: Tensor,
    items: Tensor,
    merges: Tensor,
    counts: Tensor,
    W_UK: Tensor,
    W_UV: Tensor,
    part: Tensor,
    part_lse: Tensor,
    q_latent: Tensor,
    latent: Tensor,
    row_scale: Tensor | None,
    softmax_scale: float,
    own_products: bool,
    wide: bool,
    at_once: int,
    keys: int,
    warps: int,
    stages: int,
) -> tuple[Tensor, Tensor]:
    """Absorb, decode, combine and bring to W_UV's width: out (T, N, V) in q_nope's dtype and lse (T, N) float32.

    `wide` returns out in float32, which a float16 query's can need; it goes with `own_products`.

    q_nope (T, N, P), q_pe (T, N, R), data (pages, page_size, L + R), block_table (B, max_pages) and row_kv_lens (T,)
    int32, items (n, 8), merges (tiles, 8) and counts (2,) int32 of `schedule`, W_UK (N, P, L), W_UV (N, L, V); scratch
    part (K, M, L) and part_lse (K, M) float32, q_latent and latent (N, T, L), row_scale (T, N) for float16.
    `own_products` takes our fixed-tile products; a float16 query needs them for its row_scale. The tile is M rows,
    `keys`, `warps`, `stages`. Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2.
    """
    from tiers.tier2_triton.kernels.combine import combine
    from tiers.tier2_triton.kernels.decode import decode
    from tiers.tier2_triton.kernels.per_head import per_head

    T, N, V = q_nope.shape[0], q_nope.shape[1], W_UV.shape[2]
    out = q_nope.new_empty(T, N, V, dtype=torch.float32 if wide else q_nope.dtype)
    lse = q_nope.new_empty(T, N, dtype=torch.float32)
    if T == 0:
        return out, lse
    q_nope, q_pe = dense(q_nope), dense(q_pe)
    by_token, values = q_latent.transpose(0, 1), latent.transpose(0, 1)
    with torch.cuda.device_of(data):
        if own_products:
            per_head(q_nope, W_UK, by_token, row_scale)
        else:
            torch.bmm(q_nope.transpose(0, 1), W_UK, out=q_latent)
        tile = (part.shape[1], keys, warps, stages)
        bounds = (block_table, row_kv_lens, items, counts)
        decode(by_token, q_pe, row_scale, data, *bounds, part, part_lse, softmax_scale, tile)
        combine(part, part_lse, merges, counts[1:], values, lse, at_once)
        if own_products:
            per_head(values, W_UV, out)
        else:
            torch.bmm(latent, W_UV, out=out.transpose(0, 1))
    return out, lse


@attend_absorbed.register_fake
def _(q_nope: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    (T, N, _), W_UV = q_nope.shape, rest[8]
    out_dtype = torch.float32 if rest[16] else q_nope.dtype
    return q_nope.new_empty(T, N, W_UV.shape[2], dtype=out_dtype), q_nope.new_empty(T, N, dtype=torch.float32)


@torch.library.custom_op(
    "mla_triton::attend_hopper", mutates_args=("part_out", "part_lse", "q_latent", "latent", "row_scale")
)
def attend_hopper(
    q_nope: Tensor,
    q_pe: Tensor,
    data: Tensor,
    block_table: Tensor,
    row_kv_lens: Tensor,
    units: Tensor,
    work: Tensor,
    merges: Tensor,
    part: Tensor,
    W_UK: Tensor,
    W_UV: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    q_latent: Tensor,
    latent: Tensor,
    row_scale: Tensor | None,
    softmax_scale: float,
    own_products: bool,
    wide: bool,
    M: int,
    at_once: int,
) -> tuple[Tensor, Tensor]:
    """The same by the Hopper kernels: out (T, N, V) in q_nope's dtype, `wide` in float32, and lse (T, N) float32.

    units (U, 4), work (U + 1, 16), merges (U, 4) and part (p, 16) int32 are those of `hopper.schedule` for units of M
    rows; scratch part_out (2 p M, L) and part_lse (2 p M,) float32, q_latent and latent (T, N, L); the rest, row_scale
    (T, N) too, is as in `attend_absorbed`.
    """
    from tiers.tier2_triton.hopper.decode import decode
    from tiers.tier2_triton.kernels.per_head import per_head

    out = q_nope.new_empty(*q_nope.shape[:2], W_UV.shape[2], dtype=torch.float32 if wide else q_nope.dtype)
    lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)
    if out.shape[0] == 0:
        return out, lse
    q_nope = dense(q_nope)
    with torch.cuda.device_of(data):
        if own_products:
            per_head(q_nope, W_UK, q_latent, row_scale)
        else:
            torch.bmm(q_nope.transpose(0, 1), W_UK, out=q_latent.transpose(0, 1))
        if row_scale is not None:  # the scale is that of the whole score; a power of two, exact but for subnormals
            q_pe = (q_pe / row_scale.unsqueeze(-1)).to(q_pe.dtype)
        lists = (block_table, row_kv_lens, units, work, merges, part, part_out, part_lse)
        decode(q_latent, q_pe, data, *lists, latent, lse, softmax_scale, M, at_once, row_scale)
        if own_products:
            per_head(latent, W_UV, out)
        else:
            torch.bmm(latent.transpose(0, 1), W_UV, out=out.transpose(0, 1))
    return out, lse


@attend_hopper.register_fake
def _(q_nope: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    (T, N, _), W_UV = q_nope.shape, rest[9]
    out_dtype = torch.float32 if rest[17] else q_nope.dtype
    return q_nope.new_empty(T, N, W_UV.shape[2], dtype=out_dtype), q_nope.new_empty(T, N, dtype=torch.float32)
