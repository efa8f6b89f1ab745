"""Evaluation of a language model of bytes on a text."""

import math
from pathlib import Path
from statistics import fmean

import torch
from pydantic import BaseModel, ConfigDict

from deltazoo.backends.allocation import sizes_in_memory_errors
from deltazoo.backends.check import check_integer
from deltazoo.backends.errors import ConfigError, ValueRangeError
from deltazoo.blocks.stack import LanguageModel, check_model
from deltazoo.blocks.training.text import BYTES, Batch, Text, as_text, covering_crops, even_crops


class Evaluation(BaseModel):
    """The cross entropy of a model on a text.

    Args:
        bits_per_byte: mean cross entropy, in bits per byte.
        bytes: number of predicted bytes.
        source: description of the text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits_per_byte: float
    bytes: int
    source: str

    def line(self) -> str:
        """Format the result as one line."""
        return f"{self.bits_per_byte:.3f} bits per byte on {self.bytes:,} validation bytes of {self.source}"


def evaluate(
    model: LanguageModel,
    text: Text | str | Path | None = None,
    length: int = 256,
    batch: int = 8,
    batches: int | None = 4,
) -> Evaluation:
    """Compute the cross entropy of a model on the validation part of a text, see `load_text`.

    The windows start without context, as in training. Evenly spaced windows with the length, batch and number of
    batches of a training run, the defaults here and there, give the validation figure of that run.

    Args:
        text: a text, or the path of a text file; None: the sources of Python's standard library.
        length: bytes per window.
        batch: windows per forward pass.
        batches: number of batches of evenly spaced windows; None: consecutive windows that cover the validation part,
            except for a rest shorter than a window.
    Raises: ConfigError: the text is too short or cannot be read, or the vocabulary of the model has fewer than 256
        tokens; InputError: another type; ValueRangeError: a weight is NaN, so that the cross entropy is not finite.
    """
    check_model(model)
    if model.spec.vocab < BYTES:
        raise ConfigError(f"vocab must be at least {BYTES} to evaluate on bytes, got {model.spec.vocab}")
    for name, value in (("length", length), ("batch", batch), ("batches", 1 if batches is None else batches)):
        check_integer(name, value)
    text = as_text(text)
    with sizes_in_memory_errors(batch=batch, length=length):
        if batches is None:
            crops = covering_crops(text.validation, batch, length)
        else:
            crops = even_crops(text.validation, batch, length, batches)
        was_training = model.training
        try:
            model.eval()
            entropies, weights = zip(*(_cross_entropy(model, crop) for crop in crops), strict=True)
        finally:
            model.train(was_training)
    bits = fmean(entropies, weights) / math.log(2)
    if not math.isfinite(bits):
        raise ValueRangeError(f"the cross entropy must be finite, got {bits}: check the model's weights")
    return Evaluation(bits_per_byte=bits, bytes=sum(weights), source=text.source)


@torch.no_grad()
def _cross_entropy(model: LanguageModel, batch: Batch) -> tuple[float, int]:
    """Return the mean cross entropy in nats per byte, and the number of bytes."""
    device = model.head_weight.device
    entropy = model.losses(batch.inputs.to(device), batch.targets.to(device)).cross_entropy
    return float(entropy), batch.targets.numel()
