"""The simulator's planners against 210 plans of the original C++, and the buffer sizes they are given."""

import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from aiter_simulator import SENTINEL, fake_aiter, kernels, poison
from aiter_simulator.example import Step, offsets, toy
from aiter_simulator.planner import (
    DecodeCase,
    PrefillCase,
    fold_ratio,
    pack_rows,
    plan_decode,
    plan_prefill,
    query_tiles,
    visiting_order,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "aiter_golden" / "metadata.json").read_text())
CUS = (1, 2, 8, 80, 256, 304)


def ints(*values: int) -> torch.Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def test_there_are_210_plans() -> None:
    assert (len(GOLDEN["mla_v1_2"]), len(GOLDEN["ps_v1"])) == (150, 60)


@pytest.mark.parametrize("number", range(150))
def test_decode_plan_equals_the_original(number: int) -> None:
    golden = GOLDEN["mla_v1_2"][number]
    plan = plan_decode(
        DecodeCase(
            golden["qo_indptr"],
            golden["kv_indptr"],
            golden["last_page_len"],
            heads=golden["heads"],
            workers=golden["num_cu"],
            max_qlen=golden["max_seqlen_qo"],
            uni_qlen=golden["uni_seqlen_qo"],
            ratio=golden["qk_batch_ratio"],
            pack=golden["pack"],
            page_size=golden["page_size"],
            granularity=golden["kv_granularity"],
            causal=bool(golden["is_causal"]),
        )
    )
    assert plan.work == golden["work_info"]
    assert plan.work_indptr == golden["work_indptr"]
    tail = golden["reduce_indptr_size"] - len(plan.reduce_indptr)
    assert plan.reduce_indptr + plan.reduce_indptr[-1:] * tail == golden["reduce_indptr"]
    assert plan.partial_map == golden["reduce_partial_map"]
    assert {str(group): list(rows) for group, rows in plan.final_map.items()} == golden["reduce_final_map"]


@pytest.mark.parametrize("number", range(60))
def test_prefill_plan_equals_the_original(number: int) -> None:
    golden = GOLDEN["ps_v1"][number]
    plan = plan_prefill(
        PrefillCase(
            golden["qo_indptr"],
            golden["kv_indptr"],
            golden["context_lens"],
            golden["num_heads_k"],
            golden["available_tgs"],
            golden["qlen_granularity"],
            golden["kvlen_granularity"],
            bool(golden["is_causal"]),
        )
    )
    assert plan.work == golden["work_info"]
    assert plan.work_indptr == golden["work_indptr"]
    assert plan.reduce_indptr == golden["reduce_indptr"]
    assert plan.partial_map == golden["reduce_partial_map"]
    assert [list(rows) for rows in plan.final_map.values()] == golden["reduce_final_map"]


def written(buffer: torch.Tensor) -> list[Any]:
    """The rows of a buffer before its first untouched one; asserts that the rest is untouched."""
    rows = buffer.view(len(buffer), -1)
    used = int((rows != SENTINEL).all(1).sum())
    assert (rows[used:] == SENTINEL).all()
    return buffer[:used].tolist()


def callable_on(golden: dict[str, Any]) -> tuple[str, str] | None:
    """The (arch, format) whose planner makes this plan: folded on gfx942 in bf16, native on gfx950 in fp8."""
    arch, name = ("gfx942", "bf16") if golden["heads"] == 16 else ("gfx950", "fp8")
    pack = pack_rows(arch, name, name, golden["heads"], golden["max_seqlen_qo"])
    return (arch, name) if golden["page_size"] == 1 and pack == golden["pack"] else None


@pytest.mark.parametrize("number", [n for n, g in enumerate(GOLDEN["mla_v1_2"]) if callable_on(g)])
def test_decode_metadata_call_writes_the_golden_plan_and_nothing_else(number: int) -> None:
    golden = GOLDEN["mla_v1_2"][number]
    arch, name = callable_on(golden)
    ratio, heads, qlen = golden["qk_batch_ratio"], golden["heads"], golden["max_seqlen_qo"]
    dtypes = (torch.bfloat16 if name == "bf16" else torch.float8_e4m3fn,) * 2
    library = fake_aiter(arch, golden["num_cu"])
    batch = len(golden["qo_indptr"]) - 1
    sizes = library.get_mla_metadata_info_v1(batch, qlen, heads * ratio, *dtypes, is_sparse=False)
    meta, indptr, info, reduce_indptr, final, partial = (poison(torch.empty(s, dtype=d)) for s, d in sizes)
    library.get_mla_metadata_v1(
        *(ints(*golden["qo_indptr"]), ints(*golden["kv_indptr"]), torch.ones(batch, dtype=torch.int32)),
        *(heads * ratio, 1, True, meta, info, indptr, reduce_indptr, final, partial),
        **dict(max_seqlen_qo=qlen, uni_seqlen_qo=golden["uni_seqlen_qo"], dtype_q=dtypes[0], dtype_kv=dtypes[1]),
    )
    assert written(info) == golden["work_info"]
    assert written(indptr) == golden["work_indptr"]
    assert written(partial) == golden["reduce_partial_map"]
    assert reduce_indptr.tolist()[: golden["reduce_indptr_size"]] == golden["reduce_indptr"][: len(reduce_indptr)]
    rows = {str(g): row for g, row in enumerate(final.tolist()) if row[0] != SENTINEL}
    assert rows == golden["reduce_final_map"]
    assert meta.tolist() == [indptr.data_ptr(), info.data_ptr()]


def test_sizes_hold_every_plan_and_every_row_is_planned_once() -> None:
    """Over the whole table: the six buffers are large enough, and work covers all keys of every row exactly once."""
    shapes = [([1] * 5, [3, 900, 40, 41, 1]), ([2] * 9, [17, 230] * 4 + [2]), ([4] * 3, [64, 4, 500]), ([3], [2000])]
    for (arch, q, kv, mode), table in kernels.TABLE.items():
        if mode != "ps":
            continue
        cases = product(sorted(table.native | table.fold), shapes)
        for (heads, (qlens, lens)), cu in zip(cases, cycle(CUS), strict=False):
            if kernels.lookup(arch, q, kv, mode, heads, qlens[0]) is None:
                continue
            step = Step(toy(arch, cu), heads, qlens, lens, q, kv).plan()
            ratio = fold_ratio(arch, q, kv, heads, qlens[0])
            count = int(step.buffers["work_indptr"][-1])
            seen = torch.zeros(sum(qlens) * ratio, max(lens), dtype=torch.int64)
            for batch, _, q0, q1, kv0, _, behind, _ in step.buffers["work_info_set"][:count].tolist():
                first, stop = step.call["kv_indptr"].tolist()[batch // ratio :][:2]
                seen[q0:q1, kv0 - first : stop - behind - first] += 1
            for row, keys in enumerate(seen):
                batch = row // qlens[0]
                visible = lens[batch // ratio] - qlens[0] + row % qlens[0] + 1
                assert (keys[:visible] == 1).all(), (arch, q, kv, heads, qlens, cu)
                assert keys.max() <= 1


def test_sizes_by_hand() -> None:
    """gfx942 bf16 H 128, 4 rows: 512 rows of heads in tiles of 16, so 32 per request; 3 requests on 80 CUs."""
    library = fake_aiter("gfx942", 80)
    sizes = library.get_mla_metadata_info_v1(3, 4, 128, torch.bfloat16, torch.bfloat16, False)
    assert sizes[0] == (2, torch.uint64)
    assert [shape for shape, _ in sizes[1:]] == [81, (82 * 32, 8), 97, (96, 2), 82 * 32]
    sizes = library.get_mla_metadata_info_v1(200, 1, 16, torch.bfloat16, torch.bfloat16, False)
    assert [shape for shape, _ in sizes[1:]] == [81, (279, 8), 201, (200, 2), 158]
    sizes = library.get_ps_metadata_info_v1(3, 12, 700)
    assert [shape for shape, _ in sizes[1:]] == [81, ((3 + 19) * 3 * 12, 8), 10, (9, 2), 22 * 3]


@pytest.mark.parametrize(
    ("arch", "q", "kv", "heads", "qlen", "pack", "tiles"),
    [
        ("gfx942", "bf16", "bf16", 16, 8, 128, 1),
        ("gfx942", "fp8", "fp8", 128, 4, 128, 4),
        ("gfx950", "bf16", "bf16", 24, 3, 64, 2),
        ("gfx950", "bf16", "bf16", 48, 2, 64, 2),
        ("gfx950", "bf16", "bf16", 64, 2, 128, 1),
        ("gfx950", "bf16", "bf16", 80, 3, 128, 3),
        ("gfx950", "fp8", "fp8", 32, 3, 64, 2),
        ("gfx950", "fp8", "fp8", 32, 4, 128, 1),
    ],
)
def test_query_tiles(arch: str, q: str, kv: str, heads: int, qlen: int, pack: int, tiles: int) -> None:
    assert pack_rows(arch, q, kv, heads, qlen) == pack
    assert query_tiles(heads, qlen, pack) == tiles


def test_tiles_are_visited_from_both_ends() -> None:
    assert visiting_order(5) == [0, 4, 1, 3, 2]
    assert visiting_order(4) == [0, 3, 1, 2]
    assert visiting_order(0) == []


def test_ragged_rows_in_several_tiles_leave_requests_without_work() -> None:
    """The original sums an array that nobody filled: with zeros in it, not every request is served."""
    step = Step(toy("gfx942", 8), 128, [1, 3, 2], [61, 70, 33], "fp8", "fp8").plan()
    assert step.run()[0].isnan().flatten(1).all(1).any()


def test_ragged_rows_and_folded_heads_lose_rows() -> None:
    step = Step(toy("gfx942", 8), 32, [1, 3, 2], [61, 70, 33]).plan()
    assert step.run()[0].isnan().any()


@pytest.mark.parametrize("name", ["work_indptr", "work_info_set", "reduce_indptr", "reduce_partial_map"])
def test_a_buffer_one_row_short_is_refused(name: str) -> None:
    """A plan that fills its buffer to the last row: 1 request of 5000 keys on 8 CUs."""
    step = Step(toy("gfx942", 8), 16, [1], [5000]).plan()
    used = {
        "work_indptr": 9,
        "work_info_set": int(step.buffers["work_indptr"][-1]),
        "reduce_indptr": 2,
        "reduce_partial_map": int(step.buffers["reduce_indptr"][-1]),
    }[name]
    step.plan(**{name: step.buffers[name][:used].clone()})
    with pytest.raises(RuntimeError, match=name):
        step.plan(**{name: step.buffers[name][: used - 1].clone()})


def prefill_buffers(library: Any, heads: int, **changes: Any) -> None:
    """One prefill plan of rows 300 and 40 with contexts of 300 and 100 keys."""
    sizes = library.get_ps_metadata_info_v1(2, heads, 300)
    names = ("work_metadata_ptrs", "work_indptr", "work_info", "reduce_indptr", "reduce_final_map")
    buffers = {
        name: torch.empty(s, dtype=d) for name, (s, d) in zip((*names, "reduce_partial_map"), sizes, strict=True)
    }
    arguments = dict(
        seqlens_qo_indptr=offsets([300, 40]),
        pages_kv_indptr=offsets([300, 100]),
        context_lens=ints(300, 100),
        gqa_ratio=1,
        num_heads_k=heads,
        kvlen_granularity=128,
        block_size=1,
        **buffers,
    )
    library.get_ps_metadata_v1(**(arguments | changes))


def test_prefill_metadata_checks_its_arguments() -> None:
    library = fake_aiter("gfx950", 16)
    prefill_buffers(library, 4)
    with pytest.raises(RuntimeError, match="int32"):
        prefill_buffers(library, 4, context_lens=torch.tensor([300, 100]))
    with pytest.raises(RuntimeError, match="work_info"):
        prefill_buffers(library, 4, work_info=torch.empty(3, 8, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="host"):
        prefill_buffers(library, 4, context_lens=torch.empty(2, dtype=torch.int32, device="meta"))
    with pytest.raises(NotImplementedError):
        prefill_buffers(library, 4, block_size=16)
