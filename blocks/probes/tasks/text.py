"""Text: the next byte of a text, at lengths beyond that of the training."""

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator, Tensor

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.data.text import BYTES, Text, load_text
from deltazoo.blocks.probes.prefix_task import PrefixTask
from deltazoo.blocks.probes.task import Batch
from deltazoo.blocks.probes.tasks import draws


class TextTask(PrefixTask):
    """Crops of a text; the answer at each byte is the next one. Evaluated on other parts of the text than trained.

    The score of a length L is that of the bytes L / 2 to L of crops of L bytes: the loss by position.

    Args: path: a text file, or a folder of them; "": the sources of Python's standard library.
    """

    name: ClassVar[str] = "text"
    about: ClassVar[str] = "the next byte of a text"
    source: ClassVar[str] = "bits per byte of models with equal parameters and equal tokens"
    published: ClassVar[str] = "none for these models"
    scaled: ClassVar[str] = (
        "four layers of width 256 with an MLP, whose width gives each mixer the parameters of attention with an MLP of "
        "twice the width; 32 M bytes of training, at 512 bytes, in bfloat16"
    )

    path: str = ""
    length: int = Field(default=512, ge=2)
    lengths: tuple[int, ...] = (64, 256, 512, 1024, 2048, 4096)
    depth: int = 4
    width: int = 256
    heads: int = 4
    mlp: float = 2.0
    equal_parameters: bool = True
    steps: int = 2000
    batch: int = 32
    rates: tuple[float, ...] = (1e-3, 3e-3)
    evaluation_tokens: int = Field(default=2**18, ge=1)

    @property
    def vocab(self) -> int:
        return BYTES

    @property
    def chance(self) -> float:
        return 1 / BYTES

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        return _crops(_text_on(self.path, generator.device)[0], batch, length, generator)

    def draw_evaluation(self, batch: int, length: int, generator: Generator) -> Batch:
        return self.last_half(_crops(_text_on(self.path, generator.device)[1], batch, length, generator))

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        return dict(enumerate(tokens[1:]))  # the answer at the last byte is in the text only


def _crops(text_N: Tensor, batch: int, length: int, generator: Generator) -> Batch:
    if text_N.shape[0] <= length:
        raise ConfigError(f"length must be below {text_N.shape[0]}, the bytes of a part of the text, got {length}")
    first_B1 = draws.integers(0, text_N.shape[0] - length, (batch, 1), generator)
    places_T = draws.arange(length, generator)
    bytes_BT = text_N[first_B1 + draws.arange(length + 1, generator)].long()
    return Batch(bytes_BT[:, :-1].contiguous(), places_T.expand(batch, -1), bytes_BT[:, 1:].contiguous())


@cache
def _text(path: str) -> Text:
    return load_text(path or None)


@cache
def _text_on(path: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the training and the validation part of a text."""
    text = _text(path)
    return text.train.to(device), text.validation.to(device)
