"""The per-head product, kernel against reference, and what it promises beyond the product."""

import pytest
import torch
from triton_here import DEVICE, DTYPES, require_triton

require_triton()

from tiers.tier2_triton.kernels import per_head as story  # noqa: E402


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_head_equals_its_reference(dtype):
    problem = story.problem("toy", dtype, DEVICE)
    a = problem.arguments
    story.per_head(**a)
    wide = {k: v.double() if v is not None else None for k, v in a.items()}
    story.per_head_reference(**wide)
    scale = torch.ones_like(wide["out"][..., 0]) if a["row_scale"] is None else a["row_scale"].double()
    truth = torch.einsum("tnk,nko->tno", a["x"].double(), a["W"].double())
    size = torch.einsum("tnk,nko->tno", a["x"].double().abs(), a["W"].double().abs())
    u, K = torch.finfo(dtype).eps / 2, a["x"].shape[2]
    got = a["out"].double() * scale[..., None]
    # the sum has K float32 roundings of at most the sum of magnitudes, the result one of its own
    assert ((got - truth).abs() <= K * 2**-24 * size + u * truth.abs() + scale[..., None] * 2**-24).all()


def test_P9_a_float16_row_beyond_65504_is_divided_by_a_power_of_two():
    problem = story.problem("toy", torch.float16, DEVICE)
    a = problem.arguments
    story.per_head(**a)
    truth = torch.einsum("tnk,nko->tno", a["x"].double(), a["W"].double())
    assert truth.abs().max() > 65504
    assert a["out"].isfinite().all()
    exponent = torch.log2(a["row_scale"])
    assert torch.equal(exponent, exponent.round())
    assert (a["row_scale"] > 1).any()
    assert (a["row_scale"][truth.abs().amax(-1) < 2**13.9] == 1).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies with BLAS, whose order depends on the row")
def test_N1_a_row_has_the_same_bits_alone_and_in_company():
    a = story.problem("toy", torch.float32, DEVICE).arguments
    story.per_head(**a)
    for t in (0, 7, 18):
        alone = torch.empty_like(a["out"][t : t + 1])
        story.per_head(a["x"][t : t + 1], a["W"], alone)
        assert torch.equal(alone[0], a["out"][t])
