"""Operators and launches of the kernels of a gated activation. Triton is imported when a kernel first runs.

R rows (tokens), F hidden width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv

ROWS, COLUMNS, WARPS = 4, 512, 4  # of a program


def _launch(kernel: Any, tensors: dict[str, Tensor], activation: str) -> None:
    from deltazoo.backends.triton.glu.kernels import GluTraits
    from deltazoo.backends.triton.runtime.launcher import launcher

    rows, F = tensors["h"].shape
    with torch.cuda.device_of(tensors["h"]):
        run = launcher(kernel, tensors, GluTraits(F, ROWS, COLUMNS, activation)._asdict(), Options(WARPS))
        run(cdiv(rows, ROWS) * cdiv(F, COLUMNS), {"rows": rows})


def _forward(hidden: Tensor, activation: str) -> Tensor:
    from deltazoo.backends.triton.glu.kernels import glu_kernel

    h = _forward_fake(hidden, activation)
    _launch(glu_kernel, {"hidden": ready(hidden), "h": h}, activation)
    return h


def _backward(hidden: Tensor, d_h: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    from deltazoo.backends.triton.glu.kernels import glu_backward_kernel

    d_hidden, h = _backward_fake(hidden, d_h, activation)
    tensors = {"hidden": ready(hidden), "d_h": ready(d_h), "d_hidden": d_hidden, "h": h}
    _launch(glu_backward_kernel, tensors, activation)
    return d_hidden, h


def _forward_fake(hidden: Tensor, activation: str) -> Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2)


def _backward_fake(hidden: Tensor, d_h: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), d_h.new_empty(d_h.shape)


glu = operator("triton_glu(Tensor hidden, str activation) -> Tensor", _forward, compiled_ahead(_forward, _forward_fake))
glu_backward = operator(
    "triton_glu_backward(Tensor hidden, Tensor d_h, str activation) -> (Tensor, Tensor)",
    _backward,
    compiled_ahead(_backward, _backward_fake),
)
