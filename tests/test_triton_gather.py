"""The gather kernel: a copy, so every comparison is of bits."""

import numpy as np
import pytest
import torch
from triton_here import DEVICE, DTYPES, require_triton

require_triton()

from mla.chunks import Span, pack_chunks  # noqa: E402
from tiers.tier2_triton.kernels.gather import (  # noqa: E402
    ROWS,
    gather_blocks,
    gather_rows,
    gather_rows_reference,
    problem,
)

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN = float("nan")


def assert_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    kind = BITS[found.element_size()]
    assert torch.equal(found.contiguous().view(kind), expected.contiguous().view(kind))


def as_blocks(spans: list[Span]) -> torch.Tensor:
    return torch.from_numpy(gather_blocks(spans)).to(DEVICE)


def paged(lengths: list[int], page_size: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Pages, block table and each request's rows; NaN and absurd pages where nobody may look."""
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, width, generator=random).to(DEVICE) for n in lengths]
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 1, generator=random).tolist()
    data = torch.full((len(order), page_size, width), NAN, device=DEVICE)
    table = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    table[:, -1] = -7
    for b, (own, count) in enumerate(zip(rows, counts, strict=True)):
        pages, order = order[:count], order[count:]
        table[b, :count] = torch.tensor(pages, dtype=torch.int32)
        for key in range(len(own)):
            data[pages[key // page_size], key % page_size] = own[key]
    return data, table, rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_reference_bit_for_bit_and_guards_stay(dtype: torch.dtype) -> None:
    arguments = problem("toy", dtype, DEVICE).arguments
    expected = arguments["out"].clone()
    gather_rows_reference(**arguments | {"out": expected})
    gather_rows(**arguments)
    assert_bits(arguments["out"], expected)
    assert expected.isnan().all(-1).nonzero().flatten().tolist() == [0, 49, 50]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_H5_chunks_start_and_end_anywhere_in_a_page(page_size: int) -> None:
    data, table, rows = paged([10, 70, 33], page_size, 34)
    for start, stop in ((0, 6), (6, 10), (3, 4)):
        out = torch.full((80, 34), NAN, device=DEVICE)
        spans = [Span(0, start, stop, 2), Span(1, 5, 70, 10), Span(2, 32, 33, 77)]
        gather_rows(data, table, as_blocks(spans), out)
        assert_bits(out[2 : 2 + stop - start], rows[0][start:stop])
        assert_bits(out[10:75], rows[1][5:])
        assert_bits(out[77:78], rows[2][32:])
        assert int((~out.isnan()).any(-1).sum()) == stop - start + 65 + 1


def test_H5_a_context_of_10_in_chunks_of_6_over_pages_of_4() -> None:
    data, table, rows = paged([10], 4, 34)
    chunks = [[Span(0, 0, 6, 0)], [Span(0, 6, 10, 0)]]
    parts = []
    for chunk in chunks:
        parts.append(torch.full((6, 34), NAN, device=DEVICE))
        gather_rows(data, table, as_blocks(chunk), parts[-1])
    assert_bits(torch.cat([parts[0], parts[1][:4]]), rows[0])
    assert parts[1][4:].isnan().all()


def test_H4_the_buffer_holds_the_sum_of_lengths() -> None:
    """Page 16, 4 requests of up to 33 keys: packed without gaps, nothing written after the last row."""
    lengths = [33, 1, 16, 17]
    data, table, rows = paged(lengths, 16, 34)
    (chunk,) = pack_chunks(lengths, 67, 16)
    memory = torch.full((69, 40), NAN, device=DEVICE)  # guard rows and guard columns
    gather_rows(data, table, as_blocks(chunk), memory[1:68, 3:37])
    assert_bits(memory[1:68, 3:37], torch.cat(rows))
    memory[1:68, 3:37] = NAN
    assert memory.isnan().all()


def test_C4_stale_nan_behind_a_request_is_not_gathered_and_nan_inside_is_kept() -> None:
    data, table, rows = paged([13], 4, 34)
    data[table[0, 2].long(), 1] = rows[0][9] = -0.0
    bits = data.view(torch.int32)
    bits[table[0, 1].long(), 2] = 0x7FC12345  # key 6: a NaN with a payload
    out = torch.zeros(16, 34, device=DEVICE)
    gather_rows(data, table, as_blocks([Span(0, 0, 13, 0)]), out)
    assert (out.view(torch.int32)[6] == 0x7FC12345).all()
    out[6] = rows[0][6]
    assert_bits(out[:13], rows[0])
    assert (out[13:] == 0).all()


def test_F1_pages_and_tables_with_strides_of_their_own() -> None:
    data, table, rows = paged([10, 7], 4, 34)
    engine = torch.full((data.shape[0], 3, 4, 40), NAN, device=DEVICE)
    engine[:, 1, :, 3:37] = data
    wide = torch.full((2, 9), -7, dtype=torch.int32, device=DEVICE)
    wide[:, : table.shape[1]] = table
    out = torch.full((17, 34), NAN, device=DEVICE)
    spans = as_blocks([Span(0, 0, 10, 0), Span(1, 0, 7, 10)])
    gather_rows(engine[:, 1, :, 3:37], wide[:, : table.shape[1]], spans, out)
    assert_bits(out, torch.cat(rows))


@pytest.mark.parametrize(("dtype", "width"), [(torch.uint8, 656), (torch.float64, 40)])
def test_whatever_a_layout_stores_is_moved(dtype: torch.dtype, width: int) -> None:
    random = torch.Generator().manual_seed(0)
    data = (torch.rand(3, 4, width, generator=random) * 255).to(dtype).to(DEVICE)
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(7, width, dtype=dtype, device=DEVICE)
    gather_rows(data, table, as_blocks([Span(0, 1, 8, 0)]), out)
    assert_bits(out, torch.cat([data[2], data[0]])[1:])


def test_blocks_cover_each_key_once_in_order() -> None:
    spans = [Span(3, 5, 5 + 2 * ROWS + 1, 4), Span(0, 0, ROWS, 100)]
    assert gather_blocks(spans).tolist() == [
        [3, 5, ROWS, 4],
        [3, 5 + ROWS, ROWS, 4 + ROWS],
        [3, 5 + 2 * ROWS, 1, 4 + 2 * ROWS],
        [0, 0, ROWS, 100],
    ]
    assert (gather_blocks([]).shape, gather_blocks([]).dtype) == ((0, 4), np.int32)


def test_blocks_of_no_rows_and_no_blocks_write_nothing() -> None:
    data, table, _ = paged([10], 4, 34)
    out = torch.full((4, 34), NAN, device=DEVICE)
    gather_rows(data, table, torch.tensor([[0, 0, 0, 0], [2**20, -1, 0, 2**30]], dtype=torch.int32, device=DEVICE), out)
    gather_rows(data, table, as_blocks([]), out)
    assert out.isnan().all()


def test_G1_offsets_past_two_billion_elements() -> None:
    """Page 2 of a stride of 2^30 numbers, and row 2 of the workspace likewise; little of the 4 GB is touched."""
    memory = torch.empty(2**31 + 64, dtype=torch.float16, device=DEVICE)
    data, out = memory.as_strided((3, 2, 8), (2**30, 8, 1)), memory[40:].as_strided((3, 8), (2**30, 1))
    data[2, 1] = torch.arange(8.0)
    table = torch.tensor([[0, 2]], dtype=torch.int32, device=DEVICE)
    gather_rows(data, table, torch.tensor([[0, 3, 1, 2]], dtype=torch.int32, device=DEVICE), out)
    assert out[2].tolist() == list(range(8))
