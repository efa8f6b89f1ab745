"""Gradients of a chunk of a delta rule with a decay per channel on sm_90, from the states of the reverse scan.

It computes the equations of ../channel/gradients.py. With S the state before the chunk, dS' the gradient of the state
after it, x and du [64, V], and y = b e:

    dP = scale tril(do x^T, -1),   dA = tril(du x^T, -1)
    dq = scale 2^G'' do S^T + sum_l f_l (dP_l k_l),   -dy = 2^G' du S^T + sum_l f_l (dA_l k_l)
    dk = 2^(Gend - G) x dS'^T + sum_l f_l (dP_l^T q_l - dA_l^T y_l)

At level l of ../channel/decay_levels.py dP_l and dA_l are the pairs (i, j) of tokens with i in the upper and j in the
lower half of a block, f_l the factor of each token and channel relative to the boundary between the halves
(decay_factors.py), and k_l, q_l, y_l the rows scaled by it.

All matrices of channels are transposed, [64 channels, 64 tokens], so that the tokens of a channel are in the registers
of four lanes, and scaled rows are A operands in registers. The B operands are blocks [16 tokens, 16 tokens] of two
matrices that are computed once and stored in shared memory, [64, 16] for each level (two for level 5):

    dP + dP^T,   dA^T - b dA        row j: token of the scaled rows, column i: token of the gradient

Blocks of levels 4 and 5 are off the diagonal: their columns are upper or lower halves alone. Levels 3 and below share
the blocks on the diagonal, of which each level has its pairs. So the levels need no barriers.

Grid: one CTA of 4 warps for each (chunk, value head, tile of 64 keys); it loops over tiles of 64 values, two stages of
which are in shared memory, as in gradients.py.

With IN_GRADIENTS states and dstates need no scratch memory. What a program reads, it overwrites with the gradients that
it computes: S^T of values 0 to 63 and 64 to 127 is in the first and second half of each row of d_log_decay, as 16-bit
elements; dS'^T of values 0 to 63 is in the rows of dq, of values 64 to 127 in those of dk.

Supported: operands and scratch of one 16-bit dtype, chunks of 64, V <= 512.
"""

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
    to_float32,
)
from deltazoo.backends.triton.kernels.hopper.decay_factors import boundary_factors, level_factors
from deltazoo.backends.triton.kernels.hopper.ptx import diagonal_blocks, exp2_ftz, select_pairs
from deltazoo.backends.triton.kernels.hopper.state_copies import store_tile
from deltazoo.backends.triton.kernels.hopper.token_masks import OPERANDS, mask_asm
from deltazoo.backends.triton.kernels.hopper.value_tiles import LOAD_LAYOUT, copy_value_tile, store_write_sums
from deltazoo.backends.triton.kernels.hopper.wy_tiles import SMEM_N16, to_a_operand
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
# float32 [64 keys, 64 tokens]: few bank conflicts in the layouts ACC and BY_KEY
SMEM_BY_TOKEN = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
N16_ROWS = gl.constexpr(gl.SliceLayout(1, ACC_N16.value))
N16_COLUMNS = gl.constexpr(gl.SliceLayout(0, ACC_N16.value))
# Sums over the 32 tokens of a thread up to each token, and from it on. A reverse associative_scan takes 10 shuffles per
# element. DELAY_TOKENS moves them to the next token.
CUMSUM = gl.constexpr("mov.b32 $0, $32;\n" + "\n".join(f"add.f32 ${n + 1}, ${n}, ${n + 33};" for n in range(31)))
REVERSE_CUMSUM = gl.constexpr(
    "mov.b32 $31, $63;\n" + "\n".join(f"add.f32 ${30 - n}, ${31 - n}, ${62 - n};" for n in range(31))
)
DELAY_TOKENS = gl.constexpr("mov.b32 $0, 0;\n" + "\n".join(f"mov.b32 ${n + 1}, ${n + 32};" for n in range(31)))
CUMSUM_OPERANDS = gl.constexpr(",".join(["=&r"] * 32 + ["r"] * 32))
# predicated sums, where a select beside each fused multiply-add would cost an instruction and a register more
ADD_HALVES = gl.constexpr(
    "{\n.reg .pred upper;\nsetp.ne.s32 upper, $2, 0;\nmov.b32 $0, $5;\nmov.b32 $1, $6;\n"
    "@upper fma.rn.f32 $0, $3, $4, $0;\n@!upper fma.rn.f32 $1, $3, $4, $1;\n}"
)


@gluon.jit
def load_decays(G_s, G_before_s, ANY_EARLY: gl.constexpr):
    """Load the blocks of G, and of G before each token if it is needed."""
    G = split_blocks(G_s.load(ACC))
    return G, split_blocks(G_before_s.load(ACC)) if ANY_EARLY else G


@gluon.jit
def keep_lower(x):
    """Zero x [64, 64], of 16 bits in the layout ACC, on and above the diagonal."""
    asm: gl.constexpr = mask_asm("before", 0)
    return gl.inline_asm_elementwise(asm, OPERANDS, [x], x.dtype, is_pure=True, pack=32)


@gluon.jit
def over_tokens(x, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(ASM, CUMSUM_OPERANDS, [x], gl.float32, is_pure=True, pack=32)


@gluon.jit
def sum_to_token(x):
    """Return for each token the sums of x [64, 64] over the tokens up to it, and over those before it."""
    x = over_tokens(x, CUMSUM)
    i = gl.arange(0, 64, gl.SliceLayout(1, BY_KEY))[:, None]
    first_half = gl.where(i < 32, 0.0, gl.sum(gl.where(i == 31, x, 0.0), 0)[None, :])
    return x + first_half, over_tokens(x, DELAY_TOKENS) + first_half


@gluon.jit
def sum_from_token(x):
    """Return for each token the sum of x [64, 64] over the tokens from it on, in the layout BY_KEY."""
    x = over_tokens(x, REVERSE_CUMSUM)
    i = gl.arange(0, 64, gl.SliceLayout(1, BY_KEY))[:, None]
    second_half = gl.sum(gl.where(i == 32, x, 0.0), 0)
    return gl.where(i < 32, x + second_half[None, :], x)


@gluon.jit
def split_halves(x):
    N: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [64, 2, N]), [0, 2, 1]))


@gluon.jit
def split_blocks(x):
    """Split x [64, 64] in the layout ACC into four column blocks [64, 16] in the layout ACC_N16."""
    low, high = split_halves(x)
    x0, x1 = split_halves(low)
    x2, x3 = split_halves(high)
    return (
        gl.convert_layout(x0, ACC_N16, assert_trivial=True),
        gl.convert_layout(x1, ACC_N16, assert_trivial=True),
        gl.convert_layout(x2, ACC_N16, assert_trivial=True),
        gl.convert_layout(x3, ACC_N16, assert_trivial=True),
    )


@gluon.jit
def join_columns(low, high):
    N: gl.constexpr = 2 * low.shape[1]
    return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [64, N])


@gluon.jit
def join_blocks(x):
    """Undo split_blocks."""
    x = join_columns(join_columns(x[0], x[1]), join_columns(x[2], x[3]))
    return gl.convert_layout(x, ACC, assert_trivial=True)


@gluon.jit
def load_block(tile, B: gl.constexpr):
    """Load tokens 16 B to 16 B + 15 of a tile [64 tokens, 64 channels], transposed."""
    return tile.slice(16 * B, 16).permute((1, 0)).load(ACC_N16)


@gluon.jit
def load_blocks(tile):
    return load_block(tile, 0), load_block(tile, 1), load_block(tile, 2), load_block(tile, 3)


@gluon.jit
def scale_block(rows, factors, dtype: gl.constexpr):
    """Return rows times factors as an A operand."""
    return to_a_operand(to_16_bits(to_float32(rows) * factors, dtype))


@gluon.jit
def allocate_pair_tiles(dtype: gl.constexpr):
    """Allocate the B operands of levels 0 to 4, and two of level 5."""
    tiles = (gl.allocate_shared_memory(dtype, [64, 16], SMEM_N16),)
    for _ in gl.static_range(6):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [64, 16], SMEM_N16),)
    return tiles


@gluon.jit
def store_pairs(x, y, tiles):
    """Store the pairs of each level of x in the lower triangle, and of y^T in the upper one."""
    dtype: gl.constexpr = tiles[0].dtype
    lower = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
    lower.store(keep_lower(to_16_bits(y, dtype)))
    b0, b1, b2, b3 = split_blocks(keep_lower(to_16_bits(x, dtype)) + lower.permute((1, 0)).load(ACC))
    tiles[6].store(diagonal_blocks(b3, b3, b1, b1))
    tiles[5].store(diagonal_blocks(b2, b2, b0, b0))
    tiles[4].store(diagonal_blocks(b1, b0, b3, b2))
    block = diagonal_blocks(b0, b1, b2, b3)
    i = gl.arange(0, 64, N16_ROWS)[:, None] % 16
    j = gl.arange(0, 16, N16_COLUMNS)[None, :]
    zeros = gl.zeros([64, 16], dtype, ACC_N16)
    for level in gl.static_range(4):
        tiles[level].store(gl.where((i ^ j) >> level == 1, block, zeros))


@gluon.jit
def multiply_block(a, tile, B: gl.constexpr, z, USE_ACC: gl.constexpr):
    """Issue the wgmma of an A operand of tokens 16 B to 16 B + 15 and their rows of a B operand."""
    return warpgroup_mma(a, tile.slice(16 * B, 16), z, use_acc=USE_ACC, is_async=True)


@gluon.jit
def add_halves(x, y, upper, factors, z):
    """Return x + factors z in the upper halves, and y + factors z in the lower halves."""
    operands = [gl.where(upper, 1, 0), factors, z, x, y]
    return gl.inline_asm_elementwise(
        ADD_HALVES, "=&r,=&r,r,r,r,r,r", operands, (gl.float32, gl.float32), is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def replace(x, B: gl.constexpr, block):
    """Return the four blocks x with number B replaced."""
    if B == 0:
        x = (block, x[1], x[2], x[3])
    elif B == 1:
        x = (x[0], block, x[2], x[3])
    elif B == 2:
        x = (x[0], x[1], block, x[3])
    else:
        x = (x[0], x[1], x[2], block)
    return x


@gluon.jit
def upper_factors(G, G_before, B: gl.constexpr, M: gl.constexpr, EARLY: gl.constexpr):
    """Return the factors of block B relative to the last token of block M; EARLY: without the token's own decay."""
    return boundary_factors(G_before[B] if EARLY else G[B], G[M])


@gluon.jit
def add_level_5(
    dq, dy, dk, G, G_before, P_s, A_s, q_s, e_s, k_s,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr,
):  # fmt: skip
    """Add the pairs of tokens 32 to 63 with tokens 0 to 31 to dq, -dy and dk."""
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([64, 16], gl.float32, ACC_N16)
    f0 = boundary_factors(G[0], G[1])
    f1 = boundary_factors(G[1], G[1])
    k0 = scale_block(load_block(k_s, 0), f0, dtype)
    k1 = scale_block(load_block(k_s, 1), f1, dtype)
    z2 = multiply_block(k1, P_s[5], 1, multiply_block(k0, P_s[5], 0, zeros, False), True)
    z3 = multiply_block(k1, P_s[6], 1, multiply_block(k0, P_s[6], 0, zeros, False), True)
    y2 = zeros
    y3 = zeros
    y2 = multiply_block(k1, A_s[5], 1, multiply_block(k0, A_s[5], 0, zeros, False), True)
    y3 = multiply_block(k1, A_s[6], 1, multiply_block(k0, A_s[6], 0, zeros, False), True)
    f2 = upper_factors(G, G_before, 2, 1, READ_EARLY)
    f3 = upper_factors(G, G_before, 3, 1, READ_EARLY)
    q2 = scale_block(load_block(q_s, 2), f2, dtype)
    q3 = scale_block(load_block(q_s, 3), f3, dtype)
    z0 = multiply_block(q3, P_s[5], 3, multiply_block(q2, P_s[5], 2, zeros, False), True)
    z1 = multiply_block(q3, P_s[6], 3, multiply_block(q2, P_s[6], 2, zeros, False), True)
    h2 = f2 if READ_EARLY == ERASE_EARLY else upper_factors(G, G_before, 2, 1, ERASE_EARLY)
    h3 = f3 if READ_EARLY == ERASE_EARLY else upper_factors(G, G_before, 3, 1, ERASE_EARLY)
    e2 = scale_block(load_block(e_s, 2), h2, dtype)
    e3 = scale_block(load_block(e_s, 3), h3, dtype)
    z0 = multiply_block(e3, A_s[5], 3, multiply_block(e2, A_s[5], 2, z0, True), True)
    z1 = multiply_block(e3, A_s[6], 3, multiply_block(e2, A_s[6], 2, z1, True), True)
    z0, z1, z2, z3, y2, y3, k0, k1, q2, q3, e2, e3 = warpgroup_mma_wait(
        0, deps=[z0, z1, z2, z3, y2, y3, k0, k1, q2, q3, e2, e3]
    )
    dy = (dy[0], dy[1], dy[2] + h2 * y2, dy[3] + h3 * y3)
    dq = (dq[0], dq[1], dq[2] + f2 * z2, dq[3] + f3 * z3)
    dk = (dk[0] + f0 * z0, dk[1] + f1 * z1, dk[2], dk[3])
    return dq, dy, dk


@gluon.jit
def add_level_4(
    dq, dy, dk, G, G_before, P_s, A_s, q_s, e_s, k_s, LOWER: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr,
):  # fmt: skip
    """Add the pairs of tokens of blocks LOWER + 1 and LOWER to dq, -dy and dk."""
    dtype: gl.constexpr = q_s.dtype
    UPPER: gl.constexpr = LOWER + 1
    zeros = gl.zeros([64, 16], gl.float32, ACC_N16)
    f = boundary_factors(G[LOWER], G[LOWER])
    a_k = scale_block(load_block(k_s, LOWER), f, dtype)
    z_upper = multiply_block(a_k, P_s[4], LOWER, zeros, False)
    y_upper = multiply_block(a_k, A_s[4], LOWER, zeros, False)
    f_read = upper_factors(G, G_before, UPPER, LOWER, READ_EARLY)
    a_q = scale_block(load_block(q_s, UPPER), f_read, dtype)
    z_lower = multiply_block(a_q, P_s[4], UPPER, zeros, False)
    f_erase = f_read if READ_EARLY == ERASE_EARLY else upper_factors(G, G_before, UPPER, LOWER, ERASE_EARLY)
    a_e = scale_block(load_block(e_s, UPPER), f_erase, dtype)
    z_lower = multiply_block(a_e, A_s[4], UPPER, z_lower, True)
    z_upper, y_upper, z_lower, a_k, a_q, a_e = warpgroup_mma_wait(0, deps=[z_upper, y_upper, z_lower, a_k, a_q, a_e])
    dy = replace(dy, UPPER, dy[UPPER] + f_erase * y_upper)
    dq = replace(dq, UPPER, dq[UPPER] + f_read * z_upper)
    dk = replace(dk, LOWER, dk[LOWER] + f * z_lower)
    return dq, dy, dk


@gluon.jit
def issue_block(
    G, G_before, P_s, A_s, q_s, e_s, k_s, upper, B: gl.constexpr, LEVEL: gl.constexpr,
    ERASE_KEY: gl.constexpr, ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr,
):  # fmt: skip
    """Issue the products of the pairs of a level below 4 in block B. Returns: products, factors, and A operands."""
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([64, 16], gl.float32, ACC_N16)
    f_read = level_factors(G[B], G_before[B], LEVEL, READ_EARLY)
    k = load_block(k_s, B)
    a_q = scale_block(select_pairs(upper, load_block(q_s, B), k, LEVEL), f_read, dtype)
    z = multiply_block(a_q, P_s[LEVEL], B, zeros, False)
    f_erase = f_read
    a_e = a_q
    y = z
    if READ_EARLY != ERASE_EARLY:
        f_erase = level_factors(G[B], G_before[B], LEVEL, ERASE_EARLY)
    e = select_pairs(upper, load_block(e_s, B), k, LEVEL) if ERASE_KEY else k
    a_e = scale_block(e, f_erase, dtype)
    y = multiply_block(a_e, A_s[LEVEL], B, zeros, False)
    return z, y, f_read, f_erase, a_q, a_e


@gluon.jit
def add_level(
    dq, dy, dk, G, G_before, P_s, A_s, q_s, e_s, k_s, FIRST: gl.constexpr, LEVEL: gl.constexpr,
    ERASE_KEY: gl.constexpr, ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr,
):  # fmt: skip
    """Add the pairs of a level below 4 in blocks FIRST and FIRST + 1 to dq, -dy and dk."""
    SECOND: gl.constexpr = FIRST + 1
    upper = (((gl.arange(0, 16, N16_COLUMNS) >> LEVEL) & 1) != 0)[None, :] & (gl.arange(0, 64, N16_ROWS) >= 0)[:, None]
    z0, y0, f0, h0, q0, e0 = issue_block(
        G, G_before, P_s, A_s, q_s, e_s, k_s, upper, FIRST, LEVEL, ERASE_KEY, ERASE_EARLY, READ_EARLY
    )  # fmt: skip
    z1, y1, f1, h1, q1, e1 = issue_block(
        G, G_before, P_s, A_s, q_s, e_s, k_s, upper, SECOND, LEVEL, ERASE_KEY, ERASE_EARLY, READ_EARLY
    )  # fmt: skip
    z0, y0, z1, y1, q0, e0, q1, e1 = warpgroup_mma_wait(0, deps=[z0, y0, z1, y1, q0, e0, q1, e1])
    dq0, dk0 = add_halves(dq[FIRST], dk[FIRST], upper, f0, z0)
    dq1, dk1 = add_halves(dq[SECOND], dk[SECOND], upper, f1, z1)
    dy0, dk0 = add_halves(dy[FIRST], dk0, upper, h0, y0)
    dy1, dk1 = add_halves(dy[SECOND], dk1, upper, h1, y1)
    dy = replace(replace(dy, FIRST, dy0), SECOND, dy1)
    dq = replace(replace(dq, FIRST, dq0), SECOND, dq1)
    dk = replace(replace(dk, FIRST, dk0), SECOND, dk1)
    return dq, dy, dk


@gluon.jit
def last_token(x):
    """Return the last column of x [64, 16]."""
    j = gl.arange(0, 16, N16_COLUMNS)[None, :]
    return gl.sum(gl.where(j == 15, x, 0.0), 1)


@gluon.jit
def scale_read(x, G, scale):
    """Return x 2^G scale."""
    return (
        x[0] * (exp2_ftz(G[0]) * scale), x[1] * (exp2_ftz(G[1]) * scale), x[2] * (exp2_ftz(G[2]) * scale),
        x[3] * (exp2_ftz(G[3]) * scale),
    )  # fmt: skip


@gluon.jit
def scale_write(x, G):
    """Return x 2^(Gend - G)."""
    return (
        x[0] * boundary_factors(G[0], G[3]), x[1] * boundary_factors(G[1], G[3]), x[2] * boundary_factors(G[2], G[3]),
        x[3] * boundary_factors(G[3], G[3]),
    )  # fmt: skip


@gluon.jit
def store_transposed(base, x, stride: gl.constexpr, rows, columns, MASK_COLUMNS: gl.constexpr):
    """Store x^T in the dtype of `base`, for x [64 channels, 64 tokens] in the layout ACC."""
    dtype: gl.constexpr = base.dtype.element_ty
    staging = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
    staging.permute((1, 0)).store(to_16_bits(x, dtype))
    store_tile(base, staging, stride, rows, columns, True, MASK_COLUMNS)


@gluon.jit(do_not_specialize=["N", "slots", "num_scratch_slots", "T", "window", "windows"])
def hopper_channel_gradients_kernel(
    q, k, e, v, log_decay, b, w, do, states, dstates, xs, du, dq, dk, de, dlog_decay, dgates, partial, cu, N,
    slots, num_scratch_slots, scale, T, window, windows,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr,
    ERASE_KEY: gl.constexpr, ERASE_CHANNELS: gl.constexpr, ERASE: gl.constexpr,
    WRITE: gl.constexpr, STORED_DU: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr, HAS_STATE: gl.constexpr, PACKED: gl.constexpr,
    MIN_BETA: gl.constexpr, UNIT: gl.constexpr, IN_GRADIENTS: gl.constexpr,
):  # fmt: skip
    """Parameters and results as in ../channel/gradients.py; see the first lines for IN_GRADIENTS."""
    gl.static_assert(C == 64 and BK == 64 and V <= 512)
    gl.static_assert(states.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    NK: gl.constexpr = (K + BK - 1) // BK
    NV: gl.constexpr = (V + 63) // 64
    NUM_STAGES: gl.constexpr = min(NV, 2)
    GROUP: gl.constexpr = HV // H
    MASK_K: gl.constexpr = K % 64 != 0
    STATE_STEP: gl.constexpr = 0 if IN_GRADIENTS else 64 * K
    gl.static_assert(not IN_GRADIENTS or (V == 128 and K % 64 == 0 and GROUP == 1 and not PACKED))
    RECOVER_DU: gl.constexpr = WRITE and not STORED_DU  # du holds dv = b du
    ANY_EARLY: gl.constexpr = READ_EARLY or ERASE_EARLY
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
        gate_row = tile.to(gl.int64) * slots * HV + slot.to(gl.int64) * HV + hv
        dgates_at = dgates + gate_row * 3 * C

        S_s = allocate_tiles(dtype, NUM_STAGES)
        dS_s = allocate_tiles(dtype, NUM_STAGES)
        x_s = allocate_tiles(dtype, NUM_STAGES)
        do_s = allocate_tiles(dtype, NUM_STAGES)
        du_s = allocate_tiles(dtype, NUM_STAGES)
        q_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        k_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE)
        e_s = gl.allocate_shared_memory(dtype, [64, 64], SMEM_TILE) if ERASE_KEY else k_s
        do_at = copy_pointers(do + value, HV * V)
        du_at = copy_pointers(du + (local_value if STORED_DU else value), HV * V)
        x_at = copy_pointers(xs + local_value, HV * V)
        if IN_GRADIENTS:
            S_at = copy_pointers(states + ((token * HV + hv) * (2 * K) + 2 * column), 2 * HV * K)
            dS_at = copy_pointers(dq + key, HV * K)
        else:
            S_at = copy_pointers(states + scratch_row * V * K + column, K)
            dS_at = copy_pointers(dstates + scratch_row * V * K + column, K)
        buffers = (do_s, du_s, x_s, S_s, dS_s)
        pointers = (do_at, du_at, x_at, S_at, dS_at)
        for tv in gl.static_range(NUM_STAGES):
            if IN_GRADIENTS and tv == 1:
                pointers = (do_at, du_at, x_at, S_at + 64, copy_pointers(dk + key, HV * K))
            copy_value_tile(buffers, pointers, tv, tokens_left, column, K, V, True, STATE_STEP)
        copy_tile_async(k_s, copy_pointers(k + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        copy_tile_async(q_s, copy_pointers(q + key, H * K), 0, tokens_left, K - column, True, MASK_K)
        if ERASE_KEY:
            e_at = copy_pointers(e + key, H * K)
            copy_tile_async(e_s, e_at, 0, tokens_left, K - column, True, MASK_K)
        async_copy.commit_group()

        i = gl.arange(0, C, gl.SliceLayout(1, BY_KEY))
        ks = gl.arange(0, BK, gl.SliceLayout(0, BY_KEY))
        # split so that the addresses of one thread differ by constants
        first_channel = (token * HV + hv) * K + column + ((i // 32 * (32 * HV * K))[:, None] + ks[None, :])
        at_token = (i % 32 * (HV * K))[:, None]
        in_channel = (i < tokens_left)[:, None]
        if MASK_K:
            in_channel = in_channel & (ks < K - column)[None, :]
        barrier()  # ptxas would issue the loads of g before the copies
        g = gl.load(log_decay + first_channel + at_token, mask=in_channel, other=0.0)

        t = gl.arange(0, C, ACC_ROWS)
        j = gl.arange(0, C, ACC_COLUMNS)
        in_sequence = t < tokens_left
        erase_s = gl.allocate_shared_memory(gl.float32, [64], SMEM_VECTOR)
        if ERASE:
            erase = gl.load(b + (token + t) * HV + hv, mask=in_sequence, other=0.0).to(gl.float32)
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
        # The buffers are dependencies too: the compiler would treat them as free from the issue of the wgmmas on.
        dq_tile, dP, dy_tile, dA, dk_tile, _, _, _, _, _ = warpgroup_mma_wait(
            0, deps=[dq_tile, dP, dy_tile, dA, dk_tile, S_t, dS_t, x_t, do_t, du_t]
        )
        async_copy.wait_group(0)  # of k, q and e; wgmma does not read them
        if ERASE_CHANNELS:  # the strengths become erase keys
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
        if not READ_EARLY:
            diagonal_s.store(gl.sum(gl.where(t[:, None] == j[None, :], dP, 0.0), 1))
        P_s = allocate_pair_tiles(dtype)
        store_pairs(dP, dP, P_s)
        A_s = allocate_pair_tiles(dtype)
        if RECOVER_DU:  # dA is dv x^T so far
            gl.store(dgates_at + 2 * C + t, gl.sum(gl.where(t[:, None] == j[None, :], dA, 0.0), 1))
            store_pairs(-dA, dA * (1.0 / clamp_away_from_zero(erase, MIN_BETA))[:, None], A_s)
            dy_tile *= (1.0 / clamp_away_from_zero(erase_s.load(ACC_COLUMNS), MIN_BETA))[None, :]
        else:
            store_pairs(-dA * erase[:, None] if ERASE else -dA, dA, A_s)
        fence_async_shared()
        barrier()
        G, G_before = load_decays(G_s, G_before_s, ANY_EARLY)
        G_read = G_before if READ_EARLY else G
        G_erase = G_before if ERASE_EARLY else G
        dq_parts = split_blocks(dq_tile)
        dk_parts = split_blocks(dk_tile)
        dy_parts = split_blocks(dy_tile)
        dq_parts = scale_read(dq_parts, G_read, scale)
        dy_parts = scale_read(dy_parts, G_erase, 1.0)
        dk_parts = scale_write(dk_parts, G)
        state_product *= gl.exp2(last_token(G[3]))
        for block in gl.static_range(4):
            state_product += gl.sum(to_float32(load_block(k_s, block)) * dk_parts[block], 1)
        product_s = gl.allocate_shared_memory(gl.float32, [64], SMEM_VECTOR)
        product_s.store(state_product)

        # Each level is a loop of one iteration: in one basic block ptxas would delay the last sums of all levels to the
        # end, which spills.
        once = gl.where(windows > 0, 1, 0)
        for _ in range(0, once):
            if ANY_EARLY:  # twice as many registers as G alone
                G, G_before = load_decays(G_s, G_before_s, ANY_EARLY)
            dq_parts, dy_parts, dk_parts = add_level_5(
                dq_parts, dy_parts, dk_parts, G, G_before, P_s, A_s, q_s, e_s, k_s, ERASE_EARLY, READ_EARLY
            )  # fmt: skip
        for half in gl.static_range(2):
            for _ in range(0, once):
                if ANY_EARLY:  # twice as many registers as G alone
                    G, G_before = load_decays(G_s, G_before_s, ANY_EARLY)
                dq_parts, dy_parts, dk_parts = add_level_4(
                    dq_parts, dy_parts, dk_parts, G, G_before, P_s, A_s, q_s, e_s, k_s, 2 * half, ERASE_EARLY,
                    READ_EARLY,
                )  # fmt: skip
        for level in gl.static_range(4):
            for half in gl.static_range(2):
                for _ in range(0, once):
                    if ANY_EARLY:  # twice as many registers as G alone
                        G, G_before = load_decays(G_s, G_before_s, ANY_EARLY)
                    dq_parts, dy_parts, dk_parts = add_level(
                        dq_parts, dy_parts, dk_parts, G, G_before, P_s, A_s, q_s, e_s, k_s, 2 * half, 3 - level,
                        ERASE_KEY, ERASE_EARLY, READ_EARLY,
                    )  # fmt: skip

        dq_tile = join_blocks(dq_parts)
        dk_tile = join_blocks(dk_parts)
        q_tile = to_float32(q_s.permute((1, 0)).load(ACC))
        k_tile = to_float32(k_s.permute((1, 0)).load(ACC))
        q_dq = q_tile * dq_tile
        late_terms = -k_tile * dk_tile
        if not READ_EARLY:
            late_terms += q_dq
        dy_tile = join_blocks(dy_parts)
        erase_j = erase_s.load(ACC_COLUMNS)
        e_tile = to_float32(e_s.permute((1, 0)).load(ACC)) if ERASE_KEY else k_tile
        e_de = e_tile * dy_tile
        if ERASE:
            e_de *= erase_j[None, :]
        if not ERASE_EARLY:
            late_terms -= e_de
        if ERASE_CHANNELS:  # the strengths again, for dk
            barrier()
            copy_tile_async(e_s, e_at, 0, tokens_left, K - column, True, MASK_K)
            async_copy.commit_group()
        terms_s = gl.allocate_shared_memory(gl.float32, [64, 64], SMEM_BY_TOKEN)
        terms_s.store(late_terms)
        dg = sum_from_token(terms_s.permute((1, 0)).load(BY_KEY)) + product_s.load(gl.SliceLayout(0, BY_KEY))[None, :]
        if ANY_EARLY:
            early_terms = gl.zeros([BK, C], gl.float32, ACC)
            if READ_EARLY:
                early_terms += q_dq
            if ERASE_EARLY:
                early_terms -= e_de
            early_s = gl.allocate_shared_memory(gl.float32, [64, 64], SMEM_BY_TOKEN)
            early_s.store(early_terms)
            early_terms = early_s.permute((1, 0)).load(BY_KEY)
            dg += sum_from_token(early_terms) - early_terms
        if not HAS_STATE:  # the first decay of a sequence scales nothing
            dg = gl.where((c * C + i > 0)[:, None], dg, 0.0)
        gl.store(dlog_decay + first_channel + at_token, dg, mask=in_channel)
        if not READ_EARLY:
            diagonal = diagonal_s.load(ACC_COLUMNS)[None, :]
            dq_tile += diagonal * k_tile
            dk_tile += diagonal * q_tile

        if GROUP > 1:
            partial_size = num_scratch_slots.to(gl.int64) * C * HV * K
            dq_at = partial + (scratch_slot.to(gl.int64) * C * HV + hv) * K + column
            dk_at = dq_at + partial_size
            de_at = dk_at + partial_size
        else:
            dq_at = dq + key
            dk_at = dk + key
            de_at = de + key if ERASE_KEY else dk_at
        store_transposed(dq_at, dq_tile, HV * K, tokens_left, K - column, MASK_K)
        if ERASE:
            dy_tile *= -clamp_away_from_zero(erase_j, MIN_BETA)[None, :]
            gl.store(dgates_at + C + j, gl.sum(e_tile * dy_tile, 0))
        else:
            dy_tile = -dy_tile
        if ERASE_CHANNELS:
            async_copy.wait_group(0)
            barrier()
            dk_tile += to_float32(e_s.permute((1, 0)).load(ACC)) * dy_tile
            dy_tile *= to_float32(k_s.permute((1, 0)).load(ACC))
        if ERASE_KEY:
            store_transposed(de_at, dy_tile, HV * K, tokens_left, K - column, MASK_K)
        else:
            dk_tile += dy_tile
        store_transposed(dk_at, dk_tile, HV * K, tokens_left, K - column, MASK_K)
        if WRITE and not RECOVER_DU:
            store_write_sums(dgates_at, v, value, du, local_value, tile, tokens_left, HV, V, NK)
