"""Runs as data: what was asked and what came out, as plain values ready for JSON.

Axes: N heads, H hidden, Lq query rank, L KV rank, P nope, R rope, V value.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mla.batch import parse_batch
from mla.cost import (
    absorbed_cost,
    break_even_flops,
    count_batch,
    default_workspace_tokens,
    expanded_cost,
    grouped_name,
    kv_bytes_per_token,
    latent_cost,
)
from mla.roofline import break_even_roofline, cost_report
from mla.settings import RunSettings
from mla.tune import FormCosts

Record = dict[str, Any]


def model_record(settings: RunSettings, config: Any, layout: Any) -> Record:
    """Describe a model with the dtype and cache rows of a run, and what MHA would cache per token in that dtype."""
    return {
        "name": settings.model,
        **{axis: getattr(config, axis) for axis in ("H", "N", "Lq", "L", "P", "R", "V")},
        "softmax_scale": config.softmax_scale,
        "layers": config.num_hidden_layers,
        "dtype": settings.dtype,
        "layout": layout.name,
        "row_bytes": layout.row_bytes,
        "mha_bytes": kv_bytes_per_token(config, config.N, itemsize=layout.storage_dtype.itemsize),
        "page_size": settings.page_size,
    }


def replay_record(trace: str, requests: Sequence[Any], model: Record, report: Any, names: Sequence[str]) -> Record:
    """Describe a replay: trace, model, totals of the scheduler, and a record for each tier; `names` are the tiers'."""
    statuses = [run.status for run in report.runs]
    wrong = [status for status in ("raised", "mismatch", "refused") if status in statuses]
    return {
        "status": wrong[0] if wrong else "ok",
        "trace": {
            "name": trace,
            "requests": len(requests),
            "prompt_tokens": sum(r.input_length for r in requests),
            "output_tokens": sum(r.output_length for r in requests),
        },
        "model": model,
        "stats": {**dataclasses.asdict(report.stats), "prefix_hit_rate": report.stats.prefix_hit_rate},
        "audit": {"rows_per_step": report.rows_per_step, "oracle": "float64"},
        "tiers": [_tier_record(name, run, model) for name, run in zip(names, report.runs, strict=True)],
    }


def _tier_record(name: str, run: Any, model: Record) -> Record:
    verdict = run.verdict
    return {
        "name": name,
        "status": run.status,
        "reasons": [*run.reasons, *([verdict.fault] if verdict.fault else [])],
        "rows": verdict.rows,
        "out": {"used": verdict.used_out, "at": _place(verdict.out_at)},
        "lse": {"used": verdict.used_lse, "at": _place(verdict.lse_at)},
        "cache_bytes_per_token": model["row_bytes"],
        "mha_bytes_per_token": model["mha_bytes"],
        "peak_workspace_bytes": run.peak_workspace,
        "prefill_tokens": run.prefill_tokens,
        "prefill_seconds": run.prefill_seconds,
        "prefill_tokens_per_second": run.prefill_tokens / run.prefill_seconds if run.prefill_tokens else None,
        "decode_steps": run.decode_steps,
        "decode_seconds": run.decode_seconds,
        "decode_ms_per_step": 1000 * run.decode_seconds / run.decode_steps if run.decode_steps else None,
    }


def _place(at: tuple[int, int, int, int] | None) -> Record | None:
    return None if at is None else dict(zip(("step", "request", "token", "head"), at, strict=True))


def bench_record(
    model: Record,
    config: Any,
    results: Sequence[tuple[str, Any]],
    gpu: Any,
    peers: Sequence[tuple[Any, Any]],
    device: Record | None = None,
    level: str = "attend",
) -> Record:
    """Describe timings: for each tier and batch the gate, the times, and rates that count the cheaper form's work.

    `gpu` holds the ceilings of a roofline, `device` the facts and the measured ceilings of a GPU that was timed on.
    `peers` holds, for each case, the timings of whole layers, the other library's first.
    """
    rows = [_bench_row(name, result, model, config, gpu, device) for name, result in results]
    statuses = {row["status"] for row in rows}
    wrong = statuses - {"ok", "refused"}
    status = "failed" if wrong else "refused" if "refused" in statuses else "ok"
    ceiling = None if gpu is None else {**dataclasses.asdict(gpu), "ridge": gpu.ridge}
    scale = results[0][1].gate.case.dims.softmax_scale  # a case has one of its own
    layers = [
        {
            "batch": case.batch.name,
            **dataclasses.asdict(layer),
            "faster": layer_0.timing.median_ms / layer.timing.median_ms,
        }
        for case, timings in peers
        for layer_0 in timings[:1]
        for layer in timings
    ]
    return {
        "status": status,
        "level": level,
        "model": {**model, "softmax_scale": scale},
        "gpu": ceiling,
        "device": device,
        "rows": rows,
        "layers": layers,
    }


def _bench_row(name: str, result: Any, model: Record, config: Any, gpu: Any, device: Record | None) -> Record:
    gate = result.gate
    case, row, ready = gate.case, model["row_bytes"], result.attend is not None
    counts = count_batch(case.batch.query_lens, case.batch.seq_lens)
    itemsize = case.torch_dtype.itemsize
    made = (latent_cost,) if gate.level == "latent" else (expanded_cost, absorbed_cost)
    forms = [form(config, counts, itemsize=itemsize, row_bytes=row) for form in made]
    cheaper, bound = min(forms, key=lambda c: c.flops), None if gpu is None else min(map(gpu.seconds, forms)) * 1e3
    seconds = result.attend.median_ms / 1e3 if ready else None
    times = {part: _plain(getattr(result, part)) for part in ("attend", "plan", "write")}
    share = lambda work, rate: 100 * work / seconds / device[rate] if seconds and device else None
    return {
        "tier": name, "batch": case.batch.name, "case": case.id, "level": gate.level, "status": gate.status,
        "reasons": _reasons(gate), "used_out": gate.used_out, "used_lse": gate.used_lse, **times,
        "first_ms": result.first_ms,
        "tokens_per_second": counts.tokens / seconds if seconds else None,
        "counted_form": cheaper.form, "flops": cheaper.flops, "bytes": cheaper.bytes,
        "gflops_per_second": cheaper.flops / seconds / 1e9 if seconds else None,
        "gbytes_per_second": cheaper.bytes / seconds / 1e9 if seconds else None,
        "bound_ms": bound, "times_bound": seconds * 1e3 / bound if seconds and bound else None,
        "percent_of_roofline": 100 * bound / seconds / 1e3 if seconds and bound else None,
        "percent_of_copy": share(cheaper.bytes, "copy_bytes_per_second"),
        "percent_of_matmul": share(cheaper.flops, "matmul_flops_per_second"),
        "cache_bytes_per_token": row, "mha_bytes_per_token": model["mha_bytes"],
        "peak_workspace_bytes": result.peak_bytes if ready else None,
        "workspace_bound_bytes": result.bound_bytes,
    }  # fmt: skip


def _reasons(gate: Any) -> list[str]:
    if gate.detail or gate.status != "mismatch":
        return [gate.detail] if gate.detail else []
    return [f"out takes {gate.used_out:.3g} and the LSE {gate.used_lse:.3g} of the budget; the worst is {gate.where}."]


def _plain(timing: Any) -> Record | None:
    return None if timing is None else dataclasses.asdict(timing)


def tune_record(settings: RunSettings, file: str, table: Any, regret: Any) -> Record:
    """Describe a table of form costs, the file that keeps it, and, if measured, auto time / better form's time."""
    return {"file": file, "model_name": settings.model, "table": dataclasses.asdict(table), "regret": regret}


def cost_record(model: Record, config: Any, batch: str, gpus: Sequence[Any], itemsize: int) -> Record:
    """Describe what a batch costs: cache sizes beside MHA, GQA and MQA, both forms on each GPU, the break-evens."""
    query_lens, seq_lens = parse_batch(batch)
    counts, context = (
        count_batch(query_lens, seq_lens),
        max((s - q for q, s in zip(query_lens, seq_lens, strict=True)), default=0),
    )
    groups = max((g for g in range(2, 9) if config.N % g == 0 and g < config.N), default=None)
    kv_heads = list(dict.fromkeys([config.N, *([groups] if groups else []), 1]))
    row, ratio = model["row_bytes"], model["mha_bytes"] // config.N
    sizes = {"mla (latent row)": row} | {grouped_name(config.N, g): g * ratio for g in kv_heads}
    report = cost_report(config, counts, gpus, itemsize=itemsize, row_bytes=row, kv_heads=kv_heads)
    even = {
        gpu.name: break_even_roofline(config, gpu, context, len(query_lens), itemsize=itemsize, row_bytes=row)
        for gpu in gpus
    }
    return {
        "model": model,
        "unsupported": list(config.unsupported),
        "batch": {"text": batch, "requests": len(query_lens), "context": context, **dataclasses.asdict(counts)},
        "gpus": [{**dataclasses.asdict(gpu), "ridge": gpu.ridge} for gpu in gpus],
        "cache_bytes_per_token": [{"name": n, "bytes": b, "times_mla": b / row} for n, b in sizes.items()],
        "rows": [dataclasses.asdict(r) for r in report.rows],
        "winner": report.winner,
        "break_even": {"flops": break_even_flops(config), "roofline": even},
    }


def info_record(settings: RunSettings, config: Any, layout: Any, longest: int) -> Record:
    """Describe what the defaults come to: the workspace cap with the numbers of its formula, and the form costs.

    `longest` is the most keys that a request of the trace has.
    """
    seqs, page, model_len = settings.max_running, settings.page_size, max(longest, settings.max_model_len or 0)
    rows = settings.max_workspace_tokens
    if rows is None:
        rows = default_workspace_tokens(model_len, seqs, page)
        least = f"4 x {seqs} max_running x {page} page_size"
        why = f"min(max(8 x {model_len} longest request, {least}), 65536) in whole pages, at least {seqs} of them"
    else:
        why = "max_workspace_tokens"
    b = layout.storage_dtype.itemsize
    nbytes = rows * (layout.row_bytes + config.N * (config.P + config.V) * b)
    costs = FormCosts.default() if settings.tune_file is None else FormCosts.load(settings.tune_file)
    return {
        "workspace": {"rows": rows, "why": why, "bytes": nbytes, "max_model_len": model_len},
        "form_costs": costs.provenance,
    }
