"""Pages wrap at 100 columns, except for tables and code. Run this file to wrap them."""

from pathlib import Path

import pytest

import deltazoo
from deltazoo.backends.io.markdown_text import WIDTH, wrap_prose

ROOT = Path(deltazoo.__file__).resolve().parent
COMMAND = "python tests/docs/test_markdown.py"
WRITTEN = {"build", "dist", "reports", "runs"}  # by commands, see .gitignore
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in WRITTEN or part.startswith(".") for part in path.relative_to(ROOT).parts)
)

CASES = {
    "a paragraph": ("one two three four five\nsix", "one two three\nfour five six"),
    "short lines": ("one two\nthree four", "one two\nthree four"),
    "a list item": ("- one two three four\n  five\n- six", "- one two three\n  four five\n- six"),
    "a paragraph of a list item": ("1. one\n\n   two three four five", "1. one\n\n   two three\n   four five"),
    "a code span": ("one two `three four five`", "one two\n`three four five`"),
    "a marker": ("one twoo threee + four", "one twoo\nthreee + four"),
    "a long link": ("see [x](https://example.org/page)", "see\n[x](https://example.org/page)"),
    "a table": ("| one | two | three | four |\n|---|---|---|---|", "| one | two | three | four |\n|---|---|---|---|"),
    "fenced code": ("```python\none two three four five\n```", "```python\none two three four five\n```"),
    "indented code": ("one\n\n    one two three four five", "one\n\n    one two three four five"),
    "a heading": ("## one two three four five", "## one two three four five"),
}


@pytest.mark.parametrize(("text", "wrapped"), CASES.values(), ids=CASES)
def test_prose_is_wrapped_and_the_rest_stays(text: str, wrapped: str) -> None:
    assert wrap_prose(text, 15) == wrapped
    assert wrap_prose(wrapped, 15) == wrapped


def long_lines(text: str) -> list[str]:
    """Lines of prose that are too long and have more than a marker and one word, such as a link."""
    is_code, found = False, []
    for line in text.split("\n"):
        is_code ^= line.lstrip().startswith(("```", "~~~"))
        if len(line) > WIDTH and not is_code and not line.startswith(("|", "    ")) and len(line.split()) > 2:
            found.append(line)
    return found


def test_prose_wraps_at_100_columns() -> None:
    found = {str(path.relative_to(ROOT)): lines for path in PAGES if (lines := long_lines(path.read_text()))}
    assert found == {}, f"run `{COMMAND}`"


def test_the_changelog_has_at_most_twenty_lines_for_a_version() -> None:
    sections = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert sections
    for section in sections:
        version, *lines = section.split("\n")
        assert len([line for line in lines if line]) <= 20, version


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(wrap_prose(page.read_text()))
