"""What runs: which backend each update was given to, and which kernels were launched for it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class RunRecord(NamedTuple):
    """One call of a backend, or one launch of a kernel.

    what: "update", "step", "fused step" or "short conv"; of a launch the kernel's name. programs, warps: of a launch; 0
    of a call.
    """

    backend: str
    what: str
    programs: int = 0
    warps: int = 0


class Seen:
    """What ran, in order; printed, what was alike is one line with how often it ran."""

    def __init__(self) -> None:
        self.runs: list[RunRecord] = []

    @property
    def kernels(self) -> dict[str, int]:
        """How often each kernel was launched, by name, in the order of the first launches."""
        return dict(Counter(ran.what for ran in self.runs if ran.programs))

    def __str__(self) -> str:
        lines = []
        for (backend, what, programs, warps), times in Counter(self.runs).items():
            of = f", {programs} programs of {warps} warps" if programs else ""
            lines.append(f"{times} x {backend}: {what}{of}")
        return "\n".join(lines) or "nothing"


_open: list[Seen] = []


@contextmanager
def watch() -> Iterator[Seen]:
    """See what runs inside the block, in any thread: backends that are called, kernels that are launched.

    A backend's call is seen from eager code: inside torch.compile it is chosen once, when the graph is made, of which
    nothing is left at run time. The triton backend's kernels are seen whenever Python launches them, in a graph of
    torch.compile, too, and in the backward; a replay of a CUDA graph launches without Python and shows nothing, nor do
    the kernels that Inductor makes.
    """
    seen = Seen()
    _open.append(seen)
    try:
        yield seen
    finally:
        _open.remove(seen)


def is_watched() -> bool:
    """Whether someone watches."""
    return bool(_open)


def record_run(ran: RunRecord) -> None:
    """Let those who watch see it."""
    for seen in tuple(_open):
        seen.runs.append(ran)
