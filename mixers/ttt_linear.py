"""TTT-Linear: a linear model that is trained on every mini-batch of tokens, as the state.

B batch, T time, D width, H heads, E head width (K = V)
"""

from typing import ClassVar

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.base import Backend, state_dtype
from deltazoo.mixers.base import FIRST, Context, Place
from deltazoo.mixers.conv import ShortConv
from deltazoo.mixers.filters import FilterConfig
from deltazoo.mixers.learned import LearnedMixer, heads_of
from deltazoo.mixers.loop import Loop
from deltazoo.mixers.norms import RMSNorm
from deltazoo.mixers.rotary import angles, rotate
from deltazoo.mixers.sequence import positions

EPS = 1e-6


class TTTLinear(FilterConfig):
    """W_t = W_(t-1) - eta_t grad |f(k_t; W') - (v_t - k_t)|^2 / 2, o_t = q_t + f(q_t; W_t); f(x; W) = ln(W x + b).

    W' is the state at the start of the token's mini-batch; eta_t = lr sigmoid(w x_t) (1 / i + learned), i the place.
    """

    name: ClassVar[str] = "ttt_linear"
    source: ClassVar[str] = "Sun 2024, arXiv 2407.04620"
    heads: int | None = Field(default=None, ge=1, description="None: width // 64, at least 1")
    batch: int = Field(default=16, ge=1, description="tokens of an inner mini-batch, that share a gradient's state")
    rate: float = Field(default=1.0, gt=0, description="inner learning rate, before the gate")
    conv_width: int = Field(default=4, ge=1, description="taps of the short convolutions of q and k")
    rotary_theta: float = Field(default=10000.0, gt=1, description="base of the rotary angles, within a mini-batch")

    def equation(self) -> str:
        return "W_t = W_(t-1) - eta_t grad l(W'; k_t, v_t), o_t = q_t + ln(W_t q_t + b_t)"

    def build(self, width: int, place: Place = FIRST, backend: str | Backend | None = None) -> "TTTLinearMixer":
        return TTTLinearMixer(self, width)

    def update_flops(self, width: int) -> int:
        return 8 * width * width // heads_of(self.heads, width)


class TTTLinearMixer(LearnedMixer):
    """Initialisation: W from N(0, 0.02^2), b = 0, ln 1 and 0, as published; the map of eta N(0, 0.02^2).

    State: W, W' [B, H, E, E], b, b' [B, H, E] and the tokens seen.
    Source: sections 2.1 to 2.5; the residual, the layer norm and the learned rate, section 2.7.
    """

    def __init__(self, config: TTTLinear, width: int) -> None:
        super().__init__(width, heads_of(config.heads, width))
        H, E = self.heads, self.head_width
        self.batch, self.rate, self.theta = config.batch, config.rate, config.rotary_theta
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.filters["conv"] = ShortConv(2 * width, config.conv_width)
        self.to_rate = nn.Linear(width, H)
        self.W, self.b = nn.Parameter(0.02 * torch.randn(H, E, E)), nn.Parameter(torch.zeros(H, E))
        self.gain, self.bias = nn.Parameter(torch.ones(H, E)), nn.Parameter(torch.zeros(H, E))
        self.place_rate = nn.Parameter(torch.zeros(config.batch))
        self.norm = RMSNorm(width)
        self.to_gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def first(self) -> list[Tensor]:
        return [self.W, self.W, self.b, self.b]

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, after: dict[str, Tensor], context: Context) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        q, k = self.filtered("conv", torch.cat([q, k], -1), state, after, context).chunk(2, -1)
        place = positions(x, self.seen(state), context._replace(positions=None)) % self.batch
        q, k, v = (rearrange(y, "b t (h e) -> b t h e", h=self.heads).to(state_dtype(x.dtype)) for y in (q, k, v))
        turn = angles(place, self.head_width // 2, self.theta, q.dtype)
        raw = self.to_rate(x)
        by_place = (1 / (place.to(q.dtype) + 1) + self.place_rate.to(q.dtype)[place]).clamp(min=0)
        eta = self.rate / self.head_width * raw.to(q.dtype).sigmoid() * by_place[..., None]
        starts = (place == 0).to(q.dtype)
        operands = [starts, eta, rotate(k, turn), v, rotate(q, turn)]
        o = self.looped(LOOP, x, operands, [self.gain, self.bias], state, after, context)
        y = self.norm(o.flatten(2).to(x.dtype))
        return self.out(y * nn.functional.gelu(self.to_gate(x), approximate="tanh"))


def step(state: list[Tensor], operands: list[Tensor], parameters: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """One token: W, W' [B, H, E, E], b, b' [B, H, E]; start [B], eta [B, H], k, v, q [B, H, E]; gain, bias [H, E]."""
    W, W_start, b, b_start = state
    start, eta, k, v, q = operands
    gain, bias = parameters
    new = start > 0
    W_start = torch.where(new[:, None, None, None], W, W_start)
    b_start = torch.where(new[:, None, None], b, b_start)
    z = torch.einsum("bhke,bhk->bhe", W_start, k) + b_start
    centred = z - z.mean(-1, keepdim=True)
    size = (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    unit = centred / size
    d_unit = (gain * unit + bias - (v - k)) * gain
    d_z = (d_unit - d_unit.mean(-1, keepdim=True) - unit * (d_unit * unit).mean(-1, keepdim=True)) / size
    d_z = eta[..., None] * d_z
    W, b = W - k[..., :, None] * d_z[..., None, :], b - d_z
    read = torch.einsum("bhke,bhk->bhe", W, q) + b
    read = nn.functional.layer_norm(read, read.shape[-1:], eps=EPS)
    return [W, W_start, b, b_start], q + gain * read + bias


LOOP = Loop("ttt_linear", step)
