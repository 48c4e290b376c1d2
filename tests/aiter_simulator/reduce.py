"""`aiter.mla_reduce_v1`: merge the partial results of split tiles (aiter.md 1.6, `ROCm/aiter` e4048607).

Axes: N partial rows, T query rows, H heads, V value width.
"""

from itertools import pairwise

import torch
from torch import Tensor

from . import kernels
from .attention import merge
from .call import store
from .checks import Machine, abort_unless, runtime_unless


def mla_reduce_v1(
    machine: Machine,
    partial_output: Tensor,
    partial_lse: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor | None,
    reduce_partial_map: Tensor,
    max_seqlen_q: int,
    num_kv_splits: int,
    final_output: Tensor,
    final_lse: Tensor | None = None,
) -> None:
    """Merge normalised partials (N, (1,) H, V) with (N, (1,) H) into final_output (T, H, V); lse +inf where empty.

    A group of fewer than two partials is skipped: its rows of final_output and final_lse keep what they held.
    """
    heads, width = final_output.shape[-2:]
    width = {machine.rank: 512, machine.expanded[1]: 128}.get(width, width)
    runtime_unless(heads in kernels.REDUCE_HEADS.get(width, ()), f"mla_reduce_v1: no case for {heads} x {width}")
    for name, tensor in (("partial_output", partial_output), ("partial_lse", partial_lse)):
        good = tensor.dtype == torch.float32 and tensor.is_contiguous()
        runtime_unless(good, f"mla_reduce_v1: {name} must be contiguous float32")
    if reduce_final_map is None:
        raise NotImplementedError("mla_reduce_v1: simulated only with reduce_final_map")
    outs, lses = partial_output.view(-1, heads, final_output.shape[-1]), partial_lse.view(-1, heads)
    groups = reduce_indptr.tolist()
    for group, (a, b) in enumerate(pairwise(groups)):
        if b - a < 2:
            continue
        abort_unless(a >= 0 and b <= reduce_partial_map.numel(), "reduce_partial_map: memory fault")
        abort_unless(num_kv_splits == 0 or b - a <= num_kv_splits, f"{b - a} partials, room for {num_kv_splits}")
        q0, q1 = reduce_final_map[group].tolist()
        rows = reduce_partial_map[a:b].long()[:, None] + torch.arange(q1 - q0)
        abort_unless(0 <= q0 <= q1 <= len(final_output) and rows.min() >= 0, "reduce_final_map: memory fault")
        abort_unless(rows.max() < len(outs), "partial_output: memory fault")
        out, lse = merge(outs[rows], lses[rows])
        store(final_output, slice(q0, q1), out)
        if final_lse is not None:
            final_lse[q0:q1] = lse
