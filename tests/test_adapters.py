"""Tiers made from a function, and from two tiers over one cache."""

import dataclasses
import itertools
import re

import pytest
import torch
from small_case import NAN, TIERS, L, N, R, V, make_batch, make_case, make_need, shared_case

import tiers
from mla.accuracy import compare
from mla.adapters import compose, from_attend
from mla.cache import CacheSpec, PagedLatentCache
from mla.need import Capacity
from mla.state import AttentionState
from mla.tier import Tier, plan
from tiers.template import attend as template_attend


def constant(out: float = 1.0, lse: float = 2.0, dtype: torch.dtype = torch.float32):
    """An attend that returns constants of the right shapes."""

    def attend(q, cache, batch, up, need):
        T = batch.num_tokens
        return AttentionState(
            torch.full((T, need.N, need.V), out, dtype=dtype), torch.full((T, need.N), lse, dtype=dtype)
        )

    return attend


# from_attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_function_is_a_whole_tier(dtype):
    tier = from_attend("mine", template_attend)
    assert tier.name == "mine"
    assert tier.why_not(make_need()) == []
    case = shared_case((3, 1, 0), (9, 6, 4), dtype=dtype, pad_tokens=1)
    case.check(case.run(tier))


@pytest.mark.parametrize(("dtype", "returned"), list(itertools.product([torch.float32, torch.bfloat16], repeat=2)))
def test_results_are_cast_to_what_the_need_promises(dtype, returned):
    case = shared_case((2,), (5,), dtype=dtype, out_dtype=torch.float16)
    state = case.run(from_attend("mine", constant(1.5, 2.5, returned)))
    assert (state.out.dtype, state.lse.dtype) == (torch.float16, torch.float32)
    assert bool((state.out == 1.5).all())
    assert bool((state.lse == 2.5).all())


def test_an_lse_that_nobody_asked_for_is_dropped():
    assert shared_case((2,), (5,), lse=False).run(from_attend("mine", constant())).lse is None


def test_the_buffers_of_the_caller_are_filled():
    out = AttentionState(torch.full((2, N, V), NAN), torch.full((2, N), NAN))
    assert shared_case((2,), (5,)).run(from_attend("mine", constant(1.5, 2.5)), out) is out
    assert bool((out.out == 1.5).all())
    assert bool((out.lse == 2.5).all())


def test_the_function_gets_what_was_prepared_and_planned():
    seen, case = [], shared_case((2,), (5,))

    def attend(*arguments):
        seen.extend(arguments)
        return constant()(*arguments)

    case.run(from_attend("mine", attend))
    assert all(a is b for a, b in zip(seen, (case.q, case.cache, case.batch, case.up, case.need), strict=True))


def test_a_wrong_result_is_named_before_anything_is_filled():
    out = AttentionState(torch.zeros(2, N, V), torch.zeros(2, N))
    tier = from_attend("mine", lambda *a: AttentionState(torch.ones(2, V, N), torch.ones(2, N)))
    with pytest.raises(ValueError, match=r"^attend's out\.shape: expected \(2, 3, 10\), got \(2, 10, 3\)"):
        shared_case((2,), (5,)).run(tier, out)
    assert bool((out.out == 0).all())
    with pytest.raises(
        ValueError, match=r"^attend's lse\.shape: expected \(2, 3\), got None. Fix: .*refuse lse = True"
    ):
        shared_case((2,), (5,)).run(from_attend("mine", lambda *a: AttentionState(torch.ones(2, N, V), None)))


def test_its_own_reasons_come_with_those_of_every_function():
    def why_not(need):
        return [] if need.N <= 8 else [f"N = {need.N}; mine takes at most 8; shard the heads."]

    tier = from_attend("mine", constant(), why_not)
    assert tier.why_not(make_need()) == []
    assert tier.why_not(make_need(N=16)) == ["N = 16; mine takes at most 8; shard the heads."]
    reasons = tier.why_not(make_need(N=16, window=4, graph_capture=True, batch_invariant=True))
    assert [r.split(" ")[0] for r in reasons] == ["window", "batch_invariant", "graph_capture", "N"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", constant()), "name: expected a name for reports, got ''"),
        ((None, constant()), "name: expected a name for reports, got None"),
        (("mine", None), "attend: expected a function, got None"),
        (("mine", constant(), ["no"]), "why_not: expected a function, got ['no']"),
    ],
)
def test_what_is_no_function_is_refused(arguments, text):
    with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
        from_attend(*arguments)


# compose


@dataclasses.dataclass(frozen=True)
class Recorder(Tier):
    """A tier around another one that keeps what it is asked."""

    name: str
    inner: Tier
    calls: list = dataclasses.field(default_factory=list)
    reasons: tuple[str, ...] = ()

    def why_not(self, need):
        self.calls.append(("why_not", need))
        return [*self.reasons, *self.inner.why_not(need)]

    def new_cache(self, spec):
        self.calls.append(("new_cache", spec))
        return self.inner.new_cache(spec)

    def write(self, cache, kv_c, k_pe, slot_mapping):
        self.calls.append(("write", slot_mapping))
        self.inner.write(cache, kv_c, k_pe, slot_mapping)

    def prepare(self, up, need):
        self.calls.append(("prepare", need))
        return self.inner.prepare(up, need)

    def plan(self, need, batch, into=None):
        self.calls.append(("plan", need, batch))
        return self.inner.plan(need, batch, into)

    def attend(self, q, cache, prepared, plan, out=None):
        self.calls.append(("attend", q.nope.shape[0]))
        return self.inner.attend(q, cache, prepared, plan, out)

    def asked(self, what: str) -> list:
        """The first argument of every call of that name."""
        return [call[1] for call in self.calls if call[0] == what]


def recorded(decode_query_len: int = 8) -> tuple[Recorder, Recorder, Tier]:
    decode, prefill = Recorder("a", tiers.get("naive:mqa")), Recorder("b", tiers.get("paged:mha"))
    return decode, prefill, compose(decode, prefill, decode_query_len)


MIXED = ((1, 9, 0, 8, 20, 2), (5, 9, 3, 17, 40, 0))


@pytest.mark.parametrize(("decode", "prefill"), list(itertools.product(TIERS, repeat=2)))
def test_any_two_tiers_compose_to_a_right_one(decode, prefill):
    case = shared_case(*MIXED, pad_tokens=2)
    case.check(case.run(compose(tiers.get(decode), tiers.get(prefill))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_composed_in_16_bits(dtype):
    case = shared_case(*MIXED, dtype=dtype)
    case.check(case.run(compose(tiers.get("naive:mqa"), tiers.get("paged:mha"))))


def test_the_name_says_both():
    assert recorded()[2].name == "decode=a+prefill=b"


@pytest.mark.parametrize(
    ("limit", "decoded"), [(1, [0, 2]), (2, [0, 2, 5]), (8, [0, 2, 3, 5]), (20, [0, 1, 2, 3, 4, 5])]
)
def test_requests_go_to_the_halves_by_their_query_length(limit, decoded):
    case, (decode, prefill, tier) = shared_case(*MIXED), recorded(limit)
    tier.plan(case.need, case.batch)
    [short], [long] = ([call[2] for call in half.calls if call[0] == "plan"] for half in (decode, prefill))
    assert short.query_lens_host == tuple(MIXED[0][b] for b in decoded)
    assert short.seq_lens_host == tuple(MIXED[1][b] for b in decoded)
    assert long.query_lens_host == tuple(q for b, q in enumerate(MIXED[0]) if b not in decoded)
    state = case.run(tier)
    case.check(state)
    rows = sum(MIXED[0][b] for b in decoded)
    assert (decode.asked("attend"), prefill.asked("attend")) == ([rows], [40 - rows] if rows < 40 else [])


def test_each_half_is_asked_with_its_own_need():
    capacity = Capacity(max_requests=6, max_tokens=64, max_query_len=32, max_seq_len=64)
    case, (decode, prefill, tier) = shared_case(*MIXED, capacity=capacity), recorded()
    case.check(case.run(tier))
    own = dataclasses.replace(case.need, capacity=dataclasses.replace(capacity, max_query_len=8))
    for what in ("why_not", "prepare", "plan"):
        assert set(decode.asked(what)) == {own}
        assert set(prefill.asked(what)) == {case.need}
    no_longer = dataclasses.replace(capacity, max_query_len=3)
    tier.why_not(dataclasses.replace(case.need, capacity=no_longer))
    assert decode.asked("why_not")[-1].capacity == no_longer


def test_both_halves_judge_the_same_layout_and_say_who_refuses():
    decode = Recorder("a", tiers.get("naive"), reasons=("page_size = 4; a takes 64 only; change it.",))
    prefill = Recorder("b", tiers.get("naive"), reasons=("layout = float32; b takes bfloat16 rows only; change it.",))
    tier, need = compose(decode, prefill), make_need()
    assert tier.why_not(need) == [
        "decode: page_size = 4; a takes 64 only; change it.",
        "prefill: layout = float32; b takes bfloat16 rows only; change it.",
    ]
    assert decode.asked("why_not")[0].layout == prefill.asked("why_not")[0].layout == need.layout
    with pytest.raises(
        ValueError, match=r"^tier 'decode=a\+prefill=b' refuses: decode: page_size = 4.* prefill: layout"
    ):
        tier.plan(need, make_batch([1], [3], need))


def test_cache_and_writes_are_those_of_the_decode_half():
    decode, prefill, tier = recorded()
    need, slots = make_need(), torch.tensor([2, -1])
    cache = tier.new_cache(CacheSpec(3, need.page_size, need.layout))
    assert isinstance(cache, PagedLatentCache)
    tier.write(cache, torch.ones(2, L), torch.ones(2, R), slots)
    assert (decode.asked("new_cache"), decode.asked("write")) == ([CacheSpec(3, need.page_size, need.layout)], [slots])
    assert bool((cache.data[0, 2] == 1).all())
    assert (prefill.asked("new_cache"), prefill.asked("write")) == ([], [])


def test_out_lse_and_empty_batches():
    tier = compose(tiers.get("naive"), tiers.get("paged"))
    case = shared_case(*MIXED, pad_tokens=1)
    out = AttentionState(torch.full((41, N, V), NAN), torch.full((41, N), NAN))
    assert case.run(tier, out) is out
    case.check(out)
    silent = shared_case(*MIXED, lse=False)
    state = silent.run(tier)
    assert state.lse is None
    assert compare(state, silent.truth()).ok
    for pad in (0, 2):
        nothing = shared_case((), (), pad_tokens=pad)
        nothing.check(nothing.run(tier))


def test_a_composed_plan_is_refilled_with_its_parts():
    tier, first = compose(tiers.get("paged:mqa"), tiers.get("paged:mha", max_workspace_tokens=8)), shared_case(*MIXED)
    plan_ = tier.plan(first.need, first.batch)
    parts = plan_.parts
    assert plan_.nbytes == sum(part.nbytes for part in parts) > 0
    assert plan_.report == {"decode": parts[0].report, "prefill": parts[1].report}
    for shape in (((1, 1), (5, 6)), MIXED, ((30,), (30,))):
        case = shared_case(*shape)
        assert tier.plan(case.need, case.batch, into=plan_) is plan_
        assert all(a is b for a, b in zip(plan_.parts, parts, strict=True))
        case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan_))


def test_a_result_of_a_composed_tier_survives_the_next_attend():
    tier, case, other = compose(tiers.get("naive"), tiers.get("paged")), shared_case(*MIXED), make_case(*MIXED, seed=9)
    plan_ = tier.plan(case.need, case.batch)
    kept = tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan_)
    tier.attend(other.q, other.cache, tier.prepare(other.up, other.need), plan_)
    case.check(kept)


def test_a_half_that_fails_to_plan_leaves_the_plan_as_it_was():
    def fail(self, need, batch, into=None):
        if 13 in batch.query_lens_host:
            raise RuntimeError("no plan for 13")
        return plan(self, need, batch, into)

    failing = type("Failing", (Recorder,), {"plan": fail})("b", tiers.get("naive"))
    tier, case = compose(tiers.get("naive"), failing), shared_case((1, 9), (5, 9))
    plan_ = tier.plan(case.need, case.batch)
    with pytest.raises(RuntimeError, match="no plan for 13"):
        tier.plan(case.need, make_batch([1, 1, 13], [5, 5, 13], case.need), into=plan_)
    assert plan_.batch is case.batch
    case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan_))


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("paged", tiers.get("naive")), TypeError, "decode: expected a tier, got 'paged'"),
        ((tiers.get("naive"), None), TypeError, "prefill: expected a tier, got None"),
        ((tiers.get("naive"), tiers.get("naive"), 0), ValueError, "decode_query_len: expected an int >= 1, got 0"),
        ((tiers.get("naive"), tiers.get("naive"), 1.5), TypeError, "decode_query_len: expected an int >= 1, got 1.5"),
    ],
)
def test_what_cannot_be_composed_is_named(arguments, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        compose(*arguments)


def test_two_tiers_are_not_captured_at_once():
    tier = compose(tiers.get("paged"), tiers.get("naive"))
    assert (
        "graph_capture = True is not possible in two tiers at once" in tier.why_not(make_need(graph_capture=True))[-1]
    )
