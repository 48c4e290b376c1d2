"""Cases in several processes: the results of one, in order; counts go on; a process that ends is an error."""

import os
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


def test_who_stops_waits_for_what_has_begun_only(tmp_path):
    many = smoke()[:20]
    with Spread(1, partial(that_notes, str(tmp_path))) as spread:
        assert next(spread.results("attend", many)) == many[0]
    assert 1 <= len(list(tmp_path.iterdir())) < 8
