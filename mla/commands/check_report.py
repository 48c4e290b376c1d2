"""How a conformance run reads: verdict, families of inputs, failures with what they look like, what changed."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

from mla.commands.check_record import sentence_of
from mla.commands.output import Block, Finding, Grid
from mla.commands.report import count, ratio

Record = Mapping[str, Any]
BUDGET_LINE = "error/budget: the worst of the family, right is at most 1."
FAULT_LINE = "caught by: the first case that fails, of those tried in the order smoke, full; guess: of its diagnosis."
LONGEST = 400  # characters of a sentence; the record has all
ALIKE = 3  # failures that look alike, printed
LISTED = 8  # names of cases in one line
REASONS = 12  # of refusals


def check_blocks(record: Record, shown: int | None = None) -> list[Block]:
    """Lay out a conformance run, tier by tier, with its first `shown` failures; None: all, and a row for each case."""
    blocks: list[Block] = []
    for tier in record["tiers"]:
        mine = [r for r in record["results"] if r["tier"] == tier["tier"]]
        blocks += [_head(tier, record), _families(tier), BUDGET_LINE]
        if shown is None:
            blocks.append(_cases(mine))
        blocks += [*_failures(mine, shown), *_passed_over(mine)]
    return [*blocks, *(_changes(record["baseline"]) if record.get("baseline") else [])]


def _head(tier: Record, record: Record) -> dict[str, str]:
    named = tier["tier"] if tier["tier"] == tier["spec"] else f"{tier['spec']}: {tier['tier']}"
    parts = [
        record["suite"],
        count(tier["cases"], "case"),
        *(["both levels"] if len(tier["levels"]) > 1 else tier["levels"]),
    ]
    parts += list(record.get("pins", ()))
    parts += [f"seed + {record['seed']}"] * bool(record["seed"]) + [f"{tier['seconds']:.1f} s in attend"]
    found = {s: tier[s] for s in ("ok", *_wrong(tier), "refused", "not_run")}
    verdict = ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in found.items() if n or s == "ok")
    head = {"tier": named, "suite": ", ".join(parts), "verdict": f"{tier['verdict']}: {verdict}"}
    if tier["guesses"] and not tier["guesses"][0]["because"].startswith("the status is"):
        head["looks like"] = guesses_of(tier["guesses"])
    return head | {f"note{'' if i == 0 else ' ' * i}": note for i, note in enumerate(tier["notes"])}


def _wrong(tier: Record) -> list[str]:
    from mla.conformance.runner import PASSED_OVER, STATUSES

    return [s for s in STATUSES if s not in ("ok", *PASSED_OVER) and tier[s]]


def _families(tier: Record) -> Grid:
    keys = ["cases", "ok", "failed", "refused", *(["not_run"] if tier["not_run"] else [])]
    rows = [
        (name, *(str(f[key]) for key in keys), ratio(f["used_out"]), ratio(f["used_lse"]))
        for name, f in tier["families"].items()
    ]
    titles = ("inputs", *(key.replace("_", " ") for key in keys), "out error\n/budget", "LSE error\n/budget")
    return Grid(titles, rows)


def _cases(results: Sequence[Record]) -> Grid:
    rows = [
        (r["name"], r["status"], ratio(r["used_out"]), ratio(r["used_lse"]), r["kind"] or "-", _where(r))
        for r in results
    ]
    return Grid(("case", "status", "out error\n/budget", "LSE error\n/budget", "looks like", "worst place"), rows)


def _where(result: Record) -> str:
    where = result["where"]
    return "{metric} of request {request}, token {token} (row {row}), head {head}".format(**where) if where else "-"


def _failures(results: Sequence[Record], shown: int | None) -> Iterator[Block]:
    """Yield the first failures, those that look alike together, then how many more there are of what."""
    from mla.conformance.runner import PASSED_OVER

    failed = [r for r in results if r["status"] not in ("ok", *PASSED_OVER)]
    every: dict[str, list[Record]] = {}
    for r in [r for r in failed if r["diagnosis"]] or failed:
        every.setdefault(_group(r), []).append(r)
    first = failed if shown is None else [r for mine in every.values() for r in mine[:ALIKE]][:shown]
    rest = [r for r in failed if not any(r is other for other in first)]
    groups: dict[str, list[Record]] = {}
    for r in first:
        groups.setdefault(_group(r), []).append(r)
    number = 0
    for mine in sorted(groups.values(), key=lambda g: -len(g)):
        for r in mine:
            number += 1
            yield Finding(
                f"{number}. {_group(r)}: {shorten(sentence_of(r), LONGEST, placeholder=' ...')}", _fields(r), r["again"]
            )
    if rest:
        kinds = "; ".join(f"{n} {kind}" for kind, n in Counter(map(_group, rest)).most_common())
        yield f"{count(len(rest), 'more failure')}: {kinds}. --all prints them."


def _group(result: Record) -> str:
    return f"{result['status']}, {result['kind']}" if result["kind"] else result["status"]


def _fields(result: Record) -> dict[str, str]:
    d = result["diagnosis"]
    fields = {"case": result["name"]} | ({"at": result["at"]} if result["at"] else {})
    if result["where"] is None:
        told = d["guesses"] if d and d["guesses"] and not d["guesses"][0]["because"].startswith("the status is") else ()
        return fields | ({"looks like": guesses_of(told[:1])} if told else {})
    fields["error/budget"] = f"out {ratio(result['used_out'])}, LSE {ratio(result['used_lse'])}"
    if d is None:
        return {**fields, "worst": _where(result)}
    for name in ("first", "worst"):
        if d[name]:
            fields[name] = _place(d[name])
    fields["values"] = f"{d['metric']} {d['got']:.6g}, of the oracle {d['expected']:.6g}"
    fields["looks like"] = guesses_of(d["guesses"])
    return fields


def guesses_of(guesses: Sequence[Record]) -> str:
    """Write the best guesses with their scores and reasons."""
    shown = [f"{g['kind']} {g['score']:.2f} ({g['because']})" for g in guesses[:3] if g["score"] >= 0.05]
    return "; ".join(shown) or "nothing that was tried"


def _place(place: Record) -> str:
    where = "request {request}, token {token} (row {row}), head {head}".format(**place)
    last = "key in page {page} of the request, position {position_in_page}".format(**place)
    return where if place["page"] < 0 else f"{where}, {last}"


def _passed_over(results: Sequence[Record]) -> list[Block]:
    """What was refused or not run, reason by reason: a case may have several."""
    blocks: list[Block] = []
    for status in ("refused", "not_run"):
        mine = [r for r in results if r["status"] == status]
        said = Counter(
            sentence for r in mine for sentence in set(re.split(r"(?<=\.) (?=\S)", r["detail"]))
        ).most_common()
        lines = [f"{count(n, 'case')}: {sentence}" for sentence, n in said[:REASONS]]
        lines += [f"and {count(len(said) - REASONS, 'other reason')}"] if len(said) > REASONS else []
        what = f"{count(len(mine), 'case')} {status.replace('_', ' ')}"
        if len({r["detail"] for r in mine}) == 1:
            blocks.append(f"{what}: {mine[0]['detail']}")
        elif mine:
            blocks.append("\n".join([f"{what}; a case may have several reasons:", *lines]))
    return blocks


def _changes(changes: Record) -> list[Block]:
    """What changed since an earlier run, each list with its first names."""
    fields = {"baseline": changes["file"]}
    labels = {
        "new_failures": "new failures", "still_failing": "still failing", "fixed": "fixed", "lost": "no longer run",
        "gone": "gone", "new": "new cases",
    }  # fmt: skip
    for key, label in labels.items():
        fields[label] = _names(changes[key])
    pairs = [f"{name}: {ratio(u['before'])} -> {ratio(u['now'])}" for name, u in changes["changed"].items()]
    fields["error x 2"] = _names(pairs)
    environment = [f"{name}: {then} -> {now}" for name, (then, now) in changes["environment"].items()]
    return [fields | ({"run on": "; ".join(environment)} if environment else {})]


def _names(names: Sequence[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)}{': ' if names else ''}{', '.join(names[:LISTED])}{more}"


def fault_blocks(record: Record) -> list[Block]:
    """Lay out the score of the suite: how many planted faults it caught, and which case caught what."""
    missed = f"missed: {', '.join(record['missed'])}" if record["missed"] else "none missed"
    later, planted = sorted(set(record["only_large"])), len({r["fault"] for r in record["results"]})
    levels = sorted({r["level"] for r in record["results"]})
    head = {
        "planted": f"{count(planted, 'fault')}, level {' and '.join(levels)}",
        "score": f"{record['caught']} of {record['counted']} caught, {missed}, {record['seconds']:.1f} s",
    } | ({"only large": f"{', '.join(later)}: only the suite large can show them, which was not run"} if later else {})
    titles = ("fault", "kind", "level", "status", "guess", "tried", "seconds", "caught by")
    rows = [
        (
            *(r["fault"], r["kind"], r["level"], r["status"], r.get("guess") or "-"),
            *(str(r["tried"]), f"{r['seconds']:.2f}", r["case"] or "-"),
        )
        for r in record["results"]
    ]
    return [head, Grid(titles, rows), FAULT_LINE]
