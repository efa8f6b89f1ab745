"""`deltazoo check MIXER`; test_bench.py has the checks of a file."""

from pathlib import Path

import pytest

from deltazoo.mixers.core import conformance

MODULE = """
from typing import ClassVar
from deltazoo import Place
from deltazoo.mixers import GLA, Mixer


class Cut(Mixer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def init_state(self, batch, capacity=None):
        return self.inner.init_state(batch)

    def forward(self, x, state=None, context=None):
        if context is not None and context.cu_seqlens is not None:
            raise ValueError("no packs")
        y, state, _ = self.inner(x, state, context)
        return y[..., :1], state


class CutGLA(GLA):
    name: ClassVar[str] = "cut_gla"

    def build(self, width, place=Place(), backend=None):
        return Cut(super().build(width, place, backend))
"""


@pytest.fixture(autouse=True)
def _four_properties(monkeypatch):
    chosen = ("decode", "packed", "shapes", "init_weights")
    monkeypatch.setattr(conformance, "PROPERTIES", {name: conformance.PROPERTIES[name] for name in chosen})


def test_a_registered_mixer_has_every_property(ok):
    result = ok("check", "gla")
    assert result.out.count("1e-09") == 4 and "0 failures in 4 checks of gla" in result.out


def test_failures_of_a_mixer_of_a_module_say_what_must_hold(run, tmp_path: Path, monkeypatch):
    (tmp_path / "cut.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    result = run("check", "cut:CutGLA")
    assert result.code == 1
    text = " ".join(result.out.split())
    assert "shapes: the relative error is inf, more than 1e-09. Outputs have the shape and dtype of x" in text
    assert "packed: Outputs of packed sequences equal those of each sequence alone. ValueError: no packs" in text
    assert "2 failures in 4 checks of cut:CutGLA" in text
    rows = run("check", "cut:CutGLA", "--json").json["results"]["default"]
    assert [row["name"] for row in rows if row["failure"]] == ["packed", "shapes"]
    assert rows[1]["error"] is None


def test_a_mixer_is_checked_on_a_cpu(run):
    result = run("check", "gla", "--device", "cuda")
    assert result.code == 2 and "device must be 'cpu' for a mixer, got 'cuda'" in result.err.replace('"', "'")
