"""One token of a mixer: convolution, norms and gates around one step of the state, which is read and written once.

The channels of the projection are those of q, then of n keys, then of n values, each by heads; W taps, so that the
history has W - 1 rows of channels. H key heads, HV value heads, K key width, V value width
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.decode.micro_step import micro_step


@triton.jit
def load_taps(x, history, channel, inside, C: tl.constexpr, W: tl.constexpr):
    """Some channels of a row's history, from the oldest on, then of its token."""
    taps = ()
    for i in tl.static_range(W - 1):
        taps = taps + (tl.load(history + i * C + channel, mask=inside, other=0.0),)
    return taps + (tl.load(x + channel, mask=inside, other=0.0),)


@triton.jit
def convolved(
    x, weight, bias, history, channel, inside,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Some channels of a row's token, convolved with their history, then SiLU: float32, zero outside."""
    taps = load_taps(x, history, channel, inside, C, W)
    now = taps[W - 1 if W > 0 else 0]
    y = now.to(tl.float32)
    if W > 0:
        y *= tl.load(weight + channel * W + (W - 1), mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(W - 1):
            past = taps[i].to(now.dtype).to(tl.float32)
            y += past * tl.load(weight + channel * W + i, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y *= tl.sigmoid(y)
    return y


@triton.jit
def push(taps, history, channel, inside, C: tl.constexpr, W: tl.constexpr):
    """Put the token at the end of its history, which nobody reads any more."""
    for i in tl.static_range(W - 1):
        tl.store(history + i * C + channel, taps[i + 1].to(history.dtype.element_ty), mask=inside)


@triton.jit
def unit(y, UNIT: tl.constexpr, EPS: tl.constexpr):
    """A head divided by its L2 norm, where there is one."""
    if UNIT:
        y *= tl.rsqrt(tl.sum(y * y, 0) + EPS)
    return y


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to the last digits where it is small, too."""
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    tail = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + tail


@triton.jit
def exact_factor(x):
    """(1 - exp(-x)) / x for x >= 0: below 1/4 by its series, whose rest is under 1e-10."""
    series = tl.full(x.shape, 1.0, tl.float32)
    for i in tl.static_range(8):
        series = 1.0 - tl.minimum(x, 0.25) * series / (9 - i)
    return tl.where(x < 0.25, series, (1.0 - tl.exp(-x)) / tl.maximum(x, 0.25))


@triton.jit
def activated(x, GATE: tl.constexpr):
    """The gate: silu, sigmoid, gelu (by tanh), or x itself."""
    if GATE == "silu":
        x *= tl.sigmoid(x)
    if GATE == "sigmoid":
        x = tl.sigmoid(x)
    if GATE == "gelu":
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def load_head(x, V: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr):
    """V numbers in tiles, float32."""
    tiles = ()
    for i in tl.static_range(TILES):
        vs = i * BV + tl.arange(0, BV)
        tiles = tiles + (tl.load(x + vs, mask=vs < V, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def gated(outs, gates, GATE: tl.constexpr):
    """The tiles of a head's output, times their gate."""
    done = ()
    for i in tl.static_range(len(outs)):
        done = done + (outs[i] * activated(gates[i], GATE),)
    return done


@triton.jit
def normed(
    outs, weight, bias, at, V: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """The tiles of a head's output, normalised together; columns beyond V come as zeros. Its weights: from `at` on."""
    mean = 0.0
    if NORM == "layer":
        for i in tl.static_range(len(outs)):
            mean += tl.sum(outs[i], 0)
        mean /= V
    square = 0.0
    for i in tl.static_range(len(outs)):
        there = i * BV + tl.arange(0, BV) < V
        from_mean = tl.where(there, outs[i] - mean, 0.0)
        square += tl.sum(from_mean * from_mean, 0)
    factor = tl.rsqrt(square / V + EPS)
    done = ()
    for i in tl.static_range(len(outs)):
        vs = i * BV + tl.arange(0, BV)
        y = (outs[i] - mean) * factor * tl.load(weight + at + vs, mask=vs < V, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias + at + vs, mask=vs < V, other=0.0).to(tl.float32)
        done = done + (y,)
    return done


@triton.jit
def fused_step_kernel(
    x, weight, bias, history, beta, decay, A_log, dt_bias, feedback, correction, skip, norm_weight, norm_bias, gate,
    states, slots, o, scale,
    X_ROW: tl.constexpr, BETA_ROW: tl.constexpr, DECAY_ROW: tl.constexpr, GATE_ROW: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, PV: tl.constexpr,
    BV: tl.constexpr, STEPS: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU_Q: tl.constexpr,
    SILU_K: tl.constexpr, SILU_V: tl.constexpr, UNIT_Q: tl.constexpr, UNIT_K: tl.constexpr, UNIT_EPS: tl.constexpr,
    BETA: tl.constexpr, TOP: tl.constexpr, DECAY: tl.constexpr, BOUND: tl.constexpr, WRITES: tl.constexpr,
    DELTA: tl.constexpr, REPARAM: tl.constexpr, ERASE_BY: tl.constexpr, WRITE_BY: tl.constexpr, OWN: tl.constexpr,
    ERASE_EARLY: tl.constexpr, READ_EARLY: tl.constexpr, SKIP: tl.constexpr, NORM: tl.constexpr, EACH: tl.constexpr,
    NORM_BIAS: tl.constexpr, EPS: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One program a (row, value head): BV columns of its state at a time, the next on their way meanwhile.

    x [B, C], beta [B, STEPS HV], decay [B, HV] and gate [B, HV V], whose rows begin so many numbers apart;
    weight [C, W]; bias [C]; history [S, W - 1, C]; A_log, dt_bias, skip [HV]; feedback, correction [H];
    norm_weight, norm_bias [V] or [HV V]; states [S, HV, K, V]; slots [B] int64; o [B, HV, V].
    Where key heads are shared, the history of q and k stays.
    """
    C: tl.constexpr = H * K + STEPS * (H * K + HV * V)
    TILES: tl.constexpr = (V + BV - 1) // BV
    row = tl.cast(tl.program_id(0) // HV, tl.int64)
    hv = tl.program_id(0) % HV
    h = hv // (HV // H)
    slot = row
    if SLOTS:
        slot = tl.load(slots + row)
    ks = tl.arange(0, BK)
    in_k = ks < K
    at = states + (slot * HV + hv) * K * V + ks[:, None] * V
    vs = tl.arange(0, BV)
    ahead = tl.load(at + vs[None, :], mask=in_k[:, None] & (vs < V)[None, :], other=0.0)
    x += row * X_ROW
    if W > 1:
        history += slot * (W - 1) * C

    q = unit(convolved(x, weight, bias, history, h * K + ks, in_k, C, W, BIAS, SILU_Q), UNIT_Q, UNIT_EPS)
    keys = ()
    erases = ()
    writes = ()
    for m in tl.static_range(STEPS):
        channel = ((1 + m) * H + h) * K + ks
        k = unit(convolved(x, weight, bias, history, channel, in_k, C, W, BIAS, SILU_K), UNIT_K, UNIT_EPS)
        strength = tl.full((), 1.0, tl.float32)
        if BETA:
            strength = tl.sigmoid(tl.load(beta + row * BETA_ROW + m * HV + hv).to(tl.float32))
            strength = tl.minimum(strength, TOP, propagate_nan=tl.PropagateNan.ALL)
        if REPARAM != "none":
            time = strength * tl.sum(k * k, 0)
            if REPARAM == "efla":
                strength *= exact_factor(time)
            else:
                strength /= 1.0 + time
        e = k * (strength * ERASE_BY)
        if OWN:
            e *= tl.sigmoid(tl.load(feedback + h).to(tl.float32))
        keys = keys + (k,)
        erases = erases + (e,)
        writes = writes + (strength * WRITE_BY,)
    if OWN:
        q -= tl.load(correction + h).to(tl.float32) * keys[STEPS - 1]
    fade = 1.0
    if DECAY:
        raw = tl.load(decay + row * DECAY_ROW + hv).to(tl.float32) + tl.load(dt_bias + hv).to(tl.float32)
        rate = tl.exp(tl.load(A_log + hv).to(tl.float32))
        dt = softplus(raw)
        fade = tl.exp(-rate * dt if BOUND is None else BOUND * tl.sigmoid(rate * raw))

    gates = ()
    if GATE != "":
        gates = load_head(gate + row * GATE_ROW + hv * V, V, BV, TILES)  # on its way, too

    outs = ()
    for i in tl.static_range(TILES):
        vs = i * BV + tl.arange(0, BV)
        in_v = vs < V
        S = ahead
        if i + 1 < TILES:
            ahead = tl.load(at + (vs + BV)[None, :], mask=in_k[:, None] & (vs + BV < V)[None, :], other=0.0)
        if READ_EARLY:
            out = tl.sum(S * q[:, None], 0)
        for m in tl.static_range(STEPS):
            channel = (1 + STEPS) * H * K + (m * HV + hv) * V + vs
            v = convolved(x, weight, bias, history, channel, in_v, C, W, BIAS, SILU_V)
            u = v * writes[m]
            if WRITES:
                u *= dt
            S = micro_step(S, keys[m], erases[m], u, fade, DECAY and m == 0, DELTA, ERASE_EARLY)
        tl.store(at + vs[None, :], S, mask=in_k[:, None] & in_v[None, :])
        if not READ_EARLY:
            out = tl.sum(S * q[:, None], 0)
        out *= scale
        if SKIP:
            out += tl.load(skip + hv).to(tl.float32) * v
        outs = outs + (out,)

    if GATE != "" and GATE_FIRST:
        outs = gated(outs, gates, GATE)
    if NORM != "":
        outs = normed(outs, norm_weight, norm_bias, hv * V if EACH else 0, V, BV, NORM, NORM_BIAS, EPS)
    if GATE != "" and not GATE_FIRST:
        outs = gated(outs, gates, GATE)
    for i in tl.static_range(TILES):
        vs = i * BV + tl.arange(0, BV)
        tl.store(o + (row * HV + hv) * V + vs, outs[i].to(o.dtype.element_ty), mask=vs < V)

    if W > 1:
        taps = ()  # once more, for to keep them in registers would leave room for fewer programs
        vs = tl.arange(0, PV)
        if H == HV:
            for m in tl.static_range(1 + STEPS):
                taps = taps + (load_taps(x, history, (m * H + h) * K + ks, in_k, C, W),)
        for m in tl.static_range(STEPS):
            taps = taps + (load_taps(x, history, (1 + STEPS) * H * K + (m * HV + hv) * V + vs, vs < V, C, W),)
        tl.debug_barrier()  # several threads may have loaded the same tap, and one of them stores it
        OF_KEYS: tl.constexpr = 1 + STEPS if H == HV else 0
        for m in tl.static_range(OF_KEYS):
            push(taps[m], history, (m * H + h) * K + ks, in_k, C, W)
        for m in tl.static_range(STEPS):
            push(taps[OF_KEYS + m], history, (1 + STEPS) * H * K + (m * HV + hv) * V + vs, vs < V, C, W)


@triton.jit
def push_kernel(
    x, history, slots,
    X_ROW: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """One program a (row, BC channels) of the first so many: the token at the end of its history, where key heads are
    shared, so that the step itself could not tell who is the last to read it."""
    TILES: tl.constexpr = (CHANNELS + BC - 1) // BC
    row = tl.cast(tl.program_id(0) // TILES, tl.int64)
    slot = row
    if SLOTS:
        slot = tl.load(slots + row)
    channel = tl.program_id(0) % TILES * BC + tl.arange(0, BC)
    history += slot * (W - 1) * C
    taps = load_taps(x + row * X_ROW, history, channel, channel < CHANNELS, C, W)
    tl.debug_barrier()  # as above
    push(taps, history, channel, channel < CHANNELS, C, W)
