"""Decode as a CUDA graph: captured once, then replayed with other lengths, tables and padding. Needs a GPU.

Beside that: steps with growing lengths wait for the device nowhere, and after `warmup` nothing is compiled.
Axes: T new tokens (packed over requests), B requests, N heads, H hidden, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_here import DEVICE, require_triton

require_triton()
if DEVICE == "cpu":
    pytest.skip("CUDA graphs, waiting and compiling need a GPU", allow_module_level=True)

from small_case import Case, make_case, make_need  # noqa: E402

import tiers  # noqa: E402
from mla.batch import AttentionBatch  # noqa: E402
from mla.cache import CacheSpec, PagedLatentCache  # noqa: E402
from mla.layer import MLALayer  # noqa: E402
from mla.need import Capacity  # noqa: E402
from mla.presets import preset  # noqa: E402
from mla.projections import Query  # noqa: E402
from mla.state import AttentionState  # noqa: E402
from mla.tier import Plan, Prepared, Tier  # noqa: E402
from mla.weights import MLAWeights  # noqa: E402

INF, NAN = float("inf"), float("nan")
POOL = 400  # pages of the cache that a graph is captured with
TOKENS, LONGEST = 8, 700
DECODE = Capacity(max_requests=8, max_tokens=TOKENS, max_query_len=1, max_seq_len=LONGEST)
VERIFY = Capacity(max_requests=8, max_tokens=TOKENS, max_query_len=4, max_seq_len=LONGEST)
SIZES: dict[str, dict[str, Any]] = {
    "toy": {"page_size": 16},
    "v3 of 16 heads": {"N": 16, "L": 512, "P": 128, "R": 64, "V": 128, "page_size": 64},
    "v3 of 128 heads": {"N": 128, "L": 512, "P": 128, "R": 64, "V": 128, "page_size": 64},
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass
class Captured:
    """A graph of one attend, and the memory that it reads and writes."""

    tier: Tier
    prepared: Prepared
    plan: Plan
    q: Query
    cache: PagedLatentCache
    graph: torch.cuda.CUDAGraph
    state: AttentionState


def captured(tier: Tier, case: Case) -> Captured:
    """Capture the attend of a case in a graph; every buffer that it touches is its own."""
    need = case.need
    cache = PagedLatentCache.new(CacheSpec(POOL, need.page_size, need.layout, need.device))
    cache.data.fill_(NAN)
    cache.data[: case.cache.num_pages] = case.cache.data
    q, prepared = Query(*(x.clone() for x in case.q)), tier.prepare(case.up, need)
    plan = tier.plan(need, case.batch).reserve()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and takes the libraries' workspaces
        for _ in range(2):
            tier.attend(q, cache, prepared, plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = tier.attend(q, cache, prepared, plan)
    assert state.lse is not None
    for x in state:
        x.fill_(NAN)
    return Captured(tier, prepared, plan, q, cache, graph, state)


def replayed(graph: Captured, case: Case) -> AttentionState:
    """Bring a case of the same weights into the captured memory, replay, and check the result against its budget."""
    assert case.batch.num_tokens == graph.plan.batch.num_tokens
    graph.cache.data.fill_(NAN)
    graph.cache.data[: case.cache.num_pages] = case.cache.data
    for held, new in zip(graph.q, case.q, strict=True):
        held.copy_(new)
    for x in graph.state:
        x.fill_(NAN)
    assert graph.tier.plan(case.need, case.batch, graph.plan) is graph.plan
    graph.graph.replay()
    torch.cuda.synchronize()
    case.check(graph.state)
    return graph.state


def step(query_lens: Sequence[int], seq_lens: Sequence[int], like: Case | None = None, **fields: Any) -> Case:
    """A case of TOKENS rows, padding included, with the weights of `like`; another seed gives another query."""
    pad = TOKENS - sum(query_lens)
    given = {"graph_capture": True, "capacity": DECODE, "device": DEVICE, "pad_tokens": pad} | fields
    case = make_case(query_lens, seq_lens, **given)
    return case if like is None else dataclasses.replace(case, up=like.up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_CG1_a_graph_of_8_requests_is_replayed_for_5_and_for_none(name, dtype):
    fields = SIZES[name] | {"dtype": dtype}
    first = step([1] * 8, [20 + 11 * b for b in range(8)], **fields)
    graph = captured(tiers.get("triton"), first)
    replayed(graph, first)
    lengths = [[90, 1, 300, 64, 65], [700, 16, 17, 15, 1], [], [5] * 8, [1, 0, 700, 0, 33, 2, 128, 256]]
    for seed, seq_lens in enumerate(lengths, 1):
        case = step([1] * len(seq_lens), seq_lens, first, seed=seed, **fields)
        state = replayed(graph, case)
        assert bool((state.out[len(seq_lens) :] == 0).all())
        assert bool((state.lse[len(seq_lens) :] == -INF).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["toy", "v3 of 16 heads"])
def test_CG1_an_invariant_graph_gives_the_bits_of_an_eager_plan(name, dtype):
    fields = SIZES[name] | {"dtype": dtype, "batch_invariant": True}
    first = step([1] * 8, [20 + 11 * b for b in range(8)], **fields)
    graph = captured(tiers.get("triton"), first)
    for seed, seq_lens in enumerate([[90, 1, 300, 64, 65], [700, 16], [33] * 8]):
        case = step([1] * len(seq_lens), seq_lens, first, seed=seed, **fields)
        state = replayed(graph, case)
        eager = case.run("triton")
        assert torch.equal(state.out, eager.out)
        assert torch.equal(state.lse, eager.lse)


@pytest.mark.parametrize("name", ["toy", "v3 of 16 heads"])
def test_CG3_a_shrinking_batch_leaves_nothing_of_the_longer_one(name):
    fields = SIZES[name] | {"dtype": torch.bfloat16, "capacity": VERIFY}
    first = step([2, 1, 1, 1, 1, 1, 1], [600] * 7, **fields)
    graph = captured(tiers.get("triton"), first)
    for seed, (query_lens, seq_lens) in enumerate(
        (
            *(([1, 1], [33, 20]), ([1, 1, 0, 0, 0, 0, 0], [33, 20, 0, 0, 0, 0, 0])),
            *(([4, 4], [4, 500]), ([3, 3], [5, 9]), ([1], [1])),
        ),
        1,
    ):
        case = step(query_lens, seq_lens, first, seed=seed, **fields)
        state = replayed(graph, case)
        assert graph.plan.report["forms"] == ["mqa"] * len(query_lens)
        rest = sum(query_lens)
        assert bool((state.out[rest:] == 0).all())
        assert bool((state.lse[rest:] == -INF).all())


def test_M7_every_real_row_of_a_padded_verification_comes_out_of_the_graph():
    fields = SIZES["v3 of 16 heads"] | {"dtype": torch.bfloat16, "capacity": VERIFY}
    first = step([4, 4], [70, 80], **fields)
    graph = captured(tiers.get("triton"), first)
    case = step([3, 3, 0], [65, 9, 0], first, seed=5, **fields)
    state = replayed(graph, case)
    assert len(set(state.lse[:6].flatten().tolist())) == 6 * 16
    assert bool((state.lse[6:] == -INF).all())


@pytest.mark.parametrize("name", ["toy", "v3 of 16 heads"])
def test_the_graph_reads_where_it_was_captured_after_any_plan(name):
    sizes = SIZES[name] | {"dtype": torch.bfloat16}
    case = step([1] * 8, [20] * 8, **sizes)
    graph = captured(tiers.get("triton"), case)
    addresses = lambda: [
        *(x.data_ptr() for r in graph.plan.steps.rounds for x in vars(r).values() if isinstance(x, torch.Tensor)),
        *(x.data_ptr() for x in graph.plan._buffers.values()),
    ]
    before = addresses()
    for seq_lens in ([700] * 8, [1], []):
        replayed(graph, step([1] * len(seq_lens), seq_lens, case, **sizes))
        assert addresses() == before


# nothing waits, nothing compiles


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # it warns of itself, as a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that this process meets for the first time, by name, compiled or read from a folder."""
    from triton import knobs

    seen: list[str] = []

    def hook(*args: Any, **kwargs: Any) -> bool:
        seen.append(str(kwargs.get("repr") or kwargs.get("key")))
        return False

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        yield seen
    finally:
        knobs.runtime.jit_cache_hook = before


def decode_layer(requests: int, **options: Any) -> MLALayer:
    config = preset("toy")
    weights = MLAWeights.random(config, seed=3, dtype=torch.bfloat16).to(DEVICE)
    capacity = Capacity(max_requests=requests, max_tokens=requests, max_query_len=1, max_seq_len=4096)
    return MLALayer(config, weights, tiers.get("triton"), page_size=16, capacity=capacity, **options)


@pytest.mark.parametrize("options", [{"graph_capture": True}, {}, {"batch_invariant": True}], ids=str)
def test_20_decode_steps_with_growing_lengths_wait_nowhere_and_compile_nothing(options):
    layer = decode_layer(4, **options)
    cache = layer.new_cache(600)
    cache.data.zero_()
    table = torch.randperm(600, generator=torch.Generator().manual_seed(0)).view(4, 150)
    starts = (1, 15, 500, 2300)
    batches = [
        AttentionBatch.bottom_right([1] * 4, [s + i for s in starts], table, page_size=16, num_pages=600, device=DEVICE)
        for i in range(21)
    ]
    hidden = torch.randn(21, 4, layer.config.H, device=DEVICE).bfloat16()
    plan = layer.plan(batches[0]).reserve()
    layer(hidden[0], cache, batches[0], plan)  # compiles
    results = []
    with compilations() as compiled, waiting_is_an_error():
        for i in range(1, 21):
            layer.plan(batches[i], into=plan)
            results.append(layer(hidden[i], cache, batches[i], plan))
    assert compiled == []
    assert bool(torch.isfinite(torch.stack(results)).all())


@pytest.mark.parametrize("form", ["auto", "mqa", "mha"])
def test_a_mixed_step_waits_nowhere(form):
    first = make_case([1, 70, 3, 200], [40, 70, 33, 500], dtype=torch.bfloat16, device=DEVICE)
    tier = tiers.get("triton", form=form)
    prepared = tier.prepare(first.up, first.need)
    tier.attend(first.q, first.cache, prepared, tier.plan(first.need, first.batch))
    kv_c, k_pe = (torch.cat(parts) for parts in zip(*first.keys, strict=True))
    slots = torch.full((kv_c.shape[0],), -1, device=DEVICE)
    with waiting_is_an_error():
        tier.write(first.cache, kv_c, k_pe, slots)
        plan = tier.plan(first.need, first.batch)
        state = tier.attend(first.q, first.cache, prepared, plan)
    first.check(state)


WARM = """
import sys
import torch
from triton import knobs
import tiers
from mla.need import Capacity
from small_case import make_case, make_need

seen = []
def hook(*args, **kwargs):
    seen.append(str(kwargs.get("repr") or kwargs.get("key"))[:300])
    return False
knobs.runtime.jit_cache_hook = hook

dtype, invariant = getattr(torch, sys.argv[1]), sys.argv[2] == "invariant"
capacity = Capacity(max_requests=64, max_tokens=512, max_query_len=300, max_seq_len=6000)
sizes = dict(N=16, L=512, P=128, R=64, V=128, page_size=64, dtype=dtype, device="cuda:0", capacity=capacity)
sizes |= {"batch_invariant": invariant}
tier = tiers.get("triton")
tier.warmup(make_need(**sizes))
print("warmup", len(seen))
seen.clear()
batches = [
    ([1], [1]), ([1], [16]), ([1], [5000]), ([1] * 16, [33] * 16), ([1] * 64, [129] * 64), ([4, 4, 4], [4, 33, 700]),
    ([300], [300]), ([2, 70, 1], [17, 500, 4500]), ([1, 1], [0, 5]), ([], []), ([16, 1], [16, 16]), ([65], [400]),
]
for query_lens, seq_lens in batches:
    case = make_case(query_lens, seq_lens, **sizes)
    for pad in (0, 3):
        tier.attend(case.q, case.cache, tier.prepare(case.up, case.need), tier.plan(case.need, case.batch))
        case = make_case(query_lens, seq_lens, pad_tokens=3, **sizes)
    for n in (1, 3, 16, 17):
        rows = torch.zeros(n, 576, dtype=dtype, device="cuda")
        tier.write(case.cache, *rows.split([512, 64], -1), torch.full((n,), -1, device="cuda"))
torch.cuda.synchronize()
print("after", len(seen), *seen, sep="\\n")
"""


@pytest.mark.parametrize("mode", ["usual", "invariant"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_after_warmup_nothing_is_compiled(dtype, mode, tmp_path):
    """In a process of its own, since this one has met all kernels by now."""
    folder = Path(__file__).parent
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)])}
    found = subprocess.run(
        [sys.executable, str(script), dtype, mode], capture_output=True, text=True, env=env, timeout=500, check=False
    )
    assert found.returncode == 0, found.stderr[-4000:]
    lines = found.stdout.splitlines()
    at = lines.index("after")
    warmed = int(next(line for line in lines if line.startswith("warmup ")).split()[1])
    assert warmed >= 3
    assert lines[at + 1] == "0", "\n".join(lines[at:])


def test_warmup_launches_on_a_need_without_a_capacity_too():
    tiers.get("triton").warmup(make_need(device=DEVICE, dtype=torch.bfloat16))
