"""The inner level: a raw kernel against its own truth, with its own and narrower budget.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, R rope.
"""

import copy
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from mla.accuracy import compare, latent_reference
from mla.adapters import from_attend, from_latent
from mla.conformance import SPECS, Case, run_case, spec, suite
from mla.conformance.cases import DIMS, TOY, find
from mla.conformance.inputs import make_inputs
from mla.conformance.latent import attempt_latent, judge_latent, latent_query, latent_truth, run_latent_case
from mla.conformance.zoo import fault
from mla.conformance.zoo.kernel import attend
from mla.projections import absorb_query
from mla.state import AttentionState

INF = float("inf")
CASE = Case(SPECS["padded_tail"], TOY, "bf16", "", "needle", page_size=8)
FULL_PRECISION = dataclasses.replace(CASE, dtype="f32", layout="rows_f32")


def changed(change: Callable[[AttentionState], object]) -> Callable[..., AttentionState]:
    """The right kernel with its answer changed."""
    return lambda *given: change(attend(*given))


# the truth


@pytest.mark.parametrize("dims", ["toy", "toy_r0"])
@pytest.mark.parametrize("batch", ["padded_tail", "rank_some_rows", "zero_rows_prefill", "no_requests"])
def test_the_truth_is_the_softmax_over_the_rows_as_cached(batch, dims):
    case = Case(SPECS[batch], DIMS[dims], "f16", "rows_bf16", "randn", page_size=8)
    made, heads = latent_truth(case)
    given = make_inputs(case)
    q_latent, q_pe = (x.double() for x in latent_query(case, given))
    assert heads is None
    assert made.rows.tolist() == list(range(case.batch.num_tokens))
    assert tuple(made.out.shape) == (case.batch.num_tokens, case.dims.N, case.dims.L)
    owners = [b for b, q in enumerate(case.batch.query_lens) for _ in range(q)]
    visible = [*case.batch.visible(), *[0] * case.batch.pad_tokens]
    for i, (n, limit) in enumerate(zip(visible, made.out_limit, strict=True)):
        if n == 0:
            assert bool(made.empty[i])
            assert not bool(made.out[i].any())
            assert bool((made.lse[i] == -INF).all())
            assert not bool(limit.any())
            continue
        kv_c, k_pe = (x[:n].bfloat16().double() for x in given.keys[owners[i]])
        scores = (q_latent[i] @ kv_c.T + q_pe[i] @ k_pe.T) * case.dims.softmax_scale  # (N, n)
        lse = scores.logsumexp(-1)
        # two float64 computations of sums of a few hundred terms of size 10
        assert torch.allclose(made.lse[i], lse, rtol=1e-12, atol=1e-12)
        assert torch.allclose(made.out[i], (scores - lse[:, None]).exp() @ kv_c, rtol=1e-12, atol=1e-12)
        # 1e-5 + 8e-5 |lse| + 2^-23 A, and of the output at least 3 u of its size, u = 2^-11
        magnitudes = q_latent[i].abs() @ kv_c.abs().T + q_pe[i].abs() @ k_pe.abs().T  # (N, n)
        added = case.dims.softmax_scale * ((scores - lse[:, None]).exp() * magnitudes).sum(-1)
        assert torch.allclose(made.lse_limit[i], 1e-5 + 8e-5 * lse.abs() + 2.0**-23 * added, rtol=1e-12)
        assert bool((limit >= 3 * 2.0**-11 * made.out[i].square().mean(-1).sqrt() * (1 - 1e-12)).all())


def test_the_query_is_absorbed_in_float32_rounded_once_and_lies_strided():
    given, real = make_inputs(CASE), slice(0, sum(CASE.batch.query_lens))
    q_latent, q_pe = latent_query(CASE, given)
    exact = torch.einsum("tnp,lnp->tnl", given.q.nope.double(), given.up.W_UK.double())[real]
    # one rounding to bf16, after sums of P = 12 products in float32
    bound = 2.0**-8 * exact.abs() + 12 * 2.0**-24 * exact.abs().amax()
    assert bool(((q_latent[real].double() - exact).abs() <= bound).all())
    assert q_latent.dtype == torch.bfloat16
    assert torch.equal(q_pe[real], given.q.pe[real])
    assert not q_latent.is_contiguous()
    assert q_latent.stride() == q_pe.stride() == (3 * 40, 40, 1)


def test_a_long_case_is_sampled_in_rows_and_heads():
    made, heads = latent_truth(Case(SPECS["large_decode"], DIMS["toy_n63"], "bf16", "", "randn"))
    assert heads is not None
    assert len(heads) < 63
    assert heads[-1] == 62
    assert made.rows.tolist() == list(range(32))
    assert made.out.shape == (32, len(heads), DIMS["toy_n63"].L)
    made, heads = latent_truth(Case(spec("1q128s2k"), DIMS["toy_n12"], "f16", "", "randn"))
    assert heads is None
    assert {0, 127} < set(made.rows.tolist()) < set(range(128))


# the rule


@pytest.mark.parametrize("sign", [1, -1])
def test_the_lse_may_be_off_by_1e_5_and_8e_5_of_itself_and_a_unit_of_what_was_added(sign):
    made, _ = latent_truth(CASE)
    limit = torch.empty_like(made.lse_limit).index_copy_(0, made.rows, made.lse_limit)
    assert bool((made.lse_limit > 1e-5 + 8e-5 * made.lse.abs())[~made.empty].all())

    def off(share: float) -> Callable[..., AttentionState]:
        def moved(q_latent: Tensor, *rest) -> AttentionState:
            out, lse = attend(q_latent, *rest)
            mine = limit if len(calls) % 2 == 0 else limit.roll(1, dims=1)  # the second run has the heads moved on
            calls.append(1)
            return AttentionState(out, lse + sign * share * mine.to(lse.dtype))

        calls: list[int] = []
        return moved

    exact = run_latent_case(attend, CASE).used_lse
    inside, outside = run_latent_case(off(0.9), CASE), run_latent_case(off(1.1), CASE)
    assert exact < 0.05
    assert (inside.status, outside.status) == ("ok", "mismatch")
    assert inside.used_lse == pytest.approx(0.9, abs=exact + 0.01)
    assert outside.used_lse == pytest.approx(1.1, abs=exact + 0.01)
    assert outside.where.metric == "lse"


def test_a_score_that_cancels_may_have_the_error_of_what_was_added():
    """Seen on an H200: a score of -0.08 whose products add 1709 in magnitude is off by 1.4e-5, rightly.

    Tensor cores cut their float32 sum off after each step of 16 products; here the 36 steps of row 7, head 4.
    """
    case = find("v3_n64-edge_lengths_32-bf16-rows_bf16-peaked-contiguous-p64-s0-layers-refilled")
    given, scale = make_inputs(case), case.dims.softmax_scale
    row, head, request, S = 7, 4, 7, 2
    assert int(given.batch.row_kv_lens[row]) == S
    at = slice(head, head + 1)
    q_latent = absorb_query(given.q.nope[row : row + 1, at], given.up.W_UK[:, at]).to(torch.bfloat16)
    q_pe, (kv_c, k_pe) = given.q.pe[row : row + 1, at], (x[:S] for x in given.keys[request])
    made = latent_reference(q_latent, q_pe, kv_c, k_pe, torch.tensor([S]), scale, dtype=torch.bfloat16, seed=0)
    terms = torch.cat([q_latent, q_pe], -1)[0].double() * torch.cat([kv_c, k_pe], -1).double()  # (S, L+R)
    score = torch.zeros(S, dtype=torch.float64)
    for step in terms.unflatten(1, (-1, 16)).sum(-1).unbind(-1):
        score = ((score + step).view(torch.int64) & -(1 << 29)).view(torch.float64)  # as float32, toward zero
    lse = (score * scale).logsumexp(-1)
    out = torch.exp(score * scale - lse) @ kv_c.double()
    found = compare(AttentionState(out.to(torch.bfloat16)[None, None], lse.float()[None, None]), made)
    error = abs(float(lse - made.lse))
    assert error > 1.2 * (1e-5 + 8e-5 * abs(float(made.lse)))
    assert found.ok
    assert found.used_lse < 0.5


def test_a_query_that_is_rounded_again_passes_around_projections_and_not_here():
    """Replicas at this level do not round the query: a kernel may not hide behind the absorption around it."""

    def one_bit_less(q_latent: Tensor, q_pe: Tensor, *rest) -> AttentionState:
        grid = 2.0 ** torch.floor(torch.log2(q_latent.float().abs().clamp(min=1e-30))) * 2.0**-6
        return attend((torch.round(q_latent.float() / grid) * grid).to(q_latent.dtype), q_pe, *rest)

    tier = from_latent("one bit less", one_bit_less)
    assert run_case(tier, CASE).ok
    inner = run_latent_case(tier.latent, CASE)
    assert inner.status == "mismatch"
    assert inner.used_lse > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_probabilities_and_output_may_be_rounded_to_the_dtype(dtype):
    name = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
    rounded = lambda s: AttentionState(s.out.to(dtype), s.lse)
    for family in ("randn", "peaked", "needle", "equal_keys", "large_logits"):
        case = dataclasses.replace(CASE, dtype=name, layout=f"rows_{name}", family=family)
        result = run_latent_case(changed(rounded), case)
        assert result.ok, result


# what is found


def test_the_kernel_passes_smoke_as_an_inner_kernel():
    wrong = [r for r in (run_latent_case(attend, case) for case in suite("smoke")) if not r.ok]
    assert wrong == []


def test_a_result_is_of_the_inner_level():
    result = run_latent_case(attend, CASE, name="mine")
    assert (result.tier, result.level, result.name) == ("mine", "latent", f"{CASE.id}@latent")
    assert result.record()["level"] == "latent"
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("change", "status", "detail"),
    [
        (lambda s: AttentionState(s.out[..., :-1], s.lse), "wrong_shape", "out is Tensor (12, 3, 31)"),
        (lambda s: AttentionState(s.out, s.lse.T), "wrong_shape", "lse is Tensor (3, 12), expected a Tensor (12, 3)"),
        (lambda s: AttentionState(s.out, None), "wrong_shape", "lse is None"),
        (lambda s: AttentionState(Parameter(s.out), s.lse), "wrong_shape", "out is Parameter"),
        (lambda s: AttentionState(s.out.double(), s.lse), "wrong_dtype", "out is torch.float64 on cpu"),
        (lambda s: AttentionState(s.out, s.lse.bfloat16()), "wrong_dtype", "lse is torch.bfloat16"),
        (lambda s: (s.out, s.lse), "wrong_shape", "the kernel returned a tuple"),
        (lambda s: AttentionState(s.out * 0, s.lse), "mismatch", ""),
        (lambda s: AttentionState(s.out.roll(1, 1), s.lse), "mismatch", ""),
        (lambda s: AttentionState(s.out / 0, s.lse), "not_finite", "out of row 0, head 0 is not finite"),
        (lambda s: AttentionState(s.out, s.lse.masked_fill(s.lse == -INF, 0.0)), "mismatch", ""),
        (lambda s: AttentionState(s.out + (s.lse == -INF)[..., None], s.lse), "mismatch", ""),
    ],
)
def test_a_wrong_answer_has_its_status(change, status, detail):
    result = run_latent_case(changed(change), CASE)
    assert (result.status, result.ok) == (status, False)
    assert detail in result.detail
    assert math.isinf(max(result.used_out, result.used_lse)) or max(result.used_out, result.used_lse) > 1


def test_a_kernel_that_raises_or_refuses_is_a_row():
    def raises(*given) -> AttentionState:
        raise SystemExit(3)

    result = run_latent_case(raises, CASE)
    assert (result.status, result.detail, result.kind) == ("raised", "SystemExit: 3", "form")
    assert "test_latent.py" in result.at
    refused = run_latent_case(attend, CASE, why_not=lambda need: ["page_size = 8 is not taken; use 64."])
    assert (refused.status, refused.detail) == ("refused", "page_size = 8 is not taken; use 64.")
    assert not refused.failed
    assert run_latent_case(attend, dataclasses.replace(CASE, lse=False)).ok


@pytest.mark.parametrize(
    ("touch", "what"),
    [
        (lambda q_latent, q_pe, cache, batch: q_latent, "q_latent was changed"),
        (lambda q_latent, q_pe, cache, batch: q_pe, "q_pe was changed"),
        (lambda q_latent, q_pe, cache, batch: cache.data, "the cache was changed"),
        (lambda q_latent, q_pe, cache, batch: batch.row_kv_lens, "batch.row_kv_lens was changed"),
        (lambda q_latent, q_pe, cache, batch: batch.positions, "batch.positions was changed"),
    ],
)
def test_what_a_kernel_is_given_stays_as_it_was(touch, what):
    def kernel(*given) -> AttentionState:
        state = attend(*given)
        x = touch(*given[:4])
        x.copy_(torch.where(torch.isfinite(x), x + 1, x))
        return state

    result = run_latent_case(kernel, CASE)
    assert (result.status, result.detail, result.kind) == ("mismatch", what, "memory")


def test_poison_that_is_read_shows():
    for name in ("tail_not_zeroed", "page_offset_off_by_one", "memory_output_not_initialised"):
        assert run_latent_case(fault(name).kernel(), CASE).status == "not_finite", name
    outside = run_latent_case(fault("page_past_the_table").kernel(), CASE)
    assert (outside.status, outside.kind) == ("raised", "page")


def test_a_buffer_that_is_handed_out_twice_and_an_answer_that_is_kept_are_found():
    held: list[AttentionState] = []

    def scratch(*given) -> AttentionState:
        state = attend(*given)
        held.append(state)
        for now, new in zip(held[0], state, strict=True):
            now.copy_(new)
        return held[0]

    def kept(*given) -> AttentionState:
        held.append(attend(*given))
        return AttentionState(held[0].out.clone(), held[0].lse.clone())

    result = run_latent_case(scratch, CASE)
    assert (result.status, result.kind) == ("mismatch", "memory")
    assert result.detail.startswith("out of the first run, which the second one reused as scratch")
    held.clear()
    result = run_latent_case(kept, CASE)
    assert (result.status, result.kind) == ("mismatch", "memory")
    assert "second" in result.detail


def test_repeats_must_agree_in_bits():
    calls: list[int] = []

    def race(*given) -> AttentionState:
        state = attend(*given)
        calls.append(1)
        state.out[0, 0, 0] *= 1 + 2.0**-23 * (len(calls) == 4)
        return state

    assert run_latent_case(race, FULL_PRECISION).ok
    calls.clear()
    result = run_latent_case(race, dataclasses.replace(FULL_PRECISION, repeats=3))
    assert (result.status, result.kind) == ("mismatch", "memory")


def test_a_wrong_kernel_is_diagnosed_by_what_a_whole_tier_makes_of_it():
    for name in ("scale_without_mscale", "mask_top_left", "lse_base_2"):
        result = run_latent_case(fault(name).kernel(), dataclasses.replace(CASE, family="randn"))
        assert result.kind == fault(name).kind, name
        assert result.diagnosis is not None
    silent = run_latent_case(fault("mask_top_left").kernel(), CASE, diagnosed=False)
    assert (silent.kind, silent.diagnosis) == ("", None)


def test_try_and_judgement_may_lie_in_two_processes():
    given = copy.deepcopy(make_inputs(CASE))
    trial = attempt_latent(attend, CASE, "cpu", given, name="mine")
    assert judge_latent(CASE, trial, "cpu").ok
    for name in ("first.out", "memory.after", "input.q_latent", "input.batch.seq_lens"):
        cut = {key: x for key, x in trial.tensors.items() if key != name}
        result = judge_latent(CASE, dataclasses.replace(trial, tensors=cut), "cpu")
        assert (result.status, result.detail) == ("crashed", f"its process did not hand over {name}")
    assert judge_latent(CASE, dataclasses.replace(trial, status="ok"), "cpu").status == "crashed"


# a tier from a kernel


def test_from_latent_makes_a_tier_that_keeps_its_kernel():
    tier = from_latent("mine", attend)
    assert (tier.name, tier.latent) == ("mine", attend)
    assert run_case(tier, CASE).ok
    assert from_attend("x", lambda *given: None).latent is None
    refuses = from_latent("mine", attend, lambda need: ["no."])
    assert run_case(refuses, CASE).status == "refused"
    with pytest.raises(TypeError, match=r"^kernel: expected a function"):
        from_latent("mine", None)
    with pytest.raises(TypeError, match=r"^name: expected a name"):
        from_latent("", attend)


def test_the_kernel_gets_the_rounded_query_and_the_reference_starts_from_it():
    seen: list[Tensor] = []

    def kernel(q_latent: Tensor, *rest) -> AttentionState:
        seen.append(q_latent)
        return attend(q_latent, *rest)

    assert run_case(from_latent("mine", kernel), CASE).ok
    assert {x.dtype for x in seen} == {torch.bfloat16}
    q, kv = torch.ones(1, 2, 4), torch.ones(3, 4)
    made = latent_reference(
        q, torch.zeros(1, 2, 0), kv, torch.zeros(3, 0), torch.tensor([3]), 0.5, dtype=torch.float32, seed=0
    )
    assert torch.allclose(made.lse, torch.full((1, 2), 2 + math.log(3), dtype=torch.float64), rtol=1e-14)
