"""The devices that torch can use on this machine, and device-dependent settings of torch."""

import os
import shutil
import sys

import torch

from deltazoo.backends.errors import ConfigError


def tf32_allowed() -> bool:
    """Whether torch may compute float32 matrix products in tf32 on a GPU, whichever of its settings allows it."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def usable_device(device: str | torch.device) -> torch.device:
    """Return the torch.device for a name. Raises: ConfigError, with the available devices, if it is not available."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    available = devices()
    if parsed is None or not any(str(parsed) in (name, name.split(":")[0]) for name in available):
        raise ConfigError(f"device must be one that torch sees here ({', '.join(available)}), got {str(device)!r}")
    return parsed


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
