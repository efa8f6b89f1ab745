"""Short causal depthwise convolution, with an optional SiLU and L2 norm per group of channels, in plain torch.

B batch, T time, C channels, W taps, N sequences (the B rows, or the packed sequences)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.io.errors import DeviceError, DtypeError, ShapeError, ValueRangeError, cut
from deltazoo.backends.ops.grouped import expand_rows, group_of_row
from deltazoo.backends.ops.grouped_conv import grouped_conv
from deltazoo.backends.ops.wide_conv import wide_conv
from deltazoo.backends.torch_ext.modes import transform_is_active, values_are_readable
from deltazoo.backends.update.varlen import is_in_sequence, packing_problems, sequence_count, sequence_index

FEW_TAPS = 16  # of more taps Inductor would compile a long sum for minutes
EPS = 1e-6  # added to the squared L2 norm


class ConvPart(NamedTuple):
    """A contiguous group of channels, and the operations that follow the convolution there.

    Args:
        channels: size of the group.
        silu: apply SiLU.
        unit: width of a head; after the SiLU each head is L2-normalised, y / sqrt(sum y^2 + 1e-6). 0: no norm.
    """

    channels: int
    silu: bool = False
    unit: int = 0


class ConvInputs(NamedTuple):
    """The operands of a short convolution.

    Args:
        x: [B, T, C].
        weight, bias: [C, W] and [C].
        history: [N, W - 1, C], the inputs before the first token of each sequence; None means zeros.
        cu_seqlens: [N + 1] int32, the boundaries of packed sequences; then B = 1.
        ends: [G] int32, for a pack whose sequences belong to G groups, in order: the token after the last one of each
            group, ends[-1] = T. Weight and bias are then [G, C, W] and [G, C].
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    history: Tensor | None = None
    cu_seqlens: Tensor | None = None
    ends: Tensor | None = None


class ConvMeta(NamedTuple):
    """Description of the operands from which a backend decides whether it has a kernel.

    Args: dtype: of x. single: whether T = 1.
    """

    device: str
    dtype: torch.dtype
    taps: int
    parts: tuple[ConvPart, ...]
    single: bool = False


def short_conv(inputs: ConvInputs, parts: Sequence[ConvPart]) -> tuple[Tensor, ...]:
    """Compute y_t = sum_i weight_i x_(t - W + 1 + i) + bias for each channel, then SiLU and norm of each part.

    The computation is in float32 (float64 for float64) with one rounding at the end. With few taps it is a sum of
    shifted products, which Inductor fuses with the operations that follow. No tap crosses a boundary between packed
    sequences. Rows after cu_seqlens[-1] get zeros in y and in the gradient of x.

    Args: parts: consecutive groups of the channels of x.
    Returns: [B, T, channels] in the dtype of x for each part.
    """
    x_BTC, weight, bias, history, cu_seqlens, ends = inputs
    compute_dtype = torch.promote_types(x_BTC.dtype, torch.float32)
    if ends is not None:
        assert cu_seqlens is not None  # `check_conv` has checked it
        y_BTC = grouped_conv(x_BTC[0], weight, history, ends, cu_seqlens)[None]
        if bias is not None:
            y_BTC = y_BTC + expand_rows(bias, group_of_row(ends, x_BTC.shape[1]), ends).to(compute_dtype)
        return tuple(y.to(x_BTC.dtype) for y in apply_silu_and_norm(y_BTC, parts))
    if weight.shape[1] > FEW_TAPS:
        return wide_short_conv(inputs, parts, wide_conv)
    if cu_seqlens is None and _runs_convolutions(inputs):
        x, past = x_BTC.to(compute_dtype), weight.shape[1] - 1
        padded = F.pad(x, (0, 0, past, 0)) if history is None else torch.cat([history.to(compute_dtype), x], 1)
        added = None if bias is None else bias.to(compute_dtype)
        y_BTC = _DepthwiseConv.apply(padded, weight.to(compute_dtype), added)
        return tuple(y.to(x_BTC.dtype) for y in apply_silu_and_norm(y_BTC, parts))
    taps = shifted_taps(x_BTC, history, weight.shape[1] - 1, cu_seqlens)
    y_BTC = x_BTC.new_zeros((), dtype=compute_dtype) if bias is None else bias.to(compute_dtype)
    if bias is not None and cu_seqlens is not None:
        y_BTC = torch.where(is_in_sequence(cu_seqlens, x_BTC.shape[1])[:, None], y_BTC, 0)
    for i, tap in enumerate(taps):
        y_BTC = y_BTC + tap.to(compute_dtype) * weight[:, i].to(compute_dtype)
    return tuple(y.to(x_BTC.dtype) for y in apply_silu_and_norm(y_BTC, parts))


def wide_short_conv(
    inputs: ConvInputs, parts: Sequence[ConvPart], convolve: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """Compute `short_conv` by a function of x and the weights by lag, [W, C], without groups of weights.

    A pack and a history are convolved with the tokens before each sequence.
    """
    x_BTC, weight, bias, history, cu_seqlens, _ = inputs
    compute_dtype = torch.promote_types(x_BTC.dtype, torch.float32)
    weight_WC, past = weight.T.flip(0).to(compute_dtype), weight.shape[1] - 1
    if cu_seqlens is not None:
        padded, rows_T = _pack_with_history(x_BTC, history, past, cu_seqlens)
        y_BTC = convolve(padded, weight_WC)[:, rows_T]
    elif history is not None and x_BTC.shape[1] == 1:
        inputs_BWC = torch.cat([history.to(x_BTC.dtype), x_BTC], 1)
        y_BTC = (inputs_BWC * weight.T.to(compute_dtype)).sum(1, keepdim=True)
    elif history is not None:
        y_BTC = convolve(torch.cat([history.to(x_BTC.dtype), x_BTC], 1), weight_WC)[:, past:]
    else:
        y_BTC = convolve(x_BTC, weight_WC)
    if bias is not None:
        y_BTC = y_BTC + bias.to(compute_dtype)
    if cu_seqlens is not None:
        y_BTC = torch.where(is_in_sequence(cu_seqlens, x_BTC.shape[1])[:, None], y_BTC, 0)
    return tuple(y.to(x_BTC.dtype) for y in apply_silu_and_norm(y_BTC, parts))


class _DepthwiseConv(torch.autograd.Function):
    """The convolution by torch's depthwise convolution of images of one row, in the layout with C innermost.

    Without Inductor, shifted products take 26 ms forward and 68 ms with the backward on one CPU thread, and this 4 and
    25 (T = 2048, C = 1536, float32). torch's own backward in this layout takes 130 ms, so the products are ours.
    """

    @staticmethod
    def forward(ctx: Any, padded_BSC: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(padded_BSC, weight)  # inputs, so that the backward can be differentiated
        return _depthwise(padded_BSC, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight = ctx.saved_tensors
        (W, T), d_padded, d_weight = (weight.shape[1], dy_BTC.shape[1]), None, None
        if ctx.needs_input_grad[0]:
            d_padded = _depthwise(F.pad(dy_BTC, (0, 0, W - 1, W - 1)), weight.flip(1), None)
        if ctx.needs_input_grad[1]:
            d_weight = torch.stack([(padded[:, i : i + T] * dy_BTC).sum((0, 1)) for i in range(W)], 1)
        return d_padded, d_weight, dy_BTC.sum((0, 1)) if ctx.needs_input_grad[2] else None


def _depthwise(padded_BSC: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return sum_i weight_i padded_(t + i) + bias, [B, S - W + 1, C]."""
    images = padded_BSC.unsqueeze(1).permute(0, 3, 1, 2)
    with torch.autocast("cpu", enabled=False):
        y = F.conv2d(images, weight[:, None, None], bias, groups=weight.shape[0])
    return y.permute(0, 2, 3, 1).squeeze(1)


def _runs_convolutions(inputs: ConvInputs) -> bool:
    """Whether torch's convolution computes these operands: eager calls on a CPU, outside of transforms."""
    x = inputs.x
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not transform_is_active() and x.numel() > 0


def apply_silu_and_norm(y_BTC: Tensor, parts: Sequence[ConvPart]) -> tuple[Tensor, ...]:
    """Apply the SiLU and the norm of each part. Returns: [B, T, channels] in the dtype of y for each part."""
    groups = y_BTC.split([part.channels for part in parts], dim=-1)
    return tuple(_normalize(_silu(y, part), part) for y, part in zip(groups, parts, strict=True))


def check_conv(inputs: ConvInputs, parts: Sequence[ConvPart]) -> None:
    """Raise unless shapes, dtypes and devices are consistent; on the CPU the boundaries of a pack are checked as well.

    Raises: ShapeError, DtypeError, DeviceError, ValueRangeError.
    """
    x, weight, cu_seqlens = inputs.x, inputs.weight, inputs.cu_seqlens
    if x.dim() != 3:
        raise ShapeError(f"x must have shape [B, T, C], got {list(x.shape)}")
    groups = () if inputs.ends is None else tuple(inputs.ends.shape)
    if inputs.ends is not None and (len(groups) != 1 or cu_seqlens is None):
        without = "" if cu_seqlens is not None else " without cu_seqlens"
        raise ShapeError(f"ends must have shape [G], with cu_seqlens, got {list(groups)}{without}")
    if weight.dim() != 2 + len(groups) or weight.shape[-1] < 1:
        name = "[G, C, W]" if groups else "[C, W]"
        raise ShapeError(f"weight must have shape {name} with W >= 1, got {list(weight.shape)}")
    C, W = x.shape[2], weight.shape[-1]
    if sum(part.channels for part in parts) != C or any(part.unit and part.channels % part.unit for part in parts):
        raise ShapeError(f"parts must have {C} channels in total, each a multiple of its unit, got {list(parts)}")
    N = sequence_count(cu_seqlens, x.shape[0])
    shapes = {"weight": (*groups, C, W), "bias": (*groups, C), "history": (N, W - 1, C)}
    for name, shape in shapes.items():
        tensor = getattr(inputs, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ShapeError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise DeviceError(f"{name} must be on {x.device}, where x is, got {tensor.device}")
        if name in ("cu_seqlens", "ends"):
            if tensor.dtype != torch.int32:
                raise DtypeError(f"{name} must be int32, got {tensor.dtype}")
        elif not tensor.is_floating_point():
            raise DtypeError(f"{name} must be of a float dtype, got {tensor.dtype}")
    if cu_seqlens is not None and values_are_readable(*inputs):
        problems = packing_problems(cu_seqlens, x.shape[1])
        if problems:
            raise ValueRangeError(" ".join(problems))
        ends = [] if inputs.ends is None else inputs.ends.tolist()
        if ends and (ends != sorted(ends) or ends[-1] != x.shape[1] or not {*ends} <= {*cu_seqlens.tolist()}):
            raise ValueRangeError(f"ends must be bounds of cu_seqlens that rise to T = {x.shape[1]}, got {cut(ends)}")


def shifted_taps(x_BTC: Tensor, history: Tensor | None, past: int, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Return x_(t - past), ..., x_t, each [B, T, C]. history: [N, past, C], before each sequence; None means zeros."""
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


def _normalize(y: Tensor, part: ConvPart) -> Tensor:
    if not part.unit:
        return y
    heads = torch.unflatten(y, -1, (part.channels // part.unit, part.unit))
    heads = heads.to(torch.promote_types(y.dtype, torch.float32))
    return (heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPS)).to(y.dtype).flatten(-2)


def _shifted(x_BTC: Tensor, shift: int) -> Tensor:
    """x_(t - shift), zero before the first token.

    Each tap is padded separately: Inductor fuses these reads of x, but would materialise one padded tensor shared by
    all taps.
    """
    T = x_BTC.shape[1]
    length = max(T - shift, 0)
    return F.pad(x_BTC[:, :length], (0, 0, T - length, 0)) if shift else x_BTC


def _pack_with_history(x_1TC: Tensor, history: Tensor | None, past: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Insert `past` rows of history before each sequence of a pack.

    Returns: the padded pack [1, T + (N + 1) past, C], and the row of each token in it [T]. Rows after the last sequence
        become a further sequence of zeros.
    """
    _, T, C = x_1TC.shape
    bounds = cu_seqlens.long()
    N = bounds.shape[0] - 1
    rows_T = torch.arange(T, device=x_1TC.device) + (sequence_index(cu_seqlens, T) + 1) * past
    x_1TC = torch.where(is_in_sequence(cu_seqlens, T)[:, None], x_1TC, 0)
    padded = x_1TC.new_zeros(1, T + (N + 1) * past, C).index_copy(1, rows_T, x_1TC)
    if history is not None:
        first_N = bounds[:-1] + torch.arange(N, device=x_1TC.device) * past
        first_NP = first_N[:, None] + torch.arange(past, device=x_1TC.device)
        padded = padded.index_copy(1, first_NP.flatten(), history.to(x_1TC.dtype).reshape(1, N * past, C))
    return padded, rows_T
