"""The short convolution with its SiLU and norm behind an operator, forward and backward; one launch for each part.

Triton is imported when a kernel first runs. B batch, T time, C channels, W taps, N sequences
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.short_conv import EPS, ConvInputs, ConvPart
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, operator
from deltazoo.backends.triton.config import cdiv, power_of_two
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.precompile import compiled_ahead
from deltazoo.backends.varlen import sequence_index

MOST_TAPS = 8
WIDEST_UNIT = 1024


class ConvLaunch(NamedTuple):
    """A program walks `rows` strips of `strip` tokens over `columns` channels, loading `group` tokens ahead.

    Of heads with a norm a program takes one, and as many strips as keep rows x columns. Strips are shorter where there
    would be too few programs. registers: the most that a thread may have; 0: as many as it takes.
    """

    rows: int = 4
    columns: int = 128
    strip: int = 64
    group: int = 4
    warps: int = 4
    registers: int = 0


FORWARD = ConvLaunch(rows=8)
BACKWARD = ConvLaunch(strip=128, group=2)
_SHORTEST = 16
_ENOUGH = 256  # programs


def too_many_taps(taps: int) -> list[str]:
    """Why the kernels do not take a short convolution of so many taps; [] means they do."""
    if taps <= MOST_TAPS:
        return []
    return [f"a short convolution must have at most {MOST_TAPS} taps, got {taps}."]


def short_conv(
    inputs: ConvInputs, parts: Sequence[ConvPart], forward: ConvLaunch = FORWARD, backward: ConvLaunch = BACKWARD
) -> tuple[Tensor, ...]:
    """Run the kernels; differentiable once. Returns a contiguous tensor [B, T, channels] for each part."""
    channels, silu, unit = ([part[i] for part in parts] for i in range(3))
    kind = (channels, silu, unit, [*forward, *backward])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _ShortConv.apply(*inputs, *kind)
    return tuple(_conv_op(*inputs, *kind))


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? history, Tensor? cu_seqlens"
_KIND = "int[] channels, bool[] silu, int[] unit, int[] launch"


class _Problem(NamedTuple):
    """What both kernels are given; x is contiguous but for the stride between tokens."""

    inputs: ConvInputs
    stride: int
    first: Tensor | None
    which: Tensor | None

    @classmethod
    def of(cls, *inputs: Tensor | None) -> "_Problem":
        given = ConvInputs(*inputs)  # type: ignore[arg-type]
        x, stride = _by_tokens(given.x)
        weight, bias, history, cu = (None if t is None else ready(t) for t in given[1:])
        first = which = None
        if cu is not None:
            # bounds on a GPU are not inspected: what lies beyond the last counts to the last sequence
            which = sequence_index(cu, x.shape[1]).clamp(max=max(cu.shape[0] - 2, 0)).int()
            first = cu[which]
        assert weight is not None
        return cls(ConvInputs(x, weight, bias, history, cu), stride, first, which)

    def run(
        self, kernel: Any, part: ConvPart, begin: int, launch: ConvLaunch, tensors: Sequence[Tensor | None]
    ) -> None:
        """Launch a kernel for the part that begins at a channel."""
        from deltazoo.backends.triton.launcher import launcher

        x, weight, bias, history, cu = self.inputs
        B, T, C = x.shape
        columns, rows, strip, tiles, heads = _tile(part, B, T, launch)
        per_row = cdiv(T, strip)
        go = launcher(
            kernel,
            (x, weight, bias, history, self.first, self.which, *tensors),
            (
                self.stride, C, weight.shape[1], begin, part.channels, part.silu, part.unit, EPS, bias is not None,
                history is not None, cu is not None, columns, rows, strip, min(launch.group, strip),
            ),
            launch.warps,
            registers=launch.registers or None,
        )  # fmt: skip
        go(tiles * heads, T, B * per_row, per_row)


def _conv_impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.kernels.conv.short_conv import short_conv_kernel

    problem, parts, launch = _Problem.of(*arguments[:5]), _parts(arguments[5:8]), ConvLaunch(*arguments[8][:6])
    x = problem.inputs.x
    out, begin = _conv_fake(*arguments), 0
    with torch.cuda.device_of(x):
        for part, y in zip(parts, out, strict=True):
            problem.run(short_conv_kernel, part, begin, launch, (y,))
            begin += part.channels
    return out


def _backward_impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.kernels.conv.short_conv import short_conv_backward_kernel

    problem, parts, launch = _Problem.of(*arguments[:5]), _parts(arguments[6:9]), ConvLaunch(*arguments[9][6:])
    x, weight, bias, history, _ = problem.inputs
    (B, T, C), W = x.shape, weight.shape[1]
    dx = x.new_empty(B, T, C)
    dhistory = x.new_empty(0) if history is None else torch.zeros_like(history)  # a sequence may have no token
    sums, begin = [], 0
    with torch.cuda.device_of(x):
        for part, d in zip(parts, arguments[5], strict=True):
            *_, tiles, _ = _tile(part, B, T, launch)
            partial = x.new_empty((tiles, W + (bias is not None), part.channels), dtype=torch.float32)
            tensors = (ready(d), dx, dhistory, partial)
            problem.run(short_conv_backward_kernel, part, begin, launch, tensors)
            sums.append(partial.sum(0))
            begin += part.channels
    by_lag = torch.cat(sums, 1)
    dweight = by_lag[:W].flip(0).t().contiguous().to(weight.dtype)
    dbias = x.new_empty(0) if bias is None else by_lag[W].to(bias.dtype, copy=True)
    return [dx, dweight, dbias, dhistory]


def _conv_fake(*arguments: Any) -> list[Tensor]:
    x, channels = arguments[0], arguments[5]
    return [x.new_empty(*x.shape[:2], n) for n in channels]


def _backward_fake(*arguments: Any) -> list[Tensor]:
    x, weight, bias, history = arguments[:4]
    shapes = [(x, x.shape), (weight, weight.shape)]
    shapes += [(x, (0,)) if t is None else (t, t.shape) for t in (bias, history)]
    return [like.new_empty(shape) for like, shape in shapes]


_conv_op = operator(
    f"triton_short_conv({_INPUTS}, {_KIND}) -> Tensor[]", _conv_impl, compiled_ahead(_conv_impl, _conv_fake)
)
_backward_op = operator(
    f"triton_short_conv_backward({_INPUTS}, Tensor[] d, {_KIND}) -> Tensor[]",
    _backward_impl,
    compiled_ahead(_backward_impl, _backward_fake),
)


@cache_forward_signature
class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_conv_op(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.kind = inputs[5:]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *d: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward_op(*ctx.saved_tensors, list(d), *ctx.kind)
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(grad if want else None for grad, want in wanted), None, *(None for _ in ctx.kind))


def _parts(lists: Sequence[Sequence[Any]]) -> list[ConvPart]:
    return [ConvPart(*part) for part in zip(*lists, strict=True)]


def _tile(part: ConvPart, B: int, T: int, launch: ConvLaunch) -> tuple[int, int, int, int, int]:
    """Channels, strips and tokens a strip of a program; programs along time and along channels."""
    columns = power_of_two(part.unit) if part.unit else min(launch.columns, power_of_two(part.channels))
    rows = max(1, launch.rows * launch.columns // columns)
    heads = cdiv(part.channels, part.unit or columns)
    strip = min(launch.strip, max(MOST_TAPS, power_of_two(T)))
    while strip > _SHORTEST and cdiv(B * cdiv(T, strip), rows) * heads < _ENOUGH:
        strip //= 2
    return columns, rows, strip, cdiv(B * cdiv(T, strip), rows), heads


def _by_tokens(x: Tensor) -> tuple[Tensor, int]:
    """x and its stride from token to token of the whole batch; a copy where there is none, or no wide load."""
    B, T, C = x.shape
    stride = x.stride(1)
    even = x.stride(2) == 1 and stride >= C and (B == 1 or x.stride(0) == T * stride)
    if even and (x.data_ptr() | stride * x.element_size()) % 16 == 0:
        return x, stride
    return ready(x), C
