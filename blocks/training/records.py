"""The records of a training run: the points of its curves and the changes of its settings; and its result."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from deltazoo.blocks.training.config import TrainConfig


def now() -> str:
    """Return the time in UTC, such as 2026-03-01T12:00:00+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Point(BaseModel):
    """One point of the training curves, after `step` steps. Fields that describe steps are None in the first point.

    Losses are in bits per token, which is a byte in a run on a text file.

    Args:
        tokens: number of tokens that the steps have read.
        time: end of the validation, in UTC.
        train_bits: mean cross entropy in training since the previous point, in bits per token, with the z loss.
        validation_bits: cross entropy on validation at this point, in bits per token.
        auxiliary: mean auxiliary losses in training since the previous point, by name, without their coefficients.
        learning_rate: that of the last step.
        gradient_norm: that of the last step, before clipping. gradient_norms: of each layer, with `logging.groups`.
        skipped: number of skipped steps of the run.
        tokens_per_second: median since the previous point, over all processes.
        peak_share: operations per second by 6 N per token, see `deltazoo.blocks.inspect.flops`, as a share of the peak
            of all GPUs in bfloat16; None if it is unknown.
        memory_gib: peak of the memory of this process's GPU since the previous point.
        data_share: share of the time of the steps that reading rows took.
        positions: validation loss in bits by range of positions, such as "64-127", with `evaluation.positions`.
        watched: statistics of recurrent layers, with `logging.watch`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    tokens: int
    time: str
    train_bits: float | None = None
    validation_bits: float
    auxiliary: dict[str, float] = Field(default_factory=dict)
    learning_rate: float | None = None
    gradient_norm: float | None = None
    gradient_norms: dict[str, float] = Field(default_factory=dict)
    skipped: int = 0
    tokens_per_second: float | None = None
    peak_share: float | None = None
    memory_gib: float | None = None
    data_share: float | None = None
    positions: dict[str, float] = Field(default_factory=dict)
    watched: dict[str, dict[str, float]] = Field(default_factory=dict)

    def cells(self) -> list[str]:
        """Format step, training bits, validation bits and tokens per second."""
        train_bits = "" if self.train_bits is None else f"{self.train_bits:.3f}"
        speed = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}"
        return [f"{self.step}", train_bits, f"{self.validation_bits:.3f}", speed]

    def flat(self) -> dict[str, Any]:
        """Return the fields as one row, with names such as "gradient_norms.layer 3"."""
        return flat_mapping(self.model_dump())


def flat_mapping(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their joined keys."""
    row: dict[str, Any] = {}
    for key, value in data.items():
        row |= flat_mapping(value, f"{path}{key}.") if isinstance(value, Mapping) else {path + key: value}
    return row


class Change(BaseModel):
    """A setting that a resumed run changed, after `step` steps; `RULES` lists which can."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    time: str
    setting: str
    old: Any
    new: Any

    def line(self) -> str:
        """Format the change as one line."""
        return f"{self.setting}: {self.old} -> {self.new} from step {self.step} on"


def in_order(points: Sequence[Point], changes: Sequence[Change]) -> list[Point | Change]:
    """Return the records by step; the changes after a step follow its point."""
    return sorted([*points, *changes], key=lambda record: record.step)


class Training(BaseModel):
    """The result of a training run.

    Args:
        parameters: number of parameters.
        source: description of the text.
        points: the training curves; the first point is before any step.
        first_call_s: time of the first forward and backward pass of this process in seconds, compilation included; 0 if
            no step remained. No other figure includes it.
        tokens_per_second: median over the steps of this process, without validation; None if there were no steps.
        first_step_s: seconds from the call of `train` or `resume` to the end of the first step; None if there was none.
        checkpoint_stops_s: seconds for which each checkpoint stopped the training.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: TrainConfig
    parameters: int
    source: str
    points: list[Point]
    first_call_s: float
    tokens_per_second: float | None
    first_step_s: float | None = None
    checkpoint_stops_s: list[float] = Field(default_factory=list)

    @property
    def validation_bits(self) -> float:
        """Validation loss of the last point, in bits per token."""
        return self.points[-1].validation_bits

    def line(self) -> str:
        """Format the last point as one line."""
        speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} tokens/s"
        last = self.points[-1]
        return f"{last.validation_bits:.3f} bits per token on validation after {last.step} steps{speed}"
