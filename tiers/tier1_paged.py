"""Tier 1: what serving needs. Ragged mixed batches over pages, with a workspace that does not grow with the context.

Absorbed requests (decode, verification) are swept together: all of them take the next keys at once, as many as the
workspace holds. Expanded requests (prefill) go through chunks of keys that are gathered, expanded to heads and attended
block by block; chunk results merge by their LSE.

Axes: T new tokens (packed over requests), S cached tokens, G items of a sweep, N heads, L KV rank,
P nope, R rope, V value.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.checks import check_equal, check_int
from mla.chunks import Span, pack_chunks, refuse_workspace, sweep_strides, workspace_rows
from mla.cost import absorbed_workspace_bytes, expanded_workspace_bytes
from mla.errors import bad
from mla.need import Need, refuse_features
from mla.projections import Query, UpProjection
from mla.state import AttentionState, fold_block, merge
from mla.tier import Plan, Prepared, Tier, check_attend, deliver, plan, prepare, refuse_gradients
from mla.tune import FormCosts

Q_BLOCK = 128
BLOCK_SCORES = 1 << 20  # scores of one block over all heads: they keep the cores busy and fit the processor's caches
SWEEP_HEADS = 4096  # (row, head) pairs whose latent states are held at once
SWEEP_SCORES = 1 << 22  # scores held at once in a sweep


@dataclass(frozen=True)
class Sweep:
    """Absorbed items of one query length, longest first: item g is rows[g] (query_len,) of request requests[g].

    `strides` are (start, stop, active): the first `active` items take keys start .. stop - 1, clipped to kv_lens[g].
    """

    rows: Tensor
    requests: Tensor
    kv_lens: Tensor
    strides: list[tuple[int, int, int]]


@dataclass
class Steps:
    """A plan's work: sweeps of absorbed items, chunks of expanded keys, each request's rows, each row's key count."""

    sweeps: list[Sweep] = field(default_factory=list)
    chunks: list[list[Span]] = field(default_factory=list)
    rows: list[range] = field(default_factory=list)
    visible: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PagedTier(Tier):
    """Paged, chunked, mixed-form PyTorch; `form` is "auto" (by `costs`), "mha" or "mqa"; the cap is in rows (tokens).

    `max_workspace_tokens` None takes the serving formula from Need.capacity, or 65536 without one.
    """

    form: str = "auto"
    max_workspace_tokens: int | None = None
    costs: FormCosts = field(default_factory=FormCosts.default)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        if self.form not in ("auto", "mha", "mqa"):
            fix = "tiers.get('paged', form='auto')"
            raise bad("form", expected="'auto', 'mha' or 'mqa'", got=repr(self.form), fix=fix)
        cap = self.max_workspace_tokens
        if cap is not None:
            check_int("max_workspace_tokens", cap, 1, "None, or 65536 as usual")
        if not isinstance(self.costs, FormCosts):
            fix = "FormCosts.load(file) reads what `mla tune` wrote"
            raise bad("costs", expected="FormCosts", got=repr(self.costs), fix=fix, kind=TypeError)
        object.__setattr__(self, "name", "paged" if self.form == "auto" else f"paged:{self.form}")

    def cap(self, need: Need) -> int:
        """Rows of the workspace for `need`."""
        return workspace_rows(need, self.max_workspace_tokens)

    def why_not(self, need: Need) -> list[str]:
        """Return the sentences for features beyond plain MLA and for promises that this tier does not make."""
        reasons = refuse_features("paged", need)
        if need.batch_invariant:
            promise = "batch_invariant = True is not promised by paged"
            reasons.append(f"{promise}, whose forms and strides follow the batch; set it to False.")
        if need.graph_capture:
            reasons.append(
                "graph_capture = True is not possible in paged, whose loops follow the lengths; set it to False."
            )
        return reasons + refuse_workspace(need, self.cap(need))

    def write(self, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store kv_c (T, L) and k_pe (T, R) at slot_mapping (T,); raises ValueError where they carry gradients."""
        refuse_gradients("paged", kv_c, k_pe)
        cache.write(kv_c, k_pe, slot_mapping)

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Put heads first, once per layer: W_UK as (N, P, L) and W_UV as (N, L, V), in the compute dtype."""
        wide = need.compute_dtype
        W_UK, W_UV = (W.detach().to(wide) for W in up)
        W_UK, W_UV = W_UK.permute(1, 2, 0).contiguous(), W_UV.permute(1, 0, 2).contiguous()
        return prepare(self, up, need, W_UK=W_UK, W_UV=W_UV)

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Choose each request's form, pack the expanded ones into chunks and sort the absorbed ones into sweeps."""
        result, cap, steps = plan(self, need, batch, into), self.cap(need), Steps(visible=batch.row_kv_lens.tolist())
        at, forms, keys, items = 0, [], [], defaultdict(list)
        q_block = max(1, SWEEP_HEADS // need.N)
        for b, query_len in enumerate(batch.query_lens_host):
            steps.rows.append(range(at, at + query_len))
            seen = max(steps.visible[at : at + query_len], default=0)
            form = self.form if self.form != "auto" else self.costs.form(need, query_len, seen)
            forms.append(form if seen else "empty")
            keys.append(seen if form == "mha" else 0)
            for first in range(at, at + query_len if form == "mqa" else at, q_block):
                rows = range(first, min(first + q_block, at + query_len))
                items[len(rows)].append((max(steps.visible[r] for r in rows), b, rows))
            at += query_len
        steps.chunks = pack_chunks(keys, cap, need.page_size)
        for query_len, found in sorted(items.items()):
            group = sorted((i for i in found if i[0]), key=lambda i: -i[0])
            width = max(1, min(q_block // query_len, cap))
            steps.sweeps += [_sweep(group[g : g + width], need, cap) for g in range(0, len(group), width)]
        result.steps, result.sizes = steps, self._sizes(need, cap, steps)
        result.report = {"forms": forms, "chunks": len(steps.chunks), "sweeps": len(steps.sweeps)}
        result.report |= {"costs": self.costs.provenance, "workspace_bound": _bound(need, cap, steps, batch.num_tokens)}
        return result

    def _sizes(self, need: Need, cap: int, steps: Steps) -> dict:
        """Scratch by name: for the whole cap where the Need has a capacity, else for this batch."""
        expanded = max((c[-1].at + c[-1].stop - c[-1].start for c in steps.chunks), default=0)
        swept = max((active * (stop - start) for s in steps.sweeps for start, stop, active in s.strides), default=0)
        if need.capacity is not None:
            expanded, swept = 0 if self.form == "mqa" else cap, cap
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        sizes["rows"] = ((max(expanded, swept), need.layout.storage_width), need.layout.storage_dtype)
        if expanded:
            dtype = _stored(need)
            sizes |= {"k_nope": ((expanded, need.N, need.P), dtype), "v": ((expanded, need.N, need.V), dtype)}
        return sizes

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Attend q.nope (T, N, P) and q.pe (T, N, R) over the pages: out (T, N, V) and lse (T, N).

        Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 for the forms; FlashAttention-2 (arXiv 2307.08691) for
        the online softmax and the merge.
        """
        check_attend(q, cache, prepared, plan, out)
        check_equal("plan.tier", plan.tier, self.name, "plan with the tier that attends")
        need = plan.need
        state = AttentionState.empty(
            plan.batch.num_tokens, need.N, need.V, dtype=need.compute_dtype, device=need.device
        )
        for sweep in plan.steps.sweeps:
            _attend_sweep(sweep, q, cache, prepared, plan, state)
        for chunk in plan.steps.chunks:
            _attend_chunk(chunk, q, cache, prepared, plan, state)
        return deliver(state, plan, out)


def k_block(need: Need) -> int:
    """Keys of one block of the expanded form, fixed for the life of a layer: 512 at 16 heads, between 256 and 4096."""
    return min(4096, max(256, BLOCK_SCORES // (need.N * Q_BLOCK)))


def _stored(need: Need) -> torch.dtype:
    """dtype of expanded keys and values: the query's, but float16 ends at 65504, which expanded latents can pass."""
    return need.compute_dtype if need.dtype == torch.float16 else need.dtype


def _bound(need: Need, cap: int, steps: Steps, tokens: int) -> int:
    """Bytes that attend holds at most beside its inputs, by the formulas of `mla.cost`; independent of the context."""
    b, q_rows = _stored(need).itemsize, max((s.rows.numel() for s in steps.sweeps), default=0)
    scores = SWEEP_SCORES // (need.N * q_rows) if q_rows else 0
    bound = 0
    if steps.sweeps:
        bound += absorbed_workspace_bytes(need, cap, q_rows, itemsize=b, k_block=scores, tokens=tokens)
    if steps.chunks:
        bound += expanded_workspace_bytes(need, cap, itemsize=b, q_block=Q_BLOCK, k_block=k_block(need), tokens=tokens)
    return bound


def _sweep(items: list, need: Need, cap: int) -> Sweep:
    """Put absorbed items (keys, request, rows) of one query length, longest first, in a sweep."""
    lens, query_len = [length for length, _, _ in items], len(items[0][2])
    room = min(cap, SWEEP_SCORES // (need.N * query_len))
    as_index = lambda values: torch.tensor(values, dtype=torch.int64, device=need.device)
    rows, requests = as_index([list(rows) for _, _, rows in items]), as_index([b for _, b, _ in items])
    return Sweep(rows, requests, as_index(lens), sweep_strides(lens, room, k_block(need)))


def _attend_sweep(
    sweep: Sweep, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, state: AttentionState
) -> None:
    """Absorbed form of all items at once, online softmax over the strides; writes their rows of `state`."""
    need, batch, wide = plan.need, plan.batch, plan.need.compute_dtype
    G, query_len = sweep.rows.shape
    flat = sweep.rows.flatten()
    visible = batch.row_kv_lens[flat].view(G, query_len, 1, 1)
    scale = need.softmax_scale
    q_latent = torch.bmm(q.nope[flat].transpose(0, 1).to(wide), prepared.data["W_UK"])  # (N, G*q, L)
    q_latent = q_latent.transpose(0, 1).reshape(G, query_len * need.N, need.L).mul_(scale)
    q_pe = q.pe[flat].to(wide).view(G, query_len * need.N, need.R) * scale
    top = q_latent.new_full((G, query_len * need.N, 1), float("-inf"))
    total, acc = torch.zeros_like(top), torch.zeros_like(q_latent)
    for start, stop, active in sweep.strides:
        at = torch.arange(start, stop, device=need.device)
        own = torch.minimum(at, sweep.kv_lens[:active, None] - 1)  # a key past the end stands in for itself, masked
        page = batch.block_table[sweep.requests[:active, None], own // need.page_size].to(torch.int64)
        slots = (page * need.page_size + own % need.page_size).flatten()
        width = need.layout.storage_width
        rows = cache.gather(slots, plan.scratch("rows", (slots.shape[0], width), need.layout.storage_dtype))
        kv_c, k_pe = (x.to(wide).view(active, stop - start, x.shape[-1]) for x in need.layout.read(rows))
        scores = torch.bmm(q_latent[:active], kv_c.transpose(1, 2))
        scores.baddbmm_(q_pe[:active], k_pe.transpose(1, 2))
        scores.view(active, query_len, need.N, -1).masked_fill_(at >= visible[:active], float("-inf"))
        fold_block(scores, kv_c, top[:active], total[:active], acc[:active])
        del scores, rows, kv_c, k_pe
    out_latent = torch.where(total == 0, 0, acc / total).view(G * query_len, need.N, need.L)
    out, lse = state.parts()
    out[flat] = torch.bmm(out_latent.transpose(0, 1), prepared.data["W_UV"]).transpose(0, 1)
    lse[flat] = (top + total.log()).view(G * query_len, need.N)


def _attend_chunk(
    chunk: list[Span], q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, state: AttentionState
) -> None:
    """Gather and expand one chunk of keys, attend each request's queries over its span, merge into `state`."""
    need, batch = plan.need, plan.batch
    n = chunk[-1].at + chunk[-1].stop - chunk[-1].start
    rows = plan.scratch("rows", (n, need.layout.storage_width), need.layout.storage_dtype)
    k_nope = plan.scratch("k_nope", (need.N, n, need.P), _stored(need))
    v = plan.scratch("v", (need.N, n, need.V), _stored(need))
    step = k_block(need)
    for span in chunk:
        for start in range(span.start, span.stop, step):
            stop, at = min(start + step, span.stop), span.at + start - span.start
            keys = torch.arange(start, stop, device=need.device)
            page = batch.block_table[span.request, keys // need.page_size].to(torch.int64)
            part = slice(at, at + stop - start)
            cache.gather(page * need.page_size + keys % need.page_size, rows[part])
            kv_c = need.layout.read(rows[part])[0].to(need.compute_dtype)
            k_nope[:, part] = torch.matmul(kv_c, prepared.data["W_UK"].transpose(1, 2))  # (N, k, P)
            v[:, part] = torch.matmul(kv_c, prepared.data["W_UV"])
    k_pe = need.layout.read(rows)[1]
    for span in chunk:
        part = slice(span.at, span.at + span.stop - span.start)
        queries = plan.steps.rows[span.request]
        for first in range(queries.start, queries.stop, Q_BLOCK):
            block = range(first, min(first + Q_BLOCK, queries.stop))
            partial = _attend_block(q, block, k_nope[:, part], k_pe[part], v[:, part], span.start, plan)
            if partial is not None:
                out, lse = (x[block.start : block.stop] for x in state.parts())
                merged = merge(AttentionState(out, lse), partial)
                for held, new in zip((out, lse), merged.parts(), strict=True):
                    held.copy_(new)


def _attend_block(
    q: Query, rows: range, k_nope: Tensor, k_pe: Tensor, v: Tensor, first_key: int, plan: Plan
) -> AttentionState | None:
    """Expanded form of a block of query rows over one span, by key blocks; None where it sees nothing."""
    need, wide, block = plan.need, plan.need.compute_dtype, slice(rows.start, rows.stop)
    seen = [plan.steps.visible[r] - first_key for r in rows]
    if max(seen) <= 0:
        return None
    visible = plan.batch.row_kv_lens[block, None] - first_key  # (q, 1)
    q_nope, q_pe = (x[block].transpose(0, 1).to(wide) * need.softmax_scale for x in q)  # (N, q, P), (N, q, R)
    top = q_nope.new_full((need.N, len(rows), 1), float("-inf"))
    total, acc = torch.zeros_like(top), q_nope.new_zeros(need.N, len(rows), need.V)
    last, step = min(max(seen), k_pe.shape[0]), k_block(need)
    for start in range(0, last, step):
        stop = min(start + step, last)
        scores = torch.bmm(q_nope, k_nope[:, start:stop].to(wide).transpose(1, 2))  # (N, q, k)
        flat = scores.view(need.N * len(rows), stop - start)
        flat.addmm_(q_pe.reshape(need.N * len(rows), need.R), k_pe[start:stop].to(wide).T)
        if min(seen) < stop:
            scores.masked_fill_(torch.arange(start, stop, device=need.device) >= visible, float("-inf"))
        fold_block(scores, v[:, start:stop].to(wide), top, total, acc)
        del scores, flat
    out = torch.where(total == 0, 0, acc / total).transpose(0, 1)
    return AttentionState(out, (top + total.log())[..., 0].T)
