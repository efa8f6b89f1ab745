"""Operator and launch of the products of few rows. Triton is imported when a kernel first runs.

M rows, D inputs, N outputs
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.problem import architecture, device_spec
from deltazoo.backends.triton.runtime.early import loads_early
from deltazoo.backends.triton.runtime.precompile import compiled_ahead, device_of
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

# Most rows in float32, which `gemv_kernel` computes. With more rows it is bound by arithmetic: on an H100, 2400 to
# 2 x 5888 channels in 16 bits take 24, 29, 47 and 70 us with 1, 2, 4 and 8 rows.
MAX_ROWS = 2
# Rows in 16 bits that `few_rows_sm90_kernel` and `few_rows_kernel` compute. Captured steps of gated-deltanet-1.3b, kda
# and rwkv7 with two rows on an H200 take 952, 1104 and 1090 us, and 1246, 1186 and 1376 by `gemv_kernel`.
MIN_DOT_ROWS = 2
MAX_DOT_ROWS = 64
MAX_MAPS = 8
MAX_WIDTH = 16384
_VECTOR = 16  # bytes that a thread reads at once
_WARP = 32
_TILE_BYTES, _LONG_ROWS = 24576, range(6145, 8193)
_MAX_STEPS = 16  # the kernel unrolls the loop over D
_RESERVED = 2048  # bytes of shared memory of a program beside its blocks
_LEAST_SPAN = 512  # inputs of a program: the sums of splits are written and read again
_FINISHED = 512  # outputs of a program of `finish_rows_kernel`


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
    """Launch parameters of `few_rows_sm90_kernel` and `few_rows_kernel`.

    A captured step with 32 rows on an H200, microseconds for gated-deltanet-1.3b, kda, rwkv7 and mamba2: 2000, 1630,
    1480 and 3080 with programs that always shared an SM; 2113, 1778, 1613 and 3256 by `few_rows_kernel` instead; 2073,
    1657, 1503 and 3170 with share=3 and twice as many splits; 2122 for the first model with 128 rows of 64 inputs and 8
    warps. A form that loaded x through registers and applied the norm there took 2255, 2017, 1699 and 3496. In a later
    run with the defaults: 1980, 1557, 1374 and 3028.

    Args:
        rows: rows of the weights of a program. block: inputs that it loads at a time. stages: most blocks in flight;
            with 5 a kernel of little shared memory fits an SM beside a program.
        share: programs that must fit the shared memory of an SM, unless each has an SM of its own.
    """

    rows: int = 64
    block: int = 128
    warps: int = 4
    stages: int = 5
    share: int = 2


class Convolution(NamedTuple):
    """The short convolution of the token that the first map computes, C channels with W taps, and its SiLU.

    Args: history: [M, W - 1, C], contiguous; the token is appended in place. weight, bias: [C, W] and [C].
    """

    history: Tensor
    weight: Tensor
    bias: Tensor | None
    silu: bool


class Around(NamedTuple):
    """The operations around a product.

    Args:
        norm_weight, eps: of the norm. activation: phi. gated: whether there is a gate.
        previous, mix: of a token shift: the inputs before [M, D], normed if x is, and shares [.., D].
        places: for each map the row of its shares, or without a token shift the first of the columns of x that it
            reads; empty: 0.
        biases, biased: the biases [N] of some maps, and the numbers of these maps; without a gate.
        convolution: of the first map; None: none. Without activation, gate and residual.
    """

    norm_weight: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    activation: str = ""
    gated: bool = False
    previous: Tensor | None = None
    mix: Tensor | None = None
    places: Sequence[int] = ()
    biases: Sequence[Tensor] = ()
    biased: Sequence[int] = ()
    convolution: Convolution | None = None


def launch_of(M: int, weight: Tensor, gated: bool) -> GemvLaunch | DotLaunch:
    """Return the launch for M rows and a weight [N, D]: tiles of `_TILE_BYTES` of weights.

    Rows of 6 to 8 KB have four in a tile: the 2048 outputs of 4096 inputs of mamba2 are then in flight at once, where
    1024 programs of two take two rounds. With tiles of 32 KB for all widths a captured step of mamba2 with one row on
    an H200 takes 1041 us in place of 1104, of gated-deltanet-1.3b 892 in place of 898, and of kda and rwkv7 7 us more.
    """
    if M >= MIN_DOT_ROWS and weight.dtype != torch.float32:
        return DotLaunch()
    row_bytes = weight.shape[1] * weight.dtype.itemsize
    if not gated and row_bytes in _LONG_ROWS:
        return GemvLaunch(rows=4)
    rows = _TILE_BYTES // (row_bytes * (2 if gated else 1))
    return GemvLaunch(rows=1 << max(0, min(rows.bit_length() - 1, 3)))


def _gemv(x: Tensor, norm_weight: Tensor | None, eps: float, weights: Sequence[Tensor], *around: Any) -> Tensor:
    y = _fake(x, norm_weight, eps, weights, *around)
    with torch.cuda.device_of(x):
        surroundings = Around(norm_weight, eps, *around)
        launch_gemv(x, weights, surroundings, y, launch_of(x.shape[0], weights[0], surroundings.gated))
    return y


def _convolved(
    x: Tensor, norm_weight: Tensor | None, eps: float, weights: Sequence[Tensor], biases: Sequence[Tensor],
    biased: Sequence[int], history: Tensor, *convolution: Any,
) -> Tensor:  # fmt: skip
    y, pool = _fake(x, norm_weight, eps, weights), history.contiguous()
    with torch.cuda.device_of(x):
        around = Around(
            norm_weight, eps, biases=biases, biased=biased, convolution=Convolution(pool, *convolution)
        )  # fmt: skip
        launch_gemv(x, weights, around, y, launch_of(x.shape[0], weights[0], gated=False))
    mark_written(history, pool)
    return y


def launch_gemv(
    x: Tensor, weights: Sequence[Tensor], around: Around, y: Tensor, launch: GemvLaunch | DotLaunch
) -> None:
    """Write the products to y."""
    from deltazoo.backends.triton.gemv.kernels.gemv import Weights

    D = weights[0].shape[1]
    biases: dict[int, Tensor] = {i: ready(bias) for i, bias in zip(around.biased, around.biases, strict=True)}
    if x.stride(1) != 1 or x.data_ptr() % _VECTOR:
        x = x.clone(memory_format=torch.contiguous_format)
    outputs = [weight.shape[0] // (2 if around.gated else 1) for weight in weights]
    device = device_spec(device_of(x).index)
    shared: dict[str, Any] = {
        "D": D, "MAPS": len(outputs), "N": (*outputs,), "FIRST": (0, *itertools.accumulate(outputs)),
        "ACTIVATION": around.activation, "GATED": around.gated, "OVERLAP": architecture(device) == "sm90",
        "BIASES": (*(i in biases for i in range(len(outputs))),), "BIASED": bool(biases),
    }  # fmt: skip
    tensors = {
        "x": x, "norm_weight": None if around.norm_weight is None else ready(around.norm_weight),
        "residual": None if around.residual is None else around.residual.contiguous(), "y": y,
        "previous": None if around.previous is None else ready(around.previous),
        "mix": None if around.mix is None else ready(around.mix),
        "weights": Weights(*(ready(weight) for weight in weights)), "history": None, "taps": None, "tap_bias": None,
        "biases": Weights(*(biases.get(i) for i in range(MAX_MAPS))) if biases else None,
    }  # fmt: skip
    shared |= {"TAPS": 0, "TAP_BIAS": False, "TAP_SILU": False}
    if around.convolution is not None:
        history, taps, bias, silu = around.convolution
        tensors |= {"history": history, "taps": ready(taps), "tap_bias": None if bias is None else ready(bias)}
        shared |= {"TAPS": taps.shape[1], "TAP_BIAS": bias is not None, "TAP_SILU": silu}
    if isinstance(launch, DotLaunch):
        _launch_dots(tensors, around, shared, device, launch, loads_early(*weights))
    else:
        _launch_gemv(tensors, around, shared, launch, loads_early(*weights))


def _launch_gemv(
    tensors: dict[str, Any], around: Around, shared: dict[str, Any], launch: GemvLaunch, early: int
) -> None:
    from deltazoo.backends.triton.gemv.kernels.gemv import GemvTraits, gemv_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    x, D, overlap = tensors["x"], shared["D"], shared["OVERLAP"]
    unit = _VECTOR // x.dtype.itemsize
    block = min(launch.block // x.dtype.itemsize, max(_WARP * unit, power_of_two(D)))
    block = max(block, power_of_two(cdiv(D, _MAX_STEPS)))
    tiles = (0, *itertools.accumulate(cdiv(n, launch.rows) for n in shared["N"]))
    traits = GemvTraits(
        M=x.shape[0], TILES=tiles, ROWS=launch.rows, BLOCK=block, UNIT=unit, STEPS=cdiv(D, block),
        X_STRIDE=x.stride(0), NORM=around.norm_weight is not None, EPS=around.eps, RESIDUAL=around.residual is not None,
        SHIFT=around.previous is not None, PLACE=(*around.places,) or (0,) * shared["MAPS"], **shared,
    )  # fmt: skip
    run = launcher(gemv_kernel, tensors, {"traits": traits}, Options(launch.warps, overlap=overlap))
    run(tiles[-1], {"early": early})


def _launch_dots(
    tensors: dict[str, Any], around: Around, shared: dict[str, Any], device: DeviceSpec, launch: DotLaunch, early: int
) -> None:
    from deltazoo.backends.triton.gemv.kernels.few_rows import (
        FewRowsTraits,
        RowsTraits,
        few_rows_kernel,
        finish_rows_kernel,
        normalize_rows_kernel,
    )
    from deltazoo.backends.triton.gemv.kernels.few_rows_sm90 import few_rows_sm90_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    x, y, D, overlap = tensors["x"], tensors["y"], shared["D"], shared["OVERLAP"]
    M = x.shape[0]
    places = (*around.places,) or (0,) * shared["MAPS"]
    if around.norm_weight is not None or around.mix is not None:
        inputs = 0 if around.mix is None else around.mix.shape[0]
        traits = RowsTraits(
            D, power_of_two(D), overlap, STRIDE=x.stride(0), NORM=around.norm_weight is not None, EPS=around.eps,
            INPUTS=inputs,
        )  # fmt: skip
        tensors["normed"] = x.new_empty(M, max(1, inputs) * D)
        warps = max(4, min(16, traits.BLOCK // 1024))
        run = launcher(normalize_rows_kernel, tensors, {"traits": traits}, Options(warps, overlap=overlap))
        run(M * max(1, inputs), {})
        x = tensors["x"] = tensors["normed"]
        places = tuple(D * place for place in places)
    outputs = launch.rows // (2 if around.gated else 1)
    tiles = (0, *itertools.accumulate(cdiv(n, outputs) for n in shared["N"]))
    columns, size = max(16, power_of_two(M)), x.dtype.itemsize
    span = span_of(tiles[-1], D, device.processors, launch.block, alone=columns > 16)
    splits = cdiv(D, span)
    share = launch.share if tiles[-1] * splits > device.processors else 1
    available = device.shared_memory // share - _RESERVED
    fitting = available // ((launch.rows + columns) * launch.block * size)
    stages = max(2, min(launch.stages, cdiv(span, launch.block), fitting))
    dots = FewRowsTraits(
        TILES=tiles, ROWS=launch.rows, COLUMNS=columns, BLOCK=launch.block, STAGES=stages, SPLITS=splits, SPAN=span,
        X_STRIDE=x.stride(-2), PLACE=places, UNIT=math.gcd(_VECTOR, *(size * place for place in places)),
        RESIDUAL=around.residual is not None and splits == 1, **shared,
    )  # fmt: skip
    if splits > 1:
        width = sum(weight.shape[0] for weight in tensors["weights"] if weight is not None)
        tensors["y"] = tensors["sums"] = y.new_empty(splits, M, width, dtype=torch.float32)
    options = Options(launch.warps, launch.stages, overlap=overlap)
    vectors = all(n * size % _VECTOR == 0 for n in (D, x.stride(-2), *places))
    kernel = few_rows_sm90_kernel if overlap and vectors else few_rows_kernel
    launcher(kernel, tensors, {"traits": dots}, options)(tiles[-1] * splits, {"M": M, "early": early})
    if splits > 1:
        tensors["y"] = y
        total = shared["FIRST"][-1]
        block = min(_FINISHED, power_of_two(total))
        of_bias = ("MAPS", "FIRST", "BIASES", "BIASED")
        traits = RowsTraits(
            total, block, overlap, SPLITS=splits, ACTIVATION=around.activation, GATED=around.gated,
            RESIDUAL=around.residual is not None, CHANNELS=shared["N"][0],
            **{name: shared[name] for name in ("TAPS", "TAP_BIAS", "TAP_SILU", *(of_bias if shared["BIASED"] else ()))},
        )  # fmt: skip
        run = launcher(finish_rows_kernel, tensors, {"traits": traits}, Options(4, overlap=overlap))
        run(M * cdiv(total, block), {"M": M})


def span_of(tiles: int, D: int, processors: int, block: int, alone: bool) -> int:
    """Return the inputs of a program, a multiple of the block: all, or fewer if the tiles leave half of the SMs idle.

    Args: alone: each program has an SM of its own, unless that leaves a tenth of the SMs idle, or with two splits 15 %.
        False: all SMs have one. 24 layers of RWKV-7 with two rows take 1193 us on an H200 with alone, and 1059 without.
        A step of mla with 64 rows takes 34.3 us with 2 splits of 57 tiles, and 35.0 with 3.
    """
    splits = 1
    if 2 * tiles <= processors:
        whole = processors // tiles
        least = 0.85 if whole == 2 else 0.9
        splits = whole if alone and whole * tiles >= least * processors else cdiv(processors, tiles)
    splits = max(1, min(splits, D // _LEAST_SPAN))
    return cdiv(cdiv(D, splits), block) * block


def _fake(x: Tensor, norm_weight: Tensor | None, eps: float, weights: Sequence[Tensor], *around: Any) -> Tensor:
    gated = Around(norm_weight, eps, *around).gated
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights) // (2 if gated else 1))


def _convolved_fake(
    x: Tensor, norm_weight: Tensor | None, eps: float, weights: Sequence[Tensor], *convolution: Any
) -> Tensor:
    return _fake(x, norm_weight, eps, weights)


gemv = operator(
    "triton_gemv(Tensor x, Tensor? norm_weight, float eps, Tensor[] weights, Tensor? residual, str activation,"
    " bool gated, Tensor? previous, Tensor? mix, int[] places, Tensor[] biases, int[] biased) -> Tensor",
    _gemv,
    compiled_ahead(_gemv, _fake),
    any_layout=True,
)
gemv_convolved_ = operator(
    "triton_gemv_convolved_(Tensor x, Tensor? norm_weight, float eps, Tensor[] weights, Tensor[] biases, int[] biased,"
    " Tensor(a!) history,"
    " Tensor taps, Tensor? bias, bool silu) -> Tensor",
    _convolved,
    compiled_ahead(_convolved, _convolved_fake),
    any_layout=True,
)
