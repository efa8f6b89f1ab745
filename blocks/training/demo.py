"""The demo: train a hybrid and two baselines with one mixer each, sample from the hybrid, time the backends, report."""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, Field

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.backends.io.output_path import output_folder
from deltazoo.backends.io.progress import Progress, silent
from deltazoo.backends.measure.benchmark import BenchConfig, Benchmark, bench
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.blocks.checkpoints import folder as checkpoint
from deltazoo.blocks.checkpoints.lock import only_process
from deltazoo.blocks.checkpoints.sharded import CHECKPOINTS
from deltazoo.blocks.data.text import Text
from deltazoo.blocks.generation.completion import Completion, generate, load_for_completion
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.inspect.figure import why_no_plots
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training import report
from deltazoo.blocks.training.config import OptimizerConfig, TrainConfig
from deltazoo.blocks.training.records import Training
from deltazoo.blocks.training.run import OnPoint
from deltazoo.blocks.training.tasks import train
from deltazoo.mixers.core.update import Update

HYBRID = "gated-deltanet-h1-small"
BASELINES = ("transformer-pp-small", "gated-deltanet-small")
BACKENDS = ("reference", "compile")
PLOTS = ("curves.png", "benchmark.png")


class DemoConfig(FrozenConfig):
    """The settings of the demo.

    Args:
        stacks: files or presets; the hybrid first, then the stacks that it is compared with.
        train: settings of each training run.
        sampling: sampling parameters for the hybrid.
        prompt: text that the hybrid continues.
        bench: settings of the benchmark, which times the hybrid's update on the shape of a training step.
    """

    stacks: tuple[str, ...] = Field(default=(HYBRID, *BASELINES), min_length=1)
    train: TrainConfig = TrainConfig(optimizer=OptimizerConfig(learning_rate=4e-3))
    sampling: Sampling = Sampling(max_tokens=500)
    prompt: str = "def "
    bench: BenchConfig = BenchConfig(rounds=5, seconds=10.0)

    def with_options(self, steps: int, seed: int, device: str, backend: str | None) -> Self:
        """Return a copy with these options in every part that has them."""
        train = {"steps": steps, "seed": seed, "device": device, "backend": backend}
        return type(self)(
            stacks=self.stacks,
            train={**self.train.model_dump(), **train},
            sampling={**self.sampling.model_dump(), "seed": seed},
            prompt=self.prompt,
            bench={**self.bench.model_dump(), "seed": seed, "device": device},
        )


class Demo(BaseModel):
    """The results of the demo.

    Args: trainings: by the name of the stack; seconds: duration of the whole demo.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    config: DemoConfig
    trainings: dict[str, Training]
    completion: Completion
    benchmark: Benchmark
    folder: str
    seconds: float


def demo(
    text: Text,
    folder: str | Path,
    config: DemoConfig | None = None,
    progress: Progress = silent,
    on_training: Callable[[str], OnPoint | None] = lambda name: None,
) -> Demo:
    """Run the demo and write its report.

    The folder receives report.md, curves.png, benchmark.png, report.json with every figure, sample.txt, and for each
    stack a folder with its config and checkpoint. Files of an earlier demo are overwritten. Without matplotlib the two
    plots are left out.

    Args: on_training: called with the name of each stack before its training; returns the `on_point` of the training.
    Raises: ConfigError.
    """
    config, folder, start = config or DemoConfig(), output_folder(folder), time.perf_counter()
    specs = {Path(stack).stem: StackSpec.load(stack) for stack in config.stacks}
    update, shape = _update_to_time(config, next(iter(specs.values())))
    trainings = {}
    for name, spec in specs.items():
        with only_process(folder / name):
            shutil.rmtree(folder / name / CHECKPOINTS, ignore_errors=True)
        renamed = _with_task_name(f"train {name}", progress)
        trainings[name] = train(spec, folder / name, text, config.train, progress=renamed, on_point=on_training(name))
    # This function wrote the folder, so it can only name code that the caller passed.
    model = load_for_completion(folder / next(iter(specs)), config.train.device, trust=True)
    progress("generate", 0, 1)
    completion = generate(model, config.prompt, config.sampling)
    progress("generate", 1, 1)
    result = Demo(
        environment=environment(config.train.device),
        config=config,
        trainings=trainings,
        completion=completion,
        benchmark=bench(update, [shape], BACKENDS, config.bench, progress),
        folder=str(folder),
        seconds=time.perf_counter() - start,
    )
    _write_report(result, specs, folder)
    return result


def _with_task_name(name: str, progress: Progress) -> Progress:
    """Return a progress callback that reports under another task name."""

    def renamed(task: str, done: int, total: int, note: str = "") -> None:
        progress(name, done, total, note)

    return renamed


def _update_to_time(config: DemoConfig, spec: StackSpec) -> tuple[UpdateSpec, Shape]:
    """Return the first update of the hybrid, and its shape in a training step."""
    with torch.device("meta"):
        modules = spec.build().modules()
    update = next((module for module in modules if isinstance(module, Update)), None)
    if update is None:
        raise ConfigError(f"the first stack must contain a mixer with an update to time, got {config.stacks[0]}")
    _, H, HV, K, V, _ = update.shape
    return update.spec, Shape("training", config.train.batch.step_rows, config.train.batch.length, H, HV, K, V)


def _write_report(result: Demo, specs: Mapping[str, StackSpec], folder: Path) -> None:
    for name in PLOTS:
        (folder / name).unlink(missing_ok=True)  # a plot of an earlier demo
    plots = why_no_plots() is None
    if plots:
        report.plot_curves(result.trainings, folder / PLOTS[0])
        report.plot_benchmark(result.benchmark, folder / PLOTS[1])
    (folder / "sample.txt").write_text(result.completion.prompt + result.completion.text, encoding="utf-8")
    (folder / "report.json").write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(_markdown(result, specs, plots), encoding="utf-8")


def _markdown(result: Demo, specs: Mapping[str, StackSpec], plots: bool) -> str:
    curves = f"![bits per byte over steps]({PLOTS[0]})\n" if plots else ""
    bars = f"![medians of the backends]({PLOTS[1]})\n" if plots else ""
    hybrid, completion, sampling = next(iter(specs)), result.completion, result.completion.sampling
    source = next(iter(result.trainings.values())).source
    config = result.config.train
    batch = config.batch
    speed = "" if completion.bytes_per_second is None else f", {completion.bytes_per_second:,.0f} bytes/s"
    return f"""# deltazoo demo: {hybrid}

{result.environment.line()}; {result.seconds:,.0f} s in total.

## Training

{config.steps} steps of {batch.step_rows} x {batch.length} bytes of {source}, seed {config.seed}, with the same crops
for every model; AdamW, learning rate {config.optimizer.learning_rate:g}, {config.precision}. Losses are in bits per
byte; lower is better, and a uniform prediction has 8.

{report.training_table(result.trainings)}
{curves}
## {hybrid}, layer by layer

{specs[hybrid].describe().markdown()}
## Backends

The update of {hybrid}, on the shape of a training step.

{result.benchmark.markdown()}
{bars}
## Sample

{completion.bytes} bytes by cached decoding, temperature {sampling.temperature:g}, seed {sampling.seed}{speed}.

~~~~~~~~text
{completion.prompt}{completion.text}
~~~~~~~~

## Commands

    deltazoo generate {result.folder}/{hybrid} --prompt "{completion.prompt}"
    deltazoo show {result.folder}/{hybrid}/{checkpoint.STACK}
"""
