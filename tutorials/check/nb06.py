"""Checkers of notebook 06: pages, splits and merges.

Axes: T query rows, S keys, K rows of a tile, N heads, L KV rank, P nope, R rope, V value.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from check.known import by_name, pair
from check.verdict import checker, judge
from mla.attention import mha_form
from mla.cache import slots_of
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.state import merge as merge_states

Answer = Callable[..., Any]
NAN, INF = float("nan"), float("inf")


@checker
def slots(fn: Answer) -> tuple[bool, str]:
    """Judge `slots(table, start, stop, page_size)`: the slots (stop - start,) of some positions of one request."""
    page = random.choice((3, 4, 8))
    used = random.sample(range(1, 40), 5)
    table = torch.tensor([*used, 2**31 - 1, -7], dtype=torch.int32)
    start, stop = random.randrange(0, 2 * page), random.randrange(3 * page, 5 * page)
    answer = fn(table, start, stop, page)
    if isinstance(answer, list | tuple) and answer and not isinstance(answer[0], Tensor):
        answer = torch.tensor(answer)
    at = torch.arange(start, stop)
    right = slots_of(table, start, stop, page)
    wrong = {
        "those are the positions: a slot goes through the block table": at,
        "those are the pages: a slot is page * page_size + place in the page": table[at // page],
        "the place inside the page is missing": table[at // page] * page,
        "page and place are mixed up: position // page_size says which page, position % page_size where in it": table[
            at % page % 7
        ]
        * page
        + at // page,
        "stop is not included, as in range(start, stop)": slots_of(table, start, stop + 1, page),
        "one position too far: they begin at start and end before stop": slots_of(table, start + 1, stop + 1, page),
    }
    known = by_name(answer, wrong)
    return (False, known) if known else judge(answer, right, right=f"{stop - start} slots, page size {page}")


@checker
def visible(fn: Answer) -> tuple[bool, str]:
    """Judge `visible(query_len, seq_len)`: how many keys each new token sees, bottom-right causal."""
    for query, seq in ((1, random.randint(5, 60)), (random.randint(2, 6), random.randint(9, 30)), (4, 4)):
        answer = fn(query, seq)
        got = torch.as_tensor(answer)
        right = torch.arange(seq - query + 1, seq + 1)
        wrong = {
            "top-left: those are the counts of a fresh prompt, the cached keys are forgotten": torch.arange(query) + 1,
            "one too few: a token sees its own key, which was written before attention runs": right - 1,
            "one too many: seq_len already counts the new tokens": right + 1,
            "every row sees all keys: earlier new tokens would look into the future": torch.full((query,), seq),
        }
        at = f"query_len {query}, seq_len {seq}"
        if got.shape != right.shape:
            return False, f"{at}: {query} counts were asked for, one for each new token, not shape {tuple(got.shape)}"
        ok, why = judge(got.double(), right.double(), {k: w for k, w in wrong.items() if not torch.equal(w, right)})
        if not ok:
            return False, f"{at}: {why}"
    return True, "decode, chunk and fresh prompt"


@checker
def weigh(fn: Answer) -> tuple[bool, str]:
    """Judge `weigh(weights, rows, live)`: weights @ rows without what lies in the rows that are not live."""
    M, K, L = 3, 8, 5
    weights, rows = torch.rand(M, K, dtype=torch.float64), torch.randn(K, L, dtype=torch.float64)
    live = torch.arange(K) < random.randint(3, 6)
    weights = weights * live
    right = weights @ torch.where(live[:, None], rows, 0.0)
    for poison in (0.0, 1e30, NAN, INF):
        answer = fn(weights, torch.where(live[:, None], rows, poison), live)
        ok, why = judge(answer, right)
        if not ok and poison in (0.0, 1e30):
            return False, why
        if not ok:
            asked = "0 * NaN is NaN, and so is 0 * inf: replace the rows (torch.where), do not multiply them away"
            return False, f"with {poison} in the dead rows: {asked}"
    rows[0, 2] = NAN  # a live row that is really broken
    answer = fn(weights, torch.where(live[:, None], rows, NAN), live)
    if bool(torch.isfinite(torch.as_tensor(answer)).all()):
        return False, "a NaN in a LIVE row vanished: nan_to_num hides real errors, choose by `live`, not by NaN"
    return True, "dead rows may hold anything, a NaN in a live row still shows"


@checker
def merge(fn: Answer) -> tuple[bool, str]:
    """Judge `merge(out_a, lse_a, out_b, lse_b)`: the state over the union of two disjoint sets of keys."""
    T, N, V = 2, 3, 5
    out_a, out_b = (torch.randn(T, N, V, dtype=torch.float64) for _ in range(2))
    lse_a, lse_b = (torch.randn(T, N, dtype=torch.float64) for _ in range(2))
    answer = fn(out_a, lse_a, out_b, lse_b)
    if pair(answer, "out and lse"):
        return False, pair(answer, "out and lse")
    right = merge_states(AttentionState(out_a, lse_a), AttentionState(out_b, lse_b)).parts()
    share = lambda a, b: torch.sigmoid(a - b)[..., None]
    mix = lambda w: w * out_a + (1 - w) * out_b
    outs = {
        "that is the plain mean: the half with more weight counts more": mix(0.5),
        "you weigh with 2^lse: these are natural logarithms, use exp": mix(
            share(lse_a * math.log(2), lse_b * math.log(2))
        ),
        "you treat the LSEs as base 2 on the way in: they are natural": mix(
            share(lse_a / math.log(2), lse_b / math.log(2))
        ),
        "the two halves are swapped: a is weighed with b's LSE": mix(share(lse_b, lse_a)),
        "you weigh with the LSE itself: take exp first": (lse_a[..., None] * out_a + lse_b[..., None] * out_b)
        / (lse_a + lse_b)[..., None],
        "divide by the sum of both weights, exp(lse_a) + exp(lse_b)": lse_a.exp()[..., None] * out_a
        + lse_b.exp()[..., None] * out_b,
        "divide by the sum of both weights, w_a + w_b": (lse_a - torch.maximum(lse_a, lse_b)).exp()[..., None] * out_a
        + (lse_b - torch.maximum(lse_a, lse_b)).exp()[..., None] * out_b,
        "you add the outputs: each was already divided by its own denominator": out_a + out_b,
    }
    lses = {
        "out is right, but logs do not add like that: lse = log(exp(lse_a) + exp(lse_b))": lse_a + lse_b,
        "out is right, but your lse is the larger of the two": torch.maximum(lse_a, lse_b),
        "out is right, but your lse is 1.443 x too large: base 2?": right[1] / math.log(2),
        "out is right, but your lse is 0.693 x too small: base 2?": right[1] * math.log(2),
        "out is right, but your lse lacks the maximum that you subtracted": right[1] - torch.maximum(lse_a, lse_b),
    }
    for got, want, wrong in ((answer[0], right[0], outs), (answer[1], right[1], lses)):
        ok, why = judge(got, want, wrong)
        if not ok:
            return False, why
    edges = {
        "LSEs near 900, where exp overflows: subtract the larger one first": (lse_a + 900, lse_b + 900),
        "LSEs near -900, where exp is 0 on both sides: subtract the larger one first": (lse_a - 900, lse_b - 900),
        "one side without keys, (0, -inf): the other side should come back": (lse_a, torch.full_like(lse_b, -INF)),
        "both sides without keys: -inf - -inf is NaN; the answer is 0 and -inf": (torch.full_like(lse_a, -INF),) * 2,
    }
    for why, (a, b) in edges.items():
        x, y = (out * (lse > -INF)[..., None] for out, lse in ((out_a, a), (out_b, b)))
        got, want = fn(x, a, y, b), merge_states(AttentionState(x, a), AttentionState(y, b)).parts()
        if not all(torch.allclose(g, w, atol=1e-9) for g, w in zip(got, want, strict=True)):
            return False, why
    return True, "also where exp overflows, and with one or both sides empty"


@checker
def in_chunks(fn: Answer) -> tuple[bool, str]:
    """Judge `in_chunks(attend, keys, row_kv_lens, cap)`: attention over all keys, at most `cap` of them at once."""
    T, N, L, P, R, V = 5, 3, 9, 4, 2, 6
    keys = random.randint(33, 47)
    cap = random.choice((7, 10, 16))
    bounds = torch.tensor([0, 3, keys // 2, keys - 1, keys])
    z = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    q, kv_c, k_pe = Query(z(T, N, P), z(T, N, R)), z(keys, L), z(keys, R)
    up = UpProjection(z(L, N, P) / 3, z(L, N, V) / 3)
    whole = mha_form(q, kv_c, k_pe, up, bounds, 0.5)
    seen: list[tuple[int, int]] = []
    trouble: list[str] = []

    def attend(start: int, stop: int, visible: Any) -> AttentionState:
        visible = torch.as_tensor(visible)
        seen.append((start, stop))
        if not 0 <= start < stop <= keys:
            trouble.append(f"keys {start} .. {stop} were asked for, there are {keys}: the last chunk may be short")
        if bool((visible < 0).any()):
            trouble.append("a row sees a negative number of keys: clamp at 0")
        if bool((visible > stop - start).any()):
            shifted = "count from the chunk's first key and clamp at its length"
            trouble.append(f"a row sees {int(visible.max())} keys of a chunk of {stop - start}: {shifted}")
        if start and torch.equal(visible, bounds.clamp(0, stop - start)):
            trouble.append(f"row_kv_lens counts from key 0, this chunk starts at key {start}: subtract that")
        part = slice(start, stop)
        bound = visible.clamp(0, kv_c[part].shape[0])
        return mha_form(q, kv_c[part], k_pe[part], up, bound, 0.5)

    answer = fn(attend, keys, bounds, cap)
    if pair(answer, "a merged state"):
        return False, "return the merged AttentionState (or out and lse)"
    if not seen:
        return False, "attend was never called"
    largest = max(stop - start for start, stop in seen)
    if largest > cap:
        return False, f"a chunk had {largest} keys, the workspace holds {cap}"
    covered = sorted(k for start, stop in seen for k in range(start, min(stop, keys)))
    if trouble:
        return False, trouble[0]
    if covered != list(range(keys)):
        missing, twice = sorted(set(range(keys)) - set(covered)), len(covered) - len(set(covered))
        return False, f"keys {missing[:5]} were never read" if missing else f"{twice} keys were read twice"
    for name, got, want in zip(("out", "lse"), answer, whole, strict=True):
        ok, why = judge(got, want)
        if not ok:
            return False, f"the chunks are right, the merged {name} is not: {why}"
    return True, f"{keys} keys in {len(seen)} chunks of at most {cap}, equal to one pass"
