"""One attention layer's tensors out of a safetensors file or a sharded checkpoint folder, dequantised.

Axes: T new tokens (packed over requests), S cached tokens, B requests, N heads, H hidden, Lq query rank, L KV rank,
P nope, R rope, V value. `O, I` below are any matrix's output and input width.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mla.errors import bad

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FP8 = tuple(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz") if hasattr(torch, name)
)
SCALE_NAMES = ("weight_scale_inv", "weight_scale")


def tensor_files(path: "str | PathLike[str]") -> dict[str, Path]:
    """Return which file holds each tensor of a checkpoint, without reading any tensor.

    `path` is a safetensors file, or a folder with model.safetensors.index.json or model.safetensors. Raises ValueError
    when it is neither or is damaged, TypeError when it is no path.
    """
    if not isinstance(path, (str, PathLike)):
        raise bad("path", expected="a path", got=repr(path), fix="pass the checkpoint's folder", kind=TypeError)
    path = Path(path)
    if path.is_dir() and (path / INDEX).is_file():
        return {name: path / file for name, file in _weight_map(path / INDEX).items()}
    file = path / SINGLE if path.is_dir() else path
    if not file.is_file():
        expected = f"a safetensors file, or a folder with {INDEX} or {SINGLE}"
        raise bad("path", expected=expected, got=repr(str(path)), fix="check the path")
    with _opened(file) as shard:
        return dict.fromkeys(shard.keys(), file)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise bad("path", expected="JSON", got=f"{index}: {error}", fix="download it again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        expected = "a weight_map from tensor names to file names"
        raise bad("path", expected=expected, got=f"{index} without one", fix="download it again")
    for file in weight_map.values():
        if Path(file).name != file:
            expected = "shards in the folder of the index"
            raise bad("path", expected=expected, got=f"{file!r} in {index}", fix="keep the shards beside it")
    return weight_map


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except SafetensorError as error:
        got = f"{file}: {error}"
        raise bad("path", expected="a whole safetensors file", got=got, fix="download it again") from error


def read_tensors(files: Mapping[str, Path], prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose name starts with `prefix`, (O, I) as stored, on the CPU; only their files are opened.

    `files` comes from `tensor_files`. Raises ValueError naming a shard that is not there, is damaged or lacks a tensor.
    """
    wanted: dict[Path, list[str]] = {}
    for name, file in files.items():
        if name.startswith(prefix):
            wanted.setdefault(file, []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, names in wanted.items():
        if not file.is_file():
            raise bad("path", expected=f"the shard {file.name} named by {INDEX}", got="no such file", fix="download it")
        with _opened(file) as shard:
            absent = sorted(set(names) - set(shard.keys()))
            if absent:
                got = f"no {', '.join(absent)} in it"
                raise bad("path", expected=f"shard {file.name} as {INDEX} says", got=got, fix="download both again")
            tensors |= {name: shard.get_tensor(name) for name in names}
    return tensors


def find_prefix(names: Iterable[str], layer: int) -> str:
    """Return the one prefix under which `names` hold MLA weights of `layer`, such as "model.layers.3.self_attn.".

    Models with two attentions a layer ("layers.1.self_attn.0.") count them as layers 2, 3 and so on. Raises ValueError
    that lists the layers present, or the candidates when there are several; TypeError when `layer` is no int.
    """
    check_int("layer", layer)
    here, present = set(), set()
    for name in names:
        found = re.match(r"(.*?\blayers\.(\d+)\.self_attn\.(?:([01])\.)?)kv_\w+\.", "." + name)
        if found is None:
            continue
        prefix, number, half = found[1][1:], int(found[2]), found[3]
        number = number if half is None else 2 * number + int(half)
        present.add(number)
        if number == layer:
            here.add(prefix)
    if not here:
        got = f"{layer}; layers present: {_ranges(present)}"
        raise bad("layer", expected="a layer with MLA weights", got=got, fix="choose one of these, or pass prefix=")
    if len(here) > 1:
        raise bad("prefix", expected="one candidate", got=", ".join(sorted(here)), fix="pass prefix= to choose")
    return here.pop()


def _ranges(numbers: set[int]) -> str:
    if not numbers:
        return "none"
    complete = len(numbers) == max(numbers) - min(numbers) + 1
    return f"{min(numbers)} to {max(numbers)}" if complete else ", ".join(map(str, sorted(numbers)))


def tensors_under(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors, (O, I) or (O,) as stored, whose name starts with `prefix`, under the rest of their name.

    Raises TypeError when `state_dict` is no mapping or holds something else than tensors there.
    """
    if not isinstance(state_dict, Mapping):
        got = type(state_dict).__name__
        raise bad("state_dict", expected="a dict of tensors", got=got, fix="see MLAWeights.load", kind=TypeError)
    here = {name: tensor for name, tensor in state_dict.items() if str(name).startswith(prefix)}
    others = [f"{name} {type(value).__name__}" for name, value in here.items() if not isinstance(value, Tensor)]
    if others:
        got, fix = ", ".join(others), "convert them, as with torch.from_numpy"
        raise bad("state_dict", expected="torch tensors", got=got, fix=fix, kind=TypeError)
    return {str(name)[len(prefix) :]: tensor for name, tensor in here.items()}


def check_int(name: str, value: int) -> None:
    """Raise TypeError naming the argument `name` unless `value` is an int and no bool."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad(name, expected="an int", got=repr(value), fix=f"pass {name} as an int", kind=TypeError)


def check_target(target: "torch.dtype | torch.device | str") -> None:
    """Raise TypeError unless `target` is a float dtype as in `check_float`, or names a device."""
    if isinstance(target, torch.dtype):
        check_float("dtype", target)
        return
    try:
        torch.device(target)
    except (RuntimeError, TypeError) as error:
        expected, fix = "a torch float dtype or a device", "pass torch.float32 or 'cpu'"
        raise bad("target", expected=expected, got=repr(target), fix=fix, kind=TypeError) from error


def check_float(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError naming the argument `name` unless `dtype` is a torch float dtype of at least 16 bits."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        expected = "a torch float dtype of at least 16 bits"
        raise bad(name, expected=expected, got=repr(dtype), fix=f"pass {name}=torch.float32", kind=TypeError)


def check_block(block: tuple[int, int]) -> None:
    """Raise ValueError, or TypeError for other types, unless `block` is two positive ints, rows and columns."""
    fix = "pass the checkpoint's weight_block_size, such as (128, 128)"
    if not isinstance(block, (tuple, list)) or any(isinstance(e, bool) or not isinstance(e, int) for e in block):
        raise bad("block", expected="two positive ints", got=repr(block), fix=fix, kind=TypeError)
    if len(block) != 2 or min(block) < 1:
        raise bad("block", expected="two positive ints", got=repr(block), fix=fix)


def scale_names(weight: str, present: Mapping[str, Tensor] | None = None) -> list[str]:
    """Return the names a checkpoint may give the block scales of the tensor (O, I) called `weight`.

    With `present`, only the names found there; none for a bias.
    """
    if not weight.endswith(".weight"):
        return []
    names = [weight.removesuffix("weight") + scale for scale in SCALE_NAMES]
    return names if present is None else [name for name in names if name in present]


def scale_shape(weight_shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return (ceil(O / block[0]), ceil(I / block[1])), one scale for each full or partial block of a weight (O, I).

    Raises ValueError when the weight is not a matrix or `block` not two positive ints.
    """
    check_block(block)
    if len(weight_shape) != 2:
        raise bad("weight", expected="a matrix (O, I)", got=f"{tuple(weight_shape)}", fix="only matrices have blocks")
    return tuple(-(-size // edge) for size, edge in zip(weight_shape, block, strict=True))


def dequantise_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Return `weight * scale` of the block each element lies in; edge blocks may be partial.

    weight (O, I) fp8, scale (ceil(O / block[0]), ceil(I / block[1])) of any float dtype; result (O, I) float32, to be
    sliced or permuted only afterwards, since blocks straddle heads. Raises ValueError when the shapes disagree.
    Source: DeepSeek-V3 (arXiv 2412.19437) section 3.3.2.
    """
    wanted = scale_shape(weight.shape, block)
    if scale.shape != wanted:
        raise bad(
            "scale",
            expected=f"shape {wanted} for a weight {tuple(weight.shape)} in blocks of {block}",
            got=f"{tuple(scale.shape)}",
            fix="pass the checkpoint's weight_block_size as block=, or read_linear for other schemes",
        )
    per_row = scale.to(torch.float32).repeat_interleave(block[0], 0)[: weight.shape[0]]
    return weight.to(torch.float32) * per_row.repeat_interleave(block[1], 1)[:, : weight.shape[1]]


def read_linear(layer: Callable[[Tensor], Tensor], in_features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the dense weight (O, I) of any linear layer, by pushing an identity through it.

    For quantised layers whose format this package does not read: `layer` maps (I, I) to (I, O) in `dtype`, and a bias
    is taken off. Put the result into the state dict given to `MLAWeights.from_hf`.
    """
    rows = layer(torch.eye(in_features, dtype=dtype))
    return (rows - layer(torch.zeros(1, in_features, dtype=dtype))).T.contiguous()
