"""Tier 2 by FlashMLA: DeepSeek's own decode kernel for Hopper, the peer that figures on an H200 are compared with.

Every request is absorbed. Requests of one query length make a group, and a group is one call; explicit row bounds make
each row a request of its own. Its LSE is a natural logarithm, with +inf where a row sees nothing.

Axes: T new tokens (packed over requests), G requests of a group, q tokens of each, N heads, L KV rank, P nope, R rope,
V value.
"""

import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import FloatRows, PagedLatentCache
from mla.checks import check_aligned, check_equal
from mla.need import Need, refuse_features, refuse_package
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier, check_attend, deliver, latent_state, plan, prepare, refuse_gradients

PAGE, ROWS, ARCH, DTYPES = 64, (512, 64), "sm_90", (torch.bfloat16,)
KEYWORDS = ("softmax_scale", "causal", "use_legacy")
ROUND_TOKENS = 1 << 15  # absorbed queries of 128 heads are 4.8 GB then


@dataclass(frozen=True, eq=False)
class Group:
    """One call: `rows` (G*q,) int64 of the batch, `table` (G, pages) and `lens` (G,) int32; `schedule` is the kernel's.

    The kernel fills `schedule` in its first call, and later layers of the step find it filled.
    """

    query_len: int
    causal: bool
    rows: Tensor
    table: Tensor
    lens: Tensor
    schedule: Any


@dataclass(frozen=True)
class FlashMLATier(Tier):
    """FlashMLA's dense decode of bf16 rows on sm_90, as packaged in sgl-flash-mla; pages of 64 rows.

    `library` is a module with its names, None for the one that is installed.
    """

    library: Any = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", "flashmla" if self.library is None else "flashmla (stand-in)")

    def why_not(self, need: Need) -> list[str]:
        """Return the sentences for what this kernel, this device or this package cannot do; nothing is launched."""
        reasons = []
        if self.library is None:
            if need.arch != ARCH:
                reasons.append(f"arch {need.arch!r} is not served by flashmla, whose kernel is for {ARCH}; use triton.")
            missing = refuse_package("flashmla", "sgl-flash-mla", "1.0", "flashmla")
            reasons += missing or _moved()
        asked: dict[str, tuple[object, tuple]] = {
            "dtype": (need.dtype, DTYPES),
            "page_size": (need.page_size, (PAGE,)),
            "(L, R)": ((need.L, need.R), (ROWS,)),
        }
        for what, (found, allowed) in asked.items():
            if found not in allowed:
                takes = ", ".join(map(str, allowed))
                reasons.append(f"{what} = {found} is not taken by flashmla, which takes {takes}; use that or triton.")
        if not isinstance(need.layout, FloatRows) or need.layout.dtype != need.dtype:
            rows = f"a cache of {need.layout.name} rows is not read by flashmla for queries of {need.dtype}"
            reasons.append(f"{rows}; use FloatRows of the queries' dtype.")
        if need.batch_invariant:
            promise = "batch_invariant = True is not promised by flashmla"
            reasons.append(f"{promise}, which cuts keys by who else is there; use triton:invariant.")
        if need.graph_capture:
            reasons.append(
                "graph_capture = True is not offered by flashmla, whose schedule is made in the first call of a step; "
                "use triton."
            )
        return reasons + refuse_features("flashmla", need)

    def write(self, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store kv_c (T, L) and k_pe (T, R) at slot_mapping (T,); raises ValueError where they carry gradients."""
        refuse_gradients("flashmla", kv_c, k_pe)
        cache.write(kv_c, k_pe, slot_mapping)

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Put heads first, once per layer: W_UK as (N, P, L) and W_UV as (N, L, V), in the query's dtype."""
        W_UK, W_UV = (W.detach().to(need.dtype) for W in up)
        W_UK, W_UV = W_UK.permute(1, 2, 0).contiguous(), W_UV.permute(1, 0, 2).contiguous()
        return prepare(self, up, need, W_UK=W_UK, W_UV=W_UV)

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Group the requests by query length; the schedules are the kernel's own and are made in the first attend."""
        _, new_schedule = _names(self.library)
        result = plan(self, need, batch, into)
        result.steps = _groups(batch, new_schedule)
        result.report = {"forms": ["mqa"] * batch.num_requests, "calls": len(result.steps)}
        return result

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Attend q.nope (T, N, P) and q.pe (T, N, R) over the pages: out (T, N, V) and lse (T, N).

        Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2 for the absorbed form.
        """
        check_attend(q, cache, prepared, plan, out)
        check_equal("plan.tier", plan.tier, self.name, "plan with the tier that attends")
        refuse_gradients("flashmla", q.nope, q.pe)
        W_UK, W_UV = prepared.data["W_UK"], prepared.data["W_UV"]
        q_latent = torch.bmm(q.nope.transpose(0, 1), W_UK).transpose(0, 1)
        found = self.attend_latent(q_latent, q.pe, cache, prepared, plan)
        return deliver(found._replace(out=torch.bmm(found.out.transpose(0, 1), W_UV).transpose(0, 1)), plan, out)

    def attend_latent(
        self,
        q_latent: Tensor,
        q_pe: Tensor,
        cache: PagedLatentCache,
        prepared: Prepared | None,
        plan: Plan,
        out: AttentionState | None = None,
    ) -> AttentionState:
        """Attend absorbed queries alone: q_latent (T, N, L) and q_pe (T, N, R) to out (T, N, L) and lse (T, N)."""
        state = latent_state(q_latent, q_pe, plan, out)
        need, (T, N, L) = plan.need, q_latent.shape
        check_aligned(cache.data)
        values, lses = state.parts()
        if sum(len(group.rows) for group in plan.steps) < T:  # rows that no call meets
            values.zero_()
            lses.fill_(float("-inf"))
        kernel, _ = _names(self.library)
        for group in plan.steps:
            both = torch.cat([q_latent[group.rows], q_pe[group.rows]], -1).view(-1, group.query_len, N, L + need.R)
            found, lse = kernel(
                both, cache.data.unsqueeze(2), group.table, group.lens, L, group.schedule,
                softmax_scale=need.softmax_scale, causal=group.causal, use_legacy=True,
            )  # fmt: skip
            lse = lse.transpose(1, 2).reshape(-1, N)  # from (G, N, q)
            empty = lse == float("inf")
            values[group.rows] = found.reshape(-1, N, L).masked_fill(empty.unsqueeze(-1), 0)
            lses[group.rows] = lse.masked_fill(empty, float("-inf"))
        return state if out is None else out

    def latent(
        self, q_latent: Tensor, q_pe: Tensor, cache: PagedLatentCache, batch: AttentionBatch, need: Need
    ) -> AttentionState:
        """Plan and attend absorbed queries, q_latent (T, N, L) and q_pe (T, N, R), as the suite calls a raw kernel."""
        return self.attend_latent(q_latent, q_pe, cache, None, self.plan(need, batch))


def _groups(batch: AttentionBatch, new_schedule: Callable) -> list[Group]:
    """Put requests of one query length together; with mask "rows" each row is a request of one token."""
    starts, device = [0, *accumulate(batch.query_lens_host)], batch.seq_lens.device
    send = lambda x: torch.tensor(x, dtype=torch.int64).to(device)
    if batch.mask == "rows":
        owners = [b for b, (q, s) in enumerate(_lens(batch)) if s for _ in range(q)]
        rows = [r for b, (_, s) in enumerate(_lens(batch)) if s for r in range(starts[b], starts[b + 1])]
        table, at = batch.block_table[send(owners)].int(), send(rows)
        return [Group(1, False, at, table, batch.row_kv_lens[at].int(), new_schedule()[0])] if rows else []
    by_length: dict[int, list[int]] = defaultdict(list)
    for b, (query_len, seq_len) in enumerate(_lens(batch)):
        if query_len and seq_len:
            by_length[query_len].append(b)
    groups = []
    for query_len, found in sorted(by_length.items()):
        most = max(1, ROUND_TOKENS // query_len)
        for requests in (found[i : i + most] for i in range(0, len(found), most)):
            rows, index = [r for b in requests for r in range(starts[b], starts[b + 1])], send(requests)
            causal = batch.mask == "causal" and query_len > 1
            table, lens = batch.block_table[index].int(), batch.seq_lens[index].int()
            groups.append(Group(query_len, causal, send(rows), table, lens, new_schedule()[0]))
    return groups


def _lens(batch: AttentionBatch) -> Sequence[tuple[int, int]]:
    return list(zip(batch.query_lens_host, batch.seq_lens_host, strict=True))


def _names(library: Any) -> tuple[Any, Any]:
    module = importlib.import_module("flash_mla") if library is None else library
    return module.flash_mla_with_kvcache, module.get_mla_metadata


@cache
def _moved() -> list[str]:
    """Return a sentence where the package does not load or has another signature than the one known here."""
    try:
        kernel, new_schedule = _names(None)
    except (Exception, SystemExit) as error:
        return [f"sgl-flash-mla cannot be loaded: {type(error).__name__}: {error}; install it anew or use triton."]
    missing = [k for k in KEYWORDS if k not in inspect.signature(kernel).parameters]
    if missing:
        found = f"flash_mla_with_kvcache has no parameter {', '.join(missing)}"
        return [f"{found}, which flashmla passes; install sgl-flash-mla 1.0.0 or use triton."]
    for function, count, keywords in ((kernel, 6, KEYWORDS), (new_schedule, 0, ())):
        try:
            inspect.signature(function).bind(*[None] * count, **dict.fromkeys(keywords))
        except TypeError as error:
            name = getattr(function, "__name__", "get_mla_metadata")
            return [f"{name} of sgl-flash-mla takes other arguments: {error}; install 1.0.0 or use triton."]
    return []
