"""The scan over chunks: one operator with its own backward around a plain loop of matrix products.

Within a chunk that starts from state S,

    X = T (U - r^e * (E S)),   T = (I + A)^-1
    O = r^q * (Q S) + P X
    S <- gamma * S + W^T (r^w * X) + inject

and without an erase term X = U. Everything that depends on one chunk alone (A, P, the row scales r) is made
before, in parallel over chunks, by code that torch.compile fuses; this loop holds what is sequential. As an
operator it costs the compiler one node whatever the number of chunks, and its backward keeps only the chunks'
first states. N chunks, Z batch x key heads, G value heads a key head, C tokens, M micro-steps a chunk, K key
width, V value width, Y sequences
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

_BLOCK = 8


class ChunkOperands(NamedTuple):
    """What the scan takes. Row scales and gamma of None are 1; a, e None: nothing is erased; e None: E = W.

    q [N, Z, C, K], e and w [N, Z, M, K], u [N, Z, G, M, V], p [N, Z, G, C, M], a [N, Z, G, M, M] strictly lower,
    scale_q [N, Z, G, C], scale_e and scale_w [N, Z, G, M], gamma [N, Z, 1 or K, G], inject [N, Z, K, G V],
    state [Y, Z, K, G V], sequence [N] int64: the row of `state` that each chunk goes on with; None means row 0.
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
    """Run the scan; differentiable once. Returns o [N, Z, G, C, V] and the last states [Y, Z, K, G V]."""
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    if not wants_grad:
        out = _forward_op(*operands, False)
        return out[0], out[1]
    out = _ChunkScan.apply(*operands)
    return out[0], out[1]


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A [..., M, M].

    Diagonal blocks of 8 by forward substitution, then pairs of blocks are merged, [[X, 0], [-Y L X, Y]], until one
    is left. Every intermediate is a block of the inverse, so keys that are nearly parallel do no harm (a Neumann
    series would explode).
    """
    M = a.shape[-1]
    size = max(_BLOCK, 1 << (M - 1).bit_length())
    if size > M:
        return unit_lower_inverse(pad(a, (0, size - M, 0, size - M)))[..., :M, :M].contiguous()
    blocks = _diagonal_blocks(a.reshape(-1, size, size), _BLOCK).reshape(-1, _BLOCK, _BLOCK)
    inverse = torch.eye(_BLOCK, dtype=a.dtype, device=a.device).repeat(blocks.shape[0], 1, 1)
    for row in range(1, _BLOCK):
        inverse[:, row : row + 1, :row] = -torch.bmm(blocks[:, row : row + 1, :row], inverse[:, :row, :row])
    s = _BLOCK
    while s < size:
        lower = _diagonal_blocks(a.reshape(-1, size, size), 2 * s)[..., s:, :s].reshape(-1, s, s)
        upper, under = inverse.view(-1, 2, s, s).unbind(1)
        inverse = a.new_zeros(lower.shape[0], 2 * s, 2 * s)
        inverse[:, :s, :s], inverse[:, s:, s:] = upper, under
        inverse[:, s:, :s] = torch.bmm(torch.bmm(under, lower), upper).neg_()
        s *= 2
    return inverse.view(a.shape)


def _diagonal_blocks(a: Tensor, size: int) -> Tensor:
    """[L, M, M] -> [L, M / size, size, size], a view."""
    count = a.shape[-1] // size
    return a.unflatten(1, (count, size)).unflatten(3, (count, size)).diagonal(0, 1, 3).movedim(-1, 1)


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
    x = u if a is None else u.new_empty(N if keep else 1, Z, G, M, V)
    firsts = u.new_empty(N if keep else 0, Z, K, G * V)
    S = last[0]
    each = (q, w, w if e is None else e, u, p, t, o, scale_q, scale_e, scale_w, gamma, inject)
    for n, (Q, W, E, U, P, T, O, r_q, r_e, r_w, g, D) in enumerate(zip(*map(_chunks(N), each), strict=True)):
        if sequence is not None:
            S = last.index_select(0, sequence[n : n + 1])[0]
        if keep:
            firsts[n] = S
        X = U
        if T is not None:
            X = x[n if keep else 0]
            R = _minus_read(U, E, S, r_e)
            torch.bmm(T.view(Z * G, M, M), R.view(Z * G, M, V), out=X.view(Z * G, M, V))
        O_flat = O.view(Z * G, C, V)
        torch.bmm(P.view(Z * G, C, M), X.view(Z * G, M, V), out=O_flat)
        if r_q is None and G == 1:
            O_flat.baddbmm_(Q, S)
        else:
            O.addcmul_(_rows(r_q, U), _split(torch.bmm(Q, S), G))
        S = _decayed(S, g).baddbmm_(W.transpose(1, 2), _joined(X, r_w))
        if D is not None:
            S += D
        if sequence is not None:
            last.index_copy_(0, sequence[n : n + 1], S.unsqueeze(0))
    if sequence is None:
        last[0] = S
    kept_x = x if keep and a is not None else u.new_empty(0)
    kept_t = t if keep and t is not None else u.new_empty(0)
    return o, last, kept_x, kept_t, firsts


def _backward(
    d_o: Tensor, d_last: Tensor, q: Tensor, w: Tensor, x: Tensor, p: Tensor, t: Tensor | None, firsts: Tensor,
    e: Tensor | None, scale_q: Tensor | None, scale_e: Tensor | None, scale_w: Tensor | None, gamma: Tensor | None,
    sequence: Tensor | None, inject: bool,
) -> list[Tensor]:  # fmt: skip
    """The reverse loop; every gradient of a chunk is made while the chunk is in the cache."""
    N, Z, C = q.shape[:3]
    G, M, V = x.shape[2:]
    erases = t is not None
    d_q, d_w, d_u, d_p = torch.empty_like(q), torch.empty_like(w), torch.empty_like(x), torch.empty_like(p)
    d_a = p.new_empty(N, Z, G, M, M) if erases else p.new_empty(0)
    d_e = torch.empty_like(w) if erases and e is not None else p.new_empty(0)
    d_scale_q, d_scale_e, d_scale_w, d_gamma = (
        p.new_empty(0) if s is None else torch.empty_like(s) for s in (scale_q, scale_e, scale_w, gamma)
    )
    d_inject = torch.empty_like(firsts) if inject else p.new_empty(0)
    d_state = d_last.clone()
    dS = d_state[0]  # the gradient of the state after the chunk
    each = (q, w, w if e is None else e, x, p, t, firsts, d_o, scale_q, scale_e, scale_w, gamma)
    chunks = list(zip(range(N), *map(_chunks(N), each), strict=True))
    for n, Q, W, E, X, P, T, S, d_O, r_q, r_e, r_w, g in reversed(chunks):
        if sequence is not None:
            dS = d_state.index_select(0, sequence[n : n + 1])[0]
        if inject:
            d_inject[n] = dS
        if g is not None:
            d_gamma[n] = _d_gamma(S, dS, g.shape[1], G)
        XT = X.view(Z * G, M, V).transpose(1, 2)
        d_O_flat = d_O.view(Z * G, C, V)
        torch.bmm(d_O_flat, XT, out=d_p[n].view(Z * G, C, M))
        # through the write: W^T (r^w * X)
        d_X = torch.bmm(P.view(Z * G, C, M).transpose(1, 2), d_O_flat)
        if r_w is None and G == 1:
            d_X.baddbmm_(W, dS)
        else:
            d_X.view(Z, G, M, V).addcmul_(_rows(r_w, X), _split(torch.bmm(W, dS), G))
        _through(X, r_w, W, dS, d_w[n], d_scale_w, n, 0, 1)
        # through the read: r^q * (Q S)
        _through(d_O, r_q, Q, S, d_q[n], d_scale_q, n, 0, 1)
        dS = _decayed(dS, g).baddbmm_(Q.transpose(1, 2), _joined(d_O, r_q))
        # through the erase: T (U - r^e * (E S))
        if T is None:
            d_u[n] = d_X.view(Z, G, M, V)
        else:
            d_R = d_u[n]
            torch.bmm(T.view(Z * G, M, M).transpose(1, 2), d_X, out=d_R.view(Z * G, M, V))
            d_A = d_a[n].view(Z * G, M, M)
            torch.baddbmm(d_A, d_R.view(Z * G, M, V), XT, beta=0, alpha=-1, out=d_A)
            _through(d_R, r_e, E, S, d_w[n] if e is None else d_e[n], d_scale_e, n, int(e is None), -1)
            dS.baddbmm_(E.transpose(1, 2), _joined(d_R, r_e), alpha=-1)
        if sequence is not None:
            d_state.index_copy_(0, sequence[n : n + 1], dS.unsqueeze(0))
    if sequence is None:
        d_state[0] = dS
    return [
        d_q, d_w, d_u, d_p, d_state, d_a, d_e, d_scale_q, d_scale_e, d_scale_w, d_gamma, d_inject,
    ]  # fmt: skip


def _chunks(N: int) -> Callable[[Tensor | None], Sequence[Any]]:
    """Views of an operand, chunk by chunk, made at once; an absent one is absent from every chunk."""
    return lambda x: [None] * N if x is None else x.unbind(0)


def _through(
    d: Tensor, scale: Tensor | None, key: Tensor, S: Tensor, d_key: Tensor, d_scale: Tensor, n: int, add: int, sign: int
) -> None:
    """Gradients of `sign * scale * (key S)` given d [Z, G, R, V]: of key [Z, R, K], added or set, and of scale."""
    torch.baddbmm(d_key, _joined(d, scale), S.transpose(1, 2), beta=add, alpha=sign, out=d_key)
    if scale is not None:
        d_scale[n] = (d * _split(torch.bmm(key, S), d.shape[1])).sum(-1).mul_(sign)


def _minus_read(u: Tensor, key: Tensor, S: Tensor, scale: Tensor | None) -> Tensor:
    """u - scale * (key S): [Z, G, M, V]."""
    if scale is None and u.shape[1] == 1:
        return torch.baddbmm(u[:, 0], key, S, alpha=-1).unsqueeze(1)
    return torch.addcmul(u, _rows(scale, u), _split(torch.bmm(key, S), u.shape[1]), value=-1)


def _d_gamma(S: Tensor, dS: Tensor, rows: int, G: int) -> Tensor:
    """The gradient of gamma [Z, 1 or K, G] in gamma * S, for S [Z, K, G V]."""
    Z, K, _ = S.shape
    if rows == 1 and G == 1:
        return torch.bmm(S.view(Z, 1, -1), dS.view(Z, -1, 1))
    product = (S * dS).view(Z, K, G, -1).sum(-1)
    return product if rows == K else product.sum(1, keepdim=True)


def _rows(scale: Tensor | None, like: Tensor) -> Tensor:
    """A row scale [Z, G, R] as a factor of [Z, G, R, V]."""
    return like.new_ones(()) if scale is None else scale.unsqueeze(-1)


def _split(y: Tensor, G: int) -> Tensor:
    """[Z, R, G V] -> [Z, G, R, V], a view."""
    return y.unflatten(2, (G, -1)).transpose(1, 2)


def _joined(y: Tensor, scale: Tensor | None) -> Tensor:
    """scale * y, [Z, G, R, V] -> [Z, R, G V]; a view where there is no scale and G is 1."""
    return (y if scale is None else y * scale.unsqueeze(-1)).transpose(1, 2).flatten(2)


def _decayed(S: Tensor, gamma: Tensor | None) -> Tensor:
    """gamma * S for a state or its gradient [Z, K, G V], always a new tensor."""
    if gamma is None:
        return S.clone()
    return (S.unflatten(2, (gamma.shape[2], -1)) * gamma.unsqueeze(-1)).flatten(2)


_LIBRARY = torch.library.Library("deltazoo", "FRAGMENT")
_LIBRARY.define(
    "chunk_scan(Tensor q, Tensor w, Tensor u, Tensor p, Tensor state, Tensor? a, Tensor? e, Tensor? scale_q, "
    "Tensor? scale_e, Tensor? scale_w, Tensor? gamma, Tensor? inject, Tensor? sequence, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "chunk_scan_backward(Tensor d_o, Tensor d_last, Tensor q, Tensor w, Tensor x, Tensor p, Tensor? t, "
    "Tensor firsts, Tensor? e, Tensor? scale_q, Tensor? scale_e, Tensor? scale_w, Tensor? gamma, "
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
    firsts = u.new_empty(N if keep else 0, Z, K, G * V)
    return u.new_empty(N, Z, G, C, V), state.new_empty(state.shape), x, t, firsts


def _backward_fake(
    d_o: Tensor, d_last: Tensor, q: Tensor, w: Tensor, x: Tensor, p: Tensor, t: Tensor | None, firsts: Tensor,
    e: Tensor | None, scale_q: Tensor | None, scale_e: Tensor | None, scale_w: Tensor | None, gamma: Tensor | None,
    sequence: Tensor | None, inject: bool,
) -> list[Tensor]:  # fmt: skip
    def like(tensor: Tensor | None) -> Tensor:
        return p.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    d_e = like(e) if t is not None else p.new_empty(0)
    d_inject = like(firsts) if inject else p.new_empty(0)
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
        o, _, kept_x, t, firsts = output
        ctx.erases, ctx.injects = x.a is not None, x.inject is not None
        ctx.mark_non_differentiable(kept_x, t, firsts)
        ctx.set_materialize_grads(False)
        ctx.o_shape, ctx.state_shape = o.shape, x.state.shape
        ctx.save_for_backward(
            x.q, x.w, kept_x if ctx.erases else x.u, x.p, t if ctx.erases else None, firsts,
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
