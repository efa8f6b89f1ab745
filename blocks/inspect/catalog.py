"""The catalog: every installed mixer, backend and preset, plug-ins included."""

import inspect
import itertools
import re

from pydantic import BaseModel

from deltazoo.backends import registry
from deltazoo.backends.errors import DeltazooError
from deltazoo.backends.registry import resolve
from deltazoo.backends.spec import UpdateSpec
from deltazoo.blocks import presets
from deltazoo.blocks.spec import preset
from deltazoo.mixers.core.config import config_class


class MixerEntry(BaseModel):
    """A mixer with default fields.

    Args: spec: the fields that differ from UpdateSpec's defaults; problem: why the mixer cannot be loaded.
    """

    name: str
    equation: str = ""
    spec: str = ""
    source: str = ""
    owner: str = ""
    problem: str | None = None

    @property
    def recurrence(self) -> str:
        """The first formula of the equation, short enough for one line.

        In the recurrence of a state, S is the state before token t and S' the state after it, and the index t is
        omitted except for the decay: d_t depends on the token, d does not.
        """
        formula = re.split(r"; |   \(|\n", self.equation)[0]
        if not re.fullmatch(r"S_t = [^,]*", formula):
            return formula
        return re.sub(r"(?<!\bd)_t\b", "", formula.replace("S_t", "S'", 1).replace("S_(t-1)", "S"))


class BackendEntry(BaseModel):
    """A backend.

    Args: about: the first line of its docstring; problem: why the backend cannot be loaded.
    """

    name: str
    about: str = ""
    owner: str = ""
    problem: str | None = None


class PresetEntry(BaseModel):
    """A preset.

    Args: about: the first sentence of the comment in its file.
    """

    name: str
    pattern: str = ""
    width: int = 0
    depth: int = 0
    about: str = ""


class Catalog(BaseModel):
    """Everything that is installed."""

    mixers: list[MixerEntry]
    backends: list[BackendEntry]
    presets: list[PresetEntry]


def catalog() -> Catalog:
    """List everything that is installed. A mixer or backend that cannot be loaded is listed with its problem."""
    return Catalog(
        mixers=[_mixer_entry(name) for name in registry.names(registry.MIXERS)],
        backends=[_backend_entry(name) for name in registry.names(registry.BACKENDS)],
        presets=[_preset_entry(name) for name in presets.names()],
    )


def first_doc_line(instance: object) -> str:
    """Return the first line of the docstring of an object's class."""
    return (inspect.getdoc(type(instance)) or "").partition("\n")[0]


def changed_fields(spec: UpdateSpec | None) -> str:
    """Format the fields that differ from UpdateSpec's defaults."""
    if spec is None:
        return ""
    return " ".join(f"{name}={value}" for name, value in spec.changed_fields().items()) or "the delta rule"


def preset_about(name: str) -> str:
    """Return the first sentence of the comment in the file of a preset."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), presets.text(name).splitlines())
    return " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".") + "."


def _mixer_entry(name: str) -> MixerEntry:
    owner = registry.owner(registry.MIXERS, name)
    try:
        config_type = config_class(name)
        config = config_type()
        fields = changed_fields(config.spec())
        return MixerEntry(name=name, equation=config.equation(), spec=fields, source=config_type.source, owner=owner)
    except Exception as error:  # plug-ins may raise anything
        return MixerEntry(name=name, owner=owner, problem=_message(error))


def _backend_entry(name: str) -> BackendEntry:
    owner = registry.owner(registry.BACKENDS, name)
    try:
        return BackendEntry(name=name, about=first_doc_line(resolve(name)), owner=owner)
    except Exception as error:  # plug-ins may raise anything
        return BackendEntry(name=name, owner=owner, problem=_message(error))


def _preset_entry(name: str) -> PresetEntry:
    spec = preset(name)
    return PresetEntry(
        name=name, pattern=str(spec.pattern), width=spec.width, depth=spec.depth, about=preset_about(name)
    )


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, DeltazooError) else f"{type(error).__name__}: {error}"
