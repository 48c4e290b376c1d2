"""Run cases on a tier and say what is right: the numbers, the memory around them, and what must not have been touched.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from torch import Tensor

from mla.accuracy import Comparison, Reference, compare, reference
from mla.conformance.cases import Case, sample_rows
from mla.conformance.diagnosis import Diagnosis, diagnose, diagnose_status
from mla.conformance.guards import Wrong, check_cache, check_form, check_guards, check_same
from mla.conformance.inputs import Inputs
from mla.conformance.large import care_of, far_check, no_room
from mla.conformance.trial import Trial, attempt, unmirrored
from mla.need import normal_device
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Tier

STATUSES = (
    *("ok", "refused", "not_run"),
    *("mismatch", "not_finite", "wrong_shape", "wrong_dtype", "raised", "timed_out", "crashed"),
)
PASSED_OVER = ("refused", "not_run")
SECOND = "only in the second attend, that of another layer on the same plan, with weights, query and cache of its own"


@dataclass(frozen=True)
class Where:
    """The worst place of a result: `metric` "out" or "lse", the row of the batch, its request (-1: padding), the head.

    `token` counts the request's new tokens from 0.
    """

    metric: str
    row: int
    request: int
    token: int
    head: int

    def __str__(self) -> str:
        return f"{self.metric} of request {self.request}, token {self.token} (row {self.row}), head {self.head}"


@dataclass(frozen=True)
class Result:
    """One case on one tier: `used_out`, `used_lse` are error / budget, right up to 1; `seconds` is one attend's time.

    `status` is one of `STATUSES`; `detail` says in a sentence what is wrong, or why the tier refuses. `level` is
    "attend", or "latent" for an inner kernel. `kind` is the best guess at the kind of fault, one of the zoo's `KINDS`,
    "" for none; `diagnosis` holds what it rests on where there were numbers, `at` the tier's own line where it stopped.
    """

    case: Case
    tier: str
    status: str
    used_out: float = 0.0
    used_lse: float = 0.0
    where: Where | None = None
    seconds: float = 0.0
    detail: str = ""
    level: str = "attend"
    kind: str = ""
    at: str = ""
    diagnosis: Diagnosis | None = None

    @property
    def name(self) -> str:
        """The case's id as `mla check --case` takes it: with "@latent" behind it at that level."""
        return self.case.id if self.level == "attend" else f"{self.case.id}@{self.level}"

    @property
    def ok(self) -> bool:
        """True where the tier ran and everything was right; a refusal is not ok."""
        return self.status == "ok"

    @property
    def failed(self) -> bool:
        """True where the tier ran and something was wrong; neither a refusal nor a case that was not run."""
        return self.status not in ("ok", *PASSED_OVER)

    def record(self) -> dict[str, Any]:
        """Return the result as plain values, the case by its id."""
        diagnosis = None if self.diagnosis is None else self.diagnosis.record()
        plain = dataclasses.replace(self, diagnosis=None)
        return {**asdict(plain), "case": self.case.id, "name": self.name, "diagnosis": diagnosis}


@lru_cache(maxsize=1024)
def truth(case: Case, device: str = "cpu") -> tuple[Reference, tuple[int, ...] | None]:
    """Return the oracle's rows and budget of a case, out (n, N, V), and the heads they cover (None: all).

    Made once per case and shared by all tiers, from `layout.round_trip` of the case's own inputs; nothing of a tier is
    read. Raises ValueError where the budget is not finite: a fault of the case.
    """
    inputs, (rows, heads) = inputs_of(case, device), sample_rows(case)
    pick = (lambda x: x) if heads is None else (lambda x: x[:, heads])
    q, up = Query(*map(pick, inputs.q)), UpProjection(*map(pick, inputs.up))
    keys = [case.cache_layout.round_trip(*pair) for pair in inputs.keys]
    made = reference(
        q, keys, up, inputs.batch, case.dims.softmax_scale, dtype=case.torch_dtype, seed=case.random_seed, rows=rows
    )
    return made, None if heads is None else tuple(heads)


def check(
    tier: Tier, cases: Iterable[Case], *, device: str = "cpu", most_diagnosed: float = math.inf
) -> Iterator[Result]:
    """Yield one result for each case, as it is done. A tier that raises or refuses gets a row, and the run goes on.

    After `most_diagnosed` diagnoses, which take seconds each, wrong numbers are only counted.
    """
    left = most_diagnosed
    for case in cases:
        result = run_case(tier, case, device=device, diagnosed=left > 0)
        left -= result.diagnosis is not None and result.where is not None
        yield result


def run_case(tier: Tier, case: Case, *, device: str = "cpu", diagnosed: bool = True) -> Result:
    """Run one case on a tier in this process: write, attend, judge the numbers and all that must be unchanged.

    Raises only for a fault of the case itself; whatever the tier raises becomes a result. `diagnosed` False spares the
    seconds that a diagnosis of wrong numbers takes.
    """
    device = normal_device(device)
    why = no_room(case, device)
    if why is not None:
        return Result(case, tier.name, "not_run", detail=why)
    given = copy.deepcopy(inputs_of(case, device))  # views stay views of one tensor
    return judge(case, attempt(tier, case, device, given), device, diagnosed)


def judge(case: Case, trial: Trial, device: str, diagnosed: bool = True) -> Result:
    """Say what a trial is worth. Nothing is read but its tensors, and the inputs and the truth made here.

    The status comes from memory first, then from the numbers of the first attend, then from those of the second.
    """
    result = Result(case, trial.tier, trial.status, seconds=trial.seconds, detail=trial.detail, at=trial.at)
    if trial.status in PASSED_OVER:
        return result
    try:
        states = examined(case, trial, device)
    except Wrong as wrong:
        result = dataclasses.replace(
            result, status=wrong.status, used_out=math.inf, used_lse=math.inf, detail=wrong.detail, kind=wrong.kind
        )
        return explained(result, diagnose_status(wrong.status, wrong.detail, wrong.kind))
    made, heads = truth(case, device)
    result, i = weigh(result, states, made, heads)
    if i is None or not diagnosed:
        return result
    if i:  # the numbers of another question explain nothing: something of the first call was kept
        return explained(result, diagnose_status(result.status, result.detail, "memory"))
    return explained(result, diagnose(case, states[i], made, heads, inputs_of(case, device)))


def explained(result: Result, found: Diagnosis | None) -> Result:
    """Return a result with its diagnosis and the kind of fault that comes first there."""
    return dataclasses.replace(result, kind="" if found is None else found.kind, diagnosis=found)


def weigh(
    result: Result, states: Sequence[AttentionState], made: Reference, heads: tuple[int, ...] | None
) -> tuple[Result, int | None]:
    """Complete a result with what its states use of the budget, out (T, N, V) and lse (T, N); None: all are right.

    Where one is wrong, its index is returned and all the numbers are those of the first that is.
    """
    comparisons = [_compare(state, made, heads) for state in states]
    i = next((i for i, c in enumerate(comparisons) if not c.ok), None)
    shown = max(comparisons, key=lambda c: max(c.used_out, c.used_lse)) if i is None else comparisons[i]
    used = {name: getattr(shown, name) for name in ("used_out", "used_lse")}
    if i is None:
        used = {name: max(getattr(c, name) for c in comparisons) for name in used}
    detail = "; ".join(part for part in (shown.detail, SECOND if i else "") if part)
    where = _where(shown, result.case)
    return dataclasses.replace(result, status=shown.status, **used, where=where, detail=detail), i


def examined(case: Case, trial: Trial, device: str) -> tuple[AttentionState, AttentionState]:
    """Return the two answers of a trial, out (T, N, V) and lse (T, N), once all that is beside the numbers is right.

    Raises Wrong for what the tier's own process found, for another form, for a cache that does not hold what was
    written, and for memory that was changed: guard rows, the first answer, the cache, the inputs.
    """
    if trial.status != "ran":
        known = trial.status if trial.status in STATUSES and trial.status != "ok" else "crashed"
        raise Wrong(known, trial.detail, trial.kind)
    need, given = case.need(device), inputs_of(case, device)
    trial = dataclasses.replace(trial, tensors=_complete(trial, case, given, device))
    answers = trial.state("first"), trial.state("second")
    for answer in answers:
        check_form(answer, need, given.batch.num_tokens)
    if case.cache == "far":
        far_check(case, given, trial.tensors["memory.before"])
    else:
        check_cache(case, given, trial.tensors["rows"], trial.tensors["memory.before"])
    check_guards([trial.tensors[name] for name in trial.tensors if name.startswith("guard.")])
    for name, now, was in zip(("out", "lse"), trial.state("later"), answers[0], strict=True):
        check_same(f"{name} of the first attend, which the second one reused as scratch,", now, was)
    check_same("the cache", trial.tensors["memory.after"], trial.tensors["memory.before"])
    for name, was in given.tensors():
        check_same(name, trial.tensors[f"input.{name}"], was)
    return answers[0], unmirrored(case, answers[1], given.q)


def _complete(trial: Trial, case: Case, given: Inputs, device: str) -> dict[str, Tensor]:
    """Return the tensors on the device of the judge; raises Wrong where one that every trial has is missing."""
    parts = ("out", "lse") if case.lse else ("out",)
    names = {f"{which}.{part}" for which in ("first", "second", "later") for part in parts}
    names |= {f"guard.{i}" for i in range(2 * len(parts))} | {f"input.{name}" for name, _ in given.tensors()}
    names |= {"memory.before", "memory.after"} | ({"rows"} if case.cache != "far" else set())
    missing = sorted(names - set(trial.tensors))
    if missing:
        raise Wrong("crashed", f"its process did not hand over {', '.join(missing)}", "form")
    return {name: x.to(device) for name, x in trial.tensors.items()}


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """Return counts by status, the worst error / budget of out and LSE with their cases, and a verdict.

    The verdict is "failed" where a case failed, "incomplete" where one was not run, "ok" where at least one was right,
    and "refused" where none ran. `kinds` counts the best guesses of the failures.
    """
    results = list(results)
    counts = Counter(r.status for r in results)
    failed = [r for r in results if r.failed]
    worst: dict[str, Any] = {}
    for metric in ("used_out", "used_lse"):
        top = max((r for r in results if r.status not in PASSED_OVER), key=lambda r: getattr(r, metric), default=None)
        worst[metric] = (
            None if top is None else {"used": getattr(top, metric), "case": top.name, "where": str(top.where or "")}
        )
    verdict = "failed" if failed else "incomplete" if counts["not_run"] else "ok" if counts["ok"] else "refused"
    return {
        "verdict": verdict,
        "cases": len(results),
        **{s: counts[s] for s in STATUSES},
        **worst,
        "seconds": sum(r.seconds for r in results),
        "failed": [r.name for r in failed],
        "kinds": dict(Counter(r.kind for r in failed if r.kind).most_common()),
    }


@lru_cache(maxsize=2)
def inputs_of(case: Case, device: str) -> Inputs:
    """Return the inputs of a case, q.nope (T, N, P) and so on, that the judge keeps: a tier is given copies."""
    return care_of(case).inputs(case, device)


def _compare(state: AttentionState, made: Reference, heads: tuple[int, ...] | None) -> Comparison:
    """Compare the reference's heads with their budget, all for finite values; places name the tier's own heads."""
    if heads is None:
        return compare(state, made)
    at = list(heads)
    within = compare(AttentionState(state.out[:, at], None if state.lse is None else state.lse[:, at]), made)
    there = lambda place: None if place is None else (place[0], heads[place[1]])
    within = dataclasses.replace(within, out_at=there(within.out_at), lse_at=there(within.lse_at))
    N, V = state.out.shape[1:]
    rows, pairs = state.out.new_zeros(0), state.out.new_zeros(0, N)
    finite = compare(state, Reference(rows.long(), pairs.new_zeros(0, N, V), pairs, pairs, pairs, rows.bool()))
    return within if finite.ok else finite


def _where(c: Comparison, case: Case) -> Where | None:
    metric, at = ("out", c.out_at) if c.used_out >= c.used_lse else ("lse", c.lse_at)
    if at is None:
        return None
    starts = [0, *accumulate(case.batch.query_lens)]
    request = next((b for b in range(len(starts) - 1) if starts[b] <= at[0] < starts[b + 1]), -1)
    return Where(metric, at[0], request, at[0] - starts[request], at[1])
