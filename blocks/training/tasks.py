"""The main tasks on language models of bytes, in Python as on the command line: train, resume, load."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.progress import Progress, ProgressLines
from deltazoo.backends.torch_ext.allocation import sizes_in_memory_errors
from deltazoo.backends.update.check import check_type
from deltazoo.blocks.checkpoints import folder as checkpoint
from deltazoo.blocks.checkpoints.lock import only_process
from deltazoo.blocks.data.text import Text, as_text
from deltazoo.blocks.generation.completion import load_for_completion
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec import presets as presets_folder
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.config import TrainConfig, text_of_run
from deltazoo.blocks.training.records import Point, Training, in_order
from deltazoo.blocks.training.rules import differences, refused
from deltazoo.blocks.training.run import Run


def presets() -> list[str]:
    """Return the names of the presets, sorted; see `preset`."""
    return presets_folder.names()


def train(
    stack: StackSpec | str | Path,
    folder: str | Path | None,
    text: Text | str | Path | None = None,
    config: TrainConfig | None = None,
    until: int | None = None,
    progress: Progress | None = None,
    trust: bool = False,
    on_point: Callable[[Point], None] | None = None,
) -> Training:
    """Train a model of bytes from its initial weights, and save it in a checkpoint folder.

        training = deltazoo.train("gated-deltanet-small", "runs/first", config=TrainConfig(steps=100))
        model = deltazoo.load("runs/first")

    Args:
        stack: a spec, a stack file, or the name of a preset.
        folder: folder of the checkpoint, which `load` and `resume` read; None: nothing is saved.
        text: a text, or the path of a text file; None: the sources of Python's standard library.
        config: the settings; None: the defaults of `TrainConfig`.
        until: stop after this step; `resume` continues the same schedule.
        progress: called with the progress; None: prints a line on stderr at most every ten seconds.
        trust: as for `StackSpec.load`.
        on_point: called with each point of the training curves, after it is written to the folder's metrics.jsonl and
            its checkpoint is saved.
    Raises: ConfigError: a setting is invalid, the folder already contains a checkpoint, another process trains in it,
        the text cannot be read, the training diverges, or a file cannot be written (the last checkpoint is kept);
        TrainingInterrupted (KeyboardInterrupt): SIGINT or SIGTERM in the main thread, after the state is saved.
    """
    check_type("stack", stack, StackSpec | str | Path, "a StackSpec, a path or the name of a preset")
    check_type("config", config, TrainConfig | None, "a TrainConfig or None")
    if folder is not None:
        _check_folder(folder)
    spec = stack if isinstance(stack, StackSpec) else StackSpec.load(stack, trust)
    config, progress = config or TrainConfig(), progress or ProgressLines()
    with sizes_in_memory_errors(batch=config.batch, length=config.length):
        run = Run(spec, as_text(text), config)
        if folder is None:
            return run.train(until, progress, on_point)
        run.folder = Path(folder)
        with only_process(run.folder):
            checkpoint.create(run.folder, spec, run.settings)
            return run.train(until, progress, on_point)


def resume(
    folder: str | Path,
    text: Text | str | Path | None = None,
    until: int | None = None,
    progress: Progress | None = None,
    trust: bool = False,
    changes: Mapping[str, Any] | None = None,
    on_point: Callable[[Point], None] | None = None,
) -> Training:
    """Continue from a checkpoint. On the same machine and versions the result equals an uninterrupted run bit for bit.

    Args:
        text: the text of the run; None reads it again from its path.
        until, progress, trust, on_point: as for `train`.
        changes: new values of settings, such as {"steps": 600}. `deltazoo.blocks.training.rules.RULES` lists which can
            change: those of the schedule, the optimizer and the device, but not those that cut the crops. Those in
            train.yaml that were edited are changes, too. Each is logged, written to metrics.jsonl, and kept by the
            folder.
    Raises: as for `train`; ConfigError: the checkpoint is invalid or of another text, or a setting cannot change.
    """
    _check_folder(folder)
    check_type("changes", changes, Mapping | None, "a mapping of settings or None")
    folder, changes = Path(folder), changes or {}
    checkpoint.check_folder(folder)
    with only_process(folder):
        spec, settings, trained, saved = checkpoint.load(folder, trust)
        read = text_of_run(settings, None if text is None else as_text(text), file=folder / checkpoint.SETTINGS)
        config = TrainConfig(**{**settings.train.model_dump(), **changes})
        changed = differences(trained.train.model_dump(), config.model_dump())
        if problem := refused(changed, folder / checkpoint.STACK):
            raise ConfigError(problem)
        if config.steps < saved["step"]:
            raise ConfigError(f"steps must be at least {saved['step']}, which the run has taken, got {config.steps}")
        with sizes_in_memory_errors(batch=config.batch, length=config.length):
            run = Run(spec, read, config)
            run.folder = folder
            run.restore(saved)
            run.log_changes(changed, changes)
            checkpoint.write_settings(folder, run.settings)
            checkpoint.write_records(folder, in_order(run.points, run.changes))
            return run.train(until, progress or ProgressLines(), on_point)


def load(folder: str | Path, device: str = "cpu", backend: str | None = None, trust: bool = False) -> LanguageModel:
    """Build the model of a checkpoint folder with its weights, in evaluation mode.

    Args:
        device: "cpu", "cuda", "cuda:1" or "mps".
        backend: as for `deltazoo.bind`. None selects those of the stack, else the device's default. Without a CUDA
            device that is `CompileBackend(compiled=False)`: eager calls answer without compiling first, and
            `torch.compile(model)` compiles the updates with the rest.
        trust: as for `StackSpec.load`.
    Raises: ConfigError: the folder is not a checkpoint; UnknownNameError: unknown backend.
    """
    _check_folder(folder)
    if not Path(folder).exists() and str(folder) in presets_folder.names():
        raise ConfigError(
            f"{folder} is a preset, which has no trained weights: build it with deltazoo.preset({str(folder)!r})"
            ".build(), or train it first"
        )
    return load_for_completion(folder, device, backend, trust)


def _check_folder(folder: object) -> None:
    check_type("folder", folder, str | Path, "the path of a checkpoint folder")
