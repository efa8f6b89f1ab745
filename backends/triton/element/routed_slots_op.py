"""Operator and launch of one token of attention to routed slots; kernels/routed_slots_step.py states the equations.

B rows, H heads, G key-value heads, M slots, K key width, V value width
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.element.step_tensors import finish, rows_equally_apart, step_tensors
from deltazoo.backends.triton.operands import schema
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import limit_warps, power_of_two

_MOST = 16384  # numbers of a state of a head, which a program holds
_WARPS = 8
_OF_TOKEN = ("q", "k", "v", "decay", "scores")  # columns of one tensor: their rows may be apart
_IN_PLACE = ("keys", "values")


class RoutedSlotsCall(NamedTuple):
    """The operator's arguments: tensors as of `routed_slots_step_kernel`.

    Args:
        keys: [B, H M, K, 1]. values: [B, H, M, V]. active: slots that a token writes to.
        softmax: whether the router computes a softmax. scale: factor on K q. eps: of the norms of q and k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    scores: Tensor
    q_weight: Tensor
    k_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    keys: Tensor
    values: Tensor
    active: int
    softmax: bool
    scale: float
    eps: float


def takes_routed_slots(slots: int, key_width: int, value_width: int) -> bool:
    """Whether the kernel takes states of these sizes."""
    return power_of_two(slots) * power_of_two(max(key_width, value_width)) <= _MOST


def routed_slots_step_(call: RoutedSlotsCall) -> Tensor:
    """Decode one token per row; `keys` and `values` change in place. Returns: o [B, H V] in the dtype of q."""
    o: Tensor = _step_op(*call)
    return o


def _step(*arguments: Any) -> Tensor:
    from deltazoo.backends.triton.element.kernels.routed_slots_step import SlotTraits, routed_slots_step_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    call, o = RoutedSlotsCall(*arguments), _fake(*arguments)
    (B, H, M, V), K, G = call.values.shape, call.q_weight.shape[0], call.A_log.shape[0]
    tensors = step_tensors(call, _OF_TOKEN, _IN_PLACE) | {"o": o}
    rows_equally_apart(tensors, _OF_TOKEN)
    overlap = overlaps(call.q)
    sizes = {"BM": power_of_two(M), "BK": power_of_two(K), "BV": power_of_two(V)}
    traits = SlotTraits(
        H=H, G=G, M=M, K=K, V=V, **sizes, STRIDE=tensors["q"].stride(0), ACTIVE=call.active, SOFTMAX=call.softmax,
        SCALE=call.scale, EPS=call.eps, OVERLAP=overlap,
    )  # fmt: skip
    warps = limit_warps(_WARPS, sizes["BM"] * min(sizes["BK"], sizes["BV"]))
    with torch.cuda.device_of(call.q):
        launcher(routed_slots_step_kernel, tensors, {"traits": traits}, Options(warps, overlap=overlap))(B * H, {})
    finish(call, tensors, _IN_PLACE)
    return o


def _fake(*arguments: Any) -> Tensor:
    call = RoutedSlotsCall(*arguments)
    B, H, _, V = call.values.shape
    return call.q.new_empty(B, H * V)


_step_op = operator(
    f"triton_routed_slots_step_({schema(RoutedSlotsCall, *_IN_PLACE)}) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
