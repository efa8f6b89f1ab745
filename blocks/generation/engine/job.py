"""A request in the engine: what the host knows of its state, of its pages and of its next random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltazoo.blocks.generation.engine.prefix_tree import Node
from deltazoo.blocks.generation.engine.request import Continuation, Request
from deltazoo.blocks.generation.engine.row_sampling import DrawKind
from deltazoo.blocks.generation.philox import uniforms

_NUMBERS = 64  # random numbers of a request that are computed at once
_NEW_PASS = 0.25  # weight of a pass in the mean over recent ones


@dataclass(eq=False)
class Job:
    """A request in the engine.

    Args:
        number: increases with each request.
        prompt: its tokens [T] on the CPU.
        seed: of its random numbers.
        longest: maximum number of tokens in its caches.
        kind: what its draws need.
        node: its node in the prefix tree, if there is one.
        read: tokens of the prompt that its state includes.
        pages: of its caches, in the order of its tokens.
        drawn: tokens whose sampling has been launched; the host may not have received all of them yet. Accepted drafts
            are counted when the host receives them.
        tokens_per_pass: mean over its recent passes with drafts. The initial value lets about four passes show whether
            drafts are worth their time.
    """

    request: Request
    continuation: Continuation
    number: int
    prompt: Tensor
    seed: int
    longest: int
    kind: DrawKind
    node: Node | None = None
    read: int = 0
    pages: list[int] = field(default_factory=list)
    drawn: int = 0
    tokens_per_pass: float = 2.0
    _numbers: list[float] = field(default_factory=list)
    _first: int = 0  # the number of the first of `_numbers`

    @property
    def has_drawn_all(self) -> bool:
        return self.drawn >= self.request.sampling.max_tokens

    def count_pass(self, tokens: int) -> None:
        """Count a pass with drafts, which yielded `tokens` tokens, when the host receives them."""
        self.drawn += tokens - 1
        self.request.passes += 1
        self.tokens_per_pass += _NEW_PASS * (tokens - self.tokens_per_pass)


def next_numbers(jobs: Sequence[Job | None], count: int) -> list[list[float]]:
    """Return for each job how many tokens it has drawn, and the random numbers of its next ones, 0 where none matter.

    They are those of a run of this request alone. Whenever a job needs new numbers, all jobs get new ones, so that
    there are few calls of the generator.
    """
    sampled = [job for job in jobs if job is not None and job.kind.samples]
    if any(job.drawn - job._first + count > len(job._numbers) for job in sampled):
        seed_J, drawn_J = (
            torch.tensor(values, device="cpu")
            for values in ([job.seed for job in sampled], [job.drawn for job in sampled])
        )
        numbers_NJ = uniforms(seed_J, torch.zeros_like(seed_J), drawn_J, _NUMBERS + count)
        for job, numbers in zip(sampled, numbers_NJ.T.tolist(), strict=True):
            job._numbers, job._first = numbers, job.drawn
    return [_numbers_of(job, count) for job in jobs]


def _numbers_of(job: Job | None, count: int) -> list[float]:
    if job is None:
        return [0.0] * (1 + count)
    if not job.kind.samples:
        return [job.drawn, *[0.0] * count]
    at = job.drawn - job._first
    return [job.drawn, *job._numbers[at : at + count]]
