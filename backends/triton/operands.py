"""What the operators take, and the sizes that follow from it, where Triton itself is not needed."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class ScanOperands(NamedTuple):
    """q, k, e [B, T, H, K]; v [B, T, HV, V]; log_decay [B, T, HV] or [HV]; b (erase), w (write) [B, T, HV];
    state [N, HV, K, V]; cu_seqlens [N + 1] int32. None: no such operand; with delta, b and w of None are 1, e is k."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    b: Tensor | None = None
    w: Tensor | None = None
    e: Tensor | None = None
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None


class ScanKind(NamedTuple):
    """delta: with an erase term. erase_early: it reads the state before the decay. read_early: q reads the state
    before the update. precise: what feeds back into the state is kept in two terms. config: a LaunchConfig as JSON;
    "" takes the table's, else the heuristic's."""

    delta: bool
    erase_early: bool
    read_early: bool
    precise: bool
    scale: float
    config: str = ""

    def terms(self, dtype: torch.dtype) -> int:
        """How many numbers of a dtype keep what feeds back into the state."""
        return 2 if self.precise and dtype != torch.float32 else 1


class Sizes(NamedTuple):
    """N sequences, T tokens in a row of the batch, slots: the most chunks of C tokens there may be, H key heads,
    HV value heads, K key width, V value width; packed: with cu_seqlens."""

    N: Any
    T: Any
    slots: Any
    H: int
    HV: int
    K: int
    V: int
    C: int
    packed: bool

    @classmethod
    def of(cls, x: ScanOperands, C: int) -> Self:
        """Read the sizes off the operands; T, B and N may be symbols."""
        B, T, H, K = x.q.shape
        HV, V = x.v.shape[2:]
        if x.cu_seqlens is None:
            return cls(B, T, B * ((T + C - 1) // C), H, HV, K, V, C, False)
        N = x.cu_seqlens.shape[0] - 1
        return cls(N, T, T // C + N, H, HV, K, V, C, True)

    def places(self, every: int) -> Any:
        """How many checkpoints there may be, one every so many chunks of each sequence."""
        if self.packed:
            return self.slots // every + self.N
        chunks = (self.T + self.C - 1) // self.C
        return self.N * ((chunks + every - 1) // every)
