"""Auxiliary losses, such as the load-balance loss of a router.

L layers
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class AuxiliaryLoss(NamedTuple):
    """An auxiliary loss of one module in one forward pass.

    Losses with equal name, coefficient, combine and shape of the statistics are combined over all layers:

        value = combine(statistics of the L layers)

    Args:
        name: the key in the result of `LanguageModel.losses`.
        coefficient: weight in the total loss.
        statistics: a scalar, or statistics of a fixed shape; float32 or float64.
        combine: maps the stacked statistics [L, ...] to the loss, a scalar; the default is the sum. Pass a
            function of module level, not a lambda: losses are grouped by this object.
    """

    name: str
    coefficient: float
    statistics: Tensor
    combine: Callable[[Tensor], Tensor] = torch.sum
