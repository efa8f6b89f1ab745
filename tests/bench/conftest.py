"""Shared by the benchmarks: the device, and a fixture that times calls on it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Timed = Callable[[Callable[[], object]], Any]


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Remove the machine's name and irrelevant build fields from the saved results."""
    for name in ("node", "release", "python_build"):
        machine_info.pop(name, None)


@pytest.fixture
def timed(benchmark: Any) -> Timed:
    """Time a call after three warm-up calls; on a GPU synchronise, and record event times beside host times."""

    def run(call: Callable[[], object]) -> Any:
        for _ in range(3):
            call()
        benchmark.extra_info.update(device=str(DEVICE), torch=torch.__version__, threads=torch.get_num_threads())
        if DEVICE.type != "cuda":
            return benchmark(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        events: list[float] = []

        def synchronised() -> None:
            start.record()
            call()
            end.record()
            end.synchronize()
            events.append(start.elapsed_time(end))

        benchmark(synchronised)
        benchmark.extra_info["event_ms"] = sorted(events)[len(events) // 2]
        return None

    return run
