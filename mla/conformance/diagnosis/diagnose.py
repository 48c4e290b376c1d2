"""What a wrong result looks like and which kind of fault would make it so: a sentence for the author of a kernel.

Axes: T new tokens (packed over requests), N heads, V value; n rows and h heads of the reference.

Two sources of evidence are combined: the error's shape (`shapes`), and hypotheses (`hypotheses*`): a few rows computed
anew as they would be if the scale, the mask, a page, ... were wrong. One that explains the tier's own numbers wins.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from mla.accuracy import Reference
from mla.conformance.cases import Case
from mla.conformance.diagnosis.ranking import Guess, rank, touched
from mla.conformance.diagnosis.scene import Array, make_scene
from mla.conformance.diagnosis.shapes import Shape, make_shape
from mla.conformance.inputs import ABSURD_PAGES, Inputs
from mla.state import AttentionState

KIND_NAMES = {
    "scale": "a wrong softmax scale", "rope": "a fault in the position part of the score",
    "mask": "wrong mask bounds", "tail": "a fault at the end of a request", "page": "a fault in the page lookup",
    "split": "a fault at the borders of KV splits", "merge": "a fault in rescaling or combining partial results",
    "lse": "a wrong LSE beside a right output", "empty": "a fault in rows or parts without keys",
    "head": "a wrong order of heads", "value": "values from the wrong place", "batch": "requests mixed up",
    "write": "rows written wrong into the cache", "precision": "too few bits somewhere",
    "form": "a result of the wrong form", "memory": "memory touched or kept that is not the tier's",
    "offset": "an offset that overflows 32 bits",
}  # fmt: skip
STATUS_KINDS = {
    "wrong_shape": (("form", 1.0),),
    "wrong_dtype": (("form", 1.0),),
    "raised": (("form", 0.6),),
    "not_finite": (("memory", 0.3), ("tail", 0.3), ("precision", 0.2)),
    "mismatch": (("memory", 0.5),),
}
OUTSIDE = ("IndexError", "out of range", "out of bounds", "illegal memory access", "Segmentation fault")


@dataclass(frozen=True)
class Place:
    """Where: request (-1: padding), its token, row of the batch, head; page, position in page and position of a key.

    The key is the row's last visible one, or the one that alone explains the error; -1 where a row sees none.
    """

    request: int
    token: int
    row: int
    head: int
    page: int
    position_in_page: int
    position: int


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong in a case: `metric` is "out" or "lse", "" where there are no numbers, `used` error / budget there.

    `got` and `expected` are the tier's value and the oracle's at `worst` (of the output column that is furthest off);
    `guesses` are ranked, the first is the best; `sentence` says it all.
    """

    metric: str
    used: float
    first: Place | None
    worst: Place | None
    got: float
    expected: float
    guesses: tuple[Guess, ...]
    sentence: str

    @property
    def kind(self) -> str:
        """The first guess's kind, "" without one."""
        return self.guesses[0].kind if self.guesses else ""

    def record(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


class Keys(NamedTuple):
    """The keys (m,) of a request that the best guess is about; none where it is about all."""

    request: int
    at: Array


def diagnose(
    case: Case, state: AttentionState, made: Reference, heads: tuple[int, ...] | None, inputs: Inputs
) -> Diagnosis | None:
    """Say what is wrong with state.out (T, N, V) and state.lse (T, N) or None, and why; None where nothing is.

    `made` holds the truth of some rows, out (n, h, V) and so on, `heads` the heads it covers (None: all), `inputs` what
    the tier was given. At most 8 rows and 4 heads are computed anew.
    """
    shape = make_shape(case, state, made, heads)
    if not bool(shape.wrong.any()):
        return None
    with np.errstate(all="ignore"):
        scene = make_scene(case, state, made, heads, inputs, shape.used)
        guesses, hypothesis = rank(shape, scene)
    about = Keys(-1, np.zeros(0, dtype=np.int64))
    if hypothesis is not None and scene.rows:
        about = Keys(scene.rows[0].request, touched(scene, scene.rows[0], hypothesis))
    return _describe(shape, state, made, lambda k: k if heads is None else heads[k], guesses, about)


def diagnose_status(status: str, detail: str, kind: str = "") -> Diagnosis:
    """Diagnose a failure without numbers: from its status, its sentence, and the kind that a guard named ("": none).

    Something that was read outside its tensor is more likely a page than a form.
    """
    guesses = [Guess(k, score, f"the status is {status}") for k, score in STATUS_KINDS.get(status, ())]
    if kind and status not in ("crashed", "timed_out") and not (status == "raised" and kind == "form"):
        guesses = [Guess(kind, 1.0, "a check beside the numbers found it"), *(g for g in guesses if g.kind != kind)]
    elif status == "crashed" and any(signal in detail for signal in ("SIGSEGV", "SIGBUS")):
        because = "the process touched memory that is not its own"
        guesses = [Guess(k, score, because) for k, score in (("memory", 0.6), ("page", 0.5), ("offset", 0.4))]
    elif any(text in detail for text in OUTSIDE):
        found = next((page for page in ABSURD_PAGES if re.search(rf"(?<![\d-]){page}\b", detail)), None)
        because = "something outside a tensor was read"
        if found is not None:
            because = f"page {found} is what the case put behind a request's last page: the lookup reads past it"
        outside = [("page", 0.8 if found is None else 1.0), ("batch", 0.3), ("offset", 0.3), ("form", 0.2)]
        guesses = [Guess(k, score, because) for k, score in outside]
    why = f"; looks like {KIND_NAMES[guesses[0].kind]}" if guesses else ""
    return Diagnosis("", math.inf, None, None, math.nan, math.nan, tuple(guesses), f"{status}: {detail}{why}")


def combine(diagnoses: Iterable[Diagnosis]) -> tuple[Guess, ...]:
    """Rank the kinds over several failing cases of one tier, by their mean score and then by how often each came first.

    The sentence is the best case's.
    """
    found = list(diagnoses)
    firsts = Counter(d.kind for d in found)
    best: dict[str, Guess] = {}
    total: dict[str, float] = {}
    for guess in (g for d in found for g in d.guesses):
        total[guess.kind] = total.get(guess.kind, 0.0) + guess.score
        if guess.kind not in best or guess.score > best[guess.kind].score:
            best[guess.kind] = guess
    ranked = [Guess(k, total[k] / len(found), best[k].because) for k in best]
    return tuple(sorted(ranked, key=lambda g: (-g.score, -firsts[g.kind], g.kind)))


def _describe(
    shape: Shape,
    state: AttentionState,
    made: Reference,
    number: Callable[[int], int],
    guesses: tuple[Guess, ...],
    keys: Keys,
) -> Diagnosis:
    """Find the places and say it; `number` names a head."""
    metric = "out" if float(shape.used_out.max()) >= float(shape.used_lse.max()) else "lse"
    used = shape.used_out if metric == "out" else shape.used_lse
    i, k = divmod(int(used.argmax()), used.shape[1])
    first_i, first_k = min((shape.used > 1).nonzero().tolist(), key=lambda at: int(made.rows[at[0]]))
    row = int(made.rows[i])
    if metric == "lse" and state.lse is not None:
        got, expected = float(state.lse[row, number(k)]), float(made.lse[i, k])
    else:
        out, right = state.out[row, number(k)].cpu().double(), made.out[i, k].cpu().double()
        column = int((out - right).abs().nan_to_num(float("inf")).argmax())
        got, expected = float(out[column]), float(right[column])
    first = _place(shape, made, first_i, number(first_k), keys)
    worst = _place(shape, made, i, number(k), keys)
    where = f"{_rows(shape)}{_heads(shape, number)}{_keys(keys.at, shape.case.page_size)}"
    at = f"request {worst.request}, token {worst.token}, head {worst.head}"
    numbers = f"{metric} is {got:.6g} for {expected:.6g} at worst ({float(used[i, k]):.3g} budgets; {at})"
    why = f"looks like {KIND_NAMES[guesses[0].kind]}: {guesses[0].because}" if guesses else "no guess explains it"
    return Diagnosis(metric, float(used[i, k]), first, worst, got, expected, guesses, f"{where}: {numbers}; {why}")


def _place(shape: Shape, made: Reference, i: int, head: int, keys: Keys) -> Place:
    visible, page = int(shape.visible[i]), shape.case.page_size
    one = len(keys.at) == 1 and keys.request == int(shape.request[i])
    at = int(keys.at[0]) if one else visible - 1
    where = (at // page, at % page, at) if visible else (-1, -1, -1)
    return Place(int(shape.request[i]), int(shape.token[i]), int(made.rows[i]), head, *where)


def _rows(shape: Shape) -> str:
    wrong = shape.wrong
    if bool((wrong == shape.empty).all()):
        return "rows without keys"
    if bool(wrong.all()):
        return "every row"
    requests = shape.request[wrong].unique().tolist()
    if len(requests) == 1:
        tokens = shape.token[wrong].tolist()
        span = f"row {tokens[0]}" if len(tokens) == 1 else f"rows {tokens[0]}..{tokens[-1]}"
        return f"{span} of request {requests[0]}"
    named = ", ".join(map(str, requests[:6])) + (", ..." if len(requests) > 6 else "")
    return f"{int(wrong.sum())} of {len(wrong)} rows, of requests {named}"


def _heads(shape: Shape, number: Callable[[int], int]) -> str:
    bad = (shape.used[shape.wrong] > 1).any(0)
    names = ", ".join(str(number(k)) for k in bad.nonzero().flatten().tolist()[:8])
    return "" if bool(bad.all()) else f", head{'s' if int(bad.sum()) > 1 else ''} {names}"


def _keys(keys: Array, page: int) -> str:
    """The key, page or keys that the best guess is about, if they are few."""
    if len(keys) == 1:
        return f", key {keys[0]} (page {keys[0] // page}, position {keys[0] % page})"
    pages = np.unique(keys // page)
    return f", page {pages[0]}" if len(pages) == 1 else ""
