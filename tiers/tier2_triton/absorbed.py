"""The absorbed half of the Triton tier: rounds of tokens, their work lists on the device, and the scratch they take.

A round is what runs at once: the scratch for latent queries, latent outputs and partial states is bounded, so a long
query goes through in several. Where a graph is to be captured there is one round, its lists have the size that the
capacity allows, and they stay where they are when the plan is refilled.

Axes: T new tokens (packed over requests), t tokens of a round, B requests, N heads, L KV rank, P nope, R rope, V value,
M rows of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan
from tiers.tier2_triton import ops
from tiers.tier2_triton.expanded import Sizes
from tiers.tier2_triton.hopper_rounds import HopperRound, hopper_sizes, plan_hopper
from tiers.tier2_triton.launch import Tile, decode_tile, processors
from tiers.tier2_triton.schedule import FIELDS, INVARIANT_SPLIT, Piece, Work, most_tiles, schedule

ROUND_BYTES = 1 << 28  # of latent queries, and of partial states


@dataclass
class Round:
    """One launch: `rows` of the batch, a slice or (t,) int64, their row_kv_lens (t,), and int32 lists on the device.

    items (n, 8), merges (tiles, 8) and counts (2,) are views of `lists` (1 + n + tiles, 8); block_table (B, max_pages).
    """

    rows: slice | Tensor
    tokens: int
    tile: Tile
    at_once: int
    lists: Tensor
    items: Tensor
    merges: Tensor
    counts: Tensor
    row_kv_lens: Tensor
    block_table: Tensor
    slots: int
    invariant: bool


def parts_at_once(parts: int) -> int:
    """Return how many partial states `combine` reads at once where a tile has up to `parts`: 1, 4 or 16."""
    return 1 if parts <= 4 else 4 if parts <= 32 else 16


def dot_dtype(need: Need) -> torch.dtype:
    """dtype of the products with cached rows: the query's, or float32 where the rows have another."""
    return need.dtype if need.layout.storage_dtype == need.dtype else torch.float32


def programs(need: Need, tile: Tile) -> int:
    """Return how many programs run at once: two a processor with 16 rows, one with more."""
    return processors(need.device) * (2 if tile[0] == 16 else 1)


def prepare_absorbed(up: UpProjection, need: Need) -> dict[str, Tensor]:
    """Put heads first: W_UK (N, P, L) and W_UV (N, L, V), contiguous, in the dtype of the products.

    Weights wider than the query are kept as they are, and the products are made in float32.
    """
    W_UK, W_UV = (W.detach().to(torch.promote_types(W.dtype, dot_dtype(need))) for W in up)
    return {"W_UK": W_UK.permute(1, 2, 0).contiguous(), "W_UV": W_UV.permute(1, 0, 2).contiguous()}


def tile_of(need: Need, query_len: int) -> Tile:
    """Return the tile for queries of so many tokens; in batch-invariant mode and for graphs the Need alone tells."""
    if need.batch_invariant:
        query_len = 1
    elif need.graph_capture and need.capacity is not None:
        query_len = need.capacity.max_query_len
    tile = decode_tile(need.arch, dot_dtype(need), need.L, need.R, max(1, query_len) * need.N)
    assert tile is not None, "why_not has refused"
    return tile


def plan_absorbed(
    need: Need,
    batch: AttentionBatch,
    requests: Sequence[int],
    old: Sequence[Round | HopperRound] | None = None,
    hopper: bool = False,
) -> list[Round | HopperRound]:
    """Cut the requests' tokens into rounds and upload their work; rows of no request join the last one.

    With Need.graph_capture the lists of `old` are filled again, so that a captured graph reads the new ones. `hopper`
    plans for the Hopper kernels.
    """
    tile = tile_of(need, max((batch.query_lens_host[b] for b in requests), default=1))
    groups = _pieces(need, batch, requests, tile)
    if need.graph_capture:
        groups = [[p for g in groups for p in g]]
    before = old[0] if old else None
    if hopper:
        again = before if need.graph_capture and isinstance(before, HopperRound) else None
        return [plan_hopper(need, _within(g), *_rows(need, batch, g), batch.block_table, again) for g in groups]
    if need.graph_capture:
        assert not isinstance(before, HopperRound)
        return [_fixed_round(need, batch, groups[0], tile, before)]
    return [_round(need, batch, group, tile) for group in groups]


def absorbed_sizes(need: Need, rounds: Sequence[Round | HopperRound], hopper: bool = False) -> Sizes:
    """Return the scratch of all rounds, (shape, dtype) by name; for a Need with a capacity whatever the batch is."""
    tokens = max((r.tokens for r in rounds), default=0)
    if hopper:
        c = need.capacity
        if c is not None:
            tokens = c.max_tokens if need.graph_capture else min(c.max_tokens, _token_budget(need))
        return hopper_sizes(need, [r for r in rounds if isinstance(r, HopperRound)], tokens)
    states = max((r.slots * r.tile[0] for r in rounds if isinstance(r, Round)), default=0)
    if need.capacity is not None and need.graph_capture:
        tokens = need.capacity.max_tokens
    if need.capacity is not None and not need.graph_capture:
        c, tokens, states = need.capacity, 0, 0
        for rows in (need.N, need.N * c.max_query_len):
            tile = decode_tile(need.arch, dot_dtype(need), need.L, need.R, rows)
            if tile is not None:
                most = most_tiles(need.N, tile[0], c.max_requests, c.max_tokens)
                states = max(
                    states,
                    min(most, _slot_budget(need, tile)) * tile[0] + 2 * programs(need, tile) * tile[0],
                )
                tokens = max(tokens, min(c.max_tokens, _token_budget(need)))
        if need.batch_invariant:
            states = max(states, -(-c.max_seq_len // INVARIANT_SPLIT) * 2 * max(64, need.N))
            states = max(states, _slot_budget(need, tile_of(need, 1)) * tile_of(need, 1)[0])
    wide, dtype = tokens * need.N, dot_dtype(need)
    sizes: Sizes = {"part": ((states, need.L), torch.float32), "part_lse": ((states,), torch.float32)}
    sizes |= {"q_latent": ((wide, need.L), dtype), "latent": ((wide, need.L), dtype)}
    if dtype == torch.float16:
        sizes["row_scale"] = ((wide,), torch.float32)
    return sizes


def attend_round(
    step: Round | HopperRound, q: Query, cache: PagedLatentCache, data: dict[str, Tensor], plan: Plan
) -> tuple[Tensor, Tensor]:
    """Attend a round's rows of q, nope (T, N, P) and pe (T, N, R): out (t, N, V) and lse (t, N) in new tensors."""
    need, dtype, t = plan.need, dot_dtype(plan.need), step.tokens
    nope, pe = q.nope[step.rows], q.pe[step.rows]
    W_UK, W_UV = data["W_UK"], data["W_UV"]
    scale = plan.scratch("row_scale", (t, need.N), torch.float32) if dtype == torch.float16 else None
    own = scale is not None or not nope.dtype == W_UK.dtype == W_UV.dtype == dtype
    wide = scale is not None and need.out_dtype in (torch.float32, torch.float64)
    if isinstance(step, HopperRound):
        q_latent, latent = (plan.scratch(n, (t, need.N, need.L), dtype) for n in ("q_latent", "latent"))
        return ops.attend_hopper(
            nope, pe, cache.data, step.block_table, step.row_kv_lens, step.units, step.work, step.merges, step.part,
            W_UK, W_UV, *_cut_states(step, plan), q_latent, latent, scale, need.softmax_scale, own, wide, step.M,
            step.at_once,
        )  # fmt: skip
    _, keys, warps, stages = step.tile
    part, part_lse = _partial_states(step, plan)
    q_latent, latent = (plan.scratch(n, (need.N, t, need.L), dtype) for n in ("q_latent", "latent"))
    own |= step.invariant
    return ops.attend_absorbed(
        nope, pe, cache.data, step.block_table, step.row_kv_lens, step.items, step.merges, step.counts, W_UK, W_UV,
        part, part_lse, q_latent, latent, scale, need.softmax_scale, own, wide, step.at_once, keys, warps, stages,
    )  # fmt: skip


def attend_latent_rounds(
    rounds: Sequence[Round | HopperRound],
    q_latent: Tensor,
    q_pe: Tensor,
    cache: PagedLatentCache,
    plan: Plan,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend absorbed queries alone: q_latent (T, N, L) and q_pe (T, N, R) to out (T, N, L) and lse (T, N) float32."""
    from tiers.tier2_triton.kernels.combine import combine
    from tiers.tier2_triton.kernels.decode import decode

    for step in rounds:
        assert isinstance(step.rows, slice), "all requests are absorbed here"
        if isinstance(step, HopperRound):
            _attend_latent_on_hopper(step, q_latent[step.rows], q_pe[step.rows], cache, plan, out, lse)
            continue
        part, part_lse = _partial_states(step, plan)
        bounds = (step.block_table, step.row_kv_lens, step.items, step.counts)
        queries = ops.dense(q_latent[step.rows]), ops.dense(q_pe[step.rows])
        decode(*queries, None, cache.data, *bounds, part, part_lse, plan.need.softmax_scale, step.tile)
        combine(part, part_lse, step.merges, step.counts[1:], out[step.rows], lse[step.rows], step.at_once)


def _attend_latent_on_hopper(
    step: HopperRound, q_latent: Tensor, q_pe: Tensor, cache: PagedLatentCache, plan: Plan, out: Tensor, lse: Tensor
) -> None:
    """The same for a round of the Hopper kernels, which write dense rows."""
    from tiers.tier2_triton.hopper.decode import decode

    to = out[step.rows], lse[step.rows]
    values, lses = (x if x.is_contiguous() else x.new_empty(x.shape) for x in to)
    decode(
        q_latent, q_pe, cache.data, step.block_table, step.row_kv_lens, step.units, step.work, step.merges, step.part,
        *_cut_states(step, plan), values, lses, plan.need.softmax_scale, step.M, step.at_once,
    )  # fmt: skip
    for target, made in zip(to, (values, lses), strict=True):
        if target is not made:
            target.copy_(made)


def _cut_states(step: HopperRound, plan: Plan) -> tuple[Tensor, Tensor]:
    """Scratch for what the Hopper kernels leave of units that are cut: out (2 p M, L) and base-2 LSE (2 p M,)."""
    rows = 2 * len(step.part) * step.M
    shapes = {"part": (rows, plan.need.L), "part_lse": (rows,)}
    part, part_lse = (plan.scratch(name, shape, torch.float32) for name, shape in shapes.items())
    return part, part_lse


def deliver_rounds(
    rounds: Sequence[Round | HopperRound],
    q: Query,
    cache: PagedLatentCache,
    data: dict[str, Tensor],
    plan: Plan,
    state: AttentionState,
) -> None:
    """Attend every round and put its rows into `state`, out (T, N, V) and lse (T, N)."""
    for step in rounds:
        out, lse = attend_round(step, q, cache, data, plan)
        state.out[step.rows] = out.to(state.out.dtype)
        if state.lse is not None:
            state.lse[step.rows] = lse


def _partial_states(step: Round, plan: Plan) -> tuple[Tensor, Tensor]:
    """Scratch for what `decode` leaves: out (K, M, L) and base-2 LSE (K, M), float32, for K slots."""
    shape = (step.slots, step.tile[0], plan.need.L)
    return plan.scratch("part", shape, torch.float32), plan.scratch("part_lse", shape[:2], torch.float32)


def _token_budget(need: Need) -> int:
    return max(1, ROUND_BYTES // (need.N * need.L * dot_dtype(need).itemsize))


def _slot_budget(need: Need, tile: Tile) -> int:
    return max(64, ROUND_BYTES // (tile[0] * need.L * 4))


def _pieces(need: Need, batch: AttentionBatch, requests: Sequence[int], tile: Tile) -> list[list[Piece]]:
    """Groups of pieces, one a round, within both budgets; `first` counts rows of the batch until `_round` maps them."""
    starts = [0, *accumulate(batch.query_lens_host)]
    causal, N, M = need.mask == "causal", need.N, tile[0]
    token_budget, slot_budget = _token_budget(need), _slot_budget(need, tile)
    if need.graph_capture:  # one round, whatever it takes
        token_budget = slot_budget = 1 << 40
    found: list[Piece] = []
    weights: list[int] = []
    for b in requests:
        query_len, seq_len = batch.query_lens_host[b], batch.seq_lens_host[b]
        parts = max(1, -(-seq_len // INVARIANT_SPLIT)) if need.batch_invariant else 1
        step = max(1, min(token_budget, slot_budget // parts * M // N))
        for first in range(0, query_len, step):
            tokens = min(step, query_len - first)
            keys = max(0, seq_len - (query_len - first - tokens)) if causal and seq_len else seq_len
            found.append(Piece(b, starts[b] + first, tokens, keys, causal))
            weights.append(-(-tokens * N // M) * parts)
    step = max(1, min(token_budget, slot_budget * M // N))
    for first in range(starts[-1], batch.num_tokens, step):  # rows of no request
        found.append(Piece(0, first, min(step, batch.num_tokens - first), 0, False))
        weights.append(-(-found[-1].tokens * N // M))
    groups: list[list[Piece]] = []
    tokens = slots = 0
    for piece, weight in zip(found, weights, strict=True):
        if not groups or tokens + piece.tokens > token_budget or slots + weight > slot_budget:
            groups.append([])
            tokens = slots = 0
        groups[-1].append(piece)
        tokens, slots = tokens + piece.tokens, slots + weight
    return groups


def _within(pieces: list[Piece]) -> list[Piece]:
    """The pieces with `first` counted within their round."""
    at = [0, *accumulate(p.tokens for p in pieces)]
    return [Piece(p.request, at[i], p.tokens, p.keys, p.causal) for i, p in enumerate(pieces)]


def _rows(need: Need, batch: AttentionBatch, pieces: list[Piece]) -> tuple[slice | Tensor, Tensor]:
    """The rows of a round, a slice or (t,) int64, and their row_kv_lens (t,)."""
    tokens, first = sum(p.tokens for p in pieces), pieces[0].first if pieces else 0
    ends = [p.first + p.tokens for p in pieces]
    if [p.first for p in pieces[1:]] == ends[:-1]:
        rows = slice(first, first + tokens)
        return rows, batch.row_kv_lens[rows].contiguous()
    index = np.concatenate([np.arange(p.first, p.first + p.tokens) for p in pieces])
    at = _to_device(torch.from_numpy(index), need)
    return at, batch.row_kv_lens.index_select(0, at)


def _round(need: Need, batch: AttentionBatch, pieces: list[Piece], tile: Tile) -> Round:
    work = schedule(_within(pieces), need.N, tile[:2], programs(need, tile), need.batch_invariant)
    tokens = sum(p.tokens for p in pieces)
    rows, bounds = _rows(need, batch, pieces)
    n = len(work.items)
    lists = _to_device(torch.from_numpy(_packed(work, n, len(work.merges))), need)
    at_once = 1 if need.batch_invariant else parts_at_once(work.parts)
    items, merges = lists[1 : n + 1], lists[n + 1 :]
    table = batch.block_table.contiguous()
    own = need.batch_invariant
    return Round(rows, tokens, tile, at_once, lists, items, merges, lists[0, :2], bounds, table, work.slots, own)


def _fixed_round(need: Need, batch: AttentionBatch, pieces: list[Piece], tile: Tile, old: Round | None) -> Round:
    """The one round of a captured graph: buffers of the capacity's size, filled again where they exist."""
    c = need.capacity
    assert c is not None, "why_not has refused"
    work = schedule(_within(pieces), need.N, tile[:2], programs(need, tile), need.batch_invariant)
    tiles = most_tiles(need.N, tile[0], c.max_requests, c.max_tokens)
    parts = -(-c.max_seq_len // INVARIANT_SPLIT)
    slots = tiles * parts if need.batch_invariant else tiles + 2 * programs(need, tile)
    width = max(1, -(-c.max_seq_len // need.page_size))
    if old is not None:
        step = old
    else:
        lists = torch.zeros(1 + slots + tiles, FIELDS, dtype=torch.int32, device=need.device)
        table = torch.zeros(c.max_requests, width, dtype=torch.int32, device=need.device)
        bounds = torch.zeros(c.max_tokens, dtype=torch.int32, device=need.device)
        items, merges, T = lists[1 : slots + 1], lists[slots + 1 :], batch.num_tokens
        own = need.batch_invariant  # the merge has one shape for all batches: the usual one of a batch this large
        at_once = 1 if own else 4 if 4 * tiles >= programs(need, tile) else 16
        step = Round(slice(0, T), T, tile, at_once, lists, items, merges, lists[0, :2], bounds, table, slots, own)
    packed = torch.from_numpy(_packed(work, slots, tiles))
    step.lists.copy_(packed.pin_memory() if need.device != "cpu" else packed, non_blocking=True)
    columns = min(width, batch.block_table.shape[1])
    step.block_table[: batch.block_table.shape[0], :columns].copy_(batch.block_table[:, :columns])
    step.row_kv_lens[: batch.num_tokens].copy_(batch.row_kv_lens)
    step.rows, step.tokens = slice(0, batch.num_tokens), batch.num_tokens
    return step


def _packed(work: Work, items: int, merges: int) -> np.ndarray:
    """Counts, items and merges in one array (1 + items + merges, 8), so that one copy brings them to the device."""
    packed = np.zeros((1 + items + merges, FIELDS), np.int32)
    packed[0, 0], packed[0, 1] = len(work.items), len(work.merges)
    packed[1 : 1 + len(work.items)] = work.items
    packed[1 + items : 1 + items + len(work.merges)] = work.merges
    return packed


def _to_device(x: Tensor, need: Need) -> Tensor:
    return x if need.device == "cpu" else x.pin_memory().to(need.device, non_blocking=True)
