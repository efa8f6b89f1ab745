"""Prefetches of the elementwise kernels.

A thread can load the operands of few tokens before it uses them, because each takes a register. Operands of later
tokens are prefetched into L1, which takes none. Of each sector of 32 bytes one element is addressed.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.element.kernels.tile import locate_block


@triton.jit
def sector_offsets(
    row, last, column, ROWS: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, SECTOR: tl.constexpr
):
    """Return one offset in each sector of a tile [ROWS, COLUMNS] at (row, column), with STRIDE elements per row.

    Rows >= `last` become `last` - 1, with `last` > row, and columns >= STRIDE become STRIDE - 1. SECTOR: elements per
    sector.
    """
    PER_ROW: tl.constexpr = max(COLUMNS // SECTOR, 1)
    i = tl.arange(0, ROWS * PER_ROW)
    rows = tl.minimum(row + i // PER_ROW, last - 1)
    columns = tl.minimum(column + i % PER_ROW * SECTOR, STRIDE - 1)
    return tl.cast(rows, tl.int64) * STRIDE + columns


@triton.jit
def prefetch_tile(x, row, last, column, ROWS: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Prefetch a tile of x [.., STRIDE]; the arguments are those of `sector_offsets`."""
    SECTOR: tl.constexpr = 256 // x.dtype.element_ty.primitive_bitwidth
    at = x + sector_offsets(row, last, column, ROWS, STRIDE, COLUMNS, SECTOR)
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def first_channel(traits: tl.constexpr):
    """Return the first channel of a program."""
    block, h = locate_block(traits)
    return h * (traits.HV // traits.H) + block * traits.BC


@triton.jit
def prefetch_values(x, t, last, COUNT: tl.constexpr, traits: tl.constexpr):
    """Prefetch v or d_o of COUNT tokens from t on, at most up to `last` - 1."""
    channel = first_channel(traits)
    prefetch_tile(x, t, last, channel * traits.V, COUNT, traits.HV * traits.V, traits.BC * traits.VP)


@triton.jit
def prefetch_decays(log_decay, step, t, last, COUNT: tl.constexpr, traits: tl.constexpr):
    """Prefetch the decays of COUNT tokens from t on, at most up to `last` - 1; not decays per key, which fill L1."""
    channel = first_channel(traits)
    if traits.DECAY == "rate":
        prefetch_tile(step, t, last, channel, COUNT, traits.HV, traits.BC)
    elif traits.DECAY == "head":
        prefetch_tile(log_decay, t, last, channel, COUNT, traits.HV, traits.BC)


@triton.jit
def prefetch_shared_keys(x, t, last, COUNT: tl.constexpr, traits: tl.constexpr):
    """Prefetch q or k of COUNT tokens from t on, at most up to `last` - 1, if channels share them."""
    if traits.SHARED:
        _, h = locate_block(traits)
        prefetch_tile(x, t, last, h * traits.K, COUNT, traits.H * traits.K, traits.RN * traits.TN)


@triton.jit
def prefetch_checkpoint(checkpoints, slot, traits: tl.constexpr):
    """Prefetch the states of a program's channels from a slot of checkpoints [slots, K, V, HV]."""
    channel = first_channel(traits)
    row = tl.cast(slot, tl.int64) * (traits.K * traits.V)
    ROWS: tl.constexpr = traits.RN * traits.TN * traits.VP
    prefetch_tile(checkpoints, row, row + traits.K * traits.V, channel, ROWS, traits.HV, traits.BC)
