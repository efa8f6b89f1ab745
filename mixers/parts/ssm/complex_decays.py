"""Decays of complex diagonal recurrences: the LRU's exponential parametrisation, and S5's discretised state space.

Each part sets the magnitude of the decay as `log_decay`, and returns its angle as the intermediate "frequency", which
`ToRotatingFrame` reads, in float64: an error of float32 would grow with the position.

HV value heads (one per complex state)
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor, nn

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.initialization import fill_log_uniform, fills_values
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape, OperandPart, OperandResult
from deltazoo.mixers.parts.gates.decays import DT_MAX, DT_MIN
from deltazoo.mixers.parts.rotary import angle_dtype
from deltazoo.mixers.parts.ssm.discretisation import Discretisation, discretise


class LRUDecay(OperandPart):
    """a = exp(-exp(nu) + i exp(theta)), v <- exp(gamma) v. Returns the intermediate "frequency", exp(theta).

    Args: ring: smallest and largest |a| at initialisation; phase: largest angle of a at initialisation, in radians.
    Initialisation: |a|^2 uniform in [ring[0]^2, ring[1]^2], the angle uniform in [0, phase],
        exp(gamma) = sqrt(1 - |a|^2).
    Source: LRU 2303.06349, sections 3.3 and 3.4.
    """

    def __init__(self, shape: HeadShape, ring: tuple[float, float], phase: float) -> None:
        super().__init__()
        if not 0 <= ring[0] <= ring[1] <= 1:
            raise ConfigError(f"ring must be two increasing numbers between 0 and 1, got {ring}")
        self.ring, self.phase = ring, phase
        self.nu, self.theta, self.gamma = (nn.Parameter(torch.empty(shape.value_heads)) for _ in range(3))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        # not 0 or 1, which a draw may give, and whose logarithms are infinite
        square = torch.empty_like(self.nu).uniform_(self.ring[0] ** 2, self.ring[1] ** 2).clamp_(2**-24, 1 - 2**-24)
        self.nu.copy_((-0.5 * square.log()).log())
        fill_log_uniform(self.theta, 0.0, self.phase)
        self.gamma.copy_(0.5 * torch.log1p(-square))

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        dtype = state_dtype(inputs.v.dtype)
        frequency = self.theta.to(angle_dtype(self.theta.device)).exp()
        v = (inputs.v * self.gamma.to(dtype).exp()[:, None]).to(inputs.v.dtype)
        return inputs._replace(v=v, log_decay=-self.nu.to(dtype).exp()), None, {"frequency": frequency}

    def step_parameters(self) -> tuple[str, Tensor, Tensor, Tensor]:
        """Return the kind, magnitude, angle and scale of a `RotatingCall`."""
        return "lru", self.nu, self.theta, self.gamma


class S5Decay(OperandPart):
    """A diagonal state space with complex eigenvalues lambda: a and b from `discretise`, v <- b v.

    Returns the intermediate "frequency", the angle of a.

    Args: blocks: the number of HiPPO matrices that the eigenvalues are taken from.
    Initialisation: lambda are the eigenvalues with positive imaginary part of HiPPO-LegS's normal part, one set per
        block; dt is log-uniform in [1e-3, 1e-1] for each state.
    Source: S5 2208.04933, sections 3.2 and 3.3.
    """

    def __init__(self, shape: HeadShape, blocks: int, discretisation: Discretisation) -> None:
        super().__init__()
        self.blocks, self.discretisation = blocks, discretisation
        self.log_real, self.imaginary, self.log_dt = (nn.Parameter(torch.empty(shape.value_heads)) for _ in range(3))
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        states = self.log_dt.shape[0]
        one_block = hippo_eigenvalues(2 * math.ceil(states / self.blocks))
        eigenvalues = np.tile(one_block, self.blocks)[:states]
        self.log_real.copy_(torch.tensor(np.log(-eigenvalues.real)))
        self.imaginary.copy_(torch.tensor(eigenvalues.imag))
        self.log_dt.uniform_(math.log(DT_MIN), math.log(DT_MAX))

    def forward(self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context) -> OperandResult:
        dtype, wide = state_dtype(inputs.v.dtype), angle_dtype(self.log_dt.device)
        real, imaginary = -self.log_real.to(wide).exp(), self.imaginary.to(wide)
        discrete = discretise(self.discretisation, real, imaginary, self.log_dt.to(wide).exp())
        frequency, (log_decay, _, b_re, b_im) = discrete[1], (y.to(dtype) for y in discrete)
        re, im = inputs.v.to(dtype).unbind(-1)
        v = torch.stack([re * b_re - im * b_im, re * b_im + im * b_re], -1)
        return inputs._replace(v=v.to(inputs.v.dtype), log_decay=log_decay), None, {"frequency": frequency}

    def step_parameters(self) -> tuple[str, Tensor, Tensor, Tensor] | None:
        """Return the kind, magnitude, angle and scale of a `RotatingCall`; None: no zero-order hold."""
        return ("s5", self.log_real, self.imaginary, self.log_dt) if self.discretisation == "zoh" else None

    def extra_repr(self) -> str:
        return repr(self.discretisation)


@functools.lru_cache(maxsize=8)
def hippo_eigenvalues(size: int) -> np.ndarray:
    """Return the eigenvalues with positive imaginary part of HiPPO-LegS's normal part, [size / 2] complex."""
    scale = np.sqrt(1 + 2 * np.arange(size))
    lower = np.tril(scale[:, None] * scale, -1)
    skew = (lower.T - lower) / 2  # the normal part of HiPPO-LegS without its diagonal of -1/2
    values = np.linalg.eigvalsh(-1j * skew)
    return -0.5 + 1j * values[values > 0][: size // 2]
