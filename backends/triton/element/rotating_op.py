"""Operator and launch of one token of complex diagonal states; kernels/rotating_step.py states the equations.

B rows, C channels, D width
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, rows_equally_apart, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import limit_warps, power_of_two

MAX_CHANNELS = 4096  # a program holds those of a row
_WARPS = 8
_OF_TOKEN = ("values", "decays", "gates")  # columns of one tensor: their rows may be apart
_IN_PLACE = ("seen", "states")


class RotatingCall(NamedTuple):
    """The operator's arguments: tensors as of `rotating_step_kernel`.

    Args:
        kind: "lru", "s5" (zero-order hold) or "hgrn". decays, gates, norm_weight: given for hgrn only; scale: for the
            others only. magnitude: None: no floor (hgrn). position: None: the number of tokens before.
        x, feedthrough: None: there is no feedthrough. states: [B, C, 1, 2].
    """

    kind: str
    values: Tensor
    decays: Tensor | None
    gates: Tensor | None
    magnitude: Tensor | None
    angle: Tensor
    scale: Tensor | None
    norm_weight: Tensor | None
    x: Tensor | None
    feedthrough: Tensor | None
    position: Tensor | None
    seen: Tensor
    states: Tensor
    eps: float


def rotating_step_(call: RotatingCall) -> tuple[Tensor, Tensor]:
    """Decode one token per row; `seen` and `states` change in place. Returns: o [B, 2 C]; direct [B, D], or empty."""
    o, direct = _step_op(*call)
    return o, direct


def _step(*arguments: Any) -> tuple[Tensor, Tensor]:
    from deltazoo.backends.triton.element.kernels.rotating_step import RotatingTraits, rotating_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, (o, direct) = RotatingCall(*arguments), _fake(*arguments)
    (B, C), (_, D) = call.states.shape[:2], direct.shape
    tensors = step_tensors(call, _OF_TOKEN, _IN_PLACE) | {"o": o, "direct": direct}
    rows_equally_apart(tensors, _OF_TOKEN)
    overlap = overlaps(call.values)
    traits = RotatingTraits(
        KIND=call.kind, C=C, BC=power_of_two(C), D=D, BD=power_of_two(max(1, D)), STRIDE=tensors["values"].stride(0),
        FLOOR=call.magnitude is not None, EPS=call.eps,
        POSITIONS=call.position is not None, OVERLAP=overlap,
    )  # fmt: skip
    with torch.cuda.device_of(call.values):
        options = Options(limit_warps(_WARPS, 2 * power_of_two(C)), overlap=overlap)
        launcher(rotating_step_kernel, tensors, {"traits": traits}, options)(B, {})
    finish(call, tensors, _IN_PLACE)
    return o, direct


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = RotatingCall(*arguments)
    B, D = call.values.shape[0], 0 if call.x is None else call.x.shape[1]
    return call.values.new_empty(call.values.shape), call.values.new_empty(B, D)


_step_op = operator(
    f"triton_rotating_step_({schema(RotatingCall, *_IN_PLACE)}) -> (Tensor, Tensor)",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
