"""Check sampled rows of every step of a replay against the oracle, a few requests' worth at a time.

A row waits until its request has enough of them: the budget's cost is mostly in the keys, which the rows share.
Axes: T new tokens, S cached tokens, N heads, V value.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mla.accuracy import Comparison, compare, reference
from mla.batch import AttentionBatch
from mla.cache import CacheLayout, PagedLatentCache, slots_of
from mla.projections import Query
from mla.serving.source import TokenSource
from mla.serving.step import Step
from mla.serving.traces import Request
from mla.state import AttentionState

ROWS_AT_ONCE = 64


@dataclass
class Verdict:
    """What the audit found of one tier: the worst use of the budget and where, as (step, request, token, head)."""

    rows: int = 0
    used_out: float = 0.0
    used_lse: float = 0.0
    out_at: tuple[int, int, int, int] | None = None
    lse_at: tuple[int, int, int, int] | None = None
    fault: str = ""

    @property
    def ok(self) -> bool:
        """True while every audited row was within its budget and no fault was seen."""
        return not self.fault and max(self.used_out, self.used_lse) <= 1


@dataclass
class _Waiting:
    """Sampled rows of one request: (step, position), the query, and each tier's result."""

    at: list[tuple[int, int]] = field(default_factory=list)
    nope: list[Tensor] = field(default_factory=list)
    pe: list[Tensor] = field(default_factory=list)
    results: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))


class Audit:
    """Samples `rows_per_step` rows of each step (None: all) and compares every tier's with one oracle."""

    def __init__(
        self, source: TokenSource, layout: CacheLayout, dtype: torch.dtype, rows_per_step: int | None, seed: int
    ) -> None:
        """Judge results in `dtype` for rows stored in `layout`; the sample follows `seed`."""
        self.source, self.layout, self.dtype, self.rows_per_step, self.seed = source, layout, dtype, rows_per_step, seed
        self.verdicts: dict[str, Verdict] = defaultdict(Verdict)
        self._random = np.random.default_rng(seed)
        self._waiting: dict[int, _Waiting] = defaultdict(_Waiting)

    def take(
        self, step: Step, requests: dict[int, Request], batch: AttentionBatch, q: Query,
        results: dict[str, AttentionState], caches: dict[str, PagedLatentCache],
    ) -> None:  # fmt: skip
        """Sample rows of one step, q.nope (T, N, P) and each tier's out (T, N, V), lse (T, N); check whose turn it is.

        Each tier's whole result is checked for finite values, and the cached rows of one request of the step for
        equality with what was written.
        """
        T = batch.num_tokens
        everything = self.rows_per_step is None or self.rows_per_step >= T
        rows = range(T) if everything else sorted(self._random.choice(T, self.rows_per_step, replace=False).tolist())
        owners = np.repeat(np.arange(len(step.request_ids)), step.query_lens)
        positions = step.positions()
        host = lambda x: x.to("cpu", copy=True)  # the source of tokens and the oracle are there
        for name, state in results.items():
            if not bool(torch.isfinite(state.out).all()) or state.lse is None or bool(torch.isnan(state.lse).any()):
                self._fault(name, f"step {step.index}: a result is not finite")
        for row in rows:
            waiting = self._waiting[step.request_ids[owners[row]]]
            waiting.at.append((step.index, int(positions[row])))
            waiting.nope.append(host(q.nope[row]))
            waiting.pe.append(host(q.pe[row]))
            for name, state in results.items():
                lse = torch.zeros(state.out.shape[1]) if state.lse is None else host(state.lse[row])
                waiting.results[name].append((host(state.out[row]), lse))
        b = int(owners[rows[0]])
        self._check_rows(step, b, requests[step.request_ids[b]], batch, caches)
        for id in {step.request_ids[owners[row]] for row in rows} | set(step.finished):
            if id in self._waiting and (len(self._waiting[id].at) >= ROWS_AT_ONCE or id in step.finished):
                self._judge(requests[id], self._waiting.pop(id))

    def finish(self, requests: dict[int, Request]) -> dict[str, Verdict]:
        """Judge the rows that still wait and return the verdict of each tier by name."""
        for id in list(self._waiting):
            self._judge(requests[id], self._waiting.pop(id))
        return self.verdicts

    def _judge(self, request: Request, waiting: _Waiting) -> None:
        visible = [position + 1 for _, position in waiting.at]
        S, n = max(visible), len(visible)
        keys = self.layout.round_trip(*self.source.rows(request, S))
        q = Query(torch.stack(waiting.nope), torch.stack(waiting.pe))
        batch = AttentionBatch.rows([n], [S], [[0]], visible, page_size=S, num_pages=1)
        config = self.source.config
        seed = hash((self.seed, request.id, *waiting.at[0])) & 0x7FFFFFFF
        truth = reference(q, [keys], self.source.weights.up, batch, config.softmax_scale, dtype=self.dtype, seed=seed)
        for name, rows in waiting.results.items():
            if len(rows) < n:  # it raised on the way, which its own reason says
                continue
            out, lse = (torch.stack(column) for column in zip(*rows, strict=True))
            self._record(name, compare(AttentionState(out, lse), truth), request, waiting)

    def _record(self, name: str, result: Comparison, request: Request, waiting: _Waiting) -> None:
        verdict = self.verdicts[name]
        verdict.rows += len(waiting.at)
        where = lambda at: None if at is None else (waiting.at[at[0]][0], request.id, waiting.at[at[0]][1], at[1])
        if result.status not in ("ok", "mismatch"):
            self._fault(name, f"request {request.id}: {result.status}: {result.detail}")
        if result.used_out >= verdict.used_out:
            verdict.used_out, verdict.out_at = result.used_out, where(result.out_at)
        if result.used_lse >= verdict.used_lse:
            verdict.used_lse, verdict.lse_at = result.used_lse, where(result.lse_at)

    def _check_rows(
        self, step: Step, b: int, request: Request, batch: AttentionBatch, caches: dict[str, PagedLatentCache]
    ) -> None:
        """Every row that request b may read must equal, bit for bit, what the layout gives back for its own tokens."""
        S = step.seq_lens[b]
        truth = self.layout.round_trip(*self.source.rows(request, S))
        for name, cache in caches.items():
            stored = cache.read(slots_of(batch.block_table[b], 0, S, batch.page_size))
            for part, got, want in zip(("kv_c", "k_pe"), stored, truth, strict=True):
                wrong = (got.cpu() != want).any(-1)
                if bool(wrong.any()):
                    position = int(wrong.nonzero()[0])
                    self._fault(
                        name, f"step {step.index}: request {request.id} finds another {part} at position {position}"
                    )

    def _fault(self, name: str, text: str) -> None:
        self.verdicts[name].fault = self.verdicts[name].fault or text
