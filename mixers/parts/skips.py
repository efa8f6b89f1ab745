"""Skip connections around the recurrence, which add the current token's value or input to the output.

B batch, T time, D width, H key heads, HV value heads, K key width, V value width
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.update.base import state_dtype
from deltazoo.mixers.core.initialization import fill_normal, fills_values
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Fusible, HeadShape, OutputArguments, OutputPart


class Skip(OutputPart, Fusible):
    """o_h <- o_h + D_h v_h, with v as projected.

    Initialisation: D = 1.
    Source: Mamba 2312.00752, Mamba-2 2405.21060.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.empty(shape.value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.D)

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return (o + self.D[:, None] * arguments.projected.v).to(o.dtype), None

    def fuse_into(self, step: FusedDecodeStep) -> FusedDecodeStep | None:
        return step if not step.norm and not step.gate and step.spec.householders == 1 else None

    def fused_parameters(self, x: Tensor) -> dict[str, Tensor]:
        return {"skip": self.D}


class Bonus(OutputPart):
    """o_h <- o_h + (q^T (u_h * k)) v_h: RWKV's bonus u for the current token.

    Args: start: initial value of u, a number or a function that computes it, [H, K]. A picklable function rather than a
        tensor, so that `reset_parameters` works on a module built on the meta device.
    Source: RWKV-6 2404.05892, RWKV-7 2503.14456.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("u",)

    def __init__(self, shape: HeadShape, start: float | Callable[[], Tensor]) -> None:
        super().__init__()
        self.start = start
        self.u = nn.Parameter(torch.empty(shape.heads, shape.key_width))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        if callable(self.start):
            self.u.copy_(self.start())
        else:
            self.u.fill_(self.start)

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        # q, k and v keep their dtype: of operands converted to float32, the backward would save the converted copies
        u = self.u.to(state_dtype(o.dtype))
        weight = (arguments.inputs.q * u * arguments.inputs.k).sum(-1, keepdim=True)
        return (o + weight * arguments.inputs.v).to(o.dtype), None


class Feedthrough(nn.Module):
    """x -> D x, channel by channel: the feedthrough term of a state space.

    Initialisation: standard normal (LRU, S5).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill_normal(self.D)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.D
