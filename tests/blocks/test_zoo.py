"""docs/zoo.md is the output of `deltazoo zoo`, and every mixer has an oracle."""

from pathlib import Path

import deltazoo
from deltazoo.blocks.inspect.zoo import ORACLES, zoo_entries, zoo_page


def without_backends(page: str) -> list[str]:
    """Remove the lines that depend on the backends installed on this machine."""
    return [line for line in page.splitlines() if not line.startswith("- backends:")]


def test_the_page_in_the_docs_is_up_to_date() -> None:
    written = Path(deltazoo.__file__).parent / "docs" / "zoo.md"
    assert without_backends(written.read_text()) == without_backends(zoo_page()), "run: deltazoo zoo > docs/zoo.md"


def test_every_mixer_has_an_oracle_and_a_backend() -> None:
    entries = zoo_entries()
    for entry in entries:
        assert entry.oracle, entry.name
        assert "compile" in entry.backends or entry.spec == "outside the update spec", entry.name
    assert {entry.name for entry in entries} == set(ORACLES)
