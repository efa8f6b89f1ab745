"""deltazoo: a torch.compile-first layer zoo for linear-recurrent token mixers.

An `UpdateSpec` defines the recurrence, and backends compute it. Mixers, blocks and the CLI build on that. The public
names are imported on first use, so that `import deltazoo` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltazoo.backends.base import Backend, Draft, UpdateInputs, UpdateMeta, UpdateOutput
    from deltazoo.backends.check import validate
    from deltazoo.backends.dispatch import BoundUpdate, bind, update, use_backend
    from deltazoo.backends.errors import DeltazooError
    from deltazoo.backends.explain import explain
    from deltazoo.backends.spec import UpdateSpec
    from deltazoo.backends.watch import watch
    from deltazoo.blocks.layer import LayerSpec
    from deltazoo.blocks.spec import StackSpec
    from deltazoo.mixers.core.mixer import Context, MixerConfig, Place

_MODULE_OF = {
    "Backend": "backends.base",
    "BoundUpdate": "backends.dispatch",
    "Context": "mixers.core.mixer",
    "DeltazooError": "backends.errors",
    "Draft": "backends.base",
    "LayerSpec": "blocks.layer",
    "MixerConfig": "mixers.core.mixer",
    "Place": "mixers.core.mixer",
    "StackSpec": "blocks.spec",
    "UpdateInputs": "backends.base",
    "UpdateMeta": "backends.base",
    "UpdateOutput": "backends.base",
    "UpdateSpec": "backends.spec",
    "bind": "backends.dispatch",
    "explain": "backends.explain",
    "update": "backends.dispatch",
    "use_backend": "backends.dispatch",
    "validate": "backends.check",
    "watch": "backends.watch",
}

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "BoundUpdate",
    "Context",
    "DeltazooError",
    "Draft",
    "LayerSpec",
    "MixerConfig",
    "Place",
    "StackSpec",
    "UpdateInputs",
    "UpdateMeta",
    "UpdateOutput",
    "UpdateSpec",
    "bind",
    "explain",
    "update",
    "use_backend",
    "validate",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "conformance":
        return importlib.import_module("deltazoo.backends.conformance")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'deltazoo' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"deltazoo.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", "conformance"]
