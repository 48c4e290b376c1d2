"""Solutions of notebook 04: each section takes the place of the exercise cell of its name."""

import torch


# %% ex1
def absorb(q_nope, W_UK):
    """Return q_latent (T, N, L) from q_nope (T, N, P) and W_UK (L, N, P)."""
    return torch.einsum("tnp,lnp->tnl", q_nope, W_UK)


# %% ex2
def absorbed_attention(q_nope, q_pe, kv_c, k_pe, W_UK, W_UV, softmax_scale):
    """Return out (T, N, V) and lse (T, N). kv_c (S, L), k_pe (S, R), W_UK (L, N, P), W_UV (L, N, V)."""
    query = torch.cat([torch.einsum("tnp,lnp->tnl", q_nope, W_UK), q_pe], dim=-1)  # (T, N, L+R)
    scores = query @ torch.cat([kv_c, k_pe], dim=-1).T * softmax_scale  # (T, N, S)
    out_latent = torch.softmax(scores, dim=-1) @ kv_c  # (T, N, L)
    return torch.einsum("tnl,lnv->tnv", out_latent, W_UV), torch.logsumexp(scores, dim=-1)


# %% ex3
def pair_flops(L, P, R, V):
    """Return two whole numbers: FLOPs per (query, key, head) in the expanded and in the absorbed form."""
    return 2 * (P + R + V), 2 * (L + R + L)


# %% ex4
def break_even(L, P, V, context):
    """Return the smallest q, a whole number, for which the expanded form needs no more FLOPs."""
    q = 1
    # expanding context + q keys instead of absorbing q queries, against 2 L - P - V more for each pair
    while L * (P + V) * context > (2 * L - P - V) * (q * context + q * (q + 1) // 2):
        q += 1
    return q


# %% ex5
def merged_ratio(Lq, L, P):
    """Return (numbers in the product) / (numbers in the two matrices)."""
    return Lq * L / (P * (Lq + L))
