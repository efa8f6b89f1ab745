"""Decode kernels: one token per row, or drafted tokens whose states are committed later.

    decode:  o, states = update of one token
    verify:  o_1..n and the written values x_1..n of n drafted tokens; the states are read once and do not change
    commit:  states = D_t states + sum_i k_ti x_ti^T for the first tokens of each row; read and written once

token.py states the update. H key heads, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.token import load_token, load_write, locate, update_token, write_token
from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous


@triton.jit(do_not_specialize=["pool_rows"])
def decode_kernel(
    q, k, e, v, log_decay, erase, write, a, b, states, slots, o, scale, pool_rows, traits: tl.constexpr,
):  # fmt: skip
    """Update the state by one token.

    Grid: row, value head, V tile. Each program owns S [K, BV] of its row.

    Reads q [B, H, K]; k, e [B, STEPS, H, K]; v [B, STEPS, HV, V]; log_decay [B, HV] or [B, HV, K], without B if fixed;
    erase, write [B, STEPS, HV] (without erase write is both), or [B, STEPS, HV, K] and [B, STEPS, HV, V]; a, b
    [B, HV, K] of dplr; with SLOTS slots [B] int64, the pool row that holds each row's state.
    Updates states [pool_rows, HV, K, V] in place. Writes o [B, HV, V].

    A slot outside the pool (-1, say) accesses no state, and its output is zero. The caller guarantees that no two rows
    share a slot: their updates would race.
    """
    if traits.OVERLAP:
        start_next()
    row, hv, ks, vs, in_k, in_v, at, in_state, in_pool = locate(states, slots, pool_rows, traits)
    if traits.OVERLAP:
        first = (tl.program_id(0) % ((traits.V + traits.BV - 1) // traits.BV)) * traits.BV
        line = tl.minimum(first + tl.arange(0, max(1, traits.BV // 32)) * 32, traits.V - 1)  # 32 numbers fill a line
        head = states + (row * traits.HV + hv) * traits.K * traits.V
        prefetch_line(head + tl.minimum(ks, traits.K - 1)[:, None] * traits.V + line[None, :])
        wait_for_previous()
    S = tl.load(at, mask=in_state, other=0.0)
    operands = load_token(q, k, e, v, log_decay, erase, write, a, b, row, hv, ks, vs, in_k, in_v, traits)
    S, out, _ = update_token(S, operands, traits)
    tl.store(at, S, mask=in_state)
    out *= scale
    if traits.SLOTS:
        out = tl.where(in_pool, out, 0.0)
    tl.store(o + (row * traits.HV + hv) * traits.V + vs, out.to(o.dtype.element_ty), mask=in_v)


@triton.jit(do_not_specialize=["pool_rows", "tokens"])
def verify_kernel(
    q, k, e, v, log_decay, erase, write, a, b, states, slots, o, values, scale, pool_rows, tokens,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute the outputs and written values of drafted tokens.

    Grid: row, value head, V tile. Each program keeps S [K, BV] of its row in registers.

    Reads what decode_kernel reads, with an axis of `tokens` after B, and states [pool_rows, HV, K, V].
    Writes o [B, tokens, HV, V] and values [B, tokens, WRITES, HV, V], with WRITES = 2 with DPLR, else STEPS.

    A slot outside the pool (-1, say) accesses no state, and its output is zero.
    """
    WRITES: tl.constexpr = 2 if traits.DPLR else traits.STEPS
    row, hv, ks, vs, in_k, in_v, at, in_state, in_pool = locate(states, slots, pool_rows, traits)
    S = tl.load(at, mask=in_state, other=0.0)
    first = row * tokens
    ahead = load_token(q, k, e, v, log_decay, erase, write, a, b, first, hv, ks, vs, in_k, in_v, traits)
    for t in range(tokens):
        token = first + t
        operands = ahead
        following = first + tl.minimum(t + 1, tokens - 1)
        ahead = load_token(q, k, e, v, log_decay, erase, write, a, b, following, hv, ks, vs, in_k, in_v, traits)
        S, out, written = update_token(S, operands, traits)
        out *= scale
        if traits.SLOTS:
            out = tl.where(in_pool, out, 0.0)
        tl.store(o + (token * traits.HV + hv) * traits.V + vs, out.to(o.dtype.element_ty), mask=in_v)
        for m in tl.static_range(WRITES):
            tl.store(values + ((token * WRITES + m) * traits.HV + hv) * traits.V + vs, written[m], mask=in_v)


@triton.jit(do_not_specialize=["pool_rows", "tokens"])
def commit_kernel(k, log_decay, b, values, states, slots, accepted, pool_rows, tokens, traits: tl.constexpr):
    """Advance each state by its row's first `accepted` tokens.

    Grid: row, value head, V tile. Each program owns S [K, BV] of its row.

    Reads accepted [B] int32; of accepted tokens k, log_decay and b as decode_kernel does, and values as verify_kernel
    writes them. Updates states [pool_rows, HV, K, V] in place.

    A row with a slot outside the pool or without an accepted token accesses no state. The caller guarantees that no two
    rows share a slot.
    """
    row, hv, ks, vs, in_k, in_v, at, in_state, _ = locate(states, slots, pool_rows, traits)
    count = tl.minimum(tl.load(accepted + row), tokens)
    in_state = in_state & (count > 0)
    S = tl.load(at, mask=in_state, other=0.0)
    first = row * tokens
    ahead = load_write(k, log_decay, b, values, first, hv, ks, vs, in_k, in_v, traits)
    for t in range(count):
        operands = ahead
        following = first + tl.minimum(t + 1, count - 1)
        ahead = load_write(k, log_decay, b, values, following, hv, ks, vs, in_k, in_v, traits)
        S = write_token(S, operands, traits)
    tl.store(at, S, mask=in_state)
