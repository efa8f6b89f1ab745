"""Fused decode step: convolution, gates, one token of the update, output norm and gate in one kernel.

    q, k, v = norm(silu(conv(x)))
    beta = sigmoid(beta),  decay = exp(-exp(A_log) dt),  dt = softplus(decay + dt_bias)
    S, o = update(S, q, k, v, beta, decay)
    o = norm(o + skip v) activation(gate)

backends/ops/decode_step.py states all variants. The state is read and written once. The channels of x are those of q,
then of STEPS keys, then of STEPS values, each ordered by heads. The history of the convolution has W - 1 rows of
channels.
H key heads, HV value heads, K key width, V value width, W taps
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.micro_step import micro_step
from deltazoo.backends.triton.decode.kernels.step_parts import (
    convolve,
    l2_normalize,
    load_head,
    log_decay_of,
    norm_and_gate,
)
from deltazoo.backends.triton.device.overlap import prefetch_line, start_next, wait_for_previous
from deltazoo.backends.triton.device.step_size import step_size
from deltazoo.backends.triton.device.taps import convolve_taps, load_taps, push_token


class StepTraits(NamedTuple):
    """Compile-time properties of a fused step."""

    X_STRIDE: int  # elements from row to row of x, beta, decay and gate
    BETA_STRIDE: int
    DECAY_STRIDE: int
    GATE_STRIDE: int
    H: int
    HV: int
    K: int
    V: int
    BK: int  # K and V rounded up to powers of 2
    PV: int
    BV: int  # state columns that are processed at a time
    STEPS: int  # micro-steps (keys and values of a token)
    W: int  # taps; 0: no convolution
    BIAS: bool  # of the convolution
    SILU_Q: bool
    SILU_K: bool
    SILU_V: bool
    NORM_Q: bool  # q and k are divided by their L2 norms
    NORM_K: bool
    NORM_QK_EPS: float
    ERASE_STRIDE: int
    WRITE_STRIDE: int
    BETA: bool  # beta is an operand; else 1
    BETA_CHANNELS: bool  # erase and write are operands, strengths per channel
    DECAY: bool
    DECAY_CHANNELS: bool  # a decay per key channel: decay [B, HV K], dt_bias [HV K]
    DECAY_BOUND: float | None  # log decay = DECAY_BOUND sigmoid(exp(A_log) (decay + dt_bias)) instead
    TEMPERATURE: float | None  # log decay = log(sigmoid(decay)) / TEMPERATURE instead
    FIXED: bool  # log decay is an operand [HV] instead
    SCALE_V_BY_DT: bool
    DELTA: bool
    REPARAM: str  # "none", "efla" or "longhorn"
    ERASE_FACTOR: float  # erase strength = ERASE_FACTOR beta, write strength = WRITE_FACTOR beta
    WRITE_FACTOR: float
    FEEDBACK: bool  # the erase strength is multiplied by sigmoid(feedback), and q - correction k is read
    ERASE_PREVIOUS: bool
    READ_BEFORE: bool
    SKIP: bool
    NORM: str  # output norm: "", "rms" or "layer"
    NORM_PER_HEAD: bool  # the norm's weights are [HV V] instead of [V]
    NORM_BIAS: bool
    NORM_EPS: float
    GATE: str  # activation of the output gate: "", "none", "silu", "sigmoid" or "gelu"
    GATE_BEFORE_NORM: bool
    SLOTS: bool
    SPLIT: int  # a program computes SPLIT BV columns of a head, and finish_step_kernel what needs all of them; 0: all
    OVERLAP: bool  # see device/overlap.py


@triton.jit(do_not_specialize=["pool_rows"])
def fused_step_kernel(
    x, weight, bias, history, beta, decay, A_log, dt_bias, feedback, correction, skip, norm_weight, norm_bias, gate,
    log_decay, erase, write, states, slots, o, scale, pool_rows, traits: tl.constexpr,
):  # fmt: skip
    """Decode one token of one value head.

    Grid: row, value head; with SPLIT also tile of SPLIT BV columns. Each program processes BV columns of its state at a
    time and prefetches the next BV.

    Reads x [B, C], beta [B, STEPS HV], decay [B, HV] or [B, HV K], erase [B, STEPS HV K], write [B, STEPS HV V],
    gate [B, HV V], each with its row stride; weight [C, W]; bias [C]; A_log, log_decay, skip [HV]; dt_bias [HV] or
    [HV K]; feedback, correction [H]; norm_weight, norm_bias [V] or [HV V]; slots [B] int64, the pool row of each row.
    Updates states [pool_rows, HV, K, V] and history [pool_rows, W - 1, C] in place. Writes o [B, HV, V]. With SPLIT or
    shared key heads (H < HV) there are no taps, see convolve_step_kernel. With SPLIT, o is float32, before the norm and
    the gate.

    A slot outside the pool (-1, say) accesses no state and no history, and its output is zero. The caller guarantees
    that no two rows share a slot: their updates would race.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    BV: tl.constexpr = traits.BV
    STEPS: tl.constexpr = traits.STEPS
    W: tl.constexpr = traits.W
    GATE: tl.constexpr = traits.GATE  # Triton 3.6 cannot pass a str field of a constexpr tuple to a function
    C: tl.constexpr = H * K + STEPS * (H * K + HV * V)
    TILES: tl.constexpr = traits.SPLIT if traits.SPLIT else (V + BV - 1) // BV
    SPLITS: tl.constexpr = (V + TILES * BV - 1) // (TILES * BV)
    if traits.OVERLAP:
        start_next()
    head = tl.program_id(0) // SPLITS
    first = tl.program_id(0) % SPLITS * (TILES * BV)  # column of the program
    row = tl.cast(head // HV, tl.int64)
    hv = head % HV
    h = hv // (HV // H)
    ks = tl.arange(0, traits.BK)
    in_k = ks < K
    if traits.OVERLAP:
        if not traits.SLOTS:
            state = states + (row * HV + hv) * K * V + tl.minimum(ks, K - 1) * V + first
            prefetch_line(state)
            prefetch_line(state + tl.minimum(BV - 1, V - 1 - first))
        wait_for_previous()
    slot = row
    if traits.SLOTS:
        slot = tl.load(slots + row)
        in_pool = (slot >= 0) & (slot < pool_rows)
        in_k = in_k & in_pool
    at = states + (slot * HV + hv) * K * V + ks[:, None] * V
    vs = first + tl.arange(0, BV)
    ahead = tl.load(at + vs[None, :], mask=in_k[:, None] & (vs < V)[None, :], other=0.0)
    x += row * traits.X_STRIDE
    if W > 1:
        history += slot * (W - 1) * C

    q = convolve(x, weight, bias, history, h * K + ks, in_k, C, W, traits.BIAS, traits.SILU_Q)
    q = l2_normalize(q, traits.NORM_Q, traits.NORM_QK_EPS)
    keys = ()
    erases = ()
    writes = ()
    for m in tl.static_range(STEPS):
        channel = ((1 + m) * H + h) * K + ks
        k = convolve(x, weight, bias, history, channel, in_k, C, W, traits.BIAS, traits.SILU_K)
        k = l2_normalize(k, traits.NORM_K, traits.NORM_QK_EPS)
        strength = tl.full((), 1.0, tl.float32)
        erase_key = k
        if traits.BETA:
            strength = tl.sigmoid(tl.load(beta + row * traits.BETA_STRIDE + m * HV + hv).to(tl.float32))
        if traits.BETA_CHANNELS:
            at_erase = erase + row * traits.ERASE_STRIDE + (m * HV + hv) * K + ks
            erase_key *= tl.sigmoid(tl.load(at_erase, mask=in_k, other=0.0).to(tl.float32))
        if traits.REPARAM != "none":
            strength, _, _ = step_size(strength, tl.sum(k * erase_key, 0), traits.REPARAM == "efla")
        erase_strength = strength * traits.ERASE_FACTOR
        if traits.FEEDBACK:
            erase_strength *= tl.sigmoid(tl.load(feedback + h).to(tl.float32))
        keys = keys + (k,)
        erases = erases + (erase_key * erase_strength,)
        writes = writes + (strength * traits.WRITE_FACTOR,)
    if traits.FEEDBACK:
        q -= tl.load(correction + h).to(tl.float32) * keys[STEPS - 1]
    decay_factor = 1.0
    if traits.FIXED:
        decay_factor = tl.exp(tl.load(log_decay + hv).to(tl.float32))
    if traits.DECAY and not traits.FIXED:
        log_decay, dt = log_decay_of(decay + row * traits.DECAY_STRIDE, A_log, dt_bias, hv, ks, in_k, traits)
        decay_factor = tl.exp(log_decay)
        if traits.DECAY_CHANNELS:
            decay_factor = decay_factor[:, None]

    gates = ()
    if GATE != "" and not traits.SPLIT:
        gates = load_head(gate + row * traits.GATE_STRIDE + hv * V, V, BV, TILES)  # before the loop, as a prefetch

    outs = ()
    for i in tl.static_range(TILES):
        vs = first + i * BV + tl.arange(0, BV)
        in_v = vs < V
        if traits.SLOTS:
            in_v = in_v & in_pool
        S = ahead
        if i + 1 < TILES:
            ahead = tl.load(at + (vs + BV)[None, :], mask=in_k[:, None] & (vs + BV < V)[None, :], other=0.0)
        if traits.READ_BEFORE:
            out = tl.sum(S * q[:, None], 0)
        for m in tl.static_range(STEPS):
            channel = (1 + STEPS) * H * K + (m * HV + hv) * V + vs
            v = convolve(x, weight, bias, history, channel, in_v, C, W, traits.BIAS, traits.SILU_V)
            u = v * writes[m]
            if traits.BETA_CHANNELS:
                at_write = write + row * traits.WRITE_STRIDE + (m * HV + hv) * V + vs
                u *= tl.sigmoid(tl.load(at_write, mask=in_v, other=0.0).to(tl.float32))
            if traits.SCALE_V_BY_DT:
                u *= dt
            S, _ = micro_step(
                S, keys[m], erases[m], u, decay_factor, traits.DECAY and m == 0, traits.DELTA, traits.ERASE_PREVIOUS
            )
        tl.store(at + vs[None, :], S, mask=in_k[:, None] & in_v[None, :])
        if not traits.READ_BEFORE:
            out = tl.sum(S * q[:, None], 0)
        out *= scale
        if traits.SKIP:
            out += tl.load(skip + hv).to(tl.float32) * v
        outs = outs + (out,)

    if not traits.SPLIT:
        outs = norm_and_gate(outs, gates, norm_weight, norm_bias, hv, BV, GATE, traits)
    for i in tl.static_range(TILES):
        vs = first + i * BV + tl.arange(0, BV)
        out = tl.where(in_pool, outs[i], 0.0) if traits.SLOTS else outs[i]
        tl.store(o + (row * HV + hv) * V + vs, out.to(o.dtype.element_ty), mask=vs < V)

    if W > 1:
        vs = tl.arange(0, traits.PV)
        in_v = vs < V
        if traits.SLOTS:
            in_v = in_v & in_pool
        push_head(x, history, h, hv, ks, vs, in_k, in_v, traits)


@triton.jit
def push_head(x, history, h, hv, ks, vs, in_k, in_v, traits: tl.constexpr):
    """Append the token to the history of a head's channels.

    The taps are loaded again: kept in registers since the convolution they would reduce occupancy.
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    STEPS: tl.constexpr = traits.STEPS
    W: tl.constexpr = traits.W
    C: tl.constexpr = H * K + STEPS * (H * K + HV * V)
    first_value = (1 + STEPS) * H * K
    taps = ()
    for m in tl.static_range(1 + STEPS):
        taps = taps + (load_taps(x, history, (m * H + h) * K + ks, in_k, C, W),)
    for m in tl.static_range(STEPS):
        taps = taps + (load_taps(x, history, first_value + (m * HV + hv) * V + vs, in_v, C, W),)
    tl.debug_barrier()  # several threads may have loaded the same tap, and one of them stores it
    for m in tl.static_range(1 + STEPS):
        push_token(taps[m], history, (m * H + h) * K + ks, in_k, C, W)
    for m in tl.static_range(STEPS):
        push_token(taps[1 + STEPS + m], history, first_value + (m * HV + hv) * V + vs, in_v, C, W)


@triton.jit(do_not_specialize=["pool_rows"])
def convolve_step_kernel(x, weight, bias, history, slots, y, pool_rows, traits: tl.constexpr):
    """Convolve a head of q, of a key or of a value, with its SiLU and norm, and append its token to the history.

    Before a fused step of which several programs read the same channels, and which then has none of these operations.

    Grid: row, heads of q, of the keys and of the values. Reads x, weight, bias, slots as fused_step_kernel. Writes
    y [B, C] float32, which the step reads in place of x, and history. A slot outside the pool accesses no history, and
    its y is not used.
    """
    H: tl.constexpr = traits.H
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    W: tl.constexpr = traits.W
    KEYS: tl.constexpr = (1 + traits.STEPS) * H
    HEADS: tl.constexpr = KEYS + traits.STEPS * traits.HV
    C: tl.constexpr = KEYS * K + traits.STEPS * traits.HV * V
    if traits.OVERLAP:
        start_next()
    row = tl.cast(tl.program_id(0) // HEADS, tl.int64)
    head = tl.program_id(0) % HEADS
    is_value = head >= KEYS
    i = tl.arange(0, traits.BK if traits.BK > traits.PV else traits.PV)
    mask = i < tl.where(is_value, V, K)
    channel = tl.where(is_value, KEYS * K + (head - KEYS) * V, head * K) + i
    if traits.OVERLAP:
        valid = tl.minimum(channel, C - 1)
        prefetch_line(weight + valid * W)
        if W > 1 and not traits.SLOTS:
            for tap in tl.static_range(W - 1):
                prefetch_line(history + (row * (W - 1) + tap) * C + valid)
        wait_for_previous()
    slot = row
    if traits.SLOTS:
        slot = tl.load(slots + row)
        mask = mask & (slot >= 0) & (slot < pool_rows)
    if W > 1:
        history += slot * (W - 1) * C
    taps = load_taps(x + row * traits.X_STRIDE, history, channel, mask, C, W)
    out = convolve_taps(taps, weight, bias, channel, mask, W, traits.BIAS)
    silu = tl.where(is_value, traits.SILU_V, tl.where(head < H, traits.SILU_Q, traits.SILU_K))
    out = tl.where(silu, out * tl.sigmoid(out), out)
    if traits.NORM_Q or traits.NORM_K:
        norm = (head < KEYS) & tl.where(head < H, traits.NORM_Q, traits.NORM_K)
        out *= tl.where(norm, tl.rsqrt(tl.sum(out * out, 0) + traits.NORM_QK_EPS), 1.0)
    tl.store(y + row * C + channel, out, mask=mask)
    if W > 1:
        tl.debug_barrier()  # several threads may have loaded the same tap, and one of them stores it
        push_token(taps, history, channel, mask, C, W)


@triton.jit(do_not_specialize=["pool_rows"])
def finish_step_kernel(raw, norm_weight, norm_bias, gate, slots, o, pool_rows, traits: tl.constexpr):
    """Compute the norm and the gate of one value head after a split step, or a step of a preconditioned delta rule.

    Grid: row, value head. Reads raw [B, HV, V] float32, which the step wrote, and fused_step_kernel's operands of the
    same names. Writes o [B, HV, V].
    """
    HV: tl.constexpr = traits.HV
    V: tl.constexpr = traits.V
    PV: tl.constexpr = traits.PV
    GATE: tl.constexpr = traits.GATE
    if traits.OVERLAP:
        start_next()
        wait_for_previous()
    row = tl.cast(tl.program_id(0) // HV, tl.int64)
    hv = tl.program_id(0) % HV
    vs = tl.arange(0, PV)
    in_v = vs < V
    if traits.SLOTS:
        slot = tl.load(slots + row)
        in_v = in_v & (slot >= 0) & (slot < pool_rows)
    outs = load_head(raw + (row * HV + hv) * V, V, PV, 1)
    gates = ()
    if GATE != "":
        gates = load_head(gate + row * traits.GATE_STRIDE + hv * V, V, PV, 1)
    outs = norm_and_gate(outs, gates, norm_weight, norm_bias, hv, PV, GATE, traits)
    out = tl.where(in_v, outs[0], 0.0)
    tl.store(o + (row * HV + hv) * V + vs, out.to(o.dtype.element_ty), mask=vs < V)
