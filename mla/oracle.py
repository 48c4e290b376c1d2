"""Right, by definition: attention of one request in float64, expanded, quadratic, without cache, pages or absorption.

It imports nothing of this project, so it shares no code with what it judges.
Axes: T query rows, S keys, N heads, L KV rank, P nope, R rope, V value.
"""

import torch
from torch import Tensor


def oracle(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    W_UK: Tensor,
    W_UV: Tensor,
    row_kv_lens: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the exact output (T, N, V) and natural-log LSE (T, N) of one request, both float64.

    score[t, n, s] = softmax_scale (q_nope[t, n] . (kv_c[s] W_UK[:, n]) + q_pe[t, n] . k_pe[s]), out = softmax(score) v

    q_nope (T, N, P) and q_pe (T, N, R) are rotated and not absorbed; kv_c (S, L) and k_pe (S, R) are the rows that the
    cache gives back; W_UK (L, N, P), W_UV (L, N, V); all of any float dtype. Row t sees keys 0 .. row_kv_lens[t] - 1,
    row_kv_lens (T,); one that sees none has output 0 and LSE -inf. Source: DeepSeek-V2 (arXiv 2405.04434), section
    2.1.2 and appendix C.
    """
    q_nope, q_pe, kv_c, k_pe, W_UK, W_UV = (x.to(torch.float64) for x in (q_nope, q_pe, kv_c, k_pe, W_UK, W_UV))
    k_nope = torch.einsum("sl,lnp->snp", kv_c, W_UK)
    v = torch.einsum("sl,lnv->snv", kv_c, W_UV)
    scores = torch.einsum("tnp,snp->tns", q_nope, k_nope) + torch.einsum("tnr,sr->tns", q_pe, k_pe)
    keys = torch.arange(kv_c.shape[0], device=kv_c.device)
    hidden = keys[None, :] >= row_kv_lens.to(kv_c.device)[:, None]
    scores = (scores * softmax_scale).masked_fill(hidden[:, None, :], float("-inf"))
    empty = (row_kv_lens.to(kv_c.device) == 0)[:, None]
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - lse[..., None]).masked_fill(empty[..., None], 0.0)
    return torch.einsum("tns,snv->tnv", probabilities, v), lse
