"""The barriers of the Hopper decode kernels in every order: no deadlock, no overwrite, no read of what is not there.

The programs are held to the kernels' text; faults are planted to see that each kind is found. No triton, no GPU.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tiers.tier2_triton.hopper import protocol
from tiers.tier2_triton.hopper.explore import explore
from tiers.tier2_triton.hopper.protocol import (
    Arrive,
    Copy,
    Fence,
    Hazard,
    Product,
    Read,
    Retire,
    Wait,
    Work,
    Write,
    seesaw,
    swap,
)

HOPPER = Path(__file__).parents[1] / "tiers" / "tier2_triton" / "hopper"
PIECES = [(1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (3, 3), (1, 1, 1), (2, 3, 1), (1, 3, 2, 1)]


# Right in every order


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("kernel", [seesaw, swap], ids=["seesaw", "swap"])
def test_no_order_has_a_hazard(kernel, pieces):
    hazard, states = explore(kernel(pieces))
    assert hazard is None, told(hazard)
    assert states > sum(pieces) * 10


@pytest.mark.parametrize("pieces", [(1,), (2, 3), (1, 1, 1)], ids=str)
def test_ends_of_copies_that_nobody_notices_change_nothing(pieces):
    (none, few), (nothing, all_of_them) = explore(swap(pieces)), explore(swap(pieces), reduced=False)
    assert (none, nothing) == (None, None)
    assert all_of_them > 2 * few


def test_every_stage_count_of_swap_is_right():
    for stages in (1, 2, 3):
        hazard, _ = explore(swap((1, 4, 2), stages, stages))
        assert hazard is None, told(hazard)


def told(hazard: Hazard | None) -> str:
    """A hazard and the last steps of its order, one on a line."""
    return "" if hazard is None else "\n".join([hazard.kind, hazard.what, *map(str, hazard.order[-30:])])


# The programs are those of the kernels


def kernel_steps(file: str, name: str) -> list[str]:
    """Waits, arrivals, copies, products and stores of a kernel's function, in the order of its text."""
    tree = ast.parse((HOPPER / file).read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return [step for statement in function.body for step in steps_of(statement)]


def steps_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.For):
        inside = [step for statement in node.body for step in steps_of(statement)]
        assert ast.unparse(node.iter) == "range(4)"
        return inside * 4
    found = [step for child in ast.iter_child_nodes(node) for step in steps_of(child)]
    if isinstance(node, ast.Call):
        called, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
        first = first.split(".index")[0].removesuffix("_s")
        if called == "mbarrier.wait":
            found.append(f"wait {first}")
        elif called == "mbarrier.arrive":
            found.append(f"arrive {first}")
        elif called in ("warpgroup_mma", "scores", "scores_of_few"):
            found.append("product")
        elif called == "warpgroup_mma_wait":
            found.append(f"retire {first}")
        elif called == "zero_rows":
            found.append(f"zero {first.replace('k_', '')}")
        elif called == "fence_async_shared":
            found.append("fence")
        elif called == "load_keys":
            found.append(f"copy {ast.unparse(node.args[4]).split('.index')[0]}")
        elif called.startswith("load_"):
            found.append(called)
        elif called.endswith(".store") and called.split(".")[0] != "gl":
            found.append(f"write {called.split('.')[0].removesuffix('_s')}")
        elif called.endswith(".load") and called.split(".")[0] != "gl":
            found.append(f"read {called.split('.')[0].removesuffix('_s')}")
    return found


LOADS = {
    "left0_full": "load_left", "left1_full": "load_left_and_rope", "right1_full": "load_right", "q_full": "load_query",
    "rope0_full": "load_right_by_boxes_and_rope",
}  # fmt: skip


def model_steps(events, by_function: bool) -> list[str]:
    """The same of a program; copies by the function that starts them, or by their barrier."""
    found: list[str] = []
    for event in events:
        match event:
            case Wait(barrier, _, _):
                found.append(f"wait {barrier.split('.')[0]}")
            case Arrive(barrier):
                found.append(f"arrive {barrier.split('.')[0]}")
            case Copy(barrier, _, parts):
                name = barrier.split(".")[0]
                if by_function:
                    found += [LOADS[name]] if name in LOADS else []
                else:
                    found += ["load_query"] if name == "q_full" else [f"copy {name}"] * len(parts)
            case Product():
                found.append("product")
            case Retire(newest):
                found.append(f"retire {newest}")
            case Fence():
                found += [] if found[-1].startswith("zero") else ["fence"]
            case Write(buffer, tag):
                name = buffer.split(".")[0]
                zeroed = tag[0] == "values"
                if not zeroed or found[-1] != f"zero {name}":
                    found.append(f"{'zero' if zeroed else 'write'} {name}")
            case Read(buffer, tag):
                found += [f"read {buffer}"] if tag[0] != "keys" or buffer[0] in "am" else []
    return found


@pytest.mark.parametrize("agent", ["even", "odd"])
def test_a_step_of_seesaw_is_that_of_the_kernel(agent):
    program = seesaw((1, 1))[agent]
    start = next(i for i, e in enumerate(program) if e == Wait("q_full", 0, 0)) + 1
    stop = next(i for i, e in enumerate(program) if isinstance(e, Write) and e.tag == ("sum", 0))
    # warpgroup_mma_init stands before its product, and a row that is read for its layout is no event
    assert model_steps(program[start:stop], True) == kernel_steps("seesaw.py", f"{agent}_step")


def test_a_step_of_swap_is_that_of_the_kernel():
    program = swap((1,))["consumer"]
    assert program[0] == Wait("q_full", 0, 0)
    assert program[-1] == Arrive("q_empty")
    assert model_steps(program[1:-1], False) == kernel_steps("swap.py", "block_step")


def test_what_starts_copies_in_swap_is_that_of_the_kernel():
    tree = ast.parse((HOPPER / "swap.py").read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "producer")
    (pieces,) = [n for n in function.body if isinstance(n, ast.For)]
    (blocks,) = [n for n in pieces.body if isinstance(n, ast.For)]
    flat = [step for n in pieces.body for step in (steps_of(n) if n is not blocks else
            [s for m in blocks.body for s in steps_of(m)])]  # fmt: skip
    assert model_steps(swap((1,))["producer"], False) == flat


def test_first_copies_and_sums_are_those_of_the_kernel():
    for agent, wanted in (("even", True), ("odd", False)):
        program = seesaw((1,))[agent]
        first = program[: next(i for i, e in enumerate(program) if isinstance(e, Wait))]
        tree = ast.parse((HOPPER / "seesaw.py").read_text(encoding="utf-8"))
        function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "load_first")
        (branch,) = [n for n in function.body if isinstance(n, ast.If)]
        side = branch.body if wanted else branch.orelse
        assert model_steps(first, True) == [step for n in side for step in steps_of(n)]
        end = [e for e in program if not isinstance(e, Work)][-4:]
        own, other = ("0", "1") if wanted else ("1", "0")
        assert end == [
            Write(f"l{own}", ("sum", 0)), Arrive(f"sum{own}"), Wait(f"sum{other}", 0, 0), Read(f"l{other}", ("sum", 0)),
        ]  # fmt: skip
    assert kernel_steps("store.py", "store_state")[:4] == [
        "write own",
        "arrive own_full",
        "wait other_full",
        "read other",
    ]


def test_bytes_and_flops_are_those_of_the_shapes():
    copies = [e for p in seesaw((1,)).values() for e in p if isinstance(e, Copy)]
    assert sum(c.expected for c in copies) == 2 * 64 * 576 * 2 + 64 * 576 * 2
    products = [e for p in seesaw((1,)).values() for e in p if isinstance(e, Product)]
    assert sum(p.flops for p in products) == 2 * 64 * 128 * (576 + 512)
    few = [e for e in swap((1,))["consumer"] if isinstance(e, Product)]
    assert sum(p.flops for p in few) == 2 * 16 * 64 * (576 + 512)


# Planted faults


def fits(event, pattern) -> bool:
    """True where an event is of a kind and has the fields of a pattern: (kind, {field: value})."""
    kind, fields = pattern
    return isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())


def drop(agent, kind, **fields):
    """Leave out all events of a kind."""
    return lambda p: {**p, agent: [e for e in p[agent] if not fits(e, (kind, fields))]}


def change(agent, kind, how, **fields):
    """Make other events of all of a kind."""
    return lambda p: {**p, agent: [how(e) if fits(e, (kind, fields)) else e for e in p[agent]]}


def earlier(agent, pattern, before):
    """Move each event that fits in front of the one that fits `before` and precedes it."""

    def planted(programs):
        program = list(programs[agent])
        for i, event in enumerate(program):
            if fits(event, pattern):
                to = max((j for j in range(i) if fits(program[j], before)), default=None)
                if to is not None:
                    program.insert(to, program.pop(i))
        return {**programs, agent: program}

    return planted


def parity(e):
    return e._replace(parity=e.parity ^ 1)


def one_copy_too_many(programs):
    return {**programs, "odd": [*programs["odd"], protocol.load_right(99)]}


FAULTS = {
    "even does not wait for the weights of odd": (drop("even", Wait, barrier="p1"), "content"),
    "odd does not wait for the weights of even": (drop("odd", Wait, barrier="p0"), "content"),
    "even does not wait for the common maximum": (drop("even", Wait, barrier="max1"), "content"),
    "odd does not wait for the even maximum": (drop("odd", Wait, barrier="max0"), "content"),
    "odd does not wait for its right half": (drop("odd", Wait, barrier="right1_full"), "content"),
    "even does not wait for the third box": (drop("even", Wait, barrier="right0_full.2"), "content"),
    "nobody waits for the query": (
        lambda p: drop("even", Wait, barrier="q_full")(drop("odd", Wait, barrier="q_full")(p)), "content"),
    "odd never says that the common maximum is there": (drop("odd", Arrive, barrier="max1"), "deadlock"),
    "even never says that its weights are there": (drop("even", Arrive, barrier="p0"), "deadlock"),
    "the maximum is announced before it is stored": (
        earlier("even", (Arrive, {"barrier": "max0"}), (Write, {"buffer": "m0"})), "content"),
    "even loads its left half again before the product has ended": (
        earlier("even", (Copy, {"barrier": "left0_full"}), (Retire, {"newest": 0})), "overwrite"),
    "odd loads its right half again with both products under way": (
        change("odd", Retire, lambda e: Retire(2), newest=1), "overwrite"),
    "odd loads even's right half again before the product has ended": (
        earlier("odd", (Copy, {"barrier": "rope0_full"}), (Retire, {"newest": 0})), "overwrite"),
    "odd's weights go into its rope tile before its scores have ended": (
        earlier("odd", (Write, {"buffer": "rope1"}), (Retire, {"newest": 0})), "overwrite"),
    "the next query is loaded before odd's scores have ended": (
        earlier("even", (Copy, {"barrier": "q_full"}), (Wait, {"barrier": "max1"})), "overwrite"),
    "even's weights are not fenced": (drop("even", Fence), "fence"),
    "even waits for its left half with the other parity": (
        change("even", Wait, parity, barrier="left0_full"), "phase"),
    "the parity of the sums never turns": (
        change("odd", Wait, lambda e: e._replace(parity=0), barrier="sum0"), "phase"),
    "a barrier expects half of what is copied": (
        change("odd", Copy, lambda e: e._replace(expected=e.expected // 2), barrier="right1_full"), "deadlock"),
    "the rope part is not expected": (
        change("even", Copy, lambda e: e._replace(expected=64 * 512), barrier="left1_full"), "deadlock"),
    "something is still loaded after the last pair": (one_copy_too_many, "copy at the end"),
    "two copies in flight on one barrier": (
        change("odd", Copy, lambda e: e._replace(barrier="right1_full"), barrier="rope0_full"), "phase"),
}  # fmt: skip
FAULTS_OF_SWAP = {
    "the left half is given back before its product has ended": (
        earlier("consumer", (Arrive, {"barrier": "left_empty.0"}), (Retire, {"newest": 1})), "overwrite"),
    "the right half is given back with its product under way": (drop("consumer", Retire, newest=0), "overwrite"),
    "the producer begins with the other parity": (change("producer", Wait, parity, barrier="left_empty.0"), "phase"),
    "the producer does not wait for an empty stage": (drop("producer", Wait, barrier="right_empty.1"), "overwrite"),
    "the producer does not wait for the query to be used": (drop("producer", Wait, barrier="q_empty"), "overwrite"),
    "the consumer never gives a stage back": (drop("consumer", Arrive, barrier="left_empty.1"), "deadlock"),
    "the consumer does not wait for the right half": (drop("consumer", Wait, barrier="right_full.0"), "content"),
    "the weights are not fenced": (
        lambda p: {**p, "consumer": [e for i, e in enumerate(p["consumer"]) if not (isinstance(e, Fence) and
                   p["consumer"][i - 1].tag[0] == "weights")]}, "fence"),
    "the parity of a stage never turns": (
        change("consumer", Wait, lambda e: e._replace(parity=0), barrier="left_full.0"), "phase"),
    "two stages in one buffer": (lambda p: swap((3, 3), 2, 1), "overwrite"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_seesaw_is_found(fault):
    plant, kind = FAULTS[fault]
    programs = seesaw((2, 1))
    planted = plant(programs)
    assert planted != programs
    hazard, _ = explore(planted)
    assert hazard is not None
    assert hazard.kind == kind, told(hazard)
    assert hazard.order


@pytest.mark.parametrize("fault", FAULTS_OF_SWAP)
def test_a_fault_planted_in_swap_is_found(fault):
    plant, kind = FAULTS_OF_SWAP[fault]
    programs = swap((3, 3))
    planted = plant(programs)
    assert planted != programs
    hazard, _ = explore(planted)
    assert hazard is not None
    assert hazard.kind == kind, told(hazard)
    again, _ = explore(planted, reduced=False)
    assert again is not None


def test_waits_that_others_imply_are_these():
    """Without them the order of events is the same; they stay, since they make the copied bytes visible to a thread."""
    implied = set()
    for agent, program in seesaw((1, 1)).items():
        for barrier in dict.fromkeys(e.barrier for e in program if isinstance(e, Wait)):
            if explore(drop(agent, Wait, barrier=barrier)(seesaw((1, 1))))[0] is None:
                implied.add((agent, barrier.split(".")[0]))
    assert implied == {("even", "left1_full"), ("odd", "rope0_full"), ("odd", "right0_full")}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_pages_example_is_what_schedule_reference_says():
    import torch

    from tiers.tier2_triton.hopper.schedule import FAR, schedule_reference

    page = (Path(__file__).parents[1] / "docs" / "explanation" / "hopper-decode.md").read_text(encoding="utf-8")
    head, *lines = re.findall(r"^\| (?:part|\d) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    ints = lambda x: torch.tensor(x, dtype=torch.int32)
    for column, title in enumerate(head):
        blocks = [int(n) for n in title.removesuffix(" blocks").split(", ")]
        units, table = ints([(b, 64 * b, 64, 0) for b in range(4)]), torch.zeros(4, 65, dtype=torch.int32)
        work, merges, part = (torch.zeros(*shape, dtype=torch.int32) for shape in ((5, 16), (4, 4), (4, 16)))
        schedule_reference(units, ints([64 * n for n in blocks]), table, work, merges, part, 64, 64, 64)
        for p, line in enumerate(lines):
            said = [tuple(map(int, re.findall(r"\d+", piece))) for piece in line[column].split(", ")]
            entry, count, first, last, stretch = part[p, 9:14].tolist()
            assert len(said) == count
            assert said[0] == (entry, first, last)
            for i, (request, a, b) in enumerate(said[1:], 1):
                assert (request, a) == (entry + i, 0)
                assert b == blocks[request] or b == (stretch - int(work[request, 4])) // 2 * 2
        if column:
            assert (sum(blocks) + 4 * 5, -(-(sum(blocks) + 20) // 4), max(blocks) + 5) == (102, 26, 69)
        assert (int(part[0, 13]) == FAR) == (column == 0), "even, then on the line"
