"""What could be wrong with the keys that a row sees: mask bounds, the request's end, another request's data.

Axes: S cached tokens, B requests, h sampled heads, n keys that a row sees.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mla.conformance.diagnosis.pages import TILES, at_slots
from mla.conformance.diagnosis.scene import Answer, Array, Hypothesis, Row, Scene, attend

Bound = Callable[[Scene, Row], int]
MOST_REQUESTS = 6


def masks(scene: Scene) -> Iterator[Hypothesis]:
    """Yield wrong bounds of rows: what each sees follows from its place in the query."""
    longest = max((r.query_len for r in scene.rows), default=1)
    bounds: dict[str, Bound] = {
        "rows see every key of their request (no causal mask)": lambda s, r: r.seq_len,
        "the mask is top-left aligned: row i sees keys 0 .. i": lambda s, r: r.token + 1,
        "the mask is top-left aligned and strict: row i sees keys 0 .. i - 1": lambda s, r: r.token,
        "every row sees one key fewer": lambda s, r: r.visible - 1,
        "every row sees one key more, up to the end": lambda s, r: r.visible + 1,
        "every row sees what the first row of its request sees": lambda s, r: r.visible - r.token,
        "the mask runs backwards over the rows": lambda s, r: r.seq_len - r.token,
        "rows see only the keys before this step": lambda s, r: r.seq_len - r.query_len,
        "rows are masked as in a query of the longest length": lambda s, r: r.seq_len - longest + r.token + 1,
        "bounds are rounded up to the page": lambda s, r: -(-r.visible // s.page) * s.page,
        "bounds of the next row are used": lambda s, r: r.visible + (r.token + 1 < r.query_len),
        "row numbers of the batch are used for those of the request": lambda s, r: r.row + 1,
        "... and the context is added": lambda s, r: r.seq_len - r.query_len + r.row + 1,
    }
    if scene.case.batch.mask != "causal":
        bounds["rows are masked as causal"] = lambda s, r: r.seq_len - r.query_len + r.token + 1
    for text, bound in bounds.items():
        yield Hypothesis("mask", text, partial(_first, bound=bound))
    for tile in TILES:
        rounded = partial(_first, bound=partial(_rounded_up, tile=tile))
        yield Hypothesis("mask", f"bounds are rounded up to {tile}", rounded)
    for parts in (1, 2, 3, 4, 5, 6, 8, 16):
        text = "" if parts == 1 else f", and those in each of {parts} splits"
        yield Hypothesis("mask", f"rows see only the keys of this step{text}", partial(_own_chunk, parts=parts))


def _first(scene: Scene, row: Row, bound: Bound) -> Array:
    return scene.scores(row, scene.own(row, bound(scene, row)))


def _rounded_up(scene: Scene, row: Row, tile: int) -> int:
    return -(-row.visible // tile) * tile


def _until(scene: Scene, row: Row, end: Bound) -> int:
    return min(row.visible, end(scene, row))


def _full_tiles(scene: Scene, row: Row, tile: int) -> int:
    return min(row.visible, row.seq_len // tile * tile)


def _end(scene: Scene, row: Row, whole: bool) -> int:
    return row.seq_len if whole else row.visible


def _tile_end(scene: Scene, row: Row, tile: int, whole: bool) -> int:
    return -(-_end(scene, row, whole) // tile) * tile


def _own_chunk(scene: Scene, row: Row, parts: int) -> Array:
    """Keys before this step are not seen; each of `parts` ranges then starts no earlier than this step does."""
    at, context = np.arange(row.visible), row.seq_len - row.query_len
    length = max(1, -(-row.seq_len // parts))
    starts = np.maximum(np.arange(parts) * length, context)[:, None]
    times = ((at >= starts) & (at < starts + length)).sum(0)
    return scene.scores(row, scene.own(row)) + np.log(times)


def tails(scene: Scene) -> Iterator[Hypothesis]:
    """Yield faults at the end of a request: keys cut off there, or what lies behind them read as keys."""
    p = scene.page
    ends: dict[str, Bound] = {
        "the last key of the request is lost": lambda s, r: r.seq_len - 1,
        "the last two keys of the request are lost": lambda s, r: r.seq_len - 2,
        "the last, partial page of the request is lost": lambda s, r: r.seq_len // p * p,
        "the request's last key is lost where its last page is partial": lambda s, r: r.seq_len - (r.seq_len % p > 0),
    }
    for text, end in ends.items():
        yield Hypothesis("tail", text, partial(_first, bound=partial(_until, end=end)), -0.01)
    for tile in TILES:
        cut = partial(_first, bound=partial(_full_tiles, tile=tile))
        yield Hypothesis("tail", f"keys behind the last full tile of {tile} are lost", cut, 0.03)
    partial_page = lambda s, r: r.visible // p * p
    yield Hypothesis("tail", "keys behind a row's last full page are lost", partial(_first, bound=partial_page))
    for tile in (p, *TILES):
        zeros = partial(_padding, tile=tile, copies=False)
        yield Hypothesis("tail", f"padding of the last tile ({tile}) counts as keys of score 0", zeros)
        again = partial(_padding, tile=tile, copies=True)
        yield Hypothesis("tail", f"the last tile ({tile}) is filled up with copies of the last key", again)
        for who, whole in (("request", True), ("row", False)):
            past = partial(_past_end, bound=partial(_tile_end, tile=tile, whole=whole), end=partial(_end, whole=whole))
            yield Hypothesis("tail", f"the last tile ({tile}) is read to its end, past the {who}'s keys", past, 0.02)
    for more in (1, 2):
        past = partial(_past_end, bound=partial(_beyond, more=more), end=partial(_end, whole=True))
        what = "1 key past the end of the request is" if more == 1 else f"{more} keys past the end of the request are"
        yield Hypothesis("tail", f"{what} read", past)
    yield Hypothesis("tail", "the last key is read twice", _repeat_last)
    yield Hypothesis("tail", "one key of score 0 is counted past the end", _one_zero)


def _beyond(scene: Scene, row: Row, more: int) -> int:
    return row.seq_len + more


def _padding(scene: Scene, row: Row, tile: int, copies: bool) -> Answer | None:
    count = -row.visible % tile
    if not count:
        return row.right
    own = scene.own(row)
    kv_c, scores = scene.keys(own)[0], scene.scores(row, own)
    more = [np.repeat(scores[:, -1:], count, 1), np.repeat(kv_c[-1:], count, 0)]
    more = more if copies else [0 * x for x in more]
    return attend(np.concatenate([scores, more[0]], 1), np.concatenate([kv_c, more[1]]), scene.W_UV_h)


def _one_zero(scene: Scene, row: Row) -> Answer:
    own = scene.own(row)
    kv_c, scores = scene.keys(own)[0], scene.scores(row, own)
    return attend(
        np.concatenate([scores, np.zeros_like(scores[:, :1])], 1), np.concatenate([kv_c, 0 * kv_c[:1]]), scene.W_UV_h
    )


def _repeat_last(scene: Scene, row: Row) -> Answer:
    own = list(range(*scene.own(row).indices(len(scene.kv_c))))
    last = scene.own(row, row.seq_len).stop - 1
    return scene.attend(row, np.array(own + [last] * (last in own)))


def _past_end(scene: Scene, row: Row, bound: Bound, end: Bound) -> Answer | None:
    """Rows that see the end read on, up to `bound` keys: in the pages of the request, which hold poison there."""
    if row.visible < end(scene, row):
        return row.right
    at = np.arange(bound(scene, row))
    pages = -(-row.seq_len // scene.page)
    if len(at) and int(at[-1]) // scene.page >= pages:
        at = at.clip(max=max(pages * scene.page - 1, 0))
    return scene.attend(row, at_slots(scene, row.request, at))


def batches(scene: Scene) -> Iterator[Hypothesis]:
    """Yield mix-ups between requests: another's keys, table, length or row."""
    B = len(scene.starts) - 1
    relative = {"the next": lambda b: b + 1, "the previous": lambda b: b - 1, "the first": lambda b: 0}
    relative |= {"the last": lambda b: B - 1}
    for name, other in relative.items():
        yield Hypothesis("batch", f"a request reads the keys of {name} request", partial(_other_keys, other=other))
        yield Hypothesis(
            "batch", f"a request reads through the table of {name} request", partial(_other_table, other=other)
        )
        yield Hypothesis(
            "batch", f"a request has the length of {name} request", partial(_other_length, other=other), 0.03
        )
    extremes: dict[str, Callable[[list[int]], int]] = {"longest": max, "shortest": min}
    for name, pick in extremes.items():
        yield Hypothesis(
            "batch", f"a request has the length of the {name} one", partial(_extreme_length, pick=pick), 0.03
        )
    pad = scene.case.batch.pad_tokens
    for shift in (pad, -pad) if pad > 1 else ():
        yield Hypothesis("batch", f"rows are moved by the padding, {shift}", partial(_other_row, shift=shift))
    for shift, name in ((1, "next"), (-1, "previous")):
        yield Hypothesis("batch", f"a row has the query of the {name} row", partial(_other_query, shift=shift))
        yield Hypothesis("batch", f"a row has the result of the {name} row", partial(_other_row, shift=shift))
    for b in range(min(B, MOST_REQUESTS)):
        theirs = partial(_keys_of, b=b)
        yield Hypothesis("batch", f"keys of request {b} are read by another one", theirs, 0.03)
    if B > 1:
        yield Hypothesis("batch", "rows also see the keys of the next request", _spill, 0.0)


def _lengths(scene: Scene) -> list[int]:
    return [b - a for a, b in zip(scene.starts, scene.starts[1:], strict=False)]


def _inside(scene: Scene, b: int) -> int | None:
    return b if 0 <= b < len(scene.starts) - 1 else None


def _other_keys(scene: Scene, row: Row, other: Callable[[int], int]) -> Answer:
    b = _inside(scene, other(row.request))
    return row.right if b is None else _keys_of(scene, row, b)


def _keys_of(scene: Scene, row: Row, b: int) -> Answer:
    if b == row.request:
        return row.right
    start, length = scene.starts[b], _lengths(scene)[b]
    return scene.attend(row, slice(start, start + min(row.visible, length)))


def _other_table(scene: Scene, row: Row, other: Callable[[int], int]) -> Answer | None:
    b = _inside(scene, other(row.request))
    if b is None or b == row.request:
        return row.right
    return scene.attend(row, at_slots(scene, b, np.arange(row.visible)))


def _other_length(scene: Scene, row: Row, other: Callable[[int], int]) -> Answer | Array:
    b = _inside(scene, other(row.request))
    return row.right if b is None else _with_length(scene, row, _lengths(scene)[b])


def _extreme_length(scene: Scene, row: Row, pick: Callable[[list[int]], int]) -> Array:
    return _with_length(scene, row, pick([s for s in _lengths(scene) if s] or [0]))


def _with_length(scene: Scene, row: Row, S: int) -> Array:
    """A row of a request that is taken to have S keys, and the same distance from its end or the same bound."""
    return scene.scores(row, scene.own(row, min(row.visible, S)))


def _other_query(scene: Scene, row: Row, shift: int) -> Answer | Array:
    r = row.row + shift
    if not 0 <= r < len(scene.q.nope):
        return row.right
    q_latent, q_pe = scene.query(r)
    own = scene.own(row)
    kv_c, k_pe = scene.keys(own)
    return scene.scale * (q_latent @ kv_c.T + q_pe @ k_pe.T)


def _other_row(scene: Scene, row: Row, shift: int) -> Answer:
    return scene.result((row.row + shift) % scene.case.batch.num_tokens)


def _spill(scene: Scene, row: Row) -> Answer | None:
    b = row.request + 1
    if b >= len(scene.starts) - 1:
        return row.right
    own = scene.own(row)
    both = [*range(own.start, own.stop), *range(scene.starts[b], scene.starts[b + 1])]
    return scene.attend(row, np.array(both))
