"""The last of a kernel's five parts: its time on a GPU, beside that of its reference and what the machine reaches.

`python -m tiers.tier2_triton.benchmark [KERNEL]... [--json FILE]` takes every module of kernels/, or those named. Each
is held to its reference on the toy problem first and timed on the real one only if it is right: medians behind a cold
L2, as a replayed CUDA graph. Exit code 0: all timed; 1: a kernel is wrong; 2: there is no GPU here.
Axes: n numbers of a tensor in any shape.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla.commands.output import Grid, progress, show
from mla.errors import bad
from mla.replicas import UNIT_ROUNDOFF
from mla.roofline import Gpu
from mla.timing import Lap, Timing, lap_of, turns
from tiers.tier2_triton.aot_table import kernel_names, module_of

if TYPE_CHECKING:
    from tiers.tier2_triton.kernels.problem import Problem

DEVICE, DTYPE = "cuda:0", torch.bfloat16
SLACK = 4.0  # unit roundoffs by which rms(result - reference) may differ, beside rms(reference)
REFERENCE_REPEATS, PATIENCE = 3, 2.0  # a reference that takes longer than so many seconds is timed once


@dataclass(frozen=True)
class Story:
    """What a module of kernels/ tells: `wrapper` and `reference` of one signature, `problem(size, dtype, device)`."""

    name: str
    wrapper: Callable[..., Any]
    reference: Callable[..., Any]
    problem: Callable[..., "Problem"]

    def run(self, function: Callable[..., Any], problem: "Problem") -> dict[str, Tensor]:
        """Call wrapper or reference on a problem; return the tensors that it wrote, in any shape, by name."""
        function(**problem.arguments)
        return {name: problem.arguments[name] for name in problem.outputs}


def story_of(module: ModuleType) -> Story:
    """Return the story of a module: its wrapper is the function `x` beside which there is an `x_reference`.

    Raises ValueError where there is not exactly one, or no `problem`.
    """
    name = module.__name__.rpartition(".")[2]
    pairs = [x.removesuffix("_reference") for x in vars(module) if x.endswith("_reference")]
    own = [x for x in pairs if getattr(vars(module)[f"{x}_reference"], "__module__", "") == module.__name__]
    own = [x for x in own if hasattr(module, x)]
    if len(own) != 1 or not hasattr(module, "problem"):
        got = f"{', '.join(own) or 'none'}{'' if hasattr(module, 'problem') else ', and no problem'}"
        fix = "name the reference after its wrapper, and give the module a problem()"
        raise bad(name, expected="one wrapper with its reference, and problem", got=got, fix=fix)
    return Story(name, getattr(module, own[0]), getattr(module, f"{own[0]}_reference"), module.problem)


def fault_of(story: Story, device: str, dtype: torch.dtype = DTYPE) -> str:
    """Return "" where a kernel is right on its toy problem, else a sentence.

    The reference works in float64 on the same rounded inputs; both must be NaN and infinite in the same places.
    """
    mine = story.run(story.wrapper, story.problem("toy", dtype, device))
    theirs = story.problem("toy", dtype, device)
    wide = {name: widened(value) for name, value in theirs.arguments.items()}
    truth = story.run(story.reference, replace(theirs, arguments=wide))
    for name, right in truth.items():
        found, right = mine[name].double(), right.double()
        finite = torch.isfinite(right)
        odd = found.nan_to_num(7.0, 8.0, 9.0) != right.nan_to_num(7.0, 8.0, 9.0)
        if bool((torch.isfinite(found) != finite).any()) or bool((odd & ~finite).any()):
            return f"{name} is not NaN or infinite where its reference is."
        off, size = (
            float(x[finite].square().mean().sqrt()) if bool(finite.any()) else 0.0 for x in (found - right, right)
        )
        if off > SLACK * UNIT_ROUNDOFF[dtype] * size:
            return f"{name} is off by {off:.3g} (rms) where the reference's rms is {size:.3g}."
    return ""


def widened(value: Any) -> Any:
    """Return a float tensor of any shape in float64, anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def time_story(story: Story, device: str, repeats: int) -> dict[str, Any]:
    """Time a right kernel on its real problem, and then its reference on the same tensors."""
    problem = story.problem("real", DTYPE, device)
    call = lambda: story.wrapper(**problem.arguments)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    timing = turns([lap_of(call, device, graph=True)], repeats)[0]
    timings = {"kernel": asdict(timing), "first_ms": 1e3 * first, "nbytes": problem.nbytes, "flops": problem.flops}
    reference = reference_timing(lambda: story.reference(**problem.arguments), device)
    return timings | {"reference": reference and asdict(reference)}


def reference_timing(call: Callable[[], Any], device: str, lap: Lap | None = None) -> Timing | None:
    """Return the timing of a reference, of a single call where it takes long; None where memory does not suffice."""
    lap = lap or lap_of(call, device)
    try:
        once = lap()
        if once > PATIENCE * 1e3:
            return Timing(once, once, once, 1, getattr(lap, "how", "host"))
        return turns([lap], REFERENCE_REPEATS, warmup=0)[0]
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def rates(row: Mapping[str, Any], peak: Gpu) -> dict[str, float]:
    """Return the rates of a timed row in GB/s and TFLOP/s, and in percent of the measured copy and matmul."""
    seconds = row["kernel"]["median_ms"] / 1e3
    bandwidth, flops = row["nbytes"] / seconds, row["flops"] / seconds
    return {
        "gbytes_per_second": bandwidth / 1e9,
        "tflops_per_second": flops / 1e12,
        "percent_of_copy": 100 * bandwidth / peak.bandwidth,
        "percent_of_matmul": 100 * flops / peak.flops,
    }


def grid_of(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Lay out the rows: times in microseconds, rates, shares of what was measured, and the reference."""
    titles = (
        *("kernel", "gate", "us\nmedian", "us\np10", "us\np90", "timed\nby", "GB/s", "% of\ncopy", "TFLOP/s"),
        *("% of\nmatmul", "reference us", "times\nfaster", "first\nms"),
    )
    cells = []
    for row in rows:
        if row["status"] != "ok":
            cells.append((row["name"], row["status"], *["-"] * (len(titles) - 2)))
            continue
        kernel, reference = row["kernel"], row["reference"]
        us = [f"{1e3 * kernel[f'{which}_ms']:.1f}" for which in ("median", "low", "high")]
        work = ("gbytes_per_second", "percent_of_copy", "tflops_per_second", "percent_of_matmul")
        slow = None if reference is None else reference["median_ms"]
        beside = ("-", "-") if slow is None else (f"{1e3 * slow:.1f}", f"{slow / kernel['median_ms']:.1f}")
        shown = [f"{row[name]:.1f}" for name in work]
        cells.append((row["name"], "ok", *us, kernel["how"], *shown, *beside, f"{row['first_ms']:.0f}"))
    return Grid(titles, cells)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tiers.tier2_triton.benchmark", description=__doc__)
    parser.add_argument("kernel", nargs="*", help="modules of kernels/ [all]")
    parser.add_argument("--json", metavar="FILE", help="write the record as JSON")
    parser.add_argument("--repeats", type=int, default=30)
    asked = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("error: there is no GPU here, and a kernel's time anywhere else means nothing.", file=sys.stderr)
        return 2
    from mla.commands.environment import environment
    from mla.commands.gpu import gpu_record

    facts, peak = gpu_record(DEVICE, DTYPE)
    rows = []
    with progress("benchmark", "kernels") as tick:
        names = asked.kernel or [name for name in kernel_names() if "." not in name]  # those of hopper/: mla bench
        for i, name in enumerate(names):
            tick(i, len(names))
            rows.append(row_of(name, peak, asked.repeats))
            torch.cuda.empty_cache()
    if asked.json:
        record = {"command": "benchmark", "environment": environment(DEVICE), "device": facts, "rows": rows}
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
    copy, matmul = f"copy {peak.bandwidth / 1e9:.0f} GB/s (read + written)", f"matmul {peak.flops / 1e12:.0f} TFLOP/s"
    clock = "-" if facts["sm_clock_mhz"] is None else f"{facts['sm_clock_mhz']:.0f} MHz"
    head = {"gpu": f"{facts['name']}, SM clock under load {clock}, driver {facts['driver'] or '-'}"}
    head |= {"versions": f"torch {facts['torch']}, triton {facts['triton']}", "measured": f"{copy}, bfloat16 {matmul}"}
    show([head, grid_of(rows), *(f"{row['name']}: {row['reason']}" for row in rows if row["status"] != "ok")])
    return 1 if any(row["status"] != "ok" for row in rows) else 0


def row_of(name: str, peak: Gpu, repeats: int) -> dict[str, Any]:
    """Return the row of a kernel: what is wrong with it, or its times and rates."""
    try:
        story = story_of(importlib.import_module(module_of(name)))
        fault = fault_of(story, DEVICE)
        if fault:
            return {"name": name, "status": "mismatch", "reason": fault}
        row = time_story(story, DEVICE, repeats)
    except Exception as error:  # one kernel that fails is a row, not the end
        return {"name": name, "status": "raised", "reason": f"{type(error).__name__}: {error}"}
    return {"name": name, "status": "ok", **row, **rates(row, peak)}


if __name__ == "__main__":
    sys.exit(main())
