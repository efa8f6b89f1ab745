"""The user's mistakes as one sentence on stderr and exit code 2; a traceback only where --debug asks for it."""

import functools
import reprlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_P = ParamSpec("_P")
_R = TypeVar("_R")

MISTAKE = 2


class Debug:
    """Whether `--debug` was given, for the command that runs."""

    on = False


def guarded(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a command: what the user did wrong is said in a sentence; what is wrong with us keeps its traceback."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            sentence = mistake(error)
            if sentence is None or Debug.on:
                raise
            sys.stderr.write(f"deltazoo: {sentence}\n")
            raise typer.Exit(MISTAKE) from error

    return run


def mistake(error: Exception) -> str | None:
    """The sentence for an error of the user's; None for any other."""
    from deltazoo.backends.errors import DeltazooError

    if isinstance(error, DeltazooError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(_sentence(error.title, problem) for problem in error.errors())
    return None


def _sentence(title: str, problem: "ErrorDetails") -> str:
    where = ".".join(str(part) for part in problem["loc"]) or title
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}, got {reprlib.repr(problem['input'])}"
