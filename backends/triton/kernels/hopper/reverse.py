"""The reverse scan for Hopper GPUs, in Gluon: equations, parameters and results are those of reverse.py.

Warp groups, buffers and barriers are those of scan_hopper.py, and what is copied is what its scan with an output reads,
do for v, the last chunk first. Each of the two warp groups that compute has its half of dS^T in registers. What walks
of walk_hopper.py take (65 to 128 keys, up to 128 values or a multiple of 128) is left to them. It takes operands and
scratch of one 16-bit dtype, chunks of 64, keys up to 256, and k as the erase key.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.kernels.hopper.common import (
    COLUMNS,
    LEFT,
    MMA,
    barrier,
    free,
    narrow,
    put,
    times_inverse,
    widen,
)
from deltazoo.backends.triton.kernels.hopper.scan import begin_reads, copy_chunks, next_buffer, put_reads
from deltazoo.backends.triton.kernels.hopper.scan_traits import Stand, kind_of, room_of
from deltazoo.backends.triton.kernels.hopper.state_copies import load_state, put_tile, store_final
from deltazoo.backends.triton.kernels.layout import chunk_range, clamp_away_from_zero, sequence_and_segment


class Results(NamedTuple):
    """What it reads and writes by itself: dS from segment to segment, where parts begin, dS' and du of chunks, dv."""

    dstate: Any
    begins: Any
    dstates: Any
    du: Any
    dv: Any


@gluon.jit
def leave_state(dS, at, room, stage, left_v, kind: gl.constexpr):
    """dS'^T k^T, a tile of 64 keys after the other; meanwhile dS'^T goes to memory."""
    K: gl.constexpr = kind.K
    NK: gl.constexpr = kind.NK
    y = gl.zeros([64, 64], gl.float32, MMA)
    for tk in gl.static_range(NK):
        left = gl.convert_layout(narrow(dS[tk], kind.dtype), LEFT, assert_trivial=True)
        y = warpgroup_mma(left, room.k_s[tk].index(stage).permute((1, 0)), y, use_acc=tk > 0, is_async=True)
        put(at + tk * 64, dS[tk], K, left_v, K - tk * 64, tk * 64 + 64 > K)
        y, left = warpgroup_mma_wait(0, deps=[y, left])
    return y


@gluon.jit
def add_product(left, tiles, stage, dS, kind: gl.constexpr):
    """dS^T and a product with each tile of 64 keys, under way."""
    NK: gl.constexpr = kind.NK
    out = (warpgroup_mma(left, tiles[0].index(stage), dS[0], is_async=True),)
    for tk in gl.static_range(NK - 1):
        out = out + (warpgroup_mma(left, tiles[tk + 1].index(stage), dS[tk + 1], is_async=True),)
    return out


@gluon.jit
def walk_chunk(
    dS, to, scale, room, P_s, tile, stage, phase, c, column, stand, least: gl.constexpr, DU_IS_DV: gl.constexpr,
    HALF: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """One chunk of one of the two warp groups: dS^T before it."""
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    NK: gl.constexpr = kind.NK
    DECAY: gl.constexpr = kind.DECAY
    DELTA: gl.constexpr = kind.DELTA
    WRITE: gl.constexpr = kind.WRITE
    dtype: gl.constexpr = kind.dtype
    MASK_V: gl.constexpr = V % 128 != 0
    left_v = V - column
    local = (stand.first_place + c - stand.begins).to(gl.int64)

    mbarrier.wait(room.came.index(stage), phase)
    if not DELTA:
        put_reads(begin_reads(room, stage, kind), 0, P_s, room, stage, scale, kind)
    # dx = scale P'^T do + (e^(Gend - G) k) dS'
    dx = leave_state(dS, to.dstates + ((local * HV + stand.hv) * V + column) * K, room, stage, left_v, kind)
    mbarrier.wait(room.rest_came.index(stage), phase)
    do_T = room.v_s[HALF].index(stage).permute((1, 0)).load(MMA)
    doq = widen(do_T) * scale
    if DECAY != "none":
        G = room.G_s.index(stage).load(COLUMNS)
        G_read = room.before_s.index(stage).load(COLUMNS) if kind.EARLY else G
        G_end = room.G_s.index(stage).slice(63, 1).load(COLUMNS)
        dx *= gl.exp2(G_end - G)[None, :]
        doq *= gl.exp2(G_read)[None, :]
    left_do = gl.convert_layout(do_T, LEFT, assert_trivial=True)
    P = P_s.index(stage if DELTA else 0).permute((1, 0))
    dx = warpgroup_mma(left_do, P, dx, is_async=True)
    # dS0 = e^Gend dS' + scale (e^G'' q)^T do - (c e)^T du
    if DECAY != "none":
        end = gl.exp2(G_end)[None, :]
        dS0 = (dS[0] * end,)
        for tk in gl.static_range(NK - 1):
            dS0 = dS0 + (dS[tk + 1] * end,)
    else:
        dS0 = dS
    left_q = gl.convert_layout(narrow(doq, dtype), LEFT, assert_trivial=True)
    dS1 = add_product(left_q, room.q_s, stage, dS0, kind)
    dx, left_do = warpgroup_mma_wait(NK, deps=[dx, left_do])
    # du = T^T dx
    if DELTA:
        SCALED: gl.constexpr = room.T_s.dtype == gl.float16
        dx, left_x, up = times_inverse(dx, room.T_s.index(stage), LEFT, SCALED)
        dx, left_x = warpgroup_mma_wait(0, deps=[dx, left_x])
        if SCALED:
            dx *= up[:, None]
        erase = room.c_s.index(stage).load(COLUMNS)
        left_k = gl.convert_layout(narrow(dx * -erase[None, :], dtype), LEFT, assert_trivial=True)
        dS1 = add_product(left_k, room.k_s, stage, dS1, kind)
    else:
        left_k = left_q
    if (DELTA or WRITE) and not DU_IS_DV:
        tile.permute((1, 0)).store(narrow(dx, dtype))
        put_tile(to.du + ((local * 64 * HV + stand.hv) * V + column), tile, HV * V, 64, left_v, False, MASK_V)
    if WRITE:
        write = room.w_s.index(stage).load(COLUMNS)
        dx *= (clamp_away_from_zero(write, least) if DU_IS_DV else write)[None, :]
    tile.permute((1, 0)).store(narrow(dx, dtype))
    at = to.dv + (((stand.start + c * 64) * HV + stand.hv) * V + column)
    put_tile(at, tile, HV * V, stand.length - c * 64, left_v, True, MASK_V)
    done = warpgroup_mma_wait(0, deps=dS1 + (left_q, left_k))
    new = (done[0],)
    for tk in gl.static_range(NK - 1):
        new = new + (done[tk + 1],)
    free(room.done.index(stage))
    return new


@gluon.jit
def walk(
    to, scale, room, P_s, tile, stand, least: gl.constexpr, DU_IS_DV: gl.constexpr, HALF: gl.constexpr,
    kind: gl.constexpr,
):  # fmt: skip
    """One of the two warp groups that compute, with the values from 128 `pair` + 64 HALF on."""
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    NK: gl.constexpr = kind.NK
    column = stand.pair * 128 + HALF * 64
    left_v = V - column
    at_carry = to.dstate + ((stand.n.to(gl.int64) * HV + stand.hv) * K * V + column)
    if kind.SPLIT > 0:
        at = to.begins + (((stand.n * stand.parts + stand.part).to(gl.int64) * HV + stand.hv) * V + column) * K
        dS = load_state(at, tile, K, K, left_v, NK, False)
    else:
        dS = load_state(at_carry, tile, K, V, left_v, NK, True)
    barrier()  # here once, as in scan_hopper.py
    stage = 0
    phase = 0
    for back in range(0, stand.last - stand.first):
        c = stand.last - 1 - back
        dS = walk_chunk(dS, to, scale, room, P_s, tile, stage, phase, c, column, stand, least, DU_IS_DV, HALF, kind)
        stage, phase = next_buffer(stage, phase, kind)
    if stand.part == 0:
        store_final(at_carry, dS, tile, K, V, left_v, NK)


@gluon.jit(do_not_specialize=["T", "segment", "segments", "parts"])
def hopper_reverse_kernel(
    q, k, e, do, gates, decay_bounds, wy_tiles, dstate, dstates, du, dv, begins, ends, cu, scale, T,
    segment, segments, parts,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    K0: gl.constexpr, K1: gl.constexpr, BV: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, OWN: gl.constexpr, WRITE: gl.constexpr, READ_EARLY: gl.constexpr,
    PACKED: gl.constexpr, DU_IS_DV: gl.constexpr, UNIT: gl.constexpr, SPLIT: gl.constexpr,
    MIN_BETA: gl.constexpr, ENDS: gl.constexpr,
    TERMS: gl.constexpr, PREC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, part, value head, tile of 128 values), as in reverse.py.

    To be launched with 4 warps, which become 12, and 168 registers a thread, which they share out anew."""
    gl.static_assert(C == 64 and BV == 128 and K <= K0 + K1 and TERMS == 1)
    gl.static_assert(not OWN and not ENDS and K % 8 == 0 and V % 8 == 0)
    gl.static_assert(dstates.dtype == k.dtype and k.dtype.element_ty.primitive_bitwidth == 16)
    NK: gl.constexpr = (K0 + K1) // 64
    BUFFERS: gl.constexpr = 3 if NK <= 2 else 2
    V_TILES: gl.constexpr = (V + 127) // 128
    EARLY: gl.constexpr = READ_EARLY and DECAY != "none"
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    pair = pid % V_TILES
    hv = pid // V_TILES % HV
    n, part = sequence_and_segment(pid // (V_TILES * HV), parts, V_TILES * HV)
    start, length, slot, begins_at, first_place, first, last = chunk_range(
        n, part, cu, T, segment, segments, C, UNIT, SPLIT, PACKED
    )
    if first < last:
        kind: gl.constexpr = kind_of(
            H, HV, K, V, NK, BUFFERS, DECAY, DELTA, WRITE, True, EARLY, READ_EARLY, 0, SPLIT, True, dtype
        )
        T_dtype: gl.constexpr = wy_tiles.dtype.element_ty if DELTA else dtype
        room, P_s, tiles, _ = room_of(kind, T_dtype)
        to = Results(dstate, begins, dstates, du, dv)
        stand = Stand(start, length, begins_at, first, first, last, first_place, 0, n, part, parts, part == 0, hv, pair)
        gl.warp_specialize(
            [
                (walk, (to, scale, room, P_s[0], tiles[0], stand, MIN_BETA, DU_IS_DV, 0, kind)),
                (walk, (to, scale, room, P_s[1], tiles[1], stand, MIN_BETA, DU_IS_DV, 1, kind)),
                (copy_chunks, (q, k, do, gates, wy_tiles, room, slot, stand, kind, True)),
            ],
            [4, 4],
            [240, 24] if NK > 3 else [232, 40],
        )
