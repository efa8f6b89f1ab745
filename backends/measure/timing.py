"""Timing of several calls in alternation, so that fluctuations of the machine affect them equally."""

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from deltazoo.backends.io.progress import Progress
from deltazoo.backends.torch_ext.cuda_graph import Call

Report = Callable[[int, int, str], None]  # rounds done, rounds in total, note

MIN_ROUNDS = 3
MAX_LEAD = 0.01  # seconds; the host time of a slower call beyond this lead is part of its measured time


class Times(NamedTuple):
    """Seconds of each timed call. host: seconds until the call was issued; empty without a GPU."""

    seconds: list[float]
    host: list[float]

    def percentiles_ms(self) -> tuple[float, float, float]:
        """Return the 20th percentile, the median and the 80th percentile in milliseconds."""
        low, middle, high = (1e3 * float(x) for x in np.percentile(self.seconds, [20, 50, 80]))
        return low, middle, high


def failure_reason(failure: Exception) -> str:
    """Describe in one line why a call failed; the row of a benchmark holds it, so that the others are still timed."""
    return f"failed with {type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"


def time_interleaved(
    calls: Mapping[str, Call], device: torch.device, rounds: int, seconds: float, report: Report
) -> dict[str, Times]:
    """Time every call once per round, in an order that rotates from round to round.

    Every call runs once untimed first. On a GPU the time is between two events around the call. Before the first event
    the L2 cache is flushed by fills that keep the device busy while the host issues the call, for up to `MAX_LEAD`
    seconds. So the call is queued, as in training, and the host time is measured separately.

    Args:
        rounds: upper limit.
        seconds: no new round starts after this time, once `MIN_ROUNDS` are done.
        report: receives the rounds done, their total, and a note.
    Returns: the times of every call, by name.
    """
    times = {name: Times([], []) for name in calls}
    names = list(calls)
    with _current_device(device):
        timer: _Timer = _CudaTimer(device) if device.type == "cuda" else _HostTimer(device)
        timed = {name: timer.timed(call, times[name]) for name, call in calls.items()}
        start = time.perf_counter()
        for done in range(rounds if calls else 0):
            if done >= MIN_ROUNDS and time.perf_counter() - start > seconds:
                break
            report(done, rounds, f"round {done + 1}")
            first = done % len(names)
            for name in names[first:] + names[:first]:
                timed[name]()
    report(rounds, rounds, "")
    return times


def time_alone(
    task: str, call: Call, device: torch.device, rounds: int, seconds: float, progress: Progress
) -> dict[str, float]:
    """Time one call as `time_interleaved` does. Returns: median_ms, low_ms, high_ms and rounds."""
    report = functools.partial(progress, task)
    times = time_interleaved({task: call}, device, rounds, seconds, report)[task]
    low, middle, high = times.percentiles_ms()
    return {"median_ms": middle, "low_ms": low, "high_ms": high, "rounds": len(times.seconds)}


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Return the peak of device memory that a call allocates, its results included; None if the device is not CUDA."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    del results
    return torch.cuda.max_memory_allocated(device) - before


def time_once(call: Call, device: torch.device) -> float:
    """Return the seconds of one call, until the device has finished it."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


class _Timer(ABC):
    """A method to time calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def timed(self, call: Call, times: Times) -> Callable[[], None]:
        """Run a call once untimed, and return a function that runs it and appends its time to `times`."""


class _HostTimer(_Timer):
    """Time by the host's clock, with the device idle before and after the call."""

    def timed(self, call: Call, times: Times) -> Callable[[], None]:
        time_once(call, self.device)
        return lambda: times.seconds.append(time_once(call, self.device))


class _CudaTimer(_Timer):
    """Time by CUDA events, with the device busy with fills until the call is issued."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self.zeros = torch.empty(size, dtype=torch.uint8, device=device)
        self._flush_l2(4)
        fills = 16
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _synchronize(device)
        host_start = time.perf_counter()
        start.record()
        self._flush_l2(fills)
        stop.record()
        host = time.perf_counter() - host_start
        _synchronize(device)
        busy = start.elapsed_time(stop) / 1e3
        # Seconds of lead per fill: device time minus host time. Where the host issues fills no faster than the device
        # runs them, there is no lead to gain, and busy / 4 limits the number of fills.
        self.lead_per_fill = max(busy - host, busy / 4) / fills

    def _flush_l2(self, fills: int) -> None:
        for _ in range(fills):
            self.zeros.zero_()

    def timed(self, call: Call, times: Times) -> Callable[[], None]:
        _synchronize(self.device)
        lead = self._issue(call)
        fills = 2 + math.ceil(min(lead, MAX_LEAD) / self.lead_per_fill)

        def run() -> None:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush_l2(fills)
            start.record()
            times.host.append(self._issue(call))
            stop.record()
            stop.synchronize()
            times.seconds.append(start.elapsed_time(stop) / 1e3)

        return run

    def _issue(self, call: Call) -> float:
        """Run a call and return the seconds until it was issued."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def _current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make the device current: events are recorded on streams of the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
