"""A conformance run as data: a record for each tier and each case, JUnit XML, and what changed since another run."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mla.commands.options import Asked
from mla.conformance import Result, summary
from mla.conformance.diagnosis import combine
from mla.errors import bad

Record = dict[str, Any]
VERDICTS = ("failed", "incomplete", "ok", "refused")  # of several tiers: the first that one of them has
PASSED_OVER = ("refused", "not_run")
ERRORS = ("raised", "timed_out", "crashed")
CHANGE = 2.0


def check_record(
    asked: Asked,
    by_tier: Mapping[str, tuple[str, Sequence[Result], Sequence[str]]],
    where: Mapping[str, Any],
    again: Callable[[str, str], str],
) -> Record:
    """Describe a conformance run: a summary for each tier by its name, and a record for each case.

    `by_tier` has the word that named the tier, its results and its notes; `where` is the environment, one for all
    cases; `again` gives the command that runs one case again.
    """
    tiers = [_tier_record(name, *found) for name, found in by_tier.items()]
    results = [
        {
            "spec": spec,
            **result.record(),
            "seed": result.case.seed,
            "again": again(spec, result.name),
        }
        for spec, found, _ in by_tier.values()
        for result in found
    ]
    verdicts = {tier["verdict"] for tier in tiers}
    verdict = next(v for v in VERDICTS if v in verdicts)
    suite = asked.suite if not asked.cases else "named cases"
    pins = {"pins": list(asked.pins)} if asked.pins else {}
    about = {"suite": suite, **pins, "seed": asked.seed, "verdict": verdict, "environment": where}
    return {**about, "tiers": tiers, "results": results}


def _tier_record(name: str, spec: str, results: Sequence[Result], notes: Sequence[str]) -> Record:
    families: Record = {}
    for family in sorted({r.case.family for r in results}):
        mine = [r for r in results if r.case.family == family]
        ran = [r for r in mine if r.status not in PASSED_OVER]
        families[family] = {
            "cases": len(mine),
            "ok": sum(r.ok for r in mine),
            "failed": sum(r.failed for r in mine),
            "refused": sum(r.status == "refused" for r in mine),
            "not_run": sum(r.status == "not_run" for r in mine),
            "used_out": max((r.used_out for r in ran), default=None),
            "used_lse": max((r.used_lse for r in ran), default=None),
        }
    levels = sorted({r.level for r in results})
    return {
        "tier": name,
        "spec": spec,
        "levels": levels,
        "notes": list(notes),
        **summary(results),
        "guesses": [asdict(g) for g in combine(r.diagnosis for r in results if r.diagnosis)],
        "families": families,
    }


def read_record(path: str) -> Record:
    """Return the record that an earlier `mla check --json` wrote; raises ValueError where the file holds none."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        for r in record["results"]:
            r |= {name: float(r[name]) for name in ("used_out", "used_lse")}  # inf was written as text
            r |= {name: r[name] for name in ("tier", "name", "status")}
        return {**record, "environment": dict(record["environment"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        got, fix = f"{path} ({type(error).__name__}: {error})", "make one with mla check --json FILE"
        raise bad("--baseline", expected="a record written by mla check --json", got=got, fix=fix) from error


def compare_records(path: str, earlier: Mapping, now: Mapping) -> Record:
    """Say what changed since the record of an earlier run: cases by "TIER CASE".

    new_failures fail now and did not before, fixed ones are the reverse; lost ones were right and did not run now;
    changed ones are right in both and use more than twice, or less than half, of the budget share they used; gone and
    new cases are in one run only.
    """
    before, after = ({f"{r['tier']} {r['name']}": r for r in record["results"]} for record in (earlier, now))
    both = [name for name in after if name in before]
    right = [n for n in both if before[n]["status"] == after[n]["status"] == "ok"]
    used = {n: tuple(max(r[n]["used_out"], r[n]["used_lse"]) for r in (before, after)) for n in right}
    passed = lambda r: r["status"] == "ok"
    failed = lambda r: r["status"] not in ("ok", *PASSED_OVER)
    return {
        "file": path,
        "new_failures": [n for n in after if failed(after[n]) and not (n in before and failed(before[n]))],
        "still_failing": [n for n in both if failed(after[n]) and failed(before[n])],
        "fixed": [n for n in both if passed(after[n]) and failed(before[n])],
        "lost": [n for n in both if passed(before[n]) and after[n]["status"] in PASSED_OVER],
        "changed": {n: {"before": a, "now": b} for n, (a, b) in used.items() if max(a, b) > CHANGE * min(a, b)},
        "gone": [n for n in before if n not in after],
        "new": [n for n in after if n not in before],
        "environment": _differences(earlier, now),
    }


def _differences(earlier: Mapping, now: Mapping) -> dict[str, Any]:
    """What of the environment is another than it was, as [then, now]."""
    a, b = earlier["environment"], now["environment"]
    return {name: [a.get(name), b.get(name)] for name in sorted({*a, *b}) if a.get(name) != b.get(name)}


def write_junit(record: Record, path: str) -> None:
    """Write a run as JUnit XML: wrong results as failures, what stopped as errors, refused and not run as skipped."""
    root = ElementTree.Element("testsuites", name="mla check")
    for tier in record["tiers"]:
        mine = [r for r in record["results"] if r["tier"] == tier["tier"]]
        kinds = [_junit_kind(r["status"]) for r in mine]
        suite = ElementTree.SubElement(
            root, "testsuite", name=_clean(tier["tier"]), tests=str(len(mine)), time=f"{tier['seconds']:.6f}"
        )
        for name, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(name, str(kinds.count(kind)))
        about = ElementTree.SubElement(suite, "properties")
        for name, value in record["environment"].items():
            ElementTree.SubElement(about, "property", name=name, value=_clean(str(value)))
        for result, kind in zip(mine, kinds, strict=True):
            seconds = result["seconds"] if math.isfinite(result["seconds"]) else 0.0
            case = ElementTree.SubElement(
                suite, "testcase", classname=_clean(tier["tier"]), name=result["name"], time=f"{seconds:.6f}"
            )
            if kind:
                said = _clean("; ".join(part for part in (sentence_of(result), result["at"]) if part))
                found = ElementTree.SubElement(case, kind, message=said)
                if kind != "skipped":
                    found.set("type", result["status"])
                    found.text = _clean(f"{said}\n{result['again']}")
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def sentence_of(result: Mapping) -> str:
    """Return what a case's record says is wrong: the diagnosis, and what was found beside it."""
    diagnosis = result["diagnosis"]
    parts = (diagnosis["sentence"] if diagnosis and diagnosis["worst"] else "", result["detail"])
    return "; ".join(part for part in parts if part) or result["status"]


def _junit_kind(status: str) -> str:
    if status == "ok":
        return ""
    return "skipped" if status in PASSED_OVER else "error" if status in ERRORS else "failure"


def _clean(text: str) -> str:
    """Without the characters that XML has no place for."""
    return "".join(
        c if c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff") else "?"
        for c in text
    )
