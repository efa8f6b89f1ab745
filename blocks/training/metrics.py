"""The speed of a run, and the files with its points: JSON lines, CSV, and events for TensorBoard."""

import csv
import io
import time
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deltazoo.backends.io.errors import ConfigError, file_errors
from deltazoo.blocks.checkpoints import folder as checkpoint
from deltazoo.blocks.inspect.flops import PEAK_TFLOPS, token_flops
from deltazoo.blocks.parallel.ranks import Ranks
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.config import LoggingConfig, TrainConfig
from deltazoo.blocks.training.records import Point

CSV, EVENTS = "metrics.csv", "tensorboard"


class Speed:
    """The times of the steps of this process, without validations.

    Attributes: waited: seconds in which rows were read since the last point.
    """

    def __init__(self, spec: StackSpec, config: TrainConfig, ranks: Ranks, device: torch.device) -> None:
        self.spec, self.config, self.ranks, self.device = spec, config, ranks, device
        self.tokens = config.batch.step_tokens
        self.waited = 0.0
        self._seconds: list[float] = []
        self._since_point = 0
        self._last = time.perf_counter()

    @cached_property
    def _peak(self) -> float | None:
        """Tokens per second at the peak of all GPUs; first computed after the first steps, because it takes time."""
        if self.device.type != "cuda" or self.config.precision not in ("autocast", "bfloat16"):
            return None
        peak = PEAK_TFLOPS.get(torch.cuda.get_device_name(self.device))
        if peak is None:
            return None
        with torch.device("meta"):
            meta = self.spec.build()
        flops = token_flops(meta, self.spec.describe(), self.config.batch.length, "backward")
        return peak * 1e12 * self.ranks.size / flops.by_parameters

    def begin(self) -> None:
        """Begin to measure a step: after a pause, such as a validation."""
        self._last, self.waited = time.perf_counter(), 0.0

    def step_ended(self) -> None:
        """Record the time since the last step ended."""
        end = time.perf_counter()
        self._seconds.append(end - self._last)
        self._since_point += 1
        self._last = end

    def median(self, last: int | None = None) -> float | None:
        """Return the tokens per second of all processes, at the median of the last steps; None without a step."""
        seconds = self._seconds[-last:] if last else self._seconds
        return self.tokens / median(seconds) if seconds else None

    def figures(self) -> dict[str, Any]:
        """Return the figures of the steps since the last call."""
        seconds = self._seconds[-self._since_point :] if self._since_point else []
        figures: dict[str, Any] = {}
        if seconds:
            speed = self.tokens / median(seconds)
            figures = {"tokens_per_second": speed, "data_share": min(1.0, self.waited / sum(seconds))}
            if self._peak is not None:
                figures["peak_share"] = speed / self._peak
        if self.device.type == "cuda":
            figures["memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            torch.cuda.reset_peak_memory_stats(self.device)
        self._since_point = 0
        return figures


class MetricFiles:
    """Append the points of a run to its files.

    Args: folder: None: nothing is written.
    Raises: ConfigError: `tensorboard` needs a package that is not installed.
    """

    def __init__(self, folder: Path | None, config: LoggingConfig) -> None:
        self.folder = folder
        self._columns: list[str] = []
        self._events: Any = None
        if config.tensorboard and folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    "logging.tensorboard needs the package tensorboard: pip install tensorboard"
                ) from error
            self._events = SummaryWriter(str(folder / EVENTS))

    def append(self, point: Point) -> None:
        """Append a point. Raises: ConfigError: a file cannot be written."""
        if self.folder is None:
            return
        checkpoint.append_record(self.folder, point)
        self._append_row(point)
        if self._events is not None:
            for name, value in point.flat().items():
                if isinstance(value, int | float) and name != "step":
                    self._events.add_scalar(name.replace(".", "/"), value, point.step)
            self._events.flush()

    def _append_row(self, point: Point) -> None:
        """Append a row to the table; a point with new columns, or of a resumed run, writes it again."""
        assert self.folder is not None
        path, row = self.folder / CSV, point.flat()
        if self._columns and {*row} <= {*self._columns} and path.exists():
            with file_errors("write", path), path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
            return
        rows = [record.flat() for record in checkpoint.read_points(self.folder)]
        self._columns = list(dict.fromkeys(name for each in (*rows, row) for name in each))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        with file_errors("write", path):
            path.write_text(text.getvalue(), encoding="utf-8", newline="")

    def close(self) -> None:
        """Close the events of TensorBoard."""
        if self._events is not None:
            self._events.close()
