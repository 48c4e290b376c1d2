"""The absorbed half of the FlashInfer tier: rounds of tokens through `BatchMLAPagedAttentionWrapper`.

A round is one run of the kernel: absorbed queries take scratch that is bounded, and the library's list of work items
has a length that it does not check, so a long query goes through in several. Where a graph is to be captured there is
one round, in buffers of the size that the capacity allows.

Axes: T new tokens (packed over requests), t tokens of a round, B requests, N heads, L KV rank, P nope, R rope, V value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.need import Need
from mla.projections import Query
from mla.ragged import Sizes
from mla.state import AttentionState
from mla.tier import Plan
from tiers.tier2_flashinfer.library import Wrapper, borrow, on_host, running_sums, upload, workspace

ROUND_BYTES = 1 << 28  # of absorbed queries
MOST_TILES, TILE = 15360, 64  # of 16384 work items; splits take at most one more for each processor
PACKED = 128  # rows (token, head) that share a bound on keys in the library's kernels
HALF_SCALE = 2.0**-6  # an absorbed query passes 65504, the end of float16, where its parts are as small as 40 and 16


@dataclass(frozen=True)
class Piece:
    """Rows first .. first + tokens - 1 of the batch, which see keys 0 .. keys - 1 of a request, bottom-right."""

    request: int
    first: int
    tokens: int
    keys: int


@dataclass(eq=False)
class Round:
    """One run of the kernel: `rows` of the batch, a slice or (n,) int64; `empty` (n,) bool marks those without keys."""

    rows: slice | Tensor
    tokens: int
    wrapper: Wrapper
    empty: Tensor | None


def why_not_graph(need: Need) -> list[str]:
    """Return a sentence where no one round of fixed size holds what the capacity promises."""
    if need.capacity is None:
        return ["graph_capture = True needs Need.capacity, from which buffers get their fixed size; set it."]
    tiles = -(-need.capacity.max_tokens * need.N // TILE) + need.capacity.max_requests + 1
    if alone(need) and need.capacity.max_query_len > 1:
        found = f"several new tokens of {need.N} heads lose keys in flashinfer's kernels, which pack {PACKED} rows"
        return [f"{found}, unless each is a request of its own, which a graph cannot hold; use triton."]
    if tiles <= MOST_TILES:
        return []
    found = f"a captured step of up to {need.capacity.max_tokens} tokens and {need.N} heads may need {tiles} tiles"
    return [f"{found}; flashinfer lists at most {MOST_TILES}: lower capacity.max_tokens."]


def alone(need: Need) -> bool:
    """Whether each token must be a request of its own, since the library may lose keys.

    Seen on an H200, 0.6.18.post1, fa3: of 96 heads, 2 new tokens over 65 keys lose the last key, and so does a query of
    17; of 16 and 128 heads they do not. It looks as if the last key of a packed tile of 128 rows were rounded down to
    whole tokens, which shows where heads do not divide 128 and a key opens a block of 64.
    """
    return need.mask == "causal" and PACKED % need.N != 0


def plan_rounds(
    library: Any,
    backend: str,
    need: Need,
    batch: AttentionBatch,
    requests: Sequence[int],
    owner: object,
    old: Round | None = None,
) -> list[Round]:
    """Cut the tokens of `requests`, and rows of no request, into rounds and plan a wrapper of `owner` for each.

    With Need.graph_capture the buffers of `old` are filled again, so that a captured graph reads the new lists.
    """
    if need.graph_capture:
        return [_fixed_round(library, backend, need, batch, old)]
    groups = _groups(need, batch, requests)
    return [_round(borrow(library, "mla", backend, need.device, owner), need, batch, g) for g in groups]


def absorbed_sizes(need: Need, rounds: list[Round]) -> Sizes:
    """Return the scratch of all rounds by name: q_latent and latent (t * N, L); of the capacity's size."""
    tokens = max((step.tokens for step in rounds), default=0)
    if need.capacity is not None:
        tokens = need.capacity.max_tokens if need.graph_capture else min(need.capacity.max_tokens, _budget(need))
    return dict.fromkeys(("q_latent", "latent"), ((tokens * need.N, need.L), need.dtype))


def attend_round(
    step: Round, q: Query, cache: PagedLatentCache, data: dict[str, Tensor], plan: Plan, state: AttentionState
) -> None:
    """Attend a round's rows of q, nope (T, N, P) and pe (T, N, R), into the state's out (T, N, V) and lse (T, N)."""
    need, t, (whole, whole_lse) = plan.need, step.tokens, state.parts()
    q_latent, latent = (plan.scratch(n, (t, need.N, need.L), need.dtype) for n in ("q_latent", "latent"))
    q_pe, scale = q.pe[step.rows], _query_scale(need)
    bmm(q.nope[step.rows].transpose(0, 1), data["W_UK"], q_latent.transpose(0, 1), scale)
    kv_c, k_pe = need.layout.read(cache.data)
    direct = isinstance(step.rows, slice)
    lse = whole_lse[step.rows] if direct else whole_lse.new_empty(t, need.N)
    step.wrapper.library.run(
        q_nope=q_latent, q_pe=_dense(q_pe if scale == 1 else q_pe * scale), ckv_cache=kv_c, kpe_cache=k_pe, out=latent,
        lse=lse if need.lse else None, return_lse=need.lse, return_lse_base_on_e=True,
    )  # fmt: skip
    out = whole[step.rows] if direct else whole.new_empty(t, need.N, need.V)
    bmm(latent.transpose(0, 1), data["W_UV"], out.transpose(0, 1))
    if step.empty is not None:
        empty = step.empty[:t, None]
        out.masked_fill_(empty[..., None], 0)  # whatever a row without keys holds, NaN too
        lse.masked_fill_(empty, float("-inf"))
    if not direct:
        whole[step.rows], whole_lse[step.rows] = out, lse


def _budget(need: Need) -> int:
    return max(1, ROUND_BYTES // (need.N * need.L * need.dtype.itemsize))


def _groups(need: Need, batch: AttentionBatch, requests: Sequence[int]) -> list[list[Piece]]:
    """Pieces of the requests by round; rows of no request come last, and see nothing."""
    starts = [0, *accumulate(batch.query_lens_host)]
    most = min(_budget(need), max(1, (MOST_TILES - 1) * TILE // need.N))
    pieces = []
    for b in requests:
        query_len, seq_len = batch.query_lens_host[b], batch.seq_lens_host[b]
        step = 1 if alone(need) else most
        for first in range(0, query_len, step):
            tokens = min(step, query_len - first)
            unseen = query_len - first - tokens if batch.mask == "causal" else 0
            pieces.append(Piece(b, starts[b] + first, tokens, max(0, seq_len - unseen)))
    for first in range(starts[-1], batch.num_tokens, most):
        pieces.append(Piece(0, first, min(most, batch.num_tokens - first), 0))
    groups: list[list[Piece]] = []
    tokens = tiles = 0
    for piece in pieces:
        own = -(-piece.tokens * need.N // TILE)
        if not groups or tokens + piece.tokens > most or tiles + own > MOST_TILES:
            groups.append([])
            tokens = tiles = 0
        groups[-1].append(piece)
        tokens, tiles = tokens + piece.tokens, tiles + own
    return groups


def _round(wrapper: Wrapper, need: Need, batch: AttentionBatch, pieces: list[Piece]) -> Round:
    first, tokens = pieces[0].first, sum(p.tokens for p in pieces)
    rows: slice | Tensor = slice(first, first + tokens)
    if pieces[-1].first + pieces[-1].tokens != first + tokens:  # other requests lie between them
        index = np.concatenate([np.arange(p.first, p.first + p.tokens) for p in pieces])
        rows = upload(torch.from_numpy(index), need.device)
    empty = batch.row_kv_lens[rows] == 0 if any(p.keys == 0 for p in pieces) else None
    _plan(wrapper, need, batch, pieces)
    return Round(rows, tokens, wrapper, empty)


def _fixed_round(library: Any, backend: str, need: Need, batch: AttentionBatch, old: Round | None) -> Round:
    """The one round of a captured graph, in buffers of the capacity's size, filled again where they exist.

    The library's grid follows tokens / requests, so both stay: requests that are absent have no tokens, and one more
    request, without keys, has the rows of no request.
    """
    c = need.capacity
    assert c is not None, "why_not has refused"
    B, starts = c.max_requests, [0, *accumulate(batch.query_lens_host)]
    lengths = zip(starts, batch.query_lens_host, batch.seq_lens_host, strict=False)
    pieces = [Piece(b, *three) for b, three in enumerate(lengths)]
    pieces += [Piece(0, starts[-1], 0, 0)] * (B - len(pieces))
    pieces.append(Piece(0, starts[-1], batch.num_tokens - starts[-1], 0))
    if old is None:
        ints = lambda n: torch.zeros(n, dtype=torch.int32, device=need.device)
        made = library.mla.BatchMLAPagedAttentionWrapper(
            float_workspace_buffer=workspace(need.device), use_cuda_graph=True, qo_indptr=ints(B + 2),
            kv_indptr=ints(B + 2), kv_indices=ints(B * max(1, -(-c.max_seq_len // need.page_size))),
            kv_len_arr=ints(B + 1), backend=backend,
        )  # fmt: skip
        empty = torch.zeros(c.max_tokens, dtype=torch.bool, device=need.device)
        old = Round(slice(0, 0), 0, Wrapper(made, need.device), empty)
    assert old.empty is not None
    _plan(old.wrapper, need, batch, pieces)
    T = batch.num_tokens
    torch.eq(batch.row_kv_lens, 0, out=old.empty[:T])
    old.rows, old.tokens = slice(0, T), T
    return old


def _plan(wrapper: Wrapper, need: Need, batch: AttentionBatch, pieces: list[Piece]) -> None:
    """Plan a wrapper: page ids are taken from the block table on the device, all else comes from the host."""
    pages = [-(-p.keys // need.page_size) for p in pieces]
    width, table = batch.block_table.shape[1], batch.block_table.reshape(-1)
    found = [p.request * width + np.arange(n) for p, n in zip(pieces, pages, strict=True)]
    index = upload(torch.from_numpy(np.concatenate(found).astype(np.int64)), need.device)
    indices = table.index_select(0, index).to(torch.int32)
    wrapper.plan(
        qo_indptr=running_sums([p.tokens for p in pieces], need.device), kv_indptr=running_sums(pages, need.device),
        kv_indices=indices, kv_len_arr=on_host([p.keys for p in pieces], need.device),
        num_heads=need.N, head_dim_ckv=need.L, head_dim_kpe=need.R, page_size=need.page_size,
        causal=batch.mask == "causal", sm_scale=need.softmax_scale / _query_scale(need), q_data_type=need.dtype,
        kv_data_type=need.dtype,
    )  # fmt: skip


def _query_scale(need: Need) -> float:
    """What queries are multiplied by, and the softmax scale divided by: a power of two."""
    return HALF_SCALE if need.dtype == torch.float16 else 1.0


def bmm(a: Tensor, W: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """Write `scale a W` head by head, a (N, t, k) and W (N, k, n), into out (N, t, n), rounded once."""
    if a.dtype == W.dtype == out.dtype:
        out.baddbmm_(a, W, beta=0, alpha=scale)
    else:
        out.copy_(torch.bmm(a.to(W.dtype), W).mul_(scale))


def _dense(x: Tensor) -> Tensor:
    """x (t, N, R) as the kernels read it: numbers of a row side by side, rows aligned to 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    return x if aligned and x.stride(-1) == 1 else x.contiguous()
