"""The work plan of AITER's persistent kernels: six buffers, sized by AITER, filled once a step, read by every layer.

They are scratch of the plan: a later step fills the same memory again, and where the Need has a capacity they have the
size of the worst step that it allows.

Axes: s sequences of a call, M padded heads.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mla.tier import Plan
from tiers.tier2_aiter.route import Route

Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]
# in the order in which the info call returns them; the metadata call takes them by name, for its order is another
BUFFERS = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def metadata_sizes(
    info: Callable[..., Any], heads: int, dtypes: tuple[torch.dtype, torch.dtype], steps: Iterable[tuple[int, int]]
) -> Sizes:
    """Return the shapes and dtypes, by buffer, that serve every step (sequences, longest query) of `steps`.

    `info` is get_mla_metadata_info_v1, asked with the padded heads. More rows a query do not always need more memory,
    so each size is the largest found.
    """
    largest: Sizes = {}
    for sequences, query_len in steps:
        found = info(
            batch_size=sequences, max_seqlen_qo=query_len, num_head_qo=heads, q_dtype=dtypes[0], kv_dtype=dtypes[1],
            is_sparse=False, fast_mode=True,
        )  # fmt: skip
        for name, (shape, dtype) in zip(BUFFERS, found, strict=True):
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
            if name not in largest or math.prod(shape) > math.prod(largest[name][0]):
                largest[name] = (shape, dtype)
    return largest


def fill_metadata(
    metadata: Callable[..., Any],
    plan: Plan,
    route: Route,
    dtypes: tuple[torch.dtype, torch.dtype],
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    last_page_lens: Tensor,
    most: int,
) -> dict[str, Tensor]:
    """Plan one step on the device and return its six buffers by name; waits for nothing.

    `metadata` is get_mla_metadata_v1; qo_indptr and kv_indptr (s + 1,), last_page_lens (s,), int32; `most` is the
    longest query. It is told the padded heads, the length that queries have or -1 where they differ, and both dtypes,
    without which it takes bfloat16.
    """
    buffers = {name: plan.scratch(name, *plan.sizes[name]) for name in BUFFERS}
    metadata(
        seqlens_qo_indptr=qo_indptr, seqlens_kv_indptr=kv_indptr, kv_last_page_lens=last_page_lens,
        num_heads_per_head_k=route.heads, num_heads_k=1, is_causal=True,
        work_metadata_ptrs=buffers["work_meta_data"], **{name: buffers[name] for name in BUFFERS[1:]},
        page_size=1, kv_granularity=route.granularity, max_seqlen_qo=most, uni_seqlen_qo=route.query_len,
        fast_mode=True, dtype_q=dtypes[0], dtype_kv=dtypes[1],
    )  # fmt: skip
    return buffers
