"""MLALayer: what it does around a tier, against a layer written here in float64 with `mla.oracle`.

Rounding. A product over n terms of unit gain is off by at most n u of its size; a score of size s passes its error on s
times. So the layer in float64 may differ from `plain_layer` by (H + Lq + L + P + R + S + N V) u (1 + max|lse|),
u = 2^-53, relative to the output: about 1e-13. In 16 and 32 bits the layer is compared at the level of `attend`, on the
query and the rows that it made, by the budget of `mla.accuracy`.

T new tokens (packed over requests), S cached tokens, H hidden, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tiers
from mla.accuracy import Reference, compare, reference
from mla.batch import AttentionBatch
from mla.cache import FloatRows, PagedLatentCache
from mla.config import MLAConfig, RopeConfig
from mla.layer import InputSide, MLALayer
from mla.need import Capacity, Need
from mla.oracle import oracle
from mla.presets import V3, preset
from mla.projections import Query, UpProjection, project_output, rms_norm
from mla.rope import amplitude, apply_rope, inverse_frequencies
from mla.tier import Plan, Prepared, Tier
from mla.weights import MLAWeights, hf_shapes

CONFIG = preset("toy")
PAGE, PAGES = 4, 32
FLOAT64 = torch.float64
TIERS: dict[str, Any] = {name: name for name in ("naive:mha", "naive:mqa", "paged", "paged:mha", "paged:mqa")} | {
    "template": "template",
    "composed": {"decode": "naive:mqa", "prefill": "paged:mha"},
}
CONFIGS = {
    "toy": CONFIG,
    "half-split": CONFIG.replace(rope=dataclasses.replace(CONFIG.rope, interleaved=False)),
    "direct query": CONFIG.replace(q_lora_rank=None),
    "bias": CONFIG.replace(attention_bias=True),
    "unrotated": CONFIG.replace(rope=RopeConfig(type="none")),
    "no rope": CONFIG.replace(qk_rope_head_dim=0),
    "multipliers": CONFIG.replace(q_lora_multiplier=1.5, kv_lora_multiplier=0.5),
    "llama-4": CONFIG.replace(
        rope=dataclasses.replace(CONFIG.rope, llama_4_scaling_beta=0.3, original_max_position_embeddings=4)
    ),
}
# New tokens of three requests in each step; every schedule ends at 17, 6 and 9 keys.
SCHEDULES = {
    "whole": [(17, 6, 9)],
    "chunks": [(5, 0, 9), (1, 2, 0), (11, 4, 0)],
    "token by token": [(1, 1, 1)] * 6 + [(1, 0, 1)] * 3 + [(1, 0, 0)] * 8,
    "prefill, then decode": [(9, 1, 3), (5, 2, 5), (1, 1, 1), (1, 1, 0), (1, 1, 0)],
}
LENGTHS = (17, 6, 9)


def tier_of(name: str) -> Tier:
    return tiers.get(TIERS[name])


def make_layer(
    tier: str | Tier = "naive:mha", config: MLAConfig = CONFIG, dtype: torch.dtype = FLOAT64, **options: Any
) -> MLALayer:
    weights = options.pop("weights", None) or MLAWeights.random(config, seed=3, dtype=dtype)
    return MLALayer(config, weights, tier_of(tier) if isinstance(tier, str) else tier, page_size=PAGE, **options)


def poisoned(layer: MLALayer) -> PagedLatentCache:
    cache = layer.new_cache(PAGES)
    cache.data.fill_(float("nan"))
    return cache


def shuffled(requests: int, seed: int = 0) -> Tensor:
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))
    return order[: PAGES // requests * requests].view(requests, -1)


def batch_of(query_lens: Sequence[int], seq_lens: Sequence[int], pages: Any = None, **options: Any) -> AttentionBatch:
    pages = shuffled(len(query_lens)) if pages is None else pages
    return AttentionBatch.bottom_right(query_lens, seq_lens, pages, page_size=PAGE, num_pages=PAGES, **options)


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = FLOAT64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64).to(dtype)


def plain_layer(hidden: Tensor, w: MLAWeights, config: MLAConfig, mask: str = "causal") -> tuple[Tensor, float]:
    """One request (S, H) from position 0, all at once, by eqs. 9 to 19 of DeepSeek-V2; and its bound on rounding."""
    S = hidden.shape[0]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    def rotate(x: Tensor) -> Tensor:
        """(S, heads, R): pair i is a complex number, turned by position * frequency i."""
        if config.R == 0:
            return x
        angle = torch.arange(S)[:, None] * inverse_frequencies(config.rope, config.R)
        turn = torch.polar(torch.full_like(angle, amplitude(config.rope)), angle)[:, None]
        if config.rope.interleaved:
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
        a, b = x.chunk(2, -1)
        turned = torch.complex(a, b) * turn
        return torch.cat([turned.real, turned.imag], -1)

    zero = torch.zeros((), dtype=FLOAT64)
    q_c = hidden
    if w.W_DQ is not None and w.q_norm is not None:
        q_c = norm(hidden @ w.W_DQ + (zero if w.b_DQ is None else w.b_DQ), w.q_norm) * config.q_lora_multiplier
    q_nope, q_pe = torch.einsum("sq,qnp->snp", q_c, w.W_UQ), rotate(torch.einsum("sq,qnr->snr", q_c, w.W_QR))
    if config.rope.llama_4_scaling_beta is not None:
        window = torch.arange(S) // (config.rope.original_max_position_embeddings or 1)
        heat = 1 + config.rope.llama_4_scaling_beta * torch.log(1.0 + window.to(FLOAT64))[:, None, None]
        q_nope, q_pe = q_nope * heat, q_pe * heat
    kv_c = norm(hidden @ w.W_DKV + (zero if w.b_DKV is None else w.b_DKV), w.kv_norm) * config.kv_lora_multiplier
    k_pe = rotate((hidden @ w.W_KR + (zero if w.b_KR is None else w.b_KR))[:, None])[:, 0]
    seen = torch.full((S,), S) if mask == "full" else torch.arange(1, S + 1)
    out, lse = oracle(q_nope, q_pe, kv_c, k_pe, w.W_UK, w.W_UV, seen, config.softmax_scale)
    u = torch.einsum("snv,nvh->sh", out, w.W_O) + (zero if w.b_O is None else w.b_O)
    terms = config.H + (config.Lq or 0) + config.L + config.P + config.R + S + config.N * config.V
    return u, terms * 2**-53 * (1 + float(lse.abs().max())) * float(u.abs().max())


def assert_plain(found: Tensor, hidden: Tensor, layer: MLALayer, mask: str = "causal") -> None:
    expected, bound = plain_layer(hidden, layer.weights, layer.config, mask)
    assert float((found - expected).abs().max()) <= bound


def replay(layer: MLALayer, hidden: Sequence[Tensor], schedule: Sequence[Sequence[int]]) -> list[Tensor]:
    """All steps over one cache, one refilled plan; each request's outputs."""
    cache, seen, plan = poisoned(layer), [0] * len(hidden), None
    outputs: list[list[Tensor]] = [[] for _ in hidden]
    for step in schedule:
        rows = [h[n : n + q] for h, n, q in zip(hidden, seen, step, strict=True)]
        seen = [n + q for n, q in zip(seen, step, strict=True)]
        batch = batch_of(step, seen)
        plan = layer.plan(batch, into=plan)
        for parts, part in zip(outputs, layer(torch.cat(rows), cache, batch, plan).split(list(step)), strict=True):
            parts.append(part)
    return [torch.cat(parts) for parts in outputs]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tier", TIERS)
def test_tokens_chunks_and_prefill_are_the_plain_layer(tier: str, schedule: str) -> None:
    layer = make_layer(tier)
    hidden = [draw(n, CONFIG.H, seed=n) for n in LENGTHS]
    for found, h in zip(replay(layer, hidden, SCHEDULES[schedule]), hidden, strict=True):
        assert_plain(found, h, layer)


@pytest.mark.parametrize("tier", ["naive:mha", "paged:mha", "paged:mqa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_config_is_the_plain_layer(name: str, tier: str) -> None:
    layer = make_layer(tier, CONFIGS[name])
    hidden = [draw(n, CONFIG.H, seed=n) for n in LENGTHS]
    for found, h in zip(replay(layer, hidden, SCHEDULES["chunks"]), hidden, strict=True):
        assert_plain(found, h, layer)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "toy"])
def test_the_plain_layer_tells_configs_apart(name: str) -> None:
    """Else the test above could not fail: the toy layer with the other's weights, where they fit, is off by 1e-3."""
    config = CONFIGS[name]
    layer, hidden = make_layer(config=config), draw(17, CONFIG.H)
    expected, bound = plain_layer(hidden, layer.weights, config)
    fits = {"rope": CONFIG.rope, "q_lora_multiplier": 1.0, "kv_lora_multiplier": 1.0}
    other = config.replace(**fits) if name in ("half-split", "unrotated", "multipliers", "llama-4") else CONFIG
    wrong, _ = plain_layer(hidden, layer.weights if other != CONFIG else MLAWeights.random(CONFIG, 3, FLOAT64), other)
    assert float((wrong - expected).abs().max()) > max(1e-3, bound)


# The budget, at the level of attend, on what the layer made


@functools.cache
def step_of(dtype: torch.dtype, row_dtype: torch.dtype) -> tuple[AttentionBatch, Tensor, Tensor, Reference]:
    """A mixed step after an earlier one: its batch, the context's and the step's hidden states, and its budget."""
    layer = make_layer(dtype=dtype)
    context, hidden = draw(20, CONFIG.H, dtype=dtype), draw(12, CONFIG.H, seed=2, dtype=dtype)
    batch = batch_of((1, 3, 7), (14, 10, 7), pad_tokens=1)
    _, old_kv, old_pe = layer.project(context, torch.cat([torch.arange(13), torch.arange(7)]))
    q, kv_c, k_pe = layer.project(hidden, batch.positions)
    rows, layout = [], FloatRows(CONFIG.L, CONFIG.R, row_dtype)
    for old, new in ((slice(0, 13), slice(0, 1)), (slice(13, 20), slice(1, 4)), (slice(0, 0), slice(4, 11))):
        rows.append(layout.round_trip(torch.cat([old_kv[old], kv_c[new]]), torch.cat([old_pe[old], k_pe[new]])))
    truth = reference(q, rows, layer.weights.up, batch, CONFIG.softmax_scale, dtype=dtype, seed=0)
    return batch, context, hidden, truth


DTYPES = [(d, d) for d in (torch.float32, torch.bfloat16, torch.float16)] + [(torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("dtype", "row_dtype"), DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_what_the_layer_gives_its_tier_meets_the_budget(tier: str, dtype: torch.dtype, row_dtype: torch.dtype) -> None:
    batch, context, hidden, truth = step_of(dtype, row_dtype)
    layer = make_layer(tier, dtype=dtype, lse=True, layout=FloatRows(CONFIG.L, CONFIG.R, row_dtype))
    cache = poisoned(layer)
    layer(context, cache, batch_of((13, 7, 0), (13, 7, 0)))
    plan = layer.plan(batch)
    u = layer(hidden, cache, batch, plan)
    q, _, _ = layer.project(hidden, batch.positions)
    state = layer.tier.attend(q, cache, layer.prepared, plan)
    result = compare(state, truth)
    assert result.ok, result
    assert torch.equal(u, project_output(state.out, layer.weights))
    assert u.dtype == dtype


def test_new_tokens_see_their_own_row_as_the_cache_holds_it() -> None:
    """float32 queries over bfloat16 rows: the budget of exact rows is broken, that of rounded rows (above) is met."""
    batch, context, hidden, _ = step_of(torch.float32, torch.bfloat16)
    exact = step_of(torch.float32, torch.float32)[3]
    layer = make_layer(dtype=torch.float32, lse=True, layout=FloatRows(CONFIG.L, CONFIG.R, torch.bfloat16))
    cache = poisoned(layer)
    layer(context, cache, batch_of((13, 7, 0), (13, 7, 0)))
    q, kv_c, k_pe = layer.project(hidden, batch.positions)
    layer.tier.write(cache, kv_c, k_pe, batch.slot_mapping)
    used = compare(layer.tier.attend(q, cache, layer.prepared, layer.plan(batch)), exact)
    assert used.used_out > 100
    assert batch.seq_lens_host[2] == batch.query_lens_host[2] == 7  # this request has no row but its own


@pytest.mark.parametrize("tier", TIERS)
def test_one_projection_serves_every_tier(tier: str) -> None:
    """A replay projects once: `project` of any layer with these weights is bit for bit what `forward` attends with."""
    layer, hidden, batch = make_layer(tier), draw(9, CONFIG.H), batch_of((9,), (9,), shuffled(1))
    q, kv_c, k_pe = make_layer("naive:mha").project(hidden, batch.positions)
    cache, plan = poisoned(layer), layer.plan(batch)
    layer.tier.write(cache, kv_c, k_pe, batch.slot_mapping)
    out = layer.tier.attend(q, cache, layer.prepared, plan).out
    assert torch.equal(project_output(out, layer.weights), layer(hidden, poisoned(layer), batch, plan))


# What is written


def test_A14_a_prefill_of_7_writes_7_rows_each_in_its_slot() -> None:
    layer, hidden, batch = make_layer(), draw(7, CONFIG.H), batch_of((7,), (7,), [[5, 2]])
    cache = poisoned(layer)
    layer(hidden, cache, batch)
    rows = cache.data.flatten(0, 1)
    slots = [20, 21, 22, 23, 8, 9, 10]
    _, kv_c, k_pe = layer.project(hidden, torch.arange(7))
    assert torch.equal(rows[slots], torch.cat([kv_c, k_pe], -1))
    assert (~rows.isnan()).any(-1).nonzero().flatten().tolist() == sorted(slots)


@pytest.mark.parametrize("tier", TIERS)
def test_rows_of_slot_minus_1_are_attended_with_but_not_written(tier: str) -> None:
    """A full prefix hit recomputes its last tokens: same output, cache untouched bit for bit."""
    layer, hidden, pages = make_layer(tier), draw(9, CONFIG.H), shuffled(1)
    cache = poisoned(layer)
    first = layer(hidden, cache, batch_of((9,), (9,), pages))
    before = cache.data.clone()
    again = layer(hidden[6:], cache, batch_of((3,), (9,), pages, slots=[-1, -1, -1]))
    assert torch.equal(cache.data.view(torch.int64), before.view(torch.int64))
    expected, bound = plain_layer(hidden, layer.weights, CONFIG)
    assert float((first - expected).abs().max()) <= bound
    assert float((again - expected[6:]).abs().max()) <= bound


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_empty_rows_are_0_or_the_output_bias_and_poison_nobody(tier: str, bias: bool) -> None:
    layer = make_layer(tier, CONFIGS["bias"] if bias else CONFIG)
    hidden = torch.cat([draw(5, CONFIG.H), torch.full((4, CONFIG.H), float("nan"), dtype=FLOAT64)])
    batch = batch_of((5, 2), (5, 0), pad_tokens=2)
    out = layer(hidden, poisoned(layer), batch)
    assert_plain(out[:5], hidden[:5], layer)
    empty = torch.zeros(CONFIG.H, dtype=FLOAT64) if layer.weights.b_O is None else layer.weights.b_O
    assert torch.equal(out[5:], empty.expand(4, -1))


@pytest.mark.parametrize("tier", TIERS)
def test_an_empty_batch_is_an_empty_output(tier: str) -> None:
    layer = make_layer(tier)
    assert layer(draw(0, CONFIG.H), layer.new_cache(PAGES), batch_of((), (), [])).shape == (0, CONFIG.H)


# Fault cases at the level of the layer


@pytest.mark.parametrize("tier", TIERS)
def test_A8_a_prefix_hit_without_chunking_equals_the_run_without_cache(tier: str) -> None:
    """16 tokens another request left in shared pages, 4 new ones: as if all 20 were computed."""
    layer, hidden = make_layer(tier), draw(20, CONFIG.H)
    cache = poisoned(layer)
    layer(hidden[:16], cache, batch_of((16,), (16,), [[3, 1, 4, 7]]))
    found = layer(hidden[16:], cache, batch_of((4,), (20,), [[3, 1, 4, 7, 9]]))
    expected, bound = plain_layer(hidden, layer.weights, CONFIG)
    assert float((found - expected[16:]).abs().max()) <= bound


@pytest.mark.parametrize("tier", TIERS)
def test_A10_the_prefix_counts_in_the_softmax(tier: str) -> None:
    """Query 0, context 12, 4 new tokens: each row is the mean of 13 to 16 values; without the prefix of 1 to 4."""
    whole = MLAWeights.random(CONFIG, seed=3, dtype=FLOAT64)
    weights = dataclasses.replace(whole, W_UQ=torch.zeros_like(whole.W_UQ), W_QR=torch.zeros_like(whole.W_QR))
    layer, hidden, pages = make_layer(tier, weights=weights), draw(16, CONFIG.H), shuffled(1)
    hidden[:12] += 1.0
    cache = poisoned(layer)
    layer(hidden[:12], cache, batch_of((12,), (12,), pages))
    found = layer(hidden[12:], cache, batch_of((4,), (16,), pages))
    _, kv_c, _ = layer.project(hidden, torch.arange(16))
    value = torch.einsum("sl,lnv->snv", kv_c, weights.W_UV)
    means = torch.stack([value[: 13 + i].mean(0) for i in range(4)])
    alone = torch.stack([value[12 : 13 + i].mean(0) for i in range(4)])
    expected, wrong = (torch.einsum("snv,nvh->sh", x, weights.W_O) for x in (means, alone))
    terms = CONFIG.L + 16 + CONFIG.N * CONFIG.V + 8  # three sums, and exp and log of an lse of ln 16
    gain = float(weights.W_O.abs().sum((0, 1)).max())
    assert float((found - expected).abs().max()) <= terms * 2**-53 * float(value.abs().max()) * gain
    assert float((found - wrong).abs().max()) > 0.1


@pytest.mark.parametrize("tier", TIERS)
def test_A11_strided_weights_and_caches_are_as_good_as_contiguous_ones(tier: str) -> None:
    """W_UK and W_UV as views of one kv_b_proj, hidden states and pages as slices of an engine's larger tensors."""
    dense = MLAWeights.random(CONFIG, seed=3, dtype=FLOAT64)
    both = torch.cat([dense.W_UK, dense.W_UV], -1)
    weights = dataclasses.replace(dense, W_UK=both[..., : CONFIG.P], W_UV=both[..., CONFIG.P :])
    engine = torch.full((PAGES, 2, PAGE, CONFIG.L + CONFIG.R), float("nan"), dtype=FLOAT64)
    hidden = draw(17, 2 * CONFIG.H)[:, CONFIG.H :]
    layer = make_layer(tier, weights=weights)
    cache = PagedLatentCache.wrap(engine[:, 1], layer.need.layout)
    assert not any(x.is_contiguous() for x in (weights.W_UK, hidden, cache.data))
    assert_plain(layer(hidden, cache, batch_of((17,), (17,))), hidden, make_layer(weights=dense))
    assert engine[:, 0].isnan().all()


def test_E7_the_shared_rope_key_has_R_columns_not_P() -> None:
    layer = make_layer()
    q, kv_c, k_pe = layer.project(draw(5, CONFIG.H), torch.arange(5))
    N, L, P, R = CONFIG.N, CONFIG.L, CONFIG.P, CONFIG.R
    assert (q.nope.shape, q.pe.shape, kv_c.shape, k_pe.shape) == ((5, N, P), (5, N, R), (5, L), (5, R))
    assert layer.new_cache(1).data.shape == (1, PAGE, L + R)
    assert layer.state_dict()["kv_a_proj_with_mqa.weight"].shape == (L + R, CONFIG.H)


def test_P6_without_a_query_rank_there_is_q_proj_and_no_query_norm() -> None:
    layer = make_layer(config=CONFIGS["direct query"])
    names = [name for name in layer.state_dict() if name.startswith("q_")]
    assert names == ["q_proj.weight"]
    assert layer.weights.q_norm is None


def test_J3_num_key_value_heads_is_ignored() -> None:
    """In MLA every head has its own key and value: the field says nothing, whatever it is."""
    fields = V3 | {"hidden_size": 40, "num_attention_heads": 3, "q_lora_rank": 20, "kv_lora_rank": 32}
    fields |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    hidden, outs = draw(6, CONFIG.H), []
    for heads in (3, 1, 128):
        config = MLAConfig.from_hf(fields | {"num_key_value_heads": heads})
        layer = make_layer(config=config)
        outs.append(layer(hidden, poisoned(layer), batch_of((6,), (6,))))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_the_mask_of_the_layer_is_that_of_its_batches(mask: str) -> None:
    other = {"causal": "full", "full": "causal"}[mask]
    layer, hidden = make_layer("paged", mask=mask), draw(6, CONFIG.H)
    assert_plain(layer(hidden, poisoned(layer), batch_of((6,), (6,), mask=mask)), hidden, layer, mask)
    with pytest.raises(ValueError, match=r"batch\.mask: expected '?" + mask):
        layer(hidden, poisoned(layer), batch_of((6,), (6,), mask=other))


# Tensor parallelism


@pytest.mark.parametrize("tier", ["naive:mqa", "paged:mha", "paged:mqa"])
def test_the_ranks_of_a_tensor_parallel_layer_sum_to_the_whole(tier: str) -> None:
    config = CONFIGS["bias"]
    weights, hidden = MLAWeights.random(config, seed=3, dtype=FLOAT64), draw(17, CONFIG.H)
    ranks = [make_layer(tier, config, weights=weights.shard(rank, 3)) for rank in range(3)]
    assert [layer.need.N for layer in ranks] == [1, 1, 1]
    parts = [layer(hidden, poisoned(layer), batch_of((17,), (17,))) for layer in ranks]
    expected, bound = plain_layer(hidden, weights, config)
    assert float((sum(parts) - expected).abs().max()) <= bound
    assert float((parts[0] - expected).abs().max()) > 0.1


# A tier that takes norm, rotation and write into its own hands


class Fused(Tier):
    """The naive tier with a plain `fused_input`; counts its calls."""

    def __init__(self) -> None:
        self.inner, self.calls = tier_of("naive:mha"), 0
        self.name, self.why_not, self.prepare, self.plan = (
            getattr(self.inner, name) for name in ("name", "why_not", "prepare", "plan")
        )

    def write(self, *_: Any) -> None:
        raise AssertionError("fused_input writes")

    def attend(self, q: Query, cache: PagedLatentCache, *rest: Any) -> Any:
        return self.inner.attend(q, cache, *rest)

    def fused_input(
        self, q: Query, kv_c: Tensor, k_pe: Tensor, side: InputSide, cache: PagedLatentCache, batch: AttentionBatch
    ) -> Query:
        self.calls += 1
        angles = (batch.positions[:, None] * side.turns).to(FLOAT64) * (2 * math.pi / 2**64)
        cos, sin = angles.cos() * side.amplitude, angles.sin() * side.amplitude
        normed = rms_norm(kv_c, side.kv_norm, side.eps) * side.multiplier
        cache.write(normed, apply_rope(k_pe, cos, sin, side.interleaved), batch.slot_mapping)
        return Query(q.nope, apply_rope(q.pe, cos, sin, side.interleaved))


YARN = RopeConfig(type="yarn", factor=40.0, original_max_position_embeddings=8)


@pytest.mark.parametrize("name", [*CONFIGS, "yarn"])
def test_a_layer_whose_tier_fuses_the_input_is_the_plain_layer(name: str) -> None:
    tier, config = Fused(), (CONFIGS | {"yarn": CONFIG.replace(rope=YARN)})[name]
    layer = make_layer(tier, config)
    hidden = [draw(n, CONFIG.H, seed=n) for n in LENGTHS]
    for found, h in zip(replay(layer, hidden, SCHEDULES["chunks"]), hidden, strict=True):
        assert_plain(found, h, layer)
    assert tier.calls == len(SCHEDULES["chunks"])


def test_a_wrong_call_never_reaches_a_fused_input() -> None:
    tier = Fused()
    layer, hidden, batch = make_layer(tier), draw(6, CONFIG.H), batch_of((6,), (6,))
    cache, other = poisoned(layer), make_layer(Fused(), layout=FloatRows(CONFIG.L, CONFIG.R, torch.float32))
    calls = {
        r"hidden: expected shape \(T, 40\)": lambda: layer(draw(6, 39), cache, batch),
        r"hidden: .*float64.*got torch.float32": lambda: layer(hidden.float(), cache, batch),
        r"positions: expected shape \(7,\)": lambda: layer(draw(7, CONFIG.H), cache, batch),
        r"cache\.page_size": lambda: layer(hidden, dataclasses.replace(cache, page_size=8), batch),
        r"cache\.num_pages": lambda: layer(hidden, layer.new_cache(PAGES - 1), batch),
        r"plan": lambda: layer(hidden, cache, batch, other.plan(batch)),
    }
    for match, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=match):
            call()
    assert tier.calls == 0


def test_a_layer_with_other_weights_has_their_input_side() -> None:
    layer, hidden, batch = make_layer(Fused()), draw(6, CONFIG.H), batch_of((6,), (6,))
    other = make_layer(Fused(), weights=MLAWeights.random(CONFIG, 7, FLOAT64))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(hidden, poisoned(layer), batch), other(hidden, poisoned(other), batch))
    layer.to(torch.float32)
    built = make_layer(Fused(), weights=layer.weights)
    hidden = hidden.float()
    assert torch.equal(layer(hidden, poisoned(layer), batch), built(hidden, poisoned(built), batch))


# Profiling call


CAPACITY = Capacity(max_requests=4, max_tokens=24, max_query_len=20, max_seq_len=40)


@pytest.mark.parametrize("tier", TIERS)
def test_the_profiling_call_returns_zeros_and_reserves_the_worst_case(tier: str) -> None:
    layer = make_layer(tier, capacity=CAPACITY)
    plan = layer.plan()
    worst = plan.nbytes
    out = layer(draw(24, CONFIG.H), plan=plan)
    assert torch.equal(out, torch.zeros(24, CONFIG.H, dtype=FLOAT64))
    held = buffers(plan)
    assert sum(x.nbytes for x in held.values()) == worst == plan.nbytes
    batch = batch_of((1, 3, 20), (40, 3, 20))
    cache = poisoned(layer)
    cache.data.fill_(1.0)  # stands for 39 keys of an earlier step
    layer(draw(24, CONFIG.H), cache, batch, layer.plan(batch, into=plan))
    assert plan.nbytes == worst
    assert {name: x.data_ptr() for name, x in buffers(plan).items()} == {n: x.data_ptr() for n, x in held.items()}


def buffers(plan: Any, at: str = "") -> dict[str, Tensor]:
    found = {at + name: x for name, x in plan._buffers.items()}
    for i, part in enumerate(plan.parts):
        found |= buffers(part, f"{at}{i}.")
    return found


def test_the_worst_case_of_paged_is_its_cap_in_rows_keys_and_values() -> None:
    layer = make_layer(tiers.get("paged", max_workspace_tokens=16), capacity=CAPACITY)
    assert layer.plan().nbytes == 16 * 8 * ((32 + 8) + 3 * (12 + 10))
    composed = make_layer(
        tiers.compose(tiers.get("naive"), tiers.get("paged", max_workspace_tokens=16)), capacity=CAPACITY
    )
    assert composed.plan().nbytes == layer.plan().nbytes
    absorbing = make_layer(tiers.get("paged", form="mqa", max_workspace_tokens=16), capacity=CAPACITY)
    assert absorbing.plan().nbytes == 16 * 8 * (32 + 8)


def test_without_capacity_there_is_no_worst_case_and_it_says_so() -> None:
    layer = make_layer("paged")
    for call in (layer.plan, lambda: layer(draw(3, CONFIG.H))):
        with pytest.raises(ValueError, match=r"capacity: expected a Capacity.*got None.*capacity=Capacity"):
            call()


def test_the_profiling_call_checks_hidden_and_plan() -> None:
    layer = make_layer("paged", capacity=CAPACITY)
    with pytest.raises(ValueError, match=r"hidden: expected shape \(T, 40\)"):
        layer(draw(3, 41))
    with pytest.raises(ValueError, match="into: expected a plan of the same Need"):
        layer(draw(3, CONFIG.H), plan=make_layer("paged", capacity=CAPACITY, lse=True).plan())


def test_a_step_beyond_capacity_names_the_promise() -> None:
    layer = make_layer("paged", capacity=CAPACITY)
    with pytest.raises(ValueError, match=r"max_query_len.*at most 20.*21"):
        layer.plan(batch_of((21,), (21,)))


# Refusals at construction


REFUSED_NEEDS: dict[str, Any] = {
    "window": 4,
    "sinks": True,
    "softcap": 30.0,
    "alibi": True,
    "kv_sharing": True,
    "output_quantisation": "fp8",
    "graph_capture": True,
    "batch_invariant": True,
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", REFUSED_NEEDS)
def test_T1_what_the_tier_cannot_do_is_refused_at_construction_by_name(name: str, tier: str) -> None:
    with pytest.raises(ValueError, match=rf"refuses: .*{name}"):
        make_layer(tier, **{name: REFUSED_NEEDS[name]})


def test_a_tier_whose_prepare_does_not_ask_is_asked_by_the_layer() -> None:
    class Careless(Tier):
        name = "careless"

        def why_not(self, need: Need) -> list[str]:
            return [f"page_size = {need.page_size} is not 64; use page_size = 64."]

        def prepare(self, up: UpProjection, need: Need) -> Prepared:
            return Prepared(up, need)

        def attend(self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: Any = None) -> Any:
            raise AssertionError("never reached")

    with pytest.raises(ValueError, match=r"'careless' refuses: page_size = 4 is not 64; use page_size = 64\."):
        make_layer(Careless())


def test_a_model_with_more_than_mla_is_refused_by_field() -> None:
    config = preset("hy4")
    with pytest.raises(ValueError, match="index_topk"):
        MLALayer(config, MLAWeights.random(CONFIG), tiers.get("naive"))


def test_options_and_tier_are_checked_by_name() -> None:
    with pytest.raises(TypeError, match=r"capacty: .*did you mean 'capacity'"):
        make_layer(capacty=CAPACITY)
    with pytest.raises(TypeError, match=r"softmax_scale: .*config and weights give it"):
        make_layer(softmax_scale=1.0)
    with pytest.raises(TypeError, match=r"tier: expected a tier, got 'paged'.*tiers\.get"):
        MLALayer(CONFIG, MLAWeights.random(CONFIG), "paged")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layout: .*L=32, R=8"):
        make_layer(layout=FloatRows(16, 8))
    with pytest.raises(TypeError, match=r"^config: expected a MLAConfig, got None"):
        MLALayer(None, MLAWeights.random(CONFIG), make_layer().tier)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^weights: expected a MLAWeights, got None"):
        MLALayer(CONFIG, None, make_layer().tier)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^hidden: expected a Tensor, got None"):
        make_layer(capacity=CAPACITY)(None)


@pytest.mark.parametrize(
    ("config", "weights", "match"),
    [
        (CONFIG.replace(hidden_size=41), CONFIG, r"H = 41 of config 'toy', got 40"),
        (CONFIG.replace(q_lora_rank=None), CONFIG, r"Lq = None.*got 20"),
        (CONFIG.replace(kv_lora_rank=16), CONFIG, r"L = 16.*got 32"),
        (CONFIG.replace(qk_nope_head_dim=10), CONFIG, r"P = 10.*got 12"),
        (CONFIG.replace(qk_rope_head_dim=4), CONFIG, r"R = 4.*got 8"),
        (CONFIG.replace(v_head_dim=12), CONFIG, r"V = 12.*got 10"),
        (CONFIG.replace(attention_bias=True), CONFIG, r"attention_bias = True.*got False"),
        (CONFIG.replace(num_attention_heads=4), CONFIG, r"the 4 heads of config 'toy', or an equal share, got 3 heads"),
    ],
)
def test_weights_of_another_config_are_refused_by_dimension(config: MLAConfig, weights: MLAConfig, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_layer(config=config, weights=MLAWeights.random(weights, dtype=FLOAT64))


# Refusals of a call: nothing is written


def test_a_wrong_call_names_the_argument_and_writes_nothing() -> None:
    layer, hidden, batch = make_layer("paged"), draw(6, CONFIG.H), batch_of((6,), (6,))
    cache, other = poisoned(layer), make_layer("paged", layout=FloatRows(CONFIG.L, CONFIG.R, torch.float32))
    calls = {
        r"hidden: expected shape \(T, 40\)": lambda: layer(draw(6, 39), cache, batch),
        r"hidden: .*float64.*got torch.float32": lambda: layer(hidden.float(), cache, batch),
        r"positions: expected shape \(7,\)": lambda: layer(draw(7, CONFIG.H), cache, batch),
        r"cache: expected one beside a batch, got None": lambda: layer(hidden, None, batch),
        r"plan: expected this batch's plan": lambda: layer(hidden, cache, batch, layer.plan(batch_of((6,), (6,)))),
        r"cache": lambda: layer(hidden, dataclasses.replace(cache, layout=FloatRows(31, 9, FLOAT64)), batch),
        r"cache.*page_size": lambda: layer(hidden, dataclasses.replace(cache, page_size=8), batch),
        r"plan": lambda: layer(hidden, cache, batch, other.plan(batch)),
    }
    for match, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=match):
            call()
    assert cache.data.isnan().all()


# Weights: what `.to` and load_state_dict do


@pytest.mark.parametrize("tier", TIERS)
def test_to_prepares_again(tier: str) -> None:
    """A layer moved to another dtype is one built from the moved weights; old plans and caches are refused."""
    layer = make_layer(tier)
    batch, old_cache = batch_of((6,), (6,)), poisoned(layer)
    old_plan = layer.plan(batch)
    assert layer.to(torch.float32) is layer
    built = make_layer(tier, weights=MLAWeights.random(CONFIG, seed=3, dtype=FLOAT64).to(torch.float32))
    hidden = draw(6, CONFIG.H, dtype=torch.float32)
    assert layer.need == built.need
    assert torch.equal(layer(hidden, poisoned(layer), batch), built(hidden, poisoned(built), batch))
    with pytest.raises(ValueError, match="plan"):
        layer(hidden, poisoned(layer), batch, old_plan)
    with pytest.raises(ValueError, match="cache"):
        layer(hidden, old_cache, batch)


def test_a_refused_to_changes_nothing() -> None:
    def why_not(need: Need) -> list[str]:
        return [] if need.dtype == FLOAT64 else [f"dtype = {need.dtype} is not computed here; use float64."]

    layer = make_layer(tiers.from_attend("picky", tiers.get("template").function, why_not))  # type: ignore[attr-defined]
    weights, need, prepared = layer.weights, layer.need, layer.prepared
    with pytest.raises(ValueError, match=r"picky.*dtype = torch.float16"):
        layer.half()
    assert (layer.weights, layer.need, layer.prepared) == (weights, need, prepared)


def test_a_layout_that_was_chosen_stays_when_the_layer_moves() -> None:
    layout = FloatRows(CONFIG.L, CONFIG.R, torch.bfloat16)
    assert make_layer(layout=layout).to(torch.float32).need.layout == layout
    assert make_layer().to(torch.float32).need.layout == FloatRows(CONFIG.L, CONFIG.R, torch.float32)


@pytest.mark.parametrize("tier", ["naive:mha", "paged"])
def test_state_dict_goes_into_another_layer_and_its_tier_sees_it(tier: str) -> None:
    config, hidden, batch = CONFIGS["bias"], draw(6, CONFIG.H), batch_of((6,), (6,))
    first, second = make_layer(tier, config), make_layer(tier, config, weights=MLAWeights.random(config, 7, FLOAT64))
    state = torch.nn.ModuleDict({"self_attn": first}).state_dict()
    assert set(state) == {"self_attn." + name for name in hf_shapes(config)}
    expected = first(hidden, poisoned(first), batch)
    assert not torch.equal(second(hidden, poisoned(second), batch), expected)
    assert not torch.nn.ModuleDict({"self_attn": second}).load_state_dict(state).missing_keys
    assert torch.equal(second(hidden, poisoned(second), batch), expected)


def test_load_state_dict_takes_all_of_a_layer_or_nothing() -> None:
    layer = make_layer("paged")
    before, state = layer.prepared, layer.state_dict()
    del state["kv_b_proj.weight"]
    with pytest.raises(RuntimeError, match=r"missing kv_b_proj\.weight \(66, 32\)"):
        layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*kv_b_proj\.weight"):
        layer.load_state_dict({})
    assert layer.load_state_dict({}, strict=False).missing_keys
    shard = make_layer("paged", weights=layer.weights.shard(0, 3))
    with pytest.raises(RuntimeError, match="a shard of 1 heads"):
        shard.load_state_dict(layer.state_dict())
    assert layer.prepared is before


def test_layers_of_one_need_share_a_plan() -> None:
    first, second = make_layer("paged"), make_layer("paged", weights=MLAWeights.random(CONFIG, 9, FLOAT64))
    hidden, batch = draw(17, CONFIG.H), batch_of((17,), (17,))
    plan = first.plan(batch)
    for layer in (first, second):
        assert_plain(layer(hidden, poisoned(layer), batch, plan), hidden, layer)


def test_printing_a_layer_says_what_it_is() -> None:
    text = repr(make_layer("paged:mqa", dtype=torch.float32, layout=FloatRows(32, 8, torch.bfloat16)))
    assert text == "MLALayer(toy, tier=paged:mqa, 3 of 3 heads, torch.float32, cache bfloat16 in pages of 4)"


# Gradients


@pytest.mark.parametrize("tier", ["naive:mha", "naive:mqa", "template"])
def test_gradients_flow_through_cache_and_tier_in_float64(tier: str) -> None:
    small = CONFIG.replace(hidden_size=5, num_attention_heads=2, q_lora_rank=4, kv_lora_rank=6)
    small = small.replace(qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4)
    layer = make_layer(tier, small)
    batch = batch_of((3, 1), (3, 1))

    def forward(hidden: Tensor) -> Tensor:
        return layer(hidden, poisoned(layer), batch)

    assert torch.autograd.gradcheck(forward, (draw(4, 5).requires_grad_(),))


def test_gradients_reach_the_up_projections() -> None:
    weights = MLAWeights.random(CONFIG, seed=3, dtype=FLOAT64)
    up = UpProjection(*(W.clone().requires_grad_() for W in weights.up))
    layer = make_layer("naive:mha", weights=dataclasses.replace(weights, W_UK=up.W_UK, W_UV=up.W_UV))
    hidden = draw(6, CONFIG.H)
    layer(hidden, poisoned(layer), batch_of((6,), (6,))).sum().backward()
    assert all(W.grad is not None and W.grad.abs().max() > 0 for W in up)


def test_the_query_type_is_a_pair() -> None:
    """`Query` and rows unpack in the order (query, kv_c, k_pe)."""
    q, *rows = make_layer().project(draw(2, CONFIG.H), torch.arange(2))
    assert isinstance(q, Query)
    assert [x.shape[1] for x in rows] == [CONFIG.L, CONFIG.R]
