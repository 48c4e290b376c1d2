"""The diagnosis: each kind of fault, planted by hand in the oracle's numbers, is named first; a right result has none.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from mla.accuracy import Reference
from mla.conformance import SPECS, Case
from mla.conformance.cases import TOY
from mla.conformance.diagnosis import KIND_NAMES, Diagnosis, Guess, combine, diagnose, diagnose_status
from mla.conformance.inputs import Inputs
from mla.conformance.runner import inputs_of, truth
from mla.conformance.zoo import KINDS
from mla.state import AttentionState

NAN, INF = float("nan"), float("inf")
PAGE, N, R = 16, TOY.N, TOY.R
# queries of 1 to 19 tokens over 34 to 66 keys: several pages, the last one partial
MIXED = Case(SPECS["mixed_prefill_between"], TOY, "f32", "", "randn", "shuffled", PAGE, seed=5)
PADDED = Case(SPECS["padded_requests"], TOY, "f32", "", "randn", "shuffled", PAGE, seed=5)
COARSE = dataclasses.replace(MIXED, dtype="bf16", layout="rows_bf16")


@lru_cache
def given(case: Case) -> tuple[Inputs, Reference]:
    return inputs_of(case, "cpu"), truth(case)[0]


def right(case: Case) -> AttentionState:
    """The truth itself, rounded to the dtypes of a result."""
    _, made = given(case)
    order = made.rows.argsort()
    assert made.rows[order].tolist() == list(range(case.batch.num_tokens))
    return AttentionState(made.out[order].to(case.torch_dtype), made.lse[order].float())


def found(case: Case, out: Tensor, lse: Tensor) -> Diagnosis:
    """Diagnose out (T, N, V), lse (T, N)."""
    inputs, made = given(case)
    result = diagnose(case, AttentionState(out.to(case.torch_dtype), lse.float()), made, None, inputs)
    assert result is not None
    return result


Change = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def attend(case: Case, change: Change, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention in float64, row by row: `change(content, position, kv_c, b, i)` gives scores (N, n) and rows (n, L).

    content and position (N, S) are the two parts of the unscaled scores of row i of request b, kv_c (S, L) its keys.
    """
    inputs, made = given(case)
    W_UK, W_UV = (w.double() for w in inputs.up)
    W_UV = W_UV if up is None else up
    out, lse, row = made.out.clone(), made.lse.clone(), 0
    for b, query_len in enumerate(case.batch.query_lens):
        kv_c, k_pe = (x.double() for x in case.cache_layout.round_trip(*inputs.keys[b]))
        for i in range(query_len):
            q_latent = torch.einsum("np,lnp->nl", inputs.q.nope[row].double(), W_UK)
            scores, rows = change(q_latent @ kv_c.T, inputs.q.pe[row].double() @ k_pe.T, kv_c, b, i)
            lse[row] = torch.logsumexp(scores, -1)
            out[row] = torch.einsum("nl,lnv->nv", torch.softmax(scores, -1) @ rows, W_UV)
            row += 1
    return out, lse


def visible(b: int, i: int, case: Case = MIXED) -> int:
    return case.batch.seq_lens[b] - case.batch.query_lens[b] + i + 1


def scaled(scale: float, cut: Callable[[int, int], slice] | None = None) -> Change:
    """Scores times a scale, of the keys that `cut(b, i)` leaves."""

    def change(content: Tensor, position: Tensor, kv_c: Tensor, b: int, i: int) -> tuple[Tensor, Tensor]:
        keys = slice(visible(b, i)) if cut is None else cut(b, i)
        return scale * (content + position)[:, keys], kv_c[keys]

    return change


def lost(keys: Callable[[int, int], list[int]]) -> Change:
    """The right scores without some keys."""

    def change(content: Tensor, position: Tensor, kv_c: Tensor, b: int, i: int) -> tuple[Tensor, Tensor]:
        left = [s for s in range(visible(b, i)) if s not in keys(b, i)]
        return TOY.softmax_scale * (content + position)[:, left], kv_c[left]

    return change


def test_the_hand_written_attention_is_the_oracle():
    out, lse = attend(MIXED, scaled(TOY.softmax_scale))
    _, made = given(MIXED)
    # two float64 sums of at most 66 terms in another order: 66 u of numbers near 10
    assert (out - made.out).abs().max() < 66 * 2**-53 * 10
    assert (lse - made.lse).abs().max() < 66 * 2**-53 * 10


@pytest.mark.parametrize("case", [MIXED, PADDED, COARSE], ids=lambda c: c.id)
def test_a_right_result_has_no_diagnosis(case):
    inputs, made = given(case)
    assert diagnose(case, right(case), made, None, inputs) is None


def test_scale_without_the_yarn_term():
    d = found(MIXED, *attend(MIXED, scaled((TOY.P + TOY.R) ** -0.5)))
    assert d.kind == "scale"
    assert "(P+R)^-0.5, the YaRN term is missing" in d.guesses[0].because


def test_scale_of_any_other_size():
    d = found(MIXED, *attend(MIXED, scaled(0.83 * TOY.softmax_scale)))
    assert d.kind == "scale"


def test_rope_part_missing():
    keep = lambda content, position, kv_c, b, i: (
        TOY.softmax_scale * content[:, : visible(b, i)],
        kv_c[: visible(b, i)],
    )
    d = found(MIXED, *attend(MIXED, keep))
    assert d.kind == "rope"
    assert "missing" in d.guesses[0].because


def test_mask_top_left():
    d = found(MIXED, *attend(MIXED, scaled(TOY.softmax_scale, lambda b, i: slice(i + 1))))
    assert d.kind == "mask"
    assert "top-left" in d.guesses[0].because


def test_mask_missing():
    d = found(MIXED, *attend(MIXED, scaled(TOY.softmax_scale, lambda b, i: slice(MIXED.batch.seq_lens[b]))))
    assert d.kind == "mask"
    # rows that see the last key are right: the first wrong one is the first of the first longer query
    assert (d.first.request, d.first.token) == (1, 0)


def test_tail_last_key_lost_and_the_place_is_that_key():
    last = [s - 1 for s in MIXED.batch.seq_lens]
    d = found(MIXED, *attend(MIXED, lost(lambda b, i: [last[b]])))
    assert d.kind == "tail"
    b = d.worst.request
    at = last[b]
    assert d.worst.token == MIXED.batch.query_lens[b] - 1
    assert (d.worst.page, d.worst.position_in_page, d.worst.position) == (at // PAGE, at % PAGE, at)
    assert f", key {at} (page {at // PAGE}, position {at % PAGE}):" in d.sentence


def test_page_first_key_lost_and_the_place_is_that_key():
    d = found(MIXED, *attend(MIXED, lost(lambda b, i: [0])))
    assert d.kind == "page"
    assert (d.worst.page, d.worst.position_in_page, d.worst.position) == (0, 0, 0)


def test_page_second_page_lost_is_named_in_the_sentence():
    d = found(MIXED, *attend(MIXED, lost(lambda b, i: list(range(PAGE, 2 * PAGE)))))
    assert d.kind == "page"
    assert ", page 1:" in d.sentence


def test_split_first_key_of_each_of_three_splits_lost():
    borders = [[k * math.ceil(s / 3) for k in (1, 2)] for s in MIXED.batch.seq_lens]
    d = found(MIXED, *attend(MIXED, lost(lambda b, i: borders[b])))
    assert d.kind == "split"
    assert "3 splits" in d.guesses[0].because


def test_merge_by_plain_mean_of_four_splits():
    inputs, made = given(MIXED)
    W_UV, out, row = inputs.up.W_UV.double(), made.out.clone(), 0
    for b, query_len in enumerate(MIXED.batch.query_lens):
        S = MIXED.batch.seq_lens[b]
        for i in range(query_len):
            parts = []
            for start in range(0, visible(b, i), math.ceil(S / 4)):
                stop = min(start + math.ceil(S / 4), visible(b, i))
                cut = scaled(TOY.softmax_scale, lambda b, i, a=start, z=stop: slice(a, z))
                parts.append(one_row(cut, b, i, row, W_UV))
            out[row] = torch.stack(parts).mean(0)
            row += 1
    d = found(MIXED, out, made.lse)
    assert d.kind == "merge"
    assert d.metric == "out"


def one_row(change: Change, b: int, i: int, row: int, W_UV: Tensor) -> Tensor:
    """Output (N, V) of one row under a change of its keys."""
    inputs, _ = given(MIXED)
    kv_c, k_pe = (x.double() for x in inputs.keys[b])
    q_latent = torch.einsum("np,lnp->nl", inputs.q.nope[row].double(), inputs.up.W_UK.double())
    scores, rows = change(q_latent @ kv_c.T, inputs.q.pe[row].double() @ k_pe.T, kv_c, b, i)
    return torch.einsum("nl,lnv->nv", torch.softmax(scores, -1) @ rows, W_UV)


@pytest.mark.parametrize(("factor", "word"), [(math.log2(math.e), "1.4427"), (math.log(2), "0.6931")])
def test_lse_in_another_base(factor, word):
    out, lse = right(MIXED)
    d = found(MIXED, out, lse * factor)
    assert (d.kind, d.metric) == ("lse", "lse")
    assert word in d.guesses[0].because
    assert d.got / d.expected == pytest.approx(factor, rel=2**-22)


def test_lse_transposed_in_memory():
    out, lse = right(MIXED)
    assert found(MIXED, out, lse.T.reshape(lse.shape)).kind == "lse"


@pytest.mark.parametrize("value", [INF, NAN, 0.0])
def test_empty_rows(value):
    out, lse = right(PADDED)
    lse[lse[:, 0] == -INF] = value
    d = found(PADDED, out, lse)
    assert d.kind == "empty"
    assert d.worst.page == d.worst.position == -1


def test_empty_splits_of_a_row_are_nan():
    # of 4 splits, rows that see none of the last one come out as NaN, in output and LSE
    out, lse = right(MIXED)
    row = 0
    for b, query_len in enumerate(MIXED.batch.query_lens):
        for i in range(query_len):
            if visible(b, i) <= 3 * math.ceil(MIXED.batch.seq_lens[b] / 4) < MIXED.batch.seq_lens[b]:
                out[row], lse[row] = NAN, NAN
            row += 1
    d = found(MIXED, out, lse)
    assert d.kind == "empty"
    assert "parts in which a row sees no key are NaN" in d.guesses[0].because


def test_head_one_off():
    out, lse = right(MIXED)
    d = found(MIXED, out.roll(1, 1), lse.roll(1, 1))
    assert d.kind == "head"


def test_value_from_the_last_columns_of_the_row():
    inputs, _ = given(MIXED)
    keys = [torch.cat(pair, -1).double()[:, R:] for pair in inputs.keys]

    def change(content: Tensor, position: Tensor, kv_c: Tensor, b: int, i: int) -> tuple[Tensor, Tensor]:
        n = visible(b, i)
        return TOY.softmax_scale * (content + position)[:, :n], keys[b][:n]

    d = found(MIXED, *attend(MIXED, change))
    assert d.kind == "value"
    assert "last L columns" in d.guesses[0].because


def test_value_up_projection_of_the_next_head():
    inputs, _ = given(MIXED)
    d = found(MIXED, *attend(MIXED, scaled(TOY.softmax_scale), inputs.up.W_UV.double().roll(-1, 1)))
    assert d.kind == "value"


def test_batch_rows_of_the_row_before():
    out, lse = right(MIXED)
    d = found(MIXED, out.roll(1, 0), lse.roll(1, 0))
    assert d.kind == "batch"


def test_precision_scores_in_bfloat16():
    rough = lambda content, position, kv_c, b, i: (
        TOY.softmax_scale * (content + position)[:, : visible(b, i)].bfloat16().double(),
        kv_c[: visible(b, i)],
    )
    d = found(MIXED, *attend(MIXED, rough))
    assert d.kind == "precision"
    assert d.guesses[0].because == "the scores are rounded to bfloat16"


def test_precision_by_the_shape_alone():
    # noise of 2^-9 that no hypothesis predicts, in every number
    out, lse = right(MIXED)
    random = torch.Generator().manual_seed(0)
    noise = lambda x: x * (1 + 2**-9 * torch.randn(x.shape, generator=random))
    assert found(MIXED, noise(out), noise(lse)).kind == "precision"


def test_tail_where_weight_0_meets_poison():
    # the output of every request whose last page is partial is NaN, the LSE is right
    out, lse = right(MIXED)
    starts = [0, *itertools.accumulate(MIXED.batch.query_lens)]
    for b, s in enumerate(MIXED.batch.seq_lens):
        if s % PAGE:
            out[starts[b] : starts[b + 1]] = NAN
    d = found(MIXED, out, lse)
    assert d.kind == "tail"
    assert math.isnan(d.got)


def test_memory_where_only_padding_is_not_written():
    out, lse = right(PADDED)
    pads = sum(PADDED.batch.query_lens)
    out[pads:], lse[pads:] = NAN, NAN
    assert found(PADDED, out, lse).kind == "memory"


def test_offset_in_a_cache_beyond_two_to_the_31():
    far = dataclasses.replace(MIXED, cache="far")
    out, lse = right(MIXED)
    inputs, made = given(MIXED)
    d = diagnose(far, AttentionState(out.roll(5, 0), lse.roll(5, 0)), made, None, inputs)
    assert d is not None
    assert d.kind == "offset"


@pytest.mark.parametrize(
    ("status", "detail", "kind", "expected"),
    [
        ("wrong_shape", "out is (3, 2)", "form", "form"),
        ("wrong_dtype", "lse is float16", "", "form"),
        ("mismatch", "kv_c read back from slot 3 is not what was written", "write", "write"),
        ("mismatch", "rows before or after the caller's out buffers were written", "memory", "memory"),
        ("raised", "IndexError: index 9 is out of bounds for dimension 0", "form", "page"),
        ("raised", "NotImplementedError: no decode", "form", "form"),
        ("raised", "IndexError: index 2147483647 is out of bounds for dimension 0", "form", "page"),
        ("crashed", "SIGSEGV", "form", "memory"),
        ("crashed", "its process ended with exit code 3", "form", ""),
        ("timed_out", "no answer within 10 s", "form", ""),
    ],
)
def test_a_failure_without_numbers_gets_its_guess_from_the_status_or_the_guard(status, detail, kind, expected):
    d = diagnose_status(status, detail, kind)
    assert d.kind == expected
    assert detail in d.sentence
    assert d.worst is None


def test_every_kind_of_the_zoo_has_words():
    assert tuple(KIND_NAMES) == KINDS


def test_the_sentence_names_the_place_the_numbers_and_the_guess():
    out, lse = right(MIXED)
    lse[1, 2] += 1  # row 1: token 0 of request 1
    d = found(MIXED, out, lse)
    assert d.sentence.startswith("row 0 of request 1, head 2: lse is ")
    assert f"{d.got:.6g} for {d.expected:.6g}" in d.sentence
    assert d.used == pytest.approx(1 / float(given(MIXED)[1].lse_limit[1, 2]), rel=1e-4)
    last = visible(1, 0) - 1
    assert dataclasses.astuple(d.worst) == (1, 0, 1, 2, last // PAGE, last % PAGE, last)
    assert d.record()["worst"]["position"] == last


def test_heads_are_those_of_the_tier_where_the_truth_covers_some():
    out, lse = right(MIXED)
    inputs, made = given(MIXED)
    some = [0, 2]
    part = dataclasses.replace(
        made,
        out=made.out[:, some],
        lse=made.lse[:, some],
        out_limit=made.out_limit[:, some],
        lse_limit=made.lse_limit[:, some],
    )
    lse[4, 2] += 1
    d = diagnose(MIXED, AttentionState(out, lse), part, (0, 2), inputs)
    assert d is not None
    assert d.worst.head == 2
    lse[4, 2] -= 1
    lse[4, 1] += 1  # a head that nobody looked at
    assert diagnose(MIXED, AttentionState(out, lse), part, (0, 2), inputs) is None


def test_without_an_lse_the_output_alone_decides():
    case = dataclasses.replace(MIXED, lse=False)
    inputs, made = given(MIXED)
    out, _ = attend(MIXED, scaled((TOY.P + TOY.R) ** -0.5))
    d = diagnose(case, AttentionState(out.float(), None), made, None, inputs)
    assert d is not None
    assert (d.kind, d.metric) == ("scale", "out")


def test_combined_guesses_are_means_over_the_cases():
    a, b = diagnose_status("mismatch", "x", "write"), diagnose_status("wrong_shape", "x", "form")
    ranked = combine([a, a, b])
    assert [g.kind for g in ranked][:2] == ["write", "form"]
    assert ranked[0].score == pytest.approx(2 / 3)
    assert combine([]) == ()


def test_combined_guesses_that_tie_go_to_what_came_first_more_often():
    tied = dataclasses.replace(
        diagnose_status("mismatch", "x", "memory"), guesses=(Guess("memory", 1.0, ""), Guess("empty", 1.0, ""))
    )
    assert [g.kind for g in combine([tied, tied])] == ["memory", "empty"]
