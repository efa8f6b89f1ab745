"""Softmax attention whose scores contain products of Householder matrices, as one custom operator with gradients.

score_ts = scale k_s^T H_(s+1) ... H_t q_t with H_r = I - beta_r w_r w_r^T

The forward pass processes chunks of `CHUNK` tokens. Before each chunk the keys have been multiplied by all earlier
matrices, as in decoding. With W the vectors of a chunk, A = tril(Diag(beta) W W^T, -1) and
U = (I + A)^-1 Diag(beta) W, the product of its matrices is I - W^T U (UT transform). The backward pass stores the keys
before every sqrt(T / CHUNK)-th chunk, and recomputes the other keys, and the scores of one chunk at a time. Its memory
grows as T^1.5.

Products of a chunk mix all its packed sequences, with weights of 0 between them, and 0 times NaN is NaN. So operands
and gradients that are not finite are replaced by 0, and the results that depend on them by NaN.

B batch, T time, S past tokens, P past and earlier tokens, C tokens of a chunk, H query heads, G key-value heads,
R query heads per key-value head, K key width, V value width
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.update.base import without_autocast

CHUNK = 64
NEGLIGIBLE = 1e-30  # smaller weights become 0: CPUs multiply subnormal numbers several times more slowly


class HouseholderInputs(NamedTuple):
    """Operands in float32 or float64.

    q: [B, T, H, K]; k, w: [B, T, G, K]; v: [B, T, G, V]; beta: [B, T, G].
    past_k: [B, S, G, K], multiplied by the matrices of all past tokens; past_v: [B, S, G, V].
    past_sequence: [B, S] int64, -1 at empty slots; sequence: [B, T] int64 >= 0, ascending. A query attends to earlier
        tokens of the same number.
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
    """Operands of one chunk: q [B, G, R C, K]; k, w [B, G, C, K]; v [B, G, C, V]; beta [B, G, C]; sequence [B, C]."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    sequence: Tensor

    def causal(self) -> Tensor:
        """Return which tokens of the chunk precede a query or are its own, [R C, C]."""
        C = self.k.shape[2]
        return self.q.new_ones(C, C, dtype=torch.bool).tril().repeat(self.q.shape[2] // C, 1)


class _Transform(NamedTuple):
    """The UT transform of a chunk: A and M = (I + A)^-1 tril(Diag(beta) W K^T, -1) [B, G, C, C]; U [B, G, C, K]."""

    A: Tensor
    U: Tensor
    M: Tensor


class _Weights(NamedTuple):
    """Softmax weights p [B, G, R C, P + C] of a chunk; query_w = tril(Q W^T) and query = Q - query_w U for them."""

    p: Tensor
    query_w: Tensor
    query: Tensor


def _transform(k: Tensor, w: Tensor, beta: Tensor) -> _Transform:
    scaled = w * beta[..., None]
    A = (scaled @ w.mT).tril(-1)
    right = torch.cat([scaled, (scaled @ k.mT).tril(-1)], -1)
    U, M = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True).tensor_split([k.shape[-1]], -1)
    return _Transform(A, U, M)


def _weigh(chunk: _Chunk, ut: _Transform, keys: Tensor, key_sequence: Tensor, scale: float) -> _Weights:
    """Compute the softmax weights. Args: keys: [B, G, P, K]; key_sequence: [B, P]."""
    q, sequence, causal = chunk.q, chunk.sequence, chunk.causal()
    query_w = (q @ chunk.w.mT) * causal
    query = q - query_w @ ut.U
    scores = torch.cat([query @ keys.mT, q @ chunk.k.mT - query_w @ ut.M], -1)
    same = torch.cat([key_sequence, sequence], 1)[:, None] == sequence[:, :, None]
    visible = same.repeat(1, q.shape[2] // sequence.shape[1], 1)
    visible = visible & torch.cat([causal.new_ones(q.shape[2], keys.shape[2]), causal], 1)
    p = torch.where(visible[:, None], scale * scores, -math.inf).softmax(-1)
    return _Weights(F.threshold(p, NEGLIGIBLE, 0.0), query_w, query)


def _attend(chunk: _Chunk, keys: Tensor, values: Tensor, key_sequence: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Process one chunk. Args: keys: [B, G, P, K]; values: [B, G, P, V]; key_sequence: [B, P].

    Returns: o [B, G, R C, V]; the keys of P + C tokens after the chunk.
    """
    ut = _transform(chunk.k, chunk.w, chunk.beta)
    weights = _weigh(chunk, ut, keys, key_sequence, scale)
    return weights.p @ torch.cat([values, chunk.v], 2), _advance(chunk, ut, keys)


def _advance(chunk: _Chunk, ut: _Transform, keys: Tensor) -> Tensor:
    """Multiply the keys by the matrices of the chunk, and append its own keys."""
    return torch.cat([keys - (keys @ ut.U.mT) @ chunk.w, chunk.k - ut.M.mT @ chunk.w], 2)


def _attend_backward(
    chunk: _Chunk,
    keys: Tensor,
    values: Tensor,
    key_sequence: Tensor,
    scale: float,
    d_o: Tensor,
    d_next: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Differentiate `_attend`. Args: d_o, d_next: gradients of its results.

    Returns: the gradients of q, k, v, w, beta; of the keys; of the values.
    """
    q, k, v, w, beta, _ = chunk
    P = keys.shape[2]
    ut = _transform(k, w, beta)
    p, query_w, query = _weigh(chunk, ut, keys, key_sequence, scale)
    d_values = p.mT @ d_o
    d_p = d_o @ torch.cat([values, v], 2).mT
    d_scores = scale * p * (d_p - (p * d_p).sum(-1, keepdim=True))
    d_past, d_local = d_scores[..., :P], d_scores[..., P:]
    # scores of the past keys = query keys^T, of the chunk's keys = q k^T - query_w M; query = q - query_w U
    d_query = d_past @ keys
    d_query_w = -(d_local @ ut.M.mT + d_query @ ut.U.mT) * chunk.causal()
    d_q = d_local @ k + d_query + d_query_w @ w
    d_k = d_local.mT @ q
    d_w = d_query_w.mT @ q
    d_U, d_M = -query_w.mT @ d_query, -query_w.mT @ d_local
    # next keys = [keys - (keys U^T) W, k - M^T W]
    d_old, d_own = d_next[:, :, :P], d_next[:, :, P:]
    d_keys_U = -d_old @ w.mT
    d_keys = d_past.mT @ query + d_old + d_keys_U @ ut.U
    d_U = d_U + d_keys_U.mT @ keys
    d_M = d_M - w @ d_own.mT
    d_k = d_k + d_own
    d_w = d_w - (keys @ ut.U.mT).mT @ d_old - ut.M @ d_own
    # (I + A) [U, M] = [scaled, tril(scaled k^T, -1)] with scaled = Diag(beta) W and A = tril(scaled W^T, -1)
    d_solved = torch.cat([d_U, d_M], -1)
    d_right = torch.linalg.solve_triangular(ut.A.mT, d_solved, upper=True, unitriangular=True)
    d_A = -(d_right @ torch.cat([ut.U, ut.M], -1).mT).tril(-1)
    d_scaled, d_products = d_right[..., : k.shape[-1]], d_right[..., k.shape[-1] :].tril(-1)
    scaled = w * beta[..., None]
    d_scaled = d_scaled + d_products @ k + d_A @ w
    d_k = d_k + d_products.mT @ scaled
    d_w = d_w + d_A.mT @ scaled + d_scaled * beta[..., None]
    return [d_q, d_k, d_values[:, :, P:], d_w, (d_scaled * w).sum(-1)], d_keys, d_values[:, :, :P]


def _chunks(inputs: HouseholderInputs) -> list[_Chunk]:
    q, sequence, G = inputs.q, inputs.sequence, inputs.k.shape[2]
    k, v, w, beta = (x.transpose(1, 2) for x in (inputs.k, inputs.v, inputs.w, inputs.beta))
    return [
        _Chunk(_rows(q[:, t], G), k[:, :, t], v[:, :, t], w[:, :, t], beta[:, :, t], sequence[:, t])
        for t in _spans(inputs)
    ]


def _spans(inputs: HouseholderInputs) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, inputs.q.shape[1], CHUNK)]


def _rows(x: Tensor, G: int) -> Tensor:
    """[B, C, H, E] -> [B, G, R C, E]: the query heads of a key-value head are rows of one matrix."""
    return rearrange(x, "b c (g r) e -> b g (r c) e", g=G)


def _heads(x: Tensor, C: int) -> Tensor:
    """[B, G, R C, E] -> [B, C, H, E]."""
    return rearrange(x, "b g (r c) e -> b c (g r) e", c=C)


def _past(inputs: HouseholderInputs, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the values [B, G, P, V] and sequence numbers [B, P] of the past and the first new tokens."""
    values = torch.cat([inputs.past_v, inputs.v[:, :tokens]], 1).transpose(1, 2)
    return values, torch.cat([inputs.past_sequence, inputs.sequence[:, :tokens]], 1)


class _NotFinite(NamedTuple):
    """Tokens with operands that are not finite: query [B, T, H], and key, value, w or beta [B, T, G]."""

    query: Tensor
    key: Tensor

    def outputs(self, sequence: Tensor) -> Tensor:
        """Return whether each output depends on one of them, [B, T, H]."""
        return self.query | _reaches(self.key, sequence).repeat_interleave(_group(self), 2)


def _group(bad: _NotFinite) -> int:
    return bad.query.shape[2] // bad.key.shape[2]


def _without_nonfinite(inputs: HouseholderInputs) -> tuple[HouseholderInputs, _NotFinite]:
    """Replace the operands of tokens that are not finite by 0."""
    k, v, w = (~x.isfinite().all(-1) for x in (inputs.k, inputs.v, inputs.w))
    bad = _NotFinite(~inputs.q.isfinite().all(-1), k | v | w | ~inputs.beta.isfinite())
    changed = {name: _fill(bad.key, getattr(inputs, name), 0.0) for name in ("k", "v", "w", "beta")}
    return inputs._replace(q=_fill(bad.query, inputs.q, 0.0), **changed), bad


def _fill(where: Tensor, x: Tensor, value: float) -> Tensor:
    """Set x [B, T, heads, ...] to a value where [B, T, heads]."""
    return torch.where(where.view(*where.shape, *[1] * (x.dim() - 3)), value, x)


def _reaches(bad_BTG: Tensor, sequence_BT: Tensor, reverse: bool = False) -> Tensor:
    """Return whether the token or an earlier one of its sequence is bad; `reverse`: or a later one. [B, T, G]."""
    count = F.pad(bad_BTG.long().cumsum(1), (0, 0, 1, 0))
    sequence_BT = sequence_BT.contiguous()
    edge = torch.searchsorted(sequence_BT, sequence_BT, right=reverse)  # of the token's sequence
    at_edge = count.gather(1, edge[..., None].expand_as(bad_BTG))
    return at_edge > count[:, :-1] if reverse else count[:, 1:] > at_edge


def _forward(tensors: list[Tensor], scale: float) -> list[Tensor]:
    inputs, bad = _without_nonfinite(HouseholderInputs(*tensors))
    with without_autocast(inputs.q):
        keys, outputs = inputs.past_k.transpose(1, 2), []
        for n, chunk in enumerate(_chunks(inputs)):
            o, keys = _attend(chunk, keys, *_past(inputs, n * CHUNK), scale)
            outputs.append(_heads(o, chunk.k.shape[2]))
        o = torch.cat(outputs, 1) if outputs else inputs.v.new_zeros(*inputs.q.shape[:3], inputs.v.shape[-1])
        past = bad.key.any(1, keepdim=True).expand(-1, inputs.past_k.shape[1], -1)
        bad_keys = torch.cat([past, _reaches(bad.key, inputs.sequence, reverse=True)], 1)
        return [
            _fill(bad.outputs(inputs.sequence), o, math.nan).contiguous(),
            _fill(bad_keys, keys.transpose(1, 2), math.nan).contiguous(),
        ]


def _forward_fake(tensors: list[Tensor], scale: float) -> list[Tensor]:
    inputs = HouseholderInputs(*tensors)
    B, S, G, K = inputs.past_k.shape
    T, H = inputs.q.shape[1:3]
    return [inputs.q.new_empty(B, T, H, inputs.v.shape[-1]), inputs.q.new_empty(B, S + T, G, K)]


def _backward(grads: list[Tensor], tensors: list[Tensor], scale: float) -> list[Tensor]:
    inputs, bad = _without_nonfinite(HouseholderInputs(*tensors))
    d_o, d_keys = grads
    bad_rows = bad.outputs(inputs.sequence) | ~d_o.isfinite().all(-1)
    bad_keys = _reaches(torch.unflatten(bad_rows, 2, (-1, _group(bad))).any(-1), inputs.sequence, reverse=True)
    with without_autocast(inputs.q):
        d_q, *d_rest = _differentiate(inputs, _fill(bad_rows, d_o, 0.0), d_keys, scale)
    d_new, d_past = d_rest[:4], d_rest[4:]
    return [_fill(bad_rows, d_q, math.nan), *(_fill(bad_keys, d, math.nan) for d in d_new), *d_past]


def _differentiate(inputs: HouseholderInputs, d_o: Tensor, d_keys: Tensor, scale: float) -> list[Tensor]:
    """Return the gradients of the first seven operands. Process the chunks from last to first."""
    chunks, spans = _chunks(inputs), _spans(inputs)
    gradients = HouseholderInputs(*(torch.zeros_like(x) for x in inputs))
    d_keys = d_keys.transpose(1, 2)
    interval = max(1, math.isqrt(len(chunks)))
    saved = _advance_through(chunks, inputs.past_k.transpose(1, 2), interval)
    for first in reversed(range(0, len(chunks), interval)):
        all_keys = _advance_through(chunks[first : first + interval], saved[first // interval])
        for n in reversed(range(first, first + len(all_keys))):
            t, (values, key_sequence) = spans[n], _past(inputs, n * CHUNK)
            d_o_rows = _rows(d_o[:, t], inputs.k.shape[2])
            (d_q, *d_chunk), d_keys, d_values = _attend_backward(
                chunks[n], all_keys[n - first], values, key_sequence, scale, d_o_rows, d_keys
            )
            gradients.q[:, t] = _heads(d_q, d_chunk[0].shape[2])
            for total, part in zip(gradients[1:5], d_chunk, strict=True):
                total[:, t] += part.transpose(1, 2)
            d_past_v, d_new_v = d_values.transpose(1, 2).tensor_split([inputs.past_v.shape[1]], 1)
            gradients.past_v.add_(d_past_v)
            gradients.v[:, : n * CHUNK] += d_new_v
    return [*gradients[:5], d_keys.transpose(1, 2).contiguous(), gradients.past_v]


def _advance_through(chunks: list[_Chunk], keys: Tensor, interval: int = 1) -> list[Tensor]:
    """Return the keys before every chunk whose index is a multiple of `interval`."""
    before = []
    for n, chunk in enumerate(chunks):
        if n % interval == 0:
            before.append(keys)
        keys = _advance(chunk, _transform(chunk.k, chunk.w, chunk.beta), keys)
    return before


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


def _differentiable(tensors: list[Tensor], scale: float) -> list[Tensor]:
    return list(_HouseholderAttention.apply(scale, *tensors))


differentiate_exported("householder_attention", _differentiable)
