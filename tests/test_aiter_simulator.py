"""The AITER simulator's decode against plain attention in float64: every kernel of the table, every CU count."""

import math
from itertools import cycle

import pytest
import torch
from aiter_simulator import AiterAbort, fake_aiter, kernels
from aiter_simulator.attention import attend, merge
from aiter_simulator.checks import fresh
from aiter_simulator.example import Step, offsets, toy
from aiter_simulator.planner import fold_ratio

CUS = (1, 2, 8, 80, 256, 304)
LENS = [61, 7, 33]


def entries(mode: str) -> list[tuple[str, str, str, int, int]]:
    """Every (arch, q, kv, heads, qlen <= 4) that the table has in a mode."""
    found = []
    for (arch, q, kv, its_mode), table in kernels.TABLE.items():
        for heads, qlens in [*table.native.items(), *table.fold.items()]:
            found += [(arch, q, kv, heads, n) for n in qlens if n <= 4 and its_mode == mode]
    return found


def check(step: Step, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Compare with attention, within what rounding allows."""
    expected, expected_lse = step.expected()
    bound, lse_bound = step.allowed((expected, expected_lse))
    assert ((out.double() - expected).abs() <= bound).all()
    if lse is not None:
        assert lse.dtype == torch.float32
        assert lse.shape == expected_lse.shape
        assert ((lse.double() - expected_lse).abs() <= lse_bound + 2**-24 * expected_lse.abs()).all()


@pytest.mark.parametrize("mode", ["ps", "ps+lse"])
def test_every_persistent_kernel_is_attention(mode: str) -> None:
    for (arch, q, kv, heads, qlen), cu in zip(entries(mode), cycle(CUS), strict=False):
        library = toy(arch, cu)
        step = Step(library, heads, [qlen] * 2, LENS[:2], q, kv).plan()
        out, lse = step.run(return_lse=mode == "ps+lse")
        assert (lse is not None) == (mode == "ps+lse")
        check(step, out, lse)
        path = kernels.lookup(arch, q, kv, mode, heads, qlen)
        assert library.machine.calls == [f"decode {mode} {path}"]


def test_every_split_kernel_is_attention() -> None:
    """Without work lists; not the kernels that compute something else: H 64, three rows."""
    for arch, q, kv, heads, qlen in entries("nps"):
        if (heads == 64 and q == "bf16") or qlen == 3:
            continue
        for splits in (2, 5):
            step = Step(toy(arch), heads, [qlen] * 3, LENS, q, kv)
            check(step, *step.run(return_lse=True, num_kv_splits=splits))


@pytest.mark.parametrize("cu", CUS)
def test_every_cu_count_at_full_width(cu: int) -> None:
    """700 keys are cut into as many pieces as the CUs ask for."""
    step = Step(fake_aiter("gfx950", cu), 16, [2, 2], [700, 90], scale=0.05).plan()
    check(step, *step.run(return_lse=True))
    assert (step.buffers["reduce_indptr"][-1] > 0) == (cu > 1)


@pytest.mark.parametrize(("heads", "qlens"), [(16, [1, 4, 2]), (16, [3, 1, 8]), (32, [4, 1, 2]), (64, [1, 2, 1])])
def test_ragged_query_lengths_that_fit_one_tile(heads: int, qlens: list[int]) -> None:
    step = Step(toy("gfx950", 80), heads, qlens, LENS).plan()
    check(step, *step.run(return_lse=True))


def test_table_and_fold_rule_agree() -> None:
    """What the table calls folded is what planner and wrapper fold, and the other way round."""
    for mode in ("ps", "ps+lse"):
        for arch, q, kv, heads, qlen in entries(mode):
            path = kernels.lookup(arch, q, kv, mode, heads, qlen)
            assert (path == "native") == kernels.is_native(arch, q, kv, heads, qlen)
            assert fold_ratio(arch, q, kv, heads, qlen) == (heads // 16 if path == "fold" else 1)


def test_fold_points_o_at_new_storage() -> None:
    """With several rows per request the caller's tensor moves, and a parent buffer never gets the result."""
    step = Step(toy("gfx942"), 32, [2, 2, 2], LENS).plan()
    before = step.call["o"].data_ptr()
    out, _ = step.run()
    assert out.data_ptr() != before
    check(step, out, None)
    parent = fresh((8, 32, 32), torch.bfloat16)
    view, _ = step.run(o=parent[:6])
    check(step, view, None)
    assert parent.isnan().all()


def test_fold_of_one_row_writes_in_place() -> None:
    step = Step(toy("gfx942"), 32, [1, 1, 1], LENS).plan()
    parent = fresh((5, 32, 32), torch.bfloat16)
    step.run(o=parent[:3])
    check(step, parent[:3], None)
    assert parent[3:].isnan().all()


def test_large_batches_of_16_heads_leave_the_persistent_path() -> None:
    lens = [9 + b % 5 for b in range(32)]
    for batch, path in ((31, "decode ps+lse native"), (32, "decode nps 1")):
        step = Step(toy("gfx950"), 16, [1] * batch, lens[:batch]).plan()
        check(step, *step.run(return_lse=True))
        assert step.library.machine.calls == [path]
    step = Step(toy("gfx950", persistent_max_batch=0), 16, [1] * 32, lens).plan()
    check(step, *step.run(return_lse=True))
    step.run(num_kv_splits=64, return_lse=True)
    assert step.library.machine.calls == ["decode ps+lse native"] * 2


@pytest.mark.parametrize(
    ("arch", "q", "heads", "qlen", "written"),
    [
        ("gfx942", "bf16", 16, 1, True),
        ("gfx942", "bf16", 128, 2, True),
        ("gfx942", "bf16", 16, 4, False),
        ("gfx942", "bf16", 32, 1, False),
        ("gfx942", "bf16", 8, 1, False),
        ("gfx942", "fp8", 16, 1, False),
        ("gfx950", "fp8", 128, 2, False),
    ],
)
def test_lse_of_a_single_split_may_be_unwritten(arch: str, q: str, heads: int, qlen: int, written: bool) -> None:
    step = Step(toy(arch), heads, [qlen] * 3, LENS, q, q)
    out, lse = step.run(return_lse=True, num_kv_splits=1)
    check(step, out, lse if written else None)
    assert written or lse.isnan().all()
    check(step, *step.run(return_lse=True, num_kv_splits=2))


def test_split_partials_beyond_the_valid_ones_are_unwritten() -> None:
    step = Step(toy("gfx942"), 16, [2], [40])
    partial, _ = step.library.mla.mla_decode_fwd(**step.call, num_kv_splits=5)
    assert partial.isnan().all(dim=(0, 2, 3)).tolist() == [False, False, False, True, True]


def test_split_decode_with_counts_per_request() -> None:
    step = Step(toy("gfx942"), 16, [1, 1], [90, 130])
    partial, lse = step.library.mla.mla_decode_fwd(
        **step.call, num_kv_splits=3, num_kv_splits_indptr=offsets([1, 2]), return_lse=True
    )
    check(step, step.call["o"], lse)
    assert partial.isnan().flatten(2).all(2).tolist() == [[False, True, True], [False, False, True]]


def test_split_decode_repeats_the_first_of_three_rows() -> None:
    """aiter #2720."""
    step = Step(toy("gfx942"), 16, [3], [40])
    out, _ = step.run(num_kv_splits=2)
    assert torch.equal(out[0], out[2])
    assert not torch.equal(out[0].double().round(decimals=1), step.expected()[0][2].round(decimals=1))


def test_split_decode_of_five_rows_is_garbage_on_gfx942() -> None:
    """aiter #5679."""
    assert Step(toy("gfx942"), 16, [5], [40]).run(num_kv_splits=2)[0].isnan().all()


def test_empty_request_and_hidden_rows_are_nan() -> None:
    step = Step(toy("gfx942"), 16, [2, 2, 2], [5, 0, 1]).plan()
    out, _ = step.run()
    assert out.isnan().all(-1).all(-1).tolist() == [False, False, True, True, True, False]


def test_rows_behind_the_window_are_garbage() -> None:
    step = Step(toy("gfx942", window=30 * 40 * 2), 16, [1, 1], [12, 13]).plan()
    step.call["kv_indices"].copy_(torch.arange(25))
    step.call["kv_buffer"] = torch.randn(31, 1, 1, 40).to(torch.bfloat16)
    check(step, step.run()[0], None)
    step.call["kv_indices"][7] = 29
    check(step, step.run()[0], None)
    step.call["kv_indices"][7] = 30
    assert step.run()[0].isnan().flatten(1).all(1).tolist() == [True, False]


def test_default_scale_is_that_of_the_cache_width() -> None:
    step = Step(toy("gfx942"), 16, [1], [9], scale=40**-0.5).plan()
    check(step, step.run(sm_scale=None)[0], None)


def test_fp8_probabilities_are_rounded_and_their_sum_is_not() -> None:
    """exp(-1.2) = 0.3012 is 0.3125 in e4m3; the denominator stays 1.3012."""
    q, k = torch.ones(1, 1, 1), torch.tensor([[[0.0]], [[-1.2]]])
    v = torch.tensor([[[0.0]], [[1.0]]])
    out, _ = attend(q, k, v, 1.0, p_dtype=torch.float8_e4m3fn)
    assert out.item() == pytest.approx(0.3125 / (1 + 2.718281828459045**-1.2), abs=2**-24)


def test_an_fp8_query_rounds_its_probabilities_in_the_kernel() -> None:
    """One unsplit tile: further from attention than bf16 alone would be."""
    step = Step(toy("gfx942", 1), 16, [1], [61], "fp8", "fp8").plan()
    out, expected = step.run()[0], step.expected()[0]
    assert ((out - expected).abs() > 2**-8 * expected.abs() + 2**-16).any()


def test_reduce_leaves_groups_of_one_partial_alone_and_writes_plus_inf_for_nothing() -> None:
    library = fake_aiter()
    partial, lse = torch.ones(4, 8, 512), torch.zeros(4, 8)
    lse[2:] = float("-inf")
    out, out_lse = fresh((3, 8, 512), torch.bfloat16), fresh((3, 8))
    rows = torch.tensor([[0, 1], [1, 2], [2, 3]], dtype=torch.int32)
    indptr = torch.tensor([0, 1, 3, 5], dtype=torch.int32)
    maps = torch.tensor([0, 0, 1, 2, 3], dtype=torch.int32)
    library.mla_reduce_v1(partial, lse, indptr, rows, maps, 1, 0, out, out_lse)
    assert out[0].isnan().all()
    assert out_lse[0].isnan().all()
    assert (out[1] == 1).all()
    assert ((out_lse[1].double() - math.log(2)).abs() <= 2**-24).all()
    assert (out_lse[2] == float("inf")).all()


def test_reduce_refuses() -> None:
    out, partial, lse = torch.zeros(1, 8, 512).to(torch.bfloat16), torch.ones(2, 8, 512), torch.zeros(2, 8)
    indptr, rows, maps = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [[0, 1]], [0, 1]))
    reduce = fake_aiter().mla_reduce_v1
    reduce(partial, lse, indptr, rows, maps, 1, 2, out)
    assert (out == 1).all()
    wrong = [
        (RuntimeError, "no case for 7", (partial[:, :7], lse[:, :7], indptr, rows, maps, 1, 0, out[:, :7])),
        (RuntimeError, "no case for 8 x 96", (partial, lse, indptr, rows, maps, 1, 0, out[..., :96])),
        (RuntimeError, "partial_output must be", (partial.double(), lse, indptr, rows, maps, 1, 0, out)),
        (RuntimeError, "partial_lse must be", (partial, lse.T.contiguous().T, indptr, rows, maps, 1, 0, out)),
        (AiterAbort, "room for 1", (partial, lse, indptr, rows, maps, 1, 1, out)),
        (NotImplementedError, "final_map", (partial, lse, indptr, None, maps, 1, 0, out)),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            reduce(*call)


def test_default_split_count_of_bf16_needs_no_table() -> None:
    """128 heads times 8 rows is no entry of the table that 8-bit queries are looked up in."""
    step = Step(toy("gfx942"), 128, [8, 8], [300, 9])
    check(step, step.run()[0], None)


def test_merge_ignores_what_an_empty_partial_holds() -> None:
    outs = torch.tensor([[[[2.0]]], [[[float("nan")]]]])
    lses = torch.tensor([[[1.0]], [[float("-inf")]]])
    out, lse = merge(outs, lses)
    assert (out.item(), lse.item()) == (2.0, 1.0)


def test_nothing_runs_before_an_abort() -> None:
    step = Step(toy("gfx942"), 16, [1], [9])
    with pytest.raises(AiterAbort):
        step.run(qo_indptr=offsets([2]))
    assert step.call["o"].isnan().all()
    assert step.library.machine.calls == []
