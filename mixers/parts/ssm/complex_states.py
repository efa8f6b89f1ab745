"""Complex diagonal states in real arithmetic: a rotating frame, in which a complex decay becomes a real one.

With a = r exp(i w), the recurrence s_t = a s_(t-1) + b_t is s'_t = r s'_(t-1) + exp(-i w t) b_t for the state in the
rotating frame, s'_t = exp(-i w t) s_t. So values are rotated by -w t before the update, and its outputs by w t after
it. The two columns of the value (V = 2) hold the real and the imaginary part.

B batch, T time, D width, HV value heads (one per complex state)
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.backends.torch_ext.plain_module import is_plain, is_plain_linear
from deltazoo.backends.triton.element.rotating_op import MAX_CHANNELS, RotatingCall, rotating_step_
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.decode_maps import adds_to_product, apply_maps
from deltazoo.mixers.core.initialization import fills_values
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OperandPart, OperandResult, OutputArguments, OutputPart, Stateful
from deltazoo.mixers.core.sequences import positions, token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.gates.decays import SigmoidDecay, TiedInputGate
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import ChannelProjection
from deltazoo.mixers.parts.rotary import rotation_angle
from deltazoo.mixers.parts.skips import Feedthrough
from deltazoo.mixers.parts.ssm.complex_decays import LRUDecay, S5Decay


class _Step(NamedTuple):
    """What a decode step reads, by the names of `RotatingCall`. maps: of the input, to decays and gates."""

    kind: str
    magnitude: Tensor | None
    angle: Tensor
    scale: Tensor | None
    norm_weight: Tensor | None = None
    eps: float = 0.0
    maps: Mapping[str, nn.Module] = {}


class ToRotatingFrame(OperandPart, Stateful, TokenStep):
    """v_t <- exp(-i w t) v_t, with the angular frequencies w [HV] in radians per token.

    w is learned if `theta` is given; otherwise it is the intermediate "frequency". Returns w t as "angle".
    Angles are computed in float64 modulo 2 pi, so that their error does not grow with the length of the sequence. The
    update runs in their dtype, float32 for inputs of 16 bits: the gradient of w is a sum over t of t times a difference
    between the gradients after and before the update, where rounding to 16 bits would exceed the sum.

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

    @fills_values
    def reset_parameters(self) -> None:
        if self.turn is not None and self.theta is not None:
            HV = self.turn.shape[0]
            self.turn.copy_(self.theta ** (-2 * (torch.arange(HV) / HV)))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, dtype=torch.int64)

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        frequency = context.intermediate("frequency") if self.turn is None else self.turn
        angle = rotation_angle(positions(x, state, context), frequency, state_dtype(inputs.v.dtype))
        new_state = None if state is None else write_back(state, state + token_counts(x, context))
        q, k = (y.to(angle.dtype) for y in (inputs.q, inputs.k))
        return inputs._replace(q=q, k=k, v=_rotate(inputs.v, -angle)), new_state, {"angle": angle}

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        project, position, states = call.parts["project"], call.context.positions, call.states["update"]
        if not isinstance(project, ChannelProjection) or project.conv is not None or states.shape[1] > MAX_CHANNELS:
            return None
        step = self._fixed_step(call) or self._gated_step(call)
        if step is None or project.parts[0].silu != (step.kind == "hgrn"):
            return None
        maps = {"values": project.to_v, **step.maps}
        if not all(is_plain_linear(linear) and adds_to_product(linear, call.x) for linear in maps.values()):
            return None
        products = {name: y[:, 0] for name, y in apply_maps(call.x, maps, call.norm).items()}
        direct = call.direct if type(call.direct) is Feedthrough and is_plain(call.direct) else None
        o, bypass = rotating_step_(
            RotatingCall(
                step.kind, products["values"], products.get("decays"), products.get("gates"), step.magnitude,
                step.angle, step.scale, step.norm_weight, x=None if direct is None else call.x[:, 0],
                feedthrough=None if direct is None else direct.D,
                position=None if position is None else position[:, 0], seen=call.state_of(self), states=states,
                eps=step.eps,
            )
        )  # fmt: skip
        return TokenOutput(o[:, None], None if direct is None else bypass[:, None])

    def _fixed_step(self, call: TokenCall) -> "_Step | None":
        """Return what a step of fixed decays reads; None: the parts are others."""
        after = (ToRotatingFrame, Update, FromRotatingFrame, ComplexConjugate)
        if not any(call.has_parts(ChannelProjection, decay, *after) for decay in (LRUDecay, S5Decay)):
            return None
        decay = (*call.parts.values(),)[1]
        assert isinstance(decay, LRUDecay | S5Decay)
        parameters = decay.step_parameters()
        return None if parameters is None or self.turn is not None else _Step(*parameters)

    def _gated_step(self, call: TokenCall) -> "_Step | None":
        """Return what a step of HGRN reads; None: the parts are others."""
        before = (ChannelProjection, SigmoidDecay, TiedInputGate, ToRotatingFrame)
        if not call.has_parts(*before, Update, FromRotatingFrame, OutputGate, HeadNorm) or self.turn is None:
            return None
        _, decay, tied, _, _, _, gate, norm = call.parts.values()
        assert isinstance(decay, SigmoidDecay) and isinstance(tied, TiedInputGate)
        assert isinstance(gate, OutputGate) and isinstance(norm, HeadNorm)
        if decay.per != "head" or decay.temperature != 1 or decay.conv is not None or tied.into != "value":
            return None
        if gate.activation != "sigmoid" or norm.kind != "layer" or norm.groups > 1 or norm.bias is not None:
            return None
        maps = {"decays": decay.proj, "gates": gate.proj}
        return None if norm.weight is None else _Step("hgrn", decay.floor, self.turn, None, norm.weight, norm.eps, maps)


class FromRotatingFrame(OutputPart):
    """o_t <- exp(i w t) o_t, with the intermediate "angle" of `ToRotatingFrame`, in the dtype of the projection."""

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return _rotate(o, context.intermediate("angle")).to(arguments.projected.v.dtype), None


class ComplexConjugate(OutputPart):
    """o <- conj(o): a real linear map of (re, -im) with weights (Re C, Im C) then computes Re(C s)."""

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return torch.stack([o[..., 0], -o[..., 1]], -1), None


def _rotate(pair: Tensor, angle: Tensor) -> Tensor:
    """Return re + i im times exp(i angle), in the dtype of the angle. pair: [..., HV, 2]; angle: [..., HV]."""
    re, im = pair.to(angle.dtype).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([re * cos - im * sin, re * sin + im * cos], -1)
