"""PaTH attention by kernels: softmax attention whose scores contain products of Householder matrices.

    o_t = sum_(s <= t) softmax_s(scale k_s^T H_(s+1) ... H_t q_t + g_t - g_s) v_s,    H_r = I - beta_r w_r w_r^T

`householder_attention` computes it in plain torch. Source: Yang 2025, arXiv 2505.16381.
"""

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs
from deltazoo.backends.triton.attention import path_op as kernels
from deltazoo.backends.triton.attention.path_decode_op import PathCache, PathToken, path_decode_, settled_keys
from deltazoo.backends.triton.attention.path_op import PathOperands as PathInputs
from deltazoo.backends.triton.attention.path_op import PathPast, path_prefill
from deltazoo.backends.triton.limits import kernel_refusals

__all__ = [
    "PathCache",
    "PathInputs",
    "PathPast",
    "PathToken",
    "path_attention",
    "path_decode_",
    "path_prefill",
    "refusals",
    "runs_flash_kernels",
    "settled_keys",
]


def refusals(q: Tensor, v: Tensor) -> list[str]:
    """Return why the flash kernels do not attend from q [B, T, H, D] to v, one sentence each; [] if they do.

    They need a Hopper GPU, for whose shared memory their tiles are chosen.
    """
    widest = kernels.MAX_WIDTH if q.dtype != torch.float32 else kernels.MAX_WIDTH_FLOAT32
    if max(q.shape[-1], v.shape[-1]) > widest:
        return [f"heads in {q.dtype} must have at most {widest} channels, got {max(q.shape[-1], v.shape[-1])}."]
    reasons = kernel_refusals(q)
    if not reasons and not runs_flash_kernels(q.device.index):
        return ["it needs a Hopper GPU, for whose shared memory its tiles are chosen."]
    return reasons


@constant_in_graphs
def runs_flash_kernels(index: int | None) -> bool:
    """Whether a GPU is a Hopper GPU."""
    return DeviceSpec.current(index).is_hopper


def path_attention(inputs: PathInputs, scale: float) -> Tensor:
    """Attend among the tokens of the call, for inputs without `refusals`. Differentiable once.

    Work grows as T^2, memory as T log T. A pack may have empty sequences; rows after its last one get zeros. A token
    with an operand that is not finite changes no other sequence or head.

    Returns: [B, T, H, V], in the dtype of q.
    """
    return kernels.path_attention(inputs, scale)
