"""Tiers are swapped by the command line alone: the stand-ins of three libraries beside our paged tier, on a CPU."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla.cli import app

SIZES = {
    "model_type": "deepseek_v3", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_scaling": None,
}  # fmt: skip
REQUESTS = (
    {"timestamp": 0, "input_length": 70, "output_length": 2, "hash_ids": [0]},
    {"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]},
)


@pytest.mark.parametrize("library", ["flashinfer", "aiter", "flashmla"])
def test_compare_replays_a_trace_through_the_stand_in_of_a_library(library, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
    trace, record = tmp_path / "trace.jsonl", tmp_path / "record.json"
    trace.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS), encoding="utf-8")
    words = ["compare", "--model", str(tmp_path / "config.json"), "--trace", str(trace), "--json", str(record)]
    words += ["--dtype", "bfloat16", "--page-size", "64", "--tier", "paged"]
    found = CliRunner().invoke(app, [*words, "--tier", str(Path(__file__).with_name(f"simulated_{library}.py"))])
    assert found.exit_code == 0, found.output
    rows = json.loads(record.read_text(encoding="utf-8"))["tiers"]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert library in rows[1]["name"]
