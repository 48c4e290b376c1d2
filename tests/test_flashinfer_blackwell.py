"""The forms of the FlashInfer tier for Blackwell, "trtllm-gen" and "xqa", over the stand-in with the arch faked.

Nothing here runs on such a GPU: the tests hold the arguments, the refusals and the conversions.
Axes: T new tokens (packed over requests), B requests, q new tokens of a request, N heads, L KV rank, R rope.
"""

import inspect
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import flashinfer_standin as standin
import pytest
import torch
from small_case import Case, make_batch, make_case, make_need

import tiers
from mla.accuracy import compare
from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.need import Capacity
from mla.projections import Query
from mla.state import AttentionState
from tiers.tier2_flashinfer import blackwell
from tiers.tier2_flashinfer.blackwell import ENTRY
from tiers.tier2_flashinfer.tier import ELSEWHERE, FlashInferTier

BF16, INF, NAN = torch.bfloat16, float("inf"), float("nan")
CAPABILITY = {"sm_90": (9, 0), "sm_100": (10, 0), "sm_103": (10, 3), "sm_120": (12, 0), "sm_121": (12, 1)}
FIELDS: dict[str, dict[str, Any]] = {
    "trtllm-gen": {"arch": "sm_100", "page_size": 32, "lse": True},
    "xqa": {"arch": "sm_120", "page_size": 64, "lse": False, "N": 128},
}


@pytest.fixture
def device(monkeypatch):
    """Fakes the GPU of a form or of an arch, for the stand-in and in the fields of a Need that are returned."""

    def fake(form: str, **fields: Any) -> dict[str, Any]:
        given = {"dtype": BF16, **FIELDS[form], **fields}
        monkeypatch.setattr(standin, "CAPABILITY", CAPABILITY[given["arch"]])
        return given

    return fake


def library(function: Any) -> ModuleType:
    """The stand-in with another entry point, or without one."""
    module = ModuleType("variant")
    for name in ("page", "BatchPrefillWithRaggedKVCacheWrapper", "merge_state", "TAKES_ANY_SIZE"):
        setattr(module, name, getattr(standin, name))
    module.mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=standin.BatchMLAPagedAttentionWrapper)  # type: ignore[attr-defined]
    if function is not None:
        module.mla.trtllm_batch_decode_with_kv_cache_mla = function
    return module


def through(change: Any) -> Any:
    """The entry point with `change(result, given)` in place of its result, and its signature."""
    real = standin.trtllm_batch_decode_with_kv_cache_mla

    def entry(**given: Any) -> Any:
        return change(real(**given), given)

    entry.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
    return entry


def check(case: Case, tier: FlashInferTier) -> AttentionState:
    """Run a tier; out, and lse where it is asked for, are within the budget."""
    state = case.run(tier)
    result = compare(state, case.truth())
    assert result.ok, result
    assert (state.lse is not None) == case.need.lse
    return state


# results


LENGTHS = [
    ([1] * 4, [5, 32, 64, 1]),
    ([3] * 3, [3, 40, 129]),
    ([1, 0, 1, 1], [7, 9, 0, 65]),  # one request is absent, one has no keys
    ([4, 4, 0], [0, 31, 0]),
]


@pytest.mark.parametrize("arch", ENTRY["trtllm-gen"].archs)
@pytest.mark.parametrize("page_size", ENTRY["trtllm-gen"].pages)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_trtllm_gen_decodes_and_verifies_within_the_budget(lengths, page_size, arch, device):
    case = make_case(*lengths, pad_tokens=2, **device("trtllm-gen", arch=arch, page_size=page_size))
    tier = FlashInferTier("trtllm-gen", library=standin)
    state = check(case, tier)
    report = tier.plan(case.need, case.batch).report
    assert (report["kernel"], report["forms"]) == ("trtllm-gen", ["mqa"] * len(lengths[0]))
    empty = case.batch.row_kv_lens == 0
    assert state.lse is not None
    assert bool((state.out[empty] == 0).all())
    assert bool((state.lse[empty] == -INF).all())
    assert int(empty.sum()) >= 2  # the rows of nobody


@pytest.mark.parametrize("heads", [1, 16, 20, 64, 128])
def test_I1_heads_that_trtllm_gen_takes(heads, device):
    check(make_case([2, 2], [3, 40], **device("trtllm-gen", N=heads)), FlashInferTier("trtllm-gen", library=standin))


@pytest.mark.parametrize("arch", ENTRY["xqa"].archs)
@pytest.mark.parametrize("page_size", ENTRY["xqa"].pages)
def test_xqa_decodes_within_the_budget(page_size, arch, device):
    case = make_case([1, 0, 1, 1], [5, 3, 130, 0], pad_tokens=1, **device("xqa", arch=arch, page_size=page_size))
    state = check(case, FlashInferTier("xqa", library=standin))
    assert bool((state.out[case.batch.row_kv_lens == 0] == 0).all())


def test_the_form_is_a_name_of_the_registry():
    assert tiers.get("flashinfer", form="xqa").name == "flashinfer:xqa"
    assert "never run on such a GPU" in (FlashInferTier.__doc__ or "")


def test_a_mask_of_one_token_is_full_and_causal_alike(device):
    check(make_case([1, 1], [5, 70], mask="full", **device("xqa")), FlashInferTier("xqa", library=standin))


def test_B1_the_softmax_scale_is_passed_whole_and_the_output_scale_is_1(device):
    seen = []
    tier = FlashInferTier("trtllm-gen", library=library(through(lambda result, given: seen.append(given) or result)))
    check(make_case([2], [9], softmax_scale=0.3, **device("trtllm-gen")), tier)
    assert [(g["bmm1_scale"], g["bmm2_scale"]) for g in seen[1:]] == [(0.3, 1.0)]


def test_more_requests_than_a_call_holds_go_in_several(device, monkeypatch):
    monkeypatch.setattr(blackwell, "MOST_REQUESTS", 2)
    tier = FlashInferTier("trtllm-gen", library=standin)
    case = make_case([2, 2, 0, 2, 2, 2], [3, 40, 5, 2, 65, 0], **device("trtllm-gen"))
    assert tier.plan(case.need, case.batch).report["rounds"] == 3
    check(case, tier)


def test_the_lses_of_a_call_fit_their_part_of_the_workspace(device):
    for N, q in ((128, 1), (128, 64), (1, 1)):
        most = blackwell._most_requests(make_need(L=512, R=64, **device("trtllm-gen", N=N)), q)
        assert most >= 1
        assert 8 * N * most * 256 <= blackwell.STATS_BYTES
        assert q * N * 576 * 2 * most <= blackwell.ROUND_BYTES


def test_sizes_are_known_from_the_capacity_alone(device):
    need = make_need(**device("trtllm-gen", capacity=Capacity(4, 12, 3, 200)))
    tier = FlashInferTier("trtllm-gen", library=standin)
    plans = [tier.plan(need, make_batch(q, s, need)) for q, s in (([], []), ([1], [200]), ([3] * 4, [3, 70, 9, 200]))]
    assert len({p.nbytes for p in plans}) == 1
    assert plans[0].nbytes == 12 * need.N * (2 * need.L + need.R) * 2


def test_a_step_without_tokens_calls_nothing(device):
    need = make_need(**device("xqa"))
    tier = FlashInferTier("xqa", library=library(through(lambda result, given: 1 / 0)))
    assert tier.plan(need, make_batch([0, 0], [5, 0], need)).report["rounds"] == 0


@pytest.mark.parametrize("form", ENTRY)
def test_C1_requests_without_keys_need_no_page(form, device):
    case = make_case([1, 1], [0, 0], **device(form))
    need = case.need
    tier = FlashInferTier(form, library=library(through(lambda result, given: 1 / 0)))
    batch = AttentionBatch.bottom_right([1, 1], [0, 0], [[], []], page_size=need.page_size, num_pages=0, device="cpu")
    data = torch.zeros(0, need.page_size, need.L + need.R, dtype=BF16)
    cache = PagedLatentCache(data, need.layout, need.page_size)
    state = tier.attend(case.q, cache, tier.prepare(case.up, need), tier.plan(need, batch))
    assert not state.out.any()
    assert state.lse is None or bool((state.lse == -math.inf).all())


def test_C1_C9_what_the_kernel_leaves_in_rows_without_keys_is_overwritten(device):
    def hostile(result: Any, given: Any) -> Any:
        given["out"][1], given["lse"].view(3, -1)[1] = NAN, NAN
        return result

    case = make_case([2, 2, 2], [5, 0, 34], **device("trtllm-gen"))
    tier = FlashInferTier("trtllm-gen", library=standin)
    plan = tier.plan(case.need, case.batch)  # probed with the true one
    prepared = tier.prepare(case.up, case.need)
    object.__setattr__(tier, "library", library(through(hostile)))
    state = tier.attend(case.q, case.cache, prepared, plan)
    assert compare(state, case.truth()).ok


def test_the_semaphores_are_zeroed_once_and_belong_to_one_form():
    a, b = (blackwell.zeroed_workspace(form, "cpu") for form in ENTRY)
    assert a.data_ptr() != b.data_ptr()
    assert a is blackwell.zeroed_workspace("trtllm-gen", "cpu")
    assert not bool(a[: standin.SEMAPHORES].any())


def test_the_workspace_is_allocated_by_the_plan_and_not_by_attend(device):
    case = make_case([1, 1], [9, 40], **device("xqa"))
    blackwell.zeroed_workspace.cache_clear()
    FlashInferTier("xqa", library=standin).plan(case.need, case.batch)
    assert blackwell.zeroed_workspace.cache_info().currsize == 1


# the base of the LSE


def in_base_e(result: Any, given: Any) -> Any:
    given["lse"].mul_(math.log(2))
    return result


def mixed(result: Any, given: Any) -> Any:
    given["lse"].sub_(math.log2(math.e) - 1)  # a natural maximum and a sum in base 2, for scores of 1
    return result


def without_mask(result: Any, given: Any) -> Any:
    natural = 1 + given["seq_lens"].double().log()
    given["lse"].view(len(natural), -1).copy_((natural / math.log(2))[:, None])
    return result


@pytest.mark.parametrize("change", [in_base_e, lambda result, given: result], ids=["e", "2"])
def test_B3_B4_either_base_is_found_by_a_probe(change, device):
    tier = FlashInferTier("trtllm-gen", library=library(through(change)))
    check(make_case([2, 2], [9, 40], **device("trtllm-gen")), tier)


@pytest.mark.parametrize("change", [mixed, without_mask])
def test_B_an_LSE_that_is_in_neither_base_or_of_other_keys_is_not_taken(change, device):
    tier = FlashInferTier("trtllm-gen", library=library(through(change)))
    case = make_case([2, 2], [9, 40], **device("trtllm-gen"))
    with pytest.raises(
        RuntimeError, match=r"^flashinfer's 'trtllm-gen' returned LSEs .* neither natural nor in base 2"
    ):
        tier.plan(case.need, case.batch)


@pytest.mark.parametrize(("name", "said"), [("lse", "returned LSEs"), ("out", "did not leave the value")])
def test_a_library_that_leaves_what_it_was_handed_alone_is_found_by_the_probe(name, said, device):
    def elsewhere(result: Any, given: Any) -> Any:
        kept = tuple(x.clone() for x in result)
        given[name].fill_(NAN)
        return kept

    tier = FlashInferTier("trtllm-gen", library=library(through(elsewhere)))
    case = make_case([2, 2], [9, 40], **device("trtllm-gen"))
    with pytest.raises(RuntimeError, match=said):
        tier.plan(case.need, case.batch)


def test_the_probe_is_one_call_in_the_first_plan_and_none_without_an_lse(device):
    seen = []
    tier = FlashInferTier("trtllm-gen", library=library(through(lambda result, given: seen.append(given) or result)))
    for lse, probes in ((False, 0), (True, 1), (True, 0)):
        case = make_case([1, 1], [9, 40], **device("trtllm-gen", lse=lse))
        seen.clear()
        plan = tier.plan(case.need, case.batch)
        assert len(seen) == probes
        tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan)
        assert len(seen) == probes + 1


# what is refused


@pytest.mark.parametrize("form", ENTRY)
@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121", "gfx942"])
def test_T5_a_form_runs_on_its_arch_and_names_it_elsewhere(form, arch):
    need = make_need(dtype=BF16, **FIELDS[form] | {"arch": arch})
    found = FlashInferTier(form, library=standin).why_not(need)
    if arch in ENTRY[form].archs:
        assert found == []
    else:
        (sentence,) = found
        archs = " or ".join(ENTRY[form].archs)
        assert sentence == f"form {form!r} needs arch {archs}, and arch is {arch!r}; use form = 'auto', or triton."


@pytest.mark.parametrize("form", ELSEWHERE)
def test_T5_forms_without_a_path_here_are_refused_on_their_own_device_too(form):
    need = make_need(dtype=BF16, arch="sm_100")
    assert FlashInferTier(form, library=standin).why_not(need) == [
        f"form {form!r} is for {ELSEWHERE[form]} and has no path here on any device: its call is not modelled and was "
        "never run by this project; arch is 'sm_100'; use form = 'auto', or triton."
    ]


SIZES = {"L": 512, "R": 64, "P": 128, "V": 128}


@pytest.mark.parametrize(
    ("form", "fields", "start"),
    [
        ("trtllm-gen", {"L": 256}, "rows of L = 256, R = 64 are not served by form 'trtllm-gen', but 512 and 64;"),
        ("xqa", {"R": 0}, "rows of L = 512, R = 0 are not served by form 'xqa'"),
        ("trtllm-gen", {"dtype": torch.float16}, "dtype torch.float16 is not served by form 'trtllm-gen'"),
        ("trtllm-gen", {"dtype": torch.float32}, "dtype torch.float32 is not served by flashinfer"),
        ("trtllm-gen", {"page_size": 128}, "page_size = 128 is not served by form 'trtllm-gen', which takes 32, 64;"),
        ("xqa", {"page_size": 8}, "page_size = 8 is not served by form 'xqa', which takes 16, 32, 64, 128;"),
        ("trtllm-gen", {"N": 96}, "N = 96 is not served by form 'trtllm-gen', which takes 1 to 64 heads, or 128;"),
        ("trtllm-gen", {"N": 192}, "N = 192 is not served by form 'trtllm-gen'"),
        ("xqa", {"N": 64}, "N = 64 is not served by form 'xqa', which takes 128 heads;"),
        ("xqa", {"lse": True}, "lse = True is not possible with form 'xqa', whose kernels return none;"),
        ("trtllm-gen", {"mask": "full"}, "mask 'full' is not computed by form 'trtllm-gen'"),
        ("trtllm-gen", {"mask": "rows"}, "mask 'rows' is not computed by flashinfer"),
        ("xqa", {"graph_capture": True}, "graph_capture = True is not offered with form 'xqa'"),
        ("xqa", {"batch_invariant": True}, "batch_invariant = True is not promised"),
        ("trtllm-gen", {"window": 5}, "window = 5 is not computed by flashinfer"),
    ],
)
def test_what_the_entry_point_cannot_do_is_a_sentence(form, fields, start):
    module = library(standin.trtllm_batch_decode_with_kv_cache_mla)
    module.TAKES_ANY_SIZE = False
    (found,) = FlashInferTier(form, library=module).why_not(
        make_need(**{"dtype": BF16, **SIZES, **FIELDS[form], **fields})
    )
    assert found.startswith(start)
    assert found.endswith(".")


@pytest.mark.parametrize(("arch", "least"), [("sm_120", "12.8"), ("sm_121", "12.9")])
def test_T6_a_cuda_that_is_too_old_for_the_device_is_a_sentence(arch, least, monkeypatch):
    need = make_need(**{"dtype": BF16, **FIELDS["xqa"], "arch": arch, "device": "cuda:0"})
    for cuda, refused in ((None, True), ("12.7", True), (least, False), ("13.0", False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = FlashInferTier("xqa", library=standin).why_not(need)
        assert len(found) == refused
        assert all(
            s.startswith(f"form 'xqa' on {arch} needs a PyTorch of CUDA {least} or later, not {cuda};") for s in found
        )


def without(name: str) -> Any:
    """The entry point with a keyword less, or with one more that has no default."""
    real = standin.trtllm_batch_decode_with_kv_cache_mla
    entry = lambda **given: None
    parameters = [p for n, p in inspect.signature(real).parameters.items() if n != name]
    if name == "+":
        parameters.append(inspect.Parameter("layout", inspect.Parameter.KEYWORD_ONLY))
    entry.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return entry


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (without("bmm1_scale"), "does not take bmm1_scale;"),
        (without("+"), "asks also for layout;"),
        (None, "has no mla."),
    ],
)
def test_T7_a_moved_entry_point_is_a_sentence_for_the_forms_that_call_it(function, text):
    module = library(function)
    for form, fields in FIELDS.items():
        (found,) = FlashInferTier(form, library=module).why_not(make_need(dtype=BF16, **fields))
        assert text in found
        assert "trtllm_batch_decode_with_kv_cache_mla" in found
    assert FlashInferTier(library=module).why_not(make_need(dtype=BF16)) == []


@pytest.mark.parametrize(
    ("form", "query_lens", "expected"),
    [
        ("trtllm-gen", [1, 2], r"one number of new tokens for all requests, as form 'trtllm-gen' takes, got \[1, 2\]"),
        ("trtllm-gen", [65], "queries of at most 64, as form 'trtllm-gen' takes, got 65"),
        ("xqa", [2, 2], "queries of at most 1, as form 'xqa' takes, got 2"),
    ],
)
def test_queries_that_depend_on_the_batch_are_refused_by_plan_and_change_nothing(form, query_lens, expected, device):
    need, tier = make_need(**device(form)), FlashInferTier(form, library=standin)
    batch = make_batch(query_lens, [70] * len(query_lens), need)
    plan = tier.plan(need, make_batch([1], [5], need))
    before = plan.steps, plan.batch
    with pytest.raises(ValueError, match=rf"^batch.query_lens: expected {expected}\. Fix: use form = 'auto'"):
        tier.plan(need, batch, plan)
    assert (plan.steps, plan.batch) == before


def test_H1_a_cache_that_the_kernels_would_read_wrong_is_refused(device):
    tier = FlashInferTier("xqa", library=standin)
    case = make_case([1], [5], **device("xqa"))
    wide = torch.zeros(*case.cache.data.shape[:2], 48, dtype=BF16)
    apart = PagedLatentCache(wide[..., : case.need.L + case.need.R], case.need.layout, case.need.page_size)
    plan, prepared = tier.plan(case.need, case.batch), tier.prepare(case.up, case.need)
    with pytest.raises(ValueError, match=r"^cache.data.stride\(1\): expected 40, got 48"):
        tier.attend(case.q, apart, prepared, plan)
    far = torch.empty(2, 64, 40, device="meta").as_strided((2, 64, 40), (1 << 31, 40, 1))
    with pytest.raises(ValueError, match=r"^cache.data: expected strides below 2\^31 with form 'xqa'"):
        blackwell._check_cache("xqa", SimpleNamespace(data=far))


# the stand-in by itself


def arguments(form: str, **changes: Any) -> dict[str, Any]:
    """Two requests of 5 and 64 keys in pages of 32."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random).to(BF16)
    q, N, width = (1, 128, 4) if form == "xqa" else (2, 3, 2)
    given: dict[str, Any] = {
        "query": draw(2, q, N, 9), "kv_cache": draw(5, 32, 9), "qk_nope_head_dim": 4, "kv_lora_rank": 6,
        "workspace_buffer": torch.zeros(16 << 20, dtype=torch.int8), "qk_rope_head_dim": 3,
        "block_tables": torch.tensor([[3, 0, 0, 0], [1, 4, 0, 0]], dtype=torch.int32)[:, :width].contiguous(),
        "seq_lens": torch.tensor([5, 64], dtype=torch.int32), "max_seq_len": 64, "bmm1_scale": 0.3, "backend": form,
        "return_lse": form != "xqa",
    }  # fmt: skip
    return given | changes


@pytest.mark.parametrize("form", ENTRY)
def test_the_stand_in_is_causal_attention_with_a_base_2_logarithm(form, device):
    device(form)
    given = arguments(form)
    result = standin.mla.trtllm_batch_decode_with_kv_cache_mla(**given)
    out, lse = result if form != "xqa" else (result, None)
    q = given["query"].shape[1]
    for b, (pages, keys) in enumerate((([3], 5), ([1, 4], 64))):
        rows = given["kv_cache"][pages].reshape(-1, 9)[:keys].double()
        for i in range(q):
            seen = rows[: keys - q + 1 + i]
            scores = given["query"][b, i].double() @ seen.T * 0.3
            want = scores.softmax(-1) @ seen[:, :6]
            # weights and output are rounded to bfloat16, 2^-9 each; one more for float32
            assert bool(((out[b, i].double() - want).abs() <= 3 * 2**-9 * seen[:, :6].abs().max()).all())
            if lse is not None:
                near = (lse.view(2, q, -1)[b, i].double() * math.log(2) - scores.logsumexp(-1)).abs()
                assert bool((near <= 1e-5).all())  # float32 sums of 64 terms: 64 * 2^-24 is 4e-6, and the conversion


ANY = [
    ({"backend": "cute-dsl"}, ValueError, "dense kernels"),
    ({"sparse_mla_top_k": 4}, ValueError, "dense kernels"),
    ({"sinks": []}, ValueError, "dense kernels"),
    ({"bmm1_scale": 1}, ValueError, "floats"),
    ({"bmm2_scale": torch.ones(1)}, ValueError, "floats"),
    ({"kv_lora_rank": 9, "qk_rope_head_dim": 0}, ValueError, "R > 0"),
    ({"qk_rope_head_dim": 4}, ValueError, "rows of L"),
    ({"seq_lens": torch.tensor([5, 65], dtype=torch.int32)}, ValueError, "lengths"),
    ({"seq_lens": torch.tensor([0, 64], dtype=torch.int32)}, ValueError, "lengths"),
    ({"seq_lens": torch.tensor([5, 64])}, ValueError, "int32"),
    ({"max_seq_len": 63}, ValueError, "lengths"),
    ({"block_tables": torch.tensor([[3, -7, 0, 0], [1, 4, 0, 0]], dtype=torch.int32)}, ValueError, "page ids"),
    ({"block_tables": torch.tensor([[3, 5, 0, 0], [1, 4, 0, 0]], dtype=torch.int32)}, ValueError, "page ids"),
    ({"block_tables": torch.tensor([[3, 0, 0, 0], [1, 4, 0, 0]])}, ValueError, "int32"),
    ({"query": torch.zeros(2, 1, 128, 9)}, ValueError, "bfloat16"),
]  # fmt: skip
OWN = {
    "trtllm-gen": [
        ({"query": torch.zeros(2, 2, 65, 9, dtype=BF16)}, ValueError, "64 < N < 128"),
        ({"kv_cache": torch.zeros(5, 16, 9, dtype=BF16)}, ValueError, "32 or 64 rows"),
        ({"out": torch.zeros(4, 3, 6, dtype=BF16)}, ValueError, "out must be"),
        ({"lse": torch.zeros(2, 3)}, ValueError, "lse must be"),
        ({"workspace_buffer": torch.zeros(1 << 20, dtype=torch.int8)}, RuntimeError, "LSEs alone"),
    ],
    "xqa": [
        ({"return_lse": True}, NotImplementedError, "no LSE"),
        ({"query": torch.zeros(2, 2, 128, 9, dtype=BF16)}, ValueError, "one new token"),
        ({"query": torch.zeros(2, 1, 64, 9, dtype=BF16)}, ValueError, "128 heads"),
        ({"query": torch.zeros(2, 1, 9, 128, dtype=BF16).transpose(2, 3)}, ValueError, "without strides"),
        ({"block_tables": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, "tables of 128 rows"),
        ({"out": torch.zeros(2, 1, 128, 6, dtype=BF16)}, ValueError, "out must be"),
        ({"kv_cache": torch.zeros(5, 32, 12, dtype=BF16)[..., :9]}, ValueError, "side by side"),
        ({"workspace_buffer": torch.ones(16 << 20, dtype=torch.int8)}, ValueError, "semaphores"),
    ],
}


@pytest.mark.parametrize(
    ("form", "changes", "error", "text"), [(form, *row) for form in ENTRY for row in [*ANY, *OWN[form]]]
)
def test_the_stand_in_refuses_what_the_library_or_its_kernels_would_not_take(form, changes, error, text, device):
    device(form)
    with pytest.raises(error, match=text):
        standin.trtllm_batch_decode_with_kv_cache_mla(**arguments(form, **changes))


def test_the_stand_in_asks_the_device(device):
    for form, arch in (("trtllm-gen", "sm_120"), ("xqa", "sm_103"), ("trtllm-gen", "sm_90"), ("xqa", "sm_90")):
        device(form, arch=arch)
        with pytest.raises(ValueError, match=rf"^{form} has no kernel for a device of capability \("):
            standin.trtllm_batch_decode_with_kv_cache_mla(**arguments(form))


def test_gradients_are_refused_as_in_the_other_forms(device):
    tier, case = FlashInferTier("xqa", library=standin), make_case([1], [5], **device("xqa"))
    plan, prepared = tier.plan(case.need, case.batch), tier.prepare(case.up, case.need)
    with pytest.raises(ValueError, match=r"^requires_grad"):
        tier.attend(Query(case.q.nope.requires_grad_(), case.q.pe), case.cache, prepared, plan)
