"""Cross entropy of rows of logits; the gradient overwrites the logits.

R rows, L vocabulary. largest, total: running maximum of the logits z, and sum of exp(z - largest)
"""

from typing import NamedTuple

import triton
import triton.language as tl

from deltazoo.backends.triton.device.layout import LOG2E

_LOWEST = tl.constexpr(-3.4e38)  # a finite start of the maximum: -inf - (-inf) would be NaN


class LossTraits(NamedTuple):
    """Compile-time parameters of `cross_entropy_kernel`.

    Args:
        L: vocabulary.
        STRIDE: elements from row to row of the logits.
        BLOCK: columns that a program loads together.
        CAP, Z_LOSS, SCALED, GRADIENTS: whether there is a cap, a z loss, a factor per row, and a gradient.
    """

    L: int
    STRIDE: int
    BLOCK: int
    CAP: bool
    Z_LOSS: bool
    SCALED: bool
    GRADIENTS: bool


@triton.jit
def load_logits(row, columns, L: tl.constexpr, MASKED: tl.constexpr):
    """Load logits in float32; -inf beyond the vocabulary."""
    if MASKED:
        return tl.load(row + columns, mask=columns < L, other=float("-inf")).to(tl.float32)
    return tl.load(row + columns).to(tl.float32)


@triton.jit
def capped(z, cap, CAP: tl.constexpr):
    """Return cap tanh(z / cap), or z without a cap."""
    if CAP:
        return cap - 2 * cap / (1 + tl.exp2(z * (2 * LOG2E / cap)))
    return z


@triton.jit
def add_block(largest, total, row, columns, cap, L: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Update `largest` and `total` [BLOCK] by one column each, with one exponential per column."""
    z = load_logits(row, columns, L, MASKED)
    if CAP:
        z = capped(z, cap, CAP)
        if MASKED:
            z = tl.where(columns < L, z, float("-inf"))
    ratio = tl.exp2(-tl.abs(z - largest) * LOG2E)
    total = tl.where(z > largest, total * ratio + 1, total + ratio)
    return tl.maximum(largest, z), total


@triton.jit
def store_gradient(
    row, columns, target, largest, factor, scale, cap, L: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr
):
    """Overwrite a block of logits by their gradients, (factor exp(z - largest) - scale [column = target]) dz/dlogit."""
    z = capped(load_logits(row, columns, L, MASKED), cap, CAP)
    d = tl.exp2((z - largest) * LOG2E) * factor - tl.where(columns == target, scale, 0.0)
    if CAP:
        d *= 1 - (z / cap) * (z / cap)
    d = d.to(row.dtype.element_ty)
    if MASKED:
        tl.store(row + columns, d, mask=columns < L)
    else:
        tl.store(row + columns, d)


@triton.jit(do_not_specialize=["ignore_index", "z_loss", "cap"])
def cross_entropy_kernel(
    logits, targets, scales, losses, ignore_index, z_loss, cap,
    L: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr, Z_LOSS: tl.constexpr,
    SCALED: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Compute the loss of a row, lse - z[target] + z_loss lse^2, and with GRADIENTS its gradient, scaled.

    Grid: one program per row. With GRADIENTS it reads the row twice, the second time from the L2 cache.

    Reads logits [R, L] with STRIDE elements from row to row, targets [R] int64, with SCALED scales [R].
    Writes losses [R] float32: 0 where the target is ignored, NaN where it is no column; with GRADIENTS logits.
    """
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * STRIDE
    target = tl.load(targets + r)
    ignored = target == ignore_index
    invalid = (target < 0) | (target >= L)
    target = tl.where(invalid, 0, target).to(tl.int32)
    # loaded before the reductions, whose barriers ensure that no warp has overwritten it yet
    target_z = capped(tl.load(row + target).to(tl.float32), cap, CAP)
    lanes = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    FULL: tl.constexpr = L // BLOCK * BLOCK
    for start in range(0, FULL, BLOCK):
        largest, total = add_block(largest, total, row, start + lanes, cap, L, CAP, False)
    if FULL < L:
        largest, total = add_block(largest, total, row, FULL + lanes, cap, L, CAP, True)
    row_largest = tl.max(largest, 0)
    row_total = tl.sum(total * tl.exp2((largest - row_largest) * LOG2E), 0)
    log_total = tl.log2(row_total) / LOG2E
    loss = row_largest - target_z + log_total
    scale = tl.load(scales + r).to(tl.float32) if SCALED else 1.0
    scale = tl.where(ignored, 0.0, scale)
    factor = scale / row_total
    if Z_LOSS:
        lse = row_largest + log_total
        loss += z_loss * lse * lse
        factor *= 1 + 2 * z_loss * lse
    tl.store(losses + r, tl.where(ignored, 0.0, tl.where(invalid, float("nan"), loss)))
    if GRADIENTS:
        for start in range(0, FULL, BLOCK):
            store_gradient(row, start + lanes, target, row_largest, factor, scale, cap, L, CAP, False)
        if FULL < L:
            store_gradient(row, FULL + lanes, target, row_largest, factor, scale, cap, L, CAP, True)
