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

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 16


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
    """(I + A)^-1 for strictly lower A [..., M, M], M a multiple of 16.

    Rows of 16 x 16 diagonal blocks by forward substitution, then blocks by block forward substitution: every
    intermediate is a sub-block of the inverse, so keys that are nearly parallel do no harm (a Neumann series
    would explode).
    """
    size = a.shape[-1]
    blocks = size // _BLOCK
    flat = a.reshape(-1, size, size)
    diagonal = flat.unflatten(1, (blocks, _BLOCK)).unflatten(3, (blocks, _BLOCK)).diagonal(0, 1, 3)
    small = diagonal.permute(0, 3, 1, 2).reshape(-1, _BLOCK, _BLOCK)
    inverse = torch.eye(_BLOCK, dtype=a.dtype, device=a.device).repeat(small.shape[0], 1, 1)
    for row in range(1, _BLOCK):
        inverse[:, row : row + 1, :row] = -torch.bmm(small[:, row : row + 1, :row], inverse[:, :row, :row])
    if blocks == 1:
        return inverse.view(a.shape)
    inverse = inverse.view(-1, blocks, _BLOCK, _BLOCK)
    full = torch.zeros_like(flat)
    for i in range(blocks):
        rows = slice(i * _BLOCK, (i + 1) * _BLOCK)
        full[:, rows, rows] = inverse[:, i]
        if i:
            above = torch.bmm(flat[:, rows, : rows.start], full[:, : rows.start, : rows.start])
            full[:, rows, : rows.start] = torch.bmm(inverse[:, i], above).neg_()
    return full.view(a.shape)


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
    for n in range(N):
        if sequence is not None:
            S = last.index_select(0, sequence[n : n + 1])[0]
        if keep:
            firsts[n] = S
        if t is None:
            X = u[n]
        else:
            X = x[n if keep else 0]
            E = w[n] if e is None else e[n]
            R = torch.addcmul(u[n], _rows(scale_e, n, u), _split(torch.bmm(E, S), G), value=-1)
            torch.bmm(t[n].view(Z * G, M, M), R.view(Z * G, M, V), out=X.view(Z * G, M, V))
        O = o[n]
        torch.mul(_split(torch.bmm(q[n], S), G), _rows(scale_q, n, u), out=O)
        O.view(Z * G, C, V).baddbmm_(p[n].view(Z * G, C, M), X.reshape(Z * G, M, V))
        S = _decayed(S, gamma, n)
        S.baddbmm_(w[n].transpose(1, 2), _join(X if scale_w is None else X * scale_w[n].unsqueeze(-1)))
        if inject is not None:
            S += inject[n]
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
    N, Z, C, K = q.shape
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
    dS = d_state[0]  # the gradient of the state after chunk n
    for n in reversed(range(N)):
        S, X, d_O = firsts[n], x[n], d_o[n]
        if sequence is not None:
            dS = d_state.index_select(0, sequence[n : n + 1])[0]
        if inject:
            d_inject[n] = dS
        if gamma is not None:
            product = (S * dS).view(Z, K, G, V).sum(-1)
            d_gamma[n] = product if gamma.shape[2] == K and K > 1 else product.sum(1, keepdim=True)
        XT = X.transpose(-1, -2)
        torch.matmul(d_O, XT, out=d_p[n])
        # through the write: W^T (r^w * X)
        from_state = _split(torch.bmm(w[n], dS), G)
        d_X = torch.matmul(p[n].transpose(-1, -2), d_O).addcmul_(_rows(scale_w, n, x), from_state)
        _through(X, scale_w, w[n], dS, d_w, d_scale_w, n, G, sign=1)
        # through the read: r^q * (Q S)
        d_OQ = _join(d_O if scale_q is None else d_O * scale_q[n].unsqueeze(-1))
        _through(d_O, scale_q, q[n], S, d_q, d_scale_q, n, G, sign=1)
        dS = _decayed(dS, gamma, n).baddbmm_(q[n].transpose(1, 2), d_OQ)
        # through the erase: T (U - r^e * (E S))
        if t is None:
            d_u[n] = d_X
        else:
            d_R = torch.matmul(t[n].transpose(-1, -2), d_X, out=d_u[n])
            torch.matmul(d_R, XT, out=d_a[n]).neg_()
            E = w[n] if e is None else e[n]
            _through(d_R, scale_e, E, S, d_w if e is None else d_e, d_scale_e, n, G, sign=-1, add=e is None)
            scaled = _join(d_R if scale_e is None else d_R * scale_e[n].unsqueeze(-1))
            dS.baddbmm_(E.transpose(1, 2), scaled, alpha=-1)
        if sequence is not None:
            d_state.index_copy_(0, sequence[n : n + 1], dS.unsqueeze(0))
    if sequence is None:
        d_state[0] = dS
    return [
        d_q, d_w, d_u, d_p, d_state, d_a, d_e, d_scale_q, d_scale_e, d_scale_w, d_gamma, d_inject,
    ]  # fmt: skip


def _through(
    d: Tensor, scale: Tensor | None, key: Tensor, S: Tensor, d_key: Tensor, d_scale: Tensor, n: int, G: int,
    sign: int, add: bool = False,
) -> None:  # fmt: skip
    """Gradients of `scale * (key S)` given d [Z, G, R, V]: of key [Z, R, K] and of scale [Z, G, R]."""
    Z, _, R, V = d.shape
    K = key.shape[-1]
    if scale is None:
        part = torch.bmm(_join(d), S.transpose(1, 2))
    else:
        each = torch.matmul(d, S.view(Z, K, G, V).permute(0, 2, 3, 1))  # [Z, G, R, K]
        torch.linalg.vecdot(each, key.unsqueeze(1), out=d_scale[n])
        if sign < 0:
            d_scale[n].neg_()
        part = (each * scale[n].unsqueeze(-1)).sum(1) if G > 1 else each[:, 0] * scale[n, :, 0].unsqueeze(-1)
    if add:
        d_key[n].add_(part, alpha=sign)
    else:
        torch.mul(part, sign, out=d_key[n])


def _rows(scale: Tensor | None, n: int, like: Tensor) -> Tensor:
    return like.new_ones(()) if scale is None else scale[n].unsqueeze(-1)


def _split(y: Tensor, G: int) -> Tensor:
    """[Z, R, G V] -> [Z, G, R, V], a view."""
    return y.unflatten(2, (G, -1)).transpose(1, 2)


def _join(y: Tensor) -> Tensor:
    """[Z, G, R, V] -> [Z, R, G V], a view where G is 1."""
    return y.transpose(1, 2).flatten(2)


def _decayed(S: Tensor, gamma: Tensor | None, n: int) -> Tensor:
    """gamma * S for a state or its gradient [Z, K, G V], always a new tensor."""
    if gamma is None:
        return S.clone()
    return (S.unflatten(2, (gamma.shape[3], -1)) * gamma[n].unsqueeze(-1)).flatten(2)


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
