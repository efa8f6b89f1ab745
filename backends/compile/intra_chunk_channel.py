"""Intra-chunk operands for a decay per channel, or for keys that differ between the value heads of a group.

    P_ij = sum_k q_ik k_jk exp(g_ik - g_jk),   A_ij = sum_k e_ik k_jk exp(g_ik - g_jk)

e contains the erase strengths. g_i excludes the decay of micro-step i if the row reads the state before that decay.

`decayed_keys` computes them.

B batch, N chunks, Z = B x HV, C tokens per chunk, M micro-steps per chunk, G value heads per key head, K key width
"""

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.compile.chunk_operands import ChunkOperands
from deltazoo.backends.compile.decayed_keys import KeyOperands, decayed_keys
from deltazoo.backends.compile.intra_chunk import LoweredChunks, cumulative_decay, exp_as
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
    products, decayed = decayed_keys(KeyOperands(g, decay, q_M, e, k.view_as(k), b), early)
    _, _, q_decayed, e_decayed, k_decayed, b_decayed = decayed
    attn_k = products[:, :, 0, 0] + (0 if read_before else torch.diag_embed((q_M * k).sum(-1)))
    if n > 1:
        reads = slice(0 if read_before else n - 1, None, n)
        attn_k, q_decayed = attn_k[:, :, reads], q_decayed[:, :, reads]
    attn_k = attn_k.unsqueeze(2)
    gamma = exp_as(g[:, :, -1:], q)
    if spec.transition == "additive":
        return ChunkOperands(q_decayed, k_decayed, v, attn_k, state, gamma=gamma), None
    assert e_decayed is not None
    if spec.transition == "delta":
        a = products[:, :, 1, 0].unsqueeze(2)
        return ChunkOperands(q_decayed, k_decayed, v, attn_k, state, a, e_decayed, gamma=gamma), None
    # dplr as a delta rule for the write b y_t^T with y_t = S_{t-1}^T a_t: the erase key is -a. The writes k v^T of the
    # chunk enter as V, their part of y, and as KV, their part of the state after the chunk.
    assert b is not None and b_decayed is not None
    attn_b = products[:, :, 0, 1] + (0 if read_before else torch.diag_embed((q_M * b).sum(-1)))
    rows = torch.cat([attn_k.squeeze(2), products[:, :, 1, 0]], 2).flatten(0, 1)
    values = v.flatten(0, 2)
    o_direct, y = (torch.unflatten(x, 0, v.shape[:3]) for x in torch.bmm(rows, values).chunk(2, 1))
    kv = torch.unflatten(torch.bmm(k_decayed.flatten(0, 1).mT, values), 0, v.shape[:3])
    a = -products[:, :, 1, 1].unsqueeze(2)
    operands = ChunkOperands(q_decayed, b_decayed, y, attn_b.unsqueeze(2), state, a, -e_decayed, gamma=gamma, kv=kv)
    return operands, o_direct
