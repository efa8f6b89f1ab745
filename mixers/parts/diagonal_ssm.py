"""A diagonal state space of every channel, one input and one output each, as a recurrence or as one long convolution.

B batch, T time, D channels, N states a channel, K = 2 N (complex: real parts, imaginary parts) or N (real)
"""

import math
from typing import ClassVar, Literal

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from deltazoo.backends.base import Backend, UpdateInputs, state_dtype
from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.delta_mixer import Update
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HeadShape
from deltazoo.mixers.core.sequences import positions, token_counts
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.parts.complex_states import Discretisation, angle_at, discretised
from deltazoo.mixers.parts.decays import DT_MAX, DT_MIN

StateInit = Literal["lin", "inv", "real"]
DIAGONAL_SSM_SPEC = UpdateSpec(decay="fixed", transition="additive", scale=1.0)


class DiagonalSSM(nn.Module):
    """y_t = Re(sum_n C_n h_nt) + skip x_t, h_nt = a_n h_n(t-1) + b_n x_t, a and b from lambda and dt, in each channel.

    As an update: every channel is a head with V = 1, a is its decay's length, and q and k turn by a's angle.
    With `convolution`, whole sequences without a state are convolved by FFT with sum_n C_n a_n^t b_n.

    Initialisation: S4D-Lin, lambda_n = -1/2 + i pi n; S4D-Inv, -1/2 + i M / pi (M / (2 n + 1) - 1), M = 2 N; S4D-Real,
    -(n + 1). The parts of C are N(0, 2): the 2 of conjugate pairs is in C; dt log-uniform in [1e-3, 1e-1]; skip normal.
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
        self.discretisation, self.convolution = discretisation, convolution
        n = torch.arange(states)
        real = torch.full((states,), 0.5) if start != "real" else n + 1.0
        imaginary = {"lin": math.pi * n, "inv": 2 * states / math.pi * (2 * states / (2 * n + 1) - 1)}
        self.log_real = nn.Parameter(real.log().repeat(channels, 1))
        self.imaginary = None if start == "real" else nn.Parameter(imaginary[start].float().repeat(channels, 1))
        self.C = nn.Parameter(
            torch.randn(channels, states) if start == "real" else 2**0.5 * torch.randn(channels, states, 2)
        )
        self.log_dt = nn.Parameter(torch.empty(channels, 1).uniform_(math.log(DT_MIN), math.log(DT_MAX)))
        self.skip = nn.Parameter(torch.randn(channels))
        width = states if start == "real" else 2 * states
        self.update = Update(DIAGONAL_SSM_SPEC, HeadShape(channels, channels, channels, width, 1), backend)

    def init_state(self, batch: int, like: Tensor) -> dict[str, Tensor]:
        """The state before the first token, on the device of `like`."""
        return {"update": self.update.init_state(batch, like), "seen": like.new_zeros(batch, dtype=torch.int64)}

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None, context: Context
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Filter x [B, T, D]; padded tokens, at the right, must be zero. Returns y in the dtype of x."""
        log_a, turn, b = self._stepped(state_dtype(x.dtype))
        if self.convolution and state is None and context.cu_seqlens is None:
            y, after = fft_convolve(x, self._kernel(log_a, turn, b, x.shape[1])), None
        else:
            y, after = self._recurrent(x, log_a, turn, b, state, context)
        return (y + self.skip * x).to(x.dtype), after

    def _stepped(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """log |a| and the angle of a [D, N], b [D, N, 2]."""
        real = -self.log_real.to(dtype).exp()
        imaginary = torch.zeros_like(real) if self.imaginary is None else self.imaginary.to(dtype)
        log_a, turn, *b = discretised(self.discretisation, real, imaginary, self.log_dt.to(dtype).exp())
        return log_a, turn, torch.stack(b, -1)

    def _recurrent(
        self, x: Tensor, log_a: Tensor, turn: Tensor, b: Tensor, state: dict[str, Tensor] | None, context: Context
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        dtype = log_a.dtype
        seen = None if state is None else state["seen"]
        if self.imaginary is None:
            k = b[..., 0].expand(*x.shape[:2], -1, -1)
            q, log_decay = self.C.to(dtype).expand_as(k), log_a
        else:
            # exp(-i angle) b on the way in, Re(C exp(i angle) .) on the way out
            angle = angle_at(positions(x, seen, context), turn, dtype)
            cos, sin = angle.cos(), angle.sin()
            b_re, b_im = b.unbind(-1)
            c_re, c_im = self.C.to(dtype).unbind(-1)
            k = torch.cat([b_re * cos + b_im * sin, b_im * cos - b_re * sin], -1)
            q = torch.cat([c_re * cos - c_im * sin, -(c_im * cos + c_re * sin)], -1)
            log_decay = repeat(log_a, "d n -> d (two n)", two=2)
        v = x.to(dtype)[..., None]
        o, held = self.update(
            UpdateInputs(q, k, v, log_decay=log_decay), None if state is None else state["update"], context
        )
        if state is None or seen is None or held is None:
            return o.squeeze(-1), None
        counted = write_back(seen, seen + token_counts(x, context))
        assert counted is not None
        return o.squeeze(-1), {"update": held, "seen": counted}

    def _kernel(self, log_a: Tensor, turn: Tensor, b: Tensor, T: int) -> Tensor:
        """sum_n Re(C_n b_n a_n^t): [T, D]."""
        time = torch.arange(T, device=log_a.device)
        size = (log_a * time[:, None, None]).exp()
        if self.imaginary is None:
            return (size * (self.C.to(b.dtype) * b[..., 0])).sum(-1)
        (b_re, b_im), (c_re, c_im) = b.unbind(-1), self.C.to(b.dtype).unbind(-1)
        angle = angle_at(time[None], turn, log_a.dtype)[0]
        re, im = c_re * b_re - c_im * b_im, c_re * b_im + c_im * b_re
        return (size * (re * angle.cos() - im * angle.sin())).sum(-1)

    def extra_repr(self) -> str:
        return f"discretisation={self.discretisation!r}, convolution={self.convolution}"


def fft_convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve causally: y_t = sum_(s <= t) kernel_(t - s) x_s; x [B, T, D], kernel [T or more, D]; in its dtype."""
    T = x.shape[1]
    if T == 0 or x.shape[0] == 0:  # MKL has no transform of nothing
        return x.to(kernel.dtype)
    size = 2 * T
    wide = x.to(kernel.dtype)
    spectrum = torch.fft.rfft(rearrange(wide, "b t d -> b d t"), size) * torch.fft.rfft(kernel[:T].mT, size)
    return rearrange(torch.fft.irfft(spectrum, size)[..., :T], "b d t -> b t d")
