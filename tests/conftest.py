"""Number of pytest-xdist worker processes."""

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
