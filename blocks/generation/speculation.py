"""Speculative decoding by prompt lookup: draft what followed the last tokens before, and verify the drafts in one pass.

B batch, C tokens of the history, T tokens of a pass: the last sampled one and n drafted ones, L vocabulary, S slots
"""

import weakref
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import StateError
from deltazoo.backends.ops.prompt_lookup import LONGEST_MATCH, NO_TOKEN, accept, lookup
from deltazoo.backends.torch_ext.cuda_graph import Call, capture, eager_if_refused
from deltazoo.blocks.generation.decoder import Decoder, compiled_step
from deltazoo.blocks.generation.philox import uniforms
from deltazoo.blocks.generation.sampler import Rows
from deltazoo.blocks.generation.sampling import Sampling, penalize, sample
from deltazoo.blocks.model.interface import StackState, TokenModel
from deltazoo.mixers.core.state import rollback_, snapshot

SLOTS = 64  # passes whose tokens may be on their way to the host
_MOST_GRAPHS = 8  # for different `Sampling`


def seen_before_each(seen_BL: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return which tokens precede each position of a pass if all its drafts are accepted, [B, T, L].

    Args: seen_BL: bool, the tokens up to the first one of the pass.
    """
    B, T = tokens_BT.shape
    seen_BTL = seen_BL[:, None].repeat(1, T, 1)
    for t in range(1, T):
        seen_BTL[:, t:].scatter_(2, tokens_BT[:, t, None, None].expand(B, T - t, 1), True)
    return seen_BTL


class Chosen(NamedTuple):
    """New tokens on their way to the host: [S, B, T + 1], of each pass how many count and then the tokens."""

    packed: Tensor
    rows: int
    arrived: torch.cuda.Event | None

    def wait(self) -> list[list[list[int]]]:
        """Wait until they have arrived, and return the new tokens of each row for each pass."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [[row[1 : 1 + row[0]] for row in entry] for entry in self.packed[:, : self.rows].tolist()]


class Speculator:
    """Run passes of a decoder with drafted tokens. Every tensor keeps its address.

    A pass has three parts, of which a captured decoder replays CUDA graphs: draft and verify; choose, which depends on
    the `Sampling`; commit.

    Args: drafted: number n of drafted tokens per pass. The cache of the decoder needs n slots more than without.
    """

    def __init__(self, decoder: Decoder, drafted: int) -> None:
        B, L, device = decoder.batch, decoder.logits.shape[1], decoder.tokens.device
        T = drafted + 1
        self.drafted = drafted
        self.bytes = 0  # of device memory that the graphs take
        self.tokens = torch.zeros(B, T, dtype=torch.int64, device=device)  # of the pass
        self.logits = torch.zeros(B, T, L, device=device)
        self.count = torch.zeros(B, dtype=torch.int32, device=device)  # accepted tokens of the pass
        self._chosen = torch.zeros_like(self.tokens)
        self._length = torch.ones(B, dtype=torch.int64, device=device)  # of the history
        self._drawn = torch.zeros_like(self._length)  # new tokens so far
        self._left = torch.zeros_like(self._length)  # new tokens that may follow
        self._history = self.tokens.new_full((B, 0), NO_TOKEN)
        self._uniform: Tensor | None = None
        self._seen: Tensor | None = None
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._packed = torch.zeros(SLOTS, B, T + 1, dtype=torch.int64, device=device)
        self._host = self._packed
        if device.type == "cuda":
            self._host = torch.zeros_like(self._packed, device="cpu", pin_memory=True)
        self._decoder = weakref.ref(decoder)
        self._draft: StackState | None = None
        self._read, self._keep = verify_drafts, commit_drafts
        if decoder.compile and decoder.layers is None:
            self._read, self._keep = compiled_step(verify_drafts, device), compiled_step(commit_drafts, device)
        self._graphs: tuple[Call, Call] | None = None  # of the first and the last part
        self._choices: dict[Sampling, Call] = {}
        self._captures = True  # false for a model whose passes cannot be captured

    @property
    def decoder(self) -> Decoder:
        """The decoder whose model and state it uses."""
        decoder = self._decoder()
        if decoder is None:
            raise StateError("the decoder of a Speculator must exist while it decodes, but it was freed")
        return decoder

    @torch.no_grad()
    def begin(self, sampling: Sampling, rows: Rows, first_B: Tensor) -> None:
        """Start after the prompts and the first new token of each row, which the decoder has not read.

        Args: first_B: [B], as many as the decoder has rows.
        """
        decoder, (R, P) = self.decoder, rows.tokens.shape
        self._fit(max(decoder.capacity or 0, P + sampling.max_tokens), sampling)
        count_R = torch.full((R,), P, device=rows.tokens.device) if rows.mask is None else rows.mask.sum(1)
        source_RP = (torch.arange(P, device=count_R.device) + P - count_R[:, None]) % P  # left-aligned
        self._history.fill_(NO_TOKEN)
        self._history[:R, LONGEST_MATCH : LONGEST_MATCH + P] = rows.tokens.gather(1, source_RP)
        self._length.fill_(LONGEST_MATCH + 1)
        self._length[:R] = LONGEST_MATCH + 1 + count_R
        self._history.scatter_(1, self._length[:, None] - 1, first_B[:, None])
        self._drawn.fill_(1)
        self._left.zero_()
        self._left[:R] = sampling.max_tokens - 1
        if self._uniform is not None:
            limit = sampling.max_tokens + self.drafted
            numbers_NR = uniforms(rows.seed, rows.stream, 0, limit)
            self._uniform[:R, :limit] = numbers_NR.T.to(self._uniform)
        if self._seen is not None:
            seen_BL = decoder.sampler.seen
            assert seen_BL is not None  # the first token was drawn with the same penalty
            self._seen.copy_(seen_BL)
        self._sampling, self._rows, self._passes = sampling, R, 0
        if decoder.captured and self._captures and self._graphs is None:
            self._capture()
        self._choose = None if self._graphs is None else self._captured_choice(sampling)

    @property
    def until_wrap(self) -> int:
        """The number of passes before the first slot is used again."""
        return SLOTS - self._passes % SLOTS

    @torch.no_grad()
    def step(self) -> None:
        """Run a pass, without synchronisation."""
        if not self._passes % SLOTS:
            self._slot.zero_()
        if self._graphs is None or self._choose is None:
            self._run_verify()
            self._run_choose(self._sampling)
            self._run_commit()
        else:
            self._graphs[0]()
            self._choose()
            self._graphs[1]()
        self._passes += 1
        self.decoder.steps += 1

    def fetch(self, count: int) -> Chosen:
        """Start to copy the tokens of the last `count` passes, all since the last wrap, to the host."""
        end = (self._passes - 1) % SLOTS + 1
        packed, arrived = self._host[end - count : end], None
        if self._host is not self._packed:
            packed.copy_(self._packed[end - count : end], non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self._slot.device))
        return Chosen(packed, self._rows, arrived)

    def _fit(self, capacity: int, sampling: Sampling) -> None:
        """Allocate what depends on the capacity of the decoder or on the sampling; graphs of smaller ones are freed."""
        slots = LONGEST_MATCH + capacity + self.drafted + 1
        if self._history.shape[1] < slots:
            self._history = self.tokens.new_full((len(self.tokens), slots), NO_TOKEN)
            self._uniform, self._graphs = None, None
            self._choices.clear()
        if sampling.temperature > 0 and self._uniform is None:
            wide = torch.float32 if self.tokens.device.type == "mps" else torch.float64
            self._uniform = torch.zeros(self._history.shape, dtype=wide, device=self.tokens.device)
        if sampling.repetition_penalty != 1 and self._seen is None:
            self._seen = torch.zeros_like(self.logits[:, 0], dtype=torch.bool)

    def _run_verify(self) -> None:
        decoder = self.decoder
        self.tokens[:, :1] = self._history.gather(1, self._length[:, None] - 1)
        self.tokens[:, 1:] = lookup(self._history, self._length, self.drafted)
        with nullcontext() if decoder.layers is None else decoder.layers.active():
            self._draft = self._read(decoder.model, self.tokens, decoder.state, self.logits)

    def _run_choose(self, sampling: Sampling) -> None:
        logits_BTL, (B, T) = self.logits, self.tokens.shape
        if sampling.repetition_penalty != 1 and self._seen is not None:
            logits_BTL = penalize(logits_BTL, seen_before_each(self._seen, self.tokens), sampling.repetition_penalty)
        uniform_BT = self.logits[..., 0]
        if sampling.temperature > 0 and self._uniform is not None:
            index_BT = self._drawn[:, None] + torch.arange(T, device=self.tokens.device)
            uniform_BT = self._uniform.gather(1, index_BT.clamp(max=self._uniform.shape[1] - 1))
        chosen_BT = sample(logits_BTL.flatten(0, 1), sampling, uniform_BT.flatten()).view(B, T)
        self._chosen.copy_(chosen_BT)
        count_B = torch.minimum(accept(chosen_BT, self.tokens), self._left)
        self.count.copy_(count_B)
        if sampling.repetition_penalty != 1 and self._seen is not None:
            is_new_BT = torch.arange(T, device=count_B.device) < count_B[:, None]
            self._seen.scatter_(1, torch.where(is_new_BT, chosen_BT, self.tokens[:, :1]), True)

    def _run_commit(self) -> None:
        assert self._draft is not None  # of the pass
        self._keep(self.decoder.model, self._draft, self.decoder.state, self.count)
        T = self.tokens.shape[1]
        # Rejected tokens are written too, after the end of the history.
        self._history.scatter_(1, self._length[:, None] + torch.arange(T, device=self._length.device), self._chosen)
        for tensor, sign in ((self._length, 1), (self._drawn, 1), (self._left, -1)):
            tensor.add_(self.count, alpha=sign)
        packed_BU = torch.cat([self.count[:, None].long(), self._chosen], 1)
        self._packed.index_copy_(0, self._slot, packed_BU[None])
        self._slot.add_(1)

    def _capture(self) -> None:
        """Capture the two parts that every sampling shares. The state does not change."""
        decoder, device = self.decoder, self.tokens.device
        changed = [decoder.state, self._history, self._length, self._drawn, self._left, self._slot]
        saved, before = snapshot(changed), torch.cuda.memory_reserved(device)
        pool = torch.cuda.graph_pool_handle()
        self._choices.clear()
        self._captures = False
        with eager_if_refused("the pass with drafts"):
            verify = capture(self._run_verify, device, pool, warm_ups=3)
            self._graphs = verify, capture(self._run_commit, device, pool)
            self._captures = True
        rollback_(changed, saved)
        self.bytes = max(torch.cuda.memory_reserved(device) - before, 0)

    def _captured_choice(self, sampling: Sampling) -> Call:
        """Return a call that replays a graph of the second part. Its key is the part of `sampling` that it reads."""
        key = sampling.model_copy(update={"max_tokens": 1, "stop": (), "seed": None})
        if key not in self._choices:
            while len(self._choices) >= _MOST_GRAPHS:
                del self._choices[next(iter(self._choices))]
            seen = None if self._seen is None else self._seen.clone()
            self._choices[key] = capture(lambda: self._run_choose(key), self.tokens.device)
            if seen is not None and self._seen is not None:
                self._seen.copy_(seen)
        return self._choices[key]


def verify_drafts(model: TokenModel, tokens_BT: Tensor, state: StackState, logits_BTL: Tensor) -> StackState:
    """Read the tokens of a pass, write their logits, and return the draft for `commit_drafts`."""
    verified_BTL, draft = model.verify(tokens_BT, state)
    logits_BTL.copy_(verified_BTL)
    return draft


def commit_drafts(model: TokenModel, draft: StackState, state: StackState, count_B: Tensor) -> None:
    """Advance the state by the first `count` tokens of the pass."""
    model.commit_(draft, state, count_B)
