"""Run the command in this process, and read what it printed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltazoo.cli import app


class Said:
    """What a command printed, and how it ended."""

    def __init__(self, arguments: tuple[object, ...]) -> None:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        self.out, self.err, self.code = result.stdout, result.stderr, result.exit_code

    @property
    def json(self) -> Any:
        """The document on stdout, which holds nothing else."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@pytest.fixture
def run() -> Callable[..., Said]:
    def run(*arguments: object) -> Said:
        return Said(arguments)

    return run


@pytest.fixture
def ok(run: Callable[..., Said]) -> Callable[..., Said]:
    """Run a command that must succeed."""

    def ok(*arguments: object) -> Said:
        said = run(*arguments)
        assert said.code == 0, said.err
        return said

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
