"""Sphinx extension: `.. cli-reference::` lists every command with its arguments and options, from the commands."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from deltazoo.cli import app as commands


def escape(text: str) -> str:
    return re.sub(r"([\\*`_|<>])", r"\\\1", " ".join(text.split()))


def reference() -> Iterator[str]:
    """Yield reStructuredText: a section for each command."""
    group: Any = typer.main.get_command(commands)
    for name, command in sorted(group.commands.items()):
        yield from ("", name, "-" * len(name), "")
        yield from (f".. code-block:: console\n\n   $ {_usage(name, command)}", "")
        for paragraph in (command.help or "").split("\n\n"):
            yield from (*_paragraph(paragraph), "")
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                yield _parameter(parameter)
        yield ""


def _paragraph(text: str) -> Iterator[str]:
    """Yield a paragraph of a help text; one that begins with \\b keeps its lines."""
    if not text.startswith("\b\n"):
        yield escape(text)
        return
    for line in text.splitlines()[1:]:
        indent = len(line) - len(line.lstrip())
        yield f"| {' ' * indent}{escape(line)}"


def _usage(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = [f"{p.name.upper()}" if p.required else f"[{p.name.upper()}]" for p in arguments]
    return " ".join(["deltazoo", name, *words, "[OPTIONS]"])


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"``{parameter.name.upper()}``"
    else:
        names = ", ".join(f"``{name}``" for name in [*parameter.opts, *parameter.secondary_opts])
    shown = parameter.show_default if isinstance(getattr(parameter, "show_default", None), str) else parameter.default
    flag = getattr(parameter, "is_flag", False)
    shown = repr(shown) if isinstance(shown, str) and shown != shown.strip() else shown
    default = "" if shown is None or flag or parameter.required or callable(shown) else f" Default: ``{shown}``."
    return f"- {names}: {escape(parameter.help or '')}{default}"


class CliReference(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        node = nodes.section()
        node.document = self.state.document
        lines = StringList("\n".join(reference()).splitlines(), source="deltazoo.cli")
        self.state.nested_parse(lines, 0, node, match_titles=True)
        return node.children


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("cli-reference", CliReference)
    return {"parallel_read_safe": True}
