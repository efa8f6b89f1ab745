"""The short convolution of one token in a kernel: load the history of channels, convolve, append the token.

C channels, W taps. history: that of the row, [W - 1, C]
"""

import triton
import triton.language as tl


@triton.jit
def load_past(history, channel, mask, C: tl.constexpr, W: tl.constexpr):
    """Load the inputs of channels before a row's token, from the oldest on."""
    past = ()
    for i in tl.static_range(W - 1):
        past = past + (tl.load(history + i * C + channel, mask=mask, other=0.0),)
    return past


@triton.jit
def load_taps(x, history, channel, mask, C: tl.constexpr, W: tl.constexpr):
    """Load channels of a row: its history from the oldest entry on, then its token."""
    return load_past(history, channel, mask, C, W) + (tl.load(x + channel, mask=mask, other=0.0),)


@triton.jit
def load_tap_weights(weight, bias, channel, mask, W: tl.constexpr, BIAS: tl.constexpr):
    """Load the weight of each tap, then the bias if there is one."""
    weights = ()
    for i in tl.static_range(W):
        weights = weights + (tl.load(weight + channel * W + i, mask=mask, other=0.0),)
    if BIAS:
        weights = weights + (tl.load(bias + channel, mask=mask, other=0.0),)
    return weights


@triton.jit
def weigh_taps(taps, weights, W: tl.constexpr, BIAS: tl.constexpr):
    """Return channels after the convolution, in float32. Args: weights: of `load_tap_weights`."""
    token = taps[W - 1 if W > 0 else 0]
    y = token.to(tl.float32)
    if W > 0:
        y *= weights[W - 1].to(tl.float32)
        for i in tl.static_range(W - 1):
            y += taps[i].to(token.dtype).to(tl.float32) * weights[i].to(tl.float32)
        if BIAS:
            y += weights[W].to(tl.float32)
    return y


@triton.jit
def convolve_taps(taps, weight, bias, channel, mask, W: tl.constexpr, BIAS: tl.constexpr):
    """Return channels after the convolution, in float32."""
    return weigh_taps(taps, load_tap_weights(weight, bias, channel, mask, W, BIAS), W, BIAS)


@triton.jit
def push_token(taps, history, channel, mask, C: tl.constexpr, W: tl.constexpr):
    """Shift the history by one and append the token; no program may read this history afterwards."""
    for i in tl.static_range(W - 1):
        tl.store(history + i * C + channel, taps[i + 1].to(history.dtype.element_ty), mask=mask)
