"""What could be wrong where the keys are cut: at borders of splits and tiles, in splits without keys, left-overs.

Axes: h sampled heads, n keys that a row sees.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from mla.conformance.diagnosis.merge import SPLITS, Cut
from mla.conformance.diagnosis.pages import TILES
from mla.conformance.diagnosis.scene import NEG_INF, Answer, Array, Hypothesis, Row, Scene, attend


def splits(scene: Scene) -> Iterator[Hypothesis]:
    """Yield faults of split borders: keys lost or read twice there, splits lost, partial results of other rows."""
    whole = [Cut(s, 0, of) for of in ("seq", "row", "pages") for s in SPLITS]
    for cut in whole:
        for text, count in COUNTS.items():
            yield Hypothesis("split", f"{text} ({cut})", partial(_counted, cut=cut, count=count), 0.02)
        yield Hypothesis("split", f"splits of the row before are left over ({cut})", partial(_stale, cut=cut), 0.02)
        for text, seen in (("keys", lambda r: r.seq_len), ("visible keys", lambda r: r.visible)):
            zeros = partial(_empty_splits, cut=cut, seen=seen)
            yield Hypothesis("split", f"splits without {text} count as (0, 0) ({cut})", zeros, 0.02)
        nan = partial(_nan_splits, cut=cut)
        yield Hypothesis("split", f"splits without keys make the result NaN ({cut})", nan, 0.02)
    for s in SPLITS:
        rest = partial(_counted, cut=None, count=lambda r, at, s=s: at < r.seq_len // s * s)
        yield Hypothesis("split", f"keys behind {s} equal splits, rounded down, are lost", rest, 0.01)
    tiles = [t for t in TILES if t < max((r.visible for r in scene.rows), default=0)]
    for cut in [Cut(s, t) for s in (0, *SPLITS) for t in tiles]:
        for text, count in AT_TILES.items():
            yield Hypothesis("split", f"{text} ({cut})", partial(_counted, cut=cut, count=count), 0.03)
        for hidden in (False, True) if cut.splits else ():
            kind, whose = ("tail", "a tile's last key") if hidden else ("split", "a split's end that a row could see")
            lanes = partial(_lanes, cut=cut, hidden=hidden)
            yield Hypothesis(kind, f"lanes behind {whose} count with score 0 ({cut})", lanes, 0.02)


class Borders(NamedTuple):
    """Of each key (n,): its split, its place there, its tile's length and the last split of the request."""

    split: Array
    inside: Array
    length: int
    tile: int
    last: int


Times = Callable[[Borders, Array, Row], Array]
COUNTS: dict[str, Times] = {
    "the first key of every split but the first is lost": lambda b, at, r: (b.inside > 0) | (at == 0),
    "the first key of every split is lost": lambda b, at, r: b.inside > 0,
    "the last key of every split is lost": lambda b, at, r: (b.inside != b.length - 1) & (at != r.seq_len - 1),
    "the last key of every split but the last is lost": lambda b, at, r: b.inside != b.length - 1,
    "the first key of every later split is read twice": lambda b, at, r: 1 + ((b.inside == 0) & (at > 0)),
    "the last key of every split is read twice": lambda b, at, r: 1 + (b.inside == b.length - 1),
    "the first split is lost": lambda b, at, r: b.split > 0,
    "the second split is lost": lambda b, at, r: b.split != 1,
    "the last split is lost": lambda b, at, r: b.split != b.last,
    "the last split is read twice": lambda b, at, r: 1 + (b.split == b.last),
    "the first split is read twice": lambda b, at, r: 1 + (b.split == 0),
    "only the first split is read": lambda b, at, r: b.split == 0,
    "only the last split is read": lambda b, at, r: b.split == b.last,
}
AT_TILES: dict[str, Times] = {
    "the first key of every tile is lost": lambda b, at, r: b.inside % b.tile > 0,
    "the last key of every tile is lost": lambda b, at, r: b.inside % b.tile < b.tile - 1,
    "the first key of every later tile is read twice": lambda b, at, r: 1 + ((b.inside % b.tile == 0) & (b.inside > 0)),
    "tiles overlap by one key": lambda b, at, r: 1 + ((b.inside % (b.tile - 1) == 0) & (b.inside > 0)),
    "a key between two tiles is lost": lambda b, at, r: b.inside % (b.tile + 1) < b.tile,
    "partial tiles of a split are lost": lambda b, at, r: b.inside < (_size(b, r) // b.tile * b.tile),
    "only the first tile of a split is read": lambda b, at, r: b.inside < b.tile,
}


def _size(b: Borders, row: Row) -> Array:
    """Keys of each key's split (n,)."""
    return np.minimum(b.length, row.seq_len - b.split * b.length)


def _counted(scene: Scene, row: Row, cut: Cut | None, count: Callable) -> Array:
    """Scores of keys that are read count times (n,)."""
    at = np.arange(row.visible)
    if cut is None:
        times = count(row, at)
    else:
        length = cut.length(scene, row)
        times = count(Borders(at // length, at % length, length, cut.tile, (row.seq_len - 1) // length), at, row)
    return scene.scores(row, scene.own(row)) + np.log(times)


def _stale(scene: Scene, row: Row, cut: Cut) -> Answer:
    """Partial results of the row before, of splits that this row does not fill, are combined with its own."""
    r, own = row.row - 1, scene.own(row)
    if r < 0:
        return row.right
    filled = -(-row.visible // cut.length(scene, row))
    q_latent, q_pe = scene.query(r)
    start = scene.starts[scene.owners[r]]
    other = max(1, -(-scene.case.batch.seq_lens[scene.owners[r]] // cut.splits))
    kv_c, k_pe = scene.keys(slice(start + filled * other, start + scene.bounds[r]))
    scores = scene.scale * (q_latent @ kv_c.T + q_pe @ k_pe.T)
    both = np.concatenate([scene.scores(row, own), scores], 1)
    return attend(both, np.concatenate([scene.keys(own)[0], kv_c]), scene.W_UV_h)


def _empty_splits(scene: Scene, row: Row, cut: Cut, seen: Callable[[Row], int]) -> Answer:
    return zero_keys(row, cut.splits - -(-seen(row) // cut.length(scene, row)))


def _nan_splits(scene: Scene, row: Row, cut: Cut) -> Answer:
    empty = cut.splits > -(-row.seq_len // cut.length(scene, row))
    nan = np.nan if empty else 0.0
    return Answer(row.right.out + nan, row.right.lse + nan)


def _lanes(scene: Scene, row: Row, cut: Cut, hidden: bool) -> Answer:
    length = cut.length(scene, row)
    starts = np.arange(0, row.seq_len, length)
    stops = np.minimum(starts + length, row.seq_len)
    ends = starts + -(-(stops - starts) // cut.tile) * cut.tile
    if not hidden:
        ends, stops = np.minimum(ends, row.visible), np.minimum(stops, row.visible)
    return zero_keys(row, int((ends - stops).sum()))


def zero_keys(row: Row, count: int) -> Answer:
    """The right answer of a row with `count` more keys, of score 0 and value 0."""
    if count <= 0:
        return row.right
    lse = np.logaddexp(row.right.lse, np.log(count))
    return Answer(row.right.out * np.exp(row.right.lse - lse)[:, None], lse)


def empties(scene: Scene) -> Iterator[Hypothesis]:
    """Yield what happens to rows that see no key of some part, and to batches with requests that have none."""
    tiles = [t for t in TILES if t < max((r.seq_len for r in scene.rows), default=0)]
    cuts = [Cut(s, 0) for s in SPLITS] + [Cut(s, t) for s in (0, *SPLITS) for t in tiles]
    for cut in cuts:
        for text, both in (("", True), (" in the output", False)):
            says = f"parts in which a row sees no key are NaN{text} ({cut})"
            yield Hypothesis("empty", says, partial(_nan_parts, cut=cut, both=both), 0.02)
    idle = sum(s == 0 for s in scene.case.batch.seq_lens)
    if idle:
        text = "requests are served up to the number of those with keys"
        yield Hypothesis("empty", text, partial(_not_served, last=len(scene.starts) - 1 - idle))
    yield Hypothesis("batch", "the last request is not served", partial(_not_served, last=len(scene.starts) - 2))


def _nan_parts(scene: Scene, row: Row, cut: Cut, both: bool) -> Answer:
    length = cut.length(scene, row) if cut.splits else max(row.seq_len, 1)
    starts = np.arange(0, row.seq_len, length)
    if cut.tile:
        starts = np.concatenate([np.arange(s, min(s + length, row.seq_len), cut.tile) for s in starts.tolist()])
    nan = np.where((starts >= row.visible).any(), np.nan, 0.0)
    return Answer(row.right.out + nan, row.right.lse + (nan if both else 0.0))


def _not_served(scene: Scene, row: Row, last: int) -> Answer:
    if row.request < last:
        return row.right
    return Answer(0 * row.right.out, np.full_like(row.right.lse, NEG_INF))
