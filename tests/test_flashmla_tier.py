"""The FlashMLA tier over a stand-in with the kernel's conventions: calls, schedules, empty rows, refusals.

On a GPU with the package, `mla check flashmla` runs the real kernel.
Axes: T new tokens (packed over requests), N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import types
from typing import Any

import pytest
import torch
from simulated_flashmla import Schedule, library, tier
from small_case import Case, make_batch, make_case, make_need

import tiers
from mla.cache import FloatRows, PagedLatentCache
from mla.conformance import run_case
from mla.conformance.cases import DIMS
from mla.conformance.suites import suite
from mla.state import AttentionState
from tiers import tier2_flashmla
from tiers.tier2_flashmla import FlashMLATier

INF = float("inf")
SIZES: dict[str, Any] = {"N": 2, "L": 512, "P": 12, "R": 64, "V": 10, "page_size": 64, "dtype": torch.bfloat16}


def case_of(query_lens: list[int], seq_lens: list[int], **fields: Any) -> Case:
    """A case of the only rows that the kernel takes."""
    return make_case(query_lens, seq_lens, **(SIZES | fields))


def served() -> list:
    """The smoke suite at the kernel's sizes."""
    pinned = {"dims": DIMS["v3_n3"], "dtype": "bf16", "layout": "rows_bf16", "page_size": 64}
    return [dataclasses.replace(case, **pinned) for case in suite("smoke")[::6]]


@pytest.mark.parametrize("case", served(), ids=lambda case: case.id)
def test_conformance(case):
    result = run_case(tier, case)
    assert result.status in ("ok", "refused"), result
    assert result.status == "ok" or result.detail == ""


def test_B_lse_is_natural_and_C_empty_rows_are_minus_infinity():
    case = case_of([1, 3, 0, 2], [70, 0, 0, 130], pad_tokens=2)
    state = case.run(tier)
    case.check(state)
    assert state.lse is not None
    assert state.lse[1:4].eq(-INF).all()
    assert state.out[1:4].eq(0).all()
    assert state.lse[-2:].eq(-INF).all()


def test_a_base_2_lse_would_be_seen():
    def base_2(*args, **options):
        out, lse = library.flash_mla_with_kvcache(*args, **options)
        return out, lse / 0.6931471805599453

    wrong = FlashMLATier(types.SimpleNamespace(**{**vars(library), "flash_mla_with_kvcache": base_2}))
    case = case_of([1, 3], [70, 9])
    with pytest.raises(AssertionError):
        case.check(case.run(wrong))


def test_H_one_call_for_each_query_length_and_one_schedule_for_all_layers():
    made = []
    counting = types.SimpleNamespace(
        flash_mla_with_kvcache=library.flash_mla_with_kvcache,
        get_mla_metadata=lambda: (made.append(Schedule()) or made[-1], None),
    )
    case, counted = case_of([1, 3, 1, 3, 0, 1], [70, 9, 64, 65, 5, 1]), FlashMLATier(counting)
    plan = counted.plan(case.need, case.batch)
    assert [(g.query_len, g.causal, g.lens.tolist()) for g in plan.steps] == [
        (1, False, [70, 64, 1]),
        (3, True, [9, 65]),
    ]
    assert len(made) == 2
    prepared = counted.prepare(case.up, case.need)
    for _ in range(2):
        case.check(counted.attend(case.q, case.cache, prepared, plan))
    counted.plan(case.need, make_batch([1], [33], case.need), into=plan)
    assert len(made) == 3  # other lengths, another schedule
    assert [s.lens.tolist() for s in made[:2]] == [[70, 64, 1], [9, 65]]


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_K_verification_and_ragged_lengths(mask):
    case = case_of([4, 1, 2, 4, 7], [64, 129, 2, 71, 7], mask=mask)
    case.check(case.run(tier))


def test_M_explicit_row_bounds_are_requests_of_one_token():
    case = case_of([2, 3, 1], [70, 9, 0], mask="rows", row_kv_lens=[0, 65, 9, 1, 4, 0])
    plan = tier.plan(case.need, case.batch)
    assert [(g.query_len, g.causal, g.lens.tolist()) for g in plan.steps] == [(1, False, [0, 65, 9, 1, 4])]
    case.check(case.run(tier))


def test_T_out_is_filled_and_returned():
    case = case_of([1, 2], [70, 9])
    out = AttentionState(torch.full((3, 2, 10), 7.0, dtype=torch.bfloat16), torch.full((3, 2), 7.0))
    assert case.run(tier, out) is out
    case.check(out)


def test_I_layout_of_heads_at_the_inner_level():
    case = case_of([2, 1], [70, 3])
    random = torch.Generator().manual_seed(0)
    q_latent, q_pe = (torch.randn(3, 2, n, generator=random).to(torch.bfloat16) for n in (512, 64))
    state = tier.latent(q_latent, q_pe, case.cache, case.batch, case.need)
    rows = [torch.cat(key, -1).double() for key in case.keys]
    query = torch.cat([q_latent, q_pe], -1).double()
    for row, (request, seen) in enumerate([(0, 69), (0, 70), (1, 3)]):
        keys = rows[request][:seen]
        lse = (query[row] @ keys.T * case.need.softmax_scale).logsumexp(-1)
        assert state.parts()[1][row].tolist() == pytest.approx(lse.tolist(), abs=1e-5 + 8e-5 * float(lse.abs().max()))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dtype": torch.float16}, "dtype = torch.float16 is not taken by flashmla, which takes torch.bfloat16"),
        ({"page_size": 128}, "page_size = 128 is not taken by flashmla, which takes 64"),
        ({"L": 256}, r"\(L, R\) = \(256, 64\) is not taken by flashmla, which takes \(512, 64\)"),
        ({"layout": FloatRows(512, 64, torch.float32)}, "a cache of float32 rows is not read by flashmla"),
        ({"batch_invariant": True}, "batch_invariant = True is not promised by flashmla"),
        ({"graph_capture": True}, "graph_capture = True is not offered by flashmla"),
        ({"window": 8}, "window = 8 is not computed by flashmla"),
        ({"sinks": True}, "sinks = True is not computed by flashmla"),
    ],
)
def test_refusals(fields, text):
    with pytest.raises(ValueError, match=text):
        tier.plan(make_need(**(SIZES | fields)), make_batch([1], [3], make_need(**SIZES)))


def test_elsewhere_the_installed_one_refuses_with_device_and_package(monkeypatch):
    reasons = " ".join(tiers.get("flashmla").why_not(make_need(**SIZES)))
    assert "arch 'cpu' is not served by flashmla, whose kernel is for sm_90; use triton." in reasons
    monkeypatch.setattr(tier2_flashmla, "refuse_package", lambda *args: [])
    moved = types.SimpleNamespace(flash_mla_with_kvcache=lambda q, causal: None, get_mla_metadata=None)
    monkeypatch.setattr(tier2_flashmla, "_names", lambda given: (moved.flash_mla_with_kvcache, None))
    tier2_flashmla._moved.cache_clear()
    reasons = " ".join(tiers.get("flashmla").why_not(make_need(**SIZES)))
    assert "flash_mla_with_kvcache has no parameter softmax_scale, use_legacy, which flashmla passes" in reasons
    tier2_flashmla._moved.cache_clear()
    kernel = library.flash_mla_with_kvcache
    one_more = lambda q, k, table, lens, width, schedule, new, *, softmax_scale, causal, use_legacy: None
    old = lambda cache_seqlens, num_heads_q, num_heads_k: None
    for found, text in (
        ((one_more, library.get_mla_metadata), "takes other arguments: missing a required argument: 'new'"),
        ((kernel, old), "takes other arguments: missing a required argument: 'cache_seqlens'"),
    ):
        monkeypatch.setattr(tier2_flashmla, "_names", lambda given, found=found: found)
        assert text in " ".join(tiers.get("flashmla").why_not(make_need(**SIZES)))
        tier2_flashmla._moved.cache_clear()
    monkeypatch.setattr(tier2_flashmla, "_names", lambda given: (kernel, library.get_mla_metadata))
    assert tier2_flashmla._moved() == []
    tier2_flashmla._moved.cache_clear()

    def broken(given):
        raise OSError("undefined symbol")

    monkeypatch.setattr(tier2_flashmla, "_names", broken)
    reasons = " ".join(tiers.get("flashmla").why_not(make_need(**SIZES)))
    assert "sgl-flash-mla cannot be loaded: OSError: undefined symbol" in reasons
    tier2_flashmla._moved.cache_clear()


def test_H_rows_that_the_kernel_would_read_at_other_places_are_refused():
    case = case_of([1, 2], [70, 9])
    wide = torch.zeros(case.cache.num_pages, 64, 577, dtype=torch.bfloat16)
    odd = PagedLatentCache.wrap(wide[..., :576], case.need.layout)
    with pytest.raises(ValueError, match=r"^cache\.data: expected rows aligned to 16 bytes, got strides \(36928, 577,"):
        dataclasses.replace(case, cache=odd).run(tier)
    layers = torch.full((case.cache.num_pages, 3, 64, 576), float("nan"), dtype=torch.bfloat16)
    layers[:, 1] = case.cache.data
    case.check(dataclasses.replace(case, cache=PagedLatentCache.wrap(layers[:, 1], case.need.layout)).run(tier))


@pytest.mark.parametrize("mask", ["causal", "rows"])
def test_T8_tables_and_lengths_of_64_bits_are_handed_over_in_32(mask):
    case = case_of([1, 2], [70, 9], mask=mask, row_kv_lens=[70, 8, 9] if mask == "rows" else None)
    long = {n: getattr(case.batch, n).long() for n in ("block_table", "seq_lens", "row_kv_lens")}
    case.check(dataclasses.replace(case, batch=dataclasses.replace(case.batch, **long)).run(tier))


def test_write_refuses_gradients():
    case = case_of([1], [5])
    kv_c, k_pe = case.keys[0]
    before = case.cache.data.clone().view(torch.uint8)
    with pytest.raises(ValueError, match="requires_grad: expected no gradients through flashmla"):
        tier.write(case.cache, kv_c.clone().requires_grad_(), k_pe, torch.arange(5))
    assert torch.equal(case.cache.data.view(torch.uint8), before)


def test_attend_refuses_gradients():
    case = case_of([1], [5])
    case.q = case.q._replace(nope=case.q.nope.clone().requires_grad_())
    with pytest.raises(ValueError, match="requires_grad: expected no gradients through flashmla"):
        case.run(tier)
