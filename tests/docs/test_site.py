"""The documentation site: docstrings become reStructuredText; broken links and missing names are found.

`make docs` builds the site and checks it.
"""

import sys
from pathlib import Path

import pytest

import deltazoo

ROOT = Path(deltazoo.__file__).resolve().parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import check_links  # noqa: E402


def test_equation_and_arguments_of_a_docstring() -> None:
    pytest.importorskip("sphinx", reason="deltazoo[docs] is not installed")
    from docstrings import convert

    text = [
        "Compute S_t with `k_t`:",
        "",
        "    S_t = S_{t-1} + k_t v_t^T",
        "",
        "Args:",
        "    k, v: the |keys|,",
        "        here.",
    ]
    assert [line for line in convert(text) if line] == [
        r"Compute S\_t with ``k_t``:",
        ".. math::",
        r"    \begin{aligned}",
        r"    & S_{t} = S_{t - 1} + k_{t} v_{t}^{\top}",
        r"    \end{aligned}",
        ".. rubric:: Args",
        r"- ``k``, ``v``: the \|keys\|, here.",
    ]


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">1</a><a href="c.html">2</a><a href="#x">3</a></p>')
    (tmp_path / "b.html").write_text('<a href="a.html#x">1</a><a href="https://example.org/none">2</a>')
    assert list(check_links.broken_links(tmp_path)) == ["a.html: no element for b.html#y", "a.html: no file for c.html"]


def test_names_without_an_entry_are_found(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "deltazoo.html").write_text('<dt id="deltazoo.Present"></dt>')
    expected = ["api/deltazoo.html: no entry for Absent"]
    assert list(check_links.missing_names(tmp_path, ["Absent", "Present"])) == expected
