"""The scheduler: steps by hand, replays of real traces with every row checked, random workloads, planted faults."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla.serving import SMALL_TRACE, OutOfPages, PagePool, Request, Scheduler, Step, read_trace, replay_rows
from mla.serving.pool import Prefix

TRACES = Path(__file__).parents[2] / "shared" / "traces"


def request(id: int, prompt: int, output: int, blocks: Sequence[int], size: int = 4, arrival: float = 0.0) -> Request:
    return Request(id, arrival, prompt, output, tuple(blocks), size)


def summary(step: Step) -> tuple:
    return step.request_ids, step.query_lens, step.seq_lens, step.slots.tolist()


def test_decode_first_then_chunked_prefill_within_the_budget() -> None:
    requests = [request(0, 3, 3, [1]), request(1, 7, 2, [2, 3])]
    steps = list(Scheduler(requests, PagePool(None, 4), token_budget=4))
    assert [summary(step) for step in steps] == [
        ((0, 1), (3, 1), (3, 1), [0, 1, 2, 4]),
        ((0, 1), (1, 3), (4, 4), [3, 5, 6, 7]),
        ((0, 1), (1, 3), (5, 7), [8, 12, 13, 14]),
        ((1,), (1,), (8,), [15]),
    ]
    assert [step.num_decodes for step in steps] == [0, 1, 1, 1]
    assert [step.finished for step in steps] == [(), (), (0,), (1,)]
    assert [step.admitted for step in steps] == [((0, 0), (1, 0)), (), (), ()]
    assert steps[2].positions().tolist() == [4, 4, 5, 6]
    assert [table.tolist() for table in steps[2].block_tables] == [[0, 2], [1, 3]]
    assert steps[3].padded_tables(-1).tolist() == [[1, 3]]
    assert steps[0].padded_tables().dtype == np.int32
    assert steps[0].slots.dtype == steps[0].positions().dtype == np.int64


def test_padded_tables_fill_what_is_unused() -> None:
    (step,) = Scheduler([request(0, 9, 1, [1, 2, 3]), request(1, 2, 1, [4])], PagePool(None, 4))
    assert step.padded_tables(-7).tolist() == [[0, 1, 2], [3, -7, -7]]


def test_max_running_and_finishing_at_the_end_of_prefill() -> None:
    requests = [request(k, 2, 1 + k % 2, [k]) for k in range(4)]
    steps = list(Scheduler(requests, PagePool(None, 4), max_running=2))
    assert [step.request_ids for step in steps] == [(0, 1), (1, 2), (3,), (3,)]


def test_a_full_prompt_hit_recomputes_its_last_token_without_writing() -> None:
    requests = [request(0, 6, 2, [1, 2]), request(1, 6, 3, [1, 2]), request(2, 8, 1, [1, 3])]
    scheduler = Scheduler(requests, PagePool(None, 4))
    first, second, third = scheduler
    assert summary(first) == ((0, 1, 2), (6, 1, 4), (6, 6, 8), [0, 1, 2, 3, 4, 5, -1, 8, 9, 10, 11])
    assert first.admitted == ((0, 0), (1, 6), (2, 4))
    assert first.prefix_hit_tokens == 10
    # Both write position 6 of the page they share: the first to write takes a copy.
    assert second.copies == ((1, 3),)
    assert summary(second) == ((0, 1), (1, 1), (7, 7), [14, 6])
    assert summary(third) == ((1,), (1,), (8,), [7])
    assert [table.tolist() for table in first.block_tables] == [[0, 1], [0, 1], [0, 2]]  # a snapshot
    stats = scheduler.stats
    assert (stats.prefix_blocks, stats.prefix_blocks_hit, stats.full_prompt_hits) == (6, 3, 1)
    assert (stats.hit_tokens, stats.unwritten_tokens, stats.copies, stats.prefix_hit_rate) == (10, 1, 1, 0.5)


def test_a_prefix_that_ends_inside_a_page_is_copied_and_continued() -> None:
    requests = [request(0, 12, 1, [1, 2, 3]), request(1, 12, 1, [1, 2, 4])]
    first, second = Scheduler(requests, PagePool(None, 16), max_running=1)
    assert summary(first)[3] == list(range(12))
    assert second.copies == ((0, 1),)
    assert summary(second) == ((1,), (4,), (12,), [24, 25, 26, 27])


def test_arrivals_on_the_clock() -> None:
    requests = [request(0, 2, 3, [1]), request(1, 2, 1, [2], arrival=15), request(2, 2, 1, [3], arrival=900)]
    scheduler = Scheduler(requests, PagePool(None, 4), step_ms=10)
    assert [step.request_ids for step in scheduler] == [(0,), (0,), (0, 1), (2,)]
    assert scheduler.clock_ms == 910
    assert len(list(Scheduler(requests, PagePool(None, 4)))) == 3  # without a clock all are there at the start


def test_the_youngest_is_preempted_and_keeps_its_generated_tokens() -> None:
    requests = [request(0, 4, 5, [1]), request(1, 4, 3, [2])]
    scheduler = Scheduler(requests, PagePool(2, 4), token_budget=8)
    steps = list(scheduler)
    # Both prompts fill the pool; each then needs another page, so request 1 gives way, with one token generated.
    assert [step.request_ids for step in steps] == [(0, 1), (0,), (0,), (0,), (0,), (1,), (1,)]
    assert steps[1].preempted == (1,)
    assert steps[0].finished == steps[1].finished == ()
    assert (steps[5].query_lens, steps[5].seq_lens, steps[5].num_decodes) == ((5,), (5,), 0)
    assert (scheduler.stats.preemptions, scheduler.stats.lost_tokens, scheduler.stats.decode_tokens) == (1, 4, 5)


def test_a_request_waits_while_its_pages_are_taken() -> None:
    requests = [request(0, 8, 3, [1, 2]), request(1, 8, 1, [3, 4]), request(2, 1, 1, [5])]
    scheduler = Scheduler(requests, PagePool(3, 4))
    assert [step.request_ids for step in scheduler] == [(0,), (0,), (0,), (1, 2)]  # and none overtakes it
    assert scheduler.stats.preemptions == 0


def test_a_request_that_can_never_fit_raises_at_once() -> None:
    requests = [request(0, 4, 1, [1]), request(7, 9, 5, [1, 2, 3])]
    with pytest.raises(
        ValueError, match=r"requests\[1\]: expected at most 3 pages .* request 7 .* 9 prompt and 5 .* 4\."
    ):
        Scheduler(requests, PagePool(3, 4))
    assert len(list(Scheduler([request(7, 8, 5, [1, 2])], PagePool(3, 4)))) == 5  # 12 rows: the last is not written


def test_pages_held_elsewhere_are_an_error_not_a_hang() -> None:
    pool = PagePool(2, 4)
    pool.allocate()
    with pytest.raises(OutOfPages, match="no request can advance: 1 of 2 pages are available"):
        list(Scheduler([request(0, 5, 1, [1, 2])], pool))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"token_budget": 0}, "token_budget: expected an int of at least 1"),
        ({"max_running": True}, "max_running: expected an int"),
        ({"step_ms": 0}, "step_ms: expected None or more than 0"),
    ],
)
def test_scheduler_arguments(arguments: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Scheduler([request(0, 4, 1, [1])], PagePool(2, 4), **arguments)


def test_requests_must_differ_and_be_in_order() -> None:
    with pytest.raises(ValueError, match=r"requests\[1\]: expected ids that differ, got id 3 again"):
        Scheduler([request(3, 4, 1, [1]), request(3, 4, 1, [1])], PagePool(2, 4))
    with pytest.raises(ValueError, match=r"requests\[1\]: expected arrivals in order"):
        Scheduler([request(0, 4, 1, [1], arrival=2), request(1, 4, 1, [1], arrival=1)], PagePool(2, 4))
    assert list(Scheduler([], PagePool(2, 4))) == []


def count_by_hand(path: Path) -> tuple[int, int, int]:
    """Blocks, blocks that an earlier request had, and prompts of which every block is such."""
    seen: set[int] = set()
    blocks = hits = whole = 0
    for line in path.read_text().splitlines():
        ids = json.loads(line).get("hash_ids", [])
        known = [id in seen for id in ids]
        blocks, hits, whole = blocks + len(ids), hits + sum(known), whole + (bool(ids) and all(known))
        seen.update(ids)
    return blocks, hits, whole


def test_small_trace_shares_copies_and_agrees_with_the_count() -> None:
    scheduler = Scheduler(read_trace(SMALL_TRACE), PagePool(None, 64), token_budget=256)
    stats = replay_rows(scheduler, check=True)
    assert (stats.prefix_blocks, stats.prefix_blocks_hit, stats.full_prompt_hits) == count_by_hand(SMALL_TRACE)
    assert (stats.prefix_blocks, stats.prefix_blocks_hit, stats.full_prompt_hits) == (54, 25, 1)
    assert stats.copies == 1


REAL = {
    "mooncake_conversation_200.jsonl": ((5537, 322, 0), 2782179, 71379),
    "mooncake_synthetic_100.jsonl": ((2631, 101, 1), 1313850, 17729),
}


def real(name: str) -> Path:
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not beside the repository")
    return TRACES / name


@pytest.mark.parametrize("name", REAL)
def test_real_trace_with_unlimited_pages(name: str) -> None:
    counts, prompts, outputs = REAL[name]
    requests = read_trace(real(name))
    stats = replay_rows(Scheduler(requests, PagePool(None, 64)))
    assert (stats.prefix_blocks, stats.prefix_blocks_hit, stats.full_prompt_hits) == counts == count_by_hand(real(name))
    assert stats.finished == len(requests)
    assert stats.decode_tokens == outputs - len(requests)
    assert stats.prefill_tokens - stats.unwritten_tokens + stats.hit_tokens == prompts
    assert (stats.preemptions, stats.evictions, stats.lost_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "spare"), [("mooncake_conversation_200.jsonl", 3), ("mooncake_synthetic_100.jsonl", 80)]
)
def test_real_trace_with_so_few_pages_that_requests_are_preempted(name: str, spare: int) -> None:
    _, prompts, outputs = REAL[name]
    requests = read_trace(real(name))
    largest = max(-(-(r.input_length + r.output_length - 1) // 64) for r in requests)
    stats = replay_rows(Scheduler(requests, PagePool(largest + spare, 64)))
    assert stats.evictions > 0
    assert stats.preemptions > 0
    assert stats.finished == len(requests)
    assert stats.hit_tokens + stats.written_tokens - stats.lost_tokens == prompts + outputs - len(requests)
    assert stats.peak_pages <= stats.pages_created <= largest + spare


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Request], PagePool, dict]:
    block = draw(st.sampled_from([1, 3, 4, 8, 20]))
    page = draw(st.sampled_from([1, 3, 16, 64]))
    requests, arrival = [], 0.0
    for id in range(draw(st.integers(1, 8))):
        ids = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)))
        prompt = block * (len(ids) - 1) + draw(st.sampled_from([1, (block + 1) // 2, block]))
        arrival += draw(st.sampled_from([0.0, 0.0, 7.0]))
        requests.append(Request(id, arrival, prompt, draw(st.integers(1, 9)), ids, block))
    largest = max(-(-(r.input_length + r.output_length - 1) // page) for r in requests)
    extra = draw(st.one_of(st.none(), st.integers(0, 5)))
    options = {
        "token_budget": draw(st.sampled_from([1, 2, 7, 50])),
        "max_running": draw(st.sampled_from([1, 2, 8])),
        "step_ms": draw(st.sampled_from([None, 2.0])),
    }
    return requests, PagePool(None if extra is None else largest + extra, page), options


class Watched(Scheduler):
    """A scheduler whose steps are checked against its promises as they are made."""

    def __next__(self) -> Step:
        step = super().__next__()
        size, start = self.pool.page_size, 0
        assert sum(step.query_lens) == len(step.slots) <= self.token_budget
        assert len(step.request_ids) == len(set(step.request_ids)) <= self.max_running
        assert set(step.query_lens[: step.num_decodes]) <= {1}
        assert not set(step.request_ids) & set(step.preempted)
        sources, targets = [a for a, _ in step.copies], [b for _, b in step.copies]
        assert not any(target in sources[i:] for i, target in enumerate(targets))
        written = set()
        for count, stop, table in zip(step.query_lens, step.seq_lens, step.block_tables, strict=True):
            assert len(table) == -(-stop // size)
            for position, slot in zip(range(stop - count, stop), step.slots[start : start + count], strict=True):
                assert slot in (-1, table[position // size] * size + position % size)
                written.add(int(slot) // size)
            start += count
        assert written >= set(targets)  # nothing is copied for nothing
        return step


@settings(max_examples=200, deadline=None)
@given(workloads())
def test_random_workloads_finish_with_the_right_rows(workload: tuple[list[Request], PagePool, dict]) -> None:
    requests, pool, options = workload
    scheduler = Watched(requests, pool, **options)
    stats = replay_rows(scheduler, check=True)
    assert stats.finished == len(requests)
    assert pool.referenced == 0
    rows = sum(r.input_length + r.output_length - 1 for r in requests)
    assert stats.hit_tokens + stats.written_tokens - stats.lost_tokens == rows
    assert stats.prefill_tokens + stats.decode_tokens == stats.written_tokens + stats.unwritten_tokens
    assert stats.admissions == len(requests) + stats.preemptions
    assert stats.prefix_blocks == sum(len(r.block_ids) for r in requests)
    if pool.num_pages is None:
        assert (stats.preemptions, stats.evictions) == (0, 0)


def test_random_workloads_reach_every_path() -> None:
    seen = {"preemptions": 0, "evictions": 0, "copies": 0, "full_prompt_hits": 0, "hit_tokens": 0}

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(workloads())
    def collect(workload: tuple[list[Request], PagePool, dict]) -> None:
        requests, pool, options = workload
        stats = replay_rows(Scheduler(requests, pool, **options))
        for name in seen:
            seen[name] += getattr(stats, name)

    collect()
    assert min(seen.values()) > 10, seen


def tiny_workload() -> Iterator[Scheduler]:
    """Shared prefixes, partial tails, copies, evictions and preemptions, in a few replays of one list of requests."""
    blocks = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [5], [1, 6], [6, 7, 8, 9], [2, 2], [1, 2, 3, 6], [5], [5, 1]]
    lengths = [10, 10, 12, 3, 8, 16, 8, 13, 3, 7]
    requests = [request(k, n, 3 + k % 4, ids) for k, (n, ids) in enumerate(zip(lengths, blocks, strict=True))]
    for page in (3, 4, 8):
        for pages in (None, -(-20 // page), 2 * -(-20 // page) + 1):
            for budget, most in ((5, 9), (100, 9), (100, 1)):
                yield Scheduler(requests, PagePool(pages, page), token_budget=budget, max_running=most)


def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "writable", lambda self, page, position: page)


def copy_only_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def writable(self: PagePool, page: int, position: int) -> int:
        return page if self._refs[page] == 1 else original(self, page, position)

    original = PagePool.writable
    monkeypatch.setattr(PagePool, "writable", writable)


def copy_of_a_page_not_yet_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def match(self: PagePool, prefix: Prefix, wanted: int) -> tuple[list[int], int]:
        self._fresh.clear()
        return original(self, prefix, wanted)

    original = PagePool.match
    monkeypatch.setattr(PagePool, "match", match)


def names_without_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefix, "key", lambda self, tokens: (0, tokens))


def remembered_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PagePool.remember

    def remember(self: PagePool, prefix: Prefix, table: Sequence[int], start: int, stop: int) -> None:
        original(self, prefix, table, start, min(stop + 3, len(table) * self.page_size))

    monkeypatch.setattr(PagePool, "remember", remember)


def evicted_page_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PagePool.allocate

    def allocate(self: PagePool) -> int:
        names = dict(self._index)
        page = original(self)
        self._index.update((key, old) for key, old in names.items() if key not in self._index)
        return page

    monkeypatch.setattr(PagePool, "allocate", allocate)


def freed_while_another_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(self: PagePool, pages: Sequence[int]) -> None:
        for page in pages:
            self._refs[page] = 1
            self._cached.pop(page, None)

    monkeypatch.setattr(PagePool, "acquire", acquire)


def preempted_rows_believed_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler._preempt

    def preempt(self: Scheduler, draft: object) -> None:
        run = self._running[-1]
        rows, pages, table = run.rows, run.pages, run.table
        original(self, draft)  # type: ignore[arg-type]
        run.rows, run.pages, run.table = rows, pages, table

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def released_before_the_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler._place

    def place(self: Scheduler, run: object, stop: int, draft: object) -> None:
        original(self, run, stop, draft)  # type: ignore[arg-type]
        if stop == run.known and run.generated + 1 == run.request.output_length:  # type: ignore[attr-defined]
            self.pool.release(run.held().tolist())  # type: ignore[attr-defined]
            run.pages = 0  # type: ignore[attr-defined]

    monkeypatch.setattr(Scheduler, "_place", place)


FAULTS = [
    no_copy,
    copy_only_what_is_held,
    copy_of_a_page_not_yet_written,
    names_without_the_chain,
    remembered_before_it_is_written,
    evicted_page_keeps_its_name,
    freed_while_another_holds_it,
    preempted_rows_believed_kept,
    released_before_the_step_is_over,
]


def test_the_tiny_workload_is_right() -> None:
    stats = [replay_rows(scheduler, check=True) for scheduler in tiny_workload()]
    assert all(sum(getattr(s, name) for s in stats) for name in ("preemptions", "evictions", "copies"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_replay_finds_a_planted_fault(fault: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    found = 0
    for scheduler in tiny_workload():
        try:
            replay_rows(scheduler)
        except (RuntimeError, ValueError, IndexError):
            found += 1
    assert found
