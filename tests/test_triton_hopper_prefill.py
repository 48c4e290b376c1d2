"""Prefill on Hopper, as far as no GPU is needed: who does which tile, what is refused, what the kernel compiles to.

The kernel is Gluon, which has no interpreter: it is compiled here, and a GPU runs it. Its order and its barriers are
played in Python. Axes: T tokens, n keys, N heads.
"""

import ast
import dataclasses
import importlib
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
from small_case import make_case, make_need

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'mla-tiers[triton]'", allow_module_level=True)

from mla.batch import AttentionBatch
from mla.chunks import pack_chunks
from mla.need import Capacity
from tiers.tier2_triton.benchmark import Story, fault_of
from tiers.tier2_triton.expanded import HOPPER_SIZES, ROUTES, ExpandedSteps, _tiles, expanded_sizes, why_not_route

ROOT = Path(__file__).parents[1]
SIZES = {"N": 16, "L": 512, "P": 128, "R": 64, "V": 128, "page_size": 64, "dtype": torch.bfloat16}
BUDGET = {"registers": 255, "spilled": 96, "shared": 232_448}
WIDE = {"P": 192, "R": 64, "V": 256}
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of sm_90"
)


@pytest.fixture
def module():
    """`hopper.prefill`, which imports triton."""
    return importlib.import_module("tiers.tier2_triton.hopper.prefill")


def on_hopper(**fields):
    """A Need of an H200, planned on this machine."""
    need = make_need(**(SIZES | fields))
    object.__setattr__(need, "arch", "sm_90")
    return need


def located(index, tiles, N, together):
    """Tile and head of a piece of work, by the kernel's own `locate`, run as plain Python."""
    tree = ast.parse((ROOT / "tiers" / "tier2_triton" / "hopper" / "prefill_kernel.py").read_text(encoding="utf-8"))
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
        ({"P": 192}, "P, R, V, L = 192, 64, 128, 512 is not taken by route 'hopper'"),
        ({"V": 256}, "P, R, V, L = 128, 64, 256, 512 is not taken by route 'hopper'"),
        (WIDE | {"R": 0}, "P, R, V, L = 192, 0, 256, 512 is not taken by route 'hopper'"),
        ({"P": 256, "V": 256}, "P, R, V, L = 256, 64, 256, 512 is not taken by route 'hopper'"),
        (WIDE | {"L": 36}, "P, R, V, L = 192, 64, 256, 36 is not taken by route 'hopper'"),
        ({"R": 32}, "P, R, V, L = 128, 32, 128, 512 is not taken by route 'hopper'"),
        ({"L": 36}, "P, R, V, L = 128, 64, 128, 36 is not taken by route 'hopper'"),
    ],
)
def test_refusals_are_whole_sentences(fields, text):
    (reason,) = why_not_route(on_hopper(**fields), "hopper")
    assert reason.startswith(text)
    assert reason.endswith(".")


def test_it_takes_its_two_sizes_and_the_kernel_knows_the_same(module):
    for P, R, V in HOPPER_SIZES:
        assert why_not_route(on_hopper(P=P, R=R, V=V), "hopper") == []
    assert tuple((P, 64, V) for P, (V, _) in module.SIZES.items()) == HOPPER_SIZES


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


def launched(module, monkeypatch, arguments, **changes):
    """Grid and arguments by name of the one launch that a call makes; nothing runs."""
    made = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *given, num_warps: made.append((grid, dict(zip(names, given, strict=True)), num_warps))

    names = module._prefill_kernel.arg_names
    monkeypatch.setattr(module, "_prefill_kernel", Recorder())
    module.prefill(**(arguments | changes))
    ((grid, given, num_warps),) = made
    assert num_warps == 4
    return grid, given


@pytest.mark.parametrize(
    ("size", "boxes", "keys", "value"), [("toy", 3, 128, 128), ("wide", 4, 64, 256)], ids=["192/128", "256/256"]
)
def test_the_launch_has_the_sizes_of_its_tensors(size, boxes, keys, value, module, monkeypatch):
    arguments = module.problem(size, torch.bfloat16, "cpu").arguments
    (grid,), given = launched(module, monkeypatch, arguments)
    assert grid == 2  # the processors of "cpu", as a program takes tile after tile
    assert (given["BOXES"], given["BN"], given["V"]) == (boxes, keys, value)
    blocks = {name: tuple(x.block_shape) for name, x in given.items() if name.endswith("_desc")}
    assert blocks == dict.fromkeys(("q_desc", "q_pe_desc"), (64, 64)) | dict.fromkeys(
        ("k_desc", "k_pe_desc"), (keys, 64)
    ) | {"v_desc": (keys, value)}
    (entry,) = (x for x in module.aot() if x.name.startswith("prefill bf16") and ("256/256" in x.name) == (boxes == 4))
    assert entry.constexprs == {name: given[name] for name in entry.constexprs}
    for name, block in blocks.items():
        assert entry.signature[name].startswith(f"tensordesc<bf16[{block[0]}, {block[1]}],")


@pytest.mark.parametrize(("size", "columns"), [("toy", 128 + 128), ("wide", 192 + 256)])
def test_heads_side_by_side_are_counted_by_their_own_widths(size, columns, module, monkeypatch):
    arguments = module.problem(size, torch.float16, "cpu").arguments
    of_a_head = arguments["k_nope"].shape[0] * columns * 2
    for budget, together in ((2 * of_a_head, 2), (2 * of_a_head - 1, 1), (1, 1), (9 * of_a_head, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "L2_BYTES", budget)
            assert launched(module, patch, arguments)[1]["together"] == together


@pytest.mark.parametrize(
    ("size", "cut", "said"),
    [
        ("wide", {"v": 128}, r"v: expected aligned rows of 256 columns a head, got \(\d+, 3, 128\) of torch.bfloat16"),
        ("wide", {"k_nope": 128}, "k_nope: expected aligned rows of 192 columns a head"),
        ("wide", {"q_nope": 128}, "k_nope: expected aligned rows of 128 columns a head"),
        ("wide", {"q_nope": 64}, "q_nope: expected aligned rows of 128 columns a head"),
        ("wide", {"q_pe": 32}, "q_pe: expected aligned rows of 64 columns a head"),
        ("wide", {"k_pe": 32}, "k_pe: expected aligned rows of 64 columns a head"),
        ("toy", {"v": 64}, "v: expected aligned rows of 128 columns a head"),
    ],
)
def test_tensors_of_other_widths_are_refused_before_a_launch(size, cut, said, module, monkeypatch):
    arguments = module.problem(size, torch.bfloat16, "cpu").arguments
    changes = {name: arguments[name][..., :width] for name, width in cut.items()}
    with pytest.raises(ValueError, match=said):
        launched(module, monkeypatch, arguments, **changes)


def test_a_tile_of_other_rows_is_refused(module):
    arguments = module.problem("toy", torch.bfloat16, "cpu").arguments | {"tile": (64,)}
    with pytest.raises(ValueError, match=r"tile: expected \(128,\), its rows, got \(64,\)\. Fix: leave it out\."):
        module.prefill(**arguments)


def attended(a):
    """The problem in float64, head by head and row by row, without tiles: acc, out and lse."""
    acc, out, lse = (a[name].clone() for name in ("acc", "out", "lse"))
    for row, rows, at, keys, first_key, acc_row, flags in a["tiles"].tolist():
        for i in range(rows):
            seen = max(0, min(int(a["row_kv_lens"][row + i]) - first_key, keys))
            for n in range(lse.shape[1]):
                k = torch.cat([a["k_nope"][at : at + seen, n], a["k_pe"][at : at + seen]], -1)
                scores = k @ torch.cat([a["q_nope"][row + i, n], a["q_pe"][row + i, n]]) * a["softmax_scale"]
                values = a["v"][at : at + seen, n]
                if flags & 1:  # what was summed so far is one more key
                    scores, values = (
                        torch.cat([scores, lse[row + i, n, None]]),
                        torch.cat([values, acc[acc_row + i, n, None]]),
                    )
                (acc[acc_row + i] if flags & 2 else out[row + i])[n] = scores.softmax(0) @ values
                lse[row + i, n] = scores.logsumexp(0)
    return {"acc": acc, "out": out, "lse": lse}


@pytest.mark.parametrize(("size", "P", "V"), [("toy", 128, 128), ("wide", 192, 256)])
def test_the_reference_is_attention_row_by_row(size, P, V, module):
    a = module.problem(size, torch.float64, "cpu").arguments
    a |= {name: a[name].double() for name in ("acc", "lse")}
    assert (a["q_nope"].shape[1:], a["q_pe"].shape[2], a["v"].shape[1:]) == ((3, P), 64, (3, V))
    assert {item[6] for item in a["tiles"].tolist()} == {0, 1, 2}
    right = attended(a)
    module.prefill_reference(**a)
    # A score sums P + 64 products, at most |q| |k| in all, and some 8 u of it for scale and exp; the sum over n keys
    # adds n u. A weight is off by that of its score and of its sum, so an output by twice that, times a value. Each
    # side has its own error.
    size = lambda *parts: float(torch.cat([x.nan_to_num(0) for x in parts], -1).norm(dim=-1).max())
    keys, pe = a["k_nope"], a["k_pe"][:, None].expand(-1, 3, -1)
    score = a["softmax_scale"] * size(a["q_nope"], a["q_pe"]) * size(keys, pe)
    off = 2 * ((P + 72) * max(score, 1) + keys.shape[0] + 16) * 2.0**-53
    value = max(float(x.nan_to_num(0).abs().max()) for x in (a["v"], right["acc"]))
    for name in ("acc", "out", "lse"):
        there = right[name].isfinite()
        assert torch.equal(a[name].isfinite(), there)
        assert (a[name] - right[name])[there].abs().max() <= off * (1 if name == "lse" else 2 * value)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", ["toy", "wide"])
def test_on_a_gpu_it_is_its_reference(size, dtype, module):
    problem = lambda _, *given: module.problem(size, *given)
    assert fault_of(Story("prefill", module.prefill, module.prefill_reference, problem), "cuda", dtype) == ""


@needs_hopper
@pytest.mark.parametrize("N", [3, 20])
@pytest.mark.parametrize(("P", "R", "V"), HOPPER_SIZES)
@pytest.mark.parametrize("workspace", [None, 320], ids=["whole", "by chunks"])
def test_on_a_gpu_the_tier_is_right(workspace, P, R, V, N):
    case = make_case(
        [1, 129, 300, 64, 5, 128], [1, 400, 300, 777, 0, 2000],
        N=N, L=512, P=P, R=R, V=V, page_size=64, device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip
    case.check(case.run("triton:hopper-mha", max_workspace_tokens=workspace))


def test_variants_keep_their_names_and_the_wide_ones_tell_theirs(module):
    assert [entry.name for entry in module.aot()] == [
        "prefill bf16", "prefill fp16", "prefill bf16, 256/256", "prefill fp16, 256/256",
    ]  # fmt: skip


@pytest.fixture(scope="module", params=[128, 192], ids=["192/128", "256/256"])
def compiled(request):
    """What the kernel of the default tile compiles to, in a process without the interpreter."""
    program = (
        "import json, dataclasses\n"
        "from mla.aot import compile_entries\n"
        "from tiers.tier2_triton.hopper.prefill import compile_entry\n"
        f"entry = compile_entry('bf16', P={request.param})\n"
        "print(json.dumps([dataclasses.asdict(x) for x in compile_entries([entry], ['sm_90'])]))"
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
