"""Comba's closed-loop feedback: a scaled key that erases, and a query corrected by the key.

B batch, T time, H key heads, K key width
"""

import torch
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs
from deltazoo.backends.decode_step import FusedDecodeStep
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Fusible, HeadShape, OperandPart
from deltazoo.mixers.parts.norms import unit_norm


class Feedback(OperandPart, Fusible):
    """e <- sigmoid(b_h) k, the erase key, and q <- q - d_h k, for each key head h.

    Args:
        correction: initial value of d.
        norm_after: for q and k that are not normalised, e <- p / |p|, q <- (q - d p) / |q - d p| and k <- k / |k|
            instead, with p = sigmoid(b) k, as in the authors' code. Then b affects q only.
    Initialisation: b = 1, d = `correction`.
    Source: Comba 2506.02475 (feedback control of the state and of the output).
    """

    def __init__(self, shape: HeadShape, correction: float, norm_after: bool = False) -> None:
        super().__init__()
        self.correction, self.norm_after = correction, norm_after
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
        e = (self.b.sigmoid()[:, None] * k).to(k.dtype)
        subtracted = e if self.norm_after else k
        if k.dim() == 5:
            subtracted = subtracted[:, :, -1]  # the output is read after the last Householder step
        q = (q - self.d[:, None] * subtracted).to(q.dtype)
        if self.norm_after:
            q, k, e = unit_norm(q), unit_norm(k), unit_norm(e)
        return inputs._replace(q=q, k=k, erase_key=e), None

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step if step.spec.erase_key == "own" and not self.norm_after else None

    def fused_inputs(self, x: Tensor) -> dict[str, Tensor]:
        return {"feedback": self.b, "correction": self.d}

    def extra_repr(self) -> str:
        return f"norm_after={self.norm_after}"
