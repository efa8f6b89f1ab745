"""The neural memory of Titans as operators: one node of a graph for any number of tokens, with a hand-written backward.

An NVIDIA GPU runs Triton kernels, one launch forward and one backward; other devices, and sizes that the kernels do not
support, the same chunks in plain torch.

N sequences, H heads, M tokens per chunk, E head width, F inner width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.ops.fast_weights import neural_memory_chunks as plain
from deltazoo.backends.ops.fast_weights.neural_memory_chunks import (
    SEGMENT,
    MemoryGradients,
    MemoryOperands,
    checkpoint_slots,
)
from deltazoo.backends.ops.fast_weights.spans import has_one_token
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import (
    cache_forward_signature,
    differentiate_exported,
    mark_written,
    operator,
)
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.triton.fast_weights.limits import neural_memory_refusals
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.update.base import without_autocast
from deltazoo.backends.update.watch import runs_by_kernel

_TOKENS = MemoryOperands._fields[:6]


def neural_memory(x: MemoryOperands, size: int) -> tuple[Tensor, list[Tensor]]:
    """Compute o [B, T, H, E] and the new state, the layers of M, M' and S; differentiable once.

    Without gradients a state of x is updated in place, and is the new state.

    Args: size: tokens per chunk.
    """
    runs_by_kernel("neural memory", _refusals(x, size, device_type(x.q), x.q.device.index))
    if x.state and not torch.is_grad_enabled():
        return _step_op(*x, size), x.state
    if torch.is_grad_enabled() and any(y.requires_grad for y in (*x[:6], *x.first, *x.state)):
        out = _NeuralMemory.apply(size, len(x.first), *x[:6], x.spans, *x.first, *x.state)
    else:
        out = _forward_op(*x, size, SEGMENT, False)
    return out[0], list(out[1 : 1 + 3 * len(x.first)])


def _refusals(x: MemoryOperands, size: int, device: str, index: int | None) -> list[str]:
    return neural_memory_refusals(device, index, x.q.dtype, (x.q.shape[3], x.first[0].shape[2]), size)


def _supported(x: MemoryOperands, size: int) -> bool:
    device = device_of(x.q)
    return not _refusals(x, size, device.type, device.index)


def _forward(*arguments: Any) -> list[Tensor]:
    """Return o, the new state, and the checkpoints if they are saved, else an empty tensor."""
    x, (size, segment, save) = _split(arguments)
    if not _supported(x, size):
        with without_autocast(x.q):
            o, state, checkpoints = plain.forward(x, size, segment, save)
            return [y.contiguous() for y in (o, *state, checkpoints)]
    from deltazoo.backends.triton.fast_weights.launch import memory_forward

    o, *state, checkpoints = out = _forward_fake(*arguments)
    memory_forward(x, size, segment, o=o.zero_(), state=state, checkpoints=checkpoints if save else None)
    return out


def _forward_fake(*arguments: Any) -> list[Tensor]:
    x, (size, segment, save) = _split(arguments, lambda y: y)
    (B, T, H, _), N = x.q.shape, x.spans.shape[0]
    state = [x.eta.new_empty(N, *layer.shape) for _ in range(3) for layer in x.first]
    slots = checkpoint_slots(B * T, N, size, segment) if save else 0
    width, inner = x.first[0].shape[1:]
    return [x.q.new_empty(x.q.shape), *state, x.eta.new_empty(slots, H, 2 * len(x.first), width * inner)]


def _step(*arguments: Any) -> Tensor:
    x, (size,) = _split(arguments)
    if _supported(x, size):
        from deltazoo.backends.triton.fast_weights.launch import memory_forward, memory_step

        results = x.state
        if has_one_token(x.q, x.spans):
            o = x.q.new_empty(x.q.shape)
            memory_step(x, size, o)
        else:
            o = x.q.new_zeros(x.q.shape)
            memory_forward(x, size, 0, o=o, state=results, checkpoints=None)
    else:
        with without_autocast(x.q):
            o, results, _ = plain.forward(x, size, SEGMENT, False)
    given = MemoryOperands(*arguments[:-1]).state
    for tensor, result in zip(given, results, strict=True):
        mark_written(tensor, tensor if result.data_ptr() == tensor.data_ptr() else result)
    return o.contiguous()


def _step_fake(*arguments: Any) -> Tensor:
    q = arguments[0]
    return q.new_empty(q.shape)


def _backward(*arguments: Any) -> list[Tensor]:
    """Return the gradients of the operands with a time axis, and of the state before the first token."""
    x, (checkpoints, d_o, d_state, size, segment) = _split(arguments)
    d_o, checkpoints = d_o.contiguous(), checkpoints.contiguous()
    if not _supported(x, size):
        with without_autocast(x.q):
            *tokens, start = plain.backward(x, checkpoints, d_o, d_state, size, segment)
            return [y.contiguous() for y in (*tokens, *start)]
    from deltazoo.backends.triton.fast_weights.launch import memory_backward

    tokens = [y.new_zeros(y.shape) for y in x[:6]]
    start = [y.clone(memory_format=torch.contiguous_format) for y in d_state]
    out = MemoryGradients._make([*tokens, start])
    memory_backward(x, checkpoints, d_o, size=size, segment=segment, out=out)
    return [*tokens, *start]


def _backward_fake(*arguments: Any) -> list[Tensor]:
    x, (_, _, d_state, *_) = _split(arguments, lambda y: y)
    return [y.new_empty(y.shape) for y in (*x[:6], *d_state)]


def _split(arguments: Any, prepare: Any = ready) -> tuple[MemoryOperands, Any]:
    """Return the operands, prepared for the kernels, and the other arguments."""
    n = len(MemoryOperands._fields)
    prepared = ([prepare(z) for z in y] if isinstance(y, (list, tuple)) else prepare(y) for y in arguments[:n])
    return MemoryOperands._make(prepared), arguments[n:]


_schema = ", ".join(f"Tensor {name}" for name in _TOKENS) + ", Tensor[] first, Tensor[] state, Tensor spans"
_forward_op = operator(
    f"neural_memory({_schema}, int size, int segment, bool save) -> Tensor[]",
    _forward,
    compiled_ahead(_forward, _forward_fake),
)
_step_op = operator(
    f"neural_memory_({_schema.replace('Tensor[] state', 'Tensor(a!)[] state')}, int size) -> Tensor",
    _step,
    compiled_ahead(_step, _step_fake),
)
_backward_op = operator(
    f"neural_memory_backward({_schema}, Tensor checkpoints, Tensor d_o, Tensor[] d_state, int size, int segment)"
    " -> Tensor[]",
    _backward,
    compiled_ahead(_backward, _backward_fake),
)


@cache_forward_signature
class _NeuralMemory(torch.autograd.Function):
    @staticmethod
    def forward(size: int, depth: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_forward_op(*_operands(depth, tensors), size, SEGMENT, True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.size, ctx.depth, *tensors = inputs
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(output[-1], *tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor, *d_results: Tensor) -> tuple[Tensor | None, ...]:
        checkpoints, *tensors = ctx.saved_tensors
        x, depth = _operands(ctx.depth, tensors), ctx.depth
        d_state = [y.contiguous() for y in d_results[:-1]]
        gradients = _backward_op(*x, checkpoints, d_o, d_state, ctx.size, SEGMENT)
        tokens, start = gradients[:6], gradients[6:]
        fresh = (x.spans[:, 3] > 0)[:, None, None, None]
        first = [torch.where(fresh, start[j] + start[depth + j], 0.0).sum(0) for j in range(depth)]
        state = [torch.where(fresh, 0.0, y) for y in start] if x.state else []
        return None, None, *tokens, None, *first, *state


def _operands(depth: int, tensors: Any) -> MemoryOperands:
    q, k, v, eta, theta, alpha, spans = tensors[:7]
    return MemoryOperands(q, k, v, eta, theta, alpha, list(tensors[7 : 7 + depth]), list(tensors[7 + depth :]), spans)


def _exported(*arguments: Any) -> list[Tensor]:
    x, (size, *_) = _split(arguments, lambda y: y)
    return list(_NeuralMemory.apply(size, len(x.first), *x[:6], x.spans, *x.first, *x.state))


differentiate_exported("neural_memory", _exported)
