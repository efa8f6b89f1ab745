"""Every error of the package.

    DeltazooError
    ├── InputError (ValueError)          what the caller passed to the update is wrong
    │   ├── OperandError                 an operand is missing, or the spec has no such operand
    │   ├── ShapeError                   a tensor has the wrong shape
    │   ├── DtypeError                   a tensor has the wrong dtype
    │   ├── DeviceError                  tensors lie on different devices
    │   └── ValueRangeError              a value breaks the rule of its operand
    ├── StateError (ValueError)          a state does not fit the module, or is full
    ├── PatternError (ValueError)        a layer pattern cannot be read
    ├── ConfigError (ValueError)         a configuration cannot be read or built
    ├── UnknownNameError (KeyError)      no such backend, mixer or preset; names the nearest
    ├── DuplicateNameError (ValueError)  two plug-ins claim one name
    ├── PluginError (RuntimeError)       a plug-in cannot be loaded
    └── UnsupportedError (RuntimeError)  no backend takes this spec on these tensors; lists the reasons

A wrong `UpdateSpec` or mixer config raises pydantic's `ValidationError` with our sentence inside.
"""

import difflib
from collections.abc import Iterable


class DeltazooError(Exception):
    """Base of every error that deltazoo raises on purpose."""


class InputError(DeltazooError, ValueError):
    """What the caller passed is wrong."""


class OperandError(InputError):
    """An operand is missing, or the spec has no such operand."""


class ShapeError(InputError):
    """A tensor has the wrong shape."""


class DtypeError(InputError):
    """A tensor has the wrong dtype."""


class DeviceError(InputError):
    """Tensors lie on different devices."""


class ValueRangeError(InputError):
    """A value breaks the rule of its operand."""


class StateError(DeltazooError, ValueError):
    """A state does not fit the module, or is full."""


class PatternError(DeltazooError, ValueError):
    """A layer pattern cannot be read."""


class ConfigError(DeltazooError, ValueError):
    """A configuration cannot be read or built."""


class UnknownNameError(DeltazooError, KeyError):
    """No such backend, mixer or preset."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(unknown_name(kind, name, self.known))

    def __str__(self) -> str:  # KeyError prints the repr of its argument
        return str(self.args[0])

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str]]]:
        return type(self), (self.kind, self.name, self.known)


class DuplicateNameError(DeltazooError, ValueError):
    """Two plug-ins claim one name."""


class PluginError(DeltazooError, RuntimeError):
    """A plug-in cannot be loaded."""


class UnsupportedError(DeltazooError, RuntimeError):
    """No backend takes this spec on these tensors."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that `name` is unknown, name the nearest one, and list what there is."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(names) or 'none'}."
