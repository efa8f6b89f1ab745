"""Record what computes each operator, a backend or plain torch, and which kernels are launched."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs


class RunRecord(NamedTuple):
    """One call of a backend, or one launch of a kernel.

    Args:
        backend: name of the backend; "torch" for an operator in plain torch.
        name: "update", "step", "verify", "commit", "fused step", "fused verify", or the operator beside the update,
            such as "short conv", for a call; the kernel's name for a launch.
        programs, warps: the launch's grid size and warps per program; 0 for a call.
        reason: why plain torch computes the operator; "" for a kernel.
    """

    backend: str
    name: str
    programs: int = 0
    warps: int = 0
    reason: str = ""


class RunLog:
    """Records in the order of execution. `str` prints equal records as one line with their count.

    traced: calls that torch.compile traced into a graph inside the block. The runs of the graph are not recorded.
    """

    def __init__(self) -> None:
        self.runs: list[RunRecord] = []
        self.traced: list[RunRecord] = []

    @property
    def kernels(self) -> dict[str, int]:
        """Kernel name -> number of launches, in the order of the first launch."""
        return dict(Counter(run.name for run in self.runs if run.programs))

    def __str__(self) -> str:
        lines = []
        for (backend, name, programs, warps, reason), count in Counter(self.runs).items():
            grid = f", {programs} programs of {warps} warps" if programs else ""
            why = f": {reason}" if reason else ""
            lines.append(f"{count} x {backend}: {name}{grid}{why}")
        if self.traced:
            lines.append(f"traced into a compiled graph: {_names(self.traced)}. {_HIDDEN}")
        if not lines and _traced_before:
            lines.append(f"nothing in eager code. {_HIDDEN} Graphs of this process contain {_names(_traced_before)}.")
        return "\n".join(lines) or "nothing"


_HIDDEN = "The runs of a compiled graph are not recorded: deltazoo.explain prints the backend and its kernels."


def _names(records: Iterable[RunRecord]) -> str:
    return ", ".join(dict.fromkeys(f"{record.backend}: {record.name}" for record in records))


_active_logs: list[RunLog] = []
_traced_before: dict[RunRecord, None] = {}  # an ordered set


@contextmanager
def watch() -> Iterator[RunLog]:
    """Record the backend calls and kernel launches inside the block, in all threads.

    Backend calls are recorded in eager code only: torch.compile chooses the backend once, during tracing. `str` of the
    log names the calls that were traced, and says where to look. Launches of the triton backend are recorded whenever
    Python executes them, so also in compiled graphs and in the backward. A replayed CUDA graph launches its kernels
    without Python, so nothing is recorded; nor are Inductor's own kernels.
    """
    log = RunLog()
    _active_logs.append(log)
    try:
        yield log
    finally:
        _active_logs.remove(log)


def is_watched() -> bool:
    """Whether a `watch` block is active."""
    return bool(_active_logs)


def record_run(run: RunRecord) -> None:
    """Append a record to the log of every active `watch` block."""
    for log in tuple(_active_logs):
        log.runs.append(run)


def record_call(backend: str, name: str, reason: str = "") -> None:
    """Record which backend computes a call, in eager code or while torch.compile traces it."""
    if torch.compiler.is_compiling():
        record_traced(backend, name)
    elif _active_logs:
        record_run(RunRecord(backend, name, reason=reason))


def runs_by_kernel(operator: str, refusals: Sequence[str]) -> bool:
    """Record whether the kernels of the triton backend compute a call of an operator, and return it.

    Args: refusals: the reasons against them, one sentence each; with any of them plain torch computes the call.
    """
    if torch.compiler.is_compiling() or _active_logs:
        record_call("torch" if refusals else "triton", operator, " ".join(refusals))
    return not refusals


@constant_in_graphs
def record_traced(backend: str, name: str) -> None:
    """Remember a call that torch.compile traces. Dynamo runs this function while it traces, and not in the graph."""
    record = RunRecord(backend, name)
    _traced_before[record] = None
    for log in tuple(_active_logs):
        log.traced.append(record)
