"""Base class of mixers whose state is a model trained on the sequence: TTT-Linear, Titans.

B batch, T time, D width, H heads, E head width
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.heads import HeadShare
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.ops.fast_weights.spans import Span
from deltazoo.backends.update.base import state_dtype
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.sequences import token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.families.filter import FilterMixer


class FastWeightMixer(FilterMixer, ABC):
    """Mixer around a recurrence whose initial state is learned.

    State: the tensors of the filters; those of the model, "model i", which are 0 before the first token, because the
    recurrence then starts from the parameters; the number of tokens so far, "seen" [B] int64.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width)
        if width % heads:
            raise ConfigError(f"heads must divide width = {width}, got {heads}")
        self.heads, self.head_width = heads, width // heads

    def split_refusal(self) -> None:
        return None

    def share(self, context: Context) -> HeadShare:
        """Return the heads whose recurrence runs on this rank: all, or with context parallelism a share of them."""
        return HeadShare(self.heads, context.parallel)

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

    def spans(self, x: Tensor, state: dict[str, Tensor] | None, context: Context, chunk: int) -> Tensor:
        """Return the spans of the sequences, whose chunks start at multiples of `chunk` tokens: [N, 4] int32.

        With context parallelism the sequences are the documents, with the tokens of all ranks.
        A sequence without tokens so far is fresh: it starts from the parameters instead of their copy in the state, so
        that the parameters get a gradient.
        """
        context = context.of_line()
        tokens = token_counts(x, context)
        if context.cu_seqlens is None:
            start = torch.arange(x.shape[0], device=x.device) * x.shape[1]
        else:
            start = context.cu_seqlens[:-1].long()
        seen = torch.zeros_like(tokens) if state is None else state["seen"]
        spans = Span(start, tokens, seen % chunk, (seen == 0).long())
        # a sum, and not torch.stack, for which Inductor launches a kernel per column
        column = torch.arange(len(spans), device=x.device)
        return sum((y[:, None] * (column == i) for i, y in enumerate(spans)), torch.zeros_like(column)).int()

    def stored_model(self, state: dict[str, Tensor] | None, context: Context, dtype: torch.dtype) -> list[Tensor]:
        """Return the tensors of the model in a state for the heads of `share`; [] without a state."""
        share, names = self.share(context), [f"model {i}" for i in range(len(self.model_shapes()))]
        return [] if state is None else [share.own(state[name], 1).to(dtype) for name in names]

    def store_model(
        self, model: Iterable[Tensor], x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor],
        context: Context,
    ) -> None:  # fmt: skip
        """Write the new model of the heads of `share` and the number of tokens to `new`."""
        if state is None:
            return
        for i, tensor in enumerate(model):
            new[f"model {i}"] = write_back(state[f"model {i}"], self.share(context).all(tensor, 1))
        new["seen"] = write_back(state["seen"], state["seen"] + token_counts(x, context))


def resolve_heads(heads: int | None, width: int) -> int:
    """Return the number of heads; None: width // 64, at least 1."""
    return heads or max(1, width // 64)
