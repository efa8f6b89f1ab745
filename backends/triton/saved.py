"""What the forward computes per chunk and stores for the backward; does not import Triton.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, C chunk
"""

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from deltazoo.backends.triton.operands import ScanKind, ScanOperands, Sizes

Layout = tuple[tuple[Any, ...], torch.dtype]  # the shape, with sizes that may be symbolic, and dtype of a tensor


class Prepared(NamedTuple):
    """The results of prepare: what depends on a single chunk.

    Args:
        gates: [slots, HV, 3, C], cumulative log2 decay, scaled erase strength, write strength; for a decay per channel
            [slots, HV, K + C], the decay over the chunk and the write strength; DPLR, which has no write strength: in
            its first place 1 for a chunk of strong decays, which the portable kernels compute.
        decay_bounds: [slots, HV], upper bound of the log2 decay over the chunk.
        wy_tiles: [slots, HV, terms, C, C + 8], T and P (kernels/wy_tiles.py); empty without an erase term, unless the
            decay is per channel. DPLR: two tiles (kernels/channel/pair_prepare.py).
        scaled: [2, 3 or 4, B, T, HV, K], for a decay per channel the scaled operands (kernels/channel/prepare.py); else
            empty.
        strengths: [B, T, HV], with `reparam` the strength of erase and write, for the backward; else empty.
        slopes: [slots, HV, 2, C], with `reparam` its derivatives (kernels/step_size.py), for the backward; else empty.
    """

    gates: Tensor
    decay_bounds: Tensor
    wy_tiles: Tensor
    scaled: Tensor
    strengths: Tensor
    slopes: Tensor

    @classmethod
    def empty(cls, x: ScanOperands, kind: ScanKind, s: Sizes, save: bool) -> Self:
        """Allocate the results. save: the backward reads them, too."""
        return cls(*(x.q.new_empty(shape, dtype=dtype) for shape, dtype in cls.layout(x, kind, s, save)))

    @staticmethod
    def layout(x: ScanOperands, kind: ScanKind, s: Sizes, save: bool) -> list[Layout]:
        """Return the shapes and dtypes of the results."""
        terms = kind.terms(x.q.dtype)
        half = kind.saves_16_bits or (save and terms == 1 and x.q.dtype == torch.bfloat16)
        channel = x.decay == "channel"
        derivatives = save and kind.reparam != "none"
        tiles = (s.slots if kind.delta or channel else 0, s.HV, terms + (x.v_key is not None), s.C, s.C + 8)
        return [
            ((s.slots, s.HV, s.K + s.C) if channel else (s.slots, s.HV, 3, s.C), torch.float32),
            ((s.slots, s.HV), torch.float32),
            (tiles, torch.float16 if half else x.q.dtype),
            ((2 + kind.delta + (x.v_key is not None), *x.v.shape[:3], s.K) if channel else (0,), x.q.dtype),
            (tuple(x.v.shape[:3]) if derivatives else (0,), torch.float32),
            ((s.slots, s.HV, 2, s.C) if derivatives else (0,), torch.float32),
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
    def of(cls, saved: Tensor, x: ScanOperands, kind: ScanKind, s: Sizes, every: int) -> Self:
        """Return the views of a tensor that `empty` allocated. every: chunks between two checkpoints."""
        views, start = [], 0
        for shape, dtype in cls._layout(x, kind, s, every):
            size = math.prod(shape) * dtype.itemsize
            views.append(saved[start : start + size].view(dtype).view(shape))
            start += _aligned(size)
        *prepared, checkpoints = views
        return cls(Prepared(*prepared), checkpoints)

    @classmethod
    def empty(cls, x: ScanOperands, kind: ScanKind, s: Sizes, every: int) -> Tensor:
        """Allocate one tensor of bytes for all of them."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in cls._layout(x, kind, s, every)]
        return x.q.new_empty(sum(map(_aligned, sizes)), dtype=torch.uint8)

    @staticmethod
    def _layout(x: ScanOperands, kind: ScanKind, s: Sizes, every: int) -> list[Layout]:
        checkpoints = (s.checkpoint_slots(every), s.HV, s.V, s.K)
        return [*Prepared.layout(x, kind, s, True), (checkpoints, kind.saved_dtype(x.q.dtype))]


def _aligned(size: Any) -> Any:
    """Round bytes up to a multiple of 512, as the caching allocator of torch does."""
    return (size + 511) // 512 * 512
