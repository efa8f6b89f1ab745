"""How long work tells how far it is: a function that it calls, and by default nothing."""

from typing import Protocol


class Progress(Protocol):
    """Hear how far a task is. `deltazoo` the command draws bars with it."""

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        """Args: task: what is being done, the bar's name; done of total; note: figures of the moment."""


def silent(task: str, done: int, total: int, note: str = "") -> None:
    """Say nothing."""
