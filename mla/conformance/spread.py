"""Cases of one tier in several processes of this machine, each with a tier of its own; results in their order.

A case takes a processor for as long as its truth does, seconds with 128 heads, whatever the device. The processes share
nothing but the machine: a device holds what all of them hold. What a tier prints goes where it always does.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from mla.conformance.cases import Case
from mla.conformance.runner import Result
from mla.errors import bad

Results = Callable[[str, Iterable[Case]], Iterator[Result]]


class Spread:
    """So many processes, each of which calls `make` for a function (level, cases) that yields a result for each case.

    `make` must be picklable, such as a partial of a module's function.
    """

    def __init__(self, processes: int, make: Callable[[], Results]) -> None:
        context = multiprocessing.get_context("spawn")  # a device's state does not survive a fork
        self._pool = ProcessPoolExecutor(processes, context, _start, (make,))

    def __enter__(self) -> "Spread":
        """Return the processes, which start with the first cases."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes; cases that none of them has begun are dropped."""
        self._pool.shutdown(cancel_futures=True)

    def results(self, level: str, cases: Iterable[Case]) -> Iterator[Result]:
        """Start on all cases, and return an iterator of their results, in order.

        It raises ValueError where a process ends, which loses its case, and RuntimeError for what is raised in one.
        """
        return self._ended(self._pool.map(partial(_one, level), cases))

    def _ended(self, results: Iterator[Result]) -> Iterator[Result]:
        try:
            yield from results
        except BrokenProcessPool as error:
            fix = "run it with --isolate, which says in which case, or without --jobs"
            raise bad("tier", expected="one that does not end its process", got=str(error), fix=fix) from None


_here: dict[str, Any] = {}


def _start(make: Callable[[], Results]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _here.update(results=make(), running={})
    except Exception as error:  # raised by the first case: what an initializer raises breaks the pool without a word
        _here["error"] = error


def _end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, however that came."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _one(level: str, case: Case) -> Result:
    """Run one case in this process, by the one iterator that it has for a level: what is counted over cases goes on."""
    try:
        if "error" in _here:
            raise _here["error"]
        _here["case"] = case
        running = _here["running"]
        if level not in running:
            running[level] = _here["results"](level, _cases())
        return next(running[level])
    except (ValueError, TypeError, OSError, ImportError):
        raise
    except Exception as error:  # one of a class of its own may not survive the way to the other process
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _cases() -> Iterator[Case]:
    while True:
        yield _here["case"]
