"""Run the programs of `protocol` through in every order, each state once, and say what goes wrong first.

Motivation. Only barriers and copies order two agents, so an agent is interrupted before it waits and after it arrives
or starts a copy; what lies between is done at once. Each copy ends by itself, at any later moment. What two agents do
without order is then met in both orders: as a read of what is not there, or as a write into what is read.
"""

from collections.abc import Iterator, Mapping, Sequence

from tiers.tier2_triton.hopper.protocol import (
    Arrive,
    Copy,
    Event,
    Fence,
    Hazard,
    Product,
    Programs,
    Read,
    Retire,
    Wait,
    Write,
)

MOVING = ("moving", 0)  # what a buffer holds while copies into it are under way
Held = tuple[tuple[str, int] | None, bool]  # its tag, and whether it was stored without a fence since
Bar = tuple[int, bool, int]  # phases that are over, whether somebody arrived, bytes that are still to come
Step = tuple[str, object]  # an agent and its event, or "copy" and the part that came
State = tuple[tuple[int, ...], tuple[Bar, ...], tuple[tuple[int, int, int], ...], tuple[Held, ...]]


class _Found(Exception):
    """A hazard: its kind, and what was seen."""


class _Run:
    """The programs, with names as numbers and the products that are under way at each place of each agent."""

    def __init__(self, programs: Programs) -> None:
        self.agents, self.programs = list(programs), [list(p) for p in programs.values()]
        events = [e for p in self.programs for e in p]
        self.bars = {n: i for i, n in enumerate(dict.fromkeys(b for e in events for b in _barrier(e)))}
        self.buffers = {n: i for i, n in enumerate(dict.fromkeys(b for e in events for b in _touched(e)))}
        self.under_way = [_under_way(p) for p in self.programs]
        self.stop = [[_may_stop(p, i) for i in range(len(p) + 1)] for p in self.programs]
        self.near = [[self._until_stop(a, i) for i in range(len(p) + 1)] for a, p in enumerate(self.programs)]
        numbered = [(a, i, e) for a, p in enumerate(self.programs) for i, e in enumerate(p)]
        self.copies = {(a, i): e for a, i, e in numbered if isinstance(e, Copy)}
        self.stored = [[_stored_before(p, i) for i in range(len(p))] for p in self.programs]

    def _until_stop(self, agent: int, at: int) -> frozenset[str]:
        """The barriers and buffers of what an agent does next without an interruption."""
        program, found = self.programs[agent], set[str]()
        for event in program[at : next((i for i in range(at + 1, len(program)) if self.stop[agent][i]), len(program))]:
            found |= _named(event)
        return frozenset(found)

    def start(self) -> State:
        return (0,) * len(self.programs), ((0, False, 0),) * len(self.bars), (), ((None, False),) * len(self.buffers)

    def blocked(self, state: State, agent: int) -> bool:
        """True where an agent has ended or waits; raises where its wait means a phase that is over for too long."""
        at, program = state[0][agent], self.programs[agent]
        if at == len(program):
            return True
        event = program[at]
        if not isinstance(event, Wait):
            return False
        done = state[1][self.bars[event.barrier]][0]
        passes = done & 1 != event.parity
        if (passes and done != event.phase + 1) or (not passes and done > event.phase):
            raise _Found("phase", f"{self.agents[agent]}: {event} where {done} phases are over")
        return not passes

    def advance(self, state: State, agent: int) -> State:
        """Run an agent up to where others may come in between."""
        pos, bars, flying, held = list(state[0]), list(state[1]), list(state[2]), list(state[3])
        program, at = self.programs[agent], state[0][agent]
        while True:
            event = program[at]
            pos[agent] = at
            match event:
                case Arrive(barrier):
                    _arrive(bars, self.bars[barrier], 0)
                case Copy(barrier, expected, parts):
                    for k, (buffer, _, _) in enumerate(parts):
                        i = self.buffers[buffer]
                        self._may_change(agent, event, buffer, pos, held)
                        if held[i][1]:
                            raise _Found("fence", f"{self.agents[agent]}: {event} after a store without a fence")
                        held[i] = (MOVING, False)
                        flying.append((agent, at, k))
                    _arrive(bars, self.bars[barrier], expected)
                case Product(_, reads, _):
                    for buffer, tag in reads:
                        self._must_hold(agent, event, buffer, tag, held)
                        if held[self.buffers[buffer]][1]:
                            raise _Found("fence", f"{self.agents[agent]}: {event} after a store without a fence")
                case Read(buffer, tag):
                    self._must_hold(agent, event, buffer, tag, held)
                case Write(buffer, tag):
                    self._may_change(agent, event, buffer, pos, held)
                    held[self.buffers[buffer]] = (tag, True)
                case Fence():
                    for i in (self.buffers[name] for name in self.stored[agent][at]):
                        held[i] = (held[i][0], False)
            at += 1
            if self.stop[agent][at]:
                pos[agent] = at
                return tuple(pos), tuple(bars), tuple(sorted(flying)), tuple(held)

    def following(self, state: State, reduced: bool) -> Iterator[tuple[State, Step]]:
        """Each state that can come next, with what leads to it; raises where a hazard is seen."""
        stuck = True
        for agent, name in enumerate(self.agents):
            if not self.blocked(state, agent):
                stuck = False
                yield self.advance(state, agent), (name, self.programs[agent][state[0][agent]])
        for which in self.next_ends(state) if reduced else state[2]:
            stuck = False
            yield self.end_copy(state, which), ("copy", self.copies[which[:2]].parts[which[2]])
        left = [p[at] for p, at in zip(self.programs, state[0], strict=True) if at < len(p)]
        if not left and state[2]:
            raise _Found("copy at the end", f"{len(state[2])} copies are under way where all agents have ended")
        if left and stuck:
            raise _Found("deadlock", "; ".join(map(str, left)))

    def next_ends(self, state: State) -> list[tuple[int, int, int]]:
        """The copies whose end somebody could notice now, of those that share one arrival the first.

        The end of another one commutes with all that can happen next, so it is as well met later.
        """
        near = [name for agent, at in enumerate(state[0]) for name in self.near[agent][at]]
        first = [f for i, f in enumerate(state[2]) if not i or state[2][i - 1][:2] != f[:2]]
        return [f for f in first if not _named(self.copies[f[:2]]).isdisjoint(near)]

    def end_copy(self, state: State, which: tuple[int, int, int]) -> State:
        """End one copy: its buffer is new, its bytes have come."""
        event = self.copies[which[:2]]
        buffer, tag, size = event.parts[which[2]]
        bars, held = list(state[1]), list(state[3])
        held[self.buffers[buffer]] = (tag, False)
        i = self.bars[event.barrier]
        done, arrived, due = bars[i]
        bars[i] = (done + 1, False, 0) if arrived and due == size else (done, arrived, due - size)
        return state[0], tuple(bars), tuple(f for f in state[2] if f != which), tuple(held)

    def _may_change(self, agent: int, event: Event, buffer: str, pos: list[int], held: list[Held]) -> None:
        if any(buffer in ways[at] for ways, at in zip(self.under_way, pos, strict=True)):
            raise _Found("overwrite", f"{self.agents[agent]}: {event} while a product reads {buffer}")
        if held[self.buffers[buffer]][0] == MOVING:
            raise _Found("overwrite", f"{self.agents[agent]}: {event} while a copy fills {buffer}")

    def _must_hold(self, agent: int, event: Event, buffer: str, tag: object, held: list[Held]) -> None:
        found = held[self.buffers[buffer]][0]
        if found != tag:
            raise _Found("content", f"{self.agents[agent]}: {event}, but {buffer} holds {found}")


def _arrive(bars: list[Bar], i: int, expected: int) -> None:
    done, arrived, due = bars[i]
    if arrived:
        raise _Found("phase", f"a second arrival in phase {done}")
    due += expected
    bars[i] = (done + 1, False, 0) if due == 0 else (done, True, due)


def _may_stop(program: Sequence[Event], at: int) -> bool:
    """True before a wait, after an arrival or a copy was started, and at the end."""
    before = at > 0 and isinstance(program[at - 1], Arrive | Copy)
    return at == len(program) or before or isinstance(program[at], Wait)


def _named(event: Event) -> set[str]:
    return {*_barrier(event), *_touched(event)}


def _barrier(event: Event) -> list[str]:
    return [event.barrier] if isinstance(event, Wait | Arrive | Copy) else []


def _touched(event: Event) -> list[str]:
    match event:
        case Read(buffer, _) | Write(buffer, _):
            return [buffer]
        case Product(_, reads, _):
            return [buffer for buffer, _ in reads]
        case Copy(_, _, parts):
            return [buffer for buffer, _, _ in parts]
    return []


def _under_way(program: Sequence[Event]) -> list[frozenset[str]]:
    """Return for each place of a program the buffers that its own products may still read."""
    products: list[list[str]] = []
    found = [frozenset[str]()]
    for event in program:
        if isinstance(event, Product):
            products.append(_touched(event))
        elif isinstance(event, Retire):
            products = products[len(products) - event.newest :] if event.newest else []
        found.append(frozenset(buffer for reads in products for buffer in reads))
    return found


def _stored_before(program: Sequence[Event], at: int) -> list[str]:
    """Return what was stored since the last fence."""
    found = []
    while at and not isinstance(program[at - 1], Fence):
        at -= 1
        event = program[at]
        if isinstance(event, Write):
            found.append(event.buffer)
    return found


def explore(programs: Programs, reduced: bool = True) -> tuple[Hazard | None, int]:
    """Return the first hazard that some order of the programs has, None where none has, and how many states were met.

    Orders are followed depth first. Without `reduced` a copy may also end where nobody could notice; it finds the same.
    """
    run = _Run(programs)
    start = run.start()
    came: dict[State, tuple[State, Step] | None] = {start: None}
    stack = [start]
    while stack:
        state, found = stack.pop(), list[tuple[State, Step]]()
        try:
            for after, step in run.following(state, reduced):
                found.append((after, step))
        except _Found as hazard:
            kind, what = hazard.args
            return Hazard(kind, what, _order(came, state)), len(came)
        for after, step in found:
            if after not in came:
                came[after] = (state, step)
                stack.append(after)
    return None, len(came)


def _order(came: Mapping[State, tuple[State, Step] | None], state: State) -> tuple[Step, ...]:
    steps = []
    while (before := came[state]) is not None:
        state, step = before
        steps.append(step)
    return tuple(reversed(steps))
