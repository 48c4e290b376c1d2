"""Another implementation of the same layer, timed beside ours: transformers' attention module with its own cache.

Axes: B requests, S cached tokens, H hidden, L KV rank, R rope.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from mla.batch import AttentionBatch
from mla.bench import Timing, timed_together
from mla.config import MLAConfig
from mla.errors import bad
from mla.layer import MLALayer
from mla.tier import Tier
from mla.weights import MLAWeights


@dataclass(frozen=True)
class LayerTiming:
    """A decode step of one whole layer, projections included: time, tokens/s, cache bytes per token, and how far off.

    `difference` is rms(ours - theirs) / rms(theirs) in float32: the two compute the same layer.
    """

    name: str
    timing: Timing
    tokens_per_second: float
    cache_bytes_per_token: float
    difference: float


def decode_beside_transformers(
    config: MLAConfig, tiers: list[Tier], *, context: int = 4096, batch: int = 4, repeats: int = 10, seed: int = 0
) -> list[LayerTiming]:
    """Time a decode step, `batch` requests over `context` cached tokens each, of transformers' module and of each tier.

    All run the same float32 weights and inputs, hidden (B, 1, H), take turns in one run, and include their projections
    and cache writes. Raises ValueError where transformers is missing, where the model has no DeepSeek rotation, or
    where results differ by more than 1e-3, since then they are not the same layer.
    """
    if importlib.util.find_spec("transformers") is None:
        raise bad("peer", expected="an installed transformers", got="none", fix="pip install -e '.[test]' in the clone")
    weights = MLAWeights.random(config, seed=seed, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    past = torch.randn(batch * context, config.H, generator=generator)
    new = torch.randn(batch, config.H, generator=generator)
    at = torch.arange(context).repeat(batch)
    calls, names, widths = [], [], []
    theirs, width = _transformers_step(config, weights, past, at, new, context, batch)
    for tier in tiers:
        layer = MLALayer(config, weights, tier)
        calls.append(_layer_step(layer, past, at, new, context, batch))
        names.append(f"mla {tier.name}")
        widths.append(layer.need.layout.row_bytes)
    results = [call() for call in [theirs, *calls]]
    rms = lambda x: float(x.double().square().mean().sqrt())
    off = [rms(r - results[0]) / rms(results[0]) for r in results]
    for name, value in zip(names, off[1:], strict=True):
        if not value < 1e-3:
            raise bad(
                "peer",
                expected="the same layer, within 1e-3",
                got=f"{name} differs by {value:.2g}",
                fix="do not time it",
            )
    timings = timed_together([theirs, *calls], repeats)
    rows = zip(["transformers", *names], timings, [width, *widths], off, strict=True)
    return [LayerTiming(n, t, batch / t.median_ms * 1e3, w, d) for n, t, w, d in rows]


def _layer_step(layer: MLALayer, past: torch.Tensor, at: torch.Tensor, new: torch.Tensor, context: int, batch: int):
    """Fill the cache with past (B*S, H) and return a call that decodes new (B, H), always at the same slots."""
    page = layer.need.page_size
    pages = -(-(context + 1) // page)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)).view(batch, pages)
    cache = layer.new_cache(batch * pages)
    fill = AttentionBatch.bottom_right(
        [context] * batch, [context] * batch, order, page_size=page, num_pages=batch * pages
    )
    _, kv_c, k_pe = layer.project(past, at)
    layer.tier.write(cache, kv_c, k_pe, fill.slot_mapping)

    def step() -> torch.Tensor:
        one = AttentionBatch.bottom_right(
            [1] * batch, [context + 1] * batch, order, page_size=page, num_pages=batch * pages
        )
        with torch.no_grad():
            return layer(new, cache, one)

    return step


def _transformers_step(
    config: MLAConfig, weights: MLAWeights, past, at, new, context: int, batch: int
) -> tuple[Any, float]:
    """Return a call that decodes new (B, H) with DeepseekV3Attention, and its cache's bytes per token."""
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as code

    hf = DeepseekV3Config(**_hf_fields(config))
    hf._attn_implementation = "eager"
    module = code.DeepseekV3Attention(hf, layer_idx=0).eval()
    module.load_state_dict(weights.to_hf(config), strict=True)
    rotary = code.DeepseekV3RotaryEmbedding(hf)
    cache = DynamicCache(config=hf)
    tables = lambda x, positions: rotary(x, positions)
    with torch.no_grad():
        hidden, positions = past.view(batch, context, config.H), at.view(batch, context)
        for part in range(0, context, 256):  # causal chunks: only the cache matters, outputs are thrown away
            stop = min(part + 256, context)
            mask = torch.zeros(batch, 1, stop - part, stop)
            module(hidden[:, part:stop], tables(hidden, positions[:, part:stop]), mask, cache)
    layer: Any = cache.layers[0]
    stored = layer.keys.numel() + layer.values.numel()
    position = torch.full((batch, 1), context)

    def step() -> torch.Tensor:
        with torch.no_grad():
            out = module(new[:, None], tables(new, position), None, cache)[0][:, 0]
        cache.crop(-1)  # take the new token back, so that every step sees the same keys
        return out

    return step, stored * past.element_size() / (batch * context)


def _hf_fields(config: MLAConfig) -> dict[str, Any]:
    r = config.rope
    if r.type not in ("default", "yarn", "deepseek_yarn"):
        raise bad("model", expected="default or yarn rotation", got=r.type, fix="time deepseek-v2-lite")
    rope: dict[str, Any] = {"rope_type": "default" if r.type == "default" else "yarn", "rope_theta": r.theta}
    if r.type != "default":
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        rope |= {n: getattr(r, n) for n in names if getattr(r, n) is not None}
    widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    others = ("hidden_size", "num_attention_heads", "q_lora_rank", "attention_bias", "max_position_embeddings")
    fields = {name: getattr(config, name) for name in (*widths, *others)}
    fields |= {"rope_interleave": r.interleaved, "num_key_value_heads": config.num_attention_heads}
    return fields | {"rope_parameters": rope, "num_hidden_layers": 1}
