"""RWKV's projections: of tokens mixed with the token before.

B batch, T time, D width, H heads, K key width, V value width
"""

import math
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.errors import ConfigError
from deltazoo.mixers.core.mixer import Context, Place
from deltazoo.mixers.core.part import HasFlops, HeadShape, Stateful
from deltazoo.mixers.parts.convolution import TokenShift

FIRST_LAYER, FIRST_VALUE = "rwkv7 first layer", "rwkv7 first value"


class Ranks(NamedTuple):
    """The widths that low-rank maps go through."""

    decay: int
    mix: int = 0
    rate: int = 0
    value: int = 0
    gate: int = 0

    @staticmethod
    def of(width: int) -> "Ranks":
        """RWKV-7's, by the width: 2.5, 1.7 and 5 times its root, in steps of 32."""

        def rank(factor: float) -> int:
            return max(32, round(factor * width**0.5 / 32) * 32)

        return Ranks(rank(2.5), 0, rank(2.5), rank(1.7), rank(5))


class LowRank(nn.Module):
    """x -> activation(x A) B + bias. Initialisation: A = 0; B uniform in +-spread, None: orthogonal with gain 0.1."""

    def __init__(
        self,
        width: int,
        rank: int,
        out: int,
        activation: str = "none",
        bias: Tensor | None = None,
        spread: float | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.down.weight)
        if spread is None:
            nn.init.orthogonal_(self.up.weight, gain=0.1)
        else:
            nn.init.uniform_(self.up.weight, -spread, spread)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(x)
        if self.activation == "tanh":
            inner = inner.tanh()
        elif self.activation == "sigmoid":
            inner = inner.sigmoid()
        y = self.up(inner)
        y = y.to(state_dtype(y.dtype))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RWKV4Projection(nn.Module, Stateful):
    """RWKV-4: k, v, r = W (mu x_t + (1 - mu) x_(t-1)); q = 1. Leaves the notes "key" and "gate" (r).

    Initialisation: mu as (i / D)^(1 - l / L), moved by 0.3 l / (L - 1) for v and halved in the exponent for r.
    Source: RWKV 2305.13048.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("mix",)

    def __init__(self, shape: HeadShape, place: Place) -> None:
        super().__init__()
        self.shift = TokenShift()
        self.width, self.shape = shape.width, shape
        ratio = 1 - place.layer / place.depth
        at = torch.arange(shape.width) / shape.width
        later = 0.3 * place.layer / max(1, place.depth - 1)
        self.mix = nn.Parameter(torch.stack([at**ratio, at**ratio + later, at ** (ratio / 2)]))
        self.to_k, self.to_v, self.to_r = (nn.Linear(shape.width, shape.value_heads, bias=False) for _ in range(3))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.shift.init_state(batch, self.width, like)

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> tuple[UpdateInputs, Tensor | None]:
        last, after = self.shift(x, state, context)
        x_k, x_v, x_r = (last + (x - last) * mix.to(x.dtype) for mix in self.mix)
        context.store(key=self.to_k(x_k), gate=self.to_r(x_r))
        v = self.to_v(x_v)[..., None]
        one = torch.ones_like(v)
        return UpdateInputs(one, one, v), after


class RWKV6Projection(nn.Module, Stateful, HasFlops):
    """RWKV-6: r, k, v, g, w of tokens mixed by data: x_i = x_t + (x_(t-1) - x_t) (mu_i + lowrank_i(x_t + (..) mu_x)).

    log_decay = -exp(w_0 + tanh(x_w A) B). Leaves the note "gate".
    Initialisation, as in the published code: mu_i and w_0 by channel and layer; the first maps of the low-rank ones 0,
    the second uniform in +-0.01.
    Source: RWKV-5/6 2404.05892, section 4.2 (data-dependent token shift, decay).
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("mix",)

    def __init__(self, shape: HeadShape, place: Place, ranks: Ranks) -> None:
        super().__init__()
        D, self.shape = shape.width, shape
        keys, values = shape.heads * shape.key_width, shape.value_heads * shape.value_width
        self.shift = TokenShift()
        share, ratio = place.layer / max(1, place.depth - 1), 1 - place.layer / place.depth
        at = torch.arange(D) / D
        self.mix_x = nn.Parameter(1 - at**ratio)
        mix = [1 - at**ratio] * 2 + [1 - (at**ratio + 0.3 * share)] + [1 - at ** (ratio / 2)] * 2  # w, k, v, r, g
        self.mix = nn.Parameter(torch.stack(mix))
        self.mix_down = nn.Linear(D, 5 * ranks.mix, bias=False)
        self.mix_up = nn.Parameter(torch.empty(5, ranks.mix, D).uniform_(-1e-2, 1e-2))
        nn.init.zeros_(self.mix_down.weight)
        place_K = torch.arange(keys) / max(1, keys - 1)
        self.decay = LowRank(D, ranks.decay, keys, "tanh", -6 + 5 * place_K ** (0.7 + 1.3 * share), 1e-2)
        self.to_r, self.to_k = (nn.Linear(D, keys, bias=False) for _ in range(2))
        self.to_v, self.to_g = (nn.Linear(D, values, bias=False) for _ in range(2))

    def flops(self) -> int:
        return 2 * self.mix_up.numel()

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.shift.init_state(batch, self.shape.width, like)

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> tuple[UpdateInputs, Tensor | None]:
        last, after = self.shift(x, state, context)
        delta = last - x
        inner = self.mix_down(x + delta * self.mix_x.to(x.dtype)).tanh().unflatten(-1, (5, -1))
        by_data = torch.einsum("btir,ird->ibtd", inner, self.mix_up.to(inner.dtype))
        x_w, x_k, x_v, x_r, x_g = (x + delta * (m.to(x.dtype) + d) for m, d in zip(self.mix, by_data, strict=True))
        context.store(gate=self.to_g(x_g))
        log_decay = rearrange(-self.decay(x_w).exp(), "b t (h k) -> b t h k", h=self.shape.heads)
        q, k = (rearrange(y, "b t (h k) -> b t h k", h=self.shape.heads) for y in (self.to_r(x_r), self.to_k(x_k)))
        v = rearrange(self.to_v(x_v), "b t (h v) -> b t h v", h=self.shape.value_heads)
        return UpdateInputs(q, k, v, log_decay=log_decay), after


class RWKV7Projection(nn.Module, Stateful):
    """RWKV-7: r, w, k, v, eta, g of x_i = x_t + (x_(t-1) - x_t) mu_i, and from them the operands of dplr.

    log_decay = -exp(-1/2) sigmoid(w), eta = sigmoid(..), kappa = unit(k * xi), k <- k (1 + (eta - 1) alpha),
    a = -kappa, b = kappa * eta; v is mixed with the values of the first layer by sigmoid(..). Leaves the note "gate",
    and in `context.values` the first values. The first RWKV-7 layer of a stack should be the stack's first.

    Initialisation: as in the published code, by channel and layer; the maps to r and v uniform in +-0.5 / sqrt(D), that
    to k in +-0.05 / sqrt(D).
    Source: RWKV-7 2503.14456, section 4.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("mix",)

    def __init__(self, shape: HeadShape, place: Place, ranks: Ranks) -> None:
        super().__init__()
        D, self.shape, self.layer = shape.width, shape, place.layer
        keys, values = shape.heads * shape.key_width, shape.value_heads * shape.value_width
        share, ratio = place.layer / max(1, place.depth - 1), 1 - place.layer / place.depth
        at = torch.arange(D) / D
        powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])[:, None]  # r, w, k, v, a, g
        self.mix = nn.Parameter(1 - at ** (powers * ratio))
        self.shift = TokenShift()
        line = torch.arange(keys) / max(1, keys - 1)
        centred = (torch.arange(keys) % shape.key_width) * 2 / max(1, shape.key_width - 1) - 1
        zigzag = centred * centred.abs()
        decay = -6 + 6 * line ** (1 + share**0.3) + 0.5 + 2.5 * zigzag
        self.decay = LowRank(D, ranks.decay, keys, "tanh", decay)
        self.rate = LowRank(D, ranks.rate, keys, bias=-0.19 + 0.3 * zigzag + 0.4 * (line - 0.5))
        self.gate = LowRank(D, ranks.gate, values, "sigmoid")
        line_V = torch.arange(values) / max(1, values - 1) - 0.5
        self.value = LowRank(D, ranks.value, values, bias=0.73 - 0.4 * line_V) if place.layer else None
        self.xi = nn.Parameter(0.71 - 0.1 * (line - 0.5))
        self.alpha = nn.Parameter(torch.full((keys,), 1.02))
        self.to_r, self.to_k = (nn.Linear(D, keys, bias=False) for _ in range(2))
        self.to_v = nn.Linear(D, values, bias=False)
        for projection, spread in ((self.to_r, 0.5), (self.to_k, 0.05), (self.to_v, 0.5)):
            nn.init.uniform_(projection.weight, -spread * D**-0.5, spread * D**-0.5)

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.shift.init_state(batch, self.shape.width, like)

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> tuple[UpdateInputs, Tensor | None]:
        last, after = self.shift(x, state, context)
        x_r, x_w, x_k, x_v, x_a, x_g = (x + (last - x) * mix.to(x.dtype) for mix in self.mix)
        r, k, v = self.to_r(x_r), self.to_k(x_k), self.to_v(x_v)
        context.store(gate=self.gate(x_g))
        log_decay = -math.exp(-0.5) * self.decay(x_w).sigmoid()
        eta = self.rate(x_a).sigmoid()
        kappa = F.normalize(self._heads((k * self.xi).to(eta.dtype)), dim=-1)
        k = k * (1 + (eta - 1) * self.alpha)
        v = self._mixed(v, x_v, context)
        v = rearrange(v, "b t (h v) -> b t h v", h=self.shape.value_heads)
        q, k = self._heads(r), self._heads(k).to(r.dtype)
        b = (kappa * self._heads(eta)).to(r.dtype)
        inputs = UpdateInputs(q, k, v.to(r.dtype), log_decay=self._heads(log_decay), a=-kappa.to(r.dtype), b=b)
        return inputs, after

    def _mixed(self, v: Tensor, x_v: Tensor, context: Context) -> Tensor:
        """Values of a later layer, mixed with the first layer's."""
        if context.values is None:
            return v
        # by its number, for a checkpointed layer is computed anew, and finds what it has left
        if context.values.setdefault(FIRST_LAYER, self.layer) == self.layer:
            context.values[FIRST_VALUE] = v
            return v
        if self.value is None:
            return v
        first = context.values[FIRST_VALUE]
        if first.shape[-1] != v.shape[-1]:
            raise ConfigError(
                f"heads x value_width of an RWKV-7 layer must be the first one's, {first.shape[-1]}, for their values "
                f"are mixed, got {v.shape[-1]} in layer {self.layer}"
            )
        return v + (first - v) * self.value(x_v).sigmoid()

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t (h k) -> b t h k", h=self.shape.heads)


def initial_bonus(shape: HeadShape, place: Place) -> Tensor:
    """RWKV-6's u at first: l / (L - 1) (1 - i / (H K - 1)) over the channels i, in thirds plus -0.1, 0, 0.1: [H, K]."""
    channel = torch.arange(shape.heads * shape.key_width)
    share = place.layer / max(1, place.depth - 1)
    slope = share * (1 - channel / max(1, len(channel) - 1))
    return (slope + 0.1 * ((channel + 1) % 3 - 1)).view(shape.heads, shape.key_width)
