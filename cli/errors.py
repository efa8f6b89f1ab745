"""User errors: one sentence on stderr and exit code 2. --debug prints the traceback as well."""

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

USER_ERROR = 2  # exit code


class Debug:
    """Whether `--debug` was passed to the running command."""

    on = False


def report_user_errors(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a command to print user errors as one sentence. Other errors are bugs and keep their traceback."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            message = user_error_message(error)
            if message is None or Debug.on:
                raise
            sys.stderr.write(f"deltazoo: {message}\n")
            raise typer.Exit(USER_ERROR) from error

    return run


def user_error_message(error: Exception) -> str | None:
    """Return the message of a user error, or None for any other error."""
    from deltazoo.backends.errors import DeltazooError

    if isinstance(error, DeltazooError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(_describe(error.title, problem) for problem in error.errors())
    return None


def _describe(title: str, problem: "ErrorDetails") -> str:
    from deltazoo.backends.errors import describe_invalid

    location = ".".join(str(key) for key in problem["loc"]) or title
    return f"{describe_invalid(location, problem['msg'])}, got {reprlib.repr(problem['input'])}"
