"""Explain which backend would compute an update, and why the others would not."""

from typing import NamedTuple

from deltazoo.backends import registry
from deltazoo.backends.base import Backend, UpdateMeta
from deltazoo.backends.dispatch import requested_backend
from deltazoo.backends.errors import DuplicateNameError, PluginError
from deltazoo.backends.spec import UpdateSpec


class Verdict(NamedTuple):
    """The verdict on one backend. reasons: why it is not chosen; [] if it is."""

    backend: str
    chosen: bool
    reasons: list[str]


class Explanation(NamedTuple):
    """The verdicts on all installed backends: first those to try, in order, then the others by name."""

    verdicts: list[Verdict]

    @property
    def chosen(self) -> str | None:
        return next((verdict.backend for verdict in self.verdicts if verdict.chosen), None)

    def __str__(self) -> str:
        return "\n".join(
            f"{verdict.backend}: {'chosen' if verdict.chosen else ' '.join(verdict.reasons)}"
            for verdict in self.verdicts
        )


def explain(spec: UpdateSpec, meta: UpdateMeta, backend: str | Backend | None = None) -> Explanation:
    """Return which backend would compute an update, and for every other one the reasons against it.

    Args:
        meta: a description of the tensors, such as UpdateMeta("cuda", torch.bfloat16, H=8, HV=8, K=128, V=128).
        backend: as for `bind`.
    Raises: UnknownNameError.
    """
    requested = requested_backend(backend)
    installed = registry.names(registry.BACKENDS)
    if requested is None:
        default = registry.DEFAULT_ORDER.get(meta.device, registry.DEFAULT_ORDER[""])
        candidates: list[str | Backend] = [name for name in default if name in installed]
    else:
        candidates = [requested]
    tried = [backend if isinstance(backend, str) else backend.name for backend in candidates]
    verdicts: list[Verdict] = []
    for candidate, name in zip(candidates, tried, strict=True):
        reasons = _reasons(candidate, spec, meta)
        chosen = not reasons and not any(verdict.chosen for verdict in verdicts)
        if not chosen and not reasons:
            reasons = ["supported; an earlier backend was chosen."]
        verdicts.append(Verdict(name, chosen, reasons))
    for name in installed:
        if name not in tried:
            reasons = _reasons(name, spec, meta) or ["supported; runs when asked for by name."]
            verdicts.append(Verdict(name, False, reasons))
    return Explanation(verdicts)


def _reasons(backend: str | Backend, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
    """The reasons against a backend. A plug-in that fails must not hide the verdicts on the others."""
    try:
        plugin = registry.resolve(backend)
    except (PluginError, DuplicateNameError) as error:
        return [str(error)]
    try:
        return plugin.unsupported(spec, meta)
    except Exception as error:
        return [f"its `unsupported` failed: {type(error).__name__}: {error}"]
