"""Devices and Triton versions that the kernels do not support, refused before anything is compiled."""

import functools

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.devices import INTERPRETER, DeviceSpec, device_type, installed_triton
from deltazoo.backends.torch_ext.modes import transform_is_active
from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs

_OLDEST_TRITON, _NEWEST_TRITON = (3, 6), (3, 9)
_OLDEST_CAPABILITY = (8, 0)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Shared memory in bytes of the largest portable kernel for K > 192 in 16 bits, forward alone and with the backward,
# with the tiles that the heuristic chooses for GPUs with 99 KiB per block; compiled for sm_89 with Triton 3.7.1. For
# narrower keys and for float32 it is at most 93,188 bytes. Larger tiles are chosen only where they fit.
_WIDE_KEYS_FORWARD = 81920
_WIDE_KEYS_BACKWARD = 98304


def platform_refusals(device: DeviceSpec) -> list[str]:
    """Say why no kernel runs on a device with its Triton version; [] if they run."""
    if device.platform == "hip":
        return [f"it needs an NVIDIA GPU, and {device.name} is an AMD GPU (ROCm); use backend='compile'."]
    reasons = []
    if not _OLDEST_TRITON <= device.triton_version <= _NEWEST_TRITON:
        versions = f"{_dotted(_OLDEST_TRITON)} to {_dotted(_NEWEST_TRITON)}"
        reasons.append(f"it needs Triton {versions}, and {device.triton or 'none'} is installed.")
    if device.capability < _OLDEST_CAPABILITY:
        reasons.append(f"it needs compute capability 8.0 or newer, and {device.name} has {_dotted(device.capability)}.")
    return reasons


def blackwell_refusals(device: DeviceSpec, grad: bool, channel: bool) -> list[str]:
    """Say why the kernels for a decay per channel, or those of the backward, do not run on a supported platform."""
    if device.capability[0] != 10 or device.triton_version >= (3, 9) or not (grad or channel):
        return []
    what = "a decay per channel" if channel else "training"
    why = (
        "older versions do not compile its kernels"
        if channel
        else "with older versions the backward exceeds tensor memory"
    )
    return [
        f"{what} on compute capability {_dotted(device.capability)} needs Triton 3.9 or newer: {why}; {device.triton} "
        f"is installed."
    ]


@functools.cache
def limits_of(device: DeviceSpec, grad: bool, channel: bool = False) -> tuple[tuple[str, ...], str, int]:
    """Return the refusals of a device for any sizes, its name and its shared memory per block in bytes.

    Args: channel: the decay is per channel.
    """
    reasons = platform_refusals(device) or blackwell_refusals(device, grad, channel)
    return tuple(reasons), device.name, device.shared_memory


@constant_in_graphs
def current_limits(grad: bool, channel: bool = False) -> tuple[tuple[str, ...], str, int]:
    """`limits_of` the current GPU; without one, of the installed Triton alone. Runs on every eager call.

    In a traced call the arguments must be constants, which widths are not under dynamic=True.
    """
    device = DeviceSpec.current()
    return limits_of(_no_gpu() if device is INTERPRETER else device, grad, channel)


def kernel_refusals(x: Tensor) -> list[str]:
    """Say why no kernel beside the update runs on a tensor; [] if they run. For calls also inside torch.compile."""
    if transform_is_active():
        return ["it has no rule for the transforms of torch.func and forward-mode derivatives."]
    if x.numel() == 0:
        return ["it needs tensors with at least one number."]
    return [*elementwise_refusals(device_type(x), x.device.index, x.dtype)]


@constant_in_graphs
def elementwise_refusals(device_type: str, index: int | None, dtype: torch.dtype) -> tuple[str, ...]:
    """Say why the kernels beside the update do not run on a device; () if they run."""
    if device_type != "cuda":
        return (f"it needs tensors on 'cuda', got '{device_type}'.",)
    if dtype not in _DTYPES:
        return (f"it computes in float32, bfloat16 or float16, got {str(dtype).removeprefix('torch.')}.",)
    if not installed_triton():
        return ("it needs the package triton, which is not installed.",)
    return limits_of(DeviceSpec.current(index), False)[0]


def size_refusals(name: str, shared_memory: int, dtype: torch.dtype, K: int, V: int, grad: bool) -> list[str]:
    """Say why the kernels for these widths do not fit the shared memory of a device.

    Args: dtype: that of the products: float32 for float16 with split terms.
    """
    need = shared_memory_needed(dtype, K, grad)
    if need <= shared_memory:
        return []
    training = " for training" if grad else ""
    return [
        f"K = {K} and V = {V} in {str(dtype).removeprefix('torch.')} need {need} bytes of shared memory per block"
        f"{training}, and {name} has {shared_memory}."
    ]


def shared_memory_needed(dtype: torch.dtype, K: int, grad: bool) -> int:
    """Return the shared memory per block of the largest portable kernel, in bytes."""
    if dtype == torch.float32 or K <= 192:
        return 93188
    return _WIDE_KEYS_BACKWARD if grad else _WIDE_KEYS_FORWARD


def _no_gpu() -> DeviceSpec:
    return DeviceSpec("this machine", "cuda", _OLDEST_CAPABILITY, 1, 2**31, installed_triton())


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
