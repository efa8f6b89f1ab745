"""What a kernel supports, and its launches: grid, tiles, warps and registers; registry.py lists the kernels.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width
"""

from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.problem import SCALAR_DECAYS, Decay, Problem, Transition, architecture
from deltazoo.backends.triton.tiles import cdiv, key_tiles

_ANY_WIDTH = range(1, 2**31)
_DECAYS: tuple[Decay, ...] = (*SCALAR_DECAYS, "channel")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Support(NamedTuple):
    """The devices and problems that a kernel takes.

    Args:
        architectures: of the devices; empty: every one that the backend supports.
        transitions, decays, dtypes: of the problem. keys, values: widths per head.
        extra_keys: widths of keys with a decay per channel or an erase key. own_key: takes an erase key beside a decay
            that is not per channel. grouped: takes grouped heads.
        aligned: needs saved states of the operands' dtype, chunks of 64 tokens, and widths that are multiples of 8,
            because rows are copied by 16 bytes.
    """

    architectures: frozenset[str] = frozenset()
    transitions: tuple[Transition, ...] = ("additive", "delta", "dplr")
    decays: tuple[Decay, ...] = _DECAYS
    dtypes: tuple[torch.dtype, ...] = _FLOATS
    keys: Container[int] = range(1, 257)
    values: Container[int] = _ANY_WIDTH
    extra_keys: Container[int] = range(1, 257)
    own_key: bool = True
    grouped: bool = True
    aligned: bool = False

    def takes(self, problem: Problem, device: DeviceSpec, chunk: int) -> bool:
        """Whether the kernel takes a problem on a device with chunks of `chunk` tokens."""
        if self.architectures and architecture(device) not in self.architectures:
            return False
        if not self.is_for(problem) or problem.dtype not in self.dtypes:
            return False
        if problem.K not in self.keys or problem.V not in self.values:
            return False
        if problem.extra_keys and problem.K not in self.extra_keys:
            return False
        if problem.erase_key and not problem.by_channel and not self.own_key:
            return False
        if problem.grouped and not self.grouped:
            return False
        is_aligned = problem.saved_dtype == problem.dtype and chunk == 64 and problem.K % 8 == problem.V % 8 == 0
        return is_aligned or not self.aligned

    def is_for(self, problem: Problem) -> bool:
        """Whether the kernel computes this transition with this decay."""
        return problem.transition in self.transitions and problem.decay in self.decays

    def needs(self) -> list[str]:
        """Print the conditions."""
        needs = [f"an {' or '.join(sorted(self.architectures))} GPU"] if self.architectures else []
        if self.dtypes != _FLOATS:
            needs.append(" or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
        if self.aligned:
            needs.append("saved states of the operands' dtype, chunks of 64 tokens, widths that are multiples of 8")
        needs += [f"K {widths(self.keys)}", f"V {widths(self.values)}"]
        if self.extra_keys != self.keys:
            needs.append(f"K {widths(self.extra_keys)} with a decay per channel or an erase key")
        needs += [] if self.own_key else ["no erase key unless the decay is per channel"]
        needs += [] if self.grouped else ["H = HV"]
        return [*needs, f"transition {', '.join(self.transitions)}", f"decay {', '.join(self.decays)}"]


class Span(NamedTuple):
    """The chunks that one launch covers: one window of every sequence, divided into segments.

    Args:
        segments: segments of a window, computed in parallel. chunks: per segment; 0: the window is one segment.
        checkpoint_chunks: chunks between two checkpoints that are stored or loaded; 0: none.
        unit: chunks; windows end at multiples of it. windows: windows of a sequence. window: the index of this one.
        slots: chunk slots of the window.
        narrow_tile_min_chunks: the least chunks of a sequence that has a program for each narrow tile; 0: none has.
    """

    segments: int = 1
    chunks: int = 0
    checkpoint_chunks: int = 0
    unit: int = 1
    windows: int = 1
    window: int = 0
    slots: int = 0
    narrow_tile_min_chunks: int = 0


class Tiles(NamedTuple):
    """The tiles of a kernel's programs.

    Args:
        values: value columns per program; of prepare the block size from which the inverse works on whole chunks.
        keys: key columns per program or step; 0: all.
        heads: heads per program. narrow: value columns of the programs for long sequences; 0: there are none.
    """

    values: int = 0
    keys: int = 0
    heads: int = 1
    narrow: int = 0


class Options(NamedTuple):
    """warps: of 32 threads per program. stages: of the software pipeline. registers: the most per thread.

    overlap: the kernel may start while the one launched before it runs (programmatic dependent launch, sm_90); it waits
    for that kernel's end by `gdc_wait`.
    """

    warps: int = 4
    stages: int = 1
    registers: int | None = None
    overlap: bool = False


class Kernel(NamedTuple):
    """One version of a phase of the update.

    Args:
        name: of the function. module: the module that defines it.
        phase: the phase of the update that it computes. version: its name in a launch config.
        support: the problems and devices that it supports.
        programs: its grid, from the problem, the span and the tiles.
        tiles: from the problem and the phase's `Launch` in the config. options: from these and the tokens per chunk.
        replaces: later phases that it also computes.
        marked: the kernel launched after it, for the chunks that it marks.
        takes_rows: it can store states in the rows of gradients, or read them there (`Windows.states_in_gradients`).
    """

    name: str
    module: str
    phase: str
    version: str
    support: Support
    programs: Callable[[Problem, Span, Tiles], int]
    tiles: Callable[[Problem, Any], Tiles]
    options: Callable[[Problem, Any, int], Options]
    replaces: tuple[str, ...] = ()
    marked: "Kernel | None" = None
    takes_rows: bool = False


def per_chunk_and_key_head(problem: Problem, span: Span, tiles: Tiles) -> int:
    return int(span.slots * problem.H)


def per_chunk_and_heads(problem: Problem, span: Span, tiles: Tiles) -> int:
    return int(span.slots * cdiv(problem.HV, tiles.heads))


def per_chunk_and_key_tile(problem: Problem, span: Span, tiles: Tiles) -> int:
    return int(span.slots * cdiv(problem.HV, tiles.heads) * cdiv(problem.K, tiles.keys))


def per_sequence(problem: Problem, span: Span, tiles: Tiles) -> int:
    return int(problem.N * problem.HV)


def per_sequence_and_value_tile(problem: Problem, span: Span, tiles: Tiles) -> int:
    return int(problem.N * problem.HV * cdiv(problem.V, tiles.values))


def per_segment(problem: Problem, span: Span, tiles: Tiles) -> int:
    """Programs per segment, value head and tile of values; two per tile if long sequences have narrow tiles."""
    halves = tiles.values // tiles.narrow if span.narrow_tile_min_chunks else 1
    return int(problem.N * span.segments * problem.HV * cdiv(problem.V, tiles.values) * halves)


def per_segment_with_map(problem: Problem, span: Span, tiles: Tiles) -> int:
    return per_segment(problem, span, tiles) + per_segment_of_map(problem, span, tiles)


def per_segment_of_map(problem: Problem, span: Span, tiles: Tiles) -> int:
    return int(problem.N * span.segments * problem.HV * cdiv(problem.K, tiles.values))


def fixed_tiles(values: int = 0, keys: int = 0, narrow: int = 0) -> Callable[[Problem, Any], Tiles]:
    """Return the same tiles for each problem; keys are at most those of the problem's first key tile."""
    return lambda problem, launch: Tiles(values, min(keys, key_tiles(problem.K)[0]), 1, narrow)


def fixed_options(warps: int = 4, registers: int | None = None) -> Callable[[Problem, Any, int], Options]:
    """Return the same options for each problem."""
    return lambda problem, launch, chunk: Options(warps, 1, registers)


def widths(numbers: Container[int]) -> str:
    """Print a range of widths, or single ones."""
    if not isinstance(numbers, range):
        listed = sorted(numbers)  # type: ignore[call-overload]
        first = next((n for n in listed if n + 1 not in listed), listed[-1])
        head = f"{listed[0]} to {first}" if first > listed[0] else str(first)
        return " or ".join([head, *(str(n) for n in listed if n > first)])
    return f"{numbers[0]} to {numbers[-1]}" if numbers[-1] < 2**31 - 1 else f"{numbers[0]} and more"
