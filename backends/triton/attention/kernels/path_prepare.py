"""Preparation of PaTH attention: the transform of each block, the products over the tree, and the moved rows.

With the rows of a block W, K, and A = stril(Diag(beta) W W^T), X = (I + A)^-1,

    U = X Diag(beta) W,    M = X stril(Diag(beta) W K^T),    E = W^T U

a query row moves from its token to the start of the block by q - tril(q W^T) U, a key row to its end by k - M^T W, and
a row of a later query through the block by q (I - E), of an earlier key by k (I - E)^T. Two siblings together have
I - E = (I - E_right) (I - E_left).

path_tiles.py defines the tree and the sizes.
"""

import triton
import triton.language as tl

from deltazoo.backends.triton.attention.kernels.path_tiles import (
    C,
    block_slots,
    first_block,
    load_square,
    load_tile,
    locate_block,
    locate_tile,
    scores_in_block,
    store_square,
    store_tile,
    token_rows,
)
from deltazoo.backends.triton.chunk.kernels.portable.channel.dplr_prepare import round_operand
from deltazoo.backends.triton.chunk.kernels.portable.prepare import unit_lower_inverse

INVERSE_BLOCK = tl.constexpr(16)


@triton.jit
def dot_in_two_terms(x, y, PREC: tl.constexpr):
    """Return x y with x in two terms of tf32 and y rounded to one, if products are in tf32."""
    if PREC == "tf32":
        high = round_operand(x, False)
        y = round_operand(y, False)
        return tl.dot(x - high, y, tl.dot(high, y, input_precision=PREC), input_precision=PREC)
    else:
        return tl.dot(x, y, input_precision=PREC)


@triton.jit(do_not_specialize=["N", "T", "k_stride"])
def path_prepare_kernel(k, w, beta, inverse, U, M, tree, cu, N, T, k_stride, traits: tl.constexpr):
    """Write the matrices of a block.

    Grid: blocks x G. Reads k, w [B, T, G, D], beta [B, T, G]. Writes inverse, unless it is None, and M [blocks, G, C,
    C], U [blocks, G, C, D], and E to level 0 of tree [slots of all levels, G, D, D].
    """
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
    PREC: tl.constexpr = traits.PREC
    slot = tl.program_id(0) // G
    g = tl.program_id(0) % G
    _, start, length, t0 = locate_tile(slot, cu, N, T, C, traits.PACKED)
    if t0 < length:
        i = tl.arange(0, C)
        in_time = i < length - t0
        row = start + t0
        w_t = load_tile(w + (row * G + g) * D, i, in_time, G * D, D, traits.BD, True)
        k_step = tl.cast(k_stride, tl.int64) * traits.UNIT
        k_t = load_tile(k + row * k_step + g * D, i, in_time, k_step, D, traits.BD, True)
        b = tl.load(beta + (row + i) * G + g, mask=in_time, other=0.0).to(tl.float32)
        below = i[:, None] > i[None, :]
        A = tl.where(below, b[:, None] * tl.dot(w_t, tl.trans(w_t), input_precision=PREC), 0.0)
        wk = tl.where(below, tl.dot(w_t, tl.trans(k_t), input_precision=PREC), 0.0)
        X, _blocks = unit_lower_inverse(A, C, tl.float32, PREC, INVERSE_BLOCK)
        if PREC == "tf32":  # one Newton step: products in tf32 truncate, and the errors of all matrices add up
            eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
            X += tl.dot(X, eye - tl.dot(A + eye, X, input_precision="tf32x3"), input_precision=PREC)
        at = tl.cast(slot * G + g, tl.int64)
        if inverse is not None:
            store_square(inverse + at * (C * C), X, C)
        X *= b[None, :]
        w_t = w_t.to(tl.float32)
        U_t = dot_in_two_terms(X, w_t, PREC)
        store_tile(U + at * (C * D), U_t, i, i < C, D, D)
        store_square(M + at * (C * C), dot_in_two_terms(X, wk, PREC), C)
        U_t = round_operand(U_t, PREC != "tf32")
        store_square(tree + at * (D * D), tl.dot(tl.trans(w_t), U_t, input_precision=PREC), D)


@triton.jit(do_not_specialize=["N", "T", "size", "below"])
def path_merge_kernel(tree, cu, N, T, size, below, traits: tl.constexpr):
    """Multiply the matrices of sibling blocks of `size` tokens. A missing right sibling is the identity.

    Grid: blocks of 2 size tokens x G. below: the first slot of the level of the siblings.
    """
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
    slot = tl.program_id(0) // G
    g = tl.program_id(0) % G
    n, start, length, m = locate_block(slot, cu, N, T, 2 * size, traits.PACKED)
    if m * 2 * size < length:
        left = ((below + first_block(n, start, T, size, traits.PACKED) + 2 * m) * G + g) * (D * D)
        E = load_square(tree + left, D, traits.BD)
        if (2 * m + 1) * size < length:
            right = load_square(tree + left + G * D * D, D, traits.BD)
            E += right - tl.dot(right, E, input_precision=traits.PREC)
        above = below + block_slots(N, T, size, traits.PACKED) + slot
        store_square(tree + (above * G + g) * (D * D), E, D)


@triton.jit(do_not_specialize=["N", "T", "LEVELS", "q_stride", "k_stride", "v_stride"])
def path_move_kernel(
    q, k, v, w, U, M, tree, sums, rows, o_local, lse_local, q_start, k_end, cu, N, T, LEVELS, q_stride, k_stride,
    v_stride, traits: tl.constexpr,
):  # fmt: skip
    """Move the queries and keys of a block through the tree, and attend within the block.

    Grid: blocks x H. Reads q [B, T, H, D], k, w [B, T, G, D], v [B, T, G, V], sums [B, T, H] float64 or None, and the
    results of the kernels above. Writes rows; o_local [B, T, H, V] float32 and lse_local [B, T, H], log2 of the sum of
    exponentials within the block, unless o_local is None; unless q_start is None, the queries moved to the start of the
    sequence, q_start [B, T, H, D], and the keys moved to its end, k_end [B, T, G, D] float32.
    """
    H: tl.constexpr = traits.H
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
    V: tl.constexpr = traits.V
    BD: tl.constexpr = traits.BD
    PREC: tl.constexpr = traits.PREC
    slot = tl.program_id(0) // H
    h = tl.program_id(0) % H
    g = h // (H // G)
    n, start, length, t0 = locate_tile(slot, cu, N, T, C, traits.PACKED)
    if t0 < length:
        i = tl.arange(0, C)
        in_time = i < length - t0
        row = start + t0
        q_step = tl.cast(q_stride, tl.int64) * traits.UNIT
        k_step = tl.cast(k_stride, tl.int64) * traits.UNIT
        q_t = load_tile(q + row * q_step + h * D, i, in_time, q_step, D, BD, True)
        k_t = load_tile(k + row * k_step + g * D, i, in_time, k_step, D, BD, True)
        w_t = load_tile(w + (row * G + g) * D, i, in_time, G * D, D, BD, True)
        at = tl.cast(slot * G + g, tl.int64)
        M_t = load_square(M + at * (C * C), C, C)
        U_t = round_operand(load_tile(U + at * (C * D), i, i < C, D, D, BD, D != BD).to(tl.float32), PREC != "tf32")
        causal = i[:, None] >= i[None, :]
        q_w = tl.where(causal, tl.dot(q_t, tl.trans(w_t), input_precision=PREC), 0.0)
        if o_local is not None:
            v_step = tl.cast(v_stride, tl.int64) * traits.UNIT
            v_t = load_tile(v + row * v_step + g * V, i, in_time, v_step, V, traits.BV, True)
            s = scores_in_block(q_t, k_t, q_w, M_t, sums, row, h, i, in_time, traits)
            s = tl.where(causal & in_time[None, :], s, float("-inf"))
            m = tl.max(s, 1)
            p = tl.exp2(s - m[:, None])
            total = tl.sum(p, 1)
            o_t = tl.dot(p.to(v_t.dtype), v_t, input_precision=PREC) / total[:, None]
            store_tile(o_local + (row * H + h) * V, o_t, i, in_time, H * V, V)
            tl.store(lse_local + (row + i) * H + h, m + tl.log2(total), mask=in_time)
        a = t0 // C
        plane = token_rows(N, T, traits.PACKED) * (H * D)
        q_f = q_t.to(tl.float32) - tl.dot(round_operand(q_w, PREC != "tf32"), U_t, input_precision=PREC)
        below = tl.full([], 0, tl.int64)
        size = tl.full([], C, tl.int32)
        for level in range(LEVELS):
            b = a >> level
            if b & 1:
                store_tile(rows + level * plane + (row * H + h) * D, q_f, i, in_time, H * D, D)
                if b > 1 or q_start is not None:
                    sibling = below + first_block(n, start, T, size, traits.PACKED) + b - 1
                    E = load_square(tree + (sibling * G + g) * (D * D), D, BD)
                    q_f -= tl.dot(round_operand(q_f, PREC != "tf32"), E, input_precision=PREC)
            below += block_slots(N, T, size, traits.PACKED)
            size *= 2
        if q_start is not None:
            store_tile(q_start + (row * H + h) * D, q_f, i, in_time, H * D, D)
        if h % (H // G) == 0:
            k_f = k_t.to(tl.float32) - tl.dot(tl.trans(M_t), w_t.to(tl.float32), input_precision=PREC)
            below = tl.full([], 0, tl.int64)
            size = tl.full([], C, tl.int32)
            for level in range(LEVELS):
                b = a >> level
                if (b & 1) == 0 and (b + 1) * size < length:
                    store_tile(rows + level * plane + (row * H + g) * D, k_f, i, in_time, H * D, D)
                    if (b + 2) * size < length or q_start is not None:
                        sibling = below + first_block(n, start, T, size, traits.PACKED) + b + 1
                        E = load_square(tree + (sibling * G + g) * (D * D), D, BD)
                        k_f -= tl.dot(round_operand(k_f, PREC != "tf32"), tl.trans(E), input_precision=PREC)
                below += block_slots(N, T, size, traits.PACKED)
                size *= 2
            if q_start is not None:
                store_tile(k_end + (row * G + g) * D, k_f, i, in_time, G * D, D)
