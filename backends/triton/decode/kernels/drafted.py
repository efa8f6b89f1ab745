"""Operands of drafted tokens: what the fused decode step computes before its update, for several tokens per row.

    q, k, v = norm(silu(conv(x))),  q = q - correction k
    erase, write, log decay as in fused_step.py

verify_kernel then computes the update, and finish_step_kernel the norm and the gate. H key heads, HV value heads, K key
width, V value width, W taps
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.decode.kernels.step_parts import l2_normalize, log_decay_of, softplus
from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous


@triton.jit
def convolve_drafted(
    x, weight, bias, history, t, channel, mask, STRIDE: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Return channels of token t of a row after convolution and SiLU, in float32; zeros outside the mask.

    x: of the row's first token. Tokens before it are in the history.
    """
    token = tl.load(x + t * STRIDE + channel, mask=mask, other=0.0)
    y = token.to(tl.float32)
    if W > 0:
        y *= tl.load(weight + channel * W + (W - 1), mask=mask, other=0.0).to(tl.float32)
        for i in tl.static_range(W - 1):
            at = t - (W - 1) + i
            past = tl.load(history + (at + W - 1) * C + channel, mask=mask & (at < 0), other=0.0).to(token.dtype)
            drafted = tl.load(x + at * STRIDE + channel, mask=mask & (at >= 0), other=0.0)
            tap = tl.where(at < 0, past, drafted).to(tl.float32)
            y += tap * tl.load(weight + channel * W + i, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        y *= tl.sigmoid(y)
    return y


@triton.jit(do_not_specialize=["tokens"])
def drafted_operands_kernel(
    x, weight, bias, history, beta, decay, A_log, dt_bias, feedback, correction, erase, write,
    q, k, v, log_decay_out, erase_out, write_out, tokens, traits: tl.constexpr,
):  # fmt: skip
    """Compute the operands of a token's update for one value head, and q and k if it is the first of its key head.

    Grid: row, token, value head. Reads what fused_step_kernel reads, with an axis of `tokens` after B; the strides are
    those from token to token. Writes q [B, T, H, K], k [B, T, STEPS, H, K], v [B, T, STEPS, HV, V]; log_decay_out
    [B, T, HV] or [B, T, HV, K]; write_out [B, T, STEPS, HV], with feedback also erase_out; with strengths of channels
    erase_out [B, T, STEPS, HV, K] and write_out [B, T, STEPS, HV, V].
    """
    H: tl.constexpr = traits.H
    HV: tl.constexpr = traits.HV
    K: tl.constexpr = traits.K
    V: tl.constexpr = traits.V
    STEPS: tl.constexpr = traits.STEPS
    W: tl.constexpr = traits.W
    STRIDE: tl.constexpr = traits.X_STRIDE
    C: tl.constexpr = H * K + STEPS * (H * K + HV * V)
    if traits.OVERLAP:
        start_next()
    token = tl.cast(tl.program_id(0) // HV, tl.int64)
    hv = tl.program_id(0) % HV
    row = token // tokens
    t = (token % tokens).to(tl.int32)
    h = hv // (HV // H)
    ks = tl.arange(0, traits.BK)
    vs = tl.arange(0, traits.PV)
    in_k = ks < K
    in_v = vs < V
    if traits.OVERLAP:
        wait_for_previous()
    x += row * tokens * STRIDE
    if W > 1:
        history += row * (W - 1) * C

    for m in tl.static_range(STEPS):
        channel = (1 + STEPS) * H * K + (m * HV + hv) * V + vs
        value = convolve_drafted(x, weight, bias, history, t, channel, in_v, STRIDE, C, W, traits.BIAS, traits.SILU_V)
        if traits.SCALE_V_BY_DT:
            raw = tl.load(decay + token * traits.DECAY_STRIDE + hv).to(tl.float32)
            value *= softplus(raw + tl.load(dt_bias + hv).to(tl.float32))
        tl.store(v + ((token * STEPS + m) * HV + hv) * V + vs, value.to(v.dtype.element_ty), mask=in_v)
        if traits.BETA:
            strength = tl.sigmoid(tl.load(beta + token * traits.BETA_STRIDE + m * HV + hv).to(tl.float32))
            tl.store(write_out + (token * STEPS + m) * HV + hv, strength)
            if traits.FEEDBACK:
                strength *= tl.sigmoid(tl.load(feedback + h).to(tl.float32))
                tl.store(erase_out + (token * STEPS + m) * HV + hv, strength)
        if traits.BETA_CHANNELS:
            at = (m * HV + hv) * V + vs
            raw = tl.load(write + token * traits.WRITE_STRIDE + at, mask=in_v, other=0.0)
            tl.store(write_out + token * STEPS * HV * V + at, tl.sigmoid(raw.to(tl.float32)), mask=in_v)
            if traits.DELTA:
                at = (m * HV + hv) * K + ks
                raw = tl.load(erase + token * traits.ERASE_STRIDE + at, mask=in_k, other=0.0)
                tl.store(erase_out + token * STEPS * HV * K + at, tl.sigmoid(raw.to(tl.float32)), mask=in_k)

    if traits.DECAY and not traits.FIXED:
        log_decay, _ = log_decay_of(decay + token * traits.DECAY_STRIDE, A_log, dt_bias, hv, ks, in_k, traits)
        if traits.DECAY_CHANNELS:
            tl.store(log_decay_out + (token * HV + hv) * K + ks, log_decay, mask=in_k)
        else:
            tl.store(log_decay_out + token * HV + hv, log_decay)

    in_k = in_k & (hv % (HV // H) == 0)
    query = convolve_drafted(x, weight, bias, history, t, h * K + ks, in_k, STRIDE, C, W, traits.BIAS, traits.SILU_Q)
    query = l2_normalize(query, traits.NORM_Q, traits.NORM_QK_EPS)
    for m in tl.static_range(STEPS):
        channel = ((1 + m) * H + h) * K + ks
        key = convolve_drafted(x, weight, bias, history, t, channel, in_k, STRIDE, C, W, traits.BIAS, traits.SILU_K)
        key = l2_normalize(key, traits.NORM_K, traits.NORM_QK_EPS)
        tl.store(k + ((token * STEPS + m) * H + h) * K + ks, key.to(k.dtype.element_ty), mask=in_k)
        if traits.FEEDBACK and m == STEPS - 1:
            query -= tl.load(correction + h).to(tl.float32) * key
    tl.store(q + (token * H + h) * K + ks, query.to(q.dtype.element_ty), mask=in_k)
