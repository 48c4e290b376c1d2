"""Suites: which cases `mla check` runs. `smoke` takes seconds; `full` covers every pair of values of two fields."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, cycle, product
from typing import Any

from mla.conformance.cases import DIMS, FAMILIES, NEEDLES, PLANS, SLOTS, TOY, Case, roundings
from mla.conformance.inputs import shared_keys
from mla.conformance.specs import FALLING, ORDERS, PAIRS, SPECS, BatchSpec, spec
from mla.errors import bad

PAGES = (1, 8, 16, 32, 64, 128)
DTYPES = ("bf16", "f16", "f32")
CACHES = ("plain", "layers", "strided")
PLAIN = tuple(f for f in FAMILIES if f not in NEEDLES)
QUICK = 8_000_000  # roundings
REPEATS = 50
OTHER_ROWS = {"bf16": "rows_f32", "f16": "rows_f32", "f32": "rows_bf16"}
EVERYWHERE = ("toy", "toy_r0")  # sizes that meet every batch; others meet those in WIDE, many heads those in SHORT
WIDE = (
    "small_decode", "small_prefill", "edge_mixed_16", "edge_decode_64", "edge_across_128", "one_key",
    "verify_4", "query_17", "rank_without_keys", "slot_minus_one", "padded_tail", "mixed_prefill_between",
)  # fmt: skip
SHORT = ("small_decode", "edge_mixed_16", "verify_2", "verify_4", "query_17", "padded_tail")
FEW = "1q1s21_1q3s18"  # a batch for the sizes in smoke
BESIDE = ("toy_n8", "toy_n32")  # sizes of `reaching` alone
REPEATED = ("mixed_small", "verify_4", "edge_lengths_16", "padded_requests")

BY_PAGE: dict[str, dict[int, BatchSpec]] = {}
for _spec in SPECS.values():
    if _spec.edge:
        BY_PAGE.setdefault(_spec.name.rsplit("_", 1)[0], {})[_spec.page_size] = _spec
    else:
        BY_PAGE[_spec.name] = dict.fromkeys(PAGES if any(_spec.seq_lens) else (_spec.page_size,), _spec)


def suite(name: str) -> list[Case]:
    """Return the cases of suite "smoke", "full" or "large"; raises ValueError for another name."""
    from mla.conformance.large import large  # which imports the guards, and they the cases

    suites = {"smoke": smoke, "full": full, "large": large}
    if name not in suites:
        raise bad("suite", expected=f"one of {', '.join(suites)}", got=repr(name), fix="start with smoke")
    return suites[name]()


def smoke() -> list[Case]:
    """Return two cases at toy size for every batch of moderate length, one with a needle, one without, and a few more.

    Those are every order of a mixed batch, every size but the largest with few keys, repeated ones, and those beyond
    the usual ranges.
    """
    cases = []
    for i, s in enumerate(s for s in SPECS.values() if roundings(Case(s)) <= QUICK):
        for j, family in enumerate((NEEDLES[i % len(NEEDLES)], PLAIN[i % len(PLAIN)])):
            cases.append(_turn(s, 2 * i + j, dtype=DTYPES[(i + 2 * j) % 3], family=family))
    sizes = [d for d in DIMS.values() if d.N * d.L < 2**14 and d != TOY and d.name not in BESIDE]
    cases += [
        _turn(spec(FEW), i, dims=d, dtype=DTYPES[i % 2], family=FAMILIES[i % len(FAMILIES)])
        for i, d in enumerate(sizes)
    ]
    return cases + ordered() + repeated() + reaching()


def ordered() -> list[Case]:
    """Return one case for every order of a mixed batch."""
    batches = enumerate(ORDERS.values())
    return [_turn(s, i, family=FAMILIES[i % len(FAMILIES)], slots=SLOTS[i % 2 - 2]) for i, s in batches]


def repeated() -> list[Case]:
    """Return the cases whose result must be the same in bits fifty times."""
    cases = [_turn(SPECS[name], i, family="peaked", repeats=REPEATS) for i, name in enumerate(REPEATED)]
    return [*cases, Case(SPECS["verify_2"], DIMS["v3_n3"], family="needle", repeats=REPEATS)]


def reaching() -> list[Case]:
    """Return the cases beyond the ranges of the others: B, S, T, page, heads, bounds, and pairs of dtypes or masks."""
    halves: dict[str, Any] = {"layout": "rows_f16", "page_size": 100}
    return [
        Case(PAIRS, dtype="f16", family="needle_end", page_size=64),
        Case(spec("1q1s4100"), family="needle_end", page_size=256),
        Case(spec("1q600s600"), dtype="f16", page_size=48),
        Case(FALLING, dtype="f32", lse=False),
        Case(spec("1q1s230_1q3s101"), DIMS["toy_n8"], family="needle_last", **halves),
        Case(spec("1q1s230_1q3s101"), DIMS["toy_n32"], family="peaked", **halves),
        Case(SPECS["full_mask"], DIMS["toy_n12"], "f16"),
    ]


def _turn(s: BatchSpec, i: int, **fields) -> Case:
    """Case number i on a batch: what `fields` leave open takes turns."""
    page = s.page_size if s.edge else PAGES[i % len(PAGES)]
    turns: dict[str, Any] = {"dtype": DTYPES[i % 3], "slots": SLOTS[i % 5], "cache": CACHES[i // 2 % 3]}
    turns |= {"plan": PLANS[i // 3 % 3], "lse": i % 8 != 7}
    case = Case(s, page_size=page, **{**turns, **fields})
    return replace(case, slots="shuffled") if case.slots == "shared" and not any(shared_keys(case)[1]) else case


def full(seed: int = 0) -> list[Case]:
    """Return about 400 cases: a seeded cover of all pairs of two fields, and what `smoke` has beside its batches.

    Fields are batch, family, size, dtype, cached dtype, slots, page, the cache's memory and the plan; a layout around
    a page edge is one batch, made for its pages. The needle takes its places in turn; one case of eight asks for no
    LSE. Sizes of released models meet the batches in `WIDE`, those with 63 heads or more the batches in `SHORT`.
    """
    fields: dict[str, Sequence] = {
        "batch": list(BY_PAGE),
        "family": ["needle", *PLAIN],
        "dims": [d for d in DIMS.values() if d.name not in BESIDE],
        "dtype": list(DTYPES),
        "layout": ["own", "other"],
        "slots": list(SLOTS),
        "page_size": list(PAGES),
        "cache": list(CACHES),
        "plan": list(PLANS),
    }
    places = cycle(NEEDLES)
    cases = []
    for i, row in enumerate(cover(fields, possible, random.Random(seed))):
        family = next(places) if row["family"] == "needle" else row["family"]
        layout = OTHER_ROWS[row["dtype"]] if row["layout"] == "other" else ""
        chosen = {"batch": BY_PAGE[row["batch"]][row["page_size"]], "family": family, "layout": layout}
        cases.append(Case(**{**row, **chosen}, seed=i, lse=i % 8 != 7))
    return cases + ordered() + repeated() + reaching()


def possible(row: Mapping) -> bool:
    """Whether the fields chosen so far make a case: a batch with its page, with a size, with pages that are shared."""
    name, page, dims = row.get("batch"), row.get("page_size"), row.get("dims")
    if name is None:
        return True
    made = BY_PAGE[name] if page is None else {p: s for p, s in BY_PAGE[name].items() if p == page}
    if dims is not None and dims.name not in EVERYWHERE:
        made = {p: s for p, s in made.items() if s.name in (SHORT if dims.N >= 63 else WIDE)}
    if not any(any(s.seq_lens) for s in BY_PAGE[name].values()):  # no keys: neither family nor place matters
        if row.get("family", "randn") != "randn" or row.get("slots", "contiguous") != "contiguous":
            return False
    if row.get("slots") == "shared":
        made = {p: s for p, s in made.items() if any(shared_keys(Case(s, slots="shared", page_size=p))[1])}
    return bool(made)


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
        for name in sorted((n for n in names if n not in (a, b)), key=lambda n: -len(fields[n])):
            values = list(range(len(fields[name])))
            chance.shuffle(values)
            take = lambda v: {n: fields[n][i] for n, i in chosen.items()} | {name: fields[name][v]}  # noqa: B023
            gain = lambda v: sum(key(n, i, name, v) in left for n, i in chosen.items())  # noqa: B023
            chosen[name] = max((v for v in values if allowed(take(v))), key=gain)
        for (m, i), (n, j) in combinations(chosen.items(), 2):
            left.pop(key(m, i, n, j), None)
        rows.append({n: fields[n][chosen[n]] for n in names})
    return rows
