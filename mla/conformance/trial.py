"""One try of a tier on a case: what it answered, and the memory around that. Facts only; `runner.judge` judges them.

The first attend is the case itself. The second is that of another layer on the same plan, with a cache of its own:
query and rows negated, heads moved on by one, W_UV times -2, into buffers of the caller. The scores are the same and
the output is twice the first's, head by head, so its truth is known, and whoever hands out what he kept is found.
Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mla.cache import PagedLatentCache
from mla.conformance.cases import Case
from mla.conformance.guards import (
    Wrong,
    check_form,
    check_repeats,
    fill_cache,
    guarded_buffers,
    planned,
    run_repeats,
    uninitialised_memory_is_nan,
)
from mla.conformance.inputs import Inputs
from mla.conformance.large import care_of
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier

OURS, STANDARD = Path(__file__).resolve().parents[1], Path(traceback.__file__).resolve().parent
MOST_MIRRORED = 1 << 28  # bytes of a query: a longer one is not copied for the second attend


@dataclass(frozen=True, eq=False)
class Trial:
    """What a tier did with a case.

    `status` is "ran", "refused", or what was found without a look at the numbers, with a sentence as `detail`, the kind
    of fault it means and the tier's own line as `at`. `tensors` by name: first.out (T, N, V) and first.lse (T, N) of
    the first attend, later.* the same ones after the second, second.* in the caller's buffers and guard.* around them,
    rows (pages, page_size, storage_width) of a filled cache, memory.before and memory.after of attend, input.*.
    """

    tier: str
    status: str = "ran"
    detail: str = ""
    kind: str = ""
    at: str = ""
    seconds: float = 0.0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def state(self, which: str) -> AttentionState:
        """Return the AttentionState of an attend, out (T, N, V) and lse (T, N) or None."""
        return AttentionState(self.tensors[f"{which}.out"], self.tensors.get(f"{which}.lse"))


def attempt(tier: Tier, case: Case, device: str, given: Inputs) -> Trial:
    """Run a tier on inputs that nobody else uses, q.nope (T, N, P) and so on; whatever it raises is in the trial."""
    trial, need = Trial(str(tier.name)), case.need(device)
    try:
        reasons = tier.why_not(need)
        if reasons:
            return replace(trial, status="refused", detail=" ".join(reasons))
        with uninitialised_memory_is_nan(device):
            seconds = _run(tier, case, need, given, trial)
    except Wrong as wrong:
        return replace(trial, status=wrong.status, detail=wrong.detail, kind=wrong.kind)
    except (Exception, SystemExit) as error:  # whatever a stranger's tier raises, an exit too, is a row
        status, at = "raised" if alive(device) else "crashed", line_of(error.__traceback__)
        return replace(trial, status=status, detail=said_by(error), kind="form", at=at)
    return replace(trial, seconds=seconds)


def _run(tier: Tier, case: Case, need: Need, given: Inputs, trial: Trial) -> float:
    """Fill the trial's tensors and return the seconds of the first attend; raises Wrong."""
    care, T, tensors = care_of(case), given.batch.num_tokens, trial.tensors
    if case.cache == "far":
        cache = care.fill(tier, case, given, need.device)
    else:
        cache = fill_cache(tier, case, given, need.device)
        tensors["rows"] = cache.data.clone()
    tensors["memory.before"] = care.seen(cache, given)
    prepared = tier.prepare(given.up, need)
    plan = planned(tier, case, need, prepared, given.batch)
    seconds, first = _attend(tier, given.q, cache, prepared, plan, None)
    _keep(tensors, "first", first, need, T)
    q, up, rows = mirrored(case, given.q, given.up, cache.data)
    buffers, guards = guarded_buffers(need, T)
    _, second = _attend(tier, q, replace(cache, data=rows), tier.prepare(up, need), plan, buffers)
    if second is not buffers:
        raise Wrong("mismatch", "attend(out=...) did not return the caller's own state", "form")
    _keep(tensors, "second", second, need, T)
    _keep(tensors, "later", first, need, T)
    tensors |= {f"guard.{i}": guard for i, guard in enumerate(guards)}
    again = lambda: _attend(tier, given.q, cache, prepared, plan, None)[1]
    check_repeats(run_repeats(case, trial.state("first"), again))
    tensors["memory.after"] = care.seen(cache, given)
    tensors |= {f"input.{name}": x for name, x in given.tensors()}
    return seconds


def _keep(tensors: dict[str, Tensor], name: str, state: AttentionState, need: Need, T: int) -> None:
    """Check the form of a state and keep copies of out (T, N, V) and lse (T, N)."""
    if not isinstance(state, AttentionState):
        raise Wrong("wrong_shape", f"attend returned a {type(state).__name__}, expected an AttentionState", "form")
    check_form(state, need, T)
    tensors |= {f"{name}.{part}": x.clone() for part, x in state._asdict().items() if x is not None}


def mirrored(case: Case, q: Query, up: UpProjection, rows: Tensor) -> tuple[Query, UpProjection, Tensor]:
    """Return another layer's question: nope (T, N, P), pe (T, N, R), W_UK (L, N, P), W_UV (L, N, V) and its rows.

    Query and rows (pages, page_size, storage_width) are negated, heads move on by one, W_UV is times -2. Rows of a far
    cache stay, and so does the query's sign there; a query that is too long to be copied comes as it is, with all else.
    """
    if _as_it_is(q):
        return q, up, rows
    P, sign = q.nope.shape[-1], _sign(case)
    both = sign * torch.cat(q, -1).roll(1, dims=1)
    weights = torch.cat([up.W_UK, -2 * up.W_UV], -1).roll(1, dims=1).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    query, layer = Query(both[..., :P], both[..., P:]), UpProjection(weights[..., :P], weights[..., P:])
    return query, layer, rows if sign > 0 else -rows


def unmirrored(case: Case, state: AttentionState, q: Query) -> AttentionState:
    """Return the answer to the first question from that to the mirrored one, out (T, N, V) and lse (T, N)."""
    if _as_it_is(q):
        return state
    lse = None if state.lse is None else state.lse.roll(-1, dims=1)
    return AttentionState(state.out.roll(-1, dims=1) / (-2 * _sign(case)), lse)


def _sign(case: Case) -> int:
    """What the second question's query and rows are multiplied by: rows of a far cache are too many to be copied."""
    return 1 if case.cache == "far" else -1


def _as_it_is(q: Query) -> bool:
    return q.nope.numel() * q.nope.element_size() > MOST_MIRRORED


def said_by(error: BaseException) -> str:
    """Return an exception of a tier as a sentence; its own words may raise too."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be read)"
    return text if "Fix:" in text else f"{type(error).__name__}: {text}"


def line_of(found: TracebackType | None) -> str:
    """Return the innermost line of a traceback that lies in none of our own files nor in a package, "" for none."""
    frames = [(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_tb(found))]
    return place(frames)


def place(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the first (file, line, function), innermost first, of a file that is neither ours nor a package's."""
    for file, line, name in frames:
        path = Path(file)
        inside = any(folder in path.resolve().parents for folder in (OURS, STANDARD)) or "site-packages" in path.parts
        if not inside and path.is_file():
            return f"{path.name}, line {line}, in {name}"
    return ""


def _attend(
    tier: Tier, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None
) -> tuple[float, AttentionState]:
    """Return the seconds of one attend, waited for, and its result."""
    wait = torch.cuda.synchronize if cache.data.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    state = tier.attend(q, cache, prepared, plan, out)
    wait()
    return time.perf_counter() - start, state


def alive(device: str) -> bool:
    """Whether the device still answers: after an illegal access, a GPU refuses everything to this process."""
    try:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
