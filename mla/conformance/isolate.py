"""A foreign tier in a process of its own: whatever it does to itself, or to the judge's code, is one row of a report.

The child holds the tier. The parent makes the inputs, the truth and the verdict; of the child it reads tensors, a
status and sentences, in a format in which nothing can be executed. Between them are two files in a folder and, over a
socket, single bytes: `?` for a question, `!` for an answer. One child serves many cases; after a crash or a time-out
the next case starts another. What the tier prints goes to standard error.
"""

import faulthandler
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from mla.conformance.cases import Case
from mla.conformance.inputs import Inputs
from mla.conformance.large import no_room
from mla.conformance.latent import attempt_latent, judge_latent
from mla.conformance.runner import Result, inputs_of, judge, truth
from mla.conformance.trial import Trial, attempt, line_of, place
from mla.errors import bad
from mla.need import normal_device
from mla.tier import Tier

LEAST_START = 120.0  # seconds to import a file
FIRST_TIMES = 5.0  # of the limit, for what a tier compiles in its first case
MOST_LOST = 10  # children, one after the other
LONGEST = 2000  # characters of a sentence
HELLO, QUESTION, ANSWER, TRACE = "hello.json", "question.pt", "answer.safetensors", "trace.txt"
SAID = ("tier", "status", "detail", "kind", "at")


def nothing() -> None:
    """Do nothing, where there is nothing to do while a child works."""


class Child:
    """The process that holds a tier: started when it is asked, closed after a crash, a time-out, and at the end."""

    def __init__(self, command: Sequence[str], hello: Mapping[str, Any], limit: float = 60.0) -> None:
        """Keep how to start it: a command that takes a folder and a descriptor, and what `serve`'s `load` is given.

        `limit` is in seconds for a case, five times that for the very first one. Raises ValueError for none.
        """
        if not 0 < limit < math.inf:
            raise bad("timeout", expected="seconds above 0", got=repr(limit), fix="pass --timeout 60")
        self.command, self.limit, self.tier = tuple(command), limit, ""
        self._home = tempfile.TemporaryDirectory(prefix="mla-check-", ignore_cleanup_errors=True)
        self.folder = Path(self._home.name)
        longest = 2 * max(LEAST_START, FIRST_TIMES * limit)
        (self.folder / HELLO).write_text(json.dumps({**hello, "longest": longest}), encoding="utf-8")
        self._process: subprocess.Popen | None = None
        self._line: socket.socket | None = None
        self._fresh = True

    def __enter__(self) -> "Child":
        """Return the child; leaving the block ends it and removes its folder."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, whatever it does, and remove its folder."""
        self.close()
        self._home.cleanup()

    def load(self) -> Trial:
        """Start the process and let it load the tier; the trial has its name, or what went wrong.

        `kind` is "latent" where the tier has an inner kernel.
        """
        (self.folder / TRACE).write_text("")  # nothing of an earlier process
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # the child sees the modules that we see
        with theirs:
            self._process = subprocess.Popen(
                [*self.command, str(self.folder), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self._line = ours
        trial = self._ask(max(LEAST_START, FIRST_TIMES * self.limit), nothing)
        if trial.status != "ran":
            self.close()
        self.tier = trial.tier or self.tier
        return trial

    def ask(
        self, what: str, case: Case, given: Inputs, device: str, meanwhile: Callable[[], object] = nothing
    ) -> Trial:
        """Run a case on the tier with these inputs, q.nope (T, N, P) and so on, and do something `meanwhile`.

        `what` is a level, "attend" or "latent", or "notes": what the tier says about the case's Need, as the detail.
        """
        if self._process is None:
            started = self.load()
            if started.status != "ran":
                detail = f"the tier could not be loaded again: {started.detail}"
                return Trial(self.tier, "not_run", detail, at=started.at)
        torch.save((what, case, given, device), self.folder / QUESTION)
        trial = self._ask(self.limit * (FIRST_TIMES if self._fresh else 1.0), meanwhile)
        self._fresh = False
        if trial.status in ("crashed", "timed_out"):
            self.close()
        return trial

    def close(self) -> None:
        """End the process and those that it started; the next question starts another one."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._line is not None:
            self._line.close()
        self._process = self._line = None

    def _ask(self, limit: float, meanwhile: Callable[[], object]) -> Trial:
        assert self._line is not None
        (self.folder / ANSWER).unlink(missing_ok=True)
        end = time.monotonic() + limit
        with suppress(OSError):  # of a process that has ended, which is found below
            self._line.send(b"?")
        meanwhile()
        ready, _, _ = select.select([self._line], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return Trial(self.tier, "timed_out", f"no answer within {limit:g} s", at=self._last_line(ask=True))
        try:
            said = self._line.recv(1)
        except OSError:
            said = b""
        return self._ended() if said == b"" else self._read()

    def _read(self) -> Trial:
        """Return the answer, all of it in memory of our own: a thread of the tier may still write to the file."""
        try:
            data = (self.folder / ANSWER).read_bytes()
            said = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            words, seconds = {name: said[name][:LONGEST] for name in SAID}, abs(float(said["seconds"]))
            return Trial(**words, seconds=seconds, tensors=load(data))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            return Trial(self.tier, "crashed", f"its process handed over nothing that can be read: {error}")

    def _ended(self) -> Trial:
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return Trial(self.tier, "crashed", "its process closed the line to the judge", at=self._last_line())
        how, kind = f"exit code {code}", "form"
        if code < 0:
            hint = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
            how, kind = f"signal {signal.Signals(-code).name}{hint}", "memory"
        return Trial(self.tier, "crashed", f"its process ended with {how}", kind, self._last_line())

    def _last_line(self, ask: bool = False) -> str:
        """Return the tier's line from the trace that a dying process leaves, or that a hanging one is asked for."""
        path = self.folder / TRACE
        if ask and self._process is not None:
            self._process.send_signal(signal.SIGUSR1)
            end = time.monotonic() + 1.0
            while time.monotonic() < end and not path.read_text("utf-8", "replace").strip():
                time.sleep(0.02)
            time.sleep(0.02)
        frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', path.read_text("utf-8", "replace"))
        return place((file, int(line), name) for file, line, name in frames)


def check_isolated(
    child: Child, cases: Iterable[Case], *, level: str = "attend", device: str = "cpu", most_diagnosed: float = math.inf
) -> Iterator[Result]:
    """Yield what `check` does, for a tier in a child; the truth is made while the child works.

    After some children in a row were lost, the cases left are not run, which is not the same as right.
    """
    device, lost, left = normal_device(device), 0, most_diagnosed
    for case in cases:
        why = no_room(case, device)
        if lost >= MOST_LOST:
            why = f"the last {MOST_LOST} cases each cost a process; run it alone with --case"
        if why is not None:
            yield Result(case, child.tier, "not_run", detail=why, level=level)
            continue
        work = partial(truth, case, device) if level == "attend" else nothing
        trial = child.ask(level, case, inputs_of(case, device), device, work)
        result = (judge if level == "attend" else judge_latent)(case, trial, device, left > 0)
        left -= result.diagnosis is not None and result.where is not None
        lost = lost + 1 if result.status in ("crashed", "timed_out") else 0
        yield result


def tried(tier: Tier, what: str, case: Case, given: Inputs, device: str) -> Trial:
    """Attempt a case at level "attend" or "latent" with inputs q.nope (T, N, P) and so on, or ask for "notes"."""
    if what == "attend":
        return attempt(tier, case, device, given)
    name, kernel, notes = str(tier.name), getattr(tier, "latent", None), getattr(tier, "notes", None)
    if what == "notes":
        try:
            return Trial(name, detail="\n".join(notes(case.need(device)) if notes else ()))
        except (Exception, SystemExit) as error:
            return Trial(name, "raised", f"{type(error).__name__}: {error}", at=line_of(error.__traceback__))
    if kernel is None:
        return Trial(
            name, "refused", f"{name} has no inner kernel to check; from_latent and mla.conformance.raw give one."
        )
    return attempt_latent(kernel, case, device, given, name=name, why_not=tier.why_not)


def serve(folder: str, descriptor: int, load_tier: Callable[[Mapping[str, Any]], Tier]) -> None:
    """Be the child: load the tier that hello.json names, then answer questions until the other end is closed."""
    home, line = Path(folder), socket.socket(fileno=descriptor)
    with open(home / TRACE, "a", encoding="utf-8") as trace:
        faulthandler.enable(trace)
        faulthandler.register(signal.SIGUSR1, trace)
        threading.Thread(target=_leave_with, args=(os.getppid(), home), daemon=True).start()
        hello = json.loads((home / HELLO).read_text(encoding="utf-8"))
        tier: Tier | None = None
        while line.recv(1):
            trace.truncate(0)
            faulthandler.dump_traceback_later(hello["longest"], exit=True, file=trace)  # a hang that no thread sees
            if tier is None:
                trial, tier = _loaded(hello, load_tier)
            else:
                trial = tried(tier, *torch.load(home / QUESTION, weights_only=False))
            _hand_over(trial, home / ANSWER)
            faulthandler.cancel_dump_traceback_later()
            line.send(b"!")
    shutil.rmtree(home, ignore_errors=True)  # a parent that was killed has not done it


def _leave_with(parent: int, home: Path) -> None:
    """End this process when its parent is gone, even if the tier hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(home, ignore_errors=True)
    os._exit(1)


def command_of(*words: str) -> list[str]:
    """Return the command that runs `mla` with these words in this interpreter, with this copy of the package."""
    return [sys.executable, "-P", "-m", "mla", *words]


def _loaded(hello: Mapping[str, Any], load_tier: Callable[[Mapping[str, Any]], Tier]) -> tuple[Trial, Tier | None]:
    try:
        tier = load_tier(hello)
    except (Exception, SystemExit) as error:
        said = str(error) if "Fix:" in str(error) else f"{type(error).__name__}: {error}"
        return Trial("", "raised", said, "form", line_of(error.__traceback__)), None
    return Trial(str(tier.name), kind="latent" if getattr(tier, "latent", None) else ""), tier


def _hand_over(trial: Trial, path: Path) -> None:
    kept = trial.tensors if trial.status == "ran" else {}  # a GPU that has failed gives nothing back
    tensors = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in kept.items()}
    said = {name: getattr(trial, name)[:LONGEST] for name in SAID} | {"seconds": repr(trial.seconds)}
    save_file(tensors, path, said)
