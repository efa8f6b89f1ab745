"""RWKV-4: projections after the token shift, and the WKV recurrence in stabilised form.

B batch, T time, D width, HV value heads (one per channel)
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.ops.gemv import Shift, shifted_products
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.triton.element.wkv_op import WKVCall, wkv_step_
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.decode_maps import apply_to_each, reads_weight
from deltazoo.mixers.core.initialization import fills_values
from deltazoo.mixers.core.mixer import Context, Place
from deltazoo.mixers.core.part import HeadShape, OperandPart, OperandResult, OutputArguments, OutputPart, Stateful
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.convolution import TokenShift
from deltazoo.mixers.parts.gates.exponential_gating import initial_max, running_max, stabilised
from deltazoo.mixers.parts.gates.output_gates import PrecomputedGate
from deltazoo.mixers.parts.normaliser import Normalise, NormaliserColumn


class RWKV4Projection(nn.Module, Stateful, TokenStep):
    """k, v, r = W (mu x_t + (1 - mu) x_(t-1)), with one mu [D] each; q = 1.

    Returns the intermediates "key" and "gate" (r).

    State: the token shift's, [B, 1, D].
    Initialisation, for channel i in layer l of L: mu = (i / D)^(1 - l / L) for k, 0.3 l / (L - 1) more for v, and half
        the exponent for r.
    Source: RWKV 2305.13048.
    """

    splits: ClassVar[bool] = True
    keeps_inputs: ClassVar[bool] = True

    no_weight_decay: ClassVar[tuple[str, ...]] = ("mix",)

    def __init__(self, shape: HeadShape, place: Place) -> None:
        super().__init__()
        self.shift = TokenShift()
        self.width, self.shape, self.place = shape.width, shape, place
        self.mix = nn.Parameter(torch.empty(3, shape.width))
        self.to_k, self.to_v, self.to_r = (nn.Linear(shape.width, shape.value_heads, bias=False) for _ in range(3))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        layer, depth = self.place
        ratio, extra = 1 - layer / depth, 0.3 * layer / max(1, depth - 1)
        channel = torch.arange(self.width) / self.width
        self.mix.copy_(torch.stack([channel**ratio, channel**ratio + extra, channel ** (ratio / 2)]))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.shift.init_state(batch, self.width, like)

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> OperandResult:
        previous, new_state = self.shift(x, state, context)
        x_k, x_v, x_r = (previous + (x - previous) * mix.to(x.dtype) for mix in self.mix)
        k, v, r = apply_to_each((self.to_k, self.to_v, self.to_r), (x_k, x_v, x_r), state)
        v = v[..., None]
        one = torch.ones_like(v)
        return UpdateInputs(one, one, v), new_state, {"key": k, "gate": r}

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        before = (RWKV4Projection, NormaliserColumn, WKVGate)
        if not call.has_parts(*before, Update, WKVBonus, Normalise, PrecomputedGate) or call.norm is not None:
            return None
        if type(self.shift) is not TokenShift or not is_plain(self.shift):
            return None
        _, _, gate, _, bonus, divide, output_gate = call.parts.values()
        assert isinstance(gate, WKVGate) and isinstance(bonus, WKVBonus)
        assert isinstance(divide, Normalise) and isinstance(output_gate, PrecomputedGate)
        if divide.eps != 0 or divide.floor is not None or output_gate.activation != "sigmoid":
            return None
        maps, previous, x = (self.to_k, self.to_v, self.to_r), call.state_of(self), call.x
        if previous.dtype != x.dtype or not all(reads_weight(linear, x) for linear in maps):
            return None
        # the share of the present token, where that of `Shift` is of the previous one: so the two are exchanged
        shift = Shift(previous=x, mix=self.mix, rows=(0, 1, 2))
        k, v, r = (y[:, 0] for y in shifted_products(previous, [linear.weight for linear in maps], None, shift))
        largest, states = call.state_of(gate), call.states["update"]
        return TokenOutput(wkv_step_(WKVCall(k, v, r, gate.w, bonus.u, x[:, 0], largest, previous, states))[:, None])


class WKVGate(OperandPart, Stateful):
    """log_decay = -exp(w), v_t <- exp(k_t) v_t stabilised by the running maximum m.

    Reads the intermediate "key", k [B, T, HV], and returns "previous_max", m_(t-1).

    State: m, [B, HV].
    Initialisation: w rises from -5 to 3 over the channels, with an exponent that depends on the layer.
    Source: RWKV 2305.13048, appendices (the stabilised form, the initialisation).
    """

    splits: ClassVar[bool] = True

    def __init__(self, shape: HeadShape, depth_share: float) -> None:
        super().__init__()
        self.heads, self.depth_share = shape.value_heads, depth_share
        self.w = nn.Parameter(torch.empty(self.heads))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        channel = torch.arange(self.heads) / max(1, self.heads - 1)
        self.w.copy_(-5 + 8 * channel ** (0.7 + 1.3 * self.depth_share))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return initial_max(batch, self.heads, like)

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        raw = context.intermediate("key")
        key = raw.to(state_dtype(raw.dtype))
        log_decay = (-self.w.to(key.dtype).exp()).expand_as(key)
        m, previous_m, new_state = running_max(log_decay, key, state, context)
        return stabilised(inputs, log_decay, key, m, previous_m), new_state, {"previous_max": previous_m}


class WKVBonus(OutputPart):
    """o_t <- o_t + exp(u + k_t - m_(t-1)) [v_t, 1]: the current token's term, with the bonus u.

    Both terms are divided by the larger of their exponentials.

    Initialisation: u cycles through log 0.3, log 0.3 + 1/2 and log 0.3 - 1/2 over the channels.
    Source: RWKV 2305.13048.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.empty(shape.value_heads))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        channels = self.u.shape[0]
        zigzag = (torch.arange(channels) + 1) % 3 - 1
        self.u.copy_(torch.full((channels,), 0.3).log() + 0.5 * zigzag)

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        past = context.intermediate("previous_max")
        current = context.intermediate("key").to(past.dtype) + self.u.to(past.dtype)
        largest = torch.maximum(past, current.detach())
        value = F.pad(arguments.projected.v, (0, 1), value=1.0)
        return o.to(past.dtype) * (past - largest).exp()[..., None] + (current - largest).exp()[..., None] * value, None
