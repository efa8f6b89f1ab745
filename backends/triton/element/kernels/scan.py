"""Forward scan of an elementwise recurrence, token by token.

    S_t = d_t * S_{t-1} + k_t v_t^T,    o_t = scale S_t^T q_t, or scale S_{t-1}^T q_t with READ_BEFORE

d_t = 2^(step_t rate log2 e) or 2^(log_decay_t log2 e), computed for each element of the state. The state stays in
registers in float32. The operands of GROUP tokens are loaded before the first is used.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.element.kernels.prefetch import prefetch_decays, prefetch_values
from deltazoo.backends.triton.element.kernels.tile import (
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
)


@triton.jit
def decay_factor(l, traits: tl.constexpr):
    """Return the decay whose log2 is given."""
    if traits.DECAY == "none":
        return 1.0
    else:
        return tl.exp2(l)


@triton.jit
def decay_state(S, l, traits: tl.constexpr):
    """Return 2^l S."""
    return decay_factor(l, traits) * S


@triton.jit(do_not_specialize=["T", "N", "segments", "save"])
def element_scan_kernel(
    q, k, v, log_decay, step, rate, initial, o, final, checkpoints, starts, ends, maps, cu, scale, T, N, segments, save,
    traits: tl.constexpr,
):  # fmt: skip
    """Scan the tokens of one segment of a sequence for one block of channels. Grid: sequence, segment, block.

    With `ends` the segment starts from 0, and the program writes the state at its end and the product of its decays
    (`maps`). Else it starts from `starts`, or without segments from `initial` (None: 0), and writes o, the final state,
    and, if save is not 0, the state before every CHECKPOINT_TOKENS tokens to `checkpoints`.

    Shapes: q, k [B, T, H, K]; v, o [B, T, HV, V]; initial, final [N, HV, K, V]; checkpoints [slots, K, V, HV]; starts,
    ends, maps [N segments, K, V, HV]. log_decay, step and rate are as in `load_decay` and `load_rates` (tile.py).
    States are float32.
    """
    n, vi, hv, h, in_keys, in_values, in_channels, _ = locate_tile(traits)
    sequence, segment, start, first, last, is_last, slot = locate_tokens(cu, T, N, segments, traits)
    in_state = in_keys & in_values & in_channels
    GROUP: tl.constexpr = traits.GROUP
    AHEAD: tl.constexpr = max(traits.GROUP, traits.CHECKPOINT_TOKENS)  # tokens that are prefetched together
    AXIS: tl.constexpr = 1 if traits.V > 1 else 2  # the contiguous axis of v
    LENGTH: tl.constexpr = traits.V if traits.V > 1 else traits.CHANNELS
    offsets = slot_offset(hv, n, vi, traits)
    segment_slot = sequence * segments + segment
    S = empty_state(traits)
    if starts is not None:
        S += tl.load(slot_at(starts, segment_slot, offsets, traits), mask=in_state, other=0.0)
    elif initial is not None:
        S += tl.load(state_at(initial, sequence, hv, n, vi, traits), mask=in_state, other=0.0)
    rates = load_rates(log_decay, rate, hv, n, in_keys, in_channels, traits)
    total = tl.sum(empty_state(traits), 1, keep_dims=True)
    for t in range(first, last, traits.GROUP):
        row = tl.cast(t, tl.int64)
        decays = ()
        qs = ()
        ks = ()
        vs = ()
        for i in tl.static_range(GROUP):
            in_time = t + i < last
            decays = decays + (load_decay(log_decay, step, row, i, in_time, hv, n, in_keys, in_channels, traits),)
            ks = ks + (load_key(k, row, i, in_time, h, n, in_keys, in_channels, traits),)
            vs = vs + (load_value(v, row, i, in_time, hv, vi, in_values, in_channels, traits),)
            if ends is None:
                qs = qs + (load_key(q, row, i, in_time, h, n, in_keys, in_channels, traits),)
        if traits.PREFETCH:
            if (t - start) % AHEAD == 0:
                later = tl.minimum(t + AHEAD, last - 1)
                prefetch_decays(log_decay, step, later, last, AHEAD, traits)
                prefetch_values(v, later, last, AHEAD, traits)
        outputs = ()
        for i in tl.static_range(GROUP):
            if i % traits.CHECKPOINT_TOKENS == 0:
                # `save` is no constant: its branch separates the loads of a group from their uses. Without the branch
                # ptxas issues each load just before its use (72 registers instead of 229), and Mamba-1 on an H100,
                # 8 x 4096 tokens, width 4096, K = 16, takes 3.98 ms in place of 1.13.
                if (save != 0) & ((t + i - start) % traits.CHECKPOINT_TOKENS == 0) & (t + i < last):
                    saved_slot = slot + (t + i - start) // traits.CHECKPOINT_TOKENS
                    tl.store(slot_at(checkpoints, saved_slot, offsets, traits), S, mask=in_state)
            if ends is None and traits.READ_BEFORE:
                outputs = outputs + (sum_keys(S * qs[i].to(tl.float32)) * scale,)
            l = log2_decay(decays[i], rates, traits)
            if ends is not None:
                total += l
            S = decay_state(S, l, traits) + ks[i].to(tl.float32) * vs[i].to(tl.float32)
            if ends is None and not traits.READ_BEFORE:
                outputs = outputs + (sum_keys(S * qs[i].to(tl.float32)) * scale,)
        if ends is None:
            for i in tl.static_range(GROUP):
                in_row = in_values & in_channels & (t + i < last)
                store_row(o, row, i, traits.HV * traits.V, hv * traits.V + vi, outputs[i], in_row, AXIS, LENGTH, traits)
    if ends is not None:
        tl.store(slot_at(ends, segment_slot, offsets, traits), S, mask=in_state)
        product = tl.exp2(total) + tl.zeros_like(S)
        if traits.DECAY == "none":
            product = tl.zeros_like(S) + 1.0
        tl.store(slot_at(maps, segment_slot, offsets, traits), product, mask=in_state)
    elif is_last:
        tl.store(state_at(final, sequence, hv, n, vi, traits), S, mask=in_state)
