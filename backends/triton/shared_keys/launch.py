"""Launch the kernels of additive updates that share keys; imported when a kernel first runs.

B batch, T time, N sequences, H key heads, M value heads per key head, K key width
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.triton.runtime.launcher import launcher
from deltazoo.backends.triton.shared_keys import kernels
from deltazoo.backends.triton.shared_keys.kernels import SharedKeyTraits
from deltazoo.backends.triton.shared_keys.operands import CHUNK, SharedKeyBackwardCall, SharedKeyOperands
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, most_registers, power_of_two

KEYS = 64  # columns of a tile of keys
SUMS, SCAN, OUTPUT = Options(4), Options(4, 2), Options(4, 1, most_registers(4))
GRADIENTS = Options(8, 1, most_registers(8))


def forward(x: SharedKeyOperands, scale: float, *, o: Tensor, final: Tensor, sums: Tensor, states: Tensor) -> None:
    """Compute the results and what the backward reads."""
    tensors = x._asdict() | {"cu": x.cu_seqlens, "sums": sums, "states": states, "o": o}
    with torch.cuda.device_of(x.q):
        _per_chunk(kernels.shared_key_sums_kernel, x, tensors, scale, options=SUMS)
        _scan(x, x.k, x.v, tensors | {"initial": x.state, "final": final}, scale=scale, reverse=False)
        _per_chunk(kernels.shared_key_output_kernel, x, tensors, scale, options=OUTPUT)


def backward(call: SharedKeyBackwardCall, gradients: list[Tensor]) -> None:
    """Compute the gradients of q, k, v, log_decay and the initial state."""
    x, d_states = call.x, torch.empty_like(call.states)
    named = dict(zip(("d_q", "d_k", "d_v", "d_log_decay", "final"), gradients, strict=True))
    others = {"cu": x.cu_seqlens, "sums": call.sums, "d_o": call.d_o, "initial": call.d_final}
    tensors = x._asdict() | named | others
    with torch.cuda.device_of(x.q):
        _scan(x, x.q, call.d_o, tensors | {"states": d_states}, scale=call.scale, reverse=True)
        tensors |= {"states": call.states, "d_states": d_states}
        _per_chunk(kernels.shared_key_gradients_kernel, x, tensors, call.scale, options=GRADIENTS)


def _scan(
    x: SharedKeyOperands, keys: Tensor, values: Tensor, tensors: dict[str, Tensor | None], *, scale: float,
    reverse: bool,
) -> None:  # fmt: skip
    tensors = tensors | {"keys": keys, "values": values}
    traits = _traits(x)
    run = launcher(kernels.shared_key_scan_kernel, tensors, {"REVERSE": reverse, "traits": traits}, SCAN)
    N = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    run(N * traits.H * cdiv(traits.K, traits.BK), {"N": N, "T": x.q.shape[1], "scale": scale})


def _per_chunk(
    kernel: Any, x: SharedKeyOperands, tensors: dict[str, Tensor | None], scale: float, *, options: Options
) -> None:
    sums, N = tensors["sums"], x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    assert sums is not None
    numbers = {"N": N, "T": x.q.shape[1], "scale": scale}
    launcher(kernel, tensors, {"traits": _traits(x)}, options)(sums.shape[0] * x.q.shape[2] if N else 0, numbers)


def _traits(x: SharedKeyOperands) -> SharedKeyTraits:
    H, K = x.q.shape[2:]
    M = x.v.shape[2] // H
    return SharedKeyTraits(
        H=H, K=K, M=M, C=CHUNK, LEVELS=CHUNK.bit_length() - 1, BK=KEYS, BM=max(64, power_of_two(M)),
        PACKED=x.cu_seqlens is not None,
    )  # fmt: skip
