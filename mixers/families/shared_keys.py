"""Base class of the configs of recurrent mixers whose query heads may share keys, values and decays: GLA, GSA."""

from abc import ABC
from typing import Self

from pydantic import Field, model_validator

from deltazoo.backends.io.errors import ConfigError
from deltazoo.mixers.core.part import HeadShape, OperandPart
from deltazoo.mixers.families.update import HeadConfig
from deltazoo.mixers.parts.projections import ShareKeyValues


class SharedKeysConfig(HeadConfig, ABC):
    """Config with `key_value_heads`. Every query head keeps a state, also those that share keys and values."""

    key_value_heads: int | None = Field(
        default=None,
        ge=1,
        description="heads of keys and values, a divisor of heads, which are the query heads; None: heads",
    )

    @model_validator(mode="after")
    def _has_no_value_heads(self) -> Self:
        if self.key_value_heads and self.value_heads:
            raise ValueError(
                f"value_heads must be None with key_value_heads = {self.key_value_heads}, got {self.value_heads}"
            )
        return self

    def key_value_shape(self, shape: HeadShape) -> HeadShape:
        """Return the sizes of keys and values. Raises: ConfigError, if the heads do not divide."""
        if self.key_value_heads is None:
            return shape
        if shape.heads % self.key_value_heads:
            raise ConfigError(f"key_value_heads must divide heads = {shape.heads}, got {self.key_value_heads}")
        return shape._replace(heads=self.key_value_heads, value_heads=self.key_value_heads)

    def sharing(self, shape: HeadShape) -> dict[str, OperandPart]:
        """Create the part that repeats keys, values and a decay before it for the query heads, if they are shared."""
        return {} if self.key_value_heads is None else {"share": ShareKeyValues(shape)}
