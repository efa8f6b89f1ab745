"""Compile kernels in threads while torch.compile still compiles the graph that will launch them.

While torch.compile traces a graph, the fake implementation of an operator only computes shapes. With `compiled_ahead`
the body of the operator also runs, in a thread and on meta tensors, and `launcher` submits each kernel to a pool of
threads instead of launching it. The threads pass it to another process, which compiles it (compile_worker.py). A later
launch waits if its kernel is still being compiled. If the body fails, nothing is compiled ahead. Measured on a gated
DeltaNet layer (H200, 16 cores): first training step 24 -> 17 s; with a later version 18.3 -> 11.9 s. Tested with torch
2.11 / Triton 3.6 and torch 2.13 / Triton 3.7.1. `PRECOMPILE = False` disables it.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import TracingContext

if TYPE_CHECKING:  # it imports Triton
    from deltazoo.backends.triton.runtime.compile_worker import CompileWorker

PRECOMPILE = True
_THREADS = min(16, os.cpu_count() or 1)
_log = logging.getLogger(__name__)


class _Tracing(threading.local):
    """What `launcher` does in this thread.

    Args:
        device: the device for which a body is traced, without launches. None: kernels are launched.
        recorder: records the launches of a traced body (replay.py). None: its kernels are compiled.
    """

    device: torch.device | None = None
    recorder: Any = None


tracing = _Tracing()


class _Pool:
    """The threads and the worker process, the keys of the traced calls, and the submitted kernels."""

    def __init__(self) -> None:
        self.tracer = ThreadPoolExecutor(1, "deltazoo-trace")
        self.compilers = ThreadPoolExecutor(_THREADS, "deltazoo-compile")
        self.traced: set[Hashable] = set()
        self.traces: set[Future[None]] = set()
        self.kernels: dict[Hashable, Future[None]] = {}
        self.worker: CompileWorker | None = None


_pool = _Pool()


def _renew() -> None:
    """Replace the pool in a forked process, which has none of the threads of its parent."""
    global _pool
    if _pool.worker is not None:
        _pool.worker.close()
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def compiled_ahead(body: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the fake of an operator so that tracing a graph for a CUDA device compiles the kernels of its body."""

    @functools.wraps(fake)
    def traced(*arguments: Any) -> Any:
        if PRECOMPILE and TracingContext.try_get() is not None:
            begin(body, arguments)
        return fake(*arguments)

    return traced


def begin(body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Start to trace a body in a thread, once per device, dtypes, sizes and strides.

    A symbolic size is replaced by its hint.
    """
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    try:
        layouts = [_layout(x) for x in arguments]
    except Exception:  # an unbacked size has no hint
        _log.debug("%s is not traced", body, exc_info=True)
        return
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (body, device, repr(layouts))
    if key in _pool.traced:
        return
    _pool.traced.add(key)
    trace = _pool.tracer.submit(_trace, body, layouts, device)
    _pool.traces.add(trace)
    trace.add_done_callback(_pool.traces.discard)


def compile_kernel(key: Hashable, kernel: Any, warm_up: Callable[[], Any]) -> None:
    """Compile a kernel in another thread for the device that this thread traces for, once."""
    from triton.runtime.cache import triton_key

    from deltazoo.backends.triton.runtime.compile_worker import CompileWorker

    if key not in _pool.kernels:
        assert tracing.device is not None
        triton_key()  # hashes Triton's library in half a second, once in a process, unless several threads ask at once
        # Computed here, in the tracing thread, because it depends on the order in which functions are first read.
        _ = kernel.cache_key
        _pool.worker = _pool.worker or CompileWorker()
        _pool.kernels[key] = _pool.compilers.submit(_compile, tracing.device, kernel, warm_up, _pool.worker)


def await_kernel(key: Hashable) -> None:
    """Wait until no thread compiles this kernel or may still submit it."""
    wait(tuple(_pool.traces))
    if key in _pool.kernels:
        wait([_pool.kernels[key]])


def device_of(x: Tensor) -> torch.device:
    """Return the device of a tensor; while a body is traced on meta tensors, the device for which it is traced."""
    return x.device if tracing.device is None else tracing.device


def _compile(device: torch.device, kernel: Any, warm_up: Callable[[], Any], worker: "CompileWorker | None") -> None:
    """Compile a kernel and its launcher, C code that Triton 3.6 otherwise compiles at the first launch in 0.3 s."""
    from triton.runtime import driver

    from deltazoo.backends.triton.runtime.compile_worker import compiled_by

    try:
        with torch.cuda.device(device), compiled_by(worker, kernel, device.index):
            compiled = warm_up()
            driver.active.launcher_cls(compiled.src, compiled.metadata)  # Triton's cache on disk keeps it
    except Exception:  # the launch compiles the kernel again and raises the error
        _log.debug("a kernel does not compile", exc_info=True)


def _trace(body: Callable[..., Any], layouts: list[Any], device: torch.device) -> None:
    tracing.device = device
    try:
        body(*(_meta_tensor(x) for x in layouts))
    except Exception:
        _log.debug("%s cannot be traced", body, exc_info=True)
    finally:
        tracing.device = None


class _Layout(tuple[Any, ...]):
    """dtype, sizes, strides and offset of a tensor, from which the alignment of its pointer follows.

    The offset is modulo 16 elements. A meta tensor created during tracing would become a node of the graph.
    """


def _layout(x: Any) -> Any:
    if isinstance(x, Tensor):
        offset = _number(x.storage_offset()) % 16
        return _Layout((x.dtype, tuple(map(_number, x.shape)), tuple(map(_number, x.stride())), offset))
    if isinstance(x, list):
        return [_layout(y) for y in x]
    return _number(x) if isinstance(x, torch.SymInt) else x


def _number(x: int | torch.SymInt) -> int:
    return x if isinstance(x, int) else _hint(x)


def _hint(x: torch.SymInt) -> int:
    """Return the value of a symbolic size in the call that is traced."""
    from torch.fx.experimental import symbolic_shapes  # slow to import, and imported already if there is a SymInt

    hint = getattr(symbolic_shapes, "optimization_hint", None)
    hint = hint or getattr(symbolic_shapes, "size_hint")  # noqa: B009, before torch 2.12
    return int(hint(x))


def _meta_tensor(x: Any) -> Any:
    if isinstance(x, _Layout):
        dtype, shape, stride, offset = x
        extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        return torch.empty(max(extent, 0), dtype=dtype, device="meta").as_strided(shape, stride, offset)
    return [_meta_tensor(y) for y in x] if isinstance(x, list) else x
