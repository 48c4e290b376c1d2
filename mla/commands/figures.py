"""From records of costs and times to what a person reads: blocks, as in `mla.commands.report`.

Axes: N heads, L KV rank, P nope, R rope, V value.
"""

from collections.abc import Sequence

from mla.commands.output import Block, Grid
from mla.commands.report import Record, count, mebi, model_line, number, ratio, sentences_of, short_batch


def bench_blocks(record: Record) -> list[Block]:
    """Lay out timings beside the machine they were taken on; a tier that is wrong or refuses has none."""
    on_gpu, bound = record["device"] is not None, record["gpu"] is not None
    unit, rate = ("us", "TFLOP/s") if on_gpu else ("ms", "GFLOP/s")
    timed = "kernel" if record["level"] == "latent" else "attend"
    titles = (
        *("tier", "batch", "gate", "out error\n/budget"),
        *(f"{timed} {unit}\n{which}" for which in ("median", "p10", "p90")),
        *("plan\nus", f"write\n{unit}", "tokens/s", rate, "GB/s"),
        *(("% of\ncopy", "% of\nmatmul", "timed\nby") if on_gpu else ()),
        *(("bound\nms", "times\nbound", "% of\nroofline") if bound else ()),
        *("cache\nB/token", "MHA\nB/token", "workspace\nMiB", "at most\nMiB"),
    )
    rows = [_bench_row(row, on_gpu, bound) for row in record["rows"]]
    gates = [
        {**row, "name": f"{row['tier']} on {short_batch(row['batch'])}"}
        for row in record["rows"]
        if row["status"] != "ok"
    ]
    notes = "\n".join([LEVEL_LINES[record["level"]], BENCH_LINES, *_first_calls(record), *([GPU_LINES] * on_gpu)])
    grid = Grid(titles, rows, keys=2, cuts=(9,))
    return [_bench_head(record), grid, notes, *_layer_blocks(record), *sentences_of(gates)]


def _bench_head(record: Record) -> dict[str, str]:
    where, device, gpu = record["environment"], record["device"], record["gpu"]
    machine = f"{where['cpu']}, {where['cpus']} cpus, {where['threads']} threads; device {where['device']}"
    head = {"model": model_line(record["model"]), "machine": machine, "torch": where["torch"]}
    if "interpreted" in (where.get("triton") or ""):
        head["triton"] = f"{where['triton']}: times of its kernels say nothing of a GPU"
    if device:
        said = lambda name, unit: "-" if device[name] is None else f"{device[name]:.0f} {unit}"
        head["gpu"] = f"{device['name']} ({device['arch']}, {device['units']} units), driver {device['driver'] or '-'}"
        head["under load"] = (
            f"SM clock {said('sm_clock_mhz', 'MHz')} of {said('sm_clock_max_mhz', 'MHz')}, memory clock "
            f"{said('memory_clock_mhz', 'MHz')}, {said('power_w', 'W')} of {said('power_limit_w', 'W')}, "
            f"{said('temperature_c', 'C')}"
        )
        head["versions"] = f"CUDA {device['cuda'] or '-'}, HIP {device['hip'] or '-'}, triton {device['triton'] or '-'}"
        head["measured"] = (
            f"copy {device['copy_bytes_per_second'] / 1e9:.0f} GB/s (read + written), "
            f"{device['matmul_dtype']} matmul {device['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s"
        )
    if gpu:
        rates = f"{gpu['flops'] / 1e12:g} TFLOP/s, {gpu['bandwidth'] / 1e9:g} GB/s"
        head["bound"] = f"{gpu['name']}: {rates} ({gpu['source']}), by the faster form"
    return head


def _first_calls(record: Record) -> list[str]:
    first: dict[str, float] = {}
    for row in record["rows"]:
        if row["first_ms"] is not None:
            first.setdefault(row["tier"], row["first_ms"])
    said = ", ".join(f"{name} {ms:,.0f} ms" for name, ms in first.items())
    return [f"First prepare, plan, write and attend, compilation included: {said}."] if first else []


def _layer_blocks(record: Record) -> list[Block]:
    if not record["layers"]:
        return []
    titles = (
        *("decode step of a layer", "batch", "median\nms", "p10\nms", "p90\nms", "times\nfaster", "tokens/s"),
        *("cache\nB/token", "rms off"),
    )
    rows = [
        (
            *(
                row["name"],
                short_batch(row["batch"]),
                *(number(row["timing"][key], 3) for key in ("median_ms", "low_ms", "high_ms")),
            ),
            *(number(row["faster"], 1), number(row["tokens_per_second"], 0), number(row["cache_bytes_per_token"], 0)),
            f"{row['difference']:.1e}",
        )
        for row in record["layers"]
    ]
    note = (
        "A layer with its projections and cache write, one token for each request; the layers took turns in one run. "
        "rms off: from the first row's output."
    )
    return [Grid(titles, rows, keys=2), note]


LEVEL_LINES = {
    "attend": "One layer, level attend: query (T, N, P + R) in, output (T, N, V) out, absorption and W_UV included.",
    "latent": "One layer, level latent: the inner kernel alone, absorbed query (T, N, L + R) in, (T, N, L) out.",
}
BENCH_LINES = """\
gate: a tier is timed only where it meets the error budget on that batch. plan: once per step for all layers.
The FLOPs and bytes are those of the form with fewer FLOPs, whichever the tier computes. workspace: the most that plan
and attend held at once; at most: what the plan had promised before, whatever the context."""
GPU_LINES = "Timed behind a cold L2, the tiers in turn; by: a replayed CUDA graph, or events around the launches."


def _bench_row(row: Record, on_gpu: bool, bound: bool) -> tuple[str, ...]:
    attend, plan, write = (row[part] or {} for part in ("attend", "plan", "write"))
    scale = lambda ms, factor: None if ms is None else ms * factor
    digits, factor, giga = (1, 1e3, 1e-3) if on_gpu else (3, 1.0, 1.0)
    memory = ("-" if row[key] is None else mebi(row[key]) for key in ("peak_workspace_bytes", "workspace_bound_bytes"))
    shares = (number(row["percent_of_copy"], 1), number(row["percent_of_matmul"], 1), attend.get("how", "-"))
    bounds = (number(row["bound_ms"], 3), number(row["times_bound"], 1), number(row["percent_of_roofline"], 1))
    return (
        *(
            row["tier"],
            short_batch(row["batch"]),
            row["status"],
            ratio(row["used_out"] if row["status"] != "refused" else None),
        ),
        *(number(scale(attend.get(f"{which}_ms"), factor), digits) for which in ("median", "low", "high")),
        number(scale(plan.get("median_ms"), 1e3), 1),
        number(scale(write.get("median_ms"), factor), digits),
        number(row["tokens_per_second"], 0),
        *(number(scale(row["gflops_per_second"], giga), 2), number(row["gbytes_per_second"], 2)),
        *(shares if on_gpu else ()),
        *(bounds if bound else ()),
        *(str(row["cache_bytes_per_token"]), str(row["mha_bytes_per_token"]), *memory),
    )


def tune_blocks(record: Record) -> list[Block]:
    """Lay out a table of form costs: how long expanding takes of what absorbing takes, by new tokens and context."""
    table = record["table"]
    ratios = [[a / b for a, b in zip(*rows, strict=True)] for rows in zip(table["mha"], table["mqa"], strict=True)]
    size = ", ".join(f"{axis} {value}" for axis, value in zip("NLPRV", table["size"], strict=True))
    head = {"model": f"{record['model_name']}: {size}; {table['dtype']}", "measured": table["provenance"]}
    note = (
        "Time expanded (mha) over time absorbed (mqa); below 1.00 expanding wins.\n"
        f"Written to {record['file']}; use it with --tune-file {record['file']} or MLA_TUNE_FILE={record['file']}."
    )
    if record["regret"] is None:
        return [head, _ratio_grid(table, ratios), note]
    chosen = "Time of form = auto with this table over the better form's; 1.00 is a right choice."
    return [head, _ratio_grid(table, ratios), note, _ratio_grid(table, record["regret"]), chosen]


def _ratio_grid(table: Record, ratios: Sequence[Sequence[float]]) -> Grid:
    rows = [(str(n), *(f"{x:.2f}" for x in row)) for n, row in zip(table["query_lens"], ratios, strict=True)]
    return Grid(("new \\ cached", *map(str, table["contexts"])), rows)


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
    titles = ("cache of", "B/token\n1 layer", f"B/token\n{count(layers, 'layer')}", "of MLA")
    cache = Grid(titles, sizes)
    rows = [
        (
            *(r["gpu"], r["form"], number(r["flops"] / 1e9, 3), number(r["bytes"] / 1e6, 3), number(r["intensity"], 1)),
            *(number(r["time_us"], 2), r["bound"]),
        )
        for r in record["rows"]
    ]
    costs = Grid(("machine", "form", "GFLOP", "MB", "FLOP/B", "at least\nus", "bound by"), rows, keys=2)
    return [head, cache, costs, COST_LINES, *_winners(record)]


COST_LINES = """\
One layer. expanded: MHA over keys and values made from the latent cache; absorbed: MQA over the latent cache itself.
mha, gqa, mqa: attention of the same widths over its own cache. projections: the products around attention in MLA.
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
