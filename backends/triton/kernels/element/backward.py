"""Backward of an elementwise recurrence, token by token in reverse.

    dS_t += scale q_t d_o_t^T            (READ_EARLY: of the state before the token instead)
    d_q_t = scale sum of S_t * d_o_t over values and channels    (READ_EARLY: S_{t-1})
    d_k_t = sum of dS_t * v_t over values and channels,    d_v_t = dS_t^T k_t
    d_log_decay_t = sum over values of dS_t * P_t  with  P_t = d_t * S_{t-1}
    dS_{t-1} = d_t * dS_t

d_step_t = sum over keys of rate * d_log_decay_t, and d_rate = sum over tokens of step_t * d_log_decay_t.

The tokens between two checkpoints are visited twice. First the state before every GROUP tokens is recomputed and
stored to scratch. Then, the last GROUP first, the terms P_t of GROUP tokens are recomputed into registers, and the
reverse scan visits these tokens.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.kernels.element.scan import decay_state
from deltazoo.backends.triton.kernels.element.tile import (
    empty_state,
    load_decay,
    load_key,
    load_rates,
    load_value,
    locate_tile,
    locate_tokens,
    log2_decay,
    slot_offset,
    state_offset,
    store_keys,
    store_row,
    sum_channels,
    sum_keys,
    tile_at,
    token_at,
)


@triton.jit(do_not_specialize=["T", "N", "segments"])
def element_reverse_kernel(
    q, log_decay, step, rate, d_o, ends, cu, scale, T, N, segments,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradient that a segment's outputs give to the state before it. Grid: sequence, segment, block.

    Reads q [B, T, H, K] and d_o [B, T, HV, V]. Writes ends [N segments, K, V, HV] float32.
    """
    n, vi, hv, h, in_keys, in_values, in_channels, _ = locate_tile(traits)
    sequence, segment, start, first, last, is_last, slot = locate_tokens(cu, T, N, segments, traits)
    SIZE: tl.constexpr = traits.HV * traits.K * traits.V
    GROUP: tl.constexpr = traits.GROUP
    rates = load_rates(log_decay, rate, hv, n, in_keys, in_channels, traits)
    dS = empty_state(traits)
    groups = (last - first + traits.GROUP - 1) // traits.GROUP
    for group in range(groups):
        t = first + (groups - 1 - group) * traits.GROUP
        row = tl.cast(t, tl.int64)
        decays = ()
        qs = ()
        d_os = ()
        for i in tl.static_range(GROUP):
            in_time = t + i < last
            decays = decays + (load_decay(log_decay, step, row, i, in_time, hv, n, in_keys, in_channels, traits),)
            qs = qs + (load_key(q, row, i, in_time, h, n, in_keys, in_channels, traits),)
            d_os = d_os + (load_value(d_o, row, i, in_time, hv, vi, in_values, in_channels, traits),)
        for i in tl.static_range(GROUP - 1, -1, -1):
            read = qs[i].to(tl.float32) * (d_os[i].to(tl.float32) * scale)
            l = log2_decay(decays[i], rates, traits)
            if not traits.READ_EARLY:
                dS += read
            dS = decay_state(dS, l, traits)
            if traits.READ_EARLY:
                dS += read
    ends_at = tile_at(
        ends + tl.cast(sequence * segments + segment, tl.int64) * SIZE,
        slot_offset(hv, n, vi, traits),
        2,
        traits.CHANNELS,
    )
    tl.store(ends_at, dS, mask=in_keys & in_values & in_channels)


@triton.jit(do_not_specialize=["T", "N", "segments", "rows"])
def element_backward_kernel(
    q, k, v, log_decay, step, rate, d_o, d_final, checkpoints, starts, scratch,
    d_q, d_k, d_v, d_decay, d_rate, d_initial, cu, scale, T, N, segments, rows,
    traits: tl.constexpr,
):  # fmt: skip
    """Visit one segment of a sequence in reverse for one block of channels. Grid: sequence, segment, block.

    Reads the operands as the forward; d_o [B, T, HV, V]; d_final [N, HV, K, V] (None: 0), or with segments starts
    [N segments, K, V, HV], the gradient of the state at the end of each; checkpoints [slots, K, V, HV].
    Writes d_v [B, T, HV, V]; d_initial [N, HV, K, V] (None: skipped); d_decay, the gradient of log_decay [B, T, HV] or
    [B, T, HV, K], or that of step [B, T, HV]; d_rate [N segments, K, HV] or [N segments, HV], the share of each segment
    in the gradient of the rate or the fixed decay. With KEY_GRADIENTS d_q and d_k float32: SHARED [blocks, rows, H, K],
    the share of each block of channels, where rows = B T; else [B, T, HV, K].
    scratch: [programs, EVERY / GROUP, elements of a tile] float32; None if EVERY is GROUP.
    """
    n, vi, hv, h, in_keys, in_values, in_channels, block = locate_tile(traits)
    sequence, segment, start, first, last, is_last, slot = locate_tokens(cu, T, N, segments, traits)
    in_state = in_keys & in_values & in_channels
    SIZE: tl.constexpr = traits.HV * traits.K * traits.V
    GROUP: tl.constexpr = traits.GROUP
    AXIS: tl.constexpr = 1 if traits.V > 1 else 2  # contiguous in v, and so many elements
    LENGTH: tl.constexpr = traits.V if traits.V > 1 else traits.CHANNELS
    KP: tl.constexpr = traits.RN * traits.TN
    TILE: tl.constexpr = KP * traits.VP * traits.BC
    STEPS: tl.constexpr = traits.EVERY // traits.GROUP
    FIXED: tl.constexpr = traits.DECAY == "fixed" or traits.DECAY == "fixed_channel"
    PER_KEY: tl.constexpr = traits.DECAY == "rate" or traits.DECAY == "fixed_channel"
    in_rows = slot_offset(hv, n, vi, traits)
    in_tile = (n * traits.VP + vi) * traits.BC + hv % traits.BC
    if scratch is not None:
        scratch += tl.cast(tl.program_id(0), tl.int64) * (TILE * STEPS)
    dS = empty_state(traits)
    part = tl.cast(sequence * segments + segment, tl.int64)
    if starts is not None:
        dS += tl.load(tile_at(starts + part * SIZE, in_rows, 2, traits.CHANNELS), mask=in_state, other=0.0)
    elif d_final is not None:
        d_final_at = tile_at(d_final + tl.cast(sequence, tl.int64) * SIZE, state_offset(hv, n, vi, traits), 0, 1)
        dS += tl.load(d_final_at, mask=in_state, other=0.0)
    rates = load_rates(log_decay, rate, hv, n, in_keys, in_channels, traits)
    if PER_KEY:
        d_rates = tl.sum(empty_state(traits), 1, keep_dims=True)
    else:
        d_rates = sum_keys(tl.sum(empty_state(traits), 1, keep_dims=True))
    intervals = (last - first + traits.EVERY - 1) // traits.EVERY
    for interval in range(intervals):
        t0 = first + (intervals - 1 - interval) * traits.EVERY
        saved_at = tile_at(
            checkpoints + tl.cast(slot + (t0 - start) // traits.EVERY, tl.int64) * SIZE, in_rows, 2, traits.CHANNELS
        )
        S = tl.load(saved_at, mask=in_state, other=0.0)
        groups = tl.minimum((last - t0 + traits.GROUP - 1) // traits.GROUP, STEPS)
        if STEPS > 1:
            for group in range(groups - 1):
                tl.store(tile_at(scratch + group * TILE, in_tile, 2, traits.CHANNELS), S)
                row = tl.cast(t0 + group * traits.GROUP, tl.int64)
                decays = ()
                ks = ()
                vs = ()
                for i in tl.static_range(GROUP):
                    in_time = t0 + group * traits.GROUP + i < last
                    decays = decays + (
                        load_decay(log_decay, step, row, i, in_time, hv, n, in_keys, in_channels, traits),
                    )
                    ks = ks + (load_key(k, row, i, in_time, h, n, in_keys, in_channels, traits),)
                    vs = vs + (load_value(v, row, i, in_time, hv, vi, in_values, in_channels, traits),)
                for i in tl.static_range(GROUP):
                    l = log2_decay(decays[i], rates, traits)
                    S = decay_state(S, l, traits) + ks[i].to(tl.float32) * vs[i].to(tl.float32)
            tl.store(tile_at(scratch + (groups - 1) * TILE, in_tile, 2, traits.CHANNELS), S)
            tl.debug_barrier()  # another thread of the program may have stored what this one loads
        for group in range(groups):
            j = groups - 1 - group
            t = t0 + j * traits.GROUP
            row = tl.cast(t, tl.int64)
            if STEPS > 1:
                S = tl.load(tile_at(scratch + j * TILE, in_tile, 2, traits.CHANNELS))
            decays = ()
            qs = ()
            ks = ()
            vs = ()
            d_os = ()
            for i in tl.static_range(GROUP):
                in_time = t + i < last
                decays = decays + (load_decay(log_decay, step, row, i, in_time, hv, n, in_keys, in_channels, traits),)
                ks = ks + (load_key(k, row, i, in_time, h, n, in_keys, in_channels, traits),)
                vs = vs + (load_value(v, row, i, in_time, hv, vi, in_values, in_channels, traits),)
                qs = qs + (load_key(q, row, i, in_time, h, n, in_keys, in_channels, traits),)
                d_os = d_os + (load_value(d_o, row, i, in_time, hv, vi, in_values, in_channels, traits),)
            kept = ()  # P_t
            written = S
            for i in tl.static_range(GROUP):
                P = decay_state(written, log2_decay(decays[i], rates, traits), traits)
                kept = kept + (P,)
                written = P + ks[i].to(tl.float32) * vs[i].to(tl.float32)
            for i in tl.static_range(GROUP - 1, -1, -1):
                in_time = t + i < last
                k_i = ks[i].to(tl.float32)  # type: ignore[var-annotated]
                v_i = vs[i].to(tl.float32)
                d_o_i = d_os[i].to(tl.float32) * scale
                read = qs[i].to(tl.float32) * d_o_i
                if not traits.READ_EARLY:
                    dS += read
                if traits.KEY_GRADIENTS:
                    if not traits.READ_EARLY:
                        S_read = kept[i] + k_i * v_i
                    elif i > 0:
                        S_read = kept[i - 1] + ks[i - 1].to(tl.float32) * vs[i - 1].to(tl.float32)
                    else:
                        S_read = S
                    if traits.SHARED:
                        d_q_i, d_k_i = sum_channels(S_read * d_o_i, dS * v_i)
                        shared_row = block * tl.cast(rows, tl.int64) + row
                        store_keys(d_q, shared_row, i, h * traits.K + n, d_q_i, in_keys & in_time, traits)
                        store_keys(d_k, shared_row, i, h * traits.K + n, d_k_i, in_keys & in_time, traits)
                    else:
                        in_row = in_keys & in_channels & in_time
                        at_q = token_at(d_q, row, i, traits.HV * traits.K, hv * traits.K + n, 0, traits.KEYS)
                        tl.store(at_q, tl.sum(S_read * d_o_i, 1, keep_dims=True), mask=in_row)
                        at_k = token_at(d_k, row, i, traits.HV * traits.K, hv * traits.K + n, 0, traits.KEYS)
                        tl.store(at_k, tl.sum(dS * v_i, 1, keep_dims=True), mask=in_row)
                in_row = in_values & in_channels & in_time
                d_v_i = sum_keys(dS * k_i)
                store_row(d_v, row, i, traits.HV * traits.V, hv * traits.V + vi, d_v_i, in_row, AXIS, LENGTH, traits)
                if traits.DECAY != "none":
                    d_log = tl.sum(dS * kept[i], 1, keep_dims=True)
                    in_row = in_channels & in_time
                    if traits.DECAY == "rate":
                        d_rates += d_log * decays[i]
                        d_step = sum_keys(d_log * rates) * 0.6931471805599453
                        store_row(d_decay, row, i, traits.HV, hv, d_step, in_row, 2, traits.CHANNELS, traits)
                    elif traits.DECAY == "channel":
                        decay_at = token_at(d_decay, row, i, traits.HV * traits.K, hv * traits.K + n, 0, traits.KEYS)
                        tl.store(decay_at, d_log, mask=in_row & in_keys)
                    elif traits.DECAY == "head":
                        store_row(d_decay, row, i, traits.HV, hv, sum_keys(d_log), in_row, 2, traits.CHANNELS, traits)
                    elif traits.DECAY == "fixed":
                        d_rates += sum_keys(d_log) * decays[i]
                    else:
                        d_rates += d_log * decays[i]
                dS = decay_state(dS, log2_decay(decays[i], rates, traits), traits)
                if traits.READ_EARLY:
                    dS += read
        if STEPS > 1:
            tl.debug_barrier()  # the next interval overwrites the scratch
    if PER_KEY:
        rate_at = tile_at(d_rate + part * (traits.HV * traits.K), n * traits.HV + hv, 2, traits.CHANNELS)
        tl.store(rate_at, d_rates, mask=in_keys & in_channels)
    elif FIXED:
        store_row(d_rate, part, 0, traits.HV, hv, d_rates, in_channels, 2, traits.CHANNELS, traits)
    if d_initial is not None:
        if segment == 0:
            d_initial_at = tile_at(
                d_initial + tl.cast(sequence, tl.int64) * SIZE, state_offset(hv, n, vi, traits), 0, 1
            )
            tl.store(d_initial_at, dS, mask=in_state)
