"""What could be wrong where parts of the keys come together: in the running softmax, in the combination of splits.

Axes: h sampled heads, n keys that a row sees, G splits of the keys, C tiles of a split, V value. With m the largest
score of a tile, l its sum of exp(score - m), o its own softmax average, a tile's result is (m + ln l, o).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from mla.conformance.diagnosis.pages import TILES
from mla.conformance.diagnosis.scene import NEG_INF, Answer, Array, Hypothesis, Row, Scene, logsumexp

SPLITS = (2, 3, 4, 5, 6, 8, 16)
LN2 = 0.6931471805599453


@dataclass(frozen=True)
class Cut:
    """A way to cut keys: `splits` ranges (0: one range of all) of tiles of `tile` keys (0: one tile a range).

    Ranges are equal parts of the request's keys ("seq"), of the row's ("row"), or whole pages ("pages").
    """

    splits: int
    tile: int
    of: str = "seq"

    def __str__(self) -> str:
        parts = ([f"{self.splits} splits"] if self.splits else []) + ([f"tiles of {self.tile}"] if self.tile else [])
        return " of ".join(parts[::-1])

    def length(self, scene: Scene, row: Row) -> int:
        """Keys of a range."""
        if not self.splits:
            return max(row.visible, 1)
        if self.of == "pages":
            return max(1, math.ceil(math.ceil(row.seq_len / scene.page) / self.splits)) * scene.page
        return max(1, -(-(row.seq_len if self.of == "seq" else row.visible) // self.splits))

    def places(self, scene: Scene, row: Row) -> tuple[Array, Array, int, int]:
        """Return split and tile of each key (n,), (n,), and how many of both there are."""
        at, length = np.arange(row.visible), self.length(scene, row)
        split, inside = at // length, at % length
        tile = inside // self.tile if self.tile else 0 * inside
        return split, tile, int(split.max()) + 1, int(tile.max()) + 1


@dataclass(frozen=True, eq=False)
class Parts:
    """The tiles of one row: m, l (h, G, C), o (h, G, C, V); those without keys have m = -inf, l = 0, o = 0."""

    m: Array
    l: Array  # noqa: E741
    o: Array

    @cached_property
    def log_l(self) -> Array:
        """ln l (h, G, C)."""
        return np.log(self.l)

    @cached_property
    def lse(self) -> Array:
        """ln of the sum of exp(score) of each tile (h, G, C)."""
        return self.m + self.log_l

    @cached_property
    def M(self) -> Array:
        """The running maximum within each split (h, G, C)."""
        return np.maximum.accumulate(self.m, -1)

    @cached_property
    def total(self) -> Array:
        """The right LSE (h,)."""
        return logsumexp(flat(self.lse))


def flat(x: Array) -> Array:
    """Return (h, G, C) as (h, G C)."""
    return x.reshape(len(x), -1)


def cut_row(scene: Scene, row: Row, cut: Cut) -> Parts | None:
    """Return the tiles of a row, None for a row without keys."""
    return scene.keep(("cut", row.row, cut), lambda: _cut_row(scene, row, cut))


def _cut_row(scene: Scene, row: Row, cut: Cut) -> Parts | None:
    if row.visible == 0:
        return None
    split, tile, G, C = cut.places(scene, row)
    own = scene.own(row)
    at = split * C + tile
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    sizes = np.diff(starts, append=len(at))
    scores = scene.scores(row, own)
    v = scene.keep(("v", row.row), lambda: np.matmul(scene.keys(own)[0], scene.W_UV_h.transpose(1, 0, 2)))  # (h, n, V)
    m = np.maximum.reduceat(scores, starts, axis=1)
    p = np.exp(scores - np.repeat(m, sizes, axis=1))
    l = np.add.reduceat(p, starts, axis=1)  # noqa: E741
    o = np.add.reduceat(p[..., None] * v, starts, axis=1) / l[..., None]
    spread = lambda x, empty: _spread(x, at[starts], G * C, empty).reshape(len(x), G, C, *x.shape[2:])
    return Parts(spread(m, NEG_INF), spread(l, 0.0), spread(o, 0.0))


def _spread(x: Array, at: Array, size: int, empty: float) -> Array:
    whole = np.full((len(x), size, *x.shape[2:]), empty)
    whole[:, at] = x
    return whole


def merges(scene: Scene) -> Iterator[Hypothesis]:
    """Yield faults of rescaling: in the running softmax of tiles, and in the combination of splits."""
    tiles = sorted({scene.page, *TILES})
    inner = [Cut(s, t) for s in (0, *SPLITS) for t in tiles if 1 < t < max((r.visible for r in scene.rows), default=0)]
    outer = [Cut(s, 0, of) for of in ("seq", "row", "pages") for s in SPLITS] + [Cut(0, t) for t in tiles]
    for cut in outer:
        for text, rule in COMBINE.items():
            yield Hypothesis("merge", f"{text} ({cut})", partial(_merged, cut=cut, rule=rule), 0.02)
    for cut in inner:
        for text, rule in RUNNING.items():
            cost = 0.04 if cut.splits else 0.02
            yield Hypothesis("merge", f"{text} ({cut})", partial(_merged, cut=cut, rule=rule), cost)
    yield Hypothesis("merge", "the output is not divided by the sum of weights", _undivided)


Rule = Callable[[Parts], tuple[Array, Array, Array | None]]


def _merged(scene: Scene, row: Row, cut: Cut, rule: Rule) -> Answer | None:
    """Weigh tiles by a rule that gives ln of their weights in the output and in the sum (h, G, C), and perhaps the LSE.

    out = sum of exp(w) o / sum of exp(z); lse = ln of the sum of exp(z).
    """
    parts = cut_row(scene, row, cut)
    if parts is None:
        return row.right
    w, z, lse = rule(parts)
    total = logsumexp(flat(z))
    share = np.exp(flat(w) - total[:, None])
    share[np.isnan(share)] = 0.0
    out = np.matmul(share[:, None], parts.o.reshape(len(share), -1, parts.o.shape[-1]))[:, 0]
    return Answer(out, total if lse is None else lse)


def _mean(p: Parts) -> tuple[Array, Array, Array]:
    even = np.where(p.l > 0, 0.0, NEG_INF)
    return even, even, p.total


def _mean_of_both(p: Parts) -> tuple[Array, Array, Array]:
    w, z, _ = _mean(p)
    some = p.l > 0
    return w, z, np.where(some, p.lse, 0.0).sum((1, 2)) / some.sum((1, 2))


def _sum(p: Parts) -> tuple[Array, Array, Array]:
    return np.where(p.l > 0, p.total[:, None, None], NEG_INF), p.lse, p.total


def _base(factor: float, back: float | None = None) -> Rule:
    def rule(p: Parts) -> tuple[Array, Array, Array | None]:
        z = np.where(p.l > 0, p.lse * factor, NEG_INF)
        return z, z, logsumexp(flat(z)) / (back or factor)

    return rule


def _base_kept(factor: float) -> Rule:
    """Shares in another base around the largest LSE, which is added back as it is."""

    def rule(p: Parts) -> tuple[Array, Array, Array | None]:
        top = p.lse.max((1, 2), keepdims=True)
        z = np.where(p.l > 0, top + (p.lse - top) * factor, NEG_INF)
        return z, z, None

    return rule


def _largest_lse(p: Parts) -> tuple[Array, Array, Array]:
    return p.lse, p.lse, p.lse.max((1, 2))


COMBINE: dict[str, Rule] = {
    "partial results are averaged without weights": _mean,
    "partial results and LSEs are averaged without weights": _mean_of_both,
    "partial results are added without weights": _sum,
    "natural LSEs are combined as base 2": _base(LN2),
    "base-2 weights around the largest LSE": _base_kept(LN2),
    "LSEs are combined as if they had been base 2": _base(1 / LN2),
    "weights of partial results are e^(lse log2 e)": _base_kept(1 / LN2),
    "partial results are weighed by their maximum alone": lambda p: (p.m, p.m, None),
    "partial results are weighed by their sums, without the maxima": lambda p: (p.log_l, p.log_l, None),
    "... and the largest maximum is added to the LSE": lambda p: (
        p.log_l + p.m.max((1, 2), keepdims=True),
        p.log_l + p.m.max((1, 2), keepdims=True),
        None,
    ),
    "partial results are combined before they are divided by their sums": lambda p: (p.lse + p.log_l, p.lse, None),
    "base-2 LSEs are combined as natural ones": _base(1 / LN2, back=1.0),
    "natural LSEs are combined as base 2 and stay so": _base(LN2, back=1.0),
    "the output is combined, the LSE is the largest": _largest_lse,
}


def _running(out: Callable[[Parts], Array], total: Callable[[Parts], Array]) -> Rule:
    """Weights of tiles in the output and in the sum, each after its own rescaling, in terms of the split's maximum."""
    return lambda p: (out(p) + p.M[..., -1:], total(p) + p.M[..., -1:], None)


def _right(p: Parts) -> Array:
    return p.lse - p.M[..., -1:]


def _kept(p: Parts) -> Array:
    """No rescaling: what a tile added stays, relative to the maximum of its time."""
    return p.lse - p.M


def _shrunk(factor: float, shift: int = 0) -> Callable[[Parts], Array]:
    """Rescaling by exp(factor (old maximum - new one)) at each tile after one's own."""
    return lambda p: p.lse - p.M + factor * (p.M - p.M[..., -1:])


def _own_maximum(p: Parts) -> Array:
    return p.log_l


def _last_only(p: Parts) -> Array:
    z = np.full_like(p.lse, NEG_INF)
    last = (p.l > 0).sum(-1, keepdims=True).clip(min=1) - 1
    np.put_along_axis(z, last, np.take_along_axis(_right(p), last, -1), -1)
    return z


RUNNING: dict[str, Rule] = {
    "neither sum nor output is rescaled when the maximum grows": _running(_kept, _kept),
    "the output is not rescaled when the maximum grows": _running(_kept, _right),
    "the sum is not rescaled when the maximum grows": _running(_right, _kept),
    "rescaling is inverted": _running(_shrunk(-1.0), _shrunk(-1.0)),
    "rescaling of the output is inverted": _running(_shrunk(-1.0), _right),
    "rescaling of the sum is inverted": _running(_right, _shrunk(-1.0)),
    "rescaling takes exp2 for exp": _running(_shrunk(LN2), _shrunk(LN2)),
    "rescaling of the output takes exp2 for exp": _running(_shrunk(LN2), _right),
    "rescaling of the sum takes exp2 for exp": _running(_right, _shrunk(LN2)),
    "rescaling has log2 e once too often": _running(_shrunk(1 / LN2), _shrunk(1 / LN2)),
    "weights are relative to the tile's own maximum": _running(_own_maximum, _own_maximum),
    "rescaling is done twice": _running(_shrunk(2.0), _shrunk(2.0)),
    "rescaling of the output is done twice": _running(_shrunk(2.0), _right),
    "rescaling forgets earlier tiles": _running(_last_only, _last_only),
    "the output forgets earlier tiles": _running(_last_only, _right),
    "the sum forgets earlier tiles": _running(_right, _last_only),
}


def _undivided(scene: Scene, row: Row) -> Answer:
    scores = scene.scores(row, scene.own(row))
    total = np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)
    return Answer(row.right.out * total[:, None], row.right.lse)
