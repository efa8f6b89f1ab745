"""The devices of this machine, and settings of torch that depend on them."""

import os
import shutil
import sys

import torch

from deltazoo.backends.errors import ConfigError


def tf32_allowed() -> bool:
    """Whether torch may take products of float32 in tf32 on a GPU, by whichever of its settings the user said so."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def usable_device(device: str | torch.device) -> torch.device:
    """Turn a name into a device that torch can see here. Raises: ConfigError with the devices that it can."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    seen = devices()
    if found is None or not any(str(found) in (name, name.split(":")[0]) for name in seen):
        raise ConfigError(f"device must be one that torch sees here ({', '.join(seen)}), got {str(device)!r}")
    return found


def devices() -> list[str]:
    """Name every device that torch sees here, "cpu" first."""
    seen = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        seen.append("mps:0")
    return seen


def cxx_compiler() -> str | None:
    """Find the C++ compiler that torch.compile needs on the CPU; None where there is none."""
    asked = os.environ.get("CXX")
    names = [asked] if asked else ["cl"] if sys.platform == "win32" else ["clang++"] if sys.platform == "darwin" else []
    return next((path for name in [*names, "g++", "c++", "clang++"] if (path := shutil.which(name))), None)
