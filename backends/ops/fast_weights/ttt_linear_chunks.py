"""TTT-Linear in the dual form, chunk by chunk in plain torch: forward and backward.

With W, b at the start of a mini-batch, and G, g the sums of its steps before this call (0 but in the first chunk):

    Z = K W + b,    Zh = norm(Z),    U = gain (gain Zh + bias - V + K)
    D = eta norm'(Z) U                            the gradients with respect to Z; norm' is symmetric
    R = Q W + b - p (tril(Q K^T + 1) D + Q G + g)
    O = Q + gain norm(R) + bias
    G <- G + K^T D,    g <- g + sum D;    at the start of the next mini-batch W <- W - p_M G, b <- b - p_M g

norm(z) = (z - mean z) / std, std = sqrt(var z + 1e-6). p_i is the rate of the i-th token, and M the mini-batch.

The backward needs W at the start of every chunk. It goes back from the final W by the steps of each chunk, which follow
from the saved D: W = W_next + p_M K^T D. The first chunk takes the W that the forward started from.

N sequences, H heads, M tokens per mini-batch, E head width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.ops.fast_weights.spans import Chunks, rows_like, unpad
from deltazoo.backends.update.base import state_dtype

EPS = 1e-6


class TTTOperands(NamedTuple):
    """The operands of TTT-Linear.

    Args:
        q, k, v: [B, T, H, E], in any dtype.
        eta: [B, T, H], the rate of each token; this and all others in float32 (float64).
        rate: [M], p, the rate of each place of a mini-batch.
        gain, bias: [H, E], of the norm.
        first_W, first_b: [H, E, E] and [H, E], the model before the first token of a sequence.
        W, G: [N, H, E, E], and b, g: [N, H, E], the state, for sequences that are not fresh. None: all are.
        spans: [N, 4] int32 (spans.py).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    rate: Tensor
    gain: Tensor
    bias: Tensor
    first_W: Tensor
    first_b: Tensor
    W: Tensor | None
    G: Tensor | None
    b: Tensor | None
    g: Tensor | None
    spans: Tensor


class TTTState(NamedTuple):
    """W, G [N, H, E, E] and b, g [N, H, E]."""

    W: Tensor
    G: Tensor
    b: Tensor
    g: Tensor


class TTTResult(NamedTuple):
    """o [B, T, H, E]; the new state; D [B, T, H, E], or empty if it is not saved."""

    o: Tensor
    W: Tensor
    G: Tensor
    b: Tensor
    g: Tensor
    D: Tensor


class TTTGradients(NamedTuple):
    """The gradients of the operands of the same names; start_*: of the state before the first token, [N, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    rate: Tensor
    gain: Tensor
    bias: Tensor
    start_W: Tensor
    start_G: Tensor
    start_b: Tensor
    start_g: Tensor


def forward(x: TTTOperands, save: bool) -> TTTResult:
    """Compute the outputs and the new state; with `save` also D."""
    dtype, chunks = state_dtype(x.q.dtype), _chunks(x)
    gain, bias = x.gain[:, None], x.bias[:, None]
    p_last = x.rate[-1]
    o, saved = rows_like(x.q), rows_like(x.q, dtype) if save else x.q.new_empty(0, dtype=dtype)
    W, G, b, g = start_state(x)
    for i in range(chunks.count):
        begins = chunks.starts(i)[:, None, None, None]
        W, G = torch.where(begins, W - p_last * G, W), torch.where(begins, 0.0, G)
        b, g = torch.where(begins, b - p_last * g, b), torch.where(begins, 0.0, g)
        q, k, v = (chunks.load(i, y, dtype) for y in (x.q, x.k, x.v))
        D = chunks.load(i, x.eta, dtype)[..., None] * _inner_gradient(k @ W + b, k, v, gain, bias)[2]
        R = q @ W + b - x.rate[:, None] * ((q @ k.mT + 1).tril() @ D + q @ G + g)
        chunks.store(i, o, q + gain * _norm(R)[0] + bias)
        if save:
            chunks.store(i, saved, D)
        G, g = G + k.mT @ D, g + D.sum(-2, keepdim=True)
    return TTTResult(unpad(o, x.q), W, G, b[:, :, 0], g[:, :, 0], unpad(saved, x.q) if save else saved)


def backward(x: TTTOperands, saved: TTTResult, d_o: Tensor, d: TTTState) -> TTTGradients:
    """Return the gradients. Args: saved: the results of `forward`; d: the gradients of the new state."""
    dtype, chunks = state_dtype(x.q.dtype), _chunks(x)
    gain, bias = x.gain[:, None], x.bias[:, None]
    p, p_last = x.rate[:, None], x.rate[-1]
    d_q, d_k, d_v, d_eta = rows_like(x.q), rows_like(x.k), rows_like(x.v), rows_like(x.eta)
    d_gain, d_bias, d_p = torch.zeros_like(x.gain), torch.zeros_like(x.bias), torch.zeros_like(x.rate)
    W, b = saved.W, saved.b[:, :, None]
    W0, G0, b0, g0 = start_state(x)
    rolled = chunks.starts(0)[:, None, None, None]
    G_in, g_in = torch.where(rolled, 0.0, G0), torch.where(rolled, 0.0, g0)
    dW, dG, db, dg = d.W, d.G, d.b[:, :, None], d.g[:, :, None]

    def undo_step(W: Tensor, G: Tensor, dW: Tensor, dG: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Undo W <- W - p_M G, G <- 0 where the next chunk begins. Returns: W, dG, the gradient of p_M."""
        d_rate = -torch.where(begins, G * dW, 0.0).sum()
        return torch.where(begins, W + p_last * G, W), torch.where(begins, -p_last * dW, dG), d_rate

    for i in reversed(range(chunks.count)):
        q, k, v, do, D = (chunks.load(i, y, dtype) for y in (x.q, x.k, x.v, d_o, saved.D))
        eta = chunks.load(i, x.eta, dtype)[..., None]
        is_first = i == 0
        if i + 1 < chunks.count:
            begins = chunks.starts(i + 1)[:, None, None, None]
            G, g = k.mT @ D, D.sum(-2, keepdim=True)
            G, g = (G + G_in, g + g_in) if is_first else (G, g)
            W, dG, d_rate = undo_step(W, G, dW, dG, begins)
            b, dg, d_rate_b = undo_step(b, g, db, dg, begins)
            d_p[-1] += d_rate + d_rate_b
        if is_first:  # exact; the first steps may be larger than W
            W, b = torch.where(rolled, W0 - p_last * G0, W0), torch.where(rolled, b0 - p_last * g0, b0)
        Z = k @ W + b
        A = (q @ k.mT + 1).tril()
        step = A @ D + (q @ G_in + g_in if is_first else 0)
        Rh, R_std = _norm(q @ W + b - p * step)
        dR = _norm_backward(gain * do, Rh, R_std)
        d_p -= (dR * step).sum((0, 1, 3))
        d_step = -p * dR
        dA = (d_step @ D.mT).tril()
        dD = A.mT @ d_step + k @ dG + dg
        Zh, std, gradient = _inner_gradient(Z, k, v, gain, bias)
        target = gain * Zh + bias - v + k
        dZ, dU = _inner_gradient_backward(eta * dD, Zh, std, gain * target, gradient, gain)
        d_target = gain * dU
        chunks.store(i, d_q, do + dR @ W.mT + dA @ k + (d_step @ G_in.mT if is_first else 0))
        chunks.store(i, d_k, dZ @ W.mT + dA.mT @ q + D @ dG.mT + d_target)
        chunks.store(i, d_v, -d_target)
        chunks.store(i, d_eta, (dD * gradient).sum(-1))
        d_gain += (do * Rh + dU * (target + gain * Zh)).sum((0, 2))
        d_bias += (do + d_target).sum((0, 2))
        if is_first:
            dG, dg = dG + q.mT @ d_step, dg + d_step.sum(-2, keepdim=True)
        dW = dW + q.mT @ dR + k.mT @ dZ
        db = db + (dR + dZ).sum(-2, keepdim=True)
    if chunks.count:
        _, dG, d_rate = undo_step(W, G0, dW, dG, rolled)
        _, dg, d_rate_b = undo_step(b, g0, db, dg, rolled)
        d_p[-1] += d_rate + d_rate_b
    tokens = [unpad(rows, y) for rows, y in ((d_q, x.q), (d_k, x.k), (d_v, x.v), (d_eta, x.eta))]
    return TTTGradients._make([*tokens, d_p, d_gain, d_bias, dW, dG, db[:, :, 0], dg[:, :, 0]])


def start_state(x: TTTOperands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return W, G, b, g before the first token, the last two as [N, H, 1, E]."""
    N = x.spans.shape[0]
    W, b = (y.expand(N, *y.shape) for y in (x.first_W, x.first_b[:, None]))
    if x.W is None or x.G is None or x.b is None or x.g is None:
        return W, torch.zeros_like(W), b, torch.zeros_like(b)
    fresh = (x.spans[:, 3] > 0)[:, None, None, None]
    b_state, g_state = x.b[:, :, None], x.g[:, :, None]
    return (
        torch.where(fresh, W, x.W), torch.where(fresh, 0.0, x.G),
        torch.where(fresh, b, b_state), torch.where(fresh, 0.0, g_state),
    )  # fmt: skip


def _chunks(x: TTTOperands) -> Chunks:
    return Chunks(x.spans, x.rate.shape[0], x.q.shape[0] * x.q.shape[1])


def _norm(z: Tensor) -> tuple[Tensor, Tensor]:
    centred = z - z.mean(-1, keepdim=True)
    std = (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    return centred / std, std


def _norm_backward(d: Tensor, normed: Tensor, std: Tensor) -> Tensor:
    return (d - d.mean(-1, keepdim=True) - normed * (d * normed).mean(-1, keepdim=True)) / std


def _inner_gradient(Z: Tensor, k: Tensor, v: Tensor, gain: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm(Z), its std, and the gradient of |gain norm(Z) + bias - (v - k)|^2 / 2 with respect to Z."""
    Zh, std = _norm(Z)
    return Zh, std, _norm_backward(gain * (gain * Zh + bias - v + k), Zh, std)


def _inner_gradient_backward(
    d: Tensor, Zh: Tensor, std: Tensor, U: Tensor, gradient: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of Z and of U. Args: d: of the inner gradient norm'(Z) U, which is `gradient`."""
    dU = _norm_backward(d, Zh, std)
    d_Zh = gain * gain * dU - (d * (U * Zh).mean(-1, keepdim=True) + U * (d * Zh).mean(-1, keepdim=True)) / std
    dZ = _norm_backward(d_Zh, Zh, std) - Zh * (d * gradient).mean(-1, keepdim=True) / std
    return dZ, dU
