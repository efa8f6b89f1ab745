"""Softmax attention of one token per sequence, with all between the product to q, k and v and the output map.

    q, k = R_p norm(q), R_p norm(k)          norm of each head, rotation by the position p
    the cache stores k and v; p <- p + 1
    o = attention of q to the cache, times sigmoid(gate)

Norms, rotation and gate are optional. Nothing here records gradients.

B batch, S slots, H query heads, G key-value heads, E head width
"""

from typing import NamedTuple

from torch import Tensor

from deltazoo.backends.ops.forgetting_attention import MAX_WIDTH
from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.triton.attention.token_op import attend_token


class Turn(NamedTuple):
    """Rotation of the first `pairs` pairs of channels, i and i + pairs, by position theta^(-i / pairs).

    Args: scaled: the fields of `ScaledFrequencies`; (): the frequencies are not scaled.
    """

    pairs: int
    theta: float
    scaled: tuple[float, ...] = ()


class TokenOperands(NamedTuple):
    """qkv: [B, (H + 2 G) E]; q_norm, k_norm: their norms, with one epsilon; gate: [B, H E], before its sigmoid."""

    qkv: Tensor
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    gate: Tensor | None = None


def refusals(width: int, dtype_of_cache: object, x: Tensor) -> list[str]:
    """Return why the kernels do not attend, one sentence each; [] if they do. Args: x: in the dtype of qkv."""
    if width > MAX_WIDTH:
        return [f"heads must have at most {MAX_WIDTH} channels, got {width}."]
    if dtype_of_cache != x.dtype:
        return [f"it needs a cache in {x.dtype}, the dtype of q, got {dtype_of_cache}."]
    return []


def attend_token_(
    x: TokenOperands, k: Tensor, v: Tensor, position: Tensor, turn: Turn | None, scale: float,
    table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend, and change the cache in place.

    Args:
        k, v: [B, S, G, E]. position: [B] int64, the tokens before; a token takes the slot p mod S.
        scale: factor on the scores.
        table: [B, M] int32: k and v are pages [P, S, G, E], S a power of two from 16 on, and token p of row b is in
            page table[b, p // S], slot p % S. A row whose first page is 0 has none: it changes no page, and its o is 0.
    Returns: o [B, H E].
    """
    turn = turn or Turn(0, 2.0)
    o: Tensor = attend_token(
        x.qkv, None if x.q_norm is None else x.q_norm.weight, None if x.k_norm is None else x.k_norm.weight, x.gate,
        k, v, position, table, turn.pairs, turn.theta, [*turn.scaled], 0.0 if x.q_norm is None else x.q_norm.eps, scale,
    )  # fmt: skip
    return o
