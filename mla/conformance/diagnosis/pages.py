"""What could be wrong in the block table: which page is read, where in it, pages lost and read twice.

Axes: S cached tokens, L KV rank, h sampled heads, n keys that a row sees. A slot is page * page_size + position in it.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mla.conformance.diagnosis.scene import Answer, Array, Hypothesis, Row, Scene, attend

TILES = (8, 16, 24, 32, 48, 64, 96, 128, 256)
PAGE_SIZES = (1, 8, 16, 32, 64, 128)
MOST_PAGES, MOST_SLOTS = 6, 1 << 14


def at_slots(scene: Scene, request: int, at: Array) -> Array:
    """Return the pool's keys (n,) that lie where a request's table puts positions at (n,)."""
    page = scene.page
    return read_slots(scene, scene.table[request, at // page] * page + at % page)


def read_slots(scene: Scene, slots: Array) -> Array:
    """Return the pool's keys (n,) in slots (n,), the poison where a slot is outside the cache."""
    size = len(scene.slot_key)
    inside = (slots >= 0) & (slots < size)
    return np.where(inside, scene.slot_key[slots.clip(0, size - 1)], len(scene.kv_c) - 1)


def pages(scene: Scene) -> Iterator[Hypothesis]:
    """Yield faults of the block table: which page, where in it, pages lost and read twice."""
    p = scene.page
    last = lambda r: (r.seq_len - 1) // p
    at_page: dict[str, Callable[[Array, Row], Array]] = {
        "the page index is one too high": lambda j, r: (j + 1).clip(max=last(r)),
        "the page index is one too high and wraps": lambda j, r: (j + 1) % (last(r) + 1),
        "the page index is one too low": lambda j, r: (j - 1).clip(min=0),
        "the page index is one too low and wraps": lambda j, r: (j - 1) % (last(r) + 1),
        "every page is the first one": lambda j, r: 0 * j,
        "every page is the last one": lambda j, r: 0 * j + last(r),
        "pages are read in reverse": lambda j, r: last(r) - j,
        "pages are swapped in pairs": lambda j, r: (j ^ 1).clip(max=last(r)),
        "the last page is read from the one before": lambda j, r: np.where(j == last(r), (j - 1).clip(min=0), j),
        "the second page is the first one again": lambda j, r: np.where(j == 1, 0, j),
    }
    for text, change in at_page.items():
        yield Hypothesis("page", text, partial(_paged, page=change))
    offsets: dict[str, Callable[[Array], Array]] = {
        "the position in the page is one too high": lambda i: (i + 1).clip(max=p - 1),
        "the position in the page is one too high and wraps": lambda i: (i + 1) % p,
        "the position in the page is one too low": lambda i: (i - 1).clip(min=0),
        "the position in the page is one too low and wraps": lambda i: (i - 1) % p,
        "pages are read backwards": lambda i: p - 1 - i,
        "the position in the page is always 0": lambda i: 0 * i,
        "the last row of a page is read from the one before": lambda i: i.clip(max=max(p - 2, 0)),
    }
    for text, move in offsets.items():
        yield Hypothesis("page", text, partial(_paged, offset=move))
    yield Hypothesis("page", "the block table is ignored: keys lie in the first slots", partial(_flat, first=False))
    yield Hypothesis("page", "only the first page is looked up, the rest follow it", partial(_flat, first=True))
    yield Hypothesis("page", "page ids are one too high", partial(_shifted_ids, by=1))
    yield Hypothesis("page", "page ids are one too low", partial(_shifted_ids, by=-1))
    for size in PAGE_SIZES:
        if size != p:
            yield Hypothesis(
                "page", f"pages are taken for {size} rows long", partial(_other_size, size=size, inner=size)
            )
            yield Hypothesis(
                "page", f"page numbers are counted in {size} rows", partial(_other_size, size=size, inner=p)
            )
            within = partial(_paged, offset=lambda i, n=size: i % n)
            yield Hypothesis("page", f"positions in a page are counted in {size} rows", within)
    for tile in TILES:
        says = f"the page is that of the first key of a tile of {tile}"
        yield Hypothesis("page", says, partial(_tile_page, tile=tile))
    yield Hypothesis("page", "rows are taken to lie L apart", partial(_stride, width=scene.case.dims.L))
    yield from _lost_pages(scene)


def _paged(scene: Scene, row: Row, page=None, offset=None) -> Answer:
    at = np.arange(row.visible)
    j, i = at // scene.page, at % scene.page
    j, i = page(j, row) if page else j, offset(i) if offset else i
    return scene.attend(row, read_slots(scene, scene.table[row.request, j] * scene.page + i))


def _tile_page(scene: Scene, row: Row, tile: int) -> Answer:
    at = np.arange(row.visible)
    j = at // tile * tile // scene.page
    return scene.attend(row, read_slots(scene, scene.table[row.request, j] * scene.page + at % scene.page))


def _stride(scene: Scene, row: Row, width: int) -> Answer | None:
    """Rows of a cache that is one piece, found at slot * width elements, which cuts them in two."""
    if len(scene.slot_key) > MOST_SLOTS:
        return None
    whole = scene.keep("cache", lambda: np.concatenate(scene.keys(scene.slot_key), -1).reshape(-1))
    at = np.arange(row.visible)
    slots = scene.table[row.request, at // scene.page] * scene.page + at % scene.page
    L = scene.case.dims.L
    rows = whole[(slots * width)[:, None] + np.arange(L + scene.case.dims.R)]
    return attend(scene.scale * (row.q_latent @ rows[:, :L].T + row.q_pe @ rows[:, L:].T), rows[:, :L], scene.W_UV_h)


def _flat(scene: Scene, row: Row, first: bool) -> Answer:
    start = int(scene.table[row.request, 0]) * scene.page if first else 0
    return scene.attend(row, read_slots(scene, start + np.arange(row.visible)))


def _shifted_ids(scene: Scene, row: Row, by: int) -> Answer:
    at = np.arange(row.visible)
    return scene.attend(
        row, read_slots(scene, (scene.table[row.request, at // scene.page] + by) * scene.page + at % scene.page)
    )


def _other_size(scene: Scene, row: Row, size: int, inner: int) -> Answer | None:
    at = np.arange(row.visible)
    j = at // size
    if row.visible and int(j[-1]) >= scene.table.shape[1]:
        return None
    return scene.attend(row, read_slots(scene, scene.table[row.request, j] * inner + at % inner))


def _lost_pages(scene: Scene) -> Iterator[Hypothesis]:
    p = scene.page
    keep: dict[str, Callable[[Array, Row], Array]] = {
        "the first page is lost": lambda at, r: at >= p,
        "the first key of the request is lost": lambda at, r: at > 0,
        "the last key of every page is lost": lambda at, r: at % p != p - 1,
        "the last key of every page but the request's last is lost": lambda at, r: (
            (at % p != p - 1) | (at // p == (r.seq_len - 1) // p)
        ),
        "the first key of every page is lost": lambda at, r: at % p != 0,
        "the first key of every page but the first is lost": lambda at, r: (at % p != 0) | (at == 0),
        "every second page is lost": lambda at, r: at // p % 2 == 0,
        "only the last page is read": lambda at, r: at // p == (r.seq_len - 1) // p,
        "only the first page is read": lambda at, r: at < p,
    }
    most = max((-(-r.visible // p) for r in scene.rows), default=0)
    keep["the last page is lost"] = lambda at, r: at // p < (r.seq_len - 1) // p
    keep["the last page is lost where there is another"] = lambda at, r: (at // p < (r.seq_len - 1) // p) | (at < p)
    for text, kept in keep.items():
        cost = 0.02 if text.startswith("the last page is lost") else 0.0  # it may be lost for being partial
        yield Hypothesis("page", text, partial(_times, count=kept), cost)
    for j in range(1, min(most - 1, MOST_PAGES)):
        yield Hypothesis("page", f"page {j} is lost", partial(_one_page, page=j, times=0))
    twice: dict[str, Callable[[Array, Row], Array]] = {
        "the first key of every page but the first is read twice": lambda at, r: 1 + ((at % p == 0) & (at > 0)),
        "the last key of every full page is read twice": lambda at, r: 1 + (at % p == p - 1),
        "the last page is read twice": lambda at, r: 1 + (at // p == (r.seq_len - 1) // p),
        "every key is read twice": lambda at, r: 2 + 0 * at,
    }
    for text, count in twice.items():
        yield Hypothesis("page", text, partial(_times, count=count))
    for j in range(min(most, MOST_PAGES)):
        yield Hypothesis("page", f"page {j} is read twice", partial(_one_page, page=j, times=2))


def _one_page(scene: Scene, row: Row, page: int, times: int) -> Array:
    return _times(scene, row, lambda at, r: np.where(at // scene.page == page, times, 1))


def _times(scene: Scene, row: Row, count: Callable[[Array, Row], Array]) -> Array:
    return scene.scores(row, scene.own(row)) + np.log(count(np.arange(row.visible), row))
