"""Standard streams that are closed, full, broken or ASCII: a sentence or silence, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from deltazoo.cli import main; main()"]


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of sh in which "$@" is the command line of deltazoo."""
    return subprocess.run(
        ["sh", "-c", command, "sh", *COMMAND], capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize("arguments", ["list mixers", "--version"])
def test_a_full_stdout_is_one_sentence(arguments: str) -> None:
    result = shell(f'"$@" {arguments} > /dev/full')
    assert result.stderr == "deltazoo: cannot write to stdout: No space left on device\n"
    assert result.returncode == 2


@pytest.mark.skipif(sys.platform == "win32", reason="sh")
def test_a_closed_stdout_is_one_sentence() -> None:
    result = shell('"$@" --version >&-')
    assert result.stderr == "deltazoo: cannot write to stdout: it is closed\n"
    assert result.returncode == 2


@pytest.mark.skipif(sys.platform == "win32", reason="sh")
@pytest.mark.parametrize("arguments", ["list mixers", "schema --json"])
def test_a_reader_that_stops_early_ends_the_command_silently(arguments: str) -> None:
    result = shell(f'"$@" {arguments} | true')
    assert result.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="sh")
def test_characters_that_the_terminal_lacks_are_escaped() -> None:
    code = "from deltazoo.cli import app, main; app.command('say')(lambda: print('S \\u2264 1')); main()"
    result = shell(f'"$1" -c "{code}" say', PYTHONIOENCODING="ascii")
    assert (result.stdout, result.stderr) == ("S \\u2264 1\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="sh")
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ("build nowhere --json", "UnknownNameError", "unknown preset 'nowhere'"),
        ("list --jsn --json", "UsageError", "No such option: --jsn"),
        ("build x --width wide --json", "UsageError", "'--width'"),
    ],
)
def test_with_json_an_error_is_a_json_document(arguments: str, kind: str, message: str) -> None:
    result = shell(f'"$@" {arguments}')
    error = json.loads(result.stdout)["error"]
    assert error["type"] == kind
    assert message in error["message"]
    assert result.stderr.startswith("deltazoo: ")
    assert result.returncode == 2
