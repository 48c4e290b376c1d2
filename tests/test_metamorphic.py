"""Relations between inputs and results: every tier keeps them, and a tier that breaks one is found by it alone.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiers
from mla.conformance import SPECS, Case, run_case
from mla.conformance.cases import TOY, Dims
from mla.conformance.inputs import make_inputs
from mla.conformance.metamorphic import RELATIONS, outcome, with_constant_key
from mla.conformance.specs import ORDERS
from mla.oracle import oracle
from mla.state import AttentionState
from mla.tier import Tier

TIERS = ("naive:mha", "naive:mqa", "paged", "template")
# unequal prefixes, prompts and chunks, padding, shared pages, pages of 1, 8 and 16, sizes with few and many heads
CASES = [
    Case(SPECS["mixed_prefill_between"], TOY, "bf16", family="needle", page_size=8),
    Case(ORDERS["order_vpcd"], TOY, "f32", family="peaked", slots="shared"),
    Case(SPECS["padded_requests"], Dims("toy_n12", 12, 28, 8, 6, 10), "f16", family="randn", slots="contiguous"),
    Case(SPECS["zero_rows_prefill"], TOY, "bf16", "rows_f32", "needle_last", page_size=1),
]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", TIERS)
@settings(max_examples=10)
@given(case=st.sampled_from(CASES), chance=st.randoms(use_true_random=False))
def test_every_tier_keeps_every_relation(relation, name, case, chance):
    found = RELATIONS[relation](tiers.get(name), case, chance)
    assert found.ok, found


def breaks(relation: str, tier: Tier, case: Case, tries: int = 20) -> bool:
    """Whether a relation finds a tier that is right on the case as it is."""
    assert run_case(tier, case).ok
    return any(not RELATIONS[relation](tier, case, Random(seed)).ok for seed in range(tries))


def faulty(change: Callable) -> Tier:
    """The template behind a step of its own that may see another batch, query or result."""
    right = tiers.get("template")

    def attend(q, cache, batch, up, need) -> AttentionState:
        run = lambda q, batch: right.attend(q, cache, right.prepare(up, need), right.plan(need, batch))
        return change(run, q, batch)

    return tiers.from_attend(change.__name__, attend)


def pages_in_a_row(run, q, batch):
    row = batch.block_table[:, :1] + torch.arange(batch.block_table.shape[1], dtype=torch.int32)
    return run(q, dataclasses.replace(batch, block_table=row % batch.num_pages))


def first_request_loses_a_key(run, q, batch):
    bounds = batch.row_kv_lens.clone()
    new = batch.query_lens_host[0]
    bounds[:new] = (bounds[:new] - 1).clamp(min=0)
    return run(q, dataclasses.replace(batch, row_kv_lens=bounds))


def a_prefix_is_forgotten(run, q, batch):
    bounds = batch.row_kv_lens.clone()
    for b, (new, s) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        start = int(batch.query_start_loc[b])
        if new > 1 and s > new:
            bounds[start : start + new] -= s - new
    return run(q, dataclasses.replace(batch, row_kv_lens=bounds))


def large_lses_are_clamped(run, q, batch):
    state = run(q, batch)
    return AttentionState(state.out, torch.where(state.lse.isinf(), state.lse, state.lse.clamp(-40, 40)))


def outputs_are_clamped(run, q, batch):
    state = run(q, batch)
    return AttentionState(state.out.clamp(-8, 8), state.lse)


FAULTS = {
    "pages_permuted": (pages_in_a_row, Case(SPECS["mixed_small"], slots="contiguous", page_size=8)),
    "requests_reordered": (first_request_loses_a_key, Case(SPECS["no_new_tokens"], dtype="f32")),
    "prefill_split": (a_prefix_is_forgotten, Case(SPECS["edge_around_16"])),
    "scores_shifted": (large_lses_are_clamped, Case(SPECS["mixed_small"])),
    "values_scaled": (outputs_are_clamped, Case(SPECS["mixed_small"])),
}


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_tier_that_is_right_on_the_case_but_breaks_the_relation_is_found(relation):
    change, case = FAULTS[relation]
    assert breaks(relation, faulty(change), case)
    assert not breaks(relation, tiers.get("template"), case, 3)


def test_in_float16_scaled_values_are_compared_with_the_scaled_budget():
    case = Case(SPECS["mixed_small"], dtype="f16")
    assert breaks("values_scaled", faulty(outputs_are_clamped), case)
    assert not breaks("values_scaled", tiers.get("template"), case)


@pytest.mark.parametrize("relation", ["pages_permuted", "requests_reordered"])
def test_whoever_promises_batch_invariance_is_held_to_the_bits(relation):
    """A tier whose sums begin at the page of the lowest number, or at the rows of the longest request, say."""

    class Promises(Tier):
        name = "promises"

        def why_not(self, need):
            return tiers.get("template").why_not(dataclasses.replace(need, batch_invariant=False))

        def attend(self, q, cache, prepared, plan, out=None):
            inner, need = tiers.get("template"), dataclasses.replace(plan.need, batch_invariant=False)
            again = inner.plan(need, plan.batch)
            state = inner.attend(q, cache, inner.prepare(prepared.up, need), again, None)
            if self.wavers:  # one unit in the last place, by the first entry of the table
                odd = int(plan.batch.block_table[0, 0]) % 2
                state = AttentionState(state.out * (1 + odd * 2.0**-23), state.lse)
            if out is None:
                return state
            return AttentionState(out.out.copy_(state.out), out.lse.copy_(state.lse))

    case = Case(SPECS["mixed_small"], dtype="f32")
    wavering, steady = Promises(), Promises()
    wavering.wavers, steady.wavers = True, False
    found = [RELATIONS[relation](wavering, case, Random(seed)) for seed in range(8)]
    assert {f.detail.split(" of ")[0] for f in found if not f.ok} == {"out"}
    assert all(RELATIONS[relation](steady, case, Random(seed)).ok for seed in range(8))


def test_the_constant_key_adds_the_constant_to_the_oracle_to_1e_12():
    case = Case(SPECS["small_prefill"], dtype="f32")
    inputs = with_constant_key(make_inputs(case))
    (kv_c, k_pe), scale, bounds = inputs.keys[0], case.dims.softmax_scale, inputs.batch.row_kv_lens[:8]
    assert torch.equal(inputs.new_k_pe[:8], k_pe[24:32])
    plain = oracle(inputs.q.nope[:8], inputs.q.pe[:8], kv_c, k_pe, *inputs.up, bounds, scale)
    pe = inputs.q.pe[:8].clone()
    pe[..., -1] = 64.0
    more = oracle(inputs.q.nope[:8], pe, kv_c, k_pe, *inputs.up, bounds, scale)
    # an LSE of size 30 in float64 is known to some 1e-14
    assert float((more[1] - plain[1] - 64.0 * scale).abs().max()) <= 1e-12
    assert float((more[0] - plain[0]).abs().max()) <= 1e-12


def test_relations_that_do_not_apply_say_so():
    tier = tiers.get("template")
    with pytest.raises(ValueError, match=r"^case.batch.mask: expected 'causal'"):
        RELATIONS["prefill_split"](tier, Case(SPECS["full_mask"]), Random(0))
    with pytest.raises(ValueError, match=r"^case.dims.R: expected a rope part"):
        RELATIONS["scores_shifted"](tier, Case(SPECS["full_mask"], Dims("r0", 2, 8, 6, 0, 5)), Random(0))


def test_the_outcome_without_a_move_is_the_case_itself():
    case = CASES[0]
    one, two = (
        outcome(tiers.get("paged"), case, make_inputs(case)),
        outcome(tiers.get("paged"), case, make_inputs(case)),
    )
    assert torch.equal(one.out, two.out)
    assert torch.equal(one.lse, two.lse)
