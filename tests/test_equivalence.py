"""Every tier in every form against the float64 oracle, over the batches known in the field, in every dtype.

The budget of a case is made once and shared by all tiers, so cases are the parameters and tiers the loop inside.
Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import itertools
from functools import reduce

import pytest
import torch
from every_tier import every_tier
from hypothesis import given, settings
from hypothesis import strategies as st
from small_case import Case as Small
from small_case import fill_cache, make_batch, make_case, shared_case
from torch import Tensor

import tiers
from mla.accuracy import compare
from mla.attention import mha_form, mqa_form
from mla.conformance import SPECS, Case, run_case
from mla.conformance.cases import DIMS, DTYPES, FAMILIES, NEEDLES, SLOTS
from mla.conformance.suites import PAGES, WIDE
from mla.oracle import oracle
from mla.projections import Query
from mla.state import AttentionState, merge

PLAIN = [f for f in FAMILIES if f not in NEEDLES]
TOYS = [d for name, d in DIMS.items() if name.startswith("toy")]
RELEASED = [d for name, d in DIMS.items() if not name.startswith("toy") and d.N <= 20]  # more: in the suite `full`
FLOATS = list(DTYPES.values())


def field_cases() -> list[Case]:
    """Each batch in each dtype with a needle and another family, the largest with one; the other fields take turns."""
    cases = []
    for i, (spec, (j, dtype)) in enumerate(itertools.product(SPECS.values(), enumerate(DTYPES))):
        page = spec.page_size if spec.edge else PAGES[i % 5]
        families = [NEEDLES[(i + j) % 5], PLAIN[(i + j) % 4]]
        if spec.name.startswith("large"):
            families = [families[i % 2]]
        cases += [
            Case(spec, TOYS[(i + k) % 4], dtype, "", family, SLOTS[(i + k) % 4], page)
            for k, family in enumerate(families)
        ]
    return cases


def released_cases() -> list[Case]:
    """Each size list of released models in each dtype, on batches that are small; one key alone is for toy sizes."""
    batches = [SPECS[name] for name in WIDE if name != "one_key"]
    turns = enumerate(itertools.product(RELEASED, DTYPES))
    return [Case(batches[i % 11], dims, dtype, "", FAMILIES[i % 9], SLOTS[i % 4]) for i, (dims, dtype) in turns]


@pytest.mark.parametrize("case", field_cases() + released_cases(), ids=lambda case: case.id)
def test_every_tier_is_within_the_budget(case):
    results = {n: run_case(t, case) for n, t in every_tier(case.page_size, sum(case.batch.seq_lens)).items()}
    wrong = [f"{n}: {r.status} {r.used_out} {r.used_lse} {r.where} {r.detail}" for n, r in results.items() if not r.ok]
    assert not wrong, "\n".join(wrong)


# the forms in float64: absorbed, expanded and chunked expanded


@pytest.mark.parametrize("page", [1, 4])
def test_absorbed_expanded_and_chunked_forms_agree_in_float64_to_1e_10(page):
    # the oracle's sums have at most 48 terms of size 1 to 10: each computation is right to some 1e-14
    case = make_case([11, 1, 5], [48, 30, 5], page_size=page, dtype=torch.float64)
    exact = [
        oracle(
            *(x[rows] for x in case.q), *case.keys[b], *case.up, case.batch.row_kv_lens[rows], case.need.softmax_scale
        )
        for b, rows in enumerate((slice(0, 11), slice(11, 12), slice(12, 17)))
    ]
    out, lse = (torch.cat(parts) for parts in zip(*exact, strict=True))
    for name, tier in every_tier(page, 83).items():
        state = case.run(tier)
        assert (state.out - out).abs().max() <= 1e-10, name
        assert (state.lse - lse).abs().max() <= 1e-10, name
    for form in (mha_form, mqa_form):
        one = form(
            Query(*(x[:11] for x in case.q)),
            *case.keys[0],
            case.up,
            case.batch.row_kv_lens[:11],
            case.need.softmax_scale,
        )
        assert (one.out - out[:11]).abs().max() <= 1e-10


# any chunking, any merge order


def rms_error(state: AttentionState, case: Small) -> float:
    """Error of all rows together, over the (T, N, V) output."""
    return float((state.out.double() - case.truth().out).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["mha", "mqa"])
def test_A1_in_16_bits_the_error_is_that_of_one_pass_for_any_number_of_chunks(form, dtype):
    # Chunk borders only move float32 sums, whose error is 2^-13 of the 16-bit one: five per cent is room enough,
    # and partial results kept in 16 bits would add the root of the number of chunks.
    case = shared_case((11,), (48,), page_size=1, dtype=dtype, N=4, P=16, R=8, V=12)
    errors = {}
    for chunk in (48, 37, 16, 8, 3, 1):
        tier = tiers.get("paged", form=form, max_workspace_tokens=chunk)
        state = case.run(tier)
        case.check(state)
        errors[chunk] = rms_error(state, case)
        if form == "mha":
            assert tier.plan(case.need, case.batch).report["chunks"] == -(-48 // chunk)
    assert max(errors.values()) <= 1.05 * errors[48], errors


def pieces(case: Small, borders: list[int]) -> list[AttentionState]:
    """The one request of a case over each span of its keys alone, as float32 states out (T, N, V), lse (T, N)."""
    kv_c, k_pe = case.keys[0]
    bounds = case.batch.row_kv_lens
    states = []
    for start, stop in itertools.pairwise([0, *borders, kv_c.shape[0]]):
        seen = (bounds - start).clamp(0, stop - start)
        wide = dataclasses.replace(
            case.need, mask="rows", out_dtype=torch.promote_types(case.need.dtype, torch.float32)
        )
        batch = make_batch([len(bounds)], [stop - start], wide, row_kv_lens=seen.tolist())
        keys = [(kv_c[start:stop], k_pe[start:stop])]
        part = Small(wide, batch, case.q, case.up, keys, fill_cache(wide, batch, keys))
        states.append(part.run(("naive:mha", "template", "paged", "paged:mqa")[len(states) % 4]))
    return states


@settings(max_examples=30)
@given(data=st.data())
def test_split_invariance_any_pieces_merged_in_any_order_are_within_the_budget(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    case = shared_case((5,), (23,), dtype=dtype)
    borders = sorted(data.draw(st.sets(st.integers(1, 22), max_size=22)))
    states = data.draw(st.permutations(pieces(case, borders)))
    while len(states) > 1:  # any bracketing: merge two neighbours of the shuffled list
        i = data.draw(st.integers(0, len(states) - 2))
        states = [*states[:i], merge(states[i], states[i + 1]), *states[i + 2 :]]
    result = compare(AttentionState(states[0].out.to(dtype), states[0].lse), case.truth())
    assert result.ok, result


@settings(max_examples=30)
@given(data=st.data())
def test_chunk_invariance_any_workspace_is_within_the_budget(data):
    dtype, page = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from([1, 3, 16]))
    cap, form = data.draw(st.integers(page, 90)), data.draw(st.sampled_from(["auto", "mha", "mqa"]))
    case = shared_case((7, 1, 0, 3, 2), (40, 33, 4, 3, 17), page_size=page, dtype=dtype)
    case.check(case.run(tiers.get("paged", form=form, max_workspace_tokens=cap)))


# what must not matter


def some_tier(data: st.DataObject, page_size: int, keys: int):
    return data.draw(st.sampled_from(list(every_tier(page_size, keys).values())))


@settings(max_examples=30)
@given(data=st.data())
def test_page_permutation_moving_pages_with_the_table_changes_nothing(data):
    case = shared_case((3, 1, 9), (18, 7, 30), dtype=data.draw(st.sampled_from(FLOATS)))
    pages = case.batch.num_pages
    to = torch.tensor(data.draw(st.permutations(range(pages))))
    data_moved = torch.empty_like(case.cache.data)
    data_moved[to] = case.cache.data
    table = case.batch.block_table.clone()
    for b, s in enumerate(case.batch.seq_lens_host):
        own = -(-s // case.need.page_size)
        table[b, :own] = to[table[b, :own].long()].int()
    moved = dataclasses.replace(
        case,
        batch=dataclasses.replace(case.batch, block_table=table),
        cache=dataclasses.replace(case.cache, data=data_moved),
    )
    case.check(moved.run(some_tier(data, 4, 55)))


@settings(max_examples=30)
@given(data=st.data())
def test_batch_order_permutation_every_row_keeps_its_result(data):
    case = shared_case((3, 1, 9, 0, 2), (18, 7, 30, 5, 0), dtype=data.draw(st.sampled_from(FLOATS)))
    order = data.draw(st.permutations(range(5)))
    batch, rows = case.batch.select(order)
    turned = dataclasses.replace(case, batch=batch, q=Query(*(x[rows] for x in case.q)))
    state = turned.run(some_tier(data, 4, 60))
    back = AttentionState(*(torch.empty_like(x).index_copy_(0, rows, x) for x in state))
    case.check(back)


@settings(max_examples=20)
@given(data=st.data())
def test_token_by_token_equals_prefill(data):
    dtype, tokens = data.draw(st.sampled_from(FLOATS)), data.draw(st.integers(1, 12))
    seen = data.draw(st.integers(tokens, 25))
    case = shared_case((tokens,), (seen,), dtype=dtype)
    tier = some_tier(data, 4, seen)
    case.check(case.run(tier))
    case.check(one_by_one(case, tier))


def one_by_one(case: Small, tier) -> AttentionState:
    """Every row of the one request as a step of its own on the same pages: out (T, N, V), lse (T, N)."""
    table, states = case.batch.block_table, []
    for row, bound in enumerate(case.batch.row_kv_lens.tolist()):
        step = {"page_size": case.need.page_size, "num_pages": case.batch.num_pages}
        batch = type(case.batch).bottom_right([1], [bound], table, **step)
        q = Query(*(x[row : row + 1] for x in case.q))
        states.append(dataclasses.replace(case, batch=batch, q=q).run(tier))
    return reduce(lambda a, b: AttentionState(*map(stack, a, b)), states)


def stack(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_verification_equals_its_tokens_sent_one_at_a_time(tokens, dtype):
    case = shared_case((tokens,), (61,), page_size=16, dtype=dtype)
    for tier in every_tier(16, 61).values():
        case.check(case.run(tier))
        case.check(one_by_one(case, tier))
