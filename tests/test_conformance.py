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
from mla.conformance import SPECS, Case, check, run_case, spec, summary
from mla.conformance.cases import DIMS, SLOTS, TOY, Dims
from mla.conformance.inputs import ABSURD_PAGES, make_inputs
from mla.conformance.runner import truth
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
    return {run_case(tier, case, diagnosed=False).status for case in CASES} - {"ok"}


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


# what only some cases show: wrapped caches, shared pages, plans that are used again, repeats


def with_fault(change: Callable) -> Tier:
    """The template behind a step of its own: change(attend, q, cache, batch), attend(q, cache, batch)."""
    right = tiers.get("template")

    def attend(q, cache, batch, up, need) -> AttentionState:
        run = lambda q, cache, batch: right.attend(q, cache, right.prepare(up, need), right.plan(need, batch))
        return change(run, q, cache, batch)

    return tiers.from_attend(change.__name__, attend)


def found_only_by(tier: Tier, **fields) -> str:
    """The status of a case with some unusual fields; without them the tier is right."""
    case = Case(SPECS["mixed_small"], family="needle", seed=5, page_size=8)
    assert run_case(tier, case).ok
    assert run_case(tiers.get("template"), dataclasses.replace(case, **fields)).ok
    return run_case(tier, dataclasses.replace(case, **fields), diagnosed=False).status


@pytest.mark.parametrize("cache", ["layers", "strided"])
def test_whoever_takes_a_wrapped_cache_for_one_block_of_memory_is_rejected(cache):
    def as_one_block(run, q, cache, batch):
        block = cache.data.as_strided(cache.data.shape, torch.empty(cache.data.shape).stride())
        return run(q, PagedLatentCache.wrap(block, cache.layout), batch)

    assert found_only_by(with_fault(as_one_block), cache=cache) in ("mismatch", "not_finite")


@pytest.mark.parametrize("cache", ["layers", "strided"])
@pytest.mark.parametrize("step", ["write", "attend"])
def test_whoever_writes_beside_the_rows_of_a_wrapped_cache_is_rejected(cache, step):
    def beside(cache: PagedLatentCache) -> None:
        page, width = cache.data.shape[1:]
        if not cache.data.is_contiguous():
            last = cache.data.storage_offset() + width * (page if cache.data.stride(1) == width else 1)
            cache.data.as_strided((1,), (1,), last).zero_()

    def write(cache, kv_c, k_pe, slot_mapping):
        cache.write(kv_c, k_pe, slot_mapping)
        beside(cache)

    def attend(state, q, cache, prepared, plan, out):
        beside(cache)
        return state

    tier = Wrapped(write=write) if step == "write" else Wrapped(attend=attend)
    assert found_only_by(tier, cache=cache) == "mismatch"


def test_whoever_thinks_that_a_page_has_one_owner_is_rejected_by_shared_pages():
    def one_owner(run, q, cache, batch):
        table, bounds = batch.block_table.clone(), batch.row_kv_lens.clone()
        owner = {int(p): b for b, s in enumerate(batch.seq_lens_host) for p in table[b, : -(-s // batch.page_size)]}
        for b, s in enumerate(batch.seq_lens_host):
            mine = [int(p) for p in table[b, : -(-s // batch.page_size)] if owner[int(p)] == b]
            lost = -(-s // batch.page_size) - len(mine)
            table[b, : len(mine)] = torch.tensor(mine, dtype=table.dtype)
            rows = slice(*batch.query_start_loc[b : b + 2].tolist())
            bounds[rows] -= lost * batch.page_size
        return run(q, cache, dataclasses.replace(batch, block_table=table, row_kv_lens=bounds))

    assert found_only_by(with_fault(one_owner), slots="shared") == "mismatch"


class Reuses(Wrapped):
    """A tier whose plan keeps something of the first batch that it was made for."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept

    def plan(self, need, batch, into=None):
        made = self.tier.plan(need, batch, into)
        if into is None:
            made.report["first"] = batch
        elif self.kept == "plan":
            return self.tier.plan(need, batch)
        return made

    def attend(self, q, cache, prepared, plan, out=None):
        batch, first = plan.batch, plan.report.get("first", plan.batch)
        if self.kept == "scratch" and batch is not first:  # rows that were full once are added to what comes later
            out = super().attend(q, cache, prepared, plan, out)
            out.out[: first.num_tokens] += 1
            return out
        if self.kept == "lengths":
            bounds = batch.row_kv_lens.clone()
            both = min(len(bounds), len(first.row_kv_lens))
            bounds[:both] = torch.minimum(bounds[:both], first.row_kv_lens[:both])
            plan = dataclasses.replace(plan, batch=dataclasses.replace(batch, row_kv_lens=bounds))
        return super().attend(q, cache, prepared, plan, out)


@pytest.mark.parametrize(("kept", "plan"), [("lengths", "refilled"), ("scratch", "refilled"), ("scratch", "capped")])
def test_whoever_keeps_something_of_an_earlier_batch_in_its_plan_is_rejected(kept, plan):
    assert found_only_by(Reuses(kept), plan=plan) == "mismatch"


@pytest.mark.parametrize("plan", ["refilled", "capped"])
def test_a_plan_that_is_not_refilled_but_made_anew_is_rejected(plan):
    assert found_only_by(Reuses("plan"), plan=plan) == "mismatch"


def test_a_capped_plan_promises_what_both_batches_need():
    def refuses(need: Need) -> list[str]:
        return [] if need.capacity is None else [f"capacity of {need.capacity.max_seq_len} keys is not taken; unset."]

    case = Case(SPECS["mixed_small"], plan="capped")  # 56 keys and those of the larger batch before it
    result = run_case(tiers.from_attend("no", kernel, refuses), case)
    assert (result.status, result.detail) == ("refused", "capacity of 89 keys is not taken; unset.")


def test_whoever_gives_other_bits_now_and_then_is_rejected_by_repeats():
    calls = itertools.count()

    def now_and_then(run, q, cache, batch):
        state = run(q, cache, batch)
        state.out[0, 0, 0] *= 1 + 2.0**-20 * (next(calls) % 10 == 9)
        return state

    case = Case(SPECS["mixed_small"], dtype="f32", repeats=50)
    tier = with_fault(now_and_then)
    assert run_case(tier, dataclasses.replace(case, repeats=0)).ok
    result = run_case(tier, case)
    assert (result.status, result.kind) == ("mismatch", "memory")
    assert "differs in bits" in result.detail
    assert run_case(tiers.get("paged"), case).ok


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("rows written twice", "write"),
        ("nothing written", "write"),
        ("changes the cache", "memory"),
        ("returns scratch", "memory"),
        ("writes past the end of out", "memory"),
        ("ignores out", "form"),
        ("out in float64", "form"),
    ],
)
def test_what_a_guard_finds_names_the_kind_of_fault(fault, kind):
    assert run_case(WRAPPED_FAULTS[fault][0], CASES[0]).kind == kind


@pytest.mark.parametrize("error", [SystemExit(0), RuntimeError("0")])
def test_a_tier_that_ends_the_program_inside_attend_has_raised(error):
    def attend(*given):
        raise error

    [case] = [Case(spec("2q1s5"), TOY)]
    result = run_case(tiers.from_attend("leaves", attend), case)
    assert (result.status, result.detail) == ("raised", f"{type(error).__name__}: 0")
    assert summary([result])["verdict"] == "failed"
