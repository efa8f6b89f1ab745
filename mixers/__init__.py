"""Floor 1: modules that mix along time."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltazoo.mixers.attention import Attention, SlidingWindow
    from deltazoo.mixers.base import Context, Cost, Mixer, MixerConfig, Place
    from deltazoo.mixers.configs import dump, parse
    from deltazoo.mixers.deltanet import DeltaNet
    from deltazoo.mixers.efla import EFLA
    from deltazoo.mixers.gated_deltanet import GatedDeltaNet
    from deltazoo.mixers.gla import GLA
    from deltazoo.mixers.kda import KDA
    from deltazoo.mixers.linear_attention import LinearAttention
    from deltazoo.mixers.longhorn import Longhorn
    from deltazoo.mixers.mamba2 import Mamba2
    from deltazoo.mixers.retnet import RetNet

_HOME = {
    "Attention": "attention",
    "Context": "base",
    "Cost": "base",
    "DeltaNet": "deltanet",
    "EFLA": "efla",
    "GLA": "gla",
    "GatedDeltaNet": "gated_deltanet",
    "KDA": "kda",
    "LinearAttention": "linear_attention",
    "Longhorn": "longhorn",
    "Mamba2": "mamba2",
    "Mixer": "base",
    "MixerConfig": "base",
    "Place": "base",
    "RetNet": "retnet",
    "SlidingWindow": "attention",
    "dump": "configs",
    "parse": "configs",
}

__all__ = [
    "EFLA",
    "GLA",
    "KDA",
    "Attention",
    "Context",
    "Cost",
    "DeltaNet",
    "GatedDeltaNet",
    "LinearAttention",
    "Longhorn",
    "Mamba2",
    "Mixer",
    "MixerConfig",
    "Place",
    "RetNet",
    "SlidingWindow",
    "dump",
    "parse",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deltazoo.mixers' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"deltazoo.mixers.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
