"""`mla aot`: the Triton kernels of a file, compiled with no GPU, and how that reads."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mla.aot import TARGETS, Compiled, compile_file
from mla.commands.flags import Outcome, Run
from mla.commands.output import Block, Grid, progress

Record = Mapping[str, Any]
LEGEND = "registers, spilled (bytes of stack): of a thread; shared: bytes of a program, limit: what a target gives it."


def aot(run: Run, file: str, target: list[str] | None = None) -> Outcome:
    """Compile the Triton kernels of a file for the targets (default: `mla.aot.TARGETS`) and report what they take.

    Exit code 0: all compile and fit; 1: one does not. Raises as `mla.aot.compile_file` does.
    """
    with progress("compile", "kernels") as tick:
        results = compile_file(file, target or TARGETS, tick)
    fit = all(r.status in ("ok", "not_run") for r in results)
    return Outcome(aot_record(file, results), aot_blocks, 0 if fit else 1)


def aot_record(file: str, results: Sequence[Compiled]) -> dict[str, Any]:
    """Return what was compiled as plain values, with the compiler's version."""
    from importlib.metadata import version

    return {"file": file, "triton": version("triton"), "kernels": [dataclasses.asdict(r) for r in results]}


def aot_blocks(record: Record) -> list[Block]:
    """Lay out the compiled kernels: a row for each kernel and target, what the columns mean, then what went wrong."""
    titles = ("kernel", "target", "status", "registers", "spilled", "shared", "limit", "seconds")
    rows = [_row(k) for k in record["kernels"]]
    details = [f"{k['kernel']} for {k['target']}: {k['detail']}" for k in record["kernels"] if k["detail"]]
    return [f"{record['file']}, triton {record['triton']}", Grid(titles, rows, keys=2), LEGEND, *details]


def _row(k: Record) -> tuple[str, ...]:
    compiled = k["status"] in ("ok", "too_large")
    numbers = [str(k[name]) if compiled else "-" for name in ("registers", "spilled", "shared")]
    limit = "-" if k["shared_limit"] is None else str(k["shared_limit"])
    return k["kernel"], k["target"], k["status"], *numbers, limit, f"{k['seconds']:.2f}"
