"""The demo: train a hybrid and its two pure relatives on real text, sample from it, time the backends, report."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from deltazoo.backends.errors import ConfigError
from deltazoo.backends.measure.benchmark import BenchConfig, Benchmark, bench
from deltazoo.backends.measure.environment import Environment, environment
from deltazoo.backends.progress import Progress, silent
from deltazoo.backends.shapes import Shape
from deltazoo.blocks.generation.completion import Sampling, Written, load_writer, write
from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.stack import LanguageModel
from deltazoo.blocks.training import checkpoint, report
from deltazoo.blocks.training.text import Text
from deltazoo.blocks.training.train import TrainConfig, Training, train
from deltazoo.mixers.core.delta_mixer import Update

HYBRID = "gated-deltanet-h1-small"
PURE = ("transformer-pp-small", "gated-deltanet-small")
BACKENDS = ("reference", "compile")


class DemoConfig(BaseModel):
    """What the demo runs.

    Args:
        stacks: the hybrid first, then what it is compared with; files or presets.
        train: of each of them; sampling, prompt: of the hybrid; bench: on the shape that training gives the update.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stacks: tuple[str, ...] = Field(default=(HYBRID, *PURE), min_length=1)
    train: TrainConfig = TrainConfig(learning_rate=4e-3)
    sampling: Sampling = Sampling(max_bytes=500)
    prompt: str = "def "
    bench: BenchConfig = BenchConfig(rounds=5, seconds=10.0)

    def changed(self, steps: int, seed: int, device: str, backend: str | None) -> Self:
        """The same with these in all parts that have them."""
        train = {"steps": steps, "seed": seed, "device": device, "backend": backend}
        return type(self)(
            stacks=self.stacks,
            train={**self.train.model_dump(), **train},
            sampling={**self.sampling.model_dump(), "seed": seed},
            prompt=self.prompt,
            bench={**self.bench.model_dump(), "seed": seed, "device": device},
        )


class Demo(BaseModel):
    """What the demo found. seconds: of all of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: Environment
    config: DemoConfig
    trainings: dict[str, Training]
    written: Written
    benchmark: Benchmark
    folder: str
    seconds: float


def demo(text: Text, folder: str | Path, config: DemoConfig | None = None, progress: Progress = silent) -> Demo:
    """Run the demo and write its report.

    The folder then holds report.md, curves.png, benchmark.png, report.json with every figure, sample.txt, and
    for each stack its configuration and checkpoint. Those of an earlier demo are overwritten.

    Raises: ConfigError.
    """
    config, folder, start = config or DemoConfig(), Path(folder), time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    specs = {Path(stack).stem: StackSpec.load(stack) for stack in config.stacks}
    trainings = {}
    for name, spec in specs.items():
        (folder / name / checkpoint.CHECKPOINT).unlink(missing_ok=True)
        told = _under(f"train {name}", progress)
        trainings[name] = train(spec, text, config.train, folder / name, progress=told)
    writer = load_writer(folder / next(iter(specs)), config.train.device, trust=True)  # written above
    progress("write", 0, 1)
    written = write(writer, config.prompt, config.sampling)
    progress("write", 1, 1)
    found = Demo(
        environment=environment(config.train.device),
        config=config,
        trainings=trainings,
        written=written,
        benchmark=_benchmark(writer, config, progress),
        folder=str(folder),
        seconds=time.perf_counter() - start,
    )
    _report(found, specs, folder)
    return found


def _under(name: str, progress: Progress) -> Progress:
    """Tell progress under another name."""

    def told(task: str, done: int, total: int, note: str = "") -> None:
        progress(name, done, total, note)

    return told


def _benchmark(model: LanguageModel, config: DemoConfig, progress: Progress) -> Benchmark:
    update = next((module for module in model.modules() if isinstance(module, Update)), None)
    if update is None:
        raise ConfigError(f"the first stack must hold a mixer with an update to time, got {config.stacks[0]}")
    _, H, HV, K, V, _ = update.shape
    shape = Shape("training", config.train.batch, config.train.length, H, HV, K, V)
    return bench(update.spec, [shape], BACKENDS, config.bench, progress)


def _report(found: Demo, specs: Mapping[str, StackSpec], folder: Path) -> None:
    report.plot_curves(found.trainings, folder / "curves.png")
    report.plot_benchmark(found.benchmark, folder / "benchmark.png")
    (folder / "sample.txt").write_text(found.written.prompt + found.written.text, encoding="utf-8")
    (folder / "report.json").write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(_markdown(found, specs), encoding="utf-8")


def _markdown(found: Demo, specs: Mapping[str, StackSpec]) -> str:
    hybrid, written, sampling = next(iter(specs)), found.written, found.written.sampling
    first = next(iter(found.trainings.values()))
    config = found.config.train
    speed = "" if written.bytes_per_second is None else f", {written.bytes_per_second:,.0f} bytes/s"
    return f"""# deltazoo demo: {hybrid}

{found.environment.line()}; {found.seconds:,.0f} s in all.

## Training

{config.steps} steps of {config.batch} x {config.length} bytes of {first.source}, seed {config.seed}, the same
crops for every model; AdamW, learning rate {config.learning_rate:g}, {config.dtype}. In bits per byte lower is better,
and 8 knows nothing.

{report.curves_table(found.trainings)}
![bits per byte over steps](curves.png)

## {hybrid}, layer by layer

{report.layers_table(specs[hybrid].describe())}
## Backends

The update of {hybrid} in the shape that training gives it.

{found.benchmark.markdown()}
![medians of the backends](benchmark.png)

## Sample

{written.bytes} bytes by cached decoding, temperature {sampling.temperature:g}, seed {sampling.seed}{speed}.

~~~~~~~~text
{written.prompt}{written.text}
~~~~~~~~

## Again

    deltazoo generate {found.folder}/{hybrid} --prompt "{written.prompt}"
    deltazoo show {found.folder}/{hybrid}/{checkpoint.STACK}
"""
