"""Small pieces of Markdown that the page writers share."""

import html
import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def cell(text: object) -> str:
    """Return text that a cell of a Markdown table can hold; no renderer agrees with another on a bar within ticks."""
    line = re.sub(r"`([^`]*\|[^`]*)`", lambda m: f"<code>{escape(m[1])}</code>".replace("|", "&#124;"), str(text))
    return line.replace("|", "\\|").replace("\n", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *([cell(c) for c in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table in a box that scrolls; a cell is HTML, with its own <td> if it starts with one."""
    wrap = lambda c, tag: c if c.startswith(("<td", "<th")) else f"<{tag}>{c}</{tag}>"
    line = lambda cells, tag: "<tr>" + "".join(wrap(c, tag) for c in cells) + "</tr>"
    body = "\n".join(line(row, "td") for row in rows)
    inner = f"<thead>{line(head, 'th')}</thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="records"><table class="cells">\n{inner}</table></div>\n'


def escape(text: object) -> str:
    """Return text for HTML, on one line."""
    return html.escape(" ".join(str(text).split()))


def record(name: str) -> dict[str, Any]:
    """Return a committed record of docs/results/."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@cache
def behind(commit: str | None) -> tuple[int, str] | None:
    """Return how many commits ago a record was made, and that commit's date; None where git does not know it."""
    if not commit:
        return None
    name = commit.partition("+")[0]
    git = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    try:
        count, date = git("rev-list", "--count", f"{name}..HEAD"), git("show", "-s", "--format=%cs", name)
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(count.stdout), date.stdout.strip()


def dated(commit: str | None) -> str:
    """Return "2026-11-29, 3 commits ago (162faa790)" for the commit of a record; says so where git does not know it."""
    if not commit:
        return "commit not recorded"
    name, _, changes = commit.partition("+")
    note = f"{name[:9]}{' with local changes' if changes else ''}"
    found = behind(commit)
    if found is None:
        return f"commit {note}, not in this clone"
    count, date = found
    age = "the newest commit" if count == 0 else f"{count} commit{'s' * (count > 1)} ago"
    return f"{date}, {age} ({note})"


def where(environment: dict[str, Any]) -> str:
    """Return device and versions of a record in one line."""
    e = environment
    device = e["cpu"] if e["device"] == "cpu" else e["device"]
    threads = f", {e['threads']} thread{'s' * (e['threads'] > 1)}" if e["device"] == "cpu" else ""
    return f"{device}{threads}, torch {e['torch']}, Python {e['python']}"
