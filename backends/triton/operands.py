"""What the operators take, keep and return, and the sizes that follow, where Triton itself is not needed."""

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
    before the update. precise: what feeds back into the state is kept in two terms. tied: w is b, and is not given.
    config: a LaunchConfig as JSON; "" takes the table's, else the heuristic's."""

    delta: bool
    erase_early: bool
    read_early: bool
    precise: bool
    tied: bool
    scale: float
    config: str = ""

    def terms(self, dtype: torch.dtype) -> int:
        """How many numbers of a dtype keep what feeds back into the state."""
        return 2 if self.precise and dtype != torch.float32 else 1

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """What the backward keeps states and their gradients in."""
        return dtype if self.terms(dtype) == 1 else torch.float32

    def shares(self, x: ScanOperands) -> bool:
        """Whether dv tells the backward du: dv = w du, and either w is b, held away from 0, or there is no w. Not in
        float16, where a b near 0 would take du below the smallest number."""
        whole = x.w is None or (self.tied and x.q.dtype != torch.float16)
        return self.delta and whole and self.kept(x.q.dtype) == x.v.dtype

    def keeps_du(self, x: ScanOperands) -> bool:
        """Whether the backward keeps du beside dv: where the gradients need it, and dv does not tell it."""
        return (self.delta or x.w is not None) and not self.shares(x)

    def least(self, dtype: torch.dtype) -> float:
        """How far the backward holds b away from 0: less than EFLA and Longhorn leave of a b for long keys."""
        return 2.0**-12 if self.kept(dtype) == torch.float16 else 2.0**-60

    def writes(self, x: ScanOperands) -> ScanOperands:
        """The operands with the w that the kernels take."""
        return x._replace(w=x.b) if self.tied else x


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
        """Places for checkpoints, one every so many chunks of each sequence, the first not counted; two more than there
        may be, for none or one would be cases of their own to torch.compile."""
        if self.packed:
            return self.slots // every + 2
        empty = isinstance(self.T, int) and self.T == 0  # a symbol is not asked: the answer would be a guard
        return 2 if empty else self.N * ((self.T - 1) // (self.C * every)) + 2


class Prepared(NamedTuple):
    """What each chunk decides alone: gates [slots, HV, 3, C]; decay_bounds [slots, HV]; with an erase, wy_tiles
    [slots, HV, terms, C, C + 8], see kernels/wy_tiles.py."""

    gates: Tensor
    decay_bounds: Tensor
    wy_tiles: Tensor

    @classmethod
    def empty(cls, x: ScanOperands, kind: ScanKind, s: Sizes, keep: bool) -> Self:
        """Room for what is to be prepared; keep: for a backward, too."""
        terms = kind.terms(x.q.dtype)
        half = keep and terms == 1 and x.q.dtype == torch.bfloat16
        return cls(
            x.q.new_empty((s.slots, s.HV, 3, s.C), dtype=torch.float32),
            x.q.new_empty((s.slots, s.HV), dtype=torch.float32),
            x.q.new_empty(
                (s.slots if kind.delta else 0, s.HV, terms, s.C, s.C + 8), dtype=torch.float16 if half else x.q.dtype
            ),
        )

    @classmethod
    def nothing(cls, like: Tensor) -> Self:
        """Where no backward needs it."""
        return cls(*(like.new_empty(0, dtype=torch.float32) for _ in cls._fields))


class Gradients(NamedTuple):
    """Of the operands, by their names; None where there is no such operand, or none that counts."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    b: Tensor | None
    w: Tensor | None
    e: Tensor | None
    state: Tensor | None

    @classmethod
    def empty(cls, x: ScanOperands, kind: ScanKind) -> Self:
        """Room for the gradients: in the operands' dtype, those of the gates in float32."""
        counts = cls.which(x, kind)

        def like(n: int, dtype: torch.dtype | None = None) -> Any:
            y = x[n]
            return None if y is None or not counts[n] else y.new_empty(y.shape, dtype=dtype)

        single = torch.float32
        return cls(like(0), like(1), like(2), like(3, single), like(4, single), like(5, single), like(6), like(7))

    @staticmethod
    def which(x: ScanOperands, kind: ScanKind) -> tuple[bool, ...]:
        """Whether there is one of each operand."""
        b, w = kind.delta and x.b is not None, x.w is not None and not kind.tied
        return True, True, True, x.log_decay is not None, b, w, x.e is not None, x.state is not None


def ready(x: Tensor) -> Tensor:
    """Contiguous, and from 16 bytes on, as the kernels' wide loads want."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
