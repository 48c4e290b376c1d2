"""Compile ahead of the first request: every kernel that the tier can launch for a Need, each on dummy tensors.

Lengths, head counts and strides make no variants, so a handful of launches covers what a layer will meet.

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import CacheSpec
from mla.layer import InputSide
from mla.need import Need
from mla.projections import Query, UpProjection
from tiers.tier2_triton.absorbed import dot_dtype
from tiers.tier2_triton.expanded import CUDNN_FROM
from tiers.tier2_triton.launch import Tile, decode_tiles, expand_from

if TYPE_CHECKING:
    from tiers.tier2_triton.tier import TritonTier


def steps(tier: "TritonTier", need: Need, side: InputSide | None) -> list[Callable[[], object]]:
    """Return the calls that compile: writes, each tile of the decode with each merge, whole attends of each form."""
    plain = dataclasses.replace(need, capacity=None, graph_capture=False)
    found: list[Callable[[], object]] = [lambda: _write(tier, need, side)]
    for tile in decode_tiles(need.arch, dot_dtype(need), need.L, need.R):
        for at_once in (1, 4, 16):
            found.append(lambda tile=tile, at_once=at_once: _absorb_nothing(need, tile, at_once))  # type: ignore[misc]
    if tier.on_hopper(need):
        from tiers.tier2_triton.hopper.combine import SHAPES

        for M in (16, 32, 64):
            found += [lambda M=M, n=n: _decode_nothing(need, M, n) for n in SHAPES]  # type: ignore[misc]
    lengths = [(1, 0)]
    if tier.route(need) is not None:
        for new in {expand_from(need) + 1, CUDNN_FROM}:  # fresh, and with two parts to merge
            lengths += [(new, 0), (new, need.page_size)]
    return found + [lambda n=n: _attend(tier, plain, *n) for n in lengths]


def _write(tier: "TritonTier", need: Need, side: InputSide | None) -> None:
    cache = tier.new_cache(CacheSpec(1, need.page_size, need.layout, need.device))
    rows = _new(need, 1, need.L), _new(need, 1, need.R)
    batch = _batch(need, 1)
    tier.write(cache, *rows, batch.slot_mapping)
    if side is not None:
        q = Query(_new(need, 1, need.N, need.P), _new(need, 1, need.N, need.R))
        tier.fused_input(q, *rows, side, cache, batch)


def _absorb_nothing(need: Need, tile: Tile, at_once: int) -> None:
    """Decode and combine with empty work lists: they compile, and their programs return at once."""
    from tiers.tier2_triton.kernels.combine import combine
    from tiers.tier2_triton.kernels.decode import decode

    dtype = dot_dtype(need)
    zeros = torch.zeros(8, 8, dtype=torch.int32, device=need.device)
    q_latent = torch.empty(need.N, 1, need.L, dtype=dtype, device=need.device).transpose(0, 1)
    scale = torch.ones(1, need.N, device=need.device) if dtype == torch.float16 else None
    data = torch.empty(1, need.page_size, need.L + need.R, dtype=need.layout.storage_dtype, device=need.device)
    part = torch.empty(1, tile[0], need.L, device=need.device)
    part_lse, lse = torch.empty(1, tile[0], device=need.device), torch.empty(1, need.N, device=need.device)
    pe, work, count = _new(need, 1, need.N, need.R), zeros[1:2], zeros[0, :2]
    decode(q_latent, pe, scale, data, zeros[:1, :1], count[:1], work, count, part, part_lse, need.softmax_scale, tile)
    combine(part, part_lse, work, count[1:], q_latent, lse, at_once)


def _decode_nothing(need: Need, M: int, at_once: int) -> None:
    """The Hopper kernels over lists that name no work; each length and each number of heads is the same variant."""
    from tiers.tier2_triton.hopper.decode import decode

    ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=need.device)
    floats = lambda *shape: torch.empty(*shape, device=need.device)
    data = torch.empty(1, need.page_size, need.L + need.R, dtype=need.layout.storage_dtype, device=need.device)
    q_latent, q_pe = _new(need, 1, need.N, need.L), _new(need, 1, need.N, need.R)
    scale = torch.ones(1, need.N, device=need.device)
    for row_scale in (None, scale)[: 1 + (need.dtype == torch.float16)]:  # inner kernels, and attend in float16
        decode(
            q_latent, q_pe, data, ints(1, 1), ints(1), ints(1, 4), ints(2, 16), ints(1, 4), ints(1, 16),
            floats(2 * M, need.L), floats(2 * M), torch.empty_like(q_latent), floats(1, need.N),
            need.softmax_scale, M, at_once, row_scale,
        )  # fmt: skip


def _attend(tier: "TritonTier", need: Need, tokens: int, context: int) -> None:
    batch = _batch(need, tokens, context)
    cache = tier.new_cache(CacheSpec(batch.num_pages or 1, need.page_size, need.layout, need.device))
    cache.data.zero_()
    up = UpProjection(_new(need, need.L, need.N, need.P), _new(need, need.L, need.N, need.V))
    q = Query(_new(need, tokens, need.N, need.P), _new(need, tokens, need.N, need.R))
    tier.attend(q, cache, tier.prepare(up, need), tier.plan(need, batch))


def _batch(need: Need, tokens: int, context: int = 0) -> AttentionBatch:
    keys = tokens + context
    pages = -(-keys // need.page_size)
    seen = [keys if need.mask == "full" else context + i + 1 for i in range(tokens)]
    where = {"page_size": need.page_size, "num_pages": pages, "mask": need.mask, "device": need.device}
    return AttentionBatch.rows([tokens], [keys], [list(range(pages))], seen, **where)  # type: ignore[arg-type]


def _new(need: Need, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=need.dtype, device=need.device)
