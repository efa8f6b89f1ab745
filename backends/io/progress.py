"""Progress reports of long-running functions, and a notice for calls that are unexpectedly long."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_INTERVAL = 10.0  # seconds between two lines
_SLOW = 2.0  # seconds until a notice


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
    """Print progress on stderr at most every ten seconds, so that short tasks print nothing.

    A new note without progress, such as "compiling", is printed at once: the next report may follow minutes later.
    """

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.position: tuple[str, int] | None = None
        self.note = ""

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        now, position = time.monotonic(), (task, done)
        has_stayed = self.position in (None, position)
        if now - self.last >= _INTERVAL or (has_stayed and note not in ("", self.note)):
            self.last = now
            _write_line(f"{task}: {done}/{total} {note}".rstrip())
        self.position, self.note = position, note


@contextmanager
def notice_if_slow(text: str) -> Iterator[None]:
    """Print a line on stderr, if that is a terminal, as soon as the block has run for two seconds."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(_SLOW, _write_line, (text,))
    timer.daemon = True  # does not delay the exit of the interpreter
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
