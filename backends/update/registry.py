"""Lookup of backends and mixers by name: entry points, "module:Class" names and the default order of backends.

A plug-in package declares an entry point in its pyproject.toml, as deltazoo does for its own backends and mixers:

    [project.entry-points."deltazoo.backends"]
    mine = "my_package.my_module:MyBackend"

`deltazoo list` then shows it. A name of the form "module:Class" needs no entry point.
"""

import functools
import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from types import SimpleNamespace
from typing import Any, cast

from deltazoo.backends.io.errors import (
    ConfigError,
    DeltazooError,
    DuplicateNameError,
    PluginError,
    UnknownNameError,
    cut,
)
from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs
from deltazoo.backends.update.base import Backend

BACKENDS = "deltazoo.backends"
MIXERS = "deltazoo.mixers"
FAMILIES = "deltazoo.families"  # of checkpoints: see deltazoo.blocks.checkpoints.family
_KIND = {BACKENDS: "backend", MIXERS: "mixer", FAMILIES: "family"}

# Device type -> backends in order of preference; "" is every other device. The reference runs only when named.
DEFAULT_ORDER: dict[str, tuple[str, ...]] = {"cuda": ("triton", "compile"), "": ("compile",)}

# Backend instances, one attribute per name. Not a dict: torch.compile guards on the keys that a dict had when it was
# first traced, and would recompile after every backend that is loaded later.
_loaded = SimpleNamespace()


@functools.cache
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(set(entry_points(group=group)), key=lambda point: (point.name, point.value)))


def _claims(group: str, name: str) -> list[EntryPoint]:
    """Return the entry points with this name, that of deltazoo first."""
    points = [point for point in _entry_points(group) if point.name == name]
    if len(points) > 1:  # reading the name of a distribution parses its metadata
        points.sort(key=lambda point: not _is_ours(point))
    return points


def _is_ours(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "deltazoo"


def _distribution(point: EntryPoint) -> str:
    return "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _conflict(group: str, name: str) -> str:
    points, kind = _claims(group, name), _KIND[group]
    if _is_ours(points[0]):
        others = ", ".join(map(_distribution, points[1:]))
        return f"{kind} {name!r} of {others} is ignored, because deltazoo has a {kind} of this name: rename it there."
    claims = ", ".join(f"{point.value} ({_distribution(point)})" for point in points)
    return f"{kind} {name!r} is claimed {len(points)} times: {claims}. Uninstall all but one."


def names(group: str) -> list[str]:
    """List the installed names of a group, sorted, without importing anything.

    Args: group: `BACKENDS`, `MIXERS` or `FAMILIES`.
    """
    return sorted({point.name for point in _entry_points(group)})


def owner(group: str, name: str) -> str:
    """Return the distribution that provides `name`, with its version."""
    points = _claims(group, name)
    return _distribution(points[0]) if points else "unknown"


def is_built_in(group: str, name: str) -> bool:
    """Whether deltazoo itself provides `name`."""
    return any(_is_ours(point) for point in _claims(group, name))


def conflicts(group: str) -> list[str]:
    """Describe each name that more than one distribution declares, in a sentence."""
    counts = Counter(point.name for point in _entry_points(group))
    repeated = [name for name, count in sorted(counts.items()) if count > 1]
    return [_conflict(group, name) for name in repeated if not all(map(_is_ours, _claims(group, name)))]


def refresh() -> None:
    """Read the installed distributions again, after one was installed in this process."""
    importlib.invalidate_caches()
    _entry_points.cache_clear()


def load(group: str, name: str) -> Any:
    """Import the object that a name refers to.

    Args: name: an installed name, or "module:Class".
    Raises:
        UnknownNameError: no distribution declares the name.
        DuplicateNameError: two distributions declare it, and neither is deltazoo, whose names nobody can replace.
        PluginError: the import fails. Other names still load.
    """
    kind = _KIND.get(group, group)
    if ":" in name:
        return _import_object(kind, name, name)
    points = _claims(group, name)
    if not points:
        raise UnknownNameError(kind, name, names(group))
    if len(points) > 1 and not _is_ours(points[0]):
        raise DuplicateNameError(_conflict(group, name))
    return _import_object(kind, name, points[0].value)


@contextmanager
def plugin_errors(group: str, name: str) -> Iterator[None]:
    """Raise PluginError, which names the distribution, in place of an exception of a plug-in's own code."""
    try:
        yield
    except DeltazooError:
        raise
    except Exception as error:
        if ":" not in name and is_built_in(group, name):
            raise
        raise PluginError(
            f"{_KIND[group]} {name!r} of {owner(group, name)} fails: {type(error).__name__}: {error}"
        ) from error


def refuse_untrusted(kind: str, name: str, where: str) -> None:
    """Refuse a "module:Class" name read from a file that the caller does not trust.

    Importing the module runs its code. A name passed in Python or typed on the command line is consent; a name in
    a file is not. Installed names pass.

    Args:
        kind: "backend" or "mixer".
        name: the name as it was read.
        where: the file or the key that contains it, as the start of the error message.
    Raises: ConfigError.
    """
    if ":" in name:
        raise ConfigError(
            f"{where}: {kind} {name!r} would import and run the code of module {name.partition(':')[0]!r}; "
            "pass trust=True, or --trust on the command line, to allow it"
        )


def resolve(backend: str | Backend) -> Backend:
    """Return the backend instance for a name, a "module:Class" or an instance. Each name is instantiated once.

    Raises: UnknownNameError, DuplicateNameError, PluginError; ConfigError: another type.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise ConfigError(f"backend must be a name, a Backend or None, got {cut(backend)}")
    loaded, attribute = vars(_loaded), _attribute(backend)
    if attribute not in loaded:
        loaded[attribute] = _instantiate(backend, load(BACKENDS, backend))
    return cast(Backend, loaded[attribute])


def candidates_of(requested: str | Backend | None) -> dict[str, tuple[Backend, ...]]:
    """Return device type -> the backends to try in order; "" is every other device.

    torch.compile traces this function: `update` inside a graph looks its backend up during tracing.
    """
    if isinstance(requested, Backend):
        return {"": (requested,)}
    if requested is not None:
        return {"": (getattr(_loaded, load_requested(requested)),)}
    load_defaults()
    return {
        device: tuple(getattr(_loaded, name) for name in order if hasattr(_loaded, name))
        for device, order in DEFAULT_ORDER.items()
    }


@constant_in_graphs
def load_requested(name: str) -> str:
    """Load a backend and return its attribute name in `_loaded`."""
    resolve(name)
    return _attribute(name)


@constant_in_graphs
def load_defaults() -> None:
    """Load the installed backends of the default order."""
    for name in {name for order in DEFAULT_ORDER.values() for name in order} - vars(_loaded).keys():
        if name in names(BACKENDS):
            resolve(name)


def _attribute(name: str) -> str:
    return name if name.isidentifier() else f"_{name.encode().hex()}"


def _instantiate(name: str, plugin: Any) -> Backend:
    try:
        backend = plugin() if isinstance(plugin, type) else plugin
    except (Exception, SystemExit) as error:
        raise PluginError(f"backend {name!r} cannot be created: {type(error).__name__}: {error}") from error
    if not isinstance(backend, Backend):
        raise PluginError(f"backend {name!r} must be a deltazoo.Backend, got {type(backend).__name__}")
    if not isinstance(getattr(backend, "name", None), str):
        raise PluginError(
            f"backend {name!r} must have a string attribute `name`, got {getattr(backend, 'name', None)!r}"
        )
    return backend


def _import_object(kind: str, name: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        imported: Any = importlib.import_module(module)
        for part in attribute.split("."):
            imported = getattr(imported, part)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{kind} {name!r} ({path}) cannot be loaded: {type(error).__name__}: {error}") from error
    return imported
