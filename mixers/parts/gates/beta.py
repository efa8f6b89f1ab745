"""Beta: how strongly a token erases and writes, per value head or per channel.

B batch, T time, D width, HV value heads, K key width, V value width, n householders
"""

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.grouped import Groupable, Rows
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Fusible, HeadShape, LinearPart, OperandPart, projection

# Doubled for negative eigenvalues this is 2 - 2^-6. With 2 the transition is a reflection, and rounding in bf16 moves
# its eigenvalue below -1.
MAX_DOUBLED_BETA = 1 - 2**-7


class Beta(LinearPart, Groupable, Fusible):
    """beta = sigmoid(W x) per value head (and Householder step), float32; see `max_beta` for its upper bound.

    Args: bias: whether W has a bias (MesaNet).
    Source: DeltaNet 2406.06484; negative eigenvalues, Grazzi 2411.12537.
    """

    def __init__(self, shape: HeadShape, spec: UpdateSpec, bias: bool = False) -> None:
        super().__init__()
        self.householders = shape.householders
        self.max_beta = max_beta(spec)
        self.proj = projection(shape.width, self.householders * shape.value_heads, bias=bias)

    def prepare(self, raw: Tensor, inputs: UpdateInputs) -> UpdateInputs:
        beta = _bounded_sigmoid(raw, self.max_beta)
        if self.householders > 1:
            beta = rearrange(beta, "b t (n h) -> b t n h", n=self.householders)
        return inputs._replace(beta=beta)

    def forward_grouped(
        self,
        parts: Sequence["Beta"],
        rows: Rows,
        x: Tensor,
        inputs: UpdateInputs,
        state: Tensor | None,
        context: Context,
    ) -> tuple[UpdateInputs, Tensor | None]:
        return self.prepare(rows.linear(x, [part.proj for part in parts]), inputs), None

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step._replace(beta_max=self.max_beta) if step.spec.beta in ("head", "separate") else None

    def fused_maps(self) -> dict[str, nn.Module]:
        return {"beta": self.proj}

    def extra_repr(self) -> str:
        return f"max_beta={self.max_beta}"


class ChannelBeta(OperandPart, Fusible):
    """erase = sigmoid(W_b x) per key channel and write = sigmoid(W_w x) per value channel, float32.

    See `max_beta` for their upper bound.

    Args: erase_heads: heads of erase; None: the value heads.
    Source: Gated DeltaNet-2 2605.22791.
    """

    def __init__(self, shape: HeadShape, spec: UpdateSpec, erase_heads: int | None = None) -> None:
        super().__init__()
        self.householders, self.widths = shape.householders, (shape.key_width, shape.value_width)
        self.max_beta, self.shares = max_beta(spec), erase_heads not in (None, shape.value_heads)
        erase = (erase_heads or shape.value_heads) * shape.key_width
        self.to_erase = projection(shape.width, self.householders * erase)
        self.to_write = projection(shape.width, self.householders * shape.value_heads * shape.value_width)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        erase, write = (
            self._beta(linear(x), width)
            for linear, width in zip((self.to_erase, self.to_write), self.widths, strict=True)
        )
        return inputs._replace(erase=erase, write=write), None

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        if step.spec.beta != "channel" or self.shares:
            return None
        return step._replace(beta_max=self.max_beta)

    def fused_maps(self) -> dict[str, nn.Module]:
        return {"erase": self.to_erase, "write": self.to_write}

    def _beta(self, raw: Tensor, width: int) -> Tensor:
        beta = _bounded_sigmoid(raw, self.max_beta)
        if self.householders > 1:
            return rearrange(beta, "b t (n h c) -> b t n h c", n=self.householders, c=width)
        return rearrange(beta, "b t (h c) -> b t h c", c=width)

    def extra_repr(self) -> str:
        return f"max_beta={self.max_beta}"


def max_beta(spec: UpdateSpec) -> float:
    """Return the upper bound of beta: 1, or `MAX_DOUBLED_BETA` if the spec doubles beta."""
    return 1.0 if spec.negative_eigenvalues == "off" else MAX_DOUBLED_BETA


def _bounded_sigmoid(raw: Tensor, maximum: float) -> Tensor:
    beta = raw.to(state_dtype(raw.dtype)).sigmoid()
    return beta.clamp(max=maximum) if maximum < 1 else beta
