"""The score of the suite: which planted fault is caught, by which case, after how many.

Axes: none; cases and results are those of `mla.conformance.runner`.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mla.conformance.cases import NEEDLES, Case, roundings
from mla.conformance.latent import run_latent_case
from mla.conformance.runner import Result, run_case
from mla.conformance.suites import suite
from mla.conformance.zoo.fault import SUITES, Fault
from mla.errors import bad

LEVELS = ("attend", "latent")


@dataclass(frozen=True)
class Caught:
    """What became of one fault: the `result` of the first case that failed, None where none did.

    `suite` is the suite of that case, `tried` counts the cases up to and with it, `seconds` is what they took.
    `only_large` marks a fault that was not looked for because no suite that can show it was run.
    """

    fault: Fault
    level: str
    result: Result | None
    suite: str
    tried: int
    seconds: float
    only_large: bool = False

    @property
    def caught(self) -> bool:
        """True where a case failed."""
        return self.result is not None

    def record(self) -> dict[str, Any]:
        """Return the row as plain values: the fault, and the case that caught it with status, error / budget, guess."""
        f, r = self.fault, self.result
        row: dict[str, Any] = {
            "fault": f.name,
            "kind": f.kind,
            "about": f.about,
            "source": f.source,
            "level": self.level,
        }
        row |= {"caught": self.caught, "only_large": self.only_large, "suite": self.suite, "tried": self.tried}
        row |= {"seconds": self.seconds, "case": None, "status": "not_run" if self.only_large else "missed"}
        if r is not None:
            row |= {"case": r.case.id, "status": r.status, "used": max(r.used_out, r.used_lse), "guess": r.kind}
        return row


def score(
    faults: Iterable[Fault],
    *,
    suites: Sequence[str] = ("smoke", "full"),
    level: str = "attend",
    device: str = "cpu",
    diagnosed: bool = False,
) -> Iterator[Caught]:
    """Yield for each fault what the first failing case says, trying the suites that can show it until one does.

    Faults that exist as no kernel are passed over at level "latent". Cases come in `quick_order`, and before them those
    that caught most faults so far. With `diagnosed` the case that caught a fault runs once more,
    for the guess at its kind. Raises ValueError for an unknown level or suite.
    """
    if not set(suites) <= set(SUITES):
        raise bad("suites", expected=f"some of {', '.join(SUITES)}", got=repr(suites), fix="('smoke', 'full')")
    if level not in LEVELS:
        raise bad("level", expected=f"one of {', '.join(LEVELS)}", got=repr(level), fix="'attend' for whole tiers")
    made: dict[str, list[Case]] = {}
    catches: Counter[str] = Counter()
    for fault in faults:
        if level == "latent" and fault.edit is None:
            continue
        able = [name for name in suites if SUITES.index(name) >= SUITES.index(fault.suite)]
        if not able:
            yield Caught(fault, level, None, "", 0, 0.0, only_large=True)
            continue
        start, tried, found, where = time.perf_counter(), 0, None, ""
        for name in able:
            cases = made.get(name) or made.setdefault(name, quick_order(suite(name)))
            for case in sorted(cases, key=lambda case: -catches[case.id]):
                tried += 1
                result = run_fault(fault, case, level=level, device=device)
                if result.failed:
                    found, where = result, name
                    break
            if found is not None:
                break
        if found is not None:
            catches[found.case.id] += 1
            if diagnosed:
                found = run_fault(fault, found.case, level=level, device=device, diagnosed=True)
        yield Caught(fault, level, found, where, tried, time.perf_counter() - start)


def run_fault(
    fault: Fault, case: Case, *, level: str = "attend", device: str = "cpu", diagnosed: bool = False
) -> Result:
    """Run one case on a new tier, or kernel, with a fault."""
    if level == "latent":
        return run_latent_case(fault.kernel(), case, device=device, name=fault.name, diagnosed=diagnosed)
    return run_case(fault.tier(), case, device=device, diagnosed=diagnosed)


def summary_of(caught: Iterable[Caught]) -> dict[str, Any]:
    """Return how many faults were looked for and caught, and the names of those missed or shown by `large` only."""
    rows = list(caught)
    counted = [c for c in rows if not c.only_large]
    return {
        "faults": len(rows),
        "counted": len(counted),
        "caught": sum(c.caught for c in counted),
        "missed": [c.fault.name for c in counted if not c.caught],
        "only_large": [c.fault.name for c in rows if c.only_large],
        "cases": sum(c.tried for c in rows),
        "seconds": sum(c.seconds for c in rows),
    }


def quick_order(cases: Iterable[Case]) -> list[Case]:
    """Return cases in an order that finds faults soon: first those that show most of what the others did not show.

    Among equals, and behind them, cases with a needle and few roundings come first.
    """
    left = sorted(cases, key=_needle_and_small)
    first: list[Case] = []
    seen: set[tuple[str, object]] = set()
    while left:
        case = max(left, key=lambda case: len(_traits(case) - seen))
        if _traits(case) <= seen:
            break
        first.append(case)
        seen |= _traits(case)
        left.remove(case)
    return first + left


def _traits(case: Case) -> set[tuple[str, object]]:
    batch, visible = case.batch, case.batch.visible()
    names = ("dtype", "family", "slots", "page_size", "lse", "cache", "plan")
    return {(name, getattr(case, name)) for name in names} | {
        ("dims", case.dims.name),
        ("mask", batch.mask),
        ("padded", batch.pad_tokens > 0),
        ("rows without keys", 0 in visible),
        ("rows that are not written", bool(batch.unwritten)),
        ("as many tokens as heads", batch.num_tokens == case.dims.N),
        ("repeated", case.repeats > 0),
    }


def _needle_and_small(case: Case) -> tuple[bool, int]:
    # a case of few keys shows little: those of a hundred thousand roundings and somewhat more catch most
    cost = roundings(case) * (1 + case.repeats)
    return cost < 100_000 or case.family not in NEEDLES, cost
