"""Operator and launches of one token of TTT-Linear; kernels/ttt_token.py states the equations.

B rows, H heads, M tokens per mini-batch, E head width, D = H E
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, rows_equally_apart, step_tensors
from deltazoo.backends.triton.fast_weights.limits import MAX_WIDTH as MAX_WIDTH
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import limit_warps, power_of_two

# A layer of width 2048 with 64 rows takes 52.9 to 54.5 us on an H200; 55.5 to 57.0 with a prefetch of W and G before
# the wait for the products, and 72 with 8 warps, with which two programs in place of four share an SM.
_MIN_TILE, _WARPS, _OUTPUT_WARPS = 16, 4, 8
MAX_BATCH = 1024  # M: the kernel computes angles in float32
_OF_TOKEN = ("qk", "v", "raw", "gate")  # columns of one tensor: their rows may be apart
_IN_PLACE = ("history", "seen", "W", "G", "b", "g")


class TTTTokenCall(NamedTuple):
    """The operator's arguments: tensors as of `ttt_token_kernel` and `ttt_output_kernel`.

    Args: scale: of eta. theta: of the rotary embedding. eps: of the norm.
    """

    qk: Tensor
    v: Tensor
    raw: Tensor
    gate: Tensor
    taps: Tensor
    tap_bias: Tensor
    history: Tensor
    seen: Tensor
    place_rate: Tensor
    gain: Tensor
    bias: Tensor
    first_W: Tensor
    first_b: Tensor
    W: Tensor
    G: Tensor
    b: Tensor
    g: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    scale: float
    theta: float
    eps: float


def ttt_token_(call: TTTTokenCall) -> Tensor:
    """Decode one token per row; history, seen, W, G, b and g change in place. Returns: y [B, D]."""
    y: Tensor = _step_op(*call)
    return y


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.fast_weights.kernels.ttt_token import (
        TokenTraits,
        ttt_output_kernel,
        ttt_token_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, y = TTTTokenCall(*arguments), _fake(*arguments)
    B, H, E, _ = call.W.shape
    tensors = step_tensors(call, _OF_TOKEN, _IN_PLACE) | {"o": torch.empty_like(y), "y": y}
    rows_equally_apart(tensors, _OF_TOKEN)
    overlap = overlaps(call.qk)
    token = TokenTraits(
        H=H, E=E, M=call.place_rate.shape[0], BLOCK=max(_MIN_TILE, power_of_two(E)), TAPS=call.taps.shape[1],
        LOG_THETA=math.log(call.theta), STRIDE=tensors["qk"].stride(0), EPS=call.eps, OVERLAP=overlap,
    )  # fmt: skip
    traits = {"traits": token, "BLOCK": power_of_two(H * E)}
    with torch.cuda.device_of(call.qk):
        options = Options(limit_warps(_WARPS, token.BLOCK**2), overlap=overlap)
        launcher(ttt_token_kernel, tensors, traits, options)(B * H, {"scale": call.scale})
        options = Options(_OUTPUT_WARPS, overlap=overlap)
        launcher(ttt_output_kernel, tensors, traits, options)(B, {})
    finish(call, tensors, _IN_PLACE)
    return y


def _fake(*arguments: Any) -> Tensor:
    call = TTTTokenCall(*arguments)
    return call.qk.new_empty(call.qk.shape)


_step_op = operator(
    f"triton_ttt_token_({schema(TTTTokenCall, *_IN_PLACE)}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
