"""The house itself: what a wheel holds, what an import costs, what the public face is."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import deltazoo

ROOT = Path(deltazoo.__file__).resolve().parent
FLOORS = ("backends", "mixers", "blocks", "cli")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tree, out = tmp_path_factory.mktemp("tree") / "repo", tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs", "reports")
    shutil.copytree(ROOT, tree, ignore=skip)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_owns_the_one_name_deltazoo(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"deltazoo"}


def test_the_wheel_contains_every_module_preset_and_table(wheel_names: list[str]) -> None:
    kept = {".py", ".yaml", ".json", ".typed"}
    ours = {
        f"deltazoo/{path.relative_to(ROOT).as_posix()}"
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*")
        if path.suffix in kept and "__pycache__" not in path.parts
    }
    ours |= {"deltazoo/__init__.py", "deltazoo/py.typed"}
    assert sorted(ours - set(wheel_names)) == []
    assert not any(name.startswith("deltazoo/tests") for name in wheel_names)


def test_importing_adds_at_most_0_3_seconds_to_torch() -> None:
    code = (
        "import time, torch; start = time.process_time(); import deltazoo; "
        "from deltazoo import UpdateSpec, UpdateInputs, bind, update, explain, validate; "
        "print(time.process_time() - start)"
    )
    assert min(float(run(code)) for _ in range(3)) <= 0.3


def test_importing_brings_in_neither_triton_nor_transformers() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import deltazoo; "
        "from deltazoo import UpdateSpec, UpdateInputs, bind, update, StackSpec, MixerConfig; "
        "new = set(sys.modules) - before; "
        "print(sorted(n for n in new if n.partition('.')[0] in {'triton', 'transformers'}))"
    )
    assert run(code) == "[]"


def test_importing_registers_no_operator_and_reads_no_entry_point() -> None:
    code = "import sys, deltazoo; print([n for n in sys.modules if n.startswith('deltazoo.')])"
    assert run(code) == "[]"


@pytest.mark.parametrize("name", deltazoo.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    found = getattr(deltazoo, name)
    assert (found.__doc__ or "").strip(), f"{name} has no docstring"
    assert name in dir(deltazoo)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Updates'"):
        deltazoo.Updates  # noqa: B018


@pytest.mark.parametrize("floor", FLOORS)
def test_every_file_says_in_its_first_line_what_it_is(floor: str) -> None:
    for path in (ROOT / floor).rglob("*.py"):
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc and doc.splitlines()[0].endswith((".", ":")), f"{path} opens without a sentence"


@pytest.mark.parametrize("floor", FLOORS)
def test_no_file_is_longer_than_400_lines(floor: str) -> None:
    long = {str(path): n for path in (ROOT / floor).rglob("*.py") if (n := len(path.read_text().splitlines())) > 400}
    assert long == {}


def test_every_variant_stands_in_forty_lines() -> None:
    variants = ("linear_attention", "retnet", "mamba2", "gla", "deltanet", "gated_deltanet", "kda", "efla", "longhorn")
    lengths = {name: len((ROOT / "mixers" / f"{name}.py").read_text().splitlines()) for name in variants}
    assert {name: n for name, n in lengths.items() if n > 40} == {}
