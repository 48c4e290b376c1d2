"""What a person types and gets: exit codes, figures, records, and one sentence for each wrong input."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import mla.commands.output
from mla import conformance
from mla.cli import app
from mla.commands.check_record import compare_records
from mla.commands.environment import invocation, triton_version
from mla.commands.output import Finding, Grid, progress, show
from mla.commands.page import bars
from mla.commands.report import compare_blocks, ratio
from mla.conformance import Case, spec, zoo
from mla.settings import RunSettings

ROOT = Path(__file__).parents[1]
DEFAULT_TIERS = ["naive:mha", "naive:mqa", "paged", "decode=paged+prefill=naive:mha", "template"]
# Blocks of 8 tokens; the second request shares two blocks with the first, the third its whole prompt.
TRACE = """\
{"block_size": 8}
{"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1, 2, 3]}
{"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1, 2, 4]}
{"timestamp": 9, "input_length": 20, "output_length": 2, "hash_ids": [1, 2, 3]}
"""
# The template with its scale squared: right nowhere but where a row sees a single key.
WRONG = (ROOT / "tiers" / "template.py").read_text().replace("need.softmax_scale", "need.softmax_scale**2")
REFUSES = (
    "def attend(*given): ...\ndef why_not(need): return ['page_size = 8 is too small for it; use 16.', 'And no.']\n"
)
RAISES = "def attend(q, cache, batch, up, need): raise RuntimeError('no such kernel')\n"


def mla_run(*words: str) -> tuple[int, str, str]:
    """Run a command in this process; return exit code, standard output and standard error."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def record_of(tmp_path: Path, *words: str) -> tuple[int, dict, str]:
    path = tmp_path / "record.json"
    code, out, err = mla_run(*words, "--json", path)
    assert err == ""
    return code, json.loads(path.read_text()), out


def sentence_of(*words: str) -> str:
    """Run a command that must be refused with exit code 2, nothing on stdout and whole sentences; return these."""
    code, out, err = mla_run(*words)
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    return err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


@pytest.fixture
def tier_file(tmp_path: Path):
    def make(name: str, text: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(text.replace('"template"', f'"{name}"'))
        return path

    return make


# compare


@pytest.fixture(scope="module")
def replayed(tmp_path_factory) -> tuple[int, dict, str]:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "trace.jsonl").write_text(TRACE)
    return record_of(folder, "compare", "--trace", folder / "trace.jsonl", "--page-size", "8")


def test_compare_without_tiers_gives_five_verdicts(replayed):
    code, record, _ = replayed
    assert (code, record["exit"], record["status"]) == (0, 0, "ok")
    assert [tier["name"] for tier in record["tiers"]] == DEFAULT_TIERS
    assert {tier["status"] for tier in record["tiers"]} == {"ok"}


def test_compare_counts_what_the_trace_holds(replayed):
    record, stats = replayed[1], replayed[1]["stats"]
    assert record["trace"] | {"name": ""} == {"name": "", "requests": 3, "prompt_tokens": 60, "output_tokens": 7}
    # By hand: 3 blocks a prompt; 2 shared, then 3. 20 + 4 new prompt tokens, and the last one of the third again.
    assert (stats["prefix_blocks_hit"], stats["prefix_blocks"], stats["full_prompt_hits"]) == (5, 9, 1)
    assert (stats["hit_tokens"], stats["prefill_tokens"], stats["decode_tokens"]) == (16 + 20, 20 + 4 + 1, 2 + 1 + 1)
    assert stats["prefix_hit_rate"] == 5 / 9
    assert record["audit"] == {"rows_per_step": None, "oracle": "float64"}
    assert {tier["rows"] for tier in record["tiers"]} == {25 + 4}


def test_compare_states_budget_use_place_and_cache_bytes(replayed):
    for tier in replayed[1]["tiers"]:
        for part in ("out", "lse"):
            assert 0 < tier[part]["used"] <= 1
            assert set(tier[part]["at"]) == {"step", "request", "token", "head"}
            assert tier[part]["at"]["request"] in (0, 1, 2)
            assert tier[part]["at"]["head"] < 3
        # toy: L 32 + R 8 numbers of 4 bytes; N 3 times P 12 + R 8 + V 10 of them
        assert (tier["cache_bytes_per_token"], tier["mha_bytes_per_token"]) == (160, 360)
        assert tier["peak_workspace_bytes"] > 0
        assert tier["prefill_tokens"] == 25
        assert tier["prefill_tokens_per_second"] == pytest.approx(25 / tier["prefill_seconds"])
        assert tier["decode_ms_per_step"] == pytest.approx(1000 * tier["decode_seconds"] / tier["decode_steps"])


def test_invocation_is_the_command_line_without_where_it_writes():
    words = [
        "/venv/bin/mla",
        "bench",
        "paged",
        "--json",
        "out.json",
        "--batch",
        "4q1 s4k",
        "--junit=x.xml",
        "--heads",
        "2",
    ]
    assert invocation(words) == "mla bench paged --batch '4q1 s4k' --heads 2"
    assert invocation(["/x/mla/__main__.py", "info"]) == "mla info"
    assert invocation(["/x/pytest", "-q"]) is None


def test_the_environment_says_what_interprets(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (triton_version() or "9.9, interpreted").endswith(", interpreted")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "interpreted" not in (triton_version() or "")


def test_compare_record_holds_environment_and_every_setting_with_its_source(replayed):
    record = replayed[1]
    wanted = {"mla", "commit", "python", "torch", "triton", "numpy", "platform", "cpu", "cpus", "threads", "device"}
    assert set(record["environment"]) == wanted
    assert set(record["settings"]) == set(RunSettings.model_fields)
    assert record["settings"]["page_size"] == {"value": 8, "source": "flag"}
    assert record["settings"]["seed"] == {"value": 0, "source": "default"}
    model = record["model"]
    assert {axis: model[axis] for axis in ("H", "N", "Lq", "L", "P", "R", "V")} == dict(
        zip(("H", "N", "Lq", "L", "P", "R", "V"), (40, 3, 20, 32, 12, 8, 10), strict=True)
    )


def test_compare_piped_is_plain_text_with_one_line_for_each_tier(replayed):
    record, out = replayed[1:]
    lines = out.splitlines()
    head = next(line for line in lines if line.startswith("tier "))
    table = lines[lines.index(head) + 1 :][: len(DEFAULT_TIERS)]
    assert re.split(r" {2,}", head) == [
        *("tier", "verdict", "out error/budget", "at", "LSE error/budget", "at", "cache B/token", "MHA B/token"),
        *("workspace MiB", "prefill tokens/s", "decode ms/step"),
    ]
    cells = [re.split(r" {2,}", line) for line in table]
    assert [row[:2] for row in cells] == [[name, "ok"] for name in DEFAULT_TIERS]
    assert {len(row) for row in cells} == {11}
    assert cells[2][2] == ratio(record["tiers"][2]["out"]["used"])
    assert "5 of 9 blocks hit (55.6%), 1 full prompt hit, 36 tokens found in the cache" in out
    assert "all rows of each step, 29 in all" in out
    assert "right is at most 1" in out
    assert "attention alone (write, plan, attend), measured once" in out
    assert not re.search(r"[\x1b─━│]", out)


def test_compare_names_the_tier_that_is_wrong_and_exits_1(tmp_path, trace, tier_file):
    path = tier_file("squared", WRONG)
    words = ("compare", "--trace", trace, "--page-size", "8", "--tier", "naive:mqa", "--tier", path)
    code, record, out = record_of(tmp_path, *words)
    assert (code, record["status"]) == (1, "mismatch")
    assert [(tier["name"], tier["status"]) for tier in record["tiers"]] == [
        ("naive:mqa", "ok"),
        ("squared", "mismatch"),
    ]
    assert record["tiers"][1]["out"]["used"] > 1
    assert record["tiers"][1]["lse"]["used"] > 1
    assert re.search(r"^squared +mismatch +\d", out, re.MULTILINE)


def test_compare_reports_a_tier_that_raises_and_exits_1(tmp_path, trace, tier_file):
    path = tier_file("broken", RAISES)
    words = ("compare", "--trace", trace, "--page-size", "8", "--tier", f"{path},naive:mqa")
    code, record, out = record_of(tmp_path, *words)
    assert (code, record["status"]) == (1, "raised")
    assert [tier["status"] for tier in record["tiers"]] == ["raised", "ok"]
    assert "broken raised: step 0: RuntimeError: no such kernel" in out
    assert re.search(r"^broken +raised +- +- +- +- ", out, re.MULTILINE)


def test_compare_runs_the_others_when_one_refuses_and_exits_2(tmp_path, trace, tier_file):
    path = tier_file("picky", REFUSES)
    words = ("compare", "--trace", trace, "--page-size", "8", "--tier", path, "--tier", "template")
    code, record, out = record_of(tmp_path, *words)
    assert (code, record["status"]) == (2, "refused")
    assert [(tier["status"], tier["rows"]) for tier in record["tiers"]] == [("refused", 0), ("ok", 29)]
    assert "picky refused: page_size = 8 is too small for it; use 16.\npicky refused: And no." in out


def test_compare_takes_types_and_forms_from_file_and_environment(tmp_path, trace, monkeypatch):
    config = tmp_path / "run.toml"
    config.write_text(f'tiers = ["paged"]\nform = "mha"\ntrace = "{trace}"\npage_size = 16\nrequests = 2\n')
    monkeypatch.setenv("MLA_CACHE_DTYPE", "bfloat16")
    code, record, out = record_of(tmp_path, "compare", "--config", config, "--page-size", "8", "--requests", "none")
    assert (code, [tier["name"] for tier in record["tiers"]]) == (0, ["paged:mha"])
    assert (record["tiers"][0]["cache_bytes_per_token"], record["tiers"][0]["mha_bytes_per_token"]) == (80, 180)
    sources = {name: setting["source"] for name, setting in record["settings"].items()}
    assert sources["page_size"] == sources["requests"] == "flag"
    assert sources["cache_dtype"] == "environment MLA_CACHE_DTYPE"
    assert sources["form"] == f"file {config}"
    assert record["trace"]["requests"] == 3
    assert "cache: 80 B rows of bfloat16" in out


def test_compare_writes_the_record_to_stdout_and_the_table_to_stderr(trace):
    code, out, err = mla_run("compare", "--trace", trace, "--tier", "template", "--json", "-")
    assert (code, json.loads(out)["tiers"][0]["name"]) == (0, "template")
    assert re.search(r"^template +ok ", err, re.MULTILINE)


# Wrong input


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["compare", "--tier", "pagedd"],
            "tier: expected one of naive, paged, triton, flashinfer, flashmla, aiter, template",
        ),
        (["compare", "--tier", "pagedd"], "did you mean 'paged'"),
        (["compare", "--tier", "mine.py"], "tier: expected the path of a Python file, got mine.py"),
        (["compare", "--tier", "paged:abs"], "form: expected 'auto', 'mha' or 'mqa', got 'abs'"),
        (["compare", "--tier", "naive", "--tier", "naive:mha"], "got naive and naive:mha, both named naive:mha"),
        (
            ["compare", "--trace", "absent.csv"],
            "absent.csv: expected a file with a trace, got no such file. Fix: check the path.",
        ),
        (["compare", "--config", "absent.toml"], "absent.toml: expected a readable TOML file"),
        (
            ["compare", "--page-size", "0"],
            "page_size: expected a whole number of at least 1, at most 2147483647, got '0' (flag).",
        ),
        (["compare", "--max-workspace-tokens", "63"], "max_workspace_tokens: expected at least one page of 64 tokens"),
        (["compare", "--model", "deepsek-v3"], "did you mean 'deepseek-v3'."),
        (["compare", "--model", "deepseek-v3.2"], "index_topk"),
        (["compare", "--model", "absent.json"], "absent.json"),
        (["compare", "--num-pages", "3"], "num_pages"),
        (
            ["compare", "--max-model-len", "700"],
            "max_model_len: expected at least 708, the tokens of request 1, got 700",
        ),
        (["compare", "--tune-file", "absent.json"], "tune_file: expected a table written by `mla tune`"),
        (["compare", "--json", "no/such/folder/r.json"], "--json: expected the path of a file to write, or -"),
        (["compare", "--device", "xpu:7"], "device: expected a device of this machine, got 'xpu:7'"),
        (
            ["tiers", "--ask", "windo=3"],
            "--ask: expected NAME=VALUE, the name a field of Need, got 'windo=3'. Fix: write",
        ),
        (["tiers", "--ask", "window=0"], "window: expected an int >= 1, got 0"),
        (["check", "papged"], "did you mean 'paged'"),
        (["check", "decode=paged"], "tier: expected a tier name such as 'paged', or a pair"),
        (["check", "--suite", "huge"], "suite: expected one of smoke, full, large, got 'huge'"),
        (["check", "mine.py"], "tier: expected the path of a Python file, got mine.py"),
        (["check", "--case", "toy-1q1"], "case: expected dims-batch-dtype"),
        (["check", "--level", "inner"], "--level: expected one of attend, latent, both, got 'inner'"),
        (["check", "--faults", "paged"], "tier: expected none beside --faults"),
        (["check", "--faults", "--junit", "x"], "--junit: expected none beside --faults"),
        (["check", "--watch"], "--watch: expected files to watch, got none"),
        (["check", "--junit", "no/such/j.xml"], "--junit: expected the path of a file to write"),
        (["check", "--baseline", "absent.json"], "--baseline: expected a record written by mla check --json"),
        (["check", "--timeout", "0", "--isolate"], "timeout: expected seconds above 0, got 0"),
        (
            ["check", "--jobs", "2", "--isolate"],
            "--jobs: expected 1 beside --isolate, got 2, and paged in a process of",
        ),
        (["check", "--jobs", "2", "--faults"], "--jobs: expected 1 beside --faults, got 2"),
        (["check", "--jobs", "2", "--suite", "large"], "--jobs: expected 1 beside --suite large, whose cases want"),
        (["cost", "--batch", "16x1"], "batch: "),
        (["cost", "--gpu", "h2000"], "--gpu: expected one of a100-80g, "),
        (["cost", "--gpu", "mine:1"], "or NAME:TFLOPS:GBPS, got 'mine:1'"),
        (
            ["cost", "--dtype", "float32"],
            "--gpu: expected ceilings for 4-byte elements, got h200, known for 2-byte elements",
        ),
        (["bench", "papged"], "did you mean 'paged'"),
        (["bench", "--beside", "vllm"], "--beside: expected transformers, got 'vllm'"),
        (
            ["bench", "--beside", "transformers", "--batch", "2q2s9"],
            "--batch: expected a decode step of equal contexts",
        ),
        (["bench", "--beside", "transformers", "--dtype", "bfloat16"], "dtype: expected float32"),
        (["tune", "--contexts", "4,1"], "--contexts: expected ascending counts of at least 1, got '4,1'"),
        (["tune", "--query-lens", "0"], "--query-lens: expected ascending counts of at least 1, got '0'"),
        (["tune", "--file", "no/such/t.json"], "--file: expected a file in a folder that exists, got no/such/t.json"),
    ],
)
def test_wrong_input_is_a_sentence_and_exit_code_2(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = sentence_of(*words)
    assert sentence in err
    assert all(line.startswith("error: ") for line in err.splitlines())


def test_malformed_trace_names_file_line_and_fault(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(TRACE.replace('"output_length": 2', '"output_length": 0', 1))
    assert f"error: {path}, line 3: output_length: expected an int of at least 1, got 0." in sentence_of(
        "compare", "--trace", path
    )


def test_unknown_flag_and_unknown_variable_are_bad_usage(monkeypatch):
    code, out, err = mla_run("compare", "--page-sise", "3")
    assert (code, out) == (2, "")
    assert "No such option: --page-sise" in err
    monkeypatch.setenv("MLA_PAGE_SISE", "3")
    assert "MLA_PAGE_SISE: expected the name of a setting" in sentence_of("info")


def test_every_wrong_setting_is_told_at_once():
    err = sentence_of("compare", "--page-size", "0", "--dtype", "int8")
    assert [line.split(":")[1].strip() for line in err.splitlines()] == ["dtype", "page_size"]


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    def broken(*given):
        raise TypeError("unsupported operand")

    monkeypatch.setattr("mla.commands.resolve.model_of", broken)
    with pytest.raises(TypeError, match="unsupported operand"):
        mla_run("info")


# tiers, check


def test_tiers_says_yes_and_who_auto_takes(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("mla.need.version", lambda name: "3.7.1")
    code, record, out = record_of(tmp_path, "tiers")
    assert code == 0
    assert [(tier["name"], tier["status"]) for tier in record["tiers"]][:7] == [
        *(("naive", "yes"), ("paged", "yes"), ("triton", "no"), ("flashinfer", "no"), ("flashmla", "no")),
        *(("aiter", "no"), ("template", "yes")),
    ]
    (reason,) = record["tiers"][2]["reasons"]
    assert reason.startswith("device 'cpu' is not served by triton")
    assert f"auto: paged: the first tier without a reason against it. triton refuses: {reason}" in out


def test_options_of_a_run_reach_every_tier_that_has_them():
    from mla.cli import tier_of

    settings = RunSettings(form="mqa", max_workspace_tokens=640)
    for name in ("paged", "triton"):
        tier = tier_of(name, settings)
        assert (tier.name, tier.max_workspace_tokens) == (f"{name}:mqa", 640)
    assert tier_of("naive", settings).name == "naive:mha"


def test_tiers_prints_every_reason_whole(tmp_path, tier_file):
    path = tier_file("picky", REFUSES)
    words = ("tiers", "--ask", "window=5", "--ask", "graph_capture=true", "--tier", path)
    code, record, out = record_of(tmp_path, *words)
    assert (code, record["asked"]) == (0, {"window": 5, "graph_capture": True})
    by_name = {tier["name"]: tier["reasons"] for tier in record["tiers"]}
    assert [reason.split(" ")[0] for reason in by_name["paged"]] == ["window", "graph_capture"]
    assert "And no." in by_name[str(path)]
    assert all(f"{name}: {reason}" in out for name, reasons in by_name.items() for reason in reasons)
    assert "auto: none of them can." in out


def test_tiers_lists_a_file_that_cannot_be_loaded(tmp_path, tier_file):
    path = tier_file("typo", "import no_such_package\n")
    code, record, _ = record_of(tmp_path, "tiers", "--tier", path)
    assert code == 0
    (reason,) = record["tiers"][-1]["reasons"]
    assert reason.startswith("cannot be loaded: ")
    assert "ModuleNotFoundError: No module named 'no_such_package'" in reason


@pytest.fixture
def few_cases(monkeypatch):
    """A small case for each of two families, in place of a suite."""
    cases = [conformance.Case(conformance.spec("1q2s9_1q1s3"), dtype="f32", family=f) for f in ("randn", "peaked")]
    monkeypatch.setattr(conformance, "suite", lambda name: cases)
    return cases


def check_file(*words) -> tuple[str, ...]:
    """A check in this process: what a child of its own does for a file is seen in test_isolate, and once below."""
    return ("check", "--no-isolate", *words)


def test_check_accepts_the_paged_tier(few_cases, tmp_path):
    code, record, out = record_of(tmp_path, "check")
    (tier,) = record["tiers"]
    assert (code, record["verdict"], tier["tier"], tier["ok"]) == (0, "ok", "paged", 2)
    assert [result["case"] for result in record["results"]] == [case.id for case in few_cases]
    assert tier["families"]["randn"]["used_out"] == record["results"][0]["used_out"]
    assert re.search(r"^randn +1 +1 +0 +0 +0\.\d{3} +0\.\d{3}$", out, re.MULTILINE)
    assert few_cases[0].id not in out
    assert few_cases[0].id in mla_run("check", "--all")[1]
    assert {"torch", "triton", "cpu", "device", "commit"} <= set(record["environment"])
    for result in record["results"]:
        assert (result["seed"], result["diagnosis"], result["kind"]) == (0, None, "")


def test_check_finds_the_fault_of_a_file_and_says_where_and_what(few_cases, tmp_path, tier_file):
    path = tier_file("squared", WRONG)
    code, record, out = record_of(tmp_path, *check_file(path))
    assert (code, record["verdict"]) == (1, "failed")
    assert [r["status"] for r in record["results"]] == ["mismatch"] * 2
    assert record["tiers"][0]["failed"] == [c.id for c in few_cases]
    worst = record["results"][0]
    assert max(worst["used_out"], worst["used_lse"]) > 1
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("1. mismatch, scale: "))
    assert worst["diagnosis"]["sentence"] in lines[at]
    labels = [re.split(r" {2,}", line.strip())[0] for line in lines[at + 1 : at + 7]]
    assert labels == ["case", "error/budget", "first", "worst", "values", "looks like"]
    assert lines[at + 7] == f"  mla check {path} --case {worst['case']} --no-isolate"
    code, again, _ = record_of(tmp_path, *lines[at + 7].split()[1:])
    assert (code, [r["used_out"] for r in again["results"]]) == (1, [worst["used_out"]])


def test_check_runs_a_file_in_a_process_of_its_own(few_cases, tmp_path, tier_file):
    leaves = "def attend(q, cache, batch, up, need): import os; os._exit(0) if need.L else 0\n"
    code, record, out = record_of(tmp_path, "check", tier_file("leaves", leaves), "--timeout", "50", "--stop")
    assert (code, record["verdict"]) == (1, "failed")
    assert [r["status"] for r in record["results"]] == ["crashed", "not_run"]
    assert "1. crashed: its process ended with exit code 0" in out
    assert "1 case not run: stopped at the first failure" in out


def test_check_reports_errors_and_refusals(few_cases, tmp_path, tier_file):
    code, record, out = record_of(tmp_path, *check_file(tier_file("broken", RAISES)))
    assert (code, record["tiers"][0]["raised"]) == (1, 2)
    assert "1. raised, form: RuntimeError: no such kernel" in out
    assert "at    broken.py, line 1, in attend" in out
    code, record, out = record_of(tmp_path, *check_file(tier_file("picky", REFUSES)))
    assert (code, record["verdict"], record["tiers"][0]["refused"]) == (2, "refused", 2)
    assert "2 cases refused: page_size = 8 is too small for it; use 16. And no." in out


def test_check_prints_the_first_failures_and_counts_the_rest(few_cases, tmp_path, tier_file, monkeypatch):
    monkeypatch.setattr("mla.commands.check.SHOWN", 1)
    monkeypatch.setattr("mla.commands.check.DIAGNOSED", 1)
    _, record, out = record_of(tmp_path, *check_file(tier_file("squared", WRONG)))
    assert [r["diagnosis"] is not None for r in record["results"]] == [True, False]
    assert "1 more failure: 1 mismatch. --all prints them." in out
    assert few_cases[1].id not in out


def test_check_takes_pairs_and_several_tiers(few_cases, tmp_path):
    code, record, _ = record_of(tmp_path, "check", "decode=paged+prefill=naive:mha", "template")
    assert (code, [t["verdict"] for t in record["tiers"]]) == (0, ["ok", "ok"])
    assert [r["tier"] for r in record["results"]] == ["decode=paged+prefill=naive:mha"] * 2 + ["template"] * 2
    assert "got template and template, both named template" in sentence_of("check", "template", "template")


def test_check_runs_named_cases_other_seeds_and_no_lse(tmp_path):
    id = "toy-1q1s5-bf16-rows_bf16-needle-shuffled-p16-s0"
    code, record, _ = record_of(tmp_path, "check", "--case", id, "--seed", "3", "--no-lse")
    assert (code, [r["case"] for r in record["results"]]) == (0, [id.replace("-s0", "-s3-nolse")])
    assert [r["seed"] for r in record["results"]] == [3]
    code, record, _ = record_of(tmp_path, "check", "--case", id, "--pin", "dtype=f16")
    assert (code, [c["case"].split("-")[2:4] for c in record["results"]]) == (0, [["f16", "rows_f16"]])
    code, record, _ = record_of(tmp_path, "check", "template", "--case", f"{id}@latent")
    assert (code, record["results"][0]["name"], record["verdict"]) == (2, f"{id}@latent", "refused")


def test_check_writes_junit_with_each_kind_of_result(few_cases, tmp_path, tier_file):
    half = RAISES.replace("raise", "\n if batch.seq_lens_host: raise")
    path = tmp_path / "junit.xml"
    words = (tier_file("broken", half), tier_file("picky", REFUSES), tier_file("squared", WRONG), "template")
    assert mla_run(*check_file(*words), "--junit", path)[0] == 1
    suites = {suite.get("name"): suite for suite in ElementTree.parse(path).getroot()}
    counts = {name: [s.get(k) for k in ("tests", "failures", "errors", "skipped")] for name, s in suites.items()}
    assert counts == {
        "broken": ["2", "0", "2", "0"], "picky": ["2", "0", "0", "2"],
        "squared": ["2", "2", "0", "0"], "template": ["2", "0", "0", "0"],
    }  # fmt: skip
    found = suites["squared"].find("testcase/failure")
    assert found.get("type") == "mismatch"
    assert "scale" in found.get("message")
    assert found.text.splitlines()[-1] == f"mla check {words[2]} --case {few_cases[0].id} --no-isolate"
    assert suites["broken"].find("properties/property[@name='torch']").get("value") == torch.__version__


def test_check_compares_with_an_earlier_run(few_cases, tmp_path, tier_file):
    path, first = tier_file("mine", WRONG), tmp_path / "first.json"
    assert mla_run(*check_file(path, "--json", first))[0] == 1
    same = record_of(tmp_path, *check_file(path, "--baseline", first))
    assert (same[0], same[1]["verdict"], len(same[1]["baseline"]["still_failing"])) == (0, "failed", 2)
    path.write_text((ROOT / "tiers" / "template.py").read_text().replace('"template"', '"mine"'))
    code, record, out = record_of(tmp_path, *check_file(path, "--baseline", first))
    assert (code, record["baseline"]["fixed"]) == (0, [f"mine {case.id}" for case in few_cases])
    assert f"fixed          2: mine {few_cases[0].id}, " in out
    mla_run(*check_file(path, "--json", first))
    path.write_text(WRONG.replace('"template"', '"mine"'))
    code, record, _ = record_of(tmp_path, *check_file(path, "--baseline", first))
    assert (code, len(record["baseline"]["new_failures"])) == (1, 2)
    path.write_text(REFUSES)
    code, record, _ = record_of(tmp_path, *check_file(path, "--baseline", first))
    assert (code, len(record["baseline"]["lost"])) == (2, 2)
    del few_cases[0]
    code, record, _ = record_of(tmp_path, *check_file(path, "--baseline", first, "--seed", "1"))
    assert (len(record["baseline"]["gone"]), len(record["baseline"]["new"])) == (2, 1)
    assert "--baseline: expected a record written by mla check --json" in sentence_of("check", "--baseline", path)


def test_a_baseline_tells_which_errors_more_than_doubled():
    result = {"tier": "t", "status": "ok", "used_lse": 0.0}
    runs = [
        {
            "environment": {"torch": torch, "cpu": "same"},
            "results": [{**result, "name": n, "used_out": u} for n, u in zip("abc", used, strict=True)],
        }
        for torch, used in (("1", (0.1, 0.1, 0.5)), ("2", (0.19, 0.21, 0.2)))
    ]
    changes = compare_records("x", *runs)
    assert changes["changed"] == {"t b": {"before": 0.1, "now": 0.21}, "t c": {"before": 0.5, "now": 0.2}}
    assert changes["environment"] == {"torch": ["1", "2"]}


def test_check_pins_fields_for_kernels_of_one_size(monkeypatch, tmp_path):
    cases = [Case(spec("small_decode"), dtype=d, page_size=p) for d in ("bf16", "f32") for p in (1, 16, 64)]
    cases.append(Case(spec("small_prefill"), dtype="f16", layout="rows_f32", slots="shared", page_size=8))
    monkeypatch.setattr(conformance, "suite", lambda name: cases)
    pins = ("--pin", "dtype=f32", "--pin", "page_size=64", "--pin", "dims=toy_n12")
    code, record, _ = record_of(tmp_path, "check", *pins)
    assert (code, record["pins"]) == (0, list(pins[1::2]))
    assert [r["case"] for r in record["results"]] == [  # six decode cases became one; no page is shared at 64 rows
        "toy_n12-small_decode-f32-rows_f32-randn-shuffled-p64-s0",
        "toy_n12-small_prefill-f32-rows_f32-randn-shuffled-p64-s0",
    ]
    for wrong in ("dims=v4", "page_size=0", "colour=red", "dtype"):
        assert "error: --pin" in sentence_of("check", "--pin", wrong)


def test_check_takes_no_name_that_could_forge_a_report_and_no_limit_that_is_none(tier_file):
    path = tier_file(
        "forged", WRONG + '\nfrom mla.adapters import from_attend\ntier = from_attend("good\\nok", attend)\n'
    )
    assert "tier.name: expected one line of printable text, got 'good\\nok'" in sentence_of(*check_file(path))
    for limit in ("nan", "0", "-1"):
        assert "--timeout: expected seconds above 0" in sentence_of("check", "paged", f"--timeout={limit}")


def test_check_watches_a_file_until_it_is_interrupted(few_cases, tier_file, monkeypatch):
    path, naps = tier_file("mine", WRONG), []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            raise KeyboardInterrupt
        path.write_text((ROOT / "tiers" / "template.py").read_text())
        os.utime(path, (1, 1))

    monkeypatch.setattr("mla.commands.check.time.sleep", nap)
    code, out, err = mla_run(*check_file(path, "--watch"))
    assert (code, err) == (130, "interrupted\n")
    assert re.findall(r"^verdict +(\w+)", out, re.MULTILINE) == ["failed", "ok"]
    assert out.count(f"Waiting for {path} to change; Ctrl-C ends.") == 2


def test_check_faults_prints_the_score(tmp_path, monkeypatch):
    chosen = {name: zoo.FAULTS[name] for name in ("scale_twice", "lse_base_2")}
    monkeypatch.setattr(zoo, "FAULTS", chosen)
    code, record, out = record_of(tmp_path, "check", "--faults")
    assert (code, record["caught"], record["counted"], record["missed"]) == (0, 2, 2, [])
    assert re.search(r"^score +2 of 2 caught, none missed, ", out, re.MULTILINE)
    assert re.search(r"^lse_base_2 +lse +attend +mismatch ", out, re.MULTILINE)


# cost, info


def test_cost_of_a_v3_decode_step(tmp_path):
    code, record, out = record_of(tmp_path, "cost", "--batch", "16q1s4k", "--gpu", "h200")
    assert code == 0
    sizes = {size["name"]: size["bytes"] for size in record["cache_bytes_per_token"]}
    # (512 + 64) numbers, against 128, 8 and 1 times 128 + 64 + 128, of 2 bytes
    assert sizes == {"mla (latent row)": 1152, "mha": 81920, "gqa-8": 5120, "mqa": 640}
    assert "70272" in out  # 61 layers
    rows = {row["form"]: row for row in record["rows"]}
    # 16 requests, 128 heads, 4096 keys: 2 (2 L + R) FLOPs for each, and the absorption 2 L N (P + V) for each token
    assert rows["absorbed"]["flops"] == 16 * 128 * (4096 * 2 * (2 * 512 + 64) + 2 * 512 * (128 + 128))
    assert record["winner"] == {"h200": "absorbed"}
    assert record["break_even"]["flops"] == pytest.approx(512 * 256 / (1024 - 256))
    assert "170.7 new tokens" in out
    assert (rows["absorbed"]["bound"], rows["absorbed"]["gpu"]) == ("memory", "h200")
    assert rows["absorbed"]["time_us"] == pytest.approx(rows["absorbed"]["bytes"] / 4.8e12 * 1e6)


def test_cost_of_a_prefill_and_of_ceilings_given_by_hand(tmp_path):
    words = ("cost", "--model", "toy", "--dtype", "float32", "--batch", "2q64", "--gpu", "mine:0.5:20")
    code, record, _ = record_of(tmp_path, *words)
    assert (code, record["winner"]) == (0, {"mine": "expanded"})
    assert [record["settings"][name] for name in ("model", "heads", "dtype")] == [
        *({"value": "toy", "source": "flag"}, {"value": None, "source": "default"}),
        {"value": "float32", "source": "flag"},
    ]
    assert record["model"]["row_bytes"] == 160
    assert (record["gpus"][0]["flops"], record["gpus"][0]["bandwidth"]) == (0.5e12, 20e9)
    assert record["gpus"][0]["ridge"] == 25
    assert record["break_even"]["roofline"] == {"mine": 1}
    assert record["batch"] == {
        "text": "2q64", "requests": 2, "context": 0, "tokens": 128, "keys": 128, "pairs": 2 * 64 * 65 // 2,
    }  # fmt: skip


def test_a_command_has_defaults_of_its_own_below_every_other_source(tmp_path, monkeypatch):
    _, record, _ = record_of(tmp_path, "cost")
    assert record["settings"]["model"] == {"value": "deepseek-v3", "source": "default of mla cost"}
    assert record["settings"]["dtype"] == {"value": "bfloat16", "source": "default of mla cost"}
    monkeypatch.setenv("MLA_MODEL", "toy")
    assert record_of(tmp_path, "cost")[1]["settings"]["model"] == {"value": "toy", "source": "environment MLA_MODEL"}


def test_cost_names_what_it_does_not_count():
    code, out, _ = mla_run("cost", "--model", "deepseek-v3.2")
    assert code == 0
    assert re.search(r"^not counted +index_topk", out, re.MULTILINE)


def test_info_shows_sources_and_the_workspace_formula(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_MAX_RUNNING", "16")
    code, record, out = record_of(tmp_path, "info", "--seed", "3")
    assert code == 0
    assert re.search(r"^max_running +environment MLA_MAX_RUNNING +16$", out, re.MULTILINE)
    assert re.search(r"^seed +flag +3$", out, re.MULTILINE)
    assert re.search(r"^page_size +default +64$", out, re.MULTILINE)
    # The longest request has 700 + 8 tokens, of which the last is never cached; 5656 rows are 88 pages and a bit.
    assert record["workspace"]["rows"] == max(8 * 707, 4 * 16 * 64) // 64 * 64 == 5632
    assert record["workspace"]["bytes"] == 5632 * (160 + 3 * (12 + 10) * 4)
    assert "5632 rows = min(max(8 x 707 longest request, 4 x 16 max_running x 64 page_size), 65536)" in out
    assert record["form_costs"] == "default: counted work, no table"
    assert record["environment"]["torch"] in out


def test_info_of_a_cap_that_is_set(tmp_path):
    _, record, out = record_of(tmp_path, "info", "--max-workspace-tokens", "640")
    assert record["workspace"]["rows"] == 640
    assert "640 rows = max_workspace_tokens" in out


def test_tables_of_form_costs_reach_the_tier_and_the_report(tmp_path, trace):
    path = tmp_path / "tune.json"
    table = {"size": [3, 32, 12, 8, 10], "dtype": "float32", "query_lens": [1, 64], "contexts": [1, 64]}
    table |= {"provenance": "by hand", "mha": [[1.0, 1.0], [1.0, 1.0]], "mqa": [[2.0, 2.0], [2.0, 2.0]]}
    path.write_text(json.dumps({"tables": [table]}))
    _, record, _ = record_of(tmp_path, "info", "--tune-file", path)
    assert record["form_costs"] == "measured: tune.json, by hand"
    from mla.cli import tier_of

    tier = tier_of("paged", RunSettings(tune_file=path))
    assert tier.costs.provenance == "measured: tune.json, by hand"
    assert mla_run("compare", "--trace", trace, "--tier", "paged", "--tune-file", path)[0] == 0


# bench


def test_bench_times_a_right_tier_and_counts_its_rates(tmp_path):
    words = (
        "bench",
        "paged",
        "naive:mqa",
        "--model",
        "toy",
        "--batch",
        "3q1s40",
        "--repeats",
        "3",
        "--gpu",
        "m:0.1:20",
    )
    code, record, out = record_of(tmp_path, *words)
    assert (code, [row["tier"] for row in record["rows"]]) == (0, ["paged", "naive:mqa"])
    for row in record["rows"]:
        assert row["status"] == "ok"
        assert 0 < row["attend"]["low_ms"] <= row["attend"]["median_ms"] <= row["attend"]["high_ms"]
        assert row["attend"]["repeats"] == 3
        seconds = row["attend"]["median_ms"] / 1e3
        assert row["tokens_per_second"] == pytest.approx(3 / seconds)
        # absorbed: 3 tokens of 2 L N (P + V), 120 pairs of 2 N (2 L + R)
        assert row["flops"] == 3 * 2 * 32 * 3 * 22 + 120 * 2 * 3 * (64 + 8)
        assert row["gflops_per_second"] == pytest.approx(row["flops"] / seconds / 1e9)
        assert row["bound_ms"] == pytest.approx(max(row["flops"] / 0.1e12, row["bytes"] / 20e9) * 1e3)
        assert row["cache_bytes_per_token"] == 160
    paged, naive = record["rows"]
    assert 0 < paged["peak_workspace_bytes"] <= 1.05 * paged["workspace_bound_bytes"]
    assert naive["workspace_bound_bytes"] is None
    assert record["environment"]["cpu"] in out
    assert re.search(r"^paged +3q1s40 +ok ", out, re.MULTILINE)


def test_bench_does_not_time_a_tier_that_is_wrong_or_refuses(tmp_path, tier_file):
    wrong, picky = tier_file("squared", WRONG), tier_file("picky", REFUSES)
    size = ("--model", "toy", "--batch", "3q1s40", "--repeats", "1")
    code, record, out = record_of(tmp_path, "bench", wrong, "template", *size)
    assert (code, [row["status"] for row in record["rows"]]) == (1, ["mismatch", "ok"])
    assert record["rows"][0]["attend"] is record["rows"][0]["tokens_per_second"] is None
    assert re.search(rf"^{re.escape(str(wrong))} +3q1s40 +mismatch +[\d.e+]+ +- +- +- ", out, re.MULTILINE)
    code, record, out = record_of(tmp_path, "bench", picky, *size)
    assert (code, record["rows"][0]["status"]) == (2, "refused")
    assert f"{picky} on 3q1s40 refused: page_size = 8 is too small for it; use 16. And no." in out


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers, an extra of the tests"
)
def test_bench_times_whole_layers_beside_transformers(tmp_path):
    words = ("bench", "--model", "toy", "--batch", "2q1s17", "--repeats", "2", "--beside", "transformers")
    code, record, out = record_of(tmp_path, *words)
    assert (code, [(row["name"], row["batch"]) for row in record["layers"]]) == (
        0,
        [("transformers", "2q1s17"), ("mla paged", "2q1s17")],
    )
    theirs, ours = record["layers"]
    assert (theirs["faster"], theirs["difference"]) == (1, 0)
    assert ours["faster"] == pytest.approx(theirs["timing"]["median_ms"] / ours["timing"]["median_ms"])
    assert 0 < ours["difference"] < 1e-3
    assert re.search(r"^mla paged +2q1s17 ", out, re.MULTILINE)


# tune


def test_tune_measures_a_grid_and_keeps_tables_of_other_sizes(tmp_path):
    path = tmp_path / "tune.json"
    grid = ("--query-lens", "1,8", "--contexts", "1,16,32", "--repeats", "1", "--file", path)
    code, record, out = record_of(tmp_path, "tune", "--model", "toy", *grid)
    assert code == 0
    assert (record["table"]["size"], record["table"]["dtype"]) == ([3, 32, 12, 8, 10], "float32")
    assert [len(record["table"]["mha"]), len(record["table"]["mqa"][0])] == [2, 3]
    assert min(ms for form in ("mha", "mqa") for row in record["table"][form] for ms in row) > 0
    assert re.search(r"^ +8( +\d+\.\d\d){3}$", out, re.MULTILINE)
    assert f"--tune-file {path}" in out
    assert record["regret"] is None
    code, record, out = record_of(tmp_path, "tune", "--model", "toy", *grid, "--verify")
    assert [len(row) for row in record["regret"]] == [3, 3]
    assert len(re.findall(r"^new \\ cached +1 +16 +32$", out, re.MULTILINE)) == 2
    for _ in range(2):  # the second replaces the first of its size
        assert mla_run("tune", "--model", "toy", "--heads", "2", *grid)[0] == 0
    assert [table["size"][0] for table in json.loads(path.read_text())["tables"]] == [3, 2]
    provenance = mla_run("info", "--tune-file", path)[1]
    assert "measured: tune.json" in provenance


# How it looks


@pytest.fixture
def terminal(monkeypatch):
    """Return a function (width) that makes the console a terminal, and gives back the file it writes to."""

    def make(width: int) -> io.StringIO:
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, color_system="standard", width=width)
        monkeypatch.setattr(mla.commands.output, "Console", lambda **words: console)
        return file

    return make


def lines_of(file: io.StringIO) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()


@pytest.mark.parametrize("width", [40, 140])
def test_a_terminal_cuts_no_command_and_no_value_of_a_finding(terminal, width):
    command, file = "mla check mine.py --case " + "x" * 60, terminal(width)
    show([Finding("1. mismatch: every row is wrong", {"case": "z" * 60, "at": "mine.py"}, command)])
    lines = lines_of(file)
    assert lines[0] == "1. mismatch: every row is wrong"
    assert f"  {command}" in lines
    assert "".join(lines).count("z") == 60
    assert "…" not in "".join(lines)


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (140, 1)])
def test_a_terminal_gets_every_cell_at_any_width(replayed, terminal, width, tables):
    blocks = compare_blocks(replayed[1])
    file = terminal(width)
    show(blocks)
    lines = lines_of(file)
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("─") for line in lines) == tables
    text = " ".join(" ".join(lines).split())
    assert all(cell.split("+")[0] in text for row in blocks[1].rows for cell in row)
    assert "…" not in text


def test_a_narrow_terminal_repeats_the_first_columns(terminal):
    file = terminal(24)
    show([Grid(("name", "one", "two\nlines"), [["alpha", "1" * 12, "2" * 12]])])
    assert [line.split() for line in lines_of(file) if "alpha" in line] == [["alpha", "1" * 12], ["alpha", "2" * 12]]
    file = terminal(24)
    show([Grid(("name", "batch", "one", "two"), [["alpha", "b", "1" * 8, "2" * 8]], keys=2)])
    assert [line.split() for line in lines_of(file) if "alpha" in line] == [
        *(["alpha", "b", "1" * 8], ["alpha", "b", "2" * 8]),
    ]


def test_a_last_column_of_text_wraps_and_keeps_every_word(terminal):
    file = terminal(40)
    show([Grid(("name", "value"), [["alpha", "one two three four five six seven eight nine"]])])
    assert len([line for line in lines_of(file) if "alpha" in line]) == 1
    assert " ".join(" ".join(lines_of(file)[2:]).split()) == "alpha one two three four five six seven eight nine"


def test_colours_say_the_verdict(terminal):
    file = terminal(80)
    show([Grid(("tier", "verdict"), [["a", "ok"], ["b", "mismatch"]])])
    assert "\x1b[32mok" in file.getvalue()
    assert "\x1b[1;31mmismatch" in file.getvalue()


def test_text_in_brackets_is_not_markup(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(["[bold]batch[0] 12", {"a": "x[1]"}])
    assert capsys.readouterr().out.splitlines()[0] == "[bold]batch[0] 12"


def test_progress_moves_a_bar_only_on_a_terminal(terminal, capsys):
    with progress("replay", "tokens") as tick:
        tick(1, 4)
    assert capsys.readouterr() == ("", "")
    file = terminal(80)
    with progress("replay", "tokens") as tick:
        tick(1, 4)
    assert "1 of 4 tokens" in "".join(lines_of(file))


@pytest.mark.parametrize(
    ("used", "shown"),
    [
        (0.06021, "0.061"),
        (1.0, "1.000"),
        (1.0000001, "1.001"),
        (12345.6, "1.23e+04"),
        (float("inf"), "inf"),
        (None, "-"),
    ],
)
def test_a_ratio_above_1_never_reads_as_1(used, shown):
    assert ratio(used) == shown


def test_help_lists_every_setting_as_a_flag():
    code, out, _ = mla_run("compare", "--help")
    assert code == 0
    flags = {"--tier" if name == "tiers" else f"--{name.replace('_', '-')}" for name in RunSettings.model_fields}
    assert {flag for flag in flags if flag not in out} == set()
    assert {"--config", "--json"} <= set(re.findall(r"--[a-z-]+", out))


# From outside


def outside(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mla", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_module_and_console_script_are_the_same_app():
    done = outside("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("mla-tiers ")
    assert 'mla = "mla.cli:app"' in (ROOT / "pyproject.toml").read_text()


def test_wrong_input_from_outside_has_no_traceback():
    done = outside("compare", "--tier", "pagedd")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: tier: ")
    assert len(done.stderr.splitlines()) == 1


def test_help_does_not_wait_for_torch():
    program = "import sys, mla.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


# README


def readme_commands() -> list[list[str]]:
    blocks = re.findall(r"```[a-z]*\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split("  #")[0].split() for block in blocks for line in block.splitlines()]
    return [line[1:] for line in lines if line[:1] == ["mla"]]


def test_readme_commands_have_these_flags_and_these_files():
    commands = readme_commands()
    assert {words[0] for words in commands} >= {"compare", "tiers", "check", "bench", "cost", "info"}
    group = typer.main.get_command(app)
    for words in commands:
        command = group.commands[words[0]]
        command.make_context(words[0], words[1:])  # raises on an unknown flag or a missing value


def test_readme_tree_names_every_module_and_nothing_else():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    modules = {
        path.relative_to(ROOT).as_posix() for package in ("mla", "tiers") for path in (ROOT / package).rglob("*.py")
    }
    wanted = {name for name in modules if not name.endswith("__init__.py")} | {"tiers/__init__.py"}
    tree = re.search(r"```text\n(mla/.*?)```", text, re.DOTALL)
    assert tree
    found, folders = set(), []
    for line in tree[1].splitlines():
        name = line.split()[0] if line.strip() else ""
        depth = (len(line) - len(line.lstrip())) // 2
        if name.endswith("/"):
            folders = [*folders[:depth], name]
        elif name.endswith(".py"):
            found.add("".join(folders[:depth]) + name)
    assert found == wanted


LEAVES = "raise SystemExit(0)\n"


@pytest.mark.parametrize("command", ["check", "bench", "compare"])
def test_a_tier_file_that_exits_with_0_is_never_a_success(tier_file, command):
    words = ("--tier",) if command == "compare" else ()
    text = sentence_of(command, *words, tier_file("leaves", LEAVES))
    assert text.startswith("error: tier: expected a file that can be imported, got ")
    assert "SystemExit: 0. Fix: " in text


def test_a_tier_that_exits_in_attend_is_a_failed_check_and_in_the_list_a_reason(tier_file):
    code, out, _ = mla_run("check", tier_file("quits", "def attend(*given): raise SystemExit(0)\n"))
    assert code == 1
    assert "SystemExit: 0" in out
    code, out, _ = mla_run("tiers", "--tier", tier_file("leaves", LEAVES))
    assert code == 0
    assert "SystemExit: 0" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["compare", "--tier", "paged:mha", "--form", "mqa"],
            "form: expected 'mha' or 'auto' beside the tier 'paged:mha'",
        ),
        (["bench", "--batch", "1q0"], "--batch: expected at least one new token, got '1q0'"),
        (["cost", "--batch", "3q0s16"], "--batch: expected at least one new token, got '3q0s16'"),
        (["cost", "--batch", "1048577q1"], "batch: expected at most 1048576 requests, got '1048577q1'"),
        (["bench", "--batch", "1q1s2147483648"], "batch: expected at most 2147483647 tokens, got '1q1s2147483648'"),
        (["cost", "--gpu", "a:.:1"], "--gpu: expected one of "),
        (["cost", "--gpu", "a:0:0"], "--gpu: expected one of "),
        (["cost", "--gpu", "a:1e999:1"], "--gpu: expected one of "),
        (
            ["compare", "--seed", 2**63],
            "seed: expected a whole number of at least 0, at most 9223372036854775807, got ",
        ),
        (["cost", "--heads", 65537], "heads: expected a whole number of at least 1, at most 65536, got '65537'"),
        (["bench", "--threads", 10**30], "threads: expected a whole number of at least 1, at most 4096, got "),
    ],
)
def test_what_is_contradictory_empty_or_beyond_all_bounds_is_a_sentence(words, text):
    assert sentence_of(*words).startswith(f"error: {text}")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(0), "error: a tier ended the program (SystemExit: 0). Fix: "),
        (MemoryError("596 GiB"), "error: not enough memory (596 GiB). Fix: "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "error: not enough memory (DefaultCPUAllocator: "),
    ],
)
def test_an_exit_of_a_tier_and_a_lack_of_memory_are_sentences(capsys, error, text):
    with pytest.raises(typer.Exit) as caught, mla.commands.output.sentences():
        raise error
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err.startswith(text)
    with pytest.raises(RuntimeError, match=r"^a bug$"), mla.commands.output.sentences():
        raise RuntimeError("a bug")


def test_compare_writes_one_page_that_fetches_nothing_and_shows_what_the_table_shows(tmp_path, trace):
    page = tmp_path / "page.html"
    code, record, out = record_of(
        tmp_path, "compare", "--trace", str(trace), "--tier", "naive:mqa", "--html", str(page)
    )
    text = page.read_text(encoding="utf-8")
    assert code == 0
    assert not re.search(r"https?://|<script|<link|src=", text)
    (tier,) = record["tiers"]
    for shown in (tier["name"], ratio(tier["out"]["used"]), ratio(tier["lse"]["used"])):
        assert shown in out
        assert text.count(shown) >= 2  # in the table and in a figure
    assert f">{tier['cache_bytes_per_token']}<" in text
    assert f">{tier['mha_bytes_per_token']}<" in text
    assert text.count("<svg") == 2
    assert record["environment"]["torch"] in text


def test_a_page_shows_who_is_wrong():
    right, wrong, none = (bars([("a", used, "x")], True) for used in (0.5, 1.5, None))
    assert "--error)" not in right.partition("<line")[0]
    assert "--error)" in wrong.partition("<line")[0]
    assert "--error)" in none.partition("<line")[0]


def test_where_a_page_cannot_be_written_is_said_before_the_run(tmp_path):
    assert "--html: expected the path of a file to write" in sentence_of(
        "compare", "--html", str(tmp_path / "no" / "x")
    )
