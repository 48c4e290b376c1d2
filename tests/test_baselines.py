"""MHA, GQA, MQA and encoder attention against float64 loops in plain Python, with poison wherever nobody may read.

Axes: T new tokens, N query heads, G key-value heads, D query and key width, V value width.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mla.baselines import GroupedCache, bytes_per_token, encoder_attention
from mla.batch import AttentionBatch
from mla.cache import slots_of
from mla.config import MLAConfig
from mla.cost import kv_bytes_per_token

N, D, V, PAGE, PAGES = 6, 5, 3, 4, 24
SCALE = 0.37
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
QUERY_LENS, SEQ_LENS = [1, 5, 3, 0, 2, 1], [9, 5, 13, 7, 0, 1]  # decode, prefill, chunk, idle, padding, one key
NAN, INF = float("nan"), float("inf")


@dataclass
class Step:
    """A filled cache, the batch over it, queries (T, N, D), and each request's k (S, G, D) and v (S, G, V)."""

    cache: GroupedCache
    batch: AttentionBatch
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]


def random_table(seq_lens: list[int], generator: torch.Generator) -> list[list[int]]:
    """Shuffled pages; entries past a request's last page are absurd."""
    pages = torch.randperm(PAGES, generator=generator).tolist()
    return [[pages.pop() for _ in range(-(-s // PAGE))] + [10**6, -(10**6)] for s in seq_lens]


def make_step(G: int, dtype: torch.dtype, query_lens=QUERY_LENS, seq_lens=SEQ_LENS, pad_tokens=2, **batch) -> Step:
    generator = torch.Generator().manual_seed(17 + G)
    table = random_table(seq_lens, generator)
    width = max((len(row) for row in table), default=0)
    table = [row + [10**6] * (width - len(row)) for row in table]
    pool = {"page_size": PAGE, "num_pages": PAGES, "pad_tokens": pad_tokens}
    build = AttentionBatch.rows if "row_kv_lens" in batch else AttentionBatch.bottom_right
    step = build(query_lens, seq_lens, table, **batch, **pool)

    def randn(rows: int, *shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype)

    k, v = [randn(s, G, D) for s in seq_lens], [randn(s, G, V) for s in seq_lens]
    pages = (PAGES, PAGE, G)
    cache = GroupedCache(torch.full((*pages, D), NAN, dtype=dtype), torch.full((*pages, V), INF, dtype=dtype))
    new_k, new_v = (torch.full((step.num_tokens, G, width), NAN, dtype=dtype) for width in (D, V))
    start = 0
    for i, (n, s) in enumerate(zip(query_lens, seq_lens, strict=True)):
        context = max(s - n, 0)
        cache.write(k[i], v[i], slots_of(step.block_table[i], 0, context, PAGE))
        new_k[start : start + s - context], new_v[start : start + s - context] = k[i][context:], v[i][context:]
        start += n
    cache.write(new_k, new_v, step.slot_mapping)
    q = randn(step.num_tokens, N, D)
    q[step.row_kv_lens == 0] = NAN
    return Step(cache, step, q, k, v)


def visible(batch: AttentionBatch) -> list[tuple[int, int]]:
    """(request, keys seen) of each row, from the definition: row i of a request sees keys 0 .. s - q + i."""
    rows = []
    for request, (q, s) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        rows += [(request, 0 if s == 0 else s if batch.mask == "full" else s - q + i + 1) for i in range(q)]
    return rows


def looped(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[list[float], float, float, float]:
    """One head of one row in Python floats: q (D,), k (S, D), v (S, V) -> out, lse, and the rounding allowed to both.

    With unit roundoff u of the computing dtype, a score is off by at most (D + 2) u scale sum |q_d k_d| =: delta, so
    the log of the sum by delta + (S + 4) u (1 + |lse|), each weight by the factor 1 +- (2 delta + 2 (S + 8) u), and
    the output by that times max |v|; the result is rounded once more to q's dtype.
    """
    u = UNIT[torch.promote_types(dtype, torch.float32)]
    rows, values, query = k.double().tolist(), v.double().tolist(), q.double().tolist()
    scores = [SCALE * sum(a * b for a, b in zip(query, row, strict=True)) for row in rows]
    top = max(scores)
    total = math.fsum(math.exp(s - top) for s in scores)
    weights = [math.exp(s - top) / total for s in scores]
    out = [math.fsum(w * row[d] for w, row in zip(weights, values, strict=True)) for d in range(len(values[0]))]
    lse = top + math.log(total)
    delta = (D + 2) * u * SCALE * max(sum(abs(a * b) for a, b in zip(query, row, strict=True)) for row in rows)
    largest = max(abs(x) for row in values for x in row)
    lse_error = delta + (len(rows) + 4) * u * (1 + abs(lse))
    out_error = (2 * delta + 2 * (len(rows) + 8) * u) * largest + UNIT[dtype] * max(map(abs, out))
    return out, lse, out_error, lse_error


def check(
    out: Tensor, lse: Tensor, q: Tensor, keys: list[Tensor], values: list[Tensor], rows: list[tuple[int, int]]
) -> None:
    """Compare out (T, N, V) and lse (T, N) with the loops; padding and rows without keys are empty."""
    T = q.shape[0]
    G = keys[0].shape[1]
    assert out.shape == (T, N, V)
    assert lse.shape == (T, N)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
    for t, (request, seen) in enumerate(rows + [(0, 0)] * (T - len(rows))):
        for n in range(N):
            if seen == 0:
                assert (out[t, n] == 0).all()
                assert lse[t, n] == -INF
                continue
            k, v = keys[request][:seen, n // (N // G)], values[request][:seen, n // (N // G)]
            want, want_lse, out_error, lse_error = looped(q[t, n], k, v, q.dtype)
            assert abs(float(lse[t, n]) - want_lse) <= lse_error
            assert max(abs(a - b) for a, b in zip(out[t, n].double().tolist(), want, strict=True)) <= out_error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("G", [6, 3, 2, 1])
def test_ragged_mixed_batch_equals_the_loops(G, dtype):
    step = make_step(G, dtype)
    check(*step.cache.attend(step.q, step.batch, SCALE), step.q, step.k, step.v, visible(step.batch))


@pytest.mark.parametrize("G", [6, 2, 1])
def test_full_mask_equals_the_loops(G):
    step = make_step(G, torch.float64, mask="full")
    check(*step.cache.attend(step.q, step.batch, SCALE), step.q, step.k, step.v, visible(step.batch))


def test_explicit_row_bounds_equal_the_loops_and_rows_that_see_nothing_are_empty():
    bounds = [4, 0, 5, 2, 0, 1, 13, 0, 6, 0, 0, 1]
    step = make_step(2, torch.float64, row_kv_lens=bounds)
    owners = [i for i, n in enumerate(QUERY_LENS) for _ in range(n)]
    state = step.cache.attend(step.q, step.batch, SCALE)
    check(*state, step.q, step.k, step.v, list(zip(owners, bounds, strict=True)))


def test_grouped_heads_equal_mha_over_repeated_keys_and_values():
    step = make_step(2, torch.float64)
    repeated = GroupedCache(
        step.cache.k.repeat_interleave(N // 2, dim=2), step.cache.v.repeat_interleave(N // 2, dim=2)
    )
    grouped, mha = (cache.attend(step.q, step.batch, SCALE) for cache in (step.cache, repeated))
    torch.testing.assert_close(grouped, mha, rtol=1e-13, atol=1e-13)


def test_C4_poison_in_the_tail_of_the_last_page_and_in_foreign_pages_changes_nothing():
    step = make_step(3, torch.float32, [1, 2], [13, 6], pad_tokens=0)
    poisoned = step.cache.attend(step.q, step.batch, SCALE)
    assert int(step.cache.k.isnan().any(dim=(2, 3)).sum()) == PAGES * PAGE - 19  # the poison is there
    step.cache.k.nan_to_num_(nan=0.0)
    step.cache.v.nan_to_num_(posinf=0.0)
    clean = step.cache.attend(step.q, step.batch, SCALE)
    assert torch.equal(poisoned.out, clean.out)
    assert torch.equal(poisoned.lse, clean.lse)
    assert poisoned.out.isfinite().all()


def test_C1_C6_C9_requests_without_keys_give_zero_and_minus_infinity():
    step = make_step(6, torch.float32, [1, 1, 1], [0, 5, 0], pad_tokens=0)
    out, lse = step.cache.attend(step.q, step.batch, SCALE)
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == -INF).all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


def test_M1_two_query_tokens_see_bottom_right_aligned_keys():
    step = make_step(1, torch.float64, [2], [5], pad_tokens=0)
    slots = slots_of(step.batch.block_table[0], 0, 5, PAGE)
    means = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None, None].expand(5, 1, V)
    step.cache.write(step.k[0], means, slots)
    out, lse = step.cache.attend(torch.zeros(2, N, D, dtype=torch.float64), step.batch, SCALE)
    # a mean over 4 and 5 keys: sums of at most 5 terms of size <= 5, each rounded
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([2.5, 3.0], dtype=torch.float64), rtol=0, atol=50 * 2.0**-53)
    torch.testing.assert_close(
        lse[:, 0], torch.tensor([4.0, 5.0], dtype=torch.float64).log(), rtol=0, atol=10 * 2.0**-53
    )


@pytest.mark.parametrize("G", [6, 2, 1])
def test_token_by_token_equals_prefill(G):
    step = make_step(G, torch.float64, [7], [7], pad_tokens=0)
    whole = step.cache.attend(step.q, step.batch, SCALE)
    table = step.batch.block_table[:, :2]
    for t in range(7):
        one = AttentionBatch.bottom_right([1], [t + 1], table, page_size=PAGE, num_pages=PAGES)
        state = step.cache.attend(step.q[t : t + 1], one, SCALE)
        torch.testing.assert_close(state.out[0], whole.out[t], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(state.lse[0], whole.lse[t], rtol=1e-13, atol=1e-13)


def test_an_empty_batch_and_a_batch_of_padding_alone():
    for pad_tokens in (0, 3):
        step = make_step(2, torch.float32, [], [], pad_tokens=pad_tokens)
        out, lse = step.cache.attend(step.q, step.batch, SCALE)
        assert (out.shape, lse.shape) == ((pad_tokens, N, V), (pad_tokens, N))
        assert (out == 0).all()
        assert (lse == -INF).all()


def test_inputs_are_left_as_they_were():
    step = make_step(3, torch.float32)
    kept = [x.clone() for x in (step.cache.k, step.cache.v, step.q)]
    step.cache.attend(step.q, step.batch, SCALE)
    for x, y in zip((step.cache.k, step.cache.v, step.q), kept, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))


def test_attention_is_differentiable():
    step = make_step(2, torch.float64, [1, 3], [4, 3], pad_tokens=0)

    def attend(q, k, v):
        return tuple(GroupedCache(k, v).attend(q, step.batch, SCALE))

    inputs = (step.q, step.cache.k.nan_to_num(0.0), step.cache.v.nan_to_num(posinf=0.0))
    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in inputs], fast_mode=True)


# Writing


def filled(G: int = 2) -> GroupedCache:
    return GroupedCache(torch.full((3, PAGE, G, D), 7.0), torch.full((3, PAGE, G, V), 8.0))


def test_write_stores_rows_by_slot_skips_minus_one_and_leaves_the_rest():
    cache = filled()
    k, v = torch.randn(4, 2, D), torch.randn(4, 2, V)
    cache.write(k, v, torch.tensor([9, -1, 2]))  # the fourth row has no slot
    want_k, want_v = torch.full((12, 2, D), 7.0), torch.full((12, 2, V), 8.0)
    want_k[9], want_k[2], want_v[9], want_v[2] = k[0], k[2], v[0], v[2]
    assert torch.equal(cache.k.flatten(0, 1), want_k)
    assert torch.equal(cache.v.flatten(0, 1), want_v)


@pytest.mark.parametrize(
    ("k", "v", "slots", "message"),
    [
        ((2, 2, D), (2, 2, V), [0, 12], "slot_mapping: expected slots below 12, got 12"),
        ((1, 2, D), (2, 2, V), [0, 1], r"k: expected \(>= 2, 2, 5\), got \(1, 2, 5\)"),
        ((2, 2, D), (2, 2, V + 1), [0, 1], r"v: expected \(>= 2, 2, 3\), got \(2, 2, 4\)"),
        ((2, 3, D), (2, 2, V), [0, 1], r"k: expected \(>= 2, 2, 5\), got \(2, 3, 5\)"),
        ((2, D), (2, 2, V), [0, 1], r"k: expected \(>= 2, 2, 5\), got \(2, 5\)"),
    ],
)
def test_a_wrong_write_names_the_argument_and_writes_nothing(k, v, slots, message):
    cache = filled()
    with pytest.raises(ValueError, match=message):
        cache.write(torch.zeros(k), torch.zeros(v), torch.tensor(slots))
    assert (cache.k == 7).all()
    assert (cache.v == 8).all()


@pytest.mark.parametrize("name", ["page_size", "kv_heads", "key_width", "value_width"])
def test_a_cache_of_no_size_is_refused(name):
    sizes = {"page_size": 4, "kv_heads": 2, "key_width": 5, "value_width": 3, name: 0}
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        GroupedCache.new(8, **sizes)


def test_a_query_or_batch_of_another_shape_is_refused():
    step = make_step(2, torch.float32)
    with pytest.raises(ValueError, match=r"q: expected \(T, N, 5\).*got \(14, 6, 4\)"):
        step.cache.attend(step.q[..., :4], step.batch, SCALE)
    with pytest.raises(ValueError, match=r"q: .*a multiple of 2 key-value heads"):
        step.cache.attend(step.q[:, :5], step.batch, SCALE)
    with pytest.raises(ValueError, match=r"q: expected 14 rows, .*got 13"):
        step.cache.attend(step.q[1:], step.batch, SCALE)
    other = GroupedCache.new(PAGES, PAGE + 1, 2, D, V)
    with pytest.raises(ValueError, match=r"batch.page_size: expected 5, got 4"):
        other.attend(step.q, step.batch, SCALE)


# Without a cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("G", [6, 3, 1])
def test_encoder_equals_the_loops(G, dtype):
    lens = [4, 0, 1, 7]
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(12, heads, width, generator=generator).to(dtype) for heads, width in ((N, D), (G, D), (G, V))
    )
    rows = [(request, n) for request, n in enumerate(lens) for _ in range(n)]
    check(*encoder_attention(q, k, v, lens, SCALE), q, list(k.split(lens)), list(v.split(lens)), rows)


def test_encoder_equals_torch_attention_of_each_request():
    generator = torch.Generator().manual_seed(6)
    q, k = (torch.randn(9, N, D, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(9, N, V, generator=generator, dtype=torch.float64)
    out, _ = encoder_attention(q, k, v, [5, 4], SCALE)
    for part in (slice(0, 5), slice(5, 9)):
        heads_first = [x[part].transpose(0, 1) for x in (q, k, v)]
        want = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=SCALE).transpose(0, 1)
        torch.testing.assert_close(out[part], want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("shapes", "lens", "message"),
    [
        (((9, N, D), (9, 2, D), (9, 2, V)), [5, 3], r"query_lens: .*got \[5, 3\] for 9 queries and 9 keys"),
        (((9, N, D), (9, 2, D), (9, 2, V)), [10, -1], "query_lens: .*got"),
        (((9, N, D), (8, 2, D), (8, 2, V)), [5, 4], "query_lens: .*9 queries and 8 keys"),
        (((9, N, D), (9, 2, D), (9, 3, V)), [5, 4], r"k, v: .*\(9, 2, 5\) and \(9, 3, 3\)"),
        (((9, N, D), (9, 4, D), (9, 4, V)), [5, 4], "q: .*a multiple of 4"),
    ],
)
def test_encoder_names_what_is_wrong(shapes, lens, message):
    with pytest.raises(ValueError, match=message):
        encoder_attention(*map(torch.zeros, shapes), lens, SCALE)


# Bytes


def test_bytes_side_by_side_of_v3_and_of_a_model_whose_heads_8_does_not_divide():
    v3 = MLAConfig(7168, 128, 1536, 512, 128, 64, 128)
    assert bytes_per_token(v3, layers=61) == {"mha": 4_997_120, "gqa-8": 312_320, "mqa": 39_040, "mla": 70_272}
    assert bytes_per_token(v3, row_bytes=656)["mla"] == 656
    assert bytes_per_token(v3, groups=2)["gqa-2"] == 2 * 320 * 2
    assert list(bytes_per_token(v3.replace(num_attention_heads=20))) == ["mha", "gqa-5", "mqa", "mla"]
    assert list(bytes_per_token(v3.replace(num_attention_heads=1))) == ["mha", "mla"]
    with pytest.raises(ValueError, match="kv_heads: expected a divisor of 128 heads, got 3"):
        bytes_per_token(v3, groups=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_cache_takes_the_bytes_that_the_cost_model_says(dtype):
    c = MLAConfig(24, 6, 7, 11, 5, 2, 4)
    for G in (6, 2, 1):
        cache = GroupedCache.new(3, PAGE, G, c.P + c.R, c.V, dtype=dtype)
        assert cache.bytes_per_token == kv_bytes_per_token(c, G, itemsize=dtype.itemsize)
        assert cache.k.nbytes + cache.v.nbytes == 3 * PAGE * cache.bytes_per_token
