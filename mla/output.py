"""What a command puts out: blocks of text, fields and tables, a progress bar, a sentence for bad input, or JSON.

On a terminal `rich` draws them, and a table that is too wide goes on below itself. Elsewhere they are plain text: one
line for each row, columns two spaces apart, nothing cut off.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mla.errors import bad

Tick = Callable[[int, int], None]

STYLES = {
    **dict.fromkeys(("ok", "yes"), "green"),
    **dict.fromkeys(("refused", "no"), "yellow"),
    **dict.fromkeys(("mismatch", "raised"), "bold red"),
}


@dataclass(frozen=True)
class Grid:
    """A table of text: column titles, and rows with a cell for each column; columns of numbers are set right."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]

    def right(self, column: int) -> bool:
        """Return whether every cell of the column is a number, or "-" for none."""
        return all(cell == "-" or _is_number(cell) for cell in (row[column] for row in self.rows))


Block = str | dict[str, str] | Grid
"""A paragraph, fields with their labels, or a table."""


def show(blocks: Sequence[Block], *, stderr: bool = False) -> None:
    """Print blocks with an empty line between them, on standard output or on standard error."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    for i, block in enumerate(blocks):
        if not console.is_terminal:
            print(("\n" if i else "") + _plain(block), file=sys.stderr if stderr else sys.stdout)
            continue
        if i:
            console.print()
        for part in [block] if isinstance(block, str) else _drawn(block, console):
            console.print(part)


@contextmanager
def progress(task: str, unit: str) -> Iterator[Tick]:
    """Yield tick(done, total) that moves a bar on standard error, if that is a terminal, and does nothing elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn(f"{{task.completed:.0f}} of {{task.total}} {unit}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        id = bar.add_task(task, total=None)
        yield lambda done, total: bar.update(id, completed=done, total=total)


@contextmanager
def sentences() -> Iterator[None]:
    """Turn what is wrong with the input into a sentence on standard error and exit code 2; other errors pass."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        if isinstance(error, TypeError) and "Fix:" not in str(error):
            raise
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {(error.strerror or 'cannot be used').lower()}. Fix: check the path."
        for line in text.splitlines():
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None


def plain(value: Any) -> Any:
    """Return `value` as JSON types: dataclasses and mappings as objects; paths, dtypes and infinities as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def check_target(target: str | None) -> None:
    """Raise ValueError where a record could not be written to `target`: before a long run, not after it."""
    if target in (None, "-"):
        return
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir():
        got = f"{target}, {'a folder' if path.is_dir() else 'whose folder does not exist'}"
        raise bad("--json", expected="the path of a file to write, or -", got=got, fix="make the folder, or use -")


def write(record: Mapping[str, Any], target: str | None) -> None:
    """Write a record as JSON to a file, to standard output for "-", or nowhere for None."""
    if target is None:
        return
    text = json.dumps(plain(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def _is_number(cell: str) -> bool:
    try:
        float(cell.removesuffix("%").removesuffix("x"))
    except ValueError:
        return False
    return True


def _plain(block: Block) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, dict):
        width = max(map(len, block))
        return "\n".join(f"{label:<{width}}  {text}" for label, text in block.items())
    rows = [block.titles, *block.rows]
    widths = [max(len(row[c]) for row in rows) for c in range(len(block.titles))]
    sides = [">" if block.right(c) else "<" for c in range(len(widths))]
    lines = (zip(row, sides, widths, strict=True) for row in rows)
    return "\n".join("  ".join(f"{cell:{side}{width}}" for cell, side, width in line).rstrip() for line in lines)


def _drawn(block: dict[str, str] | Grid, console: Console) -> list[Table]:
    if isinstance(block, Grid):
        return _split(block, console)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    for label, text in block.items():
        grid.add_row(label, Text(text))
    return [grid]


def _split(grid: Grid, console: Console) -> list[Table]:
    """Draw as many columns as fit, then the rest in further tables that repeat the first column."""
    tables, chosen = [], [0]
    for column in range(1, len(grid.titles)):
        if len(chosen) > 1 and console.measure(_table(grid, [*chosen, column])).maximum > console.width:
            tables.append(_table(grid, chosen))
            chosen = [0]
        chosen.append(column)
    return [*tables, _table(grid, chosen)]


def _table(grid: Grid, columns: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for c in columns:
        last = c == columns[-1]
        table.add_column(
            Text("\n".join(grid.titles[c].split())), justify="right" if grid.right(c) else "left", vertical="bottom",
            no_wrap=not last, overflow="fold",
        )  # fmt: skip
    for row in grid.rows:
        table.add_row(*(Text(row[c], STYLES.get(row[c], "")) for c in columns))
    return table
