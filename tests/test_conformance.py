"""The conformance kit itself: cases and inputs are what they say, planted faults are rejected, correct tiers are not.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from every_tier import every_tier
from torch import Tensor

import tiers
from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.conformance import SPECS, Case, check, find, run_case, sample_rows, spec, suite, summary
from mla.conformance.cases import DIMS, FAMILIES, MOST_ROUNDINGS, NEEDLES, SLOTS, TOY, Dims, roundings
from mla.conformance.inputs import ABSURD_PAGES, Inputs, make_inputs, needle_position
from mla.conformance.runner import truth
from mla.conformance.suites import PAGES, WIDE
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Tier

INF = float("inf")

# a few cases that hold everything: decode, prefill and verification, empty and padded rows, pages of 1, 16 and 64
CASES = [
    Case(SPECS[batch], TOY, dtype, "", family, SLOTS[i % 4], page)
    for i, (batch, dtype, family, page) in enumerate(
        [
            ("mixed_small", "bf16", "needle_last", 16),
            ("mixed_small", "f16", "needle_end", 4),
            ("mixed_prefill_between", "bf16", "peaked", 16),
            ("query_17", "f16", "needle", 64),
            ("zero_rows_prefill", "bf16", "needle_first", 16),
            ("padded_requests", "f32", "large_logits", 16),
            ("edge_mixed_16", "f16", "equal_keys", 16),
            ("rank_some_rows", "bf16", "randn", 16),
            ("verify_4", "f32", "randn", 1),
            ("two_keys", "f16", "randn", 16),
        ]
    )
]


# planted faults: one kernel with a loop over pages and an online softmax, and what may be wrong with it


def kernel(
    q: Query,
    cache: PagedLatentCache,
    batch: AttentionBatch,
    up: UpProjection,
    need: Need,
    *,
    scale: Callable[[Need], float] = lambda need: need.softmax_scale,
    bound: Callable[..., Tensor] = lambda visible, new, S: visible,
    pages: Callable[[int], list[int]] = lambda count: list(range(count)),
    values: Callable[[Tensor, Need], Tensor] = lambda rows, need: rows[..., : need.L],
    read: Callable[[Tensor, Tensor], Tensor] = lambda rows, hidden: rows.masked_fill(hidden, 0.0),
    score: Callable[[Tensor], Tensor] = lambda scores: scores,
    rescale: Callable[[Tensor], Tensor] = lambda shrink: shrink,
    finish: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda out, lse: (out, lse),
) -> AttentionState:
    """Absorbed attention, out (T, N, V) and lse (T, N), page by page; each argument is one place for a fault."""
    wide, page = need.compute_dtype, need.page_size
    state = AttentionState.empty(batch.num_tokens, need.N, need.V, dtype=wide, device=need.device)
    q_latent = torch.einsum("tnp,lnp->tnl", q.nope.to(wide), up.W_UK.to(wide))
    query = torch.cat([q_latent, q.pe.to(wide)], -1) * scale(need)
    first = 0
    for b, (new, S) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        mine, seen = slice(first, first + new), bound(batch.row_kv_lens[first : first + new], new, S)
        top = torch.full((new, need.N, 1), -INF, dtype=wide)
        total, acc = torch.zeros_like(top), torch.zeros(new, need.N, need.L, dtype=wide)
        for p in pages(-(-S // page)):
            at = torch.arange(p * page, (p + 1) * page)
            rows = read(cache.data[batch.block_table[b, p].long()].to(wide), (at >= S)[:, None])
            hidden = at >= seen[:, None, None]
            scores = score(query[mine] @ rows.T).masked_fill(hidden, -INF)
            peak = torch.maximum(top, scores.amax(-1, keepdim=True))
            base = peak.masked_fill(peak == -INF, 0.0)
            weights, shrink = torch.exp(scores - base), rescale(torch.exp(top - base))
            total, acc = total * shrink + weights.sum(-1, keepdim=True), acc * shrink + weights @ values(rows, need)
            top = peak
        latent = torch.where(total > 0, acc / total, 0.0)
        state.out[mine] = torch.einsum("tnl,lnv->tnv", latent, up.W_UV.to(wide))
        state.lse[mine] = (top + total.log())[..., 0]
        first += new
    return AttentionState(*finish(state.out, state.lse))


def top_left(visible: Tensor, new: int, S: int) -> Tensor:
    return torch.where(visible > 0, torch.arange(new) + 1, 0)


def plus_infinity(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse.masked_fill(lse == -INF, INF)


KERNEL_FAULTS: dict[str, dict[str, Callable]] = {
    "scale of the latent width": {"scale": lambda need: (need.L + need.R) ** -0.5},
    "scale without mscale": {"scale": lambda need: (need.P + need.R) ** -0.5},
    "scale 1 % off": {"scale": lambda need: need.softmax_scale * 1.01},
    "base-2 LSE": {"finish": lambda out, lse: (out, lse / math.log(2))},
    "LSE of zero": {"finish": lambda out, lse: (out, torch.zeros_like(lse))},
    "dropped last key": {"bound": lambda visible, new, S: (visible - 1).clamp(min=0)},
    "dropped first page": {"pages": lambda count: list(range(count))[1:]},
    "dropped last page": {"pages": lambda count: list(range(max(min(count, 1), count - 1)))},
    "a page read twice": {"pages": lambda count: [*range(count), *range(count)][: count + 1 if count else 0]},
    "top-left causal": {"bound": top_left},
    "no mask": {"bound": lambda visible, new, S: torch.where(visible > 0, S, 0)},
    "one key too many": {"bound": lambda visible, new, S: torch.where(visible > 0, visible + 1, 0).clamp(max=S)},
    "values from the wrong columns": {"values": lambda rows, need: rows[..., need.R :]},
    "zeros": {"finish": lambda out, lse: (out * 0, lse)},
    "head off by one": {"finish": lambda out, lse: (out.roll(1, 1), lse)},
    "LSE of the wrong head": {"finish": lambda out, lse: (out, lse.roll(1, 1))},
    "weights zeroed but not the rows": {"read": lambda rows, hidden: rows},
    "scores in 16 bits": {"score": lambda scores: scores.to(torch.bfloat16).float()},
    "softmax without rescaling": {"rescale": torch.ones_like},
    "+inf for empty rows": {"finish": plus_infinity},
    "padding rows not zero": {"finish": lambda out, lse: (torch.where(lse[..., None] == -INF, 1.0, out), lse)},
    "NaN for empty rows": {"finish": lambda out, lse: (torch.where(lse[..., None] == -INF, float("nan"), out), lse)},
    "rows one off": {"finish": lambda out, lse: (out.roll(1, 0), lse)},
    "one head dropped": {"finish": lambda out, lse: (out[:, :-1], lse)},
}


class Wrapped(Tier):
    """A correct tier whose steps a fault may replace."""

    def __init__(self, tier: Tier | None = None, **steps: Callable) -> None:
        self.tier, self.steps, self.name = tier or tiers.get("template"), steps, "wrapped"

    def why_not(self, need: Need) -> list[str]:
        return self.tier.why_not(need)

    def write(self, cache, kv_c, k_pe, slot_mapping) -> None:
        self.steps.get("write", self.tier.write)(cache, kv_c, k_pe, slot_mapping)

    def plan(self, need, batch, into=None):
        return self.tier.plan(need, batch, into)

    def prepare(self, up, need):
        return self.tier.prepare(up, need)

    def attend(self, q, cache, prepared, plan, out=None) -> AttentionState:
        state = self.tier.attend(q, cache, prepared, plan, out)
        return self.steps["attend"](state, q, cache, prepared, plan, out) if "attend" in self.steps else state


def doubled(state, q, cache, prepared, plan, out):
    return state if out is not None else AttentionState(state.out.double(), state.lse)


def lse_in_16_bits(state, q, cache, prepared, plan, out):
    return state if out is not None or state.lse is None else AttentionState(state.out, state.lse.to(q.nope.dtype))


def writes_past_the_end(state, q, cache, prepared, plan, out):
    if out is not None:
        T, N, V = out.out.shape
        out.out.as_strided((T + 1, N, V), out.out.stride())[T] = 0.0
    return state


def ignores_out(state, q, cache, prepared, plan, out):
    return AttentionState(state.out.clone(), state.lse)


class Scratch:
    """Returns the same memory every time."""

    def __call__(self, state, q, cache, prepared, plan, out):
        if out is None:
            self.held = state
        elif self.held.out.shape == state.out.shape:
            self.held.out.zero_()
        return state


def changes(what: Callable) -> Callable:
    def attend(state, q, cache, prepared, plan, out):
        x = what(q, cache, prepared, plan)
        x.copy_(torch.where(torch.isfinite(x), x + 1, x))
        return state

    return attend


def writes_padding(cache, kv_c, k_pe, slot_mapping) -> None:
    rows = torch.cat([kv_c, k_pe], -1)[: slot_mapping.shape[0]]
    cache.data.view(-1, rows.shape[1])[slot_mapping] = rows.to(cache.data.dtype)  # -1 is the last slot


def rope_first(cache, kv_c, k_pe, slot_mapping) -> None:
    keep = slot_mapping >= 0
    rows = torch.cat([k_pe, kv_c], -1)[: slot_mapping.shape[0]][keep]
    cache.data.view(-1, rows.shape[1])[slot_mapping[keep]] = rows.to(cache.data.dtype)


def twice(cache, kv_c, k_pe, slot_mapping) -> None:
    cache.write(kv_c, k_pe, slot_mapping)
    after = slot_mapping[(slot_mapping >= 0) & (slot_mapping < cache.data[..., 0].numel() - 1)] + 1
    cache.write(kv_c, k_pe, after)


WRAPPED_FAULTS: dict[str, tuple[Tier, set[str]]] = {
    "out in float64": (Wrapped(attend=doubled), {"wrong_dtype"}),
    "LSE in 16 bits": (Wrapped(attend=lse_in_16_bits), {"wrong_dtype"}),
    "writes past the end of out": (Wrapped(attend=writes_past_the_end), {"mismatch"}),
    "ignores out": (Wrapped(attend=ignores_out), {"mismatch"}),
    "returns scratch": (Wrapped(attend=Scratch()), {"mismatch"}),
    "changes the query": (Wrapped(attend=changes(lambda q, cache, prepared, plan: q.nope)), {"mismatch"}),
    "changes the weights": (Wrapped(attend=changes(lambda q, cache, prepared, plan: prepared.up.W_UV)), {"mismatch"}),
    "changes the cache": (Wrapped(attend=changes(lambda q, cache, prepared, plan: cache.data)), {"mismatch"}),
    "changes the batch": (Wrapped(attend=changes(lambda q, cache, prepared, plan: plan.batch.seq_lens)), {"mismatch"}),
    "padding written to the last slot": (Wrapped(write=writes_padding), {"mismatch"}),
    "rope part written first": (Wrapped(write=rope_first), {"mismatch"}),
    "rows written twice": (Wrapped(write=twice), {"mismatch"}),
    "nothing written": (Wrapped(write=lambda *_: None), {"mismatch"}),
}


def statuses(tier: Tier) -> set[str]:
    return {r.status for r in check(tier, CASES)} - {"ok"}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_a_planted_fault_of_a_kernel_is_rejected(fault):
    broken = tiers.from_attend(fault, partial(kernel, **KERNEL_FAULTS[fault]))
    found = statuses(broken)
    expected = {
        "weights zeroed but not the rows": {"not_finite"},
        "NaN for empty rows": {"not_finite"},
        "+inf for empty rows": {"not_finite"},
        "one head dropped": {"raised"},  # the adapter's own check
    }
    assert found == expected.get(fault, {"mismatch"})


@pytest.mark.parametrize("fault", WRAPPED_FAULTS)
def test_a_planted_fault_around_a_right_kernel_is_rejected(fault):
    tier, expected = WRAPPED_FAULTS[fault]
    assert statuses(tier) == expected


def test_a_result_of_another_shape_is_a_row_of_its_own():
    cut = Wrapped(attend=lambda state, *_: AttentionState(state.out[:, :-1], state.lse))
    assert {r.status for r in check(cut, CASES)} == {"wrong_shape"}


def test_an_lse_that_nobody_asked_for_and_one_that_is_missing():
    silent = dataclasses.replace(CASES[0], lse=False)
    more = Wrapped(attend=lambda state, *_: AttentionState(state.out, state.out[..., 0].float()))
    less = Wrapped(attend=lambda state, *_: AttentionState(state.out, None))
    assert run_case(more, silent).status == "wrong_shape"
    assert run_case(less, CASES[0]).status == "wrong_shape"
    assert run_case(tiers.get("paged"), silent).ok


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_without_a_fault_and_every_tier_are_accepted(seed):
    right = {"kernel": tiers.from_attend("kernel", kernel), "wrapped": Wrapped(), **every_tier(64, 600)}
    for case in CASES:
        for name, tier in right.items():
            result = run_case(tier, dataclasses.replace(case, seed=seed))
            assert result.ok, (name, result)


def test_widths_of_one_are_no_trouble():
    for dims in (Dims("ones", 1, 1, 1, 0, 1), Dims("narrow", 1, 8, 2, 2, 1)):
        for case in CASES[:5]:
            result = run_case(tiers.get("paged"), dataclasses.replace(case, dims=dims))
            assert result.ok, result


def test_uninitialised_memory_is_not_zero_by_chance():
    def forgets_padding(q, cache, batch, up, need):
        state = kernel(q, cache, batch, up, need)
        whole = AttentionState(torch.empty_like(state.out), state.lse)
        real = sum(batch.query_lens_host)
        whole.out[:real] = state.out[:real]
        return whole

    found = {r.case.batch.name: r.status for r in check(tiers.from_attend("forgets padding", forgets_padding), CASES)}
    assert found["padded_requests"] == "not_finite"
    assert found["mixed_small"] == "ok"


# what a result says


def test_a_result_says_where_and_how_much():
    def wrong_in_one_place(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        out[7, 2] += 1.0
        return out, lse

    case = Case(SPECS["mixed_small"], family="randn")  # new tokens 1, 1, 5, 5: row 7 is token 0 of request 3
    result = run_case(tiers.from_attend("x", partial(kernel, finish=wrong_in_one_place)), case)
    where = result.where
    assert (result.status, where.metric, where.row, where.request, where.token, where.head) == (
        "mismatch",
        "out",
        7,
        3,
        0,
        2,
    )
    made, _ = truth(case)
    assert result.used_out == pytest.approx(1.0 / float(made.out_limit[7, 2]), rel=0.05)
    assert result.used_lse <= 1
    assert result.record()["case"] == case.id


def test_refused_and_raised_have_rows_and_never_look_like_passed():
    refuses = tiers.from_attend(
        "no", kernel, lambda need: ["page_size = 16 is not taken; use 64."] if need.page_size == 16 else []
    )

    def raises(*_):
        raise RuntimeError("no kernel image")

    some = list(check(refuses, CASES))
    assert {r.status for r in some if r.case.page_size == 16} == {"refused"}
    assert {r.status for r in some if r.case.page_size != 16} == {"ok"}
    assert next(r for r in some if r.status == "refused").detail == "page_size = 16 is not taken; use 64."
    assert summary(some)["verdict"] == "ok"
    assert summary(r for r in some if r.status == "refused")["verdict"] == "refused"
    broken = list(check(tiers.from_attend("raises", raises), CASES[:2]))
    assert [r.detail for r in broken] == ["RuntimeError: no kernel image"] * 2
    total = summary(some + broken)
    assert (total["verdict"], total["raised"], total["ok"]) == ("failed", 2, sum(r.ok for r in some))
    assert total["failed"] == [c.id for c in CASES[:2]]
    assert summary([])["verdict"] == "refused"


def test_the_reference_is_made_once_and_reads_nothing_of_a_tier():
    case = CASES[0]
    made = truth(case)
    run_case(tiers.from_attend("zeros", partial(kernel, finish=lambda out, lse: (out * 0, lse * 0))), case)
    assert truth(case) is made


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
    assert {s.page_size for s in SPECS.values() if s.edge} == {1, 16, 32, 64, 128}
    assert {q for s in SPECS.values() for q in s.query_lens} >= {0, 1, 2, 4, 8, 17}


def test_visible_keys_of_every_kind_of_mask():
    assert SPECS["two_keys"].visible() == [1, 1, 2]
    assert SPECS["zero_rows"].visible() == [64, 0, 64, 0]
    assert SPECS["full_mask"].visible() == [20] * 5 + [33] + [7] * 7
    assert SPECS["rank_some_rows"].visible() == [0, 1, 1, 3, 16, 17]
    assert spec("2q2s5_1q1s3").visible() == [4, 5, 4, 5, 3]


@pytest.mark.parametrize("name", ["smoke", "full"])
def test_ids_are_readable_unique_and_give_the_case_back(name):
    cases = suite(name)
    assert len({c.id for c in cases}) == len(cases)
    assert all(find(c.id) == c for c in cases)
    example = Case(SPECS["mixed_small"], dtype="f16", family="needle_last", slots="extended", seed=3, lse=False)
    assert example.id == "toy-mixed_small-f16-rows_f16-needle_last-extended-p16-s3-nolse"


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
    ],
)
def test_an_unknown_id_names_the_part(text, part):
    with pytest.raises(ValueError, match=rf"^{part}: expected"):
        find(text)
    with pytest.raises(ValueError, match=r"^suite: expected one of smoke, full"):
        suite("fool")


def test_full_covers_every_pair_of_two_fields_in_at_most_400_cases():
    cases = suite("full")
    assert len(cases) <= 400
    kind = lambda family: "needle" if family in NEEDLES else family
    own = lambda c: c.layout == f"rows_{c.dtype}"
    rows = [(c.batch.name, kind(c.family), c.dims.name, c.dtype, own(c), c.slots, c.page_size) for c in cases]
    for i, j in itertools.combinations(range(7), 2):
        met = {(r[i], r[j]) for r in rows}
        for x, y in itertools.product({r[i] for r in rows}, {r[j] for r in rows}):
            impossible = {
                (0, 2): lambda b, d: not d.startswith("toy") and b not in WIDE,
                (0, 6): lambda b, page: SPECS[b].edge and SPECS[b].page_size != page,
            }.get((i, j), lambda x, y: False)
            assert (x, y) in met or impossible(x, y), (x, y)
    assert {c.batch.name for c in cases} == set(SPECS)
    assert {c.dims.name for c in cases} == set(DIMS)
    assert {c.family for c in cases} == set(FAMILIES)
    assert {c.page_size for c in cases} == set(PAGES)


def test_smoke_has_a_needle_and_another_family_in_every_batch_but_the_long_ones():
    cases = suite("smoke")
    by_batch = {name: {c.family for c in cases if c.batch.name == name} for name in {c.batch.name for c in cases}}
    assert all(len(f & set(NEEDLES)) == 1 and len(f) == 2 for f in by_batch.values())
    left_out = set(SPECS) - set(by_batch)
    assert all(sum(SPECS[n].seq_lens) > 300 for n in left_out)


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


def test_sampled_heads_are_compared_and_all_others_must_be_finite(monkeypatch):
    case = Case(SPECS["small_prefill"], DIMS["toy_n12"], "f16", family="needle", seed=77)
    monkeypatch.setattr("mla.conformance.runner.sample_rows", lambda case: ([0, 7, 8, 15], [3, 11]))

    def spoil(head: int, row: int, value: float) -> Tier:
        def finish(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
            out[row, head] += value
            return out, lse

        return tiers.from_attend("spoiled", partial(kernel, finish=finish))

    result = run_case(spoil(11, 8, 1.0), case)
    assert (result.status, result.where.row, result.where.head) == ("mismatch", 8, 11)
    assert run_case(spoil(5, 8, 1.0), case).ok
    assert run_case(spoil(5, 9, INF), case).status == "not_finite"
    assert run_case(tiers.get("paged"), case).ok


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
@pytest.mark.parametrize("dims", DIMS.values(), ids=lambda d: d.name)
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
    case = CASES[2]
    a, b = make_inputs(case), make_inputs(case)
    for (name, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), name
        assert x.data_ptr() != y.data_ptr() or x.numel() == 0
    other = make_inputs(dataclasses.replace(case, seed=1))
    assert not torch.equal(a.q.nope.nan_to_num(7.0), other.q.nope.nan_to_num(7.0))


def test_values_are_rounded_to_the_tested_dtype_and_parts_are_views():
    inputs = make_inputs(Case(SPECS["mixed_small"], dtype="bf16"))
    assert {x.dtype for _, x in inputs.tensors() if x.is_floating_point()} == {torch.bfloat16}
    shared = lambda a, b: a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert shared(*inputs.q)
    assert shared(*inputs.up)
    assert shared(inputs.new_kv_c, inputs.new_k_pe)
    assert not inputs.q.nope.is_contiguous()


@pytest.mark.parametrize("slots", SLOTS)
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


def test_poison_and_absurd_pages_are_everywhere_nobody_may_read():
    case = Case(SPECS["padded_requests"], dtype="f32")
    seen = {}

    def look(q, cache, batch, up, need):
        seen.update(rows=cache.data.clone(), batch=batch, q=q)
        return kernel(q, cache, batch, up, need)

    assert run_case(tiers.from_attend("look", look), case).ok
    rows, batch = seen["rows"].flatten(0, 1), seen["batch"]
    inputs = make_inputs(case)
    owned = torch.zeros(rows.shape[0], dtype=torch.bool)
    owned[inputs.owned_slots()] = True
    assert int(owned.sum()) == sum(case.batch.seq_lens)
    assert bool(rows[owned].isfinite().all())
    assert not bool(rows[~owned].isfinite().any())
    for b, s in enumerate(case.batch.seq_lens):
        unused = batch.block_table[b, -(-s // 16) :].tolist()
        assert len(unused) >= 2
        assert set(unused) <= {*ABSURD_PAGES, inputs.num_pages}
    assert bool(seen["q"].nope[9:].isnan().all())
    assert bool(inputs.new_kv_c[9:].isnan().all())


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


@pytest.mark.parametrize("error", [SystemExit(0), RuntimeError("0")])
def test_a_tier_that_ends_the_program_inside_attend_has_raised(error):
    def attend(*given):
        raise error

    [case] = [Case(spec("2q1s5"), TOY)]
    result = run_case(tiers.from_attend("leaves", attend), case)
    assert (result.status, result.detail) == ("raised", f"{type(error).__name__}: 0")
    assert summary([result])["verdict"] == "failed"
