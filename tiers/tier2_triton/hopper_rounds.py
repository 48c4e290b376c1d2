"""The absorbed half on Hopper: units of rows for `hopper.decode`, shared out over the GPU on the device.

A round is what runs at once, as in `absorbed`; here its work is shared out by a kernel (`hopper.schedule`) which `plan`
launches, so the host lists rows, which follow from the query lengths, and never looks at the lengths of keys. Where a
graph is captured the list has the size that the capacity allows, filled up with units that have no rows.

Axes: T new tokens (packed over requests), t tokens of a round, B requests, N heads, L KV rank, P nope, R rope, V value,
M rows of a unit, U units, p parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mla.cache import FloatRows
from mla.need import Need
from tiers.tier2_triton.launch import processors
from tiers.tier2_triton.schedule import Piece

FEW_ROWS, TILE, MOST_TILES = 32, 64, 4
ROWS = (512, 64)
DTYPES, SMALL_PAGES = (torch.bfloat16, torch.float16), (16, 32)
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass
class HopperRound:
    """One launch: `rows` of the batch, a slice or (t,) int64, their row_kv_lens (t,), and int32 lists on the device.

    units (U, 4), work (U + 1, 16), merges (U, 4) and part (p, 16) are those of `hopper.schedule`; `M` rows a unit.
    """

    rows: slice | Tensor
    tokens: int
    M: int
    at_once: int
    units: Tensor
    work: Tensor
    merges: Tensor
    part: Tensor
    row_kv_lens: Tensor
    block_table: Tensor


def why_not_hopper(need: Need) -> list[str]:
    """Return [] where the Hopper kernels serve `need`, else sentences; other Needs are the portable kernels'."""
    asked: dict[str, tuple[object, tuple]] = {
        "arch": (need.arch, ("sm_90",)),
        "dtype": (need.dtype, DTYPES),
        "(L, R)": ((need.L, need.R), (ROWS,)),
    }
    reasons = [
        f"{what} = {found} has no Hopper kernel, which is for {', '.join(map(str, allowed))}; use form = 'mqa'."
        for what, (found, allowed) in asked.items()
        if found not in allowed
    ]
    if not isinstance(need.layout, FloatRows) or need.layout.dtype != need.dtype:
        found = f"a cache of {need.layout.name} rows is not read by the Hopper kernels for queries of {need.dtype}"
        reasons.append(f"{found}; use FloatRows of the queries' dtype, or form = 'mqa'.")
    if need.page_size % TILE and need.page_size not in SMALL_PAGES:
        found = f"page_size = {need.page_size} neither holds whole blocks of {TILE} keys nor is 16 or 32"
        reasons.append(f"{found}, as the Hopper kernels need; use such pages, or form = 'mqa'.")
    if need.batch_invariant:
        reasons.append("batch_invariant = True needs borders at fixed places; use form = 'invariant'.")
    return reasons


def rows_of_a_unit(N: int, query_lens: Sequence[int]) -> int:
    """Return M: 16 or 32 rows where the longest query has no more, else the tiles of 64 that all have in common."""
    most = max(query_lens, default=1) * N
    if most <= FEW_ROWS:
        return 16 if most <= 16 else FEW_ROWS
    tiles = {-(-q * N // TILE) for q in query_lens}
    return TILE * (max(tiles) if len(tiles) == 1 and max(tiles) <= MOST_TILES else 1)


def plan_hopper(
    need: Need, pieces: list[Piece], rows: slice | Tensor, bounds: Tensor, table: Tensor, old: HopperRound | None = None
) -> HopperRound:
    """List the units of a round and share them out: `pieces` counted within it, its rows of the batch, their bounds.

    With Need.graph_capture the lists have the size that the capacity allows, and those of `old` are filled again.
    `bounds` (t,) int32 are the rows' row_kv_lens, `table` (B, max_pages) int32 is the batch's block table.
    """
    from tiers.tier2_triton.hopper.combine import SHAPES
    from tiers.tier2_triton.hopper.schedule import schedule

    N, c, captured = need.N, need.capacity, need.graph_capture
    tokens = sum(p.tokens for p in pieces)
    M = rows_of_a_unit(N, [c.max_query_len] if captured and c else [p.tokens for p in pieces if p.keys])
    units = _units(pieces, N, M)
    size = len(units)
    if captured and c is not None:
        size = c.max_requests + c.max_tokens * N // M + 1
        units = np.concatenate([units, np.zeros((size - len(units), 4), np.int32)])
    step = old
    if step is None:
        parts = processors(need.device) // max(1, M // TILE)
        new = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=need.device)
        requests = c.max_requests if captured and c else max(1, sum(p.keys > 0 for p in pieces))
        fits = lambda n: n * requests <= parts  # measured: as many states at once as a request is cut into
        at_once = max(filter(fits, SHAPES), default=min(SHAPES))
        if captured and c is not None:
            width = max(1, -(-c.max_seq_len // need.page_size))
            bounds_, table_ = new(c.max_tokens), new(c.max_requests, width)
        else:  # a batch of nothing but padding has no table, and parts without work read an entry before they know
            bounds_, table_ = bounds.contiguous(), table.contiguous() if table.numel() else new(1, 1)
        step = HopperRound(
            rows, tokens, M, at_once, new(size, 4), new(size + 1, 16), new(size, 4), new(parts, 16), bounds_, table_
        )
    host = torch.from_numpy(units)
    step.units.copy_(host.pin_memory() if need.device != "cpu" else host, non_blocking=True)
    if captured:
        columns = min(step.block_table.shape[1], table.shape[1])
        step.block_table[: table.shape[0], :columns].copy_(table[:, :columns])
        step.row_kv_lens[: len(bounds)].copy_(bounds)
        step.rows, step.tokens = rows, tokens
    lists = (step.units, step.row_kv_lens, step.block_table, step.work, step.merges, step.part)
    with torch.cuda.device_of(step.units):
        schedule(*lists, N, need.page_size, M)
    return step


def hopper_sizes(need: Need, rounds: Sequence[HopperRound], tokens: int) -> Sizes:
    """Return the scratch of all rounds of at most `tokens` tokens, (shape, dtype) by name: two states for each part."""
    states = max((2 * len(r.part) * r.M for r in rounds), default=0)
    if need.capacity is not None:
        states = 2 * processors(need.device) * TILE
    queries = ((tokens * need.N, need.L), need.dtype)
    sizes: Sizes = {"part": ((states, need.L), torch.float32), "part_lse": ((states,), torch.float32)}
    sizes |= {"q_latent": queries, "latent": queries}
    return sizes | ({"row_scale": ((tokens * need.N,), torch.float32)} if need.dtype == torch.float16 else {})


def _units(pieces: list[Piece], N: int, M: int) -> np.ndarray:
    """Request, first row, rows and 0 of every unit, (U, 4) int32; rows count within the round."""
    table = np.array([(p.request, p.first * N, p.tokens * N) for p in pieces], np.int64).reshape(-1, 3)
    counts = -(-table[:, 2] // M)
    which = np.repeat(np.arange(len(table)), counts)
    start = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * M
    request, first, rows = table[which].T
    return np.stack([request, first + start, np.minimum(rows - start, M), 0 * start], 1).astype(np.int32)
