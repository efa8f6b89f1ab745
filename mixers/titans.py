"""Titans' neural memory: a small network that learns at test time, with momentum and forgetting.

B batch, T time, D width, H heads, E head width, F inner width of the memory
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.base import Backend, state_dtype
from deltazoo.backends.short_conv import ConvPart
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.sequences import positions
from deltazoo.mixers.families.fast_weights import LearnedMixer, heads_of
from deltazoo.mixers.families.filter import FilterConfig
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.norms import RMSNorm
from deltazoo.mixers.parts.token_scan import TokenScan


class Titans(FilterConfig):
    """S_t = eta_t S_(t-1) - theta_t grad |M'(k_t) - v_t|^2, M_t = (1 - alpha_t) M_(t-1) + S_t, o_t = M_t(q_t).

    M' is the memory at the start of the token's chunk; M a network of two layers, or a matrix with depth 1. The neural
    memory alone (LMM), without attention beside it.
    """

    name: ClassVar[str] = "titans"
    source: ClassVar[str] = "Behrouz 2024, arXiv 2501.00663"
    heads: int | None = Field(default=None, ge=1, description="None: width // 64, at least 1")
    depth: int = Field(default=2, ge=1, le=2, description="layers of the memory; 1: a matrix")
    inner_factor: int = Field(default=2, ge=1, description="inner width of a memory of two layers, in head widths")
    chunk: int = Field(default=16, ge=1, description="tokens whose gradients are taken at the same memory")
    conv_width: int = Field(default=4, ge=1, description="taps of the short convolutions")

    def equation(self) -> str:
        return "S_t = eta_t S_(t-1) - theta_t grad |M'(k_t) - v_t|^2, M_t = (1 - alpha_t) M_(t-1) + S_t, o_t = M_t(q_t)"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "TitansMixer":
        return TitansMixer(self, width, backend)

    def update_flops(self, width: int) -> int:
        weights = width * width // heads_of(self.heads, width) * (1 if self.depth == 1 else 2 * self.inner_factor)
        return 12 * weights


class TitansMixer(LearnedMixer):
    """Initialisation: the memory's layers N(0, 1 / inputs); the gates' biases so that alpha is small at first.

    State: the layers of M, of M' and of S, and the tokens seen.
    Source: section 3.1, equations 8 to 15; chunks, section 3.2, equations 16 to 18; the layer around, section 4.4.
    """

    def __init__(self, config: Titans, width: int, backend: str | Backend | None) -> None:
        super().__init__(width, heads_of(config.heads, width))
        H, E = self.heads, self.head_width
        self.chunk = config.chunk
        inner = E * config.inner_factor
        sizes = [(E, E)] if config.depth == 1 else [(E, inner), (inner, E)]
        self.memory = nn.ParameterList(nn.Parameter(torch.randn(H, *size) * size[0] ** -0.5) for size in sizes)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.filters["conv"] = ShortConv(3 * width, config.conv_width, False, [ConvPart(3 * width, silu=True)], backend)
        self.to_gates = nn.Linear(width, 3 * H)
        with torch.no_grad():
            self.to_gates.bias.copy_(torch.tensor([0.0, -2.0, -4.0]).repeat_interleave(H))  # eta, theta, alpha
        self.norm = RMSNorm(width)
        self.to_gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def first(self) -> list[Tensor]:
        memory = list(self.memory)
        return [*memory, *memory, *(torch.zeros_like(layer) for layer in memory)]

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, after: dict[str, Tensor], context: Context) -> Tensor:
        streams = self.filtered("conv", self.to_qkv(x), state, after, context)
        q, k, v = rearrange(streams, "b t (n h e) -> n b t h e", n=3, h=self.heads).to(state_dtype(x.dtype))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        place = positions(x, self.seen(state), context._replace(positions=None)) % self.chunk
        gates = self.to_gates(x).to(q.dtype).sigmoid().chunk(3, -1)
        operands = [(place == 0).to(q.dtype), *gates, k, v, q]
        o = self.looped(LOOPS[len(self.memory)], x, operands, [], state, after, context)
        y = self.norm(o.flatten(2).to(x.dtype))
        return self.out(y * F.silu(self.to_gate(x)))


def step(state: list[Tensor], operands: list[Tensor], parameters: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """One token: layers of M, M', S [B, H, in, out]; start [B], eta, theta, alpha [B, H], k, v, q [B, H, E]."""
    depth = len(state) // 3
    M, M_start, S = state[:depth], state[depth : 2 * depth], state[2 * depth :]
    start, eta, theta, alpha, k, v, q = operands
    new = (start > 0)[:, None, None, None]
    M_start = [torch.where(new, now, before) for now, before in zip(M, M_start, strict=True)]
    eta, theta, alpha = (gate[..., None, None] for gate in (eta, theta, alpha))
    gradients = _gradients(M_start, k, v)
    S = [eta * s - theta * g for s, g in zip(S, gradients, strict=True)]
    M = [(1 - alpha) * m + s for m, s in zip(M, S, strict=True)]
    return [*M, *M_start, *S], _read(M, q)


def _read(M: list[Tensor], q: Tensor) -> Tensor:
    h = torch.einsum("bhkv,bhk->bhv", M[0], q)
    return h if len(M) == 1 else torch.einsum("bhkv,bhk->bhv", M[1], F.silu(h))


def _gradients(M: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    """Of |M(k) - v|^2 in every layer."""
    h = torch.einsum("bhkv,bhk->bhv", M[0], k)
    if len(M) == 1:
        return [k[..., :, None] * (2 * (h - v))[..., None, :]]
    gate = h.sigmoid()
    inner = h * gate
    error = 2 * (torch.einsum("bhkv,bhk->bhv", M[1], inner) - v)
    d_h = torch.einsum("bhkv,bhv->bhk", M[1], error) * gate * (1 + h * (1 - gate))
    return [k[..., :, None] * d_h[..., None, :], inner[..., :, None] * error[..., None, :]]


LOOPS = {depth: TokenScan(f"titans_{depth}", step) for depth in (1, 2)}
