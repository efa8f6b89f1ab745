"""Fixtures that run a command in this process and capture its output."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltazoo.cli import app


class Result:
    """The output and the exit code of a command."""

    def __init__(self, arguments: tuple[object, ...]) -> None:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        self.out, self.err, self.code = result.stdout, result.stderr, result.exit_code

    @property
    def json(self) -> Any:
        """The JSON document on stdout, which must contain nothing else."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as to a pipe, without wrapping: some test runners set COLUMNS for their workers."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run a command."""

    def run(*arguments: object) -> Result:
        return Result(arguments)

    return run


@pytest.fixture
def ok(run: Callable[..., Result]) -> Callable[..., Result]:
    """Run a command that must succeed."""

    def ok(*arguments: object) -> Result:
        result = run(*arguments)
        assert result.code == 0, result.err
        return result

    return ok


@pytest.fixture(scope="session")
def stack_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stack") / "tiny.yaml"
    path.write_text(
        "{width: 16, depth: 2, vocab: 256, mlp: {width: 16},\n"
        " pattern: 'gated_deltanet(heads=1) + sliding_window(heads=1, window=4)'}\n"
    )
    return path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "bottles.txt"
    path.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(300)))
    return path
