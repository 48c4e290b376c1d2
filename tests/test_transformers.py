"""MLALayer against the attention modules of transformers: an oracle from outside that shares no code with this project.

Every module is run alone on each request, with its own latent cache: prefill, chunked prefill, decode. The layer runs
all requests as one ragged batch over shuffled pages in poisoned memory.

How close. The truth is the module run wholly in float64. Its code asks for float32 in places (norms, softmax, rotation
tables), so that run is inside `float64_everywhere`, which turns those requests into float64. The budget is the module's
own float32 error e = rms(float32 - float64) / rms(float64), pooled over the run; both compute the same chain of
products, so the layer may have 3 (e + u), u = 2^-24: the factor of the house's rule for one storage format. In float64
the same roundings are 2^-29 times as large, the truth itself has one such error, and the angle at position p is off by
p 2^-53 radians on either side, where scores are of size 1: 2^-29 (3 + 1) (e + u) + p 2^-52, about 1e-14. For e the
module is given tables computed in float64, because its own, computed in float32, are off by p 2^-24 radians: at
position 150000 (v3-widths-far) they cost the module 7e-4, the layer nothing.

T new tokens (packed over requests), H hidden.
"""

import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tiers
from mla.batch import AttentionBatch
from mla.config import MLAConfig
from mla.layer import MLALayer
from mla.weights import MLAWeights

transformers = pytest.importorskip("transformers")

PLAIN = {"rope_type": "default", "rope_theta": 100.0}
# mscale != mscale_all_dim: the amplitude of cos and sin is not 1, and not the factor in the softmax scale
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 16, "mscale": 0.8, "mscale_all_dim": 0.6}
V3_YARN = YARN | {"rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
V3_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
V2_YARN = V3_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
TOY: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 20}
TOY |= {"kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
# the modules give their attention norms no eps, so 1e-6 whatever the config says: see test_P7
TOY |= {"num_hidden_layers": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
V3_WIDTHS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 96}
V3_WIDTHS |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V3_WIDTHS |= {"max_position_embeddings": 163840}


def config_class(stem: str) -> Any:
    if not hasattr(transformers, stem + "Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {stem}Config; 5.24 has")
    return getattr(transformers, stem + "Config")


@dataclass(frozen=True)
class Case:
    """A module: its folder, the stem of its classes, changes to TOY, rotation (None: the module has none)."""

    folder: str
    stem: str
    rope: dict[str, Any] | None
    changes: dict[str, Any] = field(default_factory=dict)
    attention: str = "Attention"
    first_position: int = 0

    def hf_config(self) -> Any:
        fields = TOY | self.changes | ({"rope_parameters": dict(self.rope)} if self.rope else {})
        config = config_class(self.stem)(**fields)
        config._attn_implementation = "eager"
        return config

    def modules(self) -> tuple[Any, Any]:
        """The attention module, and the module that makes its rotation tables."""
        config = self.hf_config()
        code = importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")
        attention = getattr(code, self.stem + self.attention)(config, layer_idx=0).requires_grad_(False)
        return attention, getattr(code, self.stem + "RotaryEmbedding")(config) if self.rope else None


CASES = {
    "v3": Case("deepseek_v3", "DeepseekV3", PLAIN),
    "v3-yarn": Case("deepseek_v3", "DeepseekV3", YARN),
    "v3-half-split": Case("deepseek_v3", "DeepseekV3", YARN, {"rope_interleave": False}),
    "v3-direct-query": Case("deepseek_v3", "DeepseekV3", YARN, {"q_lora_rank": None}),
    "v3-bias": Case("deepseek_v3", "DeepseekV3", YARN, {"attention_bias": True}),
    "v3-no-mscale": Case("deepseek_v3", "DeepseekV3", YARN | {"mscale": None, "mscale_all_dim": None}),
    "v3-widths-far": Case("deepseek_v3", "DeepseekV3", V3_YARN, V3_WIDTHS, first_position=150_000),
    "v2": Case("deepseek_v2", "DeepseekV2", PLAIN),
    "v2-yarn": Case("deepseek_v2", "DeepseekV2", YARN),
    "v2-direct-query": Case("deepseek_v2", "DeepseekV2", YARN, {"q_lora_rank": None}),
    "v2-lite-widths": Case("deepseek_v2", "DeepseekV2", V2_YARN, V3_WIDTHS | {"q_lora_rank": None}),
    "glm4-moe-lite": Case("glm4_moe_lite", "Glm4MoeLite", PLAIN),
    "longcat-flash": Case("longcat_flash", "LongcatFlash", PLAIN, {"head_dim": 8}, attention="MLA"),
    "mistral4": Case("mistral4", "Mistral4", YARN | {"llama_4_scaling_beta": 0.1}),
    "youtu": Case("youtu", "Youtu", PLAIN),
    "axk1": Case("axk1", "AXK1", YARN),
    "minicpm3": Case("minicpm3", "MiniCPM3", PLAIN),
    "kimi-linear": Case("kimi_linear", "KimiLinear", None, {"layer_types": ["full_attention"] * 2}),
}
TIERS = ("naive:mha", "naive:mqa", "paged:mha", "paged:mqa", "template")
# New tokens of each of 4 requests in each step: whole prompts, chunks, a late arrival, decodes, past 16 and past 32.
STEPS = ((7, 3, 0, 1), (40, 4, 0, 2), (1, 1, 5, 30), (1, 1, 1, 9))
REQUESTS, PAGE_SIZE, PAGES = 4, 4, 16


class _AskForFloat64(TorchFunctionMode):
    """Turn every request for float32 in a torch call into one for float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_widen, args), **{name: _widen(x) for name, x in (kwargs or {}).items()})


def _widen(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@contextmanager
def float64_everywhere() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with _AskForFloat64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def draw(attention: torch.nn.Module) -> None:
    """Random weights of unit gain, norm weights and biases that cannot be left out unnoticed."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in attention.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5, generator=generator)
        else:
            weight.data.normal_(0.0, 0.1 if weight.dim() == 1 else weight.shape[1] ** -0.5, generator=generator)


def attend_alone(case: Case, attention: Any, tables: Any, hidden: list[list[Tensor]], dtype: torch.dtype) -> list:
    """Each request by itself through the module and its cache; one list of outputs (q, H) for each step."""
    cache_name = "cache" if "cache" in inspect.signature(type(attention).forward).parameters else "past_key_values"
    caches, seen, steps = [transformers.DynamicCache() for _ in range(REQUESTS)], [0] * REQUESTS, []
    for chunks in hidden:
        outputs = []
        for b, chunk in enumerate(chunks):
            keys, at = seen[b] + chunk.shape[0], torch.arange(seen[b], seen[b] + chunk.shape[0])
            mask = torch.zeros(1, 1, at.shape[0], keys, dtype=dtype)
            mask.masked_fill_(torch.arange(keys) > at[:, None], float("-inf"))
            positions = (at + case.first_position)[None]
            inputs = {"hidden_states": chunk[None].to(dtype), "attention_mask": mask, cache_name: caches[b]}
            if tables is not None:
                inputs["position_embeddings"] = tables(positions)
            if "position_ids" in inspect.signature(type(attention).forward).parameters:
                inputs["position_ids"] = positions
            outputs.append(attention(**inputs)[0][0] if len(at) else torch.zeros(0, chunk.shape[1], dtype=dtype))
            seen[b] = keys
        steps.append(outputs)
    return steps


@dataclass(frozen=True)
class Run:
    """One module's run: our reading of its config, its weights, hidden states, truth (float64), float32 error e."""

    config: MLAConfig
    state_dict: dict[str, Tensor]
    hidden: list[list[Tensor]]
    truth: list[list[Tensor]]
    error: float
    scaling: float
    first_position: int

    @property
    def last_position(self) -> int:
        return self.first_position + max(map(sum, zip(*STEPS, strict=True)))


@functools.cache
def run(name: str) -> Run:
    case = CASES[name]
    attention, _ = case.modules()
    draw(attention)
    generator = torch.Generator().manual_seed(1)
    H = attention.config.hidden_size
    hidden = [[torch.randn(q, H, generator=generator) for q in step] for step in STEPS]
    with float64_everywhere():
        wide, rotary = case.modules()
        wide.load_state_dict(attention.state_dict())
        tables = None if rotary is None else lambda at: rotary(torch.zeros(1), at)
        truth = attend_alone(case, wide, tables, hidden, torch.float64)
    rounded = tables and (lambda at: narrow(float64_tables(tables, at)))
    plain = attend_alone(case, attention, rounded, hidden, torch.float32)
    error = relative(*(torch.cat(list(chain.from_iterable(steps))) for steps in (plain, truth)))
    config = MLAConfig.from_hf(attention.config.to_dict())
    return Run(config, attention.state_dict(), hidden, truth, error, attention.scaling, case.first_position)


def float64_tables(tables: Any, at: Tensor) -> Any:
    with float64_everywhere():
        return tables(at)


def narrow(tables: Any) -> Any:
    if isinstance(tables, tuple):
        return tuple(table.to(torch.float32) for table in tables)
    return tables.to(torch.complex64)


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())


def limit(of: Run, dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return 3 * (of.error + 2**-24)
    return 2**-29 * (3 + 1) * (of.error + 2**-24) + of.last_position * 2**-52


def worst(of: Run, layer: MLALayer, steps: Sequence[Sequence[int]] = STEPS) -> float:
    """The largest relative error of a request in a step, each compared with the module that ran it alone."""
    cache = layer.new_cache(REQUESTS * PAGES)
    cache.data.fill_(float("nan"))
    pages = torch.randperm(REQUESTS * PAGES, generator=torch.Generator().manual_seed(2)).view(REQUESTS, PAGES)
    inputs, truths = ([torch.cat(parts) for parts in zip(*x, strict=True)] for x in (of.hidden, of.truth))
    seen, errors = [0] * REQUESTS, []
    for step in steps:
        spans = [slice(n, n + q) for n, q in zip(seen, step, strict=True)]
        seen = [span.stop for span in spans]
        batch = AttentionBatch.bottom_right(step, seen, pages, page_size=PAGE_SIZE, num_pages=pages.numel())
        batch = dataclasses.replace(batch, positions=batch.positions + of.first_position)
        hidden = torch.cat([x[span] for x, span in zip(inputs, spans, strict=True)])
        out = layer(hidden.to(layer.need.dtype), cache, batch).split(list(step))
        errors += [relative(o, x[s]) for o, x, s in zip(out, truths, spans, strict=True) if len(o)]
    return max(errors)


def layer_of(of: Run, tier: str, dtype: torch.dtype, config: MLAConfig | None = None) -> MLALayer:
    weights = MLAWeights.from_hf(of.state_dict, of.config, dtype=dtype)
    return MLALayer(config or of.config, weights, tiers.get(tier), page_size=PAGE_SIZE)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_the_module(name: str, tier: str) -> None:
    of = run(name)
    for dtype in (torch.float64, torch.float32):
        assert worst(of, layer_of(of, tier, dtype)) <= limit(of, dtype)


@pytest.mark.parametrize("tier", TIERS)
def test_one_prefill_is_the_module_in_chunks(tier: str) -> None:
    of, whole = run("v3-yarn"), [tuple(map(sum, zip(*STEPS, strict=True)))]
    for dtype in (torch.float64, torch.float32):
        assert worst(of, layer_of(of, tier, dtype), steps=whole) <= limit(of, dtype)


@pytest.mark.parametrize("name", CASES)
def test_D1_softmax_scale_is_the_module_s_with_the_yarn_term_squared(name: str) -> None:
    """transformers (5.17, 5.24) multiplies by mscale^2 in V2's module too; products in float64 may differ by 2 ulp."""
    of = run(name)
    assert math.isclose(of.config.softmax_scale, of.scaling, rel_tol=2 * 2**-52)


def test_D1_golden_scales_of_v3_and_v2_lite() -> None:
    assert [round(run(name).scaling, 8) for name in ("v3-widths-far", "v2-lite-widths")] == [0.13523378, 0.11472139]


# What each case is there to tell apart: the fault, the run, our config with the fault in it.
PLANTED = {
    "E1 pairs half-split for adjacent": ("v3-yarn", lambda c: rope(c, interleaved=False)),
    "E1 pairs adjacent for half-split": ("v3-half-split", lambda c: rope(c, interleaved=True)),
    "E1 pairs of v2": ("v2-yarn", lambda c: rope(c, interleaved=False)),
    "E1 pairs of minicpm3": ("minicpm3", lambda c: rope(c, interleaved=True)),
    "D1 no yarn term in the scale, v3": ("v3-yarn", lambda c: rope(c, mscale=0.8, mscale_all_dim=None)),
    "D1 no yarn term in the scale, v2": ("v2-yarn", lambda c: rope(c, mscale=0.8, mscale_all_dim=None)),
    "D4 yarn left out": ("v2-direct-query", lambda c: rope(c, type="default", factor=None)),
    "D8 ramp from another length": ("v3-yarn", lambda c: rope(c, original_max_position_embeddings=64)),
    "amplitude left out": ("v3-yarn", lambda c: rope(c, mscale=0.6)),
    "rotation of a model without": ("kimi-linear", lambda c: rope(c, type="default", theta=100.0)),
    "query multiplier left out": ("longcat-flash", lambda c: c.replace(q_lora_multiplier=1.0)),
    "latent multiplier left out": ("longcat-flash", lambda c: c.replace(kv_lora_multiplier=1.0)),
    "llama-4 scaling left out": ("mistral4", lambda c: rope(c, llama_4_scaling_beta=None)),
    "eps 1e-5 for 1e-6": ("v3", lambda c: c.replace(rms_norm_eps=1e-5)),
}


def rope(config: MLAConfig, **changes: Any) -> MLAConfig:
    return config.replace(rope=dataclasses.replace(config.rope, **changes))


@pytest.mark.parametrize("fault", PLANTED)
def test_the_comparison_sees(fault: str) -> None:
    name, plant = PLANTED[fault]
    of = run(name)
    assert worst(of, layer_of(of, "naive:mha", torch.float32, plant(of.config))) > limit(of, torch.float32)


def test_P7_transformers_ignores_rms_norm_eps_in_its_attention_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers (5.17, 5.24) builds q_a_layernorm and kv_a_layernorm without the config's eps; ours have it."""
    case = dataclasses.replace(CASES["v3-yarn"], changes={"rms_norm_eps": 1e-2})
    monkeypatch.setitem(CASES, "eps as it is", case)
    attention, _ = case.modules()
    of, eps = run("eps as it is"), attention.q_a_layernorm.variance_epsilon
    assert of.config.rms_norm_eps == 1e-2
    if eps != 1e-2:
        assert eps == attention.kv_a_layernorm.variance_epsilon == 1e-6
        ignoring = layer_of(of, "naive:mha", torch.float64, of.config.replace(rms_norm_eps=1e-6))
        assert worst(of, ignoring) <= limit(of, torch.float64)
        assert worst(of, layer_of(of, "naive:mha", torch.float64)) > 1e-3
    norm = type(attention.q_a_layernorm)
    build = norm.__init__
    monkeypatch.setattr(norm, "__init__", lambda self, size, eps=None: build(self, size, 1e-2))
    monkeypatch.setitem(CASES, "eps as configured", case)
    of = run("eps as configured")
    assert worst(of, layer_of(of, "naive:mha", torch.float64)) <= limit(of, torch.float64)


def test_load_state_dict_takes_a_module_s_weights() -> None:
    of = run("v3-bias")
    layer = MLALayer(of.config, MLAWeights.random(of.config), tiers.get("paged"), page_size=PAGE_SIZE)
    assert worst(of, layer) > limit(of, torch.float32)
    layer.load_state_dict(of.state_dict)
    assert worst(of, layer) <= limit(of, torch.float32)


LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
REFUSED = {
    "MiniCPM3": ({**TOY, "rope_scaling": LONG}, "longrope"),
    "MistralLarge4Text": ({}, "q_lora_rank"),
    "DeepseekV32": ({}, "index_topk"),
    "GlmMoeDsa": ({}, "index_topk"),
    "Glm5NextText": ({}, "index_topk"),
    "HYV4": ({}, "hy_v4"),
    "BailingHybrid": ({}, "bailing_hybrid"),
    "Dots3NoteText": ({}, "rope_parameters"),
    "KimiLinear": ({}, "layer_types"),
}


@pytest.mark.parametrize("stem", REFUSED)
def test_what_the_layer_does_not_compute_it_refuses_by_field(stem: str) -> None:
    fields, name = REFUSED[stem]
    hf = config_class(stem)(**fields).to_dict()
    weights, tier = MLAWeights.random(run("v3").config), tiers.get("naive")
    with pytest.raises(ValueError, match=name):
        MLALayer(MLAConfig.from_hf(hf), weights, tier)
