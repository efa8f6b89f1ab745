"""Refusal of "module:Class" names in stack files and training settings, because importing a module runs its code.

A name that the caller passes in Python or on the command line is trusted. A name in a file is refused unless the caller
passes trust=True.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from deltazoo.backends.io.errors import PatternError
from deltazoo.backends.update import registry
from deltazoo.blocks.spec.parsing import KeyPath, join_path
from deltazoo.blocks.spec.pattern import names, parse

_KINDS = ("mixer", "backend")  # keys whose value is the name of a class


class _Reference(NamedTuple):
    """The name of a mixer or backend, and the path of the key that holds it."""

    kind: str
    name: str
    path: str


def refuse_untrusted(data: Mapping[str, Any], source: object) -> None:
    """Check the plain data of a stack or of training settings before anything is built from it.

    Args: source: the file, for the error message.
    Raises: ConfigError: gives the key and the module.
    """
    for reference in (*_references(data, ()), *_references_in_pattern(data)):
        registry.refuse_untrusted(reference.kind, reference.name, f"{source}: {reference.path}")


def _references(data: object, path: KeyPath) -> Iterator[_Reference]:
    """Find the names under the keys `mixer` and `backend` at any depth."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key in _KINDS and isinstance(value, str):
                yield _Reference(key, value, join_path(path, key))
            yield from _references(value, (*path, str(key)))
    elif isinstance(data, list | tuple):
        for i, item in enumerate(data):
            yield from _references(item, (*path, str(i)))


def _references_in_pattern(data: Mapping[str, Any]) -> Iterator[_Reference]:
    """Find the mixers that the pattern of a stack names, and the names in the fields that it changes."""
    pattern, layers = data.get("pattern"), data.get("layers")
    if not isinstance(pattern, str):
        return
    try:
        term = parse(pattern)
    except PatternError:
        return  # StackSpec parses the pattern again and reports the error
    for layer in names(term):
        if not isinstance(layers, Mapping) or layer.name not in layers:
            yield _Reference("mixer", layer.name, "pattern")
        yield from _references(dict(layer.fields), ("pattern", layer.name))
