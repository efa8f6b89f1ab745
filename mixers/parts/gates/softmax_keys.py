"""Keys that are a softmax over time, with the decay that makes them a recurrence.

B batch, T time, H heads, K key width, N sequences
"""

from typing import ClassVar

from torch import Tensor

from deltazoo.backends.ops.time_softmax import initial_logsumexp
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OperandPart, Stateful
from deltazoo.mixers.parts.attention.running_logsumexp import softmax_over_time


class SoftmaxKeys(OperandPart, Stateful):
    """k_t <- exp(k_t - z_t) and log a_t = z_(t-1) - z_t with z_t = log sum_(i <= t) exp(k_i) for each channel.

    k is clamped to +-`SCORE_BOUND`, so that z needs no rescaling.

    State: z, [B, H K].
    Source: LightNet, Qin 2024, 2405.21022.
    """

    splits: ClassVar[bool] = True

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.channels = shape.heads * shape.key_width

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return initial_logsumexp(batch, self.channels, like)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        k = inputs.k
        log_decay, keys, new_state = softmax_over_time(k.flatten(2), state, context)
        return inputs._replace(k=keys.view(k.shape), log_decay=log_decay.view(k.shape)), new_state
