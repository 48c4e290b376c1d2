"""What the scheduler says: one step of a replay, and the totals so far.

T new tokens (packed over requests), B requests.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a replay: carry out `copies`, write T rows at `slots`, then attend.

    `request_ids`, `query_lens`, `seq_lens` (keys including the new ones) and `block_tables` (int32, one per request)
    have length B; the first `num_decodes` requests decode, the others prefill. The new tokens of a request are
    positions seq_len - query_len .. seq_len - 1. `slots` is (T,) int64, page * page_size + row, or -1: do not write.
    `copies` are (source, destination) pages, in order; a destination is never a later source. `admitted` pairs each
    request that started in this step with its prefix hit in tokens; `preempted` and `finished` are request ids. The
    arrays are snapshots: a step stays right while later ones are made.
    """

    index: int
    request_ids: tuple[int, ...]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: tuple[np.ndarray, ...]
    slots: np.ndarray
    copies: tuple[tuple[int, int], ...]
    num_decodes: int
    admitted: tuple[tuple[int, int], ...]
    preempted: tuple[int, ...]
    finished: tuple[int, ...]

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens whose rows the requests admitted in this step found in the cache."""
        return sum(hit for _, hit in self.admitted)

    def positions(self) -> np.ndarray:
        """Return the position in its request of each new token, (T,) int64."""
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        return np.concatenate([np.arange(s - q, s, dtype=np.int64) for q, s in pairs])

    def padded_tables(self, fill: int = 0) -> np.ndarray:
        """Return the block tables as one array (B, most pages of a request) int32, `fill` in the unused entries."""
        padded = np.full((len(self.block_tables), max(map(len, self.block_tables))), fill, dtype=np.int32)
        for row, table in zip(padded, self.block_tables, strict=True):
            row[: len(table)] = table
        return padded


@dataclass
class Stats:
    """Running totals of a replay.

    Blocks, and hits of blocks, are those of the trace, counted when a request is first admitted. Rows satisfy
    `hit_tokens + written_tokens - lost_tokens` = sum of (input_length + output_length - 1) once all have finished:
    the last generated token is never written. `unwritten_tokens` are recomputed without writing (full prompt hits).
    `peak_pages` is the most referenced at once; `pages_created` also counts cached ones: the size a cache must have.
    """

    steps: int = 0
    finished: int = 0
    prefix_blocks: int = 0
    prefix_blocks_hit: int = 0
    full_prompt_hits: int = 0
    hit_tokens: int = 0
    written_tokens: int = 0
    unwritten_tokens: int = 0
    lost_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    admissions: int = 0
    preemptions: int = 0
    evictions: int = 0
    copies: int = 0
    peak_pages: int = 0
    pages_created: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Return prefix_blocks_hit / prefix_blocks; 0 before the first admission."""
        return self.prefix_blocks_hit / max(self.prefix_blocks, 1)
