"""Cases in several processes: the results of one, in order; counts go on; a process that ends is an error."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from mla.conformance import check
from mla.conformance.spread import Spread
from mla.conformance.suites import smoke
from mla.conformance.zoo import fault

CASES = [case for case in smoke() if case.batch.name in ("verify_2", "mixed_small", "only_padding")][:8]


def of_a_fault(name, most):
    """Results of a planted fault, of which so many are diagnosed."""
    tier = fault(name).tier()
    return lambda level, cases: check(tier, cases, most_diagnosed=most)


def that_ends():
    """Results of a tier that takes its process with it."""
    return lambda level, cases: iter(lambda: os._exit(7), 0)


def that_cannot_be_made():
    """No results."""
    raise ImportError("no such library")


class Strange(Exception):
    """An error that does not survive the way from one process to another."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def that_raises():
    """Results of a judge that breaks."""

    def results(level, cases):
        raise Strange("all", "lost")
        yield

    return results


def that_notes(folder):
    """Results that are the cases, each noted in a folder, slowly."""

    def results(level, cases):
        for case in cases:
            time.sleep(0.3)
            (Path(folder) / case.id).touch()
            yield case

    return results


def test_they_are_those_of_one_process():
    plain = lambda result: {**result.record(), "seconds": 0}
    with Spread(2, partial(of_a_fault, "scale_of_the_latent_width", 99)) as spread:
        found = [plain(r) for r in spread.results("attend", CASES)]
    expected = [plain(r) for r in of_a_fault("scale_of_the_latent_width", 99)("attend", CASES)]
    assert found == expected
    assert {r["status"] for r in found} > {"ok"}
    assert any(r["diagnosis"] for r in found)


def test_what_is_counted_over_cases_goes_on_within_a_process():
    wrong = [case for case in CASES if case.batch.name != "only_padding"]
    with Spread(1, partial(of_a_fault, "value_zeros", 2)) as spread:
        found = list(spread.results("attend", wrong))
    assert len(found) > 3
    assert sum(r.diagnosis is not None and r.where is not None for r in found) == 2


def test_a_process_that_ends_is_an_error_that_says_what_to_do():
    with Spread(2, that_ends) as spread, pytest.raises(ValueError, match=r"^tier: expected one that .*--isolate"):
        list(spread.results("attend", CASES))


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [(that_cannot_be_made, ImportError, "no such library"), (that_raises, RuntimeError, "Strange: all lost")],
)
def test_what_is_raised_there_is_said_here(make, kind, said):
    with Spread(2, make) as spread, pytest.raises(kind, match=said):
        list(spread.results("attend", CASES))


def test_the_processes_end_with_the_one_that_started_them(tmp_path):
    """However it ends: a run that is killed must not leave a device's memory held."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from functools import partial\n"
        "from test_spread import CASES, Spread, that_notes\n"
        "if __name__ == '__main__':\n"
        "    spread = Spread(2, partial(that_notes, sys.argv[1]))\n"
        "    next(spread.results('attend', CASES))\n"
        "    print(*spread._pool._processes, flush=True)\n"
        "    os._exit(9)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 9, done.stderr
    left = [int(pid) for pid in done.stdout.split()]
    assert len(left) == 2
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/stat").exists() for pid in left):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_who_stops_waits_for_what_has_begun_only(tmp_path):
    many = smoke()[:20]
    with Spread(1, partial(that_notes, str(tmp_path))) as spread:
        assert next(spread.results("attend", many)) == many[0]
    assert 1 <= len(list(tmp_path.iterdir())) < 8
