"""The equivalence dashboard, from the committed records of `mla check` and `mla compare`.

Rows are cases by input family, columns are tiers on devices, a cell is error/budget. Wrong, refused, not run and absent
look different from right and from each other. Where records overlap, the newest commit's cell is shown.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pieces import RESULTS, behind, dated, escape, html_table, record, table, where

import tiers

REFUSED, NOT_RUN = "refused", "not_run"


@dataclass
class Board:
    """Everything that the records say: cells by (case, column), columns in order, sentences of refusals by number."""

    cells: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    records: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    families: dict[str, str] = field(default_factory=dict)
    sentences: dict[str, int] = field(default_factory=dict)


def device_of(rec: dict[str, Any]) -> str:
    """Return a short name of where a record was made."""
    device = rec["environment"]["device"]
    return "CPU" if device == "cpu" else device.removeprefix("NVIDIA ").removeprefix("AMD ")


FAMILIES = (
    "randn", "peaked", "needle", "needle_first", "needle_middle", "needle_last", "needle_end", "equal_keys",
    "large_logits",
)  # fmt: skip
ABOUT = {
    "randn": "random queries and keys, the usual thing and the most forgiving",
    "peaked": "random, with scores spread enough that few keys matter",
    "needle": "one key outweighs all others and must be found",
    "needle_first": "the needle lies in the first page",
    "needle_middle": "the needle lies in a middle page",
    "needle_last": "the needle lies in the last page",
    "needle_end": "the needle is the last key that the row sees",
    "equal_keys": "all keys are equal, so that the LSE is a logarithm of a count",
    "large_logits": "scores of a size at which a softmax without maximum overflows",
}


def family_of(case: str) -> str:
    """Return the input family that a case's id names."""
    parts = case.partition("@")[0].split("-")
    found = [part for part in parts if part in FAMILIES]
    return found[0] if found else "other"


def commits_ago(rec: dict[str, Any]) -> int:
    """Return the age of a record in commits; one of a commit that is not known counts as the oldest."""
    found = behind(rec["environment"]["commit"])
    return 10**6 if found is None else found[0]


def column_order(column: str) -> tuple[int, str]:
    """Return a key that sorts columns as the registry names tiers, those of files and other packages last."""
    known, name = tiers.names(), re.split(r"[: ]", column)[0]
    return (known.index(name) if name in known else len(known)), column


@cache
def board() -> Board:
    """Read all records, oldest commit first."""
    b = Board()
    loaded = [(path.name, record(path.name)) for path in sorted(RESULTS.glob("check-*.json"))]
    loaded = [(name, rec) for name, rec in loaded if rec.get("tiers") and "results" in rec]
    b.records = sorted(loaded, key=lambda item: (-commits_ago(item[1]), item[0]))
    for number, (_, rec) in enumerate(b.records, 1):
        for r in rec["results"]:
            inner = ", inner kernel" if r["level"] == "latent" else ""
            column = f"{r['tier']} on {device_of(rec)}{inner}"
            case = r["case"]
            b.families[case] = family_of(case)
            b.cells[case, column] = {**r, "record": number}
            if r["status"] == REFUSED:
                b.sentences.setdefault(r["detail"] or "; ".join(r.get("reasons", [])), len(b.sentences) + 1)
    b.columns = sorted({column for _, column in b.cells}, key=column_order)
    return b


def used(r: dict[str, Any]) -> float:
    """Return the share of its budget that a result uses, the larger of out and LSE."""
    return max(float(r["used_out"]), float(r["used_lse"]))


def number(x: float) -> str:
    """Return a share with two places, as ∞ where it has no end."""
    return f"{x:.2f}" if x < 100 else "∞" if math.isinf(x) else f"{x:.0f}"


def shown(r: dict[str, Any] | None, sentences: dict[str, int]) -> str:
    """Return one cell as HTML."""
    if r is None:
        return '<td class="cell-not-run" title="in no record">·</td>'
    if r["status"] == REFUSED:
        n = sentences[r["detail"] or "; ".join(r.get("reasons", []))]
        return f'<td class="cell-refused">refused <a href="../dashboard/#refused-{n}">{n}</a></td>'
    if r["status"] == NOT_RUN:
        return f'<td class="cell-not-run" title="{escape(r["detail"])}">not run</td>'
    title = f"out {number(float(r['used_out']))}, LSE {number(float(r['used_lse']))}, record {r['record']}"
    if r["status"] == "ok":
        return f'<td class="cell-ok" title="{title}">{number(used(r))}</td>'
    return f'<td class="cell-failed" title="{title}">{r["status"].replace("_", " ")} {number(used(r))}</td>'


def gathered(rows: list[dict[str, Any]]) -> str:
    """Return the summary cell of many results: the worst error/budget and how many were right."""
    if not rows:
        return '<td class="cell-not-run" title="in no record">·</td>'
    ran = [r for r in rows if r["status"] not in (REFUSED, NOT_RUN)]
    wrong = [r for r in ran if r["status"] != "ok"]
    notes = [f"{len(part)} {word}" for word, status in (("refused", REFUSED), ("not run", NOT_RUN))
             if (part := [r for r in rows if r["status"] == status])]  # fmt: skip
    if wrong:
        return f'<td class="cell-failed">{len(wrong)} of {len(rows)} wrong</td>'
    if not ran:
        kind = "cell-refused" if rows[0]["status"] == REFUSED else "cell-not-run"
        return f'<td class="{kind}">{", ".join(notes)}</td>'
    also = f"<br>{', '.join(notes)}" if notes else ""
    return f'<td class="cell-ok">{number(max(map(used, ran)))}<br><small>{len(ran)} right{also}</small></td>'


def column_head(column: str) -> str:
    """Return a column title in lines."""
    tier, _, place = column.partition(" on ")
    return f"<code>{escape(tier)}</code><br>{escape(place).replace(', ', '<br>')}"


def summary(b: Board) -> str:
    """Return the table of families and tiers."""
    by: dict[tuple[str, str], list] = defaultdict(list)
    for (case, column), r in b.cells.items():
        by[b.families[case], column].append(r)
    rows = [
        [f'<a href="../cases-{f}/">{f}</a>', *(gathered(by[f, c]) for c in b.columns)]
        for f in (*FAMILIES, "other") if any((f, c) in by for c in b.columns)
    ]  # fmt: skip
    return html_table(["family", *map(column_head, b.columns)], rows)


def score() -> str:
    """Return the fault score and the planted faults that no case shows."""
    rec = record("check-faults-cpu.json")
    missed = [f for f in rec["results"] if not f["caught"] and not f["only_large"]]
    large = sorted({f["fault"] for f in rec["results"] if f["only_large"]})
    kinds: dict[str, list] = defaultdict(list)
    for f in rec["results"]:
        kinds[f["kind"]].append(f)
    rows = [
        (
            f"`{kind}`",
            len(fs),
            sum(f["caught"] for f in fs),
            f"{number(min((float(f['used']) for f in fs if f['caught'] and f['used'] is not None), default=0.0))}",
        )
        for kind, fs in kinds.items()
    ]
    only = (
        f" {', '.join(f'`{name}`' for name in large)}: only the suite `large` can show it, on a GPU." if large else ""
    )
    return (
        '<div class="score" markdown="0">\n'
        f"<div><strong>{rec['caught']} of {rec['counted']}</strong> plantings caught</div>\n"
        f"<div><strong>{len(missed)}</strong> missed</div>\n"
        f"<div><strong>{len({f['fault'] for f in rec['results']})}</strong> faults, {len(kinds)} kinds, in whole "
        f"tiers and in inner kernels</div>\n"
        "</div>\n\n"
        f"The suite is itself on trial. Each fault is one mistake in a right kernel; the suite must reject it.{only} "
        f"Made by `mla check --faults` on {escape(where(rec['environment']))}; "
        f"{dated(rec['environment']['commit'])}.\n\n"
        '??? note "By kind of fault"\n\n'
        + indented(table(("kind", "planted", "caught", "least error/budget of a caught one"), rows))
    )


def indented(text: str) -> str:
    """Return text as the body of a folded block."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines()) + "\n"


def traces() -> str:
    """Return the table of replays."""
    rows = []
    for path in sorted(RESULTS.glob("compare-*.json")):
        rec = record(path.name)
        trace = rec["trace"]
        for t in rec["tiers"]:
            css = "cell-ok" if t["status"] == "ok" else "cell-refused" if t["status"] == "refused" else "cell-failed"
            share = lambda part: number(float(part["used"] or 0))
            rows.append([
                f"<code>{escape(t['name'])}</code>", escape(trace["name"].rsplit("/", 1)[-1]), f"{trace['requests']}",
                f"{trace['prompt_tokens']:,}", f"{trace['output_tokens']:,}",
                f'<td class="{css}">{t["status"]}</td>', share(t["out"]), share(t["lse"]), f"{t['rows']:,}",
                escape(dated(rec["environment"]["commit"])),
            ])  # fmt: skip
    head = [
        "tier",
        "trace",
        "requests",
        "prompt tokens",
        "output tokens",
        "verdict",
        "out",
        "LSE",
        "audited rows",
        "age",
    ]
    return html_table(head, rows)


def command_of(rec: dict[str, Any], tier: str) -> str:
    """Return the command that made a record, from its settings."""
    flags = [f"--{k.replace('_', '-')} {s['value']}" for k, s in rec["settings"].items() if s["source"] == "flag"]
    pins = [f"--pin {pin}" for pin in rec.get("pins", [])]
    return " ".join(["mla check", tier, f"--suite {rec['suite']}", *pins, *flags])


def records_table(b: Board) -> str:
    """Return the numbered records: where and when each cell comes from."""
    rows = []
    for n, (name, rec) in enumerate(b.records, 1):
        tiers = " ".join(t["spec"] for t in rec["tiers"])
        counted = sum(t["cases"] for t in rec["tiers"])
        rows.append([
            str(n), f'<td class="say"><a href="../{name}">{name}</a></td>', f"{counted:,}",
            escape(dated(rec["environment"]["commit"])),
            f'<td class="say">{escape(where(rec["environment"]))}</td>', f'<td '
            f'class="say"><code>{escape(command_of(rec, tiers))}</code></td>',
        ])  # fmt: skip
    return html_table(["record", "file", "results", "age", "device and versions", "command"], rows)


MEANINGS = {
    '<td class="cell-ok">0.31</td>': "right, by 0.31 of the error that is allowed there; the larger of output and LSE",
    '<td class="cell-failed">mismatch 42</td>': "wrong: 42 times what is allowed, or not finite, or another shape",
    '<td class="cell-refused">refused 1</td>': "the tier said no, in the sentence of that number",
    '<td class="cell-not-run">not run</td>': "the machine had no room for the case; never counted as right",
    '<td class="cell-not-run">·</td>': "in no record: nobody asked",
}
LEGEND = html_table(["cell", "means"], [[cell, f'<td class="say">{text}</td>'] for cell, text in MEANINGS.items()])


def dashboard(b: Board) -> str:
    """Return results/dashboard.md."""
    said = "\n".join(
        f'<p id="refused-{n}" markdown="0"><strong>{n}.</strong> {escape(text)}</p>' for text, n in b.sentences.items()
    )
    parts = [
        "---\nhide: [toc]\nsearch:\n  exclude: true\n---\n",
        "# Equivalence dashboard\n",
        "Is every tier right, on every case that anybody ran? A tier is compared with a float64 oracle and never "
        "with another "
        "tier; the error that is allowed is computed from the case ([Numerics and "
        "budgets](../explanation/numerics.md)). This "
        "page is written from the records in `docs/results/`, and from nothing else.\n",
        "## Can the judge be trusted\n", score(),
        "## Families and tiers\n",
        "The worst error/budget of a family, and how many cases were right. A family's name opens its cases.\n",
        summary(b), LEGEND,
        "## Request traces\n",
        "`mla compare` replays a trace through the tiers, with prefix sharing, chunked prefill and preemption, "
        "and holds sampled "
        "rows of every step against the oracle.\n",
        traces(),
        "## Where the cells come from\n",
        "Age is that of the commit that a record was made at, counted to the commit that this site was built from.\n",
        records_table(b),
    ]  # fmt: skip
    if said:
        parts += ["## Refusals\n", said]
    return "\n".join(parts)


def family_page(b: Board, family: str) -> str:
    """Return the page of one family's cases."""
    cases = sorted(c for c, f in b.families.items() if f == family)
    columns = [c for c in b.columns if any((case, c) in b.cells for case in cases)]
    rows = [
        [f"<code>{escape(case)}</code>", *(shown(b.cells.get((case, c)), b.sentences) for c in columns)]
        for case in cases
    ]
    return (
        f"---\nhide: [toc]\nsearch:\n  exclude: true\n---\n# Cases: {family}\n\n"
        f"{ABOUT.get(family, 'Cases of another kind.').capitalize()}. {len(cases)} cases; what a cell says is told "
        f"on the "
        "[dashboard](dashboard.md#families-and-tiers). Point at a number for its two halves and its record.\n\n"
        + html_table(["case", *map(column_head, columns)], rows)
    )


def pages() -> dict[str, str]:
    """Return the dashboard and a page for each family."""
    b = board()
    found = {"results/dashboard.md": dashboard(b)}
    for family in sorted(set(b.families.values())):
        found[f"results/cases-{family}.md"] = family_page(b, family)
    return found
