"""What could be wrong with what comes out: the LSE alone, the values, the order of heads.

Axes: T new tokens, S cached tokens, N heads, L KV rank, V value; h sampled heads, n keys that a row sees.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mla.conformance.diagnosis.merge import SPLITS, Cut, Parts, cut_row
from mla.conformance.diagnosis.scene import NEG_INF, Answer, Array, Hypothesis, Row, Scene, logsumexp, up

LN2 = 0.6931471805599453


def lses(scene: Scene) -> Iterator[Hypothesis]:
    """Yield LSEs that are wrong beside a right output: base, scale, a part missing, layout."""
    scale = scene.scale
    changed: dict[str, Callable[[Scene, Row, Array], Array]] = {
        "is in base 2 (a factor 1.4427)": lambda s, r, x: x / LN2,
        "is a natural one taken for base 2 (a factor 0.6931)": lambda s, r, x: x * LN2,
        "is divided by the softmax scale": lambda s, r, x: x / scale,
        "is multiplied by the softmax scale": lambda s, r, x: x * scale,
        "is taken before the scale": lambda s, r, x: logsumexp(_scores(s, r) / scale),
        "is the largest score": lambda s, r, x: _scores(s, r).max(-1),
        "lacks the largest score": lambda s, r, x: x - _scores(s, r).max(-1),
        "has the largest score twice": lambda s, r, x: x + _scores(s, r).max(-1),
        "has its maximum before the scale": lambda s, r, x: x + _scores(s, r).max(-1) * (1 / scale - 1),
        "has its maximum in base 2": lambda s, r, x: x + _scores(s, r).max(-1) * (1 / LN2 - 1),
        "has the sum's logarithm in base 2": lambda s, r, x: x + (x - _scores(s, r).max(-1)) * (1 / LN2 - 1),
        "has the wrong sign": lambda s, r, x: -x,
        "is the sum itself, without the logarithm": lambda s, r, x: np.exp(x),
        "has the sum in place of its logarithm": lambda s, r, x: (m := _scores(s, r).max(-1)) + np.exp(x - m),
        "is that of a mean, ln n too small": lambda s, r, x: x - np.log(r.visible),
        "is ln n too large": lambda s, r, x: x + np.log(r.visible),
        "is always 0": lambda s, r, x: 0 * x,
        "is always -inf": lambda s, r, x: 0 * x + NEG_INF,
        "is +inf": lambda s, r, x: 0 * x - NEG_INF,
        "lacks the position part": lambda s, r, x: logsumexp(_scores(s, r, position=False)),
        "is the mean over heads": lambda s, r, x: x.mean() + 0 * x,
    }
    for text, change in changed.items():
        yield Hypothesis("lse", f"the LSE {text}", partial(_changed_lse, change=change))
    for shift in (1, -1):
        yield Hypothesis("lse", f"the LSE is that of head i + {shift}", partial(_lse_of, step=1, shift=shift))
    yield Hypothesis("lse", "the LSE is that of head 0", partial(_lse_of, step=0, shift=0))
    yield Hypothesis("lse", "the LSE lies in memory as (N, T)", _transposed)
    yield Hypothesis("lse", "the LSE lies in memory as (N, T), by requests", partial(_transposed, by_request=True))
    for cut in [Cut(s, 0, of) for of in ("seq", "row", "pages") for s in SPLITS] + [Cut(0, scene.page)]:
        for text, pick in PARTIAL.items():
            yield Hypothesis(
                "lse", f"the LSE is that of {text} alone ({cut})", partial(_of_part, cut=cut, pick=pick), 0.02
            )


def _changed_lse(scene: Scene, row: Row, change: Callable[[Scene, Row, Array], Array]) -> Answer:
    return Answer(row.right.out, change(scene, row, row.right.lse))


def _changed_out(scene: Scene, row: Row, change: Callable[[Array], Array]) -> Answer:
    return Answer(change(row.right.out), row.right.lse)


def _scores(scene: Scene, row: Row, position: bool = True) -> Array:
    if position:
        return scene.scores(row, scene.own(row))
    return scene.scale * (row.q_latent @ scene.keys(scene.own(row))[0].T)


def _lse_of(scene: Scene, row: Row, step: int, shift: int) -> Answer:
    N = scene.case.dims.N
    return Answer(row.right.out, scene.result(row.row, [(step * i + shift) % N for i in scene.heads]).lse)


def _transposed(scene: Scene, row: Row, by_request: bool = False) -> Answer:
    """What a row finds where it reads a (N, T) buffer as (T, N), of the batch or of its request's rows."""
    N, T, first = scene.case.dims.N, scene.case.batch.num_tokens, 0
    if by_request:
        first, T = row.row - row.token, row.query_len
    flat = [(row.row - first) * N + i for i in scene.heads]
    lse = np.concatenate([scene.result(first + f % T, [f // T], scene.W_UV_h[:, :1]).lse for f in flat])
    return Answer(row.right.out, lse)


PARTIAL: dict[str, Callable[[Parts], Array]] = {
    "the first part": lambda p: p.lse.reshape(len(p.lse), -1)[:, 0],
    "the last part": lambda p: p.lse.reshape(len(p.lse), -1)[:, -1],
    "the largest part": lambda p: p.lse.reshape(len(p.lse), -1).max(-1),
}


def _of_part(scene: Scene, row: Row, cut: Cut, pick: Callable[[Parts], Array]) -> Answer:
    parts = cut_row(scene, row, cut)
    return row.right if parts is None else Answer(row.right.out, pick(parts))


def values(scene: Scene) -> Iterator[Hypothesis]:
    """Yield wrong values under right weights: columns of the row, another key's, W_UV cut or turned the wrong way."""
    L, R, V = scene.case.dims.L, scene.case.dims.R, scene.case.dims.V
    columns = {
        "the last L columns of the row": np.arange(R, R + L),
        "columns one to the right": np.arange(1, L + 1) % (L + R),
        "columns one to the left": np.arange(-1, L - 1) % L,
        "columns rotated by one": np.arange(1, L + 1) % L,
        "columns rotated by R": np.arange(R, L + R) % L,
        "columns rotated by half": np.arange(L // 2, L + L // 2) % L,
        "columns in reverse": np.arange(L - 1, -1, -1),
    }
    for text, at in columns.items():
        yield Hypothesis("value", f"V is {text}", partial(_columns, at=at))
    for width in sorted({L // 2, L - R, L - 1, 1 << (L.bit_length() - 1)} - {0, L}):
        yield Hypothesis("value", f"V is cut to {width} columns", partial(_narrow, width=width))
    yield Hypothesis("value", "V is the next key's", partial(_other_key, shift=-1))
    yield Hypothesis("value", "V is the previous key's", partial(_other_key, shift=1))
    yield Hypothesis("value", "V is summed without weights", partial(_weighted, power=0.0))
    yield Hypothesis("value", "weights are squared", partial(_weighted, power=2.0))
    for text, turn in _wrong_up(scene).items():
        yield Hypothesis("value", f"W_UV {text}", partial(_up_with, turn=turn))
    for text, by in (("next", -1), ("previous", 1)):
        yield Hypothesis("value", f"W_UK is that of the {text} head", partial(_other_w_uk, by=by))
    outputs: dict[str, Callable[[Array], Array]] = {
        "the columns of the output are reversed": lambda x: x[..., ::-1],
        "the columns of the output are rotated by one": lambda x: np.roll(x, 1, -1),
        "the columns of the output are rotated by one, the other way": lambda x: np.roll(x, -1, -1),
        "the last column of the output is 0": lambda x: np.concatenate([x[:, :-1], 0 * x[:, -1:]], -1),
        "the second half of the output is 0": lambda x: np.concatenate([x[:, : V // 2], 0 * x[:, V // 2 :]], -1),
        "the output is 0": lambda x: 0 * x,
        "the output has the wrong sign": lambda x: -x,
    }
    for text, change in outputs.items():
        yield Hypothesis("value", text, partial(_changed_out, change=change))


def _weights(scene: Scene, row: Row) -> Array:
    return np.exp(scene.scores(row, scene.own(row)) - row.right.lse[:, None])


def _columns(scene: Scene, row: Row, at: Array) -> Answer:
    rows = np.concatenate(scene.keys(scene.own(row)), -1)
    return Answer(up(_weights(scene, row) @ rows[:, at], scene.W_UV_h), row.right.lse)


def _narrow(scene: Scene, row: Row, width: int) -> Answer:
    kv_c = scene.keys(scene.own(row))[0].copy()
    kv_c[:, width:] = 0
    return Answer(up(_weights(scene, row) @ kv_c, scene.W_UV_h), row.right.lse)


def _other_key(scene: Scene, row: Row, shift: int) -> Answer:
    kv_c = scene.keys(scene.own(row))[0]
    return Answer(up(_weights(scene, row) @ np.roll(kv_c, shift, 0), scene.W_UV_h), row.right.lse)


def _weighted(scene: Scene, row: Row, power: float) -> Answer:
    return Answer(up(_weights(scene, row) ** power @ scene.keys(scene.own(row))[0], scene.W_UV_h), row.right.lse)


def _wrong_up(scene: Scene) -> dict[str, Array]:
    """Wrong W_UV (L, h, V) by what was done to it."""
    d, at = scene.case.dims, list(scene.heads)
    joint = np.concatenate([scene.W_UK, scene.W_UV], -1)  # (L, N, P+V)
    flat = joint.reshape(d.L, -1)  # (L, N (P+V))
    wrong = {
        "is cut from the front of each head": joint[..., : d.V],
        "is cut one column early": joint[..., d.P - 1 : d.P - 1 + d.V],
        "is cut as if all K came before all V": flat[:, d.N * d.P :].reshape(d.L, d.N, d.V),
        "is read with heads and columns swapped": scene.W_UV.reshape(d.L, d.V, d.N).swapaxes(1, 2),
        "is laid out with heads and columns swapped": scene.W_UV.swapaxes(1, 2).reshape(d.L, d.N, d.V),
        "has its columns reversed": scene.W_UV[..., ::-1],
        "is that of the next head": np.roll(scene.W_UV, -1, 1),
        "is that of the previous head": np.roll(scene.W_UV, 1, 1),
        "is that of head 0": np.repeat(scene.W_UV[:, :1], d.N, 1),
    }
    return {text: w[:, at] for text, w in wrong.items() if tuple(w.shape) == (d.L, d.N, d.V)}


def _up_with(scene: Scene, row: Row, turn: Array) -> Answer:
    return Answer(up(_weights(scene, row) @ scene.keys(scene.own(row))[0], turn), row.right.lse)


def _other_w_uk(scene: Scene, row: Row, by: int) -> Array:
    W_UK = np.roll(scene.W_UK, by, 1)[:, list(scene.heads)]
    kv_c, k_pe = scene.keys(scene.own(row))
    q_latent = np.matmul(W_UK.transpose(1, 0, 2), scene.nope(row)[..., None])[..., 0]
    return scene.scale * (q_latent @ kv_c.T + row.q_pe @ k_pe.T)


def heads(scene: Scene) -> Iterator[Hypothesis]:
    """Yield wrong orders of heads: all of a head, its query alone, its output alone."""
    N = scene.case.dims.N
    if N < 2:
        return
    maps: dict[str, Callable[[int], int]] = {
        "one too high": lambda i: (i + 1) % N,
        "one too low": lambda i: (i - 1) % N,
        "one too low and stops at 0": lambda i: max(i - 1, 0),
        "one too high and stops at the last": lambda i: min(i + 1, N - 1),
        "reversed": lambda i: N - 1 - i,
        "always 0": lambda i: 0,
        "always the last": lambda i: N - 1,
        "swapped in pairs": lambda i: min(i ^ 1, N - 1),
        "halved": lambda i: i // 2,
        "rotated by half": lambda i: (i + N // 2) % N,
    }
    for text, pick in maps.items():
        yield Hypothesis("head", f"the head index is {text}", partial(_head, pick=pick, part="all"))
        yield Hypothesis("head", f"the head index of the query is {text}", partial(_head, pick=pick, part="query"))
        yield Hypothesis("head", f"the head index of the output is {text}", partial(_head, pick=pick, part="out"))
        yield Hypothesis(
            "head", f"the head index of the latent output is {text}", partial(_head, pick=pick, part="latent")
        )
    for pad in (4, 8, 16, 32, 64, 128):
        padded = -(-N // pad) * pad
        if padded > N:
            for text, order in UNPAD.items():
                for part in ("output", "LSE", "result"):
                    says = f"heads of the {part}, padded to {padded}, are cut off wrongly ({text})"
                    yield Hypothesis("head", says, partial(_unpadded, padded=padded, order=order, part=part), 0.01)
    for k in sorted({N - 1, N // 2, *(p for p in (2, 4, 8, 16, 32, 64) if p < N)} - {0}):
        yield Hypothesis("head", f"heads from {k} on are not computed (0)", partial(_zero_heads, first=k))
        again = partial(_head, pick=partial(_modulo, k=k), part="all")
        yield Hypothesis("head", f"heads from {k} on repeat the first ones", again)


def _modulo(i: int, k: int) -> int:
    return i % k


def _head(scene: Scene, row: Row, pick: Callable[[int], int], part: str) -> Answer | Array:
    at = [pick(i) for i in scene.heads]
    W_UV = scene.W_UV[:, at]
    if part == "query":
        q_latent = scene.query(row.row, at)
        own = scene.own(row)
        kv_c, k_pe = scene.keys(own)
        return scene.scale * (q_latent[0] @ kv_c.T + q_latent[1] @ k_pe.T)
    answer = scene.result(row.row, at, None if part == "latent" else W_UV)
    return answer if part == "all" else Answer(answer.out, row.right.lse)


UNPAD: dict[str, Callable[[int, int, int, int, int], int]] = {
    # (token, head, T, N, padded) -> place in rows x padded heads that is read
    "cut before they are unpadded": lambda t, i, T, N, padded: t * N + i,
    "as if heads came first": lambda t, i, T, N, padded: i * T + t,
    "in groups": lambda t, i, T, N, padded: t * padded + i * (padded // N),
    "from the end": lambda t, i, T, N, padded: t * padded + padded - N + i,
}


def _unpadded(scene: Scene, row: Row, padded: int, order: Callable, part: str) -> Answer:
    N, T = scene.case.dims.N, row.query_len
    first, parts = row.row - row.token, []
    for k, i in enumerate(scene.heads):
        t, head = divmod(order(row.token, i, T, N, padded), padded)
        W_UV = scene.W_UV_h[:, k : k + 1]
        if head < N and t < T:
            parts.append(scene.result(first + t, [head], W_UV))
        else:  # a padded head has a query of zeros
            own = scene.own(row, scene.bounds[first + min(t, T - 1)])
            parts.append(scene.attend(row, own, np.zeros((1, own.stop - own.start)), W_UV))
    out, lse = (np.concatenate(x) for x in zip(*parts, strict=True))
    return Answer(row.right.out if part == "LSE" else out, row.right.lse if part == "output" else lse)


def _zero_heads(scene: Scene, row: Row, first: int) -> Answer:
    lost = np.array([i >= first for i in scene.heads])
    return Answer(np.where(lost[:, None], 0.0, row.right.out), np.where(lost, NEG_INF, row.right.lse))
