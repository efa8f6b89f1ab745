"""The documentation site: docstrings become reStructuredText, broken links are found, public names have a page."""

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


def test_site_builds_without_warnings_and_has_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("pydata_sphinx_theme", reason="deltazoo[docs] is not installed")
    pytest.importorskip("myst_parser", reason="deltazoo[docs] is not installed")
    from sphinx.cmd.build import main

    arguments = ["-q", "-E", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    assert main([*arguments, str(ROOT / "docs"), str(tmp_path / "site")]) == 0
    assert list(check_links.broken_links(tmp_path / "site")) == []
    page = (tmp_path / "site" / "api" / "deltazoo.html").read_text()
    names = set(deltazoo.__all__) - {"conformance"}  # a module with a page of its own
    missing = sorted(name for name in names if f'id="deltazoo.{name}"' not in page)
    assert missing == []
