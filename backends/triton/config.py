"""Launch configs: a value, and a heuristic that needs no measurement. `tune` measures, and its tables go before it."""

import functools
from typing import NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltazoo.backends.errors import ConfigError

CHUNK = 64  # tokens, where nothing else is given


class Launch(BaseModel):
    """How one kernel is launched.

    Args:
        tile: value columns a program (prepare: the block from which on the inverse works on whole chunks; fused_step:
            at a time, of all that a program has).
        warps: of 32 threads; stages: of the software pipeline, which the steps of one token have not.
        keys: key columns a program, a power of two from 32 on (gradients alone; else 0, all of them); 128 bytes of them
            at least are taken, see `least_keys`.
        hopper: by the kernel that is written for Hopper GPUs, where `for_hopper` says that it takes the problem. It has
            tiles and warps of its own; the scans still take the rest for what parts hand on. That of reverse makes the
            gradients, too, where it `walks`, and nothing is launched for them.
        replays: in that launch of reverse the states are replayed, too, and nothing is launched for it either, nor is
            any of `LaunchConfig.scratch` taken. Where it walks up to 128 values, and neither with grouped heads nor by
            parts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tile: int = Field(ge=16)
    warps: int = Field(default=4, ge=1)
    stages: int = Field(default=2, ge=1)
    keys: int = Field(default=0, ge=0)
    hopper: bool = False
    replays: bool = False

    @model_validator(mode="after")
    def _products_that_are_compiled_right(self) -> Self:
        if self.keys and (self.keys < 32 or self.keys & (self.keys - 1)):
            raise ValueError(f"keys must be 0 or a power of two from 32 on, got {self.keys}")
        return self

    @model_validator(mode="after")
    def _powers_of_two(self) -> Self:
        for name, number in (("tile", self.tile), ("warps", self.warps)):
            if number & (number - 1):
                raise ValueError(f"{name} must be a power of two, got {number}")
        return self

    @model_validator(mode="after")
    def _replays_for_hopper_alone(self) -> Self:
        if self.replays and not self.hopper:
            raise ValueError("replays must be false where hopper is false, got true")
        return self


class LaunchConfig(BaseModel):
    """How the kernels of one update are launched.

    Args:
        chunk: tokens a chunk; every: chunks a checkpoint of the state.
        split: chunks a part, where a sequence is walked in parts at once; 0: in one.
        scratch: bytes that the backward may take at once for the states of chunks and their gradients.
        fused_step: None is the heuristic's for the sizes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk: int = CHUNK
    every: int = 16
    split: int = 0
    scratch: int = 5 * 2**25
    prepare: Launch = Launch(tile=16, warps=4, stages=1)
    scan: Launch = Launch(tile=64)
    replay: Launch = Launch(tile=64)
    reverse: Launch = Launch(tile=64)
    gradients: Launch = Launch(tile=64, keys=64)
    decode: Launch = Launch(tile=64, warps=4, stages=1)
    fused_step: Launch | None = None

    @model_validator(mode="after")
    def _parts_begin_at_checkpoints(self) -> Self:
        if self.split % self.every or self.split & (self.split - 1):
            raise ValueError(
                f"split must be 0 or a power of two and a multiple of every = {self.every}, got {self.split}"
            )
        return self

    @model_validator(mode="after")
    def _each_has_what_it_can(self) -> Self:
        others = [name for name, launch in self if isinstance(launch, Launch) and launch.replays and name != "reverse"]
        if others:
            raise ValueError(f"{others[0]}.replays must be false, for reverse alone replays, got true")
        for name, launch in self:
            if isinstance(launch, Launch) and launch.hopper and name not in HOPPER_WIDTHS:
                raise ValueError(f"{name}.hopper must be false, for no such kernel is for Hopper GPUs, got true")
            if isinstance(launch, Launch) and launch.keys and name != "gradients":
                raise ValueError(f"{name}.keys must be 0, for gradients alone takes some at a time, got {launch.keys}")
        if self.reverse.replays and self.split:
            raise ValueError(f"split must be 0 where reverse.replays is true, got {self.split}")
        return self

    def changed(self, **changes: object) -> Self:
        """This config with other fields, checked as one that is made anew."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

    def together(self, K: int, V: int) -> bool:
        """Whether the launch of the reverse scan makes the gradients, too."""
        return self.reverse.hopper and walks(K, V)


def power_of_two(n: int) -> int:
    """The least power of two that is no less than n."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, of: int) -> int:
    """How many times `of` it takes to hold n."""
    return -(-n // of)


def least_keys(kept: torch.dtype) -> int:
    """The fewest key columns a program of the gradients, 128 bytes of what is kept: of narrower tiles a compiler
    miscarried the addresses (docs/notes/triton-kernels/NOTES.md)."""
    return 128 // kept.itemsize


def key_tiles(K: int) -> tuple[int, int]:
    """K as one or two power-of-two tiles: 64 -> (64, 0), 128 -> (128, 0), 192 -> (128, 64), 200 -> (128, 128).

    None is narrower than 64: ptxas 12.8 miscompiled products of 16 and of 32 columns, as "miscarried" in
    docs/notes/triton-kernels/NOTES.md tells.
    """
    narrowest, widest = 64, 128
    first = min(widest, max(narrowest, power_of_two(K)))
    rest = K - first
    return first, 0 if rest <= 0 else max(narrowest, power_of_two(rest))


def warps_apart(warps: int, numbers: int) -> int:
    """So many warps, but no more than hold 16 bytes a thread of so many float32 numbers that change in place: several
    with the same number might load it after one of them has stored another."""
    return max(1, min(warps, numbers // 128))


class Problem(NamedTuple):
    """What a launch config may depend on. N sequences, T tokens in a row, H key heads, HV value heads, K, V widths;
    precise: what feeds back into the state is kept in two terms."""

    device: str
    dtype: torch.dtype
    N: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    delta: bool
    own: bool
    decayed: bool
    packed: bool
    precise: bool = False

    @property
    def kept(self) -> torch.dtype:
        """What the backward keeps states and their gradients in."""
        return torch.float32 if self.precise else self.dtype


class Device(NamedTuple):
    """What the heuristic knows of a device; hopper: of compute capability 9."""

    name: str
    processors: int
    shared_memory: int
    hopper: bool = False


@functools.cache
def device_of(index: int | None) -> Device:
    """Read a CUDA device's properties once; a stand-in where there is none (the interpreter)."""
    if index is None or not torch.cuda.is_available():
        return Device("interpreter", 1, 2**20)
    found = torch.cuda.get_device_properties(index)
    shared_memory = int(getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block))
    return Device(found.name, found.multi_processor_count, shared_memory, found.major == 9)


def for_hopper(kernel: str, device: Device, problem: "Problem", C: int) -> bool:
    """Whether there is a kernel for Hopper GPUs that takes a problem: operands, and what the backward keeps, of the
    same 16 bits, no erase key of its own, chunks of 64 tokens, and keys and values a head as HOPPER_WIDTHS says."""
    alike = problem.dtype == problem.kept and problem.dtype.itemsize == 2
    if kernel not in HOPPER_WIDTHS or not device.hopper or not alike or problem.own or C != 64:
        return False
    keys, values = HOPPER_WIDTHS[kernel]
    return problem.K in keys and problem.V in values and problem.K % 8 == problem.V % 8 == 0


def by_hopper(kernel: str, launch: Launch) -> Launch:
    """The launch of a kernel by its code for Hopper GPUs, and by `launch` where that is not what runs."""
    launch = Launch(tile=64, keys=64, stages=1) if kernel == "gradients" else launch
    return launch.model_copy(update={"hopper": True})


def may_replay(problem: "Problem") -> bool:
    """Whether a launch of the reverse scan for Hopper GPUs may replay the states, too: where it walks, and nobody else
    has a share of a key head's gradients."""
    return problem.H == problem.HV and problem.V <= 128 and walks(problem.K, problem.V)


def walks(K: int, V: int) -> bool:
    """Whether the reverse scan for Hopper GPUs is one with the gradients: registers hold no more keys, fewer are half
    of what it computes, and a program has 128 values."""
    return 64 < K <= 128 and (V <= 128 or V % 128 == 0)


class Widths(NamedTuple):
    """Keys and values a head, multiples of 8, for rows are copied by 16 bytes."""

    keys: range
    values: range


_ANY, _KEYS = range(1, 2**31), range(1, 257)
_OF_SCANS = Widths(_KEYS, range(33, 513))
HOPPER_WIDTHS = {
    "prepare": Widths(_KEYS, _ANY),
    "scan": _OF_SCANS,
    "replay": _OF_SCANS,
    "reverse": _OF_SCANS,
    "gradients": Widths(_ANY, range(1, 513)),
}


def heuristic(problem: Problem, device: Device, split: int | None = None) -> LaunchConfig:
    """A config from the sizes alone: right everywhere, and near the best on a Hopper GPU for K = V = 128.

    Args: split: the chunks a part, where it is known.
    Source: docs/notes/triton-kernels/NOTES.md.
    """
    scan, gradients = Launch(tile=64), Launch(tile=64, keys=64)
    if problem.dtype == torch.float32:
        scan, gradients = Launch(tile=32, stages=1), Launch(tile=32, stages=1, keys=32)
    elif problem.precise:
        scan, gradients = Launch(tile=64, stages=1), Launch(tile=32, stages=1, keys=32)
    elif problem.K <= 128 and problem.V > 64 and device.shared_memory >= 220 * 1024:
        # one program a processor, loads two chunks ahead; a third key leaves room for one chunk ahead
        scan = Launch(tile=128, warps=8, stages=2 if problem.own else 3)
        # both V tiles at once where two programs a processor still fit: without decay their buffers are wider, and
        # without erases three programs fit
        gradients = Launch(tile=64, keys=64, stages=3 if problem.decayed and problem.delta else 2)
    chosen = {"prepare": LaunchConfig().prepare, "scan": scan, "replay": scan, "reverse": scan, "gradients": gradients}
    # what those for every GPU do: gates alone, and few values without erases, where smaller programs are through sooner
    others = [] if problem.delta else ["prepare"]
    if problem.V <= 64 and not problem.delta:
        others += ["scan", "replay"]
    for kernel, launch in chosen.items():
        if for_hopper(kernel, device, problem, CHUNK) and kernel not in others:
            chosen[kernel] = by_hopper(kernel, launch)
    split = _split(problem, device) if split is None else split
    if chosen["reverse"].hopper and not split and may_replay(problem) and _busy(problem, device):
        chosen["reverse"] = chosen["reverse"].model_copy(update={"replays": True})
    alone = problem.N * problem.HV < 64
    return LaunchConfig(
        every=checkpoint_distance(problem.packed),
        split=split,
        scratch=2**29 if split else LaunchConfig().scratch,
        **chosen,
        decode=Launch(tile=16, warps=2, stages=1) if alone else Launch(tile=64, warps=4, stages=1),
        # a warp 32 keys, so that two tiles stay in registers
        fused_step=Launch(tile=64, warps=max(1, min(8, power_of_two(problem.K) // 32)), stages=1),
    )


def checkpoint_distance(packed: bool) -> int:
    """Chunks a checkpoint: fewer in packs, whose segments may each need a checkpoint's chunks of every sequence."""
    return 8 if packed else 16


def _busy(problem: Problem, device: Device) -> bool:
    """Whether a program a sequence and head keeps nearly all of the device busy to the end: else a replay by itself,
    which has more programs, is through with it sooner."""
    programs = problem.N * problem.HV
    return programs >= 0.9 * cdiv(programs, device.processors) * device.processors


def _split(problem: Problem, device: Device) -> int:
    """Chunks a part where sequences, heads and tiles of values leave most of the device idle: a power of two, or 0."""
    programs = problem.N * problem.HV * cdiv(problem.V, 128)
    chunks = problem.T // 64 // (max(problem.N, 1) if problem.packed else 1)
    if programs * 5 >= device.processors * 2 or chunks < 32:
        return 0
    parts = max(2, device.processors // max(programs, 1))
    return max(16, power_of_two(cdiv(chunks, parts)))


def launch_config(problem: Problem, index: int | None) -> LaunchConfig:
    """The launch config for a problem on a CUDA device: the tables', and the heuristic's where they say nothing."""
    from deltazoo.backends.triton.table import tuned_config  # which imports the values of this file

    return tuned_config(problem, index)


@functools.lru_cache(maxsize=4096)
def given_config(config: str, problem: Problem, index: int | None) -> LaunchConfig:
    """A launch config given as JSON, for a problem on a CUDA device. Raises: ConfigError as `checked`."""
    return checked(parse(config), problem, device_of(index))


def checked(config: LaunchConfig, problem: Problem, device: Device) -> LaunchConfig:
    """Raises: ConfigError where a config asks for a kernel for Hopper GPUs that does not take the problem."""
    if config.reverse.replays and not may_replay(problem):
        raise ConfigError(
            "reverse.replays must be false where H is not HV, V is above 128, or K is not 65 to 128, got "
            f"H = {problem.H}, HV = {problem.HV}, V = {problem.V} and K = {problem.K}."
        )
    for kernel, (keys, values) in HOPPER_WIDTHS.items():
        if getattr(config, kernel).hopper and not for_hopper(kernel, device, problem, config.chunk):
            raise ConfigError(
                f"{kernel}.hopper must be false but on a Hopper GPU, for operands of 16 bits whose states are kept in "
                f"the same dtype, without an erase key, in chunks of 64 tokens and with {keys[0]} to {keys[-1]} keys "
                f"and {values[0]} to {values[-1]} values a head, multiples of 8, got {device.name}, {problem.dtype} "
                f"kept in {problem.kept}, {'an' if problem.own else 'no'} erase key, chunks of {config.chunk}, "
                f"{problem.K} keys and {problem.V} values."
            )
    return config


@functools.lru_cache(maxsize=1024)
def parse(config: str) -> LaunchConfig:
    """Read a config given as JSON, once."""
    return LaunchConfig.model_validate_json(config)
