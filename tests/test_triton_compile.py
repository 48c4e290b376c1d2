"""The Triton tier's operators under torch.compile: what they say of themselves, and a layer compiled around them.

In the interpreter the kernels run inside the operators, so the graph is made and guarded as on a GPU.
Axes: T new tokens (packed over requests), B requests, N heads, H hidden, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_here import DEVICE, DTYPES, require_triton

require_triton()

# torch 2.11 meets its own deprecation when opcheck imports a part of it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")

from small_case import make_case  # noqa: E402

import tiers  # noqa: E402
from mla.batch import AttentionBatch  # noqa: E402
from mla.config import MLAConfig  # noqa: E402
from mla.layer import InputSide, MLALayer  # noqa: E402
from mla.need import Capacity  # noqa: E402
from mla.presets import preset  # noqa: E402
from mla.weights import MLAWeights  # noqa: E402
from tiers.tier2_triton import ops  # noqa: E402

PAGE, PAGES = 4, 48
TOY = preset("toy")
Arguments = dict[str, tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def recorded(name: str, act: Callable[[], object], monkeypatch) -> list[tuple[Any, ...]]:
    """The arguments with which `act` calls an operator, as they were before each call."""
    seen: list[tuple[Any, ...]] = []
    op = getattr(ops, name)

    def record(*args: Any) -> Any:
        seen.append(tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args))
        return op(*args)

    monkeypatch.setattr(ops, name, record)
    act()
    monkeypatch.setattr(ops, name, op)
    assert seen
    return seen


def attend_arguments(monkeypatch, query_lens, seq_lens, **fields: Any) -> tuple[Any, ...]:
    """One call of attend_absorbed, as the tier makes it; scratch and unowned slots hold numbers that compare."""
    case = make_case(query_lens, seq_lens, device=DEVICE, **fields)
    case.cache.data.nan_to_num_(0.0)
    for part in case.q:
        part.nan_to_num_(0.0)
    (args,) = recorded("attend_absorbed", lambda: case.run("triton:mqa"), monkeypatch)
    return tuple(x.nan_to_num(0.0, 0.0, 0.0) if isinstance(x, torch.Tensor) else x for x in args)


def write_arguments(dtype: torch.dtype, rows: torch.dtype, slots: list[int], strided: bool) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(0)
    both = torch.randn(len(slots), 40, generator=random).to(DEVICE, dtype)
    kv_c, k_pe = both.split([32, 8], -1) if strided else (both[:, :32].contiguous(), both[:, 32:].contiguous())
    data = torch.zeros(5, 2, PAGE, 40, dtype=rows, device=DEVICE)
    data = data[:, 1] if strided else data[:, 1].contiguous()
    return data, kv_c, k_pe, torch.tensor(slots, dtype=torch.int64, device=DEVICE)


def fused_arguments(dtype: torch.dtype, slots: list[int], interleaved: bool = True) -> tuple[Any, ...]:
    T, random = len(slots), torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random).to(DEVICE, dtype)
    weights = MLAWeights.random(TOY, seed=1, dtype=dtype).to(DEVICE)
    side = InputSide.of(weights, TOY)
    kv_c, k_pe = draw(T, TOY.L + TOY.R).split([TOY.L, TOY.R], -1)
    data = torch.zeros(5, PAGE, TOY.L + TOY.R, dtype=dtype, device=DEVICE)
    at = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(T, device=DEVICE)
    numbers = (side.eps, side.multiplier, side.amplitude, interleaved)
    return data, kv_c, k_pe, draw(T, TOY.N, TOY.R), at, positions, side.kv_norm, side.turns, *numbers


ATTENDS: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": [1, 1, 1], "seq_lens": [5, 20, 70]},
    "verification": {"query_lens": [3, 2], "seq_lens": [9, 33]},
    "rows without keys": {"query_lens": [1, 2, 1], "seq_lens": [0, 5, 0], "pad_tokens": 2},
    "no keys at all": {"query_lens": [1, 3], "seq_lens": [0, 0]},
    "17 heads": {"query_lens": [1, 1], "seq_lens": [5, 20], "N": 17},
    "R of 0": {"query_lens": [1, 2], "seq_lens": [5, 20], "R": 0},
    "invariant": {"query_lens": [1, 2], "seq_lens": [5, 20], "batch_invariant": True},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ATTENDS)
def test_U2_U3_attend_says_what_it_writes_and_what_it_returns(name, dtype, monkeypatch):
    args = attend_arguments(monkeypatch, **ATTENDS[name], dtype=dtype)
    check_op(ops.attend_absorbed, args)
    same_form(ops.attend_absorbed, args)


@pytest.mark.parametrize("slots", [[3, 0, -1, 19], [], [-1]], ids=["some", "no rows", "none written"])
@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_U2_write_says_that_it_writes_the_cache(dtype, strided, slots):
    for rows in DTYPES:
        check_op(ops.write, write_arguments(dtype, rows, slots, strided))


@pytest.mark.parametrize("slots", [[3, 0, -1, 19], []], ids=["some", "no rows"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_U2_U3_fused_input_says_what_it_writes_and_what_it_returns(dtype, interleaved, slots):
    args = fused_arguments(dtype, slots, interleaved)
    check_op(ops.fused_input, args)
    same_form(ops.fused_input, args)


def check_op(op: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """`torch.library.opcheck`; it cannot copy a tensor without elements that is a view of a wider one."""
    empty = lambda x: isinstance(x, torch.Tensor) and x.numel() == 0
    torch.library.opcheck(
        op, tuple(torch.empty_like(x, memory_format=torch.contiguous_format) if empty(x) else x for x in args)
    )


def same_form(op: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The fake twin returns tensors of the real ones' shape, dtype, stride and device."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
    real = op(*args)
    pairs = list(zip(*(x if isinstance(x, tuple) else (x,) for x in (fake, real)), strict=True))
    assert len(pairs) == (2 if op is ops.attend_absorbed else 1)
    form = lambda x: (tuple(x.shape), x.dtype, x.stride(), x.device)
    for a, b in pairs:
        assert form(a) == form(b)
    if op is ops.attend_absorbed:
        out, lse = real
        assert (out.dtype, lse.dtype) == (args[0].dtype, torch.float32)
        assert out.shape == (args[0].shape[0], args[0].shape[1], args[9].shape[2])


@pytest.mark.parametrize("name", ["write", "fused_input", "attend_absorbed"])
def test_U2_the_schema_lists_exactly_what_is_written_and_no_output_is_an_input(name, monkeypatch):
    """Every argument is compared with a copy of it: what changed must be declared, and what is declared must change."""
    args = {
        "write": lambda: write_arguments(torch.float32, torch.float32, [3, 0], False),
        "fused_input": lambda: fused_arguments(torch.float32, [3, 0]),
        "attend_absorbed": lambda: attend_arguments(monkeypatch, [1, 3], [9, 70], dtype=torch.float16),
    }[name]()
    op = getattr(torch.ops.mla_triton, name).default
    declared = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    results = op(*args)
    names = [a.name for a in op._schema.arguments]
    same = lambda a, b: (
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) if a.is_floating_point() else torch.equal(a, b)
    )
    changed = {n for n, a, b in zip(names, args, before, strict=True) if isinstance(a, torch.Tensor) and not same(a, b)}
    assert changed == declared
    storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
    for x in results if isinstance(results, tuple) else (results,):
        assert x is None or x.untyped_storage().data_ptr() not in storages


# a compiled layer


CONFIGS: dict[str, MLAConfig] = {
    "toy": TOY,
    "half-split": TOY.replace(rope=dataclasses.replace(TOY.rope, interleaved=False)),
    "no rope": TOY.replace(qk_rope_head_dim=0),
    "bias": TOY.replace(attention_bias=True),
    "direct query": TOY.replace(q_lora_rank=None),
}


def layer_of(config: MLAConfig, dtype: torch.dtype = torch.float32, requests: int = 3, **options: Any) -> MLALayer:
    weights = MLAWeights.random(config, seed=3, dtype=dtype).to(DEVICE)
    capacity = Capacity(max_requests=requests, max_tokens=requests, max_query_len=1, max_seq_len=64)
    given = {"graph_capture": True, "capacity": capacity} | options
    return MLALayer(config, weights, tiers.get("triton"), page_size=PAGE, **given)


@functools.cache
def table() -> torch.Tensor:
    """Pages of three requests, shuffled."""
    return torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).view(3, 16)


def step(seq_lens: list[int]) -> AttentionBatch:
    return AttentionBatch.bottom_right(
        [1] * len(seq_lens), seq_lens, table(), page_size=PAGE, num_pages=PAGES, device=DEVICE
    )


def empty_cache(layer: MLALayer):
    cache = layer.new_cache(PAGES)
    cache.data.zero_()
    return cache


@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize(
    ("name", "backend", "steps"),
    [("toy", "eager", 20), ("toy", "aot_eager", 20), *((n, "aot_eager", 3) for n in CONFIGS)],
)
def test_20_decode_steps_compile_once_without_a_break_and_equal_eager(name, backend, steps):
    layer = layer_of(CONFIGS[name])
    compiled = torch.compile(layer, fullgraph=True, backend=backend)  # fullgraph: a break raises
    caches = [empty_cache(layer), empty_cache(layer)]
    plans = [layer.plan(step([5, 9, 1])) for _ in caches]
    random = torch.Generator().manual_seed(1)
    for i in range(steps):
        batch = step([5 + i, 9 + i, 1 + i])
        for plan in plans:
            layer.plan(batch, into=plan)
        hidden = torch.randn(3, layer.config.H, generator=random).to(DEVICE)
        expected = layer(hidden, caches[0], batch, plans[0])
        found = compiled(hidden, caches[1], batch, plans[1])
        assert torch.equal(found, expected), i
        assert bool(torch.isfinite(found).all())
        assert torch.equal(caches[0].data, caches[1].data), i
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]


@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_a_compiled_step_in_16_bits_equals_eager(dtype):
    layer = layer_of(TOY, dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    caches = [empty_cache(layer), empty_cache(layer)]
    plan = layer.plan(step([5, 9, 1]))
    for i in range(3):
        batch = step([5 + i, 9 + i, 1 + i])
        layer.plan(batch, into=plan)
        hidden = torch.randn(3, TOY.H, generator=torch.Generator().manual_seed(i)).to(DEVICE, dtype)
        assert torch.equal(compiled(hidden, caches[1], batch, plan), layer(hidden, caches[0], batch, plan)), i


def test_what_a_compiled_layer_is_given_wrongly_is_still_refused_by_name():
    layer = layer_of(TOY)
    compiled = torch.compile(layer, fullgraph=False, backend="eager")
    batch, other = step([5, 9, 1]), step([6, 10, 2])
    plan, cache = layer.plan(batch), empty_cache(layer)
    hidden = torch.zeros(3, TOY.H, device=DEVICE)
    compiled(hidden, cache, batch, plan)
    before = cache.data.clone()
    with pytest.raises(Exception, match="this batch's plan"):
        compiled(hidden + 1, cache, other, plan)
    assert torch.equal(cache.data, before)
