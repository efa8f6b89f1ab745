"""Launch the kernels of a plan in order."""

import importlib
from collections.abc import Sequence
from typing import Any

from deltazoo.backends.triton.chunk.arguments import Tensors, arguments, descriptor
from deltazoo.backends.triton.chunk.plan import KernelLaunch, Plan
from deltazoo.backends.triton.runtime.launcher import launcher
from deltazoo.backends.triton.support import Kernel


def execute(launches: Sequence[KernelLaunch], plan: Plan, scale: float, tensors: Tensors) -> None:
    """Launch kernels. scale: of q."""
    for launch in launches:
        kernel = load(launch.kernel)
        tensors_of, numbers, traits = arguments(plan, launch, scale, tensors)
        if traits.get("TILED") and "TILED" in kernel.arg_names:
            tensors_of["v"] = descriptor(plan, launch, tensors.v)
        launcher(kernel, tensors_of, traits, launch.options)(launch.programs, numbers)


def load(kernel: Kernel) -> Any:
    """Import the function of a kernel."""
    return getattr(importlib.import_module(kernel.module), kernel.name)
