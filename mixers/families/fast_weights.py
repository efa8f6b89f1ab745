"""What mixers share whose state is a model that learns: where it starts, and how it is write_back.

B batch, T time, D width, H heads, E head width
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from deltazoo.backends.base import state_dtype
from deltazoo.backends.errors import ConfigError
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.sequences import token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.families.filter import FilterMixer
from deltazoo.mixers.parts.token_scan import TokenScan


class LearnedMixer(FilterMixer, ABC):
    """A mixer around a `TokenScan` whose state starts from learned parameters: tensors "model i" and "seen" [B] int64."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width)
        if width % heads:
            raise ConfigError(f"heads must divide width = {width}, got {heads}")
        self.heads, self.head_width = heads, width // heads

    @abstractmethod
    def first(self) -> list[Tensor]:
        """The model before the first token, without a batch."""

    def init_state(self, batch: int, capacity: int | None = None) -> dict[str, Tensor]:
        state = super().init_state(batch, capacity)
        like = next(self.parameters())
        first = [part.detach().to(state_dtype(part.dtype)).repeat(batch, *[1] * part.dim()) for part in self.first()]
        state |= {f"model {i}": part for i, part in enumerate(first)}
        return state | {"seen": like.new_zeros(batch, dtype=torch.int64)}

    def seen(self, state: dict[str, Tensor] | None) -> Tensor | None:
        """How many tokens each sequence has had."""
        return None if state is None else state["seen"]

    def looped(
        self,
        loop: TokenScan,
        x: Tensor,
        operands: list[Tensor],
        parameters: list[Tensor],
        state: dict[str, Tensor] | None,
        after: dict[str, Tensor],
        context: Context,
    ) -> Tensor:
        """Run the loop from the state, or from the start; a sequence that has had no token starts from the parameters,
        so that they have a gradient."""
        first = self.first()
        rows = x.shape[0] if context.cu_seqlens is None else context.cu_seqlens.shape[0] - 1
        fresh = [part.to(operands[-1].dtype).expand(rows, *part.shape) for part in first]
        wide = [part.to(operands[-1].dtype) for part in parameters]
        if state is None:
            return loop([part.contiguous() for part in fresh], operands, wide, context)[0]
        seen = state["seen"]
        held = [state[f"model {i}"] for i in range(len(first))]
        start = [
            torch.where((seen == 0).view(-1, *[1] * (h.dim() - 1)), f, h.to(f.dtype))
            for f, h in zip(fresh, held, strict=True)
        ]
        o, new = loop(start, operands, wide, context)
        pairs = [*((f"model {i}", h, n) for i, (h, n) in enumerate(zip(held, new, strict=True)))]
        for name, old, value in [*pairs, ("seen", seen, seen + token_counts(x, context))]:
            kept = write_back(old, value)
            assert kept is not None
            after[name] = kept
        return o


def heads_of(heads: int | None, width: int) -> int:
    """The number of heads; None: width // 64, at least 1."""
    return heads or max(1, width // 64)
