"""Generation of tokens: one prefill of the prompt, then one step per token on a state that is updated in place.

B batch, T prompt length, L vocabulary
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from deltazoo.backends.io.errors import DtypeError, ShapeError, StateError, UnsupportedError, ValueRangeError
from deltazoo.backends.torch_ext.compiled_call import compiled_call
from deltazoo.backends.torch_ext.cuda_graph import Call, capture
from deltazoo.backends.update.check import check_type
from deltazoo.blocks.generation.sampling import Sampling, sample
from deltazoo.blocks.model.interface import StackState, TokenModel, check_model
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.state import overwrite_, rollback_, snapshot

# Marks the columns after the end of a row that has stopped while other rows continue; not a token.
STOPPED = -1

Prompt = Tensor | Sequence[Tensor]


def generate_tokens(
    model: "TokenModel | Decoder",
    prompt: Prompt,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Generate continuations of prompts.

    Args:
        model: a model, or a `Decoder`, whose compiled or captured step is reused.
        prompt: [B, T] int64 with T >= 1; or B prompts [T_b] of different lengths, which do not affect each other.
        sampling: None: the defaults of `Sampling`.
        generator: draws the random numbers in place of `sampling.seed`; on the model's device.
    Returns: the new tokens, [B, n] int64 with n <= max_tokens; -1 after the end of a row that stopped.
    Raises: InputError or a subclass; ValueRangeError: a weight is NaN, so that the logits of the prompt are not finite;
        StateError: the capacity of the decoder is too small.
    """
    return torch.stack(list(stream(model, prompt, sampling, generator)), 1)


def stream(
    model: "TokenModel | Decoder",
    prompt: Prompt,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the columns [B] of the result of `generate_tokens` as they are sampled; arguments as for `generate_tokens`.

    The host synchronises with the device once after the prompt, and to test the stop condition if `stop` is not empty.
    """
    check_type("sampling", sampling, Sampling | None, "a Sampling or None")
    check_type("generator", generator, torch.Generator | None, "a torch.Generator or None")
    sampling = sampling or Sampling()
    max_tokens = sampling.max_tokens
    tokens_BT, mask_BT = _pad_left(prompt)
    B, T = tokens_BT.shape
    decoder = model if isinstance(model, Decoder) else Decoder(model, B, T + max_tokens)
    if T + max_tokens - 1 > decoder.capacity:  # the last token is not read
        raise StateError(f"a decoder of capacity {decoder.capacity} is too small for {T} + {max_tokens} tokens")
    if generator is None and sampling.seed is not None:
        generator = torch.Generator(decoder.tokens.device).manual_seed(sampling.seed)
    stop_sequences = _stop_sequences(sampling.stop, decoder.model.spec.vocab)

    def columns() -> Iterator[Tensor]:
        decoder.prefill(tokens_BT, mask_BT)
        if not bool(decoder.logits.isfinite().all()):
            raise ValueRangeError("the logits of the prompt must be finite, got NaN or inf: check the model's weights")
        stopped_B = torch.zeros(B, dtype=torch.bool, device=decoder.tokens.device)
        sampled: list[Tensor] = []
        for i in range(max_tokens):
            if i:
                decoder.step()
            token_B = sample(decoder.logits, sampling, generator)
            decoder.tokens.copy_(token_B[:, None])
            sampled.append(token_B)
            yield token_B.masked_fill(stopped_B, STOPPED) if stop_sequences else token_B
            for sequence in stop_sequences:
                stopped_B = stopped_B | _ends_with(sampled, sequence)
            if stop_sequences and bool(stopped_B.all()):
                return

    return columns()


class Decoder:
    """Decode one token at a time. Every tensor keeps its address, so a step can be captured in a CUDA graph.

    Args:
        batch: number of rows B.
        capacity: maximum number of tokens per row, including the prompt.
        compile: compile the step with torch.compile, as one graph. `rebind` the model before the first step.

    A step reads `tokens` [B, 1] int64, updates `state` in place and writes `logits` [B, L] float32.
    """

    def __init__(self, model: TokenModel, batch: int, capacity: int, compile: bool = False) -> None:
        check_model(model)
        self.model, self.batch, self.capacity = model, batch, capacity
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.logits = torch.zeros(batch, model.spec.vocab, device=model.device)
        with torch.no_grad():
            self.state: StackState = model.init_state(batch, capacity)
        self.compile = compile
        self._run = _compiled_step(model.device) if compile else _step
        self._layout = _layout(model)
        self._replay: Call | None = None

    @torch.no_grad()
    def prefill(self, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> None:
        """Reset the state and read prompts [B, T]; `logits` are those of their last tokens.

        Args: mask_BT: bool, True at tokens and False at padding, which is on the left.
        """
        if tokens_BT.dim() != 2 or tokens_BT.shape[0] != self.batch or not tokens_BT.shape[1]:
            raise ShapeError(
                f"a prompt must have shape [B, T] with B = {self.batch} and T >= 1, got {list(tokens_BT.shape)}"
            )
        if tokens_BT.shape[1] > self.capacity:
            raise StateError(
                f"a prompt of {tokens_BT.shape[1]} tokens exceeds the decoder's capacity of {self.capacity}"
            )
        if self.compile and self._layout != _layout(self.model):
            raise StateError("the model must keep the dtypes, shapes and devices of the compiled decoder, got others")
        rollback_(self.state, self.model.init_state(self.batch, self.capacity))
        x_BTD, new_state = self.model.features(tokens_BT, self.state, Context(mask=mask_BT))
        overwrite_(self.state, new_state)
        self.logits.copy_(self.model.logits(x_BTD[:, -1]))

    @torch.no_grad()
    def step(self) -> None:
        """Read `tokens`, update `state` and write `logits`, without synchronisation."""
        if self._replay is not None:
            self._replay()
        else:
            self._run(self.model, self.tokens, self.state, self.logits)

    @torch.no_grad()
    def warm_up(self) -> Self:
        """Run the step once, which compiles it if `compile` is set. The state does not change."""
        state_before = snapshot(self.state)
        self._run(self.model, self.tokens, self.state, self.logits)
        rollback_(self.state, state_before)
        return self

    @torch.no_grad()
    def capture(self) -> Self:
        """Capture the step in a CUDA graph, which `step` replays from now on. The state does not change.

        Raises: UnsupportedError: the model is not on a CUDA device.
        """
        if self.tokens.device.type != "cuda":
            raise UnsupportedError(f"a CUDA graph needs the model on a CUDA device, got {self.tokens.device}")
        state_before = snapshot(self.state)
        step = functools.partial(self._run, self.model, self.tokens, self.state, self.logits)
        self._replay = capture(step, self.tokens.device, warm_ups=3)
        rollback_(self.state, state_before)
        return self


def _step(model: TokenModel, tokens_B1: Tensor, state: StackState, logits_BL: Tensor) -> None:
    logits_B1L, new_state = model(tokens_B1, state)
    overwrite_(state, new_state)
    logits_BL.copy_(logits_B1L[:, 0])


def _compiled_step(device: torch.device) -> Callable[[TokenModel, Tensor, StackState, Tensor], None]:
    """Compile a copy of the step.

    On a CPU a step of a small model is mostly overhead of the host. Two options avoid it: Inductor calls its kernels
    from C++, and Dynamo checks no guards. Nothing needs them: a decoder calls its own copy of the step with the same
    tensors each time, and `prefill` checks the weights. Measured for `gated-deltanet-h1-small` (0.9 M parameters) on
    one thread, torch 2.13: 6.7 ms of CPU time per eager step, 1.29 ms compiled, 0.98 ms with calls from C++, 0.65 ms
    with both.
    """
    if device.type != "cpu":
        return compiled_call(_step, dynamic=False)
    options: dict[str, Any] = {"cpp_wrapper": True, "guard_filter_fn": lambda guards: [False] * len(guards)}
    return compiled_call(_step, dynamic=False, options=options)


def _layout(model: TokenModel) -> list[tuple[torch.dtype, torch.Size, torch.device]]:
    """Return what a compiled step assumes about the weights."""
    return [(x.dtype, x.shape, x.device) for x in (*model.parameters(), *model.buffers())]


def _pad_left(prompt: Prompt) -> tuple[Tensor, Tensor | None]:
    """Return prompts as [B, T] with padding on the left, and the mask of tokens."""
    if isinstance(prompt, Tensor):
        if prompt.dim() != 2:
            raise ShapeError(f"prompt must have shape [B, T], or be a list of tensors [T], got {list(prompt.shape)}")
        return prompt, None
    if not all(isinstance(row, Tensor) for row in prompt):
        raise DtypeError(f"prompt must be a tensor [B, T], or a list of tensors [T], got {prompt!r:.80}")
    if not prompt or any(row.dim() != 1 or not len(row) for row in prompt):
        raise ShapeError(f"prompt must contain tensors [T] with T >= 1, got {[list(row.shape) for row in prompt]}")
    T = max(len(row) for row in prompt)
    tokens_BT = torch.stack([torch.cat([row.new_zeros(T - len(row)), row]) for row in prompt])
    lengths_B = torch.tensor([len(row) for row in prompt], device=tokens_BT.device)
    mask_BT = torch.arange(T, device=tokens_BT.device) >= (T - lengths_B)[:, None]
    return tokens_BT, mask_BT


def _stop_sequences(stop: Sequence[str | int | tuple[int, ...]], vocab: int) -> list[tuple[int, ...]]:
    sequences = []
    for entry in stop:
        tokens = (entry,) if isinstance(entry, int) else entry
        if isinstance(tokens, str) or not all(0 <= token < vocab for token in tokens):
            raise ValueRangeError(f"stop must contain tokens in [0, {vocab}) or sequences of them, got {entry!r}")
        sequences.append(tokens)
    return sequences


def _ends_with(sampled: list[Tensor], sequence: tuple[int, ...]) -> Tensor:
    """Return which rows end with the sequence: [B] bool."""
    if len(sampled) < len(sequence):
        return torch.zeros_like(sampled[0], dtype=torch.bool)
    tail = sampled[-len(sequence) :]
    return torch.stack([token_B == expected for token_B, expected in zip(tail, sequence, strict=True)]).all(0)
