"""From records to what a person reads: each function returns blocks for `mla.output.show`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mla.output import Block, Grid

Record = Mapping[str, Any]

BUDGET_LINE = "error/budget: the worst over all audited rows, right is at most 1; at: step/request/token/head."
TIMES_LINE = "Times are attention alone (write, plan, attend), measured once."


def compare_blocks(record: Record) -> list[Block]:
    """Lay out a replay: what was replayed, a row for each tier, what its columns mean, then refusals and faults."""
    ran = [tier for tier in record["tiers"] if tier["status"] != "refused"]
    titles = (
        "tier", "verdict", "out error/budget", "out at", "LSE error/budget", "LSE at", "cache B/token", "MHA B/token",
        "peak workspace MiB", "prefill tokens/s", "decode ms/step",
    )  # fmt: skip
    rows = [_compare_row(tier) for tier in record["tiers"]]
    notes = "\n".join([BUDGET_LINE, TIMES_LINE])
    return [_compare_head(record, ran), Grid(titles, rows), notes, *sentences_of(record["tiers"])]


def _compare_head(record: Record, ran: Sequence[Record]) -> dict[str, str]:
    trace, model, stats, rows = record["trace"], record["model"], record["stats"], record["audit"]["rows_per_step"]
    hit, blocks = stats["prefix_blocks_hit"], stats["prefix_blocks"]
    audited = max((tier["rows"] for tier in ran), default=0)
    tokens = f"{trace['prompt_tokens']} prompt and {trace['output_tokens']} output tokens"
    return {
        "trace": f"{trace['name']}: {count(trace['requests'], 'request')}, {tokens}",
        "model": model_line(model),
        "steps": f"{stats['steps']}: {stats['prefill_tokens']} prefill and {stats['decode_tokens']} decode tokens",
        "prefix": f"{hit} of {blocks} blocks hit ({100 * hit / max(blocks, 1):.1f}%), "
        f"{count(stats['full_prompt_hits'], 'full prompt hit')}, {stats['hit_tokens']} tokens found in the cache",
        "pool": f"{count(stats['pages_created'], 'page')} of {model['page_size']} rows, {stats['peak_pages']} in use at most; "
        + ", ".join(count(stats[f"{word}s"], word) for word in ("preemption", "eviction"))
        + f", {count(stats['copies'], 'page')} copied on write",
        "audited": f"{'all rows' if rows is None else count(rows, 'row')} of each step, {audited} in all, "
        "against the float64 oracle",
    }


def _compare_row(tier: Record) -> tuple[str, ...]:
    judged = tier["rows"] > 0
    worst = [cell for part in ("out", "lse") for cell in (ratio(tier[part]["used"]), _place(tier[part]["at"]))]
    return (
        tier["name"],
        tier["status"],
        *(worst if judged else ["-"] * 4),
        str(tier["cache_bytes_per_token"]),
        str(tier["mha_bytes_per_token"]),
        mebi(tier["peak_workspace_bytes"]) if tier["peak_workspace_bytes"] else "-",
        number(tier["prefill_tokens_per_second"], 0),
        number(tier["decode_ms_per_step"], 2),
    )


def tiers_blocks(record: Record) -> list[Block]:
    """Lay out which tiers can run and every reason of those that cannot."""
    rows = [(tier["name"], "no" if tier["reasons"] else "yes") for tier in record["tiers"]]
    asked = ", ".join(f"{name} = {value}" for name, value in record["asked"].items())
    head = {"model": model_line(record["model"]), "device": record["device"]} | ({"asked": asked} if asked else {})
    return [head, Grid(("tier", "can run"), rows), *sentences_of(record["tiers"]), f"auto: {record['auto']}"]


def cost_blocks(record: Record) -> list[Block]:
    """Lay out cache sizes, the cost of each form with its roofline time, and where the two forms break even."""
    batch, layers = record["batch"], record["model"]["layers"]
    head = {
        "model": model_line(record["model"]),
        "batch": f"{batch['text']}: {count(batch['tokens'], 'new token')} over {count(batch['keys'], 'key')}, "
        f"{batch['pairs']} (query, key) pairs per head",
    }
    if record["unsupported"]:
        head["not counted"] = "; ".join(record["unsupported"])
    sizes = [
        (size["name"], str(size["bytes"]), str(size["bytes"] * layers), f"{size['times_mla']:.1f}x")
        for size in record["cache_bytes_per_token"]
    ]
    cache = Grid(("cache of", "B/token, 1 layer", f"B/token, {count(layers, 'layer')}", "of MLA"), sizes)
    rows = [
        (
            *(r["gpu"], r["form"], number(r["flops"] / 1e9, 3), number(r["bytes"] / 1e6, 3), number(r["intensity"], 1)),
            *(number(r["time_us"], 2), r["bound"]),
        )
        for r in record["rows"]
    ]
    costs = Grid(("machine", "form", "GFLOP", "MB", "FLOP/B", "at least us", "bound by"), rows)
    return [head, cache, costs, COST_LINES, *_winners(record)]


COST_LINES = """\
One layer. expanded: MHA over keys and values made from the cache; absorbed: MQA over the cache itself.
at least: with these ceilings nothing is faster; all moves overlap all arithmetic, and both run at full rate."""


def _winners(record: Record) -> list[Block]:
    even, context, requests = record["break_even"], record["batch"]["context"], record["batch"]["requests"]
    lines = [f"{gpu}: {form} wins this batch." for gpu, form in record["winner"].items()]
    flops = number(even["flops"], 1)
    lines.append(f"By FLOPs alone and over a long context, expanding pays from {flops} new tokens per request on.")
    for gpu, tokens in even["roofline"].items():
        start = f"from {count(tokens, 'new token')} on" if tokens else "at no length up to 4096 new tokens"
        lines.append(f"On {gpu}, {count(requests, 'request')} with {context} tokens cached: expanding pays {start}.")
    return ["\n".join(lines)]


def info_blocks(record: Record) -> list[Block]:
    """Lay out the environment, every setting with its source, the workspace cap with its numbers, the form costs."""
    rows = [(name, text(s["value"]), s["source"]) for name, s in record["settings"].items()]
    space = record["workspace"]
    cap = f"{space['rows']} rows = {space['why']}; {mebi(space['bytes'])} MiB of latent rows, keys and values"
    where = {name: text(value) for name, value in record["environment"].items()}
    return [where, Grid(("setting", "value", "from"), rows), {"workspace": cap, "form costs": record["form_costs"]}]


def model_line(model: Record) -> str:
    """Say in one line what the model is: the sizes, the scale, the dtype, a row of the cache."""
    sizes = ", ".join(f"{axis} {model[axis]}" for axis in "NLPRV")
    row = f"{model['row_bytes']} B rows of {model['layout']}"
    return f"{model['name']}: {sizes}; softmax scale {model['softmax_scale']:.5g}; {model['dtype']}, cache: {row}"


def sentences_of(tiers: Sequence[Record]) -> list[Block]:
    """Return one paragraph with every tier's reasons, whole, or nothing."""
    lines = [f"{t['name']} {t['status']}: {reason}" for t in tiers for reason in t["reasons"]]
    return ["\n".join(lines)] if lines else []


def ratio(used: float) -> str:
    """Write an error/budget rounded up, so that nothing above 1 reads as 1."""
    if not math.isfinite(used):
        return str(used)
    return f"{math.ceil(used * 1000) / 1000:.3f}" if used < 100 else f"{used:.3g}"


def number(value: float | None, digits: int) -> str:
    """Write a number with so many digits after the point, or "-" for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def mebi(nbytes: float) -> str:
    """Write bytes in MiB."""
    return f"{nbytes / 2**20:.2f}"


def count(n: int, word: str) -> str:
    """Write a count with its noun."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def text(value: Any) -> str:
    """Write the value of a setting as the command line takes it."""
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _place(at: Record | None) -> str:
    return "-" if at is None else "/".join(str(at[name]) for name in ("step", "request", "token", "head"))
