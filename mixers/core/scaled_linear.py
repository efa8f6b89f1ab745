"""A linear map whose outputs have constant factors, which its stored weights do not contain (Falcon-H1)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ScaledLinear(nn.Linear):
    """y_i = c_i (W x)_i. A subclass of torch's Linear, so that libraries that replace linear maps find it.

    Args:
        linear: the map without factors and without a bias; its weight is taken over.
        factors: the number of outputs and their factor, for each block of outputs.
    """

    def __init__(self, linear: nn.Linear, factors: Sequence[tuple[int, float]]) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.factors = tuple(factors)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x))

    def scale(self, y: Tensor) -> Tensor:
        """Multiply y [..., outputs] by the factors."""
        blocks = y.split([size for size, _ in self.factors], -1)
        return torch.cat([block * factor for block, (_, factor) in zip(blocks, self.factors, strict=True)], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, factors={self.factors}"


def scaled(linear: nn.Linear, *factors: tuple[int, float]) -> nn.Linear:
    """Return the map with the factors, or itself if all are 1. Args: factors: as for `ScaledLinear`."""
    return linear if all(factor == 1 for _, factor in factors) else ScaledLinear(linear, factors)
