"""What each chunk decides alone, for Hopper GPUs, in Gluon: equations, parameters and results are those of prepare.py.

A warp has a row of blocks of 16. It inverts its own on the diagonal alone (ptx.py); two more levels, of 16 and of 32,
go from warp to warp by way of shared memory. With X the inverses of the diagonal blocks, L' = -A, N = X L' the blocks
left of the diagonal, T the inverse and Z = T L' in the lower half:

    T_10 = N_10 X_0,   T_32 = N_32 X_2,   Z_2 = N_2,   Z_3 = N_3 + N_32 N_2,   T_(2:4, 0:2) = Z_(0:2) T_(0:2, 0:2)

These are the level doublings of prepare.py, block by block. P is made beside A, with the same decays, and turned when
it is stored. It takes 16-bit operands in one term, chunks of 64, keys up to 256, and k as the erase key.
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
    to_16_bits,
)
from deltazoo.backends.triton.kernels.hopper.ptx import (
    exp2,
    keep,
    of_warp_1,
    of_warp_3,
    own_inverse,
    own_products,
    sums_up_to,
)
from deltazoo.backends.triton.kernels.layout import LOG2E, clamp_log2_decay, first_chunk_slot, sequence_bounds

A_OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC_N16.value, 2))
# a gate of the 64 tokens for each warp; the first warp's counts
GATE = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
GATE_WARP = gl.constexpr(gl.SliceLayout(1, GATE.value))
GATE_TOKEN = gl.constexpr(gl.SliceLayout(0, GATE.value))
SHARED_PIECE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
# 16 bytes a thread, a warp the 16 rows that it has in a product: [64 rows, 8 or 2 blocks of 8 columns, 8]
OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [4, 0, 0], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, 8, 8],
    )
)  # fmt: skip
OUT_PIECE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 2, 8],
    )
)  # fmt: skip


@gluon.jit
def blocks_of_16(x):
    """The four blocks of columns of a product [64, 64]: a thread has them in registers one after the other."""
    pairs = gl.permute(gl.reshape(x, [64, 2, 2, 16]), [0, 3, 2, 1])
    low, high = gl.split(pairs)
    x0, x1 = gl.split(low)
    x2, x3 = gl.split(high)
    return (
        gl.convert_layout(x0, ACC_N16, assert_trivial=True), gl.convert_layout(x1, ACC_N16, assert_trivial=True),
        gl.convert_layout(x2, ACC_N16, assert_trivial=True), gl.convert_layout(x3, ACC_N16, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def left_of(x):
    return gl.convert_layout(x, A_OPERAND, assert_trivial=True)


@gluon.jit
def load_gates(
    log_decay, b, w, tokens, hv, in_time,
    HV: gl.constexpr, DECAY: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr,
):  # fmt: skip
    """log2 of each token's own decay, -erase and write of one value head; zeros outside."""
    at = tokens * HV + hv
    ones = gl.where(in_time, 1.0, 0.0)
    if DECAY == "head":
        own = clamp_log2_decay(gl.load(log_decay + at, mask=in_time, other=0.0) * LOG2E)
    elif DECAY == "fixed":
        own = gl.where(in_time, clamp_log2_decay(gl.load(log_decay + hv) * LOG2E), 0.0)
    else:
        own = gl.zeros([4, 64], gl.float32, GATE)
    erase = gl.load(b + at, mask=in_time, other=0.0).to(gl.float32) if ERASE else ones
    write = gl.load(w + at, mask=in_time, other=0.0).to(gl.float32) if WRITE else ones
    return own, erase, write


@gluon.jit
def put_gates(
    gates, out, own, erase, write, G_s, before_s, erase_s, first,
    DECAY: gl.constexpr, ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr,
):  # fmt: skip
    """Store G, b e^G' and w, and leave G, with an early one G before each token, and b in shared memory."""
    i = gl.arange(0, 64, GATE_TOKEN)[None, :]
    to = gates + out * 3 * 64 + i
    if DECAY != "none":
        G = sums_up_to(own)
        before = G - own
        G_s.store(gl.reshape(G, [256]))
        if ERASE_EARLY or READ_EARLY:
            before_s.store(gl.reshape(before, [256]))
        erased = erase * exp2(before if ERASE_EARLY else G)
    else:
        G = own
        erased = erase
    erase_s.store(gl.reshape(erase, [256]))
    gl.store(to + gl.zeros([4, 1], gl.int32, GATE), G, mask=first)
    gl.store(to + (64 + gl.zeros([4, 1], gl.int32, GATE)), erased, mask=first)
    gl.store(to + (128 + gl.zeros([4, 1], gl.int32, GATE)), write, mask=first)


@gluon.jit
def first_warp(gate):
    return gate.slice(0, 64)


@gluon.jit
def piece_of(tile):
    """A tile [64, 16] as it goes out."""
    return tile.reshape([64, 2, 8]).load(OUT_PIECE)


@gluon.jit(do_not_specialize=["N", "T"])
def hopper_prepare_kernel(
    q, k, log_decay, b, w, gates, decay_bounds, wy_tiles, cu, N, T, scale,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, C: gl.constexpr,
    DECAY: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr, PACKED: gl.constexpr, BOUND_DECAYS: gl.constexpr,
):  # fmt: skip
    """One program a (slot, key head), of 4 warps."""
    gl.static_assert(C == 64 and K <= 256 and K % 8 == 0)
    dtype: gl.constexpr = q.dtype.element_ty
    lies: gl.constexpr = wy_tiles.dtype.element_ty
    GROUP: gl.constexpr = HV // H
    NK: gl.constexpr = (K + 63) // 64
    EARLY: gl.constexpr = (ERASE_EARLY or READ_EARLY) and DECAY != "none"
    pid = gl.program_id(0)
    slot = pid // H
    h = pid % H
    n = find_sequence(slot, cu, N, 1, 0, C) if PACKED else slot // gl.cdiv(T, C)
    start, length = sequence_bounds(n, cu, T, PACKED)
    t0 = (slot - first_chunk_slot(n, cu, T, C, PACKED)) * C
    left = length - t0
    if left > 0:
        row = start + t0
        k_s = allocate_tiles(dtype, NK)
        q_s = allocate_tiles(dtype, NK)
        erase_s = gl.allocate_shared_memory(gl.float32, [256], SMEM_VECTOR)
        G_s = gl.allocate_shared_memory(gl.float32, [256], SMEM_VECTOR) if DECAY != "none" else erase_s
        before_s = gl.allocate_shared_memory(gl.float32, [256], SMEM_VECTOR) if EARLY else G_s

        key = (row * H + h) * K
        NARROW_K: gl.constexpr = K % 64 != 0
        for tk in gl.static_range(NK):
            copy_tile_async(k_s[tk], copy_pointers(k + key, H * K), tk * 64, left, K - tk * 64, True, NARROW_K)
            copy_tile_async(q_s[tk], copy_pointers(q + key, H * K), tk * 64, left, K - tk * 64, True, NARROW_K)
        async_copy.commit_group()

        i = gl.arange(0, C, GATE_TOKEN)[None, :]
        first = (gl.arange(0, 4, GATE_WARP) == 0)[:, None]
        in_time = first & (i < left)
        tokens = row + i + gl.zeros([4, 1], gl.int32, GATE)
        t = gl.arange(0, C, ACC_ROWS)
        # in a register: from the constants it would be fetched for each number
        scale = gl.where(N >= 0, scale, 0.0)
        hv = h * GROUP
        out = slot.to(gl.int64) * HV + hv
        own, erase, write = load_gates(log_decay, b, w, tokens, hv, in_time, HV, DECAY, ERASE, WRITE)
        put_gates(gates, out, own, erase, write, G_s, before_s, erase_s, first, DECAY, ERASE_EARLY, READ_EARLY)
        async_copy.wait_group(0)
        fence_async_shared()
        A = gl.zeros([C, C], gl.float32, ACC)
        P = gl.zeros([C, C], gl.float32, ACC)
        for tk in gl.static_range(NK):
            k_t = k_s[tk]
            A = warpgroup_mma(k_t, k_t.permute((1, 0)), A, is_async=True)
        for tk in gl.static_range(NK):
            q_t = q_s[tk]
            k_t = k_s[tk]
            P = warpgroup_mma(q_t, k_t.permute((1, 0)), P, is_async=True)
        A, P = warpgroup_mma_wait(0, deps=[A, P])
        P_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        X_s = gl.allocate_shared_memory(gl.float16, [64, 16], SHARED_PIECE)
        U_s = gl.allocate_shared_memory(gl.float16, [64, 16], SHARED_PIECE)
        N0_s = gl.allocate_shared_memory(gl.float16, [64, 16], SHARED_PIECE)
        N1_s = gl.allocate_shared_memory(gl.float16, [64, 16], SHARED_PIECE)
        F0_s = gl.allocate_shared_memory(lies, [64, 16], SHARED_PIECE)
        F1_s = gl.allocate_shared_memory(lies, [64, 16], SHARED_PIECE)
        for g in range(GROUP):
            if GROUP > 1:
                last = g + 1 == GROUP
                more = in_time & (not last)
                own, erase, write = load_gates(
                    log_decay, b, w, tokens, gl.minimum(hv + 1, HV - 1), more, HV, DECAY, ERASE, WRITE
                )  # fmt: skip
            erase_row = first_warp(erase_s).load(ACC_ROWS)
            if DECAY != "none":
                G = first_warp(G_s).load(ACC_ROWS)
                G_j = first_warp(G_s).load(ACC_COLUMNS)
                before_row = first_warp(before_s).load(ACC_ROWS) if EARLY else G
                # where a token is not seen this may be no number
                G_e = before_row if ERASE_EARLY else G
                D = exp2(G_e[:, None] - G_j[None, :])
                L = A * D * (-erase_row)[:, None]
                if READ_EARLY != ERASE_EARLY:
                    G_q = before_row if READ_EARLY else G
                    D = exp2(G_q[:, None] - G_j[None, :])
                reads = P * D * scale
            else:
                L = A * (-erase_row)[:, None]
                reads = P * scale
            fade = 0.0
            if BOUND_DECAYS and not ERASE_EARLY:
                square = gl.sum(gl.where(t[:, None] == gl.arange(0, C, ACC_COLUMNS)[None, :], A, 0.0), 1)
                kept = gl.maximum(gl.abs(1 - erase_row * square), 1.0, propagate_nan=tl.PropagateNan.ALL)
                fade = gl.log2(kept)
                if DECAY != "none":
                    fade += gl.where(t == C - 1, G, 0.0)
                fade = gl.sum(fade, 0)
            gl.store(decay_bounds + out, fade)
            P_s.permute((1, 0)).store(keep(reads, dtype, READ_EARLY))

            l0, l1, l2, l3 = blocks_of_16(L)
            l0 = to_16_bits(l0, gl.float16)
            l1 = to_16_bits(l1, gl.float16)
            l2 = to_16_bits(l2, gl.float16)
            l3 = to_16_bits(l3, gl.float16)
            x = own_inverse(l0, l1, l2, l3)
            X_s.store(x)
            z0, z1, n2 = own_products(x, l0, l1, l2)
            n0 = to_16_bits(z0, gl.float16)
            n2 = to_16_bits(n2, gl.float16)
            N0_s.store(n0)
            N1_s.store(to_16_bits(z1, gl.float16))
            n0 = left_of(of_warp_1(n0))
            n2 = left_of(of_warp_3(n2))
            fence_async_shared()
            barrier()
            u = gl.zeros([64, 16], gl.float32, ACC_N16)
            u = warpgroup_mma(n0, X_s.slice(0, 16), u, is_async=True)
            u = warpgroup_mma(n2, X_s.slice(32, 16), u, is_async=True)
            z0 = warpgroup_mma(n2, N0_s.slice(32, 16), z0, is_async=True)
            z1 = warpgroup_mma(n2, N1_s.slice(32, 16), z1, is_async=True)
            at = wy_tiles + out * (C * (C + 8))
            at_reads = at.to(gl.pointer_type(dtype), bitcast=True)
            r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None, None]
            m = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
            x8 = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, None, :]
            reads_8 = P_s.reshape([64, 8, 8]).load(OUT)
            reads_at = at_reads + (r * (C + 8) + m * 8 + x8)
            reads_here = m >= r // 8
            r = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, OUT_PIECE)))[:, None, None]
            m = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, OUT_PIECE)))[None, :, None]
            x8 = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, OUT_PIECE)))[None, None, :]
            low = (r // 8) % 2
            own_at = at + (r * (C + 8) + gl.where(low == m, 8, r // 16 * 2) * 8 + x8)
            own_8 = piece_of(X_s).to(lies)
            u, z0, z1, n0, n2 = warpgroup_mma_wait(0, deps=[u, z0, z1, n0, n2])
            U_s.store(to_16_bits(u, gl.float16))
            z0 = left_of(to_16_bits(z0, gl.float16))
            z1 = left_of(to_16_bits(z1, gl.float16))
            fence_async_shared()
            barrier()
            f0 = gl.zeros([64, 16], gl.float32, ACC_N16)
            f1 = gl.zeros([64, 16], gl.float32, ACC_N16)
            f0 = warpgroup_mma(z0, X_s.slice(0, 16), f0, is_async=True)
            f0 = warpgroup_mma(z1, U_s.slice(16, 16), f0, is_async=True)
            f1 = warpgroup_mma(z1, X_s.slice(16, 16), f1, is_async=True)
            gl.store(reads_at, reads_8, mask=reads_here)
            gl.store(own_at, own_8, mask=low >= m)
            place = r * (C + 8) + m * 8 + x8
            gl.store(at + place + (r // 16 * 16 - 16), piece_of(U_s).to(lies), mask=(r // 16) % 2 == 1)
            f0, f1, z0, z1 = warpgroup_mma_wait(0, deps=[f0, f1, z0, z1])
            F0_s.store(to_16_bits(f0, lies))
            F1_s.store(to_16_bits(f1, lies))
            gl.store(at + place, piece_of(F0_s), mask=r >= 32)
            gl.store(at + place + 16, piece_of(F1_s), mask=r >= 32)
            if GROUP > 1:
                hv += 1
                out += 1
                put_gates(
                    gates, out, own, erase, write, G_s, before_s, erase_s, first & (not last), DECAY, ERASE_EARLY,
                    READ_EARLY,
                )  # fmt: skip
