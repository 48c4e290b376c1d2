"""Settings: the softmax scale against hand-computed values, every preset, and refusals that name the field."""

import json
import math
import re
from pathlib import Path

import pytest

from mla.config import MLAConfig, RopeConfig, yarn_mscale
from mla.presets import ALIASES, PRESETS, V3, preset

YARN = V3["rope_scaling"]
PLAIN = {"rope_scaling": None}


def config(**changes: object) -> MLAConfig:
    return MLAConfig.from_hf(V3 | changes)


def scale(P: int, R: int, factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    return (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2 / math.sqrt(P + R)


# name -> softmax scale, bytes of a 16-bit latent row, fields that refuse; from the table of released models
MODELS: dict[str, tuple[float, int, tuple[str, ...]]] = {
    "deepseek-v2-lite": (scale(128, 64, 40, 0.707), 1152, ()),
    "deepseek-v2": (scale(128, 64, 40, 0.707), 1152, ()),
    "deepseek-v3": (scale(128, 64, 40, 1.0), 1152, ()),
    "deepseek-v3.2": (scale(128, 64, 40, 1.0), 1152, ("index_topk",)),
    "kimi-k2": (scale(128, 64, 32, 1.0), 1152, ()),
    "kimi-k2.5": (scale(128, 64, 64, 1.0), 1152, ()),
    "kimi-k3": (scale(128, 64), 1152, ("mla_use_output_gate", "linear_attn_config")),
    "kimi-linear-48b": (scale(128, 64), 1152, ("linear_attn_config",)),
    "moonlight-16b": (scale(128, 64), 1152, ()),
    "kimi-vl": (scale(128, 64), 1152, ()),
    "glm-5": (1 / 16, 1152, ("index_topk",)),
    "glm-5.2": (1 / 16, 1152, ("index_topk",)),
    "glm-5.3": (1 / 16, 1152, ("index_topk",)),
    "glm-5.3-flash": (scale(256, 0), 1024, ("index_topk", "layer_types")),
    "glm-4.7-flash": (1 / 16, 1152, ()),
    "longcat-flash": (scale(128, 64), 1152, ()),
    "mistral-large-3": (scale(128, 64), 1152, ()),
    "mistral-small-4": (scale(64, 64, 128, 1.0), 640, ()),
    "minicpm3-4b": (scale(64, 32), 576, ("rope_scaling.type",)),
    "hy4": (1 / 16, 1152, ("index_topk", "learnable_sink_init", "model_type")),
    "ax-k1": (scale(128, 64, 40, 1.0), 1152, ("rope_scaling",)),
    "sarvam-105b": (scale(128, 64, 40, 1.0), 1152, ("rope_scaling", "rope_theta")),
    "joyai-flash": (scale(128, 64), 1152, ()),
    "youtu-llm": (scale(128, 64), 1152, ()),
    "ling-2.5-1t": (
        scale(128, 64, 40, 1.0),
        1152,
        ("layer_group_size", "model_type", "hidden_size", "num_attention_heads", "q_lora_rank", "rope_scaling"),
    ),
    "openpangu-ultra-moe": (scale(128, 64, 40, 1.0), 1152, ("rope_scaling",)),
    "dots3-note": (scale(128, 64), 1152, ("index_topk", "sliding_window")),
    "toy": (scale(12, 8, 4, 0.6), 80, ()),
}


def test_every_preset_is_in_the_table() -> None:
    assert sorted(PRESETS) == sorted(MODELS)
    assert set(ALIASES.values()) <= set(PRESETS)


@pytest.mark.parametrize("name", MODELS)
def test_preset_scale_bytes_and_refusals(name: str) -> None:
    wanted_scale, wanted_bytes, refused = MODELS[name]
    model = preset(name)
    assert model.name == name
    assert model.softmax_scale == pytest.approx(wanted_scale, rel=2**-50)
    row_bytes = (model.L + model.R) * 2
    assert row_bytes == wanted_bytes
    assert tuple(sentence.split(":")[0] for sentence in model.unsupported) == refused
    if refused:
        with pytest.raises(ValueError, match=name) as error:
            model.require_supported()
        assert all(field in str(error.value) for field in refused)
    else:
        model.require_supported()


def test_toy_has_six_different_widths() -> None:
    toy = preset("toy")
    assert (toy.N, toy.P, toy.R, toy.V, toy.L, toy.H, toy.Lq) == (3, 12, 8, 10, 32, 40, 20)


def test_aliases_and_unknown_names() -> None:
    assert preset("deepseek-r1").replace(name="deepseek-v3") == preset("deepseek-v3")
    with pytest.raises(ValueError, match="did you mean 'deepseek-v3'"):
        preset("deepseek-v33")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deepseek-v3", 0.13523378),
        ("deepseek-v2-lite", 0.11472139),
        ("kimi-k2", 0.130861),
        ("kimi-k2.5", 0.144680),
        ("moonlight-16b", 0.0721688),
        ("glm-4.7-flash", 0.0625),
    ],
)
def test_D1_softmax_scale_has_the_yarn_term(name: str, value: float) -> None:
    digits = len(str(value)) - 2
    assert preset(name).softmax_scale == pytest.approx(value, abs=0.5 * 10**-digits)
    assert isinstance(preset(name).softmax_scale, float)


def test_D5_softmax_scale_counts_nope_and_rope() -> None:
    small = config(qk_nope_head_dim=16, qk_rope_head_dim=8, **PLAIN)
    assert small.softmax_scale == pytest.approx(0.2041241, abs=5e-8)


def test_D7_both_mscales_enter_where_they_should() -> None:
    assert yarn_mscale(40, 1.0) ** 2 == pytest.approx(1.87385421, abs=5e-9)
    assert yarn_mscale(40, 0.707) ** 2 == pytest.approx(1.58962617, abs=5e-9)
    assert yarn_mscale(1.0, 1.0) == yarn_mscale(0.5, 1.0) == 1.0
    without = {field: value for field, value in YARN.items() if field != "mscale_all_dim"}
    assert config(rope_scaling=without).softmax_scale == 192**-0.5
    assert config(rope_scaling=YARN | {"mscale_all_dim": 0}).softmax_scale == 192**-0.5


def test_absorbed_width_never_enters_the_scale() -> None:
    assert config(kv_lora_rank=64).softmax_scale == config(kv_lora_rank=1024).softmax_scale


def test_D9_usable_length_is_not_multiplied_by_the_factor() -> None:
    assert preset("deepseek-v3").max_position_embeddings == 163840


def test_D4_D8_D10_a_shorter_model_keeps_its_yarn() -> None:
    short = config(max_position_embeddings=512)
    assert short.rope == preset("deepseek-v3").rope
    assert short.softmax_scale == preset("deepseek-v3").softmax_scale


@pytest.mark.parametrize("kv_heads", [1, 8, 128, None])
def test_J3_num_key_value_heads_is_ignored(kv_heads: int | None) -> None:
    assert config(num_key_value_heads=kv_heads) == config()


def test_longcat_multiplies_both_latents() -> None:
    model = preset("longcat-flash")
    assert (model.q_lora_multiplier, model.kv_lora_multiplier) == (2.0, 12**0.5)
    assert config(model_type="longcat_flash", **PLAIN).kv_lora_multiplier == (7168 / 512) ** 0.5
    off = config(model_type="longcat_flash", mla_scale_q_lora=False, mla_scale_kv_lora=False, **PLAIN)
    assert (off.q_lora_multiplier, off.kv_lora_multiplier) == (1.0, 1.0)


def test_rotation_names_old_and_new() -> None:
    new = {field: value for field, value in YARN.items() if field != "type"} | {"rope_type": "yarn", "rope_theta": 1e4}
    renamed = {field: value for field, value in V3.items() if field not in ("rope_scaling", "rope_theta")}
    assert MLAConfig.from_hf(renamed | {"rope_parameters": new}) == config()
    assert config(rope_scaling=YARN | {"rope_type": "yarn"}) == config()
    assert config(rope_scaling=YARN | {"attention_factor": None}) == config()


def test_llama4_scaling_from_either_place() -> None:
    inside = config(rope_scaling=YARN | {"llama_4_scaling_beta": 0.1})
    outside = config(llama_4_scaling={"beta": 0.1, "original_max_position_embeddings": 4096})
    assert inside == outside
    assert inside.rope.llama_4_scaling_beta == 0.1
    assert preset("mistral-small-4").rope.llama_4_scaling_beta == 0.1


def test_who_rotates_which_way() -> None:
    assert preset("deepseek-v2").rope.interleaved
    assert not preset("minicpm3-4b").rope.interleaved
    assert not preset("hy4").rope.interleaved
    assert not config(rope_interleave=False).rope.interleaved
    assert preset("kimi-linear-48b").rope.type == preset("kimi-k3").rope.type == "none"
    assert config(model_type="kimi_linear", **PLAIN).rope.type == "none"
    assert config(qk_rope_head_dim=0, **PLAIN).R == 0


def test_multimodal_and_other_names() -> None:
    text = {
        field: value for field, value in V3.items() if field not in ("max_position_embeddings", "num_hidden_layers")
    }
    model = MLAConfig.from_hf({"text_config": text | {"model_max_length": 77, "num_layers": 3}, "vision_config": {}})
    assert (model.max_position_embeddings, model.num_hidden_layers) == (77, 6)


def test_from_a_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert MLAConfig.from_hf(tmp_path) == MLAConfig.from_hf(str(tmp_path / "config.json")) == config()
    (tmp_path / "config.json").write_text("{'no': json")
    with pytest.raises(ValueError, match=r"source: expected JSON, got config\.json"):
        MLAConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(TypeError, match="JSON object"):
        MLAConfig.from_hf(tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        MLAConfig.from_hf(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="source"):
        MLAConfig.from_hf(3)  # type: ignore[arg-type]


BAD_FIELDS: list[tuple[dict[str, object], str]] = [
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
    ({"qk_rope_head_dim": -2}, "qk_rope_head_dim"),
    ({"qk_nope_head_dim": 0}, "qk_nope_head_dim"),
    ({"v_head_dim": 0}, "v_head_dim"),
    ({"v_head_dim": -4}, "v_head_dim"),
    ({"v_head_dim": 12.0}, "v_head_dim"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_attention_heads": True}, "num_attention_heads"),
    ({"hidden_size": None}, "hidden_size"),
    ({"qk_nope_head_dim": "128"}, "qk_nope_head_dim"),
    ({"kv_lora_rank": 0}, "kv_lora_rank"),
    ({"q_lora_rank": 0}, "q_lora_rank"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
    ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ({"qk_head_dim": 128}, "qk_head_dim"),
    ({"rope_theta": None}, "rope_theta"),
    ({"rope_theta": -1.0}, "rope.theta"),
    ({"rope_theta": 1.0}, "rope.theta"),
    ({"rope_theta": 1e4, "rope_scaling": YARN | {"rope_theta": 5e4}}, "rope_theta"),
    ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}}, "rope.factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 40}}, "rope.original_max_position_embeddings"),
    ({"rope_scaling": YARN | {"factor": 0}}, "rope.factor"),
    ({"rope_scaling": YARN | {"factor": "40"}}, "rope.factor"),
    ({"rope_scaling": YARN | {"type": "llama3"}}, "rope.type"),
    ({"rope_scaling": YARN | {"rope_type": "default"}}, "rope_type"),
    ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "rope.beta_fast"),
    ({"rope_scaling": YARN | {"mscale": -1.0}}, "rope.mscale"),
    ({"rope_scaling": YARN | {"mscales": 1.0}}, "mscales"),
    ({"rope_scaling": YARN | {"truncate": 1}}, "rope.truncate"),
    ({"rope_scaling": YARN | {"type": "deepseek_yarn", "attention_factor": 1.0}}, "rope.attention_factor"),
    ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_scaling": YARN | {"max_position_embeddings": 4096}}, "max_position_embeddings"),
    ({"rope_scaling": {"type": "default", "factor": 4}}, "rope.factor"),
    ({"rope_parameters": YARN | {"factor": 8}}, "rope_scaling"),
    ({"rope_scaling": {"full_attention": dict(YARN)}}, "rope_parameters"),
    ({"rope_scaling": {"llama_4_scaling_beta": 0.1}}, "rope.original_max_position_embeddings"),
    ({"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192}}, "original_max_position_embeddings"),
    ({"rope_interleave": "yes"}, "rope.interleaved"),
    ({"attention_bias": "no"}, "attention_bias"),
]


@pytest.mark.parametrize(
    ("changes", "field"), BAD_FIELDS, ids=[f"{field}-{i}" for i, (_, field) in enumerate(BAD_FIELDS)]
)
def test_E5_bad_values_raise_and_name_the_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        config(**changes)
    what, fix = str(error.value).split(" Fix: ")
    assert field in what
    assert fix


MALFORMED: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"rope_scaling": "yarn"}, TypeError, "rope_scaling"),
    ({"rope_scaling": [1]}, TypeError, "rope_scaling"),
    ({"rope_parameters": 3}, TypeError, "rope_parameters"),
    ({"llama_4_scaling": "x"}, TypeError, "llama_4_scaling"),
    ({"llama_4_scaling": {"beta": 0.1}}, ValueError, "llama_4_scaling"),
    ({"llama_4_scaling": {"original_max_position_embeddings": 4096}}, ValueError, "llama_4_scaling"),
    ({"qk_nope_head_dim": -64, "partial_rotary_factor": 0.5}, ValueError, "qk_nope_head_dim"),
    ({"hidden_size": 10**400, "model_type": "longcat_flash"}, ValueError, "hidden_size"),
    ({"partial_rotary_factor": "a"}, TypeError, "partial_rotary_factor"),
    ({"partial_rotary_factor": 10**400}, ValueError, "partial_rotary_factor"),
    ({"rope_scaling": YARN | {"partial_rotary_factor": "a"}}, ValueError, "partial_rotary_factor"),
    ({"rope_theta": 10**400}, ValueError, "rope.theta"),
    ({"layer_types": 3}, TypeError, "layer_types"),
    ({"layer_types": "full_attention"}, TypeError, "layer_types"),
    ({"layer_group_size": "2"}, TypeError, "layer_group_size"),
    ({"layer_group_size": True}, TypeError, "layer_group_size"),
    ({"kv_source_layers": 2}, TypeError, "kv_source_layers"),
    ({"no_rope_layers": 2}, TypeError, "no_rope_layers"),
    ({"unpublished": 3}, TypeError, "unpublished"),
    ({"num_layers": "a"}, TypeError, "num_layers"),
]
CONTRADICTORY: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"rope_scaling": YARN | {"original_max_position_embeddings": 4096.5}}, ValueError, "rope.original_max_position_"),
    ({"rope_scaling": YARN | {"factor": 0.5}}, ValueError, "rope.factor"),
    ({"rope_scaling": YARN | {"type": "deepseek_yarn", "factor": 0.5}}, ValueError, "rope.factor"),
    ({"mla_use_nope": "false", **PLAIN}, TypeError, "mla_use_nope"),
    ({"mla_use_nope": True}, ValueError, "rope_scaling"),
    ({"qk_rope_head_dim": 0}, ValueError, "rope_scaling"),
    ({"mla_use_nope": True, "rope_scaling": {"type": "foo"}}, ValueError, "rope.type"),
    ({"qk_rope_head_dim": 0, "rope_scaling": {"type": "foo"}}, ValueError, "rope.type"),
]


@pytest.mark.parametrize(("changes", "kind", "field"), MALFORMED, ids=lambda value: str(value)[:40])
def test_malformed_fields_are_named(changes: dict[str, object], kind: type[Exception], field: str) -> None:
    with pytest.raises(kind, match=rf"^{re.escape(field)}.*: expected .* Fix: ") as error:
        config(**changes)
    assert error.type is kind


@pytest.mark.parametrize(("changes", "kind", "field"), CONTRADICTORY, ids=lambda value: str(value)[:40])
def test_contradictory_rotations_are_refused(changes: dict[str, object], kind: type[Exception], field: str) -> None:
    with pytest.raises(kind, match=rf"^{re.escape(field)}.*: expected .* Fix: ") as error:
        config(**changes)
    assert error.type is kind


@pytest.mark.parametrize(
    "content",
    [b"", b'{"a": "\xff"}', b"[" * 100000, b'{"hidden_size": ' + b"9" * 5000 + b"}"],
    ids=["empty", "latin-1", "deep", "endless number"],
)
def test_damaged_config_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^source: expected JSON, got config\.json: .* Fix: ") as error:
        MLAConfig.from_hf(tmp_path)
    assert error.type is ValueError


def test_missing_fields_are_listed_in_one_error() -> None:
    with pytest.raises(ValueError, match="no kv_lora_rank, v_head_dim") as error:
        MLAConfig.from_hf({field: value for field, value in V3.items() if field not in ("kv_lora_rank", "v_head_dim")})
    assert "hidden_size" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"index_topk": 2048}, "index_topk"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_group_size": 8}, "layer_group_size"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"kv_source_layers": [0, 0, 2]}, "kv_source_layers"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"model_type": "axk2"}, "model_type"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "rope_scaling.type"),
    ],
)
def test_features_outside_mla_load_and_then_refuse_by_field(changes: dict[str, object], field: str) -> None:
    model = config(**changes)
    assert len(model.unsupported) == 1
    with pytest.raises(ValueError, match=rf"{field}: "):
        model.require_supported()
    model.replace(unsupported=()).require_supported()


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk": None},
        {"layer_types": ["full_attention"] * 3},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"kv_source_layers": [0, 1, 2]},
        {"no_rope_layers": [1, 1]},
        {"layer_group_size": 1},
    ],
)
def test_features_that_are_off_do_not_refuse(changes: dict[str, object]) -> None:
    config(**changes).require_supported()


def test_replace_checks_again() -> None:
    assert config().replace(hidden_size=64).H == 64
    with pytest.raises(ValueError, match="v_head_dim"):
        config().replace(v_head_dim=0)
    with pytest.raises(ValueError, match="head_dim"):
        config().replace(head_dim=1)
    with pytest.raises(ValueError, match="q_lora_multiplier"):
        config().replace(q_lora_rank=None, q_lora_multiplier=2.0)
    assert hash(config()) == hash(config())
    with pytest.raises(TypeError, match="rope"):
        config().replace(rope={"type": "yarn"})


def test_rope_config_alone_is_checked() -> None:
    assert RopeConfig("none").type == "none"
    with pytest.raises(ValueError, match=r"rope\.factor"):
        RopeConfig("deepseek_yarn")
