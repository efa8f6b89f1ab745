"""The operator that gathers tensors of all GPUs of a host by one kernel, through symmetric memory.

Uses torch.distributed._symmetric_memory and _detect_dma_connectivity, which are private; tested with torch 2.11.

R ranks
"""

import functools
import itertools
import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deltazoo.backends.io.errors import first_line
from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

# Programs, which wait for those of other ranks and so must all run at once: one per SM, or a few beside other kernels.
_SLICES, _SLICES_BESIDE = 128, 8
_MOST_LOADED = 2**15  # elements that a program loads before it stores them


class Place(NamedTuple):
    """Where a rank runs. links: NVLinks from its GPU to each GPU that it sees, or why they are not known."""

    host: str
    device: int
    links: list[int] | str


def symmetric_refusal(group: dist.ProcessGroup) -> str | None:
    """Return why the GPUs of a group cannot gather by one kernel, or None. All ranks call it, with the same result."""
    refused = refusal(_gathered(_place(), group))
    return refused or next((error for error in _gathered(_mapping_error(group), group) if error), None)


def _gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, mine, group)
    return values


def _mapping_error(group: dist.ProcessGroup) -> str | None:
    """Map a small buffer of all GPUs; containers may forbid it."""
    try:
        _map(group, 1, torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        return f"torch cannot map the memory of the other GPUs: {first_line(error)}"
    return None


def _map(group: dist.ProcessGroup, elements: int, device: torch.device) -> tuple[Tensor, Any]:
    """Return a buffer of zeros of this rank, and the handle of those of all ranks."""
    from torch.distributed import _symmetric_memory

    symmetric: Any = _symmetric_memory
    owner = symmetric.empty(elements, dtype=torch.float32, device=device).zero_()
    return owner, symmetric.rendezvous(owner, group)


def _place() -> Place:
    device = torch.cuda.current_device()
    try:
        found: Any = torch._C._distributed_c10d
        links = found._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix[device]
    except (AttributeError, RuntimeError) as error:
        return Place(socket.gethostname(), device, f"torch cannot detect NVLink: {first_line(error)}")
    return Place(socket.gethostname(), device, list(links))


def refusal(places: list[Place]) -> str | None:
    """Return why kernels at these places cannot read each other's memory, or None."""
    if len(places) == 1:
        return "there is one rank"
    for (a, one), (b, other) in itertools.combinations(enumerate(places), 2):
        if one.host != other.host:
            return f"ranks {a} and {b} are on different hosts"
        if one.device == other.device:
            return f"ranks {a} and {b} both have device {one.device}: every rank must see all GPUs"
        if isinstance(one.links, str):
            return one.links
        if not one.links[other.device]:
            return f"no NVLink connects the GPUs of ranks {a} and {b}"
    return None


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
    owner, handle = _map(group, 2 * elements + slices * group.size(), device)
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
