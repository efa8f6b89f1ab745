"""Drawn tokens on their way to the host."""

from typing import NamedTuple, Self

import torch

from deltazoo.backends.ops.prompt_lookup import REJECTED
from deltazoo.blocks.generation.engine.job import Job
from deltazoo.blocks.generation.engine.request import TokenLogprobs
from deltazoo.blocks.generation.engine.row_sampling import Drawn


class Flight(NamedTuple):
    """Drawn tokens on their way to the host, and the job of each row (None: its prompt is not read yet)."""

    jobs: list[Job | None]
    drawn: Drawn
    arrived: torch.cuda.Event | None

    @classmethod
    def start(cls, jobs: list[Job | None], drawn: Drawn) -> Self:
        """Copy drawn tokens to the host, on CUDA without waiting for them."""
        if not drawn.token.is_cuda:
            return cls(jobs, drawn, None)
        copies = {name: x.to("cpu", non_blocking=True) for name, x in drawn._asdict().items() if x is not None}
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(drawn.token.device))
        return cls(jobs, Drawn(**copies), arrived)

    def wait(self) -> list[list[int]]:
        """Wait until the tokens have arrived, and return those of each row without rejected ones."""
        if self.arrived is not None:
            self.arrived.synchronize()
        rows: list[list[int]] = self.drawn.token.tolist()
        return [[token for token in row if token != REJECTED] for row in rows] if self.has_drafts else rows

    @property
    def has_drafts(self) -> bool:
        """Whether the tokens are those of a pass with drafts."""
        return self.drawn.token.shape[1] > 1

    def logprobs(self, row: int, place: int, count: int | None) -> TokenLogprobs | None:
        """Return the log-probabilities at a token of a row, with the `count` most likely ones; None: none."""
        if count is None:
            return None
        drawn, top = self.drawn, tuple[tuple[int, float], ...]()
        assert drawn.logprob is not None
        if count:
            assert drawn.top_token is not None and drawn.top_logprob is not None
            tokens, values = drawn.top_token[row, place, :count], drawn.top_logprob[row, place, :count]
            top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return TokenLogprobs(float(drawn.logprob[row, place]), top)
