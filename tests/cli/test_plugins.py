"""Broken plug-ins: one sentence each in `doctor`, and every other mixer and backend keeps working."""

import sys
from types import SimpleNamespace

import pytest
import torch

from deltazoo import UpdateInputs, UpdateSpec, update
from deltazoo.backends.io.errors import UnsupportedError
from deltazoo.backends.update import registry

MODULE = """
from typing import ClassVar
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.mixers import GatedDeltaNet
from deltazoo.mixers.core.mixer import Mixer, MixerConfig

class Fine(GatedDeltaNet):
    name: ClassVar[str] = "fine"

class Misnamed(GatedDeltaNet):
    name: ClassVar[str] = "another"

class FailingSpec(GatedDeltaNet):
    name: ClassVar[str] = "failing_spec"
    def spec(self):
        raise ZeroDivisionError("no spec")

class FailingBuild(GatedDeltaNet):
    name: ClassVar[str] = "failing_build"
    def build(self, width, place=None, backend=None):
        raise ZeroDivisionError("no module")

class Text(GatedDeltaNet):
    name: ClassVar[str] = "text"
    def build(self, *args, **kwargs):
        mixer = super().build(*args, **kwargs)
        mixer.no_weight_decay = "A_log"
        return mixer

class TextBackend(ReferenceBackend):
    name = "text_backend"
    def unsupported(self, spec, meta):
        return "not today"

def number():
    return 3
"""

MIXERS = {
    "fine": ("Fine", None),
    "misnamed": ("Misnamed", "its entry point and its attribute `name` must be equal, got 'misnamed' and 'another'"),
    "failing_spec": ("FailingSpec", "no spec"),
    "failing_build": ("FailingBuild", "`build` failed: ZeroDivisionError: no module"),
    "text": ("Text", "DeltaMixer.no_weight_decay must be a tuple of names, got 'A_log'"),
    "no_mixer": ("number", "must be a subclass of deltazoo.MixerConfig"),
    "missing": ("NoSuchClass", "cannot be loaded: AttributeError"),
    "kda": ("Fine", "mixer 'kda' of zoo-plugin 1.5 is ignored, because deltazoo has a mixer of this name"),
}
BACKENDS = {
    "text_backend": ("TextBackend", "`unsupported` must return a list of sentences, got 'not today'"),
    "compile": ("TextBackend", "backend 'compile' of zoo-plugin 1.5 is ignored"),
    "exits": ("zoo_exits:Mine", "SystemExit: 3"),
}


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Install a distribution with all of these entry points for one test."""
    (tmp_path / "zoo_plugins.py").write_text(MODULE)
    (tmp_path / "zoo_exits.py").write_text("raise SystemExit(3)")
    folder = tmp_path / "zoo_plugin-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-plugin\nVersion: 1.5\n")
    lines = []
    for group, points in ((registry.MIXERS, MIXERS), (registry.BACKENDS, BACKENDS)):
        lines.append(f"[{group}]")
        for name, (path, _) in points.items():
            lines.append(f"{name} = {path if ':' in path else f'zoo_plugins:{path}'}")
    (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_loaded", SimpleNamespace())
    registry.refresh()
    yield
    monkeypatch.undo()
    registry.refresh()
    for module in ("zoo_plugins", "zoo_exits"):
        sys.modules.pop(module, None)


def test_doctor_reports_each_problem_in_one_sentence(plugins, run):
    result = run("doctor", "--json")
    problems = [problem for problem in result.json["problems"] if "zoo-plugin" in problem]
    assert result.code == 1
    expected = [message for _, message in [*MIXERS.values(), *BACKENDS.values()] if message is not None]
    for message in expected:
        assert sum(message in problem for problem in problems) == 1, (message, problems)
    assert len(problems) == len(expected), problems
    assert not any("\n" in problem for problem in problems)


def test_list_and_show_work_beside_broken_plugins(plugins, ok, run):
    names = [mixer["name"] for mixer in ok("list", "--json").json["mixers"]]
    assert {*MIXERS, "gated_deltanet"} <= set(names)
    assert "deltazoo" in ok("show", "kda", "--json").json["owner"]
    assert ok("show", "fine", "--json").json["owner"] == "zoo-plugin 1.5"
    takes = ok("show", "reference", "--json").json["takes"]
    assert {"kda", "fine"} <= set(takes)
    assert not {"failing_spec", "no_mixer", "missing"} & set(takes)
    verdicts = {row["backend"]: row for row in ok("show", "kda", "--json").json["backends"]}
    assert verdicts["compile"]["chosen"]
    assert "must return a list of sentences" in verdicts["text_backend"]["reasons"][0]
    ok("schema")
    ok("build", "gated-deltanet-small")


def test_a_built_in_name_keeps_its_class(plugins):
    assert registry.load(registry.MIXERS, "kda").__module__ == "deltazoo.mixers.kda"
    assert registry.resolve("compile").unsupported.__func__.__module__ == "deltazoo.backends.compile.backend"


@pytest.mark.parametrize("name", ["failing_spec", "failing_build", "no_mixer", "missing"])
def test_a_broken_mixer_is_a_sentence_in_show(plugins, run, name):
    result = run("show", name)
    assert result.code == 2
    assert MIXERS[name][1].removeprefix("`build` failed: ") in result.err
    assert result.err.count("\n") == 1


def test_reasons_as_text_are_printed_as_text(plugins):
    x = torch.zeros(1, 2, 1, 16)
    with pytest.raises(UnsupportedError, match="backend 'text_backend' cannot compute this update: not today"):
        update(UpdateSpec(), UpdateInputs(q=x, k=x, v=x), backend="text_backend")
