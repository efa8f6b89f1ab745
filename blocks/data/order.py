"""The global order of documents: shuffled per epoch, and mixed from several sources by weight.

The order is a function of the sources, their weights and the seed alone. It depends neither on the number of processes
nor on the batch size nor on the versions of libraries.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update.check import check_integer
from deltazoo.blocks.data.shards import TokenShards


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
