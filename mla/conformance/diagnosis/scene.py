"""A few rows and heads of a failing case in float64: what a hypothesis about the fault is computed from and judged by.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value; h, the heads
that were sampled; K keys in a pool that holds all requests' keys, one after the other, and poison as the last one.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mla.accuracy import Reference
from mla.conformance.cases import Case
from mla.conformance.inputs import Inputs
from mla.projections import Query
from mla.state import AttentionState

MOST_ROWS, MOST_RIGHT_ROWS, MOST_HEADS = 8, 3, 4
SMALL_POOL = 1 << 23  # elements kept in float64, else as the cache holds them
MOST_BADNESS = 2.0**16  # of one number in the choice of heads
NEG_INF = float("-inf")
Array = np.ndarray


class Answer(NamedTuple):
    """What a hypothesis predicts for one row: out (h, V), lse (h,)."""

    out: Array
    lse: Array


@dataclass(frozen=True, eq=False)
class Row:
    """One row of the batch: token `token` of request `request`, which has query_len new tokens and seq_len keys.

    q_pe (h, R), q_latent (h, L); the tier's out (h, V), lse (h,) and the truth; `used` (h,) is the larger
    error / budget of the two, inf where the tier's number is not finite.
    """

    row: int
    request: int
    token: int
    query_len: int
    seq_len: int
    visible: int
    q_pe: Array
    q_latent: Array
    out: Array
    lse: Array | None
    right: Answer
    out_limit: Array
    lse_limit: Array
    used: Array


@dataclass(frozen=True, eq=False)
class Scene:
    """The sample: `rows` and the heads they show, and all keys; kv_c (K + 1, L), k_pe (K + 1, R), the last one NaN.

    `slot_key` (num_pages * page_size,) gives the pool's key in each slot, K (the poison) where no request owns it;
    `starts` (B + 1) is where each request's keys begin in the pool. W_UK (L, N, P), W_UV (L, N, V) and q (T, N, P),
    (T, N, R) are the case's own, for hypotheses that mix heads or rows.
    """

    case: Case
    heads: tuple[int, ...]
    rows: tuple[Row, ...]
    q: Query
    W_UK: Array
    W_UV: Array
    kv_c: Array
    k_pe: Array
    starts: tuple[int, ...]
    table: Array
    slot_key: Array

    @property
    def page(self) -> int:
        """Rows of a page."""
        return self.case.page_size

    @property
    def scale(self) -> float:
        """The right softmax scale."""
        return self.case.dims.softmax_scale

    @cached_property
    def W_UV_h(self) -> Array:
        """W_UV of the sampled heads (L, h, V)."""
        return self.W_UV[:, list(self.heads)]

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        return {}

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` gave the first time for this key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def keys(self, keys: slice | Array) -> tuple[Array, Array]:
        """Return kv_c (n, L), k_pe (n, R) of keys of the pool."""
        return self.kv_c[keys].astype(np.float64, copy=False), self.k_pe[keys].astype(np.float64, copy=False)

    def query(self, row: int, heads: Sequence[int] | None = None) -> tuple[Array, Array]:
        """Return q_latent (h, L), q_pe (h, R) of any row of the batch, for the sampled heads or the given ones."""
        at = tuple(self.heads if heads is None else heads)
        return self.keep(("query", row, at), lambda: self._query(row, list(at)))

    def _query(self, row: int, at: list[int]) -> tuple[Array, Array]:
        nope, pe = (as_array(x[row][at]) for x in self.q)
        return np.stack([self.W_UK[:, i] @ nope[k] for k, i in enumerate(at)]), pe

    def nope(self, row: Row) -> Array:
        """Return q_nope (h, P) of a row."""
        return as_array(self.q.nope[row.row][list(self.heads)])

    def own(self, row: Row, n: int | None = None) -> slice:
        """The pool's slice of a row's first n keys, by default those it sees."""
        start = self.starts[row.request]
        return slice(start, start + (row.visible if n is None else max(0, min(n, row.seq_len))))

    def scores(self, row: Row, keys: slice | Array) -> Array:
        """Return the right scores (h, n) of a row against keys of the pool, the scale included."""
        if isinstance(keys, slice):
            whole = self.keep(("scores", row.row), lambda: self._scores(row, self.own(row, row.seq_len)))
            start = self.starts[row.request]
            if start <= keys.start and keys.stop <= start + row.seq_len:
                return whole[:, keys.start - start : keys.stop - start]
        return self._scores(row, keys)

    def _scores(self, row: Row, keys: slice | Array) -> Array:
        kv_c, k_pe = self.keys(keys)
        return self.scale * (row.q_latent @ kv_c.T + row.q_pe @ k_pe.T)

    def attend(self, row: Row, keys: slice | Array, scores: Array | None = None, W_UV: Array | None = None) -> Answer:
        """Softmax of scores (h, n), by default the right ones, over keys of the pool: out (h, V), lse (h,)."""
        scores = self.scores(row, keys) if scores is None else scores
        return attend(scores, self.keys(keys)[0], self.W_UV_h if W_UV is None else W_UV)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The request of each row that has one."""
        return tuple(_owners(self.case.batch.query_lens))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Keys that each row sees that has a request."""
        return tuple(self.case.batch.visible())

    def result(self, r: int, heads: Sequence[int] | None = None, W_UV: Array | None = None) -> Answer:
        """Right answer of any row of the batch, for given query heads and W_UV (L, h, V): out (h, V), lse (h,)."""
        q_latent, q_pe = self.query(r, heads)
        start = self.starts[self.owners[r]] if r < len(self.owners) else 0
        kv_c, k_pe = self.keys(slice(start, start + (self.bounds[r] if r < len(self.owners) else 0)))
        scores = self.scale * (q_latent @ kv_c.T + q_pe @ k_pe.T)
        return attend(scores, kv_c, self.W_UV_h if W_UV is None else W_UV)


@dataclass(frozen=True)
class Hypothesis:
    """A fault that could be: its kind, what it says in words, and what a row, h heads, would then be.

    `answer` gives out (h, V) and lse (h,), or scores (h, n) of the request's first n keys, -inf for one that is not
    seen, or None where it does not apply; `cost` is what it must explain better than a simpler one.
    """

    kind: str
    says: str
    answer: Callable[[Scene, Row], Answer | Array | None]
    cost: float = 0.0


def logsumexp(x: Array) -> Array:
    """Return ln of the sum of exp over the last axis of x (..., n); -inf where nothing is."""
    if x.shape[-1] == 0:
        return np.full(x.shape[:-1], NEG_INF)
    top = x.max(-1)
    base = np.where(np.isfinite(top), top, 0.0)
    return base + np.log(np.exp(x - base[..., None]).sum(-1))


def attend(scores: Array, kv_c: Array, W_UV: Array) -> Answer:
    """Return softmax(scores (..., h, n)) kv_c (n, L) W_UV (L, h, V): out (..., h, V), lse (..., h).

    Without keys, or where all scores are -inf, 0 and -inf.
    """
    lse = logsumexp(scores)
    base = np.where(np.isfinite(lse), lse, 0.0)
    return Answer(up(np.exp(scores - base[..., None]) @ kv_c, W_UV), lse)


def up(latent: Array, W_UV: Array) -> Array:
    """Project latent outputs (..., h, L) with W_UV (L, h, V) to (..., h, V)."""
    return np.matmul(latent[..., None, :], W_UV.transpose(1, 0, 2))[..., 0, :]


def as_array(x: Tensor) -> Array:
    """Return a tensor of any shape as float64 on the host."""
    return x.detach().to("cpu", torch.float64).numpy()


def make_scene(
    case: Case, state: AttentionState, made: Reference, heads: tuple[int, ...] | None, inputs: Inputs, used: Tensor
) -> Scene:
    """Pick rows and heads: mostly wrong ones, some right ones, and put all keys in one pool.

    state.out (T, N, V), state.lse (T, N) or None; `used` (n, N) is the error / budget of the reference's rows and
    heads, `heads` their numbers (None: all).
    """
    batch, layout = inputs.batch, case.cache_layout
    keys = [layout.round_trip(*pair) for pair in inputs.keys]
    pools = []
    for i, width in enumerate((case.dims.L, case.dims.R)):
        parts = [pair[i].cpu() for pair in keys]
        dtype = torch.float64 if sum(x.numel() for x in parts) < SMALL_POOL else torch.float32
        pool = torch.cat([*(x.to(dtype) for x in parts), torch.full((1, width), float("nan"), dtype=dtype)])
        pools.append(pool.numpy())
    starts, table = (0, *accumulate(batch.seq_lens_host)), batch.block_table.cpu().long().numpy()
    owners = _owners(batch.query_lens_host)
    chosen, at = _pick(made, used, owners, case.random_seed)
    names = tuple(at) if heads is None else tuple(heads[i] for i in at)
    W_UK, W_UV = (as_array(w) for w in inputs.up)
    slot_key = _slot_key(inputs, table, starts)
    empty = Scene(case, names, (), inputs.q, W_UK, W_UV, pools[0], pools[1], starts, table, slot_key)
    return replace(empty, rows=tuple(_row(empty, i, at, state, made, used, inputs, owners) for i in chosen))


def _owners(query_lens: tuple[int, ...]) -> list[int]:
    return [b for b, q in enumerate(query_lens) for _ in range(q)]


def _row(scene: Scene, i: int, at: list[int], state, made: Reference, used: Tensor, inputs: Inputs, owners) -> Row:
    r, batch, pick = int(made.rows[i]), inputs.batch, list(scene.heads)
    b = owners[r]
    q_latent, q_pe = scene.query(r)
    return Row(
        row=r, request=b, token=r - owners.index(b), query_len=batch.query_lens_host[b],
        seq_len=batch.seq_lens_host[b], visible=int(batch.row_kv_lens[r]), q_pe=q_pe, q_latent=q_latent,
        out=as_array(state.out[r])[pick], lse=None if state.lse is None else as_array(state.lse[r])[pick],
        right=Answer(as_array(made.out[i])[at], as_array(made.lse[i])[at]),
        out_limit=as_array(made.out_limit[i])[at], lse_limit=as_array(made.lse_limit[i])[at],
        used=as_array(used[i])[at],
    )  # fmt: skip


def _pick(made: Reference, used: Tensor, owners: list[int], seed: int) -> tuple[list[int], list[int]]:
    """Choose indices of rows and heads: the worst first, then spread over requests; some right ones for contrast."""
    live = (~made.empty.cpu()).nonzero().flatten().tolist()
    worst = used.amax(1)
    chance = torch.Generator().manual_seed(seed)
    order = [live[i] for i in torch.randperm(len(live), generator=chance).tolist()]
    wrong, right = [i for i in order if worst[i] > 1], [i for i in order if worst[i] <= 1]
    request = lambda i: owners[int(made.rows[i])]
    if wrong:
        top = max(wrong, key=lambda i: float(worst[i].nan_to_num(posinf=-1.0)))
        wrong = _spread([top, *(i for i in wrong if i != top)], request)
    hit = {request(i) for i in wrong}
    right = _spread(sorted(right, key=lambda i: request(i) not in hit), request)[:MOST_RIGHT_ROWS]
    rows = wrong[: MOST_ROWS - len(right)] + right
    if not rows:
        return [], list(range(min(used.shape[1], MOST_HEADS)))
    badness = used[wrong[:MOST_ROWS] or rows].clamp(max=MOST_BADNESS).log2().clamp(min=0).sum(0)
    heads = badness.argsort(descending=True, stable=True).tolist()
    if len(heads) > MOST_HEADS:
        heads = [*heads[: MOST_HEADS - 1], heads[-1]]
    return rows, sorted(heads)


def _spread(items: list[int], group: Callable[[int], int]) -> list[int]:
    """Reorder so that groups take turns."""
    seen: Counter[int] = Counter()
    turns = {}
    for item in items:
        turns[item] = seen[group(item)]
        seen[group(item)] += 1
    return sorted(items, key=lambda item: turns[item])


def _slot_key(inputs: Inputs, table: Array, starts: tuple[int, ...]) -> Array:
    page, K = inputs.batch.page_size, starts[-1]
    slot_key = np.full(inputs.num_pages * page, K)
    for b, S in enumerate(inputs.batch.seq_lens_host):
        at = np.arange(S)
        slot_key[table[b, at // page] * page + at % page] = starts[b] + at
    return slot_key
