"""Solutions of notebook 05: each section takes the place of the exercise cell of its name."""

import torch

from mla.conformance import run_case
from mla.conformance.cases import Case
from mla.conformance.specs import spec


# %% ex1
def bf16_error(x):
    """Return the largest rounding error in the binade of x > 0: for x = 1.5 that of any number from 1 to 2."""
    return float(2.0 ** torch.floor(torch.log2(torch.tensor(x, dtype=torch.float64)))) * 2**-8


# %% ex2
def rms_error(out, truth):
    """Return (T, N) float64 from out (T, N, V) in bf16 and truth (T, N, V) in float64."""
    return (out.double() - truth).square().mean(-1).sqrt()


# %% ex3
def random_round(x, step):
    """Return x (any shape, float64) with each number moved to a neighbouring multiple of step."""
    return torch.floor(x / step + torch.rand_like(x)) * step


# %% ex4
def out_limit(errors, truth, u):
    """Return the limit (T, N) from replica errors (K, T, N), truth (T, N, V) and the unit roundoff u."""
    e = errors.square().mean(0).sqrt()
    e = torch.maximum(e, e.mean(1, keepdim=True))
    return 3 * (e + u * truth.square().mean(-1).sqrt())


# %% ex5
def find_broken(kernels):
    """Return the index of the broken tier among ten, -1 if none fails; run_case(kernel, case, diagnosed=False).ok."""
    for family in ("peaked", "randn", "large_logits", "needle_end"):
        case = Case(spec("zero_rows_prefill"), family=family)  # several new tokens, and requests without keys
        failing = [i for i, kernel in enumerate(kernels) if not run_case(kernel, case, diagnosed=False).ok]
        if failing:
            return failing[0]
    return -1
