"""TTT-Linear: the state is a linear model, trained by one gradient step per mini-batch of tokens.

B batch, T time, D width, H heads, E head width (K = V)
"""

from typing import ClassVar

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.ops.fast_weights.ttt_linear import ttt_linear
from deltazoo.backends.ops.fast_weights.ttt_linear_chunks import TTTOperands
from deltazoo.backends.torch_ext.plain_module import holds_plain_weights, is_plain
from deltazoo.backends.triton.conv.op import too_many_taps
from deltazoo.backends.triton.fast_weights.token_op import MAX_BATCH, MAX_WIDTH, TTTTokenCall, ttt_token_
from deltazoo.backends.triton.limits import kernel_refusals
from deltazoo.backends.update.base import Backend, state_dtype
from deltazoo.mixers.core.decode_maps import apply_maps, apply_output, apply_to_input, is_step
from deltazoo.mixers.core.initialization import fill_normal
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.sequences import positions
from deltazoo.mixers.families.fast_weights import FastWeightMixer, resolve_heads
from deltazoo.mixers.families.filter import FilterConfig
from deltazoo.mixers.parts.convolution import ShortConv, is_plain_step
from deltazoo.mixers.parts.rotary import apply_rotary, rotation_at

EPS = 1e-6


class TTTLinear(FilterConfig):
    """W_t = W' - (1 / i + p_i) sum_s eta_s grad |f(k_s; W') - (v_s - k_s)|^2 / 2, o_t = q_t + f(q_t; W_t).

    f(x; W) = ln(W x + b). W' is the state at the start of t's mini-batch, s runs over its tokens up to t, and t is its
    i-th token, from 1. eta_s = rate sigmoid(w x_s + c) / E, and p is learned. q and k are two convolutions of one
    projection.
    """

    name: ClassVar[str] = "ttt_linear"
    family: ClassVar[str] = "test-time training"
    purpose: ClassVar[str] = "a linear model as state, trained as it reads"
    source: ClassVar[str] = "Sun 2024, arXiv 2407.04620"
    oracle: ClassVar[str] = "its equation in float64, the inner gradient by autograd"
    heads: int | None = Field(default=None, ge=1, description="number of models; None: width // 64, at least 1")
    batch: int = Field(
        default=16, ge=1, description="tokens per mini-batch; their gradients are taken at the same state"
    )
    rate: float = Field(default=1.0, gt=0, description="learning rate of the inner model, before the gate")
    conv_width: int = Field(default=4, ge=1, description="taps of the short convolutions of q and k")
    rotary_theta: float = Field(default=10000.0, gt=1, description="base of the rotary angles, within a mini-batch")

    def equation(self) -> str:
        return "W_t = W' - (1 / i + p_i) sum_s eta_s grad l(W'; k_s, v_s), o_t = q_t + ln(W_t q_t + b_t)"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "TTTLinearMixer":
        return TTTLinearMixer(self, width, backend)

    def recurrence_flops(self, width: int) -> int:
        return 8 * width * width // resolve_heads(self.heads, width)


class TTTLinearMixer(FastWeightMixer):
    """Module of `TTTLinear`.

    Initialisation, as published: W and w N(0, 0.02^2); b, c and p 0; gain of ln 1, its bias 0.
    State: W' and the sum of the mini-batch's steps so far, both [B, H, E, E]; the same for b, [B, H, E]; the last
    inputs of the convolution; the number of tokens so far.
    Source: sections 2.1 to 2.5; residual, layer norm and learned rate, section 2.7; p, the shared projection, the final
    norm and the gate as in the published code.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("b", "gain", "bias")

    def __init__(self, config: TTTLinear, width: int, backend: str | Backend | None) -> None:
        super().__init__(width, resolve_heads(config.heads, width))
        H, E = self.heads, self.head_width
        self.batch, self.rate, self.theta = config.batch, config.rate, config.rotary_theta
        self.filters["conv"] = ShortConv(2 * width, config.conv_width, bias=True, backend=backend)
        self.to_qk_v = nn.Linear(width, 2 * width, bias=False)
        self.to_rate = nn.Linear(width, H)
        self.W, self.b = nn.Parameter(torch.empty(H, E, E)), nn.Parameter(torch.empty(H, E))
        self.gain, self.bias = nn.Parameter(torch.empty(H, E)), nn.Parameter(torch.empty(H, E))
        self.place_rate = nn.Parameter(torch.empty(config.batch))
        self.norm = OutputNorm(width, eps=EPS)
        self.to_gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.to_rate.weight, self.W):
            fill_normal(weight, std=0.02)
        for zero in (self.to_rate.bias, self.b, self.bias, self.place_rate):
            nn.init.zeros_(zero)
        nn.init.ones_(self.gain)

    def model_shapes(self) -> list[tuple[int, ...]]:
        H, E = self.heads, self.head_width
        return [(H, E, E)] * 2 + [(H, E)] * 2

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        decoded = self.decode_token_(x, state, new, context)
        if decoded is not None:
            return apply_output(decoded, self.out)
        mapped = apply_to_input(x, self.input_maps(), state)
        qk, v = mapped["qk_v"].chunk(2, -1)
        q, k = self.apply_filter("conv", torch.cat([qk, qk], -1), state, new, context).chunk(2, -1)
        place = positions(x, self.token_count(state), context._replace(positions=None)) % self.batch
        q, k, v = (rearrange(y, "b t (h e) -> b t h e", h=self.heads) for y in (q, k, v))
        dtype = state_dtype(x.dtype)
        rotation = rotation_at(place, self.head_width // 2, self.theta, dtype)
        q, k = (apply_rotary(y.to(dtype), rotation).to(v.dtype) for y in (q, k))
        eta = self.rate / self.head_width * mapped["rate"].to(dtype).sigmoid()
        place_rate = 1 / torch.arange(1, self.batch + 1, device=x.device, dtype=dtype)
        place_rate = (place_rate + self.place_rate.to(dtype)).clamp(min=0)
        wide = dtype if state is None or torch.is_grad_enabled() else None  # the update in place takes any dtype
        share, learned = self.share(context), (self.gain, self.bias, self.W, self.b)
        q, k, v, eta = share.scatter([q, k, v, eta])
        gain, bias, first_W, first_b = (share.own(y, 0).to(wide or y.dtype) for y in learned)
        stored: list[Tensor | None] = [*self.stored_model(state, context, dtype)]
        W, G, b, g = stored or [None] * 4
        spans = self.spans(x, state, context, self.batch)
        o, model = ttt_linear(TTTOperands(q, k, v, eta, place_rate, gain, bias, first_W, first_b, W, G, b, g, spans))
        self.store_model(model, x, state, new, context)
        y = self.norm(share.gather(o).flatten(2).to(dtype)).to(x.dtype)
        return apply_output(y * nn.functional.gelu(mapped["gate"], approximate="tanh"), self.out)

    def input_maps(self) -> dict[str, nn.Module]:
        return {"qk_v": self.to_qk_v, "rate": self.to_rate, "gate": self.to_gate}

    def decode_token_(
        self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context
    ) -> Tensor | None:
        """Decode a token per row up to the output map. Return None, with the state as it was, if the kernels cannot."""
        conv, norm = self.filters["conv"], self.norm
        if not is_step(x, state) or kernel_refusals(x) or not is_plain_step(context):
            return None
        if self.head_width > MAX_WIDTH or self.batch > MAX_BATCH:
            return None
        if type(conv) is not ShortConv or type(norm) is not OutputNorm or not is_plain(conv) or not is_plain(norm):
            return None
        assert state is not None and conv.bias is not None
        history = state["conv."]
        if not holds_plain_weights(self) or history.dtype != x.dtype or too_many_taps(conv.weight.shape[1]):
            return None
        mapped = {name: y[:, 0] for name, y in apply_maps(x, self.input_maps()).items()}
        new.update(state)
        qk, v = mapped["qk_v"].chunk(2, 1)
        W, G, b, g = self.stored_model(state, context, torch.float32)
        y = ttt_token_(
            TTTTokenCall(
                qk, v, mapped["rate"], mapped["gate"], conv.weight, conv.bias, history, state["seen"], self.place_rate,
                self.gain, self.bias, self.W, self.b, W, G, b, g, norm.weight, norm.bias, self.rate / self.head_width,
                self.theta, norm.eps,
            )
        )  # fmt: skip
        return y[:, None]


class OutputNorm(nn.LayerNorm):
    """Layer norm in the dtype of its input, for weights of any dtype."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
