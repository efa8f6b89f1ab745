"""Stacks: operations PUSH id x and POP id on many stacks; the element that POP removes must be predicted."""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Generator

from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX
from deltazoo.blocks.probes.task import Batch, Task
from deltazoo.blocks.probes.tasks import draws

_PUSH, _POP = 0, 1


class Stacks(Task):
    """Operations of three tokens: operation, stack, element. The answer at the stack of a POP is the element on top.

    A POP from an empty stack is followed by a random element and not scored.
    """

    name: ClassVar[str] = "stacks"
    about: ClassVar[str] = "last-in first-out memory under many keys"
    source: ClassVar[str] = "Kimi Linear, arXiv 2510.26692, section 5.1, with 64 stacks"
    published: ClassVar[str] = "figure 4 only: KDA at least as good as GDN, Mamba-2 fails"

    scaled: ClassVar[str] = (
        "two layers as in Kimi Linear; 16 stacks in 192 tokens, as many operations on each as with 64 in 768; width "
        "64 in place of 256, higher rates and 3,000 steps in place of 20,000, to save time"
    )

    length: int = Field(default=192, ge=3)
    lengths: tuple[int, ...] = (192, 384)
    stacks: int = Field(default=16, ge=1)
    elements: int = Field(default=64, ge=2)
    steps: int = 3000

    @model_validator(mode="after")
    def _operations_fill_the_length(self) -> Self:
        if any(length % 3 for length in (self.length, *self.lengths)):
            raise ValueError(f"length and lengths must be multiples of 3, got {self.length} and {self.lengths}")
        return self

    @property
    def vocab(self) -> int:
        return 2 + self.stacks + self.elements

    @property
    def chance(self) -> float:
        return 1 / self.elements

    def draw(self, batch: int, length: int, generator: Generator) -> Batch:
        count = length // 3
        is_push_BN = draws.uniform((batch, count), generator) < 0.5
        stack_BN = draws.integers(0, self.stacks, (batch, count), generator)
        drawn_BN = draws.integers(0, self.elements, (batch, count), generator)
        # A height never falls below 0: it is the partial sum of a stack's steps minus the least partial sum so far.
        is_stack_BNS = stack_BN[:, :, None] == draws.arange(self.stacks, generator)
        sums_BNS = (is_stack_BNS * torch.where(is_push_BN, 1, -1)[:, :, None]).cumsum(1)
        heights_BNS = sums_BNS - sums_BNS.cummin(1).values.clamp(max=0)
        after_BN = heights_BNS.gather(2, stack_BN[:, :, None])[:, :, 0]
        before_BN = torch.where(is_push_BN, after_BN - 1, after_BN + 1)
        # A POP removes what the latest PUSH to the same stack and height has stored.
        order_N = draws.arange(count, generator)
        stored_BNN = (
            is_push_BN[:, None]
            & (stack_BN[:, None] == stack_BN[:, :, None])
            & (after_BN[:, None] == before_BN[:, :, None])
            & (order_N[None] < order_N[:, None])
        )
        source_BN = torch.where(stored_BNN, order_N, -1).amax(2)
        has_answer_BN = ~is_push_BN & (source_BN >= 0)
        # On an empty stack the height stays 0, so `before` is 1 without a PUSH since the stack was empty last.
        was_empty_BN = ~is_push_BN & _is_clamped(sums_BNS, stack_BN)
        has_answer_BN = has_answer_BN & ~was_empty_BN
        element_BN = torch.where(has_answer_BN, drawn_BN.gather(1, source_BN.clamp(min=0)), drawn_BN)
        operation_BN = torch.where(is_push_BN, _PUSH, _POP)
        tokens_BT = torch.stack((operation_BN, 2 + stack_BN, 2 + self.stacks + element_BN), dim=2).flatten(1)
        answers_BN = torch.where(has_answer_BN, 2 + self.stacks + element_BN, IGNORE_INDEX)
        return Batch(tokens_BT, (3 * order_N + 1).expand(batch, -1), answers_BN)

    def solve(self, tokens: Sequence[int]) -> dict[int, int]:
        stacks: list[list[int]] = [[] for _ in range(self.stacks)]
        answers = {}
        for place in range(0, len(tokens), 3):
            operation, stack, element = tokens[place], stacks[tokens[place + 1] - 2], tokens[place + 2]
            if operation == _PUSH:
                stack.append(element)
            elif stack:
                answers[place + 1] = stack.pop()
        return answers


def _is_clamped(sums_BNS: torch.Tensor, stack_BN: torch.Tensor) -> torch.Tensor:
    """Whether each operation's stack had its lowest sum before 0 or lower, that is, was empty before a POP."""
    lowest_BNS = sums_BNS.cummin(1).values.clamp(max=0)
    before_BNS = torch.nn.functional.pad(lowest_BNS, (0, 0, 1, 0))[:, :-1]
    fell_BNS = lowest_BNS < before_BNS
    return fell_BNS.gather(2, stack_BN[:, :, None])[:, :, 0]
