"""Run the tutorials: write their outputs, or try them as a reader meets them and with the solutions in place.

`python docs/tools/notebooks.py` runs every notebook and writes its outputs; names as in `01` or `01-the-cache` select.
`--try` writes nothing and prints times and verdicts, `--solved` puts the solutions in first (and never writes).
`--from FOLDER` first takes the cells from FOLDER/NN-slug.py, a jupytext percent script, for those who edit one.
"""

import argparse
import copy
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "tutorials"
SOLUTIONS = TUTORIALS / "solutions"
MOST_BYTES = 400_000
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_TEXT = "*Here is something to move when the notebook runs. The figure beside it shows the same thing, still.*"
PATHS = re.compile(
    r"(?:^|[\s\"'(=:])((?:/(?:home|root|tmp|work|opt|usr|Users|mnt|var|private)/|[A-Z]:\\\\)[^\s\"']*)", re.M
)
SECTION = re.compile(r"^# %% (ex\d+)[ \t]*\n", re.M)


@dataclass(frozen=True)
class Outcome:
    """One run of a notebook: its cells with outputs, seconds, and the verdict printed after each exercise."""

    notebook: Any
    seconds: float
    verdicts: dict[str, str]
    error: str = ""


def paths(names: Sequence[str] = ()) -> list[Path]:
    """Return the notebooks whose names start with one of `names`, all of them by default; ValueError for no match."""
    found = sorted(TUTORIALS.glob("[0-9][0-9]-*.ipynb"))
    for name in names:
        if not any(path.stem.startswith(name) for path in found):
            raise ValueError(f"no notebook starts with {name!r}; there are {', '.join(path.stem for path in found)}")
    return [path for path in found if not names or any(path.stem.startswith(name) for name in names)]


def read(path: Path) -> Any:
    """Read a notebook, or make one of a percent script."""
    if path.suffix == ".ipynb":
        return nbformat.read(path, as_version=4)
    import jupytext

    return jupytext.read(path)


def exercise_of(cell: Any) -> str | None:
    """Return "ex1" for a cell tagged ["exercise", "ex1"], None for any other cell."""
    tags = cell.metadata.get("tags", [])
    return next((tag for tag in tags if re.fullmatch(r"ex\d+", tag)), None) if "exercise" in tags else None


def solutions_of(path: Path) -> dict[str, str]:
    """Return the solutions of a notebook, exercise -> text of its section; what stands before the first is left out."""
    parts = SECTION.split((SOLUTIONS / f"{path.stem}.py").read_text(encoding="utf-8"))
    return dict(zip(parts[1::2], (text.strip() for text in parts[2::2]), strict=True))


def solve(notebook: Any, solutions: dict[str, str]) -> None:
    """Put the solutions in the place of the exercise cells; raises ValueError unless there is one for each."""
    cells = {exercise_of(cell): cell for cell in notebook.cells if exercise_of(cell)}
    if set(cells) != set(solutions):
        raise ValueError(f"exercises {sorted(cells)}, solutions {sorted(solutions)}")
    for name, text in solutions.items():
        cells[name].source = text


def execute(notebook: Any, timeout: int = 300) -> Outcome:
    """Run all cells in tutorials/ on one thread, without settings of the caller, and clean the outputs.

    A machine with too much to do loses a kernel's answer now and then: a cell that is silent for `timeout` seconds has
    the whole notebook run again, once, and says so.
    """
    try:
        return _run(copy.deepcopy(notebook), timeout)
    except CellTimeoutError as error:
        print(f"once more, from the start: {str(error).splitlines()[0]}", file=sys.stderr)
        return _run(copy.deepcopy(notebook), timeout)


def _run(notebook: Any, timeout: int) -> Outcome:
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("MLA_")}
    known = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(known), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"COLUMNS": "120", "NO_COLOR": "1"}
    client = NotebookClient(
        notebook,
        timeout=timeout,
        startup_timeout=timeout,
        iopub_timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(TUTORIALS)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.extra_arguments = ["--HistoryManager.enabled=False", "--log-level=ERROR"]
    started, error = time.perf_counter(), ""
    try:
        client.execute(env=environment)
    except CellExecutionError as failure:
        error = str(failure)
    seconds = time.perf_counter() - started
    tidy(notebook)
    return Outcome(notebook, seconds, verdicts_of(notebook), error)


def tidy(notebook: Any) -> None:
    """Leave nothing that differs from run to run or machine to machine: ids, timings, widgets, kernel versions."""
    notebook.metadata = nbformat.from_dict(KERNEL)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        for output in cell.get("outputs", []):
            output.pop("transient", None)
            if WIDGET in output.get("data", {}):
                output.data = nbformat.from_dict({"text/markdown": WIDGET_TEXT})
                output.metadata = nbformat.from_dict({})


def text_of(cell: Any) -> str:
    """Return what a cell printed or showed as text."""
    outputs = cell.get("outputs", [])
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)


def verdicts_of(notebook: Any) -> dict[str, str]:
    """Return exercise -> the last line printed by the cell after it, "" where that cell is no check."""
    found = {}
    for cell, after in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        name = exercise_of(cell)
        if name:
            checks = after is not None and re.search(r"\bcheck\.\w+\(", after.source)
            lines = text_of(after).strip().splitlines() if checks else []
            found[name] = lines[-1] if lines else ""
    return found


def faults(path: Path) -> list[str]:
    """Return what a committed notebook lacks or should not hold: parts, size, machine paths, errors."""
    notebook, found = read(path), []
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    first, last = notebook.cells[0].source, notebook.cells[-1].source
    after = re.search(r"After this you can.*?\n((?:\s*[-*] .*\n?(?: {2,}.*\n?)*)+)", text)
    exercises = [exercise_of(cell) for cell in code if exercise_of(cell)]
    outputs = [output for cell in code for output in cell.outputs]
    parts = {
        "a title": first.startswith("# "),
        '"After this you can" and three lines': after and len(re.findall(r"^\s*[-*] ", after[1], re.M)) == 3,
        "how many minutes it takes": re.search(r"\d+ minutes", text),
        "its prerequisites": re.search(r"[Pp]rerequisites?\b|[Bb]efore this\b", text),
        "3 to 5 exercises, ex1 to exN": exercises == [f"ex{i + 1}" for i in range(len(exercises))]
        and 3 <= len(exercises) <= 5,
        "a check after each exercise": all(verdicts_of(notebook).values()),
        "a widget": any(re.search(r"\b(interact\w*|move)\(", cell.source) for cell in code),
        "a figure": any("image/png" in output.get("data", {}) for output in outputs),
        '"Now you can read" at the end': "Now you can read" in last,
        "outputs of a whole run": all(cell.execution_count for cell in code),
    }
    found += [f"{path.name}: lacks {name}" for name, there in parts.items() if not there]
    size = path.stat().st_size
    found += [f"{path.name}: {size} bytes, at most {MOST_BYTES}"] if size > MOST_BYTES else []
    whole = "\n".join([*(cell.source for cell in notebook.cells), *(text_of(cell) for cell in code)])
    found += [f"{path.name}: names a path of a machine: {match[1]}" for match in PATHS.finditer(whole)]
    bad = [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    found += [f"{path.name}: an output is an error or a warning: {str(o)[:120]}" for o in bad]
    if notebook.metadata != KERNEL:
        found.append(f"{path.name}: metadata is not what docs/tools/notebooks.py writes")
    return found


def write(notebook: Any, path: Path) -> None:
    """Write a notebook the one way that leaves a small difference."""
    text = nbformat.writes(notebook)
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def main() -> int:
    """Run what was asked for; exit code 1 where a cell raised or a part is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="first letters of the notebooks' names, such as 01")
    parser.add_argument("--try", dest="dry", action="store_true", help="write nothing")
    parser.add_argument("--solved", action="store_true", help="put the solutions in first; writes nothing")
    parser.add_argument("--from", dest="source", type=Path, help="folder of percent scripts to take the cells from")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    status = 0
    if asked.source is None:
        jobs = [(path, path) for path in paths(asked.names)]
    else:
        scripts = sorted(asked.source.glob("[0-9][0-9]-*.py"))
        jobs = [
            (s, TUTORIALS / f"{s.stem}.ipynb")
            for s in scripts
            if not asked.names or s.stem.startswith(tuple(asked.names))
        ]
    for source, path in jobs:
        notebook = read(source)
        if asked.solved:
            solve(notebook, solutions_of(path))
        outcome = execute(notebook)
        print(f"{path.stem}: {outcome.seconds:.1f} s", *(f"  {k}  {v}" for k, v in outcome.verdicts.items()), sep="\n")
        if outcome.error:
            print(outcome.error, file=sys.stderr)
            status = 1
        if not asked.dry and not asked.solved:
            write(outcome.notebook, path)
            problems = faults(path)
            print(*problems, f"  {path.stat().st_size} bytes", sep="\n")
            status = 1 if problems else status
    return status


if __name__ == "__main__":
    sys.exit(main())
