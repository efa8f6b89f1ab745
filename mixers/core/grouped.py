"""Parts of several mixers with equal configs, computed together for rows that are sorted by mixer.

A rows, G mixers, D inputs, F outputs, C channels
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from deltazoo.backends.ops.grouped import expand_rows, grouped_linear
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.mixers.core.scaled_linear import ScaledLinear


class Rows(NamedTuple):
    """The rows of a pack [1, A, ...]: the rows of each mixer are contiguous, in the order of the mixers.

    mixer: [A] int64, the mixer of each row; ends: [G] int32, the row after the last one of each mixer, ends[-1] = A.
    """

    mixer: Tensor
    ends: Tensor

    def linear(self, x_1AD: Tensor, maps: Sequence[nn.Module]) -> Tensor:
        """Apply maps[g] to the rows of mixer g: linear maps, or sequences of them."""
        if isinstance(maps[0], nn.Sequential):  # the maps have equal types: `is_groupable` refuses replaced ones
            for inner_maps in zip(*cast("Sequence[nn.Sequential]", maps), strict=True):
                x_1AD = self.linear(x_1AD, inner_maps)
            return x_1AD
        layers = cast("Sequence[nn.Linear]", maps)
        y_1AF = grouped_linear(x_1AD[0], torch.stack([layer.weight for layer in layers]), self.ends)[None]
        if isinstance(layers[0], ScaledLinear):
            y_1AF = layers[0].scale(y_1AF)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return y_1AF + self.expand(biases).to(y_1AF.dtype) if biases else y_1AF

    def expand(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return parameters[g] at the rows of mixer g, [1, A, ...]."""
        stacked = torch.stack(list(parameters))
        return torch.unflatten(expand_rows(stacked.flatten(1), *self), 1, stacked.shape[1:])[None]


class Groupable(nn.Module, ABC):
    """Part that can be computed for several mixers together.

    The declaration does not extend to subclasses: a subclass may compute something else.
    """

    @abstractmethod
    def forward_grouped(self, parts: Sequence[Any], rows: Rows, *arguments: Any) -> Any:
        """Compute `forward` of parts[g] at the rows of mixer g. `self` is parts[0].

        Args: arguments: those of `forward`, with packed rows [1, A, ...].
        """


def is_groupable(part: nn.Module) -> bool:
    """Whether the class of the part declares `forward_grouped`, and every module in it is known and plain."""
    declared = isinstance(part, Groupable) and "forward_grouped" in vars(type(part))
    return declared and all(_is_known(module) and is_plain(module) for module in part.modules())


def _is_known(module: nn.Module) -> bool:
    """Whether `forward_grouped` computes what the module does: a subclass of nn.Linear, say, may compute more."""
    return type(module) in (nn.Linear, nn.Sequential, nn.Identity) or type(module).__module__.startswith("deltazoo.")
