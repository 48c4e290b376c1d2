"""Where AITER is: the installed package, or what stands in for it in tests. Nothing is imported before it is asked for.

What the tier calls is looked up by name and compared with what it passes, so that a release that moved a signature is
a sentence in `why_not` and never a TypeError in the middle of a step.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from mla.need import Need, refuse_package
from tiers.tier2_aiter.route import WINDOW, L, R

MINIMUM = "0.1.7"
SOURCE = "aiter at commit e4048607 (2026-08-22)"
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
SWITCHES = ("AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_USE_OPUS")  # of kernels that this tier knows nothing about

DECODE, INFO, METADATA = "mla.mla_decode_fwd", "get_mla_metadata_info_v1", "get_mla_metadata_v1"
FLASH, TRITON_DECODE = "flash_attn_varlen_func", "ops.triton.attention.mla_decode.decode_attention_fwd"
WORK = ("work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
PASSED: dict[str, tuple[str, ...]] = {
    DECODE: (
        *("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q"),
        *("page_size", "nhead_kv", "sm_scale", "num_kv_splits", "work_meta_data", *WORK, "return_lse"),
    ),
    INFO: ("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse", "fast_mode"),
    METADATA: (
        *("seqlens_qo_indptr", "seqlens_kv_indptr", "kv_last_page_lens", "num_heads_per_head_k", "num_heads_k"),
        *("is_causal", "work_metadata_ptrs", *WORK, "page_size", "kv_granularity", "max_seqlen_qo"),
        *("uni_seqlen_qo", "fast_mode", "dtype_q", "dtype_kv"),
    ),
    FLASH: (
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"),
        *("causal", "return_lse"),
    ),
    TRITON_DECODE: (
        *("q", "k_buffer", "v_buffer", "o", "lse", "req_to_token", "b_seq_len", "attn_logits", "num_kv_splits"),
        *("sm_scale", "page_size"),
    ),
}


class Library(Protocol):
    """What the tier must know of an AITER, and how it reaches its functions."""

    @property
    def label(self) -> str:
        """What tiers over it are called."""
        ...

    @property
    def window(self) -> int:
        """Bytes that its decode kernels reach from the first row on."""
        ...

    @property
    def version(self) -> str:
        """The release, for messages."""
        ...

    def why_not(self, need: Need) -> list[str]:
        """Return sentences for what is missing on this machine; launches nothing."""
        ...

    def arch(self, need: Need) -> str:
        """Return the architecture of the need's device, such as "gfx942"."""
        ...

    def cu_count(self, need: Need) -> int:
        """Return the compute units of the need's device."""
        ...

    def widths(self, need: Need) -> tuple[int, int]:
        """Return L and R of the rows that its decode kernels read."""
        ...

    def find(self, name: str, need: Need) -> Callable[..., Any] | None:
        """Return the function of that dotted name below `aiter`, for the need's device, None where there is none."""
        ...


@dataclass(frozen=True)
class InstalledAiter:
    """The package `amd-aiter` on a ROCm build of PyTorch."""

    label: str = "aiter"
    window: int = WINDOW

    @property
    def version(self) -> str:
        """The installed release of amd-aiter, "none" without one."""
        try:
            return version("amd-aiter")
        except PackageNotFoundError:
            return "none"

    def why_not(self, need: Need) -> list[str]:
        """Return sentences for the device, the build of PyTorch, the package and environment switches."""
        reasons = []
        if torch.version.hip is None:
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
            reasons.append(f"this PyTorch is built for {built}; aiter needs a ROCm build on an MI300 or MI350: use it.")
        if not need.device.startswith("cuda"):
            reasons.append(f"device {need.device!r} is not served by aiter, which runs on AMD GPUs; use device 'cuda'.")
        reasons += refuse_package("aiter", "amd-aiter", MINIMUM, "aiter")
        for name in SWITCHES:
            if os.environ.get(name, "0") not in ("", "0"):
                reasons.append(f"{name} = {os.environ[name]} chooses kernels that this tier does not know; unset it.")
        return reasons

    def arch(self, need: Need) -> str:
        """Return the architecture that the need was made for."""
        return need.arch

    def cu_count(self, need: Need) -> int:
        """Return what the device says, fewer than the card's where it is partitioned; 0 where there is none."""
        if torch.version.hip is None or not torch.cuda.is_available():
            return 0
        return torch.cuda.get_device_properties(need.device).multi_processor_count

    def widths(self, need: Need) -> tuple[int, int]:
        """Return 512 and 64, whatever the need is."""
        return L, R

    def find(self, name: str, need: Need) -> Callable[..., Any] | None:
        """Import the module of that name below `aiter` and return its function, None where it has none."""
        module, _, function = name.rpartition(".")
        try:
            return getattr(import_module(f"aiter.{module}" if module else "aiter"), function, None)
        except ModuleNotFoundError:
            return None


def why_not_functions(library: Library, need: Need, names: tuple[str, ...]) -> list[str]:
    """Return a sentence for each function that is missing, lacks a keyword that is passed or asks for another one."""
    reasons = []
    for name in names:
        what = f"aiter {library.version}"
        fix = f"this tier is written for {SOURCE}; install that, or choose another tier."
        try:
            function = library.find(name, need)
        except Exception as error:  # importing it runs code of its own
            reasons.append(f"{name} of {what} cannot be imported, {type(error).__name__}: {error}; {fix}")
            continue
        if function is None:
            reasons.append(f"{what} has no {name}; {fix}")
            continue
        known, variadic = inspect.signature(function).parameters, (inspect.Parameter.VAR_POSITIONAL, VAR_KEYWORD)
        missing = [k for k in PASSED[name] if k not in known]
        missing = [] if any(p.kind is VAR_KEYWORD for p in known.values()) else missing
        new = [n for n, p in known.items() if n not in PASSED[name] and p.default is p.empty and p.kind not in variadic]
        for moved, names_of in (("does not take", missing), ("asks also for", new)):
            if names_of:
                reasons.append(f"{name} of {what} {moved} {', '.join(names_of)}; {fix}")
    return reasons


def required(library: Library, need: Need, name: str) -> Callable[..., Any]:
    """Return a function that `why_not_functions` has found."""
    function = library.find(name, need)
    assert function is not None, "why_not has refused"
    return function
