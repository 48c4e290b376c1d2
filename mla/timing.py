"""How long a call takes: by the host's clock, or on a GPU by events, behind a cold L2, as a graph where that can be.

A timed call on a GPU stands between two events, behind a write of COLD_BYTES, so that nothing of the last call is left
in the L2, and behind a spin of SPIN_CYCLES, in which the host queues the launches: what is timed is the device, unless
the call itself waits for it. Replayed as a CUDA graph the call is one launch, whatever it does on the host.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mla.errors import bad
from mla.roofline import Gpu

MOST_TURNS = 100
COLD_BYTES = 256 << 20  # several times the L2 of any GPU up to now
SPIN_CYCLES = 1_000_000  # about half a millisecond
CAPTURE_WARMUP = 3
COPY_BYTES, MATMUL_SIDE = 1 << 30, 8192

Lap = Callable[[], float]
"""Runs a call once and returns its milliseconds."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over `repeats` calls: the median, and the 10th and 90th percentile as the spread.

    `how` says what was read: "host" (the host's clock, the device waited for), "events" or "graph" (events around the
    launches of a call, or around one replay of it).
    """

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int
    how: str = "host"


def timed(call: Callable[[], object], repeats: int, device: str = "cpu", warmup: int = 2) -> Timing:
    """Return the timing of `call`, which is run `warmup` times before; on a GPU by events."""
    if repeats < 1:
        raise bad("repeats", expected="at least 1", got=str(repeats), fix="pass --repeats 10")
    return timed_together([call], repeats, device, warmup)[0]


def timed_together(
    calls: Sequence[Callable[[], object]], repeats: int, device: str = "cpu", warmup: int = 2, seconds: float = 0.0
) -> list[Timing]:
    """Return the timings of several calls that take turns, so that a slow moment of the machine hits them all alike.

    Short calls take more turns than `repeats`: as many as `seconds` hold, at most MOST_TURNS.
    """
    return turns([lap_of(call, device) for call in calls], repeats, warmup, seconds)


def turns(laps: Sequence[Lap], repeats: int, warmup: int = 2, seconds: float = 0.0) -> list[Timing]:
    """Return the timings of laps that take turns: `warmup` rounds that do not count, then as `timed_together` says."""
    samples: list[list[float]] = [[] for _ in laps]
    began, i = time.perf_counter(), -1
    while (i := i + 1) < warmup + repeats or (i < MOST_TURNS and time.perf_counter() - began < seconds):
        for lap, kept in zip(laps, samples, strict=True):
            ms = lap()
            if i >= warmup:
                kept.append(ms)
    return [_timing(sorted(kept), getattr(lap, "how", "host")) for lap, kept in zip(laps, samples, strict=True)]


def lap_of(call: Callable[[], object], device: str = "cpu", graph: bool = False) -> Lap:
    """Return the lap of a call: by the host's clock on a CPU, by events on a GPU, as a captured graph if `graph`.

    To capture runs the call CAPTURE_WARMUP times; whatever the call raises then, this raises.
    """
    if not device.startswith("cuda"):
        return HostLap(call)
    replay = captured(call) if graph else call
    return DeviceLap(replay, cold_memory(device), "graph" if graph else "events")


@dataclass(frozen=True)
class HostLap:
    """A lap by the host's clock; nothing is waited for."""

    call: Callable[[], object]
    how: str = "host"

    def __call__(self) -> float:
        """Run the call and return its milliseconds."""
        start = time.perf_counter()
        self.call()
        return (time.perf_counter() - start) * 1e3


@dataclass(frozen=True)
class DeviceLap:
    """A lap by two events of the device, behind a write of `cold` (n,) that takes the L2 and a spin.

    `cuda` is torch.cuda, or what stands for it in a test.
    """

    call: Callable[[], object]
    cold: torch.Tensor
    how: str = "events"
    cuda: Any = field(default=torch.cuda, repr=False)

    def __call__(self) -> float:
        """Run the call and return its milliseconds."""
        start, stop = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.cold.zero_()
        self.cuda._sleep(SPIN_CYCLES)
        start.record()
        self.call()
        stop.record()
        self.cuda.synchronize()
        return float(start.elapsed_time(stop))


def captured(call: Callable[[], object], cuda: Any = torch.cuda) -> Callable[[], None]:
    """Return a call that replays what `call` does to the same memory, captured as a CUDA graph after a warm-up.

    It keeps `call`, and so the tensors that a closure holds, alive: a graph knows their addresses only.
    """
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(CAPTURE_WARMUP):
            call()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        call()
    return lambda call=call: graph.replay()  # type: ignore[misc]


def cold_memory(device: str) -> torch.Tensor:
    """Return COLD_BYTES of a device as (n,) int32, the same tensor for every lap of a process."""
    if device not in _COLD:
        _COLD[device] = torch.empty(COLD_BYTES // 4, dtype=torch.int32, device=device)
    return _COLD[device]


_COLD: dict[str, torch.Tensor] = {}


def ceilings(device: str, dtype: torch.dtype, repeats: int = 20) -> Gpu:
    """Measure what a GPU reaches now: a copy of 1 GiB in bytes read and written, a matmul of 8192^3 in `dtype`.

    Medians, timed as every other call is.
    """
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(MATMUL_SIDE, MATMUL_SIDE, device=device).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    copy, matmul = timed_together([lambda: target.copy_(source), lambda: torch.matmul(a, b, out=c)], repeats, device)
    name = f"{torch.cuda.get_device_name(device)} in this run"
    flops, nbytes = 2e3 * MATMUL_SIDE**3 / matmul.median_ms, 2e3 * COPY_BYTES / copy.median_ms
    return Gpu.measured(name, flops, nbytes, itemsize=dtype.itemsize)


def _timing(sorted_ms: list[float], how: str) -> Timing:
    n = len(sorted_ms)
    at = lambda share: sorted_ms[min(n - 1, int(share * n))]
    return Timing(statistics.median(sorted_ms), at(0.1), at(0.9), n, how)
