"""The chunk planner: the lists of the field with their chunk counts, and its invariants for any list."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_case import make_case

import tiers
from mla.chunks import Span, pack_chunks

COUNTS = [
    # key counts, cap, page, chunks
    ([960, *[16] * 7], 1024, 16, 2),
    ([2048, 320], 1024, 16, 3),
    ([1024] * 3, 1024, 16, 3),
    ([37, 1000, 5], 1024, 16, 2),
    ([1], 1024, 16, 1),
    ([1024], 1024, 16, 1),
    ([1025], 1024, 16, 2),
    ([64] * 3, 48, 16, 4),
    ([16, 32, 48, 64], 64, 16, 3),
    ([1, 64], 31, 16, 4),
    ([60000, *[16] * 31], 65536, 16, 1),
    ([64, 0, 64, 0], 1024, 16, 1),
    ([0, 0], 1024, 16, 0),
    ([], 1024, 16, 0),
]


def assert_invariants(key_counts: list[int], cap: int, page: int, chunks: list[list[Span]]) -> None:
    """Every key once and in order, at most `cap` rows without a gap, splits at pages, only the first span continues."""
    keys = [(span.request, key) for chunk in chunks for span in chunk for key in range(span.start, span.stop)]
    assert keys == [(request, key) for request, count in enumerate(key_counts) for key in range(count)]
    for chunk in chunks:
        assert chunk
        used = 0
        for i, span in enumerate(chunk):
            assert span.at == used
            assert span.stop > span.start
            assert span.start % page == 0
            assert span.stop % page == 0 or span.stop == key_counts[span.request]
            assert span.start == 0 or i == 0
            used += span.stop - span.start
        assert used <= cap


@pytest.mark.parametrize(("key_counts", "cap", "page", "expected"), COUNTS)
def test_number_of_chunks(key_counts, cap, page, expected):
    chunks = pack_chunks(key_counts, cap, page)
    assert len(chunks) == expected
    assert_invariants(key_counts, cap, page, chunks)


def test_spans_of_a_split_request():
    assert pack_chunks([1, 64], 31, 16) == [
        [Span(0, 0, 1, 0), Span(1, 0, 16, 1)],
        [Span(1, 16, 32, 0)],
        [Span(1, 32, 48, 0)],
        [Span(1, 48, 64, 0)],
    ]


@given(st.lists(st.integers(0, 70), max_size=8), st.integers(1, 9), st.integers(0, 40))
def test_invariants_for_any_list(key_counts, page, more):
    assert_invariants(key_counts, page + more, page, pack_chunks(key_counts, page + more, page))


@given(st.lists(st.integers(0, 70), max_size=8), st.integers(1, 9), st.integers(0, 40))
def test_no_chunk_is_left_for_rows_that_would_have_fitted(key_counts, page, more):
    cap = page + more
    chunks = pack_chunks(key_counts, cap, page)
    for chunk, following in itertools.pairwise(chunks):
        last, first = chunk[-1], following[0]
        room = cap - last.at - (last.stop - last.start)
        rest = key_counts[first.request] - first.start
        assert room < min(page, rest)


def test_H4_the_workspace_holds_the_sum_of_the_lengths():
    # not 4 x 32 rows: the last row of each request would land in its neighbour
    [chunk] = pack_chunks([33] * 4, 132, 16)
    assert [(span.at, span.stop) for span in chunk] == [(0, 33), (33, 33), (66, 33), (99, 33)]


def test_H5_a_chunk_that_is_no_multiple_of_the_page_is_cut_at_a_page():
    assert [(s.start, s.stop) for [s] in pack_chunks([10], 6, 4)] == [(0, 4), (4, 10)]
    assert [(s.start, s.stop) for [s] in pack_chunks([15], 6, 4)] == [(0, 4), (4, 8), (8, 12), (12, 15)]


def test_A2_a_request_without_context_is_in_no_chunk():
    chunks = pack_chunks([6, 0], 4, 2)
    assert [(span.request, span.start, span.stop) for [span] in chunks] == [(0, 0, 4), (0, 4, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_A2_the_short_request_of_a_chunked_step_is_finite_and_right(dtype):
    case = make_case([2, 3], [8, 3], page_size=2, dtype=dtype)
    tier = tiers.get("paged:mha", max_workspace_tokens=4)
    assert tier.plan(case.need, case.batch).report["chunks"] == 3
    case.check(case.run(tier))


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (([64], 15, 16), ValueError, "max_workspace_tokens: expected an int >= 16, got 15.*allow at least one page"),
        (([64], 0, 1), ValueError, "max_workspace_tokens: expected an int >= 1, got 0"),
        (([64], 64.0, 16), TypeError, "max_workspace_tokens: expected an int >= 16, got 64.0"),
        (([64], 64, 0), ValueError, "page_size: expected an int >= 1, got 0"),
        (([64, -1], 64, 16), ValueError, r"key_counts\[1\]: expected an int >= 0, got -1"),
        (([64, 2.0], 64, 16), TypeError, r"key_counts\[1\]: expected an int >= 0, got 2.0"),
    ],
)
def test_bad_input_is_named(arguments, kind, text):
    with pytest.raises(kind, match=f"^{text}"):
        pack_chunks(*arguments)
