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
        operands, numbers, traits = arguments(plan, launch, scale, tensors)
        if "TILED" in kernel.Traits._fields and traits["TILED"]:
            operands["v"] = descriptor(plan, launch, tensors.v)
        operands["gmem"] = kernel.Pointers._make([operands[name] for name in kernel.Pointers._fields])
        constants = {"traits": kernel.Traits._make([traits[name] for name in kernel.Traits._fields])}
        launcher(kernel, operands, constants, launch.options)(launch.programs, numbers)


def load(kernel: Kernel) -> Any:
    """Import the function of a kernel."""
    return getattr(importlib.import_module(kernel.module), kernel.name)
