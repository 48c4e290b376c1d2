"""The pure half of the AITER adapter: which kernel, padded heads, row lists; nothing here calls into any AITER.

Which kernels exist is written twice, in the tier's tables and, by somebody else, in the simulator's; they must agree.
Axes: T new tokens (packed over requests), t rows of a call, N heads, M padded heads, D width.
"""

import dataclasses
import inspect
from itertools import product

import numpy as np
import pytest
import torch
from aiter_simulator import kernels
from simulated_aiter import SimulatedAiter
from small_case import make_batch, make_need

from mla.batch import AttentionBatch
from mla.cache import FloatRows, PagedLatentCache
from tiers.tier2_aiter import library as installed
from tiers.tier2_aiter.heads import HeadPadding
from tiers.tier2_aiter.library import (
    DECODE,
    FLASH,
    INFO,
    METADATA,
    PASSED,
    TRITON_DECODE,
    InstalledAiter,
    why_not_functions,
)
from tiers.tier2_aiter.pages import (
    SENTINEL,
    STAND_IN,
    Sequences,
    kernel_rows,
    padded_sequences,
    running_sums,
    sequences_of,
    slots_of_keys,
    token_rows,
)
from tiers.tier2_aiter.route import FP8, AiterUnsupported, Route, plan_route
from tiers.tier2_aiter.tier import AiterTier

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ARCHES = ("gfx942", "gfx950")
ROWS, CUS = 4096, 304


def route(arch, heads, query_lens, q=BF16, kv=BF16, lse=False, rows=ROWS, cus=CUS, **options) -> Route:
    return plan_route(arch, heads, query_lens, q, kv, lse, rows, cus, **options)


def refusal(*args, **options) -> str:
    with pytest.raises(AiterUnsupported) as caught:
        route(*args, **options)
    assert caught.value.reason == str(caught.value)
    return caught.value.reason


# which kernel


def pairs(arch: str) -> list[tuple[torch.dtype, torch.dtype]]:
    return [(BF16, BF16), (BF16, FP8[arch]), (FP8[arch], FP8[arch])]


@pytest.mark.parametrize(("arch", "lse"), list(product(ARCHES, (False, True))))
def test_I1_every_route_for_1_to_128_heads_has_a_kernel_that_exists(arch, lse):
    lengths = [(n,) * 3 for n in range(1, 11)] + [(1, 3), (4, 2)]
    for (q, kv), heads, lens in product(pairs(arch), range(1, 129), lengths):
        found = route(arch, heads, lens, q, kv, lse)
        query = "fp8" if found.quantise_query else kernels.kind(q)
        mode = {"persistent": "ps+lse" if lse else "ps", "splits": "nps"}[found.kernel]
        where = (arch, query, kernels.kind(kv), mode, found.heads, 1 if found.flatten else max(lens))
        assert kernels.lookup(*where) is not None, (found, where)
        assert heads <= found.heads <= 128
        assert found.query_len == (1 if found.flatten else lens[0] if len(set(lens)) == 1 else -1)


def test_I1_few_heads_are_padded_to_16_and_others_to_the_next_head_count_that_has_a_kernel():
    padded = {
        arch: [route(arch, n, (1,)).heads for n in (1, 2, 4, 8, 12, 16, 20, 24, 63, 64, 65, 128)] for arch in ARCHES
    }
    assert padded["gfx942"] == [16] * 6 + [32, 32, 64, 64, 80, 128]
    assert padded["gfx950"] == [16] * 6 + [24, 24, 64, 64, 80, 128]  # 24 has a kernel of its own there
    over_fp8 = [route("gfx950", n, (1,), BF16, FP8["gfx950"]).heads for n in (20, 24)]
    assert over_fp8 == [32, 32]


def test_I3_the_16_heads_of_v2_lite_have_a_route_for_every_short_query():
    for arch, n, lse in product(ARCHES, range(1, 9), (False, True)):
        assert route(arch, 16, (n, n), lse=lse).heads == 16


def test_I5_192_heads_are_refused_by_the_name_of_the_field():
    assert "N = 192 heads" in refusal("gfx942", 192, (1,))


@pytest.mark.parametrize("widths", [(576 + 8, 512), (512, 512), (288, 256)])
def test_I6_other_widths_are_refused_where_the_kernels_would_misread_them(widths):
    assert f"L + R = {widths[1]} + {widths[0] - widths[1]}" in refusal("gfx950", 16, (1,), widths=widths)


def test_K_M5_queries_of_2_to_4_tokens_are_one_call_and_never_planned_as_one_row():
    for arch, heads, n in product(ARCHES, (16, 32, 64, 128), (2, 3, 4)):
        assert route(arch, heads, (n, n, n)) == Route("persistent", heads, n)


def test_K_few_heads_are_flattened_to_single_rows():
    assert route("gfx950", 8, (4, 4)) == Route("persistent", 16, 1, flatten=True, zero=True)
    assert route("gfx942", 12, (2,)) == Route("persistent", 16, 1, flatten=True)
    assert not route("gfx942", 12, (1,)).flatten


def test_K_longer_queries_have_kernels_on_gfx950_alone_and_are_flattened_elsewhere():
    assert route("gfx950", 64, (8, 8)) == Route("persistent", 64, 8)
    assert route("gfx950", 64, (9,)).flatten
    assert route("gfx942", 64, (5,)).flatten
    assert route("gfx942", 16, (7, 7)).flatten  # exists over splits, and is wrong there (aiter #5679)
    assert route("gfx950", 64, (5, 5), BF16, FP8["gfx950"]).flatten  # aborts (aiter #4752)


def test_K_unequal_queries_are_one_call_only_where_the_planner_cuts_and_folds_nothing():
    assert route("gfx942", 16, (1, 4, 2)) == Route("persistent", 16, -1)
    assert route("gfx950", 16, (1, 4, 2)) == Route("persistent", 16, -1)
    assert route("gfx950", 16, (1, 5)).flatten  # 80 row-heads are cut into tiles of 64
    for arch, heads in product(ARCHES, (32, 64, 128)):
        assert route(arch, heads, (1, 2)).flatten


def test_lse_on_gfx942_comes_from_the_merge_of_at_least_two_splits():
    for heads, padded in ((1, 16), (16, 16), (17, 32), (33, 128), (64, 128), (128, 128)):
        for requests in (1, 7, 400):
            found = route("gfx942", heads, (1,) * requests, lse=True)
            assert (found.kernel, found.heads, found.zero) == ("splits", padded, True)
            assert 2 <= found.splits <= 16
    assert route("gfx942", 16, (3, 3), lse=True).flatten  # splits are addressed as single rows
    assert route("gfx950", 16, (3, 3), lse=True) == Route("persistent", 16, 3)


def test_fp8_routes():
    byte = FP8["gfx950"]
    assert route("gfx950", 128, (2, 2), byte, byte) == Route("persistent", 128, 2)
    assert route("gfx950", 64, (1,), byte, byte).granularity == 32
    assert route("gfx950", 16, (2, 2), byte, byte, lse=True).flatten  # no such kernel with the LSE
    assert route("gfx950", 16, (3, 3), byte, byte, lse=True).query_len == 3
    assert route("gfx950", 32, (1,), BF16, byte) == Route("persistent", 32, 1)
    with_lse = route("gfx950", 32, (1,), BF16, byte, lse=True)
    assert with_lse == Route("persistent", 32, 1, quantise_query=True)  # a bf16 query has no kernel with the LSE
    byte = FP8["gfx942"]
    assert route("gfx942", 20, (2,), BF16, byte, lse=True) == Route(
        "persistent", 64, 1, flatten=True, granularity=32, quantise_query=True
    )
    assert route("gfx942", 65, (1,), byte, byte, lse=True).kernel == "splits"


def test_fp8_is_the_type_of_the_architecture_and_no_other():
    assert "float8_e4m3fn over" in refusal("gfx942", 16, (1,), FP8["gfx950"], FP8["gfx950"])
    assert "float8_e4m3fnuz is the fp8 of gfx942" in refusal("gfx942", 16, (1,), FP8["gfx950"], FP8["gfx950"])
    refusal("gfx950", 16, (1,), FP8["gfx950"], BF16)


def test_fp8_prefill_has_a_route_on_gfx950_without_lse_and_context_alone():
    byte, widths = FP8["gfx950"], (192, 128)
    assert route("gfx950", 16, (300,), byte, byte, prefill=True, widths=widths) == Route("byte_prefill", 16, -1)
    refusal("gfx942", 16, (300,), FP8["gfx942"], FP8["gfx942"], prefill=True, widths=widths)
    assert "unwritten" in refusal("gfx950", 16, (300,), byte, byte, True, prefill=True, widths=widths)
    assert "unwritten" in refusal("gfx950", 16, (300,), byte, byte, prefill=True, widths=widths, context=True)
    for heads in kernels.REDUCE_HEADS[128]:
        route("gfx950", heads, (300,), byte, byte, prefill=True, widths=widths)
    refusal("gfx950", 12, (300,), byte, byte, prefill=True, widths=widths)
    refusal("gfx950", 16, (300,), byte, byte, prefill=True, widths=(128, 128))


def test_prefill_takes_unequal_widths_that_are_multiples_of_8_up_to_256():
    for widths in ((192, 128), (256, 256), (96, 64)):
        assert route("gfx942", 16, (), lse=True, prefill=True, widths=widths) == Route("flash", 16, -1)
    assert "P + R = 20 and V = 10" in refusal("gfx942", 3, (), prefill=True, widths=(20, 10))
    assert "320" in refusal("gfx942", 3, (), prefill=True, widths=(320, 256))
    assert "float32" in refusal("gfx942", 3, (), F32, F32, prefill=True, widths=(192, 128))


def test_float16_takes_the_triton_decode_and_float32_is_refused():
    assert route("gfx942", 20, (3, 1), F16, F16, lse=True) == Route("triton", 20, flatten=True)
    for q, kv in ((F32, F32), (BF16, F16), (F16, BF16), (F32, BF16)):
        reason = refusal("gfx942", 16, (1,), q, kv)
        assert str(q).removeprefix("torch.") in reason
        assert "bfloat16 for both" in reason


def test_G1_a_pool_that_32_bit_offsets_do_not_reach_is_refused():
    most = 2**32 // (576 * 2)  # not a divisor: the last row that ends below 4 GiB
    assert route("gfx942", 16, (1,), rows=most).kernel == "persistent"
    assert f"{most + 1:,} rows" in refusal("gfx942", 16, (1,), rows=most + 1)
    assert route("gfx942", 16, (1,), BF16, FP8["gfx942"], rows=most + 1).kernel == "persistent"  # half the bytes


def test_T3_an_unknown_architecture_is_refused_with_the_known_ones():
    for arch in ("cpu", "sm_90", "gfx1250", "gfx90a"):
        reason = refusal(arch, 16, (1,))
        assert repr(arch) in reason
        assert "gfx942 or gfx950" in reason


def test_output_is_zeroed_exactly_where_no_work_plan_says_who_writes_it():
    assert route("gfx950", 16, (1,) * 40).zero  # aiter takes its kernel over splits there by itself
    assert not route("gfx942", 16, (1,) * 40).zero
    assert not route("gfx950", 32, (1,) * 40).zero


# heads


@pytest.mark.parametrize(
    ("heads", "padded"), [(1, 16), (2, 16), (4, 16), (8, 16), (8, 64), (12, 16), (20, 24), (33, 128)]
)
def test_I1_padding_repeats_real_heads_and_gives_them_back_in_order(heads, padded):
    padding = HeadPadding(heads, padded)
    real = torch.randn(3, heads, 5)
    wide = torch.full((3, padded, 5), float("nan"))
    padding.real(wide).copy_(real)
    padding.fill(wide)
    repeated = heads < 16 and 16 % heads == 0
    copies = padded // heads if repeated else -(-padded // heads)
    expected = real.repeat_interleave(copies, 1) if repeated else real.repeat(1, copies, 1)[:, :padded]
    assert torch.equal(wide, expected)
    assert torch.equal(padding.real(wide), real)
    assert torch.equal(padding.real(wide[..., 0]), real[..., 0])


def test_I1_more_heads_than_the_padded_ones_are_refused():
    with pytest.raises(ValueError, match="heads"):
        HeadPadding(17, 16)


# rows


def a_batch(query_lens, seq_lens, page_size=4, **options) -> AttentionBatch:
    return make_batch(query_lens, seq_lens, make_need(page_size=page_size), **options)


def test_K_M1_rows_of_a_request_see_their_own_number_of_keys():
    single = sequences_of(a_batch([3, 3], [5, 9]), [0, 1]).single_rows(causal=True)
    assert single.kv_lens.tolist() == [3, 4, 5, 7, 8, 9]
    assert single.owners.tolist() == [0, 0, 0, 1, 1, 1]
    assert sequences_of(a_batch([3, 3], [5, 9]), [0, 1]).single_rows(causal=False).kv_lens.tolist() == [5] * 3 + [9] * 3


def test_C1_requests_without_rows_or_keys_are_in_no_call():
    found = sequences_of(a_batch([1, 1, 0, 2], [5, 0, 7, 9]), [0, 1, 2, 3])
    assert (found.owners.tolist(), found.rows.tolist(), found.kv_lens.tolist()) == ([0, 3], [0, 2, 3], [5, 9])
    assert sequences_of(a_batch([1, 1], [0, 0]), [0, 1]).tokens == 0


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 32, 64, 128])
def test_H6_pages_of_any_size_become_the_slots_of_their_keys(page_size):
    batch = a_batch([1, 1, 1], [page_size + 1, 1, 2 * page_size], page_size)
    lists = running_sums(sequences_of(batch, [2, 0, 1]))
    owners, n = torch.tensor([2, 0, 1]), int(lists[1][-1])
    found = slots_of_keys(batch.block_table, owners, torch.from_numpy(lists[1]), n, page_size)
    expected = [
        int(batch.block_table[b, j // page_size]) * page_size + j % page_size
        for b in (2, 0, 1)
        for j in range(batch.seq_lens_host[b])
    ]
    assert found.dtype == torch.int32
    assert found.tolist() == expected


def test_H4_the_list_of_keys_has_as_many_entries_as_there_are_keys():
    batch = a_batch([1, 1, 1, 1], [33, 1, 16, 5], 16)
    sums = running_sums(sequences_of(batch, [0, 1, 2, 3]))
    assert [x.tolist() for x in sums] == [[0, 1, 2, 3, 4], [0, 33, 34, 50, 55]]
    assert all(x.dtype == np.int32 for x in sums)


def test_more_keys_than_int32_counts_are_refused_before_anything_is_made():
    many = np.full(3, 2**30)
    with pytest.raises(ValueError, match="fewer than 2\\^31 keys"):
        running_sums(Sequences(np.arange(3), np.ones(3, np.int64), many, np.arange(3)))


def placed(cache: PagedLatentCache, slots: list[int]) -> torch.Tensor:
    """What AITER would read at some slots."""
    view, rows = kernel_rows(cache, torch.tensor(slots, dtype=torch.int32))
    assert view.is_contiguous()
    assert view.shape[1:] == (1, 1, 6)
    assert rows.dtype == torch.int32
    return view[rows.long(), 0, 0]


def wrapped(kind: str, page: int) -> PagedLatentCache:
    whole = torch.randn({"plain": (5, page, 6), "layers": (5, 3, page, 6), "strided": (5, page, 10)}[kind])
    data = {"plain": whole, "layers": whole[:, 1] if kind == "layers" else whole, "strided": whole[..., :6]}[kind]
    return PagedLatentCache.wrap(data, FloatRows(4, 2, torch.float32))


@pytest.mark.parametrize(("kind", "page"), list(product(("plain", "layers", "strided"), (1, 4))))
def test_F4_a_cache_of_any_strides_is_read_at_its_own_rows(kind, page):
    cache = wrapped(kind, page)
    slots = [0, 5 * page - 1, page, page + page // 2]
    expected = torch.stack([cache.data[s // page, s % page] for s in slots])
    assert torch.equal(placed(cache, slots), expected)
    rows, factor = token_rows(cache)
    flat = torch.stack([rows[s // page * factor * page + s % page, 0] for s in slots])
    assert torch.equal(flat, expected)
    if kind != "strided":
        assert kernel_rows(cache, torch.tensor(slots, dtype=torch.int32))[0].data_ptr() == cache.data.data_ptr()
    assert rows.data_ptr() == cache.data.data_ptr()


@pytest.mark.parametrize("kind", ["plain", "layers", "strided"])
def test_the_sentinel_of_unused_entries_stays_whatever_the_strides(kind):
    slots = torch.tensor([3, SENTINEL, SENTINEL], dtype=torch.int32)
    assert kernel_rows(wrapped(kind, 4), slots)[1][1:].tolist() == [SENTINEL, SENTINEL]


# padding of captured steps: every way out


def test_M_padding_to_single_rows_takes_any_batch():
    found = padded_sequences(a_batch([2, 1, 0, 1], [5, 0, 3, 7], pad_tokens=3), 1)
    assert isinstance(found, Sequences)
    assert found.owners.tolist() == [0, 0, STAND_IN, 3, STAND_IN, STAND_IN, STAND_IN]
    assert found.kv_lens.tolist() == [4, 5, 1, 7, 1, 1, 1]


def test_M7_padding_to_uniform_queries_adds_stand_ins_as_long_as_the_others():
    found = padded_sequences(a_batch([3, 3, 3], [5, 0, 9], pad_tokens=3), 3)
    assert isinstance(found, Sequences)
    assert found.owners.tolist() == [0, STAND_IN, 2, STAND_IN]
    assert found.kv_lens.tolist() == [5, 3, 9, 3]
    assert found.query_lens.tolist() == [3] * 4


def test_M_padding_ends_early_without_any_row():
    for n in (1, 3):
        found = padded_sequences(a_batch([], []), n)
        assert isinstance(found, Sequences)
        assert found.tokens == 0


def test_M_padding_says_why_rows_are_no_multiple_of_the_captured_length():
    assert "10 rows are not a multiple of 3" in padded_sequences(a_batch([3, 3], [5, 9], pad_tokens=4), 3)


def test_M_padding_says_why_queries_of_other_lengths_do_not_fit():
    assert "query_lens [1, 3] are not all 3" in padded_sequences(a_batch([3, 1, 1], [5, 9, 9], pad_tokens=1), 3)
    assert "query_lens [2] are not all 4" in padded_sequences(a_batch([2, 2], [5, 9]), 4)


def test_M_padding_of_requests_without_rows_takes_no_place():
    found = padded_sequences(a_batch([0, 2, 0], [4, 5, 0], pad_tokens=2), 2)
    assert found.owners.tolist() == [1, STAND_IN]


def test_M_keys_of_stand_ins_are_slot_0_whatever_the_table_holds():
    batch = a_batch([2, 2], [0, 3], 1)
    found = padded_sequences(batch, 2)
    sums = torch.from_numpy(running_sums(found)[1])
    slots = slots_of_keys(batch.block_table, torch.from_numpy(found.owners), sums, found.keys, 1)
    assert slots.tolist() == [0, 0, *batch.block_table[1, :3].tolist()]
    narrow = torch.tensor([[7]], dtype=torch.int32)  # a stand-in has more keys than the table has columns
    assert slots_of_keys(narrow, torch.tensor([STAND_IN]), torch.tensor([0, 3]), 3, 1).tolist() == [0, 0, 0]
    nobody = slots_of_keys(torch.zeros(0, 0, dtype=torch.int32), torch.tensor([STAND_IN]), torch.tensor([0, 2]), 2, 1)
    assert nobody.tolist() == [0, 0]


# where AITER is


@dataclasses.dataclass(frozen=True)
class Moved(SimulatedAiter):
    """A build whose function of some name is missing, lost a keyword, or asks for one more."""

    name_of: str = ""
    change: str = ""

    def find(self, name, need):
        function = super().find(name, need)
        if name != self.name_of:
            return function
        if self.change == "raise":
            raise RuntimeError("no GPU")
        if self.change == "missing":
            return None
        passed = [p for p in PASSED[name] if p != self.change] + ["new_one"] * (self.change == "asks")
        others = [f"{p}=None" for p in inspect.signature(function).parameters if p not in PASSED[name]]
        names = passed + others
        scope: dict = {}
        exec(f"def moved({', '.join(names)}): raise AssertionError", scope)
        return scope["moved"]


def v3_need(**fields):
    sizes = {"N": 16, "L": 512, "P": 128, "R": 64, "V": 128, "softmax_scale": 0.1, "dtype": BF16}
    return make_need(**(sizes | fields))


@pytest.mark.parametrize(
    ("arch", "name"), [("gfx950", n) for n in (DECODE, INFO, METADATA, FLASH)] + [("gfx942", DECODE)]
)
def test_T7_a_moved_signature_is_a_sentence_and_never_a_type_error(arch, name):
    need = v3_need()
    for change in (*PASSED[name], "missing", "raise", "asks"):
        reasons = AiterTier(library=Moved(arch, name_of=name, change=change)).why_not(need)
        assert len(reasons) == 1, change
        assert name in reasons[0]
        assert "e4048607" in reasons[0]
        others = {"missing": "has no", "raise": "RuntimeError: no GPU", "asks": "asks also for new_one;"}
        told = others.get(change, f"does not take {change}")
        assert told in reasons[0]
    assert AiterTier(library=SimulatedAiter(arch)).why_not(need) == []


def test_T7_float16_needs_a_build_with_the_triton_decode():
    need = v3_need(dtype=F16)
    reasons = AiterTier(library=Moved("gfx942", name_of=TRITON_DECODE, change="missing")).why_not(need)
    assert [TRITON_DECODE in r for r in reasons] == [True]
    assert AiterTier().library.why_not(need)


def test_T7_a_function_that_takes_any_keyword_is_believed():
    class Any(SimulatedAiter):
        def find(self, name, need):
            return lambda **anything: None

    assert why_not_functions(Any(), v3_need(), tuple(PASSED)) == []


def test_T5_the_installed_tier_says_on_this_machine_what_it_needs_and_imports_nothing(monkeypatch):
    if torch.version.hip is not None:
        pytest.skip("this PyTorch is a ROCm build: the refusals of other machines are not to be seen here")
    monkeypatch.setattr(installed, "import_module", lambda name: pytest.fail(f"imported {name}"))
    reasons = AiterTier().why_not(v3_need())
    text = " ".join(reasons)
    assert "ROCm build" in text
    assert "device 'cpu'" in text
    assert "gfx942 or gfx950" in text
    assert all(r.endswith(".") for r in reasons)


def test_T6_an_old_package_is_named_with_the_needed_version(monkeypatch):
    monkeypatch.setattr("mla.need.version", lambda name: "0.1.4")
    assert any("amd-aiter 0.1.4 is too old" in r and "0.1.7" in r for r in InstalledAiter().why_not(v3_need()))


def test_T_switches_of_other_kernels_are_refused(monkeypatch):
    monkeypatch.setenv("AITER_MLA_USE_OPUS", "1")
    assert any("AITER_MLA_USE_OPUS = 1" in r for r in InstalledAiter().why_not(v3_need()))
    monkeypatch.setenv("AITER_MLA_USE_OPUS", "0")
    assert not any("OPUS" in r for r in InstalledAiter().why_not(v3_need()))


def test_the_installed_library_has_the_real_widths_and_window():
    library = InstalledAiter()
    assert (library.widths(v3_need()), library.window) == ((512, 64), 2**32)
    assert library.arch(v3_need(arch="gfx942")) == "gfx942"
