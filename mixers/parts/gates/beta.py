"""Beta: how strongly a token erases and writes, per value head or per channel.

B batch, T time, D width, HV value heads, K key width, V value width, n householders
"""

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.grouped import Groupable, Rows
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Fusible, HeadShape, LinearPart, OperandPart, projection


class Beta(LinearPart, Groupable, Fusible):
    """beta = sigmoid(W x) per value head (and Householder step), float32.

    Args: bias: whether W has a bias (MesaNet).
    Source: DeltaNet 2406.06484; negative eigenvalues, Grazzi 2411.12537.
    """

    def __init__(self, shape: HeadShape, bias: bool = False) -> None:
        super().__init__()
        self.householders = shape.householders
        self.proj = projection(shape.width, self.householders * shape.value_heads, bias=bias)

    def prepare(self, raw: Tensor, inputs: UpdateInputs) -> UpdateInputs:
        beta = _strength(raw)
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
        return step if step.spec.beta in ("head", "separate") else None

    def fused_maps(self) -> dict[str, nn.Module]:
        return {"beta": self.proj}


class ChannelBeta(OperandPart, Fusible):
    """erase = sigmoid(W_b x) per key channel and write = sigmoid(W_w x) per value channel, float32.

    Args: erase_heads: heads of erase; None: the value heads.
    Source: Gated DeltaNet-2 2605.22791.
    """

    def __init__(self, shape: HeadShape, erase_heads: int | None = None) -> None:
        super().__init__()
        self.householders, self.widths = shape.householders, (shape.key_width, shape.value_width)
        self.shares = erase_heads not in (None, shape.value_heads)
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
        return None if step.spec.beta != "channel" or self.shares else step

    def fused_maps(self) -> dict[str, nn.Module]:
        return {"erase": self.to_erase, "write": self.to_write}

    def _beta(self, raw: Tensor, width: int) -> Tensor:
        beta = _strength(raw)
        if self.householders > 1:
            return rearrange(beta, "b t (n h c) -> b t n h c", n=self.householders, c=width)
        return rearrange(beta, "b t (h c) -> b t h c", c=width)


def _strength(raw: Tensor) -> Tensor:
    return raw.to(state_dtype(raw.dtype)).sigmoid()
