"""The standard streams: closed, full, broken, or without Unicode."""

import errno
import io
import json
import os
import sys
from typing import Any

import typer

_OUTPUT_FAILED = 2  # exit code


def run(app: typer.Typer) -> int:
    """Run the command line, and return the exit code.

    A reader that closes the pipe, such as `head`, ends the command silently. A full disk is one sentence on stderr. A
    character that the encoding of a stream lacks is printed as an escape sequence. With --json, an error in the options
    is a JSON document.
    """
    if sys.stderr is None:
        sys.stderr = io.StringIO()  # discarded
    if sys.stdout is None:
        sys.stderr.write("deltazoo: cannot write to stdout: it is closed\n")
        return _OUTPUT_FAILED
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code = _exit_code(app)
    failed = output_failed()
    return code if failed is None else failed


def output_failed(probe: str = "") -> int | None:
    """Flush stdout. If that fails, report the reason, unless the reader is gone, and return the exit code.

    Args: probe: whitespace to write first. After a failed write the buffer may be empty, and flushing it succeeds.
    """
    try:
        sys.stdout.write(probe)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes stdout again when it exits, and would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 1
        sys.stderr.write(f"deltazoo: cannot write to stdout: {error.strerror}\n")
        return _OUTPUT_FAILED
    return None


def print_json_error(kind: str, message: str) -> None:
    """Print an error as the one document on stdout of a command with --json."""
    sys.stdout.write(json.dumps({"error": {"type": kind, "message": message}}, indent=2) + "\n")


def _exit_code(app: typer.Typer) -> int:
    as_json = "--json" in sys.argv[1:]
    try:
        result: Any = app(prog_name="deltazoo", standalone_mode=not as_json)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except typer.Abort:
        return 1
    except OSError as error:
        failed = output_failed(probe="\n") if error.filename is None else None
        if failed is None:
            raise
        return failed
    except Exception as error:  # typer's usage errors have no common public base class
        describe = getattr(error, "format_message", None)
        if not as_json or describe is None:
            raise
        print_json_error("UsageError", describe())
        sys.stderr.write(f"deltazoo: {describe()}\n")
        return int(getattr(error, "exit_code", _OUTPUT_FAILED))
    return result if isinstance(result, int) else 0
