"""Operators of additive updates that share keys: torch.compile, export and CUDA graphs see one node each.

Triton is imported when a kernel first runs. G chunk slots, C tokens of a chunk, N sequences
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.triton.operands import all_ready, schema
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.shared_keys.operands import (
    CHUNK,
    SharedKeyBackwardCall,
    SharedKeyCall,
    SharedKeyOperands,
)
from deltazoo.backends.triton.tiles import chunk_slots

_INPUTS = len(SharedKeyOperands._fields)


def shared_key_scan(x: SharedKeyOperands, scale: float) -> tuple[Tensor, Tensor]:
    """Compute o [B, T, HV, 1] and the final state [N, HV, K, 1]; differentiable once."""
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x):
        out = _SharedKeyScan.apply(*x, scale)
    else:
        out = _scan_op(*x, scale)
    return out[0], out[1]


def _scan_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.shared_keys.launch import forward

    *tensors, scale = all_ready(arguments)
    x = SharedKeyOperands(*tensors)
    o, final, sums, states = out = _scan_fake(*arguments)
    forward(x, scale, o=o.zero_() if x.cu_seqlens is not None else o, final=final, sums=sums, states=states)
    return out


def _scan_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x = SharedKeyOperands(*arguments[:_INPUTS])
    (B, T, H, K), HV = x.q.shape, x.v.shape[2]
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    slots = chunk_slots(B, T, CHUNK, x.cu_seqlens)
    floats = x.q.new_empty((N, HV, K, 1), dtype=torch.float32), x.q.new_empty((slots, CHUNK, HV), dtype=torch.float32)
    return x.v.new_empty(x.v.shape), *floats, x.q.new_empty(slots, H, K, HV // H)


def _backward_impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.shared_keys.launch import backward

    tensors = all_ready(arguments)
    call = SharedKeyBackwardCall(SharedKeyOperands(*tensors[:_INPUTS]), *tensors[_INPUTS:])
    out = _backward_fake(*arguments)
    if call.x.cu_seqlens is not None:
        for y in out[:4]:
            y.zero_()
    backward(call, out)
    return out


def _backward_fake(*arguments: Any) -> list[Tensor]:
    x, d_final = SharedKeyOperands(*arguments[:_INPUTS]), arguments[_INPUTS + 3]
    return [y.new_empty(y.shape) for y in (*x[:4], d_final)]


_scan_op = operator(
    f"triton_shared_key_scan({schema(SharedKeyCall)}) -> (Tensor, Tensor, Tensor, Tensor)",
    _scan_impl,
    compiled_ahead(_scan_impl, _scan_fake),
)
_backward_op = operator(
    f"triton_shared_key_scan_backward({schema(SharedKeyBackwardCall)}) -> Tensor[]",
    _backward_impl,
    compiled_ahead(_backward_impl, _backward_fake),
)


@cache_forward_signature
class _SharedKeyScan(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _scan_op(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale = inputs
        _, _, sums, states = output
        ctx.mark_non_differentiable(sums, states)
        ctx.save_for_backward(*tensors, sums, states)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        *gradients, d_state = _backward_op(*saved, d_o, d_final, ctx.scale)
        return *gradients, None if saved[4] is None else d_state, None, None


differentiate_exported("triton_shared_key_scan", _SharedKeyScan.apply)
