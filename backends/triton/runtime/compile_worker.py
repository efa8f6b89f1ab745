"""Compile kernels in another process, into Triton's cache on disk.

Triton translates a kernel to its IR in Python, 0.3 s per kernel that hold the GIL, while torch.compile traces in the
same process. The worker is a process without torch and CUDA that imports the kernels' modules and forks a child for
each kernel. The thread that wants the kernel waits, and then reads it from the cache. What the worker cannot compile,
the thread compiles: kernels of other packages, of files that changed after this process started, and whatever fails.

This module relies on `JITFunction.compile`, on `ASTSource` and on the cache keys of Triton. Tested with Triton 3.6 and
3.7.1. `ENABLED = False` compiles in the threads. The only input of the worker is a pipe from its parent.
"""

import functools
import importlib
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable

ENABLED = True
_PACKAGE = __name__.partition(".")[0]
_SERVER = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({started!r})"
_TIMEOUT = 300  # seconds; then the thread compiles the kernel
_log = logging.getLogger(__name__)
_thread = threading.local()  # worker: the worker that compiles for this thread
_lock = threading.Lock()  # the first read of `kernel.device_caches` sets `kernel.compile`


class CompileWorker:
    """The process, which starts with the first kernel and ends with this one, and the kernels that it compiles.

    Args: started: time before this process read the source files of the kernels.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._running: dict[int, Future[str]] = {}
        self._jobs = 0
        self._ended = False

    def compile(self, src: Any, target: Any, options: dict[str, Any]) -> None:
        """Compile a source into the cache. Raises if the worker cannot."""
        job, done = _dumps((dict(os.environ), src, target, options)), Future[str]()
        with self._lock:
            if self._ended:
                raise RuntimeError("the compile worker has ended")
            if self._connection is None:
                self._start()
            assert self._connection is not None
            self._jobs += 1
            number = self._jobs
            self._running[number] = done
            self._connection.send((number, job))
        if fault := done.result(_TIMEOUT):
            raise RuntimeError(f"the compile worker reports: {fault}")

    def close(self) -> None:
        """Close the pipe in a forked process: the worker ends when no process holds it open."""
        self._ended = True
        if self._connection is not None:
            self._connection.close()

    def _start(self) -> None:
        path = [x for x in sys.path if isinstance(x, str)]
        program = _SERVER.format(path=path, module=__name__, started=self._started)
        self._connection, other = Pipe()
        with other:
            # A session of its own: Ctrl-C stops this process only, and the worker ends with all its children.
            self.process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=other.fileno(), start_new_session=True
            )
        threading.Thread(target=self._receive, name="deltazoo-compile-results", daemon=True).start()

    def _receive(self) -> None:
        assert self._connection is not None and self.process is not None
        try:
            while True:
                number, fault = self._connection.recv()
                self._running.pop(number).set_result(fault)
        except (EOFError, OSError):
            with self._lock:
                self._ended = True
            for future in self._running.values():
                future.set_exception(EOFError("the compile worker ended"))
            self.process.wait()


@contextmanager
def compiled_by(worker: CompileWorker | None, kernel: Any, device: int) -> Iterator[None]:
    """Let the worker compile what this thread compiles of a kernel. device: the index of the current device."""
    with _lock:
        _ = kernel.device_caches[device]
        if not isinstance(kernel.compile, _Compile):
            kernel.compile = _Compile(kernel.compile)
    _thread.worker = worker
    try:
        yield
    finally:
        _thread.worker = None


class _AbsentError(Exception):
    """A kernel is not in the cache."""


class _Compile:
    """Replaces Triton's `compile` of a kernel. Threads without a worker compile as before."""

    def __init__(self, compile: Any) -> None:
        self.compile = compile

    def __call__(self, src: Any, target: Any, options: dict[str, Any]) -> Any:
        worker = getattr(_thread, "worker", None)
        if ENABLED and worker is not None and not knobs.compilation.always_compile:
            src.make_ir = _absent
            try:
                return self.compile(src, target=target, options=options)
            except _AbsentError:
                pass
            finally:
                del src.make_ir
            try:
                worker.compile(src, target, options)
            except Exception:
                _log.debug("%s compiles in a thread", src.name, exc_info=True)
        return self.compile(src, target=target, options=options)


def _absent(*arguments: Any) -> Any:
    raise _AbsentError


class _Pickler(pickle.Pickler):
    """Pickles a JIT function by name, with its cache key: that depends on which functions were read before it."""

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, JITCallable):
            if x.__module__.partition(".")[0] not in (_PACKAGE, "triton"):
                raise pickle.PicklingError(f"{x.__module__}.{x.__qualname__} belongs to another package")
            return _function, (x.__module__, x.__qualname__, x.cache_key)
        return NotImplemented


def _dumps(x: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(x)
    return file.getvalue()


def _function(module: str, name: str, key: str) -> Any:
    x = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    x.hash = key  # type: ignore[attr-defined]
    return x


def serve(started: float) -> None:
    """Compile what the parent sends until it ends.

    Args: started: time before the parent read the source files of the kernels.
    """
    connection, fork = Connection(os.dup(0)), get_context("fork")
    running: dict[Any, tuple[int, Any]] = {}  # number of the job and process, by what `wait` returns when it ends
    triton_key()  # hashes Triton's library in half a second, here once for all children
    while True:
        for ready in wait([connection, *running]):
            if ready is not connection:
                number, process = running.pop(ready)
                process.join()
                connection.send((number, f"exit code {process.exitcode}" if process.exitcode else ""))
                continue
            try:
                number, job = connection.recv()
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)
            try:
                environment, src, target, options = pickle.loads(job)
                _check_sources(started)
                make_backend(target).hash()  # calls ptxas for its version, once
            except Exception as error:
                connection.send((number, repr(error)))
                continue
            process = fork.Process(target=_compile, args=(connection, environment, src, target, options))
            process.start()
            running[process.sentinel] = number, process


def _check_sources(started: float) -> None:
    """Raise if a source file changed after the parent read it: the parent's cache keys are those of the older file."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.partition(".")[0] == _PACKAGE and path is not None and os.stat(path).st_ctime > started:
            raise RuntimeError(f"{path} changed")


def _compile(connection: Connection, environment: dict[str, str], src: Any, target: Any, options: Any) -> None:
    from triton.compiler import compile

    connection.close()
    os.environ.clear()
    os.environ.update(environment)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))  # kernels may ask for it
    try:
        compile(src, target=target, options=options)
    except Exception:  # the thread in the parent compiles the kernel again, and logs the error
        sys.exit(1)
