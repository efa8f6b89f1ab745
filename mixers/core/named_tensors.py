"""Tensors by name, in a container whose tensors FSDP2 does not cast."""

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from torch.utils._pytree import MappingKey, register_pytree_node


class NamedTensors(Mapping[str, Any]):
    """Read-only dict of tensors, or of trees of tensors, such as the state of a mixer.

    FSDP2 with mixed precision casts the floating-point tensors among the arguments of a module to the dtype of its
    parameters: those in tuples, lists, dicts and dataclasses. It passes an instance of any other class as it is. States
    and angles that are float32 beside 16-bit activations stay so in this class. For torch.utils._pytree it is a node.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    # The views of the dict itself, which torch.compile traces.

    def keys(self) -> KeysView[str]:
        return self._tensors.keys()

    def values(self) -> ValuesView[Any]:
        return self._tensors.values()

    def items(self) -> ItemsView[str, Any]:
        return self._tensors.items()

    def __repr__(self) -> str:
        return f"NamedTensors({self._tensors!r})"


register_pytree_node(
    NamedTensors,
    lambda tree: (list(tree.values()), list(tree.keys())),
    lambda values, names: NamedTensors(dict(zip(names, values, strict=True))),
    serialized_type_name="deltazoo.NamedTensors",  # for torch.export.save
    flatten_with_keys_fn=lambda tree: ([(MappingKey(name), value) for name, value in tree.items()], list(tree)),
)
