"""Who waits for whom in the decode kernels, as plain Python: a model that can be run through in every order.

Motivation. A fault of barriers shows once in a million launches, or on another card. Here each warpgroup is a list of
events in the order of its code, copies end at any later moment, and `explore` visits every state that some order of
all of them can reach. Time is left out; the figure of the schedule gives the same events durations.

    Wait      passes while the phase under way has the other parity, as the instruction does; so a barrier that is two
              phases away looks right, and `explore` tells whether the phase is the one that is meant
    Copy      one arrival that expects bytes, and copies that bring them; a buffer is neither old nor new meanwhile
    Product   reads shared memory from when it is issued until `Retire` leaves at most so many newer ones
    Write     a store of registers, unseen by products and copies until `Fence`
    Work      time only

A warpgroup is one agent: the compiler puts barriers of its own between its warps. A tag says what a buffer must hold,
such as ("keys", 3) for the fourth pair. Source: PTX ISA 8.0, sections on mbarrier and on wgmma.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Tag = tuple[str, int]
KEYS, LEFT, ROPE, BOX = 64, 256, 64, 64  # keys of a block, columns of a half, of the rope part, of a box
BOXES = LEFT // BOX


class Wait(NamedTuple):
    """Wait until `phase` of a barrier is over, by its parity."""

    barrier: str
    phase: int
    parity: int


class Arrive(NamedTuple):
    """The one arrival that a barrier counts."""

    barrier: str


class Copy(NamedTuple):
    """Expect bytes at a barrier and start copies: (buffer, what it will hold, bytes)."""

    barrier: str
    expected: int
    parts: tuple[tuple[str, Tag, int], ...]


class Product(NamedTuple):
    """A product of the tensor cores: what it reads, and its FLOPs."""

    name: str
    reads: tuple[tuple[str, Tag], ...]
    flops: int


class Retire(NamedTuple):
    """Wait until all products but the newest ones are over."""

    newest: int


class Read(NamedTuple):
    """Load from shared memory to registers."""

    buffer: str
    tag: Tag


class Write(NamedTuple):
    """Store from registers to shared memory."""

    buffer: str
    tag: Tag


class Fence(NamedTuple):
    """Let products and copies see what this agent stored."""


class Work(NamedTuple):
    """Something that takes time and touches nothing shared."""

    name: str


Event = Wait | Arrive | Copy | Product | Retire | Read | Write | Fence | Work
Programs = Mapping[str, Sequence[Event]]


class Hazard(NamedTuple):
    """What went wrong first in some order, and that order: (agent, event) each; an agent "copy" is an end of copies.

    kind: "deadlock", "phase" (a wait that takes another phase for its own, or misses it), "overwrite" (of what is read
    or written at that time), "content" (a read of what is not there yet, or no longer), "fence", or "copy at the end".
    """

    kind: str
    what: str
    order: tuple[tuple[str, object], ...]


def wait(barrier: str, phase: int) -> Wait:
    """Return the wait for a phase, counted from 0."""
    return Wait(barrier, phase, phase & 1)


def copy(barrier: str, tag: Tag, *parts: tuple[str, int], rows: int = KEYS) -> Copy:
    """Return the copies of (buffer, columns) of 16-bit rows on one barrier."""
    sized = tuple((buffer, tag, rows * columns * 2) for buffer, columns in parts)
    return Copy(barrier, sum(size for _, _, size in sized), sized)


def product(name: str, *reads: tuple[str, Tag], columns: int, rows: int = 64) -> Product:
    """Return a product of rows x 64 x columns."""
    return Product(name, reads, 2 * rows * KEYS * columns)


def zero(buffer: str, pair: int) -> tuple[Event, ...]:
    """Zero rows of a tile past the last key."""
    return Read(buffer, ("keys", pair)), Write(buffer, ("values", pair)), Fence()


def load_query(item: int) -> Copy:
    """Start the copy of the query of a piece."""
    return copy("q_full", ("query", item), ("ql", LEFT), ("qr", LEFT), ("qt", ROPE))


def load_left(pair: int) -> Copy:
    """Start the copy of the left half of an even block."""
    return copy("left0_full", ("keys", pair), ("left0", LEFT))


def load_left_and_rope(pair: int) -> Copy:
    """Start the copies of the left half of an odd block and of its rope part."""
    return copy("left1_full", ("keys", pair), ("rope1", ROPE), ("left1", LEFT))


def load_right(pair: int) -> Copy:
    """Start the copy of the right half of an odd block."""
    return copy("right1_full", ("keys", pair), ("right1", LEFT))


def load_right_by_boxes_and_rope(pair: int) -> Iterator[Copy]:
    """Start the copies of the right half of an even block, box by box, and of its rope part."""
    for c in range(BOXES):
        yield copy(f"right0_full.{c}", ("keys", pair), (f"right0.{c}", BOX))
    yield copy("rope0_full", ("keys", pair), ("rope0", ROPE))


def pairs_of(pieces: Sequence[int]) -> Iterator[tuple[int, int, bool, bool]]:
    """Yield (pair, piece, the piece's last one, more pairs follow) for pieces of so many pairs."""
    pair = 0
    for item, count in enumerate(pieces):
        for i in range(count):
            yield pair, item, i + 1 == count, i + 1 < count or item + 1 < len(pieces)
            pair += 1


def even(pieces: Sequence[int]) -> Iterator[Event]:
    """The first warpgroup of `seesaw`: `even_step` for each pair, and what lies around it."""
    yield load_query(0)
    yield load_left(0)
    yield load_left_and_rope(0)
    item = -1
    for pair, piece, edge, more in pairs_of(pieces):
        if piece != item:
            item = piece
            yield wait("q_full", item)
        keys, query, values = ("keys", pair), ("query", item), ("values" if edge else "keys", pair)
        yield wait("left0_full", pair)
        yield product("scores", ("ql", query), ("left0", keys), columns=LEFT)
        for c in range(BOXES):
            yield wait(f"right0_full.{c}", pair)
            yield product("scores", ("qr", query), (f"right0.{c}", keys), columns=BOX)
        yield wait("rope0_full", pair)
        yield product("scores", ("qt", query), ("rope0", keys), columns=ROPE)
        yield Retire(0)
        if edge:
            yield from zero("left0", pair)
        yield Work("maximum")
        yield from (Write("m0", keys), Write("a0", keys), Arrive("max0"))
        yield from (Work("exponentials"), Work("rescale"))
        yield product("values", ("left0", values), columns=LEFT)
        yield wait("max1", pair)
        yield from (Read("a1", keys), Read("m1", keys), Work("hand over"))
        yield from (Write("rope0", ("weights", pair)), Fence(), Arrive("p0"))
        yield Retire(0)
        if more:
            yield load_left(pair + 1)
        yield Work("rescale")
        yield wait("p1", pair)
        yield wait("left1_full", pair)
        if edge:
            yield from zero("left1", pair)
        yield product("values", ("rope1", ("weights", pair)), ("left1", values), columns=LEFT)
        if edge and more:
            yield load_query(item + 1)
        yield Retire(0)
        if more:
            yield load_left_and_rope(pair + 1)
        if edge:
            yield from (Write("l0", ("sum", item)), Arrive("sum0"), wait("sum1", item), Read("l1", ("sum", item)))


def odd(pieces: Sequence[int]) -> Iterator[Event]:
    """The second warpgroup of `seesaw`: `odd_step` for each pair, and what lies around it."""
    yield from load_right_by_boxes_and_rope(0)
    yield load_right(0)
    item = -1
    for pair, piece, edge, more in pairs_of(pieces):
        if piece != item:
            item = piece
            yield wait("q_full", item)
        keys, query, values = ("keys", pair), ("query", item), ("values" if edge else "keys", pair)
        yield wait("right1_full", pair)
        yield product("scores", ("qr", query), ("right1", keys), columns=LEFT)
        yield wait("left1_full", pair)
        yield product("scores", ("ql", query), ("left1", keys), columns=LEFT)
        yield product("scores", ("qt", query), ("rope1", keys), columns=ROPE)
        yield Retire(0)
        if edge:
            yield from zero("right1", pair)
        yield Work("maximum")
        yield wait("max0", pair)
        yield from (Read("m0", keys), Read("a0", keys), Write("m1", keys), Write("a1", keys), Arrive("max1"))
        yield Work("exponentials")
        yield from (Write("rope1", ("weights", pair)), Fence(), Arrive("p1"))
        yield Work("rescale")
        yield product("values", ("right1", values), columns=LEFT)
        yield wait("p0", pair)
        yield wait("rope0_full", pair)
        for c in range(BOXES):
            yield wait(f"right0_full.{c}", pair)
        boxes = tuple(f"right0.{c}" for c in range(BOXES))
        if edge:
            for box in boxes:
                yield from zero(box, pair)
        yield product("values", ("rope0", ("weights", pair)), *((box, values) for box in boxes), columns=LEFT)
        yield Retire(1)
        if more:
            yield load_right(pair + 1)
        yield Retire(0)
        if more:
            yield from load_right_by_boxes_and_rope(pair + 1)
        if edge:
            yield from (Write("l1", ("sum", item)), Arrive("sum1"), wait("sum0", item), Read("l0", ("sum", item)))


def producer(pieces: Sequence[int], stages: int = 2, buffers: int = 2, rows: int = 16) -> Iterator[Event]:
    """The warp of `swap` that starts copies, for pieces of so many blocks; `buffers` other than stages is a fault."""
    turn = 0
    for item, count in enumerate(pieces):
        yield Wait("q_empty", item - 1, (item & 1) ^ 1)
        yield copy("q_full", ("query", item), ("ql", LEFT), ("qr", LEFT), ("qt", ROPE), rows=rows)
        for _ in range(count):
            stage, at, lap = turn % stages, turn % buffers, turn // stages
            yield Wait(f"left_empty.{stage}", lap - 1, (lap & 1) ^ 1)
            yield copy(f"left_full.{stage}", ("keys", turn), (f"left.{at}", LEFT), (f"rope.{at}", ROPE))
            yield Wait(f"right_empty.{stage}", lap - 1, (lap & 1) ^ 1)
            yield copy(f"right_full.{stage}", ("keys", turn), (f"right.{at}", LEFT))
            turn += 1


def consumer(pieces: Sequence[int], stages: int = 2, buffers: int = 2, rows: int = 16) -> Iterator[Event]:
    """The four warps of `swap` that compute: `block_step` for each block, and what lies around it."""
    turn = 0
    for item, count in enumerate(pieces):
        yield wait("q_full", item)
        for i in range(count):
            stage, at, lap, edge = turn % stages, turn % buffers, turn // stages, i + 1 == count
            keys, query, values = ("keys", turn), ("query", item), ("values" if edge else "keys", turn)
            left, right, weights = f"left.{at}", f"right.{at}", ("weights", ("weights", turn))
            yield wait(f"left_full.{stage}", lap)
            yield product("scores", (f"rope.{at}", keys), ("qt", query), columns=ROPE, rows=rows)
            yield product("scores", (left, keys), ("ql", query), columns=LEFT, rows=rows)
            yield wait(f"right_full.{stage}", lap)
            yield product("scores", (right, keys), ("qr", query), columns=LEFT, rows=rows)
            yield Retire(0)
            yield from (Work("maximum"), Work("exponentials"), Write(*weights), Fence())
            if edge:
                yield from (*zero(left, turn), *zero(right, turn))
            yield Work("rescale")
            yield product("values", (left, values), weights, columns=LEFT, rows=rows)
            yield product("values", (right, values), weights, columns=LEFT, rows=rows)
            yield from (Retire(1), Arrive(f"left_empty.{stage}"), Retire(0), Arrive(f"right_empty.{stage}"))
            turn += 1
        yield Arrive("q_empty")


def seesaw(pieces: Sequence[int]) -> dict[str, list[Event]]:
    """Return both warpgroups of `seesaw` over pieces of so many pairs each."""
    return {"even": list(even(pieces)), "odd": list(odd(pieces))}


def swap(pieces: Sequence[int], stages: int = 2, buffers: int = 2) -> dict[str, list[Event]]:
    """Return producer and consumer of `swap` over pieces of so many blocks each."""
    return {"producer": list(producer(pieces, stages, buffers)), "consumer": list(consumer(pieces, stages, buffers))}
