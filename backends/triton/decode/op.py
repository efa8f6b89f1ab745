"""Operators of the decode kernels: torch.compile, export and CUDA graphs see one node each.

The kernels read the operands of the spec directly, so that a decode step launches nothing else. B batch, T tokens,
HV value heads, K key width, V value width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.decode.operands import CommitCall, StepCall, StepKind, StepOperands, resolve_decode
from deltazoo.backends.triton.lower import splits_terms
from deltazoo.backends.triton.operands import flatten, schema, unflatten
from deltazoo.backends.triton.runtime.precompile import begin, compiled_ahead
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.lowering import log_decay
from deltazoo.backends.update.spec import UpdateSpec


def decode_operands(spec: UpdateSpec, inputs: UpdateInputs, config: str) -> tuple[StepOperands, StepKind]:
    """Return the operands and traits of decoded tokens."""
    decay = log_decay(spec, inputs) if spec.decay == "rate" else inputs.log_decay
    operands = StepOperands(
        inputs.q, inputs.k, inputs.v, decay,
        erase=inputs.erase, write=inputs.write if inputs.beta is None else inputs.beta,
        e=inputs.erase_key, a=inputs.a, b=inputs.b,
    )  # fmt: skip
    return operands, StepKind(
        steps=spec.householders,
        delta=spec.transition == "delta",
        reparam=spec.reparam,
        erase_from=spec.erase_from,
        read=spec.read,
        split_terms=splits_terms(spec, inputs.q.shape[-1], inputs.q.dtype),
        erase_factor=1.0 if spec.negative_eigenvalues == "off" else 2.0,
        write_factor=2.0 if spec.negative_eigenvalues == "both" else 1.0,
        scale=spec.scale_of(inputs.q.shape[-1]),
        config=config,
    )


def step_(x: StepOperands, kind: StepKind, states: Tensor, slots: Tensor | None) -> Tensor:
    """Decode one token per row (T = 1), updating the states in place. Returns o [B, 1, HV, V].

    Args:
        states: [S, HV, K, V] float32.
        slots: [B] int64, the row of `states` of each batch row; None: row i has state i.
    """
    return _step_op(*x, states, slots, *kind)


def verify(x: StepOperands, kind: StepKind, states: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Decode T drafted tokens per row. Returns o [B, T, HV, V] and the written values [B, T, m, HV, V] float32."""
    o, values = _verify_op(*x, states, slots, *kind)
    return o, values


def commit_(
    x: StepOperands, kind: StepKind, values: Tensor, states: Tensor, slots: Tensor | None, accepted: Tensor
) -> None:
    """Advance the states in place by the first `accepted` [B] int32 tokens of each row."""
    _commit_op(*x, values, states, slots, accepted, *kind)


def begin_step(x: StepOperands, kind: StepKind, states: Tensor) -> None:
    """Start to compile the kernel of a decode step in threads."""
    begin(_step_impl, flatten(StepCall(x, states, None, kind)))


def _step_impl(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.decode.launch import step_

    call = _contiguous(StepCall, arguments)
    with torch.cuda.device_of(call.x.q):
        o = step_(call.x, call.kind, call.states, call.slots, resolve_decode(call.x, call.kind))
    mark_written(arguments[_STEP_STATES], call.states)
    return o


def _verify_impl(*arguments: Any) -> tuple[Tensor, Tensor]:
    from deltazoo.backends.triton.decode.launch import verify

    call = _contiguous(StepCall, arguments)
    with torch.cuda.device_of(call.x.q):
        return verify(call.x, call.kind, call.states, call.slots, resolve_decode(call.x, call.kind))


def _commit_impl(*arguments: Any) -> None:
    from deltazoo.backends.triton.decode.launch import commit_

    call = _contiguous(CommitCall, arguments)
    launch = resolve_decode(call.x, call.kind)
    with torch.cuda.device_of(call.x.q):
        commit_(call.x, call.kind, call.values, call.states, call.slots, call.accepted, launch)
    mark_written(arguments[_COMMIT_STATES], call.states)


def _step_fake(*arguments: Any) -> Tensor:
    x = unflatten(StepCall, arguments).x
    return x.v.new_empty(x.q.shape[0], 1, *x.v.shape[-2:])


def _verify_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, kind = (call := unflatten(StepCall, arguments)).x, call.kind
    (B, T), (HV, V) = x.q.shape[:2], x.v.shape[-2:]
    values = x.v.new_empty(B, T, kind.steps if x.a is None else 2, HV, V, dtype=torch.float32)
    return x.v.new_empty(B, T, HV, V), values


def _commit_fake(*arguments: Any) -> None:
    return None


def _contiguous(call: Any, arguments: tuple[Any, ...]) -> Any:
    """Name the arguments of an operator, with contiguous tensors."""
    return unflatten(call, [x.contiguous() if isinstance(x, Tensor) else x for x in arguments])


_STEP_STATES = len(StepOperands._fields)  # position of the states among the arguments
_COMMIT_STATES = _STEP_STATES + 1
_step_op = operator(
    f"triton_step_({schema(StepCall, 'states')}) -> Tensor", _step_impl, compiled_ahead(_step_impl, _step_fake)
)
_verify_op = operator(
    f"triton_verify({schema(StepCall)}) -> (Tensor, Tensor)", _verify_impl, compiled_ahead(_verify_impl, _verify_fake)
)
_commit_op = operator(
    f"triton_commit_({schema(CommitCall, 'states')}) -> ()",
    _commit_impl,
    compiled_ahead(_commit_impl, _commit_fake),
)
