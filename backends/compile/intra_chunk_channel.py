"""Intra-chunk operands for a decay per channel, or for keys that differ between the value heads of a group.

    P_ij = sum_k q_ik k_jk exp(g_ik - g_jk),   A_ij = sum_k e_ik k_jk exp(g_ik - g_jk)

e contains the erase strengths. g_i excludes the decay of micro-step i if the row reads the state before that decay.

exp(-g_j) alone overflows for strong decays. `_DecayedKeys` therefore uses the dyadic decomposition of the chunk: it
splits the chunk recursively in halves, and takes both decays relative to the boundary between the two halves, where
both factors are at most 1.

B batch, N chunks, Z = B x HV, C tokens per chunk, M micro-steps per chunk, G value heads per key head, K key width,
R kinds of rows (queries, erase keys), W kinds of columns (write keys), L blocks of a level
"""

import functools
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.compile.chunk_operands import ChunkOperands
from deltazoo.backends.compile.intra_chunk import LoweredChunks, cumulative_decay, exp_as
from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.update.spec import UpdateSpec


def channel_operands(spec: UpdateSpec, x: LoweredChunks, state: Tensor, G: int) -> tuple[ChunkOperands, Tensor | None]:
    """Compute the operands of the scan, with the decays multiplied into the keys.

    Returns: the operands, and the part of o that does not pass through the scan: P_k V of "dplr", else None.
    """
    n = spec.householders
    read_before = spec.read == "before"
    by_value_head = "b n m h k -> n (b h g) m k"
    q = repeat(x.q, by_value_head, g=G)
    k = repeat(x.k, by_value_head, g=G)
    v = rearrange(x.v, "b n m h v -> n (b h) 1 m v")
    decay = q.new_zeros(*k.shape[:3], 1)
    if x.decay is not None:
        decay = rearrange(x.decay if x.decay.dim() == 5 else x.decay.unsqueeze(-1), "b n m h k -> n (b h) m k")
    g = cumulative_decay(decay, 2)
    g = g.to(q.dtype) if x.has_16_bits else g
    # The query of a token is aligned with its last micro-step, or with its first for read="before".
    q_M = q if n == 1 else pad(q.unsqueeze(3), (0, 0, *((0, n - 1) if read_before else (n - 1, 0)))).flatten(2, 3)
    early = [read_before]
    e = b = None
    if spec.transition == "dplr":
        assert x.a is not None and x.b is not None
        e, b = (rearrange(y, "b n m h k -> n (b h) m k") for y in (x.a, x.b))
        early.append(True)
    elif spec.transition == "delta":
        e = k if x.e is None else repeat(x.e, by_value_head, g=G)
        if x.erase is not None:
            erase = x.erase if x.erase.dim() == 5 else x.erase.unsqueeze(-1)
            e = e * rearrange(erase, "b n m h k -> n (b h) m k")
        early.append(spec.erase_from == "previous")
    # a view of k, because e may be k and a tensor may not be passed to an autograd.Function twice
    products, q_decayed, e_decayed, k_decayed, b_decayed = _DecayedKeys.apply(
        tuple(early), g, decay, q_M, e, k.view_as(k), b
    )
    attn_k = products[:, :, 0, 0] + (0 if read_before else torch.diag_embed((q_M * k).sum(-1)))
    if n > 1:
        reads = slice(0 if read_before else n - 1, None, n)
        attn_k, q_decayed = attn_k[:, :, reads], q_decayed[:, :, reads]
    attn_k = attn_k.unsqueeze(2)
    gamma = exp_as(g[:, :, -1:], q)
    if spec.transition == "additive":
        return ChunkOperands(q_decayed, k_decayed, v, attn_k, state, gamma=gamma), None
    if spec.transition == "delta":
        a = products[:, :, 1, 0].unsqueeze(2)
        return ChunkOperands(q_decayed, k_decayed, v, attn_k, state, a, e_decayed, gamma=gamma), None
    # dplr as a delta rule for the write b y_t^T with y_t = S_{t-1}^T a_t: the erase key is -a. The writes k v^T of the
    # chunk enter as V, their part of y, and as KV, their part of the state after the chunk.
    assert b is not None
    attn_b = products[:, :, 0, 1] + (0 if read_before else torch.diag_embed((q_M * b).sum(-1)))
    rows = torch.cat([attn_k.squeeze(2), products[:, :, 1, 0]], 2).flatten(0, 1)
    values = v.flatten(0, 2)
    o_direct, y = (torch.unflatten(x, 0, v.shape[:3]) for x in torch.bmm(rows, values).chunk(2, 1))
    kv = torch.unflatten(torch.bmm(k_decayed.flatten(0, 1).mT, values), 0, v.shape[:3])
    a = -products[:, :, 1, 1].unsqueeze(2)
    operands = ChunkOperands(q_decayed, b_decayed, y, attn_b.unsqueeze(2), state, a, -e_decayed, gamma=gamma, kv=kv)
    return operands, o_direct


class _DecayedKeys(torch.autograd.Function):
    """Multiply rows and columns with their decays, for decays of any strength.

        products_ij = sum_k row_ik column_jk exp(g_ik - g_jk) for i > j, else 0     [N, Z, R, W, M, M]
        row_i exp(g_i),   column_j exp(g_last - g_j)                                [N, Z, M, K]

    Level s computes the products of the rows in the second half of each block of 2 s micro-steps with the columns in
    the first half. The backward recomputes the factors. The gradient of g_i is row_i d_row_i - column_i d_column_i, and
    that of g_last also has the sum of the decayed columns times their gradients. decay_i has the gradient
    -row_i d_row_i of each kind of rows that is early.

    Args:
        early: for each kind of rows, whether its g_i excludes the decay of micro-step i.
        g, decay: log decays [N, Z, M, K or 1], cumulative and of each micro-step.
        q, e: rows [N, Z, M, K], queries and erase keys; e may be None.
        k, b: columns [N, Z, M, K], write keys; b may be None.
    Returns: the products, then q, e, k and b with their decays, None if absent.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        early: tuple[bool, ...], g: Tensor, decay: Tensor, q: Tensor, e: Tensor | None, k: Tensor, b: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        operands = [x for x in (q, e, k, b) if x is not None]
        N, Z, M = g.shape[:3]
        R, size = len(early), 1 << (M - 1).bit_length()
        g_rows = [g - decay if is_early else g for is_early in early]
        padded_g_rows, padded_g, padded = _pad_to(size, g_rows, g, operands)
        levels = []
        for s in _levels(size):
            rows, columns, *_ = _factors(padded_g_rows, padded_g, padded, s)
            block = torch.bmm(rows.flatten(0, 2).flatten(1, 2), columns.flatten(0, 2).flatten(1, 2).mT)
            block = rearrange(block, "(n z l) (r i) (w j) -> n z r w i j l", n=N, z=Z, r=R, i=s, j=s)
            # block l goes to the rows 2 s l + s + i and the columns 2 s l + j
            placed = torch.diag_embed(pad(block, (0, 0, 0, s, s, 0)), dim1=4, dim2=6)
            levels.append(placed.flatten(6, 7).flatten(4, 5))
        decays = _scan_decays(g_rows, g, operands)
        # Not made contiguous here: torch 2.11 drops the gradient of an output that is also an intermediate result, and
        # `contiguous` may return its argument.
        decayed = iter([x * d for x, d in zip(operands, decays, strict=True)])
        products = functools.reduce(torch.add, levels)[..., :M, :M]
        return products, *(None if x is None else next(decayed) for x in (q, e, k, b))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.early = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_products: Tensor, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        g, decay, *saved = ctx.saved_tensors
        operands = [x for x in saved if x is not None]
        d_decayed = [d for d in d_outputs if d is not None]
        M, R, size = g.shape[2], len(ctx.early), 1 << (g.shape[2] - 1).bit_length()
        # Add a zero that depends on a gradient. Otherwise torch.compile would recognise the factors as those of the
        # forward, and save these. No number is both NaN and positive, but torch.compile does not fold the condition.
        gradient = d_products[(0,) * 6]
        g_again = g + (gradient.isnan() & (gradient > 0)).to(g.dtype)
        g_rows = [g_again - decay if is_early else g_again for is_early in ctx.early]
        padded_g_rows, padded_g, padded = _pad_to(size, g_rows, g_again, operands)
        d_products = pad(d_products, (0, size - M, 0, size - M))
        by_level: list[list[Tensor]] = [[] for _ in operands]  # gradients of each operand
        for s in _levels(size):
            rows, columns, row_decays, column_decay = _factors(padded_g_rows, padded_g, padded, s)
            d_blocks = rearrange(d_products, "n z r w (l i) (m j) -> n z r w l i m j", i=2 * s, j=2 * s)
            d_block = d_blocks[..., s:, :, :s].diagonal(0, 4, 6)
            d_block = rearrange(d_block, "n z r w i j l -> (n z l) (r i) (w j)")
            d_rows = torch.bmm(d_block, columns.flatten(0, 2).flatten(1, 2)).view(rows.shape)
            d_columns = torch.bmm(d_block.mT, rows.flatten(0, 2).flatten(1, 2)).view(columns.shape)
            for r, row_decay in enumerate(row_decays):
                by_level[r].append(pad(d_rows[:, :, :, r] * row_decay, (0, 0, s, 0)).flatten(2, 3)[:, :, :M])
            for w in range(len(operands) - R):
                d_column = pad(d_columns[:, :, :, w] * column_decay, (0, 0, 0, s))
                by_level[R + w].append(d_column.flatten(2, 3)[:, :, :M])
        decays = _scan_decays(g_rows, g_again, operands)
        d_scan = [d * factor for d, factor in zip(d_decayed, decays, strict=True)]
        d_operands = [functools.reduce(torch.add, levels, d) for levels, d in zip(by_level, d_scan, strict=True)]
        d_g, d_decay = _decay_gradients(ctx.early, operands, d_operands, d_scan)
        if g.shape[-1] == 1:
            d_g = d_g.sum(-1, keepdim=True)
            d_decay = None if d_decay is None else d_decay.sum(-1, keepdim=True)
        gradients = iter(d_operands)
        d_saved = [None if x is None else next(gradients) for x in saved]
        return None, d_g.to(g.dtype), None if d_decay is None else d_decay.to(decay.dtype), *d_saved


def _decay_gradients(
    early: tuple[bool, ...], operands: list[Tensor], d_operands: list[Tensor], d_scan: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients [N, Z, M, K] of the cumulative decays, and of the decays that early rows exclude.

    d_operands: gradients of rows and columns; d_scan: their part from the decayed operands.
    """
    R = len(early)
    x_dx = [x * d for x, d in zip(operands, d_operands, strict=True)]
    d_g = functools.reduce(torch.add, x_dx[:R]) - functools.reduce(torch.add, x_dx[R:])
    d_last = functools.reduce(torch.add, [x * d for x, d in zip(operands[R:], d_scan[R:], strict=True)])
    d_g = torch.cat([d_g[:, :, :-1], d_g[:, :, -1:] + d_last.sum(2, keepdim=True)], 2)
    d_early = [d for d, is_early in zip(x_dx[:R], early, strict=True) if is_early]
    return d_g, -functools.reduce(torch.add, d_early) if d_early else None


def _levels(size: int) -> list[int]:
    """Return the sizes of the halves of each level: 1, 2, 4, ..., size / 2."""
    return [1 << level for level in range(size.bit_length() - 1)]


def _pad_to(
    size: int, g_rows: list[Tensor], g: Tensor, operands: list[Tensor]
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Extend cumulative decays by their last value, and operands by zeros, to `size` micro-steps."""
    missing = size - g.shape[2]
    if not missing:
        return g_rows, g, operands
    *g_rows, g = [torch.cat([x, x[:, :, -1:].expand(-1, -1, missing, -1)], 2) for x in (*g_rows, g)]
    return g_rows, g, [pad(x, (0, 0, 0, missing)) for x in operands]


def _scan_decays(g_rows: list[Tensor], g: Tensor, operands: list[Tensor]) -> list[Tensor]:
    """Return exp(g) of each kind of rows and exp(g_last - g) for each kind of columns."""
    to_end = exp_as(g[:, :, -1:] - g, operands[0])
    return [*(exp_as(g_row, operands[0]) for g_row in g_rows), *[to_end] * (len(operands) - len(g_rows))]


def _factors(
    g_rows: list[Tensor], g: Tensor, operands: list[Tensor], s: int
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Return the decayed rows [N, Z, L, R, s, K] and columns [N, Z, L, W, s, K] of level s, and their decays."""
    R = len(g_rows)

    def half(x: Tensor, index: int) -> Tensor:
        return torch.unflatten(x, 2, (-1, 2, s))[:, :, :, index]

    boundary = half(g, 0)[:, :, :, -1:]
    row_decays = [exp_as(half(g_row, 1) - boundary, operands[0]) for g_row in g_rows]
    column_decay = exp_as(boundary - half(g, 0), operands[0])
    rows = [half(x, 1) * d for x, d in zip(operands[:R], row_decays, strict=True)]
    columns = [half(x, 0) * column_decay for x in operands[R:]]
    return torch.stack(rows, 3), torch.stack(columns, 3), row_decays, column_decay
