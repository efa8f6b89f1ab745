"""Gradients of the operands of a DPLR chunk on sm_90, from states and dstates of the reverse scan.

It computes the equations of portable/channel/dplr_gradients.py, with the decays of the sums over pairs of tokens
relative to the middle of the chunk (portable/channel/dplr_levels.py):

    dq = r (scale 2^Gm do S0^T + dP k~ + dR m~)       k~ = k w,  m~ = m w,  w_j = 2^(Gm - G_j)
    de = r' (2^Gm du S0^T + dA k~ + dB m~)            q~ = q r,  e~ = e r', r_i = 2^(G_i - Gm), r'_i = 2^(G_(i-1) - Gm)
    dk = w (2^(Gend - Gm) x dS'^T + dP^T q~ + dA^T e~)
    dm = w (2^(Gend - Gm) v dS'^T + dR^T q~ + dB^T e~)

If q reads before the update, it has the factors r'. With strong decays the factors would overflow: the kernel skips
the chunks that dplr_prepare.py has marked, and the portable kernel computes them.

Grid: one CTA of 8 warps for each (chunk, head, tile of 64 keys). Both operands of all products are in shared memory,
except the mask of the cumulative decays, which is in registers. d log_decay is a sum over the tokens from each token
on: a product of a triangular mask with three bfloat16 terms, which together have 24 bits.

Supported: operands and scratch in bfloat16 (in float16 scaled rows would overflow), chunks of 64, K and V of 64 and
128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.signature import takes
from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    SMEM_TILE,
    allocate_tiles,
    barrier,
    locate_scratch_chunk,
    to_16_bits,
    to_float32,
)
from deltazoo.backends.triton.chunk.kernels.sm90.dplr_tiles import (
    ACC,
    COLUMNS,
    LANES,
    ROWS,
    copy_tile,
    load_decays,
    load_log2_decays,
    middle_and_end,
    store_decay_terms,
    store_tile,
    sum_decays,
    sums_to_middle,
)
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import reinterpret
from deltazoo.backends.triton.chunk.kernels.sm90.ptx import exp2_again, exp2_ftz
from deltazoo.backends.triton.device.layout import opaque_zero


@gluon.jit
def store_scaled(tile, x_s, factors):
    """Store the rows of the tile x_s times factors, rounded."""
    tile.store(to_16_bits(to_float32(x_s.load(ACC)) * factors, tile.dtype))


@gluon.jit
def add_products(acc, a, b, c, d):
    """Issue the wgmmas of acc + a b + c d for tiles in shared memory."""
    acc = warpgroup_mma(a, b, acc, is_async=True)
    acc = warpgroup_mma(c, d, acc, is_async=True)
    return acc


@gluon.jit
def store_before(tile, x, t, j):
    """Store the strictly lower part of x [64, 64], rounded."""
    tile.store(to_16_bits(gl.where(j < t, x, 0.0), tile.dtype))


@gluon.jit
def add_by_key(vector, x_s, terms):
    """Return vector [keys] plus the sums over rows of x_s times terms, both [64, keys]."""
    return vector + gl.sum(to_float32(x_s.load(ACC)) * terms, 0)


@takes(
    pointers="q k e v_key v log_decay do gates states dstates v_new du dq dk de dv_key dlog_decay cu",
    traits="HV K V C READ_BEFORE HAS_STATE PACKED UNIT",
)
@gluon.jit(do_not_specialize=["N", "T", "window", "windows"])
def sm90_dplr_gradients_kernel(gmem, N, scale, T, window, windows, traits: gl.constexpr):
    """Parameters and results as in portable/channel/dplr_gradients.py. Launch with 8 warps."""
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    C: gl.constexpr = traits.C
    READ_BEFORE: gl.constexpr = traits.READ_BEFORE
    gl.static_assert(C == 64 and K % 64 == 0 and V % 64 == 0 and V <= 128)
    gl.static_assert(gmem.states.dtype == gmem.k.dtype and gmem.k.dtype.element_ty.primitive_bitwidth == 16)
    NK: gl.constexpr = K // 64
    NV: gl.constexpr = V // 64
    dtype: gl.constexpr = gmem.states.dtype.element_ty
    pid = gl.program_id(0)
    tile = pid % NK
    hv = pid // NK % HV
    scratch_slot = pid // NK // HV
    start, length, slot, c, in_use = locate_scratch_chunk(
        scratch_slot, gmem.cu, N, T, window, windows, C, traits.UNIT, traits.PACKED, LANES
    )  # fmt: skip
    is_strong = gl.load(gmem.gates + ((slot.to(gl.int64) * HV + hv) * (K + C) + K), mask=in_use, other=1.0)
    if is_strong == 0.0:
        tokens_left = length - c * C
        zero = opaque_zero(c, 30)
        token = start + c * C
        key = (token * HV + hv) * K + tile * 64
        value = (token * HV + hv) * V
        scratch_row = scratch_slot.to(gl.int64) * HV + hv
        scratch_value = (scratch_slot.to(gl.int64) * C * HV + hv) * V
        do_s = allocate_tiles(dtype, NV)
        du_s = allocate_tiles(dtype, NV)
        x_s = allocate_tiles(dtype, NV)
        v_s = allocate_tiles(dtype, NV)
        S_s = allocate_tiles(dtype, NV)
        dS_s = allocate_tiles(dtype, NV)
        for tv in gl.static_range(NV):
            copy_tile(do_s[tv], gmem.do + value + tv * 64, HV * V, tokens_left)
            copy_tile(v_s[tv], gmem.v + value + tv * 64, HV * V, tokens_left)
            copy_tile(du_s[tv], gmem.du + scratch_value + tv * 64, HV * V, 64)
            copy_tile(x_s[tv], gmem.v_new + scratch_value + tv * 64, HV * V, 64)
            copy_tile(S_s[tv], gmem.states + scratch_row * V * K + tv * 64 * K + tile * 64, K, 64)
            copy_tile(dS_s[tv], gmem.dstates + scratch_row * V * K + tv * 64 * K + tile * 64, K, 64)
        q_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        k_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        e_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        m_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        copy_tile(q_s, gmem.q + key, HV * K, tokens_left)
        copy_tile(k_s, gmem.k + key, HV * K, tokens_left)
        copy_tile(e_s, gmem.e + key, HV * K, tokens_left)
        copy_tile(m_s, gmem.v_key + key, HV * K, tokens_left)
        async_copy.commit_group()
        g = load_log2_decays(gmem.log_decay + key, HV * K, tokens_left, 8)
        rows_s = allocate_tiles(dtype, 2)
        g_s = (
            reinterpret(rows_s[0], gl.float16, [64, 64], SMEM_TILE),
            reinterpret(rows_s[1], gl.float16, [64, 64], SMEM_TILE),
        )
        store_decay_terms(g, g_s[0], g_s[1])
        G_middle, G_end = middle_and_end(g, 8)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        state_product = gl.zeros([64], gl.float32, COLUMNS)
        for tv in gl.static_range(NV):
            state_product = add_by_key(state_product, S_s[tv], to_float32(dS_s[tv].load(ACC)))
        state_product *= exp2_ftz(G_end)

        dq_tile = gl.zeros([64, 64], gl.float32, ACC)  # do S^T
        de_tile = gl.zeros([64, 64], gl.float32, ACC)  # du S^T
        dP = gl.zeros([64, 64], gl.float32, ACC)
        dR = gl.zeros([64, 64], gl.float32, ACC)
        dA = gl.zeros([64, 64], gl.float32, ACC)
        dB = gl.zeros([64, 64], gl.float32, ACC)
        for tv in gl.static_range(NV):
            x_T = x_s[tv].permute((1, 0))
            v_T = v_s[tv].permute((1, 0))
            dP = warpgroup_mma(do_s[tv], x_T, dP, is_async=True)
            dR = warpgroup_mma(do_s[tv], v_T, dR, is_async=True)
            dA = warpgroup_mma(du_s[tv], x_T, dA, is_async=True)
            dB = warpgroup_mma(du_s[tv], v_T, dB, is_async=True)
            dq_tile = warpgroup_mma(do_s[tv], S_s[tv], dq_tile, is_async=True)
            de_tile = warpgroup_mma(du_s[tv], S_s[tv], de_tile, is_async=True)
        # The buffers are dependencies, too: the compiler would treat them as free once the wgmmas are issued.
        dq_tile, de_tile, dP, dR, dA, dB, _, _, _ = warpgroup_mma_wait(
            0, deps=[dq_tile, de_tile, dP, dR, dA, dB, do_s[NV - 1], du_s[NV - 1], S_s[NV - 1]]
        )
        t = gl.arange(0, 64, ROWS)[:, None]
        j = gl.arange(0, 64, COLUMNS)[None, :]
        dP *= scale
        dR *= scale
        dP_diagonal = gl.sum(gl.where(t == j, dP, 0.0), 1)
        dR_diagonal = gl.sum(gl.where(t == j, dR, 0.0), 1)
        pairs_s = allocate_tiles(dtype, 4)
        dP_s, dR_s, dA_s, dB_s = pairs_s
        store_before(dP_s, dP, t, j)
        store_before(dR_s, dR, t, j)
        store_before(dA_s, dA, t, j)
        store_before(dB_s, dB, t, j)
        to_middle = sum_decays(sums_to_middle(zero, 8), g_s[0], g_s[1], 8)
        to_middle_early = to_middle - load_decays(g_s[0], g_s[1], 8)
        # dq and de
        barrier()  # every warp has read the terms of g
        store_scaled(rows_s[0], k_s, exp2_again(-to_middle))
        store_scaled(rows_s[1], m_s, exp2_again(-to_middle))
        dq_tile *= exp2_ftz(G_middle)[None, :] * scale
        de_tile *= exp2_ftz(G_middle)[None, :]
        fence_async_shared()
        barrier()
        dq_tile = add_products(dq_tile, dP_s, rows_s[0], dR_s, rows_s[1])
        de_tile = add_products(de_tile, dA_s, rows_s[0], dB_s, rows_s[1])
        dq_tile, de_tile, _, _, _, _, _, _ = warpgroup_mma_wait(
            0, deps=[dq_tile, de_tile, dP_s, dR_s, dA_s, dB_s, rows_s[0], rows_s[1]]
        )
        dq_tile *= exp2_again(to_middle_early if READ_BEFORE else to_middle)
        de_tile *= exp2_again(to_middle_early)
        barrier()  # every warp has read the scaled rows
        q_tile = to_float32(q_s.load(ACC))
        early_terms = to_float32(e_s.load(ACC)) * de_tile
        terms = early_terms + q_tile * dq_tile
        if READ_BEFORE:
            early_terms = terms
        else:
            dq_tile += dP_diagonal[:, None] * to_float32(k_s.load(ACC))
            dq_tile += dR_diagonal[:, None] * to_float32(m_s.load(ACC))
        store_tile(gmem.dq + key, dq_tile, HV * K, tokens_left)
        store_tile(gmem.de + key, de_tile, HV * K, tokens_left)

        # dk and dm
        dk_tile = gl.zeros([64, 64], gl.float32, ACC)  # x dS'^T
        dm_tile = gl.zeros([64, 64], gl.float32, ACC)  # v dS'^T
        for tv in gl.static_range(NV):
            dk_tile = warpgroup_mma(x_s[tv], dS_s[tv], dk_tile, is_async=True)
            dm_tile = warpgroup_mma(v_s[tv], dS_s[tv], dm_tile, is_async=True)
        dk_tile, dm_tile, _, _, _ = warpgroup_mma_wait(
            0, deps=[dk_tile, dm_tile, x_s[NV - 1], v_s[NV - 1], dS_s[NV - 1]]
        )
        store_scaled(rows_s[0], q_s, exp2_again(to_middle_early if READ_BEFORE else to_middle))
        store_scaled(rows_s[1], e_s, exp2_again(to_middle_early))
        dk_tile *= exp2_ftz(G_end - G_middle)[None, :]
        dm_tile *= exp2_ftz(G_end - G_middle)[None, :]
        fence_async_shared()
        barrier()
        write = exp2_again(-to_middle)
        state_product = add_by_key(state_product, k_s, dk_tile * write)
        state_product = add_by_key(state_product, m_s, dm_tile * write)
        dk_tile = add_products(dk_tile, dP_s.permute((1, 0)), rows_s[0], dA_s.permute((1, 0)), rows_s[1])
        dm_tile = add_products(dm_tile, dR_s.permute((1, 0)), rows_s[0], dB_s.permute((1, 0)), rows_s[1])
        dk_tile, dm_tile, _, _, _, _, _, _ = warpgroup_mma_wait(
            0, deps=[dk_tile, dm_tile, dP_s, dR_s, dA_s, dB_s, rows_s[0], rows_s[1]]
        )
        dk_tile *= exp2_again(-to_middle)
        dm_tile *= exp2_again(-to_middle)
        terms -= to_float32(k_s.load(ACC)) * dk_tile + to_float32(m_s.load(ACC)) * dm_tile
        if not READ_BEFORE:
            q_tile = to_float32(q_s.load(ACC))
            dk_tile += dP_diagonal[:, None] * q_tile
            dm_tile += dR_diagonal[:, None] * q_tile
        store_tile(gmem.dk + key, dk_tile, HV * K, tokens_left)
        store_tile(gmem.dv_key + key, dm_tile, HV * K, tokens_left)

        t = gl.arange(0, 64, ROWS)[:, None]
        columns = gl.arange(0, 64, COLUMNS)[None, :]
        # d log_decay: the sums of `terms` over the tokens from each on, in three terms of 8 bits
        first_s, second_s, third_s, later_s = allocate_tiles(gl.bfloat16, 4)
        later_s.store(gl.where(columns >= t, 1.0, 0.0).to(gl.bfloat16))
        first = to_16_bits(terms, gl.bfloat16)
        first_s.store(first)
        terms -= to_float32(first)
        second = to_16_bits(terms, gl.bfloat16)
        second_s.store(second)
        third_s.store(to_16_bits(terms - to_float32(second), gl.bfloat16))
        fence_async_shared()
        barrier()
        dg = state_product[None, :] - early_terms
        dg = warpgroup_mma(later_s, third_s, dg, is_async=True)
        dg = warpgroup_mma(later_s, second_s, dg, is_async=True)
        dg = warpgroup_mma(later_s, first_s, dg, is_async=True)
        dg, _, _, _, _ = warpgroup_mma_wait(0, deps=[dg, later_s, first_s, second_s, third_s])
        if not traits.HAS_STATE:  # the first decay of a sequence scales nothing
            dg = gl.where(c * C + t > 0, dg, 0.0)
        gl.store(gmem.dlog_decay + key + (t * (HV * K) + columns), dg, mask=t < tokens_left)
