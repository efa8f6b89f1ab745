"""Operator and launch of the decode step of complex states. Triton is imported when the kernel first runs.

B rows, D channels, N states per channel
"""

import math
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.tiles import cdiv, power_of_two

# A step of s4d with 64 rows of 2048 channels with 32 states on an H200, us: 44.1 with this launch, 46.2 with 512 states
# and 4 warps, 54.1 with 1024 and 8.
_STATES = 256  # of a row, in a program
_WARPS = 2
_ROWS = 8  # of a program, which loads the parameters once


def complex_step_(
    x: Tensor, magnitude_and_angle: tuple[Tensor, Tensor], b: Tensor, c: Tensor, position: Tensor, states: Tensor
) -> Tensor:
    """Compute S = |a| S + exp(-i p angle) b x in place, and return y = Re(sum of C exp(i p angle) S), [B, D] float32.

    Args:
        x: [B, D]. magnitude_and_angle: log |a| and the angle of a, [D, N] float32.
        b: [D, N, 2] float32; c: [D, N, 2]: real and imaginary parts.
        position: [B] int64, p.
        states: [B, D, 2 N, 1] float32, real parts and imaginary parts.
    """
    log_magnitude, angle = magnitude_and_angle
    turns = angle.double() / (2 * math.pi)
    y: Tensor = _step_op(x, turns, log_magnitude, b, c, position, states)
    return y


def _step(
    x: Tensor, turns: Tensor, log_magnitude: Tensor, b: Tensor, c: Tensor, position: Tensor, states: Tensor
) -> Tensor:
    from deltazoo.backends.triton.element.kernels.complex_step import complex_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher
    from deltazoo.backends.triton.support import Options

    x = x if x.stride(1) == 1 else x.contiguous()
    (B, D), N, pool = x.shape, turns.shape[1], states.contiguous()
    NP = power_of_two(N)
    BD = min(max(1, _STATES // NP), power_of_two(D))
    y = torch.empty(B, D, dtype=torch.float32, device=x.device)
    tensors = {
        "x": x, "turns": ready(turns), "log_magnitude": ready(log_magnitude), "b": ready(b), "c": ready(c),
        "position": ready(position), "states": pool, "y": y,
    }  # fmt: skip
    constants = {"D": D, "N": N, "NP": NP, "BD": BD, "ROWS": _ROWS, "X_STRIDE": x.stride(0)}
    with torch.cuda.device_of(x):
        launcher(complex_step_kernel, tensors, constants, Options(_WARPS))(cdiv(B, _ROWS) * cdiv(D, BD), {"rows": B})
    mark_written(states, pool)
    return y


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


_step_op = operator(
    "triton_complex_step_(Tensor x, Tensor turns, Tensor log_magnitude, Tensor b, Tensor c, Tensor position,"
    " Tensor(a!) states) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
