"""One token of RWKV-6 or RWKV-7 on a GPU: one product with all maps of the shifted inputs, then the kernels of a step.

Nothing here records gradients.

B rows, D width, H heads, K key width, V value width
"""

from typing import NamedTuple

from torch import Tensor

from deltazoo.backends.ops.gemv import Norm, Shift, products_of_each, shifted_products
from deltazoo.backends.triton.decode.ddlerp_op import MAX_RANK as MAX_RANK
from deltazoo.backends.triton.decode.ddlerp_op import DDLerpCall, ddlerp
from deltazoo.backends.triton.decode.rwkv_op import RWKVCall, rwkv_step
from deltazoo.backends.triton.decode.rwkv_op import RWKVWeights as RWKVWeights
from deltazoo.backends.triton.norm.op import rms_norm

MAX_WIDTH = 128  # of a head: a program holds its state


class RWKV6Shift(NamedTuple):
    """Weights of the data-dependent token shift: mix_x [D], mix [5, D], down [5 R, D], up [5, R, D]; w, k, v, r, g."""

    mix_x: Tensor
    mix: Tensor
    down: Tensor
    up: Tensor


class RWKV6Maps(NamedTuple):
    """Weights of the maps of the shifted inputs: decay [rank, D], k, r [H K, D], v, g [H V, D]."""

    decay: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    g: Tensor


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


class RWKVState(NamedTuple):
    """previous: the token shift's [B, 1, D]. update: [B, H, K, V] float32. Both change in place."""

    previous: Tensor
    update: Tensor


def rwkv6_token_(
    x: Tensor,
    norm: Norm | None,
    shift: RWKV6Shift,
    maps: RWKV6Maps,
    weights: RWKVWeights,
    state: RWKVState,
) -> Tensor:
    """Decode one token per row.

    Args: x: [B, 1, D], without `gemv.refusals`; norm: applied to x, if any.
    Returns: o, [B, 1, H V].
    """
    if norm is not None:
        x = rms_norm(x, None, None, norm.weight, norm.eps, "none")[1]
    token, previous = x[:, 0], state.previous[:, 0]
    shifted = ddlerp(DDLerpCall(token, previous, shift.mix_x, shift.mix, shift.down, shift.up))
    low_decay, k, v, r, g = products_of_each(shifted, maps)
    call = RWKVCall(
        x=token, previous=previous, states=state.update, weights=weights, r=r, k=k, v=v, low_decay=low_decay, g=g
    )
    return rwkv_step(call)[:, None]


def rwkv7_token_(
    x: Tensor,
    norm: Norm | None,
    mix: Tensor,
    maps: RWKV7Maps,
    weights: RWKVWeights,
    state: RWKVState,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Decode one token per row.

    Args:
        x: [B, 1, D], without `gemv.refusals`; norm: applied to x, if any. mix: shares of r, w, k, v, a and g, [6, D].
        first: values of the first layer [B, 1, H V]; None: the values are not interpolated.
    Returns: o and v before the interpolation, [B, 1, H V] each.
    """
    of_x, rows = [maps.r, maps.k, maps.v, maps.decay, maps.rate, maps.gate], [0, 2, 3, 1, 4, 5]
    if maps.value is not None and first is not None:
        of_x.append(maps.value)
        rows.append(3)
    shift = Shift(state.previous, mix, (*rows,))
    products = [y[:, 0] for y in shifted_products(x, of_x, norm, shift)]
    r, k, v, low_decay, low_rate, low_gate = products[:6]
    if maps.value is not None and first is not None:
        low_value, first_value = products[6], first[:, 0]
    else:
        low_value, first_value, weights = None, None, weights._replace(value=None, value_bias=None)
    input_weight, input_eps = (None, 0.0) if norm is None else norm
    o = rwkv_step(
        RWKVCall(
            x=x[:, 0], input_weight=input_weight, previous=state.previous[:, 0], r=r, k=k, v=v, first=first_value,
            low_decay=low_decay, low_rate=low_rate, low_gate=low_gate, low_value=low_value, weights=weights,
            states=state.update, input_eps=input_eps,
        )
    )  # fmt: skip
    return o[:, None], v[:, None]
