"""Costs against golden constants, loops over (query, key, head), and tensors and products that torch counts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mla.config import MLAConfig
from mla.cost import (
    BatchCounts,
    absorbed_cost,
    absorbed_workspace_bytes,
    break_even_flops,
    cache_bytes_per_token,
    count_batch,
    default_workspace_tokens,
    expanded_cost,
    expanded_workspace_bytes,
    grouped_cost,
    kv_bytes_per_token,
    latent_cost,
    merged_sizes,
    projection_cost,
)
from mla.roofline import GPUS, Gpu, break_even_roofline, cost_report, find_gpu

V3 = MLAConfig(7168, 128, 1536, 512, 128, 64, 128)
V2_LITE = MLAConfig(2048, 16, None, 512, 128, 64, 128)
TOY = MLAConfig(24, 3, 7, 11, 5, 2, 4)
TOY_NO_RANK = TOY.replace(q_lora_rank=None)
RAGGED = ([1, 5, 3, 0, 2], [9, 5, 12, 7, 0])
GIB = 2**30

batches = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=4).map(
    lambda parts: ([q for q, _ in parts], [q + context for q, context in parts])
)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def visible_pairs(query_lens: list[int], seq_lens: list[int]) -> int:
    """Pairs, counted one by one: row i of a request sees key j when j <= s - q + i."""
    return sum(
        1 for q, s in zip(query_lens, seq_lens, strict=True) for i in range(q) for j in range(s) if j <= s - q + i
    )


def looped_flops(c: MLAConfig, query_lens: list[int], seq_lens: list[int]) -> dict[str, dict[str, int]]:
    """FLOPs of both forms, one multiply-add (2) per index of every sum, looping over requests, rows, keys and heads."""
    expanded = dict.fromkeys(("up_projection", "scores", "values"), 0)
    absorbed = dict.fromkeys(("absorption", "scores", "values"), 0)
    for q, s in zip(query_lens, seq_lens, strict=True):
        for _head in range(c.N):
            for _key in range(s if q else 0):
                expanded["up_projection"] += sum(2 for _ in range(c.L) for _ in range(c.P + c.V))
            for i in range(q):
                absorbed["absorption"] += sum(2 for _ in range(c.L) for _ in range(c.P)) + 2 * c.L * c.V
                for _key in range(max(0, s - q + i + 1) if s else 0):
                    expanded["scores"] += 2 * c.P + 2 * c.R
                    expanded["values"] += 2 * c.V
                    absorbed["scores"] += 2 * c.L + 2 * c.R
                    absorbed["values"] += 2 * c.L
    return {"expanded": expanded, "absorbed": absorbed}


def test_golden_cache_bytes_per_token():
    assert cache_bytes_per_token(V3, layers=61) == 70_272
    assert cache_bytes_per_token(V2_LITE, layers=27) == 31_104
    assert kv_bytes_per_token(V3, V3.N, layers=61) == 4_997_120
    assert round(4_997_120 / 70_272, 1) == 71.1
    assert cache_bytes_per_token(V3, row_bytes=512 + 4 * 4 + 64 * 2) == 656
    assert cache_bytes_per_token(V3, itemsize=1) == 576
    assert cache_bytes_per_token(V3, itemsize=4) == 2304


def test_paper_table_1_the_latent_is_as_large_as_gqa_with_2_25_groups():
    assert cache_bytes_per_token(V3) / (2 * 128 * 2) == 2.25


def test_materialised_keys_and_values_of_32768_tokens_are_2_5_gib():
    assert kv_bytes_per_token(V3, 128) * 32_768 == 2.5 * GIB
    assert expanded_cost(V3, count_batch([1], [32_768])).byte_parts["expanded"] == 2 * 2.0 * GIB  # written, then read


@pytest.mark.parametrize(("kv_heads", "each"), [(128, 128), (8, 8), (1, 1)])
def test_bytes_of_mha_gqa_mqa_are_those_of_their_tensors(kv_heads, each):
    assert kv_bytes_per_token(V3, kv_heads, layers=3) == 3 * nbytes(meta(each, 192), meta(each, 128))


@pytest.mark.parametrize("kv_heads", [0, -1, 3, 256])
def test_kv_heads_that_do_not_divide_the_heads_are_refused(kv_heads):
    with pytest.raises(ValueError, match=r"kv_heads: .*128 heads.*Fix: use one of \[1, 2, 4"):
        kv_bytes_per_token(V3, kv_heads)


@given(batches)
def test_count_batch_is_the_count_by_loop(batch):
    query_lens, seq_lens = batch
    counts = count_batch(query_lens, seq_lens)
    asking = [s for q, s in zip(query_lens, seq_lens, strict=True) if q]
    assert counts == BatchCounts(sum(query_lens), sum(asking), visible_pairs(query_lens, seq_lens))
    assert count_batch(query_lens, seq_lens, mask="full").pairs == sum(
        1 for q, s in zip(query_lens, seq_lens, strict=True) for _ in range(q) for _ in range(s)
    )


def test_padding_and_requests_without_new_tokens_cost_nothing():
    assert count_batch([3, 0], [0, 7]) == BatchCounts(3, 0, 0)
    assert count_batch([], []) == BatchCounts(0, 0, 0)
    empty = BatchCounts(0, 0, 0)
    for cost in (expanded_cost, absorbed_cost, latent_cost, projection_cost):
        assert (cost(V3, empty).flops, cost(V3, empty).bytes, cost(V3, empty).intensity) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "mask", "message"),
    [
        ([1], [1, 2], "causal", "seq_lens: expected 1 entries"),
        ([1, 5], [1, 4], "causal", r"seq_lens\[1\]: .*query_lens\[1\] = 5, got 4"),
        ([-1], [1], "causal", r"query_lens\[0\]: .*got -1"),
        ([0], [-2], "causal", r"seq_lens\[0\]: .*got -2"),
        ([1], [1], "rows", "mask: .*got 'rows'"),
    ],
)
def test_count_batch_names_what_is_wrong(query_lens, seq_lens, mask, message):
    with pytest.raises(ValueError, match=message):
        count_batch(query_lens, seq_lens, mask=mask)


@pytest.mark.parametrize("batch", [RAGGED, ([1], [1]), ([4], [4]), ([2, 1], [2, 30])])
def test_flops_of_both_forms_are_the_count_by_loop(batch):
    counts, looped = count_batch(*batch), looped_flops(TOY, *batch)
    assert expanded_cost(TOY, counts).flop_parts == looped["expanded"]
    assert absorbed_cost(TOY, counts).flop_parts == looped["absorbed"]
    assert latent_cost(TOY, counts).flops == looped["absorbed"]["scores"] + looped["absorbed"]["values"]
    assert grouped_cost(TOY, counts, 1).flops == looped["expanded"]["scores"] + looped["expanded"]["values"]


def test_flops_are_those_that_torch_counts_in_the_products():
    T, S, c = 5, 13, TOY
    q_nope, q_pe = torch.ones(T, c.N, c.P), torch.ones(T, c.N, c.R)
    kv_c, k_pe = torch.ones(S, c.L), torch.ones(S, c.R)
    W_UK, W_UV = torch.ones(c.L, c.N, c.P), torch.ones(c.L, c.N, c.V)
    with FlopCounterMode(display=False) as expanded:
        k_nope, v = torch.einsum("sl,lnp->snp", kv_c, W_UK), torch.einsum("sl,lnv->snv", kv_c, W_UV)
        weights = torch.einsum("tnp,snp->tns", q_nope, k_nope) + torch.einsum("tnr,sr->tns", q_pe, k_pe)
        torch.einsum("tns,snv->tnv", weights, v)
    with FlopCounterMode(display=False) as absorbed:
        q_latent = torch.einsum("tnp,lnp->tnl", q_nope, W_UK)
        weights = torch.einsum("tnl,sl->tns", q_latent, kv_c) + torch.einsum("tnr,sr->tns", q_pe, k_pe)
        torch.einsum("tnl,lnv->tnv", torch.einsum("tns,sl->tnl", weights, kv_c), W_UV)
    counts = count_batch([T], [S], mask="full")
    assert expanded_cost(c, counts).flops == expanded.get_total_flops()
    assert absorbed_cost(c, counts).flops == absorbed.get_total_flops()


@pytest.mark.parametrize("c", [TOY, TOY_NO_RANK], ids=["rank", "no_rank"])
def test_projection_flops_are_those_that_torch_counts(c):
    T = 5
    hidden = torch.ones(T, c.H)
    with FlopCounterMode(display=False) as query:
        q_c = hidden if c.Lq is None else hidden @ torch.ones(c.H, c.Lq)
        q_c @ torch.ones(q_c.shape[1], c.N * (c.P + c.R))
    with FlopCounterMode(display=False) as kv_down:
        hidden @ torch.ones(c.H, c.L + c.R)
    with FlopCounterMode(display=False) as output:
        torch.ones(T, c.N * c.V) @ torch.ones(c.N * c.V, c.H)
    assert projection_cost(c, BatchCounts(T, 0, 0)).flop_parts == {
        "query": query.get_total_flops(),
        "kv_down": kv_down.get_total_flops(),
        "output": output.get_total_flops(),
    }


def test_golden_flops_per_query_key_head():
    pair = BatchCounts(0, 0, 1)
    assert expanded_cost(V3, pair).flops / V3.N == 640
    assert absorbed_cost(V3, pair).flops / V3.N == 2176
    assert 2176 / 640 == 3.4


@pytest.mark.parametrize(("itemsize", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_bytes_are_those_of_the_tensors_that_pass_through_memory(itemsize, dtype):
    c, counts = TOY, count_batch(*RAGGED)
    T, S = 11, 9 + 5 + 12
    row = {"dtype": dtype}
    shared = {
        "cache": nbytes(meta(S, c.L + c.R, **row)),
        "query": nbytes(meta(T, c.N, c.P, **row), meta(T, c.N, c.R, **row)),
        "output": nbytes(meta(T, c.N, c.V, **row)),
        "weights": nbytes(meta(c.L, c.N, c.P, **row), meta(c.L, c.N, c.V, **row)),
    }
    expanded = 2 * nbytes(meta(S, c.N, c.P, **row), meta(S, c.N, c.V, **row))
    latents = 2 * nbytes(meta(T, c.N, c.L, **row), meta(T, c.N, c.L, **row))
    assert expanded_cost(c, counts, itemsize=itemsize).byte_parts == {**shared, "expanded": expanded}
    assert absorbed_cost(c, counts, itemsize=itemsize).byte_parts == {**shared, "latents": latents}
    assert latent_cost(c, counts, itemsize=itemsize).byte_parts == {
        "cache": shared["cache"],
        "query": nbytes(meta(T, c.N, c.L + c.R, **row)),
        "output": nbytes(meta(T, c.N, c.L, **row)),
    }
    for kv_heads in (1, 3):
        assert grouped_cost(c, counts, kv_heads, itemsize=itemsize).byte_parts == {
            "cache": nbytes(meta(S, kv_heads, c.P + c.R, **row), meta(S, kv_heads, c.V, **row)),
            "query": shared["query"],
            "output": shared["output"],
        }


def test_projection_bytes_are_those_of_the_tensors():
    c, T = TOY, 5
    assert c.Lq is not None
    weights = [meta(c.H, c.Lq), meta(c.Lq, c.N * (c.P + c.R)), meta(c.H, c.L + c.R), meta(c.N * c.V, c.H)]
    assert projection_cost(c, BatchCounts(T, 99, 99)).byte_parts == {
        "weights": nbytes(*weights),
        "hidden": nbytes(meta(T, c.H), meta(T, c.H)),
        "query": nbytes(meta(T, c.Lq), meta(T, c.Lq), meta(T, c.N, c.P + c.R)),
        "cache": nbytes(meta(T, c.L + c.R)),
        "output": nbytes(meta(T, c.N * c.V)),
    }


def test_a_packed_row_changes_only_the_cache_bytes():
    counts = count_batch([2], [100])
    for cost in (expanded_cost, absorbed_cost, latent_cost):
        plain, packed = cost(V3, counts), cost(V3, counts, row_bytes=656)
        assert packed.byte_parts == {**plain.byte_parts, "cache": 100 * 656}
        assert packed.flop_parts == plain.flop_parts


def test_decode_intensity_in_the_limit_of_a_long_context():
    long = BatchCounts(1, 10**9, 10**9)  # one query over 10^9 keys: all but the cache is below 1e-5 of the bytes
    for heads, known in ((16, 30), (64, 121), (128, 242)):
        intensity = latent_cost(V3.replace(num_attention_heads=heads), long).intensity
        assert intensity == pytest.approx(heads * 1088 / 576, rel=1e-5)
        assert round(intensity) == known
    for kv_heads, limit in ((128, 1), (8, 16), (1, 128)):
        assert grouped_cost(V3, long, kv_heads).intensity == pytest.approx(limit, rel=1e-4)


IDEAL = [  # heads, requests, context, microseconds at 4.3 TB/s and 790 TFLOP/s, bound
    (16, 1, 131072, 35, "memory"),
    (16, 128, 4096, 141, "memory"),
    (16, 64, 16384, 281, "memory"),
    (64, 128, 8192, 285, "memory"),
    (128, 1, 131072, 46, "compute"),
    (128, 32, 4096, 46, "compute"),
    (128, 128, 4096, 185, "compute"),
    (128, 128, 8192, 370, "compute"),
    (128, 64, 16384, 370, "compute"),
]


@pytest.mark.parametrize(("heads", "requests", "context", "ideal_us", "bound"), IDEAL)
def test_floor_of_absorbed_decode_on_a_measured_h200(heads, requests, context, ideal_us, bound):
    gpu = Gpu.measured("one h200", 790e12, 4.3e12)
    cost = latent_cost(V3.replace(num_attention_heads=heads), count_batch([1] * requests, [context] * requests))
    assert round(gpu.seconds(cost) * 1e6) == ideal_us
    assert gpu.bound(cost) == bound


@pytest.mark.parametrize(("tokens", "ideal_ms"), [(4096, 0.87), (16384, 13.9)])
def test_floor_of_expanded_prefill(tokens, ideal_ms):
    cost = grouped_cost(V3, count_batch([tokens], [tokens]), V3.N)
    assert round(find_gpu("h200-measured").seconds(cost) * 1e3, 2 if ideal_ms < 1 else 1) == ideal_ms


def test_ridge_is_where_both_ceilings_meet():
    gpu = Gpu.measured("one h200", 790e12, 4.3e12)
    assert round(gpu.ridge) == 184
    assert round(gpu.ridge / (1088 / 576)) == 97  # query rows (s_q N) where absorbed decode turns compute-bound


def test_merged_matrices_are_larger_than_the_two_factors():
    sizes = merged_sizes(V3)
    assert [round(n / 1e6, 1) for n in sizes["W_UQ W_UK"]] == [100.7, 33.6]
    assert [round(n / 1e6, 1) for n in sizes["W_UV W_O"]] == [469.8, 125.8]


@pytest.mark.parametrize("c", [TOY, TOY_NO_RANK], ids=["rank", "no_rank"])
def test_merged_sizes_are_those_of_the_matrices(c):
    W_UQ, W_UK = meta(c.N, c.Lq or c.H, c.P), meta(c.N, c.P, c.L)
    W_UV, W_O = meta(c.N, c.L, c.V), meta(c.N, c.V, c.H)
    assert merged_sizes(c) == {
        "W_UQ W_UK": ((W_UQ @ W_UK).numel(), W_UQ.numel() + W_UK.numel()),
        "W_UV W_O": ((W_UV @ W_O).numel(), W_UV.numel() + W_O.numel()),
    }


def test_break_even_flops_of_v3_is_171_query_tokens():
    assert math.ceil(break_even_flops(V3)) == 171
    long = 10**9
    for q, expanded_wins in ((170, False), (171, True)):
        counts = count_batch([q], [long + q])
        assert (expanded_cost(V3, counts).flops < absorbed_cost(V3, counts).flops) is expanded_wins


def test_break_even_flops_is_infinite_where_a_latent_is_no_wider_than_a_head():
    assert break_even_flops(TOY.replace(kv_lora_rank=4)) == math.inf


def test_break_even_roofline_follows_flops_where_arithmetic_bounds_and_bytes_where_memory_does():
    arithmetic, memory = Gpu.measured("slow", 1.0, 1e30), Gpu.measured("narrow", 1e30, 1.0)
    assert break_even_roofline(V3, arithmetic, 10**9) == 171
    # (C + q) (P + V) <= 2 L q: q = 3000 * 256 / 768 = 1000, and both forms then move the same bytes
    assert break_even_roofline(V3, memory, 3000) == 1000
    assert break_even_roofline(V3, memory, 3001) == 1001
    assert break_even_roofline(V3, memory, 3000, limit=999) is None
    assert break_even_roofline(TOY.replace(kv_lora_rank=4), arithmetic, 10**6, limit=300) is None


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("context", "requests"), [(64, 1), (4096, 32), (131072, 1)])
def test_break_even_roofline_is_the_first_query_len_where_expanded_is_not_slower(gpu, context, requests):
    def lead(q):
        counts = count_batch([q] * requests, [context + q] * requests)
        return gpu.seconds(absorbed_cost(V3, counts)) - gpu.seconds(expanded_cost(V3, counts))

    found = break_even_roofline(V3, gpu, context, requests)
    assert found is not None
    assert lead(found) >= 0
    assert all(lead(q) < 0 for q in range(1, found))


def test_more_arithmetic_per_byte_moves_the_break_even_up_and_a_short_context_down():
    starved, fed = find_gpu("l40s"), find_gpu("a100-80g")
    assert starved.ridge > fed.ridge
    assert break_even_roofline(V3, starved, 131072) > break_even_roofline(V3, fed, 131072)
    assert break_even_roofline(V3, fed, 128, 32) < break_even_roofline(V3, fed, 131072, 32)
    assert all(break_even_roofline(V3, gpu, 0) == 1 for gpu in GPUS.values())


@pytest.mark.parametrize(("context", "batch", "message"), [(-1, 1, "context: .*got -1"), (8, 0, "batch: .*got 0")])
def test_break_even_roofline_names_what_is_wrong(context, batch, message):
    with pytest.raises(ValueError, match=message):
        break_even_roofline(V3, find_gpu("h200"), context, batch)


def test_R1_prefill_of_8k_is_faster_expanded_and_decode_absorbed_on_every_gpu():
    gpus = list(GPUS.values())
    assert set(cost_report(V3, count_batch([8192], [8192]), gpus).winner.values()) == {"expanded"}
    assert set(cost_report(V3, count_batch([1] * 32, [4096] * 32), gpus).winner.values()) == {"absorbed"}
    assert set(cost_report(V3, count_batch([64], [131072]), gpus).winner.values()) == {"absorbed"}


def test_report_has_a_row_for_each_form_and_gpu():
    counts, gpus = count_batch([1] * 4, [1000] * 4), [find_gpu("H200"), find_gpu("mi300x")]
    report = cost_report(V3, counts, gpus, row_bytes=656, kv_heads=(128, 8, 1))
    forms = ["expanded", "absorbed", "projections", "mha", "gqa-8", "mqa"]
    assert [(row.gpu, row.form) for row in report.rows] == [(g, f) for g in ("h200", "mi300x") for f in forms]
    row, cost = report.rows[1], absorbed_cost(V3, counts, row_bytes=656)
    assert (row.flops, row.bytes) == (cost.flops, cost.bytes)
    assert row.intensity == cost.flops / cost.bytes
    assert row.time_us == 1e6 * max(cost.flops / 989.4e12, cost.bytes / 4.8e12)
    assert row.bound == ("compute" if cost.flops / 989.4e12 > cost.bytes / 4.8e12 else "memory")
    assert report.counts == counts


def test_a_peak_for_another_element_width_is_refused():
    counts = count_batch([1], [10])
    with pytest.raises(ValueError, match=r"gpu: expected a peak for 4-byte elements, got .*h200.*itemsize=4"):
        cost_report(V3, counts, [find_gpu("h200")], itemsize=4)
    cpu = Gpu.measured("laptop", 1e11, 2e10, itemsize=4)
    assert [row.gpu for row in cost_report(V3, counts, [cpu], itemsize=4).rows] == ["laptop"] * 3


@pytest.mark.parametrize(
    ("flops", "bandwidth", "name"), [(0.0, 1.0, "flops"), (1.0, -1.0, "bandwidth"), (math.inf, 1.0, "flops")]
)
def test_measured_ceilings_must_be_rates(flops, bandwidth, name):
    with pytest.raises(ValueError, match=f"{name}: expected a finite rate above 0"):
        Gpu.measured("x", flops, bandwidth)


def test_an_unknown_gpu_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"gpu: expected one of a100-80g, h100-sxm, .*got 'h300'"):
        find_gpu("h300")


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "page_size", "multiple", "rows"),
    [
        (163_840, 256, 64, 1, 65_536),  # 8 * 163840 is over the ceiling
        (1000, 4, 64, 1, 8000),  # 8 * 1000 = 125 pages
        (1001, 4, 64, 1, 8000),  # 8008 holds 125 whole pages
        (100, 64, 16, 1, 4096),  # 4 * 64 * 16
        (10, 2000, 64, 1, 128_000),  # a page for each of 2000 requests beats the ceiling
        (163_840, 1, 48, 1, 65_520),  # 1365 pages of 48
        (163_840, 1, 64, 3, 65_472),  # lcm(64, 3) = 192 goes 341 times
        (1, 1, 64, 7, 448),  # never below one step
    ],
)
def test_default_workspace_tokens(max_model_len, max_num_seqs, page_size, multiple, rows):
    assert default_workspace_tokens(max_model_len, max_num_seqs, page_size, multiple=multiple) == rows


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "page_size", "multiple"])
def test_default_workspace_tokens_names_what_is_wrong(name):
    limits = {"max_model_len": 8, "max_num_seqs": 8, "page_size": 8, "multiple": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        default_workspace_tokens(**limits)


def test_expanded_workspace_is_the_sum_of_its_tensors():
    c, cap, q_block, k_block, T = TOY, 40, 3, 8, 17
    f32 = {"dtype": torch.float32}
    tensors = [
        *(meta(cap, c.L + c.R), meta(cap, c.N, c.P), meta(cap, c.N, c.V)),
        *(meta(c.N, q_block, k_block, **f32), meta(k_block, c.N, c.P, **f32), meta(k_block, c.N, c.V, **f32)),
        *(meta(q_block, c.N, c.P + c.R, **f32), meta(q_block, c.N, c.V, **f32), meta(q_block, c.N, c.V, **f32)),
        *(meta(k_block, c.L + c.R, **f32), meta(T, c.N, c.V, **f32), meta(T, c.N, **f32)),
    ]
    assert expanded_workspace_bytes(c, cap, itemsize=2, q_block=q_block, k_block=k_block, tokens=T) == nbytes(*tensors)


@pytest.mark.parametrize("k_block", [None, 8])
def test_absorbed_workspace_is_the_sum_of_its_tensors(k_block):
    c, rows, q_rows, T = TOY, 40, 3, 17
    f32 = {"dtype": torch.float32}
    tensors = [
        *(meta(rows, c.L + c.R), meta(rows, c.L + c.R, **f32)),
        *(meta(c.N, q_rows, k_block or rows, **f32), meta(q_rows, c.N, c.L + c.R, **f32)),
        *(meta(q_rows, c.N, c.L, **f32), meta(q_rows, c.N, c.L, **f32)),
        *(meta(q_rows, c.N, **f32), meta(q_rows, c.N, **f32), meta(T, c.N, c.V, **f32), meta(T, c.N, **f32)),
    ]
    assert absorbed_workspace_bytes(c, rows, q_rows, itemsize=2, k_block=k_block, tokens=T) == nbytes(*tensors)


def test_R2_extra_memory_of_expansion_is_bounded_by_the_cap():
    cap = 65_536
    blocks = {"itemsize": 2, "q_block": 128, "k_block": 512, "tokens": 0}
    grows = expanded_workspace_bytes(V3, cap, **blocks) - expanded_workspace_bytes(V3, 0, **blocks)
    assert grows == cap * (576 + 128 * 256) * 2
    assert grows <= cap * 128 * 320 * 2
