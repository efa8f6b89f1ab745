"""The chunks of the delta rule with momentum, in plain torch: their operands, forward and backward.

With A and P of `prepare`, the factors of `Gates`, and C for the last token, a chunk computes from the states S and N
before it

    e  = (I + A)^-1 (v - kept (k S) - early (k N))
    o  = kept (q S) + carried (q N) + P e
    S' = kept_C S + carried_C N + k^T (write_S e)
    N' = held_C N + k^T (write_N e)

G chunk slots, C tokens of a chunk, N sequences, R rows of slots, M slots of a row, H heads, K key width, V value width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.update.base import state_dtype

CHUNK = 64
SCRATCH = 768 * 2**20  # bytes of the states, and their gradients, that the backward keeps at once


class Gates(NamedTuple):
    """Factors of the tokens of a chunk, float32 or float64, in the order of the rows of `Prepared.gates`.

    Args:
        kept, carried: the weights in S_t of the states S and N before the chunk. early: of N in S~_t, before its write.
        write_S, write_N: the weights of the token's error in the states after the chunk.
        held: the weight in N_t of the state N before the chunk.
    """

    kept: Tensor
    carried: Tensor
    early: Tensor
    write_S: Tensor
    write_N: Tensor
    held: Tensor


class MomentumOperands(NamedTuple):
    """Operands, in slots of C tokens; zeros where a slot has no token.

    Args:
        q, k: [G, C, H, K]; v: [G, C, H, V].
        log_alpha, log_mu, beta, eta: [G, C, H], not in 16 bits.
        state: S and N before the first token, [N, H, 2, K, V]; None: 0.
        starts: [N + 1] int32, the first slot of each sequence, and G.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_alpha: Tensor
    log_mu: Tensor
    beta: Tensor
    eta: Tensor
    state: Tensor | None
    starts: Tensor


class Prepared(NamedTuple):
    """What depends on a single chunk: (I + A)^-1 and P, [G, H, C, C], and the gates [G, H, 6, C], see `Gates`.

    In 16 bits the matrices are in the dtype of v, the gates in float32.
    """

    inverse: Tensor
    scores: Tensor
    gates: Tensor


class MomentumToken(NamedTuple):
    """Operands of one token per row: q, k [B, H, K]; v [B, H, V]; alpha, mu, beta, eta [B, H]; S, N [B, H, K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    mu: Tensor
    beta: Tensor
    eta: Tensor
    S: Tensor
    N: Tensor


class Weights(NamedTuple):
    """Weights of the writes of the tokens s of a chunk in its states at t, [G, H, C, C] unless stated.

    Args:
        alpha, mu: products of alpha and mu over s < r <= t; 0 for s > t; for s = t alpha is 0 and mu is 1.
        written: beta_t mu, earlier: the weight in alpha_t S_(t-1) of what token s writes, without eta_s.
        held, written_N, earlier_N: [G, H, C], of the state N instead of what token s writes.
    """

    alpha: Tensor
    mu: Tensor
    written: Tensor
    earlier: Tensor
    held: Tensor
    written_N: Tensor
    earlier_N: Tensor


def weights_of(log_alpha: Tensor, log_mu: Tensor, beta: Tensor) -> Weights:
    """Compute the weights. Args: [G, H, C] each."""
    a, m = log_alpha.cumsum(-1), log_mu.cumsum(-1)
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    alpha, mu, held = _products(a), _products(m) + one, m.exp()
    written, written_N = beta[..., None] * mu, beta * held
    return Weights(alpha, mu, written, alpha @ written, held, written_N, (alpha @ written_N[..., None])[..., 0])


def _products(total: Tensor) -> Tensor:
    """Return exp(total_t - total_s) for s < t, and 0 elsewhere."""
    later = torch.ones(total.shape[-1:] * 2, dtype=torch.bool, device=total.device).triu()
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()


def prepare(x: MomentumOperands) -> Prepared:
    """Compute A, its inverse, P and the gates.

    With G_ts = earlier_ts + written_ts, the weight in S_t of the write of token s, the errors e solve
    e_t = v_t - k_t^T (alpha_(1..t) S + earlier_N,t N) - sum_(s < t) earlier_ts k_t^T k_s eta_s e_s.
    """
    q, k, (log_alpha, log_mu, beta, eta) = *_keys_by_head(x), _gates_by_head(x)
    w = weights_of(log_alpha, log_mu, beta)
    both = w.earlier + w.written
    system = w.earlier * (k @ k.mT) * eta[..., None, :]
    scores = both * (q @ k.mT) * eta[..., None, :]
    gates = Gates(
        log_alpha.cumsum(-1).exp(), w.earlier_N + w.written_N, w.earlier_N, both[..., -1, :] * eta,
        w.mu[..., -1, :] * eta, w.held,
    )  # fmt: skip
    return Prepared(_inverse(system), scores, torch.stack(gates, 2))


class OperandGradients(NamedTuple):
    """Gradients of q and k [G, H, C, K] through A and P, and of the others [G, H, C] through all of `prepare`."""

    q: Tensor
    k: Tensor
    log_alpha: Tensor
    log_mu: Tensor
    beta: Tensor
    eta: Tensor


def prepare_backward(x: MomentumOperands, d_system: Tensor, d_scores: Tensor, d_gates: Tensor) -> OperandGradients:
    """Compute the gradients of the operands of `prepare` from those of A, P and the gates."""
    q, k, (log_alpha, log_mu, beta, eta) = *_keys_by_head(x), _gates_by_head(x)
    w = weights_of(log_alpha, log_mu, beta)
    both, row, d = w.earlier + w.written, eta[..., None, :], Gates(*d_gates.unbind(2))
    d_system, d_scores = d_system.tril(-1), d_scores.tril()
    pairs_k, pairs_q = d_system * w.earlier * row, d_scores * both * row
    d_k = (pairs_k + pairs_k.mT) @ k + pairs_q.mT @ q
    of_system, of_scores = d_system * (k @ k.mT), d_scores * (q @ k.mT)
    d_eta = (
        (of_system * w.earlier + of_scores * both).sum(-2) + d.write_S * both[..., -1, :] + d.write_N * w.mu[..., -1, :]
    )
    d_both = of_scores * row
    d_both[..., -1, :] += d.write_S * eta
    d_earlier, d_earlier_N = d_both + of_system * row, d.carried + d.early
    d_written = d_both + w.alpha.mT @ d_earlier
    d_written_N = d.carried + (w.alpha.mT @ d_earlier_N[..., None])[..., 0]
    d_alpha = d_earlier @ w.written.mT + d_earlier_N[..., None] * w.written_N[..., None, :]
    d_mu = d_written * beta[..., None]
    d_mu[..., -1, :] += d.write_N * eta
    d_beta = (d_written * w.mu).sum(-1) + d_written_N * w.held
    d_a = _differences(d_alpha * w.alpha) + d.kept * log_alpha.cumsum(-1).exp()
    d_m = _differences(d_mu * w.mu) + (d_written_N * beta + d.held) * w.held
    return OperandGradients(pairs_q @ k, d_k, _from_end(d_a), _from_end(d_m), d_beta, d_eta)


def _differences(x: Tensor) -> Tensor:
    """Return the gradient of a total of which x is the gradient of total_t - total_s. The diagonal is a constant."""
    x = x.tril(-1)
    return x.sum(-1) - x.sum(-2)


def _from_end(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(-1).flip(-1)


def forward(x: MomentumOperands, rows: int) -> tuple[Tensor, ...]:
    (inverse, scores, gates), q, k, v = prepare(x), *_keys_by_head(x), _by_head(x.v)
    factors = _columns(gates)
    scan = _Slots(x, rows)
    state, final = scan.initial(x), scan.initial(x).clone()
    S_N, o, error = scan.zeros(state), torch.zeros_like(v), torch.zeros_like(v)
    for m in range(scan.M):
        at = scan.slots(m)
        S_N = torch.where(scan.is_first(m), state[scan.sequence_RM[:, m]], S_N)
        (kS, kN), (qS, qN) = ((y[at, :, None] @ S_N).unbind(2) for y in (k, q))
        g = Gates(*(y[at] for y in factors))
        error[at] = inverse[at] @ (v[at] - g.kept * kS - g.early * kN)
        o[at] = g.kept * qS + g.carried * qN + scores[at] @ error[at]
        S_N = _next(S_N, k[at], g, error[at])
        final = final.index_copy(0, scan.sequence_RM[:, m], S_N)
    dtype = x.v.dtype
    return _by_token(o, dtype), final, inverse.to(dtype), scores.to(dtype), gates, _by_token(error, dtype)


class MomentumSaved(NamedTuple):
    """What the forward keeps for the backward: the fields of `Prepared`, and the errors [G, C, H, V]."""

    inverse: Tensor
    scores: Tensor
    gates: Tensor
    error: Tensor


def backward(
    x: MomentumOperands, saved: MomentumSaved, d_o: Tensor, d_final: Tensor, *, rows: int
) -> tuple[Tensor, ...]:
    """Compute the gradients of windows of heads, whose states are computed again."""
    H, per_head = x.q.shape[2], x.q.shape[0] * d_final.shape[2:].numel() * d_final.element_size()
    size = max(1, min(H, SCRATCH // max(1, per_head)))
    parts = []
    for h in range(0, H, size):
        heads = slice(h, h + size)
        tokens, squares = (slice(None), slice(None), heads), (slice(None), heads)
        q, k, v, log_alpha, log_mu, beta, eta = (y[tokens] for y in x[:7])
        state = None if x.state is None else x.state[squares]
        window = MomentumOperands(q, k, v, log_alpha, log_mu, beta, eta, state, x.starts)
        inverse, scores, gates = (y[squares] for y in saved[:3])
        kept = MomentumSaved(inverse, scores, gates, saved.error[tokens])
        parts.append(_backward_of_heads(window, kept, d_o[tokens], d_final[squares], rows=rows))
    dims = (2, 2, 2, 2, 2, 2, 2, 1)
    return tuple(torch.cat(y, dim).contiguous() for y, dim in zip(zip(*parts, strict=True), dims, strict=True))


def _backward_of_heads(
    x: MomentumOperands, saved: MomentumSaved, d_o: Tensor, d_final: Tensor, *, rows: int
) -> tuple[Tensor, ...]:
    q, k, v = *_keys_by_head(x), _by_head(x.v)
    inverse, scores = (y.to(v.dtype) for y in saved[:2])
    factors = _columns(saved.gates)
    error, d_o = (y.transpose(1, 2).to(v.dtype) for y in (saved.error, d_o))
    scan = _Slots(x, rows)
    state, states = scan.initial(x), []
    S_N = scan.zeros(state)
    for m in range(scan.M):
        at = scan.slots(m)
        S_N = torch.where(scan.is_first(m), state[scan.sequence_RM[:, m]], S_N)
        states.append(S_N)
        S_N = _next(S_N, k[at], Gates(*(y[at] for y in factors)), error[at])
    d_q, d_k, d_v, d_system, d_scores = (torch.zeros_like(y) for y in (q, k, v, scores, scores))
    d_gates, d_state = torch.zeros_like(saved.gates), d_final.clone()
    dS_dN = torch.zeros_like(S_N)
    for m in reversed(range(scan.M)):
        at, sequence = scan.slots(m), scan.sequence_RM[:, m]
        g = Gates(*(y[at] for y in factors))
        dS_dN = torch.where(scan.is_last(m), d_final[sequence], dS_dN)
        (S, N), (dS, dN) = states[m].unbind(2), dS_dN.unbind(2)
        k_dS, k_dN = k[at] @ dS, k[at] @ dN
        d_error = scores[at].mT @ d_o[at] + g.write_S * k_dS + g.write_N * k_dN
        d_v[at] = read = inverse[at].mT @ d_error
        d_scores[at], d_system[at] = d_o[at] @ error[at].mT, -read @ error[at].mT
        kS, kN, qS, qN = k[at] @ S, k[at] @ N, q[at] @ S, q[at] @ N
        rows_of_gates = Gates(
            (d_o[at] * qS - read * kS).sum(-1), (d_o[at] * qN).sum(-1), -(read * kN).sum(-1),
            (error[at] * k_dS).sum(-1), (error[at] * k_dN).sum(-1), torch.zeros_like(kS[..., 0]),
        )  # fmt: skip
        d_gates[at] = torch.stack(rows_of_gates, -2)
        for row, product in ((0, dS * S), (1, dS * N), (5, dN * N)):
            d_gates[at, :, row, -1] += product.sum((-2, -1))
        d_q[at] = (g.kept * d_o[at]) @ S.mT + (g.carried * d_o[at]) @ N.mT
        d_k[at] = (
            (g.write_S * error[at]) @ dS.mT + (g.write_N * error[at]) @ dN.mT
            - (g.kept * read) @ S.mT - (g.early * read) @ N.mT
        )  # fmt: skip
        kept, carried, held = (y[..., -1:, :] for y in (g.kept, g.carried, g.held))
        new_dS = kept * dS + q[at].mT @ (g.kept * d_o[at]) - k[at].mT @ (g.kept * read)
        new_dN = carried * dS + held * dN + q[at].mT @ (g.carried * d_o[at]) - k[at].mT @ (g.early * read)
        dS_dN = torch.stack([new_dS, new_dN], 2)
        d_state = d_state.index_copy(0, sequence, dS_dN)
    own = prepare_backward(x, d_system, d_scores, d_gates)
    pairs = ((d_q + own.q, x.q.dtype), (d_k + own.k, x.k.dtype), (d_v, x.v.dtype), *((y, y.dtype) for y in own[2:]))
    return *(_by_token(y, dtype) for y, dtype in pairs), d_state


class _Slots:
    """The slots of R rows: the sequence of each, and whether it is its first or last one."""

    def __init__(self, x: MomentumOperands, rows: int) -> None:
        count, first = x.q.shape[0], x.starts[:-1].long()
        self.M = 0 if len(first) == 0 else count // rows
        slot = torch.arange(self.M * rows, device=first.device)
        sequence = torch.searchsorted(first, slot, right=True) - 1
        self.sequence_RM = sequence.view(rows, self.M)
        self.first_RM = (slot == first[sequence]).view(rows, self.M)
        self.last_RM = (slot + 1 == x.starts[1:].long()[sequence]).view(rows, self.M)

    def slots(self, m: int) -> slice:
        """Return the m-th slot of each row."""
        return slice(m, None, self.M)

    def is_first(self, m: int) -> Tensor:
        return self.first_RM[:, m, None, None, None, None]

    def is_last(self, m: int) -> Tensor:
        return self.last_RM[:, m, None, None, None, None]

    def zeros(self, state: Tensor) -> Tensor:
        """Return a state for each row, which the initial one of its first sequence replaces."""
        return state.new_zeros(len(self.sequence_RM), *state.shape[1:])

    def initial(self, x: MomentumOperands) -> Tensor:
        N, (H, K), V = x.starts.shape[0] - 1, x.q.shape[2:], x.v.shape[-1]
        return x.beta.new_zeros(N, H, 2, K, V) if x.state is None else x.state


def _next(S_N: Tensor, k: Tensor, g: Gates, error: Tensor) -> Tensor:
    """Return the states after a chunk, [R, H, 2, K, V]."""
    S, N = S_N.unbind(2)
    kept, carried, held = (y[..., -1:, :] for y in (g.kept, g.carried, g.held))
    return torch.stack([kept * S + carried * N + k.mT @ (g.write_S * error), held * N + k.mT @ (g.write_N * error)], 2)


def _by_head(x: Tensor) -> Tensor:
    """Return x [G, C, H, ...] as [G, H, C, ...] in the state dtype."""
    return x.transpose(1, 2).to(state_dtype(x.dtype))


def _keys_by_head(x: MomentumOperands) -> tuple[Tensor, Tensor]:
    return _by_head(x.q), _by_head(x.k)


def _gates_by_head(x: MomentumOperands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _by_head(x.log_alpha), _by_head(x.log_mu), _by_head(x.beta), _by_head(x.eta)


def _columns(gates: Tensor) -> Gates:
    """Return the gates as [G, H, C, 1] each."""
    return Gates(*gates[..., None].unbind(2))


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.transpose(1, 2).to(dtype).contiguous()


def _inverse(system: Tensor) -> Tensor:
    one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve_triangular(system, one.expand_as(system), upper=False, unitriangular=True).contiguous()
