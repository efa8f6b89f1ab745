"""Inter-chunk recurrence of the chunked form, as a custom operator with its own backward.

For a chunk that starts from state S, with row scales r and the WY representation of its micro-steps:

    T = (I + A)^-1,   U = T V,   W = T (r_e * E)
    V_new = U - W S
    O = r_q * (Q S) + P V_new                     P: the masked, decayed scores Q K^T
    S <- gamma * S + (r_k * K)^T V_new + KV       KV: a second write of the chunk (transition "dplr")

Without an erase term V_new = V. The intra-chunk operands (A, P and the row scales) depend on one chunk alone. They are
computed before the scan, in parallel over chunks, by code that torch.compile fuses.

The scan processes the chunks in segments. U and W of a segment are batched products; then two products per chunk
propagate the state; then the outputs of the segment are batched products again. The backward does the same in reverse.
As a custom operator the scan is one node of the graph, whatever the number of chunks, and it saves only V_new, T and
the first state of each segment for the backward.

N chunks, Z batch x key heads, G value heads per key head, C tokens per chunk, M micro-steps per chunk (M = C unless
householders > 1), K key width, V value width, Y sequences
"""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.compile.chunk_operands import ChunkOperands, SavedOperands
from deltazoo.backends.compile.chunk_scan_backward import scan_backward
from deltazoo.backends.compile.chunk_scan_forward import saved_segments, scan_forward
from deltazoo.backends.compile.operator_body import body
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator

# Chunks per segment: few enough for the segment's half dozen operands to stay in the cache, and enough for large
# batched products. The operators take it as an argument because the sizes in a graph cached on disk depend on it.
SEGMENT = 16


def chunk_scan(operands: ChunkOperands, tf32: bool = False) -> tuple[Tensor, Tensor]:
    """Run the scan; differentiable once.

    Args: tf32: whether a GPU computes the products in tf32.
    Returns: o [N, Z, G, C, V] and the final states [Y, Z, G, K, V].
    """
    # Made contiguous outside the operator, so that the compiler writes each operand in this layout directly.
    operands = ChunkOperands._make(None if x is None else x.contiguous() for x in operands)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        o, final_state, *_ = _ChunkScan.apply(tf32, *operands)
    else:
        o, final_state, *_ = _forward_op(*operands, SEGMENT, tf32, False)
    return o, final_state


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *operands, segment, tf32, save = arguments
    return scan_forward(ChunkOperands(*operands), segment, tf32, save)


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *operands, segment, _, save = arguments
    x = ChunkOperands(*operands)
    N, Z, C, K = x.q.shape
    G, M, V = x.v.shape[2:]
    v_new = x.v.new_empty(N, Z, G, M, V) if save and x.a is not None else x.v.new_empty(0)
    t = x.v.new_empty(N, Z, G, M, M) if save and x.a is not None else x.v.new_empty(0)
    segment_states = x.v.new_empty(saved_segments(N, segment) if save else 0, Z * G, K, V)
    return x.v.new_empty(N, Z, G, C, V), x.state.new_empty(x.state.shape), v_new, t, segment_states


def _backward(*arguments: Any) -> list[Tensor]:
    d_o, d_final, *saved, segment, tf32 = arguments
    return scan_backward(SavedOperands(*saved), d_o, d_final, segment, tf32)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    _, d_final, *saved, _, _ = arguments
    x = SavedOperands(*saved)

    def like(tensor: Tensor | None) -> Tensor:
        return x.attn.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    d_e = like(x.e) if x.t is not None else x.attn.new_empty(0)
    return [
        like(x.q), like(x.k), like(x.v_new), like(x.attn), like(d_final), like(x.t), d_e,
        like(x.scale_q), like(x.scale_e), like(x.scale_k), like(x.gamma), like(x.kv),
    ]  # fmt: skip


_forward_op = operator(
    "chunk_scan(Tensor q, Tensor k, Tensor v, Tensor attn, Tensor state, Tensor? a, Tensor? e, Tensor? scale_q, "
    "Tensor? scale_e, Tensor? scale_k, Tensor? gamma, Tensor? kv, Tensor? sequence, int segment, bool tf32, bool save) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    body(_forward),
    _forward_fake,
)
_backward_op = operator(
    "chunk_scan_backward(Tensor d_o, Tensor d_final, Tensor state, Tensor segment_states, Tensor q, Tensor k, "
    "Tensor v_new, Tensor attn, Tensor? t, Tensor? e, Tensor? scale_q, Tensor? scale_e, Tensor? scale_k, "
    "Tensor? gamma, Tensor? kv, Tensor? sequence, int segment, bool tf32) -> Tensor[]",
    body(_backward, strided=1),  # the backward copies d_o one segment at a time
    _backward_fake,
)


@cache_forward_signature
class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(tf32: bool, *operands: Any) -> tuple[Tensor, ...]:
        return _forward_op(*operands, SEGMENT, tf32, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x = ChunkOperands(*inputs[1:])
        o, _, v_new, t, segment_states = output
        erases = x.a is not None
        ctx.mark_non_differentiable(v_new, t, segment_states)
        ctx.set_materialize_grads(False)
        ctx.o_shape, ctx.segment, ctx.tf32 = o.shape, SEGMENT, inputs[0]
        saved = SavedOperands(
            x.state, segment_states, x.q, x.k, v_new if erases else x.v, x.attn, t if erases else None,
            x.e, x.scale_q, x.scale_e, x.scale_k, x.gamma, x.kv, x.sequence,
        )  # fmt: skip
        ctx.save_for_backward(*saved)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved = SavedOperands(*ctx.saved_tensors)
        d_o = saved.state.new_zeros(ctx.o_shape) if d_o is None else d_o
        d_final = saved.state.new_zeros(saved.state.shape) if d_final is None else d_final
        grads = _backward_op(d_o, d_final, *saved, ctx.segment, ctx.tf32)
        needed = ctx.needs_input_grad[1:]
        # tf32 and `sequence`, the first and the last input, have no gradient
        return (None, *(g if need else None for g, need in zip(grads, needed, strict=False)), None)


# After the operands come the numbers of chunks per segment, tf32 and save.
differentiate_exported("chunk_scan", lambda *arguments: _ChunkScan.apply(arguments[-2], *arguments[:-3]))
