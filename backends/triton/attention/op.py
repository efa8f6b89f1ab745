"""Operators and launches of flash attention with forget gates. Triton is imported when a kernel first runs.

B batch, T time, H query heads, G key-value heads, E head width, R = B T rows, N sequences
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.triton.operands import ready, with_token_stride
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

_SUM_ROWS = 1024  # tokens that a program of the sums adds at once


class AttentionLaunch(NamedTuple):
    """Tile of a program, queries x keys, and its options."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def launch_of(phase: str, E: int, dtype: torch.dtype) -> AttentionLaunch:
    """Return the launch of a phase: "forward", "queries" or "keys"."""
    if dtype == torch.float32:
        return AttentionLaunch(32, 32, 4, 2)
    if E <= 64:
        tuned = {"forward": (128, 64, 4, 3), "queries": (128, 64, 8, 3), "keys": (64, 128, 8, 3)}
    elif E <= 128:
        tuned = {"forward": (128, 64, 8, 3), "queries": (128, 64, 8, 2), "keys": (64, 128, 8, 2)}
    else:
        tuned = {"forward": (64, 64, 4, 2), "queries": (64, 32, 4, 2), "keys": (32, 64, 4, 2)}
    return AttentionLaunch(*tuned[phase])


class _Operands(NamedTuple):
    """q, k, v with a stride from token to token, and the bounds of the packed sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    strides: tuple[int, int, int]
    cu: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> "_Operands":
        """Copy what has no such stride. The tokens after the last packed sequence are a further sequence."""
        (q, q_stride), (k, k_stride), (v, v_stride) = (with_token_stride(x.flatten(2)) for x in (q, k, v))
        cu = None if cu_seqlens is None else torch.cat([cu_seqlens, cu_seqlens.new_full((1,), q.shape[1])])
        return cls(q, k, v, (q_stride, k_stride, v_stride), cu)


def _launch(
    phase: str, kernel: Any, x: _Operands, tensors: dict[str, Tensor], heads: tuple[int, int, int], *, scale: float
) -> None:
    """Launch a kernel. Args: tensors: by its parameters, beside the operands; heads: H, G and E."""
    from deltazoo.backends.triton.attention.kernels.tiles import AttentionTraits
    from deltazoo.backends.triton.runtime.launcher import launcher

    B, T = x.q.shape[:2]
    (H, G, E), N = heads, B if x.cu is None else x.cu.shape[0] - 1
    launch = launch_of(phase, E, x.q.dtype)
    tile = launch.keys if phase == "keys" else launch.queries
    unit = math.gcd(8, E, *x.strides)
    slots = N * cdiv(T, tile) if x.cu is None else T // tile + N
    precision = "tf32" if tf32_allowed() else "ieee"
    traits = AttentionTraits(
        H, G, E, max(16, power_of_two(E)), launch.queries, launch.keys, scale, unit, x.cu is not None, precision
    )
    operands = {"q": x.q, "k": x.k, "v": x.v, "cu": x.cu}
    strides = (stride // unit for stride in x.strides)
    numbers = dict(zip(("q_stride", "k_stride", "v_stride"), strides, strict=True))
    options = Options(launch.warps, launch.stages, launch.registers)
    run = launcher(kernel, operands | tensors, {"traits": traits}, options)
    run((G if phase == "keys" else H) * slots, numbers | {"T": T, "N": N, "R": B * T, "slots": slots})


def _launch_gates(kernel: Any, tensors: dict[str, Tensor], cu: Tensor | None, B: int, T: int, H: int) -> None:
    from deltazoo.backends.triton.runtime.launcher import launcher

    N = B if cu is None else cu.shape[0] - 1
    traits = {"H": H, "ROWS": _SUM_ROWS, "PACKED": cu is not None}
    launcher(kernel, tensors | {"cu": cu}, traits, Options(4))(N * H, {"T": T, "R": B * T})


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from deltazoo.backends.triton.attention.kernels.forward import attention_kernel
    from deltazoo.backends.triton.attention.kernels.gates import gate_sums_kernel

    o, sums, lse = _forward_fake(q, k, v, log_f, cu_seqlens, scale)
    B, T, H, E = q.shape
    with torch.cuda.device_of(q):
        x = _Operands.of(q, k, v, cu_seqlens)
        _launch_gates(gate_sums_kernel, {"log_f": ready(log_f), "sums": sums}, x.cu, B, T, H)
        tensors = {"sums": sums, "o": o, "lse": lse}
        _launch("forward", attention_kernel, x, tensors, (H, k.shape[2], E), scale=scale)
    return o, sums, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, o: Tensor, sums: Tensor, lse: Tensor, d_o: Tensor,
    cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from deltazoo.backends.triton.attention.kernels.backward import key_gradients_kernel, query_gradients_kernel
    from deltazoo.backends.triton.attention.kernels.gates import gate_gradients_kernel

    dq, dk, dv, d_log_f = _backward_fake(q, k, v, log_f, o, sums, lse, d_o, cu_seqlens, scale)
    B, T, H, E = q.shape
    heads, rows, d_sums = (H, k.shape[2], E), torch.empty_like(sums), torch.empty_like(lse)
    with torch.cuda.device_of(q):
        x, d_o = _Operands.of(q, k, v, cu_seqlens), ready(d_o)
        tensors = {"o": o, "do": d_o, "sums": sums, "lse": lse, "dq": dq, "rows": rows}
        _launch("queries", query_gradients_kernel, x, tensors, heads, scale=scale)
        tensors = {"do": d_o, "sums": sums, "rows": rows, "dk": dk, "dv": dv, "d_sums": d_sums}
        _launch("keys", key_gradients_kernel, x, tensors, heads, scale=scale)
        _launch_gates(gate_gradients_kernel, {"d_sums": d_sums, "d_log_f": d_log_f}, x.cu, B, T, H)
    return dq, dk, dv, d_log_f


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, _ = q.shape
    sums, lse = (q.new_empty(*shape, H, B * T, dtype=torch.float32) for shape in ((2,), ()))
    return q.new_empty(q.shape), sums, lse


def _backward_fake(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, o: Tensor, sums: Tensor, lse: Tensor, d_o: Tensor,
    cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), log_f.new_empty(log_f.shape)


forgetting_attention = operator(
    "triton_forgetting_attention(Tensor q, Tensor k, Tensor v, Tensor log_f, Tensor? cu_seqlens, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    compiled_ahead(_forward, _forward_fake),
    any_layout=True,
)
forgetting_attention_backward = operator(
    "triton_forgetting_attention_backward(Tensor q, Tensor k, Tensor v, Tensor log_f, Tensor o, Tensor sums,"
    " Tensor lse, Tensor d_o, Tensor? cu_seqlens, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    compiled_ahead(_backward, _backward_fake),
    any_layout=True,
)
