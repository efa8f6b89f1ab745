"""The short causal convolution of each channel with the SiLU and the norm that follow: what it means, in plain torch.

B batch, T time, C channels, W taps, N sequences: the B rows, or those of a pack
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from deltazoo.backends.torch_ext.modes import values_are_readable
from deltazoo.backends.varlen import packing_problems, sequence_count, sequence_index

EPS = 1e-6  # of the norm


class ConvPart(NamedTuple):
    """Some of the channels, and what follows the convolution there.

    silu: y <- silu(y). unit: after it the heads, of so many channels each, are divided by their L2 norm,
    y / sqrt(sum y^2 + 1e-6); 0: none is.
    """

    channels: int
    silu: bool = False
    unit: int = 0


class ConvInputs(NamedTuple):
    """x [B, T, C]; weight [C, W]; bias [C]; history [N, W - 1, C], what stood before the first tokens, zero where
    None; cu_seqlens [N + 1] int32, the bounds of a pack, then B = 1."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    history: Tensor | None = None
    cu_seqlens: Tensor | None = None


class ConvMeta(NamedTuple):
    """What a backend may know before it says whether it has a kernel; never T or B. dtype: of x."""

    device: str
    dtype: torch.dtype
    taps: int
    parts: tuple[ConvPart, ...]


def short_conv(inputs: ConvInputs, parts: Sequence[ConvPart]) -> tuple[Tensor, ...]:
    """y_t = sum_i weight_i x_(t - W + 1 + i) + bias for each channel, then SiLU and norm as each part says.

    Computed in float32 (float64 in float64) and rounded once, as shifted products, which Inductor fuses with what
    follows. In a pack no tap reaches into another sequence.

    Returns: [B, T, channels] in the dtype of x for each part, the parts being the channels of x one after the other.
    """
    x_BTC, weight, bias, history, cu_seqlens = inputs
    wide = torch.promote_types(x_BTC.dtype, torch.float32)
    taps = shifted_taps(x_BTC, history, weight.shape[1] - 1, cu_seqlens)
    y_BTC = x_BTC.new_zeros((), dtype=wide) if bias is None else bias.to(wide)
    for i, tap in enumerate(taps):
        y_BTC = y_BTC + tap.to(wide) * weight[:, i].to(wide)
    return tuple(y.to(x_BTC.dtype) for y in follow(y_BTC, parts))


def follow(y_BTC: Tensor, parts: Sequence[ConvPart]) -> tuple[Tensor, ...]:
    """What follows the convolution: SiLU and norm as each part says, [B, T, channels] in the dtype of y for each."""
    streams = y_BTC.split([part.channels for part in parts], dim=-1)
    return tuple(_unit(_silu(y, part), part) for y, part in zip(streams, parts, strict=True))


def check_conv(inputs: ConvInputs, parts: Sequence[ConvPart]) -> None:
    """Raise unless shapes, dtypes and devices fit one another and the parts; of CPU tensors the bounds of a pack, too.

    Raises: ShapeError, DtypeError, DeviceError, ValueRangeError.
    """
    x, weight, cu_seqlens = inputs.x, inputs.weight, inputs.cu_seqlens
    if x.dim() != 3:
        raise ShapeError(f"x must have shape [B, T, C], got {list(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise ShapeError(f"weight must have shape [C, W] with a tap or more, got {list(weight.shape)}")
    C, W = x.shape[2], weight.shape[1]
    if sum(part.channels for part in parts) != C or any(part.unit and part.channels % part.unit for part in parts):
        raise ShapeError(f"parts must share the {C} channels of x in whole heads, got {list(parts)}")
    rows = sequence_count(cu_seqlens, x.shape[0])
    wanted = {"weight": (weight, (C, W)), "bias": (inputs.bias, (C,)), "history": (inputs.history, (rows, W - 1, C))}
    for name, (tensor, want) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != want:
            raise ShapeError(f"{name} must have shape {list(want)}, got {list(tensor.shape)}")
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise DeviceError(f"{name} must be on {x.device}, where x is, got {tensor.device}")
        if name == "cu_seqlens" and tensor.dtype != torch.int32:
            raise DtypeError(f"cu_seqlens must be int32, got {tensor.dtype}")
        if name != "cu_seqlens" and not tensor.is_floating_point():
            raise DtypeError(f"{name} must be of a float dtype, got {tensor.dtype}")
    if cu_seqlens is not None and values_are_readable(*inputs):
        problems = packing_problems(cu_seqlens, x.shape[1])
        if problems:
            raise ValueRangeError(" ".join(problems))


def shifted_taps(x_BTC: Tensor, history: Tensor | None, past: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """x_(t - past), ..., x_t, each [B, T, C], with the history [N, past, C] before a sequence, or zeros."""
    T = x_BTC.shape[1]
    if cu_seqlens is not None:
        padded, rows_T = _pack_with_history(x_BTC, history, past, cu_seqlens)
        return [padded[:, rows_T - past + i] for i in range(past + 1)]
    if history is not None:
        padded = torch.cat([history.to(x_BTC.dtype), x_BTC], 1)
        return [padded[:, i : i + T] for i in range(past + 1)]
    return [_shifted(x_BTC, past - i) for i in range(past + 1)]


def _silu(y: Tensor, part: ConvPart) -> Tensor:
    return F.silu(y) if part.silu else y


def _unit(y: Tensor, part: ConvPart) -> Tensor:
    if not part.unit:
        return y
    heads = y.unflatten(-1, (part.channels // part.unit, part.unit))
    wide = heads.to(torch.promote_types(y.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(y.dtype).flatten(-2)


def _shifted(x_BTC: Tensor, by: int) -> Tensor:
    """x_(t - by), zero before the first token. Each tap is padded by itself: Inductor reads x through that, but would
    write out one padded tensor that all taps share."""
    T = x_BTC.shape[1]
    left = max(T - by, 0)
    return F.pad(x_BTC[:, :left], (0, 0, T - left, 0)) if by else x_BTC


def _pack_with_history(x_1TC: Tensor, history: Tensor | None, past: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Lay a pack out with `past` rows of history before each sequence: [1, T + N past, C], and where each token lies
    [T]."""
    _, T, C = x_1TC.shape
    bounds = cu_seqlens.long()
    N = bounds.shape[0] - 1
    rows_T = torch.arange(T, device=x_1TC.device) + (sequence_index(cu_seqlens, T) + 1) * past
    padded = x_1TC.new_zeros(1, T + N * past, C).index_copy(1, rows_T, x_1TC)
    if history is not None:
        first_N = bounds[:-1] + torch.arange(N, device=x_1TC.device) * past
        first_NP = first_N[:, None] + torch.arange(past, device=x_1TC.device)
        padded = padded.index_copy(1, first_NP.flatten(), history.to(x_1TC.dtype).reshape(1, N * past, C))
    return padded, rows_T
