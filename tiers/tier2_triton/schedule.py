"""Plan the absorbed form on the host: which rows share a tile, where their keys are cut, in which order.

Pure numpy, no device, no triton. A work item is one program of `kernels.decode`, a merge is one tile of
`kernels.combine`; both are int32 rows of 8 numbers.

Axes: T new tokens (packed over requests), N heads, M rows of a tile, n work items.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FIELDS = 8
OVERHEAD = 128  # keys' worth of time that starting a segment and writing its state takes
INVARIANT_SPLIT = 4096  # keys of a segment in batch-invariant mode, from key 0 on
MAX_PARTS = 8192  # parts that a request is cut into at most


class Piece(NamedTuple):
    """Some tokens of one request that take the absorbed form: `tokens` rows from `first` on, seeing at most `keys`.

    `first` counts within the round; with `causal` the last token sees `keys` keys and each one before it one less.
    """

    request: int
    first: int
    tokens: int
    keys: int
    causal: bool


@dataclass(frozen=True)
class Work:
    """The items (n, 8) and merges (tiles, 8) of one launch, how many slots they fill, and the most parts of a tile."""

    items: np.ndarray
    merges: np.ndarray
    slots: int
    parts: int


def schedule(pieces: Sequence[Piece], N: int, tile: tuple[int, int], programs: int, invariant: bool = False) -> Work:
    """Cut the pieces into tiles of M = tile[0] rows and their keys into segments of whole blocks of tile[1] keys.

    `programs` is how many run at once. Segments are as long as that allows: fewer than 3 * programs + tiles of them, so
    one long request fills the device and many short ones are not cut. `invariant` cuts at multiples of 4096 keys
    instead, whatever else is in the batch. Each tile has at least one segment, without keys if it sees none.
    """
    M, block = tile
    request, first, start, rows, end = _tiles(pieces, N, M)
    tiles = len(request)
    if invariant:
        chunk = INVARIANT_SPLIT
    else:
        chunk = block * _blocks_of_a_segment(-(-end // block), programs, -(-OVERHEAD // block))
    parts = np.maximum(1, -(-end // chunk))
    slot = np.concatenate([[0], np.cumsum(parts)[:-1]]).astype(np.int64) if tiles else parts
    which = np.repeat(np.arange(tiles), parts)
    part = np.arange(parts.sum()) - slot[which] if tiles else which
    items = np.zeros((len(which), FIELDS), np.int32)
    begin = part * chunk
    fields = (request[which], first[which], start[which], rows[which], begin, np.minimum(begin + chunk, end[which]))
    for i, column in enumerate((*fields, slot[which] + part)):
        items[:, i] = column
    # The tiles of a request read the same keys: side by side, the second finds them in the L2 cache. Long ones first.
    order = np.lexsort((start[which], part, request[which], -end[which] // max(1, chunk)))
    merges = np.zeros((tiles, FIELDS), np.int32)
    for i, column in enumerate((first, start, rows, slot, parts)):
        merges[:, i] = column
    return Work(items[order], merges, int(parts.sum()), int(parts.max(initial=1)))


def _tiles(pieces: Sequence[Piece], N: int, M: int) -> tuple[np.ndarray, ...]:
    """Request, first token, first row, rows and end of keys of every tile."""
    table = np.array(pieces, np.int64).reshape(-1, 5)
    table[:, 2] *= N  # tokens become rows
    counts = -(-table[:, 2] // M)
    which = np.repeat(np.arange(len(table)), counts)
    start = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * M
    request, first, rows, keys, causal = table[which].T
    last = np.minimum(start + M, rows) - 1  # the last row of the tile; its token sees the most keys
    hidden = np.where((causal == 1) & (keys > 0), rows // N - 1 - last // N, 0)
    return request, first, start, rows, keys - hidden


def _blocks_of_a_segment(blocks: np.ndarray, programs: int, overhead: int) -> int:
    """Blocks per segment that give the least time: waves of programs times the mean segment, or the longest one."""
    longest = int(blocks.max(initial=0))
    if longest == 0:
        return 1
    cuts = np.unique(np.concatenate([np.arange(1, 17), np.geomspace(17, MAX_PARTS, 40).astype(np.int64)]))
    sizes = np.unique(-(-longest // cuts[cuts <= longest]))
    segments = np.maximum(1, -(-blocks[None, :] // sizes[:, None])).sum(1)
    allowed = segments <= len(blocks) + 2 * programs
    allowed[-1] = True  # the longest size cuts nothing
    waves = -(-segments // programs)
    mean = blocks.sum() / segments + overhead
    time = np.maximum(waves * mean, sizes + overhead) + segments / programs
    return int(sizes[np.where(allowed, time, np.inf).argmin()])


def most_tiles(N: int, M: int, requests: int, tokens: int) -> int:
    """Return how many tiles of M rows a batch within these bounds has at most, rows of no request among the tokens."""
    return tokens * N // M + requests + 1
