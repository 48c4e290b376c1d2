"""Projections against float64 formulas written head by head, and against transformers' attention modules."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mla.config import MLAConfig, RopeConfig
from mla.presets import preset
from mla.projections import (
    Query,
    UpProjection,
    absorb_query,
    expand_keys_values,
    project_latent,
    project_output,
    project_query,
    project_values,
    rms_norm,
)
from mla.rope import apply_rope, deinterleave, rope_cos_sin
from mla.weights import MLAWeights

TOY = preset("toy")
# sums of at most 66 products, four in a chain, of numbers up to 8: 66 * 4 * 8 * 2^-53 < 2^-40
FLOAT64 = {"rtol": 2**-40, "atol": 2**-40}
POSITIONS = torch.tensor([0, 3, 4, 70, 255])
CONFIGS = {
    "query rank": TOY,
    "direct query": TOY.replace(q_lora_rank=None),
    "biases": TOY.replace(attention_bias=True),
    "multipliers": TOY.replace(q_lora_multiplier=1.5, kv_lora_multiplier=2.5),
    "half-split": TOY.replace(rope=RopeConfig("default", interleaved=False)),
    "unrotated": TOY.replace(rope=RopeConfig("none")),
    "llama-4": TOY.replace(rope=RopeConfig(llama_4_scaling_beta=0.1, original_max_position_embeddings=64)),
    "no rope": TOY.replace(qk_rope_head_dim=0),
}


def drawn(config: MLAConfig, dtype: torch.dtype = torch.float64) -> tuple[Tensor, MLAWeights]:
    hidden = torch.randn(len(POSITIONS), config.H, generator=torch.Generator().manual_seed(7)).to(dtype)
    return hidden, MLAWeights.random(config, 5, dtype)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


def turned(x: Tensor, position: int, config: MLAConfig) -> Tensor:
    """One rotated vector (R,); the rotation itself is tested elsewhere."""
    if config.rope.type == "none" or config.R == 0:
        return x
    cos, sin = rope_cos_sin(torch.tensor([position]), config.rope, config.R)
    return apply_rope(x[None], cos, sin, config.rope.interleaved)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_queries_and_latents_token_by_token(name: str) -> None:
    config = CONFIGS[name]
    hidden, weights = drawn(config)
    q, (kv_c, k_pe) = (
        project_query(hidden, POSITIONS, weights, config),
        project_latent(hidden, POSITIONS, weights, config),
    )
    assert q.nope.shape == (5, config.N, config.P)
    assert q.pe.shape == (5, config.N, config.R)
    assert (kv_c.shape, k_pe.shape) == ((5, config.L), (5, config.R))
    hf = weights.to_hf(config)  # the other layout, so that a slip in the first does not repeat
    for t, position in enumerate(POSITIONS.tolist()):
        h = hidden[t]
        if config.Lq is None:
            heads = hf["q_proj.weight"] @ h
        else:
            q_c = hf["q_a_proj.weight"] @ h + hf.get("q_a_proj.bias", 0)
            q_c = norm(q_c, hf["q_a_layernorm.weight"], config.rms_norm_eps)
            heads = hf["q_b_proj.weight"] @ q_c * config.q_lora_multiplier
        scale = 1 + 0.1 * math.log(1 + position // 64) if name == "llama-4" else 1.0
        for n, head in enumerate(heads.view(config.N, -1)):
            torch.testing.assert_close(q.nope[t, n], head[: config.P] * scale, **FLOAT64)
            wanted = turned(head[config.P :], position, config) * scale
            torch.testing.assert_close(q.pe[t, n], wanted, **FLOAT64)
        row = hf["kv_a_proj_with_mqa.weight"] @ h + hf.get("kv_a_proj_with_mqa.bias", 0)
        latent = norm(row[: config.L], hf["kv_a_layernorm.weight"], config.rms_norm_eps) * config.kv_lora_multiplier
        torch.testing.assert_close(kv_c[t], latent, **FLOAT64)
        torch.testing.assert_close(k_pe[t], turned(row[config.L :], position, config), **FLOAT64)


@pytest.mark.parametrize("name", ["query rank", "biases"])
def test_both_ways_through_the_up_projections(name: str) -> None:
    config = CONFIGS[name]
    hidden, weights = drawn(config)
    hf, up = weights.to_hf(config), weights.up
    q_nope = project_query(hidden, POSITIONS, weights, config).nope
    kv_c, _ = project_latent(hidden, POSITIONS, weights, config)
    k_nope, v = expand_keys_values(kv_c, up)
    heads = (kv_c @ hf["kv_b_proj.weight"].T).view(5, config.N, config.P + config.V)
    torch.testing.assert_close(torch.cat((k_nope, v), -1), heads, **FLOAT64)
    expanded = torch.einsum("tnp,snp->nts", q_nope, heads[..., : config.P])
    absorbed = torch.einsum("tnl,sl->nts", absorb_query(q_nope, up.W_UK), kv_c)
    torch.testing.assert_close(absorbed, expanded, **FLOAT64)
    p = expanded.softmax(-1)
    by_heads = torch.einsum("nts,snv->tnv", p, heads[..., config.P :])
    by_latent = project_values(torch.einsum("nts,sl->tnl", p, kv_c), up.W_UV)
    torch.testing.assert_close(by_latent, by_heads, **FLOAT64)
    wanted = by_heads.flatten(1) @ hf["o_proj.weight"].T + hf.get("o_proj.bias", 0)
    torch.testing.assert_close(project_output(by_heads, weights), wanted, **FLOAT64)


def test_P7_norms_use_the_eps_of_the_config() -> None:
    config = TOY.replace(rms_norm_eps=1e-2)
    hidden, weights = drawn(config)
    tiny = hidden * 1e-3
    row = (tiny @ weights.W_DKV)[0]
    kv_c, _ = project_latent(tiny, POSITIONS, weights, config)
    # latents near 1e-3 have squares far below eps, so the result is close to 10 x and not of size 1
    torch.testing.assert_close(kv_c[0], norm(row, weights.kv_norm, 1e-2), rtol=2**-40, atol=0)
    assert kv_c.abs().max() < 0.1
    assert project_query(tiny, POSITIONS, weights, config).nope.abs().max() < 0.1
    assert project_query(tiny, POSITIONS, weights, TOY).nope.abs().max() > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_F1_norm_of_a_slice_equals_the_norm_of_a_copy(dtype: torch.dtype) -> None:
    weight = torch.rand(TOY.L, dtype=dtype)
    for shape in ((7, TOY.L + TOY.R), (2, 7, TOY.L + TOY.R)):
        part = torch.split(torch.randn(shape).to(dtype), [TOY.L, TOY.R], -1)[0]
        assert not part.is_contiguous()
        assert torch.equal(rms_norm(part, weight, 1e-6), rms_norm(part.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_statistics_are_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x = torch.full((1, 512), 250.0, dtype=dtype)  # squares of 62500 times 512 overflow float16
    assert torch.equal(rms_norm(x, torch.ones(512, dtype=dtype), 1e-6), torch.ones_like(x))
    x, weight = torch.randn(9, 33).to(dtype), torch.rand(33).to(dtype)
    assert rms_norm(x, weight, 1e-6).dtype == dtype
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight.float(), 1e-6).to(dtype))


def test_P9_absorption_does_not_overflow_in_float16() -> None:
    q_nope = torch.full((1, 1, 128), 40.0, dtype=torch.float16)
    W_UK = torch.full((4, 1, 128), 16.0, dtype=torch.float16)
    q_latent = absorb_query(q_nope, W_UK)
    assert q_latent.dtype == torch.float32
    assert torch.equal(q_latent, torch.full((1, 1, 4), 81920.0))
    assert absorb_query(q_nope, W_UK, dtype=torch.bfloat16)[0, 0, 0] == 81920  # 5 * 2^14: exact in bfloat16
    assert absorb_query(q_nope, W_UK, dtype=torch.float16).isinf().all()  # asked for, and loud
    assert torch.equal(project_values(q_latent, torch.ones(4, 1, 2)), torch.full((1, 1, 2), 4 * 81920.0))
    out = project_values(q_nope, torch.full((128, 1, 2), 16.0, dtype=torch.float16))
    assert torch.equal(out, torch.full((1, 1, 2), 81920.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_compute_dtype_of_the_up_projections(dtype: torch.dtype) -> None:
    hidden, weights = drawn(TOY, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    q_nope = project_query(hidden, POSITIONS, weights, TOY).nope
    kv_c, _ = project_latent(hidden, POSITIONS, weights, TOY)
    assert q_nope.dtype == kv_c.dtype == dtype
    k_nope, v = expand_keys_values(kv_c, weights.up)
    assert absorb_query(q_nope, weights.W_UK).dtype == k_nope.dtype == v.dtype == wide
    exact = expand_keys_values(kv_c.double(), UpProjection(weights.W_UK.double(), weights.W_UV.double()))
    for found, wanted in zip(expand_keys_values(kv_c, weights.up, dtype), exact, strict=True):
        assert found.dtype == dtype
        # one rounding to dtype of a float32 sum of L products
        bound = (
            torch.finfo(dtype).eps / 2 * wanted.abs()
            + TOY.L * torch.finfo(wide).eps * kv_c.double().norm(dim=-1)[:, None, None]
        )
        assert torch.all((found.double() - wanted).abs() <= bound)


def test_F5_views_of_a_fused_tensor_are_accepted() -> None:
    _, weights = drawn(TOY)
    fused = torch.randn(5, TOY.N, TOY.P + TOY.R, dtype=torch.float64)
    nope, _ = fused.split([TOY.P, TOY.R], -1)
    assert torch.equal(absorb_query(nope, weights.W_UK), absorb_query(nope.contiguous(), weights.W_UK))
    latent = torch.randn(5, TOY.L + TOY.R, dtype=torch.float64)[:, : TOY.L]
    for found, wanted in zip(
        expand_keys_values(latent, weights.up), expand_keys_values(latent.contiguous(), weights.up), strict=True
    ):
        assert torch.equal(found, wanted)


def test_no_tokens() -> None:
    hidden, weights = drawn(TOY)
    q = project_query(hidden[:0], POSITIONS[:0], weights, TOY)
    kv_c, k_pe = project_latent(hidden[:0], POSITIONS[:0], weights, TOY)
    assert isinstance(q, Query)
    assert (q.nope.shape, q.pe.shape, kv_c.shape, k_pe.shape) == ((0, 3, 12), (0, 3, 8), (0, 32), (0, 8))
    assert project_output(torch.zeros(0, 3, 10, dtype=torch.float64), weights).shape == (0, 40)


@pytest.mark.parametrize("name", ["biases", "multipliers", "half-split", "llama-4", "direct query"])
def test_gradients(name: str) -> None:
    config = CONFIGS[name]
    hidden, weights = drawn(config)

    def outputs(hidden: Tensor, W_UK: Tensor, W_UV: Tensor) -> tuple[Tensor, ...]:
        q = project_query(hidden, POSITIONS[:2], weights, config)
        kv_c, k_pe = project_latent(hidden, POSITIONS[:2], weights, config)
        q_latent = absorb_query(q.nope, W_UK)
        values = project_values(q_latent, W_UV)
        return (
            q_latent,
            q.pe,
            k_pe,
            *expand_keys_values(kv_c, UpProjection(W_UK, W_UV)),
            project_output(values, weights),
        )

    inputs = [tensor.clone().requires_grad_() for tensor in (hidden[:2], weights.W_UK, weights.W_UV)]
    assert torch.autograd.gradcheck(outputs, inputs, fast_mode=True)


def test_bad_input_names_the_argument() -> None:
    hidden, weights = drawn(TOY)
    for project in (project_query, project_latent):
        with pytest.raises(ValueError, match=r"hidden: expected shape \(T, 40\), got \(5, 39\)"):
            project(hidden[:, 1:], POSITIONS, weights, TOY)  # type: ignore[operator]
        with pytest.raises(ValueError, match="hidden"):
            project(hidden[None], POSITIONS, weights, TOY)  # type: ignore[operator]
        with pytest.raises(TypeError, match=r"hidden: expected the weights' torch\.float64"):
            project(hidden.float(), POSITIONS, weights, TOY)  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"positions: expected shape \(5,\)"):
            project(hidden, POSITIONS[:4], weights, TOY)  # type: ignore[operator]
        with pytest.raises(TypeError, match="positions: expected int64"):
            project(hidden, POSITIONS.int(), weights, TOY)  # type: ignore[operator]
        with pytest.raises(TypeError, match="hidden"):
            project(hidden.to("meta"), POSITIONS, weights, TOY)  # type: ignore[operator]


DIMS = {
    "hidden_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 256,
}
SHORT_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
TWO_MSCALES = SHORT_YARN | {"mscale": 0.8, "mscale_all_dim": 0.6}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
# folder and class prefix in transformers, and what differs from DIMS
THEIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "v3 yarn": ("deepseek_v3", "DeepseekV3", {"rope_parameters": TWO_MSCALES}),
    "v3 generic yarn": ("deepseek_v3", "DeepseekV3", {"rope_parameters": SHORT_YARN}),
    "v3 one mscale": ("deepseek_v3", "DeepseekV3", {"rope_parameters": SHORT_YARN | {"mscale_all_dim": 0.6}}),
    "v3 half-split": ("deepseek_v3", "DeepseekV3", {"rope_parameters": PLAIN, "rope_interleave": False}),
    "v3 direct query, bias": (
        "deepseek_v3",
        "DeepseekV3",
        {"rope_parameters": PLAIN, "q_lora_rank": None, "attention_bias": True},
    ),
    "v2 yarn": ("deepseek_v2", "DeepseekV2", {"rope_parameters": TWO_MSCALES, "attention_bias": True}),
    "v2 direct query": ("deepseek_v2", "DeepseekV2", {"rope_parameters": PLAIN, "q_lora_rank": None}),
    "longcat": ("longcat_flash", "LongcatFlash", {"rope_parameters": PLAIN, "head_dim": 8, "num_layers": 1}),
    "mistral 4": ("mistral4", "Mistral4", {"rope_parameters": TWO_MSCALES | {"llama_4_scaling_beta": 0.1}}),
    "minicpm3, plain rope": ("minicpm3", "MiniCPM3", {"rope_parameters": PLAIN}),
    "glm 4.7 flash": ("glm4_moe_lite", "Glm4MoeLite", {"rope_parameters": PLAIN, "num_hidden_layers": 1}),
    "youtu": ("youtu", "Youtu", {"rope_parameters": PLAIN}),
    "kimi linear": ("kimi_linear", "KimiLinear", {}),
    "ax-k1": ("axk1", "AXK1", {"rope_parameters": TWO_MSCALES, "attention_bias": True}),
}


def their_attention(name: str) -> tuple[Any, Any, Any]:
    """The configuration, attention module (float64, random weights) and rotary embedding of one model."""
    folder, prefix, changes = THEIRS[name]
    pytest.importorskip("transformers")
    configuration = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    hf = getattr(configuration, f"{prefix}Config")(**(DIMS | changes))
    hf._attn_implementation = "eager"
    torch.manual_seed(0)
    kind = "MLA" if prefix == "LongcatFlash" else "Attention"
    module = getattr(modeling, prefix + kind)(hf, layer_idx=0).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.0)
    rotary = getattr(modeling, f"{prefix}RotaryEmbedding", None)
    return hf, module, rotary and rotary(hf)


@pytest.mark.parametrize("name", THEIRS)
def test_attention_of_transformers_from_our_projections(name: str) -> None:
    hf, module, rotary = their_attention(name)
    from transformers import DynamicCache

    config = MLAConfig.from_hf(hf.to_dict()).replace(
        rms_norm_eps=1e-6, unsupported=()
    )  # theirs ignore the config's eps
    weights = MLAWeights.from_hf(module.state_dict(), config)
    T = 40
    hidden, positions = torch.randn(T, config.H, dtype=torch.float64), torch.arange(T)
    causal = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)
    inputs: dict[str, Any] = {
        "hidden_states": hidden[None],
        "attention_mask": causal[None, None],
        "cache": DynamicCache(),
    }
    if rotary is not None:
        inputs["position_embeddings"] = rotary(hidden[None], positions[None])
    if "Mistral4" in type(module).__name__:
        inputs["position_ids"] = positions[None]
    with torch.no_grad():
        theirs = module(**inputs)[0][0]
    q, (kv_c, k_pe) = (
        project_query(hidden, positions, weights, config),
        project_latent(hidden, positions, weights, config),
    )
    k_nope, v = expand_keys_values(kv_c, weights.up)
    scores = torch.einsum("tnp,snp->nts", q.nope, k_nope) + torch.einsum("tnr,sr->nts", q.pe, k_pe)
    out = torch.einsum("nts,snv->tnv", (scores * config.softmax_scale + causal).softmax(-1), v)
    # theirs keeps norms, angles and the softmax in float32: an angle of T radians is off by T u, the rest by few u
    bound = (T + 64) * 2**-24
    torch.testing.assert_close(project_output(out, weights), theirs, rtol=0, atol=bound * theirs.abs().max().item())
    layer = inputs["cache"].layers[0]
    torch.testing.assert_close(layer.keys[0, 0], kv_c, rtol=0, atol=bound * kv_c.abs().max().item())
    reordered = config.rope.type != "none" and config.rope.interleaved and "DeepseekV2" not in type(module).__name__
    ours = deinterleave(k_pe) if reordered else k_pe
    torch.testing.assert_close(layer.values[0, 0], ours, rtol=0, atol=bound * k_pe.abs().max().item())
