"""The figures of the Hopper decode kernel: its schedule, by running the model of its barriers with durations, and its
shared memory, by the shapes of its tiles. `figures.py` writes them.
"""

from dataclasses import dataclass, field

from figures_flow import Sheet
from pieces import record

from mla.aot import SHARED_LIMIT
from tiers.tier2_triton.hopper.protocol import BOXES, Arrive, Copy, Event, Product, Programs, Retire, Wait, Work, seesaw

# Durations, in cycles. The tensor cores of an SM do 2048 multiply-adds of 16-bit numbers a cycle (NVIDIA H100 white
# paper: 989.4 TFLOP/s over 132 SMs at 1.83 GHz), two FLOPs each.
FLOPS_A_CYCLE = 4096
# Clock readings inside a kernel of this form, 128 heads, cold L2: the right half of an even block and its rope part are
# there 1400 cycles after the product that used their place; a maximum takes 200, exponentials and rescaling 1200.
# From L2 it is 900.
RELOAD, RELOAD_FROM_L2, MAXIMUM, EXPONENTIALS_AND_RESCALE = 1400, 900, 200, 1200
RELOADED_BYTES = 64 * 320 * 2
# What L2 gives an SM in a cycle; the rest of a reload is latency.
BYTES_A_CYCLE = 64
LATENCY = RELOAD - RELOADED_BYTES // BYTES_A_CYCLE
LATENCY_FROM_L2 = RELOAD_FROM_L2 - RELOADED_BYTES // BYTES_A_CYCLE
# A thread of 128 holds 128 of 64 x 256 outputs and 32 of 64 x 64 weights, and its warp multiplies one a cycle.
RESCALE = 64 * 256 // 128
HAND_OVER = 64 * 64 // 128
WORK = {
    "maximum": MAXIMUM, "exponentials": EXPONENTIALS_AND_RESCALE - RESCALE, "rescale": RESCALE, "hand over": HAND_OVER,
}  # fmt: skip

Span = tuple[str, str, int, int]  # row, what, start, end


@dataclass
class Clock:
    """A run of programs in time: who stands where, until when tensor cores and copies are busy, what was seen."""

    programs: Programs
    latency: int
    now: dict[str, int] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)
    groups: dict[str, list[int]] = field(default_factory=dict)  # ends of products, of each agent
    tensor: int = 0
    copies: int = 0
    over: dict[str, list[int]] = field(default_factory=dict)  # when each phase of a barrier ended
    spans: list[Span] = field(default_factory=list)

    def wakes(self, agent: str) -> int | None:
        """When an agent can take its next event, or None where nobody has made that possible yet."""
        event = self.programs[agent][self.at[agent]]
        if not isinstance(event, Wait):
            return self.now[agent]
        ends = self.over.get(event.barrier, [])
        return max(self.now[agent], ends[event.phase]) if event.phase < len(ends) else None

    def take(self, agent: str, event: Event, start: int) -> None:
        """Let an agent do its next event, which begins at `start`."""
        end = start
        match event:
            case Work(name):
                end = start + WORK[name]
                self.spans.append((agent, name, start, end))
            case Product(name, _, flops):
                begin = max(start, self.tensor)
                self.tensor = begin + flops // FLOPS_A_CYCLE
                self.groups[agent].append(self.tensor)
                self.spans.append(("tensor cores", f"{name} of {agent}", begin, self.tensor))
            case Retire(newest):
                waited = self.groups[agent][: len(self.groups[agent]) - newest]
                end = max([start, *waited])
                self.groups[agent] = self.groups[agent][len(waited) :]
            case Arrive(barrier):
                self.over.setdefault(barrier, []).append(start)
            case Copy(barrier, expected, _):
                begin = max(start + self.latency, self.copies)
                self.copies = begin + expected // BYTES_A_CYCLE
                self.over.setdefault(barrier, []).append(self.copies)
                self.spans.append(("copies", barrier.split("_")[0], start, self.copies))
        self.now[agent] = end
        self.at[agent] += 1


def timed(programs: Programs, latency: int = LATENCY) -> list[Span]:
    """Run programs of `protocol` with durations; the agent that can go on first does.

    Products of both warpgroups go through the tensor cores in the order of their issue, copies through one pipe. Raises
    ValueError where all wait.
    """
    now, at = (dict.fromkeys(programs, 0) for _ in range(2))
    clock = Clock(programs, latency, now, at, {agent: [] for agent in programs})
    while left := [agent for agent, events in programs.items() if clock.at[agent] < len(events)]:
        ready = [(at, i, agent) for i, agent in enumerate(left) if (at := clock.wakes(agent)) is not None]
        if not ready:
            raise ValueError(f"all wait: {[programs[agent][clock.at[agent]] for agent in left]}")
        start, _, agent = min(ready)
        clock.take(agent, programs[agent][clock.at[agent]], start)
    return clock.spans


def of_two_pairs(latency: int = LATENCY) -> tuple[list[Span], int]:
    """Return the spans of two pairs in the middle of a long piece, from 0 on, and how long they take.

    Spans of one kind that touch are one. The pattern repeats after two pairs.
    """
    spans = timed(seesaw((12,)), latency)
    first = [start for row, what, start, _ in spans if what == "scores of even"][:: BOXES + 2]
    begin, end = first[6], first[8]
    found: list[Span] = []
    for row, what, start, stop in sorted(spans, key=lambda span: (span[0], span[2])):
        if stop <= begin or start >= end:
            continue
        if found and found[-1][:2] == (row, what) and found[-1][3] >= start - begin:
            found[-1] = (row, what, found[-1][2], max(found[-1][3], stop - begin))
        else:
            found.append((row, what, max(0, start - begin), stop - begin))
    return [(row, what, start, min(stop, end - begin)) for row, what, start, stop in found], end - begin


COPIES = {"left0": "L0", "right0": "R0", "right1": "R1", "left1": "L1"}
MEASURED = (5723, 5511)  # cycles a pair, by clock readings inside the kernel: keys from memory, and from L2


def schedule() -> Sheet:
    """Two pairs of blocks in time: both warpgroups, the tensor cores and the copies."""
    spans, length = of_two_pairs()
    products = sum(e.flops for events in seesaw((2,)).values() for e in events if isinstance(e, Product))
    ideal = products // FLOPS_A_CYCLE
    top, scale = 44.0, 1 / 18
    bottom = top + length * scale
    s = Sheet(
        "hopper-schedule",
        "Two pairs of blocks in time, by the model of the barriers",
        f"Two pairs take {length:,} cycles, of which the tensor cores are busy {ideal:,}. While one warpgroup computes "
        "exponentials, products of the other run.",
        int(bottom + 136),
    )
    lanes = {"even": (38.0, 60.0), "odd": (101.0, 60.0), "tensor cores": (168.0, 85.0)}
    lanes |= {name: (260.0 + 25 * i, 21.0) for i, name in enumerate(COPIES)}
    for name, (x, w) in (*list(lanes.items())[:3], ("copies", (260, 96))):
        s.text(x + w / 2, 16, "tensor" if name == "tensor cores" else name, "middle", bold=True)
    s.text(210.5, 32, "cores", "middle", bold=True)
    for name, words in COPIES.items():
        s.text(lanes[name][0] + 10.5, 34, words, "middle")
    for cycle in range(0, length, 2000):
        y = top + cycle * scale
        s.line([(34, y), (356, y)], width=0.4, stroke_opacity="0.5")
        s.text(30, y + 4, f"{cycle // 1000}k" if cycle else "0", "end")
    fills = {"maximum": 0.65, "exponentials": 0.25, "rescale": 0.9, "hand over": 0.9}
    for row, what, start, stop in spans:
        y, h = top + start * scale, (stop - start) * scale
        if row == "copies":
            if what in lanes:
                s.rect(lanes[what][0], y, lanes[what][1], h, "per-head", 0.3)
            continue
        x, w = lanes[row]
        agent = what.split(" of ")[-1] if row == "tensor cores" else row
        fill = 0.3 if row == "tensor cores" else fills[what]
        s.rect(x, y, w, h, "latent" if agent == "even" else "rope", fill, stroke_width="0.8")
        if h >= 14 and (row == "tensor cores" or what == "exponentials"):
            said = "exp" if what == "exponentials" else what.replace(" of ", " ")
            s.text(x + w / 2, y + h / 2 + 4.5, said, "middle")
    y = bottom + 16
    s.text(4, y, "cycles from top to bottom; a gap is a wait")
    for x, words, fill in ((4, "maximum", 0.65), (92, "exponentials", 0.25), (202, "rescale, hand over", 0.9)):
        s.rect(x, y + 9, 11, 11, "latent", fill)
        s.text(x + 16, y + 19, words)
    s.text(4, y + 40, "L0, R0: left and right half of the even block, L1, R1")
    s.text(4, y + 56, "of the odd one; a copy begins with its latency")
    from_l2 = of_two_pairs(LATENCY_FROM_L2)[1]
    s.text(4, y + 80, f"a pair: {length // 2:,} cycles, tensor cores busy {ideal / length:.0%}", bold=True)
    s.text(4, y + 97, f"by clock {MEASURED[0]:,}; products alone {ideal // 2:,}")
    s.text(4, y + 114, f"keys from L2: {from_l2 // 2:,}, by clock {MEASURED[1]:,}")
    return s


BARRIERS = 11 + 4  # one for each name in `seesaw`, and one more for each further box of right0
TILE = {"left": 64 * 256 * 2, "right": 64 * 256 * 2, "rope": 64 * 64 * 2}
ROW_NUMBERS = 6 * 64 * 4  # m0, m1, a0, a1, l0, l1: a float32 for each row


def shared_bytes() -> dict[str, int]:
    """Return the bytes of what `seesaw` keeps in shared memory; "compiler" is the rest of what was compiled."""
    variants = record("aot.json")["kernels"]["hopper.seesaw"]["variants"].values()
    total = max(variant["rows"]["sm_90"]["shared"] for variant in variants)
    found = {"query": sum(TILE.values()), "block 0": sum(TILE.values()), "block 1": sum(TILE.values())}
    found |= {"rows": ROW_NUMBERS, "barriers": 8 * BARRIERS}
    return found | {"compiler": total - sum(found.values())}


def shared_memory() -> Sheet:
    """The shared memory of an SM, tile by tile, and its sum."""
    sizes, limit = shared_bytes(), SHARED_LIMIT["sm_90"]
    total = sum(sizes.values())
    s = Sheet(
        "hopper-shared-memory",
        "What lies in the shared memory of an SM",
        "; ".join(f"{name}: {size:,} bytes" for name, size in sizes.items()) + f". Sum {total:,} of {limit:,}.",
        470,
    )
    tiles = (
        ("query", "query: 64 rows", "query", [["ql"], ["qr"], ["qt"]]),
        ("block 0", "even block: 64 keys", "latent", [
            ["left0", "even: scores,", "then values"], ["right0, in 4 boxes", "even: scores,", "then odd: values"],
            ["rope0", "then", "p0"]]),
        ("block 1", "odd block: 64 keys", "rope", [
            ["left1", "odd: scores,", "then even: values"], ["right1", "odd: scores,", "then values"],
            ["rope1", "then", "p1"]]),
    )  # fmt: skip
    y = 18.0
    for name, title, colour, segments in tiles:
        s.text(4, y, title, bold=True)
        s.text(356, y, f"{sizes[name]:,} B", "end")
        x, h = 4.0, 8 + 16.0 * max(len(lines) + 1 for lines in segments)
        for (part, size), lines in zip(TILE.items(), segments, strict=True):
            w = 352 * size / sum(TILE.values())
            s.rect(x, y + 7, w, h, "per-head" if part == "rope" else colour, 0.2)
            for i, words in enumerate([*lines, f"{size:,}"]):
                s.text(x + w / 2, y + 23 + 16 * i, words, "middle", bold=i == 0 and part != "rope")
            x += w
        y += h + 29
    rest = (
        ("rows", "m0 m1 a0 a1 l0 l1, 64 rows each"),
        ("barriers", f"{BARRIERS} barriers"),
        ("compiler", "the compiler's own"),
    )
    for name, words in rest:
        s.text(4, y, words)
        s.text(356, y, f"{sizes[name]:,} B", "end")
        y += 18
    s.line([(4, y - 10), (356, y - 10)], width=0.7)
    s.text(4, y + 8, "together", bold=True)
    s.text(356, y + 8, f"{total:,} of {limit:,} B", "end", bold=True)
    x = 4.0
    for name, colour in (("query", "query"), ("block 0", "latent"), ("block 1", "rope"), ("compiler", "grey")):
        small = sizes["rows"] + sizes["barriers"] if name == "compiler" else 0
        w = 352 * (sizes[name] + small) / limit
        s.rect(x, y + 18, w, 16, colour, 0.5, stroke_width="0.6")
        x += w
    s.rect(4, y + 18, 352, 16, "grey", 0.0)
    s.height = int(y + 42)
    return s
