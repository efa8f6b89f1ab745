"""Intra-chunk operands for a decay per channel, or for keys that differ between the value heads of a group.

    P_ij = sum_k q_ik k_jk exp(g_ik - g_jk),   A_ij = sum_k b_i e_ik k_jk exp(g_ik - g_jk)

exp(g_i) and exp(-g_j) alone overflow for strong decays. `decayed_scores` therefore splits the chunk recursively
in halves and measures both decays from the boundary between the halves, where both factors are at most 1.

B batch, N chunks, Z = B x HV, C tokens per chunk, M micro-steps per chunk, G value heads per key head, K key width
"""

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.compile.chunk_scan import ChunkOperands
from deltazoo.backends.compile.intra_chunk import LoweredChunks, cumulative_decay, decay_at_reads, exp_as
from deltazoo.backends.spec import UpdateSpec


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
    # The query of a token is aligned with its last micro-step, or with its first for read="before".
    q_M = q if n == 1 else pad(q.unsqueeze(3), (0, 0, *((0, n - 1) if read_before else (n - 1, 0)))).flatten(2, 3)
    g_q = g - decay if read_before else g
    g_e = g - decay if spec.erase_from == "previous" else g
    g_last = g[:, :, -1:]
    rows, row_decays, columns = [q_M], [g_q], [k]
    if spec.transition == "dplr":
        assert x.a is not None and x.b is not None
        rows.append(rearrange(x.a, "b n m h k -> n (b h) m k"))
        row_decays.append(g_e)
        columns.append(rearrange(x.b, "b n m h k -> n (b h) m k"))
    elif spec.transition == "delta":
        e = k if x.e is None else repeat(x.e, by_value_head, g=G)
        if x.erase is not None:
            erase = x.erase if x.erase.dim() == 5 else x.erase.unsqueeze(-1)
            e = e * rearrange(erase, "b n m h k -> n (b h) m k")
        rows.append(e)
        row_decays.append(g_e)
    scores = decayed_scores(torch.stack(rows, 2), torch.stack(row_decays, 2), torch.stack(columns, 2), g)
    diagonal = [torch.diag_embed((q_M * column).sum(-1)) if not read_before else 0 for column in columns]
    attn_k = scores[:, :, 0, 0] + diagonal[0]
    attn_k = (attn_k if n == 1 else attn_k[:, :, slice(0 if read_before else n - 1, None, n)]).unsqueeze(2)
    q_decayed = q * exp_as(decay_at_reads(spec, g, decay, 2), q)
    k_decayed = k * exp_as(g_last - g, k)
    gamma = exp_as(g_last, q)
    if spec.transition == "additive":
        return ChunkOperands(q_decayed, k_decayed, v, attn_k, state, gamma=gamma), None
    e_decayed = rows[1] * exp_as(g_e, q)
    if spec.transition == "delta":
        a = scores[:, :, 1, 0].unsqueeze(2)
        return ChunkOperands(q_decayed, k_decayed, v, attn_k, state, a, e_decayed, gamma=gamma), None
    # dplr as a delta rule: b writes y_t = S_{t-1}^T a_t, so that the erase key is -a. The intra-chunk part of y that
    # the k v^T writes contribute takes the place of V, and KV is their contribution to the state.
    b_decayed = columns[1] * exp_as(g_last - g, q)
    y = scores[:, :, 1, 0].unsqueeze(2) @ v
    attn_b = (scores[:, :, 0, 1] + diagonal[1]).unsqueeze(2)
    kv = (k_decayed.transpose(2, 3) @ v.squeeze(2)).unsqueeze(2)
    a = -scores[:, :, 1, 1].unsqueeze(2)
    operands = ChunkOperands(q_decayed, b_decayed, y, attn_b, state, a, -e_decayed, gamma=gamma, kv=kv)
    return operands, attn_k @ v


def decayed_scores(rows: Tensor, row_decays: Tensor, columns: Tensor, column_decay: Tensor) -> Tensor:
    """Compute sum_k rows_ik exp(row_decay_ik - column_decay_jk) columns_jk for i > j, else 0, for any decay.

    At level s, the second half of each block of 2 s micro-steps provides the rows and the first half the columns. Both
    decays are taken relative to the boundary between the halves, so that both factors are at most 1.

    Args:
        rows, row_decays: [N, Z, R, M, K], R kinds of rows (queries, erase keys) and their cumulative decays.
        columns: [N, Z, W, M, K], W kinds of write keys. column_decay: [N, Z, M, K], their cumulative decay.
    Returns: [N, Z, R, W, M, M].
    """
    M, R, W = column_decay.shape[2], rows.shape[2], columns.shape[2]
    size = 1 << (M - 1).bit_length()
    if size > M:
        padding = (0, 0, 0, size - M)
        rows, columns = pad(rows, padding), pad(columns, padding)
        row_decays, column_decay = (
            torch.cat([g, g[..., -1:, :].expand(*g.shape[:-2], size - M, -1)], -2) for g in (row_decays, column_decay)
        )
    scores = rows.new_zeros(*rows.shape[:3], W, size, 1, 1)
    s = 1
    while s < size:
        halves = (size // (2 * s), 2, s)
        g_row, g_column = row_decays.unflatten(3, halves)[:, :, :, :, 1], column_decay.unflatten(2, halves)[:, :, :, 0]
        boundary = g_column[:, :, :, -1:]
        second = rows.unflatten(3, halves)[:, :, :, :, 1] * exp_as(g_row - boundary.unsqueeze(2), rows)
        first = columns.unflatten(3, halves)[:, :, :, :, 0] * exp_as(boundary - g_column, columns).unsqueeze(2)
        block = rearrange(second, "n z r l i k -> n z l (r i) k") @ rearrange(first, "n z w l j k -> n z l k (w j)")
        block = rearrange(block, "n z l (r i) (w j) -> n z r w l i j", r=R, w=W)
        pairs = scores.unflatten(4, (-1, 2))
        upper = pad(pairs[..., 0, :, :], (0, s))
        scores = torch.cat([upper, torch.cat([block, pairs[..., 1, :, :]], -1)], -2)
        s *= 2
    return scores[..., 0, :M, :M]
