"""Which additive updates the kernels of shared keys compute, and their operands; does not import Triton.

B batch, T time, N sequences, H key heads, M value heads per key head, HV = H M, K key width, G chunk slots
"""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
_FEWEST, _MOST = 16, 64  # value heads per key head


class SharedKeyOperands(NamedTuple):
    """q, k: [B, T, H, K]; v: [B, T, HV, 1]; log_decay: [B, T, HV]; state: [N, HV, K, 1]; cu_seqlens: [N + 1] int32."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    state: Tensor | None
    cu_seqlens: Tensor | None


class SharedKeyCall(NamedTuple):
    """The arguments of the forward operator."""

    x: SharedKeyOperands
    scale: float


class SharedKeyBackwardCall(NamedTuple):
    """The arguments of the backward operator. sums: [G, C, HV]; states: [G, H, K, M], before each chunk."""

    x: SharedKeyOperands
    sums: Tensor
    states: Tensor
    d_o: Tensor
    d_final: Tensor
    scale: float


def shares_keys(dtype: torch.dtype, decay: str, H: int, HV: int, *, V: int, read: str) -> bool:
    """Whether the kernels compute an additive update: 16 bits, V = 1, 16 to 64 value heads per key head.

    Args: decay: "head", per token.
    """
    return dtype.itemsize == 2 and decay == "head" and read == "after" and V == 1 and _FEWEST <= HV // H <= _MOST
