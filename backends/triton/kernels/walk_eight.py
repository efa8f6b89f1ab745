"""The reverse scan with the gradients for Hopper GPUs, in Gluon, by eight warps of one text: as walk_hopper.py.

What a reverse scan finds of a chunk is what its gradients start from. Here neither the gradient of the state nor du
goes to memory, and what both read is read once. Two warp groups walk in step: of the scan each has half of the values
and its half of dS^T in registers, of the gradients half of the keys. What one needs of the other goes through shared
memory, with three barriers a chunk. A third warp group copies chunk after chunk ahead of time. It takes operands and
scratch of one 16-bit dtype, chunks of 64, 65 to 128 keys and values a head, and k as the erase key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltazoo.backends.triton.kernels.hopper import (
    SHARED_LINE,
    SHARED_TILE,
    WALKERS,
    barrier,
    barriers,
    fetch_gates,
    fetch_square,
    free,
    narrow,
    ring,
    ring_of_lines,
    tell,
    widen,
)
from deltazoo.backends.triton.kernels.layout import (
    first_slot,
    held_off,
    segment_of,
    sequence_and_part,
    sequence_bounds,
)

BUFFERS = gl.constexpr(2)  # of what the reverse scan takes of a chunk: that of the next is copied meanwhile
# products: of dS^T [values, keys], and [values, tokens], a warp has 16 values; of [tokens, keys], and [tokens, tokens],
# a warp group has half of the columns, and a warp 16 tokens
STATE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
PIECE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 16, 16]))
KEYS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 64, 16]))
PAIRS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, VALUES.value, 2))
LEFT_STATE = gl.constexpr(gl.DotOperandLayout(0, STATE.value, 2))
STATE_COLUMNS = gl.constexpr(gl.SliceLayout(0, STATE.value))
TOKENS = gl.constexpr(gl.SliceLayout(0, VALUES.value))  # columns of [values, tokens]
ROWS = gl.constexpr(gl.SliceLayout(1, KEYS.value))
PAIR_ROWS = gl.constexpr(gl.SliceLayout(1, PAIRS.value))
PAIR_COLUMNS = gl.constexpr(gl.SliceLayout(0, PAIRS.value))
# the same tiles as [tokens, halves, columns of a half], whose sums over the last a warp has for itself
OF_KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0], [0, 1, 0]], [], [64, 2, 64],
    )
)  # fmt: skip
OF_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0], [0, 1, 0]], [], [64, 2, 32],
    )
)  # fmt: skip
OF_COPY = gl.constexpr(gl.BlockedLayout([1, 1, 8], [4, 1, 8], [4, 2, 1], [2, 1, 0]))
# how a product goes to memory: as hopper.OUT; of dv once its blocks of 8 x 8 are transposed
OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 64]], [], [64, 128],
    )
)  # fmt: skip
ACROSS_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 8], [0, 16], [0, 32]], [[8, 0], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]], [], [128, 64],
    )
)  # fmt: skip
COPY = gl.constexpr(gl.BlockedLayout([8, 1, 8], [1, 2, 16], [1, 4, 1], [2, 1, 0]))
R_COPY = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, COPY.value)))
T_COPY = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, COPY.value)))
J_COPY = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, COPY.value)))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
FEW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SUMS = gl.constexpr(gl.BlockedLayout([2, 4], [1, 32], [1, 8], [1, 0]))
SHARED_SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def hidden_zero(back, BITS: gl.constexpr):
    """0, which the compiler does not know: it would compute where each tile lies once, before the loop, and have no
    registers for so much; what is spilled goes through L2, since shared memory leaves L1 next to nothing."""
    return back >> BITS


@gluon.jit
def number(numbers_s, WHICH: gl.constexpr):
    """One of a chunk's numbers, as the copying warp group left them."""
    return gl.sum(numbers_s.slice(WHICH, 1).load(ONE), 0)


@gluon.jit
def of_halves(x, layout: gl.constexpr):
    """Sums over each half of the columns of a tile [64 tokens, columns]: [64, 2]."""
    halves = gl.reshape(x, [64, 2, x.shape[1] // 2])
    return gl.sum(gl.convert_layout(halves, layout, assert_trivial=True), 2)


@gluon.jit
def put_halves(base, apart, x, layout: gl.constexpr):
    """Write sums [64, 2] of halves, those of the second `apart` from those of the first."""
    t = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    gl.store(base + half * apart + t, x)


@gluon.jit
def of_copy(base, zero, stride: gl.constexpr, ROWS_OF: gl.constexpr):
    """Where rows r * 8 + t, columns j, of a tile of 128 columns are, as [r, t, j]: a thread's r are constants apart."""
    t = gl.arange(0, 8, T_COPY)
    j = gl.arange(0, 128, J_COPY)
    first = base + (t[None, :, None] * stride + j[None, None, :] + zero * 64)
    return first + (gl.arange(0, ROWS_OF // 8, R_COPY) * (8 * stride))[:, None, None]


@gluon.jit
def fetch(tile, at, rows, columns, MASK_ROWS: gl.constexpr, MASK_COLUMNS: gl.constexpr):
    """Copy a tile of 128 columns of a row-major matrix to shared memory; zeros from `rows` and `columns` on."""
    R: gl.constexpr = tile.shape[0] // 8
    tile = tile.reshape([R, 8, 128])
    in_rows = gl.arange(0, R, R_COPY)[:, None, None] * 8 + gl.arange(0, 8, T_COPY)[None, :, None] < rows
    in_columns = gl.arange(0, 128, J_COPY)[None, None, :] < columns
    if MASK_ROWS and MASK_COLUMNS:
        async_copy.async_copy_global_to_shared(tile, at, mask=in_rows & in_columns)
    elif MASK_ROWS:
        async_copy.async_copy_global_to_shared(tile, at, mask=in_rows)
    elif MASK_COLUMNS:
        async_copy.async_copy_global_to_shared(tile, at, mask=in_columns)
    else:
        async_copy.async_copy_global_to_shared(tile, at)


@gluon.jit
def put(base, tile, stride: gl.constexpr, rows, columns, MASK_COLUMNS: gl.constexpr):
    """Write a float32 tile [64 tokens, 128 keys] of a product up to `rows` and `columns`, in base's dtype."""
    out = gl.convert_layout(narrow(tile, base.dtype.element_ty), OUT)
    t = gl.arange(0, 64, gl.SliceLayout(1, OUT))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, OUT))[None, :]
    # what differs within a thread are constants
    at = base + ((t // 16 * 16 + t % 8) * stride + (j // 64 * 64 + j % 16))
    at = at + (t // 8 % 2 * (8 * stride) + j // 16 % 4 * 16)
    inside = t < rows
    if MASK_COLUMNS:
        inside = inside & (j < columns)
    gl.store(at, out, mask=inside)


@gluon.jit
def put_across(base, tile, zero, stride: gl.constexpr, rows, columns, MASK_COLUMNS: gl.constexpr):
    """Write a narrow tile [128 columns, 64 rows] of a product transposed, up to `rows` and `columns`."""
    # each block of 8 x 8 transposed: of the tile's element [8 a + r, 8 b + c] there is what was [8 a + c, 8 b + r]
    across = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=True, pack=2
    )
    out = gl.convert_layout(across, ACROSS_OUT)
    x = gl.arange(0, 128, gl.SliceLayout(1, ACROSS_OUT))[:, None]
    y = gl.arange(0, 64, gl.SliceLayout(0, ACROSS_OUT))[None, :]
    column = x // 8 * 8 + y % 8
    at = base + (x % 8 * stride + column + zero * 64)
    at = at + y // 8 * (8 * stride)
    inside = x % 8 < rows - y // 8 * 8
    if MASK_COLUMNS:
        inside = inside & (column < columns)
    gl.store(at, out, mask=inside)


@gluon.jit
def fetch_first(
    q, k, do, gates, squares, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, stage,
    numbers_s, z, row, left, place, local, h, hv,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr, DELTA: gl.constexpr,
    WRITE: gl.constexpr, EARLY: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Copy what the reverse scan takes of a chunk, in two groups: k, do, P^T and the gates; then q and T.

    Leave its row of values, its row of keys, its place and how many tokens are left, which the others would spill."""
    key = (row * H + h) * K
    i = gl.arange(0, 4, FEW)
    of_keys = local * 64 * HV + hv if HV > H else row * H + h
    numbers = gl.where(i == 0, row * HV + hv, of_keys)
    numbers = gl.where(i == 2, place, numbers)
    numbers_s.index(stage).store(gl.where(i == 3, left.to(gl.int64), numbers))
    fetch(k_s.index(stage), of_copy(k + key, z, H * K, 64), left, K, True, K % 128 != 0)
    fetch(do_s.index(stage), of_copy(do + (row * HV + hv) * V, z, HV * V, 64), left, V, True, V % 128 != 0)
    fetch_gates(
        gates + place * 192, G_s.index(stage), before_s.index(stage), c_s.index(stage), w_s.index(stage),
        DECAY, EARLY, DELTA, WRITE,
    )  # fmt: skip
    if DELTA:
        square = squares + place * (64 * 72)
        fetch_square(P_s.index(stage), square.to(gl.pointer_type(dtype), bitcast=True), False)
    async_copy.commit_group()
    fetch(q_s.index(stage), of_copy(q + key, z, H * K, 64), left, K, True, K % 128 != 0)
    if DELTA:
        fetch_square(T_s.index(stage), square, True)
    async_copy.commit_group()


@gluon.jit
def copy_chunks(
    q, k, do, gates, squares, states, xs, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s,
    numbers_s, came, rest_came, states_came, done, walked, start, length, slot, first_chunk, first, last, first_place,
    hv,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr, DELTA: gl.constexpr,
    WRITE: gl.constexpr, EARLY: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The copying warp group: the chunks from the last to the first; of each its state and x once the others have done
    with those of the chunk after it, and then what the scan takes of the one before it."""
    h = hv // (HV // H)
    c = last - 1
    fetch_first(
        q, k, do, gates, squares, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, 0,
        numbers_s, 0, start + c * 64, length - c * 64, (slot + c).to(gl.int64) * HV + hv,
        (first_place + c - first_chunk).to(gl.int64), h, hv,
        H, HV, K, V, DECAY, DELTA, WRITE, EARLY, dtype,
    )  # fmt: skip
    tell(came.index(0), 1, True)
    tell(rest_came.index(0), 0, True)
    for back in range(0, last - first):
        c = last - 1 - back
        row = start + c * 64
        local = (first_place + c - first_chunk).to(gl.int64)
        mbarrier.wait(walked, (back & 1) ^ 1)
        z = hidden_zero(back, 20)
        at = of_copy(states + (local * HV + hv) * V * K, z, K, 128)
        fetch(S_s.index(z), at, V, K, V % 128 != 0, K % 128 != 0)
        x_row = local * 64 if DELTA else row
        x_at = of_copy(xs + (x_row * HV + hv) * V, z, HV * V, 64)
        fetch(x_s.index(z), x_at, length - c * 64, V, not DELTA, V % 128 != 0)
        async_copy.commit_group()
        tell(states_came, 0, True)
        mbarrier.wait(done, (back & 1) ^ 1)
        stage = 1 - back % 2
        if c > first:
            fetch_first(
                q, k, do, gates, squares, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, stage,
                numbers_s, z, row - 64, length - (c - 1) * 64, (slot + c - 1).to(gl.int64) * HV + hv, local - 1, h, hv,
                H, HV, K, V, DECAY, DELTA, WRITE, EARLY, dtype,
            )  # fmt: skip
            tell(came.index(stage), 1, True)
            tell(rest_came.index(stage), 0, True)


@gluon.jit
def reverse_chunk(
    dS, squares, dv, scale, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, dS_s, du_s, x_s, low_s, sums_s,
    numbers_s, came, rest_came, states_came, z, stage, phase, odd, kepts, apart, kept_wanted,
    HV: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr, DELTA: gl.constexpr,
    WRITE: gl.constexpr, READ_EARLY: gl.constexpr, SHARED: gl.constexpr, LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """A step of the reverse scan: dS^T before the chunk.

    In shared memory then lie dS', du with an erase, and without one P and dP. do x^T and do S^T are still under way."""
    low = narrow(dS, dtype)
    mbarrier.wait(came.index(stage), phase)
    # here, where no product is under way: else the compiler waits for those that are
    if DECAY != "none":
        end = G_s.index(stage).slice(63, 1).load(STATE_COLUMNS)
        dS0 = dS * gl.exp2(end)[None, :]
    else:
        dS0 = dS
    # dx = scale P'^T do + (e^(Gend - G) k) dS'
    dx = gl.zeros([128, 64], gl.float32, VALUES)
    left_S = gl.convert_layout(low, LEFT, assert_trivial=True)
    dx = warpgroup_mma(left_S, k_s.index(stage).permute((1, 0)), dx, use_acc=False, is_async=True)
    do_T = do_s.index(stage).permute((1, 0))
    left_do = do_T.load(LEFT)
    of_reads = gl.zeros([128, 64], gl.float32, VALUES)
    inter_q = gl.zeros([64, 128], gl.float32, KEYS)
    if DELTA:
        of_reads = warpgroup_mma(do_T, P_s.index(stage).permute((1, 0)), of_reads, use_acc=False, is_async=True)
    if DECAY != "none":
        G = G_s.index(stage).load(TOKENS)
        G_read = before_s.index(stage).load(TOKENS) if READ_EARLY else G
    do_tile = widen(gl.convert_layout(left_do, VALUES, assert_trivial=True))
    if DECAY != "none":
        do_tile *= (gl.exp2(G_read) * scale)[None, :]
    else:
        do_tile *= scale
    left_doq = gl.convert_layout(narrow(do_tile, dtype), LEFT_STATE, assert_trivial=True)
    # all have done with the chunk after this one; here, where the compiler wants a barrier between the two waits
    barrier()
    mbarrier.wait(rest_came.index(stage), phase)
    if not DELTA:
        # dP and P
        mbarrier.wait(states_came, odd)
        d_square = gl.zeros([64, 64], gl.float32, PAIRS)
        d_square = warpgroup_mma(
            do_s.index(stage), x_s.index(z).permute((1, 0)), d_square, use_acc=False, is_async=True
        )
        square = gl.zeros([64, 64], gl.float32, PAIRS)
        square = warpgroup_mma(q_s.index(stage), k_s.index(stage).permute((1, 0)), square, use_acc=False, is_async=True)
    # e^Gend dS' + scale (e^G'' q)^T do
    dS = warpgroup_mma(left_doq, q_s.index(stage), dS0, is_async=True)
    if DECAY != "none" and not DELTA:
        put_kept(kepts + number(numbers_s.index(stage), 2), apart, sums_s, kept_wanted)
    dS_s.index(z).store(low)
    if DECAY != "none":
        fade = gl.exp2(G_s.index(stage).slice(63, 1).load(TOKENS) - G_s.index(stage).load(TOKENS))
    if WRITE:
        write = w_s.index(stage).load(TOKENS)
        if SHARED or not DELTA:
            write = held_off(write, LEAST)
    if DELTA:
        dx, of_reads, _ = warpgroup_mma_wait(1, deps=[dx, of_reads, low])
        if DECAY != "none":
            dx = dx * fade[None, :] + of_reads
        else:
            dx += of_reads
        # du = T^T dx
        if squares.dtype.element_ty == gl.float16 and dtype != gl.float16:
            largest = gl.max(gl.abs(dx), 1).to(gl.int32, bitcast=True)
            exponent = gl.minimum(largest & 0x7F800000, 0x7E800000)
            dx *= (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, None]
            up = exponent.to(gl.float32, bitcast=True)[:, None]
        left_x = gl.convert_layout(narrow(dx, squares.dtype.element_ty), LEFT, assert_trivial=True)
        dx = gl.zeros([128, 64], gl.float32, VALUES)
        dx = warpgroup_mma(left_x, T_s.index(stage), dx, use_acc=False, is_async=True)
        erase = c_s.index(stage).load(TOKENS)
        mbarrier.wait(states_came, odd)
        intra_q = gl.zeros([64, 64], gl.float32, PAIRS)
        intra_q = warpgroup_mma(do_s.index(stage), x_s.index(z).permute((1, 0)), intra_q, use_acc=False, is_async=True)
        dx, left_x, left_doq = warpgroup_mma_wait(1, deps=[dx, left_x, left_doq])
        if squares.dtype.element_ty == gl.float16 and dtype != gl.float16:
            dx *= up
        # - (c e)^T du
        left_e = gl.convert_layout(narrow(dx * -erase[None, :], dtype), LEFT_STATE, assert_trivial=True)
        dS = warpgroup_mma(left_e, k_s.index(stage), dS, is_async=True)
        inter_q = warpgroup_mma(do_s.index(stage), S_s.index(z), inter_q, use_acc=False, is_async=True)
    else:
        dx, d_square, square, _ = warpgroup_mma_wait(1, deps=[dx, d_square, square, low])
        i = gl.arange(0, 64, PAIR_ROWS)[:, None]
        j = gl.arange(0, 64, PAIR_COLUMNS)[None, :]
        if DECAY != "none":
            G_i = before_s.index(stage).load(PAIR_ROWS) if READ_EARLY else G_s.index(stage).load(PAIR_ROWS)
            # where a token is not seen this may be no number
            faded = gl.exp2(G_i[:, None] - G_s.index(stage).load(PAIR_COLUMNS)[None, :]) * scale
            square *= faded
            d_square *= faded
        else:
            square *= scale
            d_square *= scale
        if WRITE:
            d_square *= held_off(w_s.index(stage).load(PAIR_COLUMNS), LEAST)[None, :]
        seen = i >= j + (1 if READ_EARLY else 0)
        P_s.index(stage).store(narrow(gl.where(seen, square, 0.0), dtype))
        low_s.index(stage).store(narrow(gl.where(seen, d_square, 0.0), dtype))
        fence_async_shared()
        barrier()
        of_reads = warpgroup_mma(do_T, P_s.index(stage), of_reads, use_acc=False, is_async=True)
        of_reads, dS, left_doq = warpgroup_mma_wait(0, deps=[of_reads, dS, left_doq])
        inter_q = warpgroup_mma(do_s.index(stage), S_s.index(z), inter_q, use_acc=False, is_async=True)
        if DECAY != "none":
            dx = dx * fade[None, :] + of_reads
        else:
            dx += of_reads
        intra_q = d_square
    if DELTA and not SHARED:
        du_s.index(z).store(narrow(dx, dtype))
    if WRITE:
        dx *= write[None, :]
    dvalue = narrow(dx, dtype)
    if DELTA and SHARED:
        du_s.index(z).store(dvalue)
    numbers = numbers_s.index(stage)
    left = number(numbers, 3).to(gl.int32)
    put_across(dv + number(numbers, 0) * V, dvalue, z, HV * V, left, V, V % 128 != 0)
    if DELTA:
        stores_first(left)
        dS, left_e = warpgroup_mma_wait(1, deps=[dS, left_e])
        if DECAY != "none":
            keep_before(dS, S_s.index(z), sums_s)
        fence_async_shared()
        barrier()
    return dS, intra_q, inter_q


@gluon.jit
def stores_first(number):
    """Have the assembler not wait for products before what is stored above: it would move the wait up."""
    text: gl.constexpr = "bar.warp.sync 0xffffffff;\nmov.b32 $0, $1;"
    gl.inline_asm_elementwise(text, "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_before(dS, S_s, sums_s):
    """<dS', S'> of the chunk before, whose S' is this one's state, as the sums of each warp."""
    sums_s.store(of_values(gl.sum(dS * widen(S_s.load(STATE)), 1)))


@gluon.jit
def put_kept(at_kept, apart, sums_s, wanted):
    """Write the sums of each half of the warps."""
    half = gl.arange(0, 2, gl.SliceLayout(1, SUMS))
    gl.store(at_kept + half * apart, gl.sum(sums_s.load(SUMS), 1), mask=(half < 2) & wanted)


@gluon.jit
def of_values(x):
    """Of a number for each of 128 values the sums [2, 4] of each warp."""
    return gl.sum(gl.reshape(x, [2, 4, 16]), 2)


@gluon.jit
def keep_end(G_s, dk_stored, S_s, dS_s, k_s, sums_s, at_kept, apart, z, stage):
    """<dS', S'> of the last chunk of a sequence, whose S' = e^Gend S + (e^(Gend - G) k)^T x nobody keeps."""
    kept = gl.zeros([128, 16], gl.float32, PIECE)
    for piece in gl.static_range(8):
        S_p = S_s.index(z).slice(piece * 16, 16, dim=1).load(PIECE)
        dS_p = dS_s.index(z).slice(piece * 16, 16, dim=1).load(PIECE)
        kept += widen(S_p) * widen(dS_p)
    rows = of_values(gl.sum(kept, 1) * gl.exp2(G_s.slice(63, 1).load(gl.SliceLayout(1, PIECE))))
    stored = of_halves(widen(k_s.index(stage).load(KEYS)) * dk_stored, OF_KEYS)
    stored = gl.permute(gl.sum(gl.reshape(stored, [4, 16, 2]), 1), (1, 0))
    sums_s.store(rows + gl.convert_layout(stored, rows.type.layout, assert_trivial=True))
    barrier()
    put_kept(at_kept, apart, sums_s, True)
    barrier()


@gluon.jit
def chunk_gradients(
    dS, intra_q, inter_q, v, b, dq, dk, dgates, kepts, partial, scale,
    k_s, q_s, do_s, T_s, P_s, G_s, before_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s, numbers_s,
    walked, z, stage, segments, slots, held, is_last, has_before,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr,
    DELTA: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr, ERASE_EARLY: gl.constexpr,
    READ_EARLY: gl.constexpr, SHARED: gl.constexpr, LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The gradients of a chunk."""
    EARLY: gl.constexpr = ERASE_EARLY or READ_EARLY
    GATE_ROWS: gl.constexpr = 4 if EARLY else 3
    FIRST: gl.constexpr = 1 if READ_EARLY else 0
    NARROW_K: gl.constexpr = K % 128 != 0
    apart = slots.to(gl.int64) * HV  # from what a gate has of the first half of the keys to what it has of the second
    of_gate = apart * (GATE_ROWS * 64)
    numbers = numbers_s.index(stage)
    place = number(numbers, 2)
    left = number(numbers, 3).to(gl.int32)
    at_gate = dgates + place * (GATE_ROWS * 64)
    k_t = k_s.index(stage)
    q_t = q_s.index(stage)
    if DELTA:
        du_T = du_s.index(z).permute((1, 0))
        intra_e = gl.zeros([64, 64], gl.float32, PAIRS)
        intra_e = warpgroup_mma(du_T, x_s.index(z).permute((1, 0)), intra_e, use_acc=False, is_async=True)
    dk_stored = gl.zeros([64, 128], gl.float32, KEYS)
    dk_stored = warpgroup_mma(x_s.index(z), dS_s.index(z), dk_stored, use_acc=False, is_async=True)
    at_kept = kepts + place
    if DECAY != "none" and DELTA:
        put_kept(at_kept - HV, apart, sums_s, has_before)
    if DECAY != "none":
        G = G_s.index(stage).load(ROWS)
        G_early = before_s.index(stage).load(ROWS) if EARLY else G
        G_q = G_early if READ_EARLY else G
        G_e = G_early if ERASE_EARLY else G
    if DELTA and ERASE and not (SHARED and WRITE):
        t = gl.arange(0, 64, ROWS)
        erase = gl.load(b + number(numbers, 0) + t * HV, mask=t < left, other=0.0).to(gl.float32)
        strength = -held_off(erase, LEAST)
    else:
        # -1, which the compiler must not know: it changes signs between products then
        strength = gl.full([64], gl.where(segments > 0, -1.0, 0.0), gl.float32, ROWS)
    if DELTA:
        i = gl.arange(0, 64, PAIR_ROWS)[:, None]
        j = gl.arange(0, 64, PAIR_COLUMNS)[None, :]
        of_pairs = gl.convert_layout(strength, PAIR_ROWS, assert_trivial=True)[:, None]
        low_q_s = P_s.index(stage)
        low_e_s = T_s.index(stage)._reinterpret(dtype, [64, 64], SHARED_TILE)
        if DECAY != "none":
            # where a token is not seen this may be no number
            G_j = G_s.index(stage).load(PAIR_COLUMNS)
            faded_q = gl.exp2(gl.convert_layout(G_q, PAIR_ROWS, assert_trivial=True)[:, None] - G_j[None, :])
            if READ_EARLY == ERASE_EARLY:
                faded_e = faded_q
            else:
                faded_e = gl.exp2(gl.convert_layout(G_e, PAIR_ROWS, assert_trivial=True)[:, None] - G_j[None, :])
        intra_q, intra_e = warpgroup_mma_wait(1, deps=[intra_q, intra_e])
        if SHARED and WRITE:
            put_diagonal(at_gate + 128, intra_e)
        if DECAY != "none":
            intra_e *= faded_e * of_pairs
            intra_q *= faded_q * scale
        else:
            intra_e *= of_pairs
            intra_q *= scale
        low_e_s.store(narrow(gl.where(i > j, intra_e, 0.0), dtype))
        low_q_s.store(narrow(gl.where(i >= j + FIRST, intra_q, 0.0), dtype))
        inter_e = gl.zeros([64, 128], gl.float32, KEYS)
        inter_e = warpgroup_mma(du_T, S_s.index(z), inter_e, use_acc=False, is_async=True)
        fence_async_shared()
        inter_q, dk_stored = warpgroup_mma_wait(1, deps=[inter_q, dk_stored])
    else:
        low_q_s = low_s.index(stage)
        inter_q, dk_stored = warpgroup_mma_wait(0, deps=[inter_q, dk_stored])
    if DECAY != "none":
        inter_q *= (gl.exp2(G_q) * scale)[:, None]
    else:
        inter_q *= scale
    SUMS_OF_K: gl.constexpr = DECAY != "none" or (WRITE and not DELTA)
    if DECAY != "none":
        fade_k = gl.exp2(G_s.index(stage).slice(63, 1).load(ROWS) - G)
    if WRITE and not DELTA:
        write = held_off(w_s.index(stage).load(ROWS), LEAST)
        fade_k = fade_k * write if DECAY != "none" else write
    if SUMS_OF_K:
        dk_stored *= fade_k[:, None]
    if DELTA:
        barrier()
    if DECAY != "none":
        if is_last:
            keep_end(G_s.index(stage), dk_stored, S_s, dS_s, k_s, sums_s, at_kept, apart, z, stage)
    dq_tile = warpgroup_mma(low_q_s, k_t, inter_q, is_async=True)
    if DELTA:
        inter_e = warpgroup_mma_wait(1, deps=[inter_e])
        free(walked)
        if DECAY != "none":
            inter_e *= (gl.exp2(G_e) * strength)[:, None]
        else:
            inter_e *= strength[:, None]
        de_tile = warpgroup_mma(low_e_s, k_t, inter_e, is_async=True)
    dk_tile = warpgroup_mma(low_q_s.permute((1, 0)), q_t, dk_stored, is_async=True)
    if DELTA:
        dk_tile = warpgroup_mma(low_e_s.permute((1, 0)), k_t, dk_tile, is_async=True)
    if DECAY != "none" and not DELTA:
        keep_before(dS, S_s.index(z), sums_s)
    if DELTA and WRITE and not SHARED:
        put_writes(at_gate + 128, of_gate, v + number(numbers, 0) * V, du_T, left, HV, V)
    if not DELTA:
        free(walked)
    dq_tile = warpgroup_mma_wait(3 if DELTA else 1, deps=[dq_tile])
    if DECAY != "none":
        turn = of_halves(widen(q_t.load(KEYS)) * dq_tile, OF_KEYS)
    STRIDE: gl.constexpr = HV * K if HV > H else H * K
    out = number(numbers, 1) * K
    if HV > H:
        dq_at = partial + out
        dk_at = partial + held.to(gl.int64) * (64 * HV * K) + out
    else:
        dq_at = dq + out
        dk_at = dk + out
    put(dq_at, dq_tile, STRIDE, left, K, NARROW_K)
    if DELTA:
        stores_first(left)
        de_tile = warpgroup_mma_wait(2, deps=[de_tile])
        if DECAY != "none" or ERASE:
            turned_e = of_halves(widen(k_t.load(KEYS)) * de_tile, OF_KEYS)
            if ERASE:
                put_halves(at_gate + 64, of_gate, turned_e, OF_KEYS)
    if DECAY != "none":
        if EARLY:
            ahead = gl.full([64, 2], 0.0, gl.float32, gl.SliceLayout(2, OF_KEYS))
            behind = gl.full([64, 2], 0.0, gl.float32, gl.SliceLayout(2, OF_KEYS))
            if READ_EARLY:
                ahead += turn
            else:
                behind += turn
            if DELTA:
                if ERASE_EARLY:
                    ahead += turned_e
                else:
                    behind += turned_e
            turn = behind
            put_halves(at_gate + 192, of_gate, ahead, OF_KEYS)
        elif DELTA:
            turn += turned_e
    # the buffers too: else the compiler takes them for free from where the products start
    if DELTA:
        dk_tile, _, _, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, low_q_s, q_t, low_e_s, k_t])
    else:
        dk_tile, _, _ = warpgroup_mma_wait(0, deps=[dk_tile, low_q_s, q_t])
    if SUMS_OF_K:
        turn_k = of_halves(widen(k_t.load(KEYS)) * dk_tile, OF_KEYS)
        if WRITE and not DELTA:
            strengths = held_off(w_s.index(stage).load(gl.SliceLayout(1, gl.SliceLayout(2, OF_KEYS))), LEAST)
            put_halves(at_gate + 128, of_gate, turn_k / strengths[:, None], OF_KEYS)
        if DECAY != "none":
            put_halves(at_gate, of_gate, turn - turn_k, OF_KEYS)
    if DELTA:
        dk_tile += de_tile
    put(dk_at, dk_tile, STRIDE, left, K, NARROW_K)
    return dS


@gluon.jit
def put_diagonal(base, tile):
    """Write the diagonal of a tile [64 tokens, 64 tokens] of a product."""
    i = gl.arange(0, 64, PAIR_ROWS)[:, None]
    j = gl.arange(0, 64, PAIR_COLUMNS)[None, :]
    halves = of_halves(gl.where(i == j, tile, 0.0), OF_PAIRS)
    t = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, OF_PAIRS)))[:, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, OF_PAIRS)))[None, :]
    gl.store(base + half * 0 + t, halves, mask=t // 32 == half)


@gluon.jit
def put_writes(base, apart, v, du, left, HV: gl.constexpr, V: gl.constexpr):
    """Write v . du of each token, of each half of the values, as of each half of the keys."""
    i = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, OF_COPY)))
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, OF_COPY)))
    vs = half[None, :, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, OF_COPY)))[None, None, :]
    v_tile = gl.load(v + (i[:, None, None] * (HV * V) + vs), mask=(i < left)[:, None, None] & (vs < V), other=0.0)
    du_tile = du.reshape([64, 2, 64]).load(OF_COPY)
    sums = gl.sum(v_tile.to(gl.float32) * du_tile.to(gl.float32), 2)
    gl.store(base + half[None, :] * apart + i[:, None], sums)


@gluon.jit
def walk_back(
    v, b, dq, dk, dv, squares, carry, begins, dgates, kepts, partial, scale,
    k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s, numbers_s,
    came, rest_came, states_came, done, walked, slot, slots, held, segments, first, last, at_end, n, part, parts, hv,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DECAY: gl.constexpr,
    DELTA: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr, ERASE_EARLY: gl.constexpr,
    READ_EARLY: gl.constexpr, SHARED: gl.constexpr, SPLIT: gl.constexpr, LEAST: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The two warp groups that compute."""
    at_carry = carry + (n.to(gl.int64) * HV + hv) * V * K
    of_part = (n * parts + part).to(gl.int64)
    at_begin = begins + (of_part * HV + hv) * V * K if SPLIT > 0 else at_carry
    i = gl.arange(0, 128, gl.SliceLayout(1, STATE))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, STATE))[None, :]
    inside = (i < V) & (j < K)
    dS = gl.load(at_begin + (i * K + j), mask=inside, other=0.0)
    apart = slots.to(gl.int64) * HV
    for back in range(0, last - first):
        stage = back % 2
        dS, intra_q, inter_q = reverse_chunk(
            dS, squares, dv, scale, k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s,
            S_s, dS_s, du_s, x_s, low_s, sums_s, numbers_s, came, rest_came, states_came,
            hidden_zero(back, 20), stage, back // 2 % 2, back % 2, kepts, apart, back > 0,
            HV, V, DECAY, DELTA, WRITE, READ_EARLY, SHARED, LEAST, dtype,
        )  # fmt: skip
        dS = chunk_gradients(
            dS, intra_q, inter_q, v, b, dq, dk, dgates, kepts, partial, scale,
            k_s, q_s, do_s, T_s, P_s, G_s, before_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s,
            numbers_s, walked, hidden_zero(back, 21), stage + hidden_zero(back, 22), segments, slots, held,
            (back == 0) & at_end, last - 1 - back > 0,
            H, HV, K, V, DECAY, DELTA, ERASE, WRITE, ERASE_EARLY, READ_EARLY, SHARED, LEAST, dtype,
        )  # fmt: skip
        free(done)
    if DECAY != "none" and not DELTA:
        barrier()
        put_kept(kepts + ((slot + first - 1).to(gl.int64) * HV + hv), apart, sums_s, first > 0)
    if part == 0:
        gl.store(at_carry + (i * K + j), dS, mask=inside)


@gluon.jit(do_not_specialize=["slots", "held", "T", "segment", "segments", "parts"])
def eight_walk_kernel(
    q, k, v, b, do, gates, squares, carry, states, xs, dq, dk, dv, dgates, kepts, partial, begins, cu,
    slots, held, scale, T, segment, segments, parts,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr, PACKED: gl.constexpr, SHARED: gl.constexpr,
    UNIT: gl.constexpr, SPLIT: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head), as in reverse.py; results as in gradients.py with two tiles of keys.

    To be launched with 8 warps, which become 12, and 168 registers a thread, which they share out anew."""
    gl.static_assert(C == 64 and K > 64 and K <= 128 and V > 64 and V <= 128)
    gl.static_assert(states.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    EARLY: gl.constexpr = ERASE_EARLY or READ_EARLY
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    hv = pid % HV
    n, part = sequence_and_part(pid // HV, parts, HV)
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    first_chunk, last, first_place = segment_of(n, slot, gl.cdiv(length, C), segment, segments, UNIT, PACKED)
    first = first_chunk
    if SPLIT > 0:
        first += part * SPLIT
        last = gl.minimum(first + SPLIT, last)
    at_end = last * 64 >= length
    if first < last:
        k_s = gl.allocate_shared_memory(dtype, [BUFFERS, 64, 128], SHARED_TILE)
        q_s = gl.allocate_shared_memory(dtype, [BUFFERS, 64, 128], SHARED_TILE)
        do_s = gl.allocate_shared_memory(dtype, [BUFFERS, 64, 128], SHARED_TILE)
        S_s = gl.allocate_shared_memory(dtype, [1, 128, 128], SHARED_TILE)
        x_s = gl.allocate_shared_memory(dtype, [1, 64, 128], SHARED_TILE)
        dS_s = gl.allocate_shared_memory(dtype, [1, 128, 128], SHARED_TILE)
        P_s = ring(dtype, 1, BUFFERS)[0]
        if DELTA:
            T_s = ring(squares.dtype.element_ty, 1, BUFFERS)[0]
            du_s = gl.allocate_shared_memory(dtype, [1, 128, 64], SHARED_TILE)
            low_s = P_s
        else:
            T_s = P_s
            du_s = x_s
            low_s = ring(dtype, 1, BUFFERS)[0]
        G_s = ring_of_lines(BUFFERS)
        before_s = ring_of_lines(BUFFERS) if EARLY else G_s
        c_s = ring_of_lines(BUFFERS) if DELTA else G_s
        w_s = ring_of_lines(BUFFERS) if WRITE else G_s
        sums_s = gl.allocate_shared_memory(gl.float32, [2, 4], SHARED_SUMS)
        numbers_s = gl.allocate_shared_memory(gl.int64, [BUFFERS, 4], SHARED_LINE)
        values = xs if DELTA else v
        came = barriers(BUFFERS, 1)
        rest_came = barriers(BUFFERS, 1)
        states_came = barriers(1, 1).index(0)
        done = barriers(1, 2 * WALKERS).index(0)
        walked = barriers(1, 2 * WALKERS).index(0)
        gl.warp_specialize(
            [
                (
                    walk_back,
                    (
                        v, b, dq, dk, dv, squares, carry, begins, dgates, kepts, partial, scale,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s, dS_s, du_s, low_s, sums_s,
                        numbers_s, came, rest_came, states_came, done, walked,
                        slot, slots, held, segments, first, last, at_end, n, part, parts, hv,
                        H, HV, K, V, DECAY, DELTA, ERASE, WRITE, ERASE_EARLY, READ_EARLY, SHARED, SPLIT, LEAST, dtype,
                    ),
                ),
                (
                    copy_chunks,
                    (
                        q, k, do, gates, squares, states, values,
                        k_s, q_s, do_s, T_s, P_s, G_s, before_s, c_s, w_s, S_s, x_s,
                        numbers_s, came, rest_came, states_came, done, walked,
                        start, length, slot, first_chunk, first, last, first_place, hv,
                        H, HV, K, V, DECAY, DELTA, WRITE, EARLY, dtype,
                    ),
                ),
            ],
            [4],
            [40],
        )  # fmt: skip
