"""The devices that torch can use on this machine, and device-dependent settings of torch."""

import contextlib
import functools
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from deltazoo.backends.io.errors import ConfigError, cut
from deltazoo.backends.torch_ext.known_gpus import KNOWN_GPUS


def tf32_allowed() -> bool:
    """Whether torch may compute float32 matrix products in tf32 on a GPU, whichever of its settings allows it."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextlib.contextmanager
def products_in_tf32(allowed: bool) -> Iterator[None]:
    """Let GPUs compute float32 matrix products in tf32 if `allowed`; else leave torch's setting as it is.

    The setting is one for all threads of the process.
    """
    if not allowed or tf32_allowed():
        yield
        return
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        yield
    finally:
        setting.fp32_precision = before


def usable_device(device: str | torch.device) -> torch.device:
    """Return the torch.device for a name. Raises: ConfigError, with the available devices, if it is not available."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    available = devices()
    if parsed is None or not any(str(parsed) in (name, name.split(":")[0]) for name in available):
        raise ConfigError(f"device must be available to torch ({', '.join(available)}), got {str(device)!r}")
    return parsed


@contextlib.contextmanager
def simulated_device(device: "DeviceSpec") -> Iterator[None]:
    """Let meta tensors pass for tensors on a GPU, in all threads, which this machine need not have.

    Code that chooses kernels by `device_type` and `DeviceSpec.current` then chooses those of this GPU.
    """
    _simulated.append(device)
    try:
        yield
    finally:
        _simulated.remove(device)


def is_simulated() -> bool:
    """Whether a `simulated_device` is active."""
    return bool(_simulated)


def device_type(x: torch.Tensor) -> str:
    """Return the device type of a tensor, "cuda" for a meta tensor on a `simulated_device`."""
    return "cuda" if x.is_meta and _simulated else x.device.type


def devices() -> list[str]:
    """List the devices that torch can use on this machine, "cpu" first."""
    names = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps:0")
    return names


def cxx_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile needs on the CPU; None if there is none."""
    configured = os.environ.get("CXX")
    preferred = {"win32": ["cl"], "darwin": ["clang++"]}.get(sys.platform, [])
    names = [configured] if configured else preferred
    return next((path for name in [*names, "g++", "c++", "clang++"] if (path := shutil.which(name))), None)


class DeviceSpec(NamedTuple):
    """The properties of a device on which a kernel plan depends.

    Args:
        name: as the driver reports it, e.g. "NVIDIA H200".
        platform: "cuda", "hip" (ROCm), or "interpreter" (Triton's, on a CPU).
        capability: compute capability (major, minor). ROCm reports gfx942 as (9, 4).
        processors: streaming multiprocessors (compute units on AMD).
        shared_memory: bytes that one block may use, opt-in included.
        triton: the version of Triton that compiles for it; "" if none is installed.
    """

    name: str
    platform: Literal["cuda", "hip", "interpreter"]
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    triton: str = ""

    @property
    def is_hopper(self) -> bool:
        """Whether it runs sm_90 code. The platform counts: gfx90a and gfx942 report major version 9, too."""
        return self.platform == "cuda" and self.capability[0] == 9

    @property
    def triton_version(self) -> tuple[int, int]:
        """Major and minor version of Triton; (0, 0) if none is installed."""
        return triton_version(self.triton)

    @staticmethod
    def current(index: int | None = None) -> "DeviceSpec":
        """Return the properties of a GPU, which are read once; None is the current GPU.

        Without a GPU they are those of Triton's interpreter; on a `simulated_device` its own.
        """
        if _simulated:
            return _simulated[-1]
        if index is not None:
            return _properties(index)
        # `is_available` takes the driver about as long as a small kernel runs
        if not torch.cuda.is_initialized() and not torch.cuda.is_available():
            return INTERPRETER
        return _properties(torch.cuda.current_device())

    @staticmethod
    def named(name: str) -> "DeviceSpec":
        """Look up a known device, with the installed version of Triton, or a tested one if none is installed.

        Raises: ConfigError that lists the known names.
        """
        for device in KNOWN_DEVICES:
            if device.name == name:
                return device._replace(triton=installed_triton() or "3.7.1")
        known = ", ".join(repr(device.name) for device in KNOWN_DEVICES)
        near = next((device.name for device in KNOWN_DEVICES if _model(device.name) == _model(name)), None)
        hint = "" if near is None else f"; did you mean {near!r}?"
        raise ConfigError(f"device name must be one of {known}, got {cut(name)}{hint}")


_simulated: list[DeviceSpec] = []
INTERPRETER = DeviceSpec("interpreter", "interpreter", (0, 0), 1, 2**20)
KNOWN_DEVICES = tuple(DeviceSpec(name, *properties) for name, properties in KNOWN_GPUS.items())


def _model(name: str) -> str:
    """Return the first word of a device's name with a digit, which no two known devices share: h100, 4090."""
    return next(iter(re.findall(r"[a-z]*\d\w*", name.lower())), "")


@functools.cache
def _properties(index: int) -> DeviceSpec:
    properties = torch.cuda.get_device_properties(index)
    return DeviceSpec(
        name=properties.name,
        platform="hip" if torch.version.hip else "cuda",
        capability=(properties.major, properties.minor),
        processors=properties.multi_processor_count,
        shared_memory=int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)),
        triton=installed_triton(),
    )


def triton_version(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version; (0, 0) for ""."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


@functools.cache
def installed_triton() -> str:
    """Return the version of the installed package triton, without importing it; "" if there is none."""
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""
