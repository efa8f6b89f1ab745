"""Forward of the inter-chunk scan, and the propagation of the state that its backward recomputes.

N chunks, n chunks of a segment, Z batch x key heads, G value heads per key head, L = Z G, C tokens per chunk,
M micro-steps per chunk, K key width, V value width, Y sequences. The equations are those of `chunk_scan`.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.compile.chunk_operands import ChunkOperands
from deltazoo.backends.compile.inverse import unit_lower_inverse
from deltazoo.backends.torch_ext.devices import products_in_tf32


def scan_forward(
    x: ChunkOperands, segment: int, tf32: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute o and the final states, and with `save` the tensors that the backward needs.

    segment: chunks per segment. tf32: whether a GPU computes the products, but not T, in tf32.

    Returns: o, the final states; with `save` V_new and T, if there is an erase term, and the first state of each
        segment. Other tensors are empty.
    """
    N, Z, C, K = x.q.shape
    G, M, V = x.v.shape[2:]
    o = x.v.new_empty(N, Z, G, C, V)
    final_state = x.state.clone()
    t = None if x.a is None else unit_lower_inverse(x.a)
    v_new = x.v if x.a is None else x.v.new_empty(N if save else min(N, segment), Z, G, M, V)
    segment_states = x.v.new_zeros(saved_segments(N, segment) if save else 0, Z * G, K, V)
    buffer = x.v.new_empty(min(N, segment) + 1, Z * G, K, V)
    buffer[0] = x.state[0].flatten(0, 1)
    with products_in_tf32(tf32):
        for number, chunks in enumerate(segments(N, segment)):
            n = chunks.stop - chunks.start
            S = buffer[: n + 1]
            if save:
                segment_states[number] = S[0]
            Q, K_scaled = by_value_head(x.q, x.scale_q, chunks, G), by_value_head(x.k, x.scale_k, chunks, G)
            if t is None:
                V_new, W = flat(x.v[chunks]), None
            else:
                V_new, T = flat(v_new[chunks] if save else v_new[:n]), flat(t[chunks])
                torch.bmm(T, flat(x.v[chunks]), out=V_new)  # U; `propagate` subtracts W S
                W = torch.bmm(T, by_value_head(x.k if x.e is None else x.e, x.scale_e, chunks, G))
            propagate(S, K_scaled, V_new, W, Transitions.of(chunks, x.gamma, x.kv, x.state, x.sequence), final_state)
            O = flat(o[chunks])
            torch.bmm(flat(x.attn[chunks]), V_new, out=O)
            O.baddbmm_(Q, S[:-1].flatten(0, 1))
            buffer[0] = S[-1]
    if x.sequence is None:
        final_state[0] = buffer[0].view_as(final_state[0])
    saved_v_new = v_new if save and x.a is not None else x.v.new_empty(0)
    saved_t = t if save and t is not None else x.v.new_empty(0)
    return o, final_state, saved_v_new, saved_t, segment_states


class Transitions(NamedTuple):
    """The terms of the state's transition over each chunk of a segment that do not depend on V_new.

    Args:
        gamma: for each chunk the decay [L, 1 or K, 1] of the state.
        kv: KV [n L, K, V].
        starts: for each chunk of packed sequences whether it is the first of its sequence, [] bool, and the initial
            state of that sequence, [L, K, V]. None: it is not the first.
        ends: for each chunk of packed sequences its sequence, [1]: the state after the chunk is stored as the final
            state of that sequence, unless a later chunk overwrites it. None: it is not stored.

    On the CPU the bounds of the sequences are read, so that only the chunks at a bound copy a state.
    """

    gamma: Sequence[Tensor | None]
    kv: Tensor | None
    starts: Sequence[tuple[Tensor, Tensor] | None]
    ends: Sequence[Tensor | None]

    @classmethod
    def of(
        cls, chunks: slice, gamma: Tensor | None, kv: Tensor | None, state: Tensor, sequence: Tensor | None
    ) -> "Transitions":
        """Select the chunks of a segment."""
        n = chunks.stop - chunks.start
        starts: Sequence[tuple[Tensor, Tensor] | None] = [None] * n
        ends: Sequence[Tensor | None] = [None] * n
        if sequence is not None:
            states = state.flatten(1, 2).index_select(0, sequence[chunks])
            is_first = pad(sequence, (1, 0), value=-1)[chunks] != sequence[chunks]
            starts = list(zip(is_first.unbind(0), states.unbind(0), strict=True))
            ends = sequence[chunks].split(1)
            bounds = sequence_bounds(sequence, chunks)
            if bounds is not None:
                starts = [start if bound else None for start, bound in zip(starts, bounds[:-1], strict=True)]
                ends = [end if bound else None for end, bound in zip(ends, bounds[1:], strict=True)]
        factors = [None] * n if gamma is None else list(gamma[chunks].flatten(1, 2).unsqueeze(-1).unbind(0))
        return cls(factors, None if kv is None else flat(kv[chunks]), starts, ends)


def propagate(
    S: Tensor, K: Tensor, V_new: Tensor, W: Tensor | None, transitions: Transitions, final_state: Tensor | None = None
) -> None:
    """Propagate the state through a segment: fill S [n + 1, L, K, V] from S[0].

    S[:-1] become the states before each chunk, S[-1] the state after the segment.

    Args:
        V_new: with W, holds U on entry and V_new = U - W S on return; without W, V_new itself.
        final_state: [Y, Z, G, K, V], where the states after the segment's sequences are stored.
    """
    n = S.shape[0] - 1
    # S[1:] first receives the terms that do not depend on the state: KV, and without an erase term K^T V_new.
    added = S[1:].flatten(0, 1)
    if W is None:
        torch.bmm(K.mT, V_new, out=added)
        if transitions.kv is not None:
            added.add_(transitions.kv)
    elif transitions.kv is not None:
        added.copy_(transitions.kv)
    has_added = W is None or transitions.kv is not None
    states = S.unbind(0)
    bounds = transitions.starts, transitions.ends
    per_chunk = zip(*(by_chunk(y, n) for y in (K, V_new, W)), transitions.gamma, *bounds, strict=True)
    for (K_i, V_i, W_i, gamma, start, end), before, after in zip(per_chunk, states[:-1], states[1:], strict=True):
        if start is not None:
            torch.where(start[0], start[1], before, out=before)
        if W_i is not None:
            V_i.baddbmm_(W_i, before, alpha=-1)
        if not has_added:
            torch.mul(before, 1 if gamma is None else gamma, out=after)
        elif gamma is None:
            after.add_(before)
        else:
            after.addcmul_(before, gamma)
        if W_i is not None:
            after.baddbmm_(K_i.mT, V_i)
        if final_state is not None and end is not None:
            final_state.index_copy_(0, end, after.view_as(final_state[:1]))


def sequence_bounds(sequence: Tensor, chunks: slice) -> list[bool] | None:
    """Return n + 1 flags for the n chunks of a segment: whether a sequence starts at each chunk, and True.

    The last flag makes every segment store the state after it. Returns None on other devices than the CPU, where
    reading `sequence` would synchronise.
    """
    if sequence.device.type != "cpu":
        return None
    rows = [None if chunks.start == 0 else int(sequence[chunks.start - 1]), *sequence[chunks].tolist()]
    return [*(left != right for left, right in itertools.pairwise(rows)), True]


def segments(N: int, segment: int) -> list[slice]:
    """Split N chunks into segments."""
    return [slice(first, min(first + segment, N)) for first in range(0, N, segment)]


def saved_segments(N: int, segment: int) -> int:
    """Return a number of rows that holds every segment's first state and is never 1.

    torch.compile specialises a graph for a size of 1.
    """
    return N // segment + 2


def flat(x: Tensor) -> Tensor:
    """[n, Z, G, R, S] -> [n L, R, S], a view."""
    return x.flatten(0, 2)


def by_value_head(keys: Tensor, scale: Tensor | None, chunks: slice, G: int) -> Tensor:
    """scale * keys of a segment, [n, Z, R, K] -> [n L, R, K]: a view without a scale where G is 1."""
    x = keys[chunks].unsqueeze(2)
    return (x.expand(-1, -1, G, -1, -1) if scale is None else x * scale[chunks].unsqueeze(-1)).flatten(0, 2)


def by_chunk(x: Tensor | None, n: int) -> Sequence[Tensor | None]:
    """[n L, R, S] -> n views [L, R, S]."""
    return [None] * n if x is None else torch.unflatten(x, 0, (n, -1)).unbind(0)
