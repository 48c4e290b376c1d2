"""The result of attention over some of the keys, and the one way to combine two of them.

Axes: T new tokens (packed over requests), N heads, V value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mla.errors import bad


class AttentionState(NamedTuple):
    """Attention over a set of keys: the normalised output and the log of the softmax denominator.

    `out` is (T, N, V) in the caller's dtype (partial states: float32, or float64); `lse` is (T, N), the NATURAL
    logarithm of the sum of exp(scaled scores), float32 (float64 for float64 inputs), or None when it was not asked
    for. A row that sees no key has `out` exactly 0 and `lse` -inf. Source: FlashAttention-2 (arXiv 2307.08691),
    section 3.1, for the pair; the empty row is its limit.
    """

    out: Tensor
    lse: Tensor | None

    @staticmethod
    def empty(
        rows: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "AttentionState":
        """Return the identity of `merge`: out (T, N, V) zeros and lse (T, N) of -inf, both in `dtype`."""
        out = torch.zeros(rows, heads, width, dtype=dtype, device=device)
        return AttentionState(out, torch.full((rows, heads), float("-inf"), dtype=dtype, device=device))

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return out (T, N, V) and lse (T, N); raises ValueError where no LSE was asked for."""
        if self.lse is None:
            raise bad("lse", expected="a state with lse", got="None", fix="plan with Need(lse=True)")
        return self.out, self.lse

    def merge(self, other: "AttentionState") -> "AttentionState":
        """Return the state over the union of two disjoint key sets; see `merge`. Shapes (T, N, V) and (T, N)."""
        return merge(self, other)


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """Combine attention over two disjoint key sets into attention over their union.

    out = (w_a out_a + w_b out_b) / (w_a + w_b), lse = m + ln(w_a + w_b), with w = exp(lse - m), m = max(lse_a, lse_b).

    Takes two states, out (T, N, V) of any strides and lse (T, N) in natural log; computes and returns float32
    (float64 if either is). The identity is (0, -inf); where the result's lse is -inf the output is exactly 0,
    whatever the inputs hold. An lse of +inf is some kernels' mark of an empty row and is read as -inf; NaN stays NaN.
    Commutative bit for bit, associative up to rounding. Raises ValueError for states without lse or of different
    shapes. Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.
    """
    if a.lse is None or b.lse is None:
        raise bad("lse", expected="two states with lse", got="None", fix="plan with Need(lse=True)")
    if a.out.dim() != 3 or a.out.shape != b.out.shape or not (a.out.shape[:2] == a.lse.shape == b.lse.shape):
        got = f"out {tuple(a.out.shape)} and {tuple(b.out.shape)}, lse {tuple(a.lse.shape)} and {tuple(b.lse.shape)}"
        raise bad("merge", expected="out (T, N, V) and lse (T, N) of equal shapes", got=got, fix="merge like with like")
    if a.out.device != b.out.device:
        raise bad("merge", expected=f"both on {a.out.device}", got=str(b.out.device), fix="move one of the states")
    dtype = torch.promote_types(torch.promote_types(a.lse.dtype, b.lse.dtype), torch.float32)
    dtype = torch.promote_types(torch.promote_types(a.out.dtype, b.out.dtype), dtype)
    lse_a, lse_b = (torch.where(x == float("inf"), float("-inf"), x.to(dtype)) for x in (a.lse, b.lse))
    top = torch.maximum(lse_a, lse_b)
    base = torch.where(top == float("-inf"), 0, top)
    w_a, w_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    total = w_a + w_b
    lse = base + torch.log(total)
    share_a, share_b = (torch.where(w == 0, 0, w / total).unsqueeze(-1) for w in (w_a, w_b))
    # 0 * NaN is NaN: what an empty side holds is dropped, not weighed with 0
    out_a = torch.where(lse_a.unsqueeze(-1) == float("-inf"), 0, a.out.to(dtype))
    out_b = torch.where(lse_b.unsqueeze(-1) == float("-inf"), 0, b.out.to(dtype))
    return AttentionState(out_a * share_a + out_b * share_b, lse)


def fold_block(scores: Tensor, values: Tensor, top: Tensor, total: Tensor, acc: Tensor) -> None:
    """Fold a block of keys into a running softmax, in place: row maximum, sum of exponentials, unnormalised output.

    top' = max(top, scores), acc' = exp(top - top') acc + exp(scores - top') values, and total likewise.

    scores (G, rows, k), overwritten, -inf where masked, and values (G, k, width); top and total (G, rows, 1), acc
    (G, rows, width), all of one accumulator dtype; start with -inf, 0, 0. The product is added, not accumulated in
    place, which would sum key by key and drift. Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1.
    """
    new = torch.maximum(top, scores.amax(-1, keepdim=True))
    base = new.masked_fill(new == float("-inf"), 0.0)
    shrink = torch.exp(top - base)
    weights = scores.sub_(base).exp_()
    total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
    acc.mul_(shrink).add_(torch.bmm(weights, values))
    top.copy_(new)
