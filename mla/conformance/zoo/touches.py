"""Faults beside the numbers: what is written to the cache, the form of the answer, and memory that is not the tier's.

Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mla.cache import PagedLatentCache
from mla.conformance.zoo.broken import Call, Write, around
from mla.state import AttentionState


def padding_to(slot: Callable[[PagedLatentCache], int]) -> Callable[..., None]:
    """Return a write that puts rows of slot -1 to another slot, where the right write leaves them out."""

    def write(base: Write, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> None:
        spared = slots < 0
        base(cache, kv_c, k_pe, slots)
        if bool(spared.any()):
            i = int(spared.nonzero()[0])
            base(cache, kv_c[i : i + 1].nan_to_num(), k_pe[i : i + 1].nan_to_num(), slots.new_tensor([slot(cache)]))

    return write


def next_slot_too(base: Write, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> None:
    """Write rows (T, L) and (T, R) at their slots and at the ones behind them."""
    base(cache, kv_c, k_pe, torch.where(slots < 0, -1, (slots + 1) % (cache.num_pages * cache.page_size)))
    base(cache, kv_c, k_pe, slots)


def rope_first(base: Write, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> None:
    """Write rows as [k_pe, kv_c], (T, R) before (T, L)."""
    T, L = slots.shape[0], kv_c.shape[1]
    rows = torch.cat([k_pe[:T], kv_c[:T]], dim=-1)
    base(cache, rows[:, :L], rows[:, L:], slots)


def page_cleared(base: Write, cache: PagedLatentCache, kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> None:
    """Clear the pages of rows (T, L) and (T, R) before these are written, with whatever else lay there."""
    cache.data[(slots[slots >= 0] // cache.page_size).unique()] = 0
    base(cache, kv_c, k_pe, slots)


def changed(what: Callable[[Call], Tensor]) -> Callable[[AttentionState, Call], AttentionState]:
    """Return a step that adds 1 to a tensor of any shape that it was given to read."""

    def step(state: AttentionState, call: Call) -> AttentionState:
        x = what(call)
        x.copy_(torch.where(torch.isfinite(x), x + 1, x))
        return state

    return step


def scratch(state: AttentionState, call: Call) -> AttentionState:
    """Hand out one buffer, out (T, N, V), for every answer."""
    if call.out is None:
        call.kept["scratch"] = state
    elif "scratch" in call.kept and call.kept["scratch"].out.shape == state.out.shape:
        call.kept["scratch"].out.copy_(state.out)
    return state


def kept_answer(state: AttentionState, call: Call) -> AttentionState:
    """Answer with the first result, out (T, N, V), to every question of that shape."""
    first = call.kept.setdefault(tuple(state.out.shape), [None if x is None else x.clone() for x in state])
    for now, was in zip(state, first, strict=True):
        if now is not None:
            now.copy_(was)
    return state


def beside(row: Callable[[int], int]) -> Callable[[AttentionState, Call], AttentionState]:
    """Return a step that zeroes a row before or behind the caller's out (T, N, V)."""

    def step(state: AttentionState, call: Call) -> AttentionState:
        if call.out is not None:
            out, at = state.out, row(state.out.shape[0])
            offset = out.storage_offset() + at * out.stride(0)
            torch.as_strided(out, out.shape[1:], out.stride()[1:], offset).zero_()
        return state

    return step


def race(state: AttentionState, call: Call) -> AttentionState:
    """Change the last bit of one value of out (T, N, V) in every third call."""
    call.kept["calls"] = call.kept.get("calls", 0) + 1
    if call.kept["calls"] % 3 == 0:
        state.out[:1, 0, 0] *= 1 + torch.finfo(state.out.dtype).eps
    return state


def form(change: Callable[[Tensor, Tensor | None, Call], Any]) -> Callable[[AttentionState, Call], Any]:
    """Return a step that answers in another form than out (T, N, V) where the caller gave no buffers."""
    return lambda state, call: state if call.out is not None else change(state.out, state.lse, call)


def raises(state: AttentionState, call: Call) -> AttentionState:
    """Raise as a kernel does that was not compiled for this device, whatever out (T, N, V) is."""
    raise RuntimeError("no kernel image is available for execution on the device")


def first_entry(state: AttentionState, call: Call) -> AttentionState:
    """Look up a page before anything is known of the requests, whatever out (T, N, V) is."""
    call.plan.batch.block_table.flatten()[0]
    return state


def clear_tail(state: AttentionState, call: Call) -> AttentionState:
    """Zero the rows behind the last key of every request, so that they can be read, before out (T, N, V) is made."""
    for b, S in enumerate(call.plan.batch.seq_lens_host):
        page, offset = divmod(S, call.cache.page_size)
        if offset:
            call.cache.data[int(call.plan.batch.block_table[b, page]), offset:] = 0
    return state


TOUCHES = [
    around("write_twice", "write", "A14", "Every row is written to the next slot too.", write_rows=next_slot_too),
    around(
        "write_one_slot_late", "write", "H5", "Rows are written to the slot behind their own.",
        write_rows=lambda base, cache, kv_c, k_pe, slots: base(
            cache, kv_c, k_pe, torch.where(slots < 0, -1, (slots + 1) % (cache.num_pages * cache.page_size))
        ),
    ),
    around(
        "write_padding_to_slot_0", "write", "CG3", "Rows of slot -1 are written to slot 0.",
        write_rows=padding_to(lambda cache: 0),
    ),
    around(
        "write_padding_to_the_last_slot", "write", "CG3", "Rows of slot -1 are written to the last slot.",
        write_rows=padding_to(lambda cache: cache.num_pages * cache.page_size - 1),
    ),
    around("write_nothing", "write", "A14", "New rows are never written.", write_rows=lambda *_: None),
    around(
        "write_last_row_missing", "write", "B3", "The last row of a step is not written.",
        write_rows=lambda base, cache, kv_c, k_pe, slots: base(cache, kv_c, k_pe, slots[:-1]),
    ),
    around("write_rope_first", "write", "E4", "Rows are cached as [k_pe, kv_c].", write_rows=rope_first),
    around(
        "write_without_rope", "write", "D1", "The position part of a row is cached as 0.",
        write_rows=lambda base, cache, kv_c, k_pe, slots: base(cache, kv_c, k_pe * 0, slots),
    ),
    around(
        "write_in_8_bits", "write", "L7", "Rows are rounded to 8-bit floats on their way to the cache.",
        write_rows=lambda base, cache, kv_c, k_pe, slots: base(
            cache, kv_c.to(torch.float8_e4m3fn).to(kv_c.dtype), k_pe, slots
        ),
    ),
    around(
        "write_clears_the_page", "write", "H4", "A page is cleared before a row is written to it.",
        write_rows=page_cleared,
    ),
    around(
        "form_latent_width", "form", "U3", "The output has the width L of latent rows.",
        result=form(lambda out, lse, call: AttentionState(out.new_zeros(*out.shape[:2], call.plan.need.L), lse)),
    ),
    around(
        "form_one_head_less", "form", "U3", "The output has one head less.",
        result=form(lambda out, lse, call: AttentionState(out[:, :-1].clone(), lse)),
    ),
    around(
        "form_heads_first", "form", "I1", "The output comes as (N, T, V).",
        result=form(lambda out, lse, call: AttentionState(out.transpose(0, 1).contiguous(), lse)),
    ),
    around(
        "form_out_in_float64", "form", "U3", "The output comes in float64.",
        result=form(lambda out, lse, call: AttentionState(out.double(), lse)),
    ),
    around(
        "form_lse_in_16_bits", "form", "U3", "The LSE comes in bfloat16.",
        result=form(lambda out, lse, call: AttentionState(out, None if lse is None else lse.bfloat16())),
    ),
    around(
        "form_lse_missing", "form", "O5", "The LSE is None though it was asked for.",
        result=form(lambda out, lse, call: AttentionState(out, None)),
    ),
    around(
        "form_lse_unasked", "form", "O5", "An LSE comes though it was not asked for.",
        result=form(lambda out, lse, call: AttentionState(out, out[..., 0].float() if lse is None else lse)),
    ),
    around(
        "form_lse_with_an_axis_more", "form", "T8", "The LSE is (T, N, 1).",
        result=form(lambda out, lse, call: AttentionState(out, None if lse is None else lse[..., None])),
    ),
    around(
        "form_no_plain_tensor", "form", "U2", "The output is a Parameter, not a plain tensor.",
        result=form(lambda out, lse, call: AttentionState(Parameter(out, requires_grad=False), lse)),
    ),
    around(
        "form_tuple", "form", "T7", "A tuple comes back, not an AttentionState.",
        result=form(lambda out, lse, call: (out, lse)),
    ),
    around(
        "form_ignores_out", "form", "U2", "The caller's buffers are not the ones that come back.",
        result=lambda state, call: AttentionState(state.out.clone(), state.lse),
    ),
    around("form_raises", "form", "T5", "The kernel raises.", result=raises),
    around(
        "form_reads_an_empty_table", "form", "C6", "The block table is read where no request has an entry.",
        result=first_entry,
    ),
    around(
        "memory_query_changed", "memory", "U2", "The query is changed in place.",
        result=changed(lambda call: call.q.nope),
    ),
    around(
        "memory_weights_changed", "memory", "U2", "W_UV is changed in place.",
        result=changed(lambda call: call.up.W_UV),
    ),
    around(
        "memory_cache_changed", "memory", "U2", "The cache is changed by attend.",
        result=changed(lambda call: call.cache.data),
    ),
    around(
        "memory_batch_changed", "memory", "U2", "seq_lens are changed in place.",
        result=changed(lambda call: call.plan.batch.seq_lens),
    ),
    around("memory_tail_cleared", "memory", "C4", "attend clears slots that no request owns.", result=clear_tail),
    around("memory_scratch_returned", "memory", "U2", "A second call overwrites the first result.", result=scratch),
    around(
        "memory_answer_kept", "memory", "C12", "The first answer is given to every question of its shape.",
        result=kept_answer,
    ),
    around(
        "memory_row_behind_out", "memory", "F4", "A row behind the caller's output is written.",
        result=beside(lambda T: T),
    ),
    around(
        "memory_row_before_out", "memory", "F4", "A row before the caller's output is written.",
        result=beside(lambda T: -1),
    ),
    around("memory_race", "memory", "N1", "Now and then a result differs in its last bit.", result=race),
    around(
        "memory_rows_kept_for_the_plan", "memory", "CG3", "All layers of a plan read the rows of its first one.",
        rows=lambda cache, plan, kept: kept.setdefault(("rows", id(plan)), (plan, cache))[1],
    ),
    around(
        "memory_plan_not_refilled", "memory", "CG3", "A plan that is used again keeps the earlier batch.",
        replan=lambda into, need, batch: into,
    ),
]  # fmt: skip
