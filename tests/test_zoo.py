"""The fault zoo: every planted fault is what it says, the suite catches it, and nothing that is right is caught.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import math
from collections import Counter
from functools import cache

import pytest
import torch
from every_tier import every_tier
from small_case import make_case, mean_case
from torch import Tensor

from mla.adapters import from_latent
from mla.conformance import SPECS, Case, check, run_case, spec, suite
from mla.conformance.cases import DIMS, TOY
from mla.conformance.large import no_room
from mla.conformance.latent import run_latent_case
from mla.conformance.specs import BatchSpec
from mla.conformance.zoo import FAULTS, KINDS, Fault, fault, kernel
from mla.conformance.zoo.broken import Broken, around
from mla.conformance.zoo.edits import parse
from mla.conformance.zoo.fault import KERNEL_TEXT, compiled, edited
from mla.conformance.zoo.score import Caught, quick_order, run_fault, score, summary_of
from mla.presets import preset
from mla.state import AttentionState

INF = float("inf")


def toy(batch: str, family: str, dtype: str = "bf16", page: int = 0, **fields) -> Case:
    return Case(spec(batch), TOY, dtype, "", family, page_size=page, **fields)


# a few cases of the kinds that `smoke` has: each fault that a small suite can show must fail one of them
CASES = [
    toy("padded_tail", "needle_middle", page=1, plan="capped"),
    toy("rank_without_keys", "needle_last", "f32", 64, cache="strided"),
    toy("verify_2", "needle_middle", page=1, plan="refilled"),
    toy("edge_across_128", "needle"),
    toy("edge_decode_64", "needle_end"),  # T == N
    toy("rank_some_rows", "needle_end", page=1),
    toy("slot_minus_one", "randn", "f16", 8),
    toy("mixed_small", "needle", page=8, lse=False),
    Case(spec("1q1s21_1q3s18"), DIMS["toy_n12"], "bf16", "", "needle"),
    toy("verify_4", "peaked", "f32", repeats=5),
    toy("edge_across_128", "randn", "f32"),
    toy("long_short_pairs", "needle_end", "f16", 64),  # a worker does two requests in a row
    toy("only_padding", "randn", "f32"),  # no block table
    toy("1q40s61", "randn", "f32"),  # rows that see one key of a tile, in the middle of packed ones
]
SMALL = [name for name, f in FAULTS.items() if f.suite != "large"]
WITH_KERNEL = [name for name in SMALL if FAULTS[name].level == "latent"]


@cache
def first_catch(name: str, level: str = "attend"):
    """The first of CASES that a fault fails, None if it passes all."""
    return next((r for r in (run_fault(fault(name), case, level=level) for case in CASES) if r.failed), None)


# what there is


def test_there_are_enough_faults_of_every_kind():
    assert len(FAULTS) >= 150
    assert len([f for f in FAULTS.values() if f.edit]) >= 90
    kinds = Counter(f.kind for f in FAULTS.values())
    assert set(kinds) == set(KINDS)
    assert all(count >= 4 for kind, count in kinds.items() if kind != "offset")
    assert Counter(f.suite for f in FAULTS.values()) == {"smoke": len(FAULTS) - 1, "large": 1}
    assert {f.source[0] for f in FAULTS.values() if f.source} >= set("ABCDEFGHIJLMNOPQTU") | {"g"}
    assert all(f.name == name and f.about.endswith(".") for name, f in FAULTS.items())
    assert len({f.about for f in FAULTS.values()}) == len(FAULTS)


@pytest.mark.parametrize("name", [name for name, f in FAULTS.items() if f.edit])
def test_an_edit_changes_one_line_of_the_kernel(name):
    f = FAULTS[name]
    old, new = (text.splitlines() for text in (KERNEL_TEXT, edited(name, *f.edit)))
    assert len(old) == len(new)
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 1
    assert callable(f.kernel())


def test_an_edit_whose_text_is_not_there_once_is_an_error():
    for text in ("no such text", "total"):
        wrong = Fault("wrong", "scale", "Nothing.", edit=(text, "x"))
        with pytest.raises(ValueError, match=r"^wrong: expected '.*' exactly once in zoo/kernel.py, got \d+ times"):
            wrong.tier()
    for text in ("no headline\n- a\n+ b", "name (scale): About.\n- only old", "name (scale): About.\n+ a\n- b"):
        with pytest.raises(ValueError, match=r"^edits: expected a headline"):
            parse(text)
    (one,) = parse("name (scale, B1, full): About.\n- a\n+ b")
    assert (one.name, one.kind, one.source, one.suite, one.edit) == ("name", "scale", "B1", "full", ("a", "b"))
    assert parse("name (scale, large): About.\n- a\n+ b")[0].suite == "large"


def test_bad_faults_and_names_are_refused():
    with pytest.raises(ValueError, match=r"did you mean 'mask_top_left'"):
        fault("mask_topleft")
    with pytest.raises(ValueError, match=r"^kind: expected one of scale"):
        Fault("x", "scales", "About.", edit=("a", "b"))
    with pytest.raises(ValueError, match=r"^suite: expected one of smoke"):
        Fault("x", "scale", "About.", suite="small", edit=("a", "b"))
    with pytest.raises(ValueError, match=r"^x: expected an edit or a wrapper"):
        Fault("x", "scale", "About.")
    with pytest.raises(ValueError, match=r"^value_zeros: expected a fault of the kernel"):
        fault("value_zeros").kernel()
    with pytest.raises(ValueError, match=r"^level: expected one of attend, latent"):
        list(score([], level="layer"))
    with pytest.raises(ValueError, match=r"^suites: expected some of smoke, full, large"):
        list(score([], suites=("smoke", "fuller")))


# every fault is caught, nothing right is


@pytest.mark.parametrize("name", SMALL)
def test_the_fault_is_caught(name):
    result = first_catch(name)
    assert result is not None, FAULTS[name].about
    if FAULTS[name].kind == "form" and result.status != "raised":
        assert result.status in ("wrong_shape", "wrong_dtype", "mismatch")


def test_no_fault_is_caught_by_a_hair_only():
    """Where the first case that fails is near its budget, another one is far past it."""
    used = lambda r: max(r.used_out, r.used_lse)
    for name in SMALL:
        if used(first_catch(name)) < 2:
            assert any(used(run_fault(fault(name), case)) > 5 for case in CASES), name


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_the_fault_is_caught_as_an_inner_kernel(name):
    assert first_catch(name, "latent") is not None, FAULTS[name].about


@pytest.mark.parametrize(
    ("name", "status"),
    {
        "form_latent_width": "wrong_shape",
        "form_out_in_float64": "wrong_dtype",
        "form_tuple": "wrong_shape",
        "form_raises": "raised",
        "form_reads_an_empty_table": "raised",
        "precision_weights_overflow": "not_finite",
        "tail_not_zeroed": "not_finite",
        "empty_plus_infinity": "not_finite",
        "memory_scratch_returned": "mismatch",
        "memory_race": "mismatch",
    }.items(),
)
def test_a_fault_has_its_own_status(name, status):
    assert first_catch(name).status == status


def test_only_what_is_meant_is_wrong():
    """A fault of the LSE leaves the output right, one of values leaves the LSE right."""
    for name in SMALL:
        result = first_catch(name)
        if FAULTS[name].kind == "lse":
            assert result.used_out <= 1 < result.used_lse, name
        if name.startswith(("value_wrong", "value_of", "value_columns", "value_up", "value_zeros", "head_off")):
            assert result.used_lse <= 1 < result.used_out, name


@pytest.mark.parametrize(("tile", "splits", "block"), [(24, 4, 8), (32, 3, 4), (7, 1, 1), (64, 9, 16)])
def test_the_kernel_is_right_whatever_its_constants(tile, splits, block):
    edit = ("SPLITS, HEAD_BLOCK = 24, 4, 8", f"SPLITS, HEAD_BLOCK = {tile}, {splits}, {block}")
    harmless = Fault("harmless", "split", "Nothing is wrong.", edit=edit)
    for case in CASES:
        for level in ("attend", "latent"):
            result = run_fault(harmless, case, level=level)
            assert result.ok, (case.id, level, result)


def test_the_kernel_passes_smoke():
    wrong = [r for r in check(from_latent("kernel", kernel.attend), suite("smoke")) if not r.ok]
    assert wrong == []


def test_a_wrapper_without_a_fault_is_right_over_any_tier():
    for tier in every_tier(64, 600).values():
        for case in CASES[:4]:
            result = run_case(Broken("right", tier), case)
            assert result.ok or result.status == "refused", result


def test_a_wrapper_breaks_any_correct_tier():
    for name in ("scale_of_the_value_width", "rope_pairs_mixed", "value_zeros", "write_twice", "memory_query_changed"):
        for tier in every_tier(64, 600).values():
            assert run_case(FAULTS[name].tier(tier), CASES[0], diagnosed=False).failed, (name, tier.name)


# the faults are those of the golden constants


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("scale_of_the_latent_width", 0.0416667),
        ("scale_without_mscale", 0.0721688),
        ("scale_mscale_once", 0.0987909),
        ("scale_mscale_inverted", 0.0721688 / 1.87385421),
        ("scale_one_percent", 0.13523378 * 1.01),
        ("scale_twice", 0.13523378**2),
        ("scale_of_the_nope_width", 128**-0.5 * 1.87385421),
        ("scale_of_the_padded_width", 256**-0.5 * 1.87385421),
    ],
)
def test_D7_a_wrong_scale_of_v3_is_the_one_in_the_reports(name, scale):
    # one key whose product with the query is 1: the LSE is the scale
    c = preset("deepseek-v3")
    case = make_case([1], [1], N=2, L=c.L, P=c.P, R=c.R, V=c.V, softmax_scale=c.softmax_scale)
    for x in (*case.q, *case.keys[0], case.up.W_UK, case.cache.data):
        x.nan_to_num_().zero_()
    case.q.nope[:, :, 5], case.up.W_UK[7, :, 5] = 1.0, 1.0
    case.cache.data[..., 7] = 1.0
    assert case.run(from_latent("right", kernel.attend)).lse[0, 0] == pytest.approx(0.13523378, rel=1e-6)
    assert case.run(fault(name).tier()).lse[0, 0] == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("mask_missing", [3.0, 3.0]),
        ("mask_top_left", [1.0, 1.5]),
        ("mask_one_key_more", [3.0, 3.0]),
        ("mask_one_key_less", [2.0, 2.5]),
        ("mask_first_row_for_all", [2.5, 2.5]),
        ("tail_last_token_dropped", [2.5, 2.5]),
        ("", [2.5, 3.0]),
    ],
)
def test_K_masks_of_two_new_tokens_over_five_keys_have_the_means_in_the_reports(name, rows):
    case = mean_case([2], [[1.0, 2.0, 3.0, 4.0, 5.0]])
    tier = fault(name).tier() if name else from_latent("right", kernel.attend)
    for row, right in zip(case.run(tier).out, rows, strict=True):
        # at most 8 roundings of sums and products, of numbers up to 5
        assert float((row - right).abs().max()) <= 8 * 5 * 2.0**-24


@pytest.mark.parametrize(
    ("name", "merged"),
    [("", 0.9), ("merge_natural_as_base_2", 0.8210), ("merge_unweighted", 0.5), ("merge_base_2_as_natural", 0.9597)],
)
def test_B_two_partial_results_of_weight_1_and_9_merge_as_in_the_reports(name, merged):
    module = compiled("m", edited("m", *fault(name).edit)) if name else kernel
    lse = torch.tensor([1.0, 9.0]).log() / (math.log(2) if name == "merge_base_2_as_natural" else 1)
    out, _ = module.combine(torch.tensor([0.0, 1.0]).view(2, 1, 1), lse.view(2, 1))
    assert float(out) == pytest.approx(merged, abs=5e-5)


def test_B1_the_edit_of_merge_base_2_gives_partial_lses_in_base_2():
    new = edited("m", *fault("merge_base_2_as_natural").edit)
    assert "return out, (top + total.log()) / 0.6931471805599453" in new


def test_E1_rope_pairs_mixed_gives_the_score_in_the_reports():
    # d = 4, base 1e4, q = k = [1, 2, 3, 4] at positions 3 and 2: 27.700262 by adjacent pairs, 16.006766 if mixed
    from mla.conformance.zoo.wrappers import halves, turned

    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    at = lambda position: torch.tensor([[position, position * 1e-2]], dtype=torch.float64)
    q, k = turned(x, at(3.0)), turned(x, at(2.0))
    assert float((q * k).sum()) == pytest.approx(27.700262, abs=1e-6)
    by_halves = turned(torch.tensor([[[1.0, 3.0, 2.0, 4.0]]], dtype=torch.float64), at(2.0))
    assert float((q * halves(by_halves)).sum()) == pytest.approx(16.006766, abs=1e-6)


# the score


def test_cases_that_show_something_new_come_first():
    first, again, other = CASES[0], dataclasses.replace(CASES[0], seed=1), toy("one_key", "randn")
    assert quick_order([first, again, other]) == [first, other, again]
    assert quick_order([]) == []
    # a case of few keys comes behind one of many, and one without a needle behind both
    few, many, plain = toy("one_key", "needle"), toy("mixed_small", "needle"), toy("mixed_small", "randn")
    assert quick_order([plain, few, many])[0] == many


def test_the_score_says_what_caught_a_fault_and_what_was_missed(monkeypatch):
    suites = {"smoke": [CASES[3], CASES[0]], "full": [CASES[1]], "large": []}
    monkeypatch.setattr("mla.conformance.zoo.score.suite", suites.__getitem__)
    right = around("nothing", "scale", "", "Nothing is wrong.")
    some = [
        fault("mask_top_left"),
        fault("offset_32_bits"),
        fault("empty_divides_by_zero"),
        right,
        fault("write_twice"),
    ]
    rows = list(score(some, diagnosed=True))
    assert [(c.fault.name, c.caught, c.suite, c.only_large) for c in rows] == [
        ("mask_top_left", True, "smoke", False),
        ("offset_32_bits", False, "", True),
        ("empty_divides_by_zero", True, "full", False),
        ("nothing", False, "", False),
        ("write_twice", True, "smoke", False),
    ]
    assert [c.tried for c in rows] == [1, 0, 3, 3, 1]
    first, large, full, nothing, write = (c.record() for c in rows)
    assert first["kind"] == first["guess"] == "mask"
    assert first["used"] > 1
    assert (large["status"], nothing["status"]) == ("not_run", "missed")
    assert (full["case"], full["status"], full["caught"]) == (CASES[1].id, "not_finite", True)
    assert (write["status"], write["used"], write["guess"]) == ("mismatch", INF, "write")
    total = summary_of(rows)
    assert (total["faults"], total["counted"], total["caught"], total["cases"]) == (5, 4, 3, 8)
    assert (total["missed"], total["only_large"]) == (["nothing"], ["offset_32_bits"])
    assert summary_of([])["caught"] == 0


def test_what_caught_most_is_tried_first_and_levels_without_a_kernel_are_passed_over(monkeypatch):
    monkeypatch.setattr("mla.conformance.zoo.score.suite", {"smoke": CASES[:3]}.__getitem__)
    some = [
        fault(n) for n in ("split_partials_zero", "precision_lse_in_16_bits", "value_zeros", "split_second_dropped")
    ]
    rows = list(score(some, suites=("smoke",), level="latent"))
    assert [c.fault.name for c in rows] == ["split_partials_zero", "precision_lse_in_16_bits", "split_second_dropped"]
    assert all(c.caught and c.level == "latent" and c.result.level == "latent" for c in rows)
    assert rows[0].tried > 1
    assert rows[1].tried == 1
    assert rows[1].result.case == rows[0].result.case != CASES[0]
    assert run_fault(rows[1].fault, CASES[0], level="latent").failed  # which is the first in order


def test_a_fault_of_long_caches_only_is_not_counted_unless_large_is_run(monkeypatch):
    f = fault("offset_32_bits")
    assert (f.suite, f.kind, f.source) == ("large", "offset", "G1")
    assert all(run_fault(f, case).ok for case in CASES[:2])
    monkeypatch.setattr("mla.conformance.zoo.score.suite", {"large": [CASES[0]]}.__getitem__)
    (row,) = score([f], suites=("smoke", "full", "large"))  # the smaller ones, which cannot show it, are not made
    assert row == Caught(f, "attend", None, "", 1, row.seconds, only_large=False)


def test_G1_large_catches_offsets_of_32_bits_at_both_levels():
    case = next((c for c in suite("large") if c.cache == "far" and no_room(c) is None), None)
    if case is None:
        pytest.skip("no room here for a cache of 2^31 elements: `mla check --suite large` needs 4 GB")
    f = fault("offset_32_bits")
    assert run_case(from_latent("right", kernel.attend), case).ok
    for level in ("attend", "latent"):
        assert run_fault(f, case, level=level).status == "mismatch"


def test_G1_offsets_of_32_bits_wrap_where_the_report_says():
    # rows of 576 elements: slot 3,728,270 begins below 2^31, 3,728,271 past it, and there another row is read
    for slot, right in ((3_728_270, True), (3_728_271, False)):
        row = (torch.tensor(slot) * 576).int() // 576
        assert (int(row) == slot) is right
    assert "len(query.T)).int() // len(query.T)" in fault("offset_32_bits").edit[1]


def test_a_broken_tier_is_new_each_time():
    first, second = (fault("split_partials_stale").kernel() for _ in range(2))
    assert first is not second
    run_latent_case(first, CASES[0])
    assert vars(first)
    assert not vars(second)


def test_a_traceback_shows_the_edited_line():
    f = Fault("raises", "scale", "It raises.", edit=("top = peak", "top = peak.no_such_method()"))
    result = run_case(f.tier(), CASES[0])
    assert result.status == "raised"
    assert "no_such_method" in result.detail


def test_harmless_changes_are_not_caught():
    """What a wrapper computes twice, or writes twice into the same slot, is no fault."""

    def again(state: AttentionState, call) -> AttentionState:
        return AttentionState(state.out.clone(), None if state.lse is None else state.lse.clone())

    def written_again(base, cache, kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> None:
        base(cache, kv_c, k_pe, slots)
        base(cache, kv_c, k_pe, slots)

    copies = around("copies", "form", "", "A.", result=lambda s, call: s if call.out is not None else again(s, call))
    for harmless in (copies, around("twice", "write", "", "A.", write_rows=written_again)):
        assert [r.status for r in check(harmless.tier(), CASES)] == ["ok"] * len(CASES)


def test_names_of_batches_used_here_exist():
    assert all(isinstance(case.batch, BatchSpec) for case in CASES)
    assert {c.batch.name for c in CASES if c.batch.name in SPECS} >= {"padded_tail", "rank_without_keys", "verify_2"}
    assert len({dataclasses.replace(c) for c in CASES}) == len(CASES)
