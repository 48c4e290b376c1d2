"""Cases of one tier in several processes of this machine, each with a tier of its own; results in their order.

A case takes a processor for as long as its truth does, seconds with 128 heads, whatever the device. The processes share
nothing but the machine: a device holds what all of them hold. What a tier prints goes where it always does.
"""

import multiprocessing
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
        """Yield a result for each case, in order. Raises ValueError where a process ends, which loses its case."""
        try:
            yield from self._pool.map(partial(_one, level), cases)
        except BrokenProcessPool as error:
            fix = "run it with --isolate, which says in which case, or without --jobs"
            raise bad("tier", expected="one that does not end its process", got=str(error), fix=fix) from None


_here: dict[str, Any] = {}


def _start(make: Callable[[], Results]) -> None:
    _here.update(results=make(), running={})


def _one(level: str, case: Case) -> Result:
    """Run one case in this process, by the one iterator that it has for a level: what is counted over cases goes on."""
    _here["case"] = case
    running = _here["running"]
    if level not in running:
        running[level] = _here["results"](level, _cases())
    return next(running[level])


def _cases() -> Iterator[Case]:
    while True:
        yield _here["case"]
