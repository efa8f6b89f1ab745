"""Generate tokens: one pass over the prompt, then one step a token on a state that keeps its place in memory.

B batch, T prompt length, L vocabulary
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deltazoo.backends.check import check_integer
from deltazoo.backends.errors import DtypeError, ShapeError, StateError, UnsupportedError, ValueRangeError
from deltazoo.backends.torch_ext.cuda_graph import Call, captured
from deltazoo.blocks.generation.sampling import check_sampling, sample
from deltazoo.blocks.stack import LanguageModel, StackState
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.state import rollback_, snapshot

# Stands where a row has stopped and others go on; never a token.
STOPPED = -1

Prompt = Tensor | Sequence[Tensor]
Stop = Sequence[int | Sequence[int]]


def generate(
    model: "LanguageModel | Decoder",
    prompt: Prompt,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Stop = (),
    generator: torch.Generator | int | None = None,
) -> Tensor:
    """Continue prompts.

    Args:
        model: a model; or a `Decoder` of one, whose compiled or captured step is then used again.
        prompt: [B, T] int64 with T >= 1; or B prompts [T_b] of different lengths, as if each ran alone.
        max_tokens: the most new tokens, at least 1.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens; top_p: of those, from the fewest whose mass reaches p.
        stop: tokens, or sequences of new tokens, after which a row stops; they are part of the result.
        generator: the source of randomness on the model's device, or a seed; None is torch's own.
    Returns: the new tokens, [B, n] int64 with n <= max_tokens, -1 behind the place where a row stopped.
    Raises: InputError or a subclass; StateError, where a given decoder has no room.
    """
    return torch.stack(list(stream(model, prompt, max_tokens, temperature, top_k, top_p, stop, generator)), 1)


def stream(
    model: "LanguageModel | Decoder",
    prompt: Prompt,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Stop = (),
    generator: torch.Generator | int | None = None,
) -> Iterator[Tensor]:
    """Yield the columns [B] of what `generate` returns, each as soon as it is drawn; arguments as there.

    Nothing waits for the device, unless `stop` asks each token whether it was the last.
    """
    check_sampling(temperature, top_k, top_p)
    check_integer("max_tokens", max_tokens)
    if not isinstance(generator, torch.Generator | int | None):
        raise ValueRangeError(f"generator must be a torch.Generator, a seed or None, got {generator!r}")
    tokens_BT, mask_BT = _padded(prompt)
    B, T = tokens_BT.shape
    decoder = model if isinstance(model, Decoder) else Decoder(model, B, T + max_tokens)
    if T + max_tokens - 1 > decoder.capacity:
        raise StateError(f"a decoder of capacity {decoder.capacity} has no room for {T} + {max_tokens} tokens")
    if isinstance(generator, int):
        generator = torch.Generator(decoder.tokens.device).manual_seed(generator)
    stops = _stop_sequences(stop, decoder.model.spec.vocab)

    def tokens() -> Iterator[Tensor]:
        decoder.prefill(tokens_BT, mask_BT)
        done_B = torch.zeros(B, dtype=torch.bool, device=decoder.tokens.device)
        drawn: list[Tensor] = []
        for i in range(max_tokens):
            if i:
                decoder.step()
            token_B = sample(decoder.logits, temperature, top_k, top_p, generator)
            decoder.tokens.copy_(token_B[:, None])
            drawn.append(token_B)
            yield token_B.masked_fill(done_B, STOPPED) if stops else token_B
            for sequence in stops:
                done_B = done_B | _ends_with(drawn, sequence)
            if stops and bool(done_B.all()):
                return

    return tokens()


class Decoder:
    """Run a model a token at a time; every tensor keeps its address, so a step can be captured in a CUDA graph.

    Args:
        batch: B; capacity: the most tokens a row may reach, prompt included.
        compile: run the step under torch.compile, as one graph.

    `tokens` [B, 1] int64 is what the next step reads; `logits` [B, L] float32 is what the last one wrote; `state` is
    updated in place.
    """

    def __init__(self, model: LanguageModel, batch: int, capacity: int, compile: bool = False) -> None:
        weight = model.head_weight
        self.model, self.batch, self.capacity = model, batch, capacity
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.logits = torch.zeros(batch, model.spec.vocab, device=weight.device)
        with torch.no_grad():
            self.state: StackState = model.init_state(batch, capacity)
        self._run = _compiled_step() if compile else _step
        self._replay: Call | None = None

    @torch.no_grad()
    def prefill(self, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> None:
        """Forget all, and read prompts [B, T]; `logits` are those behind their last tokens.

        Args: mask_BT: bool, True at real tokens; padding stands left of them.
        """
        if tokens_BT.dim() != 2 or tokens_BT.shape[0] != self.batch or not tokens_BT.shape[1]:
            raise ShapeError(
                f"a prompt must have shape [B, T] with B = {self.batch} and T >= 1, got {list(tokens_BT.shape)}"
            )
        if tokens_BT.shape[1] > self.capacity:
            raise StateError(
                f"a prompt of {tokens_BT.shape[1]} tokens exceeds the decoder's capacity of {self.capacity}"
            )
        rollback_(self.state, self.model.init_state(self.batch, self.capacity))
        x_BTD, after = self.model.features(tokens_BT, self.state, Context(mask=mask_BT))
        _keep(self.state, after)
        self.logits.copy_(self.model.logits(x_BTD[:, -1]))

    @torch.no_grad()
    def step(self) -> None:
        """Read `tokens`, update `state`, write `logits`. The device is not waited for."""
        if self._replay is not None:
            self._replay()
        else:
            self._run(self.model, self.tokens, self.state, self.logits)

    @torch.no_grad()
    def capture(self) -> Self:
        """Record the step in a CUDA graph, which later steps replay. The state is as before.

        Raises: UnsupportedError: the model is not on a CUDA device.
        """
        if self.tokens.device.type != "cuda":
            raise UnsupportedError(f"a CUDA graph needs the model on a CUDA device, got {self.tokens.device}")
        kept = snapshot(self.state)
        step = functools.partial(self._run, self.model, self.tokens, self.state, self.logits)
        self._replay = captured(step, self.tokens.device, warm_ups=3)
        rollback_(self.state, kept)
        return self


def _step(model: LanguageModel, tokens_B1: Tensor, state: StackState, logits_BL: Tensor) -> None:
    logits_B1L, after = model(tokens_B1, state)
    _keep(state, after)
    logits_BL.copy_(logits_B1L[:, 0])


def _compiled_step() -> Callable[[LanguageModel, Tensor, StackState, Tensor], None]:
    """The step under torch.compile, with a code object of its own: Dynamo compiles one code object eight times only."""
    own = FunctionType(_step.__code__.replace(), _step.__globals__, "step")
    return torch.compile(own, fullgraph=True, dynamic=False)


def _keep(state: StackState, after: StackState | None) -> None:
    """Write what a mixer returned as new tensors into the old ones; most write there themselves."""
    for old, new in zip(tree_leaves(state), tree_leaves(after), strict=True):
        if new is not old:
            old.copy_(new)


def _padded(prompt: Prompt) -> tuple[Tensor, Tensor | None]:
    """Prompts as [B, T] with padding on the left, and the mask of real tokens."""
    if isinstance(prompt, Tensor):
        if prompt.dim() != 2:
            raise ShapeError(f"prompt must have shape [B, T], or be a list of tensors [T], got {list(prompt.shape)}")
        return prompt, None
    if not all(isinstance(row, Tensor) for row in prompt):
        raise DtypeError(f"prompt must be a tensor [B, T], or a list of tensors [T], got {prompt!r:.80}")
    if not prompt or any(row.dim() != 1 or not len(row) for row in prompt):
        raise ShapeError(f"prompt must hold tensors [T] with T >= 1, got {[list(row.shape) for row in prompt]}")
    T = max(len(row) for row in prompt)
    tokens_BT = torch.stack([torch.cat([row.new_zeros(T - len(row)), row]) for row in prompt])
    lengths_B = torch.tensor([len(row) for row in prompt], device=tokens_BT.device)
    mask_BT = torch.arange(T, device=tokens_BT.device) >= (T - lengths_B)[:, None]
    return tokens_BT, mask_BT


def _stop_sequences(stop: Stop, vocab: int) -> list[tuple[int, ...]]:
    known = range(vocab)
    entries = [stop] if isinstance(stop, str) or not isinstance(stop, Sequence) else stop
    sequences = [tuple(entry) if isinstance(entry, Sequence) else (entry,) for entry in entries]
    if entries is not stop or not all(sequence and all(token in known for token in sequence) for sequence in sequences):
        raise ValueRangeError(f"stop must hold tokens in [0, {vocab}) or non-empty sequences of them, got {stop!r}")
    return sequences


def _ends_with(drawn: list[Tensor], sequence: tuple[int, ...]) -> Tensor:
    """Which rows end with the sequence: [B] bool."""
    if len(drawn) < len(sequence):
        return torch.zeros_like(drawn[0], dtype=torch.bool)
    tail = drawn[-len(sequence) :]
    return torch.stack([token_B == want for token_B, want in zip(tail, sequence, strict=True)]).all(0)
