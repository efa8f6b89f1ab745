"""Shared by the benchmarks: the device, and a fixture that times calls on it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Timed = Callable[[Callable[[], object]], Any]


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Remove host name, release of the operating system and build of Python from the saved results."""
    for name in ("node", "release", "python_build"):
        machine_info.pop(name, None)


@pytest.fixture
def timed(benchmark: Any) -> Timed:
    """Time a call after three warm-up calls, and return its result, on a GPU None.

    On a GPU each call ends with a synchronisation, and extra_info gets the median of the event times, in ms.
    """

    def run(call: Callable[[], object]) -> Any:
        for _ in range(3):
            call()
        benchmark.extra_info.update(device=str(DEVICE), torch=torch.__version__, threads=torch.get_num_threads())
        if DEVICE.type != "cuda":
            return benchmark(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        elapsed_ms: list[float] = []

        def call_between_events() -> None:
            start.record()
            call()
            end.record()
            end.synchronize()
            elapsed_ms.append(start.elapsed_time(end))

        benchmark(call_between_events)
        benchmark.extra_info["event_ms"] = sorted(elapsed_ms)[len(elapsed_ms) // 2]
        return None

    return run
