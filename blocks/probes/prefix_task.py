"""PrefixTask: a task with an answer for every prefix of a sequence, which can be trained with a growing length."""

from abc import ABC

from pydantic import Field
from torch import Tensor

from deltazoo.blocks.probes.task import Batch, Task


class PrefixTask(Task, ABC):
    """A task with answers at all lengths; the evaluation scores those in the last half of the sequence.

    Args:
        curriculum: tokens at which training begins. The length grows linearly to `length` in the first half of the
            steps; the layers are causal, so that it suffices to leave out the answers beyond it. 0: always `length`.
    """

    curriculum: int = Field(default=0, ge=0)

    def scored_length(self, step: Tensor) -> Tensor | None:
        if not self.curriculum:
            return None
        return self.curriculum + (self.length - self.curriculum) * (2 * step / self.steps).clamp(max=1)

    def last_half(self, batch: Batch) -> Batch:
        first = batch.places_BA.shape[1] // 2
        return Batch(batch.tokens_BT, batch.places_BA[:, first:], batch.answers_BA[:, first:])
