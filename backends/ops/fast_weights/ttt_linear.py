"""TTT-Linear as operators: one node of a graph for any number of tokens, with a hand-written backward.

An NVIDIA GPU runs Triton kernels, one launch forward and one backward; other devices, and sizes that the kernels do not
support, the same chunks in plain torch.

N sequences, H heads, M tokens per mini-batch, E head width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.ops.fast_weights import ttt_linear_chunks as plain
from deltazoo.backends.ops.fast_weights.spans import has_one_token
from deltazoo.backends.ops.fast_weights.ttt_linear_chunks import TTTGradients, TTTOperands, TTTResult, TTTState
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import (
    cache_forward_signature,
    differentiate_exported,
    mark_written,
    operator,
)
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.triton.fast_weights.limits import ttt_linear_refusals
from deltazoo.backends.triton.operands import all_ready, ready, schema
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.update.base import without_autocast
from deltazoo.backends.update.watch import runs_by_kernel

_STATE = TTTState._fields
_INPUTS = len(TTTOperands._fields)


def ttt_linear(x: TTTOperands) -> tuple[Tensor, TTTState]:
    """Compute o [B, T, H, E] and the new state; differentiable once.

    Without gradients a state of x is updated in place, and is the new state.
    """
    runs_by_kernel("TTT-Linear", _refusals(x, device_type(x.q), x.q.device.index))
    if x.W is not None and x.G is not None and x.b is not None and x.g is not None and not torch.is_grad_enabled():
        return _step_op(*x), TTTState(x.W, x.G, x.b, x.g)
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x):
        out = _TTTLinear.apply(*x)
    else:
        out = _forward_op(*x, False)
    return out[0], TTTState(*out[1:5])


def _refusals(x: TTTOperands, device: str, index: int | None) -> list[str]:
    return ttt_linear_refusals(device, index, x.q.dtype, x.q.shape[-1], x.rate.shape[0])


def _supported(x: TTTOperands) -> bool:
    device = device_of(x.q)
    return not _refusals(x, device.type, device.index)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, save = arguments
    x = TTTOperands(*all_ready(tensors))
    if not _supported(x):
        with without_autocast(x.q):
            return tuple(y.contiguous() for y in plain.forward(x, save))
    from deltazoo.backends.triton.fast_weights.launch import ttt_forward

    out = TTTResult(*_forward_fake(*arguments))
    ttt_forward(x, out._replace(o=out.o.zero_()))
    return tuple(out)


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, save = arguments
    x = TTTOperands(*tensors)
    N, (H, E) = x.spans.shape[0], x.first_b.shape
    new = x.eta.new_empty
    D = new(x.q.shape if save else (0,))
    return x.q.new_empty(x.q.shape), new(N, H, E, E), new(N, H, E, E), new(N, H, E), new(N, H, E), D


def _step(*tensors: Any) -> Tensor:
    given = TTTOperands(*tensors)
    is_token = has_one_token(given.q, given.spans)
    keeps = given._fields.index("v") if is_token else -1  # the step kernel takes v with a stride
    operands: list[Any] = [y if y is None or i == keeps else ready(y) for i, y in enumerate(given)]
    x = TTTOperands(*operands)
    results: list[Tensor] = [getattr(x, name) for name in _STATE]
    if _supported(x):
        from deltazoo.backends.triton.fast_weights.launch import ttt_forward, ttt_step

        if is_token:
            o = x.q.new_empty(x.q.shape)
            ttt_step(x, o)
        else:
            o = x.q.new_zeros(x.q.shape)
            ttt_forward(x, TTTResult._make([o, *results, x.eta.new_empty(0)]))
    else:
        learned = {name: getattr(x, name).to(x.eta.dtype) for name in ("gain", "bias", "first_W", "first_b")}
        with without_autocast(x.q):
            o, *results, _ = plain.forward(x._replace(**learned), False)
    for name, result in zip(_STATE, results, strict=True):
        tensor = getattr(given, name)
        mark_written(tensor, tensor if result.data_ptr() == tensor.data_ptr() else result)
    return o.contiguous()


def _step_fake(*tensors: Any) -> Tensor:
    q = TTTOperands(*tensors).q
    return q.new_empty(q.shape)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    x = TTTOperands(*all_ready(arguments[:_INPUTS]))
    d_o, W, b, D, *d_state = (y.contiguous() for y in arguments[_INPUTS:])
    saved, d = TTTResult(d_o, W, W, b, b, D), TTTState(*d_state)
    if not _supported(x):
        with without_autocast(x.q):
            return tuple(y.contiguous() for y in plain.backward(x, saved, d_o, d))
    from deltazoo.backends.triton.fast_weights.launch import ttt_backward

    out = TTTGradients(*_backward_fake(*arguments))
    for tokens in (out.q, out.k, out.v, out.eta):
        tokens.zero_()
    ttt_backward(x, saved, d_o, d, out=out)
    return tuple(out)


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x, d_state = TTTOperands(*arguments[:_INPUTS]), arguments[-4:]
    like = (x.q, x.k, x.v, x.eta, x.rate, x.gain, x.bias, *d_state)
    return tuple(y.new_empty(y.shape) for y in like)


_tensors = schema(TTTOperands)
_forward_op = operator(
    f"ttt_linear({_tensors}, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    compiled_ahead(_forward, _forward_fake),
)
_mutable = _tensors
for _name, _letter in zip(_STATE, "abcd", strict=True):
    _mutable = _mutable.replace(f"Tensor? {_name},", f"Tensor({_letter}!) {_name},")
_step_op = operator(f"ttt_linear_({_mutable}) -> Tensor", _step, compiled_ahead(_step, _step_fake))
_backward_op = operator(
    f"ttt_linear_backward({_tensors}, Tensor d_o, Tensor new_W, Tensor new_b, Tensor D, Tensor d_W, Tensor d_G, "
    "Tensor d_b, Tensor d_g) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
    _backward,
    compiled_ahead(_backward, _backward_fake),
)


@cache_forward_signature
class _TTTLinear(torch.autograd.Function):
    @staticmethod
    def forward(*tensors: Any) -> tuple[Tensor, ...]:
        return _forward_op(*tensors, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        result = TTTResult(*output)
        ctx.mark_non_differentiable(result.D)
        ctx.save_for_backward(*inputs, result.W, result.b, result.D)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor, *d_results: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, W, b, D = ctx.saved_tensors
        x = TTTOperands(*tensors)
        d = TTTGradients(*_backward_op(*x, d_o, W, b, D, *d_results[:4]))
        fresh = (x.spans[:, 3] > 0).view(-1, 1, 1)
        is_fresh = fresh[..., None]
        first = torch.where(is_fresh, d.start_W, 0.0).sum(0), torch.where(fresh, d.start_b, 0.0).sum(0)
        state: list[Tensor | None] = [None] * 4
        if x.W is not None:
            state = [
                torch.where(is_fresh, 0.0, d.start_W), torch.where(is_fresh, 0.0, d.start_G),
                torch.where(fresh, 0.0, d.start_b), torch.where(fresh, 0.0, d.start_g),
            ]  # fmt: skip
        return d.q, d.k, d.v, d.eta, d.rate, d.gain, d.bias, *first, *state, None


differentiate_exported("ttt_linear", lambda *arguments: _TTTLinear.apply(*arguments[:-1]))
