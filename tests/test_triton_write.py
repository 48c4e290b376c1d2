"""The cache write kernel: a copy with one rounding, so every comparison is of bits."""

import pytest
import torch
from triton_here import DEVICE, DTYPES, require_triton

require_triton()

from mla.cache import CacheSpec, FloatRows, PagedLatentCache  # noqa: E402
from tiers.tier2_triton.kernels.write import problem, write_rows, write_rows_reference  # noqa: E402

BITS = {2: torch.int16, 4: torch.int32}
NAN = float("nan")


def assert_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    kind = BITS[found.element_size()]
    assert torch.equal(found.contiguous().view(kind), expected.contiguous().view(kind))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_dtype", DTYPES)
def test_each_row_stands_in_its_slot_and_all_else_is_as_before(dtype: torch.dtype, row_dtype: torch.dtype) -> None:
    arguments = problem("toy", dtype, DEVICE).arguments
    arguments["data"] = arguments["data"].to(row_dtype)
    expected = arguments["data"].clone()
    write_rows_reference(**arguments | {"data": expected})
    write_rows(**arguments)
    assert_bits(arguments["data"], expected)
    assert int((~expected.isnan()).all(-1).sum()) == 9  # 11 tokens, 2 without a slot


def test_the_reference_is_the_cache_of_the_core() -> None:
    arguments = problem("toy", torch.float32, "cpu").arguments
    cache = PagedLatentCache.new(CacheSpec(7, 3, FloatRows(24, 10, torch.float32)))
    cache.data.fill_(NAN)
    cache.write(arguments["kv_c"], arguments["k_pe"], arguments["slot_mapping"])
    write_rows_reference(**arguments)
    assert_bits(arguments["data"], cache.data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_F1_views_of_a_fused_projection_write_what_contiguous_rows_write(dtype: torch.dtype) -> None:
    fused, at = draw(5, 3 + 24 + 10, dtype=dtype), slots(8, 0, 5, 4, 1)
    views = fused[:, 3:27], fused[:, 27:]
    found, expected = (torch.zeros(3, 3, 34, dtype=dtype, device=DEVICE) for _ in range(2))
    write_rows(found, *views, at)
    write_rows(expected, *(x.contiguous() for x in views), at)
    assert_bits(found, expected)
    assert_bits(found.flatten(0, 1)[at], fused[:, 3:])


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_H6_every_page_size_holds_the_same_rows(page_size: int) -> None:
    kv_c, k_pe, at = draw(6, 24), draw(6, 10, seed=1), slots(47, 0, 13, 16, 95, 31)
    data = torch.full((96 // page_size, page_size, 34), NAN, device=DEVICE)
    write_rows(data, kv_c, k_pe, at)
    assert_bits(data.view(96, 34)[at], torch.cat([kv_c, k_pe], -1))
    assert int((~data.isnan()).any(-1).sum()) == 6


def test_without_rope_the_row_is_the_latent() -> None:
    data, kv_c = torch.full((2, 3, 24), NAN, device=DEVICE), draw(2, 24)
    write_rows(data, kv_c, kv_c[:, :0], slots(4, 2))
    assert_bits(data.view(6, 24)[[4, 2]], kv_c)
    assert data.view(6, 24)[[0, 1, 3, 5]].isnan().all()


def test_F4_slots_outside_the_pool_write_nothing_anywhere() -> None:
    """The pool lies between guard pages and other layers' rows, where a wrong slot would land."""
    engine = torch.full((6, 2, 3, 34), NAN, device=DEVICE)  # pages, layers, rows
    pool = engine[2:4, 1]
    outside = (-1, -7, -(2**40), 6, 7, 2**31 - 1, 2**40)
    write_rows(pool, draw(7, 24), draw(7, 10), slots(*outside))
    assert engine.isnan().all()
    write_rows(pool, draw(8, 24), draw(8, 10), slots(*outside, 5))
    assert int((~engine.isnan()).any(-1).sum()) == 1
    assert not pool[1, 2].isnan().any()


def test_A11_rows_of_the_cache_may_lie_apart() -> None:
    engine = torch.full((3, 2, 40), NAN, device=DEVICE)
    write_rows(engine[..., 3:37], draw(4, 24), draw(4, 10), slots(5, 0, 2, 3))
    assert_bits(engine.view(6, 40)[[5, 0, 2, 3], 3:37], torch.cat([draw(4, 24), draw(4, 10)], -1))
    engine.view(6, 40)[[5, 0, 2, 3], 3:37] = NAN
    assert engine.isnan().all()


def test_rows_past_the_last_slot_are_ignored() -> None:
    data, kv_c, k_pe = torch.full((4, 2, 34), NAN, device=DEVICE), draw(9, 24), draw(7, 10)
    write_rows(data, kv_c, k_pe, slots(3, 6, 0, 5, 1))
    assert_bits(data.view(8, 34)[[3, 6, 0, 5, 1]], torch.cat([kv_c[:5], k_pe[:5]], -1))
    assert data.view(8, 34)[[2, 4, 7]].isnan().all()


def test_a_step_without_tokens_launches_nothing() -> None:
    data = torch.full((4, 2, 34), NAN, device=DEVICE)
    write_rows(data, draw(0, 24), draw(0, 10), slots())
    assert data.isnan().all()


def test_rows_are_rounded_to_nearest_and_ties_to_even() -> None:
    """float16 keeps 10 bits after the point: 1 + 2^-11 and 1 + 3 2^-11 lie in the middle of two neighbours."""
    kv_c = torch.tensor([[1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-23, -1 - 2**-11, 2**-25, 3 * 2**-25]])
    data = torch.zeros(1, 1, 6, dtype=torch.float16, device=DEVICE)
    write_rows(data, kv_c.to(DEVICE), kv_c[:, :0].to(DEVICE), slots(0))
    assert data[0, 0].tolist() == [1, 1 + 2**-9, 1 + 2**-10, -1, 0, 2**-23]


def test_G1_offsets_past_two_billion_elements() -> None:
    """Page 2 of a stride of 2^30 numbers, and token 2 likewise; little of the 4 GB is touched."""
    memory = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    rows = memory.as_strided((3, 34), (2**30, 1))
    rows[2] = draw(34, dtype=torch.float16)
    data = memory[40:].as_strided((3, 2, 8), (2**30, 8, 1))
    write_rows(data, rows[:, :5], rows[:, 5:8], slots(-1, -1, 5))
    assert_bits(data[2, 1], rows[2, :8])
