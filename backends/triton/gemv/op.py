"""Operator and launch of the products of few rows. Triton is imported when a kernel first runs.

M rows, D inputs, N outputs
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

# Rows of `gemv_kernel` and `stream_kernel`. With more rows the former is bound by arithmetic: on an H100, 2400 to
# 2 x 5888 channels take 24, 29, 47 and 70 us with 1, 2, 4 and 8 rows. `stream_rows_kernel` takes more rows.
MAX_ROWS = 2
MAX_STREAMED_ROWS = 64
STREAMS_ONE_ROW = False
MAX_MAPS = 8
MAX_WIDTH = 16384
_VECTOR = 16  # bytes that a thread reads at once
_WARP = 32
_TILE_BYTES = 24576
STREAM_BLOCK = 512  # inputs of a stage of `stream_kernel`, which reads 16 rows of the weights
_STAGE_BYTES = 16 * 2 * STREAM_BLOCK
ROWS_BLOCK = 64  # inputs of a stage of `stream_rows_kernel`, which reads 128 rows of the weights
_STREAM_WARPS = 8
_RESERVED = 768  # bytes of shared memory beside the ring and the inputs, with those that the driver reserves
_MAX_STEPS = 16  # the kernel unrolls the loop over D


class GemvLaunch(NamedTuple):
    """outputs of a program, bytes of a row of the weights that it reads at a time, warps."""

    rows: int
    block: int = 2048
    warps: int = 4


class StreamLaunch(NamedTuple):
    """most stages of the ring, 16 KB each, of which two programs must fit the shared memory of an SM."""

    stages: int = 6


class StreamRowsLaunch(NamedTuple):
    """most stages of the two rings, and programs that must fit the shared memory of an SM."""

    stages: int = 5
    share: int = 2


class Around(NamedTuple):
    """What surrounds a product.

    Args:
        norm_weight, eps: of the norm. activation: phi. gated: whether there is a gate.
        previous, mix, mixed: of a token shift, which needs a norm: the normed inputs before [M, D], shares [.., D], and
            for each map the row of its shares; or without them, of x [.., M, D], the matrix that each map reads.
    """

    norm_weight: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    activation: str = ""
    gated: bool = False
    previous: Tensor | None = None
    mix: Tensor | None = None
    mixed: Sequence[int] = ()


Launch = GemvLaunch | StreamLaunch | StreamRowsLaunch


def streams(x: Tensor) -> bool:
    """Whether the Hopper kernels take rows of x [..., D]: 16 bits, and rows of a multiple of 16 bytes, on sm_90."""
    is_hopper = architecture(device_spec(device_of(x).index)) == "sm90"
    return is_hopper and x.dtype.itemsize == 2 and is_known(x.shape[-1] * 2 % _VECTOR == 0)


def launch_of(x: Tensor, gated: bool) -> Launch:
    """Return the launch for the rows x [..., D]."""
    if streams(x):
        if x.shape[-2] > MAX_ROWS:
            return StreamRowsLaunch()
        if STREAMS_ONE_ROW and _stages(x, device_spec(device_of(x).index)) > 2:
            return StreamLaunch()
    rows = _TILE_BYTES // (x.shape[-1] * x.dtype.itemsize * (2 if gated else 1))
    return GemvLaunch(rows=1 << max(0, min(rows.bit_length() - 1, 3)))


def _stages(x: Tensor, device: DeviceSpec) -> int:
    """Return the stages of a ring that leaves half of the shared memory of an SM to another program."""
    inputs = x.shape[0] * cdiv(x.shape[1], STREAM_BLOCK) * STREAM_BLOCK * 4
    return (device.shared_memory // 2 - inputs - _RESERVED) // _STAGE_BYTES


@functools.lru_cache(maxsize=1024)
def programs_of(outputs: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the programs of each map: at least one, and the longest has as few outputs as possible."""
    counts = [1] * len(outputs)
    for _ in range(min(most, sum(outputs)) - len(outputs)):
        longest = max(range(len(outputs)), key=lambda i: outputs[i] / counts[i])
        counts[longest] += 1
    return tuple(counts)


def _gemv(x: Tensor, norm_weight: Tensor | None, eps: float, weights: Sequence[Tensor], *around: Any) -> Tensor:
    y = _fake(x, norm_weight, eps, weights, *around)
    with torch.cuda.device_of(x):
        surroundings = Around(norm_weight, eps, *around)
        launch_gemv(x, weights, surroundings, y, launch_of(x, surroundings.gated))
    return y


def launch_gemv(x: Tensor, weights: Sequence[Tensor], around: Around, y: Tensor, launch: Launch) -> None:
    """Write the products to y."""
    from deltazoo.backends.triton.gemv.kernels.gemv import GemvTraits, Weights, gemv_kernel
    from deltazoo.backends.triton.gemv.kernels.stream import StreamTraits, stream_kernel
    from deltazoo.backends.triton.gemv.kernels.stream_rows import StreamRowsTraits, stream_rows_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    (M, D), size = x.shape[-2:], x.dtype.itemsize
    is_aligned = x.data_ptr() % _VECTOR == 0
    if isinstance(launch, StreamRowsLaunch):
        is_aligned = is_aligned and x.stride(-2) * size % _VECTOR == 0
    if x.stride(-1) != 1 or not is_aligned:
        x = x.clone(memory_format=torch.contiguous_format)
    outputs = [weight.shape[0] // (2 if around.gated else 1) for weight in weights]
    device = device_spec(device_of(x).index)
    overlap = architecture(device) == "sm90"
    norm_weight, residual = around.norm_weight, around.residual
    maps = len(outputs)
    kernel: Any
    traits: Any
    shared: dict[str, Any] = {
        "M": M, "D": D, "MAPS": maps, "N": (*outputs,), "FIRST": (0, *itertools.accumulate(outputs)),
        "X_STRIDE": x.stride(-2), "NORM": norm_weight is not None, "EPS": around.eps, "ACTIVATION": around.activation,
        "GATED": around.gated, "RESIDUAL": residual is not None, "SHIFT": around.previous is not None,
    }  # fmt: skip
    tensors = {
        "x": x, "norm_weight": None if norm_weight is None else ready(norm_weight),
        "residual": None if residual is None else residual.contiguous(), "y": y,
        "previous": None if around.previous is None else ready(around.previous),
        "mix": None if around.mix is None else ready(around.mix),
        "weights": Weights(*(ready(weight) for weight in weights)),
    }  # fmt: skip
    early = {"early": int(x.is_cuda and torch.cuda.is_current_stream_capturing())}
    if isinstance(launch, StreamLaunch | StreamRowsLaunch):
        counts = programs_of((*outputs,), device.processors)
        shared["PROGRAMS"] = (0, *itertools.accumulate(counts))
        rows = max(cdiv(n, count) for n, count in zip(outputs, counts, strict=True))
        numbers = (*around.mixed,) or (0,) * maps
        if isinstance(launch, StreamLaunch):
            blocks = cdiv(D, STREAM_BLOCK)
            tiles = cdiv(rows, 8 if around.gated else 16)
            stages = min(launch.stages, _stages(x, device), 1 + tiles * blocks)
            traits = StreamTraits(BLOCKS=blocks, STAGES=stages, INPUT=numbers, **shared)
            kernel = stream_kernel
        else:
            columns = max(16, power_of_two(M))
            room = device.shared_memory // launch.share - _RESERVED - 128 * columns * size
            stages = min(launch.stages, room // ((128 + columns) * ROWS_BLOCK * size))
            given = {name: value for name, value in shared.items() if name not in ("NORM", "EPS", "SHIFT")}
            traits = StreamRowsTraits(
                COLUMNS=columns, BLOCKS=cdiv(D, ROWS_BLOCK), STAGES=stages, INPUT=numbers, **given
            )
            kernel = stream_rows_kernel
        run = launcher(kernel, tensors, {"traits": traits}, Options(_STREAM_WARPS, overlap=True))
        run(sum(counts), early)
        return
    ends = (0, *itertools.accumulate(cdiv(n, launch.rows) for n in outputs))
    shared |= {"TILES": ends, "ROWS": launch.rows, "MIX": (*around.mixed,) or (0,) * maps, "OVERLAP": overlap}
    unit = _VECTOR // size
    block = min(launch.block // size, max(_WARP * unit, power_of_two(D)))
    block = max(block, power_of_two(cdiv(D, _MAX_STEPS)))
    traits = GemvTraits(BLOCK=block, UNIT=unit, STEPS=cdiv(D, block), **shared)
    launcher(gemv_kernel, tensors, {"traits": traits}, Options(launch.warps, overlap=overlap))(ends[-1], early)


def _fake(x: Tensor, norm_weight: Tensor | None, eps: float, weights: Sequence[Tensor], *around: Any) -> Tensor:
    gated = Around(norm_weight, eps, *around).gated
    return x.new_empty(x.shape[-2], sum(weight.shape[0] for weight in weights) // (2 if gated else 1))


gemv = operator(
    "triton_gemv(Tensor x, Tensor? norm_weight, float eps, Tensor[] weights, Tensor? residual, str activation,"
    " bool gated, Tensor? previous, Tensor? mix, int[] mixed) -> Tensor",
    _gemv,
    compiled_ahead(_gemv, _fake),
    any_layout=True,
)
