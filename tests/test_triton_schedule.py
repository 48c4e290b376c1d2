"""The host planner of the absorbed form: every (row, key) exactly once, cut as the device wants it."""

from itertools import pairwise

import numpy as np
import pytest

from tiers.tier2_triton.schedule import INVARIANT_SPLIT, Piece, most_tiles, schedule


def covered(work, pieces, N, M):
    """(request, token, head) -> sorted key ranges of its segments, read from items and merges."""
    found = {}
    for _, t0, m0, rows, begin, end, slot, _ in work.items.tolist():
        for m in range(m0, min(m0 + M, rows)):
            found.setdefault((t0 + m // N, m % N), []).append((begin, end, slot))
    return {k: sorted(v) for k, v in found.items()}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("N", "M"), [(16, 16), (128, 64), (5, 16), (3, 64)])
def test_every_row_sees_its_keys_once_and_merges_name_its_slots(N, M, invariant):
    pieces = [Piece(0, 0, 1, 9000, True), Piece(1, 1, 4, 70, True), Piece(2, 5, 3, 0, True), Piece(3, 8, 2, 50, False)]
    work = schedule(pieces, N, (M, 32), 264, invariant)
    rows = covered(work, pieces, N, M)
    assert len(rows) == 10 * N
    for p in pieces:
        for i in range(p.tokens):
            sees = p.keys - (p.tokens - 1 - i if p.causal and p.keys else 0)
            for n in range(N):
                ranges = [r[:2] for r in rows[p.first + i, n]]
                assert ranges[0][0] == 0
                assert all(a[1] == b[0] for a, b in pairwise(ranges))
                assert sees <= ranges[-1][1] <= p.keys
    slots = [s for t0, m0, r, slot, parts, *_ in work.merges.tolist() for s in range(slot, slot + parts)]
    assert sorted(slots) == list(range(work.slots)) == sorted(work.items[:, 6].tolist())


def test_R4_one_long_request_fills_the_device_and_many_are_not_cut():
    one = schedule([Piece(0, 0, 1, 131072, True)], 16, (16, 32), 264)
    assert 200 <= len(one.items) <= 264
    many = schedule([Piece(b, b, 1, 8192, True) for b in range(512)], 16, (16, 32), 264)
    assert len(many.items) <= 2 * 512
    assert schedule([Piece(0, 0, 1, 81920, True)], 8, (16, 32), 264).parts > 1


def test_N1_splits_follow_the_row_alone_in_invariant_mode():
    alone = schedule([Piece(0, 0, 1, 10000, True)], 16, (16, 32), 264, invariant=True)
    among = schedule([Piece(b, b, 1, 10000 if b == 7 else 33, True) for b in range(64)], 16, (16, 32), 264, True)
    mine = among.items[among.items[:, 0] == 7]
    assert sorted(map(tuple, mine[:, 4:6].tolist())) == sorted(map(tuple, alone.items[:, 4:6].tolist()))
    assert alone.items[:, 4].tolist() == [0, INVARIANT_SPLIT, 2 * INVARIANT_SPLIT]


def test_C10_never_more_segments_than_blocks_of_keys():
    work = schedule([Piece(0, 0, 4, 6, True)], 16, (16, 32), 264)
    assert work.parts == 1
    assert (work.items[:, 5] > work.items[:, 4]).all()


def test_no_work_for_no_tokens():
    work = schedule([], 16, (16, 32), 264)
    assert work.items.shape == (0, 8)
    assert work.slots == 0


def test_segments_stay_below_what_capacity_reserves():
    random = np.random.default_rng(0)
    for _ in range(200):
        B = int(random.integers(1, 40))
        lens = random.integers(1, 9, B)
        at = np.concatenate([[0], np.cumsum(lens)])
        pieces = [Piece(b, int(at[b]), int(lens[b]), int(random.integers(0, 50000)), True) for b in range(B)]
        N = int(random.choice([1, 5, 16, 128]))
        work = schedule(pieces, N, (64, 64), 132)
        assert len(work.merges) <= most_tiles(N, 64, B, int(lens.sum()))
        assert work.slots <= len(work.merges) + 2 * 132
