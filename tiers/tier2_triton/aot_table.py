"""Every variant of every kernel, compiled ahead of time with no GPU, held to budgets, and kept as a record and a table.

`make aot`, or `python -m tiers.tier2_triton.aot_table`, compiles what is new: a variant is compiled again where the
code of its kernel, its declaration or the compiler changed since the record was written. It writes RECORD and PAGE
and exits with 1, naming the variant, where one does not compile or breaks a budget.
"""

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mla.aot import EXTRA, SHARED_LIMIT, TARGETS, Compile, compile_entries, kernel_of
from mla.commands.output import progress
from mla.errors import bad

ROOT = Path(__file__).parents[2]
RECORD, PAGE = ROOT / "docs" / "results" / "aot.json", ROOT / "docs" / "reference" / "ahead-of-time.md"
PACKAGE = "tiers.tier2_triton"
COMPILER = ("mla/aot.py", "mla/sass.py")  # read what code takes: their changes are changes of the record

# What nobody may exceed, beside the shared memory that a target gives (`mla.aot.SHARED_LIMIT`). 255 registers are all
# that a thread can have; with 80, which kernels that only move rows may take, an SM still holds 25 warps.
BUDGET_TARGET = "sm_90"
SPILL_FREE = ("combine", "decode", "per_head", "hopper.schedule")
# Bytes; more, and descriptors are spilled in the loop over keys. Pages of less than 64 keys need more addresses. What
# `seesaw` spills it stores and loads once a unit, outside its loops. Two runs of the compiler may differ by a place of
# 8 bytes, seen once: the budgets are that much above the worse of triton 3.6.0 and 3.7.1, and MOST_LOCAL 4 loads.
SMALL_PAGES = re.compile(r"pages of (16|32)\b")
MOST_SPILLED = {
    "hopper.combine": 8, "hopper.prefill": 104, "hopper.seesaw": 40, "hopper.swap": 24,
    "hopper.seesaw, small pages": 16, "hopper.swap, small pages": 72,
}  # fmt: skip
# Instructions in the text of a Hopper kernel. One wgmma has 16 terms and 64 rows: a block of `swap` takes 4 + 16 + 16
# for scores and 2 x 16 for values. In `seesaw` 88 would be all unrolled, and one loop over four boxes stays a loop: 4
# for 16.
COUNTS = ("products", "local_loads", "local_stores")
PRODUCTS = {"hopper.seesaw": 76, "hopper.swap": 68, "hopper.prefill": 120}
# Loads, and stores.
MOST_LOCAL = {
    "hopper.prefill": 46, "hopper.seesaw": 12, "hopper.swap": 7,
    "hopper.seesaw, small pages": 5, "hopper.swap, small pages": 27,
}  # fmt: skip
REGISTERS = {
    "hopper.combine": 152, "hopper.prefill": 255, "hopper.schedule": 128, "hopper.seesaw": 255, "hopper.swap": 255,
    "combine": 168, "concat": 80, "decode": 255, "fused_input": 128, "gather": 80, "merge": 80,
    "per_head": 255, "prefill": 255, "write": 80,
}  # fmt: skip

Record = Mapping[str, Any]
Wanted = tuple[str, str, Sequence[str]]  # kernel, variant, targets


def kernel_names() -> list[str]:
    """Return the modules of kernels/ and hopper/ that declare variants, those of hopper/ by "hopper." and the file."""
    here, found = Path(__file__).parent, []
    for folder, prefix in (("kernels", ""), ("hopper", "hopper.")):
        files = sorted((here / folder).glob("*.py"))
        found += [
            prefix + f.stem for f in files if re.search(r"^def aot\(", f.read_text(encoding="utf-8"), re.MULTILINE)
        ]
    return found


def module_of(kernel: str) -> str:
    """Return the module of a kernel by its name, such as "decode" or "hopper.swap"."""
    return f"{PACKAGE}.{kernel if '.' in kernel else f'kernels.{kernel}'}"


def sources_of(kernel: str) -> dict[str, str]:
    """Return path -> SHA-256 of a kernel's file, of all that it imports from this tier, directly or not, and COMPILER.

    Of mla nothing else counts: what comes from there into the code of a kernel are the values of its declaration.
    """
    todo, found = [module_of(kernel)], {path: _sha(ROOT / path) for path in COMPILER}
    while todo:
        name = todo.pop()
        path = ROOT / f"{name.replace('.', '/')}.py"
        at = path.relative_to(ROOT).as_posix()
        if at in found or not path.is_file():
            continue
        found[at] = _sha(path)
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(
            r"^\s*from (tiers\.tier2_triton[\w.]*) import ([^#\n(]*|\([^)]*\))", text, re.M
        ):
            todo += [module, *(f"{module}.{each}" for each in re.findall(r"\w+", names))]
        todo += re.findall(r"^\s*import (tiers\.tier2_triton[\w.]*)", text, re.M)
    return dict(sorted(found.items()))


def declared(kernel: str) -> dict[str, Compile]:
    """Return what a kernel's module declares in `aot`, by the name of the variant, made longer where two have one.

    Raises ValueError where it declares nothing, or two variants of one name.
    """
    module = importlib.import_module(module_of(kernel))
    try:
        entries = list(module.aot())
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise bad(f"{kernel}.aot", expected="a list of Compile", got=got, fix="mend it") from error
    usual = [entry.name or kernel_of(entry).__name__ for entry in entries]
    names = [name if usual.count(name) == 1 else told(name, e) for name, e in zip(usual, entries, strict=True)]
    named = dict(zip(names, entries, strict=True))
    if len(named) < len(entries) or not entries:
        got = f"{next((n for n in names if names.count(n) > 1), 'none')!r} {'twice' if entries else ''}".strip()
        fix = "declare every variant in aot() with a name of its own"
        raise bad(f"{kernel}.aot", expected="variants of different names", got=got, fix=fix)
    return named


def told(name: str, entry: Compile) -> str:
    """Return the name of a variant that another has too, with its warps, stages and targets."""
    where = f" for {', '.join(targets_of(entry))}" if entry.targets else ""
    return f"{name}, {entry.num_warps} warps, {entry.num_stages} stages{where}"


def digest(entry: Compile) -> str:
    """Return a hash of all that an entry tells the compiler beside the kernel's source."""
    told = (kernel_of(entry).__name__, *(sorted(part.items()) for part in (entry.signature, entry.constexprs)))
    told += (entry.num_warps, entry.num_stages, sorted(entry.options.items()), targets_of(entry))
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def targets_of(entry: Compile) -> tuple[str, ...]:
    """Return those of TARGETS that an entry is declared for."""
    return tuple(target for target in TARGETS if not entry.targets or target in entry.targets)


def declarations(kernels: Sequence[str] = ()) -> dict[str, Any]:
    """Return what there is now: for each kernel its sources, and for each variant its digest and targets."""
    found, names = {}, kernel_names()
    for kernel in kernels or names:
        if kernel not in names:
            raise bad("kernel", expected=f"one of {', '.join(names)}", got=repr(kernel), fix="ask for one of them")
        variants = {name: {"digest": digest(e), "targets": targets_of(e)} for name, e in declared(kernel).items()}
        found[kernel] = {"sources": sources_of(kernel), "variants": {n: v for n, v in variants.items() if v["targets"]}}
    return found


def stale(record: Record, now: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each kernel or variant in which a record and `declarations()` differ."""
    kept, sentences = record["kernels"], []
    for kernel in sorted({*kept, *now}):
        if kernel not in kept or kernel not in now:
            sentences.append(f"{kernel} is {'not in the record' if kernel in now else 'in the record only'}.")
            continue
        old, new = kept[kernel], now[kernel]
        changed = sorted(
            p for p in {*old["sources"], *new["sources"]} if old["sources"].get(p) != new["sources"].get(p)
        )
        sentences += [f"{kernel}: {path} has changed." for path in changed]
        for variant in sorted({*old["variants"], *new["variants"]}):
            a, b = old["variants"].get(variant), new["variants"].get(variant)
            if a is None or b is None:
                where = "not in the record" if a is None else "in the record only"
                sentences.append(f"{kernel}: the variant {variant!r} is {where}.")
            elif a["digest"] != b["digest"] or set(a["rows"]) != set(b["targets"]):
                sentences.append(f"{kernel}: the variant {variant!r} is declared in another way.")
    return sentences


def broken(record: Record) -> list[str]:
    """Return a sentence for each variant of a record that did not compile, or breaks a budget."""
    sentences = []
    for kernel, variant, target, row in rows_of(record):
        where = f"{kernel}, variant {variant!r}, {target}:"
        if row["status"] not in ("ok", "too_large"):
            sentences.append(f"{where} {row['status']}. {row['detail']}")
            continue
        limit = SHARED_LIMIT[target]
        if row["shared"] > limit:
            sentences.append(f"{where} {row['shared']:,} bytes of shared memory, at most {limit:,}.")
        if target != BUDGET_TARGET:
            continue
        if row["spilled"] and kernel in SPILL_FREE:
            sentences.append(f"{where} {row['spilled']} bytes spilled, none allowed.")
        of_pages = kernel + ", small pages" * bool(kernel in PRODUCTS and SMALL_PAGES.search(variant))
        if row["spilled"] > MOST_SPILLED.get(of_pages, 1 << 30):
            sentences.append(f"{where} {row['spilled']} bytes spilled, at most {MOST_SPILLED[of_pages]}.")
        sentences += [f"{where} {fault}" for fault in miscounted(kernel, of_pages, row)]
        most = REGISTERS.get(kernel)
        if most is None:
            sentences.append(f"{where} no register budget; add {kernel} to REGISTERS.")
        elif row["registers"] > most:
            sentences.append(f"{where} {row['registers']} registers, at most {most}.")
    return sentences


def miscounted(kernel: str, of_pages: str, row: Record) -> list[str]:
    """Return a sentence for each count of instructions of a row that breaks a budget, or is missing.

    `of_pages` is the kernel, with ", small pages" where the variant is for those.
    """
    if kernel not in PRODUCTS:
        return []
    if missing := [name for name in COUNTS if name not in row]:
        return [f"no {' and no '.join(missing)} counted; run `make aot`."]
    found = []
    if row["products"] != PRODUCTS[kernel]:
        found.append(f"{row['products']} wgmma instructions, not {PRODUCTS[kernel]}.")
    for name in COUNTS[1:]:
        if row[name] > MOST_LOCAL[of_pages]:
            found.append(f"{row[name]} {name.replace('_', ' ')}, at most {MOST_LOCAL[of_pages]}.")
    return found


def rows_of(record: Record) -> Iterator[tuple[str, str, str, Record]]:
    """Yield (kernel, variant, target, row) of a record."""
    for kernel, of_kernel in record["kernels"].items():
        for variant, of_variant in of_kernel["variants"].items():
            for target, row in of_variant["rows"].items():
                yield kernel, variant, target, row


def compile_variant(kernel: str, variant: str, targets: Sequence[str]) -> dict[str, Any]:
    """Compile one variant of a kernel; return a row for each target."""
    entry = declared(kernel)[variant]
    kept = ("status", "registers", "spilled", "shared", *COUNTS, "detail", "seconds")
    rows = {}
    for result in compile_entries([entry], targets):
        row = asdict(result)
        known = {name: row[name] for name in kept if row[name] is not None}
        rows[result.target] = known | {"seconds": round(row["seconds"], 1)}
    return rows


def compiled(
    wanted: Sequence[Wanted], processes: int, tick: Callable[[int, int], None]
) -> Iterator[tuple[Wanted, dict[str, Any]]]:
    """Yield what was asked for with its rows by target, compiled in so many processes."""
    if not wanted:
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for i, (key, rows) in enumerate(
            zip(wanted, pool.map(compile_variant, *zip(*wanted, strict=True)), strict=True)
        ):
            tick(i + 1, len(wanted))
            yield key, rows


def updated(old: Record, now: Mapping[str, Any], compile_all: Callable[..., Iterable[Any]]) -> dict[str, Any]:
    """Return a record of what there is now: rows of `old` where nothing changed, else new ones.

    `compile_all` gets what is wanted and yields each of it with its rows.
    """
    compiler = version("triton")
    kernels: dict[str, Any] = {k: {"sources": n["sources"], "variants": {}} for k, n in now.items()}
    wanted = []
    for kernel, new in now.items():
        before = old.get("kernels", {}).get(kernel, {})
        same = old.get("triton") == compiler and _code(before.get("sources", {})) == _code(new["sources"])
        for variant, told in new["variants"].items():
            kept = before.get("variants", {}).get(variant)
            kernels[kernel]["variants"][variant] = {"digest": told["digest"], "rows": {}}
            if same and kept and kept["digest"] == told["digest"]:
                kernels[kernel]["variants"][variant] = kept
            else:
                wanted.append((kernel, variant, tuple(told.get("targets") or told["rows"])))
    for (kernel, variant, _), rows in compile_all(wanted):
        kernels[kernel]["variants"][variant]["rows"] = rows
    for kernel in {kernel for kernel, _, _ in wanted}:
        if sources_of(kernel) != now[kernel]["sources"]:
            kernels[kernel]["sources"] = {}  # edited while it was compiled: stale, and compiled again next time
    return {
        "command": "make aot",
        "triton": compiler,
        "limits": {t: SHARED_LIMIT[t] for t in TARGETS},
        "kernels": kernels,
    }


def cheapest(record: Record, now: Mapping[str, Any]) -> list[Wanted]:
    """Return for each kernel and target the variant that took the least time to compile, if there still is one."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for kernel, variant, target, row in rows_of(record):
        if target in now.get(kernel, {}).get("variants", {}).get(variant, {}).get("targets", ()):
            key, found = (kernel, target), (row["seconds"], variant)
            best[key] = min(best.get(key, found), found)
    by_variant: dict[tuple[str, str], list[str]] = {}
    for (kernel, target), (_, variant) in best.items():
        by_variant.setdefault((kernel, variant), []).append(target)
    return [(kernel, variant, tuple(targets)) for (kernel, variant), targets in by_variant.items()]


HEAD = """\
# Compiled ahead of time

Every variant of every Triton kernel that tier 2 can launch, compiled with no GPU by triton {triton} for an A100
(sm_80), an H100 or H200 (sm_90), a B200 (sm_100), an MI300X (gfx942) and an MI350X or MI355X (gfx950). A cell holds the
worst over the variants: registers of a thread / bytes that a thread spills / bytes of shared memory of a program. For
AMD, where these kernels have not run yet, this is all the evidence there is.

`make aot` writes this page and [its record](../results/aot.json); tests hold the record to the sources and to the
budgets in `tiers/tier2_triton/aot_table.py`.

"""

INSTRUCTIONS = """\

## Instructions of the kernels for Hopper

How often they stand in the code for sm_90; one in a loop counts once. Products that became more instructions than they
should, or descriptors that go to local memory in the loop over keys, cost more than a count of registers shows.

"""


def page(record: Record) -> str:
    """Return the page of a record: a row for each kernel with its worst figures on each target."""
    lines = [["kernel", "variants", *TARGETS], ["---", "---:", *["---:"] * len(TARGETS)]]
    for kernel, of_kernel in record["kernels"].items():
        cells = []
        for target in TARGETS:
            rows = [v["rows"][target] for v in of_kernel["variants"].values() if target in v["rows"]]
            worst = [max(row[name] for row in rows) if rows else 0 for name in ("registers", "spilled", "shared")]
            cells.append("{} / {} / {:,}".format(*worst) if rows else "-")
        lines.append([kernel, str(len(of_kernel["variants"])), *cells])
    lines.append(["a program may take", "", *(f"{record['limits'][target]:,}" for target in TARGETS)])
    return HEAD.format(triton=record["triton"]) + table_of(lines) + counts_of(record)


def table_of(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table of Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def counts_of(record: Record) -> str:
    """Return the section on instructions of the Hopper kernels, least to most over variants, if they were counted."""
    lines = []
    for kernel, of_kernel in record["kernels"].items():
        rows = [v["rows"].get(BUDGET_TARGET, {}) for v in of_kernel["variants"].values()]
        if kernel in PRODUCTS and all(name in row for row in rows for name in COUNTS):
            ends = [(min(row[name] for row in rows), max(row[name] for row in rows)) for name in COUNTS]
            lines.append([kernel, *(f"{a}" if a == b else f"{a} to {b}" for a, b in ends)])
    heads = [["kernel", "wgmma", "local loads", "local stores"], ["---", "---:", "---:", "---:"]]
    return INSTRUCTIONS + table_of([*heads, *lines]) if lines else ""


def dumps(record: Record) -> str:
    """Return the record as JSON with one line for each row, so that a difference can be read."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\{\s+\"status\"[^}]*\}", lambda row: " ".join(row.group().split()), text) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 right, 1 a budget is broken or the record is stale, 2 no triton."""
    parser = argparse.ArgumentParser(prog="python -m tiers.tier2_triton.aot_table", description=__doc__)
    parser.add_argument(
        "kernel", nargs="*", help="these kernels only, such as decode or hopper.swap; the record keeps the others"
    )
    parser.add_argument("--all", action="store_true", help="compile everything again")
    parser.add_argument("--check", action="store_true", help="compile nothing: say whether the record is stale")
    parser.add_argument(
        "--cheapest", action="store_true", help="compile one variant per kernel and target, write nothing"
    )
    parser.add_argument("--dry", action="store_true", help="compile everything that is asked for, write nothing")
    parser.add_argument("--processes", type=int, default=2, help="that compile at once")
    asked = parser.parse_args(words)
    os.environ.pop("TRITON_INTERPRET", None)  # before the kernels import triton
    if find_spec("triton") is None:
        print(f"error: triton is not installed; {EXTRA}.", file=sys.stderr)
        return 2
    try:
        now = declarations(asked.kernel)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    old = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    if asked.check:
        kept = {k: v for k, v in old.get("kernels", {}).items() if not asked.kernel or k in asked.kernel}
        old = {"kernels": kept}
        return _say([*stale(old, now), *broken(old)], "The record is that of the sources, and within its budgets.")
    with progress("compile", "variants") as tick:
        made = lambda wanted: compiled(wanted, asked.processes, tick)
        if asked.cheapest:
            few: dict[str, Any] = {kernel: {"variants": {}} for kernel in now}
            for (kernel, variant, _), rows in made(cheapest(old, now)):
                few[kernel]["variants"][variant] = {"rows": rows}
            missing = [f"{k}: no variant in the record; run `make aot`." for k in few if not few[k]["variants"]]
            right = f"One variant of each of {len(few)} kernels compiles for every target."
            return _say([*missing, *broken({"kernels": few})], right)
        others = old.get("kernels", {}) if asked.kernel and not asked.dry else {}
        record = updated({} if asked.all or asked.dry else old, dict(sorted({**others, **now}.items())), made)
    if not asked.dry:
        RECORD.write_text(dumps(record), encoding="utf-8")
        PAGE.write_text(page(record), encoding="utf-8")
    count, by = sum(len(found["variants"]) for found in record["kernels"].values()), record["triton"]
    right = f"{count} variants of {len(record['kernels'])} kernels compile within their budgets by triton {by}."
    return _say(broken(record), right)


def _code(sources: Mapping[str, str]) -> dict[str, str]:
    """The sources that hold code of kernels; what the others decide, such as tile sizes, is in the digests."""
    code = lambda path: ("/kernels/" in path or "/hopper/" in path) and not path.endswith("/problem.py")
    return {path: sha for path, sha in sources.items() if code(path) or path in COMPILER}


def _say(faults: Sequence[str], right: str) -> int:
    print("\n".join(faults) or right)
    return 1 if faults else 0


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
