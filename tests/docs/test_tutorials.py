"""The tutorials run: files are written, Python blocks are executed in order, commands are called."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import deltazoo
from deltazoo.cli import app

DOCS = Path(deltazoo.__file__).resolve().parent / "docs"
PAGES = ["start.md", "ecosystem.md", *sorted(f"tutorials/{path.name}" for path in (DOCS / "tutorials").glob("*.md"))]
KITS = ("tutorials/backend.md", "tutorials/mixer.md", "tutorials/recurrence.md")  # run a whole conformance kit
BLOCK = re.compile(r"^```(python|yaml|toml|console)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w.-]+\.(?:py|yaml|toml))\n")


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block that the test runs."""
    return BLOCK.findall((DOCS / page).read_text())


def call(command: str) -> None:
    """Call `deltazoo ...` in this process, and another program in its own."""
    program, *arguments = shlex.split(command)
    if program == "deltazoo":
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{command}: {result.output}"
    else:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.parametrize("page", [pytest.param(x, marks=[pytest.mark.graphs] * (x in KITS)) for x in PAGES])
def test_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in ("tutorials/from-transformers.md", "tutorials/in-transformers.md", "ecosystem.md"):
        pytest.importorskip("transformers", minversion="5.23", reason="the page needs transformers 5.23 or newer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": page}
    before = set(sys.modules)
    try:
        with torch.compiler.set_stance("force_eager"):
            for language, text in blocks(page):
                if file := FILE.match(text):
                    (tmp_path / file[1]).write_text(text)
                elif language == "python":
                    exec(compile(text, page, "exec"), namespace)
                elif language == "console":
                    for command in re.findall(r"^\$ (.*)$", text, flags=re.MULTILINE):
                        call(command)
    finally:
        for name in set(sys.modules) - before:  # a module of one page must not be imported by another
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
                del sys.modules[name]


def test_every_tutorial_runs_something() -> None:
    assert len(PAGES) == 13
    for page in PAGES:
        assert page == "tutorials/index.md" or any(language == "python" for language, _ in blocks(page)), page
