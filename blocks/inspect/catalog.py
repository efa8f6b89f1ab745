"""The catalog: every installed mixer, backend and preset, plug-ins included."""

import inspect
import itertools
import re
from collections.abc import Callable, Container, Iterable
from typing import TypeVar

import torch
from pydantic import BaseModel

from deltazoo.backends.io.errors import DeltazooError
from deltazoo.backends.update import registry
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.blocks.inspect.describe import parameter_count
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.spec import presets
from deltazoo.blocks.spec.stack_spec import StackSpec, preset
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.mixer import Place

KINDS = ("mixers", "backends", "presets")
_E = TypeVar("_E")


class MixerEntry(BaseModel):
    """A mixer with default fields.

    Args:
        family, purpose: from the class of its config; "" if a plug-in does not define them.
        year: of the first paper in `source`; None if it names none.
        about: the first paragraph of the docstring, in most cases the whole mixer's equation.
        equation: that of the update; spec: the fields that differ from UpdateSpec's defaults.
        problem: why the mixer cannot be loaded.
    """

    name: str
    family: str = ""
    year: int | None = None
    purpose: str = ""
    about: str = ""
    equation: str = ""
    spec: str = ""
    source: str = ""
    owner: str = ""
    problem: str | None = None


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

    Args: about: the first sentence of the comment in its file; source: the paper that the comment cites, if any.
    """

    name: str
    parameters: int = 0
    pattern: str = ""
    width: int = 0
    depth: int = 0
    about: str = ""
    source: str = ""


class Catalog(BaseModel):
    """Everything that is installed, sorted by name."""

    mixers: list[MixerEntry]
    backends: list[BackendEntry]
    presets: list[PresetEntry]

    def families(self) -> dict[str, list[MixerEntry]]:
        """Return the mixers of each family, oldest first; the families in the order of their oldest mixer."""
        return _grouped(sorted(self.mixers, key=_age), lambda entry: entry.family)

    def sources(self) -> dict[str, list[PresetEntry]]:
        """Return the presets of each source, oldest first, and last those without one: small models of bytes."""
        return _grouped(sorted(self.presets, key=_age), lambda entry: entry.source)

    def search(self, text: str) -> "Catalog":
        """Return the entries in which every word of a text occurs, in any field and in upper or lower case."""
        words = text.lower().split()

        def matches(entry: BaseModel) -> bool:
            fields = " ".join(str(value) for value in entry.model_dump(exclude={"owner"}).values()).lower()
            return all(word in fields for word in words)

        return Catalog(**{kind: [entry for entry in entries if matches(entry)] for kind, entries in self})


def catalog(kinds: Container[str] = KINDS) -> Catalog:
    """List the installed entries of some kinds. One that cannot be loaded is listed with its problem."""
    return Catalog(
        mixers=[_mixer_entry(name) for name in registry.names(registry.MIXERS) if "mixers" in kinds],
        backends=[_backend_entry(name) for name in registry.names(registry.BACKENDS) if "backends" in kinds],
        presets=[_preset_entry(name) for name in presets.names() if "presets" in kinds],
    )


def year(source: str) -> int | None:
    """Return the year of the first paper in a source: "Peng 2021, ...", or that of an arXiv number, 2110.02488."""
    match = re.search(r"\b(?:(\d\d)(?:0[1-9]|1[0-2])\.\d{4,5}|((?:19|20)\d\d))\b(?!\.\d)", source)
    if match is None:
        return None
    return int(match[2]) if match[1] is None else 2000 + int(match[1])


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
    return _comment(name).partition(". ")[0].rstrip(".") + "."


def _comment(name: str) -> str:
    lines = itertools.takewhile(lambda line: line.startswith("#"), presets.text(name).splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def _mixer_entry(name: str) -> MixerEntry:
    owner = registry.owner(registry.MIXERS, name)
    try:
        config_type = config_class(name)
        config = config_type()
        source = config_type.source
        return MixerEntry(
            name=name, family=config_type.family, year=year(source), purpose=config_type.purpose,
            about=" ".join((inspect.getdoc(config_type) or "").partition("\n\n")[0].split()),
            equation=config.equation(), spec=changed_fields(config.spec()), source=source, owner=owner,
        )  # fmt: skip
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
    cited = re.search(r"\(([^()]*?\b20\d\d(?:, arXiv [\d.]+)?)\b[^()]*\)", _comment(name))
    return PresetEntry(
        name=name, parameters=_parameters(spec), pattern=str(spec.pattern), width=spec.width, depth=spec.depth,
        about=preset_about(name), source="" if cited is None else cited[1],
    )  # fmt: skip


def _parameters(spec: StackSpec) -> int:
    """Count the parameters of a model; of equal layers only one is built, apart from the first layer."""
    counts: dict[tuple[LayerSpec, bool], int] = {}
    shared: set[str] = set()
    total = (1 if spec.tied else 2) * spec.vocab * spec.width + spec.width  # embedding, head and last norm
    with torch.device("meta"):
        for i, layer in enumerate(spec.expand()):
            if layer.share in shared:
                continue
            if layer.share is not None:
                shared.add(layer.share)
            if (layer, i == 0) not in counts:  # a first layer may have other parameters, as in RWKV-7
                counts[layer, i == 0] = parameter_count(layer.build(spec.width, Place(i, spec.depth)))
            total += counts[layer, i == 0]
    return total


def _age(entry: MixerEntry | PresetEntry) -> tuple[bool, int, str]:
    first = year(entry.source)
    return first is None, first or 0, entry.name


def _grouped(entries: Iterable[_E], key: Callable[[_E], str]) -> dict[str, list[_E]]:
    groups: dict[str, list[_E]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return {name: groups[name] for name in sorted(groups, key=lambda name: not name)}  # without a name: last


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, DeltazooError) else f"{type(error).__name__}: {error}"
