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


def most_off(problem: Problem, dtype: torch.dtype) -> tuple[float, float]:
    """How far out and base-2 LSE may be from the truth, by the roundings between them.

    A score is a float32 sum of L + R products: off by (L + R) 2^-24 of the sum of their magnitudes. Weights are off by
    twice that, by a rounding to the dtype, and by S + 8 float32 roundings of exp, sums, rescaling and the division.
    """
    a = problem.arguments
    rows = a["cache"].double().nan_to_num(0.0).flatten(0, 1).abs()
    L, R = a["q_latent"].shape[2], a["q_pe"].shape[2]
    scale = 1.0 if a["row_scale"] is None else a["row_scale"].double()[..., None]
    query = torch.cat([a["q_latent"].double().abs() * scale, a["q_pe"].double().abs()], -1).nan_to_num(0.0)
    size = (query.flatten(0, 1) @ rows.T).max().item() * a["softmax_scale"]
    score = (L + R) * 2**-24 * size
    rest = (int(a["row_kv_lens"].max()) + 8) * 2**-24
    largest, u = rows[:, :L].max().item(), torch.finfo(dtype).eps / 2
    return (2 * score + u + rest) * largest, decode.LOG2E * (score + rest + 2**-23 * (size + 6))  # ln S < 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_equals_its_reference(dtype):
    problem = decode.problem("toy", dtype, DEVICE)
    got, want = run(problem, decode.decode, decode.decode_reference, problem.outputs)
    out_off, lse_off = most_off(problem, dtype)
    assert torch.equal(torch.isnan(got["out"]), torch.isnan(want["out"]))
    assert (got["out"] - want["out"]).nan_to_num().abs().max() <= out_off
    assert (got["lse"] - want["lse"]).nan_to_num().abs().max() <= lse_off


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
    out_off, lse_off = most_off(problem, dtype)
    assert torch.equal(torch.isnan(got["out"]), torch.isnan(want["out"]))
    assert torch.equal(torch.isinf(got["lse"]), torch.isinf(want["lse"]))
    assert (got["out"] - want["out"]).nan_to_num().abs().max() <= out_off
    finite = torch.isfinite(want["lse"])
    assert (got["lse"] - want["lse"])[finite].abs().max() <= lse_off


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
