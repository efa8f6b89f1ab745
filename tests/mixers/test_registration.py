"""A mixer is registered in one place, its entry point. Run this file to regenerate mixers/__init__.pyi."""

import subprocess
import sys
from pathlib import Path

import pytest

import deltazoo
from deltazoo import mixers

STUB = Path(mixers.__file__).with_suffix(".pyi")
COMMAND = "python tests/mixers/test_registration.py"


def stub() -> str:
    """Static re-exports of every attribute of `deltazoo.mixers`."""
    lines = []
    for name, location in mixers._locations().items():
        module, _, attribute = location.partition(":")
        if not attribute:
            module, _, attribute = module.rpartition(".")
        lines.append(f"from {module} import {attribute} as {name}")
    docstring = f'"""Generated from the entry points in pyproject.toml by `{COMMAND}`."""'
    return "\n".join([docstring, "# ruff: noqa: I001", "", *sorted(lines), ""])


def test_the_stub_lists_every_registered_mixer() -> None:
    assert STUB.read_text() == stub(), f"mixers/__init__.pyi is stale: run `{COMMAND}`"


def test_every_name_can_be_imported() -> None:
    for name in dir(mixers):
        value = getattr(mixers, name)
        assert getattr(value, "__module__", value.__name__).startswith("deltazoo.mixers.")
    assert {"GatedDeltaNet", "GatedEFLA", "Place", "conformance", "parse"} <= set(dir(mixers))
    assert deltazoo.MixerConfig is mixers.MixerConfig
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        mixers.Nothing  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, deltazoo.mixers; dir(deltazoo.mixers); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    STUB.write_text(stub())
