"""Replay pool and scheduler without attention, and prove that every row a request reads is the one it needs.

The cache is one integer per row, its tag, which numbers (block id, position) for a prompt token and (request, position)
for a generated one. Copies and writes are carried out step by step, and all rows that each request reads are compared.

T new tokens (packed over requests), S cached tokens.
"""

from collections.abc import Hashable

import numpy as np

from mla.serving.scheduler import Scheduler
from mla.serving.step import Stats, Step
from mla.serving.traces import Request

_NOT_WRITTEN = -1


class Tags:
    """Number the rows of requests, one after another: equal numbers, and only those, are rows that hold the same."""

    def __init__(self) -> None:
        self._first: dict[Hashable, int] = {}
        self._count = 0

    def of(self, request: Request) -> np.ndarray:
        """Return the number of every row that a request may write: (S,) int32, S = input_length + output_length - 1."""
        size, answer = request.block_size, request.output_length - 1
        blocks = [self._run(size, "prompt", k, id) for k, id in enumerate(request.block_ids)]
        prompt = np.concatenate(blocks)[: request.input_length]
        return np.concatenate([prompt, self._run(answer, "generated", request.id)])

    def _run(self, rows: int, *owner: Hashable) -> np.ndarray:
        first = self._first.setdefault((rows, *owner), self._count)
        self._count = max(self._count, first + rows)
        return np.arange(first, first + rows, dtype=np.int32)


class RowStore:
    """The tags that a cache of (pages, page_size) rows holds after the copies and writes of each step."""

    def __init__(self, page_size: int) -> None:
        self._rows = np.full((1, page_size), _NOT_WRITTEN, dtype=np.int32)

    def apply(self, step: Step, num_pages: int, tags: np.ndarray) -> None:
        """Carry out the copies of a step, then write `tags` (T,) int32 at its slots; raise RuntimeError on a clash."""
        if num_pages > len(self._rows):
            grown = np.full((2 * num_pages, self._rows.shape[1]), _NOT_WRITTEN, dtype=np.int32)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        sources, targets = [src for src, _ in step.copies], [dst for _, dst in step.copies]
        written = step.slots >= 0
        slots = step.slots[written]
        if len(set(targets)) != len(targets) or len(np.unique(slots)) != len(slots):
            raise RuntimeError(f"step {step.index} writes a page or a row twice")
        self._rows[targets] = self._rows[sources]
        self._rows.reshape(-1)[slots] = tags[written]

    def read(self, table: np.ndarray, length: int) -> np.ndarray:
        """Return the first `length` rows of a block table, (length,) int32."""
        return self._rows.take(table, axis=0).reshape(-1)[:length]


def replay_rows(scheduler: Scheduler, check: bool = False) -> Stats:
    """Run a scheduler to its end and return its totals, comparing all rows that every step reads.

    `check` also checks the page pool after each step. Raises RuntimeError naming step, request and position of the
    first row that does not hold what was written for it, or if a request did not finish.
    """
    tags = Tags()
    wanted = {request.id: tags.of(request) for request in scheduler.requests.values()}
    store = RowStore(scheduler.pool.page_size)
    unfinished = set(wanted)
    for step in scheduler:
        parts = list(zip(step.request_ids, step.query_lens, step.seq_lens, step.block_tables, strict=True))
        new = np.concatenate([wanted[id][stop - count : stop] for id, count, stop, _ in parts])
        store.apply(step, scheduler.pool.created, new)
        for id, _, stop, table in parts:
            wrong = store.read(table, stop) != wanted[id][:stop]
            if wrong.any():
                raise RuntimeError(f"step {step.index}: request {id} reads a wrong row at position {wrong.argmax()}")
        if check:
            scheduler.check()
        unfinished -= set(step.finished)
    if unfinished:
        raise RuntimeError(f"requests {sorted(unfinished)} did not finish")
    return scheduler.stats
