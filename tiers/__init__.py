"""How to compute MLA attention: the registry of tiers. Nothing optional is imported until a tier is asked for."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from mla.adapters import compose, from_attend
from mla.errors import bad
from mla.need import Need
from mla.tier import Tier, refuse

__all__ = ["ENTRY_POINTS", "compose", "from_attend", "get", "names", "select", "why_not"]

ENTRY_POINTS = "mla.tiers"
_OURS: dict[str, tuple[str, str]] = {
    "naive": ("tiers.tier0_naive", "NaiveTier"),
    "paged": ("tiers.tier1_paged", "PagedTier"),
    "template": ("tiers.template", "tier"),
}
_AUTO = ("paged", "naive")


def names() -> list[str]:
    """Return the names of all known tiers: ours, then those of the entry-point group `mla.tiers`."""
    return [*_OURS, *sorted(e.name for e in entry_points(group=ENTRY_POINTS) if e.name not in _OURS)]


def get(spec: str | dict[str, str], **options: Any) -> Tier:
    """Return a tier by name, by `name:form`, by the path of a Python file, or two of them by {decode=..., prefill=...}.

    A file defines `tier`, or `attend` and optionally `why_not`. `options` go to the tier (form, max_workspace_tokens).
    Raises ValueError or TypeError naming what is unknown, with the nearest name; an optional package that is missing
    is named with its extra.
    """
    if isinstance(spec, dict):
        if set(spec) != {"decode", "prefill"}:
            raise bad("tier", expected="the keys decode and prefill", got=str(sorted(spec)), fix='{decode = "paged", prefill = "naive"}')
        return compose(get(spec["decode"], **options), get(spec["prefill"], **options))
    if spec.endswith(".py"):
        return _take(_module_from(Path(spec)), spec, options)
    name, _, form = spec.partition(":")
    if form:
        options = {**options, "form": form}
    if name in _OURS:
        module, attribute = _OURS[name]
        return _make(getattr(importlib.import_module(module), attribute), spec, options)
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == name:
            return _make(entry.load(), spec, options)
    near = get_close_matches(name, names(), 1)
    hint = f"did you mean {near[0]!r}" if near else "a path must end in .py"
    raise bad("tier", expected=f"one of {', '.join(names())}, or a path", got=repr(spec), fix=hint)


def select(need: Need, spec: str | dict[str, str] = "auto", **options: Any) -> tuple[Tier, str]:
    """Return the tier for `need` and a sentence that says which and why; "auto" takes the first one without a reason.

    Raises ValueError with every reason where an explicit tier refuses, or where no tier is left. Never falls back.
    """
    if spec != "auto":
        tier = get(spec, **options)
        refuse(tier, need)
        return tier, f"{tier.name}: asked for by name."
    table = why_not(need)
    for name in _AUTO:
        if not table[name]:
            passed = "; ".join(f"{n} refuses: {' '.join(table[n])}" for n in _AUTO[: _AUTO.index(name)])
            return get(name), f"{name}: the first tier without a reason against it{'; ' + passed if passed else ''}."
    raise ValueError("no tier serves this Need. " + " ".join(f"{n}: {' '.join(r)}" for n, r in table.items()))


def why_not(need: Need) -> dict[str, list[str]]:
    """Return every known tier's reasons against `need`, [] where it serves; a tier that cannot load has that as its reason."""
    table = {}
    for name in names():
        try:
            table[name] = get(name).why_not(need)
        except (ImportError, ValueError) as error:
            table[name] = [f"{name} cannot be loaded: {error}"]
    return table


def _make(thing: Any, spec: str, options: dict[str, Any]) -> Tier:
    """A class or a function makes a tier from the options; a ready tier takes none."""
    if isinstance(thing, type) or (isinstance(thing, Callable) and not hasattr(thing, "attend")):
        try:
            return thing(**options)
        except TypeError as error:
            raise bad("tier options", expected=f"those of {spec}", got=str(sorted(options)), fix=str(error), kind=TypeError) from error
    if options:
        raise bad("tier options", expected=f"none for {spec}", got=str(sorted(options)), fix="drop them", kind=TypeError)
    return thing


def _module_from(path: Path) -> ModuleType:
    if not path.is_file():
        raise bad("tier", expected="the path of a Python file", got=str(path), fix="check the path")
    spec = importlib.util.spec_from_file_location(f"mla_user_tier_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _take(module: ModuleType, spec: str, options: dict[str, Any]) -> Tier:
    if hasattr(module, "tier"):
        return _make(module.tier, spec, options)
    if hasattr(module, "attend"):
        return from_attend(Path(spec).stem, module.attend, getattr(module, "why_not", None))
    raise bad("tier", expected="a file that defines `tier` or `attend`", got=f"{spec} with neither", fix="start from tiers/template.py")
