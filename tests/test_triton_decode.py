"""Absorbed decode and the merge of its partial states, kernel against reference."""

from typing import Any

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


def wide_tiles(dtype: torch.dtype, page: int, R: int, scaled: bool) -> Problem:
    """Requests of 150, 0 and 65 keys, NaN behind them: two tiles of 64 of their 70 rows, two segments of the keys."""
    B, q, N, L, S, tile = 3, 2, 35, 48, 192, (64, 64, 8, 2)
    lengths = (150, 0, 65)
    random = torch.Generator(DEVICE).manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=random, device=DEVICE).to(dtype)
    cache = draw(B * S // page, page, L + R)
    table = torch.randperm(len(cache), generator=random, device=DEVICE).to(torch.int32).view(B, -1)
    for b, length in enumerate(lengths):
        flat = cache[table[b].long()]
        flat.view(S, -1)[length:] = float("nan")
        cache[table[b].long()] = flat
    parts = [(b, m, k) for b in range(B) for m in (0, 64) for k in ((0, 128), (128, S))]
    items = [(b, b * q, m, q * N, *keys, slot, 0) for slot, (b, m, keys) in enumerate(parts)]
    bounds = [max(0, length - 1 + i) if length else 0 for length in lengths for i in range(q)]
    q_latent, q_pe = draw(B * q, N, L), draw(B * q, N, R)
    q_latent[q : 2 * q] = float("nan")  # the request without keys
    powers = 2.0 ** torch.randint(-2, 3, (B * q, N), generator=random, device=DEVICE)
    arguments: dict[str, Any] = {
        "q_latent": q_latent,
        "q_pe": q_pe,
        "row_scale": powers if scaled else None,
        "cache": cache,
        "block_table": table,
        "row_kv_lens": torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
        "items": torch.tensor(items, dtype=torch.int32, device=DEVICE),
        "count": torch.tensor([len(items)], dtype=torch.int32, device=DEVICE),
        "out": torch.full((len(items), 64, L), float("nan"), device=DEVICE),
        "lse": torch.full((len(items), 64), float("nan"), device=DEVICE),
        "softmax_scale": 0.1,
        "tile": tile,
    }
    return Problem(arguments, ("out", "lse"), 0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page", "R", "scaled"), [(64, 8, False), (16, 8, True), (64, 0, False)])
def test_decode_of_64_rows_equals_its_reference(dtype, page, R, scaled):
    problem = wide_tiles(dtype, page, R, scaled)
    got, want = run(problem, decode.decode, decode.decode_reference, problem.outputs)
    u = torch.finfo(dtype).eps / 2  # as above; 128 keys and 56 products, row_scale is exact
    largest = problem.arguments["cache"][torch.isfinite(problem.arguments["cache"])].abs().max().item()
    assert torch.equal(torch.isnan(got["out"]), torch.isnan(want["out"]))
    assert torch.equal(torch.isinf(got["lse"]), torch.isinf(want["lse"]))
    assert (got["out"] - want["out"]).nan_to_num().abs().max() <= (u + 1e-5) * largest
    finite = torch.isfinite(want["lse"])
    assert (got["lse"] - want["lse"])[finite].abs().max() <= 1e-5 * (1 + want["lse"][finite].abs().max())


@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_combine_equals_its_reference(at_once):
    problem = combine.problem("toy", torch.float32, DEVICE)
    problem.arguments["at_once"] = at_once
    got, want = run(problem, combine.combine, combine.combine_reference, problem.outputs)
    assert torch.equal(torch.isinf(got["lse"]), torch.isinf(want["lse"]))
    finite = torch.isfinite(want["lse"])
    assert finite.any()
    assert (~finite).any()
    assert (got["out"][~finite] == 0).all()
    # 18 float32 terms: each weight and product adds 3 u, the sum 18 u, of values below 5
    assert (got["out"] - want["out"]).abs().max() <= 64 * 2**-24 * 5
    assert (got["lse"] - want["lse"])[finite].abs().max() <= 64 * 2**-24 * 10
