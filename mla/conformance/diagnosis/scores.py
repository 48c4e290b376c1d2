"""What could be wrong with the scores: another scale, a lost or mispaired rope part, too few bits.

Axes: S cached tokens, N heads, L KV rank, P nope, R rope, V value; h sampled heads, n keys that a row sees.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from mla.config import yarn_mscale
from mla.conformance.diagnosis.scene import Answer, Array, Hypothesis, Row, Scene, attend, up

LOG2E = math.log2(math.e)
BASE = 1e4
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3": torch.float8_e4m3fn}
STEPS = 60  # of a fitted factor, over two decades and a half


def scales(scene: Scene) -> Iterator[Hypothesis]:
    """Yield wrong softmax scales: known formulas, then any factor that fits the worst row."""
    d, right, m = scene.case.dims, scene.scale, yarn_mscale(40.0, 1.0)
    widths = {
        "(P+R)^-0.5": d.P + d.R,
        "(L+R)^-0.5 (576^-0.5 for DeepSeek)": d.L + d.R,
        "L^-0.5": d.L,
        "P^-0.5": d.P,
        "V^-0.5": d.V,
    }
    named = {f"is {name}{text}": w**-0.5 * f for name, w in widths.items() for f, text in _mscales(m)}
    named |= {
        "is applied twice": right**2,
        "is missing": 1.0,
        "is squared away from (P+R)^-1": 1.0 / (d.P + d.R),
        "takes exp2 for exp (a factor ln 2)": right * math.log(2),
        "has log2 e once too often": right * LOG2E,
        "has the wrong sign": -right,
        "is doubled": 2 * right,
        "is halved": right / 2,
    }
    for text, scale in named.items():
        if abs(scale / right - 1) > 1e-6:
            yield Hypothesis("scale", f"the softmax scale {text}", _scaled(scale / right))
    for name, dtype in NARROW.items():
        factor = float(torch.tensor(right).to(dtype)) / right
        yield Hypothesis("precision", f"the softmax scale is rounded to {name}", _scaled(factor))
    yield Hypothesis("scale", "the softmax scale is another one", _scaled(_fit(scene, lambda c: _scaled(c))), 0.05)


def _mscales(m: float) -> tuple[tuple[float, str], ...]:
    return (
        (1.0, ", the YaRN term is missing"),
        (m, " with mscale applied once"),
        (m * m, " times mscale^2"),
        (1 / m, " with mscale inverted"),
        (1 / (m * m), " with mscale^2 inverted"),
    )


def _scaled(factor: float) -> Callable[[Scene, Row], Array]:
    return lambda scene, row: factor * scene.scores(row, scene.own(row))


def _fit(scene: Scene, answer: Callable[[float], Callable]) -> float:
    """Return the factor whose answer comes closest to the numbers of the worst row: a grid, then golden sections."""
    row = scene.rows[0]

    def miss(c: float) -> float:
        out, lse = scene.attend(row, scene.own(row), answer(c)(scene, row))
        total = np.sqrt(np.square((row.out - out) / row.out_limit[:, None]).mean(-1))
        if row.lse is not None:
            total = total + np.abs((row.lse - lse) / row.lse_limit)
        return float(np.log1p(np.nan_to_num(total, nan=1e300)).sum())

    grid = [0.04 * 400 ** (i / STEPS) for i in range(STEPS + 1)]
    best = min(range(len(grid)), key=lambda i: miss(grid[i]))
    low, high = grid[max(0, best - 1)], grid[min(STEPS, best + 1)]
    for _ in range(30):
        a, b = high - (high - low) * 0.618034, low + (high - low) * 0.618034
        low, high = (low, b) if miss(a) < miss(b) else (a, high)
    return (low + high) / 2


def ropes(scene: Scene) -> Iterator[Hypothesis]:
    """Yield faults of the position part of the score: dropped, weighted, mispaired, cut from the wrong columns."""
    R = scene.case.dims.R
    if R == 0:
        return
    with_pe = lambda says, change, cost=0.0: Hypothesis("rope", says, _position(change), cost)
    yield with_pe("the position part of the score is missing", lambda q, k: 0.0)
    yield with_pe("the position part counts twice", lambda q, k: 2 * (q @ k.T))
    yield with_pe("the position part has the wrong sign", lambda q, k: -(q @ k.T))
    yield with_pe("the position part is not scaled", lambda q, k: (q @ k.T) / scene.scale)
    for text, order in _orders(R).items():
        at = np.array(order)
        yield with_pe(f"query and key disagree about the rope layout ({text})", lambda q, k, at=at: q[:, at] @ k.T)
    for text, cut in {"first": slice(0, R // 2), "second": slice(R // 2, R)}.items():
        yield with_pe(f"only the {text} half of the position part counts", lambda q, k, c=cut: q[:, c] @ k[:, c].T)
    for text, cut in {"even": slice(0, R, 2), "odd": slice(1, R, 2)}.items():
        yield with_pe(f"only the {text} columns of the position part count", lambda q, k, c=cut: q[:, c] @ k[:, c].T)
    for shift in (1, -1):
        text = "next" if shift == -1 else "previous"
        yield with_pe(f"keys have the position part of the {text} key", lambda q, k, s=shift: q @ np.roll(k, s, 0).T)
    yield with_pe("all keys have the position part of the first one", lambda q, k: np.repeat(q @ k[:1].T, len(k), 1))
    for text, first in (("front", 0), ("middle", scene.case.dims.L - R), ("front but one", 1)):
        if first >= 0:
            yield Hypothesis("rope", f"the key's position part is cut from the {text} of the row", _cut_keys(first))
    yield Hypothesis("rope", "the row is cut as [position, latent]", _swapped(False))
    yield Hypothesis("rope", "the query is joined as [position, latent]", _swapped(True))
    yield Hypothesis("rope", "the query has the position part of head 0", _head_zero)
    for text, end in (("first", False), ("last", True)):
        if R <= scene.case.dims.P:
            yield Hypothesis("rope", f"the query's position part is the {text} R columns of q_nope", _cut_query(end))
    yield from _rotations(scene)
    weighted = lambda c: _position(lambda q, k: c * (q @ k.T))
    yield Hypothesis("rope", "the position part has another weight", weighted(_fit(scene, weighted)), 0.06)


def _orders(R: int) -> dict[str, list[int]]:
    half = R // 2
    return {
        "adjacent against half-split": [i // 2 + (i % 2) * half for i in range(half * 2)] + list(range(2 * half, R)),
        "half-split against adjacent": [(i % max(half, 1)) * 2 + i // max(half, 1) for i in range(half * 2)]
        + list(range(2 * half, R)),
        "halves swapped": [*range(half, R), *range(half)],
        "pairs swapped": [i ^ 1 if i ^ 1 < R else i for i in range(R)],
        "reversed": list(range(R))[::-1],
        "columns one off": [*range(1, R), 0],
        "columns one off, the other way": [R - 1, *range(R - 1)],
    }


def _position(change: Callable[[Array, Array], Array | float]) -> Callable[[Scene, Row], Array]:
    """Answer with the position part change(q_pe (h, R), k_pe (n, R)) -> (h, n)."""

    def answer(scene: Scene, row: Row) -> Array:
        own = scene.own(row)
        kv_c, k_pe = scene.keys(own)
        return scene.scale * (row.q_latent @ kv_c.T + change(row.q_pe, k_pe))

    return answer


def _cut_keys(first: int) -> Callable[[Scene, Row], Array]:
    def answer(scene: Scene, row: Row) -> Array:
        own = scene.own(row)
        kv_c, k_pe = scene.keys(own)
        wrong = np.concatenate([kv_c, k_pe], -1)[:, first : first + k_pe.shape[1]]
        return scene.scale * (row.q_latent @ kv_c.T + row.q_pe @ wrong.T)

    return answer


def _swapped(query: bool) -> Callable[[Scene, Row], Answer]:
    def answer(scene: Scene, row: Row) -> Answer:
        own = scene.own(row)
        kv_c, k_pe = scene.keys(own)
        R = k_pe.shape[1]
        if query:
            scores = np.concatenate([row.q_pe, row.q_latent], -1) @ np.concatenate([kv_c, k_pe], -1).T
            return scene.scale * scores
        whole = np.concatenate([kv_c, k_pe], -1)
        scores = scene.scale * (row.q_pe @ whole[:, :R].T + row.q_latent @ whole[:, R:].T)
        return attend(scores, whole[:, R:], scene.W_UV_h)

    return answer


def _cut_query(end: bool) -> Callable[[Scene, Row], Array]:
    def answer(scene: Scene, row: Row) -> Array:
        kv_c, k_pe = scene.keys(scene.own(row))
        nope, R = scene.nope(row), k_pe.shape[1]
        pe = nope[:, -R:] if end else nope[:, :R]
        return scene.scale * (row.q_latent @ kv_c.T + pe @ k_pe.T)

    return answer


def _head_zero(scene: Scene, row: Row) -> Array:
    own, pe = scene.own(row), scene.query(row.row, [0])[1]
    kv_c, k_pe = scene.keys(own)
    return scene.scale * (row.q_latent @ kv_c.T + pe @ k_pe.T)


def _rotations(scene: Scene) -> Iterator[Hypothesis]:
    """The query or the keys rotated once more, or back, in either layout."""
    R = scene.case.dims.R
    if R % 2:
        return
    frequency = BASE ** (-np.arange(0, R, 2) / R)
    angles: dict[str, tuple[Place, Place]] = {
        "the query is rotated once more": (_position_of, _none),
        "the query is not rotated": (lambda r, n: -_position_of(r, n), _none),
        "the query is rotated by one position more": (lambda r, n: np.ones(1), _none),
        "the query is rotated by one position less": (lambda r, n: -np.ones(1), _none),
        "positions of the query are counted from 0": (lambda r, n: -np.full(1, r.seq_len - r.query_len), _none),
        "the keys are rotated once more": (_none, lambda r, n: np.arange(n)),
        "the keys are not rotated": (_none, lambda r, n: -np.arange(n)),
        "query and keys are rotated once more": (_position_of, lambda r, n: np.arange(n)),
        "query and keys are not rotated": (lambda r, n: -_position_of(r, n), lambda r, n: -np.arange(n)),
    }
    for paired in (True, False):
        for text, (q_by, k_by) in angles.items():
            says = f"{text} ({'adjacent' if paired else 'half-split'})"
            yield Hypothesis("rope", says, _rotated(frequency, paired, q_by, k_by))


Place = Callable[[Row, int], Array | None]


def _position_of(row: Row, n: int) -> Array:
    return np.full(1, row.seq_len - row.query_len + row.token)


def _none(row: Row, n: int) -> None:
    return None


def _rotated(frequency: Array, paired: bool, q_by: Place, k_by: Place) -> Callable[[Scene, Row], Array]:
    def turn(x: Array, at: Array | None) -> Array:
        if at is None:
            return x
        angle = at[:, None] * frequency
        a, b = (x[..., 0::2], x[..., 1::2]) if paired else np.split(x, 2, -1)
        a, b = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return np.stack([a, b], -1).reshape(*a.shape[:-1], -1) if paired else np.concatenate([a, b], -1)

    def answer(scene: Scene, row: Row) -> Array:
        kv_c, k_pe = scene.keys(scene.own(row))
        q, k = turn(row.q_pe, q_by(row, len(k_pe))), turn(k_pe, k_by(row, len(k_pe)))
        return scene.scale * (row.q_latent @ kv_c.T + q @ k.T)

    return answer


def precisions(scene: Scene) -> Iterator[Hypothesis]:
    """Yield places where bits are lost: scores, weights, query, rows, output and LSE rounded to 16 bits or fewer."""
    for name, dtype in NARROW.items():
        low = lambda x, t=dtype: torch.from_numpy(x).float().to(t).double().numpy()
        for text, cost, answer in _rounded(low):
            yield Hypothesis("precision", f"{text} rounded to {name}", answer, cost + 0.02)


def _rounded(low: Callable[[Array], Array]) -> Iterator[tuple[str, float, Callable[[Scene, Row], Answer | Array]]]:
    def parts(scene: Scene, row: Row) -> tuple[Array, Array, Array, Array]:
        return row.q_latent, row.q_pe, *scene.keys(scene.own(row))

    def scored(change: Callable[[Array, Array, float], Array]) -> Callable[[Scene, Row], Array]:
        def answer(scene: Scene, row: Row) -> Array:
            q, pe, kv_c, k_pe = parts(scene, row)
            return change(q @ kv_c.T, pe @ k_pe.T, scene.scale)

        return answer

    def inputs(scene: Scene, row: Row, *, query: bool, rows: bool) -> Answer:
        q, pe, kv_c, k_pe = parts(scene, row)
        q, pe = (low(q), low(pe)) if query else (q, pe)
        kv_c, k_pe = (low(kv_c), low(k_pe)) if rows else (kv_c, k_pe)
        return attend(scene.scale * (q @ kv_c.T + pe @ k_pe.T), kv_c, scene.W_UV_h)

    def weights(scene: Scene, row: Row, total: bool) -> Answer:
        own = scene.own(row)
        scores = scene.scores(row, own)
        top = scores.max(-1, keepdims=True)
        p = low(np.exp(scores - top))
        sum_ = p.sum(-1, keepdims=True) if total else np.exp(scores - top).sum(-1, keepdims=True)
        out = up(p @ scene.keys(own)[0] / sum_, scene.W_UV_h)
        return Answer(out, (top + np.log(sum_))[:, 0] if total else row.right.lse)

    yield "the scores are", 0.0, scored(lambda c, p, s: s * low(c + p))
    yield "the scaled scores are", 0.0, scored(lambda c, p, s: low(s * (c + p)))
    yield "the scaled scores are, twice,", 0.0, scored(lambda c, p, s: low(s * low(c + p)))
    yield "both parts of the score are", 0.0, scored(lambda c, p, s: s * (low(c) + low(p)))
    yield "both parts of the score and their sum are", 0.0, scored(lambda c, p, s: s * low(low(c) + low(p)))
    yield "the absorbed query is", 0.01, lambda s, r: inputs(s, r, query=True, rows=False)
    yield "the cached rows are", 0.01, lambda s, r: inputs(s, r, query=False, rows=True)
    yield "query and rows are", 0.01, lambda s, r: inputs(s, r, query=True, rows=True)
    yield "the weights are", 0.0, lambda s, r: weights(s, r, False)
    yield "the weights, and their sum, are", 0.0, lambda s, r: weights(s, r, True)
    yield "the output is", 0.0, lambda s, r: Answer(low(r.right.out), r.right.lse)
    yield "the LSE is", 0.0, lambda s, r: Answer(r.right.out, low(r.right.lse))
    yield "output and LSE are", 0.0, lambda s, r: Answer(low(r.right.out), low(r.right.lse))
