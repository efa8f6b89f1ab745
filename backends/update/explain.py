"""Explain which backend would compute an update, and why the others would not."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deltazoo.backends.io.errors import ConfigError, DuplicateNameError, PluginError, cut
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import Backend, UpdateMeta
from deltazoo.backends.update.check import FLOAT_DTYPES
from deltazoo.backends.update.dispatch import requested_backend
from deltazoo.backends.update.spec import UpdateSpec

_SUPPORTED = "supported; "  # begins the reason of a backend that is not chosen although it could compute the update


class Verdict(NamedTuple):
    """The verdict on one backend. reasons: why it is not chosen; [] if it is."""

    backend: str
    chosen: bool
    reasons: list[str]


class Explanation(NamedTuple):
    """The verdicts on all installed backends: first those to try, in order, then the others by name.

    plan: the kernels that the chosen backend would run; None if it does not describe them.
    """

    verdicts: list[Verdict]
    plan: str | None = None

    @property
    def chosen(self) -> str | None:
        return next((verdict.backend for verdict in self.verdicts if verdict.chosen), None)

    def __str__(self) -> str:
        lines = [
            f"{verdict.backend}: {'chosen' if verdict.chosen else '; '.join(r.rstrip('.') for r in verdict.reasons)}"
            for verdict in self.verdicts
        ]
        return "\n".join(lines if self.plan is None else [*lines, self.plan])


def explain(
    spec: UpdateSpec,
    meta: UpdateMeta,
    backend: str | Backend | None = None,
    shape: Shape | tuple[int, int] | None = None,
    device: DeviceSpec | str | None = None,
) -> Explanation:
    """Return which backend would compute an update, the reasons against every other one, and the kernel plan.

    Args:
        meta: a description of the tensors, such as UpdateMeta("cuda", torch.bfloat16, H=8, HV=8, K=128, V=128).
        backend: as for `bind`.
        shape: a Shape or (B, T), for the exact kernel plan; without one the condition of each kernel is listed.
        device: overrides meta.device: the name of a known device, such as "NVIDIA H200", or a DeviceSpec. No GPU is
            needed.
    Raises: UnknownNameError; ConfigError for an unknown device, and for an invalid field of `meta`.
    """
    _check_meta(meta)
    device = DeviceSpec.named(device) if isinstance(device, str) else device
    if device is not None:
        meta = meta._replace(device="cuda")
    if shape is not None and not isinstance(shape, Shape):
        shape = Shape("requested shape", *shape, meta.H, meta.HV, meta.K, meta.V)
    requested = requested_backend(backend)
    installed = registry.names(registry.BACKENDS)
    if requested is None:
        default = registry.DEFAULT_ORDER.get(meta.device, registry.DEFAULT_ORDER[""])
        candidates: list[str | Backend] = [name for name in default if name in installed]
    else:
        candidates = [requested]
    names = [backend if isinstance(backend, str) else backend.name for backend in candidates]
    verdicts: list[Verdict] = []
    plan: str | None = None
    for candidate, name in zip(candidates, names, strict=True):
        reasons = _reasons(candidate, spec, meta, device)
        chosen = not reasons and not any(verdict.chosen for verdict in verdicts)
        if chosen:
            plan = registry.resolve(candidate).plan(spec, meta, shape, device)
        if not chosen and not reasons:
            reasons = [f"{_SUPPORTED}an earlier backend was chosen."]
        verdicts.append(Verdict(name, chosen, reasons))
    for name in installed:
        if name not in names:
            reasons = _reasons(name, spec, meta, device) or [f"{_SUPPORTED}runs only if requested by name."]
            verdicts.append(Verdict(name, False, reasons))
    return Explanation(verdicts, plan)


def is_supported(reasons: Sequence[str]) -> bool:
    """Whether a backend with these reasons of a `Verdict` could compute the update."""
    return all(reason.startswith(_SUPPORTED) for reason in reasons)


def _check_meta(meta: UpdateMeta) -> None:
    """Raise ConfigError for the first field that no tensors can have."""
    if not isinstance(meta, UpdateMeta):
        raise ConfigError(f"meta must be a deltazoo.UpdateMeta, got {cut(meta)}")
    for name in ("H", "HV", "K", "V"):
        size = getattr(meta, name)
        if type(size) is not int or size < 1:
            raise ConfigError(f"meta.{name} must be an integer >= 1, got {cut(size)}")
    if meta.HV % meta.H:
        raise ConfigError(f"meta.HV must be a multiple of H={meta.H}, got {meta.HV}")
    if meta.dtype not in FLOAT_DTYPES:
        raise ConfigError(f"meta.dtype must be {' or '.join(map(str, FLOAT_DTYPES))}, got {cut(meta.dtype)}")
    try:
        device_type = torch.device(meta.device).type
    except (RuntimeError, TypeError):
        device_type = None
    if meta.device != device_type:
        raise ConfigError(f"meta.device must be a type of torch device such as 'cuda', got {cut(meta.device)}")


def _reasons(backend: str | Backend, spec: UpdateSpec, meta: UpdateMeta, device: DeviceSpec | None) -> list[str]:
    """Return the reasons against a backend. If a plug-in fails here, the others are still judged."""
    try:
        plugin = registry.resolve(backend)
    except (PluginError, DuplicateNameError) as error:
        return [str(error)]
    try:
        reasons = plugin.unsupported_on(spec, meta, device)
        if not isinstance(reasons, list | tuple) or not all(isinstance(reason, str) for reason in reasons):
            return [f"its `unsupported` must return a list of sentences, got {cut(reasons)}"]
        return list(reasons)
    except Exception as error:
        return [f"its `unsupported` failed: {type(error).__name__}: {error}"]
