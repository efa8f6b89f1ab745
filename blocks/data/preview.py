"""A data folder as a reader sees it: its counts, and the text of documents."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from deltazoo.backends.io.errors import count
from deltazoo.blocks.data.encoding import BYTES_NAME, NO_END, make_encoder
from deltazoo.blocks.data.shards import TOKENIZER, ShardIndex, TokenShards


class DocumentText(BaseModel):
    """The text of one document, with its special tokens.

    Args: number: in its part; tokens: with the end token; prompt: None without one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    tokens: int
    prompt: str | None
    text: str


def read_documents(shards: TokenShards, first: int, number: int) -> Iterator[DocumentText]:
    """Decode consecutive documents. Raises: ConfigError: the tokenizer of the folder cannot be read."""
    origin = shards.index.tokenizer
    encoder = make_encoder(BYTES_NAME if origin.name == BYTES_NAME else str(shards.folder / TOKENIZER), NO_END)
    for n in range(first, min(first + number, shards.documents)):
        tokens, prompt = shards.document(n).tolist(), shards.prompt(n)
        yield DocumentText(
            number=n,
            tokens=len(tokens),
            prompt=encoder.decode(tokens[:prompt]) if shards.index.prompts else None,
            text=encoder.decode(tokens[prompt:]),
        )


def summary_lines(folder: Path, index: ShardIndex) -> Iterator[str]:
    """Yield the counts of a data folder as lines of text."""
    for part, counts in index.parts.items():
        text = f", {counts.text_bytes:,} bytes of text" if counts.text_bytes else ", bytes of text unknown"
        mean = counts.tokens / counts.documents
        yield (
            f"{part}: {counts.documents:,} document{'' if counts.documents == 1 else 's'}, {counts.tokens:,} tokens "
            f"({mean:,.0f} per document){text}"
        )
    if index.skipped:
        yield f"left out: {count(index.skipped, 'document')} without text"
    yield f"tokenizer: {index.tokenizer.name}, {index.tokenizer.vocab:,} tokens, {index.dtype}"
    yield f"{folder}: digest {index.digest[:16]}"
