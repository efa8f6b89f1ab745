"""Gradients of a chunk of a delta rule with a decay per channel on sm_90, from the states of the reverse scan.

It computes the equations of portable/channel/gradients.py. With S the state before the chunk, dS' the gradient of the
state after it, x and du [64, V], and y = b e:

    dP = scale tril(do x^T, -1),   dA = tril(du x^T, -1)
    dq = scale 2^G'' do S^T + sum_l f_l (dP_l k_l),   -dy = 2^G' du S^T + sum_l f_l (dA_l k_l)
    dk = 2^(Gend - G) x dS'^T + sum_l f_l (dP_l^T q_l - dA_l^T y_l)

At level l of portable/channel/decay_levels.py, dP_l and dA_l are the pairs (i, j) of tokens with i in the upper and j
in the lower half of a block; f_l is the factor of each token and channel relative to the boundary between the halves
(decay_factors.py); k_l, q_l and y_l are the rows scaled by it.

All tiles with channels are transposed, [64 channels, 64 tokens], so that the tokens of a channel are in the registers
of four lanes, and scaled rows are A operands in registers. The B operands are blocks [16 tokens, 16 tokens] of two
matrices that are computed once and stored in shared memory, [64, 16] for each level (two for level 5):

    dP + dP^T,   dA^T - b dA        row j: token of the scaled rows, column i: token of the gradient

Blocks of levels 4 and 5 are off the diagonal: the tokens of their columns are all in upper or all in lower halves.
Levels 0 to 3 share the blocks on the diagonal; each has a copy with its own pairs. Thus no barrier is needed between
levels.

Grid: one CTA of 4 warps for each (chunk, value head, tile of 64 keys); it loops over tiles of 64 values, two stages of
which are in shared memory, as in gradients.py.

With IN_GRADIENTS states and dstates need no scratch memory: they are stored where the program will write the gradients
of its chunk. S^T of values 0 to 63 and 64 to 127 is in the first and second half of each row of d_log_decay, as 16-bit
elements; dS'^T of values 0 to 63 is in the rows of dq, of values 64 to 127 in those of dk.

Supported: operands and scratch of one 16-bit dtype, chunks of 64, V <= 512.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.chunk.kernels.sm90.channel_levels import (
    N16_ROWS,
    add_level,
    add_level_4,
    add_level_5,
    allocate_pair_tiles,
    join_blocks,
    last_token,
    load_block,
    load_decays,
    scale_read,
    scale_write,
    store_pairs,
)
from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    ACC,
    ACC_COLUMNS,
    ACC_ROWS,
    SMEM_TILE,
    SMEM_VECTOR,
    allocate_tiles,
    barrier,
    copy_pointers,
    copy_tile_async,
    locate_scratch_chunk,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.state_copies import store_tile
from deltazoo.backends.triton.chunk.kernels.sm90.value_tiles import (
    LOAD_LAYOUT,
    copy_value_tile,
    state_pointers,
    store_write_sums,
)
from deltazoo.backends.triton.chunk.kernels.sm90.wy_tiles import split_column_blocks
from deltazoo.backends.triton.device.layout import (
    LOG2E,
    clamp_away_from_zero,
    clamp_log2_decay,
    locate_key_tile,
    opaque_zero,
)

# log decays and their gradients [64 tokens, 64 keys]: a thread holds 32 tokens of one key, a warp 32 keys of a token
BY_KEY = gl.constexpr(gl.BlockedLayout([32, 1], [1, 32], [2, 2], [1, 0]))
# float32 [64 keys, 64 tokens]: few bank conflicts in the layouts ACC and BY_KEY
SMEM_BY_TOKEN = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
# Sums over the 32 tokens of a thread, up to each token and from it on, without the 10 shuffles per element of a reverse
# associative_scan. DELAY_TOKENS moves the sums to the next token, so that they exclude the token.
CUMSUM = gl.constexpr("mov.b32 $0, $32;\n" + "\n".join(f"add.f32 ${n + 1}, ${n}, ${n + 33};" for n in range(31)))
REVERSE_CUMSUM = gl.constexpr(
    "mov.b32 $31, $63;\n" + "\n".join(f"add.f32 ${30 - n}, ${31 - n}, ${62 - n};" for n in range(31))
)
DELAY_TOKENS = gl.constexpr("mov.b32 $0, 0;\n" + "\n".join(f"mov.b32 ${n + 1}, ${n + 32};" for n in range(31)))
CUMSUM_OPERANDS = gl.constexpr(",".join(["=&r"] * 32 + ["r"] * 32))


@gluon.jit
def over_tokens(x, ASM: gl.constexpr):
    """Apply one of these functions to the 32 tokens of each thread."""
    return gl.inline_asm_elementwise(ASM, CUMSUM_OPERANDS, [x], gl.float32, is_pure=True, pack=32)


@gluon.jit
def sum_to_token(x):
    """Return for each token the sums of x [64 tokens, 64] over the tokens up to it, and over those before it."""
    x = over_tokens(x, CUMSUM)
    i = gl.arange(0, 64, gl.SliceLayout(1, BY_KEY))[:, None]
    first_half = gl.where(i < 32, 0.0, gl.sum(gl.where(i == 31, x, 0.0), 0)[None, :])
    return x + first_half, over_tokens(x, DELAY_TOKENS) + first_half


@gluon.jit
def sum_from_token(x):
    """Return for each token the sum of x [64 tokens, 64] over the tokens from it on; layout BY_KEY."""
    x = over_tokens(x, REVERSE_CUMSUM)
    i = gl.arange(0, 64, gl.SliceLayout(1, BY_KEY))[:, None]
    second_half = gl.sum(gl.where(i == 32, x, 0.0), 0)
    return gl.where(i < 32, x + second_half[None, :], x)


@gluon.jit
def store_transposed(base, x, stride: gl.constexpr, rows, columns, MASK_COLUMNS: gl.constexpr):
    """Store x^T in the dtype of `base`, for x [64 channels, 64 tokens] in the layout ACC."""
    dtype: gl.constexpr = base.dtype.element_ty
    staging = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
    staging.permute((1, 0)).store(to_16_bits(x, dtype))
    store_tile(base, staging, stride, rows, columns, True, MASK_COLUMNS)


@takes(
    pointers="q k e v log_decay b do states dstates v_new du dq dk de dlog_decay dgates partial cu",
    traits=(
        "H HV K V C BK ERASE_KEY ERASE_CHANNELS ERASE WRITE STORED_DU ERASE_PREVIOUS READ_BEFORE HAS_STATE PACKED "
        "MIN_BETA UNIT IN_GRADIENTS"
    ),
)
@gluon.jit(do_not_specialize=["N", "slots", "num_scratch_slots", "T", "window", "windows"])
def sm90_channel_gradients_kernel(gmem, N, slots, num_scratch_slots, scale, T, window, windows, traits: gl.constexpr):
    """Parameters and results as in portable/channel/gradients.py; the docstring of this file explains IN_GRADIENTS."""
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    C: gl.constexpr = traits.C
    BK: gl.constexpr = traits.BK
    READ_BEFORE: gl.constexpr = traits.READ_BEFORE
    gl.static_assert(C == 64 and BK == 64 and V <= 512)
    gl.static_assert(gmem.states.dtype == gmem.k.dtype and gmem.k.dtype.element_ty.primitive_bitwidth == 16)
    NK: gl.constexpr = (K + BK - 1) // BK
    NV: gl.constexpr = (V + 63) // 64
    NUM_STAGES: gl.constexpr = min(NV, 2)
    GROUP: gl.constexpr = HV // H
    MASK_K: gl.constexpr = K % 64 != 0
    STATE_STEP: gl.constexpr = 0 if traits.IN_GRADIENTS else 64 * K
    gl.static_assert(not traits.IN_GRADIENTS or (V == 128 and K % 64 == 0 and GROUP == 1 and not traits.PACKED))
    RECOVER_DU: gl.constexpr = traits.WRITE and not traits.STORED_DU  # du holds dv = b du
    ANY_EARLY: gl.constexpr = READ_BEFORE or traits.ERASE_PREVIOUS
    dtype: gl.constexpr = gmem.states.dtype.element_ty
    scratch_slot, hv, h, tile = locate_key_tile(NK, traits)
    start, length, slot, c, in_use = locate_scratch_chunk(
        scratch_slot, gmem.cu, N, T, window, windows, C, traits.UNIT, traits.PACKED
    )  # fmt: skip
    if in_use:
        tokens_left = length - c * C
        token = start + c * C
        column = tile * BK
        key = (token * H + h) * K + column
        value = (token * HV + hv) * V
        scratch_row = scratch_slot.to(gl.int64) * HV + hv
        local_value = (scratch_slot.to(gl.int64) * C * HV + hv) * V
        gate_row = tile.to(gl.int64) * slots * HV + slot.to(gl.int64) * HV + hv
        dgates_at = gmem.dgates + gate_row * 3 * C

        S_s = allocate_tiles(dtype, NUM_STAGES)
        dS_s = allocate_tiles(dtype, NUM_STAGES)
        x_s = allocate_tiles(dtype, NUM_STAGES)
        do_s = allocate_tiles(dtype, NUM_STAGES)
        du_s = allocate_tiles(dtype, NUM_STAGES)
        q_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        k_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        e_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE) if traits.ERASE_KEY else k_s
        do_at = copy_pointers(gmem.do + value, HV * V)
        du_at = copy_pointers(gmem.du + (local_value if traits.STORED_DU else value), HV * V)
        x_at = copy_pointers(gmem.v_new + local_value, HV * V)
        buffers = (do_s, du_s, x_s, S_s, dS_s)
        row = token * HV + hv
        for tv in gl.static_range(NUM_STAGES):
            S_at, dS_at = state_pointers(
                tv, gmem.states, gmem.dstates, gmem.dq, gmem.dk, row, scratch_row, column, HV, K, V, traits.IN_GRADIENTS
            )  # fmt: skip
            pointers = (do_at, du_at, x_at, S_at, dS_at)
            copy_value_tile(buffers, pointers, tv, tokens_left, column, K, V, True, STATE_STEP)
        copy_tile_async(k_s, copy_pointers(gmem.k + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        copy_tile_async(q_s, copy_pointers(gmem.q + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        if traits.ERASE_KEY:
            e_at = copy_pointers(gmem.e + key, H * K)
            copy_tile_async(e_s, e_at, 0, tokens_left, K - column, True, MASK_K)
        async_copy.commit_group()

        i = gl.arange(0, C, gl.SliceLayout(1, BY_KEY))
        ks = gl.arange(0, BK, gl.SliceLayout(0, BY_KEY))
        # split so that the addresses of one thread differ by constants, and its tokens are compared with constants
        first_channel = (token * HV + hv) * K + column + ((i // 32 * (32 * HV * K))[:, None] + ks[None, :])
        at_token = (i % 32 * (HV * K))[:, None]
        in_keys = (ks < K - column)[None, :] if MASK_K else (ks >= 0)[None, :]
        in_channel = (i % 32 < tokens_left - i // 32 * 32)[:, None] & in_keys
        barrier()  # ptxas would issue the loads of g before the copies
        g = gl.load(gmem.log_decay + first_channel + at_token, mask=in_channel, other=0.0)

        t = gl.arange(0, C, ACC_ROWS)
        j = gl.arange(0, C, ACC_COLUMNS)
        in_sequence = t < tokens_left
        erase_s = gl.allocate_shared_memory(gl.float32, [64], SMEM_VECTOR)
        if traits.ERASE:
            erase = gl.load(gmem.b + (token + t) * HV + hv, mask=in_sequence, other=0.0).to(gl.float32)
            erase_s.store(erase)

        dq_tile = gl.zeros([BK, C], gl.float32, ACC)  # S do^T
        dy_tile = gl.zeros([BK, C], gl.float32, ACC)  # S du^T
        dk_tile = gl.zeros([BK, C], gl.float32, ACC)  # dS' x^T
        dP = gl.zeros([C, C], gl.float32, ACC)
        dA = gl.zeros([C, C], gl.float32, ACC)
        S_dot_dS = gl.zeros([16, BK], gl.float32, LOAD_LAYOUT)
        for tv in gl.static_range(NV):
            # leave pending: the group of k, q and e, committed after the first value tiles, and that of the next value
            # tile
            async_copy.wait_group((1 if tv < NUM_STAGES else 0) + (1 if tv + 1 < NV else 0))
            fence_async_shared()
            barrier()
            S_t = S_s[tv % NUM_STAGES]
            dS_t = dS_s[tv % NUM_STAGES]
            x_t = x_s[tv % NUM_STAGES]
            do_t = do_s[tv % NUM_STAGES]
            S_T = S_t.permute((1, 0))
            dq_tile = warpgroup_mma(S_T, do_t.permute((1, 0)), dq_tile, is_async=True)
            dP = warpgroup_mma(do_t, x_t.permute((1, 0)), dP, is_async=True)
            du_t = du_s[tv % NUM_STAGES]
            dy_tile = warpgroup_mma(S_T, du_t.permute((1, 0)), dy_tile, is_async=True)
            dA = warpgroup_mma(du_t, x_t.permute((1, 0)), dA, is_async=True)
            dk_tile = warpgroup_mma(dS_t.permute((1, 0)), x_t.permute((1, 0)), dk_tile, is_async=True)
            for rows in gl.static_range(4):
                S_rows = S_t.slice(rows * 16, 16, dim=0).load(LOAD_LAYOUT)
                dS_rows = dS_t.slice(rows * 16, 16, dim=0).load(LOAD_LAYOUT)
                S_dot_dS += to_float32(S_rows) * to_float32(dS_rows)
            if tv + NUM_STAGES < NV:
                dq_tile, dP, dy_tile, dA, dk_tile = warpgroup_mma_wait(0, deps=[dq_tile, dP, dy_tile, dA, dk_tile])
                barrier()  # every warp has read the stage
                zero = opaque_zero(c, 25 + tv) * 64
                next_pointers = (do_at + zero, du_at + zero, x_at + zero, S_at + zero, dS_at + zero)
                copy_value_tile(buffers, next_pointers, tv + NUM_STAGES, tokens_left, column, K, V, True, STATE_STEP)
        # The buffers are dependencies, too: the compiler would treat them as free once the wgmmas are issued.
        dq_tile, dP, dy_tile, dA, dk_tile, _, _, _, _, _ = warpgroup_mma_wait(
            0, deps=[dq_tile, dP, dy_tile, dA, dk_tile, S_t, dS_t, x_t, do_t, du_t]
        )
        async_copy.wait_group(0)  # of k, q and e; wgmma does not read them
        if traits.ERASE_CHANNELS:  # e has the erase strengths: replace them by the erase keys, strengths times k
            barrier()
            e_s.store(to_16_bits(to_float32(e_s.load(ACC)) * to_float32(k_s.load(ACC)), dtype))

        g = clamp_log2_decay(g * LOG2E)
        up_to, before = sum_to_token(g)
        G_s = gl.allocate_shared_memory(gl.float32, [64, 64], SMEM_BY_TOKEN)
        G_s.store(gl.permute(up_to, (1, 0)))
        G_before_s = G_s
        if ANY_EARLY:
            G_before_s = gl.allocate_shared_memory(gl.float32, [64, 64], SMEM_BY_TOKEN)
            G_before_s.store(gl.permute(before, (1, 0)))
        state_product = gl.convert_layout(gl.sum(S_dot_dS, 0), N16_ROWS)

        dP *= scale  # before it is rounded, for the range of float16
        diagonal_s = gl.allocate_shared_memory(gl.float32, [64], SMEM_VECTOR)
        if not READ_BEFORE:
            diagonal_s.store(gl.sum(gl.where(t[:, None] == j[None, :], dP, 0.0), 1))
        P_s = allocate_pair_tiles(dtype)
        store_pairs(dP, dP, P_s)
        A_s = allocate_pair_tiles(dtype)
        if RECOVER_DU:  # dA is dv x^T so far
            gl.store(dgates_at + 2 * C + t, gl.sum(gl.where(t[:, None] == j[None, :], dA, 0.0), 1))
            store_pairs(-dA, dA * (1.0 / clamp_away_from_zero(erase, traits.MIN_BETA))[:, None], A_s)
            dy_tile *= (1.0 / clamp_away_from_zero(erase_s.load(ACC_COLUMNS), traits.MIN_BETA))[None, :]
        else:
            store_pairs(-dA * erase[:, None] if traits.ERASE else -dA, dA, A_s)
        fence_async_shared()
        barrier()
        G, G_before = load_decays(G_s, G_before_s, ANY_EARLY)
        G_read = G_before if READ_BEFORE else G
        G_erase = G_before if traits.ERASE_PREVIOUS else G
        dq_parts = split_column_blocks(dq_tile)
        dk_parts = split_column_blocks(dk_tile)
        dy_parts = split_column_blocks(dy_tile)
        dq_parts = scale_read(dq_parts, G_read, scale)
        dy_parts = scale_read(dy_parts, G_erase, 1.0)
        dk_parts = scale_write(dk_parts, G)
        state_product *= gl.exp2(last_token(G[3]))
        for block in gl.static_range(4):
            state_product += gl.sum(to_float32(load_block(k_s, block)) * dk_parts[block], 1)
        product_s = gl.allocate_shared_memory(gl.float32, [64], SMEM_VECTOR)
        product_s.store(state_product)

        # Each level is a loop of one iteration: in one basic block ptxas would delay the last sums of all levels to the
        # end, which spills. `windows` is at least 1, so `once` is 1, but the compiler cannot fold it.
        once = gl.where(windows > 0, 1, 0)
        for _ in range(0, once):
            if ANY_EARLY:  # load again: both take twice the registers of G
                G, G_before = load_decays(G_s, G_before_s, ANY_EARLY)
            dq_parts, dy_parts, dk_parts = add_level_5(
                dq_parts, dy_parts, dk_parts, G, G_before, P_s, A_s, q_s, e_s, k_s, traits.ERASE_PREVIOUS, READ_BEFORE
            )  # fmt: skip
        for half in gl.static_range(2):
            for _ in range(0, once):
                if ANY_EARLY:  # load again: both take twice the registers of G
                    G, G_before = load_decays(G_s, G_before_s, ANY_EARLY)
                dq_parts, dy_parts, dk_parts = add_level_4(
                    dq_parts, dy_parts, dk_parts, G, G_before, P_s, A_s, q_s, e_s, k_s, 2 * half, traits.ERASE_PREVIOUS,
                    READ_BEFORE,
                )  # fmt: skip
        for level in gl.static_range(4):
            for half in gl.static_range(2):
                for _ in range(0, once):
                    if ANY_EARLY:  # load again: both take twice the registers of G
                        G, G_before = load_decays(G_s, G_before_s, ANY_EARLY)
                    dq_parts, dy_parts, dk_parts = add_level(
                        dq_parts, dy_parts, dk_parts, G, G_before, P_s, A_s, q_s, e_s, k_s, 2 * half, 3 - level,
                        traits.ERASE_KEY, traits.ERASE_PREVIOUS, READ_BEFORE,
                    )  # fmt: skip

        dq_tile = join_blocks(dq_parts)
        dk_tile = join_blocks(dk_parts)
        q_tile = to_float32(q_s.permute((1, 0)).load(ACC))
        k_tile = to_float32(k_s.permute((1, 0)).load(ACC))
        q_dq = q_tile * dq_tile
        late_terms = -k_tile * dk_tile
        if not READ_BEFORE:
            late_terms += q_dq
        dy_tile = join_blocks(dy_parts)
        erase_j = erase_s.load(ACC_COLUMNS)
        e_tile = to_float32(e_s.permute((1, 0)).load(ACC)) if traits.ERASE_KEY else k_tile
        e_de = e_tile * dy_tile
        if traits.ERASE:
            e_de *= erase_j[None, :]
        if not traits.ERASE_PREVIOUS:
            late_terms -= e_de
        if traits.ERASE_CHANNELS:  # load the strengths again, for dk
            barrier()
            copy_tile_async(e_s, e_at, 0, tokens_left, K - column, True, MASK_K)
            async_copy.commit_group()
        terms_s = gl.allocate_shared_memory(gl.float32, [64, 64], SMEM_BY_TOKEN)
        terms_s.store(late_terms)
        dg = sum_from_token(terms_s.permute((1, 0)).load(BY_KEY)) + product_s.load(gl.SliceLayout(0, BY_KEY))[None, :]
        if ANY_EARLY:
            early_terms = gl.zeros([BK, C], gl.float32, ACC)
            if READ_BEFORE:
                early_terms += q_dq
            if traits.ERASE_PREVIOUS:
                early_terms -= e_de
            early_s = gl.allocate_shared_memory(gl.float32, [64, 64], SMEM_BY_TOKEN)
            early_s.store(early_terms)
            early_terms = early_s.permute((1, 0)).load(BY_KEY)
            dg += sum_from_token(early_terms) - early_terms
        if not traits.HAS_STATE:  # the first decay of a sequence scales nothing
            dg = gl.where((c * C + i > 0)[:, None], dg, 0.0)
        # compared again: the results of the first comparisons would take registers until here
        in_channel = (i % 32 < tokens_left + opaque_zero(c, 25) - i // 32 * 32)[:, None] & in_keys
        gl.store(gmem.dlog_decay + first_channel + at_token, dg, mask=in_channel)
        if not READ_BEFORE:
            diagonal = diagonal_s.load(ACC_COLUMNS)[None, :]
            dq_tile += diagonal * k_tile
            dk_tile += diagonal * q_tile

        if GROUP > 1:
            partial_size = num_scratch_slots.to(gl.int64) * C * HV * K
            dq_at = gmem.partial + (scratch_slot.to(gl.int64) * C * HV + hv) * K + column
            dk_at = dq_at + partial_size
            de_at = dk_at + partial_size
        else:
            dq_at = gmem.dq + key
            dk_at = gmem.dk + key
            de_at = gmem.de + key if traits.ERASE_KEY else dk_at
        store_transposed(dq_at, dq_tile, HV * K, tokens_left, K - column, MASK_K)
        if traits.ERASE:
            dy_tile *= -clamp_away_from_zero(erase_j, traits.MIN_BETA)[None, :]
            gl.store(dgates_at + C + j, gl.sum(e_tile * dy_tile, 0))
        else:
            dy_tile = -dy_tile
        if traits.ERASE_CHANNELS:
            async_copy.wait_group(0)
            barrier()
            dk_tile += to_float32(e_s.permute((1, 0)).load(ACC)) * dy_tile
            dy_tile *= to_float32(k_s.permute((1, 0)).load(ACC))
        if traits.ERASE_KEY:
            store_transposed(de_at, dy_tile, HV * K, tokens_left, K - column, MASK_K)
        else:
            dk_tile += dy_tile
        store_transposed(dk_at, dk_tile, HV * K, tokens_left, K - column, MASK_K)
        if traits.WRITE and not RECOVER_DU:
            store_write_sums(dgates_at, gmem.v, value, gmem.du, local_value, tile, tokens_left, HV, V, NK)
