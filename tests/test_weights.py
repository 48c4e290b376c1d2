"""Weights: Hugging Face layouts against index arithmetic, checkpoints read one layer at a time, fp8 blocks, shards."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mla.checkpoint
from mla.checkpoint import dequantise_blocks, find_prefix, read_linear, scale_shape
from mla.config import MLAConfig
from mla.presets import preset
from mla.projections import project_output
from mla.weights import MLAWeights, hf_shapes

TOY = preset("toy")
CONFIGS = {
    "query rank": TOY,
    "direct query": TOY.replace(q_lora_rank=None),
    "biases": TOY.replace(attention_bias=True),
    "direct query, biases": TOY.replace(q_lora_rank=None, attention_bias=True),
    "no rope": TOY.replace(qk_rope_head_dim=0),
}
# More than one 128-block on each axis of kv_b_proj (286 x 160), blocks straddling heads of 22 rows
WIDE = TOY.replace(num_attention_heads=13, kv_lora_rank=160)


def numbered(config: MLAConfig) -> dict[str, Tensor]:
    """Every element of every tensor another number, so that a swap of any two shows."""
    tensors, start = {}, 0
    for name, shape in hf_shapes(config).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + count, dtype=torch.float64).view(shape)
        start += count
    return tensors


def same(a: MLAWeights, b: MLAWeights) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(MLAWeights)]
    return all((x is None and y is None) or torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", CONFIGS)
def test_from_hf_takes_the_right_rows(name: str) -> None:
    config, hf = CONFIGS[name], numbered(CONFIGS[name])
    N, L, P, R, V = config.N, config.L, config.P, config.R, config.V
    weights = MLAWeights.from_hf(hf, config)
    query = hf["q_proj.weight"] if config.Lq is None else hf["q_b_proj.weight"]
    for n in range(N):
        start = n * (P + R)
        assert torch.equal(weights.W_UQ[:, n], query[start : start + P].T)
        assert torch.equal(weights.W_QR[:, n], query[start + P : start + P + R].T)
        start = n * (P + V)
        assert torch.equal(weights.W_UK[:, n], hf["kv_b_proj.weight"][start : start + P].T)
        assert torch.equal(weights.W_UV[:, n], hf["kv_b_proj.weight"][start + P : start + P + V].T)
        assert torch.equal(weights.W_O[n], hf["o_proj.weight"][:, n * V : (n + 1) * V].T)
    assert torch.equal(weights.W_DKV, hf["kv_a_proj_with_mqa.weight"][:L].T)
    assert torch.equal(weights.W_KR, hf["kv_a_proj_with_mqa.weight"][L:].T)
    assert torch.equal(weights.kv_norm, hf["kv_a_layernorm.weight"])
    if config.attention_bias:
        assert weights.b_DKV is not None
        assert weights.b_KR is not None
        assert weights.b_O is not None
        assert torch.equal(torch.cat((weights.b_DKV, weights.b_KR)), hf["kv_a_proj_with_mqa.bias"])
        assert torch.equal(weights.b_O, hf["o_proj.bias"])
    if config.Lq is not None:
        assert weights.W_DQ is not None
        assert weights.q_norm is not None
        assert torch.equal(weights.W_DQ, hf["q_a_proj.weight"].T)
        assert torch.equal(weights.q_norm, hf["q_a_layernorm.weight"])


@pytest.mark.parametrize("name", CONFIGS)
def test_to_hf_is_the_exact_inverse(name: str) -> None:
    config, hf = CONFIGS[name], numbered(CONFIGS[name])
    back = MLAWeights.from_hf({f"a.{k}": v for k, v in hf.items()}, config, "a.").to_hf(config, "b.")
    assert back.keys() == {f"b.{k}" for k in hf}
    assert all(torch.equal(back[f"b.{k}"], v) and back[f"b.{k}"].is_contiguous() for k, v in hf.items())


def test_P6_without_a_query_rank_there_is_no_query_norm() -> None:
    shapes = hf_shapes(preset("deepseek-v2-lite"))
    assert list(shapes) == [
        "q_proj.weight",
        "kv_a_proj_with_mqa.weight",
        "kv_a_layernorm.weight",
        "kv_b_proj.weight",
        "o_proj.weight",
    ]
    assert shapes["q_proj.weight"] == (16 * 192, 2048)
    weights = MLAWeights.random(CONFIGS["direct query"])
    assert weights.W_DQ is weights.q_norm is None
    surplus = weights.to_hf(CONFIGS["direct query"]) | {"q_a_layernorm.weight": torch.ones(20)}
    with pytest.raises(ValueError, match=r"surplus q_a_layernorm\.weight"):
        MLAWeights.from_hf(surplus, CONFIGS["direct query"])


def test_E7_the_shared_rope_key_is_R_wide() -> None:
    shape = hf_shapes(TOY.replace(num_attention_heads=16, qk_rope_head_dim=8))["kv_a_proj_with_mqa.weight"]
    assert shape == (TOY.L + 8, TOY.H)


def test_P11_shapes_of_the_up_projections() -> None:
    up = MLAWeights.random(TOY).up
    assert up.W_UK.shape == (TOY.L, TOY.N, TOY.P)
    assert up.W_UV.shape == (TOY.L, TOY.N, TOY.V)


def test_every_complaint_in_one_error() -> None:
    hf = {f"x.{name}": tensor for name, tensor in MLAWeights.random(TOY).to_hf(TOY).items()}
    del hf["x.o_proj.weight"], hf["x.kv_a_layernorm.weight"]
    hf["x.kv_b_proj.weight"] = torch.zeros(66, 31)
    hf["x.q_a_proj.weight"] = torch.zeros(20, 40, dtype=torch.int8)
    hf["x.indexer.wk.weight"] = torch.zeros(4, 4)
    hf["y.indexer.wk.weight"] = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="state_dict") as error:
        MLAWeights.from_hf(hf, TOY, "x.")
    for complaint in (
        "missing x.o_proj.weight (40, 30)",
        "missing x.kv_a_layernorm.weight (32,)",
        "wrong shape x.kv_b_proj.weight (66, 31) instead of (66, 32)",
        "unreadable dtype torch.int8 of x.q_a_proj.weight",
        "surplus x.indexer.wk.weight (4, 4)",
    ):
        assert complaint in str(error.value)
    assert "y.indexer" not in str(error.value)


def test_random_is_seeded_scaled_and_the_same_in_every_dtype() -> None:
    assert same(MLAWeights.random(TOY, 3), MLAWeights.random(TOY, 3))
    assert not same(MLAWeights.random(TOY, 3), MLAWeights.random(TOY, 4))
    assert same(MLAWeights.random(TOY, 3, torch.bfloat16), MLAWeights.random(TOY, 3).to(torch.bfloat16))
    weights = MLAWeights.random(WIDE)
    # the sample variance of n normal numbers is within 5 sigma = 5 sqrt(2/n) of its mean
    for tensor, fan_in in ((weights.W_UK, WIDE.L), (weights.W_DKV, WIDE.H), (weights.W_O, WIDE.N * WIDE.V)):
        assert abs(tensor.var().item() * fan_in - 1) < 5 * (2 / tensor.numel()) ** 0.5


def test_dtype_is_the_widest_found_unless_given() -> None:
    hf = MLAWeights.random(TOY, dtype=torch.bfloat16).to_hf(TOY)
    assert MLAWeights.from_hf(hf, TOY).W_UK.dtype == torch.bfloat16
    assert MLAWeights.from_hf(hf | {"kv_a_layernorm.weight": torch.ones(32)}, TOY).W_UK.dtype == torch.float32
    assert MLAWeights.from_hf(hf, TOY, dtype=torch.float64).kv_norm.dtype == torch.float64


def write_checkpoint(folder: Path, layers: int, prefix: str = "model.layers.{}.self_attn.") -> list[MLAWeights]:
    """One shard a layer, with an index, and tensors of other modules beside the attention."""
    weight_map: dict[str, str] = {}
    made = []
    for layer in range(layers):
        made.append(MLAWeights.random(TOY, seed=layer))
        tensors = made[-1].to_hf(TOY, prefix.format(layer))
        tensors[prefix.format(layer).replace("self_attn", "mlp") + "up_proj.weight"] = torch.zeros(2, 2)
        save_file(tensors, folder / f"shard-{layer}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"shard-{layer}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return made


def test_load_from_a_sharded_folder_never_opens_other_shards(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path, 12)
    for layer in range(12):
        if layer != 1:
            (tmp_path / f"shard-{layer}.safetensors").unlink()  # so that opening one would raise
    assert same(MLAWeights.load(tmp_path, TOY, layer=1), made[1])
    with pytest.raises(ValueError, match=r"shard-11\.safetensors named by model\.safetensors\.index\.json"):
        MLAWeights.load(tmp_path, TOY, layer=11)


def test_load_from_one_file_reads_only_this_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [MLAWeights.random(TOY, seed=layer) for layer in range(11)]
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": torch.zeros(3, 3)}
    for layer, weights in enumerate(made):
        tensors |= weights.to_hf(TOY, f"model.layers.{layer}.self_attn.")
    save_file(tensors, tmp_path / "model.safetensors")
    read: list[str] = []

    class Counting:
        def __init__(self, *args, **kwargs) -> None:
            self.file = original(*args, **kwargs)

        def __enter__(self) -> "Counting":
            self.file.__enter__()
            return self

        def __exit__(self, *args: object) -> None:
            self.file.__exit__(*args)

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    original = mla.checkpoint.safe_open
    monkeypatch.setattr(mla.checkpoint, "safe_open", Counting)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        read.clear()
        assert same(MLAWeights.load(path, TOY, layer=10), made[10])
        assert sorted(read) == sorted(f"model.layers.10.self_attn.{name}" for name in hf_shapes(TOY))
    read.clear()
    assert same(MLAWeights.load(tmp_path, TOY, layer=99, prefix="model.layers.1.self_attn."), made[1])
    assert len(read) == len(hf_shapes(TOY))


def test_a_layer_that_is_not_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)
    with pytest.raises(ValueError, match=r"layer: .* got 3; layers present: 0 to 2"):
        MLAWeights.load(tmp_path, TOY, layer=3)
    with pytest.raises(ValueError, match="path: expected a safetensors file"):
        MLAWeights.load(tmp_path / "missing", TOY, layer=0)
    with pytest.raises(ValueError, match=r"missing model\.layers\.9\.self_attn\.o_proj\.weight"):
        MLAWeights.load(tmp_path, TOY, layer=0, prefix="model.layers.9.self_attn.")


def test_an_index_that_lies_about_a_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.self_attn.extra"] = "shard-0.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"shard-0\.safetensors.*no model\.layers\.0\.self_attn\.extra"):
        MLAWeights.load(tmp_path, TOY, layer=0)


def test_prefixes_of_released_checkpoints() -> None:
    kv = "kv_b_proj.weight"
    assert find_prefix([f"layers.7.self_attn.{kv}"], 7) == "layers.7.self_attn."
    multimodal = [f"language_model.model.layers.1.self_attn.{kv}", "vision.layers.1.self_attn.q_proj.weight"]
    assert find_prefix(multimodal, 1) == "language_model.model.layers.1.self_attn."
    assert (
        find_prefix([f"mtp_layers.1.self_attn.{kv}", f"model.layers.1.self_attn.{kv}"], 1)
        == "model.layers.1.self_attn."
    )
    longcat = [f"model.layers.{layer}.self_attn.{half}.{kv}" for layer in range(3) for half in range(2)]
    assert find_prefix(longcat, 3) == "model.layers.1.self_attn.1."
    with pytest.raises(ValueError, match=r"a\.layers\.0\.self_attn\., b\.layers\.0\.self_attn\."):
        find_prefix([f"a.layers.0.self_attn.{kv}", f"b.layers.0.self_attn.{kv}"], 0)
    with pytest.raises(ValueError, match="layers present: 0, 2"):
        find_prefix([f"layers.{layer}.self_attn.{kv}" for layer in (0, 2)], 1)
    with pytest.raises(ValueError, match="layers present: none"):
        find_prefix(["lm_head.weight"], 0)


def quantised(config: MLAConfig, scale_name: str, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An fp8 checkpoint of every projection, and what it means, element by element."""
    generator = torch.Generator().manual_seed(seed)
    stored, meant = {}, {}
    for name, tensor in MLAWeights.random(config, seed).to_hf(config).items():
        if tensor.dim() == 1:
            stored[name] = meant[name] = tensor
            continue
        shape = scale_shape(tuple(tensor.shape), (128, 128))
        scale = torch.rand(shape, generator=generator) + 0.5
        stored[name] = (tensor * 16).to(torch.float8_e4m3fn)
        stored[name.replace("weight", scale_name)] = scale
        rows, columns = torch.arange(tensor.shape[0]) // 128, torch.arange(tensor.shape[1]) // 128
        meant[name] = stored[name].float() * scale[rows[:, None], columns[None, :]]
    return stored, meant


@pytest.mark.parametrize("scale_name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("config", [TOY, WIDE], ids=["one partial block", "partial edges on both axes"])
def test_P5_fp8_blocks_with_either_scale_name(scale_name: str, config: MLAConfig) -> None:
    stored, meant = quantised(config, scale_name)
    weights = MLAWeights.from_hf(stored, config)
    assert weights.W_UK.dtype == torch.float32
    assert same(weights, MLAWeights.from_hf(meant, config))
    assert same(MLAWeights.from_hf(stored, config, dtype=torch.bfloat16), weights.to(torch.bfloat16))


def test_P5_missing_scale_lists_both_names() -> None:
    stored, _ = quantised(TOY, "weight_scale")
    del stored["kv_b_proj.weight_scale"]
    with pytest.raises(ValueError, match=r"kv_b_proj\.weight_scale_inv or kv_b_proj\.weight_scale"):
        MLAWeights.from_hf(stored, TOY)


def test_scales_that_do_not_fit() -> None:
    stored, _ = quantised(WIDE, "weight_scale_inv")
    both = stored | {"kv_b_proj.weight_scale": stored["kv_b_proj.weight_scale_inv"]}
    with pytest.raises(ValueError, match="with 2 scales"):
        MLAWeights.from_hf(both, WIDE)
    with pytest.raises(ValueError, match=r"wrong shape kv_b_proj\.weight_scale_inv \(1, 1\) instead of \(3, 2\)"):
        MLAWeights.from_hf(stored | {"kv_b_proj.weight_scale_inv": torch.ones(1, 1)}, WIDE)
    with pytest.raises(ValueError, match=r"wrong shape .* for blocks of \(64, 64\)"):
        MLAWeights.from_hf(stored, WIDE, block=(64, 64))
    with pytest.raises(ValueError, match=r"scale kv_b_proj\.weight_scale_inv beside a weight of torch\.bfloat16"):
        MLAWeights.from_hf(stored | {"kv_b_proj.weight": stored["kv_b_proj.weight"].bfloat16()}, WIDE)
    with pytest.raises(ValueError, match="scale: expected shape"):
        dequantise_blocks(stored["kv_b_proj.weight"], torch.ones(3, 1))


def test_P10_permuting_rows_of_a_dequantised_weight_takes_its_scales_along() -> None:
    stored, meant = quantised(WIDE, "weight_scale_inv")
    order = torch.randperm(286, generator=torch.Generator().manual_seed(0))
    dense = dequantise_blocks(stored["kv_b_proj.weight"], stored["kv_b_proj.weight_scale_inv"])
    assert torch.equal(dense[order], meant["kv_b_proj.weight"][order])
    permuted = stored["kv_b_proj.weight"].view(torch.uint8)[order].view(torch.float8_e4m3fn)
    garbage = dequantise_blocks(permuted, stored["kv_b_proj.weight_scale_inv"])
    assert not torch.equal(garbage, dense[order])


def test_fp8_checkpoint_from_disk(tmp_path: Path) -> None:
    stored, meant = quantised(WIDE, "weight_scale_inv")
    save_file({f"model.layers.0.self_attn.{k}": v for k, v in stored.items()}, tmp_path / "model.safetensors")
    assert same(MLAWeights.load(tmp_path, WIDE, layer=0), MLAWeights.from_hf(meant, WIDE))


def test_P1_a_layer_of_another_format_through_the_identity() -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-8, 8, (66, 32), generator=generator)  # int4, one scale and zero point a group of 8
    scale, zero = torch.rand(66, 4, generator=generator), torch.rand(66, 4, generator=generator)
    dense = codes * scale.repeat_interleave(8, 1) + zero.repeat_interleave(8, 1)
    bias = torch.randn(66, generator=generator)
    assert torch.equal(read_linear(lambda x: x @ dense.T, 32), dense)
    # taking the bias off costs one rounding of the sum
    found = read_linear(lambda x: x @ dense.T + bias, 32)
    assert torch.all((found - dense).abs() <= 2 * 2**-24 * ((dense + bias[:, None]).abs() + dense.abs()))
    hf = MLAWeights.random(TOY).to_hf(TOY) | {"kv_b_proj.weight": read_linear(lambda x: x @ dense.T, 32)}
    assert torch.equal(MLAWeights.from_hf(hf, TOY).W_UV[:, 1], dense[22 + 12 : 44].T)


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_hold_their_heads_and_sum_to_the_whole(name: str) -> None:
    config = CONFIGS[name].replace(num_attention_heads=6)
    weights = MLAWeights.random(config, dtype=torch.float64)
    shards = [weights.shard(rank, 3) for rank in range(3)]
    assert all(torch.equal(shard.W_UK, weights.W_UK[:, 2 * r : 2 * r + 2]) for r, shard in enumerate(shards))
    assert all(torch.equal(shard.W_DKV, weights.W_DKV) for shard in shards)
    assert torch.equal(torch.cat([shard.W_QR for shard in shards], 1), weights.W_QR)
    assert torch.equal(torch.cat([shard.W_O for shard in shards]), weights.W_O)
    out = torch.randn(5, 6, config.V, dtype=torch.float64)
    parts = sum(project_output(out[:, 2 * r : 2 * r + 2], shard) for r, shard in enumerate(shards))
    assert torch.allclose(parts, project_output(out, weights), rtol=0, atol=64 * 2**-53 * 4)  # type: ignore[arg-type]


def test_shard_errors() -> None:
    weights = MLAWeights.random(TOY)
    for rank, world, name in ((0, 2, "world"), (0, 0, "world"), (3, 3, "rank"), (-1, 3, "rank")):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            weights.shard(rank, world)


def test_to_moves_everything() -> None:
    weights = MLAWeights.random(CONFIGS["biases"]).to(torch.float16).to("meta")
    tensors = [getattr(weights, field.name) for field in dataclasses.fields(weights)]
    assert {(tensor.dtype, tensor.device.type) for tensor in tensors} == {(torch.float16, "meta")}


def test_weights_made_by_hand_are_checked() -> None:
    weights = MLAWeights.random(CONFIGS["biases"])
    for name, tensor in (
        ("W_UV", torch.zeros(31, 3, 10)),
        ("W_UQ", torch.zeros(40, 3, 12)),
        ("W_O", torch.zeros(3, 40, 10)),
        ("b_KR", torch.zeros(9)),
        ("kv_norm", torch.zeros(32, 1)),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected shape"):
            dataclasses.replace(weights, **{name: tensor})
    with pytest.raises(ValueError, match=r"W_UK: expected \(L, N, P\), got \(32, 36\)"):
        dataclasses.replace(weights, W_UK=weights.W_UK.flatten(1))
    with pytest.raises(TypeError, match=r"W_O: expected W_UK's torch\.float32"):
        dataclasses.replace(weights, W_O=weights.W_O.double())
    with pytest.raises(ValueError, match="b_DKV and b_KR: expected both or neither"):
        dataclasses.replace(weights, b_KR=None)


INDEX = "model.safetensors.index.json"
NAMES = [f"model.layers.0.self_attn.{name}" for name in hf_shapes(TOY)]
DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "garbage": ("model.safetensors", lambda whole: b"hello, this is no checkpoint"),
    "truncated": ("model.safetensors", lambda whole: whole[:-100]),
    "empty": ("model.safetensors", lambda whole: b""),
    "index no JSON": (INDEX, lambda whole: b"{"),
    "index not UTF-8": (INDEX, lambda whole: b"\xff"),
    "index without a map": (INDEX, lambda whole: b"{}"),
    "index with a list": (INDEX, lambda whole: b'{"weight_map": [1]}'),
    "index is a list": (INDEX, lambda whole: b"[]"),
    "index names 3": (INDEX, lambda whole: json.dumps({"weight_map": dict.fromkeys(NAMES, 3)}).encode()),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_checkpoints_are_named(damage: str, tmp_path: Path) -> None:
    whole = tmp_path / "model.safetensors"
    save_file(MLAWeights.random(TOY).to_hf(TOY, "model.layers.0.self_attn."), whole)
    MLAWeights.load(tmp_path, TOY, layer=0)
    file, break_it = DAMAGED[damage]
    (tmp_path / file).write_bytes(break_it(whole.read_bytes()))
    with pytest.raises(ValueError, match=rf"^path: expected .*{file}.* Fix: download it again\.") as error:
        MLAWeights.load(tmp_path, TOY, layer=0)
    assert error.type is ValueError


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, "g.safetensors")}))
    (tmp_path / "g.safetensors").write_bytes(b"xx")
    with pytest.raises(ValueError, match=r"^path: expected .*g\.safetensors.* Fix: download it again\."):
        MLAWeights.load(tmp_path, TOY, layer=0)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, "float32"]
)
def test_only_float_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = MLAWeights.random(TOY)
    save_file(weights.to_hf(TOY, "model.layers.0.self_attn."), tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match=r"^dtype: expected a torch float dtype.* Fix: "):
        MLAWeights.load(tmp_path, TOY, layer=0, dtype=dtype)
    with pytest.raises(TypeError, match=r"^dtype: expected a torch float dtype.* Fix: "):
        MLAWeights.from_hf(weights.to_hf(TOY), TOY, dtype=dtype)
    with pytest.raises(TypeError, match=r"^(dtype|target): expected a torch float dtype.* Fix: "):
        weights.to(dtype)


HF = MLAWeights.random(TOY).to_hf(TOY)
NUMPY: dict[str, Any] = {name: tensor.numpy() for name, tensor in HF.items()}
NORM8 = {"kv_a_layernorm.weight": HF["kv_a_layernorm.weight"].to(torch.float8_e4m3fn)}
KV_B8 = {"kv_b_proj.weight": HF["kv_b_proj.weight"].to(torch.float8_e4m3fn)}
MISUSES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "None": (lambda: MLAWeights.from_hf(None, TOY), TypeError, "state_dict"),  # type: ignore[arg-type]
    "ints": (lambda: MLAWeights.from_hf(HF | {"o_proj.weight": 1}, TOY), TypeError, "state_dict.*o_proj.weight int"),  # type: ignore[arg-type]
    "numpy": (lambda: MLAWeights.from_hf(NUMPY, TOY), TypeError, "state_dict.*o_proj.weight ndarray"),
    "config": (lambda: MLAWeights.from_hf(HF, {}), TypeError, "config"),  # type: ignore[arg-type]
    "block 0": (lambda: MLAWeights.from_hf(HF, TOY, block=(0, 128)), ValueError, "block"),
    "block of three": (lambda: MLAWeights.from_hf(HF, TOY, block=(1, 1, 1)), ValueError, "block"),  # type: ignore[arg-type]
    "block 128": (lambda: MLAWeights.from_hf(HF, TOY, block=128), TypeError, "block"),  # type: ignore[arg-type]
    "fp8 norm": (
        lambda: MLAWeights.from_hf(HF | NORM8 | {"kv_a_layernorm.weight_scale": torch.ones(1)}, TOY),
        ValueError,
        "state_dict.*kv_a_layernorm.weight",
    ),
    "int scale": (
        lambda: MLAWeights.from_hf(HF | KV_B8 | {"kv_b_proj.weight_scale_inv": torch.ones(1, 1).byte()}, TOY),
        ValueError,
        "state_dict.*kv_b_proj.weight_scale_inv",
    ),
    "1-d weight": (lambda: dequantise_blocks(NORM8["kv_a_layernorm.weight"], torch.ones(1)), ValueError, "weight"),
    "rank 0.0": (lambda: MLAWeights.random(TOY).shard(0.0, 3), TypeError, "rank"),  # type: ignore[arg-type]
    "rank True": (lambda: MLAWeights.random(TOY).shard(True, 3), TypeError, "rank"),
    "world 3.0": (lambda: MLAWeights.random(TOY).shard(0, 3.0), TypeError, "world"),  # type: ignore[arg-type]
    "path": (lambda: MLAWeights.load(None, TOY, 0), TypeError, "path"),  # type: ignore[arg-type]
    "layer": (lambda: find_prefix(NAMES, 0.0), TypeError, "layer"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_names_the_argument(misuse: str) -> None:
    call, kind, name = MISUSES[misuse]
    with pytest.raises(kind, match=rf"^{name}.* Fix: ") as error:
        call()
    assert error.type is kind


def test_a_seed_that_is_no_int_and_weights_that_are_no_floats_are_named() -> None:
    with pytest.raises(TypeError, match=r"^seed: expected an int, got 'a'"):
        MLAWeights.random(TOY, seed="a")  # type: ignore[arg-type]
    held = vars(MLAWeights.random(TOY))
    with pytest.raises(TypeError, match=r"^W_UK: expected one of .*got torch\.int32"):
        MLAWeights(**{name: None if x is None else x.int() for name, x in held.items()})


def test_an_index_that_leaves_its_folder_is_refused(tmp_path) -> None:
    index = {"weight_map": {"model.layers.0.self_attn.o_proj.weight": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"^path: expected shards in the folder of the index, got '\.\./other"):
        MLAWeights.load(tmp_path, TOY, layer=0)
