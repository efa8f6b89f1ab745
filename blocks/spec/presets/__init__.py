"""The presets: models shipped as YAML files in this folder, looked up by file name.

`deltazoo.blocks.preset(name)` returns the StackSpec of a preset.
"""

from importlib.resources import files
from typing import Any

from deltazoo.backends.io.errors import UnknownNameError
from deltazoo.blocks.spec import document

_FOLDER = files("deltazoo.blocks.spec.presets")


def names() -> list[str]:
    """List the names of the presets, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


def text(name: str) -> str:
    """Return the YAML text of a preset, comments included.

    Raises: UnknownNameError: names the nearest preset.
    """
    if name not in names():
        raise UnknownNameError("preset", name, names())
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def read(name: str) -> dict[str, Any]:
    """Return the fields of a preset's StackSpec as plain data.

    Raises: UnknownNameError: names the nearest preset.
    """
    return document.parse(text(name), ".yaml", f"preset {name!r}")
