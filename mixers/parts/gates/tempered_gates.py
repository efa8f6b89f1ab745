"""The projection of Rodimus: one head whose decay and write strength share a gate with a learned exponent.

B batch, T time, D width, K key width, C channels of the value
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.ops.gemv import Convolution, products_of_some
from deltazoo.backends.ops.short_conv import ConvPart
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.triton.conv.op import too_many_taps
from deltazoo.backends.triton.decode.tempered_op import MAX_KEYS, MAX_RANK, TemperedCall, tempered_step_
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.decode_maps import adds_to_product, apply_maps, convolves, is_step
from deltazoo.mixers.core.initialization import fills_values
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import GateLinear, HeadShape, MapsInput, OutputArguments, OutputPart, Stateful
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm

DECAY_RANGE = (1e-3, 0.1)  # of the initial g
EXPONENT_RANGE = (1 / 16, 0.9)  # of the initial tau
GAIN = 2**-2.5  # of the initial weights of the gates


class TemperedProjection(nn.Module, Stateful, MapsInput, TokenStep):
    """u = W x, c = silu(conv(u)), q = W c, k = g^tau W c / |W c|, v = sigmoid(W_2 W_1 u + b) * u, log a = -g tau.

    g = softplus(W c + b) and tau = sigmoid(W c + b), [B, T, K], in float32. Returns the intermediate "convolved": c.

    Args: rank: of the value's gate.
    Initialisation: weights of the gates Xavier uniform with gain 2^-2.5; softplus(b) of g log-uniform in 0.001 to 0.1,
    sigmoid(b) of tau uniform in 1/16 to 0.9; the bias of the value's gate 0.
    State: the convolution's, [B, conv_width - 1, C].
    Source: Rodimus, He 2025, 2410.06577; initial values, fla's `modeling_rodimus.py`.
    """

    splits: ClassVar[bool] = True
    keeps_inputs: ClassVar[bool] = True

    def __init__(self, shape: HeadShape, rank: int, conv_width: int) -> None:
        super().__init__()
        K, C = shape.key_width, shape.value_width
        self.to_u = nn.Linear(shape.width, C, bias=False)
        self.conv = ShortConv(C, conv_width, True, [ConvPart(C, silu=True)])
        self.to_q, self.to_k = nn.Linear(C, K, bias=False), nn.Linear(C, K, bias=False)
        self.to_g, self.to_tau = GateLinear(C, K), GateLinear(C, K)
        self.value_gate = nn.Sequential(nn.Linear(C, rank, bias=False), nn.Linear(rank, C))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        for layer in (self.to_g, self.to_tau, *self.value_gate):
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight, gain=GAIN)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        low, high = map(math.log, DECAY_RANGE)
        g = torch.empty_like(self.to_g.bias, dtype=torch.float32).uniform_(low, high).exp()
        self.to_g.bias.copy_(g + torch.log(-torch.expm1(-g)))
        tau = torch.empty_like(self.to_tau.bias, dtype=torch.float32).uniform_(*EXPONENT_RANGE)
        self.to_tau.bias.copy_(tau.logit())

    def input_map(self) -> nn.Module:
        return self.to_u

    def init_state(self, batch: int, like: Tensor) -> Tensor | None:
        return self.conv.init_state(batch, like)

    def forward(
        self, x: Tensor, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None, dict[str, Tensor]]:
        u, is_decoding = context.apply(self.to_u, x), is_step(x, state)
        (c,), state = self.conv(u, state, context)
        maps = {"q": self.to_q, "k": self.to_k, "g": self.to_g, "tau": self.to_tau}
        mapped = apply_maps(c, maps) if is_decoding else {name: module(c) for name, module in maps.items()}
        k, log_decay = _strengths(mapped["k"], mapped["g"], mapped["tau"])
        gate = apply_maps(u, {"gate": self.value_gate})["gate"] if is_decoding else self.value_gate(u)
        v = gate.sigmoid() * u
        q, k, v = (y.unsqueeze(2) for y in (mapped["q"], k.to(v.dtype), v))
        return UpdateInputs(q, k, v, log_decay=log_decay.unsqueeze(2)), state, {"convolved": c}

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        if not call.has_parts(TemperedProjection, Update, ConvolvedSkip, OutputGate, HeadNorm):
            return None
        _, update, skip, gate, norm = call.parts.values()
        assert isinstance(update, Update) and isinstance(skip, ConvolvedSkip) and isinstance(gate, OutputGate)
        assert isinstance(norm, HeadNorm)
        conv, history, x = self.conv, call.state_of(self), call.x
        maps = [self.to_q, self.to_k, self.to_g, self.to_tau, self.value_gate[0]]
        linears = [linear for linear in maps if adds_to_product(linear, x)]
        up, K = self.value_gate[1], update.shape.key_width
        if len(linears) < len(maps) or not adds_to_product(up, x) or up.bias is None or not is_plain(self.value_gate):
            return None
        if K > MAX_KEYS or up.weight.shape[1] > MAX_RANK or not update.is_decayed_sum("channel"):
            return None
        convolution = Convolution(history, conv.weight, conv.bias, True)
        if type(conv) is not ShortConv or not is_plain(conv) or too_many_taps(conv.weight.shape[1]):
            return None
        if norm.norm_of_all() is None or not convolves(x, self.to_u, convolution):
            return None
        products = apply_maps(x, {"c": self.to_u, "gate": gate.proj}, call.norm, convolution)
        streams = torch.stack([products["c"][:, 0], history[:, -1]], 1)  # the token's u is the last input
        q, k, g, tau, low = products_of_some(streams, [linear.weight for linear in linears], (0, 0, 0, 0, 1))
        o = tempered_step_(
            TemperedCall(
                q, k, g, tau, low, products["gate"][:, 0], self.to_g.bias, self.to_tau.bias, streams, up.weight,
                up.bias, skip.D, call.states["update"], gate.activation, update.spec.scale_of(K),
            )
        )  # fmt: skip
        return TokenOutput(o[:, None], norm=norm.norm_of_all())


def _strengths(k: Tensor, raw_g: Tensor, raw_tau: Tensor) -> tuple[Tensor, Tensor]:
    """Return g^tau k / |k| and -g tau with g = softplus(raw_g) and tau = sigmoid(raw_tau)."""
    k, raw_g, raw_tau = (y.to(state_dtype(k.dtype)) for y in (k, raw_g, raw_tau))
    g, tau = F.softplus(raw_g), raw_tau.sigmoid()
    # below -40 log g = raw_g in float64; softplus(raw_g) may be 0 there, whose power has no finite gradient
    log_g = torch.where(raw_g < -40, raw_g, F.softplus(raw_g.clamp(min=-40)).log())
    return F.normalize(k, dim=-1) * (tau * log_g).exp(), -g * tau


class ConvolvedSkip(OutputPart):
    """o <- o + D * c with a weight D per channel and the projection's convolved channels c. Initialisation: D = 1."""

    no_weight_decay: ClassVar[tuple[str, ...]] = ("D",)

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.empty(shape.value_heads * shape.value_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.D)

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        c = context.intermediate("convolved").view(o.shape)
        dtype = state_dtype(o.dtype)
        return (o.to(dtype) + self.D.to(dtype).view(o.shape[2:]) * c.to(dtype)).to(o.dtype), None
