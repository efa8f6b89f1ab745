"""A request to an engine: its prompt, its continuation so far, and why it ended."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from deltazoo.backends.io.errors import ConfigError, ValueRangeError
from deltazoo.blocks.data.text import BYTES
from deltazoo.blocks.data.text_stream import ByteStream, TextStream
from deltazoo.blocks.generation.generate import stop_sequences
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.model.interface import TokenModel

Reason = Literal["end", "stop", "max_tokens", "cancelled", "error"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one token: of the token itself, and the most likely tokens with theirs, in descending order.

    They are those of the logits before penalty, temperature and filters.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TextCodec(NamedTuple):
    """Text to tokens and back.

    decoder: returns the text of the tokens that follow a prompt.
    end: the tokens that end a text.
    """

    encode: Callable[[str], list[int]]
    decoder: Callable[[Sequence[int]], TextStream]
    end: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: TokenModel) -> "TextCodec | None":
        """Return the codec of the model's tokenizer, or of bytes; None for a vocabulary too small for bytes."""
        tokenizer = getattr(model, "tokenizer", None)
        if tokenizer is not None:
            end = tuple(token for token in tokenizer.end if 0 <= token < model.spec.vocab)
            return cls(tokenizer.encode, tokenizer.decode_stream, end)
        return cls(_encode_bytes, lambda prompt: ByteStream()) if model.spec.vocab >= BYTES else None


@dataclass(eq=False)
class Request:
    """A request, which `Engine.submit` returns and `Engine.step` continues.

    Args:
        prompt: its tokens.
        tokens: the tokens of the continuation so far.
        text: the continuation as text, for a prompt of text or with stop texts; invalid UTF-8 is replaced. A cancelled
            request has no text of an incomplete last character.
        logprobs: one entry per token if `sampling.logprobs` is set.
        reason: why it ended: a token that ends texts, a stop sequence or text, the limit of tokens, `Engine.cancel`, or
            an error; None until then.
        error: the error that ended it.
        reused: number of tokens of the prompt whose state another request had left.
        passes: number of its passes with drafts. They yield all tokens except the first one and those of steps without
            drafts.
        submitted_s, first_s, ended_s: when it was submitted, when its first token arrived and when it ended, in seconds
            of `time.perf_counter`.
    """

    prompt: list[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: Reason | None = None
    error: BaseException | None = None
    reused: int = 0
    passes: int = 0
    submitted_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    ended_s: float | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.reason is not None

    def end(self, reason: Reason, error: BaseException | None = None) -> None:
        """End it, unless it has ended."""
        if self.reason is None:
            self.reason, self.error, self.ended_s = reason, error, time.perf_counter()


class Event(NamedTuple):
    """What happened to a request: a new token, its end, or both.

    token: None: it ended without a new token. text: the text that the token completes.
    """

    request: Request
    token: int | None = None
    text: str = ""

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.request.done


class Continuation:
    """Appends tokens to a request, and ends it at a stop sequence, a stop text or the limit of tokens."""

    def __init__(self, request: Request, codec: TextCodec | None, of_text: bool, vocab: int) -> None:
        stop = request.sampling.stop
        self._request = request
        self._texts = [entry for entry in stop if isinstance(entry, str)]
        self._sequences = stop_sequences([entry for entry in stop if not isinstance(entry, str)], vocab)
        self._end = codec.end if codec is not None and of_text else ()
        self._tail: deque[int] = deque(maxlen=max(map(len, self._sequences), default=1))
        self._decoder: TextStream | None = None
        if codec is not None and (of_text or self._texts):
            self._decoder = codec.decoder(request.prompt)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> Event:
        """Append a token; the event says which text it completes."""
        request = self._request
        if not request.tokens:
            request.first_s = time.perf_counter()
        request.tokens.append(token)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        piece, decoder = "", self._decoder
        if token in self._end:
            request.end("end")
        elif decoder is not None:
            piece = self._append_text(decoder.step(token))
        is_cut = request.reason == "stop"  # at a stop text
        if self._sequences:
            self._tail.append(token)
            last = tuple(self._tail)
            if any(last[-len(sequence) :] == sequence for sequence in self._sequences):
                request.end("stop")
        if len(request.tokens) >= request.sampling.max_tokens:
            request.end("max_tokens")
        if request.done and decoder is not None and not is_cut:
            rest = decoder.flush()
            request.text += rest
            piece += rest
        return Event(request, token, piece)

    def _append_text(self, piece: str) -> str:
        """Append text up to the end of the first stop text. Returns the appended text."""
        request = self._request
        before = len(request.text)
        start = max(before - max(map(len, self._texts), default=1) + 1, 0)
        recent = request.text[start:] + piece
        ends = [start + at + len(text) for text in self._texts if (at := recent.find(text)) >= 0]
        if ends:
            piece = piece[: max(min(ends) - before, 0)]
            request.end("stop")
        request.text += piece
        return piece


def check_prompt(tokens: list[int], vocab: int) -> None:
    """Raise ValueRangeError unless a prompt has tokens, all of them in the vocabulary."""
    if not tokens:
        raise ValueRangeError("a prompt must have at least one token, got none")
    if not all(isinstance(token, int) and 0 <= token < vocab for token in tokens):
        wrong = next(token for token in tokens if not isinstance(token, int) or not 0 <= token < vocab)
        raise ValueRangeError(f"the tokens of a prompt must be integers in [0, {vocab}), got {wrong!r}")


def check_sampling(sampling: Sampling, codec: TextCodec | None, vocab: int) -> None:
    """Raise ValueRangeError or ConfigError if a request cannot have this sampling."""
    stop = sampling.stop
    if isinstance(sampling.seed, tuple):
        raise ValueRangeError(f"seed must be a number or None for a request, got {sampling.seed}")
    stop_sequences([entry for entry in stop if not isinstance(entry, str)], vocab)
    if codec is None and any(isinstance(entry, str) for entry in stop):
        raise ConfigError(f"stop must contain tokens for a vocabulary of {vocab} without text, got {stop!r}")


def _encode_bytes(text: str) -> list[int]:
    try:
        return list(text.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt must be text in UTF-8, got {text!r}") from error
