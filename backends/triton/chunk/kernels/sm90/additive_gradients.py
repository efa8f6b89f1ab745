"""Gradients of a chunk of an additive update with a decay per channel on sm_90, from the states of the reverse scan.

It computes the equations of portable/channel/gradients.py without an erase term. With S the state before the chunk, dS'
the gradient of the state after it, and x = w v [64, V]:

    dP = scale tril(do x^T, -1)
    dq = scale 2^G'' do S^T + sum_l f_l (dP_l k_l),   dk = 2^(Gend - G) x dS'^T + sum_l f_l (dP_l^T q_l)

At level l of portable/channel/decay_levels.py, dP_l are the pairs (i, j) of tokens with i in the upper and j in the
lower half of a block; f_l is the factor of each token and channel relative to the boundary between the halves; k_l and
q_l
are the rows scaled by it. As a token is either in an upper or in a lower half, one product of the symmetric pairs,

    z = (dP_l + dP_l^T) [q_l in upper halves, k_l in lower halves]

has the rows of dq in upper halves and those of dk in lower halves. The exponents of the factors are products of masks
of zeros and ones with the log2 decays in two float16 terms, which together have 22 bits.

The transposed tiles of channel_gradients.py are slower here: on an H100 (8 x 4096 tokens, 16 heads of 128) GLA's
gradients took 1.26 ms with transposed tiles and 0.95 ms with these, but KDA's 1.18 and 1.38 ms.

Grid: one CTA of 4 warps for each (chunk, value head, tile of 64 keys); it loops over tiles of 64 values, two stages of
which are in shared memory, as in gradients.py. Scaled rows have two buffers, which the levels alternate between, so
that one barrier per level suffices.

Supported: operands and scratch of one 16-bit dtype, chunks of 64, V <= 512.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.chunk.kernels.sm90.channel_gradients import BY_KEY, sum_from_token
from deltazoo.backends.triton.chunk.kernels.sm90.channel_levels import add_halves, keep_tokens
from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    A_OPERAND,
    ACC,
    ACC_COLUMNS,
    ACC_ROWS,
    SMEM_TILE,
    allocate_tiles,
    barrier,
    copy_pointers,
    copy_tile_async,
    locate_scratch_chunk,
    store_accumulator,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.ptx import exp2_ftz
from deltazoo.backends.triton.chunk.kernels.sm90.value_tiles import (
    LOAD_LAYOUT,
    copy_value_tile,
    state_pointers,
    store_write_sums,
)
from deltazoo.backends.triton.device.layout import LOG2E, clamp_log2_decay, locate_key_tile, opaque_zero


@gluon.jit
def sum_decays_async(g_hi, g_lo, KIND: gl.constexpr, LEVEL: gl.constexpr):
    """Issue the wgmmas that sum for each token the log2 decays that a mask (token_masks.py) keeps, [64 tokens, keys].

    g_hi, g_lo: the terms of the log2 decays [keys, 64 tokens].

    Returns: the sums, pending; their A operand, which the caller passes to warpgroup_mma_wait.
    """
    ones = gl.full([64, 64], 1.0, gl.float16, ACC)
    mask = gl.convert_layout(keep_tokens(ones, KIND, LEVEL), A_OPERAND, assert_trivial=True)
    sums = gl.zeros([64, 64], gl.float32, ACC)
    sums = warpgroup_mma(mask, g_lo.permute((1, 0)), sums, use_acc=False, is_async=True)
    return warpgroup_mma(mask, g_hi.permute((1, 0)), sums, is_async=True), mask


@gluon.jit
def decays(g_hi, g_lo, KIND: gl.constexpr, LEVEL: gl.constexpr):
    """Return 2 to the power of the sums of `sum_decays_async`."""
    sums, mask = sum_decays_async(g_hi, g_lo, KIND, LEVEL)
    sums, _ = warpgroup_mma_wait(0, deps=[sums, mask])
    return exp2_ftz(sums)


@gluon.jit
def store_symmetric(x, tile, dtype: gl.constexpr):
    """Store the strictly lower part of x [64, 64] and its transpose, rounded, to a tile."""
    lower = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
    x = keep_tokens(to_16_bits(x, dtype), "before", 0)
    lower.store(x)
    tile.store(x + lower.permute((1, 0)).load(ACC))


@gluon.jit
def multiply_pairs(pairs, rows, LEVEL: gl.constexpr):
    """Multiply the pairs of a level, of a symmetric tile, with scaled rows in shared memory."""
    a_pairs = gl.convert_layout(keep_tokens(pairs.load(ACC), "pairs", LEVEL), A_OPERAND, assert_trivial=True)
    z = gl.zeros([64, 64], gl.float32, ACC)
    z = warpgroup_mma(a_pairs, rows, z, use_acc=False, is_async=True)
    z, _, _ = warpgroup_mma_wait(0, deps=[z, a_pairs, rows])
    return z


@gluon.jit
def add_level(
    dq_tile, dk_tile, dP_s, g_hi, g_lo, q_s, k_s, read_s, LEVEL: gl.constexpr, READ_BEFORE: gl.constexpr
):  # fmt: skip
    """Add the pairs of a level to dq and dk. read_s: a buffer for the scaled rows."""
    READ: gl.constexpr = "early" if READ_BEFORE else "late"
    dtype: gl.constexpr = read_s.dtype
    upper = (((gl.arange(0, 64, ACC_ROWS) >> LEVEL) & 1) != 0)[:, None]
    factors = decays(g_hi, g_lo, READ, LEVEL)
    rows = to_float32(gl.where(upper, q_s.load(ACC), k_s.load(ACC)))
    read_s.store(to_16_bits(rows * factors, dtype))
    fence_async_shared()
    barrier()
    return add_halves(dq_tile, dk_tile, upper, factors, multiply_pairs(dP_s, read_s, LEVEL))


@takes(
    pointers="q k v log_decay w do states dstates du dq dk dlog_decay dgates partial cu",
    traits="H HV K V C BK WRITE READ_BEFORE HAS_STATE PACKED UNIT IN_GRADIENTS",
)
@gluon.jit(do_not_specialize=["N", "slots", "num_scratch_slots", "T", "window", "windows"])
def sm90_additive_gradients_kernel(gmem, N, slots, num_scratch_slots, scale, T, window, windows, traits: gl.constexpr):
    """Parameters and results as in portable/channel/gradients.py; channel_gradients.py explains IN_GRADIENTS."""
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    C: gl.constexpr = traits.C
    BK: gl.constexpr = traits.BK
    WRITE: gl.constexpr = traits.WRITE
    READ_BEFORE: gl.constexpr = traits.READ_BEFORE
    PACKED: gl.constexpr = traits.PACKED
    gl.static_assert(C == 64 and BK == 64 and V <= 512)
    gl.static_assert(gmem.states.dtype == gmem.k.dtype and gmem.k.dtype.element_ty.primitive_bitwidth == 16)
    NK: gl.constexpr = (K + BK - 1) // BK
    NV: gl.constexpr = (V + 63) // 64
    NUM_STAGES: gl.constexpr = min(NV, 2)
    GROUP: gl.constexpr = HV // H
    MASK_K: gl.constexpr = K % 64 != 0
    STATE_STEP: gl.constexpr = 0 if traits.IN_GRADIENTS else 64 * K
    gl.static_assert(not traits.IN_GRADIENTS or (V == 128 and K % 64 == 0 and GROUP == 1 and not PACKED))
    dtype: gl.constexpr = gmem.states.dtype.element_ty
    scratch_slot, hv, h, tile = locate_key_tile(NK, traits)
    start, length, slot, c, in_use = locate_scratch_chunk(
        scratch_slot, gmem.cu, N, T, window, windows, C, traits.UNIT, PACKED
    )  # fmt: skip
    if in_use:
        tokens_left = length - c * C
        token = start + c * C
        column = tile * BK
        key = (token * H + h) * K + column
        value = (token * HV + hv) * V
        scratch_row = scratch_slot.to(gl.int64) * HV + hv
        local_value = (scratch_slot.to(gl.int64) * C * HV + hv) * V

        S_s = allocate_tiles(dtype, NUM_STAGES)
        dS_s = allocate_tiles(dtype, NUM_STAGES)
        x_s = allocate_tiles(dtype, NUM_STAGES)
        do_s = allocate_tiles(dtype, NUM_STAGES)
        q_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        k_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        do_at = copy_pointers(gmem.do + value, HV * V)
        x_at = copy_pointers(gmem.v + value, HV * V)
        buffers = (do_s, do_s, x_s, S_s, dS_s)
        row = token * HV + hv
        for tv in gl.static_range(NUM_STAGES):
            S_at, dS_at = state_pointers(
                tv, gmem.states, gmem.dstates, gmem.dq, gmem.dk, row, scratch_row, column, HV, K, V, traits.IN_GRADIENTS
            )  # fmt: skip
            pointers = (do_at, do_at, x_at, S_at, dS_at)
            copy_value_tile(buffers, pointers, tv, tokens_left, column, K, V, False, STATE_STEP)
        copy_tile_async(k_s, copy_pointers(gmem.k + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        copy_tile_async(q_s, copy_pointers(gmem.q + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        async_copy.commit_group()

        i = gl.arange(0, C, gl.SliceLayout(1, BY_KEY))
        ks = gl.arange(0, BK, gl.SliceLayout(0, BY_KEY))
        # split so that the addresses of one thread differ by constants
        first_channel = (token * HV + hv) * K + column + ((i // 32 * (32 * HV * K))[:, None] + ks[None, :])
        at_token = (i % 32 * (HV * K))[:, None]
        in_channel = (i < tokens_left)[:, None]
        if MASK_K:
            in_channel = in_channel & (ks < K - column)[None, :]
        g = gl.load(gmem.log_decay + first_channel + at_token, mask=in_channel, other=0.0)

        t = gl.arange(0, C, ACC_ROWS)
        j = gl.arange(0, C, ACC_COLUMNS)
        if WRITE:
            write = gl.load(gmem.w + (token + t) * HV + hv, mask=t < tokens_left, other=0.0).to(gl.float32)
            write_j = gl.load(gmem.w + (token + j) * HV + hv, mask=j < tokens_left, other=0.0).to(gl.float32)

        dq_tile = gl.zeros([C, BK], gl.float32, ACC)  # do S^T
        dk_tile = gl.zeros([C, BK], gl.float32, ACC)  # x dS'^T
        dP = gl.zeros([C, C], gl.float32, ACC)
        S_dot_dS = gl.zeros([16, BK], gl.float32, LOAD_LAYOUT)
        for tv in gl.static_range(NV):
            # leave pending: the group of k and q, committed after the first value tiles, and that of the next tile
            async_copy.wait_group((1 if tv < NUM_STAGES else 0) + (1 if tv + 1 < NV else 0))
            fence_async_shared()
            barrier()
            S_t = S_s[tv % NUM_STAGES]
            dS_t = dS_s[tv % NUM_STAGES]
            x_t = x_s[tv % NUM_STAGES]
            do_t = do_s[tv % NUM_STAGES]
            dq_tile = warpgroup_mma(do_t, S_t, dq_tile, is_async=True)
            dP = warpgroup_mma(do_t, x_t.permute((1, 0)), dP, is_async=True)
            dk_tile = warpgroup_mma(x_t, dS_t, dk_tile, is_async=True)
            for rows in gl.static_range(4):
                S_rows = S_t.slice(rows * 16, 16, dim=0).load(LOAD_LAYOUT)
                dS_rows = dS_t.slice(rows * 16, 16, dim=0).load(LOAD_LAYOUT)
                S_dot_dS += to_float32(S_rows) * to_float32(dS_rows)
            if tv + NUM_STAGES < NV:
                dq_tile, dP, dk_tile = warpgroup_mma_wait(0, deps=[dq_tile, dP, dk_tile])
                barrier()  # every warp has read the stage
                zero = opaque_zero(c, 25 + tv) * 64
                next_pointers = (do_at + zero, do_at + zero, x_at + zero, S_at + zero, dS_at + zero)
                copy_value_tile(buffers, next_pointers, tv + NUM_STAGES, tokens_left, column, K, V, False, STATE_STEP)
        # The buffers are dependencies, too: the compiler would treat them as free once the wgmmas are issued.
        dq_tile, dP, dk_tile, _, _, _, _ = warpgroup_mma_wait(0, deps=[dq_tile, dP, dk_tile, S_t, dS_t, x_t, do_t])
        async_copy.wait_group(0)  # of k and q; wgmma does not read them

        g = clamp_log2_decay(g * LOG2E)
        g_hi = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
        g_lo = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
        hi = g.to(gl.float16)
        g_hi.store(gl.permute(hi, (1, 0)))  # a thread holds adjacent tokens of a key
        g_lo.store(gl.permute((g - hi.to(gl.float32)).to(gl.float16), (1, 0)))
        state_product = gl.sum(S_dot_dS, 0)
        state_product = exp2_ftz(gl.sum(g, 0)) * gl.convert_layout(state_product, gl.SliceLayout(0, BY_KEY))

        dP *= scale  # before it is rounded, for the range of float16
        if WRITE:
            dP *= write_j[None, :]
        if not READ_BEFORE:
            read_diagonal = gl.sum(gl.where(t[:, None] == j[None, :], dP, 0.0), 1)
        dP_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        store_symmetric(dP, dP_s, dtype)
        fence_async_shared()
        barrier()
        dq_tile *= decays(g_hi, g_lo, "before" if READ_BEFORE else "upto", 0) * scale
        to_end = decays(g_hi, g_lo, "after", 0)
        if WRITE:
            to_end *= write[:, None]
        dk_tile *= to_end
        key_product = gl.sum(to_float32(k_s.load(ACC)) * dk_tile, 0)
        state_product += gl.convert_layout(key_product, gl.SliceLayout(0, BY_KEY))

        read_s = allocate_tiles(dtype, 2)  # rows of q in upper halves and of k in lower halves, scaled
        # Each level is a loop of one iteration: in one basic block ptxas would delay the last sums of all levels to the
        # end, which spills. `windows` is at least 1, so `once` is 1, but the compiler cannot fold it.
        once = gl.where(windows > 0, 1, 0)
        for level in gl.static_range(6):
            for _ in range(0, once):
                dq_tile, dk_tile = add_level(
                    dq_tile, dk_tile, dP_s, g_hi, g_lo, q_s, k_s, read_s[level % 2], level, READ_BEFORE
                )  # fmt: skip

        q_tile = to_float32(q_s.load(ACC))
        k_tile = to_float32(k_s.load(ACC))
        q_dq = q_tile * dq_tile
        late_terms = -k_tile * dk_tile
        if not READ_BEFORE:
            late_terms += q_dq
        dg = sum_from_token(gl.convert_layout(late_terms, BY_KEY)) + state_product[None, :]
        if READ_BEFORE:
            early_terms = gl.convert_layout(q_dq, BY_KEY)
            dg += sum_from_token(early_terms) - early_terms
        if not traits.HAS_STATE:  # the first decay of a sequence scales nothing
            dg = gl.where((c * C + i > 0)[:, None], dg, 0.0)
        gl.store(gmem.dlog_decay + first_channel + at_token, dg, mask=in_channel)
        if not READ_BEFORE:
            dq_tile += read_diagonal[:, None] * k_tile
            dk_tile += read_diagonal[:, None] * q_tile

        if GROUP > 1:
            partial_size = num_scratch_slots.to(gl.int64) * C * HV * K
            dq_at = gmem.partial + (scratch_slot.to(gl.int64) * C * HV + hv) * K + column
            dk_at = dq_at + partial_size
        else:
            dq_at = gmem.dq + key
            dk_at = gmem.dk + key
        store_accumulator(dq_at, dq_tile, HV * K, tokens_left, K - column, MASK_K)
        store_accumulator(dk_at, dk_tile, HV * K, tokens_left, K - column, MASK_K)
        if WRITE:
            gate_row = tile.to(gl.int64) * slots * HV + slot.to(gl.int64) * HV + hv
            dgates_at = gmem.dgates + gate_row * 3 * C
            store_write_sums(dgates_at, gmem.v, value, gmem.du, local_value, tile, tokens_left, HV, V, NK)
