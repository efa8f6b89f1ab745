"""Problems of the installed plug-ins, for `deltazoo doctor`."""

import torch

from deltazoo.backends.io.errors import ConfigError, DeltazooError, cut
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import UpdateMeta
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.blocks.inspect.catalog import catalog
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.initialization import no_weight_decay

_WIDTH = 1024


def plugin_problems() -> list[str]:
    """Return a sentence for each mixer or backend that cannot be used, or whose declaration is wrong."""
    installed = catalog()
    problems = []
    for group, entries, check in (
        (registry.BACKENDS, installed.backends, _backend_problem),
        (registry.MIXERS, installed.mixers, _mixer_problem),
    ):
        conflicts = registry.conflicts(group)
        problems += conflicts
        for entry in entries:
            kind = group.removeprefix("deltazoo.").removesuffix("s")
            problem = entry.problem
            if problem is None and not registry.is_built_in(group, entry.name):
                problem = check(entry.name)
            if problem is not None and problem not in conflicts:
                problems.append(f"{kind} {entry.name!r} of {entry.owner}: {problem}")
    return problems


def _mixer_problem(name: str) -> str | None:
    """Compare the names, and build the mixer on the meta device."""
    config_type = config_class(name)
    if getattr(config_type, "name", None) != name:
        return _different_names(name, getattr(config_type, "name", None))
    try:
        with torch.device("meta"):
            mixer = config_type().build(_WIDTH)
        for module in mixer.modules():
            no_weight_decay(module)
    except ConfigError:
        return None  # the default fields need not fit this width
    except Exception as error:  # plug-ins may raise anything
        return str(error) if isinstance(error, DeltazooError) else f"`build` failed: {type(error).__name__}: {error}"
    return None


def _backend_problem(name: str) -> str | None:
    """Compare the names, and ask the backend for its reasons against the default spec."""
    backend = resolve(name)
    if backend.name != name:
        return _different_names(name, backend.name)
    try:
        reasons = backend.unsupported(UpdateSpec(), UpdateMeta("cpu", torch.float32, H=1, HV=1, K=16, V=16))
    except Exception as error:  # plug-ins may raise anything
        return f"`unsupported` failed: {type(error).__name__}: {error}"
    if not isinstance(reasons, list | tuple):
        return f"`unsupported` must return a list of sentences, got {cut(reasons)}"
    return None


def _different_names(declared: str, name: object) -> str:
    return f"its entry point and its attribute `name` must be equal, got {declared!r} and {name!r}"
