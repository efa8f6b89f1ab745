"""The global order of documents: shuffled per epoch, and mixed from several sources by weight.

The order is a function of the sources, their weights and the seed alone. It depends neither on the number of processes
nor on the batch size nor on the versions of libraries.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltazoo.backends.io.errors import ConfigError, cut
from deltazoo.backends.update.check import check_integer
from deltazoo.blocks.data.shards import TokenShards

_BLOCK = 4096  # documents that are ordered at once; the order does not depend on it
_ROUNDS = 8

Integers = NDArray[np.int64]


class Source(NamedTuple):
    """A part of a mixture. weight: its share of the tokens, relative to the other sources."""

    shards: TokenShards
    weight: float = 1.0


class Mixture(NamedTuple):
    """Documents in a global order.

    sources: each starts its next epoch when its documents are used up.
    seed: random seed of the shuffling, in [0, 2^63).
    shuffle: whether each epoch of a source is shuffled. False: the order of the folder.
    repeat: False: each document is used once, for validation.
    """

    sources: Sequence[Source]
    seed: int = 0
    shuffle: bool = True
    repeat: bool = True


def permuted(index: Integers, size: int, key: str) -> Integers:
    """Return where a random permutation of `size` elements takes each index. It needs no memory for the permutation.

    A Feistel network permutes the numbers of as many bits as `size` needs; a result outside the range is permuted again
    until it is inside (cycle walking).

    Args: index: [n], each in [0, size); key: selects the permutation.
    Source: Black and Rogaway, Ciphers with arbitrary finite domains, 2002, sections 4 and 5.
    """
    bits = max(2, (size - 1).bit_length())
    right_bits = np.uint64(bits // 2)
    right_mask, left_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), "<u8")

    def permute(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> right_bits, x & right_mask
        for n in range(0, _ROUNDS, 2):
            left = left ^ (_mixed(right + keys[n]) & left_mask)
            right = right ^ (_mixed(left + keys[n + 1]) & right_mask)
        return (left << right_bits) | right

    result = permute(index.astype(np.uint64))
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = permute(result[outside])
    return result.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of 64 bits. Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Documents(NamedTuple):
    """Consecutive documents of the global order, [n] each.

    source: index in the mixture; file: index of `DocumentStream.files`; begin: of the document's tokens in the file;
    length: number of tokens that have a next token, one less than the document's; prompt: tokens of the prompt.
    """

    source: Integers
    file: Integers
    begin: Integers
    length: Integers
    prompt: Integers


class DocumentStream:
    """The documents of a mixture from a position on, which can be saved.

    A source's document that follows c tokens of that source has the time c / weight. Documents are ordered by time, and
    equal times by source, so that after any number of documents the sources' shares of the tokens are those of their
    weights up to one document each.

    Attributes: ahead: documents that have been ordered and not dropped; files: tokens of all shards; is_exhausted:
        whether `ahead` holds all documents that are left.
    Raises: ConfigError: as for `Loader`.
    """

    def __init__(self, mixture: Mixture, state: Mapping[str, Any] | None = None) -> None:
        _check(mixture)
        self.mixture = mixture
        self.files = [file for source in mixture.sources for file in source.shards.files]
        self._first_file = np.cumsum([0, *(len(source.shards.files) for source in mixture.sources)])
        n = len(mixture.sources)
        self.used = [0] * n  # documents of each source that were dropped, over all epochs
        self.tokens = [0] * n  # and their lengths, since the weights were set
        self.offset = 0  # tokens of the next document that are used
        if state is not None:
            self._restore(state)
        empty = np.zeros(0, np.int64)
        self.ahead = Documents(*[empty] * 5)
        self._ordered = list(zip(self.used, self.tokens, strict=True))  # like `used` and `tokens`, after `ahead`
        self.is_exhausted = False

    def extend(self) -> None:
        """Order more documents, or set `is_exhausted`."""
        more = self._next_documents(max(_BLOCK, len(self.ahead.length)))
        self.is_exhausted = len(more.length) == 0
        pairs = zip(self.ahead, more, strict=True)
        self.ahead = Documents(*(np.concatenate(pair) for pair in pairs))
        self._ordered = self._counted(self._ordered, more)

    def drop(self, documents: int, offset: int) -> None:
        """Remove documents from the start of `ahead`; then `offset` tokens of the next one are used."""
        dropped = Documents(*(values[:documents] for values in self.ahead))
        self.ahead = Documents(*(values[documents:] for values in self.ahead))
        counted = self._counted(list(zip(self.used, self.tokens, strict=True)), dropped)
        self.used, self.tokens = [used for used, _ in counted], [tokens for _, tokens in counted]
        self.offset = offset

    def state(self) -> dict[str, Any]:
        """Return the position as plain JSON data."""
        return {
            "data": _names(self.mixture),
            "seed": self.mixture.seed,
            "shuffle": self.mixture.shuffle,
            "weights": [source.weight for source in self.mixture.sources],
            "documents": list(self.used),
            "tokens": list(self.tokens),
            "offset": self.offset,
        }

    @property
    def epochs(self) -> list[float]:
        """The number of epochs of each source that are used."""
        return [used / s.shards.documents for used, s in zip(self.used, self.mixture.sources, strict=True)]

    def _restore(self, state: Mapping[str, Any]) -> None:
        expected = {"data": _names(self.mixture), "seed": self.mixture.seed, "shuffle": self.mixture.shuffle}
        if missing := sorted({*expected, "weights", "documents", "tokens", "offset"} - set(state)):
            raise ConfigError(f"the state of the loader must be that of Loader.state(), got none of {missing}")
        if state["data"] != expected["data"]:
            raise ConfigError(
                f"the state of the loader is of other data ({_short(state['data'])}), got {_short(expected['data'])}: "
                "the data folders have changed, or their order"
            )
        for name in ("seed", "shuffle"):
            if state[name] != expected[name]:
                raise ConfigError(f"{name} must stay {state[name]} to continue the order, got {expected[name]}")
        self.used, self.offset = list(state["documents"]), state["offset"]
        if state["weights"] == [source.weight for source in self.mixture.sources]:
            self.tokens = list(state["tokens"])
        elif self.offset:  # the document that is partly used precedes the others, and its rest counts
            times = [tokens / weight for tokens, weight in zip(state["tokens"], state["weights"], strict=True)]
            self.tokens[times.index(min(times))] = -self.offset

    def _next_documents(self, number: int) -> Documents:
        """Order about `number` documents more; none only if none is left."""
        sources = self.mixture.sources
        means = [source.shards.positions / source.shards.documents for source in sources]
        rates = [source.weight / mean for source, mean in zip(sources, means, strict=True)]
        while True:
            parts, times, horizon, left = [], [], math.inf, False
            for n, (source, rate) in enumerate(zip(sources, rates, strict=True)):
                used, tokens = self._ordered[n]
                wanted = math.ceil(number * rate / sum(rates)) + 1
                if not self.mixture.repeat:
                    wanted = min(wanted, source.shards.documents - used)
                part = self._documents_of(n, used, wanted)
                ends = tokens + np.cumsum(part.length)
                parts.append(part)
                times.append((ends - part.length) / source.weight)
                if self.mixture.repeat or used + wanted < source.shards.documents:
                    horizon, left = min(horizon, float(ends[-1]) / source.weight), True
            time = np.concatenate(times)
            order = np.argsort(time, kind="stable")
            order = order[: np.searchsorted(time[order], horizon)]  # a document after it may precede the horizon
            if len(order) or not left:
                columns = zip(*parts, strict=True)
                return Documents(*(np.concatenate(column)[order] for column in columns))
            number *= 2

    def _documents_of(self, n: int, used: int, number: int) -> Documents:
        """Return the next documents of a source, after `used`."""
        source, index = self.mixture.sources[n], np.arange(used, used + number)
        epoch, index = np.divmod(index, source.shards.documents)
        if self.mixture.shuffle:
            index = index.copy()
            for number_of_epoch in np.unique(epoch):
                in_epoch = epoch == number_of_epoch
                key = f"{self.mixture.seed} {n} {number_of_epoch}"
                index[in_epoch] = permuted(index[in_epoch], source.shards.documents, key)
        place = source.shards.locate(index)
        return Documents(
            source=np.full(number, n), file=place.file + self._first_file[n], begin=place.begin,
            length=np.maximum(place.length - 1, 0), prompt=place.prompt,
        )  # fmt: skip

    def _counted(self, counts: list[tuple[int, int]], documents: Documents) -> list[tuple[int, int]]:
        """Add the documents and tokens of each source to the counts."""
        result = []
        for n, (used, tokens) in enumerate(counts):
            of_source = documents.source == n
            result.append((used + int(of_source.sum()), tokens + int(documents.length[of_source].sum())))
        return result


def _check(mixture: Mixture) -> None:
    check_integer("seed", mixture.seed, 0)
    if not mixture.sources:
        raise ConfigError("sources must name at least one data folder, got none")
    first = mixture.sources[0].shards
    for shards, weight in mixture.sources:
        if not (0 < weight < math.inf):
            raise ConfigError(f"weight of {shards.folder} must be positive and finite, got {weight}")
        if shards.positions <= 0:
            raise ConfigError(f"{shards.folder} has no {shards.part} document of two tokens or more")
        if shards.index.tokenizer.digest != first.index.tokenizer.digest:
            raise ConfigError(f"{first.folder} and {shards.folder} must have the same tokenizer to be mixed")


def _names(mixture: Mixture) -> list[str]:
    return [f"{source.shards.part} {source.shards.digest}" for source in mixture.sources]


def _short(names: object) -> str:
    return ", ".join(name[:18] for name in names) if isinstance(names, list) else cut(names)
