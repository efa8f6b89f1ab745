"""Which backends are tried, and in which order: from a name to the object that was loaded for it.

torch.compile traces `candidates_of`: `update` in a graph looks names up while it is traced.
"""

from types import SimpleNamespace
from typing import cast

from deltazoo.backends import registry
from deltazoo.backends.base import Backend
from deltazoo.backends.errors import PluginError

# Preferred first, for each device type; the reference has to be asked for. "" stands for every other device.
DEFAULT_ORDER: dict[str, tuple[str, ...]] = {"cuda": ("triton", "compile"), "": ("compile",)}

# The backends that were found so far, an attribute each: of a dict torch.compile knows the keys it had at a first look.
_loaded = SimpleNamespace()


def candidates_of(asked: str | Backend | None) -> dict[str, tuple[Backend, ...]]:
    """The candidates for each type of device; "" stands for every other."""
    if isinstance(asked, Backend):
        return {"": (asked,)}
    if asked is not None:
        return {"": (getattr(_loaded, look_up(asked)),)}
    look_up_defaults()
    return {
        device: tuple(getattr(_loaded, name) for name in order if hasattr(_loaded, name))
        for device, order in DEFAULT_ORDER.items()
    }


def look_up(asked: str) -> str:
    """Load a backend. Returns its attribute of `_loaded`."""
    resolve(asked)
    return _attribute(asked)


def look_up_defaults() -> None:
    """Load the backends of the default order that are installed."""
    for name in {name for order in DEFAULT_ORDER.values() for name in order} - vars(_loaded).keys():
        if name in registry.names(registry.BACKENDS):
            resolve(name)


# Nobody can look up what is installed in a graph: torch.compile calls these while it traces `update`. That is all that
# torch.compiler.assume_constant_result does, and it imports torch's compiler to do it.
vars(look_up)["_dynamo_marked_constant"] = vars(look_up_defaults)["_dynamo_marked_constant"] = True


def _attribute(name: str) -> str:
    return name if name.isidentifier() else f"_{name.encode().hex()}"


def resolve(backend: str | Backend) -> Backend:
    """Find the backend that a name, "module:Class" or object stands for.

    Raises: UnknownNameError, DuplicateNameError, PluginError.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name, a Backend or None, got {backend!r}")
    known, attribute = vars(_loaded), _attribute(backend)
    if attribute not in known:
        found = registry.load(registry.BACKENDS, backend)
        try:
            made = found() if isinstance(found, type) else found
        except Exception as error:
            raise PluginError(f"backend {backend!r} cannot be made: {type(error).__name__}: {error}") from error
        if not isinstance(made, Backend):
            raise PluginError(f"backend {backend!r} must be a deltazoo.Backend, got {type(made).__name__}")
        if not isinstance(getattr(made, "name", None), str):
            raise PluginError(f"backend {backend!r} must have a name, a string, got {getattr(made, 'name', None)!r}")
        known[attribute] = made
    return cast(Backend, known[attribute])
