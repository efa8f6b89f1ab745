"""The main tasks in Python: train, resume, load, generate and evaluate, with public names only."""

import math

import pytest
import torch

import deltazoo
from deltazoo import Sampling, StackSpec, TrainConfig
from deltazoo.backends import CompileBackend, ConfigError, UnknownNameError
from deltazoo.blocks import generate_tokens, load_text, silent
from deltazoo.blocks.training.config import BatchConfig

SPEC = StackSpec(width=16, depth=1, vocab=256, pattern="gated_deltanet(heads=1)", mlp={"width": 16})
CONFIG = TrainConfig(
    steps=6,
    batch={"rows": 2, "length": 12},
    evaluation={"every": 3, "batches": 3},
    backend="reference",
    compile=False,
)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "bottles.txt"
    path.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(300)))
    return path


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, deltazoo.train(SPEC, folder, text_file, CONFIG)


def test_a_loaded_model_has_the_validation_figure_of_its_training(trained, text_file):
    folder, training = trained
    model = deltazoo.load(folder, backend="reference")
    evaluation = deltazoo.evaluate(model)  # by default on the held-out part of the run's text, with the run's windows
    assert evaluation.bits_per_byte == pytest.approx(training.validation_bits, rel=1e-5)
    assert evaluation.tokens == 72
    assert evaluation.source == training.source == str(text_file)
    assert evaluation == deltazoo.evaluate(model, text_file, length=12, batch=2, batches=3)
    assert evaluation.line().endswith(f"on 72 held-out bytes of {text_file} (the text of the run)")


def test_evaluation_says_that_a_text_is_not_that_of_the_run(trained, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().upper())
    model = deltazoo.load(trained[0], backend="reference")
    assert deltazoo.evaluate(model, other).line().endswith(f"{other} (another text than that of the run)")
    new = deltazoo.evaluate(SPEC.build("reference"), text_file, length=12)
    assert new.is_text_of_run is None
    assert new.line().endswith(str(text_file))
    folder = tmp_path / "run"
    deltazoo.train(SPEC, folder, other, CONFIG, until=1)
    other.write_text("something else\n" * 100)
    with pytest.raises(ConfigError, match=rf"^{other} has changed since the run was trained on it$"):
        deltazoo.evaluate(deltazoo.load(folder))
    with pytest.raises(ConfigError, match=rf"^{other} has changed since the run was trained on it$"):
        deltazoo.resume(folder)


def test_a_resumed_run_keeps_the_new_path_of_its_text(text_file, tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes(text_file.read_bytes())
    deltazoo.train(SPEC, tmp_path / "run", text, CONFIG, until=1)
    moved = text.rename(tmp_path / "b.txt")
    deltazoo.resume(tmp_path / "run", moved, until=2)
    assert deltazoo.resume(tmp_path / "run").source == str(moved)
    assert deltazoo.evaluate(deltazoo.load(tmp_path / "run")).is_text_of_run


def test_evaluation_of_zero_batches_covers_the_validation_part(trained, text_file):
    model, text = deltazoo.load(trained[0], backend="reference"), load_text(text_file)
    evaluation = deltazoo.evaluate(model, text, length=100, batch=7, batches=0)
    bits = []
    for start in range(0, len(text.validation) - 100, 100):
        window = text.validation[start : start + 101].long()[None]
        with torch.no_grad():
            logits, _ = model(window[:, :-1])
        bits.append(float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:])) / math.log(2))
    assert evaluation.tokens == 100 * len(bits)
    assert evaluation.bits_per_byte == pytest.approx(sum(bits) / len(bits), rel=1e-5)
    assert not model.training


def test_evaluation_restores_the_mode_of_the_model_and_refuses_a_small_vocabulary(trained, text_file):
    model = deltazoo.load(trained[0], backend="reference").train()
    deltazoo.evaluate(model, text_file, length=12)
    assert model.training
    small = StackSpec(width=16, depth=1, vocab=100, pattern="gated_deltanet(heads=1)").build()
    with pytest.raises(ConfigError, match="vocab must be at least 256 to evaluate on bytes, got 100"):
        deltazoo.evaluate(small, text_file)
    with pytest.raises(deltazoo.DeltazooError, match="batches must be"):
        deltazoo.evaluate(model, text_file, batches=-1)


def test_evaluation_refuses_weights_that_are_nan(trained, text_file):
    model = deltazoo.load(trained[0], backend="reference")
    with torch.no_grad():
        model.stack.norm.weight[3] = float("nan")
    with pytest.raises(deltazoo.DeltazooError, match="the cross entropy must be finite, got nan: check the model's"):
        deltazoo.evaluate(model, text_file, length=12)


def test_training_in_two_parts_equals_training_at_once(trained, text_file, tmp_path):
    deltazoo.train(SPEC, tmp_path / "half", load_text(text_file), CONFIG, until=3)
    resumed = deltazoo.resume(tmp_path / "half")
    assert resumed.points == [
        point.model_copy(update={name: getattr(actual, name) for name in ("tokens_per_second", "data_share", "time")})
        for point, actual in zip(trained[1].points, resumed.points, strict=True)
    ]


def test_a_stack_file_and_a_preset_name_train(text_file, tmp_path):
    SPEC.save(tmp_path / "stack.yaml")
    one_step = CONFIG.model_copy(update={"steps": 1})
    deltazoo.train(tmp_path / "stack.yaml", tmp_path / "file", text_file, one_step)
    assert deltazoo.load(tmp_path / "file").spec == SPEC
    with pytest.raises(UnknownNameError, match="did you mean 'gated-deltanet-small'"):
        deltazoo.train("gated-deltanet-smal", tmp_path / "preset", text_file, one_step)


def test_generate_continues_a_prompt_with_the_sampling(trained):
    model, pieces = deltazoo.load(trained[0]), []
    completion = deltazoo.generate(model, "12 gr", Sampling(max_tokens=9, seed=3), pieces.append)
    assert completion.bytes == 9
    assert "".join(pieces) == completion.text
    assert deltazoo.generate(model, "12 gr", Sampling(max_tokens=9, seed=3)).text == completion.text


def backend_of(model):
    update = next(module for module in model.modules() if hasattr(module, "meta"))
    return update.bound.backend_for(update.meta("cpu", torch.float32))


def test_a_model_loaded_on_the_cpu_runs_without_compiling(trained):
    backend = backend_of(deltazoo.load(trained[0]))
    assert isinstance(backend, CompileBackend)
    assert not backend.compiled


def test_a_backend_that_the_stack_or_the_caller_names_is_kept(text_file, tmp_path):
    config = CONFIG.model_copy(update={"steps": 1, "backend": None})
    spec = StackSpec(**{**SPEC.model_dump(), "backend": "reference"})
    deltazoo.train(spec, tmp_path, text_file, config)
    assert backend_of(deltazoo.load(tmp_path)).name == "reference"
    assert backend_of(deltazoo.load(tmp_path, backend="compile")).compiled
    with deltazoo.use_backend("reference"):
        assert backend_of(deltazoo.load(tmp_path)).name == "reference"


def test_training_without_compile_compiles_nothing(text_file, tmp_path, monkeypatch):
    def compile(*args, **kwargs):
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", compile)
    config = CONFIG.model_copy(update={"backend": None})
    training = deltazoo.train(SPEC, tmp_path, text_file, config)
    assert training.points[-1].step == 6
    assert deltazoo.generate(deltazoo.load(tmp_path), "1 gr", Sampling(max_tokens=3)).bytes == 3
    assert deltazoo.resume(tmp_path).points == training.points


def test_presets_lists_what_preset_builds(tmp_path):
    assert {"gated-deltanet-small", "qwen3-next-tiny"} <= set(deltazoo.presets())
    assert deltazoo.preset("qwen3-next-tiny") == StackSpec.load("qwen3-next-tiny")
    with pytest.raises(ConfigError, match=r"deltazoo.preset\('qwen3-next-tiny'\).build\(\)"):
        deltazoo.load("qwen3-next-tiny")


def test_training_reports_its_progress(text_file, tmp_path):
    reports = []
    one_step = CONFIG.model_copy(update={"steps": 1})
    deltazoo.train(SPEC, tmp_path / "a", text_file, one_step, progress=lambda *report: reports.append(report))
    assert [report[:3] for report in reports] == [("training", 0, 1), ("training", 1, 1)]
    assert silent("training", 0, 1) is None


def test_progress_is_printed_on_stderr_every_ten_seconds(text_file, tmp_path, monkeypatch, capsys):
    seconds = iter(range(0, 1000, 6))
    monkeypatch.setattr("deltazoo.backends.io.progress.time.monotonic", lambda: float(next(seconds)))
    deltazoo.train(SPEC, tmp_path / "a", text_file, CONFIG)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:2] for line in lines] == [["training:", f"{step}/6"] for step in (1, 3, 5)]


def test_too_large_sizes_are_named(trained, text_file, tmp_path):
    huge = 10**13
    with pytest.raises(ConfigError, match=rf"not enough memory.*; lower one of batch={huge}, length=12$"):
        deltazoo.train(
            SPEC, tmp_path, text_file, CONFIG.model_copy(update={"batch": BatchConfig(rows=huge, length=12)})
        )
    with pytest.raises(ConfigError, match=rf"not enough memory.*; lower one of batch={huge}, length=12$"):
        deltazoo.evaluate(deltazoo.load(trained[0]), text_file, length=12, batch=huge)
    attention = StackSpec(width=16, depth=1, vocab=256, pattern="attention(heads=1)").build()
    with pytest.raises(ConfigError, match=rf"not enough memory.*; lower one of max_tokens={huge}$"):
        deltazoo.generate(attention, "ab", Sampling(max_tokens=huge), compile=False)


def test_a_text_that_cannot_be_read_is_reported(trained, text_file, tmp_path):
    missing = tmp_path / "gone.txt"
    sentence = rf"^cannot read {missing}: No such file or directory"
    with pytest.raises(ConfigError, match=f"{sentence}$"):
        deltazoo.train(SPEC, tmp_path / "run", missing, CONFIG)
    with pytest.raises(ConfigError, match=f"{sentence}$"):
        deltazoo.evaluate(deltazoo.load(trained[0]), missing)
    missing.write_bytes(text_file.read_bytes())
    deltazoo.train(SPEC, tmp_path / "run", missing, CONFIG, until=1)
    missing.unlink()
    with pytest.raises(
        ConfigError, match=rf"{sentence}; \S*/run/train\.yaml names this text: pass its new path as text"
    ):
        deltazoo.resume(tmp_path / "run")
    assert deltazoo.resume(tmp_path / "run", text_file, until=2).points[-1].step == 2


WRONG_TYPES = {
    "generate with a folder": (lambda model, folder: deltazoo.generate("r2", "ab"), "model must be .*, got 'r2'"),
    "generate_tokens with a folder": (lambda *_: generate_tokens("r2", torch.ones(1, 2).long()), "model must be"),
    "evaluate a number": (lambda model, folder: deltazoo.evaluate(3), "model must be a LanguageModel, .*, got 3"),
    "evaluate a layer": (
        lambda model, folder: deltazoo.evaluate(torch.nn.Linear(2, 2)),
        "model must be .*, got Linear",
    ),
    "evaluate on a number": (lambda model, folder: deltazoo.evaluate(model, 3), "text must be a path, .*, got 3"),
    "prompt of bytes": (lambda model, folder: deltazoo.generate(model, b"ab"), "prompt must be text, got b'ab'"),
    "sampling": (lambda model, folder: deltazoo.generate(model, "ab", 3), "sampling must be a Sampling or None, got 3"),
    "sampling of tokens": (
        lambda model, folder: generate_tokens(model, torch.ones(1, 2).long(), 3),
        "sampling must be a Sampling or None, got 3",
    ),
    "config": (
        lambda _, folder: deltazoo.train(SPEC, folder / "x", config={"steps": 1}),
        "config must be a TrainConfig",
    ),
    "folder to train in": (lambda *_: deltazoo.train(SPEC, 3), "folder must be the path of a checkpoint folder, got 3"),
    "stack": (lambda model, folder: deltazoo.train(3, folder / "x"), "stack must be a StackSpec, a path or .*, got 3"),
    "folder to resume": (lambda *_: deltazoo.resume(3), "folder must be the path of a checkpoint folder, got 3"),
    "changes": (lambda model, folder: deltazoo.resume(folder, changes=3), "changes must be a mapping .*, got 3"),
    "folder to load": (lambda *_: deltazoo.load(3), "folder must be the path of a checkpoint folder, got 3"),
    "preset": (lambda *_: deltazoo.preset(3), "name must be the name of a preset, got 3"),
    "source of a stack": (lambda *_: StackSpec.load(3), "source must be a path or the name of a preset, got 3"),
}


@pytest.mark.parametrize(("call", "message"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_an_argument_of_a_wrong_type_is_named(trained, call, message):
    with pytest.raises(deltazoo.DeltazooError, match=message):
        call(deltazoo.load(trained[0]), trained[0])


def test_a_compiled_model_is_evaluated(trained, text_file):
    model = deltazoo.load(trained[0], backend="reference")
    compiled = torch.compile(model, backend="eager")
    assert deltazoo.evaluate(compiled, text_file, 12, 2) == deltazoo.evaluate(model, text_file, 12, 2)
