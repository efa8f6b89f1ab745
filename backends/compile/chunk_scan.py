"""The scan over chunks: one operator with its own backward around a plain loop of matrix products.

Within a chunk that starts from state S,

    X = T (U - r^e * (E S)),   T = (I + A)^-1
    O = r^q * (Q S) + P X
    S <- gamma * S + (r^w * W)^T X + inject

and without an erase term X = U. Everything that depends on one chunk alone (A, P, the row scales r) is made
before, in parallel over chunks, by code that torch.compile fuses. Here chunks go by segments: what needs no state
(T U, T (r^e * E)) is one batched product a segment, then a chain of two products a chunk carries the state, then
the reads of all chunks are one batched product again; the backward likewise, in reverse. As an operator it costs the
compiler one node whatever the number of chunks, and its backward keeps only X, T and the segments' first states.

N chunks, n chunks of a segment, Z batch x key heads, G value heads a key head, L = Z G, C tokens, M micro-steps a
chunk, K key width, V value width, Y sequences
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.compile.inverse import unit_lower_inverse
from deltazoo.backends.compile.operator_body import body
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, operator

# Chunks of a segment: few enough for its half dozen operands to stay in the cache, enough for full batches. It is an
# argument of the operators, for a compiled graph in a cache on disk holds sizes that depend on it.
SEGMENT = 16


class ChunkOperands(NamedTuple):
    """What the scan takes. Row scales and gamma of None are 1; a, e None: nothing is erased; e None: E = W.

    q [N, Z, C, K], e and w [N, Z, M, K], u [N, Z, G, M, V], p [N, Z, G, C, M], a [N, Z, G, M, M] strictly lower,
    scale_q [N, Z, G, C], scale_e and scale_w [N, Z, G, M], gamma [N, Z, G, 1 or K], inject [N, Z, G, K, V],
    state [Y, Z, G, K, V], sequence [N] int64, never falling: the row of `state` that each chunk goes on with; None
    means row 0 for all.
    """

    q: Tensor
    w: Tensor
    u: Tensor
    p: Tensor
    state: Tensor
    a: Tensor | None = None
    e: Tensor | None = None
    scale_q: Tensor | None = None
    scale_e: Tensor | None = None
    scale_w: Tensor | None = None
    gamma: Tensor | None = None
    inject: Tensor | None = None
    sequence: Tensor | None = None


def chunk_scan(operands: ChunkOperands) -> tuple[Tensor, Tensor]:
    """Run the scan; differentiable once. Returns o [N, Z, G, C, V] and the last states [Y, Z, G, K, V]."""
    # Here and not in the operator, so that the compiler writes each operand in this order at once.
    operands = ChunkOperands._make(None if x is None else x.contiguous() for x in operands)
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    if not wants_grad:
        out = _forward_op(*operands, SEGMENT, False)
        return out[0], out[1]
    out = _ChunkScan.apply(*operands)
    return out[0], out[1]


def _forward(
    q: Tensor, w: Tensor, u: Tensor, p: Tensor, state: Tensor, a: Tensor | None, e: Tensor | None,
    scale_q: Tensor | None, scale_e: Tensor | None, scale_w: Tensor | None, gamma: Tensor | None,
    inject: Tensor | None, sequence: Tensor | None, segment: int, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o, the last states, and for the backward (empty without `keep`): x, t, the segments' first states."""
    N, Z, C, K = q.shape
    G, M, V = u.shape[2:]
    o = u.new_empty(N, Z, G, C, V)
    last = state.clone()
    t = None if a is None else unit_lower_inverse(a)
    x = u if a is None else u.new_empty(N if keep else min(N, segment), Z, G, M, V)
    firsts = u.new_zeros(_kept(N, segment) if keep else 0, Z * G, K, V)
    room = u.new_empty(min(N, segment) + 1, Z * G, K, V)
    room[0] = state[0].flatten(0, 1)
    for number, part in enumerate(_segments(N, segment)):
        S = room[: part.stop - part.start + 1]
        if keep:
            firsts[number] = S[0]
        Q, W = _by_value_head(q, scale_q, part, G), _by_value_head(w, scale_w, part, G)
        if t is None:
            X, reads = _flat(u[part]), None
        else:
            X, T = _flat(x[part] if keep else x[: part.stop - part.start]), _flat(t[part])
            torch.bmm(T, _flat(u[part]), out=X)
            reads = torch.bmm(T, _by_value_head(w if e is None else e, scale_e, part, G))
        _carry(S, W, X, reads, _Links.of(part, gamma, inject, state, sequence), last)
        O = _flat(o[part])
        torch.bmm(_flat(p[part]), X, out=O)
        O.baddbmm_(Q, S[:-1].flatten(0, 1))
        room[0] = S[-1]
    kept_x = x if keep and a is not None else u.new_empty(0)
    kept_t = t if keep and t is not None else u.new_empty(0)
    return o, last, kept_x, kept_t, firsts


class _Links(NamedTuple):
    """What stands between the states of a segment: gamma [L, 1 or K, 1] of each chunk, what they inject [n L, K, V],
    and for packed sequences the sequence, whether the chunk is its first, and the state that it then starts from."""

    factors: Sequence[Tensor | None]
    inject: Tensor | None
    starts: Sequence[tuple[Tensor, Tensor, Tensor] | None]

    @classmethod
    def of(
        cls, part: slice, gamma: Tensor | None, inject: Tensor | None, state: Tensor, sequence: Tensor | None
    ) -> "_Links":
        starts: Sequence[tuple[Tensor, Tensor, Tensor] | None] = [None] * (part.stop - part.start)
        if sequence is not None:
            states = state.flatten(1, 2).index_select(0, sequence[part])
            fresh = pad(sequence, (1, 0), value=-1)[part] != sequence[part]
            starts = list(zip(sequence[part].split(1), fresh.unbind(0), states.unbind(0), strict=True))
        return cls(_factors(gamma, part), None if inject is None else _flat(inject[part]), starts)


def _carry(S: Tensor, W: Tensor, X: Tensor, reads: Tensor | None, links: _Links, last: Tensor | None = None) -> None:
    """Carry the state through a segment: fill S [n + 1, L, K, V] from S[0], and finish X = T U - (T E) S.

    S[:-1] are then the chunks' first states, S[-1] the segment's last.

    Args: X: T U, or with reads None X itself; reads: T E; last: where to leave the sequences' last states.
    """
    n = S.shape[0] - 1
    added = S[1:].flatten(0, 1)  # first what a chunk adds to the decayed state, as far as it is known
    if reads is None:
        torch.bmm(W.mT, X, out=added)
        if links.inject is not None:
            added.add_(links.inject)
    elif links.inject is not None:
        added.copy_(links.inject)
    adds = reads is None or links.inject is not None
    slots = S.unbind(0)
    chunks = zip(*(_by_chunk(y, n) for y in (W, X, reads)), links.factors, links.starts, strict=True)
    for (W_i, X_i, R_i, g, start), before, after in zip(chunks, slots[:-1], slots[1:], strict=True):
        if start is not None:
            torch.where(start[1], start[2], before, out=before)
        if R_i is not None:
            X_i.baddbmm_(R_i, before, alpha=-1)
        if not adds:
            torch.mul(before, 1 if g is None else g, out=after)
        elif g is None:
            after.add_(before)
        else:
            after.addcmul_(before, g)
        if R_i is not None:
            after.baddbmm_(W_i.mT, X_i)
        if last is not None and start is not None:
            last.index_copy_(0, start[0], after.view_as(last[:1]))
    if last is not None and links.starts[0] is None:
        last[0] = S[n].view_as(last[0])


def _backward(
    d_o: Tensor, d_last: Tensor, state: Tensor, firsts: Tensor, q: Tensor, w: Tensor, x: Tensor, p: Tensor,
    t: Tensor | None, e: Tensor | None, scale_q: Tensor | None, scale_e: Tensor | None, scale_w: Tensor | None,
    gamma: Tensor | None, inject: Tensor | None, sequence: Tensor | None, segment: int,
) -> list[Tensor]:  # fmt: skip
    """The segments in reverse; every gradient of a segment is made while the segment is in the cache."""
    N, Z, _, K = q.shape
    G, _, V = x.shape[2:]
    d_q, d_w, d_u, d_p = torch.empty_like(q), torch.empty_like(w), torch.empty_like(x), torch.empty_like(p)
    d_a, d_scale_q, d_scale_e, d_scale_w, d_gamma, d_inject = (
        p.new_empty(0) if y is None else torch.empty_like(y) for y in (t, scale_q, scale_e, scale_w, gamma, inject)
    )
    d_e = p.new_empty(0) if t is None or e is None else torch.empty_like(e)
    d_state = d_last.clone()
    S_room, dS_room = (p.new_empty(min(N, segment) + 1, Z * G, K, V) for _ in range(2))
    for number, part in reversed(list(enumerate(_segments(N, segment)))):
        n = part.stop - part.start
        X, P, d_O, d_U = _flat(x[part]), _flat(p[part]), _flat(d_o[part].contiguous()), _flat(d_u[part])
        Q, W = _by_value_head(q, scale_q, part, G), _by_value_head(w, scale_w, part, G)
        S_room[0] = firsts[number]
        links = _Links.of(part, gamma, inject, state, sequence)
        _carry(S_room[: n + 1], W, X, None, links)
        d_X, reads = d_U, None
        if t is not None:
            d_X, T = torch.empty_like(d_U), _flat(t[part])
            reads = torch.bmm(T, _by_value_head(w if e is None else e, scale_e, part, G))
        dS = dS_room[: n + 1]  # the gradient of the state before each chunk, and after the last
        torch.bmm(P.mT, d_O, out=d_X)
        torch.bmm(Q.mT, d_O, out=dS[:-1].flatten(0, 1))
        _carry_back(dS, d_state, W, d_X, reads, links.factors, None if sequence is None else sequence[part])
        before, d_after = S_room[:n].flatten(0, 1), dS[1:].flatten(0, 1)
        torch.bmm(d_O, X.mT, out=_flat(d_p[part]))
        if inject is not None:
            _flat(d_inject[part]).copy_(d_after)
        if gamma is not None:
            product = before * d_after
            d_gamma[part] = product.sum((1, 2) if gamma.shape[3] == 1 else 2).view_as(d_gamma[part])
        _key_gradient(d_O, before, 1, (q, scale_q), (d_q, d_scale_q), part, False)
        _key_gradient(X, d_after, 1, (w, scale_w), (d_w, d_scale_w), part, False)
        if t is not None:
            torch.bmm(T.mT, d_X, out=d_U)
            d_A = _flat(d_a[part])
            torch.baddbmm(d_A, d_U, X.mT, beta=0, alpha=-1, out=d_A)
            key, d_key = (w, d_w) if e is None else (e, d_e)
            _key_gradient(d_U, before, -1, (key, scale_e), (d_key, d_scale_e), part, e is None)
    return [d_q, d_w, d_u, d_p, d_state, d_a, d_e, d_scale_q, d_scale_e, d_scale_w, d_gamma, d_inject]


def _carry_back(
    dS: Tensor, d_state: Tensor, W: Tensor, d_X: Tensor, reads: Tensor | None, factors: Sequence[Tensor | None],
    sequence: Tensor | None,
) -> None:  # fmt: skip
    """Carry the state's gradient back: dS[:-1] holds Q^T dO and becomes the gradients of the chunks' first states,
    d_X holds P^T dO and becomes the gradient of X."""
    n = dS.shape[0] - 1
    rows = d_state.flatten(1, 2)
    if sequence is None:
        dS[n] = rows[0]
    slots = dS.unbind(0)
    chunks = list(zip(*(_by_chunk(y, n) for y in (W, d_X, reads)), factors, strict=True))
    for i in reversed(range(n)):
        W_i, d_X_i, R_i, g = chunks[i]
        before, after = slots[i], slots[i + 1]
        if sequence is not None:
            torch.index_select(rows, 0, sequence[i : i + 1], out=dS[i + 1 : i + 2])
        d_X_i.baddbmm_(W_i, after)
        if g is None:
            before.add_(after)
        else:
            before.addcmul_(after, g)
        if R_i is not None:
            before.baddbmm_(R_i.mT, d_X_i, alpha=-1)
        if sequence is not None:
            rows.index_copy_(0, sequence[i : i + 1], dS[i : i + 1])
    if sequence is None:
        rows[0] = dS[0]


def _key_gradient(
    d: Tensor, S: Tensor, sign: int, keys: tuple[Tensor, Tensor | None], grads: tuple[Tensor, Tensor], part: slice,
    add: bool,
) -> None:  # fmt: skip
    """Gradients of the keys [N, Z, R, K] and of their row scale [N, Z, G, R], through sign * d S^T."""
    (key, scale), (d_key, d_scale) = keys, grads
    G = d.shape[0] // (key[part].shape[0] * key.shape[1])
    if scale is None and G == 1:
        into = d_key[part].flatten(0, 1)
        torch.baddbmm(into, d, S.mT, beta=int(add), alpha=sign, out=into)
        return
    by_value_head = torch.bmm(d, S.mT).unflatten(0, (-1, key.shape[1], G))
    rows: Tensor | int = sign
    if scale is not None:
        torch.sum((by_value_head * key[part].unsqueeze(2)).mul_(sign), -1, out=d_scale[part])
        rows = sign * scale[part].unsqueeze(-1)
    if G > 1:
        by_key = torch.sum(by_value_head.mul_(rows), 2, keepdim=True)
        rows = 1
    else:
        by_key = by_value_head
    into = d_key[part].unsqueeze(2)
    if add:
        into.add_(by_key.mul_(rows))
    else:
        torch.mul(by_key, rows, out=into)


def _segments(N: int, segment: int) -> list[slice]:
    return [slice(first, min(first + segment, N)) for first in range(0, N, segment)]


def _kept(N: int, segment: int) -> int:
    """Rows for the segments' first states: enough, and never 1, for which torch.compile makes a graph of its own."""
    return N // segment + 2


def _flat(x: Tensor) -> Tensor:
    """[n, Z, G, R, S] -> [n L, R, S], a view."""
    return x.flatten(0, 2)


def _by_value_head(keys: Tensor, scale: Tensor | None, part: slice, G: int) -> Tensor:
    """scale * keys of a segment, [n, Z, R, K] -> [n L, R, K]: a view where there is no scale and G is 1."""
    x = keys[part].unsqueeze(2)
    return (x.expand(-1, -1, G, -1, -1) if scale is None else x * scale[part].unsqueeze(-1)).flatten(0, 2)


def _factors(gamma: Tensor | None, part: slice) -> list[Tensor | None]:
    """gamma of each chunk as a factor of the state [L, K, V]."""
    count = part.stop - part.start
    return [None] * count if gamma is None else list(gamma[part].flatten(1, 2).unsqueeze(-1).unbind(0))


def _by_chunk(x: Tensor | None, n: int) -> Sequence[Tensor | None]:
    """[n L, R, S] -> n views [L, R, S]."""
    return [None] * n if x is None else x.unflatten(0, (n, -1)).unbind(0)


def _forward_fake(
    q: Tensor, w: Tensor, u: Tensor, p: Tensor, state: Tensor, a: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    N, Z, C, K = q.shape
    G, M, V = u.shape[2:]
    segment, keep = rest[-2:]
    x = u.new_empty(N, Z, G, M, V) if keep and a is not None else u.new_empty(0)
    t = u.new_empty(N, Z, G, M, M) if keep and a is not None else u.new_empty(0)
    firsts = u.new_empty(_kept(N, segment) if keep else 0, Z * G, K, V)
    return u.new_empty(N, Z, G, C, V), state.new_empty(state.shape), x, t, firsts


def _backward_fake(
    d_o: Tensor, d_last: Tensor, state: Tensor, firsts: Tensor, q: Tensor, w: Tensor, x: Tensor, p: Tensor,
    t: Tensor | None, e: Tensor | None, scale_q: Tensor | None, scale_e: Tensor | None, scale_w: Tensor | None,
    gamma: Tensor | None, inject: Tensor | None, sequence: Tensor | None, segment: int,
) -> list[Tensor]:  # fmt: skip
    def like(tensor: Tensor | None) -> Tensor:
        return p.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    d_e = like(e) if t is not None else p.new_empty(0)
    return [
        like(q), like(w), like(x), like(p), like(d_last), like(t), d_e,
        like(scale_q), like(scale_e), like(scale_w), like(gamma), like(inject),
    ]  # fmt: skip


_forward_op = operator(
    "chunk_scan(Tensor q, Tensor w, Tensor u, Tensor p, Tensor state, Tensor? a, Tensor? e, Tensor? scale_q, "
    "Tensor? scale_e, Tensor? scale_w, Tensor? gamma, Tensor? inject, Tensor? sequence, int segment, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    body(_forward),
    _forward_fake,
)
_backward_op = operator(
    "chunk_scan_backward(Tensor d_o, Tensor d_last, Tensor state, Tensor firsts, Tensor q, Tensor w, Tensor x, "
    "Tensor p, Tensor? t, Tensor? e, Tensor? scale_q, Tensor? scale_e, Tensor? scale_w, Tensor? gamma, "
    "Tensor? inject, Tensor? sequence, int segment) -> Tensor[]",
    body(_backward, as_it_lies=1),  # d_o is copied a segment at a time
    _backward_fake,
)


@cache_forward_signature
class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(*operands: Any) -> tuple[Tensor, ...]:
        return _forward_op(*operands, SEGMENT, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x = ChunkOperands(*inputs)
        o, _, kept_x, t, firsts = output
        erases = x.a is not None
        ctx.mark_non_differentiable(kept_x, t, firsts)
        ctx.set_materialize_grads(False)
        ctx.o_shape, ctx.segment = o.shape, SEGMENT
        ctx.save_for_backward(
            x.state, firsts, x.q, x.w, kept_x if erases else x.u, x.p, t if erases else None,
            x.e, x.scale_q, x.scale_e, x.scale_w, x.gamma, x.inject, x.sequence,
        )  # fmt: skip

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor | None, d_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        state = saved[0]
        d_o = state.new_zeros(ctx.o_shape) if d_o is None else d_o
        d_last = state.new_zeros(state.shape) if d_last is None else d_last
        grads = _backward_op(d_o, d_last, *saved, ctx.segment)
        wanted = ctx.needs_input_grad
        return (*(g if need else None for g, need in zip(grads, wanted, strict=False)), None)
