"""Faults around a kernel: what it is asked, with which weights, what is cached, and what becomes of its answer.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.conformance.zoo.broken import around
from mla.need import Need
from mla.projections import Query, UpProjection

THETA, YARN_FACTOR = 10_000.0, 40.0


def scaled(scale: Callable[[Need], float]) -> Callable[[Need], Need]:
    """Return the change of a Need to another softmax scale."""
    return lambda need: replace(need, softmax_scale=scale(need))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, of any shape, as it comes back from another dtype."""
    return x.to(dtype).to(x.dtype)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate adjacent pairs of x (T, N, R) by angle (T, R/2) in radians."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) if x.shape[-1] else x
    if not x.shape[-1]:
        return x
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2).to(x.dtype)


def rotated(positions: Callable[[AttentionBatch], Tensor], yarn: bool = False) -> Callable[..., Query]:
    """Return the change of a query whose pe (T, N, R) turns on by positions (T,), or by what YaRN takes off them."""

    def change(q: Query, batch: AttentionBatch) -> Query:
        pairs = torch.arange(q.pe.shape[-1] // 2, device=q.pe.device)
        frequencies = THETA ** (-2.0 * pairs.double() / max(1, q.pe.shape[-1]))
        frequencies = frequencies * (1 - 1 / YARN_FACTOR) if yarn else frequencies
        return Query(q.nope, turned(q.pe, positions(batch).double()[:, None] * frequencies))

    return change


def since_context(batch: AttentionBatch) -> Tensor:
    """Return minus the number of keys before this step for every row (T,): its position counted from 0 again."""
    context = [s - q for q, s in zip(batch.query_lens_host, batch.seq_lens_host, strict=True)]
    rows = [c for c, q in zip(context, batch.query_lens_host, strict=True) for _ in range(q)]
    return -torch.tensor(rows + [0] * (batch.num_tokens - len(rows)), device=batch.positions.device)


def pe(change: Callable[[Tensor], Tensor]) -> Callable[..., Query]:
    """Return the change of a query in its position part (T, N, R) only."""
    return lambda q, batch: Query(q.nope, change(q.pe))


def halves(x: Tensor) -> Tensor:
    """Reorder (T, N, R) from adjacent pairs to first and second halves."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def as_if_contiguous(x: Tensor) -> Tensor:
    """Read the memory of x (A, B, C) with the strides of a contiguous tensor."""
    return torch.as_strided(x, x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))


def as_if_dense(x: Tensor) -> Tensor:
    """Read the memory of x (A, B, C) as if the numbers of its last axis lay side by side."""
    return torch.as_strided(x, x.shape, (*x.stride()[:2], 1))


def as_if_heads_were_dense(x: Tensor) -> Tensor:
    """Read the memory of x (A, B, C) as if each of its A lay B heads behind the last: the stride of one head counts."""
    everything = torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    at = lambda n, stride: stride * torch.arange(n, device=x.device)
    (A, B, C), (_, head, column) = x.shape, x.stride()
    places = at(A, B * head)[:, None, None] + at(B, head)[:, None] + at(C, column) + x.storage_offset()
    return everything[places % len(everything)]


def in_one_cut(up: UpProjection) -> UpProjection:
    """Split kv_b_proj as all heads' P rows and then all V rows, not per head: W_UK (L, N, P), W_UV (L, N, V)."""
    (L, N, P), V = up.W_UK.shape, up.W_UV.shape[2]
    flat = torch.cat([up.W_UK, up.W_UV], dim=-1).reshape(L, N * (P + V))
    return UpProjection(flat[:, : N * P].view(L, N, P), flat[:, N * P :].view(L, N, V))


def first_rows_only(out: Tensor, lse: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """Leave out (T, N, V) at 0 for all but the first new token of a request."""
    first = torch.zeros(len(out), dtype=torch.bool)
    first[[i for i in batch.query_start_loc[:-1].tolist() if i < len(out)]] = True
    return out.masked_fill(~first.to(out.device)[:, None, None], 0), lse


def after_padding(out: Tensor, lse: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """Move the rows of out (T, N, V) and lse (T, N) on by the number of padded ones."""
    pads = len(out) - sum(batch.query_lens_host)
    return out.roll(pads, 0), lse.roll(pads, 0)


def empty(fill_out: float | None, fill_lse: float | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the change of rows without keys, of out (T, N, V) and lse (T, N), to other values than 0 and -inf."""

    def change(out: Tensor, lse: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        none = batch.row_kv_lens == 0
        out = out if fill_out is None else out.masked_fill(none[:, None, None], fill_out)
        return out, lse if fill_lse is None else lse.masked_fill(none[:, None], fill_lse)

    return change


WRAPPERS = [
    around(
        "scale_of_the_padded_width", "scale", "J1", "The scale is that of P + R padded to a power of two.",
        need=scaled(lambda n: n.softmax_scale * ((n.P + n.R) / 2 ** (n.P + n.R - 1).bit_length()) ** 0.5),
    ),
    around(
        "scale_of_the_value_width", "scale", "A7", "The scale is V^-0.5, times YaRN's term.",
        need=scaled(lambda n: n.softmax_scale * ((n.P + n.R) / n.V) ** 0.5),
    ),
    around(
        "scale_of_the_nope_width", "scale", "D5", "The scale is P^-0.5, times YaRN's term.",
        need=scaled(lambda n: n.softmax_scale * ((n.P + n.R) / n.P) ** 0.5 * (1 if n.R else 1.01)),
    ),
    around(
        "precision_scale_in_16_bits", "precision", "D7", "The softmax scale is rounded to bfloat16.",
        need=scaled(lambda n: float(torch.tensor(n.softmax_scale).bfloat16())),
    ),
    around(
        "rope_pairs_mixed", "rope", "E1", "The query has its pairs in halves where the key has them side by side.",
        query=pe(halves),
    ),
    around(
        "rope_of_the_wrong_slice", "rope", "E4", "The position part of the query is the first R columns of q_nope.",
        query=lambda q, batch: Query(q.nope, q.nope[..., : q.pe.shape[-1]].clone()),
    ),
    around(
        "rope_amplitude_of_yarn", "rope", "golden constant", "cos and sin carry m(f, 1) / m(f, 0) = 1.3688879.",
        query=pe(lambda x: x * 1.3688879),
    ),
    around(
        "rope_applied_twice", "rope", "E1", "The query is rotated by its position a second time.",
        query=rotated(lambda batch: batch.positions),
    ),
    around(
        "rope_not_applied", "rope", "D1", "The query is not rotated, the keys are.",
        query=rotated(lambda batch: -batch.positions),
    ),
    around(
        "rope_one_position_late", "rope", "E1", "The query is rotated by its position plus one.",
        query=rotated(lambda batch: torch.ones_like(batch.positions)),
    ),
    around(
        "rope_positions_from_zero", "rope", "A10", "Positions of new tokens are counted from 0, not from the context.",
        query=rotated(since_context),
    ),
    around(
        "rope_without_yarn", "rope", "D4", "The query is rotated by frequencies that YaRN did not divide by 40.",
        query=rotated(lambda batch: batch.positions, yarn=True),
    ),
    around(
        "value_up_projection_of_the_next_head", "value", "P10", "Head h is given the W_UV of head h + 1.",
        up=lambda up: UpProjection(up.W_UK, -up.W_UV if up.W_UV.shape[1] == 1 else up.W_UV.roll(-1, 1)),
    ),
    around(
        "value_key_projection_of_the_next_head", "value", "P10", "Head h is given the W_UK of head h + 1.",
        up=lambda up: UpProjection(-up.W_UK if up.W_UK.shape[1] == 1 else up.W_UK.roll(-1, 1), up.W_UV),
    ),
    around(
        "value_weights_in_one_cut", "value", "P11", "kv_b_proj is cut into P and V for all heads at once.",
        up=in_one_cut,
    ),
    around(
        "value_up_projection_strides", "value", "A11", "W_UV is read as if it were contiguous.",
        up=lambda up: UpProjection(up.W_UK, as_if_contiguous(up.W_UV)),
    ),
    around("value_zeros", "value", "M5", "The output is 0 everywhere.", numbers=lambda out, lse, batch: (out * 0, lse)),
    around(
        "value_scaled_again", "value", "L1", "The output is multiplied by a scale of 1.1 that no row was divided by.",
        numbers=lambda out, lse, batch: (out * 1.1, lse),
    ),
    around(
        "head_query_nope_strides", "head", "F5", "q_nope is read as if it were contiguous.",
        query=lambda q, batch: Query(as_if_contiguous(q.nope), q.pe),
    ),
    around(
        "head_query_nope_last_axis", "head", "F5", "The numbers of q_nope's last axis are taken to lie side by side.",
        query=lambda q, batch: Query(as_if_dense(q.nope), q.pe),
    ),
    around(
        "head_query_pe_rows", "head", "F5", "Tokens of q_pe are taken to lie N heads apart, one head too.",
        query=lambda q, batch: Query(q.nope, as_if_heads_were_dense(q.pe)),
    ),
    around(
        "head_query_pe_last_axis", "head", "F5", "The numbers of q_pe's last axis are taken to lie side by side.",
        query=lambda q, batch: Query(q.nope, as_if_dense(q.pe)),
    ),
    around(
        "head_order_reversed", "head", "I1", "Heads come back in reverse order, their LSE too.",
        numbers=lambda out, lse, batch: (out.flip(1), lse.flip(1)),
    ),
    around(
        "head_layout_first", "head", "I1", "The output is laid out as (N, T, V) in memory of (T, N, V).",
        numbers=lambda out, lse, batch: (out.transpose(0, 1).reshape(out.shape), lse),
    ),
    around(
        "batch_rows_shifted", "batch", "Q1", "Row i of the result is that of row i - 1.",
        numbers=lambda out, lse, batch: (out.roll(1, 0), lse.roll(1, 0)),
    ),
    around(
        "batch_first_rows_only", "batch", "M5", "Only the first new token of a request is served.",
        numbers=first_rows_only,
    ),
    around(
        "batch_padding_counted", "batch", "M7", "Padded rows are taken for real ones, which move on.",
        numbers=after_padding,
    ),
    around("empty_output_one", "empty", "C6", "Rows without keys have output 1.", numbers=empty(1.0, None)),
    around("empty_output_nan", "empty", "C1", "Rows without keys have output NaN.", numbers=empty(float("nan"), None)),
    around("empty_lse_nan", "empty", "C2", "Rows without keys have an LSE of NaN.", numbers=empty(None, float("nan"))),
    around("empty_lse_finite", "empty", "C9", "Rows without keys have an LSE of -1e30.", numbers=empty(None, -1e30)),
    around(
        "lse_zero", "lse", "A12", "The LSE is 0 wherever there are keys.",
        numbers=lambda out, lse, batch: (out, lse.masked_fill(lse.isfinite(), 0.0)),
    ),
    around(
        "lse_negated", "lse", "A5", "The LSE is the logarithm of one over the sum.",
        numbers=lambda out, lse, batch: (out, torch.where(lse.isfinite(), -lse, lse)),
    ),
    around(
        "lse_base_10", "lse", "B4", "The LSE is in base 10.",
        numbers=lambda out, lse, batch: (out, lse / 2.302585093),
    ),
    around(
        "precision_query_in_bfloat16", "precision", "P9", "The query is rounded to bfloat16, whatever it comes in.",
        query=lambda q, batch: Query(rounded(q.nope, torch.bfloat16), rounded(q.pe, torch.bfloat16)),
    ),
    around(
        "precision_weights_in_8_bits_up", "precision", "P1", "W_UV is rounded to 8-bit floats without a scale.",
        up=lambda up: UpProjection(up.W_UK, rounded(up.W_UV, torch.float8_e4m3fn)),
    ),
    around(
        "precision_output_in_bfloat16", "precision", "A1", "The output passes through bfloat16.",
        numbers=lambda out, lse, batch: (rounded(out, torch.bfloat16), lse),
    ),
]  # fmt: skip
