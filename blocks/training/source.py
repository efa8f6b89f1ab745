"""Where the rows of a run come from: the bytes of a text, or documents in token shards.

R rows, T tokens of a row, N documents in the rows
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, cut
from deltazoo.blocks.data.loader import Batch, Loader
from deltazoo.blocks.data.order import Mixture, Source
from deltazoo.blocks.data.prefetch import Prefetch
from deltazoo.blocks.data.shards import INDEX, open_shards
from deltazoo.blocks.data.text import BYTES, Text, as_text, even_crops, random_crops
from deltazoo.blocks.training.config import BatchConfig, DataConfig, RunSettings, TextOrigin, TrainConfig, text_of_run

_LEAST_BOUNDS = 64  # entries of cu_seqlens


class Rows(NamedTuple):
    """Rows of one process for one forward pass.

    tokens, targets: [R, T] int64; a target of -100 has no loss.
    cu_seqlens: [N + 1] int32, bounds of the documents in the flattened rows; None: each row is one document.
    counted: number of targets with a loss.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    counted: int

    def to(self, device: torch.device) -> "Rows":
        """Copy to a device; to a GPU without waiting for it."""
        if device.type == "cpu":
            return self

        def copy(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

        bounds = None if self.cu_seqlens is None else copy(self.cu_seqlens)
        return Rows(copy(self.tokens), copy(self.targets), bounds, self.counted)


class Place(NamedTuple):
    """The rows of a process: rows per forward pass, forward passes per step, and its index among those with rows."""

    rows: int
    passes: int
    rank: int
    ranks: int

    @classmethod
    def of(cls, batch: BatchConfig, rank: int, ranks: int) -> "Place":
        """Split the rows of a step. Raises: ConfigError: they cannot be split equally."""
        total = batch.step_rows
        if total % ranks:
            raise ConfigError(f"batch.rows must be a multiple of the {ranks} processes with rows, got {total}")
        rows = min(batch.micro_rows or total, total // ranks)
        if total // ranks % rows:
            raise ConfigError(
                f"batch.micro_rows must divide the rows of a process, {total // ranks}, got {batch.micro_rows}"
            )
        return cls(rows, total // ranks // rows, rank, ranks)


class RowSource(ABC):
    """The rows of a run.

    The rows of a step depend on the settings and the seed, and not on the number of processes.

    Attributes: origin: what the folder of the run keeps of the text. least_vocab: the smallest vocabulary of a model.
        dense: whether every target has a loss.
    """

    origin: TextOrigin
    least_vocab: int
    dense: bool

    @abstractmethod
    def begin(self, config: TrainConfig, place: Place, state: dict[str, Any] | None) -> None:
        """Prepare the rows of a process, after those of a state. Raises: ConfigError."""

    @abstractmethod
    def rows(self, step: int, index: int) -> Rows:
        """Return the rows of forward pass `index` of a step; the calls are in order."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return plain data with which `begin` continues, equal on all processes."""

    @abstractmethod
    def validation(self, config: TrainConfig, place: Place) -> Iterator[Rows]:
        """Yield this process's rows of the validation."""

    @abstractmethod
    def close(self) -> None:
        """End the thread that reads ahead, if there is one."""


class ByteSource(RowSource):
    """Random windows of a text; the windows of a step depend on the seed and the step alone."""

    def __init__(self, text: Text) -> None:
        self.text, self.least_vocab, self.dense = text, BYTES, True
        self.origin = TextOrigin(path=text.path, digest=text.digest, source=text.source)

    def begin(self, config: TrainConfig, place: Place, state: dict[str, Any] | None) -> None:
        self.config, self.place = config, place
        random_crops(self.text.train, 1, config.batch.length, 0, 0)  # raises for a text that is too short

    def rows(self, step: int, index: int) -> Rows:
        config, place = self.config, self.place
        batch = random_crops(self.text.train, config.batch.step_rows, config.batch.length, config.seed, step)
        first = (index * place.ranks + place.rank) * place.rows
        return _dense(batch.inputs[first : first + place.rows], batch.targets[first : first + place.rows])

    def state(self) -> dict[str, Any]:
        return {}

    def validation(self, config: TrainConfig, place: Place) -> Iterator[Rows]:
        batch = config.batch
        crops = even_crops(self.text.validation, batch.step_rows, batch.length, config.evaluation.batches)
        for crop in crops:
            for index in range(place.passes):
                first = (index * place.ranks + place.rank) * place.rows
                yield _dense(crop.inputs[first : first + place.rows], crop.targets[first : first + place.rows])

    def close(self) -> None:
        """Do nothing: no thread reads ahead."""


class ShardSource(RowSource):
    """Packed documents of folders that `deltazoo data` wrote."""

    def __init__(self, data: DataConfig) -> None:
        folders = dict(data.mixture) or {str(data.path): 1.0}
        self.weights = tuple(folders.values())
        self.shards = {"train": [open_shards(folder) for folder in folders], "validation": []}
        for shards in self.shards["train"]:
            if "validation" not in shards.index.parts:
                raise ConfigError(
                    f"{shards.folder} has no held-out documents: encode them with --held-out, see deltazoo data --help"
                )
            self.shards["validation"].append(open_shards(shards.folder, "validation"))
        first = self.shards["train"][0]
        self.least_vocab = first.index.tokenizer.vocab
        self.dense = False
        prompts = any(shards.index.prompts for shards in self.shards["train"])
        self.row_end = data.row_end or ("whole" if prompts else "carry")
        digests = [shards.digest for shards in self.shards["train"]]
        joined = digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
        paths = [str(Path(folder).absolute()) for folder in folders]
        self.origin = TextOrigin(path=paths[0] if len(paths) == 1 else None, digest=joined, source=", ".join(folders))
        self._most_bounds = _LEAST_BOUNDS
        self._batches: Prefetch | None = None

    def begin(self, config: TrainConfig, place: Place, state: dict[str, Any] | None) -> None:
        self.close()
        self._batches = Prefetch(self._loader("train", config, place, state))

    def rows(self, step: int, index: int) -> Rows:
        assert self._batches is not None
        return self._packed(next(self._batches))

    def state(self) -> dict[str, Any]:
        assert self._batches is not None
        return self._batches.state()

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def validation(self, config: TrainConfig, place: Place) -> Iterator[Rows]:
        return self.held_out(config, place, config.evaluation.batches * place.passes)

    def held_out(self, config: TrainConfig, place: Place, passes: int | None) -> Iterator[Rows]:
        """Yield rows of the held-out documents. Args: passes: None: until no document is left."""
        loader = self._loader("validation", config, place, None)
        return map(self._packed, islice(loader, passes))

    def _loader(self, part: str, config: TrainConfig, place: Place, state: dict[str, Any] | None) -> Loader:
        training = part == "train"
        sources = [Source(shards, weight) for shards, weight in zip(self.shards[part], self.weights, strict=True)]
        mixture = Mixture(sources, seed=config.seed, shuffle=training, repeat=training)
        return Loader(mixture, place.rows, config.batch.length, place.rank, place.ranks, self.row_end, state)

    def _packed(self, batch: Batch) -> Rows:
        """Pad the bounds with empty documents, so that most batches have the shapes of one compiled graph."""
        while len(batch.cu_seqlens) > self._most_bounds:
            self._most_bounds *= 2
        bounds = torch.nn.functional.pad(
            batch.cu_seqlens, (0, self._most_bounds - len(batch.cu_seqlens)), value=batch.tokens.numel()
        )
        return Rows(batch.tokens, batch.targets, bounds, batch.counted)


def open_source(text: Text | str | Path | None, data: DataConfig) -> RowSource:
    """Open the text of a run: `text`, or if it is None what the settings name. Raises: ConfigError."""
    if data.mixture:
        if text is not None:
            given = text.source if isinstance(text, Text) else text
            raise ConfigError(f"text and data.mixture must not both be given, got {given} and {cut(data.mixture)}")
        return ShardSource(data)
    found = data.path if text is None else text
    if isinstance(found, str | Path) and Path(found).is_dir():
        if not (Path(found) / INDEX).is_file():
            raise ConfigError(f"{found} has no {INDEX}: encode it with deltazoo data {found} --out DATA")
        return ShardSource(data.model_copy(update={"path": str(found)}))
    if isinstance(found, str | Path) and Path(found).suffix in (".jsonl", ".parquet", ".arrow", ".bin"):
        raise ConfigError(f"{found} must be encoded first: deltazoo data {found} --out DATA, then train on DATA")
    return ByteSource(as_text(found))


def source_of_run(settings: RunSettings, text: Text | str | Path | None, file: object) -> RowSource:
    """Open the text of a run again. Args: file: as for `text_of_run`. Raises: ConfigError: it is another one."""
    data, origin = settings.train.data, settings.text
    path = origin.path if text is None else text
    if not data.mixture and not (isinstance(path, str | Path) and Path(path).is_dir()):
        return ByteSource(text_of_run(settings, None if text is None else as_text(text), file))
    source = open_source(text if data.mixture else path, data)
    if source.origin.digest != origin.digest:
        raise ConfigError(f"the data in {source.origin.source} have changed since the run was trained on them")
    return source


def _dense(tokens: Tensor, targets: Tensor) -> Rows:
    return Rows(tokens, targets, None, targets.numel())
