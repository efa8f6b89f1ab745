"""Every valid spec, the full product of cases, and pairwise covers: few cases with every pair of axis values."""

import contextlib
import heapq
import random
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import combinations, product
from typing import Any, TypeVar, get_args

import torch

from deltazoo.backends.conformance.cases import REGIMES, Case
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.measure.shapes import TINY, Shape
from deltazoo.backends.update.spec import UpdateSpec

T = TypeVar("T")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_LITERAL = ("decay", "transition", "beta", "erase_key", "erase_from", "negative_eigenvalues", "reparam", "read")
AXES: dict[str, tuple[object, ...]] = {
    **{axis: get_args(UpdateSpec.model_fields[axis].annotation) for axis in _LITERAL},
    "householders": (1, 2, 3, 4),
    "scale": (None, 0.5),
}


def every_spec() -> Iterator[UpdateSpec]:
    """Yield the product of all axes, householders 1 to 4, without the combinations that UpdateSpec rejects."""
    yield from _every_spec()


@cache
def _every_spec() -> tuple[UpdateSpec, ...]:
    specs = []
    for values in product(*AXES.values()):
        axes: dict[str, Any] = dict(zip(AXES, values, strict=True))
        with contextlib.suppress(ConfigError):
            specs.append(UpdateSpec(**axes))
    return tuple(specs)


def every_case(shapes: Sequence[Shape] = TINY, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Case]:
    """Yield every spec on every shape and dtype; regime, layout, state and seed are random, with a fixed seed."""
    generator = random.Random(0)
    states: tuple[Any, ...] = ("given", "none")
    for spec, shape, dtype in product(every_spec(), shapes, dtypes):
        layout: Any = generator.choice(("contiguous", "strided"))
        yield Case(
            spec, shape, dtype, generator.choice(REGIMES), layout, generator.choice(states), generator.randrange(1000)
        )


def pairwise_cases(
    shapes: Sequence[Shape] = TINY,
    dtypes: Sequence[torch.dtype] = DTYPES,
    specs: Iterable[UpdateSpec] | None = None,
) -> list[Case]:
    """Return a pairwise cover: few cases with every pair of values of any two axes that some case can have.

    The axes are those of the spec, shape, dtype, regime, layout, state, and the parity of the seed.

    Args: specs: None is `every_spec()`.
    """
    return [case for case, _ in pairwise_with((None,), shapes, dtypes, specs)]


def pairwise_with(
    values: Sequence[T],
    shapes: Sequence[Shape] = TINY,
    dtypes: Sequence[torch.dtype] = DTYPES,
    specs: Iterable[UpdateSpec] | None = None,
) -> list[tuple[Case, T]]:
    """Return a pairwise cover as `pairwise_cases` does, with one more axis of the given values."""
    cover = _pairwise_specs(tuple(every_spec() if specs is None else specs))
    states = ("given", "none")
    rows = cross(cover, shapes, dtypes, REGIMES, ("contiguous", "strided"), states, (0, 1), values)
    cases = []
    for *axes, shape, dtype, regime, layout, state, seed, value in rows:
        spec = UpdateSpec(**dict(zip(AXES, axes, strict=True)))
        cases.append((Case(spec, shape, dtype, regime, layout, state, seed), value))
    return cases


@lru_cache(maxsize=16)
def _pairwise_specs(specs: tuple[UpdateSpec, ...]) -> list[tuple[Any, ...]]:
    """Return the axes of the specs in a pairwise cover."""
    return pairwise([tuple(getattr(spec, axis) for axis in AXES) for spec in specs])


def pairwise(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Choose few of the rows that contain every pair of values that any row contains, greedily.

    The gain of a row, its number of pairs not yet covered, only falls while rows are chosen. The heap therefore keeps
    old gains, which are upper bounds, and recomputes that of its top.
    """
    pairs = [set(pairs_of(row)) for row in rows]
    missing = set[Hashable]().union(*pairs)
    heap = [(-len(gain), index) for index, gain in enumerate(pairs)]
    heapq.heapify(heap)
    chosen = []
    while missing:
        _, index = heapq.heappop(heap)
        gain = len(pairs[index] & missing)
        if heap and gain < -heap[0][0]:
            heapq.heappush(heap, (-gain, index))
            continue
        missing -= pairs[index]
        chosen.append(rows[index])
    return chosen


def cross(rows: Sequence[tuple[Any, ...]], *factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Extend rows by independent factors, so that each value of a factor occurs with every value of every column."""
    crossed = list(rows)
    for factor in factors:
        missing = {(column, x, value) for row in crossed for column, x in enumerate(row) for value in factor}
        uses = dict.fromkeys(factor, 0)
        extended: list[tuple[Any, ...]] = []
        for index, row in enumerate(crossed * (1 + len(factor))):
            gains = {value: sum((column, x, value) in missing for column, x in enumerate(row)) for value in factor}
            best = max(factor, key=lambda value: (gains[value], -uses[value]))
            if index < len(crossed) or gains[best]:
                missing -= {(column, x, best) for column, x in enumerate(row)}
                uses[best] += 1
                extended.append((*row, best))
        crossed = extended
    return crossed


def pairs_of(row: tuple[Any, ...]) -> Iterator[Hashable]:
    """Yield the pairs of values of a row, each with its two columns."""
    for left, right in combinations(range(len(row)), 2):
        yield left, right, row[left], row[right]
