"""Backward of an elementwise recurrence, token by token in reverse.

    dS_t += scale q_t d_o_t^T            (READ_BEFORE: of the state before the token instead)
    d_q_t = scale sum of S_t * d_o_t over values and channels    (READ_BEFORE: S_{t-1})
    d_k_t = sum of dS_t * v_t over values and channels,    d_v_t = dS_t^T k_t
    d_log_decay_t = sum over values of dS_t * P_t  with  P_t = d_t * S_{t-1}
    dS_{t-1} = d_t * dS_t

d_step_t = sum over keys of rate * d_log_decay_t, and d_rate = sum over tokens of step_t * d_log_decay_t.

A sequence is divided into intervals of CHECKPOINT_TOKENS tokens, each of which starts at a checkpoint, and an interval
into groups of GROUP tokens. For each interval, the last one first, the kernel recomputes the states before all groups
and keeps them in registers. For each group, the last one first, it recomputes the terms P_t of the group's tokens, and
runs the reverse scan over them. The tokens after the last whole interval are processed one by one; the state before
each is recomputed from the last checkpoint.

S, dS: tiles of the state (tile.py). rates, d_rates: the part of the decay that all tokens share (`load_rates`), and
the sum of its gradients over tokens
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.element.kernels.prefetch import (
    prefetch_checkpoint,
    prefetch_decays,
    prefetch_shared_keys,
    prefetch_values,
)
from deltazoo.backends.triton.element.kernels.scan import decay_factor, decay_state
from deltazoo.backends.triton.element.kernels.sums import (
    fold_lanes,
    store_folded_keys,
    store_folded_rows,
    sum_thread_channels,
    sum_warps,
)
from deltazoo.backends.triton.element.kernels.tile import (
    LN_2,
    empty_state,
    load_decay,
    load_key,
    load_rates,
    load_value,
    locate_tile,
    locate_tokens,
    log2_decay,
    slot_at,
    slot_offset,
    state_at,
    store_row,
    sum_keys,
    tile_at,
    token_at,
)


@triton.jit(do_not_specialize=["T", "N", "segments"])
def element_reverse_kernel(
    q, log_decay, step, rate, d_o, ends, cu, scale, T, N, segments,
    traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the state before a segment, with a gradient of 0 of the state after it.

    Grid: sequence, segment, block.

    Reads q [B, T, H, K], d_o [B, T, HV, V], and the decays as the forward. Writes ends [N segments, K, V, HV] float32.
    """
    n, vi, hv, h, in_keys, in_values, in_channels, _ = locate_tile(traits)
    sequence, segment, start, first, last, is_last, slot = locate_tokens(cu, T, N, segments, traits)
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
            if not traits.READ_BEFORE:
                dS += read
            dS = decay_state(dS, l, traits)
            if traits.READ_BEFORE:
                dS += read
    ends_at = slot_at(ends, sequence * segments + segment, slot_offset(hv, n, vi, traits), traits)
    tl.store(ends_at, dS, mask=in_keys & in_values & in_channels)


@triton.jit
def load_values(x, t, vi, hv, in_values, in_channels, traits: tl.constexpr):
    """Load v or d_o of GROUP tokens from t on."""
    row = tl.cast(t, tl.int64)
    GROUP: tl.constexpr = traits.GROUP
    values = ()
    for i in tl.static_range(GROUP):
        values = values + (load_value(x, row, i, True, hv, vi, in_values, in_channels, traits),)
    return values


@triton.jit
def load_writes(
    k, v, log_decay, step, t, n, vi, hv, h, in_keys, in_values, in_channels, traits: tl.constexpr,
):  # fmt: skip
    """Load the decays, k and v of GROUP tokens from t on."""
    row = tl.cast(t, tl.int64)
    GROUP: tl.constexpr = traits.GROUP
    decays = ()
    ks = ()
    for i in tl.static_range(GROUP):
        decays = decays + (load_decay(log_decay, step, row, i, True, hv, n, in_keys, in_channels, traits),)
        ks = ks + (load_key(k, row, i, True, h, n, in_keys, in_channels, traits),)
    return decays, ks, load_values(v, t, vi, hv, in_values, in_channels, traits)


@triton.jit
def advance_group(S, writes, rates, traits: tl.constexpr):
    """Return the state after GROUP tokens. writes: what `load_writes` returned for them."""
    decays, ks, vs = writes
    GROUP: tl.constexpr = traits.GROUP
    for i in tl.static_range(GROUP):
        l = log2_decay(decays[i], rates, traits)
        S = decay_state(S, l, traits) + ks[i].to(tl.float32) * vs[i].to(tl.float32)
    return S


@triton.jit
def reverse_group(
    S, dS, d_rates, d_os, q, k, v, log_decay, step, rates, d_q, d_k, d_v, d_decay, d_o, scratch, scale, t,
    group, prefetch_t, n, vi, hv, h, in_keys, in_values, in_channels, traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of GROUP tokens from t on: forward from S, the state before them, then in reverse.

    d_os: d_o of these tokens. group: the number of the group in its interval, which locates it in `scratch`.

    Returns: dS before the tokens; d_rates; the d_o of GROUP tokens from prefetch_t on, which a later call needs. The
        source loads them before the stores, because otherwise the compiler issues the loads after the stores.
    """
    row = tl.cast(t, tl.int64)
    GROUP: tl.constexpr = traits.GROUP
    decays, ks, vs = load_writes(k, v, log_decay, step, t, n, vi, hv, h, in_keys, in_values, in_channels, traits)
    qs = ()
    for i in tl.static_range(GROUP):
        qs = qs + (load_key(q, row, i, True, h, n, in_keys, in_channels, traits),)
    factors = ()
    Ps = ()
    d_qs = ()
    for i in tl.static_range(GROUP):
        factor = decay_factor(log2_decay(decays[i], rates, traits), traits)
        P = factor * S
        read = S
        S = tl.fma(ks[i].to(tl.float32), vs[i].to(tl.float32), P)
        if not traits.READ_BEFORE:
            read = S
        factors = factors + (factor,)
        Ps = Ps + (P,)
        if traits.KEY_GRADIENTS:
            d_qs = d_qs + (tl.sum(read * (d_os[i].to(tl.float32) * scale), 1, keep_dims=True),)
    d_ks = ()
    d_vs = ()
    d_decays = ()
    for i in tl.static_range(GROUP - 1, -1, -1):
        v_i = vs[i].to(tl.float32)
        read = qs[i].to(tl.float32) * (d_os[i].to(tl.float32) * scale)
        if not traits.READ_BEFORE:
            dS += read
        if traits.KEY_GRADIENTS:
            d_ks = (tl.sum(dS * v_i, 1, keep_dims=True),) + d_ks
        d_vs = (tl.sum(dS * ks[i].to(tl.float32), 0, keep_dims=True),) + d_vs
        if traits.DECAY != "none":
            d_log = tl.sum(dS * Ps[i], 1, keep_dims=True)
            if traits.DECAY == "rate":
                d_rates += d_log * decays[i]
                d_decays = (tl.sum(d_log * rates, 0, keep_dims=True),) + d_decays
            elif traits.DECAY == "head":
                d_decays = (tl.sum(d_log, 0, keep_dims=True),) + d_decays
            elif traits.DECAY == "channel":
                decay_at = token_at(d_decay, row, i, traits.HV * traits.K, hv * traits.K + n, 0, traits.KEYS)
                tl.store(decay_at, d_log, mask=in_keys & in_channels)
            else:
                d_rates += d_log * decays[i]
        dS = factors[i] * dS
        if traits.READ_BEFORE:
            dS += read
    prefetched_d_os = load_values(d_o, prefetch_t, vi, hv, in_values, in_channels, traits)
    AXIS: tl.constexpr = 1 if traits.V > 1 else 2  # the contiguous axis of v
    LENGTH: tl.constexpr = traits.V if traits.V > 1 else traits.CHANNELS
    d_vs = fold_lanes(d_vs, GROUP, 1, 4, traits)
    in_row = in_values & in_channels
    store_folded_rows(d_v, d_vs, 1.0, t, traits.HV * traits.V, hv * traits.V + vi, in_row, AXIS, LENGTH, traits)
    if traits.DECAY == "rate" or traits.DECAY == "head":
        d_decays = fold_lanes(d_decays, GROUP, 1, 4, traits)
        unit: tl.constexpr = LN_2 if traits.DECAY == "rate" else 1.0  # `rates` contains log2 e
        store_folded_rows(d_decay, d_decays, unit, t, traits.HV, hv, in_channels, 2, traits.CHANNELS, traits)
    if traits.KEY_GRADIENTS:
        if traits.SHARED:
            d_qs = fold_lanes(sum_thread_channels(d_qs, GROUP), GROUP, 1, 5, traits)
            d_ks = fold_lanes(sum_thread_channels(d_ks, GROUP), GROUP, 1, 5, traits)
            store_folded_keys(scratch, d_qs, d_ks, group, traits)
        else:
            for i in tl.static_range(GROUP):
                in_row = in_keys & in_channels
                at = token_at(d_q, row, i, traits.HV * traits.K, hv * traits.K + n, 0, traits.KEYS)
                tl.store(at, d_qs[i], mask=in_row)
                at = token_at(d_k, row, i, traits.HV * traits.K, hv * traits.K + n, 0, traits.KEYS)
                tl.store(at, d_ks[i], mask=in_row)
    return dS, d_rates, prefetched_d_os


@triton.jit
def reverse_interval(
    S, dS, d_rates, q, k, v, log_decay, step, rates, d_o, d_q, d_k, d_v, d_decay, scratch, pending_scratch, scale,
    t, stop, rows, block, n, vi, hv, h, in_keys, in_values, in_channels, traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of CHECKPOINT_TOKENS tokens from t on: the states before all groups, then the groups in
    reverse.

    S: the state before the tokens. scratch: where the warps store their partial d_q and d_k of these tokens.
    pending_scratch: those of the next interval, which the kernel has processed before; `sum_warps` adds them up while
    the operands are loaded. There is no next interval from `stop` on: nothing is stored for these tokens.

    Returns: dS before the tokens; d_rates.
    """
    GROUP: tl.constexpr = traits.GROUP
    GROUPS: tl.constexpr = traits.CHECKPOINT_TOKENS // traits.GROUP
    d_os = load_values(d_o, t + (GROUPS - 1) * GROUP, vi, hv, in_values, in_channels, traits)
    next_d_os = load_values(d_o, t + max(GROUPS - 2, 0) * GROUP, vi, hv, in_values, in_channels, traits)
    writes = ()
    for i in tl.static_range(GROUPS - 1):
        group_writes = load_writes(
            k, v, log_decay, step, t + i * GROUP, n, vi, hv, h, in_keys, in_values, in_channels, traits
        )
        writes = writes + (group_writes,)
    if traits.KEY_GRADIENTS and traits.SHARED:
        tl.debug_barrier()
        sum_warps(pending_scratch, d_q, d_k, t + traits.CHECKPOINT_TOKENS, stop, rows, block, h, traits)
    states = (S,)
    for i in tl.static_range(GROUPS - 1):
        S = advance_group(S, writes[i], rates, traits)
        states = states + (S,)
    for i in range(GROUPS):
        group = GROUPS - 1 - i
        # rotate the states, so that the last is that before the group in each iteration
        S = states[GROUPS - 1]
        rotated = (states[0],)
        for j in tl.static_range(GROUPS - 1):
            rotated = rotated + (states[j],)
        states = rotated
        prefetch_t = t + tl.maximum(group - 2, 0) * GROUP
        dS, d_rates, prefetched_d_os = reverse_group(
            S, dS, d_rates, d_os, q, k, v, log_decay, step, rates, d_q, d_k, d_v, d_decay, d_o, scratch, scale,
            t + group * GROUP, group, prefetch_t, n, vi, hv, h, in_keys, in_values, in_channels, traits,
        )  # fmt: skip
        d_os = next_d_os
        next_d_os = prefetched_d_os
    return dS, d_rates


@triton.jit(do_not_specialize=["T", "N", "segments", "rows"])
def element_backward_kernel(
    q, k, v, log_decay, step, rate, d_o, d_final, checkpoints, starts, scratch,
    d_q, d_k, d_v, d_decay, d_rate, d_initial, cu, scale, T, N, segments, rows,
    traits: tl.constexpr, token_traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one segment of a sequence for one block of channels. Grid: sequence, segment, block.

    Reads the operands as the forward; d_o [B, T, HV, V]; d_final [N, HV, K, V] (None: 0), or with segments starts
    [N segments, K, V, HV], the gradient of the state at the end of each; checkpoints [slots, K, V, HV].
    Writes d_v [B, T, HV, V]; d_initial [N, HV, K, V] (None: skipped); d_decay, the gradient of log_decay [B, T, HV] or
    [B, T, HV, K], or that of step [B, T, HV]; d_rate [N segments, K, HV] or [N segments, HV], the gradient of the rate
    or the fixed decay from the tokens of each segment. With KEY_GRADIENTS d_q and d_k float32: SHARED [blocks, rows,
    H, K] from the channels of each block, where rows = B T; else [B, T, HV, K] from each channel.
    scratch: [programs, 2 halves, W, CHECKPOINT_TOKENS / GROUP, 2 (d_q, d_k), GROUP, RN TN] float32 with SHARED and
    KEY_GRADIENTS. Intervals use the halves alternately: one is written while the other is summed.

    traits describes whole groups and intervals, token_traits single tokens (CHECKPOINT_TOKENS = GROUP = 1).
    """
    n, vi, hv, h, in_keys, in_values, in_channels, block = locate_tile(traits)
    sequence, segment, start, first, last, is_last, slot = locate_tokens(cu, T, N, segments, traits)
    in_state = in_keys & in_values & in_channels
    SCRATCH: tl.constexpr = traits.W * traits.CHECKPOINT_TOKENS * 2 * traits.RN * traits.TN
    offsets = slot_offset(hv, n, vi, traits)
    dS = empty_state(traits)
    segment_slot = tl.cast(sequence * segments + segment, tl.int64)
    if starts is not None:
        dS += tl.load(slot_at(starts, segment_slot, offsets, traits), mask=in_state, other=0.0)
    elif d_final is not None:
        dS += tl.load(state_at(d_final, sequence, hv, n, vi, traits), mask=in_state, other=0.0)
    rates = load_rates(log_decay, rate, hv, n, in_keys, in_channels, traits)
    d_rates = tl.sum(empty_state(traits), 1, keep_dims=True)
    if scratch is not None:
        scratch += tl.cast(tl.program_id(0), tl.int64) * (2 * SCRATCH)
    intervals = (last - first) // traits.CHECKPOINT_TOKENS
    stop = first + intervals * traits.CHECKPOINT_TOKENS
    checkpoint_at = slot_at(checkpoints, slot + (stop - start) // traits.CHECKPOINT_TOKENS, offsets, traits)
    for i in range(last - stop):
        # the tokens after the last whole interval, one by one, so that the loop for intervals needs no masks
        t = last - 1 - i
        S = tl.load(checkpoint_at, mask=in_state, other=0.0)
        for earlier in range(stop, t):
            writes = load_writes(
                k, v, log_decay, step, earlier, n, vi, hv, h, in_keys, in_values, in_channels, token_traits
            )
            S = advance_group(S, writes, rates, token_traits)
        d_os = load_values(d_o, t, vi, hv, in_values, in_channels, token_traits)
        dS, d_rates, _ = reverse_group(
            S, dS, d_rates, d_os, q, k, v, log_decay, step, rates, d_q, d_k, d_v, d_decay, d_o, scratch, scale, t,
            0, t, n, vi, hv, h, in_keys, in_values, in_channels, token_traits,
        )  # fmt: skip
        if traits.KEY_GRADIENTS and traits.SHARED:
            tl.debug_barrier()
            sum_warps(scratch, d_q, d_k, t, last, rows, block, h, token_traits)
            tl.debug_barrier()
    for interval in range(intervals):
        t = stop - (interval + 1) * traits.CHECKPOINT_TOKENS
        checkpoint_at = slot_at(checkpoints, slot + (t - start) // traits.CHECKPOINT_TOKENS, offsets, traits)
        S = tl.load(checkpoint_at, mask=in_state, other=0.0)
        if traits.PREFETCH:
            earlier = tl.maximum(t - traits.CHECKPOINT_TOKENS, first)
            end = earlier + traits.CHECKPOINT_TOKENS
            prefetch_decays(log_decay, step, earlier, end, traits.CHECKPOINT_TOKENS, traits)
            prefetch_values(v, earlier, end, traits.CHECKPOINT_TOKENS, traits)
            prefetch_values(d_o, earlier, end, traits.CHECKPOINT_TOKENS, traits)
            prefetch_shared_keys(k, earlier, end, traits.CHECKPOINT_TOKENS, traits)
            prefetch_shared_keys(q, earlier, end, traits.CHECKPOINT_TOKENS, traits)
            prefetch_checkpoint(checkpoints, slot + (earlier - start) // traits.CHECKPOINT_TOKENS, traits)
        half = scratch
        pending = scratch
        if scratch is not None:
            half += interval % 2 * SCRATCH
            pending += (1 - interval % 2) * SCRATCH
        dS, d_rates = reverse_interval(
            S, dS, d_rates, q, k, v, log_decay, step, rates, d_o, d_q, d_k, d_v, d_decay, half, pending, scale,
            t, stop, rows, block, n, vi, hv, h, in_keys, in_values, in_channels, traits,
        )  # fmt: skip
    if traits.KEY_GRADIENTS and traits.SHARED:
        tl.debug_barrier()
        sum_warps(scratch + (intervals + 1) % 2 * SCRATCH, d_q, d_k, first, stop, rows, block, h, traits)
    if traits.DECAY == "rate" or traits.DECAY == "fixed_channel":
        rate_at = tile_at(d_rate + segment_slot * (traits.HV * traits.K), n * traits.HV + hv, 2, traits.CHANNELS)
        tl.store(rate_at, d_rates, mask=in_keys & in_channels)
    elif traits.DECAY == "fixed":
        store_row(d_rate, segment_slot, 0, traits.HV, hv, sum_keys(d_rates), in_channels, 2, traits.CHANNELS, traits)
    if d_initial is not None:
        if segment == 0:
            tl.store(state_at(d_initial, sequence, hv, n, vi, traits), dS, mask=in_state)
