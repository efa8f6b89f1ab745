"""The gates of RG-LRU, the real-gated linear recurrent unit of Griffin.

B batch, T time, C channels (= HV)
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.torch_ext.plain_module import is_plain_linear
from deltazoo.backends.triton.element.rg_lru_op import RGLRUCall, rg_lru_step_, takes_block
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.decode_maps import adds_to_product, apply_maps
from deltazoo.mixers.core.initialization import fills_values
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasFlops, HeadShape, OperandPart
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.gates.decays import softplus
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.projections import ChannelProjection

POWER = 8.0  # c of the paper
INITIAL_DECAY = (0.9, 0.999)


class RGLRUGate(OperandPart, HasFlops, TokenStep):
    """log_decay = -8 softplus(L) sigmoid(W_a u + b_a), v <- sqrt(1 - a^2) sigmoid(W_x u + b_x) u, for the projected u.

    Args: blocks: number of blocks of the block-diagonal maps W_a and W_x; None: the largest divisor of the number of
        channels that is at most width // 256.
    Initialisation: L such that a^8 = exp(-8 softplus(L)) is uniform in [0.9, 0.999]; the maps N(0, 1 / block width);
        b = 0.
    Source: Griffin 2402.19427, section 2.4, equations 1 to 4, and appendix A.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("bias",)

    def __init__(self, shape: HeadShape, blocks: int | None = None) -> None:
        super().__init__()
        channels = shape.value_heads
        if blocks is None:
            blocks = next(n for n in range(max(1, shape.width // 256), 0, -1) if channels % n == 0)
        if channels % blocks:
            raise ConfigError(f"blocks must divide the {channels} channels, got {blocks}")
        width = channels // blocks
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(2, blocks, width, width))
        self.bias = nn.Parameter(torch.empty(2, channels))
        self.L = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        self.weight.normal_().mul_(self.weight.shape[-1] ** -0.5)
        self.bias.zero_()
        self.L.uniform_(*INITIAL_DECAY)
        self.L.copy_((-self.L.log() / POWER).expm1().log())

    def flops(self) -> int:
        return 2 * self.weight.numel()

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        u = inputs.v.squeeze(-1)
        blocks = torch.unflatten(u, -1, (self.blocks, -1))
        raw = torch.einsum("btnc,gncd->gbtnd", blocks, self.weight.to(u.dtype)).flatten(-2)
        dtype = state_dtype(u.dtype)
        recurrence_gate, input_gate = (raw.to(dtype) + self.bias.to(dtype)[:, None, None]).sigmoid()
        log_decay = -POWER * softplus(self.L.to(dtype)) * recurrence_gate
        # Clamped because the derivative of the root is unbounded at 0, where a = 1.
        scale = (-torch.expm1(2 * log_decay)).clamp(min=1e-12).sqrt()
        return inputs._replace(log_decay=log_decay, v=(scale * input_gate * u)[..., None].to(u.dtype)), None

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        if not call.has_parts(ChannelProjection, RGLRUGate, Update, OutputGate) or self.weight.dtype != call.x.dtype:
            return None
        if not takes_block(self.weight.shape[-1], call.x.dtype):
            return None
        project, _, _, gate = call.parts.values()
        assert isinstance(project, ChannelProjection) and isinstance(gate, OutputGate)
        maps = {"values": project.to_v, "gate": gate.proj}
        if gate.activation != "gelu" or project.parts[0].silu:
            return None
        if not all(is_plain_linear(linear) and adds_to_product(linear, call.x) for linear in maps.values()):
            return None
        convolution = project.convolution(call.x, call.states.get("project"))
        if project.conv is not None and convolution is None:
            return None
        products = apply_maps(call.x, maps, call.norm, convolution)
        u, raw, states = products["values"][:, 0], products["gate"][:, 0], call.states["update"]
        return TokenOutput(rg_lru_step_(RGLRUCall(u, raw, self.weight, self.bias, self.L, states))[:, None])

    def extra_repr(self) -> str:
        return f"blocks={self.blocks}"
