"""Operators and launches of the Triton kernels of the short convolution, forward and backward.

Each part of the channels is one launch. Triton is imported when a kernel first runs.
B batch, T tokens, C channels, W taps, N sequences
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.ops.short_conv import EPS, ConvInputs, ConvPart
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.triton.operands import ready, with_token_stride
from deltazoo.backends.triton.problem import device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two
from deltazoo.backends.update.varlen import valid_sequence_index

MAX_TAPS = 8
WIDEST_UNIT = 1024
_MIN_STRIP = 16
_MIN_PROGRAMS = 256


class ConvLaunch(NamedTuple):
    """Launch parameters of a convolution kernel.

    A program processes `rows` strips of `strip` tokens and `columns` channels. With a norm it processes one head, and
    as many strips as keep rows x columns. Strips are shortened until there are enough programs.

    Args:
        group: tokens that are loaded ahead of their use.
        resident: programs that a multiprocessor runs at once. The length of the strips is changed so that the programs
            fill all multiprocessors once, or several times. 0: it stays.
    """

    rows: int = 4
    columns: int = 128
    strip: int = 64
    group: int = 4
    warps: int = 4
    resident: int = 0


FORWARD = ConvLaunch(rows=8, resident=5)
BACKWARD = ConvLaunch(rows=2, strip=128, warps=1, resident=8)


def too_many_taps(taps: int) -> list[str]:
    """Return why the kernels do not support this number of taps; [] if they do."""
    if taps <= MAX_TAPS:
        return []
    return [f"a short convolution must have at most {MAX_TAPS} taps, got {taps}."]


def short_conv(
    inputs: ConvInputs, parts: Sequence[ConvPart], forward: ConvLaunch = FORWARD, backward: ConvLaunch = BACKWARD
) -> tuple[Tensor, ...]:
    """Run the kernels; differentiable once.

    Returns: a contiguous tensor [B, T, channels] for each part.
    """
    channels, silu, unit = ([part[i] for part in parts] for i in range(3))
    static = (channels, silu, unit, [*forward, *backward])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _ShortConv.apply(*inputs, *static)
    return tuple(_conv_op(*inputs, *static))


class _Operands(NamedTuple):
    """Tensors that both kernels read, by the names of their parameters."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    history: Tensor | None
    cu: Tensor | None
    ends: Tensor | None
    sequence_starts: Tensor | None
    sequence_ids: Tensor | None

    def from_channel(self, first: int) -> "_Operands":
        """Return the operands without the channels before `first`, so that parts of equal kinds share a kernel."""
        bias, history = (None if x is None else x[..., first:] for x in (self.bias, self.history))
        return self._replace(x=self.x[..., first:], weight=self.weight[..., first:, :], bias=bias, history=history)


class _Tiling(NamedTuple):
    """Sizes of the programs of a launch, and their number along time and channels."""

    columns: int
    rows: int
    strip: int
    programs_T: int
    programs_C: int


def _operands(inputs: ConvInputs) -> tuple[_Operands, int]:
    """Return the operands, contiguous but for the stride of x from token to token, and that stride."""
    x, token_stride = with_token_stride(inputs.x)
    weight, bias, history, cu_seqlens, ends = (None if t is None else ready(t) for t in inputs[1:])
    assert weight is not None
    starts = ids = None
    if cu_seqlens is not None:
        # tokens after the last bound get a valid index, which the kernels ignore
        ids = valid_sequence_index(cu_seqlens, x.shape[1]).int()
        starts = cu_seqlens[ids]
    return _Operands(x, weight, bias, history, cu_seqlens, ends, starts, ids), token_stride


def _tiling(part: ConvPart, x: Tensor, launch: ConvLaunch) -> _Tiling:
    """Tile a part: with `resident`, as many strips per row as make a whole number of waves of programs."""
    B, T, _ = x.shape
    columns = power_of_two(part.unit) if part.unit else min(launch.columns, power_of_two(part.channels))
    rows = max(1, launch.rows * launch.columns // columns)
    programs_C = cdiv(part.channels, part.unit or columns)
    strip = min(launch.strip, max(MAX_TAPS, power_of_two(T)))
    while strip > _MIN_STRIP and cdiv(B * cdiv(T, strip), rows) * programs_C < _MIN_PROGRAMS:
        strip //= 2
    slots = launch.resident * device_spec(device_of(x).index).processors
    waves = round(cdiv(B * cdiv(T, strip), rows) * programs_C / slots) if slots else 0
    strips_per_row = waves * slots // max(programs_C, 1) * rows // max(B, 1)
    if strips_per_row > 0:
        strip = cdiv(T, strips_per_row)
    strip = cdiv(strip, launch.group) * launch.group
    return _Tiling(columns, rows, strip, cdiv(B * cdiv(T, strip), rows), programs_C)


def _parts(channels: Sequence[int], silu: Sequence[bool], unit: Sequence[int]) -> Iterator[tuple[int, ConvPart]]:
    """Yield each part and its first channel."""
    first = 0
    for part in map(ConvPart, channels, silu, unit):
        yield first, part
        first += part.channels


def _launch(
    kernel: Any, operands: _Operands, results: dict[str, Tensor], *, token_stride: int, first: int, part: ConvPart,
    tiling: _Tiling, launch: ConvLaunch,
) -> None:  # fmt: skip
    """Launch a kernel on the part that begins at channel `first`.

    Args: results: of the part, by the kernel's parameters.
    """
    from deltazoo.backends.triton.conv.kernels.short_conv import ConvTraits
    from deltazoo.backends.triton.runtime.launcher import launcher

    B, T, C = operands.x.shape
    unit = math.gcd(token_stride, 8)
    # without a constant C, parts of convolutions of different widths share a kernel
    needs_C = token_stride != C or operands.history is not None or operands.ends is not None
    traits = ConvTraits(
        UNIT=unit, C=C if needs_C else 0, W=operands.weight.shape[-1], CHANNELS=part.channels,
        SILU=part.silu, HEAD=part.unit, EPS=EPS, BIAS=operands.bias is not None, HISTORY=operands.history is not None,
        PACKED=operands.cu is not None, GROUPED=operands.ends is not None, BC=tiling.columns, R=tiling.rows,
        GROUP=launch.group,
    )  # fmt: skip
    strips_per_row = cdiv(T, tiling.strip)
    tensors = operands.from_channel(first)._asdict() | results
    run = launcher(kernel, tensors, {"traits": traits}, Options(launch.warps))
    N = B if operands.cu is None else operands.cu.shape[0] - 1
    groups = 1 if operands.ends is None else operands.ends.shape[0]
    programs = groups * tiling.programs_T * tiling.programs_C
    numbers = {
        "T": T, "N": N, "strips": B * strips_per_row, "strips_per_row": strips_per_row, "strip_tokens": tiling.strip,
        "token_stride": token_stride // unit,
    }  # fmt: skip
    run(programs, numbers)


def _forward(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.conv.kernels.short_conv import short_conv_kernel

    inputs, (channels, silu, unit, launch) = _named(arguments)
    operands, token_stride = _operands(inputs)
    config = ConvLaunch(*launch[: len(ConvLaunch._fields)])
    x = inputs.x
    ys = [x.new_empty(*x.shape[:2], n) for n in channels]
    with torch.cuda.device_of(x):
        for y, (first, part) in zip(ys, _parts(channels, silu, unit), strict=True):
            _launch(
                short_conv_kernel, operands, {"y": y}, token_stride=token_stride, first=first, part=part,
                tiling=_tiling(part, x, config), launch=config,
            )  # fmt: skip
    return ys


def _backward(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.conv.kernels.short_conv import short_conv_backward_kernel

    inputs, (dys, channels, silu, unit, launch) = _named(arguments)
    operands, token_stride = _operands(inputs)
    config = ConvLaunch(*launch[len(ConvLaunch._fields) :])
    x, weight, bias, ends = inputs.x, inputs.weight, inputs.bias, inputs.ends
    (B, T, C), W = x.shape, weight.shape[-1]
    dx = x.new_empty(B, T, C)
    # zero, because no program writes the gradient of an empty sequence's history
    dhistory = x.new_empty(0) if operands.history is None else torch.zeros_like(operands.history)
    sums = []
    with torch.cuda.device_of(x):
        for dy, (first, part) in zip(dys, _parts(channels, silu, unit), strict=True):
            tiling = _tiling(part, x, config)
            shape = (*weight.shape[:-2], tiling.programs_T, W + (bias is not None), part.channels)
            allocate = x.new_empty if ends is None else x.new_zeros  # most programs have tokens of one group only
            partial = allocate(shape, dtype=torch.float32)
            results = {
                "dy": ready(dy), "dx": dx[..., first:], "dhistory": dhistory[..., first:], "partial": partial,
            }  # fmt: skip
            _launch(
                short_conv_backward_kernel, operands, results, token_stride=token_stride, first=first, part=part,
                tiling=tiling, launch=config,
            )  # fmt: skip
            sums.append(partial.sum(-3))
    dw_by_lag = torch.cat(sums, -1)
    dweight = dw_by_lag[..., :W, :].flip(-2).mT.contiguous().to(weight.dtype)
    dbias = x.new_empty(0) if bias is None else dw_by_lag[..., W, :].to(bias.dtype, copy=True)
    return [dx, dweight, dbias, dhistory]


def _named(arguments: tuple[Any, ...]) -> tuple[ConvInputs, tuple[Any, ...]]:
    """Return the operands among an operator's arguments, and the others."""
    tensors = len(ConvInputs._fields)
    return ConvInputs(*arguments[:tensors]), arguments[tensors:]


def _forward_fake(*arguments: Any) -> list[Tensor]:
    x, channels = arguments[0], arguments[len(ConvInputs._fields)]
    return [x.new_empty(*x.shape[:2], n) for n in channels]


def _backward_fake(*arguments: Any) -> list[Tensor]:
    x, weight, bias, history = arguments[:4]
    shapes = [(x, x.shape), (weight, weight.shape)]
    shapes += [(x, (0,)) if t is None else (t, t.shape) for t in (bias, history)]
    return [like.new_empty(shape) for like, shape in shapes]


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? history, Tensor? cu_seqlens, Tensor? ends"
_STATIC = "int[] channels, bool[] silu, int[] unit, int[] launch"  # launch: ConvLaunch of the forward, of the backward
_conv_op = operator(
    f"triton_short_conv({_INPUTS}, {_STATIC}) -> Tensor[]",
    _forward,
    compiled_ahead(_forward, _forward_fake),
    any_layout=True,
)
_backward_op = operator(
    f"triton_short_conv_backward({_INPUTS}, Tensor[] d, {_STATIC}) -> Tensor[]",
    _backward,
    compiled_ahead(_backward, _backward_fake),
    any_layout=True,
)


@cache_forward_signature
class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_conv_op(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors = len(ConvInputs._fields)
        ctx.save_for_backward(*inputs[:tensors])
        ctx.static = inputs[tensors:]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward_op(*ctx.saved_tensors, list(dys), *ctx.static)
        needed = zip(grads, ctx.needs_input_grad, strict=False)
        no_gradient = [None] * (len(ctx.needs_input_grad) - len(grads))  # of the bounds and static arguments
        return (*(grad if needs else None for grad, needs in needed), *no_gradient)


differentiate_exported("triton_short_conv", lambda *arguments: list(_ShortConv.apply(*arguments)))
