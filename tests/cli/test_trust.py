"""Files that name module:Class need --trust; names typed on the command line do not."""

import pytest

from deltazoo.blocks.spec import document
from deltazoo.blocks.spec.stack_spec import StackSpec

PLUG_IN = """
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.mixers import GatedDeltaNet


class Mixer(GatedDeltaNet):
    name = "cli_plug_in"


class Backend(ReferenceBackend):
    name = "cli_plug_in"
"""
QUICK = ("--steps", 1, "--length", 4, "--batch", 1, "--backend", "reference", "--no-compile")
SIZES = ("--width", 16, "--depth", 1, "--vocab", 256)


@pytest.fixture(autouse=True)
def plug_in(tmp_path, monkeypatch):
    (tmp_path / "cli_trust_plug_in.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def stack(tmp_path):
    path = tmp_path / "stack.yaml"
    pattern = "cli_trust_plug_in:Mixer(heads=1)"
    document.write(path, {"width": 16, "depth": 1, "vocab": 256, "mlp": {"width": 16}, "pattern": pattern})
    return path


def assert_refused(result):
    assert result.code == 2
    assert "'cli_trust_plug_in:Mixer' would import and run the code" in result.err
    assert "--trust" in result.err


def test_build_and_show_refuse_a_file_without_trust(run, ok, stack):
    for command in ("build", "show"):
        assert_refused(run(command, stack))
        assert "cli_plug_in" in ok(command, stack, "--trust").out
    assert_refused(run("tune", stack, "--dry-run"))


def test_train_resume_and_generate_refuse_a_checkpoint_without_trust(run, ok, stack, text_file, tmp_path):
    folder = tmp_path / "run"
    train = ("train", stack, "--text", text_file, "--out", folder, *QUICK)
    assert_refused(run(*train))
    ok(*train, "--trust")
    assert_refused(run("train", "--resume", folder))
    ok("train", "--resume", folder, "--trust")
    assert_refused(run("generate", folder))
    ok("generate", folder, "--max-tokens", 1, "--trust")


def test_names_typed_on_the_command_line_are_trusted(ok, stack_file):
    pattern = "cli_trust_plug_in:Mixer(heads=1)"
    backend = "cli_trust_plug_in:Backend"
    built = ok("build", "--pattern", pattern, *SIZES, "--backend", backend, "--json").json
    assert built["description"]["layers"][0]["mixer"] == "cli_plug_in"
    assert StackSpec(**built["stack"]).backend == backend
    assert ok("build", stack_file, "--pattern", pattern, "--json").json["stack"]["pattern"] == pattern
    assert ok("show", "cli_trust_plug_in:Mixer", "--json").json["kind"] == "mixer"
    assert ok("show", backend, "--json").json["kind"] == "backend"
    bench = ("bench", "--shape", "plain", "--rounds", 3, "--seconds", 0.1, "--directions", "forward")
    assert ok(*bench, "--backends", backend, "--json").json["rows"][0]["backend"] == backend
