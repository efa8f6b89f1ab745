"""Sphinx extension: `.. public:: PACKAGE` documents every public name of a package.

A name that several packages export is documented once, under the first of PACKAGES. Without the option
`:kind: mixers` the mixers are left out, and with it all else.
"""

import importlib
import inspect
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from deltazoo.mixers import MixerConfig

PACKAGES = ["deltazoo", "deltazoo.backends", "deltazoo.mixers", "deltazoo.mixers.parts", "deltazoo.blocks"]
PACKAGES += ["deltazoo.integrations.transformers"]


def public_names(package: ModuleType) -> list[str]:
    """Return the public names of a package: `__all__`, or else `dir()`."""
    names = getattr(package, "__all__", None) or dir(package)
    return sorted({name for name in names if not name.startswith("_")}, key=str.lower)


def is_registered_mixer(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, MixerConfig) and not inspect.isabstract(value)


class Public(SphinxDirective):
    """`.. public:: deltazoo.mixers` with the option `kind`."""

    required_arguments = 1
    option_spec = {"kind": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        package = importlib.import_module(self.arguments[0])
        kind = self.options.get("kind", "other")
        earlier = [importlib.import_module(name) for name in PACKAGES[: PACKAGES.index(package.__name__)]]
        documented = {name: other.__name__ for other in reversed(earlier) for name in public_names(other)}
        lines: list[str] = []
        elsewhere: list[str] = []
        for name in public_names(package):
            value = getattr(package, name)
            mixer = is_registered_mixer(value)
            if inspect.ismodule(value) or mixer != (kind == "mixers"):
                continue
            if name in documented and getattr(importlib.import_module(documented[name]), name) is value:
                elsewhere.append(f"{documented[name]}.{name}")
            else:
                lines += _entry(package.__name__, name, value)
        if elsewhere:
            links = ", ".join(f":py:obj:`~{name}`" for name in elsewhere)
            lines = [f"Also here: {links}.", "", *lines]
        return self.parse_text_to_nodes_rst(lines)

    def parse_text_to_nodes_rst(self, lines: list[str]) -> list[nodes.Node]:
        node = nodes.Element()
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), self.content_offset, node)
        return node.children


def _entry(package: str, name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        if value.__module__ == "builtins":
            return []
        members = [] if is_registered_mixer(value) or issubclass(value, Exception) else ["   :members:"]
        return [f".. autoclass:: {package}.{name}", *members, ""]
    if callable(value):
        return [f".. autofunction:: {package}.{name}", ""]
    return [f".. autodata:: {package}.{name}", ""]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("public", Public)
    return {"parallel_read_safe": True}
