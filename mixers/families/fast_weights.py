"""Base class of mixers whose state is a model trained on the sequence: TTT-Linear, Titans.

B batch, T time, D width, H heads, E head width
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update.base import state_dtype
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.sequences import token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.families.filter import FilterMixer
from deltazoo.mixers.parts.memory.token_scan import TokenScan


class FastWeightMixer(FilterMixer, ABC):
    """Mixer around a `TokenScan` whose initial state is learned.

    State: the tensors of the filters; those of the model, "model i", which are 0 before the first token, because the
    scan then starts from the parameters; the number of tokens so far, "seen" [B] int64.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width)
        if width % heads:
            raise ConfigError(f"heads must divide width = {width}, got {heads}")
        self.heads, self.head_width = heads, width // heads

    def split_refusal(self) -> str:
        return "has a recurrence that is not linear in its state: a piece has no map that other ranks could combine"

    @abstractmethod
    def initial_model(self) -> list[Tensor]:
        """Return the model before the first token, without a batch dimension."""

    @abstractmethod
    def model_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors of the model."""

    def initial_state(self, batch: int, capacity: int | None, like: Tensor) -> dict[str, Tensor]:
        state = super().initial_state(batch, capacity, like)
        for i, shape in enumerate(self.model_shapes()):
            state[f"model {i}"] = like.new_zeros(batch, *shape, dtype=state_dtype(like.dtype))
        return state | {"seen": like.new_zeros(batch, dtype=torch.int64)}

    def token_count(self, state: dict[str, Tensor] | None) -> Tensor | None:
        """Return the number of tokens that each sequence has processed, [B]."""
        return None if state is None else state["seen"]

    def scan(
        self,
        token_scan: TokenScan,
        x: Tensor,
        operands: list[Tensor],
        parameters: list[Tensor],
        state: dict[str, Tensor] | None,
        new: dict[str, Tensor],
        context: Context,
    ) -> Tensor:
        """Run the scan from the state, or from the initial model.

        A sequence without tokens so far starts from the parameters instead of their copy in the state, so that the
        parameters get a gradient.
        """
        dtype = operands[-1].dtype
        initial = self.initial_model()
        rows = x.shape[0] if context.cu_seqlens is None else context.cu_seqlens.shape[0] - 1
        fresh = [tensor.to(dtype).expand(rows, *tensor.shape) for tensor in initial]
        parameters = [parameter.to(dtype) for parameter in parameters]
        if state is None:
            return token_scan([tensor.contiguous() for tensor in fresh], operands, parameters, context)[0]
        seen = state["seen"]
        old = [state[f"model {i}"] for i in range(len(initial))]
        start = [
            torch.where((seen == 0).view(-1, *[1] * (stored.dim() - 1)), first, stored.to(first.dtype))
            for first, stored in zip(fresh, old, strict=True)
        ]
        o, model = token_scan(start, operands, parameters, context)
        updates = [*((f"model {i}", *pair) for i, pair in enumerate(zip(old, model, strict=True)))]
        for name, old_tensor, new_tensor in [*updates, ("seen", seen, seen + token_counts(x, context))]:
            new[name] = write_back(old_tensor, new_tensor)
        return o


def resolve_heads(heads: int | None, width: int) -> int:
    """Return the number of heads; None: width // 64, at least 1."""
    return heads or max(1, width // 64)
