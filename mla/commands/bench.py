"""`mla bench`: from its words to timings, and a record of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mla.bench import LEVELS, bench_together
from mla.commands.figures import bench_blocks
from mla.commands.flags import Run
from mla.commands.output import Block, progress
from mla.commands.records import bench_record, model_record
from mla.commands.resolve import case_of, decode_step_of, device_of, dtype_of, gpu_of, layout_of, model_of
from mla.errors import bad
from mla.need import normal_device
from mla.peers import decode_beside_transformers
from mla.settings import RunSettings
from mla.tier import Tier

Blocks = Callable[[Mapping[str, Any]], Sequence[Block]]


def bench(
    run: Run,
    found: Callable[[RunSettings], Mapping[str, Tier]],
    batches: Sequence[str],
    repeats: int,
    level: str,
    gpu: str | None,
    beside: str | None,
    graph: bool,
) -> tuple[Mapping[str, Any], Blocks]:
    """Time the tiers that `found` makes of the settings on each batch; return the record and how it reads.

    On a GPU its ceilings are measured first, and they are the roofline where `gpu` names no other.
    """
    if level not in LEVELS:
        raise bad("--level", expected=f"one of {', '.join(LEVELS)}", got=repr(level), fix="or leave it out")
    s, config, device = run.settings, model_of(run.settings), normal_device(device_of(run.settings))
    ceiling = gpu_of(gpu, dtype_of(s).itemsize) if gpu else None
    cases = [case_of(s, config, batch) for batch in batches]
    steps = [decode_step_of(s, case, beside) for case in cases] if beside else []
    tiers, facts = found(s), None
    if device.startswith("cuda"):
        import torch

        from mla.commands.gpu import gpu_record

        torch.cuda.set_device(device)
        facts, measured = gpu_record(device, dtype_of(s))
        ceiling = ceiling or measured
    results: list[tuple[str, Any]] = []
    peers: list[tuple[Any, Any]] = []
    total = len(cases) * len(tiers) + len(steps)
    with progress("bench", "timings") as tick:
        for case in cases:
            tick(len(results), total)
            together = bench_together(list(tiers.values()), case, repeats, device, level, graph)
            results += zip(tiers, together, strict=True)
        for case, (count, context) in zip(cases, steps, strict=False):
            tick(len(results) + len(peers), total)
            right = [tiers[name] for name, r in results if r.gate.case == case and r.gate.ok]
            peers.append(
                (case, decode_beside_transformers(config, right, context=context, batch=count, repeats=repeats))
            )
    model = model_record(s, config, layout_of(s, config))
    return bench_record(model, config, results, ceiling, peers, facts, level), bench_blocks
