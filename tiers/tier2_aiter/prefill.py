"""The expanded half of the AITER tier: AITER's varlen flash attention over keys and values of heads (192 and 128).

`mla.ragged` gathers and expands a workspace at a time and merges what several calls found of a row. What is left is to
bring the LSE into one layout: AITER has two backends, and one returns it heads first.

Axes: t rows of a call, n keys of a call, N heads, P nope, R rope, V value.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mla.errors import bad
from mla.need import Need
from mla.ragged import Kernel, RaggedCall
from tiers.tier2_aiter.library import Library
from tiers.tier2_aiter.route import Route, plan_route

Flash = Callable[..., Any]


def prefill_route(library: Library, need: Need) -> Route:
    """Return the route of expanded requests, whose calls all give the LSE; raises AiterUnsupported."""
    return plan_route(
        library.arch(need), need.N, (), need.dtype, need.layout.storage_dtype, True, 0, library.cu_count(need),
        prefill=True, context=True, widths=(need.P + need.R, need.V),
    )  # fmt: skip


@lru_cache(maxsize=64)
def heads_first(flash: Flash, need: Need) -> bool:
    """Whether `flash` returns the LSE as (N, t), found by a call of another number of rows than heads.

    Once a Need, when the first layer is prepared. Raises ValueError for a shape that is neither.
    """
    t = need.N + 1
    q, k, v = (
        torch.zeros(t, need.N, width, dtype=need.dtype, device=need.device)
        for width in (need.P + need.R, need.P + need.R, need.V)
    )
    sums = torch.tensor([0, t], dtype=torch.int32, device=need.device)
    _, lse = _attend(flash, need, q, k, v, (sums, sums), (t, t), True)
    return _order(tuple(lse.shape), t, need.N) == "heads first"


def flash_kernel(flash: Flash, need: Need, square_is_heads_first: bool) -> Kernel:
    """Return the kernel that `attend_ragged` calls: q (t, N, P + R), k (n, N, P + R), v (n, N, V).

    It returns out (t, N, V) and lse (t, N), natural log. `square_is_heads_first` decides where t = N, when the shape
    does not tell.
    """

    def kernel(call: RaggedCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sums, most = (call.query_start_loc, call.key_start_loc), (max(call.query_lens), max(call.key_lens))
        out, lse = _attend(flash, need, q, k, v, sums, most, call.causal)
        order = _order(tuple(lse.shape), q.shape[0], need.N)
        if order == "heads first" or (order == "either" and square_is_heads_first):
            lse = lse.T
        return out, lse

    return kernel


def _attend(
    flash: Flash,
    need: Need,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: tuple[Tensor, Tensor],
    most: tuple[int, int],
    causal: bool,
) -> tuple[Tensor, Tensor]:
    found = flash(
        q, k, v, cu_seqlens_q=sums[0], cu_seqlens_k=sums[1], max_seqlen_q=most[0], max_seqlen_k=most[1],
        softmax_scale=need.softmax_scale, causal=causal, return_lse=True,
    )  # fmt: skip
    return found[0], found[1]


def _order(shape: tuple[int, ...], t: int, N: int) -> str:
    """The layout of an LSE of that shape: "rows first", "heads first" or, where t = N, "either"."""
    if shape not in ((t, N), (N, t)):
        fix = "this tier knows no other layout of this release"
        raise bad("aiter's lse", expected=f"shape {(t, N)} or {(N, t)}", got=str(shape), fix=fix)
    if t == N:
        return "either"
    return "rows first" if shape == (t, N) else "heads first"
