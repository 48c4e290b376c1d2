"""The pages of the site: code runs and prints what they say, numbers are computed, what is generated is true."""

import importlib
import json
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import typer

import tiers
from mla.cli import app
from mla.presets import PRESETS, preset
from mla.settings import RunSettings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOOLS = (
    "build_pages", "pieces", "pages_api", "pages_benchmarks", "pages_capabilities", "pages_commands", "pages_dashboard",
    "pages_errors", "pages_glossary", "pages_learn", "run_blocks",
)  # fmt: skip


@pytest.fixture(scope="module")
def tools():
    """The modules of docs/tools by name."""
    sys.path.insert(0, str(DOCS / "tools"))
    try:
        yield {name: importlib.import_module(name) for name in TOOLS}
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def generated(tools) -> dict[str, str | bytes]:
    return tools["build_pages"].pages()


def generated_names() -> list[str]:
    """What docs/.gitignore names, as paths below docs/."""
    lines = (DOCS / ".gitignore").read_text(encoding="utf-8").splitlines()
    return [line.strip("/") for line in lines if line and line[0] != "#"]


def is_generated(name: str) -> bool:
    return any(name == mark or name.startswith(f"{mark}/") or Path(name).match(mark) for mark in generated_names())


def written_pages() -> list[str]:
    """The pages that are written by hand, relative to docs/."""
    names = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]
    return [name for name in names if not is_generated(name)]


# What a page says is what its code prints

# Their code needs packages that no test installs, or minutes; what they say of commands is still held.
READ_ONLY = {"how-to/check-a-raw-kernel.md", "how-to/check-my-kernel.md"}


@pytest.fixture
def one_thread(monkeypatch):
    """Leave the number of threads as it was, and let child processes import this tree."""
    import torch

    before = torch.get_num_threads()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [name for name in written_pages() if name not in READ_ONLY])
def test_code_of_the_page_runs_and_prints_what_stands_there(tools, name, one_thread):
    differ = tools["run_blocks"].run((DOCS / name).read_text(encoding="utf-8"))
    assert not differ, "\n\n".join(f"the page says\n{said}\nand it prints\n{printed}" for _, said, printed in differ)


@pytest.mark.parametrize("name", sorted(READ_ONLY))
def test_commands_of_pages_that_are_not_run_have_these_flags(tools, name):
    run_blocks = tools["run_blocks"]
    found = run_blocks.blocks((DOCS / name).read_text(encoding="utf-8"))
    words = [words for b in found if b.language == "" for _, words, _ in run_blocks.commands(b.text)]
    assert words or "```text" in (DOCS / name).read_text(encoding="utf-8")
    for each in words:
        run_blocks.check_words(each)


@pytest.mark.parametrize("name", ["reference/errors.md", "reference/settings.md"])
def test_code_of_generated_pages_runs_too(tools, generated, name, one_thread):
    assert "```sh" in generated[name]
    assert tools["run_blocks"].run(generated[name]) == []


PAGE = """
```python
x = 20 + 1
print(x, "of", 2 * x)
```

```text
21 of 42
```

```sh
mla cost --batch 4q0  # exit 2
```

```text
error: --batch: ...
```
"""


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [("21 of 42", "21 of 43", "21 of 42\n"), ("error: --batch", "error: --gpu", "error: --batch: expected")],
)
def test_a_page_that_says_something_else_is_found(tools, right, wrong, said):
    assert tools["run_blocks"].run(PAGE) == []
    [(_, _, printed)] = tools["run_blocks"].run(PAGE.replace(right, wrong))
    assert printed.startswith(said)


@pytest.mark.parametrize(
    "block", ["```sh\nmla cost --batch 4q0\n```", "```\nmla cost --bacht 4q0\n```", "```\nrm x\n```"]
)
def test_a_wrong_exit_code_an_unknown_flag_and_an_unknown_command_raise(tools, block):
    with pytest.raises(Exception, match=r"exit code 2, not 0|No such option|no command that"):
        tools["run_blocks"].run(f"\n{block}\n")


def test_output_is_written_into_a_page_but_not_over_a_hand_made_ellipsis(tools):
    update = tools["run_blocks"].update
    assert update(PAGE.replace("21 of 42", "x")) == PAGE
    assert update(PAGE.replace("--batch: ...", "x...")) == PAGE.replace("--batch: ...", "x...")


# Numbers in prose

PROSE = [n for n in written_pages() if n.startswith("explanation/") and "design" not in n and "kernel-log" not in n]
REFERENCES = re.compile(r"\(arXiv\s+[\d.]+\)|section\s+[\d.]+|sections?\s+[\d.]+|eqs?\.\s+[\d.]+|FlashAttention-2")


@pytest.mark.parametrize("name", PROSE)
def test_numbers_in_explanations_come_out_of_code(tools, name):
    text = (DOCS / name).read_text(encoding="utf-8")
    code = "\n".join(b.text for b in tools["run_blocks"].blocks(text))
    known = set(re.findall(r"\d+(?:\.\d+)?", code))
    others = "\n".join(
        b.text for n in PROSE for b in tools["run_blocks"].blocks((DOCS / n).read_text(encoding="utf-8"))
    )
    known |= set(re.findall(r"\d+(?:\.\d+)?", others)) if name == "explanation/questions.md" else set()
    prose = REFERENCES.sub("", tools["run_blocks"].BLOCK.sub("", text))
    prose = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<[^>]*>", " ", prose)
    said = {n.replace(",", "") for n in re.findall(r"(?<![\w.^-])\d[\d,]*(?:\.\d+)?(?![\w^])", prose)}
    unknown = sorted(n for n in said if (len(n) > 2 or "." in n) and n not in known)
    assert not unknown, f"{name}: no code of the page prints {', '.join(unknown)}"


# What is generated


def test_every_generated_page_is_ignored_by_git_and_no_written_one(generated):
    assert [name for name in generated if not is_generated(name)] == []
    assert "index.md" in written_pages()


def test_generated_pages_hold_the_mark_of_their_writer(generated):
    pages = {name: text for name, text in generated.items() if name.endswith(".md")}
    assert len(pages) > 25
    for name, text in pages.items():
        assert re.search(r"<!-- Written by docs/tools/pages_\w+\.py: change that, not this. -->\n$", text), name


def test_what_is_left_from_earlier_in_a_generated_folder_is_deleted(tools, tmp_path, monkeypatch):
    build = tools["build_pages"]
    monkeypatch.setattr(build, "DOCS", tmp_path)
    assert build.write({"learn/a.md": "a", "reference/b.md": "b", "learn/c.png": b"\0"}) == [
        "learn/a.md", "reference/b.md", "learn/c.png",
    ]  # fmt: skip
    assert build.write({"learn/a.md": "a2", "reference/d.md": "d"}) == [
        "learn/a.md", "reference/d.md", "learn/c.png (deleted)",
    ]  # fmt: skip
    assert (tmp_path / "reference/b.md").read_text() == "b"


def test_every_module_stands_on_one_page_of_the_api(tools, generated):
    text = "\n".join(
        t for n, t in generated.items() if n.startswith("reference/api/") and n != "reference/api/index.md"
    )
    found = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    wanted = [m for m in tools["pages_api"].modules() if m != "mla"]
    assert sorted(found) == sorted(wanted)
    assert {"mla.oracle", "tiers", "tiers.tier1_paged", "mla.conformance.zoo.fault"} <= set(found)
    with pytest.raises(KeyError, match=r"mla\.nowhere stands on no page"):
        tools["pages_api"].part_of("mla.nowhere")


def test_docstrings_are_shown_as_they_stand(tools):
    pytest.importorskip("griffe", reason="griffe is not installed: it comes with the extra docs")
    plain = importlib.import_module("plain_docstrings").plain
    assert plain("a[i][j] * b_c and `d[e]` <f>") == r"a\[i\]\[j\] \* b\_c and `d[e]` &lt;f\>"
    assert plain("x_y:\n\n    a_b = `c\n\n    d[e]\n\nf_g `h_i`") == "x\\_y:\n\n    a_b = `c\n\n    d[e]\n\nf\\_g `h_i`"


def test_commands_page_names_every_command_and_every_flag(generated):
    text = generated["reference/commands.md"]
    for name, command in typer.main.get_command(app).commands.items():
        assert (f"## `mla {name}`" in text) == (not command.hidden)
        if not command.hidden:
            section = text.partition(f"## `mla {name}`")[2].partition("\n## ")[0]
            context = command.make_context(name, [], resilient_parsing=True)
            missing = [
                o for p in command.get_params(context) for o in p.opts if o[0] == "-" and f"`{o}`" not in section
            ]
            assert not missing


def test_settings_page_has_a_row_for_each_setting(generated):
    rows = [line for line in generated["reference/settings.md"].splitlines() if line.startswith("| `")]
    assert [re.match(r"\| `(\w+)`", row)[1] for row in rows] == list(RunSettings.model_fields)
    assert (
        rows[0]
        == "| `model` | `--model` | `MLA_MODEL` | `toy` | Name of a preset, or path of a Hugging Face config.json. |"
    )
    assert "| `page_size` | `--page-size` | `MLA_PAGE_SIZE` | `64` |" in "\n".join(rows)


def test_capability_cells_are_the_tiers_own_answers(tools, monkeypatch):
    page = tools["pages_capabilities"]
    machines = {m.name: m for m in page.MACHINES}
    assert set(machines) == {"Laptop CPU", "A100", "H200", "B200", "MI300X"}
    for machine in machines.values():
        found = page.answers(machine, {})
        assert list(found) == [name for name in tiers.names() if name in tiers._OURS]
        assert found["naive"] == found["paged"] == ([], "")
        assert found["triton"][1] == "triton >= 3.6 (extra triton)", "the package is said apart, installed or not"
    [sentence] = page.answers(machines["Laptop CPU"], {})["triton"][0]
    assert sentence.startswith("device 'cpu' is not served by triton")
    assert page.answers(machines["H200"], {})["triton"][0] == []
    [sentence] = page.answers(machines["H200"], {"window": 4096})["paged"][0]
    assert sentence.startswith("window = 4096 is not computed by paged")
    monkeypatch.setattr("mla.need.version", lambda name: "99")
    assert page.answers(machines["H200"], {})["triton"][1] == "triton >= 3.6 (extra triton)"
    with pytest.raises(PackageNotFoundError), page.on(machines["MI300X"]):
        importlib.import_module("mla.need").version("triton")


def test_capability_page_numbers_its_sentences(tools, generated):
    text = generated["reference/capabilities.md"]
    assert set(re.findall(r'href="#(r\d+)"', text)) == set(re.findall(r'<p id="(r\d+)"', text)) != set()
    for name in tools["pages_capabilities"].ours():
        assert f"<code>{name}</code>" in text


def test_errors_page_reads_names_words_and_kinds_from_the_code(tools, generated):
    source = """
def f(x, n):
    expected, fix = f"at least {n}", "give more"
    if x:
        raise bad("x", expected=expected, got="less", fix=fix, kind=TypeError)
    raise bad(f"seq_lens[{n}]", expected="a", got="b", fix="c" + "d")
"""
    assert list(tools["pages_errors"].complaints(source)) == [
        ("x", "at least «n»", "give more", "TypeError"), ("seq_lens[«n»]", "a", "cd", "ValueError"),
    ]  # fmt: skip
    text = generated["reference/errors.md"]
    assert "### `mla.cache`" in text
    assert "| `slot_mapping` | -1 .. «last» | write inside the pool |" in text


def test_glossary_and_models_have_the_numbers_of_the_presets(generated):
    text, c = generated["reference/glossary.md"], preset("deepseek-v3")
    for axis in ("N", "H", "Lq", "L", "P", "R", "V"):
        row = next(line for line in text.splitlines() if line.startswith(f'| <span id="{axis}">'))
        assert f"| {getattr(c, axis)} |" in row
    for name in ("q_nope", "kv_c", "k_pe", "row_kv_lens", "slot_mapping", "W_UK", "W_UV", "lse"):
        assert f'<span id="{name}">' in text
    ids = re.findall(r'<span id="([^"]+)">', text)
    assert len(ids) == len(set(ids))
    models = generated["reference/models.md"]
    assert all(f"| `{name}` |" in models for name in PRESETS)
    assert "| 1152 | 71.1 | yes |" in next(line for line in models.splitlines() if line.startswith("| `deepseek-v3` |"))


# Results

CASE = {"case": "toy-x-bf16-rows_bf16-needle_last-shuffled-p16-s0", "used_out": 0.25, "used_lse": 0.5, "record": 3}


def cell(tools, **change) -> str:
    sentences = {"page_size = 1 is not taken": 7}
    return tools["pages_dashboard"].shown({**CASE, "status": "ok", "detail": "", **change}, sentences)


def test_right_wrong_refused_not_run_and_absent_cells_all_look_different(tools):
    cells = {
        "ok": cell(tools),
        "wrong": cell(tools, status="mismatch", used_out=42.4),
        "nan": cell(tools, status="not_finite", used_out=float("inf")),
        "refused": cell(tools, status="refused", detail="page_size = 1 is not taken"),
        "not run": cell(tools, status="not_run", detail="needs 80 GB"),
        "absent": tools["pages_dashboard"].shown(None, {}),
    }
    text = {name: re.sub(r"<[^>]*>", "", html) for name, html in cells.items()}
    assert text == {
        "ok": "0.50", "wrong": "mismatch 42.40", "nan": "not finite ∞", "refused": "refused 7", "not run": "not run",
        "absent": "·",
    }  # fmt: skip
    kinds = {name: re.search(r'class="(cell-[\w-]+)"', html)[1] for name, html in cells.items()}
    assert kinds["ok"] == "cell-ok"
    assert kinds["wrong"] == kinds["nan"] == "cell-failed"
    assert len({kinds[n] for n in ("ok", "wrong", "refused", "not run")}) == 4
    assert 'title="needs 80 GB"' in cells["not run"]
    assert 'title="out 0.25, LSE 0.50, record 3"' in cells["ok"]


def test_a_family_with_one_wrong_case_is_wrong_and_with_none_run_is_no_success(tools):
    gathered = tools["pages_dashboard"].gathered
    one = lambda status, out=0.1: {**CASE, "status": status, "used_out": out, "used_lse": 0.0}
    assert "cell-ok" in gathered([one("ok"), one("ok", 0.7)])
    assert "0.70<br><small>2 right</small>" in gathered([one("ok"), one("ok", 0.7)])
    assert "1 refused" in gathered([one("ok"), one("refused")])
    assert 'cell-failed">1 of 2 wrong' in gathered([one("ok"), one("mismatch", 3.0)])
    assert 'cell-refused">2 refused' in gathered([one("refused"), one("refused")])
    assert 'cell-not-run">1 not run' in gathered([one("not_run")])


def test_the_newest_record_wins_and_its_age_is_said(tools, monkeypatch):
    page, pieces = tools["pages_dashboard"], tools["pieces"]
    ages = {"aaa": (12, "2026-01-02"), "bbb+changes": (2, "2026-03-04"), "ccc": None}
    monkeypatch.setattr(page, "behind", ages.get)
    monkeypatch.setattr(pieces, "behind", ages.get)
    rec = lambda commit: {"environment": {"commit": commit}}
    assert sorted(ages, key=lambda c: -page.commits_ago(rec(c))) == ["ccc", "aaa", "bbb+changes"]
    assert pieces.dated("aaa") == "2026-01-02, 12 commits ago (aaa)"
    assert pieces.dated("bbb+changes") == "2026-03-04, 2 commits ago (bbb with local changes)"
    assert (pieces.dated("ccc"), pieces.dated(None)) == ("commit ccc, not in this clone", "commit not recorded")
    columns = ["flash_mla on H200", "triton:invariant on H200", "paged on CPU", "naive:mqa on CPU"]
    assert sorted(columns, key=page.column_order) == columns[::-1]


def test_dashboard_shows_the_score_and_every_record(generated):
    text = generated["results/dashboard.md"]
    faults = json.loads((DOCS / "results" / "check-faults-cpu.json").read_text(encoding="utf-8"))
    assert f"<strong>{faults['caught']} of {faults['counted']}</strong>" in text
    for path in (DOCS / "results").glob("check-*.json"):
        if "faults" not in path.name and "tiers" in json.loads(path.read_text(encoding="utf-8")):
            assert f'href="../{path.name}"' in text
    families = re.findall(r'href="../cases-(\w+)/"', text)
    assert families
    assert all(f"results/cases-{family}.md" in generated for family in families)


def test_benchmark_page_tells_the_method_first_and_has_every_row(tools, generated):
    text = generated["results/benchmarks.md"]
    assert text.index("## Method") < text.index("## Time against context") < text.index("## On GPUs")
    name = "bench-triton-decode-128-h200.json"
    rec = json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))
    section = tools["pages_benchmarks"].section(name, rec)
    assert section in text
    for row in rec["rows"]:
        assert f"<strong>{row['attend']['median_ms']:.4g}</strong>" in section
    command = tools["pages_benchmarks"].command_of(rec)
    assert command.startswith("mla bench triton:mqa --batch 128q1s8k")
    tools["run_blocks"].check_words(command.split())


def test_the_command_of_every_record_parses(tools):
    for path in sorted((DOCS / "results").glob("bench-*.json")):
        rec = json.loads(path.read_text(encoding="utf-8"))
        if "model" in rec:
            tools["run_blocks"].check_words(tools["pages_benchmarks"].command_of(rec).split())


# Notebooks


def test_a_notebook_becomes_a_page(tools, tmp_path, monkeypatch):
    learn = tools["pages_learn"]
    png = "iVBORw0KGgo="
    code = lambda source, *outputs, tags=(): {
        "cell_type": "code", "source": source, "outputs": list(outputs), "metadata": {"tags": list(tags)},
    }  # fmt: skip
    cells = [
        {"cell_type": "markdown", "source": "# One\n\nAfter this you can\n- see,\n- hear\n  well.\n\n**5 minutes.**\n"},
        {
            "cell_type": "markdown",
            "source": ["[next](01-two.ipynb#a) [code](../mla/cost.py) ", "[page](../docs/index.md)"],
        },
        code("print(1)", {"output_type": "stream", "text": ["\x1b[31m1\x1b[0m\n"]}),
        code("fig", {"output_type": "display_data", "data": {"image/png": png, "text/plain": "<Figure>"}}),
        code("slider", {"output_type": "display_data", "data": {learn.WIDGET: {}, "text/plain": "x"}}),
        code("def f(): ...", tags=["exercise", "ex1"]),
        code("secret", tags=["hide"]),
    ]
    (tmp_path / "solutions").mkdir()
    (tmp_path / "00-x.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "solutions" / "00-x.py").write_text("# %% ex1\ndef f():\n    return 1\n")
    monkeypatch.setattr(learn, "TUTORIALS", tmp_path)
    found = learn.page("00-x")
    text = found["learn/00-x.md"]
    assert "After this you can\n\n- see,\n- hear\n" in text, "Markdown here wants an empty line before a list"
    assert "[next](01-two.md#a) code [page](../index.md)" in text
    assert "```python\nprint(1)\n```\n\n```text\n1\n```" in text
    assert found["learn/00-x-0.png"].startswith(b"\x89PNG")
    assert "![](00-x-0.png)" in text
    assert "something to move" in text
    assert '??? success "A solution of exercise 1"\n\n    ```python\n    def f():\n        return 1\n    ```' in text
    assert "secret" not in text
    assert learn.title_and_gain("00-x") == ("One", ["see", "hear well"])


# Nothing from outside


def test_vendored_libraries_are_small_and_have_their_licences():
    vendor = DOCS / "vendor"
    assert sum(path.stat().st_size for path in vendor.rglob("*") if path.is_file()) < 6_000_000
    for name in ("mathjax", "mermaid"):
        assert (vendor / name / "LICENSE").is_file()
        assert f"{name} " in (vendor / "VERSIONS.txt").read_text(encoding="utf-8")


def test_configuration_and_styles_name_no_address():
    files = [ROOT / "mkdocs.yml", *(DOCS / "stylesheets").glob("*.css"), *(DOCS / "javascripts").glob("*.js")]
    assert [f.name for f in files if re.search(r"https?://|//cdn", f.read_text(encoding="utf-8"))] == []
