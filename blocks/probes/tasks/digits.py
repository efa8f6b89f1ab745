"""Digits: 8 x 8 images of handwritten digits, read pixel by pixel, whose digit must be named after the last one."""

import gzip
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Generator, Tensor

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws

_GREYS, _PIXELS, _TEST = 17, 64, 360  # the last 360 of 1,797 images


class Images(NamedTuple):
    """pixels: [n, 64] int64 in [0, 16]; digits: [n] int64 in [0, 9]."""

    pixels: Tensor
    digits: Tensor


class Digits(Task):
    """64 pixels, a token for each of 17 greys; the answer at the last one is the digit, a token after the greys.

    The images of the evaluation are others than those of the training. Their pixels are multiplied by `factor` and
    rounded, get normal noise with the standard deviation `noise`, are clamped to the greys, and are 0 with probability
    `dropped`. The training images are unchanged.
    """

    name: ClassVar[str] = "digits"
    about: ClassVar[str] = "handwritten digits, pixel by pixel"
    source: ClassVar[str] = "EFLA, Lei 2025, arXiv 2512.12602, robustness; images: UCI digits, as in scikit-learn"
    published: ClassVar[str] = "in figures, for MNIST"
    scaled: ClassVar[str] = (
        "8 x 8 images and 1,437 of them for training, in place of 28 x 28 and 60,000; a token per grey in place of a "
        "real number; two layers of width 64 and 2,000 steps of 64; evaluated on draws from 360 images"
    )

    length: int = Field(default=_PIXELS, ge=_PIXELS, le=_PIXELS)
    lengths: tuple[int, ...] = (_PIXELS,)
    dropped: float = Field(default=0.0, ge=0, lt=1)
    factor: float = Field(default=1.0, gt=0)
    noise: float = Field(default=0.0, ge=0)

    @property
    def vocab(self) -> int:
        return _GREYS + 10

    @property
    def chance(self) -> float:
        return 0.1

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        pixels, digits = _images(generator.device)
        row_B = draws.integers(0, pixels.shape[0] - _TEST, (batch,), generator)
        return _batch(pixels[row_B], digits[row_B])

    def draw_evaluation(self, batch: int, length: int, generator: Generator) -> Batch:
        pixels, digits = _images(generator.device)
        row_B = draws.integers(pixels.shape[0] - _TEST, pixels.shape[0], (batch,), generator)
        noise_BT = torch.randn(batch, length, generator=generator, device=generator.device)
        is_kept_BT = draws.uniform((batch, length), generator) >= self.dropped
        changed_BT = (pixels[row_B] * self.factor + self.noise * noise_BT).round().clamp(0, _GREYS - 1)
        return _batch((changed_BT * is_kept_BT).long(), digits[row_B])

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        pixels, digits = _images(torch.device("cpu"))
        (row,) = (pixels == torch.tensor(tokens)).all(dim=1).nonzero()[:1].flatten().tolist()
        return {_PIXELS - 1: _GREYS + int(digits[row])}


def _batch(pixels_BT: Tensor, digits_B: Tensor) -> Batch:
    last_B1 = torch.full_like(pixels_BT[:, :1], _PIXELS - 1)
    return Batch(pixels_BT, last_B1, _GREYS + digits_B[:, None])


@cache
def _images(device: torch.device) -> Images:
    """Read the images that scikit-learn ships, without importing it. Raises: ConfigError: it is not installed."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("the task digits needs the images of scikit-learn: pip install scikit-learn")
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = torch.tensor([[int(float(x)) for x in line.split(",")] for line in file])
    return Images(rows[:, :_PIXELS].to(device), rows[:, _PIXELS].to(device))
