"""Launch configs: which kernel computes each phase of an update, and the parameters of its launches.

H key heads, HV value heads, K key width, V value width
"""

import functools
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltazoo.backends.triton.element.config import ElementConfig

CHUNK = 64  # tokens per chunk by default
KernelChoice = Literal["portable", "hopper", "fused"]


class Launch(BaseModel):
    """How one kernel is launched.

    Args:
        tile: value columns per program. prepare: the block size from which the inverse works on whole chunks;
            fused_step: columns per iteration of a program, which covers all columns.
        warps: warps of 32 threads per program.
        stages: stages of the software pipeline; decode kernels ignore them.
        keys: gradients only: key columns per program, a power of two >= 32, raised to `min_key_tile`; 0: all.
        kernel: "portable": Triton, any GPU. "hopper": Gluon for sm_90, with fixed tiles and warps; the portable kernels
            that prepare segments use the parameters given here. "fused": reverse only: recomputation,
            reverse scan and gradients in one Hopper kernel, without scratch. `plan.py` resolves and checks the choice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tile: int = Field(ge=16)
    warps: int = Field(default=4, ge=1)
    stages: int = Field(default=2, ge=1)
    keys: int = Field(default=0, ge=0)
    kernel: KernelChoice = "portable"

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
        every: chunks between two checkpoints of the state.
        split: chunks per segment, if the segments of a sequence are computed in parallel; 0: no segments.
        scratch: bytes for the recomputed states and their gradients; the backward processes longer inputs in windows.
        fused_step: None: the heuristic's launch for the sizes.
        element: launches of the elementwise kernels; None: those of the heuristic.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk: int = CHUNK
    every: int = Field(default=16, ge=1)
    split: int = 0
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
        if self.split % self.every or self.split & (self.split - 1):
            raise ValueError(
                f"split must be 0 or a power of two and a multiple of every = {self.every}, got {self.split}"
            )
        if self.reverse.kernel == "fused" and self.split:
            raise ValueError(f"split must be 0 with reverse.kernel = 'fused', got {self.split}")
        return self

    @model_validator(mode="after")
    def _each_kernel_has_the_fields_it_uses(self) -> Self:
        for name, launch in self:
            if not isinstance(launch, Launch):
                continue
            if launch.kernel not in CHOICES.get(name, ("portable",)):
                choices = ", ".join(map(repr, CHOICES.get(name, ("portable",))))
                raise ValueError(f"{name}.kernel must be one of {choices}, got {launch.kernel!r}")
            if launch.keys and name != "gradients":
                raise ValueError(f"{name}.keys must be 0: only gradients tiles the keys, got {launch.keys}")
        return self

    def changed(self, **changes: object) -> Self:
        """Return this config with other values of some fields, validated."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


CHOICES: dict[str, tuple[KernelChoice, ...]] = {
    "prepare": ("portable", "hopper"),
    "scan": ("portable", "hopper"),
    "recompute": ("portable", "hopper"),
    "reverse": ("portable", "hopper", "fused"),
    "gradients": ("portable", "hopper"),
}  # the other kernels have one version each


@functools.lru_cache(maxsize=1024)
def parse(config: str) -> LaunchConfig:
    """Parse a launch config given as JSON, once."""
    return LaunchConfig.model_validate_json(config)
