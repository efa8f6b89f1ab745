"""Details of one mixer, backend or stack: equation, fields, costs, and which backends compute it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from deltazoo.backends.io.errors import ConfigError, UnknownNameError
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import UpdateMeta
from deltazoo.backends.update.dispatch import bind_conv
from deltazoo.backends.update.explain import explain
from deltazoo.backends.update.papers import papers
from deltazoo.backends.update.registry import plugin_errors, resolve
from deltazoo.blocks.inspect.catalog import changed_fields, first_doc_line, preset_about
from deltazoo.blocks.inspect.describe import parameter_count
from deltazoo.blocks.inspect.explain_module import explain_module
from deltazoo.blocks.inspect.layer_table import Description
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.probes.records import cells, packaged
from deltazoo.blocks.spec import document, presets
from deltazoo.blocks.spec.stack_spec import StackSpec, preset
from deltazoo.mixers.core.config import config_class, dump_changed
from deltazoo.mixers.core.delta_mixer import DeltaMixer
from deltazoo.mixers.core.mixer import Mixer, MixerConfig
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.convolution import ShortConv

_WIDTH = 1024
_SHAPE = (4, 4096)  # B and T of the listed launches
_BYTES = 256  # vocabulary of the small presets


class FieldRow(BaseModel):
    """One field of a config."""

    name: str
    default: Any
    about: str


class BackendRow(BaseModel):
    """One backend: whether it is chosen for a mixer's update, and the reasons if it is not."""

    backend: str
    chosen: bool
    reasons: list[str]


class Details(BaseModel):
    """Details of a mixer, a backend or a stack.

    Args:
        about: equation, source and other text, by title. papers: those with the same update. presets: of published
            models with the mixer. spec: the fields that differ from UpdateSpec's defaults.
        fields: the fields of a mixer's config.
        cost: the costs of a mixer; the titles give the units.
        backends: for a mixer, which backend computes its update on the device, and why the others do not.
        plan: the kernels of a mixer's update on a named device, and their conditions.
        runs: the operators and launches of a mixer or stack on a named device.
        takes: for a backend, the reasons why it cannot compute each mixer's update at width 1024; [] if it can.
        stack: the fields of a stack that differ from their defaults, as in its file.
        description: the layers of a stack.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["mixer", "backend", "stack"]
    name: str
    owner: str
    about: dict[str, str] = {}
    fields: list[FieldRow] = []
    cost: dict[str, int] = {}
    backends: list[BackendRow] = []
    plan: str | None = None
    runs: str | None = None
    takes: dict[str, list[str]] = {}
    stack: dict[str, Any] | None = None
    description: Description | None = None


def details(
    name: str,
    width: int = _WIDTH,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust: bool = False,
    device_name: str | None = None,
) -> Details:
    """Return the details of a mixer, a backend, a preset or a stack file.

    Args:
        name: a registered name, "module:Class", the name of a preset, or a file.
        width: layer width for the costs of a mixer.
        device: device for which the backends are examined; it need not exist on this machine.
        dtype: dtype of the operands.
        trust: as for `StackSpec.load`.
        device_name: a known GPU such as "NVIDIA H200", for the kernels of a mixer or stack; it overrides `device`.
    Raises: UnknownNameError: gives the nearest name; ConfigError; PluginError.
    """
    mixers, backends = registry.names(registry.MIXERS), registry.names(registry.BACKENDS)
    if name in mixers:
        with plugin_errors(registry.MIXERS, name):
            return _mixer(name, width, device, dtype, device_name)
    if name in backends:
        with plugin_errors(registry.BACKENDS, name):
            return _backend(name, device, dtype)
    if name in presets.names() or name.endswith(document.SUFFIXES) or Path(name).is_dir():
        return _stack(name, trust, dtype, device_name)
    if ":" in name:
        loaded = registry.load(registry.MIXERS, name)
        if isinstance(loaded, type) and issubclass(loaded, MixerConfig):
            return _mixer(name, width, device, dtype, device_name)
        return _backend(name, device, dtype)
    raise UnknownNameError("mixer, backend or preset", name, [*mixers, *backends, *presets.names()])


def field_rows(config_type: type[MixerConfig]) -> list[FieldRow]:
    """Return the fields of a mixer's config; their defaults are plain data that a stack file may hold."""
    return [_field_row(name, info) for name, info in config_type.model_fields.items()]


def _mixer(name: str, width: int, device: str, dtype: torch.dtype, device_name: str | None) -> Details:
    if device_name is not None:
        device = "cuda"
    config_type = config_class(name)
    config = config_type()
    spec = config.spec()
    about = {"equation": config.equation(), "source": config_type.source}
    if spec is not None:
        about |= {"papers": "; ".join(papers(spec)) or "none known with this update"}
    if uses := _presets_with(name):
        about |= {"presets": ", ".join(uses)}
    if spec is not None:
        about |= {"spec": changed_fields(spec), "erased direction": f"eigenvalue {spec.spectrum()}"}
    mixer = _build_on_meta(config, width)
    about |= _convolution(mixer, device, dtype)
    cost = config.cost(width)
    explanation = None
    if spec is not None:
        explanation = explain(spec, _update_meta(mixer, device, dtype), device=device_name)
    verdicts = [] if explanation is None else explanation.verdicts
    if evidence := _evidence(name):
        about |= {"evidence": evidence}
    about |= _decode_step(mixer, device, dtype, next((v.backend for v in verdicts if v.chosen), None))
    return Details(
        kind="mixer",
        name=name,
        owner=_owner(registry.MIXERS, name),
        about=about,
        fields=field_rows(config_type),
        cost={
            "width": width,
            "parameters": parameter_count(mixer),
            "state, bytes per sequence": cost.state_bytes,
            "cache, bytes per token": cost.cache_bytes,
            "FLOPs per token, forward": cost.flops,
            "additional FLOPs per token for each token of context": cost.flops_context,
        },
        backends=[BackendRow(**verdict._asdict()) for verdict in verdicts],
        plan=None if explanation is None or device_name is None else explanation.plan,
        runs=None if device_name is None else _runs(lambda: config.build(width), dtype, device_name),
    )


def _runs(build: Callable[[], Mixer | LanguageModel], dtype: torch.dtype, device_name: str) -> str:
    with torch.device("meta"):
        module = build().to(dtype)
    return str(explain_module(module, _SHAPE, device_name))


def _backend(name: str, device: str, dtype: torch.dtype) -> Details:
    backend = resolve(name)
    takes: dict[str, list[str]] = {}
    for mixer in registry.names(registry.MIXERS):
        try:
            config = config_class(mixer)()
            spec = config.spec()
            if spec is not None:
                takes[mixer] = backend.unsupported(spec, _update_meta(_build_on_meta(config, _WIDTH), device, dtype))
        except Exception:  # plug-ins may raise anything; `details` of that mixer reports the error
            if registry.is_built_in(registry.MIXERS, mixer) and registry.is_built_in(registry.BACKENDS, name):
                raise
    about = {"about": first_doc_line(backend)}
    return Details(kind="backend", name=name, owner=_owner(registry.BACKENDS, name), about=about, takes=takes)


def _stack(name: str, trust: bool, dtype: torch.dtype, device_name: str | None) -> Details:
    spec = StackSpec.load(name, trust)
    runs = None if device_name is None else _runs(spec.build, dtype, device_name)
    about = {"about": preset_about(name)} if name in presets.names() else {}
    owner = "deltazoo" if name in presets.names() else name
    return Details(
        kind="stack", name=name, owner=owner, about=about, stack=spec.changed_fields(), description=spec.describe(),
        runs=runs,
    )  # fmt: skip


def _presets_with(mixer: str) -> list[str]:
    """Return the presets of published models that contain a mixer; the models of bytes are made for tests."""
    return [name for name, mixers in _mixers_of_presets().items() if mixer in mixers]


def _evidence(mixer: str) -> str:
    """List the scores of a mixer in the packaged runs, those with changed fields included."""
    found = [cell for cell in cells(packaged()).values() if cell.mixer.partition("(")[0] == mixer]
    return ";  ".join(f"{cell.task} {cell.text()} %" + cell.mixer.removeprefix(mixer) for cell in found)


@cache
def _mixers_of_presets() -> dict[str, frozenset[str]]:
    """Return the names of the mixers in each preset of a published model: parsing all presets takes a second."""
    specs = {name: preset(name) for name in presets.names()}
    return {
        name: frozenset(config.name for layer in spec.expand() for config in layer.mixers)
        for name, spec in specs.items()
        if spec.vocab > _BYTES
    }


def _owner(group: str, name: str) -> str:
    return name.partition(":")[0] if ":" in name else registry.owner(group, name)


def _update_meta(mixer: Mixer, device: str, dtype: torch.dtype) -> UpdateMeta:
    """Return the meta of a mixer's update in training, or of small operands for a mixer without an update."""
    updates = (module for module in mixer.modules() if isinstance(module, Update))
    update = mixer.update if isinstance(mixer, DeltaMixer) else next(updates, None)  # a part may have its own update
    if update is None:
        return UpdateMeta(_device_type(device), dtype, H=1, HV=1, K=64, V=64, grad=True)
    return update.meta(_device_type(device), dtype, grad=True)


def _convolution(mixer: Mixer, device: str, dtype: torch.dtype) -> dict[str, str]:
    """Describe the short convolution of a mixer: its width and what computes it."""
    for module in mixer.modules():
        if isinstance(module, ShortConv):
            taps = module.weight.shape[1]
            backend = bind_conv(module.parts).backend_for(_device_type(device), dtype, taps)
            implementation = "plain torch" if backend is None else f"backend {backend.name!r}"
            return {"short convolution": f"{taps} taps, by {implementation} on {device!r}"}
    return {}


def _decode_step(mixer: Mixer, device: str, dtype: torch.dtype, backend: str | None) -> dict[str, str]:
    """Describe which parts of a mixer's decode step the backend fuses with the update."""
    if backend is None or not isinstance(mixer, DeltaMixer):
        return {}
    fusion = mixer.decode_fusion()
    if fusion is None or resolve(backend).fused_decode_unsupported(fusion.step, dtype):
        return {"decode step": f"not fused, the update by backend {backend!r} on {device!r}"}
    parts = ", ".join(type(part).__name__ for part in fusion.fused_parts.values())
    return {"decode step": f"{parts} and the update fused, by backend {backend!r} on {device!r}"}


def _device_type(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"device must be cpu, cuda, mps or another torch device, got {device!r}") from error


def _build_on_meta(config: MixerConfig, width: int) -> Mixer:
    with torch.device("meta"):
        return config.build(width, backend="reference")


def _field_row(name: str, info: FieldInfo) -> FieldRow:
    default = info.get_default(call_default_factory=True)
    plain = dump_changed(default) if isinstance(default, MixerConfig) else to_jsonable_python(default)
    return FieldRow(name=name, default=plain, about=info.description or "")
