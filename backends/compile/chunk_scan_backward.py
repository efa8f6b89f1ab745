"""Backward of the inter-chunk scan.

The segments are processed in reverse. Each recomputes its states from its first one, and computes all of its
gradients while its operands are in the cache.

N chunks, n chunks of a segment, Z batch x key heads, G value heads per key head, L = Z G, C tokens per chunk,
M micro-steps per chunk, K key width, V value width, Y sequences. The equations are those of `chunk_scan`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deltazoo.backends.compile.chunk_operands import SavedOperands
from deltazoo.backends.compile.chunk_scan_forward import (
    Transitions,
    by_chunk,
    by_value_head,
    flat,
    propagate,
    segments,
    sequence_bounds,
)
from deltazoo.backends.torch_ext.devices import products_in_tf32


def scan_backward(x: SavedOperands, d_o: Tensor, d_final: Tensor, segment: int, tf32: bool) -> list[Tensor]:
    """Compute the gradients of the operands, in the order of `ChunkOperands`; empty tensors for absent operands.

    segment: chunks per segment. tf32: whether a GPU computes the products in tf32.
    """
    N, Z, _, K = x.q.shape
    G, _, V = x.v_new.shape[2:]
    d_q, d_k, d_v, d_attn = (torch.empty_like(y) for y in (x.q, x.k, x.v_new, x.attn))
    d_a, d_scale_q, d_scale_e, d_scale_k, d_gamma, d_kv = (
        x.attn.new_empty(0) if y is None else torch.empty_like(y)
        for y in (x.t, x.scale_q, x.scale_e, x.scale_k, x.gamma, x.kv)
    )
    d_e = x.attn.new_empty(0) if x.t is None or x.e is None else torch.empty_like(x.e)
    d_state = d_final.clone()
    S_buffer, dS_buffer = (x.attn.new_empty(min(N, segment) + 1, Z * G, K, V) for _ in range(2))
    with products_in_tf32(tf32):
        for number, chunks in reversed(list(enumerate(segments(N, segment)))):
            n = chunks.stop - chunks.start
            V_new, P, dV = (flat(y[chunks]) for y in (x.v_new, x.attn, d_v))
            dO = flat(d_o[chunks].contiguous())
            Q, K_scaled = by_value_head(x.q, x.scale_q, chunks, G), by_value_head(x.k, x.scale_k, chunks, G)
            S_buffer[0] = x.segment_states[number]
            transitions = Transitions.of(chunks, x.gamma, x.kv, x.state, x.sequence)
            propagate(S_buffer[: n + 1], K_scaled, V_new, None, transitions)
            dV_new, W = dV, None  # without an erase term V_new is V
            if x.t is not None:
                dV_new, T = torch.empty_like(dV), flat(x.t[chunks])
                W = torch.bmm(T, by_value_head(x.k if x.e is None else x.e, x.scale_e, chunks, G))
            dS = dS_buffer[: n + 1]  # the gradients of the states before each chunk, and of the state after the last
            torch.bmm(P.mT, dO, out=dV_new)
            torch.bmm(Q.mT, dO, out=dS[:-1].flatten(0, 1))
            _propagate_back(dS, d_state, K_scaled, dV_new, W, transitions.gamma, x.sequence, chunks)
            S_before, dS_after = S_buffer[:n].flatten(0, 1), dS[1:].flatten(0, 1)
            torch.bmm(dO, V_new.mT, out=flat(d_attn[chunks]))
            if x.kv is not None:
                flat(d_kv[chunks]).copy_(dS_after)
            if x.gamma is not None:
                product = S_before * dS_after
                d_gamma[chunks] = product.sum((1, 2) if x.gamma.shape[3] == 1 else 2).view_as(d_gamma[chunks])
            _key_gradient(dO, S_before, 1, (x.q, x.scale_q), (d_q, d_scale_q), chunks, False)
            _key_gradient(V_new, dS_after, 1, (x.k, x.scale_k), (d_k, d_scale_k), chunks, False)
            if x.t is not None:
                torch.bmm(T.mT, dV_new, out=dV)
                dA = flat(d_a[chunks])
                torch.baddbmm(dA, dV, V_new.mT, beta=0, alpha=-1, out=dA)
                key, d_key = (x.k, d_k) if x.e is None else (x.e, d_e)
                _key_gradient(dV, S_before, -1, (key, x.scale_e), (d_key, d_scale_e), chunks, x.e is None)
    return [d_q, d_k, d_v, d_attn, d_state, d_a, d_e, d_scale_q, d_scale_e, d_scale_k, d_gamma, d_kv]


def _propagate_back(
    dS: Tensor, d_state: Tensor, K: Tensor, dV_new: Tensor, W: Tensor | None, gamma: Sequence[Tensor | None],
    sequence: Tensor | None, chunks: slice,
) -> None:  # fmt: skip
    """Propagate the state's gradient through a segment in reverse.

    Args:
        dS: dS[:-1] holds Q^T dO on entry, and the gradients of the states before each chunk on return.
        d_state: [Y, Z, G, K, V], the gradients of the sequences' states after the segment; on return, before it.
        dV_new: holds P^T dO on entry, the gradient of V_new on return.
    """
    n = dS.shape[0] - 1
    d_sequences = d_state.flatten(1, 2)
    if sequence is None:
        dS[n] = d_sequences[0]
    gradients = dS.unbind(0)
    per_chunk = list(zip(*(by_chunk(y, n) for y in (K, dV_new, W)), gamma, strict=True))
    rows = None if sequence is None else sequence[chunks]
    bounds = None if sequence is None else sequence_bounds(sequence, chunks)
    for i in reversed(range(n)):
        K_i, dV_i, W_i, gamma_i = per_chunk[i]
        before, after = gradients[i], gradients[i + 1]
        if rows is not None and (bounds is None or bounds[i + 1]):
            torch.index_select(d_sequences, 0, rows[i : i + 1], out=dS[i + 1 : i + 2])
        dV_i.baddbmm_(K_i, after)
        if gamma_i is None:
            before.add_(after)
        else:
            before.addcmul_(after, gamma_i)
        if W_i is not None:
            before.baddbmm_(W_i.mT, dV_i, alpha=-1)
        if rows is not None and (bounds is None or bounds[i] or i == 0):
            d_sequences.index_copy_(0, rows[i : i + 1], dS[i : i + 1])
    if sequence is None:
        d_sequences[0] = dS[0]


def _key_gradient(
    d_rows: Tensor, S: Tensor, sign: int, keys: tuple[Tensor, Tensor | None], grads: tuple[Tensor, Tensor],
    chunks: slice, accumulate: bool,
) -> None:  # fmt: skip
    """Compute the gradients of keys and of their row scale from those of the scaled keys, sign * d_rows S^T.

    Args:
        d_rows: [n L, R, V]. S: [n L, K, V].
        keys: the keys [N, Z, R, K] and their row scale [N, Z, G, R], None for 1.
        grads: where the gradients of both are stored, for the chunks of a segment.
        accumulate: whether the gradient of the keys is added to the stored one.
    """
    (key, scale), (d_key, d_scale) = keys, grads
    G = d_rows.shape[0] // (key[chunks].shape[0] * key.shape[1])
    if scale is None and G == 1:
        out = d_key[chunks].flatten(0, 1)
        torch.baddbmm(out, d_rows, S.mT, beta=int(accumulate), alpha=sign, out=out)
        return
    by_head = torch.unflatten(torch.bmm(d_rows, S.mT), 0, (-1, key.shape[1], G))
    factor: Tensor | int = sign
    if scale is not None:
        torch.sum((by_head * key[chunks].unsqueeze(2)).mul_(sign), -1, out=d_scale[chunks])
        factor = sign * scale[chunks].unsqueeze(-1)
    if G > 1:
        by_head = torch.sum(by_head.mul_(factor), 2, keepdim=True)
        factor = 1
    out = d_key[chunks].unsqueeze(2)
    if accumulate:
        out.add_(by_head.mul_(factor))
    else:
        torch.mul(by_head, factor, out=out)
