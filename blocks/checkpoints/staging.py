"""Copies of tensors in main memory, from which a thread writes them while the originals change."""

import threading

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deltazoo.backends.torch_ext.pinned import Layout, PinnedMemory


class Staging:
    """Copy tensors to main memory; that of a GPU's tensors is pinned. The memory is kept for the next copies."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._pinned = PinnedMemory()
        self._reserving: threading.Thread | None = None

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Begin to allocate the memory in a thread, beside the training."""
        self._reserving = threading.Thread(target=self._allocate, args=(tensors,), name="deltazoo pinned memory")
        self._reserving.start()

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies, of which sharded ones are the same parts of whole tensors. Waits for the GPU."""
        self._wait()
        self._allocate(tensors)
        copies: dict[str, Tensor] = {}
        devices = set()
        for name, tensor in tensors.items():
            local, copy = _local(tensor), self._copies[name]
            if local.is_cuda:
                devices.add(local.device)
            copy.copy_(local.detach(), non_blocking=local.is_cuda)
            copies[name] = _as_sharded(copy, tensor) if isinstance(tensor, DTensor) else copy
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def release(self) -> None:
        """Unpin the memory."""
        self._wait()
        self._pinned.release()

    def _wait(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        missing: dict[str, Layout] = {}
        device: torch.device | None = None
        for name, tensor in tensors.items():
            local = _local(tensor)
            copy = self._copies.get(name)
            if copy is not None and copy.shape == local.shape and copy.dtype == local.dtype:
                continue
            if local.is_cuda:
                missing[name], device = Layout(local.shape, local.dtype), local.device
            else:
                self._copies[name] = torch.empty_like(local, device="cpu")
        if device is not None:
            self._copies |= self._pinned.allocate(missing, device)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_sharded(copy: Tensor, like: DTensor) -> Tensor:
    """Return a copy in main memory as the part of a whole tensor.

    `DTensor.from_local` would move it to the device of the mesh. The constructor and `_spec` are internals of torch,
    here of 2.11 to 2.13; the public `DTensor.cpu` copies to memory that is not pinned.
    """
    return DTensor(copy, like._spec, requires_grad=False)
