"""Norms of a vector, of each head's output, and of q and k, in float32.

They are plain PyTorch, which Inductor fuses; in training on a GPU the norms of a layer, and a norm of heads with the
gate after it, are kernels (`deltazoo.backends.ops.rms_norm`).

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.ops.rms_norm import add_rms_norm, apply_gate, gated_rms_norm, refusals
from deltazoo.backends.ops.rms_norm import rms_norm as rms_norm
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.mixers.core.grouped import Groupable, Rows
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import (
    Fusible,
    HeadShape,
    OperandPart,
    OutputArguments,
    OutputPart,
    StatelessOutputPart,
)
from deltazoo.mixers.parts.gates.output_gates import OutputGate

NormKind = Literal["rms", "layer"]
UnitNormKind = Literal["l2", "l1"]


class RMSNorm(nn.Module):
    """x <- (offset + weight) * x / sqrt(mean(x^2) + eps) over the last dimension, in float32 (float64 for float64).

    Args:
        weighted: whether there is a weight.
        offset: constant added to the weight; 1 in Gemma and Qwen3-Next, whose stored weights are near 0.
    Initialisation: weight 1 - offset.
    """

    def __init__(self, size: int, eps: float = 1e-6, weighted: bool = True, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size)) if weighted else None
        self.size, self.eps, self.offset = size, eps, offset
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale()
        if scale is not None and self.weight is not None and _has_eager_kernel(self, self.weight, x):
            return add_rms_norm(x, None, scale, self.eps)[1]
        return rms_norm(x, scale, self.eps)

    def scale(self) -> Tensor | None:
        """Return offset + weight; in float32 if there is an offset, because 16 bits would round small weights off."""
        if self.weight is None or self.offset == 0:
            return self.weight
        return self.weight.to(state_dtype(self.weight.dtype)) + self.offset

    def extra_repr(self) -> str:
        offset = f", offset={self.offset:g}" if self.offset else ""
        return f"{self.size}, eps={self.eps:g}, weighted={self.weight is not None}{offset}"


class LayerNorm(nn.Module):
    """x <- weight * (x - mean(x)) / sqrt(var(x) + eps) + bias over the last dimension, in float32 (float64).

    Initialisation: weight 1, bias 0.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(size)) for _ in range(2))
        self.size, self.eps = size, eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = state_dtype(x.dtype)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return torch.nn.functional.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps:g}"


LayerInputNorm = RMSNorm | LayerNorm


def layer_norm_of(kind: NormKind, size: int, eps: float, offset: float = 0.0) -> LayerInputNorm:
    """Build the norm of a residual stream. Args: offset: only of "rms"."""
    return LayerNorm(size, eps) if kind == "layer" else RMSNorm(size, eps, offset=offset)


class HeadNorm(StatelessOutputPart, Groupable, Fusible):
    """Normalise the output of each head, or of a group of heads.

    Args:
        kind: "rms", or "layer", which subtracts the mean first (RetNet's group norm).
        over: the channels that share one norm. "head": each head, with one weight [V] for all heads (Gated DeltaNet).
            "each": each head, with a weight per head (mLSTM, RWKV). "group": the HV / H value heads of a key head
            (Mamba-2). "all": all heads (MiniMax). The last three have weights [HV * V].
        bias: whether a bias is added after the weight.
        weighted: whether there is a weight.
        initial_weight: initial value of the weight (RWKV-6 and RWKV-7: it depends on the layer).
    Initialisation: weight `initial_weight`, bias 0.
    """

    def __init__(
        self,
        shape: HeadShape,
        eps: float,
        kind: NormKind = "rms",
        over: Literal["head", "each", "group", "all"] = "head",
        bias: bool = False,
        weighted: bool = True,
        initial_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.eps, self.kind, self.initial_weight = eps, kind, initial_weight
        self.groups = {"group": shape.heads, "all": 1}.get(over, shape.value_heads)
        size = shape.value_width if over == "head" else shape.value_heads * shape.value_width
        self.weight = nn.Parameter(torch.empty(size)) if weighted else None
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, self.initial_weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def transform(self, o: Tensor, x: Tensor) -> Tensor:
        return self._normalize(o, self.weight, self.bias)

    def transform_with(
        self, following: OutputPart, o: Tensor, x: Tensor, product: Tensor | None = None
    ) -> Tensor | None:
        if type(self) is not HeadNorm or type(following) is not OutputGate or not is_plain(following):
            return None
        activation = following.activation
        if self.kind != "rms" or self.weight is None or self.bias is not None or activation not in ("silu", "sigmoid"):
            return None
        if not _has_kernel(self, self.weight, o):
            return None
        raw = following.proj(x) if product is None else product
        if raw.dtype != o.dtype:
            return apply_gate(self.transform(o, x), raw.view(o.shape), activation)
        return gated_rms_norm(o, raw, self.weight, self.eps, activation)

    def forward_grouped(
        self,
        parts: Sequence["HeadNorm"],
        rows: Rows,
        o: Tensor,
        arguments: OutputArguments,
        state: Tensor | None,
        context: Context,
    ) -> tuple[Tensor, Tensor | None]:
        weights = [part.weight for part in parts if part.weight is not None]
        biases = [part.bias for part in parts if part.bias is not None]
        weight, bias = (rows.expand(values) if values else None for values in (weights, biases))
        return self._normalize(o, weight, bias), None

    def norm_of_all(self) -> Norm | None:
        if type(self) is not HeadNorm or self.kind != "rms" or self.groups > 1 or self.bias is not None:
            return None
        return None if self.weight is None else Norm(self.weight, self.eps)

    def _normalize(self, o: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalise o. Args: weight, bias: the parameters, or their values at each row [1, A, ...]."""
        grouped = torch.unflatten(o.flatten(2), 2, (self.groups, -1))
        if self.kind == "layer":
            wide = grouped.to(state_dtype(o.dtype))
            grouped = wide - wide.mean(-1, keepdim=True)
        if weight is not None:
            weight = torch.unflatten(weight, -1, (-1, grouped.shape[-1]))
        normed = rms_norm(grouped, weight, self.eps).reshape(o.shape)
        if bias is not None:
            normed = normed + torch.unflatten(bias.to(normed.dtype), -1, (-1, o.shape[-1]))
        return normed.to(o.dtype)

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        if step.norm or self.groups != step.HV or self.weight is None:
            return None
        return step._replace(norm=self.kind, eps=self.eps)

    def fused_parameters(self, x: Tensor) -> dict[str, Tensor]:
        inputs = {"norm_weight": self.weight, "norm_bias": self.bias}
        return {name: parameter for name, parameter in inputs.items() if parameter is not None}

    def extra_repr(self) -> str:
        weighted = self.weight is not None
        return f"kind={self.kind!r}, groups={self.groups}, eps={self.eps:g}, weighted={weighted}"


class UnitNorm(OperandPart):
    """q, k <- q / |q|, k / |k|.

    With |k| <= 1 the eigenvalues of the delta rule lie in [0, 1], or in [-1, 1] if beta is doubled.

    Args:
        norm: "l2", x / sqrt(sum x^2 + 1e-6); "l1", x / (sum |x| + 1e-6).
        which: "qk", or "q" for updates that use the length of k (EFLA).
    Source: Yang 2024, 2406.06484.
    """

    def __init__(self, norm: UnitNormKind = "l2", which: Literal["qk", "q"] = "qk") -> None:
        super().__init__()
        self.norm, self.which = norm, which

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        k = unit_norm(inputs.k, self.norm) if "k" in self.which else inputs.k
        return inputs._replace(q=unit_norm(inputs.q, self.norm), k=k), None

    def extra_repr(self) -> str:
        return f"{self.norm!r}, which={self.which!r}"


class KeyNorm(OperandPart):
    """q, k <- RMSNorm(q), RMSNorm(k) of each head, with a weight [K] for q and one for k that all heads share.

    Initialisation: weights 1.
    """

    def __init__(self, shape: HeadShape, eps: float) -> None:
        super().__init__()
        self.q_norm, self.k_norm = (RMSNorm(shape.key_width, eps) for _ in range(2))

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(q=self.q_norm(inputs.q), k=self.k_norm(inputs.k)), None


class SharedLayerNorm(OperandPart):
    """q, k <- gain * (x - mean(x)) / sqrt(var(x) + eps) + bias, with one gain and bias [K] for q, k and all heads.

    Initialisation: gain 1, bias 0.
    Source: ReBased, Aksenov 2024, 2402.10644.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def __init__(self, shape: HeadShape, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = (nn.Parameter(torch.empty(shape.key_width)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(q=self._norm(inputs.q), k=self._norm(inputs.k)), None

    def _norm(self, x: Tensor) -> Tensor:
        dtype = state_dtype(x.dtype)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return torch.nn.functional.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps:g}"


def norm_before_product(norm: LayerInputNorm) -> Norm | None:
    """Return what a product needs to compute the norm of its input; None if the norm is not plain, or has no weight."""
    scale = norm.scale() if isinstance(norm, RMSNorm) and type(norm) is RMSNorm and is_plain(norm) else None
    return None if scale is None else Norm(scale, norm.eps)


def add_and_normalize(norm: LayerInputNorm, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x + branch, or x without a branch, and its norm; in training on a GPU by one kernel.

    Use the first result instead of x from here on (`deltazoo.backends.ops.rms_norm.add_rms_norm`).
    """
    if (
        isinstance(norm, RMSNorm)
        and type(norm) is RMSNorm
        and norm.weight is not None
        and _has_kernel(norm, norm.weight, x)
    ):
        scale = norm.scale()
        assert scale is not None
        return add_rms_norm(x, branch, scale, norm.eps)
    x = x if branch is None else x + branch
    return x, norm(x)


def _has_eager_kernel(norm: nn.Module, weight: nn.Parameter, x: Tensor) -> bool:
    """As `_has_kernel`, for a norm alone: without gradients in eager calls, where the host's time decides."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling() and _has_kernel(norm, weight, x)


def _has_kernel(norm: nn.Module, weight: nn.Parameter, x: Tensor) -> bool:
    """Whether a kernel computes the norm of x: in training and in eager calls, without `refusals`, if it is plain."""
    if not torch.is_grad_enabled() and torch.compiler.is_compiling():
        return runs_by_kernel("rms norm", ["without gradients Inductor fuses it with neighbouring operations."])
    if not is_plain(norm):
        return runs_by_kernel("rms norm", ["it needs a norm without hooks, with plain parameters."])
    return runs_by_kernel("rms norm", refusals(x, weight))


def unit_norm(x: Tensor, norm: UnitNormKind = "l2") -> Tensor:
    """Return x divided by its norm over the last dimension, as in `UnitNorm`, in the dtype of x."""
    wide = x.to(state_dtype(x.dtype))
    if norm == "l1":
        return (wide / (wide.abs().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
