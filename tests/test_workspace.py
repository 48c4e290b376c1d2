"""The memory that attention holds beside its inputs: counted storage by storage, bounded, whatever the context.

T new tokens, S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import pytest
import torch
from small_case import make_case

import tiers
from mla.batch import AttentionBatch
from mla.cache import CacheSpec, FloatRows, PagedLatentCache
from mla.cost import absorbed_workspace_bytes, expanded_workspace_bytes
from mla.memory import LiveStorages
from mla.need import Capacity, Need
from mla.projections import Query, UpProjection

N, L, P, R, V, PAGE, CAP = 2, 512, 128, 64, 128, 64, 8192
LENGTHS = [(1, 16384), (1, 65536), (96, 16384), (96, 65536)]


def measured(form: str, dtype: torch.dtype, query_len: int, seq_len: int) -> tuple[int, int]:
    """Peak bytes and the plan's own bound of one request."""
    layout = FloatRows(L, R, dtype)
    need = Need(N=N, L=L, P=P, R=R, V=V, softmax_scale=0.1, layout=layout, page_size=PAGE, dtype=dtype, lse=True)
    pages = seq_len // PAGE
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[None]
    batch = AttentionBatch.bottom_right([query_len], [seq_len], table, page_size=PAGE, num_pages=pages)
    cache = PagedLatentCache.new(CacheSpec(pages, PAGE, layout))
    cache.data.normal_()
    q = Query(torch.randn(query_len, N, P).to(dtype), torch.randn(query_len, N, R).to(dtype))
    up = UpProjection(torch.randn(L, N, P).to(dtype) / 23, torch.randn(L, N, V).to(dtype) / 23)
    tier = tiers.get("paged", form=form, max_workspace_tokens=CAP)
    prepared = tier.prepare(up, need)
    with LiveStorages() as storages:
        plan = tier.plan(need, batch)
        tier.attend(q, cache, prepared, plan)
    return storages.peak, plan.report["workspace_bound"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["mha", "mqa"])
def test_R2_peak_memory_is_bounded_and_independent_of_the_context(form, dtype):
    peaks = {lengths: measured(form, dtype, *lengths) for lengths in LENGTHS}
    for peak, bound in peaks.values():
        assert peak <= 1.05 * bound
    for query_len in (1, 96):
        assert peaks[query_len, 16384] == peaks[query_len, 65536]


def test_the_bound_is_the_formula_of_the_cost_model():
    _, bound = measured("mha", torch.bfloat16, 1, 16384)
    sizes = Need(
        N=N, L=L, P=P, R=R, V=V, softmax_scale=0.1, layout=FloatRows(L, R), page_size=PAGE, dtype=torch.bfloat16
    )
    assert bound == expanded_workspace_bytes(sizes, CAP, itemsize=2, q_block=128, k_block=4096, tokens=1)  # 2^20 scores
    _, bound = measured("mqa", torch.bfloat16, 1, 16384)
    assert bound == absorbed_workspace_bytes(sizes, CAP, 1, itemsize=2, k_block=(1 << 22) // N, tokens=1)


def test_live_storages_counts_each_storage_once_and_forgets_the_dead():
    outside = torch.zeros(1000)
    with LiveStorages() as storages:
        a = torch.zeros(100)  # 400 bytes
        b = a.view(10, 10)[2:] + outside[:10]  # 320 bytes; views and what was there before count nothing
        assert storages.live == 720
        del a
        assert storages.live == 320
        c = b.double()  # 640 bytes
        assert (storages.live, storages.peak) == (960, 960)
        del b, c
        assert (storages.live, storages.peak) == (0, 960)


def test_scratch_is_known_from_the_capacity_alone_and_never_more_than_can_exist():
    layout = FloatRows(L, R, torch.bfloat16)
    sizes = dict(N=N, L=L, P=P, R=R, V=V, softmax_scale=0.1, layout=layout, page_size=PAGE, dtype=torch.bfloat16)
    row = (L + R) * 2 + N * (P + V) * 2
    nobody = AttentionBatch.bottom_right([], [], [], page_size=PAGE, num_pages=0)
    for capacity, rows in (
        (Capacity(max_requests=4, max_tokens=64, max_query_len=64, max_seq_len=131072), 65536),
        (Capacity(max_requests=4, max_tokens=64, max_query_len=64, max_seq_len=1000), 4 * 1024),
        (Capacity(max_requests=2048, max_tokens=4096, max_query_len=64, max_seq_len=131072), 2048 * PAGE),
    ):
        need = Need(**sizes, capacity=capacity)
        assert tiers.get("paged").plan(need, nobody).nbytes == rows * row


@pytest.mark.parametrize("form", ["mha", "mqa"])
def test_more_requests_than_the_cap_has_rows_still_keep_to_it(form):
    capacity = Capacity(max_requests=20, max_tokens=64, max_query_len=32, max_seq_len=64)
    case = make_case([1] * 10, [30] * 10, capacity=capacity)
    tier = tiers.get("paged", form=form, max_workspace_tokens=4)
    case.check(case.run(tier))
    assert tier.plan(case.need, case.batch).sizes["rows"][0][0] == 4


@pytest.mark.parametrize("form", ["mha", "mqa"])
def test_P9_float16_latents_whose_expansion_overflows_stay_finite(form):
    """k_nope = 16 x 200 x 30 = 96000 passes float16's 65504; the scores are small all the same."""
    case = make_case([2], [9], dtype=torch.float16, L=16)
    case.up.W_UK.fill_(30.0)
    case.keys[0][0].sign_().mul_(200.0)
    case.keys[0][0][3] = 200.0
    for part in case.q:
        part.fill_(1e-3)
    case.cache.write(*case.keys[0], case.batch.block_table[0].repeat_interleave(4)[:9] * 4 + torch.arange(9) % 4)
    case.check(case.run("paged", form=form))


def test_gradients_are_refused_by_a_forward_only_tier_before_anything_is_written():
    case = make_case([2], [9])
    before = case.cache.data.clone()
    with pytest.raises(ValueError, match="requires_grad"):
        tiers.get("paged").write(case.cache, case.keys[0][0].clone().requires_grad_(), case.keys[0][1], torch.arange(9))
    assert torch.equal(torch.nan_to_num(case.cache.data), torch.nan_to_num(before))
    assert not case.cache.data.requires_grad
