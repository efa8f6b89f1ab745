"""Random draws of fixed shapes on the device of a generator, which CUDA graphs can capture."""

import torch
from torch import Generator, Tensor


def integers(low: int, high: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw int64 in [low, high)."""
    return torch.randint(low, high, shape, generator=generator, device=generator.device)


def uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw float32 in [0, 1)."""
    return torch.rand(shape, generator=generator, device=generator.device)


def distinct(count: int, size: int, batch: int, generator: Generator, weights: Tensor | None = None) -> Tensor:
    """Draw `count` distinct integers in [0, size) for each row, in random order: [batch, count].

    Args: weights: [size], of draws one after the other without replacement; None: equal.
    """
    scores = uniform((batch, size), generator)
    if weights is not None:
        scores = weights.log() - (-scores.clamp(1e-7, 1 - 1e-7).log()).log()  # the largest Gumbel variables
    return scores.topk(count, dim=1).indices


def arange(count: int, generator: Generator) -> Tensor:
    """Return 0, 1, ... on the device of the generator."""
    return torch.arange(count, device=generator.device)
