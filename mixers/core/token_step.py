"""Decode steps of a mixer by kernels of its own, from the mixer's input up to the output map.

B batch, D width, HV value heads, K key width, V value width
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.mixers.core.mixer import Context

Part_ = TypeVar("Part_", bound=nn.Module)


class TokenCall(NamedTuple):
    """A call of a mixer with one token per row, without padding.

    x: [B, 1, D], for which products of few rows have no refusals.
    norm: of x, not yet applied; None: there is none.
    parts: all parts of the mixer by name, in order. direct: the map that bypasses the update; None: there is none.
    states: by the name of the part; they change in place. "update" is [B, HV, K, V].
    """

    x: Tensor
    norm: Norm | None
    parts: Mapping[str, nn.Module]
    direct: nn.Module | None
    states: Mapping[str, Tensor]
    context: Context

    def has_parts(self, *classes: type[nn.Module]) -> bool:
        """Whether the mixer has exactly these parts, in this order, and each of them is plain."""
        return tuple(map(type, self.parts.values())) == classes and all(map(is_plain, self.parts.values()))

    def part(self, kind: type[Part_]) -> Part_:
        """Return the first part of a class."""
        return next(part for part in self.parts.values() if isinstance(part, kind))

    def state_of(self, part: nn.Module) -> Tensor:
        """Return the state of a part that has one."""
        return next(self.states[name] for name, other in self.parts.items() if other is part)


class TokenOutput(NamedTuple):
    """Result of a `TokenStep`.

    o: [B, 1, HV V]. direct: result of the map that bypasses the update, [B, 1, D]; None: not computed.
    intermediates: tensors for later layers, by name; None: there are none.
    norm: of o, not yet applied; None: there is none.
    """

    o: Tensor
    direct: Tensor | None = None
    intermediates: Mapping[str, Tensor] | None = None
    norm: Norm | None = None


class TokenStep(ABC):
    """Projection or operand part whose kernels decode a token up to the output map, with all parts of the mixer."""

    @abstractmethod
    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        """Decode one token per row. Return None, with the states as they were, if the kernels cannot."""


class Around(NamedTuple):
    """Operations around a filter that its decode step also computes: gate * gelu(filter(factor * x)), if given."""

    factor: Tensor | None = None
    gate: Tensor | None = None
    gelu: bool = False


class FilterStep(ABC):
    """Filter whose kernels decode a token together with the operations around the filter."""

    @abstractmethod
    def step_(
        self, x: Tensor, state: dict[str, Tensor] | None, context: Context, around: Around
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Decode one token per row; the state changes in place. Return the result and the new state.

        The caller guarantees that a call of the module runs only `forward` (`is_plain`).

        Returns: None, with the state as it was, if there are no such kernels for the call.
        """
