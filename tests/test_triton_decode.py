"""Absorbed decode and the merge of its partial states, kernel against reference."""

import pytest
import torch
from triton_here import DEVICE, DTYPES, require_triton

require_triton()

from tiers.tier2_triton.kernels import combine, decode  # noqa: E402
from tiers.tier2_triton.kernels.problem import Problem  # noqa: E402


def run(problem: Problem, kernel, reference, names) -> tuple[dict, dict]:
    """Outputs of the kernel, and of the reference on the same numbers in float64."""
    wide = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in problem.arguments.items()
    }
    wide |= {name: torch.full_like(wide[name], float("nan")) for name in names}
    kernel(**problem.arguments)
    reference(**wide)
    return {n: problem.arguments[n].double() for n in names}, {n: wide[n] for n in names}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_equals_its_reference(dtype):
    problem = decode.problem("toy", dtype, DEVICE)
    got, want = run(problem, decode.decode, decode.decode_reference, problem.outputs)
    u = torch.finfo(dtype).eps / 2
    # Probabilities are rounded to the dtype before the second product: u of each term, all terms at most max|kv_c|;
    # scores are float32 sums of L + R products and S = 41 keys, so 1e-5 covers what is left of both.
    largest = problem.arguments["cache"][torch.isfinite(problem.arguments["cache"])].abs().max().item()
    assert torch.equal(torch.isnan(got["out"]), torch.isnan(want["out"]))
    assert (got["out"] - want["out"]).nan_to_num().abs().max() <= (u + 1e-5) * largest
    assert (got["lse"] - want["lse"]).nan_to_num().abs().max() <= 1e-5 * (1 + want["lse"].nan_to_num().abs().max())


@pytest.mark.parametrize("in_order", [True, False])
def test_combine_equals_its_reference(in_order):
    problem = combine.problem("toy", torch.float32, DEVICE)
    problem.arguments["in_order"] = in_order
    got, want = run(problem, combine.combine, combine.combine_reference, problem.outputs)
    assert torch.equal(torch.isinf(got["lse"]), torch.isinf(want["lse"]))
    finite = torch.isfinite(want["lse"])
    assert finite.any()
    assert (~finite).any()
    assert (got["out"][~finite] == 0).all()
    # 18 float32 terms: each weight and product adds 3 u, the sum 18 u, of values below 5
    assert (got["out"] - want["out"]).abs().max() <= 64 * 2**-24 * 5
    assert (got["lse"] - want["lse"])[finite].abs().max() <= 64 * 2**-24 * 10
