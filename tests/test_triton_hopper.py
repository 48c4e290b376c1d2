"""The Hopper kernels' work on the CPU: who shares which keys, which rows make a unit, and what is refused.

The decode kernels themselves are Gluon, which has no interpreter: `test_triton_aot` compiles them, a GPU runs them.
Axes: T tokens, N heads, U units, p parts.
"""

import dataclasses
import itertools

import pytest
import torch
from small_case import make_need
from triton_here import DEVICE, require_triton

require_triton()

import triton  # noqa: E402

import tiers  # noqa: E402
from mla.batch import AttentionBatch  # noqa: E402
from mla.cache import FloatRows  # noqa: E402
from mla.need import Need  # noqa: E402
from tiers.tier2_triton import hopper_rounds, warmup  # noqa: E402
from tiers.tier2_triton.absorbed import plan_absorbed  # noqa: E402
from tiers.tier2_triton.hopper import combine as combine_module  # noqa: E402
from tiers.tier2_triton.hopper.combine import combine_reference  # noqa: E402
from tiers.tier2_triton.hopper.combine import problem as combine_problem  # noqa: E402
from tiers.tier2_triton.hopper.decode import as_rows, decode, pool, rows_ahead  # noqa: E402
from tiers.tier2_triton.hopper.schedule import COST, FAR, PIECE, problem, schedule, schedule_reference  # noqa: E402
from tiers.tier2_triton.hopper_rounds import plan_hopper, rows_of_a_unit, why_not_hopper  # noqa: E402
from tiers.tier2_triton.schedule import Piece  # noqa: E402

SIZES = {"N": 16, "L": 512, "P": 12, "R": 64, "V": 10, "page_size": 64, "dtype": torch.bfloat16}


def on_hopper(**fields) -> Need:
    """A Need of an H200, planned on this machine."""
    need = make_need(**(SIZES | {"device": DEVICE} | fields))
    object.__setattr__(need, "arch", "sm_90")
    return need


def filled(size: str, parts: int | None, kernel) -> dict:
    """The lists that a schedule writes for a problem, over so many parts."""
    given = problem(size, torch.bfloat16, DEVICE).arguments
    if parts is not None:
        given["part"] = torch.zeros(parts, 16, dtype=torch.int32, device=DEVICE)
    kernel(**given)
    return {name: x.cpu() for name, x in given.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("parts", [None, 1, 3, 33, 66, 132])
@pytest.mark.parametrize("size", ["toy", "real"])
def test_the_kernel_shares_out_as_its_reference_does(size, parts):
    found, expected = filled(size, parts, schedule), filled(size, parts, schedule_reference)
    n = int((expected["work"][:, 3] > 0).sum())
    assert torch.equal(found["work"][: n + 1, :9], expected["work"][: n + 1, :9])
    assert torch.equal(found["merges"], expected["merges"])
    assert torch.equal(found["part"][:, 9:11], expected["part"][:, 9:11])
    busy = expected["part"][:, 10] > 0
    assert torch.equal(found["part"][busy], expected["part"][busy])


@pytest.mark.parametrize("parts", [1, 3, 9, 33, 66, 132])
def test_every_block_is_somebodys_once_and_loads_are_alike(parts):
    found = filled("toy", parts, schedule)
    work, part, merges = (found[name].tolist() for name in ("work", "part", "merges"))
    seen, loads = {}, []
    for p, entry in enumerate(part):
        which, count, first, last, stretch = entry[9:14]
        loads.append(0)
        for k in range(count):
            blocks, start = work[which + k][3:5]
            at = stretch - start
            a, b = (first, last) if k == 0 else (0, blocks if at >= blocks else max(at, 0) // 2 * 2)
            assert 0 <= a < b <= blocks
            assert a % 2 == 0
            loads[-1] += b - a + COST
            for block in range(a, b):
                assert (which + k, block) not in seen
                seen[which + k, block] = p, a > 0
    keyed = list(itertools.takewhile(lambda entry: entry[3], work))
    spans = {row: (first, last) for row, rows, first, last in merges if rows}
    for i, (_, row, _, blocks, *_) in enumerate(keyed):
        owners = [seen[i, block] for block in range(blocks)]
        first, last = spans.pop(row, (owners[0][0], owners[0][0]))
        assert sorted({p for p, _ in owners}) == list(range(first, last + 1))
        assert all(later == (p != first) for p, later in owners)  # slots 2 p + 1 and 2 p
    assert set(spans.values()) == {(0, -1)}, "a unit that is listed is cut, or has rows and no keys"
    longest, total = max(entry[3] for entry in keyed), sum(entry[3] for entry in keyed)
    assert len(seen) == total
    assert max(loads) <= max(sum(loads) / parts + 2 * COST + max(2, PIECE), min(longest + COST, sum(loads)))


@pytest.mark.parametrize("page_size", [16, 32])
def test_pages_of_less_than_a_block_are_left_to_the_kernels(page_size):
    lists = []
    for kernel in (schedule, schedule_reference):
        given = problem("toy", torch.bfloat16, DEVICE).arguments | {"page_size": page_size}
        kernel(**given)
        lists.append([given[name].cpu() for name in ("work", "part")])
    for found, expected in zip(*lists, strict=True):
        assert torch.equal(found[:, 7:9], expected[:, 7:9])
        assert bool((found[:, 7:9] == 0).all())


def test_equal_requests_are_cut_alike_and_not_at_all_where_all_parts_have_one():
    assert filled("real", 66, schedule)["part"][0, 13] == FAR  # 128 units, two for each part
    assert not filled("real", 132, schedule)["merges"].any()


def test_a_unit_is_as_many_rows_as_all_requests_have_in_common():
    assert rows_of_a_unit(16, [1, 1]) == 16
    assert rows_of_a_unit(8, [1, 4]) == 32
    assert rows_of_a_unit(128, [1, 1]) == 128
    assert rows_of_a_unit(128, [2]) == 256
    assert rows_of_a_unit(128, [1, 2]) == 64
    assert rows_of_a_unit(128, [9]) == 64
    assert rows_of_a_unit(20, [8]) == 192


def test_a_round_lists_every_row_once_and_keys_in_no_unit_without_them(monkeypatch):
    monkeypatch.setattr(hopper_rounds, "processors", lambda device: 132)
    pieces = [Piece(0, 0, 4, 70, True), Piece(1, 4, 3, 0, True), Piece(0, 7, 2, 0, False)]
    bounds = torch.tensor([67, 68, 69, 70, 0, 0, 0, 0, 0], dtype=torch.int32, device=DEVICE)
    table = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    step = plan_hopper(on_hopper(N=20), pieces, slice(0, 9), bounds, table)
    assert step.M == 128
    assert step.units.tolist() == [[0, 0, 80, 0], [1, 80, 60, 0], [0, 140, 40, 0]]
    assert step.merges.tolist() == [[80, 60, 0, -1], [140, 40, 0, -1], [0, 0, 0, 0]]
    assert (step.work[0, 5], step.work[0, 6]) == (70, 67)


def test_padding_alone_has_a_table_of_one_entry(monkeypatch):
    """A part without work reads one before it knows that it has none."""
    monkeypatch.setattr(hopper_rounds, "processors", lambda device: 132)
    batch = AttentionBatch.bottom_right([], [], [], page_size=64, num_pages=1, pad_tokens=3, device=DEVICE)
    assert batch.block_table.numel() == 0
    (step,) = plan_absorbed(on_hopper(N=64), batch, range(0), None, True)
    assert step.tokens == 3
    assert step.block_table.tolist() == [[0]]
    assert step.part[:, 10].eq(0).all()


@pytest.mark.parametrize(("T", "pages"), [(0, 3), (2, 0)])
def test_what_no_descriptor_can_describe_is_answered_without_one(T, pages):
    """No queries, or a cache without a page, and so without a key."""
    ints = lambda *shape: torch.zeros(*shape, dtype=torch.int32)
    half = lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16)
    out, lse = half(T, 64, 512).fill_(7), torch.zeros(T, 64)
    lists = ints(1, 1), ints(T), ints(1, 4), ints(2, 16), ints(1, 4), ints(4, 16)
    states = torch.zeros(8 * 64, 512), torch.zeros(8 * 64)
    decode(half(T, 64, 512), half(T, 64, 64), half(pages, 64, 576), *lists, *states, out, lse, 0.1, 64, 2)
    assert out.eq(0).all()
    assert lse.eq(float("-inf")).all()


def test_a_refilled_plan_lists_the_new_batch_with_nothing_of_the_old(monkeypatch):
    """What a graph was captured for is filled again in place; else the lists of the old step have another size."""
    monkeypatch.setattr(hopper_rounds, "processors", lambda device: 132)
    batch = lambda lens, pages: AttentionBatch.bottom_right(
        [1] * len(lens), lens, pages, page_size=64, num_pages=16, device=DEVICE
    )
    need = on_hopper(N=64)
    old = plan_absorbed(need, batch([70, 3, 200], [[0, 1], [2], [3, 4, 5, 6]]), range(3), None, True)
    (step,) = plan_absorbed(need, batch([130], [[9, 8, 7]]), range(1), old, True)
    assert step.units.tolist() == [[0, 0, 64, 0]]
    assert step.row_kv_lens.tolist() == [130]
    assert step.block_table.tolist() == [[9, 8, 7]]
    assert step.work[0, :8].tolist() == [0, 0, 64, 3, COST, 130, 130, 9]
    assert old[0].row_kv_lens.tolist() == [70, 3, 200]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"dtype": torch.float32, "layout": FloatRows(512, 64, torch.float32)},
            "dtype = torch.float32 has no Hopper kernel, which is for torch.bfloat16, torch.float16",
        ),
        ({"L": 256}, r"\(L, R\) = \(256, 64\) has no Hopper kernel"),
        ({"page_size": 48}, "page_size = 48 neither holds whole blocks of 64 keys nor is 16 or 32"),
        ({"layout": FloatRows(512, 64, torch.float32)}, "a cache of float32 rows is not read by the Hopper kernels"),
        ({"batch_invariant": True}, "batch_invariant = True needs borders at fixed places"),
    ],
)
def test_refusals(fields, text):
    assert why_not_hopper(on_hopper()) == []
    (reason,) = why_not_hopper(on_hopper(**fields))
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(reason)


def test_the_form_says_so_where_there_is_no_hopper():
    reasons = tiers.get("triton:hopper").why_not(dataclasses.replace(make_need(**SIZES), device="cpu"))
    assert any("arch = cpu has no Hopper kernel, which is for sm_90" in reason for reason in reasons)


def test_a_pool_is_rows_of_equal_distance_or_refused():
    engine = torch.zeros(5, 3, 64, 640, dtype=torch.bfloat16)
    rows, apart = pool(engine[:, 1, :, :576])
    assert (apart, rows.shape, rows.stride()) == (192, (4 * 192 + 64, 576), (640, 1))
    with pytest.raises(ValueError, match=r"cache.data: expected rows that a descriptor can describe"):
        pool(torch.zeros(4, 64, 577, dtype=torch.bfloat16)[..., :576])
    rows, apart = pool(torch.zeros(64 * 576, dtype=torch.bfloat16).as_strided((1, 64, 576), (7, 576, 1)))
    assert (apart, rows.shape) == (64, (64, 576))


def test_only_rows_one_behind_the_other_are_asked_for_ahead_of_time():
    pages = torch.zeros(4, 64, 640, dtype=torch.bfloat16)
    dense = pages.view(-1)[: 4 * 64 * 576].view(4, 64, 576)
    assert [rows_ahead(dense, tiles) for tiles in (1, 2, 3, 4)] == [0, 32, 21, 16]
    assert rows_ahead(pages[..., :576], 2) == 0
    assert rows_ahead(dense.view(8, 32, 576), 2) == 0
    engine = torch.zeros(4, 3, 64, 576, dtype=torch.bfloat16)  # a layer of an engine's cache: dense within a page
    assert rows_ahead(engine[:, 1], 2) == 32
    assert rows_ahead(engine.view(4, 64, 3, 576)[:, :, 1], 2) == 0


def test_queries_become_rows_and_are_copied_only_where_they_must():
    whole = torch.randn(3, 4, 576).to(torch.bfloat16)
    rows = as_rows(whole[..., 512:])
    assert rows.data_ptr() == whole[..., 512:].data_ptr()
    assert torch.equal(rows, whole[..., 512:].reshape(12, 64))
    turned = torch.randn(4, 3, 64).to(torch.bfloat16).transpose(0, 1)
    assert torch.equal(as_rows(turned), turned.reshape(12, 64))
    for shape, strides in ((12, 1, 64), (64, 768, 1)), ((1, 12, 64), (8, 64, 1)), ((1, 1, 64), (8, 8, 1)):
        odd = (
            torch.randn(768).to(torch.bfloat16).as_strided(shape, strides)
        )  # the stride of an axis of one says nothing
        rows = as_rows(odd)
        assert torch.equal(rows, odd.reshape(-1, 64))
        assert rows.data_ptr() == odd.data_ptr()


def test_warmup_compiles_every_merge_for_every_unit(monkeypatch):
    compiled = set()
    for name in ("_write", "_absorb_nothing", "_attend"):
        monkeypatch.setattr(warmup, name, lambda *_: None)
    monkeypatch.setattr(warmup, "_decode_nothing", lambda need, M, at_once: compiled.add((M, at_once)))
    for step in warmup.steps(tiers.get("triton:hopper"), on_hopper(), None):
        step()
    assert compiled == set(itertools.product((16, 32, 64), combine_module.SHAPES))


@pytest.mark.parametrize("at_once", list(combine_module.SHAPES))
@pytest.mark.parametrize("as_held", [False, True])
@pytest.mark.parametrize("programs", [3, 4096])
def test_the_merge_computes_what_its_reference_does(monkeypatch, at_once, as_held, programs):
    """Interpreted: waiting for the launch before is the one thing that needs a GPU. 3 programs go round and round."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton.language.extra.cuda, "gdc_wait", lambda _semantic=None: None)
    monkeypatch.setattr(combine_module, "MOST_PROGRAMS", programs)
    given = combine_problem("toy", torch.float32, DEVICE).arguments | {"at_once": at_once, "as_held": as_held}
    exact = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    combine_module.combine(**given)
    wide = {name: exact[name].double() for name in ("part_out", "part_lse", "out", "lse")}
    combine_reference(**exact | wide)
    for name in ("out", "lse"):
        found, expected = given[name].cpu().double(), wide[name].cpu()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())
        there = expected.isfinite()
        size = float(expected[there].abs().max())
        # at most 18 states are added, each with a weight of its own; exp2 and log2 are off by two units
        assert (found[there] - expected[there]).abs().max() <= (2 * 18 + 6) * 2.0**-24 * max(1.0, size)


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what interpreted programs do")
@pytest.mark.parametrize(("listed", "waits"), [(0, 1), (1, 4), (3, 12)])
def test_a_merge_ends_after_the_decode_whatever_is_listed(monkeypatch, listed, waits):
    """Programs with work wait, and the first one always: else the stream would take the decode for done."""
    waited = []
    monkeypatch.setattr(triton.language.extra.cuda, "gdc_wait", lambda _semantic=None: waited.append(1))
    given = combine_problem("toy", torch.float32, DEVICE).arguments | {"at_once": 2}
    given["merges"][listed:] = 0
    combine_module.combine(**given)  # a unit of 3 rows in a slot of 16: two bands of 8 rows, two of 256 columns
    assert len(waited) == waits


def test_the_reference_of_the_merge_weighs_by_the_lse():
    given = combine_problem("toy", torch.float32, "cpu").arguments
    combine_reference(**given)
    slots = [1, 2, 4]  # parts 0 .. 2: its first began there
    weights = torch.softmax(given["part_lse"][slots, 0] * 0.6931471805599453, 0)
    expected = (weights[:, None] * given["part_out"][slots, 0]).sum(0)
    assert torch.allclose(given["out"][0, 0], expected, rtol=0, atol=4 * 3 * 2.0**-24 * float(expected.abs().max()))
    assert given["lse"][0, 1] == float("-inf")
    assert given["out"][2].eq(0).all()
    assert given["out"][1].isnan().all()
