"""Draw the tokens of a decoder on the device; the host reads them some steps later, without stalling the device.

B batch, L vocabulary, S slots: the last steps
"""

import functools
from typing import NamedTuple, Self

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ValueRangeError
from deltazoo.backends.torch_ext.cuda_graph import Call, capture
from deltazoo.blocks.generation.philox import uniforms
from deltazoo.blocks.generation.sampling import Sampling, penalize, sample

SLOTS = 256  # more than the steps whose tokens are on their way to the host
_MOST_GRAPHS = 8  # for different `Sampling`; one takes a few milliseconds to capture


class Rows(NamedTuple):
    """The prompts of a batch, and where the random numbers of its rows come from.

    tokens: [B, T] int64.
    mask: [B, T] bool, True at tokens and False at padding; None: no padding.
    seed, stream: [B] int64 on the CPU, see `uniforms`.
    """

    tokens: Tensor
    mask: Tensor | None
    seed: Tensor
    stream: Tensor

    @classmethod
    def of(cls, tokens_BT: Tensor, mask_BT: Tensor | None = None, seed: int | tuple[int, ...] = 0) -> Self:
        """Return rows with a stream of one seed each, or with a seed for each row."""
        rows = len(tokens_BT)
        if isinstance(seed, int):
            return cls(tokens_BT, mask_BT, torch.full((rows,), seed, device="cpu"), torch.arange(rows, device="cpu"))
        if len(seed) != rows:
            raise ValueRangeError(f"seed must be a number, or one for each of {rows} prompts, got {len(seed)}")
        seed_B = torch.tensor(seed, device="cpu")
        return cls(tokens_BT, mask_BT, seed_B, torch.zeros_like(seed_B))


class Fetch(NamedTuple):
    """Tokens on their way to the host, of which the first `rows` of each step count."""

    tokens_NB: Tensor
    rows: int
    arrived: torch.cuda.Event | None

    def wait(self) -> list[Tensor]:
        """Wait until they have arrived, and return the columns [B] on the CPU, oldest first."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return list(self.tokens_NB[:, : self.rows].to("cpu", copy=True).unbind())


class Sampler:
    """Draw one token per row from `logits_BL`, and write it to `tokens_B1`. Every tensor keeps its address.

    The random numbers of the next steps are computed on the host and copied to the device once in `SLOTS` steps.
    """

    def __init__(self, tokens_B1: Tensor, logits_BL: Tensor) -> None:
        B, device = len(tokens_B1), tokens_B1.device
        self.captures = False  # whether `begin` captures a draw in a CUDA graph
        self.asynchronous = device.type == "cuda"  # whether the host may be ahead of the device
        self._tokens_B1, self._logits_BL = tokens_B1, logits_BL
        self._slot_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._sampled_SB = torch.zeros(SLOTS, B, dtype=torch.int64, device=device)
        # MPS has no float64
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._uniform_SB = torch.zeros(SLOTS, B, dtype=dtype, device=device)
        self._host_SB = self._sampled_SB
        if self.asynchronous:
            self._host_SB = torch.zeros(SLOTS, B, dtype=torch.int64, device="cpu", pin_memory=True)
        self._seen_BL: Tensor | None = None
        self._graphs: dict[Sampling, Call] = {}

    @torch.no_grad()
    def begin(self, sampling: Sampling, rows: Rows) -> None:
        """Start with the first step of these rows, which may be fewer than those of the decoder."""
        penalizes = sampling.repetition_penalty != 1
        if penalizes and self._seen_BL is None:
            self._seen_BL = torch.zeros_like(self._logits_BL, dtype=torch.bool)
        self._replay = self._captured(sampling) if self.captures else None
        self._sampling, self._rows, self._steps = sampling, rows, 0
        if penalizes and self._seen_BL is not None:
            real_BT = torch.ones_like(rows.tokens) if rows.mask is None else rows.mask.long()
            count_BL = torch.zeros_like(self._seen_BL[: len(real_BT)], dtype=torch.int64)
            self._seen_BL[: len(real_BT)] = count_BL.scatter_add_(1, rows.tokens, real_BT) > 0

    @property
    def seen(self) -> Tensor | None:
        """The tokens of the prompts and continuations, [B, L] bool; None if no sampling had a repetition penalty."""
        return self._seen_BL

    @property
    def until_wrap(self) -> int:
        """The number of steps before the first slot is used again."""
        return SLOTS - self._steps % SLOTS

    @torch.no_grad()
    def draw(self) -> None:
        """Draw a token per row, without synchronisation."""
        slot = self._steps % SLOTS
        if not slot:
            self._slot_1.zero_()
            if self._sampling.temperature > 0:
                self._refill()
        if self._replay is not None:
            self._replay()
        else:
            self._sampled_SB[slot] = self._choose(self._sampling, self._uniform_SB[slot])
        self._steps += 1

    def fetch(self, count: int) -> Fetch:
        """Start to copy the tokens of the last `count` steps, all since the last wrap, to the host."""
        end = (self._steps - 1) % SLOTS + 1
        host_NB, arrived = self._host_SB[end - count : end], None
        if self._host_SB is not self._sampled_SB:
            host_NB.copy_(self._sampled_SB[end - count : end], non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self._slot_1.device))
        return Fetch(host_NB, len(self._rows.tokens), arrived)

    def _refill(self) -> None:
        """Compute the random numbers of the next `SLOTS` steps."""
        numbers_SB = torch.zeros_like(self._uniform_SB, device="cpu", pin_memory=self._uniform_SB.is_cuda)
        numbers_SB[:, : len(self._rows.seed)] = uniforms(self._rows.seed, self._rows.stream, self._steps, SLOTS)
        self._uniform_SB.copy_(numbers_SB, non_blocking=True)

    def _choose(self, sampling: Sampling, uniform_B: Tensor) -> Tensor:
        """Draw the tokens, write them to `tokens_B1`, and return them."""
        logits_BL, seen_BL = self._logits_BL, self._seen_BL
        if sampling.repetition_penalty != 1 and seen_BL is not None:
            logits_BL = penalize(logits_BL, seen_BL, sampling.repetition_penalty)
        token_B = sample(logits_BL, sampling, uniform_B)
        self._tokens_B1.copy_(token_B[:, None])
        if sampling.repetition_penalty != 1 and seen_BL is not None:
            seen_BL.scatter_(1, self._tokens_B1, True)
        return token_B

    def _choose_on_device(self, sampling: Sampling) -> None:
        """Draw the tokens of the slot in `_slot_1`, which a CUDA graph reads and increments."""
        uniform_1B = self._uniform_SB[:1]
        if sampling.temperature > 0:
            uniform_1B = self._uniform_SB.index_select(0, self._slot_1)
        token_B = self._choose(sampling, uniform_1B[0])
        self._sampled_SB.index_copy_(0, self._slot_1, token_B[None])
        self._slot_1.add_(1)

    def _captured(self, sampling: Sampling) -> Call:
        """Return a call that replays a CUDA graph of a draw. Its key is the part of `sampling` that a draw reads."""
        key = sampling.model_copy(update={"max_tokens": 1, "stop": (), "seed": None})
        if key not in self._graphs:
            while len(self._graphs) >= _MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._slot_1.zero_()  # the slot of the warm-up
            self._graphs[key] = capture(functools.partial(self._choose_on_device, sampling), self._slot_1.device)
        return self._graphs[key]
