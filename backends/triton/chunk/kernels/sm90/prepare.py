"""Chunk-local preparation on sm_90: gates, WY tiles T and P^T, and decay bounds. Equations as in portable/prepare.py.

Grid: one CTA of 4 warps for each (chunk slot, key head); it computes q k^T and e k^T once and loops over the value
heads of the key head.

P has the accumulator layout of A, so both use the same decays; P is transposed when it is stored. wy_tiles.py computes
T and stores both.

Supported: 16-bit operands, one or two terms, chunks of 64, K <= 256, K a multiple of 8.
"""

import triton.language as tl
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
    SMEM_VECTOR,
    allocate_tiles,
    copy_pointers,
    copy_tile_async,
    find_sequence,
    low_term,
    to_16_bits,
)
from deltazoo.backends.triton.chunk.kernels.sm90.ptx import (
    cumsum_by_warp,
    exp2_ftz,
    round_causal,
    split_operand,
)
from deltazoo.backends.triton.chunk.kernels.sm90.wy_tiles import (
    allocate_inverse_buffers,
    allocate_refinement_buffers,
    invert_and_store,
    split_column_blocks,
)
from deltazoo.backends.triton.device.layout import LOG2E, clamp_log2_decay, first_chunk_slot, sequence_bounds
from deltazoo.backends.triton.device.step_size import step_size

# gates as [4 warps, 64 tokens]: every warp computes a copy, warp 0's is stored
GATE = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
GATE_WARP = gl.constexpr(gl.SliceLayout(1, GATE.value))
GATE_TOKEN = gl.constexpr(gl.SliceLayout(0, GATE.value))


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
    DECAY: gl.constexpr, ERASE_PREVIOUS: gl.constexpr, READ_BEFORE: gl.constexpr,
):  # fmt: skip
    """Store G, the erase strength b 2^G' and w in gates; leave b, G and G before each token in shared memory."""
    i = gl.arange(0, 64, GATE_TOKEN)[None, :]
    gates_at = gates + gate_row * 3 * 64 + i
    if DECAY != "none":
        G = cumsum_by_warp(log2_decay)
        G_prev = G - log2_decay
        G_s.store(gl.reshape(G, [256]))
        if ERASE_PREVIOUS or READ_BEFORE:
            G_prev_s.store(gl.reshape(G_prev, [256]))
        scaled_erase = erase * exp2_ftz(G_prev if ERASE_PREVIOUS else G)
    else:
        G = log2_decay
        scaled_erase = erase
    erase_s.store(gl.reshape(erase, [256]))
    gl.store(gates_at + gl.zeros([4, 1], gl.int32, GATE), G, mask=is_warp_0)
    gl.store(gates_at + (64 + gl.zeros([4, 1], gl.int32, GATE)), scaled_erase, mask=is_warp_0)
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


@takes(
    pointers="q k e log_decay b w gates decay_bounds wy_tiles strengths slopes cu",
    traits="H HV K C DECAY ERASE WRITE ERASE_PREVIOUS READ_BEFORE PACKED BOUND_DECAYS REPARAM DU_IS_DV TERMS",
)
@gluon.jit(do_not_specialize=["N", "T"])
def sm90_prepare_kernel(gmem, N, T, scale, traits: gl.constexpr):
    """Parameters and results as in portable/prepare.py. e is None if the erase key is k.

    Launch with 4 warps; with grouped heads at 168 registers per thread.
    """
    H: gl.constexpr = traits.H
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    C: gl.constexpr = traits.C
    DECAY: gl.constexpr = traits.DECAY
    ERASE_PREVIOUS: gl.constexpr = traits.ERASE_PREVIOUS
    READ_BEFORE: gl.constexpr = traits.READ_BEFORE
    PACKED: gl.constexpr = traits.PACKED
    REPARAM: gl.constexpr = traits.REPARAM
    gl.static_assert(C == 64 and K <= 256 and K % 8 == 0)
    dtype: gl.constexpr = gmem.q.dtype.element_ty
    T_dtype: gl.constexpr = gmem.wy_tiles.dtype.element_ty
    GROUP: gl.constexpr = HV // H
    NK: gl.constexpr = (K + 63) // 64
    GATES_BEFORE: gl.constexpr = (ERASE_PREVIOUS or READ_BEFORE) and DECAY != "none"
    OWN_KEY: gl.constexpr = gmem.e is not None
    pid = gl.program_id(0)
    slot = pid // H
    h = pid % H
    n = find_sequence(slot, gmem.cu, N, 1, 0, C) if PACKED else slot // gl.cdiv(T, C)
    start, length = sequence_bounds(n, gmem.cu, T, PACKED)
    t0 = (slot - first_chunk_slot(n, gmem.cu, T, C, PACKED)) * C
    tokens_left = length - t0
    if tokens_left > 0:
        token = start + t0
        k_s = allocate_tiles(dtype, NK)
        q_s = allocate_tiles(dtype, NK)
        e_s = allocate_tiles(dtype, NK) if OWN_KEY else k_s
        erase_s = gl.allocate_shared_memory(gl.float32, [256], SMEM_VECTOR)
        G_s = gl.allocate_shared_memory(gl.float32, [256], SMEM_VECTOR) if DECAY != "none" else erase_s
        G_prev_s = gl.allocate_shared_memory(gl.float32, [256], SMEM_VECTOR) if GATES_BEFORE else G_s
        WRITE_TENSOR: gl.constexpr = traits.WRITE and REPARAM == "none"

        key = (token * H + h) * K
        MASK_K: gl.constexpr = K % 64 != 0
        for tk in gl.static_range(NK):
            copy_tile_async(
                k_s[tk], copy_pointers(gmem.k + key, H * K), tk * 64, tokens_left, K - tk * 64, True, MASK_K
            )
            copy_tile_async(
                q_s[tk], copy_pointers(gmem.q + key, H * K), tk * 64, tokens_left, K - tk * 64, True, MASK_K
            )
            if OWN_KEY:
                copy_tile_async(
                    e_s[tk], copy_pointers(gmem.e + key, H * K), tk * 64, tokens_left, K - tk * 64, True, MASK_K
                )
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
        log2_decay, erase, write = load_gates(
            gmem.log_decay, gmem.b, gmem.w, tokens, hv, in_sequence, HV, DECAY, traits.ERASE, WRITE_TENSOR
        )
        if REPARAM == "none":
            store_gates(
                gmem.gates, gate_row, log2_decay, erase, write, G_s, G_prev_s, erase_s, is_warp_0,
                DECAY, ERASE_PREVIOUS, READ_BEFORE,
            )  # fmt: skip
        async_copy.wait_group(0)
        fence_async_shared()
        A = gl.zeros([C, C], gl.float32, ACC)
        P = gl.zeros([C, C], gl.float32, ACC)
        for tk in gl.static_range(NK):
            k_tile = k_s[tk]
            A = warpgroup_mma(e_s[tk], k_tile.permute((1, 0)), A, is_async=True)
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
                gmem.strengths, gmem.slopes, tokens, gate_row, hv, erase, norms, in_sequence, is_warp_0, HV,
                REPARAM == "efla", traits.DU_IS_DV,
            )  # fmt: skip
            store_gates(
                gmem.gates, gate_row, log2_decay, erase, erase, G_s, G_prev_s, erase_s, is_warp_0,
                DECAY, ERASE_PREVIOUS, READ_BEFORE,
            )  # fmt: skip
        P_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        buffers = allocate_inverse_buffers(T_dtype)
        if traits.TERMS == 2:
            refinement_buffers = allocate_refinement_buffers(T_dtype)
        for g in range(GROUP):
            if GROUP > 1:
                is_last = g + 1 == GROUP
                in_next = in_sequence & (not is_last)
                log2_decay, erase, write = load_gates(
                    gmem.log_decay, gmem.b, gmem.w, tokens, gl.minimum(hv + 1, HV - 1), in_next, HV, DECAY,
                    traits.ERASE, WRITE_TENSOR,
                )  # fmt: skip
            erase_row = slice_warp_0(erase_s).load(ACC_ROWS)
            if DECAY != "none":
                G = slice_warp_0(G_s).load(ACC_ROWS)
                G_j = slice_warp_0(G_s).load(ACC_COLUMNS)
                G_prev_row = slice_warp_0(G_prev_s).load(ACC_ROWS) if GATES_BEFORE else G
                # may be inf or NaN at non-causal positions, masked by round_causal and invert_diagonal_blocks
                G_e = G_prev_row if ERASE_PREVIOUS else G
                D = exp2_ftz(G_e[:, None] - G_j[None, :])
                L = A * D * (-erase_row)[:, None]
                if READ_BEFORE != ERASE_PREVIOUS:
                    G_q = G_prev_row if READ_BEFORE else G
                    D = exp2_ftz(G_q[:, None] - G_j[None, :])
                P_hv = P * D * scale
            else:
                L = A * (-erase_row)[:, None]
                P_hv = P * scale
            decay_bound = 0.0
            if traits.BOUND_DECAYS and not (OWN_KEY or ERASE_PREVIOUS):
                k_dot_k = gl.sum(gl.where(t[:, None] == gl.arange(0, C, ACC_COLUMNS)[None, :], A, 0.0), 1)
                # an update scales a state by at most max(1, |1 - b k.k|)
                factor = gl.maximum(gl.abs(1 - erase_row * k_dot_k), 1.0, propagate_nan=tl.PropagateNan.ALL)
                decay_bound = gl.log2(factor)
                if DECAY != "none":
                    decay_bound += gl.where(t == C - 1, G, 0.0)
                decay_bound = gl.sum(decay_bound, 0)
            gl.store(gmem.decay_bounds + gate_row, decay_bound)
            P_s.permute((1, 0)).store(round_causal(P_hv, dtype, READ_BEFORE))
            L_high = to_16_bits(L, gl.float16)
            if traits.TERMS == 2:
                # in shared memory until T is refined: registers limit the programs per SM
                L_high, L_low = split_operand(L_high, low_term(L, L_high))
                refinement_buffers[0].store(L_high)
                refinement_buffers[1].store(L_low)
            l0, l1, l2, l3 = split_column_blocks(L_high)
            if traits.TERMS == 2:
                invert_and_store(l0, l1, l2, l3, P_s, gmem.wy_tiles, gate_row, buffers, refinement_buffers, 2)
            else:
                invert_and_store(l0, l1, l2, l3, P_s, gmem.wy_tiles, gate_row, buffers)
            if GROUP > 1:
                hv += 1
                gate_row += 1
                if REPARAM != "none":
                    norms = norms_s.load(GATE_TOKEN)[None, :] + gl.zeros([4, 1], gl.float32, GATE)
                    erase = store_step_size(
                        gmem.strengths, gmem.slopes, tokens, gate_row, hv, erase, norms, in_next,
                        is_warp_0 & (not is_last), HV, REPARAM == "efla", traits.DU_IS_DV,
                    )  # fmt: skip
                    write = erase
                store_gates(
                    gmem.gates, gate_row, log2_decay, erase, write, G_s, G_prev_s, erase_s, is_warp_0 & (not is_last),
                    DECAY, ERASE_PREVIOUS, READ_BEFORE,
                )  # fmt: skip
