"""Complex states as real ones: a turning frame, in which a complex decay is a real one.

With a_t = r_t exp(i w), s_t = a_t s_(t-1) + b_t is s'_t = r_t s'_(t-1) + exp(-i w t) b_t for s'_t = exp(-i w t) s_t:
values turn on the way in, and back on the way out. V = 2 holds (real, imaginary).
B batch, T time, D width, HV value heads (one a complex state)
"""

import functools
import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.errors import ConfigError
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OperandPart, OutputArguments, OutputPart, Stateful
from deltazoo.mixers.core.sequences import positions, token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.decays import DT_MAX, DT_MIN

Discretisation = Literal["zoh", "bilinear"]


class ToRotatingFrame(OperandPart, Stateful):
    """v_t <- exp(-i w t) v_t for the turn w [HV] a token: the note "turn", or learned; leaves the note "angle".

    Angles are float64 modulo 2 pi, so that a long sequence turns as well as a short one.
    Initialisation of a learned w: theta^(-2 h / HV), as published for HGRN.
    State: how many tokens each sequence has seen, [B] int64.
    """

    def __init__(self, shape: HeadShape, theta: float | None = None) -> None:
        super().__init__()
        learned = theta is not None
        place = torch.arange(shape.value_heads) / shape.value_heads
        self.turn = nn.Parameter((theta or 1.0) ** (-2 * place)) if learned else None

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, dtype=torch.int64)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        turn = context.intermediate("turn") if self.turn is None else self.turn
        angle = angle_at(positions(x, state, context), turn, state_dtype(inputs.v.dtype))
        context.store(angle=angle)
        after = None if state is None else write_back(state, state + token_counts(x, context))
        return inputs._replace(v=turned(inputs.v, -angle)), after


class FromRotatingFrame(OutputPart):
    """o_t <- exp(i w t) o_t, with the angles that `ToRotatingFrame` left."""

    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return turned(o, context.intermediate("angle")), None


class LRUDecay(OperandPart):
    """a = exp(-exp(nu) + i exp(theta)), v <- exp(gamma) v: the LRU's. Leaves the note "turn".

    Initialisation: |a|^2 uniform in [low^2, high^2], the angle uniform in [0, phase], exp(gamma) = sqrt(1 - |a|^2).
    Source: LRU 2303.06349, sections 3.3 and 3.4.
    """

    def __init__(self, shape: HeadShape, ring: tuple[float, float], phase: float) -> None:
        super().__init__()
        low, high = ring
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"ring must be two numbers that rise, from 0 to 1, got {ring}")
        square = torch.empty(shape.value_heads).uniform_(low**2, high**2)
        self.nu = nn.Parameter((-0.5 * square.log()).log())
        self.theta = nn.Parameter(torch.empty(shape.value_heads).uniform_(0, phase).log())
        self.gamma = nn.Parameter(0.5 * torch.log1p(-square))

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        dtype = state_dtype(inputs.v.dtype)
        context.store(turn=self.theta.exp())
        v = (inputs.v * self.gamma.to(dtype).exp()[:, None]).to(inputs.v.dtype)
        return inputs._replace(v=v, log_decay=-self.nu.to(dtype).exp()), None


class S5Decay(OperandPart):
    """A diagonal state space of complex lambda, stepped over dt: a = exp(lambda dt), v <- b v. Leaves the note "turn".

    zoh: a = exp(lambda dt), b = (a - 1) / lambda; bilinear: a = (1 + lambda dt / 2) / (1 - lambda dt / 2),
    b = dt / (1 - lambda dt / 2).

    Initialisation: lambda are the eigenvalues of the normal part of HiPPO-LegS with positive imaginary part, in blocks;
    dt log-uniform in [1e-3, 1e-1] for each state.
    Source: S5 2208.04933, sections 3.2 and 3.3.
    """

    def __init__(self, shape: HeadShape, blocks: int, discretisation: Discretisation) -> None:
        super().__init__()
        self.discretisation = discretisation
        states = shape.value_heads
        eigenvalues = hippo_eigenvalues(2 * math.ceil(states / blocks))
        wanted = np.tile(eigenvalues, blocks)[:states]
        self.log_real = nn.Parameter(torch.tensor(np.log(-wanted.real), dtype=torch.get_default_dtype()))
        self.imaginary = nn.Parameter(torch.tensor(wanted.imag, dtype=torch.get_default_dtype()))
        self.log_dt = nn.Parameter(torch.empty(states).uniform_(math.log(DT_MIN), math.log(DT_MAX)))

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        dtype = state_dtype(inputs.v.dtype)
        real, imaginary = -self.log_real.to(dtype).exp(), self.imaginary.to(dtype)
        log_decay, turn, b_real, b_imaginary = discretised(self.discretisation, real, imaginary, self.log_dt.exp())
        context.store(turn=turn)
        re, im = inputs.v.to(dtype).unbind(-1)
        v = torch.stack([re * b_real - im * b_imaginary, re * b_imaginary + im * b_real], -1)
        return inputs._replace(v=v.to(inputs.v.dtype), log_decay=log_decay), None

    def extra_repr(self) -> str:
        return repr(self.discretisation)


class ComplexConjugate(OutputPart):
    """o <- (re, -im): the maps after it then add up the real part of C s."""

    def forward(
        self, o: Tensor, flow: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        return torch.stack([o[..., 0], -o[..., 1]], -1), None


class Feedthrough(nn.Module):
    """x -> D x, channel by channel. Initialisation: standard normal (LRU, S5)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.D


def discretised(how: Discretisation, real: Tensor, imaginary: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
    """Step lambda = real + i imaginary over dt: the log of |a|, the angle of a, and b as real and imaginary part.

    Complex products are written out: torch compiles complex tensors badly.
    """
    if how == "zoh":
        log_decay, turn = real * dt, imaginary * dt
        size = log_decay.exp()
        # exp(z) - 1 for small z, without cancelling: expm1(re) cos(im) - 2 sin(im / 2)^2
        above = torch.expm1(log_decay) * turn.cos() - 2 * (turn / 2).sin().square()
        beside = size * turn.sin()
        square = real.square() + imaginary.square()
        return (
            log_decay,
            turn,
            (above * real + beside * imaginary) / square,
            (beside * real - above * imaginary) / square,
        )
    half_re, half_im = real * dt / 2, imaginary * dt / 2
    under = (1 - half_re).square() + half_im.square()
    log_decay = 0.5 * (((1 + half_re).square() + half_im.square()).log() - under.log())
    turn = torch.atan2(half_im, 1 + half_re) + torch.atan2(half_im, 1 - half_re)
    return log_decay, turn, dt * (1 - half_re) / under, dt * half_im / under


@functools.lru_cache(maxsize=8)
def hippo_eigenvalues(size: int) -> np.ndarray:
    """Eigenvalues with positive imaginary part of the normal part of HiPPO-LegS: [size / 2] complex."""
    place = np.sqrt(1 + 2 * np.arange(size))
    lower = np.tril(place[:, None] * place, -1)
    skew = (lower.T - lower) / 2  # HiPPO plus half an outer product; the diagonal is -1/2
    values = np.linalg.eigvalsh(-1j * skew)
    return -0.5 + 1j * values[values > 0][: size // 2]


def angle_at(position_BT: Tensor, turn: Tensor, dtype: torch.dtype) -> Tensor:
    """position * turn modulo 2 pi: [B, T, *turn.shape]."""
    wide = torch.float32 if turn.device.type == "mps" else torch.float64
    at = position_BT.to(wide).view(*position_BT.shape, *[1] * turn.dim())
    return (at * turn.to(wide)).remainder(2 * math.pi).to(dtype)


def turned(pair: Tensor, angle: Tensor) -> Tensor:
    """exp(i angle) (re + i im): pair [..., HV, 2], angle [..., HV]."""
    re, im = pair.to(angle.dtype).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([re * cos - im * sin, re * sin + im * cos], -1).to(pair.dtype)
