"""User errors: one sentence on stderr and exit code 2, with --json also as a JSON document on stdout.

--debug prints the traceback as well. An error that is none of these is a bug and keeps its traceback.
"""

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, get_args

import typer

from deltazoo.cli.terminal.streams import output_failed, print_json_error

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Modules of the warnings that torch causes itself: it copies and unpickles, for example, its deprecated LeafSpec.
_TORCH = r"(torch|copy|copyreg|pickle)\b"

USER_ERROR, INTERRUPTED = 2, 130  # exit codes


class Debug:
    """Whether `--debug` was passed to the running command."""

    on = False


def report_user_errors(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a command to print user errors as one sentence. Other errors are bugs and keep their traceback."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            with _warnings_as_sentences():
                return command(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            sys.stderr.write("\ndeltazoo: interrupted\n")
            raise typer.Exit(INTERRUPTED) from interrupt
        except Exception as error:
            if isinstance(error, OSError) and error.filename is None:
                code = output_failed(probe="\n")
                if code is not None:
                    raise typer.Exit(code) from error
            message = user_error_message(error)
            if message is None or Debug.on:
                raise
            message = _name_option(message, command)
            if kwargs.get("as_json"):
                print_json_error(type(error).__name__, message)
            sys.stderr.write(f"deltazoo: {message}\n")
            raise typer.Exit(USER_ERROR) from error

    return run


def _name_option(message: str, command: Callable[..., object]) -> str:
    """Replace the field of a config that an option has set by the option: `TrainConfig: learning_rate` by `--lr`."""
    field = re.match(r"[A-Z]\w+: (?:[a-z_]+\.)*?([a-z_]\w*)(\.\d+)?(?= must be )", message)
    parameter = inspect.signature(command).parameters.get(field[1]) if field else None
    if field is None or parameter is None:
        return message
    _, option, *_ = get_args(parameter.annotation)
    # typer keeps the name of an annotated option where the default of one without an annotation is
    name = option.default if isinstance(option.default, str) else f"--{field[1].replace('_', '-')}"
    return f"{name}{message[field.end() :]}"


@contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """Print each warning about a configuration once, as a sentence on stderr; others as Python does.

    Not printed: what torch warns of about its own code, for example in a compilation.
    """
    from deltazoo.backends.io.errors import ConfigWarning

    printed: set[str] = set()
    with warnings.catch_warnings():
        default = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, ConfigWarning):
                default(message, category, *where, **more)
            elif str(message) not in printed:
                printed.add(str(message))
                sys.stderr.write(f"deltazoo: warning: {message}\n")

        warnings.showwarning = show
        warnings.simplefilter("always", ConfigWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module=_TORCH)
        yield


def user_error_message(error: Exception) -> str | None:
    """Return the message of a user error, or None for any other error."""
    from deltazoo.backends.io.errors import DeltazooError
    from deltazoo.backends.torch_ext.allocation import allocation_problem

    if isinstance(error, DeltazooError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        from deltazoo.backends.io.frozen_config import describe_errors

        return f"{error.title}: {describe_errors((), error)}"
    return allocation_problem(error)
