"""TTT-Linear: a linear model that is trained on every mini-batch of tokens, as the state.

B batch, T time, D width, H heads, E head width (K = V)
"""

from typing import ClassVar

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.base import Backend, state_dtype
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.sequences import positions
from deltazoo.mixers.families.fast_weights import LearnedMixer, heads_of
from deltazoo.mixers.families.filter import FilterConfig
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.rotary import angles, apply_rotary
from deltazoo.mixers.parts.token_scan import TokenScan

EPS = 1e-6


class TTTLinear(FilterConfig):
    """W_t = W' - (1 / i + p_i) sum_s eta_s grad |f(k_s; W') - (v_s - k_s)|^2 / 2, o_t = q_t + f(q_t; W_t).

    f(x; W) = ln(W x + b). W' is the state at the start of t's mini-batch, i the place of t in it, from 1, s the tokens
    of it up to t; eta_s = lr sigmoid(w x_s + c) / E; p is learned. q and k are two convolutions of one projection.
    """

    name: ClassVar[str] = "ttt_linear"
    source: ClassVar[str] = "Sun 2024, arXiv 2407.04620"
    heads: int | None = Field(default=None, ge=1, description="None: width // 64, at least 1")
    batch: int = Field(default=16, ge=1, description="tokens of an inner mini-batch, that share a gradient's state")
    rate: float = Field(default=1.0, gt=0, description="inner learning rate, before the gate")
    conv_width: int = Field(default=4, ge=1, description="taps of the short convolutions of q and k")
    rotary_theta: float = Field(default=10000.0, gt=1, description="base of the rotary angles, within a mini-batch")

    def equation(self) -> str:
        return "W_t = W' - (1 / i + p_i) sum_s eta_s grad l(W'; k_s, v_s), o_t = q_t + ln(W_t q_t + b_t)"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "TTTLinearMixer":
        return TTTLinearMixer(self, width, backend)

    def update_flops(self, width: int) -> int:
        return 8 * width * width // heads_of(self.heads, width)


class TTTLinearMixer(LearnedMixer):
    """Initialisation, as published: W N(0, 0.02^2), b = 0, ln 1 and 0, p = 0; w N(0, 0.02^2), c = 0.

    State: W' and the sum of the mini-batch's steps so far, [B, H, E, E], the same of b [B, H, E], and the tokens seen.
    Source: sections 2.1 to 2.5; the residual, the layer norm and the learned rate, section 2.7; p, the shared
    projection, the norm and the gate after it as in the published code.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("b", "gain", "bias")

    def __init__(self, config: TTTLinear, width: int, backend: str | Backend | None) -> None:
        super().__init__(width, heads_of(config.heads, width))
        H, E = self.heads, self.head_width
        self.batch, self.rate, self.theta = config.batch, config.rate, config.rotary_theta
        self.to_qk_v = nn.Linear(width, 2 * width, bias=False)
        self.filters["conv"] = ShortConv(2 * width, config.conv_width, bias=True, backend=backend)
        self.to_rate = nn.Linear(width, H)
        nn.init.normal_(self.to_rate.weight, std=0.02)
        nn.init.zeros_(self.to_rate.bias)
        self.W, self.b = nn.Parameter(0.02 * torch.randn(H, E, E)), nn.Parameter(torch.zeros(H, E))
        self.gain, self.bias = nn.Parameter(torch.ones(H, E)), nn.Parameter(torch.zeros(H, E))
        self.place_rate = nn.Parameter(torch.zeros(config.batch))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.to_gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def first(self) -> list[Tensor]:
        return [self.W, torch.zeros_like(self.W), self.b, torch.zeros_like(self.b)]

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, after: dict[str, Tensor], context: Context) -> Tensor:
        qk, v = self.to_qk_v(x).chunk(2, -1)
        q, k = self.filtered("conv", torch.cat([qk, qk], -1), state, after, context).chunk(2, -1)
        place = positions(x, self.seen(state), context._replace(positions=None)) % self.batch
        q, k, v = (rearrange(y, "b t (h e) -> b t h e", h=self.heads).to(state_dtype(x.dtype)) for y in (q, k, v))
        turn = angles(place, self.head_width // 2, self.theta, q.dtype)
        eta = self.rate / self.head_width * self.to_rate(x).to(q.dtype).sigmoid()
        by_place = 1 / torch.arange(1, self.batch + 1, device=x.device, dtype=q.dtype)
        by_place = (by_place + self.place_rate.to(q.dtype)).clamp(min=0)
        starts = (place == 0).to(q.dtype)
        operands = [starts, eta, by_place[place], apply_rotary(k, turn), v, apply_rotary(q, turn)]
        o = self.looped(LOOP, x, operands, [self.gain, self.bias, by_place[-1]], state, after, context)
        y = self.norm(o.flatten(2).to(self.norm.weight.dtype)).to(x.dtype)
        return self.out(y * nn.functional.gelu(self.to_gate(x), approximate="tanh"))


def step(state: list[Tensor], operands: list[Tensor], parameters: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """One token: W', G [B, H, E, E], b', g [B, H, E]; start, rate [B], eta [B, H], k, v, q [B, H, E].

    Parameters: gain, bias [H, E], last []. G and g sum the steps since the mini-batch's start; last is the rate of a
    whole mini-batch.
    """
    W, G, b, g = state
    start, eta, rate, k, v, q = operands
    gain, bias, last = parameters
    new = start > 0
    W, G = _begun(new[:, None, None, None], W, G, last)
    b, g = _begun(new[:, None, None], b, g, last)
    z = torch.einsum("bhke,bhk->bhe", W, k) + b
    centred = z - z.mean(-1, keepdim=True)
    size = (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    unit = centred / size
    d_unit = (gain * unit + bias - (v - k)) * gain
    d_z = (d_unit - d_unit.mean(-1, keepdim=True) - unit * (d_unit * unit).mean(-1, keepdim=True)) / size
    d_z = eta[..., None] * d_z
    G, g = G + k[..., :, None] * d_z[..., None, :], g + d_z
    read = torch.einsum("bhke,bhk->bhe", W - rate[:, None, None, None] * G, q) + b - rate[:, None, None] * g
    read = nn.functional.layer_norm(read, read.shape[-1:], eps=EPS)
    return [W, G, b, g], q + gain * read + bias


def _begun(new: Tensor, model: Tensor, steps: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Where a mini-batch begins: the model with the steps of the one before, and no steps yet."""
    return torch.where(new, model - last * steps, model), torch.where(new, 0.0, steps)


LOOP = TokenScan("ttt_linear", step)
