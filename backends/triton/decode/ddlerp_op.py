"""Operator and launches of the data-dependent token shift of one token per row; kernels/ddlerp.py states the equations.

B rows, D width, P inputs, R rank
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.operands import ready, schema
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.early import loads_early
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

MAX_RANK = 256  # a program holds the weights of all ranks
_LEAST = 16  # a dimension of an operand of tensor cores
# Of ddlerp_down_kernel: outputs of a program, inputs that it reads at a time, in 16 and 32 bits, most splits of D.
# A layer of RWKV-6 with 64 rows on an H200 takes 52.5 us with this launch, and 54.3 with 32 outputs, 128 inputs and 16.
_OUTPUTS, _INPUTS, _INPUTS_OF_FLOAT32, _SPLITS, _DOWN_WARPS = 16, 256, 64, 8, 4
# Of ddlerp_kernel: rows of a program, most weights that it reads, and most channels.
_ROWS, _WEIGHTS, _CHANNELS, _WARPS = 16, 8192, 256, 4


class DDLerpCall(NamedTuple):
    """The operator's arguments: tensors as of the kernels, whose names they have."""

    x: Tensor
    previous: Tensor
    mix_x: Tensor
    mix: Tensor
    down: Tensor
    up: Tensor


def ddlerp(call: DDLerpCall) -> Tensor:
    """Compute the shifted inputs of one token per row. Returns: [B, P, D]."""
    shifted: Tensor = _ddlerp_op(*call)
    return shifted


def _ddlerp(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.decode.kernels.ddlerp import DDLerpTraits, ddlerp_down_kernel, ddlerp_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, shifted = DDLerpCall(*arguments), _fake(*arguments)
    (B, D), (P, R, _) = call.x.shape, call.up.shape
    most = _INPUTS_OF_FLOAT32 if call.down.dtype == torch.float32 else _INPUTS
    block = max(_LEAST, min(most, power_of_two(D)))
    span = cdiv(cdiv(D, _SPLITS), block) * block
    splits, ranks = cdiv(D, span), max(_LEAST, power_of_two(R))
    channels = max(_LEAST, min(_CHANNELS, _WEIGHTS // ranks, power_of_two(D)))
    overlap = overlaps(call.x)
    traits = DDLerpTraits(
        D=D, P=P, R=R, BR=ranks, COLUMNS=max(_LEAST, power_of_two(B)), OUTPUTS=_OUTPUTS, SPAN=span, BLOCK=block,
        SPLITS=splits, ROWS=_ROWS, CHANNELS=channels, OVERLAP=overlap,
    )  # fmt: skip
    sums = call.x.new_empty(splits, B, P * R, dtype=torch.float32)
    tensors = {name: ready(x) for name, x in call._asdict().items()} | {"sums": sums, "shifted": shifted}
    numbers = {"B": B, "early": loads_early(call.mix_x, call.mix, call.down, call.up)}
    with torch.cuda.device_of(call.x):
        down = launcher(ddlerp_down_kernel, tensors, {"traits": traits}, Options(_DOWN_WARPS, overlap=overlap))
        down(cdiv(P * R, _OUTPUTS) * splits, numbers)
        shift = launcher(ddlerp_kernel, tensors, {"traits": traits}, Options(_WARPS, overlap=overlap))
        shift(P * cdiv(D, channels) * cdiv(B, _ROWS), numbers)
    return shifted


def _fake(*arguments: Any) -> Tensor:
    call = DDLerpCall(*arguments)
    return call.x.new_empty(call.x.shape[0], call.up.shape[0], call.x.shape[1])


_ddlerp_op = operator(
    f"triton_ddlerp({schema(DDLerpCall)}) -> Tensor", _ddlerp, compiled_ahead(_ddlerp, _fake), any_layout=True
)
