"""Released models as differences from DeepSeek-V3, in the fields of their config.json.

A value here is one published in a config file or model code; "unpublished" lists fields that are not known, so that
such a preset loads with V3's value and `require_supported` names them. `num_hidden_layers` is 1 where it is not known.
No tensors here.
"""

import difflib
from typing import Any

from mla.config import MLAConfig
from mla.errors import bad

YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 163840,
    "num_hidden_layers": 61,
    "rope_theta": 10000.0,
    "rope_scaling": YARN,
}


def _plain(theta: float) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_scaling": None}


DSA = {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
KIMI_K2 = {"num_attention_heads": 64, "rope_theta": 50000.0}
MOONLIGHT = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "num_hidden_layers": 27,
    "rms_norm_eps": 1e-5,
}
GLM_5 = {
    **DSA,
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 78,
    "index_n_heads": 32,
}
GLM_5_LONG = {**GLM_5, **_plain(8e6), "max_position_embeddings": 1048576, "index_topk_freq": 4}
NOPE = {"mla_use_nope": True, **_plain(10000.0), "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5}

PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {},
    "deepseek-v2": {
        "hidden_size": 5120,
        "num_hidden_layers": 60,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek-v2-lite": {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "num_hidden_layers": 27,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek-v3.2": DSA,
    "kimi-k2": {**KIMI_K2, "rope_scaling": YARN | {"factor": 32, "beta_fast": 1}, "max_position_embeddings": 131072},
    "kimi-k2.5": {**KIMI_K2, "rope_scaling": YARN | {"factor": 64}, "max_position_embeddings": 262144},
    "kimi-k3": {
        **NOPE,
        "model_type": "kimi_k3",
        "num_attention_heads": 96,
        "num_hidden_layers": 93,
        "mla_use_output_gate": True,
        "linear_attn_config": {"kda_layers": 69, "full_attn_layers": 24},
    },
    "kimi-linear-48b": {
        **NOPE,
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "num_attention_heads": 32,
        "q_lora_rank": None,
        "num_hidden_layers": 27,
        "linear_attn_config": {"kda_layers": 20, "full_attn_layers": 7},
    },
    "moonlight-16b": {**MOONLIGHT, **_plain(50000.0), "max_position_embeddings": 8192},
    "kimi-vl": {**MOONLIGHT, **_plain(800000.0), "max_position_embeddings": 131072},
    "glm-5": {**GLM_5, **_plain(1e6), "max_position_embeddings": 202752},
    "glm-5.2": GLM_5_LONG,
    "glm-5.3": GLM_5_LONG,
    "glm-5.3-flash": {
        **DSA,
        **NOPE,
        "model_type": "glm5_next_text",
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "num_hidden_layers": 45,
        "layer_types": 34 * ["linear_attention"] + 11 * ["indexed_attention"],  # how many, not their order
        "index_n_heads": 32,
    },
    "glm-4.7-flash": {
        **_plain(1e6),
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "num_hidden_layers": 47,
    },
    "longcat-flash": {
        **_plain(1e7),
        "model_type": "longcat_flash",
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 56,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mistral-large-3": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 36,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "max_position_embeddings": 294912,
    },
    "mistral-small-4": {
        "model_type": "mistral4",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "max_position_embeddings": 1048576,
        "num_hidden_layers": 36,
        "rope_scaling": YARN | {"factor": 128, "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1},
    },
    "minicpm3-4b": {
        "model_type": "minicpm3",
        "hidden_size": 2560,
        "num_attention_heads": 40,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 62,
        "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 32768},
    },
    "hy4": {
        **GLM_5,
        **_plain(1e7),
        "model_type": "hy_v4",
        "max_position_embeddings": 262144,
        "num_hidden_layers": 1,
        "index_n_heads": 16,
        "learnable_sink_init": 0.0,
    },
    "ax-k1": {"model_type": "axk1", "num_attention_heads": 64, "unpublished": ("rope_scaling",)},
    "sarvam-105b": {
        "model_type": "sarvam_mla",
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "q_lora_rank": None,
        "num_hidden_layers": 32,
        "rope_scaling": YARN | {"type": "deepseek_yarn"},
        "unpublished": ("rope_scaling", "rope_theta"),
    },
    "joyai-flash": {**_plain(3.2e7), "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 1},
    "youtu-llm": {
        **_plain(1.6e6),
        "model_type": "youtu",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 32,
    },
    "ling-2.5-1t": {
        "model_type": "bailing_hybrid",
        "layer_group_size": 8,
        "num_hidden_layers": 1,
        "unpublished": ("hidden_size", "num_attention_heads", "q_lora_rank", "rope_scaling"),
    },
    "openpangu-ultra-moe": {"model_type": "pangu_ultra_moe", "hidden_size": 7680, "unpublished": ("rope_scaling",)},
    "dots3-note": {
        **DSA,
        **_plain(8e7),
        "model_type": "dots3_note",
        "hidden_size": 5120,
        "q_lora_rank": 1024,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 524288,
        "num_hidden_layers": 46,
        "sliding_window": 512,
    },
    "toy": {
        "hidden_size": 40,
        "num_attention_heads": 3,
        "q_lora_rank": 20,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "max_position_embeddings": 256,
        "num_hidden_layers": 2,
        "rope_theta": 100.0,
        "rope_scaling": YARN
        | {"factor": 4, "original_max_position_embeddings": 64, "mscale": 0.8, "mscale_all_dim": 0.6},
    },
}
ALIASES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "kimi-k2.6": "kimi-k2.5",
    "kimi-k2.7-code": "kimi-k2.5",
    "glm-5.1": "glm-5",
    "ring-2.5-1t": "ling-2.5-1t",
}


def preset(name: str) -> MLAConfig:
    """Return the settings of a released model, or of "toy", by name; unknown names raise ValueError with the nearest.

    A model with features this package does not compute loads too: `require_supported` then names them. "toy" has
    N 3, P 12, R 8, V 10, L 32, H 40 and Lq 20, all different, with YaRN whose amplitude is not 1.
    """
    found = ALIASES.get(name, name)
    if found not in PRESETS:
        near = difflib.get_close_matches(name, [*PRESETS, *ALIASES], n=1, cutoff=0.0)[0]
        raise bad("preset", expected=f"one of {', '.join(PRESETS)}", got=repr(name), fix=f"did you mean {near!r}")
    return MLAConfig.from_hf({**V3, **PRESETS[found], "name": name})
