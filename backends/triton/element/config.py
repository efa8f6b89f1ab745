"""Launch configs of the elementwise kernels, and the heuristic that chooses one; does not import Triton.

N sequences, T tokens, H key heads, HV value heads (channels), K key width, V value width
"""

import functools
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltazoo.backends.triton.tiles import cdiv, power_of_two

_LANES = 32
_MIN_SHARED_GROUP = 16  # channels per key head; with fewer, a program has channels of several key heads
_MIN_SEGMENT = 128  # tokens
_MAX_GROUPS = 8  # groups between two checkpoints; the backward unrolls the recomputation of their states


class ElementLaunch(BaseModel):
    """How the forward or the backward scan is launched. A thread owns keys x channels x V elements of the state.

    Args:
        keys: keys per thread, raised if 32 lanes could not hold all keys.
        channels: channels per thread, lowered if there are fewer.
        warps: warps of 32 threads per program, lowered if there are fewer channels.
        group: tokens whose operands are loaded together. The backward keeps two tiles for each of them in registers
            (decay and decayed state), and one state for each group between two checkpoints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: int = Field(ge=1)
    channels: int = Field(default=1, ge=1)
    warps: int = Field(default=4, ge=1)
    group: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _sizes_are_powers_of_two(self) -> Self:
        for name, number in self:
            if number & (number - 1):
                raise ValueError(f"{name} must be a power of two, got {number}")
        return self


class ElementConfig(BaseModel):
    """How the elementwise kernels of one update are launched.

    Args:
        checkpoint_tokens: tokens between two checkpoints of the state, a power of two.
        segment_tokens: tokens per segment, if the segments of a sequence are computed in parallel; 0: no segments.
            None: chosen by the heuristic.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint_tokens: int = Field(ge=1)
    segment_tokens: int | None = Field(default=None, ge=0)
    forward: ElementLaunch
    backward: ElementLaunch

    @model_validator(mode="after")
    def _groups_and_segments_start_at_checkpoints(self) -> Self:
        group = self.backward.group
        if (
            self.checkpoint_tokens & (self.checkpoint_tokens - 1)
            or not group <= self.checkpoint_tokens <= _MAX_GROUPS * group
        ):
            raise ValueError(
                f"checkpoint_tokens must be a power of two from backward.group = {group} to {_MAX_GROUPS * group}, got "
                f"{self.checkpoint_tokens}"
            )
        if self.segment_tokens and self.segment_tokens % max(self.checkpoint_tokens, self.forward.group):
            raise ValueError(
                f"segment_tokens must be a multiple of checkpoint_tokens = {self.checkpoint_tokens} and forward.group, "
                f"got {self.segment_tokens}"
            )
        return self


@functools.lru_cache(maxsize=256)
def parse_element(config: str) -> ElementConfig:
    """Parse a config given as JSON; results are cached."""
    return ElementConfig.model_validate_json(config)


@functools.lru_cache(maxsize=1024)
def element_heuristic(K: int, V: int) -> ElementConfig:
    """Choose a config by the size of a channel's state; `segment_length` chooses the number of segments.

    Small states are bound by memory, so many tokens are loaded together. Larger states are bound by arithmetic and
    exponentials; the backward divides the keys among lanes, so that sums over channels need few shuffles. A thread of
    the forward has 8 keys if there are at most 16, which doubles the number of warps, else 16, because sums over more
    lanes cost more than that gains. With more than 128 keys a thread of the backward has 8 or more keys, and the
    registers hold the operands of two tokens only.
    """
    state = power_of_two(K) * power_of_two(V)
    if state <= 2:
        return ElementConfig(
            checkpoint_tokens=8, forward=ElementLaunch(keys=2, group=16), backward=ElementLaunch(keys=2, group=8)
        )
    if state <= 4:
        return ElementConfig(
            checkpoint_tokens=16, forward=ElementLaunch(keys=4, group=8), backward=ElementLaunch(keys=4, group=8)
        )
    backward = ElementLaunch(keys=4, channels=2, group=4 if K <= 128 else 2)
    forward = ElementLaunch(keys=8 if K <= 16 else 16)
    return ElementConfig(checkpoint_tokens=16 if K <= 128 else 8, forward=forward, backward=backward)


class Tiling(NamedTuple):
    """The tile of a program; its fields are also in `ElementTraits` (kernels/tile.py)."""

    RN: int
    TN: int
    VP: int
    RC: int
    TC: int
    W: int
    BC: int
    BLOCKS: int
    SHARED: bool


@functools.lru_cache(maxsize=1024)
def tiling(launch: ElementLaunch, H: int, HV: int, K: int, V: int) -> Tiling:
    """Divide the states of all channels into tiles."""
    keys = power_of_two(K)
    RN = max(min(launch.keys, keys), keys // _LANES)
    TN = keys // RN
    TC = _LANES // TN
    shared = HV // H >= _MIN_SHARED_GROUP
    channels = HV // H if shared else HV
    RC = min(launch.channels, power_of_two(cdiv(channels, TC)))
    W = min(launch.warps, power_of_two(cdiv(channels, RC * TC)))
    BC = RC * TC * W
    blocks = H * cdiv(channels, BC) if shared else cdiv(channels, BC)
    return Tiling(RN, TN, power_of_two(V), RC, TC, W, BC, blocks, shared)


def segment_length(config: ElementConfig, tile: Tiling, N: int, T: int, processors: int) -> int:
    """Return the tokens per segment, a multiple of `config.checkpoint_tokens`; 0: sequences are not divided.

    Segments cost another pass, so without `config.segment_tokens` they are used only if fewer than 3 warps per
    processor would run.
    """
    if config.segment_tokens is not None:
        return config.segment_tokens if config.segment_tokens < T else 0
    warps = max(1, N * tile.BLOCKS * tile.W)
    if warps >= 3 * processors:
        return 0
    longest = max(1, cdiv(T, cdiv(8 * processors, warps)))
    # a power of two, so that the kernels, which have it as a constant, are not compiled for every T
    length = max(_MIN_SEGMENT, 1 << (longest.bit_length() - 1))
    unit = max(config.checkpoint_tokens, config.forward.group)
    length = cdiv(length, unit) * unit
    return length if length < T else 0


def checkpoint_slots(N: Any, T: Any, checkpoint_tokens: int, packed: bool) -> Any:
    """Return the number of slots for the states before every `checkpoint_tokens` tokens of each sequence.

    An upper bound if packed. Two more than needed, because torch.compile would specialise on a size of 0 or 1.
    """
    return (T // checkpoint_tokens + N if packed else N * ((T + checkpoint_tokens - 1) // checkpoint_tokens)) + 2
