"""YAML 1.2 text to plain data, and back.

PyYAML implements YAML 1.1. This loader follows 1.2: only true and false are booleans (`off` is a string), 1e-5 is
a number, 010 is ten. A repeated key is an error. Aliases (`*name`) repeat an anchored value, so a few nested ones
describe more values than memory holds; the number of values is limited.
"""

import io
import re
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import yaml

from deltazoo.backends.io.errors import ConfigError, cut

MAX_VALUES, MAX_LEVELS = 10_000, 50
LINE = 120  # columns of written text


def load(text: str) -> Any:
    """Parse any YAML value.

    Raises: ConfigError: a key is repeated or no name, a tag is unknown, or there are too many or too deep values;
        yaml.YAMLError; RecursionError; ValueError: an integer has too many digits.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        size = _size(node, {})
        if size.values > MAX_VALUES:
            raise ConfigError(f"there must be at most {MAX_VALUES:,} values, aliases expanded, got {size.values:,}")
        if size.levels > MAX_LEVELS:
            raise ConfigError(f"values must be nested at most {MAX_LEVELS} levels deep, got {size.levels}")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def dump(data: Mapping[str, Any], width: int = LINE) -> str:
    """Format a mapping with one entry per line; a value without a mapping inside is on one line if it fits.

    Args: width: columns; a longer text is broken at spaces, if it has any.
    """
    node = _node(data)
    _set_styles(node, 0, width)
    assert isinstance(node, yaml.MappingNode)
    node.flow_style = False
    # PyYAML breaks a long text after the word that crosses the width
    return yaml.serialize(node, Dumper=_Dumper, width=max(20, width - 20), allow_unicode=True)


def dump_inline(value: Any) -> str:
    """Format any value on one line: null, 1.0e-05 or {mixer: kda, heads: 2}."""
    return _inline(_node(value))


def _node(value: Any) -> yaml.Node:
    return _Dumper(io.StringIO(), sort_keys=False).represent_data(value)


def _inline(node: yaml.Node) -> str:
    if isinstance(node, yaml.CollectionNode):
        node.flow_style = True
    text: str = yaml.serialize(node, Dumper=_Dumper, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()  # the end mark of a document that is a scalar


def _set_styles(node: yaml.Node, start: int, width: int) -> None:
    """Choose one line, or a line per entry, for each list and mapping. Args: start: columns before the node."""
    if not isinstance(node, yaml.CollectionNode):
        return
    indent = 2 * (start > 0)
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, item) for item in node.value]
    for key, value in pairs:
        _set_styles(value, indent + (2 if key is None else len(key.value) + 2), width)
    # an inner mapping, or a long list, needs lines of its own
    node.flow_style = all(
        isinstance(value, yaml.ScalarNode) or (isinstance(value, yaml.SequenceNode) and value.flow_style)
        for _, value in pairs
    )
    node.flow_style = node.flow_style and start + len(_inline(node)) <= width


class _Size(NamedTuple):
    """Number of values in a node and levels below it, with every alias expanded."""

    values: int = 1
    levels: int = 0


def _size(node: yaml.Node, known: dict[int, _Size | None]) -> _Size:
    """Measure a node. known: the sizes of measured nodes by id; None while a node is measured."""
    if not isinstance(node, yaml.CollectionNode):
        return _Size()
    if id(node) not in known:
        known[id(node)] = None
        items = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        sizes = [_size(item, known) for item in items]
        known[id(node)] = _Size(1 + sum(x.values for x in sizes), 1 + max((x.levels for x in sizes), default=0))
    size = known[id(node)]
    if size is None:
        raise ConfigError(f"a value must not contain itself, as that in line {node.start_mark.line + 1} does")
    return size


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalar types of YAML 1.2, which refuses repeated keys."""

    level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.level > MAX_LEVELS:
            raise ConfigError(f"values must be nested at most {MAX_LEVELS} levels deep, got more")
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"a key must be a name, got a list or a mapping in line {line}")
            if key.value in keys:
                raise ConfigError(f"the key {cut(key.value)} is repeated in line {line}")
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _refuse_tag(_: _Loader, node: yaml.Node) -> None:
    raise ConfigError(f"a value must not have a tag, got {cut(node.tag)} in line {node.start_mark.line + 1}")


_Loader.add_constructor(None, _refuse_tag)
_YAML_1_1_TYPES = ("bool", "int", "float", "timestamp")

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.split(":")[-1] not in _YAML_1_1_TYPES]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^([-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: _integer(node.value))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+\.\d*|\d+(?=[eE]))([eE][-+]?\d+)?$"), list("-+.0123456789")
)


def _integer(text: str) -> int:
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper without aliases, which quotes the strings that version 1.1 or 1.2 reads as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_RESOLVERS = (yaml.SafeDumper.yaml_implicit_resolvers, _Loader.yaml_implicit_resolvers)
_Dumper.yaml_implicit_resolvers = {
    first: [resolver for resolvers in _RESOLVERS for resolver in resolvers.get(first, [])]
    for first in {*_RESOLVERS[0], *_RESOLVERS[1]}
}
