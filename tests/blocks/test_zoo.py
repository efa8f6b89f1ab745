"""docs/zoo.md is the output of `deltazoo zoo`, and every mixer has an oracle."""

from pathlib import Path

import pytest

import deltazoo
from deltazoo.blocks.inspect.zoo import ZooEntry, zoo_entries, zoo_page
from deltazoo.mixers.core.config import config_class


@pytest.fixture(scope="module")
def entries() -> list[ZooEntry]:
    return zoo_entries()


def without_backends(page: str) -> list[str]:
    """Remove the lines that depend on the backends installed on this machine."""
    return [line for line in page.splitlines() if not line.startswith("- backends:")]


def test_the_page_in_the_docs_is_up_to_date(entries: list[ZooEntry]) -> None:
    written = Path(deltazoo.__file__).parent / "docs" / "zoo.md"
    page = zoo_page(entries)
    assert without_backends(written.read_text()) == without_backends(page), "run: deltazoo zoo > docs/zoo.md"


def test_every_mixer_has_an_oracle_and_a_backend(entries: list[ZooEntry]) -> None:
    for entry in entries:
        assert vars(config_class(entry.name)).get("oracle"), f"{entry.name} must set `oracle`, and not inherit it"
        assert {"compile", "reference"} <= {*entry.backends} or entry.spec == "outside the update spec", entry.name
