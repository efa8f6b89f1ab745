"""PaTH attention by kernels: softmax attention whose scores contain products of Householder matrices.

    o_t = sum_(s <= t) softmax_s(scale k_s^T H_(s+1) ... H_t q_t + g_t - g_s) v_s,    H_r = I - beta_r w_r w_r^T

`householder_attention` computes it in plain torch. Source: Yang 2025, arXiv 2505.16381.
"""

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.torch_ext.modes import functorch_is_active
from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs
from deltazoo.backends.triton.attention import path_op as kernels
from deltazoo.backends.triton.attention.path_decode_op import PathToken, path_decode_
from deltazoo.backends.triton.attention.path_op import PathOperands as PathInputs
from deltazoo.backends.triton.attention.path_op import PathPast, path_prefill
from deltazoo.backends.triton.limits import runs_elementwise_kernels

__all__ = [
    "PathInputs",
    "PathPast",
    "PathToken",
    "has_decode_kernels",
    "has_kernels",
    "path_attention",
    "path_decode_",
    "path_prefill",
    "runs_flash_kernels",
]


def has_decode_kernels(q: Tensor) -> bool:
    """Whether `path_decode_` runs on the device of q [B, 1, H, D] with its dtype."""
    if not torch.compiler.is_compiling() and functorch_is_active():
        return False
    return q.numel() > 0 and runs_elementwise_kernels(q.device.type, q.device.index, q.dtype)


def has_kernels(q: Tensor, v: Tensor) -> bool:
    """Whether the flash kernels run on the device of q [B, T, H, D] and v, with their dtype and widths.

    They need a Hopper GPU, for whose shared memory their tiles are chosen, and have no rule for torch.func.vmap.
    """
    if not torch.compiler.is_compiling() and functorch_is_active():
        return False
    widest = kernels.MAX_WIDTH if q.dtype != torch.float32 else kernels.MAX_WIDTH_FLOAT32
    is_narrow = max(q.shape[-1], v.shape[-1]) <= widest
    return is_narrow and q.numel() > 0 and runs_flash_kernels(q.device.type, q.device.index, q.dtype)


@constant_in_graphs
def runs_flash_kernels(device_type: str, index: int | None, dtype: torch.dtype) -> bool:
    """Whether the device is a Hopper GPU, and the dtype and the version of Triton are supported."""
    return runs_elementwise_kernels(device_type, index, dtype) and DeviceSpec.current(index).is_hopper


def path_attention(inputs: PathInputs, scale: float) -> Tensor:
    """Attend among the tokens of the call, for inputs that `has_kernels` allows. Differentiable once.

    Work grows as T^2, memory as T log T. A pack may have empty sequences; rows after its last one get zeros. A token
    with an operand that is not finite changes no other sequence or head.

    Returns: [B, T, H, V], in the dtype of q.
    """
    return kernels.path_attention(inputs, scale)
