"""A file that names code as "module:Class" is refused, unless the caller trusts it."""

import hashlib
import json
import pickle

import pytest

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.blocks.checkpoints.folder import SETTINGS, STACK, load_model
from deltazoo.blocks.checkpoints.sharded import STATE, step_folder
from deltazoo.blocks.data.text import load_text
from deltazoo.blocks.generation.completion import load_for_completion
from deltazoo.blocks.inspect.show import details
from deltazoo.blocks.inspect.tuning import build_targets
from deltazoo.blocks.spec import document
from deltazoo.blocks.spec.assemble import assemble
from deltazoo.blocks.spec.stack_spec import LayerSpec, StackSpec
from deltazoo.blocks.training.config import TrainConfig
from deltazoo.blocks.training.tasks import resume, train
from deltazoo.mixers import GatedDeltaNet

MODULE = """
from pathlib import Path
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.mixers import GatedDeltaNet

Path({ran!r}).touch()


class Mixer(GatedDeltaNet):
    name = "plug_in"


class Backend(ReferenceBackend):
    name = "plug_in"
"""
STACK_FIELDS = {"width": 16, "depth": 2, "vocab": 256, "pattern": "a", "mlp": {"width": 16}}
MIXER = {"mixer": "gated_deltanet", "heads": 1}

# Each place in a stack file that can name code: the fields that differ from STACK_FIELDS, and the key in the message.
CODE_REFERENCES = {
    "a layer": ({"layers": {"a": {"mixer": "MODULE:Mixer"}}}, "layers.a.mixer"),
    "a layer with an MLP": ({"layers": {"a": {"mixer": {"mixer": "MODULE:Mixer"}}}}, "layers.a.mixer.mixer"),
    "a parallel branch": ({"layers": {"a": {"mixer": [MIXER, {"mixer": "MODULE:Mixer"}]}}}, "layers.a.mixer.1.mixer"),
    "a nested mixer": (
        {"layers": {"a": {"mixer": "mom", "memory": {"mixer": "MODULE:Mixer"}}}},
        "layers.a.memory.mixer",
    ),
    "the backend of a layer": ({"layers": {"a": {"mixer": MIXER, "backend": "MODULE:Backend"}}}, "layers.a.backend"),
    "the backend of the stack": ({"layers": {"a": MIXER}, "backend": "MODULE:Backend"}, "backend"),
    "the pattern": ({"pattern": "2*(gated_deltanet(heads=1) + MODULE:Mixer(heads=1))"}, "pattern"),
    "a branch in the pattern": ({"pattern": "gated_deltanet(heads=1) | MODULE:Mixer"}, "pattern"),
    "the rest of a pattern": ({"pattern": "gated_deltanet@[0] else MODULE:Mixer"}, "pattern"),
    "a spread layer": ({"pattern": "spread(MODULE:Mixer, 1) else gated_deltanet"}, "pattern"),
    "a field in the pattern": (
        {"pattern": "a(backend=MODULE:Backend)", "layers": {"a": {"mixer": MIXER, "mlp": "none"}}},
        "pattern.a.backend",
    ),
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that creates a file when its code runs."""
    name = f"untrusted_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(ran=str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def write(path, fields, module):
    text = json.dumps(STACK_FIELDS | fields).replace("MODULE", module)
    document.write(path, json.loads(text))
    return path


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize(("fields", "key"), CODE_REFERENCES.values(), ids=CODE_REFERENCES)
def test_code_named_in_a_stack_file_runs_only_with_trust(tmp_path, module, fields, key, suffix):
    path = write(tmp_path / f"stack{suffix}", fields, module)
    with pytest.raises(ConfigError) as caught:
        StackSpec.load(path)
    assert str(caught.value).startswith(f"{path}: {key}: ")
    assert f"run the code of module {module!r}; pass trust=True" in str(caught.value)
    assert not (tmp_path / "ran").exists()
    StackSpec.load(path, trust=True).build()
    assert (tmp_path / "ran").exists()


def test_every_reader_of_stack_files_refuses_code(tmp_path, module):
    path = str(write(tmp_path / "stack.yaml", {"pattern": "MODULE:Mixer"}, module))
    readers = [
        lambda trust: assemble(path, {"depth": 2}, trust),
        lambda trust: details(path, trust=trust),
        lambda trust: build_targets(path, [], [], ["bfloat16"], (1, 8), trust),
    ]
    for read in readers:
        with pytest.raises(ConfigError, match="trust=True"):
            read(False)
    assert not (tmp_path / "ran").exists()
    for read in readers:
        read(True)


def test_code_passed_in_python_needs_no_trust(module):
    mixer = {"mixer": f"{module}:Mixer"}
    spec = StackSpec(**STACK_FIELDS | {"pattern": f"{module}:Mixer + a", "layers": {"a": mixer}})
    assert spec == assemble(None, STACK_FIELDS | {"pattern": f"a + {module}:Mixer", "layers": {"a": mixer}})
    assert LayerSpec(mixer=mixer).mixers[0].name == "plug_in"


def test_a_layer_name_with_a_colon_is_not_code(tmp_path):
    path = write(tmp_path / "stack.yaml", {"pattern": "my:gdn", "layers": {"my:gdn": MIXER}}, "")
    assert StackSpec.load(path).expand()[0].mixer == GatedDeltaNet(heads=1)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("nine green bottles hanging on the wall\n" * 20)
    return load_text(tmp_path / "text.txt")


CONFIG = TrainConfig(
    steps=2, batch={"rows": 1, "length": 4}, evaluation={"batches": 1}, backend="reference", compile=False
)


def test_a_checkpoint_whose_stack_names_code_is_refused(tmp_path, module, text):
    spec = StackSpec(**STACK_FIELDS | {"pattern": f"{module}:Mixer(heads=1)"})
    folder = tmp_path / "run"
    train(spec, folder, text, CONFIG, until=1)
    for read in (load_model, load_for_completion, resume):
        with pytest.raises(ConfigError, match=rf"{STACK}: pattern: mixer '{module}:Mixer' would import"):
            read(folder)
    assert load_model(folder, trust=True).spec == load_for_completion(folder, trust=True).spec == spec
    assert resume(folder, text, trust=True).points[-1].step == 2


def test_a_checkpoint_whose_settings_name_code_is_refused(tmp_path, module, text):
    spec, folder = StackSpec(**STACK_FIELDS | {"layers": {"a": MIXER}}), tmp_path / "run"
    train(spec, folder, text, CONFIG.model_copy(update={"backend": f"{module}:Backend"}), until=1)
    with pytest.raises(ConfigError, match=rf"{SETTINGS}: train\.backend: backend '{module}:Backend' would import"):
        resume(folder, text)
    assert resume(folder, text, trust=True).points[-1].step == 2


class Payload:
    """An object whose unpickling calls a function."""

    def __reduce__(self):
        return ReferenceBackend, ()


def test_the_tensors_of_a_checkpoint_run_no_code_even_with_trust(tmp_path, text):
    spec, folder = StackSpec(**STACK_FIELDS | {"layers": {"a": MIXER}}), tmp_path / "run"
    train(spec, folder, text, CONFIG, until=1)
    file = step_folder(folder, 1) / ".metadata"
    file.write_bytes(pickle.dumps(Payload()))
    lines = (step_folder(folder, 1) / STATE).read_text().splitlines()
    state = json.loads(lines[1])
    state["files"][".metadata"] = [file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()]
    text = json.dumps(state)
    digest = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()})
    (step_folder(folder, 1) / STATE).write_text(f"{digest}\n{text}\n")
    with pytest.raises(ConfigError, match=r"metadata cannot be read: .*it names deltazoo.*ReferenceBackend"):
        load_model(folder, trust=True)
