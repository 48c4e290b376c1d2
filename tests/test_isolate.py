"""A foreign tier in its own process: everything that it can do to itself or to the judge is one row of the report."""

import shutil
import sys
from pathlib import Path

import pytest

from mla.conformance import Case, spec
from mla.conformance.isolate import Child, check_isolated, command_of
from mla.conformance.runner import Result

ROOT = Path(__file__).parents[1]
# The template, and what it does instead where the longest request of a batch has so many keys.
EVIL = """
import ctypes, os, time
import torch
import mla.accuracy, mla.conformance.guards, mla.conformance.runner, mla.conformance.trial
from mla.state import AttentionState
from mla.tier import Tier, deliver

function = attend

class Subclass(torch.Tensor):
    pass

def patch_the_judge(state, q):
    mla.accuracy.compare = mla.conformance.runner.compare = lambda *given: mla.accuracy.Comparison("ok", 0.0, 0.0)
    for name in ("check_form", "check_same", "check_cache", "check_guards"):
        for module in (mla.conformance.guards, mla.conformance.runner, mla.conformance.trial):
            setattr(module, name, lambda *given: None)
    torch.equal = torch.allclose = torch.isclose = lambda *given, **more: True
    mla.conformance.runner.truth.cache_clear()
    return AttentionState(state.out * 1.5, state.lse)

def raises(state, q):
    raise RuntimeError("no kernel image")

def mutates(state, q):
    q.nope.zero_()
    return state

BEHAVIOUR = {
    3: lambda state, q: ctypes.string_at(0),
    4: lambda state, q: os._exit(0),
    5: lambda state, q: time.sleep(600),
    6: raises,
    7: lambda state, q: AttentionState(state.out * float("nan"), state.lse),
    8: lambda state, q: AttentionState(state.out[:, :, :-1].contiguous(), state.lse),
    9: lambda state, q: AttentionState(state.out.double(), state.lse),
    10: lambda state, q: AttentionState(state.out.as_subclass(Subclass), state.lse),
    11: mutates,
    12: lambda state, q: AttentionState(state.out * 1.5, state.lse),
    13: lambda state, q: (state.out, state.lse),
    14: lambda state, q: exec("raise SystemExit(0)"),
    20: patch_the_judge,
    21: lambda state, q: AttentionState(state.out[:, :, :-1].contiguous(), state.lse),
    22: mutates,
}

class Evil(Tier):
    name = "evil"

    def why_not(self, need):
        return ["page_size = 4 is not taken; use 16."] if need.page_size == 4 else []

    def attend(self, q, cache, prepared, plan, out=None):
        print("what a tier prints", flush=True)
        right = deliver(function(q, cache, plan.batch, prepared.up, plan.need), plan, None)
        state = BEHAVIOUR.get(plan.batch.max_seq_len, lambda state, q: state)(right, q)
        if out is None:
            return state
        return deliver(state if getattr(state, "out", right.lse).shape == out.out.shape else right, plan, out)

tier = Evil()
"""
EXPECTED = {
    2: ("ok", ""),
    3: ("crashed", "its process ended with signal SIGSEGV"),
    4: ("crashed", "its process ended with exit code 0"),
    5: ("timed_out", "no answer within 2 s"),
    6: ("raised", "RuntimeError: no kernel image"),
    7: ("not_finite", "out of row 0, head 0 is not finite"),
    8: ("wrong_shape", "out is a Tensor (1, 3, 9), expected a Tensor (1, 3, 10)"),
    9: ("wrong_dtype", "out is torch.float64 on cpu, expected torch.float32 on cpu"),
    10: ("wrong_shape", "out is a Subclass (1, 3, 10), expected a Tensor (1, 3, 10)"),
    11: ("mismatch", "q.nope was changed"),
    12: ("mismatch", ""),
    13: ("wrong_shape", "attend returned a tuple, expected an AttentionState"),
    14: ("raised", "SystemExit: 0"),
    20: ("mismatch", ""),
    21: ("wrong_shape", "out is a Tensor (1, 3, 9), expected a Tensor (1, 3, 10)"),
    22: ("mismatch", "q.nope was changed"),
    30: ("ok", ""),
}
HANGS = 5


def case_of(keys: int, page_size: int = 16) -> Case:
    return Case(spec(f"1q1s{keys}"), dtype="f32", page_size=page_size)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[int, Result]:
    """Every behaviour in one run of one tier: what came after a crash ran in another process."""
    path = tmp_path_factory.mktemp("evil") / "evil.py"
    path.write_text((ROOT / "tiers" / "template.py").read_text() + EVIL)
    hello = {"tier": str(path), "threads": 1, "settings": {}}
    with Child(command_of("child"), hello, 60.0) as child:
        loaded = child.load()
        assert (loaded.status, loaded.tier, child.tier) == ("ran", "evil", "evil")
        found = {-1: next(check_isolated(child, [case_of(2, page_size=4)]))}
        for keys in EXPECTED:
            child.limit = 2.0 if keys == HANGS else 60.0
            found[keys] = next(check_isolated(child, [case_of(keys)], most_diagnosed=0))
        folder = child.folder
    assert not folder.exists()
    return found


@pytest.mark.parametrize("keys", EXPECTED)
def test_whatever_a_tier_does_is_a_row_and_the_run_goes_on(rows, keys):
    assert (rows[keys].status, rows[keys].detail) == EXPECTED[keys]
    assert rows[keys].tier == "evil"


def test_a_refusal_is_neither_right_nor_wrong(rows):
    assert (rows[-1].status, rows[-1].detail) == ("refused", "page_size = 4 is not taken; use 16.")
    assert (rows[-1].ok, rows[-1].failed) == (False, False)


def test_where_a_tier_stopped_is_a_line_of_its_file(rows):
    text = ((ROOT / "tiers" / "template.py").read_text() + EVIL).splitlines()
    for keys, part in (
        (3, "ctypes.string_at(0)"),
        (5, "time.sleep(600)"),
        (6, 'raise RuntimeError("no kernel image")'),
    ):
        name, line = rows[keys].at.split(", ")[:2]
        assert name == "evil.py"
        assert part in text[int(line.removeprefix("line ")) - 1]


def test_a_judge_patched_by_the_tier_still_finds_the_numbers_wrong(rows):
    assert rows[20].used_out > 1
    assert (rows[2].ok, rows[30].ok) == (True, True)


def test_a_result_from_a_child_is_that_of_the_same_tier_here(rows):
    import tiers
    from mla.conformance import run_case

    here = run_case(tiers.get("template"), case_of(2))
    assert (rows[2].status, rows[2].used_out, rows[2].used_lse) == (here.status, here.used_out, here.used_lse)


LIAR = """
import os, shutil, socket, sys
from pathlib import Path
import numpy
from safetensors.numpy import save_file
kind, home, line = sys.argv[1], Path(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
said = dict.fromkeys(("tier", "status", "detail", "kind", "at"), "") | {"tier": "liar", "status": "ran", "seconds": "0"}
line.recv(1)
save_file({}, home / "answer.safetensors", said)
line.send(b"!")
line.recv(1)
def fifo(name):
    (home / name).unlink(missing_ok=True)
    os.mkfifo(home / name)

if kind == "trace":
    fifo("trace.txt")
if kind in ("leave", "trace"):
    sys.exit(3)
if kind == "status":
    save_file({}, home / "answer.safetensors", said | {"status": "ok"})
elif kind == "part":
    save_file({"first.out": numpy.zeros((1, 3, 10), "float32")}, home / "answer.safetensors", said)
elif kind == "bytes":
    (home / "answer.safetensors").write_bytes(b"\\xff" * 64)
elif kind == "deep":
    header = b'{"__metadata__":' + b"[" * 100_000
    (home / "answer.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
elif kind == "fifo":
    fifo("answer.safetensors")
elif kind == "huge":
    with open(home / "answer.safetensors", "wb") as file:
        file.truncate(1 << 36)
elif kind == "link":
    (home / "answer.safetensors").symlink_to("/dev/zero")
elif kind == "folder":
    shutil.rmtree(home)
line.send(b"!" if kind != "line" else b"??")
line.recv(1)
"""


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("status", ""),
        ("part", "its process did not hand over first.lse, guard.0,"),
        ("bytes", "its process handed over nothing that can be read"),
        ("nothing", "its process handed over nothing that can be read"),
        ("line", "its process handed over nothing that can be read"),
        ("deep", "its process handed over nothing that can be read"),
        ("fifo", "its process handed over nothing that can be read: answer.safetensors is not a regular file"),
        ("huge", "its process handed over nothing that can be read: answer.safetensors is not a regular file"),
        ("link", "its process handed over nothing that can be read: [Errno 40]"),
        ("folder", "its process handed over nothing that can be read: [Errno 2]"),
        ("trace", "its process ended with exit code 3"),
    ],
)
def test_a_process_that_lies_is_never_right(tmp_path, kind, sentence):
    """A status of its own, half an answer, bytes that are none: what a tier with the line in its hands could send."""
    path = tmp_path / "liar.py"
    path.write_text(LIAR)
    with Child([sys.executable, str(path), kind], {}, 20.0) as child:
        assert child.load().status == "ran"
        (result,) = check_isolated(child, [case_of(2)], most_diagnosed=0)
    assert result.status == "crashed"
    assert result.detail.startswith(sentence)


@pytest.mark.parametrize("ruin", ["gone", "question", "answer"])
def test_a_folder_that_is_ruined_between_two_cases_is_a_row_and_the_next_process_has_a_new_one(tmp_path, ruin):
    path = tmp_path / "liar.py"
    path.write_text(LIAR)
    with Child([sys.executable, str(path), "part"], {}, 20.0) as child:
        child.load()
        if ruin == "gone":
            shutil.rmtree(child.folder)
        elif ruin == "question":
            (child.folder / "question.pt").mkdir()
        else:
            (child.folder / "answer.safetensors").unlink()
            (child.folder / "answer.safetensors").mkdir()
        ruined = child.folder
        first, second = check_isolated(child, [case_of(2)] * 2, most_diagnosed=0)
    assert (first.status, second.status) == ("crashed", "crashed")
    assert first.detail.startswith("nothing can be exchanged with its process: [Errno ")
    assert second.detail.startswith("its process did not hand over first.lse, guard.0,")
    assert not ruined.exists()
    assert not child.folder.exists()


@pytest.mark.parametrize("line", ["9" * 5000, "1"])
def test_a_trace_that_is_none_points_nowhere(tmp_path, line):
    with Child([], {}, 20.0) as child:
        (child.folder / "trace.txt").write_text(f'  File "a\0b", line {line} in f\n')
        assert child._last_line() == ""


def test_an_exception_whose_message_raises_is_still_a_sentence(tmp_path):
    path = tmp_path / "mute.py"
    path.write_text("class Mute(Exception):\n    def __str__(self):\n        raise self\n\nraise Mute\n")
    with Child(command_of("child"), {"tier": str(path), "threads": 1, "settings": {}}, 20.0) as child:
        loaded = child.load()
    assert (loaded.status, loaded.detail) == ("raised", "Mute: (its message cannot be read)")


def test_after_many_lost_processes_the_cases_left_are_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("mla.conformance.isolate.MOST_LOST", 2)
    path = tmp_path / "liar.py"
    path.write_text(LIAR)
    with Child([sys.executable, str(path), "leave"], {}, 20.0) as child:
        results = list(check_isolated(child, [case_of(2)] * 4))
    assert [r.status for r in results] == ["crashed", "crashed", "not_run", "not_run"]
    assert results[0].detail == "its process ended with exit code 3"
    assert results[2].detail == "the last 2 cases each cost a process; run it alone with --case"


def test_a_file_that_cannot_be_loaded_or_ends_at_import_says_so(tmp_path):
    path = tmp_path / "leaves.py"
    path.write_text("import os\nos._exit(7)\n")
    with Child(command_of("child"), {"tier": str(path), "threads": 1, "settings": {}}, 20.0) as child:
        loaded = child.load()
    assert (loaded.status, loaded.detail) == ("crashed", "its process ended with exit code 7")


def test_a_limit_must_be_a_time():
    with pytest.raises(ValueError, match=r"^timeout: expected seconds above 0, got 0"):
        Child([], {}, 0)
    with pytest.raises(ValueError, match=r"^timeout: expected seconds above 0, got inf"):
        Child([], {}, float("inf"))
