"""Decode step: one token per row; the state is read, updated and written in place once.

H key heads, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.decode.micro_step import micro_step
from deltazoo.backends.triton.kernels.step_size import step_size


@triton.jit(do_not_specialize=["pool_rows"])
def decode_kernel(
    q, k, e, v, log_decay, b, w, states, slots, o, scale, pool_rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STEPS: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, ERASE_KEY: tl.constexpr, ERASE: tl.constexpr,
    WRITE: tl.constexpr, ERASE_EARLY: tl.constexpr, READ_EARLY: tl.constexpr, SLOTS: tl.constexpr,
    REPARAM: tl.constexpr,
):  # fmt: skip
    """Make STEPS micro-steps of one token, with the decay in the first and the output read after the last.

    Grid: row, value head, V tile. Each program owns S [K, BV] of its row.

    Reads q [B, H, K]; k, e [B, STEPS, H, K]; v [B, STEPS, HV, V]; log_decay [B, HV], [B, HV, K] or [HV];
    b, w [B, STEPS, HV], with REPARAM "efla" or "longhorn" beta (../step_size.py); with SLOTS slots [B] int64, the pool
    row that holds each row's state.
    Updates states [pool_rows, HV, K, V] in place. Writes o [B, HV, V].

    A slot outside the pool (-1, say) accesses no state, and its output is zero. The caller guarantees that no two rows
    share a slot: their updates would race.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    row = tl.cast(pid // (HV * TILES), tl.int64)
    hv = pid // TILES % HV
    h = hv // (HV // H)
    ks = tl.arange(0, BK)
    vs = (pid % TILES) * BV + tl.arange(0, BV)
    in_k = ks < K
    in_v = vs < V
    in_state = in_k[:, None] & in_v[None, :]
    slot = row
    if SLOTS:
        slot = tl.load(slots + row)
        in_pool = (slot >= 0) & (slot < pool_rows)
        in_state = in_state & in_pool
    at = states + (slot * HV + hv) * K * V + ks[:, None] * V + vs[None, :]
    S = tl.load(at, mask=in_state, other=0.0)
    q_k = tl.load(q + (row * H + h) * K + ks, mask=in_k, other=0.0).to(tl.float32)
    if READ_EARLY:
        out = tl.sum(S * q_k[:, None], 0)
    decay = 1.0
    if DECAY == "head":
        decay = tl.exp(tl.load(log_decay + row * HV + hv))
    if DECAY == "fixed":
        decay = tl.exp(tl.load(log_decay + hv))
    if DECAY == "channel":
        decay = tl.exp(tl.load(log_decay + (row * HV + hv) * K + ks, mask=in_k, other=0.0))[:, None]
    for m in tl.static_range(STEPS):
        step = row * STEPS + m
        k_k = tl.load(k + (step * H + h) * K + ks, mask=in_k, other=0.0).to(tl.float32)
        u = tl.load(v + (step * HV + hv) * V + vs, mask=in_v, other=0.0).to(tl.float32)
        if REPARAM != "none":
            beta = tl.load(b + step * HV + hv).to(tl.float32)
            strength, _, _ = step_size(beta, tl.sum(k_k * k_k, 0), REPARAM == "efla")
            u *= strength
        elif WRITE:
            u *= tl.load(w + step * HV + hv).to(tl.float32)
        e_k = k_k
        if ERASE_KEY:
            e_k = tl.load(e + (step * H + h) * K + ks, mask=in_k, other=0.0).to(tl.float32)
        if REPARAM != "none":
            e_k *= strength
        elif ERASE:
            e_k *= tl.load(b + step * HV + hv).to(tl.float32)
        S = micro_step(S, k_k, e_k, u, decay, DECAY != "none" and m == 0, DELTA, ERASE_EARLY)
    tl.store(at, S, mask=in_state)
    if not READ_EARLY:
        out = tl.sum(S * q_k[:, None], 0)
    out *= scale
    if SLOTS:
        out = tl.where(in_pool, out, 0.0)
    tl.store(o + (row * HV + hv) * V + vs, out.to(o.dtype.element_ty), mask=in_v)
