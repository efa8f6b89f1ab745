"""Rows of packed documents for training: exact resume with any number of ranks and any batch size.

B rows of a rank, T tokens of a row, N documents or parts of documents in the rows
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, cut
from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX
from deltazoo.backends.update.check import check_integer
from deltazoo.blocks.data.order import DocumentStream, Mixture
from deltazoo.blocks.data.packing import Packed, RowEnd, pack


class Batch(NamedTuple):
    """The rows of one rank for one step.

    tokens: [B, T] int64.
    targets: [B, T] int64, the token that follows in the same document. -100 at prompts and at padding: no loss.
    cu_seqlens: [N + 1] int32, bounds of the documents in the flattened rows, from 0 to B * T. A document that a row
        ends is two sequences. With it, tokens must be flattened to [1, B * T]:
        `model.losses(tokens.view(1, -1), targets.view(1, -1), Context(cu_seqlens=cu_seqlens))`.
    counted: number of targets other than -100, for exact means over ranks and accumulated batches.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    counted: int


class Loader:
    """Iterate over the batches of one rank.

        loader = Loader(Mixture([Source(open_shards("data"))], seed=1), rows=8, row_tokens=4096, rank=rank, world=world)
        batch = next(loader)
        saved = loader.state()  # continues after this batch, on any number of ranks: Loader(..., state=saved)

    Documents follow each other in the global order of the mixture. Step by step, the next `world * rows` rows are taken
    from it; rank r takes rows r * rows to (r + 1) * rows. The state counts documents, not batches, so that it does not
    depend on `rows`, `rank` and `world`, and is equal on all ranks.

    A document of n tokens takes n - 1 places in rows: its last token, usually the end token, is only a target.

    Args:
        rows: B, per rank and batch.
        row_tokens: T.
        at_row_end: what happens to a document that does not fit into the rest of its row. "carry": the row ends it,
            and the next row continues it, as a sequence of its own. "cut": its rest is left out. "whole": it starts the
            next row, after padding; longer than a row, its rest is left out. Prompts with answers need "whole".
        state: a value of `state()`; the sources must have the same data in the same order, and the seed must be equal.
            Other weights hold from there on.
    Raises: ConfigError: a size is invalid, the sources differ in vocabulary, or the state is of other data.
    """

    def __init__(
        self,
        mixture: Mixture,
        rows: int,
        row_tokens: int,
        rank: int = 0,
        world: int = 1,
        at_row_end: RowEnd = "carry",
        state: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, least in (("rows", rows, 1), ("row_tokens", row_tokens, 1), ("world", world, 1)):
            check_integer(name, value, least)
        if not 0 <= rank < world:
            raise ConfigError(f"rank must be in [0, {world}), got {rank}")
        if at_row_end not in get_args(RowEnd):
            raise ConfigError(f"at_row_end must be one of {', '.join(get_args(RowEnd))}, got {cut(at_row_end)}")
        if at_row_end != "whole" and any(source.shards.index.prompts for source in mixture.sources):
            raise ConfigError(f"at_row_end must be whole for documents with prompts, got {at_row_end}")
        self.rows, self.row_tokens, self.rank, self.world, self.at_row_end = rows, row_tokens, rank, world, at_row_end
        self._stream = DocumentStream(mixture, state)

    def __iter__(self) -> "Loader":
        """Return itself."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Raises: StopIteration: without `repeat`, no rank has a row left."""
        stream = self._stream
        while True:
            lengths, rows = stream.ahead.length, self.rows * self.world
            packed = pack(lengths, stream.offset, rows, self.row_tokens, self.at_row_end, stream.is_exhausted)
            if packed is not None:
                break
            stream.extend()
        if not len(packed.place):
            raise StopIteration
        batch = self._copied(packed)
        stream.drop(packed.used, packed.offset)
        return batch

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, with which another loader continues after the last batch."""
        return self._stream.state()

    @property
    def epochs(self) -> list[float]:
        """The number of epochs of each source that are used."""
        return self._stream.epochs

    def _copied(self, packed: Packed) -> Batch:
        """Copy the tokens of this rank's rows."""
        size = self.rows * self.row_tokens
        first, last = np.searchsorted(packed.place, [self.rank * size, (self.rank + 1) * size])
        document, start, length = packed.document[first:last], packed.start[first:last], packed.length[first:last]
        place = packed.place[first:last] - self.rank * size
        ahead, files = self._stream.ahead, self._stream.files
        tokens, targets = np.zeros(size, np.int64), np.full(size, IGNORE_INDEX)
        # the loss starts with the target that is the first token after the prompt
        unscored = np.clip(ahead.prompt[document] - 1 - start, 0, length)
        columns = (ahead.file[document], ahead.begin[document] + start, length, place, unscored)
        for file, begin, count, at, skipped in zip(*(column.tolist() for column in columns), strict=True):
            piece = files[file][begin : begin + count + 1]
            tokens[at : at + count] = piece[:-1]
            targets[at + skipped : at + count] = piece[skipped + 1 :]
        row_bounds = np.arange(0, size + 1, self.row_tokens)
        bounds = np.unique(np.concatenate([place, place + length, row_bounds])).astype(np.int32)
        tokens_BT, targets_BT = (
            torch.from_numpy(values).view(self.rows, self.row_tokens) for values in (tokens, targets)
        )
        return Batch(tokens_BT, targets_BT, torch.from_numpy(bounds), int((length - unscored).sum()))
