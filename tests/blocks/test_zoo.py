"""The page of the zoo is what the command prints, and leaves out nobody."""

from pathlib import Path

import deltazoo
from deltazoo.blocks.inspect import zoo


def without_backends(page: str) -> list[str]:
    """What is installed beside torch differs from machine to machine."""
    return [line for line in page.splitlines() if not line.startswith("- backends:")]


def test_the_page_in_the_docs_is_what_the_command_prints() -> None:
    written = Path(deltazoo.__file__).parent / "docs" / "zoo.md"
    assert without_backends(written.read_text()) == without_backends(zoo.page()), "run: deltazoo zoo > docs/zoo.md"


def test_every_mixer_has_an_oracle_and_a_backend() -> None:
    for animal in zoo.zoo():
        assert animal.oracle, animal.name
        assert "compile" in animal.backends or animal.spec == "outside the update spec", animal.name
    assert {animal.name for animal in zoo.zoo()} == set(zoo.ORACLES)
