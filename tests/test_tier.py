"""The contract of a tier: plans and their reuse, capacity, scratch, out=, what is checked, and no waiting for a GPU."""

import dataclasses
import re
from contextlib import contextmanager

import pytest
import torch
from small_case import NAN, PAGE, TIERS, L, N, P, R, V, make_batch, make_case, make_need, shared_case
from torch.utils._python_dispatch import TorchDispatchMode

import tiers
from mla.accuracy import compare
from mla.batch import AttentionBatch
from mla.cache import CacheSpec, FloatRows, PagedLatentCache
from mla.need import Capacity
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan, deliver, kept_on_failure, refuse

ROOMY = Capacity(max_requests=6, max_tokens=64, max_query_len=32, max_seq_len=64)
PAGED = [name for name in TIERS if name.startswith("paged")]


# plans


@pytest.mark.parametrize("capacity", [None, ROOMY])
@pytest.mark.parametrize("name", TIERS)
def test_a_refilled_plan_is_the_same_object_and_computes_the_new_step(name, capacity):
    # growing, shrinking, empty: a state of an earlier step would show
    shapes = [((1, 2), (5, 4)), ((3, 1, 20), (9, 1, 40)), ((), ()), ((1, 1), (7, 3)), ((4,), (64,))]
    tier, plan = tiers.get(name), None
    for query_lens, seq_lens in shapes:
        case = shared_case(query_lens, seq_lens, capacity=capacity)
        refilled = tier.plan(case.need, case.batch, into=plan)
        assert plan is None or refilled is plan
        assert refilled.batch is case.batch
        plan = refilled
        case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


@pytest.mark.parametrize("name", PAGED)
def test_CG3_a_refilled_plan_forgets_the_forms_of_the_longer_batch(name):
    tier, need = tiers.get(name), make_need(capacity=ROOMY)
    plan = tier.plan(need, make_batch([9] * 6, [30] * 6, need))
    fresh = tier.plan(need, make_batch([1, 1], [30, 12], need))
    assert tier.plan(need, make_batch([1, 1], [30, 12], need), into=plan).report == fresh.report


@pytest.mark.parametrize("name", TIERS)
def test_one_plan_serves_many_layers(name):
    tier, layers = tiers.get(name), [make_case([3, 1], [9, 6], seed=seed) for seed in range(3)]
    plan = tier.plan(layers[0].need, layers[0].batch)
    for case in layers:
        case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


BROKEN = [
    ("max_requests", [1] * 7, [4] * 7, 6, 7),
    ("max_tokens", [22, 22, 21], [30, 30, 30], 64, 65),
    ("max_query_len", [33], [40], 32, 33),
    ("max_seq_len", [1], [65], 64, 65),
]


@pytest.mark.parametrize(("field", "query_lens", "seq_lens", "limit", "got"), BROKEN)
@pytest.mark.parametrize("name", TIERS)
def test_a_broken_promise_of_capacity_is_named_and_changes_nothing(name, field, query_lens, seq_lens, limit, got):
    tier, case = tiers.get(name), shared_case((3, 1), (9, 6), capacity=ROOMY)
    plan = tier.plan(case.need, case.batch)
    for into in (None, plan):
        with pytest.raises(
            ValueError, match=rf"^batch exceeds capacity\.{field}: expected at most {limit}, got {got}\."
        ):
            tier.plan(case.need, make_batch(query_lens, seq_lens, case.need), into=into)
    assert plan.batch is case.batch
    case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


def test_capacity_is_kept_at_its_edge():
    ROOMY.check(make_batch([32, 28, 1, 1, 1, 1], [64] * 6, make_need()))


def other_needs():
    yield "softmax_scale", {"softmax_scale": 0.5}
    yield "lse", {"lse": False}
    yield "out_dtype", {"out_dtype": torch.bfloat16}
    yield "capacity", {"capacity": ROOMY}
    yield "page_size", {"page_size": 2 * PAGE}


@pytest.mark.parametrize(("_", "fields"), list(other_needs()))
@pytest.mark.parametrize("name", TIERS)
def test_a_plan_of_another_need_is_refused(name, _, fields):
    tier, case, other = tiers.get(name), shared_case((3, 1), (9, 6)), make_need(**fields)
    foreign = tier.plan(other, make_batch([3, 1], [9, 6], other))
    before = foreign.batch
    with pytest.raises(ValueError, match=r"^into: expected a plan of the same Need"):
        tier.plan(case.need, case.batch, into=foreign)
    assert foreign.batch is before
    with pytest.raises(ValueError, match=r"^plan\.need: expected the Need that the layer was prepared for"):
        tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), foreign)


def test_a_plan_of_another_tier_is_not_refilled():
    case, paged, naive = shared_case((3, 1), (9, 6)), tiers.get("paged"), tiers.get("naive")
    with pytest.raises(ValueError, match=r"^into\.tier: expected naive:mha, got paged"):
        naive.plan(case.need, case.batch, into=paged.plan(case.need, case.batch))


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize(
    ("need", "batch", "text"),
    [
        ({}, {"mask": "full"}, "batch.mask: expected causal, got full"),
        ({"mask": "rows"}, {}, "batch.mask: expected rows, got causal"),
        ({}, {"page_size": 8}, "batch.page_size: expected 4, got 8"),
        ({"device": "cuda"}, {}, "batch.seq_lens.device: expected cuda:0, got cpu"),
        ({"uniform_queries": True}, {}, "batch.query_lens: expected one length (Need.uniform_queries), got [1, 3]"),
    ],
)
def test_a_batch_that_does_not_belong_to_the_need_is_refused(name, need, batch, text):
    other = AttentionBatch.bottom_right(
        [3, 1], [9, 6], [[0, 1, 2], [3, 4]], **({"page_size": PAGE, "num_pages": 5} | batch)
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        tiers.get(name).plan(make_need(**need), other)


@pytest.mark.parametrize("name", TIERS)
def test_uniform_queries_may_be_padded_with_requests_of_none(name):
    case = shared_case((2, 2, 0), (9, 6, 5), uniform_queries=True)
    case.check(case.run(name))


# scratch


def toy_plan(**sizes) -> Plan:
    need = make_need()
    return Plan(need, make_batch([1], [3], need), sizes=sizes)


def test_scratch_is_one_buffer_of_the_planned_size():
    plan = toy_plan(rows=((5, 8), torch.float32), ids=((3,), torch.int64))
    assert plan.nbytes == 5 * 8 * 4 + 3 * 8
    a, b = plan.scratch("rows", (5, 8), torch.float32), plan.scratch("rows", (2, 3, 4), torch.float32)
    assert (a.shape, b.shape) == ((5, 8), (2, 3, 4))
    assert a.data_ptr() == b.data_ptr()
    assert plan.scratch("rows", (0, 8), torch.float32).shape == (0, 8)
    assert plan.scratch("ids", (3,), torch.int64).data_ptr() != a.data_ptr()


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("keys", (1,), torch.float32), ("rows", (41,), torch.float32), ("rows", (5, 8), torch.bfloat16)],
)
def test_scratch_beyond_the_plan_is_refused(name, shape, dtype):
    with pytest.raises(ValueError, match=f"^scratch '{name}': expected within "):
        toy_plan(rows=((5, 8), torch.float32)).scratch(name, shape, dtype)


def test_scratch_grows_with_a_plan_that_is_refilled_without_capacity():
    plan = toy_plan(rows=((5,), torch.float32))
    plan.scratch("rows", (5,), torch.float32)
    plan.sizes = {"rows": ((9,), torch.float32)}
    assert plan.scratch("rows", (9,), torch.float32).shape == (9,)


def test_reserve_allocates_the_parts_too():
    part, plan = toy_plan(rows=((5,), torch.float32)), toy_plan(ids=((3,), torch.int64))
    plan.parts = (part,)
    assert plan.nbytes == 5 * 4 + 3 * 8
    assert plan.reserve() is plan
    assert {k: b.nbytes for p in (plan, part) for k, b in p._buffers.items()} == {"ids": 24, "rows": 20}


@pytest.mark.parametrize("name", PAGED)
def test_the_size_of_a_plan_is_known_from_the_capacity_alone(name):
    tier, need = tiers.get(name, max_workspace_tokens=32), make_need(capacity=ROOMY)
    shapes = [([], []), ([1], [1]), ([32, 1], [64, 64]), ([1] * 6, [60] * 6)]
    plans = [tier.plan(need, make_batch(q, s, need)) for q, s in shapes]
    assert len({plan.nbytes for plan in plans}) == 1
    assert plans[0].nbytes > 0


@pytest.mark.parametrize("name", PAGED)
def test_scratch_stays_where_it_is_when_a_plan_with_capacity_is_refilled(name):
    tier = tiers.get(name, max_workspace_tokens=16)
    small, large = (shared_case(*lens, capacity=ROOMY) for lens in (((1, 1), (3, 2)), ((20, 1), (60, 64))))
    plan, places = None, []
    for case in (small, large, small):
        plan = tier.plan(case.need, case.batch, into=plan)
        case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))
        places.append({k: (b.data_ptr(), b.numel()) for k, b in plan._buffers.items()})
    assert all(places[0][k] == places[-1][k] for k in places[0])
    assert places[1] == places[2]


# results


@pytest.mark.parametrize("name", TIERS)
def test_a_result_survives_the_next_attend(name):
    tier, first, second = tiers.get(name), make_case([3, 9], [9, 16], seed=1), make_case([3, 9], [9, 16], seed=2)
    plan = tier.plan(first.need, first.batch)
    kept = tier.attend(first.q, first.cache, tier.prepare(first.up, first.need), plan)
    copy = [x.clone() for x in kept]
    tier.attend(second.q, second.cache, tier.prepare(second.up, second.need), plan)
    for buffer in plan._buffers.values():
        buffer.fill_(NAN)
    assert all(torch.equal(a, b) for a, b in zip(kept, copy, strict=True))
    first.check(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TIERS)
def test_out_is_filled_and_is_the_object_that_comes_back(name, dtype):
    case = shared_case((3, 1, 0), (9, 6, 2), dtype=dtype, pad_tokens=1)
    out = AttentionState(torch.full((5, N, V), NAN, dtype=dtype), torch.full((5, N), NAN))
    places = [x.data_ptr() for x in out]
    state = case.run(name, out)
    assert state is out
    assert [x.data_ptr() for x in state] == places
    case.check(state)


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("name", TIERS)
def test_without_lse_there_is_none(name, with_out):
    case = shared_case((3, 1), (9, 6), lse=False)
    out = AttentionState(torch.full((4, N, V), NAN), None) if with_out else None
    state = case.run(name, out)
    assert state.lse is None
    result = compare(state, case.truth())
    assert result.ok, result
    assert not with_out or state is out


OUT, LSE = torch.zeros(4, N, V), torch.zeros(4, N)
BAD_OUTS = [
    (OUT.transpose(1, 2), LSE, ValueError, "out.out.shape: expected (4, 3, 10), got (4, 10"),
    (torch.zeros(5, N, V), LSE, ValueError, "out.out.shape: expected (4, 3, 10), got (5, 3, 10)"),
    (OUT.bfloat16(), LSE, TypeError, "out.out.dtype: expected torch.float32, got torch.bfloat16"),
    (OUT.to("meta"), LSE, ValueError, "out.out.device: expected cpu, got meta"),
    (OUT, None, ValueError, "out.lse: expected a tensor, got None"),
    (OUT, LSE.T, ValueError, "out.lse.shape: expected (4, 3), got (3, 4)"),
    (OUT, LSE.double(), TypeError, "out.lse.dtype: expected torch.float32, got torch.float64"),
]


@pytest.mark.parametrize(("out", "lse", "kind", "text"), BAD_OUTS)
@pytest.mark.parametrize("name", TIERS)
def test_an_output_that_does_not_fit_is_named_and_left_alone(name, out, lse, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        shared_case((3, 1), (9, 6)).run(name, AttentionState(out, lse))
    assert out.is_meta or bool((out == 0).all())


def test_an_output_with_lse_is_refused_where_none_was_asked_for():
    with pytest.raises(ValueError, match=r"^out\.lse: expected None, got a tensor"):
        shared_case((3, 1), (9, 6), lse=False).run("naive", AttentionState(OUT, LSE))


# what attend and prepare are given


def bad_arguments():
    case = shared_case((3, 1), (9, 6))
    (nope, pe), pages, layout = case.q, case.cache.num_pages, case.need.layout

    def cache(pages: int, page_size: int, dtype=torch.float32, device="cpu") -> PagedLatentCache:
        return PagedLatentCache.new(CacheSpec(pages, page_size, FloatRows(L, R, dtype), device))

    yield "q", Query(nope[:3], pe[:3]), ValueError, "q.nope.shape: expected (4, 3, 12), got (3, 3, 12)"
    yield "q", Query(nope, pe[..., :-1]), ValueError, "q.pe.shape: expected (4, 3, 8), got (4, 3, 7)"
    yield "q", Query(nope.flatten(1), pe), ValueError, "q.nope.shape: expected (4, 3, 12), got (4, 36)"
    yield "q", Query(nope.bfloat16(), pe), TypeError, "q.nope.dtype: expected torch.float32, got torch.bfloat16"
    yield "q", Query(nope, pe.int()), TypeError, "q.pe.dtype: expected torch.float32, got torch.int32"
    yield "q", Query(nope.to("meta"), pe), ValueError, "q.nope.device: expected cpu, got meta"
    yield "cache", cache(pages, PAGE, torch.float16), ValueError, f"cache.layout: expected {layout}, got FloatRows"
    yield "cache", cache(pages, 8), ValueError, "cache.page_size: expected 4, got 8"
    yield (
        "cache",
        cache(pages - 1, PAGE),
        ValueError,
        f"cache.num_pages: expected at least {pages} pages, as the batch",
    )
    yield "cache", cache(pages, PAGE, device="meta"), ValueError, "cache.data.device: expected cpu, got meta"


@pytest.mark.parametrize(("argument", "value", "kind", "text"), list(bad_arguments()))
@pytest.mark.parametrize("name", TIERS)
def test_arguments_of_attend_that_do_not_fit_are_named(name, argument, value, kind, text):
    case, tier = shared_case((3, 1), (9, 6)), tiers.get(name)
    prepared, plan = tier.prepare(case.up, case.need), tier.plan(case.need, case.batch)
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        tier.attend(**({"q": case.q, "cache": case.cache, "prepared": prepared, "plan": plan} | {argument: value}))


def bad_projections():
    W_UK, W_UV = torch.zeros(L, N, P), torch.zeros(L, N, V)
    yield (W_UV, W_UK), ValueError, "W_UK.shape: expected (32, 3, 12), got (32, 3, 10)"
    yield (W_UK.transpose(0, 1), W_UV), ValueError, "W_UK.shape: expected (32, 3, 12), got (3, 32, 12)"
    yield (W_UK, W_UV[:, :2]), ValueError, "W_UV.shape: expected (32, 3, 10), got (32, 2, 10)"
    yield (W_UK.int(), W_UV), TypeError, "W_UK.dtype: expected one of "
    yield (W_UK, W_UV.to(torch.float8_e4m3fn)), TypeError, "W_UV.dtype: expected one of "
    yield (W_UK.to("meta"), W_UV), ValueError, "W_UK.device: expected cpu, got meta"


@pytest.mark.parametrize(("up", "kind", "text"), list(bad_projections()))
@pytest.mark.parametrize("name", TIERS)
def test_up_projections_that_do_not_fit_are_named(name, up, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        tiers.get(name).prepare(UpProjection(*up), make_need())


def test_weights_may_be_wider_than_the_query():
    case = make_case([3, 1], [9, 6], dtype=torch.bfloat16)
    case.up = UpProjection(*(W.float() for W in case.up))
    for name in TIERS:
        case.check(case.run(name))


@pytest.mark.parametrize("step", ["prepare", "plan"])
@pytest.mark.parametrize("name", TIERS)
def test_a_refused_need_is_refused_at_once_with_every_reason(name, step):
    tier, need = tiers.get(name), make_need(window=4, sinks=True)
    argument = UpProjection(torch.zeros(L, N, P), torch.zeros(L, N, V)) if step == "prepare" else need
    arguments = (argument, need) if step == "prepare" else (need, make_batch([1], [3], need))
    with pytest.raises(ValueError, match=r"refuses: window = 4 .* sinks = True ") as caught:
        getattr(tier, step)(*arguments)
    assert str(caught.value) == f"tier {tier.name!r} refuses: " + " ".join(tier.why_not(need))
    with pytest.raises(ValueError, match=r"^tier"):
        refuse(tier, need)


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        (
            AttentionState(OUT.transpose(1, 2), LSE),
            ValueError,
            "attend's out.shape: expected (4, 3, 10), got (4, 10, 3)",
        ),
        (AttentionState(OUT, None), ValueError, "attend's lse.shape: expected (4, 3), got None"),
        (AttentionState(OUT, LSE.T), ValueError, "attend's lse.shape: expected (4, 3), got (3, 4)"),
        ((OUT, LSE), TypeError, "attend's result: expected an AttentionState, got tuple"),
        (OUT, TypeError, "attend's result: expected an AttentionState, got Tensor"),
    ],
)
def test_a_result_of_another_shape_is_not_delivered(state, kind, text):
    case = shared_case((3, 1), (9, 6))
    out = AttentionState(torch.full((4, N, V), 7.0), torch.full((4, N), 7.0))
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        deliver(state, Plan(case.need, case.batch), out)
    assert bool((out.out == 7).all())
    assert bool((out.lse == 7).all())


# no waiting for a GPU

SYNCS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2"}


class NoSync(TorchDispatchMode):
    """Refuses every operator whose result the host must wait for on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in SYNCS:
            raise AssertionError(f"{func} waits for the device")
        indices = args[1] if func._schema.name in ("aten::index", "aten::index_put_", "aten::index_put") else ()
        if any(i is not None and i.dtype == torch.bool for i in indices):
            raise AssertionError("an index by booleans waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_sync():
    def refuse_sync(self, *args, **kwargs):
        raise AssertionError("a copy to the host waits for the device")

    with pytest.MonkeyPatch.context() as patch, NoSync():
        for name in ("tolist", "numpy", "cpu", "__array__"):
            patch.setattr(torch.Tensor, name, refuse_sync)
        yield


@pytest.mark.parametrize(
    "sync",
    [
        lambda x: x.item(),
        lambda x: int(x),
        lambda x: x.tolist(),
        lambda x: bool(x > 0),
        lambda x: x.nonzero(),
        lambda x: x[None][x[None] > 0],
        lambda x: x.cpu(),
    ],
)
def test_the_watch_over_syncs_sees_each_kind(sync):
    with pytest.raises(AssertionError, match="waits for the device"), no_sync():
        sync(torch.ones(()))


@pytest.mark.parametrize("capacity", [None, ROOMY])
@pytest.mark.parametrize("name", [*TIERS, "composed"])
def test_attend_never_waits_for_the_device(name, capacity):
    case = make_case([3, 1, 0, 20, 2], [9, 6, 5, 40, 0], capacity=capacity, pad_tokens=2)
    options = {"max_workspace_tokens": 16} if name.startswith("paged") else {}
    tier = (
        tiers.compose(tiers.get("paged"), tiers.get("paged:mha")) if name == "composed" else tiers.get(name, **options)
    )
    prepared, plan = tier.prepare(case.up, case.need), tier.plan(case.need, case.batch)
    out = AttentionState(torch.zeros(28, N, V), torch.zeros(28, N))
    with no_sync():
        tier.attend(case.q, case.cache, prepared, plan, out)
        tier.attend(case.q, case.cache, prepared, plan)
    case.check(out)


def test_needs_compare_by_value_in_attend():
    # a plan made from an equal Need is as good as one from the same object
    case, tier = shared_case((3, 1), (9, 6)), tiers.get("naive")
    twin = dataclasses.replace(case.need)
    plan = tier.plan(twin, case.batch)
    case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


@pytest.mark.parametrize("name", ["paged", {"decode": "paged", "prefill": "naive:mha"}])
def test_another_tiers_plan_is_named(name):
    case = shared_case((2, 9), (20, 9))
    other, mine = tiers.get("naive:mha"), tiers.get(name)
    prepared, plan = mine.prepare(case.up, case.need), other.plan(case.need, case.batch)
    with pytest.raises(ValueError, match=r"^plan\.tier: expected .*paged.*, got naive:mha"):
        mine.attend(case.q, case.cache, prepared, plan)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_plan_names_what_is_no_need_batch_or_plan(at):
    case = make_case([1], [5])
    given = [case.need, case.batch, None]
    given[at] = "x"
    with pytest.raises(TypeError, match=f"{('need', 'batch', 'into')[at]}: expected a .*, got str"):
        tiers.get("paged").plan(*given)


def test_a_plan_keeps_what_it_had_where_its_refill_fails():
    case = make_case([1], [5])
    plan = tiers.get("paged").plan(case.need, case.batch)
    before = (plan.batch, plan.steps, plan.sizes, plan.report)

    @kept_on_failure(plan)
    def refill():
        plan.batch, plan.steps, plan.sizes, plan.report = None, None, {}, {}
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        refill()
    assert all(a is b for a, b in zip(before, (plan.batch, plan.steps, plan.sizes, plan.report), strict=True))


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("q", (1, 2), "q: expected a Query, got "),
        ("cache", None, "cache: expected a PagedLatentCache, got "),
        ("prepared", None, "prepared: expected a Prepared, got "),
        ("plan", None, "plan: expected a Plan, got "),
        ("out", "out", "out: expected a AttentionState, got "),
    ],
)
def test_O1_what_is_no_such_thing_at_all_is_named(name, wrong, said):
    case = make_case([1, 2], [3, 4])
    tier = tiers.get("paged")
    given = {"q": case.q, "cache": case.cache, "prepared": tier.prepare(case.up, case.need)}
    given |= {"plan": tier.plan(case.need, case.batch), "out": None, name: wrong}
    with pytest.raises(TypeError, match=said):
        tier.attend(**given)
