"""What is installed, and what one of it is: mixers, backends and presets, plug-ins among them."""

import inspect
import itertools

from pydantic import BaseModel

from deltazoo.backends import registry
from deltazoo.backends.errors import DeltazooError
from deltazoo.backends.registry import resolve
from deltazoo.backends.spec import UpdateSpec
from deltazoo.blocks import presets
from deltazoo.blocks.spec import StackSpec
from deltazoo.mixers.core.config import config_class


class MixerEntry(BaseModel):
    """A mixer with its defaults. spec: the axes that differ from UpdateSpec's; problem: why it cannot be loaded."""

    name: str
    equation: str = ""
    spec: str = ""
    source: str = ""
    owner: str = ""
    problem: str | None = None


class BackendEntry(BaseModel):
    """A backend. about: the first line of its docstring; problem: why it cannot be loaded."""

    name: str
    about: str = ""
    owner: str = ""
    problem: str | None = None


class PresetEntry(BaseModel):
    """A preset. about: the first sentence of its file."""

    name: str
    pattern: str = ""
    width: int = 0
    depth: int = 0
    about: str = ""


class Catalog(BaseModel):
    """All that is installed."""

    mixers: list[MixerEntry]
    backends: list[BackendEntry]
    presets: list[PresetEntry]


def catalog() -> Catalog:
    """List all that is installed; what cannot be loaded is listed with its problem."""
    return Catalog(
        mixers=[_mixer_entry(name) for name in registry.names(registry.MIXERS)],
        backends=[_backend_entry(name) for name in registry.names(registry.BACKENDS)],
        presets=[_preset_entry(name) for name in presets.names()],
    )


def about(found: object) -> str:
    """The first line of what an object's class says of itself."""
    return (inspect.getdoc(type(found)) or "").partition("\n")[0]


def _mixer_entry(name: str) -> MixerEntry:
    owner = registry.owner(registry.MIXERS, name)
    try:
        kind = config_class(name)
        config = kind()
        spec = config.spec()
        return MixerEntry(name=name, equation=config.equation(), spec=_axes(spec), source=kind.source, owner=owner)
    except Exception as error:  # a broken plug-in is listed as broken
        return MixerEntry(name=name, owner=owner, problem=_sentence(error))


def _backend_entry(name: str) -> BackendEntry:
    owner = registry.owner(registry.BACKENDS, name)
    try:
        return BackendEntry(name=name, about=about(resolve(name)), owner=owner)
    except Exception as error:
        return BackendEntry(name=name, owner=owner, problem=_sentence(error))


def _preset_entry(name: str) -> PresetEntry:
    spec = StackSpec.load(name)
    comment = itertools.takewhile(lambda line: line.startswith("#"), presets.text(name).splitlines())
    sentence = " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".") + "."
    return PresetEntry(name=name, pattern=str(spec.pattern), width=spec.width, depth=spec.depth, about=sentence)


def _axes(spec: UpdateSpec | None) -> str:
    """The axes that are not UpdateSpec's defaults."""
    if spec is None:
        return ""
    other = {name: value for name, value in spec if value != UpdateSpec.model_fields[name].default}
    return " ".join(f"{name}={value}" for name, value in other.items()) or "the delta rule"


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, DeltazooError) else f"{type(error).__name__}: {error}"
