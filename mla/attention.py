"""Both forms of MLA attention for one request, side by side.

The two differ only in the order of multiplication: (kv_c W_UK) . q_nope = kv_c . (q_nope W_UK). `mha_form` expands the
latents to keys and values of every head, which costs fewer FLOPs when many queries share the keys (prefill);
`mqa_form` absorbs W_UK into the query, so that one latent row serves all heads, which moves fewer bytes (decode).

Axes: T new tokens of one request, S its cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mla.projections import Query, UpProjection, absorb_query, expand_keys_values, project_values
from mla.state import AttentionState

SCORES_AT_ONCE = 1 << 21


def mha_form(
    q: Query, kv_c: Tensor, k_pe: Tensor, up: UpProjection, row_kv_lens: Tensor, softmax_scale: float
) -> AttentionState:
    """Attend in the expanded, multi-head form.

    k_nope, v = kv_c W_UK, kv_c W_UV;  score = softmax_scale (q_nope . k_nope + q_pe . k_pe);  out = softmax(score) v

    q.nope (T, N, P), q.pe (T, N, R), kv_c (S, L), k_pe (S, R); row t sees keys 0 .. row_kv_lens[t] - 1 of (T,).
    Returns out (T, N, V) and natural-log lse (T, N), both in promote(q dtype, float32).
    Source: DeepSeek-V2 (arXiv 2405.04434), eqs. 9 to 19.
    """
    q_nope, q_pe, kv_c, k_pe = _wide(q.nope, q.pe, kv_c, k_pe)
    k_nope, v = expand_keys_values(kv_c, up)  # (S, N, P), (S, N, V)
    keys = torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], dim=-1)  # (S, N, P+R)
    keys, v = keys.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # heads first, once

    def attend(query: Tensor, row_kv_lens: Tensor) -> AttentionState:
        probabilities, lse = _softmax(torch.einsum("tnd,nsd->tns", query, keys), row_kv_lens)
        return AttentionState(torch.einsum("tns,nsv->tnv", probabilities, v), lse)

    return _by_rows(attend, torch.cat([q_nope, q_pe], dim=-1) * softmax_scale, row_kv_lens, kv_c.shape[0])


def mqa_form(
    q: Query, kv_c: Tensor, k_pe: Tensor, up: UpProjection, row_kv_lens: Tensor, softmax_scale: float
) -> AttentionState:
    """Attend in the absorbed form: one latent head of width L + R, whose first L columns are also the values.

    q_latent = q_nope W_UK;  score = softmax_scale (q_latent . kv_c + q_pe . k_pe);  out = (softmax(score) kv_c) W_UV

    Arguments as in `mha_form`, result equal up to rounding: q.nope (T, N, P), kv_c (S, L), out (T, N, V), lse (T, N).
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
    """
    q_nope, q_pe, kv_c, k_pe = _wide(q.nope, q.pe, kv_c, k_pe)
    q_latent = absorb_query(q_nope, up.W_UK)  # (T, N, L)
    rows = torch.cat([kv_c, k_pe], dim=-1)  # (S, L+R)

    def attend(query: Tensor, row_kv_lens: Tensor) -> AttentionState:
        probabilities, lse = _softmax(torch.einsum("tnd,sd->tns", query, rows), row_kv_lens)
        out_latent = torch.einsum("tns,sl->tnl", probabilities, kv_c)
        return AttentionState(project_values(out_latent, up.W_UV), lse)

    return _by_rows(attend, torch.cat([q_latent, q_pe], dim=-1) * softmax_scale, row_kv_lens, kv_c.shape[0])


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Upcast to promote(dtype, float32): a product of two 16-bit matrices would round the scores to 16 bits."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [x.to(dtype) for x in tensors]


def _by_rows(
    attend: Callable[[Tensor, Tensor], AttentionState], query: Tensor, row_kv_lens: Tensor, keys: int
) -> AttentionState:
    """Attend some query rows at a time: rows do not depend on each other, and scores (T, N, S) of all would be huge.

    A row without keys, whose query may be NaN, attends a zero query to the first key, and the result is replaced.
    """
    empty, step = (row_kv_lens == 0)[:, None], max(1, SCORES_AT_ONCE // max(1, query.shape[1] * keys))
    query, visible = query.masked_fill(empty[..., None], 0.0), row_kv_lens.clamp(min=1)
    states = [attend(*block).parts() for block in zip(query.split(step), visible.split(step), strict=True)]
    out, lse = (torch.cat(column) for column in zip(*states, strict=True))
    return AttentionState(out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf")))


def _softmax(scores: Tensor, row_kv_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities (T, N, S) and lse (T, N) of rows that each see a key, row_kv_lens (T,) >= 1.

    The largest probability is exp(max - lse), which gives the LSE without another pass over exponentials.
    """
    if scores.shape[-1] == 0:
        return scores, scores.new_zeros(scores.shape[:2])
    hidden = torch.arange(scores.shape[-1], device=scores.device) >= row_kv_lens[:, None, None]
    scores = scores.masked_fill_(hidden, float("-inf"))  # in place: nobody else holds them
    probabilities = torch.softmax(scores, dim=-1)
    return probabilities, scores.amax(-1) - probabilities.amax(-1).log()
