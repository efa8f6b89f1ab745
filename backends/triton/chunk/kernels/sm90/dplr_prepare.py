"""Chunk-local preparation of DPLR on sm_90: scaled operands, chunk decays and two WY tiles.

It computes the equations of portable/channel/dplr_prepare.py. Grid: one CTA of 4 warps for each (chunk slot, head); it
loops over tiles of 64 keys. Rows are scaled relative to the middle of the chunk, so that one product has all pairs of
tokens.
The scaled rows are float32 in shared memory, rounded to the 11 bits of tf32, which has the range of float32.

If the decays of a chunk are not weak (portable/channel/dplr_levels.py), the results may be inf or NaN. The kernel then
marks the chunk: it stores 1 instead of 0 in gates, where other updates have the write strength of the first token. The
portable kernel is launched next and computes the marked chunks again; the gradients are divided between two kernels by
the same mark. With a loop over levels in this kernel it would run out of registers, and ptxas would serialise the
wgmmas (C7512).

Supported: 16-bit operands, chunks of 64, K of 64 and 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.chunk.kernels.sm90.common import (
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
from deltazoo.backends.triton.chunk.kernels.sm90.dplr_tiles import (
    largest,
    load_decays,
    load_log2_decays,
    middle_and_end,
    store_decay_terms,
    sum_decays,
    sums_to_middle,
)
from deltazoo.backends.triton.chunk.kernels.sm90.ptx import exp2_ftz
from deltazoo.backends.triton.chunk.kernels.sm90.wy_tiles import (
    STORE_BLOCKS,
    allocate_inverse_buffers,
    block_indices,
    invert_and_store,
    split_column_blocks,
    store_inverse_term,
)
from deltazoo.backends.triton.device.layout import WEAK, first_chunk_slot, opaque_zero, sequence_bounds

# a tf32 wgmma multiplies 8 columns of float32 operands
ACC_TF32 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 8]))
SMEM_FLOAT32 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))


@gluon.jit
def store_scaled(tile, x, factors):
    """Store rows times factors, rounded to the 11 bits of tf32, because wgmma would truncate."""
    bits = (x * factors).to(gl.int32, bitcast=True)
    tile.store(((bits + 0x1000) & -0x2000).to(gl.float32, bitcast=True))


@gluon.jit
def multiply(x, k_level, m_level, K_acc, M_acc):
    """Issue the wgmmas that add x k^T to K_acc and x m^T to M_acc, for scaled rows x, k and m."""
    K_acc = warpgroup_mma(x, k_level.permute((1, 0)), K_acc, is_async=True)
    M_acc = warpgroup_mma(x, m_level.permute((1, 0)), M_acc, is_async=True)
    return K_acc, M_acc


@gluon.jit
def add_pairs(
    products, operands, rows_s, outs, to_middle, g_hi, g_lo, G_middle, G_end, scale, stride: gl.constexpr,
    tokens_left, READ_BEFORE: gl.constexpr,
):  # fmt: skip
    """Store Q, k_decayed, E and M of a tile of keys, and add its products to A, B, P and R, valid for j < i only."""
    A, B, P, R = products
    q_s, k_s, e_s, m_s = operands
    x_level, k_level, m_level = rows_s
    Q_at, W_at, E_at, M_at = outs
    write = exp2_ftz(-to_middle)
    to_end = exp2_ftz(G_end - G_middle)[None, :]
    from_start = exp2_ftz(G_middle)[None, :]
    k = to_float32(k_s.load(ACC)) * write
    store_scaled(k_level, k, 1.0)
    store_accumulator(W_at, k * to_end, stride, tokens_left, 64, False)
    m = to_float32(m_s.load(ACC)) * write
    store_scaled(m_level, m, 1.0)
    store_accumulator(M_at, m * to_end, stride, tokens_left, 64, False)
    early = exp2_ftz(to_middle - load_decays(g_hi, g_lo, 4))
    e = to_float32(e_s.load(ACC)) * early
    store_scaled(x_level, e, 1.0)
    fence_async_shared()
    barrier()
    A, B = multiply(x_level, k_level, m_level, A, B)
    store_accumulator(E_at, e * from_start, stride, tokens_left, 64, False)
    q = to_float32(q_s.load(ACC)) * (early if READ_BEFORE else exp2_ftz(to_middle))
    A, B, _ = warpgroup_mma_wait(0, deps=[A, B, x_level])
    barrier()
    store_scaled(x_level, q, 1.0)
    fence_async_shared()
    barrier()
    P, R = multiply(x_level, k_level, m_level, P, R)
    store_accumulator(Q_at, q * (from_start * scale), stride, tokens_left, 64, False)
    P, R, _, _, _ = warpgroup_mma_wait(0, deps=[P, R, x_level, k_level, m_level])
    return A, B, P, R


@takes(
    pointers="q k e v_key log_decay gates decay_bounds wy_tiles scaled cu",
    traits="HV K C READ_BEFORE PACKED",
)
@gluon.jit(do_not_specialize=["N", "T"])
def sm90_dplr_prepare_kernel(gmem, N, T, scale, traits: gl.constexpr):
    """Parameters and results as in portable/channel/dplr_prepare.py. Launch with 4 warps."""
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    C: gl.constexpr = traits.C
    PACKED: gl.constexpr = traits.PACKED
    gl.static_assert(C == 64 and K % 64 == 0)
    dtype: gl.constexpr = gmem.q.dtype.element_ty
    T_dtype: gl.constexpr = gmem.wy_tiles.dtype.element_ty
    STRIDE: gl.constexpr = HV * K
    pid = gl.program_id(0)
    slot = pid // HV
    hv = pid % HV
    n = find_sequence(slot, gmem.cu, N, 1, 0, C) if PACKED else slot // gl.cdiv(T, C)
    start, length = sequence_bounds(n, gmem.cu, T, PACKED)
    t0 = (slot - first_chunk_slot(n, gmem.cu, T, C, PACKED)) * C
    tokens_left = length - t0
    if tokens_left > 0:
        zero = opaque_zero(tokens_left, 30)
        head = ((start + t0) * HV + hv) * K
        chunk = slot.to(gl.int64) * HV + hv
        tile_size = (T.to(gl.int64) if PACKED else N.to(gl.int64) * T) * STRIDE
        operands = allocate_tiles(dtype, 4)
        q_s, k_s, e_s, m_s = operands
        t = gl.arange(0, 64, ACC_ROWS)[:, None]
        j = gl.arange(0, 64, ACC_COLUMNS)[None, :]
        no_pairs = gl.zeros([64, 64], gl.float32, ACC_TF32)
        products = (no_pairs, no_pairs, no_pairs, no_pairs)
        is_strong = 0.0
        P_diagonal = gl.zeros([64], gl.float32, ACC_ROWS)
        R_diagonal = gl.zeros([64], gl.float32, ACC_ROWS)
        for tk in gl.static_range(K // 64):
            at = head + tk * 64
            copy_tile_async(k_s, copy_pointers(gmem.k + at, STRIDE), 0, tokens_left, 64, True, False)
            copy_tile_async(m_s, copy_pointers(gmem.v_key + at, STRIDE), 0, tokens_left, 64, True, False)
            copy_tile_async(e_s, copy_pointers(gmem.e + at, STRIDE), 0, tokens_left, 64, True, False)
            copy_tile_async(q_s, copy_pointers(gmem.q + at, STRIDE), 0, tokens_left, 64, True, False)
            async_copy.commit_group()
            g = load_log2_decays(gmem.log_decay + at, STRIDE, tokens_left, 4)
            g_hi = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
            g_lo = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
            store_decay_terms(g, g_hi, g_lo)
            G_middle, G_end = middle_and_end(g, 4)
            gl.store(gmem.gates + (chunk * (K + C) + tk * 64) + gl.arange(0, 64, ACC_COLUMNS), exp2_ftz(G_end))
            async_copy.wait_group(0)
            fence_async_shared()
            barrier()
            to_middle = sum_decays(sums_to_middle(zero, 4), g_hi, g_lo, 4)
            extent = gl.maximum(largest(to_middle), largest(to_middle - load_decays(g_hi, g_lo, 4)))
            is_strong = gl.where(extent < WEAK, is_strong, 1.0)
            if not traits.READ_BEFORE:
                q_tile = to_float32(q_s.load(ACC))
                P_diagonal += gl.sum(q_tile * to_float32(k_s.load(ACC)), 1)
                R_diagonal += gl.sum(q_tile * to_float32(m_s.load(ACC)), 1)
            x_level = gl.allocate_shared_memory(gl.float32, [64, 64], SMEM_FLOAT32)
            k_level = gl.allocate_shared_memory(gl.float32, [64, 64], SMEM_FLOAT32)
            m_level = gl.allocate_shared_memory(gl.float32, [64, 64], SMEM_FLOAT32)
            rows_s = (x_level, k_level, m_level)
            outs = (
                gmem.scaled + at,
                gmem.scaled + at + tile_size,
                gmem.scaled + at + 2 * tile_size,
                gmem.scaled + at + 3 * tile_size,
            )
            products = add_pairs(
                products, operands, rows_s, outs, to_middle, g_hi, g_lo, G_middle, G_end, scale, STRIDE, tokens_left,
                traits.READ_BEFORE,
            )  # fmt: skip
            barrier()  # every warp has read the operands
        gl.store(gmem.decay_bounds + chunk, 0.0)
        gl.store(gmem.gates + (chunk * (K + C) + K), is_strong)
        A, B, P, R = products
        A = gl.convert_layout(A, ACC, assert_trivial=True)
        B = gl.convert_layout(B, ACC, assert_trivial=True)
        P = gl.convert_layout(P, ACC, assert_trivial=True)
        R = gl.convert_layout(R, ACC, assert_trivial=True)
        # for other pairs the products may be inf or NaN
        A = gl.where(j < t, A, 0.0)
        B = gl.where(j < t, B, 0.0)
        P = gl.where(j < t, P, 0.0) * scale
        R = gl.where(j < t, R, 0.0) * scale
        if not traits.READ_BEFORE:
            P = gl.where(j == t, P_diagonal[:, None] * scale, P)
            R = gl.where(j == t, R_diagonal[:, None] * scale, R)
        P_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        R_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        B_s = gl.allocate_shared_memory(T_dtype, [64, 64], SMEM_TILE)
        P_s.permute((1, 0)).store(to_16_bits(P, dtype))
        R_s.permute((1, 0)).store(to_16_bits(R, dtype))
        B_s.store(to_16_bits(B, T_dtype))
        B_at = gmem.wy_tiles + (chunk * 2 + 1) * (64 * 72)
        store_inverse_term(B_at, B_s)
        row, block, column = block_indices()
        R_at = B_at.to(gl.pointer_type(dtype), bitcast=True) + (row * 72 + block * 8 + column)
        gl.store(R_at, R_s.reshape([64, 8, 8]).load(STORE_BLOCKS), mask=block >= row // 8)
        l0, l1, l2, l3 = split_column_blocks(to_16_bits(A, gl.float16))
        buffers = allocate_inverse_buffers(T_dtype)
        invert_and_store(l0, l1, l2, l3, P_s, gmem.wy_tiles, chunk * 2, buffers)
