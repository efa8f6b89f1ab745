"""A short causal convolution of each channel, and the token shift, with a state.

B batch, T time, C channels, N packed sequences
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deltazoo.backends.base import Backend
from deltazoo.backends.dispatch import bind_conv
from deltazoo.backends.short_conv import ConvInputs, ConvPart, shifted_taps
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasBackend
from deltazoo.mixers.core.sequences import token_counts
from deltazoo.mixers.core.state import write_back


class ShortConv(nn.Module, HasBackend):
    """y_t = sum_i weight_i x_(t - taps + 1 + i) + bias, for each channel; before its first token a sequence is zero.

    Computed in float32 (float64 in float64), with what follows in each part, by the backend's kernel or in plain torch
    (`deltazoo.backends.short_conv`); in a pack no tap reaches into another sequence.

    Args: channels: C; taps: how many tokens a result sees, its own included; parts: the channels that become a tensor
        each, with SiLU and norm; none: all in one, without; backend: as for `deltazoo.bind`.
    State: [B, taps - 1, C], the last real inputs.
    Initialisation: uniform in +-1 / sqrt(taps), as of torch's Conv1d.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        bias: bool = False,
        parts: Sequence[ConvPart] = (),
        backend: str | Backend | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps).uniform_(-(taps**-0.5), taps**-0.5))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.parts = tuple(parts) or (ConvPart(channels),)
        self.rebind(backend, self.weight)

    def rebind(self, backend: str | Backend | None, like: Tensor) -> None:
        self.bound = bind_conv(self.parts, backend)

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        """The history before the first token, in the dtype and on the device of `like`."""
        channels, taps = self.weight.shape
        return like.new_zeros(batch, taps - 1, channels)

    def forward(
        self, x_BTC: Tensor, state: Tensor | None, context: Context
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Convolve [B, T, C]: a tensor [B, T, channels] in the dtype of x for each part, and the state after."""
        history = None if state is None else state.to(x_BTC.dtype)
        streams = self.bound(ConvInputs(x_BTC, self.weight, self.bias, history, context.cu_seqlens))
        return streams, _after(x_BTC, state, context)

    def extra_repr(self) -> str:
        channels, taps = self.weight.shape
        return f"channels={channels}, taps={taps}, bias={self.bias is not None}, parts={[tuple(p) for p in self.parts]}"


class TokenShift(nn.Module):
    """x_t, x_(t-1) of the same sequence: what RWKV mixes; before its first token a sequence is zero.

    State: [B, 1, D], the last real input.
    """

    def init_state(self, batch: int, width: int, like: Tensor) -> Tensor:
        """The history before the first token, in the dtype and on the device of `like`."""
        return like.new_zeros(batch, 1, width)

    def forward(self, x_BTD: Tensor, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return x_(t-1) [B, T, D], and the state after."""
        return shifted_taps(x_BTD, state, 1, context.cu_seqlens)[0], _after(x_BTD, state, context)


def _after(x_BTC: Tensor, state: Tensor | None, context: Context) -> Tensor | None:
    """The state after: the last real inputs of each sequence, as many as `state` [N, P, C] has."""
    if state is None:
        return None
    T, past = x_BTC.shape[1], state.shape[1]
    before = state.to(x_BTC.dtype)
    if context.mask is None and context.cu_seqlens is None:
        recent = x_BTC[:, max(T - past, 0) :]
        return write_back(state, torch.cat([before, recent], 1)[:, recent.shape[1] :])
    if T == 0 or past == 0:
        return write_back(state, before)
    # of each sequence, with its history from -past on: the last indices
    index_NP = token_counts(x_BTC, context)[:, None] + torch.arange(-past, 0, device=x_BTC.device)
    if context.cu_seqlens is None:
        latest = _rows(x_BTC, index_NP.clamp(min=0))
    else:
        latest = x_BTC[0, (context.cu_seqlens[:-1, None] + index_NP.clamp(min=0)).clamp(max=T - 1)]
    held = _rows(before, (index_NP + past).clamp(max=past - 1))
    return write_back(state, torch.where((index_NP >= 0)[..., None], latest, held))


def _rows(x_BTC: Tensor, index_BP: Tensor) -> Tensor:
    return x_BTC.gather(1, index_BP[..., None].expand(-1, -1, x_BTC.shape[2]))
