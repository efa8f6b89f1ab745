"""Forgetting MQAR: some keys get a new value before the queries, which ask for the latest one."""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Generator

from deltazoo.blocks.probes.task import Batch
from deltazoo.blocks.probes.tasks import draws
from deltazoo.blocks.probes.tasks.mqar import MQAR, answers_after, with_queries


class ForgettingMQAR(MQAR):
    """MQAR in which `updates` of the keys are written again, with another value, after all pairs.

    An additive update stores both values of such a key; the delta rule replaces the first.
    """

    name: ClassVar[str] = "forgetting_mqar"
    about: ClassVar[str] = "recall of the latest value of each key"
    source: ClassVar[str] = "HazyResearch/zoology, `forgetting_mqar`"
    published: ClassVar[str] = "no table"
    scaled: ClassVar[str] = (
        "two layers of width 64 without MLP, weight decay and rates from 1e-3 to 1e-2 as in zoology's sweep; half of "
        "the keys are updated, as with zoology's defaults, 4 of 8; to save time, 12 pairs in 64 tokens in place of 16 "
        "in 128, a vocabulary of 128 in place of 8,192 and 1,500 steps of 64 in place of 22,500 of 256"
    )

    length: int = Field(default=64, ge=8)
    lengths: tuple[int, ...] = (64, 128)
    pairs: int = Field(default=12, ge=1)
    updates: int = Field(default=6, ge=1)
    tokens: int = Field(default=128, ge=8)
    steps: int = 1500
    batch: int = 64

    @model_validator(mode="after")
    def _pairs_fit(self) -> Self:
        needed = 2 * (2 * self.pairs + self.updates)
        if self.updates > self.pairs or needed > min(self.length, *self.lengths):
            raise ValueError(
                f"updates must be at most pairs, and 2 (2 pairs + updates) at most length, got {self.updates} updates "
                f"and {self.pairs} pairs for length {min(self.length, *self.lengths)}"
            )
        return self

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        half, writes = self.tokens // 2, self.pairs + self.updates
        keys_BN = 1 + draws.distinct(self.pairs, half - 1, batch, generator)
        values_BW = half + draws.distinct(writes, half, batch, generator)
        again_BU = draws.distinct(self.updates, self.pairs, batch, generator)  # the keys that are written twice
        written_BW = torch.cat((keys_BN, keys_BN.gather(1, again_BU)), dim=1)
        context_BC = torch.stack((written_BW, values_BW), dim=2).flatten(1)
        latest_BN = values_BW[:, : self.pairs].scatter(1, again_BU, values_BW[:, self.pairs :])
        return with_queries(context_BC, keys_BN, latest_BN, length, self.tokens, generator)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        return answers_after(tokens, 2 * (self.pairs + self.updates))
