"""Operands of the kernels of log-linear attention, and what the kernels support; does not import Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs
from deltazoo.backends.triton.limits import elementwise_refusals, limits_of

CHUNK = 64
MAX_KEYS = 128
MAX_LEVELS = CHUNK.bit_length() + 16
# bytes per block of the largest kernel of training, by the size of a number, compiled for sm_89 and sm_90 with Triton
# 3.7.1
_SHARED_MEMORY = {2: 98304, 4: 196608}


class LevelOperands(NamedTuple):
    """The tensors of log-linear attention. None: no such operand.

    B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width, L levels, J = L - 7

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], times the write strength.
        log_decay: [B, T, HV] float32. erase: [B, T, HV] float32, the erase strength; None: no erase term.
        weights: lambda, [B, T, HV, L].
        state: [N, J, HV, K, V] float32, the states of the levels from 7 on before the first token of each row.
        first: [N] int32, with a state: the number of tokens before, divided by 64.
        counts: [N] int32, with a state: the tokens of each row that are processed, a multiple of 64.
        cu: [N + 1] int32, the bounds of packed sequences, without a state; then B = 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    erase: Tensor | None
    weights: Tensor
    state: Tensor | None = None
    first: Tensor | None = None
    counts: Tensor | None = None
    cu: Tensor | None = None


def operand_refusals(x: LevelOperands) -> list[str]:
    """Return why the kernels do not take the dtypes, widths and levels of the operands; [] if they do."""
    if not x.q.dtype == x.k.dtype == x.v.dtype:
        return [f"q, k and v must have one dtype, got {x.q.dtype}, {x.k.dtype} and {x.v.dtype}."]
    if x.q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return [f"it computes in float32, bfloat16 or float16, got {x.q.dtype}."]
    if x.q.shape[-1] > MAX_KEYS:
        return [f"keys must have at most {MAX_KEYS} channels, got {x.q.shape[-1]}."]
    levels = x.weights.shape[-1]
    if not CHUNK.bit_length() < levels <= MAX_LEVELS:
        return [f"there must be {CHUNK.bit_length() + 1} to {MAX_LEVELS} levels, got {levels}."]
    return []


@constant_in_graphs
def level_refusals(device_type: str, index: int | None, dtype: torch.dtype) -> tuple[str, ...]:
    """Return why the kernels do not run on a device: those of training must fit it, and its Triton compile them.

    In float32 they fit Hopper and data-centre Blackwell GPUs.
    """
    reasons = elementwise_refusals(device_type, index, dtype)
    if reasons:
        return reasons
    reasons, name, shared_memory = limits_of(DeviceSpec.current(index), True)
    needed = _SHARED_MEMORY[dtype.itemsize]
    if not reasons and shared_memory < needed:
        return (f"it needs {needed} bytes of shared memory per block, and {name} has {shared_memory}.",)
    return reasons
