"""Operator and launch of one token of a selective state space; kernels/selective_step.py states the equations.

B rows, C channels, N states per channel, R rank of the step size
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import device_spec, overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

MAX_STATES = 64  # of a channel: a program holds those of 16 rows and 16 channels
_ROWS, _STATES, _RANKS = 16, 4096, 128  # of a tile; ranks of one of its products
# A layer of width 2048 with 64 rows on an H200, us, Mamba and Longhorn: 40.8 and 40.5 with this launch; 43.1 and 41.7
# with 4 warps; 43.9 and 48.0 with 4 warps and 2 programs of an SM.
_WARPS = 2
_STAGES, _SHARE = 3, 4  # tiles in flight; programs per SM, at most
_RESERVED = 65536  # bytes of shared memory of a program beside its tiles in flight
_WARPS_OF_FLOAT32 = 4  # with 2 the products of streams spill registers


class SelectiveCall(NamedTuple):
    """The operator's arguments: tensors as of `selective_step_kernel`. The rows of v, streams and gate may be apart.

    Args: A_log: None: the update is that of Longhorn.
    """

    v: Tensor
    streams: Tensor
    gate: Tensor
    to_step: Tensor
    bias: Tensor
    A_log: Tensor | None
    skip: Tensor
    states: Tensor


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.element.kernels.selective_step import SelectiveTraits, selective_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, o = SelectiveCall(*arguments), _fake(*arguments)
    (B, C), R = call.v.shape, call.to_step.shape[1]
    N = (call.streams.shape[1] - R) // 2
    tensors = step_tensors(call, ("v", "streams", "gate"), ("states",)) | {"o": o}
    overlap = overlaps(call.v)
    channels = max(16, _STATES // (_ROWS * power_of_two(N)))
    device, blocks = device_spec(device_of(call.v).index), cdiv(C, channels)
    steps = cdiv(cdiv(B, _ROWS), max(1, _SHARE * device.processors // blocks))
    tile_bytes = _ROWS * (4 * channels * power_of_two(N) + power_of_two(R) * call.v.element_size())
    stages = max(1, min(_STAGES if steps > 1 else 1, (device.shared_memory - _RESERVED) // tile_bytes))
    traits = SelectiveTraits(
        C=C, N=N, R=R, BN=power_of_two(N), BR=max(16, min(_RANKS, power_of_two(R))), ROWS=_ROWS, CHANNELS=channels,
        SPAN=steps * _ROWS, STAGES=stages, VALUES=tensors["v"].stride(0), STREAMS=tensors["streams"].stride(0),
        GATE=tensors["gate"].stride(0), LONGHORN=call.A_log is None, OVERLAP=overlap,
    )  # fmt: skip
    with torch.cuda.device_of(call.v):
        warps = _WARPS_OF_FLOAT32 if call.v.dtype == torch.float32 else _WARPS
        run = launcher(selective_step_kernel, tensors, {"traits": traits}, Options(warps, overlap=overlap))
        run(cdiv(B, steps * _ROWS) * blocks, {"B": B})
    finish(call, tensors, ("states",))
    return o


def _fake(*arguments: Any) -> Tensor:
    v: Tensor = arguments[0]
    return v.new_empty(v.shape)


selective_step = operator(
    f"triton_selective_step_({schema(SelectiveCall, 'states')}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
