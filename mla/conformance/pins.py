"""A suite for kernels of one size: its cases with some fields the same everywhere."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mla.conformance.cases import CACHES, DIMS, DTYPES, FAMILIES, LAYOUTS, PLANS, SLOTS, Case
from mla.conformance.inputs import shared_keys
from mla.errors import bad

VALUES: dict[str, Iterable[str]] = {
    "dims": DIMS, "dtype": DTYPES, "layout": LAYOUTS, "family": FAMILIES, "slots": SLOTS, "cache": CACHES,
    "plan": PLANS, "page_size": (),
}  # fmt: skip


def parse_pins(texts: Iterable[str]) -> dict[str, Any]:
    """Read texts such as "dims=v3_n16" as fields of a case; raises ValueError naming the field or the value."""
    pins: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in VALUES:
            raise bad("--pin", expected=f"NAME=VALUE of {', '.join(VALUES)}", got=repr(text), fix="dims=v3_n16")
        known = VALUES[name]
        if not (value.isdecimal() and 0 < int(value) <= 1 << 16 if name == "page_size" else value in known):
            expected = "1 .. 65536" if name == "page_size" else f"one of {', '.join(known)}"
            raise bad(f"--pin {name}", expected=expected, got=repr(value), fix="take one of these")
        pins[name] = int(value) if name == "page_size" else DIMS[value] if name == "dims" else value
    return pins


def pinned(cases: Iterable[Case], pins: Mapping[str, Any]) -> list[Case]:
    """Return the cases with the pinned fields, each once.

    Rows of the cache that had the query's dtype keep to it, and requests that would share no page are shuffled.
    """
    if not pins:
        return list(cases)
    made: dict[str, Case] = {}
    for case in cases:
        own = {"layout": ""} if "dtype" in pins and case.layout == f"rows_{case.dtype}" else {}
        new = replace(case, **{**own, **pins})
        if new.slots == "shared" and "slots" not in pins and not any(shared_keys(new)[1]):
            new = replace(new, slots="shuffled")
        made.setdefault(new.id, new)
    return list(made.values())
