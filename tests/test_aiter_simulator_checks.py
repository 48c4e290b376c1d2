"""The AITER simulator refuses what the library would die of; every known mistake gives an abort or a wrong result."""

import inspect
import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from aiter_simulator import SENTINEL, AiterAbort, fake_aiter, poisoned_allocations
from aiter_simulator.example import Step, offsets, toy

BF16, FN = torch.bfloat16, torch.float8_e4m3fn


def step(arch: str = "gfx942", heads: int = 16, qlens: tuple[int, ...] = (2, 2), **more: Any) -> Step:
    """A planned call that works."""
    return Step(toy(arch, 80), heads, list(qlens), [61, 7, 33][: len(qlens)], **more).plan()


def right(example: Step, out: torch.Tensor) -> bool:
    """Whether out is attention within what rounding allows."""
    expected = example.expected()
    return bool(((out.double() - expected[0]).abs() <= example.allowed(expected)[0]).all())


Change = Callable[[dict[str, Any]], dict[str, Any]]
DECODE_CHECKS: dict[str, tuple[type[BaseException], str, Change]] = {
    "query without head axis": (AiterAbort, "pages, page", lambda c: {"q": c["q"].flatten(1)}),
    "cache without page axis": (AiterAbort, "pages, page", lambda c: {"kv_buffer": c["kv_buffer"][0]}),
    "flat out": (AiterAbort, "pages, page", lambda c: {"o": c["o"].flatten(1)}),
    "fp16 query": (AiterAbort, "unsupport Q", lambda c: {"q": c["q"].half()}),
    "fp16 cache": (AiterAbort, "unsupport KV", lambda c: {"kv_buffer": c["kv_buffer"].half()}),
    "query in fp8 of gfx950": (AiterAbort, "unsupport Q", lambda c: {"q": c["q"].to(torch.float8_e4m3fn)}),
    "cache in fp8 of gfx950": (AiterAbort, "unsupport KV", lambda c: {"kv_buffer": c["kv_buffer"].to(FN)}),
    "strided query": (AiterAbort, "contiguous", lambda c: {"q": c["q"].mT.contiguous().mT}),
    "strided out": (AiterAbort, "contiguous", lambda c: {"o": c["o"].mT.contiguous().mT}),
    "strided cache": (AiterAbort, "contiguous", lambda c: {"kv_buffer": c["kv_buffer"].repeat(1, 1, 1, 2)[..., :40]}),
    "out elsewhere": (AiterAbort, "device", lambda c: {"o": c["o"].to("meta")}),
    "narrow cache": (AiterAbort, "q width", lambda c: {"kv_buffer": c["kv_buffer"][..., :-1].contiguous()}),
    "narrow out": (AiterAbort, "o: ", lambda c: {"o": c["o"][..., :-1].contiguous()}),
    "nhead_kv 2": (AiterAbort, "one KV head", lambda c: {"nhead_kv": 2}),
    "two KV heads in the cache": (
        AiterAbort,
        "one KV head",
        lambda c: {"kv_buffer": c["kv_buffer"].repeat(1, 1, 2, 1)},
    ),
    "page size": (AiterAbort, "page_size", lambda c: {"page_size": 16}),
    "int64 indices": (AiterAbort, "kv_indices: int32", lambda c: {"kv_indices": c["kv_indices"].long()}),
    "strided indices": (AiterAbort, "one contig", lambda c: {"kv_indices": c["kv_indices"].repeat_interleave(2)[::2]}),
    "indices in two axes": (AiterAbort, "one contig", lambda c: {"kv_indices": c["kv_indices"][None]}),
    "int64 qo_indptr": (AiterAbort, "qo_indptr: int32", lambda c: {"qo_indptr": c["qo_indptr"].long()}),
    "int64 kv_indptr": (AiterAbort, "kv_indptr: int32", lambda c: {"kv_indptr": c["kv_indptr"].long()}),
    "int64 last pages": (AiterAbort, "lens: int32", lambda c: {"kv_last_page_lens": c["kv_last_page_lens"].long()}),
    "falling kv_indptr": (AiterAbort, "monotone", lambda c: {"kv_indptr": offsets([68, -7])}),
    "kv_indptr not from 0": (AiterAbort, "start at 0", lambda c: {"kv_indptr": c["kv_indptr"].clamp(min=1)}),
    "no requests at all": (
        AiterAbort,
        "start at 0",
        lambda c: {"qo_indptr": offsets([])[:0], "kv_indptr": offsets([])[:0]},
    ),
    "one kv_indptr too few": (AiterAbort, "3 values", lambda c: {"kv_indptr": c["kv_indptr"][:-1]}),
    "one last page too few": (AiterAbort, "2 values", lambda c: {"kv_last_page_lens": c["kv_last_page_lens"][:-1]}),
    "more rows than q has": (AiterAbort, "qo_indptr: ends", lambda c: {"qo_indptr": offsets([2, 3])}),
    "too few indices": (AiterAbort, "kv_indptr: ends", lambda c: {"kv_indices": c["kv_indices"][:-1]}),
    "index outside of the cache": (AiterAbort, "memory fault", lambda c: {"kv_indices": c["kv_indices"] + 60}),
    "negative index": (AiterAbort, "memory fault", lambda c: {"kv_indices": c["kv_indices"] - 60}),
    "logit cap": (AssertionError, "logit_cap", lambda c: {"logit_cap": 30.0}),
    "not causal": (AiterAbort, "causal", lambda c: {"causal": False}),
    "lse that no kernel writes": (AiterAbort, "heuristic", lambda c: {"return_lse": True}),
    "work list missing": (AiterAbort, "together", lambda c: {"work_info_set": None}),
    "reduce map missing": (AiterAbort, "together", lambda c: {"reduce_final_map": None}),
    "work lists swapped": (
        *(AiterAbort, "work_info_set"),
        lambda c: {"work_info_set": c["work_indptr"], "work_indptr": c["work_info_set"]},
    ),
    "work rows of 7": (AiterAbort, "work_info_set", lambda c: {"work_info_set": c["work_info_set"][:, :7]}),
    "work list of other memory": (AiterAbort, "point", lambda c: {"work_info_set": c["work_info_set"].clone()}),
    "work_indptr too short": (AiterAbort, "per CU", lambda c: {"work_indptr": c["work_indptr"][:-1]}),
    "work_indptr in two axes": (AiterAbort, "per CU", lambda c: {"work_indptr": c["work_indptr"][None]}),
    "final map too short": (AiterAbort, "shorter", lambda c: {"reduce_final_map": c["reduce_final_map"][:-1]}),
    "final map flat": (AiterAbort, "final_map", lambda c: {"reduce_final_map": c["reduce_final_map"].flatten()}),
    "final map of 3": (
        AiterAbort,
        "final_map",
        lambda c: {"reduce_final_map": c["reduce_final_map"].repeat(1, 2)[:, :3]},
    ),
    "no room for partials": (AiterAbort, "partial rows", lambda c: {"reduce_partial_map": c["reduce_partial_map"][:0]}),
    "room for one partial": (AiterAbort, "room for 1", lambda c: {"num_kv_splits": 1}),
    "context parallel": (NotImplementedError, "context", lambda c: {"cp_world_size": 2}),
    "global kv_indptr": (NotImplementedError, "context", lambda c: {"g_kv_indptr": c["kv_indptr"]}),
    "intra-batch mode": (NotImplementedError, "intra", lambda c: {"intra_batch_mode": True}),
    "logits": (NotImplementedError, "logits", lambda c: {"return_logits": True}),
}


@pytest.mark.parametrize("name", DECODE_CHECKS)
def test_decode_refuses(name: str) -> None:
    kind, message, change = DECODE_CHECKS[name]
    example = step()
    assert right(example, example.run()[0])
    example.call["o"].fill_(torch.nan)
    with pytest.raises(kind, match=message):
        example.run(**change(example.call))


def test_one_row_needs_no_mask() -> None:
    example = step(qlens=(1, 1))
    assert right(example, example.run(causal=False)[0])


def test_stale_work_is_refused() -> None:
    """Work lists of an earlier step read keys and rows that this one does not have, or leave the maps behind."""
    example = step()
    example.call |= {"kv_indptr": offsets([50, 7])}
    with pytest.raises(AiterAbort, match="reads keys"):
        example.run()
    changes = [
        ("work_info_set", (0, 0), 7, "work item"),
        ("work_info_set", (0, 2), -1, "work item"),
        ("work_info_set", (0, 3), 9, "work item"),
        ("work_info_set", (0, 4), -1, "reads keys"),
        ("reduce_final_map", (0, 1), 9, "reduce_final_map"),
        ("reduce_final_map", (0, 0), -1, "reduce_final_map"),
        ("reduce_partial_map", (0,), -5, "reduce_final_map"),
        ("reduce_partial_map", (0,), 99, "partial_output"),
        ("reduce_indptr", (1,), 9999, "reduce_partial_map"),
        ("reduce_indptr", (0,), -9, "reduce_partial_map"),
    ]
    for name, cell, value, message in changes:
        example = step()
        assert right(example, example.run()[0])
        example.buffers[name][cell] = value
        with pytest.raises(AiterAbort, match=message):
            example.run()


def test_abort_is_no_exception() -> None:
    """Nothing that catches Exception survives the death of the process."""
    assert not issubclass(AiterAbort, Exception)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("q_scale", None),
        ("kv_scale", None),
        ("q_scale", 1.0),
        ("kv_scale", torch.ones(2)),
        ("q_scale", torch.ones(1, dtype=torch.float64)),
    ],
)
def test_fp8_needs_both_scales(name: str, scale: object) -> None:
    example = step(q_format="fp8", kv_format="fp8")
    with pytest.raises(AiterAbort, match=name):
        example.run(**{name: scale})


@pytest.mark.parametrize(
    ("arch", "q", "kv", "heads", "qlen", "kind"),
    [
        ("gfx942", "bf16", "bf16", 16, 5, AiterAbort),
        ("gfx942", "bf16", "bf16", 24, 1, AssertionError),
        ("gfx942", "bf16", "bf16", 8, 1, AiterAbort),
        ("gfx942", "bf16", "bf16", 144, 1, AssertionError),
        ("gfx942", "bf16", "fp8", 16, 5, AiterAbort),
        ("gfx942", "fp8", "fp8", 8, 4, AiterAbort),
        ("gfx950", "bf16", "fp8", 128, 5, AiterAbort),
        ("gfx950", "fp8", "fp8", 8, 1, AiterAbort),
        ("gfx950", "fp8", "bf16", 16, 1, AiterAbort),
        ("gfx950", "bf16", "bf16", 40, 1, AiterAbort),
    ],
)
def test_missing_persistent_kernel(
    arch: str, q: str, kv: str, heads: int, qlen: int, kind: type[BaseException]
) -> None:
    example = Step(toy(arch), heads, [qlen], [20], q, kv).plan()
    with pytest.raises(kind):
        example.run(q_scale=torch.ones(1), kv_scale=torch.ones(1))


def test_lse_of_two_rows_of_16_fp8_heads_has_no_kernel() -> None:
    example = step("gfx950", q_format="fp8", kv_format="fp8")
    assert right(example, example.run()[0])
    with pytest.raises(AiterAbort, match="lse"):
        example.run(return_lse=True)


@pytest.mark.parametrize(
    ("arch", "formats", "heads", "qlen", "kind"),
    [
        ("gfx942", ("bf16", "bf16"), 24, 1, AiterAbort),
        ("gfx942", ("bf16", "bf16"), 64, 1, AiterAbort),
        ("gfx942", ("bf16", "bf16"), 64, 2, AiterAbort),
        ("gfx950", ("bf16", "fp8"), 16, 1, AiterAbort),
        ("gfx950", ("fp8", "fp8"), 16, 5, KeyError),
        ("gfx942", ("fp8", "fp8"), 32, 3, KeyError),
        ("gfx942", ("fp8", "fp8"), 32, 4, AiterAbort),
    ],
)
def test_missing_split_kernel(
    arch: str, formats: tuple[str, str], heads: int, qlen: int, kind: type[BaseException]
) -> None:
    with pytest.raises(kind):
        Step(toy(arch), heads, [qlen], [20], *formats).run(q_scale=torch.ones(1), kv_scale=torch.ones(1))


def test_split_decode_refuses_rows_that_q_does_not_have() -> None:
    """Its row numbers are request times qlen."""
    example = Step(toy(), 16, [2, 2], [20, 9])
    with pytest.raises(AiterAbort, match="do not fit"):
        example.run(max_seqlen_q=4, num_kv_splits=2)


def test_planner_refuses() -> None:
    example = step()
    lists = {
        "seqlens_qo_indptr": "qo_indptr",
        "seqlens_kv_indptr": "kv_indptr",
        "kv_last_page_lens": "kv_last_page_lens",
    }
    for argument, name in lists.items():
        with pytest.raises(RuntimeError, match=argument):
            example.plan(**{argument: example.call[name].long()})
        with pytest.raises(RuntimeError, match=argument):
            example.plan(**{argument: example.call[name][None]})
        with pytest.raises(RuntimeError, match=argument):
            example.plan(**{argument: example.call[name].repeat_interleave(2)[::2]})
    changes: list[tuple[str, dict[str, Any]]] = [
        ("page_size must be", {"page_size": 3}),
        ("kv_granularity must be", {"kv_granularity": 0}),
        ("one KV head", {"num_heads_k": 2}),
        ("differ in length", {"seqlens_kv_indptr": offsets([61])}),
        ("must hold 2", {"kv_last_page_lens": example.call["kv_last_page_lens"][:1]}),
        ("2 uint64", {"work_metadata_ptrs": torch.empty(2, dtype=torch.int64)}),
        ("2 uint64", {"work_metadata_ptrs": torch.empty(1, dtype=torch.uint64)}),
        ("work_info must be", {"work_info_set": torch.empty(99, 7, dtype=torch.int32)}),
        ("work_info must be", {"work_info_set": torch.empty(99, 8, 1, dtype=torch.int32)}),
        ("work_indptr must", {"work_indptr": torch.empty(99, 99, dtype=torch.int32)}),
        ("reduce_final_map must", {"reduce_final_map": torch.empty(99, dtype=torch.int32)}),
        ("reduce_final_map must", {"reduce_final_map": torch.empty(99, 3, dtype=torch.int32)}),
        ("dense int32", {"reduce_indptr": torch.empty(99, dtype=torch.int64)}),
        ("dense int32", {"reduce_indptr": torch.empty(99, 2, dtype=torch.int32)[:, 0]}),
    ]
    for message, change in changes:
        with pytest.raises(RuntimeError, match=message):
            example.plan(**change)
    for unsupported in ({"fast_mode": False}, {"topk": 64}, {"intra_batch_mode": True}, {"max_split_per_batch": 2}):
        with pytest.raises(NotImplementedError):
            example.plan(**unsupported)
    with pytest.raises(AssertionError, match="multiple of 8"):
        example.plan(info_heads=12)


def test_mutant_dtypes_not_passed_to_the_planner() -> None:
    """vLLM #46997: without them 32 heads over an 8-bit cache are planned as bf16, unfolded."""
    for arch, q, heads in (
        ("gfx950", "bf16", 32),
        ("gfx950", "fp8", 32),
        ("gfx950", "fp8", 48),
        ("gfx942", "fp8", 128),
    ):
        example = step(arch, heads=heads, q_format=q, kv_format="fp8")
        assert right(example, example.run()[0])
        with pytest.raises((AiterAbort, RuntimeError), match=r"metadata made for|the plan writes"):
            example.plan(dtype_q=None, dtype_kv=None).run()


def test_mutant_last_page_is_the_length() -> None:
    """vLLM #31282."""
    example = step()
    example.call["kv_last_page_lens"] = torch.tensor([61, 7], dtype=torch.int32)
    assert not right(example, example.plan().run()[0])


def test_mutant_metadata_for_the_heads_before_padding() -> None:
    """vLLM #38615: 24 heads, padded to 32."""
    for planned, padded in ((24, 32), (8, 16)):
        example = step(heads=padded).plan(num_heads_per_head_k=planned, info_heads=planned)
        with pytest.raises(AiterAbort, match="metadata made for"):
            example.run()


def test_mutant_work_lists_in_the_order_of_the_sizes() -> None:
    """info_v1 returns work_indptr before work_info_set; get_mla_metadata_v1 takes them the other way round."""
    example = step()
    swapped = {"work_info_set": example.buffers["work_indptr"], "work_indptr": example.buffers["work_info_set"]}
    with pytest.raises(RuntimeError, match="work_info"):
        example.plan(**swapped)


def test_mutant_rows_planned_as_one() -> None:
    """vLLM #45227: rows that the plan does not know are never written."""
    example = step(qlens=(4, 4)).plan(max_seqlen_qo=1, uni_seqlen_qo=1)
    assert example.run()[0].isnan().any()


def test_mutant_lse_in_log2() -> None:
    example = step("gfx950")
    lse, expected = example.run(return_lse=True)[1].double(), example.expected()[1]
    bound = example.allowed()[1] + 2**-24 * expected.abs()
    assert ((lse - expected).abs() <= bound).all()
    assert ((lse * math.log(2) - expected).abs() > bound).all()


@pytest.mark.parametrize("ck", [True, False])
def test_mutant_lse_layout(ck: bool) -> None:
    """[H, T] from CK and [T, H] from Triton; taken for the other, a square block is transposed without an error."""
    library = fake_aiter(ck=ck)
    q, k, v = torch.randn(4, 4, 24), torch.randn(6, 4, 24), torch.randn(6, 4, 16)
    starts = (offsets([4]), offsets([6]), 4, 6)
    bf = [x.to(BF16) for x in (q, k, v)]
    _, lse = library.flash_attn_varlen_func(*bf, *starts, return_lse=True)
    expected = torch.einsum("thd,shd->ths", bf[0].double(), bf[1].double()).mul(24**-0.5).logsumexp(-1)
    right_way = lse.T if ck else lse
    assert (right_way - expected).abs().max() < 2**-20
    assert (right_way.T - expected).abs().max() > 2**-4
    assert library.ops.mha.ENABLE_CK is ck


def test_mutant_first_heads_instead_of_every_second() -> None:
    """8 heads, each repeated: heads 0, 2, 4, ... of the result belong to them, not the first 8."""
    example = step()
    narrow = example.call["q"][:, ::2].clone()
    example.call["q"] = narrow.repeat_interleave(2, 1).contiguous()
    out, expected = example.run()[0], example.expected()[0]
    wanted, bound = expected[:, ::2], example.allowed()[0][:, ::2]
    assert ((out[:, ::2] - wanted).abs() <= bound).all()
    assert not ((out[:, :8] - wanted).abs() <= bound).all()


def test_out_of_another_dtype_is_garbage() -> None:
    example = step()
    assert example.run(o=torch.zeros(4, 16, 32))[0].isnan().all()


def test_other_widths_are_misread() -> None:
    """The kernels do not check 576."""
    example = Step(fake_aiter(), 16, [1], [5])
    call = {"q": torch.zeros(1, 16, 40, dtype=BF16), "kv_buffer": torch.zeros(9, 1, 1, 40, dtype=BF16)}
    assert example.plan().run(**call)[0].isnan().all()


def test_pages_of_more_than_one_token_are_misread() -> None:
    """aiter #2996, #3095."""
    library = toy()
    example = Step(library, 16, [1], [1])
    cache = torch.zeros(4, 16, 1, 40, dtype=BF16)
    assert example.plan(page_size=16).run(kv_buffer=cache, page_size=16, kv_indices=offsets([]))[0].isnan().all()


def test_poisoned_allocations() -> None:
    with poisoned_allocations():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.zeros(2, dtype=BF16)).isnan().all()
        assert torch.zeros(2).new_empty(5).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == SENTINEL).all()
        assert torch.empty(2, dtype=torch.uint64).tolist() == [119, 119]
        assert torch.empty(2, dtype=torch.float8_e4m3fnuz).float().isnan().all()
        assert (torch.zeros(3) == 0).all()


SIGNATURES = {
    "mla.mla_decode_fwd": "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, "
    "page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, "
    "work_meta_data=None, work_indptr=None, work_info_set=None, reduce_indptr=None, reduce_final_map=None, "
    "reduce_partial_map=None, q_scale=None, kv_scale=None, intra_batch_mode=False, return_logits=False, "
    "return_lse=False, g_kv_indptr=None, cp_world_size=1, cp_rank=0, causal=True",
    "mla.mla_prefill_fwd": "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, "
    "sm_scale=None, logit_cap=0.0, num_kv_splits=None",
    "mla.mla_prefill_ps_fwd": "Q, K, V, output, qo_indptr, kv_indptr, kv_page_indices, work_indptr, work_info_set, "
    "max_seqlen_q, is_causal, reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, "
    "softmax_scale=None, q_scale=None, k_scale=None, v_scale=None",
    "mla_prefill_ps_asm_fwd": "Q, K, V, qo_indptr, kv_indptr, kv_page_indices, work_indptr, work_info_set, "
    "max_seqlen_q, softmax_scale, is_causal, splitData, splitLse, output, q_scale=None, k_scale=None, v_scale=None",
    "get_mla_metadata_info_v1": "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, "
    "fast_mode=True, num_kv_splits=32, intra_batch_mode=False, max_split_per_batch=-1",
    "get_mla_metadata_v1": "seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, "
    "num_heads_k, is_causal, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, "
    "reduce_partial_map, page_size=1, kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1, fast_mode=True, topk=-1, "
    "max_split_per_batch=-1, intra_batch_mode=False, is_cp_round_robin=False, mla_version=None, dtype_q_nope=None, "
    "dtype_q_rope=None, dtype_kv_nope=None, dtype_kv_rope=None, dtype_q=None, dtype_kv=None",
    "get_ps_metadata_info_v1": "batch_size, num_head_k, max_qlen, qlen_granularity=256",
    "get_ps_metadata_v1": "seqlens_qo_indptr, pages_kv_indptr, context_lens, gqa_ratio, num_heads_k, "
    "work_metadata_ptrs, work_indptr, work_info, reduce_indptr, reduce_final_map, reduce_partial_map, "
    "qhead_granularity=1, qlen_granularity=256, kvlen_granularity=16, block_size=16, is_causal=True",
    "mla_reduce_v1": "partial_output, partial_lse, reduce_indptr, reduce_final_map, reduce_partial_map, max_seqlen_q, "
    "num_kv_splits, final_output, final_lse=None",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, "
    "dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1, 0), bias=None, "
    "alibi_slopes=None, deterministic=False, return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1, "
    "block_table=None, out=None, cu_seqlens_q_padded=None, cu_seqlens_k_padded=None, sink_ptr=None",
    "ops.triton.attention.mla_decode.decode_attention_fwd": "q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, "
    "attn_logits, num_kv_splits, sm_scale, page_size=1, logit_cap=0.0, k_scale=None, v_scale=None",
    "ops.triton.gluon.mla_gluon.mla_gluon": "q_nope, q_pe, kv_c, o, page_table, seq_info, sm_scale, k_pe=None, "
    "kv_pe_offset=512, use_2d_view=True, kv_scale=1.0, min_kv_seq_len=1, return_lse=False, has_pe=True, attn_sink=None",
    "concat_and_cache_mla": "kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """Names, order and defaults are the library's; the device is bound away."""
    parameters = inspect.signature(attrgetter(name)(fake_aiter())).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(map(str, bare)) == SIGNATURES[name]


def test_the_device_can_be_asked_for() -> None:
    library = fake_aiter("gfx950", 256)
    assert library.jit.utils.chip_info.get_gfx() == "gfx950"
    assert library.jit.utils.chip_info.get_cu_num() == 256
    assert library.dtypes.fp8 == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="gfx1250"):
        fake_aiter("gfx1250")
