"""The inner level: a raw kernel alone, absorbed query in and latent output out, against its own truth and budget.

The oracle starts from the same rounded q_latent that the kernel gets, and its replicas round only the probabilities and
the output: an inner kernel may not hide behind the rounding of the projections around it.
Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, R rope.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from mla.accuracy import Reference, latent_reference
from mla.adapters import LatentKernel, from_latent
from mla.cache import PagedLatentCache
from mla.conformance.cases import Case, sample_rows
from mla.conformance.diagnosis import Diagnosis, diagnose, diagnose_status
from mla.conformance.guards import (
    Wrong,
    check_repeats,
    check_same,
    fill_cache,
    run_repeats,
    uninitialised_memory_is_nan,
)
from mla.conformance.inputs import Inputs
from mla.conformance.large import care_of, no_room
from mla.conformance.runner import PASSED_OVER, STATUSES, Result, explained, inputs_of, truth, weigh
from mla.conformance.trial import Trial, alive, line_of, said_by
from mla.need import Need, normal_device
from mla.projections import absorb_query, project_values
from mla.state import AttentionState

WhyNot = Callable[[Need], list[str]]


def run_latent_case(
    kernel: LatentKernel,
    case: Case,
    *,
    device: str = "cpu",
    name: str = "kernel",
    why_not: WhyNot | None = None,
    diagnosed: bool = True,
) -> Result:
    """Run one case on a raw kernel in this process, q_latent (T, N, L) in and out (T, N, L) back; as `run_case` does.

    Raises only for a fault of the case itself; whatever the kernel raises becomes a result of level "latent".
    """
    device = normal_device(device)
    why = no_room(case, device)
    if why is not None:
        return Result(case, name, "not_run", detail=why, level="latent")
    given = copy.deepcopy(inputs_of(case, device))
    trial = attempt_latent(kernel, case, device, given, name=name, why_not=why_not)
    return judge_latent(case, trial, device, diagnosed)


def latent_query(case: Case, given: Inputs) -> tuple[Tensor, Tensor]:
    """Return q_latent (T, N, L), rounded to the case's dtype, and q_pe (T, N, R): strided views of one tensor."""
    q_latent = absorb_query(given.q.nope, given.up.W_UK).to(case.torch_dtype)
    both = torch.cat([q_latent, given.q.pe], dim=-1)
    return both[..., : case.dims.L], both[..., case.dims.L :]


def attempt_latent(
    kernel: LatentKernel, case: Case, device: str, given: Inputs, *, name: str = "kernel", why_not: WhyNot | None = None
) -> Trial:
    """Run a kernel on inputs that nobody else uses, q_pe (T, N, R) and so on; whatever it raises is in the trial.

    The second run has the heads moved on by one, so that an answer which was kept from the first one is found.
    """
    trial, need = Trial(name), case.need(device)
    try:
        reasons = why_not(need) if why_not else []
        if reasons:
            return dataclasses.replace(trial, status="refused", detail=" ".join(reasons))
        with uninitialised_memory_is_nan(device):
            seconds = _run(kernel, case, need, given, trial)
    except Wrong as wrong:
        return dataclasses.replace(trial, status=wrong.status, detail=wrong.detail, kind=wrong.kind)
    except (Exception, SystemExit) as error:  # as in `attempt`
        status, at = "raised" if alive(device) else "crashed", line_of(error.__traceback__)
        return dataclasses.replace(trial, status=status, detail=said_by(error), kind="form", at=at)
    return dataclasses.replace(trial, seconds=seconds)


def judge_latent(case: Case, trial: Trial, device: str, diagnosed: bool = True) -> Result:
    """Say what a trial of a kernel is worth: nothing is read but its tensors, and inputs and truth made here.

    `diagnosed` False spares the seconds that a diagnosis of wrong numbers takes.
    """
    result = Result(
        case, trial.tier, trial.status, seconds=trial.seconds, detail=trial.detail, at=trial.at, level="latent"
    )
    if trial.status in PASSED_OVER:
        return result
    try:
        states = _examined(case, trial, device)
    except Wrong as wrong:
        result = dataclasses.replace(
            result, status=wrong.status, used_out=math.inf, used_lse=math.inf, detail=wrong.detail, kind=wrong.kind
        )
        return explained(result, diagnose_status(wrong.status, wrong.detail, wrong.kind))
    result, i = weigh(result, states, *latent_truth(case, device))
    if i is None or not diagnosed:
        return result
    if i > 0:  # right at first, and then what was kept from the first run
        return explained(result, diagnose_status(result.status, result.detail, "memory"))
    return explained(result, _diagnosis(case, states[i], device))


def _diagnosis(case: Case, state: AttentionState, device: str) -> Diagnosis | None:
    """Diagnose a wrong answer, out (T, N, L) and lse (T, N), by what a whole tier makes of it, or None."""
    given, (made, heads) = inputs_of(case, device), truth(case, device)
    whole = AttentionState(project_values(state.out, given.up.W_UV).to(case.torch_dtype), state.lse)
    _, i = weigh(Result(case, "", "ok"), [whole], made, heads)
    return None if i is None else diagnose(case, whole, made, heads, given)


@lru_cache(maxsize=1024)
def latent_truth(case: Case, device: str = "cpu") -> tuple[Reference, tuple[int, ...] | None]:
    """Return the oracle's rows and budget at this level, out (n, N, L), and the heads they cover (None: all).

    Made once per case from `layout.round_trip` of its inputs. Raises ValueError where the budget is not finite.
    """
    given, (rows, heads) = inputs_of(case, device), sample_rows(case)
    q_latent, q_pe = (x if heads is None else x[:, heads] for x in latent_query(case, given))
    batch, visible = case.batch, given.batch.row_kv_lens.cpu()
    owners = [b for b, query_len in enumerate(batch.query_lens) for _ in range(query_len)] + [-1] * batch.pad_tokens
    chosen, parts = range(batch.num_tokens) if rows is None else rows, []
    for b in sorted({owners[i] for i in chosen}, key=lambda b: (b < 0, b)):  # padding comes last, as in the batch
        index = torch.tensor([i for i in chosen if owners[i] == b])
        at, S = index.to(device), int(visible[index].max()) if b >= 0 else 0
        keys = given.keys[b] if b >= 0 else (given.new_kv_c, given.new_k_pe)
        kv_c, k_pe = (x[:S] for x in case.cache_layout.round_trip(*keys))
        made = latent_reference(
            q_latent[at], q_pe[at], kv_c, k_pe, given.batch.row_kv_lens[at], case.dims.softmax_scale,
            dtype=case.torch_dtype, seed=case.random_seed + b,
        )  # fmt: skip
        parts.append(dataclasses.replace(made, rows=index))
    return _joined(parts, q_latent.shape[1], case.dims.L, device), None if heads is None else tuple(heads)


def _joined(parts: list[Reference], N: int, L: int, device: str) -> Reference:
    pairs = torch.zeros(0, N, dtype=torch.float64, device=device)
    nothing = Reference(pairs[:, 0].long().cpu(), pairs.new_zeros(0, N, L), pairs, pairs, pairs, pairs[:, 0].bool())
    names = [field.name for field in dataclasses.fields(Reference)]
    return Reference(*(torch.cat([getattr(p, name) for p in parts or [nothing]]) for name in names))


def _run(kernel: LatentKernel, case: Case, need: Need, given: Inputs, trial: Trial) -> float:
    """Fill the trial's tensors and return the seconds of the first run; raises Wrong."""
    care, tensors = care_of(case), trial.tensors
    fill = care.fill if case.cache == "far" else fill_cache
    cache = fill(from_latent(trial.tier, kernel), case, given, need.device)  # a kernel only reads
    q_latent, q_pe = latent_query(case, given)
    tensors["memory.before"] = care.seen(cache, given)
    seconds, first = _timed(kernel, q_latent, q_pe, cache, given, need)
    _keep(tensors, "first", first, need, q_latent)
    tensors |= {"input.q_latent": q_latent, "input.q_pe": q_pe}
    turned = torch.cat([q_latent, q_pe], -1).roll(1, dims=1)
    _, second = _timed(kernel, turned[..., : need.L], turned[..., need.L :], cache, given, need)
    _keep(tensors, "second", second, need, q_latent)
    _keep(tensors, "later", first, need, q_latent)
    again = lambda: _timed(kernel, q_latent, q_pe, cache, given, need)[1]
    check_repeats(run_repeats(case, trial.state("first"), again))
    tensors["memory.after"] = care.seen(cache, given)
    tensors |= {f"input.{name}": x for name, x in given.tensors()}
    return seconds


def _timed(
    kernel: LatentKernel, q_latent: Tensor, q_pe: Tensor, cache: PagedLatentCache, given: Inputs, need: Need
) -> tuple[float, AttentionState]:
    wait = torch.cuda.synchronize if cache.data.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    state = kernel(q_latent, q_pe, cache, given.batch, need)
    wait()
    return time.perf_counter() - start, state


def _keep(tensors: dict[str, Tensor], name: str, state: AttentionState, need: Need, q_latent: Tensor) -> None:
    """Check the form of a kernel's answer and keep copies of out (T, N, L) and lse (T, N)."""
    if not isinstance(state, AttentionState):
        raise Wrong("wrong_shape", f"the kernel returned a {type(state).__name__}, expected an AttentionState", "form")
    shape, wide = tuple(q_latent.shape), need.compute_dtype
    expected = {"out": (shape, {q_latent.dtype, wide}), "lse": (shape[:2], {wide})}
    for part, (right, dtypes) in expected.items():
        x = getattr(state, part)
        if x is None and part == "lse" and not need.lse:
            continue
        if type(x) is not Tensor or tuple(x.shape) != right:
            found = f"{type(x).__name__} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise Wrong("wrong_shape", f"{part} is {found}, expected a Tensor {right}", "form")
        if x.dtype not in dtypes or normal_device(x.device) != need.device:
            names = " or ".join(sorted(map(str, dtypes)))
            raise Wrong("wrong_dtype", f"{part} is {x.dtype} on {x.device}, expected {names} on {need.device}", "form")
        tensors[f"{name}.{part}"] = x.clone()


def _examined(case: Case, trial: Trial, device: str) -> tuple[AttentionState, AttentionState]:
    """Return the two answers of a trial, out (T, N, L) and lse (T, N), once all that is beside the numbers is right."""
    if trial.status != "ran":
        known = trial.status if trial.status in STATUSES and trial.status != "ok" else "crashed"
        raise Wrong(known, trial.detail, trial.kind or "form")
    given = inputs_of(case, device)
    q_latent, q_pe = latent_query(case, given)
    inputs = {"q_latent": q_latent, "q_pe": q_pe, **dict(given.tensors())}
    names = {"first.out", "second.out", "later.out", "memory.before", "memory.after", *(f"input.{n}" for n in inputs)}
    missing = sorted(names - set(trial.tensors))
    if missing:
        raise Wrong("crashed", f"its process did not hand over {', '.join(missing)}", "form")
    trial = dataclasses.replace(trial, tensors={name: x.to(device) for name, x in trial.tensors.items()})
    first, second, later = (trial.state(which) for which in ("first", "second", "later"))
    for name, now, was in zip(("out", "lse"), later, first, strict=True):
        check_same(f"{name} of the first run, which the second one reused as scratch,", now, was)
    check_same("the cache", trial.tensors["memory.after"], trial.tensors["memory.before"])
    for name, was in inputs.items():
        check_same(name, trial.tensors[f"input.{name}"], was)
    lse = None if second.lse is None else second.lse.roll(-1, dims=1)
    return first, AttentionState(second.out.roll(-1, dims=1), lse)
