"""Kernels of the delta rule with momentum. `backends/ops/momentum_chunks.py` has the equations.

Tokens lie in slots of C tokens, so that no kernel masks time. A program of a scan holds a tile of the values of both
states in registers, and processes the slots of one sequence.

G chunk slots, C tokens of a chunk, N sequences, H heads, K key width, V value width
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.chunk.kernels.portable.prepare import unit_lower_inverse


class MomentumTraits(NamedTuple):
    """Compile-time properties of a launch. BK, BV: tiles of keys (all of K in the scans) and values."""

    H: int
    K: int
    V: int
    C: int
    BK: int
    BV: int


@triton.jit
def load_gate(gates, chunk, row: tl.constexpr, C: tl.constexpr):
    """Load a row of the gates of a chunk, [C]."""
    return tl.load(gates + (chunk * 6 + row) * C + tl.arange(0, C))


@triton.jit
def load_last(gates, chunk, C: tl.constexpr):
    """Load `kept`, `carried` and `held` of the last token."""
    at = gates + chunk * 6 * C + C - 1
    return tl.load(at), tl.load(at + C), tl.load(at + 5 * C)


@triton.jit
def load_square(x, chunk, C: tl.constexpr):
    """Load a matrix [C, C] of a chunk."""
    i = tl.arange(0, C)
    return tl.load(x + chunk * (C * C) + i[:, None] * C + i[None, :])


@triton.jit
def load_tile(x, slot, h, columns, W: tl.constexpr, traits: tl.constexpr):
    """Load columns of x [G, C, H, W] at a slot: [C, columns]."""
    i = tl.arange(0, traits.C)
    at = x + (slot * traits.C * traits.H + h) * W
    return tl.load(at + i[:, None] * (traits.H * W) + columns[None, :], mask=(columns < W)[None, :], other=0.0)


@triton.jit
def store_tile(x, values, slot, h, columns, W: tl.constexpr, traits: tl.constexpr):
    """Store columns of x [G, C, H, W] at a slot."""
    i = tl.arange(0, traits.C)
    at = x + (slot * traits.C * traits.H + h) * W
    at += i[:, None] * (traits.H * W) + columns[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=(columns < W)[None, :])


@triton.jit
def load_state(x, index, ks, vs, traits: tl.constexpr):
    """Load a tile of matrix `index` of x [.., K, V]."""
    at = x + tl.cast(index, tl.int64) * (traits.K * traits.V)
    mask = (ks < traits.K)[:, None] & (vs < traits.V)[None, :]
    return tl.load(at + ks[:, None] * traits.V + vs[None, :], mask=mask, other=0.0)


@triton.jit
def store_state(x, values, index, ks, vs, traits: tl.constexpr):
    """Store a tile of matrix `index` of x [.., K, V]."""
    at = x + tl.cast(index, tl.int64) * (traits.K * traits.V)
    mask = (ks < traits.K)[:, None] & (vs < traits.V)[None, :]
    tl.store(at + ks[:, None] * traits.V + vs[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def scaled(x, factor, dtype: tl.constexpr):
    """Multiply the rows of x, and round."""
    return (x.to(tl.float32) * factor[:, None]).to(dtype)


@triton.jit
def locate(starts, G, heads, head, traits: tl.constexpr):
    """Return the sequence, its first slot and the slot after its last, the head, and the value tile of a program."""
    tiles: tl.constexpr = (traits.V + traits.BV - 1) // traits.BV
    tile = tl.program_id(0) % tiles
    n = tl.program_id(0) // tiles // heads
    h = head + tl.program_id(0) // tiles % heads
    begin = tl.minimum(tl.maximum(tl.load(starts + n), 0), G)
    end = tl.minimum(tl.maximum(tl.load(starts + n + 1), begin), G)
    return n, begin.to(tl.int64), end.to(tl.int64), h, tile * traits.BV + tl.arange(0, traits.BV)


@triton.jit
def load_token_gate(x, slot, h, traits: tl.constexpr):
    """Load a gate x [G, C, H] of a chunk, [C]."""
    i = tl.arange(0, traits.C)
    return tl.load(x + (slot * traits.C + i) * traits.H + h).to(tl.float32)


@triton.jit
def products(total):
    """Return exp(total_t - total_s) for s < t, and 0 elsewhere."""
    i = tl.arange(0, total.shape[0])
    later = i[:, None] > i[None, :]
    return tl.where(later, tl.exp(tl.where(later, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def last(x):
    """Return the last row of x [C, C]."""
    i = tl.arange(0, x.shape[0])
    return tl.sum(tl.where((i == x.shape[0] - 1)[:, None], x, 0.0), 0)


@triton.jit
def key_products(q, k, slot, h, traits: tl.constexpr):
    """Compute k k^T and q k^T of a chunk."""
    C: tl.constexpr = traits.C
    keys = tl.zeros([C, C], tl.float32)
    queries = tl.zeros([C, C], tl.float32)
    for start in range(0, traits.K, traits.BK):
        ks = start + tl.arange(0, traits.BK)
        k_tile = load_tile(k, slot, h, ks, traits.K, traits)
        keys = tl.dot(k_tile, tl.trans(k_tile), keys)
        queries = tl.dot(load_tile(q, slot, h, ks, traits.K, traits), tl.trans(k_tile), queries)
    return keys, queries


@triton.jit
def token_weights(log_alpha, log_mu, beta, slot, h, traits: tl.constexpr):
    """Return alpha, mu, written and earlier of `Weights`, the cumulative sums of log alpha and log mu, and beta."""
    i = tl.arange(0, traits.C)
    a = tl.cumsum(load_token_gate(log_alpha, slot, h, traits), 0)
    m = tl.cumsum(load_token_gate(log_mu, slot, h, traits), 0)
    strength = load_token_gate(beta, slot, h, traits)
    alpha = products(a)
    mu = products(m) + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    written = strength[:, None] * mu
    earlier = tl.dot(alpha, written, input_precision="tf32")
    return alpha, mu, written, earlier, a, m, strength


@triton.jit
def momentum_prepare_kernel(q, k, log_alpha, log_mu, beta, eta, inverse, scores, gates, traits: tl.constexpr):
    """Compute (I + A)^-1, P and the gates of a chunk. Grid: slot, head.

    Reads q and k; log_alpha, log_mu, beta and eta [G, C, H]. Writes inverse and scores [G, H, C, C], and gates [G, H,
    6, C].
    """
    C: tl.constexpr = traits.C
    chunk = tl.program_id(0).to(tl.int64)
    slot, h = chunk // traits.H, chunk % traits.H
    i = tl.arange(0, C)
    alpha, mu, written, earlier, a, m, strength = token_weights(log_alpha, log_mu, beta, slot, h, traits)
    keys, queries = key_products(q, k, slot, h, traits)
    rate = load_token_gate(eta, slot, h, traits)
    A = tl.where(i[:, None] > i[None, :], earlier * keys * rate[None, :], 0.0)
    T, _ = unit_lower_inverse(A, C, tl.float32, "tf32x3", 16)
    at = chunk * (C * C) + i[:, None] * C + i[None, :]
    tl.store(inverse + at, T.to(inverse.dtype.element_ty))
    both = earlier + written
    tl.store(scores + at, (both * queries * rate[None, :]).to(scores.dtype.element_ty))
    held = tl.exp(m)
    written_N = strength * held
    earlier_N = tl.sum(alpha * written_N[None, :], 1)
    base = gates + chunk * 6 * C + i
    tl.store(base, tl.exp(a))
    tl.store(base + C, earlier_N + written_N)
    tl.store(base + 2 * C, earlier_N)
    tl.store(base + 3 * C, last(both) * rate)
    tl.store(base + 4 * C, last(mu) * rate)
    tl.store(base + 5 * C, held)


@triton.jit
def initial_states(state, n, h, ks, vs, traits: tl.constexpr):
    """Load S and N before a sequence from state [N, H, 2, K, V]; None: they are 0."""
    BK: tl.constexpr = traits.BK
    BV: tl.constexpr = traits.BV
    if state is None:
        S = tl.zeros([BK, BV], tl.float32)
        N = tl.zeros([BK, BV], tl.float32)
    else:
        S = load_state(state, (n * traits.H + h) * 2, ks, vs, traits)
        N = load_state(state, (n * traits.H + h) * 2 + 1, ks, vs, traits)
    return S, N


@triton.jit(do_not_specialize=["G", "head", "heads"])
def momentum_scan_kernel(
    q, k, v, scores, inverse, gates, state, starts, o, final, error, G, head, heads, traits: tl.constexpr
):
    """Scan the chunks of a sequence. Grid: sequence, head, value tile.

    Reads q, k, v; scores and inverse [G, H, C, C]; gates [G, H, 6, C]; state [N, H, 2, K, V], unless None. Writes o
    and error [G, C, H, V], and final [N, H, 2, K, V].
    """
    C: tl.constexpr = traits.C
    dtype: tl.constexpr = k.dtype.element_ty
    n, begin, end, h, vs = locate(starts, G, heads, head, traits)
    ks = tl.arange(0, traits.BK)
    S, N = initial_states(state, n, h, ks, vs, traits)
    for slot in range(begin, end):
        chunk = slot * traits.H + h
        k_tile = load_tile(k, slot, h, ks, traits.K, traits)
        q_tile = load_tile(q, slot, h, ks, traits.K, traits)
        S_half, N_half = S.to(dtype), N.to(dtype)
        kept, carried = load_gate(gates, chunk, 0, C), load_gate(gates, chunk, 1, C)
        early = load_gate(gates, chunk, 2, C)
        read = kept[:, None] * tl.dot(k_tile, S_half) + early[:, None] * tl.dot(k_tile, N_half)
        read = load_tile(v, slot, h, vs, traits.V, traits).to(tl.float32) - read
        e = tl.dot(load_square(inverse, chunk, C), read.to(inverse.dtype.element_ty))
        store_tile(error, e, slot, h, vs, traits.V, traits)
        out = kept[:, None] * tl.dot(q_tile, S_half) + carried[:, None] * tl.dot(q_tile, N_half)
        out += tl.dot(load_square(scores, chunk, C), e.to(dtype))
        store_tile(o, out, slot, h, vs, traits.V, traits)
        kept_C, carried_C, held_C = load_last(gates, chunk, C)
        k_T = tl.trans(k_tile)
        S = kept_C * S + carried_C * N
        S = tl.dot(k_T, scaled(e, load_gate(gates, chunk, 3, C), dtype), S)
        N = tl.dot(k_T, scaled(e, load_gate(gates, chunk, 4, C), dtype), held_C * N)
    store_state(final, S, (n * traits.H + h) * 2, ks, vs, traits)
    store_state(final, N, (n * traits.H + h) * 2 + 1, ks, vs, traits)


@triton.jit(do_not_specialize=["G", "head", "heads"])
def momentum_states_kernel(k, gates, error, state, starts, states, G, head, heads, traits: tl.constexpr):
    """Compute the states before each chunk of a window of heads again. Grid: sequence, head, value tile.

    Reads k, gates, error and state. Writes states [G, heads, 2, K, V].
    """
    C: tl.constexpr = traits.C
    dtype: tl.constexpr = k.dtype.element_ty
    n, begin, end, h, vs = locate(starts, G, heads, head, traits)
    ks = tl.arange(0, traits.BK)
    S, N = initial_states(state, n, h, ks, vs, traits)
    for slot in range(begin, end):
        chunk = slot * traits.H + h
        at = (slot * heads + h - head) * 2
        store_state(states, S, at, ks, vs, traits)
        store_state(states, N, at + 1, ks, vs, traits)
        k_T = tl.trans(load_tile(k, slot, h, ks, traits.K, traits))
        e = load_tile(error, slot, h, vs, traits.V, traits)
        kept_C, carried_C, held_C = load_last(gates, chunk, C)
        S = kept_C * S + carried_C * N
        S = tl.dot(k_T, scaled(e, load_gate(gates, chunk, 3, C), dtype), S)
        N = tl.dot(k_T, scaled(e, load_gate(gates, chunk, 4, C), dtype), held_C * N)


@triton.jit(do_not_specialize=["G", "head", "heads"])
def momentum_reverse_kernel(
    q, k, scores, inverse, gates, starts, d_o, d_final, d_states, d_v, d_state, G, head, heads, traits: tl.constexpr
):
    """Scan the chunks backwards for a window of heads. Grid: sequence, head, value tile.

    Reads q, k, d_o; scores and inverse; gates; d_final [N, H, 2, K, V]. Writes d_states [G, heads, 2, K, V], the
    gradients of the states after each chunk; d_v, which is also that of what the inverse is applied to; and d_state.
    """
    C: tl.constexpr = traits.C
    dtype: tl.constexpr = k.dtype.element_ty
    n, begin, end, h, vs = locate(starts, G, heads, head, traits)
    ks = tl.arange(0, traits.BK)
    dS = load_state(d_final, (n * traits.H + h) * 2, ks, vs, traits)
    dN = load_state(d_final, (n * traits.H + h) * 2 + 1, ks, vs, traits)
    for back in range(end - begin):
        slot = end - 1 - back
        chunk = slot * traits.H + h
        at = (slot * heads + h - head) * 2
        dS_half, dN_half = dS.to(dtype), dN.to(dtype)
        store_state(d_states, dS_half, at, ks, vs, traits)
        store_state(d_states, dN_half, at + 1, ks, vs, traits)
        k_tile = load_tile(k, slot, h, ks, traits.K, traits)
        q_T = tl.trans(load_tile(q, slot, h, ks, traits.K, traits))
        d_out = load_tile(d_o, slot, h, vs, traits.V, traits)
        d_e = load_gate(gates, chunk, 3, C)[:, None] * tl.dot(k_tile, dS_half)
        d_e += load_gate(gates, chunk, 4, C)[:, None] * tl.dot(k_tile, dN_half)
        d_e += tl.dot(tl.trans(load_square(scores, chunk, C)), d_out)
        T_T = tl.trans(load_square(inverse, chunk, C))
        d_read = tl.dot(T_T, d_e.to(T_T.dtype))
        store_tile(d_v, d_read, slot, h, vs, traits.V, traits)
        kept, carried = load_gate(gates, chunk, 0, C), load_gate(gates, chunk, 1, C)
        early = load_gate(gates, chunk, 2, C)
        kept_C, carried_C, held_C = load_last(gates, chunk, C)
        k_T = tl.trans(k_tile)
        dN = carried_C * dS + held_C * dN
        dN = tl.dot(q_T, scaled(d_out, carried, dtype), dN)
        dN = tl.dot(k_T, scaled(d_read, -early, dtype), dN)
        dS = tl.dot(q_T, scaled(d_out, kept, dtype), kept_C * dS)
        dS = tl.dot(k_T, scaled(d_read, -kept, dtype), dS)
    store_state(d_state, dS, (n * traits.H + h) * 2, ks, vs, traits)
    store_state(d_state, dN, (n * traits.H + h) * 2 + 1, ks, vs, traits)


@triton.jit(do_not_specialize=["G", "head", "heads"])
def momentum_gradients_kernel(
    q, k, gates, error, d_o, d_v, states, d_states, pairs, d_q, d_k, partial, G, head, heads, traits: tl.constexpr
):
    """Compute the gradients of keys and gates from the states of a window of heads. Grid: slot, head, key tile.

    Reads q, k, error, d_o, d_v; states and d_states [G, heads, 2, K, V]; pairs [G, heads, 2, C, C]. Writes d_q and
    d_k, and partial [key tiles, G, H, 6, C], the gradients of the gates.
    """
    C: tl.constexpr = traits.C
    BK: tl.constexpr = traits.BK
    tiles: tl.constexpr = (traits.K + traits.BK - 1) // traits.BK
    tile = tl.program_id(0) % tiles
    h = head + tl.program_id(0) // tiles % heads
    slot = (tl.program_id(0) // tiles // heads).to(tl.int64)
    chunk = slot * traits.H + h
    at = (slot * heads + h - head) * 2
    ks = tile * traits.BK + tl.arange(0, traits.BK)
    o_S = tl.zeros([C, BK], tl.float32)
    o_N = tl.zeros([C, BK], tl.float32)
    read_S = tl.zeros([C, BK], tl.float32)
    read_N = tl.zeros([C, BK], tl.float32)
    e_dS = tl.zeros([C, BK], tl.float32)
    e_dN = tl.zeros([C, BK], tl.float32)
    kept_C = 0.0
    carried_C = 0.0
    held_C = 0.0
    for start in range(0, traits.V, traits.BV):
        vs = start + tl.arange(0, traits.BV)
        S, N = load_state(states, at, ks, vs, traits), load_state(states, at + 1, ks, vs, traits)
        dS, dN = load_state(d_states, at, ks, vs, traits), load_state(d_states, at + 1, ks, vs, traits)
        out = load_tile(d_o, slot, h, vs, traits.V, traits)
        read = load_tile(d_v, slot, h, vs, traits.V, traits)
        e = load_tile(error, slot, h, vs, traits.V, traits)
        o_S, o_N = tl.dot(out, tl.trans(S), o_S), tl.dot(out, tl.trans(N), o_N)
        read_S, read_N = tl.dot(read, tl.trans(S), read_S), tl.dot(read, tl.trans(N), read_N)
        e_dS, e_dN = tl.dot(e, tl.trans(dS), e_dS), tl.dot(e, tl.trans(dN), e_dN)
        dS = dS.to(tl.float32)
        kept_C += tl.sum(dS * S)
        carried_C += tl.sum(dS * N)
        held_C += tl.sum(dN.to(tl.float32) * N)
    q_half = load_tile(q, slot, h, ks, traits.K, traits)
    k_half = load_tile(k, slot, h, ks, traits.K, traits)
    q_tile, k_tile = q_half.to(tl.float32), k_half.to(tl.float32)
    of_keys, of_queries = load_square(pairs, at, C), load_square(pairs, at + 1, C)
    kept, carried = load_gate(gates, chunk, 0, C)[:, None], load_gate(gates, chunk, 1, C)[:, None]
    early = load_gate(gates, chunk, 2, C)[:, None]
    write_S, write_N = load_gate(gates, chunk, 3, C)[:, None], load_gate(gates, chunk, 4, C)[:, None]
    d_queries = tl.dot(of_queries, k_half, kept * o_S + carried * o_N)
    store_tile(d_q, d_queries, slot, h, ks, traits.K, traits)
    d_keys = write_S * e_dS + write_N * e_dN - kept * read_S - early * read_N
    d_keys = tl.dot(of_keys, k_half, d_keys)
    d_keys = tl.dot(tl.trans(of_keys), k_half, d_keys)
    d_keys = tl.dot(tl.trans(of_queries), q_half, d_keys)
    store_tile(d_k, d_keys, slot, h, ks, traits.K, traits)
    i = tl.arange(0, C)
    is_last = i == C - 1
    base = partial + ((tile.to(tl.int64) * G + slot) * traits.H + h) * (6 * C) + i
    tl.store(base, tl.sum(q_tile * o_S - k_tile * read_S, 1) + tl.where(is_last, kept_C, 0.0))
    tl.store(base + C, tl.sum(q_tile * o_N, 1) + tl.where(is_last, carried_C, 0.0))
    tl.store(base + 2 * C, -tl.sum(k_tile * read_N, 1))
    tl.store(base + 3 * C, tl.sum(k_tile * e_dS, 1))
    tl.store(base + 4 * C, tl.sum(k_tile * e_dN, 1))
    tl.store(base + 5 * C, tl.where(is_last, held_C, 0.0))


@triton.jit(do_not_specialize=["head", "heads"])
def momentum_pairs_kernel(
    q, k, log_alpha, log_mu, beta, eta, error, d_o, d_v, pairs, d_pairs, head, heads, traits: tl.constexpr
):
    """Compute the gradients of A and P, -d_v e^T and d_o e^T, and theirs of pairs of tokens. Grid: slot, head.

    Reads q, k, error, d_o, d_v; the gates of the tokens. Writes pairs [G, heads, 2, C, C], the weights of k_t k_s and
    q_t k_s in the gradients of keys and queries; d_pairs [G, H, 2, C, C] float32, the gradients of A and P times their
    products of keys.
    """
    C: tl.constexpr = traits.C
    slot = (tl.program_id(0) // heads).to(tl.int64)
    h = head + tl.program_id(0) % heads
    chunk = slot * traits.H + h
    system = tl.zeros([C, C], tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    for start in range(0, traits.V, traits.BV):
        vs = start + tl.arange(0, traits.BV)
        e_T = tl.trans(load_tile(error, slot, h, vs, traits.V, traits))
        system = tl.dot(load_tile(d_v, slot, h, vs, traits.V, traits), e_T, system)
        scores = tl.dot(load_tile(d_o, slot, h, vs, traits.V, traits), e_T, scores)
    i = tl.arange(0, C)
    at = i[:, None] * C + i[None, :]
    system = tl.where(i[:, None] > i[None, :], -system, 0.0)
    scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
    keys, queries = key_products(q, k, slot, h, traits)
    tl.store(d_pairs + chunk * (2 * C * C) + at, system * keys)
    tl.store(d_pairs + chunk * (2 * C * C) + C * C + at, scores * queries)
    _, _, written, earlier, _, _, _ = token_weights(log_alpha, log_mu, beta, slot, h, traits)
    rate = load_token_gate(eta, slot, h, traits)
    base = pairs + (slot * heads + h - head) * (2 * C * C) + at
    tl.store(base, (system * earlier * rate[None, :]).to(pairs.dtype.element_ty))
    tl.store(base + C * C, (scores * (earlier + written) * rate[None, :]).to(pairs.dtype.element_ty))


@triton.jit
def store_token_gate(x, values, slot, h, traits: tl.constexpr):
    """Store a gate x [G, C, H] of a chunk."""
    i = tl.arange(0, traits.C)
    tl.store(x + (slot * traits.C + i) * traits.H + h, values)


@triton.jit
def below_sums(x):
    """Return the gradient of a total of which x is the gradient of total_t - total_s, s < t."""
    i = tl.arange(0, x.shape[0])
    below = tl.where(i[:, None] > i[None, :], x, 0.0)
    return tl.sum(below, 1) - tl.sum(below, 0)


@triton.jit(do_not_specialize=["G"])
def momentum_gates_kernel(
    log_alpha, log_mu, beta, eta, d_pairs, partial, d_log_alpha, d_log_mu, d_beta, d_eta, G, traits: tl.constexpr
):
    """Compute the gradients of the gates of the tokens. Grid: slot, head.

    Reads the gates; d_pairs; partial [key tiles, G, H, 6, C]. Writes d_log_alpha, d_log_mu, d_beta, d_eta [G, C, H].
    """
    C: tl.constexpr = traits.C
    tiles: tl.constexpr = (traits.K + traits.BK - 1) // traits.BK
    chunk = tl.program_id(0).to(tl.int64)
    slot, h = chunk // traits.H, chunk % traits.H
    i = tl.arange(0, C)
    alpha, mu, written, earlier, a, m, strength = token_weights(log_alpha, log_mu, beta, slot, h, traits)
    rate = load_token_gate(eta, slot, h, traits)
    d_kept = tl.zeros([C], tl.float32)
    d_carried = tl.zeros([C], tl.float32)
    d_early = tl.zeros([C], tl.float32)
    d_write_S = tl.zeros([C], tl.float32)
    d_write_N = tl.zeros([C], tl.float32)
    d_held = tl.zeros([C], tl.float32)
    for tile in range(tiles):
        base = partial + ((tile * G).to(tl.int64) * traits.H + chunk) * (6 * C) + i
        d_kept += tl.load(base)
        d_carried += tl.load(base + C)
        d_early += tl.load(base + 2 * C)
        d_write_S += tl.load(base + 3 * C)
        d_write_N += tl.load(base + 4 * C)
        d_held += tl.load(base + 5 * C)
    at = d_pairs + chunk * (2 * C * C) + i[:, None] * C + i[None, :]
    of_system, of_scores = tl.load(at), tl.load(at + C * C)
    both = earlier + written
    is_last = (i == C - 1)[:, None]
    gradient = tl.sum(of_system * earlier + of_scores * both, 0)
    store_token_gate(d_eta, gradient + d_write_S * last(both) + d_write_N * last(mu), slot, h, traits)
    d_both = of_scores * rate[None, :] + tl.where(is_last, (d_write_S * rate)[None, :], 0.0)
    d_earlier = d_both + of_system * rate[None, :]
    d_earlier_N = d_carried + d_early
    held = tl.exp(m)
    d_written = d_both + tl.dot(tl.trans(alpha), d_earlier, input_precision="tf32")
    d_written_N = d_carried + tl.sum(alpha * d_earlier_N[:, None], 0)
    d_alpha = tl.dot(d_earlier, tl.trans(written), input_precision="tf32")
    d_alpha += d_earlier_N[:, None] * (strength * held)[None, :]
    store_token_gate(d_beta, tl.sum(d_written * mu, 1) + d_written_N * held, slot, h, traits)
    d_a = below_sums(d_alpha * alpha) + d_kept * tl.exp(a)
    store_token_gate(d_log_alpha, tl.cumsum(d_a, 0, reverse=True), slot, h, traits)
    d_mu = d_written * strength[:, None] + tl.where(is_last, (d_write_N * rate)[None, :], 0.0)
    d_m = below_sums(d_mu * mu) + (d_written_N * strength + d_held) * held
    store_token_gate(d_log_mu, tl.cumsum(d_m, 0, reverse=True), slot, h, traits)


@triton.jit
def momentum_step_kernel(q, k, v, alpha, mu, beta, eta, S, N, o, traits: tl.constexpr):
    """Decode one token. Grid: row, head, value tile. Updates S and N [B, H, K, V] in place, and writes o [B, H, V]."""
    tiles: tl.constexpr = (traits.V + traits.BV - 1) // traits.BV
    row = (tl.program_id(0) // tiles).to(tl.int64)
    ks = tl.arange(0, traits.BK)
    vs = tl.program_id(0) % tiles * traits.BV + tl.arange(0, traits.BV)
    key = tl.load(k + row * traits.K + ks, mask=ks < traits.K, other=0.0).to(tl.float32)
    query = tl.load(q + row * traits.K + ks, mask=ks < traits.K, other=0.0).to(tl.float32)
    value = tl.load(v + row * traits.V + vs, mask=vs < traits.V, other=0.0).to(tl.float32)
    state = tl.load(alpha + row) * load_state(S, row, ks, vs, traits)
    error = tl.load(eta + row) * (value - tl.sum(key[:, None] * state, 0))
    momentum = tl.load(mu + row) * load_state(N, row, ks, vs, traits) + key[:, None] * error[None, :]
    state += tl.load(beta + row) * momentum
    store_state(S, state, row, ks, vs, traits)
    store_state(N, momentum, row, ks, vs, traits)
    out = tl.sum(query[:, None] * state, 0)
    tl.store(o + row * traits.V + vs, out.to(o.dtype.element_ty), mask=vs < traits.V)
