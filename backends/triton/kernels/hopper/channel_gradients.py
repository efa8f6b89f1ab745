"""Gradients of the operands of a chunk with a decay per channel on sm_90, from states and dstates of the reverse scan.

It computes the equations of ../channel/gradients.py. With S the state before the chunk, dS' the gradient of the state
after it, x and du [64, V], and y = b e:

    dP = scale tril(do x^T, -1),   dA = tril(du x^T, -1)
    dq = scale 2^G'' do S^T + sum_l f_l (dP_l k_l),   -dy = 2^G' du S^T + sum_l f_l (dA_l k_l)
    dk = 2^(Gend - G) x dS'^T + sum_l f_l (dP_l^T q_l - dA_l^T y_l)

At level l of decay_levels.py dP_l and dA_l are the pairs (i, j) of tokens with i in the upper and j in the lower half
of a block, f_l the factor of each token and channel relative to the boundary between the halves, and k_l, q_l, y_l the
rows scaled by it. As a token is either in an upper or in a lower half, one product of the symmetric pairs,

    z = (dP_l + dP_l^T) [q_l in upper halves, k_l in lower halves]

has the rows of dq in upper halves and those of dk in lower halves; likewise dA_l + (b dA_l)^T with e_l and k_l. The
exponents of the factors are products of masks of zeros and ones with the log2 decays in two float16 terms, which have
22 bits together.

Grid: one CTA of 4 warps for each (chunk, value head, tile of 64 keys); it loops over tiles of 64 values, two stages of
which are in shared memory, as in gradients.py. Scaled rows have two buffers, which the levels alternate between, so
that one barrier per level suffices.

Supported: operands and scratch of one 16-bit dtype, chunks of 64, V <= 512.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.kernels.hopper.common import (
    A_OPERAND,
    ACC,
    ACC_COLUMNS,
    ACC_ROWS,
    SMEM_TILE,
    allocate_tiles,
    barrier,
    copy_pointers,
    copy_tile_async,
    find_sequence,
    store_accumulator,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.kernels.hopper.ptx import exp2_ftz
from deltazoo.backends.triton.kernels.hopper.token_masks import OPERANDS, mask_asm
from deltazoo.backends.triton.kernels.hopper.value_tiles import LOAD_LAYOUT, copy_value_tile, store_write_sums
from deltazoo.backends.triton.kernels.layout import (
    LOG2E,
    clamp_away_from_zero,
    clamp_log2_decay,
    locate_scratch_chunk_in_sequence,
    opaque_zero,
    scratch_slots_per_sequence,
)

# log decays and their gradients [64 tokens, 64 keys]: a thread holds 32 tokens of one key, a warp 32 keys of a token
BY_KEY = gl.constexpr(gl.BlockedLayout([32, 1], [1, 32], [2, 2], [1, 0]))
# Sums over the 32 tokens of a thread, from the last on. A reverse associative_scan takes 10 shuffles per element.
REVERSE_CUMSUM = gl.constexpr(
    "mov.b32 $31, $63;\n" + "\n".join(f"add.f32 ${30 - n}, ${31 - n}, ${62 - n};" for n in range(31))
)
REVERSE_CUMSUM_OPERANDS = gl.constexpr(",".join(["=&r"] * 32 + ["r"] * 32))
# predicated sums, where a select beside each fused multiply-add would cost an instruction and a register more
ADD_HALVES = gl.constexpr(
    "{\n.reg .pred upper;\nsetp.ne.s32 upper, $2, 0;\nmov.b32 $0, $5;\nmov.b32 $1, $6;\n"
    "@upper fma.rn.f32 $0, $3, $4, $0;\n@!upper fma.rn.f32 $1, $3, $4, $1;\n}"
)
SUBTRACT_LOWER_HALF = gl.constexpr(
    "{\n.reg .pred upper;\n.reg .f32 minus;\nsetp.ne.s32 upper, $2, 0;\nmov.b32 $0, $5;\nmov.b32 $1, $6;\n"
    "neg.f32 minus, $4;\n@upper fma.rn.f32 $0, $3, $4, $0;\n@!upper fma.rn.f32 $1, $3, minus, $1;\n}"
)


@gluon.jit
def keep_tokens(x, KIND: gl.constexpr, LEVEL: gl.constexpr):
    """Zero what a mask of token_masks.py does not keep of x [64, 64], of 16 bits in the layout ACC."""
    asm: gl.constexpr = mask_asm(KIND, LEVEL)
    return gl.inline_asm_elementwise(asm, OPERANDS, [x], x.dtype, is_pure=True, pack=32)


@gluon.jit
def sum_decays_async(g_hi, g_lo, KIND: gl.constexpr, LEVEL: gl.constexpr):
    """Issue the wgmma of the log2 decays that a mask (token_masks.py) keeps for each token, [64, keys].

    g_hi, g_lo: the terms of the log2 decays [keys, 64].

    Returns: the sums, under way; their A operand, which the caller passes to warpgroup_mma_wait.
    """
    ones = gl.full([64, 64], 1.0, gl.float16, ACC)
    mask = gl.convert_layout(keep_tokens(ones, KIND, LEVEL), A_OPERAND, assert_trivial=True)
    sums = gl.zeros([64, 64], gl.float32, ACC)
    sums = warpgroup_mma(mask, g_lo.permute((1, 0)), sums, use_acc=False, is_async=True)
    return warpgroup_mma(mask, g_hi.permute((1, 0)), sums, is_async=True), mask


@gluon.jit
def decays(g_hi, g_lo, KIND: gl.constexpr, LEVEL: gl.constexpr):
    """Return 2^ of the sums of the log2 decays that a mask keeps."""
    sums, mask = sum_decays_async(g_hi, g_lo, KIND, LEVEL)
    sums, _ = warpgroup_mma_wait(0, deps=[sums, mask])
    return exp2_ftz(sums)


@gluon.jit
def store_symmetric(x, y, tile, dtype: gl.constexpr):
    """Store the strictly lower part of x [64, 64] and the transpose of that of y, rounded, to a tile."""
    lower = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
    lower.store(keep_tokens(to_16_bits(y, dtype), "before", 0))
    tile.store(keep_tokens(to_16_bits(x, dtype), "before", 0) + lower.permute((1, 0)).load(ACC))


@gluon.jit
def sum_from_token(x):
    """Return for each token the sum of x [64, 64] over the tokens from it on, in the layout BY_KEY."""
    x = gl.inline_asm_elementwise(REVERSE_CUMSUM, REVERSE_CUMSUM_OPERANDS, [x], gl.float32, is_pure=True, pack=32)
    i = gl.arange(0, 64, gl.SliceLayout(1, BY_KEY))[:, None]
    second_half = gl.sum(gl.where(i == 32, x, 0.0), 0)
    return gl.where(i < 32, x + second_half[None, :], x)


@gluon.jit
def multiply_pairs(pairs, rows, LEVEL: gl.constexpr):
    """Multiply the pairs of a level, of a symmetric tile, with scaled rows in shared memory."""
    a_pairs = gl.convert_layout(keep_tokens(pairs.load(ACC), "pairs", LEVEL), A_OPERAND, assert_trivial=True)
    z = gl.zeros([64, 64], gl.float32, ACC)
    z = warpgroup_mma(a_pairs, rows, z, use_acc=False, is_async=True)
    z, _, _ = warpgroup_mma_wait(0, deps=[z, a_pairs, rows])
    return z


@gluon.jit
def add_halves(x, y, upper, factors, z, ASM: gl.constexpr):
    """Return x + factors z in the rows of upper halves, and y + factors z or y - factors z in those of lower halves."""
    operands = [gl.where(upper, 1, 0), factors, z, x, y]
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r,r,r,r,r,r", operands, (gl.float32, gl.float32), is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def add_level(
    dq_tile, dy_tile, dk_tile, dP_s, dA_s, g_hi, g_lo, q_s, e_s, k_s, read_s, erase_s,
    LEVEL: gl.constexpr, DELTA: gl.constexpr, ERASE_KEY: gl.constexpr, ERASE_EARLY: gl.constexpr,
    READ_EARLY: gl.constexpr,
):  # fmt: skip
    """Add the pairs of a level to dq, -dy and dk. read_s, erase_s: buffers for the scaled rows."""
    READ: gl.constexpr = "early" if READ_EARLY else "late"
    ERASED: gl.constexpr = "early" if ERASE_EARLY else "late"
    dtype: gl.constexpr = read_s.dtype
    upper = (((gl.arange(0, 64, ACC_ROWS) >> LEVEL) & 1) != 0)[:, None]
    factors = decays(g_hi, g_lo, READ, LEVEL)
    rows = to_float32(gl.where(upper, q_s.load(ACC), k_s.load(ACC)))
    read_s.store(to_16_bits(rows * factors, dtype))
    if DELTA:
        erase_factors = factors if READ_EARLY == ERASE_EARLY else decays(g_hi, g_lo, ERASED, LEVEL)
        rows = gl.where(upper, e_s.load(ACC), k_s.load(ACC)) if ERASE_KEY else k_s.load(ACC)
        erase_s.store(to_16_bits(to_float32(rows) * erase_factors, dtype))
    fence_async_shared()
    barrier()
    dq_tile, dk_tile = add_halves(dq_tile, dk_tile, upper, factors, multiply_pairs(dP_s, read_s, LEVEL), ADD_HALVES)
    if DELTA:
        z = multiply_pairs(dA_s, erase_s, LEVEL)
        dy_tile, dk_tile = add_halves(dy_tile, dk_tile, upper, erase_factors, z, SUBTRACT_LOWER_HALF)
    return dq_tile, dy_tile, dk_tile


@gluon.jit(do_not_specialize=["N", "slots", "num_scratch_slots", "T", "window", "windows"])
def hopper_channel_gradients_kernel(
    q, k, e, v, log_decay, b, w, do, states, dstates, xs, du, dq, dk, de, dlog_decay, dgates, partial, cu, N,
    slots, num_scratch_slots, scale, T, window, windows,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr,
    DELTA: gl.constexpr, ERASE_KEY: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr, STORED_DU: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr, HAS_STATE: gl.constexpr, PACKED: gl.constexpr,
    MIN_BETA: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Parameters and results as in ../channel/gradients.py."""
    gl.static_assert(C == 64 and BK == 64 and V <= 512)
    gl.static_assert(states.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    NK: gl.constexpr = (K + BK - 1) // BK
    NV: gl.constexpr = (V + 63) // 64
    NUM_STAGES: gl.constexpr = min(NV, 2)
    GROUP: gl.constexpr = HV // H
    MASK_K: gl.constexpr = K % 64 != 0
    dtype: gl.constexpr = states.dtype.element_ty
    pid = gl.program_id(0)
    tile = pid % NK
    hv = pid // NK % HV
    h = hv // GROUP
    scratch_slot = pid // NK // HV
    if PACKED:
        n = find_sequence(scratch_slot, cu, N, windows, gl.where(windows == 1, 0, UNIT), C)
    else:
        n = scratch_slot // scratch_slots_per_sequence(T, windows, C, UNIT)
    start, length, slot, c, in_use = locate_scratch_chunk_in_sequence(
        scratch_slot, n, cu, T, window, windows, C, UNIT, PACKED
    )
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
        du_s = allocate_tiles(dtype, NUM_STAGES) if DELTA else do_s
        q_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        k_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        e_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE) if ERASE_KEY else k_s
        do_at = copy_pointers(do + value, HV * V)
        if DELTA:
            du_at = copy_pointers(du + (local_value if STORED_DU else value), HV * V)
            x_at = copy_pointers(xs + local_value, HV * V)
        else:
            du_at = do_at
            x_at = copy_pointers(v + value, HV * V)
        S_at = copy_pointers(states + scratch_row * V * K + column, K)
        dS_at = copy_pointers(dstates + scratch_row * V * K + column, K)
        buffers = (do_s, du_s, x_s, S_s, dS_s)
        pointers = (do_at, du_at, x_at, S_at, dS_at)
        for tv in gl.static_range(NUM_STAGES):
            copy_value_tile(buffers, pointers, tv, tokens_left, column, K, V, DELTA)
        copy_tile_async(k_s, copy_pointers(k + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        copy_tile_async(q_s, copy_pointers(q + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        if ERASE_KEY:
            copy_tile_async(e_s, copy_pointers(e + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        async_copy.commit_group()

        i = gl.arange(0, C, gl.SliceLayout(1, BY_KEY))
        ks = gl.arange(0, BK, gl.SliceLayout(0, BY_KEY))
        # split so that the addresses of one thread differ by constants
        first_channel = (token * HV + hv) * K + column + ((i // 32 * (32 * HV * K))[:, None] + ks[None, :])
        at_token = (i % 32 * (HV * K))[:, None]
        in_channel = (i < tokens_left)[:, None]
        if MASK_K:
            in_channel = in_channel & (ks < K - column)[None, :]
        g = gl.load(log_decay + first_channel + at_token, mask=in_channel, other=0.0)

        t = gl.arange(0, C, ACC_ROWS)
        j = gl.arange(0, C, ACC_COLUMNS)
        in_sequence = t < tokens_left
        if ERASE:
            erase = gl.load(b + (token + t) * HV + hv, mask=in_sequence, other=0.0).to(gl.float32)
        if WRITE and not DELTA:
            write = gl.load(w + (token + t) * HV + hv, mask=in_sequence, other=0.0).to(gl.float32)
            write_j = gl.load(w + (token + j) * HV + hv, mask=j < tokens_left, other=0.0).to(gl.float32)

        dq_tile = gl.zeros([C, BK], gl.float32, ACC)  # do S^T
        dy_tile = gl.zeros([C, BK], gl.float32, ACC)  # du S^T
        dk_tile = gl.zeros([C, BK], gl.float32, ACC)  # x dS'^T
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
            dq_tile = warpgroup_mma(do_t, S_t, dq_tile, is_async=True)
            dP = warpgroup_mma(do_t, x_t.permute((1, 0)), dP, is_async=True)
            if DELTA:
                du_t = du_s[tv % NUM_STAGES]
                dy_tile = warpgroup_mma(du_t, S_t, dy_tile, is_async=True)
                dA = warpgroup_mma(du_t, x_t.permute((1, 0)), dA, is_async=True)
            dk_tile = warpgroup_mma(x_t, dS_t, dk_tile, is_async=True)
            for rows in gl.static_range(4):
                S_rows = S_t.slice(rows * 16, 16, dim=0).load(LOAD_LAYOUT)
                dS_rows = dS_t.slice(rows * 16, 16, dim=0).load(LOAD_LAYOUT)
                S_dot_dS += to_float32(S_rows) * to_float32(dS_rows)
            if tv + NUM_STAGES < NV:
                dq_tile, dP, dy_tile, dA, dk_tile = warpgroup_mma_wait(0, deps=[dq_tile, dP, dy_tile, dA, dk_tile])
                barrier()  # every warp has read the stage
                zero = opaque_zero(c, 25 + tv) * 64
                next_pointers = (do_at + zero, du_at + zero, x_at + zero, S_at + zero, dS_at + zero)
                copy_value_tile(buffers, next_pointers, tv + NUM_STAGES, tokens_left, column, K, V, DELTA)
        # The buffers are dependencies too: the compiler would treat them as free from the issue of the wgmmas on.
        if DELTA:
            dq_tile, dP, dy_tile, dA, dk_tile, _, _, _, _, _ = warpgroup_mma_wait(
                0, deps=[dq_tile, dP, dy_tile, dA, dk_tile, S_t, dS_t, x_t, do_t, du_t]
            )
        else:
            dq_tile, dP, dk_tile, _, _, _, _ = warpgroup_mma_wait(0, deps=[dq_tile, dP, dk_tile, S_t, dS_t, x_t, do_t])
        async_copy.wait_group(0)  # of k, q and e; wgmma does not read them

        g = clamp_log2_decay(g * LOG2E)
        g_hi = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
        g_lo = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
        hi = g.to(gl.float16)
        g_hi.store(gl.permute(hi, (1, 0)))  # a thread holds adjacent tokens of a key
        g_lo.store(gl.permute((g - hi.to(gl.float32)).to(gl.float16), (1, 0)))
        state_product = gl.sum(S_dot_dS, 0)
        state_product = exp2_ftz(gl.sum(g, 0)) * gl.convert_layout(state_product, gl.SliceLayout(0, BY_KEY))

        dP *= scale  # before it is rounded, for the range of float16
        if WRITE and not DELTA:
            dP *= write_j[None, :]
        if not READ_EARLY:
            read_diagonal = gl.sum(gl.where(t[:, None] == j[None, :], dP, 0.0), 1)
        dP_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        store_symmetric(dP, dP, dP_s, dtype)
        dA_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE) if DELTA else dP_s
        if DELTA:
            store_symmetric(dA, dA * erase[:, None] if ERASE else dA, dA_s, dtype)
        fence_async_shared()
        barrier()
        from_start = decays(g_hi, g_lo, "before" if READ_EARLY else "upto", 0)
        dq_tile *= from_start * scale
        if DELTA:
            if READ_EARLY != ERASE_EARLY:
                from_start = decays(g_hi, g_lo, "before" if ERASE_EARLY else "upto", 0)
            dy_tile *= from_start
        to_end = decays(g_hi, g_lo, "after", 0)
        if WRITE and not DELTA:
            to_end *= write[:, None]
        dk_tile *= to_end
        key_product = gl.sum(to_float32(k_s.load(ACC)) * dk_tile, 0)
        state_product += gl.convert_layout(key_product, gl.SliceLayout(0, BY_KEY))

        read_s = allocate_tiles(dtype, 2)  # rows of q in upper halves and of k in lower halves, scaled
        erase_s = allocate_tiles(dtype, 2) if DELTA else read_s  # the same with e
        # Each level is a loop of one iteration: in one basic block ptxas would delay the last sums of all levels to the
        # end, which spills.
        once = gl.where(windows > 0, 1, 0)
        for level in gl.static_range(6):
            for _ in range(0, once):
                dq_tile, dy_tile, dk_tile = add_level(
                    dq_tile, dy_tile, dk_tile, dP_s, dA_s, g_hi, g_lo, q_s, e_s, k_s,
                    read_s[level % 2], erase_s[level % 2], level, DELTA, ERASE_KEY, ERASE_EARLY, READ_EARLY,
                )  # fmt: skip

        q_tile = to_float32(q_s.load(ACC))
        k_tile = to_float32(k_s.load(ACC))
        q_dq = q_tile * dq_tile
        late_terms = -k_tile * dk_tile
        if not READ_EARLY:
            late_terms += q_dq
        if DELTA:
            e_tile = to_float32(e_s.load(ACC)) if ERASE_KEY else k_tile
            e_de = e_tile * dy_tile
            if ERASE:
                e_de *= erase[:, None]
            if not ERASE_EARLY:
                late_terms -= e_de
        dg = sum_from_token(gl.convert_layout(late_terms, BY_KEY)) + state_product[None, :]
        if READ_EARLY or (DELTA and ERASE_EARLY):
            early_terms = gl.zeros([C, BK], gl.float32, ACC)
            if READ_EARLY:
                early_terms += q_dq
            if DELTA and ERASE_EARLY:
                early_terms -= e_de
            early_terms = gl.convert_layout(early_terms, BY_KEY)
            dg += sum_from_token(early_terms) - early_terms
        if not HAS_STATE:  # the first decay of a sequence scales nothing
            dg = gl.where((c * C + i > 0)[:, None], dg, 0.0)
        gl.store(dlog_decay + first_channel + at_token, dg, mask=in_channel)
        if not READ_EARLY:
            dq_tile += read_diagonal[:, None] * k_tile
            dk_tile += read_diagonal[:, None] * q_tile

        gate_row = tile.to(gl.int64) * slots * HV + slot.to(gl.int64) * HV + hv
        dgates_at = dgates + gate_row * 3 * C
        if GROUP > 1:
            partial_size = num_scratch_slots.to(gl.int64) * C * HV * K
            dq_at = partial + (scratch_slot.to(gl.int64) * C * HV + hv) * K + column
            dk_at = dq_at + partial_size
            de_at = dk_at + partial_size
        else:
            dq_at = dq + key
            dk_at = dk + key
            de_at = de + key if ERASE_KEY else dk_at
        store_accumulator(dq_at, dq_tile, HV * K, tokens_left, K - column, MASK_K)
        if DELTA:
            if ERASE:
                dy_tile *= -clamp_away_from_zero(erase, MIN_BETA)[:, None]
                gl.store(dgates_at + C + t, gl.sum(e_tile * dy_tile, 1))
            else:
                dy_tile = -dy_tile
            if ERASE_KEY:
                store_accumulator(de_at, dy_tile, HV * K, tokens_left, K - column, MASK_K)
            else:
                dk_tile += dy_tile
        store_accumulator(dk_at, dk_tile, HV * K, tokens_left, K - column, MASK_K)
        if WRITE:
            store_write_sums(dgates_at, v, value, du, local_value, tile, tokens_left, HV, V, NK)
