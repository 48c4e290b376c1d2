"""Runs as data: what was asked and what came out, as plain values ready for JSON.

Axes: N heads, H hidden, Lq query rank, L KV rank, P nope, R rope, V value.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mla.batch import parse_batch
from mla.cost import break_even_flops, count_batch, default_workspace_tokens, grouped_name, kv_bytes_per_token
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


def cost_record(model: Record, config: Any, batch: str, gpus: Sequence[Any], itemsize: int) -> Record:
    """Describe what a batch costs: cache sizes beside MHA, GQA and MQA, both forms on each GPU, the break-evens."""
    query_lens, seq_lens = parse_batch(batch)
    counts, context = count_batch(query_lens, seq_lens), max(s - q for q, s in zip(query_lens, seq_lens, strict=True))
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
        why = (
            f"min(max(8 x {model_len} longest request, 4 x {seqs} max_running x {page} page_size), 65536), in whole pages "
            f"and at least {seqs} of them"
        )
    else:
        why = "max_workspace_tokens"
    b = layout.storage_dtype.itemsize
    nbytes = rows * (layout.row_bytes + config.N * (config.P + config.V) * b)
    costs = FormCosts.default() if settings.tune_file is None else FormCosts.load(settings.tune_file)
    return {
        "workspace": {"rows": rows, "why": why, "bytes": nbytes, "max_model_len": model_len},
        "form_costs": costs.provenance,
    }
