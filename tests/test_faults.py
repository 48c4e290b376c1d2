"""Faults that real MLA code had, on every tier: sizes that were refused, rows that were lost, buffers that grew.

Faults of one module have their tests there; these need the tiers. Ids are those of the list of fault cases.
Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import itertools

import pytest
import torch
from every_tier import every_tier
from small_case import TIERS, fill_cache, make_batch, make_case, make_need, shared_case

import tiers
from mla.cache import FloatRows, PagedLatentCache
from mla.config import MLAConfig
from mla.cost import absorbed_cost, break_even_flops, count_batch, expanded_cost
from mla.need import Capacity, Need
from mla.presets import preset
from mla.state import AttentionState

HALF = (torch.bfloat16, torch.float16)


def sizes(config: MLAConfig, heads: int | None = None) -> dict[str, int]:
    return {"N": heads or config.N, "L": config.L, "P": config.P, "R": config.R, "V": config.V}


def need_of(config: MLAConfig, **fields) -> Need:
    """A bfloat16 Need of a released model, pages of 64."""
    widths = {"page_size": 64, "dtype": torch.bfloat16, "softmax_scale": config.softmax_scale} | fields
    return make_need(**sizes(config), **widths)


# D, E: the score


@pytest.mark.parametrize(
    ("name", "scale"), [("deepseek-v3", 0.13523378), ("deepseek-v2-lite", 0.11472139), ("glm-4.7-flash", 0.0625)]
)
@pytest.mark.parametrize("tier", TIERS)
def test_D7_the_scale_of_the_config_is_the_one_that_every_form_applies(tier, name, scale):
    # one key, and a query whose product with it is 1: the LSE is the scale itself; 576^-0.5 would give 0.0416667
    config = preset(name)
    case = make_case([1], [1], **sizes(config, 2), softmax_scale=config.softmax_scale)
    case.q.nope.zero_(), case.q.pe.zero_(), case.up.W_UK.zero_()
    case.q.nope[:, :, 5], case.up.W_UK[7, :, 5], case.keys[0][0][:, 7] = 1.0, 1.0, 1.0
    case.cache = fill_cache(case.need, case.batch, case.keys)
    lse = case.run(tier).lse
    assert torch.equal(lse, torch.full((1, 2), config.softmax_scale))
    assert lse[0, 0] == pytest.approx(scale, abs=5e-9)


@pytest.mark.parametrize("tier", TIERS)
def test_E4_latent_first_and_rope_last_in_the_row_of_576(tier):
    # absorbed query (ones(512), zeros(64)), row (ones(512), zeros(64)): 512 scale. Slicing the rope part off the front
    # gives 448 scale. All numbers are exact in float32.
    case = make_case([1], [1], N=1, L=512, P=512, R=64, V=3, softmax_scale=2.0**-5)
    for part in (*case.q, *case.keys[0]):
        part.zero_()
    case.q.nope.fill_(1), case.keys[0][0].fill_(1), case.up.W_UK.copy_(torch.eye(512)[:, None])
    case.cache = fill_cache(case.need, case.batch, case.keys)
    assert case.run(tier).lse.item() == 512 / 32


# A, J: prefill of heads whose query is wider than their value


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("context", [0, 20])
def test_A7_J1_outputs_are_V_wide_with_and_without_context_where_queries_are_wider(context, dtype):
    config = preset("deepseek-v3")
    assert (config.P + config.R, config.V) == (192, 128)
    case = shared_case((4,), (context + 4,), **sizes(config, 3), dtype=dtype)
    for name, tier in every_tier(4, context + 4).items():
        state = case.run(tier)
        assert state.out.shape == (4, 3, 128), name
        case.check(state)


# H: pages


def test_H2_a_tier_for_one_page_size_lists_it_before_anything_is_launched():
    def launched(*_):
        raise AssertionError("launched")

    def why_not(need: Need) -> list[str]:
        return [] if need.page_size == 64 else [f"page_size = {need.page_size} is not taken, only 64 is; use 64."]

    tier = tiers.from_attend("only-64", launched, why_not)
    case = make_case([1], [5], page_size=16)
    sentence = "page_size = 16 is not taken, only 64 is; use 64"
    for step in (lambda: tier.plan(case.need, case.batch), lambda: tier.prepare(case.up, case.need)):
        with pytest.raises(ValueError, match=sentence):
            step()
    with pytest.raises(ValueError, match=sentence):
        tiers.compose(tier, tiers.get("naive")).plan(case.need, case.batch)


@pytest.mark.parametrize("form", ["mha", "mqa"])
def test_H4_the_buffer_holds_the_sum_of_the_lengths(form):
    case = shared_case((1, 1, 1, 1), (33, 20, 1, 33), page_size=16)
    tier = tiers.get("paged", form=form)
    plan = tier.plan(case.need, case.batch)
    rows = plan.sizes["rows"][0][0]
    assert rows >= (87 if form == "mha" else 33)
    case.check(tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), plan))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_H5_H6_contexts_that_start_inside_a_page_on_pages_of_1_to_128(dtype):
    for page in (1, 4, 8, 16, 32, 64, 128):
        case = shared_case((3, 1), (13, 150), page_size=page, dtype=dtype)
        for name, tier in every_tier(page, 163).items():
            assert case.check(case.run(tier)).ok, (page, name)
    case = shared_case((3,), (13,), page_size=4, dtype=dtype)  # context 10, chunks of 6 rows
    for form in ("mha", "mqa"):
        case.check(case.run(tiers.get("paged", form=form, max_workspace_tokens=6)))


# I: head counts and widths


@pytest.mark.parametrize("heads", [1, 3, 4, 5, 6, 8, 12, 16, 20])
def test_I1_any_number_of_heads_in_their_order(heads):
    # value n of head n at every key, so that the output names its head
    case = make_case([2, 9], [17, 9], **sizes(preset("deepseek-v3"), heads))
    for kv_c, _ in case.keys:
        kv_c[:, 0] = 1.0
    case.up.W_UV.zero_()
    case.up.W_UV[0] = torch.arange(1.0, heads + 1)[:, None]
    case.cache = fill_cache(case.need, case.batch, case.keys)
    for name, tier in every_tier(4, 26).items():
        out = case.run(tier).out
        assert out.shape == (11, heads, 128), name
        # weights that sum to 1 within (keys + 8) u: see assert_rows in small_case
        error = (out.double() - torch.arange(1.0, heads + 1).double()[:, None]).abs().max()
        assert error <= (2 * 17 + 6) * 2.0**-24 * heads, name


@pytest.mark.parametrize(("model", "heads"), [("deepseek-v2-lite", 16), ("glm-4.7-flash", 20)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_I3_I5_sizes_of_released_models_run_on_every_tier(model, heads, dtype):
    config = preset(model)
    assert sizes(config) == {"N": heads, "L": 512, "R": 64} | (
        {"P": 128, "V": 128} if heads == 16 else {"P": 192, "V": 256}
    )
    case = shared_case((1, 6), (10, 13), **sizes(config), dtype=dtype, softmax_scale=config.softmax_scale)
    for tier in every_tier(4, 23).values():
        case.check(case.run(tier))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_I7_a_query_of_1024_tokens_goes_to_the_prefill_form_and_is_right(dtype):
    for config in (preset("deepseek-v3"), preset("deepseek-v2-lite")):
        need = need_of(config)
        plan = tiers.get("paged").plan(need, make_batch([1024], [1024], need))
        assert plan.report["forms"] == ["mha"]
    case = shared_case((1024,), (1024,), N=1, L=16, P=6, R=4, V=5, page_size=64, dtype=dtype)
    for name in ("naive:mqa", "template", "paged:mha", "paged:mqa"):
        case.check(case.run(name))


# M: verification


@pytest.mark.parametrize("name", ["paged", "paged:mqa"])
def test_M8_verification_of_4_tokens_reads_every_cached_row_once_as_decode_does(name, monkeypatch):
    read: list[int] = []
    gather = PagedLatentCache.gather
    monkeypatch.setattr(
        PagedLatentCache, "gather", lambda self, slots, out=None: read.append(len(slots)) or gather(self, slots, out)
    )
    counts = {}
    for query_len in (1, 4):
        case = make_case([query_len], [3000], N=2, L=64, P=12, R=8, V=10, page_size=64)
        read.clear()
        case.run(name)
        counts[query_len] = sum(read)
    assert counts == {1: 3000, 4: 3000}
    # so that at 32768 keys of V3 the bytes, which bound decode, grow by no more than the query's own
    config = preset("deepseek-v3")
    one, four = (absorbed_cost(config, count_batch([q], [32768])) for q in (1, 4))
    assert four.byte_parts["cache"] == one.byte_parts["cache"]
    assert four.bytes < 1.1 * one.bytes


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_M5_M7_no_row_of_a_padded_verification_is_lost(dtype):
    # 3 requests of 3 tokens, padded to 4 requests: 9 real rows, 3 ignored
    case = shared_case((3, 3, 3, 0), (5, 9, 14, 0), pad_tokens=3, dtype=dtype)
    for name, tier in every_tier(4, 28).items():
        state = case.run(tier)
        case.check(state)
        assert bool((state.out[9:] == 0).all()), name
        assert bool((state.lse[9:] == float("-inf")).all()), name
        rows = state.lse[:9].flatten().tolist()
        assert len(set(rows)) == 27, name


# Q: mixed batches in any order


def test_Q1_any_order_of_a_prefill_tail_decodes_and_a_prefill():
    # (new tokens, keys): a prefill's last token, two verifications, a prefill
    requests = [(1, 40), (2, 21), (2, 33), (9, 9)]
    case = shared_case(tuple(q for q, _ in requests), tuple(s for _, s in requests), L=96)
    expected = {"mqa"}, {"mha"}
    tried = {n: t for n, t in every_tier(4, 103).items() if n in ("naive:mha", "template", "paged") or "prefill=" in n}
    for order in itertools.permutations(range(4)):
        batch, rows = case.batch.select(order)
        for name, tier in tried.items():
            plan = tier.plan(case.need, batch)
            q = type(case.q)(*(x[rows] for x in case.q))
            state = tier.attend(q, case.cache, tier.prepare(case.up, case.need), plan)
            case.check(AttentionState(*(torch.empty_like(x).index_copy_(0, rows, x) for x in state)))
            if name == "paged":
                forms = dict(zip(order, plan.report["forms"], strict=True))
                assert ({forms[b] for b in (0, 1, 2)}, {forms[3]}) == expected
            if name.startswith("decode="):
                assert plan.report["decode"]["forms"] == ["mqa"] * 3


# R: work and memory


def test_R1_8k_prefill_at_V3_size_costs_3_2_times_the_FLOPs_when_absorbed_and_runs_expanded():
    config = preset("deepseek-v3")
    prefill, decode = count_batch([8192], [8192]), count_batch([1], [8192])
    pairs = 8192 * 8193 // 2
    expanded, absorbed = expanded_cost(config, prefill).flops, absorbed_cost(config, prefill).flops
    up = 2 * 8192 * 512 * 128 * 256
    assert (expanded, absorbed) == (pairs * 128 * 640 + up, pairs * 128 * 2176 + up)
    assert 3.0 < absorbed / expanded < 3.4
    assert absorbed_cost(config, decode).flops < expanded_cost(config, decode).flops / 100
    assert break_even_flops(config) == pytest.approx(170.67, abs=0.01)  # the cross-over, in query tokens
    need = need_of(config)
    form = lambda q, s: tiers.get("paged").plan(need, make_batch([q], [s], need)).report["forms"]
    assert (form(8192, 8192), form(1, 8192), form(4, 8192)) == (["mha"], ["mqa"], ["mqa"])


@pytest.mark.parametrize("context", [65_536, 131_072, 262_144])
def test_R2_memory_of_a_prefill_is_that_of_the_cap_for_any_context(context):
    cap, config = 65_536, preset("deepseek-v3")
    need = need_of(config)
    batch = make_batch([512], [context], need)
    plan = tiers.get("paged", form="mha", max_workspace_tokens=cap).plan(need, batch)
    assert plan.report["chunks"] == context // cap
    assert plan.nbytes == cap * (576 + 128 * 256) * 2
    assert plan.nbytes <= cap * 128 * 320 * 2


def test_R2_the_size_is_known_before_any_batch_and_bounds_every_batch():
    limits = Capacity(max_requests=4, max_tokens=1024, max_query_len=512, max_seq_len=4096)
    need = need_of(preset("deepseek-v3"), capacity=limits)
    tier = tiers.get("paged", max_workspace_tokens=1024)
    empty = tier.plan(need, make_batch([], [], need)).nbytes
    for q, s in (([1] * 4, [4096] * 4), ([512, 512], [4096, 512]), ([512, 1], [512, 4096])):
        assert tier.plan(need, make_batch(q, s, need)).nbytes == empty


# layouts that no tier was made for


def test_I6_R_of_0_runs_and_rows_are_the_latent_alone():
    need = make_need(R=0, L=512)
    assert need.layout == FloatRows(512, 0, torch.float32)
    assert need.layout.row_bytes == 2048
    for dtype in (torch.float32, *HALF):
        case = shared_case((3, 1), (20, 9), R=0, dtype=dtype)
        for tier in every_tier(4, 29).values():
            case.check(case.run(tier))
