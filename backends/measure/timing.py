"""Time calls against each other in turns, so that a noisy machine is as unkind to each."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from deltazoo.backends.torch_ext.cuda_graph import Call

Told = Callable[[int, int, str], None]  # done, total, note

LEAST_ROUNDS = 3
MOST_LEAD = 0.01  # seconds; of a call that takes the host longer its time is a part of what is timed


class Times(NamedTuple):
    """Seconds of each timed call; host: until it was issued, on a GPU, else nothing."""

    seconds: list[float]
    host: list[float]


def time_interleaved(
    calls: Mapping[str, Call], device: torch.device, rounds: int, seconds: float, told: Told
) -> dict[str, Times]:
    """Run every call once a round, in an order that turns, and time each.

    Every call runs once untimed first. On a GPU the time is that between two events around a call that is queued, as
    in training: before it the L2 cache is emptied, for as long as the host takes to issue the call, up to `MOST_LEAD`.
    What the host takes is timed by itself.

    Args:
        rounds: at most; seconds: no new round after them, once there were `LEAST_ROUNDS`.
        told: hears the rounds done, their number, and a note.
    Returns: the times of every call, by name.
    """
    times = {name: Times([], []) for name in calls}
    names = list(calls)
    with _current(device):
        timer = _CudaTimer(device) if device.type == "cuda" else _Timer(device)
        timed = {name: timer.timed(call, times[name]) for name, call in calls.items()}
        start = time.perf_counter()
        for done in range(rounds if calls else 0):
            if done >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
                break
            told(done, rounds, f"round {done + 1}")
            turn = done % len(names)
            for name in names[turn:] + names[:turn]:
                timed[name]()
    told(rounds, rounds, "")
    return times


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """The most device memory that a call holds beyond what was held before it; None where that is not counted."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    torch.cuda.synchronize(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before


def once(call: Call, device: torch.device) -> float:
    """Seconds of one call, and of the device until it is done."""
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


class _Timer:
    """By the host's clock, the device idle before and after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def timed(self, call: Call, times: Times) -> Callable[[], None]:
        """Run a call once; what comes back runs it and adds its time."""
        once(call, self.device)
        return lambda: times.seconds.append(once(call, self.device))


class _CudaTimer(_Timer):
    """By events, the device busy with writing zeros until the call is issued."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self.zeros = torch.empty(size, dtype=torch.uint8, device=device)
        self._empty_cache(4)
        fills = 16
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _wait(device)
        began = time.perf_counter()
        start.record()
        self._empty_cache(fills)
        stop.record()
        host = time.perf_counter() - began
        _wait(device)
        taken = start.elapsed_time(stop) / 1e3
        # seconds of lead, by a fill; where the host issues them no sooner than they are done, there is none to be had
        self.gained = max(taken - host, taken / 4) / fills

    def _empty_cache(self, fills: int) -> None:
        for _ in range(fills):
            self.zeros.zero_()

    def timed(self, call: Call, times: Times) -> Callable[[], None]:
        _wait(self.device)
        lead = self._queue(call)
        fills = 2 + math.ceil(min(lead, MOST_LEAD) / self.gained)

        def time_one() -> None:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._empty_cache(fills)
            start.record()
            times.host.append(self._queue(call))
            stop.record()
            stop.synchronize()
            times.seconds.append(start.elapsed_time(stop) / 1e3)

        return time_one

    def _queue(self, call: Call) -> float:
        """Seconds until a call is issued."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Events are recorded on streams of the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
