"""Running and judging apart: what a trial must hold, what a verdict is made of, and answers that were kept."""

import dataclasses
import math
import traceback

import pytest
import torch
from torch import Tensor

import tiers
from mla.adapters import from_attend
from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.conformance import Case, Result, check, run_case, spec, summary
from mla.conformance.guards import Wrong
from mla.conformance.inputs import make_inputs
from mla.conformance.isolate import tried
from mla.conformance.latent import run_latent_case
from mla.conformance.runner import STATUSES, examined, inputs_of, judge
from mla.conformance.trial import MOST_MIRRORED, Trial, attempt, line_of, mirrored, place, unmirrored
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier

CASE = Case(spec("mixed_small"), dtype="f32", page_size=16)
right = tiers.get("template")


def trial_of(tier: Tier = right, case: Case = CASE) -> Trial:
    return attempt(tier, case, "cpu", make_inputs(case))


def changed(trial: Trial, name: str, change) -> Trial:
    """The trial with a changed copy of one tensor."""
    tensor = trial.tensors[name].clone()
    change(tensor)
    return dataclasses.replace(trial, tensors={**trial.tensors, name: tensor})


@pytest.fixture(scope="module")
def good() -> Trial:
    trial = trial_of()
    assert judge(CASE, trial, "cpu").ok
    return trial


def flip(x: Tensor) -> None:
    x[tuple(n - 1 for n in x.shape)] = 7


@pytest.mark.parametrize(
    ("name", "sentence", "kind"),
    [
        ("first.out", "out of the first attend, which the second one reused as scratch, was changed", "memory"),
        ("later.lse", "lse of the first attend, which the second one reused as scratch, was changed", "memory"),
        ("guard.0", "rows before or after the caller's out buffers were written", "memory"),
        ("guard.3", "rows before or after the caller's out buffers were written", "memory"),
        ("memory.after", "the cache was changed", "memory"),
        ("input.q.nope", "q.nope was changed", "memory"),
        ("input.W_UV", "W_UV was changed", "memory"),
        ("input.batch.block_table", "batch.block_table was changed", "memory"),
        ("rows", "write changed slot", "write"),
    ],
)
def test_memory_that_must_not_change_is_looked_at_by_the_judge(good, name, sentence, kind):
    result = judge(CASE, changed(good, name, flip), "cpu")
    assert (result.status, result.kind) == ("mismatch", kind)
    assert result.detail.startswith(sentence)
    assert result.used_out == math.inf


def test_a_cache_that_does_not_hold_what_was_written(good):
    slot = int(make_inputs(CASE).owned_slots()[5])
    spoil = lambda rows: rows[slot // 16, slot % 16].zero_()
    result = judge(CASE, changed(good, "rows", spoil), "cpu")
    assert (
        result.detail == f"kv_c read back from slot {slot} (page {slot // 16}, row {slot % 16}) is not what was written"
    )


def test_a_trial_without_a_tensor_or_with_a_status_of_its_own_is_never_right(good):
    for name in good.tensors:
        part = {n: x for n, x in good.tensors.items() if n != name}
        with pytest.raises(Wrong) as error:
            examined(CASE, dataclasses.replace(good, tensors=part), "cpu")
        assert (error.value.status, name in error.value.detail) == ("crashed", True)
    for status in ("ok", "excellent", ""):
        assert judge(CASE, dataclasses.replace(good, status=status), "cpu").status == "crashed"


def test_the_numbers_are_judged_in_both_attends(good):
    result = judge(CASE, changed(good, "second.out", lambda out: out[7, 2].add_(1.0)), "cpu", diagnosed=False)
    assert (result.status, result.where.metric, result.where.row, result.where.head) == ("mismatch", "out", 7, 1)
    assert result.detail.startswith("only in the second attend")
    double = changed(changed(good, "first.lse", lambda lse: lse.add_(1.0)), "later.lse", lambda lse: lse.add_(1.0))
    result = judge(CASE, double, "cpu", diagnosed=False)
    assert (result.status, result.where.metric, result.detail) == ("mismatch", "lse", "")


def test_a_mirrored_question_has_the_mirrored_answer():
    given = inputs_of(CASE, "cpu")
    held = torch.ones(2, 16, 40)
    q, up, rows = mirrored(CASE, given.q, given.up, held)
    assert torch.equal(rows, -held)
    assert torch.equal(q.nope[:, 1], -given.q.nope[:, 0])
    assert torch.equal(q.pe[:, 0], -given.q.pe[:, 2])
    assert torch.equal(up.W_UK[:, 2], given.up.W_UK[:, 1])
    assert torch.equal(up.W_UV[:, 0], -2 * given.up.W_UV[:, 2])
    far, _, same = mirrored(dataclasses.replace(CASE, cache="far"), given.q, given.up, held)
    assert torch.equal(far.pe, -q.pe)
    assert same is held
    # strides as a model's projections leave them: views of one tensor, the latent axis innermost
    assert (q.nope.stride(), up.W_UK.stride()) == (given.q.nope.stride(), given.up.W_UK.stride())
    trial = trial_of()
    first, second = trial.state("first"), unmirrored(CASE, trial.state("second"), given.q)
    assert not torch.equal(trial.state("second").out, first.out)
    assert torch.allclose(first.out, second.out, rtol=1e-5, atol=1e-6)
    assert torch.allclose(first.lse, second.lse, rtol=1e-6)
    long = Query(torch.empty(1).expand(MOST_MIRRORED // 4 + 1, 1, 1), given.q.pe)
    assert mirrored(CASE, long, given.up, held) == (long, given.up, held)
    assert unmirrored(CASE, first, long) is first


def keeps(key) -> Tier:
    """A tier that answers from memory where it has seen the key before."""
    kept: dict = {}
    function = right.function

    def attend(
        q: Query, cache: PagedLatentCache, batch: AttentionBatch, up: UpProjection, need: Need
    ) -> AttentionState:
        name = key(q, batch)
        if name not in kept:
            kept[name] = function(q, cache, batch, up, need)
        return AttentionState(*(x.clone() for x in kept[name]))

    return from_attend("keeps", attend)


@pytest.mark.parametrize(
    "key",
    [lambda q, batch: q.nope.shape, lambda q, batch: id(batch), lambda q, batch: batch.seq_lens_host],
    ids=["shape", "batch", "lengths"],
)
def test_an_answer_that_was_kept_from_an_earlier_call_is_found(key):
    result = run_case(keeps(key), CASE, diagnosed=False)
    assert result.status == "mismatch"
    assert result.detail.startswith("only in the second attend")


def test_a_tier_that_keeps_answers_by_the_query_is_right():
    assert run_case(keeps(lambda q, batch: q.nope.nan_to_num().sum().item()), CASE).ok


def test_inputs_are_the_tiers_own_and_new_for_every_case():
    seen: list[tuple[int, float]] = []

    def attend(q, cache, batch, up, need):
        state = right.function(q, cache, batch, up, need)
        seen.append((id(q.nope), float(q.nope.nansum())))
        up.W_UK.zero_()
        return state

    spoils = from_attend("spoils", attend)
    assert run_case(spoils, CASE).detail == "W_UK was changed"
    assert run_case(right, CASE).ok
    run_case(spoils, dataclasses.replace(CASE, seed=1))
    assert len({total for _, total in seen}) == len(seen) == 4


def test_a_result_in_memory_that_the_next_call_uses_is_found():
    class Scratch(Ends):
        held: AttentionState | None = None

        def attend(
            self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
        ) -> AttentionState:
            state = right.attend(q, cache, prepared, plan)
            self.held = self.held or state
            for mine, now in zip(self.held, state, strict=True):
                mine.copy_(now)
            return self.held if out is None else right.attend(q, cache, prepared, plan, out)

    result = run_case(Scratch(None), CASE)
    assert (result.status, result.kind) == ("mismatch", "memory")
    assert result.detail == "out of the first attend, which the second one reused as scratch, was changed"


class Ends:
    """A tier whose attend returns what it is told to."""

    name = "ends"
    new_cache, write, prepare, plan = right.new_cache, right.write, right.prepare, right.plan

    def __init__(self, returns) -> None:
        self.returns = returns

    def why_not(self, need: Need) -> list[str]:
        return []

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        return self.returns(right.attend(q, cache, prepared, plan, out))


@pytest.mark.parametrize(
    ("returns", "status"),
    [
        (lambda s: None, "wrong_shape"),
        (lambda s: tuple(s), "wrong_shape"),
        (lambda s: AttentionState(s.out[:-1], s.lse), "wrong_shape"),
        (lambda s: AttentionState(s.out, s.lse.T), "wrong_shape"),
        (lambda s: AttentionState(s.out, None), "wrong_shape"),
        (lambda s: AttentionState(torch.nn.Parameter(s.out), s.lse), "wrong_shape"),
        (lambda s: AttentionState(s.out.bfloat16(), s.lse), "wrong_dtype"),
        (lambda s: AttentionState(s.out, s.lse.double()), "wrong_dtype"),
        (lambda s: AttentionState(s.out.to("meta"), s.lse), "wrong_dtype"),
        (lambda s: (s, s.out.mul_(math.nan))[0], "not_finite"),
        (lambda s: AttentionState(s.out.clone(), s.lse), "mismatch"),
        (lambda s: {}["no such key"], "raised"),
    ],
)
def test_every_wrong_form_has_its_status(returns, status):
    assert run_case(Ends(returns), CASE, diagnosed=False).status == status


def test_a_raised_error_has_its_line_in_the_tiers_file():
    def attend(*given):
        raise RuntimeError("no kernel image")

    result = run_case(from_attend("raises", attend), CASE)
    assert (result.status, result.detail) == ("raised", "RuntimeError: no kernel image")
    assert result.at == f"test_runner.py, line {attend.__code__.co_firstlineno + 1}, in attend"
    with pytest.raises(AttributeError) as error:
        make_inputs(None)  # type: ignore[arg-type]
    assert line_of(error.tb).startswith("test_runner.py, line ")
    assert place([(traceback.__file__, 3, "f"), (torch.__file__, 4, "g"), ("<string>", 1, "h")]) == ""


def test_a_summary_tells_right_from_refused_not_run_and_failed():
    of = lambda *statuses: summary([Result(CASE, "t", status) for status in statuses])
    assert of("ok", "refused")["verdict"] == "ok"
    assert of("refused", "refused")["verdict"] == "refused"
    assert of("ok", "not_run", "refused")["verdict"] == "incomplete"
    assert of("not_run")["verdict"] == "incomplete"
    for status in set(STATUSES) - {"ok", "refused", "not_run"}:
        found = of("ok", status, "not_run")
        assert (found["verdict"], found[status], found["failed"]) == ("failed", 1, [CASE.id])
        assert Result(CASE, "t", status).failed
    assert not any(Result(CASE, "t", status).failed for status in ("ok", "refused", "not_run"))


def test_failures_after_the_most_diagnosed_are_only_counted():
    wrong = from_attend("wrong", lambda *given: AttentionState(*(x * 2 for x in right.function(*given))))
    cases = [dataclasses.replace(CASE, seed=seed, batch=spec("1q1s5")) for seed in range(3)]
    results = list(check(wrong, cases, most_diagnosed=1))
    assert [r.diagnosis is not None for r in results] == [True, False, False]
    assert [r.status for r in results] == ["mismatch"] * 3
    record = results[0].record()
    assert (record["diagnosis"]["sentence"], record["kind"]) == (results[0].diagnosis.sentence, results[0].kind)
    assert (record["case"], record["name"]) == (cases[0].id, cases[0].id)


def test_a_tier_is_asked_for_its_notes_and_for_its_inner_kernel():
    given = make_inputs(CASE)
    assert tried(right, "notes", CASE, given, "cpu").detail == ""
    assert tried(right, "latent", CASE, given, "cpu").status == "refused"

    class Noted(Ends):
        def notes(self, need: Need) -> list[str]:
            return ["The LSE has base 2.", f"Pages of {need.page_size} rows."]

    assert tried(Noted(None), "notes", CASE, given, "cpu").detail == "The LSE has base 2.\nPages of 16 rows."


@pytest.mark.parametrize("level", ["attend", "latent"])
def test_an_exception_that_cannot_say_what_it_is_is_a_row(level):
    class Mute(Exception):
        def __str__(self):
            raise self

    def broken(*_):
        raise Mute

    if level == "attend":
        result = run_case(from_attend("mute", broken), CASE)
    else:
        result = run_latent_case(broken, CASE)
    assert (result.status, result.detail) == ("raised", "Mute: (its message cannot be read)")
