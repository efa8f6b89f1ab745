"""The state of a training run on bytes: AdamW, warm-up and cosine decay, and checkpoints that resume bit for bit."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ValidationError

from deltazoo.backends.io.errors import ConfigError, ValueRangeError
from deltazoo.backends.io.frozen_config import describe_errors
from deltazoo.backends.io.progress import Progress
from deltazoo.backends.torch_ext.devices import cxx_compiler, usable_device
from deltazoo.blocks.checkpoints import folder as checkpoint
from deltazoo.blocks.data.text import BYTES, Batch, Text, even_crops, random_crops
from deltazoo.blocks.inspect.describe import parameter_count
from deltazoo.blocks.model.compilation import check_updates, compile_layers, run_eagerly
from deltazoo.blocks.model.losses import Losses
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.config import RunSettings, TextOrigin, TrainConfig
from deltazoo.blocks.training.interrupts import Interrupts, TrainingInterrupted
from deltazoo.blocks.training.optimizer import adamw, learning_rate
from deltazoo.blocks.training.records import Change, Point, Training, now
from deltazoo.blocks.training.warm_up import compile_with_progress

_log = logging.getLogger("deltazoo")

OnPoint = Callable[[Point], None]


class _Step(NamedTuple):
    """The figures of one step.

    bits: cross entropy in bits per byte before the update; auxiliary: the auxiliary losses by name.
    """

    bits: float
    auxiliary: dict[str, float]
    learning_rate: float
    gradient_norm: float


class _Figures(BaseModel):
    """The figures in a checkpoint: the points, the changes, and the steps since the last point."""

    points: list[Point]
    changes: list[Change]
    recent: list[_Step]


class Run:
    """The state of a training run after `step` steps.

    Raises: ConfigError: a setting is invalid.
    """

    def __init__(self, spec: StackSpec, text: Text, config: TrainConfig) -> None:
        self.spec, self.text, self.config, self.step = spec, text, config, 0
        origin = TextOrigin(path=text.path, digest=text.digest, source=text.source)
        self.settings = RunSettings(train=config, text=origin)
        self.folder: Path | None = None  # of the checkpoint, None: there is none
        self.saved_step: int | None = None  # of the checkpoint in the folder
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
        self.changes: list[Change] = []
        self.recent: list[_Step] = []  # the steps since the last point

    def train(self, until: int | None, progress: Progress, on_point: OnPoint | None) -> Training:
        """Train up to step `until` or the end of the schedule, with a point and a checkpoint after every `every`."""
        last = self.config.steps if until is None else min(until, self.config.steps)
        first_call_s, seconds = 0.0, list[float]()
        with self._saved_on_interrupt() as interrupts:
            progress("training", self.step, last)
            if self.step < last or not self.points:
                first_call_s = self._warm_up(last, progress)
            if not self.points:
                first = self._add_point([])
                if on_point is not None:
                    on_point(first)
            interrupts.deferred = True
            while self.step < last and interrupts.signum is None:
                start = time.perf_counter()
                self.recent.append(self._take_step())
                seconds.append(time.perf_counter() - start)
                if self.step % self.config.every == 0 or self.step == last:
                    point = self._add_point(seconds[-len(self.recent) :])
                    self._save()
                    if on_point is not None:
                        on_point(point)
                progress("training", self.step, last, self._note(seconds))
            interrupts.deferred = False
            if interrupts.signum is not None:
                raise KeyboardInterrupt
        return Training(
            config=self.config,
            parameters=parameter_count(self.model),
            source=self.text.source,
            points=self.points,
            first_call_s=first_call_s,
            tokens_per_second=self._tokens_per_second(seconds),
        )

    @contextmanager
    def _saved_on_interrupt(self) -> Iterator[Interrupts]:
        """Save the state if a signal interrupts the block, and raise TrainingInterrupted; not without a folder."""
        interrupts = Interrupts()
        if self.folder is None:
            yield interrupts
            return
        with interrupts.catch():
            try:
                yield interrupts
            except KeyboardInterrupt as error:
                if interrupts.signum is None or interrupts.deferred:
                    raise  # a second signal, perhaps in the middle of a step
                self._save()
                raise TrainingInterrupted(interrupts.signum, self.folder, self.step) from error

    def _save(self) -> None:
        if self.folder is not None:
            checkpoint.save(self.folder, self.state())
            self.saved_step = self.step

    def log_changes(self, changed: Mapping[str, tuple[Any, Any]], requested: Mapping[str, Any]) -> None:
        """Log and keep the settings that differ from those of the run, including edits of train.yaml."""
        for name, (old, new) in changed.items():
            change = Change(step=self.step, time=now(), setting=name, old=old, new=new)
            self.changes.append(change)
            if name in requested:
                _log.info("%s", change.line())
            else:
                _log.warning("%s, as in %s", change.line(), checkpoint.SETTINGS)

    def restore(self, saved: dict[str, Any]) -> None:
        """Load everything that `state` saved."""
        checkpoint.load_weights(self.model, saved)
        checkpoint.load_optimizer(self.optimizer, saved)
        for group, decay in zip(self.optimizer.param_groups, (self.config.weight_decay, 0.0), strict=True):
            group["weight_decay"] = decay
        self.step = saved["step"]
        self.saved_step = self.step
        try:
            figures = _Figures(points=saved["points"], changes=saved["changes"], recent=saved["recent"])
            torch.set_rng_state(saved["rng"])
            if self.device.type == "cuda" and saved["cuda_rng"] is not None:  # None: the run was on another device
                torch.cuda.set_rng_state(saved["cuda_rng"], self.device)
        except (ValidationError, TypeError, RuntimeError) as error:  # torch raises the latter two for a wrong state
            problem = describe_errors((), error) if isinstance(error, ValidationError) else error
            raise ConfigError(f"{checkpoint.CHECKPOINT} is not from a training run: {problem}") from error
        self.points, self.changes, self.recent = figures.points, figures.changes, figures.recent

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs."""
        return {
            "stack": self.spec.model_dump(mode="json"),
            "settings": self.settings.model_dump(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "points": [point.model_dump() for point in self.points],
            "changes": [change.model_dump() for change in self.changes],
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
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip))
        total = float(losses.total.detach())
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise self._diverged(f"the loss is {total:g}, the norm of the gradient {norm:g}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        bits = float(losses.cross_entropy.detach()) / math.log(2)
        auxiliary = {name: float(value.detach()) for name, value in losses.auxiliary.items()}
        return _Step(bits, auxiliary, rate, norm)

    def _diverged(self, problem: str) -> ConfigError:
        """Return the error for weights whose loss cannot be computed or is not finite, after `step` steps."""
        kept = ""
        if self.saved_step is not None and self.saved_step < self.step:
            command = f"deltazoo train --resume {self.folder} --lr RATE"
            kept = f"; the checkpoint holds step {self.saved_step}: {command} continues from there"
        return ConfigError(
            f"the training diverged after step {self.step}: {problem.rstrip('.')}; lower learning_rate (--lr), "
            f"got {self.config.learning_rate:g}{kept}"
        )

    def _add_point(self, seconds: list[float]) -> Point:
        """Validate, and average the steps since the previous point, which took these seconds; log the point."""
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
        bits = fmean(entropies) / math.log(2)
        if not math.isfinite(bits):
            raise self._diverged(f"the loss on validation is {bits:g}")
        tokens = self.step * self.config.batch * self.config.length
        point = Point(step=self.step, tokens=tokens, time=now(), validation_bits=bits, **figures)
        if self.folder is not None:
            checkpoint.append_record(self.folder, point)
        self.points.append(point)
        self.recent = []
        return point

    def _warm_up(self, last: int, progress: Progress) -> float:
        """Run a forward and backward pass, which compiles the graphs of training and validation; return its seconds."""

        def call() -> None:
            self._losses(self._training_batch()).total.backward()
            self.optimizer.zero_grad()

        def report(note: str) -> None:
            progress("training", self.step, last, note)

        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            if self.config.compile:
                return compile_with_progress(self.model, call, last - self.step, report)
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

    def _losses(self, batch: Batch) -> Losses:
        """Compute the losses in the compute dtype of the run."""
        try:
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
                return self.model.losses(batch.inputs, batch.targets)
        except ValueRangeError as error:  # an operand of an update is NaN or infinite
            if self.step == 0:
                raise
            raise self._diverged(str(error)) from error

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
