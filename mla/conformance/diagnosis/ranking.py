"""Which hypotheses explain a wrong result, and what that and the error's shape say about the kind of fault.

Axes: L KV rank, V value; k hypotheses, h sampled heads, S keys of a row's request, n of them that a prediction scores.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mla.conformance.diagnosis.keys import batches, masks, tails
from mla.conformance.diagnosis.merge import merges
from mla.conformance.diagnosis.out import heads, lses, values
from mla.conformance.diagnosis.pages import pages
from mla.conformance.diagnosis.scene import NEG_INF, Answer, Array, Hypothesis, Row, Scene, attend
from mla.conformance.diagnosis.scores import precisions, ropes, scales
from mla.conformance.diagnosis.shapes import Shape, clues
from mla.conformance.diagnosis.splits import empties, splits

FAMILIES = (scales, ropes, masks, tails, pages, batches, splits, merges, empties, lses, values, heads, precisions)
ENOUGH = 2.0  # a prediction within twice the budget explains a number
MOST_WEIGHT = 16.0  # of one number: errors of 2^16 budgets and more weigh the same
NOT_FINITE = 3.0  # weight of a number that is not finite, which many things can make
PARTLY, VAGUE, LEAST, CHANCE, CONTRADICTED = 0.6, 0.1, 0.05, 0.04, -0.5


@dataclass(frozen=True)
class Guess:
    """A kind of fault, how well it fits (0 to 1), and why, in a sentence."""

    kind: str
    score: float
    because: str


def rank(shape: Shape, scene: Scene) -> tuple[tuple[Guess, ...], Hypothesis | None]:
    """Return guesses, best first, each kind once, and the hypothesis behind the first, None where there is none.

    With e the largest share that a hypothesis explains, a kind's score is (0.1 + e^2) times its own share and
    (1 - 0.85 e^2) times what the shape says for it.
    """
    best: dict[str, tuple[float, Hypothesis]] = {}
    hypotheses = [x for family in FAMILIES for x in family(scene)] if scene.rows else []
    for hypothesis, share in zip(hypotheses, explained(scene, hypotheses), strict=True):
        if share > LEAST and (hypothesis.kind not in best or share > best[hypothesis.kind][0]):
            best[hypothesis.kind] = (share, hypothesis)
    hints: dict[str, tuple[float, str]] = {}
    for kind, much, text in clues(shape):
        if much > hints.get(kind, (0.0, ""))[0]:
            hints[kind] = (much, text)
    trust = max((share for share, _ in best.values()), default=0.0) ** 2
    guesses: list[tuple[Guess, Hypothesis | None]] = []
    for kind in {*best, *hints}:
        (share, found), (much, text) = best.get(kind, (0.0, None)), hints.get(kind, (0.0, ""))
        of_share, of_clue = (0.1 + trust) * share, (1 - 0.85 * trust) * much
        trusted = found is not None and of_share >= of_clue
        because = found.says if found is not None and trusted else text
        guesses.append((Guess(kind, float(of_share + of_clue), because), found if trusted else None))
    guesses.sort(key=lambda pair: (-pair[0].score, pair[0].kind))
    return tuple(replace(g, score=min(1.0, g.score)) for g, _ in guesses), guesses[0][1] if guesses else None


def explained(scene: Scene, hypotheses: Sequence[Hypothesis]) -> list[float]:
    """Return the share of the errors that each hypothesis explains, less its cost: 1 where it predicts every number.

    A wrong number weighs log2 of its error / budget. It counts fully where the prediction is within twice the budget,
    else for the part of its logarithm that is gone. Numbers that are right must stay right. A hypothesis that explains
    nothing of the worst row is given up there. Of many hypotheses some fit a small error by chance: that costs, too.
    """
    k = len(hypotheses)
    gained, kept, total, right = np.zeros(k), np.zeros(k), 0.0, 0
    alive = np.arange(k)
    for row in scene.rows:
        if not len(alive):
            break
        left = residual(row, predict(scene, row, [hypotheses[int(i)] for i in alive]))  # (k, h)
        wrong, size = (
            row.used > 1,
            np.where(np.isinf(row.used), NOT_FINITE, np.log2(1 + row.used).clip(max=MOST_WEIGHT)),
        )
        part = PARTLY * np.nan_to_num((1 - np.log2(1 + left) / size).clip(0, 1))
        gain = np.where(left <= ENOUGH, 1.0 - VAGUE * left, np.where(np.isinf(left), CONTRADICTED, part))
        gained[alive] += (size * gain)[:, wrong].sum(1)
        kept[alive] += (left <= ENOUGH)[:, ~wrong].sum(1)
        total, right = total + float(size[wrong].sum()), right + int((~wrong).sum())
        if row is scene.rows[0]:
            alive = alive[gained > LEAST * total]
    share = np.zeros(k)
    if total:
        share[alive] = gained[alive] / total * (0.3 + 0.7 * kept[alive] / right if right else 1.0)
    many = Counter(hypothesis.kind for hypothesis in hypotheses)
    chance = {kind: CHANCE * math.log2(count) / (1 + total / 10) for kind, count in many.items()}
    return [max(0.0, float(s) - x.cost - chance[x.kind]) for s, x in zip(share, hypotheses, strict=True)]


def predict(scene: Scene, row: Row, hypotheses: Sequence[Hypothesis]) -> Answer:
    """Return what each hypothesis predicts for a row: out (k, h, V), lse (k, h); NaN where it does not apply.

    Those that give scores (h, n) of the request's first keys are computed at once.
    """
    found = [hypothesis.answer(scene, row) for hypothesis in hypotheses]
    scored = [i for i, x in enumerate(found) if isinstance(x, np.ndarray)]
    h, S = len(scene.heads), row.seq_len
    out, lse = np.full((len(found), *row.out.shape), np.nan), np.full((len(found), h), np.nan)
    scores = np.full((len(scored), h, S), NEG_INF)
    for j, i in enumerate(scored):
        part = found[i]
        assert isinstance(part, np.ndarray)
        scores[j, :, : part.shape[1]] = part
    out[scored], lse[scored] = attend(scores, scene.keys(scene.own(row, S))[0], scene.W_UV_h)
    for i, answer in enumerate(found):
        if isinstance(answer, Answer):
            out[i], lse[i] = answer
    return Answer(out, lse)


def touched(scene: Scene, row: Row, hypothesis: Hypothesis) -> Array:
    """Return the positions (m,) of the keys that a hypothesis scores otherwise than right, empty for none."""
    with np.errstate(all="ignore"):
        found = hypothesis.answer(scene, row)
    if not isinstance(found, np.ndarray):
        return np.zeros(0, dtype=np.int64)
    whole = [np.full((len(scene.heads), row.seq_len), NEG_INF) for _ in range(2)]
    for target, part in zip(whole, (found, scene.scores(row, scene.own(row))), strict=True):
        target[:, : part.shape[1]] = part
    return np.flatnonzero((whole[0] != whole[1]).any(0))


def residual(row: Row, answer: Answer) -> Array:
    """Return (..., h) how far the tier's numbers are from predictions, in budgets; 0 where both are not finite.

    The budget grows where the prediction is larger than the truth. An output that is not finite beside a wrong LSE may
    be what 0 times poison gives, and anything may stand beside an LSE that is NaN: there the LSE decides.
    """
    if row.lse is None:
        return _out_residual(row, answer.out)
    gap = np.where(row.lse == answer.lse, 0.0, np.abs(row.lse - answer.lse))
    real = lambda x: ~np.isnan(x) & (x != np.inf)
    of_lse = _used(gap, row.lse_limit, real(row.lse), real(answer.lse))
    poisoned = ~np.isfinite(row.out).all(-1) & (np.abs(row.lse - row.right.lse) > row.lse_limit)
    poisoned = poisoned | (np.isnan(row.lse) & np.isnan(answer.lse))
    return np.maximum(np.where(poisoned, 0.0, _out_residual(row, answer.out)), of_lse)


def _out_residual(row: Row, out: Array) -> Array:
    size, right = (np.sqrt(np.square(x).mean(-1)) for x in (out, row.right.out))
    grow = np.fmax(1.0, size / right)
    error = np.sqrt(np.square(row.out - out).mean(-1))
    return _used(error, row.out_limit * grow, np.isfinite(row.out).all(-1), np.isfinite(out).all(-1))


def _used(error: Array, limit: Array, finite: Array, predicted: Array) -> Array:
    both = np.where(np.isnan(error), np.inf, error / limit)
    return np.where(finite & predicted, both, np.where(finite == predicted, 0.0, np.inf))
