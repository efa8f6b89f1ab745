"""The launches of an elementwise update in order; does not import Triton.

Programs own a block of channels of one sequence. If these are too few for the GPU, each sequence is divided into
segments: one pass computes the map of each segment from the state at its start to the one at its end, a second combines
them in order, and the last computes the results of all segments in parallel. The backward does the same in reverse.

N sequences, T tokens, H key heads, HV value heads (channels), K key width, V value width
"""

import functools
from typing import NamedTuple

from deltazoo.backends.triton.element.config import (
    ElementConfig,
    Tiling,
    element_heuristic,
    parse_element,
    segment_length,
    tiling,
)
from deltazoo.backends.triton.tiles import cdiv

COMBINED = 256  # elements of the state that a program combines
_TAIL_PROGRAMS = 64


class ElementSizes(NamedTuple):
    """N: sequences. T: tokens per row of the batch. packed: with cu_seqlens."""

    N: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    packed: bool


class ElementStep(NamedTuple):
    """One launch of a plan: its step, kernel, number of programs, and warps per program."""

    step: str
    kernel: str
    programs: int
    warps: int


class ElementPlan(NamedTuple):
    """The launches of an update.

    Args:
        forward_tile, backward_tile: of the programs. segment_tokens: tokens per segment; 0: no segments. segments: of
            each sequence, an upper bound if packed.
    """

    sizes: ElementSizes
    config: ElementConfig
    forward_tile: Tiling
    backward_tile: Tiling
    segment_tokens: int
    segments: int
    forward: tuple[ElementStep, ...]
    backward: tuple[ElementStep, ...]

    @property
    def launches(self) -> tuple[ElementStep, ...]:
        """All launches, the forward's first."""
        return self.forward + self.backward


@functools.lru_cache(maxsize=1024)
def element_plan(sizes: ElementSizes, config: str, processors: int, grad: bool) -> ElementPlan:
    """Decide the segments and list the launches. config: an ElementConfig as JSON; "": that of the heuristic."""
    N, T, H, HV, K, V, packed = sizes
    chosen = parse_element(config) if config else element_heuristic(K, V)
    tile, backward_tile = tiling(chosen.forward, H, HV, K, V), tiling(chosen.backward, H, HV, K, V)
    segment_tokens = segment_length(chosen, tile, N, T, processors)
    segments = cdiv(T, segment_tokens) if segment_tokens else 1

    def scan(step: str, kernel: str, tile: Tiling = tile) -> ElementStep:
        return ElementStep(step, kernel, N * segments * tile.BLOCKS, tile.W)

    combine = ElementStep("combine", "element_combine_kernel", N * cdiv(HV * K * V, COMBINED), 4)
    tail = (ElementStep("tail", "zero_tail_kernel", _TAIL_PROGRAMS, 4),) if packed else ()
    maps = scan("segment ends", "element_scan_kernel")
    before = (maps, combine) if segment_tokens else ()
    forward = (*before, scan("scan", "element_scan_kernel"), *tail)
    reverse = scan("segment gradients", "element_reverse_kernel")
    after = (maps, reverse, combine._replace(step="combine backward")) if segment_tokens else ()
    backward = (*after, scan("backward", "element_backward_kernel", backward_tile), *tail) if grad else ()
    return ElementPlan(
        sizes, chosen, tile, backward_tile, segment_tokens, segments,
        *(tuple(step for step in steps if step.programs) for steps in (forward, backward)),
    )  # fmt: skip
