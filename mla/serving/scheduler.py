"""Continuous batching: which tokens of which requests run in each step, and where their cache rows go.

Each step takes the requests that generate (one token each), then continues a prefill, then admits waiting requests,
all within `token_budget` tokens. Requests run first come, first served: every running request is older than every
waiting one. When pages run out, a prefill or an admission waits; a decode preempts the youngest running request, which
gives up its rows, keeps its generated tokens and computes them again later. So the oldest request always advances.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mla.errors import bad
from mla.serving.pool import OutOfPages, PagePool, Prefix
from mla.serving.step import Stats, Step
from mla.serving.traces import Request


@dataclass(eq=False)
class _Run:
    """A request on its way: the first `rows` tokens of `known` have rows in `table[:pages]`."""

    request: Request
    prefix: Prefix
    table: np.ndarray
    pages: int = 0
    rows: int = 0
    generated: int = 0
    counted: bool = False

    @property
    def known(self) -> int:
        return self.request.input_length + self.generated

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.rows == self.known - 1

    def held(self) -> np.ndarray:
        return self.table[: self.pages]

    def append(self, pages: Sequence[int]) -> None:
        self.table[self.pages : self.pages + len(pages)] = pages
        self.pages += len(pages)

    def replace(self, index: int, page: int) -> None:
        self.table = self.table.copy()  # steps already made keep their view of the old one
        self.table[index] = page


@dataclass(eq=False)
class _Draft:
    """The step that is being made."""

    budget: int
    placed: list[tuple[_Run, int, int]] = field(default_factory=list)  # run, query_len, seq_len
    tables: list[np.ndarray] = field(default_factory=list)
    slots: list[np.ndarray] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


class Scheduler:
    """Iterate over the steps that serve `requests` from `pool`.

    The clock is that of an offline replay: requests are admitted in the order of arrival, and with `step_ms` None all
    of them are there at the start; otherwise each step takes `step_ms` ms, a request waits for its arrival_ms, and an
    idle scheduler jumps to the next arrival. A request may share pages that an older one writes in the same step:
    all writes of a step precede its reads. Raises ValueError when ids repeat, arrivals are not in order, a limit is
    below 1, or a request could never fit in the pool.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        pool: PagePool,
        token_budget: int = 2048,
        max_running: int = 256,
        step_ms: float | None = None,
    ) -> None:
        for name, value in (("token_budget", token_budget), ("max_running", max_running)):
            if type(value) is not int or value < 1:
                raise bad(name, expected="an int of at least 1", got=repr(value), fix=f"pass {name}=256")
        if step_ms is not None and not step_ms > 0:
            raise bad("step_ms", expected="None or more than 0", got=repr(step_ms), fix="pass step_ms=None")
        _check_requests(requests, pool)
        self.requests = {request.id: request for request in requests}
        self.pool, self.token_budget, self.max_running, self.step_ms = pool, token_budget, max_running, step_ms
        self.stats = Stats()
        self.clock_ms = 0.0
        self._waiting = deque(self._start(request) for request in requests)
        self._running: list[_Run] = []  # oldest first

    def __iter__(self) -> Iterator[Step]:
        """Return the scheduler itself: steps are made one by one, as they are asked for."""
        return self

    def __next__(self) -> Step:
        """Make the next step; raises OutOfPages if pages held outside this scheduler keep every request waiting."""
        if not self._running and not self._waiting:
            raise StopIteration
        if not self._running:
            self.clock_ms = max(self.clock_ms, self._waiting[0].request.arrival_ms)
        self.pool.begin_step()
        draft = _Draft(self.token_budget)
        self._decode(draft)
        num_decodes = len(draft.placed)
        self._prefill(draft)
        if not draft.placed:
            raise OutOfPages(
                f"no request can advance: {self.pool.available} of {self.pool.num_pages} pages are available, "
                "and no running request holds the others"
            )
        self.clock_ms += self.step_ms or 0.0
        return self._finish(draft, num_decodes)

    def check(self) -> None:
        """Raise RuntimeError unless the pool counts exactly the pages of the running requests."""
        self.pool.check([run.held().tolist() for run in self._running])

    def _start(self, request: Request) -> _Run:
        prefix = self.pool.prefix(request.block_ids, request.block_size, request.input_length)
        return _Run(request, prefix, np.empty(_pages_needed(request, self.pool), dtype=np.int32))

    def _decode(self, draft: _Draft) -> None:
        i = 0
        while i < len(self._running) and draft.budget:
            run = self._running[i]
            # A victim is the youngest, so it has not been placed yet; it may be this very request.
            while run.decoding and self._reserve(run, run.known, draft) < run.known:
                self._preempt(draft)
                if i == len(self._running):
                    return
            if run.decoding:
                self._place(run, run.known, draft)
            i += 1

    def _prefill(self, draft: _Draft) -> None:
        for run in self._running[len(draft.placed) :]:
            if draft.budget and self._advance(run, draft) < run.known:
                return  # it waits for pages or budget, and so do all younger ones
        while draft.budget and not draft.preempted and self._waiting and len(self._running) < self.max_running:
            run = self._waiting[0]
            if self.step_ms is not None and run.request.arrival_ms > self.clock_ms:
                return
            if not self._admit(run, draft):
                return
            self._running.append(self._waiting.popleft())
            if self._advance(run, draft) < run.known:
                return

    def _advance(self, run: _Run, draft: _Draft) -> int:
        """Place as much of a prefill as budget and pages allow; return the tokens that then have rows."""
        stop = max(run.rows, min(run.known, run.rows + draft.budget))
        stop = self._reserve(run, stop, draft)
        if stop > run.rows or stop == run.known:
            self._place(run, stop, draft)
        return stop

    def _admit(self, run: _Run, draft: _Draft) -> bool:
        """Take over the pages of the longest cached prefix, if the pool can then hold all of the request's tokens."""
        pages, hit = self.pool.match(run.prefix, run.known)
        full = pages[: hit // self.pool.page_size]
        # The last, partial page is not counted as taken: it is read in place, or its copy is one of those needed.
        if self.pool.pages_for(run.known) - len(full) > self.pool.available - self.pool.unreferenced(full):
            return False
        self.pool.acquire(pages)
        run.append(pages)
        run.rows = hit
        draft.admitted.append((run.request.id, hit))
        self.stats.hit_tokens += hit
        self.stats.admissions += 1
        if not run.counted:
            run.counted = True
            whole = hit == run.request.input_length
            self.stats.full_prompt_hits += whole
            self.stats.prefix_blocks += len(run.request.block_ids)
            self.stats.prefix_blocks_hit += len(run.request.block_ids) if whole else hit // run.request.block_size
        return True

    def _reserve(self, run: _Run, stop: int, draft: _Draft) -> int:
        """Get pages that may be written for rows run.rows .. stop - 1; return how far they reach."""
        size = self.pool.page_size
        try:
            if run.rows < stop and run.rows % size:
                index = run.rows // size
                old = int(run.table[index])
                new = self.pool.writable(old, run.rows)
                if new != old:
                    draft.copies.append((old, new))
                    run.replace(index, new)
        except OutOfPages:
            return run.rows
        try:
            while run.pages * size < stop:
                run.append([self.pool.allocate()])
        except OutOfPages:
            return run.pages * size
        return stop

    def _place(self, run: _Run, stop: int, draft: _Draft) -> None:
        """Put rows up to `stop` in the step; a full prompt hit recomputes its last row without writing it."""
        start, size = min(run.rows, stop - 1), self.pool.page_size
        positions = np.arange(start, stop, dtype=np.int64)
        slots = run.table[positions // size].astype(np.int64) * size + positions % size
        slots[positions < run.rows] = -1
        draft.slots.append(slots)
        draft.tables.append(run.held())
        draft.placed.append((run, stop - start, stop))
        draft.budget -= stop - start
        self.stats.written_tokens += stop - run.rows
        self.pool.remember(run.prefix, run.table, run.rows, stop)
        run.rows = stop

    def _preempt(self, draft: _Draft) -> None:
        run = self._running.pop()
        self.pool.release(run.held().tolist())
        self.stats.lost_tokens += run.rows
        self.stats.preemptions += 1
        run.table, run.pages, run.rows = np.empty_like(run.table), 0, 0
        self._waiting.appendleft(run)
        draft.preempted.append(run.request.id)

    def _finish(self, draft: _Draft, num_decodes: int) -> Step:
        finished = []
        for run, _, stop in draft.placed:
            if stop == run.known:
                run.generated += 1
                if run.generated == run.request.output_length:
                    finished.append(run)
        # Only now: pages given back earlier could be written twice in this step.
        for run in finished:
            self.pool.release(run.held().tolist())
        self._running = [run for run in self._running if run.generated < run.request.output_length]
        step = Step(
            index=self.stats.steps,
            request_ids=tuple(run.request.id for run, _, _ in draft.placed),
            query_lens=tuple(query for _, query, _ in draft.placed),
            seq_lens=tuple(stop for _, _, stop in draft.placed),
            block_tables=tuple(draft.tables),
            slots=np.concatenate(draft.slots),
            copies=tuple(draft.copies),
            num_decodes=num_decodes,
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            finished=tuple(run.request.id for run in finished),
        )
        self._count(step)
        return step

    def _count(self, step: Step) -> None:
        stats, decodes = self.stats, step.num_decodes
        stats.steps += 1
        stats.finished += len(step.finished)
        stats.decode_tokens += decodes
        stats.prefill_tokens += sum(step.query_lens[decodes:])
        stats.unwritten_tokens += int((step.slots < 0).sum())
        stats.evictions, stats.copies = self.pool.evictions, self.pool.copies
        stats.peak_pages, stats.pages_created = self.pool.peak_pages, self.pool.created


def _pages_needed(request: Request, pool: PagePool) -> int:
    """Pages of a request at its end; the last token that it generates is never written."""
    return pool.pages_for(request.input_length + request.output_length - 1)


def _check_requests(requests: Sequence[Request], pool: PagePool) -> None:
    seen: set[int] = set()
    for i, request in enumerate(requests):
        name = f"requests[{i}]"
        if request.id in seen:
            raise bad(name, expected="ids that differ", got=f"id {request.id} again", fix="number the requests")
        seen.add(request.id)
        if i and request.arrival_ms < requests[i - 1].arrival_ms:
            raise bad(
                name,
                expected=f"arrivals in order, at or after {requests[i - 1].arrival_ms} ms",
                got=f"{request.arrival_ms} ms",
                fix="sort the requests by arrival_ms",
            )
        needed = _pages_needed(request, pool)
        if pool.num_pages is not None and needed > pool.num_pages:
            tokens = f"{request.input_length} prompt and {request.output_length} generated tokens"
            raise bad(
                name,
                expected=f"at most {pool.num_pages} pages of {pool.page_size} rows, the whole pool",
                got=f"request {request.id} with {tokens}, which needs {needed}",
                fix=f"pass a pool of num_pages={needed} or more, or leave the request out",
            )
