"""The losses of a language model: the cross entropy and the auxiliary losses of its layers."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.exchange import sum_over_ranks
from deltazoo.backends.context_parallel.plan import ContextPlan
from deltazoo.backends.update.base import state_dtype
from deltazoo.mixers.core.losses import AuxiliaryLoss


class Losses(NamedTuple):
    """The losses of one batch, as scalars.

    Args:
        total: cross_entropy + sum of coefficient * auxiliary loss; the loss to minimise.
        cross_entropy: in nats per token.
        auxiliary: the auxiliary losses by name, without their coefficients.
    """

    total: Tensor
    cross_entropy: Tensor
    auxiliary: dict[str, Tensor]


def at_places(x_BTD: Tensor, places_BA: Tensor) -> Tensor:
    """Return the vectors of the tokens at some places, [B, A, D]."""
    return x_BTD.gather(1, places_BA[:, :, None].expand(-1, -1, x_BTD.shape[2]))


def mean_over_ranks(value: Tensor, count: Tensor, plan: ContextPlan) -> Tensor:
    """Return the mean over the tokens of all ranks, from each rank's mean over `count` tokens."""
    return sum_over_ranks(value * count, plan) / sum_over_ranks(count, plan).clamp(min=1)


def combine_losses(cross_entropy: Tensor, recorded: Iterable[AuxiliaryLoss]) -> Losses:
    """Combine the statistics of all layers, and add the auxiliary losses to the cross entropy.

    Losses of one name that cannot be combined, because their coefficients or shapes differ, are added.
    """
    groups: dict[tuple[str, float, Callable[[Tensor], Tensor], torch.Size], list[Tensor]] = {}
    for loss in recorded:
        key = loss.name, loss.coefficient, loss.combine, loss.statistics.shape
        # FSDP2 casts the results of a module if its policy has an output_dtype
        groups.setdefault(key, []).append(loss.statistics.to(state_dtype(loss.statistics.dtype)))
    total = cross_entropy
    auxiliary: dict[str, Tensor] = {}
    for (name, coefficient, combine, _), statistics in groups.items():
        value = combine(torch.stack(statistics))
        total = total + coefficient * value
        auxiliary[name] = auxiliary[name] + value if name in auxiliary else value
    return Losses(total, cross_entropy, auxiliary)
