"""The FlashInfer tier: every batch of the field, what it refuses, bad input, graphs, and the faults of real code.

On the CPU over the stand-in at toy sizes; on a GPU with the package over the library itself, at the sizes it takes.
Axes: T new tokens (packed over requests), B requests, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import inspect
import math
import warnings
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import flashinfer_standin as standin
import numpy as np
import pytest
import small_case
import torch
from small_case import Case, fill_cache, make_batch, make_need, mean_case

from mla.batch import AttentionBatch
from mla.cache import CacheSpec, FloatRows, PagedLatentCache
from mla.conformance import SPECS, run_case
from mla.conformance import Case as Conformance
from mla.conformance.cases import DIMS
from mla.conformance.specs import spec
from mla.conformance.suites import suite
from mla.need import Capacity, Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState, merge
from mla.tier import Plan
from tiers.tier2_flashinfer import absorbed
from tiers.tier2_flashinfer import library as found_in
from tiers.tier2_flashinfer import tier as tier_module
from tiers.tier2_flashinfer.tier import ELSEWHERE, EXPAND_FROM, FORMS, FlashInferTier

REAL = torch.cuda.is_available() and find_spec("flashinfer") is not None
DEVICE, LIBRARY = ("cuda", None) if REAL else ("cpu", standin)
SIZES = {"N": 3, "L": 512, "P": 128, "R": 64, "V": 128} if REAL else {}
HALVES = (torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")
SENTENCE = r"[^.].*\.$"


def flashinfer(form: str = "auto", **options: Any) -> FlashInferTier:
    """The tier over the library of this process."""
    return FlashInferTier(form, **{"library": LIBRARY, **options})


def make_case(query_lens: list[int], seq_lens: list[int], **fields: Any) -> Case:
    """`small_case.make_case` in bfloat16 where this process's library runs."""
    return small_case.make_case(
        query_lens, seq_lens, **{"dtype": torch.bfloat16, "page_size": 4, "device": DEVICE, **SIZES, **fields}
    )


def means(query_lens: list[int], values: list[list[float]], **fields: Any) -> Case:
    """`small_case.mean_case`: zero queries, so that outputs are means of the visible values."""
    return mean_case(query_lens, values, **{"dtype": torch.bfloat16, "device": DEVICE, **SIZES, **fields})


def forms(case: Case, **options: Any) -> dict[str, FlashInferTier]:
    """The forms that serve a case; a tiny workspace holds about a third of the longest request."""
    page, longest = case.need.page_size, case.batch.max_seq_len
    tiny = page * max(1, longest // (3 * page))
    found = {
        "auto": flashinfer(**options),
        "fa2": flashinfer("fa2", **options),
        "mqa": flashinfer("mqa", **options),
        "mha": flashinfer("mha", **options),
        f"mha in {tiny} rows": flashinfer("mha", max_workspace_tokens=tiny, **options),
        f"mha in {tiny} rows, their merge": flashinfer("mha", max_workspace_tokens=tiny, merge="flashinfer", **options),
    }
    if REAL and case.batch.max_query_len >= EXPAND_FROM:
        del found["fa2"]  # its prefill kernel takes minutes to build
    return {name: tier for name, tier in found.items() if not tier.why_not(case.need)}


def check_all(case: Case) -> None:
    """Every form is within the budget."""
    for name, tier in forms(case).items():
        result = case.check(case.run(tier))
        assert result.ok, name


def close(state: AttentionState, expected: list[float]) -> None:
    """Every channel of row i is expected[i]: equal weights are exact; partial, latent and output round, u each."""
    want = torch.tensor(expected, dtype=torch.float64)[:, None, None].expand_as(state.out)
    assert ((state.out.double().cpu() - want).abs() <= 4 * torch.finfo(state.out.dtype).eps / 2 * want.abs()).all()


def variant(**changes: Any) -> ModuleType:
    """The stand-in with other functions; `mla` and `page` are namespaces of their own."""
    module = ModuleType("variant")
    for name in ("mla", "page", "BatchPrefillWithRaggedKVCacheWrapper", "merge_state", "TAKES_ANY_SIZE"):
        setattr(module, name, getattr(standin, name))
    for name, thing in changes.items():
        setattr(module, name, thing)
    return module


def with_mla(wrapper: type) -> ModuleType:
    return variant(mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=wrapper))


# every batch of the field


def affordable() -> list[Conformance]:
    """One case of 16 bits for every batch of the smoke suite; `mla check` of the simulated tier has them all."""
    cases = [c for c in suite("smoke") if c.dtype != "f32" and c.dims.N * c.dims.L < 10_000]
    return list({(c.batch.name, c.dims.name[:3]): c for c in cases}.values())


@pytest.mark.parametrize("case", affordable(), ids=lambda case: case.id)
def test_every_batch_is_within_the_budget_or_refused_in_a_sentence(case):
    result = run_case(flashinfer(), case, device=DEVICE)
    if result.status == "refused":
        assert case.batch.mask == "rows" or case.layout != f"rows_{case.dtype}" or REAL, result.detail
    else:
        assert result.ok, f"{result.status} {result.used_out} {result.used_lse} {result.where} {result.detail}"


RELEASED = [
    Conformance(spec(name), DIMS[dims], dtype, family=family)
    for name, dims, dtype, family in (
        ("small_decode", "v3_n3", "bf16", "needle"),
        ("1q3s18", "v3_n16", "f16", "peaked"),
        ("edge_mixed_16", "nope_n12", "bf16", "needle_end"),
        ("1q1s21", "glm_n20", "f16", "randn"),
    )
]


@pytest.mark.parametrize("case", RELEASED, ids=lambda case: case.id)
def test_sizes_of_released_models(case):
    result = run_case(flashinfer(), case, device=DEVICE)
    assert result.ok, f"{result.status} {result.used_out} {result.used_lse} {result.where} {result.detail}"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lengths", [([3, 70, 1, 64, 2], [9, 90, 40, 200, 2]), ([5, 0, 100], [5, 7, 100])])
def test_mixed_batches_in_every_form(lengths, dtype):
    check_all(make_case(*lengths, dtype=dtype))


def test_long_queries_are_expanded_and_short_ones_absorbed():
    case = make_case([63, 64, 1, 200], [70, 90, 30, 200])
    report = flashinfer().plan(case.need, case.batch).report
    assert report["forms"] == ["mqa", "mha", "mqa", "mha"]
    assert flashinfer("mqa").plan(case.need, case.batch).report["forms"] == ["mqa"] * 4
    assert flashinfer("mha").plan(case.need, case.batch).report["forms"] == ["mha"] * 4
    assert flashinfer("fa2").plan(case.need, case.batch).report["kernel"] == "fa2"


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_query_longer_than_a_round_goes_through_in_several(mask, monkeypatch):
    case = make_case([50, 3, 20], [60, 30, 20], N=4, mask=mask)
    monkeypatch.setattr("tiers.tier2_flashinfer.absorbed.ROUND_BYTES", 16 * case.need.N * case.need.L * 2)
    tier = flashinfer("mqa")
    assert tier.plan(case.need, case.batch).report["rounds"] == 6  # of 16, 16, 16, 2 + 3, 16 and 4 rows
    case.check(case.run(tier))


def test_a_round_has_no_more_tiles_than_the_library_lists(monkeypatch):
    case = make_case([1] * 7, [9] * 7)
    monkeypatch.setattr("tiers.tier2_flashinfer.absorbed.MOST_TILES", 2)
    tier = flashinfer()
    assert tier.plan(case.need, case.batch).report["rounds"] == 4  # a request has a tile of its own
    case.check(case.run(tier))


def test_weights_wider_than_the_query_are_not_rounded():
    case = make_case([2, 70], [9, 80])
    wide = dataclasses.replace(case, up=UpProjection(*(W.float() * 1.001 for W in case.up)), _truth=None)
    wide.check(wide.run(flashinfer("mqa")))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_another_dtype_of_the_output(out_dtype):
    case = make_case([2, 70], [9, 80], out_dtype=out_dtype)
    for tier in forms(case).values():
        case.check(case.run(tier))


def test_P9_absorption_does_not_overflow_in_float16():
    # q_latent is 40 * 16 * P or more, past 65504, where the scores are small: the keys are
    P = max(128, SIZES.get("P", 0))
    case = make_case([1], [5], dtype=torch.float16, P=P)
    case.q.nope.fill_(40.0)
    case.up.W_UK.fill_(16.0)
    ((kv_c, _),) = case.keys
    kv_c.mul_(2.0**-14)
    case = dataclasses.replace(case, cache=fill_cache(case.need, case.batch, case.keys), _truth=None)
    state = case.run(flashinfer())
    case.check(state)


# what is refused


def sentences(form: str = "auto", options: dict[str, Any] | None = None, **fields: Any) -> list[str]:
    """Why a tier over the stand-in refuses a Need on an H200; each is one whole sentence."""
    sizes = {"N": 16, "L": 512, "P": 128, "R": 64, "V": 128} | fields
    layout = sizes.pop("layout", None) or FloatRows(sizes["L"], sizes["R"], sizes.get("dtype", torch.bfloat16))
    given = {"softmax_scale": 0.1, "page_size": 64, "dtype": torch.bfloat16, "device": "cuda:0", "arch": "sm_90"}
    need = Need(**given | sizes, layout=layout)
    found = FlashInferTier(form, library=variant(TAKES_ANY_SIZE=False), **options or {}).why_not(need)
    assert all(s[0].isalpha() and s.endswith(".") for s in found), found
    return found


def test_an_h200_is_served():
    for form in ("auto", "fa2", "fa3", "mqa", "mha"):
        assert sentences(form) == []
    assert sentences(R=0, dtype=torch.float16) == []


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"dtype": torch.float32}, "dtype torch.float32 is not served"),
        ({"layout": FloatRows(512, 64, torch.float16)}, "a cache of torch.float16 is not read"),
        ({"L": 256}, "rows of L = 256, R = 64 have no absorbed kernel"),
        ({"R": 32}, "rows of L = 512, R = 32 have no absorbed kernel"),
        ({"mask": "rows"}, "mask 'rows' is not computed"),
        ({"batch_invariant": True}, "batch_invariant = True is not promised"),
        ({"graph_capture": True}, "graph_capture = True needs Need.capacity"),
        (
            {"graph_capture": True, "N": 128, "capacity": Capacity(8, 8192, 1024, 9000)},
            "a captured step of up to 8192 tokens and 128 heads may need 16393 tiles",
        ),
    ],
)
def test_what_the_kernels_do_not_serve_is_a_sentence(fields, start):
    (found,) = sentences(**fields)
    assert found.startswith(start)


def test_fp8_rows_are_a_sentence():
    layout = SimpleNamespace(L=512, R=64, name="fp8_rows", storage_dtype=torch.float8_e4m3fn, storage_width=576)
    (found,) = sentences(layout=layout)
    assert found.startswith("layout 'fp8_rows' is not read by flashinfer here")


@pytest.mark.parametrize(
    ("form", "options", "fields", "start"),
    [
        ("mha", {}, {"V": 64}, "heads of P + R = 192, V = 64 are not expanded"),
        ("mha", {}, {"dtype": torch.float16}, "dtype torch.float16 is not expanded"),
        ("mha", {}, {"mask": "rows"}, "mask 'rows' is not computed by the expanded form"),
        ("mha", {}, {"graph_capture": True}, "graph_capture = True takes the absorbed form"),
        ("mha", {"max_workspace_tokens": 63}, {}, "max_workspace_tokens = 63 is below one page"),
        ("auto", {"append": "flashinfer"}, {"R": 0}, "append = 'flashinfer' writes rows of L = 512, R = 64 only"),
        ("auto", {"merge": "flashinfer"}, {"N": 128}, "merge = 'flashinfer' gives one block all heads"),
    ],
)
def test_what_a_form_or_an_option_does_not_serve_is_a_sentence(form, options, fields, start):
    (found,) = sentences(form, options, **fields)
    assert found.startswith(start)


def test_all_reasons_are_given_together():
    found = sentences("trtllm-gen", dtype=torch.float64, window=3, batch_invariant=True, R=32)
    starts = ("form 'trtllm-gen'", "window = 3", "dtype torch.float64", "rows of L = 512, R = 32", "batch_invariant")
    assert len(found) == len(starts)
    assert all(sum(s.startswith(start) for s in found) == 1 for start in starts), found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 4), ("sinks", True), ("softcap", 30.0), ("alibi", True), ("kv_sharing", True),
        ("output_quantisation", "fp8"),
    ],
)  # fmt: skip
def test_T1_a_feature_beyond_plain_attention_is_refused_and_never_dropped(name, value):
    (found,) = sentences(**{name: value})
    assert found.startswith(f"{name} = {value!r} is not computed by flashinfer")
    need = make_need(dtype=torch.bfloat16, **{name: value})
    with pytest.raises(ValueError, match=f"{name} = "):
        FlashInferTier(library=standin).plan(need, make_batch([1], [10], need))


@pytest.mark.parametrize("form", ELSEWHERE)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_T5_kernels_of_other_devices_are_refused_with_the_reason(form, arch):
    (found,) = sentences(form, arch=arch)
    assert found.startswith(
        f"form {form!r} is for {ELSEWHERE[form]} and has no path here on any device: its call is not"
    )
    assert f"was never run by this project; arch is '{arch}'" in found


def test_T5_a_machine_without_the_device_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(tier_module, "why_not_installed", lambda given: [])
    sizes = {"N": 16, "L": 512, "P": 128, "R": 64, "V": 128, "dtype": torch.bfloat16}
    for device, arch, form, start in (
        ("cpu", "cpu", "auto", "arch 'cpu' of device 'cpu' is not served by flashinfer"),
        ("cuda:0", "sm_75", "auto", "arch 'sm_75' of device 'cuda:0' is not served by flashinfer"),
        ("cuda:0", "gfx942", "auto", "arch 'gfx942' of device 'cuda:0' is not served by flashinfer"),
        ("cuda:0", "sm_80", "fa3", "form 'fa3' runs on sm_90 only, and arch is 'sm_80'"),
        ("cuda:0", "sm_100", "fa3", "form 'fa3' runs on sm_90 only"),
    ):
        (found,) = FlashInferTier(form).why_not(make_need(device=device, arch=arch, **sizes))
        assert found.startswith(start)
    assert FlashInferTier("fa2").why_not(make_need(device="cuda:0", arch="sm_80", **sizes)) == []


def test_T6_no_package_and_one_that_is_too_old_are_refused_with_both_versions(monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    for version, start in (
        (missing, "flashinfer-python is not installed; flashinfer needs flashinfer-python >= 0.6.18;"),
        (lambda name: "0.6.17", "flashinfer-python 0.6.17 is too old; flashinfer needs flashinfer-python >= 0.6.18;"),
    ):
        monkeypatch.setattr("mla.need.version", version)
        (found,) = found_in.why_not_installed(None)
        assert found.startswith(start)


def test_T6_a_package_that_cannot_be_imported_is_a_sentence(monkeypatch):
    def broken() -> Any:
        raise ModuleNotFoundError("No module named 'pynvml'")

    monkeypatch.setattr(found_in, "_import", broken)
    monkeypatch.setattr(found_in, "version", lambda name: "0.6.18.post1")
    (found,) = found_in._why_not_import.__wrapped__()
    assert found.startswith("flashinfer-python 0.6.18.post1 cannot be imported: ModuleNotFoundError: No module named")


class RenamedKeyword(standin.BatchMLAPagedAttentionWrapper):
    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, lse_base="e"):
        raise AssertionError("never called")


class OneMoreArgument(standin.BatchMLAPagedAttentionWrapper):
    def plan(self, layout, *args, **kwargs):
        raise AssertionError("never called")


def test_T7_a_moved_signature_is_a_sentence_and_never_a_TypeError():
    of = "BatchMLAPagedAttentionWrapper"
    for module, expected in (
        (with_mla(RenamedKeyword), f"mla.{of}.run of flashinfer stand-in does not take return_lse_base_on_e;"),
        (with_mla(OneMoreArgument), f"mla.{of}.plan of flashinfer stand-in asks also for layout;"),
        (
            variant(merge_state=lambda v_a, s_a, v_b, s_b, base: None),
            "merge_state of flashinfer stand-in asks also for",
        ),
        (variant(merge_state=None), "flashinfer stand-in has no merge_state;"),
    ):
        need = make_need(dtype=torch.bfloat16)
        (found,) = FlashInferTier(library=module).why_not(need)
        assert found.startswith(expected)
        with pytest.raises(ValueError, match="flashinfer"):
            FlashInferTier(library=module).plan(need, make_batch([1], [5], need))


def test_forms_and_options_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=f"^form: expected one of {', '.join(FORMS)}, got 'mla'"):
        flashinfer("mla")
    for key in ("merge", "append"):
        with pytest.raises(ValueError, match=rf"^{key}: expected one of ours, flashinfer, got 'theirs'"):
            flashinfer(**{key: "theirs"})
    with pytest.raises(ValueError, match=r"^max_workspace_tokens: expected an int >= 1, got 0"):
        flashinfer(max_workspace_tokens=0)
    names = [FlashInferTier(form).name for form in FORMS]
    assert names == ["flashinfer", *(f"flashinfer:{form}" for form in FORMS[1:])]
    assert FlashInferTier("fa2", library=standin).name == "flashinfer:fa2 (stand-in)"


# bad input


def test_attend_names_what_does_not_belong_to_the_plan():
    case, tier = make_case([3], [9]), flashinfer()
    prepared, plan = tier.prepare(case.up, case.need), tier.plan(case.need, case.batch)
    good: dict[str, Any] = {"q": case.q, "cache": case.cache, "prepared": prepared, "plan": plan}
    other = flashinfer("mqa").plan(case.need, case.batch)
    width = case.need.L + case.need.R
    wide = torch.zeros(case.cache.num_pages, 4, width + 1, dtype=torch.bfloat16, device=DEVICE)
    for change, kind, text in (
        ({"q": Query(case.q.nope.half(), case.q.pe)}, TypeError, r"^q\.nope\.dtype: expected torch\.bfloat16"),
        ({"plan": other}, ValueError, r"^plan\.tier: expected flashinfer.*, got flashinfer:mqa"),
        (
            {"cache": PagedLatentCache.wrap(wide[..., :width], case.need.layout)},
            ValueError,
            r"^cache\.data: expected rows aligned to 16 bytes, got strides",
        ),
    ):
        with pytest.raises(kind, match=text):
            tier.attend(**good | change)


def test_write_names_what_does_not_fit_and_writes_nothing():
    case, tier = make_case([3], [9]), flashinfer(append="flashinfer")
    (kv_c, k_pe), slots = case.keys[0], torch.arange(3, device=DEVICE)
    before = case.cache.data.clone().view(torch.uint8)
    for given, kind, text in (
        ((kv_c, k_pe, slots[:, None]), ValueError, r"^slot_mapping\.dim\(\): expected 1, got 2"),
        ((kv_c.int(), k_pe, slots), TypeError, r"^kv_c: expected one of \(torch\.float64, .*got torch\.int32"),
        ((kv_c, k_pe.bool(), slots), TypeError, r"^k_pe: expected one of .*got torch\.bool"),
        ((kv_c.to(torch.float8_e4m3fn), k_pe, slots), TypeError, r"^kv_c: .*got torch\.float8_e4m3fn"),
        ((kv_c, k_pe, slots.int()), TypeError, r"^slot_mapping\.dtype: expected torch\.int64, got torch\.int32"),
        ((kv_c[:2], k_pe, slots), ValueError, r"^kv_c: expected \(>= 3, "),
        ((kv_c, k_pe[:, :5], slots), ValueError, r"^k_pe: expected \(>= 3, "),
        ((kv_c.to("meta"), k_pe, slots), ValueError, r"^kv_c\.device: expected"),
        ((kv_c, k_pe, slots.to("meta")), ValueError, r"^slot_mapping\.device: expected"),
        ((kv_c.clone().requires_grad_(), k_pe, slots), ValueError, "requires_grad"),
    ):
        with pytest.raises(kind, match=text):
            tier.write(case.cache, *given)
    assert torch.equal(case.cache.data.view(torch.uint8), before)


# the cache, written by either


@pytest.mark.parametrize("slots", [[0, 5, 11, 2], [-1, 7, -1, 3], [9, -1, -1, -1], [-1] * 4, []])
@pytest.mark.parametrize("apart", [False, True])
def test_both_writers_write_the_same_bytes(slots, apart):
    sizes = {"L": 512, "R": 64} if REAL else {"L": 24, "R": 8}
    rows = torch.randn(6, sizes["L"] + sizes["R"], device=DEVICE)  # rounded when written
    kv_c, k_pe = rows[:, : sizes["L"]], rows[:, sizes["L"] :]
    found = []
    for append in ("ours", "flashinfer"):
        whole = torch.full((3, 2, 4, sum(sizes.values())), 7.0, dtype=torch.bfloat16, device=DEVICE)
        whole = whole if apart else whole[:, 1:].contiguous()
        cache = PagedLatentCache.wrap(whole[:, -1], FloatRows(**sizes))
        flashinfer(append=append).write(cache, kv_c, k_pe, torch.tensor(slots, dtype=torch.int64, device=DEVICE))
        found.append(whole)
    assert torch.equal(found[0], found[1])
    assert bool((found[0] != 7.0).any()) == any(s >= 0 for s in slots)


# B: the logarithm


def test_B1_a_long_prefix_and_a_short_suffix_weigh_by_their_keys():
    # 4096 keys of mean 0 and 4 of mean 10: 40 / 4100; a base-2 LSE read as natural gives 0.000454
    case = means([4], [[0.0] * 4096 + [10.0] * 4], mask="full", page_size=64)
    for form in ("ours", "flashinfer"):
        tier = flashinfer("mha", max_workspace_tokens=4096, merge=form)
        assert len(tier.plan(case.need, case.batch).steps.ragged.chunks) == 2
        close(case.run(tier), [40 / 4100] * 4)
    close(case.run(flashinfer("mqa")), [40 / 4100] * 4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_B3_the_lse_of_one_key_of_score_0_is_0_and_of_eight_is_ln_8(dtype):
    case = means([1, 1], [[3.0], [3.0] * 8], dtype=dtype)
    for name, tier in forms(case).items():
        lse = case.run(tier).lse
        assert lse.dtype == torch.float32
        # a logarithm in base 2 and its product with ln 2 round, and a GPU's log2 is right to 2^-22
        assert lse[0].abs().max() <= 2.0**-22, name
        assert (lse[1].double() - math.log(8)).abs().max() <= 2.0**-20, name


def test_B4_the_base_does_not_change_with_the_layout_of_the_batch():
    ragged = make_case([1, 4, 1], [60, 33, 21])
    batch, rows = ragged.batch.select([0, 2])
    alone = dataclasses.replace(ragged, batch=batch, q=Query(*(x[rows] for x in ragged.q)))
    lses = {name: ragged.run(tier).lse for name, tier in forms(ragged).items()}
    for name, tier in forms(ragged).items():
        assert (alone.run(tier).lse / lses[name][rows] - 1).abs().max() <= 1e-4, name
        assert (lses[name] / lses["mqa"] - 1).abs().max() <= 0.05, name  # no 1.4427, no 0.6931


class BaseTwo(standin.BatchMLAPagedAttentionWrapper):
    """A library that no longer heeds the base that it is asked for."""

    def run(self, *args, return_lse_base_on_e=False, **kwargs):
        return super().run(*args, return_lse_base_on_e=False, **kwargs)

    run.__signature__ = inspect.signature(standin.BatchMLAPagedAttentionWrapper.run)


class NaturalPrefill(standin.BatchPrefillWithRaggedKVCacheWrapper):
    """A library whose prefill returns a natural logarithm, as a newer one does when asked."""

    def run(self, *args, **kwargs):
        out, lse = super().run(*args, **kwargs)
        return out, lse * math.log(2)

    run.__signature__ = inspect.signature(standin.BatchPrefillWithRaggedKVCacheWrapper.run)


@pytest.mark.skipif(REAL, reason="planted in the stand-in")
def test_B_a_base_that_is_mixed_up_is_caught_by_the_suite():
    case = Conformance(SPECS["mixed_small"], family="randn")
    assert run_case(FlashInferTier(library=standin), case).ok
    wrong = run_case(FlashInferTier(library=with_mla(BaseTwo)), case)
    assert (wrong.status, wrong.ok) == ("mismatch", False)
    assert wrong.used_lse > 100
    module = variant(BatchPrefillWithRaggedKVCacheWrapper=NaturalPrefill)
    for merger in ("ours", "flashinfer"):
        good, bad = (FlashInferTier("mha", 16, merger, library=lib) for lib in (standin, module))
        small = make_case([20], [60])
        small.check(small.run(good))
        with pytest.raises(AssertionError):
            small.check(small.run(bad))


# C: empty rows, NaN, stale memory


class Hostile(standin.BatchMLAPagedAttentionWrapper):
    """A library that leaves NaN and +inf in rows that see no key."""

    def _kernel(self, q_nope, q_pe, ckv, kpe, out, lse, natural):
        super()._kernel(q_nope, q_pe, ckv, kpe, out, lse, natural)
        q, _, kv = self._lists
        for b, keys in enumerate(kv):
            if keys == 0:
                out[q[b] : q[b + 1]] = NAN
                if lse is not None:
                    lse[q[b] : q[b + 1]] = INF


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("hostile", [False, True])
def test_C1_C9_rows_without_keys_are_0_and_minus_infinity_and_leave_the_others_alone(dtype, hostile):
    case = make_case([1, 1, 1], [0, 5, 0], dtype=dtype)
    options = {"library": with_mla(Hostile)} if hostile and not REAL else {}
    for name, tier in forms(case, **options).items():
        state = case.run(tier)
        case.check(state)
        assert bool((state.out[[0, 2]] == 0).all()), name
        assert bool((state.lse[[0, 2]] == -INF).all()), name
        assert bool(torch.isfinite(state.lse[1]).all()), name


@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [3, 5, 2, 1], [70, 80, 3, 1]])
def test_C1_two_requests_without_keys_in_the_middle(query_lens):
    case = make_case(query_lens, [90, 0, 0, 33])
    for name, tier in forms(case).items():
        state = case.run(tier)
        case.check(state)
        middle = slice(query_lens[0], sum(query_lens[:3]))
        assert bool((state.out[middle] == 0).all()), name
        assert bool((state.lse[middle] == -INF).all()), name


@pytest.mark.parametrize("merger", ["ours", "flashinfer"])
def test_C2_two_empty_states_merge_to_an_empty_one(merger):
    need = make_need(dtype=torch.bfloat16, device=DEVICE, **SIZES)
    join = merge if merger == "ours" else tier_module._join(found_in.find_library(LIBRARY), need)
    part = make_case([2], [9])
    full = part.run(flashinfer("mqa"))
    full = AttentionState(full.out.float(), full.lse)
    none = AttentionState.empty(2, need.N, need.V, device=need.device)
    found = join(none, none)
    assert bool((found.out == 0).all())
    assert bool((found.lse == -INF).all())
    for state in (join(full, none), join(none, full)):
        assert torch.equal(state.out.float(), full.out)
        # base 2 and back: two factors, each rounded, and those of exp and log, 2^-24 each
        assert (state.lse - full.lse).abs().max() <= 8 * 2.0**-24 * max(1.0, float(full.lse.abs().max()))


@pytest.mark.parametrize("merger", ["ours", "flashinfer"])
def test_both_mergers_give_the_whole_from_any_two_parts(merger):
    for cap in (4, 20, 40, 60):
        case = make_case([7], [61])
        case.check(case.run(flashinfer("mha", max_workspace_tokens=cap, merge=merger)))


@pytest.mark.parametrize("fill", [NAN, INF])
def test_C4_what_stands_in_the_unused_tail_of_a_page_changes_no_bit(fill):
    dirty = make_case([2], [13], page_size=4)
    dirty.cache.data[torch.isnan(dirty.cache.data)] = fill
    clean = dataclasses.replace(
        dirty, cache=dataclasses.replace(dirty.cache, data=dirty.cache.data.nan_to_num(0, 0, 0))
    )
    assert not bool(torch.isfinite(dirty.cache.data).all())
    for name, tier in forms(dirty).items():
        state, other = dirty.run(tier), clean.run(tier)
        assert bool(torch.isfinite(state.out).all()), name
        assert torch.equal(state.out, other.out), name
        assert torch.equal(state.lse, other.lse), name


def test_C6_buffers_full_of_NaN_are_filled_and_nothing_around_them():
    case = make_case([1, 1, 1, 1], [7, 0, 0, 0])
    N, V = case.need.N, case.need.V
    for name, tier in forms(case).items():
        out = torch.full((8, N, V), NAN, dtype=torch.bfloat16, device=DEVICE)
        lse = torch.full((8, N), NAN, device=DEVICE)
        buffers = AttentionState(out[2:-2], lse[2:-2])
        assert case.run(tier, buffers) is buffers
        case.check(buffers)
        assert bool((buffers.out[1:] == 0).all()), name
        assert all(bool(torch.isnan(x).all()) for x in (out[:2], out[-2:], lse[:2], lse[-2:])), name


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 3), (4, 6), (1, 300), (4, 300)])
def test_C10_C12_more_processors_than_blocks_of_keys_change_nothing(query_len, seq_len):
    check_all(make_case([query_len], [seq_len], page_size=16))


@pytest.mark.parametrize("keys", [5, 63, 64, 65])
def test_C13_lanes_past_the_last_key_are_not_counted_without_a_causal_mask(keys):
    case = means([2], [[1.0] * keys], mask="full")
    for tier in forms(case).values():
        close(case.run(tier), [1.0, 1.0])


# H: pages


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("page", [1, 3, 8, 16, 32, 64, 128])
def test_H2_H6_pages_of_any_size(page, dtype):
    check_all(make_case([2, 1, 70], [70, 131, 70], page_size=page, dtype=dtype))


def test_H5_a_context_that_starts_inside_a_page_is_cut_at_a_page():
    case = make_case([2], [12], page_size=4)
    tier = flashinfer("mha", max_workspace_tokens=6)
    assert [len(c.positions) for c in tier.plan(case.need, case.batch).steps.ragged.chunks] == [4, 4, 4]
    case.check(case.run(tier))


class Told(standin.BatchMLAPagedAttentionWrapper):
    """Keeps what it was told last."""

    last: ClassVar[dict[str, Any]] = {}

    def plan(self, **given):
        type(self).last = given
        super().plan(**given)

    plan.__signature__ = inspect.signature(standin.BatchMLAPagedAttentionWrapper.plan)


@pytest.mark.skipif(REAL, reason="looks into the stand-in")
def test_H4_the_page_list_holds_the_sum_of_the_pages_and_no_absurd_id():
    case = make_case([1, 1, 1, 1], [33, 32, 1, 33], page_size=16)
    FlashInferTier(library=with_mla(Told)).plan(case.need, case.batch)
    assert Told.last["kv_indptr"].tolist() == [0, 3, 5, 6, 9]
    pages = [case.batch.block_table[b, :n] for b, n in enumerate((3, 2, 1, 3))]
    assert torch.equal(Told.last["kv_indices"], torch.cat(pages))
    assert Told.last["kv_len_arr"].tolist() == [33, 32, 1, 33]
    assert Told.last["sm_scale"] == case.need.softmax_scale


@pytest.mark.skipif(REAL, reason="looks into the stand-in")
def test_T8_lengths_and_indptrs_are_int32_vectors_whatever_the_caller_counts_in():
    need = make_need(dtype=torch.bfloat16)
    batch = make_batch(np.array([1, 2]), np.array([5, 9], dtype=np.int64), need)
    long = dataclasses.replace(batch, block_table=batch.block_table.long())
    FlashInferTier(library=with_mla(Told)).plan(need, long)
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"):
        assert (Told.last[name].dtype, Told.last[name].dim()) == (torch.int32, 1), name
    with pytest.raises(ValueError, match=r"^seq_lens: expected integers of shape \(B,\), got shape \(2, 1\)"):
        AttentionBatch.bottom_right([1, 2], torch.tensor([[5], [9]]), [[0, 1, 2]] * 2, page_size=4, num_pages=9)


# I: heads and sizes


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", [1, 4, 8, 16, 20, 128, 192])
def test_I1_I3_I5_any_number_of_heads_in_their_order(heads, dtype):
    check_all(make_case([1, 2], [9, 5], N=heads, dtype=dtype))


@pytest.mark.parametrize("dtype", HALVES[: 1 if REAL else 2], ids=str)  # a kernel each, to be built
def test_I6_no_rope_is_plain_latent_attention(dtype):
    check_all(make_case([1, 3, 70], [9, 20, 80], R=0, dtype=dtype))


def test_I5_a_width_that_is_not_served_names_the_field():
    (found,) = sentences(N=192, P=64, V=256, L=256)
    assert "L = 256" in found
    (found,) = sentences("mha", N=192, P=64, V=256)
    assert "V = 256" in found


def test_I7_a_query_of_1024_tokens_takes_the_expanded_form():
    case = make_case([1024], [1024], N=1, page_size=64)
    tier = flashinfer()
    assert tier.plan(case.need, case.batch).report["forms"] == ["mha"]
    state = case.run(tier)
    assert bool(torch.isfinite(state.out).all())
    short = case.run(flashinfer("mqa"))
    case.check(state)
    case.check(short)


# K, M: verification and padding


def test_M1_every_row_of_a_verification_sees_its_own_bound():
    # keys 1, 2, 3, ...: the mean of the first k is (k + 1) / 2; rows see 3, 4, 5 and 7, 8, 9 keys
    case = means([3, 3], [[float(i) for i in range(1, n + 1)] for n in (5, 9)])
    for tier in forms(case).values():
        close(case.run(tier), [2.0, 2.5, 3.0, 4.0, 4.5, 5.0])


def test_M3_two_tokens_from_position_3_give_2_5_and_3():
    case = means([2], [[1.0, 2.0, 3.0, 4.0, 5.0]])
    for tier in forms(case).values():
        close(case.run(tier), [2.5, 3.0])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_M5_M7_no_row_of_a_padded_verification_is_lost(dtype):
    case = make_case([3, 3, 3, 0], [5, 9, 14, 0], pad_tokens=3, dtype=dtype)
    for name, tier in forms(case).items():
        state = case.run(tier)
        case.check(state)
        assert bool((state.out[9:] == 0).all()), name
        assert bool((state.lse[9:] == -INF).all()), name
        assert len(set(state.lse[:9].flatten().tolist())) > 9 * case.need.N - 3, name


def test_M8_a_verification_of_4_tokens_is_one_run_as_decode_is():
    for tokens in (1, 4):
        need = make_need(dtype=torch.bfloat16, page_size=64, device=DEVICE, **SIZES)
        plan = flashinfer().plan(need, make_batch([tokens], [32768], need))
        assert plan.report["rounds"] == 1
        assert plan.report["calls"] == 0


# plans: refilled, reused, captured


GRAPH = Capacity(max_requests=8, max_tokens=8, max_query_len=4, max_seq_len=150)


def graph_case(query_lens: list[int], seq_lens: list[int], **fields: Any) -> Case:
    """A case whose plan is to be captured: 8 tokens, padding included."""
    given = {"graph_capture": True, "capacity": GRAPH, "pad_tokens": 8 - sum(query_lens), "N": 4} | fields
    return make_case(query_lens, seq_lens, **given)


class Captured:
    """A graph of one attend on memory of its own: a CUDA graph, or a tape of operators on the CPU."""

    def __init__(self, case: Case, tier: FlashInferTier, pages: int = 400) -> None:
        need = case.need
        self.tier, self.q = tier, Query(*(x.clone() for x in case.q))
        self.cache = PagedLatentCache.new(CacheSpec(pages, need.page_size, need.layout, need.device))
        self.prepared, self.plan = tier.prepare(case.up, need), tier.plan(need, case.batch)
        self.hold(case)
        run = lambda: tier.attend(self.q, self.cache, self.prepared, self.plan)
        if REAL:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.state = run()
        else:
            self.graph = standin.Tape()
            with self.graph:
                self.state = run()

    def hold(self, case: Case) -> None:
        self.cache.data.fill_(NAN)
        self.cache.data[: case.cache.num_pages] = case.cache.data
        for held, new in zip(self.q, case.q, strict=True):
            held.copy_(new)

    def replay(self, case: Case) -> AttentionState:
        """Plan a case into the captured memory, replay, and check the result against its budget."""
        self.hold(case)
        for x in self.state:
            x.fill_(NAN)
        assert self.tier.plan(case.need, case.batch, self.plan) is self.plan
        self.graph.replay()
        case.check(self.state)
        return self.state


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", [4, 128])  # of 128 the library takes another grid where there are fewer tokens
def test_CG1_a_graph_of_8_requests_is_replayed_for_5_and_for_none(heads, dtype):
    first = graph_case([1] * 8, [30, 5, 77, 1, 64, 65, 0, 150], N=heads, dtype=dtype)
    graph = Captured(first, flashinfer(**({} if REAL else {"library": with_mla(Hostile)})))
    graph.replay(first)
    for seed, (query_lens, seq_lens) in enumerate(
        (
            ([1] * 5, [31, 6, 78, 2, 140]),
            ([2, 1, 2], [9, 0, 130]),
            ([], []),
            ([4, 4], [4, 150]),
            ([1] * 8, [150] * 8),  # every page that the capacity allows
        ),
        1,
    ):
        case = dataclasses.replace(
            graph_case(query_lens, seq_lens, N=heads, seed=seed, dtype=dtype), up=first.up, _truth=None
        )
        state = graph.replay(case)
        assert bool((state.out[sum(query_lens) :] == 0).all())
        assert bool((state.lse[sum(query_lens) :] == -INF).all())


@pytest.mark.skipif(REAL, reason="the tape is for the CPU")
def test_a_tape_notices_a_plan_that_moves_and_a_grid_that_changes():
    first = graph_case([1] * 8, [20] * 8)
    graph = Captured(first, flashinfer())
    (step,) = graph.plan.steps.rounds
    fresh = graph.tier.plan(first.need, graph_case([1] * 5, [9] * 5).batch)  # not into the captured plan
    assert fresh.steps.rounds[0].wrapper is not step.wrapper
    step.wrapper.library._grid = 2
    with pytest.raises(RuntimeError, match="the plan needs grid 2, the graph was captured with 1"):
        graph.graph.replay()


def test_a_batch_of_another_size_than_the_captured_one_is_refused_and_changes_nothing():
    case, tier = graph_case([1] * 8, [20] * 8), flashinfer()
    plan = tier.plan(case.need, case.batch)
    steps = plan.steps
    fewer = make_batch([1] * 5, [20] * 5, case.need)
    with pytest.raises(ValueError, match=r"^batch: expected 8 tokens, as captured, got 5"):
        tier.plan(case.need, fewer, plan)
    longer = make_batch([1] * 8, [151] * 8, case.need)
    with pytest.raises(ValueError, match=r"capacity\.max_seq_len: expected at most 150, got 151"):
        tier.plan(case.need, longer, plan)
    assert plan.steps is steps
    assert plan.batch is case.batch
    case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


def test_what_is_no_plan_or_a_plan_of_another_need_is_refused_by_name():
    case, tier = graph_case([1] * 8, [20] * 8), flashinfer()
    plan = tier.plan(case.need, case.batch)
    steps = plan.steps
    free = dataclasses.replace(case.need, graph_capture=False)
    nothing = tier.plan(free, make_batch([], [], free))  # no round at all
    for given, kind, text in (
        ((None, case.batch, plan), TypeError, "^need: expected a Need"),
        ((case.need, None, plan), TypeError, "^batch: expected a AttentionBatch"),
        ((case.need, case.batch, "plan"), TypeError, "^into: expected a Plan"),
        ((case.need, case.batch, nothing), ValueError, "^into: expected a plan of the same Need"),
    ):
        with pytest.raises(kind, match=text):
            tier.plan(*given)
    assert plan.steps is steps
    assert plan.batch is case.batch


class Failing(standin.BatchMLAPagedAttentionWrapper):
    fails = False

    def plan(self, **given):
        if type(self).fails:
            raise RuntimeError("buffer overflow")
        super().plan(**given)

    plan.__signature__ = inspect.signature(standin.BatchMLAPagedAttentionWrapper.plan)


@pytest.mark.skipif(REAL, reason="planted in the stand-in")
def test_a_plan_that_fails_leaves_the_old_one_as_it_was(monkeypatch):
    case, tier = make_case([1, 2], [9, 20]), FlashInferTier(library=with_mla(Failing))
    plan = tier.plan(case.need, case.batch)
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(RuntimeError, match="buffer overflow"):
        tier.plan(case.need, make_batch([3], [40], case.need), plan)
    case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


def test_CG3_nothing_of_six_prefills_is_left_when_two_decodes_take_their_plan():
    prefills = make_case([70] * 6, [70] * 6)
    tier = flashinfer()
    plan = tier.plan(prefills.need, prefills.batch)
    assert plan.report["forms"] == ["mha"] * 6
    prefills.check(tier.attend(prefills.q, prefills.cache, tier.prepare(prefills.up, prefills.need), plan))
    decodes = make_case([1, 1, 0, 0, 0, 0], [33, 20, 0, 0, 0, 0], pad_tokens=4)
    tier.plan(decodes.need, decodes.batch, plan)
    assert plan.report["forms"] == ["mqa"] * 6
    state = tier.attend(decodes.q, decodes.cache, tier.prepare(decodes.up, decodes.need), plan)
    decodes.check(state)
    assert bool((state.out[2:] == 0).all())


def test_plans_that_live_at_the_same_time_do_not_share_a_wrapper():
    a, b = make_case([1, 70, 3], [90, 100, 7]), make_case([80, 1], [200, 33], seed=1)
    tier = flashinfer(max_workspace_tokens=64)
    plans: list[Plan] = [tier.plan(x.need, x.batch) for x in (a, b)]
    for case, plan in ((a, plans[0]), (b, plans[1]), (a, plans[0])):
        case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


class Counted(standin.BatchMLAPagedAttentionWrapper):
    made = 0

    def __init__(self, *args, **kwargs):
        type(self).made += 1
        super().__init__(*args, **kwargs)

    __init__.__signature__ = inspect.signature(standin.BatchMLAPagedAttentionWrapper.__init__)


@pytest.mark.skipif(REAL, reason="looks into the stand-in")
def test_wrappers_are_made_once_and_come_back_from_plans_that_are_gone():
    tier, Counted.made = FlashInferTier(library=with_mla(Counted)), 0
    for seq_len in (9, 40, 17, 90):
        case = make_case([1, 2], [seq_len, 20])
        case.check(case.run(tier))
    assert Counted.made == 1
    plan = None
    for seq_len in (9, 40, 17, 90):  # a refilled plan takes the next one before it gives the last one back
        case = make_case([1, 2], [seq_len, 20])
        plan = tier.plan(case.need, case.batch, plan)
    assert Counted.made == 2


def test_calls_of_the_same_lengths_share_a_wrapper():
    case = make_case([64], [400], page_size=16)
    tier = flashinfer("mha", max_workspace_tokens=32)
    steps = tier.plan(case.need, case.batch).steps
    assert len(steps.wrappers) > 10
    assert len(set(steps.wrappers.values())) == 6  # the last two chunks are met by a causal call and one without a mask
    case.check(case.run(tier))


def test_sizes_are_known_from_the_capacity_alone_and_bound_every_batch():
    limits = Capacity(max_requests=4, max_tokens=96, max_query_len=80, max_seq_len=200)
    need = make_need(device=DEVICE, dtype=torch.bfloat16, capacity=limits, **SIZES)
    tier = flashinfer(max_workspace_tokens=32)
    empty = tier.plan(need, make_batch([], [], need)).nbytes
    assert empty > 0
    for q, s in (([1] * 4, [200] * 4), ([80, 16], [200, 16]), ([80, 1, 4], [80, 200, 200])):
        case = make_case(q, s, capacity=limits)
        plan = tier.plan(case.need, case.batch)
        assert plan.nbytes == empty
        case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan.reserve()))


@pytest.mark.skipif(not REAL, reason="waiting for a device needs one, and the library")
@pytest.mark.parametrize("form", ["auto", "fa2", "mqa", "mha"])
def test_attend_and_append_wait_for_the_device_nowhere(form):
    case = make_case([1, 70, 3], [300, 200, 90], page_size=16)
    tier = flashinfer(form, max_workspace_tokens=64, append="flashinfer")
    prepared, plan = tier.prepare(case.up, case.need), tier.plan(case.need, case.batch)
    tier.attend(case.q, case.cache, prepared, plan)
    rows = torch.randn(2, case.need.L + case.need.R, device=DEVICE).split([case.need.L, case.need.R], -1)
    slots = torch.tensor([0, -1], device=DEVICE)
    tier.write(case.cache, *rows, slots)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        tier.attend(case.q, case.cache, prepared, plan)
        tier.write(case.cache, *rows, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("N", "requests"), [(96, 5), (3, 5), (16, 2), (128, 2)])
def test_tokens_of_heads_that_do_not_divide_a_packed_tile_are_requests_of_their_own(N, requests):
    case = make_case([3, 2], [65, 66], N=N)
    tier = flashinfer("mqa")
    planned = []
    original = absorbed._plan
    try:
        absorbed._plan = lambda wrapper, need, batch, pieces: (
            planned.append(pieces) or original(wrapper, need, batch, pieces)
        )
        plan = tier.plan(case.need, case.batch)
    finally:
        absorbed._plan = original
    (pieces,) = planned
    assert len(pieces) == requests
    assert sum(p.tokens for p in pieces) == 5
    if requests == 5:
        assert [p.keys for p in pieces] == [63, 64, 65, 65, 66]
    case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


def test_attend_refuses_gradients():
    case = make_case([1], [5])
    case.q = case.q._replace(nope=case.q.nope.clone().requires_grad_())
    with pytest.raises(ValueError, match="requires_grad: expected no gradients through flashinfer"):
        case.run(flashinfer())
