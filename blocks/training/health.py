"""What goes wrong in steps: skipped ones, and sudden rises of the loss."""

import logging
from collections import deque
from statistics import fmean

from deltazoo.blocks.training.step import Figures

_log = logging.getLogger("deltazoo")

_STEPS, _SIGMAS = 50, 6.0  # a loss above mean + 6 standard deviations of the last 50 is logged


class Health:
    """Count skipped steps, and log what a reader of the curves should know.

    Args: limit: skipped steps in a row that end the run; several: whether the run has several processes.
    """

    def __init__(self, limit: int, several: bool) -> None:
        self.limit, self.several = limit, several
        self.skipped = self._in_a_row = 0
        self._losses: deque[float] = deque(maxlen=_STEPS)

    def note(self, figures: Figures, step: int) -> str | None:
        """Take the figures of a step. Returns: why the run must end, or None."""
        if not figures.skipped:
            self._in_a_row = 0
            self._note_spike(figures.bits, step)
            return None
        self.skipped += 1
        self._in_a_row += 1
        ranks = ", ".join(map(str, figures.not_finite))
        where = f", the loss of rank {ranks} is not finite" if ranks and self.several else ""
        problem = f"the loss is {figures.bits:g} bits, the norm of the gradient {figures.gradient_norm:g}{where}"
        if self._in_a_row >= self.limit:
            return f"{self._in_a_row} steps in a row were skipped: {problem}" if self._in_a_row > 1 else problem
        _log.warning("step %d is skipped: %s", step, problem)
        return None

    def _note_spike(self, bits: float, step: int) -> None:
        before = self._losses
        if len(before) >= _STEPS // 2:
            mean = fmean(before)
            deviation = fmean((x - mean) ** 2 for x in before) ** 0.5
            if bits > mean + _SIGMAS * max(deviation, 0.01 * mean):
                _log.warning("step %d: the loss rose to %.3f bits, the mean before was %.3f", step, bits, mean)
        before.append(bits)
