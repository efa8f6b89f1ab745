"""JSON text to objects, with errors that name the place of the text."""

import json
from typing import Any

from deltazoo.backends.io.errors import ConfigError, cut


def json_object(text: str, place: object) -> dict[str, Any]:
    """Parse a JSON object. Args: place: the file or line, for errors. Raises: ConfigError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{place} must be a JSON object, got {cut(found)}")
    return found
