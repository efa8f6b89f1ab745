"""The package: contents of the wheel, cost of an import, public names, and limits on file length."""

import ast
import inspect
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from mutation_table import MUTATIONS

import deltazoo
from deltazoo.backends.update import registry
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.families.update import UpdateConfig

ROOT = Path(deltazoo.__file__).resolve().parent
LAYERS = ("backends", "mixers", "blocks", "cli")


def run(code: str) -> str:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tree, out = tmp_path_factory.mktemp("tree") / "repo", tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs", "reports")
    shutil.copytree(ROOT, tree, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    process = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_has_one_top_level_package(wheel_names: list[str]) -> None:
    top_level = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"deltazoo"}


def test_wheel_contains_every_module_preset_and_table(wheel_names: list[str]) -> None:
    suffixes = {".py", ".yaml", ".json", ".jsonl", ".typed"}
    expected = {
        f"deltazoo/{path.relative_to(ROOT).as_posix()}"
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }
    expected |= {"deltazoo/__init__.py", "deltazoo/py.typed"}
    assert sorted(expected - set(wheel_names)) == []
    assert not any(name.startswith("deltazoo/tests") for name in wheel_names)


def test_import_takes_at_most_a_fifth_of_that_of_torch() -> None:
    code = (
        "import time; before = time.process_time(); import torch; start = time.process_time(); import deltazoo; "
        "from deltazoo import UpdateSpec, UpdateInputs, bind, update, explain, validate; "
        "print((time.process_time() - start) / (start - before))"
    )
    assert any(float(run(code)) <= 0.2 for _ in range(3))


def test_import_does_not_import_triton_or_transformers() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import deltazoo; "
        "from deltazoo import UpdateSpec, UpdateInputs, bind, update, StackSpec, MixerConfig; "
        "new = set(sys.modules) - before; "
        "print(sorted(n for n in new if n.partition('.')[0] in {'triton', 'transformers'}))"
    )
    assert run(code) == "[]"


def test_import_loads_no_submodule() -> None:
    code = "import sys, deltazoo; print([n for n in sys.modules if n.startswith('deltazoo.')])"
    assert run(code) == "[]"


@pytest.mark.parametrize("name", deltazoo.__all__)
def test_public_name_resolves_and_has_a_docstring(name: str) -> None:
    assert (getattr(deltazoo, name).__doc__ or "").strip(), f"{name} has no docstring"
    assert name in dir(deltazoo)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Updates'"):
        deltazoo.Updates  # noqa: B018


@pytest.mark.parametrize("layer", LAYERS)
def test_every_file_starts_with_a_summary_line(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc and doc.splitlines()[0].endswith((".", ":")), f"{path} does not start with a one-line summary"


@pytest.mark.parametrize("layer", LAYERS)
def test_no_file_is_longer_than_400_lines(layer: str) -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in (ROOT / layer).rglob("*.py")}
    assert {path: n for path, n in lengths.items() if n > 400} == {}


def test_variants_have_at_most_40_lines() -> None:
    configs = [config_class(name) for name in registry.names(registry.MIXERS)]
    lengths = {c.__name__: len(inspect.getsourcelines(c)[0]) for c in configs if issubclass(c, UpdateConfig)}
    assert len(lengths) > 25
    assert {name: n for name, n in lengths.items() if n > 40} == {}


def test_the_lines_of_the_planted_bugs_exist() -> None:
    stale = [
        mutation.name
        for mutation in MUTATIONS
        if (ROOT / mutation.path).read_text(encoding="utf-8").count(mutation.old) != mutation.count
    ]
    assert stale == []
