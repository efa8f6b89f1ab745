"""README's table of kernels is the one computed from the plans, and its families are those of the kernels."""

import sys
from pathlib import Path

import deltazoo

ROOT = Path(deltazoo.__file__).resolve().parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import kernel_table  # noqa: E402


def test_readme_has_the_kernels_of_the_plans() -> None:
    readme = (ROOT / "README.md").read_text()
    expected = kernel_table.insert(readme, kernel_table.summary(kernel_table.all_mixers()))
    assert readme == expected, "run: python docs/_ext/kernel_table.py"


def test_family_of_some_mixers() -> None:
    families = {"gated_deltanet": "hopper", "mamba": "element", "gsa": "mixed", "attention": "none"}
    assert {name: kernel_table.mixer_kernels(name).family for name in families} == families
