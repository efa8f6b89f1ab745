"""Softmax attention whose scores contain products of Householder matrices, as one custom operator with gradients.

score_ts = scale k_s^T H_(s+1) ... H_t q_t with H_r = I - beta_r w_r w_r^T

The forward pass processes chunks of `CHUNK` tokens. Before each chunk the keys have been multiplied by all earlier
matrices, as in decoding. With W the vectors of a chunk, A = tril(Diag(beta) W W^T, -1) and
U = (I + A)^-1 Diag(beta) W, the product of its matrices is I - W^T U (UT transform). The backward pass stores the keys
before every sqrt(T / CHUNK)-th chunk, and recomputes the other keys, and the scores of one chunk at a time. Its memory
grows as T^1.5.

B batch, T time, S past tokens, P past and earlier tokens, C tokens of a chunk, H query heads, G key-value heads,
R query heads per key-value head, K key width, V value width
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, operator

CHUNK = 64


class HouseholderInputs(NamedTuple):
    """Operands in float32 or float64.

    q: [B, T, H, K]; k, w: [B, T, G, K]; v: [B, T, G, V]; beta: [B, T, G].
    past_k: [B, S, G, K], multiplied by the matrices of all past tokens; past_v: [B, S, G, V].
    past_sequence: [B, S] int64, -1 at empty slots; sequence: [B, T] int64 >= 0. A query attends to earlier tokens of
        the same number.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    past_k: Tensor
    past_v: Tensor
    past_sequence: Tensor
    sequence: Tensor


def householder_attention(inputs: HouseholderInputs, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to the past tokens and the new ones.

    Returns: o [B, T, H, V]; the keys of all tokens, multiplied by the matrices of all later tokens, [B, S + T, G, K].
    """
    if torch.is_grad_enabled():
        o, keys = _HouseholderAttention.apply(scale, *inputs)
    else:
        o, keys = _forward_op(list(inputs), scale)
    return o, keys


class _Chunk(NamedTuple):
    """Operands of one chunk: q [B, G, R, C, K]; k, w [B, G, C, K]; v [B, G, C, V]; beta [B, G, C]; sequence [B, C]."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    sequence: Tensor


def _attend(chunk: _Chunk, keys: Tensor, values: Tensor, key_sequence: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Process one chunk. Args: keys: [B, G, P, K]; values: [B, G, P, V]; key_sequence: [B, P].

    Returns: o [B, G, R, C, V]; the keys of P + C tokens after the chunk.
    """
    q, k, v, w, beta, sequence = chunk
    U, M = _ut_transform(k, w, beta)
    query_w = (q @ w.mT[:, :, None]).tril()
    local = q @ k.mT[:, :, None] - query_w @ M[:, :, None]
    past = (q - query_w @ U[:, :, None]) @ keys.mT[:, :, None]
    time = torch.arange(q.shape[3], device=q.device)
    causal = (time <= time[:, None]) & (sequence[:, None] == sequence[:, :, None])
    visible = torch.cat([key_sequence[:, None] == sequence[:, :, None], causal], -1)[:, None, None]
    scores = torch.where(visible, scale * torch.cat([past, local], -1), -math.inf)
    o = scores.softmax(-1) @ torch.cat([values, v], 2)[:, :, None]
    return o, _advance(chunk, keys, U, M)


def _ut_transform(k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return U [B, G, C, K] and M = (I + A)^-1 tril(Diag(beta) W K^T, -1) [B, G, C, C]."""
    scaled = w * beta[..., None]
    A = (scaled @ w.mT).tril(-1)
    right = torch.cat([scaled, (scaled @ k.mT).tril(-1)], -1)
    solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    return solved[..., : k.shape[-1]], solved[..., k.shape[-1] :]


def _advance(chunk: _Chunk, keys: Tensor, U: Tensor, M: Tensor) -> Tensor:
    """Multiply the keys by the matrices of the chunk, and append its own keys."""
    return torch.cat([keys - (keys @ U.mT) @ chunk.w, chunk.k - M.mT @ chunk.w], 2)


def _chunks(inputs: HouseholderInputs) -> list[_Chunk]:
    q = rearrange(inputs.q, "b t (g r) k -> b g r t k", g=inputs.k.shape[2])
    k, v, w = (x.transpose(1, 2) for x in (inputs.k, inputs.v, inputs.w))
    beta = inputs.beta.transpose(1, 2)
    spans = [slice(start, start + CHUNK) for start in range(0, inputs.q.shape[1], CHUNK)]
    return [
        _Chunk(q[:, :, :, t], k[:, :, t], v[:, :, t], w[:, :, t], beta[:, :, t], inputs.sequence[:, t]) for t in spans
    ]


def _past(inputs: HouseholderInputs, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the values [B, G, P, V] and sequence numbers [B, P] of the past and the first new tokens."""
    values = torch.cat([inputs.past_v, inputs.v[:, :tokens]], 1).transpose(1, 2)
    return values, torch.cat([inputs.past_sequence, inputs.sequence[:, :tokens]], 1)


def _forward(tensors: list[Tensor], scale: float) -> list[Tensor]:
    inputs = HouseholderInputs(*tensors)
    with torch.autocast(inputs.q.device.type, enabled=False):
        keys, outputs = inputs.past_k.transpose(1, 2), []
        for n, chunk in enumerate(_chunks(inputs)):
            o, keys = _attend(chunk, keys, *_past(inputs, n * CHUNK), scale)
            outputs.append(rearrange(o, "b g r t v -> b t (g r) v"))
        o = torch.cat(outputs, 1) if outputs else inputs.v.new_zeros(*inputs.q.shape[:3], inputs.v.shape[-1])
        return [o.contiguous(), keys.transpose(1, 2).clone(memory_format=torch.contiguous_format)]


def _forward_fake(tensors: list[Tensor], scale: float) -> list[Tensor]:
    inputs = HouseholderInputs(*tensors)
    B, S, G, K = inputs.past_k.shape
    T, H = inputs.q.shape[1:3]
    return [inputs.q.new_empty(B, T, H, inputs.v.shape[-1]), inputs.q.new_empty(B, S + T, G, K)]


def _backward(grads: list[Tensor], tensors: list[Tensor], scale: float) -> list[Tensor]:
    inputs = HouseholderInputs(*tensors)
    with torch.autocast(inputs.q.device.type, enabled=False):
        return _differentiate(inputs, grads[0], grads[1], scale)


def _differentiate(inputs: HouseholderInputs, d_o: Tensor, d_keys: Tensor, scale: float) -> list[Tensor]:
    """Return the gradients of the first seven operands. Process the chunks from last to first."""
    G, S = inputs.k.shape[2], inputs.past_k.shape[1]
    chunks = _chunks(inputs)
    d_o = rearrange(d_o, "b t (g r) v -> b g r t v", g=G)
    d_keys = d_keys.transpose(1, 2)
    d_values = torch.zeros_like(torch.cat([inputs.past_v, inputs.v], 1).transpose(1, 2))
    d_chunks: list[Sequence[Tensor]] = []
    interval = max(1, math.isqrt(len(chunks)))
    saved = _advance_through(chunks, inputs.past_k.transpose(1, 2), interval)
    for first in reversed(range(0, len(chunks), interval)):
        segment = chunks[first : first + interval]
        all_keys = _advance_through(segment, saved[first // interval])
        for n in reversed(range(first, first + len(segment))):
            values, key_sequence = _past(inputs, n * CHUNK)
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (*chunks[n][:5], all_keys[n - first], values)]
                q, k, v, w, beta, past_k, past_v = leaves
                chunk = _Chunk(q, k, v, w, beta, chunks[n].sequence)
                o, keys = _attend(chunk, past_k, past_v, key_sequence, scale)
            d_o_chunk = d_o[:, :, :, n * CHUNK : (n + 1) * CHUNK]
            *d_chunk, d_keys, d_past = torch.autograd.grad([o, keys], leaves, [d_o_chunk, d_keys])
            d_values[:, :, : S + n * CHUNK] += d_past
            d_chunks.append(d_chunk)
    return _join(inputs, d_chunks[::-1], d_keys, d_values)


def _advance_through(chunks: list[_Chunk], keys: Tensor, interval: int = 1) -> list[Tensor]:
    """Return the keys before every chunk whose index is a multiple of `interval`."""
    before = []
    for n, chunk in enumerate(chunks):
        if n % interval == 0:
            before.append(keys)
        keys = _advance(chunk, keys, *_ut_transform(chunk.k, chunk.w, chunk.beta))
    return before


def _join(
    inputs: HouseholderInputs, d_chunks: list[Sequence[Tensor]], d_past_k: Tensor, d_values: Tensor
) -> list[Tensor]:
    """Join the gradients of the chunks. Returns: those of q, k, v, w, beta, past_k and past_v."""
    S = inputs.past_k.shape[1]
    past = [d_past_k, d_values[:, :, :S]]
    if not d_chunks:
        return [*(torch.zeros_like(x) for x in inputs[:5]), *(x.transpose(1, 2).contiguous() for x in past)]
    d_q, *rest = (torch.cat(parts, 3 if i == 0 else 2) for i, parts in enumerate(zip(*d_chunks, strict=True)))
    d_k, d_v, d_w, d_beta = rest
    others = [d_k, d_v + d_values[:, :, S:], d_w, d_beta, *past]
    return [rearrange(d_q, "b g r t k -> b t (g r) k").contiguous(), *(x.transpose(1, 2).contiguous() for x in others)]


def _backward_fake(grads: list[Tensor], tensors: list[Tensor], scale: float) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors[:7]]


_forward_op = operator("householder_attention(Tensor[] tensors, float scale) -> Tensor[]", _forward, _forward_fake)
_backward_op = operator(
    "householder_attention_backward(Tensor[] grads, Tensor[] tensors, float scale) -> Tensor[]",
    _backward,
    _backward_fake,
)


@cache_forward_signature
class _HouseholderAttention(torch.autograd.Function):
    @staticmethod
    def forward(scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_forward_op(list(tensors), scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.scale = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        contiguous = [grad.contiguous() for grad in grads]
        return None, *_backward_op(contiguous, list(ctx.saved_tensors), ctx.scale), None, None
