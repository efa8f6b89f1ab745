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


def pairwise(*columns: Sequence[object]) -> list[tuple[object, ...]]:
    """Return rows with one value of each column, such that every pair of values of two columns is in a row.

    Greedy: each row takes, column after column, the value that adds most of the missing pairs.
    """
    missing = {
        (i, j, a, b)
        for i in range(len(columns))
        for j in range(i + 1, len(columns))
        for a in range(len(columns[i]))
        for b in range(len(columns[j]))
    }
    rows: list[tuple[object, ...]] = []
    while missing:
        i, j, a, b = min(missing)
        row = {i: a, j: b}
        for column in range(len(columns)):
            if column in row:
                continue
            known = list(row.items())
            row[column] = max(
                range(len(columns[column])),
                key=lambda value: sum(
                    ((min(column, c), max(column, c)) + ((value, x) if column < c else (x, value))) in missing
                    for c, x in known
                ),
            )
        missing -= {(i, j, row[i], row[j]) for i in range(len(columns)) for j in range(i + 1, len(columns))}
        rows.append(tuple(columns[i][row[i]] for i in range(len(columns))))
    return rows
