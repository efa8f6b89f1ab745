"""S4D: a diagonal state space per channel with one input and one output, as a recurrence or a long convolution.

B batch, T time, D channels, N states per channel; K = 2 N for complex states (real parts, imaginary parts), N for real
"""

import math
from typing import ClassVar, Literal, NamedTuple

import torch
from einops import repeat
from torch import Tensor, nn

from deltazoo.backends.ops.long_conv import long_conv
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.triton.element.complex_op import ComplexCall, complex_step_
from deltazoo.backends.triton.limits import kernel_refusals
from deltazoo.backends.update.base import Backend, UpdateInputs, state_dtype, without_autocast
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.initialization import fills_values
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape
from deltazoo.mixers.core.sequences import positions, token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.core.token_step import Around, FilterStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.gates.decays import DT_MAX, DT_MIN
from deltazoo.mixers.parts.rotary import rotation_angle
from deltazoo.mixers.parts.ssm.discretisation import Discretisation, discretise

StateInit = Literal["lin", "inv", "real"]
_BLOCK = 64
DIAGONAL_SSM_SPEC = UpdateSpec(decay="fixed", transition="additive", scale=1.0)


class _Discrete(NamedTuple):
    """The recurrence S_t = a S_(t-1) + b x_t.

    Args: log_magnitude: log |a|. frequency: the angle of a. b_re, b_im: real and imaginary parts of b. [D, N] each.
    """

    log_magnitude: Tensor
    frequency: Tensor
    b_re: Tensor
    b_im: Tensor


class DiagonalSSM(nn.Module, FilterStep):
    """y_t = Re(sum_n C_n h_nt) + skip x_t with h_nt = a_n h_n(t-1) + b_n x_t; a and b from lambda and dt, per channel.

    As an update, every channel is a head with V = 1. |a| is the decay, and the angle of a rotates q and k.
    With `convolution`, whole sequences without a state are convolved by FFT with the kernel sum_n C_n a_n^t b_n.

    Args:
        start: initial eigenvalues, S4D-Lin, S4D-Inv or S4D-Real; the last has real states.
        convolution: use the FFT for whole sequences; False: always the recurrence.
        backend: as for `deltazoo.bind`.
    Initialisation: S4D-Lin, lambda_n = -1/2 + i pi n; S4D-Inv, -1/2 + i M / pi (M / (2 n + 1) - 1) with M = 2 N;
        S4D-Real, -(n + 1). Re C and Im C are N(0, 2): the factor 2 of conjugate pairs is part of C. dt is log-uniform
        in [1e-3, 1e-1]; skip is standard normal.
    State: {"update": [B, D, K, 1], "seen": [B] int64}.
    Source: S4D 2206.11893, sections 3 and 4.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("log_real", "imaginary", "log_dt")

    def __init__(
        self,
        channels: int,
        states: int,
        start: StateInit = "lin",
        discretisation: Discretisation = "zoh",
        convolution: bool = False,
        backend: str | Backend | None = None,
    ) -> None:
        super().__init__()
        self.start, self.discretisation, self.convolution = start, discretisation, convolution
        real = start == "real"
        self.log_real = nn.Parameter(torch.empty(channels, states))
        self.imaginary = None if real else nn.Parameter(torch.empty(channels, states))
        self.C = nn.Parameter(torch.empty(channels, states) if real else torch.empty(channels, states, 2))
        self.log_dt = nn.Parameter(torch.empty(channels, 1))
        self.skip = nn.Parameter(torch.empty(channels))
        width = states if real else 2 * states
        self.update = Update(DIAGONAL_SSM_SPEC, HeadShape(channels, channels, channels, width, 1), backend)
        self.reset_parameters()

    @fills_values
    def reset_parameters(self) -> None:
        states = self.log_real.shape[1]
        n = torch.arange(states)
        self.log_real.copy_((torch.full((states,), 0.5) if self.start != "real" else n + 1.0).log())
        if self.imaginary is not None:
            lin, inv = math.pi * n, 2 * states / math.pi * (2 * states / (2 * n + 1) - 1)
            self.imaginary.copy_(lin if self.start == "lin" else inv)
        self.C.normal_()
        if self.imaginary is not None:
            self.C.mul_(2**0.5)
        self.log_dt.uniform_(math.log(DT_MIN), math.log(DT_MAX))
        self.skip.normal_()

    def init_state(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """Return the state before the first token, on the device of `like`."""
        return {"update": self.update.init_state(batch, like), "seen": like.new_zeros(batch, dtype=torch.int64)}

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None, context: Context
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Filter x [B, T, D], whose padding is at the right and zero. Returns: y in the dtype of x; the new state."""
        stepped = self.step_(x, state, context, Around())
        if stepped is not None:
            return stepped
        system = self._discretise(state_dtype(x.dtype))
        if self.convolution and state is None and context.cu_seqlens is None:
            y, new_state = long_conv(x, self._kernel(system, x.shape[1])), None
        else:
            y, new_state = self._recurrent(x, system, state, context)
        return (y + self.skip * x).to(x.dtype), new_state

    def _discretise(self, dtype: torch.dtype) -> "_Discrete":
        real = -self.log_real.to(dtype).exp()
        imaginary = torch.zeros_like(real) if self.imaginary is None else self.imaginary.to(dtype)
        return _Discrete(*discretise(self.discretisation, real, imaginary, self.log_dt.to(dtype).exp()))

    def step_(
        self, x: Tensor, state: dict[str, Tensor] | None, context: Context, around: Around
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        is_step = x.shape[1] == 1 and context.mask is None and context.cu_seqlens is None and context.parallel is None
        if state is None or not is_step or self.imaginary is None or torch.is_grad_enabled():
            return None
        meta = self.update.meta(device_type(x), x.dtype)
        if kernel_refusals(x) or not is_plain(self.update) or not self.update.bound.has_decode_kernels(meta):
            return None
        seen, position = state["seen"], positions(x, state["seen"], context)[:, 0]
        system = self._discretise(state_dtype(x.dtype))
        factor, gate = (None if y is None else y[:, 0] for y in around[:2])
        call = ComplexCall(
            x[:, 0], factor, gate, around.gelu, turns=system.frequency.double() / (2 * math.pi),
            log_magnitude=system.log_magnitude, b_re=system.b_re, b_im=system.b_im, c=self.C, skip=self.skip,
            position=position, states=state["update"],
        )  # fmt: skip
        return complex_step_(call)[:, None], {"update": state["update"], "seen": write_back(seen, seen + 1)}

    def _recurrent(
        self, x: Tensor, system: "_Discrete", state: dict[str, Tensor] | None, context: Context
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        log_magnitude, frequency, b_re, b_im = system
        dtype = log_magnitude.dtype
        seen = None if state is None else state["seen"]
        if self.imaginary is None:
            k = b_re.expand(*x.shape[:2], -1, -1)
            q, log_decay = self.C.to(dtype).expand_as(k), log_magnitude
        else:
            # The state is in the rotating frame: k = exp(-i angle) b, and q computes Re(C exp(i angle) state).
            angle = rotation_angle(positions(x, seen, context), frequency, dtype)
            cos, sin = angle.cos(), angle.sin()
            c_re, c_im = self.C.to(dtype).unbind(-1)
            k = torch.cat([b_re * cos + b_im * sin, b_im * cos - b_re * sin], -1)
            q = torch.cat([c_re * cos - c_im * sin, -(c_im * cos + c_re * sin)], -1)
            log_decay = repeat(log_magnitude, "d n -> d (two n)", two=2)
        v = x.to(dtype)[..., None]
        old = None if state is None else state["update"]
        o, new_state = call_part(self.update, UpdateInputs(q, k, v, log_decay=log_decay), old, context)
        if state is None or seen is None or new_state is None:
            return o.squeeze(-1), None
        return o.squeeze(-1), {"update": new_state, "seen": write_back(seen, seen + token_counts(x, context))}

    def _kernel(self, system: "_Discrete", T: int) -> Tensor:
        """Return the convolution kernel sum_n Re(C_n b_n a_n^t), [T, D].

        With t = _BLOCK i + j it is for each channel the product of matrices C b a^(_BLOCK i) [i, n] and a^j [n, j],
        whose exponentials are those of T / _BLOCK + _BLOCK times instead of T.
        """
        log_magnitude, frequency, b_re, b_im = system
        device = log_magnitude.device
        i, j = torch.arange((T + _BLOCK - 1) // _BLOCK, device=device) * _BLOCK, torch.arange(_BLOCK, device=device)

        def power(time: Tensor) -> tuple[Tensor, Tensor]:
            """The real and imaginary parts of a^t, [time, D, N]."""
            magnitude = (log_magnitude * time[:, None, None]).exp()
            angle = rotation_angle(time[None], frequency, log_magnitude.dtype)[0]
            return magnitude * angle.cos(), magnitude * angle.sin()

        (i_re, i_im), (j_re, j_im) = power(i), power(j)
        if self.imaginary is None:
            weight = self.C.to(b_re.dtype) * b_re
            left, right = weight * i_re, j_re
        else:
            c_re, c_im = self.C.to(b_re.dtype).unbind(-1)
            re, im = c_re * b_re - c_im * b_im, c_re * b_im + c_im * b_re
            left = torch.cat([re * i_re - im * i_im, re * i_im + im * i_re], -1)
            right = torch.cat([j_re, -j_im], -1)
        with without_autocast(left):
            kernel_DIJ = left.transpose(0, 1) @ right.permute(1, 2, 0)
        return kernel_DIJ.flatten(1)[:, :T].mT

    def extra_repr(self) -> str:
        return f"discretisation={self.discretisation!r}, convolution={self.convolution}"
