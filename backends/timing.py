"""Time calls against each other in turns, so that a noisy machine is as unkind to each."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], object]
Told = Callable[[int, int, str], None]  # done, total, note

LEAST_ROUNDS = 3


def in_turns(
    calls: Mapping[str, Call], device: torch.device, rounds: int, seconds: float, told: Told
) -> dict[str, list[float]]:
    """Run every call once a round, in an order that turns, and time each.

    Every call runs once untimed first. On a GPU the L2 cache is emptied before each timed call, and the time is
    that between two events.

    Args:
        rounds: at most; seconds: no new round after them, once there were `LEAST_ROUNDS`.
        told: hears the rounds done, their number, and a note.
    Returns: seconds of every timed call, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    timed = _cuda_timer(device) if device.type == "cuda" else _timer(device)
    for call in calls.values():
        call()
    start = time.perf_counter()
    for done in range(rounds if calls else 0):
        if done >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        told(done, rounds, f"round {done + 1}")
        turn = done % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(timed(calls[name]))
    told(rounds, rounds, "")
    return times


def captured(call: Call, device: torch.device, pool: Any = None) -> Call:
    """Capture a call in a CUDA graph; what comes back replays it. Raises what the call raises while it is captured.

    Args: pool: memory that several graphs share which are never replayed at once, from `torch.cuda.graph_pool_handle`.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        call()
    return graph.replay


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
    return _timer(device)(call)


def _timer(device: torch.device) -> Callable[[Call], float]:
    def timed(call: Call) -> float:
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        return time.perf_counter() - start

    return timed


def _cuda_timer(device: torch.device) -> Callable[[Call], float]:
    flush = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)

    def timed(call: Call) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    return timed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
