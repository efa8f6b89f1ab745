"""The delta rule with momentum as operators: one node of a graph for all chunks, with a hand-written backward.

An NVIDIA GPU runs Triton kernels in 16 bits; other devices and dtypes the same chunks in plain torch.

G chunk slots, C tokens of a chunk, N sequences, R rows of slots, H heads, K key width, V value width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.ops import momentum_chunks as plain
from deltazoo.backends.ops.momentum_chunks import SCRATCH, MomentumOperands, MomentumSaved, MomentumToken
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import (
    cache_forward_signature,
    differentiate_exported,
    mark_written,
    operator,
)
from deltazoo.backends.triton.momentum.limits import runs_momentum
from deltazoo.backends.triton.operands import all_ready, schema
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.update.base import without_autocast

_INPUTS, _SAVED = len(MomentumOperands._fields), len(MomentumSaved._fields)


def momentum_scan(x: MomentumOperands, rows: int) -> tuple[Tensor, Tensor]:
    """Scan the chunks of all sequences; differentiable once.

    Args: rows: R; the slots of a sequence are in one row.
    Returns: o [G, C, H, V] in the dtype of v; the new states [N, H, 2, K, V].
    """
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x):
        out = _MomentumScan.apply(*x, rows)
    else:
        out = _forward_op(*x, rows)
    return out[0], out[1]


def _supported(x: MomentumOperands) -> bool:
    device = device_of(x.q)
    return runs_momentum(device.type, device.index, x.q.dtype, x.q.shape[-1])


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, rows = arguments
    x = MomentumOperands(*all_ready(tensors))
    if _supported(x):
        from deltazoo.backends.triton.momentum.launch import forward

        out = _forward_fake(*arguments)
        forward(x, *out)
        return out
    with without_autocast(x.q):
        return plain.forward(x, rows)


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, _ = arguments
    x = MomentumOperands(*tensors)
    N, (G, C, H, K), V = x.starts.shape[0] - 1, x.q.shape, x.v.shape[-1]
    o = x.v.new_empty(x.v.shape)
    squares = (x.v.new_empty(G, H, C, C) for _ in range(2))
    return o, x.beta.new_empty(N, H, 2, K, V), *squares, x.beta.new_empty(G, H, 6, C), torch.empty_like(o)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, rows = arguments
    x, saved = MomentumOperands(*all_ready(tensors[:_INPUTS])), MomentumSaved(*tensors[_INPUTS : _INPUTS + _SAVED])
    d_o, d_final = all_ready(tensors[_INPUTS + _SAVED :])
    if _supported(x):
        from deltazoo.backends.triton.momentum.launch import backward

        out = _backward_fake(*arguments)
        backward(x, saved, d_o, d_final, out=out, scratch=SCRATCH)
        return out
    with without_autocast(x.q):
        return plain.backward(x, saved, d_o, d_final, rows=rows)


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x, d_final = MomentumOperands(*arguments[:_INPUTS]), arguments[-2]
    return tuple(y.new_empty(y.shape) for y in (*x[:7], d_final))


_tensors = schema(MomentumOperands)
_forward_op = operator(
    f"momentum_scan({_tensors}, int rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    compiled_ahead(_forward, _forward_fake),
)
_backward_op = operator(
    f"momentum_scan_backward({_tensors}, {schema(MomentumSaved)}, Tensor d_o, Tensor d_final, int rows)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    compiled_ahead(_backward, _backward_fake),
)


@cache_forward_signature
class _MomentumScan(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _forward_op(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.rows = inputs
        saved = output[2:]
        ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(*tensors, *saved)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        *gradients, d_state = _backward_op(*saved, d_o, d_final, ctx.rows)
        return *gradients, None if saved[7] is None else d_state, None, None


differentiate_exported("momentum_scan", _MomentumScan.apply)


def momentum_step_(x: MomentumToken) -> Tensor:
    """Decode one token per row without gradients, updating S and N in place. Returns o [B, H, V]."""
    o: Tensor = _step_op(*x)
    return o


def _step(*tensors: Any) -> Tensor:
    x = MomentumToken(*all_ready(tensors))
    device, given = device_of(x.q), MomentumToken(*tensors)
    if x.S.dtype == torch.float32 and runs_momentum(device.type, device.index, torch.bfloat16, x.q.shape[-1]):
        from deltazoo.backends.triton.momentum.launch import step_

        o, S, N = _step_fake(*tensors), x.S, x.N
        step_(x, o)
    else:
        with without_autocast(x.q):
            q, k, v = (y.to(x.S.dtype) for y in x[:3])
            alpha, mu, beta, eta = (y[..., None, None] for y in x[3:7])
            S = alpha * x.S
            N = mu * x.N + eta * k[..., None] * (v - (k[..., None, :] @ S)[..., 0, :])[..., None, :]
            S = S + beta * N
            o = (q[..., None, :] @ S)[..., 0, :].to(x.v.dtype)
    for old, new in ((given.S, S), (given.N, N)):
        mark_written(old, old if new.data_ptr() == old.data_ptr() else new)
    return o


def _step_fake(*tensors: Any) -> Tensor:
    v = MomentumToken(*tensors).v
    return v.new_empty(v.shape)


_step_schema = schema(MomentumToken).replace("Tensor S", "Tensor(a!) S").replace("Tensor N", "Tensor(b!) N")
_step_op = operator(f"momentum_step_({_step_schema}) -> Tensor", _step, compiled_ahead(_step, _step_fake))
