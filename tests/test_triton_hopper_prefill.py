"""Prefill on Hopper, as far as no GPU is needed: who does which tile, what is refused, what the kernel compiles to.

The kernel is Gluon, which has no interpreter: it is compiled here, and a GPU runs it. Its order and its barriers are
played in Python. Axes: T tokens, n keys, N heads.
"""

import ast
import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_case import make_need

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'mla-tiers[triton]'", allow_module_level=True)

from mla.batch import AttentionBatch
from mla.chunks import pack_chunks
from mla.need import Capacity
from tiers.tier2_triton.expanded import ROUTES, ExpandedSteps, _tiles, expanded_sizes, why_not_route

ROOT = Path(__file__).parents[1]
SIZES = {"N": 16, "L": 512, "P": 128, "R": 64, "V": 128, "page_size": 64, "dtype": torch.bfloat16}
BUDGET = {"registers": 255, "spilled": 96, "shared": 232_448}


def on_hopper(**fields):
    """A Need of an H200, planned on this machine."""
    need = make_need(**(SIZES | fields))
    object.__setattr__(need, "arch", "sm_90")
    return need


def located(index, tiles, N, together):
    """Tile and head of a piece of work, by the kernel's own `locate`, run as plain Python."""
    tree = ast.parse((ROOT / "tiers" / "tier2_triton" / "hopper" / "prefill.py").read_text(encoding="utf-8"))
    (function,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "locate")
    function.decorator_list = []
    names = {"gl": SimpleNamespace(minimum=min)}
    exec(compile(ast.Module([function], []), "locate", "exec"), names)
    at, head = names["locate"](index, 0, tiles, N, together)
    return at // 7, head


@pytest.mark.parametrize(
    ("tiles", "N", "together"), [(1, 1, 1), (5, 3, 1), (5, 3, 2), (7, 16, 3), (4, 6, 6), (2, 5, 4)]
)
def test_every_tile_of_every_head_is_located_once_and_heads_side_by_side_are_done_before_others_begin(
    tiles, N, together
):
    order = [located(i, tiles, N, together) for i in range(tiles * N)]
    assert Counter(order) == Counter((tile, head) for tile in range(tiles) for head in range(N))
    assert [head // together for _, head in order] == sorted(head // together for _, head in order)
    for section in range(-(-N // together)):
        own = [tile for tile, head in order if head // together == section]
        assert own == sorted(own)  # the list's order: heavy ones first


def tiles_of(query_lens, seq_lens, need, cap):
    """The work lists of a plan, chunk by chunk, and the accumulator's rows."""
    pages = [-(-n // need.page_size) for n in seq_lens]
    table = [[sum(pages[:b]) + i for i in range(count)] for b, count in enumerate(pages)]
    batch = AttentionBatch.bottom_right(
        query_lens, seq_lens, table, page_size=64, num_pages=max(1, sum(pages)), mask=need.mask
    )
    steps = ExpandedSteps("hopper")
    requests = list(range(len(query_lens)))
    held, work = _tiles(steps, need, batch, requests, pack_chunks(seq_lens, cap, need.page_size))
    return steps, batch, held, work


@pytest.mark.parametrize("cap", [64, 256, 100_000])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_tiles_cover_what_each_row_sees_once(mask, cap):
    query_lens, seq_lens = [1, 129, 300, 64, 5], [1, 400, 300, 64, 0]
    steps, batch, held, work = tiles_of(query_lens, seq_lens, on_hopper(mask=mask), cap)
    assert steps.tile[0] == 128
    seen, ends = Counter(), {}
    for row, rows, _, keys, first, _, flags in (item for chunk in work for item in chunk.tolist()):
        assert 0 < rows <= 128
        for r in range(row, row + rows):
            bound = int(batch.row_kv_lens[r])
            assert ends.get(r, 0) == first or bound <= first  # in order, from the first key on
            assert bool(flags & 1) == (first > 0)
            ends[r] = first + keys
            seen[r] += max(0, min(bound - first, keys))
    assert len(ends) == sum(query_lens)  # also the rows that see nothing are written
    assert all(seen[r] == int(batch.row_kv_lens[r]) for r in range(sum(query_lens)))
    assert (held == 0) == (cap == 100_000)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dtype": torch.float16}, "dtype torch.float16 is not expanded by route 'hopper'"),
        ({"dtype": torch.float32}, "dtype torch.float32 is not expanded by route 'hopper'"),
        ({"P": 192, "V": 256}, "P, R, V, L = 192, 64, 256, 512 is not taken by route 'hopper'"),
        ({"R": 32}, "P, R, V, L = 128, 32, 128, 512 is not taken by route 'hopper'"),
        ({"L": 36}, "P, R, V, L = 128, 64, 128, 36 is not taken by route 'hopper'"),
    ],
)
def test_refusals_are_whole_sentences(fields, text):
    assert why_not_route(on_hopper(), "hopper") == []
    (reason,) = why_not_route(on_hopper(**fields), "hopper")
    assert reason.startswith(text)
    assert reason.endswith(".")


def test_other_gpus_are_refused():
    need = on_hopper()
    object.__setattr__(need, "arch", "sm_100")
    (reason,) = why_not_route(need, "hopper")
    assert reason == "arch 'sm_100' is not served by route 'hopper', which takes sm_90; use 'triton'."


def test_it_takes_the_same_scratch_as_the_portable_kernel():
    need = dataclasses.replace(
        on_hopper(), capacity=Capacity(max_requests=4, max_tokens=64, max_query_len=64, max_seq_len=128)
    )
    assert "hopper" in ROUTES
    assert expanded_sizes(need, 64, "hopper") == expanded_sizes(need, 64, "triton")


def actors(blocks, stages=2):
    """The producer and both warpgroups for tiles of so many blocks: lists of (waits for, does).

    A wait is (barrier, stage, completions), what is done is an arrival (barrier, stage) or None.
    """
    full = lambda name, t: (f"{name}_full", t % stages, t // stages + 1)
    empty = lambda name, t: (f"{name}_empty", t % stages, t // stages)
    loads = lambda name, t: (empty(name, t), (f"{name}_full", t % stages))
    frees = lambda name, t: (f"{name}_empty", t % stages)
    producer, consumers, turn = [], ([], []), 0
    for tile, number in enumerate(blocks):
        last = turn + number - 1
        producer.append(loads("k", turn))
        producer += [((f"q{w}_empty", 0, tile), (f"q{w}_full", 0)) for w in (0, 1)]
        for t in range(turn + 1, last + 1):
            producer += [loads("k", t), loads("v", t - 1)]
        producer += [loads("v", last), (("next_empty", 0, tile), ("next_full", 0))]
        for w, actor in enumerate(consumers):
            actor += [((f"q{w}_full", 0, tile + 1), None), (full("k", turn), frees("k", turn))]
            for t in range(turn + 1, last + 1):
                actor += [
                    (full("k", t), None),
                    (full("v", t - 1), frees("k", t)),
                    (full("v", t - 1), frees("v", t - 1)),
                ]
            actor += [(None, (f"q{w}_empty", 0)), (full("v", last), None)]
            actor += [(("next_full", 0, tile + 1), ("next_empty", 0)), (None, frees("v", last))]
        turn += number
    return producer, *consumers


def played(everyone):
    """Play all orders of events that the waits allow; return the number of states.

    A wait passes by parity, so it may be late by no more than a phase. Raises AssertionError where one would be, where
    all are stuck, or where the producer loads what a warpgroup has not let go.
    """
    counts = {"k_empty": 2, "v_empty": 2, "next_empty": 2}
    users = {"q0": (1,), "q1": (2,)}
    start = (0, 0, 0)
    done, todo = {start}, [start]
    while todo:
        state, moves = todo.pop(), []
        did = [Counter(what for _, what in actor[:at] if what) for actor, at in zip(everyone, state, strict=True)]
        for i, (actor, at) in enumerate(zip(everyone, state, strict=True)):
            if at == len(actor):
                continue
            wait, what = actor[at]
            if wait is not None:
                name, stage, wanted = wait
                complete = sum(d[name, stage] for d in did) // counts.get(name, 1)
                assert complete <= wanted, f"{name} is {complete - wanted} phases ahead"
                if complete < wanted:
                    continue
            if i == 0 and what is not None:
                of = what[0].removesuffix("_full")
                for user in users.get(of, (1, 2)):
                    assert did[user][f"{of}_empty", what[1]] >= did[0][what], f"{of} is overwritten"
            moves.append((*state[:i], at + 1, *state[i + 1 :]))
        assert moves or all(at == len(actor) for actor, at in zip(everyone, state, strict=True)), f"stuck at {state}"
        todo += [move for move in moves if move not in done]
        done |= set(moves)
    return len(done)


@pytest.mark.parametrize("blocks", [(1,), (2,), (3,), (1, 1, 1), (2, 1, 3), (1, 4, 1), (3, 3), (5, 2)])
def test_no_order_of_events_is_stuck_overwrites_or_misses_a_phase(blocks):
    assert played(actors(blocks)) > sum(blocks)


@pytest.mark.parametrize(("change", "said"), [
    (lambda what, w: None if w == 2 and what == ("v_empty", 0) else what, "stuck"),
    (lambda what, w: ("k_empty", 1) if w == 1 and what == ("k_empty", 0) else what, "stuck|overwritten|ahead"),
    (lambda what, w: None if what == ("q0_empty", 0) else what, "stuck"),
])  # fmt: skip
def test_a_slip_in_the_protocol_is_seen(change, said):
    producer, *consumers = actors((3, 2))
    broken = [[(wait, change(what, w)) for wait, what in actor] for w, actor in enumerate(consumers, 1)]
    with pytest.raises(AssertionError, match=said):
        played((producer, *broken))


@pytest.fixture(scope="module")
def compiled():
    """What the kernel of the default tile compiles to, in a process without the interpreter."""
    program = (
        "import json, dataclasses\n"
        "from mla.aot import compile_entries\n"
        "from tiers.tier2_triton.hopper.prefill import TILE, compile_entry\n"
        "print(json.dumps([dataclasses.asdict(x) for x in compile_entries([compile_entry('bf16', TILE)], ['sm_90'])]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_compiles_within_its_budget(compiled):
    assert compiled["status"] == "ok", compiled["detail"]
    for name, most in BUDGET.items():
        assert compiled[name] <= most, (name, compiled[name])
