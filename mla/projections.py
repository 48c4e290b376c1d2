"""From hidden states to queries and latent rows, and the two ways through the up-projections.

Axes: T new tokens (packed over requests), S cached tokens, B requests, N heads, H hidden, Lq query rank, L KV rank,
P nope, R rope, V value.

`absorb_query`, `expand_keys_values` and `project_values` multiply in promote(dtype, float32) and return that unless
`dtype` says otherwise: in float16 an absorbed query overflows at 65504 where its inputs are as small as 40 and 16.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mla.config import MLAConfig
from mla.errors import bad
from mla.rope import apply_rope, llama4_query_scale, rope_cos_sin

if TYPE_CHECKING:
    from mla.weights import MLAWeights


class Query(NamedTuple):
    """The un-absorbed, already rotated query: `nope` (T, N, P) and `pe` (T, N, R), one float dtype.

    Source: DeepSeek-V2 (arXiv 2405.04434) eq. 13, q^C and q^R.
    """

    nope: Tensor
    pe: Tensor


class UpProjection(NamedTuple):
    """The two matrices between latent and heads: `W_UK` (L, N, P) and `W_UV` (L, N, V), one float dtype.

    Source: DeepSeek-V2 (arXiv 2405.04434) eqs. 10 and 11.
    """

    W_UK: Tensor
    W_UV: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    x (..., D) of any strides and float dtype, weight (D,); result like x, rounded once from promote(dtype, float32).
    Source: RMSNorm (arXiv 1910.07467) eq. 4; used on both latents in DeepSeek-V2 section 3.1.2.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def project_query(hidden: Tensor, positions: Tensor, weights: "MLAWeights", config: MLAConfig) -> Query:
    """Project hidden states to the rotated query: `q_c = norm(h W_DQ)`, `q_nope = q_c W_UQ`, `q_pe = rope(q_c W_QR)`.

    hidden (T, H) in the weights' dtype, positions (T,) int64; result nope (T, N, P), pe (T, N, R) in hidden's dtype.
    Without a query rank h takes the place of q_c. `q_lora_multiplier` scales q_c after its norm, llama-4 scaling the
    whole query after rotation. Raises ValueError or TypeError naming the argument.
    Source: DeepSeek-V2 (arXiv 2405.04434) eqs. 12 to 14.
    """
    _check_tokens(hidden, positions, weights, config)
    q_c = hidden
    if weights.W_DQ is not None and weights.q_norm is not None:
        q_c = hidden @ weights.W_DQ  # (T, Lq)
        if weights.b_DQ is not None:
            q_c = q_c + weights.b_DQ
        q_c = rms_norm(q_c, weights.q_norm, config.rms_norm_eps) * config.q_lora_multiplier
    q_nope = torch.einsum("tl,lnp->tnp", q_c, weights.W_UQ)
    q_pe = _rotate(torch.einsum("tl,lnr->tnr", q_c, weights.W_QR), positions, config)
    if config.rope.llama_4_scaling_beta is not None:
        scale = llama4_query_scale(positions, config.rope).to(hidden.dtype)[:, None, None]
        q_nope, q_pe = q_nope * scale, q_pe * scale
    return Query(q_nope, q_pe)


def project_latent(
    hidden: Tensor, positions: Tensor, weights: "MLAWeights", config: MLAConfig
) -> tuple[Tensor, Tensor]:
    """Project hidden states to the latent row that is cached: `kv_c = norm(h W_DKV)`, `k_pe = rope(h W_KR)`.

    hidden (T, H) in the weights' dtype, positions (T,) int64; result kv_c (T, L), k_pe (T, R) in hidden's dtype.
    `kv_lora_multiplier` scales kv_c after its norm, so the cache holds the scaled latent; k_pe is not normed.
    Raises ValueError or TypeError naming the argument. Source: DeepSeek-V2 (arXiv 2405.04434) eqs. 9 and 15.
    """
    _check_tokens(hidden, positions, weights, config)
    kv_c, k_pe = hidden @ weights.W_DKV, hidden @ weights.W_KR
    if weights.b_DKV is not None and weights.b_KR is not None:
        kv_c, k_pe = kv_c + weights.b_DKV, k_pe + weights.b_KR
    kv_c = rms_norm(kv_c, weights.kv_norm, config.rms_norm_eps) * config.kv_lora_multiplier
    return kv_c, _rotate(k_pe, positions, config)


def absorb_query(q_nope: Tensor, W_UK: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Move the key up-projection onto the query: `q_latent[t,n,l] = sum_p q_nope[t,n,p] W_UK[l,n,p]`.

    q_nope (T, N, P), W_UK (L, N, P); result (T, N, L) in `dtype`, or promote(their dtype, float32) when None.
    Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2, W^UK absorbed into W^UQ.
    """
    return _wide_einsum("tnp,lnp->tnl", q_nope, W_UK, dtype)


def expand_keys_values(kv_c: Tensor, up: UpProjection, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Expand latents to every head's keys and values: `k_nope = kv_c W_UK`, `v = kv_c W_UV`.

    kv_c (S, L); result k_nope (S, N, P), v (S, N, V) in `dtype`, or promote(the inputs' dtype, float32) when None.
    Source: DeepSeek-V2 (arXiv 2405.04434) eqs. 10 and 11.
    """
    k_nope = _wide_einsum("sl,lnp->snp", kv_c, up.W_UK, dtype)
    return k_nope, _wide_einsum("sl,lnv->snv", kv_c, up.W_UV, dtype)


def project_values(out_latent: Tensor, W_UV: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Bring an absorbed form's output back to head values: `out[t,n,v] = sum_l out_latent[t,n,l] W_UV[l,n,v]`.

    out_latent (T, N, L), W_UV (L, N, V); result (T, N, V) in `dtype`, or promote(their dtype, float32) when None.
    Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2.
    """
    return _wide_einsum("tnl,lnv->tnv", out_latent, W_UV, dtype)


def project_output(out: Tensor, weights: "MLAWeights") -> Tensor:
    """Sum the heads back to hidden states: `u[t,h] = sum_nv out[t,n,v] W_O[n,v,h]`.

    out (T, N, V) in the weights' dtype; result (T, H). On a tensor-parallel shard this is one rank's summand.
    Source: DeepSeek-V2 (arXiv 2405.04434) eq. 19.
    """
    hidden = torch.einsum("tnv,nvh->th", out, weights.W_O)
    return hidden if weights.b_O is None else hidden + weights.b_O


def _wide_einsum(equation: str, a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    product = torch.einsum(equation, a.to(wide), b.to(wide))
    return product if dtype is None else product.to(dtype)


def _rotate(x: Tensor, positions: Tensor, config: MLAConfig) -> Tensor:
    if config.R == 0 or config.rope.type == "none":
        return x
    cos, sin = rope_cos_sin(positions, config.rope, config.R)
    return apply_rope(x, cos, sin, config.rope.interleaved)


def _check_tokens(hidden: Tensor, positions: Tensor, weights: "MLAWeights", config: MLAConfig) -> None:
    if hidden.dim() != 2 or hidden.shape[1] != config.H:
        raise bad(
            "hidden", expected=f"shape (T, {config.H})", got=f"{tuple(hidden.shape)}", fix="pack requests along T"
        )
    if (hidden.dtype, hidden.device) != (weights.W_DKV.dtype, weights.W_DKV.device):
        wanted = f"the weights' {weights.W_DKV.dtype} on {weights.W_DKV.device}"
        got = f"{hidden.dtype} on {hidden.device}"
        raise bad("hidden", expected=wanted, got=got, fix="convert one of the two with .to", kind=TypeError)
    if positions.shape != hidden.shape[:1]:
        raise bad(
            "positions", expected=f"shape ({hidden.shape[0]},)", got=f"{tuple(positions.shape)}", fix="one per token"
        )
    if (positions.dtype, positions.device) != (torch.int64, hidden.device):
        got = f"{positions.dtype} on {positions.device}"
        raise bad("positions", expected=f"int64 on {hidden.device}", got=got, fix="use .long() and .to", kind=TypeError)
