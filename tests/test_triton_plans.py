"""What a plan of the Triton tier must survive: padding, small capacity, refills that fail, strides, inference mode."""

import pytest
import torch
from triton_here import DEVICE, require_triton

require_triton()

from small_case import make_batch, make_case, make_need  # noqa: E402

import tiers  # noqa: E402
from mla.cache import CacheSpec, PagedLatentCache  # noqa: E402
from mla.need import Capacity  # noqa: E402
from mla.projections import Query  # noqa: E402

if DEVICE != "cpu":
    pytest.skip("these cases are made on the CPU; on a GPU `mla check triton` is the judge", allow_module_level=True)


def small(**capacity: int) -> Capacity:
    return Capacity(**{"max_requests": 4, "max_tokens": 8, "max_query_len": 2, "max_seq_len": 64} | capacity)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(("query_lens", "pad"), [([1, 1, 1, 1], 4), ([2, 2], 3), ([], 8)])
def test_padding_beyond_the_requests_fits_what_capacity_reserves(query_lens, pad, graph):
    seq_lens = [5 + i for i in range(len(query_lens))]
    case = make_case(query_lens, seq_lens, pad_tokens=pad, N=17, capacity=small(), graph_capture=graph)
    case.check(case.run("triton:mqa"))


def test_much_padding_is_cut_like_requests():
    case = make_case([1] * 4, [9] * 4, pad_tokens=200, N=17, capacity=small(max_tokens=256, max_query_len=1))
    case.check(case.run("triton:mqa"))


def test_invariant_scratch_holds_a_round_when_heads_do_not_divide_the_tile():
    from tiers.tier2_triton.absorbed import absorbed_sizes, plan_absorbed

    need = make_need(
        N=32, L=512, R=64, P=128, V=128, page_size=64, batch_invariant=True, capacity=Capacity(1, 2048, 2048, 12288)
    )
    batch = make_batch([2000], [12000], need)
    rounds = plan_absorbed(need, batch, [0])
    states = absorbed_sizes(need, rounds)["part"][0][0]
    assert len(rounds) > 1
    assert max(r.slots * r.tile[0] for r in rounds) <= states


def test_a_refill_that_raises_leaves_the_plan_as_it_was():
    case = make_case([2, 2], [9, 9], pad_tokens=3, capacity=small(), graph_capture=True)
    tier = tiers.get("triton")
    plan = tier.plan(case.need, case.batch)
    batch, steps = plan.batch, plan.steps
    with pytest.raises(ValueError, match="7 tokens, as captured"):
        tier.plan(case.need, make_batch([1], [9], case.need), plan)
    assert (plan.batch, plan.steps) == (batch, steps)
    assert steps is not None


def test_a_plan_of_another_tier_is_refused_by_name():
    case = make_case([1], [9])
    with pytest.raises(ValueError, match=r"into\.tier"):
        tiers.get("triton").plan(case.need, case.batch, tiers.get("paged").plan(case.need, case.batch))


def test_the_profiling_plan_takes_what_a_step_takes_and_becomes_one():
    need = make_need(capacity=small(), graph_capture=True)
    tier = tiers.get("triton")
    profile = tier.plan(need, make_batch([], [], need))
    step = make_batch([1, 1], [9, 5], need)
    assert tier.plan(need, step).nbytes == profile.nbytes
    assert tier.plan(need, step, profile) is profile


def test_a_graph_plan_is_refilled_in_inference_mode():
    case = make_case([1, 1], [9, 5], capacity=small(), graph_capture=True)
    tier = tiers.get("triton")
    with torch.inference_mode():
        plan = tier.plan(case.need, case.batch)
        tier.plan(case.need, case.batch, plan)
        state = tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan)
    case.check(state)


def test_F5_queries_and_rows_whose_last_axis_is_strided_are_read_right():
    case = make_case([2, 3], [9, 12])
    turned = Query(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.q))
    assert turned.pe.stride(-1) != 1
    for form in ("mqa", "mha"):
        tier = tiers.get("triton", form=form)
        plan = tier.plan(case.need, case.batch)
        case.check(tier.attend(turned, case.cache, tier.prepare(case.up, case.need), plan))
    cache = PagedLatentCache.new(CacheSpec(2, case.need.page_size, case.need.layout))
    cache.data.zero_()
    kv_c, k_pe = (torch.randn(n, 3).T for n in (case.need.L, case.need.R))
    slots = torch.tensor([[0, 9], [1, 9], [2, 9]])[:, 0]
    tiers.get("triton").write(cache, kv_c, k_pe, slots)
    assert torch.equal(cache.data.view(8, -1)[:3], torch.cat([kv_c, k_pe], -1))
    assert not cache.data.view(8, -1)[3:].any()


def test_auto_expands_on_hopper_by_its_kernel_else_by_cudnn_or_the_portable_one():
    sizes = {"N": 16, "L": 512, "P": 128, "R": 64, "V": 128, "page_size": 64, "dtype": torch.bfloat16}
    need, tier = make_need(**sizes, device="cuda:0", arch="sm_80"), tiers.get("triton")
    assert [tier.route(need, n) for n in (1, 256, 1023, 1024, 16384)] == [
        "triton"
    ] * 5  # 192 is too wide for cuDNN there
    need = make_need(**sizes, device="cuda:0", arch="sm_90")
    assert [tier.route(need, n) for n in (1, 256, 1023, 1024, 16384)] == ["hopper"] * 5
    wide = make_need(**sizes | {"P": 192, "V": 256}, device="cuda:0", arch="sm_90")
    assert [tier.route(wide, n) for n in (1, 256, 1023, 1024, 16384)] == ["hopper"] * 5
    other = make_need(**sizes | {"P": 64}, device="cuda:0", arch="sm_90")  # not taken by the kernel for sm_90
    assert [tier.route(other, n) for n in (1, 256, 1023, 1024, 16384)] == ["triton"] * 3 + ["cudnn"] * 2
    assert tier.route(make_need(**sizes, device="cuda:0", arch="gfx942"), 16384) == "triton"
    assert tiers.get("triton:cudnn").route(need, 1) == "cudnn"
    assert tiers.get("triton:mqa").route(need, 16384) is None
