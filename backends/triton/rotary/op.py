"""Operators and launches of the rotation by accumulated angles. Triton is imported when a kernel first runs.

B batch, T time, N sequences, H key heads, HV value heads, K key width, R pairs of channels
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, chunk_slots, power_of_two
from deltazoo.backends.triton.zero_tail import zero_tail

MAX_WIDTH = 256
_CHUNK = 32
_COLUMNS = 128  # of chunk sums per program of the scan
_MIN_PROGRAMS = 512  # fewer do not fill a GPU; more make partial sums
_SUMS, _SCAN, _ROTATE, _BACKWARD, _ANGLES = Options(4), Options(4), Options(4), Options(8), Options(4)


class RotaryOperands(NamedTuple):
    """The tensors of a rotation.

    Args:
        q, k: [B, T, H, K]. q_bias, k_bias: [HV, K].
        rate: radians per unit of time, [B, T, R] float32. dt: [B, T, HV] float32.
        state: angles before the first token in radians, [N, HV, R] float32. None: 0.
        cu_seqlens: [N + 1] int32, the bounds of packed sequences; then B = 1.
    """

    q: Tensor
    k: Tensor
    q_bias: Tensor
    k_bias: Tensor
    rate: Tensor
    dt: Tensor
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None


class _Launches:
    """Launches the kernels of one call."""

    def __init__(self, x: RotaryOperands) -> None:
        from deltazoo.backends.triton.rotary.kernels import RotaryTraits

        self.B, self.T, H, K = x.q.shape
        HV, R = x.dt.shape[2], x.rate.shape[2]
        self.N = self.B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        self.slots = chunk_slots(self.B, self.T, _CHUNK, x.cu_seqlens)
        heads = HV // H
        while heads % 2 == 0 and self.slots * (HV // heads) < _MIN_PROGRAMS:
            heads //= 2
        self.groups = HV // heads
        rest = power_of_two(K - 2 * R) if K > 2 * R else 0
        self.traits = RotaryTraits(H, HV, K, R, _CHUNK, heads, power_of_two(R), rest, x.cu_seqlens is not None)
        names = ("q", "k", "q_bias", "k_bias", "rate", "dt", "initial", "cu")
        self.tensors = {name: None if t is None else ready(t) for name, t in zip(names, x, strict=True)}

    def run(self, kernel: Any, options: Options, programs: int, tensors: Mapping[str, Tensor | None]) -> None:
        from deltazoo.backends.triton.runtime.launcher import launcher

        launch = launcher(kernel, {**self.tensors, **tensors}, {"traits": self.traits}, options)
        launch(programs, {"N": self.N, "T": self.T})

    def scan(self, sums: Tensor, initial: Tensor | None, final: Tensor, reverse: bool) -> None:
        from deltazoo.backends.triton.rotary.kernels import chunk_scan_kernel
        from deltazoo.backends.triton.runtime.launcher import launcher

        width, packed = sums.shape[1] * sums.shape[2], self.traits.PACKED
        traits = {"WIDTH": width, "BLOCK": _COLUMNS, "C": _CHUNK, "REVERSE": reverse, "PACKED": packed}
        tensors = {"sums": sums, "initial": initial, "final": final, "cu": self.tensors["cu"]}
        launcher(chunk_scan_kernel, tensors, traits, _SCAN)(self.N * cdiv(width, _COLUMNS), {"T": self.T})


def _rotate(*operands: Tensor | None) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.rotary.kernels import angle_sums_kernel, rotate_kernel

    x = RotaryOperands(*operands)  # type: ignore[arg-type]
    q, k, overlap, final, sums = outputs = _rotate_fake(*operands)
    with torch.cuda.device_of(q):
        launches = _Launches(x)
        launches.run(angle_sums_kernel, _SUMS, launches.slots * launches.traits.HV, {"sums": sums})
        launches.scan(sums, launches.tensors["initial"], final, reverse=False)
        results = {"sums": sums, "q_out": q, "k_out": k, "overlap": overlap}
        launches.run(rotate_kernel, _ROTATE, launches.slots * launches.groups, results)
        zero_tail(launches.tensors["cu"], {"v": overlap, "q": q, "k": k})
    return outputs


def _rotate_fake(*operands: Tensor | None) -> tuple[Tensor, ...]:
    x = RotaryOperands(*operands)  # type: ignore[arg-type]
    (B, T, _, K), HV, R = x.q.shape, x.dt.shape[2], x.rate.shape[2]
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return (
        x.q.new_empty(B, T, HV, K), x.k.new_empty(B, T, HV, K), x.dt.new_empty(B, T, HV), x.dt.new_empty(N, HV, R),
        x.dt.new_empty(chunk_slots(B, T, _CHUNK, x.cu_seqlens), HV, R, dtype=torch.int32),
    )  # fmt: skip


def _backward(*arguments: Tensor | None) -> tuple[Tensor, ...]:
    from deltazoo.backends.triton.rotary.kernels import angle_gradients_kernel, rotate_backward_kernel

    *operands, sums, dq_out, dk_out, d_overlap, d_final = arguments
    x = RotaryOperands(*operands)  # type: ignore[arg-type]
    assert sums is not None and dq_out is not None and dk_out is not None and d_overlap is not None
    (B, T, H, K), HV, R = x.q.shape, x.dt.shape[2], x.rate.shape[2]
    with torch.cuda.device_of(x.q):
        launches = _Launches(x)
        groups, slots = launches.groups, launches.slots

        def empty(*shape: int) -> Tensor:
            return x.dt.new_empty(shape)

        dq, dk, d_rates = empty(groups, B * T, K), empty(groups, B * T, K), empty(groups, B * T, R)
        biases = empty(slots, HV, K), empty(slots, HV, K)
        later, d_dts = empty(slots, HV, R), empty(B, T, HV)
        if x.cu_seqlens is not None:  # some slots stay unused
            biases = torch.zeros_like(biases[0]), torch.zeros_like(biases[1])
        tensors = {
            "sums": sums, "dq_out": ready(dq_out), "dk_out": ready(dk_out), "d_overlap": ready(d_overlap),
            "dq": dq, "dk": dk, "dq_bias": biases[0], "dk_bias": biases[1], "d_rate": d_rates, "d_dt": d_dts,
            "later": later,
        }  # fmt: skip
        launches.run(rotate_backward_kernel, _BACKWARD, slots * groups, tensors)
        d_state = empty(launches.N, HV, R)
        launches.scan(later, None if d_final is None else ready(d_final), d_state, reverse=True)
        d_rate, d_dt = empty(B, T, R), empty(B, T, HV)
        tensors = {
            "later": later, "d_rate_groups": d_rates, "d_dt_chunk": d_dts, "d_rate": d_rate, "d_dt": d_dt,
        }  # fmt: skip
        launches.run(angle_gradients_kernel, _ANGLES, slots, tensors)
        dq, dk = (
            y.view(H, groups // H, B * T, K).sum(1).to(x.q.dtype).transpose(0, 1).contiguous().view(B, T, H, K)
            for y in (dq, dk)
        )
        zero_tail(launches.tensors["cu"], {"v": d_dt, "q": dq, "k": dk, "log_decay": d_rate})
    dq_bias, dk_bias = (y.sum(0).to(x.q_bias.dtype) for y in biases)
    return dq, dk, dq_bias, dk_bias, d_rate, d_dt, d_state


def _backward_fake(*arguments: Tensor | None) -> tuple[Tensor, ...]:
    x = RotaryOperands(*arguments[:8])  # type: ignore[arg-type]
    HV, R = x.dt.shape[2], x.rate.shape[2]
    N = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return (*(y.new_empty(y.shape) for y in x[:6]), x.dt.new_empty(N, HV, R))


_OPERANDS = (
    "Tensor q, Tensor k, Tensor q_bias, Tensor k_bias, Tensor rate, Tensor dt, Tensor? state, Tensor? cu_seqlens"
)
rotate = operator(
    f"triton_rotate({_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rotate,
    compiled_ahead(_rotate, _rotate_fake),
)
rotate_backward = operator(
    f"triton_rotate_backward({_OPERANDS}, Tensor sums, Tensor dq_out, Tensor dk_out, Tensor d_overlap, Tensor? d_final)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    compiled_ahead(_backward, _backward_fake),
)
