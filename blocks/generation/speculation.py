"""Speculative decoding by prompt lookup: draft what followed the last tokens before, and verify the drafts in one pass.

B rows, C tokens of the history, T tokens of a pass: the last sampled one and n drafted ones, L vocabulary, S slots
"""

import functools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import StateError
from deltazoo.backends.ops.prompt_lookup import LONGEST_MATCH, NO_TOKEN, append_
from deltazoo.backends.torch_ext.cuda_graph import Call, capture
from deltazoo.blocks.generation.decoder import Decoder
from deltazoo.blocks.generation.drafted_pass import Pass, PassBuffers, empty_texts
from deltazoo.blocks.generation.philox import uniforms
from deltazoo.blocks.generation.sampler import Rows
from deltazoo.blocks.generation.sampling import Sampling, penalize, sample
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
    """New tokens on their way to the host: [S, B, T], for each pass and row its tokens, then negative numbers."""

    packed: Tensor
    rows: int
    arrived: torch.cuda.Event | None

    def wait(self) -> list[list[list[int]]]:
        """Wait until they have arrived, and return the new tokens of each row for each pass."""
        if self.arrived is not None:
            self.arrived.synchronize()
        rows_of_passes = self.packed[:, : self.rows].tolist()
        return [[[token for token in row if token >= 0] for row in rows] for rows in rows_of_passes]


def _alive(reference: "weakref.ref[Decoder]") -> Decoder:
    decoder = reference()
    if decoder is None:
        raise StateError("the decoder of a Speculator must exist while it decodes, but it was freed")
    return decoder


class Speculator:
    """Run passes of a decoder with drafted tokens. Every tensor keeps its address.

    A pass has three parts, of which a captured decoder replays CUDA graphs: draft and verify; choose and append, which
    depends on the `Sampling`; commit.

    Args: drafted: number n of drafted tokens per pass. The cache of the decoder needs n slots more than without.
    """

    def __init__(self, decoder: Decoder, drafted: int) -> None:
        B, L, device = decoder.batch, decoder.logits.shape[1], decoder.tokens.device
        T = drafted + 1
        self.drafted = drafted
        self.bytes = 0  # of device memory that the graphs take
        self._text = empty_texts(B, decoder.capacity, device)
        self._buffers = PassBuffers(
            tokens=torch.zeros_like(decoder.tokens),
            history=self._text.history,
            read=decoder.tokens.new_zeros(B, T),
            logits=torch.zeros(B, T, L, device=device),
            accepted=torch.zeros(B, dtype=torch.int32, device=device),
            state=decoder.state,
        )
        self._uniform: Tensor | None = None
        self._seen: Tensor | None = None
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._packed = torch.zeros(SLOTS, B, T, dtype=torch.int64, device=device)
        self._host = self._packed
        if device.type == "cuda":
            self._host = torch.zeros_like(self._packed, device="cpu", pin_memory=True)
        self._decoder = reference = weakref.ref(decoder)
        self._pass = Pass(lambda: _alive(reference).model, self._buffers, decoder.compile, decoder.layers)
        self._is_captured = False
        self._choices: dict[Sampling, Call] = {}

    @torch.no_grad()
    def begin(self, sampling: Sampling, rows: Rows, first_B: Tensor) -> None:
        """Start after the prompts and the first new token of each row, which the decoder has not read.

        Args: first_B: [B], as many as the decoder has rows.
        """
        decoder, text, R = _alive(self._decoder), self._text, len(rows.tokens)
        known = rows.tokens if rows.mask is None else rows.tokens.masked_fill(~rows.mask, NO_TOKEN)
        known = known[:, -(text.history.shape[1] - LONGEST_MATCH - 1) :]
        text.history.fill_(NO_TOKEN)
        text.history[:R, -1 - known.shape[1] : -1] = known
        text.history[:, -1] = first_B
        self._buffers.tokens.copy_(first_B[:, None])
        text.drawn.fill_(1)
        text.left.zero_()
        text.left[:R] = sampling.max_tokens - 1
        if sampling.temperature > 0:
            self._draw_uniforms(rows, sampling.max_tokens + self.drafted)
        if sampling.repetition_penalty != 1:
            seen_BL = decoder.sampler.seen
            assert seen_BL is not None  # the first token was drawn with the same penalty
            if self._seen is None:
                self._seen = torch.zeros_like(seen_BL)
            self._seen.copy_(seen_BL)
        self._rows, self._passes = R, 0
        self._slot.zero_()  # the warm-up of a capture writes to it
        if decoder.captured and not self._is_captured:
            self._is_captured, before = True, torch.cuda.memory_reserved(first_B.device)
            self._pass.capture(torch.cuda.graph_pool_handle())
            self.bytes = max(torch.cuda.memory_reserved(first_B.device) - before, 0)
        self._choose = self._captured_choice(sampling) if decoder.captured else functools.partial(self._run, sampling)

    @property
    def until_wrap(self) -> int:
        """The number of passes before the first slot is used again."""
        return SLOTS - self._passes % SLOTS

    @torch.no_grad()
    def step(self) -> None:
        """Run a pass, without synchronisation."""
        if not self._passes % SLOTS:
            self._slot.zero_()
        self._pass.verify()
        self._choose()
        self._pass.commit()
        self._passes += 1
        _alive(self._decoder).steps += 1

    def fetch(self, count: int) -> Chosen:
        """Start to copy the tokens of the last `count` passes, all since the last wrap, to the host."""
        end = (self._passes - 1) % SLOTS + 1
        packed, arrived = self._host[end - count : end], None
        if self._host is not self._packed:
            packed.copy_(self._packed[end - count : end], non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self._slot.device))
        return Chosen(packed, self._rows, arrived)

    def _draw_uniforms(self, rows: Rows, count: int) -> None:
        """Draw `count` numbers for each row; graphs that read fewer are freed."""
        if self._uniform is None or self._uniform.shape[1] < count:
            wide = torch.float32 if self._slot.device.type == "mps" else torch.float64
            columns = max(count, _alive(self._decoder).capacity or 0)
            self._uniform = self._slot.new_zeros(len(self._text.drawn), columns, dtype=wide)
            self._choices.clear()
        numbers_NR = uniforms(rows.seed, rows.stream, 0, count)
        self._uniform[: len(rows.tokens), :count] = numbers_NR.T.to(self._uniform)

    def _run(self, sampling: Sampling) -> None:
        """Choose the tokens of a pass, and append them to the texts."""
        read_BT, logits_BTL, (B, T) = self._buffers.read, self._buffers.logits, self._buffers.read.shape
        seen = self._seen if sampling.repetition_penalty != 1 else None
        if seen is not None:
            logits_BTL = penalize(logits_BTL, seen_before_each(seen, read_BT), sampling.repetition_penalty)
        uniform_BT = self._buffers.logits[..., 0]
        if sampling.temperature > 0 and self._uniform is not None:
            index_BT = self._text.drawn[:, None] + torch.arange(T, device=read_BT.device)
            uniform_BT = self._uniform.gather(1, index_BT.clamp(max=self._uniform.shape[1] - 1))
        chosen_BT = sample(logits_BTL.flatten(0, 1), sampling, uniform_BT.flatten()).view(B, T)
        kept_BT = append_(chosen_BT, chosen_BT, read_BT, self._buffers.tokens, self._buffers.accepted, self._text)
        if seen is not None:
            seen.scatter_(1, torch.where(kept_BT >= 0, kept_BT, read_BT[:, :1]), True)
        self._packed.index_copy_(0, self._slot, kept_BT[None])
        self._slot.add_(1)

    def _captured_choice(self, sampling: Sampling) -> Call:
        """Return a call that replays a graph of `_run`. Its key is the part of `sampling` that it reads."""
        key = sampling.model_copy(update={"max_tokens": 1, "stop": (), "seed": None})
        if key not in self._choices:
            while len(self._choices) >= _MOST_GRAPHS:
                del self._choices[next(iter(self._choices))]
            changed = [x for x in (*self._text, self._buffers.tokens, self._slot, self._seen) if x is not None]
            saved = snapshot(changed)
            self._choices[key] = capture(functools.partial(self._run, key), self._slot.device)
            rollback_(changed, saved)
        return self._choices[key]
