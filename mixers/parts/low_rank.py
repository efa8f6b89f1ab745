"""Low-rank linear maps with an activation inside, as in RWKV-6 and RWKV-7."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deltazoo.backends.update.base import state_dtype
from deltazoo.mixers.core.initialization import fills_values


class Ranks(NamedTuple):
    """Ranks of RWKV's low-rank maps, by the quantity that they compute."""

    decay: int
    mix: int = 0
    rate: int = 0
    value: int = 0
    gate: int = 0

    @staticmethod
    def for_width(width: int) -> "Ranks":
        """Return RWKV-7's defaults: 2.5, 1.7 and 5 times the root of the width, rounded to multiples of 32."""

        def rank(factor: float) -> int:
            return max(32, round(factor * width**0.5 / 32) * 32)

        return Ranks(rank(2.5), 0, rank(2.5), rank(1.7), rank(5))


class LowRank(nn.Module):
    """x -> activation(x A) B + bias, in float32 (float64 for float64 inputs).

    Args:
        activation: "tanh", "sigmoid" or "none".
        initial_bias: computes the initial bias [out]; None: no bias. A picklable function rather than a tensor, so that
            `reset_parameters` works on a module built on the meta device.
        spread: see Initialisation.
    Initialisation: A = 0; B uniform in +-spread, or orthogonal with gain 0.1 if `spread` is None.
    """

    def __init__(
        self,
        width: int,
        rank: int,
        out: int,
        activation: str = "none",
        initial_bias: Callable[[], Tensor] | None = None,
        spread: float | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.initial_bias, self.spread = activation, initial_bias, spread
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)
        self.bias = None if initial_bias is None else nn.Parameter(torch.empty(out))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        """Set the bias, and override torch's initialisation of both linear maps."""
        nn.init.zeros_(self.down.weight)
        if self.spread is None:
            nn.init.orthogonal_(self.up.weight, gain=0.1)
        else:
            nn.init.uniform_(self.up.weight, -self.spread, self.spread)
        if self.bias is not None and self.initial_bias is not None:
            self.bias.copy_(self.initial_bias())

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.down(x))

    def rest(self, inner: Tensor) -> Tensor:
        """Return the result from x A."""
        if self.activation == "tanh":
            inner = inner.tanh()
        elif self.activation == "sigmoid":
            inner = inner.sigmoid()
        y = self.up(inner)
        y = y.to(state_dtype(y.dtype))
        return y if self.bias is None else y + self.bias.to(y.dtype)
