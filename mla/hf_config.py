"""Read a Hugging Face `config.json` into the fields of MLAConfig.

Contradictions are refused; features outside MLA are noted. Which names a model uses, and when they apply, follows the
transformers modules of 2026. No tensors here.
"""

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from mla.config import YARN_TYPES, RopeConfig
from mla.errors import bad

REQUIRED = (
    "hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
OPTIONAL = ("rms_norm_eps", "attention_bias", "max_position_embeddings", "num_hidden_layers")
HALF_SPLIT_MODELS = ("minicpm3", "hy_v4")
LONGROPE_TABLES = ("short_factor", "long_factor", "short_mscale", "long_mscale")
ROPE_FIELDS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "llama_4_scaling_beta",
)

# A field of config.json, when it means something this package does not compute, and what that is.
FEATURES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("index_topk", bool, "sparse attention (DSA) over chosen keys"),
    ("mla_use_output_gate", bool, "a sigmoid gate on the attention output"),
    ("linear_attn_config", bool, "hybrid layers, linear attention beside MLA"),
    ("layer_group_size", lambda size: size is not None and size > 1, "hybrid layers, one MLA layer in each group"),
    (
        "layer_types",
        lambda of: any(kind != "full_attention" for kind in of or ()),
        "layers that are not full attention",
    ),
    ("sliding_window", bool, "attention over a window of keys"),
    ("attn_logit_softcapping", bool, "soft-capped scores"),
    ("learnable_sink_init", lambda value: value is not None, "a learned attention sink"),
    (
        "kv_source_layers",
        lambda of: of is not None and list(of) != list(range(len(of))),
        "a KV cache shared across layers",
    ),
    ("no_rope_layers", lambda flags: flags is not None and not all(flags), "layers with and without rotation"),
)
# Models whose attention differs from MLA without a field that says so.
GATED_MODELS = ("hy_v4", "bailing_hybrid", "axk2", "mistral_large4_text")

LIST, OBJECT = ((list, tuple), "a list"), ((dict,), "an object")
INT, BOOL, TEXT = ((int,), "an int"), ((bool,), "true or false"), ((str,), "a string")
NUMBER = ((int, float), "a number")
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "llama_4_scaling": OBJECT,
    "layer_types": LIST,
    "kv_source_layers": LIST,
    "no_rope_layers": LIST,
    "unpublished": LIST,
    "layer_group_size": INT,
    "num_layers": INT,
    "partial_rotary_factor": NUMBER,
    "mla_use_nope": BOOL,
    "mla_scale_q_lora": BOOL,
    "mla_scale_kv_lora": BOOL,
    "use_sliding_window": BOOL,
    "model_type": TEXT,
}


def read(source: "dict[str, Any] | str | PathLike[str]") -> dict[str, Any]:
    """Return the keyword arguments of MLAConfig for a config.json given as a dict, its path or its folder.

    Multimodal configs are read from their `text_config`; rotation from `rope_parameters`, or `rope_scaling` and
    `rope_theta`; `num_key_value_heads` is ignored, since in MLA every head has its own key and value. Features outside
    MLA become sentences in `unsupported`. Raises ValueError or TypeError naming a missing, unknown or contradictory
    field.
    """
    hf = _as_dict(source)
    if "kv_lora_rank" not in hf and isinstance(hf.get("text_config"), dict):
        hf = hf["text_config"]
    _check_types(hf)
    hf = _with_aliases(hf)
    missing = [field for field in REQUIRED if field not in hf]
    if missing:
        raise bad(
            "config",
            expected="every MLA field",
            got=f"no {', '.join(missing)}",
            fix="add them; q_lora_rank may be null",
        )
    fields = {field: hf[field] for field in REQUIRED}
    for field, value in fields.items():
        if field == "q_lora_rank" and value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < 2**31:
            raise bad(field, expected="an int >= 0", got=repr(value), fix=f"set {field} to the model's width")
    fields |= {field: hf[field] for field in OPTIONAL if hf.get(field) is not None}
    width = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
    if hf.get("qk_head_dim") not in (None, width):
        raise bad(
            "qk_head_dim",
            expected=f"qk_nope_head_dim + qk_rope_head_dim = {width}",
            got=repr(hf["qk_head_dim"]),
            fix="remove it",
        )
    rope = _rope(hf)
    longcat = hf.get("model_type") == "longcat_flash"
    for field, flag, rank in (
        ("q_lora_multiplier", "mla_scale_q_lora", "q_lora_rank"),
        ("kv_lora_multiplier", "mla_scale_kv_lora", "kv_lora_rank"),
    ):
        if hf.get(flag, longcat) and hf[rank]:
            fields[field] = (hf["hidden_size"] / hf[rank]) ** 0.5
    name = hf.get("name") or hf.get("_name_or_path") or hf.get("model_type") or "custom"
    return fields | {"rope": rope, "name": name, "unsupported": _unsupported(hf, rope)}


def _as_dict(source: "dict[str, Any] | str | PathLike[str]") -> dict[str, Any]:
    if isinstance(source, dict):
        return source
    if not isinstance(source, (str, PathLike)):
        raise bad(
            "source",
            expected="a dict or a path",
            got=type(source).__name__,
            fix="pass config.to_dict()",
            kind=TypeError,
        )
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise bad("source", expected="a config.json or its folder", got=repr(str(source)), fix="check the path")
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an endless number; nested too deeply
        raise bad("source", expected="JSON", got=f"{path.name}: {error}", fix="download it again") from error
    if not isinstance(hf, dict):
        raise bad(
            "source",
            expected="a JSON object",
            got=type(hf).__name__,
            fix="pass the model's config.json",
            kind=TypeError,
        )
    return hf


def _check_types(hf: dict[str, Any]) -> None:
    for field, (kinds, what) in TYPES.items():
        value = hf.get(field)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise bad(field, expected=what, got=repr(value), fix=f"set {field} to {what}, or remove it", kind=TypeError)


def _with_aliases(hf: dict[str, Any]) -> dict[str, Any]:
    hf = dict(hf)
    if hf.get("max_position_embeddings") is None and hf.get("model_max_length") is not None:
        hf["max_position_embeddings"] = hf["model_max_length"]
    if hf.get("num_hidden_layers") is None and hf.get("num_layers") is not None:
        hf["num_hidden_layers"] = 2 * hf["num_layers"]  # LongCat: two attentions a layer
    return hf


def _rope(hf: dict[str, Any]) -> RopeConfig:
    params = _rope_params(hf)
    theta = _agree("rope_theta", hf.get("rope_theta"), params.pop("rope_theta", None))
    kind = _agree("rope_type", params.pop("rope_type", None), params.pop("type", None)) or "default"
    interleaved = hf.get("rope_interleave")
    if interleaved is None:
        interleaved = hf.get("model_type") not in HALF_SPLIT_MODELS
    unrotated = hf.get("mla_use_nope", hf.get("model_type") == "kimi_linear") or hf["qk_rope_head_dim"] == 0
    if theta is None and not unrotated:
        raise bad(
            "rope_theta", expected="the base of the rotation", got="None", fix="add rope_theta, 10000.0 for DeepSeek"
        )
    inner = params.pop("partial_rotary_factor", None)
    if not unrotated:
        _check_partial(hf, inner)
    _agree("max_position_embeddings", hf.get("max_position_embeddings"), params.pop("max_position_embeddings", None))
    if kind == "longrope":
        params = {field: value for field, value in params.items() if field not in LONGROPE_TABLES}
    unknown = sorted(set(params) - set(ROPE_FIELDS))
    if unknown:
        raise bad(
            "rope_parameters",
            expected=f"fields among {', '.join(ROPE_FIELDS)}",
            got=", ".join(unknown),
            fix="remove them",
        )
    rope = RopeConfig(type=kind, theta=10000.0 if theta is None else theta, interleaved=interleaved, **params)
    if not unrotated:
        return rope
    if (rope.type in YARN_TYPES and rope.mscale_all_dim) or rope.llama_4_scaling_beta:
        raise bad(
            "rope_scaling",
            expected="nothing that scales the scores (mscale_all_dim, llama_4_scaling_beta) where nothing is rotated",
            got=f"{kind} with mla_use_nope or qk_rope_head_dim 0",
            fix="remove rope_scaling, or mla_use_nope",
        )
    return RopeConfig(type="none", interleaved=interleaved)


def _rope_params(hf: dict[str, Any]) -> dict[str, Any]:
    new, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    given = _agree("rope_scaling", new or None, old or None) or {}
    if given and all(isinstance(value, dict) for value in given.values()):
        raise bad(
            "rope_parameters",
            expected="one rotation",
            got=f"one for each of {', '.join(given)}",
            fix="pass one of them",
        )
    params = {field: value for field, value in given.items() if value is not None}
    original = _agree(
        "original_max_position_embeddings",
        hf.get("original_max_position_embeddings"),
        params.get("original_max_position_embeddings"),
    )
    llama4 = hf.get("llama_4_scaling")
    if llama4:
        absent = [field for field in ("beta", "original_max_position_embeddings") if llama4.get(field) is None]
        if absent:
            got = f"no {', '.join(absent)}"
            raise bad("llama_4_scaling", expected="beta and original_max_position_embeddings", got=got, fix="add them")
        original = _agree("original_max_position_embeddings", original, llama4["original_max_position_embeddings"])
        params["llama_4_scaling_beta"] = _agree(
            "llama_4_scaling_beta", params.get("llama_4_scaling_beta"), llama4["beta"]
        )
    if original is not None:
        params["original_max_position_embeddings"] = original
    return params


def _check_partial(hf: dict[str, Any], inner: Any) -> None:
    R, P = hf["qk_rope_head_dim"], hf["qk_nope_head_dim"]
    for value in (inner, hf.get("partial_rotary_factor")):
        if value is None:
            continue
        number = isinstance(value, (int, float)) and 0 < value <= 1
        if not number or min(abs(value - 1.0), abs(value - R / (P + R))) > 1e-6:
            wanted = f"1.0 or {R}/{P + R}, since exactly the R dimensions rotate"
            raise bad("partial_rotary_factor", expected=wanted, got=repr(value), fix="set qk_rope_head_dim instead")


def _agree(field: str, first: Any, second: Any) -> Any:
    if first is not None and second is not None and first != second:
        raise bad(field, expected="one value", got=f"both {first!r} and {second!r}", fix="remove one of the two")
    return second if first is None else first


def _unsupported(hf: dict[str, Any], rope: RopeConfig) -> tuple[str, ...]:
    found = [f"{field}: {what}" for field, applies, what in FEATURES if applies(hf.get(field))]
    if hf.get("use_sliding_window") is False:
        found = [sentence for sentence in found if not sentence.startswith("sliding_window")]
    if hf.get("model_type") in GATED_MODELS:
        found.append(f"model_type: {hf['model_type']} adds weights to its attention that are not MLA's (gates, sinks)")
    if rope.type == "longrope":
        found.append("rope_scaling.type: longrope, whose per-pair factors depend on the length")
    found += [f"{field}: not published, the value of DeepSeek-V3 stands in" for field in hf.get("unpublished") or ()]
    return tuple(found)
