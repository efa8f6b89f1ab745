"""Start the processes of a run on this host by torchrun's launcher, and describe how they ended in one sentence."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

NO_PROGRESS = 3  # exit code of `Watchdog`
LOST_CONNECTION = 4  # exit code of a process that has not printed why it ends
LAUNCHED = "deltazoo-"  # the run ids of `launch` begin with it


class RanksFailedError(Exception):
    """Processes ended with an error.

    Attributes: code: exit code of the first, 128 + signal if one ended it; sentence: None: the process has printed one.
    """

    def __init__(self, code: int, sentence: str | None) -> None:
        self.code, self.sentence = code, sentence
        super().__init__(sentence or f"exit code {code}")


def launch(module: str, arguments: Sequence[str], processes: int) -> None:
    """Run `python -m module arguments` in so many processes, which find each other as under torchrun.

    When one fails, the others are stopped by SIGTERM. A signal to this process is passed on.

    Raises: RanksFailedError.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=f"{LAUNCHED}{uuid4().hex[:8]}",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
    )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCHELASTIC_ERROR_FILE", os.devnull)
    _silence()
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        raise _described(error.failures) from None
    except SignalException as error:
        raise RanksFailedError(128 + int(error.sigval), None) from None  # rank 0 has printed how to continue


def launched_here() -> bool:
    """Whether `launch` started this process: then it describes lost connections, which follow from another error."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(LAUNCHED)


def _silence() -> None:
    """Leave out the tables and warnings of the launcher."""
    import logging

    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _described(failures: dict[int, Any]) -> RanksFailedError:
    """Describe the root cause: the first process that a signal ended, else the first that failed."""
    if any(failure.exitcode == NO_PROGRESS for failure in failures.values()):
        return RanksFailedError(NO_PROGRESS, None)
    ordered = sorted(failures.items(), key=lambda item: item[1].timestamp)
    killed = [(rank, failure) for rank, failure in ordered if failure.exitcode < 0]
    for rank, failure in killed:
        name = signal.Signals(-failure.exitcode).name
        if name != "SIGTERM":  # the launcher's own
            return RanksFailedError(128 - failure.exitcode, f"rank {rank} (process {failure.pid}) was ended by {name}")
    printed = [failure for _, failure in ordered if failure.exitcode not in (LOST_CONNECTION, -signal.SIGTERM)]
    if printed:
        return RanksFailedError(printed[0].exitcode, None)
    rank, failure = ordered[0]
    return RanksFailedError(LOST_CONNECTION, f"rank {rank} (process {failure.pid}) lost the connection to the others")
