"""One mixer, backend or preset in detail: what it is, what it costs, and which backends compute it."""

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from deltazoo.backends import registry
from deltazoo.backends.base import UpdateMeta
from deltazoo.backends.dispatch import bind_conv
from deltazoo.backends.errors import ConfigError, PluginError, UnknownNameError
from deltazoo.backends.explain import explain
from deltazoo.backends.papers import papers
from deltazoo.backends.registry import resolve
from deltazoo.blocks import document, presets
from deltazoo.blocks.inspect.catalog import about
from deltazoo.blocks.inspect.describe import Description
from deltazoo.blocks.spec import StackSpec
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.delta_mixer import DeltaMixer, Update
from deltazoo.mixers.core.mixer import Mixer, MixerConfig
from deltazoo.mixers.parts.convolution import ShortConv

_WIDTH = 1024


class FieldRow(BaseModel):
    """One field of a config."""

    name: str
    default: Any
    about: str


class BackendRow(BaseModel):
    """One backend: whether it computes a mixer's update, and why not."""

    backend: str
    chosen: bool
    reasons: list[str]


class Sheet(BaseModel):
    """All there is to say of a name.

    Args:
        about: equation, source and the like, by title, in words.
        fields: of a config.
        cost: figures by title, with their unit.
        backends: of a mixer: which one computes it on the device asked for, and why the others do not.
        takes: of a backend: why not, for every mixer's update at width 1024; [] where it can.
        description: of a stack.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["mixer", "backend", "stack"]
    name: str
    owner: str
    about: dict[str, str] = {}
    fields: list[FieldRow] = []
    cost: dict[str, int] = {}
    backends: list[BackendRow] = []
    takes: dict[str, list[str]] = {}
    description: Description | None = None


def sheet(
    name: str, width: int = _WIDTH, device: str = "cpu", dtype: torch.dtype = torch.float32, trust: bool = False
) -> Sheet:
    """Look a mixer, backend, preset or file of a stack up.

    Args:
        width: of the layer that a mixer's figures are for.
        device, dtype: that the backends are asked about; torch need not see the device here.
        trust: as for `StackSpec.load`.
    Raises: UnknownNameError, with the nearest name; ConfigError; PluginError.
    """
    mixers, backends = registry.names(registry.MIXERS), registry.names(registry.BACKENDS)
    if name in mixers:
        return _mixer(name, width, device, dtype)
    if name in backends:
        return _backend(name, device, dtype)
    if name in presets.names() or name.endswith(document.SUFFIXES):
        return _stack(name, trust)
    if ":" in name:
        return _plug_in(name, width, device, dtype)
    raise UnknownNameError("mixer, backend or preset", name, [*mixers, *backends, *presets.names()])


def _plug_in(name: str, width: int, device: str, dtype: torch.dtype) -> Sheet:
    found = registry.load(registry.MIXERS, name)
    is_mixer = isinstance(found, type) and issubclass(found, MixerConfig)
    return _mixer(name, width, device, dtype) if is_mixer else _backend(name, device, dtype)


def _mixer(name: str, width: int, device: str, dtype: torch.dtype) -> Sheet:
    kind = config_class(name)
    config = kind()
    spec = config.spec()
    words = {"equation": config.equation(), "source": kind.source}
    if spec is not None:
        words |= {"update of": "; ".join(papers(spec)) or "no paper that deltazoo knows"}
        words |= {"eigenvalue of the erased direction": str(spec.spectrum()), "spec": repr(spec)}
    mixer = _on_no_device(config, width)
    words |= _convolution(mixer, device, dtype)
    cost = config.cost(width)
    verdicts = [] if spec is None else explain(spec, _meta(mixer, device, dtype)).verdicts
    words |= _decode_step(mixer, device, dtype, next((v.backend for v in verdicts if v.chosen), None))
    return Sheet(
        kind="mixer",
        name=name,
        owner=_owner(registry.MIXERS, name),
        about=words,
        fields=[_field(field, info) for field, info in kind.model_fields.items()],
        cost={
            "width": width,
            "parameters": sum(x.numel() for x in mixer.parameters()),
            "state, bytes a sequence": cost.state_bytes,
            "cache, bytes a token kept": cost.cache_bytes,
            "FLOPs a token, forward": cost.flops,
            "more FLOPs a token for each token looked back on": cost.flops_context,
        },
        backends=[BackendRow(**verdict._asdict()) for verdict in verdicts],
    )


def _backend(name: str, device: str, dtype: torch.dtype) -> Sheet:
    found = resolve(name)
    takes: dict[str, list[str]] = {}
    for mixer in registry.names(registry.MIXERS):
        try:
            config = config_class(mixer)()
            spec = config.spec()
            if spec is not None:
                takes[mixer] = found.unsupported(spec, _meta(_on_no_device(config, _WIDTH), device, dtype))
        except PluginError:  # the mixer's own sheet says what is wrong with it
            continue
    words = {"about": about(found)}
    return Sheet(kind="backend", name=name, owner=_owner(registry.BACKENDS, name), about=words, takes=takes)


def _stack(name: str, trust: bool) -> Sheet:
    spec = StackSpec.load(name, trust)
    words = {field: str(value) for field, value in spec.model_dump(mode="json").items()}
    words["layers"] = "; ".join(f"{layer} = {value!r}" for layer, value in spec.layers.items())
    owner = "deltazoo" if name in presets.names() else name
    return Sheet(kind="stack", name=name, owner=owner, about=words, description=spec.describe())


def _owner(group: str, name: str) -> str:
    return name.partition(":")[0] if ":" in name else registry.owner(group, name)


def _meta(mixer: Mixer, device: str, dtype: torch.dtype) -> UpdateMeta:
    """The tensors that a mixer gives its update in training."""
    update = next((module for module in mixer.modules() if isinstance(module, Update)), None)
    if update is None:
        return UpdateMeta(_kind(device), dtype, H=1, HV=1, K=64, V=64, grad=True)
    return update.meta(_kind(device), dtype, grad=True)


def _convolution(mixer: Mixer, device: str, dtype: torch.dtype) -> dict[str, str]:
    """Who computes the short convolution, of a mixer that has one."""
    for module in mixer.modules():
        if isinstance(module, ShortConv):
            taps = module.weight.shape[1]
            backend = bind_conv(module.parts).backend_for(_kind(device), dtype, taps)
            by = "plain torch" if backend is None else f"backend {backend.name!r}"
            return {"short convolution": f"{taps} taps, by {by} on {device!r}"}
    return {}


def _decode_step(mixer: Mixer, device: str, dtype: torch.dtype, backend: str | None) -> dict[str, str]:
    """What of a decode step is one operation of the backend, of a mixer whose update it computes."""
    if backend is None or not isinstance(mixer, DeltaMixer):
        return {}
    fusion = mixer.decode_fusion()
    if fusion is None or resolve(backend).fused_decode_unsupported(fusion.step, dtype):
        return {"decode step": f"part by part, the update by backend {backend!r} on {device!r}"}
    parts = ", ".join(type(part).__name__ for part in fusion.fused_parts.values())
    return {"decode step": f"{parts} and the update in one, by backend {backend!r} on {device!r}"}


def _kind(device: str) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"device must be cpu, cuda, mps or another that torch knows, got {device!r}") from error


def _on_no_device(config: MixerConfig, width: int) -> Mixer:
    with torch.device("meta"):
        return config.build(width, backend="reference")


def _field(name: str, info: FieldInfo) -> FieldRow:
    return FieldRow(
        name=name, default=to_jsonable_python(info.get_default(call_default_factory=True)), about=info.description or ""
    )
