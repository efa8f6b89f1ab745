"""Token mixers: modules that mix information along time, and the configs that build them.

Attributes: the mixer classes that the distribution `deltazoo` registers as entry points, and the names in
`_OTHER_NAMES`. Each is imported at its first use. `__init__.pyi` lists them for type checkers.
"""

import functools
import importlib
from importlib.metadata import entry_points
from typing import Any

_OTHER_NAMES = {
    "AuxiliaryLoss": "deltazoo.mixers.core.losses:AuxiliaryLoss",
    "Context": "deltazoo.mixers.core.mixer:Context",
    "Cost": "deltazoo.mixers.core.mixer:Cost",
    "Mixer": "deltazoo.mixers.core.mixer:Mixer",
    "MixerConfig": "deltazoo.mixers.core.mixer:MixerConfig",
    "Place": "deltazoo.mixers.core.mixer:Place",
    "conformance": "deltazoo.mixers.core.conformance",
    "dump": "deltazoo.mixers.core.config:dump",
    "parse": "deltazoo.mixers.core.config:parse",
}


@functools.cache
def _locations() -> dict[str, str]:
    """Attribute name -> "module:name", or "module" for a submodule."""
    points = [point for point in entry_points(group="deltazoo.mixers") if point.dist and point.dist.name == "deltazoo"]
    return {point.value.rpartition(":")[2]: point.value for point in points} | _OTHER_NAMES


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in _locations():
        raise AttributeError(f"module 'deltazoo.mixers' has no attribute {name!r}")
    module, _, attribute = _locations()[name].partition(":")
    value: Any = importlib.import_module(module)
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_locations())
