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

from deltazoo.backends.ops.fast_weights.neural_memory import neural_memory
from deltazoo.backends.ops.fast_weights.neural_memory_chunks import MemoryOperands
from deltazoo.backends.ops.short_conv import ConvPart
from deltazoo.backends.update.base import Backend, state_dtype
from deltazoo.mixers.core.decode_maps import apply_output, apply_to_input
from deltazoo.mixers.core.initialization import fill_normal
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.families.fast_weights import FastWeightMixer, resolve_heads
from deltazoo.mixers.families.filter import FilterConfig
from deltazoo.mixers.parts.convolution import ShortConv
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

    def model_shapes(self) -> list[tuple[int, ...]]:
        return [*self.sizes] * 3

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        mapped = apply_to_input(x, {"qkv": self.to_qkv, "gates": self.to_gates, "gate": self.to_gate}, state)
        streams = self.apply_filter("conv", mapped["qkv"], state, new, context)
        q, k, v = rearrange(streams, "b t (n h e) -> n b t h e", n=3, h=self.heads)
        dtype = state_dtype(x.dtype)
        q, k = (_unit(y.to(dtype)).to(v.dtype) for y in (q, k))
        eta, theta, alpha = mapped["gates"].to(dtype).sigmoid().chunk(3, -1)
        share = self.share(context)
        q, k, v, eta, theta, alpha = share.scatter([q, k, v, eta, theta, alpha])
        first = [share.own(layer, 0).to(dtype) for layer in self.memory()]
        stored, spans = self.stored_model(state, context, dtype), self.spans(x, state, context, self.chunk)
        o, model = neural_memory(MemoryOperands(q, k, v, eta, theta, alpha, first, stored, spans), self.chunk)
        self.store_model(model, x, state, new, context)
        y = self.norm(share.gather(o).flatten(2).to(x.dtype))
        return apply_output(y * F.silu(mapped["gate"]), self.out)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class InitialMemory(nn.Module):
    """Learned layers [H, inputs, outputs] of the memory before the first token. Args: sizes: those of each layer."""

    def __init__(self, sizes: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        for i, size in enumerate(sizes):
            self.register_parameter(str(i), nn.Parameter(torch.empty(size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.parameters():
            fill_normal(layer, std=layer.shape[1] ** -0.5)

    def forward(self) -> list[Tensor]:
        """Return copies, which stay valid when FSDP2 or an offload hook frees the parameters after the call."""
        return [layer.clone() for layer in self.parameters()]
