"""Operators and launches of weights that are a softmax over time. Triton is imported when a kernel first runs.

B batch, T time, D channels, N sequences
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.operands import ready, schema, unflatten, with_token_stride
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, chunk_slots, power_of_two
from deltazoo.backends.triton.zero_tail import zero_tail

SCORE_BOUND = 32.0  # of |s|: z is then at most 60 for 1e12 tokens
INITIAL = -80.0  # z before the first token; exp(z) is negligible beside that of any score
# 4 x 4,096 tokens with 2,048 channels in bfloat16 on an H200, us forward and backward, by chunk, channels and warps:
# 147 and 184 with 8, 256 and 4; 139 and 252 with 2 warps; 140 and 294 with chunks of 16; 139 and 256 with 512 channels.
# Tiles whose sums cross threads take 194 and 321 with 64 tokens, 32 channels and 4 warps, and 284 and 456 with 64
# channels; torch's logcumsumexp and running sums for its gradient about 970 and 2,120, from the times of whole layers.
CHUNK = 8
_CHANNELS = 256  # of a program
_SCANNED, _ROWS = 16, 256  # channels and chunks of a tile of a program that sums over chunks
_OPTIONS, _SCAN = Options(4), Options(8)


class TimeSoftmaxCall(NamedTuple):
    """The arguments of the forward operator.

    Args:
        raw: [B, T, D]. state: z before the first token, [N, D] float32. None: `INITIAL`.
        cu_seqlens: [N + 1] int32, the bounds of packed sequences; then B = 1.
    """

    raw: Tensor
    state: Tensor | None
    cu_seqlens: Tensor | None


class TimeSoftmaxBackwardCall(NamedTuple):
    """The arguments of the backward operator.

    Args: before: E before each chunk, [slots, D]. final: z after the last token, [N, D].
    """

    x: TimeSoftmaxCall
    before: Tensor
    final: Tensor
    d_log_decay: Tensor
    d_w: Tensor
    d_final: Tensor | None


class _Launches:
    """Launches the kernels of one call."""

    def __init__(self, call: TimeSoftmaxCall) -> None:
        from deltazoo.backends.triton.time_softmax.kernels import TimeSoftmaxTraits

        (B, self.T, D), self.N = call.raw.shape, _sequences(call)
        raw, stride = with_token_stride(call.raw)
        unit, block = math.gcd(stride, 8), min(_CHANNELS, power_of_two(D))
        self.traits = TimeSoftmaxTraits(
            D, CHUNK, block, unit, SCORE_BOUND, INITIAL, PACKED=call.cu_seqlens is not None, SCANNED=_SCANNED,
            ROWS=_ROWS,
        )  # fmt: skip
        self.stride, self.slots = stride // unit, chunk_slots(B, self.T, CHUNK, call.cu_seqlens)
        self.tensors = {
            "raw": raw, "state": None if call.state is None else ready(call.state),
            "cu": None if call.cu_seqlens is None else ready(call.cu_seqlens),
        }  # fmt: skip

    def run(self, kernel: Any, tensors: Mapping[str, Tensor | None]) -> None:
        """Launch a kernel with a program per chunk slot and block of channels."""
        self._launch(kernel, tensors, _OPTIONS, self.slots * cdiv(self.traits.D, self.traits.BLOCK))

    def scan(self, kernel: Any, tensors: Mapping[str, Tensor | None]) -> None:
        """Launch a kernel with a program per sequence and block of channels."""
        self._launch(kernel, tensors, _SCAN, self.N * cdiv(self.traits.D, _SCANNED))

    def _launch(self, kernel: Any, tensors: Mapping[str, Tensor | None], options: Options, programs: int) -> None:
        from deltazoo.backends.triton.runtime.launcher import launcher

        launch = launcher(kernel, {**self.tensors, **tensors}, {"traits": self.traits}, options)
        launch(programs, {"N": self.N, "T": self.T, "token_stride": self.stride})


def _sequences(call: TimeSoftmaxCall) -> Any:
    return call.raw.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.time_softmax import kernels

    call = unflatten(TimeSoftmaxCall, arguments)
    log_decay, w, final, before = outputs = _forward_fake(*arguments)
    with torch.cuda.device_of(call.raw):
        launches, sums = _Launches(call), torch.empty_like(before)
        launches.run(kernels.score_sums_kernel, {"sums": sums})
        launches.scan(kernels.sum_before_kernel, {"sums": sums, "before": before, "final": final})
        results = {"before": before, "log_decay": log_decay, "w": w}
        launches.run(kernels.time_softmax_kernel, results)
        zero_tail(launches.tensors["cu"], {"v": w, "log_decay": log_decay})
    return outputs


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call = unflatten(TimeSoftmaxCall, arguments)
    raw, (B, T, D) = call.raw, call.raw.shape
    sizes = raw.shape, (_sequences(call), D), (chunk_slots(B, T, CHUNK, call.cu_seqlens), D)
    log_decay, final, before = (raw.new_empty(size, dtype=torch.float32) for size in sizes)
    return log_decay, raw.new_empty(raw.shape), final, before


def _backward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from deltazoo.backends.triton.time_softmax import kernels

    call = unflatten(TimeSoftmaxBackwardCall, arguments)
    d_raw, d_state = outputs = _backward_fake(*arguments)
    d_log_decay, d_w = ready(call.d_log_decay), ready(call.d_w)
    with torch.cuda.device_of(d_raw):
        launches, sums, after = _Launches(call.x), torch.empty_like(call.before), torch.empty_like(call.before)
        given = {"before": call.before, "d_log_decay": d_log_decay, "d_w": d_w}
        launches.run(kernels.sum_gradients_kernel, given | {"sums": sums})
        d_final = None if call.d_final is None else ready(call.d_final)
        results = {"sums": sums, "final": call.final, "d_final": d_final, "after": after, "d_state": d_state}
        launches.scan(kernels.sum_after_kernel, results | {"d_log_decay": d_log_decay})
        launches.run(kernels.time_softmax_backward_kernel, given | {"after": after, "d_raw": d_raw})
        zero_tail(launches.tensors["cu"], {"v": d_raw})
    return outputs


def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = unflatten(TimeSoftmaxBackwardCall, arguments)
    return call.x.raw.new_empty(call.x.raw.shape), call.final.new_empty(call.final.shape)


time_softmax = operator(
    f"triton_time_softmax({schema(TimeSoftmaxCall)}) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    compiled_ahead(_forward, _forward_fake),
    any_layout=True,
)
time_softmax_backward = operator(
    f"triton_time_softmax_backward({schema(TimeSoftmaxBackwardCall)}) -> (Tensor, Tensor)",
    _backward,
    compiled_ahead(_backward, _backward_fake),
    any_layout=True,
)
