"""One layer's weights as the paper's matrices, from and to the Hugging Face tensors.

Axes: T new tokens (packed over requests), S cached tokens, B requests, N heads, H hidden, Lq query rank, L KV rank,
P nope, R rope, V value.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor

from mla.cache import FLOAT_DTYPES
from mla.checkpoint import (
    FP8,
    check_block,
    check_float,
    check_int,
    check_target,
    dequantise_blocks,
    find_prefix,
    read_tensors,
    scale_names,
    scale_shape,
    tensor_files,
    tensors_under,
)
from mla.config import MLAConfig
from mla.errors import bad
from mla.projections import UpProjection

HEAD_AXIS = {"W_UQ": 1, "W_QR": 1, "W_UK": 1, "W_UV": 1, "W_O": 0}


@dataclass(frozen=True, eq=False)
class MLAWeights:
    """The paper's matrices, input axis first: `h @ W_DKV` and `einsum("sl,lnp->snp", kv_c, W_UK)` read as written.

    Shapes: W_DQ (H, Lq), q_norm (Lq,), W_UQ (Lq, N, P), W_QR (Lq, N, R), W_DKV (H, L), W_KR (H, R), kv_norm (L,),
    W_UK (L, N, P), W_UV (L, N, V), W_O (N, V, H). With q_lora_rank None, W_DQ and q_norm are None and W_UQ, W_QR start
    with H. Biases of `attention_bias` models, else None: b_DQ (Lq,), b_DKV (L,), b_KR (R,), b_O (H,). All one float
    dtype. Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1 and appendix C.
    """

    W_DQ: Tensor | None
    q_norm: Tensor | None
    W_UQ: Tensor
    W_QR: Tensor
    W_DKV: Tensor
    W_KR: Tensor
    kv_norm: Tensor
    W_UK: Tensor
    W_UV: Tensor
    W_O: Tensor
    b_DQ: Tensor | None = None
    b_DKV: Tensor | None = None
    b_KR: Tensor | None = None
    b_O: Tensor | None = None

    def __post_init__(self) -> None:
        for name, axes in (("W_UK", "(L, N, P)"), ("W_UV", "(L, N, V)"), ("W_KR", "(H, R)")):
            if getattr(self, name).dim() != axes.count(",") + 1:
                raise bad(name, expected=axes, got=f"{tuple(getattr(self, name).shape)}", fix="see MLAWeights")
        (L, N, P), V = self.W_UK.shape, self.W_UV.shape[-1]
        H, R = self.W_KR.shape
        Q = H if self.W_DQ is None else self.W_DQ.shape[-1]
        shapes: dict[str, tuple[int, ...]] = {"W_DQ": (H, Q), "q_norm": (Q,), "W_UQ": (Q, N, P), "W_QR": (Q, N, R)}
        shapes |= {"W_DKV": (H, L), "W_KR": (H, R), "kv_norm": (L,), "W_UK": (L, N, P), "W_UV": (L, N, V)}
        shapes |= {"W_O": (N, V, H), "b_DQ": (Q,), "b_DKV": (L,), "b_KR": (R,), "b_O": (H,)}
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                wanted, got = f"shape {shape} beside W_UK, W_UV, W_KR and W_DQ", f"{tuple(tensor.shape)}"
                raise bad(name, expected=wanted, got=got, fix="see MLAWeights")
            if tensor is not None and (tensor.dtype != self.W_UK.dtype or tensor.device != self.W_UK.device):
                wanted, got = f"W_UK's {self.W_UK.dtype} on {self.W_UK.device}", f"{tensor.dtype} on {tensor.device}"
                raise bad(name, expected=wanted, got=got, fix="convert it", kind=TypeError)
        if self.W_UK.dtype not in FLOAT_DTYPES:
            got, fix = str(self.W_UK.dtype), "dequantise the weights first"
            raise bad("W_UK", expected=f"one of {FLOAT_DTYPES}", got=got, fix=fix, kind=TypeError)
        for pair in (("W_DQ", "q_norm"), ("b_DKV", "b_KR")):
            if (getattr(self, pair[0]) is None) != (getattr(self, pair[1]) is None):
                raise bad(" and ".join(pair), expected="both or neither", got="one", fix="pass the other too")

    @property
    def up(self) -> UpProjection:
        """The pair W_UK (L, N, P), W_UV (L, N, V) that tiers take."""
        return UpProjection(self.W_UK, self.W_UV)

    @classmethod
    def random(cls, config: MLAConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Self:
        """Draw weights N(0, 1 / fan-in), so that unit-variance hidden states (T, H) keep activations near 1.

        Norm weights are drawn from [0.5, 1.5) and biases from N(0, 0.1^2), so that a forgotten one shows. Drawn in
        float32 from `seed`, then rounded to `dtype`: the same seed gives the same model in every dtype.
        """
        check_int("seed", seed)
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in hf_shapes(config).items():
            if name.endswith("layernorm.weight"):
                tensors[name] = torch.rand(shape, generator=generator) + 0.5
            elif name.endswith("bias"):
                tensors[name] = torch.randn(shape, generator=generator) * 0.1
            else:
                tensors[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        return cls.from_hf(tensors, config, dtype=dtype)

    @classmethod
    def from_hf(
        cls,
        state_dict: Mapping[str, Tensor],
        config: MLAConfig,
        prefix: str = "",
        dtype: torch.dtype | None = None,
        block: tuple[int, int] = (128, 128),
    ) -> Self:
        """Take the tensors under `prefix` ("model.layers.0.self_attn.") apart into W_UK (L, N, P) and the others.

        Linear weights are (out, in): q_b_proj and kv_b_proj hold per head [P, R] and [P, V] rows, kv_a_proj_with_mqa
        [L, R] rows, o_proj (H, N V). fp8 weights with block scales named weight_scale_inv or weight_scale become
        float32 whole, before any slicing. `dtype` None keeps the widest dtype found. Raises one ValueError that lists
        every missing, surplus, wrongly shaped or unreadable tensor by name, and TypeError naming an argument.
        """
        if dtype is not None:
            check_float("dtype", dtype)
        check_block(block)
        if not isinstance(config, MLAConfig):
            raise bad("config", expected="an MLAConfig", got=repr(config), fix="see MLAConfig.from_hf", kind=TypeError)
        dense = _dense_tensors(tensors_under(state_dict, prefix), config, prefix, block)
        if dtype is None:
            dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in dense.values()))
        parts = _split({name: tensor.to(dtype) for name, tensor in dense.items()}, config)
        return cls(**parts)

    def to_hf(self, config: MLAConfig, prefix: str = "") -> dict[str, Tensor]:
        """Return the Hugging Face tensors, q_a_proj (Lq, H) and so on: the exact inverse of `from_hf`."""
        queries = torch.cat((self.W_UQ, self.W_QR), -1).permute(1, 2, 0).flatten(0, 1)  # (N (P+R), Lq or H)
        ups = torch.cat((self.W_UK, self.W_UV), -1).permute(1, 2, 0).flatten(0, 1)  # (N (P+V), L)
        tensors = {
            "kv_a_proj_with_mqa.weight": torch.cat((self.W_DKV, self.W_KR), -1).T,
            "kv_a_layernorm.weight": self.kv_norm,
            "kv_b_proj.weight": ups,
            "o_proj.weight": self.W_O.flatten(0, 1).T,
        }
        if self.W_DQ is None or self.q_norm is None:
            tensors["q_proj.weight"] = queries
        else:
            tensors |= {"q_a_proj.weight": self.W_DQ.T, "q_a_layernorm.weight": self.q_norm, "q_b_proj.weight": queries}
        if self.b_DQ is not None:
            tensors["q_a_proj.bias"] = self.b_DQ
        if self.b_DKV is not None and self.b_KR is not None:
            tensors["kv_a_proj_with_mqa.bias"] = torch.cat((self.b_DKV, self.b_KR))
        if self.b_O is not None:
            tensors["o_proj.bias"] = self.b_O
        return {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}

    @classmethod
    def load(
        cls,
        path: "str | PathLike[str]",
        config: MLAConfig,
        layer: int,
        dtype: torch.dtype | None = None,
        prefix: str | None = None,
        block: tuple[int, int] = (128, 128),
    ) -> Self:
        """Load one layer from a safetensors file or checkpoint folder without reading any other tensor.

        `path` is a safetensors file, or a folder with model.safetensors.index.json or model.safetensors; `layer` counts
        from 0 and gives the prefix unless `prefix` does. Matrices such as W_UK (L, N, P), `dtype`, `block` and errors
        are those of `from_hf`; ValueError too for a missing file, layer or shard.
        """
        files = tensor_files(path)
        prefix = find_prefix(files, layer) if prefix is None else prefix
        return cls.from_hf(read_tensors(files, prefix), config, prefix, dtype, block)

    def shard(self, rank: int, world: int) -> Self:
        """Return the heads of tensor-parallel `rank` of `world`: heads `rank N/world` up to `(rank + 1) N/world`.

        W_UQ, W_QR, W_UK, W_UV and W_O keep N/world heads (views), the rest is replicated. The ranks' `project_output`
        sum to the whole, so only rank 0 keeps b_O. Raises ValueError when N is not a multiple of world,
        TypeError for no int.
        """
        check_int("rank", rank)
        check_int("world", world)
        N = self.W_UK.shape[1]
        if world < 1 or N % world:
            raise bad("world", expected=f"a divisor of the {N} heads", got=repr(world), fix="use fewer or more ranks")
        if not 0 <= rank < world:
            raise bad("rank", expected=f"0 <= rank < {world}", got=repr(rank), fix="ranks count from 0")
        size = N // world
        heads = {name: getattr(self, name).narrow(axis, rank * size, size) for name, axis in HEAD_AXIS.items()}
        return dataclasses.replace(self, **heads, b_O=self.b_O if rank == 0 else None)

    def to(self, target: "torch.dtype | torch.device | str") -> Self:
        """Return the weights in another dtype or on another device; W_UK stays (L, N, P) and so on.

        Raises TypeError unless `target` is a torch float dtype or a device.
        """
        check_target(target)
        moved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{k: v.to(target) for k, v in moved.items() if v is not None})


def hf_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Return the Hugging Face tensors of one attention layer and their shapes, such as kv_b_proj.weight (N (P+V), L).

    Only q_a_proj, kv_a_proj_with_mqa and o_proj have a bias, and only with `attention_bias`.
    """
    H, N, L, P, R, V = config.H, config.N, config.L, config.P, config.R, config.V
    shapes: dict[str, tuple[int, ...]] = {}
    if config.Lq is None:
        shapes["q_proj.weight"] = (N * (P + R), H)
    else:
        shapes["q_a_proj.weight"] = (config.Lq, H)
        shapes["q_a_layernorm.weight"] = (config.Lq,)
        shapes["q_b_proj.weight"] = (N * (P + R), config.Lq)
    shapes["kv_a_proj_with_mqa.weight"] = (L + R, H)
    shapes["kv_a_layernorm.weight"] = (L,)
    shapes["kv_b_proj.weight"] = (N * (P + V), L)
    shapes["o_proj.weight"] = (H, N * V)
    if config.attention_bias:
        for layer in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            if f"{layer}.weight" in shapes:
                shapes[f"{layer}.bias"] = shapes[f"{layer}.weight"][:1]
    return shapes


def _split(dense: Mapping[str, Tensor], config: MLAConfig) -> dict[str, Any]:
    N, P, R, V = config.N, config.P, config.R, config.V
    query = dense["q_proj.weight" if config.Lq is None else "q_b_proj.weight"]
    W_UQ, W_QR = query.reshape(N, P + R, -1).permute(2, 0, 1).split((P, R), -1)
    W_UK, W_UV = dense["kv_b_proj.weight"].reshape(N, P + V, -1).permute(2, 0, 1).split((P, V), -1)
    W_DKV, W_KR = dense["kv_a_proj_with_mqa.weight"].T.split((config.L, R), -1)
    parts = {
        "W_DQ": dense["q_a_proj.weight"].T if config.Lq else None,
        "q_norm": dense.get("q_a_layernorm.weight"),
        "W_UQ": W_UQ,
        "W_QR": W_QR,
        "W_DKV": W_DKV,
        "W_KR": W_KR,
        "kv_norm": dense["kv_a_layernorm.weight"],
        "W_UK": W_UK,
        "W_UV": W_UV,
        "W_O": dense["o_proj.weight"].T.unflatten(0, (N, V)),
        "b_DQ": dense.get("q_a_proj.bias"),
        "b_O": dense.get("o_proj.bias"),
    }
    if config.attention_bias:
        parts["b_DKV"], parts["b_KR"] = dense["kv_a_proj_with_mqa.bias"].split((config.L, R))
    return {name: None if part is None else part.contiguous() for name, part in parts.items()}


def _dense_tensors(
    short: Mapping[str, Tensor], config: MLAConfig, prefix: str, block: tuple[int, int]
) -> dict[str, Tensor]:
    """Return every expected tensor dequantised, or raise one error with every complaint."""
    shapes = hf_shapes(config)
    scales = {name: scale_names(name, short) for name in shapes}
    known = set(shapes).union(*scales.values())
    complaints = [f"surplus {prefix}{name} {tuple(short[name].shape)}" for name in short if name not in known]
    dense: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = short.get(name)
        if tensor is None:
            complaints.append(f"missing {prefix}{name} {shape}")
        elif tensor.shape != shape:
            complaints.append(f"wrong shape {prefix}{name} {tuple(tensor.shape)} instead of {shape}")
        elif tensor.dtype not in FP8:
            complaints += [f"scale {prefix}{scale} beside a weight of {tensor.dtype}" for scale in scales[name]]
            if not tensor.is_floating_point():
                complaints.append(f"unreadable dtype {tensor.dtype} of {prefix}{name}")
            dense[name] = tensor
        elif len(shape) != 2:
            complaints.append(f"unreadable dtype {tensor.dtype} of {prefix}{name}, which is no matrix")
        elif len(scales[name]) != 1:
            wanted = " or ".join(prefix + scale for scale in scale_names(name))
            complaints.append(f"fp8 {prefix}{name} with {len(scales[name])} scales instead of one of {wanted}")
        elif short[scales[name][0]].shape != scale_shape(shape, block):
            got, expected = tuple(short[scales[name][0]].shape), scale_shape(shape, block)
            complaints.append(
                f"wrong shape {prefix}{scales[name][0]} {got} instead of {expected} for blocks of {block}"
            )
        elif not short[scales[name][0]].is_floating_point():
            complaints.append(f"unreadable dtype {short[scales[name][0]].dtype} of {prefix}{scales[name][0]}")
        else:
            dense[name] = dequantise_blocks(tensor, short[scales[name][0]], block)
    if complaints:
        raise bad(
            "state_dict",
            expected=f"the {len(shapes)} tensors of one MLA layer of {config.name!r} under prefix {prefix!r}",
            got="; ".join(complaints),
            fix="check config and prefix; turn other quantised layers dense with mla.checkpoint.read_linear",
        )
    return dense
