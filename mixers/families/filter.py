"""What mixers made of filters along time share: their cost, their states by name.

B batch, T time, D width
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.backends.errors import StateError
from deltazoo.mixers.core.delta_mixer import Update
from deltazoo.mixers.core.mixer import Context, Cost, Mixer, MixerConfig
from deltazoo.mixers.core.sequences import check_state, left_align, undo_left_align
from deltazoo.mixers.core.state import nbytes
from deltazoo.mixers.families.delta_rule import update_flops
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.diagonal_ssm import DiagonalSSM


class FilterConfig(MixerConfig, ABC):
    """A mixer made of filters: linear maps, convolutions and updates."""

    def cost(self, width: int) -> Cost:
        with torch.device("meta"):
            mixer = self.build(width, backend="reference")
            one, two = (nbytes(mixer.init_state(1, capacity)) for capacity in (1, 2))
        maps = sum(2 * m.weight.numel() for m in mixer.modules() if isinstance(m, nn.Linear | ShortConv))
        updates = sum(update_flops(m.spec, m.shape) for m in mixer.modules() if isinstance(m, Update))
        flops = maps + updates + self.update_flops(width)
        return Cost(flops, self.flops_context(width), one - (two - one), two - one)

    def update_flops(self, width: int) -> int:
        """FLOPs of one token of a recurrence that is no `Update`."""
        return 0

    def flops_context(self, width: int) -> int:
        """More FLOPs a token for each token that it looks back on."""
        return 0


class FilterMixer(Mixer, ABC):
    """Mix by filters, each with a state of its own: {name of tensor: tensor}, the names of all filters together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.filters = nn.ModuleDict()

    @abstractmethod
    def mix(self, x: Tensor, state: dict[str, Tensor] | None, after: dict[str, Tensor], context: Context) -> Tensor:
        """Mix x [B, T, D], real tokens first, padded ones zero; `filtered` reads `state` and fills `after`."""

    def init_state(self, batch: int, capacity: int | None = None) -> dict[str, Tensor]:
        """The state before the first token."""
        like = next(self.parameters())
        state: dict[str, Tensor] = {}
        for name, part in self.filters.items():
            state |= {f"{name}.{key}": tensor for key, tensor in _named(_started(part, batch, like, capacity)).items()}
        return state

    def filtered(
        self, name: str, x: Tensor, state: dict[str, Tensor] | None, after: dict[str, Tensor], context: Context
    ) -> Tensor:
        """Run one filter, with its part of the state."""
        part = self.filters[name]
        if state is None:
            return _run(part, x, None, context)[0]
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in state.items() if key.startswith(f"{name}.")}
        y, held = _run(part, x, own.get("", own) if isinstance(part, ShortConv) else own, context)
        after.update({f"{name}.{key}": tensor for key, tensor in _named(held).items()})
        return y

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None = None, context: Context | None = None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        x_BTD, context, order = left_align(x, self.width, context)
        if state is not None:
            wanted = set(self.init_state(0, 1))
            if set(state) != wanted:
                raise StateError(f"the state must have the tensors {sorted(wanted)}, got {sorted(state)}")
            check_state({name: tensor.shape[0] for name, tensor in state.items()}, x_BTD, context)
        after: dict[str, Tensor] = {}
        y_BTD = self.mix(x_BTD, state, after, context)
        return undo_left_align(y_BTD, order), None if state is None else after


def _run(part: nn.Module, x: Tensor, state: Any, context: Context) -> tuple[Tensor, Any]:
    if not isinstance(part, ShortConv):
        return part(x, state, context)
    (y,), after = part(x, state, context)  # the filters' convolutions are in one part
    return y, after


def _started(part: nn.Module, batch: int, like: Tensor, capacity: int | None) -> Any:
    if isinstance(part, Remembering):
        return part.init_state(batch, like, capacity)
    assert isinstance(part, ShortConv | DiagonalSSM)  # the filters without a capacity
    return part.init_state(batch, like)


def _named(state: Any) -> dict[str, Tensor]:
    """A filter's state by name; a single tensor has the empty one."""
    return state if isinstance(state, dict) else {"": state}


class Remembering(ABC):
    """A filter that remembers every token, and so needs a capacity."""

    @abstractmethod
    def init_state(self, batch: int, like: Tensor, capacity: int | None) -> dict[str, Tensor]:
        """The state before the first token. Raises: StateError without a capacity."""
