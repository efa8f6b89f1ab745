"""Operator and launch of the products of few rows. Triton is imported when a kernel first runs.

M rows, D inputs, N outputs
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

# Most rows for `gemv_kernel`. With more rows it is bound by arithmetic: on an H100, 2400 to 2 x 5888 channels take 24,
# 29, 47 and 70 us with 1, 2, 4 and 8 rows. `few_rows_kernel` computes up to `MAX_DOT_ROWS` rows in 16 bits.
MAX_ROWS = 2
MAX_DOT_ROWS = 64
MAX_MAPS = 8
MAX_WIDTH = 16384
_VECTOR = 16  # bytes that a thread reads at once
LINE_BYTES = 128  # of the L2 cache
_WARP = 32
_TILE_BYTES = 24576
_MAX_STEPS = 16  # the kernel unrolls the loop over D


class GemvLaunch(NamedTuple):
    """Launch parameters of `gemv_kernel`.

    A captured step of gated-deltanet-1.3b with one row on an H200 takes 928 us with the defaults and weight tiles of 24
    KB; 944, 932, 919 and 940 us with tiles of 12, 16, 32 and 48 KB; 961 us with block=1024 and 2 warps; 991 us with
    tiles of 32 KB, block=4096 and 8 warps.

    Args: rows: outputs of a program. block: bytes of a weight row that a program loads at a time.
    """

    rows: int
    block: int = 2048
    warps: int = 4


class DotLaunch(NamedTuple):
    """Launch parameters of `few_rows_kernel`.

    32 rows on an H200, microseconds for 2400 to 10,818 outputs of four maps after a norm, and for 2400 to 2 x 5888
    gated ones: 27, 29 with the defaults; 55, 69 with rows=32, block=128, stages=4; 70, 57 with rows=16, block=256,
    stages=4.

    Args: rows: outputs of a program. block: inputs that it loads at a time. stages: blocks in flight. ahead: inputs
        that it prefetches.
    """

    rows: int = 64
    block: int = 64
    warps: int = 4
    stages: int = 5
    ahead: int = 512


class Around(NamedTuple):
    """The operations around a product.

    Args:
        norm_weight, eps: of the norm. activation: phi. gated: whether there is a gate.
        previous, mix, mixed: of a token shift, which needs a norm: the normed inputs before [M, D], shares [.., D], and
            for each map the row of its shares.
    """

    norm_weight: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    activation: str = ""
    gated: bool = False
    previous: Tensor | None = None
    mix: Tensor | None = None
    mixed: Sequence[int] = ()


def launch_of(x: Tensor, gated: bool) -> GemvLaunch | DotLaunch:
    """Return the launch for the rows x [M, D]: tiles of `_TILE_BYTES` of weights."""
    if x.shape[0] > MAX_ROWS and x.dtype != torch.float32:
        return DotLaunch()
    rows = _TILE_BYTES // (x.shape[1] * x.dtype.itemsize * (2 if gated else 1))
    return GemvLaunch(rows=1 << max(0, min(rows.bit_length() - 1, 3)))


def _gemv(x: Tensor, norm_weight: Tensor | None, eps: float, weights: Sequence[Tensor], *around: Any) -> Tensor:
    y = _fake(x, norm_weight, eps, weights, *around)
    with torch.cuda.device_of(x):
        surroundings = Around(norm_weight, eps, *around)
        launch_gemv(x, weights, surroundings, y, launch_of(x, surroundings.gated))
    return y


def launch_gemv(
    x: Tensor, weights: Sequence[Tensor], around: Around, y: Tensor, launch: GemvLaunch | DotLaunch
) -> None:
    """Write the products to y."""
    from deltazoo.backends.triton.gemv.kernels.few_rows import FewRowsTraits, few_rows_kernel
    from deltazoo.backends.triton.gemv.kernels.gemv import GemvTraits, Weights, gemv_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    (M, D), size = x.shape, x.dtype.itemsize
    if x.stride(1) != 1 or x.data_ptr() % _VECTOR:
        x = x.clone(memory_format=torch.contiguous_format)
    outputs = [weight.shape[0] // (2 if around.gated else 1) for weight in weights]
    device = device_spec(device_of(x).index)
    overlap, tiles = architecture(device) == "sm90", [cdiv(n, launch.rows) for n in outputs]
    norm_weight, residual = around.norm_weight, around.residual
    shared: dict[str, Any] = {
        "M": M, "D": D, "MAPS": len(outputs), "N": (*outputs,), "FIRST": (0, *itertools.accumulate(outputs)),
        "TILES": (0, *itertools.accumulate(tiles)), "ROWS": launch.rows, "X_STRIDE": x.stride(0),
        "NORM": norm_weight is not None, "EPS": around.eps, "ACTIVATION": around.activation, "GATED": around.gated,
        "RESIDUAL": residual is not None, "SHIFT": around.previous is not None,
        "MIX": (*around.mixed,) or (0,) * len(outputs), "OVERLAP": overlap,
    }  # fmt: skip
    tensors = {
        "x": x, "norm_weight": None if norm_weight is None else ready(norm_weight),
        "residual": None if residual is None else residual.contiguous(), "y": y,
        "previous": None if around.previous is None else ready(around.previous),
        "mix": None if around.mix is None else ready(around.mix),
        "weights": Weights(*(ready(weight) for weight in weights)),
    }  # fmt: skip
    if isinstance(launch, DotLaunch):
        ahead = min(launch.ahead, power_of_two(D)) * size // LINE_BYTES
        columns = max(16, power_of_two(M))
        buffer = (2 * launch.rows + 2 * columns) * launch.block * size  # with a gate and a token shift
        stages = max(1, min(launch.stages, device.shared_memory // buffer))
        dots = FewRowsTraits(COLUMNS=columns, BLOCK=launch.block, STAGES=stages, LINES=ahead, **shared)
        options = Options(launch.warps, launch.stages, overlap=overlap)
        launcher(few_rows_kernel, tensors, {"traits": dots}, options)(sum(tiles), {})
        return
    unit = _VECTOR // size
    block = min(launch.block // size, max(_WARP * unit, power_of_two(D)))
    block = max(block, power_of_two(cdiv(D, _MAX_STEPS)))
    traits = GemvTraits(BLOCK=block, UNIT=unit, STEPS=cdiv(D, block), **shared)
    early = int(x.is_cuda and torch.cuda.is_current_stream_capturing())
    options = Options(launch.warps, overlap=overlap)
    launcher(gemv_kernel, tensors, {"traits": traits}, options)(sum(tiles), {"early": early})


def _fake(x: Tensor, norm_weight: Tensor | None, eps: float, weights: Sequence[Tensor], *around: Any) -> Tensor:
    gated = Around(norm_weight, eps, *around).gated
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights) // (2 if gated else 1))


gemv = operator(
    "triton_gemv(Tensor x, Tensor? norm_weight, float eps, Tensor[] weights, Tensor? residual, str activation,"
    " bool gated, Tensor? previous, Tensor? mix, int[] mixed) -> Tensor",
    _gemv,
    compiled_ahead(_gemv, _fake),
    any_layout=True,
)
