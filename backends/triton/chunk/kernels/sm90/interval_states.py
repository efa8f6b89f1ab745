"""States of the fused backward pass (fused_backward.py), and the signal that they are stored."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from deltazoo.backends.triton.chunk.kernels.sm90.common import barrier
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import reinterpret
from deltazoo.backends.triton.chunk.kernels.sm90.sweep_reductions import ACC_VK, ACC_VT
from deltazoo.backends.triton.device.layout import opaque_zero

# global stores of S^T in 16 bits: the four threads of a row fill a 32-byte sector, as common.STORE_64_COLUMNS
STORE_STATE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]], [], [128, 128],
    )
)  # fmt: skip
# Fields of chunk_info while states are recomputed, instead of K_ROW and GATE_ROW, in units of 16 bytes: the distance
# from dq to rows 0 to 63 of the chunk's S^T, and from there to rows 64 to 127.
FIRST_ROWS_OFFSET = gl.constexpr(1)
LAST_ROWS_OFFSET = gl.constexpr(2)
SMEM_SPILLED = gl.constexpr(gl.SwizzledSharedLayout(2, 1, 16, [1, 0]))


@gluon.jit
def state_rows(grads, spare, token, is_last, n, h, traits: gl.constexpr):
    """Return pointers to rows 0 and 64 of S^T [V, K] before a chunk; rows are H K elements apart.

    They are in the chunk's rows of dq and dk, or, for the last chunk of sequence n, in spare [N, 128, H, K].
    """
    key = (token * traits.H + h) * traits.K
    spare_at = spare + (n.to(gl.int64) * (128 * traits.H) + h) * traits.K
    first = gl.where(is_last, spare_at, grads.dq + key)
    return first, gl.where(is_last, spare_at + 64 * traits.H * traits.K, grads.dk + key)


@gluon.jit
def distance(to, origin):
    """Return the distance between two pointers in units of 16 bytes."""
    return (to.to(gl.int64) - origin.to(gl.int64)) >> 4


@gluon.jit
def store_state(base, last_rows_offset, S_16, zero, stride: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Store S^T [128 values, 128 keys] in 16 bits, up to `rows` and `columns`; row 64 is at base + last_rows_offset."""
    out = gl.convert_layout(S_16, STORE_STATE)
    i = gl.arange(0, 128, gl.SliceLayout(1, STORE_STATE))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, STORE_STATE))[None, :]
    # a thread has rows of one half only: a product with i // 64 takes fewer registers than a select between two bases
    at = base + i // 64 * last_rows_offset + ((i // 16 % 4 * 16 + i % 8) * stride + (j // 64 * 64 + j % 16) + zero * 64)
    at = at + (i // 8 % 2 * (8 * stride) + j // 16 % 4 * 16)
    gl.store(at, out, mask=(i < rows) & (j < columns))


@gluon.jit
def opaque_copy(value):
    """Return `value` in a form the compiler can neither fold nor hoist out of a loop."""
    text: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(text, "=r,r", [value], gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_interval_state(
    state, checkpoints, checkpoint_base, interval_first, n, hv, traits: gl.constexpr, HAS_STATE: gl.constexpr,
    CHECKPOINT_CHUNKS: gl.constexpr,
):  # fmt: skip
    """Load accumulators of S^T [128 values, 128 keys] before an interval: a checkpoint, the initial state, or zero.

    checkpoint_base: index of the sequence's first checkpoint, minus 1. Its first interval starts from `state`.
    """
    HV: gl.constexpr = traits.HV
    K: gl.constexpr = traits.K
    V: gl.constexpr = traits.V
    i = gl.arange(0, 128, gl.SliceLayout(1, ACC_VK))[:, None]
    j = gl.arange(0, 128, gl.SliceLayout(0, ACC_VK))[None, :]
    inside = (i < V) & (j < K)
    at = checkpoints + ((checkpoint_base + interval_first // CHECKPOINT_CHUNKS).to(gl.int64) * HV + hv) * V * K
    S = gl.load(at + (i * K + j), mask=inside & (interval_first > 0), other=0.0).to(gl.float32)
    if HAS_STATE:
        state_at = state + (n.to(gl.int64) * HV + hv) * K * V
        # otherwise the compiler would hoist these addresses out of the loop over intervals, and spill them
        i += opaque_zero(opaque_copy(interval_first), 20)
        S += gl.load(state_at + (j * V + i), mask=inside & (interval_first == 0), other=0.0)
    return S


@gluon.jit
def spill_dstate(dS, first_columns, last_columns):
    """Move the accumulators of dS^T to two idle buffers, to free their registers while states are recomputed."""
    barrier()  # all warps have finished reading the buffers
    halves = gl.split(gl.permute(gl.reshape(dS, [128, 2, 64]), (0, 2, 1)))
    reinterpret(first_columns, gl.float32, [128, 64], SMEM_SPILLED).store(gl.convert_layout(halves[0], ACC_VT))
    reinterpret(last_columns, gl.float32, [128, 64], SMEM_SPILLED).store(gl.convert_layout(halves[1], ACC_VT))


@gluon.jit
def reload_dstate(first_columns, last_columns):
    """Load the accumulators of dS^T that `spill_dstate` stored."""
    first = reinterpret(first_columns, gl.float32, [128, 64], SMEM_SPILLED).load(ACC_VT)
    last = reinterpret(last_columns, gl.float32, [128, 64], SMEM_SPILLED).load(ACC_VT)
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(first, last), (0, 2, 1)), [128, 128]), ACC_VK)


@gluon.jit
def publish_states(states_stored):
    """Make the consumers' global stores visible to the producer, whose cp.async reads bypass L1, and arrive."""
    zero = gl.arange(0, 256, gl.BlockedLayout([1], [32], [8], [0]))
    gl.inline_asm_elementwise("fence.acq_rel.gpu;\nmov.b32 $0, $1;", "=r,r", [zero], gl.int32, is_pure=False, pack=1)
    barrier()
    mbarrier.arrive(states_stored, count=1)
