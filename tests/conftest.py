"""How many processes the tests run in."""

import os

import pytest
import torch

MEMORY_OF_A_PROCESS = 5 * 2**30  # of a GPU: its context, what its tests hold at once, and what torch keeps of it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto`: a process a core, but beside a GPU no more than have room in its memory."""
    if not torch.cuda.is_available():
        return None
    _, memory = torch.cuda.mem_get_info()
    return max(1, min(os.cpu_count() or 1, memory // MEMORY_OF_A_PROCESS))
