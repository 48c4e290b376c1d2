"""Tiers are swapped by the command line alone: the stand-ins of three libraries beside our paged tier, on a CPU.

On a GPU our own Triton kernels beside naive attention, which is what finds weights or rows left on the host.
"""

import json
from pathlib import Path

import pytest
import torch
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
    rows = compared(tmp_path, "--tier", "paged", "--tier", str(Path(__file__).with_name(f"simulated_{library}.py")))
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert library in rows[1]["name"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compare_replays_a_trace_on_a_gpu(tmp_path):
    pytest.importorskip("triton")
    rows = compared(tmp_path, "--tier", "naive", "--tier", "triton", "--device", "cuda")
    assert [row["status"] for row in rows] == ["ok", "ok"]


def compared(folder: Path, *words: str) -> list[dict]:
    """What `mla compare` says of each tier, for a short trace in bfloat16."""
    (folder / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
    trace, record = folder / "trace.jsonl", folder / "record.json"
    trace.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS), encoding="utf-8")
    given = ["--model", str(folder / "config.json"), "--trace", str(trace), "--json", str(record)]
    found = CliRunner().invoke(app, ["compare", *given, "--dtype", "bfloat16", "--page-size", "64", *words])
    assert found.exit_code == 0, found.output
    return json.loads(record.read_text(encoding="utf-8"))["tiers"]
