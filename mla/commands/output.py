"""What a command puts out: blocks of text, fields and tables, a progress bar, a sentence for bad input, or JSON.

On a terminal `rich` draws them, and a table that is too wide goes on below itself. Elsewhere they are plain text: one
line for each row, columns two spaces apart, nothing cut off.
"""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mla.errors import bad

LEAST_TEXT = 20
Tick = Callable[[int, int], None]

STYLES = {
    **dict.fromkeys(("ok", "yes"), "green"),
    **dict.fromkeys(("refused", "not_run", "no"), "yellow"),
    **dict.fromkeys(("mismatch", "raised", "failed", "not_finite", "wrong_shape", "wrong_dtype"), "bold red"),
    **dict.fromkeys(("timed_out", "crashed", "missed"), "bold red"),
}


@dataclass(frozen=True)
class Grid:
    """A table of text: column titles, and rows with a cell for each column; columns of numbers are set right.

    Titles may break into lines, which plain text joins. A terminal that is too narrow gets several tables, cut before
    the columns of `cuts` and wherever else it must, each with the first `keys` columns.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int = 1
    cuts: Sequence[int] = ()

    def right(self, column: int) -> bool:
        """Return whether every cell of the column is a number, or "-" for none."""
        return all(cell == "-" or _is_number(cell) for cell in (row[column] for row in self.rows))


@dataclass(frozen=True)
class Finding:
    """Something wrong: a sentence, what is known about it by label, and a command that a terminal must not cut."""

    sentence: str
    fields: dict[str, str]
    command: str


Block = str | dict[str, str] | Grid | Finding
"""A paragraph, fields with their labels, a table, or a finding."""


def show(blocks: Sequence[Block], *, stderr: bool = False) -> None:
    """Print blocks with an empty line between them, on standard output or on standard error."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    for i, block in enumerate(blocks):
        if not console.is_terminal:
            print(("\n" if i else "") + _plain(block), file=sys.stderr if stderr else sys.stdout)
            continue
        if i:
            console.print()
        if isinstance(block, Finding):
            console.print(Text(block.sentence, "bold"))
            console.print(Padding(_drawn(block.fields, console)[0], (0, 0, 0, 2)))
            console.print(f"  {block.command}", soft_wrap=True)
            continue
        for j, part in enumerate([block] if isinstance(block, str) else _drawn(block, console)):
            console.print(*([""] if j else []), part, sep="\n")


@contextmanager
def progress(task: str, unit: str) -> Iterator[Tick]:
    """Yield tick(done, total) that moves a bar on standard error, if that is a terminal, and does nothing elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn(f"{{task.fields[counted]}} {unit}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        id = bar.add_task(task, total=None, counted="counting")
        yield lambda done, total: bar.update(id, completed=done, total=total, counted=f"{done} of {total}")


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
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search(r"allocate memory|enough memory", str(error)):
            raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        typer.echo(f"error: not enough memory ({said}). Fix: a smaller model, batch or pool.", err=True)
        raise typer.Exit(2) from None
    except SystemExit as error:  # a tier's own exit, perhaps with code 0, is no result
        typer.echo(f"error: a tier ended the program (SystemExit: {error}). Fix: raise an error instead.", err=True)
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


def check_target(target: str | None, flag: str = "--json") -> None:
    """Raise ValueError where a record could not be written to `target`: before a long run, not after it."""
    if target in (None, "-"):
        return
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir():
        got = f"{target}, {'a folder' if path.is_dir() else 'whose folder does not exist'}"
        raise bad(flag, expected="the path of a file to write, or -", got=got, fix="make the folder, or use -")


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
    if isinstance(block, Finding):
        return "\n  ".join([block.sentence, *_plain(block.fields).splitlines(), block.command])
    if isinstance(block, dict):
        width = max(map(len, block))
        return "\n".join(f"{label:<{width}}  {text}" for label, text in block.items())
    rows = [[title.replace("\n/", "/").replace("\n", " ").strip() for title in block.titles], *block.rows]
    widths = [max(len(row[c]) for row in rows) for c in range(len(block.titles))]
    sides = [">" if block.right(c) else "<" for c in range(len(widths))]
    lines = (zip(row, sides, widths, strict=True) for row in rows)
    return "\n".join("  ".join(f"{cell:{side}{width}}" for cell, side, width in line).rstrip() for line in lines)


def _drawn(block: dict[str, str] | Grid, console: Console) -> list[Table]:
    if isinstance(block, Grid):
        return _split(block, console)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in block.items():
        grid.add_row(label, Text(text))
    return [grid]


def _split(grid: Grid, console: Console) -> list[Table]:
    """Draw one table, or as many as the width asks for; a last column of text may wrap instead."""
    every, keys = list(range(len(grid.titles))), list(range(grid.keys))
    if _width(_table(grid, every), console) <= console.width:
        return [_table(grid, every)]
    tables, chosen = [], keys
    for column in every[grid.keys :]:
        room = console.width - _width(_table(grid, chosen), console) - 2
        wraps = column == every[-1] and not grid.right(column) and room >= LEAST_TEXT
        fits = wraps or _width(_table(grid, [*chosen, column]), console) <= console.width
        if len(chosen) > grid.keys and (column in grid.cuts or not fits):
            tables.append(_table(grid, chosen))
            chosen = keys
        chosen = [*chosen, column]
    return [*tables, _table(grid, chosen)]


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update_width(10**6)).maximum


def _table(grid: Grid, columns: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    for c in columns:
        side: Literal["left", "right"] = "right" if grid.right(c) else "left"
        wraps = c == columns[-1] and side == "left"
        table.add_column(Text(grid.titles[c]), justify=side, vertical="top", no_wrap=not wraps, overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(_broken(row[c]) if c == 0 else row[c], STYLES.get(row[c], "")) for c in columns))
    return table


def _broken(name: str) -> str:
    # Two lines for a pair of tiers: its name is twice as long as any other.
    return name.replace("+prefill=", "\n+prefill=")
