"""Shell completion of names. Imports neither torch nor plug-ins, so that a TAB answers at once.

Where no name matches, the shell completes the paths of files.
"""

import os
from importlib.metadata import entry_points

_DEVICES = ["cpu", "cuda", "mps"]


def complete_stack(incomplete: str) -> list[str]:
    """Complete the name of a preset."""
    return _matching(_presets(), incomplete)


def complete_name(incomplete: str) -> list[str]:
    """Complete the name of a mixer, backend or preset."""
    names = [*_registered("deltazoo.mixers"), *_registered("deltazoo.backends"), *_presets()]
    return _matching(names, incomplete)


def complete_mixer(incomplete: str) -> list[str]:
    """Complete the name of a mixer, but not its fields."""
    return _matching(_registered("deltazoo.mixers"), incomplete)


def complete_mixers(incomplete: str) -> list[str]:
    """Complete the last name of a comma-separated list of mixers."""
    return _complete_list(_registered("deltazoo.mixers"), incomplete)


def complete_backend(incomplete: str) -> list[str]:
    """Complete the name of a backend."""
    return _matching(_registered("deltazoo.backends"), incomplete)


def complete_backends(incomplete: str) -> list[str]:
    """Complete the last name of a comma-separated list of backends; names that the list has are left out."""
    return _complete_list(_registered("deltazoo.backends"), incomplete)


def complete_device(incomplete: str) -> list[str]:
    """Complete the type of a device."""
    return _matching(_DEVICES, incomplete)


def complete_device_name(incomplete: str) -> list[str]:
    """Complete the name of a known GPU. Outside of quotes its spaces are escaped for bash; other shells do so."""
    from deltazoo.backends.torch_ext.known_gpus import KNOWN_GPUS

    words = os.environ.get("COMP_WORDS", "")
    is_quoted = words.count('"') % 2 or words.count("'") % 2
    escapes = os.environ.get("_DELTAZOO_COMPLETE") == "complete_bash" and not is_quoted
    return [name.replace(" ", r"\ ") if escapes else name for name in _matching([*KNOWN_GPUS], incomplete)]


def _complete_list(names: list[str], incomplete: str) -> list[str]:
    *before, last = incomplete.split(",")
    return [",".join([*before, name]) for name in _matching([name for name in names if name not in before], last)]


def _matching(names: list[str], incomplete: str) -> list[str]:
    return [name for name in sorted(names) if name.startswith(incomplete)]


def _registered(group: str) -> list[str]:
    return list({point.name for point in entry_points(group=group)})


def _presets() -> list[str]:
    from deltazoo.blocks.spec import presets

    return presets.names()
