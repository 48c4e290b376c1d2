"""The absorbed half of the AITER tier: decode and verification over the cached rows, one call a step and layer.

    q_latent = q_nope W_UK        rows x padded heads x (L + R), dense
    o        = aiter decode        per-row indices of the cache, a work plan shared by all layers
    out      = o W_UV              of the real heads

Axes: T new tokens (packed over requests), t rows of the call, n keys of the call, s sequences of the call, N heads,
M padded heads, L KV rank, P nope, R rope, V value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.errors import bad
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.tier import Plan
from tiers.tier2_aiter.heads import HeadPadding
from tiers.tier2_aiter.library import DECODE, INFO, METADATA, TRITON_DECODE, Library, required
from tiers.tier2_aiter.metadata import Sizes, fill_metadata, metadata_sizes
from tiers.tier2_aiter.pages import (
    SENTINEL,
    STAND_IN,
    Sequences,
    kernel_rows,
    padded_sequences,
    running_sums,
    sequences_of,
    slots_of_keys,
    token_rows,
)
from tiers.tier2_aiter.route import Route, plan_route

VERIFIED = 8  # query tokens that AITER has any decode kernel for; longer queries are rows of their own
LISTS = ("qo_indptr", "kv_indptr", "last_page_lens")
TRITON_BYTES, TRITON_SPLITS = 1 << 28, 8  # of partial states at once; AITER's own caller asks for as many splits


@dataclass(eq=False)
class DecodeCall:
    """One call: `rows` of the batch, a slice or (t,) int64, as `sequences` over `slots` (n,) int32 of the cache.

    qo_indptr and kv_indptr (s + 1,), last_page_lens (s,) int32; `work` are the six metadata buffers by name, none for
    kernels that take none. `most` is the longest query. `seen` (t,) int32, of a captured step only, is 0 for rows whose
    result is thrown away. `owners` (s,) int64 are the sequences' requests.
    """

    route: Route
    padding: HeadPadding
    rows: slice | Tensor
    sequences: Sequences
    most: int
    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_lens: Tensor
    slots: Tensor
    owners: Tensor
    work: dict[str, Tensor]
    seen: Tensor | None = None


def dtypes_of(need: Need) -> tuple[torch.dtype, torch.dtype]:
    """dtypes of the query that AITER gets and of the cached rows.

    A float16 query is handed over in float32: absorbed it can pass 65504, and AITER's Triton decode multiplies in the
    query's dtype.
    """
    return (torch.float32 if need.dtype == torch.float16 else need.dtype), need.layout.storage_dtype


def route_of(library: Library, need: Need, query_lens: tuple[int, ...], kv_rows: int = 0) -> Route:
    """Return the route of absorbed requests; raises AiterUnsupported."""
    return plan_route(
        library.arch(need), need.N, query_lens, need.dtype, need.layout.storage_dtype, need.lse, kv_rows,
        library.cu_count(need), widths=(need.L + need.R, need.L), served=library.widths(need), window=library.window,
    )  # fmt: skip


def functions_of(route: Route) -> tuple[str, ...]:
    """Names of the functions that a route calls."""
    return {"persistent": (DECODE, INFO, METADATA), "splits": (DECODE,), "triton": (TRITON_DECODE,)}[route.kernel]


def prepare_absorbed(up: UpProjection, need: Need) -> dict[str, Tensor]:
    """Put heads first: W_UK (N, P, L) and W_UV (N, L, V), contiguous, in the wider of their dtype and the query's."""
    W_UK, W_UV = (W.detach().to(torch.promote_types(W.dtype, dtypes_of(need)[0])) for W in up)
    return {"W_UK": W_UK.permute(1, 2, 0).contiguous(), "W_UV": W_UV.permute(1, 0, 2).contiguous()}


def choose(library: Library, need: Need, batch: AttentionBatch, requests: list[int]) -> tuple[Route, Sequences] | None:
    """Return how the requests go into one call, and as which sequences; None where none of them has rows and keys.

    A step for graph capture has the rows and the query length of its capacity whatever the batch is, so padding joins
    it as stand-ins. Otherwise padding is left out. Raises ValueError where a batch does not fit the captured step.
    """
    kv_rows = (batch.num_pages or 0) * need.page_size
    if need.graph_capture:
        route, most = captured_route(library, need, kv_rows)
        found = padded_sequences(batch, most)
        if isinstance(found, str):
            fix = "pad the batch with requests of that length, or plan with uniform_queries=False"
            raise bad("batch", expected=f"rows for sequences of {most}", got=found, fix=fix)
        return (route, found) if found.tokens else None
    sequences = sequences_of(batch, requests)
    if not sequences.tokens:
        return None
    if batch.mask != "causal":
        sequences = sequences.single_rows(causal=False)
    route = route_of(library, need, tuple(sequences.query_lens.tolist()), kv_rows)
    if route.flatten:
        sequences = sequences.single_rows(batch.mask == "causal")
        route = route_of(library, need, (1,) * sequences.tokens, kv_rows)
    return route, sequences


def captured_route(library: Library, need: Need, kv_rows: int = 0) -> tuple[Route, int]:
    """Return the route of every step of a Need for graph capture, and its query length: the capacity's, or 1."""
    capacity = need.capacity
    assert capacity is not None, "why_not has refused"
    most = capacity.max_query_len if need.uniform_queries and need.mask == "causal" else 1
    route = route_of(library, need, (most,) * capacity.max_requests, kv_rows)
    if route.query_len != 1:
        return route, most
    return route_of(library, need, (1,) * capacity.max_tokens, kv_rows), 1


def sizes_of(library: Library, need: Need, chosen: tuple[Route, Sequences] | None, most_absorbed: int) -> Sizes:
    """Return the scratch of a step, (shape, dtype) by name: of the worst that the capacity allows, or of this one.

    `most_absorbed` is the longest query that takes this form.
    """
    if need.capacity is not None and need.graph_capture:
        route, most = captured_route(library, need)
        tokens = need.capacity.max_tokens
        steps = [(tokens // most, most)]
        keys = tokens // most * max(need.capacity.max_seq_len, most)
    elif need.capacity is not None:
        c = need.capacity
        longest = min(c.max_query_len, most_absorbed)
        tokens = min(c.max_tokens, c.max_requests * longest)
        route = route_of(library, need, (1,) * tokens)
        # a request of several rows is one sequence, or one for each row
        steps = [(tokens, 1)] + [(min(c.max_requests, tokens), q) for q in range(2, min(longest, VERIFIED) + 1)]
        keys = tokens * c.max_seq_len
    elif chosen is not None:
        route, sequences = chosen
        tokens, keys = sequences.tokens, sequences.keys
        steps = [(len(sequences.owners), int(sequences.query_lens.max()))]
    else:
        return {}
    dtypes, heads = dtypes_of(need), route.heads
    sizes: Sizes = {"query": ((tokens, heads, need.L + need.R), dtypes[0])}
    if route.kernel == "triton":
        return sizes
    sizes |= dict.fromkeys(LISTS, ((tokens + 1,), torch.int32))
    sizes |= {"slots": ((keys,), torch.int32), "seen": ((tokens,), torch.int32)}
    if route.kernel == "persistent":
        sizes |= metadata_sizes(required(library, need, INFO), heads, dtypes, steps)
    return sizes


def plan_decode(library: Library, plan: Plan, chosen: tuple[Route, Sequences]) -> DecodeCall:
    """Upload a step's lists, expand its pages and plan its work, all into the scratch of `plan`."""
    need, batch, (route, sequences) = plan.need, plan.batch, chosen
    most, s, fixed = int(sequences.query_lens.max()), len(sequences.owners), need.graph_capture
    first, t = int(sequences.rows[0]), sequences.tokens
    together = int(sequences.rows[-1]) - first + 1 == t
    rows = slice(first, first + t) if together else _upload(sequences.rows, need)
    owners = _upload(sequences.owners, need)
    padding = HeadPadding(need.N, route.heads)
    if route.kernel == "triton":
        none = owners.to(torch.int32)
        lens = _upload(sequences.kv_lens.astype(np.int32), need)
        return DecodeCall(route, padding, rows, sequences, most, none, lens, none, none, owners, {})
    lists = zip(LISTS, (*running_sums(sequences), np.ones(s, np.int32)), strict=True)
    qo_indptr, kv_indptr, last_page_lens = (_place(plan, name, values) for name, values in lists)
    n = sequences.keys
    slots = plan.scratch("slots", plan.sizes["slots"][0] if fixed else (n,), torch.int32)
    slots[:n] = slots_of_keys(batch.block_table, owners, kv_indptr, n, need.page_size)
    slots[n:] = SENTINEL
    call = DecodeCall(route, padding, rows, sequences, most, qo_indptr, kv_indptr, last_page_lens, slots, owners, {})
    if fixed:
        call.seen = _place(
            plan, "seen", (np.repeat(sequences.owners, sequences.query_lens) != STAND_IN).astype(np.int32)
        )
    if route.kernel == "persistent":
        metadata = required(library, need, METADATA)
        call.work = fill_metadata(metadata, plan, route, dtypes_of(need), qo_indptr, kv_indptr, last_page_lens, most)
    return call


def attend_decode(
    call: DecodeCall, q: Query, cache: PagedLatentCache, data: dict[str, Any], plan: Plan, window: int
) -> tuple[Tensor, Tensor | None]:
    """Attend the call's rows of q, nope (T, N, P) and pe (T, N, R): out (t, N, V), lse (t, N) natural log or None.

    `window` is in bytes. Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2. Raises ValueError where the cache
    reaches past the window, or AITER hands back no LSE.
    """
    need, W_UK, W_UV = plan.need, data["W_UK"], data["W_UV"]
    nope, pe = q.nope[call.rows], q.pe[call.rows]
    t, M = nope.shape[0], call.route.heads
    query = plan.scratch("query", (t, M, need.L + need.R), dtypes_of(need)[0])
    real = call.padding.real(query)  # (t, N, L + R)
    real[..., : need.L] = torch.bmm(nope.transpose(0, 1).to(W_UK.dtype), W_UK).transpose(0, 1)
    real[..., need.L :] = pe
    call.padding.fill(query)
    lse: Tensor | None
    if call.route.kernel == "triton":
        o, lse = _attend_triton(call, query, cache, data[TRITON_DECODE], plan, window)
    else:
        o, lse = _attend_assembly(call, query, cache, data[DECODE], plan, window)
    latent = call.padding.real(o).transpose(0, 1).to(W_UV.dtype)  # (N, t, L)
    out = torch.bmm(latent, W_UV).transpose(0, 1)
    lse = None if lse is None else call.padding.real(lse)
    if call.seen is not None:  # a stand-in may have met anything: its rows are dropped, not weighed with 0
        out = torch.where(call.seen[:, None, None] == 0, 0, out)
        lse = None if lse is None else torch.where(call.seen[:, None] == 0, float("-inf"), lse)
    return out, lse


def _attend_assembly(
    call: DecodeCall, query: Tensor, cache: PagedLatentCache, decode: Callable[..., Any], plan: Plan, window: int
) -> tuple[Tensor, Tensor | None]:
    """Latent output (t, M, L) and lse (t, M) of a dense query (t, M, L + R)."""
    need, route = plan.need, call.route
    kv, indices = kernel_rows(cache, call.slots)
    _check_reach(kv, window)
    # AITER may point `o` at new storage, so it is a tensor of its own and is read after the call, never through a view.
    # Where no work plan says who writes which row, rows may stay unwritten.
    make = torch.zeros if route.zero else torch.empty
    o = make(query.shape[0], route.heads, need.L, dtype=torch.bfloat16, device=query.device)
    how: dict[str, Any] = dict(call.work)
    if route.splits is not None:
        how["num_kv_splits"] = route.splits
    _, lse = decode(
        q=query, kv_buffer=kv, o=o, qo_indptr=call.qo_indptr, kv_indptr=call.kv_indptr, kv_indices=indices,
        kv_last_page_lens=call.last_page_lens, max_seqlen_q=call.most, page_size=1, nhead_kv=1,
        sm_scale=need.softmax_scale, return_lse=need.lse, **how,
    )  # fmt: skip
    if not need.lse:
        return o, None
    if lse is None or tuple(lse.shape) != tuple(o.shape[:2]):
        got = "None" if lse is None else str(tuple(lse.shape))
        raise bad("aiter's lse", expected=f"shape {tuple(o.shape[:2])}", got=got, fix="unset lse, or use triton")
    return o, lse


def _attend_triton(
    call: DecodeCall, query: Tensor, cache: PagedLatentCache, decode: Callable[..., Any], plan: Plan, window: int
) -> tuple[Tensor, Tensor]:
    """Latent output (t, N, L) and lse (t, N), float32, of a dense query (t, N, L + R), some rows at a time."""
    need, (t, N, _), page = plan.need, query.shape, cache.page_size
    o, lse = (query.new_empty(shape, dtype=torch.float32) for shape in ((t, N, need.L), (t, N)))
    step = max(1, TRITON_BYTES // (N * TRITON_SPLITS * (need.L + 1) * 4))
    rows, factor = token_rows(cache)
    _check_reach(rows, window)
    table = plan.batch.block_table[call.owners] * factor
    for first in range(0, t, step):
        some = slice(first, min(first + step, t))
        partial = query.new_empty((some.stop - first, N, TRITON_SPLITS, need.L + 1), dtype=torch.float32)
        decode(
            q=query[some], k_buffer=rows, v_buffer=rows[..., : need.L], o=o[some], lse=lse[some],
            req_to_token=table[some], b_seq_len=call.kv_indptr[some], attn_logits=partial,
            num_kv_splits=TRITON_SPLITS, sm_scale=need.softmax_scale, page_size=page,
        )  # fmt: skip
    return o, lse


def _check_reach(rows: Tensor, window: int) -> None:
    """Raise ValueError where rows (n, ..., width), of any row stride, reach past the window."""
    reach = rows.shape[0] * rows.stride(0) * rows.element_size()
    if reach >= window:
        fix = "give the layer fewer pages, or use triton"
        raise bad("cache.data", expected=f"below {window:,} bytes from first row to last", got=f"{reach:,}", fix=fix)


def _place(plan: Plan, name: str, values: np.ndarray) -> Tensor:
    """Copy a list of the host to the front of its scratch and return it there."""
    target = plan.scratch(name, values.shape, torch.int32)
    target.copy_(_pinned(values, plan.need), non_blocking=True)
    return target


def _upload(values: np.ndarray, need: Need) -> Tensor:
    return _pinned(values, need).to(need.device, non_blocking=True)


def _pinned(values: np.ndarray, need: Need) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host if need.device == "cpu" else host.pin_memory()
