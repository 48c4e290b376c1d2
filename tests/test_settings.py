"""Where settings come from, which wins, and what a wrong one says."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from mla.settings import RunSettings, TierPair, load_settings, parse_tier


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_documented_ones():
    settings, origin = load_settings()
    assert settings == RunSettings()
    assert (settings.model, settings.page_size, settings.token_budget, settings.max_running) == ("toy", 64, 2048, 32)
    assert (settings.dtype, settings.cache_dtype, settings.form, settings.device) == ("float32", None, "auto", "cpu")
    assert settings.trace is settings.requests is settings.num_pages is settings.max_workspace_tokens is None
    assert settings.threads == 1
    assert settings.tune_file is settings.max_model_len is settings.heads is None
    assert settings.tiers == ("naive:mha", "naive:mqa", "paged", TierPair("paged", "naive:mha"), "template")
    assert origin == dict.fromkeys(RunSettings.model_fields, "default")


def test_every_field_is_described():
    assert [name for name, field in RunSettings.model_fields.items() if not field.description] == []


def test_flag_beats_environment_beats_file_beats_default(tmp_path, monkeypatch):
    path = toml(tmp_path, "page_size = 1\ntoken_budget = 2\nmax_running = 3\n")
    monkeypatch.setenv("MLA_TOKEN_BUDGET", "20")
    monkeypatch.setenv("MLA_MAX_RUNNING", "30")
    settings, origin = load_settings(path, {"max_running": 300, "seed": None})
    assert (settings.page_size, settings.token_budget, settings.max_running, settings.seed) == (1, 20, 300, 0)
    assert origin["page_size"] == f"file {path}"
    assert origin["token_budget"] == "environment MLA_TOKEN_BUDGET"
    assert origin["max_running"] == "flag"
    assert origin["seed"] == "default"


def test_a_flag_that_was_not_given_hides_nothing(monkeypatch):
    monkeypatch.setenv("MLA_PAGE_SIZE", "16")
    assert load_settings(overrides={"page_size": None})[0].page_size == 16


def test_a_flag_takes_a_value_of_the_file_away_with_none(tmp_path):
    settings, origin = load_settings(toml(tmp_path, "requests = 8\n"), {"requests": "none"})
    assert (settings.requests, origin["requests"]) == (None, "flag")
    assert load_settings(overrides={"threads": "none"})[0].threads is None
    with pytest.raises(ValueError, match=r"^page_size: .*got 'none' \(flag\)"):
        load_settings(overrides={"page_size": "none"})


def test_environment_gives_lists_pairs_paths_and_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_TIERS", "paged, my/tier.py ,decode=paged+prefill=naive:mha")
    monkeypatch.setenv("MLA_TRACE", "some/trace.csv")
    monkeypatch.setenv("MLA_REQUESTS", "none")
    settings, origin = load_settings(toml(tmp_path, "requests = 8"))
    assert settings.tiers == ("paged", "my/tier.py", TierPair("paged", "naive:mha"))
    assert settings.trace == Path("some/trace.csv")
    assert settings.requests is None
    assert origin["requests"] == "environment MLA_REQUESTS"


def test_file_gives_lists_and_tables(tmp_path):
    path = toml(tmp_path, 'tiers = ["naive:mqa", {decode = "flashinfer", prefill = "triton"}]\ndtype = "bfloat16"')
    settings, _ = load_settings(path)
    assert settings.tiers == ("naive:mqa", TierPair("flashinfer", "triton"))
    assert settings.dtype == "bfloat16"
    assert load_settings(toml(tmp_path, 'tiers = "paged"'))[0].tiers == ("paged",)


def test_a_pair_reads_back_from_its_own_text():
    pair = TierPair("paged", "naive:mha")
    assert load_settings(overrides={"tiers": [str(pair)]})[0].tiers == (pair,)
    assert load_settings(overrides={"tiers": [pair]})[0].tiers == (pair,)


def test_parse_tier_reads_names_and_pairs_and_complains_in_a_sentence():
    assert parse_tier(" paged ") == "paged"
    assert parse_tier("decode=paged+prefill=naive:mha") == TierPair("paged", "naive:mha")
    with pytest.raises(ValueError, match=r"^tier: expected a tier name .*got 'decode=paged'\. Fix: see `mla tiers`\.$"):
        parse_tier("decode=paged")


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        RunSettings().page_size = 1


def test_unknown_key_of_a_file_names_the_file_and_the_nearest_setting(tmp_path):
    path = toml(tmp_path, "page_sise = 3\n")
    with pytest.raises(ValueError, match=r"^page_sise: expected the name of a setting") as error:
        load_settings(path)
    assert f"(file {path})" in str(error.value)
    assert str(error.value).endswith("Fix: write page_size.")


def test_unknown_variable_names_the_nearest_variable(monkeypatch):
    monkeypatch.setenv("MLA_TOKENBUDGET", "3")
    with pytest.raises(ValueError, match=r"^MLA_TOKENBUDGET: .*\(environment\)\. Fix: write MLA_TOKEN_BUDGET\.$"):
        load_settings()


def test_unknown_flag_and_a_name_like_no_other():
    with pytest.raises(ValueError, match=r"^zzz: .*\(flag\)\. Fix: use one of model, .*threads\.$"):
        load_settings(overrides={"zzz": 1})


def test_every_unknown_name_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_SEEED", "3")
    with pytest.raises(ValueError, match="formm") as error:
        load_settings(toml(tmp_path, "formm = 1\nmodell = 2\n"), {"page": 1})
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["formm", "modell", "MLA_SEEED", "page"]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("page_size", 0, "a whole number of at least 1"),
        ("page_size", "64.0", "a whole number of at least 1"),
        ("page_size", 64.0, "a whole number of at least 1"),
        ("page_size", True, "a whole number of at least 1"),
        ("requests", -1, "a whole number of at least 1"),
        ("seed", -1, "a whole number of at least 0"),
        ("dtype", "float64", "'float32', 'bfloat16' or 'float16'"),
        ("form", "absorbed", "'auto', 'mha' or 'mqa'"),
        ("device", "gpu 3", "a torch device such as 'cpu', 'cuda' or 'cuda:0'"),
        ("trace", 3, "the path of a file"),
        ("trace", "", "a value"),
        ("tiers", [], "at least one tier, each named once"),
        ("tiers", ["paged", "paged"], "at least one tier, each named once"),
        ("tiers", [3], "a tier name such as 'paged', or a pair"),
        ("tiers", ["paged", ""], "a tier name such as 'paged', or a pair"),
        ("tiers", [{"decode": "paged"}], "a tier name such as 'paged', or a pair"),
        ("tiers", [{"decode": "a", "prefill": "b", "verify": "c"}], "a tier name such as 'paged', or a pair"),
        ("tiers", "decode=a+prefill=b+prefill=c", "a tier name such as 'paged', or a pair"),
    ],
)
def test_wrong_value_is_one_sentence_with_field_expected_got_and_fix(field, value, expected):
    with pytest.raises(ValueError, match=f"^{field}: expected ") as error:
        load_settings(overrides={field: value})
    message = str(error.value)
    assert expected in message
    assert f"got {value!r} (flag). Fix: " in message
    assert "\n" not in message
    assert "pydantic" not in message


def test_wrong_value_names_the_variable_that_holds_it(monkeypatch):
    monkeypatch.setenv("MLA_PAGE_SIZE", "sixty-four")
    with pytest.raises(ValueError, match=r"^page_size: .* got 'sixty-four' \(environment MLA_PAGE_SIZE\)\."):
        load_settings()


def test_every_wrong_value_is_told_at_once():
    with pytest.raises(ValueError, match="page_size") as error:
        load_settings(overrides={"page_size": 0, "dtype": "int8"})
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["dtype", "page_size"]


def test_workspace_smaller_than_a_page_is_refused():
    assert load_settings(overrides={"max_workspace_tokens": 64})[0].max_workspace_tokens == 64
    with pytest.raises(ValueError, match=r"^max_workspace_tokens: expected at least one page of 64 tokens, got 63\."):
        load_settings(overrides={"max_workspace_tokens": 63})


def test_unreadable_file_is_a_sentence(tmp_path):
    with pytest.raises(
        ValueError, match=r"absent\.toml: expected a readable TOML file, .*Fix: name a file that exists"
    ):
        load_settings(tmp_path / "absent.toml")
    with pytest.raises(ValueError, match=r"run\.toml: expected a readable TOML file, .*at line 2.*Fix: mend it"):
        load_settings(toml(tmp_path, "seed = 1\npage_size = \n"))
    (tmp_path / "run.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"run\.toml: expected a readable TOML file"):
        load_settings(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("field", "most"), [("seed", 2**63 - 1), ("threads", 4096), ("heads", 65536), ("num_pages", 2**31 - 1)]
)
def test_a_count_past_its_bound_is_refused_and_the_bound_is_not(field, most):
    assert getattr(load_settings(overrides={field: str(most)})[0], field) == most
    for value in (most + 1, str(most + 1), "9" * 5000):
        with pytest.raises(ValueError, match=f"^{field}: expected a whole number of at least ., at most {most}, got "):
            load_settings(overrides={field: value})
