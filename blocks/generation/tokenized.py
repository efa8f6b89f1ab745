"""Text completion with the tokenizer of a folder of transformers, streamed as the tokens are generated."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from deltazoo.backends.io.errors import ConfigError, count
from deltazoo.backends.torch_ext.allocation import sizes_in_memory_errors
from deltazoo.blocks.data.tokenizer import Tokenizer
from deltazoo.blocks.generation.generate import stream
from deltazoo.blocks.generation.kept import borrowed_decoder
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.model.interface import TokenModel


class TokenCompletion(BaseModel):
    """A generated continuation of a prompt by a model with a tokenizer.

    Args:
        text: the continuation, without special tokens; invalid UTF-8 is replaced.
        tokens: number of generated tokens, with the one that ended it.
        reason: why the generation ended: with a token that ends texts, after a stop text, or at the limit.
        stop: the stop text that ended it, which is the end of `text`; None: there was none.
        prefill_s: time to the first token, in seconds.
        tokens_per_second: rate of the tokens after the first; None if there is only one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str
    text: str
    tokens: int
    reason: Literal["end", "stop", "max_tokens"]
    stop: str | None
    prefill_s: float
    tokens_per_second: float | None
    sampling: Sampling

    def reason_line(self) -> str:
        """Format why the generation ended."""
        if self.reason == "end":
            return f"the model ended the text after {count(self.tokens, 'token')}"
        if self.stop is not None:
            return f"stopped after the text {self.stop!r}"
        return f"stopped at the limit of {count(self.tokens, 'token')}"


def complete(
    model: TokenModel,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    compile: bool | None = None,
    speculate: int = 0,
) -> TokenCompletion:
    """Continue a text by cached decoding until a token that ends texts, a stop text or the limit of tokens.

    Args:
        on_text: called with each piece of text as soon as it is generated.
        compile: compile the decode step; None: for texts long enough to repay it.
        speculate: number of tokens that each step drafts by prompt lookup; 0: none.
    Raises: ConfigError: the prompt has no tokens, or there is no tokenizer; InputError: the tokenizer is of another
        vocabulary.
    """
    if other := [entry for entry in sampling.stop if not isinstance(entry, str)]:
        raise ConfigError(f"stop must contain texts for a prompt of text, got {other!r}")
    texts = [entry for entry in sampling.stop if isinstance(entry, str)]
    prompt_BT = torch.tensor([tokenizer.encode(prompt)], dtype=torch.int64, device=model.device)
    if not prompt_BT.numel():
        raise ConfigError(f"prompt must contain at least one token, got {prompt!r}")
    limit, end = sampling.max_tokens, tuple(token for token in tokenizer.end if 0 <= token < model.spec.vocab)
    decoder, text, tokens, stop = tokenizer.decode_stream(prompt_BT[0].tolist()), "", 0, None
    reason: Literal["end", "stop", "max_tokens"] = "max_tokens"
    with ExitStack() as stack:
        with sizes_in_memory_errors(max_tokens=limit, speculate=speculate):
            capacity = prompt_BT.shape[1] + limit + speculate
            lent = stack.enter_context(borrowed_decoder(model, 1, capacity, limit, compile))
        start = first = time.perf_counter()
        columns = stream(lent.decoder, prompt_BT, sampling.model_copy(update={"stop": end}), speculate=speculate)
        for column in columns:
            token, tokens = int(column), tokens + 1
            if tokens == 1:
                first = time.perf_counter()
            if token in end:
                reason = "end"
                break
            piece = decoder.step(token)
            ends = {at + len(entry): entry for entry in texts if (at := (text + piece).find(entry)) >= 0}
            if ends:
                reason, stop = "stop", ends[min(ends)]
                piece = piece[: min(ends) - len(text)]
            text += piece
            if on_text is not None and piece:
                on_text(piece)
            if stop is not None:
                break
        decode_s = time.perf_counter() - first
        rest = decoder.flush() if stop is None else ""
        text += rest
        if on_text is not None and rest:
            on_text(rest)
        del columns  # its cleanup needs the decoder
    return TokenCompletion(
        prompt=prompt,
        text=text,
        tokens=tokens,
        reason=reason,
        stop=stop,
        prefill_s=first - start,
        tokens_per_second=(tokens - 1) / decode_s if tokens > 1 else None,
        sampling=sampling,
    )
