"""Whether the numbers of tensors may be read, and what is wrong with a pack."""

import itertools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from deltazoo.backends.errors import ShapeError


def sequences_of(cu_seqlens: Tensor | None, B: int) -> int:
    """How many sequences there are: B rows, or those of a pack. Raises: ShapeError."""
    if cu_seqlens is None:
        return B
    if B != 1:
        raise ShapeError(f"packed sequences (cu_seqlens) need B = 1, got B = {B}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ShapeError(f"cu_seqlens must have shape [N + 1], got {list(cu_seqlens.shape)}")
    return cu_seqlens.shape[0] - 1


def packing_problems(cu_seqlens: Tensor | None, T: int) -> list[str]:
    """What is wrong with the bounds of a pack; [] where nothing is, or there is none. Reads them off the device."""
    if cu_seqlens is None:
        return []
    bounds: list[int] = cu_seqlens.tolist()
    rising = all(left <= right for left, right in itertools.pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != T or not rising:
        shown = bounds if len(bounds) <= 8 else [*bounds[:4], "...", *bounds[-3:]]
        return [f"cu_seqlens must rise from 0 to T = {T}, got {shown}."]
    return []


def functorch_is_active() -> bool:
    """Whether a transform of torch.func is under way."""
    return bool(torch._C._are_functorch_transforms_active())


def values_are_readable(*tensors: Tensor | None) -> bool:
    """Whether the numbers of tensors may be read: on the CPU, not while a graph is traced, a mode or a transform of
    torch.func is under way, nor of tensors that have none."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    given = [x for x in tensors if x is not None]
    return not functorch_is_active() and all(x.device.type == "cpu" and not isinstance(x, FakeTensor) for x in given)
