"""Devices, dtypes and sizes that the kernels of fast weights support; the others run in plain torch.

The largest kernels need 82 KB (TTT-Linear in float32) and 96 KB (neural memory) of shared memory, compiled for sm_80
and sm_90. E head width, F inner width, M tokens per chunk
"""

import torch

from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.limits import runs_elementwise_kernels
from deltazoo.backends.triton.tiles import power_of_two

MAX_WIDTH = 64
MAX_CHUNK = 16
MAX_LAYER = 64 * 128  # numbers of a layer of the neural memory, in tiles


def runs_ttt_linear(device_type: str, index: int | None, dtype: torch.dtype, width: int, batch: int) -> bool:
    """Whether the kernels of TTT-Linear run: E <= 64 and M <= 16 in 16 or 32 bits."""
    return width <= MAX_WIDTH and batch <= MAX_CHUNK and _runs_on(device_type, index, dtype)


def runs_neural_memory(
    device_type: str, index: int | None, dtype: torch.dtype, widths: tuple[int, int], size: int
) -> bool:
    """Whether the kernels of the neural memory run: E F <= 8192, both rounded up to tiles, and M <= 16 in 16 bits."""
    width, inner = (max(16, power_of_two(n)) for n in widths)
    fits = width * inner <= MAX_LAYER and size <= MAX_CHUNK and dtype.itemsize == 2
    return fits and _runs_on(device_type, index, dtype)


def _runs_on(device_type: str, index: int | None, dtype: torch.dtype) -> bool:
    """Whether a device is an NVIDIA GPU for which Triton compiles the products of 16 rows: not one of capability 10."""
    return runs_elementwise_kernels(device_type, index, dtype) and problems.device_spec(index).capability[0] != 10
