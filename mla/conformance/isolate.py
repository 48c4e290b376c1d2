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
import stat
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
from mla.conformance.trial import Trial, attempt, line_of, place, said_by
from mla.errors import bad
from mla.need import normal_device
from mla.tier import Tier

LEAST_START = 120.0  # seconds to import a file
FIRST_TIMES = 5.0  # of the limit, for what a tier compiles in its first case
MOST_LOST = 10  # children, one after the other
LONGEST = 2000  # characters of a sentence
MOST_TRACE = 1 << 20  # bytes
MOST_ANSWER, TIMES = 1 << 26, 32  # bytes of an answer, beside so many times those of the question and of the cache
HELLO, QUESTION, ANSWER, TRACE = "hello.json", "question.pt", "answer.safetensors", "trace.txt"
SAID = ("tier", "status", "detail", "kind", "at")


class Child:
    """The process that holds a tier: started when it is asked, closed after a crash, a time-out, and at the end."""

    def __init__(self, command: Sequence[str], hello: Mapping[str, Any], limit: float = 60.0) -> None:
        """Keep how to start it: a command that takes a folder and a descriptor, and what `serve`'s `load` is given.

        `limit` is in seconds for a case, five times that for the very first one. Raises ValueError for none.
        """
        if not 0 < limit < math.inf:
            raise bad("timeout", expected="seconds above 0", got=repr(limit), fix="pass --timeout 60")
        self.command, self.limit, self.tier, self._fresh = tuple(command), limit, "", True
        self._hello = json.dumps({**hello, "longest": 2 * max(LEAST_START, FIRST_TIMES * limit)})
        self.folder = Path(tempfile.mkdtemp(prefix="mla-check-"))  # each process has a new one: it may ruin its own
        self._process: subprocess.Popen | None = None
        self._line: socket.socket | None = None

    def __enter__(self) -> "Child":
        """Return the child; leaving the block ends it and removes its folder."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, whatever it does, and remove its folder."""
        self.close()

    def load(self) -> Trial:
        """Start the process and load the tier: a trial with its name and, with an inner kernel, `kind` "latent"."""
        try:
            self._start()
        except OSError as error:
            return self._lost(error)
        trial = self._ask(max(LEAST_START, FIRST_TIMES * self.limit), None, MOST_ANSWER)
        if trial.status != "ran":
            self.close()
        self.tier = trial.tier or self.tier
        return trial

    def ask(
        self, what: str, case: Case, given: Inputs, device: str, meanwhile: Callable[[], object] | None = None
    ) -> Trial:
        """Run a case on the tier with these inputs, q.nope (T, N, P) and so on, and do something `meanwhile`.

        `what` is a level, "attend" or "latent", or "notes": what the tier says about the case's Need, as the detail.
        """
        if self._process is None and (started := self.load()).status != "ran":
            return Trial(self.tier, "not_run", f"the tier could not be loaded again: {started.detail}", at=started.at)
        try:
            for name in (QUESTION, ANSWER):
                (self.folder / name).unlink(missing_ok=True)
            with open(self.folder / QUESTION, "xb") as file:  # a new file, never one that the tier has put there
                torch.save((what, case, given, device), file)
                asked = file.tell()
        except OSError as error:
            return self._lost(error)
        cache = 0 if case.cache == "far" else given.num_pages * case.page_size * (case.dims.L + case.dims.R)
        most = MOST_ANSWER + TIMES * (asked + cache)
        trial = self._ask(self.limit * (FIRST_TIMES if self._fresh else 1.0), meanwhile, most)
        self._fresh = False
        if trial.status in ("crashed", "timed_out"):
            self.close()
        return trial

    def close(self) -> None:
        """End the process and those that it started, and remove its folder; the next question starts another one."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._line is not None:
            self._line.close()
        with suppress(RecursionError):  # of folders in folders
            shutil.rmtree(self.folder, ignore_errors=True)
        self._process = self._line = None

    def _start(self) -> None:
        self.close()
        self.folder = Path(tempfile.mkdtemp(prefix="mla-check-"))
        (self.folder / HELLO).write_text(self._hello, encoding="utf-8")
        self._line, theirs = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # the child sees the modules that we see
        env = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        with theirs:
            words = [*self.command, str(self.folder), str(theirs.fileno())]
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], env=env, start_new_session=True
            )

    def _lost(self, error: OSError) -> Trial:
        self.close()
        return Trial(self.tier, "crashed", f"nothing can be exchanged with its process: {error}")

    def _ask(self, limit: float, meanwhile: Callable[[], object] | None, most: int) -> Trial:
        assert self._line is not None
        end = time.monotonic() + limit
        with suppress(OSError):  # of a process that has ended, which is found below
            self._line.send(b"?")
        if meanwhile is not None:
            meanwhile()
        ready, _, _ = select.select([self._line], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return Trial(self.tier, "timed_out", f"no answer within {limit:g} s", at=self._last_line(ask=True))
        said = b""
        with suppress(OSError):
            said = self._line.recv(1)
        return self._ended() if said == b"" else self._read(most)

    def _read(self, most: int) -> Trial:
        """Return the answer, all of it in memory of our own: a thread of the tier may still write to the file."""
        try:
            data = bytes_of(self.folder / ANSWER, most)
            said = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            words, seconds = {name: said[name][:LONGEST] for name in SAID}, abs(float(said["seconds"]))
            return Trial(**words, seconds=seconds, tensors=load(data))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
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
        try:
            if ask and self._process is not None:
                self._process.send_signal(signal.SIGUSR1)
                end = time.monotonic() + 1.0
                while time.monotonic() < end and not bytes_of(path, MOST_TRACE).strip():
                    time.sleep(0.02)
                time.sleep(0.02)
            text = bytes_of(path, MOST_TRACE).decode("utf-8", "replace")
            frames = re.findall(r'^  File "([^"\n]+)", line (\d{1,9}) in (\S+)', text, re.MULTILINE)
            return place((file, int(line), name[:LONGEST]) for file, line, name in frames)
        except (OSError, ValueError, RuntimeError):  # no trace, or one that is none: a path may be anything
            return ""


def bytes_of(path: Path, most: int) -> bytes:
    """Return what a child wrote, of at most so many bytes; raises OSError, and never waits, for what is no file."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise OSError(f"{path.name} is not a regular file of at most {most} bytes")
        return file.read(found.st_size)


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
        work = partial(truth, case, device) if level == "attend" else None
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
            return Trial(name, "raised", said_by(error), at=line_of(error.__traceback__))
    if kernel is None:
        why = f"{name} has no inner kernel to check; from_latent and mla.conformance.raw give one."
        return Trial(name, "refused", why)
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
            ask = lambda tier: (tried(tier, *torch.load(home / QUESTION, weights_only=False)), tier)
            trial, tier = _loaded(hello, load_tier) if tier is None else ask(tier)
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
        return Trial("", "raised", said_by(error), "form", line_of(error.__traceback__)), None
    return Trial(str(tier.name), kind="latent" if getattr(tier, "latent", None) else ""), tier


def _hand_over(trial: Trial, path: Path) -> None:
    kept = trial.tensors if trial.status == "ran" else {}  # a GPU that has failed gives nothing back
    tensors = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in kept.items()}
    said = {name: getattr(trial, name)[:LONGEST] for name in SAID} | {"seconds": repr(trial.seconds)}
    save_file(tensors, path, said)
