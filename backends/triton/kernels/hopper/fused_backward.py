"""The whole backward of a sequence and head in one program, for Hopper GPUs, in Gluon.

Segment after segment, the last first, it replays the states from a checkpoint, then walks back as walk_hopper.py does.
What it keeps of a chunk lies where the chunk's gradients will: x in the rows of dv, and of S^T 64 rows in those of dq,
64 in those of dk. It takes what walk_hopper.py takes, with a key head for each value head, and sequences in one part.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.kernels.hopper.common import (
    barrier,
    barriers,
    fetch,
    fetch_gates,
    fetch_square,
    free,
    narrow,
    of_copy,
    places_of_copy,
    tell,
    times_inverse,
    widen,
)
from deltazoo.backends.triton.kernels.hopper.sweep_consumer import walk_chunk
from deltazoo.backends.triton.kernels.hopper.sweep_producer import FEW, fetch_first
from deltazoo.backends.triton.kernels.hopper.sweep_reductions import (
    LEFT,
    LEFT_STATE,
    LEFT_TOKENS,
    ROW_OF_VALUES,
    STATE,
    STATE_COLUMNS,
    TOKENS,
    VALUES,
    left_by,
    number,
    put_across,
    put_kept,
)
from deltazoo.backends.triton.kernels.hopper.sweep_traits import BUFFERS, Results, kind_of, registers_to_copy, room_of
from deltazoo.backends.triton.kernels.layout import first_chunk_slot, opaque_zero, sequence_bounds

# of S^T in 16 bits on its way to memory: the four threads of a row have a sector of 32 bytes, as in hopper.OUT
STATE_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]], [], [128, 128],
    )
)  # fmt: skip
# what the copying warp group leaves of a chunk for the replay, beside its first row of v and its tokens: how far the
# first half of its state's rows is from dq, and the second from that
FIRST = gl.constexpr(1)
SECOND = gl.constexpr(2)
PARKED = gl.constexpr(gl.SwizzledSharedLayout(2, 1, 16, [1, 0]))


@gluon.jit
def rows_of_state(to, spare, row, is_last, n, h, kind: gl.constexpr):
    """Where the first 64 rows of S^T [V, K] before a chunk lie, and where the others, each H K apart: in the rows of
    the chunk in dq and in dk, or, of a sequence's last chunk, which may have fewer, in spare [N, 128, H, K]."""
    key = (row * kind.H + h) * kind.K
    place = spare + (n.to(gl.int64) * (128 * kind.H) + h) * kind.K
    first = gl.where(is_last, place, to.dq + key)
    return first, gl.where(is_last, place + 64 * kind.H * kind.K, to.dk + key)


@gluon.jit
def apart(there, here):
    """How many times 16 bytes one place is from another."""
    return (there.to(gl.int64) - here.to(gl.int64)) >> 4


@gluon.jit
def copy_segments(
    q, k, v, do, gates, wy_tiles, to, spare, room, replayed, start, length, slot, last, n, hv, kind: gl.constexpr,
    CHECKPOINT_EVERY: gl.constexpr,
):  # fmt: skip
    """The copying warp group: of each segment what the replay takes, chunk after chunk, then what the walk takes."""
    H: gl.constexpr = kind.H
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    DECAY: gl.constexpr = kind.DECAY
    DELTA: gl.constexpr = kind.DELTA
    WRITE: gl.constexpr = kind.WRITE
    h = hv // (HV // H)
    filled = 0  # buffers
    turned = 0  # segments
    gone = 0  # chunks that were walked
    end = last
    while end > 0:
        begin = (end - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        for c in range(begin, end):
            z = opaque_zero(filled, 20)
            stage = filled % 2
            mbarrier.wait(room.done.index(stage), (filled // 2 & 1) ^ 1)
            row = start + c * 64
            left = length - c * 64
            place = (slot + c).to(gl.int64) * HV + hv
            fetch(
                room.k_s.index(stage), of_copy(k + (row * H + h) * K, H * K, 64, 128, z), 0, left, K, True, K % 128 != 0
            )
            fetch_gates(gates + place * 192, room, stage, DECAY, False, DELTA, WRITE)
            async_copy.commit_group()
            i = gl.arange(0, 8, FEW)
            first, second = rows_of_state(to, spare, row, c + 1 == last, n, hv, kind)
            numbers = gl.where(i == ROW_OF_VALUES, row * HV + hv, apart(first, to.dq))
            numbers = gl.where(i == SECOND, apart(second, first), numbers)
            room.numbers_s.index(stage).store(gl.where(i == LEFT_TOKENS, left.to(gl.int64), numbers))
            v_at = of_copy(v + (row * HV + hv) * V, HV * V, 64, 128, z)
            fetch(room.do_s.index(stage), v_at, 0, left, V, True, V % 128 != 0)
            if DELTA:
                fetch_square(room.T_s.index(stage), wy_tiles + place * (64 * 72), True, z)
            async_copy.commit_group()
            tell(room.came.index(stage), 1, True)
            tell(room.rest_came.index(stage), 0, True)
            filled += 1
        for back in range(0, end - begin + 1):
            # that of the next chunk, and the state and x of this one
            z = opaque_zero(filled, 20)
            c = end - 1 - back + z
            if back > 0:
                if back == 1:
                    mbarrier.wait(replayed, turned & 1)
                mbarrier.wait(room.walked, (gone & 1) ^ 1)
                row = start + c * 64 + 64
                low, high = rows_of_state(to, spare, row, c + 2 == last, n, hv, kind)
                r, _, _ = places_of_copy(128, 128)
                at = gl.where(r < 8, of_copy(low, H * K, 128, 128, z), of_copy(high - 64 * H * K, H * K, 128, 128, z))
                fetch(room.S_s.index(z), at, 0, V, K, V % 128 != 0, K % 128 != 0)
                x = to.dv if DELTA else v
                x_at = of_copy(x + (row * HV + hv) * V, HV * V, 64, 128, z)
                fetch(room.x_s.index(z), x_at, 0, length - c * 64 - 64, V, True, V % 128 != 0)
                async_copy.commit_group()
                tell(room.states_came, 0, True)
                gone += 1
            if c >= begin:
                stage = filled % 2
                mbarrier.wait(room.done.index(stage), (filled // 2 & 1) ^ 1)
                fetch_first(
                    q, k, do, gates, wy_tiles, room, stage, z, start + c * 64, length - c * 64,
                    (slot + c).to(gl.int64) * HV + hv, c.to(gl.int64), c - begin, (c == last - 1).to(gl.int32),
                    h, hv, hv, kind,
                )  # fmt: skip
                tell(room.came.index(stage), 1, True)
                tell(room.rest_came.index(stage), 0, True)
                filled += 1
        turned += 1
        end = begin


@gluon.jit
def put_state(base, second, low, z, stride: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Write S^T [128 values, 128 keys] of a product up to `rows` and `columns`, from row 64 on `second` numbers on."""
    out = gl.convert_layout(low, STATE_OUT)
    i = gl.arange(0, 128, gl.SliceLayout(1, STATE_OUT))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, STATE_OUT))[None, :]
    # a thread has rows of one half: a factor takes it fewer registers than a choice
    at = base + i // 64 * second + ((i // 16 % 4 * 16 + i % 8) * stride + (j // 64 * 64 + j % 16) + z * 64)
    at = at + (i // 8 % 2 * (8 * stride) + j // 16 % 4 * 16)
    gl.store(at, out, mask=(i < rows) & (j < columns))


@gluon.jit
def anew(number):
    """The same number, which the compiler does not know, and may not take from another round of a loop."""
    text: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(text, "=r,r", [number], gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_begin(
    state,
    checkpoints,
    checkpoint,
    begin,
    n,
    hv,
    kind: gl.constexpr,
    GIVEN: gl.constexpr,
    CHECKPOINT_EVERY: gl.constexpr,
):
    """S^T [128 values, 128 keys] before a segment's first chunk: a checkpoint, or the initial state."""
    HV: gl.constexpr = kind.HV
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    i = gl.arange(0, 128, gl.SliceLayout(1, STATE))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, STATE))[None, :]
    inside = (i < V) & (j < K)
    at = checkpoints + ((checkpoint + begin // CHECKPOINT_EVERY).to(gl.int64) * HV + hv) * V * K
    S = gl.load(at + (i * K + j), mask=inside & (begin > 0), other=0.0).to(gl.float32)
    if GIVEN:
        given = state + (n.to(gl.int64) * HV + hv) * K * V
        i += opaque_zero(anew(begin), 20)
        S += gl.load(given + (j * V + i), mask=inside & (begin == 0), other=0.0)
    return S


@gluon.jit
def park(dS, first, second):
    """dS^T to two tiles of shared memory that hold nothing else meanwhile: the replay wants its registers."""
    barrier()  # which have been read
    halves = gl.split(gl.permute(gl.reshape(dS, [128, 2, 64]), (0, 2, 1)))
    first._reinterpret(gl.float32, [128, 64], PARKED).store(gl.convert_layout(halves[0], VALUES))
    second._reinterpret(gl.float32, [128, 64], PARKED).store(gl.convert_layout(halves[1], VALUES))


@gluon.jit
def parked(first, second):
    """What was parked."""
    low = first._reinterpret(gl.float32, [128, 64], PARKED).load(VALUES)
    high = second._reinterpret(gl.float32, [128, 64], PARKED).load(VALUES)
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [128, 128]), STATE)


@gluon.jit
def replay_chunk(S, to, room, z, stage, phase, kind: gl.constexpr):
    """A chunk of the replay: keeps S^T before it, and x, and returns S^T after it. v comes where do does later."""
    K: gl.constexpr = kind.K
    V: gl.constexpr = kind.V
    DECAY: gl.constexpr = kind.DECAY
    DELTA: gl.constexpr = kind.DELTA
    dtype: gl.constexpr = kind.dtype
    low = narrow(S, dtype)
    mbarrier.wait(room.came.index(stage), phase)
    # here, where no product is under way: else the compiler waits for those that are
    if DECAY != "none":
        end = room.G_s.index(stage).slice(63, 1).load(STATE_COLUMNS)
        S0 = S * gl.exp2(end)[None, :]
    else:
        S0 = S
    y = gl.zeros([128, 64], gl.float32, VALUES)
    if DELTA:
        left_S = gl.convert_layout(low, LEFT, assert_trivial=True)
        y = warpgroup_mma(left_S, room.k_s.index(stage).permute((1, 0)), y, use_acc=False, is_async=True)
    numbers = room.numbers_s.index(stage)
    put_state(to.dq + number(numbers, FIRST) * 8, number(numbers, SECOND) * 8, low, z, kind.H * K, V, K)
    if DECAY != "none":
        fade = left_by(room.G_s.index(stage), TOKENS)
    # u = w v - c S0^T k,  x = T u
    mbarrier.wait(room.rest_came.index(stage), phase)
    left_v = room.do_s.index(stage).permute((1, 0)).load(LEFT)
    x = widen(gl.convert_layout(left_v, VALUES, assert_trivial=True))
    if kind.WRITE:
        x *= room.w_s.index(stage).load(TOKENS)[None, :]
    if DELTA:
        erase = room.c_s.index(stage).load(TOKENS)
        y, _ = warpgroup_mma_wait(0, deps=[y, low])
        x -= y * erase[None, :]
        SCALED: gl.constexpr = room.T_s.dtype == gl.float16
        x, left_u, up = times_inverse(x, room.T_s.index(stage).permute((1, 0)), LEFT, SCALED)
        x, left_u = warpgroup_mma_wait(0, deps=[x, left_u])
        if SCALED:
            x *= up[:, None]
    # S' = e^Gend S0 + (e^(Gend - G) k)^T x
    if DECAY != "none":
        left_k = gl.convert_layout(narrow(x * fade[None, :], dtype), LEFT_STATE, assert_trivial=True)
    else:
        left_k = gl.convert_layout(narrow(x, dtype), LEFT_STATE, assert_trivial=True)
    S1 = warpgroup_mma(left_k, room.k_s.index(stage), S0, is_async=True)
    if DELTA:
        at_x = to.dv + number(numbers, ROW_OF_VALUES) * V
        left = number(numbers, LEFT_TOKENS).to(gl.int32)
        put_across(at_x, narrow(x, dtype), z, kind.HV * V, left, V, V % 128 != 0)
    S1, left_k = warpgroup_mma_wait(0, deps=[S1, left_k])
    return S1


@gluon.jit
def hand_over(replayed):
    """What all warps wrote to memory is there for the copying warp group, which reads past the first cache."""
    zero = gl.arange(0, 256, gl.BlockedLayout([1], [32], [8], [0]))
    gl.inline_asm_elementwise("fence.acq_rel.gpu;\nmov.b32 $0, $1;", "=r,r", [zero], gl.int32, is_pure=False, pack=1)
    barrier()
    mbarrier.arrive(replayed, count=1)


@gluon.jit
def replay_and_walk(
    v, b, to, state, checkpoints, dstate, scale, room, replayed, slots, slot, last, checkpoint, n, hv,
    kind: gl.constexpr, GIVEN: gl.constexpr, CHECKPOINT_EVERY: gl.constexpr,
):  # fmt: skip
    """The two warp groups that compute."""
    at_carry = dstate + (n.to(gl.int64) * kind.HV + hv) * kind.V * kind.K
    i = gl.arange(0, 128, gl.SliceLayout(1, STATE))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, STATE))[None, :]
    inside = (i < kind.V) & (j < kind.K)
    dS = gl.load(at_carry + (j * kind.V + i), mask=inside, other=0.0)
    apart = slots.to(gl.int64) * kind.HV
    stage = 0
    phase = 0
    odd = 0  # chunks that were walked
    end = last
    while end > 0:
        begin = (end - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        park(dS, room.S_s.index(0), room.dS_s.index(0))
        S = load_begin(state, checkpoints, checkpoint, begin, n, hv, kind, GIVEN, CHECKPOINT_EVERY)
        barrier()  # here, or the compiler has one in every round of the loop, for what was parked; as below
        for c in range(begin, end):
            S = replay_chunk(S, to, room, opaque_zero(c, 20), stage, phase, kind)
            free(room.done.index(stage))
            phase = phase ^ stage
            stage = stage ^ 1
        dS = parked(room.S_s.index(0), room.dS_s.index(0))
        hand_over(replayed)
        to_come = end - begin
        barrier()
        while to_come > 0:
            segments = 1 + opaque_zero(to_come, 23)
            dS, to_come = walk_chunk(
                dS, v, b, to, scale, room, to_come, stage, phase, odd, segments, slots, slots, kind
            )
            free(room.done.index(stage))
            phase = phase ^ stage
            stage = stage ^ 1
            odd = odd ^ 1
        end = begin
    if kind.DECAY != "none":
        barrier()
        put_kept(to.state_products + (slot.to(gl.int64) * kind.HV + hv), apart, room.sums_s, True)
    gl.store(at_carry + (j * kind.V + i), dS, mask=inside)


@gluon.jit(do_not_specialize=["slots", "T"])
def hopper_fused_backward_kernel(
    q, k, v, b, do, gates, wy_tiles, state, checkpoints, dstate, spare, dq, dk, dv, dgates, state_products, cu,
    slots, scale, T,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    DECAY: gl.constexpr, DELTA: gl.constexpr, ERASE: gl.constexpr, WRITE: gl.constexpr,
    ERASE_EARLY: gl.constexpr, READ_EARLY: gl.constexpr, PACKED: gl.constexpr, DU_IS_DV: gl.constexpr,
    GIVEN: gl.constexpr, CHECKPOINT_EVERY: gl.constexpr, MIN_BETA: gl.constexpr,
):  # fmt: skip
    """One program a (sequence, head). spare [N, 128, H, K] is scratch.

    To be launched with 8 warps, which become 12, and 168 registers a thread, which they share out anew."""
    gl.static_assert(C == 64 and K > 64 and K <= 128 and V <= 128 and H == HV)
    gl.static_assert(spare.dtype == k.dtype and dq.dtype == k.dtype and dv.dtype == k.dtype)
    gl.static_assert(k.dtype.element_ty.primitive_bitwidth == 16)
    dtype: gl.constexpr = k.dtype.element_ty
    pid = gl.program_id(0)
    hv = pid % HV
    n = pid // HV
    start, length = sequence_bounds(n, cu, T, PACKED)
    slot = first_chunk_slot(n, cu, T, C, PACKED)
    last = gl.cdiv(length, C)
    checkpoint = (slot // CHECKPOINT_EVERY if PACKED else n * ((last - 1) // CHECKPOINT_EVERY)) - 1
    if last > 0:
        kind: gl.constexpr = kind_of(
            H, HV, K, V, HV, DECAY, DELTA, ERASE, WRITE, ERASE_EARLY, READ_EARLY, DU_IS_DV, MIN_BETA, dtype
        )
        to = Results(dq, dk, dv, dgates, state_products, dk)
        # done: of each buffer, for two fills may be done with before one is waited for
        room = room_of(kind, wy_tiles.dtype.element_ty if DELTA else dtype, BUFFERS)
        replayed = barriers(1, 1).index(0)
        gl.warp_specialize(
            [
                (
                    replay_and_walk,
                    (
                        v, b, to, state, checkpoints, dstate, scale, room, replayed,
                        slots, slot, last, checkpoint, n, hv, kind, GIVEN, CHECKPOINT_EVERY,
                    ),
                ),
                (
                    copy_segments,
                    (
                        q, k, v, do, gates, wy_tiles, to, spare, room, replayed,
                        start, length, slot, last, n, hv, kind, CHECKPOINT_EVERY,
                    ),
                ),
            ],
            [4],
            [registers_to_copy(DECAY, DELTA)],
        )  # fmt: skip
