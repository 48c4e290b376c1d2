"""The Blackwell part of the FlashInfer tier: absorbed decode and verification through one function of the library.

`trtllm_batch_decode_with_kv_cache_mla` has no plan of its own: block table, lengths and scale go with every call. Its
kernels "trtllm-gen" (sm_100, sm_103) and "xqa" (sm_120, sm_121) are checked against the stand-in only; never run on
such a GPU. What the stand-in cannot tell: whether NaN after the last key of a page stays out of the output.

Facts are those of flashinfer-python 0.6.18.post1: `mla/_core.py`, `xqa.py`, and under `data/`
`csrc/trtllm_fmha_kernel_launcher.cu`, `csrc/fmhaReduction.cu`, `include/flashinfer/trtllm/fmha/` (`lse.cuh`,
`fmhaKernels.cuh`) and `csrc/xqa/mla_sm120.cu`.

Axes: T new tokens (packed over requests), t tokens of a call, B requests, q new tokens of each request, N heads,
L KV rank, P nope, R rope, V value.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache
from mla.checks import check_equal
from mla.errors import bad
from mla.need import Need
from mla.projections import Query
from mla.ragged import Sizes
from mla.state import AttentionState
from mla.tier import Plan
from tiers.tier2_flashinfer.absorbed import ROUND_BYTES, bmm
from tiers.tier2_flashinfer.library import WORKSPACE_BYTES, upload, why_not_entry

INF = float("inf")
STATS_BYTES, STATS_ROWS = 80 << 20, 256  # of the workspace for LSEs, 8 bytes a row and head; a request's rows, padded
MOST_REQUESTS = 8192  # the largest batch that the library tunes for
PROBE_KEYS = 8192  # keys of a long request, which kernels split


@dataclass(frozen=True)
class Kernels:
    """What one `backend` of the entry point takes."""

    archs: tuple[str, ...]
    pages: tuple[int, ...]
    heads: str
    most_new: int  # new tokens of a request; 64 is our own bound, longer queries are no decode
    lse: bool
    align: int  # rows of pages that the width of a block table must come to, a multiple of it


ENTRY = {
    "trtllm-gen": Kernels(("sm_100", "sm_103"), (32, 64), "1 to 64 heads, or 128", 64, True, 1),
    "xqa": Kernels(("sm_120", "sm_121"), (16, 32, 64, 128), "128 heads", 1, False, 128),
}
CUDA = {"sm_120": (12, 8), "sm_121": (12, 9)}  # the least CUDA of PyTorch that the library takes there


@dataclass(frozen=True, eq=False)
class Call:
    """One call: rows first .. first + B q - 1, block table (B, pages) and lengths (B,) in int32 on the device."""

    rows: slice
    table: Tensor
    seq_lens: Tensor
    max_seq_len: int


@dataclass(frozen=True, eq=False)
class Entry:
    """The calls of a step; rows from `tokens` on belong to nobody, `empty` (T,) bool marks rows without keys."""

    calls: list[Call]
    query_len: int
    tokens: int
    empty: Tensor | None
    to_natural: float  # what the library's LSE is multiplied by


def why_not_arch(form: str, need: Need) -> list[str]:
    """Return a sentence where the device is not one that the form's kernels are for, or its CUDA is too old."""
    archs = ENTRY[form].archs
    if need.arch not in archs:
        found = f"form {form!r} needs arch {' or '.join(archs)}, and arch is {need.arch!r}"
        return [f"{found}; use form = 'auto', or triton."]
    cuda, least = torch.version.cuda, CUDA.get(need.arch)
    if need.device != "cpu" and least and tuple(int(x) for x in (cuda or "0.0").split(".")[:2]) < least:
        found = f"form {form!r} on {need.arch} needs a PyTorch of CUDA {least[0]}.{least[1]} or later, not {cuda}"
        return [f"{found}; install one, or use form = 'auto'."]
    return []


def why_not_blackwell(form: str, need: Need, given: Any, any_size: bool) -> list[str]:
    """Return sentences for what the entry point or the form's kernels cannot do; `given` is a stand-in or None."""
    kernels, reasons, other = ENTRY[form], why_not_entry(given), "use form = 'auto', or triton."
    if need.R == 0 or ((need.L, need.R) != (512, 64) and not any_size):
        reasons.append(f"rows of L = {need.L}, R = {need.R} are not served by form {form!r}, but 512 and 64; {other}")
    if need.dtype == torch.float16:
        reasons.append(f"dtype torch.float16 is not served by form {form!r}, which takes torch.bfloat16; {other}")
    if need.page_size not in kernels.pages:
        found = f"page_size = {need.page_size} is not served by form {form!r}"
        reasons.append(f"{found}, which takes {', '.join(map(str, kernels.pages))}; use one of these.")
    if need.N != 128 and (form == "xqa" or need.N > 64):
        reasons.append(f"N = {need.N} is not served by form {form!r}, which takes {kernels.heads}; {other}")
    if need.lse and not kernels.lse:
        found = f"lse = True is not possible with form {form!r}, whose kernels return none"
        reasons.append(f"{found}; set it to False, or {other}")
    if need.mask == "full" and kernels.most_new > 1:
        found = f"mask 'full' is not computed by form {form!r}, which is causal for several new tokens"
        reasons.append(f"{found}; {other}")
    if need.graph_capture:
        reasons.append(f"graph_capture = True is not offered with form {form!r}, never run on such a GPU; {other}")
    return reasons


def plan_entry(library: Any, form: str, need: Need, batch: AttentionBatch) -> Entry:
    """Cut a step into calls of one query length; requests without new tokens are left out.

    The kernels meet no request without keys and no page id that is not the request's: an empty request gets q keys of
    page 0, and its rows are overwritten. Raises ValueError for ragged or too long queries, else as `to_natural`.
    """
    kernels, fix = ENTRY[form], "use form = 'auto', whose kernels take any lengths, or triton"
    present = [b for b, n in enumerate(batch.query_lens_host) if n]
    lens = sorted({batch.query_lens_host[b] for b in present})
    if len(lens) > 1:
        expected = f"one number of new tokens for all requests, as form {form!r} takes"
        raise bad("batch.query_lens", expected=expected, got=str(lens), fix=fix)
    if lens and lens[0] > kernels.most_new:
        expected = f"queries of at most {kernels.most_new}, as form {form!r} takes"
        raise bad("batch.query_lens", expected=expected, got=str(lens[0]), fix=fix)
    query_len = lens[0] if lens else 1
    most = _most_requests(need, query_len)
    if not any(batch.seq_lens_host[b] for b in present):
        present = []  # nobody has a key, and the cache may have no page
    groups = [present[i : i + most] for i in range(0, len(present), most)]
    calls = [_call(form, need, batch, group, i * most * query_len, query_len) for i, group in enumerate(groups)]
    empty = batch.row_kv_lens == 0 if any(batch.seq_lens_host[b] == 0 for b in present) else None
    if calls:
        zeroed_workspace(form, need.device)  # allocated here, and not in the first attend
    sizes = (need.N, need.L, need.P, need.R, need.page_size, query_len)
    natural = to_natural(library, form, need.device, *sizes) if need.lse and calls else 1.0
    return Entry(calls, query_len, len(present) * query_len, empty, natural)


def entry_sizes(form: str, need: Need, entry: Entry) -> Sizes:
    """Return the scratch of all calls by name: query (t * N, L + R) and latent (t * N, L)."""
    tokens = max((call.rows.stop - call.rows.start for call in entry.calls), default=0)
    if need.capacity is not None:
        most = max(_most_requests(need, q) * q for q in range(1, ENTRY[form].most_new + 1))
        tokens = min(need.capacity.max_tokens, most)
    return {name: ((tokens * need.N, width), need.dtype) for name, width in _widths(need).items()}


def attend_entry(
    form: str,
    library: Any,
    entry: Entry,
    q: Query,
    cache: PagedLatentCache,
    data: dict[str, Tensor],
    plan: Plan,
    state: AttentionState,
) -> None:
    """Attend q, nope (T, N, P) and pe (T, N, R), into the state's out (T, N, V) and lse (T, N); nothing is waited for.

    Raises ValueError where the kernels would read the cache's rows wrong.
    """
    need, (whole, whole_lse) = plan.need, state.parts()
    _check_cache(form, cache)
    for call in entry.calls:
        rows, B, t = call.rows, call.seq_lens.shape[0], call.rows.stop - call.rows.start
        query, latent = (plan.scratch(n, (t, need.N, w), need.dtype) for n, w in _widths(need).items())
        bmm(q.nope[rows].transpose(0, 1), data["W_UK"], query[..., : need.L].transpose(0, 1))
        query[..., need.L :] = q.pe[rows]
        shape = (B, need.N) if form == "xqa" else (B, entry.query_len, need.N)  # an `out` of xqa has no axis of q
        library.mla.trtllm_batch_decode_with_kv_cache_mla(
            query=query.view(B, entry.query_len, need.N, -1), kv_cache=cache.data,
            workspace_buffer=zeroed_workspace(form, need.device), qk_nope_head_dim=need.P, kv_lora_rank=need.L,
            qk_rope_head_dim=need.R, block_tables=call.table, seq_lens=call.seq_lens, max_seq_len=call.max_seq_len,
            out=latent.view(*shape, need.L), bmm1_scale=float(need.softmax_scale), bmm2_scale=1.0, backend=form,
            lse=whole_lse[rows] if need.lse else None, return_lse=need.lse,
        )  # fmt: skip
        bmm(latent.transpose(0, 1), data["W_UV"], whole[rows].transpose(0, 1))
    if need.lse:
        whole_lse.mul_(entry.to_natural)
    if entry.empty is not None:
        whole.masked_fill_(entry.empty[:, None, None], 0)
        whole_lse.masked_fill_(entry.empty[:, None], -INF)
    whole[entry.tokens :], whole_lse[entry.tokens :] = 0, -INF


@functools.cache
def to_natural(
    library: Any, form: str, device: str, N: int, L: int, P: int, R: int, page: int, query_len: int
) -> float:
    """Return what the LSE of these kernels is multiplied by, ln 2 or 1, found by a call whose LSE is known.

    Every score is 1, so the LSE of n visible keys is 1 + ln n, bottom-right for several new tokens; the requests have
    q, q + 1 and many keys. The host waits, once for a process and these sizes. A batch of another size may take another
    kernel; in the tested version all of them leave the logarithm to one function. What was handed in is looked at, as
    `attend` uses it. Raises RuntimeError where neither base fits, rows see other keys, or out is not right.
    """
    lens, q = [query_len, query_len + 1, PROBE_KEYS], query_len
    shapes = (1, page, L + R), (3, q, N, L + R)
    pool, query = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    pool[..., 0] = query[..., 0] = 1
    out = torch.full((3, q, N, L), float("nan"), dtype=torch.bfloat16, device=device)
    lse = torch.full((3 * q, N), float("nan"), device=device)
    ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=device)
    library.mla.trtllm_batch_decode_with_kv_cache_mla(
        query=query, kv_cache=pool, workspace_buffer=zeroed_workspace(form, device), qk_nope_head_dim=P,
        kv_lora_rank=L, qk_rope_head_dim=R, block_tables=ints(3, -(-PROBE_KEYS // page)),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device), max_seq_len=PROBE_KEYS,
        out=out, bmm1_scale=1.0, bmm2_scale=1.0, backend=form, lse=lse, return_lse=True,
    )  # fmt: skip
    visible = torch.tensor([n - q + 1 + i for n in lens for i in range(q)], dtype=torch.float64)
    found, natural = lse.double().cpu(), (1 + visible.log())[:, None]
    if not bool(((out - pool[0, 0, :L]).abs() <= 2**-6).all()):  # weights in bfloat16 need not come to 1
        raise RuntimeError(
            f"flashinfer's {form!r} did not leave the value that all keys have in `out`; use another form"
        )
    for factor in (math.log(2), 1.0):
        if bool(((found * factor - natural).abs() <= natural * 2**-8).all()):  # the bases are 44 % apart
            return factor
    raise RuntimeError(
        f"flashinfer's {form!r} returned LSEs {found[:, 0].tolist()[:4]} where {natural[:, 0].tolist()[:4]} are right, "
        f"neither natural nor in base 2; use another form, or Need.lse = False"
    )


@functools.cache
def zeroed_workspace(form: str, device: str) -> Tensor:
    """Return the bytes (WORKSPACE_BYTES,) of one form, zeroed once: kernels keep semaphores there."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.int8, device=device)


def _widths(need: Need) -> dict[str, int]:
    return {"query": need.L + need.R, "latent": need.L}


def _most_requests(need: Need, query_len: int) -> int:
    """Requests of one call: bounded scratch, and LSEs within their part of the workspace, the rest being for splits."""
    row = query_len * need.N * (need.L + need.R) * need.dtype.itemsize
    return max(1, min(MOST_REQUESTS, STATS_BYTES // (8 * need.N * STATS_ROWS), ROUND_BYTES // row))


def _call(form: str, need: Need, batch: AttentionBatch, requests: list[int], first: int, query_len: int) -> Call:
    """The call of `requests`, whose rows begin at `first`: its table is cut or widened on the device."""
    keys = [max(batch.seq_lens_host[b], query_len) for b in requests]
    own = [-(-batch.seq_lens_host[b] // need.page_size) for b in requests]
    step = max(1, ENTRY[form].align // need.page_size)
    width = -(-max(keys) // (need.page_size * step)) * step
    there = min(width, batch.block_table.shape[1])
    table = torch.zeros(len(requests), width, dtype=torch.int32, device=need.device)
    index = upload(torch.tensor(requests), need.device)
    pages = upload(torch.tensor(own), need.device)
    seen = torch.arange(there, device=need.device) < pages[:, None]
    table[:, :there] = torch.where(seen, batch.block_table.index_select(0, index)[:, :there], 0)
    rows = slice(first, first + len(requests) * query_len)
    return Call(rows, table, upload(torch.tensor(keys, dtype=torch.int32), need.device), max(keys))


def _check_cache(form: str, cache: PagedLatentCache) -> None:
    """Raise ValueError for a cache whose strides pass 31 bits or, with xqa, whose rows are apart within a page."""
    data = cache.data
    if data.shape[0] > 1 and data.stride(0) >= 1 << 31:
        expected, fix = f"strides below 2^31 with form {form!r}", "allocate pages closer together, or use triton"
        raise bad("cache.data", expected=expected, got=str(data.stride()), fix=fix)
    if form == "xqa":
        check_equal("cache.data.stride(1)", data.stride(1), data.shape[2], "xqa reads the rows of a page side by side")
