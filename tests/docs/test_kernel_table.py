"""The families of the site's table of kernels are those of the kernels."""

import sys
from pathlib import Path

import deltazoo

sys.path.insert(0, str(Path(deltazoo.__file__).resolve().parent / "docs" / "_ext"))

import kernel_table

FAMILIES = {"gated_deltanet": "hopper", "mamba": "element", "gsa": "mixed", "attention": "none"}


def test_family_of_some_mixers() -> None:
    mixers = [kernel_table.mixer_kernels(name) for name in FAMILIES]
    assert {mixer.name: mixer.family for mixer in mixers} == FAMILIES
    assert [row[:2] for row in kernel_table.rows(mixers)] == [
        ["`gated_deltanet`", "hopper"],
        ["`gsa`", "mixed"],
        ["`mamba`", "element"],
        ["`attention`", "none"],
    ]
