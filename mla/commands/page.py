"""A comparison as one self-contained page: the table of `mla compare`, the errors and the cache as figures.

Nothing is fetched: styles, figures and numbers stand in the file, which reads in light and dark.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mla.commands.environment import environment, invocation
from mla.commands.output import Grid
from mla.commands.report import compare_blocks, ratio

Record = Mapping[str, Any]

STYLE = """
:root { --ink: #1f2937; --paper: #ffffff; --line: #d1d5db; --latent: #2a6fbb; --heads: #3a9a5b; --error: #c43d4b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --paper: #16181d; --line: #3b4048; --latent: #6fb1f2; --heads: #6fce92; --error: #f07f8b; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; } .wide { overflow-x: auto; }
th, td { border: 1px solid var(--line); padding: .25rem .5rem; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; white-space: pre-line; } td:first-child, th:first-child { text-align: left; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 0; } pre { white-space: pre-wrap; }
svg { width: 100%; max-width: 46rem; height: auto; font: 13px system-ui, sans-serif; fill: var(--ink); }
.ok { color: var(--heads); } .mismatch, .raised { color: var(--error); font-weight: 700; }
"""
WIDTH, ROW, LEFT, RIGHT = 720, 26, 250, 110


def compare_page(record: Record) -> str:
    """Return the page of a record of `mla compare`, its environment and invocation included."""
    head, grid, notes, *rest = compare_blocks(record)
    assert isinstance(head, dict)
    assert isinstance(grid, Grid)
    judged = [tier for tier in record["tiers"] if tier["rows"] > 0]
    facts = {**head, "run": record.get("invocation") or "mla compare", **_facts(record["environment"])}
    parts = [
        f"<h1>mla compare: {escape(record['status'])}</h1>",
        "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items()) + "</dl>",
        "<h2>Tiers</h2>",
        f'<div class="wide">{_table(grid)}</div>',
        f"<pre>{escape(str(notes))}</pre>",
        *(f"<pre>{escape(str(block))}</pre>" for block in rest),
    ]
    if judged:
        errors = [(t["name"], part, t[part]["used"]) for t in judged for part in ("out", "lse")]
        parts += ["<h2>Error/budget</h2>", "<p>Right is at most 1, the line on the right. The axis is logarithmic.</p>"]
        parts.append(bars([(f"{name}, {part}", used, ratio(used)) for name, part, used in errors], True))
        cache = judged[0]["cache_bytes_per_token"], judged[0]["mha_bytes_per_token"]
        parts += [
            "<h2>Cache bytes per token and layer</h2>",
            "<p>Latent rows, beside keys and values of all heads.</p>",
        ]
        named = zip(("latent rows", "all heads"), cache, strict=True)
        parts.append(bars([(name, float(nbytes), str(nbytes)) for name, nbytes in named], False))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>mla compare</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def write_page(record: Record, device: str, target: str | None) -> None:
    """Write the page of a comparison to a file, to standard output for "-", or nowhere for None."""
    if target is None:
        return
    page = compare_page({**record, "environment": environment(device), "invocation": invocation()})
    if target == "-":
        sys.stdout.write(page)
    else:
        Path(target).write_text(page, encoding="utf-8")


def bars(rows: Sequence[tuple[str, float | None, str]], budget: bool) -> str:
    """Return a figure of bars, (name, value, text); of shares of a budget it is logarithmic from 1/1000 on, to 1."""
    finite = [v for _, v, _ in rows if v is not None and math.isfinite(v)]
    most = max(finite, default=1.0)
    span = WIDTH - LEFT - RIGHT
    top = max(1.0, most)

    def length(value: float | None) -> float:
        if value is None or value <= 0:
            return 0.0
        if not math.isfinite(value):
            return span
        if not budget:
            return span * value / most
        return span * max(0.0, math.log10(value) + 3) / (math.log10(top) + 3)

    marks = []
    for i, (name, value, text) in enumerate(rows):
        y, w = i * ROW + 4, length(value)
        wrong = budget and (value is None or not value <= 1)
        colour = "--error" if wrong else "--latent" if budget or i == 0 else "--heads"
        marks.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        marks.append(f'<rect x="{LEFT}" y="{y}" width="{w:.1f}" height="{ROW - 8}" fill="var({colour})"/>')
        marks.append(f'<text x="{LEFT + w + 6:.1f}" y="{y + 13}">{escape(text)}</text>')
    height = len(rows) * ROW + 4
    if budget:
        x = LEFT + length(1.0)
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"'
        marks.append(f'<line {ends} stroke="var(--error)" stroke-dasharray="4"/>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(marks)}</svg>'


def _facts(environment: Record) -> dict[str, str]:
    names = ("device", "cpu", "threads", "torch", "commit")
    return {"machine": ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name) is not None)}


def _table(grid: Grid) -> str:
    titles = "".join(f"<th>{escape(title.strip())}</th>" for title in grid.titles)
    rows = []
    for row in grid.rows:
        verdict = str(row[1])
        first, _, *others = (f"<td>{escape(str(cell))}</td>" for cell in row)
        rows.append(f'<tr>{first}<td class="{verdict}">{escape(verdict)}</td>{"".join(others)}</tr>')
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
