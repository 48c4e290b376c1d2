"""How to compute MLA attention: the registry of tiers. Nothing optional is imported until a tier is asked for."""

import importlib
import inspect
import os
import sys
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from mla.adapters import compose, from_attend
from mla.errors import bad
from mla.need import Need
from mla.tier import Tier

__all__ = ["ENTRY_POINTS", "compose", "from_attend", "get", "names", "select", "why_not"]

ENTRY_POINTS = "mla.tiers"
_OURS: dict[str, tuple[str, str]] = {
    "naive": ("tiers.tier0_naive", "NaiveTier"),
    "paged": ("tiers.tier1_paged", "PagedTier"),
    "triton": ("tiers.tier2_triton.tier", "TritonTier"),
    "flashinfer": ("tiers.tier2_flashinfer.tier", "FlashInferTier"),
    "flashmla": ("tiers.tier2_flashmla", "FlashMLATier"),
    "aiter": ("tiers.tier2_aiter.tier", "AiterTier"),
    "template": ("tiers.template", "tier"),
}
_AUTO = ("triton", "paged", "naive")


def names() -> list[str]:
    """Return the names of all known tiers: ours, then those of the entry-point group `mla.tiers`."""
    return [*_OURS, *sorted({e.name for e in entry_points(group=ENTRY_POINTS)} - set(_OURS))]


def get(spec: str | os.PathLike[str] | dict[str, str], **options: Any) -> Tier:
    """Return a tier by name, by `name:form`, by the path of a Python file, or two of them by {decode=..., prefill=...}.

    A file defines `tier`, or `attend` and optionally `why_not`. `options` go to the tier (form, max_workspace_tokens).
    Raises ValueError or TypeError naming what is unknown, with the nearest name, a form that `name:form` contradicts,
    or a tier whose own code fails or exits; an optional package that is missing is named with its extra.
    """
    if isinstance(spec, dict):
        if set(spec) != {"decode", "prefill"}:
            fix = '{decode = "paged", prefill = "naive"}'
            raise bad("tier", expected="the keys decode and prefill", got=str(sorted(spec)), fix=fix)
        return compose(get(spec["decode"], **options), get(spec["prefill"], **options))
    if not isinstance(spec, str | os.PathLike):
        expected, got = "a name, a path or {decode=..., prefill=...}", repr(spec)
        raise bad("tier", expected=expected, got=got, fix="tiers.get('paged')", kind=TypeError)
    spec = os.fspath(spec)
    if spec.endswith(".py"):
        return _take(_module_from(Path(spec)), spec, options)
    name, colon, form = spec.partition(":")
    if colon:
        options = {**options, "form": _one_form(spec, form, options.get("form", "auto"))}
    entries = [e for e in entry_points(group=ENTRY_POINTS) if e.name == name]
    if len(entries) + (name in _OURS) > 1:
        found = ", ".join(f"{e.value} of {e.dist.name if e.dist else 'unknown'}" for e in entries)
        raise bad("tier", expected=f"one tier called {name!r}", got=f"also {found}", fix="rename that entry point")
    if name in _OURS:
        module, attribute = _OURS[name]
        return _make(getattr(importlib.import_module(module), attribute), spec, options)
    if entries:
        try:
            thing = entries[0].load()
        except SystemExit as error:
            raise _broken(spec, "that can be loaded", error) from error
        return _make(thing, spec, options)
    near = get_close_matches(name, names(), 1)
    hint = f"did you mean {near[0]!r}" if near else "a path must end in .py"
    raise bad("tier", expected=f"one of {', '.join(names())}, or a path", got=repr(spec), fix=hint)


def select(need: Need, spec: str | os.PathLike[str] | dict[str, str] = "auto", **options: Any) -> tuple[Tier, str]:
    """Return the tier for `need` and the text that says which and why; "auto" takes the first one without a reason.

    The text has a sentence for each tier that "auto" passed over, with its first reason; `why_not` has them all.
    Raises ValueError with every reason, and the tiers that would do, where an explicit tier refuses, or where no tier
    is left. Never falls back.
    """
    if spec != "auto":
        tier = get(spec, **options)
        reasons = tier.why_not(need)
        if not reasons:
            return tier, f"{tier.name}: asked for by name."
        raise ValueError(f"tier {tier.name!r} refuses: {' '.join(reasons)} {_way_out(why_not(need))}")
    passed, refused = "", ""
    for name in _AUTO:
        reasons = _reasons(name, need, options)
        if not reasons:
            return get(name, **options), f"{name}: the first tier without a reason against it.{passed}"
        more = f", {len(reasons)} reasons, the first" if len(reasons) > 1 else ""
        passed += f" {name} refuses{more}: {reasons[0]}"
        refused += f" {name} refuses: {' '.join(reasons)}"
    raise ValueError(f"no tier that 'auto' may take serves this Need.{refused} {_way_out(why_not(need))}")


def why_not(need: Need) -> dict[str, list[str]]:
    """Return every known tier's reasons against `need`, [] where it serves; not to load is a reason too."""
    return {name: _reasons(name, need, {}) for name in names()}


def _reasons(name: str, need: Need, options: dict[str, Any]) -> list[str]:
    try:
        return get(name, **options).why_not(need)
    except (Exception, SystemExit) as error:  # the code of a stranger; a table with a gap would hide it
        return [f"{name} cannot be loaded: {type(error).__name__}: {error}"]


def _way_out(table: dict[str, list[str]]) -> str:
    able = [name for name, reasons in table.items() if not reasons]
    if able:
        return f"These tiers serve it: {', '.join(able)}."
    return "No tier serves it. " + " ".join(f"{name}: {' '.join(reasons)}" for name, reasons in table.items())


def _one_form(spec: str, form: str, asked: Any) -> str:
    if not form:
        raise bad("tier", expected="a form after the colon", got=repr(spec), fix=f"write {spec}mha, or leave it out")
    if asked not in ("auto", form):
        fix = "drop one of the two"
        raise bad("form", expected=f"{form!r} or 'auto' beside the tier {spec!r}", got=repr(asked), fix=fix)
    return form


def _broken(spec: str, expected: str, error: BaseException) -> Exception:
    got = f"{spec}: {type(error).__name__}: {error}"
    return bad("tier", expected=f"a tier {expected}", got=got, fix="mend the tier")


def _make(thing: Any, spec: str, options: dict[str, Any]) -> Tier:
    """A class or a function makes a tier from the options; a ready tier takes none."""
    maker = callable(thing) and (isinstance(thing, type) or not hasattr(thing, "attend"))
    if maker:
        try:
            inspect.signature(thing).bind(**options)
        except TypeError as error:
            known = list(inspect.signature(thing).parameters)
            near = get_close_matches(next(iter(sorted(set(options) - set(known))), ""), known, 1)
            fix = f"did you mean {near[0]!r}" if near else str(error)
            expected, got = f"those of {spec}: {', '.join(known) or 'none'}", ", ".join(sorted(options))
            raise bad("tier options", expected=expected, got=got, fix=fix, kind=TypeError) from error
        try:
            thing = thing(**options)
        except (Exception, SystemExit) as error:
            if isinstance(error, ImportError) or "Fix:" in str(error):  # says already what to do
                raise
            raise _broken(spec, "that can be made", error) from error
    elif options:
        got = ", ".join(sorted(options))
        raise bad("tier options", expected=f"none for {spec}", got=got, fix="drop them", kind=TypeError)
    missing = [m for m in ("name", "why_not", "prepare", "plan", "attend") if not hasattr(thing, m)]
    if missing:
        fix = "start from tiers/template.py"
        raise bad("tier", expected="a tier", got=f"{spec} without {', '.join(missing)}", fix=fix, kind=TypeError)
    return thing


def _module_from(path: Path) -> ModuleType:
    if not path.is_file():
        raise bad("tier", expected="the path of a Python file", got=str(path), fix="check the path")
    module = ModuleType(f"mla_user_tier_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        SourceFileLoader(module.__name__, str(path)).exec_module(module)
    except (Exception, SystemExit) as error:  # an exit at load would look like a run that went well
        del sys.modules[module.__name__]
        got = f"{path}: {type(error).__name__}: {error}"
        raise bad("tier", expected="a file that can be imported", got=got, fix="mend the file") from error
    return module


def _take(module: ModuleType, spec: str, options: dict[str, Any]) -> Tier:
    if hasattr(module, "tier"):
        return _make(module.tier, spec, options)
    if hasattr(module, "attend"):
        return from_attend(Path(spec).stem, module.attend, getattr(module, "why_not", None))
    expected, fix = "a file that defines `tier` or `attend`", "start from tiers/template.py"
    raise bad("tier", expected=expected, got=f"{spec} with neither", fix=fix)
