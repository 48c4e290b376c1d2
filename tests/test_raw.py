"""Raw kernels checked without a tier class: the probe finds what they do, the adapter converts it and says so."""

import math
import re
from functools import partial

import pytest
import torch
from small_case import L, N, R, assert_rows, make_case, make_need, mean_case

from mla.accuracy import compare, latent_reference
from mla.conformance import find, run_case
from mla.conformance.raw import dense, probe, ragged
from mla.projections import absorb_query
from mla.state import AttentionState

INF, NAN = math.inf, math.nan
MARKS = {"-inf": -INF, "+inf": INF, "0": 0.0, "nan": NAN, "-1e+30": -1e30}
MIXED = ([1, 3, 0, 2, 1, 3], [9, 3, 5, 0, 17, 10])  # several query lengths, none, and a request without keys


def attend(q, keys, L, bound, scale, base, mark):
    """One request: q (s, N, L+R), keys (S, L+R), bound (s,) -> out (s, N, L) and lse (s, N) in a base."""
    scores = torch.einsum("snd,kd->snk", q.double(), keys.double()) * scale
    scores = scores.masked_fill(torch.arange(len(keys)) >= bound[:, None, None], -INF)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e300) if len(keys) else scores.new_zeros(*q.shape[:2], 1)
    weights = torch.exp(scores - top)
    total = weights.sum(-1)
    out = torch.where(total[..., None] > 0, weights @ keys[:, :L].double() / total[..., None], 0)
    lse = {"e": top[..., 0] + total.log(), "maximum": top[..., 0], "sum": total}.get(
        base, (top[..., 0] + total.log()) / math.log(2)
    )
    return out.to(q.dtype), torch.where(bound[:, None] > 0, lse, mark).float()


def kernel_of(base="e", axes="B N s", empty="-inf", cache="page slot row", align="bottom-right", own_scale=None):
    """A dense kernel with those conventions; axes None: it returns no LSE."""

    def kernel(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v):
        assert (block_table.dtype, seq_lens.dtype) == (torch.int32, torch.int32)
        if "head" in cache:
            assert kv_cache.dim() == 4
            assert kv_cache.shape[cache.split().index("head")] == 1
            kv_cache = kv_cache.squeeze(cache.split().index("head"))
        assert kv_cache.dim() == 3
        s = q.shape[1]
        page, parts = kv_cache.shape[1], []
        for b, S in enumerate(seq_lens.tolist()):
            at = torch.arange(S)
            keys = kv_cache[block_table[b, at // page].long(), at % page]
            first = {"bottom-right": S - s + 1, "top-left": 1 if s > 1 else S}.get(align, S) if causal else S
            step = 0 if align == "none" or not causal else 1
            bound = torch.zeros(s).long() if S == 0 else first + step * torch.arange(s)
            parts.append(attend(q[b], keys, head_dim_v, bound, own_scale or softmax_scale, base, MARKS[empty]))
        out, lse = (torch.stack(column) for column in zip(*parts, strict=True))  # (B, s, N, L), (B, s, N)
        if axes is None:
            return out
        return out, {"B N s": lse.transpose(1, 2), "B s N": lse, "T N": lse.flatten(0, 1), "N T": lse.flatten(0, 1).T}[
            axes
        ]

    return kernel


def ragged_of(base="e", axes="T N", empty="-inf"):
    """A ragged kernel with those conventions; axes None: it returns no LSE."""

    def kernel(q_nope, q_pe, ckv, kpe, qo_indptr, kv_indptr, kv_indices, kv_lens, sm_scale):
        parts, q = [], torch.cat([q_nope, q_pe], -1)
        for b, S in enumerate(kv_lens.tolist()):
            mine, pages = (
                slice(*qo_indptr[b : b + 2].tolist()),
                kv_indices[slice(*kv_indptr[b : b + 2].tolist())].long(),
            )
            keys = torch.cat([ckv[pages], kpe[pages]], -1).flatten(0, 1)[:S]
            s = mine.stop - mine.start
            bound = torch.zeros(s).long() if S == 0 else S - s + 1 + torch.arange(s)
            parts.append(attend(q[mine], keys, ckv.shape[-1], bound, sm_scale, base, MARKS[empty]))
        out, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        return out if axes is None else (out, lse if axes == "T N" else lse.T)

    return kernel


def check_both_levels(tier, query_lens=MIXED[0], seq_lens=MIXED[1], **fields):
    """Assert that a tier keeps the budget of both levels on a batch, and return its state."""
    case = make_case(query_lens, seq_lens, **fields)
    state = case.run(tier)
    result = compare(state, case.truth())
    assert result.ok, result
    need, batch = case.need, case.batch
    q_latent = absorb_query(case.q.nope, case.up.W_UK).to(need.dtype)
    latent = tier.latent(q_latent, case.q.pe, case.cache, batch, need)
    first = 0
    for b, query_len in enumerate(batch.query_lens_host):
        mine = slice(first, first + query_len)
        first += query_len
        if not query_len:
            continue
        rows, bound = need.layout.round_trip(*case.keys[b]), batch.row_kv_lens[mine]
        truth = latent_reference(
            q_latent[mine], case.q.pe[mine], *rows, bound, need.softmax_scale, dtype=need.dtype, seed=b
        )
        lse = None if latent.lse is None else latent.lse[mine]
        assert compare(AttentionState(latent.out[mine], lse), truth).ok, b
    return state


def need_of(**fields):
    return make_need(**fields)


# The probe, and what the adapter makes of it

CONVENTIONS = [
    {"base": base, "axes": axes, "empty": empty, "cache": cache}
    for base, axes, empty, cache in [
        ("e", "B N s", "-inf", "page slot row"),
        ("2", "B N s", "+inf", "page slot row"),
        ("2", "B s N", "-inf", "page slot head row"),
        ("e", "B s N", "+inf", "page head slot row"),
        ("e", "T N", "0", "page slot head row"),
        ("2", "N T", "-1e+30", "page slot row"),
    ]
]


@pytest.mark.parametrize("given", CONVENTIONS, ids=lambda c: "-".join(c.values()))
def test_dense_conventions_are_found_and_converted(given):
    found = probe(kernel_of(**given), need_of())
    assert (found.lse_base, found.lse_axes, found.cache) == (given["base"], given["axes"], given["cache"])
    assert float(found.empty_lse) == torch.tensor(MARKS[given["empty"]], dtype=torch.float32)
    assert (found.empty_out, found.tokens, found.scale_name) == ("0", "bottom-right", "as given")
    for dtype in (torch.float32, torch.bfloat16):
        check_both_levels(dense(kernel_of(**given)), dtype=dtype)


@pytest.mark.parametrize(("base", "axes", "empty"), [("e", "T N", "-inf"), ("2", "N T", "+inf"), ("2", "T N", "0")])
def test_ragged_conventions_are_found_and_converted(base, axes, empty):
    kernel = ragged_of(base, axes, empty)
    found = probe(kernel, need_of(), "ragged")
    assert (found.lse_base, found.lse_axes, float(found.empty_lse)) == (base, axes, MARKS[empty])
    assert found.tokens == "bottom-right"
    for dtype in (torch.float32, torch.float16):
        check_both_levels(ragged(kernel), dtype=dtype, pad_tokens=2)


@pytest.mark.parametrize("make", [lambda: dense(kernel_of(axes=None)), lambda: ragged(ragged_of(axes=None))])
def test_a_kernel_without_lse_says_so_and_passes_where_none_is_asked_for(make):
    tier = make()
    (sentence,) = tier.why_not(need_of())
    assert "returns no LSE" in sentence
    assert tier.why_not(need_of(lse=False)) == []
    assert check_both_levels(tier, lse=False).lse is None


def test_B3_equal_keys_have_lse_ln_n_whatever_the_kernels_base():
    """B3, B4: 1 and 8 equal keys of score 0 have the LSE 0 and ln 8 from every kernel, never log2 8."""
    for kernel in (dense(kernel_of(base="e")), dense(kernel_of(base="2")), ragged(ragged_of(base="2"))):
        state = mean_case([1, 1], [[3.0], [float(i) for i in range(8)]]).run(kernel)
        assert torch.equal(state.lse[0], torch.zeros(N))
        assert torch.allclose(
            state.lse[1], torch.tensor(math.log(8.0)), rtol=4 * 2.0**-24, atol=0
        )  # log2, ln 2, product


def test_M1_two_new_tokens_over_five_keys_are_means_of_four_and_five():
    """K, MTP: c = 1..5, q = 0 and 2 new tokens give 2.5 and 3.0."""
    for tier in (dense(kernel_of()), ragged(ragged_of()), dense(kernel_of(), max_query_len=1)):
        assert_rows(mean_case([2], [[1.0, 2, 3, 4, 5]]).run(tier), [2.5, 3.0], 5, 5.0)


def test_what_is_converted_is_said():
    tier = dense(kernel_of(base="2", empty="+inf", cache="page slot head row"), max_query_len=2, flat=False)
    said = " ".join(tier.notes(need_of()))
    assert "base 2, converted to natural, axes (B N s) (2 for 4 keys of score 0 and 3 for 8 keys of score 0)" in said
    assert "LSE +inf" in said
    assert "(page slot head row)" in said
    assert "Longer queries than 2 go in as several requests" in said
    case = make_case([1], [3])
    assert tier.plan(case.need, case.batch).report["probe"] == tier.notes(case.need)


# What contradicts is an error, and what is wrong stays wrong


@pytest.mark.parametrize(
    ("kernel", "declared", "named"),
    [
        (kernel_of(base="2"), {"lse_base": "e"}, "lse_base: expected 'e', as declared, got '2'"),
        (kernel_of(base="e"), {"lse_base": "2"}, "lse_base: expected '2', as declared, got 'e'"),
        (kernel_of(base="maximum"), {"lse_base": "e"}, "got 'maximum'"),
        (kernel_of(axes="B s N"), {"lse_axes": "B N s"}, "lse_axes: expected 'B N s'"),
        (kernel_of(empty="+inf"), {"empty_lse": "-inf"}, "empty_lse: expected '-inf'"),
        (kernel_of(axes=None), {"lse_base": "e"}, "returns no LSE"),
        (
            kernel_of(base="maximum"),
            {},
            "an LSE in base e or 2, got the maximum (0 for 4 keys of score 0, 0 for 8 keys",
        ),
        (kernel_of(base="sum"), {}, "an LSE in base e or 2, got the sum (4 for 4 keys of score 0, 8 for 8 keys"),
        (
            kernel_of(cache="page slot head row"),
            {"cache": "page slot row"},
            "no answer to a zero query",
        ),
    ],
)
def test_a_contradiction_is_refused_with_what_was_seen(kernel, declared, named):
    case, tier = make_case([1], [3]), dense(kernel, **declared)
    with pytest.raises((ValueError, RuntimeError), match=re.escape(named)):
        tier.prepare(case.up, case.need)


def test_a_right_declaration_is_taken():
    declared = {"lse_base": "2", "lse_axes": "B s N", "empty_lse": "+inf", "cache": "page slot row"}
    check_both_levels(dense(kernel_of(base="2", axes="B s N", empty="+inf"), **declared))


def test_axes_that_run_and_give_wrong_numbers_are_passed_over():
    def kernel(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v):
        assert kv_cache.dim() == 4
        table = torch.nn.functional.pad(block_table, (0, 64))  # so that pages of one slot are found too
        return kernel_of()(q, kv_cache[:, 0], table, seq_lens, softmax_scale, causal, head_dim_v)

    assert dense(kernel).convention(need_of()).cache == "page head slot row"


def test_a_maximum_for_an_lse_passes_where_it_is_declared_to_be_none():
    check_both_levels(dense(kernel_of(base="maximum"), lse=False), lse=False)


def test_B4_a_base_that_changes_with_the_sizes_is_an_error():
    def kernel(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v):
        inner = kernel_of(base="2" if q.shape[2] > N else "e")
        return inner(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v)

    tier = dense(kernel)
    assert tier.convention(need_of()).lse_base == "e"
    with pytest.raises(ValueError, match="lse_base: expected 'e', as for other sizes, got '2'"):
        tier.convention(need_of(N=N + 1))


@pytest.mark.parametrize("align", ["top-left", "none"])
def test_a_wrong_causal_alignment_is_found_and_not_mended(align):
    tier = dense(kernel_of(align=align))
    assert tier.convention(need_of()).tokens == align
    case = make_case([3], [9])
    assert compare(case.run(tier), case.truth()).status == "mismatch"


def test_nan_in_rows_without_keys_is_a_fault_unless_it_is_declared():
    case = make_case([1, 1], [5, 0])
    assert compare(case.run(dense(kernel_of(empty="nan"))), case.truth()).status == "not_finite"
    check_both_levels(dense(kernel_of(empty="nan"), empty_lse="nan"))


def test_a_lost_lse_of_a_row_with_keys_is_not_taken_for_an_empty_one():
    inner = kernel_of(empty="+inf")

    def kernel(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v):
        out, lse = inner(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v)
        return out, lse.masked_fill(lse.isfinite() & (seq_lens == 9)[:, None, None], INF)

    case = make_case([1, 1], [9, 0])
    assert compare(case.run(dense(kernel)), case.truth()).status == "not_finite"


# The softmax scale


def test_a_kernel_with_a_scale_of_its_own_gets_its_query_multiplied():
    def kernel(q, kv_cache, block_table, seq_lens, causal, head_dim_v):
        own = (L + R) ** -0.5
        return kernel_of()(q, kv_cache, block_table, seq_lens, own, causal, head_dim_v)

    tier = dense(kernel)
    assert tier.convention(need_of()).scale_name == "(L+R)^-0.5"
    assert "multiplied by" in " ".join(tier.notes(need_of()))
    case = make_case(*MIXED)
    assert compare(case.run(tier), case.truth()).ok


def test_a_scale_that_is_given_and_not_taken_is_found_and_not_mended():
    tier = dense(kernel_of(own_scale=1.0))
    assert tier.convention(need_of()).scale_name == "none"
    assert "not the given" in " ".join(tier.notes(need_of()))
    case = make_case([1], [9])
    assert compare(case.run(tier), case.truth()).status == "mismatch"


def test_a_scale_of_its_own_that_has_no_name_is_an_error():
    def kernel(q, kv_cache, block_table, seq_lens, causal, head_dim_v):
        return kernel_of()(q, kv_cache, block_table, seq_lens, 0.3, causal, head_dim_v)

    case = make_case([1], [9])
    assert dense(kernel).convention(case.need).scale == pytest.approx(0.3, rel=0.01)
    with pytest.raises(ValueError, match="softmax scale"):
        dense(kernel).prepare(case.up, case.need)


# How a batch becomes calls


def recording(inner, calls):
    def kernel(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v):
        calls.append((tuple(q.shape[:2]), tuple(seq_lens.tolist()), causal))
        return inner(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v)

    return kernel


def calls_of(query_lens, seq_lens, *, declared=None, **fields):
    calls = []
    tier = dense(recording(kernel_of(), calls), **(declared or {}))
    tier.convention(make_case(query_lens, seq_lens, **fields).need)
    calls.clear()
    case = make_case(query_lens, seq_lens, **fields)
    assert compare(case.run(tier), case.truth()).ok
    return calls


def test_requests_go_in_by_their_number_of_new_tokens_without_padding():
    assert calls_of(*MIXED) == [((2, 1), (9, 17), True), ((1, 2), (0,), True), ((2, 3), (3, 10), True)]


def test_one_token_kernels_get_every_token_as_a_request():
    calls = calls_of([3, 2], [9, 2], declared={"max_query_len": 1})
    assert calls == [((5, 1), (7, 8, 9, 1, 2), True)]
    assert probe(kernel_of(), need_of(), max_query_len=1).tokens == "not asked"
    assert calls_of([3, 1], [9, 2], declared={"max_query_len": 2}) == [
        ((2, 1), (9, 2), True), ((1, 2), (8,), True)
    ]  # fmt: skip


def test_a_kernel_that_takes_one_token_fails_on_more_unless_that_is_declared():
    def kernel(q, kv_cache, block_table, seq_lens, softmax_scale, head_dim_v):
        if q.shape[1] != 1:
            raise NotImplementedError("one token only")
        return kernel_of()(q, kv_cache, block_table, seq_lens, softmax_scale, True, head_dim_v)

    case = make_case([3], [9])
    assert dense(kernel).convention(case.need).tokens == "raises NotImplementedError: one token only"
    with pytest.raises(NotImplementedError):
        case.run(dense(kernel))
    check_both_levels(dense(kernel, max_query_len=1))


def test_a_kernel_that_raises_without_keys_is_told_apart():
    def kernel(q, kv_cache, block_table, seq_lens, softmax_scale, head_dim_v):
        if not seq_lens.all():
            raise NotImplementedError("no keys")
        return kernel_of()(q, kv_cache, block_table, seq_lens, softmax_scale, True, head_dim_v)

    assert "Row without keys: raises NotImplementedError: no keys." in dense(kernel).notes(need_of())
    case = make_case(*MIXED)
    with pytest.raises(NotImplementedError):
        case.run(dense(kernel))
    tier = dense(kernel, empty_rows=False)
    assert "Row without keys: not asked." in tier.notes(need_of())
    check_both_levels(tier)


def test_requests_without_keys_and_padding_stay_away_where_that_is_declared():
    calls = calls_of([1, 2, 1], [5, 0, 0], declared={"empty_rows": False}, pad_tokens=2)
    assert calls == [((1, 1), (5,), True)]


def test_an_empty_batch_calls_nothing():
    assert calls_of([], []) == []


def test_masks_become_bounds_or_the_causal_flag():
    assert calls_of([3], [9], mask="full") == [((1, 3), (9,), False)]
    rows = {"row_kv_lens": [0, 2, 3, 9], "mask": "rows"}
    assert calls_of([4], [9], **rows) == [((2, 1), (0, 9), True), ((1, 2), (3,), True)]

    def without(q, kv_cache, block_table, seq_lens, softmax_scale, head_dim_v):
        return kernel_of()(q, kv_cache, block_table, seq_lens, softmax_scale, True, head_dim_v)

    check_both_levels(dense(without), [3, 1], [9, 4], mask="full")


@pytest.mark.parametrize("layers", [1, 3])
def test_flat_shows_the_pool_as_slots_without_a_copy(layers):
    seen = []

    def kernel(q, k_buffer, v_buffer, kv_indptr, kv_indices, sm_scale):
        seen.append(k_buffer.untyped_storage().data_ptr())
        assert k_buffer.shape[1:] == (1, L + R)
        assert v_buffer.shape[1:] == (1, L)
        table = torch.nn.utils.rnn.pad_sequence(kv_indices.split(kv_indptr.diff().tolist()), batch_first=True)
        return kernel_of()(q, k_buffer, table, kv_indptr.diff(), sm_scale, True, v_buffer.shape[-1])

    tier = dense(kernel, flat=True, max_query_len=1)
    case = make_case([1, 3], [9, 10])
    pages, page, width = case.cache.data.shape
    whole = torch.full((pages, layers, page, width), NAN)
    whole[:, layers - 1] = case.cache.data
    case.cache = type(case.cache).wrap(whole[:, layers - 1], case.need.layout)
    assert compare(case.run(tier), case.truth()).ok
    assert seen[-1] == whole.untyped_storage().data_ptr()


def test_buffers_are_handed_in_where_a_kernel_requires_them():
    def kernel(q, kv_cache, o, lse, block_table, seq_lens, softmax_scale):
        out, found = kernel_of(axes="T N")(q, kv_cache, block_table, seq_lens, softmax_scale, True, o.shape[-1])
        assert o.isnan().all()
        assert o.is_contiguous()  # whatever the strides of the query are
        o.copy_(out)
        lse.copy_(found)

    check_both_levels(dense(kernel))


# What a kernel may be called with


def test_every_name_stands_for_what_it_says():
    seen = []

    def kernel(
        *, q_latent, q_rope, cache, kv_c, k_pe, page_table, kv_lens, query_start_loc, kv_page_indptr, kv_page_indices,
        kv_last_page_len, scaling, is_causal, return_lse, dv, qk_rope_head_dim, num_qo_heads, block_size, max_seqlen_k,
        max_q_len,
    ):  # fmt: skip
        seen.append(dict(locals()))
        return ragged_of()(
            q_latent, q_rope, kv_c, k_pe, query_start_loc, kv_page_indptr, kv_page_indices, kv_lens, scaling
        )

    tier, case = ragged(kernel), make_case([1, 3, 0, 1], [9, 8, 4, 0])
    assert compare(case.run(tier), case.truth()).ok
    last, table, rows = seen[-1], case.batch.block_table, case.cache.data
    pages = [int(table[b, i]) for b, n in enumerate([3, 2, 0, 0]) for i in range(n)]
    lists = {"kv_lens": [9, 8, 0], "query_start_loc": [0, 1, 4, 5], "kv_page_indptr": [0, 3, 5, 5]}
    lists |= {"kv_page_indices": pages, "kv_last_page_len": [1, 4, 0]}
    assert {name: last[name].tolist() for name in lists} == lists
    assert {last[name].dtype for name in lists} == {torch.int32}
    numbers = {
        "scaling": case.need.softmax_scale,
        "is_causal": True,
        "return_lse": True,
        "dv": L,
        "qk_rope_head_dim": R,
    }
    numbers |= {"num_qo_heads": N, "block_size": rows.shape[1], "max_seqlen_k": 9, "max_q_len": 3}
    assert {name: last[name] for name in numbers} == numbers
    for name, part in (("cache", rows), ("kv_c", rows[..., :L]), ("k_pe", rows[..., L:])):
        assert (last[name].data_ptr(), last[name].shape) == (part.data_ptr(), part.shape)
    assert torch.equal(last["page_table"], table[[0, 1, 3]])
    assert last["q_rope"].data_ptr() == case.q.pe.data_ptr()  # as strided as the caller's
    case = make_case([1], [5], lse=False)
    case.run(tier)
    assert seen[-1]["return_lse"] is False


def test_a_required_parameter_of_another_name_is_an_error_that_lists_what_can_be_given():
    def kernel(q, kv_cache, blok_table, seq_lens, softmax_scale, workspace): ...

    with pytest.raises(TypeError) as caught:
        dense(kernel)
    said = str(caught.value)
    assert "required blok_table, workspace" in said
    assert "blok_table may be block_table" in said
    assert "block_table / block_tables / page_table" in said
    assert "softmax_scale / sm_scale / scale" in said
    assert dense(partial(kernel, blok_table=None, workspace=None)).name == "kernel"


@pytest.mark.parametrize("kernel", [lambda *args: None, lambda **rest: None, lambda q, seq_lens: None, max])
def test_a_kernel_without_names_to_go_by_is_an_error(kernel):
    with pytest.raises(TypeError, match="wrap it: def kernel"):
        dense(kernel)


def test_partial_binds_what_shall_stay_and_defaults_are_filled():
    seen = []

    def kernel(q, kv_cache, page_table, cache_seqlens, kv_lora_rank, causal=False, sm_scale=None, window=7, out=None):
        seen.append((causal, sm_scale, window, out))
        return kernel_of()(q, kv_cache, page_table, cache_seqlens, sm_scale, causal, kv_lora_rank)

    check_both_levels(dense(kernel))
    assert {*seen} == {(True, make_need().softmax_scale, 7, None)}
    seen.clear()
    case = make_case([1], [5])
    tier = dense(partial(kernel, sm_scale=1.0, window=3))
    case.run(tier, out=None)
    assert {*seen} == {(True, 1.0, 3, None)}


@pytest.mark.parametrize(
    ("make", "kind", "named"),
    [
        (lambda: dense(7), TypeError, "kernel: expected a function"),
        (lambda: dense(kernel_of(), base="e"), TypeError, "lse_base"),
        (lambda: dense(kernel_of(), lse_base="10"), ValueError, "lse_base: expected one of"),
        (lambda: ragged(ragged_of(), cache="row"), ValueError, "cache: expected one of"),
        (lambda: probe(kernel_of(), style="packed"), ValueError, "style: expected one of"),
    ],
)
def test_bad_declarations_are_named(make, kind, named):
    with pytest.raises(kind) as caught:
        make()
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "fields", "named"),
    [
        ({"dtypes": (torch.float16,)}, {}, "dtype = torch.float32 is not taken"),
        ({"page_sizes": (64,)}, {}, "page_size = 4 is not taken"),
        ({"heads": (16, 128)}, {}, "N = 3 is not taken by mine, declared for 16, 128"),
        ({"widths": ((512, 64),)}, {}, "(L, R) = (32, 8) is not taken"),
        ({}, {"layout": "bf16"}, "Rows of bfloat16 are not taken by mine"),
        ({}, {"window": 4}, "window = 4 is not computed"),
        ({"lse": False}, {}, "returns no LSE"),
    ],
)
def test_limits_are_refused_in_sentences(declared, fields, named):
    if "layout" in fields:
        fields = {"layout": type(make_need().layout)(L, R, torch.bfloat16)}
    (sentence,) = dense(kernel_of(), "mine", **declared).why_not(make_need(**fields))
    assert named in sentence


def test_other_rows_are_taken_where_that_is_declared():
    layout = type(make_need().layout)(L, R, torch.bfloat16)
    check_both_levels(dense(kernel_of(), other_rows=True), layout=layout)


@pytest.mark.parametrize(
    "result", [lambda out, lse: out.numpy(), lambda out, lse: (out[..., :3], lse), lambda out, lse: (out, lse[:, :2])]
)
def test_what_is_no_output_and_lse_is_an_error(result):
    def kernel(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v):
        return result(*kernel_of()(q, kv_cache, block_table, seq_lens, softmax_scale, causal, head_dim_v))

    case = make_case([1], [5])
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"kernel's (out|lse)"):
        dense(kernel).prepare(case.up, case.need)
    assert dense(kernel).why_not(case.need) == []  # a broken kernel is not one that refuses


@pytest.mark.parametrize(
    "case_id",
    [
        "toy-mixed_small-bf16-rows_bf16-needle_last-shuffled-p16-s0",
        "toy-zero_rows_prefill-f16-rows_f16-equal_keys-interleaved-p1-s0",
        "toy-rank_some_rows-f32-rows_f32-peaked-extended-p32-s0",
        "toy_r0-mixed_prefill_last-f32-rows_f32-needle-shuffled-p64-s0",
        "toy-padded_requests-bf16-rows_bf16-randn-contiguous-p16-s0",
    ],
)
def test_cases_of_the_suite_pass(case_id):
    case = find(case_id)
    for tier in (dense(kernel_of("2", "B s N", "+inf", "page slot head row")), ragged(ragged_of("2", "N T", "+inf"))):
        result = run_case(tier, case)
        assert result.ok, result
