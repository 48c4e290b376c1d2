"""The merge kernel: against its reference in float64, exact where a side is empty, in place, over any strides.

Axes: T new tokens (packed over requests), N heads, V value.
"""

from triton_here import DEVICE, DTYPES, require_triton

require_triton()

import pytest  # noqa: E402
import torch  # noqa: E402

from tiers.tier2_triton.kernels.merge import merge, merge_reference, problem  # noqa: E402

INF, NAN, U = float("inf"), float("nan"), 2.0**-24


def merged(a, b):
    """Merge two lists of (out, lse), one row each, into fresh tensors; returns lists."""
    columns = [torch.tensor(x, device=DEVICE) for side in (a, b) for x in zip(*side, strict=True)]
    out_a, lse_a, out_b, lse_b = (x.view(-1, 1, 1) if i % 2 == 0 else x.view(-1, 1) for i, x in enumerate(columns))
    out, lse = torch.full_like(out_a, NAN), torch.full_like(lse_a, NAN)
    merge(out_a, lse_a, out_b, lse_b, out, lse)
    return out.flatten().tolist(), lse.flatten().tolist()


@pytest.mark.parametrize("result", ["in place", *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_its_reference_in_float64(dtype, result):
    a = problem("toy", dtype, DEVICE).arguments
    exact = {k: x.double() for k, x in a.items()}
    exact["out"], exact["lse"] = torch.empty_like(exact["out_a"]), torch.empty_like(exact["lse_a"])
    merge_reference(**exact)
    before = {k: a[k].clone() for k in ("out_b", "lse_b")}
    if result != "in place":
        a["out"], a["lse"] = a["out"].to(result, copy=True).fill_(NAN), torch.full_like(a["lse"], NAN)
    merge(**a)
    # |lse| < 16: an argument lse - top is off by 32 u, exp by 2 u more; shares sum to 1 and each is off by twice that
    # and a division, two products and a sum add 3 u; the cast adds the result's own unit roundoff
    assert exact["lse"][exact["lse"] > -INF].abs().max() < 16
    largest = max(float(exact[k].nan_to_num(0).abs().max()) for k in ("out_a", "out_b"))
    own = torch.finfo(a["out"].dtype).eps / 2
    assert (a["out"].double() - exact["out"]).abs().max() <= (2 * (2 * 34 + 1) * U + 3 * U + own) * largest
    there = exact["lse"] > -INF
    assert torch.equal(a["lse"] > -INF, there)
    assert (a["lse"].double() - exact["lse"])[there].abs().max() <= (2 * 34 + 2 + 16) * U
    assert all(torch.equal(a[k].nan_to_num(7), x.nan_to_num(7)) for k, x in before.items())


def test_B1_a_prefix_of_4096_zeros_and_a_suffix_of_four_tens():
    (out,), (lse,) = merged([(0.0, 8.317766)], [(10.0, 1.3862944)])  # ln 4096, ln 4
    assert abs(out - 40 / 4100) <= 1e-6 * out  # both logs are given to 8 digits: 8.3 * 2^-24 = 5e-7
    assert abs(lse - 8.3187425) <= 1e-6


def test_C2_two_empty_states_give_an_empty_one():
    assert merged([(0.0, -INF), (NAN, -INF)], [(0.0, -INF), (NAN, -INF)]) == ([0, 0], [-INF, -INF])


def test_A5_an_empty_side_leaves_the_other_as_it_is_in_both_orders():
    state, nothing = [(0.1, 1.7), (-3.3, -90.0), (1e-30, 88.0)], [(NAN, -INF)] * 3
    plain = [torch.tensor(x).tolist() for x in zip(*state, strict=True)]
    assert list(merged(state, nothing)) == plain
    assert list(merged(nothing, state)) == plain


def test_far_apart_the_larger_wins_without_overflow():
    out, lse = merged([(1.0, -500.0), (1.0, 500.0)], [(2.0, 500.0), (2.0, -500.0)])
    assert (out, lse) == ([2, 1], [500, 500])


def test_swapped_arguments_give_the_same_bits():
    a = problem("toy", torch.float32, DEVICE).arguments
    out, lse = torch.empty_like(a["out_a"]), torch.empty_like(a["lse_a"])
    merge(a["out_b"], a["lse_b"], a["out_a"], a["lse_a"], out, lse)
    merge(**a)
    assert torch.equal(out, a["out"])
    assert torch.equal(lse, a["lse"])


def test_F4_nothing_is_written_around_outputs_of_any_strides():
    a = problem("toy", torch.float32, DEVICE).arguments
    T, N, V = a["out_a"].shape
    around = torch.full((N, T + 2, V + 3), NAN, device=DEVICE)
    lse_around = torch.full((N + 1, T + 2), NAN, device=DEVICE)
    out, lse = around.transpose(0, 1)[1:-1, :, :V], lse_around.T[1:-1, :N]
    merge(**(a | {"out": out, "lse": lse}))
    merge(**a)
    assert torch.equal(out, a["out"])
    assert torch.equal(lse, a["lse"])
    for rest in (around[:, 0], around[:, -1], around[..., V:], lse_around[N], lse_around[:, 0], lse_around[:, -1]):
        assert rest.isnan().all()


def test_no_rows_no_launch():
    a = {k: x[:0] for k, x in problem("toy", torch.float32, DEVICE).arguments.items()}
    merge(**a)
