"""The GPU of a run and what it reaches: versions, clocks and power under load, measured ceilings."""

import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mla.roofline import Gpu
from mla.timing import ceilings

# field of the record: what nvidia-smi calls it
ASKED = {
    "sm_clock_mhz": "clocks.sm", "sm_clock_max_mhz": "clocks.max.sm", "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw", "power_limit_w": "power.limit", "temperature_c": "temperature.gpu",
    "driver": "driver_version",
}  # fmt: skip
LOAD_SIDE, LOAD_MATMULS = 8192, 800  # more than a second of work on an H200, longer than nvidia-smi takes

Ask = Callable[[Sequence[str]], str]


def gpu_record(device: str, dtype: torch.dtype) -> tuple[dict[str, Any], Gpu]:
    """Measure a GPU: its facts under a load of matrix products, and its ceilings for `dtype`."""
    measured = ceilings(device, dtype)
    a = torch.randn(LOAD_SIDE, LOAD_SIDE, device=device).to(torch.bfloat16)
    for _ in range(LOAD_MATMULS):
        torch.matmul(a, a)
    facts = facts_of(device)
    torch.cuda.synchronize(device)
    rates = {"copy_bytes_per_second": measured.bandwidth, "matmul_flops_per_second": measured.flops}
    return {**facts, **rates, "matmul_dtype": str(dtype).removeprefix("torch.")}, measured


def facts_of(device: str, ask: Ask | None = None) -> dict[str, Any]:
    """Return name, architecture, versions, and what nvidia-smi says of clocks and power now; None where it is silent.

    `ask` replaces the call of nvidia-smi.
    """
    from mla.need import arch_of

    properties = torch.cuda.get_device_properties(device)
    one = getattr(properties, "uuid", None)
    names = [*([f"GPU-{one}"] if one else []), str(torch.device(device).index or 0)]
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "name": properties.name,
        "arch": arch_of(device),
        "units": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": triton,
        **smi_facts(names, ask or _nvidia_smi),
    }


def smi_facts(names: Sequence[str], ask: Ask) -> dict[str, Any]:
    """Return the fields of ASKED of one GPU by the first name that is known; None where it says no number."""
    found = dict.fromkeys(ASKED)
    for which in names:
        found = _answer(which, ask)
        if found["driver"] is not None:
            break
    return found


def _answer(which: str, ask: Ask) -> dict[str, Any]:
    words = ["-i", which, f"--query-gpu={','.join(ASKED.values())}", "--format=csv,noheader,nounits"]
    try:
        lines = ask(words).strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        lines = []
    cells = [cell.strip() for cell in lines[0].split(",")] if lines else []
    if len(cells) != len(ASKED):
        return dict.fromkeys(ASKED)
    return {name: cell if name == "driver" else _number(cell) for name, cell in zip(ASKED, cells, strict=True)}


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None


def _nvidia_smi(words: Sequence[str]) -> str:
    return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=True, timeout=20).stdout
