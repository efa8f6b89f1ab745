"""Decode step of an elementwise recurrence: one token per row; the state is read, updated and written once.

S = d * S + k v^T,    o = scale S^T q, or that of the state before the update with READ_BEFORE
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pool_rows"])
def element_step_kernel(
    q, k, v, log_decay, step, rate, states, slots, o, scale, pool_rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BC: tl.constexpr, DECAY: tl.constexpr, READ_BEFORE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Update BC channels of one row. Grid: row, block of channels.

    Reads q, k [B, H, K]; v [B, HV, V]; log_decay [B, HV], [B, HV, K], [HV] or [HV, K]; step [B, HV] and rate [HV, K];
    with SLOTS slots [B] int64, the pool row that holds each row's state. Updates states [pool_rows, HV, K, V] float32
    in place. Writes o [B, HV, V]. K and V are rounded up to KP and VP.

    A slot outside the pool (-1, say) accesses no state, and its output is zero. The caller guarantees that no two rows
    share a slot: their updates would race.
    """
    BLOCKS: tl.constexpr = (HV + BC - 1) // BC
    row = tl.cast(tl.program_id(0) // BLOCKS, tl.int64)
    hv = (tl.program_id(0) % BLOCKS * BC + tl.arange(0, BC))[:, None, None]
    n = tl.arange(0, KP)[None, :, None]
    vi = tl.arange(0, VP)[None, None, :]
    in_values = (hv < HV) & (vi < V)
    in_keys = (hv < HV) & (n < K)
    in_state = in_keys & (vi < V)
    slot = row
    if SLOTS:
        slot = tl.load(slots + row)
        in_pool = (slot >= 0) & (slot < pool_rows)
        in_state = in_state & in_pool
    at = states + slot * (HV * K * V) + (hv * K + n) * V + vi
    S = tl.load(at, mask=in_state, other=0.0)
    key = (row * H + hv // (HV // H)) * K + n
    q_k = tl.load(q + key, mask=in_keys, other=0.0).to(tl.float32)
    k_k = tl.load(k + key, mask=in_keys, other=0.0).to(tl.float32)
    v_v = tl.load(v + (row * HV + hv) * V + vi, mask=in_values, other=0.0).to(tl.float32)
    if READ_BEFORE:
        out = tl.sum(S * q_k, 1)
    if DECAY == "rate":
        step_h = tl.load(step + row * HV + hv, mask=hv < HV, other=0.0)
        S = tl.exp(step_h * tl.load(rate + hv * K + n, mask=in_keys, other=0.0)) * S
    elif DECAY == "fixed":
        S = tl.exp(tl.load(log_decay + hv, mask=hv < HV, other=0.0)) * S
    elif DECAY == "fixed_channel":
        S = tl.exp(tl.load(log_decay + hv * K + n, mask=in_keys, other=0.0)) * S
    elif DECAY == "head":
        S = tl.exp(tl.load(log_decay + row * HV + hv, mask=hv < HV, other=0.0)) * S
    elif DECAY == "channel":
        S = tl.exp(tl.load(log_decay + (row * HV + hv) * K + n, mask=in_keys, other=0.0)) * S
    S += k_k * v_v
    if not READ_BEFORE:
        out = tl.sum(S * q_k, 1)
    tl.store(at, S, mask=in_state)
    out = tl.expand_dims(out, 1) * scale
    if SLOTS:
        out = tl.where(in_pool, out, 0.0)
    tl.store(o + (row * HV + hv) * V + vi, out.to(o.dtype.element_ty), mask=in_values)
