"""Operator and launch that advance the history of a convolution by accepted tokens.

Triton is imported when the kernel first runs. B batch, T tokens, C channels, P past inputs
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import mark_written, operator
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.tiles import cdiv

_CHANNELS = 256  # of a program


def advance_history_(history: Tensor, x: Tensor, accepted: Tensor) -> None:
    """Replace `history` [B, P, C] in place; see `backends.ops.conv_history`."""
    _history_op(history, x, accepted)


def token_rows(x: Tensor) -> Tensor:
    """Return x [B, T, C] with adjacent channels and one stride from token to token, also across rows."""
    B, T, _ = x.shape
    is_regular = x.stride(2) == 1 and (B == 1 or x.stride(0) == T * x.stride(1))
    return x if is_regular else x.contiguous()


def _impl(history: Tensor, x: Tensor, accepted: Tensor) -> None:
    from deltazoo.backends.triton.conv.kernels.history import advance_history_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    pool, x = history.contiguous(), token_rows(x)
    (B, P, C), T = pool.shape, x.shape[1]
    traits = {"C": C, "PAST": P, "STRIDE": x.stride(1), "BC": _CHANNELS}
    tensors = {"history": pool, "x": x, "accepted": accepted.contiguous()}
    with torch.cuda.device_of(x):
        run = launcher(advance_history_kernel, tensors, traits)
        run(B * cdiv(C, _CHANNELS), {"tokens": T})
    mark_written(history, pool)


def _fake(*arguments: Any) -> None:
    return None


_history_op = operator(
    "triton_advance_history_(Tensor(a!) history, Tensor x, Tensor accepted) -> ()",
    _impl,
    compiled_ahead(_impl, _fake),
)
