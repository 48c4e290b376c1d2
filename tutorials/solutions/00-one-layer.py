"""Solutions of notebook 00: each section takes the place of the exercise cell of its name."""

import torch

import tiers
from mla.projections import rms_norm
from mla.rope import apply_rope


# %% ex1
def latent_row(h, W_DKV, W_KR, kv_norm, eps, cos, sin):
    kv_c = rms_norm(h @ W_DKV, kv_norm, eps)
    k_pe = apply_rope(h @ W_KR, cos, sin, True)
    return torch.cat([kv_c, k_pe], dim=-1)


# %% ex2
def attend_one(q_nope, q_pe, kv_c, k_pe, W_UK, W_UV, scale):
    k_nope = torch.einsum("sl,lnp->snp", kv_c, W_UK)
    v = torch.einsum("sl,lnv->snv", kv_c, W_UV)
    scores = torch.einsum("np,snp->ns", q_nope, k_nope) + torch.einsum("nr,sr->ns", q_pe, k_pe)
    probabilities = (scale * scores).softmax(-1)
    return torch.einsum("ns,snv->nv", probabilities, v)


# %% ex3
def visible_keys(query_len, seq_len):
    return [seq_len - query_len + i + 1 for i in range(query_len)]


# %% ex4
def first_that_serves(need, names):
    return next((name for name in names if not tiers.get(name).why_not(need)), "none")
