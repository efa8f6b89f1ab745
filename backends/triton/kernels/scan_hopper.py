"""The scan over chunks for Hopper GPUs, in Gluon: equations, parameters and results are those of scan.py.

There all warps of a processor walk through a chain of products in step. Here a program is one group of 4 warps with 64
values, two of them share a processor, out of step, and what a chunk needs is under way while the one before it is
worked on, in a second set of buffers. It takes operands, squares and what is kept in 16 bits, chunks of 64, keys up to 128,
modes "output" and "replay", and k as the erase key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.kernels.gradients_hopper import LEFT, OUT
from deltazoo.backends.triton.kernels.hopper import (
    COLUMNS,
    J_COPY,
    MMA,
    R_COPY,
    ROWS,
    SHARED_LINE,
    SHARED_TILE,
    T_COPY,
    barrier,
    fetch,
    narrow,
    of_copy,
    widen,
)
from deltazoo.backends.triton.kernels.layout import first_slot, segment_of, sequence_and_part, sequence_bounds

GATES = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
GATE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# of a tile [64 values, 64 tokens] a warp has its 16 rows of a product, and a thread 8 rows of a column: 16 bytes
TURNED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [0, 16], [0, 32]], [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip


@gluon.jit
def allocate_two(dtype: gl.constexpr, COUNT: gl.constexpr):
    """Tiles [64, 64], twice."""
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED_TILE),)
    return tiles


@gluon.jit
def at_stage(tiles, stage):
    out = ()
    for n in gl.static_range(len(tiles)):
        out = out + (tiles[n].index(stage),)
    return out


@gluon.jit
def put_turned(base, tile, stride: gl.constexpr, rows, columns, MASK_COLUMNS: gl.constexpr):
    """Write a tile [64 values, 64 tokens], 16 bits, transposed, up to `rows` tokens and `columns` values."""
    out = gl.convert_layout(tile, TURNED)
    j = gl.arange(0, 64, gl.SliceLayout(1, TURNED))
    t = gl.arange(0, 64, gl.SliceLayout(0, TURNED))
    inside = (t < rows)[None, :]
    if MASK_COLUMNS:
        inside = inside & (j < columns)[:, None]
    gl.store(base + (t[None, :] * stride + j[:, None]), out, mask=inside)


@gluon.jit
def put_state(base, S, NK: gl.constexpr, K: gl.constexpr, rows, MASK: gl.constexpr):
    """Write S [64 values, K], 16 bits, up to `rows`; nothing goes from warp to warp."""
    i = gl.arange(0, 64, gl.SliceLayout(1, OUT))
    j = gl.arange(0, 64, gl.SliceLayout(0, OUT))
    at = base + (i[:, None] * K + j[None, :])
    for n in gl.static_range(NK):
        inside = (i < rows)[:, None]
        if n * 64 + 64 > K:
            inside = inside & (j < K - n * 64)[None, :]
        gl.store(at + n * 64, gl.convert_layout(S[n], OUT), mask=inside)


@gluon.jit
def fetch_squares(T_s, P_s, at, dtype: gl.constexpr, READS: gl.constexpr):
    """Copy T, and P^T, to shared memory, zeros where the other lies."""
    r = gl.arange(0, 4, R_COPY)[:, None, None]
    t = gl.arange(0, 16, T_COPY)[None, :, None]
    j = gl.arange(0, 64, J_COPY)[None, None, :]
    block = j // 8 - (r * 16 + t) // 8
    from_last = gl.where(block == 0, 64 + j % 8, j)
    inverse = at + (t * 72 + r * (16 * 72) + from_last)
    async_copy.async_copy_global_to_shared(T_s.reshape([4, 16, 64]), inverse, mask=block <= 0)
    if READS:
        reads = at.to(gl.pointer_type(dtype)) + (t * 72 + j) + r * (16 * 72)
        async_copy.async_copy_global_to_shared(P_s.reshape([4, 16, 64]), reads, mask=block >= 0)


@gluon.jit
def load_state(S, at, vs, rows, K: gl.constexpr, NK: gl.constexpr, key_stride, value_stride):
    """S plus a state at `at`, whose values go from `vs` on, up to `rows` of them."""
    i = gl.arange(0, 64, ROWS)
    j = gl.arange(0, 64, COLUMNS)
    out = ()
    for n in gl.static_range(NK):
        key = j + n * 64
        inside = (i < rows)[:, None] & (key < K)[None, :]
        tile = gl.load(at + ((vs + i)[:, None] * value_stride + key[None, :] * key_stride), mask=inside, other=0.0)
        out = out + (S[n] + tile.to(gl.float32),)
    return out


@gluon.jit
def fetch_chunk(
    k_s, q_s, T_s, P_s, gates_s, early_s, k, q, gates, squares, c, start, length, slot, last, h, hv,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, NK: gl.constexpr, READS: gl.constexpr, DELTA: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Copy what chunk c needs, but for v, to shared memory; from `last` on zeros, and something."""
    left = gl.where(c < last, length - c * 64, 0)
    key = ((start + c * 64) * H + h) * K
    place = (slot + gl.minimum(c, last - 1)).to(gl.int64) * HV + hv
    k_at = of_copy(k + key, H * K)
    for n in gl.static_range(NK):
        fetch(k_s[n], k_at, n * 64, left, K - n * 64, True, n * 64 + 64 > K)
    if READS:
        q_at = of_copy(q + key, H * K)
        for n in gl.static_range(NK):
            fetch(q_s[n], q_at, n * 64, left, K - n * 64, True, n * 64 + 64 > K)
    i = gl.arange(0, 256, GATES)
    async_copy.async_copy_global_to_shared(gates_s, gates + place * 192 + i, mask=i < 192)
    if EARLY:
        i = gl.arange(0, 64, GATE)
        async_copy.async_copy_global_to_shared(early_s, gates + place * 192 - 1 + i, mask=i > 0)
    if DELTA:
        fetch_squares(T_s, P_s, squares + place * (64 * 72), k.dtype.element_ty, READS)
    return gl.load(gates + place * 192 + 63)


@gluon.jit
def fetch_values(v_s, v, c, start, length, last, hv, column, HV: gl.constexpr, V: gl.constexpr):
    """Copy 64 values of chunk c to shared memory."""
    left = gl.where(c < last, length - c * 64, 0)
    value = ((start + c * 64) * HV + hv) * V + column
    fetch(v_s, of_copy(v + value, HV * V), 0, left, V - column, True, V % 64 != 0)


@gluon.jit
def larger(x, y):
    return gl.maximum(x, y)


@gluon.jit
def times_inverse(x, T_s):
    """x T under way, and what its rows are to be multiplied with."""
    right = T_s.permute((1, 0))
    acc = gl.zeros([64, 64], gl.float32, MMA)
    up = gl.full([64], 1.0, gl.float32, ROWS)
    if T_s.dtype == gl.float16:
        largest = gl.reduce(gl.abs(x), 1, larger).to(gl.int32, bitcast=True)
        exponent = gl.minimum(largest & 0x7F800000, 0x7E800000)
        down = (0x7F000000 - exponent).to(gl.float32, bitcast=True)
        up = exponent.to(gl.float32, bitcast=True)
        low = narrow(x * down[:, None], gl.float16)
    else:
        low = narrow(x, T_s.dtype)
    left = gl.convert_layout(low, LEFT, assert_trivial=True)
    return warpgroup_mma(left, right, acc, is_async=True), left, up


@gluon.jit
def work(
    S, G_end, c, HERE, k_b, q_b, v_s, T_b, P_b, gates_b, early_b, k, q, v, gates, squares, o, checkpoints, states, xs,
    scale, start, length, slot, begins, first_kept, last, first_place, checkpoint, h, hv, column,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NK: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, WRITE: gl.constexpr, READ_EARLY: gl.constexpr, EVERY: gl.constexpr,
    OUTPUT: gl.constexpr,
):  # fmt: skip
    """Work on chunk c, which lies in buffers HERE, while the next one is copied to the others."""
    THERE = 1 - HERE
    NARROW_V: gl.constexpr = V % 64 != 0
    EARLY: gl.constexpr = OUTPUT and READ_EARLY and DECAY != "none"
    dtype: gl.constexpr = k.dtype.element_ty
    k_s = at_stage(k_b, HERE)
    q_s = at_stage(q_b, HERE)
    async_copy.wait_group(0)
    fence_async_shared()
    low = ()
    left = ()
    for n in gl.static_range(NK):
        low = low + (narrow(S[n], dtype),)
        left = left + (gl.convert_layout(low[n], LEFT, assert_trivial=True),)
    y = gl.zeros([64, 64], gl.float32, MMA)
    out = gl.zeros([64, 64], gl.float32, MMA)
    if OUTPUT and not DELTA:
        for n in gl.static_range(NK):
            y = warpgroup_mma(k_s[n], q_s[n].permute((1, 0)), y, is_async=True)
    if DELTA:
        for n in gl.static_range(NK):
            y = warpgroup_mma(left[n], k_s[n].permute((1, 0)), y, is_async=True)
    # the only tile without a second buffer: what comes there waits until all warps have this
    v_T = v_s.permute((1, 0)).load(MMA)

    G_next = fetch_chunk(
        at_stage(k_b, THERE), at_stage(q_b, THERE), T_b.index(THERE), P_b.index(THERE if DELTA else 0),
        gates_b.index(THERE), early_b.index(THERE), k, q, gates, squares, c + 1, start, length, slot, last, h, hv, H, HV, K, NK, OUTPUT, DELTA, EARLY,
    )  # fmt: skip
    fetch_values(v_s, v, c + 1, start, length, last, hv, column, HV, V)
    async_copy.commit_group()
    left_v = V - column
    if OUTPUT:
        if EVERY > 0:
            if (c > 0) & (c % EVERY == 0):
                at = checkpoints + ((checkpoint + c // EVERY).to(gl.int64) * HV + hv) * V * K + column * K
                put_state(at, low, NK, K, left_v, NARROW_V)
    else:
        local = (first_place + c - begins).to(gl.int64) * HV + hv
        put_state(states + local * V * K + column * K, low, NK, K, gl.where(c >= first_kept, left_v, 0), NARROW_V)

    if OUTPUT and not DELTA:
        y = warpgroup_mma_wait(0, deps=[y])
        i = gl.arange(0, 64, COLUMNS)
        j = gl.arange(0, 64, ROWS)
        if DECAY != "none":
            G_j = gates_b.index(HERE).slice(0, 64).load(ROWS)
            if EARLY:
                G_i = early_b.index(HERE).load(COLUMNS)
            else:
                G_i = gates_b.index(HERE).slice(0, 64).load(COLUMNS)
            # where a token is not seen this may be no number
            y *= gl.exp2(G_i[None, :] - G_j[:, None]) * scale
        else:
            y *= scale
        seen = j[:, None] + (1 if READ_EARLY else 0) <= i[None, :]
        P_b.index(0).store(narrow(gl.where(seen, y, 0.0), dtype))
        fence_async_shared()
        barrier()
        for n in gl.static_range(NK):
            out = warpgroup_mma(left[n], q_s[n].permute((1, 0)), out, is_async=True)
    # u = w v - c S0^T e,  x = T u
    x = widen(v_T)
    if WRITE:
        x *= gates_b.index(HERE).slice(128, 64).load(COLUMNS)[None, :]
    if DELTA:
        y, _ = warpgroup_mma_wait(0, deps=[y, left[0]])
        x -= y * gates_b.index(HERE).slice(64, 64).load(COLUMNS)[None, :]
        x, turned, up = times_inverse(x, T_b.index(HERE))
    if OUTPUT and DELTA:
        for n in gl.static_range(NK):
            out = warpgroup_mma(left[n], q_s[n].permute((1, 0)), out, is_async=True)
    if DECAY != "none":
        G = gates_b.index(HERE).slice(0, 64).load(COLUMNS)
        fade = gl.exp2(G_end - G)
    scaled = S
    if DECAY != "none":
        keep = gl.exp2(G_end)
        scaled = ()
        for n in gl.static_range(NK):
            scaled = scaled + (S[n] * keep,)
    if DELTA:
        x, _ = warpgroup_mma_wait(NK if OUTPUT else 0, deps=[x, turned])
        if T_b.index(HERE).dtype == gl.float16:
            x *= up[:, None]
    x_low = narrow(x, dtype)
    left_x = gl.convert_layout(x_low, LEFT, assert_trivial=True)
    if DECAY != "none":
        left_k = gl.convert_layout(narrow(x * fade[None, :], dtype), LEFT, assert_trivial=True)
    else:
        left_k = left_x
    if OUTPUT:
        out, _, _ = warpgroup_mma_wait(0, deps=[out, left[0], left[NK - 1]])
        if DECAY != "none":
            if EARLY:
                out *= (gl.exp2(early_b.index(HERE).load(COLUMNS)) * scale)[None, :]
            else:
                out *= (gl.exp2(G) * scale)[None, :]
        else:
            out *= scale
        out = warpgroup_mma(left_x, P_b.index(HERE if DELTA else 0), out, is_async=True)
    new = ()
    for n in gl.static_range(NK):
        new = new + (warpgroup_mma(left_k, k_s[n], scaled[n], is_async=True),)
    if OUTPUT:
        out, _ = warpgroup_mma_wait(NK, deps=[out, left_x])
        value = ((start + c * 64) * HV + hv) * V + column
        put_turned(o + value, narrow(out, dtype), HV * V, length - c * 64, left_v, NARROW_V)
    elif DELTA:
        put_turned(
            xs + ((first_place + c - begins).to(gl.int64) * 64 * HV + hv) * V + column, x_low, HV * V,
            gl.where(c >= first_kept, 64, 0), left_v, NARROW_V,
        )  # fmt: skip
    if NK == 2:
        new0, new1, _ = warpgroup_mma_wait(0, deps=[new[0], new[1], left_k])
        S = (new0, new1)
    else:
        new0, _ = warpgroup_mma_wait(0, deps=[new[0], left_k])
        S = (new0,)
    return S, G_next


@gluon.jit(do_not_specialize=["T", "segment", "segments", "parts"])
def hopper_scan_kernel(
    q, k, e, v, gates, fades, squares, state, o, final, checkpoints, states, xs, starts, ends, cu,
    scale, T, segment, segments, parts,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    K0: gl.constexpr, K1: gl.constexpr, BV: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, OWN: gl.constexpr, WRITE: gl.constexpr, STATE: gl.constexpr,
    READ_EARLY: gl.constexpr, PACKED: gl.constexpr, EVERY: gl.constexpr, UNIT: gl.constexpr,
    SPLIT: gl.constexpr, MODE: gl.constexpr, TERMS: gl.constexpr, PREC: gl.constexpr,
    STAGES: gl.constexpr, TILED: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head, tile of 64 values); S^T [64, K] stays in registers."""
    OUTPUT: gl.constexpr = MODE == "output"
    REPLAY: gl.constexpr = MODE == "replay"
    gl.static_assert(OUTPUT or REPLAY)
    gl.static_assert(C == 64 and BV == 64 and K1 == 0 and (K0 == 64 or K0 == 128) and K <= K0)
    gl.static_assert(TERMS == 1 and not OWN and not TILED and K % 8 == 0 and V % 8 == 0)
    gl.static_assert(k.dtype.element_ty.primitive_bitwidth == 16)
    dtype: gl.constexpr = k.dtype.element_ty
    NK: gl.constexpr = K0 // 64
    TILES: gl.constexpr = (V + 63) // 64
    FLOAT_T: gl.constexpr = squares.dtype.element_ty
    pid = gl.program_id(0)
    hv = pid // TILES % HV
    h = hv // (HV // H)
    n, part = sequence_and_part(pid // (TILES * HV), parts, TILES * HV)
    nh = (n * parts + part) * HV + hv
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_slot(n, cu, T, C, PACKED)
    column = (pid % TILES) * 64
    left_v = V - column
    at_state = (n.to(gl.int64) * HV + hv) * K * V

    chunks = gl.cdiv(length, C)
    begins, last, first_place = segment_of(n, slot, chunks, segment, segments, UNIT, PACKED)
    first = begins
    if SPLIT > 0:
        first += part * SPLIT
        last = gl.minimum(first + SPLIT, last)
    first_kept = first
    if REPLAY:
        first = gl.where(first < last, first // EVERY * EVERY, first)
    checkpoint = 0
    if EVERY > 0:
        # of the first one, before any chunk: the state there is an operand, and is not kept
        checkpoint = (slot // EVERY if PACKED else n * ((chunks - 1) // EVERY)) - 1

    S = ()
    for _ in gl.static_range(NK):
        S = S + (gl.zeros([64, 64], gl.float32, MMA),)
    if REPLAY:
        if (first > 0) & (first < last):
            begin_at = checkpoints + ((checkpoint + first // EVERY).to(gl.int64) * HV + hv) * V * K
            S = load_state(S, begin_at, column, left_v, K, NK, 1, K)
    elif SPLIT > 0:
        if (first < last) | (part == 0):
            S = load_state(S, starts + nh.to(gl.int64) * V * K, column, left_v, K, NK, 1, K)
    if STATE and not (OUTPUT and SPLIT > 0):
        from_state = first == 0 if REPLAY else part == 0
        S = load_state(S, state + at_state, column, gl.where(from_state, left_v, 0), K, NK, V, 1)

    k_s = allocate_two(dtype, NK)
    v_s = gl.allocate_shared_memory(dtype, [64, 64], SHARED_TILE)
    T_s = k_s[0]
    P_s = k_s[0]
    q_s = k_s
    if OUTPUT:
        q_s = allocate_two(dtype, NK)
        P_s = gl.allocate_shared_memory(dtype, [2 if DELTA else 1, 64, 64], SHARED_TILE)
    if DELTA:
        T_s = gl.allocate_shared_memory(FLOAT_T, [2, 64, 64], SHARED_TILE)
    gates_s = gl.allocate_shared_memory(gl.float32, [2, 4 * C], SHARED_LINE)
    early_s = gates_s
    EARLY: gl.constexpr = OUTPUT and READ_EARLY and DECAY != "none"
    if EARLY:
        early_s = gl.allocate_shared_memory(gl.float32, [2, C], SHARED_LINE)

    G_end = 0.0
    if first < last:
        G_end = fetch_chunk(
            at_stage(k_s, 0), at_stage(q_s, 0), T_s.index(0), P_s.index(0), gates_s.index(0), early_s.index(0), k, q,
            gates, squares, first, start, length, slot, last, h, hv, H, HV, K, NK, OUTPUT, DELTA, EARLY,
        )  # fmt: skip
        fetch_values(v_s, v, first, start, length, last, hv, column, HV, V)
        async_copy.commit_group()
    for c in range(first, last):
        S, G_end = work(
            S, G_end, c, (c - first) % 2, k_s, q_s, v_s, T_s, P_s, gates_s, early_s, k, q, v, gates, squares, o,
            checkpoints, states, xs, scale, start, length, slot, begins, first_kept, last, first_place, checkpoint, h,
            hv, column, H, HV, K, V, NK, DECAY, DELTA, WRITE, READ_EARLY, EVERY, OUTPUT,
        )  # fmt: skip
    async_copy.wait_group(0)

    if OUTPUT:
        rows = left_v
        if SPLIT > 0:
            rows = gl.where(part == gl.maximum(chunks - 1, 0) // SPLIT, left_v, 0)
        i = gl.arange(0, 64, ROWS)
        j = gl.arange(0, 64, COLUMNS)
        for m in gl.static_range(NK):
            inside = (i < rows)[:, None] & (j + m * 64 < K)[None, :]
            gl.store(final + at_state + ((column + i)[:, None] + (j + m * 64)[None, :] * V), S[m], mask=inside)
