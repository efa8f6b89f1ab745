"""The models that come with deltazoo: YAML files in presets/, found by name."""

from importlib.resources import files
from typing import Any

from deltazoo.backends.errors import UnknownNameError
from deltazoo.blocks import document

_FOLDER = files("deltazoo.blocks") / "presets"


def names() -> list[str]:
    """List the presets, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


def text(name: str) -> str:
    """The YAML of a preset, comments included.

    Raises: UnknownNameError, with the nearest name.
    """
    if name not in names():
        raise UnknownNameError("preset", name, names())
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def read(name: str) -> dict[str, Any]:
    """The fields of a preset's StackSpec; `StackSpec.load(name)` makes the spec.

    Raises: UnknownNameError, with the nearest name.
    """
    return document.parse(text(name), ".yaml", f"preset {name!r}")
