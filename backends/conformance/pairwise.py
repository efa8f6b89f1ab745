"""Every valid spec, every case of the product, and the few cases that cover every pair of axis values."""

import heapq
import random
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, TypeVar, get_args

import torch
from pydantic import ValidationError

from deltazoo.backends.conformance.cases import REGIMES, Case
from deltazoo.backends.shapes import TINY, Shape
from deltazoo.backends.spec import UpdateSpec

T = TypeVar("T")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_LITERAL = ("decay", "transition", "beta", "erase_key", "erase_from", "negative_eigenvalues", "reparam", "read")
AXES: dict[str, tuple[object, ...]] = {
    **{axis: get_args(UpdateSpec.model_fields[axis].annotation) for axis in _LITERAL},
    "householders": (1, 2, 3, 4),
    "scale": (None, 0.5),
}


def every_spec() -> Iterator[UpdateSpec]:
    """Yield the product of all axes, householders 1 to 4, without what UpdateSpec refuses."""
    for values in product(*AXES.values()):
        axes: dict[str, Any] = dict(zip(AXES, values, strict=True))
        try:
            yield UpdateSpec(**axes)
        except ValidationError:
            continue


def every_case(shapes: Sequence[Shape] = TINY, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Case]:
    """Yield every spec on every shape and dtype; regime, layout, state and seed at random, the same in every run."""
    chance = random.Random(0)
    states: tuple[Any, ...] = ("given", "none")
    for spec, shape, dtype in product(every_spec(), shapes, dtypes):
        layout: Any = chance.choice(("contiguous", "strided"))
        yield Case(spec, shape, dtype, chance.choice(REGIMES), layout, chance.choice(states), chance.randrange(1000))


def pairwise_cases(
    shapes: Sequence[Shape] = TINY,
    dtypes: Sequence[torch.dtype] = DTYPES,
    specs: Iterable[UpdateSpec] | None = None,
) -> list[Case]:
    """Choose few cases such that every two values of any two axes that can occur together do.

    The axes are those of the spec, shape, dtype, regime, layout, state, and the parity of the seed.

    Args: specs: None is `every_spec()`.
    """
    return [case for case, _ in pairwise_with((None,), shapes, dtypes, specs)]


def pairwise_with(
    more: Sequence[T],
    shapes: Sequence[Shape] = TINY,
    dtypes: Sequence[torch.dtype] = DTYPES,
    specs: Iterable[UpdateSpec] | None = None,
) -> list[tuple[Case, T]]:
    """Choose few cases as `pairwise_cases` does, with one more axis beside them."""
    all_axes = [tuple(getattr(spec, axis) for axis in AXES) for spec in (every_spec() if specs is None else specs)]
    states = ("given", "none")
    rows = cross(pairwise(all_axes), shapes, dtypes, REGIMES, ("contiguous", "strided"), states, (0, 1), more)
    cases = []
    for *axes, shape, dtype, regime, layout, state, seed, extra in rows:
        spec = UpdateSpec(**dict(zip(AXES, axes, strict=True)))
        cases.append((Case(spec, shape, dtype, regime, layout, state, seed), extra))
    return cases


def pairwise(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Choose few of the rows that hold every pair of values that any row holds, greedily.

    A row's gain only shrinks as others are chosen, so a stale gain at the top of a heap is renewed and put back.
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
    """Extend rows by free factors so that each of their values occurs with every value of every column."""
    found = list(rows)
    for factor in factors:
        missing = {(column, x, value) for row in found for column, x in enumerate(row) for value in factor}
        used = dict.fromkeys(factor, 0)
        grown: list[tuple[Any, ...]] = []
        for turn, row in enumerate(found * (1 + len(factor))):
            gains = {value: sum((column, x, value) in missing for column, x in enumerate(row)) for value in factor}
            best = max(factor, key=lambda value: (gains[value], -used[value]))
            if turn < len(found) or gains[best]:
                missing -= {(column, x, best) for column, x in enumerate(row)}
                used[best] += 1
                grown.append((*row, best))
        found = grown
    return found


def pairs_of(row: tuple[Any, ...]) -> Iterator[Hashable]:
    """Yield the pairs of a row, each with the two columns it stands in."""
    for left, right in combinations(range(len(row)), 2):
        yield left, right, row[left], row[right]
