"""Operators and launches of the RMS norm kernels. Triton is imported when a kernel first runs.

R rows, D width of a row
"""

import math
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.operands import ready, with_token_stride
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

MAX_WIDTH = 16384
_TILE = 1024  # numbers of a tile, for rows shorter than that
_MIN_WARPS = 2
_NUMBERS_PER_THREAD = 32
_BACKWARD_PROGRAMS = 1024  # eight per SM of a Hopper GPU


def _launch(
    kernel: Any, operands: dict[str, Tensor | None], weight: Tensor, results: dict[str, Tensor | None], *, eps: float,
    activation: str, programs: int | None = None,
) -> None:  # fmt: skip
    """Launch a kernel.

    Args:
        operands: tensors of tokens by the kernel's parameters, shaped like the first one; a gate has the heads and
            their width in one dimension.
        results: new tensors, or None. programs: their number; None: one per tile.
    """
    from deltazoo.backends.triton.norm.kernels import NormTraits
    from deltazoo.backends.triton.runtime.launcher import launcher

    first = next(iter(operands.values()))
    assert first is not None
    D = first.shape[-1]
    heads = first.shape[-2] if activation != "none" else 1
    tensors: dict[str, Tensor | None] = {"weight": ready(weight)}
    strides = {}
    for name, x in operands.items():
        tensors[name], strides[f"{name}_stride"] = (
            (None, 0) if x is None else with_token_stride(x.reshape(1, -1, heads * D))
        )
    unit = math.gcd(8, *strides.values())
    block = max(16, power_of_two(D))
    tile = max(1, _TILE // block)
    warps = max(_MIN_WARPS, min(16, tile * block // (32 * _NUMBERS_PER_THREAD)))
    traits = {"traits": NormTraits(D, tile, block, eps, activation, heads, unit)}
    rows_in_all = first.numel() // D
    with torch.cuda.device_of(first):
        run = launcher(kernel, tensors | results, traits, Options(warps))
        numbers = {name: stride // unit for name, stride in strides.items()} | {"rows": rows_in_all}
        run(programs or cdiv(rows_in_all, tile), numbers)


def _forward(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor]:
    from deltazoo.backends.triton.norm.kernels import rms_norm_kernel

    h, y = _forward_fake(x, branch, gate, weight, eps, activation)
    operands, results = {"x": x, "branch": branch, "gate": gate}, {"h": None if branch is None else h, "y": y}
    _launch(rms_norm_kernel, operands, weight, results, eps=eps, activation=activation)
    return h, y


def _backward(
    h: Tensor, gate: Tensor | None, weight: Tensor, dy: Tensor, d_sum: Tensor | None, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    from deltazoo.backends.triton.norm.kernels import rms_norm_backward_kernel

    d_h, d_gate, _ = _backward_fake(h, gate, weight, dy, d_sum, eps, activation)
    partial = h.new_empty(_BACKWARD_PROGRAMS, h.shape[-1], dtype=torch.float32)
    operands = {"h": h, "gate": gate, "dy": dy, "d_sum": d_sum}
    results = {"d_h": d_h, "d_gate": None if gate is None else d_gate, "partial": partial}
    _launch(
        rms_norm_backward_kernel, operands, weight, results, eps=eps, activation=activation, programs=_BACKWARD_PROGRAMS
    )
    return d_h, d_gate, partial.sum(0).to(weight.dtype)


def _forward_fake(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    return x.new_empty(0 if branch is None else x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


def _backward_fake(
    h: Tensor, gate: Tensor | None, weight: Tensor, dy: Tensor, d_sum: Tensor | None, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    d_gate = h.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return h.new_empty(h.shape), d_gate, weight.new_empty(weight.shape)


rms_norm = operator(
    "triton_rms_norm(Tensor x, Tensor? branch, Tensor? gate, Tensor weight, float eps, str activation)"
    " -> (Tensor, Tensor)",
    _forward,
    compiled_ahead(_forward, _forward_fake),
    any_layout=True,
)
rms_norm_backward = operator(
    "triton_rms_norm_backward(Tensor h, Tensor? gate, Tensor weight, Tensor dy, Tensor? d_sum, float eps,"
    " str activation) -> (Tensor, Tensor, Tensor)",
    _backward,
    compiled_ahead(_backward, _backward_fake),
    any_layout=True,
)
