"""Multi-query associative recall: pairs of keys and values, then every key once, whose value must be predicted."""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws

_POWER = 0.01  # exponent of the distribution of the gaps, zoology's power_a


class MQAR(Task):
    """k1 v1 k2 v2 ... then queries k among random tokens, with gaps from a power law; the answer to k is its value.

    Keys are drawn from the lower half of the vocabulary without 0, values from the upper half.
    """

    name: ClassVar[str] = "mqar"
    about: ClassVar[str] = "recall of the value of each key"
    source: ClassVar[str] = "Arora 2023, arXiv 2312.04927, and HazyResearch/zoology; Kimi Linear, arXiv 2510.26692"
    published: ClassVar[str] = "Kimi Linear, figure 4: KDA learns at least as fast as GDN, and Mamba-2 fails"

    scaled: ClassVar[str] = (
        "vocabulary 8,192, two layers of width 64 without MLP, weight decay and rates from 1e-3 to 1e-2 as in "
        "zoology's sweeps; one of its sizes, 32 pairs in 128 tokens, in place of a mixture; 3,000 steps of 128 in "
        "place of 22,500 of 256, to save time"
    )

    length: int = Field(default=128, ge=8)
    lengths: tuple[int, ...] = (128, 256)
    pairs: int = Field(default=32, ge=1)
    tokens: int = Field(default=8192, ge=8)
    steps: int = 3000
    batch: int = 128

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        if 4 * self.pairs > min(self.length, *self.lengths) or 2 * self.pairs >= self.tokens:
            raise ValueError(
                f"pairs must be at most length / 4 and less than tokens / 2, got {self.pairs} pairs for length "
                f"{min(self.length, *self.lengths)} and {self.tokens} tokens"
            )
        return self

    @property
    def vocab(self) -> int:
        return self.tokens

    @property
    def chance(self) -> float:
        return 1 / self.pairs

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        half, pairs = self.tokens // 2, self.pairs_of(length)
        keys_BN = 1 + draws.distinct(pairs, half - 1, batch, generator)
        values_BN = half + draws.distinct(pairs, half, batch, generator)
        context_BC = torch.stack((keys_BN, values_BN), dim=2).flatten(1)
        return with_queries(context_BC, keys_BN, values_BN, length, self.tokens, generator)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        return answers_after(tokens, 2 * self.pairs_of(len(tokens)))

    def pairs_of(self, length: int) -> int:
        """Return the number of pairs in a sequence."""
        return self.pairs


class ShortMQAR(MQAR):
    """MQAR with few pairs and words, which separates mixers within minutes."""

    scaled: ClassVar[str] = (
        "16 pairs in 64 tokens, a vocabulary of 128 and 1,500 steps of 64, to save time: with the vocabulary of 8,192 "
        "of `mqar` Gated DeltaNet has not begun to learn after 3,000 steps. The size was chosen by short runs on a "
        "CPU, in which Gated DeltaNet had learned after 400 steps, and GLA and Mamba-2 had not"
    )

    length: int = Field(default=64, ge=8)
    lengths: tuple[int, ...] = (64, 128)
    pairs: int = Field(default=16, ge=1)
    tokens: int = Field(default=128, ge=8)
    steps: int = 1500
    batch: int = 64


def with_queries(
    context_BC: Tensor, keys_BN: Tensor, values_BN: Tensor, length: int, tokens: int, generator: Generator
) -> Batch:
    """Append random values, which are no keys, and among them each key once; its answer is its value."""
    batch, context = context_BC.shape
    slots = (length - context) // 2
    weights = _POWER * torch.arange(1, slots + 1, device=generator.device) ** (_POWER - 1)
    places_BN = context + 2 * draws.distinct(keys_BN.shape[1], slots, batch, generator, weights)
    rest_BR = draws.integers(tokens // 2, tokens, (batch, length - context), generator)
    tokens_BT = torch.cat((context_BC, rest_BR), dim=1).scatter(1, places_BN, keys_BN)
    return Batch(tokens_BT, places_BN, values_BN)


def answers_after(tokens: Sequence[int], context: int) -> dict[int, int]:
    """Return the latest value of each key that follows a context of pairs."""
    latest = dict(zip(tokens[:context:2], tokens[1:context:2], strict=True))
    return {place: latest[token] for place, token in enumerate(tokens) if place >= context and token in latest}
