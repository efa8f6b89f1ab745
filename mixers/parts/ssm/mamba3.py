"""Mamba-3's operands: a trapezoidal write, and keys and queries rotated by angles that accumulate over the tokens.

B batch, T time, D width, H key heads (groups), HV value heads, K key width, V value width, R rotated pairs of channels,
N sequences
"""

import math
from typing import ClassVar, Literal

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.ops.accumulated_rotary import RotaryOperands, Rotated, refusals, rotate
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import (
    HeadShape,
    MapsInput,
    OperandPart,
    OperandResult,
    OutputArguments,
    OutputPart,
    ResizesHeads,
    Stateful,
)
from deltazoo.mixers.core.sequences import last_of_each_sequence, next_of_each_sequence, segment_cumsum
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.convolution import TokenShift
from deltazoo.mixers.parts.gates.decays import init_dt_bias, softplus
from deltazoo.mixers.parts.norms import RMSNorm
from deltazoo.mixers.parts.rotary import Rotation, apply_rotary

MIN_RATE = 1e-4
Rate = Literal["heavy_tail", "softplus"]


class BiasedNorm(OperandPart):
    """q <- RMSNorm(q) and k <- RMSNorm(k), with biases that `AccumulatedRotary` adds for each value head.

    Returns the biases as the intermediates "q_bias" and "k_bias", [HV, K].

    Initialisation: the weights of the norms and both biases are 1.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("q_bias", "k_bias")

    def __init__(self, shape: HeadShape, eps: float) -> None:
        super().__init__()
        self.q_norm, self.k_norm = (RMSNorm(shape.key_width, eps) for _ in range(2))
        self.q_bias, self.k_bias = (nn.Parameter(torch.empty(shape.value_heads, shape.key_width)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.q_bias)
        nn.init.ones_(self.k_bias)

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        normed = inputs._replace(q=self.q_norm(inputs.q), k=self.k_norm(inputs.k))
        # copies, because FSDP2 frees the parameters of a part after its call
        return normed, None, {"q_bias": self.q_bias.clone(), "k_bias": self.k_bias.clone()}


class TrapezoidalGates(OperandPart, MapsInput):
    """The step size dt, the decay log_decay = -dt A, and the share lambda of the present token's write.

        dt = softplus(W x + dt_bias),  A = max(f(W_A x), 1e-4),  lambda = sigmoid(W_l x)

    with f(y) = 1 + y for y >= 0 and 1 / (1 - y) below, or softplus(y), all per value head. Returns the intermediates
    "dt" and "share", which is lambda, [B, T, HV].

    Args: rate: f.

    Initialisation: dt_bias as `init_dt_bias`.
    """

    def __init__(self, shape: HeadShape, rate: Rate = "heavy_tail") -> None:
        super().__init__()
        self.rate = rate
        self.proj = nn.Linear(shape.width, 3 * shape.value_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(shape.value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_dt_bias(self.dt_bias)

    def input_map(self) -> nn.Module:
        return self.proj

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        raw = context.apply(self.proj, x)
        raw_dt, raw_rate, raw_share = raw.to(state_dtype(raw.dtype)).chunk(3, -1)
        dt = softplus(raw_dt + self.dt_bias.to(raw_dt.dtype))
        if self.rate == "softplus":
            rate = softplus(raw_rate)
        else:
            rate = raw_rate.clamp(min=0) + 1 / (1 - raw_rate.clamp(max=0))
        return inputs._replace(log_decay=-dt * rate.clamp(min=MIN_RATE)), None, {"dt": dt, "share": raw_share.sigmoid()}

    def extra_repr(self) -> str:
        return f"rate={self.rate!r}"


class AccumulatedRotary(OperandPart, ResizesHeads, Stateful, MapsInput):
    """q_t, k_t <- R(theta_t) (q_t + b_h), R(theta_t) (k_t + c_h) for each value head h of the group of q and k.

        theta_t = theta_(t-1) + dt_t pi tanh(W x_t)

    W x is shared by the heads; dt, the intermediate of the same name, and the biases "q_bias" and "k_bias" are not. A
    rotation acts on the channels i and i + R for i < R. Sums of angles are exact modulo 2 pi: in plain torch in
    float64, on a GPU by a kernel in 32-bit integers. Returns "overlap", k_t^T q_t [B, T, HV].

    Args: fraction: share of the K channels that rotate.
    State: theta, [B, HV, R].
    """

    splits: ClassVar[bool] = True

    def __init__(self, shape: HeadShape, fraction: float) -> None:
        super().__init__()
        self.pairs = int(shape.key_width * fraction) // 2
        if self.pairs < 1:
            raise ConfigError(
                f"rotary_fraction must rotate at least two channels of a key, got {fraction:g} of {shape.key_width}"
            )
        self.heads = shape.value_heads
        self.proj = nn.Linear(shape.width, self.pairs, bias=False)

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(heads=shape.value_heads)

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, self.heads, self.pairs, dtype=state_dtype(like.dtype))

    def input_map(self) -> nn.Module:
        return self.proj

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        raw = context.apply(self.proj, x)  # padded tokens are 0, and a map without bias keeps them 0
        dt = context.intermediate("dt")
        operands = RotaryOperands(
            inputs.q, inputs.k, context.intermediate("q_bias"), context.intermediate("k_bias"),
            math.pi * torch.tanh(raw.to(dt.dtype)), dt, state, context.cu_seqlens,
        )  # fmt: skip
        if inputs.q.shape[1] == 1:
            reasons = ["Inductor fuses the rotation of a single token with neighbouring operations."]
        elif context.parallel is not None:
            reasons = ["the plain form adds the angles of the ranks before."]
        else:
            reasons = refusals(inputs.q)
        has_kernel = runs_by_kernel("accumulated rotation", reasons)
        rotated = rotate(operands) if has_kernel else _rotate(operands, context)
        new_state = None if state is None else write_back(state, rotated.state)
        return inputs._replace(q=rotated.q, k=rotated.k), new_state, {"overlap": rotated.overlap}

    def extra_repr(self) -> str:
        return f"pairs={self.pairs}"


def _rotate(x: RotaryOperands, context: Context) -> Rotated:
    """Rotate in plain torch."""
    angle = accumulated_angle(x.rate[:, :, None] * x.dt[..., None], x.state, context)
    rotation = Rotation(angle.cos(), angle.sin())
    q, k = (
        apply_rotary((repeat(y, "b t h k -> b t (h g) k", g=bias.shape[0] // y.shape[2]) + bias).to(y.dtype), rotation)
        for y, bias in ((x.q, x.q_bias), (x.k, x.k_bias))
    )
    overlap = (q.to(x.dt.dtype) * k.to(x.dt.dtype)).sum(-1)
    return Rotated(q, k, overlap, angle if x.state is None else last_of_each_sequence(angle, x.state, context))


class TrapezoidalWrite(OperandPart, Stateful):
    """The write of the trapezoidal rule, (1 - lambda_t) dt_t a_t k_(t-1) v_(t-1)^T + lambda_t dt_t k_t v_t^T.

    The two writes of k_t v_t^T, at the tokens t and t + 1, are one write to a state that q reads before the token:

        S_t = a_t S_(t-1) + (lambda_t dt_t + (1 - lambda_(t+1)) dt_(t+1)) k_t v_t^T
        o_t = a_t S_(t-1)^T q_t + lambda_t dt_t (k_t^T q_t) v_t

    If there is a state, or the tokens are divided among ranks, the next token may be unknown. The state U then leaves
    out the writes of the last token, which are made with the next one:

        beta_t = a_t (lambda_(t-1) dt_(t-1) + (1 - lambda_t) dt_t),  U_t = a_t U_(t-1) + beta_t k_(t-1) v_(t-1)^T
        o_t = a_t U_(t-1)^T q_t + beta_t (k_(t-1)^T q_t) v_(t-1) + lambda_t dt_t (k_t^T q_t) v_t

    Reads "dt", "share", lambda, and "overlap". Returns "present", the factor of v_t [B, T, HV], and in the second
    form "previous", that of v_(t-1). `TrapezoidalRead` adds these terms.

    Args: scale: factor on the output.
    State: k, v and lambda dt of the last token, [B, 1, HV (K + V + 1)].
    """

    splits: ClassVar[bool] = True

    def __init__(self, shape: HeadShape, scale: float) -> None:
        super().__init__()
        self.heads, self.scale = shape.value_heads, scale
        self.sizes = [self.heads * width for width in (shape.key_width, shape.value_width, 1)]
        self.shift = TokenShift()

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, 1, sum(self.sizes), dtype=state_dtype(like.dtype))

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        assert inputs.log_decay is not None  # set by `TrapezoidalGates`
        dt, share, k, v = context.intermediate("dt"), context.intermediate("share"), inputs.k, inputs.v
        present = share * dt
        factors = {"present": self.scale * present * context.intermediate("overlap")}
        if state is None and context.parallel is None:
            beta = present + next_of_each_sequence((1 - share) * dt, context)
            return inputs._replace(beta=beta), None, factors
        streams = k.flatten(2), v.flatten(2), present
        histories = [None] * 3 if state is None else state.split(self.sizes, -1)
        results = [self.shift(y, history, context) for y, history in zip(streams, histories, strict=True)]
        previous_k, previous_v, previous = (shifted for shifted, _ in results)
        new_state = None if state is None else write_back(state, torch.cat([new for _, new in results], -1))
        beta = inputs.log_decay.exp() * (previous + (1 - share) * dt)
        k, v = (rearrange(y, "b t (h c) -> b t h c", h=self.heads) for y in (previous_k, previous_v))
        factors["previous"] = self.scale * beta * (inputs.q.to(dt.dtype) * k.to(dt.dtype)).sum(-1)
        return inputs._replace(k=k, v=v, beta=beta), new_state, factors


class TrapezoidalRead(OutputPart):
    """o_t <- a_t o_t, plus the terms of the present and the previous token that `TrapezoidalWrite` describes."""

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        inputs, v = arguments.inputs, arguments.projected.v
        assert inputs.log_decay is not None and context.intermediates is not None  # set by operand parts
        read = inputs.log_decay.exp()[..., None] * o + context.intermediate("present")[..., None] * v
        if "previous" in context.intermediates:
            read = read + context.intermediate("previous")[..., None] * inputs.v
        return read.to(o.dtype), None


def accumulated_angle(angle_step: Tensor, state: Tensor | None, context: Context) -> Tensor:
    """Return theta_t = theta_(t-1) + angle_step_t modulo 2 pi within each sequence, in the dtype of `angle_step`.

    Args: angle_step: [B, T, HV, R], 0 at padded tokens; state: theta before the first token, [N, HV, R], None: 0.
    """
    total = segment_cumsum(angle_step, state, context)
    return total.remainder(2 * math.pi).to(angle_step.dtype)
