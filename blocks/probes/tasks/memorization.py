"""Memorization: a fixed map from keys to values, which the weights must store; the sequence does not contain it."""

from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws

_MAP_SEED = 12345


class Memorization(Task):
    """k1 ? k2 ? ... with random keys; the answer at each "?" is the value of the key before it.

    Keys are the first `facts` tokens, values the next ones, and "?" is the last token. The map is one to one and the
    same for all sequences and seeds.
    """

    name: ClassVar[str] = "memorization"
    about: ClassVar[str] = "facts stored in the weights"
    source: ClassVar[str] = "Poli 2024, arXiv 2403.17844: memorization of MAD"
    published: ClassVar[str] = "mean over settings, in figures"
    scaled: ClassVar[str] = (
        "127 facts, 32 tokens, two layers of width 128, each with an MLP, and batch 128 as in MAD; 2,000 steps in "
        "place of 20,000, and higher rates, to save time"
    )

    length: int = Field(default=32, ge=2)
    lengths: tuple[int, ...] = (32,)
    facts: int = Field(default=127, ge=2)
    width: int = 128
    mlp: float = 2.0
    batch: int = 128

    @model_validator(mode="after")
    def _lengths_are_even(self) -> Self:
        if any(length % 2 for length in (self.length, *self.lengths)):
            raise ValueError(f"length and lengths must be even, got {self.length} and {self.lengths}")
        return self

    @property
    def vocab(self) -> int:
        return 2 * self.facts + 1

    @property
    def chance(self) -> float:
        return 1 / self.facts

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        count = length // 2
        keys_BN = draws.integers(0, self.facts, (batch, count), generator)
        tokens_BT = torch.stack((keys_BN, torch.full_like(keys_BN, 2 * self.facts)), dim=2).flatten(1)
        places_BN = (1 + 2 * draws.arange(count, generator)).expand(batch, -1)
        return Batch(tokens_BT, places_BN, _values_on(self.facts, generator.device)[keys_BN])

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        values = _values_on(self.facts, torch.device("cpu")).tolist()
        return {place: values[tokens[place - 1]] for place in range(1, len(tokens), 2)}


@cache
def _values_on(facts: int, device: torch.device) -> Tensor:
    """Return the value of each key."""
    return (facts + torch.randperm(facts, generator=torch.Generator().manual_seed(_MAP_SEED))).to(device)
