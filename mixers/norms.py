"""Norms: of a vector, of a head's output, of keys. Plain torch in float32, which Inductor fuses.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

from typing import Literal

import torch
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.mixers.base import Context
from deltazoo.mixers.parts import Flow, HeadShape, OperandPart, OutputPart


class RMSNorm(nn.Module):
    """x <- weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32 (float64 in float64)."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}"


class HeadNorm(OutputPart):
    """Normalise the output of each head, or of the value heads that share a key head.

    Args:
        kind: "rms"; or "layer", the mean taken off first: the group norm of RetNet.
        over: "head", over V, one weight [V] for all heads (Gated DeltaNet); "group", over the HV / H heads of a
            key head, weight [HV * V] (Mamba-2).
    """

    def __init__(
        self,
        shape: HeadShape,
        eps: float,
        kind: Literal["rms", "layer"] = "rms",
        over: Literal["head", "group"] = "head",
    ) -> None:
        super().__init__()
        self.eps, self.kind = eps, kind
        self.groups = shape.heads if over == "group" else shape.value_heads
        size = shape.value_heads * shape.value_width if over == "group" else shape.value_width
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, o: Tensor, flow: Flow, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        grouped = o.flatten(2).unflatten(2, (self.groups, -1))
        if self.kind == "layer":
            wide = grouped.to(state_dtype(o.dtype))
            grouped = wide - wide.mean(-1, keepdim=True)
        weight = self.weight if self.weight.shape[0] == grouped.shape[-1] else self.weight.view(self.groups, -1)
        return rms_norm(grouped, weight, self.eps).reshape(o.shape).to(o.dtype), None

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kind={self.kind!r}, groups={self.groups}, eps={self.eps:g}"


class UnitNorm(OperandPart):
    """q, k <- q / |q|, k / |k|: with |k| <= 1 the delta rule's eigenvalues stay in their interval.

    Args: norm: "l2", x / sqrt(sum x^2 + 1e-6); "l1", x / (sum |x| + 1e-6).
        which: "qk", or "q" where the length of k carries information (EFLA).
    Source: Yang 2024, 2406.06484, section 3.3.
    """

    def __init__(self, norm: Literal["l2", "l1"] = "l2", which: Literal["qk", "q"] = "qk") -> None:
        super().__init__()
        self.norm, self.which = norm, which

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        k = self._unit(inputs.k) if "k" in self.which else inputs.k
        return inputs._replace(q=self._unit(inputs.q), k=k), None

    def _unit(self, x: Tensor) -> Tensor:
        wide = x.to(state_dtype(x.dtype))
        if self.norm == "l1":
            return (wide / (wide.abs().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.norm!r}, which={self.which!r}"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, in the dtype of x."""
    wide = x.to(state_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)
