"""Cases, suites and inputs: all that must be there is there, under a readable name, and is what its formula says.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from functools import cache

import pytest
import torch
from torch import Tensor

from mla.conformance import SPECS, Case, find, sample_rows, spec, suite
from mla.conformance.cases import DIMS, FAMILIES, MOST_ROUNDINGS, NEEDLES, SLOTS, roundings
from mla.conformance.inputs import Inputs, make_inputs, needle_position, shared_keys
from mla.conformance.specs import BESIDE, ORDERS, BatchSpec
from mla.conformance.suites import BY_PAGE, PAGES, full, possible, reaching
from mla.presets import PRESETS, preset

INF = float("inf")


# cases


def test_batches_of_the_field_have_their_lengths():
    totals = {n: (len(s.query_lens), sum(s.query_lens), sum(s.seq_lens)) for n, s in SPECS.items()}
    known = {
        "small_decode": (2, 2, 72),
        "small_prefill": (2, 16, 72),
        "mixed_small": (4, 12, 176),
        "medium_decode": (8, 8, 3840),
        "medium_prefill": (4, 64, 3840),
        "mixed_medium": (6, 24, 7168),
        "large_decode": (32, 32, 65536),
        "large_prefill": (8, 256, 32768),
        "single_decode": (1, 1, 1024),
        "single_prefill": (1, 64, 1024),
        "spec_decode_small": (4, 16, 1920),
        "spec_decode_medium": (6, 48, 7168),
        "chunked_context_prefill": (6, 88, 2280),
        "one_key": (4, 4, 4),
        "two_keys": (2, 3, 3),
        "edge_around_16": (3, 48, 48),
        "edge_mixed_16": (3, 24, 48),
        "edge_decode_64": (3, 3, 192),
        "edge_across_32": (1, 2, 33),
        "edge_tiny_1": (2, 4, 10),
    }
    assert {n: totals[n] for n in known} == known
    assert {s.page_size for s in SPECS.values() if s.edge} == set(PAGES)
    assert {q for s in SPECS.values() for q in s.query_lens} >= {0, 1, 2, 4, 8, 17}


@pytest.mark.parametrize("page", [16, 64, 128])
def test_every_layout_around_a_page_edge_is_there(page):
    half, met = page // 2, set()
    for s in SPECS.values():
        if s.edge and s.page_size == page:
            met.add((tuple(n - q for q, n in requests(s)), s.query_lens))
    assert met >= {
        ((0,), (page,)),
        ((0, 0, 0), (page - 1, page, page + 1)),
        ((page,), (2,)),
        ((half,), (half,)),
        ((page - 1,), (2,)),
        ((0, half, page), (page - 1, half, 1)),
        ((page - 2, page - 1, page), (1, 1, 1)),
        ((half - 1,), (1,)),
    }


def test_visible_keys_of_every_kind_of_mask():
    assert SPECS["two_keys"].visible() == [1, 1, 2]
    assert SPECS["zero_rows"].visible() == [64, 0, 64, 0]
    assert SPECS["full_mask"].visible() == [20] * 5 + [33] + [7] * 7
    assert SPECS["rank_some_rows"].visible() == [0, 1, 1, 3, 16, 17]
    assert spec("falling_bounds").visible() == [17, 5, 9, 11, 4]
    assert spec("2q2s5_1q1s3").visible() == [4, 5, 4, 5, 3]


@pytest.mark.parametrize("name", ["smoke", "full", "large"])
def test_ids_are_readable_unique_and_give_the_case_back(name):
    cases = suite(name)
    assert len({c.id for c in cases}) == len(cases)
    assert all(find(c.id) == c for c in cases)
    example = Case(SPECS["mixed_small"], dtype="f16", family="needle_last", slots="extended", seed=3, lse=False)
    assert example.id == "toy-mixed_small-f16-rows_f16-needle_last-extended-p16-s3-nolse"
    unusual = dataclasses.replace(example, cache="layers", plan="capped", repeats=50)
    assert unusual.id == "toy-mixed_small-f16-rows_f16-needle_last-extended-p16-s3-layers-capped-x50-nolse"
    assert find(unusual.id) == unusual


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("toy-mixed_small-f16", "case"),
        ("toy-mixd_small-f16-rows_f16-randn-extended-p16-s3", "batch"),
        ("toy-mixed_small-f16-rows_f16-randm-extended-p16-s3", "family"),
        ("toy-mixed_small-f8-rows_f16-randn-extended-p16-s3", "dtype"),
        ("toys-mixed_small-f16-rows_f16-randn-extended-p16-s3", "case"),
        ("toy-mixed_small-f16-rows_f16-randn-extended-16-s3-", "case"),
        ("toy-mixed_small-f16-rows_f16-randn-extended-p0-s3", "case"),
        ("toy-mixed_small-f16-rows_f16-randn-extended-p²-s3", "case"),
        ("toy-mixed_small-f16-rows_f16-randn-extended-p16-s³", "case"),
        ("toy-mixed_small-f16-rows_f16-randn-extended-p16-s3-x²", "case"),
        ("toy-mixed_small-f16-rows_f16-randn-extended-p16-s3-capped-layers", "case"),
        ("toy-mixed_small-f16-rows_f16-randn-extended-p16-s3-plain", "case"),
        ("toy-mixed_small-f16-rows_f16-randn-extended-p16-s3-x0", "case"),
    ],
)
def test_an_unknown_id_names_the_part(text, part):
    with pytest.raises(ValueError, match=rf"^{part}: expected"):
        find(text)
    with pytest.raises(ValueError, match=r"^suite: expected one of smoke, full, large"):
        suite("fool")


@pytest.mark.parametrize(("field", "wrong"), [("cache", "layer"), ("plan", "reused"), ("slots", "prefix")])
def test_an_unknown_axis_is_named(field, wrong):
    with pytest.raises(ValueError, match=rf"^{field}: expected one of .*'{wrong}'"):
        Case(SPECS["mixed_small"], **{field: wrong})


def grid(case: Case) -> dict[str, object]:
    """The fields that `full` pairs, of one case."""
    layout = case.batch.name.rsplit("_", 1)[0] if case.batch.edge else case.batch.name
    return {
        "batch": layout,
        "family": "needle" if case.family in NEEDLES else case.family,
        "dims": case.dims,
        "dtype": case.dtype,
        "layout": case.layout == f"rows_{case.dtype}",
        "slots": case.slots,
        "page_size": case.page_size,
        "cache": case.cache,
        "plan": case.plan,
    }


def test_full_covers_every_possible_pair_of_two_fields_in_at_most_400_cases():
    cases = suite("full")
    rows = [grid(c) for c in cases if c.batch.name in SPECS and not c.repeats and c not in reaching()]
    missing = []
    for a, b in itertools.combinations(rows[0], 2):
        met = {(r[a], r[b]) for r in rows}
        for x, y in itertools.product({r[a] for r in rows}, {r[b] for r in rows}):
            if (x, y) not in met and possible({a: x, b: y}):
                missing.append((a, x, b, y))
    assert not missing
    assert all(len(full(seed)) - len(reaching()) <= 400 for seed in range(1, 4))
    assert len(cases) <= 400
    pages = {*PAGES, 3, 48, 100, 256}
    for name, values in (("dims", set(DIMS.values())), ("family", set(FAMILIES)), ("page_size", pages)):
        assert {getattr(c, name) for c in cases} == values
    assert {c.batch.name for c in cases} >= set(SPECS)
    assert sum(not c.lse for c in cases) >= len(cases) // 10


def test_suites_are_the_same_in_every_process():
    code = "from mla.conformance import suite; print(*(c.id for c in suite('full') + suite('smoke')))"
    ids = []
    for seed in ("1", "2"):  # of the order of sets of strings
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ids.append(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout)
    assert ids[0] == ids[1]
    assert ids[0].split() == [c.id for c in suite("full") + suite("smoke")]


def test_what_cannot_be_paired_is_what_makes_no_sense():
    heavy, toy = DIMS["v3_n128"], DIMS["toy"]
    assert not possible({"batch": "edge_fill", "page_size": 32})  # made for pages of 16, 64 and 128
    assert not possible({"batch": "large_prefill", "dims": heavy})
    assert not possible({"batch": "single_decode", "slots": "shared"})
    assert not possible({"batch": "edge_around", "slots": "shared", "page_size": 16})  # nobody has a prefix
    assert not possible({"batch": "no_requests", "family": "peaked"})
    assert possible({"batch": "large_prefill", "dims": toy, "slots": "shared", "page_size": 128})
    assert possible({"batch": "verify_4", "dims": heavy})
    assert set(BY_PAGE["edge_mixed"]) == {16, 64, 128}


def test_smoke_has_a_needle_and_another_family_in_every_batch_but_the_long_ones():
    cases = [c for c in suite("smoke") if c.batch.name in SPECS and not c.repeats and c not in reaching()]
    by_batch = {name: {c.family for c in cases if c.batch.name == name} for name in {c.batch.name for c in cases}}
    assert all(len(f & set(NEEDLES)) == 1 and len(f) == 2 for f in by_batch.values())
    left_out = set(SPECS) - set(by_batch)
    assert all(sum(SPECS[n].seq_lens) > 300 for n in left_out)
    assert {n for n, s in SPECS.items() if s.edge} <= set(by_batch)


# every thing that the kit promises is in a suite, counted


@cache
def both() -> list[Case]:
    return suite("smoke") + suite("full")


def requests(batch: BatchSpec) -> tuple[tuple[int, int], ...]:
    return tuple(zip(batch.query_lens, batch.seq_lens, strict=True))


def test_every_edge_length_of_every_page_decoded_and_as_a_prompt():
    for page in PAGES:
        met = {pair for c in both() if c.page_size == page for pair in requests(c.batch)}
        lengths = {0, 1, page - 1, page, page + 1}
        assert {(1, n) for n in lengths} <= met, page
        assert {(n, n) for n in lengths} <= met, page


def test_every_number_of_heads_meets_every_number_of_new_tokens():
    met = {(c.dims.N, q) for c in both() for q in c.batch.query_lens}
    heads, tokens = (1, 3, 5, 6, 12, 16, 20, 63, 64, 96, 128), (1, 2, 4, 8, 17)
    few = {(n, q) for n, q in itertools.product(heads, tokens) if not (n >= 63 and q == 8)}
    assert few <= met
    # in the widths of released models too, where 63 and more heads come with short batches
    released = {(c.dims.N, q) for c in both() if not c.dims.name.startswith("toy") for q in c.batch.query_lens}
    assert {(n, q) for n, q in few if n != 4} <= released


def test_every_released_size_and_every_width_that_a_general_tier_must_take():
    sizes = {(c.dims.L, c.dims.P, c.dims.R, c.dims.V) for c in both()}
    models = [preset(name) for name in PRESETS if name != "toy"]
    published = {(m.kv_lora_rank, m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim) for m in models}
    assert {s for s in published if s[0] >= 256} <= sizes
    assert len({s for s in published if s[0] >= 256}) == 5
    assert {L + R for L, P, R, V in sizes} >= {288, 320, 512, 576}
    for column, values in ((1, {64, 128, 192}), (2, {0, 32, 64}), (3, {64, 128, 256})):
        assert {s[column] for s in sizes} >= values


def test_a_mixed_batch_comes_in_every_order_in_both_suites():
    mixed = {(1, 33), (2, 18), (17, 17), (5, 40)}
    for name in ("smoke", "full"):
        batches = {requests(c.batch) for c in suite(name)}
        assert {b for b in batches if set(b) == mixed} == set(itertools.permutations(mixed))
    assert len(ORDERS) == 24
    assert spec("order_pcvd").query_lens == (17, 5, 2, 1)


@pytest.mark.parametrize("name", ["smoke", "full"])
def test_each_suite_reaches_past_every_limit_that_a_kernel_could_have(name):
    cases = suite(name)
    assert max(len(c.batch.query_lens) for c in cases) == 140
    assert max(max(c.batch.seq_lens, default=0) for c in cases) == 4100
    assert max(max(c.batch.query_lens, default=0) for c in cases) == max(c.batch.num_tokens for c in cases) == 600
    assert {c.page_size for c in cases} >= {*PAGES, 3, 48, 100, 256}
    assert {c.dims.N for c in cases if (c.dtype, c.layout) == ("bf16", "rows_f16")} == {8, 32}
    assert any(c.batch.mask == "full" and c.dtype == "f16" and c.dims.N == 12 for c in cases)
    assert any(a > b and not c.lse for c in cases for a, b in itertools.pairwise(c.batch.row_kv_lens or ()))


@pytest.mark.parametrize("name", ["smoke", "full"])
def test_shared_pages_wrapped_caches_reused_plans_repeats_and_padding_are_in_each_suite(name):
    cases = suite(name)
    count = lambda test: sum(map(test, cases))
    assert count(lambda c: c.slots == "shared" and any(shared_keys(c)[1])) >= 10
    assert count(lambda c: c.slots == "shared" and not any(shared_keys(c)[1])) == 0
    for pair in itertools.product(("plain", "layers", "strided"), ("fresh", "refilled", "capped")):
        assert count(lambda c: (c.cache, c.plan) == pair) >= 10, pair  # noqa: B023
    assert count(lambda c: c.batch.pad_tokens > 0) >= 5
    assert {c.repeats for c in cases} == {0, 50}
    assert {c.dtype for c in cases if c.repeats} == {"f32", "bf16", "f16"}


def test_the_earlier_batch_of_a_reused_plan_is_small_or_longer_in_every_way():
    assert Case(SPECS["mixed_small"]).earlier is None
    assert Case(SPECS["mixed_small"], plan="refilled").earlier.batch.seq_lens == (9, 20, 5)
    for batch in (*SPECS.values(), *BESIDE.values()):
        case = Case(batch, plan="capped")
        before, capacity = case.earlier.batch, case.need().capacity
        assert len(before.query_lens) == capacity.max_requests > len(batch.query_lens)
        assert before.num_tokens == capacity.max_tokens > batch.num_tokens
        assert max(before.seq_lens) == capacity.max_seq_len > max(batch.seq_lens, default=0)
        assert max(before.query_lens) == capacity.max_query_len > max(batch.query_lens, default=0)
        assert before.mask == batch.mask
        assert len(before.visible()) == before.num_tokens
        assert case.earlier.plan == "fresh"


def test_sampled_rows_keep_the_ends_of_every_request_and_the_limit():
    case = Case(SPECS["large_prefill"])  # 8 requests of 32 rows
    rows, heads = sample_rows(case)
    assert heads is None
    assert set(rows) >= {r for b in range(8) for r in (32 * b, 32 * b + 31)}
    assert roundings(case, rows) <= MOST_ROUNDINGS < roundings(case)
    more = next(r for r in range(256) if r not in rows)
    assert roundings(case, [*rows, more]) > MOST_ROUNDINGS - 16 * 4096 * 3 * 2
    assert sample_rows(case) == (rows, heads)
    assert sample_rows(dataclasses.replace(case, seed=1))[0] != rows
    assert roundings(case, [0, 31]) == 16 * 4096 * 3 * (12 + 10 + 2 * 2)  # K S N (P + V + 2 rows), one request


def test_when_rows_alone_are_too_many_fewer_heads_are_compared():
    case = Case(SPECS["large_decode"], DIMS["v3_n16"], page_size=64)
    rows, heads = sample_rows(case, 16 * 2048 * 32 * 5 * 258)
    assert rows == list(range(32))
    assert heads is not None
    assert len(heads) == 5
    assert heads[-1] == 15
    assert len(sample_rows(case, 1)[1]) == 2
    padded = Case(SPECS["padded_requests"])
    assert set(sample_rows(padded, 1000)[0]) >= {9, 10, 11}


# inputs


def logits_of(inputs: Inputs, case: Case, b: int) -> Tensor:
    """Scaled scores (rows, N, S) of request b, hidden keys at -inf, from the rounded inputs in float64."""
    first = sum(case.batch.query_lens[:b])
    rows = slice(first, first + case.batch.query_lens[b])
    kv_c, k_pe = (x.double() for x in inputs.keys[b])
    q_latent = torch.einsum("tnp,lnp->tnl", inputs.q.nope[rows].double(), inputs.up.W_UK.double())
    scores = torch.einsum("tnl,sl->tns", q_latent, kv_c) + torch.einsum("tnr,sr->tns", inputs.q.pe[rows].double(), k_pe)
    hidden = torch.arange(kv_c.shape[0]) >= inputs.batch.row_kv_lens[rows, None, None]
    return (scores * case.dims.softmax_scale).masked_fill(hidden, -INF)


@pytest.mark.parametrize("family", NEEDLES)
@pytest.mark.parametrize("dims", [d for d in DIMS.values() if d.N * d.L < 2**13], ids=lambda d: d.name)
def test_a_needle_holds_e_of_1_plus_e_in_every_head_of_every_row_that_sees_it(family, dims):
    case = Case(SPECS["mixed_prefill_between"], dims, "f32", family=family, page_size=4, seed=2)
    inputs, met = make_inputs(case), 0
    for b, (new, S) in enumerate(zip(case.batch.query_lens, case.batch.seq_lens, strict=True)):
        j, weights = needle_position(case, b), logits_of(inputs, case, b).softmax(-1)
        for t in range(new):
            seen = S - new + t + 1
            if seen > max(j, 1):
                met += 1
                assert (weights[t, :, j] - math.e / (1 + math.e)).abs().max() <= 1e-3
    assert met >= 5


@pytest.mark.parametrize("family", NEEDLES)
def test_a_needle_holds_as_much_where_the_needles_of_others_are_in_the_same_pages(family):
    case = Case(SPECS["spec_decode_small"], dtype="f32", family=family, slots="shared")
    inputs = make_inputs(case)
    assert shared_keys(case) == (3, [112, 240, 496, 496])
    for b in range(4):
        j, weights = needle_position(case, b), logits_of(inputs, case, b).softmax(-1)
        seen = inputs.batch.row_kv_lens[4 * b : 4 * b + 4] > j
        assert (weights[seen][..., j] - math.e / (1 + math.e)).abs().max() <= 1e-3 if seen.any() else True


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_pages_hold_the_same_keys_and_are_written_by_nobody(family):
    case = Case(SPECS["chunked_context_prefill"], dtype="f32", family=family, slots="shared", page_size=16)
    inputs = make_inputs(case)
    # prefixes 1536, 512, 0, 64, 80, 0: all that reaches over a page is shared with the longest
    lender, shared = shared_keys(case)
    assert (lender, shared) == (0, [512, 512, 0, 64, 80, 0])
    table, written = inputs.batch.block_table, set((inputs.batch.slot_mapping // 16).tolist())
    for b, n in enumerate(shared):
        assert torch.equal(table[b, : n // 16], table[0, : n // 16])
        assert not set(table[b, : n // 16].tolist()) & written
        for mine, lent in zip(inputs.keys[b], inputs.keys[0], strict=True):
            assert torch.equal(mine[:n], lent[:n])
    assert table[1, 32] != table[0, 32]
    own = [p for b, s in enumerate(case.batch.seq_lens) for p in table[b, shared[b] // 16 : -(-s // 16)].tolist()]
    assert len(set(own)) == len(own)
    assert inputs.num_pages > max(own)


def test_needles_are_where_the_family_says():
    case = lambda family, seed=0: Case(SPECS["medium_decode"], family=family, page_size=16, seed=seed)
    page = lambda family, b, seed=0: needle_position(case(family, seed), b) // 16
    keys = SPECS["medium_decode"].seq_lens
    for b in range(8):
        pages = keys[b] // 16
        assert page("needle", b, 3) == (7 * b + 3) % pages
        assert (page("needle_first", b), page("needle_middle", b), page("needle_last", b)) == (0, pages // 2, pages - 1)
        assert needle_position(case("needle_end"), b) == keys[b] - 1
    assert needle_position(case("randn"), 0) is None
    assert needle_position(Case(SPECS["zero_rows"], family="needle"), 1) is None


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_families_are_what_their_formulas_say(dtype):
    make = lambda family: Case(SPECS["medium_prefill"], dtype=dtype, family=family)
    for family, size in (("randn", 1.0), ("peaked", 8.0)):
        inputs = make_inputs(make(family))
        for x, deviation in (
            (inputs.q.nope, size),
            (inputs.q.pe, size),
            (inputs.keys[3][0], 1.0),
            (inputs.keys[3][1], 1.0),
        ):
            # the deviation of n normal numbers is known to 1 / sqrt(2 n)
            assert float(x.double().std()) == pytest.approx(deviation, rel=6 / (2 * x.numel()) ** 0.5)
    spread = {f: logits_of(make_inputs(make(f)), make(f), 3)[-1] for f in ("equal_keys", "large_logits")}
    assert float((spread["equal_keys"] - spread["equal_keys"][:, :1]).abs().max()) <= 1e-12
    centre = spread["large_logits"].mean(-1)
    assert centre.sign().tolist() == [1, -1, 1]
    # beside +-200 there is q's own part: 1.874 times a normal number
    assert (centre.abs() - 200).abs().max() <= 6 * 1.874


def test_inputs_are_the_same_each_time_and_others_for_another_seed():
    case = Case(SPECS["mixed_prefill_between"], family="peaked")
    a, b = make_inputs(case), make_inputs(case)
    for (name, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), name
        assert x.data_ptr() != y.data_ptr() or x.numel() == 0
    other = make_inputs(dataclasses.replace(case, seed=1))
    assert not torch.equal(a.q.nope.nan_to_num(7.0), other.q.nope.nan_to_num(7.0))


def test_values_are_rounded_to_the_tested_dtype_and_parts_are_views():
    shared = lambda a, b: a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    met = []
    for seed in range(60):
        inputs = make_inputs(Case(SPECS["mixed_small"], dtype="bf16", seed=seed))
        assert {x.dtype for _, x in inputs.tensors() if x.is_floating_point()} == {torch.bfloat16}
        assert shared(inputs.new_kv_c, inputs.new_k_pe)
        assert not any(x.is_contiguous() for x in (*inputs.q, *inputs.up))
        for a, b in (inputs.q, inputs.up):
            assert shared(a, b) == (a.stride() == b.stride())
        met.append((shared(*inputs.q), shared(*inputs.up), inputs.q.nope.stride(2), inputs.q.pe.stride(2)))
    # draws of 60 with chance p have mean 60 p and deviation sqrt(60 p (1 - p)); the bounds are three of these
    chances = {(False, True, 1, 1): 3 / 9, (True, False, 1, 1): 3 / 9, (True, True, 1, 1): 1 / 9}
    chances |= {(False, True, 2, 1): 1 / 9, (False, True, 1, 2): 1 / 9}
    assert set(met) == set(chances)
    assert all(abs(met.count(x) - 60 * p) <= 3 * (60 * p * (1 - p)) ** 0.5 for x, p in chances.items())


def test_a_quarter_of_the_block_tables_is_just_as_wide_as_the_longest_request():
    tables = [make_inputs(Case(SPECS["mixed_small"], seed=seed)).batch.block_table for seed in range(60)]
    widths = [t.shape[1] for t in tables]  # 56 keys: 4 pages of 16
    assert set(widths) == {4, 6}
    assert 5 <= widths.count(4) <= 25  # mean 15, deviation 3.4


@pytest.mark.parametrize("slots", sorted({*SLOTS} - {"shared"}))
@pytest.mark.parametrize("page", [1, 16])
def test_slot_layouts_give_each_page_to_one_request(slots, page):
    case = Case(SPECS["chunked_context_prefill"], slots=slots, page_size=page)
    inputs = make_inputs(case)
    counts = [-(-s // page) for s in case.batch.seq_lens]
    tables = [inputs.batch.block_table[b, :n].tolist() for b, n in enumerate(counts)]
    used = [p for table in tables for p in table]
    assert len(set(used)) == len(used) < inputs.num_pages
    assert all(0 <= p < inputs.num_pages for p in used)
    steps = [[b - a for a, b in itertools.pairwise(t)] for t in tables if len(t) > 5]
    if slots == "contiguous":
        assert all(s == 1 for step in steps for s in step)
    elif slots == "interleaved":
        assert all(step[0] > 1 and min(step) >= 1 for step in steps)
    else:
        assert all(min(step) < 0 for step in steps)


def test_queries_are_nan_exactly_where_a_row_sees_no_key():
    for name in ("zero_rows_prefill", "rank_some_rows", "padded_tail", "all_rows_empty"):
        inputs = make_inputs(Case(SPECS[name]))
        for part in inputs.q:
            assert torch.equal(part.isnan().all(-1).all(-1), inputs.batch.row_kv_lens == 0)
            assert torch.equal(part.isnan().any(-1).any(-1), inputs.batch.row_kv_lens == 0)


def test_old_rows_and_new_rows_make_up_all_keys():
    case = Case(SPECS["slot_minus_one"])  # new tokens 4, 1, 6; the first two rows and rows 4 to 6 are not written
    inputs = make_inputs(case)
    assert inputs.batch.slot_mapping.tolist()[:7] == [-1, -1, *inputs.batch.slot_mapping.tolist()[2:4], -1, -1, -1]
    assert [h.tolist()[-2:] for h in inputs.history] == [[32, 33], [18, 19], [0, 1]]
    assert [len(h) for h in inputs.history] == [34, 20, 2]
    kv_c = inputs.keys[0][0]
    assert torch.equal(inputs.new_kv_c[:4], kv_c[32:36])
