"""The scan over chunks: one operator with its own backward around a plain loop of matrix products.

Within a chunk that starts from state S,

    X = T (U - r^e * (E S)),   T = (I + A)^-1
    O = r^q * (Q S) + P X
    S <- gamma * S + (r^w * W)^T X + inject

and without an erase term X = U. Everything that depends on one chunk alone (A, P, the row scales r) is made
before, in parallel over chunks, by code that torch.compile fuses. Here chunks go by segments: what needs no state
(T U, T (r^e * E)) is one batched product a segment, then a chain of two products a chunk carries the state, then
the reads of all chunks are one batched product again; the backward likewise, in reverse. As an operator it costs the
compiler one node whatever the number of chunks, and its backward keeps only X, T and the chunks' first states.

N chunks, n chunks of a segment, Z batch x key heads, G value heads a key head, L = Z G, C tokens, M micro-steps a
chunk, K key width, V value width, Y sequences
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltazoo.backends.compile.inverse import unit_lower_inverse

# Numbers in a segment's largest operand: its half dozen of them stay in the cache, its products in full batches.
_SEGMENT = 1 << 18


class ChunkOperands(NamedTuple):
    """What the scan takes. Row scales and gamma of None are 1; a, e None: nothing is erased; e None: E = W.

    q [N, Z, C, K], e and w [N, Z, M, K], u [N, Z, G, M, V], p [N, Z, G, C, M], a [N, Z, G, M, M] strictly lower,
    scale_q [N, Z, G, C], scale_e and scale_w [N, Z, G, M], gamma [N, Z, G, 1 or K], inject [N, Z, G, K, V],
    state [Y, Z, G, K, V], sequence [N] int64: the row of `state` that each chunk goes on with; None means row 0.
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
        out = _forward_op(*operands, False)
        return out[0], out[1]
    out = _ChunkScan.apply(*operands)
    return out[0], out[1]


def _forward(
    q: Tensor, w: Tensor, u: Tensor, p: Tensor, state: Tensor, a: Tensor | None, e: Tensor | None,
    scale_q: Tensor | None, scale_e: Tensor | None, scale_w: Tensor | None, gamma: Tensor | None,
    inject: Tensor | None, sequence: Tensor | None, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o, the last states, and for the backward (empty without `keep`): x, t, the chunks' first states."""
    N, Z, C, K = q.shape
    G, M, V = u.shape[2:]
    o = u.new_empty(N, Z, G, C, V)
    last = state.clone()
    t = None if a is None else unit_lower_inverse(a)
    parts = list(_segments(N, Z * G * max(C, M) * max(K, V)))
    room = N if keep else parts[0].stop if parts else 0
    x = u if a is None else u.new_empty(room, Z, G, M, V)
    states = u.new_empty(room + 1, Z * G, K, V)
    for part in parts:
        here = part if keep else slice(0, part.stop - part.start)
        S = states[here.start : here.stop + 1]
        Q, W = _by_value_head(q, scale_q, part, G), _by_value_head(w, scale_w, part, G)
        X = _flat(u[part]) if t is None else _flat(x[here])
        reads = None
        based = t is None or inject is not None
        if t is None:
            torch.bmm(W.mT, X, out=S[1:].flatten(0, 1))
        else:
            T = _flat(t[part])
            torch.bmm(T, _flat(u[part]), out=X)
            reads = torch.bmm(T, _by_value_head(w if e is None else e, scale_e, part, G))
            if inject is not None:
                S[1:].flatten(0, 1).copy_(_flat(inject[part]))
        _carry(S, last, W, X, reads, _factors(gamma, part), None if sequence is None else sequence[part], based)
        O = _flat(o[part])
        torch.bmm(_flat(p[part]), X, out=O)
        O.baddbmm_(Q, S[:-1].flatten(0, 1))
    kept_x = x if keep and a is not None else u.new_empty(0)
    kept_t = t if keep and t is not None else u.new_empty(0)
    return o, last, kept_x, kept_t, states if keep else u.new_empty(0)


def _carry(
    S: Tensor, last: Tensor, W: Tensor, X: Tensor, reads: Tensor | None, factors: list[Tensor | None],
    sequence: Tensor | None, based: bool,
) -> None:  # fmt: skip
    """Carry the state through a segment: fill S [n + 1, L, K, V], finish X = T U - (T E) S, leave the last states.

    `based`: S[1:] holds what each chunk adds beside W^T X (or all that it adds, where nothing reads).
    """
    n = S.shape[0] - 1
    rows = last.flatten(1, 2)  # [Y, L, K, V]
    if sequence is None:
        S[0].copy_(rows[0])
    slots = S.unbind(0)
    chunks = zip(*(_by_chunk(y, n) for y in (W, X, reads)), factors, strict=True)
    for i, (W_i, X_i, R_i, g) in enumerate(chunks):
        before, after = slots[i], slots[i + 1]
        if sequence is not None:
            torch.index_select(rows, 0, sequence[i : i + 1], out=S[i : i + 1])
        if R_i is not None:
            X_i.baddbmm_(R_i, before, alpha=-1)
        if not based:
            torch.mul(before, 1 if g is None else g, out=after)
        elif g is None:
            after.add_(before)
        else:
            after.addcmul_(before, g)
        if R_i is not None:
            after.baddbmm_(W_i.mT, X_i)
        if sequence is not None:
            rows.index_copy_(0, sequence[i : i + 1], S[i + 1 : i + 2])
    if sequence is None:
        rows[0].copy_(S[n])


def _backward(
    d_o: Tensor, d_last: Tensor, q: Tensor, w: Tensor, x: Tensor, p: Tensor, t: Tensor | None, states: Tensor,
    e: Tensor | None, scale_q: Tensor | None, scale_e: Tensor | None, scale_w: Tensor | None, gamma: Tensor | None,
    sequence: Tensor | None, inject: bool,
) -> list[Tensor]:  # fmt: skip
    """The segments in reverse; every gradient of a segment is made while the segment is in the cache."""
    N, Z, C, K = q.shape
    G, M, V = x.shape[2:]
    d_q, d_w, d_u, d_p = torch.empty_like(q), torch.empty_like(w), torch.empty_like(x), torch.empty_like(p)
    d_a = p.new_empty(0) if t is None else torch.empty_like(t)
    d_e = p.new_empty(0) if t is None or e is None else torch.empty_like(e)
    d_scale_q, d_scale_e, d_scale_w, d_gamma = (
        p.new_empty(0) if s is None else torch.empty_like(s) for s in (scale_q, scale_e, scale_w, gamma)
    )
    d_inject = p.new_empty(N, Z, G, K, V) if inject else p.new_empty(0)
    d_state = d_last.clone()
    parts = list(_segments(N, Z * G * max(C, M) * max(K, V)))
    scratch = p.new_empty(parts[0].stop + 1 if parts else 0, Z * G, K, V)
    for part in reversed(parts):
        dS = scratch[: part.stop - part.start + 1]  # after a chunk: dS[i + 1]; before it: dS[i]
        S = states[part].flatten(0, 1)
        X, P, d_O, d_U = _flat(x[part]), _flat(p[part]), _flat(d_o[part]), _flat(d_u[part])
        Q, W = _by_value_head(q, scale_q, part, G), _by_value_head(w, scale_w, part, G)
        E = reads = None
        d_X = d_U
        if t is not None:
            T = _flat(t[part])
            E = _by_value_head(w if e is None else e, scale_e, part, G)
            reads, d_X = torch.bmm(T, E), torch.empty_like(d_U)
        torch.bmm(P.mT, d_O, out=d_X)
        torch.bmm(Q.mT, d_O, out=dS[:-1].flatten(0, 1))
        _carry_back(dS, d_state, W, d_X, reads, _factors(gamma, part), None if sequence is None else sequence[part])
        after = dS[1:].flatten(0, 1)
        torch.bmm(d_O, X.mT, out=_flat(d_p[part]))
        if inject:
            _flat(d_inject[part]).copy_(after)
        if gamma is not None:
            d_gamma[part] = _d_gamma(S, after, gamma.shape[3]).view_as(d_gamma[part])
        _key_gradient(d_O, S, 1, (q, scale_q), (d_q, d_scale_q), part, False)
        _key_gradient(X, after, 1, (w, scale_w), (d_w, d_scale_w), part, False)
        if t is not None:
            torch.bmm(T.mT, d_X, out=d_U)
            d_A = _flat(d_a[part])
            torch.baddbmm(d_A, d_U, X.mT, beta=0, alpha=-1, out=d_A)
            key, d_key = (w, d_w) if e is None else (e, d_e)
            _key_gradient(d_U, S, -1, (key, scale_e), (d_key, d_scale_e), part, e is None)
    return [d_q, d_w, d_u, d_p, d_state, d_a, d_e, d_scale_q, d_scale_e, d_scale_w, d_gamma, d_inject]


def _carry_back(
    dS: Tensor, d_state: Tensor, W: Tensor, d_X: Tensor, reads: Tensor | None, factors: list[Tensor | None],
    sequence: Tensor | None,
) -> None:  # fmt: skip
    """Carry the state's gradient back: dS[:-1] holds Q^T dO and becomes the gradients of the chunks' first states,
    d_X holds P^T dO and becomes the gradient of X."""
    n = dS.shape[0] - 1
    rows = d_state.flatten(1, 2)
    if sequence is None:
        dS[n].copy_(rows[0])
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
        rows[0].copy_(dS[0])


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
    by_value_head = torch.bmm(d, S.mT).mul_(sign).unflatten(0, (-1, key.shape[1], G))
    if scale is not None:
        d_scale[part] = (by_value_head * key[part].unsqueeze(2)).sum(-1)
        by_value_head *= scale[part].unsqueeze(-1)
    if add:
        d_key[part] += by_value_head.sum(2)
    else:
        torch.sum(by_value_head, 2, out=d_key[part])


def _d_gamma(S: Tensor, dS: Tensor, rows: int) -> Tensor:
    """The gradient of gamma in gamma * S, for S [n L, K, V]: a number a head, or [K]."""
    product = S * dS
    return product.sum((1, 2)) if rows == 1 else product.sum(-1)


def _segments(N: int, numbers: int) -> Iterator[slice]:
    """Cut N chunks of so many numbers each into segments."""
    step = max(1, _SEGMENT // max(numbers, 1))
    return (slice(first, min(first + step, N)) for first in range(0, N, step))


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


_LIBRARY = torch.library.Library("deltazoo", "FRAGMENT")
_LIBRARY.define(
    "chunk_scan(Tensor q, Tensor w, Tensor u, Tensor p, Tensor state, Tensor? a, Tensor? e, Tensor? scale_q, "
    "Tensor? scale_e, Tensor? scale_w, Tensor? gamma, Tensor? inject, Tensor? sequence, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "chunk_scan_backward(Tensor d_o, Tensor d_last, Tensor q, Tensor w, Tensor x, Tensor p, Tensor? t, "
    "Tensor states, Tensor? e, Tensor? scale_q, Tensor? scale_e, Tensor? scale_w, Tensor? gamma, "
    "Tensor? sequence, bool inject) -> Tensor[]"
)


def _forward_impl(*arguments: Any) -> tuple[Tensor, ...]:
    with torch.autocast(arguments[0].device.type, enabled=False):
        return _forward(*_contiguous(arguments))


def _backward_impl(*arguments: Any) -> list[Tensor]:
    with torch.autocast(arguments[0].device.type, enabled=False):
        return _backward(*_contiguous(arguments))


def _contiguous(arguments: tuple[Any, ...]) -> list[Any]:
    return [x.contiguous() if isinstance(x, Tensor) else x for x in arguments]


def _forward_fake(
    q: Tensor, w: Tensor, u: Tensor, p: Tensor, state: Tensor, a: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    N, Z, C, K = q.shape
    G, M, V = u.shape[2:]
    keep = rest[-1]
    x = u.new_empty(N, Z, G, M, V) if keep and a is not None else u.new_empty(0)
    t = u.new_empty(N, Z, G, M, M) if keep and a is not None else u.new_empty(0)
    states = u.new_empty(N + 1, Z * G, K, V) if keep else u.new_empty(0)
    return u.new_empty(N, Z, G, C, V), state.new_empty(state.shape), x, t, states


def _backward_fake(
    d_o: Tensor, d_last: Tensor, q: Tensor, w: Tensor, x: Tensor, p: Tensor, t: Tensor | None, states: Tensor,
    e: Tensor | None, scale_q: Tensor | None, scale_e: Tensor | None, scale_w: Tensor | None, gamma: Tensor | None,
    sequence: Tensor | None, inject: bool,
) -> list[Tensor]:  # fmt: skip
    def like(tensor: Tensor | None) -> Tensor:
        return p.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    d_e = like(e) if t is not None else p.new_empty(0)
    d_inject = states.new_empty(x.shape[0], *d_last.shape[1:]) if inject else p.new_empty(0)
    return [
        like(q), like(w), like(x), like(p), like(d_last), like(t), d_e,
        like(scale_q), like(scale_e), like(scale_w), like(gamma), d_inject,
    ]  # fmt: skip


_LIBRARY.impl("chunk_scan", _forward_impl, "CompositeExplicitAutograd")
_LIBRARY.impl("chunk_scan_backward", _backward_impl, "CompositeExplicitAutograd")
torch.library.register_fake("deltazoo::chunk_scan", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("deltazoo::chunk_scan_backward", _backward_fake, lib=_LIBRARY)
_forward_op = torch.ops.deltazoo.chunk_scan.default
_backward_op = torch.ops.deltazoo.chunk_scan_backward.default


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(*operands: Any) -> tuple[Tensor, ...]:
        return _forward_op(*operands, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x = ChunkOperands(*inputs)
        o, _, kept_x, t, states = output
        ctx.erases, ctx.injects = x.a is not None, x.inject is not None
        ctx.mark_non_differentiable(kept_x, t, states)
        ctx.set_materialize_grads(False)
        ctx.o_shape, ctx.state_shape = o.shape, x.state.shape
        ctx.save_for_backward(
            x.q, x.w, kept_x if ctx.erases else x.u, x.p, t if ctx.erases else None, states,
            x.e, x.scale_q, x.scale_e, x.scale_w, x.gamma, x.sequence,
        )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        q = saved[0]
        d_o = q.new_zeros(ctx.o_shape) if d_o is None else d_o
        d_last = q.new_zeros(ctx.state_shape) if d_last is None else d_last
        grads = _backward_op(d_o, d_last, *saved, ctx.injects)
        wanted = ctx.needs_input_grad
        return (*(g if need else None for g, need in zip(grads, wanted, strict=False)), None)
