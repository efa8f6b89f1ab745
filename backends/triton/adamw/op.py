"""Launch of the update of many weights by AdamW. Triton is imported when it first runs."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv

CHUNK, BLOCK, WARPS = 8192, 1024, 4  # elements of a program, and of one of its iterations
_ALIGNMENT = 16  # bytes


class AdamWOperands(NamedTuple):
    """The tensors of one weight in the order of the kernel's table, contiguous and of one shape, but for the step.

    Args:
        weight, first, second: float32, updated in place: the weight and the moments of its gradient.
        gradient: of any floating dtype, the same for all weights of a launch.
        rounded: receives the weight in another dtype; None, for all weights of a launch: there is none.
        step: float32 scalar, counts from 1.
    """

    weight: Tensor
    first: Tensor
    second: Tensor
    gradient: Tensor
    rounded: Tensor | None
    step: Tensor


class AdamWNumbers(NamedTuple):
    """The numbers of AdamW."""

    betas: tuple[float, float]
    eps: float
    decay: float


class AdamWLaunch:
    """Updates of the same weights, as torch.optim.AdamW computes them, each in one launch; see `adamw_kernel`.

    The kernel reads the addresses of all tensors from a table, which is copied to the GPU when one of them changes. A
    CUDA graph cannot capture that.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._chunks: tuple[Tensor, Tensor, Tensor] | None = None
        self._listed: list[int] = []
        self._addresses: Tensor | None = None

    def update(
        self, operands: list[AdamWOperands], numbers: AdamWNumbers, rate: Tensor, scale: Tensor, skip: Tensor
    ) -> None:
        """Update weights on a GPU. Args: rate; scale: a factor of the gradients; skip: 0, or nothing changes."""
        from deltazoo.backends.triton.adamw.kernels import AdamWTraits, adamw_kernel
        from deltazoo.backends.triton.runtime.launcher import launcher

        owners, starts, sizes = self._chunks_of([each.weight.numel() for each in operands], scale.device)
        listed = [0 if x is None else x.data_ptr() for each in operands for x in each]
        if self._addresses is None or listed != self._listed:
            self._listed = listed
            self._addresses = _to_device(torch.tensor(listed), scale.device)
        aligned = all(address % _ALIGNMENT == 0 for n, address in enumerate(listed) if n % 6 != 5)
        traits = AdamWTraits(CHUNK, BLOCK, operands[0].rounded is not None, aligned)
        tensors = {
            "addresses": self._addresses, "owners": owners, "starts": starts, "sizes": sizes, "rate": rate,
            "gradient": operands[0].gradient, "rounded": operands[0].rounded, "scale": scale, "skip": skip,
        }  # fmt: skip
        new1, new2 = (1 - beta for beta in numbers.betas)
        log_beta1, log_beta2 = (math.log(max(beta, 1e-300)) for beta in numbers.betas)
        values = {
            "new1": new1, "new2": new2, "log_beta1": log_beta1, "log_beta2": log_beta2, "eps": numbers.eps,
            "decay": numbers.decay,
        }  # fmt: skip
        with torch.cuda.device_of(scale):
            launcher(adamw_kernel, tensors, traits._asdict(), Options(WARPS))(len(owners), values)

    def _chunks_of(self, sizes: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return weight and first element of each chunk, and the sizes of the weights."""
        if self._chunks is None or sizes != self._sizes:
            self._sizes = sizes
            counts = torch.tensor([cdiv(size, CHUNK) for size in sizes])
            owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
            first = (counts.cumsum(0) - counts).repeat_interleave(counts)
            starts = (torch.arange(len(owners)) - first) * CHUNK
            self._chunks = (
                _to_device(owners, device),
                _to_device(starts, device),
                _to_device(torch.tensor(sizes), device),
            )
        return self._chunks


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy to a GPU without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
