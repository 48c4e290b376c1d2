"""The oracle against attention written in Python floats, one number at a time, and against values by hand."""

import ast
import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla.oracle
from mla.oracle import oracle

N, L, P, R, V = 2, 5, 3, 4, 6
INF = float("inf")


def by_hand(q_nope, q_pe, kv_c, k_pe, W_UK, W_UV, visible, scale):
    """Keys of every head from the shared row, then the textbook softmax over the visible keys, sums rounded once."""
    q_nope, q_pe, kv_c, k_pe, W_UK, W_UV = (x.tolist() for x in (q_nope, q_pe, kv_c, k_pe, W_UK, W_UV))
    heads, width, value = len(W_UK[0]), len(W_UK[0][0]), len(W_UV[0][0])
    out, lse = [], []
    for t, count in enumerate(visible):
        out.append([])
        lse.append([])
        for n in range(heads):
            logits = []
            for s in range(count):
                key = [math.fsum(c * W_UK[i][n][p] for i, c in enumerate(kv_c[s])) for p in range(width)]
                products = [a * b for a, b in zip(q_nope[t][n] + q_pe[t][n], key + k_pe[s], strict=True)]
                logits.append(scale * math.fsum(products))
            largest = max(logits, default=0.0)
            powers = [math.exp(x - largest) for x in logits]
            lse[t].append(largest + math.log(math.fsum(powers)) if powers else -INF)
            latent = [math.fsum(p * row[i] for p, row in zip(powers, kv_c, strict=False)) for i in range(len(W_UV))]
            share = math.fsum(powers)
            out[t].append(
                [
                    math.fsum(c * W_UV[i][n][v] for i, c in enumerate(latent)) / share if powers else 0.0
                    for v in range(value)
                ]
            )
    return torch.tensor(out, dtype=torch.float64), torch.tensor(lse, dtype=torch.float64)


def inputs(T: int, S: int, seed: int = 0, dtype: torch.dtype = torch.float64, size: float = 1.0):
    random = torch.Generator().manual_seed(seed)
    shapes = [(T, N, P), (T, N, R), (S, L), (S, R), (L, N, P), (L, N, V)]
    return [(torch.randn(*s, generator=random, dtype=torch.float64) * size).to(dtype) for s in shapes]


def assert_equal(args: list[torch.Tensor], visible: list[int], scale: float) -> None:
    """The oracle equals `by_hand` within what float64 rounds.

    A score is a sum of L P + R products of at most `peak` in absolute sum: its error, and so that of the LSE, is below
    (L P + R + 4) u peak, plus (S + |lse| + 4) u. A weight's relative error is that of score and LSE; an output sums
    S L products of at most `most` in absolute sum.
    """
    S, u = args[2].shape[0], 2.0**-53
    q_nope, q_pe, kv_c, k_pe, W_UK, W_UV = (a.double().abs() for a in args)
    content = torch.einsum("tnp,sl,lnp->tns", q_nope, kv_c, W_UK)
    peak = scale * float((content + torch.einsum("tnr,sr->tns", q_pe, k_pe)).max())
    most = float(torch.einsum("sl,lnv->snv", kv_c, W_UV).max())
    out, lse = oracle(*args, torch.tensor(visible, dtype=torch.int32), scale)
    want_out, want_lse = by_hand(*[a.double() for a in args], visible, scale)
    limit = u * ((L * P + R + 4) * peak + S + peak + math.log(S) + 4)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    assert torch.equal(lse.isinf(), want_lse.isinf())
    seen = ~lse.isinf()
    assert bool(((lse - want_lse)[seen].abs() <= limit).all())
    assert bool(((out - want_out).abs() <= (2 * limit + (S + L + 4) * u) * most).all())
    assert bool((out[~seen] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("visible", [[1], [4, 5, 6], [6, 6, 6], [0, 3, 0], [2, 0, 6]])
def test_equals_attention_one_number_at_a_time(visible, dtype):
    assert_equal(inputs(len(visible), 6, dtype=dtype), visible, 0.3)


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.floats(0.01, 3),
    st.integers(0, 10**6),
    st.sampled_from([0.1, 1, 4]),
)
def test_equals_it_for_any_bounds_scale_and_size_of_inputs(visible, scale, seed, size):
    assert_equal(inputs(len(visible), 7, seed, size=size), visible, scale)


def test_a_zero_query_gives_the_mean_and_the_log_of_the_count():
    q_nope, q_pe, kv_c, k_pe, W_UK, W_UV = inputs(3, 5)
    W_UV = torch.zeros(L, N, V, dtype=torch.float64)
    W_UV[0] = 1
    kv_c[:, 0] = torch.tensor([1.0, 2, 3, 4, 5])
    out, lse = oracle(q_nope * 0, q_pe * 0, kv_c, k_pe, W_UK, W_UV, torch.tensor([4, 5, 1]), 0.3)
    for t, (mean, count) in enumerate([(2.5, 4), (3.0, 5), (1.0, 1)]):
        assert (out[t] - mean).abs().max() <= 16 * 2.0**-53
        assert (lse[t] - math.log(count)).abs().max() <= 4 * 2.0**-53


def test_scores_are_scaled_once():
    # one head, one key: the LSE is the score, scale * (2 * 3 * 5 + 7 * 11), and the output 3 * 13
    numbers = [
        torch.full((1,) * axes, value) for axes, value in ((3, 2.0), (3, 7.0), (2, 3.0), (2, 11.0), (3, 5.0), (3, 13.0))
    ]
    out, lse = oracle(*numbers, torch.tensor([1]), 0.5)
    assert (out.item(), lse.item()) == (39.0, 53.5)


def test_hidden_keys_do_not_count_whatever_they_hold():
    args = inputs(2, 6)
    near = oracle(*args, torch.tensor([2, 3]), 0.3)
    args[2][3:], args[3][3:] = 1e9, -1e9
    far = oracle(*args, torch.tensor([2, 3]), 0.3)
    assert torch.equal(near[0], far[0])
    assert torch.equal(near[1], far[1])


@pytest.mark.parametrize(("T", "S"), [(0, 4), (2, 0), (0, 0)])
def test_no_rows_or_no_keys(T, S):
    out, lse = oracle(*inputs(T, S), torch.zeros(T, dtype=torch.int32), 0.3)
    assert (out.shape, lse.shape) == ((T, N, V), (T, N))
    assert bool((out == 0).all())
    assert bool((lse == -INF).all())


def test_inputs_are_left_alone():
    args = inputs(3, 6)
    before = [a.clone() for a in args]
    oracle(*args, torch.tensor([4, 0, 6]), 0.3)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_it_imports_nothing_of_ours():
    tree = ast.parse(inspect.getsource(mla.oracle))
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    found |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert found == {"torch"}
