"""Comba's closed-loop feedback: a scaled key that erases, and a query corrected by the key.

B batch, T time, H key heads, K key width
"""

import torch
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs
from deltazoo.backends.decode_step import FusedDecodeStep
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Fusible, HeadShape, OperandPart


class Feedback(OperandPart, Fusible):
    """e <- sigmoid(b_h) k, the erase key, and q <- q - d_h k, for each key head h.

    Args: correction: initial value of d.
    Initialisation: b = 1, d = `correction`.
    Source: Comba 2506.02475 (feedback control of the state and of the output).
    """

    def __init__(self, shape: HeadShape, correction: float) -> None:
        super().__init__()
        self.correction = correction
        self.b = nn.Parameter(torch.empty(shape.heads))
        self.d = nn.Parameter(torch.empty(shape.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.b)
        nn.init.constant_(self.d, self.correction)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        q, k = inputs.q, inputs.k
        last_k = k if k.dim() == 4 else k[:, :, -1]  # the output is read after the last Householder step
        q = (q - self.d[:, None] * last_k).to(q.dtype)
        return inputs._replace(q=q, erase_key=(self.b.sigmoid()[:, None] * k).to(k.dtype)), None

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step if step.spec.erase_key == "own" else None

    def fused_inputs(self, x: Tensor) -> dict[str, Tensor]:
        return {"feedback": self.b, "correction": self.d}
