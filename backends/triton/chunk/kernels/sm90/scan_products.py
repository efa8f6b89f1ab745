"""Products of a consumer of the Hopper scan: reads of the state by tiles of keys, and P of additive updates."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltazoo.backends.triton.chunk.kernels.sm90.common import (
    A_OPERAND,
    ACC,
    ACC_COLUMNS,
    ACC_ROWS,
    barrier,
    to_16_bits,
)


@gluon.jit
def read_state_by_key_tiles(S, smem, state_s, stage, traits: gl.constexpr):
    """Return S^T k^T and S^T q^T, one tile of 64 keys after the other.

    For NK > 2, where the registers cannot hold S^T in 16 bits beside its accumulators. When states are recomputed,
    leaves the 16-bit tiles in state_s.
    """
    NK: gl.constexpr = traits.NK
    OUTPUT: gl.constexpr = traits.OUTPUT
    y = gl.zeros([64, 64], gl.float32, ACC)
    out = gl.zeros([64, 64], gl.float32, ACC)
    for tk in gl.static_range(NK):
        S_low = to_16_bits(S[tk], traits.dtype)
        a_S = gl.convert_layout(S_low, A_OPERAND, assert_trivial=True)
        if traits.DELTA:
            k_T = smem.e[tk].index(stage).permute((1, 0))
            y = warpgroup_mma(a_S, k_T, y, use_acc=tk > 0, is_async=True)
        if OUTPUT:
            q_T = smem.q[tk].index(stage).permute((1, 0))
            out = warpgroup_mma(a_S, q_T, out, use_acc=tk > 0, is_async=True)
        else:
            state_s[tk].store(S_low)
        if traits.DELTA and OUTPUT:
            y, out, a_S = warpgroup_mma_wait(0, deps=[y, out, a_S])
        elif traits.DELTA:
            y, a_S = warpgroup_mma_wait(0, deps=[y, a_S])
        elif OUTPUT:
            out, a_S = warpgroup_mma_wait(0, deps=[out, a_S])
    return y, out


@gluon.jit
def issue_kq(smem, stage, traits: gl.constexpr):
    """Issue the wgmmas of k q^T [64, 64] of a chunk."""
    NK: gl.constexpr = traits.NK
    P = gl.zeros([64, 64], gl.float32, ACC)
    for tk in gl.static_range(NK):
        q_T = smem.q[tk].index(stage).permute((1, 0))
        P = warpgroup_mma(smem.k[tk].index(stage), q_T, P, use_acc=tk > 0, is_async=True)
    return P


@gluon.jit
def store_p_tile(P, PENDING: gl.constexpr, P_s, smem, stage, scale, traits: gl.constexpr):
    """Store P^T [written token j, reading token i] in P_s, from the accumulator of k q^T (additive updates).

    PENDING: number of wgmmas that were issued after those of k q^T.
    """
    P = warpgroup_mma_wait(PENDING, deps=[P])
    i = gl.arange(0, 64, ACC_COLUMNS)[None, :]
    j = gl.arange(0, 64, ACC_ROWS)[:, None]
    if traits.DECAY != "none":
        # may be inf or NaN at non-causal positions, masked below
        G_i = (
            smem.G_prev.index(stage).load(ACC_COLUMNS) if traits.GATES_BEFORE else smem.G.index(stage).load(ACC_COLUMNS)
        )
        P *= gl.exp2(G_i[None, :] - smem.G.index(stage).load(ACC_ROWS)[:, None])
    P_s.index(0).store(to_16_bits(gl.where(j + (1 if traits.READ_BEFORE else 0) <= i, P * scale, 0.0), traits.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def scale_channels(S, decays, stage, NK: gl.constexpr):
    """Multiply the columns of S^T, the keys, by 2^Gend of each."""
    scaled = ()
    for tk in gl.static_range(NK):
        factors = decays.index(stage).slice(tk * 64, S[tk].shape[1]).load(gl.SliceLayout(0, S[tk].type.layout))
        scaled = scaled + (S[tk] * factors[None, :],)
    return scaled


@gluon.jit
def scale_state(S, factor, NK: gl.constexpr):
    """Multiply the tiles of S^T by a factor [1] in the layout ACC_COLUMNS."""
    scaled = ()
    for tk in gl.static_range(NK):
        column_factor = gl.convert_layout(factor, gl.SliceLayout(0, S[tk].type.layout), assert_trivial=True)
        scaled = scaled + (S[tk] * column_factor[None, :],)
    return scaled
