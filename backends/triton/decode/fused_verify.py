"""Operator and launch of drafted tokens of a fused decode step: their operands, the update, the output norm and gate.

B batch, T tokens, C channels of the projection, H key heads, HV value heads, K key width, V value width, n householders
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.decode import fused
from deltazoo.backends.triton.decode.fused import INPUTS, OPTIONS, StepOptions, StepTiling, step_traits
from deltazoo.backends.triton.operands import StepKind, StepOperands
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.update.base import Draft, UpdateInputs

_OPERAND_WARPS, _FINISH_WARPS = 4, 4
_ROW_STRIDED = ("qkv", "beta", "decay", "gate", "erase", "write")  # slices of one projection: their rows may be apart


def unsupported(step: FusedDecodeStep) -> list[str]:
    """Return why the kernels do not support drafted tokens of a step."""
    return fused.unsupported(step)


def fused_verify(step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor) -> tuple[Tensor, Draft]:
    """Run the kernels. Returns: o [B, T, HV, V], and the draft for `commit_`."""
    B, T = inputs.qkv.shape[:2]
    o, q, k, v, values, *strengths = _verify_op(*inputs, states, step.spec.householders, *StepOptions.of(step))
    shapes = step.spec.operands(B, T, step.H, step.HV, step.K, step.V)
    names = [name for name in shapes if name != "log_decay" or inputs.log_decay is None]
    operands = {name: x.view(shapes[name]) for name, x in zip(names, (q, k, v, *strengths), strict=True)}
    if inputs.log_decay is not None:
        operands["log_decay"] = inputs.log_decay
    return o, Draft(UpdateInputs(**operands), values)


def _empty(x: FusedDecodeInputs, states: Tensor, n: int, options: StepOptions) -> dict[str, Tensor]:
    """Allocate o; the operands in the order of `UpdateSpec.operands`, after v the written values."""
    (B, T, _), (HV, K, V), H = x.qkv.shape, states.shape[1:], options.heads
    narrow = {"o": (B, T, HV, V), "q": (B, T, H, K), "k": (B, T, n, H, K), "v": (B, T, n, HV, V)}
    wide: dict[str, tuple[int, ...]] = {"values": (B, T, n, HV, V)}
    if x.decay is not None:
        wide["out_decay"] = (B, T, HV, K) if fused.has_channel_decay(x, HV) else (B, T, HV)
    if x.beta is not None:
        wide |= ({} if x.feedback is None else {"out_erase": (B, T, n, HV)}) | {"out_write": (B, T, n, HV)}
    if x.write is not None:
        wide |= ({"out_erase": (B, T, n, HV, K)} if options.delta else {}) | {"out_write": (B, T, n, HV, V)}
    tensors = {name: x.qkv.new_empty(shape) for name, shape in narrow.items()}
    return tensors | {name: x.qkv.new_empty(shape, dtype=torch.float32) for name, shape in wide.items()}


def _impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.chunk.resolve import resolve_decode
    from deltazoo.backends.triton.decode.kernels.drafted import drafted_operands_kernel
    from deltazoo.backends.triton.decode.kernels.fused_step import finish_step_kernel
    from deltazoo.backends.triton.decode.launch import verify
    from deltazoo.backends.triton.runtime.launcher import launcher

    inputs, states, n, options = _named(arguments)
    (B, T, _), (HV, K, V) = inputs.qkv.shape, states.shape[1:]
    x = FusedDecodeInputs(**{
        name: t if t is None else _by_token(t) if name in _ROW_STRIDED else t.contiguous()
        for name, t in inputs._asdict().items()
    })  # fmt: skip
    result = _empty(inputs, states, n, options)
    overlap = architecture(device_spec(device_of(x.qkv).index)) == "sm90"
    traits = step_traits(x, (options.heads, HV, K, V), options, StepTiling(0, True, overlap), False)
    tensors = dict.fromkeys(("out_decay", "out_erase", "out_write")) | result | x._asdict() | {"x": x.qkv}
    with torch.cuda.device_of(x.qkv):
        run = launcher(drafted_operands_kernel, tensors, {"traits": traits}, Options(_OPERAND_WARPS, overlap=overlap))
        run(B * T * HV, {"tokens": T})
        kind = StepKind(
            steps=n, delta=options.delta, reparam=options.reparam, erase_from=options.erase_from, read=options.read,
            split_terms=False, erase_factor=options.erase_factor, write_factor=options.write_factor,
            scale=options.scale, config="",
        )  # fmt: skip
        decay = x.log_decay if x.decay is None else result["out_decay"]
        one_key = {name: result[name].squeeze(2) if n == 1 else result[name] for name in ("k", "v")}
        strengths = {name: result.get(f"out_{name}") for name in ("erase", "write")}
        strengths = {name: y.squeeze(2) if y is not None and n == 1 else y for name, y in strengths.items()}
        operands = StepOperands(result["q"], **one_key, log_decay=decay, **strengths, e=None, a=None, b=None)
        finishes = options.norm != "" or options.activation != ""
        raw, result["values"] = verify(
            operands, kind, states.contiguous(), None, resolve_decode(operands, kind),
            torch.float32 if finishes else None,
        )  # fmt: skip
        if not finishes:
            result["o"] = raw
        else:
            tensors |= {"raw": raw, "slots": None}
            traits = traits._replace(W=0, SKIP=False)
            run = launcher(finish_step_kernel, tensors, {"traits": traits}, Options(_FINISH_WARPS, overlap=overlap))
            run(B * T * HV, {"pool_rows": B * T})
    return list(result.values())


def _by_token(x: Tensor) -> Tensor:
    """Return [B, T, C] as [B T, 1, C] with adjacent channels."""
    rows = x.flatten(0, 1)[:, None]
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _named(arguments: tuple[Any, ...]) -> tuple[FusedDecodeInputs, Tensor, int, StepOptions]:
    fields = len(FusedDecodeInputs._fields)
    inputs, (states, n, *options) = arguments[:fields], arguments[fields:]
    return FusedDecodeInputs(*inputs), states, n, StepOptions(*options)


def _fake(*arguments: Any) -> list[Tensor]:
    return list(_empty(*_named(arguments)).values())


_verify_op = operator(
    f"triton_fused_verify({INPUTS.replace('Tensor(a!)?', 'Tensor?')}, Tensor states, int householders, {OPTIONS}) "
    "-> Tensor[]",
    _impl,
    compiled_ahead(_impl, _fake),
)
