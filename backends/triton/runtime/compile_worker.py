"""Compile kernels in another process, into Triton's cache on disk.

Triton translates a kernel to its IR in Python, which takes 0.3 s per kernel and holds the GIL, while torch.compile
traces in the same process. The worker process imports the kernels' modules, but neither torch nor CUDA, and forks a
child process for each kernel. A thread that needs a kernel waits for the worker, and then loads the kernel from the
cache. The thread itself compiles kernels of other packages, kernels whose source or constants differ from those in the
worker, and kernels that fail to compile in the worker.

This module relies on `JITFunction.compile`, on `ASTSource` and on the cache keys of Triton. Tested with Triton 3.6 and
3.7.1. `ENABLED = False` compiles in the threads. After its start, the worker reads only the pipe from its parent.
"""

import functools
import hashlib
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
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.spawn import get_executable
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.compiler import make_backend
from triton.language import constexpr
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable

ENABLED = True
_PACKAGE = __name__.partition(".")[0]
_SERVER = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve()"
_TIMEOUT = 300  # seconds that a kernel may take; then the worker is killed, and the threads compile
_log = logging.getLogger(__name__)
_thread = threading.local()  # worker: the worker that compiles for this thread
_lock = threading.Lock()  # the first read of `kernel.device_caches` for a device sets `kernel.compile`


class CompileWorker:
    """The worker process, which starts with the first kernel and ends with its parent, and its pending kernels."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._running: dict[int, Future[str]] = {}
        self._jobs = 0
        self._ended = False

    def compile(self, src: Any, target: Any, options: dict[str, Any]) -> None:
        """Compile a source into the cache. Raises if the worker cannot."""
        job, done = _dumps((dict(os.environ), os.getcwd(), src, target, options)), Future[str]()
        try:
            self._send(job, done)
            fault = done.result(_TIMEOUT)
        except Exception:
            self._kill()
            raise
        if fault:
            raise RuntimeError(f"the compile worker reports: {fault}")

    def _send(self, job: bytes, done: Future[str]) -> None:
        if not self._lock.acquire(timeout=_TIMEOUT):
            raise TimeoutError("the compile worker reads no jobs")
        try:
            if self._ended:
                raise RuntimeError("the compile worker has ended")
            if self._connection is None:
                self._start()
            assert self._connection is not None
            self._jobs += 1
            self._running[self._jobs] = done
            self._connection.send((self._jobs, job))
        finally:
            self._lock.release()

    def _kill(self) -> None:
        """End the worker and its children, so that no thread waits for it; a blocked `send` raises."""
        self._ended = True
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipe in a forked process: the worker ends when no process holds it open."""
        self._ended = True
        if self._connection is not None:
            self._connection.close()

    def _start(self) -> None:
        python = get_executable()
        if getattr(sys, "frozen", False) or not python:
            raise RuntimeError("there is no Python interpreter to run the compile worker")
        program = _SERVER.format(path=[x for x in sys.path if isinstance(x, str)], module=__name__)
        self._connection, other = Pipe()
        with other:
            # In a new session, Ctrl-C does not interrupt the worker, and `_kill` ends all its children.
            self.process = subprocess.Popen([python, "-c", program], stdin=other.fileno(), start_new_session=True)
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
    """Compile a kernel by the worker when this thread asks Triton for it. device: index of the current device."""
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

    def __call__(self, src: Any, target: Any, options: dict[str, Any], **more: Any) -> Any:
        worker = getattr(_thread, "worker", None)
        # hooks and instrumentation of this process are not in the worker
        hooked = more or options.get("instrumentation_mode") or knobs.runtime.add_stages_inspection_hook
        if ENABLED and worker is not None and not hooked and not knobs.compilation.always_compile:
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
        return self.compile(src, target=target, options=options, **more)


def _absent(*arguments: Any) -> Any:
    raise _AbsentError


class _Pickler(pickle.Pickler):
    """Pickles a JIT function by name, with its cache key: that depends on which functions were read before it."""

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, JITCallable):
            if x.__module__.partition(".")[0] not in (_PACKAGE, "triton"):
                raise pickle.PicklingError(f"{x.__module__}.{x.__qualname__} belongs to another package")
            return _function, (x.__module__, x.__qualname__, x.cache_key, _digest(x))
        return NotImplemented


def _dumps(x: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(x)
    return file.getvalue()


def _function(module: str, name: str, key: str, digest: str) -> Any:
    x = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if _digest(x) != digest:
        raise RuntimeError(f"{module}.{name} differs from that of the parent")
    x.hash = key  # type: ignore[attr-defined]
    return x


def _digest(x: Any) -> str:
    """Hash what a JIT function compiles: its source, those of the functions that it calls, and their constants."""
    return hashlib.sha256(repr(sorted(_content(x, {}).items())).encode()).hexdigest()


def _content(x: Any, found: dict[str, str]) -> dict[str, str]:
    name = f"{x.__module__}.{x.__qualname__}"
    if name not in found:
        found[name] = f"{x.starting_line_number} {x.src}"
        scope = x.get_capture_scope()
        for word in (*x.fn.__code__.co_names, *x.fn.__code__.co_freevars):
            value = scope.get(word)
            if isinstance(value, JITCallable):
                found[f"{name}:{word}"] = f"{value.__module__}.{value.__qualname__}"
                _content(value, found)
            elif isinstance(value, constexpr):
                found[f"{name}:{word}"] = repr(value)
    return found


def serve() -> None:
    """Compile what the parent sends until it ends."""
    connection = Connection(os.dup(0))
    triton_key()  # hashes Triton's library in half a second, here once for all children
    try:
        _serve(connection)
    except (EOFError, OSError):  # the parent has ended
        os.killpg(0, signal.SIGKILL)


def _serve(connection: Connection) -> None:
    fork = get_context("fork")
    running: dict[Any, tuple[int, Any]] = {}  # number of the job and process, by what `wait` returns when it ends
    while True:
        for ready in wait([connection, *running]):
            if ready is not connection:
                number, process = running.pop(ready)
                process.join()
                connection.send((number, f"exit code {process.exitcode}" if process.exitcode else ""))
                continue
            number, job = connection.recv()
            try:
                work = pickle.loads(job)
                make_backend(work[-2]).hash()  # calls ptxas for its version, once
                process = fork.Process(target=_compile, args=(connection, *work))
                process.start()
                running[process.sentinel] = number, process
            except Exception as error:
                connection.send((number, repr(error)))


def _compile(
    connection: Connection, environment: dict[str, str], folder: str, src: Any, target: Any, options: Any
) -> None:
    from triton.compiler import compile

    connection.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))  # kernels may ask for it
    try:
        compile(src, target=target, options=options)
    except Exception:  # the thread in the parent compiles the kernel again, and logs the error
        sys.exit(1)
