"""Modular arithmetic without brackets: the value of an expression of digits and + - * so far."""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Generator

from deltazoo.blocks.probes.prefix_task import PrefixTask
from deltazoo.blocks.probes.task import Batch, Dtype
from deltazoo.blocks.probes.tasks import draws

SIGNS = "+-*"


class ModularArithmetic(PrefixTask):
    """d o d o d ... with digits d below `modulus` and o one of + - *, which has precedence.

    The answer at each digit is the value of the expression up to it; operators are not scored.
    """

    name: ClassVar[str] = "modular_arithmetic"
    about: ClassVar[str] = "simulating a finite automaton beyond the training length"
    source: ClassVar[str] = "Deletang 2022, arXiv 2207.02098; Grazzi 2024, arXiv 2411.12537, section 5.1"
    published: ClassVar[str] = (
        "scaled accuracy of Mamba-3's table 5b, 3 layers: Mamba-3 98.51, Mamba-2 47.81, GDN with eigenvalues in "
        "[-1, 1] 99.25"
    )

    scaled: ClassVar[str] = (
        "3 layers and batch 256 as for Mamba-3; 39 tokens without a curriculum; half of its 10,000 steps, to save time"
    )

    length: int = Field(default=39, ge=3)
    lengths: tuple[int, ...] = (39, 255)
    modulus: int = Field(default=5, ge=2)
    depth: int = 3
    steps: int = 5000
    weight_decay: float = 0.0
    batch: int = 256
    dtype: Dtype = "float32"

    @model_validator(mode="after")
    def _lengths_are_odd(self) -> Self:
        if not all(length % 2 for length in (self.length, *self.lengths)):
            raise ValueError(f"length and lengths must be odd, got {self.length} and {self.lengths}")
        return self

    @property
    def vocab(self) -> int:
        return self.modulus + len(SIGNS)

    @property
    def chance(self) -> float:
        return 1 / self.modulus

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        count = (length + 1) // 2
        digits_BN = draws.integers(0, self.modulus, (batch, count), generator)
        signs_BN = draws.integers(0, len(SIGNS), (batch, count), generator)
        sums_B, product_B = torch.zeros_like(digits_BN[:, 0]), digits_BN[:, 0]
        answers = [product_B]
        for n in range(1, count):
            digit_B, sign_B = digits_BN[:, n], signs_BN[:, n]
            sums_B = torch.where(sign_B == 2, sums_B, sums_B + product_B) % self.modulus
            signed_B = torch.where(sign_B == 1, -digit_B, digit_B)
            product_B = torch.where(sign_B == 2, product_B * digit_B, signed_B) % self.modulus
            answers.append((sums_B + product_B) % self.modulus)
        signs_BN = signs_BN + self.modulus
        tokens_BT = torch.stack((signs_BN, digits_BN), dim=2).flatten(1)[:, 1:]
        places_BN = (2 * draws.arange(count, generator)).expand(batch, -1)
        return Batch(tokens_BT, places_BN, torch.stack(answers, dim=1))

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        text = [str(t) if t < self.modulus else SIGNS[t - self.modulus] for t in tokens]
        return {place: eval("".join(text[: place + 1])) % self.modulus for place in range(0, len(tokens), 2)}
