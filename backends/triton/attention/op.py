"""Operators of flash attention with forget gates, forward, backward and over a cache.

B batch, T time, S slots of a cache, H query heads, G key-value heads, E head width, R = B T rows, N sequences
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.attention.launch import (
    Operands,
    decode,
    launch,
    launch_norms,
    launch_sums,
    query_slots,
    slots_of,
    sum_block,
)
from deltazoo.backends.triton.operands import ready, schema
from deltazoo.backends.triton.runtime.precompile import compiled_ahead


class BackwardCall(NamedTuple):
    """The arguments of the backward operator: those of the forward, its results, and the gradient of o."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_f: Tensor
    o: Tensor
    o_low: Tensor
    sums: Tensor
    norms: Tensor
    lse: Tensor
    d_o: Tensor
    cu_seqlens: Tensor | None
    scale: float


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, cu_seqlens: Tensor | None, scale: float, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from deltazoo.backends.triton.attention.kernels.forward import forgetting_attention_kernel
    from deltazoo.backends.triton.attention.kernels.gates import forget_sums_kernel, key_norms_kernel

    o, o_low, sums, norms, lse = _forward_fake(q, k, v, log_f, cu_seqlens, scale, save)
    with torch.cuda.device_of(q):
        x = Operands.of(q, k, v, _with_tail(cu_seqlens, q.shape[1]))
        launch_sums(forget_sums_kernel, x, {"log_f": ready(log_f), "sums": sums})
        launch_norms(key_norms_kernel, x, norms)
        results = {"o": o, "o_low": _if_stored(o_low), "lse": lse}
        tensors = {"sums": sums, "norms": norms, "before": None, "ends": None, **results}
        launch("forward", forgetting_attention_kernel, x, tensors, scale)
    return o, o_low, sums, norms, lse


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from deltazoo.backends.triton.attention.kernels.backward import key_gradients_kernel, query_gradients_kernel
    from deltazoo.backends.triton.attention.kernels.gates import forget_gradients_kernel

    dq, dk, dv, d_log_f = _backward_fake(*arguments)
    call = BackwardCall(*arguments)
    q, scale = call.q, call.scale
    rows, d_sums = torch.empty_like(call.sums[:2]), torch.empty_like(call.lse)
    with torch.cuda.device_of(q):
        x = Operands.of(q, call.k, call.v, _with_tail(call.cu_seqlens, q.shape[1]))
        starts = call.lse.new_empty(q.shape[2], query_slots(x), dtype=torch.int32)
        shared = {"do": ready(call.d_o), "sums": call.sums, "lse": call.lse, "rows": rows, "starts": starts}
        of_queries = shared | {"o": ready(call.o), "o_low": _if_stored(call.o_low), "norms": call.norms, "dq": dq}
        launch("queries", query_gradients_kernel, x, of_queries, scale)
        launch("keys", key_gradients_kernel, x, shared | {"dk": dk, "dv": dv, "d_sums": d_sums}, scale)
        launch_sums(forget_gradients_kernel, x, {"d_sums": d_sums, "d_log_f": d_log_f})
    return dq, dk, dv, d_log_f


def _with_cache(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, before: Tensor, ends: Tensor, cu_seqlens: Tensor | None, scale: float
) -> Tensor:
    from deltazoo.backends.triton.attention.kernels.forward import forgetting_attention_kernel

    # zeros, because no program writes the tokens after the last packed sequence
    o = q.new_empty(q.shape) if cu_seqlens is None else q.new_zeros(q.shape)
    with torch.cuda.device_of(q):
        x = Operands.of(q, k, v, cu_seqlens)
        high, block = sums.permute(2, 0, 1) * math.log2(math.e), sum_block(q.dtype)
        slot_S = torch.arange(high.shape[2], device=high.device)
        end_S = (slot_S // block * block + block - 1).clamp(max=high.shape[2] - 1)
        terms = torch.stack([high, torch.zeros_like(high), high - high[..., end_S]])
        none = dict.fromkeys(("norms", "o_low", "lse"))
        tensors = {"sums": terms, "before": ready(before), "ends": ready(ends), "o": o, **none}
        launch("forward", forgetting_attention_kernel, x, tensors, scale)
    return o


def _decode(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
    o = _decode_fake(q, k, v, ends, scale)
    with torch.cuda.device_of(q):
        decode(ready(q[:, 0]), ready(k), ready(v), ready(ends), o, scale)
    return o


def _with_tail(cu_seqlens: Tensor | None, T: int) -> Tensor | None:
    """Append T to the bounds of a pack: the tokens after the last sequence are a further one."""
    return None if cu_seqlens is None else torch.cat([cu_seqlens, cu_seqlens.new_full((1,), T)])


def _if_stored(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, cu_seqlens: Tensor | None, scale: float, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, T, H, _ = q.shape
    has_rest = save and q.dtype != torch.float32
    sums, lse = (q.new_empty(*shape, H, B * T, dtype=torch.float32) for shape in ((3,), ()))
    N = B if cu_seqlens is None else cu_seqlens.shape[0]  # with the tokens after the last sequence
    blocks = slots_of(sum_block(q.dtype), T, N, cu_seqlens is not None)
    norms = q.new_empty(k.shape[2], blocks, dtype=torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape if has_rest else 0), sums, norms, lse


def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, log_f = BackwardCall(*arguments)[:4]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), log_f.new_empty(log_f.shape)


def _with_cache_fake(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, before: Tensor, ends: Tensor, cu_seqlens: Tensor | None, scale: float
) -> Tensor:
    return q.new_empty(q.shape)


def _decode_fake(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


attention = operator(
    "triton_forgetting_attention(Tensor q, Tensor k, Tensor v, Tensor log_f, Tensor? cu_seqlens, float scale,"
    " bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    compiled_ahead(_forward, _forward_fake),
    any_layout=True,
)
attention_backward = operator(
    f"triton_forgetting_attention_backward({schema(BackwardCall)}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    compiled_ahead(_backward, _backward_fake),
    any_layout=True,
)
attention_with_cache = operator(
    "triton_attention_with_cache(Tensor q, Tensor k, Tensor v, Tensor sums, Tensor before, Tensor ends,"
    " Tensor? cu_seqlens, float scale) -> Tensor",
    _with_cache,
    compiled_ahead(_with_cache, _with_cache_fake),
    any_layout=True,
)
decode_attention = operator(
    "triton_decode_attention(Tensor q, Tensor k, Tensor v, Tensor ends, float scale) -> Tensor",
    _decode,
    compiled_ahead(_decode, _decode_fake),
    any_layout=True,
)
