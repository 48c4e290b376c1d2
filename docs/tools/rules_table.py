"""How many planted faults the accuracy rules of the field tell from right kernels, and how many of those they reject.

`python docs/tools/rules_table.py` writes docs/results/accuracy_rules.json and the table of docs/reference/accuracy.md.
Axes: T new tokens (packed over requests), S cached tokens, N heads, V value.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trials import (
    ROOT,
    Scene,
    answer,
    cases,
    correct_kernels,
    progress,
    put_between,
    save,
    scene,
    table,
)

from mla.accuracy import compare
from mla.commands.environment import environment
from mla.conformance.cases import DIMS, Case
from mla.conformance.specs import spec
from mla.conformance.zoo import FAULTS
from mla.conformance.zoo.fault import SUITES
from mla.conformance.zoo.score import score
from mla.state import AttentionState

PAGE, RESULTS = ROOT / "docs" / "reference" / "accuracy.md", ROOT / "docs" / "results" / "accuracy_rules.json"
FIELD_BATCHES = (
    "small_decode", "small_prefill", "mixed_small", "medium_decode", "single_decode", "single_prefill",
    "spec_decode_small", "mixed_medium", "chunked_context_prefill",
)  # fmt: skip
OUR_BATCHES = ("padded_tail", "zero_rows_prefill", "3q1s40", "1q1s300_1q5s200")
SETS = ("field", "ours")
PARTS = ("out", "both")
Check = Callable[[Tensor, Tensor, Tensor], bool]


def close(rtol: float, atol: float) -> Check:
    """|x - y| <= atol + rtol |y| everywhere, for x, y of any shape."""
    return lambda x, y, eager: torch.allclose(x, y, rtol=rtol, atol=atol)


def cosine(least: float) -> Check:
    """Cosine of the whole tensors, of any shape, above a number."""
    return lambda x, y, eager: bool((x * y).sum() > least * x.norm() * y.norm())


def twice(x: Tensor, y: Tensor, eager: Tensor) -> bool:
    """max |x - y| at most twice that of eager 16-bit PyTorch; any shape."""
    return bool((x - y).abs().max() <= 2 * (eager - y).abs().max())


def relative_rms(x: Tensor, y: Tensor, eager: Tensor) -> bool:
    """rms(x - y) < 0.01 rms(y) over the whole tensors, of any shape."""
    return bool((x - y).norm() < 1e-2 * y.norm())


RULES: dict[str, Check] = {
    "rtol 1e-2, atol 5e-1": close(1e-2, 5e-1),
    "rtol 5e-2, atol 5e-2": close(5e-2, 5e-2),
    "rtol 2e-2, atol 2e-2": close(2e-2, 2e-2),
    "rtol 1e-3, atol 1e-3": close(1e-3, 1e-3),
    "cosine > 0.99": cosine(0.99),
    "cosine > 0.999": cosine(0.999),
    "max error <= 2x eager 16-bit": twice,
    "relative RMS < 1e-2": relative_rms,
}
OURS, SUITE = "error budget (ours)", "mla check, all suites (ours)"


def eager(s: Scene) -> AttentionState:
    """Attention as PyTorch computes it in 16 bits all the way, out (T, N, V), lse (T, N): what "2x" is measured by."""
    need, batch, up = s.need, s.given.batch, s.given.up
    out, lse = AttentionState.empty(batch.num_tokens, need.N, need.V).parts()
    start = 0
    for query_len, (kv_c, k_pe) in zip(batch.query_lens_host, s.given.keys, strict=True):
        rows = slice(start, start + query_len)
        start += query_len
        if not len(kv_c):
            continue
        k_nope, v = (torch.einsum("sl,lnd->nsd", kv_c, W) for W in (up.W_UK, up.W_UV))
        keys = torch.cat([k_nope, k_pe.expand(need.N, -1, -1)], -1)
        query = torch.cat([s.given.q.nope[rows], s.given.q.pe[rows]], -1).transpose(0, 1)
        hidden = torch.arange(len(kv_c)) >= batch.row_kv_lens[rows, None]
        scores = (query @ keys.mT * need.softmax_scale).masked_fill(hidden, float("-inf"))
        out[rows] = (torch.softmax(scores, -1).nan_to_num() @ v).transpose(0, 1).float()
        lse[rows] = torch.logsumexp(scores.float(), -1).T
    return AttentionState(out, lse)


def verdicts(state: AttentionState | None, s: Scene, plain: AttentionState) -> dict[str, tuple[bool, bool]]:
    """Whether each rule passes an answer, out (T, N, V) and lse (T, N): by its out alone, and by both parts."""
    if state is None or state.lse is None or (state.out.shape, state.lse.shape) != (plain.out.shape, s.truth.lse.shape):
        return dict.fromkeys((*RULES, OURS), (False, False))
    found, finite, at = {}, torch.isfinite(s.truth.lse), s.truth.rows
    rows = [state.out[at].double(), s.truth.out, plain.out[at].double()]
    logs = [x.double()[finite] for x in (state.lse[at], s.truth.lse, plain.parts()[1][at])]
    for name, check in RULES.items():
        out = check(*rows)
        found[name] = out, out and (not logs[0].numel() or check(*logs))
    ours = compare(state, s.truth)
    found[OURS] = ours.used_out <= 1, ours.ok
    return found


def cases_of(which: str, seed: int) -> list[Case]:
    """The cases of a set: batches known in the field at V3's widths in bfloat16, or our families at toy sizes."""
    if which == "field":
        return [Case(spec(name), DIMS["v3_n3"], "bf16", "", "randn", "shuffled", 64, seed) for name in FIELD_BATCHES]
    return [c for c in cases("toy", OUR_BATCHES, ["bf16"], seed + 1) if c.seed == seed]


def measure(seeds: int) -> dict[str, Any]:
    """Count, for every set and rule, the right answers that were rejected, and the cases that tell a fault from them.

    A case tells a fault from right kernels where the rule rejects the fault and none of those.
    """
    start = time.process_time()
    rules = (*RULES, OURS)
    right = {which: {rule: [0, 0] for rule in rules} for which in SETS}
    told = {which: {name: {rule: [0, 0] for rule in rules} for name in FAULTS} for which in SETS}
    runs = dict.fromkeys(SETS, 0)
    for which in SETS:
        chosen = [(seed, case) for seed in range(seeds) for case in cases_of(which, seed)]
        for seed, case in progress(f"rules, {which}", chosen):
            s = scene(case, tame=which == "field")
            plain = eager(s)
            passed = [verdicts(answer(tier, s), s, plain) for _, tier in correct_kernels().values()]
            runs[which] += len(passed)
            fair = {rule: [all(found[rule][i] for found in passed) for i in range(2)] for rule in rules}
            for rule, row in right[which].items():
                row[:] = [n + sum(not found[rule][i] for found in passed) for i, n in enumerate(row)]
            for fault in FAULTS.values() if seed == 0 else ():
                found = verdicts(answer(fault.tier(), s), s, plain)
                for rule, row in told[which][fault.name].items():
                    row[:] = [n + (fair[rule][i] and not found[rule][i]) for i, n in enumerate(row)]
    looked = [(name, [f for f in FAULTS.values() if f.suite == name]) for name in SUITES]
    looks = [c for name, some in looked for c in score(progress(f"faults of {name}", some), suites=(name,))]
    caught = {c.fault.name: c.result and c.result.case.id for c in looks}
    where = {"command": f"python docs/tools/rules_table.py --seeds {seeds}", "environment": environment()}
    sizes = {which: len(cases_of(which, 0)) for which in SETS}
    seconds = round(time.process_time() - start, 1)
    return {**where, "cpu_seconds": seconds, "cases": sizes, "right_runs": runs, "right_rejected": right,
            "told_apart": told, "found_by_the_suite": caught}  # fmt: skip


def render(record: dict[str, Any]) -> str:
    """The generated part of the page."""
    e, total = record["environment"], len(record["found_by_the_suite"])
    parts = [
        f"Made by `{record['command']}` in {record['cpu_seconds']:.0f} s of one thread, torch {e['torch']}, "
        f"commit {e['commit']}; {total} faults."
    ]
    words = {
        "field": "The field's inputs: q and rows randn / 10, bfloat16, clean memory",
        "ours": "Our families: randn, peaked, needle, equal keys, large logits; bfloat16, poisoned memory",
    }
    titles = ["rule", "faults not told apart: out", "out and LSE", "right kernels rejected: out", "out and LSE"]
    for which in SETS:
        runs, told = record["right_runs"][which], record["told_apart"][which]
        lines = []
        for rule in (*RULES, OURS):
            passed = [sum(row[rule][i] == 0 for row in told.values()) for i in range(2)]
            rejected = [f"{record['right_rejected'][which][rule][i]} of {runs}" for i in range(2)]
            lines.append([rule, *(f"{n} of {total}" for n in passed), *rejected])
        if which == "ours":
            missed = sum(case is None for case in record["found_by_the_suite"].values())
            lines.append([SUITE, "-", f"{missed} of {total}", "-", "-"])
        parts.append(f"{words[which]}; {record['cases'][which]} cases:\n\n{table(titles, lines)}".rstrip())
    return "\n" + "\n\n".join(parts) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """Measure, save the record, and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="seeds of the inputs of right kernels [2]")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    record = measure(args.seeds)
    save(args.results, record)
    put_between(args.page, "rules", render(record))


if __name__ == "__main__":
    main()
