"""Number of pytest-xdist worker processes, and the tests that cannot run here, which are not collected."""

import os

import pytest
import torch

GPU_MEMORY_PER_WORKER = 5 * 2**30  # bytes: the CUDA context, the tensors of a test, and torch's cached blocks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto`: one worker per core, on a GPU limited by its memory."""
    if not torch.cuda.is_available():
        return None
    _, memory = torch.cuda.mem_get_info()
    return max(1, min(os.cpu_count() or 1, memory // GPU_MEMORY_PER_WORKER))


ELSEWHERE = ("GPU", "CUDA", "TRITON_INTERPRET")  # in the reason of a skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need a GPU or Triton's interpreter where there is none."""
    kept, elsewhere = [], []
    for item in items:
        skips = [mark for mark in item.iter_markers("skipif") if mark.args and mark.args[0]]
        needs_other = any(word in mark.kwargs.get("reason", "") for mark in skips for word in ELSEWHERE)
        (elsewhere if needs_other else kept).append(item)
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = kept
