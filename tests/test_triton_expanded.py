"""The expanded half of the Triton tier against the float64 oracle: chunks, masks, empty rows, poison, the routes.

Axes: T new tokens (packed over requests), S cached tokens, n keys in the workspace, N heads, L KV rank, P nope, R rope,
V value.
"""

from triton_here import DEVICE, require_triton

require_triton()

import math  # noqa: E402
from dataclasses import dataclass  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from small_case import NAN, PAGE, L, N, P, R, V, make_batch, make_case, make_need  # noqa: E402

from mla.cache import FloatRows  # noqa: E402
from mla.need import Capacity  # noqa: E402
from mla.state import AttentionState  # noqa: E402
from mla.tier import Tier, deliver, plan, prepare  # noqa: E402
from tiers.tier2_triton import expanded  # noqa: E402
from tiers.tier2_triton.expanded import (  # noqa: E402
    Call,
    attend_expanded,
    attend_keys,
    expanded_sizes,
    plan_expanded,
    prepare_expanded,
    why_not_route,
)

INF = float("inf")
CAPS = [PAGE, 5 * PAGE, 1000]


@dataclass(frozen=True)
class Expanded(Tier):
    """Only the expanded half, for the given requests of a batch or all; what it does not write stays NaN."""

    cap: int = 1000
    route: str = "triton"
    requests: tuple[int, ...] | None = None
    name: str = "expanded"

    def why_not(self, need):
        return []

    def prepare(self, up, need):
        return prepare(self, up, need, **prepare_expanded(up, need, self.route))

    def plan(self, need, batch, into=None):
        result = plan(self, need, batch, into)
        requests = range(batch.num_requests) if self.requests is None else self.requests
        result.steps = plan_expanded(need, batch, requests, self.cap, self.route)
        result.sizes = result.steps.sizes
        return result

    def attend(self, q, cache, prepared, plan, out=None):
        need, T = plan.need, plan.batch.num_tokens
        result = torch.full((T, need.N, need.V), NAN, dtype=need.out_dtype)
        lse = torch.full((T, need.N), NAN) if need.lse else None
        plan.reserve()
        for buffer in plan._buffers.values():
            buffer.fill_(NAN)
        attend_expanded(plan.steps, q, cache, prepared.data, plan, result, lse)
        return deliver(AttentionState(result, lse), plan, out)


@pytest.fixture(autouse=True)
def _where_cases_are(request):
    if DEVICE == "cuda" and "behind_pytorch" not in request.node.name:
        pytest.skip("small_case makes its cases on the CPU; on a GPU `mla check triton` is the judge")


@pytest.fixture
def plain_kernel(monkeypatch):
    """A kernel behind PyTorch that runs anywhere: what `attend_keys` promises, in float32."""

    def attend(route, q, k, v, causal, softmax_scale):
        scores = torch.einsum("tnw,snw->tns", q, k) * softmax_scale
        if causal:
            assert q.shape[0] == k.shape[0]
            hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden[:, None], -INF)
        assert v.shape[2] == (k.shape[2] if route == "padded" else V)
        return torch.einsum("tns,snv->tnv", scores.softmax(-1), v), scores.logsumexp(-1)

    monkeypatch.setattr(expanded, "attend_keys", attend)


# our own kernel


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_chunks_of_one_page_of_some_and_of_all_keys(mask, cap):
    case = make_case([3, 9, 1, 0, 2], [3, 18, 6, 5, 2], mask=mask)  # new tokens begin inside a page
    case.check(case.run(Expanded(cap)))


@pytest.mark.parametrize("cap", CAPS)
def test_explicit_bounds_and_empty_rows(cap):
    bounds = [3, 0, 14, 14, 1, *[0] * 4, 2, 21]
    case = make_case([5, 4, 2], [14, 6, 21], mask="rows", row_kv_lens=bounds)
    state = case.run(Expanded(cap))
    case.check(state)
    for row, bound in enumerate(bounds):
        assert (state.out[row] == 0).all() == (bound == 0)
        assert (state.lse[row] == -INF).all() == (bound == 0)


def test_more_rows_than_a_tile_has():
    case = make_case([70, 3], [90, 40])
    case.check(case.run(Expanded(40)))


def test_K_requests_without_keys_give_0_and_minus_infinity():
    case = make_case([2, 3, 0], [0, 5, 0])
    state = case.run(Expanded(PAGE))
    case.check(state)
    assert (state.out[:2] == 0).all()
    assert (state.lse[:2] == -INF).all()
    alone = make_case([2], [0])
    assert (alone.run(Expanded(PAGE)).out == 0).all()


@pytest.mark.parametrize("route", ["triton", "cudnn"])
def test_other_requests_are_left_alone(route, plain_kernel):
    case = make_case([3, 2, 4], [9, 2, 11], pad_tokens=2)
    state = case.run(Expanded(2 * PAGE, route, requests=(2, 0)))
    whole = case.run(Expanded(2 * PAGE, route))
    case_rows = [*range(3), *range(5, 9)]
    assert torch.equal(state.out[case_rows].isnan(), torch.zeros(7, N, V, dtype=torch.bool))
    assert state.out[3:5].isnan().all()
    assert state.lse[3:5].isnan().all()
    assert whole.out[9:].isnan().all()  # rows of no request are the tier's to empty
    for mine, all_of_them, empty in zip(state, whole, (0.0, -INF), strict=True):
        all_of_them[case_rows] = mine[case_rows]
        all_of_them[9:] = empty
    case.check(whole)


def test_no_requests_no_work():
    need = make_need()
    steps = plan_expanded(need, make_batch([1], [9], need), (), PAGE)
    assert (steps.chunks, steps.sizes) == ([], {})
    case = make_case([1], [9])
    assert case.run(Expanded(requests=())).out.isnan().all()


@pytest.mark.parametrize("cap", CAPS)
def test_results_in_16_bits_are_rounded_once_however_many_chunks(cap):
    fields = {"query_lens": [6, 9], "seq_lens": [9, 18]}
    wide = make_case(**fields).run(Expanded(cap))
    case = make_case(**fields, out_dtype=torch.float16)
    assert torch.equal(case.run(Expanded(cap)).out, wide.out.half())
    plan = Expanded(cap).plan(case.need, case.batch)
    # the second request never fits into 20 rows beside the first; 9 rows at 1000 would be waste
    assert plan.sizes["expanded_acc"] == (({PAGE: 15, 5 * PAGE: 9, 1000: 0}[cap], N, V), torch.float32)


def test_without_lse_the_output_is_the_same():
    fields = {"query_lens": [6, 9], "seq_lens": [9, 18]}
    wide, none = make_case(**fields).run(Expanded(8)), make_case(**fields, lse=False).run(Expanded(8))
    assert torch.equal(none.out, wide.out)
    assert none.lse is None


@pytest.mark.parametrize("sizes", [{"R": 0}, {"P": 24, "V": 10, "L": 24}, {"P": 8, "R": 16, "V": 40, "N": 5}])
def test_other_head_sizes(sizes):
    case = make_case([9, 4], [20, 11], **sizes)
    case.check(case.run(Expanded(12)))


# the plan


def test_a_tile_goes_on_where_the_last_chunk_left_it():
    need = make_need(out_dtype=torch.float16)
    batch = make_batch([3, 2], [10, 2], need)
    steps = plan_expanded(need, batch, [0, 1], 4, "triton")
    assert [c.rows for c in steps.chunks] == [4, 4, 4]
    # row, rows, workspace row, keys, first key, row of the accumulator, 1 goes on + 2 is gone on from
    found = [c.tiles.tolist() for c in steps.chunks]
    assert found == [[[0, 3, 0, 4, 0, 0, 2]], [[0, 3, 0, 4, 4, 0, 3]], [[0, 3, 0, 2, 8, 0, 1], [3, 2, 2, 2, 0, 3, 0]]]
    assert [c.blocks.tolist() for c in steps.chunks] == [[[0, 0, 4, 0]], [[0, 4, 4, 0]], [[0, 8, 2, 0], [1, 0, 2, 2]]]


def test_causal_rows_are_not_sent_over_chunks_that_they_do_not_see():
    need = make_need()
    tile = plan_expanded(need, make_batch([1], [1], need), [0], 4).tile[0]
    batch = make_batch([2 * tile], [2 * tile], need)
    steps = plan_expanded(need, batch, [0], tile, "triton")
    rows = [[item[0] for item in c.tiles.tolist()] for c in steps.chunks]
    assert rows == [[0, tile], [tile]] or rows == [[tile, 0], [tile]]


def test_heavy_tiles_come_first():
    need = make_need()
    steps = plan_expanded(need, make_batch([2, 2, 2], [5, 50, 20], need), [0, 1, 2], 1000)
    assert [item[3] for item in steps.chunks[0].tiles.tolist()] == [50, 20, 5]


def test_the_workspace_is_bounded_by_the_cap_whatever_the_context():
    need = make_need()
    for seq_len in (100, 4000):
        batch = make_batch([3], [seq_len], need)
        sizes = plan_expanded(need, batch, [0], 40, "triton").sizes
        bytes_ = sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes.values())
        assert bytes_ <= 40 * (N * (P + V) + L + R) * 4


def test_a_capacity_alone_gives_the_sizes():
    need = make_need(capacity=Capacity(2, 16, 8, 64), out_dtype=torch.float16, lse=False)
    sizes = plan_expanded(need, make_batch([3], [9], need), [0], 40, "triton").sizes
    assert sizes == expanded_sizes(need, 40)
    assert sizes["expanded_rows"][0] == (40, L + R)
    assert sizes["expanded_acc"][0] == (16, N, V)
    assert sizes["expanded_lse"][0] == (16, N)
    assert expanded_sizes(need, 128)["expanded_acc"][0] == (0, N, V)  # all keys of both requests fit at once
    with pytest.raises(ValueError, match=r"need\.capacity: expected a Capacity, got None"):
        expanded_sizes(make_need(), 40)


def test_prepare_flattens_heads_and_pads_values_for_an_equal_width():
    up, need = make_case([1], [1]).up, make_need()
    data = prepare_expanded(up, need)
    assert data["expanded_W_UK"].shape == (L, N * P)
    assert torch.equal(data["expanded_W_UV"].view(L, N, V), up.W_UV)
    padded = prepare_expanded(up, need, "padded")["expanded_W_UV"].view(L, N, P + R)
    assert torch.equal(padded[..., :V], up.W_UV)
    assert (padded[..., V:] == 0).all()


# kernels behind PyTorch: the planning here, the numbers on a GPU


@pytest.mark.parametrize("route", ["cudnn", "padded"])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_rectangles_and_squares_make_up_what_a_row_sees(mask, cap, route, plain_kernel):
    case = make_case([3, 9, 1, 0, 2, 2], [3, 18, 6, 5, 2, 0], mask=mask)
    case.check(case.run(Expanded(cap, route)))


def test_a_request_is_cut_into_its_context_and_its_own_square():
    need = make_need()
    batch = make_batch([4, 2], [10, 2], need)
    steps = plan_expanded(need, batch, [0, 1], 8, "cudnn")
    assert steps.chunks[0].calls == [Call(0, 4, 0, 6, False), Call(0, 2, 6, 8, True), Call(2, 4, 6, 8, False)]
    assert steps.chunks[1].calls == [Call(2, 4, 0, 2, True), Call(4, 6, 2, 4, True)]
    assert (steps.parts, steps.empty) == ([(0, 4, 0)], [])


def test_one_key_needs_no_kernel():
    q, k, v = torch.randn(3, 2, 20), torch.randn(1, 2, 20), torch.randn(1, 2, 10)
    out, lse = attend_keys("cudnn", q, k, v, False, 0.5)
    assert torch.equal(out, v.expand(3, 2, 10))
    assert (lse - torch.einsum("tnw,nw->tn", q, k[0]) * 0.5).abs().max() <= 20 * 2**-24 * 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN and flash attention behind PyTorch need a GPU")
@pytest.mark.parametrize("route", ["cudnn", "padded"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernels_behind_pytorch(route, causal):
    draw = lambda *shape: torch.randn(*shape, device="cuda").to(torch.bfloat16)
    t, s = 130, 130 if causal else 77
    q, k, v = draw(t, 4, 192), draw(s, 4, 192), draw(s, 4, 192 if route == "padded" else 128)
    out, lse = attend_keys(route, q, k, v, causal, 192**-0.5)
    scores = torch.einsum("tnw,snw->tns", q.double(), k.double()) * 192**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(t, s, device="cuda").triu(1).bool()[:, None], -INF)
    exact = torch.einsum("tns,snv->tnv", scores.softmax(-1), v.double())
    # weights and the output are rounded to 8 bits each
    assert (out.double() - exact).abs().max() <= 2 * 2**-8 * v.double().abs().max()
    assert (lse.double() - scores.logsumexp(-1)).abs().max() <= 1e-5 + 8e-5 * scores.logsumexp(-1).abs().max()


# refusals


def refused(route, **fields):
    return " ".join(why_not_route(make_need(**fields), route))


GPU = {"arch": "sm_90", "dtype": torch.bfloat16, "P": 128, "R": 64, "V": 128}


@pytest.mark.parametrize("route", ["triton", "cudnn", "padded"])
def test_routes_serve_released_sizes(route):
    assert refused(route, **GPU) == ""


@pytest.mark.parametrize("route", ["triton", "cudnn", "padded"])
def test_P9_expanded_float16_is_refused_with_the_reason(route):
    assert "expanded float16 keys can pass 65504" in refused(route, **GPU | {"dtype": torch.float16})


def test_refusals_are_whole_sentences():
    said = refused("triton", **GPU, layout=FloatRows(L, 64, torch.float32))
    assert said.startswith("a cache of float32 rows is not expanded for queries of torch.bfloat16; route 'triton'")
    assert "use the absorbed form" in refused("triton", **GPU | {"V": 4096, "P": 4096, "arch": "gfx942"})
    assert "which takes torch.bfloat16;" in refused("cudnn", **GPU | {"dtype": torch.float32})
    assert "mask 'rows' is not computed by route 'padded'" in refused("padded", **GPU, mask="rows")
    said = refused("cudnn", **GPU | {"arch": "gfx942"})
    assert "arch 'gfx942' is not served by route 'cudnn', which takes sm_90" in said
    said = refused("cudnn", **GPU | {"arch": "sm_80"})
    assert "P + R = 192, V = 128 is not taken by route 'cudnn', which takes multiples of 8 up to 128 on sm_80" in said
    assert "V = 256 cannot be padded to P + R = 192" in refused("padded", **GPU | {"V": 256})
    with pytest.raises(ValueError, match=r"route: expected one of .*, got 'cuda'"):
        why_not_route(make_need(), "cuda")
