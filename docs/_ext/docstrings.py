"""Sphinx extension: turn this project's docstrings into reStructuredText, and list the fields of pydantic models.

A docstring is plain text with `code` in single backticks, indented equations, and the sections of
SECTION. Plain text such as k_t or S_{t-1} has a meaning in reStructuredText, so all of it is escaped. Indented lines
that are equations, and the equation that begins the docstring of a mixer, become mathematics.
"""

import inspect
import re
from typing import Any

import math_text
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sphinx.application import Sphinx

from deltazoo.mixers import MixerConfig

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Source|State|Yields|Shape|Shapes|Note)s?:\s*(.*)$")
ENTRY = re.compile(r"^\*{0,2}([A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*): (.*)$")


def escape(text: str) -> str:
    """Escape text outside backticks; `code` becomes a literal."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"``{piece[1:-1]}``" + ("\\ " if i + 1 < len(pieces) and pieces[i + 1][:1].isalnum() else "")
        if piece.startswith("`")
        else re.sub(r"([\\*`_|<>])", r"\\\1", piece)
        for i, piece in enumerate(pieces)
    )


def convert(lines: list[str]) -> list[str]:
    """Return a docstring as reStructuredText."""
    out: list[str] = []
    i = 0
    while i < len(lines):
        match = SECTION.match(lines[i])
        if match:
            body = [] if not match[2] else [match[2]]
            i += 1
            while i < len(lines) and (not lines[i].strip() or lines[i].startswith("    ")):
                body.append(lines[i][4:])
                i += 1
            out += _section(match[1], body)
        else:
            block = []
            while i < len(lines) and not SECTION.match(lines[i]):
                block.append(lines[i])
                i += 1
            out += _text(block)
    return out


def _section(title: str, body: list[str]) -> list[str]:
    """Format a section as a paragraph, or as a list if its lines are `name: text`, with indented continuations."""
    while body and not body[-1].strip():
        body.pop()
    entries: list[list[str]] = []
    for line in body:
        if ENTRY.match(line) or not entries or not line.startswith("    "):
            entries.append([line])
        else:
            entries[-1].append(line.strip())
    named = all(ENTRY.match(entry[0]) for entry in entries) and title in ("Args", "Attributes", "Raises", "Returns")
    if not named or not entries:
        return ["", f".. rubric:: {title}", "", *_text(inspect.cleandoc("\n".join(body)).splitlines()), ""]
    out = ["", f".. rubric:: {title}", ""]
    for entry in entries:
        match = ENTRY.match(entry[0])
        assert match
        names = ", ".join(f"``{name}``" for name in match[1].split(", "))
        out.append(f"- {names}: {escape(' '.join([match[2], *entry[1:]]))}")
    return [*out, ""]


def _text(lines: list[str]) -> list[str]:
    """Escape paragraphs; indented blocks become literal blocks; lines that start with "- " become a list."""
    out: list[str] = []
    i = 0
    while i < len(lines):
        if lines[i].startswith("    "):
            block = []
            while i < len(lines) and (lines[i].startswith("    ") or not lines[i].strip()):
                block.append(lines[i])
                i += 1
            while not block[-1].strip():
                block.pop()
            rows = math_text.block([line for line in block if line.strip()], strict=True)
            out += _math(rows) if rows else ["", ".. code-block:: text", "", *("    " + line for line in block), ""]
        elif re.match(r"^(-|\d+\.) ", lines[i]):
            if out and out[-1].strip() and not re.match(r"^(-|\d+\.|  ) ?", out[-1]):
                out.append("")
            head, _, rest = lines[i].partition(" ")
            out.append(f"{head} {escape(rest)}")
            i += 1
        elif lines[i].startswith("  "):
            out.append("  " + escape(lines[i].strip()))
            i += 1
        else:
            out.append(escape(lines[i]))
            i += 1
    return out


def _math(rows: list[str]) -> list[str]:
    return ["", ".. math::", "", *("    " + row for row in rows), ""]


def convert_mixer(lines: list[str], source: str) -> list[str]:
    """Return the docstring of a mixer, which begins with its equation, and its source."""
    end = next((i for i, line in enumerate(lines) if not line.strip()), len(lines))
    rows = math_text.block([" ".join(line.strip() for line in lines[:end])])
    body = convert(lines) if rows is None else [*_math(rows), *convert(lines[end:])]
    return [*body, "", f"Source: {escape(source)}.", ""]


def fields_of(model: type[BaseModel]) -> list[str]:
    """Return a list of a model's fields: name, default and description, inherited fields included."""
    rows = [_field(name, info) for name, info in model.model_fields.items() if name != "version"]
    return ["", ".. rubric:: Fields", "", *rows, ""] if rows else []


def _field(name: str, info: FieldInfo) -> str:
    if info.is_required():
        default = "required"
    elif info.default_factory is not None:
        default = f"default ``{info.get_default(call_default_factory=True)!r}``"  # type: ignore[call-arg]
    else:
        default = f"default ``{info.default!r}``"
    description = f": {escape(info.description)}" if info.description else ""
    return f"- ``{name}`` ({default}){description}"


def process_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    is_mixer = inspect.isclass(obj) and issubclass(obj, MixerConfig) and hasattr(obj, "source")
    lines[:] = convert_mixer(lines, obj.source) if is_mixer else convert(lines)
    if inspect.isclass(obj) and issubclass(obj, BaseModel):
        lines += fields_of(obj)
    lines.append("")


def process_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Drop the signature of a pydantic model, whose fields are listed; shorten types and defaults of others."""
    if inspect.isclass(obj) and issubclass(obj, BaseModel):
        return "", None
    if signature is None:
        return None
    signature = re.sub(r"~(?:\w+\.)+", "", signature)
    return re.sub(r"<built-in method (\w+) of type object>", r"torch.\1", signature), returns


def skip_member(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Skip the machinery of pydantic, and fields of tuples, which the docstring of the class describes."""
    field_of_tuple = type(obj).__name__ == "_tuplegetter"
    return True if field_of_tuple or name.startswith("model_") or name in PYDANTIC else None


PYDANTIC = set(dir(BaseModel)) | {"validated"}


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-skip-member", skip_member)
    return {"parallel_read_safe": True}
