"""Generation of tokens: one prefill of the prompt, then one step per token on a state that is updated in place.

B batch, T prompt length, L vocabulary
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import DtypeError, ShapeError, StateError, ValueRangeError
from deltazoo.backends.update.check import check_integer, check_type
from deltazoo.blocks.generation.decoder import Decoder
from deltazoo.blocks.generation.kept import borrowed_decoder
from deltazoo.blocks.generation.sampler import Fetch, Rows
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.generation.speculation import Chosen, Speculator
from deltazoo.blocks.model.interface import TokenModel, check_model

# Marks the columns after the end of a row that has stopped while other rows continue; not a token.
STOPPED = -1
CHUNK = 8  # steps between two tests of the stop condition of `generate_tokens` on CUDA

Prompt = Tensor | Sequence[Tensor]


def generate_tokens(
    model: "TokenModel | Decoder",
    prompt: Prompt,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    speculate: int = 0,
) -> Tensor:
    """Generate continuations of prompts.

    On CUDA the decoding step is captured in a CUDA graph, which is kept for later calls; see
    `deltazoo.blocks.generation.kept`. On a CPU it is compiled from a number of tokens on.

    Args:
        model: a model, or a `Decoder`, whose compiled or captured step is reused.
        prompt: [B, T] int64 with T >= 1; or B prompts [T_b] of different lengths, which do not affect each other.
        sampling: None: the defaults of `Sampling`.
        generator: draws a seed in place of `sampling.seed`.
        speculate: number of tokens that each step drafts by prompt lookup (`deltazoo.blocks.generation.speculation`)
            and verifies with the next one in one pass; 0: none. The tokens are those of decoding without drafts, up to
            rounding of the logits. It speeds up one or a few rows whose continuations repeat parts of their texts. A
            `Decoder` needs a capacity of as many tokens more.
    Returns: the new tokens, [B, n] int64 with n <= max_tokens; -1 after the end of a row that stopped.
    Raises: InputError or a subclass; ValueRangeError: a weight is NaN, so that the logits of the prompt are not finite;
        StateError: the capacity of the decoder is too small.
    """
    request = _request(model, prompt, sampling, generator, speculate)
    return torch.stack(list(_columns(model, request, CHUNK)), 1).to(request.rows.tokens.device)


def stream(
    model: "TokenModel | Decoder",
    prompt: Prompt,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    speculate: int = 0,
) -> Iterator[Tensor]:
    """Yield the columns [B] of the result of `generate_tokens` as they are sampled; arguments as for `generate_tokens`.

    The columns are on the CPU. On CUDA the device is one token ahead, so that it does not wait for the host.

    A `Decoder` has one state, so a later call with it ends the stream, which then raises StateError.
    """
    return _columns(model, _request(model, prompt, sampling, generator, speculate), 1)


class _Request(NamedTuple):
    """The checked arguments of a call. stops: sequences of tokens that end a row; drafted: tokens per step."""

    rows: Rows
    sampling: Sampling
    stops: list[tuple[int, ...]]
    drafted: int


def _request(
    model: "TokenModel | Decoder",
    prompt: Prompt,
    sampling: Sampling | None,
    generator: torch.Generator | None,
    drafted: int,
) -> _Request:
    check_integer("speculate", drafted, 0)
    check_type("sampling", sampling, Sampling | None, "a Sampling or None")
    check_type("generator", generator, torch.Generator | None, "a torch.Generator or None")
    sampling = sampling or Sampling()
    if sampling.logprobs is not None:
        raise ValueRangeError(f"logprobs must be None: an Engine reports them, got {sampling.logprobs}")
    tokens_BT, mask_BT = _pad_left(prompt)
    T = tokens_BT.shape[1]
    if isinstance(model, Decoder):
        longest = T + sampling.max_tokens - 1 + drafted  # the last token is not read
        if model.capacity is not None and longest > model.capacity:
            drafts = f" and {drafted} drafted ones" if drafted else ""
            raise StateError(
                f"a decoder of capacity {model.capacity} is too small for {T} + {sampling.max_tokens} tokens{drafts}"
            )
        model = model.model
    check_model(model)
    stops = stop_sequences(sampling.stop, model.spec.vocab)
    seed = sampling.seed
    if generator is not None or seed is None:
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**63 - 1, (), generator=generator, device=device))
    return _Request(Rows.of(tokens_BT, mask_BT, seed), sampling, stops, drafted)


def _columns(model: "TokenModel | Decoder", request: _Request, chunk: int) -> Iterator[Tensor]:
    tokens, limit = request.rows.tokens, request.sampling.max_tokens
    decode = _decode_with_drafts if request.drafted else _decode
    if isinstance(model, Decoder):
        columns, prefills = decode(model, request, chunk), model.prefills + 1
        for column in columns:
            yield column
            if model.prefills != prefills:
                raise StateError("the decoder has read another prompt: use one decoder for each stream")
        return
    with borrowed_decoder(model, tokens.shape[0], tokens.shape[1] + limit + request.drafted, limit) as kept:
        yield from decode(kept.decoder, request, chunk)


def _prefill(decoder: Decoder, request: _Request) -> None:
    """Read the prompts, and start the sampler. Raises: ValueRangeError: the logits are not finite."""
    rows = request.rows
    decoder.prefill(rows.tokens, rows.mask)
    if not bool(decoder.logits[: len(rows.tokens)].isfinite().all()):
        raise ValueRangeError("the logits of the prompt must be finite, got NaN or inf: check the model's weights")
    decoder.sampler.begin(request.sampling, rows)


def _decode_with_drafts(decoder: Decoder, request: _Request, chunk: int) -> Iterator[Tensor]:
    """Decode with a `Speculator`, and yield a column as soon as every row has its token.

    As in `_decode`, two pieces of passes are in flight on CUDA, unless the passes in flight may be enough.
    """
    rows, limit, sampler = request.rows, request.sampling.max_tokens, decoder.sampler
    _prefill(decoder, request)
    stops = _Stops(request.stops, len(rows.tokens))
    sampler.draw()
    (first_B,) = sampler.fetch(1).wait()
    yield stops.mark(first_B)
    speculator = decoder.speculators.get(request.drafted)
    if speculator is None:
        speculator = decoder.speculators[request.drafted] = Speculator(decoder, request.drafted)
    speculator.begin(request.sampling, rows, decoder.tokens[:, 0])
    pieces, chunk = (2, chunk) if sampler.asynchronous else (1, 1)
    in_flight: deque[tuple[Chosen, int]] = deque()
    new: list[list[int]] = [[] for _ in rows.tokens]
    done = 1
    while done < limit and not stops.all_stopped:
        most = request.drafted + 1
        while len(in_flight) < pieces:
            missing = limit - min(map(len, new)) - done - most * sum(passes for _, passes in in_flight)
            count = min(chunk, -(-missing // most), speculator.until_wrap)
            if count < 1:
                break
            for _ in range(count):
                speculator.step()
            in_flight.append((speculator.fetch(count), count))
        for tokens_of_rows in in_flight.popleft()[0].wait():
            for row, tokens in zip(new, tokens_of_rows, strict=True):
                row += tokens
        ready = min(map(len, new))
        for column in zip(*(row[:ready] for row in new), strict=True):
            yield stops.mark(torch.tensor(column, device="cpu"))
            done += 1
            if stops.all_stopped:
                return
        new = [row[ready:] for row in new]


def _decode(decoder: Decoder, request: _Request, chunk: int) -> Iterator[Tensor]:
    """Keep two pieces of work in flight on CUDA: while the host reads the tokens of one, the device runs the next.

    After the last stop the device has run up to two pieces too many, whose tokens are dropped.
    """
    rows, limit, sampler = request.rows, request.sampling.max_tokens, decoder.sampler
    _prefill(decoder, request)
    stops = _Stops(request.stops, len(rows.tokens))
    pieces, chunk = (2, chunk) if sampler.asynchronous else (1, 1)
    in_flight: deque[Fetch] = deque()
    done = 0
    while True:
        while done < limit and len(in_flight) < pieces:
            count = min(chunk, limit - done, sampler.until_wrap) if done else 1
            for _ in range(count):
                if done:
                    decoder.step()
                sampler.draw()
                done += 1
            in_flight.append(sampler.fetch(count))
        if not in_flight:
            return
        for token_B in in_flight.popleft().wait():
            yield stops.mark(token_B)
            if stops.all_stopped:
                return


class _Stops:
    """Which rows have ended with a stop sequence."""

    def __init__(self, sequences: list[tuple[int, ...]], batch: int) -> None:
        self._sequences = sequences
        self._tails: list[deque[int]] = [deque(maxlen=max(map(len, sequences), default=1)) for _ in range(batch)]
        self._stopped = [False] * batch

    @property
    def all_stopped(self) -> bool:
        return all(self._stopped)

    def mark(self, token_B: Tensor) -> Tensor:
        """Append a token to each row; return the tokens, with `STOPPED` in rows that had ended before."""
        if not self._sequences:
            return token_B
        tokens = token_B.tolist()
        for b, tail in enumerate(self._tails):
            if self._stopped[b]:
                tokens[b] = STOPPED
                continue
            tail.append(tokens[b])
            last = tuple(tail)
            self._stopped[b] = any(last[-len(sequence) :] == sequence for sequence in self._sequences)
        return torch.tensor(tokens, device="cpu")


def _pad_left(prompt: Prompt) -> tuple[Tensor, Tensor | None]:
    """Return prompts as [B, T] with padding on the left, and the mask of tokens."""
    if isinstance(prompt, Tensor):
        if prompt.dim() == 2 and not len(prompt):
            raise ShapeError(f"prompt must have at least one row, got {list(prompt.shape)}")
        if prompt.dim() != 2:
            raise ShapeError(f"prompt must have shape [B, T], or be a list of tensors [T], got {list(prompt.shape)}")
        return prompt, None
    if not isinstance(prompt, Sequence) or not all(isinstance(row, Tensor) for row in prompt):
        raise DtypeError(f"prompt must be a tensor [B, T], or a list of tensors [T], got {prompt!r:.80}")
    if not prompt or any(row.dim() != 1 or not len(row) for row in prompt):
        raise ShapeError(f"prompt must contain tensors [T] with T >= 1, got {[list(row.shape) for row in prompt]}")
    T = max(len(row) for row in prompt)
    tokens_BT = torch.stack([torch.cat([row.new_zeros(T - len(row)), row]) for row in prompt])
    lengths_B = torch.tensor([len(row) for row in prompt], device=tokens_BT.device)
    mask_BT = torch.arange(T, device=tokens_BT.device) >= (T - lengths_B)[:, None]
    return tokens_BT, mask_BT


def stop_sequences(stop: Sequence[str | int | tuple[int, ...]], vocab: int) -> list[tuple[int, ...]]:
    sequences = []
    for entry in stop:
        tokens = (entry,) if isinstance(entry, int) else entry
        if isinstance(tokens, str) or not all(0 <= token < vocab for token in tokens):
            raise ValueRangeError(f"stop must contain tokens in [0, {vocab}) or sequences of them, got {entry!r}")
        sequences.append(tokens)
    return sequences
