"""What the shape of an error says about its cause, before anything is recomputed: which rows, heads and places.

Axes: T new tokens (packed over requests), N heads, V value; n rows and h heads of the reference.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mla.accuracy import Reference
from mla.conformance.cases import Case
from mla.state import AttentionState

SMALL = 2.0**-3  # relative errors below are those of lost bits
Clue = tuple[str, float, str]


@dataclass(frozen=True, eq=False)
class Shape:
    """Errors of all compared rows and heads: used_out, used_lse (n, h) are error / budget, size_out and size_lse (n, h)
    are relative error of out and absolute error of the LSE; finite (n, h), nan (n,) where all of a row's output is;
    visible, seq_len, query_len, token and request are (n,) of the rows.
    """

    case: Case
    used_out: Tensor
    used_lse: Tensor
    size_out: Tensor
    size_lse: Tensor
    finite: Tensor
    infinite: bool
    nan: Tensor
    empty: Tensor
    visible: Tensor
    seq_len: Tensor
    query_len: Tensor
    token: Tensor
    request: Tensor

    @cached_property
    def used(self) -> Tensor:
        """The larger error / budget (n, h)."""
        return torch.maximum(self.used_out, self.used_lse)

    @cached_property
    def wrong(self) -> Tensor:
        """Rows (n,) with a number outside its budget."""
        return (self.used > 1).any(1)

    def only(self, rows: Tensor) -> bool:
        """Whether all wrong rows are among `rows` (n,), and some row that sees keys is not."""
        live = ~self.empty
        return (
            bool((self.wrong & live).any())
            and not bool((self.wrong & ~rows & live).any())
            and bool((live & ~rows).any())
        )

    def share(self, rows: Tensor) -> float:
        """Share of the live rows among `rows` (n,) that are wrong."""
        rows = rows & ~self.empty
        return float((self.wrong & rows).sum() / rows.sum()) if bool(rows.any()) else 0.0


def make_shape(case: Case, state: AttentionState, made: Reference, heads: tuple[int, ...] | None) -> Shape:
    """Measure state.out (T, N, V), state.lse (T, N) or None against the reference's rows and heads."""
    wide = lambda x: x.detach().to("cpu", torch.float64)
    rows, batch = made.rows.cpu(), case.batch
    pick = slice(None) if heads is None else list(heads)
    out, right, empty = wide(state.out)[rows][:, pick], wide(made.out), made.empty.cpu()
    finite = torch.isfinite(out).all(-1)
    error = (out - right).square().mean(-1).sqrt()
    used_out = _used(error, wide(made.out_limit), empty, finite)
    size_out = error / right.square().mean(-1).sqrt()
    used_lse, size_lse = torch.zeros_like(used_out), torch.zeros_like(used_out)
    if state.lse is not None:
        lse, there = wide(state.lse)[rows][:, pick], wide(made.lse)
        real = ~torch.isnan(lse) & (lse != float("inf"))
        size_lse = torch.where(lse == there, 0.0, (lse - there).abs())
        used_lse = _used(size_lse, wide(made.lse_limit), empty, real)
        finite &= real
    owners = [b for b, q in enumerate(batch.query_lens) for _ in range(q)] + [-1] * batch.pad_tokens
    starts = {b: owners.index(b) for b in set(owners)}
    bounds = [*batch.visible(), *[0] * batch.pad_tokens]
    column = lambda f: torch.tensor([f(int(r)) for r in rows], dtype=torch.int64)
    length = lambda lens, r: lens[owners[r]] if owners[r] >= 0 else 0
    return Shape(
        case, used_out, used_lse, size_out, size_lse, finite, bool(torch.isinf(out).any()),
        torch.isnan(out).all(-1).all(-1), empty,
        column(lambda r: bounds[r]),
        column(lambda r: length(batch.seq_lens, r)), column(lambda r: length(batch.query_lens, r)),
        column(lambda r: r - starts[owners[r]]), column(lambda r: owners[r]),
    )  # fmt: skip


def _used(error: Tensor, limit: Tensor, empty: Tensor, finite: Tensor) -> Tensor:
    exact = torch.where(error == 0, 0.0, float("inf"))
    used = torch.where(empty[:, None] | (limit == 0), exact, error / limit)
    return torch.where(finite, used, float("inf")).nan_to_num(float("inf"), float("inf"))


def _not_finite(s: Shape, live: Tensor, bad: Tensor) -> Iterator[Clue]:
    """Clues of live rows that are not finite, bad (m,) among them."""
    partial, at_end = (s.seq_len % s.case.page_size > 0)[live], (s.visible == s.seq_len)[live]
    lse_right = s.case.lse and bool((s.used_lse[live] <= 1).all())
    if lse_right and bool(s.infinite):
        yield "precision", 0.6, "the output is infinite and the LSE is right: weights overflow"
    if lse_right and bool((bad & ~partial).any()):
        yield "precision", 0.6, "the output is not finite, the LSE is right and no page is partial: weights overflow"
    elif lse_right:
        yield "tail", 0.5, "the output is not finite and the LSE is right: what has weight 0 is not finite"
    elif bool((bad & ~at_end).any()) and not bool((bad & at_end).any()):
        yield "empty", 0.4, "rows that see less than their request's keys are not finite"
    elif bool((bad <= partial).all()):
        yield "tail", 0.5, "rows of requests with a partial last page are not finite"
    else:
        yield "page", 0.5, "rows are not finite that see no end of a page: other slots are read"
    for kind in ("tail", "precision", "empty", "page", "memory"):
        yield kind, 0.15, f"{100 * float(bad.double().mean()):.0f} % of the rows are not finite"


def clues(s: Shape) -> Iterator[Clue]:
    """Yield (kind, how much it says, 0 to 1, and a sentence) for what the shape of an error suggests."""
    live = ~s.empty
    if bool((s.wrong & s.empty).any()):
        alone = not bool((s.wrong & live).any())
        padding = s.request < 0
        if alone and not bool((s.wrong & s.empty & ~padding).any()) and bool(s.nan[padding].all()):
            yield "memory", 1.01, "the output of rows that belong to no request is NaN, as memory that nobody wrote"
        yield "empty", 1.0 if alone else 0.3, f"rows without keys are wrong{', and only they' if alone else ''}"
    if not bool((s.wrong & live).any()):
        return
    yield from _which_output(s, live)
    yield from _which_rows(s, live)
    yield from _which_heads(s, live)
    yield from _how_large(s, live)


def _which_output(s: Shape, live: Tensor) -> Iterator[Clue]:
    out, lse = (s.used_out[live] > 1), (s.used_lse[live] > 1)
    if s.case.lse and bool(lse.any()) and not bool(out.any()):
        strong = float(s.used_lse[live].max()) > 20
        yield "lse", 0.7 if strong else 0.4, "the output is right and the LSE is wrong"
    if s.case.lse and bool(out.any()) and not bool(lse.any()) and bool(s.finite[live].all()):
        for kind, much in (("value", 0.5), ("merge", 0.35), ("head", 0.2), ("precision", 0.15)):
            yield kind, much, "the LSE is right and the output is wrong: the weights are right, not what they weigh"


def _which_rows(s: Shape, live: Tensor) -> Iterator[Clue]:
    page, several = s.case.page_size, s.request[live].unique().numel() > 1
    partial = s.seq_len % page > 0
    at_end = s.visible == s.seq_len
    long_query = s.query_len > 1
    if s.only(partial & at_end):
        yield "tail", 0.5 * s.share(partial & at_end), "wrong are rows that see the partial last page of their request"
    elif s.only(at_end):
        yield "tail", 0.35 * s.share(at_end), "wrong are rows that see the last key of their request"
    finite = bool(s.finite[live].all())
    if s.only(~at_end) and finite:
        yield "mask", 0.6 * s.share(~at_end), "wrong are rows before the last one of their query, which see less"
    elif s.only(long_query) and finite:
        yield "mask", 0.35 * s.share(long_query), "wrong are rows of queries longer than one token"
    if s.only(s.visible > page):
        for kind, much in (("page", 0.4), ("split", 0.25), ("merge", 0.25)):
            yield kind, much * s.share(s.visible > page), "wrong are rows with more than one page"
    if several and s.request[s.wrong & live].unique().numel() == 1:
        for kind, much in (("batch", 0.3), ("tail", 0.1), ("split", 0.1)):
            yield kind, much, "wrong are the rows of one request"
    if s.only(s.request > 0) and s.share(s.request > 0) == 1.0:
        yield "batch", 0.4, "the first request is right, all others are wrong"
    if s.case.cache == "far":
        yield "offset", 0.9, "the cache is larger than 2^31 elements"


def _which_heads(s: Shape, live: Tensor) -> Iterator[Clue]:
    bad = (s.used[live] > 1).any(0)
    h = len(bad)
    several = int((s.wrong & live).sum()) >= 3
    if several and h > 1 and bool(bad.any()) and not bool(bad.all()):
        k = int(bad.nonzero()[0])
        if k and bool(bad[k:].all()):
            yield "head", 0.6, f"wrong are the heads from {k} on"
        elif not bool(bad[int(bad.sum()) :].any()):
            yield "head", 0.3, f"wrong are the heads below {int(bad.sum())}"


def _how_large(s: Shape, live: Tensor) -> Iterator[Clue]:
    used, finite = s.used[live], s.finite[live]
    if not bool(finite.all()):
        yield from _not_finite(s, live, ~finite.all(1))
        return
    size_out, size_lse = s.size_out[live], s.size_lse[live]
    spread = float((used > 1).double().mean())
    relative = (
        float(size_out.max()) < SMALL and float((size_lse / (1 + s.visible[live, None].double().log())).max()) < SMALL
    )
    if relative and spread > 0.3:
        yield "precision", 0.25 + 0.45 * spread, "errors are small and nearly everywhere, as lost bits are"
