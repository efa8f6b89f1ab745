"""A stack from a file or preset and changes to it, or from the changes alone."""

from collections.abc import Mapping
from typing import Any

from deltazoo.backends.errors import ConfigError
from deltazoo.blocks.spec import StackSpec


def assemble(source: str | None = None, changes: Mapping[str, Any] | None = None, trust: bool = False) -> StackSpec:
    """Load a stack and change fields of it; without a source the fields must say it all.

    Args:
        source: a file or a preset.
        changes: fields of `StackSpec` to replace; those that are None stay as they are.
        trust: as for `StackSpec.load`.
    Raises: ConfigError; PatternError; UnknownNameError.
    """
    given = {field: value for field, value in (changes or {}).items() if value is not None}
    if source is not None:
        spec = StackSpec.load(source, trust)
        return StackSpec(**spec.model_dump(mode="json") | given) if given else spec
    missing = [field for field, info in StackSpec.model_fields.items() if info.is_required() and field not in given]
    if missing:
        raise ConfigError(f"a stack without a file or preset needs {', '.join(missing)} too, got {given}")
    return StackSpec(**given)
