"""Operators of the elementwise recurrence: torch.compile, export and CUDA graphs see one node each.

    S_t = d_t * S_{t-1} + k_t v_t^T,    o_t = scale S_t^T q_t, or scale S_{t-1}^T q_t

Triton is imported when a kernel first runs. B batch, T time, N sequences, H key heads, HV value heads (channels), K key
width, V value width
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
from deltazoo.backends.triton.element.config import checkpoint_slots, element_heuristic, parse_element
from deltazoo.backends.triton.element.operands import (
    ElementBackwardCall,
    ElementCall,
    ElementKind,
    ElementOperands,
    ElementStepCall,
    empty_gradients,
    gradient_names,
)
from deltazoo.backends.triton.lower import MAX_ELEMENT_VALUES
from deltazoo.backends.triton.operands import all_ready, schema
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.shared_keys.op import shared_key_scan
from deltazoo.backends.triton.shared_keys.operands import SharedKeyOperands, shares_keys
from deltazoo.backends.update.base import UpdateInputs, UpdateOutput
from deltazoo.backends.update.lowering import strengths
from deltazoo.backends.update.spec import UpdateSpec


def element_update(spec: UpdateSpec, inputs: UpdateInputs, config: str) -> UpdateOutput:
    """Compute an update; differentiable once. Wider values are computed two columns at a time.

    Many value heads that share a key head are computed by matrix products, unless a config is given.
    """
    x, kind = _lower(spec, inputs), ElementKind(spec.read, spec.scale_of(inputs.q.shape[-1]), config)
    H, (HV, V) = x.q.shape[2], x.v.shape[2:]
    if not config and shares_keys(x.q.dtype, x.decay, H, HV, V=V, read=spec.read):
        assert x.log_decay is not None
        shared = SharedKeyOperands(x.q, x.k, x.v, x.log_decay, x.state, x.cu_seqlens)
        return UpdateOutput(*shared_key_scan(shared, kind.scale))
    if V > MAX_ELEMENT_VALUES:
        slices = [slice(i, min(i + MAX_ELEMENT_VALUES, V)) for i in range(0, V, MAX_ELEMENT_VALUES)]
        parts = [
            _run(x._replace(v=x.v[..., part], state=None if x.state is None else x.state[..., part]), kind)
            for part in slices
        ]
        return UpdateOutput(torch.cat([o for o, _ in parts], -1), torch.cat([state for _, state in parts], -1))
    return UpdateOutput(*_run(x, kind))


def _run(x: ElementOperands, kind: ElementKind) -> tuple[Tensor, Tensor]:
    """Run the scan, differentiably. Returns o and the final state."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        out = _ElementScan.apply(*x, *kind)
    else:
        out = _scan_op(*x, *kind, False)
    return out[0], out[1]


def element_step_(spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> Tensor:
    """Decode one token per row without gradients, updating the states in place. Returns o [B, 1, HV, V]."""
    x = _lower(spec, inputs)
    scale = spec.scale_of(x.q.shape[-1])
    return _step_op(x.q, x.k, x.v, x.log_decay, x.step, x.rate, states, slots, spec.read, scale)


def _lower(spec: UpdateSpec, inputs: UpdateInputs) -> ElementOperands:
    """Return the operands of the kernels, with the values multiplied by their write strengths."""
    _, write = strengths(spec, inputs)
    v = inputs.v
    if write is not None:
        v = (v * (write if write.dim() == v.dim() else write.unsqueeze(-1))).to(v.dtype)
    return ElementOperands(
        inputs.q, inputs.k, v, inputs.log_decay, inputs.step, inputs.rate, inputs.state, inputs.cu_seqlens
    )


def _split(arguments: Any) -> tuple[ElementOperands, Any]:
    n = len(ElementOperands._fields)
    return ElementOperands(*arguments[:n]), arguments[n:]


def _scan_impl(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.element.launch import forward

    x, rest = _split(all_ready(arguments))
    with torch.cuda.device_of(x.q):
        return forward(x, ElementKind(*rest[:-1]), rest[-1])


def _backward_impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.element.launch import backward

    x, (checkpoints, d_o, d_final, *kind, key_gradients) = _split(all_ready(arguments))
    with torch.cuda.device_of(x.q):
        return backward(x, ElementKind(*kind), checkpoints, d_o, d_final, key_gradients)


def _step_impl(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.element.launch import step_

    states = arguments[ElementStepCall._fields.index("states")]
    call = ElementStepCall(*all_ready(arguments))
    with torch.cuda.device_of(call.q):
        o = step_(call)
    mark_written(states, states if call.states.data_ptr() == states.data_ptr() else call.states)
    return o


def _scan_fake(*arguments: Any) -> tuple[Tensor, ...]:
    x, (_, _, config, save) = _split(arguments)
    (B, T, _, K), (HV, V) = x.q.shape, x.v.shape[2:]
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    # int: a graph with dynamic sizes has symbolic ones here; the config depends on the widths.
    every = (parse_element(config) if config else element_heuristic(int(K), int(V))).checkpoint_tokens
    slots = checkpoint_slots(N, T, every, x.cu_seqlens is not None)
    checkpoints = x.q.new_empty((slots, K, V, HV) if save else (0,), dtype=torch.float32)
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    return o, x.q.new_empty((N, HV, K, V), dtype=torch.float32), checkpoints


def _backward_fake(*arguments: Any) -> list[Tensor]:
    x, rest = _split(arguments)
    return list(empty_gradients(x, rest[-1]).values())


def _step_fake(*arguments: Any) -> Tensor:
    v = ElementStepCall(*arguments).v
    return v.new_empty(v.shape)


_scan_op = operator(
    f"triton_element_scan({schema(ElementCall)}) -> (Tensor, Tensor, Tensor)",
    _scan_impl,
    compiled_ahead(_scan_impl, _scan_fake),
)
_backward_op = operator(
    f"triton_element_scan_backward({schema(ElementBackwardCall)}) -> Tensor[]",
    _backward_impl,
    compiled_ahead(_backward_impl, _backward_fake),
)
_step_op = operator(
    f"triton_element_step_({schema(ElementStepCall, 'states')}) -> Tensor",
    _step_impl,
    compiled_ahead(_step_impl, _step_fake),
)


@cache_forward_signature
class _ElementScan(torch.autograd.Function):
    """The scan with its backward."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _scan_op(*arguments, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, kind = _split(inputs)
        o, _, checkpoints = output
        ctx.mark_non_differentiable(checkpoints)
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.o_shape = ElementKind(*kind), o.shape
        ctx.save_for_backward(*x, checkpoints)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        x, (checkpoints,) = _split(ctx.saved_tensors)
        d_o = x.v.new_zeros(ctx.o_shape) if d_o is None else d_o
        key_gradients = bool(ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        present = _backward_op(*x, checkpoints, d_o, d_final, *ctx.kind, key_gradients)
        by_name = dict(zip(gradient_names(x, key_gradients), present, strict=True))
        grads = []
        for name, needed in zip(x._fields, ctx.needs_input_grad, strict=False):
            grads.append(by_name.get(name) if needed else None)
        return (*grads, *(None for _ in ctx.kind))


differentiate_exported("triton_element_scan", lambda *arguments: _ElementScan.apply(*arguments[:-1]))  # without save
