"""From records to what a person reads: each function returns blocks for `mla.commands.output.show`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mla.commands.output import Block, Grid

Record = Mapping[str, Any]

BUDGET_LINE = "error/budget: the worst over all audited rows, right is at most 1; at: step/request/token/head."
TIMES_LINE = "Times are attention alone (write, plan, attend), measured once."


def compare_blocks(record: Record) -> list[Block]:
    """Lay out a replay: what was replayed, a row for each tier, what its columns mean, then refusals and faults."""
    ran = [tier for tier in record["tiers"] if tier["status"] != "refused"]
    titles = (
        *("tier", "verdict", "out error\n/budget", "\nat", "LSE error\n/budget", "\nat"),
        *("cache\nB/token", "MHA\nB/token", "workspace\nMiB", "prefill\ntokens/s", "decode\nms/step"),
    )
    rows = [_compare_row(tier) for tier in record["tiers"]]
    notes = "\n".join([BUDGET_LINE, TIMES_LINE])
    return [_compare_head(record, ran), Grid(titles, rows, cuts=(6,)), notes, *sentences_of(record["tiers"])]


def _compare_head(record: Record, ran: Sequence[Record]) -> dict[str, str]:
    trace, model, stats, rows = record["trace"], record["model"], record["stats"], record["audit"]["rows_per_step"]
    hit, blocks = stats["prefix_blocks_hit"], stats["prefix_blocks"]
    which = "all rows" if rows is None else f"up to {count(rows, 'row')}"
    audited = max((tier["rows"] for tier in ran), default=0)
    tokens = f"{trace['prompt_tokens']} prompt and {trace['output_tokens']} output tokens"
    return {
        "trace": f"{trace['name']}: {count(trace['requests'], 'request')}, {tokens}",
        "model": model_line(model),
        "steps": f"{stats['steps']}: {stats['prefill_tokens']} prefill and {stats['decode_tokens']} decode tokens",
        "prefix": f"{hit} of {blocks} blocks hit ({100 * hit / max(blocks, 1):.1f}%), "
        f"{count(stats['full_prompt_hits'], 'full prompt hit')}, {stats['hit_tokens']} tokens found in the cache",
        "pool": f"{count(stats['pages_created'], 'page')} of {model['page_size']} rows, "
        f"{stats['peak_pages']} in use at most; "
        f"{count(stats['preemptions'], 'preemption')}, {count(stats['evictions'], 'eviction')}, "
        f"{count(stats['copies'], 'page')} copied on write",
        "audited": f"{which} of each step, {audited} in all, against the float64 oracle",
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
    head = {"model": model_line(record["model"]), "device": f"{record['device']} ({record['arch']})"} | (
        {"asked": asked} if asked else {}
    )
    return [head, Grid(("tier", "can run"), rows), *sentences_of(record["tiers"]), f"auto: {record['auto']}"]


def info_blocks(record: Record) -> list[Block]:
    """Lay out the environment, every setting with its source, the workspace cap with its numbers, the form costs."""
    rows = [(name, s["source"], text(s["value"])) for name, s in record["settings"].items()]
    space = record["workspace"]
    cap = f"{space['rows']} rows = {space['why']}; {mebi(space['bytes'])} MiB of latent rows, keys and values"
    where = {name: text(value) for name, value in record["environment"].items()}
    return [where, Grid(("setting", "from", "value"), rows), {"workspace": cap, "form costs": record["form_costs"]}]


def model_line(model: Record) -> str:
    """Say in one line what the model is: the sizes, the scale, the dtype, a row of the cache."""
    sizes = ", ".join(f"{axis} {model[axis]}" for axis in "NLPRV")
    row = f"{model['row_bytes']} B rows of {model['layout']}"
    return f"{model['name']}: {sizes}; softmax scale {model['softmax_scale']:.5g}; {model['dtype']}, cache: {row}"


def sentences_of(tiers: Sequence[Record]) -> list[Block]:
    """Return one paragraph with every tier's reasons, whole, or nothing."""
    lines = [
        f"{tier['name']}{'' if tier['status'] == 'no' else ' ' + tier['status']}: {reason}"
        for tier in tiers
        for reason in tier["reasons"]
    ]
    return ["\n".join(lines)] if lines else []


def ratio(used: float | None) -> str:
    """Write an error/budget rounded up, so that nothing above 1 reads as 1; "-" for none."""
    if used is None:
        return "-"
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


def short_batch(batch: str) -> str:
    """Write a batch as a table can hold it: of many groups of requests, the first two."""
    groups = batch.split("_")
    return batch if len(groups) < 8 else f"{len(groups)} kinds of request: {', '.join(groups[:2])}, ..."


def text(value: Any) -> str:
    """Write the value of a setting as the command line takes it."""
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _place(at: Record | None) -> str:
    return "-" if at is None else "/".join(str(at[name]) for name in ("step", "request", "token", "head"))
