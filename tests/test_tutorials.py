"""Every tutorial, run twice: as a reader meets it, and with the solutions in place. Collected by `make tutorials`."""

import importlib
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("[0-9][0-9]-*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
LN2 = math.log(2)

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("MLA_TUTORIALS") != "1",
        reason="running ten notebooks twice takes minutes: `make tutorials` does (MLA_TUTORIALS=1)",
    ),
    pytest.mark.filterwarnings("ignore"),  # of jupyter's own packages; what the notebooks print is looked at
]


@pytest.fixture(scope="module")
def tool():
    """The module docs/tools/notebooks.py."""
    yield from imported(ROOT / "docs" / "tools", "notebooks")


@pytest.fixture(scope="module")
def verdicts():
    """The module tutorials/check/verdict.py."""
    yield from imported(ROOT / "tutorials", "check.verdict")


def imported(folder: Path, name: str):
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def named(path: Path) -> str:
    return path.stem


def alike(old: str, new: str) -> bool:
    """Equal but for numbers, and numbers to 5 % or both tiny: rounding differs between machines."""
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return False
    pairs = zip(map(float, NUMBER.findall(old)), map(float, NUMBER.findall(new)), strict=True)
    return all(abs(a - b) <= max(0.05 * abs(a), 1e-6) for a, b in pairs)


# The notebooks


def test_there_are_ten_tutorials_and_a_solution_for_each():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{i:02d}" for i in range(10)]
    assert sorted(p.stem for p in (ROOT / "tutorials" / "solutions").glob("*.py")) == [p.stem for p in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_tutorial_has_its_parts_and_no_trace_of_a_machine(tool, path):
    assert tool.faults(path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_as_a_reader_meets_it_every_check_says_not_yet(tool, path):
    outcome = tool.execute(tool.read(path))
    assert not outcome.error
    assert outcome.verdicts
    assert set(outcome.verdicts.values()) == {"not yet"}
    stale = []
    for old, new in zip(tool.read(path).cells, outcome.notebook.cells, strict=True):
        if "varies" not in old.metadata.get("tags", []) and not alike(tool.text_of(old), tool.text_of(new)):
            stale.append(f"{old.source[:80]}: {tool.text_of(old)[:200]} became {tool.text_of(new)[:200]}")
    assert not stale, "run docs/tools/notebooks.py again"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_with_the_solutions_every_check_says_ok(tool, path):
    notebook = tool.read(path)
    tool.solve(notebook, tool.solutions_of(path))
    outcome = tool.execute(notebook)
    assert not outcome.error
    assert {name: text for name, text in outcome.verdicts.items() if text.split(":")[0] != "ok"} == {}


# The plumbing: what must be found is found

BREAKS = {
    "a title": lambda nb: nb.cells[0].update(source="no title"),
    "and three lines": lambda nb: nb.cells[0].update(source=nb.cells[0].source.replace("\n- ", "\n", 1)),
    "how many minutes": lambda nb: nb.cells[0].update(source=nb.cells[0].source.replace(" minutes", "")),
    "exercises": lambda nb: [cell.metadata.pop("tags", None) for cell in nb.cells[-12:]],
    "Now you can read": lambda nb: nb.cells.pop(),
    "outputs of a whole run": lambda nb: code(nb)[3].update(execution_count=None),
    "a figure": lambda nb: [cell.update(outputs=[o for o in cell.outputs if "data" not in o]) for cell in code(nb)],
    "at most 400000": lambda nb: code(nb)[0].outputs.append(stream("x" * 400_000)),
    "a path of a machine": lambda nb: code(nb)[0].outputs.append(stream("see /" + "home/somebody/file")),
    "an error or a warning": lambda nb: code(nb)[0].outputs.append(stream("careful", "stderr")),
    "a check after each exercise": lambda nb: [cell.update(outputs=[]) for cell in code(nb) if "check." in cell.source],
    "metadata": lambda nb: nb.metadata.update(language_info={"version": "3.11.7"}),
}


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def stream(text: str, name: str = "stdout"):
    return importlib.import_module("nbformat").v4.new_output("stream", name=name, text=text)


@pytest.mark.parametrize("what", BREAKS)
def test_each_fault_of_a_notebook_is_found(tool, tmp_path, what):
    notebook = tool.read(NOTEBOOKS[0])
    path = tmp_path / NOTEBOOKS[0].name
    tool.write(notebook, path)
    assert tool.faults(path) == []
    BREAKS[what](notebook)
    tool.write(notebook, path)
    assert any(what in fault for fault in tool.faults(path)), tool.faults(path)


def test_solutions_must_fit_the_exercises(tool):
    notebook = tool.read(NOTEBOOKS[0])
    solutions = tool.solutions_of(NOTEBOOKS[0])
    solutions.pop("ex1")
    with pytest.raises(ValueError, match="ex1"):
        tool.solve(notebook, solutions)


@pytest.mark.parametrize(("answer", "line"), [
    (None, "not yet"), (..., "not yet"), (lambda x: None, "not yet"), (lambda x: ..., "not yet"),
    (lambda x: (x, None), "not yet"), (lambda x: 1 / 0, "no: it raised ZeroDivisionError: division by zero"),
    (lambda x: 2 * x, "ok: doubled"), (lambda x: 4 * x, "no: doubled twice"), (lambda x: x.add_(x), "ok: doubled"),
    (lambda x: x[:1], "no: the shape is (1,), (3,) was asked for"), (lambda x: x * math.nan, "no: 3 of 3 numbers"),
    (lambda x: "six", "no: a tensor was asked for, this is a str"), (7, "no: this answer cannot be read"),
])  # fmt: skip
def test_a_check_prints_one_line_and_never_raises(verdicts, capsys, answer, line):
    given = torch.tensor([1.0, 2.0, 3.0])

    @verdicts.checker
    def doubled(asked):
        want = [2.0, 4.0, 6.0]
        return verdicts.judge(asked(given), want, {"doubled twice": [4.0, 8.0, 12.0]}, "doubled")

    found = doubled(answer)
    printed = capsys.readouterr().out
    assert printed.startswith(line)
    assert printed == f"{found}\n"
    assert given.tolist() == [1, 2, 3]


def test_whole_numbers_are_compared_as_such(verdicts):
    judge = verdicts.judge
    assert judge(10**17 + 1, 10**17) == (False, "100000000000000001 is not it")
    assert judge(12, 12) == (True, "")
    assert judge(24, 12, {"twice": 24}) == (False, "twice")
    assert not judge(12.0, 12)[0]
    assert judge(0.135233780000001, 0.13523378)[0]
    assert not judge(0.135234, 0.135236)[0]
    assert judge(torch.tensor([1, 2]), [1.0, 2.0])[0]


# Wrong answers that people give are named


@pytest.fixture
def checks():
    yield from imported(ROOT / "tutorials", "check")


WRONG = [
    ("nb00", "visible_keys", lambda q, s: list(range(1, q + 1)), "lined up with the start"),
    ("nb00", "visible_keys", lambda q, s: [s] * q, "later tokens included"),
    ("nb00", "first_that_serves", lambda need, names: names[0], "refuses"),
    ("nb01", "kept_rows", lambda c, size: 2 * c.num_hidden_layers * c.L * size, "both faults"),
    ("nb01", "kept_rows", lambda c, size: c.num_hidden_layers * c.L * size, "position key is still missing"),
    (
        "nb01",
        "kept_keys_and_values",
        lambda c, heads, size: 2 * c.num_hidden_layers * heads * (c.H // c.N) * size,
        "hidden / heads",
    ),
    ("nb01", "packed_row_bytes", lambda L, R, block: L + R, "one byte"),
    ("nb01", "packed_row_bytes", lambda L, R, block: L + 4 * ((L + R) // block) + 2 * R, "gets no scales"),
    ("nb02", "largest_rank", lambda S, N, P, V, L: min(S, 2 * L, N * (P + V)), "share one latent"),
    ("nb02", "fold_gain", lambda K, V, gain: (K, V), "nothing is folded"),
    ("nb02", "largest_useful_rank", lambda H, N, P, R: min(H, N * (P + R)), "far more parameters"),
    ("nb03", "column_order", lambda R: list(range(R)), "old order"),
    ("nb03", "blend", lambda plain, keep, factor: plain / factor, "fast ones stay"),
    ("nb03", "softmax_scale", lambda P, R, L, factor, a: (P + R) ** -0.5, "YaRN term is missing"),
    ("nb03", "softmax_scale", lambda P, R, L, factor, a: (L + R) ** -0.5, "L + R"),
    ("nb09", "adapt", lambda out, lse: (out, lse), "still in base 2"),
    ("nb09", "adapt", lambda out, lse: (out, lse / LN2), "the wrong way"),
    ("nb09", "why_not", lambda need: need.page_size == 64, "a list of sentences"),
    ("nb04", "pair_flops", lambda L, P, R, V: (P + R + V, 2 * L + R), "half of it"),
    ("nb05", "bf16_error", lambda x: 2**-8, "relative to the power of two"),
    (
        "nb07",
        "free_tokens",
        lambda N, L, R, r: max(1, int(r // (N * (2 * L + R) / (L + R)))),
        "at least one token",
    ),
]


@pytest.mark.parametrize(("module", "name", "answer", "reason"), WRONG)
def test_a_usual_mistake_is_named(checks, module, name, answer, reason):
    verdict = getattr(importlib.import_module(f"check.{module}"), name)(answer)
    assert verdict.ok is False
    assert reason in verdict.text
