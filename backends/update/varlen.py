"""Packed sequences: number of sequences, index of each token's sequence, and validity of the boundaries.

N sequences are concatenated along T, with B = 1. `cu_seqlens` [N + 1] int32 holds their boundaries.
"""

import itertools

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ShapeError


def sequence_index(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return the index of the sequence that each row belongs to, [T] int64; N for rows after cu_seqlens[-1]."""
    bounds = cu_seqlens.long()  # not a view: torch 2.11's Inductor ignores the offset of a view in searchsorted
    time_T = torch.arange(T, device=bounds.device)
    return torch.searchsorted(bounds, time_T, right=True) - 1  # bounds[0] = 0


def valid_sequence_index(cu_seqlens: Tensor, T: int) -> Tensor:
    """Like `sequence_index`, but below N also for rows after cu_seqlens[-1], so that it indexes tensors of N rows."""
    return sequence_index(cu_seqlens, T).clamp(max=max(cu_seqlens.shape[0] - 2, 0))


def is_in_sequence(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return whether each row belongs to a sequence, [T] bool; rows after cu_seqlens[-1] do not."""
    return torch.arange(T, device=cu_seqlens.device) < cu_seqlens[-1]


def sequence_count(cu_seqlens: Tensor | None, B: int) -> int:
    """Return the number of sequences: B, or N if they are packed. Raises: ShapeError."""
    if cu_seqlens is None:
        return B
    if B != 1:
        raise ShapeError(f"packed sequences (cu_seqlens) need B = 1, got B = {B}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ShapeError(f"cu_seqlens must have shape [N + 1], got {list(cu_seqlens.shape)}")
    return cu_seqlens.shape[0] - 1


def packing_problems(cu_seqlens: Tensor | None, T: int) -> list[str]:
    """Describe the errors in the boundaries; [] if there are none. Synchronises with the device of cu_seqlens."""
    if cu_seqlens is None:
        return []
    bounds: list[int] = cu_seqlens.tolist()
    ascending = all(left <= right for left, right in itertools.pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != T or not ascending:
        shown = bounds if len(bounds) <= 8 else [*bounds[:4], "...", *bounds[-3:]]
        return [f"cu_seqlens must rise from 0 to T = {T}, got {shown}."]
    return []
