"""The chunks of the delta rule with momentum, in plain torch: their operands, forward and backward.

With the factors of `Gates`, C for the last token, a chunk computes from the states S and N before it

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
SCRATCH = 1152 * 2**20  # bytes of the states, and their gradients, that the backward keeps at once


class Gates(NamedTuple):
    """Factors of the tokens of a chunk, float32 or float64, in the order of the rows of `MomentumOperands.gates`.

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
    """Operands, in slots of C tokens; zeros where a slot has no token, and gates of 1 for `kept` and `held`.

    Args:
        q, k: [G, C, H, K]; v: [G, C, H, V].
        system, scores: A (below the diagonal) and P, [G, H, C, C]; gates: [G, H, 6, C], see `Gates`; not in 16 bits.
        state: S and N before the first token, [N, H, 2, K, V]; None: 0.
        starts: [N + 1] int32, the first slot of each sequence, and G.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    system: Tensor
    scores: Tensor
    gates: Tensor
    state: Tensor | None
    starts: Tensor


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


def forward(x: MomentumOperands, rows: int) -> tuple[Tensor, ...]:
    q, k, v, scores, gates = _by_head(x)
    inverse = _inverse(x.system)
    scan = _Slots(x, rows)
    state, final = scan.initial(x), scan.initial(x).clone()
    S_N, o, error = scan.zeros(state), torch.zeros_like(v), torch.zeros_like(v)
    for m in range(scan.M):
        at = scan.slots(m)
        S_N = torch.where(scan.is_first(m), state[scan.sequence_RM[:, m]], S_N)
        (kS, kN), (qS, qN) = ((y[at, :, None] @ S_N).unbind(2) for y in (k, q))
        g = Gates(*(y[at] for y in gates))
        error[at] = inverse[at] @ (v[at] - g.kept * kS - g.early * kN)
        o[at] = g.kept * qS + g.carried * qN + scores[at] @ error[at]
        S_N = _next(S_N, k[at], g, error[at])
        final = final.index_copy(0, scan.sequence_RM[:, m], S_N)
    dtype = x.v.dtype
    return _by_token(o, dtype), final, inverse.to(dtype), x.scores.to(dtype, copy=True), _by_token(error, dtype)


def backward(x: MomentumOperands, error: Tensor, d_o: Tensor, d_final: Tensor, *, rows: int) -> tuple[Tensor, ...]:
    """Compute the gradients of windows of heads, whose states are computed again."""
    H, per_head = x.q.shape[2], x.q.shape[0] * d_final[0, :1].numel() * d_final.element_size()
    size = max(1, min(H, SCRATCH // max(1, per_head)))
    parts = []
    for h in range(0, H, size):
        heads = slice(h, h + size)
        tokens, squares = (slice(None), slice(None), heads), (slice(None), heads)
        window = x._replace(
            q=x.q[tokens], k=x.k[tokens], v=x.v[tokens], system=x.system[squares], scores=x.scores[squares],
            gates=x.gates[squares], state=None if x.state is None else x.state[squares],
        )  # fmt: skip
        parts.append(_backward_of_heads(window, error[tokens], d_o[tokens], d_final[squares], rows=rows))
    dims = (2, 2, 2, 1, 1, 1, 1)
    return tuple(torch.cat(y, dim).contiguous() for y, dim in zip(zip(*parts, strict=True), dims, strict=True))


def _backward_of_heads(
    x: MomentumOperands, error: Tensor, d_o: Tensor, d_final: Tensor, *, rows: int
) -> tuple[Tensor, ...]:
    q, k, v, scores, gates = _by_head(x)
    error, d_o = (y.transpose(1, 2).to(scores.dtype) for y in (error, d_o))
    inverse = x.system.to(scores.dtype)
    scan = _Slots(x, rows)
    state, states = scan.initial(x), []
    S_N = scan.zeros(state)
    for m in range(scan.M):
        at = scan.slots(m)
        S_N = torch.where(scan.is_first(m), state[scan.sequence_RM[:, m]], S_N)
        states.append(S_N)
        S_N = _next(S_N, k[at], Gates(*(y[at] for y in gates)), error[at])
    d_q, d_k, d_v, d_system, d_scores = (torch.zeros_like(y) for y in (q, k, v, scores, scores))
    d_gates, d_state = torch.zeros_like(x.gates), d_final.clone()
    dS_dN = torch.zeros_like(S_N)
    for m in reversed(range(scan.M)):
        at, sequence = scan.slots(m), scan.sequence_RM[:, m]
        g = Gates(*(y[at] for y in gates))
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
    tokens = (_by_token(y, dtype) for y, dtype in ((d_q, x.q.dtype), (d_k, x.k.dtype), (d_v, x.v.dtype)))
    return *tokens, d_system, d_scores, d_gates, d_state


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
        """The m-th slot of each row."""
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
        return x.gates.new_zeros(N, H, 2, K, V) if x.state is None else x.state


def _next(S_N: Tensor, k: Tensor, g: Gates, error: Tensor) -> Tensor:
    """Return the states after a chunk, [R, H, 2, K, V]."""
    S, N = S_N.unbind(2)
    kept, carried, held = (y[..., -1:, :] for y in (g.kept, g.carried, g.held))
    return torch.stack([kept * S + carried * N + k.mT @ (g.write_S * error), held * N + k.mT @ (g.write_N * error)], 2)


def _by_head(x: MomentumOperands) -> tuple[Tensor, Tensor, Tensor, Tensor, Gates]:
    """Return q, k, v [G, H, C, ...] and scores in the state dtype, and the gates [G, H, C, 1] each."""
    dtype = state_dtype(x.q.dtype)
    q, k, v = (y.transpose(1, 2).to(dtype) for y in (x.q, x.k, x.v))
    return q, k, v, x.scores.to(dtype), Gates(*x.gates[..., None].unbind(2))


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.transpose(1, 2).to(dtype).contiguous()


def _inverse(system: Tensor) -> Tensor:
    one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve_triangular(system, one.expand_as(system), upper=False, unitriangular=True).contiguous()
