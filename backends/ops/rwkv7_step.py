"""One token of RWKV-7 on a GPU: one product with all maps of the shifted input, and one kernel up to the output map.

Nothing here records gradients.

B rows, D width, H heads, K key width, V value width
"""

from typing import NamedTuple

from torch import Tensor

from deltazoo.backends.ops.gemv import Norm, Shift, shifted_products
from deltazoo.backends.triton.decode.rwkv7_op import rwkv7_step

MAX_WIDTH = 128  # of a head: a program holds its state


class RWKV7Maps(NamedTuple):
    """Weights of the maps of the input: r, k [H K, D], v [H V, D], and those of low rank, [rank, D] each.

    value: None in the first layer.
    """

    r: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    rate: Tensor
    gate: Tensor
    value: Tensor | None


class RWKV7Weights(NamedTuple):
    """The second maps of low rank [.., rank], their biases, and the weights by channel.

    Args:
        decay, rate: [H K, rank]; gate, value: [H V, rank]. decay_bias, rate_bias, xi, alpha, u: [H K].
        value_bias, norm_weight, norm_bias: [H V]. eps: of the output norm.
    """

    decay: Tensor
    rate: Tensor
    gate: Tensor
    value: Tensor | None
    decay_bias: Tensor
    rate_bias: Tensor
    value_bias: Tensor | None
    xi: Tensor
    alpha: Tensor
    u: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    eps: float


class RWKV7State(NamedTuple):
    """previous: the token shift's [B, 1, D]. update: [B, H, K, V] float32. Both change in place."""

    previous: Tensor
    update: Tensor


def rwkv7_token_(
    x: Tensor, norm: Norm, mix: Tensor, maps: RWKV7Maps, weights: RWKV7Weights, state: RWKV7State, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Decode one token per row.

    Args:
        x: [B, 1, D], without `gemv.refusals`; norm: applied to x. mix: shares of r, w, k, v, a and g, [6, D].
        first: values of the first layer [B, 1, H V]; None: the values are not interpolated.
    Returns: o and v before the interpolation, [B, 1, H V] each.
    """
    of_x, rows = [maps.r, maps.k, maps.v, maps.decay, maps.rate, maps.gate], [0, 2, 3, 1, 4, 5]
    if maps.value is not None and first is not None:
        of_x.append(maps.value)
        rows.append(3)
    shift = Shift(state.previous, mix, (*rows,))
    r, k, v, *low = (y[:, 0] for y in shifted_products(x, of_x, norm, shift))
    of_value: tuple[Tensor | None, ...] = (None, None, None, None)
    decay, rate, gate, value, decay_bias, rate_bias, value_bias, *others, eps = weights
    if maps.value is not None and first is not None:
        of_value = first[:, 0], low.pop(), value, value_bias
    o: Tensor = rwkv7_step(
        x[:, 0], norm.weight, state.previous[:, 0], r, k, v, of_value[0], *low, of_value[1], decay, rate, gate,
        of_value[2], decay_bias, rate_bias, of_value[3], *others, state.update, eps, norm.eps,
    )  # fmt: skip
    return o[:, None], v[:, None]
