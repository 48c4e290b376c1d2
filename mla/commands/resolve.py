"""From the words of a user to objects: the model, the layout, the Need, the requests and the machine that they name.

Axes: N heads, L KV rank, P nope, R rope, V value.
"""

import ast
import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mla.batch import parse_batch
from mla.cache import FloatRows
from mla.config import MLAConfig
from mla.conformance.cases import DTYPES, Case, Dims
from mla.conformance.specs import SPECS, spec
from mla.errors import bad
from mla.need import Capacity, Need
from mla.presets import preset
from mla.roofline import GPUS, Gpu, find_gpu
from mla.serving.replay import ReplaySpec
from mla.serving.traces import SMALL_TRACE, Request, read_trace
from mla.settings import RunSettings
from mla.tune import FormCosts, FormTable

# The fields of Need that follow from model and settings; the others may be asked for.
GIVEN = ("N", "L", "P", "R", "V", "softmax_scale", "layout", "page_size", "dtype", "device", "capacity", "out_dtype")


def model_of(settings: RunSettings) -> MLAConfig:
    """Return the config that `model` and `heads` name: a preset, a config.json or its folder."""
    is_path = settings.model.endswith(".json") or Path(settings.model).exists()
    config = MLAConfig.from_hf(settings.model) if is_path else preset(settings.model)
    return config if settings.heads is None else config.replace(num_attention_heads=settings.heads)


def dtype_of(settings: RunSettings) -> torch.dtype:
    """Return the dtype of weights, queries and outputs."""
    return getattr(torch, settings.dtype)


def layout_of(settings: RunSettings, config: MLAConfig) -> FloatRows:
    """Return the layout of the cached rows."""
    return FloatRows(config.L, config.R, getattr(torch, settings.cache_dtype or settings.dtype))


def device_of(settings: RunSettings) -> str:
    """Return the device if torch can use it on this machine, else raise ValueError."""
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError) as error:
        got = f"{settings.device!r} ({str(error).splitlines()[0].rstrip('.')})"
        raise bad("device", expected="a device of this machine", got=got, fix="use --device cpu") from None
    return settings.device


def need_of(settings: RunSettings, config: MLAConfig, asked: Mapping[str, Any]) -> Need:
    """Return what a layer of the model asks of a tier under these settings, `asked` included."""
    longest = settings.max_model_len or config.max_position_embeddings
    capacity = Capacity(settings.max_running, settings.token_budget, settings.token_budget, longest)
    return Need(
        N=config.N, L=config.L, P=config.P, R=config.R, V=config.V, softmax_scale=config.softmax_scale,
        layout=layout_of(settings, config), page_size=settings.page_size, dtype=dtype_of(settings),
        device=device_of(settings), capacity=capacity, **{"lse": True, **asked},
    )  # fmt: skip


def asked_of(words: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE of fields of Need, such as window=4096, graph_capture=true; raises ValueError for other names."""
    known = [field.name for field in dataclasses.fields(Need) if field.name not in GIVEN]
    asked = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in known or not equals:
            near = difflib.get_close_matches(name, known, 1)
            fix = f"write {near[0]}=VALUE" if near else f"use one of {', '.join(known)}"
            raise bad("--ask", expected="NAME=VALUE, the name a field of Need", got=repr(word), fix=fix)
        try:
            asked[name] = ast.literal_eval(value.capitalize() if value in ("true", "false", "none") else value)
        except (ValueError, SyntaxError):
            asked[name] = value
    return asked


def requests_of(settings: RunSettings) -> tuple[str, list[Request]]:
    """Return the name and the requests of the trace; raises ValueError where one is longer than max_model_len."""
    requests = read_trace(settings.trace or SMALL_TRACE, settings.requests)
    longest, limit = max(requests, key=lambda r: r.input_length + r.output_length), settings.max_model_len
    length = longest.input_length + longest.output_length
    if limit is not None and length > limit:
        expected, got = f"at least {length}, the tokens of request {longest.id}", str(limit)
        raise bad("max_model_len", expected=expected, got=got, fix="raise it, or leave the long requests out")
    return str(settings.trace) if settings.trace else f"{SMALL_TRACE.name} (packaged)", requests


def replay_spec_of(settings: RunSettings, config: MLAConfig) -> ReplaySpec:
    """Return what to replay; raises ValueError for a model with features that are not computed, or another device."""
    config.require_supported()
    return ReplaySpec(
        config, layout_of(settings, config), dtype_of(settings), page_size=settings.page_size,
        num_pages=settings.num_pages, token_budget=settings.token_budget, max_running=settings.max_running,
        max_model_len=settings.max_model_len, device=device_of(settings), seed=settings.seed,
    )  # fmt: skip


def case_of(settings: RunSettings, config: MLAConfig, batch: str) -> Case:
    """Return the conformance case of the model's sizes, the settings' types and pages, and a batch by its grammar."""
    short = {f"{dtype}".removeprefix("torch."): name for name, dtype in DTYPES.items()}
    dims = Dims(settings.model, config.N, config.L, config.P, config.R, config.V)
    layout = f"rows_{short[settings.cache_dtype or settings.dtype]}"
    if batch not in SPECS:
        parse_batch(batch)  # its sentence names the part that does not fit
    require_tokens(batch, spec(batch).query_lens)
    return Case(spec(batch), dims, short[settings.dtype], layout, page_size=settings.page_size)


def require_tokens(batch: str, query_lens: Sequence[int]) -> None:
    """Raise ValueError where no request of a batch has a new token: there is nothing to count or time."""
    if not any(query_lens):
        raise bad("--batch", expected="at least one new token", got=repr(batch), fix="write COUNTqNEWsKEYS, NEW > 0")


def decode_step_of(settings: RunSettings, case: Case, peer: str) -> tuple[int, int]:
    """Return (requests, cached tokens) of a case that `peer` can be timed on: one new token for each of equal contexts.

    Raises ValueError for another batch or dtype, or a peer that is not known.
    """
    if peer != "transformers":
        raise bad("--beside", expected="transformers", got=repr(peer), fix="no other library is timed")
    if settings.dtype != "float32":
        raise bad(
            "dtype", expected="float32, in which both layers are timed", got=settings.dtype, fix="--dtype float32"
        )
    lens = case.batch.seq_lens
    if set(case.batch.query_lens) != {1} or len(set(lens)) != 1 or lens[0] < 2:
        expected, got = "a decode step of equal contexts, such as 4q1s4k", case.batch.name
        raise bad("--batch", expected=expected, got=got, fix="leave --beside out for other batches")
    return len(lens), lens[0] - 1


def counts_of(name: str, text: str) -> tuple[int, ...]:
    """Read counts of at least 1, ascending, such as 1,64,512; raises ValueError that names the option."""
    parts = text.split(",")
    counts = tuple(int(part) for part in parts if re.fullmatch(r"[1-9][0-9]*", part))
    if len(counts) != len(parts) or list(counts) != sorted(set(counts)):
        raise bad(name, expected="ascending counts of at least 1", got=repr(text), fix="write them as 1,64,512")
    return counts


def tables_of(path: str) -> tuple[FormTable, ...]:
    """Return the tables of a file that `mla tune` wrote, none where there is no such file; raises ValueError."""
    if not Path(path).absolute().parent.is_dir():
        raise bad("--file", expected="a file in a folder that exists", got=path, fix="make the folder")
    return FormCosts.load(path).tables if Path(path).exists() else ()


def gpu_of(text: str, itemsize: int) -> Gpu:
    """Return a known GPU, or the ceilings that NAME:TFLOPS:GBPS gives for elements of `itemsize` bytes."""
    name, *rates = text.split(":")
    if not rates and name.lower() in GPUS:
        gpu = find_gpu(name)
        if gpu.itemsize == itemsize:
            return gpu
        expected, got = f"ceilings for {itemsize}-byte elements", f"{name}, known for {gpu.itemsize}-byte elements"
        raise bad("--gpu", expected=expected, got=got, fix=f"write {name}:TFLOPS:GBPS, or use --dtype bfloat16")
    given = [float(rate) if re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[0-9]+)?", rate) else 0.0 for rate in rates]
    if not name or len(rates) != 2 or not all(0 < rate < 1e9 for rate in given):
        expected = f"one of {', '.join(GPUS)}, or NAME:TFLOPS:GBPS"
        raise bad(
            "--gpu",
            expected=expected,
            got=repr(text),
            fix="give your own as mine:989:4800 (TFLOP/s, GB/s; above 0, below 1e9)",
        )
    return Gpu.measured(name, given[0] * 1e12, given[1] * 1e9, itemsize=itemsize)
