"""The linear maps of a mixer's input that its parts declare, which a decode step computes together."""

from collections.abc import Mapping

from torch import nn

from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.mixers.core.part import MappedOutputPart, MapsInput, StatelessOutputPart


def mapped_classes(parts: Mapping[str, nn.Module]) -> dict[str, type]:
    """Return the classes of the parts for which a mixer may compute the `input_map`. Dynamo cannot trace this.

    A subclass that overrides a method which reads the product must declare its map again.
    """
    return {name: type(part) for name, part in parts.items() if _maps_input(part)}


def input_maps(parts: Mapping[str, nn.Module], classes: Mapping[str, type]) -> dict[str, nn.Module]:
    """Return the maps of the parts that still have the classes of `mapped_classes`, and no hooks."""
    return {
        name: part.input_map()
        for name, part in parts.items()
        if isinstance(part, MapsInput) and type(part) is classes.get(name) and is_plain(part)
    }


def _maps_input(part: nn.Module) -> bool:
    if not isinstance(part, MapsInput):
        return False
    if isinstance(part, MappedOutputPart):
        if _owner(part, "forward") is not StatelessOutputPart or _owner(part, "transform") is not MappedOutputPart:
            return False
        return _owner(part, "transform_by") is _owner(part, "input_map")
    return _owner(part, "forward") is _owner(part, "input_map")


def _owner(part: nn.Module, method: str) -> type:
    """Return the class that defines a method of a part."""
    return next(c for c in type(part).__mro__ if method in vars(c))
