"""Residual layers, layer patterns, language models, training, generation and inspection."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltazoo.blocks.compilation import compile_layers
    from deltazoo.blocks.spec import preset

_MODULES = {"compile_layers": "compilation", "preset": "spec"}

__all__ = ["compile_layers", "preset"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'deltazoo.blocks' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"deltazoo.blocks.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
