"""Operator and launch of one token of a preconditioned delta rule, from its raw gates up to the output map.

kernels/preconditioned_operands.py and kernels/token.py have the equations.

B rows, H key heads, HV value heads, K key width, V value width
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.decode.fused import (
    INPUTS,
    OPTIONS,
    StepOptions,
    StepTiling,
    has_channel_decay,
    step_traits,
    strided_rows,
)
from deltazoo.backends.triton.decode.operands import StepKind, StepOperands, resolve_decode
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options

_OPERAND_WARPS, _FINISH_WARPS = 1, 4  # one warp computes the norms of a head without barriers


class SecondMoment(NamedTuple):
    """The second moment of the keys and its gates, as `preconditioned_operands_kernel` reads them.

    Args: moment_decay, moment_beta: [B, 1, H]. moment_A_log, moment_dt_bias, center: [H]. moments: [B, H, 1, K].
    """

    moment_decay: Tensor
    moment_beta: Tensor
    moment_A_log: Tensor
    moment_dt_bias: Tensor
    center: Tensor
    moments: Tensor


class FactorKind(NamedTuple):
    """log_bound: logarithm of the largest factor. moment_eps: of the logarithm of the second moment."""

    log_bound: float
    moment_eps: float


def preconditioned_step_(
    step: FusedDecodeStep, inputs: FusedDecodeInputs, moment: SecondMoment, kind: FactorKind, states: Tensor
) -> Tensor:
    """Decode one token per row; `moment.moments` and `states` change in place.

    Args: step: without taps, as if it erased with the key that it writes. states: [B, HV, K, V].
    Returns: o [B, 1, HV, V].
    """
    o: Tensor = _step_op(*inputs, *moment, states, *StepOptions.of(step), *kind)
    return o


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.decode.kernels.fused_step import finish_step_kernel
    from deltazoo.backends.triton.decode.kernels.preconditioned_operands import (
        MomentTraits,
        preconditioned_operands_kernel,
    )
    from deltazoo.backends.triton.decode.launch import step_
    from deltazoo.backends.triton.runtime.launcher import launcher

    inputs, moment, states, options, kind = _named(arguments)
    x, pool = strided_rows(inputs), states.contiguous()
    moment = SecondMoment(*(y if y.dim() == 3 and y.stride(2) == 1 else y.contiguous() for y in moment))
    (B, HV, K, V), H, o = pool.shape, options.heads, _fake(*arguments)
    overlap = overlaps(x.qkv)
    traits = {
        "traits": step_traits(x, (H, HV, K, V), options, StepTiling(0, 1, overlap), False),
        "moment": MomentTraits(moment.moment_decay.stride(0), moment.moment_beta.stride(0), *kind),
    }
    operands = StepOperands(
        q=o.new_empty(B, 1, H, K), k=o.new_empty(B, 1, H, K), v=torch.empty_like(o),
        log_decay=o.new_empty((B, 1, HV, K) if has_channel_decay(x, HV) else (B, 1, HV), dtype=torch.float32),
        erase=None, write=o.new_empty(B, 1, HV, dtype=torch.float32), e=o.new_empty(B, 1, H, K), a=None, b=None,
    )  # fmt: skip
    step = StepKind(
        steps=1, delta=True, reparam="none", erase_from=options.erase_from, read=options.read, split_terms=False,
        erase_factor=options.erase_factor, write_factor=options.write_factor, scale=options.scale,
    )  # fmt: skip
    tensors = x._asdict() | moment._asdict() | operands._asdict() | {"x": x.qkv, "slots": None, "o": o}
    with torch.cuda.device_of(x.qkv):
        prepare = Options(_OPERAND_WARPS, overlap=overlap)
        launcher(preconditioned_operands_kernel, tensors, traits, prepare)(B * HV, {})
        launch = resolve_decode(operands, step)
        tensors["raw"] = step_(operands, step, pool, None, launch, dtype=torch.float32, overlap=overlap)
        finish = Options(_FINISH_WARPS, overlap=overlap)
        launcher(finish_step_kernel, tensors, traits, finish)(B * HV, {"pool_rows": B})
    mark_written(states, pool)
    mark_written(arguments[_MOMENTS], moment.moments)
    return o


def _named(arguments: tuple[Any, ...]) -> tuple[FusedDecodeInputs, SecondMoment, Tensor, StepOptions, FactorKind]:
    fields = len(FusedDecodeInputs._fields)
    first = fields + len(SecondMoment._fields)
    states, *options = arguments[first:]
    n = len(StepOptions._fields)
    inputs, moment = FusedDecodeInputs(*arguments[:fields]), SecondMoment(*arguments[fields:first])
    return inputs, moment, states, StepOptions(*options[:n]), FactorKind(*options[n:])


def _fake(*arguments: Any) -> Tensor:
    inputs, _, states, *_ = _named(arguments)
    return inputs.qkv.new_empty(inputs.qkv.shape[0], 1, states.shape[1], states.shape[3])


_MOMENTS = len(FusedDecodeInputs._fields) + SecondMoment._fields.index("moments")  # position among the arguments
_MUTATED = "history", "moments"  # a and b of the schema
_step_op = operator(
    f"triton_preconditioned_step_({INPUTS}, {schema(SecondMoment, *_MUTATED)}, Tensor(c!) states, {OPTIONS}, "
    f"{schema(FactorKind)}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
