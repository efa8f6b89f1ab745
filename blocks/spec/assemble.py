"""Assembly of a stack from a file or preset and changed fields, or from fields only."""

from collections.abc import Mapping, Sequence
from typing import Any

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.data.text import BYTES
from deltazoo.blocks.spec.overrides import override
from deltazoo.blocks.spec.stack_spec import StackSpec


def assemble(
    source: str | None = None,
    changes: Mapping[str, Any] | None = None,
    trust: bool = False,
    settings: Sequence[str] = (),
) -> StackSpec:
    """Load a stack and change some of its fields. Without a source, `changes` must set the pattern, width and depth.

    Args:
        source: a file or the name of a preset.
        changes: fields of `StackSpec` to replace; fields that are None stay as they are. Without a source, the
            vocabulary is by default the 256 bytes.
        trust: as for `StackSpec.load`; `changes` and `settings` need no trust.
        settings: "path=value" for fields at any depth, applied after `changes`; see `deltazoo.blocks.spec.overrides`.
    Raises: ConfigError; PatternError; UnknownNameError.
    """
    fields = {field: value for field, value in (changes or {}).items() if value is not None}
    if source is not None:
        spec = StackSpec.load(source, trust)
        if not fields and not settings:
            return spec
        return StackSpec(**override(spec.model_dump(mode="json") | fields, settings))
    needed = [name for name, info in StackSpec.model_fields.items() if info.is_required() and name != "vocab"]
    if not fields.keys() >= {*needed}:
        given = ", ".join(name for name in needed if name in fields) or "none of them"
        raise ConfigError(f"a stack without a file or preset needs {', '.join(needed)}, got {given}")
    spec = StackSpec(**{"vocab": BYTES} | fields)
    return StackSpec(**override(spec.model_dump(mode="json"), settings)) if settings else spec
