"""Gated slot attention: two gated linear attentions over M memory slots, with a softmax between them.

B batch, T time, D width, H heads, M slots, K key width, V value width
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.delta_mixer import Update
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OperandPart, OutputArguments, OutputPart, ResizesHeads, Stateful

VALUE_SPEC = UpdateSpec(decay="channel", transition="additive", scale=1.0)


class SlotKeyPass(OperandPart, ResizesHeads):
    """The operands of the first pass, K_t = Diag(a_t) K_(t-1) + (1 - a_t) k_t^T.

    a = sigmoid(W x)^(1 / temperature). Each slot is a value head with V = 1 whose value is 1 - a, so that the state of
    the update is K transposed. Stores the intermediate "values": the projected values, for the second pass.
    """

    def __init__(self, shape: HeadShape, slots: int, temperature: float) -> None:
        super().__init__()
        self.slots, self.temperature = slots, temperature
        self.proj = nn.Linear(shape.width, shape.heads * slots, bias=False)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        raw = self.proj(x)
        log_decay = F.logsigmoid(raw.to(state_dtype(raw.dtype))) / self.temperature
        context.store(values=inputs.v)
        v = -torch.expm1(log_decay)[..., None]
        return inputs._replace(v=v.to(inputs.v.dtype), log_decay=log_decay), None

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(value_heads=shape.heads * self.slots, value_width=1)

    def extra_repr(self) -> str:
        return f"slots={self.slots}, temperature={self.temperature:g}"


class SlotValuePass(OutputPart, Stateful):
    """The second pass, o_t = U_t^T softmax(K_t q_t) with U_t = Diag(a_t) U_(t-1) + (1 - a_t) v_t^T.

    Its query is the softmax over the slots of the first pass's output.
    State: U, [B, H, M, V].
    """

    def __init__(self, shape: HeadShape, slots: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.update = Update(VALUE_SPEC, shape._replace(key_width=slots, value_heads=shape.heads))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.update.init_state(batch, like)

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        def by_head(x: Tensor) -> Tensor:
            return rearrange(x, "b t (h m) -> b t h m", h=self.heads)

        assert arguments.inputs.log_decay is not None  # set by `SlotKeyPass`
        q = by_head(o.squeeze(-1).to(state_dtype(o.dtype))).softmax(-1).to(o.dtype)
        k = by_head(arguments.inputs.v.squeeze(-1))
        inputs = UpdateInputs(q, k, context.intermediate("values"), log_decay=by_head(arguments.inputs.log_decay))
        return self.update(inputs, state, context)
