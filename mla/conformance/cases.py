"""Cases by name: sizes x batch x dtype x cache layout x input family x slot layout x seed. One list for every use.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch

from mla.cache import CacheLayout, FloatRows
from mla.config import yarn_mscale
from mla.conformance.specs import BatchSpec, spec
from mla.errors import bad
from mla.need import Capacity, Need

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LAYOUTS: dict[str, Callable[[int, int], CacheLayout]] = {
    f"rows_{name}": partial(FloatRows, dtype=dtype) for name, dtype in DTYPES.items()
}
NEEDLES = ("needle", "needle_first", "needle_middle", "needle_last", "needle_end")
FAMILIES = ("randn", "peaked", *NEEDLES, "equal_keys", "large_logits")
SLOTS = ("contiguous", "shuffled", "interleaved", "extended", "shared")
CACHES = ("plain", "layers", "strided", "far")
PLANS = ("fresh", "refilled", "capped")
REPLICAS, MOST_ROUNDINGS = 16, 100_000_000


@dataclass(frozen=True)
class Dims:
    """Head sizes by name: those of a released model where the name is one, as they fall to one rank for small N.

    The softmax scale has V3's YaRN term, so that no scale made from widths alone passes.
    """

    name: str
    N: int
    L: int
    P: int
    R: int
    V: int

    @property
    def softmax_scale(self) -> float:
        """(P+R)^-0.5 (0.1 ln 40 + 1)^2."""
        return (self.P + self.R) ** -0.5 * yarn_mscale(40.0, 1.0) ** 2


TOY = Dims("toy", 3, 32, 12, 8, 10)
DIMS: dict[str, Dims] = {
    d.name: d
    for d in (
        TOY,
        Dims("toy_r0", 4, 24, 10, 0, 14),
        Dims("toy_n1", 1, 40, 12, 4, 10),
        Dims("toy_n8", 8, 28, 12, 6, 10),
        Dims("toy_n12", 12, 28, 8, 6, 10),
        Dims("toy_n32", 32, 24, 12, 6, 10),
        Dims("toy_n63", 63, 24, 16, 6, 10),
        Dims("toy_n128", 128, 24, 16, 6, 10),
        Dims("minicpm3_n5", 5, 256, 64, 32, 64),
        Dims("mistral4_n6", 6, 256, 64, 64, 128),
        Dims("nope_n12", 12, 512, 128, 0, 128),
        Dims("v3_n1", 1, 512, 128, 64, 128),
        Dims("v3_n3", 3, 512, 128, 64, 128),
        Dims("v3_n16", 16, 512, 128, 64, 128),
        Dims("glm_n20", 20, 512, 192, 64, 256),
        Dims("v3_n63", 63, 512, 128, 64, 128),
        Dims("v3_n64", 64, 512, 128, 64, 128),
        Dims("v3_n128", 128, 512, 128, 64, 128),
        Dims("v3_n96", 96, 512, 128, 64, 128),
        Dims("glm_flash_n64", 64, 512, 256, 0, 256),
    )
}


@dataclass(frozen=True)
class Case:
    """One conformance case: everything that its inputs, its reference and its Need follow from.

    `dtype` is the query's by its short name (f32, bf16, f16), `layout` the cache rows' ("" for the same), `page_size` 0
    means the batch's own, `lse` False asks for no LSE. `slots` "shared": full pages of the longest prefix are those of
    the other requests too. `cache`: "plain" is the tier's own; "layers" one layer of an engine's cache, "strided" rows
    that lie apart, both wrapped; "far" a pool longer than 2^31 elements. `plan`: "refilled" was made for a small batch
    and planned again for this one, "capped" for a larger one, of the same capacity. `repeats` more attends must give
    the same bits. Raises ValueError or KeyError for names that do not exist.
    """

    batch: BatchSpec
    dims: Dims = TOY
    dtype: str = "bf16"
    layout: str = ""
    family: str = "randn"
    slots: str = "shuffled"
    page_size: int = 0
    seed: int = 0
    lse: bool = True
    cache: str = "plain"
    plan: str = "fresh"
    repeats: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", self.layout or f"rows_{self.dtype}")
        object.__setattr__(self, "page_size", self.page_size or self.batch.page_size)
        known = {"dtype": tuple(DTYPES), "layout": tuple(LAYOUTS), "family": FAMILIES, "slots": SLOTS}
        known |= {"cache": CACHES, "plan": PLANS}
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                expected = f"one of {', '.join(values)}"
                raise bad(name, expected=expected, got=repr(value), fix="see mla.conformance.cases")

    @property
    def id(self) -> str:
        """Readable name; `find` gives the case back. What is as usual is not named."""
        parts = [self.dims.name, self.batch.name, self.dtype, self.layout, self.family, self.slots]
        unusual = [x for x in (self.cache, self.plan) if x not in ("plain", "fresh")]
        unusual += [f"x{self.repeats}"] * (self.repeats > 0) + ["nolse"] * (not self.lse)
        return "-".join([*parts, f"p{self.page_size}", f"s{self.seed}", *unusual])

    @property
    def random_seed(self) -> int:
        """Seed of the inputs and of the replicas, made from the id: the same on every machine."""
        return zlib.crc32(self.id.encode())

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype of query, weights and new rows."""
        return DTYPES[self.dtype]

    @property
    def cache_layout(self) -> CacheLayout:
        """Layout of the cached rows."""
        return LAYOUTS[self.layout](self.dims.L, self.dims.R)

    @property
    def earlier(self) -> "Case | None":
        """The case whose plan is refilled for this one: a small batch, or one that is longer in every way."""
        if self.plan == "fresh":
            return None
        query_lens: tuple[int, ...] = (2, 1, 5)
        seq_lens: tuple[int, ...] = (9, 20, 5)
        if self.plan == "capped":
            query_lens = (*(q + 1 for q in reversed(self.batch.query_lens)), 3 + self.batch.pad_tokens)
            seq_lens = tuple(
                max(s, q) + 33 for q, s in zip(query_lens, (*reversed(self.batch.seq_lens), 7), strict=True)
            )
        bounds = tuple(s - q + i + 1 for q, s in zip(query_lens, seq_lens, strict=True) for i in range(q))
        mask = self.batch.mask
        batch = BatchSpec("earlier", query_lens, seq_lens, self.page_size, mask, bounds if mask == "rows" else None)
        return replace(self, batch=batch, family="randn", slots="shuffled", cache="plain", plan="fresh", repeats=0)

    def need(self, device: str = "cpu") -> Need:
        """Return what this case asks of a tier."""
        d, before = self.dims, self.earlier
        capacity = None
        if before is not None and self.plan == "capped":
            b = before.batch
            capacity = Capacity(len(b.query_lens), b.num_tokens, max(b.query_lens), max(b.seq_lens), max_splits=4)
        return Need(
            N=d.N, L=d.L, P=d.P, R=d.R, V=d.V, softmax_scale=d.softmax_scale, layout=self.cache_layout,
            page_size=self.page_size, dtype=self.torch_dtype, device=device, lse=self.lse, mask=self.batch.mask,
            capacity=capacity,
        )  # fmt: skip


def find(case_id: str) -> Case:
    """Return the case of an id; raises ValueError where a part of it is unknown."""
    parts = case_id.split("-")
    dims, batch, dtype, layout, family, slots, page, seed, *rest = parts if len(parts) >= 8 else [""] * 8
    if dims in DIMS and page[1:].isdecimal() and seed[1:].isdecimal():
        one = lambda names, usual: next((x for x in rest if x in names), usual)
        repeats = next((int(x[1:]) for x in rest if x[:1] == "x" and x[1:].isdecimal()), 0)
        case = Case(
            spec(batch), DIMS[dims], dtype, layout, family, slots, int(page[1:]), int(seed[1:]), "nolse" not in rest,
            one(CACHES, "plain"), one(PLANS, "fresh"), repeats,
        )  # fmt: skip
        if case.id == case_id:
            return case
    expected = "dims-batch-dtype-layout-family-slots-pPAGE-sSEED[-CACHE][-PLAN][-xREPEATS][-nolse]"
    raise bad("case", expected=expected, got=repr(case_id), fix="copy an id from `mla check`")


def roundings(case: Case, rows: Iterable[int] | None = None, heads: int | None = None) -> int:
    """Return what the budget of some rows (all by default) costs: K S N (P + V + 2 rows) roundings, over requests."""
    d, visible = case.dims, case.batch.visible()
    wanted = set(range(len(visible)) if rows is None else rows)
    starts, total = [0, *accumulate(case.batch.query_lens)], 0
    for start, stop in pairwise(starts):
        mine = [i for i in range(start, stop) if i in wanted]
        S = max((visible[i] for i in mine), default=0)
        total += REPLICAS * S * (d.N if heads is None else heads) * (d.P + d.V + 2 * len(mine))
    return total


def sample_rows(case: Case, most: int = MOST_ROUNDINGS) -> tuple[list[int] | None, list[int] | None]:
    """Return the rows and the heads to compare, None for all: as many as cost at most `most` roundings.

    First and last row of every request and padding, then random rows while they fit; if the first are too many, fewer
    heads but at least 2, the last one among them. Source: docs/explanation/design.md, "When is a result right", rule 9.
    """
    if roundings(case) <= most:
        return None, None
    chance, batch = random.Random(case.random_seed), case.batch
    starts = [0, *accumulate(batch.query_lens)]
    edges = {r for a, b in pairwise(starts) if b > a for r in (a, b - 1)}
    padding = range(starts[-1], batch.num_tokens)
    N, heads = case.dims.N, None
    if roundings(case, edges) > most:
        count = max(2, int(N * most / roundings(case, edges)))
        heads = sorted({N - 1, *chance.sample(range(N - 1), min(count, N) - 1)}) if N > 1 else None
    inner = [r for r in range(starts[-1]) if r not in edges]
    chance.shuffle(inner)
    low, high = 0, len(inner) if heads is None else 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if roundings(case, edges.union(inner[:middle])) <= most else (low, middle - 1)
    return sorted({*edges, *inner[:low], *padding}), heads
