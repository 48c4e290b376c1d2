"""The benchmark page, from the committed records of `mla bench`: method, time against context, ceilings, commands."""

import math
from collections.abc import Sequence
from typing import Any

from pieces import RESULTS, dated, escape, html_table, record, where

from mla.batch import parse_batch
from mla.commands.report import short_batch

COLOURS = ("latent", "rope", "per-head", "query", "error")
SHAPES = {
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "square": "M-4-4h8v8h-8z",
    "triangle": "M0-5l5 9h-10z",
    "diamond": "M0-5.5l5 5.5-5 5.5-5-5.5z",
}
METHOD = """
## Method

1. **Right first.** A tier is timed on a batch only after it gave the right answer there, output and LSE, within the
   error budget. A wrong one has no time.
2. **What is timed** is attention alone: `attend`, from the un-absorbed query to the output of each head, over a cache
   in shuffled pages. *Inner kernel* is the part from absorbed query to latent output. `plan` and `write` are timed
   apart; `plan` is host work that happens once a step for all layers.
3. **How.** Two calls warm up. On a GPU the L2 cache is flushed before each call, and a call is replayed as a CUDA graph
   where the tier can be captured (`graph`), else timed between two events (`events`). A time is the median; *spread* is
   the fastest and the slowest of the repeats.
4. **Ceilings are measured in the same run**: a device-to-device copy for bytes, a large matrix product for FLOPs. A
   percentage is of those, never of a datasheet.
5. **Counted work** is the least that any kernel must do: each byte once, the FLOPs of the cheaper form. A tier that
   does more gets no credit for it.
6. **No cross-machine comparison.** Every row says where it was made; times of different machines stand in different
   tables.

How to make such figures of your own: [Benchmark honestly](../how-to/benchmark.md).
"""


def command_of(rec: dict[str, Any]) -> str:
    """Return the command that made a record, from its rows and settings."""
    rows = rec["rows"]
    tiers = list(dict.fromkeys(r["tier"] for r in rows))
    batches = [f"--batch {b}" for b in dict.fromkeys(r["batch"] for r in rows)]
    flags = [f"--{k.replace('_', '-')} {s['value']}" for k, s in rec["settings"].items() if s["source"] == "flag"]
    level = [f"--level {rec['level']}"] if rec.get("level", "attend") != "attend" else []
    repeats = {r["attend"]["repeats"] for r in rows if r["attend"]}
    asked = [f"--repeats {n}" for n in repeats - {10}]
    return " ".join(["mla bench", *tiers, *batches, *level, *asked, *flags])


def percent(value: float | None) -> str:
    """Return a percentage, or a dash."""
    return "-" if value is None else f"{value:.0f} %"


def bench_rows(rec: dict[str, Any]) -> list[list[str]]:
    """Return the cells of one record."""
    rows = []
    for r in rec["rows"]:
        name, t, plan = f"<code>{escape(r['tier'])}</code>", r["attend"], r.get("plan")
        if not t:
            kind = "cell-refused" if r["status"] == "refused" else "cell-failed"
            said = f"{escape(r['status'])}: {escape(' '.join(r['reasons']))}"
            rows.append([name, short_batch(r["batch"]), f'<td class="{kind} say" colspan="7">{said}</td>'])
            continue
        rows.append([
            name, short_batch(r["batch"]), *time_cells(t), f"{t.get('how', 'host')}, {t['repeats']}",
            percent(r.get("percent_of_copy")), percent(r.get("percent_of_matmul")),
            f"{plan['median_ms']:.3g}" if plan else "-", f"{max(float(r['used_out']), float(r['used_lse'])):.2f}",
        ])  # fmt: skip
    return rows


def beside(records: list[tuple[str, dict[str, Any]]], peer: str = "docs/tools/flashmla_kernel.py") -> str:
    """Return the table of our inner kernels beside another's in the same run: the ratio of the medians."""
    rows = []
    for name, rec in records:
        for batch in dict.fromkeys(r["batch"] for r in rec["rows"]):
            found = {
                r["tier"]: r["attend"]["median_ms"] * 1e3 for r in rec["rows"] if r["batch"] == batch and r["attend"]
            }
            if peer not in found:
                continue
            rows += [
                [
                    f"<code>{escape(tier)}</code>", str(rec["model"]["N"]), short_batch(batch), f"{us:.1f}",
                    f"{found[peer]:.1f}", f"<strong>{us / found[peer]:.3f}</strong>",
                    f'<a href="../{name}">record</a>',
                ]
                for tier, us in found.items() if tier != peer
            ]  # fmt: skip
    head = ["tier", "heads", "batch", "ours, us", "FlashMLA, us", "ours / FlashMLA", ""]
    why = "Both in turns in one process on the same tensors, behind a cold L2, as replayed graphs, the merge included."
    return f"## Decode beside FlashMLA\n\n{why}\n\n{html_table(head, rows)}\n" if rows else ""


def time_cells(t: dict[str, Any]) -> list[str]:
    """Return median and spread of a time."""
    return [f"<strong>{t['median_ms']:.4g}</strong>", f"{t['low_ms']:.4g} to {t['high_ms']:.4g}"]


HEAD = ["tier", "batch", "median, ms", "spread, ms", "how, repeats", "of copy", "of matmul", "plan, ms", "error/budget"]


def ceilings(device: dict[str, Any] | None) -> str:
    """Return what a GPU reached in the run itself, and in which state it was."""
    if not device:
        return ""
    return (
        f" Ceilings of that run: copy {device['copy_bytes_per_second'] / 1e12:.2f} TB/s, {device['matmul_dtype']} "
        f"product "
        f"{device['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s. Driver {device['driver']}, CUDA {device['cuda']}, "
        f"Triton {device['triton']}, {device['sm_clock_mhz']:.0f} MHz, {device['power_w']:.0f} W."
    )


def layers(rec: dict[str, Any]) -> str:
    """Return the table of whole layers, another library's beside ours, where a record has it."""
    rows = [
        [f"<code>{escape(x['name'])}</code>", x["batch"], *time_cells(x["timing"]), f"{x['faster']:.2f}"]
        for x in rec.get("layers", ())
    ]
    head = ["layer", "batch", "median, ms", "spread, ms", "times faster"]
    return f"\nWhole layers, another library's beside ours:\n\n{html_table(head, rows)}" if rows else ""


def section(name: str, rec: dict[str, Any]) -> str:
    """Return the section of one record."""
    model = rec["model"]
    level = "inner kernel" if rec.get("level") == "latent" else "attention"
    axes = f"{model['name']}, N {model['N']}, L {model['L']}, R {model['R']}, {model['dtype']}, {model['layout']} rows"
    workspace = rec["settings"].get("max_workspace_tokens", {}).get("value")
    title = f"{model['name']}, {model['N']} heads, {level}" + (f", workspace of {workspace} rows" if workspace else "")
    made = f"{escape(where(rec['environment']))}; {dated(rec['environment']['commit'])}.{ceilings(rec.get('device'))}"
    return (
        f"### {title}\n\n{axes}. {made}\n\n{html_table(HEAD, bench_rows(rec))}{layers(rec)}\n"
        f"```text\n{command_of(rec)}\n```\n\nRecord: [{name}]({name}).\n"
    )


def kernels(name: str, rec: dict[str, Any]) -> str:
    """Return the table of single Triton kernels."""
    rows = [
        [
            f"<code>{r['name']}</code>", *time_cells(r["kernel"]), percent(r["percent_of_copy"]),
            percent(r["percent_of_matmul"]), f"{r['reference']['median_ms']:.4g}",
        ]
        for r in rec["rows"] if r["status"] == "ok"
    ]  # fmt: skip
    head = ["kernel", "median, ms", "spread, ms", "of copy", "of matmul", "plain PyTorch reference, ms"]
    return (
        f"### Kernels one by one\n\nEach on the real problem of its file. {escape(where(rec['environment']))}; "
        f"{dated(rec['environment']['commit'])}.\n\n{html_table(head, rows)}\n"
        f"```text\npython -m tiers.tier2_triton.benchmark\n```\n\nRecord: [{name}]({name}).\n"
    )


Point = tuple[float, float, float, float, str]  # keys, median, low, high, label


def decode_series(records: list[tuple[str, dict[str, Any]]]) -> tuple[dict[str, list[Point]], float]:
    """Return times of one-token steps by series, and the copy rate: milliseconds against the cached tokens read."""
    series: dict[str, list[Point]] = {}
    rate = 0.0
    for rec in (rec for _, rec in records if rec.get("device") and "model" in rec):
        rate = max(rate, rec["device"]["copy_bytes_per_second"])
        for r in rec["rows"]:
            queries, keys = parse_batch(r["batch"])
            if not r["attend"] or set(queries) != {1}:
                continue
            level = ", inner" if r.get("level") == "latent" else ""
            t, name = r["attend"], f"{r['tier']}, {rec['model']['N']} heads{level}"
            point = (float(sum(keys)), t["median_ms"], t["low_ms"], t["high_ms"], r["batch"])
            series.setdefault(name, []).append(point)
    return {name: sorted(points) for name, points in sorted(series.items())}, rate


class Axes:
    """Both axes logarithmic, in a box that leaves room for their words."""

    width, height, left, top, right, bottom = 640, 400, 60, 14, 14, 48

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """Fit the axes around the points."""
        self.x = math.log2(min(xs)) - 0.4, math.log2(max(xs)) + 0.4
        self.y = math.floor(math.log10(min(ys))), math.log10(max(ys)) + 0.15

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a point in the picture."""
        across = (math.log2(x) - self.x[0]) / (self.x[1] - self.x[0])
        up = (math.log10(y) - self.y[0]) / (self.y[1] - self.y[0])
        return (
            self.left + across * (self.width - self.left - self.right),
            self.height - self.bottom - up * (self.height - self.top - self.bottom),
        )

    def grid(self) -> str:
        """Return lines and numbers of both axes, and what they count."""
        w, h, out = self.width, self.height, []
        for power in range(math.ceil(self.x[0]), math.floor(self.x[1]) + 1):
            x, _ = self.at(2.0**power, 1.0)
            out += [line(x, self.top, x, h - self.bottom, "grey", 0.25)]
            out += [tag("text", tokens(2**power), x=x, y=h - self.bottom + 15, text_anchor="middle")]
        for power in range(self.y[0], math.floor(self.y[1]) + 1):
            for value in (v for step in (1, 2, 5) if math.log10(v := step * 10.0**power) <= self.y[1]):
                _, y = self.at(1.0, value)
                out += [line(self.left, y, w - self.right, y, "grey", 0.25)]
                out += [tag("text", f"{value:g}", x=self.left - 6, y=y + 4, text_anchor="end")]
        middle = (self.left + w) / 2
        out += [tag("text", "cached tokens read in the step", x=middle, y=h - 6, text_anchor="middle")]
        turned = f"translate(13 {h / 2}) rotate(-90)"
        return "".join([*out, tag("text", "milliseconds", transform=turned, text_anchor="middle")])


def tag(name: str, inside: str = "", **attributes: object) -> str:
    """Return an SVG element; lengths have one place."""
    shown = lambda v: f"{v:.1f}" if isinstance(v, float) else escape(v)
    words = "".join(f' {key.replace("_", "-")}="{shown(value)}"' for key, value in attributes.items())
    return f"<{name}{words}>{inside}</{name}>"


def line(x1: float, y1: float, x2: float, y2: float, colour: str, opacity: float = 1.0, **more: object) -> str:
    """Return a line in one of the site's colours."""
    stroke = f"var(--mla-{colour})"
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_opacity=str(opacity), **more)


def mark(i: int, x: float, y: float, title: str) -> str:
    """Return the marker of series i: colour and shape together belong to it alone, for twenty series."""
    fill, shape = f"var(--mla-{COLOURS[i % len(COLOURS)]})", list(SHAPES.values())[i % len(SHAPES)]
    return tag("path", tag("title", escape(title)), d=shape, fill=fill, transform=f"translate({x:.1f} {y:.1f})")


def tokens(n: int) -> str:
    """Return a count of tokens as people write it."""
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k" if n >= 1 << 10 else str(n)


def chart(series: dict[str, list[Point]], rate: float, row_bytes: int) -> str:
    """Return time against cached tokens as SVG, with the time that a copy of the rows takes as a dashed line."""
    copied = lambda keys: keys * row_bytes / rate * 1e3
    xs = [p[0] for points in series.values() for p in points]
    axes = Axes(xs, [*(y for points in series.values() for p in points for y in p[2:4]), copied(min(xs))])
    ends = [(*axes.at(x, copied(x)),) for x in (min(xs), max(xs))]
    out = [axes.grid(), line(*ends[0], *ends[1], "grey", stroke_dasharray="5 4", stroke_width="1.5")]
    for i, (name, points) in enumerate(series.items()):
        aside = 10.0 * (i - (len(series) - 1) / 2)
        for x, y, low, high, batch in points:
            (across, up), (_, bottom), (_, top) = axes.at(x, y), axes.at(x, low), axes.at(x, high)
            out += [line(across + aside, bottom, across + aside, top, COLOURS[i % len(COLOURS)], stroke_width="2")]
            out += [mark(i, across + aside, up, f"{name}, {batch}: {y:.4g} ms, {low:.4g} to {high:.4g}")]
    label = "Time of a decode step against cached tokens"
    box: dict[str, Any] = dict(
        viewBox=f"0 0 {axes.width} {axes.height}", width=axes.width, font_size="13", fill="currentColor"
    )
    drawing = tag("svg", "".join(out), **{"class": "figure"}, role="img", aria_label=label, **box)
    key = lambda i, name: tag("svg", mark(i, 0.0, 0.0, name), width="14", height="14", viewBox="-7 -7 14 14")
    keys = " ".join(f"<span>{key(i, name)} {escape(name)}</span>" for i, name in enumerate(series))
    said = (
        "Series stand side by side at the same number of tokens. Bars: fastest to slowest repeat. Dashed: the time "
        "that copying these rows takes."
    )
    said = f'<span class="keys">{keys}</span>{said}'
    return f'<figure class="wide" markdown="0">\n<div>{drawing}</div>\n<figcaption>{said}</figcaption>\n</figure>\n'


def pages() -> dict[str, str]:
    """Return results/benchmarks.md."""
    records = [(path.name, record(path.name)) for path in sorted(RESULTS.glob("bench-*.json"))]
    timed = [(name, rec) for name, rec in records if "model" in rec and "rows" in rec]
    series, rate = decode_series(timed)
    row_bytes = max((rec["model"]["row_bytes"] for _, rec in timed if rec.get("device")), default=0)
    parts = ["---\nsearch:\n  exclude: true\n---\n", "# Benchmarks\n", METHOD.strip() + "\n"]
    if series:
        parts += [
            "## Time against context\n",
            "Steps in which every request has one new token. One symbol is one batch; point at it for its name.\n",
            chart(series, rate, row_bytes),
        ]
    parts.append(beside(timed))
    on_gpu = [(n, r) for n, r in timed if r.get("device")]
    parts += ["## On GPUs\n", *(section(n, r) for n, r in on_gpu)]
    parts += [kernels(n, r) for n, r in records if "kernel" in (r.get("rows") or [{}])[0]]
    parts += ["## On CPUs\n", *(section(n, r) for n, r in timed if not r.get("device"))]
    return {"results/benchmarks.md": "\n".join(parts)}
