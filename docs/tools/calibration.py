"""How much of their error budget right kernels use, and by how much planted faults exceed it.

`python docs/tools/calibration.py` writes docs/results/accuracy.json and the tables of docs/reference/accuracy.md.
Axes: T new tokens (packed over requests), N heads, L KV rank, V value.
"""

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from trials import (
    DTYPES,
    FAMILIES,
    ROOT,
    answer,
    cases,
    correct_kernels,
    family_of,
    latent_answer,
    latent_truth,
    progress,
    put_between,
    raw_kernels,
    save,
    scene,
    table,
)

from mla.accuracy import Comparison, compare
from mla.commands.environment import environment
from mla.conformance.cases import Case
from mla.conformance.zoo import FAULTS
from mla.state import AttentionState

PAGE, RESULTS = ROOT / "docs" / "reference" / "accuracy.md", ROOT / "docs" / "results" / "accuracy.json"
TOY_BATCHES = ("mixed_small", "zero_rows_prefill", "query_17")
FAULT_BATCHES = ("padded_tail", "zero_rows_prefill", "3q1s40", "1q1s300_1q5s200")
V3_BATCH = "2q1s400_1q3s300"
Row = dict[str, Any]


def judged(state: AttentionState | None, truth: Any) -> Comparison:
    """The comparison of an answer, out (T, N, V) and lse (T, N) or None, with the truth; none is a failure."""
    if state is None:
        return Comparison("raised", math.inf, math.inf)
    return compare(state, truth)


def note(rows: dict[tuple, Row], key: dict[str, str], found: Comparison, **best: str) -> None:
    """Add one comparison to the row of its key: runs, how many were rejected, the worst use of both limits."""
    row = rows.setdefault(tuple(key.values()), {**key, "runs": 0, "rejected": 0, "out": 0.0, "lse": 0.0, **best})
    if max(found.used_out, found.used_lse) > max(row["out"], row["lse"]):
        row.update(best)
    row["runs"] += 1
    row["rejected"] += not found.ok
    row["out"], row["lse"] = max(row["out"], found.used_out), max(row["lse"], found.used_lse)


def measure_correct(size: str, chosen: Iterable[Case]) -> list[Row]:
    """Run every right kernel on cases, at both levels; a row for each level, kernel, family and dtype."""
    rows: dict[tuple, Row] = {}
    for case in progress(f"right kernels, {size}", list(chosen)):
        s = scene(case)
        where = {"family": family_of(case), "dtype": case.dtype}
        for name, (form, tier) in correct_kernels().items():
            note(rows, {"size": size, "form": form, "kernel": name, **where}, judged(answer(tier, s), s.truth))
        truth = latent_truth(s)
        for name, raw in raw_kernels().items():
            key = {"size": size, "form": "latent", "kernel": name, **where}
            note(rows, key, judged(latent_answer(raw, s), truth))
    return list(rows.values())


def measure_faults(chosen: Sequence[Case]) -> list[Row]:
    """Run every planted fault on cases; a row for each fault and dtype, with the family that shows it best."""
    rows: dict[tuple, Row] = {}
    for case in progress("planted faults", chosen):
        s = scene(case)
        for fault in FAULTS.values():
            key = {"fault": fault.name, "kind": fault.kind, "suite": fault.suite, "dtype": case.dtype}
            note(rows, key, judged(answer(fault.tier(), s), s.truth), family=family_of(case))
    return list(rows.values())


def measure(seeds: int) -> dict[str, Any]:
    """Measure everything and return the record."""
    start = time.process_time()
    toys = [c for dims in ("toy", "toy_n1") for c in cases(dims, TOY_BATCHES, DTYPES, seeds)]
    correct = measure_correct("toy", toys)
    correct += measure_correct("v3_n16", cases("v3_n16", [V3_BATCH], DTYPES, 1, page=64))
    chosen = [*cases("toy", FAULT_BATCHES, DTYPES, 1), *cases("toy_n12", ["small_decode"], DTYPES, 1)]
    faults = measure_faults(chosen)
    where = {"command": f"python docs/tools/calibration.py --seeds {seeds}", "seeds": seeds}
    seconds = round(time.process_time() - start, 1)
    return {**where, "environment": environment(), "cpu_seconds": seconds, "correct": correct, "faults": faults}


def worst(rows: Iterable[Row], dtype: str, metric: str) -> float:
    """The largest value of a metric over the rows of a dtype."""
    return max((row[metric] for row in rows if row["dtype"] == dtype), default=0.0)


def number(x: float) -> str:
    """Three significant digits, in plain notation up to a million."""
    if not math.isfinite(x):
        return "inf"
    return f"{x:.2f}" if x < 10 else f"{x:.0f}" if x < 1e6 else f"{x:.0e}"


HEAD = [f"{dtype} {metric}" for dtype in DTYPES for metric in ("out", "LSE")]


def cells(rows: Sequence[Row]) -> list[str]:
    """The worst out and LSE of each dtype."""
    return [number(worst(rows, dtype, metric)) for dtype in DTYPES for metric in ("out", "lse")]


def correct_tables(record: dict[str, Any]) -> str:
    """Right kernels: a table for each size by form and family, then one by kernel."""
    parts = []
    for size, words in (("toy", "Toy sizes (3 heads and 1)"), ("v3_n16", "V3 sizes, 16 heads")):
        mine = [row for row in record["correct"] if row["size"] == size]
        lines = []
        for form in ("mha", "mqa", "latent"):
            for family in FAMILIES:
                some = [row for row in mine if (row["form"], row["family"]) == (form, family)]
                lines.append([f"{form}, {family}", *cells(some)])
        parts.append(f"{words}:\n\n{table(['form, family', *HEAD], lines)}")
    kernels = list(dict.fromkeys((row["form"], row["kernel"]) for row in record["correct"]))
    lines = []
    for form, name in kernels:
        some = [row for row in record["correct"] if (row["form"], row["kernel"]) == (form, name)]
        runs, rejected = (str(sum(row[count] for row in some)) for count in ("runs", "rejected"))
        lines.append([f"{name} ({form})", *cells(some), runs, rejected])
    parts.append(f"Both sizes, by kernel:\n\n{table(['kernel', *HEAD, 'runs', 'rejected'], lines)}")
    return "\n".join(parts)


def fault_table(record: dict[str, Any]) -> str:
    """Planted faults that the numbers show: how often each was found, and the most that it used of a limit."""
    titles = ["fault", "shown best by", *(f"{d} {what}" for d in DTYPES for what in ("found", "out", "LSE"))]
    lines = []
    for name in dict.fromkeys(row["fault"] for row in record["faults"]):
        mine = {row["dtype"]: row for row in record["faults"] if row["fault"] == name}
        found = [mine[d] for d in DTYPES]
        best = max(found, key=lambda row: (row["rejected"], max(row["out"], row["lse"])))
        if not best["rejected"]:
            continue
        each = [(f"{r['rejected']}/{r['runs']}", number(r["out"]), number(r["lse"])) for r in found]
        lines.append([name, best["family"], *(cell for three in each for cell in three)])
    return table(titles, lines)


def render(record: dict[str, Any]) -> str:
    """The generated part of the page."""
    e, correct = record["environment"], record["correct"]
    runs, rejected = (sum(row[count] for row in correct) for count in ("runs", "rejected"))
    hidden = sorted(
        name
        for name in {row["fault"] for row in record["faults"]}
        if not any(row["rejected"] for row in record["faults"] if row["fault"] == name)
    )
    names = ", ".join(hidden) or "none"
    return f"""
Made by `{record["command"]}` in {record["cpu_seconds"]:.0f} s of one thread: {e["cpu"]}, Python {e["python"]},
torch {e["torch"]}, numpy {e["numpy"]}, commit {e["commit"]}.

### Right kernels

{runs} runs, {rejected} rejected. Numbers are error / limit, the worst over rows, heads and seeds.

{correct_tables(record)}
### Planted faults

Toy sizes, {len({row["fault"] for row in record["faults"]})} faults. "found": cases in which the numbers alone exceed a
limit, of cases tried; out, LSE: the most that any case used, "inf" where something is not finite, an empty row is not
exact, or the fault raised. Found by other checks and cases of the suite, not by the numbers of these: {names}.

{fault_table(record)}
"""


def main() -> None:
    """Measure, save the record, and write the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="seeds of the toy sizes [2]")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = measure(args.seeds)
    save(args.results, record)
    put_between(args.page, "calibration", render(record))


if __name__ == "__main__":
    main()
