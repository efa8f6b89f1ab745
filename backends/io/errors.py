"""The exceptions of the package.

    DeltazooError
    ├── InputError (ValueError)          an argument of a function is invalid
    │   ├── OperandError                 an operand is missing, or the spec has no such operand
    │   ├── ShapeError                   a tensor has the wrong shape
    │   ├── DtypeError                   a tensor has the wrong dtype
    │   ├── DeviceError                  tensors are on different devices
    │   └── ValueRangeError              a value is outside the range of its operand
    ├── StateError (ValueError)          a state does not fit the module, or is full
    ├── PatternError (ValueError)        a layer pattern cannot be parsed
    ├── ConfigError (ValueError)         a configuration is invalid, or a file cannot be read or written
    ├── UnknownNameError (KeyError)      no such backend, mixer or preset; suggests the nearest
    ├── DuplicateNameError (ValueError)  two plug-ins declare the same name
    ├── PluginError (RuntimeError)       a plug-in cannot be imported or created, or returns a wrong type
    └── UnsupportedError (RuntimeError)  no backend supports this spec on these tensors; lists the reasons

An invalid `UpdateSpec` or mixer config raises `ConfigError`, whose cause is pydantic's `ValidationError`.
"""

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class DeltazooError(Exception):
    """Base class of the exceptions that deltazoo raises."""


class InputError(DeltazooError, ValueError):
    """An argument of a function is invalid."""


class OperandError(InputError):
    """An operand is missing, or the spec has no such operand."""


class ShapeError(InputError):
    """A tensor has the wrong shape."""


class DtypeError(InputError):
    """A tensor has the wrong dtype."""


class DeviceError(InputError):
    """Tensors are on different devices."""


class ValueRangeError(InputError):
    """A value is outside the range of its operand."""


class StateError(DeltazooError, ValueError):
    """A state does not fit the module, or is full."""


class PatternError(DeltazooError, ValueError):
    """A layer pattern cannot be parsed."""


class ConfigError(DeltazooError, ValueError):
    """A configuration is invalid, or a file cannot be read or written."""


class UnknownNameError(DeltazooError, KeyError):
    """No such backend, mixer or preset."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(unknown_name(kind, name, self.known))

    def __str__(self) -> str:  # KeyError.__str__ returns the repr of its argument
        return str(self.args[0])

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str]]]:
        return type(self), (self.kind, self.name, self.known)


class DuplicateNameError(DeltazooError, ValueError):
    """Two plug-ins declare the same name."""


class PluginError(DeltazooError, RuntimeError):
    """A plug-in cannot be imported or created, or returns a wrong type."""


class UnsupportedError(DeltazooError, RuntimeError):
    """No backend supports this spec on these tensors."""


@contextmanager
def file_errors(action: str, path: object) -> Iterator[None]:
    """Raise ConfigError in place of an OSError: "cannot read stack.yaml: No such file or directory"."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot {action} {path}: {error.strerror or error}") from error


class ConfigWarning(UserWarning):
    """A part of a configuration has no effect."""


_WORDING = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer": "an integer",
    "a valid dictionary": "a mapping",
    "a valid ": "a ",
}


def describe_invalid(location: str, message: str) -> str:
    """Format pydantic's message about one value as a sentence; `location`, the value's name or path, may be empty."""
    message = message.removeprefix("Value error, ")
    if message == "Field required":
        return f"{location} is required"
    if size := re.match(r"\w+ should (have at (?:least|most) \d+ \w+)", message):
        return f"{location or 'the value'} must {size[1]}"
    if not message.startswith("Input should be "):
        return f"{location}: {message}" if location else message
    rule = re.split(", (?:unable to|got) ", message.removeprefix("Input should be "))[0]
    rule = re.sub(r" or instance of \w+$", "", rule)
    for theirs, ours in _WORDING.items():
        rule = rule.replace(theirs, ours)
    return f"{location or 'the value'} must be {rule}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Format the message for an unknown name, with the nearest known name, or all names if none is near."""
    names = sorted(set(known))
    hint = nearest(name, names) or f". Known: {', '.join(names) or 'none'}."
    return f"unknown {kind} {cut(name)}{hint}"


def unknown_field(location: str, field: str, known: Sequence[str]) -> str:
    """Format the message for an unknown field, with the nearest known field and the list of all."""
    return f"{location}: unknown field{nearest(field, known) or '.'} Known: {', '.join(known)}."


def count(number: int, noun: str) -> str:
    """Return "1 case" or "2 cases"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'head'?" with the nearest known name, or "" if none is near.

    Without a similar name, one that contains `name` or has it as its initials is near: olmo for olmo-hybrid, lr for
    learning_rate.
    """
    text, names = name[:_MAX_TEXT], list(known)
    matches = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
    if not matches and len(text) > 1:
        matches = [other for other in names if text in other or text == "".join(re.findall(r"(?:\b|_)([a-z])", other))]
    return f"; did you mean {matches[0]!r}?" if matches else ""


_MAX_TEXT = 200  # characters of a value in a message


class _ShortRepr(reprlib.Repr):
    """`repr` with a limited number of items, levels and characters."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _MAX_TEXT
        self.maxlevel = 4

    def repr_int(self, x: int, level: int) -> str:
        # str(int) raises ValueError beyond sys.get_int_max_str_digits()
        return f"an integer of {x.bit_length()} bits" if x.bit_length() > 256 else repr(x)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def cut(value: object) -> str:
    """Return `repr(value)` cut to a length that fits a message."""
    text = _ShortRepr().repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
