"""What the forward computes per chunk and stores for the backward; does not import Triton.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from deltazoo.backends.triton.problem import Problem

Layout = tuple[tuple[Any, ...], torch.dtype]  # the shape, with sizes that may be symbolic, and dtype of a tensor


class Prepared(NamedTuple):
    """The results of prepare: what depends on a single chunk.

    Args:
        gates: [slots, HV, 3, C], cumulative log2 decay, scaled erase strength, write strength; for a decay per channel
            [slots, HV, K + C], the decay over the chunk and the write strength; DPLR, which has no write strength: in
            its first place 1 for a chunk of strong decays, which the portable kernels compute.
        decay_bounds: [slots, HV], upper bound of the log2 decay over the chunk.
        wy_tiles: [slots, HV, terms, C, C + 8], T and P (kernels/portable/wy_tiles.py); empty without an erase term,
        unless the
            decay is per channel. DPLR: two tiles (kernels/portable/channel/dplr_prepare.py).
        scaled: [2, 3 or 4, B, T, HV, K], for a decay per channel the scaled operands
        (kernels/portable/channel/prepare.py); else
            empty.
        strengths: [B, T, HV], with `reparam` the strength of erase and write, for the backward; else empty.
        slopes: [slots, HV, 2, C], with `reparam` its derivatives (device/step_size.py), for the backward; else empty.
    """

    gates: Tensor
    decay_bounds: Tensor
    wy_tiles: Tensor
    scaled: Tensor
    strengths: Tensor
    slopes: Tensor

    @classmethod
    def empty(cls, like: Tensor, problem: Problem, C: int, save: bool) -> Self:
        """Allocate the results on the device of a tensor. save: the backward reads them, too."""
        return cls(*(like.new_empty(shape, dtype=dtype) for shape, dtype in cls.layout(problem, C, save)))

    @staticmethod
    def layout(p: Problem, C: int, save: bool) -> list[Layout]:
        """Return the shapes and dtypes of the results."""
        slots = p.slots(C)
        half = p.saves_16_bits or (save and p.terms == 1 and p.dtype == torch.bfloat16)
        derivatives = save and p.reparam != "none"
        tiles = (slots if p.delta or p.by_channel else 0, p.HV, p.terms + p.dplr, C, C + 8)
        scaled = (2 + p.delta + p.dplr, p.rows, p.T, p.HV, p.K)
        return [
            ((slots, p.HV, p.K + C) if p.by_channel else (slots, p.HV, 3, C), torch.float32),
            ((slots, p.HV), torch.float32),
            (tiles, torch.float16 if half else p.dtype),
            (scaled if p.by_channel else (0,), p.dtype),
            ((p.rows, p.T, p.HV) if derivatives else (0,), torch.float32),
            ((slots, p.HV, 2, C) if derivatives else (0,), torch.float32),
        ]

    def derivatives(self) -> tuple[Tensor | None, Tensor | None]:
        """Return strengths and slopes; None if empty."""
        return (self.strengths, self.slopes) if self.slopes.dim() > 1 else (None, None)


class Saved(NamedTuple):
    """What the forward stores for the backward: the fields of `Prepared`, and checkpoints [slots, HV, V, K] of S^T.

    They are views of one tensor of bytes, because in eager calls each tensor that is returned, saved and passed to the
    backward costs host time.
    """

    prepared: Prepared
    checkpoints: Tensor

    @classmethod
    def of(cls, saved: Tensor, problem: Problem, C: int, distance: int) -> Self:
        """Return the views of a tensor that `empty` allocated. distance: chunks between two checkpoints."""
        *prepared, checkpoints = views(saved, cls._layout(problem, C, distance))
        return cls(Prepared(*prepared), checkpoints)

    @classmethod
    def empty(cls, like: Tensor, problem: Problem, C: int, distance: int) -> Tensor:
        """Allocate one tensor of bytes for all of them, on the device of a tensor."""
        return allocate(like, cls._layout(problem, C, distance))

    @staticmethod
    def _layout(p: Problem, C: int, distance: int) -> list[Layout]:
        checkpoints = (p.checkpoint_slots(C, distance), p.HV, p.V, p.K)
        return [*Prepared.layout(p, C, True), (checkpoints, p.saved_dtype)]


def allocate(like: Tensor, layout: list[Layout]) -> Tensor:
    """Allocate one tensor of bytes for several tensors, on the device of a tensor."""
    return like.new_empty(
        sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in layout), dtype=torch.uint8
    )


def views(buffer: Tensor, layout: list[Layout]) -> list[Tensor]:
    """Return the tensors in a buffer that `allocate` returned."""
    result, start = [], 0
    for shape, dtype in layout:
        size = math.prod(shape) * dtype.itemsize
        result.append(buffer[start : start + size].view(dtype).view(shape))
        start += _aligned(size)
    return result


def _aligned(size: Any) -> Any:
    """Round bytes up to a multiple of 512, as the caching allocator of torch does."""
    return (size + 511) // 512 * 512
