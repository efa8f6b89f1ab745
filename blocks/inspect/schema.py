"""The JSON Schema of model files, with every mixer that is installed, for editors that complete and check."""

from typing import Any

from pydantic import BaseModel

from deltazoo.backends import registry
from deltazoo.backends.errors import DuplicateNameError, PluginError
from deltazoo.mixers.core import config as configs

# A mixer that is not installed is named by "module:Class"; its fields are its own.
_BY_PATH = {"type": "object", "properties": {"mixer": {"type": "string", "pattern": ":"}}, "required": ["mixer"]}


def with_mixers(stack: type[BaseModel]) -> dict[str, Any]:
    """Put the installed mixers where the schema of StackSpec says "a mixer config".

    Returns: a schema of draft 2020-12. A mixer that cannot be loaded is left out.
    """
    schema = stack.model_json_schema()
    definitions = schema["$defs"]
    mixers = []
    for name in registry.names(registry.MIXERS):
        try:
            mixer = configs.config_class(name).model_json_schema()
        except (PluginError, DuplicateNameError):
            continue
        definitions |= mixer.pop("$defs", {})
        mixer["properties"] = {"mixer": {"const": name}, **mixer["properties"]}
        mixer["required"] = ["mixer", *mixer.get("required", [])]
        definitions[name] = mixer
        mixers.append({"$ref": f"#/$defs/{name}"})
    definitions["MixerConfig"] = {"anyOf": [*mixers, _BY_PATH]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
