"""The expanded form by somebody else's flash attention: keys of many requests, a bounded workspace at a time.

Keys are packed into chunks (`mla.chunks`). Each is gathered from pages and expanded to heads, and then attended by at
most two calls of a kernel that takes many sequences at once: one, bottom-right causal, for the requests that end in it,
and one without a mask for the request that it cuts. What several calls found of a row is merged.

Axes: T new tokens (packed over requests), t rows of a call, n keys in the workspace, B requests, N heads, L KV rank,
P nope, R rope, V value.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.chunks import Span, pack_chunks
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState, merge
from mla.tier import Plan

Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]
Merge = Callable[[AttentionState, AttentionState], AttentionState]


@dataclass(frozen=True, eq=False)
class RaggedCall:
    """One call of a kernel: sequences of query rows over the workspace's keys first_key .. last_key - 1.

    `rows` (t,) int64 are rows of the batch; sequence i has the next query_lens[i] of them and the next key_lens[i]
    keys, both at least one. `causal` is bottom-right: row r of a sequence sees keys 0 .. key_len - query_len + r; else
    it sees all. query_start_loc and key_start_loc (sequences + 1,) int32 are the running sums on the device. `held`
    (t,) int64 says where the rows' merged states lie, None where this call sees all that its rows see.
    """

    causal: bool
    rows: Tensor
    held: Tensor | None
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    query_start_loc: Tensor
    key_start_loc: Tensor
    first_key: int
    last_key: int


Kernel = Callable[[RaggedCall, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class RaggedChunk:
    """What the workspace holds at once: `requests` and `positions` (n,) int64 name the key of each of its rows."""

    requests: Tensor
    positions: Tensor
    calls: list[RaggedCall]


@dataclass
class RaggedSteps:
    """A step's expanded work; `sizes` are the scratch buffers for `Plan.sizes`.

    `empty` are the ranges of rows that see no key, `held` those that several calls meet, merged in float32.
    """

    chunks: list[RaggedChunk] = field(default_factory=list)
    empty: list[tuple[int, int]] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)
    sizes: Sizes = field(default_factory=dict)

    def calls(self) -> Iterator[RaggedCall]:
        """Yield every call of every chunk, in the order in which they are made."""
        for chunk in self.chunks:
            yield from chunk.calls


@dataclass(frozen=True)
class _Sequence:
    """Rows first .. stop - 1 of the batch, of one request, over `keys` keys of the workspace from `at` on."""

    request: int
    first: int
    stop: int
    at: int
    keys: int


def refuse_ragged(tier: str, need: Need) -> list[str]:
    """Return sentences for what cannot be cut into such calls: explicit row bounds, cached rows of another dtype."""
    reasons = []
    if need.mask not in ("causal", "full"):
        found = f"mask {need.mask!r} is not computed by the expanded form of {tier}"
        reasons.append(f"{found}, which takes 'causal' and 'full'; use the absorbed form or paged.")
    if need.layout.storage_dtype != need.dtype:
        found = f"a cache of {need.layout.name} rows is not expanded by {tier} for queries of {need.dtype}"
        reasons.append(f"{found}; use rows of the queries' dtype or paged.")
    return reasons


def prepare_ragged(up: UpProjection, need: Need) -> dict[str, Tensor]:
    """Flatten W_UK (L, N, P) to (L, N*P) and W_UV (L, N, V) to (L, N*V), contiguous, in the query's dtype."""
    W_UK, W_UV = (W.detach().to(need.dtype).flatten(1).contiguous() for W in up)
    return {"ragged_W_UK": W_UK, "ragged_W_UV": W_UV}


def plan_ragged(need: Need, batch: AttentionBatch, requests: Sequence[int], cap: int) -> RaggedSteps:
    """Pack the keys of `requests` into chunks of at most `cap` rows and list the calls over each, once per step.

    Every row of these requests is written by `attend_ragged`, also one that sees no key. All comes from the host's
    lengths; lists go to the device without waiting. `refuse_ragged` says which Needs it is for.
    """
    starts = [0, *accumulate(batch.query_lens_host)]
    counts = [0] * batch.num_requests
    for b in requests:
        counts[b] = batch.seq_lens_host[b] if batch.query_lens_host[b] else 0
    packed = pack_chunks(counts, cap, need.page_size)
    work = [_cut(spans, batch, starts) for spans in packed]
    met = Counter(s.request for calls in work for _, sequences in calls for s in sequences)
    shared = {  # a call is merged as a whole, so a request that is met once may be held too
        s.request
        for calls in work
        for _, sequences in calls
        if any(met[s.request] > 1 for s in sequences)
        for s in sequences
    }
    steps = RaggedSteps()
    held: dict[int, int] = {}  # request -> what to add to a row of the batch to find its merged state
    for b in requests:
        if b in shared:
            held[b] = sum(stop - first for first, stop in steps.held) - starts[b]
            steps.held.append((starts[b], starts[b + 1]))
        elif not met[b] and batch.query_lens_host[b]:
            steps.empty.append((starts[b], starts[b + 1]))
    for spans, calls in zip(packed, work, strict=True):
        owners = torch.cat([torch.full((s.stop - s.start,), s.request) for s in spans])
        positions = torch.cat([torch.arange(s.start, s.stop) for s in spans])
        found = [_call(causal, sequences, held, need) for causal, sequences in calls]
        steps.chunks.append(RaggedChunk(_upload(owners, need), _upload(positions, need), found))
    rows = max((len(chunk.positions) for chunk in steps.chunks), default=0)
    tokens = max((len(call.rows) for call in steps.calls()), default=0)
    if need.capacity is not None:
        rows, tokens = cap, need.capacity.max_tokens
    steps.sizes = ragged_sizes(need, rows, tokens) if rows else {}
    return steps


def ragged_sizes(need: Need, rows: int, tokens: int) -> Sizes:
    """Return the scratch of a workspace of `rows` keys and of `tokens` new tokens, (shape, dtype) by name.

    Latent rows (rows, L + R), k_nope (rows, N, P), k (rows, N, P + R), v (rows, N, V), q (tokens, N, P + R).
    """
    N, P, R, V, dtype = need.N, need.P, need.R, need.V, need.dtype
    return {
        "ragged_rows": ((rows, need.layout.storage_width), need.layout.storage_dtype),
        "ragged_k_nope": ((rows, N * P), dtype),
        "ragged_v": ((rows, N * V), dtype),
        "ragged_k": ((rows, N, P + R), dtype),
        "ragged_q": ((tokens, N, P + R), dtype),
    }


def attend_ragged(
    steps: RaggedSteps,
    q: Query,
    cache: PagedLatentCache,
    data: dict[str, Tensor],
    plan: Plan,
    kernel: Kernel,
    out: Tensor,
    lse: Tensor,
    join: Merge = merge,
) -> None:
    """Attend the planned requests: writes their rows of out (T, N, V) and of lse (T, N), natural log.

    `kernel(call, q (t, N, P + R), k (n, N, P + R), v (n, N, V))` returns out (t, N, V) and lse (t, N), natural log;
    `join` merges two states of the same rows. q.nope is (T, N, P), q.pe (T, N, R); `data` is what `prepare_ragged`
    made. Rows of other requests are not touched; waits for the device nowhere.
    Source: DeepSeek-V2 (arXiv 2405.04434), eqs. 9 to 18; FlashAttention-2 (arXiv 2307.08691) for chunks.
    """
    need = plan.need
    states = AttentionState.empty(sum(b - a for a, b in steps.held), need.N, need.V, device=need.device).parts()
    for chunk in steps.chunks:
        k, v = _expand(chunk, cache, data, plan)
        for call in chunk.calls:
            query = plan.scratch("ragged_q", (len(call.rows), need.N, need.P + need.R), need.dtype)
            query[..., : need.P], query[..., need.P :] = q.nope[call.rows], q.pe[call.rows]
            part = AttentionState(*kernel(call, query, *(x[call.first_key : call.last_key] for x in (k, v))))
            if call.held is None:
                out[call.rows], lse[call.rows] = part.out.to(out.dtype), part.parts()[1].to(lse.dtype)
                continue
            joined = join(AttentionState(*(x[call.held] for x in states)), part).parts()
            for state, new in zip(states, joined, strict=True):
                state[call.held] = new.to(state.dtype)
    at = 0
    for first, stop in steps.held:
        out[first:stop], lse[first:stop] = (x[at : at + stop - first] for x in states)
        at += stop - first
    for first, stop in steps.empty:
        out[first:stop], lse[first:stop] = 0, float("-inf")


def _cut(spans: list[Span], batch: AttentionBatch, starts: list[int]) -> list[tuple[bool, list[_Sequence]]]:
    """Cut what the rows of each span's request see of it into a causal call and one without a mask.

    Only the last span of a chunk may end before its request does, so the sequences of a call lie side by side.
    """
    causal, whole = [], []
    for s in spans:
        first, query_len = starts[s.request], batch.query_lens_host[s.request]
        own = batch.seq_lens_host[s.request] - query_len  # where the keys of the new tokens begin
        a, b = (max(s.start - own, 0), max(s.stop - own, 0)) if batch.mask == "causal" else (0, 0)
        if a < b:  # row b - 1 sees the span's last key, and row a its first
            causal.append(_Sequence(s.request, first + a, first + b, s.at, s.stop - s.start))
        if b < query_len:
            whole.append(_Sequence(s.request, first + b, first + query_len, s.at, s.stop - s.start))
    return [(mask, found) for mask, found in ((True, causal), (False, whole)) if found]


def _call(causal: bool, sequences: list[_Sequence], held: dict[int, int], need: Need) -> RaggedCall:
    query_lens, key_lens = tuple(s.stop - s.first for s in sequences), tuple(s.keys for s in sequences)
    rows = torch.cat([torch.arange(s.first, s.stop) for s in sequences])
    states = [torch.arange(s.first, s.stop) + held[s.request] for s in sequences if s.request in held]
    sums = [torch.tensor([0, *accumulate(lens)], dtype=torch.int32) for lens in (query_lens, key_lens)]
    return RaggedCall(
        causal,
        _upload(rows, need),
        _upload(torch.cat(states), need) if states else None,
        query_lens,
        key_lens,
        _upload(sums[0], need),
        _upload(sums[1], need),
        sequences[0].at,
        sequences[-1].at + sequences[-1].keys,
    )


def _upload(x: Tensor, need: Need) -> Tensor:
    return x if need.device == "cpu" else x.pin_memory().to(need.device, non_blocking=True)


def _expand(chunk: RaggedChunk, cache: PagedLatentCache, data: dict[str, Tensor], plan: Plan) -> tuple[Tensor, Tensor]:
    """Gather and expand a chunk: k (n, N, P + R), k_pe repeated for every head, and v (n, N, V)."""
    need, n, page = plan.need, len(chunk.positions), plan.need.page_size
    N, P, width = need.N, need.P, need.layout.storage_width
    pages = plan.batch.block_table[chunk.requests, chunk.positions // page].to(torch.int64)
    rows = plan.scratch("ragged_rows", (n, width), need.layout.storage_dtype)
    kv_c, k_pe = need.layout.read(cache.gather(pages * page + chunk.positions % page, rows))
    k_nope, v = (plan.scratch(f"ragged_{name}", (n, N * w), need.dtype) for name, w in (("k_nope", P), ("v", need.V)))
    torch.mm(kv_c, data["ragged_W_UK"], out=k_nope)
    torch.mm(kv_c, data["ragged_W_UV"], out=v)
    k = plan.scratch("ragged_k", (n, N, P + need.R), need.dtype)
    k[..., :P], k[..., P:] = k_nope.view(n, N, P), k_pe[:, None]
    return k, v.view(n, N, need.V)
