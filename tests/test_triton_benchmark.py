"""The benchmark of the kernels, on stories in plain PyTorch: what is timed is right, and the figures are its rates."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

import tiers.tier2_triton.benchmark as benchmark
from mla.roofline import Gpu
from mla.timing import Timing
from tiers.tier2_triton.benchmark import fault_of, grid_of, main, rates, reference_timing, row_of, story_of
from tiers.tier2_triton.kernels.problem import Problem

NAN, INF = float("nan"), float("inf")


def twice(x, out):
    out.copy_(2 * x)
    out[0] = NAN
    out[1] = -INF


def story(**changes) -> ModuleType:
    """A module of a kernel that doubles x (n,), leaves NaN in front and -inf behind it; `changes` replace its parts."""
    module = ModuleType("kernels.twice")

    def problem(size, dtype, device, seed=0):
        x = torch.randn(50, generator=torch.Generator().manual_seed(seed)).to(dtype)
        return Problem({"x": x, "out": torch.full((50,), NAN, dtype=dtype)}, ("out",), 200, 50)

    def twice_reference(x, out):
        twice(x, out)

    twice_reference.__module__ = module.__name__
    parts = {"twice": twice, "twice_reference": twice_reference, "problem": problem, **changes}
    for name, part in parts.items():
        if part is not None:
            setattr(module, name, part)
    return module


def test_a_right_kernel_has_no_fault():
    found = story_of(story())
    assert (found.name, found.wrapper) == ("twice", twice)
    assert fault_of(found, "cpu") == ""


def off(x, out):
    twice(x, out)
    out[2:] *= 1.05


def unwritten(x, out):
    twice(x, out)
    out[7] = NAN


def filled(x, out):
    twice(x, out)
    out[0] = 0


def other_sign(x, out):
    twice(x, out)
    out[1] = INF


@pytest.mark.parametrize(("wrong", "said"), [
    (off, "out is off by"),  # 5 % is more than 4 x 2^-8
    (unwritten, "out is not NaN or infinite where its reference is."),
    (filled, "out is not NaN or infinite where its reference is."),
    (other_sign, "out is not NaN or infinite where its reference is."),
])  # fmt: skip
def test_a_wrong_kernel_has_one(wrong, said):
    assert fault_of(story_of(story(twice=wrong)), "cpu").startswith(said)


@pytest.mark.parametrize("missing", ["twice_reference", "problem", "twice"])
def test_a_story_without_one_of_its_parts_is_a_sentence(missing):
    with pytest.raises(ValueError, match="twice: expected one wrapper with its reference, and problem"):
        story_of(story(**{missing: None}))


def test_a_row_says_what_is_wrong_and_does_not_time_it(monkeypatch):
    peak = Gpu.measured("m", 1e12, 1e9)
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "time_story", lambda *a: pytest.fail("timed"))
    monkeypatch.setattr(benchmark.importlib, "import_module", lambda name: story(twice=off))
    row = row_of("twice", peak, 1)
    assert (row["status"], row["reason"][:10]) == ("mismatch", "out is off")
    monkeypatch.setattr(benchmark.importlib, "import_module", lambda name: story(twice=None))
    assert row_of("twice", peak, 1)["status"] == "raised"
    assert grid_of([row]).rows[0][:3] == ("twice", "mismatch", "-")


def test_rates_are_the_work_of_the_problem_over_the_median():
    kernel = {"median_ms": 0.1, "low_ms": 0.09, "high_ms": 0.2, "repeats": 3, "how": "graph"}
    row = {"name": "x", "status": "ok", "kernel": kernel, "nbytes": 10**8, "flops": 10**10, "first_ms": 900.4}
    found = rates(row, Gpu.measured("m", 5e14, 4e12))
    assert found["gbytes_per_second"] == pytest.approx(1000)
    assert found["tflops_per_second"] == pytest.approx(100)
    assert found["percent_of_copy"] == pytest.approx(25)
    assert found["percent_of_matmul"] == pytest.approx(20)
    row |= found | {"reference": {**kernel, "median_ms": 1.5}}
    cells = grid_of([row, {**row, "reference": None}]).rows
    assert cells[0] == (
        "x", "ok", "100.0", "90.0", "200.0", "graph", "1000.0", "25.0", "100.0", "20.0", "1500.0", "15.0", "900",
    )  # fmt: skip
    assert cells[1][-3:] == ("-", "-", "900")


def test_a_reference_that_takes_long_or_has_no_room_is_not_repeated():
    taken = []

    def lap(ms):
        return lambda: taken.append(ms) or ms

    assert reference_timing(lambda: None, "cpu", lap(5000.0)) == Timing(5000.0, 5000.0, 5000.0, 1)
    assert len(taken) == 1
    assert reference_timing(lambda: None, "cpu", lap(5.0)).repeats == benchmark.REFERENCE_REPEATS

    def no_room():
        raise torch.OutOfMemoryError

    assert reference_timing(no_room, "cpu") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_exits_with_2(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == "error: there is no GPU here, and a kernel's time anywhere else means nothing.\n"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'mla-tiers[triton]'")
def test_every_kernel_tells_its_story():
    program = (
        "import importlib, torch\n"
        "from tiers.tier2_triton.aot_table import kernel_names, module_of\n"
        "from tiers.tier2_triton.benchmark import story_of\n"
        "for name in kernel_names():\n"
        "    if name in ('hopper.seesaw', 'hopper.swap'):  # device code, told and launched by hopper.decode\n"
        "        continue\n"
        "    story = story_of(importlib.import_module(module_of(name)))\n"
        "    toy = story.problem('toy', torch.float32, 'cpu')\n"
        "    assert toy.outputs and set(toy.outputs) <= set(toy.arguments), name\n"
        "    assert toy.nbytes > 0, name\n"
        "    story.run(story.reference, toy)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = benchmark.__file__.rpartition("/tiers/")[0]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
