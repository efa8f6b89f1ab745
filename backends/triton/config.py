"""Launch configs: which kernel computes each phase of an update, and the parameters of its launches.

H key heads, HV value heads, K key width, V value width
"""

import functools
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltazoo.backends.triton.chunk.registry import CHUNK, versions
from deltazoo.backends.triton.element.config import ElementConfig


class Launch(BaseModel):
    """How one kernel is launched.

    Args:
        tile: value columns per program. prepare: the block size from which the inverse works on whole chunks;
            fused_step: columns per iteration of a program, which covers all columns.
        warps: warps of 32 threads per program.
        stages: stages of the software pipeline; decode kernels ignore them.
        keys: gradients only: key columns per program, a power of two >= 32, raised to `min_key_tile`; 0: all.
        kernel: "portable": Triton, any GPU. "sm90": Gluon for sm_90, with fixed tiles and warps; the portable kernels
            that prepare segments use the parameters given here. "fused": reverse only: recomputation, reverse scan and
            gradients in one kernel for sm_90, without scratch. `plan.py` resolves and checks the choice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tile: int = Field(ge=16)
    warps: int = Field(default=4, ge=1)
    stages: int = Field(default=2, ge=1)
    keys: int = Field(default=0, ge=0)
    kernel: str = "portable"

    @model_validator(mode="after")
    def _sizes_are_powers_of_two(self) -> Self:
        if self.keys and (self.keys < 32 or self.keys & (self.keys - 1)):
            raise ValueError(f"keys must be 0 or a power of two >= 32, got {self.keys}")
        for name, number in (("tile", self.tile), ("warps", self.warps)):
            if number & (number - 1):
                raise ValueError(f"{name} must be a power of two, got {number}")
        return self


class LaunchConfig(BaseModel):
    """How the kernels of one update are launched.

    Args:
        chunk: tokens per chunk.
        checkpoint_chunks: chunks between two checkpoints of the state.
        segment_chunks: chunks per segment, if the segments of a sequence are computed in parallel; 0: no segments.
        scratch: bytes for the recomputed states and their gradients; the backward processes longer inputs in windows.
        fused_step: None: the heuristic's launch for the sizes.
        element: launches of the elementwise kernels; None: those of the heuristic.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk: int = CHUNK
    checkpoint_chunks: int = Field(default=16, ge=1)
    segment_chunks: int = 0
    scratch: int = 5 * 2**25
    prepare: Launch = Launch(tile=16, warps=4, stages=1)
    scan: Launch = Launch(tile=64)
    recompute: Launch = Launch(tile=64)
    reverse: Launch = Launch(tile=64)
    gradients: Launch = Launch(tile=64, keys=64)
    decode: Launch = Launch(tile=64, warps=4, stages=1)
    fused_step: Launch | None = None
    element: ElementConfig | None = None

    @model_validator(mode="after")
    def _segments_start_at_checkpoints(self) -> Self:
        chunks = self.segment_chunks
        if chunks % self.checkpoint_chunks or chunks & (chunks - 1):
            raise ValueError(
                f"segment_chunks must be 0 or a power of two and a multiple of checkpoint_chunks = "
                f"{self.checkpoint_chunks}, got {chunks}"
            )
        if self.reverse.kernel == "fused" and chunks:
            raise ValueError(f"segment_chunks must be 0 with reverse.kernel = 'fused', got {chunks}")
        return self

    @model_validator(mode="after")
    def _each_kernel_has_the_fields_it_uses(self) -> Self:
        for name, launch in self:
            if not isinstance(launch, Launch):
                continue
            if launch.kernel not in versions(name):
                choices = ", ".join(map(repr, versions(name)))
                raise ValueError(f"{name}.kernel must be one of {choices}, got {launch.kernel!r}")
            if launch.keys and name != "gradients":
                raise ValueError(f"{name}.keys must be 0: only gradients tiles the keys, got {launch.keys}")
        return self

    def changed(self, **changes: object) -> Self:
        """Return this config with other values of some fields, validated."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


@functools.lru_cache(maxsize=1024)
def parse(config: str) -> LaunchConfig:
    """Parse a launch config given as JSON, once."""
    return LaunchConfig.model_validate_json(config)
