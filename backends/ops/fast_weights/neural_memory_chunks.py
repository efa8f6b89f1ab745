"""The neural memory of Titans, chunk by chunk in plain torch: forward and backward.

A layer with weights M and momentum S processes pairs (x_s, y_s), of which x_s y_s^T is the gradient of its weights:

    S_t = eta_t S_(t-1) - theta_t x_t y_t^T,    M_t = a_t M_(t-1) + S_t,    a_t = 1 - alpha_t

The gradients of a chunk are taken at the memory of its start, so that a read of M_t by r_t is

    r_t M_t = A_t r_t M + B_t r_t S - sum over s <= t of C_ts theta_s (r_t . x_s) y_s

with M, S at the start of the chunk, and coefficients that are sums of products of gates, all in [0, 1]:

    E_ts = eta_(s+1) .. eta_t,   A_ts = a_(s+1) .. a_t,   C = A E
    E_t = eta_1 .. eta_t,        A_t = a_1 .. a_t,        B = A E_t

Each product is a cumulative product, forward and backward: no ratio, which would be 0 / 0 after a gate of 0.

With two layers (M1, M2) and K, V of the chunk, at the memory M1', M2' of its start,

    h = K M1',   X2 = silu(h),   Y2 = 2 (X2 M2' - V),   X1 = K,   Y1 = (Y2 M2'^T) silu'(h)
    O_t = silu(q_t M1_t) M2_t

and with one layer X1 = K, Y1 = 2 (K M1' - V), O_t = q_t M1_t.

N sequences, H heads, M tokens per chunk, E head width, F inner width
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.ops.fast_weights.spans import Chunks, rows_like, unpad
from deltazoo.backends.update.base import state_dtype

SEGMENT = 16  # chunks from one checkpoint to the next


class MemoryOperands(NamedTuple):
    """The operands of the memory.

    Args:
        q, k, v: [B, T, H, E], in any dtype.
        eta, theta, alpha: [B, T, H], momentum, rate and weight decay; these and all others in float32 (float64).
        first: the layers before the first token of a sequence, [H, E, F] and [H, F, E], or one of [H, E, E].
        state: the layers of M, of M' and of S, each [N, H, ..], for sequences that are not fresh. []: all are.
        spans: [N, 4] int32 (spans.py).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    theta: Tensor
    alpha: Tensor
    first: list[Tensor]
    state: list[Tensor]
    spans: Tensor


class MemoryGradients(NamedTuple):
    """The gradients of the operands of the same names; start: of the state before the first token, [N, ..] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    theta: Tensor
    alpha: Tensor
    start: list[Tensor]


class Gates(NamedTuple):
    """The gates of a chunk and their products, [N, H, M] for one index and [N, H, M, M] for t, s.

    Args:
        eta, a, theta: neutral (1, 1, 0) at places without a token. present: 1 at tokens, else 0.
        E, A: E_ts and A_ts. E0, A0: E_t and A_t. C: C_ts; B: B_t.
    """

    eta: Tensor
    a: Tensor
    theta: Tensor
    present: Tensor
    E: Tensor
    A: Tensor
    C: Tensor
    E0: Tensor
    A0: Tensor
    B: Tensor


def forward(x: MemoryOperands, size: int, segment: int, save: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the outputs, the new state, and with `save` M and S of all layers at the start of each segment.

    Returns: o [B, T, H, E]; the layers of M, M' and S; checkpoints [slots, H, 2 layers, E F], or empty.
    """
    dtype, chunks = state_dtype(x.q.dtype), _chunks(x, size)
    o = rows_like(x.q)
    M, start, S = start_state(x)
    checkpoints = _new_checkpoints(x, chunks.size, segment if save else 0)
    for i in range(chunks.count):
        if save and i % segment == 0:
            slot = torch.where(chunks.has_tokens(i), first_slot(x.spans, chunks.size, segment) + i // segment, -1)
            checkpoints[slot] = torch.stack([y.flatten(2) for y in (*M, *S)], 2)
        start = _chunk_start(chunks, i, M, start)
        q, k, v = (chunks.load(i, y, dtype) for y in (x.q, x.k, x.v))
        gates = _gates(chunks, i, x)
        pairs = _pairs(start, k, v)
        r = q
        for j, (left, right) in enumerate(pairs):
            r = _read(gates, F.silu(r) if j else r, left, right, M[j], S[j])
        chunks.store(i, o, r)
        M, S = _advance(gates, pairs, M, S)
    return unpad(o, x.q), [*M, *start, *S], checkpoints[:-1]


def backward(
    x: MemoryOperands, checkpoints: Tensor, d_o: Tensor, d_state: list[Tensor], size: int, segment: int
) -> MemoryGradients:
    """Return the gradients. Args: d_state: those of the layers of M, M' and S of the new state."""
    dtype, chunks = state_dtype(x.q.dtype), _chunks(x, size)
    depth = len(x.first)
    results = [rows_like(y) for y in x[:6]]
    dM, d_start, dS = d_state[:depth], d_state[depth : 2 * depth], d_state[2 * depth :]
    first_start = start_state(x)[1]
    for first in reversed(range(0, chunks.count, segment)):
        active = chunks.has_tokens(first)
        slot = torch.where(active, first_slot(x.spans, chunks.size, segment) + first // segment, 0)
        saved = torch.where(active[:, None, None, None], checkpoints[slot], 0.0).unbind(2)
        layers = [torch.unflatten(y, -1, z.shape[1:]) for y, z in zip(saved, x.first * 2, strict=True)]
        M, S = layers[:depth], layers[depth:]
        states = []
        span = range(first, min(first + segment, chunks.count))
        for i in span:
            start = _chunk_start(chunks, i, M, first_start)
            states.append((M, start, S))
            k, v = (chunks.load(i, y, dtype) for y in (x.k, x.v))
            M, S = _advance(_gates(chunks, i, x), _pairs(start, k, v), M, S)
        for i, state in zip(reversed(span), reversed(states), strict=True):
            tokens, dM, d_start, dS = _chunk_backward(chunks, i, x, state, d_o, (dM, d_start, dS))
            for result, gradient in zip(results, tokens, strict=True):
                chunks.store(i, result, gradient)
    q, k, v, eta, theta, alpha = (unpad(rows, y) for rows, y in zip(results, x[:6], strict=True))
    return MemoryGradients(q, k, v, eta, theta, alpha, [*dM, *d_start, *dS])


def start_state(x: MemoryOperands) -> list[list[Tensor]]:
    """Return the layers of M, M' and S before the first token, three lists."""
    N, depth = x.spans.shape[0], len(x.first)
    first = [y.expand(N, *y.shape) for y in x.first]
    layers = [*first, *first, *(torch.zeros_like(y) for y in first)]
    if x.state:
        fresh = (x.spans[:, 3] > 0)[:, None, None, None]
        layers = [torch.where(fresh, y, stored) for y, stored in zip(layers, x.state, strict=True)]
    return [layers[i * depth : (i + 1) * depth] for i in range(3)]


def checkpoint_slots(rows: int, sequences: int, size: int, segment: int) -> int:
    """Return a number of checkpoints that suffices for any lengths of the sequences; see `first_slot`."""
    return rows // (size * segment) + 2 * sequences


def first_slot(spans: Tensor, size: int, segment: int) -> Tensor:
    """Return the slot of the first checkpoint of each sequence, [N] int64.

    A sequence of T tokens has less than T / (size segment) + 2 segments, also if it starts inside a chunk.
    """
    return spans[:, 0].long() // (size * segment) + 2 * torch.arange(spans.shape[0], device=spans.device)


def _new_checkpoints(x: MemoryOperands, size: int, segment: int) -> Tensor:
    """Allocate the checkpoints, and one more for sequences without a chunk. segment: 0: none."""
    B, T, H = x.q.shape[:3]
    slots = checkpoint_slots(B * T, x.spans.shape[0], size, segment) if segment else 0
    return x.eta.new_zeros(slots + 1, H, 2 * len(x.first), x.first[0][0].numel())


def _chunks(x: MemoryOperands, size: int) -> Chunks:
    return Chunks(x.spans, size, x.q.shape[0] * x.q.shape[1])


def _chunk_start(chunks: Chunks, i: int, M: list[Tensor], before: list[Tensor]) -> list[Tensor]:
    """Return M', the layers at whose weights the gradients of chunk i are taken."""
    begins = chunks.starts(i)[:, None, None, None]
    return [torch.where(begins, now, old) for now, old in zip(M, before, strict=True)]


def _pairs(start: list[Tensor], k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (X, Y) of each layer: x_s y_s^T is the gradient of |M'(k_s) - v_s|^2 with respect to its weights."""
    h = k @ start[0]
    if len(start) == 1:
        return [(k, 2 * (h - v))]
    inner = F.silu(h)
    error = 2 * (inner @ start[1] - v)
    return [(k, (error @ start[1].mT) * _silu_slope(h)), (inner, error)]


def _silu_slope(h: Tensor) -> Tensor:
    gate = h.sigmoid()
    return gate * (1 + h * (1 - gate))


def _gates(chunks: Chunks, i: int, x: MemoryOperands) -> Gates:
    dtype = x.eta.dtype
    present = chunks.present(i)[:, None].to(dtype)
    eta, a, theta = (chunks.load(i, y, dtype) for y in (x.eta, x.alpha, x.theta))
    eta, a = eta + (1 - present), 1 - a
    E, A, E0, A0 = _products(eta), _products(a), eta.cumprod(-1), a.cumprod(-1)
    C, B = A @ (present[..., None] * E), (A @ (present * E0)[..., None])[..., 0]
    return Gates(eta, a, theta, present, E, A, C, E0, A0, B)


def _products(gate: Tensor) -> Tensor:
    """Return g_(s+1) .. g_t for s <= t, and 0 for s > t: [..., M, M] from g [..., M]."""
    M = gate.shape[-1]
    after = torch.ones(M, M, dtype=torch.bool, device=gate.device).tril(-1)
    return torch.where(after, gate[..., :, None], 1.0).cumprod(-2).tril()


def _products_gradient(gate: Tensor, products: Tensor, d: Tensor, d_from_start: Tensor) -> Tensor:
    """Return the gradient of g, from those of g_(s+1) .. g_t [t, s] and of g_1 .. g_t [t].

    The derivative of g_(s+1) .. g_t by g_r is the product of (g_(r+1) .. g_t) and (g_(s+1) .. g_(r-1)).
    """
    from_start = F.pad(gate.cumprod(-1)[..., :-1], (1, 0), value=1.0)  # g_1 .. g_(r-1)
    before = F.pad(products[..., :-1, :], (0, 0, 1, 0))  # g_(s+1) .. g_(r-1) at [r, s], 0 for s >= r
    outer = d.tril() @ before.mT + d_from_start[..., :, None] * from_start[..., None, :]
    return (products * outer).sum(-2)


def _read(g: Gates, r: Tensor, X: Tensor, Y: Tensor, M: Tensor, S: Tensor) -> Tensor:
    """Return r_t M_t for the tokens of a chunk."""
    weights = g.C * g.theta[..., None, :] * (r @ X.mT)
    return g.A0[..., None] * (r @ M) + g.B[..., None] * (r @ S) - weights @ Y


def _advance(
    g: Gates, pairs: list[tuple[Tensor, Tensor]], M: list[Tensor], S: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return M and S after the chunk."""
    eta, a, b = (y[..., -1, None, None] for y in (g.E0, g.A0, g.B))
    e, c = ((g.theta * y[..., -1, :])[..., None] for y in (g.E, g.C))
    new_M = [a * m + b * s - X.mT @ (c * Y) for m, s, (X, Y) in zip(M, S, pairs, strict=True)]
    return new_M, [eta * s - X.mT @ (e * Y) for s, (X, Y) in zip(S, pairs, strict=True)]


class _LayerGradients(NamedTuple):
    """The gradients of r, X, Y, M and S; of C_ts theta_s, A_t, B_t; of E_Ms theta_s [s], and of the last E_t."""

    r: Tensor
    X: Tensor
    Y: Tensor
    M: Tensor
    S: Tensor
    C: Tensor
    A: Tensor
    B: Tensor
    E_row: Tensor
    E_end: Tensor


def _layer_backward(
    g: Gates, r: Tensor, pair: tuple[Tensor, Tensor], M: Tensor, S: Tensor, d_out: Tensor, dM: Tensor, dS: Tensor
) -> _LayerGradients:
    """Differentiate `_read` and `_advance` of a layer. Args: d_out: of the read; dM, dS: of M and S after the chunk."""
    X, Y = pair
    eta, a, b = (y[..., -1, None, None] for y in (g.E0, g.A0, g.B))
    e, c = ((g.theta * y[..., -1, :])[..., None] for y in (g.E, g.C))
    A, B, weights = g.A0[..., None], g.B[..., None], g.C * g.theta[..., None, :]
    scores = r @ X.mT
    d_weights = -(d_out @ Y.mT)
    d_scores = weights * d_weights
    from_M, from_S, Y_dM, Y_dS = d_out @ M.mT, d_out @ S.mT, Y @ dM.mT, Y @ dS.mT
    dC, dA, dB = d_weights * scores, (r * from_M).sum(-1), (r * from_S).sum(-1)
    dC[..., -1, :] -= (X * Y_dM).sum(-1)
    dA[..., -1] += (dM * M).sum((-2, -1))
    dB[..., -1] += (dM * S).sum((-2, -1))
    return _LayerGradients(
        r=A * from_M + B * from_S + d_scores @ X,
        X=d_scores.mT @ r - c * Y_dM - e * Y_dS,
        Y=-((weights * scores).mT @ d_out) - c * (X @ dM) - e * (X @ dS),
        M=r.mT @ (A * d_out) + a * dM,
        S=r.mT @ (B * d_out) + b * dM + eta * dS,
        C=dC, A=dA, B=dB, E_row=-(X * Y_dS).sum(-1), E_end=(dS * S).sum((-2, -1)),
    )  # fmt: skip


def _gates_backward(g: Gates, layers: list[_LayerGradients]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of eta, theta and alpha."""
    dC, dA0, dB, dE_row, dE_end = (
        sum(y[1:], y[0]) for y in zip(*((z.C, z.A, z.B, z.E_row, z.E_end) for z in layers), strict=True)
    )
    d_theta = (dC * g.C).sum(-2) + dE_row * g.E[..., -1, :]
    dC = dC * g.theta[..., None, :]
    present = g.present[..., None]
    dA = dC @ (present * g.E).mT + dB[..., :, None] * (g.present * g.E0)[..., None, :]
    dE, dE0 = present * (g.A.mT @ dC), g.present * (g.A.mT @ dB[..., None])[..., 0]
    dE[..., -1, :] += dE_row * g.theta
    dE0[..., -1] += dE_end
    return _products_gradient(g.eta, g.E, dE, dE0), d_theta, -_products_gradient(g.a, g.A, dA, dA0)


def _chunk_backward(
    chunks: Chunks, i: int, x: MemoryOperands, state: tuple[list[Tensor], ...], d_o: Tensor,
    d_state: tuple[list[Tensor], ...],
) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Differentiate one chunk. Args: state: M, M' and S; d_state: the gradients of those after the chunk.

    Returns: the gradients of q, k, v, eta, theta, alpha; of M, M' and S before the chunk.
    """
    dtype = x.eta.dtype
    (M, start, S), (dM, d_start, dS) = state, d_state
    q, k, v, do = (chunks.load(i, y, dtype) for y in (x.q, x.k, x.v, d_o))
    g = _gates(chunks, i, x)
    pairs = _pairs(start, k, v)
    if len(M) == 1:
        layer = _layer_backward(g, q, pairs[0], M[0], S[0], do, dM[0], dS[0])
        layers, d_error = [layer], 2 * layer.Y
        dk, d_memory = layer.X + d_error @ start[0].mT, [k.mT @ d_error]
    else:
        h, inner_h = _read(g, q, *pairs[0], M[0], S[0]), k @ start[0]
        inner, error = pairs[1]
        second = _layer_backward(g, F.silu(h), pairs[1], M[1], S[1], do, dM[1], dS[1])
        layer = _layer_backward(g, q, pairs[0], M[0], S[0], second.r * _silu_slope(h), dM[0], dS[0])
        layers = [layer, second]
        gate, slope = inner_h.sigmoid(), _silu_slope(inner_h)
        d_back = layer.Y * slope  # of error M2'^T
        d_error = 2 * (second.Y + d_back @ start[1])
        curvature = gate * (1 - gate) * (2 + inner_h * (1 - 2 * gate))
        d_h = layer.Y * (error @ start[1].mT) * curvature + (second.X + d_error @ start[1].mT) * slope
        dk = layer.X + d_h @ start[0].mT
        d_memory = [k.mT @ d_h, d_back.mT @ error + inner.mT @ d_error]
    d_eta, d_theta, d_alpha = _gates_backward(g, layers)
    begins = chunks.starts(i)[:, None, None, None]
    totals = [before + y for before, y in zip(d_start, d_memory, strict=True)]
    dM = [y.M + torch.where(begins, total, 0.0) for y, total in zip(layers, totals, strict=True)]
    d_start = [torch.where(begins, 0.0, total) for total in totals]
    return (layers[0].r, dk, -d_error, d_eta, d_theta, d_alpha), dM, d_start, [y.S for y in layers]
