"""Compression: all tokens of a sequence must be predicted from the vector of its last token."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator

from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws


class Compression(Task):
    """x1 ... xn C; the answers x1 ... xn are read from the output at C, by an MLP that gets the index of the answer."""

    name: ClassVar[str] = "compression"
    about: ClassVar[str] = "a sequence stored in one vector"
    source: ClassVar[str] = "Poli 2024, arXiv 2403.17844: compression of MAD"
    published: ClassVar[str] = "mean over settings, in figures"
    scaled: ClassVar[str] = (
        "16 tokens, sequences of 32, two layers of width 128, each with an MLP, and batch 128 as in MAD; fresh "
        "sequences and 2,000 steps in place of 200 epochs of 12,800 sequences, and higher rates, to save time"
    )

    length: int = Field(default=32, ge=2)
    lengths: tuple[int, ...] = (32,)
    tokens: int = Field(default=16, ge=2)
    width: int = 128
    mlp: float = 2.0
    batch: int = 128

    @property
    def vocab(self) -> int:
        return self.tokens + 1

    @property
    def chance(self) -> float:
        return 1 / self.tokens

    @property
    def decoded(self) -> int:
        return self.length - 1

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        drawn_BN = draws.integers(0, self.tokens, (batch, length - 1), generator)
        tokens_BT = torch.nn.functional.pad(drawn_BN, (0, 1), value=self.tokens)
        return Batch(tokens_BT, torch.full_like(drawn_BN, length - 1), drawn_BN)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        return dict(enumerate(tokens[:-1]))
