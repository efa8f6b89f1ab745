"""Launches of the convolution with many taps; imported when a kernel first runs.

B batch, T time, C channels, W taps
"""

import torch
from torch import Tensor

from deltazoo.backends.triton.conv.kernels.wide import wide_conv_kernel, wide_correlation_kernel
from deltazoo.backends.triton.runtime.launcher import launcher
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv

TIME, CHANNELS = 64, 64  # of a tile of the convolution
SUM_TIME, SUM_CHANNELS = 256, 32  # of the gradient of the weight
OPTIONS = Options(4)


def convolve(x: Tensor, weight: Tensor, y: Tensor, *, reverse: bool) -> None:
    """Convolve x [B, T, C] with weight [W, C] into y; reverse: the transposed map."""
    B, T, C = x.shape
    constants = {"C": C, "BT": TIME, "BC": CHANNELS, "REVERSE": reverse}
    with torch.cuda.device_of(x):
        run = launcher(wide_conv_kernel, {"x": x, "weight": weight, "y": y}, constants, OPTIONS)
        run(B * cdiv(T, TIME) * cdiv(C, CHANNELS), {"T": T, "W": len(weight)})


def correlate(dy: Tensor, x: Tensor, d_weight: Tensor) -> None:
    """Write the gradient of the weight [W, C]."""
    B, T, C = x.shape
    blocks = B * cdiv(T, SUM_TIME)
    partial = d_weight.new_empty(blocks, *d_weight.shape, dtype=torch.float32)
    constants = {"C": C, "BT": SUM_TIME, "BC": SUM_CHANNELS}
    with torch.cuda.device_of(x):
        run = launcher(wide_correlation_kernel, {"dy": dy, "x": x, "partial": partial}, constants, OPTIONS)
        run(blocks * cdiv(C, SUM_CHANNELS), {"T": T, "W": len(d_weight)})
    torch.sum(partial, 0, out=d_weight)
