"""Chunk-local preparation on sm_90: gates, WY tiles T and P^T, and decay bounds. Equations as in ../prepare.py.

Grid: one CTA of 4 warps for each (chunk slot, key head); it computes q k^T and k k^T once and loops over the value
heads of the key head.

T = (I - L)^-1 with L = -A is computed by blocks of 16 x 16; warp w has row block w. In registers (ptx.py), each warp
computes X_w, the inverse of its diagonal block of I - L, and N_w = X_w L_w for the blocks left of the diagonal. Two
levels then combine blocks of different warps through shared memory, with wgmma on column blocks [64, 16]; the last
column names the variables:

    T_10 = N_10 X_0,   T_32 = N_32 X_2                                             u
    Z_2 = N_2,   Z_3 = N_3 + N_32 N_2,   T_(2:4, 0:2) = Z_(2:4, 0:2) T_(0:2, 0:2)    z0, z1 and T0, T1

These are the level doublings of ../prepare.py, block by block. P has the accumulator layout of A, so both use the same
decays; P is transposed when it is stored.

Supported: 16-bit operands, one term, chunks of 64, K <= 256, K a multiple of 8, erase keys equal to k.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.kernels.hopper.common import (
    ACC,
    ACC_COLUMNS,
    ACC_N16,
    ACC_ROWS,
    SMEM_TILE,
    SMEM_VECTOR,
    allocate_tiles,
    barrier,
    copy_pointers,
    copy_tile_async,
    find_sequence,
    low_term,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.kernels.hopper.ptx import (
    cumsum_by_warp,
    exp2_ftz,
    invert_diagonal_blocks,
    multiply_warp_blocks,
    round_causal,
    zero_except_warp_1,
    zero_except_warp_3,
)
from deltazoo.backends.triton.kernels.layout import LOG2E, clamp_log2_decay, first_chunk_slot, sequence_bounds
from deltazoo.backends.triton.kernels.step_size import step_size

A_OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC_N16.value, 2))
A_OPERAND_64 = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
# gates as [4 warps, 64 tokens]: every warp computes a copy, warp 0's is stored
GATE = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
GATE_WARP = gl.constexpr(gl.SliceLayout(1, GATE.value))
GATE_TOKEN = gl.constexpr(gl.SliceLayout(0, GATE.value))
SMEM_N16 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
# global stores, 16 bytes per thread, each warp the 16 rows it has in an accumulator: [64 rows, 8 or 2 blocks, 8
# columns]
STORE_BLOCKS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [4, 0, 0], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, 8, 8],
    )
)  # fmt: skip
STORE_BLOCKS_N16 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 2, 8],
    )
)  # fmt: skip


@gluon.jit
def split_column_blocks(x):
    """Split an accumulator [64, 64] into its four column blocks [64, 16], without data movement."""
    pairs = gl.permute(gl.reshape(x, [64, 2, 2, 16]), [0, 3, 2, 1])
    low, high = gl.split(pairs)
    x0, x1 = gl.split(low)
    x2, x3 = gl.split(high)
    return (
        gl.convert_layout(x0, ACC_N16, assert_trivial=True), gl.convert_layout(x1, ACC_N16, assert_trivial=True),
        gl.convert_layout(x2, ACC_N16, assert_trivial=True), gl.convert_layout(x3, ACC_N16, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def join_column_blocks(tile, x, u, T0, T1):
    """Store the blocks of T, whose variables the first lines name, in a tile [64, 64]."""
    row = gl.arange(0, 64, gl.SliceLayout(1, ACC_N16))[:, None] // 16
    zeros = gl.zeros([64, 16], gl.float16, ACC_N16)
    tile.slice(0, 16, dim=1).store(gl.where(row == 0, x, gl.where(row == 1, u, T0)))
    tile.slice(16, 16, dim=1).store(gl.where(row == 1, x, gl.where(row > 1, T1, zeros)))
    tile.slice(32, 16, dim=1).store(gl.where(row == 2, x, gl.where(row > 2, u, zeros)))
    tile.slice(48, 16, dim=1).store(gl.where(row == 3, x, zeros))


@gluon.jit
def refine_inverse(L, X_s, R_s):
    """Return T = X + X R [64, 64] with R = I - X + L X, from an approximation X of (I - L)^-1 in X_s.

    One Newton step. L is split into two float16 terms, so R is accurate to about 2^-22 |L| |X|, and the error of T is
    about the square of that of X.
    """
    i = gl.arange(0, 64, ACC_ROWS)[:, None]
    j = gl.arange(0, 64, ACC_COLUMNS)[None, :]
    L = gl.where(i > j, L, 0.0)  # may be inf or NaN above
    L_high = to_16_bits(L, gl.float16)
    a_high = gl.convert_layout(L_high, A_OPERAND_64, assert_trivial=True)
    a_low = gl.convert_layout(low_term(L, L_high), A_OPERAND_64, assert_trivial=True)
    fence_async_shared()
    barrier()
    R = gl.zeros([64, 64], gl.float32, ACC)
    R = warpgroup_mma(a_high, X_s, R, use_acc=False, is_async=True)
    R = warpgroup_mma(a_low, X_s, R, is_async=True)
    X = X_s.load(ACC).to(gl.float32)
    R, a_high, a_low = warpgroup_mma_wait(0, deps=[R, a_high, a_low])
    R_s.store(to_16_bits(gl.where(i == j, 1.0, 0.0) - X + R, gl.float16))
    fence_async_shared()
    barrier()
    T = warpgroup_mma(X_s, R_s, X, is_async=True)
    return warpgroup_mma_wait(0, deps=[T])


@gluon.jit
def store_inverse_term(at, tile_s, T):
    """Store one term of T [64, 64] on and below the diagonal of a tile [64, 72] (../wy_tiles.py), through tile_s."""
    tile_s.store(T)
    r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, STORE_BLOCKS)))[:, None, None]
    m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, STORE_BLOCKS)))[None, :, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE_BLOCKS)))[None, None, :]
    values = tile_s.reshape([64, 8, 8]).load(STORE_BLOCKS)
    gl.store(at + (r * 72 + gl.where(m == r // 8, 8, m) * 8 + column), values, mask=m <= r // 8)


@gluon.jit
def to_a_operand(x):
    return gl.convert_layout(x, A_OPERAND, assert_trivial=True)


@gluon.jit
def load_gates(
    log_decay, b, w, tokens, hv, in_sequence,
    HV: gl.constexpr, DECAY: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr,
):  # fmt: skip
    """Load the log2 decay, erase and write strength of the tokens of one value head; zeros outside the sequence."""
    at = tokens * HV + hv
    ones = gl.where(in_sequence, 1.0, 0.0)
    if DECAY == "head":
        log2_decay = clamp_log2_decay(gl.load(log_decay + at, mask=in_sequence, other=0.0) * LOG2E)
    elif DECAY == "fixed":
        log2_decay = gl.where(in_sequence, clamp_log2_decay(gl.load(log_decay + hv) * LOG2E), 0.0)
    else:
        log2_decay = gl.zeros([4, 64], gl.float32, GATE)
    erase = gl.load(b + at, mask=in_sequence, other=0.0).to(gl.float32) if ERASE else ones
    write = gl.load(w + at, mask=in_sequence, other=0.0).to(gl.float32) if WRITE else ones
    return log2_decay, erase, write


@gluon.jit
def store_gates(
    gates, gate_row, log2_decay, erase, write, G_s, G_prev_s, erase_s, is_warp_0,
    DECAY: gl.constexpr, ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr,
):  # fmt: skip
    """Store G, c = b 2^G' and w in gates; leave b, G and, if it is needed, G before each token in shared memory."""
    i = gl.arange(0, 64, GATE_TOKEN)[None, :]
    gates_at = gates + gate_row * 3 * 64 + i
    if DECAY != "none":
        G = cumsum_by_warp(log2_decay)
        G_prev = G - log2_decay
        G_s.store(gl.reshape(G, [256]))
        if ERASE_EARLY or READ_EARLY:
            G_prev_s.store(gl.reshape(G_prev, [256]))
        c = erase * exp2_ftz(G_prev if ERASE_EARLY else G)
    else:
        G = log2_decay
        c = erase
    erase_s.store(gl.reshape(erase, [256]))
    gl.store(gates_at + gl.zeros([4, 1], gl.int32, GATE), G, mask=is_warp_0)
    gl.store(gates_at + (64 + gl.zeros([4, 1], gl.int32, GATE)), c, mask=is_warp_0)
    gl.store(gates_at + (128 + gl.zeros([4, 1], gl.int32, GATE)), write, mask=is_warp_0)


@gluon.jit
def store_step_size(
    strengths, slopes, tokens, gate_row, hv, beta, k_dot_k, in_sequence, is_warp_0,
    HV: gl.constexpr, EXACT: gl.constexpr, DU_IS_DV: gl.constexpr,
):  # fmt: skip
    """Return the strength of EFLA (EXACT) or Longhorn; store it and its derivatives as ../step_size.py does."""
    strength, db_dbeta, m = step_size(beta, k_dot_k, EXACT)
    if slopes is not None:
        at = slopes + gate_row * (2 * 64) + (gl.arange(0, 64, GATE_TOKEN)[None, :] + gl.zeros([4, 1], gl.int32, GATE))
        gl.store(strengths + (tokens * HV + hv), strength, mask=in_sequence)
        gl.store(at, m if DU_IS_DV else m * strength, mask=is_warp_0)
        gl.store(at + 64, db_dbeta, mask=is_warp_0)
    return strength


@gluon.jit
def slice_warp_0(gate):
    """Return warp 0's copy of a gate."""
    return gate.slice(0, 64)


@gluon.jit
def load_n16(tile):
    """Load a tile [64, 16] in the layout of global stores."""
    return tile.reshape([64, 2, 8]).load(STORE_BLOCKS_N16)


@gluon.jit(do_not_specialize=["N", "T"])
def hopper_prepare_kernel(
    q, k, log_decay, b, w, gates, decay_bounds, wy_tiles, strengths, slopes, cu, N, T, scale,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
    DECAY: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr, PACKED: gl.constexpr, BOUND_DECAYS: gl.constexpr,
    REPARAM: gl.constexpr, DU_IS_DV: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Parameters and results as in ../prepare.py.

    Launch with 4 warps; with grouped heads at 168 registers per thread.
    """
    gl.static_assert(C == 64 and K <= 256 and K % 8 == 0)
    dtype: gl.constexpr = q.dtype.element_ty
    T_dtype: gl.constexpr = wy_tiles.dtype.element_ty
    GROUP: gl.constexpr = HV // H
    NK: gl.constexpr = (K + 63) // 64
    EARLY: gl.constexpr = (ERASE_EARLY or READ_EARLY) and DECAY != "none"
    pid = gl.program_id(0)
    slot = pid // H
    h = pid % H
    n = find_sequence(slot, cu, N, 1, 0, C) if PACKED else slot // gl.cdiv(T, C)
    start, length = sequence_bounds(n, cu, T, PACKED)
    t0 = (slot - first_chunk_slot(n, cu, T, C, PACKED)) * C
    tokens_left = length - t0
    if tokens_left > 0:
        token = start + t0
        k_s = allocate_tiles(dtype, NK)
        q_s = allocate_tiles(dtype, NK)
        erase_s = gl.allocate_shared_memory(gl.float32, [256], SMEM_VECTOR)
        G_s = gl.allocate_shared_memory(gl.float32, [256], SMEM_VECTOR) if DECAY != "none" else erase_s
        G_prev_s = gl.allocate_shared_memory(gl.float32, [256], SMEM_VECTOR) if EARLY else G_s
        WRITE_TENSOR: gl.constexpr = WRITE and REPARAM == "none"

        key = (token * H + h) * K
        MASK_K: gl.constexpr = K % 64 != 0
        for tk in gl.static_range(NK):
            copy_tile_async(k_s[tk], copy_pointers(k + key, H * K), tk * 64, tokens_left, K - tk * 64, True, MASK_K)
            copy_tile_async(q_s[tk], copy_pointers(q + key, H * K), tk * 64, tokens_left, K - tk * 64, True, MASK_K)
        async_copy.commit_group()

        i = gl.arange(0, C, GATE_TOKEN)[None, :]
        is_warp_0 = (gl.arange(0, 4, GATE_WARP) == 0)[:, None]
        in_sequence = is_warp_0 & (i < tokens_left)
        tokens = token + i + gl.zeros([4, 1], gl.int32, GATE)
        t = gl.arange(0, C, ACC_ROWS)
        # forces scale into a register: as a kernel argument it would be read from constant memory for each element
        scale = gl.where(N >= 0, scale, 0.0)
        hv = h * GROUP
        gate_row = slot.to(gl.int64) * HV + hv
        log2_decay, erase, write = load_gates(log_decay, b, w, tokens, hv, in_sequence, HV, DECAY, ERASE, WRITE_TENSOR)
        if REPARAM == "none":
            store_gates(
                gates, gate_row, log2_decay, erase, write, G_s, G_prev_s, erase_s, is_warp_0,
                DECAY, ERASE_EARLY, READ_EARLY,
            )  # fmt: skip
        async_copy.wait_group(0)
        fence_async_shared()
        A = gl.zeros([C, C], gl.float32, ACC)
        P = gl.zeros([C, C], gl.float32, ACC)
        for tk in gl.static_range(NK):
            k_tile = k_s[tk]
            A = warpgroup_mma(k_tile, k_tile.permute((1, 0)), A, is_async=True)
        for tk in gl.static_range(NK):
            q_tile = q_s[tk]
            k_tile = k_s[tk]
            P = warpgroup_mma(q_tile, k_tile.permute((1, 0)), P, is_async=True)
        A, P = warpgroup_mma_wait(0, deps=[A, P])
        if REPARAM != "none":
            norms_s = gl.allocate_shared_memory(gl.float32, [C], SMEM_VECTOR)
            norms_s.store(gl.sum(gl.where(t[:, None] == gl.arange(0, C, ACC_COLUMNS)[None, :], A, 0.0), 1))
            norms = norms_s.load(GATE_TOKEN)[None, :] + gl.zeros([4, 1], gl.float32, GATE)
            erase = store_step_size(
                strengths, slopes, tokens, gate_row, hv, erase, norms, in_sequence, is_warp_0, HV, REPARAM == "efla",
                DU_IS_DV,
            )  # fmt: skip
            store_gates(
                gates, gate_row, log2_decay, erase, erase, G_s, G_prev_s, erase_s, is_warp_0,
                DECAY, ERASE_EARLY, READ_EARLY,
            )  # fmt: skip
        P_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        X_s = gl.allocate_shared_memory(gl.float16, [64, 16], SMEM_N16)
        U_s = gl.allocate_shared_memory(gl.float16, [64, 16], SMEM_N16)
        N0_s = gl.allocate_shared_memory(gl.float16, [64, 16], SMEM_N16)
        N1_s = gl.allocate_shared_memory(gl.float16, [64, 16], SMEM_N16)
        T0_s = gl.allocate_shared_memory(T_dtype, [64, 16], SMEM_N16)
        T1_s = gl.allocate_shared_memory(T_dtype, [64, 16], SMEM_N16)
        if TERMS == 2:
            gl.static_assert(T_dtype == gl.float16)
            P_low_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
            inverse_s = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
            residual_s = gl.allocate_shared_memory(gl.float16, [64, 64], SMEM_TILE)
        for g in range(GROUP):
            if GROUP > 1:
                is_last = g + 1 == GROUP
                in_next = in_sequence & (not is_last)
                log2_decay, erase, write = load_gates(
                    log_decay, b, w, tokens, gl.minimum(hv + 1, HV - 1), in_next, HV, DECAY, ERASE, WRITE_TENSOR
                )  # fmt: skip
            erase_row = slice_warp_0(erase_s).load(ACC_ROWS)
            if DECAY != "none":
                G = slice_warp_0(G_s).load(ACC_ROWS)
                G_j = slice_warp_0(G_s).load(ACC_COLUMNS)
                G_prev_row = slice_warp_0(G_prev_s).load(ACC_ROWS) if EARLY else G
                # may be inf or NaN at non-causal positions, masked by round_causal and invert_diagonal_blocks
                G_e = G_prev_row if ERASE_EARLY else G
                D = exp2_ftz(G_e[:, None] - G_j[None, :])
                L = A * D * (-erase_row)[:, None]
                if READ_EARLY != ERASE_EARLY:
                    G_q = G_prev_row if READ_EARLY else G
                    D = exp2_ftz(G_q[:, None] - G_j[None, :])
                P_hv = P * D * scale
            else:
                L = A * (-erase_row)[:, None]
                P_hv = P * scale
            decay_bound = 0.0
            if BOUND_DECAYS and not ERASE_EARLY:
                k_dot_k = gl.sum(gl.where(t[:, None] == gl.arange(0, C, ACC_COLUMNS)[None, :], A, 0.0), 1)
                # an update scales a state by at most max(1, |1 - b k.k|)
                factor = gl.maximum(gl.abs(1 - erase_row * k_dot_k), 1.0, propagate_nan=tl.PropagateNan.ALL)
                decay_bound = gl.log2(factor)
                if DECAY != "none":
                    decay_bound += gl.where(t == C - 1, G, 0.0)
                decay_bound = gl.sum(decay_bound, 0)
            gl.store(decay_bounds + gate_row, decay_bound)
            P_s.permute((1, 0)).store(round_causal(P_hv, dtype, READ_EARLY))
            if TERMS == 2:
                P_rest = P_hv - to_float32(to_16_bits(P_hv, dtype))
                P_low_s.permute((1, 0)).store(round_causal(P_rest, dtype, READ_EARLY))

            l0, l1, l2, l3 = split_column_blocks(L)
            l0 = to_16_bits(l0, gl.float16)
            l1 = to_16_bits(l1, gl.float16)
            l2 = to_16_bits(l2, gl.float16)
            l3 = to_16_bits(l3, gl.float16)
            x = invert_diagonal_blocks(l0, l1, l2, l3)
            X_s.store(x)
            z0, z1, n2 = multiply_warp_blocks(x, l0, l1, l2)
            n0 = to_16_bits(z0, gl.float16)
            n2 = to_16_bits(n2, gl.float16)
            N0_s.store(n0)
            N1_s.store(to_16_bits(z1, gl.float16))
            n0 = to_a_operand(zero_except_warp_1(n0))
            n2 = to_a_operand(zero_except_warp_3(n2))
            fence_async_shared()
            barrier()
            u = gl.zeros([64, 16], gl.float32, ACC_N16)
            u = warpgroup_mma(n0, X_s.slice(0, 16), u, is_async=True)
            u = warpgroup_mma(n2, X_s.slice(32, 16), u, is_async=True)
            z0 = warpgroup_mma(n2, N0_s.slice(32, 16), z0, is_async=True)
            z1 = warpgroup_mma(n2, N1_s.slice(32, 16), z1, is_async=True)
            wy_at = wy_tiles + gate_row * (TERMS * C * (C + 8))
            P_base = wy_at.to(gl.pointer_type(dtype), bitcast=True)
            r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, STORE_BLOCKS)))[:, None, None]
            m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, STORE_BLOCKS)))[None, :, None]
            column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE_BLOCKS)))[None, None, :]
            P_values = P_s.reshape([64, 8, 8]).load(STORE_BLOCKS)
            P_at = P_base + (r * (C + 8) + m * 8 + column)
            in_P = m >= r // 8
            r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, STORE_BLOCKS_N16)))[:, None, None]
            m = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, STORE_BLOCKS_N16)))[None, :, None]
            column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STORE_BLOCKS_N16)))[None, None, :]
            second = (r // 8) % 2
            X_at = wy_at + (r * (C + 8) + gl.where(second == m, 8, r // 16 * 2) * 8 + column)
            X_values = load_n16(X_s).to(T_dtype)
            u, z0, z1, n0, n2 = warpgroup_mma_wait(0, deps=[u, z0, z1, n0, n2])
            U_s.store(to_16_bits(u, gl.float16))
            z0 = to_a_operand(to_16_bits(z0, gl.float16))
            z1 = to_a_operand(to_16_bits(z1, gl.float16))
            fence_async_shared()
            barrier()
            T0 = gl.zeros([64, 16], gl.float32, ACC_N16)
            T1 = gl.zeros([64, 16], gl.float32, ACC_N16)
            T0 = warpgroup_mma(z0, X_s.slice(0, 16), T0, is_async=True)
            T0 = warpgroup_mma(z1, U_s.slice(16, 16), T0, is_async=True)
            T1 = warpgroup_mma(z1, X_s.slice(16, 16), T1, is_async=True)
            gl.store(P_at, P_values, mask=in_P)
            if TERMS == 2:
                gl.store(P_at + C * (C + 8), P_low_s.reshape([64, 8, 8]).load(STORE_BLOCKS), mask=in_P)
                T0, T1, z0, z1 = warpgroup_mma_wait(0, deps=[T0, T1, z0, z1])
                join_column_blocks(
                    inverse_s, x, to_16_bits(u, gl.float16), to_16_bits(T0, gl.float16), to_16_bits(T1, gl.float16)
                )
                T_refined = refine_inverse(L, inverse_s, residual_s)
                T_high = to_16_bits(T_refined, gl.float16)
                store_inverse_term(wy_at, residual_s, T_high)
                store_inverse_term(wy_at + C * (C + 8), inverse_s, low_term(T_refined, T_high))
            else:
                gl.store(X_at, X_values, mask=second >= m)
                index = r * (C + 8) + m * 8 + column
                gl.store(wy_at + index + (r // 16 * 16 - 16), load_n16(U_s).to(T_dtype), mask=(r // 16) % 2 == 1)
                T0, T1, z0, z1 = warpgroup_mma_wait(0, deps=[T0, T1, z0, z1])
                T0_s.store(to_16_bits(T0, T_dtype))
                T1_s.store(to_16_bits(T1, T_dtype))
                gl.store(wy_at + index, load_n16(T0_s), mask=r >= 32)
                gl.store(wy_at + index + 16, load_n16(T1_s), mask=r >= 32)
            if GROUP > 1:
                hv += 1
                gate_row += 1
                if REPARAM != "none":
                    norms = norms_s.load(GATE_TOKEN)[None, :] + gl.zeros([4, 1], gl.float32, GATE)
                    erase = store_step_size(
                        strengths, slopes, tokens, gate_row, hv, erase, norms, in_next, is_warp_0 & (not is_last), HV,
                        REPARAM == "efla", DU_IS_DV,
                    )  # fmt: skip
                    write = erase
                store_gates(
                    gates, gate_row, log2_decay, erase, write, G_s, G_prev_s, erase_s, is_warp_0 & (not is_last),
                    DECAY, ERASE_EARLY, READ_EARLY,
                )  # fmt: skip
