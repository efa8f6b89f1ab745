"""Titans' neural memory: a small network trained at test time by gradient descent with momentum and weight decay.

B batch, T time, D width, H heads, E head width, F inner width of the memory
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.ops.short_conv import ConvPart
from deltazoo.backends.update.base import Backend, state_dtype
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.sequences import positions
from deltazoo.mixers.families.fast_weights import FastWeightMixer, resolve_heads
from deltazoo.mixers.families.filter import FilterConfig
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.memory.token_scan import TokenScan
from deltazoo.mixers.parts.norms import RMSNorm

GATE_BIASES = (0.0, -2.0, -4.0)  # eta, theta, alpha; the initial weight decay alpha is small


class Titans(FilterConfig):
    """S_t = eta_t S_(t-1) - theta_t grad |M'(k_t) - v_t|^2, M_t = (1 - alpha_t) M_(t-1) + S_t, o_t = M_t(q_t).

    M is a network of two layers, or a matrix with depth 1. M' is M at the start of the token's chunk. This is the
    paper's neural memory (LMM), without attention.
    """

    name: ClassVar[str] = "titans"
    family: ClassVar[str] = "test-time training"
    purpose: ClassVar[str] = "a network as state, trained with momentum"
    source: ClassVar[str] = "Behrouz 2024, arXiv 2501.00663"
    oracle: ClassVar[str] = "its equation in float64, the inner gradient by autograd"
    heads: int | None = Field(default=None, ge=1, description="number of memories; None: width // 64, at least 1")
    depth: int = Field(default=2, ge=1, le=2, description="layers of the memory; 1: a matrix")
    inner_factor: int = Field(
        default=2, ge=1, description="inner width of a two-layer memory divided by the head width"
    )
    chunk: int = Field(default=16, ge=1, description="tokens whose gradients are taken at the same memory")
    conv_width: int = Field(default=4, ge=1, description="taps of the short convolutions")

    def equation(self) -> str:
        return "S_t = eta_t S_(t-1) - theta_t grad |M'(k_t) - v_t|^2, M_t = (1 - alpha_t) M_(t-1) + S_t, o_t = M_t(q_t)"

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> "TitansMixer":
        return TitansMixer(self, width, backend)

    def recurrence_flops(self, width: int) -> int:
        weights = width * width // resolve_heads(self.heads, width) * (1 if self.depth == 1 else 2 * self.inner_factor)
        return 12 * weights


class TitansMixer(FastWeightMixer):
    """Module of `Titans`.

    Initialisation: layers of the memory N(0, 1 / inputs); biases of the gates 0 for eta, -2 for theta, -4 for alpha.
    State: the layers of M, M' and S; the last inputs of the convolution; the number of tokens so far.
    Source: section 3.1, equations 8 to 15; chunks, section 3.2, equations 16 to 18; surrounding layer, section 4.4.
    """

    def __init__(self, config: Titans, width: int, backend: str | Backend | None) -> None:
        super().__init__(width, resolve_heads(config.heads, width))
        H, E = self.heads, self.head_width
        self.chunk = config.chunk
        inner = E * config.inner_factor
        self.sizes = [(H, E, E)] if config.depth == 1 else [(H, E, inner), (H, inner, E)]
        self.filters["conv"] = ShortConv(3 * width, config.conv_width, False, [ConvPart(3 * width, silu=True)], backend)
        self.memory = InitialMemory(self.sizes)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_gates = nn.Linear(width, 3 * H)
        self.norm = RMSNorm(width)
        self.to_gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for bias, value in zip(self.to_gates.bias.chunk(3), GATE_BIASES, strict=True):
            bias.fill_(value)

    def initial_model(self) -> list[Tensor]:
        memory = self.memory()
        return [*memory, *memory, *(torch.zeros_like(layer) for layer in memory)]

    def model_shapes(self) -> list[tuple[int, ...]]:
        return [*self.sizes] * 3

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        streams = self.apply_filter("conv", self.to_qkv(x), state, new, context)
        q, k, v = rearrange(streams, "b t (n h e) -> n b t h e", n=3, h=self.heads).to(state_dtype(x.dtype))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        place_in_chunk = positions(x, self.token_count(state), context._replace(positions=None)) % self.chunk
        gates = self.to_gates(x).to(q.dtype).sigmoid().chunk(3, -1)
        operands = [(place_in_chunk == 0).to(q.dtype), *gates, k, v, q]
        o = self.scan(SCANS[len(self.sizes)], x, operands, [], state, new, context)
        y = self.norm(o.flatten(2).to(x.dtype))
        return self.out(y * F.silu(self.to_gate(x)))


class InitialMemory(nn.Module):
    """Learned layers [H, inputs, outputs] of the memory before the first token. Args: sizes: those of each layer."""

    def __init__(self, sizes: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        for i, size in enumerate(sizes):
            self.register_parameter(str(i), nn.Parameter(torch.empty(size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.parameters():
            nn.init.normal_(layer, std=layer.shape[1] ** -0.5)

    def forward(self) -> list[Tensor]:
        """Return copies, which stay valid when FSDP2 or an offload hook frees the parameters after the call."""
        return [layer.clone() for layer in self.parameters()]


def step(state: list[Tensor], operands: list[Tensor], parameters: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Process one token.

    state: layers of M, M' and S, [B, H, inputs, outputs]; operands: start of a chunk [B]; eta, theta, alpha [B, H];
    k, v, q [B, H, E].
    """
    depth = len(state) // 3
    M, M_start, S = state[:depth], state[depth : 2 * depth], state[2 * depth :]
    start, eta, theta, alpha, k, v, q = operands
    starts_chunk = (start > 0)[:, None, None, None]
    M_start = [torch.where(starts_chunk, now, old) for now, old in zip(M, M_start, strict=True)]
    eta, theta, alpha = (gate[..., None, None] for gate in (eta, theta, alpha))
    gradients = _gradients(M_start, k, v)
    S = [eta * s - theta * g for s, g in zip(S, gradients, strict=True)]
    M = [(1 - alpha) * m + s for m, s in zip(M, S, strict=True)]
    return [*M, *M_start, *S], _read(M, q)


def _read(M: list[Tensor], q: Tensor) -> Tensor:
    h = torch.einsum("bhkv,bhk->bhv", M[0], q)
    return h if len(M) == 1 else torch.einsum("bhkv,bhk->bhv", M[1], F.silu(h))


def _gradients(M: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    """Gradients of |M(k) - v|^2 with respect to each layer."""
    h = torch.einsum("bhkv,bhk->bhv", M[0], k)
    if len(M) == 1:
        return [k[..., :, None] * (2 * (h - v))[..., None, :]]
    gate = h.sigmoid()
    inner = h * gate
    error = 2 * (torch.einsum("bhkv,bhk->bhv", M[1], inner) - v)
    d_h = torch.einsum("bhkv,bhv->bhk", M[1], error) * gate * (1 + h * (1 - gate))
    return [k[..., :, None] * d_h[..., None, :], inner[..., :, None] * error[..., None, :]]


SCANS = {depth: TokenScan(f"titans_{depth}", step) for depth in (1, 2)}
