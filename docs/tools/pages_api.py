"""The API pages: one for each part of the package, every module of mla and tiers on exactly one of them."""

from pieces import ROOT

RARELY_MEANT = "---\nsearch:\n  boost: 0.5\n---\n"  # a word that is searched for is explained elsewhere

PARTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "model": (
        "The model",
        "What MLA is: sizes, weights, rotation, both forms and the layer around them.",
        (
            "mla.config", "mla.presets", "mla.hf_config", "mla.weights", "mla.checkpoint", "mla.rope",
            "mla.projections", "mla.attention", "mla.layer", "mla.baselines",
        ),
    ),
    "contract": (
        "The contract",
        "What a layer and a way of computing attention know of each other. [Contract](../contract.md) tells it in "
        "order.",
        ("mla.state", "mla.cache", "mla.batch", "mla.need", "mla.tier", "mla.adapters", "mla.errors", "mla.checks"),
    ),
    "judging": (
        "Judging",
        "The float64 oracle, the error budget, and the comparison that everything else uses.",
        ("mla.oracle", "mla.replicas", "mla.accuracy"),
    ),
    "conformance": ("Conformance", "Cases, one try and its verdict, diagnosis, raw kernels, planted faults.",
                    ("mla.conformance",)),
    "costs": (
        "Costs",
        "Bytes, FLOPs, rooflines and times.",
        (
            "mla.cost", "mla.roofline", "mla.tune", "mla.chunks", "mla.ragged", "mla.memory", "mla.timing",
            "mla.bench_scene", "mla.bench", "mla.peers", "mla.aot", "mla.sass",
        ),
    ),
    "traffic": ("Traffic", "Request traces, a page pool, a scheduler, and the replay of `mla compare`.",
                ("mla.serving",)),
    "commands": ("Commands", "What the command line is made of.", ("mla.settings", "mla.cli", "mla.commands")),
    "tiers": ("Tiers", "The registry, and every way of computing attention.", ("tiers",)),
}  # fmt: skip


def modules() -> list[str]:
    """Return the dotted names of all modules with something in them, packages first."""
    found = []
    for package in ("mla", "tiers"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] == "__main__" or not path.read_text(encoding="utf-8").strip():
                continue
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def part_of(module: str) -> str:
    """Return the page that a module stands on; raises KeyError where none or two want it."""
    pages = [
        page for page, (_, _, names) in PARTS.items() if any(module == n or module.startswith(f"{n}.") for n in names)
    ]
    if len(pages) != 1:
        raise KeyError(f"{module} stands on {pages or 'no page'} of the API: name it in docs/tools/pages_api.py")
    return pages[0]


def pages() -> dict[str, str]:
    """Return the API pages and their index; the package `mla` itself only re-exports."""
    by_page: dict[str, list[str]] = {page: [] for page in PARTS}
    for module in modules():
        if module != "mla":
            by_page[part_of(module)].append(module)
    found = {}
    for page, (title, about, _) in PARTS.items():
        blocks = "\n".join(f"::: {module}\n" for module in by_page[page])
        found[f"reference/api/{page}.md"] = f"{RARELY_MEANT}# {title}\n\n{about}\n\n{blocks}"
    parts = "\n".join(
        f"**[{title}]({page}.md).** {about.split(' [')[0]}\n\n{', '.join(f'`{m}`' for m in by_page[page])}\n"
        for page, (title, about, _) in PARTS.items()
    )
    found["reference/api/index.md"] = (
        "# API\n\n"
        "Every public name of both packages, from its docstring. Axis letters are those of the "
        "[glossary](../glossary.md).\n\n" + parts
    )
    return found
