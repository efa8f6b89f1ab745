"""Capture of a call in a CUDA graph."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Call = Callable[[], object]
_log = logging.getLogger("deltazoo")


@contextmanager
def eager_if_refused(part: str) -> Iterator[None]:
    """Warn that a part of the model stays eager if its capture in the block fails; a lack of memory is raised.

    A call that synchronises, or does something else that no graph can contain, cannot be captured.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _log.warning("%s of this model cannot be captured and stays eager: %s", part, error)


def capture(call: Call, device: torch.device, pool: Any = None, warm_ups: int = 1) -> Call:
    """Capture a call in a CUDA graph and return a function that replays it.

    The graph does not keep the tensors that the call refers to: see `capture_and_keep`.

    Args:
        device: where the call runs; it need not be the current device.
        pool: handle from `torch.cuda.graph_pool_handle`, to share memory between graphs that never run concurrently.
        warm_ups: number of calls before the capture, for compilation and for allocations of libraries.
    Raises: the exceptions of the call during capture.
    """
    current, side_stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side_stream.wait_stream(current)
    with torch.cuda.stream(side_stream):  # also makes `device` current
        for _ in range(warm_ups):
            call()
    current.wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=side_stream):
                call()
        finally:
            torch.cuda.set_stream(before)  # the context leaves the side stream current if the capture fails
    return graph.replay


def capture_and_keep(call: Call, device: torch.device, pool: Any = None, warm_ups: int = 1) -> Call:
    """Capture a call as `capture` does, and keep it as long as the returned function.

    A capture empties the cache of the allocator, so that a graph whose tensors are freed accesses unmapped memory.
    """
    return functools.partial(_replay, capture(call, device, pool, warm_ups), call)


def _replay(replay: Call, call: Call) -> None:
    replay()
