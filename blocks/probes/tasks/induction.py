"""Induction heads: the token that followed a special token earlier must be predicted when that token occurs again."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from torch import Generator

from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws


class InductionHeads(Task):
    """Random tokens with one special token, number 0, and the same special token at the end."""

    name: ClassVar[str] = "induction"
    about: ClassVar[str] = "recall of what followed a token, at lengths far beyond training"
    source: ClassVar[str] = "Gu & Dao 2023, arXiv 2312.00752, section 4.1.2 and table 11"
    published: ClassVar[str] = (
        "trained at 256 tokens, Mamba 100 % from 64 to 1,048,576; at 512, attention 58.6 to 99.6, by its positions"
    )

    scaled: ClassVar[str] = (
        "256 tokens, vocabulary 16 and two layers of width 64 as for Mamba; 2,000 steps of 64 in place of 204,800 "
        "of 8, and lengths up to 4,096 in place of 2^20, to save time: `induction_long` reads that far; no weight "
        "decay, as in the source: with zoology's 0.1 Mamba forgets within 65,536 tokens; the source has constant rates "
        "of 1e-3 for Mamba and 2e-4 for others"
    )

    length: int = Field(default=256, ge=4)
    lengths: tuple[int, ...] = (256, 1024, 4096)
    weight_decay: float = 0.0
    tokens: int = Field(default=16, ge=3)

    @property
    def vocab(self) -> int:
        return self.tokens

    @property
    def chance(self) -> float:
        return 1 / (self.tokens - 1)

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        tokens_BT = draws.integers(1, self.tokens, (batch, length), generator)
        special_B1 = draws.integers(0, length - 2, (batch, 1), generator)
        tokens_BT = tokens_BT.scatter(1, special_B1, 0)
        tokens_BT[:, -1] = 0
        place_B1 = special_B1 * 0 + length - 1
        return Batch(tokens_BT, place_B1, tokens_BT.gather(1, special_B1 + 1))

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        return {len(tokens) - 1: tokens[list(tokens).index(0) + 1]}
