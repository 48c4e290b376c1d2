"""The arithmetic that every simulated kernel shares.

Axes: n query rows, H heads, s keys, D query width, V value width.
"""

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None, p_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v of q (n, H, D), k (s, H or 1, D), v (s, H or 1, V): out (n, H, V) and lse (n, H), float32.

    seen (n, s) bool tells which keys a row sees. p_dtype is the 8-bit float that exp(score - max) is rounded to before
    it meets v, while the denominator stays exact. A row that sees nothing gives NaN and lse -inf. Computed in float64.
    """
    heads = q.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.expand(heads, -1, -1).transpose(1, 2) * scale  # (H, n, s)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if not scores.shape[2]:
        return v.new_full((q.shape[1], heads, v.shape[2]), float("nan")).float(), scores.sum(2).log().T.float()
    p = torch.exp(scores - scores.amax(2, keepdim=True))
    total = p.sum(2)
    if p_dtype is not None:
        p = p.to(p_dtype).double()
    out = p @ v.expand(heads, -1, -1) / total[..., None]
    return out.transpose(0, 1).float(), torch.logsumexp(scores, 2).T.float()


def bottom_right(rows: int, keys: int, diagonal: int) -> Tensor:
    """(rows, keys) bool: row t sees key j where j <= t + diagonal."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(diagonal)


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partials outs (m, n, H, V), normalised, with lses (m, n, H); the lse is +inf where there is nothing."""
    total = torch.logsumexp(lses.double(), 0)
    weight = torch.exp(lses.double() - total)
    weight = torch.where(lses == float("-inf"), 0.0, weight)
    parts = torch.where((lses == float("-inf"))[..., None], 0.0, outs.double())
    empty = total.isnan() | (total == float("-inf"))
    return (weight[..., None] * parts).sum(0).float(), torch.where(empty, float("inf"), total).float()
