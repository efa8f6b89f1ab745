"""Names to objects: entry points, read lazily. The zoo's own backends and mixers enter by the same door.

A plug-in package declares, in its pyproject.toml,

    [project.entry-points."deltazoo.backends"]
    mine = "my_package.my_module:MyBackend"

and `deltazoo list` shows it. `module:Class` works as a name without installing anything.
"""

import functools
import importlib
from collections import Counter
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from deltazoo.backends.errors import ConfigError, DuplicateNameError, PluginError, UnknownNameError

BACKENDS = "deltazoo.backends"
MIXERS = "deltazoo.mixers"
_KIND = {BACKENDS: "backend", MIXERS: "mixer"}


@functools.cache
def _found(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(set(entry_points(group=group)), key=lambda point: (point.name, point.value)))


def names(group: str) -> list[str]:
    """List the names that are installed in a group, sorted; nothing is imported.

    Args: group: `BACKENDS` or `MIXERS`.
    """
    return sorted({point.name for point in _found(group)})


def owner(group: str, name: str) -> str:
    """Name the distribution that provides `name`, with its version."""
    for point in _found(group):
        if point.name == name and point.dist is not None:
            return f"{point.dist.name} {point.dist.version}"
    return "unknown"


def load(group: str, name: str) -> Any:
    """Import what a name stands for.

    Args: name: an installed name, or "module:Class".
    Raises: UnknownNameError; DuplicateNameError, when two distributions claim the name; PluginError, when the
        import fails. An error concerns this name alone: the others still load.
    """
    kind = _KIND.get(group, group)
    if ":" in name:
        return _imported(kind, name, name)
    points = [point for point in _found(group) if point.name == name]
    if not points:
        raise UnknownNameError(kind, name, names(group))
    if len(points) > 1:
        claims = ", ".join(f"{point.value} ({point.dist.name if point.dist else '?'})" for point in points)
        raise DuplicateNameError(f"{kind} {name!r} is claimed {len(points)} times: {claims}. Uninstall all but one.")
    return _imported(kind, name, points[0].value)


def refuse_untrusted(kind: str, name: str, where: str) -> None:
    """Refuse a "module:Class" name read from a file that the caller does not trust.

    Importing the module runs its code. A name passed in Python or typed on the command line is consent; a name in
    a file is not. Installed names pass.

    Args:
        kind: "backend" or "mixer".
        name: the name as it was read.
        where: the file or the key that held it, as the start of the error message.
    Raises: ConfigError.
    """
    if ":" in name:
        raise ConfigError(
            f"{where}: {kind} {name!r} would import and run the code of module {name.partition(':')[0]!r}; "
            "pass trust=True, or --trust on the command line, to allow it"
        )


def duplicates(group: str) -> list[str]:
    """List the names that more than one distribution claims."""
    return sorted(name for name, count in Counter(point.name for point in _found(group)).items() if count > 1)


def refresh() -> None:
    """Look at the installed distributions again, after one was installed in this process."""
    importlib.invalidate_caches()
    _found.cache_clear()


def _imported(kind: str, name: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise PluginError(f"{kind} {name!r} ({path}) cannot be loaded: {type(error).__name__}: {error}") from error
    return found
