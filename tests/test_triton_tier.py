"""The Triton tier as a whole: every batch known in the field, what it refuses, bad input, and the faults of real code.

In the interpreter in float32 and float16, on a GPU in bfloat16 too. The kernels have modules of their own.
Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from every_tier import triton_tiers
from test_equivalence import field_cases, released_cases
from triton_here import DEVICE, DTYPES, INTERPRETED, require_triton

require_triton()

import small_case  # noqa: E402
from small_case import Case, assert_rows, fill_cache, make_batch, make_need, mean_case  # noqa: E402

import mla.need  # noqa: E402
import tiers  # noqa: E402
from mla.aot import SHARED_LIMIT  # noqa: E402
from mla.batch import AttentionBatch  # noqa: E402
from mla.cache import CacheSpec, FloatRows, PagedLatentCache  # noqa: E402
from mla.conformance import Case as Conformance  # noqa: E402
from mla.conformance import run_case  # noqa: E402
from mla.conformance.cases import roundings  # noqa: E402
from mla.conformance.suites import suite  # noqa: E402
from mla.layer import InputSide, MLALayer  # noqa: E402
from mla.need import Capacity, Need  # noqa: E402
from mla.presets import preset  # noqa: E402
from mla.projections import Query  # noqa: E402
from mla.state import AttentionState  # noqa: E402
from mla.tier import Plan, Tier  # noqa: E402
from mla.weights import MLAWeights  # noqa: E402
from tiers.tier2_triton import absorbed, launch  # noqa: E402
from tiers.tier2_triton.schedule import Piece, schedule  # noqa: E402
from tiers.tier2_triton.tier import FORMS  # noqa: E402

BF16 = "bfloat16 is silently wrong in Triton's interpreter; use float32 or float16 there, or a GPU."
INF = float("inf")
LOGITS = 2.0**-22  # float32 rounding of a logarithm below 8: half an ulp of 2^-21


def make_case(*lengths: Any, **fields: Any) -> Case:
    """`small_case.make_case` where the kernels run."""
    return small_case.make_case(*lengths, device=DEVICE, **fields)


def means(query_lens: list[int], values: list[list[float]], **fields: Any) -> Case:
    """`small_case.mean_case` where the kernels run: zero queries, so that outputs are means of the visible values."""
    return mean_case(query_lens, values, device=DEVICE, **fields)


def tiers_for(case: Case) -> dict[str, Tier]:
    """The forms that serve a case."""
    return triton_tiers(case.need.page_size, sum(case.batch.seq_lens_host), case.need.dtype)


def check_all(case: Case) -> None:
    """Every form is within the budget."""
    for tier in tiers_for(case).values():
        case.check(case.run(tier))


# every batch of the field


def affordable() -> list[Conformance]:
    """The equivalence suite; in the interpreter, whose loops take 10 ms a turn, the shorter half of it.

    That is one family for each batch and dtype, and few keys; the smoke suite has the longer batches once.
    """
    cases = field_cases() + released_cases()
    if not INTERPRETED:
        return cases
    short = [c for c in cases if c.dtype != "bf16" and roundings(c) <= 400_000]
    first = {(c.batch.name, c.dtype, c.dims.N * c.dims.L < 1000): c for c in short}
    return list(first.values())


def other_forms(case: Conformance) -> dict[str, Tier]:
    """The forms for a case of the equivalence suite; the smoke suite has "auto" on every batch."""
    found = triton_tiers(case.page_size, sum(case.batch.seq_lens), case.torch_dtype)
    if not INTERPRETED:
        return found
    # the two workspaces of the expanded form take turns, and "auto" is what is left for float16
    names = list(found)
    return {n: found[n] for n in (names[1:] if len(names) == 2 else [names[1], names[2 + case.random_seed % 2]])}


def id_of(case: Conformance) -> str:
    return case.id


@pytest.mark.parametrize("case", affordable(), ids=id_of)
def test_every_form_is_within_the_budget(case):
    results = {n: run_case(t, case, device=DEVICE, diagnosed=False) for n, t in other_forms(case).items()}
    wrong = [f"{n}: {r.status} {r.used_out} {r.used_lse} {r.where} {r.detail}" for n, r in results.items() if not r.ok]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("case", suite("smoke"), ids=id_of)
def test_the_smoke_suite_is_right_and_bfloat16_is_refused_in_the_interpreter(case):
    if INTERPRETED and case.repeats:
        case = dataclasses.replace(case, repeats=3)  # one thread, one order: more runs would say nothing
    result = run_case(tiers.get("triton"), case, device=DEVICE)
    if INTERPRETED and "bf16" in case.dtype + case.layout:
        assert (result.status, result.detail) == ("refused", BF16)
    else:
        assert result.ok, result


# sizes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [1, 3, 16, 48, 64, 100, 128])
def test_H5_H6_pages_of_any_size_and_contexts_that_start_inside_one(page, dtype):
    check_all(make_case([3, 1], [13, 150], page_size=page, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 4, 5, 8, 16, 17])
def test_I1_any_number_of_heads_in_their_order(heads, dtype):
    case = make_case([2, 9], [17, 9], N=heads, L=48, dtype=dtype)
    found = {n: t for n, t in tiers_for(case).items() if n in ("triton:mqa", "triton:mha")}
    for tier in found.values():
        case.check(case.run(tier))
    # value n + 1 of head n at every key, so that the output names its head; weights sum to 1 within (keys + 8) u
    for kv_c, _ in case.keys:
        kv_c[:, 0] = 1.0
    case.up.W_UV.zero_()
    case.up.W_UV[0] = torch.arange(1.0, heads + 1)[:, None]
    case.cache = fill_cache(case.need, case.batch, case.keys)
    u = torch.finfo(dtype).eps / 2
    for name, tier in found.items():
        error = case.run(tier).out.double().cpu() - torch.arange(1.0, heads + 1).double()[:, None]
        assert error.abs().max() <= (2 * 17 + 8) * u * heads, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("L", "R"), [(256, 32), (256, 64), (512, 0), (512, 64), (24, 0), (40, 6)])
def test_I6_rows_of_288_320_512_and_576_numbers_and_odd_ones(L, R, dtype):
    check_all(make_case([2, 1], [21, 5], N=2, L=L, P=24, R=R, V=20, page_size=16, dtype=dtype))


@pytest.mark.parametrize(("P", "V"), [(192, 256), (128, 128), (10, 3)])
def test_I5_head_widths_of_released_models_and_odd_ones(P, V):
    check_all(make_case([2], [9], N=3, L=64, P=P, R=64, V=V, page_size=16))


def test_rows_of_another_dtype_than_the_query():
    for rows, dtype in ((torch.float32, torch.float16), (torch.float16, torch.float32)):
        case = make_case([2, 1], [21, 70], dtype=dtype, layout=FloatRows(small_case.L, small_case.R, rows))
        case.check(case.run("triton"))


# what it refuses


def sentences(form: str = "auto", *, cap: int | None = None, **fields: Any) -> list[str]:
    """Every reason against a Need on a GPU that may not be here, of which nothing is touched."""
    return tiers.get("triton", form=form, max_workspace_tokens=cap).why_not(make_need(**gpu(**fields)))


def gpu(**fields: Any) -> dict[str, Any]:
    """Fields of a Need on an H200, real rows."""
    usual = {"device": "cuda:0", "arch": "sm_90", "dtype": torch.bfloat16, "L": 512, "P": 128, "R": 64, "V": 128}
    return usual | {"N": 16, "page_size": 64} | fields


def test_nothing_stands_against_what_it_serves():
    some = Capacity(max_requests=4, max_tokens=4, max_query_len=1, max_seq_len=4096)
    for arch in SHARED_LIMIT:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if (arch, dtype) == ("sm_120", torch.float32):  # its programs get 99 KiB; float32 queries are held twice
                (found,) = sentences(arch=arch, dtype=dtype)
                assert "need 110,592 bytes of shared memory, and sm_120 gives a program 101,376" in found
                continue
            assert sentences(arch=arch, dtype=dtype) == [], (arch, dtype)
            assert sentences("mqa", arch=arch, dtype=dtype, graph_capture=True, capacity=some) == []
            assert sentences("mqa", arch=arch, dtype=dtype, batch_invariant=True) == []
    assert sentences("mha") == sentences("cudnn") == sentences("padded") == []


def test_the_cpu_is_refused_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    fix = "use a GPU, or start the process with TRITON_INTERPRET=1 to interpret the kernels (slow, for tests)"
    expected = [f"device 'cpu' is not served by triton, which compiles for GPUs; {fix}."]
    need = make_need(device="cpu")
    assert tiers.get("triton").why_not(need) == expected
    with pytest.raises(ValueError, match=f"^tier 'triton' refuses: {re.escape(expected[0])}$"):
        tiers.get("triton").plan(need, make_batch([1], [5], need))


@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_is_refused_in_the_interpreter(dtype, rows, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    need = make_need(device="cpu", dtype=dtype, layout=FloatRows(small_case.L, small_case.R, rows))
    expected = [BF16] if torch.bfloat16 in (dtype, rows) else []
    assert tiers.get("triton").why_not(need) == tiers.get("triton:mqa").why_not(need) == expected


def test_float64_is_refused_for_queries_and_for_rows():
    allowed = "which takes torch.float32, torch.bfloat16, torch.float16; use one of these."
    found = [f"{what} torch.float64 is not served by triton, {allowed}" for what in ("dtype", "a cache of")]
    wide = FloatRows(512, 64, torch.float64)
    assert sentences(layout=wide) == found[1:]
    assert sentences(dtype=torch.float64, layout=FloatRows(512, 64, torch.bfloat16))[-1:] == found[:1]
    assert sentences(dtype=torch.float64)[-2:] == found


@pytest.mark.parametrize("arch", ["sm_75", "gfx90a", "cuda", "cpu"])
def test_T5_an_unknown_architecture_is_refused_with_those_that_are_known(arch):
    known = "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"
    assert sentences(arch=arch) == [f"arch {arch!r} has no tiles in triton, which knows {known}; use paged there."]


# (16 rows of the query + one buffer of 16 keys) x (4096 + 64 numbers) + 4 KiB; AMD keeps the query in registers
@pytest.mark.parametrize(
    ("arch", "dtype", "least", "limit"),
    [
        ("sm_80", torch.float32, 32 * 4160 * 4 + 4096, 166_912),
        ("sm_90", torch.float32, 32 * 4160 * 4 + 4096, 232_448),
        ("sm_120", torch.float16, 32 * 4160 * 2 + 4096, 101_376),
        ("gfx942", torch.bfloat16, 16 * 4160 * 2 + 4096, 65_536),
    ],
)
def test_R5_rows_too_wide_for_the_shared_memory_are_refused_with_the_numbers(arch, dtype, least, limit):
    (found,) = sentences(arch=arch, dtype=dtype, L=4096)
    assert found.startswith("rows of L + R = 4096 + 64 need ")
    assert found.endswith(f" bytes of shared memory, and {arch} gives a program {limit:,}; use paged for such rows.")
    needed = int(found.removeprefix("rows of L + R = 4096 + 64 need ").split(" ")[0].replace(",", ""))
    assert needed > limit
    assert needed >= least
    assert launch.decode_tile(arch, dtype, 4096, 64, 1) is None


def test_promises_that_contradict_the_form_are_refused():
    found = "graph_capture = True needs Need.capacity, from which buffers get their fixed size; set it."
    assert sentences(graph_capture=True) == sentences("mqa", graph_capture=True) == [found]
    some = Capacity(max_requests=4, max_tokens=4, max_query_len=1, max_seq_len=4096)
    for form in ("mha", "cudnn", "padded"):
        expected = [
            f"{flag} = True takes the absorbed form; form = {form!r} expands: use form = 'mqa'."
            for flag in ("graph_capture", "batch_invariant")
        ]
        assert sentences(form, graph_capture=True, capacity=some) == expected[:1]
        assert sentences(form, batch_invariant=True) == expected[1:]
        assert sentences(form, graph_capture=True, batch_invariant=True) == [found, *expected]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("window", 4), ("sinks", True), ("softcap", 30.0), ("alibi", True), ("kv_sharing", True)),
        ("output_quantisation", "fp8"),
    ],
)
def test_T1_a_feature_beyond_plain_attention_is_refused_and_never_dropped(name, value):
    fix = f"which takes {name} unset only; unset it or choose another tier."
    for form in ("auto", "mqa", "mha"):
        assert sentences(form, **{name: value}) == [f"{name} = {value!r} is not computed by triton, {fix}"]


def test_a_workspace_below_one_page_is_refused():
    expected = "max_workspace_tokens = 63 is below one page of 64 rows; allow at least 64, or use smaller pages."
    assert sentences(cap=63) == sentences("mha", cap=63) == [expected]
    assert sentences(cap=64) == []


def test_a_layout_that_is_not_plain_floats_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Bytes:
        L: int = 512
        R: int = 64
        name: str = "fp8"
        storage_dtype: torch.dtype = torch.uint8

    expected = "layout 'fp8' is not read by triton, which reads rows of plain floats; use FloatRows."
    assert sentences(layout=Bytes())[-1] == expected
    assert len(sentences(layout=Bytes())) == 1


def test_T6_no_triton_and_one_that_is_too_old_are_refused(monkeypatch):
    fix = 'run pip install "mla-tiers[triton]" or choose another tier.'
    monkeypatch.setattr(mla.need, "version", lambda name: "3.5.1")
    assert sentences() == [f"triton 3.5.1 is too old; triton needs triton >= 3.6; {fix}"]

    def missing(name):
        raise mla.need.PackageNotFoundError(name)

    monkeypatch.setattr(mla.need, "version", missing)
    assert sentences() == [f"triton is not installed; triton needs triton >= 3.6; {fix}"]


def test_every_reason_is_listed_at_once():
    found = sentences("mha", arch="sm_75", dtype=torch.float64, window=3, graph_capture=True, cap=1)
    starts = (
        "window = 3", "arch 'sm_75'", "dtype torch.float64", "a cache of torch.float64",
        "graph_capture = True needs", "graph_capture = True takes", "max_workspace_tokens = 1",
    )  # fmt: skip
    assert len(found) == len(starts)
    assert all(sum(s.startswith(start) for s in found) == 1 for start in starts), found


def test_float16_is_not_expanded_and_the_sentence_says_why():
    (found,) = sentences("mha", dtype=torch.float16)
    why = "is not expanded by route 'triton' (expanded float16 keys can pass 65504)"
    assert found.startswith(f"dtype torch.float16 {why}, which takes torch.bfloat16 or torch.float32;")


# bad input: the argument is named, and nothing has happened


def untouched(case: Case, act, kind: type[Exception], text: str) -> None:
    """`act` raises `kind` with `text`, and the cache holds the bits that it held."""
    before = case.cache.data.clone().view(torch.uint8)
    with pytest.raises(kind, match=text):
        act()
    assert torch.equal(case.cache.data.view(torch.uint8), before)


def test_write_names_what_does_not_fit_and_writes_nothing():
    case, tier = make_case([3], [9]), tiers.get("triton")
    (kv_c, k_pe), slots = case.keys[0], torch.arange(3, device=DEVICE)
    other = "meta" if DEVICE == "cpu" else "cpu"
    wrong = [
        ((kv_c, k_pe, slots.int()), TypeError, r"^slot_mapping\.dtype: expected torch\.int64, got torch\.int32"),
        ((kv_c.double(), k_pe, slots), TypeError, r"^kv_c: expected one of .*, got torch\.float64"),
        ((kv_c, k_pe.int(), slots), TypeError, r"^k_pe: expected one of .*, got torch\.int32"),
        ((kv_c[:2], k_pe, slots), ValueError, r"^kv_c: expected \(>= 3, 32\), got \(2, 32\)"),
        ((kv_c, k_pe[:, :5], slots), ValueError, r"^k_pe: expected \(>= 3, 8\), got \(9, 5\)"),
        ((kv_c[0], k_pe, slots), ValueError, r"^kv_c: expected \(>= 3, 32\), got \(32,\)"),
        ((kv_c.to(other), k_pe, slots), ValueError, r"^kv_c\.device: expected"),
        ((kv_c, k_pe, slots.to(other)), ValueError, r"^slot_mapping\.device: expected"),
        ((kv_c.clone().requires_grad_(), k_pe, slots), ValueError, "requires_grad"),
    ]
    for given, kind, text in wrong:
        untouched(case, lambda given=given: tier.write(case.cache, *given), kind, text)


def test_fused_input_names_what_does_not_fit_and_writes_nothing():
    case, tier = make_case([3], [9]), tiers.get("triton")
    kv_c, k_pe = case.keys[0]
    turns = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    side = InputSide(torch.ones(32, device=DEVICE), 1e-6, 1.0, turns, 1.0, True)
    for rows, kind, text in (
        ((kv_c[:2], k_pe), ValueError, r"^kv_c: expected \(>= 3, 32\), got \(2, 32\)"),
        ((kv_c, k_pe.double()), TypeError, r"^k_pe: expected one of .*, got torch\.float64"),
        ((kv_c, k_pe.clone().requires_grad_()), ValueError, "requires_grad"),
    ):
        act = lambda rows=rows: tier.fused_input(case.q, *rows, side, case.cache, case.batch)
        untouched(case, act, kind, text)


def test_attend_names_what_does_not_belong_to_the_plan():
    case, tier = make_case([3], [9]), tiers.get("triton")
    prepared, plan = tier.prepare(case.up, case.need), tier.plan(case.need, case.batch)
    good: dict[str, Any] = {"q": case.q, "cache": case.cache, "prepared": prepared, "plan": plan}
    narrow = Query(case.q.nope.half(), case.q.pe)
    other = tiers.get("triton:mqa").plan(case.need, case.batch)
    buffers = AttentionState(torch.full((2, 3, 10), 7.0, device=DEVICE), torch.full((3, 3), 7.0, device=DEVICE))
    for change, kind, text in (
        ({"q": narrow}, TypeError, r"^q\.nope\.dtype: expected torch\.float32, got torch\.float16"),
        ({"q": Query(case.q.nope[:2], case.q.pe)}, ValueError, r"^q\.nope\.shape: expected \(3, 3, 12\)"),
        ({"plan": other}, ValueError, r"^plan\.tier: expected triton, got triton:mqa"),
        ({"out": buffers}, ValueError, r"^out\.out\.shape: expected \(3, 3, 10\), got \(2, 3, 10\)"),
    ):
        with pytest.raises(kind, match=text):
            tier.attend(**good | change)
    assert torch.equal(buffers.out, torch.full_like(buffers.out, 7.0))


def test_forms_and_caps_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=f"^form: expected one of {', '.join(FORMS)}, got 'mla'"):
        tiers.get("triton", form="mla")
    with pytest.raises(ValueError, match=r"^max_workspace_tokens: expected an int >= 1, got 0"):
        tiers.get("triton", max_workspace_tokens=0)
    names = {form: tiers.get("triton", form=form).name for form in FORMS}
    assert names == {form: "triton" if form == "auto" else f"triton:{form}" for form in names}


# a plan for graphs


GRAPH = Capacity(max_requests=8, max_tokens=8, max_query_len=2, max_seq_len=150)


def graph_case(query_lens: list[int], seq_lens: list[int], **fields: Any) -> Case:
    """A case whose plan is to be captured: 8 tokens, padding included."""
    given = {"graph_capture": True, "capacity": GRAPH, "pad_tokens": 8 - sum(query_lens)} | fields
    return make_case(query_lens, seq_lens, **given)


def addresses(plan: Plan) -> list[int]:
    """Where a captured graph reads and writes: work lists, table, bounds and scratch."""
    (step,) = plan.steps.rounds
    lists = (step.items, step.merges, step.counts, step.row_kv_lens, step.block_table)
    return [x.data_ptr() for x in (*lists, *plan.reserve()._buffers.values())]


def test_a_batch_of_another_size_than_the_captured_one_is_refused_and_changes_nothing():
    case, tier = graph_case([1] * 8, [20] * 8), tiers.get("triton")
    plan = tier.plan(case.need, case.batch)
    steps, (step,) = plan.steps, plan.steps.rounds
    held = [x.clone() for x in (step.items, step.row_kv_lens, step.block_table)]
    fewer = make_batch([1] * 5, [20] * 5, case.need)
    with pytest.raises(ValueError, match=r"^batch: expected 8 tokens, as captured, got 5"):
        tier.plan(case.need, fewer, plan)
    longer = make_batch([1] * 8, [151] * 8, case.need)
    with pytest.raises(ValueError, match=r"capacity\.max_seq_len: expected at most 150, got 151"):
        tier.plan(case.need, longer, plan)
    assert plan.steps is steps
    assert plan.batch is case.batch
    now = (step.items, step.row_kv_lens, step.block_table)
    assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))


def test_CG1_a_plan_for_8_requests_refilled_for_5_is_right_and_stays_where_it_is():
    first = graph_case([1] * 8, [30, 5, 77, 1, 64, 65, 0, 150])
    tier = tiers.get("triton")
    plan = tier.plan(first.need, first.batch)
    first.check(tier.attend(first.q, first.cache, tier.prepare(first.up, first.need), plan))
    where = addresses(plan)
    for query_lens, seq_lens in (
        ([1] * 5, [31, 6, 78, 2, 140]),
        ([2, 1, 2], [9, 0, 130]),
        ([], []),
        ([1] * 8, [3] * 8),
    ):
        case = graph_case(query_lens, seq_lens, seed=len(seq_lens))
        assert tier.plan(case.need, case.batch, plan) is plan
        state = tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan)
        case.check(state)
        assert bool((state.out[sum(query_lens) :] == 0).all())
        assert bool((state.lse[sum(query_lens) :] == -INF).all())
        assert addresses(plan) == where
        eager = tiers.get("triton").plan(case.need, case.batch)
        again = tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), eager)
        assert torch.equal(state.out, again.out)
        assert torch.equal(state.lse, again.lse)


def test_CG3_nothing_of_six_prefills_is_left_when_two_decodes_take_their_plan():
    prefills = make_case([70] * 6, [70] * 6)
    tier = tiers.get("triton")
    plan = tier.plan(prefills.need, prefills.batch)
    expanded = plan.report["route"] != "none"
    assert plan.report["forms"] == ["mha" if expanded else "mqa"] * 6
    decodes = make_case([1, 1, 0, 0, 0, 0], [33, 20, 0, 0, 0, 0], pad_tokens=4)
    tier.plan(decodes.need, decodes.batch, plan)
    assert plan.report["forms"] == ["mqa"] * 6
    state = tier.attend(decodes.q, decodes.cache, tier.prepare(decodes.up, decodes.need), plan)
    decodes.check(state)
    assert bool((state.out[2:] == 0).all())


def test_sizes_are_known_from_the_capacity_alone_and_bound_every_batch():
    limits = Capacity(max_requests=4, max_tokens=96, max_query_len=80, max_seq_len=200)
    for invariant in (False, True):
        need = make_need(device=DEVICE, capacity=limits, batch_invariant=invariant)
        tier = tiers.get("triton", max_workspace_tokens=32)
        empty = tier.plan(need, make_batch([], [], need)).nbytes
        for q, s in (([1] * 4, [200] * 4), ([80, 16], [200, 16]), ([80, 1, 4], [80, 200, 200])):
            case = make_case(q, s, capacity=limits, batch_invariant=invariant)
            plan = tier.plan(case.need, case.batch)
            assert plan.nbytes == empty
            case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan.reserve()))


# B: the logarithm


def test_B1_a_long_prefix_and_a_short_suffix_weigh_by_their_keys():
    # 4096 keys of mean 0 and 4 of mean 10: 40 / 4100; a base-2 LSE read as natural gives 0.000454
    case = means([4], [[0.0] * 4096 + [10.0] * 4], mask="full", page_size=64)
    for tier in (tiers.get("triton:mqa"), tiers.get("triton:mha", max_workspace_tokens=4096)):
        state = case.run(tier)
        assert_rows(state, [40 / 4100] * 4, 4100, 10.0)
        assert state.out[0, 0, 0].item() == pytest.approx(0.0097561, abs=5e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_B3_the_lse_of_one_key_of_score_0_is_0_and_of_eight_is_ln_8(dtype):
    case = means([1, 1], [[3.0], [3.0] * 8], dtype=dtype)
    for name, tier in tiers_for(case).items():
        lse = case.run(tier).lse
        assert bool((lse[0] == 0).all()), name
        assert (lse[1].double() - math.log(8)).abs().max() <= LOGITS, name
        assert lse.dtype == torch.float32


def test_B4_the_base_does_not_change_with_the_layout_of_the_batch():
    # the same rows as a uniform decode and within a ragged batch, in which they have other neighbours
    ragged = make_case([1, 4, 1], [60, 33, 21])
    batch, rows = ragged.batch.select([0, 2])
    alone = dataclasses.replace(ragged, batch=batch, q=Query(*(x[rows] for x in ragged.q)))
    for name, tier in tiers_for(ragged).items():
        ratio = alone.run(tier).lse / ragged.run(tier).lse[rows]
        assert (ratio - 1).abs().max() <= 1e-4, name


# C: empty rows, NaN, stale memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_C1_C9_rows_without_keys_are_0_and_minus_infinity_and_leave_the_others_alone(dtype):
    case = make_case([1, 1, 1], [0, 5, 0], dtype=dtype)
    for name, tier in tiers_for(case).items():
        state = case.run(tier)
        case.check(state)
        assert bool((state.out[[0, 2]] == 0).all()), name
        assert bool((state.lse[[0, 2]] == -INF).all()), name
        assert bool(torch.isfinite(state.lse[1]).all()), name


@pytest.mark.parametrize("fill", [float("nan"), INF])
def test_C4_what_stands_in_the_unused_tail_of_a_page_changes_no_bit(fill):
    dirty = make_case([2], [13], page_size=4)
    dirty.cache.data[torch.isnan(dirty.cache.data)] = fill
    clean = dataclasses.replace(
        dirty, cache=dataclasses.replace(dirty.cache, data=dirty.cache.data.nan_to_num(0, 0, 0))
    )
    assert not bool(torch.isfinite(dirty.cache.data).all())
    for name, tier in tiers_for(dirty).items():
        state, other = dirty.run(tier), clean.run(tier)
        assert bool(torch.isfinite(state.out).all()), name
        assert torch.equal(state.out, other.out), name
        assert torch.equal(state.lse, other.lse), name


def guarded(case: Case, value: float) -> tuple[AttentionState, list[torch.Tensor]]:
    """Buffers full of `value` within larger ones, and the guard rows before and after them."""
    T, need = case.batch.num_tokens, case.need
    out = torch.full((T + 4, need.N, need.V), value, dtype=need.dtype, device=DEVICE)
    lse = torch.full((T + 4, need.N), value, device=DEVICE)
    return AttentionState(out[2:-2], lse[2:-2]), [out[:2], out[-2:], lse[:2], lse[-2:]]


def test_C6_F4_buffers_full_of_NaN_are_filled_and_nothing_around_them():
    case = make_case([1, 1, 1, 1], [7, 0, 0, 0])
    for name, tier in tiers_for(case).items():
        buffers, guards = guarded(case, float("nan"))
        assert case.run(tier, buffers) is buffers
        case.check(buffers)
        assert bool((buffers.out[1:] == 0).all()), name
        assert all(bool(torch.isnan(guard).all()) for guard in guards), name


def many_processors(monkeypatch, count: int) -> None:
    """Let the planner think that `count` programs run at once, so that it cuts as for a large GPU."""
    monkeypatch.setattr(absorbed, "programs", lambda need, tile: count)


def test_F4_a_split_combine_writes_nothing_outside(monkeypatch):
    many_processors(monkeypatch, 8)
    case = make_case([1, 2], [300, 290])
    tier = tiers.get("triton:mqa")
    assert max(r.merges[:, 4].max() for r in tier.plan(case.need, case.batch).steps.rounds) >= 2
    buffers, guards = guarded(case, float("nan"))
    case.check(case.run(tier, buffers))
    assert all(bool(torch.isnan(guard).all()) for guard in guards)


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 3), (4, 6), (1, 300), (4, 300)])
def test_C10_C12_more_programs_than_blocks_of_keys_change_nothing(query_len, seq_len, monkeypatch):
    case = make_case([query_len], [seq_len], N=2)
    tier = tiers.get("triton:mqa")
    many_processors(monkeypatch, 1)
    case.check(case.run(tier))
    many_processors(monkeypatch, 32)
    parts = max(int(r.merges[:, 4].max()) for r in tier.plan(case.need, case.batch).steps.rounds)
    assert (parts > 1) == (seq_len == 300)
    case.check(case.run(tier))


@pytest.mark.parametrize("keys", [5, 63, 64, 65])
def test_C13_lanes_past_the_last_key_are_not_counted_without_a_causal_mask(keys):
    case = means([2], [[1.0] * keys], mask="full")
    for tier in tiers_for(case).values():
        assert_rows(case.run(tier), [1.0, 1.0], keys, 1.0)


# F, H: strides and pages


def test_F1_F5_A11_views_of_wider_tensors_are_taken_as_they_are():
    case = make_case([2, 1], [9, 40])
    both = torch.cat(case.q, -1)  # one (T, N, P + R) tensor
    q = Query(both[..., :12], both[..., 12:])
    up = type(case.up)(*(W.permute(1, 2, 0).contiguous().permute(2, 0, 1) for W in case.up))
    views = dataclasses.replace(case, q=q, up=up)
    assert not any(x.is_contiguous() for x in (*q, *up))
    for tier in tiers_for(case).values():
        case.check(views.run(tier))
    # rows of the fused down-projection, 40 numbers apart, into a cache that is one layer of an engine's
    kv_c, k_pe = torch.cat(case.keys[1], -1).split([32, 8], -1)
    whole = torch.full((case.cache.num_pages, 3, 4, 40), float("nan"), device=DEVICE)
    layer = PagedLatentCache.wrap(whole[:, 1], case.need.layout)
    slots = torch.arange(40, device=DEVICE)
    slots[7] = -1
    tiers.get("triton").write(layer, kv_c, k_pe, slots)
    expected = torch.cat([kv_c, k_pe], -1)
    expected[7] = float("nan")
    assert torch.equal(layer.data[:10].reshape(40, 40).nan_to_num(9.0), expected.nan_to_num(9.0))
    assert bool(torch.isnan(whole[:, [0, 2]]).all())


def test_H4_the_buffers_hold_the_sum_of_the_lengths():
    case = make_case([1, 1, 1, 1], [33, 20, 1, 33], page_size=16)
    tier = tiers.get("triton:mha")
    plan = tier.plan(case.need, case.batch)
    assert plan.sizes["expanded_rows"][0][0] == 87
    case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


# K, M: verification and padding


def test_M1_every_row_of_a_verification_sees_its_own_bound():
    # keys 1, 2, 3, ...: the mean of the first k is (k + 1) / 2; rows see 3, 4, 5 and 7, 8, 9 keys
    case = means([3, 3], [[float(i) for i in range(1, n + 1)] for n in (5, 9)])
    for tier in tiers_for(case).values():
        assert_rows(case.run(tier), [2.0, 2.5, 3.0, 4.0, 4.5, 5.0], 9, 9.0)


def test_M3_two_tokens_from_position_3_give_2_5_and_3():
    case = means([2], [[1.0, 2.0, 3.0, 4.0, 5.0]])
    for tier in tiers_for(case).values():
        assert_rows(case.run(tier), [2.5, 3.0], 5, 5.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_M5_M7_no_row_of_a_padded_verification_is_lost(dtype):
    case = make_case([3, 3, 3, 0], [5, 9, 14, 0], pad_tokens=3, dtype=dtype)
    for name, tier in tiers_for(case).items():
        state = case.run(tier)
        case.check(state)
        assert bool((state.out[9:] == 0).all()), name
        assert bool((state.lse[9:] == -INF).all()), name
        assert len(set(state.lse[:9].flatten().tolist())) == 27, name


def test_M8_a_verification_of_4_tokens_reads_every_key_once_as_decode_does():
    # 16 heads x 4 tokens are one tile of 64 rows: as many segments, over the same keys, as for 16 rows
    for arch in ("sm_80", "sm_90", "sm_100"):
        one, four = (launch.decode_tile(arch, torch.bfloat16, 512, 64, rows) for rows in (16, 64))
        keys = []
        for tokens, tile in ((1, one), (4, four)):
            assert tile is not None
            work = schedule([Piece(0, 0, tokens, 32768, True)], 16, tile[:2], 128)
            keys.append(int((work.items[:, 5] - work.items[:, 4]).sum()))
        assert keys == [32768, 32768], arch


# N: the same bits whatever the batch (test_triton_invariant has the bits)


@pytest.mark.parametrize("requests", [1, 5, 9])
def test_N3_the_invariant_mode_runs_with_few_and_with_many_requests(requests):
    case = make_case([1, 70] + [1] * (requests - 1), [150, 70] + [20] * (requests - 1), batch_invariant=True)
    tier = tiers.get("triton")
    case.check(case.run(tier))
    assert tier.plan(case.need, case.batch).report["forms"] == ["mqa"] * (requests + 1)


# R: work and memory


def plan_on(arch: str, query_lens: list[int], seq_lens: list[int], monkeypatch, **fields: Any) -> tuple[Tier, Plan]:
    """A plan for a GPU that is not here, with all its lists on the CPU."""
    need = make_need(device="cpu", **{k: v for k, v in gpu(**fields).items() if k not in ("device", "arch")})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(absorbed, "processors", lambda device: 132)
    object.__setattr__(need, "arch", arch)
    tier = tiers.get("triton")
    return tier, tier.plan(need, make_batch(query_lens, seq_lens, need))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_R4_one_long_request_is_split_and_a_big_batch_is_not(arch, monkeypatch):
    real = {"dtype": torch.float32, "N": 8}
    _, alone = plan_on(arch, [1], [81920], monkeypatch, **real)
    assert alone.report["items"] > 64
    _, many = plan_on(arch, [1] * 64, [8192] * 64, monkeypatch, **real)
    assert 64 <= many.report["items"] <= 64 + 2 * 264
    for plan in (alone, many):
        for step in plan.steps.rounds:
            spans = step.items[:, 5] - step.items[:, 4]
            assert bool((spans > 0).all())
            assert int(step.merges[:, 4].min()) >= 1


@pytest.mark.parametrize("limit", [96 * 1024, 64 * 1024])
def test_R5_a_smaller_tile_is_chosen_for_less_shared_memory(limit, monkeypatch):
    usual = launch.decode_tile("sm_90", torch.bfloat16, 512, 64, 64)
    monkeypatch.setitem(SHARED_LIMIT, "sm_90", limit)
    for dtype in (torch.bfloat16, torch.float32):
        tile = launch.decode_tile("sm_90", dtype, 512, 64, 64)
        need = Need(**real_need(dtype))
        if tile is None:
            (found,) = tiers.get("triton").why_not(need)
            assert f"sm_90 gives a program {limit:,}" in found
        else:
            assert tiers.get("triton").why_not(need) == []
            assert launch.shared_bytes("sm_90", tile, dtype.itemsize, 512, 64) <= limit
            assert tile != usual


def real_need(dtype: torch.dtype) -> dict[str, Any]:
    sizes = dict(N=16, L=512, P=128, R=64, V=128, softmax_scale=0.1, page_size=64, dtype=dtype)
    return sizes | {"layout": FloatRows(512, 64, dtype), "device": "cuda:0", "arch": "sm_90"}


def test_R1_long_prompts_are_expanded_and_decode_is_absorbed(monkeypatch):
    for arch in ("sm_90", "gfx942"):
        _, plan = plan_on(arch, [8192, 1, 4], [8192, 8192, 8192], monkeypatch, dtype=torch.float32)
        assert plan.report["forms"] == ["mha", "mqa", "mqa"], arch


@pytest.mark.parametrize("form", ["auto", "mqa", "mha"])
def test_R2_memory_of_a_prefill_does_not_grow_with_its_context(form):
    found = []
    for context in (1000, 4000):
        need = make_need(device=DEVICE, page_size=16)
        tier = tiers.get("triton", form=form, max_workspace_tokens=512)
        found.append(tier.plan(need, make_batch([96], [context], need)).nbytes)
    # partial states of the absorbed form are one for each tile and program, whatever the keys
    assert found[1] <= 1.5 * found[0]


# Strides and shapes that a breaker found


@pytest.mark.parametrize("form", ["auto", "mqa", "mha"])
def test_F1_lists_of_a_batch_may_have_any_strides(form):
    case = make_case([2, 70], [9, 75])
    spread = torch.zeros(2 * case.batch.num_tokens, dtype=torch.int32, device=DEVICE)
    spread[::2] = case.batch.row_kv_lens
    table = case.batch.block_table.t().contiguous().t()
    case.batch = dataclasses.replace(case.batch, row_kv_lens=spread[::2], block_table=table)
    case.check(case.run("triton", form=form))


def test_A11_norm_weights_of_any_stride():
    config = preset("toy")
    weights = MLAWeights.random(config, 0, dtype=torch.float32)
    hidden = torch.randn(5, weights.W_DKV.shape[0], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    spread = torch.full((2 * weights.kv_norm.numel(),), float("nan"))
    spread[::2] = weights.kv_norm
    results = []
    for norm in (weights.kv_norm, spread[::2]):
        changed = dataclasses.replace(weights, kv_norm=norm)
        layer = MLALayer(config, changed, tiers.get("triton"), page_size=4).to(DEVICE)
        cache = layer.new_cache(4)
        cache.data.zero_()
        tables = {"page_size": 4, "num_pages": 4, "device": DEVICE}
        results.append(layer(hidden, cache, AttentionBatch.bottom_right([3, 2], [3, 2], [[2], [1]], **tables)))
    assert torch.equal(*results)


def test_a_float16_query_may_have_an_output_that_float16_cannot_hold():
    case = make_case([1], [5], dtype=torch.float16, out_dtype=torch.float32)
    case.up.W_UV.fill_(100.0)
    for key in case.keys:
        for part in key:
            part[:] = 200.0
    case.cache = fill_cache(case.need, case.batch, case.keys)
    state = case.run("triton")
    case.check(state)
    assert state.out.min() == 100 * 200 * case.need.L  # 640000, past 65504


def test_slots_are_one_list():
    need = make_need(device=DEVICE)
    cache = PagedLatentCache.new(CacheSpec(2, 4, need.layout, DEVICE))
    rows = torch.ones(6, need.L, device=DEVICE), torch.ones(6, need.R, device=DEVICE)
    for slots in (torch.arange(6, device=DEVICE).reshape(1, 6), torch.tensor(0, device=DEVICE)):
        with pytest.raises(ValueError, match=r"slot_mapping\.dim\(\)"):
            tiers.get("triton").write(cache, *rows, slots)


def test_the_inner_kernel_checks_its_tensors_and_fills_the_callers():
    case, tier = make_case([3], [9], lse=False), tiers.get("triton:mqa")
    plan, N, L = tier.plan(case.need, case.batch), case.need.N, case.need.L
    q_latent = torch.randn(3, N, L, device=DEVICE)
    out = AttentionState(torch.full((3, N, L), float("nan"), device=DEVICE), None)
    assert tier.attend_latent(q_latent, case.q.pe, case.cache, None, plan, out) is out
    assert not out.out.isnan().any()
    with pytest.raises(ValueError, match=r"q_latent\.shape"):
        tier.attend_latent(q_latent[:2], case.q.pe, case.cache, None, plan)
    with pytest.raises(ValueError, match=r"out\.out\.shape"):
        tier.attend_latent(q_latent, case.q.pe, case.cache, None, plan, AttentionState(out.out[:2], None))


def test_what_another_tier_prepared_is_refused_by_name():
    case = make_case([70], [75])
    tier, other = tiers.get("triton"), tiers.get("triton:mqa")
    plan = tier.plan(case.need, case.batch)
    with pytest.raises(ValueError, match="prepared: expected what triton prepares"):
        tier.attend(case.q, case.cache, other.prepare(case.up, case.need), plan)


def test_attend_refuses_gradients():
    case = make_case([1], [5])
    case.q = Query(case.q.nope.clone().requires_grad_(), case.q.pe)
    with pytest.raises(ValueError, match="requires_grad: expected no gradients through triton"):
        case.run("triton")


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter is wrong in bfloat16")
def test_the_interpreter_refuses_bfloat16_outputs_too():
    assert BF16 in tiers.get("triton").why_not(make_need(device=DEVICE, out_dtype=torch.bfloat16))
