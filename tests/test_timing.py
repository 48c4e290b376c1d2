"""Laps and turns: what a timed call on a GPU stands between, on a fake of torch.cuda; no clock is judged."""

from contextlib import contextmanager

import pytest
import torch

import mla.timing as timing
from mla.timing import DeviceLap, HostLap, captured, lap_of, timed, timed_together, turns


class FakeCuda:
    """Writes down what is asked of it; events count what was queued between them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = len(outer.log)
                outer.log.append("event")

            def elapsed_time(self, other: "Event") -> float:
                assert outer.log[-1] == "synchronize", "read before the device was done"
                return other.at - self.at

        class CUDAGraph:
            def replay(self) -> None:
                outer.log.append("replay")

        self.Event, self.CUDAGraph = Event, CUDAGraph

    def _sleep(self, cycles: int) -> None:
        self.log.append("spin")

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def Stream(self) -> "FakeCuda":
        return self

    def current_stream(self) -> "FakeCuda":
        return self

    def wait_stream(self, other: object) -> None:
        self.log.append("wait")

    @contextmanager
    def stream(self, side: object):
        self.log.append("side")
        yield
        self.log.append("main")

    @contextmanager
    def graph(self, graph: object):
        self.log.append("capture")
        yield
        self.log.append("captured")


class Cold:
    """Stands for the memory that is written to empty the L2."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def zero_(self) -> None:
        self.log.append("cold")


def test_a_lap_by_events_empties_the_cache_and_spins_before_its_events_and_times_the_call_alone():
    cuda = FakeCuda()
    lap = DeviceLap(lambda: cuda.log.append("call"), Cold(cuda.log), "events", cuda)
    assert lap() == 2  # from one event to the other lies the call
    assert cuda.log == ["cold", "spin", "event", "call", "event", "synchronize"]


def test_a_lap_of_a_graph_times_its_replay_and_what_was_captured_is_not_run_again():
    cuda = FakeCuda()
    lap = DeviceLap(captured(lambda: cuda.log.append("call"), cuda), Cold(cuda.log), "graph", cuda)
    warm = ["wait", "side", *["call"] * timing.CAPTURE_WARMUP, "main", "wait"]
    assert cuda.log == [*warm, "capture", "call", "captured"]
    cuda.log.clear()
    lap()
    assert cuda.log == ["cold", "spin", "event", "replay", "event", "synchronize"]
    assert turns([lap], 1)[0].how == "graph"


def test_what_a_call_raises_while_it_is_captured_is_raised():
    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        captured(fails, FakeCuda())


def test_turns_go_round_and_the_warm_up_does_not_count():
    order: list[str] = []

    def lap(name: str, values: list[float]):
        def run() -> float:
            order.append(name)
            return values.pop(0)

        return run

    a, b = turns([lap("a", [100, 100, 3, 1, 2]), lap("b", [100, 100, 8, 9, 7])], 3)
    assert order == ["a", "b"] * 5
    assert (a.median_ms, a.low_ms, a.high_ms, a.repeats, a.how) == (2, 1, 3, 3, "host")
    assert (b.median_ms, b.low_ms, b.high_ms) == (8, 7, 9)


def test_the_spread_is_the_tenth_and_the_ninetieth_percentile():
    values = [float(ms) for ms in range(100)]
    found = turns([lambda: values.pop()], 100, warmup=0)[0]
    assert (found.low_ms, found.median_ms, found.high_ms) == (10, 49.5, 90)


def test_short_calls_take_more_turns_while_seconds_are_left():
    calls: list[int] = []
    found = timed_together([lambda: calls.append(1)], 1, warmup=1, seconds=1e9)[0]
    assert found.repeats == timing.MOST_TURNS - 1
    assert len(calls) == timing.MOST_TURNS


def test_on_a_cpu_the_clock_of_the_host_is_read():
    lap = lap_of(lambda: None, "cpu", graph=True)
    assert isinstance(lap, HostLap)
    assert timed(lambda: None, 2).how == "host"
    with pytest.raises(ValueError, match="repeats: expected at least 1, got 0"):
        timed(lambda: None, 0)


def test_ceilings_are_the_work_over_the_median(monkeypatch):
    monkeypatch.setattr(timing, "COPY_BYTES", 1 << 10)
    monkeypatch.setattr(timing, "MATMUL_SIDE", 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    two = [timing.Timing(2.0, 2, 2, 1), timing.Timing(4.0, 4, 4, 1)]

    def fake(calls, repeats, device):
        for call in calls:
            call()
        return two

    monkeypatch.setattr(timing, "timed_together", fake)
    found = timing.ceilings("cpu", torch.bfloat16)
    assert found.bandwidth == pytest.approx(2 * 1024 / 2e-3)
    assert found.flops == pytest.approx(2 * 8**3 / 4e-3)
    assert (found.name, found.itemsize) == ("a GPU in this run", 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu_a_lap_does_the_work_once(graph):
    x = torch.zeros(1 << 20, device="cuda")
    lap = lap_of(lambda: x.add_(1), "cuda:0", graph)
    before = float(x[0])
    assert before == (timing.CAPTURE_WARMUP if graph else 0), "capture runs nothing"
    assert lap() > 0
    assert torch.equal(x, torch.full_like(x, before + 1))
