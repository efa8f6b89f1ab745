"""Operator and launch of the decode step of complex states. Triton is imported when the kernel first runs.

B rows, D channels, N states per channel
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

# A step of s4d with 64 rows of 2048 channels with 32 states on an H200, us: 44.1 with this launch, 46.2 with 512 states
# and 4 warps, 54.1 with 1024 and 8.
_STATES = 256  # of a row, in a program
_WARPS = 2
_ROWS = 8  # of a program, which loads the parameters once


class ComplexCall(NamedTuple):
    """The operator's arguments: tensors as of `complex_step_kernel`.

    Args: factor, gate: None: there is none. gelu: whether the output passes a GELU. states: [B, D, 2 N, 1].
    """

    x: Tensor
    factor: Tensor | None
    gate: Tensor | None
    gelu: bool
    turns: Tensor
    log_magnitude: Tensor
    b_re: Tensor
    b_im: Tensor
    c: Tensor
    skip: Tensor
    position: Tensor
    states: Tensor


def complex_step_(call: ComplexCall) -> Tensor:
    """Decode one token per row; `states` change in place. Returns: o [B, D] in the dtype of x."""
    o: Tensor = _step_op(*call)
    return o


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.element.kernels.complex_step import ComplexTraits, complex_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, o = ComplexCall(*arguments), _fake(*arguments)
    (B, D), N = call.x.shape, call.turns.shape[1]
    tensors = step_tensors(call, ("x", "factor", "gate"), ("states",)) | {"o": o}
    NP = power_of_two(N)
    BD = min(max(1, _STATES // NP), power_of_two(D))
    X, FACTOR, GATE = (-1 if tensors[name] is None else tensors[name].stride(0) for name in ("x", "factor", "gate"))
    traits = ComplexTraits(D, N, NP, BD, _ROWS, X, FACTOR, GATE, call.gelu)
    with torch.cuda.device_of(call.x):
        run = launcher(complex_step_kernel, tensors, {"traits": traits}, Options(_WARPS))
        run(cdiv(B, _ROWS) * cdiv(D, BD), {"rows": B})
    finish(call, tensors, ("states",))
    return o


def _fake(*arguments: Any) -> Tensor:
    x: Tensor = arguments[0]
    return x.new_empty(x.shape)


_step_op = operator(
    f"triton_complex_step_({schema(ComplexCall, 'states')}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
