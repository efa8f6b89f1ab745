"""Devices, dtypes and sizes that the kernels of fast weights support; the others run in plain torch.

The largest kernels need 82 KB (TTT-Linear in float32) and 96 KB (neural memory) of shared memory, compiled for sm_80
and sm_90. E head width, F inner width, M tokens per chunk
"""

import torch

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs
from deltazoo.backends.triton.limits import elementwise_refusals
from deltazoo.backends.triton.tiles import power_of_two

MAX_WIDTH = 64
MAX_CHUNK = 16
MAX_LAYER = 64 * 128  # numbers of a layer of the neural memory, in tiles


def ttt_linear_refusals(device_type: str, index: int | None, dtype: torch.dtype, width: int, batch: int) -> list[str]:
    """Return why the kernels of TTT-Linear do not run; [] if they do: E <= 64 and M <= 16 in 16 or 32 bits."""
    if width > MAX_WIDTH:
        return [f"heads must have at most {MAX_WIDTH} channels, got {width}."]
    if batch > MAX_CHUNK:
        return [f"a mini-batch must have at most {MAX_CHUNK} tokens, got {batch}."]
    return [*_device_refusals(device_type, index, dtype)]


def neural_memory_refusals(
    device_type: str, index: int | None, dtype: torch.dtype, widths: tuple[int, int], size: int
) -> list[str]:
    """Return why the kernels of the neural memory do not run; [] if they do.

    They take E F <= 8192, both rounded up to tiles, and M <= 16 in 16 bits.
    """
    width, inner = (max(16, power_of_two(n)) for n in widths)
    if width * inner > MAX_LAYER:
        return [f"a layer must have at most {MAX_LAYER} weights, got {width} x {inner}."]
    if size > MAX_CHUNK:
        return [f"a chunk must have at most {MAX_CHUNK} tokens, got {size}."]
    if dtype.itemsize != 2:
        return [f"it computes in bfloat16 or float16, got {str(dtype).removeprefix('torch.')}."]
    return [*_device_refusals(device_type, index, dtype)]


@constant_in_graphs
def _device_refusals(device_type: str, index: int | None, dtype: torch.dtype) -> tuple[str, ...]:
    """Return why a device has no kernels: Triton compiles products of 16 rows for NVIDIA GPUs, not of capability 10."""
    reasons = elementwise_refusals(device_type, index, dtype)
    if not reasons and DeviceSpec.current(index).capability[0] == 10:
        return ("Triton does not compile it for compute capability 10.",)
    return reasons
