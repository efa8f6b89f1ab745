"""Memory that CUDA registers: the tensors in it are apart, and a refusal leaves pageable memory."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from deltazoo.backends.torch_ext import pinned
from deltazoo.backends.torch_ext.pinned import Layout, PinnedMemory

SHAPES = [((300, 1000), torch.float32), ((), torch.float32), ((0, 3), torch.bfloat16), ((1025,), torch.bfloat16)]
LAYOUTS = {
    f"{n} {copy}": Layout(torch.Size(shape), dtype) for copy in (1, 2) for n, (shape, dtype) in enumerate(SHAPES)
}


def assert_apart(tensors: dict[str, torch.Tensor]) -> None:
    """Write a number of its own into every tensor, and read all again."""
    assert {name: (x.shape, x.dtype) for name, x in tensors.items()} == {n: tuple(x) for n, x in LAYOUTS.items()}
    for number, x in enumerate(tensors.values()):
        x.fill_(number)
    assert all((x == number).all() for number, x in enumerate(tensors.values()))


@pytest.mark.parametrize("code", [0, 1], ids=["registered", "refused"])
def test_tensors_lie_apart_and_every_registered_address_is_released(code, monkeypatch):
    registered: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        if code == 0:
            registered[address] = size
        return code

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(pinned, "_SEGMENT", 1 << 20)
    memory = PinnedMemory()
    tensors = memory.allocate(LAYOUTS, torch.device("cuda:0"))
    assert_apart(tensors)
    bounds = sorted((address, address + size) for address, size in registered.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(bounds))
    if code == 0:
        full = [x for x in tensors.values() if x.numel()]
        inside = [any(a <= x.data_ptr() and x.data_ptr() + x.nbytes <= b for a, b in bounds) for x in full]
        assert all(inside) and len(bounds) > 1
    memory.release()
    assert not registered


@pytest.mark.cuda
def test_a_gpu_copies_to_registered_memory_asynchronously():
    memory = PinnedMemory()
    tensors = memory.allocate(LAYOUTS, torch.device("cuda:0"))
    assert_apart(tensors)
    assert all(x.is_pinned() for x in tensors.values() if x.numel())
    source = torch.randn(300, 1000, device="cuda")
    tensors["0 1"].copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(tensors["0 1"], source.cpu())
    memory.release()
    assert not tensors["0 1"].is_pinned()
