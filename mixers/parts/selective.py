"""SelectiveOperands state spaces: every channel is a head with V = 1, and what it keeps depends on the convolved input.

B batch, T time, D width, C channels (= HV), N state size (= K), R rank of the step
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.short_conv import ConvPart, follow
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasFlops, HeadShape, OperandPart, Stateful
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.decays import dt_bias, softplus
from deltazoo.mixers.parts.norms import RMSNorm

RG_LRU_POWER = 8.0
RG_LRU_RING = (0.9, 0.999)


class ChannelProjection(nn.Module, Stateful):
    """v = conv(W x) for C channels [B, T, C, 1], with SiLU where asked for; q = k = 1.

    Args: conv_width: taps, 0 for none; silu: after the convolution; std: of W at first, normal; None: torch's linear.
    State: the convolution's, [B, conv_width - 1, C].
    """

    def __init__(self, shape: HeadShape, conv_width: int, silu: bool, std: float | None = None) -> None:
        super().__init__()
        self.shape = shape
        channels = shape.value_heads * shape.value_width
        self.parts = [ConvPart(channels, silu)]
        self.to_v = nn.Linear(shape.width, channels, bias=False)
        if std is not None:
            nn.init.normal_(self.to_v.weight, std=std)
        self.conv = ShortConv(channels, conv_width, True, self.parts) if conv_width else None

    def init_state(self, batch: int, like: Tensor) -> Tensor | None:
        return None if self.conv is None else self.conv.init_state(batch, like)

    def forward(self, x: Tensor, state: Tensor | None, context: Context) -> tuple[UpdateInputs, Tensor | None]:
        v = self.to_v(x)
        if self.conv is not None:
            (v,), state = self.conv(v, state, context)
        else:
            (v,) = follow(v, self.parts)
        one = v.new_ones(*v.shape[:2], self.shape.heads, self.shape.key_width)
        return UpdateInputs(one, one, v.unflatten(-1, (self.shape.value_heads, -1))), state


class SelectiveOperands(OperandPart):
    """q, k and a step for each channel, of the projected v: [r, k, q] = W v, step = activation(W_dt r + dt_bias).

    kind "mamba": decay exp(step x rate), rate = -exp(A_log) [C, N], never laid out over time; v <- step v.
    kind "longhorn": log_decay = log(1 - d k^2), d = step / (1 + step |k|^2), step = sigmoid(.); v <- d v.

    Args: rank: R; norm_eps: RMS norms of r, k and q with this epsilon, without weights (Falcon Mamba); None: none.
    Initialisation: A_log = log(1..N) (S4D-Real); W_dt uniform in +- R^(-1/2); dt_bias as of `dt_bias`, for longhorn 0.
    Source: Mamba 2312.00752, section 3.2, algorithm 2 and section 3.6; Longhorn 2407.14207, algorithm 1.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log",)

    def __init__(
        self, shape: HeadShape, rank: int, kind: Literal["mamba", "longhorn"], norm_eps: float | None = None
    ) -> None:
        super().__init__()
        channels, size = shape.value_heads, shape.key_width
        self.kind, self.sizes = kind, [rank, size, size]
        self.proj = nn.Linear(channels, sum(self.sizes), bias=False)
        self.to_step = nn.Linear(rank, channels)
        nn.init.uniform_(self.to_step.weight, -(rank**-0.5), rank**-0.5)
        bias = dt_bias(channels) if kind == "mamba" else torch.zeros(channels)
        self.to_step.bias = nn.Parameter(bias)
        mamba = kind == "mamba"
        self.A_log = nn.Parameter(torch.arange(1.0, size + 1).log().repeat(channels, 1)) if mamba else None
        self.norms = None
        if norm_eps is not None:
            self.norms = nn.ModuleList(RMSNorm(size, norm_eps, weighted=False) for size in self.sizes)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        streams: tuple[Tensor, ...] = self.proj(inputs.v.squeeze(-1)).split(self.sizes, dim=-1)
        if self.norms is not None:
            streams = tuple(norm(stream) for norm, stream in zip(self.norms, streams, strict=True))
        r, k, q = streams
        dtype = state_dtype(q.dtype)
        # the bias outside the product, which autocast rounds
        raw = F.linear(r, self.to_step.weight.to(r.dtype)).to(dtype) + self.to_step.bias.to(dtype)
        inputs = inputs._replace(q=q[:, :, None], k=k[:, :, None], v=inputs.v.to(q.dtype))
        if self.A_log is not None:
            step = softplus(raw)
            v = (inputs.v * step[..., None]).to(q.dtype)
            return inputs._replace(v=v, step=step, rate=-self.A_log.to(dtype).exp()), None
        wide = k.to(dtype)
        time = raw.sigmoid()
        step = time / (1 + time * wide.square().sum(-1, keepdim=True))
        log_decay = torch.log1p(-step[..., None] * wide.square()[:, :, None])
        return inputs._replace(v=(inputs.v * step[..., None]).to(q.dtype), log_decay=log_decay), None

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"


class RGLRUGate(OperandPart, HasFlops):
    """log_decay = -8 softplus(L) sigmoid(W_a u + b_a), v <- sqrt(1 - a^2) sigmoid(W_x u + b_x) u, u = v as projected.

    W_a and W_x are block diagonal, of so many blocks; None: the most that divide the channels, up to width // 256.
    Initialisation: L so that a^8 = exp(-8 softplus(L)) is uniform in [0.9, 0.999];
    the maps N(0, 1 / a block's width), b = 0.
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
        self.weight = nn.Parameter(width**-0.5 * torch.randn(2, blocks, width, width))
        self.bias = nn.Parameter(torch.zeros(2, channels))
        kept = torch.empty(channels).uniform_(*RG_LRU_RING)
        self.L = nn.Parameter((-kept.log() / RG_LRU_POWER).expm1().log())

    def flops(self) -> int:
        return 2 * self.weight.numel()

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        u = inputs.v.squeeze(-1)
        raw = torch.einsum("btnc,gncd->gbtnd", u.unflatten(-1, (self.blocks, -1)), self.weight.to(u.dtype)).flatten(-2)
        dtype = state_dtype(u.dtype)
        gate, write = (raw.to(dtype) + self.bias.to(dtype)[:, None, None]).sigmoid()
        log_decay = -RG_LRU_POWER * softplus(self.L.to(dtype)) * gate
        # the root's slope has no bound at 0, where a is 1
        kept = (-torch.expm1(2 * log_decay)).clamp(min=1e-12).sqrt()
        return inputs._replace(log_decay=log_decay, v=(kept * write * u)[..., None].to(u.dtype)), None

    def extra_repr(self) -> str:
        return f"blocks={self.blocks}"
