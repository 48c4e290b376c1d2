"""What `mla bench` times and what it refuses to time, with tiers that are wrong in one way each, and no wall clock.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad
from typer.testing import CliRunner

import mla.bench as bench
import mla.bench_scene as bench_scene
import tiers
from mla.accuracy import compare
from mla.adapters import from_latent
from mla.bench import bench_together
from mla.bench_scene import drawn_inputs, is_big, sample, scene_of
from mla.cache import FloatRows, PagedLatentCache, slots_of
from mla.cli import app
from mla.commands import gpu
from mla.commands.figures import bench_blocks
from mla.commands.output import Grid
from mla.commands.records import bench_record
from mla.conformance.cases import DIMS, TOY, Case
from mla.conformance.specs import spec
from mla.cost import BatchCounts, latent_cost
from mla.presets import preset
from mla.roofline import Gpu
from mla.state import AttentionState
from mla.timing import Timing

CASE = Case(spec("3q1s40_1q4s9"), dtype="f32")


def test_tiers_are_timed_on_one_cache(monkeypatch):
    """Each is judged with a cache of its own, and timed with the first of those that hold the same bytes."""
    lie = []
    attend = type(tiers.get("paged")).attend
    noted = lambda tier, q, cache, *rest: lie.append(cache.data.data_ptr()) or attend(tier, q, cache, *rest)
    monkeypatch.setattr(type(tiers.get("paged")), "attend", noted)
    results = bench_together([tiers.get("paged"), tiers.get("paged")], CASE, repeats=2)
    assert [r.gate.status for r in results] == ["ok", "ok"]
    assert len(set(lie)) > 1
    assert len(set(lie[-4:])) == 1


def test_caches_are_one_where_all_their_bytes_are_the_same():
    rows = torch.randn(2, 4, 8)
    rows[1, 3] = float("nan")
    other = rows.clone()
    other[1, 3, 7] = 0.0
    apart = torch.zeros(2, 4, 16)[..., :8]
    apart.copy_(rows)
    given = (rows, rows.clone(), other, rows.double(), other.clone(), apart)
    caches = [PagedLatentCache(x, FloatRows(6, 2), 4) for x in given]
    ready = [SimpleNamespace(cache=cache) for cache in caches]
    shared = bench._share_caches(ready)
    assert [[one.cache is cache for cache in caches].index(True) for one in ready] == [0, 0, 2, 3, 2, 5]
    assert [len(sharing) for sharing, _ in shared] == [2, 2]
    assert [given_up is caches[i] for (_, given_up), i in zip(shared, (1, 4), strict=True)] == [True, True]


def test_who_writes_to_a_shared_cache_is_told_with_all_who_read_it(monkeypatch):
    calls = []
    attend = type(tiers.get("paged")).attend

    def vandal(tier, q, cache, *rest):
        """Zero the cache once the gate is passed."""
        calls.append(1)
        if len(calls) > 12:
            cache.data.zero_()
        return attend(tier, q, cache, *rest)

    monkeypatch.setattr(type(tiers.get("paged")), "attend", vandal)
    results = bench_together([tiers.get("naive:mqa"), tiers.get("paged")], CASE, repeats=12)
    assert [r.gate.status for r in results] == ["mismatch"] * 2
    assert all("the cache that naive:mqa, paged share was changed" in r.gate.detail for r in results)
    assert [r.attend for r in results] == [None, None]


@pytest.fixture
def big(monkeypatch):
    """Every plain case is a big one."""
    monkeypatch.setattr(bench_scene, "BIG", 0)


def kernel(q_latent, q_pe, cache, batch, need):
    """A right inner kernel in plain PyTorch, q_latent (T, N, L) in and out (T, N, L)."""
    outs, lses, start = [], [], 0
    for b, (query_len, seq_len) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        rows = slice(start, start + query_len)
        kv_c, k_pe = (x.double() for x in cache.read(slots_of(batch.block_table[b], 0, seq_len, batch.page_size)))
        scores = torch.einsum("tnl,sl->tns", q_latent[rows].double(), kv_c)
        scores = (scores + torch.einsum("tnr,sr->tns", q_pe[rows].double(), k_pe)) * need.softmax_scale
        hidden = torch.arange(seq_len) >= batch.row_kv_lens[rows][:, None]
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        outs.append(torch.softmax(scores, -1) @ kv_c)
        lses.append(torch.logsumexp(scores, -1))
        start += query_len
    return AttentionState(torch.cat(outs).to(q_latent.dtype), torch.cat(lses).float())


class Turncoat:
    """Right for so many calls of attend, and then off by one part in five; all else is the naive tier's."""

    def __init__(self, right: int) -> None:
        self.tier, self.left, self.name = tiers.get("naive:mqa"), right, "turncoat"

    def __getattr__(self, name):
        return getattr(self.tier, name)

    def attend(self, q, cache, prepared, plan, out=None):
        state = self.tier.attend(q, cache, prepared, plan, out)
        self.left -= 1
        if self.left < 0:
            state.out.mul_(1.2)
        return state


# The gate


def test_a_right_tier_is_timed_at_both_levels():
    raw = from_latent("raw", kernel)
    whole, inner = (bench_together([raw], CASE, 2, level=level)[0] for level in ("attend", "latent"))
    assert (whole.gate.status, whole.gate.level, inner.gate.status, inner.gate.level) == (
        "ok",
        "attend",
        "ok",
        "latent",
    )
    assert whole.attend.repeats == inner.attend.repeats == 2
    assert whole.attend.how == "host"
    assert whole.plan is not None
    assert inner.plan is None, "a raw kernel plans nothing"
    assert whole.first_ms > 0
    assert inner.bound_bytes is None


def test_a_wrong_inner_kernel_is_not_timed():
    def off(*args):
        state = kernel(*args)
        return AttentionState(state.out * 1.2, state.lse)

    found = bench_together([from_latent("off", off)], CASE, 2, level="latent")[0]
    assert (found.gate.status, found.attend, found.plan, found.write) == ("mismatch", None, None, None)


def test_a_tier_without_inner_kernel_is_refused_at_that_level():
    found = bench_together([tiers.get("naive")], CASE, 2, level="latent")[0]
    assert (found.gate.status, found.gate.detail) == ("refused", "naive:mha has no inner kernel.")


def test_what_turns_wrong_while_it_is_timed_is_not_reported():
    # one attend to warm up, one for the gate and three of the suite; the timed ones are the next four
    calls = []
    tier = Turncoat(10**6)
    tier.attend = lambda *args, whole=tier.attend: calls.append(1) or whole(*args)
    assert bench_together([tier], CASE, 2)[0].gate.ok
    timed = 4  # two of warm-up, two that count; one more measures memory
    before = len(calls) - timed - 1
    for right in (before, len(calls) - 2):
        found = bench_together([Turncoat(right)], CASE, 2)[0]
        assert found.gate.status == "mismatch"
        assert found.attend is None
        assert found.gate.detail.startswith("right before it was timed and wrong after")


def test_a_tier_that_raises_is_a_row_and_the_others_are_timed():
    class Raises(Turncoat):
        def attend(self, *args):
            raise RuntimeError("no such kernel image")

    first, second = bench_together([Raises(0), tiers.get("naive:mqa")], CASE, 1)
    assert (first.gate.status, first.gate.detail) == ("raised", "RuntimeError: no such kernel image")
    assert second.gate.ok
    assert second.attend is not None


def test_a_promise_of_capture_that_is_not_kept_is_a_fault(monkeypatch):
    def lap_of(call, device, graph):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(bench, "lap_of", lap_of)
    found = bench_together([tiers.get("naive:mqa")], CASE, 1)[0]
    assert found.gate.status == "raised"
    assert found.gate.detail.startswith("its attend cannot be captured as a graph: RuntimeError: operation not")
    assert found.attend is None


def test_tiers_take_turns(monkeypatch):
    seen = []

    def fake(laps, repeats):
        seen.append([lap() and 1 for lap in laps])
        return [Timing(1, 1, 1, repeats)] * len(laps)

    monkeypatch.setattr(bench, "turns", fake)
    found = bench_together([tiers.get("naive:mqa"), Turncoat(99)], CASE, 5)
    assert [r.attend for r in found] == [Timing(1, 1, 1, 5)] * 2
    assert seen[0] == [1, 1], "both attends in one round"


def test_an_answer_of_the_gate_does_not_pass_for_that_of_a_timed_call():
    class Idle(Turncoat):
        def attend(self, q, cache, prepared, plan, out=None):
            self.left -= 1
            return out if self.left < 0 and out is not None else self.tier.attend(q, cache, prepared, plan, out)

    found = [bench_together([Idle(right)], CASE, 2)[0] for right in range(12)]
    stale = [r.gate for r in found if r.gate.detail.startswith("right before it was timed")]
    assert stale
    assert {gate.status for gate in stale} == {"not_finite"}


def test_a_tier_that_may_be_captured_is_given_the_promises(monkeypatch):
    properties = dataclasses.make_dataclass("Properties", ["multi_processor_count"])(132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    need = bench.captured_need(CASE, "cpu")
    assert need.graph_capture
    c = need.capacity
    assert (c.max_requests, c.max_tokens, c.max_query_len, c.max_seq_len, c.max_splits) == (4, 7, 4, 40, 132)
    assert bench.captured_need(Case(spec("128q1s9")), "cpu").capacity.max_splits == 8
    assert bench.captured_need(Case(spec("1q1s9")), "cpu").capacity.max_splits == 256


# Big cases


def test_big_is_counted_in_numbers_of_query_and_rows():
    v3 = DIMS["v3_n128"]
    assert is_big(Case(spec("128q1s8k"), v3))
    assert is_big(Case(spec("1q1s128k"), v3))
    assert is_big(Case(spec("1q16k"), v3))
    assert not is_big(Case(spec("4q1s4k"), DIMS["v3_n16"]))
    assert not is_big(Case(spec("128q1s8k"), v3, family="peaked")), "drawn inputs are of family randn"


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_drawn_inputs_are_a_right_case(big, mask):
    case = dataclasses.replace(CASE, batch=dataclasses.replace(CASE.batch, mask=mask))
    given, d = drawn_inputs(case, "cpu"), case.dims
    assert [tuple(x.shape) for x in (*given.q, *given.up)] == [(7, 3, 12), (7, 3, 8), (32, 3, 12), (32, 3, 10)]
    assert [tuple(kv_c.shape) for kv_c, _ in given.keys] == [(40, d.L)] * 3 + [(9, d.L)]
    assert torch.equal(given.new_kv_c[3:], given.keys[3][0][5:])
    assert torch.equal(given.new_k_pe[0], given.keys[0][1][-1])
    assert given.owned_slots().unique().numel() == 129
    assert torch.equal(given.history[3], torch.arange(5))
    again = drawn_inputs(case, "cpu")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(given.tensors(), again.tensors(), strict=True))


def test_the_sample_holds_the_ends_of_requests_and_stays_within_its_price():
    case = Case(spec("9q1s64_1q3s2k_5q40"), DIMS["toy_n12"])
    rows, heads = sample(case, 10**12)
    assert {*range(9), 9, 11, 12, 51} <= set(rows)
    for seed in range(6):
        some = sample(dataclasses.replace(case, seed=seed), 0)[1]
        assert {0, 11} <= set(some)
        assert len(some) <= 4
    few, same = sample(case, 0)
    assert same == heads
    assert {0, 9, 11} <= set(few) or {0, 172, 211} <= set(few)
    assert len(few) < len(rows)
    assert {0, 211} <= set(few), "the first and the last request stay whatever they cost"


def test_a_big_case_is_gated_on_its_sample(big):
    case = Case(spec("9q1s64_1q3s200"), DIMS["toy_n12"], dtype="f32")
    right, off = (
        from_latent("right", kernel),
        from_latent("off", lambda *a: kernel(*a)._replace(lse=kernel(*a).lse + 1)),
    )
    for level in ("attend", "latent"):
        ok, wrong = bench_together([right, off], case, 1, level=level)
        assert (ok.gate.status, wrong.gate.status) == ("ok", "mismatch")
        assert 0 < ok.gate.used_out <= 1
        assert wrong.gate.used_lse > 1
        assert (ok.attend is None, wrong.attend is None) == (False, True)


def test_a_big_truth_is_that_of_the_suite_on_the_same_inputs(big, monkeypatch):
    case = Case(spec("2q1s64_1q3s40"), DIMS["toy_n12"], dtype="f32")
    scene = scene_of(case, "cpu")
    assert scene.big
    made, heads = scene.truth
    naive = tiers.get("naive:mha")
    state = bench._first(naive, case.need(), scene).attend()
    assert compare(AttentionState(state.out[:, list(heads)], state.lse[:, list(heads)]), made).ok
    shifted = AttentionState(state.out.roll(1, dims=1), state.lse)
    assert scene.judged(naive, shifted).status == "mismatch"
    spoilt = state.out.clone()
    spoilt[:, next(n for n in range(12) if n not in heads)] = float("nan")
    assert scene.judged(naive, AttentionState(spoilt, state.lse)).status == "not_finite", "all heads must be finite"
    assert scene.judged(naive, AttentionState(pad(state.out, (0, 1)), state.lse)).status == "wrong_shape"


# The record and the report


def test_the_rates_of_an_inner_kernel_count_query_rows_and_output():
    config = preset("deepseek-v3")
    case = Case(spec("2q1s100"), DIMS["v3_n128"], dtype="bf16")
    gate = dataclasses.replace(
        bench_together([tiers.get("naive")], CASE, 1, level="latent")[0].gate, case=case, status="ok"
    )
    one = Timing(0.5, 0.4, 0.6, 3, "graph")
    result = bench.BenchResult(gate, None, one, one, 7.0)
    device = {"copy_bytes_per_second": 4e12, "matmul_flops_per_second": 7e14}
    model = {"row_bytes": 1152, "mha_bytes": 81920}
    peak = Gpu.measured("x", 7e14, 4e12)
    row = bench_record(model, config, [("raw", result)], peak, [], device, "latent")["rows"][0]
    cost = latent_cost(config, BatchCounts(2, 200, 200), row_bytes=1152)
    assert cost.flops == 2 * 200 * 128 * (576 + 512)
    assert cost.bytes == 200 * 1152 + 2 * 128 * (576 + 512) * 2
    assert (row["counted_form"], row["flops"], row["bytes"]) == ("latent", cost.flops, cost.bytes)
    assert row["percent_of_copy"] == pytest.approx(100 * cost.bytes / 0.5e-3 / 4e12)
    assert row["percent_of_matmul"] == pytest.approx(100 * cost.flops / 0.5e-3 / 7e14)
    assert row["percent_of_roofline"] == pytest.approx(100 * max(cost.flops / 7e14, cost.bytes / 4e12) / 0.5e-3)
    assert (row["first_ms"], row["plan"], row["attend"]["how"], row["level"]) == (7.0, None, "graph", "latent")


FACTS = {
    "name": "NVIDIA H200", "arch": "sm_90", "units": 132, "memory_bytes": 1, "torch": "2.11", "cuda": "13.0",
    "hip": None, "triton": "3.6.0", "sm_clock_mhz": 1755.0, "sm_clock_max_mhz": 1980.0, "memory_clock_mhz": 3201.0,
    "power_w": None, "power_limit_w": 700.0, "temperature_c": 41.0, "driver": "580.1",
    "copy_bytes_per_second": 4.27e12, "matmul_flops_per_second": 7.9e14, "matmul_dtype": "bfloat16",
}  # fmt: skip


def test_a_report_of_a_gpu_is_in_microseconds_beside_its_ceilings():
    result = bench_together([tiers.get("naive:mqa")], CASE, 1)[0]
    times = dict.fromkeys(("plan", "write", "attend"), Timing(0.0785, 0.078, 0.08, 9, "graph"))
    result = dataclasses.replace(result, **times, first_ms=2500.4)
    peak = Gpu.measured("this one", 7.9e14, 4.27e12, itemsize=4)
    config = preset("deepseek-v3").replace(num_attention_heads=3)
    where = {"environment": {"cpu": "c", "cpus": 2, "threads": 1, "device": "cuda", "torch": "2.11"}}
    model = dict.fromkeys("HNLPRV", 1) | {
        "name": "toy", "softmax_scale": 1.0, "dtype": "float32", "layout": "float32", "row_bytes": 160, "mha_bytes": 9,
    }  # fmt: skip
    record = where | bench_record(model, config, [("fast", result)], peak, [], FACTS)
    json.dumps(record)
    head, grid, notes, *_ = bench_blocks(record)
    assert head["gpu"] == "NVIDIA H200 (sm_90, 132 units), driver 580.1"
    assert head["under load"] == "SM clock 1755 MHz of 1980 MHz, memory clock 3201 MHz, - of 700 W, 41 C"
    assert head["measured"] == "copy 4270 GB/s (read + written), bfloat16 matmul 790 TFLOP/s"
    assert isinstance(grid, Grid)
    cells = dict(zip(grid.titles, grid.rows[0], strict=True))
    assert (cells["attend us\nmedian"], cells["plan\nus"], cells["timed\nby"]) == ("78.5", "78.5", "graph")
    assert {"TFLOP/s", "% of\ncopy", "% of\nmatmul", "% of\nroofline"} <= set(cells)
    assert "level attend" in notes
    assert "compilation included: fast 2,500 ms" in notes


def test_a_batch_of_many_kinds_of_request_leaves_room_for_the_figures():
    result = bench_together([tiers.get("naive:mqa")], CASE, 1)[0]
    where = {"environment": {"cpu": "c", "cpus": 2, "threads": 1, "device": "cpu", "torch": "2.11"}}
    model = dict.fromkeys("HNLPRV", 1) | {
        "name": "toy", "softmax_scale": 1.0, "dtype": "float32", "layout": "float32", "row_bytes": 160, "mha_bytes": 9,
    }  # fmt: skip
    record = where | bench_record(model, preset("deepseek-v3"), [("fast", result)], None, [])
    record["rows"][0]["batch"] = "_".join(f"1q1s{n}" for n in range(40, 104))
    _, grid, *_ = bench_blocks(record)
    assert grid.rows[0][1] == "64 kinds of request: 1q1s40, 1q1s41, ..."
    record["rows"][0]["batch"] = "3q1s40_1q4s9"
    assert bench_blocks(record)[1].rows[0][1] == "3q1s40_1q4s9"


def test_nvidia_smi_is_asked_for_one_gpu_and_its_silence_is_none():
    asked = []
    said = "1755, 1980, 3201, 612.33, [N/A], 41, 580.95.05\n"
    found = gpu.smi_facts(["GPU-1", "0"], lambda words: asked.append(words) or said)
    assert [words[:2] for words in asked] == [["-i", "GPU-1"]]
    assert (found["sm_clock_mhz"], found["power_w"], found["power_limit_w"], found["driver"]) == (
        1755.0, 612.33, None, "580.95.05",
    )  # fmt: skip

    unknown = lambda words: said if words[1] == "0" else ""
    assert gpu.smi_facts(["GPU-1", "0"], unknown) == found

    def missing(words):
        raise FileNotFoundError("nvidia-smi")

    def hangs(words):
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    for silent in (missing, hangs, lambda words: "", lambda words: "one, two"):
        assert gpu.smi_facts(["0"], silent) == dict.fromkeys(gpu.ASKED)


# The command


RAW = """
import torch
from mla.adapters import from_latent
from mla.cache import slots_of
from mla.state import AttentionState

def kernel(q_latent, q_pe, cache, batch, need):
    outs, lses = [], []
    for b, seq_len in enumerate(batch.seq_lens_host):
        kv_c, k_pe = cache.read(slots_of(batch.block_table[b], 0, seq_len, batch.page_size))
        keys = torch.cat([kv_c, k_pe], -1).double()
        scores = torch.cat([q_latent[b], q_pe[b]], -1).double() @ keys.T * need.softmax_scale
        outs.append(torch.softmax(scores, -1) @ kv_c.double())
        lses.append(torch.logsumexp(scores, -1))
    return AttentionState(torch.stack(outs).to(q_latent.dtype), torch.stack(lses).float())

tier = from_latent("raw", kernel)
"""


def bench_run(*words):
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def test_the_command_times_inner_kernels_and_says_so(tmp_path):
    file, record = tmp_path / "raw.py", tmp_path / "r.json"
    file.write_text(RAW)
    done = bench_run(file, "--model", "toy", "--batch", "2q1s40", "--repeats", 1, "--level", "latent", "--json", record)
    assert done.exit_code == 0, done.output
    found = json.loads(record.read_text())
    assert (found["level"], found["device"], found["rows"][0]["level"]) == ("latent", None, "latent")
    assert found["rows"][0]["counted_form"] == "latent"
    assert "level latent: the inner kernel alone" in done.output
    assert "kernel ms" in done.output
    refused = bench_run("naive", "--model", "toy", "--batch", "2q1s40", "--level", "latent")
    assert (refused.exit_code, "naive:mha has no inner kernel." in refused.output) == (2, True)


def test_an_unknown_level_is_a_sentence():
    done = bench_run("--model", "toy", "--level", "both")
    assert done.exit_code == 2
    assert "--level: expected one of attend, latent, got 'both'" in done.output


def test_the_toy_of_the_cases_is_the_toy_of_these_numbers():
    assert (TOY.N, TOY.L, TOY.P, TOY.R, TOY.V) == (3, 32, 12, 8, 10)
