"""In-context regression: the value of a linear function must be predicted from examples in the sequence.

B sequences, N examples, D coordinates
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX
from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws

_ZERO = 1e-6  # squared length of a vector that depends on others; those that do not have more than 1e-3 for D <= 8


class Regression(Task):
    """x1 y1 x2 y2 ... with x in {-1, 1}^D, D tokens, and y = w x, a token; w in {-1, 0, 1}^D differs between sequences.

    The answer at the last token of x is y. It is scored if the examples before determine it, which is when x is a
    linear combination of theirs, and if neither x nor -x is among them: no answer can be recalled.
    """

    name: ClassVar[str] = "regression"
    about: ClassVar[str] = "a linear function of a few bits, in context"
    source: ClassVar[str] = "Garg 2022, arXiv 2208.01066; here with discrete x and y, so that answers are exact"
    published: ClassVar[str] = "in figures, for real numbers"
    scaled: ClassVar[str] = (
        "6 coordinates of -1 or 1 and exact answers, in place of 20 normal ones with a squared error; two layers of "
        "width 128, each with an MLP, in place of 12 of width 256; 4,000 steps of 128 in place of 500,000 of 64, to "
        "save time. Most scored answers are in the first 168 tokens, because later x have occurred"
    )

    length: int = Field(default=168, ge=4)
    lengths: tuple[int, ...] = (168, 336)
    coordinates: int = Field(default=6, ge=3, le=8)  # with 2, each x that is determined has occurred, up to its sign
    width: int = 128
    mlp: float = 2.0
    steps: int = 4000
    batch: int = 128
    rates: tuple[float, ...] = (1e-3, 3e-3)

    @model_validator(mode="after")
    def _examples_fill_the_length(self) -> Self:
        if any(length % (self.coordinates + 1) for length in (self.length, *self.lengths)):
            raise ValueError(
                f"length and lengths must be multiples of coordinates + 1 = {self.coordinates + 1}, got {self.length} "
                f"and {self.lengths}"
            )
        return self

    @property
    def vocab(self) -> int:
        return 4 * self.coordinates + 1

    @property
    def chance(self) -> float:
        return _most_likely(self.coordinates)

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        D = self.coordinates
        count = length // (D + 1)
        bits_BND = draws.integers(0, 2, (batch, count, D), generator)
        x_BND = 2 * bits_BND - 1
        y_BN = (x_BND * draws.integers(-1, 2, (batch, 1, D), generator)).sum(2)
        # rest_BDD is the projection onto the orthogonal complement of the examples so far.
        rest_BDD = torch.eye(D, dtype=torch.float64, device=generator.device).expand(batch, D, D)
        determined = []
        for n in range(count):
            residual_BD = (rest_BDD @ x_BND[:, n, :, None].double())[:, :, 0]
            square_B = residual_BD.square().sum(1)
            determined.append(square_B < _ZERO)
            step_BD = residual_BD / square_B.clamp(min=_ZERO)[:, None]
            added_BDD = torch.where(determined[-1][:, None, None], 0.0, residual_BD[:, :, None] * step_BD[:, None])
            rest_BDD = rest_BDD - added_BDD
        x_tokens_BND = bits_BND + 2 * draws.arange(D, generator)
        y_tokens_BN = 3 * D + y_BN
        is_scored_BN = torch.stack(determined, dim=1) & ~_has_occurred(bits_BND)
        tokens_BT = torch.cat((x_tokens_BND, y_tokens_BN[:, :, None]), dim=2).flatten(1)
        places_BN = (D - 1 + (D + 1) * draws.arange(count, generator)).expand(batch, -1)
        return Batch(tokens_BT, places_BN, torch.where(is_scored_BN, y_tokens_BN, IGNORE_INDEX))

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        D, basis, answers = self.coordinates, dict[int, tuple[list[Fraction], Fraction]](), dict[int, int]()
        occurred = set[tuple[Fraction, ...]]()
        for start in range(0, len(tokens), D + 1):
            x = [Fraction(2 * (token % 2) - 1) for token in tokens[start : start + D]]
            y = Fraction(tokens[start + D] - 3 * D)
            is_new = tuple(x) not in occurred
            occurred |= {tuple(x), tuple(-each for each in x)}
            predicted = Fraction(0)
            for pivot, (row, value) in basis.items():
                factor = x[pivot] / row[pivot]
                x = [a - factor * b for a, b in zip(x, row, strict=True)]
                predicted += factor * value
            left = [i for i, a in enumerate(x) if a]
            if left:
                basis[left[0]] = x, y - predicted
            elif is_new:
                answers[start + D - 1] = 3 * D + int(predicted)
        return answers


def _has_occurred(bits_BND: Tensor) -> Tensor:
    """Return whether x or -x is among the examples before, [B, N]."""
    signs_BND = bits_BND ^ bits_BND[:, :, :1]  # equal for x and -x
    same_BNN = (signs_BND[:, :, None] == signs_BND[:, None]).all(dim=3)
    return same_BNN.tril(-1).any(dim=2)


def _most_likely(coordinates: int) -> float:
    """Return the accuracy of a guess that knows whether y is even, which it is for all examples of a sequence or none.

    y is distributed as a sum of numbers that are -1, 0 or 1: the most likely even one is 0, the most likely odd one 1.
    """
    counts = {0: 1}
    for _ in range(coordinates):
        counts = {
            total: sum(counts.get(total - step, 0) for step in (-1, 0, 1))
            for total in range(min(counts) - 1, max(counts) + 2)
        }
    return (counts[0] + counts[1]) / 3**coordinates
