"""JSON Schema of stack files with every installed mixer, for completion and validation in editors."""

from typing import Any

from pydantic import BaseModel

from deltazoo.backends.update import registry
from deltazoo.mixers.core import config as configs

# A mixer that is not registered is named "module:Class"; the schema cannot list its fields.
_UNREGISTERED_MIXER = {
    "type": "object",
    "properties": {"mixer": {"type": "string", "pattern": ":"}},
    "required": ["mixer"],
}


def with_mixers(stack: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a stack config with the installed mixers in place of the abstract MixerConfig.

    Returns: a schema of draft 2020-12. A mixer that cannot be loaded is omitted.
    """
    schema = stack.model_json_schema()
    definitions = schema["$defs"]
    references = []
    for name in registry.names(registry.MIXERS):
        try:
            mixer = configs.config_class(name).model_json_schema()
        except Exception:  # plug-ins may raise anything
            continue
        definitions |= mixer.pop("$defs", {})
        mixer["properties"] = {"mixer": {"const": name}, **mixer["properties"]}
        mixer["required"] = ["mixer", *mixer.get("required", [])]
        definitions[name] = mixer
        references.append({"$ref": f"#/$defs/{name}"})
    definitions["MixerConfig"] = {"anyOf": [*references, _UNREGISTERED_MIXER]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
