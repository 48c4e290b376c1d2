"""The tools behind docs/reference/accuracy.md: what they call right is right, and the page is what they wrote."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from mla.accuracy import compare
from mla.conformance.cases import DIMS, Case
from mla.conformance.specs import spec
from mla.state import AttentionState

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "accuracy.md"


@pytest.fixture(scope="module")
def tools():
    """The modules of docs/tools by name."""
    sys.path.insert(0, str(ROOT / "docs" / "tools"))
    try:
        yield {name: importlib.import_module(name) for name in ("trials", "calibration", "rules_table")}
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def scene(tools):
    return tools["trials"].scene(Case(spec("mixed_small"), DIMS["toy"], "bf16", "", "peaked"))


@pytest.mark.parametrize(("tool", "mark", "file"), [
    ("calibration", "calibration", "accuracy.json"), ("rules_table", "rules", "accuracy_rules.json"),
])  # fmt: skip
def test_the_page_is_what_the_record_says(tools, tool, mark, file):
    record = json.loads((ROOT / "docs" / "results" / file).read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    written = page.partition(f"<!-- {mark} -->\n")[2].partition(f"<!-- /{mark} -->")[0]
    assert written == tools[tool].render(record)


def test_no_right_kernel_was_rejected_by_the_budget():
    record = json.loads((ROOT / "docs" / "results" / "accuracy.json").read_text(encoding="utf-8"))
    assert len(record["correct"]) > 100
    assert all(row["rejected"] == 0 and max(row["out"], row["lse"]) <= 1 for row in record["correct"])
    assert {row["dtype"] for row in record["correct"]} == {"bf16", "f16", "f32"}


def test_every_right_kernel_is_within_the_budget_and_storing_ones_use_more_of_it(tools, scene):
    trials = tools["trials"]
    used = {
        name: compare(trials.answer(tier, scene), scene.truth) for name, (_, tier) in trials.correct_kernels().items()
    }
    assert all(found.ok for found in used.values())
    assert used["storing:mha"].used_out > used["naive:mha"].used_out
    assert used["storing:mqa"].used_out > used["naive:mqa"].used_out
    truth = trials.latent_truth(scene)
    assert all(compare(trials.latent_answer(raw, scene), truth).ok for raw in trials.raw_kernels().values())


def test_a_tame_scene_has_a_tenth_of_the_inputs_and_no_poison(tools, scene):
    trials = tools["trials"]
    tame = trials.scene(scene.case, tame=True)
    assert torch.equal(tame.given.q.nope, scene.given.q.nope / 10)
    naive = trials.tiers.get("naive")
    assert bool(torch.isfinite(trials.filled(naive, tame, tame.given).data).all())
    assert not bool(torch.isfinite(trials.filled(naive, scene, scene.given).data).all())
    assert compare(trials.answer(naive, tame), tame.truth).ok


def test_what_raises_or_has_another_form_is_no_answer(tools, scene):
    trials = tools["trials"]
    raising = trials.from_attend("raises", lambda *_: 1 / 0)
    narrow = trials.from_attend("narrow", lambda q, *_: AttentionState(q.nope, None))
    assert trials.answer(raising, scene) is None
    assert trials.answer(narrow, scene) is None
    found = tools["rules_table"].verdicts(None, scene, tools["rules_table"].eager(scene))
    assert set(found.values()) == {(False, False)}


def test_rules_judge_as_their_formulas_say(tools):
    rules, y = tools["rules_table"].RULES, torch.tensor([4.0, 0.0, -3.0], dtype=torch.float64)
    judge = lambda name, x, eager=y: rules[name](torch.tensor(x, dtype=torch.float64), y, eager)
    assert judge("rtol 2e-2, atol 2e-2", [4.09, 0.019, -3.0])  # 0.09 <= 0.02 + 0.02 * 4
    assert not judge("rtol 2e-2, atol 2e-2", [4.11, 0.0, -3.0])
    assert judge("relative RMS < 1e-2", [4.04, 0.0, -3.0])  # 0.04 < 0.01 * 5
    assert not judge("relative RMS < 1e-2", [4.06, 0.0, -3.0])
    assert judge("cosine > 0.99", [8.0, 0.0, -6.0]), "a factor does not change a direction"
    assert not judge("cosine > 0.99", [4.0, 1.0, -3.0])  # 25 / (5 * 26 ** 0.5) = 0.981
    eager = y + torch.tensor([0.1, 0.0, 0.0], dtype=torch.float64)
    assert judge("max error <= 2x eager 16-bit", [4.0, 0.19, -3.0], eager)
    assert not judge("max error <= 2x eager 16-bit", [4.0, 0.21, -3.0], eager)
    assert not any(judge(name, [float("nan"), 0.0, -3.0], eager) for name in rules)


def test_the_eager_reference_is_close_to_the_truth_but_not_within_the_budget(tools):
    trials, rules_table = tools["trials"], tools["rules_table"]
    s = trials.scene(Case(spec("padded_tail"), DIMS["toy"], "bf16", "", "peaked"))
    eager = rules_table.eager(s)
    at = s.truth.rows
    assert at.tolist() != sorted(at.tolist()), "padding comes first in a Reference: rules must follow its rows"
    # scores below 64 have 8 bits: each is off by at most 2^-3, a share of the softmax by a factor of at most e^(2/8)
    assert float((eager.out[at] - s.truth.out).abs().max()) < (math.exp(0.25) - 1) * float(
        s.given.keys[0][0].abs().max()
    )
    assert rules_table.verdicts(eager, s, eager)["max error <= 2x eager 16-bit"] == (True, True)
    assert bool((eager.lse[-1] == float("-inf")).all())
    assert not compare(eager, s.truth).ok, "its scores have 8 bits"


def test_tables_are_put_between_their_marks_and_nowhere_else(tools, tmp_path):
    trials, page = tools["trials"], tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n", encoding="utf-8")
    trials.put_between(page, "x", trials.table(["n", "v"], [["one", r"\1"]]))
    assert (
        page.read_text(encoding="utf-8") == "a\n<!-- x -->\n| n | v |\n| --- | ---: |\n| one | \\1 |\n<!-- /x -->\nb\n"
    )
    with pytest.raises(ValueError, match="marks 'y'"):
        trials.put_between(page, "y", "")
