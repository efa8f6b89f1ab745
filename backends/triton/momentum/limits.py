"""Devices, dtypes and sizes that the kernels of the delta rule with momentum support; the others run in plain torch."""

import torch

from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.limits import elementwise_refusals

MAX_WIDTH = 256
_SHARED_MEMORY = 160 * 1024  # of the reverse scan for K = 256


def runs_momentum(device_type: str, index: int | None, dtype: torch.dtype, K: int) -> bool:
    """Whether the kernels run: K <= 256 in 16 bits, on a GPU with 160 KB of shared memory, not of capability 10."""
    if K > MAX_WIDTH or dtype.itemsize != 2 or elementwise_refusals(device_type, index, dtype):
        return False
    device = problems.device_spec(index)
    return device.capability[0] != 10 and device.shared_memory >= _SHARED_MEMORY
