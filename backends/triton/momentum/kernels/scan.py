"""Kernels of the delta rule with momentum. `backends/ops/momentum_chunks.py` has the equations.

Sequences are padded to slots of C tokens, so that no kernel masks time. A program of a scan holds a tile of the values
of both states in registers, and processes the slots of one sequence.

G chunk slots, C tokens of a chunk, N sequences, H heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.momentum.kernels.operands import (
    key_products,
    load_token_gate,
    token_weights,
)
from deltazoo.backends.triton.momentum.kernels.tiles import (
    load_gate,
    load_last,
    load_square,
    load_state,
    load_tile,
    locate,
    scaled,
    store_state,
    store_tile,
)


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


@triton.jit
def next_states(S, N, k_tile, e, gates, chunk, C: tl.constexpr):
    """Return S and N after a chunk, from its keys and its errors e."""
    kept, carried, held = load_last(gates, chunk, C)
    k_T = tl.trans(k_tile)
    S = kept * S + carried * N
    S = tl.dot(k_T, scaled(e, load_gate(gates, chunk, 3, C), k_tile.dtype), S)
    N = tl.dot(k_T, scaled(e, load_gate(gates, chunk, 4, C), k_tile.dtype), held * N)
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
        S, N = next_states(S, N, k_tile, e, gates, chunk, C)
    store_state(final, S, (n * traits.H + h) * 2, ks, vs, traits)
    store_state(final, N, (n * traits.H + h) * 2 + 1, ks, vs, traits)


@triton.jit(do_not_specialize=["G", "head", "heads"])
def momentum_states_kernel(k, gates, error, state, starts, states, G, head, heads, traits: tl.constexpr):
    """Compute the states before each chunk of a window of heads again. Grid: sequence, head, value tile.

    Reads k, gates, error and state. Writes states [G, heads, 2, K, V].
    """
    C: tl.constexpr = traits.C
    n, begin, end, h, vs = locate(starts, G, heads, head, traits)
    ks = tl.arange(0, traits.BK)
    S, N = initial_states(state, n, h, ks, vs, traits)
    for slot in range(begin, end):
        chunk = slot * traits.H + h
        at = (slot * heads + h - head) * 2
        store_state(states, S, at, ks, vs, traits)
        store_state(states, N, at + 1, ks, vs, traits)
        k_tile = load_tile(k, slot, h, ks, traits.K, traits)
        e = load_tile(error, slot, h, vs, traits.V, traits)
        S, N = next_states(S, N, k_tile, e, gates, chunk, C)


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
