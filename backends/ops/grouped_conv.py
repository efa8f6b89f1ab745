"""The short convolution with several weights, for rows of a pack that are sorted by weight, in plain torch.

y_a = sum_i weight_gi x_(a - W + 1 + i) for row a of group g, within the sequence of the row.

A rows, G groups, C channels, W taps, N sequences
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.ops.grouped import group_of_row, grouped_sum
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import differentiate_exported, operator
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.update.varlen import sequence_index

BLOCK = 128  # rows at a time on a CPU: the operands of a block stay in its cache
SHORTEST = 16  # mean rows per sequence from which a loop over the sequences is faster on a CPU


def grouped_conv(x_AC: Tensor, weight_GCW: Tensor, history: Tensor | None, ends: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Convolve the rows of each group with its weight.

    On a CPU one operator loops over the sequences, unless they are short on average. Elsewhere every row reads its taps
    and weights by index, which Inductor fuses. The backward recomputes the taps.

    Args:
        x_AC: [A, C]; weight_GCW: [G, C, W].
        history: [N, W - 1, C], the rows before each sequence; None: zeros.
        ends: [G] int32, the row after the last one of each group; ends[-1] = A.
        cu_seqlens: [N + 1] int32, bounds of sequences that each belong to one group; cu_seqlens[-1] = A.
    Returns: [A, C] in float32 (float64 for float64).
    """
    return _GroupedConv.apply(x_AC, weight_GCW, history, ends, cu_seqlens)


class _GroupedConv(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, history: Tensor | None, ends: Tensor, cu_seqlens: Tensor) -> Tensor:
        if _runs_by_sequence(x, cu_seqlens):
            return _conv_op(x, weight, history, ends, cu_seqlens)
        sequence, group = sequence_index(cu_seqlens, x.shape[0]), group_of_row(ends, x.shape[0])
        x, weight_WGC = _widened(x), _taps_first(weight)
        before = _with_history(x, history)
        y = x * weight_WGC[-1].index_select(0, group)
        for shift in range(1, weight.shape[2]):
            index, _ = _earlier_rows(sequence, cu_seqlens, shift, 0 if history is None else history.shape[1])
            # Not in place: torch 2.11 drops the gradient of an output that is also an intermediate result.
            y = y.addcmul(before.index_select(0, index), weight_WGC[-1 - shift].index_select(0, group))
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, history, ends, cu_seqlens = ctx.saved_tensors
        if _runs_by_sequence(x, cu_seqlens):
            grad_x, grad_weight, grad_history = _conv_gradients_op(grad, x, weight, history, ends, cu_seqlens)
            return grad_x, grad_weight, None if history is None else grad_history, None, None
        sequence, group = sequence_index(cu_seqlens, x.shape[0]), group_of_row(ends, x.shape[0])
        weight_WGC = _taps_first(weight)
        before, after = _with_history(_widened(x), history), _with_history(grad, None)
        A, past = x.shape[0], 0 if history is None else history.shape[1]
        end_A = cu_seqlens.long()[sequence + 1]
        row_A = torch.arange(A, device=x.device)
        grad_x = grad * weight_WGC[-1].index_select(0, group)
        grad_weight = [grouped_sum(grad * x, ends)]
        grad_history = None if history is None else grad.new_zeros(history.shape).flatten(0, 1)
        for shift in range(1, weight.shape[2]):
            index, inside = _earlier_rows(sequence, cu_seqlens, shift, past)
            grad_weight.insert(0, grouped_sum(before.index_select(0, index).mul_(grad), ends))
            weight_AC = weight_WGC[-1 - shift].index_select(0, group)
            later = torch.where(row_A + shift < end_A, row_A + shift, A)
            grad_x.addcmul_(after.index_select(0, later), weight_AC)
            if grad_history is not None:
                outside = torch.where(inside[:, None], 0.0, grad * weight_AC)
                grad_history = grad_history.index_add(0, torch.where(inside, 0, index - A), outside)
        if history is not None and grad_history is not None:
            grad_history = grad_history.view(history.shape).to(history.dtype)
        return grad_x.to(x.dtype), torch.stack(grad_weight, -1).to(weight.dtype), grad_history, None, None


class _Block(NamedTuple):
    """Rows first to last of one sequence, which is of group `group` and begins at row `start`."""

    group: int
    sequence: int
    start: int
    first: int
    last: int


def _blocks(ends: Tensor, cu_seqlens: Tensor) -> Iterator[_Block]:
    group, group_ends = 0, ends.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        while group < len(group_ends) - 1 and start >= group_ends[group]:
            group += 1
        for first in range(start, end, BLOCK):
            yield _Block(group, n, start, first, min(first + BLOCK, end))


def _taps(x: Tensor, history: Tensor | None, block: _Block, past: int) -> tuple[Tensor, int]:
    """Return the rows of a block in float32 or float64, after up to `past` rows before it, and the number of these."""
    before = min(past, block.first - block.start)
    rows = _widened(x[block.first - before : block.last])
    if history is None or before == past:
        return rows, before
    return torch.cat([history[block.sequence, before:].to(rows.dtype), rows]), past


def _conv(x: Tensor, weight: Tensor, history: Tensor | None, ends: Tensor, cu_seqlens: Tensor) -> Tensor:
    weight_WGC, past = _taps_first(weight), weight.shape[2] - 1
    y = _conv_shape(x, weight, history, ends, cu_seqlens)
    for block in _blocks(ends, cu_seqlens):
        taps, before = _taps(x, history, block, past)
        out, count = y[block.first : block.last], block.last - block.first
        torch.mul(taps[before:], weight_WGC[past, block.group], out=out)
        for shift in range(1, past + 1):
            skip = max(shift - before, 0)  # rows without a row `shift` before them
            if skip < count:
                start = before - shift + skip
                out[skip:].addcmul_(taps[start : start + count - skip], weight_WGC[past - shift, block.group])
    return y


def _conv_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, history: Tensor | None, ends: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight_WGC, past = _taps_first(weight), weight.shape[2] - 1
    grad_x = x.new_empty(x.shape)
    grad_weight_WGC = torch.zeros_like(weight_WGC)
    grad_history = grad.new_zeros((0,) if history is None else history.shape)
    bounds = cu_seqlens.tolist()
    for block in _blocks(ends, cu_seqlens):
        taps, before = _taps(x, history, block, past)
        count, end = block.last - block.first, bounds[block.sequence + 1]
        grad_rows = grad[block.first : min(block.last + past, end)]
        total = grad_rows[:count] * weight_WGC[past, block.group]
        product = grad_rows[:count] * taps[before:]
        grad_weight_WGC[past, block.group] += product.sum(0)
        for shift in range(1, past + 1):
            tap_weight = weight_WGC[past - shift, block.group]
            later = grad_rows[shift : shift + count]
            total[: later.shape[0]].addcmul_(later, tap_weight)
            skip = max(shift - before, 0)
            if skip < count:
                start = before - shift + skip
                torch.mul(grad_rows[skip:count], taps[start : start + count - skip], out=product[skip:])
                grad_weight_WGC[past - shift, block.group] += product[skip:].sum(0)
            if history is not None and block.first == block.start:
                outside = min(shift, end - block.start)
                first = past - shift
                grad_history[block.sequence, first : first + outside].addcmul_(grad_rows[:outside], tap_weight)
        grad_x[block.first : block.last] = total
    grad_weight = grad_weight_WGC.permute(1, 2, 0).to(weight.dtype).contiguous()
    return grad_x, grad_weight, grad_history if history is None else grad_history.to(history.dtype)


def _conv_shape(x: Tensor, weight: Tensor, history: Tensor | None, ends: Tensor, cu_seqlens: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _gradient_shapes(
    grad: Tensor, x: Tensor, weight: Tensor, history: Tensor | None, ends: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (0,) if history is None else history.shape
    like = grad if history is None else history
    return x.new_empty(x.shape), weight.new_empty(weight.shape), like.new_empty(shape)


_conv_op = operator(
    "grouped_conv(Tensor x, Tensor weight, Tensor? history, Tensor ends, Tensor cu_seqlens) -> Tensor",
    _conv,
    _conv_shape,
)
_conv_gradients_op = operator(
    "grouped_conv_gradients(Tensor grad, Tensor x, Tensor weight, Tensor? history, Tensor ends, Tensor cu_seqlens)"
    " -> (Tensor, Tensor, Tensor)",
    _conv_gradients,
    _gradient_shapes,
)


def _runs_by_sequence(x: Tensor, cu_seqlens: Tensor) -> bool:
    return x.device.type == "cpu" and not is_known(x.shape[0] < SHORTEST * (cu_seqlens.shape[0] - 1))


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _taps_first(weight_GCW: Tensor) -> Tensor:
    """Return the weights as [W, G, C], contiguous, so that the weights of a row are read as a vector."""
    return _widened(weight_GCW).permute(2, 0, 1).contiguous()


def _with_history(x_AC: Tensor, history_NPC: Tensor | None) -> Tensor:
    """Append the rows of the history, or a row of zeros."""
    rows = x_AC.new_zeros(1, x_AC.shape[1]) if history_NPC is None else history_NPC.flatten(0, 1).to(x_AC.dtype)
    return torch.cat([x_AC, rows])


def _earlier_rows(sequence_A: Tensor, cu_seqlens: Tensor, shift: int, past: int) -> tuple[Tensor, Tensor]:
    """Return the rows of `_with_history` that are `shift` tokens before each row, and whether they are rows of x.

    Args: past: rows of history per sequence; 0: there is only one row of zeros.
    """
    A = sequence_A.shape[0]
    row_A = torch.arange(A, device=sequence_A.device)
    position_A = row_A - cu_seqlens.long()[sequence_A]
    inside_A = position_A >= shift
    history_A = A + sequence_A * past + past - shift + position_A if past else A
    return torch.where(inside_A, row_A - shift, history_A), inside_A


differentiate_exported("grouped_conv", _GroupedConv.apply)
