"""Continue a text with a model on bytes, piece by piece as the bytes come."""

import codecs
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.errors import ConfigError
from deltazoo.blocks.generation.generate import stream
from deltazoo.blocks.stack import LanguageModel
from deltazoo.blocks.training.checkpoint import load_model
from deltazoo.blocks.training.text import BYTES


class Sampling(BaseModel):
    """How to draw; see `deltazoo.blocks.generation.generate.generate`.

    Args: max_bytes: the most to write; stop: a text to stop after; None writes them all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_bytes: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.8, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: str | None = Field(default=None, min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**63)


class Written(BaseModel):
    """A continuation.

    Args: bytes: in `text`, before what was no UTF-8 was replaced; prefill_s: seconds up to the first byte;
        bytes_per_second: of those after it, None for one byte.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str
    text: str
    bytes: int
    prefill_s: float
    bytes_per_second: float | None
    sampling: Sampling


def load_writer(
    folder: str | Path, device: str = "cpu", backend: str | None = None, trust: bool = False
) -> LanguageModel:
    """Load the model of a checkpoint to write with.

    Args:
        backend: None is the device's default, but on the CPU `compile` runs uncompiled: one prompt is read sooner
        than compiled for.
        trust: as for `StackSpec.load`.
    Raises: ConfigError; UnknownNameError.
    """
    model = load_model(folder, device, backend, trust)
    return model.rebind(CompileBackend(compiled=False)) if backend is None and device == "cpu" else model


def write(
    model: LanguageModel, prompt: str, sampling: Sampling | None = None, hear: Callable[[str], None] | None = None
) -> Written:
    """Continue a prompt by cached decoding.

    Args: hear: gets the text in pieces, as it comes.
    Raises: ConfigError for an empty prompt, and a model that does not read bytes.
    """
    sampling = sampling or Sampling()
    if not prompt:
        raise ConfigError("prompt must hold at least one character, got ''")
    if model.spec.vocab < BYTES:
        raise ConfigError(f"vocab must be at least {BYTES} to write bytes, got {model.spec.vocab}")
    device = model.head_weight.device
    tokens = torch.tensor([list(encoded("prompt", prompt))], device=device)
    generator = torch.Generator(device).manual_seed(sampling.seed)
    stop = [] if sampling.stop is None else [list(encoded("stop", sampling.stop))]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[str] = []
    drawn: list[int] = []
    start = first = time.perf_counter()
    columns = stream(
        model, tokens, sampling.max_bytes, sampling.temperature, sampling.top_k, sampling.top_p, stop, generator
    )
    for token in columns:
        drawn.append(int(token))
        if len(drawn) == 1:
            first = time.perf_counter()
        pieces.append(decoder.decode(bytes([min(drawn[-1], BYTES - 1)])))
        if hear is not None and pieces[-1]:
            hear(pieces[-1])
    took = time.perf_counter() - first
    pieces.append(decoder.decode(b"", final=True))
    if hear is not None and pieces[-1]:
        hear(pieces[-1])
    return Written(
        prompt=prompt,
        text="".join(pieces),
        bytes=len(drawn),
        prefill_s=first - start,
        bytes_per_second=(len(drawn) - 1) / took if len(drawn) > 1 else None,
        sampling=sampling,
    )


def encoded(name: str, text: str) -> bytes:
    """A text's bytes. Raises: ConfigError where it is not all UTF-8, as of a terminal's other bytes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} must be text in UTF-8, got {text!r}") from error
