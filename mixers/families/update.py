"""Base classes of the configs that build a `DeltaMixer`."""

from abc import ABC, abstractmethod
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import nn

from deltazoo.backends.io.errors import ConfigError, PluginError
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.check import check_integer
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.delta_mixer import DeltaMixer
from deltazoo.mixers.core.initialization import build_in_any_order
from deltazoo.mixers.core.mixer import FIRST_PLACE, Cost, MixerConfig, Place
from deltazoo.mixers.core.part import HasFlops, HeadShape, Parts
from deltazoo.mixers.core.state import nbytes
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.convolution import ShortConv


class UpdateConfig(MixerConfig, ABC):
    """Config of a mixer around one update. A subclass defines the spec, the sizes of the heads and the parts."""

    @abstractmethod
    def spec(self) -> UpdateSpec:
        """Return the recurrence."""

    @abstractmethod
    def shape(self, width: int) -> HeadShape:
        """Return the sizes of the heads at this width."""

    @abstractmethod
    def parts(self, shape: HeadShape, place: Place) -> Parts:
        """Create the parts. The weights do not depend on the order, see `build_in_any_order`."""

    @model_validator(mode="after")
    def _spec_is_valid(self) -> Self:
        try:
            spec: object = self.spec()
        except ConfigError as error:
            raise ValueError(str(error).removeprefix(f"{UpdateSpec.__name__}: ")) from None
        if not isinstance(spec, UpdateSpec):
            raise PluginError(f"{type(self).__name__}.spec must return an UpdateSpec, got {type(spec).__name__}")
        return self

    def build(self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None) -> DeltaMixer:
        check_integer("width", width)
        shape = self.shape(width).validated()
        return build_in_any_order(lambda: self._build(shape, place, backend))

    def _build(self, shape: HeadShape, place: Place, backend: str | Backend | None) -> DeltaMixer:
        parts = self.parts(shape, place)
        if not isinstance(parts, Parts):
            raise PluginError(f"{type(self).__name__}.parts must return Parts, got {type(parts).__name__}")
        return DeltaMixer(shape, self.spec(), parts, backend, self.name)

    def cost(self, width: int) -> Cost:
        with torch.device("meta"):
            mixer = self.build(width, backend="reference")
            state = mixer.init_state(1)
        maps = sum(m.weight.numel() for m in mixer.modules() if isinstance(m, nn.Linear | ShortConv))
        updates = sum(update_flops(m.spec, m.shape) for m in mixer.modules() if isinstance(m, Update))
        other = sum(m.flops() for m in mixer.modules() if isinstance(m, HasFlops))
        return Cost(2 * maps + updates + other, 0, nbytes(state), 0)


class ChannelConfig(UpdateConfig, ABC):
    """Config of a mixer that treats every channel as a value head of width 1 (2 for a complex state)."""

    channels: int | None = Field(default=None, ge=1, description="value heads; None: a multiple of the width")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the norms")

    def channel_shape(self, channels: int, width: int, key_width: int = 1, value_width: int = 1) -> HeadShape:
        """Return the sizes with one key head; `channels` is the default of the field."""
        return HeadShape(width, 1, self.channels or channels, key_width, value_width)


class HeadConfig(UpdateConfig, ABC):
    """Config of a mixer with heads of keys and values."""

    heads: int | None = Field(default=None, ge=1, description="key heads; None: width // 128, at least 1")
    value_heads: int | None = Field(default=None, ge=1, description="value heads, a multiple of heads; None: heads")
    key_width: int | None = Field(default=None, ge=1, description="K per head; None: a fraction of width / heads")
    value_width: int | None = Field(default=None, ge=1, description="V per head; None: a fraction of width / heads")
    scale: float | None = Field(default=None, allow_inf_nan=False, description="factor on the output; None: K ** -0.5")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the output norm")

    def head_shape(
        self,
        width: int,
        key_share: float = 1.0,
        value_share: float = 1.0,
        value_heads: int | None = None,
        default_heads: int | None = None,
    ) -> HeadShape:
        """Return the sizes; by default K = key_share width / heads and V = value_share width / heads."""
        heads = self.heads or default_heads or max(1, width // 128)
        return HeadShape(
            width,
            heads,
            self.value_heads or value_heads or heads,
            self.key_width or int(key_share * width) // heads,
            self.value_width or int(value_share * width) // heads,
            self.spec().householders,
        )

    def shape(self, width: int) -> HeadShape:
        return self.head_shape(width)

    @staticmethod
    def with_ungrouped_keys(shape: HeadShape) -> HeadShape:
        """Return the sizes with one key head per value head, for mixers whose keys depend on the head's decay."""
        return shape._replace(heads=shape.value_heads)


def update_flops(spec: UpdateSpec, shape: HeadShape) -> int:
    """Return the operations per token of the recurrence: decay, erase, write and read of a K x V state."""
    writes = 2 * spec.householders * (1 if spec.transition == "additive" else 2)
    return shape.value_heads * shape.key_width * shape.value_width * (writes + 2 + (spec.decay != "none"))
