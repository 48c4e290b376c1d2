"""The ragged cut of the expanded form: every (row, key) pair in one call, and the right numbers by a plain kernel.

The kernel here is what a varlen flash attention does, in plain PyTorch, one sequence after the other.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_case import make_batch, make_case, make_need

from mla.cache import FloatRows
from mla.need import Capacity
from mla.ragged import attend_ragged, plan_ragged, prepare_ragged, refuse_ragged
from mla.state import AttentionState, merge
from mla.tier import Plan, deliver


def pairs_of(steps, batch):
    """All (row, request, key) that the calls compute, as a list."""
    found = []
    for chunk in steps.chunks:
        for call in chunk.calls:
            rows, at = call.rows.tolist(), call.first_key
            for query_len, key_len in zip(call.query_lens, call.key_lens, strict=True):
                for i in range(query_len):
                    seen = key_len - query_len + i + 1 if call.causal else key_len
                    assert seen > 0  # no kernel agrees with another on rows that see nothing
                    keys = zip(
                        chunk.requests[at : at + seen].tolist(), chunk.positions[at : at + seen].tolist(), strict=True
                    )
                    found += [(rows[i], request, key) for request, key in keys]
                rows, at = rows[query_len:], at + key_len
            assert not rows
            assert at == call.last_key
    return found


@settings(max_examples=200, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=5),
    pages=st.integers(1, 6),
    mask=st.sampled_from(["causal", "full"]),
    choice=st.integers(0, 31),
)
def test_every_visible_pair_is_computed_once(lens, pages, mask, choice):
    query_lens = [q for q, _ in lens]
    seq_lens = [q + s if s < 28 else 0 for q, s in lens]
    need = make_need(mask=mask)
    batch = make_batch(query_lens, seq_lens, need)
    chosen = [b for b in range(len(lens)) if choice >> b & 1]
    steps = plan_ragged(need, batch, chosen, pages * need.page_size)
    first = batch.query_start_loc.tolist()
    expected = [
        (row, b, key)
        for b in chosen
        for row in range(first[b], first[b + 1])
        for key in range(int(batch.row_kv_lens[row]))
    ]
    assert sorted(pairs_of(steps, batch)) == sorted(expected)
    for call in steps.calls():
        assert call.query_start_loc.tolist()[-1] == len(call.rows) == sum(call.query_lens)
        assert call.key_start_loc.tolist()[-1] == call.last_key - call.first_key
    empty = {row for row in range(batch.num_tokens) if int(batch.row_kv_lens[row]) == 0}
    mine = {row for b in chosen for row in range(first[b], first[b + 1])}
    assert {row for a, b in steps.empty for row in range(a, b)} == empty & mine
    assert all(len(chunk.positions) <= pages * need.page_size for chunk in steps.chunks)


def plain(scale):
    """A varlen kernel in PyTorch: sequence after sequence, bottom-right."""

    def kernel(call, q, k, v):
        out, lse, row, key = [], [], 0, 0
        for query_len, key_len in zip(call.query_lens, call.key_lens, strict=True):
            scores = torch.einsum("tnd,snd->nts", q[row : row + query_len], k[key : key + key_len]) * scale
            if call.causal:
                hidden = torch.ones(query_len, key_len, dtype=torch.bool).tril(key_len - query_len).logical_not()
                scores = scores.masked_fill(hidden, float("-inf"))
            lse.append(scores.logsumexp(-1).T)
            out.append(torch.einsum("nts,snv->tnv", scores.softmax(-1), v[key : key + key_len]))
            row, key = row + query_len, key + key_len
        return torch.cat(out), torch.cat(lse)

    return kernel


def attend(case, cap, join=merge):
    """The state of a case, all of its requests expanded through a workspace of `cap` rows."""
    need, batch = case.need, case.batch
    steps = plan_ragged(need, batch, range(batch.num_requests), cap)
    plan = Plan(need, batch, sizes=steps.sizes)
    out, lse = torch.zeros(batch.num_tokens, need.N, need.V), torch.full((batch.num_tokens, need.N), float("-inf"))
    data = prepare_ragged(case.up, need)
    attend_ragged(steps, case.q, case.cache, data, plan, plain(need.softmax_scale), out, lse, join)
    return deliver(AttentionState(out, lse), plan, None), steps


@pytest.mark.parametrize("cap", [4, 8, 12, 20, 400])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_numbers_are_those_of_the_oracle(cap, mask):
    case = make_case([5, 1, 9, 2, 0, 3, 7], [21, 13, 9, 0, 6, 40, 7], mask=mask)
    state, steps = attend(case, cap)
    case.check(state)
    assert bool(steps.held) == (cap < 98)


def test_a_wrong_merge_is_seen():
    case = make_case([5, 9], [21, 30])
    state, _ = attend(case, 8, join=lambda a, b: AttentionState((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse)))
    with pytest.raises(AssertionError):
        case.check(state)


def test_capacity_sizes_the_workspace_for_every_later_batch():
    need = make_need(capacity=Capacity(max_requests=3, max_tokens=17, max_query_len=9, max_seq_len=40))
    steps = plan_ragged(need, make_batch([2], [5], need), [0], 24)
    assert steps.sizes["ragged_k"][0] == (24, need.N, need.P + need.R)
    assert steps.sizes["ragged_q"][0] == (17, need.N, need.P + need.R)


def test_what_cannot_be_cut_is_a_sentence():
    assert refuse_ragged("flashinfer", make_need()) == []
    (mask,) = refuse_ragged("flashinfer", make_need(mask="rows"))
    assert "mask 'rows'" in mask
    (rows,) = refuse_ragged("flashinfer", make_need(layout=FloatRows(32, 8, torch.float16)))
    assert "rows of the queries' dtype" in rows
