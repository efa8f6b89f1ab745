"""Gradients of the preparation of PaTH attention: from those of the moved rows to those of q, k, v, w and beta.

A query row that moved through a block, q' = q (I - E), has dq = dq' (I - E)^T and dE = -q^T dq'; a key row, k' = k (I -
E)^T, has dk = dk' (I - E) and dE = -dk'^T k. A product of siblings has dE_right = dE (I - E_left)^T and dE_left = (I -
E_right)^T dE. path_prepare.py defines the forward and its symbols, path_tiles.py the tree and the sizes.
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


@triton.jit(do_not_specialize=["N", "T", "LEVELS", "tree_slots"])
def path_move_gradients_kernel(
    tree, d_rows, d_q, d_k, cu, N, T, LEVELS, tree_slots, traits: tl.constexpr
):  # fmt: skip
    """Move the gradients of the queries and keys of a block back through the tree.

    Grid: blocks x H. Reads tree. Replaces the gradients of the moved rows in d_rows by those of the rows that moved
    one level further. Writes the gradients of the rows at level 0, to d_q [B, T, H, D] and d_k [B, T, G, D].
    tree_slots: of levels 0 to LEVELS - 1.
    """
    H: tl.constexpr = traits.H
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
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
        a = t0 // C
        plane = token_rows(N, T, traits.PACKED) * (H * D)
        dq_f = tl.zeros([C, BD], tl.float32)
        below = tl.cast(tree_slots, tl.int64)
        for down in range(LEVELS):
            level = LEVELS - 1 - down
            b = a >> level
            size = (b * 0 + C) << level
            below -= block_slots(N, T, size, traits.PACKED)
            if b & 1:
                base = d_rows + level * plane + (row * H + h) * D
                here = load_tile(base, i, in_time, H * D, D, BD, True).to(tl.float32)
                store_tile(base, dq_f, i, in_time, H * D, D)
                if b > 1:
                    sibling = below + first_block(n, start, T, size, traits.PACKED) + b - 1
                    E = load_square(tree + (sibling * G + g) * (D * D), D, BD)
                    dq_f -= tl.dot(dq_f, tl.trans(E), input_precision=PREC)
                dq_f += here
        store_tile(d_q + (row * H + h) * D, dq_f, i, in_time, H * D, D)
        if h % (H // G) == 0:
            dk_f = tl.zeros([C, BD], tl.float32)
            below = tl.cast(tree_slots, tl.int64)
            for down in range(LEVELS):
                level = LEVELS - 1 - down
                b = a >> level
                size = (b * 0 + C) << level
                below -= block_slots(N, T, size, traits.PACKED)
                if (b & 1) == 0 and (b + 1) * size < length:
                    base = d_rows + level * plane + (row * H + g) * D
                    here = load_tile(base, i, in_time, H * D, D, BD, True).to(tl.float32)
                    store_tile(base, dk_f, i, in_time, H * D, D)
                    if (b + 2) * size < length:
                        sibling = below + first_block(n, start, T, size, traits.PACKED) + b + 1
                        E = load_square(tree + (sibling * G + g) * (D * D), D, BD)
                        dk_f -= tl.dot(dk_f, E, input_precision=PREC)
                    dk_f += here
            store_tile(d_k + (row * G + g) * D, dk_f, i, in_time, G * D, D)


@triton.jit(do_not_specialize=["N", "T", "size", "below", "plane"])
def path_tree_gradients_kernel(rows, d_rows, d_tree, cu, N, T, size, below, plane, traits: tl.constexpr):
    """Sum the gradients of the matrices of one level over the rows that moved through each block.

    Grid: blocks of `size` tokens x G. Reads rows and d_rows of `path_move_gradients_kernel`. Writes d_tree, as tree.
    below: the first slot of the level. plane: the first element of the level in rows.
    """
    H: tl.constexpr = traits.H
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
    BD: tl.constexpr = traits.BD
    PREC: tl.constexpr = traits.PREC
    slot = tl.program_id(0) // G
    g = tl.program_id(0) % G
    _, start, length, b = locate_block(slot, cu, N, T, size, traits.PACKED)
    if b * size < length:
        i = tl.arange(0, C)
        dE = tl.zeros([BD, BD], tl.float32)
        x = rows + plane + start * (H * D)
        dx = d_rows + plane + start * (H * D)
        if b & 1:
            if (b + 1) * size < length:
                for j in range(((b - 1) * size).to(tl.int32), (b * size).to(tl.int32), C):
                    k_t = load_tile(x + g * D, j + i, i >= 0, H * D, D, BD, BD != D)
                    dk_t = load_tile(dx + g * D, j + i, i >= 0, H * D, D, BD, BD != D)
                    dE -= tl.dot(tl.trans(dk_t), k_t, input_precision=PREC)
        elif b > 0:
            last = tl.minimum((b + 2) * size, length).to(tl.int32)
            for r in range(H // G):
                h = g * (H // G) + r
                for j in range(((b + 1) * size).to(tl.int32), last, C):
                    in_rows = j + i < last
                    q_t = load_tile(x + h * D, j + i, in_rows, H * D, D, BD, True)
                    dq_t = load_tile(dx + h * D, j + i, in_rows, H * D, D, BD, True)
                    dE -= tl.dot(tl.trans(q_t), dq_t, input_precision=PREC)
        store_square(d_tree + ((below + slot) * G + g) * (D * D), dE, D)


@triton.jit(do_not_specialize=["N", "T", "size", "below"])
def path_merge_gradients_kernel(tree, d_tree, cu, N, T, size, below, traits: tl.constexpr):
    """Add the gradient of a product of siblings of `size` tokens to those of the siblings.

    Grid: blocks of 2 size tokens x G. below: the first slot of the level of the siblings.
    """
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
    PREC: tl.constexpr = traits.PREC
    slot = tl.program_id(0) // G
    g = tl.program_id(0) % G
    n, start, length, m = locate_block(slot, cu, N, T, 2 * size, traits.PACKED)
    if m * 2 * size < length:
        left = ((below + first_block(n, start, T, size, traits.PACKED) + 2 * m) * G + g) * (D * D)
        right = left + G * D * D
        above = below + block_slots(N, T, size, traits.PACKED) + slot
        dE = load_square(d_tree + (above * G + g) * (D * D), D, traits.BD)
        d_left = load_square(d_tree + left, D, traits.BD) + dE
        if (2 * m + 1) * size < length:
            d_right = load_square(d_tree + right, D, traits.BD) + dE
            E_left = load_square(tree + left, D, traits.BD)
            d_right -= tl.dot(dE, tl.trans(E_left), input_precision=PREC)
            store_square(d_tree + right, d_right, D)
            E_right = load_square(tree + right, D, traits.BD)
            d_left -= tl.dot(tl.trans(E_right), dE, input_precision=PREC)
        store_square(d_tree + left, d_left, D)


@triton.jit(do_not_specialize=["N", "T", "q_stride", "k_stride", "v_stride"])
def path_block_gradients_kernel(
    q, k, v, w, U, M, sums, lse, delta, d_o, d_q, d_sums, dk_block, dv_block, dw_block, dU_block, dM_block, cu, N, T,
    q_stride, k_stride, v_stride, traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the attention within a block, and of the queries' move to its start.

    Grid: blocks x H. Reads q, k, v, w, the matrices of the block, lse, delta and d_o. Adds to the gradients of the
    moved queries in d_q and to d_sums. Writes each head's part of the gradients of k, w and U, [blocks, H, C, D], of v,
    [blocks, H, C, V], and of M, [blocks, H, C, C].
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
    _, start, length, t0 = locate_tile(slot, cu, N, T, C, traits.PACKED)
    if t0 < length:
        i = tl.arange(0, C)
        in_time = i < length - t0
        row = start + t0
        q_step = tl.cast(q_stride, tl.int64) * traits.UNIT
        k_step = tl.cast(k_stride, tl.int64) * traits.UNIT
        v_step = tl.cast(v_stride, tl.int64) * traits.UNIT
        block = tl.cast(slot * G + g, tl.int64)
        at = tl.cast(slot * H + h, tl.int64)
        q_t = load_tile(q + row * q_step + h * D, i, in_time, q_step, D, BD, True)
        k_t = load_tile(k + row * k_step + g * D, i, in_time, k_step, D, BD, True)
        v_t = load_tile(v + row * v_step + g * V, i, in_time, v_step, V, traits.BV, True)
        w_t = load_tile(w + (row * G + g) * D, i, in_time, G * D, D, BD, True)
        do_t = load_tile(d_o + (row * H + h) * V, i, in_time, H * V, V, traits.BV, True)
        M_t = load_square(M + block * (C * C), C, C)
        lse_t = tl.load(lse + (row + i) * H + h, mask=in_time, other=0.0)
        delta_t = tl.load(delta + (row + i) * H + h, mask=in_time, other=0.0)
        causal = (i[:, None] >= i[None, :]) & in_time[:, None]
        q_w = tl.where(causal, tl.dot(q_t, tl.trans(w_t), input_precision=PREC), 0.0)
        x = scores_in_block(q_t, k_t, q_w, M_t, sums, row, h, i, in_time, traits)
        p = tl.exp2(tl.where(causal, x - lse_t[:, None], float("-inf")))
        dv_t = tl.dot(tl.trans(p.to(do_t.dtype)), do_t, input_precision=PREC)
        store_tile(dv_block + at * (C * V), dv_t, i, i < C, V, V)
        ds = p * (tl.dot(do_t, tl.trans(v_t), input_precision=PREC) - delta_t[:, None])
        if traits.GATED:
            at_sums = d_sums + (row + i) * H + h
            total = tl.sum(ds, 1) - tl.sum(ds, 0)
            tl.store(at_sums, tl.load(at_sums, mask=in_time, other=0.0) + total, mask=in_time)
        ds *= traits.SCALE
        dq_base = d_q + (row * H + h) * D
        dq_moved = load_tile(dq_base, i, in_time, H * D, D, BD, True).to(tl.float32)
        U_t = load_tile(U + block * (C * D), i, i < C, D, D, BD, D != BD).to(tl.float32)
        store_square(dM_block + at * (C * C), -tl.dot(tl.trans(q_w), ds, input_precision=PREC), C)
        dU = -tl.dot(tl.trans(q_w), dq_moved, input_precision=PREC)
        store_tile(dU_block + at * (C * D), dU, i, i < C, D, D)
        d_qw = tl.dot(ds, tl.trans(M_t), input_precision=PREC)
        d_qw += tl.dot(dq_moved, tl.trans(U_t), input_precision=PREC)
        d_qw = tl.where(causal, -d_qw, 0.0).to(w_t.dtype)
        ds_narrow = ds.to(k_t.dtype)
        dq_t = dq_moved + tl.dot(ds_narrow, k_t, input_precision=PREC)
        dq_t += tl.dot(d_qw, w_t, input_precision=PREC)
        store_tile(dq_base, dq_t, i, in_time, H * D, D)
        dk_t = tl.dot(tl.trans(ds_narrow), q_t, input_precision=PREC)
        store_tile(dk_block + at * (C * D), dk_t, i, i < C, D, D)
        dw_t = tl.dot(tl.trans(d_qw), q_t, input_precision=PREC)
        store_tile(dw_block + at * (C * D), dw_t, i, i < C, D, D)


@triton.jit
def sum_heads(parts, first, R: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Add the parts of the R query heads from index `first` of parts [..., C, WIDTH] on, in float32."""
    i = tl.arange(0, C)
    total = tl.zeros([C, BLOCK], tl.float32)
    for r in tl.static_range(R):
        base = parts + (first + r) * (C * WIDTH)
        total += load_tile(base, i, i < C, WIDTH, WIDTH, BLOCK, WIDTH != BLOCK).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["N", "T", "k_stride"])
def path_prepare_gradients_kernel(
    k, w, beta, inverse, U, M, d_tree, dk_block, dv_block, dw_block, dU_block, dM_block, d_k, d_v, d_w, d_beta, cu, N,
    T, k_stride, traits: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys, w and beta from those of a block's matrices and moved keys.

    Grid: blocks x G. Reads k, w, beta, the matrices of the block, the gradient of E and the parts of
    `path_block_gradients_kernel`. Adds to the gradients of the moved keys in d_k, and to d_v; writes d_w [B, T, G, D],
    d_beta [B, T, G].
    """
    G: tl.constexpr = traits.G
    D: tl.constexpr = traits.D
    V: tl.constexpr = traits.V
    BD: tl.constexpr = traits.BD
    R: tl.constexpr = traits.H // traits.G
    PREC: tl.constexpr = traits.PREC
    slot = tl.program_id(0) // G
    g = tl.program_id(0) % G
    _, start, length, t0 = locate_tile(slot, cu, N, T, C, traits.PACKED)
    if t0 < length:
        i = tl.arange(0, C)
        in_time = i < length - t0
        row = start + t0
        at = tl.cast(slot * G + g, tl.int64)
        dv_base = d_v + (row * G + g) * V
        dv_t = load_tile(dv_base, i, in_time, G * V, V, traits.BV, True).to(tl.float32)
        store_tile(dv_base, dv_t + sum_heads(dv_block, at * R, R, V, traits.BV), i, in_time, G * V, V)
        # the moved keys and M = X stril(Diag(beta) W K^T), then U = X Diag(beta) W and E = W^T U
        w_t = load_tile(w + (row * G + g) * D, i, in_time, G * D, D, BD, True)
        b = tl.load(beta + (row + i) * G + g, mask=in_time, other=0.0).to(tl.float32)
        below = i[:, None] > i[None, :]
        X_T = tl.trans(load_square(inverse + at * (C * C), C, C))
        M_t = load_square(M + at * (C * C), C, C)
        dk_base = d_k + (row * G + g) * D
        dk_moved = load_tile(dk_base, i, in_time, G * D, D, BD, True)
        dk_t = dk_moved.to(tl.float32)
        dw_t = sum_heads(dw_block, at * R, R, D, BD) - tl.dot(M_t, dk_t, input_precision=PREC)
        dM = sum_heads(dM_block, at * R, R, C, C) - tl.dot(w_t, tl.trans(dk_moved), input_precision=PREC)
        d_wk = tl.where(below, tl.dot(X_T, dM, input_precision=PREC), 0.0)
        dA = tl.dot(d_wk, tl.trans(M_t), input_precision=PREC)
        dk_t += sum_heads(dk_block, at * R, R, D, BD)
        dk_t += tl.dot(tl.trans((b[:, None] * d_wk).to(w_t.dtype)), w_t, input_precision=PREC)
        store_tile(dk_base, dk_t, i, in_time, G * D, D)
        k_step = tl.cast(k_stride, tl.int64) * traits.UNIT
        k_t = load_tile(k + row * k_step + g * D, i, in_time, k_step, D, BD, True)
        d_scaled = tl.dot(d_wk.to(k_t.dtype), k_t, input_precision=PREC)
        dE = load_square(d_tree + at * (D * D), D, BD)
        dU = sum_heads(dU_block, at * R, R, D, BD) + tl.dot(w_t.to(tl.float32), dE, input_precision=PREC)
        U_t = load_tile(U + at * (C * D), i, i < C, D, D, BD, D != BD).to(tl.float32)
        dw_t += tl.dot(U_t, tl.trans(dE), input_precision=PREC)
        d_right = tl.dot(X_T, dU, input_precision=PREC)
        dA = tl.where(below, -dA - tl.dot(d_right, tl.trans(U_t), input_precision=PREC), 0.0)
        d_scaled += d_right + tl.dot(dA.to(w_t.dtype), w_t, input_precision=PREC)
        dw_t += tl.dot(tl.trans((b[:, None] * dA).to(w_t.dtype)), w_t, input_precision=PREC) + b[:, None] * d_scaled
        store_tile(d_w + (row * G + g) * D, dw_t, i, in_time, G * D, D)
        d_scaled *= w_t.to(tl.float32)
        tl.store(d_beta + (row + i) * G + g, tl.sum(d_scaled, 1), mask=in_time)
