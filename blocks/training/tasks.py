"""The main tasks on language models of bytes, in Python as on the command line: train, resume, load."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.progress import Progress, ProgressLines, silent
from deltazoo.backends.torch_ext.allocation import sizes_in_memory_errors
from deltazoo.backends.torch_ext.compiler_start import start_compiler
from deltazoo.backends.update.check import check_type
from deltazoo.blocks.checkpoints import folder as checkpoint
from deltazoo.blocks.checkpoints.lock import only_process
from deltazoo.blocks.checkpoints.pretrained import read_spec
from deltazoo.blocks.checkpoints.sharded import saved_steps
from deltazoo.blocks.data.text import Text
from deltazoo.blocks.generation.completion import load_for_completion
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.parallel.ranks import Ranks, joined
from deltazoo.blocks.spec import document
from deltazoo.blocks.spec import presets as presets_folder
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.collector import paused_collector
from deltazoo.blocks.training.config import TrainConfig, parse_nested
from deltazoo.blocks.training.nested import merged
from deltazoo.blocks.training.preparation import (
    build_model,
    check_run,
    copy_tokenizer,
    is_pretrained,
    keep_origin,
    run_device,
    warnings_of_rank,
)
from deltazoo.blocks.training.records import Change, Point, Training, in_order, now
from deltazoo.blocks.training.rules import differences, refused
from deltazoo.blocks.training.run import Run
from deltazoo.blocks.training.source import open_source, source_of_run

_log = logging.getLogger("deltazoo")


def presets() -> list[str]:
    """Return the names of the presets, sorted; see `preset`."""
    return presets_folder.names()


def train(
    stack: StackSpec | str | Path | None,
    folder: str | Path | None,
    text: Text | str | Path | None = None,
    config: TrainConfig | None = None,
    until: int | None = None,
    progress: Progress | None = None,
    trust: bool = False,
    on_point: Callable[[Point], None] | None = None,
) -> Training:
    """Train a model, and save it in a folder with checkpoints.

        training = deltazoo.train("gated-deltanet-small", "runs/first", config=TrainConfig(steps=100))
        model = deltazoo.load("runs/first")

    In processes that torchrun started, all of them call this function, and train one model.

    Args:
        stack: a spec, a stack file, the name of a preset, or a folder of weights to continue; None: `config.model`.
        folder: folder of the checkpoints, which `load` and `resume` read; None: nothing is saved.
        text: a text, the path of a text file, or a folder that `deltazoo data` wrote; None: `config.data`, by default
            the sources of Python's standard library.
        config: the settings; None: the defaults of `TrainConfig`.
        until: stop after this step; `resume` continues the same schedule.
        progress: called with the progress; None: prints a line on stderr at most every ten seconds.
        trust: as for `StackSpec.load`.
        on_point: called with each point of the training curves, after it is written to the folder's metrics.jsonl,
            by rank 0. Its checkpoint may still be being written, see `CheckpointConfig.background`.
    Raises: ConfigError: a setting is invalid, the folder already contains a checkpoint, another process trains in it,
        the text cannot be read, the training diverges, or a file cannot be written (the last checkpoint is kept);
        TrainingInterrupted (KeyboardInterrupt): SIGINT or SIGTERM in the main thread, after the state is saved.
    """
    started = time.perf_counter()
    check_type("stack", stack, StackSpec | str | Path | None, "a StackSpec, a path or the name of a preset")
    check_type("config", config, TrainConfig | None, "a TrainConfig or None")
    if folder is not None:
        _check_folder(folder)
    config = config or TrainConfig()
    if isinstance(stack, str | Path):
        config = config.model_copy(update={"model": str(stack)})
    named = config.model if stack is None else stack
    if named is None:
        raise ConfigError(
            "a model is missing: give a stack, a preset or a folder of weights, or set model in the config"
        )
    if isinstance(named, StackSpec):
        spec, pretrained = named, None
    elif is_pretrained(named):
        spec, pretrained = read_spec(named).spec, named
    else:
        spec, pretrained = StackSpec.load(named, trust), None
    source = open_source(text, config.data)
    if until is not None and until < 1:
        raise ConfigError(f"until must be at least 1, got {until}")
    place = None if folder is None else Path(folder)
    with _processes(config, place) as (ranks, device, settle):
        model = build_model(spec, config, device, ranks, pretrained)
        check_run(model, source, config, None)
        run = Run(spec, model, source, config, ranks, place)
        run.started, run.settle = started, settle
        if place is not None:

            def create() -> None:
                check_run(model, source, config, place)
                checkpoint.create(place, spec, run.settings)
                copy_tokenizer(source, place)

            ranks.first(create)
        return _trained(run, until, progress, on_point)


def resume(
    folder: str | Path,
    text: Text | str | Path | None = None,
    until: int | None = None,
    progress: Progress | None = None,
    trust: bool = False,
    changes: Mapping[str, Any] | None = None,
    on_point: Callable[[Point], None] | None = None,
) -> Training:
    """Continue from the last checkpoint, on any number of processes and any device.

    On the same machine and versions, and as many processes, the result equals an uninterrupted run bit for bit; else up
    to rounding. If the last checkpoint is damaged, a warning names it, and the run continues from the one before.

    Args:
        text: the text of the run; None reads it again from its path.
        until, progress, trust, on_point: as for `train`.
        changes: new values of settings, such as {"steps": 600, "optimizer.learning_rate": 1e-3}.
            `deltazoo.blocks.training.rules.RULES` lists which can change: those of the schedule, the optimizer and the
            device, but not those that cut the crops. Those in train.yaml that were edited are changes, too. Each is
            logged, written to metrics.jsonl, and kept by the folder.
    Raises: as for `train`; ConfigError: no checkpoint is valid, it is of another text, or a setting cannot change.
    """
    started = time.perf_counter()
    _check_folder(folder)
    check_type("changes", changes, Mapping | None, "a mapping of settings or None")
    folder, changes = Path(folder), changes or {}
    checkpoint.check_folder(folder)
    edited = document.read(folder / checkpoint.SETTINGS).get("train", {})  # checked below, with the checkpoint
    guess = merged(edited if isinstance(edited, Mapping) else {}, changes)
    with _processes(_as_config(guess), folder) as (ranks, device, settle):
        spec, settings, trained, loaded = _last_good(folder, trust, ranks)
        config = parse_nested(TrainConfig, merged(settings.train.model_dump(), changes))
        changed = differences(trained.train.model_dump(), config.model_dump())
        if problem := refused(changed, folder / checkpoint.STACK):
            raise ConfigError(problem)
        if text is None and config.data.path != trained.train.data.path:
            text = config.data.path
        source = source_of_run(settings.model_copy(update={"train": config}), text, folder / checkpoint.SETTINGS)
        if config.steps < loaded.state["step"]:
            raise ConfigError(
                f"steps must be at least {loaded.state['step']}, which the run has taken, got {config.steps}"
            )
        model = build_model(spec, config, device, ranks)
        keep_origin(model, config)
        check_run(model, source, config, folder)
        run = Run(spec, model, source, config, ranks, folder)
        run.started, run.settle = started, settle
        run.restore(loaded)
        _log_changes(run, changed, changes)

        def write() -> None:
            checkpoint.write_settings(folder, run.settings)
            checkpoint.write_records(folder, in_order(run.points, run.changes))

        ranks.first(write)
        return _trained(run, until, progress or ProgressLines(), on_point)


def _log_changes(run: Run, changed: Mapping[str, tuple[Any, Any]], requested: Mapping[str, Any]) -> None:
    """Log and keep the settings that differ from those of the run, including edits of train.yaml."""
    for name, (old, new) in changed.items():
        change = Change(step=run.step, time=now(), setting=name, old=old, new=new)
        run.changes.append(change)
        if run.ranks.is_first and name in requested:
            _log.info("%s", change.line())
        elif run.ranks.is_first:
            _log.warning("%s, as in %s", change.line(), checkpoint.SETTINGS)


def _as_config(values: Mapping[str, Any]) -> TrainConfig:
    """Return the settings that say how many processes share the run; `resume` checks all of them later."""
    known = {name: values[name] for name in ("device", "compile", "parallel", "batch") if name in values}
    config: TrainConfig = parse_nested(TrainConfig, known)
    return config


def _last_good(folder: Path, trust: bool, ranks: Ranks) -> checkpoint.Saved:
    """Read the last checkpoint whose files are intact. Raises: ConfigError: there is none, or a setting is invalid."""
    steps = saved_steps(folder)
    for number, step in enumerate(reversed(steps)):
        problem: str | None = None
        saved: checkpoint.Saved | None = None
        try:
            saved = checkpoint.load(folder, trust, step, ranks)
        except ConfigError as error:
            problem = str(error)
        problems = [each for each in ranks.gather(problem) if each]
        if not problems:
            assert saved is not None
            return saved
        if number == len(steps) - 1 or "damaged" not in problems[0]:
            raise ConfigError(problems[0])
        if ranks.is_first:
            _log.warning("%s: continuing from it", problems[0])
    raise ConfigError(f"{folder} has no checkpoint")


@contextmanager
def _processes(config: TrainConfig, folder: Path | None) -> Iterator[tuple[Ranks, torch.device, Callable[[], None]]]:
    """Join the other processes, and let rank 0 lock the folder; yield also what `paused_collector` yields."""
    batch = config.batch
    device = run_device(config)
    sizes = {"batch": batch.micro_rows or batch.step_rows, "length": batch.length}
    joining = joined(device, config.parallel)
    with ExitStack() as stack:
        settle = stack.enter_context(paused_collector())
        if config.compile:
            start_compiler(device)
        ranks = stack.enter_context(joining)
        stack.enter_context(sizes_in_memory_errors(**sizes))
        stack.enter_context(warnings_of_rank(ranks))
        if folder is not None:
            ranks.first(lambda: stack.enter_context(only_process(folder)))
        yield ranks, device, settle


def _trained(
    run: Run, until: int | None, progress: Progress | None, on_point: Callable[[Point], None] | None
) -> Training:
    if not run.ranks.is_first:
        progress = silent
    try:
        training = run.train(until, progress or ProgressLines(), on_point)
    finally:
        run.source.close()
        if run.writer is not None:
            run.writer.close()
    if run.config.checkpoint.pretrained and run.folder is not None:
        run.save_pretrained()
    return training


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
