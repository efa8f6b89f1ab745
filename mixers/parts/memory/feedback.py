"""Comba's closed-loop feedback: a scaled erase strength, and a query corrected by the key.

B batch, T time, H key heads, HV value heads, K key width, n Householder steps
"""

import torch
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.ops.short_conv import EPS
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Fusible, HeadShape, OperandPart
from deltazoo.mixers.parts.norms import unit_norm


class Feedback(OperandPart, Fusible):
    """erase = sigmoid(b_h) beta, write = beta and q <- q - d_h k, for each key head h; follows the part of beta.

    The erase strength sigmoid(b) beta with the key k is the paper's strength beta with the erase key sigmoid(b) k.

    Args:
        correction: initial value of d.
        norm_after: for q and k that are not normalised, q <- (q - d p) / |q - d p| and k <- k / |k| instead, with
            p = sigmoid(b) k, and the erase key p / |p|, as in the authors' code. Then erase = beta, up to the epsilon
            of the norms, and b affects q only.
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
        q, k, beta = inputs.q, inputs.k, inputs.beta
        assert beta is not None  # of the part before: [B, T, (n,) HV]
        factor = self.b.to(state_dtype(self.b.dtype)).sigmoid()
        last = k[:, :, -1] if k.dim() == 5 else k  # the output is read after the last Householder step
        subtracted = self.d * factor if self.norm_after else self.d
        q = (q - subtracted[:, None] * last).to(q.dtype)
        if self.norm_after:
            square = k.to(state_dtype(k.dtype)).square().sum(-1)
            # unit_norm(p) = factor * unit_norm(k), [B, T, (n,) H]
            factor = factor * torch.sqrt((square + EPS) / (factor.square() * square + EPS))
            q, k = unit_norm(q), unit_norm(k)
        erase = factor.repeat_interleave(beta.shape[-1] // k.shape[-2], -1) * beta
        return inputs._replace(q=q, k=k, beta=None, erase=erase, write=beta), None

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step if step.spec.beta == "separate" and not self.norm_after else None

    def fused_parameters(self, x: Tensor) -> dict[str, Tensor]:
        return {"feedback": self.b, "correction": self.d}

    def extra_repr(self) -> str:
        return f"norm_after={self.norm_after}"
