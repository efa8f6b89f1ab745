"""SIGINT (Ctrl-C) and SIGTERM during training: finish the step, save, and raise one exception for both."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(KeyboardInterrupt):
    """A signal stopped the training, and the state after the last complete step is saved.

    Attributes: signum: the signal; folder: the checkpoint folder; step: number of steps taken.
    """

    def __init__(self, signum: int, folder: Path, step: int) -> None:
        self.signum, self.folder, self.step = signum, folder, step
        super().__init__(f"{signal.Signals(signum).name} after step {step}; checkpoint in {folder}")


class Interrupts:
    """Catch SIGINT and SIGTERM in a `with` block.

    `deferred` is False at first: a signal raises KeyboardInterrupt at once, which stops a compilation. While it is True
    the first signal is only recorded in `signum`, so that a step of the optimizer is never cut in two; a second one of
    the same kind raises KeyboardInterrupt. A launcher follows the SIGINT of a terminal by a SIGTERM of its own.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.deferred = False

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Install the handlers, and restore the old ones at the end. Python allows this in the main thread only."""
        old = {}
        try:
            for signum in SIGNALS:
                old[signum] = signal.signal(signum, self._receive)
        except ValueError:  # another thread: the signals keep their handlers
            pass
        try:
            yield
        finally:
            for signum, handler in old.items():
                signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        again = self.signum == signum
        self.signum = self.signum or signum
        if again or not self.deferred:
            raise KeyboardInterrupt
