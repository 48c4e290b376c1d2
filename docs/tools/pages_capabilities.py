"""The capability table: what each tier answers to `why_not` on named machines, without any of these machines."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError
from typing import Any
from unittest import mock

import torch
from pieces import escape, html_table

import tiers
from mla.cache import FloatRows
from mla.need import Capacity, Need
from mla.presets import preset
from mla.tier import Tier


@dataclass(frozen=True)
class Machine:
    """A machine by name: what torch would say of its device, and its build of torch."""

    name: str
    device: str
    arch: str
    build: str


MACHINES = (
    Machine("Laptop CPU", "cpu", "cpu", ""),
    Machine("A100", "cuda:0", "sm_80", "cuda"),
    Machine("H200", "cuda:0", "sm_90", "cuda"),
    Machine("B200", "cuda:0", "sm_100", "cuda"),
    Machine("MI300X", "cuda:0", "gfx942", "hip"),
)
DETAILED = ("H200", "MI300X")
ASKS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "captured as a CUDA graph": {"graph_capture": True},
    "bits that do not depend on the batch": {"batch_invariant": True},
    'explicit row bounds, mask = "rows"': {"mask": "rows"},
    "pages of one row": {"page_size": 1},
    "a model of other sizes: MiniCPM3, L 256, R 32": {"model": "minicpm3-4b"},
    "a sliding window": {"window": 4096},
}
PACKAGE = re.compile(r"is not installed; .* needs (?P<need>.+?); run pip install \"mla-tiers\[(?P<extra>\w+)\]\"")


def need(machine: Machine, model: str = "deepseek-v3", dtype: torch.dtype = torch.bfloat16, **asked: Any) -> Need:
    """Return what one layer of a model asks on a machine, its LSE included."""
    c = preset(model)
    fields: dict[str, Any] = {"page_size": 64, "lse": True, "capacity": Capacity(32, 2048, 2048, 8192), **asked}
    return Need(
        N=c.N, L=c.L, P=c.P, R=c.R, V=c.V, softmax_scale=c.softmax_scale, layout=FloatRows(c.L, c.R, dtype),
        dtype=dtype, device=machine.device, arch=machine.arch, **fields,
    )  # fmt: skip


@contextmanager
def on(machine: Machine) -> Iterator[None]:
    """Let tiers see the build of torch of that machine and no optional package, whatever this machine has."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("mla.need.version", side_effect=PackageNotFoundError("not here")))
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("TRITON_INTERPRET", None)
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0" if machine.build == "cuda" else None))
        stack.enter_context(mock.patch.object(torch.version, "hip", "7.0" if machine.build == "hip" else None))
        yield


def answers(machine: Machine, asked: dict[str, Any]) -> dict[str, tuple[list[str], str]]:
    """Return, for each tier, the sentences that no package would change, and the package that it needs."""
    with on(machine):
        found = {name: tier.why_not(need(machine, **asked)) for name, tier in ours().items()}
    split = {}
    for name, reasons in found.items():
        packages = [m for r in reasons if (m := PACKAGE.search(r))]
        rest = [r for r in reasons if not PACKAGE.search(r)]
        split[name] = rest, ", ".join(f"{m['need']} (extra {m['extra']})" for m in packages)
    return split


@cache
def ours() -> dict[str, Tier]:
    """Return this repository's tiers by name, without those of other distributions."""
    return {name: tiers.get(name) for name in tiers.names() if name in tiers._OURS}


def mark(name: str, reasons: list[str], footnotes: dict[str, int]) -> str:
    """Return a cell: yes, or no with the numbers of its sentences."""
    if not reasons:
        return '<td class="cell-ok">yes</td>'
    numbers = [footnotes.setdefault(f"{name}: {r}", len(footnotes) + 1) for r in reasons]
    links = " ".join(f'<a href="#r{n}">{n}</a>' for n in numbers)
    return f'<td class="cell-refused">no <sup>{links}</sup></td>'


def pages() -> dict[str, str]:
    """Return reference/capabilities.md."""
    names = list(ours())
    footnotes: dict[str, int] = {}
    plain = {m.name: answers(m, {}) for m in MACHINES}
    rows = []
    for name in names:
        packages = [plain[m.name][name][1] for m in MACHINES if plain[m.name][name][1]]
        needs = f'<td class="say">{escape(packages[0] if packages else "no other package")}</td>'
        rows.append([f"<code>{name}</code>", *(mark(name, plain[m.name][name][0], footnotes) for m in MACHINES), needs])
    parts = [
        "# Tier capabilities\n",
        "Which tier serves what, and where. Nothing here is written by hand: every cell is the answer of that "
        "tier's own "
        "`why_not(need)` to one layer of DeepSeek-V3 in bfloat16 with pages of 64, on machines that are only "
        "named. A tier "
        "that refuses says so in sentences, which stand below the tables. On a machine of your own ask `mla "
        "tiers`; how to "
        "read the answer is in [Pick a tier](../how-to/pick-a-tier.md).\n",
        "`yes` means that the tier takes the layer once its package is there. It does not mean that somebody ran "
        "it on that "
        "machine: what was run is on the [dashboard](../results/dashboard.md).\n",
        "`aiter` is a simulated contract; it was not run on AMD hardware. Its calls are checked on a CPU against a "
        "simulator of AITER's documented arithmetic and of every check of arguments: the column `aiter (simulated)`. "
        "Who has an MI300 or an MI350 makes the real column with `mla check aiter --suite full --device cuda --json "
        "docs/results/check-aiter-full-mi300x.json`; the dashboard shows every record in that folder.\n",
        "## Machines\n",
        html_table(["tier", *(f"{m.name}<br>{m.arch}" for m in MACHINES), "needs"], rows),
    ]
    for machine in (m for m in MACHINES if m.name in DETAILED):
        parts += [f"## What may be asked of a layer, on an {machine.name}\n", asked_table(machine, names, footnotes)]
    parts += ["## The sentences\n", sentences(footnotes)]
    return {"reference/capabilities.md": "\n".join(parts)}


def asked_table(machine: Machine, names: list[str], footnotes: dict[str, int]) -> str:
    """Return the table of what may be asked of a layer on one machine."""
    rows = []
    for what, asked in ASKS.items():
        found = answers(machine, asked)
        rows.append([escape(what), *(mark(name, found[name][0], footnotes) for name in names)])
    return html_table(["asked", *(f"<code>{name}</code>" for name in names)], rows)


def sentences(footnotes: dict[str, int]) -> str:
    """Return the numbered sentences, each with an anchor."""
    lines = []
    for text, n in footnotes.items():
        name, _, said = text.partition(": ")
        lines.append(f'<p id="r{n}"><strong>{n}.</strong> <code>{escape(name)}</code>: {escape(said)}</p>')
    return "\n".join(lines) + "\n"
