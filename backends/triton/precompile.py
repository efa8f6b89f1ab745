"""Compile kernels while torch.compile is still at work on the graph that launches them, in threads of their own.

A graph is traced on tensors that have sizes alone, and an operator says by its fake what it returns. Here its body is
walked at the same time, on tensors without storage, in a thread; each kernel that it would launch compiles in another.
Whoever launches one meanwhile waits for it. What is walked in vain costs time of the CPU, and changes nothing.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

_log = logging.getLogger(__name__)
_THREADS = 8


class Walk(threading.local):
    """What this thread walks a body for: `device` is that of the kernels to compile, None where it launches them."""

    device: torch.device | None = None


walk = Walk()


class _Work:
    """The threads, what has been walked, and what is under way."""

    def __init__(self) -> None:
        self.walker = ThreadPoolExecutor(1, "deltazoo-walk")
        self.compilers = ThreadPoolExecutor(_THREADS, "deltazoo-compile")
        self.walked: set[Hashable] = set()
        self.walks: set[Future[None]] = set()
        self.kernels: dict[Hashable, Future[None]] = {}


_work = _Work()


def _forget() -> None:
    """A process that was forked has none of these threads."""
    global _work
    _work = _Work()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def compiled_ahead(body: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake of an operator, which has the body's kernels compiled where a graph is traced for a CUDA device."""

    @functools.wraps(fake)
    def traced(*arguments: Any) -> Any:
        if TracingContext.try_get() is not None:
            begin(body, arguments)
        return fake(*arguments)

    return traced


def begin(body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Walk a body, once for such arguments; of their tensors, devices, dtypes, sizes and strides count, or hints."""
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    try:
        sizes = [_sizes(x) for x in arguments]
    except Exception:  # of a size that only the run will tell there may be no hint
        _log.debug("%s is not walked", body, exc_info=True)
        return
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (body, device, repr(sizes))
    if key in _work.walked:
        return
    _work.walked.add(key)
    under_way = _work.walker.submit(_walk, body, sizes, device)
    _work.walks.add(under_way)
    under_way.add_done_callback(_work.walks.discard)


def compile_kernel(known: Hashable, kernel: Any, compile: Callable[[], Any]) -> None:
    """Compile one in another thread, for the device that this thread walks for, unless that is under way or done."""
    if known not in _work.kernels:
        assert walk.device is not None
        # in one thread: what Triton's cache knows it by depends on which functions have been read before
        _ = kernel.cache_key
        _work.kernels[known] = _work.compilers.submit(_compile, walk.device, compile)


def await_kernel(known: Hashable) -> None:
    """Return once nobody compiles this kernel any more."""
    wait(tuple(_work.walks))  # which may come to it
    if known in _work.kernels:
        wait([_work.kernels[known]])


def device_of(x: Tensor) -> torch.device:
    """Where a tensor is; of one without storage, where it would be."""
    return x.device if walk.device is None else walk.device


def _compile(device: torch.device, compile: Callable[[], Any]) -> None:
    try:
        with torch.cuda.device(device):
            compile()
    except Exception:  # its launch will say the same to whom it concerns
        _log.debug("a kernel does not compile", exc_info=True)


def _walk(body: Callable[..., Any], sizes: list[Any], device: torch.device) -> None:
    walk.device = device
    try:
        body(*(_without_storage(x) for x in sizes))
    except Exception:
        _log.debug("%s cannot be walked", body, exc_info=True)
    finally:
        walk.device = None


class _Sizes(tuple[Any, ...]):
    """dtype, sizes and strides of a tensor; what is made of them while a graph is traced would be a part of that."""


def _sizes(x: Any) -> Any:
    """Numbers and flags as they are; of a tensor what `_without_storage` makes one of."""
    if isinstance(x, Tensor):
        return _Sizes((x.dtype, tuple(map(_number, x.shape)), tuple(map(_number, x.stride()))))
    if isinstance(x, list):
        return [_sizes(y) for y in x]
    return _number(x) if isinstance(x, torch.SymInt) else x


def _number(x: int | torch.SymInt) -> int:
    return x if isinstance(x, int) else _hint(x)


def _hint(x: torch.SymInt) -> int:
    """What it is in this call: a graph for any length is traced with one."""
    from torch.fx.experimental import symbolic_shapes as sizes  # slow to import, and there when there is a SymInt

    hint = getattr(sizes, "optimization_hint", None) or getattr(sizes, "size_hint")  # noqa: B009, before torch 2.12
    return int(hint(x))


def _without_storage(x: Any) -> Any:
    if isinstance(x, _Sizes):
        dtype, shape, stride = x
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return [_without_storage(y) for y in x] if isinstance(x, list) else x
