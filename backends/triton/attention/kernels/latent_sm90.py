"""latent_attention_kernel on sm_90: copies fill one buffer of slots in shared memory while the products read another.

B batch, S slots, H heads, C latent width, R rotary width, P parts
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from deltazoo.backends.triton.attention.kernels.decode import bounds_of
from deltazoo.backends.triton.attention.kernels.tiles import LOG2E
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import async_load, barrier
from deltazoo.backends.triton.device.overlap import start_next, wait_for_previous

SMEM = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))  # 16 heads
ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
SLOTS = gl.constexpr(gl.SliceLayout(1, ACC.value))
HEADS = gl.constexpr(gl.SliceLayout(0, ACC.value))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes per thread
COPY_ROWS = gl.constexpr(gl.SliceLayout(1, COPY.value))
COPY_COLUMNS = gl.constexpr(gl.SliceLayout(0, COPY.value))


@gluon.jit
def copy_rows(c_s, r_s, rows, number, in_rows, traits: gl.constexpr):
    """Issue the copies of rows of C and R channels; those outside the mask become zero."""
    c = gl.arange(0, traits.V, COPY_COLUMNS)
    at = rows + number[:, None] * (traits.V + traits.R)
    async_load(c_s, at + c[None, :], mask=in_rows[:, None] & (c < traits.V)[None, :])
    r = traits.V + gl.arange(0, traits.R, COPY_COLUMNS)
    async_load(r_s, at + r[None, :], mask=in_rows[:, None] & (r < traits.V + traits.R)[None, :])


@gluon.jit
def copy_slots(c_s, r_s, latent, n, begin, stop, traits: gl.constexpr):
    """Issue the copies of the tile of slots from n on, as one group; none if n < begin, zeros from `stop` on."""
    s = n + gl.arange(0, traits.BN, COPY_ROWS)
    if n >= begin:
        copy_rows(c_s, r_s, latent, s, s < stop, traits)
    async_copy.commit_group()


@gluon.jit
def last_tile(begin, stop, traits: gl.constexpr):
    """Return the first slot of the last tile of a part; one before `begin` if the part has no slots."""
    return begin + (gl.cdiv(stop - begin, traits.BN) - 1) * traits.BN


@gluon.jit(do_not_specialize=["S"])
def latent_attention_sm90_kernel(q, latent, ends, partial, lse, S, traits: gl.constexpr):
    """Compute what latent_attention_kernel computes, in 16 bits. C and R are powers of two, at least 64.

    From the last tile to the first: the last one, of which few slots may be filled, is computed while others arrive.
    """
    H: gl.constexpr = traits.H
    C: gl.constexpr = traits.V
    R: gl.constexpr = traits.R
    ROWS: gl.constexpr = traits.ROWS
    BN: gl.constexpr = traits.BN
    PARTS: gl.constexpr = traits.PARTS
    GROUPS: gl.constexpr = (H + ROWS - 1) // ROWS
    c_s = gl.allocate_shared_memory(latent.dtype.element_ty, [2, BN, C], SMEM)
    r_s = gl.allocate_shared_memory(latent.dtype.element_ty, [2, BN, R], SMEM)
    q_c_s = gl.allocate_shared_memory(latent.dtype.element_ty, [ROWS, C], SMEM)
    q_r_s = gl.allocate_shared_memory(latent.dtype.element_ty, [ROWS, R], SMEM)
    p_s = gl.allocate_shared_memory(latent.dtype.element_ty, [BN, ROWS], WEIGHTS)
    part = gl.program_id(0) % PARTS
    group = gl.program_id(0) // PARTS % GROUPS
    b = (gl.program_id(0) // (PARTS * GROUPS)).to(gl.int64)
    latent += b * S * (C + R)
    wait_for_previous()
    end = gl.minimum(gl.load(ends + b), S).to(gl.int32)
    head = group * ROWS + gl.arange(0, ROWS, COPY_ROWS)
    copy_rows(q_c_s, q_r_s, q + b * H * (C + R), head, head < H, traits)
    begin, stop = bounds_of(part, end, traits)
    n = last_tile(begin, stop, traits)
    copy_slots(c_s.index(0), r_s.index(0), latent, n, begin, stop, traits)
    copy_slots(c_s.index(1), r_s.index(1), latent, n - BN, begin, stop, traits)
    start_next()  # not before: the next kernel loads its weights at once, which would delay these copies

    m = gl.full([ROWS], float("-inf"), gl.float32, HEADS)
    l = gl.zeros([BN, ROWS], gl.float32, ACC)
    o_tile = gl.zeros([C, ROWS], gl.float32, ACC)
    buffer = 0
    while n >= begin:
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()
        c_tile = c_s.index(buffer)
        x = warpgroup_mma(c_tile, q_c_s.permute((1, 0)), gl.zeros([BN, ROWS], gl.float32, ACC))
        x = warpgroup_mma(r_s.index(buffer), q_r_s.permute((1, 0)), x)
        filled = n + gl.arange(0, BN, SLOTS) < stop
        x = gl.where(filled[:, None], x * (traits.SCALE * LOG2E), float("-inf"))
        m_new = gl.maximum(m, gl.max(x, 0))
        p = gl.exp2(x - m_new[None, :])
        decay = gl.exp2(m - m_new)[None, :]
        l = l * decay + p
        m = m_new
        p_s.store(p.to(latent.dtype.element_ty))
        fence_async_shared()
        barrier()
        o_tile = warpgroup_mma(c_tile.permute((1, 0)), p_s, o_tile * decay)
        barrier()
        copy_slots(c_tile, r_s.index(buffer), latent, n - 2 * BN, begin, stop, traits)
        buffer = 1 - buffer
        n -= BN
    async_copy.wait_group(0)  # of q, if there is no slot
    barrier()
    total = gl.sum(l, 0)
    o_tile *= gl.where(total == 0.0, 0.0, 1.0 / total)[None, :]
    head = group * ROWS + gl.arange(0, ROWS, HEADS)
    at_part = (b * H + head) * PARTS + part
    at = partial + at_part[None, :] * C + gl.arange(0, C, SLOTS)[:, None]
    gl.store(at, o_tile, mask=(head < H)[None, :])  # 8 threads fill a sector
    gl.store(lse + at_part, m + gl.log2(total), mask=head < H)
