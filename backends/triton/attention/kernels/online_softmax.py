"""The softmax over keys that arrive in tiles, with scores in units of log 2.

m' = max(m, max_s x_s),    p_s = 2^(x_s - m'),    l' = 2^(m - m') l + sum_s p_s,    o' = 2^(m - m') o + p v
"""

import triton
import triton.language as tl


@triton.jit
def add_scores(x, m, l, o):
    """Add a tile of scores x [rows, keys]. Returns: p, m', l' and the rescaled o, to which p v is still to be added."""
    m_new = tl.maximum(m, tl.max(x, 1))
    p = tl.exp2(x - m_new[:, None])
    decay = tl.exp2(m - m_new)
    return p, m_new, l * decay + tl.sum(p, 1), o * decay[:, None]
