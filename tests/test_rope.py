"""Rotation as complex multiplication, the golden scores of both layouts, and YaRN against transformers."""

import cmath
import math

import pytest
import torch

from mla.config import RopeConfig
from mla.rope import (
    amplitude,
    apply_rope,
    deinterleave,
    inverse_frequencies,
    llama4_query_scale,
    rope_cos_sin,
    yarn_mscale,
)

V3_YARN = RopeConfig("deepseek_yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)


def rotate(x: list[float], position: int, rope: RopeConfig) -> torch.Tensor:
    row = torch.tensor([x], dtype=torch.float64)
    cos, sin = rope_cos_sin(torch.tensor([position]), rope, row.shape[-1])
    return apply_rope(row, cos, sin, rope.interleaved)[0]


def test_E1_golden_scores_of_both_layouts() -> None:
    x = [1.0, 2.0, 3.0, 4.0]
    adjacent, half = RopeConfig(interleaved=True), RopeConfig(interleaved=False)
    reordered = deinterleave(torch.tensor(x)).tolist()
    assert reordered == [1.0, 3.0, 2.0, 4.0]
    scores = {
        27.700262: (
            rotate(x, 3, adjacent) @ rotate(x, 2, adjacent),
            rotate(reordered, 3, half) @ rotate(reordered, 2, half),
        ),
        25.402023: (rotate(x, 3, half) @ rotate(x, 2, half),),
        16.006766: (rotate(x, 3, adjacent) @ rotate(x, 2, half),),
    }
    for golden, found in scores.items():
        assert all(float(score) == pytest.approx(golden, abs=5e-7) for score in found)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rope_type", ["default", "deepseek_yarn"])
def test_rotation_is_complex_multiplication(interleaved: bool, rope_type: str) -> None:
    R, heads, positions = 6, 3, [0, 1, 7, 100, 163_839]
    extra = {"factor": 8.0, "original_max_position_embeddings": 64, "mscale": 2.0} if rope_type != "default" else {}
    rope = RopeConfig(rope_type, theta=50.0, interleaved=interleaved, **extra)  # type: ignore[arg-type]
    x = torch.randn(len(positions), heads, R, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_cos_sin(torch.tensor(positions), rope, R)
    rotated = apply_rope(x, cos, sin, interleaved)
    frequencies = inverse_frequencies(rope, R).tolist()
    for t, position in enumerate(positions):
        for i, frequency in enumerate(frequencies):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + R // 2)
            turn = amplitude(rope) * cmath.exp(1j * position * frequency)
            for n in range(heads):
                wanted = complex(x[t, n, a], x[t, n, b]) * turn
                # a few roundings of numbers of this size
                assert abs(complex(rotated[t, n, a], rotated[t, n, b]) - wanted) <= 8 * 2**-53 * abs(wanted)


def test_plain_frequencies() -> None:
    assert inverse_frequencies(RopeConfig(theta=10000.0), 4).tolist() == pytest.approx([1.0, 0.01], rel=2**-50)
    assert inverse_frequencies(RopeConfig(theta=10000.0), 0).shape == (0,)


def test_unrotated_dimensions_stay_as_they_are() -> None:
    x = torch.randn(5, 2, 8)
    cos, sin = rope_cos_sin(torch.arange(5), RopeConfig("none"), 8)
    assert torch.equal(apply_rope(x, cos, sin, True), x)
    assert amplitude(RopeConfig("none")) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_result_has_the_input_dtype_and_is_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(9, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    cos, sin = rope_cos_sin(torch.arange(9) * 11, V3_YARN, 8)
    wide = torch.promote_types(dtype, torch.float32)
    rotated = apply_rope(x, cos, sin, True)
    assert rotated.dtype == dtype
    assert torch.equal(rotated, apply_rope(x.to(wide), cos, sin, True).to(dtype))


def test_strided_and_empty_inputs() -> None:
    whole = torch.randn(6, 3, 20, dtype=torch.float64)
    cos, sin = rope_cos_sin(torch.arange(6), RopeConfig(), 8)
    for interleaved in (True, False):
        part = whole[..., 12:]
        assert torch.equal(
            apply_rope(part, cos, sin, interleaved), apply_rope(part.contiguous(), cos, sin, interleaved)
        )
        assert apply_rope(whole[:0, :, 12:], cos[:0], sin[:0], interleaved).shape == (0, 3, 8)
        assert apply_rope(whole[..., :0], cos[:, :0], sin[:, :0], interleaved).shape == (6, 3, 0)


def test_bad_sizes_and_types_name_the_argument() -> None:
    cos, sin = rope_cos_sin(torch.arange(3), RopeConfig(), 8)
    for x in (torch.randn(3, 7), torch.randn(4, 8), torch.randn(3, 10)):
        with pytest.raises(ValueError, match="cos, sin"):
            apply_rope(x, cos, sin, True)
    with pytest.raises(ValueError, match="R: expected an even int"):
        inverse_frequencies(RopeConfig(), 7)
    with pytest.raises(ValueError, match=r"rope\.type.*longrope"):
        inverse_frequencies(RopeConfig("longrope"), 8)


def test_amplitude_of_both_yarns() -> None:
    assert amplitude(V3_YARN) == 1.0  # exactly: the quotient of equal numbers
    lite = RopeConfig(
        "deepseek_yarn", factor=40, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707
    )
    assert amplitude(lite) == 1.0
    base = {"factor": 40.0, "original_max_position_embeddings": 4096}
    m1, m2 = 0.1 * math.log(40) + 1, 0.2 * math.log(40) + 1
    assert amplitude(RopeConfig("yarn", **base)) == m1  # type: ignore[arg-type]
    assert amplitude(RopeConfig("yarn", **base, attention_factor=0.5)) == 0.5  # type: ignore[arg-type]
    assert amplitude(RopeConfig("yarn", **base, mscale=2.0)) == m1  # type: ignore[arg-type]
    assert amplitude(RopeConfig("yarn", **base, mscale=2.0, mscale_all_dim=1.0)) == m2 / m1  # type: ignore[arg-type]
    assert amplitude(RopeConfig("deepseek_yarn", **base, mscale=2.0)) == m2  # type: ignore[arg-type]
    assert amplitude(RopeConfig("deepseek_yarn", **base)) == m1  # type: ignore[arg-type]
    assert yarn_mscale(40, 2.0) == m2


def test_D8_ramp_comes_from_the_original_length() -> None:
    # V3: pair 10.47 turns 32 times within 4096 tokens, pair 22.51 once: kept up to 10, divided by 40 from 23 on
    plain, yarn = inverse_frequencies(RopeConfig(), 64), inverse_frequencies(V3_YARN, 64)
    assert torch.equal(yarn[:11], plain[:11])
    assert torch.equal(yarn[23:], plain[23:] / 40)
    middle = torch.arange(11, 23, dtype=torch.float64)
    keep = 1 - (middle - 10) / 13
    assert torch.allclose(yarn[11:23], plain[11:23] * (keep + (1 - keep) / 40), rtol=2**-50, atol=0)


def test_D4_D10_yarn_is_on_for_short_prompts() -> None:
    cos, _ = rope_cos_sin(torch.tensor([100]), V3_YARN, 64)
    plain_cos, _ = rope_cos_sin(torch.tensor([100]), RopeConfig(), 64)
    # 100 * 10000^(-40/64) = 0.316 radians without, a fortieth of it with YaRN
    assert plain_cos[0, 20].item() == pytest.approx(math.cos(100 * 10000 ** (-40 / 64)), rel=1e-12)
    assert cos[0, 23].item() == pytest.approx(math.cos(100 * 10000 ** (-46 / 64) / 40), rel=1e-12)
    assert not torch.equal(cos, plain_cos)


def test_llama4_scales_by_whole_windows() -> None:
    rope = RopeConfig("yarn", factor=36, original_max_position_embeddings=8192, llama_4_scaling_beta=0.1)
    positions = torch.tensor([0, 8191, 8192, 16383, 16384, 81920])
    wanted = [1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3), 1 + 0.1 * math.log(11)]
    assert llama4_query_scale(positions, rope).tolist() == pytest.approx(wanted, rel=2**-50)
    assert torch.equal(llama4_query_scale(positions, V3_YARN), torch.ones(6, dtype=torch.float64))


YARN_CASES = {
    "deepseek-v3": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "deepseek-v2-lite": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    "unequal": {"factor": 40.0, "mscale": 1.3, "mscale_all_dim": 0.6},
    "kimi-k2": {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "generic": {"factor": 4.0},
    "generic-factor": {"factor": 36.0, "attention_factor": 1.0},
    "one-mscale": {"factor": 8.0, "mscale": 2.0},
    "untruncated": {"factor": 8.0, "truncate": False},
}


# transformers reads deepseek_yarn as yarn, which is the same only where both mscales are given
BOTH_MSCALES = [name for name, fields in YARN_CASES.items() if "mscale_all_dim" in fields]


@pytest.mark.parametrize(
    ("rope_type", "name"),
    [("yarn", name) for name in YARN_CASES] + [("deepseek_yarn", name) for name in BOTH_MSCALES],
)
@pytest.mark.parametrize("max_length", [512, 163840])
def test_yarn_equals_transformers(name: str, rope_type: str, max_length: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    fields = YARN_CASES[name] | {"original_max_position_embeddings": 4096}
    params = {"rope_type": "yarn", "rope_theta": 10000.0} | fields
    hf = transformers.DeepseekV3Config(qk_rope_head_dim=64, max_position_embeddings=max_length, rope_parameters=params)
    theirs = DeepseekV3RotaryEmbedding(hf)
    rope = RopeConfig(rope_type, **fields)  # type: ignore[arg-type]
    assert amplitude(rope) == theirs.attention_scaling
    # theirs is float32: theta to a power, a reciprocal, a ramp and a blend, each rounded once
    assert torch.allclose(inverse_frequencies(rope, 64).float(), theirs.inv_freq, rtol=16 * 2**-24, atol=0)
