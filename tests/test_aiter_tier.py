"""The AITER tier over the simulator: numbers within the budget, and every step of its metadata looked at.

What AITER is called with is recorded by a spy, and what AITER may leave unwritten or hand back in another form is put
there on purpose. Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import math
from collections.abc import Callable
from contextlib import contextmanager
from inspect import signature
from itertools import cycle, pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from aiter_simulator import AiterAbort
from simulated_aiter import SimulatedAiter
from simulated_aiter import tier as registered
from small_case import INF, NAN, Case, make_batch, make_case, make_need, mean_case
from test_tier import no_sync

from mla.accuracy import compare
from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache, slots_of
from mla.conformance import SPECS, run_case
from mla.conformance import Case as Conformance
from mla.conformance.cases import DIMS, FAMILIES
from mla.conformance.metamorphic import RELATIONS
from mla.conformance.specs import ORDERS
from mla.need import Capacity
from mla.projections import Query, UpProjection
from mla.ragged import RaggedCall
from mla.state import AttentionState
from tiers.tier2_aiter.decode import dtypes_of
from tiers.tier2_aiter.library import DECODE, FLASH, INFO, METADATA, TRITON_DECODE
from tiers.tier2_aiter.metadata import BUFFERS
from tiers.tier2_aiter.pages import SENTINEL
from tiers.tier2_aiter.prefill import flash_kernel, heads_first
from tiers.tier2_aiter.tier import AiterTier

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ARCHES = ("gfx942", "gfx950")
# the width of real rows, with small heads that flash attention takes
REAL: dict[str, Any] = {"N": 16, "L": 512, "P": 16, "R": 64, "V": 24, "dtype": BF16}
TOY: dict[str, Any] = {"N": 3, "L": 32, "P": 8, "R": 8, "V": 16, "dtype": BF16}
HOST = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu", "__array__")}


def aiter(arch: str = "gfx942", form: str = "auto", cap: int | None = None, **machine: Any) -> AiterTier:
    return AiterTier(form, cap, SimulatedAiter(arch, **machine))


def everywhere(**fields: Any) -> dict[str, AiterTier]:
    """Both architectures and both layouts of the LSE of flash attention, the forms in turn."""
    found = {f"{arch} {form}": aiter(arch, form, **fields) for arch in ARCHES for form in ("auto", "mqa")}
    return found | {f"mha, ck {ck}": aiter("gfx950", "mha", ck=ck, **fields) for ck in (True, False)}


@dataclasses.dataclass(frozen=True)
class Spy(SimulatedAiter):
    """A simulated AITER that writes down what it was asked, and whose answers `change` may alter."""

    log: list = dataclasses.field(default_factory=list, hash=False, compare=False)
    change: Callable = dataclasses.field(default=lambda name, asked, call: call(), hash=False, compare=False)

    def find(self, name, need):
        function = super().find(name, need)

        def asked(*args: Any, **kwargs: Any) -> Any:
            with torch._C._DisableTorchDispatch(), host_is_allowed():
                self.log.append((name, kwargs))
                return self.change(name, kwargs, lambda: function(*args, **kwargs))

        asked.__signature__ = signature(function)  # type: ignore[attr-defined]
        return asked

    def asked(self, name: str) -> list[dict[str, Any]]:
        return [kwargs for found, kwargs in self.log if found == name]


@contextmanager
def host_is_allowed():
    """The simulator reads tensors on the host, as no kernel does: within it the watch over syncs sleeps."""
    with pytest.MonkeyPatch.context() as patch:
        for name, method in HOST.items():
            patch.setattr(torch.Tensor, name, method)
        yield


def spied(arch: str = "gfx950", form: str = "auto", cap: int | None = None, **fields: Any) -> tuple[AiterTier, Spy]:
    spy = Spy(arch, **fields)
    return AiterTier(form, cap, spy), spy


def check_out(case: Case, state: AttentionState) -> None:
    """Check a state whose LSE may not have been asked for."""
    result = compare(state, case.truth())
    assert result.ok, result


# within the budget


def field_cases() -> list[Conformance]:
    """Batches in bfloat16, with what else a case has in turn: family, page, slots, strides of the cache, plan, LSE."""
    names = (
        "mixed_small", "verify_2", "verify_4", "verify_8", "query_17", "zero_contexts", "zero_rows", "all_rows_empty",
        "no_requests", "only_padding", "no_new_tokens", "slot_minus_one", "padded_tail", "padded_requests", "full_mask",
        "mixed_prefill_between", "edge_lengths_16", "one_key", "small_decode",
    )  # fmt: skip
    sizes = cycle(("toy", "toy_n32", "toy_n12", "toy_n8"))
    cases = []
    for i, (name, dims) in enumerate(zip(names, sizes, strict=False)):
        family, plan = FAMILIES[i % 9] if any(SPECS[name].seq_lens) else "randn", ("fresh", "refilled", "capped")[i % 3]
        page, cache = (1, 8, 16, 64)[i % 4], ("plain", "layers", "strided")[i // 2 % 3]
        page = SPECS[name].page_size if SPECS[name].edge else page
        fields = {"family": family, "page_size": page, "cache": cache, "plan": plan, "lse": i % 3 != 1}
        cases.append(Conformance(SPECS[name], DIMS[dims], "bf16", **fields))
    return cases


@pytest.mark.parametrize("case", field_cases(), ids=lambda case: case.id)
def test_K_both_architectures_are_within_the_budget(case):
    for arch in ARCHES:
        result = run_case(aiter(arch), case)
        assert result.ok, (arch, result)


@pytest.mark.parametrize("batch", ["query_17", "verify_4", "mixed_prefill_last"])
def test_real_sizes_are_within_the_budget_in_every_form(batch):
    case = Conformance(SPECS[batch], DIMS["v3_n3"], "bf16", family="needle_end")
    for name, tier in everywhere(toy=False, cu_num=8).items():
        result = run_case(tier, case)
        assert result.ok, (name, result)
    if batch == "query_17":
        small = run_case(aiter("gfx942", "mha", cap=32), case)
        assert small.ok, small


@pytest.mark.parametrize("relation", RELATIONS)
def test_every_relation_is_kept(relation):
    for i, (spec, size) in enumerate(((SPECS["padded_requests"], "toy_n32"), (ORDERS["order_vpcd"], "toy"))):
        case = Conformance(spec, DIMS[size], "bf16", family="peaked", page_size=8)
        found = RELATIONS[relation](aiter(ARCHES[i]), case, Random(i))
        assert found.ok, found


def test_float16_is_attended_by_the_triton_decode_alone():
    # absorbed queries of this size pass 65504 in float16
    case = make_case([1, 3, 12], [9, 7, 40], page_size=4, **REAL | {"dtype": F16})
    for part in case.q:
        part.mul_(400)
    case.up.W_UK.mul_(8 * 512**0.5)
    case = dataclasses.replace(case, need=dataclasses.replace(case.need, softmax_scale=1e-5))
    q_latent = torch.einsum("tnp,lnp->tnl", case.q.nope.double(), case.up.W_UK.double())
    assert q_latent.abs().max() > 65504
    tier, spy = spied("gfx942")
    case.check(case.run(tier))
    assert {name for name, _ in spy.log} == {TRITON_DECODE}
    assert [str(r).startswith("float16 keys") for r in aiter(form="mha").why_not(case.need)] == [True]


@pytest.mark.parametrize("strided", [False, True])
def test_float16_over_a_cache_of_any_strides(strided):
    kind = "strided" if strided else "layers"
    case = Conformance(SPECS["mixed_small"], DIMS["toy_n12"], "f16", page_size=8, cache=kind, family="needle")
    assert run_case(aiter(), case).ok


def test_the_simulated_tier_of_the_suite_has_an_honest_name():
    assert registered.name == "aiter (simulated)"
    assert aiter(form="mqa").name == "aiter (simulated):mqa"
    assert AiterTier().name == "aiter"
    with pytest.raises(ValueError, match="form: expected one of auto, mqa, mha"):
        aiter(form="cudnn")


# B: base of the LSE


@pytest.mark.parametrize("name", everywhere())
def test_B3_the_lse_of_1_and_of_8_equal_keys_is_0_and_ln_8(name):
    for n, expected in ((1, 0.0), (8, math.log(8))):
        case = mean_case([1], [[1.0] * n], **REAL)
        lse = case.run(everywhere()[name]).lse
        assert (lse - expected).abs().max() <= 4 * 2**-24 * max(1.0, expected)


def test_B3_float16_rows_give_a_natural_logarithm_too():
    assert mean_case([1], [[1.0] * 8], **REAL | {"dtype": F16}).run(aiter()).lse.sub(math.log(8)).abs().max() < 1e-6


@pytest.mark.parametrize("ck", [True, False])
def test_B1_a_long_prefix_and_a_short_suffix_weigh_by_their_keys(ck):
    case = mean_case([4], [[0.0] * 4096 + [10.0] * 4], mask="full", page_size=16, **REAL | {"N": 4})
    state = case.run(aiter(form="mha", cap=1024, ck=ck))
    # four chunks of zeros and one of tens: each weight and the one output round a few times
    assert (state.out.double() - 40 / 4100).abs().max() <= 4 * 2**-8 * 40 / 4100
    assert (state.lse - math.log(4100)).abs().max() <= 16 * 2**-24 * math.log(4100)


@pytest.mark.parametrize("arch", ARCHES)
def test_B4_the_base_does_not_change_with_the_layout_of_the_batch(arch):
    uniform = make_case([2, 2], [9, 12], **REAL)
    a = uniform.run(aiter(arch))
    mixed = dataclasses.replace(uniform, batch=make_batch([2, 2, 1], [9, 12, 0], uniform.need))
    mixed.q = Query(*(torch.cat([x, x[:1]]) for x in uniform.q))
    table = mixed.batch.block_table
    table[:2, : uniform.batch.block_table.shape[1]] = uniform.batch.block_table
    b = mixed.run(aiter(arch))
    single = uniform.run(aiter(arch, "mqa"))
    expanded = uniform.run(aiter(arch, "mha"))
    for other in (b.lse[:4], single.lse, expanded.lse):
        assert (a.lse - other).abs().max() <= 0.02  # bf16 queries round differently: ratios 1.44 or 0.69 are far off
    assert (a.lse.abs() > 0.5).any()


@pytest.mark.parametrize(("N", "tokens"), [(16, 16), (16, 12), (16, 20)])
@pytest.mark.parametrize("ck", [True, False])
def test_U3_the_lse_of_prefill_is_rows_first_also_where_it_is_square(N, tokens, ck):
    case = make_case([tokens], [tokens + 5], **REAL | {"N": N})
    tier, spy = spied(form="mha", ck=ck)
    case.check(case.run(tier))
    asked = spy.asked(FLASH)
    assert len(asked) == 2  # one that tells the layout when the layer is prepared, one that attends


def test_U3_another_layout_of_the_lse_is_refused_by_name():
    def third(name, asked, call):
        out, lse = call()
        return out, lse[None]

    case = make_case([4], [9], **REAL)
    tier, _ = spied(form="mha", change=third)
    with pytest.raises(ValueError, match=r"aiter's lse: expected shape \(17, 16\) or \(16, 17\), got \(1, 16, 17\)"):
        case.run(tier)


# C: rows without keys, stale memory


@pytest.mark.parametrize("name", everywhere())
def test_C1_C9_requests_without_keys_are_0_and_minus_infinity(name):
    case = make_case([1, 1, 1], [0, 5, 0], **REAL)
    state = case.run(everywhere()[name])
    case.check(state)
    assert bool((state.out[[0, 2]] == 0).all())
    assert bool((state.lse[[0, 2]] == -INF).all())


@pytest.mark.parametrize("name", everywhere())
def test_C2_nothing_but_empty_rows_calls_no_kernel(name):
    case = make_case([1, 3], [0, 0], pad_tokens=2, **REAL)
    state = case.run(everywhere()[name])
    assert bool((state.out == 0).all())
    assert bool((state.lse == -INF).all())


@pytest.mark.parametrize("name", everywhere())
def test_C4_nan_behind_the_last_key_of_a_page_is_not_met(name):
    case = make_case([1, 2], [13, 6], page_size=4, **REAL)
    assert bool(case.cache.data.isnan().any())
    case.check(case.run(everywhere()[name]))


@pytest.mark.parametrize("name", everywhere())
def test_C6_buffers_of_the_caller_are_zeroed_where_a_row_has_no_keys(name):
    case = make_case([1, 1, 1, 1], [7, 0, 0, 0], **REAL)
    out = AttentionState(torch.full((4, 16, 24), NAN, dtype=BF16), torch.full((4, 16), NAN))
    assert case.run(everywhere()[name], out) is out
    case.check(out)
    assert bool((out.out[1:] == 0).all())


def test_C8_rows_that_see_a_choice_of_keys_are_refused():
    need = make_need(mask="rows", **REAL)
    assert any(r.startswith("mask 'rows'") and "paged or triton" in r for r in aiter().why_not(need))


@pytest.mark.parametrize("seq_len", [1, 3, 17])
def test_C10_more_splits_than_keys_change_nothing(seq_len):
    case = make_case([1], [seq_len], **REAL)
    tier, spy = spied("gfx942", cu_num=304)
    case.check(case.run(tier))
    assert [asked["num_kv_splits"] for asked in spy.asked(DECODE)] == [16]


@pytest.mark.parametrize("arch", ARCHES)
def test_C12_four_rows_over_six_keys_and_many_units(arch):
    case = make_case([4], [6], **REAL)
    for tier in (aiter(arch, cu_num=304), aiter(arch, cu_num=2)):
        case.check(case.run(tier))


@pytest.mark.parametrize("name", everywhere())
def test_C13_padding_lanes_are_not_in_the_denominator(name):
    for fields in ({}, {"mask": "full"}):
        case = mean_case([2], [[1.0] * 5], **REAL, **fields)
        state = case.run(everywhere()[name])
        assert (state.out.double() - 1).abs().max() <= 2**-8


# H: pages


@pytest.mark.parametrize("arch", ARCHES)
def test_H2_H6_every_page_size_gives_the_same_numbers(arch):
    for page in (1, 8, 16, 32, 64, 128, 100):
        case = make_case([1, 3, 20], [33, 70, 45], page_size=page, **TOY)
        case.check(case.run(aiter(arch)))


def test_H4_the_list_of_keys_is_as_long_as_the_sum_of_lengths_and_pages_have_one_row():
    case = make_case([1] * 4, [33, 2, 16, 5], page_size=16, **REAL)
    tier, spy = spied()
    case.run(tier)
    (asked,) = spy.asked(DECODE)
    assert asked["kv_indices"].shape == (56,)
    assert asked["kv_indptr"].tolist() == [0, 33, 35, 51, 56]
    assert asked["qo_indptr"].tolist() == [0, 1, 2, 3, 4]
    assert (asked["page_size"], asked["kv_buffer"].shape[1:]) == (1, (1, 1, 576))
    assert asked["kv_last_page_lens"].tolist() == [1] * 4  # vLLM #31282 passed the sequence lengths


def test_H5_a_chunk_that_ends_inside_a_page():
    case = make_case([3], [13], page_size=4, **REAL)
    for cap in (4, 6, 7):
        case.check(case.run(aiter(form="mha", cap=cap)))
    assert any("below one page" in r for r in aiter(cap=3).why_not(case.need))


def test_H7_layouts_that_are_not_plain_floats_are_refused():
    class Quantised:
        L, R, name, storage_dtype, storage_width, row_bytes = 512, 64, "fp8_rows", torch.uint8, 656, 656

    need = make_need(layout=Quantised(), **REAL)
    for form in ("auto", "mqa", "mha"):
        assert any("'fp8_rows' is not read" in r and "fp8 rows included" in r for r in aiter(form=form).why_not(need))


# I: heads


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("N", [1, 2, 4, 5, 8, 12, 16, 20, 24, 31, 48, 63, 80, 128])
def test_I1_any_number_of_heads_in_their_order(arch, N):
    case = make_case([1, 1], [7, 22], **TOY | {"N": N})
    for lse in (True, False):
        need = dataclasses.replace(case.need, lse=lse)
        state = dataclasses.replace(case, need=need).run(aiter(arch))
        check_out(case, state)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("N", [16, 20, 32, 48, 128])
def test_I1_folded_heads_of_a_verification_come_back_in_order(arch, N):
    for query_lens, seq_lens in (((3, 3), (30, 3)), ((2, 2, 2), (9, 50, 2)), ((4, 1), (20, 9))):
        case = make_case(query_lens, seq_lens, **TOY | {"N": N, "lse": False})
        state = case.run(aiter(arch, cu_num=4))
        check_out(case, state)


@pytest.mark.parametrize(("N", "heads"), [(8, [h // 2 for h in range(16)]), (12, [h % 12 for h in range(16)])])
def test_I1_padding_heads_are_copies_of_real_ones_and_never_memory_as_it_was(N, heads):
    case = make_case([1, 1], [7, 22], **REAL | {"N": N})
    tier, spy = spied()
    case.run(tier)
    (asked,) = spy.asked(DECODE)
    real = asked["q"][:, ::2] if N == 8 else asked["q"][:, :N]
    assert torch.equal(asked["q"], real[:, heads])
    assert torch.equal(real[..., 512:], case.q.pe)


def test_I3_16_heads_of_v2_lite_work_in_a_captured_step():
    tier, need, _ = captured_case([1] * 4, [9, 20, 5, 33], P=16)
    assert tier.why_not(need) == []


def test_I5_192_heads_and_other_widths_are_refused_by_field():
    assert any("N = 192 heads" in r for r in aiter().why_not(make_need(**REAL | {"N": 192})))
    reasons = aiter(toy=False).why_not(make_need(**TOY))
    assert any("L + R = 32 + 8" in r and "512 + 64" in r for r in reasons)


def test_I6_widths_of_zero():
    for name in ("P", "V"):
        with pytest.raises(ValueError, match=f"^{name}"):
            make_need(**REAL | {name: 0})
    assert any("L + R = 512 + 0" in r for r in aiter().why_not(make_need(**REAL | {"R": 0})))


def test_I7_a_query_of_1024_tokens_is_expanded():
    case = make_case([1024], [1024], **TOY)
    plan = aiter().plan(case.need, case.batch)
    assert plan.report["forms"] == ["mha"]
    assert plan.report["decode"] == "none"
    no_flash = make_case([40], [44], **TOY | {"P": 12})  # P + R = 20, which flash attention does not take
    assert aiter().plan(no_flash.need, no_flash.batch).report["forms"] == ["mqa"]
    no_flash.check(no_flash.run(aiter()))


# K: verification


@pytest.mark.parametrize("arch", ARCHES)
def test_M1_row_i_sees_kv_len_minus_q_len_plus_i_plus_1_keys(arch):
    values = [[float(j) for j in range(n)] for n in (5, 9)]
    case = mean_case([3, 3], values, **REAL)
    state = case.run(aiter(arch))
    means = [(n - 1) / 2 for n in (3, 4, 5, 7, 8, 9)]
    expected = torch.tensor(means, dtype=torch.float64)[:, None, None]
    assert (state.out.double() - expected).abs().max() <= 4 * 2**-8 * 4.0  # latent output and output round once each


@pytest.mark.parametrize("name", everywhere())
def test_M3_queries_that_start_behind_a_context(name):
    case = mean_case([2], [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]], **REAL)
    expected = torch.tensor([2.0, 2.5], dtype=torch.float64)[:, None, None]
    assert (case.run(everywhere()[name]).out.double() - expected).abs().max() <= 4 * 2**-8 * 2.5


@pytest.mark.parametrize("n", [2, 3, 4])
def test_M5_M8_verification_is_one_call_of_its_real_length_that_reads_each_key_once(n):
    case = make_case([n, n], [20, 31], **REAL)
    tier, spy = spied()
    case.check(case.run(tier))
    (asked,), (planned,) = spy.asked(DECODE), spy.asked(METADATA)
    assert asked["max_seqlen_q"] == planned["max_seqlen_qo"] == planned["uni_seqlen_qo"] == n  # vLLM #45227: 1
    assert asked["kv_indices"].shape == (51,)
    assert asked["qo_indptr"].tolist() == [0, n, 2 * n]


def test_K_unequal_lengths_of_16_heads_are_one_ragged_call():
    case = make_case([1, 4, 2], [20, 31, 5], **REAL)
    tier, spy = spied()
    case.check(case.run(tier))
    (planned,) = spy.asked(METADATA)
    assert (planned["uni_seqlen_qo"], planned["max_seqlen_qo"]) == (-1, 4)


def test_K_few_heads_become_single_rows_over_the_keys_that_each_sees():
    case = make_case([3, 1], [6, 4], **REAL | {"N": 8})
    tier, spy = spied()
    case.check(case.run(tier))
    (asked,) = spy.asked(DECODE)
    assert asked["kv_indptr"].tolist() == [0, 4, 9, 15, 19]
    assert asked["max_seqlen_q"] == 1
    assert asked["q"].shape == (4, 16, 576)


# metadata


def test_metadata_is_planned_with_the_padded_heads_and_both_dtypes():
    case = make_case([1, 1], [20, 31], **REAL | {"N": 12})
    tier, spy = spied()
    case.run(tier)
    (planned,) = spy.asked(METADATA)
    assert planned["num_heads_per_head_k"] == 16  # vLLM #38615: the real 12
    assert (planned["dtype_q"], planned["dtype_kv"]) == (BF16, BF16)  # vLLM #46997: omitted
    assert {(a["num_head_qo"], a["q_dtype"], a["kv_dtype"]) for a in spy.asked(INFO)} == {(16, BF16, BF16)}
    (asked,) = spy.asked(DECODE)
    assert [asked[name].data_ptr() for name in BUFFERS[1:]] == [planned[name].data_ptr() for name in BUFFERS[1:]]
    assert asked["work_meta_data"].data_ptr() == planned["work_metadata_ptrs"].data_ptr()


def test_metadata_has_the_sizes_of_the_info_call():
    case = make_case([2, 2, 2], [20, 31, 2], **REAL)
    tier, spy = spied()
    case.run(tier)
    found = spy.module(case.need).get_mla_metadata_info_v1(3, 2, 16, BF16, BF16, False)
    (asked,) = spy.asked(DECODE)
    for name, (shape, dtype) in zip(BUFFERS, found, strict=True):
        assert asked[name].shape == ((shape,) if isinstance(shape, int) else shape), name
        assert asked[name].dtype == dtype, name


def test_metadata_is_one_plan_for_all_layers_and_reused_by_the_next_step():
    capacity = Capacity(max_requests=8, max_tokens=32, max_query_len=4, max_seq_len=64)
    first = make_case([1] * 8, [9 + b for b in range(8)], capacity=capacity, **REAL)
    tier, spy = spied()
    prepared, plan = tier.prepare(first.up, first.need), tier.plan(first.need, first.batch)
    for _ in range(3):
        first.check(tier.attend(first.q, first.cache, prepared, plan))
    assert len(spy.asked(METADATA)) == 1
    sizes, infos = dict(plan.sizes), len(spy.asked(INFO))
    for query_lens, seq_lens in (([4] * 5, [64, 4, 9, 33, 21]), ([1, 3], [7, 8]), ([2] * 8, [40] * 8)):
        case = make_case(query_lens, seq_lens, capacity=capacity, seed=len(query_lens), **REAL)
        assert tier.plan(case.need, case.batch, plan) is plan
        case.check(tier.attend(case.q, case.cache, prepare_of(tier, case), plan))
    assert plan.sizes == sizes
    assert len(spy.asked(INFO)) == infos  # asked once for the worst step, not at every step
    for name in (*BUFFERS, "kv_indptr", "qo_indptr", "kv_last_page_lens"):
        assert len({asked[name].data_ptr() for asked in spy.asked(DECODE)}) == 1, name


def prepare_of(tier: AiterTier, case: Case):
    return tier.prepare(case.up, case.need)


def test_without_a_capacity_buffers_grow_with_the_batch_and_serve_smaller_ones():
    tier, spy = spied()
    small, large = make_case([1], [5], **REAL), make_case([1] * 9, [40] * 9, **REAL)
    plan = tier.plan(small.need, small.batch)
    for case in (small, large, small):
        tier.plan(case.need, case.batch, plan)
        case.check(tier.attend(case.q, case.cache, prepare_of(tier, case), plan))
    assert spy.asked(DECODE)[1]["kv_indptr"].data_ptr() == spy.asked(DECODE)[2]["kv_indptr"].data_ptr()


def test_scratch_is_known_from_the_capacity_and_bounds_the_worst_step():
    capacity = Capacity(max_requests=3, max_tokens=24, max_query_len=8, max_seq_len=40)
    for N, arch in ((16, "gfx950"), (24, "gfx950"), (48, "gfx942"), (8, "gfx942")):
        tier, fields = aiter(arch), {**TOY, "N": N, "lse": arch == "gfx950"}
        one = make_case([1], [2], capacity=capacity, **fields)
        worst = tier.plan(one.need, one.batch)
        free = dataclasses.replace(one.need, capacity=None)
        for query_lens in ([8] * 3, [7, 8, 8], [1] * 3, [4] * 3, [3, 1], [5, 5, 5]):
            case = make_case(query_lens, [40] * len(query_lens), **fields)
            needed = tier.plan(free, case.batch).sizes
            for name, (shape, dtype) in needed.items():
                assert math.prod(shape) <= math.prod(worst.sizes[name][0]), (N, query_lens, name)
                assert dtype == worst.sizes[name][1]
        assert worst.nbytes == tier.plan(one.need, case.batch).nbytes


def test_a_refill_that_fails_leaves_the_plan_as_it_was():
    tier, _ = spied()
    case = make_case([1, 1], [9, 20], **REAL)
    prepared, plan = prepare_of(tier, case), tier.plan(case.need, case.batch)
    before = (plan.batch, plan.steps, plan.sizes, plan.report)
    huge = dataclasses.replace(case.batch, num_pages=2**30)
    with pytest.raises(ValueError, match="a pool of"):
        tier.plan(case.need, huge, plan)
    assert (plan.batch, plan.steps, plan.sizes, plan.report) == before
    case.check(tier.attend(case.q, case.cache, prepared, plan))


# the output and the LSE that AITER hands back


def test_the_output_is_read_where_aiter_put_it_when_its_storage_moved():
    case = make_case([2, 2], [20, 31], **REAL | {"N": 32, "lse": False})
    seen = []

    def watch(name, asked, call):
        before = asked["o"].data_ptr() if name == DECODE else None
        found = call()
        if name == DECODE:
            o = asked["o"]
            seen.append((o._base is None, o.untyped_storage().nbytes() == o.nbytes, o.data_ptr() != before))
        return found

    tier, _ = spied("gfx942", change=watch)
    state = case.run(tier)
    check_out(case, state)
    assert seen == [(True, True, True)]  # owned alone, and moved by the fold of 32 heads


@pytest.mark.parametrize(("arch", "requests", "zero"), [("gfx942", 2, True), ("gfx950", 40, True), ("gfx950", 2, True)])
def test_rows_that_no_work_plan_writes_start_as_zeros(arch, requests, zero):
    case = make_case([1] * requests, [5] * requests, **REAL)
    seen = []

    def watch(name, asked, call):
        if name == DECODE:
            seen.append(bool((asked["o"] == 0).all()))
        return call()

    tier, _ = spied(arch, change=watch)
    case.check(case.run(tier))
    assert seen == [zero]


def test_a_missing_lse_is_refused_by_name():
    def without(name, asked, call):
        found = call()
        return (found[0], None) if name == DECODE else found

    case = make_case([1], [5], **REAL)
    tier, _ = spied(change=without)
    with pytest.raises(ValueError, match=r"aiter's lse: expected shape \(1, 16\), got None"):
        case.run(tier)


def test_the_scale_is_passed_and_never_left_to_the_width():
    case = make_case([1, 20], [5, 30], softmax_scale=0.123, **REAL)
    tier, spy = spied()
    case.check(case.run(tier))
    assert [asked["sm_scale"] for asked in spy.asked(DECODE)] == [0.123]
    assert [asked["softmax_scale"] for asked in spy.asked(FLASH)] == [0.123] * 2


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_G1_a_cache_past_the_window_is_refused_before_the_call(dtype):
    case = make_case([1], [5], **REAL | {"dtype": dtype})
    rows = case.cache.data.shape[0] * case.need.page_size
    blind = dataclasses.replace(case.batch, num_pages=None)
    tier, spy = spied(window=rows * 1152)
    plan = tier.plan(case.need, blind)
    with pytest.raises(ValueError, match=r"cache\.data: expected below"):
        tier.attend(case.q, case.cache, prepare_of(tier, case), plan)
    assert spy.asked(DECODE) == spy.asked(TRITON_DECODE) == []
    with pytest.raises(ValueError, match="a pool of"):
        tier.plan(case.need, case.batch)
    case.check(case.run(spied(window=rows * 1152 + 1)[0]))


def test_weights_and_queries_of_any_strides_and_wider_weights():
    case = make_case([1, 3, 10], [9, 20, 31], **REAL)
    q = Query(*(torch.stack([x, x], -1)[..., 0] for x in case.q))
    assert q.nope.stride(-1) == 2
    for tier in everywhere().values():
        case.check(dataclasses.replace(case, q=q).run(tier))


def test_gradients_are_refused():
    case = make_case([1], [5], **REAL)
    tier = aiter()
    q = Query(case.q.nope.requires_grad_(), case.q.pe)
    with pytest.raises(ValueError, match="requires_grad"):
        tier.attend(q, case.cache, prepare_of(tier, case), tier.plan(case.need, case.batch))
    (kv_c, k_pe), before = case.keys[0], case.cache.data.clone().view(torch.uint8)
    with pytest.raises(ValueError, match=r"requires_grad: expected no gradients through aiter \(simulated\)"):
        tier.write(case.cache, kv_c.clone().requires_grad_(), k_pe, torch.arange(5))
    assert torch.equal(case.cache.data.view(torch.uint8), before)


@pytest.mark.parametrize("fields", [{"N": 4}, {"N": 32, "lse": False}, {"N": 4, "dtype": F16}], ids=str)
@pytest.mark.parametrize("arch", ARCHES)
def test_attend_never_waits_for_the_device(arch, fields):
    case = make_case([3, 1, 0, 12, 2], [9, 6, 5, 17, 0], pad_tokens=2, **TOY | fields)
    for form, cache in (("auto", case.cache), ("mqa", strided(case.cache))):
        tier, _ = spied(arch, form)
        prepared, plan = tier.prepare(case.up, case.need), tier.plan(case.need, case.batch)
        with no_sync():
            state = tier.attend(case.q, cache, prepared, plan)
        check_out(case, state)


def strided(cache: PagedLatentCache) -> PagedLatentCache:
    pages, page, width = cache.data.shape
    whole = torch.full((pages, page, width + 8), NAN, dtype=cache.data.dtype)
    whole[..., :width] = cache.data
    return PagedLatentCache.wrap(whole[..., :width], cache.layout)


# M: captured steps


def captured_case(query_lens, seq_lens, *, arch="gfx950", pad_tokens=0, capacity=None, seed=0, **fields):
    n = max(query_lens, default=1)
    T = sum(query_lens) + pad_tokens
    capacity = capacity or Capacity(max_requests=8, max_tokens=T, max_query_len=n, max_seq_len=64)
    fields = {"graph_capture": True, "uniform_queries": True, "capacity": capacity, **REAL, **fields}
    case = make_case(query_lens, seq_lens, pad_tokens=pad_tokens, seed=seed, **fields)
    return aiter(arch), case.need, case


@pytest.mark.parametrize(("arch", "N"), [("gfx942", 16), ("gfx950", 16), ("gfx950", 12), ("gfx942", 32)])
@pytest.mark.parametrize("n", [1, 3])
def test_CG1_a_step_of_8_requests_is_refilled_for_5_and_for_none_at_the_same_addresses(arch, N, n):
    tier, spy = spied(arch)
    capacity = Capacity(max_requests=8, max_tokens=8 * n, max_query_len=n, max_seq_len=64)
    fields: dict[str, Any] = {"capacity": capacity, "N": N, "lse": arch == "gfx950", "L": 32, "R": 8}
    plan = None
    for seed, lens in enumerate(([9, 20, 5, 33, 64, 3, 40, 17], [64, 3, 21, 50, 9], [], [7, 0, 30], [64] * 8)):
        _, need, case = captured_case([n] * len(lens), lens, pad_tokens=n * (8 - len(lens)), seed=seed, **fields)
        plan = tier.plan(need, case.batch, plan)
        state = tier.attend(case.q, case.cache, prepare_of(tier, case), plan)
        check_out(case, state)
        assert bool((state.out[case.batch.row_kv_lens == 0] == 0).all())
        (asked,) = spy.asked(DECODE)[seed:]
        n_keys = int(asked["kv_indptr"][-1])
        assert bool((asked["kv_indices"][n_keys:] == SENTINEL).all())
        assert bool((asked["kv_indices"][:n_keys] >= 0).all())
    steady = ("q", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", *BUFFERS)
    for name in steady:
        found = {(x[name].data_ptr(), x[name].shape) for x in spy.asked(DECODE) if name in x}
        assert len(found) <= 1, name
    assert len({x["max_seqlen_q"] for x in spy.asked(DECODE)}) == 1


def test_CG3_a_shrinking_batch_keeps_nothing_of_the_one_before():
    tier = aiter("gfx950")
    capacity = Capacity(max_requests=6, max_tokens=60, max_query_len=10, max_seq_len=64)
    first = make_case([10] * 6, [64] * 6, capacity=capacity, **REAL)
    plan = tier.plan(first.need, first.batch)
    assert plan.report["forms"] == ["mha"] * 6
    second = make_case([1, 1, 0, 0, 0, 0], [30, 5, 0, 0, 0, 0], capacity=capacity, pad_tokens=4, seed=1, **REAL)
    tier.plan(second.need, second.batch, plan)
    assert plan.report["forms"] == ["mqa"] * 6
    assert plan.report["chunks"] == 0
    second.check(tier.attend(second.q, second.cache, prepare_of(tier, second), plan))


def test_M7_of_padded_rows_only_the_real_ones_count():
    tier, _, case = captured_case([3, 3, 3], [17, 33, 40], pad_tokens=3)
    state = case.run(tier)
    case.check(state)
    assert bool((state.out[9:] == 0).all())
    assert bool((state.lse[9:] == -INF).all())


def test_M_a_stand_in_may_meet_nan_and_infinity():
    tier, _, case = captured_case([1, 1], [9, 0], pad_tokens=2)
    assert 0 not in case.batch.block_table[0, :3].tolist()  # slot 0, which stand-ins read, belongs to nobody here
    for poison in (INF, NAN):
        case.cache.data.view(-1, 576)[0] = poison
        case.check(case.run(tier))


def test_M_what_does_not_fit_a_captured_step_is_refused_by_name():
    tier, need, case = captured_case([3, 3], [9, 20])
    plan = tier.plan(need, case.batch)
    before = plan.steps
    with pytest.raises(ValueError, match="batch: expected 6 tokens, as captured, got 3"):
        tier.plan(need, make_batch([3], [9], need), plan)
    with pytest.raises(ValueError, match=r"capacity\.max_tokens: expected at most 6, got 7"):
        tier.plan(need, make_batch([3, 3], [9, 20], need, pad_tokens=1), plan)
    with pytest.raises(ValueError, match="rows for sequences of 3, got query_lens \\[2\\]"):
        tier.plan(need, make_batch([2, 2, 2], [9, 20, 5], need), plan)
    assert plan.steps is before
    for wrong, text in (({"capacity": None}, "needs Need.capacity"), ({"dtype": F16}, "not served for float16")):
        fields = {"graph_capture": True, "capacity": need.capacity, **REAL, **wrong}
        assert any(text in r for r in tier.why_not(make_need(**fields)))
    assert any("form = 'mha' expands" in r for r in aiter(form="mha").why_not(need))


def test_M_what_is_no_plan_or_a_plan_of_another_need_is_refused_by_name():
    tier, need, case = captured_case([3, 3], [9, 20])
    plan = tier.plan(need, case.batch)
    free = dataclasses.replace(need, graph_capture=False)
    nothing = tier.plan(free, make_batch([], [], free))
    before = plan.steps
    for given, kind, text in (
        ((None, case.batch, plan), TypeError, "^need: expected a Need"),
        ((need, None, plan), TypeError, "^batch: expected a AttentionBatch"),
        ((need, case.batch, "plan"), TypeError, "^into: expected a Plan"),
        ((need, case.batch, nothing), ValueError, "^into: expected a plan of the same Need"),
    ):
        with pytest.raises(kind, match=text):
            tier.plan(*given)
    assert plan.steps is before
    assert plan.batch is case.batch


def test_M_a_captured_step_of_unequal_queries_has_single_rows():
    tier, need, case = captured_case([3, 1, 2], [9, 20, 5], pad_tokens=2, uniform_queries=False)
    plan = tier.plan(need, case.batch)
    assert plan.steps.decode.most == 1
    case.check(case.run(tier))


# golden vectors: what AITER's own Triton kernels gave in the interpreter, float32, inputs exact in float16

GOLDEN = Path(__file__).parent / "data" / "aiter_golden"
PAGED = sorted(p.stem for p in GOLDEN.glob("*_fwd_*.npz"))


def golden(name: str) -> dict[str, Any]:
    with np.load(GOLDEN / f"{name}.npz") as found:
        return {k: torch.from_numpy(found[k]) if found[k].ndim else found[k].item() for k in found.files}


def golden_case(g: dict[str, Any], dtype: torch.dtype) -> Case:
    """The case of a golden vector: W_UK and W_UV are identities, so that the given query is the absorbed one."""
    L, R, N, page = g["r"], g["p"], g["q"].shape[1], g["kv"].shape[1]
    seq_lens = g.get("seqlens", g.get("seqused_k")).tolist()
    starts = g["cu_seqlens_q"].tolist() if "cu_seqlens_q" in g else list(range(len(seq_lens) + 1))
    query_lens = [b - a for a, b in pairwise(starts)]
    fields = {"N": N, "L": L, "P": L, "R": R, "V": L, "dtype": dtype, "out_dtype": F32, "page_size": page}
    need = make_need(softmax_scale=float(g["scale"]), **fields)
    pool = g["kv"].flatten(2).to(dtype)
    table = g["block_tables"]
    batch = AttentionBatch.bottom_right(query_lens, seq_lens, table, page_size=page, num_pages=len(pool))
    identity = torch.eye(L, dtype=dtype)[:, None].expand(L, N, L)
    q = Query(g["q"][..., :L].to(dtype), g["q"][..., L:].to(dtype))
    cache = PagedLatentCache.wrap(pool.contiguous(), need.layout)
    keys = [cache.read(slots_of(table[b], 0, n, page)) for b, n in enumerate(seq_lens)]
    return Case(need, batch, q, UpProjection(identity, identity), keys, cache)


def rounding(g: dict[str, Any]) -> float:
    """What float32 sums may differ by: 8 standard deviations of independent roundings.

    A score is a sum of D products whose sizes add up to at most `terms`; its error moves every weight by as much, and
    the weighted sum has S terms of at most the largest number of the cache.
    """
    D, S = g["q"].shape[-1], int(g.get("seqlens", g.get("seqused_k")).max())
    pool = g["kv"].nan_to_num().flatten(0, 2).double()
    terms = float((g["q"].double().abs().flatten(0, 1) @ pool.abs().T).max()) * float(g["scale"])
    return 8 * 2.0**-24 * math.sqrt(D + S) * (1 + terms) * float(pool.abs().max())


@pytest.mark.parametrize("name", PAGED)
def test_golden_vectors_of_decode_and_prefill_through_the_float16_route(name):
    g = golden(name)
    case = golden_case(g, F16)
    state = case.run(aiter())
    assert state.out.dtype == F32
    assert (state.out - g["out"]).abs().max() <= rounding(g)
    if "lse" in g:
        assert (state.lse - g["lse"]).abs().max() <= rounding(g)


@pytest.mark.parametrize("name", [n for n in PAGED if "r512" not in n or n.endswith("_5")])
def test_golden_vectors_are_the_oracles_and_bfloat16_is_within_its_budget(name):
    g = golden(name)
    exact = golden_case(g, F32).truth().out
    assert (exact - g["out"]).abs().max() <= rounding(g)
    case = golden_case(g, BF16)
    for arch in ARCHES:
        check_out(case, case.run(aiter(arch)))
        blind = dataclasses.replace(case, need=dataclasses.replace(case.need, lse=False))
        check_out(case, blind.run(aiter(arch)))


@pytest.mark.parametrize("ck", [True, False])
@pytest.mark.parametrize("name", sorted(p.stem for p in GOLDEN.glob("*varlen*.npz")))
def test_golden_vectors_of_the_expanded_form_with_their_lse(name, ck):
    g = golden(name)
    need = make_need(**REAL | {"N": g["q"].shape[1], "P": 128, "V": 128, "dtype": F16}, softmax_scale=float(g["scale"]))
    flash = SimulatedAiter(ck=ck).find(FLASH, need)
    kernel = flash_kernel(flash, need, heads_first(flash, need))
    lens = [tuple((x[1:] - x[:-1]).tolist()) for x in (g["cu_q"], g["cu_k"])]
    rows = torch.arange(len(g["q"]))
    call = RaggedCall(bool(g["causal"]), rows, None, *lens, g["cu_q"], g["cu_k"], 0, len(g["k"]))
    out, lse = kernel(call, *(g[x].to(F16) for x in "qkv"))
    # outputs round to float16; the LSE is float32, from scores of 192 products
    assert (out - g["out"]).abs().max() <= 2**-11 * float(g["v"].abs().max()) + 1e-5
    assert (lse - g["lse_total_q_by_heads"]).abs().max() <= 1e-5


# T: refusals


def test_T1_features_that_it_does_not_compute_are_refused_one_by_one():
    for name, value in (("window", 4), ("sinks", True), ("softcap", 30.0), ("alibi", True), ("kv_sharing", True)):
        reasons = aiter().why_not(make_need(**REAL, **{name: value}))
        assert [r.startswith(f"{name} = {value!r}") for r in reasons] == [True]
    assert any("batch_invariant = True" in r for r in aiter().why_not(make_need(**REAL, batch_invariant=True)))


def test_T3_all_reasons_come_at_once_and_the_call_raises_with_them():
    need = make_need(**REAL | {"dtype": F32, "N": 200}, window=4, batch_invariant=True)
    reasons = aiter().why_not(need)
    for text in ("window", "batch_invariant", "N = 200"):
        assert any(text in r for r in reasons), text
    case = make_case([1], [5], **REAL | {"dtype": F32})
    with pytest.raises(ValueError, match=r"tier 'aiter \(simulated\)' refuses: .*float32"):
        aiter().plan(case.need, case.batch)
    with pytest.raises(ValueError, match="float32"):
        aiter().prepare(case.up, case.need)


def test_T8_lengths_of_another_shape_are_named():
    with pytest.raises((ValueError, TypeError), match="seq_lens"):
        make_batch([1], torch.ones(1, 1, dtype=torch.int64), make_need(**REAL))


def test_T7_nothing_ever_reaches_a_kernel_that_does_not_exist():
    # AiterAbort is no Exception: a call without its kernel would end this test run
    assert not issubclass(AiterAbort, Exception)
    for arch, N, query_lens in product(ARCHES, (1, 17, 64), ((2, 2), (5,), (1, 4))):
        case = make_case(query_lens, [9] * len(query_lens), **TOY | {"N": N})
        for lse in (True, False):
            dataclasses.replace(case, need=dataclasses.replace(case.need, lse=lse)).run(aiter(arch, cu_num=3))


def test_a_float16_query_is_handed_over_in_float32():
    assert dtypes_of(make_need(**REAL | {"dtype": F16})) == (F32, F16)
    assert dtypes_of(make_need(**REAL)) == (BF16, BF16)
