"""Both forms of attention, and every tier over them: golden means, agreement, gradients, the right kind of nothing."""

import math

import pytest
import torch
from small_case import INF, NAN, SCALE, TIERS, L, N, P, R, V, assert_rows, fill_cache, make_case, mean_case, shared_case

import tiers
from mla.accuracy import compare, reference
from mla.attention import mha_form, mqa_form
from mla.batch import AttentionBatch
from mla.cache import FloatRows, PagedLatentCache
from mla.oracle import oracle
from mla.projections import Query, UpProjection
from mla.state import AttentionState, merge

FORMS = {"mha": mha_form, "mqa": mqa_form}
HALF = (torch.bfloat16, torch.float16)


def inputs(T: int, S: int, dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: int):
    n, lat, p, r, v = (sizes.get(k, d) for k, d in (("N", N), ("L", L), ("P", P), ("R", R), ("V", V)))
    random = torch.Generator().manual_seed(seed)
    shapes = [(T, n, p), (T, n, r), (S, lat), (S, r), (lat, n, p), (lat, n, v)]
    q_nope, q_pe, kv_c, k_pe, W_UK, W_UV = (
        torch.randn(*s, generator=random, dtype=torch.float64).to(dtype) for s in shapes
    )
    return Query(q_nope, q_pe), kv_c, k_pe, UpProjection(W_UK / lat**0.5, W_UV / lat**0.5)


def judge(state: AttentionState, q, kv_c, k_pe, up, visible: list[int], dtype: torch.dtype) -> None:
    """One request's state against the oracle and its budget."""
    S = kv_c.shape[0]
    batch = AttentionBatch.rows([len(visible)], [S], [[0]], visible, page_size=max(S, 1), num_pages=1)
    result = compare(state, reference(q, [(kv_c, k_pe)], up, batch, SCALE, dtype=dtype, seed=0))
    assert result.ok, result


# the two forms alone


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("visible", [[1], [5, 6, 7], [7, 7], [0, 4, 0]])
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_right(form, visible, dtype):
    q, kv_c, k_pe, up = inputs(len(visible), 7, dtype)
    state = FORMS[form](q, kv_c, k_pe, up, torch.tensor(visible), SCALE)
    assert (state.out.dtype, state.lse.dtype) == (torch.float32, torch.float32)
    judge(state, q, kv_c, k_pe, up, visible, dtype)


@pytest.mark.parametrize("seed", range(4))
def test_forms_agree_in_float64_to_1e_10(seed):
    q, kv_c, k_pe, up = inputs(5, 40, seed=seed)
    visible = torch.tensor([0, 1, 13, 39, 40])
    a, b = (form(q, kv_c, k_pe, up, visible, SCALE) for form in FORMS.values())
    assert a.out.dtype == b.lse.dtype == torch.float64
    assert (a.out - b.out).abs().max() <= 1e-10
    assert a.lse[0].eq(-INF).all()
    assert b.lse[0].eq(-INF).all()
    assert (a.lse[1:] - b.lse[1:]).abs().max() <= 1e-10


@pytest.mark.parametrize("form", FORMS)
def test_gradients_also_of_rows_without_keys(form):
    q, kv_c, k_pe, up = inputs(3, 4, N=2, L=5, P=3, R=2, V=4)
    visible = torch.tensor([0, 2, 4])

    def outputs(*x):
        state = FORMS[form](Query(x[0], x[1]), x[2], x[3], UpProjection(x[4], x[5]), visible, SCALE)
        return state.out, state.lse[visible > 0]

    leaves = [x.requires_grad_() for x in (*q, kv_c, k_pe, *up)]
    assert torch.autograd.gradcheck(outputs, leaves)
    out, lse = outputs(*leaves)
    (out.sum() + lse.sum()).backward()
    assert all(bool(x.grad.isfinite().all()) for x in leaves)
    assert bool((leaves[0].grad[0] == 0).all())
    assert bool((leaves[0].grad[1:] != 0).all())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("T", "S"), [(0, 5), (3, 0), (0, 0)])
def test_no_rows_or_no_keys(form, T, S):
    q, kv_c, k_pe, up = inputs(T, S, torch.float32)
    state = FORMS[form](q, kv_c, k_pe, up, torch.zeros(T, dtype=torch.int32), SCALE)
    assert state.out.shape == (T, N, V)
    assert bool((state.out == 0).all())
    assert bool((state.lse == -INF).all())


@pytest.mark.parametrize("form", FORMS)
def test_the_query_of_an_empty_row_may_be_nan(form):
    q, kv_c, k_pe, up = inputs(3, 6, torch.float32)
    q.nope[1], q.pe[1] = NAN, INF
    state = FORMS[form](q, kv_c, k_pe, up, torch.tensor([6, 0, 5]), SCALE)
    judge(state, q, kv_c, k_pe, up, [6, 0, 5], torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_A11_rows_cut_from_a_wider_tensor(form):
    # kv_c and k_pe as views of one latent row, of another tensor's rows
    q, kv_c, k_pe, up = inputs(3, 9, torch.float32)
    whole = torch.full((9, L + R + 5), NAN)
    whole[:, :L], whole[:, L : L + R] = kv_c, k_pe
    state = FORMS[form](q, whole[:, :L], whole[:, L : L + R], up, torch.tensor([7, 8, 9]), SCALE)
    judge(state, q, kv_c, k_pe, up, [7, 8, 9], torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_16_bit_inputs_are_not_rounded_to_16_bits(form):
    # two keys whose scores, 256 and 257 apart from the scale, are one number in bfloat16
    q = Query(torch.full((1, 1, 1), 16.0), torch.zeros(1, 1, 1))
    up = UpProjection(torch.tensor([[[1.0]], [[0.0]]]), torch.tensor([[[0.0]], [[1.0]]]))
    kv_c, k_pe = torch.tensor([[16.0, 0.0], [16.0625, 1.0]]), torch.zeros(2, 1)
    wide = [q.nope, q.pe, kv_c, k_pe, *up]
    nope, pe, kv_c, k_pe, W_UK, W_UV = (x.to(torch.bfloat16) for x in wide)
    state = FORMS[form](Query(nope, pe), kv_c, k_pe, UpProjection(W_UK, W_UV), torch.tensor([2]), 1.0)
    gap = 16.0 * (kv_c[1, 0] - kv_c[0, 0]).item()
    assert state.out.item() == pytest.approx(1 / (1 + math.exp(-gap)), abs=2.0**-20)


# golden values, every tier: a zero query gives the mean of the visible keys


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", TIERS)
def test_M1_verification_rows_are_aligned_bottom_right(name, dtype):
    # 3.0, 3.0 without a mask; 1.0, 1.5 aligned top-left
    case = mean_case([2], [[1.0, 2, 3, 4, 5]], dtype=dtype)
    assert_rows(case.run(name), [2.5, 3.0], 5, 5)


@pytest.mark.parametrize("name", TIERS)
def test_M3_start_4_and_two_new_tokens(name):
    case = mean_case([2], [[1.0, 2, 3, 4, 5, 6]])
    assert_rows(case.run(name), [3.0, 3.5], 6, 6)


@pytest.mark.parametrize("name", TIERS)
def test_M5_every_row_of_a_multi_token_query_is_answered(name):
    case = mean_case([3, 3], [[1.0, 2, 3, 4, 5], [float(i) for i in range(1, 10)]])
    assert_rows(case.run(name), [2.0, 2.5, 3.0, 4.0, 4.5, 5.0], 9, 9)


@pytest.mark.parametrize("name", TIERS)
def test_full_mask(name):
    case = mean_case([2, 1], [[1.0, 2, 3, 4, 5], [7.0, 9]], mask="full")
    assert_rows(case.run(name), [3.0, 3.0, 8.0], 5, 9)


@pytest.mark.parametrize("name", TIERS)
def test_A10_the_prefix_counts(name):
    values = [1.0] * 12 + [5.0] * 4
    case = mean_case([4], [values])
    assert_rows(case.run(name), [(12 + 5 * n) / (12 + n) for n in (1, 2, 3, 4)], 16, 5)


@pytest.mark.parametrize("name", TIERS)
def test_C13_no_padding_lane_is_in_the_denominator(name):
    # 5 keys of value 1, whatever the width of a tile
    case = mean_case([1], [[1.0] * 5], mask="full")
    assert_rows(case.run(name), [1.0], 5, 1)


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_B3_lse_of_one_key_is_0_and_of_eight_equal_keys_is_ln_8(name, dtype):
    case = mean_case([1, 1], [[3.0], [2.0] * 8], dtype=dtype)
    lse = case.run(name).lse
    assert lse.dtype == torch.float32
    assert bool((lse[0] == 0).all())
    assert (lse[1] - math.log(8)).abs().max() <= 4 * 2.0**-24


@pytest.mark.parametrize("name", TIERS)
def test_B4_lse_does_not_depend_on_how_the_queries_are_packed(name):
    # the same rows as one ragged request and as requests of one row each
    packed = mean_case([3], [[1.0, 2, 3, 4, 5, 6, 7]])
    apart = mean_case([1, 1, 1], [[1.0, 2, 3, 4, 5], [1.0, 2, 3, 4, 5, 6], [1.0, 2, 3, 4, 5, 6, 7]])
    for case in (packed, apart):
        lse = case.run(name).lse
        want = torch.tensor([math.log(n) for n in (5, 6, 7)])[:, None]
        assert (lse - want).abs().max() <= 4 * 2.0**-24


@pytest.mark.parametrize("name", TIERS)
def test_B1_long_prefix_short_suffix_in_one_and_merged(name):
    values = [0.0] * 4096 + [10.0] * 4
    whole = mean_case([1], [values], page_size=64, mask="full", L=3, N=1)
    assert_rows(whole.run(name), [40 / 4100], 4, 10 * 4 / 4100)
    halves = [mean_case([1], [part], page_size=64, mask="full", L=3, N=1) for part in (values[:4096], values[4096:])]
    merged = merge(*(half.run(name) for half in halves))
    assert merged.out.mean().item() == pytest.approx(0.0097560976, abs=10 * 8 * 2.0**-24 * math.log(4100))
    assert merged.lse.item() == pytest.approx(math.log(4100), abs=8 * 2.0**-24 * math.log(4100))


# context parallelism: ranks hold a part of the keys, their states merge


def rank_case(case, rank: int, world: int, interleave: int = 1):
    """The share of one rank: key j lies on rank (j // interleave) % world."""
    own = [[j for j in range(s) if j // interleave % world == rank] for s in case.batch.seq_lens_host]
    owners = [b for b, n in enumerate(case.batch.query_lens_host) for _ in range(n)]
    visible = [sum(j < n for j in own[b]) for b, n in zip(owners, case.batch.row_kv_lens.tolist(), strict=True)]
    keys = [(kv_c[part], k_pe[part]) for (kv_c, k_pe), part in zip(case.keys, own, strict=True)]
    share = make_case(
        case.batch.query_lens_host, [len(part) for part in own], keys=keys, row_kv_lens=visible, mask="rows",
        page_size=case.need.page_size, dtype=case.need.dtype,
    )  # fmt: skip
    share.q, share.up = case.q, case.up
    share.cache = fill_cache(share.need, share.batch, share.keys)
    return share


@pytest.mark.parametrize("name", TIERS)
def test_O1_two_ranks_with_five_keys_give_the_mean_of_five(name):
    # 4.302, 3.578: a wrong base; 5.0: an unweighted mean
    case = mean_case([1], [[0.0, 10, 0, 10, 0]])
    states = [rank_case(case, rank, 2).run(name) for rank in range(2)]
    assert_rows(merge(*states), [4.0], 5, 10)
    assert [s.lse[0, 0].item() for s in states] == pytest.approx([math.log(3), math.log(2)], abs=2.0**-22)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("name", TIERS)
def test_O6_merged_ranks_equal_one_even_where_a_rank_has_no_keys_for_a_row(name, interleave, world):
    case = shared_case((3, 1, 4), (10, 1, 4))
    ranks = [rank_case(case, rank, world, interleave) for rank in range(world)]
    assert world < 8 or any(min(rank.batch.seq_lens_host) == 0 for rank in ranks)
    state = AttentionState.empty(case.batch.num_tokens, N, V)
    for rank in ranks:
        part = rank.run(name)
        state = merge(state, part)
    assert compare(state, case.truth()).ok


# empty rows and stale memory


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", TIERS)
def test_C1_C9_requests_without_keys(name, dtype):
    case = shared_case((1, 1, 1), (0, 5, 0), dtype=dtype)
    state = case.run(name)
    case.check(state)
    for row in (0, 2):
        assert bool((state.out[row] == 0).all())
        assert bool((state.lse[row] == -INF).all())


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", TIERS)
def test_rows_without_keys_of_requests_that_have_some(name, dtype):
    case = shared_case((3, 9, 2), (5, 30, 2), row_kv_lens=(0, 3, 5, *range(9), 0, 0), mask="rows", dtype=dtype)
    case.check(case.run(name))


@pytest.mark.parametrize("length", [13, 14, 15, 16])
@pytest.mark.parametrize("name", TIERS)
def test_C4_the_unused_tail_of_the_last_page_is_not_read(name, length):
    case = shared_case((1, 2), (length, length))  # every slot that no key owns is NaN
    case.check(case.run(name))


@pytest.mark.parametrize("name", TIERS)
def test_C6_rows_without_keys_overwrite_what_the_output_held(name):
    case = shared_case((1, 1, 1, 1), (7, 0, 0, 0), pad_tokens=2)
    out = AttentionState(torch.full((6, N, V), NAN), torch.full((6, N), NAN))
    state = case.run(name, out)
    case.check(state)
    assert bool((state.out[1:] == 0).all())
    assert bool((state.lse[1:] == -INF).all())


@pytest.mark.parametrize("name", TIERS)
def test_M7_padding_rows_change_nothing(name):
    plain, padded = (make_case([3, 3, 3], [5, 9, 3], pad_tokens=pad) for pad in (0, 3))
    for mine, theirs in zip(padded.q, plain.q, strict=True):
        mine[:9] = theirs
    padded.up, padded.keys = plain.up, plain.keys
    padded.cache = fill_cache(padded.need, padded.batch, padded.keys)
    for case in (plain, padded):
        state = case.run(name)
        case.check(state)
        assert compare(state, plain.truth()).ok


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("pad", [0, 3])
def test_an_empty_batch(name, pad):
    state = (case := shared_case((), (), pad_tokens=pad)).run(name)
    assert (state.out.shape, state.lse.shape) == ((pad, N, V), (pad, N))
    case.check(state)


# chunk counts


@pytest.mark.parametrize("cap", [37, 16, 8, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["paged", "paged:mha", "paged:mqa"])
def test_A1_the_error_does_not_grow_with_the_number_of_chunks(name, dtype, cap):
    case = shared_case((11, 1), (48, 48), page_size=1, dtype=dtype)
    case.check(case.run(name, max_workspace_tokens=cap))


@pytest.mark.parametrize(("query_len", "keys", "cap"), [(1, 3, 1), (4, 6, 1), (1, 1, 1), (4, 4, 1), (2, 5, 2)])
@pytest.mark.parametrize("name", ["paged:mha", "paged:mqa"])
def test_C10_C12_as_many_chunks_as_keys(name, query_len, keys, cap):
    case = shared_case((query_len,), (keys,), page_size=1)
    case.check(case.run(name, max_workspace_tokens=cap))


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("name", TIERS)
def test_A12_lse_is_that_of_all_keys_for_any_number_of_splits(name, splits):
    values = [1.0] * 20
    options = {"max_workspace_tokens": 20 // splits} if name.startswith("paged") else {}
    case = mean_case([2], [values], page_size=2)
    state = case.run(name, **options)
    assert (state.lse - torch.tensor([[math.log(19)], [math.log(20)]])).abs().max() <= 8 * splits * 2.0**-24
    assert_rows(state, [1.0, 1.0], 20, 1)


# sizes, strides, buffers


@pytest.mark.parametrize("page", [1, 3, 8, 16, 48, 64, 128])
@pytest.mark.parametrize("name", TIERS)
def test_H2_H6_every_page_size(name, page):
    case = shared_case((3, 1), (50, 129), page_size=page)
    case.check(case.run(name))


@pytest.mark.parametrize("pages_first", [False, True])
@pytest.mark.parametrize("name", TIERS)
def test_one_layer_of_an_engine_tensor_is_read_in_place(name, pages_first):
    case, layers = shared_case((3, 1, 12), (50, 17, 12)), 3
    pages = case.cache.num_pages
    shape = (pages, layers) if pages_first else (layers, pages)
    whole = torch.full((*shape, *case.cache.data.shape[1:]), NAN)
    layer = whole[:, 1] if pages_first else whole[1]
    layer.copy_(case.cache.data)
    tier, cache = tiers.get(name), PagedLatentCache.wrap(layer, case.need.layout)
    plan = tier.plan(case.need, case.batch)
    case.check(tier.attend(case.q, cache, tier.prepare(case.up, case.need), plan))


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("sizes", [{"V": 4}, {"P": 16, "V": 5, "R": 2}, {"N": 1}, {"N": 5, "L": 7}, {"V": 1, "P": 1}])
def test_J1_widths_of_queries_and_values_may_differ(name, sizes):
    case = shared_case((3, 1), (9, 6), **sizes)
    state = case.run(name)
    assert state.out.shape == (4, sizes.get("N", N), sizes.get("V", V))
    case.check(state)


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_I6_without_a_rope_part_it_is_plain_latent_attention(name, dtype):
    case = shared_case((3, 1), (9, 6), R=0, dtype=dtype)
    case.check(case.run(name))


@pytest.mark.parametrize("name", TIERS)
def test_F5_query_parts_may_be_views_of_one_tensor(name):
    case = make_case([3, 1], [9, 6])
    whole = torch.full((N, 4, P + R + 3), NAN).transpose(0, 1)
    whole[..., :P], whole[..., P : P + R] = case.q
    truth = case.truth()
    case.q = Query(whole[..., :P], whole[..., P : P + R])
    assert compare(case.run(name), truth).ok


@pytest.mark.parametrize("layout", ["contiguous", "heads first", "cut from wider rows"])
@pytest.mark.parametrize("name", [*TIERS])
def test_F4_nothing_is_written_around_the_output(name, layout):
    case = shared_case((5, 1, 2), (33, 17, 2), page_size=16)
    T, options = 8, {"max_workspace_tokens": 16} if name.startswith("paged") else {}
    shapes = {
        "contiguous": ((T + 4, N, V), lambda x: x[2:-2]),
        "heads first": ((N + 2, T + 4, V), lambda x: x[1:-1, 2:-2].transpose(0, 1)),
        "cut from wider rows": ((T, N + 2, V + 3), lambda x: x[:, 1:-1, 2:-1]),
    }
    shape, cut = shapes[layout]
    guard, lse_guard = torch.full(shape, 77.0), torch.full((T + 4, N), 77.0)
    out = AttentionState(cut(guard), lse_guard[2:-2])
    assert case.run(name, out, **options) is out
    case.check(out)
    out.out.fill_(77.0), out.lse.fill_(77.0)
    assert bool((guard == 77).all())
    assert bool((lse_guard == 77).all())


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "out_dtype"),
    [
        (torch.bfloat16, torch.float32, None),
        (torch.float32, torch.bfloat16, None),
        (torch.float16, torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
)
def test_query_cache_and_output_may_differ_in_dtype(name, dtype, cache_dtype, out_dtype):
    case = shared_case((3, 1, 0), (9, 6, 4), dtype=dtype, layout=FloatRows(L, R, cache_dtype), out_dtype=out_dtype)
    case.check(case.run(name))


@pytest.mark.parametrize("name", TIERS)
def test_float64_stays_float64(name):
    # against the float64 oracle: two float64 computations of 9 keys and 52 terms a score differ by far less than 1e-10
    case = make_case([3, 1], [9, 6], dtype=torch.float64)
    state = case.run(name)
    assert (state.out.dtype, state.lse.dtype) == (torch.float64, torch.float64)
    row = 0
    for (kv_c, k_pe), n in zip(case.keys, (3, 1), strict=True):
        part = slice(row, row + n)
        out, lse = oracle(case.q.nope[part], case.q.pe[part], kv_c, k_pe, *case.up, case.batch.row_kv_lens[part], SCALE)
        assert (state.out[part] - out).abs().max() <= 1e-10
        assert (state.lse[part] - lse).abs().max() <= 1e-10
        row += n


@pytest.mark.parametrize("name", TIERS)
def test_P9_an_absorbed_query_beyond_float16_stays_finite(name):
    # 40 * 16 * 128 = 81920 > 65504, of inputs that are small
    case = make_case([2], [6], dtype=torch.float16, N=1, P=128)
    case.q.nope.fill_(40), case.up.W_UK.fill_(16)
    case.keys[0][0].mul_(2.0**-10)
    case.cache = fill_cache(case.need, case.batch, case.keys)
    case.check(case.run(name))


@pytest.mark.parametrize("name", TIERS)
def test_inputs_are_left_alone(name):
    case = make_case([3, 1, 2], [9, 6, 0], dtype=torch.bfloat16)
    given = [*case.q, *case.up, case.cache.data, case.batch.block_table, case.batch.row_kv_lens]
    before = [x.clone() for x in given]
    case.run(name)
    for x, y in zip(given, before, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TIERS)
def test_verification_equals_its_rows_sent_one_at_a_time(name, dtype, tokens):
    together = shared_case((tokens,), (19,), dtype=dtype)
    together.check(together.run(name))
    kv_c, k_pe = together.keys[0]
    lens = [19 - tokens + i + 1 for i in range(tokens)]
    apart = make_case([1] * tokens, lens, keys=[(kv_c[:n], k_pe[:n]) for n in lens], dtype=dtype)
    apart.q, apart.up = together.q, together.up
    assert compare(apart.run(name), together.truth()).ok


def test_registry_names_are_the_tiers_tested_here():
    elsewhere = {"triton", "flashinfer", "flashmla", "aiter"}  # test_triton_tier.py, test_flashinfer_tier.py, ...
    assert {name.partition(":")[0] for name in TIERS} == set(tiers.names()) - elsewhere
