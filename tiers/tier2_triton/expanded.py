"""The expanded half of the Triton tier: latents become every head's keys and values, a bounded workspace at a time.

Keys of the chosen requests are packed into chunks of at most `cap` rows. A chunk is gathered from pages, multiplied by
W_UK and W_UV, and attended by one of four routes: "triton" and, on sm_90, "hopper", our own kernels, all requests of a
chunk in one launch; "cudnn" and "padded", kernels behind PyTorch that take one request at a time, a rectangle or a
causal square, and whose results are merged. "padded" fills values up to P + R with zeros for a kernel of equal widths
and cuts the output back.

Axes: T new tokens (packed over requests), n keys in the workspace, B requests, N heads, L KV rank, P nope, R rope,
V value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from mla.aot import SHARED_LIMIT
from mla.batch import AttentionBatch
from mla.cache import FloatRows, PagedLatentCache
from mla.chunks import Span, pack_chunks
from mla.errors import bad
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.tier import Plan

ROUTES = ("triton", "hopper", "cudnn", "padded")  # the first two work by tiles, the others by calls
OURS = {"triton": "tiers.tier2_triton.kernels.prefill", "hopper": "tiers.tier2_triton.hopper.prefill"}
HOPPER_SIZES = ((128, 64, 128), (192, 64, 256))  # P, R, V that `hopper.prefill` takes
# New tokens from which cuDNN is faster: 4 x 256 over 8192 keys take 3.0 ms by our kernel and 3.8 by cuDNN, one fresh
# prompt of 4096 takes 1.80 and 1.70.
CUDNN_FROM = 1024
CUDNN_WIDTH = {"sm_90": 256, "sm_80": 128, "sm_100": 128}  # widest head that PyTorch lets through to cuDNN
ONE_KEY_ROWS = 256
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Call(NamedTuple):
    """One call of a kernel behind PyTorch: rows of the batch over keys of the workspace, each [start, stop).

    `causal` is a square in which row i sees keys 0 .. i; else every row sees every key.
    """

    row: int
    row_stop: int
    key: int
    key_stop: int
    causal: bool


@dataclass
class Chunk:
    """What the workspace holds at once: `rows` rows, the blocks (k, 4) that fill it, and the work over it.

    `blocks` and `tiles` (num_tiles, 7) are int32 on the device; "triton" and "hopper" work by tiles, others by calls.
    """

    rows: int
    blocks: Tensor
    tiles: Tensor
    calls: list[Call] = field(default_factory=list)


@dataclass
class ExpandedSteps:
    """A step's expanded work; `sizes` are the scratch buffers for `Plan.sizes`, all named expanded_*.

    For the routes behind PyTorch, `parts` lists the rows [start, stop) whose result is merged from several calls, with
    their first row in the accumulator, and `empty` those that see no key.
    """

    route: str
    tile: tuple[int, ...] = (0, 0, 0, 0, 0)
    chunks: list[Chunk] = field(default_factory=list)
    sizes: Sizes = field(default_factory=dict)
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    empty: list[tuple[int, int]] = field(default_factory=list)


def why_not_route(need: Need, route: str) -> list[str]:
    """Return [] where `route` can compute the expanded form for `need`, else whole sentences: found, allowed, the fix.

    Raises ValueError for a route that does not exist.
    """
    if route not in ROUTES:
        raise bad("route", expected=f"one of {ROUTES}", got=repr(route), fix="prefill='triton', for one")
    reasons = []
    kinds = (torch.bfloat16,) if route != "triton" else (torch.bfloat16, torch.float32)
    if need.dtype not in kinds:
        why = " (expanded float16 keys can pass 65504)" if need.dtype == torch.float16 else ""
        allowed = " or ".join(map(str, kinds))
        fix = "use one of these or the absorbed form"
        reasons.append(f"dtype {need.dtype} is not expanded by route {route!r}{why}, which takes {allowed}; {fix}.")
    if not isinstance(need.layout, FloatRows) or need.layout.dtype != need.dtype:
        found = f"a cache of {need.layout.name} rows is not expanded for queries of {need.dtype}"
        reasons.append(f"{found}; route {route!r} takes rows of the queries' dtype; use that or the absorbed form.")
    if route in OURS:
        return reasons + (_why_not_triton(need) if route == "triton" else _why_not_hopper(need))
    return reasons + _why_not_sdpa(need, route)


def _why_not_triton(need: Need) -> list[str]:
    try:
        _tile(need, "triton")
    except ValueError as error:
        return [f"route 'triton' does not fit on {need.arch}: {error}"]
    return []


def _why_not_hopper(need: Need) -> list[str]:
    reasons = []
    if need.arch != "sm_90":
        reasons.append(f"arch {need.arch!r} is not served by route 'hopper', which takes sm_90; use 'triton'.")
    if (need.P, need.R, need.V) not in HOPPER_SIZES or need.L % 8:
        found = f"P, R, V, L = {need.P}, {need.R}, {need.V}, {need.L} is not taken by route 'hopper'"
        reasons.append(f"{found}, which takes 128, 64, 128 or 192, 64, 256 and multiples of 8; use 'triton'.")
    return reasons


def _why_not_sdpa(need: Need, route: str) -> list[str]:
    reasons, width = [], need.P + need.R
    widest = CUDNN_WIDTH.get(need.arch) if route == "cudnn" else 256 if need.arch.startswith("sm_") else None
    if need.mask not in ("causal", "full"):
        reasons.append(
            f"mask {need.mask!r} is not computed by route {route!r}, which takes 'causal' and 'full'; use 'triton'."
        )
    if widest is None:
        allowed = ", ".join(CUDNN_WIDTH) if route == "cudnn" else "Nvidia GPUs from sm_80 on"
        reasons.append(f"arch {need.arch!r} is not served by route {route!r}, which takes {allowed}; use 'triton'.")
        return reasons
    if max(width, need.V) > widest or width % 8 or need.V % 8:
        sizes = f"P + R = {width}, V = {need.V}"
        allowed = f"multiples of 8 up to {widest} on {need.arch}"
        reasons.append(f"{sizes} is not taken by route {route!r}, which takes {allowed}; use 'triton'.")
    if route == "padded" and width < need.V:
        reasons.append(f"V = {need.V} cannot be padded to P + R = {width}; use 'triton'.")
    return reasons


def prepare_expanded(up: UpProjection, need: Need, route: str = "triton") -> dict[str, Tensor]:
    """Flatten W_UK (L, N, P) to (L, N*P) and W_UV (L, N, V) to (L, N*V), contiguous, in the query's dtype.

    For route "padded" W_UV is (L, N*(P+R)) with zeros behind each head's V columns: values come out padded.
    """
    W_UK, W_UV = (W.detach().to(need.dtype) for W in up)
    if route == "padded":
        W_UV = pad(W_UV, (0, need.P + need.R - need.V))
    return {"expanded_W_UK": W_UK.flatten(1).contiguous(), "expanded_W_UV": W_UV.flatten(1).contiguous()}


def plan_expanded(
    need: Need, batch: AttentionBatch, requests: Sequence[int], cap: int, route: str = "triton"
) -> ExpandedSteps:
    """Pack the keys of `requests` into chunks of at most `cap` rows and list the work over each, once per step.

    Every row of these requests is written by `attend_expanded`, also one that sees no key. Work lists go to the device
    without waiting for it; batch.row_kv_lens (T,) is not read. No requests, no work and no buffers.
    """
    if not requests:
        return ExpandedSteps(route)
    counts = [0] * batch.num_requests
    for b in requests:
        counts[b] = batch.seq_lens_host[b] if batch.query_lens_host[b] else 0
    packed = pack_chunks(counts, cap, need.page_size)
    steps = ExpandedSteps(route)
    if route in OURS:
        held, work = _tiles(steps, need, batch, sorted(requests), packed)
        calls: list[list[Call]] = [[] for _ in work]
    else:
        held, calls = _calls(steps, batch, sorted(requests), packed)
        work = [np.zeros((0, 7), np.int32) for _ in calls]
    steps.chunks = _upload(need, packed, work, calls)
    rows = max((c.rows for c in steps.chunks), default=0)
    queries = max((batch.query_lens_host[b] for b in requests), default=0)
    if need.capacity is not None:
        steps.sizes = expanded_sizes(need, cap, route)
    else:
        steps.sizes = _sizes(need, route, rows, held, queries, batch.num_tokens)
    return steps


def expanded_sizes(need: Need, cap: int, route: str = "triton") -> Sizes:
    """Return the scratch buffers of a Need with a capacity, (shape, dtype) by name, for a workspace of `cap` rows.

    Latent rows (cap, L + R), keys (cap, N, P), values (cap, N, V); an accumulator (max_tokens, N, V) in float32, and an
    LSE (max_tokens, N) where none is asked for. With s bytes a number, at most this many beside the results:

        cap (L + R + N (P + V)) s + 4 max_tokens N (V + 1)

    Our own routes have no accumulator where all keys fit into one chunk, or where the output is float32 and is added up
    in place. The others always have one, and cap N (P + R) s for whole keys, max_query_len N (P + R) s for queries,
    P + R in place of V if "padded", and what PyTorch allocates for the output of a call. Raises ValueError without a
    capacity.
    """
    c = need.capacity
    if c is None:
        raise bad("need.capacity", expected="a Capacity", got="None", fix="take the sizes that plan_expanded found")
    split = route not in OURS or c.max_requests * c.max_seq_len > cap
    return _sizes(need, route, cap, c.max_tokens if split else 0, c.max_query_len, c.max_tokens)


def _sizes(need: Need, route: str, rows: int, held: int, queries: int, tokens: int) -> Sizes:
    dtype, N, width = need.dtype, need.N, need.P + need.R
    sizes: Sizes = {
        "expanded_rows": ((rows, need.layout.storage_width), need.layout.storage_dtype),
        "expanded_k_nope": ((rows, N * need.P), dtype),
        "expanded_v": ((rows, N * (width if route == "padded" else need.V)), dtype),
    }
    if route not in OURS:
        sizes["expanded_k"] = ((rows, N, width), dtype)
        sizes["expanded_q"] = ((queries, N, width), dtype)
    if not _out_is_acc(need, route):
        sizes["expanded_acc"] = ((held, N, need.V), torch.float32)
    if not need.lse:
        sizes["expanded_lse"] = ((tokens, N), torch.float32)
    return sizes


def _out_is_acc(need: Need, route: str) -> bool:
    """True where partial results may lie in the output itself, without rounding."""
    return route in OURS and need.out_dtype == torch.float32


def _tile(need: Need, route: str) -> tuple[int, ...]:
    """The kernel's tile on this GPU; on one that is not known, the tile for the least shared memory."""
    if route == "hopper":
        from tiers.tier2_triton.hopper.prefill import TILE

        return TILE
    from tiers.tier2_triton.kernels.prefill import prefill_tile

    return prefill_tile(need.dtype, need.P, need.R, need.V, SHARED_LIMIT.get(need.arch, min(SHARED_LIMIT.values())))


def _tiles(
    steps: ExpandedSteps, need: Need, batch: AttentionBatch, requests: list[int], packed: list[list[Span]]
) -> tuple[int, list[NDArray[np.int32]]]:
    """List the kernel's tiles of each chunk (k, 7), heavy ones first; return the accumulator's rows and the lists.

    Every tile meets every span of its request at once, in arrays: a loop would be as long as prompts are. A tile takes
    part where it sees a key of the span, and at its request's first span in any case, so that its rows are written.
    """
    from tiers.tier2_triton.kernels.gather import cut
    from tiers.tier2_triton.kernels.prefill import CONTINUES, LEAVES

    steps.tile = _tile(need, steps.route)
    starts, query_lens = np.array([0, *accumulate(batch.query_lens_host)]), np.zeros(batch.num_requests, np.int64)
    query_lens[requests] = np.array(batch.query_lens_host)[requests]
    owner, offset, rows = cut(query_lens, steps.tile[0])
    row, most = starts[owner] + offset, np.array(batch.seq_lens_host)[owner]
    if batch.mask == "causal":  # keys that the tile's last row sees; explicit bounds are not known here
        most = np.maximum(most - query_lens[owner] + offset + rows, 0)

    spans = [(c, s.request, s.start, s.stop, s.at) for c, chunk in enumerate(packed) for s in chunk]
    spans += [(0, b, 0, 0, 0) for b in requests if not batch.seq_lens_host[b]]
    chunk, request, first, last, at = np.array(spans, np.int64).reshape(-1, 5).T
    counts = np.bincount(owner, minlength=batch.num_requests)
    pair, tile, _ = cut(counts[request], 1)
    tile += (np.cumsum(counts) - counts)[request[pair]]
    there = (first[pair] < most[tile]) | (first[pair] == 0)
    pair, tile = pair[there], tile[there]
    chunk, first, last, at, most = chunk[pair], first[pair], last[pair], at[pair], most[tile]

    goes_on = last < most
    split = rows * (np.bincount(tile, goes_on, len(rows)) > 0)
    acc_row = row if _out_is_acc(need, steps.route) else np.cumsum(split) - split
    flags = CONTINUES * (first > 0) + LEAVES * goes_on
    items = np.stack([row[tile], rows[tile], at, last - first, first, acc_row[tile], flags], 1).astype(np.int32)
    order = np.lexsort((-np.minimum(last, most) + first, chunk))  # keys that a tile sees, most first, by chunk
    ends = np.cumsum(np.bincount(chunk, minlength=max(1, len(packed))))
    return int(split.sum()), np.split(items[order], ends[:-1])


def _calls(
    steps: ExpandedSteps, batch: AttentionBatch, requests: list[int], packed: list[list[Span]]
) -> tuple[int, list[list[Call]]]:
    """Cut what each request sees of each span into rectangles and squares; return the accumulator's rows and calls."""
    starts = [0, *accumulate(batch.query_lens_host)]
    calls: list[list[Call]] = [[] for _ in packed]
    per_request = dict.fromkeys(requests, 0)
    for c, chunk in enumerate(packed):
        for span in chunk:
            first, last = starts[span.request], starts[span.request + 1]
            query_len, seq_len = batch.query_lens_host[span.request], batch.seq_lens_host[span.request]
            own = seq_len - query_len if batch.mask == "causal" else seq_len  # where the new tokens' own keys begin
            at = span.at - span.start
            split, a, b = min(max(own, span.start), span.stop), max(span.start, own) - own, span.stop - own
            found = [Call(first, last, span.start + at, split + at, False)]
            if split < span.stop:
                found.append(Call(first + a, first + b, split + at, span.stop + at, True))
                found.append(Call(first + b, last, split + at, span.stop + at, False))
            found = [call for call in found if call.row < call.row_stop and call.key < call.key_stop]
            calls[c] += found
            per_request[span.request] += len(found)
    held = 0
    for b in requests:
        if per_request[b] > 1:
            steps.parts.append((starts[b], starts[b + 1], held))
            held += starts[b + 1] - starts[b]
        elif not per_request[b] and starts[b] < starts[b + 1]:
            steps.empty.append((starts[b], starts[b + 1]))
    return held, calls


def _upload(
    need: Need, packed: list[list[Span]], work: list[NDArray[np.int32]], calls: list[list[Call]]
) -> list[Chunk]:
    """Bring all lists to the device in one copy that nobody waits for; work without a key is a chunk of no rows."""
    from tiers.tier2_triton.kernels.gather import gather_blocks

    packed = packed or [[] for _ in work]
    lists = [gather_blocks(spans) for spans in packed] + work
    host = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *(x.ravel() for x in lists)]))
    if need.device != "cpu":
        host = host.pin_memory()
    device = host.to(need.device, non_blocking=True)
    views = [x.view(of.shape) for x, of in zip(device.split([x.size for x in lists]), lists, strict=True)]
    ends = [spans[-1].at + spans[-1].stop - spans[-1].start if spans else 0 for spans in packed]
    return [Chunk(*chunk) for chunk in zip(ends, views[: len(packed)], views[len(packed) :], calls, strict=True)]


def attend_expanded(
    steps: ExpandedSteps,
    q: Query,
    cache: PagedLatentCache,
    data: dict[str, Tensor],
    plan: Plan,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attend the rows of the planned requests: writes their rows of out (T, N, V) and of lse (T, N), natural log.

    q.nope (T, N, P) and q.pe (T, N, R) are of need.dtype, `data` is what `prepare_expanded` made, `plan` owns the
    scratch that `steps.sizes` names. Rows of other requests are not touched. Does not wait for the device.
    Source: DeepSeek-V2 (arXiv 2405.04434), eqs. 9 to 18; FlashAttention-2 (arXiv 2307.08691) for chunks.
    """
    need = plan.need
    if not steps.sizes:
        return
    if lse is None:
        lse = plan.scratch("expanded_lse", (plan.batch.num_tokens, need.N), torch.float32)
    acc = out if _out_is_acc(need, steps.route) else _whole(plan, "expanded_acc")
    if steps.route not in OURS:
        _begin(steps, out, lse)
    for chunk in steps.chunks:
        k_nope, k_pe, v = _expand(chunk, cache, data, plan)
        if steps.route in OURS:
            bounds = plan.batch.row_kv_lens.contiguous()
            work = (bounds, chunk.tiles, acc, out, lse, need.softmax_scale, steps.tile)
            import_module(OURS[steps.route]).prefill(*q, k_nope, k_pe, v, *work)
        else:
            _attend_calls(steps, chunk, q, k_nope, k_pe, v, plan, acc, out, lse)
    for row, stop, at in steps.parts:
        out[row:stop].copy_(acc[at : at + stop - row])


def _whole(plan: Plan, name: str) -> Tensor:
    return plan.scratch(name, *plan.sizes[name])


def _expand(
    chunk: Chunk, cache: PagedLatentCache, data: dict[str, Tensor], plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather and expand a chunk: k_nope (n, N, P), k_pe (n, R) and v (n, N, V) or, padded, (n, N, P + R)."""
    from tiers.tier2_triton.kernels.gather import gather_rows

    need, n, dtype = plan.need, chunk.rows, plan.need.dtype
    W_UK, W_UV = data["expanded_W_UK"], data["expanded_W_UV"]
    rows = plan.scratch("expanded_rows", (n, need.layout.storage_width), need.layout.storage_dtype)
    k_nope = plan.scratch("expanded_k_nope", (n, W_UK.shape[1]), dtype)
    v = plan.scratch("expanded_v", (n, W_UV.shape[1]), dtype)
    gather_rows(cache.data, plan.batch.block_table.contiguous(), chunk.blocks, rows)
    kv_c, k_pe = need.layout.read(rows)
    torch.mm(kv_c, W_UK, out=k_nope)
    torch.mm(kv_c, W_UV, out=v)
    return k_nope.view(n, need.N, need.P), k_pe, v.view(n, need.N, v.shape[1] // need.N)


def _begin(steps: ExpandedSteps, out: Tensor, lse: Tensor) -> None:
    """Say where no key has been seen yet: of such a state `merge` takes nothing, whatever the accumulator holds."""
    for row, stop, _ in steps.parts:
        lse[row:stop].fill_(float("-inf"))
    for row, stop in steps.empty:
        lse[row:stop].fill_(float("-inf"))
        out[row:stop].zero_()


def _attend_calls(
    steps: ExpandedSteps,
    chunk: Chunk,
    q: Query,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    plan: Plan,
    acc: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend a chunk by a kernel behind PyTorch, one rectangle or square after the other."""
    from tiers.tier2_triton.kernels.concat import concat
    from tiers.tier2_triton.kernels.merge import merge

    need = plan.need
    width = need.P + need.R
    k = plan.scratch("expanded_k", (chunk.rows, need.N, width), need.dtype)
    concat(k_nope, k_pe, k)
    for call in chunk.calls:
        rows, keys = slice(call.row, call.row_stop), slice(call.key, call.key_stop)
        query = plan.scratch("expanded_q", (call.row_stop - call.row, need.N, width), need.dtype)
        concat(q.nope[rows], q.pe[rows], query)
        part, part_lse = attend_keys(steps.route, query, k[keys], v[keys], call.causal, need.softmax_scale)
        part = part[..., : need.V]
        at = next((at + call.row - row for row, stop, at in steps.parts if row <= call.row < stop), None)
        if at is None:
            out[rows].copy_(part)
            lse[rows].copy_(part_lse)
        else:
            state = acc[at : at + call.row_stop - call.row]
            merge(state, lse[rows], part, part_lse, state, lse[rows])


def attend_keys(
    route: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend q (t, N, P+R) over k (s, N, P+R) and v (s, N, V or P+R) by the kernel of a route behind PyTorch.

    Returns out (t, N, V or P+R) in v's dtype and lse (t, N) float32, natural log. A single key, which cuDNN does not
    take, needs no kernel: the output is its value.
    """
    t, N = q.shape[:2]
    if k.shape[0] == 1:
        blocks = [(x.float() * k.float()).sum(-1) for x in q.split(ONE_KEY_ROWS)]
        return v.expand(t, N, v.shape[2]), torch.cat(blocks) * softmax_scale
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]  # (1, N, t or s, width)
    if route == "cudnn":
        kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
        found = kernel(*heads, None, True, 0.0, causal, False, scale=softmax_scale)
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        found = kernel(*heads, 0.0, causal, False, scale=softmax_scale)
    return found[0][0].transpose(0, 1), found[1].reshape(N, -1)[:, :t].T
