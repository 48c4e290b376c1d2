"""The replay of a trace through tiers: what it counts, what it checks, and that it sees a broken tier.

T new tokens, N heads, L KV rank, R rope.
"""

import dataclasses

import pytest
import torch

import tiers
from mla.adapters import from_attend
from mla.cache import FloatRows, PagedLatentCache
from mla.presets import preset
from mla.serving.hidden import HiddenSource
from mla.serving.replay import ReplaySpec, replay
from mla.serving.source import TokenSource
from mla.serving.traces import SMALL_TRACE, Request, read_trace
from mla.state import AttentionState
from mla.tier import Tier
from mla.weights import MLAWeights

CONFIG = preset("toy")
# The second request repeats the first one's prompt (a full hit, and a shared tail that is copied on write).
REQUESTS = [
    Request(0, 0.0, 20, 4, (0, 1, 2), 8),
    Request(1, 0.0, 20, 3, (0, 1, 2), 8),
    Request(2, 5.0, 30, 2, (0, 3, 4, 5), 8),
]


def make_spec(dtype: torch.dtype = torch.float32, **fields) -> ReplaySpec:
    return ReplaySpec(CONFIG, FloatRows(CONFIG.L, CONFIG.R, dtype), dtype, **({"page_size": 16} | fields))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_tiers_are_right_on_every_row_of_a_small_run(dtype):
    names = ["naive:mha", "naive:mqa", "paged", "template"]
    ticks: list[tuple[int, int]] = []
    report = replay(make_spec(dtype), REQUESTS, [tiers.get(n) for n in names], lambda *at: ticks.append(at))
    assert [(run.name, run.status) for run in report.runs] == [(n, "ok") for n in names]
    assert report.rows_per_step is None
    # 20 and 3 decodes; a full hit recomputes 1 of 20, and 2 decodes; 30 (the 8 shared rows lie in a page that is being
    # written in the same step) and 1 decode
    assert {run.verdict.rows for run in report.runs} == {23 + 3 + 31}
    assert ticks[-1] == (57, 57)
    stats = report.stats
    assert (stats.full_prompt_hits, stats.prefix_blocks, stats.copies) == (1, 10, 1)
    for run in report.runs:
        assert 0 < run.verdict.used_out <= 1
        assert run.peak_workspace > 0
        assert run.decode_steps > 0


def test_a_pool_too_small_for_all_preempts_and_stays_right():
    many = [Request(i, float(i), 40, 12, (("own", i, 0), ("own", i, 1)), 32) for i in range(6)]
    report = replay(make_spec(page_size=8, num_pages=16, max_running=6), many, [tiers.get("paged")])
    assert report.stats.preemptions > 0
    assert report.stats.evictions > 0
    assert report.stats.finished == 6
    assert report.runs[0].status == "ok"


def broken(change) -> Tier:
    whole = tiers.get("naive:mha")

    def attend(q, cache, batch, up, need):
        prepared = whole.prepare(up, need)
        return change(whole.attend(q, cache, prepared, whole.plan(need, batch)), batch)

    return from_attend("broken", attend)


def decode_only(change):
    """Break decode rows (steps of one new token a request) alone."""
    return lambda state, batch: change(state) if batch.max_query_len == 1 else state


@pytest.mark.parametrize(
    "change",
    [
        decode_only(lambda s: AttentionState(s.out * 1.001, s.lse)),
        decode_only(lambda s: AttentionState(s.out, s.lse * 1.442695)),
        decode_only(lambda s: AttentionState(s.out.roll(1, dims=1), s.lse)),
    ],
    ids=["scaled", "base-2 lse", "head off by one"],
)
def test_a_tier_that_is_wrong_in_decode_alone_is_a_mismatch_beside_right_ones(change):
    report = replay(make_spec(), REQUESTS, [tiers.get("paged"), broken(change)])
    assert [run.status for run in report.runs] == ["ok", "mismatch"]
    verdict = report.runs[1].verdict
    at = verdict.out_at if verdict.used_out > 1 else verdict.lse_at
    assert max(verdict.used_out, verdict.used_lse) > 1
    assert at is not None
    request, position = at[1], at[2]
    assert position >= REQUESTS[request].input_length - 1


def test_a_tier_that_writes_the_wrong_slot_is_found_in_the_cache():
    @dataclasses.dataclass(frozen=True)
    class Shifted(type(tiers.get("naive:mha"))):  # a naive tier whose write is off by one row for later tokens
        def write(self, cache, kv_c, k_pe, slot_mapping):
            cache.write(kv_c, k_pe, torch.where(slot_mapping > 40, slot_mapping - 1, slot_mapping))

        def new_cache(self, spec):  # what it leaves unwritten is read, and may be anything otherwise
            cache = super().new_cache(spec)
            cache.data.zero_()
            return cache

    report = replay(make_spec(), REQUESTS, [Shifted("mha")])
    assert report.runs[0].status == "mismatch"
    assert "finds another kv_c" in report.runs[0].verdict.fault


def test_a_tier_that_raises_or_refuses_has_a_row_and_the_others_go_on():
    def explode(state, batch):
        raise RuntimeError("out of cheese")

    refusing = from_attend("refusing", lambda *a: None, lambda need: ["it is Sunday; wait for Monday."])
    report = replay(make_spec(), REQUESTS, [broken(explode), refusing, tiers.get("paged")])
    assert [run.status for run in report.runs] == ["raised", "refused", "ok"]
    assert report.runs[0].reasons == ["step 0: RuntimeError: out of cheese"]
    assert report.runs[1].reasons == ["it is Sunday; wait for Monday."]


def test_rows_are_sampled_when_asked_and_results_of_all_rows_must_be_finite():
    def poison(state, batch):
        state.out[-1, 0, 0] = float("nan")
        return state

    report = replay(make_spec(rows_per_step=1), REQUESTS, [tiers.get("paged"), broken(poison)])
    assert report.runs[0].verdict.rows == report.stats.steps
    assert report.runs[1].status == "mismatch"
    assert "not finite" in report.runs[1].verdict.fault


def test_token_rows_are_the_same_bits_however_they_are_asked_for():
    weights = MLAWeights.random(CONFIG, seed=3)
    make = lambda: TokenSource(CONFIG, weights, HiddenSource(CONFIG.H, 3), cache_bytes=1)
    whole = make().tokens(REQUESTS[0], 0, 23)
    pieces = [make().tokens(REQUESTS[0], a, b) for a, b in ((0, 3), (3, 17), (17, 21), (21, 23))]
    for i in (1, 2):
        assert torch.equal(whole[i], torch.cat([p[i] for p in pieces]))
    assert torch.equal(whole[0].pe, torch.cat([p[0].pe for p in pieces]))
    shared, own = make().rows(REQUESTS[1], 23), make().rows(REQUESTS[2], 30)
    assert torch.equal(whole[1][:20], shared[0][:20])
    assert not torch.equal(whole[1][20:], shared[0][20:])
    assert torch.equal(whole[1][:8], own[0][:8])
    assert not torch.isclose(whole[1][8:16], own[0][8:16]).any()


def test_the_packaged_trace_has_shared_prefixes_a_full_hit_and_a_copy():
    requests = read_trace(SMALL_TRACE)
    report = replay(make_spec(page_size=64), requests[:4], [tiers.get("paged")])
    assert report.runs[0].status == "ok"
    assert report.stats.full_prompt_hits == 1
    assert report.stats.prefix_blocks_hit == 2 + 5


def test_caches_are_the_tiers_own():
    made: list[PagedLatentCache] = []

    @dataclasses.dataclass(frozen=True)
    class Watching(type(tiers.get("naive:mha"))):
        def new_cache(self, spec):
            made.append(super().new_cache(spec))
            return made[-1]

    report = replay(make_spec(), REQUESTS, [Watching("mha"), Watching("mqa")])
    assert [run.status for run in report.runs] == ["ok", "ok"]
    assert len(made) == 2
    assert made[0].data.data_ptr() != made[1].data.data_ptr()


def test_a_tier_that_changes_what_it_is_given_hurts_only_itself():
    def vandalise(state, batch):
        batch.row_kv_lens.fill_(1)
        batch.block_table.zero_()
        return AttentionState(state.out * 2, state.lse)

    report = replay(make_spec(), REQUESTS, [broken(vandalise), tiers.get("paged")])
    assert [run.status for run in report.runs] == ["mismatch", "ok"]


def test_a_tier_that_exits_is_a_tier_that_raised():
    def leave(state, batch):
        raise SystemExit(0)

    report = replay(make_spec(), REQUESTS, [broken(leave), tiers.get("paged")])
    assert [run.status for run in report.runs] == ["raised", "ok"]
