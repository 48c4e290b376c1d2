"""Checks of notebook 09, bring your own tier.

Axes: T new tokens, n query rows of one request, S its keys, N heads, L KV rank, R rope, V value.
"""

import math
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from check.verdict import checker, judge
from mla.adapters import FunctionTier, from_attend
from mla.cache import FloatRows, slots_of
from mla.conformance import run_case, suite
from mla.conformance.cases import roundings
from mla.need import Need
from mla.projections import absorb_query, project_values
from mla.state import AttentionState

Answer = Callable[..., Any]
NAMES = ("verify_4", "small_prefill", "mixed_small", "rank_without_keys", "padded_tail", "small_decode", "one_key")
INF = float("inf")


def _first_failure(tier: FunctionTier) -> str:
    """What is wrong with a tier in the first case of some that fails, "" if all are right."""
    cases = {c.batch.name: c for c in suite("smoke") if c.batch.name in NAMES and c.lse and roundings(c) <= 300_000}
    for case in cases.values():
        result = run_case(tier, case, diagnosed=False)
        if not result.ok:
            found = run_case(tier, case).diagnosis
            guess = found.guesses[0].because if found and found.guesses else result.detail
            used = max(result.used_out, result.used_lse)
            return f"{result.status} in case {case.batch.name}, {used:.3g} budgets: {guess}"
    return ""


@checker
def mend(answer: Answer, source: str) -> tuple[bool, str]:
    """Judge `mend(source)`: the text of theirs.py, repaired."""
    text = answer(source)
    if not isinstance(text, str):
        return False, f"return the text of the file, not a {type(text).__name__}"
    if text == source:
        return False, "nothing is changed: is the text that you replace in it, letter by letter?"
    module = ModuleType("mended")
    try:
        exec(compile(text, "mended.py", "exec"), module.__dict__)
        tier = from_attend("mended", module.attend)
    except Exception as error:
        return False, f"the file does not load any more: {type(error).__name__}: {error}"
    wrong = _first_failure(tier)
    return not wrong, wrong or "row i sees row_kv_lens[i] keys, not those of the request's first row"


@checker
def adapt(answer: Answer) -> tuple[bool, str]:
    """Judge `adapt(out, lse)`: base 2 and +inf to natural and -inf."""
    T, N, V = 4, 3, 5
    right, out = torch.randn(T, N, dtype=torch.float64) * 4, torch.randn(T, N, V, dtype=torch.float64)
    empty = torch.zeros(T, N, dtype=torch.bool)
    empty[random.randrange(T)] = True
    kernel = torch.where(empty, INF, right / math.log(2))
    garbage = torch.where(empty[..., None], float("nan"), out)
    got = answer(garbage, kernel)
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(x, Tensor) for x in got)):
        return False, "return the two tensors: (out, lse)"
    if got[1].shape != (T, N) or got[0].shape != (T, N, V):
        return False, f"out is {tuple(got[0].shape)} and lse {tuple(got[1].shape)}; the shapes do not change"
    live = ~empty
    wrong = {
        "the LSE is still in base 2": kernel[live],
        "the wrong way: 1.4427 x too large twice now; base 2 to natural multiplies with ln 2": kernel[live]
        / math.log(2),
        "0.693 x too small: was it natural before you multiplied?": right[live] * math.log(2),
        "2 ** lse is the sum itself, and ours is its logarithm": 2 ** kernel[live],
    }
    ok, why = judge(got[1][live], right[live], wrong)
    if not ok:
        return False, f"where keys are seen: {why}"
    if not bool((got[1][empty] == -INF).all()):
        return False, f"a row without keys has lse {float(got[1][empty][0])}, ours is -inf"
    if bool(torch.isnan(got[0]).any()):
        return False, "a row without keys still has NaN in its output: multiplying with 0 keeps NaN, replace it"
    if not bool((got[0][empty] == 0).all()):
        return False, "a row without keys has an output other than 0"
    if not torch.equal(got[0][live], out[live]):
        return False, "outputs of rows that see keys were right and have changed"
    return True, "merge takes these two now"


@checker
def attend_rows(answer: Answer) -> tuple[bool, str]:
    """Judge `attend_rows(query, rows, L, visible)` on numbers, then inside a tier on conformance cases."""
    n, N, L, R, S = 3, 2, 7, 4, 9
    query, rows = torch.randn(n, N, L + R, dtype=torch.float64), torch.randn(S, L + R, dtype=torch.float64)
    visible = torch.tensor([S - 2, S - 1, S])
    want = _right(query, rows, L, visible)
    got = answer(query, rows, L, visible)
    if not (isinstance(got, tuple) and len(got) == 2):
        return False, "return two tensors: out_latent, lse"
    everything, fewer = torch.full((n,), S), visible - 1
    wrong = {
        "every row sees all keys: mask those from visible[i] on": _right(query, rows, L, everything),
        "one key too few: keys 0 .. visible[i] - 1 are seen": _right(query, rows, L, fewer),
        "one key too many: keys 0 .. visible[i] - 1 are seen": _right(query, rows, L, (visible + 1).clamp(max=S)),
        "every row sees what the first one sees": _right(query, rows, L, visible[:1].expand(n)),
        "scaled once more: the query is scaled already": _right(query * (L + R) ** -0.5, rows, L, visible),
        "the rope part is missing in the scores": _right(query[..., :L], rows[:, :L], L, visible),
        "the values are the first L columns, not the last": _right(query, rows, L, visible, rows[:, R:]),
    }
    for i, name in enumerate(("out_latent", "lse")):
        named = {why: value[i] for why, value in wrong.items()}
        if name == "lse":
            named["in base 2: 1.4427 x too large"] = want[1] / math.log(2)
            named["the largest score, not the logarithm of the sum"] = _scores(query, rows, visible).amax(-1)
        ok, why = judge(got[i], want[i], named)
        if not ok:
            return False, f"{name}: {why}"
    none = answer(query, rows, L, torch.tensor([0, 2, S]))
    if bool(torch.isnan(none[0][0]).any() or torch.isnan(none[1][0]).any()):
        return False, "NaN in a row that sees no key: -inf minus -inf"
    if bool((none[0][0] != 0).any() or (none[1][0] != -INF).any()):
        return False, f"a row that sees no key gives {none[0][0, 0, 0]:.3g} and {none[1][0, 0]:.3g}, not 0 and -inf"
    failure = _first_failure(from_attend("yours", _around(answer)))
    return not failure, failure or "and as a tier it passes the cases, too"


@checker
def why_not(answer: Answer) -> tuple[bool, str]:
    """Judge `why_not(need)`: pages of 64, float32 or bfloat16."""
    sizes = dict(N=2, L=8, P=5, R=4, V=6, softmax_scale=0.3, layout=FloatRows(8, 4, torch.float32))
    ask = lambda page, dtype: answer(Need(**sizes, page_size=page, dtype=dtype))
    for dtype in (torch.float32, torch.bfloat16):
        found = ask(64, dtype)
        if isinstance(found, bool | str):
            return False, f"return a list of sentences, not a {type(found).__name__}"
        if list(found):
            return False, f"pages of 64 and {dtype} are served, and it says {next(iter(found))!r}"
    for page, dtype, words in (
        (random.choice([16, 32, 128]), torch.float32, ["page"]),
        (64, random.choice([torch.float16, torch.float64]), ["dtype"]),
        (16, torch.float16, ["page", "dtype"]),
    ):
        found = list(ask(page, dtype))
        if not found:
            return False, f"pages of {page} and {dtype} get no reason: that would be a wrong answer later"
        if len(found) != len(words):
            return False, f"pages of {page} and {dtype}: {len(found)} sentences for {len(words)} reasons"
        text = " ".join(map(str, found))
        values = ([str(page), "64"] if "page" in words else []) + (
            [str(dtype).removeprefix("torch.")] if "dtype" in words else []
        )
        lacking = [value for value in values if value not in text]
        if lacking:
            return False, f"{text!r} does not name {', '.join(lacking)}: say what came and what is possible"
    return True, "every tier of this repository answers like that"


def _scores(query: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    hidden = torch.arange(len(rows)) >= visible[:, None, None]
    return (query @ rows.T).masked_fill(hidden, -INF)


def _right(query: Tensor, rows: Tensor, L: int, visible: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scores = _scores(query, rows, visible)
    return scores.softmax(-1) @ (rows[:, :L] if values is None else values), scores.logsumexp(-1)


def _around(attend_rows: Answer) -> Callable[..., AttentionState]:
    """The bookkeeping of a tier around the reader's function."""

    def attend(q: Any, cache: Any, batch: Any, up: Any, need: Any) -> AttentionState:
        state = AttentionState.empty(batch.num_tokens, need.N, need.V, dtype=need.compute_dtype)
        out, lse = state.parts()
        query = torch.cat([absorb_query(q.nope, up.W_UK), q.pe.to(need.compute_dtype)], dim=-1) * need.softmax_scale
        first = 0
        for b, (new, total) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
            at = slice(first, first := first + new)
            rows = torch.cat(cache.read(slots_of(batch.block_table[b], 0, total, batch.page_size)), dim=-1)
            latent, lse[at] = attend_rows(query[at], rows.to(query.dtype), need.L, batch.row_kv_lens[at])
            out[at] = project_values(latent, up.W_UV)
        return state

    return attend
