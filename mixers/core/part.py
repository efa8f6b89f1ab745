"""The parts that a `DeltaMixer` is put together from.

B batch, T time, D width, H key heads, HV value heads, K key width, V value width
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from deltazoo.backends.base import Backend, UpdateInputs
from deltazoo.backends.decode_step import FusedDecodeStep
from deltazoo.backends.errors import ConfigError
from deltazoo.mixers.core.mixer import Context


class HeadShape(NamedTuple):
    """The sizes that the parts of one mixer share."""

    width: int
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    householders: int = 1

    def checked(self) -> "HeadShape":
        """Raises: ConfigError where value heads cannot share key heads evenly, or a size is below 1."""
        for name, size in self._asdict().items():
            if size < 1:
                raise ConfigError(f"{name} must be at least 1, got {size} (width {self.width}, heads {self.heads})")
        if self.value_heads % self.heads:
            raise ConfigError(f"value_heads must be a multiple of heads = {self.heads}, got {self.value_heads}")
        return self


class OutputArguments(NamedTuple):
    """What an output part may look at.

    x: [B, T, D], the mixer's input; projected: the operands as projected, inputs: as the update took them.
    """

    x: Tensor
    projected: UpdateInputs
    inputs: UpdateInputs


class OperandPart(nn.Module, ABC):
    """Change or add operands before the update: feature maps, norms, rotations, decays, strengths."""

    @abstractmethod
    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        """Return the operands, and the state after these tokens (None for a part without one).

        Args: x: [B, T, D]; state: as `init_state` made it, or None; context: left_align, real tokens first.
        """


class LinearPart(OperandPart):
    """A part that looks at x through one linear map, `proj`, to a few numbers a token. A mixer with several of these
    takes their maps by one product: each by itself reads all of x, and gives it a gradient of its own to be added."""

    proj: nn.Module

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return self.prepare(self.proj(x), inputs), None

    @abstractmethod
    def prepare(self, raw: Tensor, inputs: UpdateInputs) -> UpdateInputs:
        """Return the operands. Args: raw: what `proj` makes of x, [B, T, ..]."""


class OutputPart(nn.Module, ABC):
    """Change the output of the update: skips, norms, gates."""

    @abstractmethod
    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, T, HV, V], and the state after these tokens (None for a part without one)."""


class Stateful(ABC):
    """A part that remembers. Its state is one tensor with the batch in dimension 0."""

    @abstractmethod
    def init_state(self, batch: int, like: Tensor) -> Tensor | None:
        """The state before the first token; None where, as built, the part needs none.

        Args: like: a parameter of the mixer, which gives the device and the dtype.
        """


class StatelessOutputPart(OutputPart):
    """An output part without a state that looks at the output and at the mixer's input alone."""

    plain: ClassVar[bool] = True  # `of` is all that it does

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.plain = cls.forward is StatelessOutputPart.forward and not issubclass(cls, Stateful)

    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return self.transform(o, flow.x), None

    @abstractmethod
    def transform(self, o: Tensor, x: Tensor) -> Tensor:
        """Return the output [B, T, HV, V]. Args: x: [B, T, D], the mixer's input."""


class Fusible(nn.Module, ABC):
    """A part that a kernel may compute with the update of a decoded token (`deltazoo.backends.decode_step`).

    Of the parts that remember the projection alone. A subclass, which may compute something else, says anew whether it
    fuses.
    """

    says: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.says = "fused" in vars(cls)

    @abstractmethod
    def fused(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        """The step with this part after all that it has; None where that is none."""

    @abstractmethod
    def fused_inputs(self, x: Tensor) -> dict[str, Tensor]:
        """The operands of the step that are this part's, by their names. Args: x: [B, 1, D], the mixer's input."""


class FusibleLinearPart(LinearPart, Fusible):
    """A fusible part whose map a mixer may take together with others'."""

    def fused_inputs(self, x: Tensor) -> dict[str, Tensor]:
        return self.fused_of(self.proj(x))

    @abstractmethod
    def fused_of(self, raw: Tensor) -> dict[str, Tensor]:
        """As `fused_inputs`. Args: raw: what `proj` makes of x, [B, 1, ..]."""


class HasBackend(ABC):
    """A module that a backend computes, in all or in part."""

    @abstractmethod
    def rebind(self, backend: str | Backend | None, like: Tensor) -> None:
        """Choose the backend anew, as `deltazoo.bind` does. like: a tensor with the device and dtype to come."""


class HasFlops(ABC):
    """A part that computes beside its linear maps, short convolutions and updates."""

    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations of one token, forward, of what is beside them."""


class ResizesHeads(ABC):
    """An operand part that changes the key or value width of the update."""

    @abstractmethod
    def resize_heads(self, shape: HeadShape) -> HeadShape:
        """The sizes after this part."""


@dataclass(frozen=True)
class Parts:
    """What a config puts into its mixer, in the order that it runs."""

    project: nn.Module
    operands: Mapping[str, OperandPart] = field(default_factory=dict)
    outputs: Mapping[str, OutputPart] = field(default_factory=dict)
    direct: nn.Module | None = None  # past the update, x [B, T, D] to y
    out_std: float | None = None  # of the output map at first, normal; None: torch's linear map

    def __post_init__(self) -> None:
        names = ["project", "update", *self.operands, *self.outputs]
        if len(set(names)) < len(names):
            raise ConfigError(f"the parts of a mixer need names of their own, got {names}")


def projection(width: int, out: int, rank: int | None = None, bias: bool = False) -> nn.Module:
    """A linear map width -> out, through `rank` channels where given; the bias is the last map's."""
    if rank is None:
        return nn.Linear(width, out, bias=bias)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=bias))


def together(x: Tensor, maps: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """What those of several maps that are narrow make of x [B, T, D], by one product; {} where that are not two.

    Plain linear maps alone, without a bias: what was wrapped, quantised or hooked since it was built is left alone.
    """
    narrow = {name: layer for name, layer in maps.items() if type(layer) is nn.Linear and _joins(layer)}
    if len(narrow) < 2:
        return {}
    y = F.linear(x, torch.cat([layer.weight for layer in narrow.values()]))
    return dict(zip(narrow, y.split([layer.out_features for layer in narrow.values()], -1), strict=True))


def is_unmodified(module: nn.Module) -> bool:
    """Whether to call a module is to run what its class says, and nothing else: no hook, no other forward put on it."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not any(hooks) and "forward" not in module.__dict__ and not _has_any_global_hook()


def _joins(layer: nn.Linear) -> bool:
    return layer.bias is None and is_unmodified(layer) and 8 * layer.out_features <= layer.in_features
