"""Checkers of notebook 08: five puzzles of a decode kernel, in Triton's interpreter and float32.

Axes: B requests, S keys, N heads, L KV rank, R rope. Rows past S are poison. Behind every tensor lies room of its own,
so that a kernel without masks reads and writes nothing foreign, and is seen to.
"""

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from check.known import by_name
from check.verdict import AnswerRaised, NoAnswer, Verdict, checker, judge

N, L, R, HEADS, BLOCK, PAGE, SPARE = 5, 32, 16, 16, 16, 8, 20
ROOM = 2 * HEADS * (L + R)  # numbers behind a tensor: more than a tile of heads without a mask goes too far
UNTOUCHED = -54321.0
NAN, INF = float("nan"), float("inf")
PUT_NO_NAN = "0 * NaN is NaN: load rows past the end as 0 (mask=, other=0.0)"


def puzzle(body: Callable[[Any], tuple[bool, str]]) -> Callable[[Any], Verdict]:
    """Make a check of a kernel: `body(kernel) -> (ok, why)`, with the verdicts of `check.verdict`."""
    inner = checker(lambda box: body(box[0]))

    @functools.wraps(body)
    def check(kernel: Any) -> Verdict:
        return inner(None if kernel is None or kernel is ... else [kernel])

    return check


def launch(kernel: Any, grid: tuple[int, ...], results: list[Tensor], *args: Any, **constants: Any) -> None:
    """Run a kernel; raises NoAnswer where it wrote nothing, AnswerRaised with the reason where it failed."""
    if not hasattr(kernel, "__getitem__"):
        raise AnswerRaised("this is no kernel: keep the line @triton.jit above it")
    try:
        kernel[grid](*args, **constants)
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise AnswerRaised(f"the kernel raised {type(cause).__name__}: {str(cause).strip()[:150]}") from error
    if all(bool((x == UNTOUCHED).all()) for x in results):
        raise NoAnswer


def untouched(*shape: int) -> Tensor:
    """Return memory for a result, flat, with room behind it."""
    return torch.full((math.prod(shape) + ROOM,), UNTOUCHED)


def past(result: Tensor, *shape: int) -> bool:
    """Whether something was written behind a result of this shape."""
    return not bool((result[math.prod(shape) :] == UNTOUCHED).all())


def roomy(*shape: int) -> Tensor:
    """Return random numbers of a shape, with room behind them."""
    return torch.randn(math.prod(shape) + ROOM)[: math.prod(shape)].view(shape)


def problem(S: int, heads: int = N) -> tuple[Tensor, Tensor, float]:
    """Return q (heads, L + R), rows (S + SPARE, L + R) with NaN past S, and a scale."""
    rows = torch.randn(S + SPARE, L + R)
    rows[S:] = NAN
    return roomy(heads, L + R), rows, 0.2 + random.random() / 5


@puzzle
def scores(kernel: Any) -> tuple[bool, str]:
    """Judge puzzle 1: the scores of one head, up to BLOCK keys."""
    S = random.randint(9, BLOCK - 2)
    q, rows, scale = problem(S, 1)
    result = untouched(S)
    launch(kernel, (1,), [result], q, rows, result, scale, S, L=L, R=R, BLOCK=BLOCK)
    right = rows[:S] @ q[0] * scale
    if past(result, S):
        return False, f"something was written past score {S - 1}: mask the store"
    if bool((result[:S] == UNTOUCHED).any() or result[:S].isnan().any()):
        return False, "some scores are missing or NaN: all S of them come from one tl.arange(0, BLOCK)"
    latent = rows[:S, :L] @ q[0, :L]
    wrong = {
        "the scale is missing": right / scale,
        "the rope part is missing: the last R of the L + R numbers": latent * scale,
        "only the rope part is there": right - latent * scale,
        "only the latent part is scaled": latent * scale + rows[:S, L:] @ q[0, L:],
        "rows lie L + R numbers apart, not L": torch.stack(
            [rows.flatten()[k * L : k * L + L + R] @ q[0] for k in range(S)]
        )
        * scale,
    }
    return judge(result[:S], right, wrong, f"{S} keys, none of the {SPARE} poisoned rows was used")


@puzzle
def heads(kernel: Any) -> tuple[bool, str]:
    """Judge puzzle 2: the scores of all heads, one tile of keys."""
    S = random.randint(9, BLOCK - 2)
    q, rows, scale = problem(S)
    result = untouched(N, S)
    launch(kernel, (1,), [result], q, rows, result, scale, S, N, L=L, R=R, HEADS=HEADS, BLOCK=BLOCK)
    if past(result, N, S):
        return False, f"something was written past head {N - 1}: mask the store by head and by key"
    got, right = result[: N * S].view(N, S), q @ rows[:S].T * scale
    latent = q[:, :L] @ rows[:S, :L].T * scale
    wrong = {
        "the scale is missing": right / scale,
        "the rope part is missing: a second tl.dot": latent,
        "only the rope part is there": right - latent,
        "heads and keys are swapped: head h, key k goes to h * S + k": right.T.reshape(N, S),
    }
    if bool((got == UNTOUCHED).any() or got.isnan().any()):
        return False, "some scores are NaN or were not written: head h, key k goes to h * S + k; load dead rows as 0"
    return judge(got, right, wrong, f"{N} heads of a tile of {HEADS}, {S} keys of a tile of {BLOCK}")


def attention(q: Tensor, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out (N, L) and natural lse (N,) in float64 of q (N, L + R) over live rows (S, L + R); 0, -inf for none."""
    if not len(rows):
        return torch.zeros(len(q), L, dtype=torch.float64), torch.full((len(q),), -INF, dtype=torch.float64)
    s = q.double() @ rows.double().T * scale
    return torch.softmax(s, -1) @ rows[:, :L].double(), torch.logsumexp(s, -1)


def folded(q: Tensor, rows: Tensor, scale: float, fault: str) -> Tensor:
    """Return out (N, L) of an online softmax over tiles with one thing wrong."""
    peak, total = torch.full((len(q),), -INF, dtype=torch.float64), torch.zeros(len(q), dtype=torch.float64)
    acc = torch.zeros(len(q), L, dtype=torch.float64)
    dead = -len(rows) % BLOCK
    rows = torch.cat([rows.double(), torch.zeros(dead, L + R, dtype=torch.float64)])
    s = q.double() @ rows.T * scale
    if fault != "dead keys" and dead:
        s[:, -dead:] = -INF
    for k in range(0, len(rows), BLOCK):
        tile, values = s[:, k : k + BLOCK], rows[k : k + BLOCK, :L]
        new = torch.maximum(peak, tile.amax(-1))
        decay = torch.exp(peak - new) if k else torch.zeros_like(new)
        weights = torch.exp(tile - new[:, None])
        total = total * (1 if fault == "total" else decay) + weights.sum(-1)
        acc = acc * (1 if fault == "acc" else decay[:, None]) + weights @ values
        if fault == "last":
            total, acc = weights.sum(-1), weights @ values
        peak = new
    return acc if fault == "divide" else acc / total[:, None]


@puzzle
def attend(kernel: Any) -> tuple[bool, str]:
    """Judge puzzle 3: attention of one request over several tiles."""
    for S in (random.randint(2 * BLOCK + 1, 3 * BLOCK - 1), random.randint(3, BLOCK - 1), 2 * BLOCK):
        q, rows, scale = problem(S)
        q *= 2  # in place: the room stays behind it
        out, lse = untouched(N, L), untouched(N)
        launch(kernel, (1,), [out, lse], q, rows, out, lse, scale, S, N, L=L, R=R, HEADS=HEADS, BLOCK=BLOCK)
        if past(out, N, L) or past(lse, N):
            return False, f"something was written past head {N - 1}: mask both stores by head"
        ok, why = _state(out[: N * L].view(N, L), lse[:N], q, rows[:S], scale)
        if not ok:
            return False, f"{S} keys: {why}"
    return True, "several tiles, one short tile, full tiles; out and natural LSE"


def _state(out: Tensor, lse: Tensor, q: Tensor, rows: Tensor, scale: float) -> tuple[bool, str]:
    right, right_lse = attention(q, rows, scale)
    if bool((out == UNTOUCHED).any() or (lse == UNTOUCHED).any()):
        return False, "out or lse was not written everywhere: out is (N, L), lse (N,)"
    if bool(out.isnan().any()):
        return False, f"out has NaN. Past the end: {PUT_NO_NAN}. At the start: -inf - -inf is NaN"
    wrong = {
        "acc is not rescaled when the maximum grows": folded(q, rows, scale, "acc"),
        "total is not rescaled when the maximum grows": folded(q, rows, scale, "total"),
        "divide acc by total at the end": folded(q, rows, scale, "divide"),
        "keys past the end count, with score 0: their scores must be -inf": folded(q, rows, scale, "dead keys"),
        "only the last tile is left: add to acc and total": folded(q, rows, scale, "last"),
        "only one tile was read: loop over S": attention(q, rows[:BLOCK], scale)[0],
        "the last key is missing: keys 0 .. S - 1 are live": attention(q, rows[:-1], scale)[0],
        "the first key is missing: keys 0 .. S - 1 are live": attention(q, rows[1:], scale)[0],
        "exp2 of scores that lack the factor log2(e)": attention(q, rows, scale * math.log(2))[0],
        "exp of scores that carry the factor log2(e)": attention(q, rows, scale / math.log(2))[0],
        "the rope part is missing": attention(torch.cat([q[:, :L], q[:, L:] * 0], 1), rows, scale)[0],
        "the scale is missing": attention(q, rows, 1.0)[0],
    }
    same = {name: x for name, x in wrong.items() if not torch.allclose(x, right, rtol=1e-3, atol=1e-3)}
    ok, why = judge(out, right, same)
    if not ok:
        return ok, why
    peak = (q.double() @ rows.double().T * scale).amax(-1)
    hints = {
        "your lse is 1.443 x too large: base 2? Multiply by ln 2 at the end": right_lse / math.log(2),
        "your lse is 0.693 x too small: multiplied by ln 2 once too often?": right_lse * math.log(2),
        "your lse lacks the maximum": right_lse - peak,
        "your lse is the maximum alone: add the logarithm of total": peak,
        "peak is in base 2 and the logarithm natural, or the other way: convert both": peak / math.log(2)
        + (right_lse - peak),
    }
    ok, why = judge(lse, right_lse, hints)
    return ok, why if ok else f"out is right, lse is not: {why}"


@puzzle
def paged(kernel: Any) -> tuple[bool, str]:
    """Judge puzzle 4: several requests over pages, with foreign numbers, then NaN, in what nobody owns."""
    lens = [random.randint(17, 30), random.randint(1, 7), random.randint(9, 16)]
    B, pages, width = len(lens), 12, 6
    free = random.sample(range(pages), pages)
    table = torch.full((B, width), free.pop(), dtype=torch.int32)  # nobody's page
    for b, S in enumerate(lens):
        for i in range(-(-S // PAGE)):
            table[b, i] = free.pop()
    for poison in (None, NAN):
        cache = torch.randn(pages, PAGE, L + R)
        flat, at = cache.view(-1, L + R), [torch.arange(S) for S in lens]
        slots = [table[b, k // PAGE].long() * PAGE + k % PAGE for b, k in enumerate(at)]
        if poison is not None:
            owned = torch.zeros(len(flat), dtype=torch.bool)
            owned[torch.cat(slots)] = True
            flat[~owned] = poison
        q, scale = roomy(B, N, L + R), 0.4 + random.random() / 3
        out, lse = untouched(B, N, L), untouched(B, N)
        where = (cache, table, torch.tensor(lens, dtype=torch.int32))
        sizes = {"PAGE": PAGE, "L": L, "R": R, "HEADS": HEADS, "BLOCK": BLOCK}
        launch(kernel, (B,), [out, lse], q, *where, out, lse, scale, width, N, **sizes)
        if past(out, B, N, L) or past(lse, B, N):
            return False, "something was written past the last request: mask both stores by head"
        states = [(out[b * N * L : (b + 1) * N * L].view(N, L), lse[b * N : (b + 1) * N]) for b in range(B)]
        for b, (got, _) in enumerate(states):
            if bool((got == UNTOUCHED).all()):
                return False, f"nothing was written for request {b}: its first row is b * N, and b is tl.program_id(0)"
        for b, S in enumerate(lens):
            got, z = states[b]
            if poison is None:
                lost = _lost(flat, table, b, S, q)
                near = {
                    why: _attended(*x, scale) for why, x in lost.items() if not _near(x, q[b], flat[slots[b]], scale)
                }
                known = by_name(got, near, 1e-3)
                if known:
                    return False, f"request {b}: {known}"
            ok, why = _state(got, z, q[b], flat[slots[b]], scale)
            if not ok:
                return False, f"request {b}, {S} keys: {why}"
    return True, f"requests of {lens} keys on shuffled pages of {PAGE}, all else NaN"


def _lost(flat: Tensor, table: Tensor, b: int, S: int, q: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Queries and rows that request b meets if an address is wrong."""
    at = torch.arange(S)
    page, place = table[b].long()[at // PAGE], at % PAGE
    first = table[0].long()[at // PAGE]
    return {
        "the block table is ignored: a position is not a slot": (q[b], flat[:S]),
        "every key is read from the first place of its page": (q[b], flat[page * PAGE]),
        "the first page is read for every key": (q[b], flat[table[b, 0].long() * PAGE + place]),
        "request 0's pages are read for every request": (q[b], flat[first * PAGE + place]),
        "request 0's query is used for every request": (q[0], flat[page * PAGE + place]),
        "a page is PAGE rows: page * PAGE + place": (q[b], flat[(page + place).clamp(max=len(flat) - 1)]),
    }


def _attended(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    return attention(q, rows, scale)[0]


def _near(other: tuple[Tensor, Tensor], q: Tensor, rows: Tensor, scale: float) -> bool:
    """Whether a wrong address leads to the right numbers here, as for a request of one page."""
    return torch.allclose(_attended(*other, scale), _attended(q, rows, scale), rtol=1e-2, atol=1e-2)


@puzzle
def combine(kernel: Any) -> tuple[bool, str]:
    """Judge puzzle 5: merge partial states whose LSEs are in base 2."""
    splits = 4
    part, part_lse = roomy(splits, N, L), roomy(splits, N)
    part_lse *= 2
    part_lse[1, 1] = part_lse[3, 1] = -INF  # this head has keys in two splits only
    part_lse[:, 2] = -INF  # and this one in none
    part[part_lse == -INF] = 0.0
    part_lse[:, 3] += 300
    out, lse = untouched(N, L), untouched(N)
    launch(kernel, (1,), [out, lse], part, part_lse, out, lse, N, L=L, SPLITS=splits, HEADS=HEADS)
    if past(out, N, L) or past(lse, N):
        return False, f"something was written past head {N - 1}: mask the stores by head"
    out, lse = out[: N * L].view(N, L), lse[:N]
    natural = part_lse.double() * math.log(2)
    mix = lambda z: (torch.softmax(z, 0)[..., None] * part.double()).sum(0)
    easy, right, z = [0, 4], mix(natural), torch.logsumexp(natural, 0)
    wrong = {
        "that is the plain mean: weigh with 2^lse": part.double().mean(0)[easy],
        "you weigh with exp(lse): these LSEs are in base 2, use exp2": mix(part_lse.double())[easy],
        "divide by the sum of the weights": (torch.exp2(part_lse.double() - part_lse.amax(0))[..., None] * part).sum(0)[
            easy
        ],
        "you add the parts: each was divided by its own denominator": part.double().sum(0)[easy],
        "only the last split is left: add to acc and total": part[-1].double()[easy],
    }
    lses = {
        "your lse is 1.443 x too large: base 2? The result is natural": z[easy] / math.log(2),
        "your lse is 0.693 x too small: multiplied by ln 2 once too often?": z[easy] * math.log(2),
        "your lse is the largest of the parts": natural.amax(0)[easy],
        "your lse lacks the maximum": (z - natural.amax(0))[easy],
        "the maximum is added to the lse, but was not subtracted before exp2": (z + natural.amax(0))[easy],
    }
    for got, want, names, which in ((out, right, wrong, "out"), (lse, z, lses, "lse")):
        ok, why = judge(got[easy], want[easy], names)
        if not ok:
            return False, f"{which}: {why}"
    if not judge(out[3], right[3])[0] or not judge(lse[3], z[3])[0]:
        return False, "LSEs near 300: subtract the maximum before exp2"
    if not judge(out[1], right[1])[0] or not judge(lse[1], z[1])[0]:
        return False, "a head with keys in two of four splits: an LSE of -inf has weight 0 and must make no NaN"
    if not bool((out[2] == 0).all() and lse[2] == -INF):
        return False, f"a head without any key gave out {float(out[2, 0]):g}, lse {float(lse[2]):g}, not 0 and -inf"
    return True, f"{splits} splits; heads with keys in all, some and none of them"
