"""The error budget: stochastic rounding, limits, and what `compare` accepts and rejects.

T query rows, S keys, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import math

import pytest
import torch

from mla.accuracy import Reference, compare, latent_reference, limits, magnitudes, reference
from mla.batch import AttentionBatch
from mla.oracle import oracle
from mla.projections import Query, UpProjection, absorb_query, project_values
from mla.replicas import UNIT_ROUNDOFF, Noise, Problem, expected_error
from mla.state import AttentionState

T, S, N, L, P, R, V = 5, 41, 3, 32, 12, 8, 10
SCALE = 0.3
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def tensors(dtype: torch.dtype, seed: int = 0) -> tuple[Query, torch.Tensor, torch.Tensor, UpProjection]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype)
    up = UpProjection((draw(L, N, P) / L**0.5).to(dtype), (draw(L, N, V) / L**0.5).to(dtype))
    return Query(draw(T, N, P), draw(T, N, R)), draw(S, L), draw(S, R), up


def one_request(dtype: torch.dtype, seed: int = 0, **lens) -> tuple[Reference, AttentionState, AttentionBatch]:
    """The reference of one causal request, and the oracle's own result as a state."""
    q, kv_c, k_pe, up = tensors(dtype, seed)
    batch = AttentionBatch.bottom_right([T], [S], [[0]], page_size=S, num_pages=1)
    truth = reference(q, [(kv_c, k_pe)], up, batch, SCALE, dtype=dtype, seed=seed, **lens)
    out, lse = oracle(*q, kv_c, k_pe, *up, batch.row_kv_lens, SCALE)
    return truth, AttentionState(out, lse), batch


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_stochastic_rounding_goes_to_the_two_neighbours_and_is_unbiased(dtype):
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    low = torch.tensor(1.0, dtype=wide)
    step = 2.0 ** (1 - BITS[dtype])
    x = low + 0.25 * step
    drawn = Noise(3).round(x, dtype, copies=4096)
    assert set(drawn.tolist()) == {1.0, 1.0 + step}
    share = float((drawn > 1).double().mean())
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4096)  # five standard deviations of a fixed seed's mean
    on_grid = torch.tensor([0.0, 1.0, -2.5, 2.0**-10], dtype=wide)
    assert torch.equal(Noise(1).round(on_grid, dtype), on_grid)
    assert torch.equal(Noise(1).round(-x, dtype, copies=9), -Noise(1).round(x, dtype, copies=9))


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_expected_error_is_the_rounding_of_a_single_stored_number(dtype):
    """One key: probabilities are 1, so form mha has the rounding of v and out, and its LSE that of k_nope alone."""
    q, kv_c, k_pe, up = tensors(dtype)
    lens = torch.ones(T, dtype=torch.int32)
    problem = Problem(*q, kv_c[:1], k_pe[:1], *up, lens, SCALE)
    truth = oracle(*q, kv_c[:1], k_pe[:1], *up, lens, SCALE)
    e_out, e_lse = expected_error(problem, truth, dtype, 64, Noise(0), forms=("mha",))
    v = truth[0].abs()
    quantum = 2.0 ** (torch.floor(torch.log2(v)) + 1 - BITS[dtype])
    # stochastic rounding of x = (k + f) quantum has variance quantum^2 f (1 - f); rounding again adds nothing
    f = torch.frac(v / quantum)
    expected = (quantum**2 * f * (1 - f)).mean(-1).sqrt()
    assert torch.all(
        (e_out / expected - 1).abs() < 0.35
    )  # 640 draws: 5 sigma of a chi with 10 x 64 terms is about 0.35
    k_nope = torch.einsum("sl,lnp->snp", kv_c[:1].double(), up.W_UK.double())[0]
    quantum = 2.0 ** (torch.floor(torch.log2(k_nope.abs())) + 1 - BITS[dtype])
    f = torch.frac(k_nope.abs() / quantum)
    deviation = (q.nope.double() ** 2 * quantum**2 * f * (1 - f)).sum(-1).sqrt() * SCALE
    if dtype != torch.float32:  # there the score itself, stored in float32, takes a part of that size
        assert torch.all((e_lse / deviation - 1).abs() < 0.45)  # 64 draws: 5 / sqrt(2 * 64)


def test_limits_are_the_formulas_of_the_design():
    out, lse = torch.full((1, 1, 4), 0.5, dtype=torch.float64), torch.full((1, 1), -3.0, dtype=torch.float64)
    e_out, e_lse = torch.full((1, 1), 0.01, dtype=torch.float64), torch.full((1, 1), 0.02, dtype=torch.float64)
    lens = torch.tensor([100])
    a, b = limits(torch.bfloat16, out, lse, e_out, e_lse, lens)
    assert float(a) == pytest.approx(3 * (0.01 + 2**-8 * 0.5), rel=1e-15)
    assert float(b) == pytest.approx(6 * (0.02 + 2**-22 * 4), rel=1e-15)
    a, b = limits(torch.float32, out, lse, e_out, e_lse, lens)
    assert float(a) == pytest.approx(32 * (0.01 + 2**-24 * 4 * 0.5) + 25 * 2**-24 * 0.5, rel=1e-15)
    assert float(b) == pytest.approx(32 * (0.02 + 2**-22 * 4), rel=1e-15)
    added = (torch.full_like(lse, 300), torch.full_like(lse, 200))
    a, b = limits(torch.float16, out, lse, e_out, e_lse, lens, added)
    assert float(a) == pytest.approx(3 * (0.01 + 2**-11 * 0.5) + 300 * 2**-23, rel=1e-15)
    assert float(b) == pytest.approx(1e-5 + 8e-5 * 3 + 200 * 2**-23, rel=1e-15)


def test_magnitudes_weigh_what_a_score_adds_by_its_probability():
    q = torch.tensor([[[1.0, -2.0, 3.0]], [[0.5, 0.5, -1.0]]])  # (2, 1, 3): L = 2, R = 1
    keys = torch.tensor([[2.0, 1.0, 0.0], [-4.0, -2.0, 1.0], [9.0, 9.0, 9.0]])
    # row 0 sees keys 0 and 1: scores 2 - 2 + 0 = 0 and -4 + 4 + 3 = 3, times 1/2; they add 2 + 2 + 0 and 4 + 4 + 3
    # row 1 sees key 0 alone: 1 + 1/2
    share = math.exp(1.5) / (1 + math.exp(1.5))
    out = torch.tensor([[[2 - 6 * share, 1 - 3 * share]], [[2.0, 1.0]]], dtype=torch.float64)
    lse = torch.tensor([[math.log(1 + math.exp(1.5))], [0.75]], dtype=torch.float64)
    moves_out, moves_lse = magnitudes(q, keys, (out, lse), torch.tensor([2, 1]), 0.5)
    assert moves_lse.flatten().tolist() == pytest.approx([0.5 * (4 * (1 - share) + 11 * share), 0.75], rel=1e-12)
    # keys 0 and 1 are (6, 3) apart, and the output lies between them, `share` of the way
    apart = math.sqrt((36 + 9) / 2)
    both = 0.5 * apart * (4 * (1 - share) * share + 11 * share * (1 - share))
    assert moves_out.flatten().tolist() == pytest.approx([both, 0.0], rel=1e-12, abs=1e-7)  # sqrt of a float64 zero


def test_magnitudes_bound_what_wrong_scores_move():
    """Scores off by 1e-6 of their a, in any direction: output and LSE are off by at most 1e-6 B and 1e-6 A."""
    g = torch.Generator().manual_seed(0)
    q, keys = torch.randn(6, 2, 40, generator=g), torch.randn(9, 40, generator=g)
    q, keys, lens = q.double(), keys.double(), torch.arange(4, 10)
    hidden = torch.arange(9) >= lens[:, None, None]

    def attention(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, -1) @ keys[:, :32], scores.logsumexp(-1)

    scores, a = 0.2 * (q @ keys.T), 0.2 * (q.abs() @ keys.abs().T)
    out, lse = attention(scores)
    bounds = magnitudes(q, keys, (out, lse), lens, 0.2)
    most = torch.zeros(2)
    for _ in range(200):
        moved = attention(scores + 1e-6 * a * torch.randn(a.shape, generator=g).sign())
        errors = (moved[0] - out).square().mean(-1).sqrt(), (moved[1] - lse).abs()
        most = torch.maximum(most, torch.stack([(e / b).max() for e, b in zip(errors, bounds, strict=True)]) / 1e-6)
    assert bool((most <= 1 + 1e-4).all())  # first order: what is left out is 1e-6 times a, which is below 10
    assert bool((most > 0.5).all())


def test_one_unit_of_the_magnitudes_is_what_tensor_cores_cut_off():
    """The derivation of `magnitudes` on 576 products of normal numbers, added in steps of 16 and one by one."""
    many, K = 4000, 576
    g = torch.Generator().manual_seed(0)
    t = torch.randn(2, many, K, generator=g).bfloat16().double().prod(0)
    unit, exact = 2.0**-23 * t.abs().sum(-1), t.sum(-1)
    steps = t.view(many, -1, 16).sum(-1)
    most = 2.0**-23 * steps.cumsum(-1).abs().sum(-1) - 36 / 2 * 2.0**-23 * exact.abs()
    assert float((most / unit).mean()) < math.pi**2 / 16 * 36 / math.sqrt(K)
    total = torch.zeros(many, dtype=torch.float64)
    for step in steps.unbind(-1):
        total = cut_off(total + step)
    assert float((((total - exact).abs() - 36 / 2 * 2.0**-23 * exact.abs()) / unit).max()) < 1
    single = torch.zeros(many)
    for column in t.float().unbind(-1):  # a product of two bf16 numbers is a float32 number
        single = single + column
    nearest = (single.double() - exact) / unit
    assert 0.05 < float(nearest.square().mean().sqrt()) < 0.19
    assert float(nearest.abs().max()) < 1


def cut_off(x: torch.Tensor) -> torch.Tensor:
    """float64 numbers without what float32 has no bits for: rounded toward zero."""
    return (x.contiguous().view(torch.int64) & -(1 << 29)).view(torch.float64)


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_the_truth_uses_nothing_and_a_scaled_truth_uses_what_it_is_off_by(dtype):
    truth, state, _ = one_request(dtype)
    assert compare(state, truth) == dataclasses.replace(compare(state, truth), status="ok", used_out=0.0, used_lse=0.0)
    row, head = 3, 1
    size = float(truth.out[row, head].square().mean().sqrt())
    off = state.out.clone()
    off[row, head] *= 1 + 0.5 * float(truth.out_limit[row, head]) / size
    result = compare(AttentionState(off, state.lse), truth)
    assert result.ok
    assert result.out_at == (row, head)
    assert result.used_out == pytest.approx(0.5, rel=1e-9)
    off[row, head] = state.out[row, head] * (1 + 1.5 * float(truth.out_limit[row, head]) / size)
    result = compare(AttentionState(off, state.lse), truth)
    assert result.status == "mismatch"
    assert result.used_out == pytest.approx(1.5, rel=1e-9)
    lse = state.lse.clone()
    lse[2, 2] += 1.25 * float(truth.lse_limit[2, 2])
    result = compare(AttentionState(state.out, lse), truth)
    assert result.status == "mismatch"
    assert result.lse_at == (2, 2)
    assert result.used_lse == pytest.approx(1.25, rel=1e-9)


def test_compare_names_shapes_and_values_that_are_not_numbers():
    truth, state, _ = one_request(torch.bfloat16, rows=[0, 4])
    for wrong, status in (
        (AttentionState(state.out[:, :, :-1], state.lse), "wrong_shape"),
        (AttentionState(state.out[:4], state.lse[:4]), "wrong_shape"),
        (AttentionState(state.out, state.lse[:, :2]), "wrong_shape"),
    ):
        assert compare(wrong, truth).status == status
    out, lse = state.out.clone(), state.lse.clone()
    out[2, 1, 3] = float("nan")  # row 2 is not sampled: still looked at
    assert (compare(AttentionState(out, lse), truth).status, compare(AttentionState(out, lse), truth).out_at) == (
        "not_finite",
        (2, 1),
    )
    lse[1, 2] = float("inf")
    assert compare(AttentionState(state.out, lse), truth).status == "not_finite"
    assert compare(AttentionState(state.out, None), truth).ok


def test_an_empty_row_has_no_budget():
    q, kv_c, k_pe, up = tensors(torch.bfloat16)
    batch = AttentionBatch.rows([2, 1], [S, 0], [[0], []], [0, S, 0], page_size=S, num_pages=1, pad_tokens=1)
    q = Query(q.nope[:4].clone(), q.pe[:4].clone())
    q.nope[[0, 2, 3]] = float("nan")
    truth = reference(q, [(kv_c, k_pe), (kv_c[:0], k_pe[:0])], up, batch, SCALE, dtype=torch.bfloat16, seed=1)
    assert sorted(zip(truth.rows.tolist(), truth.empty.tolist(), strict=True)) == [
        (0, True),
        (1, False),
        (2, True),
        (3, True),
    ]
    order = truth.rows.argsort()
    right = AttentionState(truth.out[order], truth.lse[order])
    assert compare(right, truth).ok
    for row in (0, 2, 3):
        out = right.out.clone()
        out[row, 0, 0] = 1e-30
        assert compare(AttentionState(out, right.lse), truth).used_out == math.inf
        lse = right.lse.clone()
        lse[row, 0] = -1e30
        assert compare(AttentionState(right.out, lse), truth).used_lse == math.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_latent_level_accepts_a_kernel_and_rejects_a_base_2_lse(dtype):
    q, kv_c, k_pe, up = tensors(dtype)
    q_latent = absorb_query(q.nope, up.W_UK, dtype)
    lens = torch.tensor([S - T + i + 1 for i in range(T)])
    truth = latent_reference(q_latent, q.pe, kv_c, k_pe, lens, SCALE, dtype=dtype, seed=0)
    scores = torch.einsum("tnl,sl->tns", q_latent.float(), kv_c.float()) + torch.einsum(
        "tnr,sr->tns", q.pe.float(), k_pe.float()
    )
    scores = (scores * SCALE).masked_fill(torch.arange(S) >= lens[:, None, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    out = torch.einsum("tns,sl->tnl", torch.exp(scores - lse[..., None]).to(dtype).float(), kv_c.float()).to(dtype)
    assert compare(AttentionState(out, lse), truth).ok
    assert compare(AttentionState(out, lse * 1.442695), truth).status == "mismatch"
    assert compare(AttentionState(out * 1.05, lse), truth).status == "mismatch"
    # the same oracle as at the attend level: multiplied by W_UV the latent truth is the expanded truth of that q_latent
    out_v = project_values(truth.out, up.W_UV.double())
    eye = torch.eye(L, dtype=torch.float64)[:, None].expand(L, N, L)
    direct, _ = oracle(q_latent, q.pe, kv_c, k_pe, eye, up.W_UV, lens, SCALE)
    assert torch.allclose(out_v, direct, rtol=0, atol=L * S * 2.0**-52 * float(direct.abs().max()))


def test_float64_has_no_replicas_and_says_so():
    q, kv_c, k_pe, up = tensors(torch.float64)
    batch = AttentionBatch.bottom_right([T], [S], [[0]], page_size=S, num_pages=1)
    with pytest.raises(ValueError, match="float64"):
        reference(q, [(kv_c, k_pe)], up, batch, SCALE, dtype=torch.float64, seed=0)


def test_a_budget_that_is_not_finite_fails_the_case():
    q, kv_c, k_pe, up = tensors(torch.bfloat16)
    kv_c[3, 0] = float("nan")
    batch = AttentionBatch.bottom_right([T], [S], [[0]], page_size=S, num_pages=1)
    with pytest.raises(ValueError, match="finite budget"):
        reference(q, [(kv_c, k_pe)], up, batch, SCALE, dtype=torch.bfloat16, seed=0)


def test_the_budget_is_the_same_for_the_same_seed_and_for_heads_never_below_their_mean():
    first, _, _ = one_request(torch.bfloat16, seed=5)
    again, _, _ = one_request(torch.bfloat16, seed=5)
    assert torch.equal(first.out_limit, again.out_limit)
    assert torch.equal(first.lse_limit, again.lse_limit)
    u = UNIT_ROUNDOFF[torch.bfloat16]
    e_out = first.out_limit / 3 - u * first.out.square().mean(-1).sqrt()
    assert torch.all(e_out >= e_out.mean(1, keepdim=True) * 0.5)
