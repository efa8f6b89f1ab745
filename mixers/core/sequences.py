"""Padding, packed sequences and positions of tokens.

B batch, T time, D width, N sequences: the B rows, or the packed sequences
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.context_parallel.carry import local_sums
from deltazoo.backends.context_parallel.exchange import states_of_documents
from deltazoo.backends.io.errors import DeviceError, DtypeError, OperandError, ShapeError, StateError, ValueRangeError
from deltazoo.backends.torch_ext.modes import values_are_readable
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.check import FLOAT_DTYPES
from deltazoo.backends.update.varlen import packing_problems, sequence_index, valid_sequence_index
from deltazoo.mixers.core.activations import compute_device
from deltazoo.mixers.core.mixer import Context

_EMPTY = Context()


def left_align(
    x_BTD: Tensor, width: int, context: Context | None, like: object = None
) -> tuple[Tensor, Context, Tensor | None]:
    """Check x and the context, set padded tokens to zero, and move the real tokens of each row to its start.

    Mixers then have to handle padding on the right only.

    Args: like: a weight that x meets in a matrix product, so that both must have the same dtype without autocast. What
        is no tensor is ignored: maps of torch.ao.quantization have a method of the name `weight`.
    Returns:
        x [B, T, D] in the new order; the context with mask and positions in the same order; the inverse permutation
        [B, T] for `undo_left_align`, or None if nothing was moved.
    Raises: ShapeError, DtypeError, DeviceError, OperandError, ValueRangeError.
    """
    _check_input(x_BTD, width, like if isinstance(like, Tensor) else None)
    if context is None:
        return x_BTD, _EMPTY, None
    _check(x_BTD, as_context(context))
    if context.mask is None:
        return x_BTD, context, None
    T = x_BTD.shape[1]
    first_B = context.mask.int().argmax(1, keepdim=True) if T else context.mask.new_zeros(x_BTD.shape[0], 1).long()
    time_T = torch.arange(T, device=x_BTD.device)
    order_BT = (time_T + first_B) % T
    mask_BT = context.mask.gather(1, order_BT)
    x_BTD = torch.where(mask_BT[..., None], _permute(x_BTD, order_BT), 0.0)
    positions = None if context.positions is None else context.positions.gather(1, order_BT)
    return x_BTD, context._replace(mask=mask_BT, positions=positions), (time_T - first_B) % T


def undo_left_align(y_BTD: Tensor, order_BT: Tensor | None) -> Tensor:
    """Restore the order of tokens before `left_align`."""
    return y_BTD if order_BT is None else _permute(y_BTD, order_BT)


def mask_padding(inputs: UpdateInputs, mask_BT: Tensor) -> UpdateInputs:
    """Make the update the identity at padded tokens: no decay, no erase, no write."""

    def masked(tensor: Tensor) -> Tensor:
        return torch.where(mask_BT.view(*mask_BT.shape, *[1] * (tensor.dim() - 2)), tensor, 0.0)

    changed = {"k": masked(inputs.k)}
    if inputs.log_decay is not None:
        constant = inputs.log_decay.dim() < 3
        per_token = inputs.log_decay.expand(*mask_BT.shape, *inputs.log_decay.shape) if constant else inputs.log_decay
        changed["log_decay"] = masked(per_token)
    for name in ("b", "step"):
        operand = getattr(inputs, name)
        if operand is not None:
            changed[name] = masked(operand)
    return UpdateInputs(**{**inputs._asdict(), **changed})


def check_names(state: object, expected: Collection[str]) -> None:
    """Check that a state is a mapping with these keys. Raises: StateError."""
    if not isinstance(state, Mapping) or set(state) != set(expected):
        got = list(state) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"the state must have the tensors {list(expected)}, got {got}")


def check_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Check the shapes of the tensors of a state without their rows. Raises: StateError, with the key of the state."""
    for name, shape in shapes.items():
        if state[name].shape[1:] != shape:
            raise StateError(f"state {name!r} must have shape {['N', *shape]}, got {list(state[name].shape)}")


def check_dtypes(state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], x_BTD: Tensor) -> None:
    """Check the tensors of a state whose dtype is not that of x, in which they would lose precision with each call.

    Raises: DtypeError.
    """
    for name, dtype in dtypes.items():
        if dtype.is_floating_point and dtype != x_BTD.dtype and state[name].dtype != dtype:
            raise DtypeError(f"state {name!r} must be {dtype} with x in {x_BTD.dtype}, got {state[name].dtype}")


def as_context(context: Context | None) -> Context:
    """Return the context, an empty one for None. Raises: OperandError: it has another type."""
    if context is None:
        return _EMPTY
    if not isinstance(context, Context):
        raise OperandError(f"context must be a deltazoo.Context or None, got {type(context).__name__}")
    return context


def check_state(rows: dict[str, int], x_BTD: Tensor, context: Context) -> None:
    """Check that every tensor of a state has one row per sequence. Args: rows: number of rows by tensor name.

    Raises: StateError.
    """
    N = x_BTD.shape[0] if context.cu_seqlens is None else context.cu_seqlens.shape[0] - 1
    unit = "row of x" if context.cu_seqlens is None else "packed sequence"
    if context.parallel is not None:
        N, unit = context.parallel.documents, "document"
    for name, count in rows.items():
        if count != N:
            raise StateError(f"state {name!r} must have one row for each {unit}, {N} in all, got {count}")


def token_counts(x_BTD: Tensor, context: Context) -> Tensor:
    """Return the number of real tokens of each sequence, with context parallelism on all ranks: [N] int64."""
    if context.parallel is not None:
        return context.parallel.document_lengths
    if context.cu_seqlens is not None:
        return context.cu_seqlens.diff().long()
    if context.mask is not None:
        return context.mask.sum(1)
    return torch.full((x_BTD.shape[0],), x_BTD.shape[1], device=x_BTD.device, dtype=torch.int64)


def last_of_each_sequence(values: Tensor, state: Tensor, context: Context) -> Tensor:
    """Return the values after the last token of each sequence, [N, ...]; an empty sequence keeps its state.

    Args: values: [B, T, ...], which padding leaves unchanged; state: [N, ...], the values before the first token.
    """
    if context.parallel is not None:
        plan = context.parallel
        last = last_of_each_sequence(values, state[plan.document], context._replace(parallel=None))
        return states_of_documents(last, plan)
    if not values.shape[1]:
        return state
    if context.cu_seqlens is None:
        return values[:, -1]
    bounds = context.cu_seqlens.long()
    is_empty_N = (bounds.diff() == 0).view(-1, *[1] * (state.dim() - 1))
    return torch.where(is_empty_N, state, values[0, (bounds[1:] - 1).clamp(min=0)])


def next_of_each_sequence(x: Tensor, context: Context) -> Tensor:
    """Return x_(t+1) of the same sequence at each token t, 0 at the last one. Args: x: [B, T, C]."""
    T = x.shape[1]
    following = F.pad(x, (0, 0, 0, 1))[:, 1:]
    if context.cu_seqlens is None:
        return following
    bounds = context.cu_seqlens.long()
    ends_T = bounds[valid_sequence_index(context.cu_seqlens, T) + 1]
    is_last_T = torch.arange(1, T + 1, device=x.device) == ends_T
    return torch.where(is_last_T[:, None], 0.0, following)


def segment_cumsum(x: Tensor, before: Tensor | None, context: Context) -> Tensor:
    """Sum x over the tokens of each sequence up to each token, in float64 (float32 on MPS).

    The sums of a pack come from one sum over all its tokens, in which float32 would lose the precision of the later
    sequences. A value that is not finite makes the sums from there to the end of its sequence NaN, and a gradient that
    is not finite the gradients from there to the start of its sequence.

    Args: x: [B, T, ...], 0 at padded tokens; before: the sums before the first token, [N, ...]; None: 0.
    """
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    if context.parallel is not None:
        before = local_sums(x.to(wide), None if before is None else before.to(wide), context.parallel)
    if context.cu_seqlens is None:
        total = x.to(wide) if x.shape[1] == 1 else x.to(wide).cumsum(1)  # a decode step launches no scan
        return total if before is None else total + before[:, None]
    T, bounds = x.shape[1], context.cu_seqlens.long()
    sequence_T = valid_sequence_index(context.cu_seqlens, T)
    ends_N = torch.cat([bounds[1:-1], bounds.new_full((1,), T)])  # tokens after the last sequence continue it
    total = _SequenceSums.apply(x.to(wide), bounds[sequence_T], ends_N[sequence_T], False)
    return total if before is None else total + before[sequence_T]


class _SequenceSums(torch.autograd.Function):
    """Sum over the tokens of each sequence up to each token, or (`reverse`) from each token on.

    Each sum is the gradient of the other. The gradient of torch's cumsum adds the gradients of all later tokens, also
    of other sequences, which cancel only if they are finite.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, start_T: Tensor, end_T: Tensor, reverse: bool) -> Tensor:
        is_finite = x.isfinite()
        sums = [_sum_between(y, start_T, end_T, reverse) for y in (torch.where(is_finite, x, 0.0), ~is_finite)]
        return torch.where(sums[1] > 0, torch.nan, sums[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, start_T, end_T, ctx.reverse = inputs
        ctx.save_for_backward(start_T, end_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _SequenceSums.apply(grad, *ctx.saved_tensors, not ctx.reverse), None, None, None


def _sum_between(x: Tensor, start_T: Tensor, end_T: Tensor, reverse: bool) -> Tensor:
    """Sum x [1, T, ...] from the start of each token's sequence to the token, or from the token to the end."""
    total = x.cumsum(1)  # int64 for bool
    before = torch.cat([torch.zeros_like(total[:, :1]), total], 1)
    return before[:, end_T] - before[:, :-1] if reverse else total - before[:, start_T]


def positions(x_BTD: Tensor, offset_N: Tensor | None, context: Context) -> Tensor:
    """Return the absolute position of each token, [B, T] int64.

    Args: offset_N: number of tokens before x in each sequence; None: 0. Ignored if the context has positions.
    """
    if context.positions is not None:
        return context.positions
    if context.parallel is not None and context.cu_seqlens is not None:
        position_BT = context.parallel.positions
        document_T = context.parallel.document[valid_sequence_index(context.cu_seqlens, x_BTD.shape[1])]
        return position_BT if offset_N is None else position_BT + offset_N[document_T]
    B, T = x_BTD.shape[:2]
    time_T = torch.arange(T, device=x_BTD.device)
    if context.cu_seqlens is not None:
        sequence_T = valid_sequence_index(context.cu_seqlens, T)
        position_T = time_T - context.cu_seqlens.long()[sequence_T]
        return (position_T if offset_N is None else position_T + offset_N[sequence_T])[None]
    return time_T.expand(B, T) if offset_N is None else time_T + offset_N[:, None]


def unpack(tensors: Iterable[Tensor], cu_seqlens: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Move each packed sequence to the start of a separate row of T tokens, which takes N times the memory.

    Args: tensors: [1, T, ...] each.
    Returns: tensors [N, T, ...], zero at padded tokens; the mask of real tokens [N, T]; for each packed token its index
        in the flattened rows, [T] (tokens after cu_seqlens[-1], which belong to no sequence: any valid index).
    """
    tensors = list(tensors)
    T, N = tensors[0].shape[1], cu_seqlens.shape[0] - 1
    sequence_T = sequence_index(cu_seqlens, T)
    time_T = torch.arange(T, device=sequence_T.device)
    index_T = sequence_T * T + time_T - cu_seqlens.long()[sequence_T]
    shape = (N + 1, T)  # row N takes the tokens that belong to no sequence
    rows = [
        torch.unflatten(x.new_zeros((N + 1) * T, *x.shape[2:]).index_copy(0, index_T, x[0]), 0, shape)[:N]
        for x in tensors
    ]
    return rows, time_T < cu_seqlens.diff()[:, None], index_T.clamp(max=max(N * T - 1, 0))


def _permute(x_BTD: Tensor, order_BT: Tensor) -> Tensor:
    return x_BTD.gather(1, order_BT[..., None].expand_as(x_BTD))


def _check_input(x_BTD: Tensor, width: int, like: Tensor | None) -> None:
    if not isinstance(x_BTD, Tensor):
        raise OperandError(f"x must be a tensor, got {type(x_BTD).__name__}")
    if x_BTD.dim() != 3 or x_BTD.shape[2] != width:
        raise ShapeError(f"x must have shape [B, T, {width}], got {list(x_BTD.shape)}")
    if like is not None and not like.is_meta and (device := compute_device(like)) != x_BTD.device:  # meta: offloaded
        raise DeviceError(f"x must be on {device}, where the weights are, got {x_BTD.device}")
    if x_BTD.dtype not in FLOAT_DTYPES:
        raise DtypeError(f"x must be float64, float32, bfloat16 or float16, got {x_BTD.dtype}")
    # Quantised weights have other dtypes, and convert x themselves. FSDP2 may cast a sharded weight for each call.
    is_sharded = hasattr(like, "device_mesh")
    if like is None or is_sharded or like.dtype == x_BTD.dtype or like.dtype not in FLOAT_DTYPES:
        return
    if x_BTD.is_meta or not torch.is_autocast_enabled(x_BTD.device.type):
        raise DtypeError(f"x must be {like.dtype} like the weights, or torch.autocast must be on, got {x_BTD.dtype}")


def _check(x_BTD: Tensor, context: Context) -> None:
    B, T = x_BTD.shape[:2]
    for name, dtype in (("mask", torch.bool), ("positions", torch.int64)):
        tensor = getattr(context, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != (B, T):
            raise ShapeError(f"context.{name} must have shape [B, T] = {[B, T]} like x, got {list(tensor.shape)}")
        if tensor.dtype != dtype:
            raise DtypeError(f"context.{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != x_BTD.device:
            raise DeviceError(f"context.{name} must be on {x_BTD.device}, where x is, got {tensor.device}")
    if context.parallel is not None and (context.cu_seqlens is None or context.parallel.positions.shape[1] != T):
        expected = list(context.parallel.positions.shape)
        missing = " and no cu_seqlens" if context.cu_seqlens is None else ""
        raise ShapeError(
            f"context.parallel needs the {expected} tokens of this rank and the cu_seqlens of its segments, as in "
            f"ContextBatch.context, got x of shape {list(x_BTD.shape)}{missing}"
        )
    if context.cu_seqlens is not None:
        _check_packed(x_BTD, context.cu_seqlens)
        if context.mask is not None:
            raise OperandError("context.mask must be None with cu_seqlens: packed sequences have no padding")
    elif context.mask is not None and values_are_readable(context.mask):
        starts_BT = context.mask[:, 1:] & ~context.mask[:, :-1]
        if int((starts_BT.sum(1) + context.mask[:, :1].sum(1)).amax() if B else 0) > 1:
            raise ValueRangeError(
                "context.mask must be True at consecutive tokens of each row: padding must be left or right of the "
                "real tokens, not between them"
            )


def _check_packed(x_BTD: Tensor, cu_seqlens: Tensor) -> None:
    if x_BTD.shape[0] != 1:
        raise ShapeError(f"packed sequences (context.cu_seqlens) need B = 1, got B = {x_BTD.shape[0]}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ShapeError(f"context.cu_seqlens must have shape [N + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype != torch.int32:
        raise DtypeError(f"context.cu_seqlens must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.device != x_BTD.device:
        raise DeviceError(f"context.cu_seqlens must be on {x_BTD.device}, where x is, got {cu_seqlens.device}")
    problems = packing_problems(cu_seqlens, x_BTD.shape[1]) if values_are_readable(cu_seqlens) else []
    if problems:
        raise ValueRangeError(f"context.{problems[0]}")
