"""Selection of parameter pairs for tests whose full product is slow."""

from collections.abc import Collection, Sequence

import pytest


def cover(
    firsts: Sequence[object], seconds: Sequence[object], smoke: Collection[tuple[object, object]] = ()
) -> list[object]:
    """Return all pairs. Each first with one second in rotation, and the smoke pairs, run by default; others are slow.

    Args: smoke: pairs of the smallest set of tests that runs every kernel.
    """
    pairs = []
    for i, first in enumerate(firsts):
        for j, second in enumerate(seconds):
            is_smoke = (first, second) in smoke
            default = j == i % len(seconds) or is_smoke
            marks = [pytest.mark.kernel_smoke] * is_smoke + [pytest.mark.slow] * (not default)
            pairs.append(pytest.param(first, second, marks=marks, id=f"{first}-{second}"))
    return pairs
