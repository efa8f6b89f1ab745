"""A short causal convolution of each channel, and the token shift, with a state.

B batch, T time, C channels, N packed sequences
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.base import state_dtype
from deltazoo.mixers.base import Context
from deltazoo.mixers.sequence import counts, sequence_of
from deltazoo.mixers.state import carried


class ShortConv(nn.Module):
    """y_t = sum_i weight_i x_(t - taps + 1 + i) + bias, for each channel; before its first token a sequence is zero.

    Computed in float32 (float64 in float64) as shifted products, which Inductor fuses with what follows; in a pack
    no tap reaches into another sequence.

    Args: channels: C; taps: how many tokens a result sees, its own included.
    State: [B, taps - 1, C], the last real inputs.
    Initialisation: uniform in +-1 / sqrt(taps), as of torch's Conv1d.
    """

    def __init__(self, channels: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps).uniform_(-(taps**-0.5), taps**-0.5))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        """The history before the first token, in the dtype and on the device of `like`."""
        channels, taps = self.weight.shape
        return like.new_zeros(batch, taps - 1, channels)

    def forward(self, x_BTC: Tensor, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """Convolve: [B, T, C] -> [B, T, C] in the dtype of x, and the state after."""
        dtype = state_dtype(x_BTC.dtype)
        taps, after = taps_of(x_BTC, state, self.weight.shape[1] - 1, context)
        y_BTC = x_BTC.new_zeros((), dtype=dtype) if self.bias is None else self.bias.to(dtype)
        for i, tap in enumerate(taps):
            y_BTC = y_BTC + tap.to(dtype) * self.weight[:, i].to(dtype)
        return y_BTC.to(x_BTC.dtype), after

    def extra_repr(self) -> str:
        channels, taps = self.weight.shape
        return f"channels={channels}, taps={taps}, bias={self.bias is not None}"


class TokenShift(nn.Module):
    """x_t, x_(t-1) of the same sequence: what RWKV mixes; before its first token a sequence is zero.

    State: [B, 1, D], the last real input.
    """

    def init_state(self, batch: int, width: int, like: Tensor) -> Tensor:
        """The history before the first token, in the dtype and on the device of `like`."""
        return like.new_zeros(batch, 1, width)

    def forward(self, x_BTD: Tensor, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return x_(t-1) [B, T, D], and the state after."""
        taps, after = taps_of(x_BTD, state, 1, context)
        return taps[0], after


def taps_of(x_BTC: Tensor, state: Tensor | None, past: int, context: Context) -> tuple[list[Tensor], Tensor | None]:
    """x_(t - past), ..., x_t, each [B, T, C], and the state [B, past, C] after them (None where none came in)."""
    if context.cu_seqlens is not None:
        padded, rows_T, last = _pack_with_history(x_BTC, state, past, context.cu_seqlens)
        taps = [padded[:, rows_T - past + i] for i in range(past + 1)]
        after = padded[0, last] if state is not None else None
    elif state is not None:
        padded = torch.cat([state.to(x_BTC.dtype), x_BTC], 1)
        taps = [padded[:, i : i + x_BTC.shape[1]] for i in range(past + 1)]
        after = _last_real(padded, past, x_BTC, context)
    else:
        taps, after = [_shifted(x_BTC, past - i) for i in range(past + 1)], None
    return taps, None if after is None else carried(state, after)


def _shifted(x_BTC: Tensor, by: int) -> Tensor:
    """x_(t - by), zero before the first token. Each tap is padded by itself: Inductor reads x through that, but would
    write out one padded tensor that all taps share."""
    T = x_BTC.shape[1]
    left = max(T - by, 0)
    return F.pad(x_BTC[:, :left], (0, 0, T - left, 0)) if by else x_BTC


def _last_real(padded: Tensor, past: int, x_BTC: Tensor, context: Context) -> Tensor:
    """The last `past` real inputs of each row; row b of `padded` has its first token at index `past`."""
    if context.mask is None:
        return padded[:, x_BTC.shape[1] :]
    index_BP = counts(x_BTC, context)[:, None] + torch.arange(past, device=padded.device)
    return padded.gather(1, index_BP[..., None].expand(-1, -1, padded.shape[2]))


def _pack_with_history(
    x_1TC: Tensor, state: Tensor | None, past: int, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay a pack out with `past` rows of history before each sequence.

    Returns: the rows [1, T + N past, C]; where each token lies [T]; where the last `past` rows of each lie [N, past].
    """
    _, T, C = x_1TC.shape
    bounds = cu_seqlens.long()
    N = bounds.shape[0] - 1
    history_NP = (torch.arange(N, device=x_1TC.device) * past)[:, None] + torch.arange(past, device=x_1TC.device)
    rows_T = torch.arange(T, device=x_1TC.device) + (sequence_of(cu_seqlens, T) + 1) * past
    padded = x_1TC.new_zeros(1, T + N * past, C).index_copy(1, rows_T, x_1TC)
    if state is not None:
        first_NP = history_NP + bounds[:-1, None]
        padded = padded.index_copy(1, first_NP.flatten(), state.to(x_1TC.dtype).reshape(1, N * past, C))
    return padded, rows_T, history_NP + bounds[1:, None]
