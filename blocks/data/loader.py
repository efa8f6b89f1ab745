"""Rows of packed documents for training: exact resume with any number of ranks and any batch size.

B rows of a rank, T tokens of a row, N documents or parts of documents in the rows
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from deltazoo.blocks.data.order import Mixture

RowEnd = Literal["carry", "cut", "whole"]


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
        at_row_end: what happens to a document that does not fit into the rest of its row. "carry": the row ends it, and
            the next row continues it, as a sequence of its own. "cut": its rest is left out. "whole": it starts the next
            row, after padding; longer than a row, its rest is left out. Prompts with answers need "whole".
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
        state: dict[str, Any] | None = None,
    ) -> None:
        raise NotImplementedError

    def __iter__(self) -> "Loader":
        """Return itself."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Raises: StopIteration: without `repeat`, no rank has a row left."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, with which another loader continues after the last batch."""
        raise NotImplementedError
