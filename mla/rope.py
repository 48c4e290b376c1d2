"""Rotary position embedding in both pair layouts, with YaRN's frequencies and amplitude.

Axes: T new tokens (packed over requests), S cached tokens, B requests, N heads, H hidden, Lq query rank, L KV rank,
P nope, R rope, V value.
"""

import math

import torch
from torch import Tensor

from mla.config import YARN_TYPES, RopeConfig, yarn_mscale
from mla.errors import bad


def inverse_frequencies(rope: RopeConfig, R: int) -> Tensor:
    """Return the angle per token of every pair, `theta^(-2i/R)`, blended with its `1/factor` for YaRN.

    Result (R/2,) float64, radians per token; zeros for type "none". YaRN keeps pairs that turn more than `beta_fast`
    times within the original length, divides by `factor` those that turn less than `beta_slow` times, and blends
    linearly between. It depends on the original length only, never on the current one, so a short prompt gets the same
    frequencies. Raises ValueError for an odd R and for "longrope". Source: YaRN (arXiv 2309.00071) section 3.2.
    """
    if R < 0 or R % 2:
        raise bad("R", expected="an even int >= 0", got=repr(R), fix="rotation works on pairs")
    if rope.type == "longrope":
        raise bad(
            "rope.type", expected="default, yarn, deepseek_yarn or none", got="'longrope'", fix="use another model"
        )
    pairs = torch.arange(R // 2, dtype=torch.float64)
    if rope.type == "none" or R == 0:
        return torch.zeros_like(pairs)
    plain = rope.theta ** (-2.0 * pairs / R)
    if rope.type not in YARN_TYPES:
        return plain
    assert rope.factor is not None
    low, high = _correction_range(rope, R)
    keep = 1.0 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)  # 1 where the pair stays as trained
    return plain / rope.factor * (1.0 - keep) + plain * keep


def _correction_range(rope: RopeConfig, R: int) -> tuple[float, float]:
    original = rope.original_max_position_embeddings
    assert original is not None

    def pair_that_turns(turns: float) -> float:
        wavelengths = original / (turns * 2.0 * math.pi)
        return R * math.log(wavelengths) / (2.0 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    return low, high if high != low else high + 0.001


def amplitude(rope: RopeConfig) -> float:
    """Return the factor on cos and sin, unitless: 1 without YaRN.

    "deepseek_yarn": `m(f, mscale) / m(f, mscale_all_dim)`, absent values 1 and 0. "yarn": `attention_factor` where
    given, else the same quotient where both mscales are set, else `m(f, 1)`.
    Source: YaRN (arXiv 2309.00071) section 3.4; DeepSeek-V2 (arXiv 2405.04434) section 3.1.4.
    """
    if rope.type not in YARN_TYPES:
        return 1.0
    assert rope.factor is not None
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "yarn" and not (rope.mscale and rope.mscale_all_dim):
        return yarn_mscale(rope.factor, 1.0)
    mscale = 1.0 if rope.mscale is None else rope.mscale
    return yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim or 0.0)


def rope_cos_sin(positions: Tensor, rope: RopeConfig, R: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of `position * inverse_frequency`, both times `amplitude`.

    positions (T,) int64 in tokens from 0; results (T, R/2) float64 on the same device.
    Source: RoFormer (arXiv 2104.09864) eq. 15.
    """
    inverse = inverse_frequencies(rope, R).to(positions.device)
    angles = positions.to(torch.float64)[:, None] * inverse  # (T, R/2)
    factor = amplitude(rope)
    return angles.cos() * factor, angles.sin() * factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of the last axis: `(a, b) -> (a cos - b sin, a sin + b cos)`.

    x (T, ..., R) of any float dtype; cos, sin (T, R/2); result like x, computed in promote(x.dtype, float32). Pairs
    are (2i, 2i+1) when `interleaved`, else (i, i + R/2), and stay where they were. Raises ValueError when the sizes
    differ. Source: RoFormer (arXiv 2104.09864) eq. 34.
    """
    half = x.shape[-1] // 2
    if x.shape[-1] % 2 or cos.shape != (x.shape[0], half) or sin.shape != cos.shape:
        raise bad(
            "cos, sin",
            expected=f"shape (T, R/2) for x {tuple(x.shape)} with an even last axis",
            got=f"{tuple(cos.shape)} and {tuple(sin.shape)}",
            fix="make both with rope_cos_sin(positions, rope, R) from the T positions of x",
        )
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    cos, sin = cos.to(dtype).view(shape), sin.to(dtype).view(shape)
    if interleaved:
        a, b = x.to(dtype).unflatten(-1, (half, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)
    a, b = x[..., :half].to(dtype), x[..., half:].to(dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def deinterleave(x: Tensor) -> Tensor:
    """Reorder the last axis even-then-odd, so that half-split rotation of the result equals adjacent rotation of x.

    x (T, ..., R) of any dtype, result the same shape. Query and key must both be reordered, or neither.
    """
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def llama4_query_scale(positions: Tensor, rope: RopeConfig) -> Tensor:
    """Return the factor on each token's whole query, `1 + beta ln(1 + floor(position / original length))`.

    positions (T,) int64 in tokens; result (T,) float64, ones when `llama_4_scaling_beta` is None.
    Source: the attention temperature of Llama 4, as released Mistral configs name it.
    """
    if rope.llama_4_scaling_beta is None:
        return torch.ones(positions.shape, dtype=torch.float64, device=positions.device)
    assert rope.original_max_position_embeddings is not None
    windows = torch.div(positions, rope.original_max_position_embeddings, rounding_mode="floor")
    return 1.0 + rope.llama_4_scaling_beta * torch.log1p(windows.to(torch.float64))
