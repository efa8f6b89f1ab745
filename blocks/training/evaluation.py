"""Evaluation of a language model of bytes on a text."""

import math
from pathlib import Path
from statistics import fmean

import torch
from pydantic import BaseModel, ConfigDict

from deltazoo.backends.io.errors import ConfigError, ValueRangeError
from deltazoo.backends.torch_ext.allocation import sizes_in_memory_errors
from deltazoo.backends.update.check import check_integer
from deltazoo.blocks.data.text import BYTES, Batch, Text, as_text, covering_crops, even_crops
from deltazoo.blocks.model.interface import check_model
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.training.config import TrainConfig, text_of_run


class Evaluation(BaseModel):
    """The cross entropy of a model on a text.

    Args:
        bits_per_byte: mean cross entropy, in bits per byte.
        bytes: number of predicted bytes.
        source: description of the text.
        is_text_of_run: whether the model was trained on this text; None: the model is not from a training run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits_per_byte: float
    bytes: int
    source: str
    is_text_of_run: bool | None

    def line(self) -> str:
        """Format the result as one line."""
        relation = {None: "", True: " (the text of the run)", False: " (another text than that of the run)"}
        text = f"{self.source}{relation[self.is_text_of_run]}"
        return f"{self.bits_per_byte:.3f} bits per byte on {self.bytes:,} held-out bytes of {text}"


def evaluate(
    model: LanguageModel,
    text: Text | str | Path | None = None,
    length: int | None = None,
    batch: int | None = None,
    batches: int | None = None,
) -> Evaluation:
    """Compute the cross entropy of a model on the validation part of a text, see `load_text`.

    The windows start without context, as in training. For a model that `load` returned, the defaults are the text and
    the windows of its training run, which give the last validation figure of the run.

    Args:
        text: a text, or the path of a text file; None: the text of the run, else the sources of Python's standard
            library.
        length: bytes per window; None: as in the run, else 256.
        batch: windows per forward pass; None: as in the run, else 8.
        batches: number of batches of evenly spaced windows; 0: consecutive windows that cover the validation part,
            except for a rest shorter than a window; None: as in the run, else 4.
    Raises: ConfigError: the text is too short, cannot be read or is no longer that of the run, or the vocabulary of the
        model has fewer than 256 tokens; InputError: another type; ValueRangeError: a weight is NaN, so that the cross
        entropy is not finite.
    """
    check_model(model)
    if model.spec.vocab < BYTES:
        raise ConfigError(f"vocab must be at least {BYTES} to evaluate on bytes, got {model.spec.vocab}")
    run = model.run_settings
    config = TrainConfig() if run is None else run.train
    length = config.batch.length if length is None else length
    batch = config.batch.step_rows if batch is None else batch
    batches = config.evaluation.batches if batches is None else batches
    for name, value, least in (("length", length, 1), ("batch", batch, 1), ("batches", batches, 0)):
        check_integer(name, value, least)
    if (
        text is None
        and run is not None
        and (config.data.mixture or (run.text.path is not None and Path(run.text.path).is_dir()))
    ):
        raise ConfigError(f"the run was trained on encoded data ({run.text.source}), not on bytes: give a text file")
    text = text_of_run(run) if run is not None and text is None else as_text(text)
    with sizes_in_memory_errors(batch=batch, length=length):
        if batches == 0:
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
    return Evaluation(
        bits_per_byte=bits,
        bytes=sum(weights),
        source=text.source,
        is_text_of_run=None if run is None else text.digest == run.text.digest,
    )


@torch.no_grad()
def _cross_entropy(model: LanguageModel, batch: Batch) -> tuple[float, int]:
    """Return the mean cross entropy in nats per byte, and the number of bytes."""
    device = model.device
    entropy = model.losses(batch.inputs.to(device), batch.targets.to(device)).cross_entropy
    return float(entropy), batch.targets.numel()
