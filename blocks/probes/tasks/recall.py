"""In-context recall: pairs of keys and values from small vocabularies; a key that occurs again has the same value."""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Generator

from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX
from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws


class Recall(Task):
    """k1 v1 k2 v2 ..., where a share of the pairs is noise; the answer at a key that occurred before is its value.

    Keys are the lower half of `tokens`, values the upper half, and noise has tokens of its own.
    """

    name: ClassVar[str] = "recall"
    about: ClassVar[str] = "recall of values by repeated keys"
    source: ClassVar[str] = "Poli 2024, arXiv 2403.17844: (noisy) in-context recall of MAD"
    published: ClassVar[str] = "mean over settings, in figures"
    scaled: ClassVar[str] = (
        "16 tokens for keys and values, 128 tokens, two layers of width 128, each with an MLP, and batch 128 as in "
        "MAD; fresh sequences and 2,000 steps in place of 200 epochs of 12,800 sequences, and higher rates, to save "
        "time"
    )

    length: int = Field(default=128, ge=4)
    lengths: tuple[int, ...] = (128, 256)
    tokens: int = Field(default=16, ge=4)
    noise: float = Field(default=0.0, ge=0, lt=1)
    noise_tokens: int = Field(default=0, ge=0)
    width: int = 128
    mlp: float = 2.0
    batch: int = 128

    @model_validator(mode="after")
    def _lengths_are_even_and_noise_has_tokens(self) -> Self:
        if any(length % 2 for length in (self.length, *self.lengths)):
            raise ValueError(f"length and lengths must be even, got {self.length} and {self.lengths}")
        if (self.noise > 0) != (self.noise_tokens > 0):
            raise ValueError(
                f"noise and noise_tokens must both be 0 or both be positive, got {self.noise} and {self.noise_tokens}"
            )
        return self

    @property
    def vocab(self) -> int:
        return self.tokens + self.noise_tokens

    @property
    def chance(self) -> float:
        return 1 / (self.tokens - self.tokens // 2)

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        count, half = length // 2, self.tokens // 2
        keys_BN = draws.integers(0, half, (batch, count), generator)
        map_BK = draws.integers(half, self.tokens, (batch, half), generator)
        values_BN = map_BK.gather(1, keys_BN)
        is_noise_BN = draws.uniform((batch, count), generator) < self.noise
        is_key_BNK = (keys_BN[:, :, None] == draws.arange(half, generator)) & ~is_noise_BN[:, :, None]
        seen_BNK = is_key_BNK.cumsum(1) - is_key_BNK.long()
        is_repeated_BN = (seen_BNK.gather(2, keys_BN[:, :, None])[:, :, 0] > 0) & ~is_noise_BN
        pairs_BN2 = torch.stack((keys_BN, values_BN), dim=2)
        if self.noise_tokens:
            noise_BN2 = draws.integers(self.tokens, self.vocab, (batch, count, 2), generator)
            pairs_BN2 = torch.where(is_noise_BN[:, :, None], noise_BN2, pairs_BN2)
        places_BN = (2 * draws.arange(count, generator)).expand(batch, -1)
        return Batch(pairs_BN2.flatten(1), places_BN, torch.where(is_repeated_BN, values_BN, IGNORE_INDEX))

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        values: dict[int, int] = {}
        answers = {}
        for place in range(0, len(tokens), 2):
            key, value = tokens[place], tokens[place + 1]
            if key >= self.tokens:
                continue
            if key in values:
                answers[place] = values[key]
            values[key] = value
        return answers
