"""The fused input kernel against its reference in float64, on the same rounded inputs.

What is stored is one rounding of a float32 result, so for whatever number x of the output's dtype lies near the truth
y, |found - y| <= |x - y| + 2 e, with e the error of the float32 result: the kernel is as near as any path, the unfused
one too, but for 2 e. With u = 2^-24: a sum of L squares is within L u, mean and eps add 2 u, the root halves that;
rsqrt has 4 u, eps, multiplier, three products and the last one 6 u more: e = (L/2 + 11) u |y| for the latent. cos and
sin have 3 u (their own test below), the amplitude 2 u, product and sum 2 u: e = 7 u amplitude (|a| + |b|) for a pair.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_here import DEVICE, DTYPES, require_triton

require_triton()

import tiers  # noqa: E402
from mla.batch import AttentionBatch  # noqa: E402
from mla.cache import PagedLatentCache  # noqa: E402
from mla.config import RopeConfig  # noqa: E402
from mla.layer import InputSide, MLALayer  # noqa: E402
from mla.presets import preset  # noqa: E402
from mla.projections import Query  # noqa: E402
from mla.rope import rope_cos_sin  # noqa: E402
from mla.tier import Tier  # noqa: E402
from mla.weights import MLAWeights  # noqa: E402
from tiers.tier2_triton.kernels.fused_input import fused_input, fused_input_reference, problem  # noqa: E402

NAN, U = float("nan"), 2.0**-24
TOY = preset("toy")
YARN = RopeConfig(type="yarn", factor=40.0, original_max_position_embeddings=16)
LLAMA4 = dataclasses.replace(TOY.rope, llama_4_scaling_beta=0.3, original_max_position_embeddings=4)
CONFIGS = {
    "toy": TOY,
    "half-split": TOY.replace(rope=dataclasses.replace(TOY.rope, interleaved=False)),
    "yarn": TOY.replace(rope=YARN),
    "llama-4": TOY.replace(rope=LLAMA4),
    "multipliers": TOY.replace(q_lora_multiplier=1.5, kv_lora_multiplier=0.7),
    "bias": TOY.replace(attention_bias=True),
    "direct query": TOY.replace(q_lora_rank=None),
    "unrotated": TOY.replace(rope=RopeConfig(type="none")),
    "no rope": TOY.replace(qk_rope_head_dim=0),
}


def partners(x: Tensor, interleaved: bool) -> Tensor:
    """|a| + |b| at both places of each pair of the last axis."""
    half, x = x.shape[-1] // 2, x.abs().double()
    if interleaved:
        return x.unflatten(-1, (half, 2)).sum(-1, keepdim=True).expand(*x.shape[:-1], half, 2).flatten(-2)
    return (x[..., :half] + x[..., half:]).repeat((1,) * (x.dim() - 1) + (2,))


def assert_near(found: Tensor, y: Tensor, e: Tensor) -> None:
    assert torch.equal(found.isnan(), y.isnan())
    excess = (found.double() - y).abs() - (y.to(found.dtype).double() - y).abs() - 2 * e
    assert (excess.nan_to_num(nan=-1.0) <= 0).all()


def check(arguments: dict[str, Any]) -> None:
    """Run the kernel, and compare all that it may write and all that it may not with the reference in float64."""
    dtype = arguments["q_pe"].dtype
    wide = {name: x.double() if isinstance(x, Tensor) and x.dtype == dtype else x for name, x in arguments.items()}
    wide |= {name: arguments[name].double() for name in ("data", "q_out")}
    fused_input_reference(**wide)
    fused_input(**arguments)
    data, L, amplitude = wide["data"], arguments["kv_c"].shape[1], arguments["amplitude"]
    assert_near(arguments["data"][..., :L], data[..., :L], (L / 2 + 11) * U * data[..., :L].abs())
    size, slots = data.shape[1], arguments["slot_mapping"]
    own = (slots >= 0) & (slots < data.shape[0] * size)
    e = torch.zeros_like(data[..., L:])
    pairs = partners(arguments["k_pe"][own], arguments["interleaved"])
    e[slots[own] // size, slots[own] % size] = 7 * U * amplitude * pairs
    assert_near(arguments["data"][..., L:], data[..., L:], e)
    e = 7 * U * amplitude * partners(arguments["q_pe"], arguments["interleaved"])
    assert_near(arguments["q_out"], wide["q_out"], e)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_queries_are_the_reference_in_float64(dtype: torch.dtype, interleaved: bool) -> None:
    arguments = problem("toy", dtype, DEVICE).arguments | {"interleaved": interleaved}
    check(arguments)
    assert int((~arguments["data"].isnan()).all(-1).sum()) == 5  # 7 tokens, 2 without a slot
    assert not arguments["q_out"].isnan().any()


@pytest.mark.parametrize("row_dtype", DTYPES)
def test_the_cache_may_have_another_dtype(row_dtype: torch.dtype) -> None:
    arguments = problem("toy", torch.float32, DEVICE).arguments
    check(arguments | {"data": arguments["data"].to(row_dtype)})


def some(T: int = 3, N: int = 5, L: int = 24, R: int = 10, **changes: Any) -> dict[str, Any]:
    """Arguments without anything special."""
    arguments = problem("toy", torch.float32, DEVICE, seed=1).arguments
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    turns = torch.arange(1, R // 2 + 1, device=DEVICE) * 10**17
    arguments |= {"q_pe": draw(T, N, R), "kv_c": draw(T, L), "k_pe": draw(T, R), "turns": turns}
    arguments |= {"data": torch.full((2, 4, L + R), NAN, device=DEVICE), "q_out": draw(T, N, R) * NAN}
    arguments |= {"slot_mapping": torch.arange(T, device=DEVICE), "positions": torch.arange(5, 5 + T, device=DEVICE)}
    return arguments | {"kv_norm": draw(L)} | changes


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("N", "R"), [(1, 2), (70, 6), (3, 0)])
def test_any_heads_and_rope_widths(N: int, R: int, interleaved: bool) -> None:
    check(some(T=2, N=N, R=R, interleaved=interleaved))


@pytest.mark.parametrize("dtype", DTYPES)
def test_F1_views_of_fused_projections_give_the_bits_of_contiguous_ones(dtype: torch.dtype) -> None:
    found, expected = (problem("toy", dtype, DEVICE).arguments for _ in range(2))
    views = ("kv_c", "k_pe", "q_pe")
    assert not any(found[name].is_contiguous() for name in views)
    engine = torch.full((5, 2, 3, 40), NAN, dtype=dtype, device=DEVICE)
    queries = torch.full((9, 5, 14), NAN, dtype=dtype, device=DEVICE)
    fused_input(**found | {"data": engine[:, 1, :, 3:37], "q_out": queries[1:8, :, 2:12]})
    fused_input(**expected | {name: expected[name].contiguous() for name in views})
    for whole, part, name in ((engine, engine[:, 1, :, 3:37], "data"), (queries, queries[1:8, :, 2:12], "q_out")):
        assert torch.equal(part.nan_to_num(nan=99.0), expected[name].nan_to_num(nan=99.0))
        part.fill_(NAN)
        assert whole.isnan().all()


def test_F4_slots_outside_the_pool_write_nothing_anywhere() -> None:
    engine = torch.full((6, 2, 4, 34), NAN, device=DEVICE)
    slots = torch.tensor([-1, -(2**40), 8, 2**31, 7, -8], device=DEVICE)
    fused_input(**some(T=6, data=engine[2:4, 1], slot_mapping=slots))
    assert (~engine.isnan()).any(-1).nonzero().tolist() == [[3, 1, 3]]


def test_a_step_without_tokens_launches_nothing() -> None:
    arguments = some(T=0)
    fused_input(**arguments)
    assert arguments["data"].isnan().all()


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    batch, alone = some(T=3), some(T=3)
    fused_input(**batch)
    names = ("kv_c", "k_pe", "q_pe", "slot_mapping", "positions", "q_out")
    fused_input(**alone | {name: alone[name][2:] for name in names})
    assert torch.equal(batch["q_out"][2], alone["q_out"][2])
    assert torch.equal(batch["data"][0, 2], alone["data"][0, 2])


def test_the_norm_is_float32_and_has_its_eps() -> None:
    """Squares of 300 are no float16; 24 numbers of 1e-3 have a mean square of 1e-6, half of what eps makes of it."""
    kv_c = torch.full((2, 24), 300.0, device=DEVICE)
    kv_c[1] = 1e-3
    arguments = problem("toy", torch.float16, DEVICE).arguments
    arguments |= {name: arguments[name][:2] for name in ("k_pe", "q_pe", "slot_mapping", "positions", "q_out")}
    ones = torch.ones(24, dtype=torch.float16, device=DEVICE)
    arguments |= {"kv_c": kv_c.half(), "kv_norm": ones, "multiplier": 1.0}
    arguments["slot_mapping"] = torch.tensor([0, 1], device=DEVICE)
    arguments["k_pe"] = torch.zeros(2, 10, dtype=torch.float16, device=DEVICE)
    fused_input(**arguments)
    assert (arguments["data"][0, 0, :24] == 1).all()
    assert float((arguments["data"][0, 1, :24] - 0.5**0.5).abs().max()) < 2**-10


def test_angles_keep_their_digits_at_position_150000() -> None:
    """Unit pairs give cos and sin themselves: within 3 u of their size, and of the 4 roundings of a float64 angle."""
    positions = torch.tensor([0, 1, 2, 7, 8, 4095, 149_999, 150_000, 163_839, 2**20 + 7])
    T, R, rope = len(positions), 128, RopeConfig()
    pairs = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(1, R // 2).expand(T, 2, R)
    config = TOY.replace(qk_rope_head_dim=R, rope=rope)
    turns = InputSide.of(MLAWeights.random(config), config).turns
    changes = {"positions": positions.to(DEVICE), "slot_mapping": torch.full((T,), -1), "turns": turns}
    changes = {name: x.to(DEVICE) for name, x in changes.items()}
    arguments = some(T=T, N=2, R=R, amplitude=1.0, interleaved=True, q_pe=pairs.to(DEVICE), **changes)
    fused_input(**arguments)
    found = arguments["q_out"].cpu().double()
    cos, sin = rope_cos_sin(positions, rope, R)
    angles = positions[:, None] * 10000.0 ** (-2 * torch.arange(R // 2, dtype=torch.float64) / R)
    for turned, truth in ((found[:, 0, 0::2], cos), (found[:, 0, 1::2], sin), (found[:, 1, 1::2], cos)):
        assert ((turned - truth).abs() <= 3 * U * truth.abs() + 4 * 2.0**-53 * angles).all()
    assert torch.equal(found[:, 1, 0::2], -found[:, 0, 1::2])
    assert float((angles.float().cos() - cos).abs().max()) > 1e-3  # what float32 angles would be off by


def test_G1_offsets_past_two_billion_elements() -> None:
    """Page 2 and token 2 at strides of 2^30 numbers; little of the 4 GB is touched."""
    memory = torch.empty(2**31 + 256, dtype=torch.float16, device=DEVICE)
    far = lambda at, *shape: memory[at:].as_strided(shape, (2**30, *torch.empty(shape).stride()[1:]))
    near = {name: x.half() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in some().items()}
    places = {"kv_c": far(40, 3, 24), "k_pe": far(70, 3, 10), "q_pe": far(80, 3, 5, 10), "q_out": far(140, 3, 5, 10)}
    for name, place in places.items():
        place.copy_(near[name])
    data, slots = far(0, 3, 1, 34), torch.tensor([0, -1, 2], device=DEVICE)
    fused_input(**near | places | {"data": data, "slot_mapping": slots})
    fused_input(**near)
    assert torch.equal(places["q_out"][[0, 2]], near["q_out"][[0, 2]])
    assert torch.equal(data[[0, 2], 0], near["data"][0, [0, 2]])


# In a layer


class FusedTier(Tier):
    """The naive tier behind the kernel, as a tier of kernels would call it; keeps what it returned."""

    def __init__(self) -> None:
        self.inner = tiers.get("naive")
        self.name, self.why_not, self.prepare = self.inner.name, self.inner.why_not, self.inner.prepare
        self.plan = self.inner.plan
        self.seen: list[Query] = []

    def attend(self, q: Query, cache: PagedLatentCache, *rest: Any) -> Any:
        return self.inner.attend(q, cache, *rest)

    def write(self, *_: Any) -> None:
        raise AssertionError("written twice")

    def fused_input(
        self, q: Query, kv_c: Tensor, k_pe: Tensor, side: InputSide, cache: PagedLatentCache, batch: AttentionBatch
    ) -> Query:
        pe = torch.empty_like(q.pe)
        fused_input(
            cache.data, pe, kv_c, k_pe, q.pe, batch.slot_mapping, batch.positions, side.kv_norm, side.turns, side.eps,
            side.multiplier, side.amplitude, side.interleaved,
        )  # fmt: skip
        self.seen.append(Query(q.nope, pe))
        return self.seen[-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_feeds_its_tier_as_without_the_kernel(name: str, dtype: torch.dtype) -> None:
    """Both paths start from the same projections. Beside e twice, roundings to the dtype: the kernel's one, at most
    three of the unfused path (norm, multiplier, row; rotation and scale), and one of a scale before the rotation."""
    config = CONFIGS[name]
    weights = MLAWeights.random(config, seed=3, dtype=dtype).to(DEVICE)
    tier = FusedTier()
    layer = MLALayer(config, weights, tier, page_size=4)
    hidden = torch.randn(11, config.H, generator=torch.Generator().manual_seed(5)).to(dtype).to(DEVICE)
    batch = AttentionBatch.bottom_right(
        [4, 6], [9, 6], [[3, 1, 6], [2, 5]], page_size=4, num_pages=7, pad_tokens=1, device=DEVICE
    )
    cache = layer.new_cache(7)
    cache.data.fill_(0.0)
    before = cache.data.clone()
    layer(hidden, cache, batch)
    q, kv_c, k_pe = layer.project(hidden, batch.positions)
    cache.layout.write(before, batch.slot_mapping[:10], kv_c[:10], k_pe[:10], 4)
    u = torch.finfo(dtype).eps / 2 + 12 * U
    tiny = torch.finfo(dtype).smallest_normal * u
    L, size = config.L, cache.data.double()
    assert torch.equal(tier.seen[0].nope, q.nope)
    latent, expected = size[..., :L], before[..., :L].double()
    assert ((latent - expected).abs() <= (4 * u + L * U) * expected.abs() + tiny).all()
    scale = amplitude_of(layer) * 5 * u
    for found, expected in ((size[..., L:], before[..., L:].double()), (tier.seen[0].pe.double(), q.pe.double())):
        reach = partners(found, config.rope.interleaved) * 1.5  # |a| + |b| of a pair changes by sqrt 2 as it turns
        assert ((found - expected).abs() <= scale * reach + tiny).all()


def amplitude_of(layer: MLALayer) -> float:
    assert layer._side is not None
    return max(1.0, layer._side.amplitude, 1 / layer._side.amplitude)
