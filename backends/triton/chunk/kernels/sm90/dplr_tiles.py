"""Layouts, copies and sums of decays that the DPLR kernels for sm_90 share.

Tiles are [64 tokens, 64 keys]. WARPS: 4 or 8, the warps of the kernel
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from deltazoo.backends.triton.chunk.kernels.sm90.common import to_16_bits
from deltazoo.backends.triton.chunk.kernels.sm90.gluon_versions import async_load
from deltazoo.backends.triton.device.layout import LOG2E, clamp_log2_decay


@gluon.constexpr_function
def accumulator(warps):
    """Return the layout of an accumulator [64, 64] of 4 warps, or of 8: two warp groups of 32 columns each."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, warps // 4], instr_shape=[16, 256 // warps, 16])


@gluon.constexpr_function
def a_operand(warps):
    """Return the layout of an A operand in registers of a product with that accumulator."""
    return gl.DotOperandLayout(0, accumulator(warps), 2)


@gluon.constexpr_function
def float32_rows(warps):
    """Return the layout in which log decays are loaded, 16 bytes per thread."""
    return gl.BlockedLayout([1, 4], [2, 16], [warps, 1], [1, 0])


# with 8 warps: accumulators, their rows and columns, and the A operand in registers; copies of 16 bytes per thread
ACC = gl.constexpr(accumulator(8))
ROWS = gl.constexpr(gl.SliceLayout(1, ACC.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, ACC.value))
A_OPERAND = gl.constexpr(a_operand(8))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
# as common.STORE_64_COLUMNS
STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 32]], [],
        [64, 64],
    )
)  # fmt: skip


@gluon.jit
def copy_tile(tile, base, stride: gl.constexpr, rows):
    """Issue the cp.async of a tile [64, 64] of a row-major matrix; zero-fill from row `rows` on."""
    i = gl.arange(0, 64, gl.SliceLayout(1, COPY))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    async_load(tile, base + (i * stride + j), mask=(i < rows) & (j < 64))


@gluon.jit
def store_tile(base, tile, stride: gl.constexpr, rows):
    """Store an accumulator [64, 64] in the dtype of `base`, of 16 bits, up to `rows`."""
    out = gl.convert_layout(to_16_bits(tile, base.dtype.element_ty), STORE)
    i = gl.arange(0, 64, gl.SliceLayout(1, STORE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, STORE))[None, :]
    gl.store(base + (i * stride + j), out, mask=i < rows)


@gluon.jit
def load_log2_decays(log_decay, stride: gl.constexpr, rows, WARPS: gl.constexpr):
    """Load log2 of the decays of 64 tokens [64, 64], in the layout `float32_rows`; zeros from row `rows` on."""
    layout: gl.constexpr = float32_rows(WARPS)
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    g = gl.load(log_decay + (i * stride + j), mask=(i < rows) & (j < 64), other=0.0)
    return clamp_log2_decay(g.to(gl.float32) * LOG2E)


@gluon.jit
def store_decay_terms(g, g_hi, g_lo):
    """Store log2 decays in two float16 terms, which together have 22 bits."""
    hi = g.to(gl.float16)
    g_hi.store(hi)
    g_lo.store((g - hi.to(gl.float32)).to(gl.float16))


@gluon.jit
def load_decays(g_hi, g_lo, WARPS: gl.constexpr):
    """Load the sum of both terms as an accumulator."""
    layout: gl.constexpr = accumulator(WARPS)
    return g_hi.load(layout).to(gl.float32) + g_lo.load(layout).to(gl.float32)


@gluon.jit
def middle_and_end(g, WARPS: gl.constexpr):
    """Return the sums of g over the first 32 tokens and over all [64], in the layout of an accumulator's columns."""
    layout: gl.constexpr = gl.SliceLayout(0, accumulator(WARPS))
    i = gl.arange(0, 64, gl.SliceLayout(1, float32_rows(WARPS)))[:, None]
    middle = gl.convert_layout(gl.sum(gl.where(i < 32, g, 0.0), 0), layout)
    return middle, gl.convert_layout(gl.sum(g, 0), layout)


@gluon.jit
def token_indices(zero, WARPS: gl.constexpr):
    """Return the indices i [64, 1] and t [1, 64] of a mask that is an A operand.

    zero: from `opaque_zero` (layout.py). ptxas would rematerialise a constant element of the mask in its register while
    a wgmma still reads the register.
    """
    return (
        gl.arange(0, 64, gl.SliceLayout(1, a_operand(WARPS)))[:, None] + zero,
        gl.arange(0, 64, gl.SliceLayout(0, a_operand(WARPS)))[None, :],
    )


@gluon.jit
def sum_decays(mask, g_hi, g_lo, WARPS: gl.constexpr):
    """Return the product mask g, sums of log2 decays, for a float32 mask [64 tokens i, 64 tokens t] of -1, 0 and 1."""
    sums = gl.zeros([64, 64], gl.float32, accumulator(WARPS))
    a = mask.to(gl.float16)
    sums = warpgroup_mma(a, g_lo, sums, use_acc=False, is_async=True)
    sums = warpgroup_mma(a, g_hi, sums, is_async=True)
    sums, a = warpgroup_mma_wait(0, deps=[sums, a])
    return sums


@gluon.jit
def sums_to_middle(zero, WARPS: gl.constexpr):
    """Return the mask whose product with g is G_i - G_31: 1 for 31 < t <= i, -1 for i < t <= 31, else 0."""
    i, t = token_indices(zero, WARPS)
    return gl.where((t > 31) & (t <= i), 1.0, 0.0) - gl.where((t <= 31) & (t > i), 1.0, 0.0)


@gluon.jit
def largest(x):
    """Return the largest magnitude of the elements of an accumulator."""
    return gl.max(gl.max(gl.abs(x), 1), 0)
