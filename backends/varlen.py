"""Where the tokens of a pack stand."""

import torch
from torch import Tensor


def sequence_index(cu_seqlens: Tensor, T: int) -> Tensor:
    """The sequence that each token of a pack belongs to: [T] int64. cu_seqlens: [N + 1] int32."""
    time_T = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], time_T, right=True)
