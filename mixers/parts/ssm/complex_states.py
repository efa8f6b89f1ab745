"""Complex diagonal states in real arithmetic: a rotating frame, in which a complex decay becomes a real one.

With a = r exp(i w), the recurrence s_t = a s_(t-1) + b_t is s'_t = r s'_(t-1) + exp(-i w t) b_t for the state in the
rotating frame, s'_t = exp(-i w t) s_t. So values are rotated by -w t before the update, and its outputs by w t after
it. The two columns of the value (V = 2) hold the real and the imaginary part.

B batch, T time, D width, HV value heads (one per complex state)
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OperandPart, OperandResult, OutputArguments, OutputPart, Stateful
from deltazoo.mixers.core.sequences import positions, token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.rotary import rotation_angle


class ToRotatingFrame(OperandPart, Stateful):
    """v_t <- exp(-i w t) v_t, with the angular frequencies w [HV] in radians per token.

    w is learned if `theta` is given; otherwise it is the intermediate "frequency". Returns w t as "angle".
    Angles are computed in float64 modulo 2 pi, so that their error does not grow with the length of the sequence.

    Args: theta: base of the learned frequencies.
    State: the number of tokens that each sequence has processed, [B] int64.
    Initialisation of a learned w: theta^(-2 h / HV) (HGRN 2311.04823).
    """

    splits: ClassVar[bool] = True

    def __init__(self, shape: HeadShape, theta: float | None = None) -> None:
        super().__init__()
        self.theta = theta
        self.turn = None if theta is None else nn.Parameter(torch.empty(shape.value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.turn is not None and self.theta is not None:
            HV = self.turn.shape[0]
            with torch.no_grad():
                self.turn.copy_(self.theta ** (-2 * (torch.arange(HV) / HV)))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, dtype=torch.int64)

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        frequency = context.intermediate("frequency") if self.turn is None else self.turn
        angle = rotation_angle(positions(x, state, context), frequency, state_dtype(inputs.v.dtype))
        new_state = None if state is None else write_back(state, state + token_counts(x, context))
        return inputs._replace(v=_rotate(inputs.v, -angle)), new_state, {"angle": angle}


class FromRotatingFrame(OutputPart):
    """o_t <- exp(i w t) o_t, with the intermediate "angle" of `ToRotatingFrame`."""

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return _rotate(o, context.intermediate("angle")), None


class ComplexConjugate(OutputPart):
    """o <- conj(o): a real linear map of (re, -im) with weights (Re C, Im C) then computes Re(C s)."""

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return torch.stack([o[..., 0], -o[..., 1]], -1), None


def _rotate(pair: Tensor, angle: Tensor) -> Tensor:
    """Multiply re + i im by exp(i angle). pair: [..., HV, 2]; angle: [..., HV]."""
    re, im = pair.to(angle.dtype).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([re * cos - im * sin, re * sin + im * cos], -1).to(pair.dtype)
