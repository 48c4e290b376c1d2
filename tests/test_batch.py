"""What a step asks for: bounds of rows, slots and positions by hand, the batch grammar, and bad input."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from mla.batch import AttentionBatch, parse_batch

TABLE = [[5, 2, 9], [7, -3, 2**31 - 1], [0, 8, 1]]  # the second request has one page; the rest is absurd
STEP = {"query_lens": [3, 1, 2], "seq_lens": [9, 4, 10], "block_table": TABLE, "page_size": 4, "num_pages": 10}


def build(**changes) -> AttentionBatch:
    return AttentionBatch.bottom_right(**(STEP | changes))


def test_fields_of_a_mixed_step():
    batch = build(pad_tokens=2)
    assert batch.query_start_loc.tolist() == [0, 3, 4, 6]
    assert batch.seq_lens.tolist() == [9, 4, 10]
    assert batch.row_kv_lens.tolist() == [7, 8, 9, 4, 9, 10, 0, 0]
    assert batch.positions.tolist() == [6, 7, 8, 3, 8, 9, 0, 0]
    assert batch.slot_mapping.tolist() == [2 * 4 + 2, 2 * 4 + 3, 9 * 4, 7 * 4 + 3, 1 * 4, 1 * 4 + 1, -1, -1]
    assert batch.block_table.tolist() == TABLE
    assert (batch.query_lens_host, batch.seq_lens_host) == ((3, 1, 2), (9, 4, 10))
    assert (batch.num_tokens, batch.num_requests, batch.max_query_len, batch.max_seq_len) == (8, 3, 3, 10)
    assert (batch.mask, batch.page_size, batch.num_pages) == ("causal", 4, 10)


def test_dtypes_are_those_of_the_contract():
    batch = build()
    wide = {f.name for f in dataclasses.fields(batch) if getattr(getattr(batch, f.name), "dtype", None) == torch.int64}
    narrow = {
        f.name for f in dataclasses.fields(batch) if getattr(getattr(batch, f.name), "dtype", None) == torch.int32
    }
    assert wide == {"slot_mapping", "positions"}
    assert narrow == {"query_start_loc", "seq_lens", "block_table", "row_kv_lens"}


def test_a_batch_is_frozen_and_compares_by_identity():
    batch = build()
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.mask = "full"
    assert batch != build()


def test_full_mask_lets_every_row_see_all_keys():
    assert build(mask="full").row_kv_lens.tolist() == [9, 9, 9, 4, 10, 10]


def test_M1_rows_of_a_verification_see_seq_len_minus_query_len_plus_i_plus_1_keys():
    batch = AttentionBatch.bottom_right([3, 3], [5, 9], [[0, 1], [2, 3]], page_size=5, num_pages=4)
    assert batch.row_kv_lens.tolist() == [3, 4, 5, 7, 8, 9]


def test_a_request_without_keys_is_padding():
    batch = AttentionBatch.bottom_right([2, 1], [0, 3], [[], [4]], page_size=4, num_pages=5)
    assert batch.row_kv_lens.tolist() == [0, 0, 3]
    assert batch.slot_mapping.tolist() == [-1, -1, 4 * 4 + 2]


def test_a_request_without_new_tokens_has_no_rows():
    batch = AttentionBatch.bottom_right([0, 1], [7, 3], [[1, 2], [4]], page_size=4, num_pages=5)
    assert batch.query_start_loc.tolist() == [0, 0, 1]
    assert batch.row_kv_lens.tolist() == [3]


@pytest.mark.parametrize("table", [[], torch.zeros(0, 0, dtype=torch.int32), torch.zeros(0, 7, dtype=torch.int64)])
def test_empty_batch(table):
    batch = AttentionBatch.bottom_right([], [], table, page_size=4, num_pages=0, pad_tokens=3)
    assert batch.query_start_loc.tolist() == [0]
    assert (batch.num_tokens, batch.num_requests, batch.max_query_len, batch.max_seq_len) == (3, 0, 0, 0)
    assert batch.row_kv_lens.tolist() == [0, 0, 0]
    assert batch.slot_mapping.tolist() == [-1, -1, -1]
    assert AttentionBatch.bottom_right([], [], table, page_size=4, num_pages=0).num_tokens == 0


@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        np.array,
        lambda x: np.array(x, dtype=np.uint16),
        lambda x: [np.int64(i) for i in x],
        lambda x: torch.tensor(x, dtype=torch.int64),
        lambda x: torch.tensor(x, dtype=torch.int16),
    ],
)
def test_T8_lengths_of_any_integer_kind_are_taken(convert):
    batch = build(query_lens=convert([3, 1, 2]), seq_lens=convert([9, 4, 10]))
    assert batch.row_kv_lens.tolist() == [7, 8, 9, 4, 9, 10]
    assert {type(n) for n in batch.query_lens_host + batch.seq_lens_host} == {int}


@pytest.mark.parametrize("convert", [np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32), tuple])
def test_block_tables_of_any_integer_kind_are_taken(convert):
    assert build(block_table=convert(TABLE)).slot_mapping.tolist() == build().slot_mapping.tolist()


def test_absurd_page_ids_past_the_last_page_are_carried_as_int32():
    batch = build(block_table=[[5, 2, 9, 2**40], [7, -(2**40), 0, 0], [0, 8, 1, 3]])
    assert batch.block_table[0, 3] == 2**31 - 1
    assert batch.block_table[1, 1] == -(2**31)


def test_slots_may_be_given():
    batch = build(slots=[-1, 3, 39, -1, 0, 1], pad_tokens=1)
    assert batch.slot_mapping.tolist() == [-1, 3, 39, -1, 0, 1, -1]
    assert build(slots=torch.tensor([-1] * 6, dtype=torch.int32)).slot_mapping.dtype == torch.int64


def test_rows_of_a_rank_may_see_fewer_keys_than_they_are():
    # rank 1 of 2, interleave 1: of a request of 7 keys with 3 new tokens it holds keys 1, 3, 5
    batch = AttentionBatch.rows([3], [3], [[1]], [2, 3, 3], page_size=4, num_pages=2)
    assert (batch.mask, batch.row_kv_lens.tolist()) == ("rows", [2, 3, 3])
    small = AttentionBatch.rows([3, 1], [1, 0], [[1], []], [0, 0, 1, 0], page_size=4, num_pages=2)
    assert small.row_kv_lens.tolist() == [0, 0, 1, 0]
    assert small.slot_mapping.tolist() == [-1] * 4  # where its tokens belong is not known here


def test_select_takes_requests_in_the_given_order():
    batch = build(pad_tokens=2)
    part, rows = batch.select([2, 0])
    assert rows.tolist() == [4, 5, 0, 1, 2]
    assert part.query_start_loc.tolist() == [0, 2, 5]
    assert part.seq_lens.tolist() == [10, 9]
    assert part.block_table.tolist() == [TABLE[2], TABLE[0]]
    for name in ("slot_mapping", "positions", "row_kv_lens"):
        assert getattr(part, name).tolist() == getattr(batch, name)[rows].tolist()
    assert (part.query_lens_host, part.seq_lens_host) == ((2, 3), (10, 9))
    assert (part.mask, part.page_size, part.num_pages) == ("causal", 4, 10)
    assert (part.row_kv_lens.dtype, part.slot_mapping.dtype) == (torch.int32, torch.int64)


def test_select_of_nothing_is_an_empty_batch():
    part, rows = build().select([])
    assert (part.num_requests, part.num_tokens, rows.tolist()) == (0, 0, [])
    assert part.block_table.shape == (0, 3)


@pytest.mark.parametrize("requests", [[3], [-1], [0, 7]])
def test_select_refuses_requests_that_are_not_there(requests):
    with pytest.raises(ValueError, match=r"^requests: expected 0 \.\. 2"):
        build().select(requests)


# bad input: what is passed, the type of the error, the argument that it names

VALUE, TYPE = ValueError, TypeError
BAD = [
    ({"seq_lens": [9, 4]}, VALUE, "seq_lens: expected 3 entries"),
    ({"seq_lens": [9, 4, 1]}, VALUE, "seq_lens[2]: expected 0, or at least query_lens[2] = 2, got 1"),
    ({"query_lens": [3, -1, 2]}, VALUE, "query_lens[1]: expected an int >= 0, got -1"),
    ({"query_lens": [3, 1.0, 2]}, TYPE, "query_lens[1]: expected an int >= 0, got 1.0"),
    ({"query_lens": [3, True, 2]}, TYPE, "query_lens[1]: expected an int >= 0, got True"),
    ({"seq_lens": [9, 4, 2**31]}, VALUE, "seq_lens[2]: expected at most 2147483647, got 2147483648"),
    ({"seq_lens": torch.tensor([[9], [4], [10]])}, VALUE, "seq_lens: expected integers of shape (B,), got shape (3, 1"),
    ({"seq_lens": torch.tensor([9.0, 4, 10])}, TYPE, "seq_lens: expected integers of shape (B,), got torch.float32"),
    ({"query_lens": torch.tensor([True] * 3)}, TYPE, "query_lens: expected integers of shape (B,), got torch.bool"),
    ({"query_lens": np.array([[3, 1, 2]])}, VALUE, "query_lens: expected integers of shape (B,), got shape (1, 3)"),
    ({"block_table": TABLE[:2]}, VALUE, "block_table: expected 3 rows, one per request, got 2"),
    ({"block_table": [[5, 2], [7], [0, 8]]}, VALUE, "block_table[0]: expected at least 3 pages, got 2 for 9 keys"),
    ({"block_table": [[5, 2, 10], [7], [0, 8, 1]]}, VALUE, "block_table[0]: expected page ids 0 .. 9, got 10"),
    ({"block_table": [[5, 2, 9], [-1], [0, 8, 1]]}, VALUE, "block_table[1]: expected page ids 0 .. 9, got -1"),
    ({"block_table": [[5, 2.5, 9], [7], [0, 8, 1]]}, TYPE, "block_table: expected integers of shape (B, max_pages)"),
    ({"block_table": torch.tensor(TABLE).double()}, TYPE, "block_table: expected integers of shape (B, max_pages)"),
    ({"block_table": torch.ones(3, 3, dtype=torch.bool)}, TYPE, "block_table: expected integers"),
    ({"block_table": torch.tensor(TABLE)[:, :, None]}, VALUE, "block_table: expected integers of shape (B, max_pages)"),
    ({"block_table": [[5, 2, "9"], [7], [0, 8, 1]]}, TYPE, "block_table: expected rows of ints"),
    ({"block_table": [[5, 2, 9, 2**70], [7], [0, 8, 1]]}, TYPE, "block_table: expected rows of ints"),
    ({"mask": "rows"}, VALUE, "mask: expected 'causal' or 'full', got 'rows'"),
    ({"page_size": 0}, VALUE, "page_size: expected an int >= 1, got 0"),
    ({"page_size": 4.0}, TYPE, "page_size: expected an int >= 1, got 4.0"),
    ({"num_pages": None}, TYPE, "num_pages: expected an int >= 0, got None"),
    ({"pad_tokens": -1}, VALUE, "pad_tokens: expected an int >= 0, got -1"),
    ({"slots": [0, 1, 2, 3, 4]}, VALUE, "slots: expected (6,), one per new token, got (5,)"),
    ({"slots": [0, 1, 2, 3, 4, 40]}, VALUE, "slots: expected -1 .. 39, got 40"),
    ({"slots": torch.tensor([0, 1, 2, 3, 4, -2])}, VALUE, "slots: expected -1 .. 39, got -2"),
    ({"slots": [0, 1, 2, 3, 4, 2]}, VALUE, "slots: expected each slot at most once, got slot 2 more than once"),
    ({"slots": [0, 1, 2, 3, 4, 5.0]}, TYPE, "slots[5]: expected an int >= -1, got 5.0"),
    ({"slots": torch.ones(6)}, TYPE, "slots: expected integers of shape (T,), got torch.float32"),
    ({"slots": torch.zeros(6, 1).long()}, VALUE, "slots: expected integers of shape (T,), got shape (6, 1)"),
    ({"block_table": [[5, 2, 1], [7], [0, 8, 1]]}, VALUE, "slots: expected each slot at most once"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "text"), BAD, ids=[text[:60] for _, _, text in BAD])
def test_bad_input_is_named_with_what_was_expected_and_what_came(changes, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}.* Fix: "):
        build(**changes)


@pytest.mark.parametrize("changes", [BAD[1][0], BAD[11][0], BAD[26][0]])
def test_everything_is_validated_before_anything_is_uploaded(changes):
    # there is no such device, and the error is still that of the input
    with pytest.raises(ValueError, match=r"^(seq_lens|block_table|slots)"):
        build(device="cuda:99", **changes)


@pytest.mark.parametrize(
    ("row_kv_lens", "kind", "text"),
    [
        ([7, 8, 9, 4, 9], ValueError, "row_kv_lens: expected 6 entries, one per new token, got 5"),
        ([7, 8, 9, 5, 9, 10], ValueError, "row_kv_lens[3]: expected at most seq_lens[1] = 4, got 5"),
        ([7, 8, 9, -1, 9, 10], ValueError, "row_kv_lens[3]: expected an int >= 0, got -1"),
        (torch.tensor([7.0] * 6), TypeError, "row_kv_lens: expected integers of shape (T,)"),
    ],
)
def test_bad_row_bounds_are_named(row_kv_lens, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        AttentionBatch.rows(row_kv_lens=row_kv_lens, **STEP)


def test_a_mask_by_name_must_have_its_bounds():
    AttentionBatch.rows(row_kv_lens=[7, 8, 9, 4, 9, 10], mask="causal", **STEP)
    with pytest.raises(ValueError, match=r"^row_kv_lens: expected the bounds of mask 'causal'"):
        AttentionBatch.rows(row_kv_lens=[7, 8, 9, 3, 9, 10], mask="causal", **STEP)
    with pytest.raises(ValueError, match=r"^mask: expected one of"):
        AttentionBatch.rows(row_kv_lens=[7, 8, 9, 4, 9, 10], mask="casual", **STEP)


@pytest.mark.parametrize(
    ("text", "query_lens", "seq_lens"),
    [
        ("16q1s4k", [1] * 16, [4096] * 16),
        ("2q2k_32q1s1k", [2048] * 2 + [1] * 32, [2048] * 2 + [1024] * 32),
        ("q7", [7], [7]),
        ("q4s9_2q1s33", [4, 1, 1], [9, 33, 33]),
        ("3q0s16", [0, 0, 0], [16, 16, 16]),
    ],
)
def test_batch_grammar(text, query_lens, seq_lens):
    assert parse_batch(text) == (query_lens, seq_lens)


@pytest.mark.parametrize(
    "text", ["", "q", "16s4k", "16q1s4k_", "q4s3", "q1 s4", "0q1s4", "q1m", "q1.5s4", "q-1s4", "Q1S4"]
)
def test_batch_grammar_names_the_part_that_does_not_fit(text):
    with pytest.raises(ValueError, match=r"^batch: expected .* Fix: "):
        parse_batch(text)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"query_lens": None}, TypeError, "query_lens: expected ints of shape (B,), got None"),
        ({"query_lens": 3}, TypeError, "query_lens: expected ints of shape (B,), got 3"),
        ({"seq_lens": [[9], [4], [10]]}, TypeError, "seq_lens[0]: expected an int >= 0, got [9]"),
        ({"seq_lens": np.array(["9", "4", "10"])}, TypeError, "seq_lens: expected integers of shape (B,), got "),
        ({"row_kv_lens": None}, TypeError, "row_kv_lens: expected ints of shape (T,), got None"),
        ({"block_table": None}, TypeError, "block_table: expected a row of page ids for each request, got None"),
        ({"block_table": [1, 2, 3]}, TypeError, "block_table[0]: expected a row of page ids, got 1"),
        ({"block_table": "abc"}, TypeError, "block_table: expected a row of page ids for each request, got 'abc'"),
        ({"slots": 7}, TypeError, "slots: expected ints of shape (T,), got 7"),
        ({"slots": [2**70] * 6}, ValueError, "slots: expected -1 .. 39, got "),
        ({"device": "gpu"}, ValueError, "device: expected a device of this machine, got 'gpu'"),
        ({"device": 1.5}, TypeError, "device: expected a device of this machine, got 1.5"),
    ],
)
def test_arguments_of_another_kind_are_named(changes, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        AttentionBatch.rows(**{**STEP, "row_kv_lens": [7, 8, 9, 4, 9, 10], **changes})


@pytest.mark.parametrize("text", ["1048577q1", "q1_1048576q1", "q1s2147483648", "q2097152k", f"q{'9' * 5000}"])
def test_batch_grammar_has_bounds(text):
    with pytest.raises(ValueError, match=r"^batch: expected at most (1048576 requests|2147483647 tokens), got "):
        parse_batch(text)
    assert parse_batch("q2147483647") == ([2**31 - 1], [2**31 - 1])


def test_F1_a_block_table_of_other_strides_becomes_a_dense_one():
    table = torch.tensor([[3, 1, 0], [2, 0, 0]]).t().contiguous().t()
    batch = AttentionBatch.bottom_right([1, 1], [9, 3], table, page_size=4, num_pages=4)
    assert table.stride() == (1, 2)
    assert batch.block_table.is_contiguous()
    assert batch.block_table.tolist() == [[3, 1, 0], [2, 0, 0]]
