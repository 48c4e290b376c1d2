"""Batch-invariant mode: the bits of a row follow from its query, its keys and their positions, and from nothing else.

On a GPU with random numbers. In the interpreter BLAS multiplies, and a row's sum may depend on where it stands in a
tile. There all numbers are small integers, the scale is 128 and W_UV picks single latents: scores are exact, two that
differ give weights 1 and exactly 0, and every sum is exact in any order. What is left to go wrong is everything but the
order: which keys a row sees, where its keys are cut, what a merge takes.
Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_here import DEVICE, DTYPES, INTERPRETED, require_triton

require_triton()

from small_case import make_need  # noqa: E402

import tiers  # noqa: E402
from mla.batch import AttentionBatch  # noqa: E402
from mla.cache import CacheSpec, PagedLatentCache, slots_of  # noqa: E402
from mla.need import Capacity, Need  # noqa: E402
from mla.projections import Query, UpProjection  # noqa: E402
from mla.state import AttentionState  # noqa: E402
from tiers.tier2_triton import absorbed  # noqa: E402
from tiers.tier2_triton.schedule import INVARIANT_SPLIT  # noqa: E402

TOY = {"N": 3, "L": 32, "P": 12, "R": 8, "V": 10, "page_size": 16}
REAL = {"L": 512, "P": 128, "R": 64, "V": 128, "page_size": 64}
SIZES: dict[str, dict[str, int]] = {"toy": TOY}
if not INTERPRETED:
    SIZES |= {"17 heads": TOY | {"N": 17}, "R of 0": TOY | {"R": 0}}
    SIZES |= {"v3 of 16 heads": REAL | {"N": 16}, "v3 of 128 heads": REAL | {"N": 128}, "100": TOY | {"page_size": 100}}
LENGTHS = (90, 33, 64, 1, 20, 65, 128, 7)
LONG = INVARIANT_SPLIT + 70
Piece = tuple[int, int, int]  # request, first token, end


@dataclass(frozen=True)
class World:
    """Requests with all their queries, q[b].nope (S, N, P), and all their rows in one cache, of table (B, pages)."""

    need: Need
    q: list[Query]
    up: UpProjection
    cache: PagedLatentCache
    table: Tensor

    def batch(self, pieces: Sequence[Piece], pad_tokens: int = 0) -> AttentionBatch:
        """Tokens first .. end - 1 of each piece are new; nothing is written, since all rows are in the cache."""
        query_lens = [end - first for _, first, end in pieces]
        common = {"page_size": self.need.page_size, "num_pages": self.cache.num_pages, "device": self.need.device}
        table = self.table[[b for b, _, _ in pieces]] if pieces else []
        slots = [-1] * sum(query_lens)
        ends = [end for _, _, end in pieces]
        return AttentionBatch.bottom_right(query_lens, ends, table, slots=slots, pad_tokens=pad_tokens, **common)

    def query(self, pieces: Sequence[Piece], pad_tokens: int = 0) -> Query:
        """Queries of the pieces' tokens, and NaN for padding."""
        nan = lambda width: torch.full((pad_tokens, self.need.N, width), float("nan"), dtype=self.need.dtype)
        parts = [Query(*(x[first:end] for x in self.q[b])) for b, first, end in pieces]
        parts.append(Query(nan(self.need.P).to(DEVICE), nan(self.need.R).to(DEVICE)))
        return Query(*(torch.cat(x) for x in zip(*parts, strict=True)))

    def run(self, pieces: Sequence[Piece], pad_tokens: int = 0) -> list[AttentionState]:
        """One step of the tier; the state of each piece, out (t, N, V) and lse (t, N)."""
        tier = tiers.get("triton")
        plan = tier.plan(self.need, self.batch(pieces, pad_tokens))
        q = self.query(pieces, pad_tokens)
        out, lse = tier.attend(q, self.cache, tier.prepare(self.up, self.need), plan)
        assert lse is not None
        sizes = [*(end - first for _, first, end in pieces), pad_tokens]
        return [AttentionState(*x) for x in zip(out.split(sizes), lse.split(sizes), strict=True)][: len(pieces)]

    def together(self, steps: Iterable[Sequence[Piece]]) -> AttentionState:
        """The rows of all steps, one after the other."""
        states = [state for pieces in steps for state in self.run(pieces)]
        return AttentionState(*(torch.cat(x) for x in zip(*states, strict=True)))


@cache
def world(size: str, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, seed: int = 0, **fields: Any) -> World:
    """Random requests of these lengths; their pages lie anywhere in the pool."""
    scale = {"softmax_scale": 128.0} if INTERPRETED else {}
    need = make_need(**SIZES[size], dtype=dtype, device=DEVICE, batch_invariant=True, **scale, **fields)
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if INTERPRETED:
            return torch.randint(-1, 2, shape, generator=random).to(DEVICE, dtype)
        return torch.randn(*shape, generator=random).to(DEVICE, dtype)

    gain = 1.0 if INTERPRETED else need.L**-0.5
    q = [Query(draw(s, need.N, need.P), draw(s, need.N, need.R)) for s in lengths]
    up = UpProjection(draw(need.L, need.N, need.P) * gain, draw(need.L, need.N, need.V) * gain)
    if INTERPRETED:
        up.W_UV.copy_(torch.eye(need.L).roll(1, 0)[:, torch.arange(need.N * need.V) * 7 % need.L].view(up.W_UV.shape))
    pages = [-(-s // need.page_size) for s in lengths]
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = PagedLatentCache.new(CacheSpec(len(order), need.page_size, need.layout, need.device))
    pool.data.fill_(float("nan"))
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int64)
    rows = torch.Generator().manual_seed(0)
    for b, (s, count) in enumerate(zip(lengths, pages, strict=True)):
        table[b, :count] = torch.tensor([order.pop() for _ in range(count)])
        if INTERPRETED:
            kv = torch.randint(-1, 2, (s, need.L + need.R), generator=rows).to(DEVICE, dtype)
        else:
            kv = torch.randn(s, need.L + need.R, generator=rows).to(DEVICE, dtype)
        slots = slots_of(table[b].to(DEVICE), 0, s, need.page_size)
        pool.write(kv[:, : need.L], kv[:, need.L :], slots)
    return World(need, q, up, pool, table)


def assert_same_bits(found: AttentionState, expected: AttentionState, what: object = "") -> None:
    """out (t, N, V) and lse (t, N) are equal bit for bit, and finite where a row has keys."""
    for name, a, b in zip(("out", "lse"), found, expected, strict=True):
        assert a.shape == b.shape
        assert bool(torch.isfinite(a).all()), (what, name)
        kind = torch.int16 if a.element_size() == 2 else torch.int32
        differ = (a.contiguous().view(kind) != b.contiguous().view(kind)).flatten(1).any(1)
        assert not bool(differ.any()), f"{what}: {name} of {int(differ.sum())} rows, the first {differ.nonzero()[0]}"


def last(b: int, lengths: Sequence[int] = LENGTHS) -> Piece:
    """The decode of a request's last token."""
    return b, lengths[b] - 1, lengths[b]


each_dtype = pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
each_size = pytest.mark.parametrize("size", SIZES)


@each_dtype
@each_size
def test_the_inputs_tell_rows_apart(size, dtype):
    """A test of equal bits says nothing where all rows are equal."""
    w = world(size, dtype)
    (state,) = w.run([(0, 0, 40)])
    assert len({tuple(row) for row in state.out.flatten(1).tolist()}) > 35
    assert len({tuple(row) for row in state.lse.tolist()}) > 35


@each_dtype
@each_size
def test_N1_the_same_request_at_batch_1_8_and_64(size, dtype):
    w = world(size, dtype)
    (alone,) = w.run([last(0)])
    mates = [last(b) for b in range(1, 8)]
    many = [
        (b % 8, (5 * b) % LENGTHS[b % 8], LENGTHS[b % 8] if b % 9 == 0 else (5 * b) % LENGTHS[b % 8] + 1)
        for b in range(63)
    ]
    if INTERPRETED:
        many = many[::6]
    for place in (0, 7) if INTERPRETED else (0, 3, 7):
        assert_same_bits(w.run([*mates[:place], last(0), *mates[place:]])[place], alone, f"batch 8, place {place}")
    for place in (8,) if INTERPRETED else (0, 8, len(many)):
        assert_same_bits(w.run([*many[:place], last(0), *many[place:]])[place], alone, f"batch 64, place {place}")
    assert_same_bits(w.run([last(0)], pad_tokens=5)[0], alone, "padded")


@each_dtype
@pytest.mark.parametrize("size", [name for name in SIZES if name not in ("17 heads", "R of 0")])
def test_N1_every_order_of_a_mixed_batch(size, dtype):
    w = world(size, dtype)
    pieces = [last(1), (2, 60, 64), (0, 20, 90), (4, 0, 20)]  # a decode, a verification, a chunk, a prompt
    expected = [w.run([piece])[0] for piece in pieces]
    orders = list(permutations(range(4)))
    for order in orders[:: 7 if INTERPRETED else 1]:
        for i, state in zip(order, w.run([pieces[i] for i in order]), strict=True):
            assert_same_bits(state, expected[i], order)


def chunks(request: int, first: int, end: int, size: int) -> list[list[Piece]]:
    """Steps of at most `size` tokens each."""
    return [[(request, a, b)] for a, b in pairwise([*range(first, end, size), end])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_size
def test_N1_every_chunking_of_a_prompt_and_every_prefix_hit(size, dtype):
    w, end = world(size, dtype), 25 if INTERPRETED else 90
    (whole,) = w.run([(0, 0, end)])
    for tokens in (1, 7, 16) if INTERPRETED else (1, 3, 7, 16, 64):
        assert_same_bits(w.together(chunks(0, 0, end, tokens)), whole, f"chunks of {tokens}")
    for hit in (1, 15, 16, 17, end - 1):
        (rest,) = w.run([(0, hit, end)])
        assert_same_bits(rest, AttentionState(whole.out[hit:], whole.lse[hit:]), f"prefix of {hit}")
    # with mates that differ in every step
    steps = [[last(1), (0, a, b), (4, 0, 1 + a % 7)] for a, b in pairwise([0, 5, 6, 20, end])]
    found = [w.run(step)[1] for step in steps]
    assert_same_bits(AttentionState(*(torch.cat(x) for x in zip(*found, strict=True))), whole, "with mates")


@each_dtype
def test_N1_a_verification_and_its_tokens_one_at_a_time(dtype):
    w = world("toy", dtype)
    for first, end in ((60, 64), (0, 4), (31, 33)):
        (whole,) = w.run([(2, first, end)])
        assert_same_bits(w.together(chunks(2, first, end, 1)), whole, (first, end))


@each_dtype
def test_N1_rows_in_other_pages_as_after_a_prefix_hit(dtype):
    a, b = world("toy", dtype, seed=0), world("toy", dtype, seed=1)
    assert not torch.equal(a.table, b.table)
    moved = World(b.need, a.q, a.up, b.cache, b.table)  # the same rows elsewhere
    pieces = [last(0), (2, 60, 64), (4, 0, 20)]
    for x, y in zip(a.run(pieces), moved.run(pieces), strict=True):
        assert_same_bits(x, y)


@each_dtype
@pytest.mark.parametrize("size", ["toy"] if INTERPRETED else ["toy", "v3 of 16 heads", "v3 of 128 heads"])
def test_N1_more_keys_than_one_segment_has(size, dtype):
    """Keys are cut at multiples of 4096 whatever the batch is, and the parts are merged from left to right."""
    w = world(size, dtype, (LONG, 33, INVARIANT_SPLIT, INVARIANT_SPLIT + 1))
    lengths = (LONG, 33, INVARIANT_SPLIT, INVARIANT_SPLIT + 1)
    (alone,) = w.run([last(0, lengths)])
    tier = tiers.get("triton")
    (step,) = tier.plan(w.need, w.batch([last(0, lengths)])).steps.rounds
    assert int(step.merges[0, 4]) == 2
    assert_same_bits(w.run([last(b, lengths) for b in (3, 2, 0, 1)])[2], alone, "batch of 4")
    start = INVARIANT_SPLIT - 2  # rows on both sides of the cut
    (whole,) = w.run([(0, start, start + 5)])
    assert_same_bits(w.together(chunks(0, start, start + 5, 1)), whole, "one by one")
    if not INTERPRETED:
        (whole,) = w.run([(0, 0, LONG)])
        assert_same_bits(AttentionState(whole.out[-1:], whole.lse[-1:]), alone, "the last row of the whole prompt")
        for tokens in (7, 64, 1000):
            rest = w.together(chunks(0, LONG - 300, LONG, tokens))
            assert_same_bits(rest, AttentionState(whole.out[-300:], whole.lse[-300:]), f"chunks of {tokens}")


@each_dtype
@pytest.mark.parametrize("size", ["toy"] if INTERPRETED else ["toy", "v3 of 16 heads"])
def test_N1_a_step_that_goes_through_in_many_rounds(size, dtype, monkeypatch):
    w = world(size, dtype)
    pieces = [last(1), (0, 20, 90), (2, 60, 64), (4, 0, 20)]
    expected, tier = w.run(pieces), tiers.get("triton")
    assert len(tier.plan(w.need, w.batch(pieces)).steps.rounds) == 1
    monkeypatch.setattr(absorbed, "ROUND_BYTES", 11 * w.need.N * w.need.L * absorbed.dot_dtype(w.need).itemsize)
    assert len(tier.plan(w.need, w.batch(pieces)).steps.rounds) >= 8
    for x, y in zip(w.run(pieces), expected, strict=True):
        assert_same_bits(x, y)


@each_dtype
@pytest.mark.parametrize("programs", [1, 7, 1000])
def test_N1_a_device_that_runs_more_programs_at_once(programs, dtype, monkeypatch):
    w = world("toy", dtype)
    pieces = [last(1), (0, 20, 90), (4, 0, 20)]
    expected = w.run(pieces)
    monkeypatch.setattr(absorbed, "programs", lambda need, tile: programs)
    for x, y in zip(w.run(pieces), expected, strict=True):
        assert_same_bits(x, y)


@each_dtype
def test_N1_a_capacity_and_a_plan_for_graphs_change_no_bit(dtype):
    plain = world("toy", dtype)
    pieces = [last(0), last(1), last(5)]
    expected = plain.run(pieces)
    few = Capacity(max_requests=3, max_tokens=3, max_query_len=1, max_seq_len=128)
    more = Capacity(max_requests=9, max_tokens=80, max_query_len=70, max_seq_len=9000)
    for fields in (
        {"capacity": few},
        {"capacity": more},
        {"capacity": few, "graph_capture": True},
        {"capacity": more, "graph_capture": True},
    ):
        other = world("toy", dtype, **fields)
        for x, y in zip(other.run(pieces), expected, strict=True):
            assert_same_bits(x, y, fields)


@pytest.mark.parametrize("tokens", [1, 63, 65] if INTERPRETED else [1, 2, 63, 64, 65])
@pytest.mark.parametrize("requests", [1, 3] if INTERPRETED else [1, 4, 131, 132, 133, 265, 600])
def test_N3_runs_on_both_sides_of_every_threshold(requests, tokens):
    """Of requests, around what a device runs at once; of tokens, around where the usual mode expands."""
    w = world("toy", DTYPES[-1])
    lengths = [b for b in range(8) if LENGTHS[b] >= tokens]
    pieces = [(b, LENGTHS[b] - tokens, LENGTHS[b]) for b in (lengths[i % len(lengths)] for i in range(requests))]
    alone = {piece: w.run([piece])[0] for piece in set(pieces)}
    for piece, state in zip(pieces, w.run(pieces), strict=True):
        assert_same_bits(state, alone[piece], piece)


def test_rows_without_keys_are_exact_beside_others():
    w = world("toy", DTYPES[-1])
    (expected,) = w.run([last(0)])
    common = {"page_size": w.need.page_size, "num_pages": w.cache.num_pages, "device": DEVICE}
    batch = AttentionBatch.bottom_right([1, 1, 2], [0, 90, 0], w.table[[1, 0, 2]], slots=[-1] * 4, **common)
    tier, q = tiers.get("triton"), w.query([last(1), last(0), (2, 0, 2)])
    for x in q:
        x[[0, 2, 3]] = float("nan")
    out, lse = tier.attend(q, w.cache, tier.prepare(w.up, w.need), tier.plan(w.need, batch))
    assert_same_bits(AttentionState(out[1:2], lse[1:2]), expected)
    assert bool((out[[0, 2, 3]] == 0).all())
    assert bool((lse[[0, 2, 3]] == float("-inf")).all())
