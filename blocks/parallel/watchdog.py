"""End a run in which a process makes no progress, and name the process."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from deltazoo.blocks.parallel.launch import LOST_CONNECTION, NO_PROGRESS, launched_here
from deltazoo.blocks.parallel.ranks import Ranks

_LOST = 5.0  # a stopped process waits for others this many times the longest recent time between beats, at least 1 s
_ANSWER = 3.0  # seconds in which every process that still runs says where it is
_DEPTH = 4  # innermost frames that are looked at: outer ones of DDP and FSDP2 are on the stack of a forward, too
_WAITS = tuple(os.sep.join(("", "torch", *path)) for path in (("distributed", ""), ("autograd", "graph.py")))


class Watchdog:
    """A thread that ends the process if `beat` is not called for `timeout` seconds.

    A process whose launcher has been killed sends itself SIGTERM: all processes then save, and end. After a SIGTERM,
    which a launcher sends when a process has ended, the main thread may wait in NCCL for the lost process, and run no
    handler: its process ends after `_LOST` times the longest recent time between beats, at least 1 s.

    A process whose main thread is in a collective waits for others. The sentence names those that do not wait, with the
    line of Python at which they are, and those whose watchdog does not answer.

    Args: waiting: names of functions that wait for the device, and so perhaps for a collective.
    """

    def __init__(self, ranks: Ranks, timeout: float, report: Callable[[str], None], waiting: tuple[str, ...]) -> None:
        self.ranks, self.timeout, self.report, self.waiting = ranks, timeout, report, waiting
        self.state = "before the first step"
        self._last, self._stopped = 0.0, threading.Event()
        self._main, self._parent = threading.get_ident(), os.getppid()
        self._store: Any = None
        self._intervals: deque[float] = deque(maxlen=8)  # between the last beats
        self._signals: tuple[socket.socket, socket.socket] | None = None  # Python's handler in C writes to the second
        self._wakeup = -1
        self._terminated: float | None = None
        self._agreed = False

    def __enter__(self) -> "Watchdog":
        if self.ranks.size > 1:
            self._store = dist.distributed_c10d._get_default_store()
            self._last = time.monotonic()
            with contextlib.suppress(ValueError):  # not the main thread
                signals = socket.socketpair()
                for end in signals:
                    end.setblocking(False)
                self._wakeup = signal.set_wakeup_fd(signals[1].fileno(), warn_on_full_buffer=False)
                self._signals = signals
            threading.Thread(target=self._watch, daemon=True, name="deltazoo watchdog").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        if self._signals is not None:
            signal.set_wakeup_fd(self._wakeup)

    def beat(self, state: str) -> None:
        """Say that the process makes progress. Args: state: for the sentence, such as "in step 12"."""
        if self.ranks.size > 1:
            now = time.monotonic()
            self._intervals.append(now - self._last)
            self.state, self._last = state, now

    def agree(self) -> None:
        """Say that all processes run and have agreed to stop: they may wait for each other while they write."""
        self._agreed = True

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self.timeout / 4)):
            if launched_here() and os.getppid() != self._parent:
                self._parent = os.getppid()
                os.kill(os.getpid(), signal.SIGTERM)
            if self._terminated is None and self._received(signal.SIGTERM):
                self._terminated = time.monotonic()
            if self._terminated is not None and not self._agreed:
                limit = _LOST * max([1.0, *self._intervals])
                if time.monotonic() - max(self._last, self._terminated) > limit and self._place()[1]:
                    os._exit(LOST_CONNECTION)
            if time.monotonic() - self._last > self.timeout:
                self._end()

    def _received(self, signum: int) -> bool:
        """Whether this process has received a signal since the last call, even if no handler has run."""
        with contextlib.suppress(OSError):  # nothing to read
            return self._signals is not None and signum in self._signals[0].recv(100)
        return False

    def _end(self) -> None:
        place, waits = self._place()
        with contextlib.suppress(Exception):  # the store's process may be the one that hangs
            self._store.set(f"deltazoo/hang/{self.ranks.rank}", f"{int(waits)}{place}")
        time.sleep(_ANSWER)
        answers = [self._answer(rank) for rank in range(self.ranks.size)]
        named = [
            f"rank {rank} {'does not answer' if answer is None else f'is at {answer[1:]}'}"
            for rank, answer in enumerate(answers)
            if answer is None or answer[0] == "0"
        ]
        found = "; ".join(named) or f"all ranks wait: {place}"
        if not waits:
            time.sleep(1)  # the first report is that of a process which waits: it has the number of the step
        first = True
        with contextlib.suppress(Exception):
            first = self._store.add("deltazoo/hang/reports", 1) == 1
        if first:
            self.report(f"no progress for {self.timeout:g} s {self.state}: {found}")
        else:
            time.sleep(1)  # let the first report before the launcher stops all
        os._exit(NO_PROGRESS)

    def _answer(self, rank: int) -> str | None:
        key = f"deltazoo/hang/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=1))
            return bytes(self._store.get(key)).decode()
        except Exception:  # a timeout has a type of its own in each version
            return None

    def _place(self) -> tuple[str, bool]:
        """Return the line of the main thread, and whether it waits for other processes."""
        frame: FrameType | None = sys._current_frames().get(self._main)
        place, waits, inner = "an unknown line", False, frame
        for _ in range(_DEPTH):
            if inner is None:
                break
            code = inner.f_code
            waits |= any(part in code.co_filename for part in _WAITS) or code.co_name in self.waiting
            inner = inner.f_back
        if frame is not None:
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"
        return place, waits
