"""The update of one token in the decode kernels, from the operands of the spec without a lowering.

    S_t = D_t S_{t-1} + sum_m k_tm x_tm^T       x_tm = w_tm v_tm - R^T (b_tm e_tm), with R as in `micro_step`
    dplr:  S_t = D_t S_{t-1} + b_t (a_t^T S_{t-1}) + k_t (w_t v_t)^T, two writes: b with x = a^T S_{t-1}, k with w v
    o_t = scale S_t^T q_t, or scale S_{t-1}^T q_t with READ_BEFORE

H key heads, HV value heads, K key width, V value width; a tile has BK keys (all) and BV values
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.micro_step import micro_step
from deltazoo.backends.triton.device.step_size import step_size


class TokenTraits(NamedTuple):
    """Compile-time properties of a token's update."""

    H: int
    HV: int
    K: int
    V: int
    BK: int
    BV: int
    STEPS: int  # micro-steps: keys and values of a token; 1 with DPLR
    DECAY: str  # "none", "head" [.., HV] or "channel" [.., HV, K]
    FIXED: bool  # the decay has no token axis
    DELTA: bool  # erases with e; not with DPLR
    DPLR: bool  # dplr: erases with a and writes with b
    ERASE_KEY: bool  # e is an operand; else k
    STRENGTH: str  # of erase and write: "none", "head" [.., HV], "separate" two of these, "channel" [.., HV, K or V]
    ERASE_FACTOR: float  # of the erase strength
    WRITE_FACTOR: float
    REPARAM: str  # "none", "efla" or "longhorn"
    ERASE_PREVIOUS: bool
    READ_BEFORE: bool
    SLOTS: bool
    OVERLAP: bool  # of decode_kernel, see device/overlap.py; not with SLOTS


@triton.jit
def load_log_decay(log_decay, token, hv, ks, in_k, traits: tl.constexpr):
    """Load the log decay of a token, a number or [BK]; 0 without a decay."""
    at = hv if traits.FIXED else token * traits.HV + hv
    loaded = 0.0
    if traits.DECAY == "head":
        loaded = tl.load(log_decay + at)
    if traits.DECAY == "channel":
        loaded = tl.load(log_decay + at * traits.K + ks, mask=in_k, other=0.0)
    return loaded


@triton.jit
def decay_of(log_decay, traits: tl.constexpr):
    """Return the factor of S, a number or [BK, 1]."""
    decay = 1.0
    if traits.DECAY == "head":
        decay = tl.exp(log_decay)
    if traits.DECAY == "channel":
        decay = tl.exp(log_decay)[:, None]
    return decay


@triton.jit
def load_token(
    q, k, e, v, log_decay, erase, write, a, b, token, hv, ks, vs, in_k, in_v, traits: tl.constexpr,
):  # fmt: skip
    """Load the operands of a token as `update_token` takes them.

    All loads are issued before the first conversion to float32: a conversion of the layout is a barrier, which would
    wait for one load before it issues the next.

    Returns: q, log decay; tuples of the micro-steps' k, e, v, erase and write strengths, and (a, b), empty if absent.
    """
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    STEPS: tl.constexpr = traits.STEPS
    h = hv // (HV // traits.H)
    q_k = tl.load(q + (token * traits.H + h) * K + ks, mask=in_k, other=0.0)
    g = load_log_decay(log_decay, token, hv, ks, in_k, traits)
    keys = ()
    erase_keys = ()
    values = ()
    erases = ()
    writes = ()
    pair = ()
    for m in tl.static_range(STEPS):
        step = token * STEPS + m
        keys = keys + (tl.load(k + (step * traits.H + h) * K + ks, mask=in_k, other=0.0),)
        values = values + (tl.load(v + (step * HV + hv) * V + vs, mask=in_v, other=0.0),)
        if traits.ERASE_KEY:
            erase_keys = erase_keys + (tl.load(e + (step * traits.H + h) * K + ks, mask=in_k, other=0.0),)
        if traits.STRENGTH == "head" or traits.STRENGTH == "separate":
            writes = writes + (tl.load(write + step * HV + hv),)
        if traits.STRENGTH == "separate":
            erases = erases + (tl.load(erase + step * HV + hv),)
        if traits.STRENGTH == "channel":
            writes = writes + (tl.load(write + (step * HV + hv) * V + vs, mask=in_v, other=0.0),)
            if traits.DELTA:
                erases = erases + (tl.load(erase + (step * HV + hv) * K + ks, mask=in_k, other=0.0),)
    if traits.DPLR:
        at = (token * HV + hv) * K + ks
        pair = (tl.load(a + at, mask=in_k, other=0.0), tl.load(b + at, mask=in_k, other=0.0))
    return q_k, g, keys, erase_keys, values, erases, writes, pair


@triton.jit
def update_token(S, operands, traits: tl.constexpr):
    """Apply the update of a token to S [BK, BV]. operands: of `load_token`.

    Returns: S, S^T q without the scale [BV], and a tuple of the written values x [BV], one for each micro-step.
    """
    STEPS: tl.constexpr = traits.STEPS
    DECAYS: tl.constexpr = traits.DECAY != "none"
    q, log_decay, keys, erase_keys, values, erases, writes, pair = operands
    q = q.to(tl.float32)
    decay = decay_of(log_decay, traits)
    if traits.READ_BEFORE:
        out = tl.sum(S * q[:, None], 0)
    written = ()
    for m in tl.static_range(STEPS):
        k = keys[m].to(tl.float32)
        u = values[m].to(tl.float32)
        e = k
        if traits.ERASE_KEY:
            e = erase_keys[m].to(tl.float32)
        factor = 1.0
        if traits.STRENGTH != "none":
            factor = writes[m].to(tl.float32)
            if traits.DELTA:
                e *= factor if traits.STRENGTH == "head" else erases[m].to(tl.float32)
        if traits.REPARAM != "none":
            size = tl.sum(k * e, 0)  # beta |k|^2, or k^T (b * k)
            shrink, _, _ = step_size(1.0, size, traits.REPARAM == "efla")
            e *= shrink
            u *= shrink
        u *= factor * traits.WRITE_FACTOR
        if traits.DPLR:
            x = tl.sum(S * pair[0].to(tl.float32)[:, None], 0)
            if DECAYS:
                S *= decay
            S = S + pair[1].to(tl.float32)[:, None] * x[None, :] + k[:, None] * u[None, :]
            written = (x, u)
        else:
            S, x = micro_step(
                S, k, e * traits.ERASE_FACTOR, u, decay, DECAYS and m == 0, traits.DELTA, traits.ERASE_PREVIOUS
            )
            written = written + (x,)
    if not traits.READ_BEFORE:
        out = tl.sum(S * q[:, None], 0)
    return S, out, written


@triton.jit
def load_write(k, log_decay, b, values, token, hv, ks, vs, in_k, in_v, traits: tl.constexpr):
    """Load what `write_token` takes: the log decay, and tuples of keys and written values [.., WRITES, HV, V]."""
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    WRITES: tl.constexpr = 2 if traits.DPLR else traits.STEPS
    h = hv // (HV // traits.H)
    g = load_log_decay(log_decay, token, hv, ks, in_k, traits)
    keys = ()
    written = ()
    for m in tl.static_range(WRITES):
        at = values + ((token * WRITES + m) * HV + hv) * traits.V + vs
        written = written + (tl.load(at, mask=in_v, other=0.0),)
        if traits.DPLR and m == 0:
            keys = keys + (tl.load(b + (token * HV + hv) * K + ks, mask=in_k, other=0.0),)
        else:
            step = token if traits.DPLR else token * WRITES + m
            keys = keys + (tl.load(k + (step * traits.H + h) * K + ks, mask=in_k, other=0.0),)
    return g, keys, written


@triton.jit
def write_token(S, operands, traits: tl.constexpr):
    """Return the state after a token whose written values are known, as `update_token` does."""
    WRITES: tl.constexpr = 2 if traits.DPLR else traits.STEPS
    log_decay, keys, written = operands
    if traits.DECAY != "none":
        S *= decay_of(log_decay, traits)
    for m in tl.static_range(WRITES):
        S += keys[m].to(tl.float32)[:, None] * written[m][None, :]
    return S


@triton.jit
def locate(states, slots, pool_rows, traits: tl.constexpr):
    """Return the row, value head, columns and state of a program.

    Grid: row, value head, V tile. A row whose slot is outside the pool (-1, say) accesses no state.

    Returns: row, hv, ks, vs, in_k, in_v, the pointers of S [BK, BV], their mask, and whether the slot is in the pool.
    """
    TILES: tl.constexpr = (traits.V + traits.BV - 1) // traits.BV
    pid = tl.program_id(0)
    row = tl.cast(pid // (traits.HV * TILES), tl.int64)
    hv = pid // TILES % traits.HV
    ks = tl.arange(0, traits.BK)
    vs = (pid % TILES) * traits.BV + tl.arange(0, traits.BV)
    in_k = ks < traits.K
    in_v = vs < traits.V
    in_state = in_k[:, None] & in_v[None, :]
    slot = row
    in_pool = row >= 0
    if traits.SLOTS:
        slot = tl.load(slots + row)
        in_pool = (slot >= 0) & (slot < pool_rows)
        in_state = in_state & in_pool
    at = states + (slot * traits.HV + hv) * traits.K * traits.V + ks[:, None] * traits.V + vs[None, :]
    return row, hv, ks, vs, in_k, in_v, at, in_state, in_pool
