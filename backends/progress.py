"""Progress reports of long-running functions."""

from typing import Protocol


class Progress(Protocol):
    """Callback that long-running functions call to report their progress. The CLI draws progress bars with it."""

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        """Report progress.

        Args:
            task: label of the progress bar.
            done, total: completed and total units of work.
            note: current figures, shown next to the bar.
        """


def silent(task: str, done: int, total: int, note: str = "") -> None:
    """Ignore the report."""
