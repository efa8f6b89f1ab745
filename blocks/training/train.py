"""Training of a stack on bytes: AdamW, warm-up and cosine decay, and checkpoints that resume bit for bit."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deltazoo.backends.allocation import sizes_in_memory_errors
from deltazoo.backends.check import check_type
from deltazoo.backends.devices import cxx_compiler, usable_device
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.frozen_config import FrozenConfig, describe_errors
from deltazoo.backends.progress import Progress, silent
from deltazoo.blocks.checkpointing import Checkpointing
from deltazoo.blocks.compilation import check_updates, compile_layers, run_eagerly
from deltazoo.blocks.losses import Losses
from deltazoo.blocks.spec import StackSpec
from deltazoo.blocks.training import checkpoint
from deltazoo.blocks.training.interrupts import Interrupts, TrainingInterrupted
from deltazoo.blocks.training.optimizer import adamw, learning_rate
from deltazoo.blocks.training.text import BYTES, Batch, Text, even_crops, load_text, random_crops

RESUMABLE = frozenset(
    {"steps", "device", "backend", "compile", "checkpointing"}
)  # settings that a resumed run can change


class TrainConfig(FrozenConfig):
    """The settings of a training run.

    Args:
        steps: number of steps of the schedule.
        batch: sequences per step.
        length: bytes per sequence.
        learning_rate: peak; linear warm-up over `warmup` steps, then cosine decay to a tenth of the peak.
        weight_decay: applied to matrices only.
        clip: maximum norm of the gradient of all parameters.
        seed: random seed of the weights and of the crops.
        every: steps between two validations; a checkpoint follows each.
        validation_batches: batches per validation.
        dtype: compute dtype; "bfloat16" uses autocast and keeps the weights in float32.
        backend: as for `deltazoo.bind`.
        compile: compile the model layer by layer, see `deltazoo.blocks.compilation`. False: the first step starts at
            once, and each takes longer; without a CUDA device, updates whose backend is not named are eager too.
        checkpointing: what the backward recomputes to save memory, see `LanguageModel.checkpoint_layers`.
    """

    steps: int = Field(default=300, ge=1)
    batch: int = Field(default=8, ge=1)
    length: int = Field(default=256, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0, allow_inf_nan=False)
    warmup: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    clip: float = Field(default=1.0, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    every: int = Field(default=25, ge=1)
    validation_batches: int = Field(default=4, ge=1)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    backend: str | None = None
    compile: bool = True
    checkpointing: Checkpointing = "none"


class Point(BaseModel):
    """One point of the training curves, after `step` steps. Fields that describe steps are None in the first point.

    Args:
        train_bits: mean cross entropy in training since the previous point, in bits per byte.
        validation_bits: cross entropy on validation at this point, in bits per byte.
        auxiliary: mean auxiliary losses in training since the previous point, by name, without their coefficients.
        learning_rate: that of the last step.
        gradient_norm: that of the last step, before clipping.
        tokens_per_second: median since the previous point.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    train_bits: float | None = None
    validation_bits: float
    auxiliary: dict[str, float] = Field(default_factory=dict)
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None

    def cells(self, auxiliary: Sequence[str] = ()) -> list[str]:
        """Format step, training bits, validation bits, the auxiliary losses with these names, and tokens per second."""
        train_bits = "" if self.train_bits is None else f"{self.train_bits:.3f}"
        speed = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}"
        values = [f"{self.auxiliary[name]:.4f}" if name in self.auxiliary else "" for name in auxiliary]
        return [f"{self.step}", train_bits, f"{self.validation_bits:.3f}", *values, speed]


class Training(BaseModel):
    """The result of a training run.

    Args:
        parameters: number of parameters.
        source: description of the text.
        points: the training curves; the first point is before any step.
        first_call_s: time of the first forward and backward pass of this process in seconds, compilation included.
            No other figure includes it.
        tokens_per_second: median over the steps of this process, without validation; None if there were no steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: TrainConfig
    parameters: int
    source: str
    points: list[Point]
    first_call_s: float
    tokens_per_second: float | None

    @property
    def validation_bits(self) -> float:
        """Validation loss of the last point, in bits per byte."""
        return self.points[-1].validation_bits

    @property
    def auxiliary(self) -> list[str]:
        """Names of the auxiliary losses."""
        return list(self.points[-1].auxiliary)

    def line(self) -> str:
        """Format the last point as one line."""
        speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} tokens/s"
        last = self.points[-1]
        return f"{last.validation_bits:.3f} bits per byte on validation after {last.step} steps{speed}"


def train(
    spec: StackSpec,
    text: Text,
    config: TrainConfig | None = None,
    folder: str | Path | None = None,
    until: int | None = None,
    progress: Progress = silent,
) -> Training:
    """Train a model from its initial weights.

    Args:
        folder: folder for the checkpoint; None saves none.
        until: stop after this step; `resume` continues the same schedule.
    Raises: ConfigError: a setting is invalid, the folder already contains a checkpoint, the loss is not finite, or a
        checkpoint cannot be written (the last one is kept); TrainingInterrupted (KeyboardInterrupt): SIGINT or SIGTERM
        in the main thread, after the state is saved in `folder`.
    """
    check_type("config", config, TrainConfig | None, "a TrainConfig or None")
    config = config or TrainConfig()
    with sizes_in_memory_errors(batch=config.batch, length=config.length):
        run = _Run(spec, text, config)
        if folder is not None:
            origin = {"source": text.source, "path": text.path, "digest": text.digest}
            checkpoint.create(Path(folder), spec, {"train": config.model_dump(), "text": origin})
        return run.train(until, folder, progress)


def resume(
    folder: str | Path,
    text: Text | None = None,
    until: int | None = None,
    progress: Progress = silent,
    trust: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Training:
    """Continue from a checkpoint. On the same machine and versions the result equals an uninterrupted run bit for bit.

    Args:
        text: the text of the run; None reads it again from its path.
        trust: as for `StackSpec.load`.
        changes: new values of `RESUMABLE` settings, which the folder keeps. More steps lengthen the cosine decay of the
            learning rate: each remaining step takes the rate that it has in a run with that number of steps.
    Raises: as for `train`; ConfigError: the checkpoint is invalid or of another text, the text cannot be read, or a
        change is not possible.
    """
    spec, settings, saved = checkpoint.load(Path(folder), trust)
    origin = settings["text"]
    text = _text_of_run(Path(folder), origin["path"]) if text is None else text
    if origin["digest"] != text.digest:
        raise ConfigError(f"{folder} was trained on another text ({origin['source']}), got {text.source}")
    check_type("changes", changes, Mapping | None, "a mapping of settings or None")
    changes = dict(changes or {})
    if fixed := sorted(changes.keys() - RESUMABLE):
        raise ConfigError(f"a resumed run can change {', '.join(sorted(RESUMABLE))}, got {', '.join(fixed)}")
    config = TrainConfig(**{**settings["train"], **changes})
    if config.steps < saved["step"]:
        raise ConfigError(f"steps must be at least {saved['step']}, which the run has taken, got {config.steps}")
    with sizes_in_memory_errors(batch=config.batch, length=config.length):
        run = _Run(spec, text, config)
        run.restore(saved)
        if changes:
            checkpoint.write_settings(Path(folder), {**settings, "train": config.model_dump()})
        return run.train(until, folder, progress)


def _text_of_run(folder: Path, path: str | None) -> Text:
    """Read the text at the path that the settings of a run hold."""
    try:
        return load_text(path)
    except ConfigError as error:
        settings = folder / checkpoint.SETTINGS
        raise ConfigError(f"{error}; {settings} names this text: pass its new path as text, or with --text") from error


class _Step(NamedTuple):
    """The figures of one step.

    bits: cross entropy in bits per byte before the update; auxiliary: the auxiliary losses by name.
    """

    bits: float
    auxiliary: dict[str, float]
    learning_rate: float
    gradient_norm: float


class _Figures(BaseModel):
    """The figures in a checkpoint: the points, and the steps since the last point."""

    points: list[Point]
    recent: list[_Step]


class _Run:
    """The state of a training run after `step` steps."""

    def __init__(self, spec: StackSpec, text: Text, config: TrainConfig) -> None:
        self.spec, self.text, self.config, self.step = spec, text, config, 0
        if spec.vocab < BYTES:
            raise ConfigError(f"vocab must be at least {BYTES} to train on bytes, got {spec.vocab}")
        self.device = usable_device(config.device)
        if config.compile and self.device.type == "cpu" and cxx_compiler() is None:
            raise ConfigError(
                "torch.compile needs a C++ compiler on the CPU, got none: install g++ or clang++ (Windows: cl), "
                "or train with compile=False"
            )
        torch.manual_seed(config.seed)
        with nullcontext() if config.compile else run_eagerly(self.device):
            self.model = spec.build(backend=config.backend).to(self.device)
        check_updates(self.model, getattr(torch, config.dtype))
        self.model.checkpoint_layers(config.checkpointing)
        if config.compile:
            compile_layers(self.model)
        self.optimizer = adamw(self.model, config)
        batches = even_crops(text.validation, config.batch, config.length, config.validation_batches)
        self.validation_batches = [self._to_device(batch) for batch in batches]
        self.points: list[Point] = []
        self.recent: list[_Step] = []  # the steps since the last point

    def train(self, until: int | None, folder: str | Path | None, progress: Progress) -> Training:
        """Train up to step `until` or the end of the schedule, with a point and a checkpoint after every `every`."""
        if folder is None:
            return self._train(until, None, progress, Interrupts())
        interrupts = Interrupts()
        with interrupts.catch():
            try:
                return self._train(until, Path(folder), progress, interrupts)
            except KeyboardInterrupt as error:
                if interrupts.signum is None or interrupts.deferred:
                    raise  # a second signal, perhaps in the middle of a step
                checkpoint.save(Path(folder), self.state())
                raise TrainingInterrupted(interrupts.signum, Path(folder), self.step) from error

    def _train(self, until: int | None, folder: Path | None, progress: Progress, interrupts: Interrupts) -> Training:
        last = self.config.steps if until is None else min(until, self.config.steps)
        progress("training", self.step, last, "compiling" if self.config.compile else "")
        first_call_s = self._warm_up()
        if not self.points:
            self._add_point([])
        seconds: list[float] = []
        interrupts.deferred = True
        while self.step < last and interrupts.signum is None:
            start = time.perf_counter()
            self.recent.append(self._take_step())
            seconds.append(time.perf_counter() - start)
            if self.step % self.config.every == 0 or self.step == last:
                self._add_point(seconds[-len(self.recent) :])
                if folder is not None:
                    checkpoint.save(folder, self.state())
            progress("training", self.step, last, self._note(seconds))
        interrupts.deferred = False
        if interrupts.signum is not None:
            raise KeyboardInterrupt
        return Training(
            config=self.config,
            parameters=sum(x.numel() for x in self.model.parameters()),
            source=self.text.source,
            points=self.points,
            first_call_s=first_call_s,
            tokens_per_second=self._tokens_per_second(seconds),
        )

    def restore(self, saved: dict[str, Any]) -> None:
        """Load everything that `state` saved."""
        checkpoint.load_weights(self.model, saved)
        checkpoint.load_optimizer(self.optimizer, saved)
        self.step = saved["step"]
        try:
            figures = _Figures(points=saved["points"], recent=saved["recent"])
            torch.set_rng_state(saved["rng"])
            if self.device.type == "cuda" and saved["cuda_rng"] is not None:  # None: the run was on another device
                torch.cuda.set_rng_state(saved["cuda_rng"], self.device)
        except (ValidationError, TypeError, RuntimeError) as error:  # torch raises the latter two for a wrong state
            problem = describe_errors((), error) if isinstance(error, ValidationError) else error
            raise ConfigError(f"{checkpoint.CHECKPOINT} is not from a training run: {problem}") from error
        self.points, self.recent = figures.points, figures.recent

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs."""
        return {
            "stack": self.spec.model_dump(mode="json"),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "points": [point.model_dump() for point in self.points],
            "recent": [step._asdict() for step in self.recent],
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def _take_step(self) -> _Step:
        config = self.config
        rate = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = self._losses(self._training_batch())
        losses.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        total = float(losses.total.detach())
        if not math.isfinite(total):
            raise ConfigError(
                f"the loss is {total} at step {self.step}: lower learning_rate, got {config.learning_rate}"
            )
        bits = float(losses.cross_entropy.detach()) / math.log(2)
        auxiliary = {name: float(value.detach()) for name, value in losses.auxiliary.items()}
        return _Step(bits, auxiliary, rate, float(norm))

    def _add_point(self, seconds: list[float]) -> None:
        """Validate, and average the steps since the previous point, which took these seconds."""
        steps = self.recent
        entropies = [float(self._losses(batch).cross_entropy.detach()) for batch in self.validation_batches]
        figures: dict[str, Any] = {}
        if steps:
            figures = {
                "train_bits": fmean(step.bits for step in steps),
                "auxiliary": {name: fmean(step.auxiliary[name] for step in steps) for name in steps[0].auxiliary},
                "learning_rate": steps[-1].learning_rate,
                "gradient_norm": steps[-1].gradient_norm,
                "tokens_per_second": self._tokens_per_second(seconds),
            }
        self.points.append(Point(step=self.step, validation_bits=fmean(entropies) / math.log(2), **figures))
        self.recent = []

    def _warm_up(self) -> float:
        """Run a forward and backward pass, which compiles the graphs of training and validation; return its seconds."""
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._losses(self._training_batch()).total.backward()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def _losses(self, batch: Batch) -> Losses:
        """Compute the losses in the compute dtype of the run."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            return self.model.losses(batch.inputs, batch.targets)

    def _training_batch(self) -> Batch:
        config = self.config
        return self._to_device(random_crops(self.text.train, config.batch, config.length, config.seed, self.step))

    def _to_device(self, batch: Batch) -> Batch:
        return Batch(batch.inputs.to(self.device), batch.targets.to(self.device))

    def _tokens_per_second(self, seconds: list[float]) -> float | None:
        return self.config.batch * self.config.length / median(seconds) if seconds else None

    def _note(self, seconds: list[float]) -> str:
        speed = self._tokens_per_second(seconds[-20:])
        return f"{self.points[-1].validation_bits:.2f} bits per byte, {speed:,.0f} tokens/s"
