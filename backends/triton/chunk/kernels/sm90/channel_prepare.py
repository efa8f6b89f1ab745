"""Preparation on sm_90 for a decay per channel: scaled operands, chunk decays, WY tiles (portable/channel/prepare.py).

Grid: one CTA of 4 warps for each (chunk slot, value head); warp w has tokens 16 w to 16 w + 15. A loop over tiles of 32
channels, from log2 decays and scaled float16 operands,

    computes factors within each warp's tokens and the products of levels 8, 4, 2 and 1, in registers (decay_levels.py);
    exchanges the decays over each warp's tokens through shared memory: with the factors up to and after a token in its
        warp, 2^G and 2^(Gend - G);
    stores Q, k_decayed and E, and in shared memory the operands of levels 32 and 16, whose tokens are in different
    warps.

Then wgmma computes the products of these two levels, for tokens i in the rows and j in the columns:

    level 32   warps 2 and 3, columns 0 to 31
    level 16   warp 1, columns 0 to 15, and warp 3, columns 32 to 47

All factors 2^(sum) are at most 1, at any decay. Rows of bfloat16 operands are scaled by powers of two to fit float16.

Within the 16 rows of a warp, tiles and products have the order of the registers (decay_levels.py), up to the WY tiles,
which have that of the tokens.

Supported: 16-bit operands, chunks of 64, K <= 256, K a multiple of 8.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.chunk.kernels.sm90.channel_levels import join_columns
from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    ACC,
    ACC_N16,
    SMEM_TILE,
    SMEM_VECTOR,
    barrier,
    find_sequence,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.decay_levels import TILE, choose_by_warp, level_products, split_blocks
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import async_load, reinterpret
from deltazoo.backends.triton.chunk.kernels.sm90.ptx import exp2_ftz
from deltazoo.backends.triton.chunk.kernels.sm90.wy_tiles import (
    allocate_inverse_buffers,
    invert_and_store,
    split_column_blocks,
    store_p_alone,
)
from deltazoo.backends.triton.device.layout import LOG2E, MIN_LOG2_DECAY, first_chunk_slot, sequence_bounds

# of a tile [4 warps, 16 rows, 32 channels]: rows [4, 16], warps and channels [4, 32], channels [32], warps [4]
TOKENS = gl.constexpr(gl.SliceLayout(2, TILE.value))
WARP_CHANNELS = gl.constexpr(gl.SliceLayout(1, TILE.value))
CHANNELS = gl.constexpr(gl.SliceLayout(0, WARP_CHANNELS.value))
# a channel per lane; and up to four such vectors, a lane with eight channels as in WARP_CHANNELS
LANE_CHANNELS = gl.constexpr(
    gl.DistributedLinearLayout([], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[1, 0], [2, 0]], [], [4, 32])
)
FOUR_VECTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]],
        [[0, 8, 0, 0], [0, 16, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], [[1, 0, 0, 0], [2, 0, 0, 0]], [],
        [4, 32, 2, 2],
    )
)  # fmt: skip
WARPS = gl.constexpr(gl.SliceLayout(1, LANE_CHANNELS.value))
TOKENS_IN_WARP = gl.constexpr(gl.SliceLayout(0, TOKENS.value))
# TILE with the channels of each thread apart, [4, 16, 4, 8], and sums over these
THREAD_CHANNELS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 8, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]], [[1, 0, 0, 0], [2, 0, 0, 0]], [],
        [4, 16, 4, 8],
    )
)  # fmt: skip
THREAD_SUMS = gl.constexpr(gl.SliceLayout(3, THREAD_CHANNELS.value))
ACC_N32 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
N16_ROWS = gl.constexpr(gl.SliceLayout(1, ACC_N16.value))
N16_COLUMNS = gl.constexpr(gl.SliceLayout(0, ACC_N16.value))
SMEM_N32 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
# on pairs of bfloat16
LARGER_MAGNITUDE = gl.constexpr("max.xorsign.abs.bf16x2 $0, $1, $2;")  # of any sign
MULTIPLY_PAIRS = gl.constexpr("mul.bf16x2 $0, $1, $2;")
SMEM_DECAYS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def load_tile(tiles, tile):
    """Load one tile [64, 32] of the operands as [4, 16, 32]."""
    return tiles.index(tile).reshape([4, 16, 32]).load(TILE)


@gluon.jit
def store_tile(tiles, tile, x):
    """Store one tile [4, 16, 32], rounded to float16, as an operand [64, 32] of wgmma."""
    tiles.index(tile).reshape([4, 16, 32]).store(to_16_bits(x, gl.float16))


@gluon.jit
def row_scales(tiles, NT: gl.constexpr, SCALED: gl.constexpr):
    """Return two powers of two per row [4, 16]: the first, of the dtype, makes it fit float16, the second undoes it."""
    dtype: gl.constexpr = tiles.dtype
    up = gl.full([4, 16], 1.0, gl.float32, TOKENS)
    down = up.to(dtype)
    if SCALED:
        largest = gl.zeros([4, 16, 32], dtype, TILE)
        for tile in range(NT):
            x = load_tile(tiles, tile)
            largest = gl.inline_asm_elementwise(LARGER_MAGNITUDE, "=r,r,r", [x, largest], x.dtype, is_pure=True, pack=2)
        exponent = gl.max(gl.abs(to_float32(largest)), 2).to(gl.int32, bitcast=True) & 0x7F800000
        exponent = gl.minimum(gl.maximum(exponent, 0x00800000), 0x7E800000)
        down = (0x7F000000 - exponent).to(gl.float32, bitcast=True).to(dtype)
        up = exponent.to(gl.float32, bitcast=True)
    return down, up


@gluon.jit
def scale_rows(x, scales, SCALED: gl.constexpr):
    """Multiply the rows of x [4, 16, 32], of 16 bits, by powers of two [4, 16] of its dtype, unless these are 1."""
    if SCALED:
        x = gl.inline_asm_elementwise(MULTIPLY_PAIRS, "=r,r,r", [x, scales[:, :, None]], x.dtype, is_pure=True, pack=2)
    return x


@gluon.jit
def store_half_of_rows(decays_s, x):
    """Store x, equal in all rows of a warp, to decays_s [32, 32]; row 8 w holds that of warp w."""
    rows = gl.permute(gl.reshape(x, [4, 2, 8, 32]), [0, 2, 3, 1])
    first, _ = gl.split(rows)
    decays_s.reshape([4, 8, 32]).store(first)


@gluon.jit
def load_decays(decays_s, W: gl.constexpr):
    """Load the decays of warp W, for all warps: [1, 32]."""
    return decays_s.slice(8 * W, 1).load(LANE_CHANNELS)


@gluon.jit
def to_all_rows(x, y, z, u):
    """Convert factors [4, 32] to the layout in which tiles are multiplied by them, in one exchange within each warp."""
    x_and_y, z_and_u = gl.split(gl.convert_layout(gl.join(gl.join(x, y), gl.join(z, u)), FOUR_VECTORS))
    x, y = gl.split(x_and_y)
    z, u = gl.split(z_and_u)
    return (
        gl.convert_layout(x, WARP_CHANNELS, assert_trivial=True),
        gl.convert_layout(y, WARP_CHANNELS, assert_trivial=True),
        gl.convert_layout(z, WARP_CHANNELS, assert_trivial=True),
        gl.convert_layout(u, WARP_CHANNELS, assert_trivial=True),
    )


@gluon.jit
def products_across_warps(x32, x16, y32, y16, NT: gl.constexpr):
    """Issue x y^T of levels 32 and 16: [64, 32] and [64, 64], of which the column blocks 0 and 2 are used."""
    level_32 = gl.zeros([64, 32], gl.float32, ACC_N32)
    level_16 = gl.zeros([64, 64], gl.float32, ACC)
    for tile in gl.static_range(NT):
        y = y32.index(tile).slice(0, 32).permute((1, 0))
        level_32 = warpgroup_mma(x32.index(tile), y, level_32, is_async=True)
        level_16 = warpgroup_mma(x16.index(tile), y16.index(tile).permute((1, 0)), level_16, is_async=True)
    return level_32, level_16


@gluon.jit
def order_tokens(x0, x1, x2, x3):
    """Join column blocks [64, 16], rows and columns from the order of the registers to that of the tokens."""
    x = join_columns(join_columns(x0, x1), join_columns(x2, x3))
    x = gl.permute(gl.reshape(x, [4, 2, 8, 4, 2, 8]), [0, 2, 1, 3, 5, 4])
    return gl.reshape(x, [64, 64])


@gluon.jit
def scaled_products(block, level_32, level_16, row_scales, scale, column_scales, dtype: gl.constexpr):
    """Return scaled products [64, 64] in the order of the tokens, right in the blocks on and left of the diagonal."""
    t = gl.arange(0, 64, N16_ROWS)[:, None]
    low, high = gl.split(gl.permute(gl.reshape(level_32, [64, 2, 16]), [0, 2, 1]))
    low = gl.convert_layout(low, ACC_N16, assert_trivial=True)
    high = gl.convert_layout(high, ACC_N16, assert_trivial=True)
    first_16, _, last_16, _ = split_column_blocks(level_16)
    x0 = gl.where(t < 16, block, gl.where(t < 32, first_16, low))
    x1 = gl.where(t < 32, block, high)
    x2 = gl.where(t < 48, block, last_16)
    rows = (row_scales.load(N16_ROWS) * scale)[:, None]
    x0 = x0 * rows * column_scales.slice(0, 16).load(N16_COLUMNS)[None, :]
    x1 = x1 * rows * column_scales.slice(16, 16).load(N16_COLUMNS)[None, :]
    x2 = x2 * rows * column_scales.slice(32, 16).load(N16_COLUMNS)[None, :]
    x3 = block * rows * column_scales.slice(48, 16).load(N16_COLUMNS)[None, :]
    return order_tokens(to_16_bits(x0, dtype), to_16_bits(x1, dtype), to_16_bits(x2, dtype), to_16_bits(x3, dtype))


@takes(
    pointers="q k e log_decay b w gates decay_bounds wy_tiles scaled cu",
    traits="H HV K C DELTA ERASE_KEY ERASE_CHANNELS ERASE WRITE ERASE_PREVIOUS READ_BEFORE PACKED",
)
@gluon.jit(do_not_specialize=["N", "T"])
def sm90_channel_prepare_kernel(gmem, N, T, scale, traits: gl.constexpr):
    """Parameters and results as in portable/channel/prepare.py. Launch with 4 warps."""
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    C: gl.constexpr = traits.C
    DELTA: gl.constexpr = traits.DELTA
    PACKED: gl.constexpr = traits.PACKED
    gl.static_assert(C == 64 and K <= 256 and K % 8 == 0)
    dtype: gl.constexpr = gmem.q.dtype.element_ty
    SCALED: gl.constexpr = dtype != gl.float16
    NT: gl.constexpr = (K + 31) // 32
    OWN: gl.constexpr = DELTA and traits.ERASE_KEY
    GATES_BEFORE: gl.constexpr = DELTA and traits.ERASE_PREVIOUS
    pid = gl.program_id(0)
    slot = pid // HV
    hv = pid % HV
    h = hv // (HV // H)
    n = find_sequence(slot, gmem.cu, N, 1, 0, C) if PACKED else slot // gl.cdiv(T, C)
    start, length = sequence_bounds(n, gmem.cu, T, PACKED)
    t0 = (slot - first_chunk_slot(n, gmem.cu, T, C, PACKED)) * C
    if t0 < length:
        token = start + t0
        k_s = gl.allocate_shared_memory(dtype, [NT, 64, 32], SMEM_N32)
        q_s = gl.allocate_shared_memory(dtype, [NT, 64, 32], SMEM_N32)
        e_s = gl.allocate_shared_memory(dtype, [NT, 64, 32], SMEM_N32) if OWN else k_s
        warp = gl.arange(0, 4, gl.SliceLayout(1, TOKENS))
        m = gl.arange(0, 16, TOKENS_IN_WARP)  # rows g and g + 8 are tokens 2 g and 2 g + 1
        row = warp[:, None] * 16 + (m % 8 * 2 + m // 8)[None, :]
        channel = gl.arange(0, 32, CHANNELS)[None, None, :]
        in_time = row < length - t0
        # added apart, so that the addresses of a thread's two rows differ by a constant
        even = (warp[:, None] * 16 + (m % 8 * 2)[None, :])[:, :, None]
        odd = (m // 8)[None, :, None]
        key = (token * H + h) * K
        value_head = (token * HV + hv) * K
        for tile in gl.static_range(NT):
            mask = in_time[:, :, None] & (tile * 32 + channel < K)
            at = even * (H * K) + (tile * 32 + channel)
            async_load(k_s.index(tile).reshape([4, 16, 32]), gmem.k + key + at + odd * (H * K), mask=mask)
            async_load(q_s.index(tile).reshape([4, 16, 32]), gmem.q + key + at + odd * (H * K), mask=mask)
            if OWN:
                async_load(e_s.index(tile).reshape([4, 16, 32]), gmem.e + key + at + odd * (H * K), mask=mask)
        async_copy.commit_group()
        gate_at = gmem.log_decay + value_head + (even * (HV * K) + channel) + odd * (HV * K)
        in_tile = in_time[:, :, None] & (channel < K)
        next_decay = gl.load(gate_at, mask=in_tile, other=0.0)
        chunk = slot.to(gl.int64) * HV + hv
        gate_row = gmem.gates + chunk * (K + C)
        gate = (token + row) * HV + hv
        erase = gl.full([4, 16], 1.0, gl.float32, TOKENS)
        if DELTA and traits.ERASE:
            erase = gl.load(gmem.b + gate, mask=in_time, other=0.0).to(gl.float32)
        if traits.WRITE:  # stored after the wait for the copies, because the store waits for the load
            write = gl.load(gmem.w + gate, mask=in_time, other=0.0)
        gl.store(gmem.decay_bounds + chunk, 0.0)
        async_copy.wait_group(0)
        if traits.WRITE:
            gl.store(gate_row + (K + row), write.to(gl.float32))
        if traits.ERASE_CHANNELS:  # the erase keys; no barrier: every thread reads elements that it copied
            for tile in gl.static_range(NT):
                e_tile = to_float32(load_tile(e_s, tile)) * to_float32(load_tile(k_s, tile))
                e_s.index(tile).reshape([4, 16, 32]).store(to_16_bits(e_tile, dtype))
        k_down, k_up = row_scales(k_s, NT, SCALED)
        q_down, q_up = row_scales(q_s, NT, SCALED)
        e_down, e_up = row_scales(e_s, NT, SCALED) if OWN else (k_down, k_up)
        e_up *= erase

        # the operands of level 32 replace those they are computed from
        k32 = reinterpret(k_s, gl.float16, [NT, 64, 32], SMEM_N32)
        if DELTA:
            q32 = reinterpret(q_s, gl.float16, [NT, 64, 32], SMEM_N32)
            e32 = reinterpret(e_s, gl.float16, [NT, 64, 32], SMEM_N32)
            k16 = gl.allocate_shared_memory(gl.float16, [NT, 64, 32], SMEM_N32)
            q16 = gl.allocate_shared_memory(gl.float16, [NT, 64, 32], SMEM_N32)
        else:  # tokens in the upper half of a level have rows of q only, the others of k only: one tile holds both
            q32 = k32
            k16 = reinterpret(q_s, gl.float16, [NT, 64, 32], SMEM_N32)
            q16 = k16
        # otherwise e = k: one tile holds the rows of e of tokens in upper halves, and those of k of the others
        APART: gl.constexpr = OWN or GATES_BEFORE
        e16 = gl.allocate_shared_memory(gl.float16, [NT, 64, 32], SMEM_N32) if APART else k16
        if GATES_BEFORE and not OWN:
            e32 = gl.allocate_shared_memory(gl.float16, [NT, 64, 32], SMEM_N32)
        # not kept in registers during the loop
        k_up_s = gl.allocate_shared_memory(gl.float32, [64], SMEM_VECTOR)
        q_up_s = gl.allocate_shared_memory(gl.float32, [64], SMEM_VECTOR)
        if DELTA:
            e_up_s = gl.allocate_shared_memory(gl.float32, [64], SMEM_VECTOR)
            e_up_s.reshape([4, 16]).store(-e_up)
        q_k_s = gl.allocate_shared_memory(gl.float32, [64], SMEM_VECTOR)
        k_up_s.reshape([4, 16]).store(k_up)
        q_up_s.reshape([4, 16]).store(q_up)
        decays_s = gl.allocate_shared_memory(gl.float32, [32, 32], SMEM_DECAYS)
        q_k = gl.zeros([4, 16, 4], gl.float32, THREAD_SUMS)
        blocks = gl.zeros([4, 16, 32], gl.float32, TILE)
        w_c = gl.arange(0, 4, WARPS)[:, None]
        is_upper_16_c = w_c & 1 == 1
        is_upper_32_c = w_c >= 2
        ones = gl.full([4, 32], 1.0, gl.float32, LANE_CHANNELS)
        tile_size = (T.to(gl.int64) if PACKED else N.to(gl.int64) * T) * HV * K
        Q_at = gmem.scaled + value_head + (even * (HV * K) + channel) + odd * (HV * K)
        k_decayed_at = Q_at + tile_size
        E_at = k_decayed_at + tile_size
        for tile in range(NT):
            a = gl.maximum(next_decay * LOG2E, MIN_LOG2_DECAY, propagate_nan=tl.PropagateNan.ALL)
            first = tile * 32
            in_tile = in_time[:, :, None] & (first + channel < K)
            k_tile = to_float32(scale_rows(load_tile(k_s, tile), k_down, SCALED))
            q_tile = to_float32(scale_rows(load_tile(q_s, tile), q_down, SCALED))
            e_tile = to_float32(scale_rows(load_tile(e_s, tile), e_down, SCALED)) if OWN else k_tile
            if not traits.READ_BEFORE:
                q_k += gl.sum(gl.reshape(q_tile * k_tile, [4, 16, 4, 8]), 3)
            k_tile, q_tile, e_tile, total, blocks = level_products(
                a, k_tile, q_tile, e_tile, blocks, DELTA, OWN, GATES_BEFORE, traits.READ_BEFORE
            )
            if DELTA:
                store_tile(k16, tile, k_tile if APART else choose_by_warp(1, e_tile, k_tile))
                store_tile(q16, tile, q_tile)
            if APART:
                store_tile(e16, tile, e_tile)
            store_half_of_rows(decays_s, exp2_ftz(total))
            barrier()
            # loaded after the products, where it would take registers that they need
            next_decay = gl.load(
                gate_at + (first + 32), mask=in_time[:, :, None] & (first + 32 + channel < K), other=0.0
            )  # fmt: skip
            decay_0 = load_decays(decays_s, 0)
            decay_1 = load_decays(decays_s, 1)
            decay_2 = load_decays(decays_s, 2)
            decay_3 = load_decays(decays_s, 3)
            decay_01 = decay_0 * decay_1
            decay_23 = decay_2 * decay_3
            # the decays of the other warp of a block of 32 tokens, and those before and after a warp in the chunk
            pair_before = gl.where(is_upper_16_c, gl.where(is_upper_32_c, decay_2, decay_0), ones)
            pair_after = gl.where(is_upper_16_c, ones, gl.where(is_upper_32_c, decay_3, decay_1))
            before = pair_before * gl.where(is_upper_32_c, decay_01, ones)
            after = pair_after * gl.where(is_upper_32_c, ones, decay_23)
            pair = gl.where(is_upper_32_c, pair_before, pair_after)
            c = gl.arange(0, 32, gl.SliceLayout(0, LANE_CHANNELS))[None, :]
            gl.store(gate_row + (first + c), decay_01 * decay_23, mask=first + c < K)

            before, after, pair, before_q = to_all_rows(before, after, pair, before * scale)
            before = before[:, None, :]
            pair = pair[:, None, :]
            if DELTA:
                store_tile(k32, tile, (k_tile if APART else choose_by_warp(2, e_tile, k_tile)) * pair)
                store_tile(q32, tile, q_tile * pair)
            else:
                store_tile(k16, tile, choose_by_warp(1, q_tile, k_tile))
                store_tile(k32, tile, choose_by_warp(2, q_tile, k_tile) * pair)
            if APART:
                store_tile(e32, tile, e_tile * pair)
            q_scale = q_up_s.reshape([4, 16]).load(TOKENS).to(dtype)
            Q = to_16_bits(q_tile * before_q[:, None, :], dtype)
            gl.store(Q_at + first, scale_rows(Q, q_scale, SCALED), mask=in_tile)
            k_scale = k_up_s.reshape([4, 16]).load(TOKENS).to(dtype)
            k_decayed = to_16_bits(k_tile * after[:, None, :], dtype)
            gl.store(k_decayed_at + first, scale_rows(k_decayed, k_scale, SCALED), mask=in_tile)
            if DELTA:
                e_scale = -e_up_s.reshape([4, 16]).load(TOKENS)[:, :, None]
                E = e_tile * before * e_scale
                gl.store(E_at + first, to_16_bits(E, dtype), mask=in_tile)
        q_k_s.reshape([4, 16]).store(gl.sum(q_k, 2))
        fence_async_shared()
        barrier()
        P_32, P_16 = products_across_warps(q32, q16, k32, k16, NT)
        if DELTA:
            A_32, A_16 = products_across_warps(e32, e16, k32, k16, NT)
        A_block, P_block = split_blocks(blocks)
        t = gl.arange(0, 64, N16_ROWS)[:, None]
        on_diagonal = t % 16 == gl.arange(0, 16, N16_COLUMNS)[None, :]
        P_block = gl.where(on_diagonal, q_k_s.load(N16_ROWS)[:, None], P_block)
        if DELTA:
            P_32, P_16, A_32, A_16 = warpgroup_mma_wait(0, deps=[P_32, P_16, A_32, A_16])
        else:
            P_32, P_16 = warpgroup_mma_wait(0, deps=[P_32, P_16])
        P_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        P_s.permute((1, 0)).store(scaled_products(P_block, P_32, P_16, q_up_s, scale, k_up_s, dtype))
        if DELTA:
            L_s = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
            L_s.store(scaled_products(A_block, A_32, A_16, e_up_s, 1.0, k_up_s, gl.float16))
            l0, l1, l2, l3 = split_column_blocks(L_s.load(ACC))
            buffers = allocate_inverse_buffers(gmem.wy_tiles.dtype.element_ty)
            invert_and_store(l0, l1, l2, l3, P_s, gmem.wy_tiles, chunk, buffers)
        else:
            barrier()
            store_p_alone(P_s, gmem.wy_tiles + chunk * (C * (C + 8)))
