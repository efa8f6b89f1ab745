"""The operator that gathers tensors of all GPUs of a host by one kernel, through symmetric memory.

Uses torch.distributed._symmetric_memory, which is private; tested with torch 2.11.

R ranks
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

# Programs, which wait for those of other ranks and so must all run at once: one per SM, or a few beside other kernels.
_SLICES, _SLICES_BESIDE = 128, 8
_MOST_LOADED = 2**15  # elements that a program loads before it stores them


def begin_symmetric_gather(x: Tensor, ranks: int, group: str, beside: bool) -> Tensor:
    """Gather float32 tensors of equal shape along dimension 0, without a gradient, as [R x.shape[0], ...].

    The ranks of the group must be GPUs that read each other's memory (NVLink), and make the same calls in the same
    order. The first call with a number of elements allocates a buffer, which is not possible in a CUDA graph.

    Args: beside: on a stream of its own, beside the kernels that follow on the current one.
        `torch.ops._c10d_functional.wait_tensor` makes the current stream wait for the result, in either case.
    """
    gathered: Tensor = _symmetric_gather_op(x.contiguous(), ranks, group, beside)
    return gathered


class _Memory(NamedTuple):
    """What the kernel uses besides its operands. owner: keeps the buffer of this rank."""

    buffers: Tensor
    calls: Tensor
    rank: int
    owner: Tensor


@functools.cache
def _memory(group: Any, elements: int, slices: int, device: torch.device) -> _Memory:
    from torch.distributed import _symmetric_memory

    symmetric: Any = _symmetric_memory
    owner = symmetric.empty(2 * elements + slices * group.size(), dtype=torch.float32, device=device).zero_()
    handle = symmetric.rendezvous(owner, group)
    handle.barrier()  # no rank sets a flag before all are zero
    buffers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    return _Memory(buffers, torch.zeros(slices, dtype=torch.int32, device=device), handle.rank, owner)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _body(x: Tensor, ranks: int, group: str, beside: bool) -> Tensor:
    from torch.distributed import _symmetric_memory, distributed_c10d

    groups: Any = distributed_c10d  # torch declares group names as a type of their own
    gathered, slices = _fake(x, ranks, group, beside), _SLICES_BESIDE if beside else _SLICES
    memory = _memory(groups._resolve_process_group(group), x.numel(), slices, x.device)
    if not beside:
        _launch(x, gathered, memory, slices)
        return gathered
    stream = _stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        _launch(x, gathered, memory, slices)
        work: Any = _symmetric_memory.Work()
    work.operand = x  # whose memory must not be used again before the work has ended
    torch._C._distributed_c10d._register_work(gathered, work)
    return gathered


def _launch(x: Tensor, gathered: Tensor, memory: _Memory, slices: int) -> None:
    from deltazoo.backends.triton.gather.kernels import GatherTraits, gather_kernel
    from deltazoo.backends.triton.runtime.launcher import launcher

    ranks, elements = memory.buffers.numel(), x.numel()
    block = min(power_of_two(cdiv(elements, slices)), _MOST_LOADED // power_of_two(ranks))
    traits = GatherTraits(ranks, elements, block, cdiv(elements, slices * block))
    tensors = {"x": x, "gathered": gathered, "buffers": memory.buffers, "calls": memory.calls}
    with torch.cuda.device_of(x):
        launcher(gather_kernel, tensors, {"traits": traits}, Options(16))(slices, {"rank": memory.rank})


def _fake(x: Tensor, ranks: int, group: str, beside: bool) -> Tensor:
    return x.new_empty(ranks * x.shape[0], *x.shape[1:])


_symmetric_gather_op = operator(
    "triton_symmetric_gather(Tensor x, int ranks, str group, bool beside) -> Tensor", _body, _fake
)
