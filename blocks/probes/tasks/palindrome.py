"""Palindrome: random tokens, a delimiter, and the tokens in reverse order, which must be predicted."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Generator

from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws


class Palindrome(Task):
    """x1 ... xn | xn ... x1, the last token excluded from the input; n = length / 2. The delimiter is token 0."""

    name: ClassVar[str] = "palindrome"
    about: ClassVar[str] = "copying in reverse order"
    source: ClassVar[str] = "Kimi Linear, arXiv 2510.26692, section 5.1"
    published: ClassVar[str] = "figure 4 only: KDA at least as good as GDN, Mamba-2 fails"

    scaled: ClassVar[str] = (
        "two layers as in Kimi Linear; 64 tokens in place of 256 to 2,048, width 64 in place of 256, higher rates "
        "and 3,000 steps in place of 20,000, to save time"
    )

    length: int = Field(default=64, ge=2)
    lengths: tuple[int, ...] = (64,)
    tokens: int = Field(default=64, ge=3)
    steps: int = 3000

    @property
    def vocab(self) -> int:
        return self.tokens

    @property
    def chance(self) -> float:
        return 1 / (self.tokens - 1)

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        count = length // 2
        drawn_BN = draws.integers(1, self.tokens, (batch, count), generator)
        delimiter_B1 = drawn_BN[:, :1] * 0
        reversed_BN = drawn_BN.flip(1)
        tokens_BT = torch.cat((drawn_BN, delimiter_B1, reversed_BN[:, :-1]), dim=1)
        return Batch(tokens_BT, (count + draws.arange(count, generator)).expand(batch, -1), reversed_BN)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        count = list(tokens).index(0)
        return {count + i: tokens[count - 1 - i] for i in range(count)}
