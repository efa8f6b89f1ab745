"""Base class of the configs of softmax attention with grouped key-value heads: attention, FoX, PaTH."""

from abc import ABC
from typing import ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from deltazoo.backends.io.errors import ConfigError
from deltazoo.mixers.core.mixer import MixerConfig


class AttentionHeads(NamedTuple):
    """Numbers of query heads and key-value heads, and their width."""

    heads: int
    key_value_heads: int
    head_width: int


class AttentionHeadsConfig(MixerConfig, ABC):
    """Fields of the heads. Class attribute: `usual_head_width`, which the number of heads defaults to."""

    family: ClassVar[str] = "softmax attention"
    usual_head_width: ClassVar[int] = 128

    heads: int | None = Field(default=None, ge=1, description="query heads; None: width // 128, at least 1")
    key_value_heads: int | None = Field(
        default=None, ge=1, description="key-value heads, a divisor of heads (GQA); None: heads"
    )
    head_width: int | None = Field(default=None, ge=1, description="width of q, k and v per head; None: width // heads")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads and self.key_value_heads:
            _check_groups(self.heads, self.key_value_heads)
        return self

    def resolve_heads(self, width: int) -> AttentionHeads:
        """Return the sizes at a width. Raises: ConfigError, if they do not fit."""
        heads = self.heads or max(1, width // self.usual_head_width)
        key_value_heads, head_width = self.key_value_heads or heads, self.head_width or width // heads
        if head_width < 1:
            raise ConfigError(f"heads must be at most width = {width} without a head_width, got {heads}")
        _check_groups(heads, key_value_heads)
        return AttentionHeads(heads, key_value_heads, head_width)


def _check_groups(heads: int, key_value_heads: int) -> None:
    if heads % key_value_heads:
        raise ConfigError(f"key_value_heads must divide heads = {heads}, got {key_value_heads}")
