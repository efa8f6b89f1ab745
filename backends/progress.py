"""Progress reports of long-running functions."""

import sys
import time
from typing import Protocol

_INTERVAL = 10.0  # seconds between two lines


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


class ProgressLines:
    """Print progress on stderr at most every ten seconds, so that short tasks print nothing."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if now - self.last >= _INTERVAL:
            self.last = now
            sys.stderr.write(f"{task}: {done}/{total} {note}\n")
            sys.stderr.flush()
