"""Parts of the fused decode step: the convolution, activations, output norm and gate.

V value width, C channels of the projection, W taps
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.device.taps import convolve_taps, load_taps


@triton.jit
def convolve(
    x, weight, bias, history, channel, mask,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Return channels of a row's token after convolution and SiLU, in float32; zeros outside the mask."""
    y = convolve_taps(load_taps(x, history, channel, mask, C, W), weight, bias, channel, mask, W, BIAS)
    if SILU:
        y *= tl.sigmoid(y)
    return y


@triton.jit
def log_decay_of(decay, A_log, dt_bias, hv, ks, in_k, traits: tl.constexpr):
    """Return the log decay of a token and value head, per key with DECAY_CHANNELS, and dt. decay: of the token."""
    K: tl.constexpr = traits.K
    if traits.DECAY_CHANNELS:
        raw = tl.load(decay + hv * K + ks, mask=in_k, other=0.0).to(tl.float32)
    else:
        raw = tl.load(decay + hv).to(tl.float32)
    dt = raw
    if traits.TEMPERATURE is not None:
        log_decay = softplus(-raw) / -traits.TEMPERATURE
    else:
        if traits.DECAY_CHANNELS:
            raw += tl.load(dt_bias + hv * K + ks, mask=in_k, other=0.0).to(tl.float32)
        else:
            raw += tl.load(dt_bias + hv).to(tl.float32)
        rate = tl.exp(tl.load(A_log + hv).to(tl.float32))
        dt = softplus(raw)
        log_decay = -rate * dt if traits.DECAY_BOUND is None else traits.DECAY_BOUND * tl.sigmoid(rate * raw)
    return log_decay, dt


@triton.jit
def l2_normalize(y, NORM: tl.constexpr, EPS: tl.constexpr):
    """Divide a head by its L2 norm, if NORM."""
    if NORM:
        y *= tl.rsqrt(tl.sum(y * y, 0) + EPS)
    return y


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), with a small relative error also for x far below 0."""
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    # log1p(y), with the rounding error of u = 1 + y corrected
    log1p = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def activate(x, GATE: tl.constexpr):
    """Apply the gate's activation: silu, sigmoid, gelu (tanh approximation), or none."""
    if GATE == "silu":
        x *= tl.sigmoid(x)
    if GATE == "sigmoid":
        x = tl.sigmoid(x)
    if GATE == "gelu":
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def load_head(x, V: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr):
    """Load the V elements of a head as tiles of BV, in float32."""
    tiles = ()
    for i in tl.static_range(TILES):
        vs = i * BV + tl.arange(0, BV)
        tiles = tiles + (tl.load(x + vs, mask=vs < V, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def apply_gate(outs, gates, GATE: tl.constexpr):
    """Multiply the tiles of a head's output by its activated gate."""
    gated = ()
    for i in tl.static_range(len(outs)):
        gated = gated + (outs[i] * activate(gates[i], GATE),)
    return gated


@triton.jit
def apply_norm(outs, weight, bias, offset, BV: tl.constexpr, traits: tl.constexpr):
    """Normalise the tiles of BV columns of a head's output together. Columns beyond V must be zero.

    offset: of the head's weights.
    """
    mean = 0.0
    if traits.NORM == "layer":
        for i in tl.static_range(len(outs)):
            mean += tl.sum(outs[i], 0)
        mean /= traits.V
    square = 0.0
    for i in tl.static_range(len(outs)):
        in_v = i * BV + tl.arange(0, BV) < traits.V
        centred = tl.where(in_v, outs[i] - mean, 0.0)
        square += tl.sum(centred * centred, 0)
    factor = tl.rsqrt(square / traits.V + traits.NORM_EPS)
    normed = ()
    for i in tl.static_range(len(outs)):
        vs = i * BV + tl.arange(0, BV)
        y = (outs[i] - mean) * factor * tl.load(weight + offset + vs, mask=vs < traits.V, other=0.0).to(tl.float32)
        if traits.NORM_BIAS:
            y += tl.load(bias + offset + vs, mask=vs < traits.V, other=0.0).to(tl.float32)
        normed = normed + (y,)
    return normed


@triton.jit
def norm_and_gate(outs, gates, norm_weight, norm_bias, hv, BV: tl.constexpr, GATE: tl.constexpr, traits: tl.constexpr):
    """Apply the norm and the gate to a head's output, in the order of the step."""
    if GATE != "" and traits.GATE_BEFORE_NORM:
        outs = apply_gate(outs, gates, GATE)
    if traits.NORM != "":
        outs = apply_norm(outs, norm_weight, norm_bias, hv * traits.V if traits.NORM_PER_HEAD else 0, BV, traits)
    if GATE != "" and not traits.GATE_BEFORE_NORM:
        outs = apply_gate(outs, gates, GATE)
    return outs
