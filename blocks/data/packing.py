"""Which part of which document is at which place of the rows: a plan from the documents' lengths alone.

T tokens of a row
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
RowEnd = Literal["carry", "cut", "whole"]


class Packed(NamedTuple):
    """The segments of rows: consecutive tokens of one document within one row, [n] each and in the order of places.

    document: index in `lengths`; start: of the segment in its document; length: in tokens; place: in the flat rows.
    used: number of documents, from the first, that later rows do not need; offset: used tokens of the next one.
    """

    document: Integers
    start: Integers
    length: Integers
    place: Integers
    used: int
    offset: int


def pack(lengths: Integers, offset: int, rows: int, T: int, at_row_end: RowEnd, are_all: bool) -> Packed | None:
    """Fill rows with documents in their order.

    Args:
        lengths: [n] tokens of each document.
        offset: tokens of the first document that are used.
        at_row_end: as for `Loader`.
        are_all: whether no more documents exist; then rows may stay empty.
    Returns: None: the rows need more documents.
    """
    lengths = lengths.copy()
    lengths[:1] -= offset
    packed = (_carry if at_row_end == "carry" else _separate)(lengths, rows, T, at_row_end, are_all)
    if packed is None:
        return None
    packed.start[packed.document == 0] += offset
    return packed._replace(offset=packed.offset + (offset if packed.used == 0 else 0))


def _carry(lengths: Integers, rows: int, T: int, at_row_end: RowEnd, are_all: bool) -> Packed | None:
    ends = np.cumsum(lengths)
    total = rows * T
    available = int(ends[-1]) if len(ends) else 0
    if available < total and not are_all:
        return None
    total = min(total, available)
    begins = ends - lengths
    place = np.unique(np.concatenate([begins[begins < total], np.arange(0, total, T)]))
    document = np.searchsorted(ends, place, side="right")
    length = np.diff(place, append=total)
    used, rest = int(np.searchsorted(ends, total)), 0
    if used < len(ends) and ends[used] == total:
        used += 1
    elif used < len(ends):
        rest = int(total - begins[used])
    return Packed(document, place - begins[document], length, place, used, rest)


def _separate(lengths: Integers, rows: int, T: int, at_row_end: RowEnd, are_all: bool) -> Packed | None:
    """Start each row with a new document."""
    n = len(lengths)
    lengths = np.minimum(lengths, T)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    if at_row_end == "cut":  # the next row starts with the first document that is all beyond this row
        following = np.searchsorted(begins, begins + T).tolist()
    else:  # with the first that is not all inside
        following = np.searchsorted(ends, begins + T, side="right").tolist()
    firsts, next_first = list[int](), 0
    while len(firsts) < rows and next_first < n:
        firsts.append(next_first)
        next_first = following[next_first]
    if next_first == n and not are_all:
        return None
    row = np.repeat(np.arange(len(firsts)), np.diff([*firsts, next_first]))
    inside = begins[:next_first] - begins[firsts][row]
    length = np.minimum(lengths[:next_first], T - inside)
    kept = np.flatnonzero(length > 0)
    return Packed(kept, np.zeros_like(kept), length[kept], (row * T + inside)[kept], next_first, 0)
