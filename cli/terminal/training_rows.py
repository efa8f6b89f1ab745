"""Printing of training curves: a row for each point, at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deltazoo.cli.terminal.output import print_piece, rule

if TYPE_CHECKING:
    from deltazoo.blocks.training.records import Point

_TITLES = ("step", "train", "validation, bits per token", "tokens/s")
_WIDTHS = (7, 6, 26, 9)


class TrainingRows:
    """Print each point as a row of a table; auxiliary losses follow the columns with their names.

    Args: name: of the model, printed above the table; "": none.
    """

    def __init__(self, name: str = "") -> None:
        self.name, self.is_first = name, True

    def __call__(self, point: "Point") -> None:
        if self.is_first:
            if self.name:
                print_piece(f"{self.name}\n")
            _print_row(_TITLES)
            print_piece(f"{rule() * (sum(_WIDTHS) + 2 * len(_WIDTHS) - 2)}\n")
        self.is_first = False
        _print_row(point.cells(), [f"{name} {value:.4f}" for name, value in point.auxiliary.items()])


def _print_row(cells: Sequence[str], more: Sequence[str] = ()) -> None:
    padded = [cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)]
    print_piece("  ".join([*padded, *more]).rstrip() + "\n")
