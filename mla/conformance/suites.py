"""Suites: which cases `mla check` runs. `smoke` takes seconds; `full` covers every pair of values of two fields."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, cycle, product

from mla.conformance.cases import DIMS, FAMILIES, NEEDLES, SLOTS, TOY, Case, roundings
from mla.conformance.specs import SPECS
from mla.errors import bad

PAGES = (1, 16, 32, 64, 128)
QUICK = 5_000_000  # roundings
OTHER_ROWS = {"bf16": "rows_f32", "f16": "rows_f32", "f32": "rows_bf16"}
WIDE = (
    "small_decode", "small_prefill", "mixed_small", "edge_mixed_16", "edge_decode_64", "edge_across_128", "one_key",
    "verify_4", "rank_without_keys", "slot_minus_one", "padded_tail", "mixed_prefill_between",
)  # fmt: skip


def suite(name: str) -> list[Case]:
    """Return the cases of suite "smoke" or "full"; raises ValueError for another name."""
    suites = {"smoke": smoke, "full": full}
    if name not in suites:
        raise bad("suite", expected=f"one of {', '.join(suites)}", got=repr(name), fix="start with smoke")
    return suites[name]()


def smoke() -> list[Case]:
    """Return two cases at toy size for every batch of moderate length, one with a needle, one without."""
    plain = [f for f in FAMILIES if f not in NEEDLES]
    cases = []
    for i, s in enumerate(s for s in SPECS.values() if roundings(Case(s)) <= QUICK):
        page = s.page_size if s.edge else PAGES[i % len(PAGES)]
        for j, family in enumerate((NEEDLES[i % len(NEEDLES)], plain[i % len(plain)])):
            dtype = ("bf16", "f16", "f32")[(i + 2 * j) % 3]
            cases.append(Case(s, TOY, dtype, "", family, SLOTS[(i + j) % len(SLOTS)], page))
    return cases


def full(seed: int = 0) -> list[Case]:
    """Return a seeded cover, at most 400 cases, of all pairs of batch, family, size, dtype, layout, slots and page.

    The needle takes its places in turn; one case of eight asks for no LSE. Sizes of released models
    meet the batches in `WIDE`; batches about page edges keep their page.
    """
    fields: dict[str, Sequence] = {
        "batch": list(SPECS.values()),
        "family": ["needle", *(f for f in FAMILIES if f not in NEEDLES)],
        "dims": list(DIMS.values()),
        "dtype": ["bf16", "f16", "f32"],
        "layout": ["own", "other"],
        "slots": list(SLOTS),
        "page_size": list(PAGES),
    }
    places = cycle(NEEDLES)
    cases = []
    for i, row in enumerate(cover(fields, _possible, random.Random(seed))):
        family = next(places) if row["family"] == "needle" else row["family"]
        layout = OTHER_ROWS[row["dtype"]] if row["layout"] == "other" else ""
        cases.append(Case(**{**row, "family": family, "layout": layout}, seed=i, lse=i % 8 != 7))
    return cases


def _possible(row: Mapping) -> bool:
    """Whether the fields chosen so far make a case: an edge batch on its own page, a size meant for the batch."""
    batch, dims, page = row.get("batch"), row.get("dims"), row.get("page_size")
    if batch is None:
        return True
    if page is not None and batch.edge and page != batch.page_size:
        return False
    return dims is None or dims.name.startswith("toy") or batch.name in WIDE


def cover(fields: Mapping[str, Sequence], allowed: Callable[[Mapping], bool], chance: random.Random) -> list[dict]:
    """Return rows with one value per field such that every allowed pair of values of two fields is in some row.

    Greedy: each row starts from a pair not yet covered and takes, field by field, the allowed value that covers most
    new pairs; ties go to chance. `allowed` judges a row that is not complete yet.
    """
    names = list(fields)
    key = lambda a, x, b, y: (a, x, b, y) if names.index(a) < names.index(b) else (b, y, a, x)
    left = {
        (a, x, b, y): None
        for a, b in combinations(names, 2)
        for x, y in product(range(len(fields[a])), range(len(fields[b])))
        if allowed({a: fields[a][x], b: fields[b][y]})
    }
    rows = []
    while left:
        a, x, b, y = next(iter(left))
        chosen = {a: x, b: y}
        for name in sorted(set(names) - {a, b}, key=lambda n: -len(fields[n])):
            values = list(range(len(fields[name])))
            chance.shuffle(values)
            take = lambda v: {n: fields[n][i] for n, i in chosen.items()} | {name: fields[name][v]}  # noqa: B023
            gain = lambda v: sum(key(n, i, name, v) in left for n, i in chosen.items())  # noqa: B023
            chosen[name] = max((v for v in values if allowed(take(v))), key=gain)
        for (m, i), (n, j) in combinations(chosen.items(), 2):
            left.pop(key(m, i, n, j), None)
        rows.append({n: fields[n][chosen[n]] for n in names})
    return rows
