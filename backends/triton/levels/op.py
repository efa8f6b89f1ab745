"""Operators of log-linear attention: torch.compile, export and CUDA graphs see one node each.

Triton is imported when a kernel first runs.
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import (
    cache_forward_signature,
    differentiate_exported,
    mark_written,
    operator,
)
from deltazoo.backends.triton.levels.operands import LevelOperands
from deltazoo.backends.triton.operands import all_ready, ready, schema
from deltazoo.backends.triton.runtime.precompile import compiled_ahead

_OPERANDS = len(LevelOperands._fields)


def level_scan(x: LevelOperands) -> tuple[Tensor, Tensor]:
    """Run the kernels; differentiable once.

    Returns: o [B, T, HV, V] in the dtype of v, and the final states [N, J, HV, K, V] float32, which are empty without
        initial ones.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        o, final = _LevelScan.apply(*x)
    else:
        o, final = _scan_op(*x)
    return o, final


def level_step_(x: LevelOperands, states: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
    """Decode one token per row without gradients (T = 1), updating the states in place.

    Args:
        states: [B, L - 1, HV, K, V] float32, of the levels from 1 on. seen: [B] int64, the tokens before.
        counts: [B] int64, 1, or 0 for a row without a token.
    Returns: o [B, 1, HV, V].
    """
    return _step_op(*x[:6], states, seen, counts)


def _scan_impl(*arguments: Any) -> tuple[Tensor, Tensor]:
    from deltazoo.backends.triton.levels.launch import choose_launch, forward

    with torch.cuda.device_of(arguments[0]):
        x = LevelOperands(*all_ready(arguments))
        return forward(x, choose_launch(x))


def _backward_impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.levels.launch import backward, choose_launch

    *operands, d_o, d_final = arguments
    with torch.cuda.device_of(d_o):
        x = LevelOperands(*all_ready(operands))
        gradients = backward(x, ready(d_o), None if d_final is None else ready(d_final), choose_launch(x))
    return [t for t in gradients if t is not None]


def _step_impl(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.levels.launch import step_

    *operands, states, seen, counts = arguments
    written = states.contiguous()
    with torch.cuda.device_of(states):
        o = step_(LevelOperands(*all_ready(operands), *[None] * (_OPERANDS - len(operands))), written, seen, counts)
    mark_written(states, written)
    return o


def _scan_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    x = LevelOperands(*arguments)
    return x.v.new_empty(x.v.shape), x.q.new_empty(0 if x.state is None else x.state.shape, dtype=torch.float32)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in LevelOperands(*arguments[:_OPERANDS])[:7] if t is not None]


def _step_fake(*arguments: Any) -> Tensor:
    return arguments[2].new_empty(arguments[2].shape)


_scan_op = operator(
    f"triton_level_scan({schema(LevelOperands)}) -> (Tensor, Tensor)",
    _scan_impl,
    compiled_ahead(_scan_impl, _scan_fake),
)
_backward_op = operator(
    f"triton_level_scan_backward({schema(LevelOperands)}, Tensor d_o, Tensor? d_final) -> Tensor[]",
    _backward_impl,
    compiled_ahead(_backward_impl, _backward_fake),
)
_step_op = operator(
    "triton_level_step_(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? erase, Tensor weights,"
    " Tensor(a!) states, Tensor seen, Tensor counts) -> Tensor",
    _step_impl,
    compiled_ahead(_step_impl, _step_fake),
)


@cache_forward_signature
class _LevelScan(torch.autograd.Function):
    @staticmethod
    def forward(*operands: Any) -> tuple[Tensor, Tensor]:
        return _scan_op(*operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors
        x = LevelOperands(*operands)
        gradients = iter(_backward_op(*operands, d_o, None if x.state is None else d_final))
        differentiable = [next(gradients) if t is not None else None for t in x[:7]]
        return (*differentiable, *[None] * (_OPERANDS - 7))


differentiate_exported("triton_level_scan", _LevelScan.apply)
