"""The validation loss by position in the document, in ranges that end at powers of two."""

import math

import torch
from torch import Tensor

from deltazoo.blocks.parallel.ranks import Ranks
from deltazoo.blocks.training.source import Rows


class PositionSums:
    """Sums of losses by range of positions: 0, 1, 2-3, 4-7, ... up to `length` tokens."""

    def __init__(self, length: int, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.ranges = max(1, (length - 1).bit_length() + 1)
        self.sums = torch.zeros(2, self.ranges, dtype=dtype, device=device)

    def add(self, losses: Tensor, rows: Rows, whole: bool) -> Tensor:
        """Add the losses of rows, [R, T] or packed, and return their sum.

        Args: whole: whether the losses are those of all tokens. Parts of them have no ranges.
        """
        total = losses.sum(dtype=self.sums.dtype)
        if whole:
            device = self.sums.device
            index = ranges_of(rows).to(device)
            counted = (rows.targets.to(device) >= 0).flatten().to(self.sums.dtype)
            self.sums[0].index_add_(0, index, losses.flatten().to(self.sums.dtype))
            self.sums[1].index_add_(0, index, counted)
        return total

    def bits(self, ranks: Ranks) -> dict[str, float]:
        """Return the mean over all processes, in bits per token, of each range that has targets."""
        totals, counts = ranks.sum_(self.sums).tolist()
        names = ["0", *(f"{2**n // 2}-{2**n - 1}" if n > 1 else "1" for n in range(1, self.ranges))]
        return {
            name: total / count / math.log(2) for name, total, count in zip(names, totals, counts, strict=True) if count
        }


def ranges_of(rows: Rows) -> Tensor:
    """Return the index of the range of each token's position in its document, [R T] int64."""
    R, T = rows.tokens.shape
    line = torch.arange(R * T)
    if rows.cu_seqlens is None:
        positions = line % T
    else:
        bounds = rows.cu_seqlens.cpu().long()
        positions = line - bounds[torch.searchsorted(bounds, line, right=True) - 1]
    return torch.where(positions > 0, positions.clamp(min=1).double().log2().floor().long() + 1, 0)
