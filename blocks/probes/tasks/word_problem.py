"""Word problems: the product of all group elements so far."""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from deltazoo.blocks.probes.prefix_task import PrefixTask
from deltazoo.blocks.probes.task import Batch, Dtype
from deltazoo.blocks.probes.tasks import draws

Permutation = tuple[int, ...]


class WordProblem(PrefixTask):
    """Random elements of a permutation group; the answer at each is the product so far, x_t ... x_2 x_1."""

    name: ClassVar[str] = "word_problem"
    about: ClassVar[str] = "tracking a permutation beyond the training length"
    source: ClassVar[str] = "Siems 2025, arXiv 2502.10297, section 5.1; Merrill 2024, arXiv 2404.08819"
    published: ClassVar[str] = (
        "S3, trained to 128, tested to 512, one layer: DeltaProduct with n = 2 and eigenvalues in [-1, 1] solves it; "
        "n = 1, or eigenvalues in [0, 1], does not"
    )

    scaled: ClassVar[str] = (
        "one layer of width 128, 4 heads of 32 and no weight decay as in the defaults of DeltaProduct's code; to "
        "save time, 32 and 128 tokens in place of 128 and 512, 3,000 steps of 128 in place of 4,900 of 2,048; a second "
        "rate"
    )

    group: Literal["S3", "S4", "A5", "S5"] = "S3"
    length: int = Field(default=32, ge=2)
    lengths: tuple[int, ...] = (32, 128)
    depth: int = 1
    width: int = 128
    heads: int = 4
    steps: int = 3000
    batch: int = 128
    rates: tuple[float, ...] = (1e-3, 3e-3)
    weight_decay: float = 0.0
    dtype: Dtype = "float32"

    @property
    def vocab(self) -> int:
        return len(elements(self.group))

    @property
    def chance(self) -> float:
        return 1 / self.vocab

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        tokens_BT = draws.integers(0, self.vocab, (batch, length), generator)
        table = _table_on(self.group, generator.device)
        # The product is associative: after the pass with distance d, each place holds the product of 2 d elements.
        product_BT, distance = tokens_BT, 1
        while distance < length:
            after_BT = table[product_BT[:, distance:], product_BT[:, :-distance]]
            product_BT = torch.cat((product_BT[:, :distance], after_BT), dim=1)
            distance *= 2
        return Batch(tokens_BT, draws.arange(length, generator).expand(batch, -1), product_BT)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        group = elements(self.group)
        product, answers = tuple(range(len(group[0]))), {}
        for place, token in enumerate(tokens):
            product = compose(group[token], product)
            answers[place] = group.index(product)
        return answers


def compose(first: Permutation, second: Permutation) -> Permutation:
    """Return the permutation that applies `second`, then `first`."""
    return tuple(first[i] for i in second)


@cache
def elements(group: str) -> list[Permutation]:
    """List the permutations of S_n, or the even ones of A_n; the first is the identity."""
    everything = itertools.permutations(range(int(group[1:])))
    return [each for each in everything if group[0] == "S" or _is_even(each)]


def _is_even(permutation: Permutation) -> bool:
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


@cache
def _table_on(group: str, device: torch.device) -> Tensor:
    """Return the multiplication table: entry [a, b] is the index of a b."""
    listed = elements(group)
    index = {element: i for i, element in enumerate(listed)}
    return torch.tensor([[index[compose(a, b)] for b in listed] for a in listed], device=device)
