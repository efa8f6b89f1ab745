"""Matrix products of 16-bit operands that are accumulated in float32 across calls.

`torch.mm(..., out_dtype=torch.float32)` exists for CUDA from torch 2.8 on. Early versions of the same overload of
`torch.addmm` refuse a float32 summand; `_accumulates` finds out with a small product. Without either (CPU, ROCm) the
operands are converted. On a CPU without 16-bit arithmetic (AVX2), [4096, 512] @ [512, 256] in bfloat16 takes 140 ms,
converted 44 ms (torch 2.13).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def add_product_(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Compute sum += a b. sum: float32, or the dtype of a and b."""
    if sum_MN.dtype == a_MK.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    elif _accumulates(sum_MN.device, a_MK.dtype):
        _addmm_(sum_MN, a_MK, b_KN)
    elif _has_wide_result(sum_MN.device, a_MK.dtype):
        sum_MN += torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    else:
        sum_MN.addmm_(a_MK.to(sum_MN.dtype), b_KN.to(sum_MN.dtype))


def _addmm_(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    torch.addmm(sum_MN, a_MK, b_KN, out_dtype=torch.float32, out=sum_MN)


@functools.cache
def _accumulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `torch.addmm` adds a product of 16-bit matrices to a float32 matrix on this device."""
    return _has_wide_result(device, dtype) and _runs(lambda a: _addmm_(a.float(), a, a), device, dtype)


@functools.cache
def _has_wide_result(device: torch.device, dtype: torch.dtype) -> bool:
    return _runs(lambda a: torch.mm(a, a, out_dtype=torch.float32), device, dtype)


def _runs(product: Callable[[Tensor], object], device: torch.device, dtype: torch.dtype) -> bool:
    try:
        product(torch.zeros(16, 16, device=device, dtype=dtype))
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True
