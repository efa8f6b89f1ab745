"""The operands of the inter-chunk scan, and what its backward reads.

N chunks, Z batch x key heads, G value heads per key head, L = Z G, C tokens per chunk, M micro-steps per chunk, K key
width, V value width, Y sequences. The equations are those of `chunk_scan`.
"""

from typing import NamedTuple

from torch import Tensor


class ChunkOperands(NamedTuple):
    """Operands of the scan.

    Args:
        q: [N, Z, C, K].
        k: write keys [N, Z, M, K].
        v: values [N, Z, G, M, V], scaled by the write strength.
        attn: P [N, Z, G, C, M].
        state: initial states [Y, Z, G, K, V].
        a: A [N, Z, G, M, M], strictly lower triangular. None: there is no erase term.
        e: erase keys [N, Z, M, K]. None: k.
        scale_q, scale_e, scale_k: row scales [N, Z, G, C], [N, Z, G, M] and [N, Z, G, M]. None: 1.
        gamma: decay of the state over the chunk [N, Z, G, 1 or K]. None: 1.
        kv: KV [N, Z, G, K, V]. None: 0.
        sequence: [N] int64, non-decreasing: the row of `state` that each chunk continues. None: row 0 for all chunks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    attn: Tensor
    state: Tensor
    a: Tensor | None = None
    e: Tensor | None = None
    scale_q: Tensor | None = None
    scale_e: Tensor | None = None
    scale_k: Tensor | None = None
    gamma: Tensor | None = None
    kv: Tensor | None = None
    sequence: Tensor | None = None


class SavedOperands(NamedTuple):
    """What the backward reads: operands of the same names, and results of the forward.

    Args:
        segment_states: the state before each segment, [segments, L, K, V].
        v_new: V_new [N, Z, G, M, V].
        t: T [N, Z, G, M, M]. None: there is no erase term, and V_new is V.
    """

    state: Tensor
    segment_states: Tensor
    q: Tensor
    k: Tensor
    v_new: Tensor
    attn: Tensor
    t: Tensor | None
    e: Tensor | None
    scale_q: Tensor | None
    scale_e: Tensor | None
    scale_k: Tensor | None
    gamma: Tensor | None
    kv: Tensor | None
    sequence: Tensor | None
