"""Operator and launch of drafted tokens of a fused decode step: their operands, the update, the output norm and gate.

B batch, T tokens, C channels of the projection, H key heads, HV value heads, K key width, V value width, n householders
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.io.errors import OperandError
from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.decode import fused
from deltazoo.backends.triton.decode.fused import INPUTS, OPTIONS, ROW_STRIDED, StepOptions, StepTiling, step_traits
from deltazoo.backends.triton.decode.operands import StepKind, StepOperands, resolve_decode
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.update.base import Draft, UpdateInputs

_OPERAND_WARPS, _FINISH_WARPS = 4, 4


def unsupported(step: FusedDecodeStep) -> list[str]:
    """Return why the kernels do not support drafted tokens of a step."""
    return fused.unsupported(step)


def fused_verify(step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor) -> tuple[Tensor, Draft]:
    """Run the kernels. Returns: o [B, T, HV, V], and the draft for `commit_`.

    Raises: OperandError: there is a skip.
    """
    if inputs.skip is not None:
        raise OperandError("skip must be None for drafted tokens: the kernels do not add it")
    o, values, *computed = _verify_op(*inputs, states, step.spec.householders, *StepOptions.of(step))
    fixed = {} if inputs.log_decay is None else {"log_decay": inputs.log_decay}
    names = [name for name in step.spec.operands(1, 1, step.H, step.HV, step.K, step.V) if name not in fixed]
    return o, Draft(UpdateInputs(**dict(zip(names, computed, strict=True)), **fixed), values)


def _empty(x: FusedDecodeInputs, states: Tensor, n: int, options: StepOptions) -> dict[str, Tensor]:
    """Allocate o, the written values, and the operands in the order of `UpdateSpec.operands`."""
    (B, T, _), (HV, K, V), H = x.qkv.shape, states.shape[1:], options.heads
    m = (n,) if n > 1 else ()
    wide: dict[str, tuple[int, ...]] = {}
    if x.decay is not None:
        wide["log_decay"] = (B, T, HV, K) if fused.has_channel_decay(x, HV) else (B, T, HV)
    if x.feedback is not None or (x.write is not None and options.delta):
        wide["erase"] = (B, T, *m, HV) if x.write is None else (B, T, *m, HV, K)
    if x.beta is not None or x.write is not None:
        wide["write"] = (B, T, *m, HV) if x.write is None else (B, T, *m, HV, V)
    narrow = {"q": (B, T, H, K), "k": (B, T, *m, H, K), "v": (B, T, *m, HV, V)}
    return {
        "o": x.qkv.new_empty(B, T, HV, V),
        "values": x.qkv.new_empty(B, T, n, HV, V, dtype=torch.float32),
        **{name: x.qkv.new_empty(shape) for name, shape in narrow.items()},
        **{name: x.qkv.new_empty(shape, dtype=torch.float32) for name, shape in wide.items()},
    }


def _impl(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.decode.kernels.drafted import drafted_operands_kernel
    from deltazoo.backends.triton.decode.kernels.fused_step import finish_step_kernel
    from deltazoo.backends.triton.decode.launch import verify
    from deltazoo.backends.triton.runtime.launcher import launcher

    inputs, states, n, options = _named(arguments)
    (B, T, _), (HV, K, V) = inputs.qkv.shape, states.shape[1:]
    by_token = {name: _by_token(x) for name in ROW_STRIDED if (x := getattr(inputs, name)) is not None}
    others = {name: x.contiguous() for name, x in inputs._asdict().items() if x is not None and name not in by_token}
    x = FusedDecodeInputs(**by_token, **others)
    result = _empty(inputs, states, n, options)
    overlap = overlaps(x.qkv)
    traits = step_traits(x, (options.heads, HV, K, V), options, StepTiling(0, 1, overlap), False)
    outputs = {f"{name}_out": result.get(name) for name in ("log_decay", "erase", "write")}
    tensors = result | x._asdict() | outputs | {"x": x.qkv}
    operands = StepOperands(
        result["q"], result["k"], result["v"], result.get("log_decay", x.log_decay), result.get("erase"),
        result.get("write"), e=None, a=None, b=None,
    )  # fmt: skip
    kind = StepKind(
        steps=n, delta=options.delta, reparam=options.reparam, erase_from=options.erase_from, read=options.read,
        split_terms=False, erase_factor=options.erase_factor, write_factor=options.write_factor,
        scale=options.scale, config="",
    )  # fmt: skip
    finishes = options.norm != "" or options.activation != ""
    launch, dtype = resolve_decode(operands, kind), torch.float32 if finishes else None
    with torch.cuda.device_of(x.qkv):
        run = launcher(drafted_operands_kernel, tensors, {"traits": traits}, Options(_OPERAND_WARPS, overlap=overlap))
        run(B * T * HV, {"tokens": T})
        raw, result["values"] = verify(operands, kind, states.contiguous(), None, launch, dtype)
        if finishes:
            tensors |= {"raw": raw, "slots": None}
            finish = Options(_FINISH_WARPS, overlap=overlap)
            run = launcher(finish_step_kernel, tensors, {"traits": traits}, finish)
            run(B * T * HV, {"pool_rows": B * T})
        else:
            result["o"] = raw
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
