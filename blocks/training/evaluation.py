"""Evaluation of a language model on a text, or on held-out documents."""

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from pydantic import BaseModel, ConfigDict

from deltazoo.backends.io.errors import ConfigError, ValueRangeError
from deltazoo.backends.torch_ext.allocation import sizes_in_memory_errors
from deltazoo.backends.update.check import check_integer, check_type
from deltazoo.blocks.data.text import Text, covering_crops, even_crops
from deltazoo.blocks.model.interface import check_model
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.training.config import BatchConfig, DataConfig, TrainConfig
from deltazoo.blocks.training.preparation import check_tokenizer
from deltazoo.blocks.training.source import ByteSource, Place, Rows, RowSource, ShardSource, open_source, source_of_run
from deltazoo.mixers.core.mixer import Context


class Evaluation(BaseModel):
    """The cross entropy of a model on a text.

    Args:
        bits_per_token: mean cross entropy, in bits per token.
        tokens: number of predicted tokens.
        bits_per_byte: on a text, whose tokens are bytes, the same; on documents bits_per_token times the predicted
            tokens per byte of all held-out documents, None if any is from a token file or only answers have a loss.
        source: description of the text.
        is_text_of_run: whether the model was trained on this text; None: the model is not from a training run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits_per_token: float
    tokens: int
    bits_per_byte: float | None
    source: str
    is_text_of_run: bool | None

    def line(self) -> str:
        """Format the result as one line."""
        relation = {None: "", True: " (the text of the run)", False: " (another text than that of the run)"}
        text = f"{self.source}{relation[self.is_text_of_run]}"
        if self.bits_per_byte == self.bits_per_token:
            return f"{self.bits_per_byte:.3f} bits per byte on {self.tokens:,} held-out bytes of {text}"
        by_byte = " (per byte: unknown)" if self.bits_per_byte is None else f", {self.bits_per_byte:.3f} per byte,"
        return f"{self.bits_per_token:.3f} bits per token{by_byte} on {self.tokens:,} held-out tokens of {text}"


def evaluate(
    model: LanguageModel,
    text: Text | str | Path | None = None,
    length: int | None = None,
    batch: int | None = None,
    batches: int | None = None,
) -> Evaluation:
    """Compute the cross entropy of a model on the validation part of a text, see `load_text`, or of encoded documents.

    The windows start without context, as in training. For a model that `load` returned, the defaults are the text and
    the windows of its training run, which give the last validation figure of the run.

    Args:
        text: a text, the path of a text file, or a folder that `deltazoo data` wrote; None: the text of the run, else
            the sources of Python's standard library.
        length: tokens per window; None: as in the run, else 256.
        batch: windows per forward pass; None: as in the run, else 8.
        batches: number of batches: evenly spaced windows of a text, or the first batches of documents; 0: the whole
            validation part, of a text without a last incomplete window; None: as in the run, else 4.
    Raises: ConfigError: the text is too short, cannot be read or is no longer that of the run, the vocabulary of the
        model has fewer tokens than the text, or another tokenizer than the model's encoded it; InputError: another
        type; ValueRangeError: a weight is NaN, so that the cross entropy is not finite.
    """
    check_model(model)
    run = model.run_settings
    config = TrainConfig() if run is None else run.train
    length = config.batch.length if length is None else length
    batch = config.batch.step_rows if batch is None else batch
    batches = config.evaluation.batches if batches is None else batches
    for name, value, least in (("length", length, 1), ("batch", batch, 1), ("batches", batches, 0)):
        check_integer(name, value, least)
    check_type("text", text, str | Path | Text | None, "a path, a Text or None")
    row_end = DataConfig(row_end=config.data.row_end)
    source = open_source(text, row_end) if run is None or text is not None else source_of_run(run, None, "train.yaml")
    if model.spec.vocab < source.least_vocab:
        kind = "bytes" if source.dense else "these documents"
        raise ConfigError(f"vocab must be at least {source.least_vocab} to evaluate on {kind}, got {model.spec.vocab}")
    check_tokenizer(model, source)
    sizes = config.model_copy(update={"batch": BatchConfig(rows=batch, length=length)})
    with sizes_in_memory_errors(batch=batch, length=length):
        was_training = model.training
        try:
            model.eval()
            found = [(_cross_entropy(model, rows), rows.counted) for rows in _windows(source, sizes, batches)]
        finally:
            model.train(was_training)
    tokens = sum(counted for _, counted in found)
    if not tokens:
        raise ConfigError(f"the held-out part of {source.origin.source} has no token to predict")
    bits = fmean(*zip(*found, strict=True)) / math.log(2)
    if not math.isfinite(bits):
        raise ValueRangeError(f"the cross entropy must be finite, got {bits}: check the model's weights")
    return Evaluation(
        bits_per_token=bits,
        tokens=tokens,
        bits_per_byte=bits if source.dense else _by_byte(bits, source),
        source=source.origin.source,
        is_text_of_run=None if run is None else source.origin.digest == run.text.digest,
    )


def _by_byte(bits: float, source: RowSource) -> float | None:
    """Return bits per token of held-out documents as bits per byte."""
    assert isinstance(source, ShardSource)
    shards = source.shards["validation"]
    if any(each.index.prompts or not each.text_bytes for each in shards):
        return None
    return bits * sum(each.positions for each in shards) / sum(each.text_bytes for each in shards)


def _windows(source: RowSource, config: TrainConfig, batches: int) -> Iterator[Rows]:
    """Yield the windows of the validation part. Args: batches: 0: all."""
    if isinstance(source, ShardSource):
        yield from source.held_out(config, Place(config.batch.rows, 1, 0, 1), batches or None)
        return
    assert isinstance(source, ByteSource)
    part, (rows, length) = source.text.validation, (config.batch.rows, config.batch.length)
    for crop in even_crops(part, rows, length, batches) if batches else covering_crops(part, rows, length):
        yield Rows(crop.inputs, crop.targets, None, crop.targets.numel())


@torch.no_grad()
def _cross_entropy(model: LanguageModel, rows: Rows) -> float:
    """Return the mean cross entropy in nats per token."""
    rows = rows.to(model.device)
    if rows.cu_seqlens is None:
        return float(model.losses(rows.tokens, rows.targets).cross_entropy)
    packed = Context(cu_seqlens=rows.cu_seqlens)
    return float(model.losses(rows.tokens.view(1, -1), rows.targets.view(1, -1), packed).cross_entropy)
