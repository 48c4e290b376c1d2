"""The library behind the FlashInfer tier: where it is, what it and this device cannot do, and wrappers that are reused.

Axes: T new tokens (packed over requests), L KV rank, R rope.
"""

import importlib
import inspect
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla.cache import FLOAT_DTYPES, FloatRows, PagedLatentCache
from mla.checks import check_aligned, check_equal
from mla.errors import bad
from mla.need import Need, refuse_package

DISTRIBUTION, MINIMUM, TESTED = "flashinfer-python", "0.6.18", ("0.6.18.post1",)
HALVES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES, WRAPPER_BYTES = 128 << 20, 8 << 20  # as the library advises; what a wrapper takes on the device
CALLS = {  # every keyword that is passed; whatever else a function has must have a default
    "mla.BatchMLAPagedAttentionWrapper": (
        "float_workspace_buffer", "use_cuda_graph", "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "backend",
    ),
    "mla.BatchMLAPagedAttentionWrapper.plan": (
        "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size",
        "causal", "sm_scale", "q_data_type", "kv_data_type",
    ),
    "mla.BatchMLAPagedAttentionWrapper.run": (
        "q_nope", "q_pe", "ckv_cache", "kpe_cache", "out", "lse", "return_lse", "return_lse_base_on_e",
    ),
    "BatchPrefillWithRaggedKVCacheWrapper": ("float_workspace_buffer", "kv_layout", "backend"),
    "BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "causal", "sm_scale",
        "q_data_type", "kv_data_type",
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.run": ("q", "k", "v", "return_lse"),
    "page.append_paged_mla_kv_cache": (
        "append_ckv", "append_kpe", "batch_indices", "positions", "ckv_cache", "kpe_cache", "kv_indices", "kv_indptr",
        "kv_last_page_len",
    ),
    "merge_state": ("v_a", "s_a", "v_b", "s_b"),
}  # fmt: skip
ENTRY_CALLS = {  # of the forms for Blackwell alone, so that a library without it serves the others
    "mla.trtllm_batch_decode_with_kv_cache_mla": (
        "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "block_tables",
        "seq_lens", "max_seq_len", "out", "bmm1_scale", "bmm2_scale", "backend", "lse", "return_lse",
    ),
}  # fmt: skip
_IDLE: dict[tuple, list["Wrapper"]] = defaultdict(list)


@dataclass(eq=False)
class Wrapper:
    """One of the library's wrappers, and the event after which its pinned lists may be written again."""

    library: Any
    device: str
    copied: Any = None

    def plan(self, **lists: Any) -> None:
        """Plan it for a step; the library copies its pinned lists to the device and does not wait for that."""
        if self.device == "cpu":
            self.library.plan(**lists)
            return
        with torch.cuda.device(self.device):
            if self.copied is not None:
                self.copied.synchronize()
            self.library.plan(**lists)
            self.copied = torch.cuda.Event()
            self.copied.record()


def find_library(given: Any) -> Any:
    """Return the module with the library's names: `given`, or the installed one, imported on first use."""
    return _import() if given is None else given


def library_version(given: Any) -> str:
    """Return the version in use and whether it is one that this tier was tested with; for reports."""
    if given is not None:
        return "stand-in"
    found = version(DISTRIBUTION)
    return f"{found} ({'' if found in TESTED else 'not '}tested)"


def why_not_installed(given: Any) -> list[str]:
    """Return sentences for a package that is missing or too old, fails to import, or has other signatures."""
    if given is not None:
        return why_not_signatures(given, "stand-in")
    return refuse_package("flashinfer", DISTRIBUTION, MINIMUM, "flashinfer") or _why_not_import()


def why_not_entry(given: Any) -> list[str]:
    """Return sentences where the entry point for Blackwell is missing or moved; none where there is no library."""
    if given is not None:
        return why_not_signatures(given, "stand-in", ENTRY_CALLS)
    return [] if why_not_installed(None) else why_not_signatures(_import(), version(DISTRIBUTION), ENTRY_CALLS)


def why_not_signatures(library: Any, found: str, calls: Mapping[str, tuple[str, ...]] = CALLS) -> list[str]:
    """Return sentences for functions of version `found` that are missing or do not take what is passed to them."""
    reasons, fix = [], f"install a tested version ({', '.join(TESTED)}) or choose another tier."
    for path, passed in calls.items():
        thing: Any = library
        for part in path.split("."):
            thing = getattr(thing, part, None)
        if thing is None:
            reasons.append(f"flashinfer {found} has no {path}; {fix}")
            continue
        has = {n: p for n, p in inspect.signature(thing).parameters.items() if n != "self"}
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        gone = [] if any(p.kind == variadic[1] for p in has.values()) else [n for n in passed if n not in has]
        new = [n for n, p in has.items() if n not in passed and p.default is p.empty and p.kind not in variadic]
        for what, names in (("does not take", gone), ("asks also for", new)):
            if names:
                reasons.append(f"{path} of flashinfer {found} {what} {', '.join(names)}; {fix}")
    return reasons


def why_not_rows(need: Need) -> list[str]:
    """Return a sentence for dtypes and layouts of cached rows that the kernels do not read here."""
    rows, takes = need.layout.storage_dtype, "which takes bfloat16 and float16"
    if not isinstance(need.layout, FloatRows):
        found = f"layout {need.layout.name!r} is not read by flashinfer here, {takes}"
        return [f"{found}; use FloatRows until quantised layouts exist."]
    if need.dtype not in HALVES:
        return [f"dtype {need.dtype} is not served by flashinfer, {takes}; use one of these, or triton."]
    if rows != need.dtype:
        found = f"a cache of {rows} is not read by flashinfer for queries of {need.dtype}"
        return [f"{found}; use rows of the queries' dtype, or triton."]
    return []


def workspace(device: str) -> Tensor:
    """Return the bytes (WORKSPACE_BYTES,) for partial results of one run at a time: kernels of a stream share them."""
    return _workspace(device)


def borrow(library: Any, kind: str, backend: str, device: str, owner: object) -> Wrapper:
    """Return a wrapper, "mla" or "ragged", that belongs to `owner` and is free again when that is gone."""
    idle = _IDLE[library, kind, backend, device]
    if idle:
        wrapper = idle.pop()
    elif kind == "mla":
        make = library.mla.BatchMLAPagedAttentionWrapper
        wrapper = Wrapper(make(float_workspace_buffer=workspace(device), backend=backend), device)
    else:
        make = library.BatchPrefillWithRaggedKVCacheWrapper
        wrapper = Wrapper(make(float_workspace_buffer=workspace(device), kv_layout="NHD", backend=backend), device)
    weakref.finalize(owner, idle.append, wrapper).atexit = False
    return wrapper


def check_readable(cache: PagedLatentCache) -> None:
    """Raise ValueError where kernels would read a cache's rows wrong: 16 bytes at once, strides of 32 bits.

    cache.data is (pages, page_size, L + R); rows of odd width, which only the stand-in takes, are not checked.
    """
    x = cache.data
    if x.shape[2] % 8 == 0:
        check_aligned(x)
    if any(s >= 1 << 32 for s, n in zip(x.stride()[:2], x.shape[:2], strict=True) if n > 1):
        expected, got = "strides below 2^32", str(x.stride())
        raise bad("cache.data", expected=expected, got=got, fix="allocate pages closer together, or use triton")


def append_rows(library: Any, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> None:
    """Write kv_c (T, L) and k_pe (T, R) at slots (T,) int64 by the library's kernel, without waiting for the device.

    The pool is one request whose positions are the slots. The kernel knows no -1: a row that is not to be written
    writes the first written one again, or slot 0 what it holds. Raises ValueError or TypeError naming the argument.
    """
    check_equal("slot_mapping.dtype", slots.dtype, torch.int64, "slot_mapping.long()", TypeError)
    check_equal("slot_mapping.dim()", slots.dim(), 1, "slot_mapping.flatten()")
    T, device, dtype, page = slots.shape[0], cache.data.device, cache.data.dtype, cache.page_size
    for name, x, width in (("kv_c", kv_c, cache.layout.L), ("k_pe", k_pe, cache.layout.R)):
        if x.dim() != 2 or x.shape[0] < T or x.shape[1] != width:
            expected, fix = f"(>= {T}, {width})", "one row per slot, the layout's width"
            raise bad(name, expected=expected, got=str(tuple(x.shape)), fix=fix)
        if x.dtype not in FLOAT_DTYPES:
            expected, fix = f"one of {FLOAT_DTYPES}", "pass unquantised rows"
            raise bad(name, expected=expected, got=str(x.dtype), fix=fix, kind=TypeError)
        check_equal(f"{name}.device", x.device, device, "move it to the cache's device")
    check_equal("slot_mapping.device", slots.device, device, "move it to the cache's device")
    if T == 0:  # a launch of no blocks fails
        return
    check_readable(cache)
    keep, rows = slots >= 0, cache.layout.read(cache.data)
    first = keep.int().argmax(0, keepdim=True)  # (1,): an index without axes would be read by the host
    some, source = keep[first], torch.where(keep, torch.arange(T, device=device), first)
    at = torch.where(some, slots[first], 0)
    new = [
        torch.where(some[:, None], x[:T].to(dtype)[source], held[at // page, at % page])
        for x, held in zip((kv_c, k_pe), rows, strict=True)
    ]
    ints = lambda *values: upload(torch.tensor(values, dtype=torch.int32), str(device))
    library.page.append_paged_mla_kv_cache(
        append_ckv=new[0], append_kpe=new[1], batch_indices=torch.zeros(T, dtype=torch.int32, device=device),
        positions=torch.where(keep, slots, at).int(), ckv_cache=rows[0], kpe_cache=rows[1],
        kv_indices=torch.arange(cache.num_pages, dtype=torch.int32, device=device),
        kv_indptr=ints(0, cache.num_pages), kv_last_page_len=ints(page),
    )  # fmt: skip


def on_host(values: Sequence[int], device: str) -> Tensor:
    """Return int32 values (n,) on the host, pinned where the library copies them to a GPU."""
    x = torch.tensor(values, dtype=torch.int32)
    return x if device == "cpu" else x.pin_memory()


def running_sums(lengths: Sequence[int], device: str) -> Tensor:
    """Return the int32 running sums (n + 1,) of lengths on the host, as the library's indptr arguments."""
    return on_host([0, *accumulate(lengths)], device)


def upload(x: Tensor, device: str) -> Tensor:
    """Return a host tensor, such as (n,), on the device without waiting."""
    return x if device == "cpu" else x.pin_memory().to(device, non_blocking=True)


@cache
def _import() -> Any:
    for name in ("mla", "page"):
        importlib.import_module(f"flashinfer.{name}")
    return importlib.import_module("flashinfer")


@cache
def _why_not_import() -> list[str]:
    try:
        library = _import()
    except Exception as error:  # whatever its own imports raise
        found = f"{DISTRIBUTION} {version(DISTRIBUTION)} cannot be imported: {type(error).__name__}: {error}"
        return [f"{found}; mend the installation or choose another tier."]
    return why_not_signatures(library, version(DISTRIBUTION))


@cache
def _workspace(device: str) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device)
